//! As `src/fs`: its epochs.

#[path = "../../../src/fs/epoch.rs"]
pub mod epoch;
