//! Files by path and descriptor: the POSIX shape of the file system.
//!
//! [`Files`] joins a pool, an identity, a umask and a table of descriptors; the C library, the command
//! line, the mediator and the preload library stand on it. It decides what Linux decides above a file
//! system: descriptor and access-mode errors, the shared file offset, the rules for the last component
//! of a path (trailing slashes, ".", "..", symbolic links), O_* and AT_* flags. What a directory or an
//! inode decides stays in [`Fs`].
//!
//! Calls that take a path take a base as Linux's `*at` calls do: a descriptor, or [`AT_FDCWD`], which
//! here means the root of the pool, for a pool has no working directory.
//!
//! Each descriptor holds one *open* of its inode ([`Fs::open_node`]), so that an unlinked file lives
//! until its last descriptor is closed; duplicates share the open, the offset and the status flags.
//! References that node operations hand out are given back at once ([`Fs::forget`]). Calls by path hold an
//! open too while they use an inode by its number.
//!
//! Files: `table` numbers and slots, `open` the rules of open(2), `io` reading and writing through a
//! descriptor, `classed` those of a class of their own, `names` making, moving and removing names, `attrs` stat and its kin, `list` directories.

mod attrs;
mod classed;
mod io;
mod list;
mod names;
mod open;
pub mod table;

use crate::error::{Error, Result};
use crate::fs::{Cred, Fs, Ino, Kind, Node, Step, Tries, offload};
use crate::limits::{OPEN_FILES_MAX, PATH_BYTES_MAX, WALK_RETRIES_MAX};
use crate::media::Media;
use crate::mover::EngineKind;
use crate::mover::class::Class;
use crate::sync::Lock;
use crate::wait::{keeping_thread, lets_others_run};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use table::{Held, Table};

pub use classed::Classed;
pub use io::Written;
pub use libc::AT_FDCWD;

/// A descriptor: a small number, the lowest free one first.
pub type Fd = i32;

/// A pool seen by one user through paths and descriptors. Thread-safe.
pub struct Files<M: Media> {
    fs: Arc<Fs<M>>,
    cred: Cred,
    /// The same identity for what an open descriptor already permits: nothing is checked again.
    granted: Cred,
    umask: AtomicU32,
    table: Table<Arc<File>>,
}

/// An open file description: what the duplicates of a descriptor share.
struct File {
    node: Node,
    /// As open(2) took them; O_APPEND can change later.
    flags: AtomicI32,
    /// The file offset, or the cookie of a directory. Locked for the whole of a read or write that
    /// uses it, as POSIX demands of threads that share it.
    offset: Lock<u64>,
}

/// The file that one read or write is of: what its descriptor names when it begins. A call that was blocked goes on with
/// that one, which is open until then, whatever the descriptor names meanwhile.
pub struct OpenFile<M: Media> {
    fd: Fd,
    /// What is wanted of the copies of this call; none: what is of those of the file.
    class: Option<Class>,
    kept: Option<Kept<M>>,
}

struct Kept<M: Media> {
    fs: Arc<Fs<M>>,
    /// None only once it is dropped.
    file: Option<Arc<File>>,
    moved: Moved,
}

/// From where to where a call that can still fail has moved the file offset.
type Moved = Option<(u64, u64)>;

impl<M: Media> OpenFile<M> {
    #[inline]
    pub fn of(fd: Fd) -> OpenFile<M> {
        OpenFile { fd, class: None, kept: None }
    }

    /// With a class for this call; none: the file's.
    #[inline]
    pub fn of_class(fd: Fd, class: Option<Class>) -> OpenFile<M> {
        OpenFile { fd, class, kept: None }
    }

    /// The call is over.
    pub fn let_go(&mut self) {
        self.kept = None;
    }

    /// The call has failed after all: the file offset is where it was, unless somebody has moved it since.
    #[cold]
    pub fn failed(&self) {
        if let Some(Kept { file: Some(file), moved: Some((from, to)), .. }) = &self.kept {
            let mut offset = file.offset.write();
            if *offset == *to {
                *offset = *from;
            }
        }
    }
}

impl<M: Media> Drop for Kept<M> {
    fn drop(&mut self) {
        self.file.take().into_iter().for_each(|file| release(&self.fs, file));
    }
}

/// Gives the open of a file back when its last descriptor has gone, and the last call that keeps it.
fn release<M: Media>(fs: &Fs<M>, file: Arc<File>) {
    if let Some(file) = Arc::into_inner(file) {
        fs.release_node(&file.node);
    }
}

impl<M: Media> Files<M> {
    /// `cred` decides permissions and ownership, `umask` the mode of new files.
    pub fn new(fs: Arc<Fs<M>>, cred: Cred, umask: u32) -> Files<M> {
        let granted = Cred { enforce: false, ..cred.clone() };
        Files { fs, cred, granted, umask: AtomicU32::new(umask & 0o777), table: Table::new(OPEN_FILES_MAX) }
    }

    pub fn fs(&self) -> &Arc<Fs<M>> {
        &self.fs
    }

    /// Sets the mask of permission bits that new files lack and returns the old one.
    pub fn set_umask(&self, mask: u32) -> u32 {
        self.umask.swap(mask & 0o777, Ordering::Relaxed)
    }

    fn umask(&self) -> u32 {
        self.umask.load(Ordering::Relaxed)
    }

    /// Closes a descriptor. The number is free on return.
    pub fn close(&self, fd: Fd) -> Result<()> {
        let file = usize::try_from(fd).ok().and_then(|n| self.table.take(n));
        release(&self.fs, file.ok_or(Error::new(libc::EBADF, "files::close"))?);
        Ok(())
    }

    /// A second descriptor for the same open file.
    pub fn dup(&self, fd: Fd) -> Result<Fd> {
        let slot = self.table.reserve()?;
        let file = self.table.get(fd as usize).map(|file| Arc::clone(&file));
        Ok(slot.fill(file.ok_or(Error::new(libc::EBADF, "files::dup"))?) as Fd)
    }

    /// The flags the descriptor was opened with, O_APPEND as it is now (F_GETFL).
    pub fn flags(&self, fd: Fd) -> Result<i32> {
        Ok(self.file(fd)?.flags())
    }

    /// Switches O_APPEND (F_SETFL); other flags keep what open set.
    pub fn set_append(&self, fd: Fd, append: bool) -> Result<()> {
        let file = self.open_file(fd)?;
        if append {
            file.flags.fetch_or(libc::O_APPEND, Ordering::Relaxed);
        } else {
            file.flags.fetch_and(!libc::O_APPEND, Ordering::Relaxed);
        }
        Ok(())
    }

    /// From now on this engine copies what is read and written through the open file; none: the pool's.
    pub fn set_engine(&self, fd: Fd, engine: Option<EngineKind>) -> Result<()> {
        self.open_file(fd)?.node.set_engine(engine);
        Ok(())
    }

    /// From now on this is wanted of copies of what is read and written through the open file; none: as the pool was
    /// opened.
    pub fn set_class(&self, fd: Fd, class: Option<Class>) -> Result<()> {
        self.open_file(fd)?.node.set_class(class);
        Ok(())
    }

    /// Any descriptor, also one opened with O_PATH.
    #[inline]
    fn file(&self, fd: Fd) -> Result<Held<'_, Arc<File>>> {
        self.table.get(fd as usize).ok_or(Error::new(libc::EBADF, "files::file"))
    }

    /// A descriptor that stands for an open file, not only for a place.
    #[inline]
    fn open_file(&self, fd: Fd) -> Result<Held<'_, Arc<File>>> {
        let file = self.file(fd)?;
        match file.flags() & libc::O_PATH {
            0 => Ok(file),
            _ => Err(Error::new(libc::EBADF, "files::open_file")),
        }
    }

    /// One try of a read or write. See [`OpenFile`].
    #[inline]
    fn try_on<T, W>(
        &self,
        of: &mut OpenFile<M>,
        run: impl FnOnce(&File, &Node, &mut Moved) -> Result<Step<T, W>>,
    ) -> Result<Step<T, W>> {
        let class = of.class;
        let run = |file: &File, moved: &mut Moved| match class {
            None => run(file, &file.node, moved),
            Some(_) => run(file, &file.node_of_class(class), moved),
        };
        if let Some(Kept { file: Some(file), moved, .. }) = &mut of.kept {
            return run(file, moved);
        }
        let file = self.file(of.fd)?;
        let mut moved = None;
        let step = run(&file, &mut moved);
        let tried_again = match &step {
            Ok(step) => matches!(step, Step::Blocked(_)),
            Err(_) => offload::is_put_off(),
        };
        if tried_again || moved.is_some() {
            of.kept = Some(Kept { fs: self.fs.clone(), file: Some(Arc::clone(&file)), moved });
        }
        step
    }

    /// Runs an operation that may find the pool full. In a uthread it is put off where copies keep room, and others run
    /// meanwhile.
    fn with_room<T>(&self, mut run: impl FnMut() -> Result<T>) -> Result<T> {
        if !lets_others_run() {
            return run();
        }
        let mut tries = Tries::new();
        loop {
            match tries.attempt(|| keeping_thread(&mut run)) {
                Some(done) => return done,
                None => self.fs.wait_for_room(),
            }
        }
    }

    /// Where `path` starts: at a descriptor or, for an absolute path or AT_FDCWD, at the root.
    ///
    /// A call holds one descriptor at a time: one that waits for a second while it holds a first could wait
    /// for a call that holds the second and waits for the first, as a descriptor leans to one user and has to
    /// be let go before another gets it.
    #[inline]
    fn base(&self, at: Fd, path: &[u8]) -> Result<Option<Held<'_, Arc<File>>>> {
        check_path(path)?;
        if at == AT_FDCWD || path[0] == b'/' {
            return Ok(None);
        }
        let file = self.table.get(at as usize).ok_or(Error::new(libc::EBADF, "files::base"))?;
        match file.node.kind() {
            Kind::Directory => Ok(Some(file)),
            _ => Err(Error::new(libc::ENOTDIR, "files::base")),
        }
    }

    /// As [`base`](Files::base) for calls with two paths: holds no descriptor. A close that comes in between
    /// may end what is removed already, and then the walk finds nothing.
    fn base_node(&self, at: Fd, path: &[u8]) -> Result<Option<Node>> {
        Ok(self.base(at, path)?.map(|file| file.node.clone()))
    }

    /// Does `run` to the inode that a path names. `flags`: AT_EMPTY_PATH lets an empty path name the base
    /// itself.
    ///
    /// On the walk, or between it and `run`, an inode may lose its last name and go (ESTALE): the path is
    /// walked again, as if the call had come a little later.
    #[inline]
    fn at_path<R>(
        &self,
        at: Fd,
        path: &[u8],
        follow: bool,
        flags: i32,
        run: impl Fn(&Node) -> Result<R>,
    ) -> Result<R> {
        if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 && at != AT_FDCWD {
            return run(&self.file(at)?.node);
        }
        let path = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 { b"/" } else { path };
        let base = self.base(at, path)?;
        self.at_walked(base.as_ref().map(|f| &f.node), path, follow, run)
    }

    /// [`at_path`](Files::at_path) from a base that is known.
    #[inline]
    fn at_walked<R>(
        &self,
        base: Option<&Node>,
        path: &[u8],
        follow: bool,
        run: impl Fn(&Node) -> Result<R>,
    ) -> Result<R> {
        for _ in 0..WALK_RETRIES_MAX {
            match self.fs.walk(&self.cred, base, path, follow).and_then(|node| run(&node)) {
                Err(e) if e.errno() == libc::ESTALE => continue,
                done => return done,
            }
        }
        Err(Error::new(libc::ENOENT, "files::at_path"))
    }

    /// As [`at_path`](Files::at_path) for operations that know inodes by number: the number cannot be
    /// given to another inode while `run` works on it.
    fn pinned_at_path<R>(
        &self,
        at: Fd,
        path: &[u8],
        follow: bool,
        flags: i32,
        run: impl Fn(Ino) -> Result<R>,
    ) -> Result<R> {
        self.at_path(at, path, follow, flags, |node| run(self.pin(node.clone())?.node.ino()))
    }

    /// ESTALE for an inode that has gone.
    fn pin(&self, node: Node) -> Result<Pinned<'_, M>> {
        self.fs.open_inode(&self.granted, &node, libc::O_RDONLY)?;
        Ok(Pinned { fs: &self.fs, node })
    }
}

/// An inode that keeps its number while this lives.
struct Pinned<'f, M: Media> {
    fs: &'f Fs<M>,
    node: Node,
}

impl<M: Media> Drop for Pinned<'_, M> {
    fn drop(&mut self) {
        self.fs.release_node(&self.node);
    }
}

impl<M: Media> Drop for Files<M> {
    fn drop(&mut self) {
        for file in self.table.drain() {
            release(&self.fs, file);
        }
    }
}

impl File {
    /// For one call.
    #[cold]
    fn node_of_class(&self, class: Option<Class>) -> Node {
        let node = self.node.clone();
        node.set_class(class);
        node
    }

    #[inline]
    fn flags(&self) -> i32 {
        self.flags.load(Ordering::Relaxed)
    }

    #[inline]
    fn readable(&self) -> bool {
        let flags = self.flags();
        flags & libc::O_PATH == 0 && matches!(flags & libc::O_ACCMODE, libc::O_RDONLY | libc::O_RDWR)
    }

    #[inline]
    fn writable(&self) -> bool {
        let flags = self.flags();
        flags & libc::O_PATH == 0 && matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR)
    }
}

/// An empty path names nothing, one too long is refused before anything is looked at.
#[inline]
fn check_path(path: &[u8]) -> Result<()> {
    match path.len() {
        0 => Err(Error::new(libc::ENOENT, "files::check_path")),
        1..=PATH_BYTES_MAX => Ok(()),
        _ => Err(Error::new(libc::ENAMETOOLONG, "files::check_path")),
    }
}

/// EINVAL for flag bits that a call does not know.
fn check_flags(flags: i32, known: i32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        _ => Err(Error::new(libc::EINVAL, "files::check_flags")),
    }
}

#[cfg(test)]
mod tests;
