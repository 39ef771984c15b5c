//! How copies end.

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
