//! As `src/mover`: places and turns of those who copy.

#[cfg(test)]
mod models;
#[path = "../../../src/mover/places.rs"]
pub mod places;
#[path = "../../../src/mover/turns.rs"]
pub mod turns;
