//! How copies end, and how light threads wait for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::engine_port::Durability;

/// How far an engine came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// All bytes are copied.
    Done,
    /// It stopped in between: at a bad line, at a page that is not there. The rest is the caller's.
    Partial,
    /// It did nothing that counts.
    Failed,
}

/// The end of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub status: Status,
    /// Bytes copied, from the beginning of the batch on, in the order of its transfers.
    pub bytes: u64,
    /// CRC-32C of those bytes, continued from what the batch was given; 0 where none was asked for.
    pub crc: u32,
    /// Of what went to media. Of copies from it: nothing is to be done.
    pub durability: Durability,
    /// From when the engine took it up to its end, in nanoseconds: without the time in a queue.
    pub nanoseconds: u64,
}

impl Completion {
    pub(super) fn failed() -> Completion {
        Completion { status: Status::Failed, bytes: 0, crc: 0, durability: Durability::Fence, nanoseconds: 0 }
    }
}

// ---------------------------------------------------------------------------------------------------
// Waiting for it

/// Somebody whose wait is over.
pub trait Wake: Send + Sync {
    /// Ends its wait, or the next one, where it is not in one.
    fn wake(&self);
}

/// In how long the next completion is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pending(pub Duration);

/// Something that completes, and wakes who waits for it, when it is looked at.
pub trait Poller: Send + Sync {
    /// Wakes those whose wait is over; in how long more is expected, if anything is under way.
    fn poll(&self) -> Option<Pending>;
}

/// Threads that are light, as far as those see them who wait for copies (design §5, the wait ladder): the runtime tells
/// this room of itself, which knows no other.
pub trait LightThreads: Send + Sync {
    /// The caller; none where it is a thread of the operating system.
    fn current(&self) -> Option<Arc<dyn Wake>>;

    /// Lets others run until the caller is woken; may return earlier. The caller holds nothing of its thread's.
    fn park(&self);

    /// From now on workers of the caller's runtime look at the poller with this number between uthreads; it is made
    /// where they do not yet.
    fn poll(&self, number: usize, make: &dyn Fn() -> Arc<dyn Poller>);
}

static LIGHT: OnceLock<&'static dyn LightThreads> = OnceLock::new();

/// Tells of a kind of light threads; the first is kept.
pub fn know(threads: &'static dyn LightThreads) {
    // There is one runtime in this library: whoever tells again tells of the same.
    let _ = LIGHT.set(threads);
}

/// The caller as a light thread, if it is one.
pub fn light() -> Option<(&'static dyn LightThreads, Arc<dyn Wake>)> {
    let threads = *LIGHT.get()?;
    threads.current().map(|me| (threads, me))
}
