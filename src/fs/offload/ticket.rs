//! Tickets of writes and reads, which have the bytes that are written, or those that were read.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Lent, LentRoom, ReadStep, ReadUnderWay, Step, WriteStep, WriteUnderWay};
use crate::error::Result;
use crate::fs::Fs;
use crate::media::Media;

/// A write that goes on while its caller does something else, with its bytes. Dropped it waits, and nobody hears how
/// it ended but the next fsync of the file.
pub struct WriteTicket<M: Media> {
    fs: Arc<Fs<M>>,
    /// None where it was done at once.
    write: Option<Arc<WriteUnderWay>>,
    /// Lent to the copy.
    bytes: NonNull<[u8]>,
    written: usize,
}

// SAFETY: the bytes are the ticket's own, used by an engine alone until it has ended.
unsafe impl<M: Media> Send for WriteTicket<M> {}
// SAFETY: a shared ticket gives nobody the bytes.
unsafe impl<M: Media> Sync for WriteTicket<M> {}

impl<M: Media> WriteTicket<M> {
    /// Begins a write; waits only for what is in its way. Errors are those of `begin`.
    pub(in crate::fs) fn begin(
        fs: &Arc<Fs<M>>,
        bytes: Box<[u8]>,
        begin: &mut dyn FnMut(Lent) -> WriteStep<usize>,
    ) -> Result<WriteTicket<M>> {
        let bytes = NonNull::from(Box::leak(bytes));
        let mut ticket = WriteTicket { fs: fs.clone(), write: None, bytes, written: 0 };
        loop {
            // SAFETY: just leaked; freed by the ticket's end, which waits for the copy.
            match begin(unsafe { Lent::new(bytes.as_ref()) })? {
                Step::Blocked(write) => fs.wait_until_over(&write),
                Step::Done(written) => {
                    ticket.written = written;
                    return Ok(ticket);
                }
                Step::UnderWay(written, write) => {
                    (ticket.written, ticket.write) = (written, Some(write));
                    return Ok(ticket);
                }
            }
        }
    }

    /// Whether it is done: then waiting returns at once.
    pub fn poll(&self) -> bool {
        let Some(write) = &self.write else { return true };
        self.fs.poll_lane(write.ticket.lane as usize);
        write.is_over()
    }

    /// Waits until it is done; the bytes written, durable as far as the domain goes. EIO where media is bad: the file
    /// is then what it was before. Again and again, and on any thread: the answer stays.
    pub fn wait(&self) -> Result<usize> {
        if let Some(write) = &self.write {
            self.fs.wait_for_write(write)?;
        }
        Ok(self.written)
    }

    /// Waits, and gives the bytes back.
    pub fn into_bytes(self) -> (Box<[u8]>, Result<usize>) {
        let waited = self.wait();
        let ticket = std::mem::ManuallyDrop::new(self);
        // SAFETY: leaked by `begin`, and of no use to the copy any more; the ticket is forgotten, all but what is
        // taken out of it here, once.
        let (bytes, _fs, _write) = unsafe {
            (Box::from_raw(ticket.bytes.as_ptr()), std::ptr::read(&ticket.fs), std::ptr::read(&ticket.write))
        };
        (bytes, waited)
    }
}

impl<M: Media> Drop for WriteTicket<M> {
    fn drop(&mut self) {
        if let Some(write) = &self.write {
            self.fs.wait_until_over(write);
        }
        // SAFETY: as in `into_bytes`.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

/// A read that goes on while its caller does something else, into bytes of the ticket's. It has what there was when it began,
/// whatever is written, cut off or removed meanwhile. Dropped it waits.
pub struct ReadTicket<M: Media> {
    fs: Arc<Fs<M>>,
    /// None where it was done at once.
    read: Option<Arc<ReadUnderWay>>,
    /// Lent to the copy.
    bytes: NonNull<[u8]>,
    count: usize,
}

// SAFETY: the bytes are the ticket's own, used by an engine alone until it has ended.
unsafe impl<M: Media> Send for ReadTicket<M> {}
// SAFETY: a shared ticket gives nobody the bytes.
unsafe impl<M: Media> Sync for ReadTicket<M> {}

impl<M: Media> ReadTicket<M> {
    /// Begins a read; waits only for writes in its way. Errors are those of `begin`.
    pub(in crate::fs) fn begin(
        fs: &Arc<Fs<M>>,
        bytes: Box<[u8]>,
        begin: &mut dyn FnMut(LentRoom) -> ReadStep<usize>,
    ) -> Result<ReadTicket<M>> {
        let bytes = NonNull::from(Box::leak(bytes));
        let mut ticket = ReadTicket { fs: fs.clone(), read: None, bytes, count: 0 };
        loop {
            // SAFETY: just leaked, and nobody's until the copy has ended; freed by the ticket's end, which waits for it.
            match begin(unsafe { LentRoom::new(&mut *bytes.as_ptr()) })? {
                Step::Blocked(write) => fs.wait_until_over(&write),
                Step::Done(count) => {
                    ticket.count = count;
                    return Ok(ticket);
                }
                Step::UnderWay(count, read) => {
                    (ticket.count, ticket.read) = (count, Some(read));
                    return Ok(ticket);
                }
            }
        }
    }

    /// Whether it is done: then waiting returns at once.
    pub fn poll(&self) -> bool {
        self.read.as_ref().is_none_or(|read| self.fs.read_has_ended(read))
    }

    /// Waits, and gives the bytes back, and how many of them were read; fewer than there are at the end of file. EIO for bad media.
    pub fn into_bytes(mut self) -> (Box<[u8]>, Result<usize>) {
        let waited = self.read.take().map_or(Ok(()), |read| self.fs.wait_for_read(&read));
        let bytes = std::mem::replace(&mut self.bytes, NonNull::from(&mut []));
        // SAFETY: leaked by `begin`, and of no use to the copy any more; in their place stands what is no allocation.
        (unsafe { Box::from_raw(bytes.as_ptr()) }, waited.map(|()| self.count))
    }
}

impl<M: Media> Drop for ReadTicket<M> {
    fn drop(&mut self) {
        if let Some(read) = &self.read {
            // Nobody asks how it ended.
            let _ = self.fs.wait_for_read(read);
        }
        // SAFETY: as in `into_bytes`, whose empty slice frees nothing.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}
