//! Synchronisation that costs its usual user nothing: locks and counters without locked instructions.
//!
//! A locked instruction waits until every store before it has left the core. Behind a non-temporal copy and
//! its fence that is the time the copy takes to reach memory, and the next operation could have begun in
//! it. So the thread that uses a thing alone, as most do, takes and leaves it with plain loads and
//! stores, and whoever comes second pays for both: it asks the kernel to make every running thread of the
//! process pass a barrier (`membarrier`).
//!
//! | file | owns |
//! |---|---|
//! | `primitive` | what the others stand on: the standard library's, or a model checker's |
//! | `barrier` | the pair of barriers: one free, one dear |
//! | `thread` | small numbers that threads have to themselves |
//! | `lock` | a readers-writer lock that leans towards one thread |
//! | `per_thread` | a part for each thread |
//! | `reclaim` | shared things read without counting |
//! | `signals` | threads that take no signals of the program |
//! | `together` | several threads at one work |
//!
//! Where the kernel has no such call (before 4.14, or a sandbox forbids it) nothing leans, and all works with
//! locked instructions.

pub mod barrier;
pub mod lock;
pub mod per_thread;
pub mod primitive;
pub mod reclaim;
#[cfg(all(test, shuttle))]
pub mod schedules;
pub mod signals;
pub mod thread;
pub mod together;

pub use lock::{Lock, ReadGuard, WriteGuard};
pub use per_thread::PerThread;
