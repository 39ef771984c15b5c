//! A device that copies, as far as power failures see it: what it stores is its own, no fence of a CPU completes it.
//!
//! *Past the caches*: all it copies is in doubt until it reports completion, and durable from then on. *Into the
//! caches*: what it copied is cached, and in doubt until a CPU has written it back and fenced (DDIO; Fastmove §5.2).
//! Which of them it does is told copy by copy.
//!
//! A *prompt* device ends a copy while it is handed over: then no operation goes on beside its copies. A *late* one ends
//! it when it is looked at, which is by who waits, and not earlier; of every second batch half is stored only then. What it
//! reads it reads then, too. It has two channels, so that copies of two lanes are under way at a time.
//!
//! *Striped* media are two regions, block by block, so that a copy of several blocks is two batches. Of every second two
//! that follow each other the later one ends first, whoever's it is.
//!
//! *In pieces*: what it copies is of class bandwidth, a page at a time, and the channel manager holds the rest back until somebody looks
//! for it, after the record was committed, too. Its time goes on by looks.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::ptr::NonNull;

use parking_lot::Mutex;

use super::media::SimMedia;
use crate::media::{Flushed, LINE, Media, crc32c};
use crate::mover::completion::{Completion, Status};
use crate::mover::engine_port::{
    Capability, Dram, Durability, Engine, RawTransfer, Refused, Route, Routes, Ticket,
};
use crate::mover::manager::{EPOCH_NS, Qos};
use crate::mover::profile::{Limits, SMALLEST_BYTES, Thresholds};
use crate::sync::primitive::thread_local;

thread_local! {
    /// The copy that a device stores for; 0: the thread stores. Of each thread that a model checker runs, too: it switches in
    /// the middle of a copy.
    static JOB: Cell<u64> = const { Cell::new(0) };
}

/// The copy that a device stores for now, and not the thread.
pub(super) fn job() -> Option<u64> {
    NonZero::new(JOB.with(Cell::get)).map(NonZero::get)
}

fn as_device<T>(job: u64, does: impl FnOnce() -> T) -> T {
    struct Unset;

    impl Drop for Unset {
        fn drop(&mut self) {
            JOB.with(|of| of.set(0));
        }
    }

    JOB.with(|of| of.set(job));
    let _unset = Unset;
    does()
}

/// How far into a line these bytes begin: what a device's alignment is about.
pub(super) fn lies(bytes: &[u8]) -> usize {
    bytes.as_ptr().addr() % LINE
}

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub routes: Routes,
    pub late: bool,
    pub striped: bool,
    pub in_pieces: bool,
}

/// Looks at a late copy that may find it under way. Only under a model checker there are others who go on meanwhile.
const LOOKS: Option<u32> = if cfg!(shuttle) { Some(6) } else { None };

#[cfg(shuttle)]
fn by_chance() -> bool {
    use shuttle::rand::Rng;
    shuttle::rand::thread_rng().gen_range(0..3u32) == 0
}

#[cfg(not(shuttle))]
fn by_chance() -> bool {
    false
}

/// See the file's head.
pub struct SimEngine {
    device: Device,
    jobs: Mutex<Jobs>,
}

#[derive(Default)]
struct Jobs {
    last: u64,
    /// Of a late device.
    under_way: BTreeMap<u64, Job>,
    /// Before anybody waited for them.
    ended: BTreeMap<u64, Completion>,
}

/// A batch.
struct Job {
    number: u64,
    media: NonNull<SimMedia>,
    batch: Vec<RawTransfer>,
    /// Of each of these, from which byte on it is copied at the end.
    from: Vec<usize>,
    bytes: u64,
    crc: u32,
    durability: Durability,
    fails: bool,
    /// How often somebody asked whether it has ended.
    looks: u32,
}

// SAFETY: what it points to is there, and may be used from any thread, until it has ended: `Engine::submit`'s promise.
unsafe impl Send for Job {}

impl Job {
    /// Copies what of each transfer is to be copied now, or at the end.
    fn copy(&mut self, at_end: bool) {
        // SAFETY: the caller of `submit` vouches that media lives until the batch has ended.
        let media = unsafe { self.media.as_ref() };
        for (transfer, split) in self.batch.clone().into_iter().zip(self.from.clone()) {
            if self.fails {
                return;
            }
            let (from, len) = if at_end { (split, transfer.len - split) } else { (0, split) };
            if len == 0 {
                continue;
            }
            let at = transfer.at.add(from as u64);
            let done = match transfer.dram {
                Dram::From(bytes, route) => {
                    // SAFETY: the caller vouches for the bytes; the part lies in them.
                    let bytes = unsafe { std::slice::from_raw_parts(bytes.add(from), len) };
                    self.crc = crc32c(bytes, self.crc);
                    match route {
                        Route::PastCaches => media.copy_nt(at, bytes).map(drop),
                        Route::IntoCaches => {
                            self.durability = Durability::WriteBack;
                            media
                                .copy_cached(at, bytes)
                                .map(|dirty| dirty.redundant("it is the mover's to write back"))
                        }
                    }
                }
                Dram::To(bytes) => {
                    // SAFETY: the caller vouches for the bytes, and that nobody else uses them; the part lies in them.
                    media.read(at, unsafe { std::slice::from_raw_parts_mut(bytes.add(from), len) })
                }
            };
            self.fails = done.is_err();
            self.bytes += if self.fails { 0 } else { len as u64 };
        }
    }

    /// From now on what it stored past the caches is durable.
    fn end(mut self) -> Completion {
        // What it reports is a number of bytes from the beginning.
        if self.fails && self.batch.len() > 1 {
            self.bytes = 0;
        }
        if self.durability == Durability::OnCompletion {
            // SAFETY: as in `copy`.
            let media = unsafe { self.media.as_ref() };
            as_device(self.number, || media.fence(Flushed::issued()));
        }
        let status = match self.fails {
            false => Status::Done,
            true if self.bytes > 0 => Status::Partial,
            true => Status::Failed,
        };
        let Job { bytes, crc, durability, .. } = self;
        Completion { status, bytes, crc, durability, nanoseconds: 1000 }
    }
}

impl SimEngine {
    pub fn new(device: Device) -> SimEngine {
        SimEngine { device, jobs: Mutex::default() }
    }

    /// For a device that copies in pieces: one in an epoch, which is over after a few looks.
    pub fn qos() -> Qos {
        let piece_bytes = 4096;
        let bytes = piece_bytes as u64;
        let by_looks_ns = Some(EPOCH_NS / 4);
        Qos {
            floor_bytes: bytes,
            top_bytes: bytes,
            step_bytes: bytes,
            piece_bytes,
            by_looks_ns,
            ..Qos::default()
        }
    }

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

impl SimEngine {
    /// Ends a batch that somebody will wait for, if it is under way: nobody else does meanwhile.
    fn end_early(&self, number: u64) {
        let mut jobs = self.jobs.lock();
        let Some(mut job) = jobs.under_way.remove(&number) else { return };
        as_device(number, || job.copy(true));
        jobs.ended.insert(number, job.end());
    }
}

impl Engine<SimMedia> for SimEngine {
    fn capability(&self) -> Capability {
        Capability {
            smallest_bytes: SMALLEST_BYTES,
            largest_bytes: usize::MAX,
            // Any: the edges are the CPU's otherwise, and they are what is easily forgotten.
            alignment: if self.device.routes.past_caches { LINE } else { 1 },
            routes: self.device.routes,
            shares_reads: true,
            channels: if self.device.late { 2 } else { 1 },
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
        let mut jobs = self.jobs.lock();
        jobs.last += 1;
        let number = jobs.last;
        drop(jobs);
        // A checksum is of all bytes in their order.
        let is_late = self.device.late && crc.is_none();
        // Of every second batch half is stored at the end: of a single transfer its own half, of several every second one.
        let split = |(n, t): (usize, &RawTransfer)| match t.is_to_media() {
            _ if !is_late => t.len,
            true if number.is_multiple_of(2) && batch.len() == 1 => t.len / 2,
            true if number.is_multiple_of(2) && n % 2 == 0 => 0,
            true => t.len,
            false => 0,
        };
        let mut job = Job {
            number,
            media: NonNull::from(media),
            batch: batch.to_vec(),
            from: batch.iter().enumerate().map(split).collect(),
            bytes: 0,
            crc: crc.unwrap_or(0),
            durability: Durability::OnCompletion,
            fails: false,
            looks: 0,
        };
        as_device(number, || job.copy(false));
        if !is_late {
            return Ok(Ticket::ended(job.end()));
        }
        self.jobs.lock().under_way.insert(number, job);
        Ok(Ticket::in_slot(0, number as usize))
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        // Otherwise whoever looks waits.
        let (Some(looks), Some(number)) = (LOOKS, ticket.slot()) else { return true };
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.under_way.get_mut(&(number as u64)) else { return true };
        // How often it is asked in vain is left to chance.
        job.looks += 1;
        job.looks > looks || by_chance()
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        if let Some(completion) = ticket.completion() {
            return completion;
        }
        let number = ticket.slot().expect("it is in a slot, or has ended") as u64;
        if let Some(completion) = self.jobs.lock().ended.remove(&number) {
            return completion;
        }
        if self.device.striped && (number / 2).is_multiple_of(2) {
            self.end_early(number + 1);
        }
        let mut job = self.jobs.lock().under_way.remove(&number).expect("a batch ends once");
        as_device(number, || job.copy(true));
        job.end()
    }

    fn suspend(&self, _: usize) {}

    fn resume(&self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fs::files::Files;
    use crate::fs::{Cred, Fs, MkfsOptions, Time, clock};
    use crate::media::Domain;
    use crate::sim::machine;
    use crate::sim::media::{Copying, Failing, Keep};
    use crate::sim::source::owned;

    const PAGE: usize = 4096;

    /// Bytes that lie where a line begins: the device takes nothing else.
    fn on_a_line(bytes: &[u8]) -> Box<[u8]> {
        let owned = owned(bytes, 0);
        assert_eq!(lies(&owned), 0, "nothing lies there");
        owned
    }

    /// Which pages of two, full of bytes of their own, are durable at each fence.
    fn durable(files: &Files<SimMedia>, fd: i32, fills: [u8; 2]) -> Vec<[bool; 2]> {
        let seen: Arc<Mutex<Vec<[bool; 2]>>> = Arc::default();
        let own = seen.clone();
        files.fs().media().record(Some(Box::new(move |point| {
            let image = point.image(Keep::Nothing);
            let is_there = |fill| image.chunks(PAGE).any(|page| page.iter().all(|byte| *byte == fill));
            own.lock().push(fills.map(is_there));
        })));
        let bytes = on_a_line(&fills.map(|fill| [fill; PAGE]).concat());
        let before = files.fs().mover().moved().copies;
        assert_eq!(files.submit_pwrite(fd, bytes, 0).unwrap().wait().unwrap(), 2 * PAGE);
        files.fs().media().record(None);
        assert_eq!(files.fs().mover().moved().copies, before + 2, "it is two batches");
        std::mem::take(&mut *seen.lock())
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn of_a_write_in_two_batches_either_ends_first() {
        let options = MkfsOptions { identity: Some(1), ..MkfsOptions::default() };
        let media = Fs::mkfs(SimMedia::new(vec![0; 2 << 20], Domain::Memory), &options).unwrap();
        let device = Device { routes: Routes::PAST_CACHES, late: true, striped: true, in_pieces: false };
        media.copied(Copying { engine: Some(device), ..Copying::default() });
        let files = Files::new(machine::open(media).unwrap(), Cred::root(), 0);
        let fd = files.open(b"f", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        let (mut firsts, mut fills) = ([0; 2], (1..=20).step_by(2));
        for fill in fills.by_ref() {
            let seen = durable(&files, fd, [fill, fill + 1]);
            for (n, first) in firsts.iter_mut().enumerate() {
                *first += usize::from(seen.iter().any(|there| there[n] && !there[1 - n]));
            }
        }
        assert!(firsts.iter().all(|first| *first > 0), "{firsts:?}");
    }

    /// What a write that fails leaves of a file's times, in seconds: content and change, `linked` meanwhile or not.
    fn times_after_a_failed_write(linked: bool) -> (i64, i64) {
        let options = MkfsOptions { identity: Some(1), ..MkfsOptions::default() };
        let media = Fs::mkfs(SimMedia::new(vec![0; 2 << 20], Domain::Memory), &options).unwrap();
        let device = Device { routes: Routes::PAST_CACHES, late: true, striped: false, in_pieces: false };
        media.copied(Copying { engine: Some(device), ..Copying::default() });
        let at = |seconds| clock::set(Some(Time::new(seconds, 0)));
        at(10);
        let files = Files::new(machine::open(media).unwrap(), Cred::root(), 0);
        let fd = files.open(b"f", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.pwrite(fd, &[1; 2 * PAGE], 0).unwrap();
        at(20);
        // The device meets it, and then the processor.
        files.fs().media().fail_access(1, Failing::Twice);
        let ticket = files.submit_pwrite(fd, on_a_line(&[2; PAGE]), 0).unwrap();
        at(30);
        if linked {
            files.link(b"f", b"g").unwrap();
        }
        assert_eq!(ticket.wait().unwrap_err().errno(), libc::EIO);
        clock::set(None);
        let attr = files.fstat(fd).unwrap();
        (attr.mtime.sec, attr.ctime.sec)
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn the_times_of_a_write_that_failed_come_back_but_for_what_was_done_meanwhile() {
        assert_eq!(times_after_a_failed_write(false), (10, 10));
        assert_eq!(times_after_a_failed_write(true), (10, 30));
    }
}
