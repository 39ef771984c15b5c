//! As `src/sync`.

#[path = "../../../../src/sync/barrier.rs"]
pub mod barrier;
#[path = "../../../../src/sync/lock.rs"]
pub mod lock;
pub mod primitive;
pub mod thread;
