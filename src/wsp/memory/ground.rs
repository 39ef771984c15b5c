//! What a process has of a media: units that it claimed, mapped in one range of addresses, and the pages in them.
//!
//! **Claims.** Several processes use one file or device at once: a shell and what it starts, a compiler and its parts. What
//! a process uses of it are *units* (2 MiB, or what the device asks for), and it owns a unit while it holds a lock on
//! those bytes of the file: `F_OFD_SETLK`, first for writing, which only one gets, then for reading, which keeps all
//! others off and lets this process take the same lock again by another descriptor. The lock belongs to the open file,
//! not to a descriptor: what is mapped keeps it, a child that maps it too shares it, and the kernel drops it with
//! the last of them, however they end. So nothing is written to media, nothing is left behind, and a
//! program that closes all descriptors that it does not know takes nothing from itself. A child that lives on with
//! something of its parent's keeps all locks of that open file, those of later claims too: those units are nobody's else
//! until it has ended. So are those that a process had when its descriptor was closed, until it has ended itself: what is mapped
//! keeps the lock that nobody can take back any more.
//!
//! **Memory of the host.** A store to a hole in a file that the host cannot fill kills the process. So a unit's
//! blocks are reserved (`fallocate`) before any of its pages is handed out, and a host without room is a full media; not so
//! one that writes to new places, or reserves nothing. When a unit is idle its blocks go back, and it reads as zeros:
//! `calloc` need not write them.
//!
//! It runs inside of `malloc`: system calls only, no allocation, no message.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null_mut, with_exposed_provenance_mut};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::mm::{madvise, mmap, mmap_anonymous, mprotect, mremap_fixed, munlock, munmap};

use super::descriptors::{self, Descriptor, Identity, identity};
use super::extents::{Extents, Plain, zeroed};
use crate::error::{Error, Result};
use crate::limits::{MEMORY_BYTES_MAX, MEMORY_GROWTH_UNITS_MAX};
use crate::media::{TRACT_LABEL_BYTES, Tract, ofd};

/// What jemalloc counts in, in bytes: a page of its own, whatever the kernel's is.
pub(super) const PAGE: usize = 4096;
const LABEL_PAGES: usize = TRACT_LABEL_BYTES / PAGE;
/// Idle units that are kept beside a half of all: to take a unit costs a few system calls.
const IDLE_UNITS_KEPT: usize = 8;
/// Behind all data: locks there say that a child of the process with this number lives.
const WITNESS_OFFSET: i64 = 1 << 62;

/// What is known of a unit.
#[derive(Clone, Copy, Default)]
pub(super) struct Unit {
    /// Pages handed out.
    pub held: u32,
    pub owned: bool,
    /// The host has its blocks.
    pub reserved: bool,
    /// It reads as zeros, and nothing of it was handed out since.
    pub blank: bool,
    /// Mapped copy-on-write, since a fork: what is stored there is DRAM's.
    pub frozen: bool,
    /// Frozen, and some child that may still read it left no witness: it stays so.
    pub unseen: bool,
    /// Stood aside in DRAM while a fork is under way.
    pub aside: bool,
    /// Its lock is also that of an open file that no descriptor leads to: given up, it would be nobody's.
    pub closed: bool,
}

// SAFETY: a number and truth values, of which 0 is one.
unsafe impl Plain for Unit {}

/// See the file's head.
pub(super) struct Ground {
    pub extents: Extents,
    pub units: Box<[Unit]>,
    pub unit_bytes: usize,
    pub copies_on_write: bool,
    punches_holes: bool,
    /// Addresses for all units; 0 in a child that has not begun anew.
    pub base: usize,
    path: CString,
    pub identity: Identity,
    file: Option<Descriptor>,
    /// Opened while it could be, for a program that gives up its rights.
    spare: Option<Descriptor>,
    /// In a child: what its parent opened for it, should it be unable to.
    pub handed: Option<Descriptor>,
    /// Whose this is: a child that no handler told is another.
    pub process: u32,
    pub owned: usize,
    idle: usize,
    pub frozen: usize,
    /// A descriptor and a page mapped of it, while a fork is under way.
    pub witness: Option<(Descriptor, usize)>,
    /// In a child: what stands here is the parent's.
    pub inherited: bool,
}

/// Whether an allocation succeeded, and with what.
pub(super) struct Granted {
    pub address: usize,
    /// Known to read as zeros.
    pub zeroed: bool,
}

pub(super) fn process() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

impl Ground {
    /// Takes over an open tract and reserves addresses for all of it. ENOMEM where they are not to be had.
    pub fn new(tract: Tract) -> Result<Ground> {
        const SITE: &str = "wsp::memory::ground";
        let failed = |e: Errno, what: &str| Error::io(e.into(), SITE, what, &tract.path);
        let units = tract.bytes.min(MEMORY_BYTES_MAX) / tract.unit_bytes;
        let stat = rustix::fs::fstat(&tract.file).map_err(|e| failed(e, "cannot examine"))?;
        rustix::fs::flock(&tract.file, FlockOperation::NonBlockingLockShared)
            .map_err(|e| failed(e, "cannot lock"))?;
        let no_memory = || failed(Errno::NOMEM, "there is no memory (see ulimit -v) for the tables of");
        let extents = Extents::new(units * (tract.unit_bytes / PAGE)).ok_or_else(no_memory)?;
        let table = zeroed(units).ok_or_else(no_memory)?;
        let path = CString::new(tract.path.as_os_str().as_bytes())
            .map_err(|_| Error::message(libc::EINVAL, SITE, "a path holds no NUL"))?;
        let identity = identity(&stat);
        descriptors::opened(&tract.file);
        let file = Descriptor::new(tract.file, identity).ok_or_else(|| {
            Error::message(libc::EMFILE, SITE, "too many memories are open in this process")
        })?;
        let mut ground = Ground {
            extents,
            units: table,
            unit_bytes: tract.unit_bytes,
            copies_on_write: tract.copies_on_write,
            punches_holes: tract.punches_holes,
            base: 0,
            path,
            identity,
            file: Some(file),
            spare: None,
            handed: None,
            process: process(),
            owned: 0,
            idle: 0,
            frozen: 0,
            witness: None,
            inherited: false,
        };
        ground.base = reserve(ground.bytes(), ground.unit_bytes).map_err(|e| {
            Error::io(e.into(), SITE, "cannot reserve addresses (see ulimit -v) for", &tract.path)
        })?;
        ground.spare = ground.open_again().and_then(|file| Descriptor::new(file, identity));
        Ok(ground)
    }

    /// Addresses of all units.
    pub fn bytes(&self) -> usize {
        self.units.len() * self.unit_bytes
    }

    fn unit_pages(&self) -> usize {
        self.unit_bytes / PAGE
    }

    pub fn unit_address(&self, unit: usize) -> usize {
        self.base + unit * self.unit_bytes
    }

    fn units_of(&self, page: usize, pages: usize) -> std::ops::Range<usize> {
        page / self.unit_pages()..(page + pages).div_ceil(self.unit_pages())
    }

    /// Pages from `page` on that lie in `unit`, of `pages`.
    fn part_in(&self, unit: usize, page: usize, pages: usize) -> (usize, usize) {
        let begin = (unit * self.unit_pages()).max(page);
        let end = ((unit + 1) * self.unit_pages()).min(page + pages);
        (begin, end - begin)
    }

    /// Hands out memory on media; sizes and alignments are whole pages. None where it is full.
    pub fn alloc(&mut self, bytes: usize, align: usize) -> Option<Granted> {
        let (pages, align) = (bytes / PAGE, (align / PAGE).max(1));
        if self.is_foreign() || (self.inherited && !self.begin_anew()) {
            return None;
        }
        loop {
            if let Some(page) = self.extents.alloc(pages, align, self.base / PAGE % align) {
                return self.grant(page, pages);
            }
            if !self.grow(pages, align) {
                return None;
            }
        }
    }

    /// Hands out exactly the pages at an address of ours, behind something that grows. None where they are taken.
    pub fn alloc_at(&mut self, address: usize, bytes: usize) -> Option<Granted> {
        let (page, pages) = ((address - self.base) / PAGE, bytes / PAGE);
        let units = self.units_of(page, pages);
        let usable = |unit: &Unit| unit.owned && !unit.frozen;
        if self.is_foreign() || self.inherited || !self.units.get(units)?.iter().all(usable) {
            return None;
        }
        if !self.extents.alloc_at(page, pages) {
            return None;
        }
        self.grant(page, pages)
    }

    fn grant(&mut self, page: usize, pages: usize) -> Option<Granted> {
        let units = self.units_of(page, pages);
        if !units.clone().all(|unit| self.reserve_unit(unit)) {
            self.extents.release(page, pages);
            self.extents.add(page, pages);
            return None;
        }
        let mut zeroed = true;
        for unit in units {
            let (_, part) = self.part_in(unit, page, pages);
            let unit = &mut self.units[unit];
            self.idle -= (unit.held == 0) as usize;
            unit.held += part as u32;
            zeroed &= unit.blank;
            unit.blank = false;
        }
        Some(Granted { address: self.base + page * PAGE, zeroed })
    }

    /// Takes back what was handed out, in whatever pieces.
    pub fn free(&mut self, address: usize, bytes: usize) {
        let (page, pages) = ((address - self.base) / PAGE, bytes / PAGE);
        let is_foreign = self.is_foreign();
        self.extents.release(page, pages);
        for unit in self.units_of(page, pages) {
            let (begin, part) = self.part_in(unit, page, pages);
            self.units[unit].held -= part as u32;
            if self.units[unit].frozen {
                // Copies of pages that nobody reads any more.
                let at = with_exposed_provenance_mut(self.base + begin * PAGE);
                // SAFETY: private pages of ours whose content nobody wants.
                let _ = unsafe { madvise(at, part * PAGE, Advice::LinuxDontNeed) };
                continue;
            }
            self.extents.add(begin, part);
            if self.units[unit].held == 0 {
                self.idle += 1;
                if is_foreign {
                    continue;
                }
                self.blank(unit);
                if self.idle > self.owned / 2 + IDLE_UNITS_KEPT {
                    self.disown(unit);
                }
            }
        }
    }

    /// Has the host keep blocks for a unit. False where it has none.
    fn reserve_unit(&mut self, unit: usize) -> bool {
        if self.units[unit].reserved || !self.punches_holes {
            return true;
        }
        let offset = (unit * self.unit_bytes) as u64;
        let Some(file) = self.file() else { return false };
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset, self.unit_bytes as u64) {
            // An old network file system reserves nothing: there a full host is a signal.
            Ok(()) | Err(Errno::OPNOTSUPP) => self.units[unit].reserved = true,
            Err(_) => return false,
        }
        true
    }

    /// Gives the blocks of a unit back to the host.
    fn blank(&mut self, unit: usize) {
        // The first holds the label, which a hole would take along.
        if unit == 0 || !self.punches_holes {
            return;
        }
        let at = with_exposed_provenance_mut(self.unit_address(unit));
        // SAFETY: a unit that we own and of which nobody holds a page.
        if unsafe { madvise(at, self.unit_bytes, Advice::LinuxRemove) }.is_ok() {
            self.units[unit].blank = true;
            self.units[unit].reserved = false;
        }
    }

    /// Claims more units, or wins some back. False where there are none.
    fn grow(&mut self, pages: usize, align: usize) -> bool {
        if self.frozen > 0 && self.thaw(false) {
            return true;
        }
        // Units begin at multiples of their size; a larger alignment may need as much again.
        let more = if align > self.unit_pages() { align } else { 0 };
        let needed = (pages + more).div_ceil(self.unit_pages());
        let wanted = (self.owned / 4).min(MEMORY_GROWTH_UNITS_MAX);
        (wanted > needed && self.claim(wanted)) || self.claim(needed)
    }

    /// Claims so many units in one piece, from the begin of the media on.
    fn claim(&mut self, count: usize) -> bool {
        let Some(file) = self.file().map(|f| f.as_raw_fd()) else { return false };
        let mut at = 0;
        while at + count <= self.units.len() {
            if let Some(ours) = self.units[at..at + count].iter().rposition(|unit| unit.owned) {
                at += ours + 1;
                continue;
            }
            match lock_alone(file, self.offset(at), self.offset(count)) {
                Ok(()) => return self.settle(file, at, count),
                Err(None) => return false,
                Err(Some(end)) => at = (end as usize).div_ceil(self.unit_bytes).max(at + 1),
            }
        }
        false
    }

    fn offset(&self, units: usize) -> i64 {
        (units * self.unit_bytes) as i64
    }

    /// Maps units whose lock we have.
    fn settle(&mut self, file: RawFd, at: usize, count: usize) -> bool {
        let blank = self.punches_holes && self.punch(file, at, count);
        if !self.map_shared(at, count) {
            lock(file, libc::F_UNLCK, self.offset(at), self.offset(count));
            return false;
        }
        for unit in at..at + count {
            self.units[unit] = Unit { owned: true, blank: blank && unit != 0, ..Unit::default() };
        }
        self.owned += count;
        self.idle += count;
        self.add_units(at, count);
        true
    }

    /// What earlier processes left in units goes.
    fn punch(&self, file: RawFd, at: usize, count: usize) -> bool {
        let skipped = if at == 0 { self.unit_bytes } else { 0 };
        let (from, bytes) = (at * self.unit_bytes + skipped, count * self.unit_bytes - skipped);
        // SAFETY: the descriptor was found to be ours.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        bytes == 0 || rustix::fs::fallocate(file, mode, from as u64, bytes as u64).is_ok()
    }

    /// The pages of units become free, but for the label's.
    pub fn add_units(&mut self, at: usize, count: usize) {
        let skipped = if at == 0 { LABEL_PAGES } else { 0 };
        let (first, pages) = (at * self.unit_pages(), count * self.unit_pages());
        self.extents.add_unheld(first + skipped, pages - skipped);
    }

    /// Lets go of an idle unit, so that other processes have it.
    fn disown(&mut self, unit: usize) {
        let Some(file) = self.file().map(|f| f.as_raw_fd()) else { return };
        if self.units[unit].closed {
            return;
        }
        let at = with_exposed_provenance_mut(self.unit_address(unit));
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: over a unit of ours of which nobody holds a page.
        if unsafe { mmap_anonymous(at, self.unit_bytes, ProtFlags::empty(), flags) }.is_err() {
            return;
        }
        let (first, pages) = (unit * self.unit_pages(), self.unit_pages());
        self.extents.forget(first, pages);
        self.units[unit] = Unit::default();
        self.owned -= 1;
        self.idle -= 1;
        lock(file, libc::F_UNLCK, self.offset(unit), self.offset(1));
    }

    /// Maps units so that stores reach the media and no child sees them: one by `clone` that nobody told us of would
    /// else write its parent's memory.
    pub fn map_shared(&mut self, at: usize, count: usize) -> bool {
        self.map(at, count, MapFlags::SHARED) && {
            let (start, bytes) = (self.unit_address(at), count * self.unit_bytes);
            let start = with_exposed_provenance_mut(start);
            // SAFETY: a mapping of ours; what its pages hold stays. Huge pages are a hint.
            unsafe {
                let _ = madvise(start, bytes, Advice::LinuxHugepage);
                madvise(start, bytes, Advice::LinuxDontFork).is_ok()
            }
        }
    }

    /// Maps units copy-on-write.
    pub fn map_private(&mut self, at: usize, count: usize) -> bool {
        self.map(at, count, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Where something may be in use already it is mapped elsewhere first and then put in its place, in one step for all
    /// threads: kernels before 6.12 would else take away what is there before they find that the other cannot be had.
    fn map(&mut self, at: usize, count: usize, flags: MapFlags) -> bool {
        let (start, bytes, offset) =
            (self.unit_address(at), count * self.unit_bytes, (at * self.unit_bytes) as u64);
        let Some(file) = self.file() else { return false };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let start = with_exposed_provenance_mut(start);
        // SAFETY: inside of the addresses that were reserved for this; whoever holds pages there finds the same bytes in the
        // new mapping, which is the caller's to see to.
        let map_there =
            |flags| unsafe { mmap(start, bytes, prot, flags | MapFlags::FIXED, file, offset) }.is_ok();
        if !self.copies_on_write {
            return map_there(flags);
        }
        // Of what is private, may be written and is locked (mlockall), the kernel makes copies at once, which would not have what
        // other threads store until it is in its place.
        let is_private = flags.contains(MapFlags::PRIVATE);
        let first = if is_private { ProtFlags::empty() } else { prot };
        // SAFETY: a new mapping, where the kernel likes.
        let Ok(new) = (unsafe { mmap(null_mut(), bytes, first, flags, file, offset) }) else { return false };
        // SAFETY: a mapping that nobody knows of.
        let unlock = || unsafe {
            munlock(new, bytes)?;
            mprotect(new, bytes, MprotectFlags::READ | MprotectFlags::WRITE)
        };
        let is_ready = !is_private || unlock().is_ok();
        // SAFETY: a mapping that nobody knows of, to where it may be, as above.
        if is_ready && unsafe { mremap_fixed(new, bytes, bytes, MremapFlags::MAYMOVE, start) }.is_ok() {
            return true;
        }
        // SAFETY: nobody knows of it.
        let _ = unsafe { munmap(new, bytes) };
        // What was there may be gone already. Its bytes are on the media, unless it is one that is frozen: none of those is
        // mapped again before its bytes were copied there.
        let restored = map_there(MapFlags::SHARED);
        // SAFETY: a mapping of ours; what its pages hold stays.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxDontFork) };
        restored && flags.contains(MapFlags::SHARED)
    }

    /// A second mapping of units, for copies. Null where there is none.
    pub fn map_alias(&mut self, at: usize, count: usize) -> *mut u8 {
        let (bytes, offset) = (count * self.unit_bytes, (at * self.unit_bytes) as u64);
        let Some(file) = self.file() else { return null_mut() };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        unsafe { mmap(null_mut(), bytes, prot, MapFlags::SHARED, file, offset) }
            .map_or(null_mut(), |p| p.cast())
    }

    /// Whether this is a copy in a process that no handler told: a child by `clone` or `_Fork`, which has the parent's open file,
    /// and with that its locks; or one by `vfork`, which has descriptors of its own. It gets nothing and lets go of
    /// nothing: either would be the parent's.
    pub fn is_foreign(&self) -> bool {
        self.process != process()
    }

    /// Our descriptor; opened again where the program closed it or put something else in its place, with the locks of all
    /// that is ours.
    pub fn file(&mut self) -> Option<BorrowedFd<'static>> {
        if self.is_foreign() {
            return None;
        }
        if let Some(file) = self.file.as_ref().and_then(Descriptor::get) {
            return Some(file);
        }
        let file = self.open_or_spare()?;
        for unit in 0..self.units.len() {
            if self.inherited || !self.units[unit].owned {
                continue;
            }
            // Who has it already gets it: it is ours for reading.
            if !lock(file.as_raw_fd(), libc::F_RDLCK, self.offset(unit), self.offset(1)) {
                return None;
            }
            self.units[unit].closed = true;
        }
        self.file = Descriptor::new(file, self.identity);
        self.file.as_ref().and_then(Descriptor::get)
    }

    /// The same file with locks of its own; what was opened earlier where that cannot be done any more, which there is
    /// one of.
    pub fn open_or_spare(&mut self) -> Option<OwnedFd> {
        self.open_again().or_else(|| self.spare.take().and_then(Descriptor::into_file))
    }

    /// The same file with locks of its own.
    pub fn open_again(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let open = |path: &CStr| {
            let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
            descriptors::opened(&file);
            let same = rustix::fs::fstat(&file).is_ok_and(|stat| identity(&stat) == self.identity);
            let free = same && rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
            free.then_some(file)
        };
        // By descriptor where there is one: memory has no name, and a name may be of another file by now.
        let ours = [&self.file, &self.spare, &self.handed];
        let by_descriptor = ours.into_iter().flatten().find_map(|ours| open(ours.name(&mut [0; 32])));
        by_descriptor.or_else(|| open(&self.path))
    }

    /// In a child: closes what it has of its parent's but for the file, which it may still have to open anew by.
    pub fn drop_spares(&mut self) {
        for file in [self.spare.take(), self.handed.take()].into_iter().flatten() {
            drop(file.into_file());
        }
    }

    fn drop_file(&mut self) {
        drop(self.file.take().and_then(Descriptor::into_file));
    }

    /// In a child, at its first allocation: other addresses, a file of its own, no units.
    fn begin_anew(&mut self) -> bool {
        // What was handed down comes second: whoever is forked here has a page of it, and with it all of its locks.
        let opened = self.open_again().and_then(|file| Descriptor::new(file, self.identity));
        let handed = |ground: &Ground| ground.handed.as_ref().is_some_and(|file| file.get().is_some());
        if opened.is_none() && !handed(self) {
            return false;
        }
        let Ok(base) = reserve(self.bytes(), self.unit_bytes) else {
            drop(opened.and_then(Descriptor::into_file));
            return false;
        };
        self.drop_file();
        self.file = opened.or_else(|| self.handed.take());
        self.spare = self.open_again().and_then(|file| Descriptor::new(file, self.identity));
        self.base = base;
        for unit in 0..self.units.len() {
            let Unit { owned, frozen, .. } = std::mem::take(&mut self.units[unit]);
            let (first, pages) = (unit * self.unit_pages(), self.unit_pages());
            match frozen {
                // None of its pages is free; who looks for one may have to look through all units behind it, too.
                true => self.extents.forget_held(first, pages),
                false if owned => self.extents.forget(first, pages),
                false => {}
            }
        }
        (self.owned, self.idle, self.frozen) = (0, 0, 0);
        self.inherited = false;
        true
    }

    /// Whether a child of this process lives that left a witness and neither ended nor executed another program.
    pub fn has_children(&mut self) -> bool {
        let at = witness_offset();
        let Some(file) = self.file() else { return true };
        ofd::conflict(file.as_raw_fd(), at, 1).is_none_or(|found| found.is_some())
    }

    /// Runs of units that satisfy something, as (first, count).
    pub fn runs(&self, wanted: impl Fn(&Unit) -> bool, from: usize) -> Option<(usize, usize)> {
        let first = from + self.units.get(from..)?.iter().position(&wanted)?;
        let count = self.units[first..].iter().take_while(|unit| wanted(unit)).count();
        Some((first, count))
    }

    /// A frozen unit is as if newly claimed: its pages that nobody holds are free.
    pub fn unfreeze(&mut self, unit: usize) {
        self.units[unit].frozen = false;
        self.frozen -= 1;
        self.add_units(unit, 1);
        if self.units[unit].held == 0 {
            self.idle += 1;
            self.blank(unit);
        }
    }

    /// Units cease to be free ground until they are unfrozen.
    pub fn freeze_units(&mut self, at: usize, count: usize) {
        self.extents.withdraw(at * self.unit_pages(), count * self.unit_pages());
        for unit in &mut self.units[at..at + count] {
            unit.frozen = true;
        }
        self.frozen += count;
    }

    /// How much of what is owned the kernel has at hand.
    pub fn resident_bytes(&self) -> usize {
        let page = rustix::param::page_size();
        let mut present = [0u8; 512];
        let step = present.len() * page;
        let mut bytes = 0;
        let owned = (0..self.units.len()).filter(|unit| !self.inherited && self.units[*unit].owned);
        for unit in owned {
            let begin = self.unit_address(unit);
            for at in (begin..begin + self.unit_bytes).step_by(step) {
                let length = step.min(begin + self.unit_bytes - at);
                // SAFETY: a mapping of ours, and a byte for each of its pages.
                let failed =
                    unsafe { libc::mincore(with_exposed_provenance_mut(at), length, present.as_mut_ptr()) };
                if failed == 0 {
                    bytes += present[..length / page].iter().filter(|byte| *byte & 1 == 1).count() * page;
                }
            }
        }
        bytes
    }

    /// Copies the pages of units that are held, where they differ. `from` and `to` are where the units begin.
    ///
    /// # Safety
    ///
    /// Both are mapped as long as the units, and nobody else writes either meanwhile.
    pub unsafe fn copy_held(&self, at: usize, count: usize, from: *const u8, to: *mut u8) {
        let first = at * self.unit_pages();
        for page in 0..count * self.unit_pages() {
            if !self.extents.is_held(first + page) {
                continue;
            }
            // SAFETY: inside of both, by contract.
            unsafe {
                let (from, to) = (from.add(page * PAGE), to.add(page * PAGE));
                if libc::memcmp(from.cast(), to.cast(), PAGE) != 0 {
                    std::ptr::copy_nonoverlapping(from, to, PAGE);
                }
            }
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        if !self.inherited && self.base != 0 {
            // SAFETY: whoever drops it vouches that nothing of it is in use.
            let _ = unsafe { munmap(with_exposed_provenance_mut(self.base), self.bytes()) };
        }
        self.drop_spares();
        self.drop_file();
    }
}

/// Addresses at a multiple of `align` that nothing is mapped at.
fn reserve(bytes: usize, align: usize) -> rustix::io::Result<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: new addresses, chosen by the kernel.
    let start = unsafe { mmap_anonymous(null_mut(), bytes + align, ProtFlags::empty(), flags)? };
    let base = start.expose_provenance().next_multiple_of(align);
    let (head, tail) = (base - start.addr(), align - (base - start.addr()));
    for (at, bytes) in [(start.addr(), head), (base + bytes, tail)] {
        if bytes > 0 {
            // SAFETY: the ends of what was reserved just now.
            let _ = unsafe { munmap(std::ptr::without_provenance_mut(at), bytes) };
        }
    }
    Ok(base)
}

/// Where locks say that a child of this process lives.
pub(super) fn witness_offset() -> i64 {
    WITNESS_OFFSET + i64::from(rustix::process::getpid().as_raw_nonzero().get())
}

/// Sets or removes the lock of a range. False where another has one that keeps it off.
pub(super) fn lock(file: RawFd, kind: i32, start: i64, bytes: i64) -> bool {
    ofd::set(file, kind, start, bytes).is_ok()
}

/// Takes a range that nobody has, and keeps it as one that this process may take again. Else the end of what is in
/// the way, or none where locks cannot be had.
fn lock_alone(file: RawFd, start: i64, bytes: i64) -> std::result::Result<(), Option<i64>> {
    if lock(file, libc::F_WRLCK, start, bytes) {
        // To weaken a lock never fails.
        lock(file, libc::F_RDLCK, start, bytes);
        return Ok(());
    }
    match ofd::conflict(file, start, bytes) {
        None => Err(None),
        // It went meanwhile: the same place again, but for one unit, so that this ends.
        Some(None) => Err(Some(start)),
        Some(Some(end)) => Err(Some(end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wsp::memory::tests::{alone, clone, fork};

    fn ground(units: usize) -> Ground {
        Ground::new(Tract::memfd((units << 21) as u64).unwrap()).unwrap()
    }

    #[test]
    fn tables_that_there_is_no_memory_for_are_an_error() {
        let _alone = alone();
        // In a child: a limit is for all of a process.
        fork(
            || {
                let tract = Tract::memfd(MEMORY_BYTES_MAX as u64).unwrap();
                // The tables take 12 GiB of addresses.
                let limit = libc::rlimit { rlim_cur: 8 << 30, rlim_max: 8 << 30 };
                // SAFETY: a limit of this process.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
                Ground::new(tract).err().is_some_and(|e| e.errno() == libc::ENOMEM)
            },
            || {},
        );
    }

    #[test]
    fn two_share_one_media_and_neither_gets_what_the_other_has() {
        let _alone = alone();
        let path = std::env::temp_dir().join(format!("lode-ground-{}", std::process::id()));
        let open = || Ground::new(Tract::open(&path, Some(16 << 20)).unwrap()).unwrap();
        let (mut one, mut other) = (open(), open());
        std::fs::remove_file(&path).unwrap();
        let mut taken = std::collections::HashSet::new();
        let mut blocks = [Vec::new(), Vec::new()];
        loop {
            let a = one.alloc(1 << 20, PAGE);
            let b = other.alloc(1 << 20, PAGE);
            if a.is_none() && b.is_none() {
                break;
            }
            for (which, got, base) in [(0, a, one.base), (1, b, other.base)] {
                if let Some(got) = got {
                    assert!(taken.insert(got.address - base), "a place was given twice");
                    blocks[which].push(got.address);
                }
            }
        }
        // The label's unit has room for one.
        assert_eq!(taken.len(), 15);
        for address in blocks[0].drain(..) {
            one.free(address, 1 << 20);
        }
        drop(one);
        assert!(other.alloc(1 << 20, PAGE).is_some(), "what one let go of, the other gets");
    }

    #[test]
    fn what_is_blank_reads_as_zeros_and_what_is_not_says_so() {
        let _alone = alone();
        let mut ground = ground(4);
        let got = ground.alloc(2 << 20, 2 << 20).unwrap();
        assert!(got.zeroed);
        // SAFETY: handed out just now, so long.
        unsafe { std::ptr::write_bytes(got.address as *mut u8, 7, 2 << 20) };
        ground.free(got.address, 2 << 20);
        let small = ground.alloc(PAGE, PAGE).unwrap();
        let again = ground.alloc(2 << 20, 2 << 20).unwrap();
        assert!(again.zeroed);
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(again.address as *const u8, 2 << 20) };
        assert!(bytes.iter().all(|b| *b == 0));
        let next = ground.alloc(PAGE, PAGE).unwrap();
        assert!(!next.zeroed, "a unit of which something was handed out");
        ground.free(small.address, PAGE);
        ground.free(next.address, PAGE);
    }

    #[test]
    fn a_descriptor_that_was_closed_is_opened_again_with_its_locks() {
        let _alone = alone();
        let mut ground = ground(4);
        let held = ground.alloc(PAGE, PAGE).unwrap();
        let file = ground.file.as_ref().unwrap().get().unwrap().as_raw_fd();
        let spare = ground.open_again().unwrap();
        // The program closes what it does not know, and opens something of its own there.
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        // SAFETY: the number is ours to lose in this test.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), file) }, file);
        assert!(!lock(spare.as_raw_fd(), libc::F_WRLCK, 0, 1 << 21), "what is mapped keeps the lock");
        // Memory has no name, but what was opened to spare leads there.
        let again = ground.file().unwrap().as_raw_fd();
        assert!(again != file && !lock(spare.as_raw_fd(), libc::F_WRLCK, 0, 1 << 21));
        // Without either there is no way back: full, and nothing else breaks.
        ground.drop_spares();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), again) }, again);
        assert!(ground.file().is_none());
        assert!(ground.alloc(64 << 20, PAGE).is_none());
        ground.free(held.address, PAGE);
        // SAFETY: opened above.
        let _ = unsafe { [libc::close(file), libc::close(again)] };
    }

    #[test]
    fn units_whose_descriptor_was_closed_are_not_lost() {
        let _alone = alone();
        let mut ground = ground(64);
        let held: Vec<_> = (0..40).map(|_| ground.alloc(2 << 20, 2 << 20).unwrap().address).collect();
        let file = ground.file.as_ref().unwrap().get().unwrap().as_raw_fd();
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        // SAFETY: the number is ours to lose in this test.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), file) }, file);
        held.iter().for_each(|at| ground.free(*at, 2 << 20));
        let again: Vec<_> = (0..60).map_while(|_| ground.alloc(2 << 20, 2 << 20)).collect();
        assert_eq!(again.len(), 60, "some are nobody's");
        // SAFETY: opened above.
        let _ = unsafe { libc::close(file) };
    }

    #[test]
    fn a_child_that_no_handler_told_takes_nothing_and_lets_go_of_nothing() {
        let _alone = alone();
        let mut ground = ground(64);
        let held: Vec<_> = (0..40).map(|_| ground.alloc(2 << 20, 2 << 20).unwrap().address).collect();
        let owned = |ground: &Ground| -> Vec<bool> {
            let other = ground.open_again().unwrap();
            let free =
                |unit| ofd::conflict(other.as_raw_fd(), ground.offset(unit), ground.offset(1)) == Some(None);
            (0..ground.units.len()).map(|unit| !free(unit)).collect()
        };
        let before = owned(&ground);
        assert!(before.iter().filter(|owned| **owned).count() >= 40);
        assert!(clone(|| {
            let nothing = ground.alloc(PAGE, PAGE).is_none() && ground.alloc(60 << 20, PAGE).is_none();
            let nothing = nothing && ground.alloc_at(held[39] + (2 << 20), PAGE).is_none();
            held.iter().for_each(|at| ground.free(*at, 2 << 20));
            nothing && ground.file().is_none() && !ground.thaw(true)
        }));
        assert_eq!(owned(&ground), before);
        assert!(ground.alloc(PAGE, PAGE).is_some());
    }

    #[test]
    fn two_memories_whose_descriptors_were_closed_do_not_take_each_others() {
        let _alone = alone();
        let path = std::env::temp_dir().join(format!("lode-numbers-{}", std::process::id()));
        let open = || Ground::new(Tract::open(&path, Some(16 << 20)).unwrap()).unwrap();
        let (mut one, mut other) = (open(), open());
        let number = |ground: &Ground| ground.file.as_ref().unwrap().get().unwrap().as_raw_fd();
        let was = number(&one);
        assert!(one.alloc(PAGE, PAGE).is_some() && other.alloc(PAGE, PAGE).is_some());
        for ground in [&one, &other] {
            // SAFETY: the numbers are ours to lose in this test.
            assert_eq!(unsafe { libc::close(number(ground)) }, 0);
        }
        // The next that is opened is the other's, and gets the number of the one.
        assert_eq!(other.file().unwrap().as_raw_fd(), was);
        assert!(one.file().is_some() && number(&one) != number(&other));
        let mut taken = std::collections::HashSet::new();
        while let (Some(a), Some(b)) = (one.alloc(1 << 20, PAGE), other.alloc(1 << 20, PAGE)) {
            assert!(taken.insert(a.address - one.base) && taken.insert(b.address - other.base));
        }
        assert!(taken.len() >= 6);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn where_all_memory_is_locked_a_private_mapping_has_what_is_stored_until_it_is_in_its_place() {
        let _alone = alone();
        // In a child: all of a process is locked.
        fork(
            || {
                let mut ground = ground(4);
                let got = ground.alloc(2 << 20, 2 << 20).unwrap();
                let unit = (got.address - ground.base) >> 21;
                let alias = ground.map_alias(unit, 1);
                // SAFETY: it takes no memory of ours.
                assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
                assert!(ground.map_private(unit, 1));
                // SAFETY: handed out above, and a mapping of the same bytes.
                unsafe {
                    alias.write(7);
                    (got.address as *const u8).read() == 7
                }
            },
            || {},
        );
    }

    #[test]
    fn a_mapping_that_cannot_be_had_leaves_what_is_there() {
        let _alone = alone();
        let mut ground = ground(4);
        let got = ground.alloc(2 << 20, 2 << 20).unwrap();
        let at = got.address as *mut u8;
        // SAFETY: handed out just now, so long.
        unsafe { std::ptr::write_bytes(at, 7, 2 << 20) };
        // A count that no address space has room for, in the place of memory that is not to be had.
        assert!(!ground.map(
            (got.address - ground.base) >> 21,
            1 << 27,
            MapFlags::PRIVATE | MapFlags::NORESERVE
        ));
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(at, 2 << 20) }.iter().all(|byte| *byte == 7));
    }
}
