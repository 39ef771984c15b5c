//! What a failure left to chance, decided when it is looked at.
//!
//! A read of bytes with stores in doubt is a **choice**: which moment the line (page, everything: see the fault
//! model of `media`) stopped at, as far as the bytes read show it, and which of the non-temporal words are there.
//! Options are tried by `explore`, which runs the reader again and again with a [`Script`]: what the first choices
//! are; all later ones take the first option, *everything there*, and are noted with what else they could have
//! been.
//!
//! **The guard.** Bytes that the reader then holds against a checksum are one choice together, of few options:
//! all there, nothing, and some torn forms. That a torn form is told from a whole one is the checksum's business,
//! and does not depend on other choices: so a torn form is tried once, with everything else there.
//!
//! **Content.** Bytes of files that nobody but the judge looks at ([`content`]) lead to nothing else, and are held
//! against what may be there word by word. So of each line what it could be is tried with the other lines there.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::media::{ATOM, Atom, CrashPoint, Pending, Rng};
use super::with_flag;
use crate::media::{Addr, Domain};

/// Options of one choice without a checksum, beyond which patterns stand for all.
const OPTIONS_MAX: u64 = 1 << 10;
/// Moments of one unit that are told apart under a checksum.
const VERSIONS_MAX: usize = 12;
/// Words under a checksum each of which is missed once.
const WORDS_MAX: usize = 24;

thread_local! {
    static CONTENT: Cell<bool> = const { Cell::new(false) };
}

/// What `read` reads is looked at by the judge alone.
pub(super) fn content<T>(read: impl FnOnce() -> T) -> T {
    with_flag(&CONTENT, read)
}

/// A moment between stores: everything up to this store is there.
type Moment = u64;

/// How one read is decided.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Decision {
    /// Its place among those in doubt.
    unit: usize,
    bytes: Range<usize>,
    /// The order's moment is one of these.
    from: Moment,
    to: Moment,
    /// Which of the free atoms are there, in program order.
    free: Vec<bool>,
}

/// One option: what it decides, of one unit or of several.
pub(super) type Choice = Vec<Decision>;

/// What the first choices are; what comes after them is everything there, or by chance.
#[derive(Clone, Default)]
pub(super) struct Script {
    pub choices: Vec<Choice>,
    pub chance: Option<Rng>,
}

/// A choice that the script did not name.
pub(super) struct Open {
    unit: usize,
    bytes: Range<usize>,
    /// Moments possible before it.
    from: Moment,
    to: Moment,
    /// Ordered atoms that the bytes show, and whether each ends a store.
    steps: Vec<(Moment, bool)>,
    /// Places of the free atoms in the program's order.
    free: Vec<Moment>,
    /// The verification that covers it.
    guard: Option<usize>,
    /// See [`content`].
    is_content: bool,
}

/// What is known of an atom.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Free ones: not decided. Ordered ones: its moment tells.
    Open,
    There,
    Lost,
    /// Its word was stored to since.
    Overwritten,
}

struct Unit {
    /// By atom; empty as long as all are open.
    fates: Vec<Fate>,
    /// Moments still possible.
    moments: (Moment, Moment),
}

/// See the file's head.
pub(super) struct Undecided {
    pending: Arc<Pending>,
    /// In the order of `pending`.
    units: Vec<Unit>,
    unit_bytes: usize,
    /// All units have one order.
    one_order: bool,
    script: Script,
    taken: usize,
    open: Vec<Open>,
    /// Those of `open` that no verification covers so far.
    unguarded: Vec<usize>,
    guards: usize,
    /// Gets `open` in the end.
    met: Arc<Mutex<Option<Vec<Open>>>>,
}

impl Drop for Undecided {
    fn drop(&mut self) {
        *self.met.lock() = Some(std::mem::take(&mut self.open));
    }
}

impl Undecided {
    /// `met` has the choices beyond the script, in order, once this is gone.
    pub fn new(point: &CrashPoint, script: Script, met: Arc<Mutex<Option<Vec<Open>>>>) -> Undecided {
        let unit = |_| Unit { fates: Vec::new(), moments: (0, Moment::MAX) };
        Undecided {
            units: point.pending.iter().map(unit).collect(),
            pending: point.pending.clone(),
            unit_bytes: point.unit_bytes(),
            one_order: point.domain == Domain::CpuCache,
            script,
            taken: 0,
            open: Vec::new(),
            unguarded: Vec::new(),
            guards: 0,
            met,
        }
    }

    /// Places of the units that bytes touch.
    fn touched(&self, bytes: &Range<usize>) -> Range<usize> {
        let (first, last) = (bytes.start / self.unit_bytes, (bytes.end - 1) / self.unit_bytes);
        let from = self.pending.partition_point(|unit| unit.number < first);
        from..from + self.pending[from..].iter().take_while(|unit| unit.number <= last).count()
    }

    fn moments(&mut self, unit: usize) -> &mut (Moment, Moment) {
        &mut self.units[if self.one_order { 0 } else { unit }].moments
    }

    fn fate(&self, unit: usize, atom: usize) -> Fate {
        self.units[unit].fates.get(atom).copied().unwrap_or(Fate::Open)
    }

    fn set_fate(&mut self, unit: usize, atom: usize, fate: Fate) {
        let count = self.pending[unit].atoms.len();
        let fates = &mut self.units[unit].fates;
        fates.resize(count, Fate::Open);
        fates[atom] = fate;
    }

    /// The bytes are looked at: `set` gets every word whose value that settles.
    pub fn decide(&mut self, bytes: Range<usize>, set: &mut dyn FnMut(usize, [u8; ATOM])) {
        if bytes.is_empty() || self.pending.is_empty() {
            return;
        }
        for unit in self.touched(&bytes) {
            let base = self.pending[unit].number * self.unit_bytes;
            let start = base.max(bytes.start) / ATOM * ATOM;
            let end = (base + self.unit_bytes).min(bytes.end).next_multiple_of(ATOM);
            self.decide_unit(unit, start..end, set);
        }
    }

    fn decide_unit(&mut self, unit: usize, bytes: Range<usize>, set: &mut dyn FnMut(usize, [u8; ATOM])) {
        if let Some(open) = self.doubts(unit, bytes.clone()) {
            let choice = match self.script.choices.get(self.taken) {
                Some(choice) => choice.clone(),
                None => {
                    let option = match &mut self.script.chance {
                        Some(rng) => open.by_chance(rng),
                        None => open.everything(),
                    };
                    self.unguarded.push(self.open.len());
                    self.open.push(open);
                    vec![option]
                }
            };
            self.taken += 1;
            for decision in choice {
                self.settle(&decision, set);
            }
            // A script made for another past need not be about these bytes.
            if let Some(open) = self.doubts(unit, bytes.clone()) {
                self.settle(&open.everything(), set);
                return;
            }
        }
        // A choice about other bytes may have settled these, too.
        self.show(unit, &bytes, set);
    }

    /// What is not decided of these bytes.
    fn doubts(&mut self, unit: usize, bytes: Range<usize>) -> Option<Open> {
        let (from, to) = *self.moments(unit);
        let in_doubt = |n: usize, atom: &Atom| {
            self.fate(unit, n) == Fate::Open && (atom.is_free() || from < atom.seq && atom.seq <= to)
        };
        if !self.pending[unit].atoms_by_address(&bytes).any(|(n, atom)| in_doubt(n, atom)) {
            return None;
        }
        let is_content = CONTENT.get();
        let mut open =
            Open { unit, bytes, from, to, steps: Vec::new(), free: Vec::new(), guard: None, is_content };
        for (_, atom) in self.pending[unit].atoms_of(&open.bytes).filter(|&(n, atom)| in_doubt(n, atom)) {
            match atom.is_free() {
                true => open.free.push(atom.seq),
                false => open.steps.push((atom.seq, atom.ends)),
            }
        }
        Some(open)
    }

    fn settle(&mut self, decision: &Decision, set: &mut dyn FnMut(usize, [u8; ATOM])) {
        let unit = decision.unit;
        let (mut from, mut to) = *self.moments(unit);
        // One made for another past may contradict what is decided: then it yields.
        if decision.to >= from && decision.from <= to {
            (from, to) = (from.max(decision.from), to.min(decision.to));
        }
        let pending = self.pending.clone();
        let mut free = decision.free.iter();
        for (n, _) in pending[unit].atoms_of(&decision.bytes).filter(|(_, a)| a.is_free()) {
            if self.fate(unit, n) != Fate::Open {
                continue;
            }
            let there = free.next().copied().unwrap_or(true);
            self.set_fate(unit, n, if there { Fate::There } else { Fate::Lost });
        }
        *self.moments(unit) = (from, to);
        self.show(unit, &decision.bytes, set);
    }

    /// Puts decided words where they are seen.
    fn show(&mut self, unit: usize, bytes: &Range<usize>, set: &mut dyn FnMut(usize, [u8; ATOM])) {
        let (from, _) = *self.moments(unit);
        for (n, atom) in self.pending[unit].atoms_by_address(bytes) {
            let there = match self.fate(unit, n) {
                Fate::Open => !atom.is_free() && atom.seq <= from,
                fate => fate == Fate::There,
            };
            if there {
                set(atom.at, atom.value);
            }
        }
    }

    /// All that nobody looked at and that can be there: decides nothing.
    pub fn rest(&self, set: &mut dyn FnMut(usize, [u8; ATOM])) {
        for (n, unit) in self.pending.iter().enumerate() {
            let (_, to) = self.units[if self.one_order { 0 } else { n }].moments;
            for (place, atom) in unit.atoms.iter().enumerate() {
                let there = match self.fate(n, place) {
                    Fate::Open => atom.is_free() || atom.seq <= to,
                    fate => fate == Fate::There,
                };
                if there {
                    set(atom.at, atom.value);
                }
            }
        }
    }

    /// Whether of some unit a part is there: of its free words some, of its ordered stores one in part.
    pub fn is_torn(&self) -> bool {
        (0..self.units.len()).any(|n| {
            let (from, to) = self.units[if self.one_order { 0 } else { n }].moments;
            let (mut there, mut lost, mut cut, mut more) = (false, false, false, false);
            for (place, atom) in self.pending[n].atoms.iter().enumerate() {
                match self.fate(n, place) {
                    Fate::There => there = true,
                    Fate::Lost => lost = true,
                    Fate::Open if !atom.is_free() && atom.seq <= from => cut = !atom.ends,
                    Fate::Open if !atom.is_free() => more |= atom.seq > to,
                    Fate::Open | Fate::Overwritten => {}
                }
            }
            there && lost || cut && more
        })
    }

    /// Words that are stored to are not in doubt any more.
    pub fn overwrite(&mut self, bytes: Range<usize>) {
        let pending = self.pending.clone();
        for unit in self.touched(&bytes) {
            for (n, _) in pending[unit].atoms_by_address(&bytes) {
                self.set_fate(unit, n, Fate::Overwritten);
            }
        }
    }

    /// Whether of something that was decided the reader has verified nothing so far.
    pub fn asks(&self) -> bool {
        !self.unguarded.is_empty()
    }

    /// The reader held these bytes against one checksum.
    pub fn verified(&mut self, parts: &[(Addr, usize)]) {
        let covered = |open: &Open| {
            parts.iter().any(|&(at, len)| {
                let (from, to) = (at.0 as usize, at.0 as usize + len);
                open.bytes.start < to && from < open.bytes.end
            })
        };
        let guard = self.guards;
        self.unguarded.retain(|&n| {
            let open = &mut self.open[n];
            let covers = covered(open);
            if covers {
                open.guard = Some(guard);
                self.guards = guard + 1;
            }
            !covers
        });
    }
}

impl Open {
    fn decision(&self, from: Moment, to: Moment, free: Vec<bool>) -> Decision {
        Decision { unit: self.unit, bytes: self.bytes.clone(), from, to, free }
    }

    /// The moments between two steps: after the first `n` of them.
    fn after(&self, n: usize) -> (Moment, Moment) {
        let from = if n == 0 { self.from } else { self.steps[n - 1].0 };
        let to = self.steps.get(n).map_or(self.to, |step| step.0 - 1);
        (from, to)
    }

    fn with(&self, steps: usize, free: impl Fn(usize) -> bool) -> Decision {
        let (from, to) = self.after(steps);
        self.decision(from, to, (0..self.free.len()).map(free).collect())
    }

    fn everything(&self) -> Decision {
        self.with(self.steps.len(), |_| true)
    }

    fn nothing(&self) -> Decision {
        self.with(0, |_| false)
    }

    fn by_chance(&self, rng: &mut Rng) -> Decision {
        let steps = match rng.below(3) {
            0 => 0,
            1 => self.steps.len(),
            _ => rng.below(self.steps.len() as u64 + 1) as usize,
        };
        let (fate, bits) = (rng.below(4), rng.draw());
        self.with(steps, |n| match fate {
            0 => true,
            1 => false,
            _ => bits.rotate_left(n as u32 * 7) & 1 == 0,
        })
    }

    /// The place of its last store.
    fn last(&self) -> Moment {
        self.steps.last().map(|s| s.0).max(self.free.last().copied()).unwrap_or(0)
    }

    fn first(&self) -> Moment {
        let step = self.steps.first().map_or(Moment::MAX, |s| s.0);
        step.min(self.free.first().copied().unwrap_or(Moment::MAX))
    }

    /// All but the last store.
    fn all_but_last(&self) -> Decision {
        if self.free.last() == Some(&self.last()) {
            self.with(self.steps.len(), |n| n + 1 < self.free.len())
        } else {
            self.with(self.steps.len() - 1, |_| true)
        }
    }

    /// Nothing but the first store.
    fn only_first(&self) -> Decision {
        if self.free.first() == Some(&self.first()) {
            self.with(0, |n| n == 0)
        } else {
            self.with(1, |_| false)
        }
    }

    /// Every version of the bytes, or patterns where there are too many; whether it is every one.
    fn options(&self) -> (Vec<Choice>, bool) {
        let free = self.free.len();
        let all = free < 10 && (self.steps.len() as u64 + 1) << free <= OPTIONS_MAX;
        let mut options = vec![self.everything(), self.nothing()];
        if all {
            for steps in 0..=self.steps.len() {
                options.extend((0..1u32 << free).map(|bits| self.with(steps, |n| bits >> n & 1 == 1)));
            }
        } else {
            let steps = self.steps.len();
            let mut pattern = |keeps: &dyn Fn(usize) -> bool| options.push(self.with(steps, keeps));
            pattern(&|n| n != 0);
            pattern(&|n| n != free / 2);
            pattern(&|n| n + 1 != free);
            pattern(&|n| n < free / 2);
            pattern(&|n| n % 2 == 0);
            let every = self.steps.len() / VERSIONS_MAX + 1;
            options.extend((0..=steps).step_by(every).map(|s| self.with(s, |_| true)));
        }
        (unique(options.into_iter().map(|o| vec![o]).collect()), all)
    }

    /// Everything, nothing, every other word; and moments in between: whether it is all of these.
    fn content(&self) -> (Vec<Choice>, bool) {
        let mut options = vec![self.everything(), self.nothing()];
        options.push(self.with(self.steps.len(), |n| n % 2 == 0));
        let every = self.steps.len() / VERSIONS_MAX + 1;
        options.extend((1..self.steps.len()).step_by(every).map(|s| self.with(s, |_| true)));
        (unique(options.into_iter().map(|o| vec![o]).collect()), every == 1)
    }
}

/// The options of bytes under one checksum: versions that were whole, and torn forms; whether there are no more versions.
fn guarded(members: &[Open]) -> (Vec<Choice>, Vec<Choice>, bool) {
    let all = || members.iter().map(Open::everything);
    let but = |n: usize, decision: Decision| -> Choice {
        all().enumerate().map(|(i, d)| if i == n { decision.clone() } else { d }).collect()
    };
    let nothing: Choice = members.iter().map(Open::nothing).collect();
    let first = (0..members.len()).min_by_key(|&n| members[n].first()).expect("a guard has members");
    let last = (0..members.len()).max_by_key(|&n| members[n].last()).expect("a guard has members");
    let mut only_first = nothing.clone();
    only_first[first] = members[first].only_first();
    let mut whole = vec![all().collect(), nothing];
    let mut torn = vec![but(last, members[last].all_but_last()), only_first];
    let salt = members.iter().fold(0u64, |salt, m| salt.wrapping_mul(31).wrapping_add(m.first()));
    let mut rng = Rng::new(salt);
    torn.push(members.iter().map(|m| m.by_chance(&mut rng)).collect());
    let words: usize = members.iter().map(|m| m.free.len()).sum();
    let mut every_version = true;
    for (n, member) in members.iter().enumerate() {
        // A checksum that leaves a word out is found by that word.
        let missing = (0..member.free.len()).filter(|_| words <= WORDS_MAX);
        torn.extend(missing.map(|w| but(n, member.with(member.steps.len(), |i| i != w))));
        if members.len() > 1 {
            torn.push(but(n, member.nothing()));
        }
        let ends: Vec<usize> =
            (0..member.steps.len()).filter(|&s| member.steps[s].1).map(|s| s + 1).collect();
        let every = ends.len() / VERSIONS_MAX + 1;
        every_version &= every == 1;
        for &end in ends.iter().step_by(every).filter(|&&end| end < member.steps.len()) {
            whole.push(but(n, member.with(end, |_| true)));
            torn.push(but(n, member.with(end + 1, |_| true)));
        }
    }
    (unique(whole), unique(torn), every_version)
}

/// Without repetitions; the first stays first.
fn unique(options: Vec<Choice>) -> Vec<Choice> {
    let mut seen = std::collections::HashSet::new();
    options.into_iter().filter(|o| seen.insert(o.clone())).collect()
}

/// A choice of the search and what is left of it.
pub(super) struct Level {
    options: Vec<Choice>,
    /// Options from here on are torn forms.
    torn_from: usize,
    /// Torn forms are tried whatever was chosen before.
    is_content: bool,
    taken: usize,
}

impl Level {
    pub fn choice(&self) -> Choice {
        self.options[self.taken].clone()
    }

    fn is_torn(&self) -> bool {
        self.taken >= self.torn_from
    }
}

/// Takes the next option of the last level that has one; false when there is none.
pub(super) fn advance(levels: &mut Vec<Level>) -> bool {
    if let Some(torn) = levels.iter().position(Level::is_torn) {
        levels.truncate(torn + 1);
    }
    while let Some(mut level) = levels.pop() {
        let tears = level.is_content || levels.iter().all(|l| l.taken == 0);
        let end = if tears { level.options.len() } else { level.torn_from };
        level.taken += 1;
        if level.taken < end {
            levels.push(level);
            return true;
        }
    }
    false
}

/// Makes levels of the choices that a run met; whether their options are all there are.
pub(super) fn levels(open: Vec<Open>) -> (Vec<Level>, bool) {
    let mut groups: Vec<Vec<Open>> = Vec::new();
    let mut places: HashMap<usize, usize> = HashMap::new();
    for choice in open {
        match choice.guard.and_then(|g| places.get(&g).copied()) {
            Some(place) => groups[place].push(choice),
            None => {
                choice.guard.map(|g| places.insert(g, groups.len()));
                groups.push(vec![choice]);
            }
        }
    }
    let mut whole = true;
    let level = |group: Vec<Open>| {
        if group[0].guard.is_some() {
            let (mut options, torn, all) = guarded(&group);
            whole &= all;
            let torn_from = options.len();
            options.extend(torn);
            return Level { options, torn_from, is_content: false, taken: 0 };
        }
        if group[0].is_content {
            let (options, all) = group[0].content();
            whole &= all;
            return Level { options, torn_from: 1, is_content: true, taken: 0 };
        }
        let (options, all) = group[0].options();
        whole &= all;
        Level { torn_from: options.len(), options, is_content: false, taken: 0 }
    };
    (groups.into_iter().map(level).collect(), whole)
}

/// In words: what the script chose, and that everything else was there.
pub(super) fn describe(chosen: &[Choice], open: &[Open]) -> String {
    let mut lines: Vec<String> = chosen.iter().flatten().map(Decision::describe).collect();
    if !open.is_empty() {
        lines.push(format!("and all of {} more reads", open.len()));
    }
    if lines.is_empty() { String::from("nothing was in doubt") } else { lines.join("; ") }
}

impl Decision {
    fn describe(&self) -> String {
        let missing = (0..self.free.len()).filter(|&n| !self.free[n]);
        let stores = match (self.from, self.to) {
            (0, Moment::MAX) => String::new(),
            (from, Moment::MAX) => format!(", cached stores from {from} on there"),
            (from, to) => format!(", cached stores up to {from} there, from {} on lost", to + 1),
        };
        let words = match self.free.len() {
            0 => String::new(),
            n => format!(", of {n} words lost: {:?}", missing.collect::<Vec<_>>()),
        };
        format!("{:#x}..{:#x}{stores}{words}", self.bytes.start, self.bytes.end)
    }
}
