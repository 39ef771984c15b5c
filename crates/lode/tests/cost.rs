//! `lode cost` as a user runs it: what it reports, what it hands on, and how it ends when the command does not end
//! well. No time is asserted: how long anything takes is the machine's business.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const LODE: &str = env!("CARGO_BIN_EXE_lode");
const SCRIPT: &str = "dd if=/dev/zero of=/dev/null bs=1M count=200 2>/dev/null";

fn lode(args: &[&str]) -> Command {
    let mut command = Command::new(LODE);
    command.arg("cost").args(args).stdin(Stdio::null());
    // The settings of who runs the tests are not the tests'.
    for (name, _) in std::env::vars_os() {
        if OsStr::as_bytes(&name).starts_with(b"LODE_") {
            command.env_remove(name);
        }
    }
    command.env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME");
    command
}

fn run(args: &[&str]) -> Output {
    lode(args).output().unwrap()
}

/// Succeeds; gives the document, which is all that stdout has.
#[track_caller]
fn document(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("not one document: {e}: {output:?}"))
}

/// Fails with exit code 1 and a last line on stderr that says all of `says`.
#[track_caller]
fn fails(output: &Output, says: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().last().unwrap_or_default();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    for part in says {
        assert!(last.starts_with("lode: ") && last.contains(part), "no {part:?} in {last:?}");
    }
}

#[test]
fn the_document_has_every_run_with_its_parts() {
    let report =
        document(&["--runs", "2", "--idle", "0.2", "--bytes", "1M", "--json", "--", "sh", "-c", SCRIPT]);
    assert_eq!(report["command"], serde_json::json!(["sh", "-c", SCRIPT]));
    assert!(report["machine"]["cpus"].as_u64().unwrap() > 0);
    let idle = &report["idle"];
    assert!(idle["seconds"].as_f64().unwrap() >= 0.2 && idle["quiet"].is_boolean(), "{idle}");
    let rate = idle["cpu_s_per_s"].as_f64().unwrap();
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    let mut sum = 0.0;
    for run in runs {
        let number = |key: &str| run[key].as_f64().unwrap_or_else(|| panic!("no {key} in {run}"));
        let near =
            |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * (1.0 + a.abs()), "{a} is not {b} in {run}");
        assert!(number("wall_s") > 0.0 && number("own_cpu_s") > 0.0 && number("cpu_s") >= 0.0, "{run}");
        near(number("noise_s"), rate * number("wall_s"));
        near(number("net_cpu_s"), number("cpu_s") - number("noise_s"));
        near(number("elsewhere_cpu_s"), number("net_cpu_s") - number("own_cpu_s"));
        near(number("cpu_s_per_gib"), number("net_cpu_s") * 1024.0);
        near(number("processes_cpu_s_per_gib"), number("processes_cpu_s") * 1024.0);
        // By process what the command's own used is all there.
        let noise = idle["processes_cpu_s_per_s"].as_f64().unwrap() * number("wall_s");
        assert!(number("processes_cpu_s") >= number("own_cpu_s") - noise - 1e-9, "{run}");
        assert_eq!((run["bytes"].as_u64(), run["bytes_from"].as_str()), (Some(1 << 20), Some("option")));
        sum += number("cpu_s_per_gib");
    }
    let spread = &report["summary"]["cpu_s_per_gib"];
    assert!((spread["mean"].as_f64().unwrap() - sum / 2.0).abs() < 1e-6 * (1.0 + sum.abs()), "{report}");
    assert!(spread["deviation"].as_f64().unwrap() >= 0.0);
    // Either joules or the reason why there are none.
    assert_ne!(report["energy_from"].is_null(), report["energy_note"].is_null(), "{report}");
    assert_eq!(report["summary"]["joules"].is_null(), report["energy_from"].is_null(), "{report}");
}

#[test]
fn without_bytes_there_are_cpu_seconds_and_a_hint() {
    let report = document(&["--runs", "1", "--idle", "0", "--json", "--", "true"]);
    assert!(report["idle"].is_null() && report["summary"]["cpu_s_per_gib"].is_null());
    assert!(report["summary"]["net_cpu_s"]["mean"].is_number());
    assert!(report["summary"]["net_cpu_s"]["deviation"].is_null(), "one run deviates from nothing");
    assert!(report["bytes_note"].as_str().unwrap().contains("--bytes"));
}

#[test]
fn the_output_of_the_command_is_handed_on() {
    for bytes in [&["--bytes", "1M"][..], &[]] {
        let base = [&["--runs", "2", "--idle", "0"], bytes].concat();
        let table = run(&[&base[..], &["--", "echo", "said"]].concat());
        let text = String::from_utf8(table.stdout).unwrap();
        assert!(
            table.status.success() && text.starts_with("said\nsaid\n") && text.contains("\nmean "),
            "{text}"
        );
        let json = run(&[&base[..], &["--json", "--", "echo", "said"]].concat());
        serde_json::from_slice::<Value>(&json.stdout).unwrap();
        assert_eq!(String::from_utf8_lossy(&json.stderr).matches("said").count(), 2);
    }
}

#[test]
fn bytes_come_from_the_report_of_fio() {
    let said = r#"echo remark; echo '{"fio version": "fio-3.33", "jobs": [{"read": {"io_bytes": 0}, "write": {"io_bytes": 3145728}}]}'"#;
    let table = run(&["--runs", "1", "--idle", "0", "--", "sh", "-c", said]);
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(text.starts_with("remark\n") && text.contains("3 MiB in each run, as fio reports"), "{text}");
    let shown = text.matches("fio version").count();
    assert_eq!(shown, 1, "only the line that names the command has it: {text}");
}

#[test]
fn a_meter_gives_joules() {
    let file = std::env::temp_dir().join(format!("lode-cost-meter-{}", std::process::id()));
    std::fs::write(&file, "0").unwrap();
    // Ten joules more each time it is asked.
    let meter = format!("n=$(cat {0}); echo $((n + 10)) | tee {0}", file.display());
    let report =
        document(&["--runs", "2", "--idle", "0", "--bytes", "1G", "--meter", &meter, "--json", "--", "true"]);
    let refused = run(&["--idle", "0", "--meter", "echo warm", "--", "true"]);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(report["energy_from"], "meter");
    assert_eq!(report["summary"]["joules_per_gib"]["mean"], 10.0, "{report}");
    fails(&refused, &["meter", "echo warm", "not a number"]);
}

#[test]
fn the_picture_has_a_bar_per_run() {
    let file = std::env::temp_dir().join(format!("lode-cost-picture-{}.svg", std::process::id()));
    let drawn = run(&["--runs", "3", "--idle", "0", "--svg", file.to_str().unwrap(), "--", "true"]);
    let svg = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(drawn.status.success() && svg.contains("run 3") && svg.ends_with("</svg>\n"), "{svg}");
    let nowhere = run(&["--runs", "1", "--idle", "0", "--svg", "/nonexistent/a.svg", "--", "true"]);
    fails(&nowhere, &["/nonexistent/a.svg"]);
}

#[test]
fn a_command_that_fails_ends_the_measure() {
    let failed = run(&["--idle", "0", "--", "sh", "-c", "echo last words; exit 7"]);
    fails(&failed, &["run 1 of 3", "sh", "exit status: 7"]);
    assert_eq!(failed.stdout, b"last words\n", "no table, but what the command said");
    let report = r#"echo '{"fio version": "fio-3.33", "jobs": [{"error": 28}]}'; exit 1"#;
    let full = run(&["--idle", "0", "--", "sh", "-c", report]);
    assert!(String::from_utf8_lossy(&full.stdout).contains("28"), "why it failed is lost: {full:?}");
    let killed = run(&["--idle", "0", "--", "sh", "-c", "kill -9 $$"]);
    fails(&killed, &["signal: 9"]);
}

#[test]
fn what_cannot_be_run_or_counted_is_said() {
    fails(&run(&["--idle", "0", "--", "no-such-command-here"]), &["no-such-command-here", "PATH"]);
    fails(&run(&["--idle", "0", "--", "/nonexistent/it"]), &["no command /nonexistent/it"]);
    fails(&run(&["--idle", "0", "--", "/etc/passwd"]), &["/etc/passwd", "not executable"]);
    fails(&run(&["--idle", "0", "--block", "no-disk", "--", "true"]), &["no-disk", "/sys/class/block"]);
    for wrong in [
        &["--"][..],
        &["--runs", "0", "--", "true"],
        &["--idle", "-1", "--", "true"],
        &["--bytes", "0", "--", "true"],
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_signal_ends_both() {
    let script = "echo pid $$ >&2; exec sleep 60";
    let mut child = lode(&["--idle", "0", "--", "sh", "-c", script])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    let command = line.trim().strip_prefix("pid ").unwrap_or_else(|| panic!("{line:?}")).to_string();
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    let status = child.wait().unwrap();
    let mut last = String::new();
    stderr.read_line(&mut last).unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(last.contains("interrupted"), "{last:?}");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(!std::path::Path::new("/proc").join(command).exists(), "the command is still there");
}
