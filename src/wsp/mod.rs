//! Whole-system persistence (WSP): what programs keep in slow memory, and how it is chosen.

#[cfg(feature = "memory-type")]
pub mod memory;
