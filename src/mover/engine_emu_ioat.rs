//! An I/OAT function in software, on a thread of its own: registers that are read and written as a driver does, and rings of
//! descriptors in memory that it reaches through a table of addresses, as behind an IOMMU. It stands in for hardware that
//! nobody here has; what runs on it is **emulated**: it says nothing about a device's speed.
//!
//! Each channel goes through its ring a piece at a time and in turn, so that copies of different channels overtake each
//! other. A channel that is suspended stops in the middle of a descriptor, and begins that descriptor anew when it is
//! resumed (EasyIO §4.4). An address that nobody registered or pinned is an error of the channel, which then halts. (A
//! real IOMMU drops such a store and tells the kernel, not the device.)
//!
//! **Invariants.**
//! 1. The table names memory that is mapped as long as it is named; whoever registers or pins vouches for that.
//! 2. The device touches memory only through the table, with the table's lock held for reading: when the lock for writing
//!    is got nothing is being copied. So [`Device::unpin`] and [`Device::stop`] are certain.
//! 3. A register is written by the driver or by the device; each access has the register's width, and is atomic. What a
//!    write does at once (a bit that is cleared by writing it) is done by the writer; all else by the thread, which a
//!    write wakes.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use smallvec::SmallVec;

use super::engine_ioat::{Device, PIECE_BYTES_MAX, Pin, Pinned, SHARES_MAX};
use super::ioat::{self, CHANNEL_BYTES, DESCRIPTOR_BYTES, Descriptor, State, Status};
use super::node::free_thread;
use super::pace;
use super::pairing::PAGE_BYTES;
use crate::media::ByAddress;
use crate::sync::signals::kept_off;

/// A channel is left for the next after so many bytes.
const PIECE_BYTES: usize = 16 << 10;
/// And its registers are looked at so often while all channels wait for their moment.
const LOOK_EVERY: Duration = Duration::from_micros(2);
/// Channels of one function at most: the registers of more would not be in its first page.
const CHANNELS_MAX: usize = 31;
const BAR_BYTES: usize = 4096;
const CONFIG_BYTES: usize = 4096;
/// Where registered memory is on the bus. No address of this process looks like that.
const REGISTERED_AT: u64 = 0x10_0000_0000;
const REGISTERED_APART: u64 = 1 << 30;
/// Where pinned memory is on the bus: for each request as much as it may have twice.
const PINNED_AT: u64 = 0x80_0000_0000;
const PINNED_APART: u64 = 64 << 20;
const PINNED_PAGES: u64 = PINNED_APART / (2 * PAGE_BYTES as u64);
const _: () = assert!(PIECE_BYTES_MAX / PAGE_BYTES + 2 * SHARES_MAX < PINNED_PAGES as usize);

/// What the bus calls memory that is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// In one piece where it is so for the program: behind an IOMMU.
    Contiguous,
    /// Page by page, anywhere: physical addresses.
    Pages,
}

/// How the device behaves.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub functions: usize,
    /// Of each function.
    pub channels: usize,
    /// Largest copy of one descriptor, as a power of two of bytes, from 12 on.
    pub xfercap: u8,
    pub version: u8,
    /// Stores go into the caches, and not past them.
    pub ddio: bool,
    pub addresses: Addresses,
    /// Callers' memory can be pinned.
    pub pins: bool,
    /// Bytes a second, over all channels; none for as fast as it can.
    pub bytes_per_s: Option<u64>,
    /// From when it takes a descriptor to when it begins to copy.
    pub latency: Duration,
    /// One in so many descriptors fails after some of its bytes, by chance from this seed; none for never.
    pub faults: Option<(u32, u64)>,
    /// With the descriptor of this number, counted over all channels, a channel falls silent until it is reset.
    pub hangs_at: Option<u32>,
    /// From the descriptor of this number on a channel reports such as it was not given, until it is reset.
    pub lies_at: Option<u32>,
    /// With the descriptor of this number all fall silent, also to commands.
    pub mute_at: Option<u32>,
    /// With the descriptor of this number the device is gone: all its registers read as ones.
    pub vanishes_at: Option<u32>,
    /// It can be kept from memory.
    pub stops: bool,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            functions: 1,
            channels: 4,
            xfercap: 20,
            version: 0x33,
            ddio: true,
            addresses: Addresses::Contiguous,
            pins: true,
            bytes_per_s: None,
            latency: Duration::ZERO,
            faults: None,
            hangs_at: None,
            lies_at: None,
            mute_at: None,
            vanishes_at: None,
            stops: true,
        }
    }
}

pub struct Emulated {
    shared: Arc<Shared>,
    device: Option<JoinHandle<()>>,
}

struct Shared {
    model: Model,
    functions: Box<[Function]>,
    table: RwLock<Table>,
    /// A register was written, or all is to end.
    bell: Mutex<Bell>,
    rung: Condvar,
    gone: AtomicBool,
    /// Nanoseconds that the device worked.
    busy: AtomicU64,
}

#[derive(Default)]
struct Bell {
    rung: bool,
    closed: bool,
}

struct Function {
    bar: Box<[AtomicU64]>,
    config: Box<[AtomicU32]>,
    /// By channel: `CHAINADDR` was written.
    chained: Box<[AtomicBool]>,
}

#[derive(Default)]
struct Table {
    windows: BTreeMap<u64, Window>,
    stopped: bool,
    registered: u64,
}

/// Memory that the device may reach, at its address on the bus.
#[derive(Clone, Copy)]
struct Window {
    at: *mut u8,
    bytes: usize,
    stored_to: bool,
}

// SAFETY: an address, followed by the device alone under the table's lock (invariant 2).
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Table {
    /// Where a range is; none where not all of it may be reached that way.
    fn at(&self, bus: u64, bytes: usize, store: bool) -> Option<*mut u8> {
        let (begin, window) = self.windows.range(..=bus).next_back()?;
        let offset = (bus - begin) as usize;
        let inside = offset.checked_add(bytes)? <= window.bytes && (window.stored_to || !store);
        inside.then(|| window.at.wrapping_add(offset))
    }
}

impl Function {
    fn new(model: &Model) -> Function {
        let function = Function {
            bar: (0..BAR_BYTES / 8).map(|_| AtomicU64::new(0)).collect(),
            config: (0..CONFIG_BYTES / 4).map(|_| AtomicU32::new(0)).collect(),
            chained: (0..model.channels).map(|_| AtomicBool::new(false)).collect(),
        };
        function.byte(ioat::CHANCNT).store(model.channels as u8, Ordering::Relaxed);
        function.byte(ioat::XFERCAP).store(model.xfercap, Ordering::Relaxed);
        function.byte(ioat::CBVER).store(model.version, Ordering::Relaxed);
        for channel in 0..model.channels {
            let halted = Status { state: State::Halted, finished: 0 };
            function.quad(registers(channel) + ioat::CHANSTS).store(halted.word(), Ordering::Relaxed);
        }
        function
    }

    fn place<T>(&self, at: usize) -> *mut T {
        assert!(at.is_multiple_of(size_of::<T>()) && at < BAR_BYTES, "no register at {at:#x}");
        self.bar[at / 8].as_ptr().cast::<u8>().wrapping_add(at % 8).cast()
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
        // SAFETY: inside of a word of the registers; atomic, and always of this width (invariant 3).
        unsafe { AtomicU8::from_ptr(self.place(at)) }
    }

    fn half(&self, at: usize) -> &AtomicU16 {
        // SAFETY: inside of a word of the registers; atomic, and always of this width (invariant 3).
        unsafe { AtomicU16::from_ptr(self.place(at)) }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside of a word of the registers; atomic, and always of this width (invariant 3).
        unsafe { AtomicU32::from_ptr(self.place(at)) }
    }

    fn quad(&self, at: usize) -> &AtomicU64 {
        &self.bar[at / 8]
    }
}

fn registers(channel: usize) -> usize {
    CHANNEL_BYTES * (channel + 1)
}

impl Emulated {
    /// None where its thread does not start.
    pub fn new(model: Model) -> Option<Emulated> {
        let model = Model {
            functions: model.functions.max(1),
            channels: model.channels.clamp(1, CHANNELS_MAX),
            ..model
        };
        let shared = Arc::new(Shared {
            model,
            functions: (0..model.functions).map(|_| Function::new(&model)).collect(),
            table: RwLock::default(),
            bell: Mutex::default(),
            rung: Condvar::new(),
            gone: AtomicBool::new(false),
            busy: AtomicU64::new(0),
        });
        let its = shared.clone();
        let work = move || {
            free_thread();
            Thread::new(&its).work();
        };
        let thread = std::thread::Builder::new().name("lode-emu-ioat".to_owned());
        let started = kept_off(|| thread.spawn(work));
        let device = started.inspect_err(|e| tracing::warn!("engine emu-ioat: no thread: {e}")).ok()?;
        Some(Emulated { shared, device: Some(device) })
    }

    /// CPU time that stands for the device's own, in nanoseconds.
    pub fn device_ns(&self) -> u64 {
        self.shared.busy.load(Ordering::Relaxed)
    }

    fn function(&self, function: usize) -> Option<&Function> {
        (!self.shared.gone.load(Ordering::Acquire)).then(|| &self.shared.functions[function])
    }
}

impl Shared {
    fn ring(&self) {
        self.bell.lock().rung = true;
        self.rung.notify_all();
    }
}

impl Device for Emulated {
    fn name(&self) -> &'static str {
        "emu-ioat"
    }

    fn functions(&self) -> usize {
        self.shared.model.functions
    }

    fn read8(&self, function: usize, at: usize) -> u8 {
        self.function(function).map_or(u8::MAX, |f| f.byte(at).load(Ordering::Acquire))
    }

    fn read32(&self, function: usize, at: usize) -> u32 {
        self.function(function).map_or(u32::MAX, |f| f.word(at).load(Ordering::Acquire))
    }

    fn read64(&self, function: usize, at: usize) -> u64 {
        self.function(function).map_or(u64::MAX, |f| f.quad(at).load(Ordering::Acquire))
    }

    fn write8(&self, function: usize, at: usize, value: u8) {
        let Some(f) = self.function(function) else { return };
        // Commands stay until they are carried out.
        if at >= CHANNEL_BYTES && at % CHANNEL_BYTES == ioat::CHANCMD {
            f.byte(at).fetch_or(value, Ordering::AcqRel);
        } else {
            f.byte(at).store(value, Ordering::Release);
        }
        self.shared.ring();
    }

    fn write16(&self, function: usize, at: usize, value: u16) {
        let Some(f) = self.function(function) else { return };
        f.half(at).store(value, Ordering::Release);
        self.shared.ring();
    }

    fn write32(&self, function: usize, at: usize, value: u32) {
        let Some(f) = self.function(function) else { return };
        if at >= CHANNEL_BYTES && at % CHANNEL_BYTES == ioat::CHANERR {
            f.word(at).fetch_and(!value, Ordering::AcqRel);
        } else {
            f.word(at).store(value, Ordering::Release);
        }
        self.shared.ring();
    }

    fn write64(&self, function: usize, at: usize, value: u64) {
        let Some(f) = self.function(function) else { return };
        f.quad(at).store(value, Ordering::Release);
        if at >= CHANNEL_BYTES && at % CHANNEL_BYTES == ioat::CHAINADDR {
            f.chained[at / CHANNEL_BYTES - 1].store(true, Ordering::Release);
        }
        self.shared.ring();
    }

    fn read_config(&self, function: usize, at: usize) -> u32 {
        self.function(function).map_or(u32::MAX, |f| f.config[at / 4].load(Ordering::Acquire))
    }

    fn write_config(&self, function: usize, at: usize, value: u32) {
        let Some(f) = self.function(function) else { return };
        match at {
            ioat::CONFIG_CHANERR_INT => _ = f.config[at / 4].fetch_and(!value, Ordering::AcqRel),
            _ => f.config[at / 4].store(value, Ordering::Release),
        }
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn register(&self, at: *mut u8, bytes: usize) -> io::Result<u64> {
        let mut table = self.shared.table.write();
        if table.stopped {
            return Err(io::Error::other("the device was stopped"));
        }
        let bus = REGISTERED_AT + table.registered;
        table.registered += (bytes as u64).next_multiple_of(REGISTERED_APART);
        table.windows.insert(bus, Window { at, bytes, stored_to: true });
        Ok(bus)
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn pin(&self, request: usize, ranges: &[Pin]) -> io::Result<SmallVec<[Pinned; 2]>> {
        let mut table = self.shared.table.write();
        if !self.shared.model.pins || table.stopped {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let begin = PINNED_AT + request as u64 * PINNED_APART;
        let mut page = 0;
        let mut pinned = SmallVec::new();
        for range in ranges {
            let offset = range.at.addr() % PAGE_BYTES;
            let first = range.at.wrapping_sub(offset).cast_mut();
            let pages = (offset + range.bytes).div_ceil(PAGE_BYTES);
            let stored_to = range.stored_to;
            let mut window = |bus, at, bytes| _ = table.windows.insert(bus, Window { at, bytes, stored_to });
            pinned.push(match self.shared.model.addresses {
                Addresses::Contiguous => {
                    let bus = begin + page * PAGE_BYTES as u64;
                    window(bus, first, pages * PAGE_BYTES);
                    Pinned::Contiguous(bus + offset as u64)
                }
                Addresses::Pages => {
                    // Each at a place of its own (the factor is odd), with a page between that is nobody's.
                    let scattered = |n: u64| begin + (n * 2477 % PINNED_PAGES) * 2 * PAGE_BYTES as u64;
                    let pages = (0..pages).map(|n| {
                        let bus = scattered(page + n as u64);
                        window(bus, first.wrapping_add(n * PAGE_BYTES), PAGE_BYTES);
                        bus
                    });
                    Pinned::Pages(pages.collect())
                }
            });
            page += pages as u64;
        }
        Ok(pinned)
    }

    fn unpin(&self, request: usize) {
        let begin = PINNED_AT + request as u64 * PINNED_APART;
        let mut table = self.shared.table.write();
        let its: SmallVec<[u64; 8]> =
            table.windows.range(begin..begin + PINNED_APART).map(|(bus, _)| *bus).collect();
        for bus in its {
            table.windows.remove(&bus);
        }
    }

    fn stop(&self) -> bool {
        if self.shared.model.stops {
            let mut table = self.shared.table.write();
            table.windows.clear();
            table.stopped = true;
        }
        self.shared.model.stops
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        self.shared.bell.lock().closed = true;
        self.shared.rung.notify_all();
        if let Some(device) = self.device.take()
            && device.join().is_err()
        {
            tracing::error!("the thread of engine emu-ioat panicked");
        }
    }
}

/// What the device's thread has.
struct Thread<'a> {
    shared: &'a Shared,
    channels: Vec<Channel<'a>>,
    copier: ByAddress,
    chance: u64,
    /// Descriptors so far.
    taken: u32,
    mute: bool,
}

/// What the device knows of one of its channels, besides its registers.
struct Channel<'a> {
    function: &'a Function,
    number: usize,
    next: u64,
    /// Descriptors since the chain began, as `DMACOUNT` counts them.
    done: u16,
    finished: u64,
    now: Option<Now>,
    suspended: bool,
    halted: bool,
    /// Until it is reset.
    silent: bool,
    lies: bool,
}

/// A descriptor that it is at.
#[derive(Clone, Copy)]
struct Now {
    descriptor: Descriptor,
    begins: Instant,
    copied: usize,
    /// It fails after so many bytes, with this error.
    fails_at: Option<(usize, u32)>,
}

/// How far a channel came.
enum Step {
    Worked,
    Nothing,
    /// Not before this moment.
    Later(Instant),
}

impl<'a> Channel<'a> {
    fn new(function: &'a Function, number: usize) -> Channel<'a> {
        Channel {
            function,
            number,
            next: 0,
            done: 0,
            finished: 0,
            now: None,
            suspended: false,
            halted: true,
            silent: false,
            lies: false,
        }
    }

    fn at(&self, register: usize) -> usize {
        registers(self.number) + register
    }

    fn tell(&self, state: State) -> u64 {
        let word = Status { state, finished: self.finished }.word();
        self.function.quad(self.at(ioat::CHANSTS)).store(word, Ordering::Release);
        word
    }

    fn has_more(&self) -> bool {
        self.function.half(self.at(ioat::DMACOUNT)).load(Ordering::Acquire) != self.done
    }

    /// What the command register asks for; whether there was something.
    fn obey(&mut self) -> bool {
        let command = self.function.byte(self.at(ioat::CHANCMD));
        let asked = command.load(Ordering::Acquire);
        if asked & ioat::CMD_RESET != 0 {
            *self = Channel::new(self.function, self.number);
            self.function.half(self.at(ioat::DMACOUNT)).store(0, Ordering::Relaxed);
            self.function.word(self.at(ioat::CHANERR)).store(0, Ordering::Relaxed);
            self.function.chained[self.number].store(false, Ordering::Relaxed);
            self.tell(State::Halted);
        } else if asked & ioat::CMD_SUSPEND != 0 && !self.halted {
            self.suspended = true;
            if let Some(now) = &mut self.now {
                now.copied = 0;
            }
            self.tell(State::Suspended);
        } else if asked & ioat::CMD_RESUME != 0 && self.suspended {
            self.suspended = false;
            self.tell(if self.has_more() { State::Active } else { State::Idle });
        }
        // Carried out, whatever else came meanwhile.
        let command = self.function.byte(self.at(ioat::CHANCMD));
        command.fetch_and(!asked, Ordering::Release);
        asked != 0
    }
}

impl<'a> Thread<'a> {
    fn new(shared: &'a Shared) -> Thread<'a> {
        let numbers = |function| (0..shared.model.channels).map(move |n| Channel::new(function, n));
        Thread {
            shared,
            channels: shared.functions.iter().flat_map(numbers).collect(),
            copier: ByAddress::default(),
            chance: shared.model.faults.map_or(1, |(_, seed)| seed | 1),
            taken: 0,
            mute: false,
        }
    }

    fn work(&mut self) {
        loop {
            let (mut worked, mut soonest) = (false, None);
            let begun = Instant::now();
            for n in 0..self.channels.len() {
                match self.step(n) {
                    Step::Worked => worked = true,
                    Step::Nothing => {}
                    Step::Later(moment) => soonest = Some(soonest.map_or(moment, |s| moment.min(s))),
                }
            }
            if worked {
                self.shared.busy.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
            let mut bell = self.shared.bell.lock();
            if bell.closed {
                return;
            }
            if !worked && !bell.rung {
                match soonest {
                    None => self.shared.rung.wait(&mut bell),
                    Some(moment) if moment <= Instant::now() + pace::NEAR => {
                        // A little at a time: another channel may have something before.
                        MutexGuard::unlocked(&mut bell, || pace::until(moment.min(begun + LOOK_EVERY)));
                    }
                    Some(moment) => drop(self.shared.rung.wait_until(&mut bell, moment - pace::NEAR)),
                }
            }
            bell.rung = false;
        }
    }

    fn step(&mut self, n: usize) -> Step {
        if self.mute || self.shared.gone.load(Ordering::Relaxed) {
            return Step::Nothing;
        }
        if self.channels[n].obey() {
            return Step::Worked;
        }
        let channel = &mut self.channels[n];
        if channel.function.chained[channel.number].swap(false, Ordering::Acquire) {
            channel.next = channel.function.quad(channel.at(ioat::CHAINADDR)).load(Ordering::Acquire);
            (channel.done, channel.halted, channel.suspended) = (0, false, false);
            if !channel.next.is_multiple_of(DESCRIPTOR_BYTES as u64) {
                return self.halt(n, ioat::ERR_CHAIN_ADDRESS);
            }
        }
        if channel.suspended || channel.halted || channel.silent {
            return Step::Nothing;
        }
        let Some(now) = channel.now else { return self.fetch(n) };
        if now.begins > Instant::now() {
            return Step::Later(now.begins);
        }
        self.piece(n, now)
    }

    /// Reads the next descriptor, if there is one.
    fn fetch(&mut self, n: usize) -> Step {
        let channel = &mut self.channels[n];
        if !channel.has_more() {
            return Step::Nothing;
        }
        let table = self.shared.table.read();
        let aligned = channel.next.is_multiple_of(DESCRIPTOR_BYTES as u64);
        let Some(at) = table.at(channel.next, DESCRIPTOR_BYTES, false).filter(|_| aligned) else {
            drop(table);
            return self.halt(n, ioat::ERR_NEXT_ADDRESS);
        };
        // SAFETY: in the table (invariant 2), aligned, and written before the doorbell.
        let descriptor = unsafe { at.cast::<Descriptor>().read() };
        drop(table);
        let model = self.shared.model;
        let begins = Instant::now() + model.latency;
        let mut now = Now { descriptor, begins, copied: 0, fails_at: None };
        if !descriptor.has(ioat::CONTROL_NULL) {
            self.taken += 1;
            let reached = |at: Option<u32>| at == Some(self.taken);
            self.channels[n].lies |= reached(model.lies_at);
            self.mute |= reached(model.mute_at);
            self.channels[n].silent = reached(model.hangs_at);
            if reached(model.vanishes_at) {
                self.shared.gone.store(true, Ordering::Release);
            }
            now.fails_at = self.by_chance(descriptor.size as usize);
        }
        let channel = &mut self.channels[n];
        channel.tell(State::Active);
        channel.now = Some(now);
        Step::Worked
    }

    /// Goes on with a descriptor.
    fn piece(&mut self, n: usize, mut now: Now) -> Step {
        let descriptor = now.descriptor;
        let size = descriptor.size as usize;
        let null = descriptor.has(ioat::CONTROL_NULL);
        if !descriptor.is_copy() {
            return self.halt(n, ioat::ERR_CONTROL);
        }
        if size == 0 || size > 1 << self.shared.model.xfercap {
            return self.halt(n, ioat::ERR_LENGTH);
        }
        let until = if null { 0 } else { now.fails_at.map_or(size, |(at, _)| at) };
        let len = PIECE_BYTES.min(until - now.copied);
        let began = Instant::now();
        if len > 0
            && let Err(error) = self.move_bytes(&descriptor, now.copied, len)
        {
            return self.halt(n, error);
        }
        now.copied += len;
        if let Some(rate) = self.shared.model.bytes_per_s {
            pace::until(began + pace::time_of(len, rate));
        }
        if now.copied < until {
            self.channels[n].now = Some(now);
            return Step::Worked;
        }
        match now.fails_at {
            Some((_, error)) => self.halt(n, error),
            None => self.finish(n, now),
        }
    }

    fn move_bytes(&self, descriptor: &Descriptor, from: usize, len: usize) -> Result<(), u32> {
        let table = self.shared.table.read();
        let source = table.at(descriptor.source + from as u64, len, false).ok_or(ioat::ERR_READ_DATA)?;
        let target = table.at(descriptor.destination + from as u64, len, true).ok_or(ioat::ERR_WRITE_DATA)?;
        // SAFETY: both are in the table (invariant 2); who submitted vouches that nobody changes the one or uses the other.
        let copied = unsafe {
            match self.shared.model.ddio {
                true => self.copier.cached(target, source, len),
                false => self.copier.non_temporal(target, source, len),
            }
        };
        copied.map_err(|fault| match (target.addr()..target.addr() + len).contains(&fault) {
            true => ioat::ERR_WRITE_DATA,
            false => ioat::ERR_READ_DATA,
        })
    }

    fn finish(&mut self, n: usize, now: Now) -> Step {
        // What was stored past the caches reaches memory before anybody is told.
        self.copier.fence();
        let channel = &mut self.channels[n];
        channel.finished = channel.next;
        channel.next = now.descriptor.next;
        channel.done = channel.done.wrapping_add(1);
        channel.now = None;
        let word = channel.tell(if channel.has_more() { State::Active } else { State::Idle });
        let word = if channel.lies { word + 7 * DESCRIPTOR_BYTES as u64 } else { word };
        if now.descriptor.has(ioat::CONTROL_COMPLETION) && !self.complete(n, word) {
            return self.halt(n, ioat::ERR_COMPLETION_ADDRESS);
        }
        Step::Worked
    }

    /// Writes the status where the driver looks for it.
    fn complete(&self, n: usize, word: u64) -> bool {
        let channel = &self.channels[n];
        let bus = channel.function.quad(channel.at(ioat::CHANCMP)).load(Ordering::Acquire);
        let table = self.shared.table.read();
        let at = table.at(bus, size_of::<u64>(), true).filter(|_| bus.is_multiple_of(8));
        let Some(at) = at else { return false };
        // SAFETY: in the table (invariant 2), aligned, and touched as an atomic by both sides.
        unsafe { AtomicU64::from_ptr(at.cast()) }.store(word, Ordering::Release);
        true
    }

    /// An error: the channel does nothing any more until it is reset.
    fn halt(&mut self, n: usize, error: u32) -> Step {
        self.copier.fence();
        let channel = &mut self.channels[n];
        (channel.now, channel.halted) = (None, true);
        channel.function.word(channel.at(ioat::CHANERR)).fetch_or(error, Ordering::AcqRel);
        channel.function.config[ioat::CONFIG_CHANERR_INT / 4].fetch_or(error, Ordering::AcqRel);
        let word = channel.tell(State::Halted);
        let control = channel.function.half(channel.at(ioat::CHANCTRL)).load(Ordering::Acquire);
        if control & ioat::CTRL_ERR_COMPLETION != 0 {
            // Where that fails too there is nobody left to tell.
            self.complete(n, word);
        }
        Step::Worked
    }

    /// Where this copy fails, and how.
    fn by_chance(&mut self, size: usize) -> Option<(usize, u32)> {
        let (one_in, _) = self.shared.model.faults?;
        let mut draw = |below: u64| {
            self.chance ^= self.chance << 13;
            self.chance ^= self.chance >> 7;
            self.chance ^= self.chance << 17;
            self.chance % below.max(1)
        };
        if draw(one_in.into()) > 0 {
            return None;
        }
        let error = [ioat::ERR_READ_DATA, ioat::ERR_WRITE_DATA, ioat::ERR_CONTROL][draw(3) as usize];
        Some((draw(size as u64) as usize, error))
    }
}
