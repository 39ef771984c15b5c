//! What a mount server tells: metrics, state, `lode top`; and that asking it, in whatever way, does the mount no harm.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

use crate::need_mount;
use crate::rig::{Rig, fail, lode, mounts, pattern, succeed, text, wait_until};

/// Copies of the emulated device, of class bandwidth, for owner 7; nothing is kept by the kernel.
const WITH_A_CLASS: &str = "engine=emu,class=bandwidth:7,cache=none,assume=memory";
const MIB: usize = 1 << 20;
/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pool whose servers have a runtime directory of their own.
struct Bed {
    rig: Rig,
}

impl Bed {
    fn new() -> Bed {
        let rig = Rig::new("64M");
        fs::create_dir(rig.beside("run")).unwrap();
        fs::set_permissions(rig.beside("run"), Permissions::from_mode(0o700)).unwrap();
        Bed { rig }
    }

    fn mounted(options: &str) -> Bed {
        let bed = Bed::new();
        mounts(&mut bed.mount_command(options));
        bed
    }

    fn at_home<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("XDG_RUNTIME_DIR", self.rig.beside("run")).env_remove("LODE_METRICS")
    }

    fn mount_command(&self, options: &str) -> Command {
        let mut command = self.rig.mount_command(options);
        self.at_home(&mut command);
        command
    }

    fn top(&self, target: impl AsRef<Path>) -> Command {
        let mut command = lode();
        self.at_home(&mut command).arg("top").arg(target.as_ref());
        command
    }

    /// What `lode top --json` prints.
    fn state_of(&self, target: impl AsRef<Path>) -> Value {
        let output = self.top(target).arg("--json").output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn state(&self) -> Value {
        self.state_of(self.rig.dir())
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let dir = self.rig.beside("run/lodestone");
        fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
    }

    /// So many requests of a MiB each.
    fn write(&self, name: &str, count: usize) {
        let file = File::options().write(true).create(true).truncate(false).open(self.rig.at(name)).unwrap();
        for n in 0..count {
            file.write_all_at(&pattern(MIB, n as u64 + 1), (n * MIB) as u64).unwrap();
        }
    }
}

/// On an ordinary file each of them makes the epochs go on, which they do by themselves only every few seconds.
#[test]
fn what_is_asked_to_be_durable_is_when_it_is_answered() {
    need_mount!();
    const COUNT: u64 = 40;
    let epochs = |options: &str, work: &dyn Fn(&Bed)| {
        let bed = Bed::mounted(options);
        fs::write(bed.rig.at("f"), [1; 8192]).unwrap();
        let before = number(&bed.state()["pool"]["sync_epoch"]);
        work(&bed);
        number(&bed.state()["pool"]["sync_epoch"]) - before
    };
    let written = |flags: i32| {
        move |bed: &Bed| {
            let file = File::options().write(true).custom_flags(flags).open(bed.rig.at("f")).unwrap();
            let page = Page([7; 4096]);
            (0..COUNT).for_each(|n| file.write_all_at(&page.0, n % 2 * 4096).unwrap());
        }
    };
    for flags in [libc::O_DSYNC, libc::O_SYNC] {
        assert!(epochs("cache=none", &written(flags)) >= COUNT);
        assert!(epochs("cache=auto", &written(flags)) >= COUNT);
        assert!(epochs("cache=auto", &written(flags | libc::O_DIRECT)) >= COUNT);
    }
    assert!(epochs("sync", &written(0)) >= COUNT);
    let named = |bed: &Bed| {
        for n in 0..COUNT / 2 {
            fs::create_dir(bed.rig.at(format!("d{n}"))).unwrap();
            fs::rename(bed.rig.at(format!("d{n}")), bed.rig.at(format!("e{n}"))).unwrap();
        }
    };
    assert!(epochs("dirsync", &named) >= COUNT);
    assert!(epochs("sync", &named) >= COUNT);
}

/// The server counts every byte that a request moves, and `lode cost --pool` asks it.
#[test]
fn what_is_served_is_counted_to_the_byte() {
    need_mount!();
    let bed = Bed::mounted("cache=none");
    bed.write("f", 3);
    assert_eq!(fs::read(bed.rig.at("f")).unwrap().len(), 3 * MIB);
    let served = bed.state()["served"].clone();
    assert_eq!(
        (number(&served["written_bytes"]), number(&served["read_bytes"])),
        (3 * MIB as u64, 3 * MIB as u64)
    );

    let cost = |pool: &Path, command: [&str; 3]| {
        let mut lode = lode();
        bed.at_home(&mut lode).args(["cost", "--json", "--idle", "0", "--runs", "2", "--pool"]).arg(pool);
        lode.arg("--").args(command).output().unwrap()
    };
    let from = format!("if={}", bed.rig.at("f").display());
    let measured = cost(&bed.rig.dir(), ["dd", &from, "bs=64K"]);
    assert!(measured.status.success(), "{}", text(&measured.stderr));
    let report: Value = serde_json::from_slice(&measured.stdout).unwrap();
    for run in report["runs"].as_array().unwrap() {
        assert_eq!((run["bytes_from"].as_str(), number(&run["bytes"])), (Some("pool"), 3 * MIB as u64));
    }
    for (pool, says) in [(bed.rig.dir(), "moved nothing"), (bed.rig.at("f"), "no Lodestone pool")] {
        let refused = cost(&pool, ["sleep", "0", "0"]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(says), "{}", text(&refused.stderr));
    }
}

/// A write of many pieces, in a pool of which only pieces are free, is one batch for its engine, and so is the next over it.
#[test]
fn a_write_in_pieces_is_one_batch() {
    need_mount!();
    const PIECE: usize = 64 << 10;
    const PIECES: usize = 8;
    let bed = Bed::mounted("engine=emu,cache=none,assume=memory");
    let fill = File::options().write(true).create_new(true).open(bed.rig.at("fill")).unwrap();
    let (mut size, mut step) = (0, MIB as u64);
    while step >= 4096 {
        match fallocate(&fill, FallocateFlags::empty(), size, step) {
            Ok(()) => size += step,
            Err(e) => {
                assert_eq!(e, rustix::io::Errno::NOSPC);
                step /= 2;
            }
        }
    }
    assert!(size > 48 << 20, "{size} bytes fill 64 MiB");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for at in (0..size).step_by(2 * PIECE) {
        fallocate(&fill, punch, at, PIECE as u64).unwrap();
    }
    let file = File::options().read(true).write(true).create_new(true).open(bed.rig.at("f")).unwrap();
    let ino = file.metadata().unwrap().ino();
    for seed in [1, 2] {
        let bytes = pattern(PIECES * PIECE, seed);
        let before = bed.state()["mover"].clone();
        file.write_all_at(&bytes, 0).unwrap();
        let after = bed.state()["mover"].clone();
        let growth = |of: &str| number(&after[of]) - number(&before[of]);
        assert_eq!(
            (growth("copies"), growth("bytes")),
            (1, bytes.len() as u64),
            "the engine has all at once"
        );
        assert_eq!((growth("busy"), growth("finished")), (0, 0), "and does all of it");
        let mut found = vec![0; bytes.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == bytes, "write {seed}");
    }
    drop((fill, file));
    bed.rig.umount();
    // The pieces that it has in the end, as the log says.
    let dumped = lode().arg("dump").arg(bed.rig.pool()).arg(ino.to_string()).output().unwrap();
    let dumped = text(&dumped.stdout);
    let writes: Vec<&str> = dumped.lines().filter(|line| line.contains(" pages ")).collect();
    let pieces = writes.last().map_or(0, |line| line.matches("-> blocks").count());
    assert!(pieces >= PIECES / 2, "{pieces} pieces: {dumped}");
}

/// A program that knows of no classes has that of its I/O priority, on a mount that has none.
#[test]
fn idle_priority_is_class_bandwidth() {
    need_mount!();
    let bed = Bed::mounted("engine=emu,cache=none,assume=memory");
    let to = format!("of={}", bed.rig.at("f").display());
    let copied = || {
        let state = bed.state();
        let engines = state["mover"]["engines"].as_array().unwrap();
        let groups = engines.iter().flat_map(|engine| engine["groups"].as_array().unwrap().clone());
        groups.map(|group| number(&group["bandwidth"]["bytes"])).sum::<u64>()
    };
    let dd = ["dd", "if=/dev/zero", &to, "bs=1M", "count=4", "status=none"];
    succeed(Command::new(dd[0]).args(&dd[1..]));
    assert_eq!(copied(), 0, "who says nothing has no class");
    succeed(Command::new("ionice").arg("-c3").args(dd));
    assert_eq!(copied(), 4 * MIB as u64);
    let owners = bed.state()["mover"]["engines"][0]["owners"].clone();
    assert_eq!(number(&owners[0]["owner"]), u64::from(rustix::process::getuid().as_raw()));
}

/// Aligned as direct I/O asks.
#[repr(align(4096))]
struct Page([u8; 4096]);

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

fn connect(address: &str) -> Box<dyn Stream> {
    match address.strip_prefix("unix:") {
        Some(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        None => {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
    }
}

/// Head and body.
fn request(address: &str, method: &str, path: &str) -> (String, String) {
    let mut stream = connect(address);
    stream.write_all(format!("{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {answer:?}"));
    (head.to_owned(), body.to_owned())
}

/// Whether it does, to a request that a server which has too many may give up.
fn answers(address: &str) -> bool {
    let mut stream = connect(address);
    let asked = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    asked.is_ok() && stream.read_to_end(&mut Vec::new()).is_ok_and(|bytes| bytes > 0)
}

fn get(address: &str, path: &str) -> String {
    let (head, body) = request(address, "GET", path);
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    body
}

/// Samples by series; each has a HELP and a TYPE of its family in front of it. The second: those that are counters.
fn samples(text: &str) -> (BTreeMap<String, f64>, Vec<String>) {
    let (mut samples, mut counters) = (BTreeMap::new(), Vec::new());
    let (mut family, mut kind) = ("", "");
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            (family, kind) = (name, "");
            assert!(!words.is_empty(), "{line}");
        } else if let Some(what) = line.strip_prefix("# TYPE ") {
            let (name, is) = what.split_once(' ').unwrap();
            assert_eq!(name, family, "TYPE without HELP");
            kind = is;
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert_eq!(series.split('{').next(), Some(family), "{line}");
            assert!(family.starts_with("lodestone_") && ["counter", "gauge"].contains(&kind), "{line}");
            if kind == "counter" {
                counters.push(series.to_owned());
            }
            let value: f64 = value.parse().unwrap_or_else(|e| panic!("{line}: {e}"));
            assert!(samples.insert(series.to_owned(), value).is_none(), "{series} comes twice");
        }
    }
    (samples, counters)
}

#[test]
fn metrics_and_state_agree_with_what_was_written() {
    need_mount!();
    let bed = Bed::mounted(&format!("{WITH_A_CLASS},metrics=127.0.0.1:0"));
    let state = bed.state();
    let listens = state["server"]["listens"].as_array().unwrap();
    assert_eq!(listens.len(), 2, "{listens:?}");
    let (tcp, own) = (listens[0].as_str().unwrap(), listens[1].as_str().unwrap());
    assert!(tcp.starts_with("127.0.0.1:") && own.starts_with("unix:"), "{listens:?}");
    bed.write("f", 4);
    let (first, counters) = samples(&get(tcp, "/metrics"));
    let before = bed.state();
    bed.write("f", 16);
    let after = bed.state();
    let engine = |state: &Value| state["mover"]["engines"][0].clone();
    let bandwidth = |state: &Value, of: &str| {
        let groups = engine(state)["groups"].as_array().unwrap().clone();
        groups.iter().map(|group| number(&group["bandwidth"][of])).sum::<u64>()
    };
    let moved = |of: &str| bandwidth(&after, of) - bandwidth(&before, of);
    // All of it is the engine's, in pieces of 64 KiB, but for ends of free runs that are too small for it.
    let written = 16 * MIB as u64;
    assert!((written / 8 * 7..=written).contains(&moved("bytes")), "{} of {written} bytes", moved("bytes"));
    assert!(moved("copies") >= moved("bytes").div_ceil(64 << 10), "{} pieces", moved("copies"));
    assert_eq!(engine(&after)["engine"], "emu");
    let growth = |of: &str| number(&after["mover"][of]) - number(&before["mover"][of]);
    assert_eq!(growth("bytes"), moved("bytes"), "nobody else copies");
    assert!(growth("copies") >= 16, "{} copies", growth("copies"));
    let (last, _) = samples(&get(own, "/metrics"));
    assert!(counters.len() > 15, "{counters:?}");
    for series in counters {
        assert!(last[&series] >= first[&series], "{series} shrank: {} to {}", first[&series], last[&series]);
    }
    let owners = engine(&after)["owners"].as_array().unwrap().clone();
    assert_eq!(owners.len(), 1, "{owners:?}");
    assert_eq!((number(&owners[0]["owner"]), number(&owners[0]["bytes"])), (7, bandwidth(&after, "bytes")));
    let series = "lodestone_owner_bytes_total{engine=\"emu\",owner=\"7\"}";
    assert_eq!(last[series] as u64, number(&owners[0]["bytes"]));
    assert_eq!(last["lodestone_copied_bytes_total"] as u64, number(&after["mover"]["bytes"]));
    assert_eq!(last["lodestone_pool_size_bytes"] as u64, 64 << 20);
    assert_eq!(after["pool"]["path"], bed.rig.pool().to_str().unwrap());
    assert_eq!(after["server"]["mount_point"], bed.rig.dir().to_str().unwrap());
    assert!(number(&before["pool"]["blocks_free"]) > number(&after["pool"]["blocks_free"]));
    // The pool, the mount point and addresses are the same mount.
    for target in [bed.rig.pool(), PathBuf::from(tcp), PathBuf::from(own)] {
        assert_eq!(number(&bed.state_of(&target)["mover"]["bytes"]), number(&after["mover"]["bytes"]));
    }
    let told: Value = serde_json::from_str(&get(tcp, "/state")).unwrap();
    assert_eq!(told["mover"], after["mover"]);
    let uuid = lode().args(["info", "--json"]).arg(bed.rig.pool()).output().unwrap();
    let info: Value = serde_json::from_slice(&uuid.stdout).unwrap();
    assert_eq!(info["pool"]["uuid"], after["pool"]["uuid"]);
    bed.rig.umount();
    assert_eq!(bed.sockets(), [] as [&Path; 0]);
}

#[test]
fn only_what_is_there_is_answered() {
    need_mount!();
    let bed = Bed::new();
    let address = format!("unix:{}", bed.rig.beside("m.sock").display());
    succeed(&mut bed.mount_command(&format!("rw,metrics={address}")));
    let (head, body) = request(&address, "HEAD", "/metrics");
    assert!(
        head.contains("200 OK") && head.contains("text/plain; version=0.0.4") && body.is_empty(),
        "{head}"
    );
    let (head, body) = request(&address, "GET", "/metrics?x=1");
    assert!(head.contains("200 OK") && body.contains("one in 64"), "{head}");
    assert!(request(&address, "GET", "/state").0.contains("application/json"));
    let (head, body) = request(&address, "GET", "/elsewhere");
    assert!(head.contains("404") && body.contains("/metrics"), "{head}");
    let (head, _) = request(&address, "DELETE", "/state");
    assert!(head.contains("405") && head.to_lowercase().contains("allow: get"), "{head}");
    bed.rig.umount();
    assert!(!bed.rig.beside("m.sock").exists());
}

#[test]
fn top_prints_one_look() {
    need_mount!();
    let bed = Bed::mounted(WITH_A_CLASS);
    bed.write("f", 4);
    for target in [bed.rig.pool(), bed.rig.dir()] {
        let output = bed.top(&target).args(["--once", "--interval", "0.1"]).output().unwrap();
        let (said, complained) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && complained.is_empty(), "{complained}");
        for part in [
            "engine emu (emulated), class bandwidth:7",
            "MiB free of 64 MiB",
            "late epochs",
            "operation",
            "bandwidth ",
        ] {
            assert!(said.contains(part), "no {part:?} in\n{said}");
        }
        // The pool's path is as long as it is.
        assert!(said.lines().skip(1).all(|line| line.len() <= 80), "{said}");
        assert!(!said.contains('\x1b'), "{said}");
    }
    // Standard output is no terminal here.
    let piped = bed.top(bed.rig.pool()).args(["--interval", "0.1"]).output().unwrap();
    assert!(text(&piped.stdout).contains("late epochs"));
    bed.rig.umount();
}

#[test]
fn top_says_that_a_server_is_gone() {
    need_mount!();
    let bed = Bed::mounted("rw");
    let pid = number(&bed.state()["server"]["pid"]);
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    wait_until("the mount is dead", || fs::metadata(bed.rig.dir()).is_err());
    for target in [bed.rig.pool(), bed.rig.dir()] {
        fail(&mut bed.top(target), 1, "its server is gone");
    }
    // That is the advice.
    assert!(bed.mount_command("rw").output().unwrap().status.success());
    assert!(bed.top(bed.rig.dir()).args(["--once", "--interval", "0.1"]).output().unwrap().status.success());
    bed.rig.umount();
}

/// Its socket is alive when it is looked for, and hangs up on who asks.
#[test]
fn a_server_that_dies_as_it_is_asked_is_gone() {
    need_mount!();
    let bed = Bed::mounted("rw");
    let sockets = bed.sockets();
    let [socket] = &sockets[..] else { panic!("{sockets:?}") };
    let pid = number(&bed.state()["server"]["pid"]);
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    wait_until("the mount is dead", || fs::metadata(bed.rig.dir()).is_err());
    wait_until("its socket is dead", || UnixStream::connect(socket).is_err());
    for target in [bed.rig.pool(), bed.rig.dir()] {
        fs::remove_file(socket).unwrap();
        let dying = UnixListener::bind(socket).unwrap();
        let dies = thread::spawn(move || (0..2).for_each(|_| drop(dying.accept().unwrap())));
        fail(&mut bed.top(target), 1, "its server is gone");
        dies.join().unwrap();
    }
    assert!(bed.mount_command("rw").output().unwrap().status.success());
    bed.rig.umount();
}

#[test]
fn clients_that_misbehave_harm_nobody() {
    need_mount!();
    let bed = Bed::mounted("rw,metrics=127.0.0.1:0");
    let state = bed.state();
    let addresses: Vec<&str> = state["server"]["listens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|address| address.as_str().unwrap())
        .collect();
    for address in &addresses {
        // The server may hang up before it has read all of it.
        for garbage in
            [&pattern(100_000, 3)[..], b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
        {
            let mut stream = connect(address);
            let _ = stream.write_all(garbage);
            let _ = stream.read_to_end(&mut Vec::new());
        }
        // Headers without an end.
        let mut endless = connect(address);
        let _ = endless.write_all(b"GET /state HTTP/1.1\r\n");
        while endless.write_all(b"X: 0123456789012345678901234567890123456789\r\n").is_ok() {}
    }
    let mut open = Vec::new();
    for n in 0..200 {
        let mut stream = connect(addresses[n % addresses.len()]);
        if n % 10 == 0 {
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: he");
        }
        open.push(stream);
    }
    for address in &addresses {
        // Of so many that wait to be accepted it may be among those that are given up for later ones.
        wait_until("it answers", || answers(address));
        assert!(samples(&get(address, "/metrics")).0.len() > 20);
    }
    fs::write(bed.rig.at("f"), "alive").unwrap();
    assert_eq!(bed.state()["pool"]["bytes"], 64 << 20);
    bed.rig.umount();
    assert_eq!(bed.sockets(), [] as [&Path; 0]);
    drop(open);
}

#[test]
fn what_a_killed_server_left_is_replaced() {
    need_mount!();
    let mut bed = Bed::new();
    let metrics = bed.rig.beside("m.sock");
    let options = format!("rw,metrics=unix:{}", metrics.display());
    let mut server = bed.mount_command(&options).arg("-f").spawn().unwrap();
    wait_until("the mount is live", || bed.rig.is_mounted() && bed.sockets().len() == 1);
    let number_of = |bed: &Bed| number(&bed.state()["server"]["pid"]);
    wait_until("it answers", || bed.top(bed.rig.dir()).arg("--json").output().unwrap().status.success());
    assert_eq!(number_of(&bed), u64::from(server.id()));
    kill_process(Pid::from_child(&server), Signal::KILL).unwrap();
    server.wait().unwrap();
    assert!(metrics.exists() && bed.sockets().len() == 1, "{:?}", bed.sockets());
    fail(&mut bed.top(bed.rig.pool()), 1, "is not mounted");
    fail(&mut bed.top(format!("unix:{}", metrics.display())), 1, "no mount server answers");
    bed.rig.umount();
    succeed(&mut bed.mount_command(&options));
    assert_eq!(bed.sockets().len(), 1, "{:?}", bed.sockets());
    assert_ne!(number_of(&bed), u64::from(server.id()));
    get(&format!("unix:{}", metrics.display()), "/metrics");
    bed.rig.umount();
    assert!(!metrics.exists() && bed.sockets().is_empty());
    bed.rig = Rig::new("64M");
}

#[test]
fn mounts_are_told_apart() {
    need_mount!();
    let bed = Bed::mounted("rw");
    let other = Rig::new("80M");
    succeed(bed.at_home(&mut other.mount_command("rw")));
    let size = |target: PathBuf| number(&bed.state_of(target)["pool"]["bytes"]) >> 20;
    assert_eq!((size(bed.rig.pool()), size(bed.rig.dir())), (64, 64));
    assert_eq!((size(other.pool()), size(other.dir())), (80, 80));
    bed.rig.umount();
    assert_eq!(size(other.dir()), 80);
    other.umount();
    // One pool, read by two servers: it takes a mount point to name one.
    let second = bed.rig.beside("second");
    fs::create_dir(&second).unwrap();
    succeed(&mut bed.mount_command("ro"));
    succeed(bed.at_home(lode().arg("mount").arg(bed.rig.pool()).arg(&second).args(["-o", "ro"])));
    fail(&mut bed.top(bed.rig.pool()), 1, "is mounted 2 times");
    for dir in [bed.rig.dir(), second.clone()] {
        let server = &bed.state_of(&dir)["server"];
        assert_eq!(
            (&server["mount_point"], &server["read_only"]),
            (&dir.to_str().unwrap().into(), &true.into())
        );
    }
    succeed(lode().arg("umount").arg(&second));
    assert_eq!(bed.state_of(bed.rig.pool())["server"]["mount_point"], bed.rig.dir().to_str().unwrap());
    bed.rig.umount();
}

#[test]
fn an_address_that_cannot_be_had_is_an_error_before_the_mount() {
    need_mount!();
    let bed = Bed::mounted("rw,metrics=127.0.0.1:0");
    let state = bed.state();
    let taken = state["server"]["listens"][0].as_str().unwrap();
    let other = Rig::new("64M");
    let before = fs::read(other.pool()).unwrap();
    fail(&mut other.mount_command(&format!("metrics={taken}")), 1, "choose another port");
    fail(other.mount_command("rw").args(["--metrics", taken]), 1, taken);
    fail(other.mount_command("rw").env("LODE_METRICS", taken), 1, taken);
    let socket = bed.sockets()[0].clone();
    fail(
        &mut other.mount_command(&format!("metrics=unix:{}", socket.display())),
        1,
        "another server listens",
    );
    fail(&mut other.mount_command("metrics=unix:/nonexistent/m"), 1, "make its directory");
    fail(other.mount_command("rw").args(["--metrics", ":1"]), 2, "HOST:PORT");
    fail(other.mount_command("rw").args(["--metrics", "unix:/tmp/a,b"]), 2, "comma");
    let plain = other.beside("plain");
    fs::write(&plain, "kept").unwrap();
    fail(&mut other.mount_command(&format!("metrics=unix:{}", plain.display())), 1, "no socket");
    assert_eq!(fs::read(&plain).unwrap(), b"kept");
    assert!(!other.is_mounted() && fs::read(other.pool()).unwrap() == before, "nothing was changed");
    // Where only the socket for lode top cannot be had, the mount is not affected.
    let long = other.beside(&"x".repeat(100));
    fs::create_dir(&long).unwrap();
    let output = other.mount_command("rw").env("XDG_RUNTIME_DIR", &long).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("warning") && said.lines().count() == 1, "{said}");
    assert!(other.is_mounted());
    other.umount();
    bed.rig.umount();
}

#[test]
fn targets_that_tell_nothing_are_named() {
    need_mount!();
    let bed = Bed::new();
    let silent = bed.rig.beside("silent");
    let stranger = UnixListener::bind(&silent).unwrap();
    fail(&mut bed.top(bed.rig.pool()), 1, "is not mounted");
    fail(&mut bed.top(bed.rig.dir()), 1, "no pool is mounted on");
    fail(&mut bed.top(bed.rig.beside("none")), 1, "none");
    fail(&mut bed.top("/etc/passwd"), 1, "is no Lodestone pool");
    fail(&mut bed.top("127.0.0.1:1"), 1, "no mount server answers on 127.0.0.1:1");
    fail(&mut bed.top("127.0.0.1:x"), 2, "HOST:PORT");
    fail(bed.top("x").args(["--interval", "0"]), 2, "seconds");
    let answers = thread::spawn(move || {
        let (mut stream, _) = stranger.accept().unwrap();
        let _ = stream.read(&mut [0; 100]);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").unwrap();
    });
    fail(&mut bed.top(format!("unix:{}", silent.display())), 1, "is no mount server");
    answers.join().unwrap();
}

/// A terminal of 80 by 24: its two ends.
fn terminal() -> (OwnedFd, OwnedFd) {
    let ours = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&ours).unwrap();
    rustix::pty::unlockpt(&ours).unwrap();
    let name = rustix::pty::ptsname(&ours, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (ours, theirs.into())
}

#[test]
fn the_screen_leaves_the_terminal_as_it_was() {
    need_mount!();
    let bed = Bed::mounted("rw");
    // By a key, by a signal, and because the mount went away.
    for (way, code) in [("q", 0), ("\x1b", 0), ("\x03", 0), ("signal", 0), ("umount", 1)] {
        let (ours, theirs) = terminal();
        let is_cooked = |fd: &OwnedFd| {
            tcgetattr(fd.as_fd()).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO)
        };
        assert!(is_cooked(&theirs));
        let stdio = || Stdio::from(theirs.try_clone().unwrap());
        let mut command = bed.top(bed.rig.pool());
        command.args(["--interval", "0.1"]).stdin(stdio()).stdout(stdio()).stderr(Stdio::piped());
        let mut top = command.spawn().unwrap();
        drop(command);
        let mut ours = File::from(ours);
        let mut reader = ours.try_clone().unwrap();
        // A reader that goes on to the end, so that nobody waits for room.
        let (sender, shown) = std::sync::mpsc::channel();
        let reading = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                let _ = sender.send(bytes[..count].to_vec());
            }
        });
        let mut seen = Vec::new();
        while !text(&seen).contains("q ends") {
            seen.extend(shown.recv_timeout(PATIENCE).expect("the screen is drawn"));
        }
        assert!(!is_cooked(&theirs) && text(&seen).contains("\x1b[?1049h"), "{}", text(&seen));
        match way {
            "signal" => kill_process(Pid::from_child(&top), Signal::TERM).unwrap(),
            "umount" => bed.rig.umount(),
            key => ours.write_all(key.as_bytes()).unwrap(),
        }
        let status = top.wait().unwrap();
        let mut said = String::new();
        top.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(status.code(), Some(code), "{way:?}: {said}");
        assert_eq!(said.lines().count(), code as usize, "{said}");
        assert!(is_cooked(&theirs), "after {way:?}");
        drop(theirs);
        drop(ours);
        reading.join().unwrap();
        seen.extend(shown.try_iter().flatten());
        assert!(text(&seen).contains("\x1b[?1049l"), "{}", text(&seen));
    }
}

/// The commands of docs/top.md, in a directory of their own.
#[test]
fn the_example_of_the_documentation_works() {
    need_mount!();
    let bed = Bed::new();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/top.md");
    let page = fs::read_to_string(page).unwrap();
    let script = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let script = script.replace("/mnt", bed.rig.dir().to_str().unwrap());
    let bin = Path::new(env!("CARGO_BIN_EXE_lode")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-e", "-c", &script])
        .current_dir(bed.rig.beside("run"))
        .env("PATH", path)
        .stdin(Stdio::null());
    let output = bed.at_home(&mut shell).output().unwrap();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && complained.is_empty(), "{said}\n{complained}");
    for part in ["class bandwidth:7", "late epochs", "\"blocks_free\""] {
        assert!(said.contains(part), "no {part:?} in\n{said}");
    }
    assert!(!bed.rig.is_mounted());
}
