//! Tickets of writes, which have the bytes that are written.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Lent, Step, WriteStep, WriteUnderWay};
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
