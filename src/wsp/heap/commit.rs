//! One commit: claims, the record, and the stores that follow it.
//!
//! 1. Every object that it publishes or frees is **claimed**: it is what it should be, and no other commit has it.
//! 2. What the record does not carry itself (objects larger than 256 bytes, names of new roots) is made durable.
//! 3. The record is written to a lane, and fenced. Here it happens.
//! 4. It is applied: descriptors, words, roots. These stores are written back later (see `lane`).
//!
//! A record that is too large for a ring stands in space that is reserved for it, and given back once it is settled.

use super::alloc::{Claim, Object};
use super::format::{COUNT_MAX, Entry, encode_root_value, record, record_lines_max, record_words};
use super::lane::Lane;
use super::roots::{Roots, Staged};
use super::{Heap, IN_RECORD, Offset, invalid};
use crate::error::Result;
use crate::media::{Addr, Fault, Flushed, LINE, Media, crc32c};

/// Objects up to this size travel in the record that publishes them, in bytes.
const CARRIED_BYTES_MAX: u64 = 256;

const _: () = assert!(CARRIED_BYTES_MAX / 8 <= COUNT_MAX as u64);

/// One thing that a commit does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change<'a> {
    /// A reserved object is live from now on. `stored`: bytes from its beginning that were stored and perhaps not
    /// made durable; more than it has are all.
    Publish {
        at: Offset,
        stored: u64,
    },
    /// A word of a live object, or of one that this commit publishes. Its address is a multiple of 8.
    Set {
        at: Offset,
        value: u64,
    },
    /// A live object is free from now on.
    Free(Offset),
    /// A root leads to the beginning of an object, or nowhere. One that is not there is made, of this type; one that
    /// is has to have this type.
    Root {
        name: &'a [u8],
        type_number: u64,
        to: Option<Offset>,
    },
    RemoveRoot {
        name: &'a [u8],
    },
}

/// An object that a commit has for itself.
struct Claimed {
    at: Offset,
    object: Object,
    claim: Claim,
    /// Bytes that are not durable yet; none where nothing is stored.
    stored: u64,
    /// What the record carries of it.
    content: Vec<u64>,
}

impl Claimed {
    fn entry(&self) -> Entry<'_> {
        let at = self.at.0;
        match (self.object, self.claim) {
            (Object::Small { class, .. }, Claim::Publish) => {
                Entry::Alloc { at, class, content: &self.content }
            }
            (Object::Small { class, .. }, Claim::Free) => Entry::Free { at, class },
            (Object::Large { chunks, .. }, Claim::Publish) => Entry::AllocChunks { at, chunks },
            (Object::Large { chunks, .. }, Claim::Free) => Entry::FreeChunks { at, chunks },
        }
    }
}

/// What a commit will do, once it is checked.
#[derive(Default)]
struct Plan {
    /// By address, once all are claimed.
    claimed: Vec<Claimed>,
    words: Vec<(u64, u64)>,
}

impl Plan {
    fn has(&self, at: Offset, claim: Claim) -> bool {
        let found = self.claimed.binary_search_by_key(&at, |c| c.at);
        found.is_ok_and(|n| self.claimed[n].claim == claim)
    }

    /// Whether a word is of an object that it publishes.
    fn publishes_around(&self, at: u64) -> bool {
        let behind = self.claimed.partition_point(|c| c.at.0 <= at);
        let Some(c) = self.claimed[..behind].last() else { return false };
        c.claim == Claim::Publish && at - c.at.0 <= c.object.bytes() - 8
    }

    fn entries(&self, roots: &[(u64, u64)]) -> Vec<u64> {
        let mut to = Vec::new();
        let (published, freed): (Vec<_>, Vec<_>) =
            self.claimed.iter().partition(|c| c.claim == Claim::Publish);
        published.iter().for_each(|c| c.entry().encode(&mut to));
        for &(at, value) in self.words.iter().chain(roots) {
            Entry::Words { at, values: &[value] }.encode(&mut to);
        }
        freed.iter().for_each(|c| c.entry().encode(&mut to));
        to
    }
}

impl<M: Media> Heap<M> {
    /// All of it or nothing, in every kind of crash; durable on return. Commits under way at the same time must not
    /// set the same word; nor may one set a word of an object that another one frees, or lead a root to it.
    ///
    /// EINVAL for what is not reserved, not live, not in an object, or no name; EBUSY for an object that another
    /// commit is about to publish or free; EEXIST for a root of another type; ENOENT for a root that is not there;
    /// ENOSPC where a large commit finds no room for its record, or a new root no slot; EIO where it could not be made
    /// durable: then it may have happened, and the heap refuses changes until it is opened again. After all others
    /// nothing has changed.
    pub fn commit(&self, changes: &[Change<'_>]) -> Result<()> {
        self.usable()?;
        if changes.is_empty() {
            return Ok(());
        }
        let names_roots =
            changes.iter().any(|c| matches!(c, Change::Root { .. } | Change::RemoveRoot { .. }));
        let mut roots = names_roots.then(|| self.roots.lock());
        let mut plan = Plan::default();
        let mut staged = Staged::default();
        let prepared = self.prepare(changes, roots.as_deref(), &mut plan, &mut staged);
        let (entries, space) = prepared.inspect_err(|_| {
            // Nothing of it is on the media that anybody would look at.
            plan.claimed.iter().for_each(|c| self.alloc.unclaim(c.object));
        })?;
        // Claims stay where it fails: nobody knows whether the record is on the media.
        self.write(&plan, &staged, &entries)?;
        if let Some(roots) = &mut roots {
            roots.take(staged);
        }
        drop(roots);
        if let Some(space) = space {
            self.settle()?;
            self.alloc.give_back(space)?;
        }
        Ok(())
    }

    /// Everything up to the record: its entries, and the space that it takes besides its lines.
    fn prepare(
        &self,
        changes: &[Change<'_>],
        roots: Option<&Roots>,
        plan: &mut Plan,
        staged: &mut Staged,
    ) -> Result<(Vec<u64>, Option<Offset>)> {
        self.claim_all(changes, plan)?;
        self.check_words(plan)?;
        if let Some(roots) = roots {
            let leads = |at: Offset| self.may_lead_to(plan, at);
            changes.iter().try_for_each(|change| roots.stage(change, &leads, staged))?;
        }
        let values: Vec<(u64, u64)> = self.root_words(staged);
        let words_max = record_words(record_lines_max(self.layout.shape));
        self.carry(plan, words_max, values.len())?;
        self.store_ahead(plan, staged)?;
        let mut words = plan.words.iter().chain(&values);
        assert!(words.all(|&(at, _)| self.layout.is_storable(at, 1)), "recovery would refuse the record");
        let mut entries = plan.entries(&values);
        let elsewhere = entries.len() > words_max;
        let space = elsewhere.then(|| self.store_elsewhere(&mut entries)).transpose()?;
        Ok((entries, space))
    }

    fn claim_all(&self, changes: &[Change<'_>], plan: &mut Plan) -> Result<()> {
        for change in changes {
            let (at, claim, stored) = match *change {
                Change::Publish { at, stored } => (at, Claim::Publish, stored),
                Change::Free(at) => (at, Claim::Free, 0),
                Change::Set { at, value } => {
                    plan.words.push((at.0, value));
                    continue;
                }
                Change::Root { .. } | Change::RemoveRoot { .. } => continue,
            };
            let object = self.alloc.claim(at, claim)?;
            let stored = stored.min(object.bytes());
            plan.claimed.push(Claimed { at, object, claim, stored, content: Vec::new() });
        }
        plan.claimed.sort_unstable_by_key(|c| c.at);
        Ok(())
    }

    fn check_words(&self, plan: &Plan) -> Result<()> {
        for &(at, _) in &plan.words {
            if !at.is_multiple_of(8) {
                return Err(invalid("heap::commit", format!("{at:#x} is no multiple of 8, and no word")));
            }
            if self.alloc.live_around(at, 8).is_none() && !plan.publishes_around(at) {
                let message = format!("the word at {at:#x} is in no object that is live");
                return Err(invalid("heap::commit", message));
            }
        }
        Ok(())
    }

    /// Whether an object begins here that is live after the commit.
    fn may_lead_to(&self, plan: &Plan, at: Offset) -> Result<()> {
        if plan.has(at, Claim::Publish) || self.alloc.is_live_at(at) && !plan.has(at, Claim::Free) {
            return Ok(());
        }
        Err(invalid(
            "heap::commit",
            format!("a root cannot lead to {:#x}: no live object begins there", at.0),
        ))
    }

    fn write(&self, plan: &Plan, staged: &Staged, entries: &[u64]) -> Result<()> {
        let lines = (entries.len() + record::WORDS).div_ceil(LINE / 8);
        let (mut lane, _durable, unfinished) = self.append(entries, lines)?;
        let roots = self.root_words(staged);
        self.apply(plan, &roots, &mut lane).map_err(|fault| self.fault(fault))?;
        unfinished.finished();
        Ok(())
    }

    /// Puts small objects into the record, if all of them fit.
    fn carry(&self, plan: &mut Plan, words_max: usize, roots: usize) -> Result<()> {
        let carried = |c: &Claimed| c.stored > 0 && c.object.bytes() <= CARRIED_BYTES_MAX;
        let content: usize =
            plan.claimed.iter().filter(|c| carried(c)).map(|c| c.object.bytes() as usize / 8).sum();
        let others: usize = plan.claimed.iter().map(|c| c.entry().words()).sum();
        if content + others + (plan.words.len() + roots) * 2 > words_max {
            return Ok(());
        }
        for c in plan.claimed.iter_mut().filter(|c| carried(c)) {
            let mut bytes = [0; CARRIED_BYTES_MAX as usize];
            let bytes = &mut bytes[..c.object.bytes() as usize];
            self.media.read(Addr(c.at.0), bytes)?;
            let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
            c.content = bytes.chunks_exact(8).map(word).collect();
        }
        Ok(())
    }

    /// Makes durable what the record relies on and does not carry.
    fn store_ahead(&self, plan: &Plan, staged: &Staged) -> Result<()> {
        let mut flushed: Option<Flushed> = None;
        let mut add =
            |more: Flushed| flushed = Some(flushed.take().map_or_else(Flushed::issued, |f| f.and(more)));
        for c in plan.claimed.iter().filter(|c| c.stored > 0 && c.content.is_empty()) {
            add(self.media.write_back(Addr(c.at.0), c.stored as usize)?);
        }
        for new in staged.new_names() {
            add(self.store_root_name(new)?);
        }
        if let Some(flushed) = flushed {
            self.make_durable(flushed)?;
        }
        Ok(())
    }

    /// Puts the entries into space of their own, durably, and leaves one that names it.
    fn store_elsewhere(&self, entries: &mut Vec<u64>) -> Result<Offset> {
        let bytes: Vec<u8> = entries.iter().flat_map(|word| word.to_le_bytes()).collect();
        let space = self.alloc.reserve(&self.media, bytes.len() as u64)?;
        let stored = self.media.copy_nt(Addr(space.0), &bytes);
        self.make_durable(stored.map_err(|fault| self.fault(fault))?)?;
        let crc = crc32c(&bytes, self.keys.seed);
        let words = entries.len() as u64;
        entries.clear();
        Entry::Elsewhere { at: space.0, words, crc }.encode(entries);
        Ok(space)
    }

    /// The words of roots that change.
    fn root_words(&self, staged: &Staged) -> Vec<(u64, u64)> {
        let word = |(slot, value)| {
            let at = self.layout.root(slot);
            (at.0, self.keys.seal(at, encode_root_value(value)))
        };
        staged.values().map(word).collect()
    }

    fn apply(&self, plan: &Plan, roots: &[(u64, u64)], lane: &mut Lane) -> Result<(), Fault> {
        let settle = |c: &Claimed, lane: &mut Lane| {
            let mut stored = |at| lane.stored(at, 8);
            self.alloc.settle_claim(&self.media, c.object, c.claim, &mut stored)
        };
        for c in plan.claimed.iter().filter(|c| c.claim == Claim::Publish) {
            settle(c, lane)?;
            if !c.content.is_empty() {
                lane.stored(Addr(c.at.0), c.content.len() * 8);
            }
        }
        for &(at, value) in plan.words.iter().chain(roots) {
            let at = Addr(at);
            self.media.store64(at, value)?.redundant(IN_RECORD);
            lane.stored(at, 8);
        }
        for c in plan.claimed.iter().filter(|c| c.claim == Claim::Free) {
            settle(c, lane)?;
        }
        Ok(())
    }
}
