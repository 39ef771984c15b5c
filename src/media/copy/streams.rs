//! How many streams a read uses, by size.
//!
//! One core's sequential read leaves memory parallelism unused, because a hardware prefetcher stays
//! within one page; several page-spaced streams fill it. What pays depends on the machine, so that the
//! numbers stand in one table, which tuning may replace.

use super::LINE;
use super::isa::features;

/// How many places are read by turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Streams {
    /// One, by the string copy that the processor brings itself.
    One,
    /// One, and of each page but one its first line is fetched ahead, and with it the page's translation.
    OneAhead,
    /// One, whose first page is asked for at once, and then each line a page ahead.
    OneBurst,
    Four,
    /// Each line is fetched a page ahead.
    FourAhead,
    Eight,
}

impl Streams {
    pub fn count(self) -> usize {
        match self {
            Streams::One | Streams::OneAhead | Streams::OneBurst => 1,
            Streams::Four | Streams::FourAhead => 4,
            Streams::Eight => 8,
        }
    }
}

/// From `bytes_min` on, a read runs in streams of at most `span_max` bytes each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadStep {
    pub bytes_min: usize,
    pub streams: Streams,
    /// Whole lines.
    pub span_max: usize,
}

impl ReadStep {
    fn is_possible(&self) -> bool {
        self.bytes_min >= self.streams.count() * LINE
            && self.span_max >= LINE
            && self.span_max.is_multiple_of(LINE)
    }
}

/// The steps, ascending; reads below the first run as one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadTable([ReadStep; 3]);

impl Default for ReadTable {
    /// As measured on one machine with such a processor (decision 0093).
    fn default() -> ReadTable {
        match features().zen {
            Some(5..) => ReadTable::ZEN5,
            Some(4) => ReadTable::ZEN4,
            Some(_) => ReadTable::ZEN3,
            None => ReadTable::OTHERS,
        }
    }
}

impl ReadTable {
    const OTHERS: ReadTable = ReadTable([
        ReadStep { bytes_min: 16 << 10, streams: Streams::Four, span_max: 16 << 10 },
        ReadStep { bytes_min: 64 << 10, streams: Streams::Eight, span_max: 32 << 10 },
        ReadStep { bytes_min: 64 << 10, streams: Streams::Eight, span_max: 32 << 10 },
    ]);
    /// Eight streams are more than these follow, and from half a MiB on, where source and destination leave the
    /// second cache, one is faster than several.
    const ZEN4: ReadTable = ReadTable([
        ReadStep { bytes_min: 16 << 10, streams: Streams::Four, span_max: 16 << 10 },
        ReadStep { bytes_min: 64 << 10, streams: Streams::FourAhead, span_max: 64 << 10 },
        ReadStep { bytes_min: 512 << 10, streams: Streams::OneAhead, span_max: 1 << 30 },
    ]);

    /// Without AVX-512, and what it fetches ahead by itself four streams keep busy, whatever the size; told to fetch they are slower.
    const ZEN3: ReadTable =
        ReadTable([ReadStep { bytes_min: 16 << 10, streams: Streams::Four, span_max: 64 << 10 }; 3]);

    /// Its own string copy follows what one stream reads better than loops do, and fetches no line that it stores whole; but
    /// it takes a while before it asks for much.
    const ZEN5: ReadTable = ReadTable([
        ReadStep { bytes_min: 4 << 10, streams: Streams::One, span_max: 1 << 30 },
        ReadStep { bytes_min: 8 << 10, streams: Streams::OneBurst, span_max: 1 << 30 },
        ReadStep { bytes_min: 32 << 10, streams: Streams::One, span_max: 1 << 30 },
    ]);

    /// Of one to three steps. Says what is wrong with steps that no routine serves.
    pub fn new(steps: &[ReadStep]) -> Result<ReadTable, String> {
        let (Some(&last), true) = (steps.last(), steps.len() <= 3) else {
            return Err(format!("a read table has one to three steps, not {}", steps.len()));
        };
        for step in steps {
            if !step.is_possible() {
                return Err(format!("{step:?}: streams are of whole lines of {LINE} bytes"));
            }
        }
        if !steps.is_sorted_by_key(|step| step.bytes_min) {
            return Err("the steps of a read table ascend".to_owned());
        }
        Ok(ReadTable(std::array::from_fn(|i| *steps.get(i).unwrap_or(&last))))
    }

    /// The size from which on a read uses streams.
    #[inline]
    pub(super) fn bytes_min(&self) -> usize {
        self.0[0].bytes_min
    }

    /// The step for a read of at least [`bytes_min`](Self::bytes_min).
    #[inline]
    pub(super) fn step(&self, bytes: usize) -> ReadStep {
        let [first, second, third] = self.0;
        if bytes >= third.bytes_min {
            third
        } else if bytes >= second.bytes_min {
            second
        } else {
            first
        }
    }
}
