//! The rules by which numbers become a profile, as functions of numbers alone.
//!
//! A difference within the noise is none. Noise is half of what lies between the quartiles of the rounds, and never
//! less than a hundredth: no machine repeats itself better than that from one hour to the next.

/// What counts as noise in any case, as a share of the median.
const NOISE_SHARE_MIN: f64 = 0.01;
/// So much more bandwidth must another copy at a time bring, as a ratio.
const GROWTH_MIN: f64 = 1.1;
/// Sizes in a row at which an engine has to pay before it is used from the first of them on.
const SIZES_HELD: usize = 3;

/// Rounds of one measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub noise: f64,
}

impl Spread {
    /// Of no rounds nothing is known.
    pub fn of(rounds: &[f64]) -> Option<Spread> {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (sorted.len() - 1) as f64;
            let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            low + (high - low) * place.fract()
        };
        (!sorted.is_empty()).then(|| {
            let median = at(0.5);
            let noise = ((at(0.75) - at(0.25)) / 2.0).max(median.abs() * NOISE_SHARE_MIN);
            Spread { median, noise }
        })
    }

    /// By more than the noise of both.
    pub fn less_than(&self, other: &Spread) -> bool {
        self.median + self.noise < other.median - other.noise
    }
}

/// An engine beside the CPU at one size: its CPU time a byte and its time a byte, as multiples of the CPU's in the same
/// round, over all thread counts.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    pub bytes: usize,
    pub cpu: Spread,
    pub time: Spread,
}

impl Beside {
    /// One of the two is less by more than the noise, and the other has not grown by as much: an engine that is a tenth
    /// faster at twice the CPU time is not worth it, nor is one that saves a tenth and takes twice as long.
    pub fn pays(&self) -> bool {
        let less = |ratio: &Spread| ratio.median + ratio.noise < 1.0;
        (less(&self.cpu) || less(&self.time)) && self.cpu.median * self.time.median <= 1.0
    }
}

/// The smallest size from which on the engine pays, there and at the next two; none where it never does. Sizes ascend.
pub fn threshold(sizes: &[Beside]) -> Option<usize> {
    let held = sizes.windows(SIZES_HELD).find(|run| run.iter().all(Beside::pays));
    held.map(|run| run[0].bytes)
}

/// So many copies at a time, and what they took together.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    pub copies: usize,
    pub bytes_per_s: Spread,
    pub cpu_s_per_byte: Spread,
}

impl Count {
    /// More are faster than this by a tenth at least, and what a byte takes of the CPU has not grown by as much as its
    /// time has fallen: the rule by which an engine pays, too.
    fn is_beaten_by(&self, more: &Count) -> bool {
        let faster = more.bytes_per_s.median / self.bytes_per_s.median;
        faster >= GROWTH_MIN && more.cpu_s_per_byte.median <= faster * self.cpu_s_per_byte.median
    }
}

/// The fewest copies at a time by callers beyond which no more are worth what they take. What copies wait for in memory
/// they wait for on a CPU: efficient-pm (§4, Figure 1) limits them for its sake, where bandwidth still grows a little.
/// Counts ascend.
pub fn worth(counts: &[Count]) -> Option<usize> {
    let holds = |n: &usize| !counts[n + 1..].iter().any(|more| counts[*n].is_beaten_by(more));
    (0..counts.len()).find(holds).map(|n| counts[n].copies)
}

/// How many copies at a time are enough for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enough {
    pub copies: usize,
    /// More were tried and brought less than a tenth, whatever the noise: only then is there a limit. Else nobody knows
    /// what more would bring.
    pub saturated: bool,
}

/// The fewest copies at a time beyond which bandwidth grows by less than a tenth (Fastmove §6.3.2 takes the fewest that
/// reach the peak). Counts ascend.
pub fn enough(counts: &[Count]) -> Option<Enough> {
    let holds = |n: &usize| {
        let from = counts[*n].bytes_per_s;
        counts[n + 1..].iter().all(|to| to.bytes_per_s.median < GROWTH_MIN * from.median)
    };
    let first = (0..counts.len()).find(holds)?;
    let (from, more) = (counts[first].bytes_per_s, &counts[first + 1..]);
    let low = GROWTH_MIN * (from.median - from.noise);
    let within = |to: &Count| to.bytes_per_s.median + to.bytes_per_s.noise < low;
    let saturated = !more.is_empty() && more.iter().all(within);
    Some(Enough { copies: counts[first].copies, saturated })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(median: f64) -> Spread {
        Spread { median, noise: 0.02 * median }
    }

    fn count(copies: usize, bytes_per_s: Spread, cpu_s_per_byte: f64) -> Count {
        Count { copies, bytes_per_s, cpu_s_per_byte: exact(cpu_s_per_byte) }
    }

    #[test]
    fn noise_is_half_of_what_lies_between_the_quartiles() {
        let spread = |rounds: &[f64]| Spread::of(rounds).unwrap();
        assert_eq!(spread(&[5.0, 1.0, 9.0, 3.0, 7.0]), Spread { median: 5.0, noise: 2.0 });
        assert_eq!(spread(&[1.0, 2.0]), Spread { median: 1.5, noise: 0.25 });
        // One wild round moves neither.
        assert_eq!(spread(&[5.0, 1.0, 900.0, 3.0, 7.0]), Spread { median: 5.0, noise: 2.0 });
        // Rounds that agree by chance are not believed to the last digit.
        assert_eq!(spread(&[4.0, 4.0, 4.0]), Spread { median: 4.0, noise: 0.04 });
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn a_difference_within_the_noise_of_both_is_none() {
        let of = |median, noise| Spread { median, noise };
        for (a, b, less) in [
            (of(1.0, 0.1), of(1.3, 0.1), true),
            (of(1.0, 0.1), of(1.2, 0.1), false),
            (of(1.0, 0.1), of(1.15, 0.01), true),
            (of(1.0, 0.1), of(1.15, 0.06), false),
            (of(1.3, 0.1), of(1.0, 0.1), false),
            (of(1.0, 0.0), of(1.0, 0.0), false),
        ] {
            assert_eq!(a.less_than(&b), less, "{a:?} {b:?}");
        }
    }

    #[test]
    fn an_engine_pays_where_it_gains_more_than_it_loses() {
        for (cpu, time, pays, what) in [
            (exact(0.9), exact(1.0), true, "less CPU time in the same time"),
            (exact(1.0), exact(0.9), true, "faster for the same CPU time"),
            (exact(0.5), exact(1.8), true, "half the CPU time, not yet twice the time"),
            (exact(0.5), exact(2.2), false, "half the CPU time, more than twice the time"),
            (exact(2.0), exact(0.9), false, "a tenth faster at twice the CPU time"),
            (exact(1.0), exact(1.0), false, "nothing gained"),
            (exact(0.99), exact(0.99), false, "less, but within the noise"),
            (Spread { median: 0.8, noise: 0.25 }, exact(1.0), false, "a fifth less, but a quarter of noise"),
            (exact(1.2), exact(1.2), false, "worse in both"),
        ] {
            assert_eq!(Beside { bytes: 1, cpu, time }.pays(), pays, "{what}");
        }
    }

    /// Sizes as powers of two from 4 KiB on; each letter is whether it pays there.
    fn sizes(pays: &str) -> Vec<Beside> {
        let beside = |(n, c): (usize, char)| {
            let cpu = exact(if c == 'y' { 0.5 } else { 1.5 });
            Beside { bytes: 4096 << n, cpu, time: exact(1.0) }
        };
        pays.chars().enumerate().map(beside).collect()
    }

    #[test]
    fn a_threshold_holds_at_the_next_two_sizes() {
        for (pays, want) in [
            ("yyyyy", Some(4 << 10)),
            ("nnyyy", Some(16 << 10)),
            // Alone, or two in a row, it may be chance.
            ("ynnnn", None),
            ("yynyy", None),
            ("ynyyy", Some(16 << 10)),
            // What comes after three in a row does not count any more.
            ("nyyyn", Some(8 << 10)),
            // At the end nobody knows how it goes on.
            ("nnnyy", None),
            ("nnnnn", None),
            ("", None),
        ] {
            assert_eq!(threshold(&sizes(pays)), want, "{pays}");
        }
    }

    #[test]
    fn copies_are_enough_where_more_bring_less_than_a_tenth() {
        let counts = |rates: &[f64]| -> Vec<Count> {
            rates.iter().enumerate().map(|(n, rate)| count(n + 1, exact(*rate), 1.0)).collect()
        };
        for (rates, copies, saturated) in [
            (&[1.0, 1.9, 1.95, 1.9][..], 2, true),
            (&[1.0, 1.04, 1.03], 1, true),
            // It brings less than a tenth, but perhaps by chance.
            (&[1.0, 1.09, 1.05], 1, false),
            // Slow growth that adds up is growth: 1.19 is more than a tenth above 1.
            (&[1.0, 1.09, 1.19], 2, false),
            // It falls beyond its best.
            (&[1.0, 1.8, 1.2, 0.9], 2, true),
            // A dip is no end.
            (&[1.0, 0.9, 2.0, 2.0], 3, true),
            // It grows to the last: more might bring more.
            (&[1.0, 2.0, 3.0, 4.0], 4, false),
            (&[1.0], 1, false),
        ] {
            assert_eq!(enough(&counts(rates)), Some(Enough { copies, saturated }), "{rates:?}");
        }
        assert_eq!(enough(&[]), None);
    }

    /// Callers that copy all the time: what a byte takes is what they have, by what they reach.
    #[test]
    fn copies_of_callers_end_where_they_take_more_than_they_bring() {
        let counts = |rates: &[f64]| -> Vec<Count> {
            let of = |(n, rate): (usize, &f64)| count(n + 1, exact(*rate), (n + 1) as f64 / rate);
            rates.iter().enumerate().map(of).collect()
        };
        for (rates, copies, what) in [
            (&[1.0, 1.95, 2.9, 3.8][..], 4, "memory bears them all"),
            (&[1.0, 1.21], 1, "a fifth faster for two thirds more"),
            (&[1.0, 1.4], 1, "as much more as less"),
            (&[1.0, 1.42], 2, "half as fast again"),
            (&[1.0, 1.9, 2.0, 2.1], 2, "two do it"),
            (&[1.0, 1.3, 1.5, 2.1], 4, "more of them come into their own"),
            (&[1.0, 0.8, 0.5], 1, "it falls"),
            (&[1.0], 1, "nothing else was tried"),
        ] {
            assert_eq!(worth(&counts(rates)), Some(copies), "{what}: {rates:?}");
        }
        assert_eq!(worth(&[]), None);
        // Less CPU time for each, and no faster: nobody has more at a time for that.
        assert_eq!(worth(&[count(1, exact(1.0), 1.0), count(2, exact(1.05), 0.5)]), Some(1));
    }

    #[test]
    fn a_limit_within_the_noise_is_none() {
        // That two bring no more than one may be chance: 1.15 is within what was seen.
        let counts = |noise| [count(1, exact(1.0), 1.0), count(2, Spread { median: 1.0, noise }, 1.0)];
        assert_eq!(enough(&counts(0.15)), Some(Enough { copies: 1, saturated: false }));
        assert_eq!(enough(&counts(0.05)), Some(Enough { copies: 1, saturated: true }));
        let from = Spread { median: 1.0, noise: 0.15 };
        let counts = [count(1, from, 1.0), count(2, exact(1.0), 1.0)];
        assert_eq!(enough(&counts), Some(Enough { copies: 1, saturated: false }));
    }
}
