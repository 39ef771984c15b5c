//! Reads and writes of a class of their own: what is wanted of the copies of one call, whatever is of the file's and the pool's.
//!
//! ```
//! # use lodestone::fs::files::{Fd, Files};
//! # use lodestone::media::Pool;
//! # use lodestone::mover::class::{Class, Owner};
//! fn save(files: &Files<Pool>, log: Fd, backup: Fd, bytes: &[u8]) -> lodestone::Result<()> {
//!     files.classed(Class::Latency).write(log, bytes)?;
//!     files.classed(Class::Bandwidth(Owner::process())).pwrite(backup, bytes, 0)?;
//!     Ok(())
//! }
//! ```

use super::{Fd, Files, OpenFile};
use crate::error::Result;
use crate::fs::{ReadTicket, WriteTicket};
use crate::media::Media;
use crate::mover::class::Class;

/// A pool's files, to be read and written with a class for each call.
pub struct Classed<'a, M: Media> {
    files: &'a Files<M>,
    class: Class,
}

impl<M: Media> Clone for Classed<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Media> Copy for Classed<'_, M> {}

impl<M: Media> Files<M> {
    /// For calls of this class.
    pub fn classed(&self, class: Class) -> Classed<'_, M> {
        Classed { files: self, class }
    }
}

impl<'a, M: Media> Classed<'a, M> {
    pub(in crate::fs) fn files(self) -> &'a Files<M> {
        self.files
    }

    pub(in crate::fs) fn of(self, fd: Fd) -> OpenFile<M> {
        OpenFile::of_class(fd, Some(self.class))
    }

    /// As [`Files::read`].
    pub fn read(self, fd: Fd, dst: &mut [u8]) -> Result<usize> {
        self.files.read_of(self.of(fd), dst)
    }

    /// As [`Files::pread`].
    pub fn pread(self, fd: Fd, dst: &mut [u8], offset: i64) -> Result<usize> {
        self.files.pread_of(self.of(fd), dst, offset)
    }

    /// As [`Files::write`].
    pub fn write(self, fd: Fd, src: &[u8]) -> Result<usize> {
        self.files.write_of(self.of(fd), src)
    }

    /// As [`Files::pwrite`].
    pub fn pwrite(self, fd: Fd, src: &[u8], offset: i64) -> Result<usize> {
        self.files.pwrite_of(self.of(fd), src, offset)
    }

    /// As [`Files::submit_pread`].
    pub fn submit_pread(self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Result<ReadTicket<M>> {
        self.files.submit_pread_of(self.of(fd), bytes, offset)
    }

    /// As [`Files::submit_pwrite`].
    pub fn submit_pwrite(self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Result<WriteTicket<M>> {
        self.files.submit_pwrite_of(self.of(fd), bytes, offset)
    }
}
