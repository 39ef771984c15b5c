//! `lode tune` as a user runs it, and what becomes of its profile: written whole or not at all, compared with the one
//! before, refused where it is wrong. No time and no bandwidth is asserted: how fast anything is is the machine's business.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

/// Sizes that are measured, and bins that they fall into.
const SIZES: usize = 11;
const BINS: usize = 5;

fn lode(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lode"));
    command.args(args).stdin(Stdio::null());
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

#[track_caller]
fn succeed(output: Output) -> (String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{output:?}");
    (text(output.stdout), text(output.stderr))
}

#[track_caller]
fn document(args: &[&str]) -> Value {
    let (stdout, _) = succeed(run(args));
    serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("not one document: {e}: {stdout}"))
}

/// Fails with this code and one line that says all of `says`.
#[track_caller]
fn fails(output: &Output, code: i32, says: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let last = stderr.lines().last().unwrap_or_default();
    for part in says {
        assert!(last.starts_with("lode: ") && last.contains(part), "no {part:?} in {stderr:?}");
    }
}

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        Dir::below(&std::env::temp_dir(), name)
    }

    /// In memory, where there is such a place: what is measured there waits for no disk.
    fn in_memory(name: &str) -> Dir {
        let shm = Path::new("/dev/shm");
        if shm.is_dir() { Dir::below(shm, name) } else { Dir::new(name) }
    }

    fn below(parent: &Path, name: &str) -> Dir {
        let dir = parent.join(format!("lode-tune-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).into_os_string().into_string().unwrap()
    }

    /// A new pool.
    fn pool(&self, size: &str) -> String {
        let pool = self.path("p.pool");
        succeed(run(&["mkfs", &pool, "--size", size]));
        pool
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn number(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!(number.is_finite(), "{value}");
    number
}

/// One entry of a list of objects.
#[track_caller]
fn named<'a>(list: &'a Value, key: &str, name: &str) -> &'a Value {
    let entries = list.as_array().unwrap();
    entries.iter().find(|entry| entry[key] == name).unwrap_or_else(|| panic!("no {name} in {list}"))
}

/// The text of a profile of this machine, measured once for all tests that only read it.
fn profile() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let dir = Dir::new("profile");
        let out = dir.path("profile.toml");
        succeed(run(&["tune", "--quick", "--engine", "semaphore", "--out", &out]));
        fs::read_to_string(&out).unwrap()
    })
}

#[test]
fn a_run_writes_a_profile_and_the_next_one_says_what_changed() {
    let dir = Dir::in_memory("twice");
    let pool = dir.pool("512M");
    let (out, svg) = (dir.path("a/profile.toml"), dir.path("tune.svg"));
    let before = document(&["info", &pool, "--json"]);
    let first = document(&[
        "tune",
        &pool,
        "--quick",
        "--engine",
        "delegate,emu",
        "--out",
        &out,
        "--svg",
        &svg,
        "--json",
    ]);

    let names: Vec<&str> =
        first["engines"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "delegate", "emu"]);
    assert!(number(&first["decision"]["ns"]) > 0.0 && number(&first["decision"]["aim_ns"]) == 50.0);
    assert!(first["copies"]["concurrency"].as_u64().unwrap() > 0 && first["copies"]["was"].is_null());
    let threads = if first["machine"]["cpus"] == 1 { 1 } else { 2 };
    for engine in first["engines"].as_array().unwrap() {
        let emulated = engine["name"] == "emu";
        assert_eq!(engine["emulated"], emulated);
        let sizes = engine["sizes"].as_array().unwrap();
        assert!(sizes.len() >= 2 * threads * SIZES, "{} sizes of {}", sizes.len(), engine["name"]);
        for size in sizes {
            assert!(number(&size["gib_per_s"]["median"]) > 0.0 && number(&size["gib_per_s"]["noise"]) > 0.0);
            assert!(number(&size["cpu_s_per_gib"]["median"]) > 0.0, "{size}");
            assert_eq!(size["device_cpu_s_per_gib"].is_number(), emulated, "{size}");
        }
        for row in engine["bandwidth"].as_array().unwrap() {
            assert_eq!(row["bins"].as_array().unwrap().len(), BINS);
            assert!(row["bins"][0]["was"].is_null() && row["bins"][0]["change_percent"].is_null());
        }
        let copies_at_a_time = !engine["limits"]["in_flight"].as_array().is_none_or(Vec::is_empty);
        assert_eq!(copies_at_a_time, emulated, "only devices have a limit of their own: {engine}");
    }
    let device = named(&first["engines"], "name", "emu")["sizes"].as_array().unwrap();
    assert!(
        device.iter().any(|size| number(&size["device_cpu_s_per_gib"]) > 0.0),
        "the device used no CPU time"
    );
    assert_eq!(
        (&first["profile"]["written"], &first["profile"]["path"]),
        (&true.into(), &out.as_str().into())
    );

    let picture = fs::read_to_string(&svg).unwrap();
    assert!(
        picture.starts_with("<svg ") && picture.ends_with("</svg>\n") && picture.contains("emu (emulated)")
    );
    let text = fs::read_to_string(&out).unwrap();
    assert!(text.contains("engines = [\"cpu\", \"delegate\", \"emu\"]"), "{text}");
    assert_eq!(fs::read_dir(dir.0.join("a")).unwrap().count(), 1, "nothing else is left beside it");

    // The pool is as it was, closed, and nothing is in it.
    assert_eq!(run(&["fsck", &pool]).status.code(), Some(0));
    assert_eq!(
        succeed(run(&["ls", "-a", &format!("{pool}:/")])).0,
        succeed(run(&["ls", &format!("{pool}:/")])).0
    );
    let after = document(&["info", &pool, "--json"]);
    assert_eq!(
        (&after["pool"]["state"]["clean"], &after["pool"]["uuid"]),
        (&true.into(), &before["pool"]["uuid"])
    );

    // Other engines this time: what was said of the first ones stays.
    let second = document(&["tune", &pool, "--quick", "--engine", "semaphore", "--out", &out, "--json"]);
    assert_eq!(second["profile"]["written"], true);
    assert_eq!(second["profile"]["kept"], serde_json::json!(["delegate", "emu"]));
    assert_eq!(second["profile"]["before"], written(&text));
    assert_eq!(second["copies"]["was"], first["copies"]["concurrency"]);
    let after = fs::read_to_string(&out).unwrap();
    assert!(after.contains("engines = [\"cpu\", \"semaphore\", \"delegate\", \"emu\"]"), "{after}");
    let table = |text: &str, name: &str| text.split_once(&format!("[{name}]")).unwrap().1.to_owned();
    assert_eq!(table(&after, "delegate"), table(&text, "delegate"), "what was not measured changes nothing");
    let semaphore = named(&second["engines"], "name", "semaphore");
    assert!(semaphore["limits"]["thresholds"][0]["was"].is_null(), "nobody had measured it");
    let cpu = named(&second["engines"], "name", "cpu");
    for row in cpu["bandwidth"].as_array().unwrap() {
        for bin in row["bins"].as_array().unwrap() {
            let (now, was, percent) =
                (number(&bin["gib_per_s"]["median"]), number(&bin["was"]), number(&bin["change_percent"]));
            let noise = 2.0 * number(&bin["gib_per_s"]["noise"]);
            let wanted = if (now - was).abs() > noise { (now / was - 1.0) * 100.0 } else { 0.0 };
            assert!((percent - wanted).abs() < 1e-3 || (now - was).abs() - noise < 1e-6, "{bin}");
        }
    }
}

/// When a profile says that it was written.
fn written(text: &str) -> Value {
    let line = text.lines().find_map(|line| line.strip_prefix("written = ")).unwrap();
    line.trim_matches('"').into()
}

#[test]
fn a_dry_run_says_where_the_profile_would_go() {
    let dir = Dir::new("dry");
    let place = dir.path("named.toml");
    let output =
        lode(&["tune", "--quick", "--dry-run", "--engine", "semaphore"]).env("LODE_PROFILE", &place).output();
    let (table, _) = succeed(output.unwrap());
    assert!(table.contains(&format!("not written; it would go to {place}")), "{table}");
    assert!(table.contains("a pool made for it in dram") && table.contains("emulated PM"), "{table}");
    assert!(dir.names().is_empty());
}

#[test]
fn what_cannot_be_measured_is_said() {
    let dir = Dir::new("wrong");
    let (pool, out) = (dir.pool("16M"), dir.path("profile.toml"));
    fails(&run(&["tune", &pool, "--quick", "--out", &out]), 1, &[&pool, "free", "larger pool"]);
    fails(&run(&["tune", &dir.path("none.pool"), "--out", &out]), 1, &["none.pool"]);
    fails(
        &run(&["tune", &pool, "--out", &dir.path("p.pool/profile.toml")]),
        1,
        &["p.pool/profile.toml", "--out"],
    );
    fails(&run(&["tune", &pool, "--out", dir.0.to_str().unwrap()]), 1, &["not a file"]);
    fails(&run(&["tune", &pool, "--engine", "gpu", "--out", &out]), 2, &["there is no engine 'gpu'"]);
    assert_eq!(dir.names(), ["p.pool"], "no profile, and no draft of one");
}

#[test]
fn an_interrupt_leaves_the_pool_as_it_was() {
    let dir = Dir::new("interrupt");
    let (pool, out) = (dir.pool("512M"), dir.path("profile.toml"));
    let mut child =
        lode(&["tune", &pool, "--out", &out]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // In the middle of it: the pool is mapped. (To ask the pool itself would be to hold it for a moment.)
    let maps = format!("/proc/{}/maps", child.id());
    while !fs::read_to_string(&maps).is_ok_and(|maps| maps.contains(&pool)) {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it began");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    fails(&output, 1, &["interrupted", "no profile was written"]);
    assert_eq!(dir.names(), ["p.pool"]);
    assert_eq!(document(&["info", &pool, "--json"])["pool"]["state"]["clean"], true);
    assert_eq!(run(&["fsck", &pool]).status.code(), Some(0));
}

/// What `lode info` says of a profile, in its document and in words.
fn info(pool: &str, file: &str) -> (Value, String) {
    let facts = document(&["info", pool, "--profile", file, "--json"])["profile"].clone();
    let (text, _) = succeed(run(&["info", pool, "--profile", file]));
    let line = text.lines().find(|line| line.starts_with("  profile   ")).expect("a line about the profile");
    (facts, line.to_owned())
}

#[test]
fn a_good_profile_is_used() {
    let dir = Dir::new("good");
    let (pool, file) = (dir.pool("64M"), dir.path("profile.toml"));
    fs::write(&file, profile()).unwrap();
    let (facts, line) = info(&pool, &file);
    assert_eq!((&facts["used"], &facts["path"]), (&true.into(), &file.as_str().into()));
    assert_eq!(facts["engines"], serde_json::json!(["cpu", "semaphore"]));
    assert!(
        line.contains(&file) && line.contains("for cpu, semaphore;") && line.contains("copies at a time"),
        "{line}"
    );
    let listed = lode(&["ls", &format!("{pool}:/")]).env("LODE_PROFILE", &file).output().unwrap();
    assert_eq!(succeed(listed).1, "", "nothing to say about it");

    // The user's own is found, too; and none is no fault.
    let config = dir.0.join("lode");
    fs::create_dir_all(&config).unwrap();
    let of_user = || {
        let info = lode(&["info", &pool, "--json"]).env("XDG_CONFIG_HOME", &dir.0).output().unwrap();
        serde_json::from_str::<Value>(&succeed(info).0).unwrap()["profile"].clone()
    };
    fs::write(config.join("profile.toml"), profile()).unwrap();
    assert_eq!(of_user()["used"], true);
    fs::remove_file(config.join("profile.toml")).unwrap();
    if !Path::new("/etc/lode/profile.toml").exists() {
        let facts = of_user();
        assert!(facts["path"].is_null() && facts["used"] == false && facts.get("why").is_none(), "{facts}");
        let (text, said) = succeed(run(&["info", &pool]));
        assert!(
            text.contains("  profile   none, so defaults; lode tune makes one\n") && said.is_empty(),
            "{text}"
        );
    }
}

#[test]
fn a_wrong_profile_is_refused_in_one_line_and_the_pool_opens() {
    let dir = Dir::new("refused");
    let (pool, file) = (dir.pool("64M"), dir.path("profile.toml"));
    let good = profile();
    let edit = |from: &str, to: &str| {
        let line =
            good.lines().find(|line| line.starts_with(from)).unwrap_or_else(|| panic!("no {from} in {good}"));
        good.replacen(line, to, 1).into_bytes()
    };
    for (content, says) in [
        (
            edit("cpu = ", "cpu = \"Another Processor\""),
            "made on another machine: its processor is `Another Processor`",
        ),
        (edit("cpus = ", "cpus = 7777"), "made on another machine: it has 7777 CPUs, this one "),
        (
            edit("version = ", "version = 2"),
            "its version is 2, and this program knows 1 at most: it is newer",
        ),
        (edit("concurrency = ", "concurrency = 0"), "`concurrency`: a number from 1 to 1024 is wanted"),
        (edit("concurrency = ", "concurrency = 1152921504606846976"), "`concurrency`: a number"),
        (edit("concurrency = ", "concurrency = 2\ncolour = \"red\""), "`colour` is not known"),
        (edit("engines = ", "engines = [\"cpu\", \"gpu\"]"), "there is no engine 'gpu'"),
        (good.as_bytes()[..good.len() / 2].to_vec(), ""),
        (b"\x7fELF\x02\x01\x01".to_vec(), "damaged or no profile"),
        (vec![0xff; 10], "not UTF-8"),
        (vec![b'#'; 100_000], "larger than 65536 bytes"),
        (Vec::new(), "`version` is missing"),
    ] {
        fs::write(&file, &content).unwrap();
        let (facts, line) = info(&pool, &file);
        assert_eq!((&facts["used"], &facts["path"]), (&false.into(), &file.as_str().into()), "{says}");
        assert!(facts["why"].as_str().unwrap().contains(says), "no {says:?} in {facts}");
        assert!(line.contains("is not used: ") && line.ends_with("; defaults are used"), "{line}");
        refused_once(&pool, &file, says);
    }
    fs::remove_file(&file).unwrap();
    refused_once(&pool, &file, "there is no such file");
    fs::create_dir(&file).unwrap();
    refused_once(&pool, &file, "it is not a file");
}

/// The pool opens, and one line says why the profile is not used, and what to do.
#[track_caller]
fn refused_once(pool: &str, file: &str, says: &str) {
    let listed = lode(&["ls", &format!("{pool}:/")]).env("LODE_PROFILE", file).output().unwrap();
    let (_, said) = succeed(listed);
    assert_eq!(said.lines().count(), 1, "{said}");
    for part in [
        "lode: warning: the profile ",
        file,
        " is not used: ",
        says,
        "run `lode tune`",
        "; defaults are used",
    ] {
        assert!(said.contains(part), "no {part:?} in {said:?}");
    }
}

#[test]
fn a_profile_of_other_memory_is_left_alone() {
    let dir = Dir::new("elsewhere");
    let (pool, file) = (dir.pool("64M"), dir.path("profile.toml"));
    fs::write(&file, profile().replacen("memory = [\"dram\"]", "memory = [\"dax9.9\"]", 1)).unwrap();
    let (facts, line) = info(&pool, &file);
    assert_eq!(facts["used"], false);
    assert!(line.contains("it was measured on dax9.9, and the pool lies in dram"), "{line}");
    let listed = lode(&["ls", &format!("{pool}:/")]).env("LODE_PROFILE", &file).output().unwrap();
    assert_eq!(succeed(listed).1, "", "it is a good one, for another pool");
    // Of the machine alone it is the right one.
    let machine = document(&["info", "--profile", &file, "--json"]);
    assert_eq!(machine["profile"]["used"], true);
}
