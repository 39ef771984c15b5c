//! Pools made for one test, mounted by the built binary, and gone afterwards.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use rustix::mount::MountFlags;

/// Longest wait for a server to begin or to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why mounting cannot be tested here.
fn obstacle() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root");
    }
    match fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => None,
        Err(_) => Some("it needs /dev/fuse"),
    }
}

/// True where mounting can be tested; says so loudly where not.
pub fn can_mount(test: &str) -> bool {
    if let Some(why) = obstacle() {
        eprintln!("SKIPPED: {test}: {why}");
        return false;
    }
    true
}

/// Leaves the test where mounting cannot be tested.
#[macro_export]
macro_rules! need_mount {
    () => {
        if !$crate::rig::can_mount(std::thread::current().name().unwrap_or("test")) {
            return;
        }
    };
}

pub fn lode() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lode"));
    command.stdin(Stdio::null());
    command
}

/// A directory of one test, with a pool and a mount point in it.
pub struct Rig {
    root: PathBuf,
    server: Option<Child>,
}

impl Rig {
    /// A new pool of `size`, not mounted.
    pub fn new(size: &str) -> Rig {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("lode-mount-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let rig = Rig { root: std::env::temp_dir().join(name), server: None };
        fs::create_dir_all(rig.dir()).unwrap();
        let made = lode().args(["mkfs", "--size", size]).arg(rig.pool()).output().unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
        rig
    }

    /// A new pool of 64 MiB, mounted with its defaults.
    pub fn mounted() -> Rig {
        Rig::mounted_with("rw")
    }

    pub fn mounted_with(options: &str) -> Rig {
        let rig = Rig::new("64M");
        rig.mount(options);
        rig
    }

    pub fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    pub fn dir(&self) -> PathBuf {
        self.root.join("mnt")
    }

    /// A path beside the mount point, for what a test needs outside.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub fn at(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.dir().join(name.as_ref())
    }

    pub fn mount_command(&self, options: &str) -> Command {
        let mut command = lode();
        command.arg("mount").arg(self.pool()).arg(self.dir()).args(["-o", options]);
        command
    }

    /// Mounts in the background: the mount is live when this returns.
    pub fn mount(&self, options: &str) {
        mounts(&mut self.mount_command(options));
    }

    /// Mounts with the server as a child of the test, so that it can be signalled and waited for.
    pub fn mount_foreground(&mut self, options: &str) -> u32 {
        let mut command = self.mount_command(options);
        command.arg("-f").env("LODE_LOG", "info").stderr(Stdio::piped());
        let server = command.spawn().unwrap();
        let pid = server.id();
        self.server = Some(server);
        wait_until("the mount is live", || self.is_mounted());
        pid
    }

    /// A server of a device that was opened, and mounted for writing, before.
    pub fn serve_handed(&self) -> Child {
        let device = OwnedFd::from(File::options().read(true).write(true).open("/dev/fuse").unwrap());
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions");
        let options = std::ffi::CString::new(options).unwrap();
        let flags = MountFlags::empty();
        rustix::mount::mount("handed", self.dir(), "fuse", flags, Some(options.as_c_str())).unwrap();
        rustix::io::fcntl_setfd(&device, FdFlags::empty()).unwrap();
        let mut command = lode();
        command.args(["mount", "-f"]).arg(self.pool()).arg(format!("/dev/fd/{fd}"));
        command.spawn().unwrap()
    }

    /// Waits for the server of [`mount_foreground`](Rig::mount_foreground) to end: its exit code, where it
    /// was not killed, and what it said.
    pub fn wait_for_server(&mut self) -> (Option<i32>, String) {
        let mut server = self.server.take().expect("a server was started in the foreground");
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = server.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                server.kill().unwrap();
                panic!("the server did not end");
            }
            thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        server.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (status.code(), said)
    }

    /// Nobody has anything open there. But other tests begin programs, and until such a child is that program it has copies of
    /// the descriptors that this process had then, also of those that were closed since. (So it is on any file system: of a tmpfs
    /// beside three threads that begin programs every hundredth umount(2) is EBUSY.)
    pub fn umount(&self) {
        let umount = || lode().arg("umount").arg(self.dir()).output().unwrap();
        let mut output = umount();
        for _ in 0..20 {
            if !text(&output.stderr).contains("is in use") {
                break;
            }
            thread::sleep(Duration::from_millis(50));
            output = umount();
        }
        succeeded(&format!("lode umount {}", self.dir().display()), &output);
    }

    pub fn is_mounted(&self) -> bool {
        self.mount_line().is_some()
    }

    /// The line of /proc/mounts, as its fields.
    pub fn mount_line(&self) -> Option<Vec<String>> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let dir = self.dir();
        let fields = |l: &str| l.split(' ').map(str::to_owned).collect::<Vec<_>>();
        mounts.lines().map(fields).rfind(|f| Path::new(&f[1]) == dir)
    }

    /// Runs a shell script in the mount as an ordinary user.
    pub fn as_nobody(&self, script: &str) -> Output {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).current_dir(self.dir()).uid(65534).gid(65534);
        command.output().unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        while self.is_mounted() {
            let detach = rustix::mount::UnmountFlags::DETACH;
            if rustix::mount::unmount(self.dir(), detach).is_err() {
                break;
            }
        }
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Runs a command that must succeed and say nothing.
pub fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    succeeded(&format!("{command:?}"), &output);
}

fn succeeded(command: &str, output: &Output) {
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command}: {} {said}", output.status);
    assert!(said.is_empty(), "{command} said: {said}");
}

/// Runs a mount that must succeed, and say nothing but that its domain is only assumed.
pub fn mounts(command: &mut Command) {
    let mut output = command.output().unwrap();
    let said = text(&output.stderr);
    let is_assumed = command.get_args().any(|word| word.to_string_lossy().contains("assume=memory"));
    if is_assumed && said.starts_with("lode: note: emulated PM: ") && said.lines().count() == 1 {
        output.stderr.clear();
    }
    succeeded(&format!("{command:?}"), &output);
}

/// Runs a command that must fail with `code` and one line that contains `part`.
pub fn fail(command: &mut Command, code: i32, part: &str) {
    let output = command.output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {said}");
    assert!(said.contains(part), "{command:?}: {said:?} does not contain {part:?}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The errno of a call that must fail.
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}
