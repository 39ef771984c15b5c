//! Simulation: the production code on simulated media.
//!
//! `media` keeps, for each store, whether it is durable, and makes the images that a power failure could
//! leave behind. `tests/crash.rs` opens each of them with the production code.

pub mod explore;
pub mod media;
pub mod mutation;
mod undecided;
