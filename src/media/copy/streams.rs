//! How many streams a read uses, by size.
//!
//! One core's sequential read leaves memory parallelism unused, because a hardware prefetcher stays
//! within one page; several page-spaced streams fill it. What pays depends on the machine, so that the
//! numbers stand in one table, which tuning may replace.

use super::LINE;

/// From `bytes_min` on, a read runs as `streams` streams of at most `span_max` bytes each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadStep {
    pub bytes_min: usize,
    /// 2, 4 or 8.
    pub streams: usize,
    /// Whole lines.
    pub span_max: usize,
}

impl ReadStep {
    fn is_possible(&self) -> bool {
        matches!(self.streams, 2 | 4 | 8)
            && self.bytes_min >= self.streams * LINE
            && self.span_max >= LINE
            && self.span_max.is_multiple_of(LINE)
    }
}

/// The steps, ascending; reads below the first run as one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadTable([ReadStep; 2]);

impl Default for ReadTable {
    /// As measured on one machine (docs/decisions).
    fn default() -> ReadTable {
        ReadTable([
            ReadStep { bytes_min: 16 << 10, streams: 4, span_max: 16 << 10 },
            ReadStep { bytes_min: 64 << 10, streams: 8, span_max: 32 << 10 },
        ])
    }
}

impl ReadTable {
    /// Says what is wrong with steps that no routine serves.
    pub fn new(steps: [ReadStep; 2]) -> Result<ReadTable, String> {
        for step in &steps {
            if !step.is_possible() {
                return Err(format!("{step:?}: streams are 2, 4 or 8, of whole lines of {LINE} bytes"));
            }
        }
        if steps[0].bytes_min > steps[1].bytes_min {
            return Err("the steps of a read table ascend".to_owned());
        }
        Ok(ReadTable(steps))
    }

    /// The size from which on a read uses streams.
    #[inline]
    pub(super) fn bytes_min(&self) -> usize {
        self.0[0].bytes_min
    }

    /// The step for a read of at least [`bytes_min`](Self::bytes_min).
    #[inline]
    pub(super) fn step(&self, bytes: usize) -> ReadStep {
        if bytes >= self.0[1].bytes_min { self.0[1] } else { self.0[0] }
    }
}
