//! Real work queues behind [`Portal`]: each queue of an Intel DSA that this process may use is a channel.
//!
//! A queue is opened once in a process, whatever the number of pools: a dedicated one serves one open file at a time. Its
//! descriptors go through the page that the driver maps (`engine_dsa_page`), or, where mapping is refused (to those
//! without CAP_SYS_RAWIO, on the devices of Intel's advisory SA-01084) or the processor lacks the instruction, through
//! write(2), which drivers of kernels since 2024 take.
//!
//! **Invariants.**
//! 1. A dedicated queue drops without a word what is too much. So no more descriptors are under way in it than it
//!    holds, over all pools, from before they are stored up to when somebody has seen their end.
//! 2. The device writes for a process while the process has the queue open: closing waits in the kernel for what is under
//!    way. So a queue that stays silent is closed, under a lock that excludes submissions, and what has no status by
//!    then never gets one. That holds as long as no other process has the same open file: it is not passed on at exec,
//!    and a child that was forked with it may submit nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::dsa::Descriptor;
use super::dsa_sysfs::{self, Found, Places, Why};
use super::engine_dsa::{Offer, Portal, Taken};
use super::engine_dsa_page::{Instruction, Page};
use super::engine_port::Refused;

use crate::quote::Shown;

/// A queue that has something to do and says nothing for so long is given up. A copy is at most 32 MiB, so not even a
/// device that many share takes so long.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Times that write(2) is asked again when it answers EAGAIN: the kernel has then asked the device several times.
const WRITE_TRIES_MAX: u32 = 4;

pub struct DsaPortal {
    channels: Box<[Channel]>,
}

/// A queue, as one engine uses it.
struct Channel {
    queue: Arc<Queue>,
    rests: Mutex<bool>,
    resumed: Condvar,
}

/// A queue, as this process has it.
struct Queue {
    facts: dsa_sysfs::Queue,
    silence_max: Duration,
    /// None when it was given up.
    open: RwLock<Option<Open>>,
    given_up: AtomicBool,
    /// Of a dedicated queue (invariant 1).
    under_way: AtomicUsize,
    /// Why it takes nothing any more.
    gone: Mutex<Option<String>>,
}

struct Open {
    /// Where descriptors are stored; or why they are written to the file. Before the file: closing one that is
    /// mapped closes nothing.
    page: Result<Page, String>,
    file: OwnedFd,
    /// Who opened it: the device follows that process's addresses alone.
    process: u32,
}

/// Queues that are open in this process, by file; those that are being closed are still listed.
static OPEN: Mutex<Vec<(PathBuf, Weak<Queue>)>> = Mutex::new(Vec::new());
static CLOSED: Condvar = Condvar::new();

impl DsaPortal {
    /// All queues that can be used; or why there is none, in words that say what to do.
    pub fn open(places: &Places) -> Result<DsaPortal, String> {
        DsaPortal::open_found(&dsa_sysfs::find(places), SILENCE_MAX)
    }

    /// As [`open`](DsaPortal::open), with another bound on silence.
    pub fn open_found(found: &Found, silence_max: Duration) -> Result<DsaPortal, String> {
        if let Some(missing) = found.missing() {
            return Err(missing);
        }
        let mut reasons = Vec::new();
        let mut channels = Vec::new();
        for facts in &found.usable {
            match Queue::shared(facts, silence_max) {
                Ok(queue) => {
                    channels.push(Channel { queue, rests: Mutex::new(false), resumed: Condvar::new() })
                }
                Err(reason) => reasons.push(format!("{}: {reason}", facts.name)),
            }
        }
        let reasons = reasons.join("; ");
        match channels.is_empty() {
            true => Err(reasons),
            false => {
                if !reasons.is_empty() {
                    tracing::info!("engine dsa goes on without {reasons}");
                }
                Ok(DsaPortal { channels: channels.into() })
            }
        }
    }
}

impl Queue {
    /// The queue as this process has it, opened if it is not.
    fn shared(facts: &dsa_sysfs::Queue, silence_max: Duration) -> Result<Arc<Queue>, String> {
        let mut open = OPEN.lock();
        let listed = |open: &Vec<(PathBuf, Weak<Queue>)>| {
            open.iter().find(|(file, _)| *file == facts.file).map(|(_, queue)| queue.upgrade())
        };
        while let Some(queue) = listed(&open) {
            match queue {
                Some(queue) => return Ok(queue),
                None => CLOSED.wait(&mut open),
            }
        }
        let queue = Arc::new(Queue {
            facts: facts.clone(),
            silence_max,
            open: RwLock::new(Some(Open::new(facts)?)),
            given_up: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            gone: Mutex::new(None),
        });
        open.push((facts.file.clone(), Arc::downgrade(&queue)));
        Ok(queue)
    }

    /// Places for so many descriptors, or for fewer.
    fn enter(&self, wanted: usize) -> usize {
        if self.facts.shared {
            return wanted;
        }
        let room = |under_way: usize| wanted.min(self.facts.size.saturating_sub(under_way));
        let entered =
            self.under_way.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n + room(n)));
        room(entered.expect("there is always a next value"))
    }

    fn leave(&self, descriptors: usize) {
        if !self.facts.shared {
            self.under_way.fetch_sub(descriptors, Ordering::Relaxed);
        }
    }

    /// # Safety
    ///
    /// As for [`Portal::submit`].
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Taken {
        let room = self.enter(descriptors.len());
        let taken = match &*self.open.read() {
            Some(open) if open.process == std::process::id() => {
                // SAFETY: the caller's; `enter` found the room.
                unsafe { open.submit(&descriptors[..room]) }
            }
            Some(_) => Err((0, Some("it was opened before fork(), by another process".to_owned()))),
            None => Err((0, None)),
        };
        let (count, rest) = match taken {
            Ok(count) => (count, Refused::Full),
            Err((count, why)) => {
                if let Some(why) = why {
                    self.is_gone(why);
                }
                (count, Refused::Gone)
            }
        };
        self.leave(room - count);
        Taken { count, rest: (count < descriptors.len()).then_some(rest) }
    }

    fn is_gone(&self, why: String) {
        let mut gone = self.gone.lock();
        if gone.is_none() {
            tracing::info!("engine dsa: {} takes nothing any more: {why}", self.facts.file.shown());
            *gone = Some(why);
        }
    }

    fn give_up(&self, since: Instant) -> bool {
        if self.given_up.load(Ordering::Acquire) {
            return true;
        }
        if since.elapsed() < self.silence_max {
            return false;
        }
        let mut open = self.open.write();
        if let Some(closing) = open.take() {
            // Waits in the kernel until nothing is under way (invariant 2).
            drop(closing);
            self.is_gone(format!("it said nothing for {:?}, so it was closed", self.silence_max));
            self.given_up.store(true, Ordering::Release);
        }
        true
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        drop(self.open.get_mut().take());
        OPEN.lock().retain(|(file, _)| *file != self.facts.file);
        CLOSED.notify_all();
    }
}

impl Open {
    fn new(facts: &dsa_sysfs::Queue) -> Result<Open, String> {
        // A queue is asked, and never waited for.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(&facts.file, flags, Mode::empty());
        let file = file.map_err(|e| refusal(facts, e))?;
        let page = match Instruction::of_queue(facts.shared) {
            Ok(instruction) => {
                Page::map(file.as_fd(), instruction).map_err(|e| format!("mapping it is refused: {e}"))
            }
            Err(lacking) => Err(format!("this processor has no {lacking}")),
        };
        Ok(Open { page, file, process: std::process::id() })
    }

    /// How many were taken; those that were not are too many now, or, with a reason, for ever.
    ///
    /// # Safety
    ///
    /// As for [`Portal::submit`]; a dedicated queue has room for them.
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Result<usize, (usize, Option<String>)> {
        match &self.page {
            // SAFETY: the caller's.
            Ok(page) => Ok(unsafe { page.submit(descriptors) }),
            Err(unmapped) => {
                // SAFETY: the caller's.
                let written = unsafe { self.write(descriptors) };
                written.map_err(|(count, e)| (count, Some(format!("{unmapped}, and writing to it: {e}"))))
            }
        }
    }

    /// By system calls. The kernel takes whole descriptors, in order, and says how many.
    ///
    /// # Safety
    ///
    /// As for [`submit`](Open::submit).
    unsafe fn write(&self, descriptors: &[Descriptor]) -> Result<usize, (usize, Errno)> {
        const EACH: usize = size_of::<Descriptor>();
        let (mut count, mut tries) = (0, 0);
        while count < descriptors.len() {
            let rest = &descriptors[count..];
            // SAFETY: descriptors are bytes without gaps.
            let bytes = unsafe { std::slice::from_raw_parts(rest.as_ptr().cast(), size_of_val(rest)) };
            match rustix::io::write(&self.file, bytes) {
                Ok(bytes) if bytes > 0 && bytes.is_multiple_of(EACH) => count += bytes / EACH,
                Ok(bytes) => return Err((count + bytes / EACH, Errno::IO)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if tries < WRITE_TRIES_MAX => {
                    tries += 1;
                    std::thread::yield_now();
                }
                Err(Errno::AGAIN) => break,
                Err(e) => return Err((count, e)),
            }
        }
        Ok(count)
    }
}

/// Why a queue is not opened.
fn refusal(facts: &dsa_sysfs::Queue, e: Errno) -> String {
    let file = facts.file.shown();
    match e {
        Errno::ACCESS | Errno::PERM => {
            let why = Why::Denied(facts.file.clone());
            format!("{why} ({})", why.remedy())
        }
        Errno::BUSY => format!(
            "{file} is in use: a dedicated queue serves one process at a time (accel-config config-wq --mode=shared)"
        ),
        e => format!("{file} cannot be opened: {e}"),
    }
}

impl Portal for DsaPortal {
    fn channels(&self) -> usize {
        self.channels.len()
    }

    fn offer(&self, channel: usize) -> Offer {
        self.channels[channel].queue.facts.offer
    }

    fn node(&self, channel: usize) -> Option<u32> {
        self.channels[channel].queue.facts.node
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(&self, channel: usize, descriptors: &[Descriptor]) -> Taken {
        let Channel { queue, rests, resumed } = &self.channels[channel];
        let mut resting = rests.lock();
        while *resting {
            resumed.wait(&mut resting);
        }
        drop(resting);
        // SAFETY: the caller's.
        unsafe { queue.submit(descriptors) }
    }

    fn why_gone(&self) -> String {
        let why = |channel: &Channel| {
            let gone = channel.queue.gone.lock().clone();
            gone.map(|gone| format!("{}: {gone}", channel.queue.facts.file.shown()))
        };
        self.channels.iter().filter_map(why).collect::<Vec<_>>().join("; ")
    }

    fn ended(&self, channel: usize, descriptors: usize) {
        self.channels[channel].queue.leave(descriptors);
    }

    fn give_up(&self, channel: usize, since: Instant) -> bool {
        self.channels[channel].queue.give_up(since)
    }

    /// A queue of users cannot rest in the middle: what is under way ends, and what comes waits.
    fn suspend(&self, channel: usize) {
        *self.channels[channel].rests.lock() = true;
    }

    fn resume(&self, channel: usize) {
        let Channel { rests, resumed, .. } = &self.channels[channel];
        *rests.lock() = false;
        resumed.notify_all();
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

    use super::*;

    const EACH: usize = size_of::<Descriptor>();

    /// A queue that takes what a pipe does: whole pages of more than one, and nothing when it is full.
    fn opened() -> (Open, OwnedFd) {
        let (reader, file) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        fcntl_setpipe_size(&file, 4096).unwrap();
        let page = Err("it is a pipe".to_owned());
        (Open { page, file, process: std::process::id() }, reader)
    }

    fn numbered(count: u32) -> Vec<Descriptor> {
        (0..count).map(|n| Descriptor::copy(1, 2, n, 0)).collect()
    }

    #[test]
    fn a_write_that_is_cut_short_goes_on_where_it_was_cut() {
        let (open, reader) = opened();
        let list = numbered(200);
        // SAFETY: nobody follows what is written to a pipe.
        let count = unsafe { open.submit(&list) }.unwrap();
        assert_eq!(count, 4096 / EACH, "as many as a page holds, and then EAGAIN");
        let mut bytes = vec![0; 4096];
        assert_eq!(rustix::io::read(&reader, &mut bytes).unwrap(), 4096);
        let sizes = bytes.chunks(EACH).map(|d| u32::from_le_bytes(d[32..36].try_into().unwrap()));
        assert!(sizes.eq(0..count as u32), "each came once, in order");
        let rest = &list[count..];
        // SAFETY: as above.
        assert_eq!(unsafe { open.submit(rest) }.unwrap(), count, "and the next ones when there is room");
    }

    #[test]
    fn a_write_that_fails_says_why() {
        let (open, reader) = opened();
        drop(reader);
        // SAFETY: nobody follows what is written to a pipe.
        let (count, why) = unsafe { open.submit(&numbered(3)) }.unwrap_err();
        assert_eq!(count, 0);
        assert!(why.unwrap().starts_with("it is a pipe, and writing to it: "));
    }

    #[test]
    fn what_keeps_a_queue_closed_says_what_to_do() {
        let facts = dsa_sysfs::Queue {
            name: "wq0.0".to_owned(),
            file: "/dev/dsa/wq0.0".into(),
            shared: false,
            size: 8,
            node: None,
            offer: Offer::ALL,
        };
        assert_eq!(
            refusal(&facts, Errno::ACCESS),
            "/dev/dsa/wq0.0 is not permitted to this user (chgrp a group of this user and chmod g+rw /dev/dsa/wq0.0)"
        );
        assert!(refusal(&facts, Errno::BUSY).contains("in use: a dedicated queue serves one process"));
        assert!(refusal(&facts, Errno::NXIO).starts_with("/dev/dsa/wq0.0 cannot be opened: "));
    }
}
