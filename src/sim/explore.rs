//! Which crash states are looked at, of all that a failure at one moment could leave.

use super::media::{CrashPoint, Keep, SimMedia};

/// How much is looked at per crash point.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Leaves of the read-directed search; beyond them it samples.
    pub leaves_max: u64,
    /// States of each unguarded lane.
    pub lane_states: u32,
    pub seed: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { leaves_max: 1 << 16, lane_states: 8, seed: 1 }
    }
}

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// States that were opened.
    pub states: u64,
    /// Crash points all of whose states are covered by the states that were opened.
    pub exhausted: u64,
    pub points: u64,
}

/// A state that the visitor refused.
#[derive(Clone, Debug)]
pub struct Violation {
    pub what: String,
    /// Which lines or pages held what, in words.
    pub lost: String,
}

/// Opens states that a failure at `point` could leave. `visit` is a function of the media's content alone and
/// runs on this thread only; it returns a hash of what it saw.
pub fn explore(
    point: &CrashPoint,
    bounds: &Bounds,
    visit: &mut dyn FnMut(SimMedia) -> Result<u64, String>,
) -> (Coverage, Option<Violation>) {
    let mut coverage = Coverage { points: 1, ..Coverage::default() };
    let random = (0..bounds.lane_states as u64).map(|n| Keep::Random(bounds.seed ^ point.fences << 8 ^ n));
    for keep in [Keep::Nothing, Keep::Everything].into_iter().chain(random) {
        coverage.states += 1;
        if let Err(what) = visit(point.media(keep)) {
            return (coverage, Some(Violation { what, lost: format!("{keep:?}") }));
        }
    }
    (coverage, None)
}
