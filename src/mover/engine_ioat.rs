//! Intel I/OAT: rings of descriptors, one doorbell for a request, completions that are written to memory (Fastmove §5.1,
//! EasyIO §2.2). What follows the descriptors is behind [`Device`]: a function held through VFIO (`vfio`), or a model
//! of one (`engine_emu_ioat`).
//!
//! The device knows no virtual addresses. Media is registered with it once, region by region. A caller's bytes are
//! pinned for the time of their request, all of a request in one step; small ones, and those that cannot be pinned,
//! go through a buffer that is registered already. `pairing` makes descriptors of what that yields.
//!
//! **When bytes are given back.** A request ends when the device has reported it finished; or when the device has
//! acknowledged a reset of the channel (see `engine_ioat_channel`); or when [`Device::stop`] took from the device its
//! way to memory. Nothing else ends it: a device that keeps silent for [`Bounds::silence`] is reset, one that does not
//! answer to that within [`Bounds::answer`] is stopped, and where even that cannot be done the process ends, because
//! whatever the caller did with its bytes, or the file system with its blocks, the device might still write to
//! them. (When a process ends the kernel resets the device and takes its mappings, and the pool is recovered like after
//! any crash.) What was not finished then is the CPU's.
//!
//! **Durability.** Where the device writes into the caches (DDIO on, the default of every machine that has it) the CPU has
//! to write back; where it writes past them what it completed has reached memory. Nothing that a program may read says
//! for certain which it is, so whoever makes the engine says so, and says [`Durability::WriteBack`] where nobody knows:
//! that is right in both cases. The descriptors' own bit against snooping is no way around: it would leave stale lines in
//! the caches.
//!
//! A checksum is made by the CPU, while the device copies.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::completion::{Completion, Status};
use super::engine_ioat_channel::{Channel, ENDED, FAILED, Mute, Report};
use super::engine_ioat_memory::Memory;
use super::engine_port::{
    Awaited, Capability, Dram, Durability, Engine, Place, RawTransfer, Refused, Routes, Ticket,
};
use super::ioat::{self, State};
use super::manager::Channels;
use super::pairing::{End, PAGE_BYTES, Part, plan, unpaired};
use super::profile::SMALLEST_BYTES;
use crate::media::{LINE, Media, crc32c};
use crate::wait::{Holding, until};

/// Requests under way at most, over all channels.
pub const SLOTS: usize = 64;
/// What one submission takes at most, in bytes; a request of more is several, one after the other.
pub const PIECE_BYTES_MAX: usize = 4 << 20;
/// Transfers that one submission takes at most.
pub const SHARES_MAX: usize = 16;
/// Smaller requests go through the registered buffer, of this size in bytes: a copy between two places in DRAM then costs
/// less than two calls of the kernel and the flush of its IOMMU. Nobody has measured where that ends on a device.
pub const BOUNCE_BYTES: usize = 64 << 10;
/// Pins refused one after the other before no more are asked for.
const PIN_REFUSALS_MAX: u32 = 3;
/// Resets of a channel in between of which nothing ended well, before it is left alone.
const FAILURES_MAX: u32 = 4;

/// Then nothing that it says counts.
const LIE: &str = "it reports a descriptor that it was not given";

/// How long a device may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Between two signs of progress while it has something to do.
    pub silence: Duration,
    /// For a command.
    pub answer: Duration,
}

impl Default for Bounds {
    /// A descriptor takes a millisecond at most; the kernel's driver gives up after 200.
    fn default() -> Bounds {
        Bounds { silence: Duration::from_secs(2), answer: Duration::from_secs(2) }
    }
}

/// A caller's bytes that are to be pinned.
#[derive(Clone, Copy, Debug)]
pub struct Pin {
    pub at: *const u8,
    pub bytes: usize,
    /// The device stores to them.
    pub stored_to: bool,
}

/// Pinned bytes, as the bus has them.
#[derive(Clone, Debug)]
pub enum Pinned {
    Contiguous(u64),
    /// By page; the bytes begin in the first where they do in memory.
    Pages(SmallVec<[u64; 17]>),
}

impl Pinned {
    fn end(&self, at: *const u8) -> End<'_> {
        match self {
            Pinned::Contiguous(bus) => End::Contiguous(*bus),
            Pinned::Pages(pages) => End::Pages { pages, offset: at.addr() % PAGE_BYTES },
        }
    }
}

/// One or several I/OAT functions, as their user has them: registers, a way to name memory, and a way to stop them.
pub trait Device: Send + Sync + 'static {
    /// The engine's name.
    fn name(&self) -> &'static str;

    fn functions(&self) -> usize;

    /// The NUMA node of a function, where the host says.
    fn node(&self, _function: usize) -> Option<u32> {
        None
    }

    fn read8(&self, function: usize, at: usize) -> u8;
    fn read32(&self, function: usize, at: usize) -> u32;
    fn read64(&self, function: usize, at: usize) -> u64;
    fn write8(&self, function: usize, at: usize, value: u8);
    fn write16(&self, function: usize, at: usize, value: u16);
    fn write32(&self, function: usize, at: usize, value: u32);
    fn write64(&self, function: usize, at: usize, value: u64);
    /// Of the configuration space.
    fn read_config(&self, function: usize, at: usize) -> u32;
    fn write_config(&self, function: usize, at: usize, value: u32);

    /// Lets all functions reach whole pages, until they are stopped: where the first is, the others behind it.
    ///
    /// # Safety
    ///
    /// The range is mapped and belongs to whoever sees to it that the functions are told of it only as long as they may
    /// use it.
    unsafe fn register(&self, at: *mut u8, bytes: usize) -> io::Result<u64>;

    /// Lets all functions reach a caller's bytes, under the number of a request, below [`SLOTS`], which has none so far: at
    /// most [`SHARES_MAX`] ranges of [`PIECE_BYTES_MAX`] bytes together. All or nothing.
    ///
    /// # Safety
    ///
    /// The ranges are mapped until `unpin`.
    unsafe fn pin(&self, request: usize, ranges: &[Pin]) -> io::Result<SmallVec<[Pinned; 2]>>;

    /// Takes them away again.
    fn unpin(&self, request: usize);

    /// Takes from all functions what they could reach, for ever; true where it is certain that none of them will store
    /// anything after this returned.
    fn stop(&self) -> bool;
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub doorbells: u64,
    pub descriptors: u64,
    /// As many they would have been, cut at the pages of both ends (Fastmove's figure 3).
    pub descriptors_unpaired: u64,
    /// Submissions of pinned bytes, and of bytes that went through a buffer.
    pub pinned: u64,
    pub bounced: u64,
    pub resets: u64,
}

#[derive(Default)]
struct Counters {
    doorbells: AtomicU64,
    descriptors: AtomicU64,
    descriptors_unpaired: AtomicU64,
    pinned: AtomicU64,
    bounced: AtomicU64,
    resets: AtomicU64,
}

pub struct Ioat<D: Device> {
    device: D,
    durability: Durability,
    bounds: Bounds,
    transfer_bytes_max: usize,
    channels: Box<[Channel]>,
    slots: Box<[Mutex<Request>]>,
    outcomes: Box<[CachePadded<AtomicU64>]>,
    free: Mutex<Vec<usize>>,
    regions: RwLock<Vec<Registered>>,
    /// Held by who resets a channel or stops the device.
    recovery: Mutex<()>,
    pin_refusals: AtomicU32,
    gone: AtomicBool,
    said_failed: AtomicBool,
    /// The channel that the channel manager holds; none: `usize::MAX`.
    at_rest: AtomicUsize,
    counters: Counters,
    /// Given back when the device provably does not use it any more.
    memory: ManuallyDrop<Memory>,
}

/// What the device knows of a region.
#[derive(Clone, Copy)]
enum Registered {
    Unknown,
    Refused,
    At { base: *mut u8, bytes: usize, bus: u64 },
}

// SAFETY: addresses of registered memory, to compare with.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

/// A transfer, and where its media is on the bus.
struct Placed {
    raw: RawTransfer,
    media: u64,
}

impl Placed {
    /// Where its DRAM end is, and whether it is stored to.
    fn dram(&self) -> (*const u8, bool) {
        match self.raw.dram {
            Dram::From(from, _) => (from, false),
            Dram::To(to) => (to, true),
        }
    }
}

/// What one submission takes of one transfer, in bytes.
#[derive(Clone, Copy)]
struct Share {
    transfer: usize,
    offset: usize,
    bytes: usize,
    /// Where in the buffer, where it goes through that.
    buffered: Option<usize>,
}

struct Request {
    transfers: SmallVec<[Placed; 2]>,
    total: usize,
    done: usize,
    /// Continued up to `done`.
    crc: Option<u32>,
    channel: usize,
    begun: Instant,
    /// What the device is at.
    shares: SmallVec<[Share; 2]>,
    sizes: SmallVec<[u32; 4]>,
    is_pinned: bool,
    /// Continued up to the end of the shares.
    next_crc: Option<u32>,
    watch: Watch,
    over: bool,
}

impl Request {
    fn none() -> Request {
        Request {
            transfers: SmallVec::new(),
            total: 0,
            done: 0,
            crc: None,
            channel: 0,
            begun: Instant::now(),
            shares: SmallVec::new(),
            sizes: SmallVec::new(),
            is_pinned: false,
            next_crc: None,
            watch: Watch::new(),
            over: true,
        }
    }

    /// What comes next, `limit` bytes of it at most.
    fn next_shares(&self, limit: usize, in_buffer: bool) -> SmallVec<[Share; 2]> {
        let (mut before, mut taken, mut buffered) = (0, 0, 0);
        let mut shares = SmallVec::new();
        for (transfer, Placed { raw, media }) in self.transfers.iter().enumerate() {
            let offset = (self.done + taken).saturating_sub(before);
            before += raw.len;
            if offset >= raw.len || taken == limit || shares.len() == SHARES_MAX {
                continue;
            }
            let bytes = (raw.len - offset).min(limit - taken);
            // At the place in a line where its other end is: devices copy that best (Fastmove §3.2.4).
            let place = buffered + ((media + offset as u64) % LINE as u64) as usize;
            buffered = (place + bytes).next_multiple_of(LINE);
            shares.push(Share { transfer, offset, bytes, buffered: in_buffer.then_some(place) });
            taken += bytes;
        }
        shares
    }

    /// Continues a checksum over the first bytes of the shares, where they go to media.
    ///
    /// # Safety
    ///
    /// The transfers' bytes are there, and nobody changes those that go to media.
    unsafe fn checksum(&self, mut crc: u32, mut bytes: usize) -> u32 {
        for share in &self.shares {
            let now = share.bytes.min(bytes);
            if let Dram::From(from, _) = self.transfers[share.transfer].raw.dram {
                // SAFETY: the caller's; within the transfer.
                crc = crc32c(unsafe { std::slice::from_raw_parts(from.add(share.offset), now) }, crc);
            }
            bytes -= now;
        }
        crc
    }
}

/// What those who look at a request have seen of its channel.
struct Watch {
    look_at: Instant,
    since: Instant,
    progress: (u64, u32),
}

/// So often who looks at a request has a look at the registers: reading one takes as long as copying a page.
const WATCH_EVERY: Duration = Duration::from_millis(1);

impl Watch {
    fn new() -> Watch {
        let now = Instant::now();
        Watch { look_at: now + WATCH_EVERY, since: now, progress: (0, 0) }
    }
}

impl<D: Device> Ioat<D> {
    /// Resets and starts all channels of the device; in words why that is not possible. `durability` says whether the
    /// device stores past the caches ([`Durability::OnCompletion`]) or into them.
    pub fn new(device: D, durability: Durability, bounds: Bounds) -> Result<Ioat<D>, String> {
        let mut places = Vec::new();
        let mut transfer_bytes_max = PIECE_BYTES_MAX as u64;
        for function in 0..device.functions() {
            let version = device.read8(function, ioat::CBVER);
            if version == u8::MAX {
                return Err("the device does not answer".to_owned());
            }
            if version < ioat::VERSION_3_0 {
                let (major, minor) = (version >> 4, version & 0xf);
                return Err(format!("the device has version {major}.{minor}, 3.0 is wanted at least"));
            }
            let xfercap = device.read8(function, ioat::XFERCAP);
            let bytes = ioat::transfer_bytes_max(xfercap)
                .ok_or_else(|| format!("the device says that it copies 2^{xfercap} bytes at a time"))?;
            transfer_bytes_max = transfer_bytes_max.min(bytes);
            device.write8(function, ioat::INTRCTRL, 0);
            let channels = usize::from(device.read8(function, ioat::CHANCNT) & 0x1f);
            places.extend((0..channels).map(|channel| (function, channel)));
        }
        if places.is_empty() {
            return Err("the device has no channel".to_owned());
        }
        let memory = Memory::new(&device, places.len())
            .map_err(|e| format!("no memory can be registered with the device: {e}"))?;
        let channel = |(n, place): (usize, &(usize, usize))| Channel::new(&device, &memory, *place, n);
        let engine = Ioat {
            channels: places.iter().enumerate().map(channel).collect(),
            device,
            durability,
            bounds,
            transfer_bytes_max: transfer_bytes_max as usize,
            slots: (0..SLOTS).map(|_| Mutex::new(Request::none())).collect(),
            outcomes: (0..SLOTS).map(|_| CachePadded::default()).collect(),
            free: Mutex::new((0..SLOTS).collect()),
            regions: RwLock::new(Vec::new()),
            recovery: Mutex::new(()),
            pin_refusals: AtomicU32::new(0),
            gone: AtomicBool::new(false),
            said_failed: AtomicBool::new(false),
            at_rest: AtomicUsize::new(usize::MAX),
            counters: Counters::default(),
            memory: ManuallyDrop::new(memory),
        };
        for (n, channel) in engine.channels.iter().enumerate() {
            let mut ring = channel.lock();
            let reset = channel.reset(&engine.device, &mut ring, (&engine.outcomes, false), bounds.answer);
            let started = reset.and_then(|()| channel.start(&engine.device, &mut ring, bounds.answer));
            started.map_err(|Mute| format!("channel {n} of the device does not start"))?;
        }
        Ok(engine)
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    /// One channel rests, as the channel manager wants it for those that use too much (EasyIO §4.4). Returns once it does.
    pub fn suspend_channel(&self, channel: usize) {
        self.channels[channel].suspend(&self.device, self.bounds.answer);
    }

    pub fn resume_channel(&self, channel: usize) {
        self.channels[channel].resume(&self.device);
    }

    pub fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { doorbells, descriptors, descriptors_unpaired, pinned, bounced, resets } =
            &self.counters;
        Counts {
            doorbells: of(doorbells),
            descriptors: of(descriptors),
            descriptors_unpaired: of(descriptors_unpaired),
            pinned: of(pinned),
            bounced: of(bounced),
            resets: of(resets),
        }
    }

    /// Registers all regions of media now, and not at the first copy of each: it pins them, which takes its time.
    pub fn register<M: Media>(&self, media: &M) {
        for region in 0..media.regions() {
            self.registered(media, region);
        }
    }

    fn registered<M: Media>(&self, media: &M, region: usize) -> Registered {
        if let Some(known @ (Registered::At { .. } | Registered::Refused)) = self.regions.read().get(region) {
            return *known;
        }
        let mut regions = self.regions.write();
        if regions.len() <= region {
            regions.resize(region + 1, Registered::Unknown);
        }
        if let Registered::Unknown = regions[region] {
            regions[region] = match media.mapping(region) {
                None => {
                    let name = self.device.name();
                    tracing::warn!("engine {name}: region {region} is not shared memory: the CPU copies");
                    Registered::Refused
                }
                // SAFETY: it is mapped now; descriptors name it for ranges of requests alone, for which the caller of
                // `submit` vouches.
                Some((base, bytes)) => match unsafe { self.device.register(base, bytes) } {
                    Ok(bus) => Registered::At { base, bytes, bus },
                    Err(e) => {
                        let name = self.device.name();
                        tracing::warn!(
                            "engine {name}: region {region} cannot be registered ({e}): the CPU copies; \
                             device-dax, tmpfs and huge pages can be pinned, files on disks and on fsdax cannot"
                        );
                        Registered::Refused
                    }
                },
            };
        }
        regions[region]
    }

    /// Where a range of media is on the bus.
    fn media_bus<M: Media>(&self, media: &M, region: usize, raw: &RawTransfer) -> Option<u64> {
        let mapped = media.mapped(raw.at, raw.len)?;
        let Registered::At { base, bytes, bus } = self.registered(media, region) else { return None };
        // Also where this is other media than the first was.
        let offset = mapped.addr().checked_sub(base.addr())?;
        (offset.checked_add(raw.len)? <= bytes).then(|| bus + offset as u64)
    }

    /// A channel that works, on media's node where there is one.
    fn pick(&self, node: Option<u32>, turn: usize) -> Option<usize> {
        let works = |n: &usize| !self.channels[*n].is_retired();
        let near = |n: &usize| works(n) && node.is_some() && self.channels[*n].node == node;
        let all = 0..self.channels.len();
        let (nearby, working) = (all.clone().filter(near).count(), all.clone().filter(works).count());
        match (nearby, working) {
            (_, 0) => None,
            (0, count) => all.clone().filter(works).nth(turn % count),
            (count, _) => all.clone().filter(near).nth(turn % count),
        }
    }

    /// Submits what comes next of a request.
    ///
    /// # Safety
    ///
    /// What `Engine::submit` asks of its caller, until the request is over.
    unsafe fn begin(&self, slot: usize, request: &mut Request) -> Result<(), Refused> {
        let left = request.total - request.done;
        let may_pin = self.pin_refusals.load(Ordering::Relaxed) < PIN_REFUSALS_MAX;
        let mut pinned = None;
        if left > BOUNCE_BYTES && may_pin {
            request.shares = request.next_shares(PIECE_BYTES_MAX, false);
            // SAFETY: the caller's.
            pinned = unsafe { self.pin(slot, request) };
        }
        if pinned.is_none() {
            request.shares = request.next_shares(BOUNCE_BYTES, true);
            // SAFETY: the caller's; the slot's buffer is nobody else's while it has the slot.
            unsafe { self.fill_buffer(slot, request) };
        }
        let (parts, unpaired) = self.parts(slot, request, pinned.as_deref());
        request.is_pinned = pinned.is_some();
        request.sizes = parts.iter().map(|part| part.bytes).collect();
        self.outcomes[slot].store(0, Ordering::Relaxed);
        // SAFETY: the parts name what was pinned or the slot's buffer, and registered media; the caller vouches for those
        // until the request is over, which it is not before the outcome is written.
        let submitted =
            unsafe { self.channels[request.channel].submit(&self.device, slot, &parts, &self.outcomes) };
        if submitted.is_err() {
            if request.is_pinned {
                self.device.unpin(slot);
            }
            return submitted;
        }
        let counter = if request.is_pinned { &self.counters.pinned } else { &self.counters.bounced };
        counter.fetch_add(1, Ordering::Relaxed);
        self.counters.doorbells.fetch_add(1, Ordering::Relaxed);
        self.counters.descriptors.fetch_add(parts.len() as u64, Ordering::Relaxed);
        self.counters.descriptors_unpaired.fetch_add(unpaired as u64, Ordering::Relaxed);
        // The device copies meanwhile.
        request.next_crc = request.crc.map(|crc| {
            // SAFETY: the caller's.
            unsafe { request.checksum(crc, usize::MAX) }
        });
        Ok(())
    }

    /// # Safety
    ///
    /// The bytes of all transfers are there until `unpin`.
    unsafe fn pin(&self, slot: usize, request: &Request) -> Option<SmallVec<[Pinned; 2]>> {
        let range = |share: &Share| {
            let (at, stored_to) = request.transfers[share.transfer].dram();
            Pin { at: at.wrapping_add(share.offset), bytes: share.bytes, stored_to }
        };
        let ranges: SmallVec<[Pin; 2]> = request.shares.iter().map(range).collect();
        // SAFETY: the caller's.
        match unsafe { self.device.pin(slot, &ranges) } {
            Ok(pinned) => {
                self.pin_refusals.store(0, Ordering::Relaxed);
                Some(pinned)
            }
            Err(e) => {
                if self.pin_refusals.fetch_add(1, Ordering::Relaxed) + 1 == PIN_REFUSALS_MAX {
                    let name = self.device.name();
                    tracing::warn!(
                        "engine {name}: callers' memory cannot be pinned ({e}), so it goes through a buffer; \
                         raise the limit of locked memory (ulimit -l)"
                    );
                }
                None
            }
        }
    }

    /// Puts what goes to media into the slot's buffer.
    ///
    /// # Safety
    ///
    /// The bytes of all transfers are there, and the buffer is the caller's alone.
    unsafe fn fill_buffer(&self, slot: usize, request: &Request) {
        let buffer = self.memory.buffer(slot).at;
        for share in &request.shares {
            if let (Dram::From(from, _), Some(place)) =
                (request.transfers[share.transfer].raw.dram, share.buffered)
            {
                // SAFETY: the caller's; `next_shares` stays within the buffer and the transfer.
                unsafe { buffer.add(place).copy_from_nonoverlapping(from.add(share.offset), share.bytes) };
            }
        }
    }

    /// Gives callers the first bytes of what came into the slot's buffer.
    ///
    /// # Safety
    ///
    /// As for `fill_buffer`.
    unsafe fn empty_buffer(&self, slot: usize, request: &Request, mut bytes: usize) {
        let buffer = self.memory.buffer(slot).at;
        for share in &request.shares {
            let now = share.bytes.min(bytes);
            if let (Dram::To(to), Some(place)) = (request.transfers[share.transfer].raw.dram, share.buffered)
            {
                // SAFETY: the caller's; `next_shares` stays within the buffer and the transfer.
                unsafe { to.add(share.offset).copy_from_nonoverlapping(buffer.add(place), now) };
            }
            bytes -= now;
        }
    }

    /// The descriptors of the shares of a request, and how many they would be without pairing.
    fn parts(
        &self,
        slot: usize,
        request: &Request,
        pinned: Option<&[Pinned]>,
    ) -> (SmallVec<[Part; 4]>, usize) {
        let mut all: SmallVec<[Part; 4]> = SmallVec::new();
        let mut without = 0;
        for (n, share) in request.shares.iter().enumerate() {
            let transfer = &request.transfers[share.transfer];
            let (at, to_dram) = transfer.dram();
            let at = at.wrapping_add(share.offset);
            let media = End::Contiguous(transfer.media + share.offset as u64);
            let (dram, dram_address) = match (share.buffered, pinned) {
                (Some(place), _) => {
                    let bus = self.memory.buffer(slot).bus + place as u64;
                    (End::Contiguous(bus), bus)
                }
                (None, pinned) => (pinned.expect("it is pinned or buffered")[n].end(at), at.addr() as u64),
            };
            let (source, destination) = if to_dram { (media, dram) } else { (dram, media) };
            all.extend(plan(source, destination, share.bytes, self.transfer_bytes_max));
            without += unpaired(dram_address, transfer.media + share.offset as u64, share.bytes);
        }
        (all, without)
    }

    /// Goes on with a request as far as it can without waiting; whether it is over.
    fn advance(&self, slot: usize) -> bool {
        let mut request = self.slots[slot].lock();
        while !request.over {
            let channel = &self.channels[request.channel];
            let generation = channel.generation();
            match channel.look(&self.outcomes) {
                Report::Well => {}
                Report::Halted => {
                    self.recover(request.channel, generation, &channel.errors(&self.device));
                }
                Report::Lie => {
                    self.recover(
                        request.channel,
                        generation,
                        "it reports a descriptor that it was not given",
                    );
                }
            }
            let mut outcome = self.outcomes[slot].load(Ordering::Acquire);
            if outcome & ENDED == 0 {
                let n = request.channel;
                self.watch(n, &mut request.watch);
                outcome = self.outcomes[slot].load(Ordering::Acquire);
            }
            if outcome & ENDED == 0 {
                return false;
            }
            self.finish(slot, &mut request, outcome);
        }
        true
    }

    /// Takes over what a submission has done, and submits the next where there is one.
    fn finish(&self, slot: usize, request: &mut Request, outcome: u64) {
        let whole = (outcome & !(ENDED | FAILED)) as usize;
        let bytes: usize = request.sizes.iter().take(whole).map(|bytes| *bytes as usize).sum();
        if request.is_pinned {
            self.device.unpin(slot);
        }
        // SAFETY: the request is not over, so its bytes are lent; the outcome is written, so the device is through with the
        // buffer.
        unsafe { self.empty_buffer(slot, request, bytes) };
        let all = outcome & FAILED == 0;
        request.crc = match (request.crc, all) {
            // SAFETY: the request is not over, so its bytes are lent.
            (Some(crc), false) => Some(unsafe { request.checksum(crc, bytes) }),
            _ => request.next_crc,
        };
        request.done += bytes;
        // SAFETY: the request is not over, so what its submitter vouched for still holds.
        let goes_on = all && request.done < request.total && unsafe { self.begin(slot, request) }.is_ok();
        request.over = !goes_on;
    }

    /// Looks after a channel for somebody who waits, from time to time.
    fn watch(&self, n: usize, watch: &mut Watch) {
        let now = Instant::now();
        if now < watch.look_at {
            return;
        }
        watch.look_at = now + WATCH_EVERY;
        let channel = &self.channels[n];
        let generation = channel.generation();
        let Some(status) = channel.status(&self.device) else {
            return self.recover(n, generation, "it vanished");
        };
        if status.state == State::Halted {
            let why = channel.errors(&self.device);
            return self.recover(n, generation, &why);
        }
        let progress = (status.finished, generation);
        if progress != watch.progress || channel.is_suspended() {
            (watch.progress, watch.since) = (progress, now);
        } else if now - watch.since > self.bounds.silence {
            self.recover(n, generation, "it has made no progress for too long");
        }
    }

    /// Resets a channel, unless its generation is another by now; stops the device where that fails. Then what was under
    /// way has its outcome.
    fn recover(&self, n: usize, generation: u32, why: &str) {
        let _one_at_a_time = self.recovery.lock();
        let channel = &self.channels[n];
        let mut ring = channel.lock();
        if channel.generation() != generation || channel.is_retired() {
            return;
        }
        self.counters.resets.fetch_add(1, Ordering::Relaxed);
        ring.failures += 1;
        let failures = ring.failures;
        let reset = channel.reset(&self.device, &mut ring, (&self.outcomes, why != LIE), self.bounds.answer);
        let goes_on = match reset {
            Ok(()) if failures > FAILURES_MAX => {
                channel.retire(&mut ring, &self.outcomes);
                Ok(())
            }
            Ok(()) => channel.start(&self.device, &mut ring, self.bounds.answer),
            Err(Mute) => Err(Mute),
        };
        drop(ring);
        if goes_on.is_err() {
            return self.stop(why);
        }
        let name = self.device.name();
        if !self.said_failed.swap(true, Ordering::Relaxed) {
            tracing::warn!("engine {name}: channel {n} was reset ({why}): the CPU does what it left undone");
        } else {
            tracing::debug!(
                "engine {name}: channel {n} was reset ({why}), for the {failures}. time in a row"
            );
        }
        if self.channels.iter().all(Channel::is_retired) {
            self.say_gone("all its channels failed again and again");
        }
    }

    /// Stops the device: it is certain afterwards that it does nothing any more.
    fn stop(&self, why: &str) {
        let name = self.device.name();
        if !self.device.stop() {
            tracing::error!(
                "engine {name}: the device can neither be reset nor be kept from memory that it was lent ({why}): the \
                 process ends, so that it corrupts nothing; the pool will be recovered"
            );
            std::process::abort();
        }
        for channel in &self.channels {
            channel.retire(&mut channel.lock(), &self.outcomes);
        }
        self.say_gone(why);
    }

    fn say_gone(&self, why: &str) {
        if !self.gone.swap(true, Ordering::Relaxed) {
            let name = self.device.name();
            tracing::warn!("engine {name}: the device is given up ({why}): from now on the CPU copies");
        }
    }
}

impl<M: Media, D: Device> Engine<M> for Ioat<D> {
    fn capability(&self) -> Capability {
        Capability {
            smallest_bytes: SMALLEST_BYTES,
            largest_bytes: usize::MAX,
            alignment: if self.durability == Durability::OnCompletion { LINE } else { 1 },
            // Which one is the firmware's choice, not that of a request.
            routes: match self.durability {
                Durability::WriteBack => Routes::INTO_CACHES,
                _ => Routes::PAST_CACHES,
            },
            shares_reads: true,
            channels: self.channels.len(),
        }
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn submit(
        &self,
        media: &M,
        region: usize,
        channel: usize,
        batch: &[RawTransfer],
        crc: Option<u32>,
    ) -> Result<Ticket, Refused> {
        let channel = self.pick(media.node(region), channel).ok_or(Refused::Gone)?;
        let place =
            |raw: &RawTransfer| Some(Placed { raw: *raw, media: self.media_bus(media, region, raw)? });
        let transfers: Option<SmallVec<[Placed; 2]>> = batch.iter().map(place).collect();
        let transfers = transfers.ok_or(Refused::Gone)?;
        let total = transfers.iter().map(|transfer| transfer.raw.len).sum();
        let slot = self.free.lock().pop().ok_or(Refused::Full)?;
        let mut request = self.slots[slot].lock();
        *request = Request { transfers, total, crc, channel, over: total == 0, ..Request::none() };
        if !request.over {
            // SAFETY: the caller vouches until it has waited, which it does not before the request is over.
            let begun = unsafe { self.begin(slot, &mut request) };
            if let Err(refused) = begun {
                *request = Request::none();
                self.free.lock().push(slot);
                return Err(refused);
            }
        }
        Ok(Ticket(Place::Slot { region, slot }))
    }

    fn poll(&self, ticket: &Ticket) -> bool {
        match ticket.0 {
            Place::Slot { slot, .. } => self.advance(slot),
            Place::Ended(_) => true,
        }
    }

    fn wait(&self, ticket: Ticket) -> Completion {
        let slot = match ticket.0 {
            Place::Slot { slot, .. } => slot,
            Place::Ended(completion) => return completion,
        };
        // Nobody is told: whoever waits looks.
        until(&Awaited::<M>(self, &ticket), None, Holding::Something);
        let request = std::mem::replace(&mut *self.slots[slot].lock(), Request::none());
        self.free.lock().push(slot);
        let status = match request.done {
            0 => Status::Failed,
            done if done < request.total => Status::Partial,
            _ => Status::Done,
        };
        let nanoseconds = request.begun.elapsed().as_nanos() as u64;
        Completion {
            status,
            bytes: request.done as u64,
            crc: request.crc.unwrap_or(0),
            durability: self.durability,
            nanoseconds,
        }
    }

    /// Of all regions: a device's channels serve any.
    fn suspend(&self, _region: usize) {
        self.channels.iter().for_each(|channel| channel.suspend(&self.device, self.bounds.answer));
    }

    fn resume(&self, _region: usize) {
        self.channels.iter().for_each(|channel| channel.resume(&self.device));
    }

    /// Those that work, as [`pick`](Ioat::pick) numbers them. Where devices are on several nodes, which one a region's copies go
    /// to is known copy by copy only: none rests. Nor does another once the last has retired, which was class bandwidth's: what
    /// others had handed over to it would rest, too.
    fn channels(&self, _region: usize) -> Channels {
        let working = self.channels.iter().filter(|channel| !channel.is_retired()).count();
        let is_there = self.channels.last().is_some_and(|last| !last.is_retired());
        let can_rest = is_there && self.channels.windows(2).all(|pair| pair[0].node == pair[1].node);
        Channels { group: 0, count: working.max(1), can_rest, bounds_itself: false }
    }

    fn rest(&self, _region: usize, channel: usize) {
        if let Some(n) = self.pick(self.channels[0].node, channel) {
            self.at_rest.store(n, Ordering::Relaxed);
            self.suspend_channel(n);
        }
    }

    /// The one that was told to rest: others may have retired meanwhile, and the numbers are those of channels that work.
    fn go_on(&self, _region: usize, _channel: usize) {
        let n = self.at_rest.swap(usize::MAX, Ordering::Relaxed);
        if n < self.channels.len() {
            self.resume_channel(n);
        }
    }
}

impl<D: Device> Drop for Ioat<D> {
    fn drop(&mut self) {
        let name = self.device.name();
        let counts = self.counts();
        tracing::info!("engine {name}: {counts:?}");
        let rests = |channel: &Channel| {
            let mut ring = channel.lock();
            channel.reset(&self.device, &mut ring, (&self.outcomes, false), self.bounds.answer).is_ok()
        };
        let at_rest = !self.gone.load(Ordering::Relaxed) && self.channels.iter().all(rests);
        // Also where all were reset: memory that is given back is not to be registered any more.
        if self.device.stop() || at_rest {
            // SAFETY: once, here, and no device uses it any more.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            tracing::error!("engine {name}: the device does not stop: its memory is left to it");
        }
    }
}

#[cfg(all(test, not(any(shuttle, loom, miri))))]
mod tests {
    use super::*;
    use crate::mover::engine_emu_ioat::{Emulated, Model};

    fn channels(engine: &Ioat<Emulated>) -> Channels {
        Engine::<crate::media::Pool>::channels(engine, 0)
    }

    /// Which channel class bandwidth has, and which of others it meets there.
    fn of_bandwidth(engine: &Ioat<Emulated>) -> (Option<usize>, bool) {
        let at = channels(engine);
        let own = engine.pick(None, at.of_bandwidth());
        let others = (0..at.of_others()).any(|turn| engine.pick(None, turn) == own);
        (own, others)
    }

    #[test]
    fn class_bandwidth_keeps_its_channel_to_itself_when_others_retire() {
        let device = Emulated::new(Model { channels: 4, ..Model::default() }).unwrap();
        let engine = Ioat::new(device, Durability::WriteBack, Bounds::default()).unwrap();
        let retire = |n: usize| engine.channels[n].retire(&mut engine.channels[n].lock(), &engine.outcomes);
        assert_eq!(of_bandwidth(&engine), (Some(3), false));
        retire(1);
        assert_eq!((of_bandwidth(&engine), channels(&engine).can_rest), ((Some(3), false), true));
        retire(3);
        assert!(
            !of_bandwidth(&engine).1 && !channels(&engine).can_rest,
            "others have copies on what is the last now"
        );
        [0, 2].into_iter().for_each(retire);
        assert_eq!(channels(&engine).count, 1, "there is one at least to speak of");
    }
}
