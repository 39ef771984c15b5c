//! Tickets of writes and reads, which have the bytes that are written, or those that were read.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Lent, LentRoom, ReadStep, ReadUnderWay, Step, Tries, WriteStep, WriteUnderWay};
use crate::error::Result;
use crate::fs::Fs;
use crate::media::Media;

/// Bytes of a ticket, which its copy uses by address. The ticket frees them once that has ended, and never where waiting for it
/// panicked.
struct Bytes(NonNull<[u8]>);

// SAFETY: as a box of bytes.
unsafe impl Send for Bytes {}
// SAFETY: what is shared gives nobody the bytes.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new(bytes: Box<[u8]>) -> Bytes {
        Bytes(NonNull::from(Box::leak(bytes)))
    }

    fn into_box(self) -> Box<[u8]> {
        // SAFETY: leaked by `new`, and taken back once.
        unsafe { Box::from_raw(self.0.as_ptr()) }
    }
}

/// A write that goes on while its caller does something else, with its bytes. Dropped it waits, and nobody hears how
/// it ended but the next fsync of the file.
pub struct WriteTicket<M: Media> {
    fs: Arc<Fs<M>>,
    /// None where it was done at once.
    write: Option<Arc<WriteUnderWay>>,
    /// Lent to the copy; none once they were given back.
    bytes: Option<Bytes>,
    written: usize,
}

impl<M: Media> WriteTicket<M> {
    /// Begins a write; waits only for what is in its way, and for room. Errors are those of `begin`.
    pub(in crate::fs) fn begin(
        fs: &Arc<Fs<M>>,
        bytes: Box<[u8]>,
        begin: &mut dyn FnMut(Lent) -> WriteStep<usize>,
    ) -> Result<WriteTicket<M>> {
        let bytes = Bytes::new(bytes);
        let address = bytes.0;
        let mut ticket = WriteTicket { fs: fs.clone(), write: None, bytes: Some(bytes), written: 0 };
        let mut tries = Tries::new();
        loop {
            // SAFETY: the ticket's, which lets them go after the copy.
            let Some(step) = tries.attempt(|| begin(unsafe { Lent::new(address.as_ref()) })) else {
                fs.wait_for_room();
                continue;
            };
            match step? {
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

    /// Whether parts of it are held back: whoever looks lets them in.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn is_held_back(&self) -> bool {
        self.write.as_ref().is_some_and(|write| write.copy.held_back().is_some())
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
    pub fn into_bytes(mut self) -> (Box<[u8]>, Result<usize>) {
        let waited = self.wait();
        (self.bytes.take().expect("they are given back once").into_box(), waited)
    }
}

impl<M: Media> Drop for WriteTicket<M> {
    fn drop(&mut self) {
        if let Some(write) = &self.write {
            self.fs.wait_until_over(write);
        }
        drop(self.bytes.take().map(Bytes::into_box));
    }
}

/// A read that goes on while its caller does something else, into bytes of the ticket's. It has what there was when it began,
/// whatever is written, cut off or removed meanwhile. Dropped it waits.
pub struct ReadTicket<M: Media> {
    fs: Arc<Fs<M>>,
    /// None where it was done at once, or has been waited for.
    read: Option<Arc<ReadUnderWay>>,
    /// Lent to the copy; none once they were given back.
    bytes: Option<Bytes>,
    count: usize,
}

impl<M: Media> ReadTicket<M> {
    /// Begins a read; waits only for writes in its way. Errors are those of `begin`.
    pub(in crate::fs) fn begin(
        fs: &Arc<Fs<M>>,
        bytes: Box<[u8]>,
        begin: &mut dyn FnMut(LentRoom) -> ReadStep<usize>,
    ) -> Result<ReadTicket<M>> {
        let bytes = Bytes::new(bytes);
        let address = bytes.0;
        let mut ticket = ReadTicket { fs: fs.clone(), read: None, bytes: Some(bytes), count: 0 };
        loop {
            // SAFETY: the ticket's, which nobody else uses before it gives them back, after the copy.
            match begin(unsafe { LentRoom::new(&mut *address.as_ptr()) })? {
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

    /// Waits, and gives the bytes back, and how many of them were read; fewer than there are at the end of file. EIO for
    /// bad media.
    pub fn into_bytes(mut self) -> (Box<[u8]>, Result<usize>) {
        let waited = self.read.as_ref().map_or(Ok(()), |read| self.fs.wait_for_read(read));
        // Not before: where waiting panics, the drop waits again, with the bytes still there.
        self.read = None;
        let bytes = self.bytes.take().expect("they are given back once").into_box();
        (bytes, waited.map(|()| self.count))
    }
}

impl<M: Media> Drop for ReadTicket<M> {
    fn drop(&mut self) {
        if let Some(read) = &self.read {
            // Nobody asks how it ended.
            let _ = self.fs.wait_for_read(read);
        }
        drop(self.bytes.take().map(Bytes::into_box));
    }
}
