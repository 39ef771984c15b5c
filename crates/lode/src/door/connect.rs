//! The kernel's end of a mount: making it, taking it away, cutting it.
//!
//! The superuser mounts directly, so that mount(8)'s flags mean what they mean for any disk file system
//! and the type is `fuse.lode`. Everyone else goes through `fusermount3`, which is set-user-id root, checks
//! that the user may mount there and hands the opened device over a socket. A container that may do
//! neither is given an opened, mounted device as `/dev/fd/N`.

use std::ffi::{CString, OsString};
use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use lodestone::media::mounts;
use rustix::io::{Errno, FdFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

const HELPER: &str = "fusermount3";
/// The device number of /dev/fuse, the same everywhere.
const FUSE_DEVICE: (u32, u32) = (10, 229);
/// Readahead of a mount whose pages are cached, in KiB: as much as one request may read.
const READ_AHEAD_KIB: &str = "1024";

/// What is to be mounted, where and how.
pub struct Plan {
    /// Shown as the source: the pool's absolute path.
    pub source: OsString,
    pub dir: PathBuf,
    pub flags: MountFlags,
    pub allow_other: bool,
    /// Bytes of the largest read request, where it is to be less than the kernel's own limit.
    pub read_bytes_max: Option<u32>,
}

/// A mount that stands, until it is taken away.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// None where an opened device was handed in: its mount belongs to whoever made it.
    mounted: Option<Mounted>,
}

#[derive(Clone, Debug)]
struct Mounted {
    dir: PathBuf,
    device: (u32, u32),
}

/// `/dev/fd/N`, where a device is handed in.
pub fn handed_in(dir: &Path) -> Option<RawFd> {
    dir.to_str()?.strip_prefix("/dev/fd/")?.parse().ok()
}

/// Takes the descriptor `fd`, which whoever started this process opened on /dev/fuse and mounted.
pub fn take(fd: RawFd) -> io::Result<(OwnedFd, Attachment)> {
    let link = PathBuf::from(format!("/proc/self/fd/{fd}"));
    let meta = fs::metadata(&link)?;
    if !meta.file_type().is_char_device()
        || (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())) != FUSE_DEVICE
    {
        return Err(io::Error::other("it is no /dev/fuse descriptor"));
    }
    // SAFETY: the descriptor is open (it has just been looked at) and was opened before this program
    // began, for this use; nothing else here knows its number.
    let device = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&device, FdFlags::CLOEXEC)?;
    Ok((device, Attachment { mounted: None }))
}

/// Mounts, and gives the descriptor over which the kernel will ask.
pub fn mount(plan: &Plan) -> io::Result<(OwnedFd, Attachment)> {
    let device = match mount_directly(plan) {
        Err(e) if is_refusal(&e) => mount_by_helper(plan)?,
        other => other?,
    };
    // What cannot be looked at would be left dead.
    let found = mounts::at(&plan.dir).inspect_err(|_| _ = unmount(&plan.dir, true))?;
    let entry = found.ok_or_else(|| io::Error::other("the mount has gone at once"))?;
    let attachment = Attachment { mounted: Some(Mounted { dir: plan.dir.clone(), device: entry.device }) };
    Ok((device, attachment))
}

fn is_refusal(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

fn mount_directly(plan: &Plan) -> io::Result<OwnedFd> {
    if !rustix::process::geteuid().is_root() {
        return Err(Errno::PERM.into());
    }
    let device = OwnedFd::from(
        fs::File::options().read(true).write(true).open("/dev/fuse").map_err(|e| about("/dev/fuse", &e))?,
    );
    let mut options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if plan.allow_other {
        options.push_str(",allow_other");
    }
    if let Some(bytes) = plan.read_bytes_max {
        options.push_str(&format!(",max_read={bytes}"));
    }
    let options = CString::new(options)?;
    let source = CString::new(plan.source.as_bytes())?;
    rustix::mount::mount(&source, &plan.dir, mounts::FILE_SYSTEM_TYPE, plan.flags, Some(options.as_c_str()))?;
    Ok(device)
}

/// An error that keeps its kind and names the file.
fn about(path: &str, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{path}: {e}"))
}

fn mount_by_helper(plan: &Plan) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    // The helper inherits its end; no other child is started here.
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
    let child = Command::new(HELPER)
        .arg("-o")
        .arg(helper_options(plan))
        .arg("--")
        .arg(&plan.dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                io::Error::new(e.kind(), format!("there is no {HELPER}; install fuse3, or mount as root"))
            }
            _ => about(HELPER, &e),
        })?;
    drop(theirs);
    let device = receive(&ours);
    drop(ours);
    let output = child.wait_with_output()?;
    match device? {
        Some(device) if output.status.success() => Ok(device),
        _ => Err(said(&output.stderr)),
    }
}

/// What a helper wrote before it failed.
fn said(stderr: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(stderr);
    let text = text.trim().trim_start_matches("fusermount3: ").replace('\n', "; ");
    io::Error::other(if text.is_empty() { format!("{HELPER} failed") } else { text })
}

/// The helper's own words; it splits at commas that no backslash precedes. Of those about access times some helpers
/// know `noatime` alone, and refuse to mount for another one: those are left out, for the access time follows none of them.
fn helper_options(plan: &Plan) -> OsString {
    let mut options = b"subtype=lode,default_permissions,fsname=".to_vec();
    for byte in plan.source.as_bytes() {
        if matches!(byte, b',' | b'\\') {
            options.push(b'\\');
        }
        options.push(*byte);
    }
    let words = [
        (MountFlags::RDONLY, "ro"),
        (MountFlags::NOEXEC, "noexec"),
        (MountFlags::NOATIME, "noatime"),
        (MountFlags::SYNCHRONOUS, "sync"),
        (MountFlags::DIRSYNC, "dirsync"),
    ];
    for (_, word) in words.iter().filter(|(flag, _)| plan.flags.contains(*flag)) {
        options.push(b',');
        options.extend_from_slice(word.as_bytes());
    }
    if plan.allow_other {
        options.extend_from_slice(b",allow_other");
    }
    if let Some(bytes) = plan.read_bytes_max {
        options.extend_from_slice(format!(",max_read={bytes}").as_bytes());
    }
    OsString::from_vec(options)
}

/// The descriptor the helper sends; None where it hung up without one.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let received = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(received)
}

/// Takes a mount away: at once, or, `lazy`, out of sight now and for good when its last user has gone.
pub fn unmount(dir: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => unmount_by_helper(dir, lazy),
        other => Ok(other?),
    }
}

fn unmount_by_helper(dir: &Path, lazy: bool) -> io::Result<()> {
    let mut command = Command::new(HELPER);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(dir).output().map_err(|e| about(HELPER, &e))?;
    if output.status.success() {
        return Ok(());
    }
    let failure = said(&output.stderr);
    // The helper passes the reason on as a sentence.
    match failure.to_string().ends_with(&Errno::BUSY.to_string()) {
        true => Err(Errno::BUSY.into()),
        false => Err(failure),
    }
}

/// A file of the kernel about the mount's connection.
fn connection(m: &Mounted, file: &str) -> String {
    format!("/sys/fs/fuse/connections/{}/{file}", m.device.1)
}

impl Attachment {
    /// True while the mount is where it was made, or nobody can tell. Another one on top of it, or in its place, is not ours.
    pub fn stands(&self) -> bool {
        self.mounted.as_ref().is_some_and(|m| match mounts::at(&m.dir) {
            Ok(entry) => entry.is_some_and(|e| e.device == m.device),
            Err(_) => true,
        })
    }

    pub fn dir(&self) -> Option<&Path> {
        self.mounted.as_ref().map(|m| m.dir.as_path())
    }

    /// Major and minor of the mount's `st_dev`.
    pub fn device(&self) -> Option<(u32, u32)> {
        self.mounted.as_ref().map(|m| m.device)
    }

    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        match &self.mounted {
            Some(m) if self.stands() => unmount(&m.dir, lazy),
            _ => Ok(()),
        }
    }

    /// Its root, opened. As long as it is, the mount is in use.
    pub fn root(&self) -> io::Result<fs::File> {
        match &self.mounted {
            Some(m) if self.stands() => {
                let root = fs::File::options().read(true).custom_flags(libc::O_DIRECTORY).open(&m.dir)?;
                // Another one may have been mounted on it just now.
                let found = root.metadata()?.dev();
                match (rustix::fs::major(found), rustix::fs::minor(found)) == m.device {
                    true => Ok(root),
                    false => Err(Errno::STALE.into()),
                }
            }
            _ => Err(Errno::STALE.into()),
        }
    }

    /// Requests of the kernel that have no answer yet. None where it does not say.
    pub fn waiting(&self) -> Option<u64> {
        let m = self.mounted.as_ref()?;
        let text = fs::read_to_string(connection(m, "waiting")).ok()?;
        text.trim().parse().ok()
    }

    /// Cuts the connection: every pending and later request of its users fails. False where the kernel
    /// offers no way to do so.
    pub fn cut(&self) -> bool {
        self.mounted.as_ref().is_some_and(|m| fs::write(connection(m, "abort"), "1").is_ok())
    }

    /// Lets the kernel read further ahead than it does for disks; it stays as it is where that is not
    /// permitted.
    pub fn read_far_ahead(&self) {
        if let Some(Mounted { device: (major, minor), .. }) = self.mounted {
            let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
            if let Err(e) = fs::write(&path, READ_AHEAD_KIB) {
                tracing::debug!(path, error = %e, "readahead stays as it is");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dev_fd_paths_hand_a_device_in() {
        assert_eq!(handed_in(Path::new("/dev/fd/7")), Some(7));
        assert_eq!(handed_in(Path::new("/dev/fd/x")), None);
        assert_eq!(handed_in(Path::new("/mnt")), None);
    }

    #[test]
    fn the_helper_gets_commas_escaped() {
        let plan = Plan {
            source: OsString::from("/a,b\\c"),
            dir: PathBuf::from("/mnt"),
            flags: MountFlags::RDONLY | MountFlags::NODEV,
            allow_other: false,
            read_bytes_max: Some(4096),
        };
        let expected = "subtype=lode,default_permissions,fsname=/a\\,b\\\\c,ro,max_read=4096";
        assert_eq!(helper_options(&plan), expected);
    }

    #[test]
    fn other_files_and_devices_are_refused() {
        for path in ["/proc/self/status", "/dev/null"] {
            let other = fs::File::open(path).unwrap();
            assert!(take(other.as_raw_fd()).is_err(), "{path}");
        }
    }
}
