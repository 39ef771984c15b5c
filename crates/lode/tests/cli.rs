//! Drives the binary as a user would: what it prints, how it exits, and that a command which fails has
//! changed no byte of the pool.
//!
//! Each test works in a directory of its own. Expected texts are the parts that a user acts on.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const LODE: &str = env!("CARGO_BIN_EXE_lode");
const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("lode-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn command(&self, args: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(LODE);
        command.args(args).current_dir(&self.0).stdin(Stdio::null());
        // The settings of who runs the tests are not the tests'.
        for (name, _) in std::env::vars_os() {
            if name.as_bytes().starts_with(b"LODE_") {
                command.env_remove(name);
            }
        }
        command.env("HOME", &self.0).env_remove("XDG_CONFIG_HOME");
        command
    }

    fn run(&self, args: &[impl AsRef<OsStr>]) -> Ran {
        Ran::of(&mut self.command(args))
    }

    /// Succeeds in silence on stderr; gives stdout.
    #[track_caller]
    fn ok(&self, args: &[impl AsRef<OsStr>]) -> String {
        self.run(args).ok()
    }

    /// A pool of `mib` MiB.
    #[track_caller]
    fn pool(&self, name: &str, mib: u64) -> PathBuf {
        self.ok(&["mkfs", name, "--size", &format!("{mib}M")]);
        self.path(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How a run ended.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: Vec<u8>,
    err: String,
}

impl Ran {
    fn of(command: &mut Command) -> Ran {
        let output = command.output().unwrap();
        Ran {
            code: output.status.code(),
            out: output.stdout,
            err: String::from_utf8(output.stderr).expect("stderr is text"),
        }
    }

    #[track_caller]
    fn ok(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{self:?}");
        String::from_utf8(self.out).expect("stdout is text")
    }

    /// Exit code, exactly one line on stderr, and what it says.
    #[track_caller]
    fn fails(&self, code: i32, says: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.err.starts_with("lode: ") && self.err.ends_with('\n'), "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        for part in says {
            assert!(self.err.contains(part), "no {part:?} in {:?}", self.err);
        }
    }
}

/// Runs `body` and asserts that it changed no byte of `image`, nor its length.
#[track_caller]
fn unchanged<T>(image: &Path, body: impl FnOnce() -> T) -> T {
    let before = fs::read(image).unwrap();
    let result = body();
    let after = fs::read(image).unwrap();
    let differs = before.iter().zip(&after).position(|(a, b)| a != b);
    assert_eq!((before.len(), differs), (after.len(), None), "{} changed", image.display());
    result
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("not one JSON document ({e}): {text}"))
}

fn file_of(dir: &Dir, name: &str, bytes: u64) -> PathBuf {
    // Not compressible into holes: no page is zero.
    let text: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8 + 1).collect();
    dir.write(name, &text)
}

#[test]
fn usage_errors_exit_2_with_one_line() {
    let dir = Dir::new("usage");
    let cases: &[(&[&str], &str)] = &[
        (&[], "lode --help"),
        (&["frobnicate"], "frobnicate"),
        (&["mkfs"], "<POOL>"),
        (&["mkfs", ""], "empty"),
        (&["fsck", ""], "empty"),
        (&["info", ""], "empty"),
        (&["mount", "", "m"], "empty"),
        (&["mkfs", "p", "--bogus"], "--bogus"),
        (&["mkfs", "p", "--data", "fast"], "inplace"),
        (&["mkfs", "p", "--stripe", "3M"], "power of two"),
        (
            &[
                "mkfs",
                "p",
                "--label",
                "a label that is far longer than the sixty-three bytes there is room for",
            ],
            "63",
        ),
        (&["ls"], "POOL:/PATH"),
        (&["ls", "p"], "p:/"),
        (&["ls", ":/x"], "names no pool"),
        (&["cat", "./a:b"], "names no file in a pool"),
        (&["cp", "a", "b"], "no argument names a pool"),
        (&["cp", "p:/a"], "<FROM>"),
        (&["dump", "p", "minus"], "minus"),
        (&["completions", "cmd.exe"], "cmd.exe"),
        (&["bench", "--only", "nope"], "write-rand-4k"),
        (&["bench", "--rounds", "0"], "1 to 1000"),
        (&["bench", "--threads", "0"], "1 to 64"),
        (&["bench", "--peers", "zfs"], "ext4"),
        (&["crash", "--samples", "0"], "1 or more"),
        (&["--config"], "--config"),
    ];
    for (args, says) in cases {
        let ran = dir.run(args);
        ran.fails(2, &[says]);
        assert!(ran.out.is_empty(), "{args:?}");
    }
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0, "a wrong command line left something behind");
}

#[test]
fn help_and_version_are_no_failures() {
    let dir = Dir::new("help");
    assert!(dir.ok(&["--version"]).starts_with("lode "));
    let help = dir.ok(&["--help"]);
    for name in subcommands(&help) {
        assert!(dir.ok(&[&name, "--help"]).contains("Examples:"), "{name}");
    }
}

fn subcommands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    list.filter(|l| !l.starts_with("    "))
        .map(|l| l.split_whitespace().next().unwrap().to_string())
        .collect()
}

#[test]
fn man_pages_and_completions_cover_every_subcommand() {
    let dir = Dir::new("man");
    let names = subcommands(&dir.ok(&["--help"]));
    assert!(names.len() >= 12, "{names:?}");
    dir.ok(&["man", "man1"]);
    for name in &names {
        let page = fs::read_to_string(dir.path(&format!("man1/lode-{name}.1"))).unwrap();
        for section in ["NAME", "SYNOPSIS", "OPTIONS", "EXAMPLES", "\"EXIT STATUS\"", "ENVIRONMENT"] {
            assert!(page.contains(&format!(".SH {section}")), "{name} has no {section}");
        }
    }
    // Commands of commands have pages of their own.
    let mut below = subcommands(&dir.ok(&["wsp", "--help"]));
    below.retain(|name| name != "help");
    assert!(below.len() >= 8, "{below:?}");
    for name in &below {
        let page = fs::read_to_string(dir.path(&format!("man1/lode-wsp-{name}.1"))).unwrap();
        assert!(page.contains(".SH OPTIONS"), "wsp {name} has no options");
    }
    assert_eq!(fs::read_dir(dir.path("man1")).unwrap().count(), names.len() + below.len() + 1, "and lode.1");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = dir.ok(&["completions", shell]);
        for name in &names {
            assert!(text.contains(name.as_str()), "{shell} does not complete {name}");
        }
    }
}

#[test]
fn where_nobody_has_guests_a_power_failure_is_no_success() {
    let dir = Dir::new("wsp-none");
    let wsp = |words: &[&str]| dir.run(&[&["wsp", "--wsp-dir", "guests"], words].concat());
    for words in [&["suspend", "--all"][..], &["suspend", "--all", "--window", "50ms"]] {
        wsp(words).fails(1, &["guests does not exist", "/var/lib/lode/wsp", "--wsp-dir"]);
    }
    fs::create_dir(dir.path("guests")).unwrap();
    assert!(wsp(&["suspend", "--all", "--window", "50ms"]).ok().contains("no guest runs in"));
    assert_eq!(wsp(&["resume", "--all", "--boot-after", "1"]).ok(), "");
    wsp(&["daemon", "--boot-after", "1"]).fails(2, &["--resume"]);
    dir.run(&["wsp"]).fails(2, &["a command is missing; see lode wsp --help"]);
    wsp(&["start"]).fails(2, &["see lode wsp start --help"]);
    // A start that was refused leaves nothing.
    fs::create_dir(dir.path("media")).unwrap();
    let start = |size, media, more: &[&str]| {
        wsp(&[&["start", "one", "--ram", size, "--media", media, "--accel", "tcg"], more].concat())
    };
    wsp(&["start", "one"]).fails(2, &["give --ram and --media"]);
    start("64M", "none/memory", &[]).fails(1, &["none/memory"]);
    // Where no file is so large, and where any may be.
    start("8388606T", "media", &[]).fails(1, &["guest one: ", "media/one.wsp/ram"]);
    start("2M", "media", &["--qemu", "./none"])
        .fails(1, &["lode: guest one: cannot start ./none", "install QEMU"]);
    start("2M", "media", &["--qemu", "/bin/false"]).fails(1, &["guest one: /bin/false did not start"]);
    for left in ["guests", "media"] {
        assert_eq!(fs::read_dir(dir.path(left)).unwrap().count(), 0, "in {left}");
    }
    for words in [&["suspend", "one", "two"], &["resume", "one", "two"]] {
        let ran = wsp(words);
        assert!(ran.code == Some(1) && ran.err.lines().count() == 2, "{ran:?}");
        assert!(ran.err.contains("no guest one") && ran.err.contains("no guest two"), "{ran:?}");
    }
}

#[test]
fn what_is_written_for_people_overwrites_no_pool() {
    let dir = Dir::new("outputs");
    dir.ok(&["mkfs", "p,r", "--size", "8M", "--stripe", "64K"]);
    let heap = ["run", "--heap-stats", "r", "--heap", "p", "--", "true"];
    for (pool, args) in [
        ("p", &["bench", "--smoke", "--svg", "p"][..]),
        ("r", &["bench", "--smoke", "--breakdown", "--svg", "r"]),
        ("p", &["cost", "--runs", "1", "--idle", "0", "--svg", "p", "--", "true"]),
        ("r", &["tune", "--quick", "--svg", "r"]),
        ("p", &["tune", "--quick", "--out", "p"]),
    ] {
        let ran = unchanged(&dir.path(pool), || dir.run(args));
        ran.fails(1, &[&format!("{pool} holds a pool"), "name another file"]);
    }
    for pool in ["p", "r"] {
        unchanged(&dir.path(pool), || assert_ne!(dir.run(&heap).code, Some(0)));
    }
}

#[test]
fn a_picture_that_cannot_be_drawn_costs_no_measure() {
    let dir = Dir::new("picture");
    // Before anything is measured: these would take minutes.
    for args in [
        &["bench", "--rounds", "1000", "--svg", "none/x.svg"][..],
        &["bench", "--breakdown", "--rounds", "1000", "--svg", "."],
        &["cost", "--idle", "600", "--svg", "none/x.svg", "--", "true"],
        &["tune", "--svg", "none/x.svg"],
    ] {
        dir.run(args).fails(1, &["cannot write the picture"]);
    }
    // After it: what was measured is told all the same.
    let ran = dir.run(&["bench", "--smoke", "--only", "uthreads", "--json", "--svg", "x.svg"]);
    ran.fails(1, &["no picture for x.svg"]);
    assert!(!serde_json::from_slice::<Value>(&ran.out).unwrap()["rows"].as_array().unwrap().is_empty());
    let ran = dir.run(&["cost", "--runs", "1", "--idle", "0", "--svg", "/dev/full", "--", "true"]);
    ran.fails(1, &["cannot write the picture /dev/full: No space left on device\n"]);
    assert!(String::from_utf8(ran.out).unwrap().contains("wall s"));
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0);
}

#[test]
fn a_bench_that_is_interrupted_leaves_nothing() {
    let dir = Dir::new("bench-interrupted");
    fs::create_dir(dir.path("tmp")).unwrap();
    let args = ["bench", "--quick", "--rounds", "1000", "--only", "data", "--pool", "p"];
    let mut child = dir.command(&args).env("TMPDIR", dir.path("tmp")).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    // The second one is made when the first one is in use.
    while !dir.path("p.limit").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        assert!(begun.elapsed() < Duration::from_secs(60), "it made no pools");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let shared = format!("/dev/shm/lode-bench-{}", child.id());
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert_eq!(said, "lode: interrupted; nothing is reported of a bench that did not end\n");
    let left: Vec<_> = fs::read_dir(&dir.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["tmp"]);
    assert_eq!(fs::read_dir(dir.path("tmp")).unwrap().count(), 0);
    assert!(!Path::new(&shared).exists());
}

#[test]
fn words_that_are_no_text_are_a_usage_error() {
    let dir = Dir::new("no-text");
    for line in [&["\u{ff}"][..], &["mkfs", "\u{ff}", "--size", "x"], &["mkfs", "p", "--label", "\u{ff}"]] {
        let args: Vec<OsString> =
            line.iter().map(|w| OsString::from_vec(w.chars().map(|c| c as u8).collect())).collect();
        dir.run(&args).fails(2, &["see lode"]);
    }
    // Where a value came from is known whatever stands before the command.
    dir.write("c.toml", b"[mkfs]\nsize = \"4X\"\n");
    dir.run(&["--config", "c.toml", "mkfs", "p"]).fails(2, &["(from c.toml)", "see lode mkfs --help"]);
    let odd = OsString::from_vec(b"--data=\xff".to_vec());
    let line = [OsString::from("mkfs"), "p".into(), "--config".into(), "c.toml".into(), odd];
    dir.run(&line).fails(2, &["see lode mkfs --help"]);
}

#[test]
fn mkfs_does_not_wait_for_whoever_writes_to_a_pipe() {
    let dir = Dir::new("mkfs-pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.path("fifo"), fifo, mode, 0).unwrap();
    for more in [&[][..], &["--size", "16M"], &["--force"]] {
        dir.run(&[&["mkfs", "fifo"], more].concat()).fails(1, &["fifo is neither file nor device"]);
    }
}

/// Runs a command in a shell that has set a limit.
fn limited(dir: &Dir, limit: &str, args: &[&str]) -> Ran {
    let mut shell = dir.command(args);
    let mut command = Command::new("bash");
    command.args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")]).arg(shell.get_program());
    command.args(shell.get_args()).current_dir(&dir.0).stdin(Stdio::null());
    for (name, value) in shell.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    shell.stdin(Stdio::null());
    Ran::of(&mut command)
}

#[test]
fn a_limit_of_file_sizes_ends_a_copy_not_the_command() {
    let dir = Dir::new("file-size");
    dir.pool("p", 16);
    file_of(&dir, "big", 4 * MIB);
    dir.ok(&["cp", "big", "p:/big"]);
    // In KiB.
    let ran = limited(&dir, "ulimit -f 1024", &["cp", "p:/big", "copy"]);
    ran.fails(1, &["copy", "File too large", "incomplete copy was removed"]);
    assert!(!dir.path("copy").exists());
    limited(&dir, "ulimit -f 1024", &["mkfs", "q", "--size", "8M"]).fails(1, &["q", "File too large"]);
    assert!(!dir.path("q").exists());
    // Programs that it executes end as always.
    let writes = ["cost", "--runs", "1", "--idle", "0", "--bytes", "1", "--", "cp", "big", "copy"];
    limited(&dir, "ulimit -f 1024", &writes).fails(1, &["signal: 25"]);
}

#[test]
fn mkfs_takes_memory_and_refuses_links_that_lead_nowhere() {
    let dir = Dir::new("mkfs-odd");
    symlink("none", dir.path("link")).unwrap();
    for more in [&[][..], &["--size", "16M"]] {
        let ran = dir.run(&[&["mkfs", "link"], more].concat());
        ran.fails(1, &["link is a symbolic link that leads nowhere: remove it"]);
    }
    let memory = rustix::fs::memfd_create("pool", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let root = format!("{path}:/");
    assert!(dir.ok(&["mkfs", &path, "--size", "16M"]).contains("16 MiB"));
    dir.ok(&["cp", "/proc/self/status", &root]);
    assert_eq!(dir.ok(&["ls", &root]), "status\n");
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
    dir.run(&["rm", &format!("{root}status")]).fails(1, &["read-only"]);
}

#[test]
fn absurd_sizes_are_refused() {
    let dir = Dir::new("sizes");
    for (size, code, says) in [
        ("0", 2, "at least 1 MiB"),
        ("4K", 2, "at least 1 MiB"),
        ("9T", 2, "at most 8 TiB"),
        ("16777216T", 2, "larger than any pool"),
        ("99999999999999999999", 2, "larger than any pool"),
        ("4X", 2, "not a size"),
        ("-1", 2, "-1"),
        ("", 2, "--size"),
        ("8T", 1, "does not fit"),
    ] {
        dir.run(&["mkfs", "p", &format!("--size={size}")]).fails(code, &[says]);
        assert!(!dir.path("p").exists(), "--size={size} left a file behind");
    }
}

#[test]
fn mkfs_makes_a_pool_of_the_size_asked_for() {
    let dir = Dir::new("mkfs");
    let said = dir.ok(&["mkfs", "p", "--size", "16M", "--label", "demo"]);
    assert_eq!(said.lines().count(), 1);
    assert!(said.starts_with("made p: 16 MiB, data=cow, domain "), "{said}");
    assert_eq!(fs::metadata(dir.path("p")).unwrap().len(), 16 * MIB);
    let info = json(&dir.ok(&["info", "p", "--json"]));
    assert_eq!(info["pool"]["label"], "demo");
    assert_eq!(info["pool"]["bytes"], 16 * MIB);
    assert_eq!(info["pool"]["state"]["clean"], true);
    assert_eq!(info["pool"]["damage"], Value::Array(vec![]));
}

#[test]
fn mkfs_overwrites_only_with_force() {
    let dir = Dir::new("force");
    let pool = dir.pool("p", 16);
    let foreign = file_of(&dir, "foreign", 2 * MIB);
    // A disk image that begins with zeros: the data stands far inside.
    let image = dir.path("image");
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    File::options().write(true).open(&image).unwrap().write_all_at(b"data", 40 * MIB).unwrap();
    for (path, says) in [(&pool, "pool already"), (&foreign, "other data"), (&image, "data at byte 41943040")]
    {
        let name = path.file_name().unwrap();
        unchanged(path, || dir.run(&[OsStr::new("mkfs"), name]).fails(1, &["--force", says]));
        let with_size = [OsStr::new("mkfs"), name, OsStr::new("--size"), OsStr::new("128M")];
        unchanged(path, || dir.run(&with_size).fails(1, &["--force"]));
        dir.ok(&[OsStr::new("mkfs"), name, OsStr::new("--force")]);
        let root = [name.as_bytes(), b":/"].concat();
        assert_eq!(dir.ok(&[OsStr::new("ls"), OsStr::from_bytes(&root)]), "");
    }
}

#[test]
fn mkfs_of_a_sparse_tebibyte_is_quick_and_stays_sparse() {
    let dir = Dir::new("sparse");
    let path = dir.path("p");
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let begun = Instant::now();
    let said = dir.ok(&["mkfs", "p"]);
    assert!(said.contains("1 TiB"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let held = fs::metadata(&path).unwrap().blocks() * 512;
    assert!(held < 64 * MIB, "{held} bytes allocated");
    dir.ok(&["info", "p"]);
}

#[test]
fn what_is_no_pool_is_told() {
    let dir = Dir::new("wrong");
    fs::create_dir(dir.path("directory")).unwrap();
    dir.write("empty", b"");
    file_of(&dir, "foreign", MIB);
    dir.write("short", b"#!/bin/sh\n");
    let missing = ["missing", "No such file"];
    let cases = [
        missing,
        ["directory", "is a directory"],
        ["empty", "is empty"],
        ["foreign", "no Lodestone pool"],
        ["short", "too short"],
        ["/dev/null", "character device"],
        ["empty/below", "Not a directory"],
    ];
    for [name, says] in cases {
        for ran in each_command(&dir, name) {
            ran.fails(1, &[name, says]);
            assert!(ran.out.is_empty());
        }
    }
    assert!(!dir.path("missing").exists());
    dir.run(&["mkfs", "directory", "--force"]).fails(1, &["directory", "is a directory"]);
    dir.run(&["mkfs", "/dev/lode-no-such-device"]).fails(1, &["devices are not made"]);
}

#[test]
fn a_name_that_is_no_text_is_told_whole_on_one_line() {
    let dir = Dir::new("no-text");
    let name = OsStr::from_bytes(b"no\ntext\xff");
    let told = |says: &str| {
        dir.run(&[OsStr::new("info"), name]).fails(1, &["$'", "no\\ntext\\377'", says]);
    };
    told("No such file");
    fs::write(dir.0.join(name), b"").unwrap();
    told("is empty");
    fs::write(dir.0.join(name), [7; MIB as usize]).unwrap();
    told("no Lodestone pool");
}

/// Every command that takes an existing pool, on one that it must refuse.
fn each_command(dir: &Dir, pool: &str) -> Vec<Ran> {
    let file = dir.write("host-file", b"x");
    let file = file.to_str().unwrap().to_string();
    let path = |p: &str| format!("{pool}:{p}");
    let lines: Vec<Vec<String>> = vec![
        vec!["info".into(), pool.into()],
        vec!["info".into(), "--json".into(), pool.into()],
        vec!["dump".into(), pool.into()],
        vec!["ls".into(), path("/")],
        vec!["ls".into(), "--json".into(), path("/")],
        vec!["cat".into(), path("/a")],
        vec!["cp".into(), file, path("/a")],
        vec!["cp".into(), path("/a"), "host-copy".into()],
        vec!["rm".into(), path("/a")],
        vec!["rm".into(), "-rf".into(), path("/a")],
        vec!["mount".into(), pool.into(), "mount-point".into()],
        vec!["tune".into(), "--quick".into(), "--out".into(), "profile.toml".into(), pool.into()],
    ];
    fs::create_dir_all(dir.path("mount-point")).unwrap();
    let ran = lines.iter().map(|line| dir.run(line)).collect();
    // What was mounted after all would outlive the test.
    dir.run(&["umount", "mount-point"]);
    let left = fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let left: Vec<_> = left.filter(|name| name.contains("host-copy") || name.contains("profile")).collect();
    assert!(left.is_empty(), "commands on {pool} left {left:?} behind");
    ran
}

/// A check that cannot be made, and a repair: both say why, and have a code of their own.
#[track_caller]
fn not_checked(dir: &Dir, pool: &str, says: &[&str]) {
    for args in [&["fsck", pool][..], &["fsck", pool, "--repair"], &["fsck", pool, "--json"]] {
        let ran = unchanged(&dir.path(pool), || dir.run(args));
        ran.fails(8, &[&[pool], says].concat());
        if args.contains(&"--json") {
            assert_eq!(json(std::str::from_utf8(&ran.out).unwrap())["result"], "not-checked");
        } else {
            assert!(ran.out.is_empty(), "{ran:?}");
        }
    }
}

#[test]
fn damaged_images_are_refused_and_stay_as_they_are() {
    let dir = Dir::new("damaged");
    let good = dir.pool("good", 16);
    let variant = |name: &str, change: &dyn Fn(&File)| {
        let path = dir.path(name);
        fs::copy(&good, &path).unwrap();
        change(&File::options().read(true).write(true).open(&path).unwrap());
        path
    };
    let last = 16 * MIB / BLOCK - 1;
    let flip = |file: &File, at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    };
    let newer = |file: &File, block: u64| file.write_all_at(&99u32.to_le_bytes(), block * BLOCK + 8).unwrap();
    let on_both = |change: &dyn Fn(u64)| [1, last].into_iter().for_each(change);
    type Change<'a> = &'a dyn Fn(&File);
    // What is wrong, and what to do; no name says any of it.
    let cases: [(&str, Change, [&str; 2]); 5] = [
        ("a", &|f| flip(f, 40), ["label of", "lode fsck says whether it can be written again"]),
        ("b", &|f| f.set_len(8 * MIB).unwrap(), ["the file was cut", "restore it from a copy"]),
        (
            "c",
            &|f| on_both(&|b| flip(f, b * BLOCK + 60)),
            ["both copies of the superblock are damaged", "restore the pool from a backup"],
        ),
        ("d", &|f| on_both(&|b| newer(f, b)), ["has format version 99", "use a newer one"]),
        (
            "e",
            &|f| on_both(&|b| f.write_all_at(&[7; 4096], b * BLOCK).unwrap()),
            ["neither copy of the superblock is there", "restore the pool from a backup"],
        ),
    ];
    for (name, change, says) in cases {
        let name = &format!("image-{name}");
        let image = variant(name, change);
        for ran in unchanged(&image, || each_command(&dir, name)) {
            ran.fails(1, &[&[name.as_str()], &says[..]].concat());
            assert!(ran.out.is_empty(), "{ran:?}");
        }
        // The label alone can be had from elsewhere.
        if says[0] == "label of" {
            let ran = unchanged(&image, || dir.run(&["fsck", name]));
            assert_eq!(ran.code, Some(4), "{ran:?}");
            assert!(String::from_utf8(ran.out).unwrap().contains("lode fsck --repair mends it"));
        } else {
            not_checked(&dir, name, &says);
        }
    }
}

#[test]
fn a_label_of_a_later_version_is_refused() {
    let dir = Dir::new("newer-label");
    let image = dir.pool("p", 16);
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut label = [0; BLOCK as usize];
    file.read_exact_at(&mut label, 0).unwrap();
    label[8..12].copy_from_slice(&9u32.to_le_bytes());
    label[12..16].fill(0);
    let crc = lodestone::media::crc32c(&label, 0);
    label[12..16].copy_from_slice(&crc.to_le_bytes());
    file.write_all_at(&label, 0).unwrap();
    for ran in unchanged(&image, || each_command(&dir, "p")) {
        ran.fails(1, &["p", "version 9", "newer Lodestone"]);
    }
    not_checked(&dir, "p", &["version 9", "use a newer Lodestone"]);
}

#[test]
fn one_good_superblock_is_enough() {
    let dir = Dir::new("one-copy");
    let last = 16 * MIB / BLOCK - 1;
    for (name, block) in [("first", 1), ("second", last)] {
        let image = dir.pool(name, 16);
        let root = format!("{name}:/");
        dir.ok(&["cp", "/proc/self/status", &root]);
        File::options().write(true).open(&image).unwrap().write_all_at(&[0xa5; 64], block * BLOCK).unwrap();
        unchanged(&image, || {
            let info = dir.ok(&["info", name]);
            assert!(info.contains(&format!("the {name} copy of the superblock (block {block})")), "{info}");
            let damage = &json(&dir.ok(&["info", "--json", name]))["pool"]["damage"];
            assert_eq!(damage.as_array().unwrap().len(), 1, "{damage}");
            // A pool that is used in this state says so, and works.
            let ls = dir.run(&["ls", &root]);
            assert_eq!((ls.code, ls.out.as_slice()), (Some(0), &b"status\n"[..]));
            assert!(
                ls.err.starts_with(&format!("lode: warning: the {name} copy of the superblock")),
                "{ls:?}"
            );
        });
        // The next change mends it.
        assert_eq!(dir.run(&["rm", &format!("{name}:/status")]).code, Some(0));
        assert_eq!(dir.ok(&["ls", &root]), "");
        assert_eq!(json(&dir.ok(&["info", "--json", name]))["pool"]["damage"], Value::Array(vec![]));
    }
}

#[test]
fn a_busy_pool_names_who_has_it() {
    let dir = Dir::new("busy");
    let image = dir.pool("p", 16);
    let file = File::open(&image).unwrap();
    rustix::fs::flock(file.as_fd(), rustix::fs::FlockOperation::LockExclusive).unwrap();
    let pid = std::process::id().to_string();
    unchanged(&image, || {
        let commands = each_command(&dir, "p");
        // Info is the command that tells what is going on: it works.
        for ran in commands.iter().filter(|r| r.code != Some(0)) {
            ran.fails(1, &["p", "in use by", &pid]);
        }
        assert_eq!(commands.iter().filter(|r| r.code == Some(0)).count(), 2);
        dir.run(&["mkfs", "p", "--force"]).fails(1, &["in use by", &pid]);
        let info = json(&dir.ok(&["info", "p", "--json"]));
        assert!(info["pool"]["in_use"].as_str().unwrap().contains(&pid), "{info}");
        assert_eq!(info["pool"]["bytes"], 16 * MIB);
        assert!(dir.ok(&["info", "p"]).contains(&format!("in use by process {pid}")));
    });
    drop(file);
    dir.ok(&["ls", "p:/"]);
}

#[test]
fn readers_share_a_pool() {
    let dir = Dir::new("readers");
    let image = dir.pool("p", 16);
    let file = File::open(&image).unwrap();
    rustix::fs::flock(file.as_fd(), rustix::fs::FlockOperation::LockShared).unwrap();
    unchanged(&image, || dir.ok(&["ls", "p:/"]));
    dir.run(&["rm", "p:/x"]).fails(1, &["in use"]);
}

/// As an unprivileged user, because root may write to everything.
#[test]
fn a_pool_that_may_not_be_written_can_be_read() {
    let dir = Dir::new("read-only");
    let image = dir.pool("p", 16);
    dir.ok(&["cp", "/proc/self/status", "p:/file"]);
    fs::set_permissions(&image, PermissionsExt::from_mode(0o444)).unwrap();
    fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o755)).unwrap();
    let binary = dir.path("lode");
    fs::copy(LODE, &binary).unwrap();
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(args).current_dir(&dir.0).env("HOME", &dir.0).stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        Ran::of(&mut command)
    };
    unchanged(&image, || {
        assert_eq!(as_nobody(&["ls", "p:/"]).ok(), "file\n");
        as_nobody(&["info", "p"]).ok();
        for args in
            [&["rm", "p:/file"][..], &["cp", "/proc/self/status", "p:/other"], &["mkfs", "p", "--force"]]
        {
            as_nobody(args).fails(1, &["p", "Permission denied"]);
        }
        let advice = "run as its owner or root, or open it read-only (mount -o ro, ls, cat)";
        as_nobody(&["rm", "p:/file"]).fails(1, &[advice]);
    });
    fs::set_permissions(&image, PermissionsExt::from_mode(0o000)).unwrap();
    if rustix::process::geteuid().is_root() {
        as_nobody(&["ls", "p:/"]).fails(1, &["p", "Permission denied"]);
    }
}

#[test]
fn files_go_in_and_come_out() {
    let dir = Dir::new("round-trip");
    dir.pool("p", 64);
    let file = file_of(&dir, "file", 3 * MIB + 17);
    dir.ok(&["cp", "file", "p:/"]);
    dir.ok(&["cp", "file", "./p:/other"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "file\nother\n");
    dir.ok(&["cp", "p:/other", "back"]);
    assert_eq!(fs::read(dir.path("back")).unwrap(), fs::read(&file).unwrap());
    let cat = dir.run(&["cat", "p:/file", "p:/other"]);
    assert_eq!(cat.out, [fs::read(&file).unwrap(), fs::read(&file).unwrap()].concat());
    // Over a file that is longer.
    dir.write("short", b"short");
    dir.ok(&["cp", "short", "p:/file"]);
    assert_eq!(dir.ok(&["cat", "p:/file"]), "short");
    dir.ok(&["cp", "p:/other", "p:/third"]);
    assert_eq!(dir.run(&["cat", "p:/third"]).out, fs::read(&file).unwrap());
    dir.ok(&["rm", "p:/file", "p:/other", "p:/third"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "");
}

#[test]
fn names_are_taken_by_the_rule() {
    let dir = Dir::new("rule");
    dir.pool("p", 16);
    dir.write("a:b", b"colon");
    dir.ok(&["cp", "a:b", "p:/x"]);
    dir.ok(&["cp", "./a:b", "p:/y"]);
    assert_eq!(dir.ok(&["cat", "p:/x", "p:/y"]), "coloncolon");
    // A host directory whose name ends in a colon needs the backslash.
    fs::create_dir(dir.path("d:")).unwrap();
    dir.write("d:/file", b"inside");
    dir.run(&["cp", "d:/file", "p:/z"]).fails(1, &["d", "No such file"]);
    dir.ok(&["cp", "d\\:/file", "p:/z"]);
    assert_eq!(dir.ok(&["cat", "p:/z"]), "inside");
    // A pool with a colon in its name, and a colon in a path inside.
    dir.ok(&["mkfs", "q:", "--size", "16M"]);
    dir.ok(&["cp", "a:b", "q::/m:n"]);
    assert_eq!(dir.ok(&["cat", "q::/m:n"]), "colon");
}

#[test]
fn names_that_are_no_text_are_quoted() {
    let dir = Dir::new("names");
    dir.pool("p", 16);
    let names: [&[u8]; 5] = [b"a\nb", b"bad\xffutf8", "ok \u{e4}".as_bytes(), b"$'trap'", b"-rf"];
    fs::create_dir(dir.path("in")).unwrap();
    for name in names {
        fs::write(dir.path("in").join(OsStr::from_bytes(name)), b"").unwrap();
    }
    dir.ok(&["cp", "-r", "in", "p:/"]);
    let shown = dir.ok(&["ls", "p:/in"]);
    assert_eq!(shown, "$'$\\'trap\\''\n-rf\n$'a\\nb'\n$'bad\\377utf8'\nok \u{e4}\n");
    let listed = json(&dir.ok(&["ls", "--json", "p:/in"]));
    let entries = listed["listings"][0]["entries"].as_array().unwrap();
    assert_eq!(entries.len(), names.len());
    let hex: Vec<_> = entries.iter().filter_map(|e| e["name_hex"].as_str()).collect();
    assert_eq!(hex, ["626164ff75746638"]);
    symlink(OsStr::from_bytes(b"to\xff"), dir.path("link")).unwrap();
    dir.ok(&["cp", "-a", "link", "p:/in/link"]);
    dir.ok(&["cp", "-r", "in", "p:/bad"]);
    let odd = [OsString::from("ls"), "--json".into(), OsString::from_vec(b"p:/in/bad\xffutf8".to_vec())];
    let listed = json(&dir.ok(&odd));
    assert_eq!(listed["listings"][0]["path_hex"], "2f696e2f626164ff75746638");
    let listed = json(&dir.ok(&["ls", "--json", "-l", "p:/in/link"]));
    assert_eq!(listed["listings"][0]["entries"][0]["target_hex"], "746fff");
    assert!(listed["listings"][0].get("path_hex").is_none());
    dir.ok(&["rm", "-r", "p:/bad", "p:/in/link"]);
    // Pools, too, have such names: documents have them as they are.
    let none = serde_json::Value::Null;
    for (name, text, hex) in [(&b"a\nb"[..], "a\nb", none), (b"c\xffd", "c\u{fffd}d", "63ff64".into())] {
        let pool = OsString::from_vec(name.to_vec());
        let on_it = |args: &[&str]| {
            dir.ok(&args.iter().map(OsString::from).chain([pool.clone()]).collect::<Vec<OsString>>())
        };
        on_it(&["mkfs", "--size", "16M"]);
        let about = json(&on_it(&["info", "--json"]));
        assert_eq!((&about["pool"]["path"], &about["pool"]["path_hex"]), (&text.into(), &hex));
        let checked = json(&on_it(&["fsck", "--json"]));
        assert_eq!((&checked["pool"], &checked["pool_hex"]), (&text.into(), &hex));
    }
    // An error that names such a file is still one line.
    let ran = dir.run(&[OsString::from("cat"), OsString::from_vec(b"p:/no\nsuch\xff".to_vec())]);
    ran.fails(1, &["$'p:/no\\nsuch\\377'"]);
    // Back to the host the names are the same bytes.
    dir.ok(&["cp", "-r", "p:/in", "out"]);
    let mut back: Vec<_> = fs::read_dir(dir.path("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
    back.sort();
    let mut expected: Vec<_> = names.iter().map(|n| OsStr::from_bytes(n).to_os_string()).collect();
    expected.sort();
    assert_eq!(back, expected);
}

/// Everything that -a keeps, as text.
fn fingerprint(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut waiting = vec![root.to_path_buf()];
    while let Some(path) = waiting.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let content = if meta.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            String::new()
        } else if meta.is_symlink() {
            fs::read_link(&path).unwrap().display().to_string()
        } else if meta.is_file() {
            format!(
                "{} bytes, crc {:08x}",
                meta.len(),
                lodestone::media::crc32c(&fs::read(&path).unwrap(), 0)
            )
        } else {
            "special".to_string()
        };
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        let mut value = [0; 64];
        let xattr = rustix::fs::lgetxattr(&path, "user.note", &mut value).map(|n| value[..n].to_vec()).ok();
        let (mtime, nsec) = (meta.mtime(), meta.mtime_nsec());
        let owner = (meta.uid(), meta.gid());
        lines.push(format!(
            "{name}: mode {:o} links {links} owner {owner:?} mtime {mtime}.{nsec} xattr {xattr:?} {content}",
            meta.mode()
        ));
    }
    lines.sort();
    lines
}

fn rich_tree(dir: &Dir) -> PathBuf {
    let root = dir.path("tree");
    fs::create_dir_all(root.join("sub/deep")).unwrap();
    fs::write(root.join("sub/one"), b"one").unwrap();
    fs::hard_link(root.join("sub/one"), root.join("sub/deep/two")).unwrap();
    symlink("../nowhere", root.join("sub/dangling")).unwrap();
    symlink("sub", root.join("link-to-dir")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        root.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o640),
        0,
    )
    .unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.set_len(40 * MIB).unwrap();
    sparse.write_all_at(b"middle", 20 * MIB).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(root.join("sub/one"), "user.note", b"kept", flags).unwrap();
    fs::set_permissions(root.join("sub/one"), PermissionsExt::from_mode(0o4750)).unwrap();
    fs::set_permissions(root.join("sub/deep"), PermissionsExt::from_mode(0o555)).unwrap();
    let old = std::time::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    for name in ["sub/one", "sparse", "sub/deep", "sub"] {
        File::open(root.join(name)).unwrap().set_modified(old).unwrap();
    }
    root
}

#[test]
fn archives_keep_everything() {
    let dir = Dir::new("archive");
    dir.pool("p", 32);
    dir.pool("q", 32);
    let tree = rich_tree(&dir);
    dir.ok(&["cp", "-a", "tree", "p:/tree"]);
    let image = dir.path("p");
    unchanged(&image, || dir.ok(&["cp", "-a", "p:/tree", "q:/"]));
    dir.ok(&["cp", "-a", "q:/tree", "back"]);
    assert_eq!(fingerprint(&dir.path("back")), fingerprint(&tree));
    let held = fs::metadata(dir.path("back/sparse")).unwrap().blocks() * 512;
    assert!(held < MIB, "the holes of a sparse file were filled: {held} bytes");
    let listed = json(&dir.ok(&["ls", "--json", "p:/tree"]));
    let sparse = listed["listings"][0]["entries"].as_array().unwrap().iter().find(|e| e["name"] == "sparse");
    let allocated = sparse.unwrap()["allocated"].as_u64().unwrap();
    assert!(allocated <= 2 * BLOCK, "the holes were filled in the pool: {allocated} bytes");
}

/// Holes of a file are zeros for whoever keeps none.
#[test]
fn a_sparse_file_goes_whole_into_what_has_no_holes() {
    let dir = Dir::new("no-holes");
    dir.pool("p", 16);
    let sparse = File::create(dir.path("sparse")).unwrap();
    sparse.set_len(4 * MIB + 77).unwrap();
    sparse.write_all_at(b"first", MIB).unwrap();
    sparse.write_all_at(b"second", 3 * MIB).unwrap();
    let whole = fs::read(dir.path("sparse")).unwrap();
    dir.ok(&["cp", "sparse", "p:/sparse"]);
    let ran = dir.run(&["cp", "p:/sparse", "/dev/stdout"]);
    assert_eq!((ran.code, ran.err.as_str(), ran.out == whole), (Some(0), "", true));
    assert!(dir.run(&["cat", "p:/sparse"]).out == whole);
    let fifo = dir.path("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let reader = std::thread::spawn(move || fs::read(fifo).unwrap());
    dir.ok(&["cp", "p:/sparse", "fifo"]);
    assert!(reader.join().unwrap() == whole);
    dir.ok(&["cp", "p:/sparse", "/dev/null"]);
    // A block device keeps what is not written over.
    let disk = dir.write("disk", &vec![0xa5; 5 * MIB as usize]);
    let made = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else {
        return println!("SKIPPED: a sparse file on a block device: no loop device can be made");
    };
    let device = String::from_utf8(made.stdout).unwrap();
    let ran = dir.run(&["cp", "p:/sparse", device.trim()]);
    let held = fs::read(device.trim());
    assert!(Command::new("losetup").args(["--detach", device.trim()]).status().unwrap().success());
    let held = held.unwrap();
    ran.ok();
    let (begins, rest) = held.split_at(whole.len());
    assert!(begins == whole && rest.iter().all(|&byte| byte == 0xa5));
}

#[test]
fn a_directory_that_nobody_may_write_is_copied_with_its_mode() {
    let dir = Dir::new("read-only-dir");
    dir.pool("p", 16);
    fs::create_dir_all(dir.path("d/e")).unwrap();
    dir.write("d/e/file", b"x");
    for name in ["d/e", "d"] {
        fs::set_permissions(dir.path(name), PermissionsExt::from_mode(0o555)).unwrap();
    }
    dir.ok(&["cp", "-r", "d", "p:/d"]);
    dir.ok(&["cp", "-r", "p:/d", "back"]);
    let listed = dir.ok(&["ls", "-l", "p:/", "p:/d"]);
    assert_eq!(listed.lines().filter(|line| line.starts_with("dr-xr-xr-x ")).count(), 2, "{listed}");
    for name in ["back", "back/e"] {
        assert_eq!(fs::metadata(dir.path(name)).unwrap().mode() & 0o7777, 0o555);
    }
    assert_eq!(fs::read(dir.path("back/e/file")).unwrap(), b"x");
    // One that was there stays as it is.
    fs::create_dir(dir.path("there")).unwrap();
    dir.ok(&["cp", "-r", "p:/d/.", "there"]);
    assert_eq!(fs::metadata(dir.path("there")).unwrap().mode() & 0o7777, 0o755);
    for name in ["d", "d/e", "back", "back/e", "there/e"] {
        fs::set_permissions(dir.path(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
}

/// As an unprivileged user, because root may write to everything.
#[test]
fn archives_keep_xattrs_of_what_nobody_may_write() {
    let dir = Dir::new("read-only-xattr");
    let pool = dir.pool("p", 16);
    let flags = rustix::fs::XattrFlags::empty();
    let file = dir.write("file", b"x");
    rustix::fs::lsetxattr(&file, "user.note", b"kept", flags).unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).unwrap();
    dir.ok(&["cp", "-a", "file", "p:/"]);
    fs::set_permissions(&pool, PermissionsExt::from_mode(0o644)).unwrap();
    let to = dir.path("to");
    fs::create_dir(&to).unwrap();
    fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o755)).unwrap();
    let binary = dir.path("lode");
    fs::copy(LODE, &binary).unwrap();
    let mut command = Command::new(&binary);
    command.args(["cp", "-a", "p:/file", "to"]).current_dir(&dir.0).env("HOME", &dir.0).stdin(Stdio::null());
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&to, Some(65534), Some(65534)).unwrap();
        command.uid(65534).gid(65534);
    }
    Ran::of(&mut command).ok();
    let mut value = [0; 8];
    let len = rustix::fs::lgetxattr(to.join("file"), "user.note", &mut value).unwrap();
    assert_eq!(&value[..len], b"kept");
    assert_eq!(fs::metadata(to.join("file")).unwrap().mode() & 0o7777, 0o444);
    // What is lost is said: nobody but its owner gives a sticky directory attributes.
    if rustix::process::geteuid().is_root() {
        fs::create_dir(dir.path("from")).unwrap();
        rustix::fs::lsetxattr(dir.path("from"), "user.note", b"lost", flags).unwrap();
        dir.ok(&["cp", "-a", "from", "p:/"]);
        fs::create_dir(dir.path("sticky")).unwrap();
        fs::set_permissions(dir.path("sticky"), PermissionsExt::from_mode(0o1777)).unwrap();
        let mut command = Command::new(&binary);
        command.args(["cp", "-a", "p:/from/.", "sticky"]).current_dir(&dir.0).env("HOME", &dir.0);
        let ran = Ran::of(command.uid(65534).gid(65534).stdin(Stdio::null()));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.err.contains("cannot copy attribute user.note of p:/from/. to sticky"), "{ran:?}");
    }
}

/// An access control list that gives user 4242 everything.
fn generous_list() -> Vec<u8> {
    let entries =
        [(1u16, 7u16, u32::MAX), (2, 7, 4242), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)];
    let bytes = entries.iter().flat_map(|(tag, rights, id)| {
        tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain(id.to_le_bytes())
    });
    2u32.to_le_bytes().into_iter().chain(bytes).collect()
}

/// A copy has the rights of its source, and not those of the directory's default list or of what was there before.
#[test]
fn archives_give_no_rights_that_the_source_does_not() {
    let dir = Dir::new("lists");
    dir.pool("p", 16);
    let (from, flags) = (dir.path("from"), rustix::fs::XattrFlags::empty());
    let (access, default) = ("system.posix_acl_access", "system.posix_acl_default");
    fs::create_dir_all(from.join("generous")).unwrap();
    if let Err(e) = rustix::fs::lsetxattr(from.join("generous"), default, &generous_list(), flags) {
        assert_eq!(e, rustix::io::Errno::OPNOTSUPP);
        return eprintln!("SKIPPED: no access control lists in {}", dir.0.display());
    }
    let secret = dir.write("secret", b"secret");
    fs::set_permissions(&secret, PermissionsExt::from_mode(0o640)).unwrap();
    fs::create_dir(dir.path("below")).unwrap();
    let listed = dir.write("listed", b"older");
    rustix::fs::lsetxattr(&listed, access, &generous_list(), flags).unwrap();
    dir.ok(&["cp", "-a", "from/generous", "p:/"]);
    dir.ok(&["cp", "-a", "secret", "below", "p:/generous"]);
    dir.ok(&["cp", "-a", "secret", "p:/"]);
    dir.ok(&["cp", "-a", "listed", "p:/listed"]);
    dir.ok(&["cp", "-a", "secret", "p:/listed"]);
    // Out of the pool into such a directory, and to where none of it comes from the directory.
    dir.ok(&["cp", "-a", "p:/secret", "from/generous"]);
    let out = dir.path("out");
    fs::create_dir(&out).unwrap();
    dir.ok(&["cp", "-a", "p:/generous", "p:/listed", "out"]);
    let mut value = [0; 256];
    let kept = rustix::fs::lgetxattr(out.join("generous"), default, &mut value).unwrap();
    assert_eq!(value[..kept], generous_list()[..], "that of the source is kept");
    for copy in ["from/generous/secret", "out/generous/secret", "out/generous/below", "out/listed"] {
        let copy = dir.path(copy);
        for list in [access, default] {
            let found = rustix::fs::lgetxattr(&copy, list, &mut value);
            assert_eq!(found, Err(rustix::io::Errno::NODATA), "{list} of {}", copy.display());
        }
        let mode = fs::metadata(&copy).unwrap().mode() & 0o777;
        assert!(copy.is_dir() || mode == 0o640, "{}: {mode:o}", copy.display());
    }
}

/// As an unprivileged user with a second group.
#[test]
fn archives_keep_a_group_of_the_callers() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can become another user");
    }
    let dir = Dir::new("group");
    let pool = dir.pool("p", 16);
    let shared = dir.write("shared", b"x");
    std::os::unix::fs::chown(&shared, Some(4242), Some(4343)).unwrap();
    fs::set_permissions(&shared, PermissionsExt::from_mode(0o664)).unwrap();
    dir.ok(&["cp", "-a", "shared", "p:/"]);
    fs::set_permissions(&pool, PermissionsExt::from_mode(0o644)).unwrap();
    fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o755)).unwrap();
    let (to, binary) = (dir.path("to"), dir.path("lode"));
    fs::create_dir(&to).unwrap();
    std::os::unix::fs::chown(&to, Some(65534), Some(65534)).unwrap();
    fs::copy(LODE, &binary).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--groups=4343"]).arg(&binary);
    command
        .args(["cp", "-a", "p:/shared", "to"])
        .current_dir(&dir.0)
        .env("HOME", &dir.0)
        .stdin(Stdio::null());
    Ran::of(&mut command).ok();
    let copy = fs::metadata(to.join("shared")).unwrap();
    assert_eq!((copy.uid(), copy.gid(), copy.mode() & 0o7777), (65534, 4343, 0o664));
}

/// Its owner may not list it, and rmdir(2) does not ask that.
#[test]
fn an_empty_directory_that_nobody_may_list_is_removed() {
    let dir = Dir::new("unlisted");
    let pool = dir.pool("p", 16);
    for name in ["top/first", "top/second/third", "top/full/fourth"] {
        fs::create_dir_all(dir.path("from").join(name)).unwrap();
    }
    dir.write("from/top/full/fourth/file", b"x");
    let is_root = rustix::process::geteuid().is_root();
    for name in ["top/first", "top/second/third", "top/full/fourth", "top/second", "top/full", "top"]
        .map(|n| format!("from/{n}"))
    {
        if is_root {
            std::os::unix::fs::chown(dir.path(&name), Some(65534), Some(65534)).unwrap();
        }
    }
    for name in ["first", "second/third", "full/fourth"] {
        let mode = if is_root { 0 } else { 0o700 };
        fs::set_permissions(dir.path("from/top").join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    dir.ok(&["cp", "-a", "from/top", "p:/"]);
    if !is_root {
        return eprintln!("SKIPPED: only root can become another user");
    }
    fs::set_permissions(&pool, PermissionsExt::from_mode(0o666)).unwrap();
    fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o755)).unwrap();
    let binary = dir.path("lode");
    fs::copy(LODE, &binary).unwrap();
    let mut command = Command::new(&binary);
    command.args(["rm", "-r", "p:/top/first", "p:/top/second", "p:/top/full"]).current_dir(&dir.0);
    let ran = Ran::of(command.env("HOME", &dir.0).stdin(Stdio::null()).uid(65534).gid(65534));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("cannot remove p:/top/full/fourth: Permission denied"), "{ran:?}");
    assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    assert_eq!(dir.ok(&["ls", "p:/top"]).trim(), "full");
}

/// As ls(1) shows it: what the name is, unless it leads to a directory.
#[test]
fn a_link_to_a_file_is_listed_as_a_link() {
    let dir = Dir::new("ls-link");
    dir.pool("p", 16);
    dir.write("file", b"12345");
    symlink("file", dir.path("link")).unwrap();
    dir.ok(&["cp", "-a", "file", "link", "p:/"]);
    let by_name = json(&dir.ok(&["ls", "--json", "p:/link"]));
    let in_root = json(&dir.ok(&["ls", "--json", "p:/"]));
    let entries = in_root["listings"][0]["entries"].as_array().unwrap();
    let listed = entries.iter().find(|e| e["name"] == "link").unwrap();
    assert_eq!(&by_name["listings"][0]["entries"][0], listed);
    assert_eq!(listed["kind"], "symlink");
}

/// Overwrites a byte in the slot of the inode that has this name in the pool.
fn damage_inode(dir: &Dir, pool: &str, parent: &str, name: &str) {
    let listed = json(&dir.ok(&["ls", "--json", &format!("{pool}:{parent}")]));
    let entries = listed["listings"][0]["entries"].as_array().unwrap();
    let ino = entries.iter().find(|e| e["name"] == name).unwrap()["ino"].to_string();
    let dumped = dir.ok(&["dump", pool, &ino]);
    let at = dumped.split_once(" at 0x").unwrap().1.split(':').next().unwrap();
    let at = u64::from_str_radix(at, 16).unwrap() + 20;
    let file = File::options().read(true).write(true).open(dir.path(pool)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn a_damaged_inode_hides_and_keeps_itself_alone() {
    let dir = Dir::new("damaged-inode");
    dir.pool("p", 16);
    fs::create_dir_all(dir.path("d/sub/deep")).unwrap();
    for name in ["d/1", "d/2", "d/3", "d/sub/x", "d/sub/deep/y"] {
        dir.write(name, b"x");
    }
    dir.ok(&["cp", "-r", "d", "p:/"]);
    damage_inode(&dir, "p", "/d", "2");
    damage_inode(&dir, "p", "/d/sub", "deep");
    let says = |ran: &Ran, lines: &[&str]| {
        assert_eq!((ran.code, ran.err.lines().count()), (Some(1), lines.len()), "{ran:?}");
        for (line, begins) in ran.err.lines().zip(lines) {
            assert!(line.starts_with(begins) && line.contains("no valid slot"), "{ran:?}");
        }
        String::from_utf8(ran.out.clone()).unwrap()
    };
    let unread = "lode: cannot read p:/d/2: ";
    assert_eq!(says(&dir.run(&["ls", "p:/d"]), &[unread]), "1\n2\n3\nsub\n");
    let long = says(&dir.run(&["ls", "-l", "p:/d"]), &[unread]);
    assert_eq!(long.lines().count(), 4);
    let line = long.lines().nth(1).unwrap();
    assert!(line.starts_with("-????????? ? ? ") && line.ends_with(" ? 2"), "{long}");
    assert_eq!(line.len(), long.lines().next().unwrap().len());
    let deep = says(&dir.run(&["ls", "-R", "p:/d"]), &[unread, "lode: cannot read p:/d/sub/deep: "]);
    assert!(deep.ends_with("p:/d/sub:\ndeep\nx\n"), "{deep}");
    let listed = json(&says(&dir.run(&["ls", "--json", "p:/d"]), &[unread]));
    let entry = &listed["listings"][0]["entries"][1];
    assert_eq!((&entry["name"], &entry["kind"]), (&"2".into(), &"file".into()));
    assert!(entry["error"].as_str().unwrap().contains("no valid slot") && entry.get("size").is_none());
    assert_eq!(listed["listings"][0]["entries"][0]["size"], 1);
    let stays = ["lode: cannot remove p:/d/2: ", "lode: cannot remove p:/d/sub/deep: "];
    says(&dir.run(&["rm", "-r", "p:/d"]), &stays);
    says(&dir.run(&["ls", "p:/d"]), &[unread]);
    let left = String::from_utf8(dir.run(&["ls", "-R", "p:/"]).out).unwrap();
    assert_eq!(left, "p:/:\nd\n\np:/d:\n2\nsub\n\np:/d/sub:\ndeep\n");
}

#[test]
fn listings_show_what_is_there() {
    let dir = Dir::new("listing");
    dir.pool("p", 64);
    rich_tree(&dir);
    dir.ok(&["cp", "-a", "tree/.", "p:/"]);
    dir.write(".hidden", b"");
    dir.ok(&["cp", ".hidden", "p:/"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "fifo\nlink-to-dir\nsparse\nsub\n");
    assert!(dir.ok(&["ls", "-a", "p:/"]).starts_with(".hidden\n"));
    let owner = format!("{} {}", rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let long = dir.ok(&["ls", "-l", "p:/sub"]);
    assert!(long.contains(&format!("-rwsr-x--- 2 {owner}  3 2001-09-09T01:46:40Z one\n")), "{long}");
    assert!(long.contains("dangling -> ../nowhere\n"), "{long}");
    let deep = dir.ok(&["ls", "-R", "p:/"]);
    assert!(deep.contains("\np:/sub/deep:\ntwo\n"), "{deep}");
    // A link is followed, with -l it is shown.
    assert_eq!(dir.ok(&["ls", "p:/link-to-dir"]), dir.ok(&["ls", "p:/sub"]));
    assert!(dir.ok(&["ls", "-l", "p:/link-to-dir"]).ends_with("link-to-dir -> sub\n"));
    let ran = dir.run(&["ls", "p:/nothing", "p:/sub"]);
    ran.fails(1, &["p:/nothing", "No such file"]);
    assert!(String::from_utf8(ran.out).unwrap().contains("one\n"), "the other argument is listed");
}

#[test]
fn a_full_pool_keeps_nothing_half() {
    let dir = Dir::new("full");
    dir.pool("p", 4);
    dir.write("small", b"small");
    file_of(&dir, "big", 8 * MIB);
    dir.ok(&["cp", "small", "p:/small"]);
    let ran = dir.run(&["cp", "big", "p:/big"]);
    ran.fails(1, &["p:/big", "No space left", "remove files", "incomplete copy was removed"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "small\n");
    // Over a file that was there, what is left is told.
    dir.run(&["cp", "big", "p:/small"]).fails(1, &["p:/small is incomplete", "of 8388608 bytes"]);
    dir.ok(&["rm", "p:/small"]);
    dir.ok(&["cp", "small", "p:/again"]);
    assert_eq!(dir.ok(&["cat", "p:/again"]), "small");
}

#[test]
fn copies_that_make_no_sense_are_refused() {
    let dir = Dir::new("nonsense");
    let image = dir.pool("p", 16);
    dir.write("file", b"x");
    fs::create_dir(dir.path("d")).unwrap();
    dir.ok(&["cp", "file", "p:/file"]);
    dir.ok(&["cp", "-r", "d", "p:/d"]);
    for (args, says) in [
        (&["cp", "d", "p:/e"][..], "add -r"),
        (&["cp", "p:/d", "e"], "add -r"),
        (&["cp", "p:/file", "p:/file"], "the same file"),
        (&["cp", "p:/file", "./p:/file"], "the same file"),
        (&["cp", "-r", "p:/d", "p:/file"], "there is a file of this name"),
        (&["cp", "file", "p:/file", "p:/none"], "is no directory"),
        (&["cp", "file", "p:/none/"], "is no directory"),
        (&["cp", "-r", "file", "p:/none/"], "Not a directory"),
        (&["cp", "-a", "p:/file", "none/"], "Not a directory"),
        (&["cp", "p:/none", "copy"], "No such file"),
        (&["cat", "p:/d"], "Is a directory"),
        (&["cat", "p:/file/below"], "Not a directory"),
    ] {
        dir.run(args).fails(1, &[says]);
    }
    assert!(!dir.path("none").exists());
    assert_eq!(dir.ok(&["ls", "p:/"]), "d\nfile\n");
    // What went into itself would never end.
    dir.ok(&["cp", "-r", "d", "p:/d/below"]);
    for to in ["p:/d", "p:/d/below", "p:/d/new", "p:/d/below/../other"] {
        dir.run(&["cp", "-r", "p:/d", to]).fails(1, &["into itself"]);
    }
    // A directory's attributes are kept where a link to one stands for it, and the link stays what it is.
    fs::set_permissions(dir.path("d"), PermissionsExt::from_mode(0o751)).unwrap();
    symlink("/d", dir.path("to-d")).unwrap();
    dir.ok(&["cp", "-a", "to-d", "p:/to-d"]);
    dir.ok(&["cp", "-a", "d/.", "p:/to-d"]);
    let listed = dir.ok(&["ls", "-l", "p:/"]);
    let mode = |name: &str| {
        listed.lines().find(|l| l.contains(name)).unwrap_or_else(|| panic!("{listed}"))[..10].to_owned()
    };
    assert_eq!((mode(" d").as_str(), mode(" to-d").as_str()), ("drwxr-x--x", "lrwxrwxrwx"), "{listed}");
    // Nor is a file copied onto itself by a link that leads to it.
    symlink("/file", dir.path("link")).unwrap();
    dir.ok(&["cp", "-a", "link", "p:/link"]);
    for options in [&["cp"][..], &["cp", "-r"]] {
        dir.run(&[options, &["p:/file", "p:/link"]].concat()).fails(1, &["the same file"]);
    }
    assert_eq!(dir.ok(&["cat", "p:/file"]), "x");
    dir.ok(&["cp", "-r", "p:/d", "p:/e"]);
    assert_eq!(dir.ok(&["ls", "-R", "p:/e"]), "p:/e:\nbelow\n\np:/e/below:\n");
    assert_eq!(dir.ok(&["cat", "p:/file"]), "x");
    assert_eq!(fs::metadata(image).unwrap().len(), 16 * MIB);
}

#[test]
fn a_pool_that_is_being_copied_is_no_target() {
    let dir = Dir::new("own-pool");
    let image = dir.pool("p", 4);
    dir.ok(&["mkfs", "r0,r1", "--size", "8M", "--stripe", "64K"]);
    dir.write("f", b"hi");
    dir.ok(&["cp", "f", "p:/f"]);
    dir.ok(&["cp", "f", "p:/p"]);
    dir.ok(&["cp", "f", "r0:/b"]);
    symlink("/elsewhere", dir.path("link")).unwrap();
    fs::create_dir_all(dir.path("in")).unwrap();
    fs::hard_link(&image, dir.path("hard")).unwrap();
    symlink("p", dir.path("soft")).unwrap();
    for to in ["p", "./p", "hard", "soft"] {
        for options in [&["cp"][..], &["cp", "-r"], &["cp", "-a"]] {
            let ran = unchanged(&image, || dir.run(&[options, &["p:/f", to]].concat()));
            ran.fails(1, &["is the pool that is being copied"]);
        }
    }
    assert!(fs::symlink_metadata(dir.path("soft")).unwrap().is_symlink());
    unchanged(&dir.path("r1"), || dir.run(&["cp", "r0:/b", "r1"]).fails(1, &["r1 is the pool"]));
    // An entry of the pool's own name, a file or a link, keeps nothing from the rest.
    dir.write("f", b"old");
    let ran = unchanged(&image, || dir.run(&["cp", "-r", "p:/", "."]));
    ran.fails(1, &["p:/p", "is the pool that is being copied"]);
    assert_eq!(fs::read(dir.path("f")).unwrap(), b"hi");
    dir.ok(&["rm", "p:/p"]);
    dir.ok(&["cp", "-a", "link", "p:/p"]);
    unchanged(&image, || dir.run(&["cp", "-r", "p:/", "."]).fails(1, &["is the pool that is being copied"]));
    // Nor is it copied into itself.
    dir.run(&["cp", "p", "p:/x"]).fails(1, &["p is the pool that is being copied"]);
    dir.run(&["cp", "r1", "r0:/x"]).fails(1, &["r1 is the pool that is being copied"]);
    dir.ok(&["fsck", "p"]);
    dir.ok(&["fsck", "r0"]);
}

#[test]
fn archives_leave_other_names_of_their_targets_alone() {
    let dir = Dir::new("shared-target");
    dir.pool("p", 16);
    dir.write("old", b"old");
    fs::hard_link(dir.path("old"), dir.path("kept")).unwrap();
    dir.write("new", b"new");
    dir.ok(&["cp", "-a", "old", "kept", "p:/"]);
    dir.ok(&["cp", "-a", "new", "p:/old"]);
    assert_eq!((dir.ok(&["cat", "p:/old"]), dir.ok(&["cat", "p:/kept"])), ("new".into(), "old".into()));
    dir.ok(&["cp", "-a", "p:/old", "old"]);
    assert_eq!(fs::read(dir.path("old")).unwrap(), b"new");
    assert_eq!(fs::read(dir.path("kept")).unwrap(), b"old");
    // Without -a the file stays the one it was, as cp(1) has it.
    fs::remove_file(dir.path("old")).unwrap();
    fs::hard_link(dir.path("kept"), dir.path("old")).unwrap();
    dir.ok(&["cp", "p:/old", "old"]);
    assert_eq!(fs::read(dir.path("kept")).unwrap(), b"new");
}

#[test]
fn a_copy_does_not_overwrite_what_it_just_made() {
    let dir = Dir::new("twice");
    dir.pool("p", 16);
    for sub in ["1", "2"] {
        fs::create_dir_all(dir.path(sub).join("d")).unwrap();
        dir.write(&format!("{sub}/x"), sub.as_bytes());
        dir.write(&format!("{sub}/d/x"), sub.as_bytes());
        symlink("/x", dir.path(sub).join("l")).unwrap();
    }
    fs::hard_link(dir.path("1/x"), dir.path("1/y")).unwrap();
    let again = |args: &[&str], what: &str| {
        let ran = dir.run(args);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(ran.err, format!("lode: warning: source {what} specified more than once\n"));
    };
    let refused = "it would overwrite what this copy just made";
    for options in [&["cp"][..], &["cp", "-a"]] {
        again(&[options, &["1/x", "1/x", "p:/"]].concat(), "file 1/x");
        dir.run(&[options, &["1/x", "2/x", "1/y", "p:/"]].concat()).fails(1, &["2/x", "p:/x", refused]);
        assert_eq!(dir.ok(&["cat", "p:/x", "p:/y"]), "11");
        dir.ok(&["rm", "p:/x", "p:/y"]);
    }
    again(&["cp", "-a", "1/d", "1/d", "p:/"], "directory 1/d");
    // Directories come together, files do not.
    dir.write("2/d/only", b"only");
    dir.run(&["cp", "-r", "1/d", "2/d", "p:/"]).fails(1, &["2/d/x", "p:/d/x", refused]);
    assert_eq!(dir.ok(&["cat", "p:/d/x", "p:/d/only"]), "1only");
    // Nor is anything written through a link that was just made.
    fs::create_dir(dir.path("3")).unwrap();
    dir.write("3/l", b"3");
    dir.run(&["cp", "-r", "1/x", "1/l", "3/l", "p:/"]).fails(1, &["3/l", refused]);
    assert_eq!(dir.ok(&["cat", "p:/x"]), "1");
}

#[test]
fn nothing_is_written_through_a_link_that_leads_nowhere() {
    let dir = Dir::new("dangling");
    dir.pool("p", 16);
    dir.write("f", b"f");
    symlink("none", dir.path("link")).unwrap();
    dir.ok(&["cp", "f", "p:/f"]);
    dir.ok(&["cp", "-a", "link", "p:/"]);
    for (from, to) in [("f", "p:/link"), ("p:/f", "link")] {
        dir.run(&["cp", from, to]).fails(1, &[to, "leads nowhere; remove it first"]);
    }
    assert!(dir.ok(&["ls", "-l", "p:/"]).contains("link -> none"));
    assert_eq!(fs::read_link(dir.path("link")).unwrap(), Path::new("none"));
    // With -a it is replaced.
    dir.ok(&["cp", "-a", "p:/f", "link"]);
    assert_eq!(fs::read(dir.path("link")).unwrap(), b"f");
    assert!(!dir.path("none").exists());
}

/// A tree that the host made step by step, so that no path is longer than it takes.
fn deep_tree(dir: &Dir, name: &str, depth: usize) -> PathBuf {
    let root = dir.path(name);
    fs::create_dir(&root).unwrap();
    let mut at = File::open(&root).unwrap();
    for level in 0..depth {
        rustix::fs::mkdirat(&at, "d", 0o755.into()).unwrap();
        at = rustix::fs::openat(&at, "d", rustix::fs::OFlags::DIRECTORY, 0.into()).unwrap().into();
        if level % 400 == 0 || level == depth - 1 {
            let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
            let mut file = File::from(rustix::fs::openat(&at, "file", flags, 0o644.into()).unwrap());
            write!(file, "level {level}").unwrap();
        }
    }
    root
}

#[test]
fn a_tree_of_many_levels_goes_in_and_out() {
    const DEPTH: usize = 1200;
    let dir = Dir::new("deep");
    dir.pool("p", 64);
    let used = || json(&dir.ok(&["fsck", "p", "--json"]))["blocks_used"].as_u64().unwrap();
    let tree = deep_tree(&dir, "tree", DEPTH);
    // What was deep and is gone leaves no more than an inode table that has grown: a second time it takes nothing more.
    dir.ok(&["cp", "-r", "tree", "p:/"]);
    dir.ok(&["rm", "-r", "p:/tree"]);
    let grown = used();
    dir.ok(&["cp", "-r", "tree", "p:/"]);
    let bottom = format!("p:/tree{}", "/d".repeat(DEPTH));
    assert_eq!(dir.ok(&["cat", &format!("{bottom}/file")]), format!("level {}", DEPTH - 1));
    let listed = dir.ok(&["ls", "-R", "p:/"]);
    assert_eq!(listed.lines().filter(|line| line.starts_with("p:/")).count(), DEPTH + 2);
    assert_eq!(listed.lines().filter(|line| *line == "file").count(), 4);
    assert!(listed.ends_with(&format!("\n{bottom}:\nfile\n")), "the end of the list");
    json(&dir.ok(&["ls", "-R", "--json", "p:/"]));
    dir.ok(&["cp", "-r", "p:/tree", "back"]);
    let names = |root: &Path| -> Vec<String> {
        let without_time = |line: &String| {
            let (head, tail) = line.split_once(" mtime ").unwrap();
            format!("{head} {}", tail.split_once(' ').unwrap().1)
        };
        fingerprint(root).iter().map(without_time).collect()
    };
    assert_eq!(names(&dir.path("back")), names(&tree));
    assert!(used() > grown);
    dir.ok(&["rm", "-r", "p:/tree"]);
    assert_eq!(dir.ok(&["ls", "-R", "p:/"]), "p:/:\n");
    assert!(used() <= grown + 2, "{grown} blocks, now {}", used());
}

#[test]
fn a_tree_deeper_than_any_path_goes_in_and_out() {
    const DEPTH: usize = 3000;
    let dir = Dir::new("deeper");
    let (image, _) = (dir.pool("p", 64), dir.pool("q", 64));
    let tree = deep_tree(&dir, "tree", DEPTH);
    rustix::fs::lsetxattr(&tree, "user.top", b"top", rustix::fs::XattrFlags::empty()).unwrap();
    dir.ok(&["cp", "-a", "tree", "p:/"]);
    let bottom = format!("p:/tree{}", "/d".repeat(DEPTH));
    unchanged(&image, || {
        let listed = dir.ok(&["ls", "-R", "p:/"]);
        assert_eq!(listed.lines().filter(|line| line.starts_with("p:/")).count(), DEPTH + 2);
        assert_eq!(listed.lines().filter(|line| *line == "file").count(), 9);
        assert!(listed.ends_with(&format!("\n{bottom}:\nfile\n")), "the end of the list");
        // What is named itself is no longer than a path.
        dir.run(&["ls", &bottom]).fails(1, &["File name too long"]);
    });
    dir.ok(&["cp", "-a", "p:/tree", "q:/"]);
    dir.ok(&["cp", "-a", "q:/tree", "back"]);
    // All that -a keeps, from the top to the bottom, is what it was.
    let (mut made, mut back) = (File::open(&tree).unwrap(), File::open(dir.path("back")).unwrap());
    for level in 0..=DEPTH {
        let about = |at: &File| {
            let about = at.metadata().unwrap();
            (about.mode(), about.mtime(), about.mtime_nsec(), about.nlink())
        };
        assert_eq!(about(&made), about(&back), "level {level}");
        let text = |at: &File| {
            let file = rustix::fs::openat(at, "file", rustix::fs::OFlags::RDONLY, 0.into());
            file.map(|file| std::io::read_to_string(File::from(file)).unwrap()).ok()
        };
        assert_eq!(text(&made), text(&back), "level {level}");
        if level < DEPTH {
            let below =
                |at: &File| rustix::fs::openat(at, "d", rustix::fs::OFlags::DIRECTORY, 0.into()).unwrap();
            (made, back) = (below(&made).into(), below(&back).into());
        }
    }
    dir.ok(&["rm", "-r", "p:/tree"]);
    assert_eq!(dir.ok(&["ls", "-R", "p:/"]), "p:/:\n");
}

#[test]
fn names_and_paths_of_every_length() {
    let dir = Dir::new("lengths");
    let image = dir.pool("p", 16);
    dir.write("file", b"x");
    // 255 bytes, of one, two and four for each character.
    let longest =
        ["n".repeat(255), format!("n{}", "\u{e4}".repeat(127)), format!("nnn{}", "\u{1f5ff}".repeat(63))];
    fs::create_dir_all(dir.path("in").join(&longest[0])).unwrap();
    for name in &longest {
        assert_eq!(name.len(), 255);
        fs::write(dir.path("in").join(&longest[0]).join(name), name).unwrap();
    }
    dir.ok(&["cp", "-r", "in", "p:/"]);
    let listed = dir.ok(&["ls", &format!("p:/in/{}", longest[0])]);
    let mut listed: Vec<_> = listed.lines().collect();
    let mut wanted = longest.to_vec();
    listed.sort();
    wanted.sort();
    assert_eq!(listed, wanted);
    for name in &longest {
        assert_eq!(dir.ok(&["cat", &format!("p:/in/{}/{name}", longest[0])]), *name);
    }
    dir.ok(&["cp", "-r", "p:/in", "out"]);
    assert_eq!(fs::read_dir(dir.path("out").join(&longest[0])).unwrap().count(), longest.len());
    dir.ok(&["rm", "-r", "p:/in"]);

    // One byte more in a name, and in a path of names that are short.
    let limits = "File name too long; a name has at most 255 bytes and a path 4095";
    let name = format!("p:/{}", "n".repeat(256));
    let path = format!("p:{}", "/dd".repeat(4098 / 3));
    let at_limit = format!("p:{}", "/dd".repeat(4095 / 3));
    unchanged(&image, || {
        for long in [&name, &path] {
            for args in [&["cat", long][..], &["ls", long], &["ls", "-R", long], &["cp", long, "host-copy"]] {
                let ran = dir.run(args);
                ran.fails(1, &[long, limits]);
                assert!(ran.out.is_empty(), "{ran:?}");
            }
        }
        dir.run(&["cat", &at_limit]).fails(1, &["No such file"]);
        assert!(!dir.path("host-copy").exists());
    });
    for long in [&name, &path] {
        for args in
            [&["cp", "file", long][..], &["cp", "-r", "in", long], &["rm", long], &["rm", "-rf", long]]
        {
            dir.run(args).fails(1, &[long, limits]);
        }
    }
    assert_eq!(dir.ok(&["ls", "p:/"]), "");
}

#[test]
fn rm_removes_what_it_is_told() {
    let dir = Dir::new("rm");
    dir.pool("p", 64);
    fs::create_dir_all(dir.path("t/a/b/c")).unwrap();
    for i in 0..200 {
        dir.write(&format!("t/a/f{i}"), b"x");
    }
    symlink("/keep", dir.path("t/a/link")).unwrap();
    dir.write("keep", b"kept");
    dir.ok(&["cp", "-r", "t", "p:/t"]);
    dir.ok(&["cp", "keep", "p:/keep"]);
    dir.run(&["rm", "p:/t"]).fails(1, &["p:/t", "add -r"]);
    dir.run(&["rm", "p:/none"]).fails(1, &["p:/none", "No such file"]);
    dir.run(&["rm", "-r", "p:/"]).fails(1, &["root directory"]);
    dir.run(&["rm", "-r", "p:/t/.."]).fails(1, &[". or .."]);
    dir.run(&["rm", "p:/keep/"]).fails(1, &["Not a directory"]);
    dir.ok(&["rm", "-f", "p:/none"]);
    dir.ok(&["rm", "-f", "p:/keep/below"]);
    dir.run(&["rm", "p:/keep/below"]).fails(1, &["Not a directory"]);
    dir.ok(&["rm", "-r", "p:/t"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "keep\n");
    assert_eq!(dir.ok(&["cat", "p:/keep"]), "kept");
}

#[test]
fn an_interrupted_rm_reaches_nothing_more() {
    let dir = Dir::new("rm-interrupt");
    dir.pool("p", 16);
    dir.write("keep", b"kept");
    dir.ok(&["cp", "keep", "p:/"]);
    // More messages than a pipe takes that nobody reads yet.
    let mut args = vec!["rm"];
    args.extend(["p:/none"; 4000]);
    args.push("p:/keep");
    let child = dir.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (status, begun) = (format!("/proc/{}/status", child.id()), Instant::now());
    let catches = || {
        let status = fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
    };
    while !catches() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    let last = said.lines().last().unwrap();
    assert_eq!(last, "lode: cannot remove p:/none: interrupted; what was not reached is left");
    assert_eq!(said.matches("interrupted").count(), 1);
    assert_eq!(ended.status.code(), Some(1));
    assert_eq!(dir.ok(&["ls", "p:/"]), "keep\n");
}

#[test]
fn a_command_that_fails_closes_what_it_opened() {
    let dir = Dir::new("closes");
    dir.pool("p", 16);
    for args in [&["rm", "p:/x", "none:/x"][..], &["cp", "none:/x", "p:/x"]] {
        dir.run(args).fails(1, &["none"]);
        assert_eq!(json(&dir.ok(&["info", "p", "--json"]))["pool"]["state"]["clean"], true);
    }
}

#[test]
fn rm_never_empties_what_a_link_leads_to() {
    let dir = Dir::new("rm-link");
    dir.pool("p", 16);
    fs::create_dir_all(dir.path("t/real")).unwrap();
    dir.write("t/real/file", b"x");
    symlink("real", dir.path("t/link")).unwrap();
    dir.ok(&["cp", "-r", "t/.", "p:/"]);
    dir.run(&["rm", "-r", "p:/link/"]).fails(1, &["Not a directory"]);
    assert_eq!(dir.ok(&["ls", "p:/real"]), "file\n");
    dir.ok(&["rm", "-r", "p:/link"]);
    assert_eq!(dir.ok(&["ls", "p:/real"]), "file\n");
}

#[test]
fn json_is_one_document_and_nothing_else() {
    let dir = Dir::new("json");
    dir.pool("p", 16);
    let machine = json(&dir.ok(&["info", "--json"]));
    assert!(machine.get("pool").is_none());
    for facility in machine["machine"]["facilities"].as_array().unwrap() {
        let missing = facility["found"] == false;
        assert!(!missing || facility["detail"].as_str().is_some_and(|d| !d.is_empty()), "{facility}");
    }
    let names: Vec<_> =
        machine["machine"]["facilities"].as_array().unwrap().iter().map(|f| &f["name"]).collect();
    for wanted in ["cpu", "dsa", "ioat", "resctrl", "fuse", "userfaultfd", "io_uring"] {
        assert!(names.iter().any(|n| *n == wanted), "{wanted} is not in {names:?}");
    }
    // Two arguments, recursion: still one document, which says what is of which pool.
    dir.pool("q", 16);
    let listed = json(&dir.ok(&["ls", "-R", "--json", "p:/", "q:/"]));
    let pools: Vec<_> = listed["listings"].as_array().unwrap().iter().map(|l| &l["pool"]).collect();
    assert_eq!(pools, ["p", "q"]);
    // Logs do not mix with it.
    let ran = Ran::of(dir.command(&["ls", "--json", "p:/"]).env("LODE_LOG", "trace"));
    assert_eq!(ran.code, Some(0));
    json(&String::from_utf8(ran.out).unwrap());
}

#[test]
fn emulated_memory_is_called_so() {
    let dir = Dir::new("emulated");
    dir.pool("p", 16);
    assert!(!dir.ok(&["info", "p"]).contains("emulated PM"));
    assert!(dir.ok(&["info", "p", "--assume", "memory"]).contains("emulated PM"));
    let info = json(&dir.ok(&["info", "p", "--assume", "cpu-cache", "--json"]));
    assert_eq!(info["pool"]["media"]["domain"], "cpu-cache");
    assert_eq!(info["pool"]["media"]["emulated"], true);
}

#[test]
fn info_without_a_pool_is_about_the_machine() {
    let dir = Dir::new("machine");
    let text = dir.ok(&["info"]);
    assert!(text.starts_with("machine "), "{text}");
    for line in text.lines().filter(|l| l.starts_with("  missing")) {
        assert!(line.contains("; "), "no remedy: {line}");
    }
}

#[test]
fn flags_beat_the_environment_and_the_environment_the_files() {
    let dir = Dir::new("config");
    let label = |command: &mut Command| {
        Ran::of(command).ok();
        let info = json(&dir.ok(&["info", "p", "--json"]));
        info["pool"]["label"].as_str().unwrap().to_string()
    };
    let mkfs = |more: &[&str]| dir.command(&[&["mkfs", "p", "--size", "16M", "--force"], more].concat());
    fs::create_dir_all(dir.path(".config/lode")).unwrap();
    dir.write(".config/lode/config.toml", b"[mkfs]\nlabel = \"user\"\n");
    dir.write("named.toml", b"label = \"named\"\n");
    assert_eq!(label(&mut mkfs(&[])), "user");
    assert_eq!(label(&mut mkfs(&["--config", "named.toml"])), "named");
    assert_eq!(label(mkfs(&[]).env("LODE_CONFIG", "named.toml")), "named");
    assert_eq!(label(mkfs(&["--config", "named.toml"]).env("LODE_LABEL", "variable")), "variable");
    assert_eq!(label(mkfs(&["--label", "flag"]).env("LODE_LABEL", "variable")), "flag");
}

#[test]
fn mistakes_in_a_configuration_name_the_file() {
    let dir = Dir::new("config-wrong");
    for (text, says) in [
        (&b"[mkfs]\nsizze = \"4G\"\n"[..], "sizze"),
        (b"[mkfs]\nsize = \"4X\"\n", "(from c.toml)"),
        (b"[rm]\nforce = true\n", "on the command line"),
        (b"a = \n", "line 1"),
        (b"\xff", "not UTF-8"),
    ] {
        dir.write("c.toml", text);
        dir.run(&["mkfs", "p", "--config", "c.toml"]).fails(2, &["c.toml", says]);
    }
    dir.run(&["info", "--config", "none.toml"]).fails(2, &["none.toml", "No such file"]);
    for help in ["--help", "-h"] {
        assert!(dir.ok(&["mkfs", help, "--config", "c.toml"]).contains("Usage:"));
    }
    Ran::of(dir.command(&["info"]).env("LODE_LOG", "=,=")).fails(2, &["LODE_LOG"]);
    Ran::of(dir.command(&["mkfs", "p"]).env("LODE_SIZE", "x")).fails(2, &["(from LODE_SIZE)"]);
    assert!(!dir.path("p").exists());
    // What is empty says nothing.
    let empty = ["LODE_LABEL", "LODE_SIZE", "LODE_DATA", "LODE_JSON", "LODE_ISA", "LODE_CONFIG", "LODE_LOG"];
    for args in [&["mkfs", "p", "--size", "4M"][..], &["info", "p"], &["ls", "p:/"]] {
        let mut command = dir.command(args);
        command.envs(empty.map(|name| (name, "")));
        Ran::of(&mut command).ok();
    }
    dir.write("c.toml", b"[mkfs]\nsize = \"4X\"\n");
    let mut command = dir.command(&["mkfs", "q", "--config", "c.toml"]);
    Ran::of(command.env("LODE_SIZE", "")).fails(2, &["(from c.toml)"]);
}

#[test]
fn a_closed_pipe_is_no_failure_and_a_full_disk_is() {
    let dir = Dir::new("pipe");
    dir.pool("p", 32);
    file_of(&dir, "big", 8 * MIB);
    dir.ok(&["cp", "big", "p:/big"]);
    let mut child =
        dir.command(&["cat", "p:/big"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 16];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.as_slice()), (Some(0), &b""[..]));
    // What failed counts all the same.
    for args in
        [&["ls", "p:/none", "p:/"][..], &["ls", "--json", "p:/none", "p:/"], &["cat", "p:/none", "p:/big"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Ran::of(dir.command(args).stdout(writer).stderr(Stdio::piped())).fails(1, &["p:/none"]);
    }
    let full = File::options().write(true).open("/dev/full").unwrap();
    for args in [&["cat", "p:/big"][..], &["ls", "p:/"], &["info"], &["--help"]] {
        let ran = Ran::of(dir.command(args).stdout(full.try_clone().unwrap()).stderr(Stdio::piped()));
        ran.fails(1, &["standard output", "No space left"]);
    }
}

/// A copy that waits for more input.
fn stuck_copy(dir: &Dir, from: &str, to: &str) -> (Child, File) {
    let fifo = dir.path(from);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let mut command = dir.command(&["cp", from, to]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = File::options().write(true).open(&fifo).unwrap();
    pipe.write_all(&vec![7; 3 << 20]).unwrap();
    (child, pipe)
}

#[test]
fn an_interrupted_copy_leaves_no_half_file() {
    let dir = Dir::new("interrupt");
    dir.pool("p", 32);
    for (fifo, to) in [("one", "p:/copy"), ("two", "p:/copy2")] {
        let (child, pipe) = stuck_copy(&dir, fifo, to);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let ended = child.wait_with_output().unwrap();
        drop(pipe);
        let ran = Ran {
            code: ended.status.code(),
            out: ended.stdout,
            err: String::from_utf8(ended.stderr).unwrap(),
        };
        ran.fails(1, &[to, "interrupted", "incomplete copy was removed"]);
    }
    assert_eq!(dir.ok(&["ls", "p:/"]), "");
    assert_eq!(json(&dir.ok(&["info", "p", "--json"]))["pool"]["state"]["clean"], true);
}

#[test]
fn a_killed_copy_leaves_a_pool_that_recovers() {
    let dir = Dir::new("killed");
    let image = dir.pool("p", 32);
    dir.write("file", b"before");
    dir.ok(&["cp", "file", "p:/file"]);
    let (mut child, pipe) = stuck_copy(&dir, "fifo", "p:/copy");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(pipe);
    // Readers recover a private copy: the image stays as the kill left it.
    unchanged(&image, || {
        let info = dir.ok(&["info", "p"]);
        assert!(info.contains("the next use recovers it"), "{info}");
        assert_eq!(dir.ok(&["cat", "p:/file"]), "before");
        assert_eq!(dir.ok(&["ls", "p:/"]), "copy\nfile\n");
    });
    dir.ok(&["rm", "p:/copy"]);
    assert_eq!(dir.ok(&["ls", "p:/"]), "file\n");
    assert_eq!(json(&dir.ok(&["info", "p", "--json"]))["pool"]["state"]["clean"], true);
}

#[test]
fn a_pool_of_several_regions_is_named_by_the_first() {
    let dir = Dir::new("regions");
    dir.ok(&["mkfs", "a,b,c", "--size", "48M", "--stripe", "64K"]);
    file_of(&dir, "file", 5 * MIB);
    dir.ok(&["cp", "file", "a:/file"]);
    assert_eq!(dir.run(&["cat", "a:/file"]).out, fs::read(dir.path("file")).unwrap());
    dir.run(&["ls", "b:/"]).fails(1, &["b", "region 0"]);
    let info = json(&dir.ok(&["info", "a", "--json"]));
    assert_eq!(info["pool"]["media"]["regions"].as_array().unwrap().len(), 3);
    dir.run(&["mkfs", "d,d", "--size", "48M"]).fails(1, &["named twice"]);
    assert!(!dir.path("d").exists());
    fs::remove_file(dir.path("c")).unwrap();
    dir.run(&["ls", "a:/"]).fails(1, &["c", "No such file or directory; bring it back"]);
    file_of(&dir, "c", 17 * MIB);
    File::options().write(true).open(dir.path("b")).unwrap().write_all_at(&[0xff; 8], 40).unwrap();
    dir.run(&["ls", "a:/"]).fails(1, &["the label of", "b is damaged", "bring the right file back"]);
    fs::rename(dir.path("c"), dir.path("b")).unwrap();
    dir.run(&["ls", "a:/"]).fails(1, &["b belongs to another pool", "bring the right file back"]);
}

#[test]
fn the_mount_helper_answers_to_its_names() {
    let dir = Dir::new("helper");
    for name in ["mount.lode", "mount.fuse.lode"] {
        let link = dir.path(name);
        symlink(LODE, &link).unwrap();
        Ran::of(Command::new(&link).current_dir(&dir.0)).fails(2, &["pool"]);
        Ran::of(Command::new(&link).args(["none", "."]).current_dir(&dir.0)).fails(1, &["none"]);
    }
}

#[test]
fn fsck_writes_a_lost_label_again() {
    let dir = Dir::new("lost-label");
    let file = file_of(&dir, "file", 100_000);
    type Damage<'a> = &'a dyn Fn(&File);
    let cases: [(&str, Damage); 4] = [
        ("flipped", &|f| f.write_all_at(&[0xff; 8], 40).unwrap()),
        ("zeros", &|f| f.write_all_at(&[0; BLOCK as usize], 0).unwrap()),
        ("overwritten", &|f| f.write_all_at(&[0x55; 512], 0).unwrap()),
        ("longer", &|f| {
            f.write_all_at(&[0; BLOCK as usize], 0).unwrap();
            f.set_len(20 * MIB + 77).unwrap();
        }),
    ];
    let open = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
    for (name, damage) in cases {
        let pool = dir.pool(name, 16);
        dir.ok(&["cp", "file", &format!("{name}:/file")]);
        damage(&open(&pool));
        dir.run(&["ls", &format!("{name}:/")]).fails(1, &[name, "lode fsck"]);
        let ran = unchanged(&pool, || dir.run(&["fsck", name, "--json"]));
        assert_eq!((ran.code, ran.err.as_str()), (Some(4), ""), "{name}");
        let document = json(std::str::from_utf8(&ran.out).unwrap());
        let findings = document["findings"].as_array().unwrap();
        assert_eq!(
            (findings.len(), &findings[0]["kind"], &findings[0]["block"]),
            (1, &"label".into(), &0.into())
        );
        let ran = dir.run(&["fsck", name, "--repair"]);
        assert_eq!(ran.code, Some(1), "{name}: {}", ran.err);
        assert!(String::from_utf8(ran.out).unwrap().contains("label in block 0"), "{name}");
        dir.ok(&["fsck", name]);
        dir.ok(&["cp", &format!("{name}:/file"), "back"]);
        assert!(fs::read(dir.path("back")).unwrap() == fs::read(&file).unwrap(), "{name}");
        fs::remove_file(dir.path("back")).unwrap();
    }

    // One superblock is too little to go by, and of several regions none says where the others are.
    let pool = dir.pool("half", 16);
    open(&pool).write_all_at(&[0; 2 * BLOCK as usize], 0).unwrap();
    dir.ok(&["mkfs", "a,b", "--size", "16M"]);
    open(&dir.path("a")).write_all_at(&[0xff; 8], 40).unwrap();
    for name in ["half", "a"] {
        for args in [&["fsck", name][..], &["fsck", name, "--repair"]] {
            unchanged(&dir.path(name), || dir.run(args)).fails(8, &[name]);
        }
    }
    // Whose label is gone altogether is not said to be no pool.
    open(&dir.path("a")).write_all_at(&[0; BLOCK as usize], 0).unwrap();
    for args in [&["fsck", "a"][..], &["fsck", "a", "--repair"], &["ls", "a:/"]] {
        let ran = unchanged(&dir.path("a"), || dir.run(args));
        ran.fails(if args[0] == "fsck" { 8 } else { 1 }, &["a has no label", "restore block 0 from a copy"]);
    }
}

#[test]
fn a_finding_says_the_bytes_of_a_path_that_is_no_text() {
    let dir = Dir::new("fsck-hex");
    let pool = dir.pool("p", 8);
    fs::create_dir(dir.path("in")).unwrap();
    let file = dir.path("in").join(OsStr::from_bytes(b"bad\xff"));
    fs::rename(file_of(&dir, "file", 10_000), &file).unwrap();
    dir.ok(&["cp", "-r", "in", "p:/"]);
    let (image, wanted) = (fs::read(&pool).unwrap(), &fs::read(&file).unwrap()[..4096]);
    let at = image.chunks(4096).position(|block| block == wanted).expect("the data are there") as u64 * 4096;
    File::options().write(true).open(&pool).unwrap().write_all_at(&[!wanted[0]], at).unwrap();
    let finding = &json(std::str::from_utf8(&dir.run(&["fsck", "p", "--json"]).out).unwrap())["findings"][0];
    assert_eq!(
        (&finding["path"], &finding["path_hex"]),
        (&"/in/bad\u{fffd}".into(), &"2f696e2f626164ff".into())
    );
}

#[test]
fn a_label_is_one_line() {
    use lodestone::fs::MkfsOptions;
    use lodestone::fs::format::{SUPER_BYTES, Super};
    let dir = Dir::new("label");
    dir.run(&["mkfs", "p", "--label", "a\nb"]).fails(2, &["control characters"]);
    let odd = MkfsOptions { label: "a\nb".into(), ..MkfsOptions::default() };
    assert_eq!(odd.check(None).unwrap_err().errno(), libc::EINVAL);
    // One that was made all the same.
    dir.ok(&["mkfs", "p", "--size", "16M", "--label", "plain"]);
    assert!(dir.ok(&["info", "p"]).contains("\n  label     plain\n"));
    let file = File::options().read(true).write(true).open(dir.path("p")).unwrap();
    let mut bytes = [0; SUPER_BYTES];
    file.read_exact_at(&mut bytes, BLOCK).unwrap();
    let label = "a\n  uuid\u{1b}[2J".to_owned();
    let Ok(sb) = Super::decode(&bytes) else { panic!("no superblock") };
    let bytes = Super { label, ..sb }.encode();
    for block in [1, 16 * MIB / BLOCK - 1] {
        file.write_all_at(&bytes, block * BLOCK).unwrap();
    }
    let shown = dir.ok(&["info", "p"]);
    assert!(shown.contains("\n  label     $'a\\n  uuid\\033[2J'\n"), "{shown}");
}

#[test]
fn fsck_finds_says_and_repairs() {
    let dir = Dir::new("fsck");
    let pool = dir.pool("p", 8);
    let file = file_of(&dir, "file", 100_000);
    dir.ok(&["cp", "file", "p:/file"]);
    dir.ok(&["cp", "file", "p:/other"]);
    let said = unchanged(&pool, || dir.ok(&["fsck", "p"]));
    assert!(said.starts_with("p: clean: 2 files, 1 directories"), "{said}");
    let document = json(&unchanged(&pool, || dir.ok(&["fsck", "p", "--json"])));
    assert_eq!((&document["result"], &document["closed"]), (&"clean".into(), &true.into()));
    assert_eq!(document["findings"], Value::Array(Vec::new()));

    // A byte of the data, wherever it stands.
    let image = fs::read(&pool).unwrap();
    let wanted = &fs::read(&file).unwrap()[..4096];
    let at = image.chunks(4096).position(|block| block == wanted).expect("the data are there") as u64 * 4096;
    let flip = |at: u64| {
        let mut byte = [0];
        let file = File::options().read(true).write(true).open(&pool).unwrap();
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    flip(at + 5);
    let ran = unchanged(&pool, || dir.run(&["fsck", "p"]));
    let out = String::from_utf8(ran.out).unwrap();
    assert_eq!((ran.code, ran.err.as_str()), (Some(4), ""), "{out}");
    assert!(out.contains("/file") && out.contains("do not match their checksum"), "{out}");
    assert!(out.contains("a repair:") && out.contains("lode fsck --repair"), "{out}");
    let ran = unchanged(&pool, || dir.run(&["fsck", "p", "--json"]));
    assert_eq!(ran.code, Some(4));
    let document = json(std::str::from_utf8(&ran.out).unwrap());
    assert_eq!(document["result"], "damaged");
    let finding = &document["findings"][0];
    assert_eq!((&finding["kind"], &finding["path"]), (&"data".into(), &"/file".into()));
    assert_eq!((&finding["from"], &finding["repaired"]), (&0.into(), &false.into()));

    // The code is what is known of the pool, whoever reads the rest.
    for (to, code) in [("/dev/full", 8), ("/dev/null", 4)] {
        let to = File::options().write(true).open(to).unwrap();
        let status = Command::new(LODE)
            .current_dir(&dir.0)
            .args(["fsck", "p"])
            .stdout(to)
            .stderr(Stdio::null())
            .status();
        assert_eq!(status.unwrap().code(), Some(code));
    }

    let ran = dir.run(&["fsck", "p", "--repair"]);
    let out = String::from_utf8(ran.out).unwrap();
    assert_eq!(ran.code, Some(1), "{out}{}", ran.err);
    assert!(out.contains("; repaired: ") && out.contains("p: repaired"), "{out}");
    unchanged(&pool, || dir.ok(&["fsck", "p", "--repair"]));
    dir.ok(&["cp", "p:/other", "back"]);
    assert!(fs::read(dir.path("back")).unwrap() == fs::read(&file).unwrap());
    dir.ok(&["rm", "p:/file"]);
    dir.ok(&["fsck", "p"]);

    // Nothing to check, or nobody may now.
    dir.write("none", &[7; 8 << 20]);
    dir.run(&["fsck", "none"]).fails(8, &["none"]);
    let ran = dir.run(&["fsck", "missing", "--json"]);
    ran.fails(8, &["missing"]);
    assert_eq!(json(std::str::from_utf8(&ran.out).unwrap())["result"], "not-checked");
    let held = lodestone::media::Pool::open(&pool, &lodestone::media::PoolOptions::default()).unwrap();
    for args in [["fsck", "p", "--json"], ["fsck", "p", "--repair"]] {
        dir.run(&args).fails(8, &["p", "in use"]);
    }
    drop(held);
}

#[test]
fn crash_counts_and_replays_what_a_file_says() {
    let dir = Dir::new("crash");
    dir.write("lines", b"# two sequences\nfoo:9000 | write foo 13 7\n\n| mkdir A\n| rename A B # moved\n");
    let common = ["crash", "--workload", "lines", "--image", "fresh", "--data", "cow", "--json"];
    let counts = |threads: &str| {
        let found = json(&dir.ok(&[&common[..], &["--threads", threads]].concat()));
        ["workloads", "crash_points", "covered_points", "states", "violations", "seed"]
            .map(|name| found[name].as_u64().unwrap_or_else(|| panic!("{name} is missing: {found}")))
    };
    let [workloads, points, covered, states, violations, seed] = counts("1");
    assert_eq!((workloads, violations, seed), (6, 0, 1), "two sequences in three domains");
    assert!(points > workloads && covered <= points && states > points);
    assert_eq!(counts("2"), [workloads, points, covered, states, violations, seed], "whatever the threads");
    let parts: u64 = ["1/3", "2/3", "3/3"]
        .map(|part| {
            json(&dir.ok(&[&common[..], &["--samples", "all", "--part", part]].concat()))["states"]
                .as_u64()
                .unwrap()
        })
        .iter()
        .sum();
    assert_eq!(parts, states, "the third part of two has none");

    dir.write("bad", b"foo | write foo\n");
    dir.run(&["crash", "--workload", "bad"]).fails(1, &["bad", "line 1"]);
    dir.run(&["crash", "--workload", "absent"]).fails(1, &["absent", "seq1"]);
    dir.run(&["crash", "--domain", "volatile"]).fails(2, &["volatile"]);
    for part in ["0/2", "3/2", "1", "1/0", "1/1000001"] {
        dir.run(&["crash", "--part", part]).fails(2, &["K/N"]);
    }
    dir.run(&["crash", "--samples", "most"]).fails(2, &["all"]);
    dir.run(&["crash", "--workload", "/dev/zero"]).fails(1, &["/dev/zero", "more than 16 MiB"]);
}
