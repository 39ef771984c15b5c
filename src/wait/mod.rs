//! Waiting for something that somebody else brings to its end: one ladder, which everybody climbs (design §5).
//!
//! | rung | when |
//! |---|---|
//! | return | it has ended |
//! | poll | it is expected within [`POLL_MAX`] |
//! | yield, park | in a uthread that holds nothing of its thread: others run meanwhile |
//! | sleep | otherwise: until a [`Bell`] rings, or, where nobody rings, until shortly before it is due |
//!
//! Nobody spins for long: a wait polls for [`POLL_TOTAL_MAX`] at most, whatever was expected. OdinFS's callers
//! spin until their copies end, and that is 31 % of its CPU time (efficient-pm §7.2). And nobody sleeps for ever:
//! after [`NAP_RINGS_MAX`] a sleeper looks again, also where the bell was to ring, so that an engine whose
//! threads are gone is found out.
//!
//! | file | owns |
//! |---|---|
//! | `ladder` | the wait itself |
//! | `rung` | the choice, as a function of what is known, and its limits, which `lode bench --only waits` measures |
//! | `bell` | who is to be woken, as [`Waker`](std::task::Waker)s: of threads, uthreads and async tasks alike |
//! | `sleeper`, `slack` | a thread's sleep, and one that ends in time |
//! | `uthread` | how the runtime says what yielding and parking are, which this room knows nothing of |
//! | `alarm` | wakers that are to be woken at a time: for async tasks whose engine wakes nobody |
//! | `pause` | a moment of polling |
//! | `spent` | what waiting takes of the CPU, where somebody measures it |

mod alarm;
mod bell;
mod ladder;
pub mod pause;
mod rung;
#[cfg(all(test, shuttle))]
mod schedules;
pub mod slack;
mod sleeper;
pub mod spent;
mod uthread;

pub use bell::{Bell, Seat};
pub use ladder::{Ending, Seen, for_at_most, poll_for, until};
pub use rung::{NAP_RINGS_MAX, POLL_MAX, POLL_TOTAL_MAX, look_again};
pub(crate) use sleeper::Sleeper;
pub use sleeper::current_waker;
pub use uthread::{Uthreads, is_uthread, keeping_thread, lets_others_run, provide};

/// What the caller has, that it must not keep others from while it lets its worker run something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// A lock, an epoch, a slot of its thread, stores that this thread has still to fence: it keeps its thread.
    Something,
    /// Nothing of the kind: inside of a uthread others run on the worker meanwhile.
    Nothing,
}

impl Holding {
    /// Whether who waits with it keeps the thread: then it may as well do itself what it waits for.
    pub fn keeps_thread(self) -> bool {
        self == Holding::Something || !lets_others_run()
    }
}
