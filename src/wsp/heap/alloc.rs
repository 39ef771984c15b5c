//! Which bytes are whose: the allocator, all of it in DRAM, made anew from the descriptors at every opening.
//!
//! Small objects lie in **runs**, chunks of one class; larger ones take whole chunks. Of each object there are three
//! bits: *taken* (nobody else gets it), *live* (the media say that it is in use) and *claimed* (a commit under way makes
//! it live, or frees it). Live bits are those of the sealed words on the media, and change with them, under the lock of
//! the run: so what is stored of one word never goes back.
//!
//! A thread takes small objects from runs of its **shard**, which others rarely touch; a run that became full is nobody's
//! until something of it is given back, and then waits in the list of its class. Runs without objects are found when
//! chunks are wanted and there are none.
//!
//! Order of locks: shard, list of a class, run, large objects, free chunks. Nobody has two shards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;

use super::format::{CHUNK, CLASSES, Chunk, Keys, Layout, MAP_WORDS, SEALED_BITS, UNIT, map_words, objects};
use super::lane::own;
use super::{IN_RECORD, Offset, invalid};
use crate::error::{Error, Result};
use crate::media::{Addr, Fault, Media};
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::AtomicU64;

/// Chunks whose locks are made together, at the first use of one of them.
const GROUP: usize = 1024;
const ALL: u64 = (1 << SEALED_BITS) - 1;

/// Bits of up to 48 objects.
#[derive(Clone, Copy, Default)]
struct Word {
    taken: u64,
    live: u64,
    claimed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    /// Some shard takes from it.
    Shard,
    /// In the list of its class, or on the way there.
    Listed,
    /// Full; in no list.
    Nobody,
}

struct Run {
    class: u8,
    /// The descriptor says that it is a run of this class.
    described: bool,
    owner: Owner,
    free: u32,
    words: Box<[Word]>,
}

struct Large {
    chunks: u32,
    live: bool,
    claimed: bool,
}

/// One chunk's run, if it is one.
type Slot = Mutex<Option<Box<Run>>>;
/// The run of each class that a thread takes from.
type Shard = Mutex<[Option<u32>; CLASSES.len()]>;

/// An object, by where it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Object {
    Small { class: u8, chunk: u32, index: u32 },
    Large { chunk: u32, chunks: u32 },
}

impl Object {
    pub fn bytes(self) -> u64 {
        match self {
            Object::Small { class, .. } => CLASSES[class as usize] as u64,
            Object::Large { chunks, .. } => chunks as u64 * CHUNK,
        }
    }
}

/// What of an object a commit may claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// Reserved: it is to be live.
    Publish,
    /// Live: it is to be free.
    Free,
}

/// What is free and what is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Bytes that objects can have.
    pub capacity: u64,
    /// Objects in use, those reserved not counted.
    pub objects: u64,
    /// Bytes that these take, rounded up as they are.
    pub used: u64,
}

/// See the file's head.
pub(super) struct Allocator {
    layout: Layout,
    keys: Keys,
    groups: Box<[OnceLock<Box<[Slot; GROUP]>>]>,
    larges: Mutex<BTreeMap<u32, Large>>,
    extents: Mutex<Extents>,
    /// Free chunks with bad descriptors: nobody gets them until the heap is opened again.
    bad: Mutex<Vec<u32>>,
    lists: [Mutex<Vec<u32>>; CLASSES.len()],
    shards: Box<[CachePadded<Shard>]>,
    live_objects: AtomicU64,
    live_bytes: AtomicU64,
}

/// The class of a size; none where it takes whole chunks.
pub(super) fn class_of(bytes: u64) -> Option<u8> {
    let class = CLASSES.partition_point(|&size| (size as u64) < bytes);
    (class < CLASSES.len()).then_some(class as u8)
}

impl Allocator {
    /// With every chunk taken: [`admit_free`](Allocator::admit_free) and its kin tell what they are.
    pub fn new(layout: Layout, keys: Keys) -> Allocator {
        let groups = layout.chunks.div_ceil(GROUP as u64);
        let shards = (0..layout.shape.lanes).map(|_| CachePadded::new(Mutex::new([None; CLASSES.len()])));
        Allocator {
            layout,
            keys,
            groups: (0..groups).map(|_| OnceLock::new()).collect(),
            larges: Mutex::new(BTreeMap::new()),
            extents: Mutex::new(Extents::default()),
            bad: Mutex::new(Vec::new()),
            lists: std::array::from_fn(|_| Mutex::new(Vec::new())),
            shards: shards.collect(),
            live_objects: AtomicU64::new(0),
            live_bytes: AtomicU64::new(0),
        }
    }

    /// At opening: these chunks are nobody's.
    pub fn admit_free(&self, chunk: u32, chunks: u32) {
        self.extents.lock().give(chunk, chunks);
    }

    /// At opening: a run whose descriptor has these bits, not all of them zero.
    pub fn admit_run(&self, chunk: u32, class: u8, live: &[u64]) {
        let mut run = Run::new(class);
        run.described = true;
        let mut used = 0;
        for (word, &live) in run.words.iter_mut().zip(live) {
            *word = Word { taken: live, live, claimed: 0 };
            used += live.count_ones();
        }
        run.free -= used;
        run.owner = if run.free > 0 { Owner::Listed } else { Owner::Nobody };
        if run.free > 0 {
            self.lists[class as usize].lock().push(chunk);
        }
        *self.slot(chunk).lock() = Some(Box::new(run));
        self.count(used as i64, used as i64 * CLASSES[class as usize] as i64);
    }

    /// At opening: an object of whole chunks.
    pub fn admit_large(&self, chunk: u32, chunks: u32) {
        self.larges.lock().insert(chunk, Large { chunks, live: true, claimed: false });
        self.count(1, chunks as i64 * CHUNK as i64);
    }

    pub fn usage(&self) -> Usage {
        Usage {
            capacity: self.layout.chunks * CHUNK,
            objects: self.live_objects.load(Relaxed),
            used: self.live_bytes.load(Relaxed),
        }
    }

    fn count(&self, objects: i64, bytes: i64) {
        self.live_objects.fetch_add(objects as u64, Relaxed);
        self.live_bytes.fetch_add(bytes as u64, Relaxed);
    }

    fn slot(&self, chunk: u32) -> &Slot {
        let group = self.groups[chunk as usize / GROUP].get_or_init(|| {
            let slots: Vec<Slot> = (0..GROUP).map(|_| Mutex::new(None)).collect();
            slots.try_into().unwrap_or_else(|_| unreachable!("as many as said"))
        });
        &group[chunk as usize % GROUP]
    }

    // -----------------------------------------------------------------------------------------------
    // Reserving and giving back

    /// An object of so many bytes at least, for the caller alone, until it is claimed or given back. ENOSPC.
    pub fn reserve<M: Media>(&self, media: &M, bytes: u64) -> Result<Offset> {
        match class_of(bytes) {
            Some(class) => self.reserve_small(media, class),
            None => self.reserve_large(bytes),
        }
    }

    fn full(&self, bytes: u64) -> Error {
        let Usage { capacity, used, .. } = self.usage();
        let message = format!(
            "the heap has no room for {bytes} bytes in one piece ({used} of {capacity} bytes are in use): free \
             something, or make a larger heap"
        );
        Error::message(libc::ENOSPC, "heap::reserve", message)
    }

    fn reserve_small<M: Media>(&self, media: &M, class: u8) -> Result<Offset> {
        let number = own(self.shards.len());
        let mut reclaimed = false;
        loop {
            let mut shard = self.shards[number].lock();
            if let Some(at) = self.take_from(&mut shard, class) {
                return Ok(at);
            }
            // Not in the condition, where the lock would be held for all that follows.
            let taken = self.extents.lock().take(1);
            if let Some(chunk) = taken {
                if let Err(Fault { at }) = self.wipe(media, chunk) {
                    tracing::warn!("a chunk of the heap stays unused: its descriptor is bad at {:#x}", at.0);
                    self.bad.lock().push(chunk);
                    continue;
                }
                *self.slot(chunk).lock() = Some(Box::new(Run::new(class)));
                shard[class as usize] = Some(chunk);
                continue;
            }
            drop(shard);
            // The last free objects may be in runs that others take from. These are few; to reclaim is to look at all that wait.
            let mut shards = self.shards.iter();
            if let Some(at) = shards.find_map(|shard| self.take_from(&mut shard.lock(), class)) {
                return Ok(at);
            }
            if reclaimed || !self.reclaim() {
                return Err(self.full(CLASSES[class as usize] as u64));
            }
            reclaimed = true;
        }
    }

    /// From the shard's own run, or from one that waits in the list.
    fn take_from(&self, shard: &mut [Option<u32>; CLASSES.len()], class: u8) -> Option<Offset> {
        loop {
            let waiting = || self.lists[class as usize].lock().pop();
            let chunk = shard[class as usize].or_else(waiting)?;
            shard[class as usize] = Some(chunk);
            let mut slot = self.slot(chunk).lock();
            let run = slot.as_mut().expect("what a shard or a list names is a run");
            run.owner = Owner::Shard;
            if let Some(index) = run.take() {
                return Some(self.offset(chunk, class, index));
            }
            run.owner = Owner::Nobody;
            shard[class as usize] = None;
        }
    }

    /// Words of a chunk that is about to be a run say that nothing of it is in use, unless they were damaged since.
    fn wipe<M: Media>(&self, media: &M, chunk: u32) -> Result<(), Fault> {
        let mut flushed = None;
        for word in 1..=MAP_WORDS {
            let at = self.layout.word(chunk, word);
            let empty = self.keys.seal(at, 0);
            if media.load64(at)? != empty {
                flushed = Some(media.flush(media.store64(at, empty)?));
            }
        }
        if let Some(flushed) = flushed {
            media.fence(flushed);
        }
        Ok(())
    }

    fn reserve_large(&self, bytes: u64) -> Result<Offset> {
        let chunks = u32::try_from(bytes.div_ceil(CHUNK)).map_err(|_| self.full(bytes))?;
        let take = || self.extents.lock().take(chunks);
        let chunk = take().or_else(|| self.reclaim().then(take).flatten()).ok_or_else(|| self.full(bytes))?;
        self.larges.lock().insert(chunk, Large { chunks, live: false, claimed: false });
        Ok(Offset(self.layout.chunk(chunk)))
    }

    fn offset(&self, chunk: u32, class: u8, index: u32) -> Offset {
        Offset(self.layout.chunk(chunk) + index as u64 * CLASSES[class as usize] as u64)
    }

    /// What was reserved and not claimed is nobody's again.
    pub fn give_back(&self, at: Offset) -> Result<()> {
        let object = self.find(at)?;
        match object {
            Object::Small { class, chunk, index } => {
                let is_reserved = |word: &Word, bit| word.taken & !word.live & !word.claimed & bit != 0;
                self.give_small(class, chunk, index, is_reserved).ok_or_else(|| not_reserved(at))
            }
            Object::Large { chunk, .. } => {
                let mut larges = self.larges.lock();
                let found = larges.get(&chunk).filter(|l| !l.live && !l.claimed).map(|l| l.chunks);
                let chunks = found.ok_or_else(|| not_reserved(at))?;
                larges.remove(&chunk);
                drop(larges);
                self.extents.lock().give(chunk, chunks);
                Ok(())
            }
        }
    }

    /// An object of a run is nobody's, if it is still there and `may` says so of its bits. Asked and done under one lock:
    /// of several who give back the same object one does.
    fn give_small(
        &self,
        class: u8,
        chunk: u32,
        index: u32,
        may: impl FnOnce(&Word, u64) -> bool,
    ) -> Option<()> {
        let mut slot = self.slot(chunk).lock();
        let run = slot.as_mut().filter(|run| run.class == class)?;
        let (word, bit) = Run::place(index);
        let word = &mut run.words[word];
        if !may(word, bit) {
            return None;
        }
        debug_assert_eq!(word.live & bit, 0);
        word.taken &= !bit;
        word.claimed &= !bit;
        run.free += 1;
        if run.owner == Owner::Nobody {
            run.owner = Owner::Listed;
            // A list is locked before a run: who looks there meanwhile finds it later.
            drop(slot);
            self.lists[class as usize].lock().push(chunk);
        }
        Some(())
    }

    /// Makes free chunks of runs without objects. Whether there were any.
    fn reclaim(&self) -> bool {
        let mut freed = Vec::new();
        let mut is_empty = |chunk: &u32| {
            let mut slot = self.slot(*chunk).lock();
            let empty = slot.as_ref().is_some_and(|run| run.free == objects(run.class));
            if empty {
                *slot = None;
                freed.push(*chunk);
            }
            empty
        };
        for shard in &self.shards {
            for run in shard.lock().iter_mut() {
                *run = run.filter(|chunk| !is_empty(chunk));
            }
        }
        for list in &self.lists {
            list.lock().retain(|chunk| !is_empty(chunk));
        }
        let mut extents = self.extents.lock();
        freed.iter().for_each(|&chunk| extents.give(chunk, 1));
        !freed.is_empty()
    }

    // -----------------------------------------------------------------------------------------------
    // Objects

    /// The object that begins here. EINVAL where none does.
    pub fn find(&self, at: Offset) -> Result<Object> {
        match self.around(at.0) {
            Some((object, begin)) if begin == at.0 => Ok(object),
            _ => Err(invalid("heap::find", format!("no object begins at {:#x}", at.0))),
        }
    }

    /// The object, taken or live, that an address is in, and where it begins.
    fn around(&self, at: u64) -> Option<(Object, u64)> {
        let chunk = self.layout.chunk_of(at)?;
        if let Some(run) = self.slot(chunk).lock().as_ref() {
            let size = CLASSES[run.class as usize] as u64;
            let index = ((at - self.layout.chunk(chunk)) / size) as u32;
            let (word, bit) = Run::place(index);
            let taken = index < objects(run.class) && run.words[word].taken & bit != 0;
            let object = Object::Small { class: run.class, chunk, index };
            return taken.then(|| (object, self.offset(chunk, run.class, index).0));
        }
        let larges = self.larges.lock();
        let (&first, large) = larges.range(..=chunk).next_back()?;
        let object = Object::Large { chunk: first, chunks: large.chunks };
        (chunk - first < large.chunks).then(|| (object, self.layout.chunk(first)))
    }

    /// Where the object begins that these bytes lie in, if it is live and nobody frees it.
    pub fn live_around(&self, at: u64, bytes: u64) -> Option<Offset> {
        let (object, begin) = self.around(at)?;
        let inside = at.checked_add(bytes)? <= begin + object.bytes();
        (inside && self.is_live(object)).then_some(Offset(begin))
    }

    /// Whether an object begins here that is live, and that nobody frees.
    pub fn is_live_at(&self, at: Offset) -> bool {
        self.find(at).is_ok_and(|object| self.is_live(object))
    }

    fn is_live(&self, object: Object) -> bool {
        match object {
            Object::Small { class, chunk, index } => {
                let live = |word: &mut Word, bit| word.live & !word.claimed & bit != 0;
                self.on_bit(class, chunk, index, live).unwrap_or(false)
            }
            Object::Large { chunk, chunks } => {
                self.larges.lock().get(&chunk).is_some_and(|l| l.chunks == chunks && l.live && !l.claimed)
            }
        }
    }

    /// What `run` makes of an object's bits, under the lock of its run; none where the object is gone.
    fn on_bit<R>(
        &self,
        class: u8,
        chunk: u32,
        index: u32,
        run: impl FnOnce(&mut Word, u64) -> R,
    ) -> Option<R> {
        let mut slot = self.slot(chunk).lock();
        let found = slot.as_mut().filter(|run| run.class == class)?;
        let (word, bit) = Run::place(index);
        let word = &mut found.words[word];
        (word.taken & bit != 0).then(|| run(word, bit))
    }

    /// For a commit of the caller: EINVAL where it is not what the claim needs, EBUSY where another commit has it.
    pub fn claim(&self, at: Offset, claim: Claim) -> Result<Object> {
        let object = self.find(at)?;
        let judge = |live: bool, claimed: bool| match (claim, live, claimed) {
            (Claim::Publish, false, false) | (Claim::Free, true, false) => Ok(()),
            (Claim::Publish, false, true) | (Claim::Free, true, true) => {
                let message = format!("the object at {:#x} is in two commits, or twice in one", at.0);
                Err(Error::message(libc::EBUSY, "heap::claim", message))
            }
            (Claim::Publish, true, _) => Err(not_reserved(at)),
            (Claim::Free, false, _) => {
                let message = format!("the object at {:#x} was never published: give it back instead", at.0);
                Err(invalid("heap::claim", message))
            }
        };
        match object {
            Object::Small { class, chunk, index } => {
                let claimed = self.on_bit(class, chunk, index, |word, bit| {
                    judge(word.live & bit != 0, word.claimed & bit != 0)?;
                    word.claimed |= bit;
                    Ok(())
                });
                claimed.unwrap_or_else(|| Err(not_reserved(at)))?;
            }
            Object::Large { chunk, chunks } => {
                let mut larges = self.larges.lock();
                let large = larges.get_mut(&chunk).filter(|l| l.chunks == chunks);
                let large = large.ok_or_else(|| not_reserved(at))?;
                judge(large.live, large.claimed)?;
                large.claimed = true;
            }
        }
        Ok(object)
    }

    /// The commit did not come about.
    pub fn unclaim(&self, object: Object) {
        match object {
            Object::Small { class, chunk, index } => {
                let unclaim = |word: &mut Word, bit: u64| word.claimed &= !bit;
                self.on_bit(class, chunk, index, unclaim).expect("what is claimed stays");
            }
            Object::Large { chunk, .. } => {
                if let Some(large) = self.larges.lock().get_mut(&chunk) {
                    large.claimed = false;
                }
            }
        }
    }

    /// The record that says so is durable: the object is live, or free. `stored` is told of words that are stored, and
    /// not written back.
    pub fn settle_claim<M: Media>(
        &self,
        media: &M,
        object: Object,
        claim: Claim,
        stored: &mut dyn FnMut(Addr),
    ) -> Result<(), Fault> {
        let live = claim == Claim::Publish;
        match object {
            Object::Small { class, chunk, index } => {
                self.store_bit(media, chunk, index, live, stored)?;
                if !live {
                    self.give_small(class, chunk, index, |_, _| true).expect("what is claimed stays");
                }
            }
            Object::Large { chunk, chunks } => {
                let described = if live { Chunk::Large { chunks } } else { Chunk::Free };
                let mut larges = self.larges.lock();
                self.describe(media, chunk, described, stored)?;
                let large = larges.get_mut(&chunk).expect("what is claimed stays");
                (large.live, large.claimed) = (live, false);
                if !live {
                    larges.remove(&chunk);
                    drop(larges);
                    self.extents.lock().give(chunk, chunks);
                }
            }
        }
        let sign = if live { 1 } else { -1 };
        self.count(sign, sign * object.bytes() as i64);
        Ok(())
    }

    fn store_bit<M: Media>(
        &self,
        media: &M,
        chunk: u32,
        index: u32,
        live: bool,
        stored: &mut dyn FnMut(Addr),
    ) -> Result<(), Fault> {
        let mut slot = self.slot(chunk).lock();
        let run = slot.as_mut().expect("what is claimed stays");
        if !run.described {
            self.describe(media, chunk, Chunk::Run { class: run.class }, stored)?;
            run.described = true;
        }
        let (place, bit) = Run::place(index);
        let word = &mut run.words[place];
        if live {
            word.live |= bit;
            word.claimed &= !bit;
        } else {
            // Claimed until it is given back: nobody may find it meanwhile.
            word.live &= !bit;
        }
        let at = self.layout.word(chunk, 1 + place);
        media.store64(at, self.keys.seal(at, word.live))?.redundant(IN_RECORD);
        stored(at);
        Ok(())
    }

    fn describe<M: Media>(
        &self,
        media: &M,
        chunk: u32,
        what: Chunk,
        stored: &mut dyn FnMut(Addr),
    ) -> Result<(), Fault> {
        let at = self.layout.word(chunk, 0);
        media.store64(at, self.keys.seal(at, what.encode()))?.redundant(IN_RECORD);
        stored(at);
        Ok(())
    }

    // -----------------------------------------------------------------------------------------------
    // For the check

    /// Every live object, by address.
    pub fn live(&self) -> Vec<(Offset, Object)> {
        let mut all = Vec::new();
        for chunk in 0..self.layout.chunks as u32 {
            if let Some(run) = self.slot_if_used(chunk).as_ref().and_then(|s| s.as_ref()) {
                for index in (0..objects(run.class)).filter(|&index| run.is_live(index)) {
                    let object = Object::Small { class: run.class, chunk, index };
                    all.push((self.offset(chunk, run.class, index), object));
                }
            }
        }
        for (&chunk, large) in self.larges.lock().iter().filter(|(_, large)| large.live) {
            all.push((Offset(self.layout.chunk(chunk)), Object::Large { chunk, chunks: large.chunks }));
        }
        all.sort_unstable_by_key(|(at, _)| *at);
        all
    }

    fn slot_if_used(&self, chunk: u32) -> Option<crate::sync::primitive::MutexGuard<'_, Option<Box<Run>>>> {
        self.groups[chunk as usize / GROUP].get().map(|group| group[chunk as usize % GROUP].lock())
    }

    /// What a chunk's descriptor has to say, and its bits: none where it is not looked at.
    pub fn wanted(&self, chunk: u32) -> Option<(Chunk, Vec<u64>)> {
        if let Some(run) = self.slot_if_used(chunk).as_ref().and_then(|s| s.as_ref()) {
            let bits = run.words.iter().map(|w| w.live).collect();
            return run.described.then_some((Chunk::Run { class: run.class }, bits));
        }
        let larges = self.larges.lock();
        let large = larges.get(&chunk).filter(|large| large.live)?;
        Some((Chunk::Large { chunks: large.chunks }, Vec::new()))
    }

    /// That every chunk is one thing: in a free extent, a run, or part of a large object; that counts are those of the
    /// bits; that each run with room is where it is found. Commits and reservations stand still meanwhile.
    pub fn check(&self, findings: &mut Vec<String>) {
        let mut uses: BTreeMap<u32, (u32, &str)> = BTreeMap::new();
        let mut note = |chunk: u32, chunks: u32, what: &'static str, findings: &mut Vec<String>| {
            let before = uses.range(..chunk + chunks).next_back();
            if let Some((other, (n, is))) = before.filter(|&(other, (n, _))| other + n > chunk) {
                findings.push(format!("chunk {chunk} is {what}, and chunk {other} ({n} chunks) is {is}"));
            }
            uses.insert(chunk, (chunks, what));
        };
        let mut known: BTreeSet<u32> = BTreeSet::new();
        for list in &self.lists {
            for &chunk in list.lock().iter() {
                if !known.insert(chunk) {
                    findings.push(format!("the run of chunk {chunk} waits in two lists"));
                }
            }
        }
        for shard in &self.shards {
            for &chunk in shard.lock().iter().flatten() {
                if !known.insert(chunk) {
                    findings.push(format!("the run of chunk {chunk} has two owners"));
                }
            }
        }
        let (mut live, mut bytes, mut chunks) = (0, 0, 0u64);
        for chunk in 0..self.layout.chunks as u32 {
            let slot = self.slot_if_used(chunk);
            let Some(run) = slot.as_ref().and_then(|s| s.as_ref()) else { continue };
            note(chunk, 1, "a run", findings);
            chunks += 1;
            let taken: u32 = run.words.iter().map(|w| w.taken.count_ones()).sum();
            let size = CLASSES[run.class as usize] as u64;
            let objects_live: u32 = run.words.iter().map(|w| w.live.count_ones()).sum();
            live += objects_live as u64;
            bytes += objects_live as u64 * size;
            if run.words.iter().any(|w| w.live & !w.taken != 0 || w.claimed & !w.taken != 0) {
                findings.push(format!("an object of chunk {chunk} is live and not taken"));
            }
            if taken + run.free != objects(run.class) {
                findings.push(format!("chunk {chunk}: {taken} objects taken and {} free", run.free));
            }
            if (run.owner == Owner::Nobody) == known.contains(&chunk) {
                findings.push(format!("the run of chunk {chunk} cannot be found, or though it is full"));
            }
        }
        for (&chunk, large) in self.larges.lock().iter() {
            note(chunk, large.chunks, "a large object", findings);
            chunks += large.chunks as u64;
            if large.live {
                live += 1;
                bytes += large.chunks as u64 * CHUNK;
            }
        }
        for &chunk in self.bad.lock().iter() {
            note(chunk, 1, "bad", findings);
            chunks += 1;
        }
        let extents = self.extents.lock();
        for (&chunk, &n) in &extents.by_place {
            note(chunk, n, "free", findings);
            chunks += n as u64;
        }
        if extents.by_place.len() != extents.by_size.len() {
            findings.push("free chunks are counted in two ways that differ".to_owned());
        }
        if chunks != self.layout.chunks {
            findings.push(format!("{chunks} of {} chunks are accounted for", self.layout.chunks));
        }
        let usage = self.usage();
        if (live, bytes) != (usage.objects, usage.used) {
            findings.push(format!("{live} objects of {bytes} bytes are live, counted are {usage:?}"));
        }
    }
}

fn not_reserved(at: Offset) -> Error {
    invalid("heap::claim", format!("the object at {:#x} is not reserved", at.0))
}

impl Run {
    fn new(class: u8) -> Run {
        let words = vec![Word::default(); map_words(class)].into_boxed_slice();
        Run { class, described: false, owner: Owner::Shard, free: objects(class), words }
    }

    fn place(index: u32) -> (usize, u64) {
        ((index / SEALED_BITS) as usize, 1 << (index % SEALED_BITS))
    }

    fn is_live(&self, index: u32) -> bool {
        let (word, bit) = Run::place(index);
        self.words[word].live & bit != 0
    }

    /// The first free object becomes taken.
    fn take(&mut self) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let objects = objects(self.class);
        for (n, word) in self.words.iter_mut().enumerate() {
            let bit = (!word.taken & ALL).trailing_zeros();
            let index = n as u32 * SEALED_BITS + bit;
            if bit < SEALED_BITS && index < objects {
                word.taken |= 1 << bit;
                self.free -= 1;
                return Some(index);
            }
        }
        unreachable!("free objects are counted with their bits")
    }
}

/// Free chunks: runs of them by place and by size.
#[derive(Default)]
struct Extents {
    by_place: BTreeMap<u32, u32>,
    by_size: BTreeSet<(u32, u32)>,
}

impl Extents {
    /// The first chunks of the smallest piece that is large enough.
    fn take(&mut self, chunks: u32) -> Option<u32> {
        let &(size, place) = self.by_size.range((chunks, 0)..).next()?;
        self.remove(place, size);
        if size > chunks {
            self.insert(place + chunks, size - chunks);
        }
        Some(place)
    }

    fn give(&mut self, mut place: u32, mut chunks: u32) {
        if let Some((&before, &n)) = self.by_place.range(..place).next_back()
            && before + n == place
        {
            self.remove(before, n);
            (place, chunks) = (before, chunks + n);
        }
        if let Some(&n) = self.by_place.get(&(place + chunks)) {
            self.remove(place + chunks, n);
            chunks += n;
        }
        self.insert(place, chunks);
    }

    fn insert(&mut self, place: u32, chunks: u32) {
        self.by_place.insert(place, chunks);
        self.by_size.insert((chunks, place));
    }

    fn remove(&mut self, place: u32, chunks: u32) {
        self.by_place.remove(&place);
        self.by_size.remove(&(chunks, place));
    }
}

const _: () = assert!(UNIT == CLASSES[0] as u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_gets_the_smallest_class_that_holds_it() {
        assert_eq!(
            (class_of(0), class_of(1), class_of(16), class_of(17)),
            (Some(0), Some(0), Some(0), Some(1))
        );
        assert_eq!(class_of(16384), Some(CLASSES.len() as u8 - 1));
        assert_eq!(class_of(16385), None);
        for bytes in 65..=4096 {
            let size = CLASSES[class_of(bytes).unwrap() as usize] as u64;
            assert!(size >= bytes && (size - bytes) * 4 < size, "{bytes} bytes take {size}");
        }
    }

    #[test]
    fn free_chunks_join_their_neighbours_and_the_smallest_fit_goes_first() {
        let mut extents = Extents::default();
        extents.give(0, 10);
        assert_eq!((extents.take(3), extents.take(2)), (Some(0), Some(3)));
        extents.give(0, 3);
        assert_eq!(extents.take(3), Some(0), "three fit better than five");
        extents.give(3, 2);
        extents.give(0, 3);
        assert_eq!((extents.by_place.len(), extents.by_size.len()), (1, 1));
        assert_eq!((extents.take(11), extents.take(10)), (None, Some(0)));
    }
}
