//! FUSE, by the `fuser` crate: requests of the kernel mapped to [`Fs`] and [`Service`].
//!
//! **What the kernel may remember.** A mounted pool has no other user, so names, attributes and data in
//! the kernel's caches are right until the kernel itself changes them, and it knows what it changes: all
//! names of an inode share one inode there (our numbers, not paths), a new link carries fresh attributes,
//! unlink and rename void the times of what they touched, and all of a directory's. But an answer about attributes that crosses such
//! a change would stand: [`HandedOut`] says when the kernel has to be told. Two things it does not
//! see at all: set-id bits that fell by a write, for which [`Requests::forget_attributes`] calls back, and what is stored to fixed
//! files past the mount, of which [`Pages`] lets it keep nothing.
//! `EXPLICIT_INVAL_DATA` keeps it from dropping a file's pages for our own changes of its time.
//!
//! **Opens cost nothing.** A file lives as long as the kernel holds a reference to its inode, which a
//! descriptor implies, and no request needs state of its descriptor. So where the kernel knows
//! zero-message opens the answer to the first open and opendir is ENOSYS, and no open, close or flush ever
//! crosses again. O_TRUNC then arrives as a setattr, one request either way; `ATOMIC_O_TRUNC` must not be
//! announced, because it would promise that the open truncates. Locks are the kernel's own.
//!
//! **A panic** in a request is logged, answered with EIO, and the next request is served.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, Notifier, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyStatx,
    ReplyWrite, ReplyXattr, Request, Session, SessionACL, TimeOrNow, WriteFlags,
};
use lodestone::fs::{Attr, Cred, FIXED, Fs, Ino, Kind, SetAttr};
use lodestone::media::Media;
use tracing::{debug_span, error};

use super::handed_out::HandedOut;
use super::pages::{Kernel, Pages};
use super::service::{Caller, Service, with_buffer};
use super::traffic::Traffic;
use super::translate::{attributes, errno, file_type, ino, no_entry, set_time, unread};
use super::{Cache, Door, Settings};

/// Readahead and asynchronous direct requests in flight, before the kernel waits.
pub const BACKGROUND_REQUESTS_MAX: u16 = 64;
/// How long names and attributes may be remembered where that is right: a year, longer than a mount.
const REMEMBER: Duration = Duration::from_secs(365 * 24 * 3600);
/// And where a change may have crossed them.
const REMEMBER_SHORTLY: Duration = Duration::from_secs(1);
/// A file handle, which no request needs.
const NO_HANDLE: FileHandle = FileHandle(0);

/// A mount that is live: the kernel and we have agreed on the protocol.
pub struct FuseDoor<M: Media> {
    session: Session<Requests<M>>,
    traffic: Arc<Traffic>,
}

impl<M: Media> FuseDoor<M> {
    /// Agrees with the kernel over `device`, a /dev/fuse descriptor that stands for a mount.
    pub fn open(fs: Arc<Fs<M>>, device: OwnedFd, settings: &Settings) -> io::Result<FuseDoor<M>> {
        FuseDoor::agree(fs, device, settings, may_clone())
    }

    fn agree(
        fs: Arc<Fs<M>>,
        device: OwnedFd,
        settings: &Settings,
        clone_device: bool,
    ) -> io::Result<FuseDoor<M>> {
        let (kernel, traffic) = (Arc::new(OnceLock::new()), Arc::<Traffic>::default());
        let requests = Requests {
            service: Service {
                fs,
                class_by_priority: settings.class_by_priority,
                traffic: Arc::clone(&traffic),
            },
            settings: settings.clone(),
            zero_message_open: false,
            zero_message_opendir: false,
            unread: Unread::default(),
            kernel: Arc::clone(&kernel),
            pages: Pages::new(Arc::clone(&kernel)),
            handed_out: HandedOut::new(),
        };
        let mut config = fuser::Config::default();
        config.n_threads = Some(settings.threads);
        config.clone_fd = clone_device;
        // Who may enter is the mount's business (`allow_other`), and the kernel checks it.
        let session = Session::from_fd(requests, device, SessionACL::All, config)?;
        if kernel.set(session.notifier()).is_err() {
            unreachable!("the cell was made above");
        }
        Ok(FuseDoor { session, traffic })
    }

    /// What goes through it.
    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }
}

impl<M: Media> Door for FuseDoor<M> {
    fn serve(self) -> io::Result<impl FnOnce() -> io::Result<()> + Send + 'static> {
        let started = self.session.start()?;
        Ok(|| started.wait())
    }
}

/// A descriptor of its own for each thread takes requests without contention, but needs /dev/fuse; where
/// only an opened descriptor was handed in, the threads share it.
fn may_clone() -> bool {
    std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok()
}

struct Requests<M: Media> {
    service: Service<M>,
    settings: Settings,
    /// Open and release never cross: no open is counted.
    zero_message_open: bool,
    zero_message_opendir: bool,
    unread: Unread,
    /// The way back, to make the kernel forget.
    kernel: Arc<OnceLock<Notifier>>,
    pages: Pages,
    handed_out: HandedOut,
}

fn answer_seek(reply: &Mutex<Option<ReplyLseek>>, found: Result<u64, Errno>) {
    match (found, reply.lock().unwrap_or_else(PoisonError::into_inner).take()) {
        (Ok(at), Some(reply)) => reply.offset(at as i64),
        (Err(e), Some(reply)) => reply.error(e),
        (_, None) => {}
    }
}

/// An answer to SEEK_DATA or SEEK_HOLE, and the hole that it rests on: that may be data which a program stored through a mapping, and
/// which only the kernel has so far.
struct Found {
    at: lodestone::Result<u64>,
    hole: Option<Range<u64>>,
}

fn seek<M: Media>(fs: &Fs<M>, ino: Ino, from: u64, whence: i32) -> lodestone::Result<Found> {
    let size = fs.getattr(ino)?.size;
    let at = fs.seek(ino, from, whence);
    let hole = match (&at, whence) {
        (Ok(at), libc::SEEK_DATA) if *at > from => Some(from..*at),
        (Ok(at), libc::SEEK_HOLE) if *at < size => {
            Some(*at..fs.seek(ino, *at, libc::SEEK_DATA).unwrap_or(size).max(*at))
        }
        (Err(e), libc::SEEK_DATA) if e.errno() == libc::ENXIO && from < size => Some(from..size),
        _ => None,
    };
    Ok(Found { at, hole })
}

/// The answer once the kernel has written what it has of the holes that it rests on.
fn seek_written<M: Media>(
    fs: &Fs<M>,
    kernel: &Kernel,
    ino: Ino,
    (from, whence): (u64, i32),
    mut hole: Range<u64>,
) -> lodestone::Result<u64> {
    while kernel.write_back(INodeNo(u64::from(ino.0)), hole.clone()) {
        match seek(fs, ino, from, whence)? {
            Found { hole: Some(found), .. } if found != hole => hole = found,
            Found { at, .. } => return at,
        }
    }
    all_is_data(fs, ino, from, whence)
}

/// What is right whatever the kernel has.
fn all_is_data<M: Media>(fs: &Fs<M>, ino: Ino, from: u64, whence: i32) -> lodestone::Result<u64> {
    if whence == libc::SEEK_DATA { Ok(from) } else { Ok(fs.getattr(ino)?.size) }
}

/// References that the kernel took to inodes which could not be read when a listing named them, so that
/// [`Fs`] never counted them. They are given back before those it did count.
#[derive(Default)]
struct Unread {
    any: AtomicBool,
    counts: Mutex<HashMap<Ino, u64>>,
}

impl Unread {
    fn counts(&self) -> MutexGuard<'_, HashMap<Ino, u64>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, node: Ino) {
        *self.counts().entry(node).or_default() += 1;
        self.any.store(true, Ordering::Release);
    }

    /// How many of `count` references that come back [`Fs`] knows of.
    fn give_back(&self, node: Ino, count: u64) -> u64 {
        if !self.any.load(Ordering::Acquire) {
            return count;
        }
        let mut counts = self.counts();
        let Some(taken) = counts.get_mut(&node) else { return count };
        let here = count.min(*taken);
        *taken -= here;
        if *taken == 0 {
            counts.remove(&node);
        }
        count - here
    }
}

impl<M: Media> Requests<M> {
    fn fs(&self) -> &Fs<M> {
        &self.service.fs
    }

    fn remember(&self) -> Duration {
        if self.settings.cache == Cache::None { Duration::ZERO } else { REMEMBER }
    }

    fn file_flags(&self) -> FopenFlags {
        match self.settings.cache {
            Cache::None => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            Cache::Auto | Cache::Always => FopenFlags::FOPEN_KEEP_CACHE,
        }
    }

    /// Called before the answer to the request that changed the mode, so that its caller cannot see, or
    /// execute by, the old one. Concerns attributes only: no page is touched, no lock waited for.
    fn forget_attributes(&self, ino: Ino) {
        if let Some(Err(e)) = self.kernel.get().map(|k| k.inval_inode(INodeNo(u64::from(ino.0)), -1, 0)) {
            error!(inode = ino.0, error = %e, "the kernel keeps the attributes of an inode that we changed");
        }
    }

    /// Attributes of an inode, and how long they may be remembered.
    fn fresh(&self, ino: Ino) -> lodestone::Result<(Attr, Duration)> {
        if self.settings.cache == Cache::None {
            return self.fs().getattr(ino).map(|attr| (attr, Duration::ZERO));
        }
        let (attr, holds) = self.handed_out.read(ino, || self.fs().getattr(ino))?;
        Ok((attr, if holds { REMEMBER } else { REMEMBER_SHORTLY }))
    }

    /// Behind a change that the kernel would not hold against an older answer, and before the answer to it.
    fn touched(&self, ino: Ino) {
        if self.settings.cache != Cache::None && self.handed_out.changed(ino) {
            self.forget_attributes(ino);
        }
    }

    /// What reads, which may set the access time.
    fn reading<T>(&self, ino: Ino, work: impl FnOnce(Ino) -> lodestone::Result<T>) -> lodestone::Result<T> {
        if self.settings.cache == Cache::None {
            return work(ino);
        }
        let atime = || self.fs().getattr(ino).ok().map(|attr| attr.atime);
        let before = atime();
        let answer = work(ino);
        if atime() != before {
            self.touched(ino);
        }
        answer
    }

    /// What the kernel keeps of a directory's listing names the old parent as `..`, and no time of the directory says that this changed. Unlike
    /// a file's, the pages of a listing wait for no request: they are gone before the answer.
    fn forget_listing(&self, dir: Ino) {
        if self.settings.cache == Cache::None {
            return;
        }
        if let Some(Err(e)) = self.kernel.get().map(|k| k.inval_inode(INodeNo(u64::from(dir.0)), 0, 0)) {
            error!(inode = dir.0, error = %e, "the kernel keeps a listing of a directory that moved");
        }
    }

    /// As [`attempt`] of what changes more than the bytes of a write: durable at the answer where the mount's options say so.
    fn change<T>(&self, work: impl FnOnce() -> lodestone::Result<T>) -> Result<T, Errno> {
        attempt(|| {
            let answer = work()?;
            self.sync_names()?;
            Ok(answer)
        })
    }

    fn sync_names(&self) -> lodestone::Result<()> {
        if self.settings.sync_names { self.fs().sync() } else { Ok(()) }
    }

    /// As [`change`](Requests::change) of what the kernel has a reference to behind the answer, and none behind an error. A file that
    /// `is_open` is so until its release, where one comes.
    fn make(&self, is_open: bool, work: impl FnOnce() -> lodestone::Result<Attr>) -> Result<Attr, Errno> {
        attempt(|| {
            let made = work()?;
            let synced = self.sync_names();
            if is_open && (self.zero_message_open || synced.is_err()) {
                self.fs().release(made.ino);
            }
            if synced.is_err() {
                self.fs().forget(made.ino, 1);
            }
            synced.map(|()| made)
        })
    }

    /// Behind a change of this attribute, and before the answer to it: where a file was fixed, or is not any more, the kernel forgets its size, and
    /// soon its pages, for others store there.
    fn fixed_anew(&self, ino: Ino, attribute: &OsStr) {
        if attribute.as_bytes() == FIXED {
            self.forget_attributes(ino);
            self.pages.forget(INodeNo(u64::from(ino.0)), 0, 0);
        }
    }

    /// The attributes again, as they are now. What they are for has been done: a panic, of which the hook has said where, takes
    /// nothing back.
    fn newest(&self, attr: Attr) -> (Attr, Duration) {
        let again = catch_unwind(AssertUnwindSafe(|| self.fresh(attr.ino)));
        again.ok().and_then(Result::ok).unwrap_or((attr, self.remember().min(REMEMBER_SHORTLY)))
    }

    /// With the inode's number all that the kernel keeps in a file handle, 32 bits of it; compared by the kernel alone. It wants none of the root.
    fn generation(&self, attr: &Attr) -> Generation {
        Generation(if attr.ino == Ino::ROOT { 0 } else { self.fs().handle_number(attr.generation).into() })
    }

    fn entry(&self, reply: ReplyEntry, answer: Result<Attr, Errno>) {
        match answer.map(|attr| self.newest(attr)) {
            Ok((attr, time)) => reply.entry(&time, &attributes(&attr), self.generation(&attr)),
            Err(e) => reply.error(e),
        }
    }

    fn created(&self, reply: ReplyCreate, answer: Result<Attr, Errno>) {
        match answer.map(|attr| self.newest(attr)) {
            Ok((attr, time)) => {
                let generation = self.generation(&attr);
                reply.created(&time, &attributes(&attr), generation, NO_HANDLE, self.file_flags());
            }
            Err(e) => reply.error(e),
        }
    }

    /// The features we use, each where the kernel has it.
    fn agree(&mut self, config: &mut KernelConfig) {
        let mut wanted = InitFlags::FUSE_DONT_MASK
            | InitFlags::FUSE_POSIX_ACL
            | InitFlags::FUSE_EXPORT_SUPPORT
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        if self.settings.cache != Cache::None {
            wanted |= InitFlags::FUSE_EXPLICIT_INVAL_DATA | InitFlags::FUSE_CACHE_SYMLINKS;
            let has = config.capabilities();
            self.zero_message_open =
                has.contains(InitFlags::FUSE_NO_OPEN_SUPPORT) && !self.settings.asks_opens;
            self.zero_message_opendir = has.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT);
        }
        let agreed = wanted & config.capabilities();
        if config.add_capabilities(agreed).is_err() {
            unreachable!("masked by what the kernel has");
        }
    }
}

/// Runs one request. An error becomes its errno, a panic EIO.
fn attempt<T>(work: impl FnOnce() -> lodestone::Result<T>) -> Result<T, Errno> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(e)) => {
            // Of damage nobody hears else but who meets it.
            if matches!(e.errno(), libc::EIO | libc::EUCLEAN) {
                error!(error = ?e, "a request failed");
            } else {
                tracing::debug!(error = ?e, "refused");
            }
            Err(errno(&e))
        }
        // The panic hook has said where.
        Err(_) => {
            error!("a request panicked and was answered with EIO");
            Err(Errno::EIO)
        }
    }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

fn answer_empty(reply: ReplyEmpty, answer: Result<(), Errno>) {
    match answer {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e),
    }
}

/// A value of `size` bytes was asked for; 0 asks how many there are.
fn answer_value(reply: ReplyXattr, size: u32, answer: Result<Vec<u8>, Errno>) {
    match answer {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(e) => reply.error(e),
    }
}

impl<M: Media> Filesystem for Requests<M> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.agree(config);
        if let Err(nearest) = config.set_max_write(self.settings.write_bytes_max) {
            return Err(io::Error::other(format!("the largest write request is {nearest} bytes")));
        }
        if config.set_max_background(BACKGROUND_REQUESTS_MAX).is_err() {
            unreachable!("any number but zero is accepted");
        }
        tracing::debug!(kernel = %config.kernel_abi(), capabilities = ?config.capabilities(), "agreed");
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _span = debug_span!("lookup", dir = parent.0, ?name).entered();
        let answer = attempt(|| match name.as_bytes() {
            // Of a file handle, whatever it is.
            b"." => self.fs().take(ino(parent)?),
            name => self.fs().lookup(&caller(req).cred(), ino(parent)?, name),
        });
        match answer {
            Err(e) if e.code() == libc::ENOENT && self.settings.cache != Cache::None => {
                reply.entry(&self.remember(), &no_entry(), Generation(0));
            }
            answer => self.entry(reply, answer),
        }
    }

    fn forget(&self, _: &Request, node: INodeNo, nlookup: u64) {
        let _span = debug_span!("forget", ino = node.0, nlookup).entered();
        // There is no answer; a failure has been logged.
        let _ = attempt(|| {
            let node = ino(node)?;
            self.fs().forget(node, self.unread.give_back(node, nlookup));
            Ok(())
        });
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let _span = debug_span!("getattr", ino = node.0).entered();
        match attempt(|| self.fresh(ino(node)?)) {
            Ok((attr, time)) => reply.attr(&time, &attributes(&attr)),
            Err(e) => reply.error(e),
        }
    }

    /// The kernel asks so where somebody wants the time of birth; and from then on it knows that.
    fn statx(
        &self,
        _: &Request,
        node: INodeNo,
        _: Option<FileHandle>,
        flags: u32,
        mask: u32,
        reply: ReplyStatx,
    ) {
        let _span = debug_span!("statx", ino = node.0, flags, mask).entered();
        match attempt(|| self.fresh(ino(node)?)) {
            Ok((attr, time)) => reply.statx(&time, &attributes(&attr)),
            Err(e) => reply.error(e),
        }
    }

    fn setattr(
        &self,
        req: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        kill: bool,
        reply: ReplyAttr,
    ) {
        let set = SetAttr {
            mode: mode.map(|m| m & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
        };
        let _span = debug_span!("setattr", ino = node.0, ?set).entered();
        match self
            .change(|| self.service.setattr(caller(req), ino(node)?, &set, kill))
            .map(|attr| self.newest(attr))
        {
            Ok((attr, time)) => reply.attr(&time, &attributes(&attr)),
            Err(e) => reply.error(e),
        }
    }

    fn readlink(&self, _: &Request, node: INodeNo, reply: ReplyData) {
        let _span = debug_span!("readlink", ino = node.0).entered();
        match attempt(|| self.reading(ino(node)?, |ino| self.fs().readlink(ino))) {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(e),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _span = debug_span!("mknod", dir = parent.0, ?name, mode, umask, rdev).entered();
        let answer = self.make(false, || {
            let (cred, dir) = (caller(req).cred(), ino(parent)?);
            let made = self.fs().mknod(&cred, dir, name.as_bytes(), mode, umask, u64::from(rdev))?;
            self.touched(dir);
            Ok(made)
        });
        self.entry(reply, answer);
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _span = debug_span!("mkdir", dir = parent.0, ?name, mode, umask).entered();
        let answer = self.make(false, || {
            let dir = ino(parent)?;
            let made = self.fs().mkdir(&caller(req).cred(), dir, name.as_bytes(), mode, umask)?;
            self.touched(dir);
            Ok(made)
        });
        self.entry(reply, answer);
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = debug_span!("unlink", dir = parent.0, ?name).entered();
        let answer = self.change(|| {
            let dir = ino(parent)?;
            self.fs().unlink(&caller(req).cred(), dir, name.as_bytes())?;
            self.touched(dir);
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = debug_span!("rmdir", dir = parent.0, ?name).entered();
        let answer = self.change(|| {
            let dir = ino(parent)?;
            self.fs().rmdir(&caller(req).cred(), dir, name.as_bytes())?;
            self.touched(dir);
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _span = debug_span!("symlink", dir = parent.0, ?name, ?target).entered();
        let answer = self.make(false, || {
            let (dir, target) = (ino(parent)?, target.as_os_str().as_bytes());
            let made = self.fs().symlink(&caller(req).cred(), dir, name.as_bytes(), target)?;
            self.touched(dir);
            Ok(made)
        });
        self.entry(reply, answer);
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _span =
            debug_span!("rename", from = parent.0, ?name, to = newparent.0, ?newname, ?flags).entered();
        let answer = self.change(|| {
            let (from, to) = (ino(parent)?, ino(newparent)?);
            let cred = caller(req).cred();
            self.fs().rename(&cred, from, name.as_bytes(), to, newname.as_bytes(), flags.bits())?;
            self.touched(from);
            self.touched(to);
            // What moved has another time, too, and a directory perhaps another parent.
            for (dir, name) in [(to, newname), (from, name)] {
                if let Ok(moved) = self.fs().lookup(&Cred::root(), dir, name.as_bytes()) {
                    self.touched(moved.ino);
                    if from != to && moved.kind() == Kind::Directory {
                        self.forget_listing(moved.ino);
                    }
                    self.fs().forget(moved.ino, 1);
                }
                if !flags.contains(RenameFlags::RENAME_EXCHANGE) {
                    break;
                }
            }
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn link(&self, req: &Request, node: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let _span = debug_span!("link", ino = node.0, dir = newparent.0, name = ?newname).entered();
        let answer = self.make(false, || {
            let dir = ino(newparent)?;
            let linked = self.fs().link(&caller(req).cred(), ino(node)?, dir, newname.as_bytes())?;
            self.touched(dir);
            Ok(linked)
        });
        self.entry(reply, answer);
    }

    fn open(&self, req: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _span = debug_span!("open", ino = node.0, flags = flags.0).entered();
        if self.zero_message_open {
            return reply.error(Errno::ENOSYS);
        }
        match attempt(|| self.fs().open_node(&caller(req).cred(), ino(node)?, flags.0)) {
            Ok(()) => reply.opened(NO_HANDLE, self.file_flags()),
            Err(e) => reply.error(e),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _span = debug_span!("create", dir = parent.0, ?name, mode, umask, flags).entered();
        let answer = self.make(true, || {
            let (cred, dir) = (caller(req).cred(), ino(parent)?);
            let (attr, made) = self.fs().create(&cred, dir, name.as_bytes(), mode, umask, flags)?;
            if made {
                self.touched(dir);
            }
            Ok(attr)
        });
        self.created(reply, answer);
    }

    fn tmpfile(&self, req: &Request, parent: INodeNo, mode: u32, umask: u32, flags: i32, reply: ReplyCreate) {
        let _span = debug_span!("tmpfile", dir = parent.0, mode, umask, flags).entered();
        let answer = self.make(true, || self.fs().tmpfile(&caller(req).cred(), ino(parent)?, mode, umask));
        self.created(reply, answer);
    }

    fn release(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let _span = debug_span!("release", ino = node.0).entered();
        let answer = attempt(|| {
            if !self.zero_message_open {
                self.fs().release(ino(node)?);
            }
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn read(
        &self,
        req: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _span = debug_span!("read", ino = node.0, offset, size).entered();
        let mut reply = Some(reply);
        let answer = attempt(|| {
            with_buffer(size as usize, |buffer| {
                let ino = ino(node)?;
                let got = self.reading(ino, |ino| self.service.read(caller(req), ino, offset, buffer))?;
                if let Some(reply) = reply.take() {
                    reply.data(&buffer[..got]);
                }
                if self.settings.cache != Cache::None && self.fs().is_fixed(ino) {
                    self.pages.forget(node, offset, size);
                }
                Ok(())
            })
        });
        if let (Err(e), Some(reply)) = (answer, reply) {
            reply.error(e);
        }
    }

    fn write(
        &self,
        req: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _span =
            debug_span!("write", ino = node.0, offset, size = data.len(), ?write_flags, flags = flags.0)
                .entered();
        let answer = attempt(|| {
            let (node, kill) = (ino(node)?, write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID));
            let written_back = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            let written = self.service.write(caller(req), node, offset, data, (kill, written_back))?;
            if written.set_id_fell {
                self.forget_attributes(node);
            } else if written_back {
                self.touched(node);
            }
            // Of what goes through its cache the kernel asks for an fsync itself, of the rest not always.
            let direct = self.settings.cache == Cache::None || flags.0 & libc::O_DIRECT != 0;
            if direct && flags.0 & libc::O_DSYNC != 0 {
                self.fs().fsync(node, flags.0 & libc::O_SYNC != libc::O_SYNC)?;
            }
            Ok(written.bytes)
        });
        match answer {
            Ok(bytes) => reply.written(bytes as u32),
            Err(e) => reply.error(e),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Nothing waits for a close; the kernel remembers this answer and does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn fsync(&self, _: &Request, node: INodeNo, _: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let _span = debug_span!("fsync", ino = node.0, datasync).entered();
        answer_empty(reply, attempt(|| self.fs().fsync(ino(node)?, datasync)));
    }

    fn opendir(&self, _: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let _span = debug_span!("opendir", ino = node.0).entered();
        if self.zero_message_opendir {
            return reply.error(Errno::ENOSYS);
        }
        let flags = match self.settings.cache {
            Cache::None => FopenFlags::empty(),
            Cache::Auto | Cache::Always => FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR,
        };
        reply.opened(NO_HANDLE, flags);
    }

    fn readdir(&self, _: &Request, node: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let _span = debug_span!("readdir", ino = node.0, offset).entered();
        let answer = attempt(|| {
            self.reading(ino(node)?, |dir| {
                self.fs().readdir(dir, offset, &mut |e| {
                    let number = INodeNo(u64::from(e.ino.0));
                    !reply.add(number, e.cookie, file_type(e.kind), OsStr::from_bytes(e.name))
                })
            })
        });
        match answer {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _span = debug_span!("readdirplus", ino = node.0, offset).entered();
        let changes = self.handed_out.changes();
        let time_of = |ino| {
            self.handed_out.goes_out(ino);
            let holds = self.handed_out.changes() == changes;
            if holds { self.remember() } else { self.remember().min(REMEMBER_SHORTLY) }
        };
        let answer = attempt(|| {
            self.reading(ino(node)?, |dir| {
                self.fs().readdir_plus(dir, offset, &mut |e, attr| {
                    let name = OsStr::from_bytes(e.name);
                    let number = INodeNo(u64::from(e.ino.0));
                    !match attr {
                        Some(attr) => {
                            let generation = self.generation(attr);
                            reply.add(number, e.cookie, name, &time_of(e.ino), &attributes(attr), generation)
                        }
                        None => {
                            // The kernel looks it up before it believes anything of this.
                            let full =
                                reply.add(number, e.cookie, name, &Duration::ZERO, &unread(e), Generation(0));
                            if !full && !matches!(e.name, b"." | b"..") {
                                self.unread.take(e.ino);
                            }
                            full
                        }
                    }
                })
            })
        });
        match answer {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        }
    }

    fn fsyncdir(&self, _: &Request, node: INodeNo, _: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let _span = debug_span!("fsyncdir", ino = node.0, datasync).entered();
        answer_empty(reply, attempt(|| self.fs().fsync(ino(node)?, datasync)));
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let _span = debug_span!("statfs").entered();
        match attempt(|| Ok(self.fs().statfs())) {
            Ok(s) => reply.statfs(
                s.blocks,
                s.blocks_free,
                s.blocks_free,
                s.inodes,
                s.inodes_free,
                s.block_bytes,
                s.name_bytes_max,
                s.block_bytes,
            ),
            Err(e) => reply.error(e),
        }
    }

    fn setxattr(
        &self,
        req: &Request,
        node: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _span = debug_span!("setxattr", ino = node.0, ?name, size = value.len(), flags).entered();
        let answer = self.change(|| {
            let node = ino(node)?;
            self.service.setxattr(caller(req), node, name.as_bytes(), value, flags)?;
            self.touched(node);
            self.fixed_anew(node, name);
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn getxattr(&self, req: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _span = debug_span!("getxattr", ino = node.0, ?name, size).entered();
        let answer = attempt(|| self.fs().getxattr(&caller(req).cred(), ino(node)?, name.as_bytes()));
        answer_value(reply, size, answer);
    }

    fn listxattr(&self, req: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        let _span = debug_span!("listxattr", ino = node.0, size).entered();
        let answer = attempt(|| self.fs().listxattr(&caller(req).cred(), ino(node)?));
        answer_value(reply, size, answer);
    }

    fn removexattr(&self, req: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = debug_span!("removexattr", ino = node.0, ?name).entered();
        let answer = self.change(|| {
            let node = ino(node)?;
            self.fs().removexattr(&caller(req).cred(), node, name.as_bytes())?;
            self.touched(node);
            self.fixed_anew(node, name);
            Ok(())
        });
        answer_empty(reply, answer);
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        // Never asked with `default_permissions`; the kernel answers by itself after this.
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        req: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _span = debug_span!("fallocate", ino = node.0, offset, length, mode).entered();
        let answer = self.change(|| {
            let node = ino(node)?;
            if self.service.fallocate(caller(req), node, mode, offset, length)? {
                self.forget_attributes(node);
            } else {
                self.touched(node);
            }
            Ok(())
        });
        answer_empty(reply, answer);
    }

    /// The kernel asks once, and files are always ready.
    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn lseek(&self, _: &Request, node: INodeNo, _: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let _span = debug_span!("lseek", ino = node.0, offset, whence).entered();
        let from = offset as u64;
        let found = attempt(|| {
            if offset < 0 {
                return Err(lodestone::Error::new(libc::ENXIO, "door::lseek"));
            }
            let ino = ino(node)?;
            let Found { at, hole } = seek(self.fs(), ino, from, whence)?;
            match hole {
                Some(hole) => Ok((ino, 0, Some(hole))),
                None => at.map(|at| (ino, at, None)),
            }
        });
        let (ino, hole) = match found {
            Ok((ino, _, Some(hole))) => (ino, hole),
            Ok((_, at, None)) => return reply.offset(at as i64),
            Err(e) => return reply.error(e),
        };
        // Not here: perhaps nobody else is there to take what the kernel writes.
        let (fs, reply) = (Arc::clone(&self.service.fs), Arc::new(Mutex::new(Some(reply))));
        let late = Arc::clone(&reply);
        let asked = self.pages.ask(move |kernel| {
            answer_seek(&late, attempt(|| seek_written(&fs, kernel, ino, (from, whence), hole)));
        });
        if !asked {
            answer_seek(&reply, attempt(|| all_is_data(self.fs(), ino, from, whence)));
        }
    }

    fn copy_file_range(
        &self,
        req: &Request,
        ino_in: INodeNo,
        _: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _: FileHandle,
        offset_out: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _span =
            debug_span!("copy", from = ino_in.0, offset_in, to = ino_out.0, offset_out, len).entered();
        let answer = self.change(|| {
            let (from, to) = (ino(ino_in)?, ino(ino_out)?);
            let copied = self.reading(from, |from| {
                self.service.copy_range(caller(req), (from, offset_in), (to, offset_out), len)
            })?;
            if copied.set_id_fell {
                self.forget_attributes(to);
            }
            Ok(copied.bytes)
        });
        match answer {
            Ok(bytes) => reply.written(bytes as u32),
            Err(e) => reply.error(e),
        }
    }
}

#[cfg(test)]
mod arbitrary;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_answered_with_eio_and_the_next_request_is_served() {
        let panicked: Result<(), Errno> = attempt(|| panic!("a broken request"));
        assert_eq!(panicked.unwrap_err().code(), libc::EIO);
        assert_eq!(attempt(|| Ok(5)).unwrap(), 5);
    }

    #[test]
    fn references_to_what_was_not_read_come_back_first() {
        let (unread, a, b) = (Unread::default(), Ino(7), Ino(8));
        assert_eq!(unread.give_back(a, 3), 3);
        unread.take(a);
        unread.take(a);
        assert_eq!(unread.give_back(b, 1), 1);
        assert_eq!(unread.give_back(a, 1), 0);
        assert_eq!(unread.give_back(a, 3), 2);
        assert_eq!(unread.give_back(a, 3), 3);
    }

    #[test]
    fn an_error_keeps_its_errno() {
        let refused: Result<(), Errno> = attempt(|| Err(lodestone::Error::new(libc::ENOTEMPTY, "test")));
        assert_eq!(refused.unwrap_err().code(), libc::ENOTEMPTY);
    }
}
