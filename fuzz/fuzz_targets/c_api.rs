//! Sequences of calls of the C interface with any arguments: pointers are valid or NULL, everything else is
//! anything. No call panics (a panic ends the fuzzer, also one that the boundary would have caught), and a call
//! that fails says why in errno.
#![no_main]

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::ptr;

use libc::{mode_t, off_t, size_t, ssize_t, timespec};
use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
// Linked for the symbols below.
use lode_c as _;
use lodestone_fuzz::pool_path;

enum Fs {}
enum Dir {}
type Fsp = *mut Fs;
type Text = *const c_char;

unsafe extern "C" {
    fn lode_mkfs(path: Text, size: u64, opts: Text) -> c_int;
    fn lode_open_pool(path: Text, opts: Text) -> Fsp;
    fn lode_close_pool(fs: Fsp) -> c_int;
    fn lode_last_error() -> Text;
    fn lode_open(fs: Fsp, path: Text, flags: c_int, mode: mode_t) -> c_int;
    fn lode_openat(fs: Fsp, dirfd: c_int, path: Text, flags: c_int, mode: mode_t) -> c_int;
    fn lode_close(fs: Fsp, fd: c_int) -> c_int;
    fn lode_dup(fs: Fsp, fd: c_int) -> c_int;
    fn lode_read(fs: Fsp, fd: c_int, buf: *mut c_void, count: size_t) -> ssize_t;
    fn lode_pread(fs: Fsp, fd: c_int, buf: *mut c_void, count: size_t, offset: off_t) -> ssize_t;
    fn lode_write(fs: Fsp, fd: c_int, buf: *const c_void, count: size_t) -> ssize_t;
    fn lode_pwrite(fs: Fsp, fd: c_int, buf: *const c_void, count: size_t, offset: off_t) -> ssize_t;
    fn lode_lseek(fs: Fsp, fd: c_int, offset: off_t, whence: c_int) -> off_t;
    fn lode_truncate(fs: Fsp, path: Text, length: off_t) -> c_int;
    fn lode_ftruncate(fs: Fsp, fd: c_int, length: off_t) -> c_int;
    fn lode_fallocate(fs: Fsp, fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int;
    fn lode_fsync(fs: Fsp, fd: c_int) -> c_int;
    fn lode_sync(fs: Fsp) -> c_int;
    fn lode_access(fs: Fsp, path: Text, mode: c_int) -> c_int;
    fn lode_stat(fs: Fsp, path: Text, buf: *mut libc::stat) -> c_int;
    fn lode_lstat(fs: Fsp, path: Text, buf: *mut libc::stat) -> c_int;
    fn lode_fstat(fs: Fsp, fd: c_int, buf: *mut libc::stat) -> c_int;
    fn lode_chmod(fs: Fsp, path: Text, mode: mode_t) -> c_int;
    fn lode_fchmod(fs: Fsp, fd: c_int, mode: mode_t) -> c_int;
    fn lode_lchown(fs: Fsp, path: Text, uid: u32, gid: u32) -> c_int;
    fn lode_fchown(fs: Fsp, fd: c_int, uid: u32, gid: u32) -> c_int;
    fn lode_utimens(fs: Fsp, path: Text, times: *const timespec, flags: c_int) -> c_int;
    fn lode_futimens(fs: Fsp, fd: c_int, times: *const timespec) -> c_int;
    fn lode_statvfs(fs: Fsp, path: Text, buf: *mut libc::statvfs) -> c_int;
    fn lode_umask(fs: Fsp, mask: mode_t) -> c_int;
    fn lode_mkdir(fs: Fsp, path: Text, mode: mode_t) -> c_int;
    fn lode_rmdir(fs: Fsp, path: Text) -> c_int;
    fn lode_unlink(fs: Fsp, path: Text) -> c_int;
    fn lode_rename(fs: Fsp, from: Text, to: Text, flags: c_uint) -> c_int;
    fn lode_link(fs: Fsp, from: Text, to: Text) -> c_int;
    fn lode_flink(fs: Fsp, fd: c_int, to: Text) -> c_int;
    fn lode_symlink(fs: Fsp, target: Text, path: Text) -> c_int;
    fn lode_readlink(fs: Fsp, path: Text, buf: *mut c_char, size: size_t) -> ssize_t;
    fn lode_mknod(fs: Fsp, path: Text, mode: mode_t, dev: u64) -> c_int;
    fn lode_lgetxattr(fs: Fsp, path: Text, name: Text, value: *mut c_void, size: size_t) -> ssize_t;
    fn lode_lsetxattr(
        fs: Fsp,
        path: Text,
        name: Text,
        value: *const c_void,
        size: size_t,
        flags: c_int,
    ) -> c_int;
    fn lode_fsetxattr(
        fs: Fsp,
        fd: c_int,
        name: Text,
        value: *const c_void,
        size: size_t,
        flags: c_int,
    ) -> c_int;
    fn lode_llistxattr(fs: Fsp, path: Text, list: *mut c_char, size: size_t) -> ssize_t;
    fn lode_lremovexattr(fs: Fsp, path: Text, name: Text) -> c_int;
    fn lode_opendir(fs: Fsp, path: Text) -> *mut Dir;
    fn lode_readdir(fs: Fsp, dir: *mut Dir) -> *mut libc::dirent;
    fn lode_telldir(fs: Fsp, dir: *mut Dir) -> c_long;
    fn lode_seekdir(fs: Fsp, dir: *mut Dir, position: c_long) -> c_int;
    fn lode_dirfd(fs: Fsp, dir: *mut Dir) -> c_int;
    fn lode_closedir(fs: Fsp, dir: *mut Dir) -> c_int;
}

const POOL_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 1 << 18;
/// Few, so that calls meet on the same inodes.
const PATHS: &[&str] = &[
    "/", "/a", "/b", "/c", "/a/b", "/a/b/c", "/a/d", "/a/../b", "a", ".", "..", "", "//a//b", "/a/",
    "/a/b/.", "/a/b/..", "/l/b", "/l", "/m",
];
const NAMES: &[&str] = &[
    "user.a",
    "user.b",
    "trusted.a",
    "security.x",
    "system.posix_acl_access",
    "system.posix_acl_default",
    "user.",
    "",
    "nothing.a",
];
const OPTIONS: &[&str] = &[
    "",
    "assume=memory",
    "assume=page-cache",
    "user=root",
    "ro",
    "umask=777",
    "user=root,assume=cpu-cache",
    "umask=9",
    "what",
    "ro,assume=volatile",
];

#[derive(Debug, Arbitrary)]
struct Input {
    data_in_place: bool,
    sessions: Vec<Session>,
}

/// From an open of the pool to its close.
#[derive(Debug, Arbitrary)]
struct Session {
    options: u8,
    calls: Vec<Call>,
}

#[derive(Debug, Arbitrary)]
enum Path {
    Known(u8),
    Any(Vec<u8>),
    LongName(u16),
    LongPath(u16),
    Null,
}

impl Path {
    fn text(&self) -> Option<CString> {
        let bytes = match self {
            Path::Known(n) => PATHS[*n as usize % PATHS.len()].into(),
            Path::Any(bytes) => bytes.iter().copied().filter(|&b| b != 0).collect(),
            Path::LongName(n) => vec![b'n'; *n as usize % 600],
            Path::LongPath(n) => b"a/".iter().copied().cycle().take(*n as usize % 10_000).collect(),
            Path::Null => return None,
        };
        Some(CString::new::<Vec<u8>>(bytes).expect("without NULs"))
    }
}

#[derive(Debug, Arbitrary)]
enum Fd {
    Open(u8),
    Any(c_int),
}

#[derive(Debug, Arbitrary)]
enum Offset {
    Small(u16),
    Page(u8),
    Power(u8),
    /// Below the largest there is.
    Top(u16),
    Any(i64),
}

impl Offset {
    fn get(&self) -> off_t {
        match *self {
            Offset::Small(n) => n.into(),
            Offset::Page(n) => n as off_t * 4096,
            Offset::Power(n) => 1 << (n % 63),
            Offset::Top(n) => off_t::MAX - n as off_t,
            Offset::Any(n) => n,
        }
    }
}

/// A buffer's length, never more than there is; or one that no buffer has, with no buffer.
#[derive(Debug, Arbitrary)]
enum Count {
    Small(u16),
    Large(u32),
    Null(usize),
    /// More than memory can hold: refused before the buffer is looked at.
    Absurd,
}

#[derive(Debug, Arbitrary)]
enum Call {
    Open { path: Path, flags: Flags, mode: u16 },
    OpenAt { dir: Fd, path: Path, flags: Flags, mode: u16 },
    Close(Fd),
    Dup(Fd),
    Read(Fd, Count),
    Pread(Fd, Count, Offset),
    Write(Fd, Count),
    Pwrite(Fd, Count, Offset),
    Lseek(Fd, Offset, c_int),
    LseekKnown(Fd, Offset, u8),
    Truncate(Path, Offset),
    Ftruncate(Fd, Offset),
    Fallocate { fd: Fd, mode: u8, offset: Offset, len: Offset },
    FallocateAny { fd: Fd, mode: c_int, offset: Offset, len: Offset },
    Fsync(Fd),
    Sync,
    Access(Path, c_int),
    Stat(Path),
    Lstat(Path),
    Fstat(Fd),
    Chmod(Path, u32),
    Fchmod(Fd, u32),
    Lchown(Path, u32, u32),
    Fchown(Fd, u32, u32),
    Utimens { path: Path, times: Option<[(i64, i64); 2]>, flags: c_int },
    Futimens(Fd, Option<[(i64, i64); 2]>),
    Statvfs(Path),
    Umask(u32),
    Mkdir(Path, u32),
    Rmdir(Path),
    Unlink(Path),
    Rename(Path, Path, u8),
    RenameAny(Path, Path, u32),
    Link(Path, Path),
    Flink(Fd, Path),
    Symlink(Path, Path),
    Readlink(Path, Count),
    Mknod { path: Path, mode: u32, dev: u64 },
    Getxattr(Path, u8, Count),
    Setxattr(Path, u8, Count, u8),
    Fsetxattr(Fd, u8, Count, c_int),
    Listxattr(Path, Count),
    Removexattr(Path, u8),
    Opendir(Path),
    Readdir(Fd),
    Telldir(Fd),
    Seekdir(Fd, Offset),
    Dirfd(Fd),
    Closedir(Fd),
    Fill(u8),
}

#[derive(Debug, Arbitrary)]
enum Flags {
    Usual(u8),
    Any(c_int),
}

impl Flags {
    fn get(&self) -> c_int {
        const USUAL: [c_int; 8] = [
            libc::O_CREAT | libc::O_RDWR,
            libc::O_RDONLY,
            libc::O_WRONLY | libc::O_APPEND,
            libc::O_CREAT | libc::O_EXCL | libc::O_RDWR,
            libc::O_RDWR | libc::O_TRUNC,
            libc::O_TMPFILE | libc::O_RDWR,
            libc::O_DIRECTORY,
            libc::O_PATH | libc::O_NOFOLLOW,
        ];
        match *self {
            Flags::Usual(n) => USUAL[n as usize % USUAL.len()],
            Flags::Any(flags) => flags,
        }
    }
}

/// What C keeps between calls.
struct Caller {
    fs: Fsp,
    fds: Vec<c_int>,
    dirs: Vec<*mut Dir>,
    buffer: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let path = c_text(pool_path().to_str().expect("a plain path"));
    let options = c_text(if input.data_in_place { "force,data=inplace" } else { "force" });
    // SAFETY: both strings end with a NUL and outlive the call.
    let made = unsafe { lode_mkfs(path.as_ptr(), POOL_BYTES, options.as_ptr()) };
    assert_eq!(made, 0, "{}", last_error());
    for session in input.sessions.iter().take(4) {
        let options = c_text(OPTIONS[session.options as usize % OPTIONS.len()]);
        // SAFETY: as above.
        let fs = unsafe { lode_open_pool(path.as_ptr(), options.as_ptr()) };
        if fs.is_null() {
            assert!(errno() != 0 && !last_error().is_empty());
            continue;
        }
        let mut caller = Caller { fs, fds: Vec::new(), dirs: Vec::new(), buffer: vec![0x5a; BUFFER_BYTES] };
        session.calls.iter().for_each(|call| caller.call(call));
        // SAFETY: the handle is compared, not followed.
        let closed = unsafe { lode_close_pool(fs) };
        assert_eq!(closed, 0, "{}", last_error());
    }
});

fn c_text(text: &str) -> CString {
    CString::new(text).expect("without NULs")
}

fn last_error() -> String {
    // SAFETY: a string that ends with a NUL and stays until the next such call.
    unsafe { std::ffi::CStr::from_ptr(lode_last_error()) }.to_string_lossy().into_owned()
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn text(path: &Option<CString>) -> Text {
    path.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

fn times(times: &Option<[(i64, i64); 2]>) -> Option<[timespec; 2]> {
    times.map(|pair| pair.map(|(tv_sec, tv_nsec)| timespec { tv_sec, tv_nsec }))
}

impl Caller {
    fn fd(&self, fd: &Fd) -> c_int {
        match *fd {
            Fd::Open(n) if !self.fds.is_empty() => self.fds[n as usize % self.fds.len()],
            Fd::Open(n) => n.into(),
            Fd::Any(n) => n,
        }
    }

    fn dir(&self, dir: &Fd) -> *mut Dir {
        match *dir {
            Fd::Open(n) if !self.dirs.is_empty() => self.dirs[n as usize % self.dirs.len()],
            Fd::Open(n) => ptr::without_provenance_mut(n.into()),
            Fd::Any(n) => ptr::without_provenance_mut(n as isize as usize),
        }
    }

    fn buffer(&mut self, count: &Count) -> (*mut c_void, usize) {
        let buffer = self.buffer.as_mut_ptr().cast();
        match *count {
            Count::Small(n) => (buffer, n as usize % BUFFER_BYTES),
            Count::Large(n) => (buffer, n as usize % BUFFER_BYTES),
            Count::Null(n) => (ptr::null_mut(), n),
            Count::Absurd => (buffer, usize::MAX - 7),
        }
    }

    fn call(&mut self, call: &Call) {
        // SAFETY: the C library gives every thread its errno.
        unsafe { *libc::__errno_location() = 0 };
        let answer = self.make(call);
        let why = errno();
        assert!(answer != -1 || (1..4096).contains(&why), "{call:?} failed with errno {why}");
    }

    /// The answer, where -1 is a failure.
    fn make(&mut self, call: &Call) -> i64 {
        let fs = self.fs;
        let xattr = |n: u8| c_text(NAMES[n as usize % NAMES.len()]);
        // SAFETY: strings end with a NUL, buffers have the bytes that are said (or so many that no memory has
        // them, which the interface refuses), results have room; all outlive the call.
        unsafe {
            match call {
                Call::Open { path, flags, mode } => {
                    let fd = lode_open(fs, text(&path.text()), flags.get(), (*mode).into());
                    self.opened(fd)
                }
                Call::OpenAt { dir, path, flags, mode } => {
                    let fd = lode_openat(fs, self.fd(dir), text(&path.text()), flags.get(), (*mode).into());
                    self.opened(fd)
                }
                Call::Close(fd) => lode_close(fs, self.fd(fd)).into(),
                Call::Dup(fd) => {
                    let fd = lode_dup(fs, self.fd(fd));
                    self.opened(fd)
                }
                Call::Read(fd, count) => {
                    let (buffer, count) = self.buffer(count);
                    lode_read(fs, self.fd(fd), buffer, count) as i64
                }
                Call::Pread(fd, count, offset) => {
                    let (buffer, count) = self.buffer(count);
                    lode_pread(fs, self.fd(fd), buffer, count, offset.get()) as i64
                }
                Call::Write(fd, count) => {
                    let (buffer, count) = self.buffer(count);
                    lode_write(fs, self.fd(fd), buffer, count) as i64
                }
                Call::Pwrite(fd, count, offset) => {
                    let (buffer, count) = self.buffer(count);
                    lode_pwrite(fs, self.fd(fd), buffer, count, offset.get()) as i64
                }
                Call::Lseek(fd, offset, whence) => lode_lseek(fs, self.fd(fd), offset.get(), *whence),
                Call::LseekKnown(fd, offset, whence) => {
                    lode_lseek(fs, self.fd(fd), offset.get(), (whence % 5).into())
                }
                Call::Truncate(path, length) => lode_truncate(fs, text(&path.text()), length.get()).into(),
                Call::Ftruncate(fd, length) => lode_ftruncate(fs, self.fd(fd), length.get()).into(),
                Call::Fallocate { fd, mode, offset, len } => {
                    lode_fallocate(fs, self.fd(fd), (mode % 64).into(), offset.get(), len.get()).into()
                }
                Call::FallocateAny { fd, mode, offset, len } => {
                    lode_fallocate(fs, self.fd(fd), *mode, offset.get(), len.get()).into()
                }
                Call::Fsync(fd) => lode_fsync(fs, self.fd(fd)).into(),
                Call::Sync => lode_sync(fs).into(),
                Call::Access(path, mode) => lode_access(fs, text(&path.text()), *mode).into(),
                Call::Stat(path) => lode_stat(fs, text(&path.text()), &mut std::mem::zeroed()).into(),
                Call::Lstat(path) => lode_lstat(fs, text(&path.text()), &mut std::mem::zeroed()).into(),
                Call::Fstat(fd) => lode_fstat(fs, self.fd(fd), &mut std::mem::zeroed()).into(),
                Call::Chmod(path, mode) => lode_chmod(fs, text(&path.text()), *mode).into(),
                Call::Fchmod(fd, mode) => lode_fchmod(fs, self.fd(fd), *mode).into(),
                Call::Lchown(path, uid, gid) => lode_lchown(fs, text(&path.text()), *uid, *gid).into(),
                Call::Fchown(fd, uid, gid) => lode_fchown(fs, self.fd(fd), *uid, *gid).into(),
                Call::Utimens { path, times: both, flags } => {
                    let both = times(both);
                    let both = both.as_ref().map_or(ptr::null(), |both| both.as_ptr());
                    lode_utimens(fs, text(&path.text()), both, *flags).into()
                }
                Call::Futimens(fd, both) => {
                    let both = times(both);
                    lode_futimens(fs, self.fd(fd), both.as_ref().map_or(ptr::null(), |both| both.as_ptr()))
                        .into()
                }
                Call::Statvfs(path) => lode_statvfs(fs, text(&path.text()), &mut std::mem::zeroed()).into(),
                Call::Umask(mask) => lode_umask(fs, *mask).into(),
                Call::Mkdir(path, mode) => lode_mkdir(fs, text(&path.text()), *mode).into(),
                Call::Rmdir(path) => lode_rmdir(fs, text(&path.text())).into(),
                Call::Unlink(path) => lode_unlink(fs, text(&path.text())).into(),
                Call::Rename(from, to, flags) => {
                    lode_rename(fs, text(&from.text()), text(&to.text()), (flags % 4).into()).into()
                }
                Call::RenameAny(from, to, flags) => {
                    lode_rename(fs, text(&from.text()), text(&to.text()), *flags).into()
                }
                Call::Link(from, to) => lode_link(fs, text(&from.text()), text(&to.text())).into(),
                Call::Flink(fd, to) => lode_flink(fs, self.fd(fd), text(&to.text())).into(),
                Call::Symlink(target, path) => {
                    lode_symlink(fs, text(&target.text()), text(&path.text())).into()
                }
                Call::Readlink(path, count) => {
                    let (buffer, count) = self.buffer(count);
                    lode_readlink(fs, text(&path.text()), buffer.cast(), count) as i64
                }
                Call::Mknod { path, mode, dev } => lode_mknod(fs, text(&path.text()), *mode, *dev).into(),
                Call::Getxattr(path, name, count) => {
                    let (buffer, count) = self.buffer(count);
                    lode_lgetxattr(fs, text(&path.text()), xattr(*name).as_ptr(), buffer, count) as i64
                }
                Call::Setxattr(path, name, count, flags) => {
                    let (buffer, count) = self.buffer(count);
                    let flags = (flags % 4).into();
                    lode_lsetxattr(fs, text(&path.text()), xattr(*name).as_ptr(), buffer, count, flags).into()
                }
                Call::Fsetxattr(fd, name, count, flags) => {
                    let (buffer, count) = self.buffer(count);
                    lode_fsetxattr(fs, self.fd(fd), xattr(*name).as_ptr(), buffer, count, *flags).into()
                }
                Call::Listxattr(path, count) => {
                    let (buffer, count) = self.buffer(count);
                    lode_llistxattr(fs, text(&path.text()), buffer.cast(), count) as i64
                }
                Call::Removexattr(path, name) => {
                    lode_lremovexattr(fs, text(&path.text()), xattr(*name).as_ptr()).into()
                }
                Call::Opendir(path) => {
                    let dir = lode_opendir(fs, text(&path.text()));
                    if dir.is_null() {
                        return -1;
                    }
                    self.dirs.push(dir);
                    0
                }
                Call::Readdir(dir) => {
                    let entry = lode_readdir(fs, self.dir(dir));
                    if entry.is_null() {
                        return if errno() == 0 { 0 } else { -1 };
                    }
                    let name = std::ffi::CStr::from_ptr((&raw const (*entry).d_name).cast());
                    assert!((1..=255).contains(&name.to_bytes().len()));
                    0
                }
                Call::Telldir(dir) => lode_telldir(fs, self.dir(dir)),
                Call::Seekdir(dir, position) => lode_seekdir(fs, self.dir(dir), position.get()).into(),
                Call::Dirfd(dir) => {
                    let fd = lode_dirfd(fs, self.dir(dir));
                    self.opened(fd)
                }
                Call::Closedir(dir) => lode_closedir(fs, self.dir(dir)).into(),
                Call::Fill(byte) => {
                    self.buffer.fill(*byte);
                    0
                }
            }
        }
    }

    fn opened(&mut self, fd: c_int) -> i64 {
        if fd >= 0 {
            self.fds.push(fd);
        }
        fd.into()
    }
}
