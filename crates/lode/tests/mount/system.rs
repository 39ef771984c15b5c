//! mount(8), umount(8) and fstab, as an administrator uses them, and a server in the background, which the system log hears.
//!
//! mount(8) looks for its helper in /sbin and nowhere else. So each test has a mount namespace of its own, in which /sbin
//! holds what `make install` puts there; the machine's own stays as it is.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::need_mount;
use crate::rig::{Rig, fail, lode, pattern, succeed, text, wait_until};

/// A pool, and a namespace in which mount(8) can mount it.
struct Space {
    rig: Rig,
    /// Keeps the namespace, until its input ends.
    keeper: Child,
}

impl Space {
    fn new() -> Space {
        let rig = Rig::new("64M");
        let (theirs, ours) = (rig.beside("sbin-theirs"), rig.beside("sbin-ours"));
        for dir in [&theirs, &ours] {
            fs::create_dir(dir).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_lode"), ours.join("mount.fuse.lode")).unwrap();
        // All else that is there stays in sight; a helper that was installed before gives way to ours.
        let script = "mount --bind /sbin \"$1\" && (cd \"$1\" && ls -A) | while read -r name; do
            [ -e \"$2/$name\" ] || ln -s \"$1/$name\" \"$2/$name\"; done && mount --bind \"$2\" /sbin && echo ready && exec cat";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"])
            .args([&theirs, &ours]);
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the namespace was not made");
        Space { rig, keeper }
    }

    /// A system log in the place of the machine's. The file is left to the caller.
    fn log(&self) -> UnixDatagram {
        let dev = self.rig.beside("dev");
        fs::create_dir(&dev).unwrap();
        let script = "mount --rbind /dev \"$1\" && mount -t tmpfs lode-test /dev && ln -s \"$1\"/* /dev &&
            rm -f /dev/log && ln -s \"$2\" /dev/log";
        succeed(self.run("sh").args(["-c", script, "sh"]).args([&dev, &self.log_path()]));
        self.bind_log()
    }

    fn log_path(&self) -> PathBuf {
        self.rig.beside("log")
    }

    /// As one that begins anew does.
    fn bind_log(&self) -> UnixDatagram {
        let _ = fs::remove_file(self.log_path());
        let log = UnixDatagram::bind(self.log_path()).unwrap();
        log.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        log
    }

    /// The process that serves the mount.
    fn server(&self) -> u32 {
        let output = lode().arg("fsck").arg(self.rig.pool()).output().unwrap();
        let said = text(&output.stderr);
        let (_, behind) = said.split_once("in use by process ").expect(&said);
        behind.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }

    fn is_clean(&self) -> bool {
        let info = lode().args(["info", "--json"]).arg(self.rig.pool()).output().unwrap();
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
        info["pool"]["state"]["clean"] == true
    }

    /// A command that runs in the namespace.
    fn run(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.keeper.id())).arg(program).stdin(Stdio::null());
        command
    }

    fn mount(&self, options: &str) -> Command {
        let mut command = self.run("mount");
        command.args(["-t", "fuse.lode", "-o", options]).arg(self.rig.pool()).arg(self.rig.dir());
        command
    }

    fn umount(&self) -> Command {
        let mut command = self.run("umount");
        command.arg(self.rig.dir());
        command
    }

    /// A path of the namespace, for who is outside.
    fn seen(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.keeper.id())).join(path.strip_prefix("/").unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.seen(&self.rig.at(name))
    }

    /// Type and options of what is mounted on `dir`.
    fn mounted(&self, dir: &Path) -> Option<(String, String)> {
        let mounts = fs::read_to_string(format!("/proc/{}/mounts", self.keeper.id())).unwrap();
        let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let line = mounts.lines().map(fields).rfind(|f| Path::new(&f[1]) == dir)?;
        Some((line[2].clone(), line[3].clone()))
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for dir in [self.rig.dir(), self.rig.beside("bound")] {
            if self.mounted(&dir).is_some() {
                let _ = self.run("umount").arg("-l").arg(dir).status();
            }
        }
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

fn has(options: &str, wanted: &str) -> bool {
    options.split(',').any(|option| option == wanted)
}

/// Round after round with nothing between: umount(8) returns while the server still closes the pool, and mount(8) waits.
#[test]
fn mount_finds_its_helper_and_what_umount_let_go() {
    need_mount!();
    let space = Space::new();
    for round in 0..10u64 {
        succeed(&mut space.mount("noatime,threads=2"));
        let (kind, options) = space.mounted(&space.rig.dir()).unwrap();
        assert_eq!(kind, "fuse.lode");
        assert!(has(&options, "noatime") && has(&options, "rw"), "{options}");
        for earlier in 0..round {
            let data = fs::read(space.at(&format!("f{earlier}"))).unwrap();
            assert!(data == pattern(300_000, earlier + 1), "f{earlier} in round {round}");
        }
        fs::write(space.at(&format!("f{round}")), pattern(300_000, round + 1)).unwrap();
        succeed(&mut space.umount());
        assert_eq!(space.mounted(&space.rig.dir()), None);
    }
    wait_until("the pool is closed", || {
        lode().arg("fsck").arg(space.rig.pool()).output().unwrap().status.success()
    });
    assert!(space.is_clean());
    assert!(!space.rig.is_mounted(), "the machine's own namespace has seen nothing");
}

#[test]
fn what_is_refused_is_said_by_mount_and_umount() {
    need_mount!();
    let space = Space::new();
    fail(&mut space.mount("frobnicate"), 2, "frobnicate");
    let text = space.rig.beside("text");
    fs::write(&text, pattern(1 << 20, 9)).unwrap();
    let mut wrong = space.run("mount");
    fail(wrong.args(["-t", "fuse.lode"]).arg(&text).arg(space.rig.dir()), 1, "text holds no Lodestone pool");
    assert_eq!(space.mounted(&space.rig.dir()), None);

    succeed(&mut space.mount("rw"));
    let open = File::create(space.at("f")).unwrap();
    fail(&mut space.umount(), 32, "target is busy");
    assert!(space.mounted(&space.rig.dir()).is_some());
    // Out of sight at once; the server goes on as long as the file is open.
    succeed(space.umount().arg("-l"));
    assert_eq!(space.mounted(&space.rig.dir()), None);
    fail(&mut space.mount("rw"), 1, "in use");
    drop(open);
    wait_until("the last user has gone", || space.mount("rw").output().unwrap().status.success());
    succeed(space.umount().arg("-f"));
    succeed(&mut space.mount("ro"));
    assert!(space.at("f").exists());
    succeed(&mut space.umount());
}

#[test]
fn lines_of_fstab_mount() {
    need_mount!();
    let space = Space::new();
    let (pool, dir) = (space.rig.pool(), space.rig.dir());
    let fstab = space.rig.beside("fstab");
    let write = |options: &str| {
        fs::write(&fstab, format!("{} {} fuse.lode {options} 0 2\n", pool.display(), dir.display())).unwrap();
    };
    let mount = |words: &[&str]| {
        let mut command = space.run("mount");
        command.arg("-T").arg(&fstab).args(words);
        command
    };
    write("noauto,nofail,nodev,noatime,cache=none,x-systemd.requires=network.target,_netdev");
    succeed(&mut mount(&["-a"]));
    assert_eq!(space.mounted(&dir), None, "noauto");
    succeed(&mut mount(&[dir.to_str().unwrap()]));
    let (kind, options) = space.mounted(&dir).unwrap();
    assert_eq!(kind, "fuse.lode");
    assert!(has(&options, "noatime") && has(&options, "nodev") && has(&options, "rw"), "{options}");
    fs::create_dir(space.at("d")).unwrap();
    fs::write(space.at("d/f"), "kept").unwrap();
    succeed(&mut space.umount());

    // By the pool's name, and with all others at boot.
    succeed(&mut mount(&[pool.to_str().unwrap()]));
    assert_eq!(fs::read(space.at("d/f")).unwrap(), b"kept");
    succeed(&mut space.umount());
    write("ro");
    succeed(&mut mount(&["-a"]));
    assert!(has(&space.mounted(&dir).unwrap().1, "ro"));
    assert_eq!(fs::read(space.at("d/f")).unwrap(), b"kept");
    succeed(&mut space.umount());
}

/// Its server goes on, and nobody waits for its end.
#[test]
fn a_mount_that_shows_elsewhere_is_not_waited_for() {
    need_mount!();
    let space = Space::new();
    let bound = space.rig.beside("bound");
    fs::create_dir(&bound).unwrap();
    succeed(&mut space.mount("rw"));
    succeed(space.run("mount").arg("--bind").arg(space.rig.dir()).arg(&bound));
    let begin = Instant::now();
    succeed(space.run(env!("CARGO_BIN_EXE_lode")).arg("umount").arg(space.rig.dir()));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    fs::write(space.seen(&bound).join("f"), "kept").unwrap();
    // That was the last one: it is closed.
    succeed(space.run(env!("CARGO_BIN_EXE_lode")).arg("umount").arg(&bound));
    succeed(&mut space.mount("rw"));
    assert_eq!(fs::read(space.at("f")).unwrap(), b"kept");
    succeed(&mut space.umount());
}

/// The thread that speaks to the log begins before all others. A signal to the process finds none that it may end.
#[test]
fn signals_end_a_server_in_the_background_orderly() {
    need_mount!();
    let space = Space::new();
    let _log = space.log();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        succeed(&mut space.mount("rw"));
        fs::write(space.at("f"), "kept").unwrap();
        let pid = space.server();
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim();
            let blocked = u64::from_str_radix(field("SigBlk:"), 16).unwrap();
            let is_blocked = |signal: Signal| blocked & 1 << (signal.as_raw() - 1) != 0;
            // In its wait they are not.
            let waits = field("Name:") == "signals";
            assert!(
                waits || is_blocked(Signal::TERM) && is_blocked(Signal::INT) && is_blocked(Signal::HUP),
                "{status}"
            );
        }
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        wait_until("the server has ended", || !Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(space.mounted(&space.rig.dir()), None, "{signal:?}");
        assert!(space.is_clean(), "{signal:?}");
    }
}

/// A log that stands still stops nobody.
#[test]
fn a_mount_goes_on_beside_a_log_that_takes_nothing() {
    need_mount!();
    let space = Space::new();
    let log = space.log();
    let mut mount = space.run(env!("CARGO_BIN_EXE_lode"));
    mount.arg("mount").arg(space.rig.pool()).arg(space.rig.dir());
    assert!(mount.env("LODE_LOG", "lode=debug").output().unwrap().status.success());
    // Each is refused, and a line in the log.
    let script = "i=0; while [ $i -lt 2000 ]; do [ -e \"$1/none$i\" ]; i=$((i + 1)); done";
    let mut program = space.run("sh").args(["-c", script, "sh"]).arg(space.rig.dir()).spawn().unwrap();
    wait_until("all are refused", || program.try_wait().unwrap().is_some());
    log.set_nonblocking(true).unwrap();
    let mut line = [0; 8192];
    while log.recv(&mut line).is_ok() {}
    log.set_nonblocking(false).unwrap();
    assert!(!space.at("later").exists());
    let heard = heard(&log, "lines were lost");
    assert!(heard.contains("]: "), "{heard}");
    succeed(&mut space.umount());
}

/// The next line with `part` in it.
fn heard(log: &UnixDatagram, part: &str) -> String {
    let mut line = [0; 8192];
    loop {
        let bytes = log.recv(&mut line).unwrap_or_else(|e| panic!("waited in vain for {part:?}: {e}"));
        let line = text(&line[..bytes]);
        if line.contains(part) {
            return line;
        }
    }
}

#[test]
fn the_log_hears_the_last_line_though_it_began_anew() {
    need_mount!();
    let space = Space::new();
    let log = space.log();
    succeed(&mut space.mount("rw"));
    fs::write(space.at("f"), "lost").unwrap();
    let pid = space.server();
    drop(log);
    let log = space.bind_log();
    File::options().write(true).open(space.rig.pool()).unwrap().set_len(4096).unwrap();
    // What no change can be written to cannot be closed.
    let is_refused = || fs::set_permissions(space.at("f"), fs::Permissions::from_mode(0o600)).is_err();
    wait_until("no change is taken", is_refused);
    succeed(&mut space.umount());
    let line = heard(&log, "closing the pool");
    assert!(line.starts_with(&format!("<28>lode[{pid}]: lode: ")), "{line}");
    assert!(line.contains("the next mount recovers it"), "{line}");
}
