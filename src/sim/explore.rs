//! Which crash states are opened, of all that a failure at one moment could leave.
//!
//! 1. **Read-directed search with the checksum guard**, depth first over the choices of `undecided`: it covers
//!    every state, as far as its reader can tell states apart, unless a bound stops it; from there on it samples.
//! 2. **Three lanes without the guard**, because a guard can hide an error in the checksum's own code: one or two
//!    stores there, all but one or two, and by chance.

use std::collections::HashSet;

use super::media::{CrashPoint, Keep, Rng, SimMedia};
use super::undecided::{self, Level, Open, Script};

/// How much is looked at per crash point.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Leaves of the read-directed search; half of them come by chance where it is not through by then.
    pub leaves_max: u64,
    /// States of each unguarded lane.
    pub lane_states: u32,
    pub seed: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { leaves_max: 1 << 16, lane_states: 4, seed: 1 }
    }
}

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// States that were opened.
    pub states: u64,
    pub points: u64,
    /// Crash points whose states were all covered.
    pub exhausted: u64,
    /// Results that visitors told apart, summed over the points.
    pub outcomes: u64,
    /// States that failures could leave at the point with the most of them: two to the power of this.
    pub total_log2_max: f64,
}

impl std::ops::AddAssign for Coverage {
    fn add_assign(&mut self, other: Coverage) {
        self.states += other.states;
        self.points += other.points;
        self.exhausted += other.exhausted;
        self.outcomes += other.outcomes;
        self.total_log2_max = self.total_log2_max.max(other.total_log2_max);
    }
}

/// A state that the visitor refused.
#[derive(Clone, Debug)]
pub struct Violation {
    pub what: String,
    /// What was there of the lines or pages that were looked at, in words.
    pub lost: String,
}

/// Opens states that a failure at `point` could leave. `visit` is a function of the media's content alone and
/// runs on this thread only; it returns a hash of what it saw.
pub fn explore(
    point: &CrashPoint,
    bounds: &Bounds,
    visit: &mut dyn FnMut(SimMedia) -> Result<u64, String>,
) -> (Coverage, Option<Violation>) {
    let mut search = Search {
        point,
        bounds,
        visit,
        coverage: Coverage { points: 1, total_log2_max: point.states_log2(), ..Coverage::default() },
        outcomes: HashSet::new(),
    };
    let found = search.directed().and_then(|()| search.lanes()).err();
    search.coverage.outcomes = search.outcomes.len() as u64;
    (search.coverage, found)
}

struct Search<'a> {
    point: &'a CrashPoint,
    bounds: &'a Bounds,
    visit: &'a mut dyn FnMut(SimMedia) -> Result<u64, String>,
    coverage: Coverage,
    outcomes: HashSet<u64>,
}

impl Search<'_> {
    /// Depth first over the choices of whoever reads.
    fn directed(&mut self) -> Result<(), Violation> {
        let mut levels: Vec<Level> = Vec::new();
        let mut whole = true;
        for _ in 0..self.bounds.leaves_max.div_ceil(2) {
            let choices = levels.iter().map(Level::choice).collect();
            let open = self.leaf(Script { choices, chance: None })?;
            let (new, all) = undecided::levels(open);
            whole &= all;
            levels.extend(new);
            if !undecided::advance(&mut levels) {
                self.coverage.exhausted += whole as u64;
                return Ok(());
            }
        }
        for n in 0..self.bounds.leaves_max / 2 {
            let chance = Some(Rng::new(self.bounds.seed ^ self.point.fences << 24 ^ n));
            self.leaf(Script { choices: Vec::new(), chance })?;
        }
        Ok(())
    }

    /// One state, decided as it is read; the choices that the script did not name.
    fn leaf(&mut self, script: Script) -> Result<Vec<Open>, Violation> {
        let chosen = script.choices.clone();
        let (media, met) = self.point.undecided(script);
        let judged = self.judge(media);
        let open = met.lock().take().expect("whoever looked at it keeps no media");
        judged.map_err(|what| Violation { what, lost: undecided::describe(&chosen, &open) })?;
        Ok(open)
    }

    fn judge(&mut self, media: SimMedia) -> Result<(), String> {
        self.coverage.states += 1;
        self.outcomes.insert((self.visit)(media)?);
        Ok(())
    }

    fn lanes(&mut self) -> Result<(), Violation> {
        if self.point.lines() == 0 {
            return Ok(());
        }
        let seeds =
            (0..self.bounds.lane_states as u64).map(|n| self.bounds.seed ^ self.point.fences << 24 ^ n << 8);
        for keep in seeds.flat_map(|seed| [Keep::Few(seed), Keep::AllButFew(seed), Keep::Random(seed)]) {
            let media = self.point.media(keep);
            self.judge(media).map_err(|what| Violation { what, lost: format!("{keep:?}") })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::media::{Addr, Domain, LINE, Media, crc32c};

    const ENTRIES: usize = 12;
    const WHOLE: [Range<usize>; 2] = [8..16, 16..LINE];

    /// A log of entries of one line, each with a checksum over `covered` bytes, stored under one fence.
    fn toy_log(entries: usize, covered: &[Range<usize>]) -> CrashPoint {
        let media = SimMedia::new(vec![0; 1 << 16], Domain::Memory);
        let mut flushed = crate::media::Flushed::issued();
        for n in 0..entries {
            let mut line = [n as u8 + 1; LINE];
            let crc = checksum(&line, covered);
            line[..8].copy_from_slice(&(crc as u64).to_le_bytes());
            flushed = flushed.and(media.copy_nt(Addr((n * LINE) as u64), &line).unwrap());
        }
        let point = media.crash_point();
        media.fence(flushed);
        assert_eq!(media.crash_point().lines(), 0);
        point
    }

    fn checksum(line: &[u8; LINE], covered: &[Range<usize>]) -> u32 {
        covered.iter().fold(0, |crc, bytes| crc32c(&line[bytes.clone()], crc))
    }

    /// Reads entries up to the first that does not validate; every word of those before must be the one written.
    fn replay(media: &SimMedia, entries: usize, covered: &[Range<usize>]) -> Result<u64, String> {
        for n in 0..entries {
            let (at, mut line) = (Addr((n * LINE) as u64), [0; LINE]);
            media.read(at, &mut line).unwrap();
            let crc = u64::from_le_bytes(line[..8].try_into().unwrap());
            if !media.verified(&[(at, LINE)], crc == checksum(&line, covered) as u64) {
                return Ok(n as u64);
            }
            if line[8..] != [n as u8 + 1; LINE - 8] {
                return Err(format!("entry {n} counts and is torn"));
            }
        }
        Ok(entries as u64)
    }

    #[test]
    fn a_guard_makes_checksummed_logs_cheap() {
        let point = toy_log(ENTRIES, &WHOLE);
        let bounds = Bounds { lane_states: 0, ..Bounds::default() };
        let (coverage, found) = explore(&point, &bounds, &mut |m| replay(&m, ENTRIES, &WHOLE));
        assert!(found.is_none(), "{found:?}");
        assert_eq!((coverage.exhausted, coverage.outcomes), (1, ENTRIES as u64 + 1));
        assert!(coverage.states < 14 * ENTRIES as u64, "{coverage:?}");
        assert_eq!(coverage.total_log2_max, (ENTRIES * 8) as f64);
    }

    #[test]
    fn a_checksum_that_omits_a_word_is_found() {
        for (entries, omitted) in [1, ENTRIES, 64].into_iter().flat_map(|n| (1..8).map(move |w| (n, w))) {
            let covered = [8..omitted * 8, (omitted + 1) * 8..LINE];
            let point = toy_log(entries, &covered);
            let bounds = Bounds { lane_states: 0, ..Bounds::default() };
            let (coverage, found) = explore(&point, &bounds, &mut |m| replay(&m, entries, &covered));
            let found = found.unwrap_or_else(|| panic!("{entries}: {coverage:?}"));
            assert!(found.what.contains("torn"), "{found:?}");
            assert!(found.lost.ends_with(&format!("lost: [{omitted}]")), "{found:?}");
        }
    }

    /// What two words may be, by domain, when the second is stored after the first and nothing is fenced. Which of them is
    /// looked at first changes nothing.
    fn states(domain: Domain, cached: bool, far: bool) -> Vec<(u64, u64)> {
        states_of(domain, [cached; 2], if far { 4096 } else { 8 }, false)
    }

    fn states_of(domain: Domain, cached: [bool; 2], second: u64, torn_pages: bool) -> Vec<(u64, u64)> {
        let [states, other] =
            [false, true].map(|second_first| states_seen(domain, cached, second, torn_pages, second_first));
        assert_eq!(states, other, "{domain}");
        states
    }

    fn states_seen(
        domain: Domain,
        cached: [bool; 2],
        second: u64,
        torn_pages: bool,
        second_first: bool,
    ) -> Vec<(u64, u64)> {
        let media = SimMedia::new(vec![0; 1 << 16], domain);
        if torn_pages {
            media.tear_pages();
        }
        let places = [Addr(0), Addr(second)];
        for (at, cached) in places.into_iter().zip(cached) {
            if cached {
                media.store64(at, 1).unwrap().redundant("the test looks at what is not flushed");
            } else {
                let _ = media.copy_nt(at, &1u64.to_le_bytes()).unwrap();
            }
        }
        let mut seen = Vec::new();
        let bounds = Bounds { lane_states: 0, ..Bounds::default() };
        let (coverage, _) = explore(&media.crash_point(), &bounds, &mut |m| {
            if second_first {
                m.load64(places[1]).unwrap();
            }
            seen.push((m.load64(places[0]).unwrap(), m.load64(places[1]).unwrap()));
            Ok(0)
        });
        assert_eq!(coverage.exhausted, 1);
        seen.sort_unstable();
        seen
    }

    #[test]
    fn domains_leave_what_they_promise() {
        let (any, prefix) = (vec![(0, 0), (0, 1), (1, 0), (1, 1)], vec![(0, 0), (1, 0), (1, 1)]);
        assert_eq!(states(Domain::Memory, true, false), prefix, "a line keeps its order");
        assert_eq!(states(Domain::Memory, true, true), any, "two lines do not");
        assert_eq!(states(Domain::Memory, false, false), any, "nor do non-temporal stores");
        assert_eq!(states(Domain::CpuCache, true, false), prefix);
        assert_eq!(states(Domain::CpuCache, true, true), prefix, "all cached stores have one order");
        assert_eq!(states(Domain::CpuCache, false, true), any);
        for cached in [[true, false], [false, true]] {
            let why = "streaming stores have no order with others";
            assert_eq!(states_of(Domain::CpuCache, cached, 4096, false), any, "{why}");
            assert_eq!(states_of(Domain::Memory, cached, 8, false), any, "{why}");
        }
        assert_eq!(states(Domain::PageCache, false, false), prefix, "a page is of one moment");
        assert_eq!(states(Domain::PageCache, false, true), any, "two pages are of two");
        assert_eq!(states_of(Domain::PageCache, [true; 2], 504, true), prefix, "a sector is of one moment");
        assert_eq!(states_of(Domain::PageCache, [true; 2], 512, true), any, "and a torn page of several");
    }

    /// Each older version is one that may be found; of more than are told apart not all are.
    #[test]
    fn a_point_with_more_versions_than_are_tried_is_not_covered() {
        for (versions, covered) in [(4, 1), (40, 0)] {
            let media = SimMedia::new(vec![0; 1 << 16], Domain::Memory);
            for n in 1..=versions {
                media.store64(Addr(0), n).unwrap().redundant("the test looks at what is not flushed");
            }
            let (coverage, _) = explore(&media.crash_point(), &Bounds::default(), &mut |m| {
                let word = m.load64(Addr(0)).unwrap();
                m.verified(&[(Addr(0), 8)], true);
                Ok(word)
            });
            assert_eq!(coverage.exhausted, covered, "{versions}: {coverage:?}");
        }
    }

    #[test]
    fn what_is_not_read_is_no_choice() {
        let point = toy_log(ENTRIES, &WHOLE);
        let (coverage, _) = explore(&point, &Bounds { lane_states: 0, ..Bounds::default() }, &mut |m| {
            m.load64(Addr(8)).map_err(|e| format!("{e:?}"))
        });
        assert_eq!((coverage.states, coverage.outcomes, coverage.exhausted), (2, 2, 1));
    }

    #[test]
    fn fenced_stores_are_certain_and_a_failed_adr_takes_them() {
        let media = SimMedia::new(vec![0; 4096], Domain::Memory);
        let flushed = media.flush(media.store64(Addr(64), 7).unwrap());
        media.fence(flushed);
        let point = media.crash_point();
        let (coverage, _) = explore(&point, &Bounds::default(), &mut |m| Ok(m.load64(Addr(64)).unwrap()));
        assert_eq!((coverage.states, coverage.outcomes), (1, 1));
        let lost =
            (0..64).filter(|&n| point.media(Keep::FailedAdr(n)).load64(Addr(64)).unwrap() == 0).count();
        assert!((1..64).contains(&lost), "{lost}");
    }
}
