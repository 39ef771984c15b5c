//! Reading and writing through a descriptor.
//!
//! Errors come in Linux's order: a negative offset, a bad descriptor, a wrong access mode, a wrong kind.

use std::ops::Range;
use std::sync::Arc;

use super::{AT_FDCWD, Fd, File, Files, OpenFile};
use crate::error::{Error, Result};
use crate::fs::space::check_mode;
use crate::fs::{
    Cred, Fs, Ino, Kind, Lent, LentRoom, Node, ReadStep, ReadTicket, SetAttr, Step, Syncing, WriteStep,
    WriteTicket,
};
use crate::limits::{FILE_BYTES_MAX, RW_BYTES_MAX};
use crate::media::Media;
use crate::wait::lets_others_run;
use libc::{O_APPEND, O_DSYNC, O_SYNC, SEEK_CUR, SEEK_DATA, SEEK_END, SEEK_HOLE, SEEK_SET};

/// What a write did.
#[derive(Clone, Copy)]
pub struct Written {
    bytes: usize,
    /// The offset behind it.
    end: u64,
    /// By O_SYNC or O_DSYNC: which inode, and whether its data alone.
    synced: Option<(Ino, bool)>,
}

impl Written {
    pub(in crate::fs) fn bytes(self) -> usize {
        self.bytes
    }

    /// Whether it is to be synced before it has returned.
    pub fn is_to_be_synced(self) -> bool {
        self.synced.is_some()
    }

    /// What is to be synced before it has returned: which inode, and whether its data alone.
    pub(in crate::fs) fn to_sync(self) -> Option<(Ino, bool)> {
        self.synced
    }
}

impl<M: Media> Files<M> {
    /// Reads at the file offset and moves it; 0 at the end of file.
    pub fn read(&self, fd: Fd, dst: &mut [u8]) -> Result<usize> {
        self.read_of(OpenFile::of(fd), dst)
    }

    pub(super) fn read_of(&self, mut of: OpenFile<M>, dst: &mut [u8]) -> Result<usize> {
        self.fs.read_and_wait(dst, |dst| self.begin_read(&mut of, dst)).inspect_err(|_| of.failed())
    }

    /// As [`read`](Files::read), up to where it would wait for a copy: see [`Fs::begin_read`]. Where that fails,
    /// [`OpenFile::failed`].
    pub fn begin_read(&self, of: &mut OpenFile<M>, mut dst: LentRoom) -> ReadStep<usize> {
        self.try_on(of, |file, node, moved| {
            file.check_read()?;
            let mut offset = file.offset.write();
            let from = *offset;
            let step = self.fs.begin_read(node, from, dst.first(RW_BYTES_MAX))?;
            if let Step::Done(n) | Step::UnderWay(n, _) = &step {
                *offset += *n as u64;
            }
            if matches!(step, Step::UnderWay(..)) {
                *moved = Some((from, *offset));
            }
            Ok(step)
        })
    }

    /// Reads at `offset`; the file offset stays.
    #[inline]
    pub fn pread(&self, fd: Fd, dst: &mut [u8], offset: i64) -> Result<usize> {
        self.pread_of(OpenFile::of(fd), dst, offset)
    }

    #[inline]
    pub(super) fn pread_of(&self, mut of: OpenFile<M>, dst: &mut [u8], offset: i64) -> Result<usize> {
        self.fs.read_and_wait(dst, |dst| self.begin_pread(&mut of, dst, offset))
    }

    /// As [`pread`](Files::pread), up to where it would wait for a copy: see [`Fs::begin_read`].
    #[inline]
    pub fn begin_pread(&self, of: &mut OpenFile<M>, mut dst: LentRoom, offset: i64) -> ReadStep<usize> {
        let offset = unsigned(offset)?;
        self.try_on(of, |file, node, _| {
            if file.readable() {
                check_end(offset, dst.len())?;
            }
            file.check_read()?;
            self.fs.begin_read(node, offset, dst.first(RW_BYTES_MAX))
        })
    }

    /// Writes at the file offset, or with O_APPEND at the end of file, and moves the offset.
    pub fn write(&self, fd: Fd, src: &[u8]) -> Result<usize> {
        self.write_of(OpenFile::of(fd), src)
    }

    pub(super) fn write_of(&self, mut of: OpenFile<M>, src: &[u8]) -> Result<usize> {
        let written = self.fs.write_and_wait(src, |src| self.begin_write(&mut of, src));
        written.and_then(|written| self.sync_written(written)).inspect_err(|_| of.failed())
    }

    /// As [`write`](Files::write), up to where it would wait for a copy: see [`Fs::begin_write`]. Then
    /// [`sync_written`](Files::sync_written). Where either fails, [`OpenFile::failed`].
    pub fn begin_write(&self, of: &mut OpenFile<M>, src: Lent) -> WriteStep<Written> {
        self.try_on(of, |file, node, moved| {
            file.check_write()?;
            let mut offset = file.offset.write();
            let from = *offset;
            let step = self.write_file((file, node), from, src)?;
            if let Step::Done(written) | Step::UnderWay(written, _) = &step {
                *offset = written.end;
                if written.is_to_be_synced() || matches!(step, Step::UnderWay(..)) {
                    *moved = Some((from, *offset));
                }
            }
            Ok(step)
        })
    }

    /// Writes at `offset`, the file offset stays. With O_APPEND the bytes go to the end of file
    /// whatever `offset` is, as on Linux.
    #[inline]
    pub fn pwrite(&self, fd: Fd, src: &[u8], offset: i64) -> Result<usize> {
        self.pwrite_of(OpenFile::of(fd), src, offset)
    }

    #[inline]
    pub(super) fn pwrite_of(&self, mut of: OpenFile<M>, src: &[u8], offset: i64) -> Result<usize> {
        let written = self.fs.write_and_wait(src, |src| self.begin_pwrite(&mut of, src, offset))?;
        self.sync_written(written)
    }

    /// As [`pwrite`](Files::pwrite), up to where it would wait for a copy: see [`Fs::begin_write`]. Then
    /// [`sync_written`](Files::sync_written).
    #[inline]
    pub fn begin_pwrite(&self, of: &mut OpenFile<M>, src: Lent, offset: i64) -> WriteStep<Written> {
        let offset = unsigned(offset)?;
        self.try_on(of, |file, node, _| {
            file.check_write()?;
            check_end(offset, src.bytes().len())?;
            self.write_file((file, node), offset, src)
        })
    }

    /// Begins to write at `offset`; the ticket says when it is done. Until then reads and writes of these bytes wait for
    /// it. O_SYNC and O_DSYNC are the caller's business: [`fsync`](Files::fsync) waits for it, too.
    pub fn submit_pwrite(&self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Result<WriteTicket<M>> {
        self.submit_pwrite_of(OpenFile::of(fd), bytes, offset)
    }

    pub(super) fn submit_pwrite_of(
        &self,
        mut of: OpenFile<M>,
        bytes: Box<[u8]>,
        offset: i64,
    ) -> Result<WriteTicket<M>> {
        let begin = &mut |src: Lent| {
            Ok(match self.begin_pwrite(&mut of, src, offset)? {
                Step::Done(written) => Step::Done(written.bytes),
                Step::UnderWay(written, write) => Step::UnderWay(written.bytes, write),
                Step::Blocked(write) => Step::Blocked(write),
            })
        };
        WriteTicket::begin(&self.fs, bytes, begin)
    }

    /// Begins to read at `offset`, into bytes that the ticket gives back.
    pub fn submit_pread(&self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Result<ReadTicket<M>> {
        self.submit_pread_of(OpenFile::of(fd), bytes, offset)
    }

    pub(super) fn submit_pread_of(
        &self,
        mut of: OpenFile<M>,
        bytes: Box<[u8]>,
        offset: i64,
    ) -> Result<ReadTicket<M>> {
        ReadTicket::begin(&self.fs, bytes, &mut |room| self.begin_pread(&mut of, room, offset))
    }

    #[inline]
    fn write_file(&self, (file, node): (&File, &Node), offset: u64, src: Lent) -> WriteStep<Written> {
        let flags = file.flags();
        let synced = (flags & O_DSYNC != 0).then(|| (file.node.ino(), flags & O_SYNC != O_SYNC));
        let src = src.first(RW_BYTES_MAX);
        if src.bytes().is_empty() {
            return Ok(Step::Done(Written { bytes: 0, end: offset, synced: None }));
        }
        let append = flags & O_APPEND != 0;
        let written =
            |range: Range<u64>| Written { bytes: (range.end - range.start) as usize, end: range.end, synced };
        Ok(match self.fs.begin_write(&self.cred, node, offset, src, append)? {
            Step::Done(range) => Step::Done(written(range)),
            Step::UnderWay(range, write) => Step::UnderWay(written(range), write),
            Step::Blocked(write) => Step::Blocked(write),
        })
    }

    /// The end of a write, with nothing more to wait for but what O_SYNC asks for; the bytes written.
    #[inline]
    pub fn sync_written(&self, written: Written) -> Result<usize> {
        self.fs.sync_written(written)
    }

    /// Moves the file offset; with SEEK_DATA and SEEK_HOLE to where data or a hole begins. A
    /// directory's offset is a cookie that readdir reported.
    pub fn lseek(&self, fd: Fd, offset: i64, whence: i32) -> Result<u64> {
        let file = self.open_file(fd)?;
        let mut position = file.offset.write();
        let is_dir = file.node.kind() == Kind::Directory;
        let start = match whence {
            SEEK_SET => 0,
            SEEK_CUR => *position,
            SEEK_END if !is_dir => self.fs.attr_of(&file.node)?.size,
            SEEK_DATA | SEEK_HOLE if !is_dir => {
                let from = u64::try_from(offset).map_err(|_| Error::new(libc::ENXIO, "files::lseek"))?;
                *position = self.fs.seek_node(&file.node, from, whence)?;
                return Ok(*position);
            }
            _ => return Err(Error::new(libc::EINVAL, "files::lseek")),
        };
        let max = if is_dir { i64::MAX as u64 } else { FILE_BYTES_MAX };
        let target = start.checked_add_signed(offset).filter(|&p| p <= max);
        *position = target.ok_or(Error::new(libc::EINVAL, "files::lseek"))?;
        Ok(*position)
    }

    /// Sets the size; bytes that come into being read as zeros.
    pub fn ftruncate(&self, fd: Fd, size: i64) -> Result<()> {
        let size = unsigned(size)?;
        self.let_writes_end(|| self.ino(fd));
        self.with_room(|| {
            let file = self.open_file(fd)?;
            if !file.writable() || file.node.kind() != Kind::File {
                return Err(Error::new(libc::EINVAL, "files::ftruncate"));
            }
            self.set_size(&self.granted, &file.node, size)
        })
    }

    /// As [`ftruncate`](Files::ftruncate), by path.
    pub fn truncate(&self, path: &[u8], size: i64) -> Result<()> {
        let size = unsigned(size)?;
        self.let_writes_end(|| Ok(self.stat(path)?.ino));
        self.with_room(|| {
            self.at_path(AT_FDCWD, path, true, 0, |node| match node.kind() {
                Kind::File => self.set_size(&self.cred, node, size),
                Kind::Directory => Err(Error::new(libc::EISDIR, "files::truncate")),
                _ => Err(Error::new(libc::EINVAL, "files::truncate")),
            })
        })
    }

    /// In a uthread, before an operation that would wait for the writes under way in a file with the thread kept.
    pub(super) fn let_writes_end(&self, of: impl FnOnce() -> Result<Ino>) {
        if self.fs.has_writes_under_way()
            && lets_others_run()
            && let Ok(ino) = of()
        {
            self.fs.let_writes_end(ino);
        }
    }

    fn set_size(&self, cred: &Cred, node: &Node, size: u64) -> Result<()> {
        self.fs.setattr_node(cred, node, &SetAttr { size: Some(size), ..SetAttr::default() }).map(|_| ())
    }

    /// Reserves, punches or zeros a range; `mode` holds FALLOC_FL_* bits.
    pub fn fallocate(&self, fd: Fd, mode: i32, offset: i64, len: i64) -> Result<()> {
        self.let_writes_end(|| self.ino(fd));
        self.with_room(|| {
            let file = self.open_file(fd)?;
            let (offset, len) = (unsigned(offset)?, unsigned(len)?);
            if len == 0 {
                return Err(Error::new(libc::EINVAL, "files::fallocate"));
            }
            // What Linux knows but no range of ours can do is refused last.
            if !matches!(mode, libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) {
                check_mode(mode)?;
            }
            if !file.writable() {
                return Err(Error::new(libc::EBADF, "files::fallocate"));
            }
            if offset + len > FILE_BYTES_MAX {
                return Err(Error::new(libc::EFBIG, "files::fallocate"));
            }
            self.fs.fallocate_node(&self.granted, &file.node, mode, offset, len)
        })
    }

    /// The file survives power loss on return, in every domain that can. In a uthread others run meanwhile.
    pub fn fsync(&self, fd: Fd) -> Result<()> {
        self.fs.fsync_and_wait(self.ino(fd)?, false)
    }

    /// As [`fsync`](Files::fsync) without metadata that reading the data does not need.
    pub fn fdatasync(&self, fd: Fd) -> Result<()> {
        self.fs.fsync_and_wait(self.ino(fd)?, true)
    }

    /// The inode of an open file.
    pub fn ino(&self, fd: Fd) -> Result<Ino> {
        Ok(self.open_file(fd)?.node.ino())
    }

    /// As [`fsync`](Files::fsync). EBADF at once.
    pub fn fsync_async(&self, fd: Fd) -> Result<Syncing<M>> {
        Ok(Syncing::new(&self.fs, self.ino(fd)?, false))
    }

    /// As [`fdatasync`](Files::fdatasync). EBADF at once.
    pub fn fdatasync_async(&self, fd: Fd) -> Result<Syncing<M>> {
        Ok(Syncing::new(&self.fs, self.ino(fd)?, true))
    }
}

impl<M: Media> Fs<M> {
    /// As [`Files::sync_written`].
    #[inline]
    pub fn sync_written(self: &Arc<Self>, written: Written) -> Result<usize> {
        if let Some((ino, data_only)) = written.synced {
            self.fsync_and_wait(ino, data_only)?;
        }
        Ok(written.bytes)
    }
}

impl File {
    #[inline]
    fn check_read(&self) -> Result<()> {
        if !self.readable() {
            return Err(Error::new(libc::EBADF, "files::read"));
        }
        match self.node.kind() {
            Kind::Directory => Err(Error::new(libc::EISDIR, "files::read")),
            _ => Ok(()),
        }
    }

    /// Only regular files open for writing.
    #[inline]
    fn check_write(&self) -> Result<()> {
        match self.writable() {
            true => Ok(()),
            false => Err(Error::new(libc::EBADF, "files::write")),
        }
    }
}

#[inline]
fn unsigned(n: i64) -> Result<u64> {
    u64::try_from(n).map_err(|_| Error::new(libc::EINVAL, "files::unsigned"))
}

/// No offset lies behind the last that a signed number holds.
#[inline]
fn check_end(offset: u64, len: usize) -> Result<()> {
    match offset.checked_add(len as u64) {
        Some(0..=END_MAX) => Ok(()),
        _ => Err(Error::new(libc::EINVAL, "files::check_end")),
    }
}

const END_MAX: u64 = i64::MAX as u64;
