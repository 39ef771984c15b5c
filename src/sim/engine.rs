//! A device that copies, as far as power failures see it: what it stores is its own, no fence of a CPU completes it.
//!
//! *Past the caches*: all it copies is in doubt until it reports completion, and durable from then on. *Into the
//! caches*: what it copied is cached, and in doubt until a CPU has written it back and fenced (DDIO; Fastmove §5.2).
//! Which of them it does is told copy by copy.
//!
//! A copy ends while it is handed over: no operation goes on beside its copies.

use std::cell::Cell;

use super::media::SimMedia;
use super::with_flag;
use crate::media::{Flushed, LINE, Media, crc32c};
use crate::mover::completion::{Completion, Status};
use crate::mover::engine_port::{
    Capability, Dram, Durability, Engine, RawTransfer, Refused, Route, Routes, Ticket,
};
use crate::mover::profile::{Limits, SMALLEST_BYTES, Thresholds};

thread_local! {
    static DEVICE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the device stores now, and not the thread.
pub(super) fn is_device() -> bool {
    DEVICE.get()
}

fn as_device<T>(does: impl FnOnce() -> T) -> T {
    with_flag(&DEVICE, does)
}

/// See the file's head.
pub struct SimEngine(pub Routes);

impl SimEngine {
    /// It takes whatever may be handed over.
    pub fn limits() -> Limits {
        let all = Thresholds {
            local_write: SMALLEST_BYTES,
            local_read: SMALLEST_BYTES,
            remote_write: SMALLEST_BYTES,
            remote_read: SMALLEST_BYTES,
        };
        Limits { thresholds: all, in_flight_max: None }
    }
}

impl Engine<SimMedia> for SimEngine {
    fn capability(&self) -> Capability {
        Capability {
            smallest_bytes: SMALLEST_BYTES,
            largest_bytes: usize::MAX,
            // Any: the edges are the CPU's otherwise, and they are what is easily forgotten.
            alignment: if self.0.past_caches { LINE } else { 1 },
            routes: self.0,
            shares_reads: true,
            channels: 1,
        }
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &SimMedia,
        _region: usize,
        _channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let (mut bytes, mut crc, mut durability) = (0, crc.unwrap_or(0), Durability::OnCompletion);
        let mut copied = || {
            for transfer in batch {
                match transfer.dram {
                    Dram::From(from, route) => {
                        // SAFETY: the caller vouches for the bytes.
                        let from = unsafe { std::slice::from_raw_parts(from, transfer.len) };
                        match route {
                            Route::PastCaches => drop(media.copy_nt(transfer.at, from).ok()?),
                            Route::IntoCaches => {
                                durability = Durability::WriteBack;
                                let dirty = media.copy_cached(transfer.at, from).ok()?;
                                dirty.redundant("it is the mover's to write back");
                            }
                        }
                        crc = crc32c(from, crc);
                    }
                    Dram::To(to) => {
                        // SAFETY: the caller vouches for the bytes, and that nobody else uses them.
                        let to = unsafe { std::slice::from_raw_parts_mut(to, transfer.len) };
                        media.read(transfer.at, to).ok()?;
                    }
                }
                bytes += transfer.len as u64;
            }
            Some(())
        };
        let whole = as_device(&mut copied);
        if durability == Durability::OnCompletion {
            as_device(|| media.fence(Flushed::issued()));
        }
        let status = match whole {
            Some(()) => Status::Done,
            None if bytes > 0 => Status::Partial,
            None => Status::Failed,
        };
        Ok(Ticket::ended(Completion { status, bytes, crc, durability, nanoseconds: 1000 }))
    }

    fn poll(&self, _: &Ticket) -> bool {
        true
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        ticket.completion().expect("submit copied")
    }

    fn suspend(&self, _: usize) {}

    fn resume(&self, _: usize) {}
}
