//! The bell; sleeping itself is not modelled.

use std::time::Duration;

#[path = "../../../src/wait/bell.rs"]
pub mod bell;

pub use bell::{Bell, Seat};

pub const POLL_MAX: Duration = Duration::from_micros(10);

pub enum Holding {
    Something,
}

pub trait Ending {
    fn look(&self) -> bool;

    fn look_awake(&self) -> bool {
        self.look()
    }

    fn bell(&self) -> Option<&Bell>;
}

pub fn for_at_most(_: &impl Ending, _: Duration, _: Holding) -> bool {
    unreachable!("no model sleeps")
}
