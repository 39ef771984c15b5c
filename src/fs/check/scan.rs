//! Reads one inode's log, on its own: nothing here is shared with recovery but the format.
//!
//! Unlike recovery's reader it does not stop at damage. It says what is damaged and reads on as far as what
//! follows can be told: behind a record that does not validate, and in a segment whose head is gone.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::super::format::*;
use super::super::inode::extents;
use super::super::log::Owner;
use super::Pool;
use crate::limits::FILE_BYTES_MAX;
use crate::media::{Addr, LINE, Media, crc32c};

/// Incarnations that are tried for a log whose beginning is lost.
const INCARNATIONS_TRIED_MAX: usize = 1 << 12;

/// What is wrong with a log itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// The media cannot be read there.
    Fault(Addr),
    /// The log head is no address of a log.
    Head,
    /// Recovery wrote down that the log is damaged.
    Condemned,
    /// Lines that do not validate, in front of records that do. If it was a write, which file bytes it seems to have
    /// been of.
    Gap { at: Addr, lines: u32, bytes: Option<(u64, u64)> },
    /// A segment does not begin as one.
    Segment { at: Addr },
    /// A record that cannot stand there validates.
    Misplaced { at: Addr },
    /// So many lines are missing at its end: what the last close wrote down.
    End { lines: i32 },
}

/// A record, as it was read.
pub struct Rec<'a> {
    pub kind: Type,
    pub bytes: &'a [u8],
    pub at: Addr,
    /// The name that it added went since.
    pub withdrawn: bool,
}

/// The records of one operation.
#[derive(Default)]
pub struct Op {
    bytes: Vec<u8>,
    records: Vec<(Head, u32, u32, Addr)>,
    pub seq: u32,
    pub epoch: u64,
}

impl Op {
    pub fn records(&self) -> impl Iterator<Item = Rec<'_>> {
        let rec = |&(head, from, to, at): &(Head, u32, u32, Addr)| Rec {
            kind: head.kind,
            bytes: &self.bytes[from as usize..to as usize],
            at,
            withdrawn: head.withdrawn,
        };
        self.records.iter().map(rec)
    }

    /// Whether a name that it added was withdrawn: then it was complete.
    pub fn was_withdrawn(&self) -> bool {
        self.records.iter().any(|(head, ..)| head.withdrawn)
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.records.clear();
        self.epoch = 0;
    }

    fn push(&mut self, head: &Head, bytes: &[u8], at: Addr) {
        if self.records.is_empty() {
            self.seq = head.seq;
        }
        let from = self.bytes.len() as u32;
        self.bytes.extend_from_slice(bytes);
        self.records.push((*head, from, from + bytes.len() as u32, at));
        self.epoch = self.epoch.max(head.epoch);
    }
}

/// Where a log stands and how it ended.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Segments outside the slot, and their lines.
    pub segments: Vec<(Addr, u32)>,
    pub damage: Vec<Damage>,
    /// The number of the first record that the log still holds.
    pub head_seq: u32,
    /// The number that the next record would have.
    pub next_seq: u32,
    pub incarnation: u32,
    pub newest_epoch: u64,
}

impl Found {
    /// Lines that cannot be read.
    pub fn faults(&self) -> impl Iterator<Item = Addr> + '_ {
        let fault = |damage: &Damage| if let &Damage::Fault(at) = damage { Some(at) } else { None };
        self.damage.iter().filter_map(fault)
    }
}

/// Part of a log: the lines in the slot, or a segment.
struct Part {
    at: Addr,
    lines: u32,
    bytes: Box<[u8; BLOCK]>,
}

impl Part {
    fn line(&self, line: u32) -> &[u8] {
        &self.bytes[line as usize * LINE..self.lines as usize * LINE]
    }

    fn addr(&self, line: u32) -> Addr {
        self.at.add(line as u64 * LINE as u64)
    }
}

/// Which file bytes a record that does not validate says it is a write of: a hint, not more.
fn written(record: &[u8]) -> Option<(u64, u64)> {
    let head = Head::decode(record).filter(|head| head.kind == Type::Write)?;
    let record = record.get(..head.lines as usize * LINE)?;
    let (start, len) = (get64(record, field::write::START), get32(record, field::write::LEN) as u64);
    let pages = extents(record).flatten().map(|e| {
        let from = e.page as u64 * BLOCK as u64;
        (from, from + e.count as u64 * BLOCK as u64)
    });
    let said = (len > 0).then(|| (start, start.saturating_add(len)));
    let all = said.into_iter().chain(pages).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
    (all.0 < all.1 && all.1 <= FILE_BYTES_MAX).then_some(all)
}

/// A segment's head that was found without following a log.
#[derive(Clone, Copy, Debug)]
pub struct Stray {
    pub at: Addr,
    pub lines: u32,
    pub seq: u32,
    pub incarnation: u32,
}

/// By what strays of one inode are ordered.
pub fn stray_order(stray: &Stray) -> (u32, u32) {
    (stray.incarnation, stray.seq)
}

/// The segment of `owner` whose head stands at `at`, if one does.
pub fn segment_of<M: Media>(pool: &Pool<M>, (ino, generation): (u32, u64), at: Addr) -> Option<Stray> {
    let mut line = [0; LINE];
    pool.media.read(at, &mut line).ok()?;
    let head = Head::decode(&line).filter(|h| h.kind == Type::Segment && h.lines == 1)?;
    let (lines, incarnation) =
        (get32(&line, field::segment::LINES), get32(&line, field::segment::INCARNATION));
    let seed = log_seed(pool.key_crc, ino, generation, incarnation);
    let valid = crc32c(&line[4..], seed) == head.crc && is_segment(pool, at, lines);
    valid.then_some(Stray { at, lines, seq: head.seq, incarnation })
}

/// Inodes by what their numbers make of a checksum, so that of a segment which was found without following a log it can be told whose
/// it is. Its line says the incarnation, and no inode.
pub struct Owners(HashMap<u32, Vec<(u32, u64)>>);

impl Owners {
    pub fn new(key_crc: u32, inodes: impl IntoIterator<Item = (u32, u64)>) -> Owners {
        let mut owners = Owners(HashMap::new());
        for (ino, generation) in inodes {
            owners.0.entry(owner_seed(key_crc, ino, generation)).or_default().push((ino, generation));
        }
        owners
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The segment whose head stands at `at`, if one does, with whose it is.
    pub fn segments_at<'a, M: Media>(
        &'a self,
        pool: &'a Pool<M>,
        at: Addr,
    ) -> impl Iterator<Item = ((u32, u64), Stray)> + 'a {
        let mut line = [0; LINE];
        let read = pool.media.read(at, &mut line);
        let incarnation = get32(&line, field::segment::INCARNATION);
        let seed = crc32c_before(&line[4..], get32(&line, 0));
        let its = self.0.get(&crc32c_before(&incarnation.to_le_bytes(), seed)).filter(|_| read.is_ok());
        its.into_iter().flatten().filter_map(move |&owner| Some((owner, segment_of(pool, owner, at)?)))
    }
}

/// What [`log_seed`] is made of but for the incarnation, with which it ends.
fn owner_seed(key_crc: u32, ino: u32, generation: u64) -> u32 {
    let mut b = [0; 12];
    put32(&mut b, 0, ino);
    put64(&mut b, 4, generation);
    crc32c(&b, key_crc)
}

/// The seed with which these bytes have this checksum: a checksum that is counted back, bit by bit.
fn crc32c_before(bytes: &[u8], crc: u32) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut state = !crc;
    for &byte in bytes.iter().rev() {
        for _ in 0..8 {
            // The polynomial's highest bit is set: it was added if that of the sum is.
            let was_odd = state >> 31;
            state = ((state ^ (POLYNOMIAL * was_odd)) << 1) | was_odd;
        }
        state ^= byte as u32;
    }
    !state
}

fn is_segment<M: Media>(pool: &Pool<M>, at: Addr, lines: u32) -> bool {
    (lines == MINI_LINES || lines == SEGMENT_LINES)
        && at.0.is_multiple_of(lines as u64 * LINE as u64)
        && pool.holds(at, lines as usize * LINE)
}

struct Scan<'p, 'm, M: Media> {
    pool: &'p Pool<'m, M>,
    owner: Owner,
    seed: u32,
    seq: u32,
    /// Takes every record that validates, not only those that were certainly complete.
    salvage: bool,
    found: Found,
    /// Nothing is read from here on: how that ends is known.
    known: Option<&'p Endings>,
}

/// How the reading of a log ends that begins with a segment, by what the reader has there: the address, the number of the next record,
/// the incarnation.
type Endings = HashMap<(Addr, u32, u32), Ending>;

#[derive(Clone, Copy)]
struct Ending {
    /// The number behind the last record.
    seq: u32,
    /// Where the operation began that is cut short there.
    begun: Option<u32>,
    /// It is none that was begun before the segment: some operation ended since, or was cut short.
    is_own: bool,
}

impl Ending {
    /// The number that the next record would have: what was cut short never happened.
    fn next_seq(self) -> u32 {
        self.begun.unwrap_or(self.seq)
    }
}

/// Reads the log of `owner` and hands each operation to `each`, with whether it is the last one.
pub fn scan<M: Media>(pool: &Pool<M>, owner: Owner, each: &mut dyn FnMut(&Op, bool)) -> Found {
    let mut scan = Scan::new(pool, owner, None);
    scan.run(each);
    scan.found.next_seq = scan.seq;
    let end = pool.ends.get(owner.ino as usize).copied().filter(|&end| end != 0 && end != scan.seq);
    let missing = end.map(|end| end.wrapping_sub(scan.seq) as i32);
    // What a repair that was cut short has written again ends behind that.
    let missing = missing.filter(|&lines| lines > 0 || pool.state.clean);
    if let Some(lines) = missing.filter(|_| scan.found.damage.is_empty()) {
        scan.found.damage.push(Damage::End { lines });
    }
    scan.found
}

impl<'p, 'm, M: Media> Scan<'p, 'm, M> {
    fn new(pool: &'p Pool<'m, M>, owner: Owner, known: Option<&'p Endings>) -> Scan<'p, 'm, M> {
        let mut scan = Scan { pool, owner, seed: 0, seq: 0, salvage: false, found: Found::default(), known };
        scan.set_incarnation(incarnation(owner.generation));
        scan
    }

    fn set_incarnation(&mut self, incarnation: u32) {
        self.found.incarnation = incarnation;
        self.seed = self.seed_of(incarnation);
    }

    fn seed_of(&self, incarnation: u32) -> u32 {
        log_seed(self.pool.key_crc, self.owner.ino, self.owner.generation, incarnation)
    }

    fn run(&mut self, each: &mut dyn FnMut(&Op, bool)) {
        if let Some(from) = self.begin() {
            self.follow_records(from, each);
        }
    }

    fn follow_records(&mut self, from: (Part, u32), each: &mut dyn FnMut(&Op, bool)) -> Ending {
        let (mut part, mut line) = from;
        // An operation is handed on when it is known whether another one follows.
        let (mut op, mut whole) = (Op::default(), None::<Op>);
        // Where the operation begun last began: what was cut short never happened, segments included.
        let mut begun = None;
        // Whether anything was begun since that would be it, if it had not ended.
        let mut is_own = false;
        let mut known = None;
        loop {
            let Some(head) = self.record(&part, line) else {
                if let Some((lines, incarnation)) = self.gap(&part, line) {
                    let bytes = written(part.line(line));
                    self.damaged(Damage::Gap { at: part.addr(line), lines, bytes });
                    line += lines;
                    self.seq = self.seq.wrapping_add(lines);
                    if incarnation != self.found.incarnation {
                        // Behind a seal.
                        self.set_incarnation(incarnation);
                        op.clear();
                        (begun, is_own) = (None, true);
                    }
                    continue;
                }
                let Some(segment) = self.stray_behind() else { break };
                self.damaged(Damage::Segment { at: part.addr(line.min(part.lines - 1)) });
                (part, line) = self.go_on(segment);
                known = self.known_ending(part.at);
                if known.is_some() {
                    break;
                }
                continue;
            };
            self.found.newest_epoch = self.found.newest_epoch.max(head.epoch);
            let bytes = &part.line(line)[..head.lines as usize * LINE];
            match head.kind {
                Type::Link => {
                    let (addr, lines) = (get64(bytes, field::link::ADDR), get32(bytes, field::link::LINES));
                    let incarnation = get32(bytes, field::link::INCARNATION);
                    if incarnation != self.found.incarnation {
                        op.clear();
                        (begun, is_own) = (None, true);
                    }
                    let Some(next) = self.follow(&head, Addr(addr), lines, incarnation) else { break };
                    (part, line) = next;
                    known = self.known_ending(part.at);
                    if known.is_some() {
                        break;
                    }
                    continue;
                }
                Type::Seal => {
                    let incarnation = get32(bytes, field::seal::INCARNATION);
                    self.set_incarnation(incarnation);
                    op.clear();
                    (begun, is_own) = (None, true);
                }
                Type::Segment => self.damaged(Damage::Misplaced { at: part.addr(line) }),
                _ => {
                    op.push(&head, bytes, part.addr(line));
                    begun = begun.or(Some((self.seq, self.found.segments.len())));
                    if !head.more {
                        (begun, is_own) = (None, true);
                        if let Some(before) = whole.as_ref() {
                            each(before, false);
                        }
                        let mut next = whole.take().unwrap_or_default();
                        std::mem::swap(&mut next, &mut op);
                        op.clear();
                        whole = Some(next);
                    }
                }
            }
            line += head.lines;
            self.seq = self.seq.wrapping_add(head.lines);
        }
        let own = Ending { seq: self.seq, begun: begun.map(|(seq, _)| seq), is_own };
        let ending = match known {
            Some(Ending { seq, is_own: false, .. }) if begun.is_some() => Ending { seq, ..own },
            Some(rest) => Ending { is_own: is_own || rest.is_own, ..rest },
            None => own,
        };
        self.seq = ending.next_seq();
        if let Some((_, segments)) = begun {
            self.found.segments.truncate(segments);
        }
        if let Some(last) = whole {
            each(&last, true);
        }
        ending
    }

    /// How what follows ends, where it is known, now that a part was entered that stands at `at`.
    fn known_ending(&self, at: Addr) -> Option<Ending> {
        self.known?.get(&(at, self.seq, self.found.incarnation)).copied()
    }

    fn damaged(&mut self, damage: Damage) {
        self.found.damage.push(damage);
    }

    /// The part in which the log begins, and the line.
    fn begin(&mut self) -> Option<(Part, u32)> {
        let at = self.owner.slot.add(LOG_HEAD_OFFSET);
        let mut word = match self.pool.media.load64(at) {
            Ok(word) => word,
            Err(fault) => {
                self.damaged(Damage::Fault(fault.at));
                self.damaged(Damage::Head);
                return self.headless_log();
            }
        };
        if is_condemned(word) {
            self.damaged(Damage::Condemned);
            self.salvage = true;
            word ^= LOG_CONDEMNED;
        }
        if word == 0 {
            return Some(self.in_slot());
        }
        let Some(at) = unpack_log_head(word).filter(|&at| self.pool.holds(at, MINI)) else {
            self.damaged(Damage::Head);
            return self.headless_log();
        };
        match self.segment_at(at) {
            Some(segment) => Some(self.start(segment)),
            None => {
                self.damaged(Damage::Segment { at });
                self.headless(at)
            }
        }
    }

    fn start(&mut self, segment: Stray) -> (Part, u32) {
        self.set_incarnation(segment.incarnation);
        self.found.head_seq = segment.seq;
        self.go_on(segment)
    }

    fn go_on(&mut self, segment: Stray) -> (Part, u32) {
        self.seq = segment.seq.wrapping_add(1);
        (self.enter(segment.at, segment.lines), 1)
    }

    fn in_slot(&mut self) -> (Part, u32) {
        (self.load(self.owner.slot.add(LINE as u64), SLOT_LINES), 0)
    }

    fn strays(&self) -> &[Stray] {
        self.pool.strays.get(&(self.owner.ino, self.owner.generation)).map_or(&[], |strays| strays)
    }

    /// Where a log begins whose head is lost: the first of those from where one reads furthest, for from each of a log's
    /// segments one reads to its end. What stands in front of the true head says nothing that the rest does not say again.
    fn headless_log(&mut self) -> Option<(Part, u32)> {
        let mut strays = self.strays().to_vec();
        // The last ones first: where one leads to the next, it is known how that ends.
        strays.sort_by_key(|segment| Reverse(segment.seq));
        let mut endings = Endings::new();
        for &segment in &strays {
            let entered = (segment.at, segment.seq.wrapping_add(1), segment.incarnation);
            if !endings.contains_key(&entered) {
                let ending = self.ending_from(Some(segment), &endings);
                endings.insert(entered, ending);
            }
        }
        let mut best: Option<(u32, u32, Option<Stray>)> = None;
        strays.sort_by_key(|segment| segment.at);
        for begin in std::iter::once(None).chain(strays.into_iter().map(Some)) {
            let end = self.ending_from(begin, &endings).next_seq();
            let lines = end.wrapping_sub(begin.map_or(0, |segment| segment.seq));
            let is_better = |(seq, most, _)| {
                let ahead = end.wrapping_sub(seq) as i32;
                ahead > 0 || ahead == 0 && lines > most
            };
            if end > 0 && best.is_none_or(is_better) {
                best = Some((end, lines, begin));
            }
        }
        Some(match best?.2 {
            Some(segment) => self.start(segment),
            None => self.in_slot(),
        })
    }

    /// How the log ends that begins with this segment, or in the slot.
    fn ending_from(&self, begin: Option<Stray>, known: &Endings) -> Ending {
        let mut trial = Scan::new(self.pool, self.owner, Some(known));
        let from = match begin {
            Some(segment) => trial.start(segment),
            None => trial.in_slot(),
        };
        trial.follow_records(from, &mut |_, _| {})
    }

    /// The segment that goes on behind the last record: the link to it is lost.
    fn stray_behind(&self) -> Option<Stray> {
        let (strays, own) = (self.strays(), self.found.incarnation);
        let from = |seq| {
            let first = strays.partition_point(|s| stray_order(s) < (own, seq));
            strays.get(first).filter(|s| s.incarnation == own)
        };
        // Numbers go round.
        let next = from(self.seq).or_else(|| from(0))?;
        (next.seq.wrapping_sub(self.seq) <= SEGMENT_LINES).then_some(*next)
    }

    /// A segment at the log's head that does not begin as one: what of it validates says which number it has.
    fn headless(&mut self, at: Addr) -> Option<(Part, u32)> {
        let lines = if at.0.is_multiple_of(BLOCK as u64) && self.pool.holds(at, BLOCK) {
            SEGMENT_LINES
        } else {
            MINI_LINES
        };
        let part = self.load(at, lines);
        // The log may have been sealed since: the incarnations that it can have are tried, the likely ones first.
        let (born, mount) = (incarnation(self.owner.generation), self.pool.state.mount);
        let tried = std::iter::once(born).chain((born..=mount).rev().take(INCARNATIONS_TRIED_MAX));
        // What validates first is of the incarnation with which the segment begins; of others, what a seal leads to.
        let first_of = |incarnation: u32| {
            let seed = self.seed_of(incarnation);
            let validates = |&line: &u32| {
                let head = Head::decode(&part.line(line)[..LINE]);
                head.is_some_and(|mut head| self.validates_in(&part, line, &mut head, seed))
            };
            (1..lines).find(validates).map(|line| (line, incarnation))
        };
        let (line, incarnation) = tried.filter_map(first_of).min_by_key(|&(line, _)| line)?;
        let head = Head::decode(&part.line(line)[..LINE])?;
        self.set_incarnation(incarnation);
        self.seq = head.seq.wrapping_sub(line - 1);
        self.found.head_seq = self.seq.wrapping_sub(1);
        self.salvage = true;
        Some((self.enter(at, lines), 1))
    }

    fn enter(&mut self, at: Addr, lines: u32) -> Part {
        self.found.segments.push((at, lines));
        self.load(at, lines)
    }

    /// Lines that cannot be read become zeros, which are no record.
    fn load(&mut self, at: Addr, lines: u32) -> Part {
        let mut part = Part { at, lines, bytes: Box::new([0; BLOCK]) };
        let len = lines as usize * LINE;
        if self.pool.media.read(at, &mut part.bytes[..len]).is_err() {
            for line in 0..lines {
                let bytes = &mut part.bytes[line as usize * LINE..][..LINE];
                let at = at.add(line as u64 * LINE as u64);
                if self.pool.media.read(at, bytes).is_err() {
                    bytes.fill(0);
                    self.found.damage.push(Damage::Fault(at));
                }
            }
        }
        part
    }

    fn segment_at(&self, at: Addr) -> Option<Stray> {
        segment_of(self.pool, (self.owner.ino, self.owner.generation), at)
    }

    /// The segment that a link leads to. `None` where the log ends at the link.
    fn follow(&mut self, link: &Head, at: Addr, lines: u32, incarnation: u32) -> Option<(Part, u32)> {
        let certain = self.is_certain(link, incarnation);
        let in_pool = at.0.is_multiple_of(MINI as u64) && self.pool.holds(at, MINI);
        let next = if in_pool { self.segment_at(at) } else { None };
        let next = next.filter(|s| s.seq == link.seq.wrapping_add(1) && s.incarnation == incarnation);
        if next.is_none() && !certain && !self.salvage {
            // Where it cannot be read nobody knows whether the log went on there: no end, then.
            let read = if in_pool { self.pool.media.read(at, &mut [0; LINE]) } else { Ok(()) };
            if let Err(fault) = read {
                self.damaged(Damage::Fault(fault.at));
            }
            return None;
        }
        self.set_incarnation(incarnation);
        self.seq = link.seq.wrapping_add(1);
        if let Some(segment) = next {
            return Some(self.go_on(segment));
        }
        self.seq = self.seq.wrapping_add(1);
        self.damaged(Damage::Segment { at });
        if !in_pool || !is_segment(self.pool, at, lines) {
            return None;
        }
        // Numbers only ascend: so nobody is led round in a circle.
        let part = self.load(at, lines);
        let continues = self.record(&part, 1).is_some() || self.gap(&part, 1).is_some();
        continues.then(|| (self.enter(at, lines), 1))
    }

    /// Whether a record was on media when the pool was last settled; of a link, with the incarnation that it names, what it leads
    /// to. Not where a crash may have left it.
    fn is_certain(&self, head: &Head, incarnation: u32) -> bool {
        incarnation > self.pool.state.crashed && head.epoch <= self.pool.state.settled
    }

    /// The record with the expected number.
    fn record(&self, part: &Part, line: u32) -> Option<Head> {
        if line >= part.lines {
            return None;
        }
        let mut head = Head::decode(&part.line(line)[..LINE])?;
        (head.seq == self.seq && self.validates(part, line, &mut head)).then_some(head)
    }

    fn validates(&self, part: &Part, line: u32, head: &mut Head) -> bool {
        self.validates_in(part, line, head, self.seed)
    }

    fn validates_in(&self, part: &Part, line: u32, head: &mut Head, seed: u32) -> bool {
        let end = line + head.lines;
        // The last line is kept for a link.
        let fits = if head.kind == Type::Link { head.lines == 1 } else { end < part.lines };
        fits && head.holds(&part.line(line)[..head.lines as usize * LINE], seed)
    }

    /// Lines up to the next record of this part which shows that those in between were records, or a seal, too; and the incarnation
    /// that it is of.
    fn gap(&self, part: &Part, line: u32) -> Option<(u32, u32)> {
        let (own, state) = (self.found.incarnation, &self.pool.state);
        let since = if self.salvage { own } else { own.max(state.crashed) };
        let later = (since.saturating_add(1)..=state.mount).rev().take(INCARNATIONS_TRIED_MAX);
        (1..part.lines.saturating_sub(line)).find_map(|ahead| {
            let head = Head::decode(&part.line(line + ahead)[..LINE]);
            let head = head.filter(|head| head.seq == self.seq.wrapping_add(ahead))?;
            let holds = |&its: &u32| {
                (self.salvage || self.is_certain(&head, its))
                    && self.validates_in(part, line + ahead, &mut { head }, self.seed_of(its))
            };
            std::iter::once(own).chain(later.clone()).find(holds).map(|its| (ahead, its))
        })
    }
}
