//! Steps left out on purpose: whether the simulator would notice.
//!
//! A *site* is a place in the file system's source that flushes, fences, syncs or believes a checksum, or a step
//! that the source names ([`Media::omits`](crate::media::Media::omits)). A run that only notes the sites it meets
//! says which mutations there are; each of them then has to be killed: some workload must find a violation.

use std::collections::BTreeSet;
use std::fmt;
use std::panic::Location;

use parking_lot::Mutex;

/// What is done at a site.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Step {
    Flush,
    Fence,
    Sync,
    /// A checksum is held against what was read; left out, everything matches.
    Check,
    Named(&'static str),
}

/// Where a step is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Site {
    pub step: Step,
    place: Option<(&'static str, u32)>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.step, self.place) {
            (Step::Named(step), _) => write!(f, "{step}"),
            (step, Some((file, line))) => {
                write!(f, "{} at {file}:{line}", format!("{step:?}").to_lowercase())
            }
            (step, None) => write!(f, "{step:?}"),
        }
    }
}

/// What is left out; without a site nothing is, and sites are noted.
#[derive(Default)]
pub struct Mutation {
    without: Option<Site>,
    met: Mutex<BTreeSet<Site>>,
}

impl Mutation {
    pub fn without(site: Site) -> Mutation {
        Mutation { without: Some(site), met: Mutex::default() }
    }

    /// The sites met.
    pub fn sites(&self) -> Vec<Site> {
        self.met.lock().iter().copied().collect()
    }

    /// Notes a site; whether its step is left out.
    pub(super) fn meets(&self, step: Step, at: Option<&'static Location<'static>>) -> bool {
        let site = Site { step, place: at.map(|l| (l.file(), l.line())) };
        match self.without {
            Some(without) => {
                let is_it = without == site;
                if is_it && self.met.lock().is_empty() {
                    self.met.lock().insert(site);
                }
                is_it
            }
            None => {
                self.met.lock().insert(site);
                false
            }
        }
    }
}
