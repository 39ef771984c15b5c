#[path = "../../../src/fs/epoch.rs"]
pub mod epoch;
