//! Lodestone: a file system for slow, byte-addressable memory, in user space.
//!
//! The rooms, and who may call whom (a test enforces it):
//!
//! ```text
//! media  <- mover <- fs <- mediator, wsp          policy: imports no room
//! wait   <- mover, runtime
//! ```
//!
//! Start at [`fs::Fs`] for the file system, [`media::Media`] for the memory below it, and [`mover::copies`] for copies to
//! such memory without a file system, [`wsp`] for whole systems that are suspended.

pub mod account;
pub mod error;
pub mod fs;
pub mod limits;
pub mod media;
pub mod mover;
pub mod quote;
pub mod runtime;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod sync;
pub mod wait;
pub mod wsp;

pub use error::{Error, Result};
