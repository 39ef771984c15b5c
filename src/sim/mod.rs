//! Simulation: the production code on simulated media.
//!
//! | file | owns |
//! |---|---|
//! | `media` | media that knows for each store whether it is durable |
//! | `explore` | which of the states that a failure could leave are opened |
//! | `undecided` | what a failure left to chance, decided as it is read |
//! | `engine` | a device that copies |
//! | `model` | the oracle: what a file system should say |
//! | `tree` | what a file system does say |
//! | `workload` | operations, the sequences of them, and the pools they begin on |
//! | `source` | where in memory the bytes of a write lie |
//! | `machine` | one operation on the production code and on the oracle, in step |
//! | `judge` | whether a state that a failure left is one that is allowed |
//! | `run` | sequences of operations, cut short by failures |
//! | `history` | operations that overlap in time, and their serial orders |
//! | `deferred` | the same where power failed on an ordinary file |
//! | `begun` | writes that go on while others begin and end, cut short by failures |
//! | `concurrent` | threads, whose outcome must be some serial order, cut short by failures |
//! | `heap` | persistent heaps under the same failures |
//! | `mutation` | steps left out on purpose, and whether that is noticed |

pub mod begun;
#[cfg(all(test, shuttle))]
mod concurrent;
#[cfg(test)]
mod deferred;
pub mod engine;
pub mod explore;
pub mod faults;
pub mod heap;
mod history;
pub mod judge;
pub mod machine;
pub mod media;
pub mod model;
pub mod mutation;
pub mod run;
mod source;
pub mod tree;
mod undecided;
pub mod workload;

use std::cell::Cell;
use std::thread::LocalKey;

/// Runs with a flag of this thread set; not set afterwards, however that ends.
fn with_flag<T>(flag: &'static LocalKey<Cell<bool>>, does: impl FnOnce() -> T) -> T {
    struct Unset(&'static LocalKey<Cell<bool>>);

    impl Drop for Unset {
        fn drop(&mut self) {
            self.0.set(false);
        }
    }

    flag.set(true);
    let _unset = Unset(flag);
    does()
}
