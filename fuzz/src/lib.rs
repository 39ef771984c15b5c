//! What the fuzzers share: images to begin with, edits that keep checksums right, and a user of what is mounted.
//!
//! Checksums would stop a fuzzer that flips bytes: nearly everything on media is behind one, and most of them
//! are seeded with a secret key. So an input is a list of [`edit::Edit`]s, and the checksum of what an edit touches
//! is made right again. [`image`] holds the images before the edits, [`visit`] reads and uses what comes of them.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

pub mod edit;
pub mod image;
pub mod visit;

/// The file of the targets that open pools by name. tests/fuzz.py gives every run a TMPDIR in memory, and removes
/// it.
pub fn pool_path() -> &'static Path {
    static PATH: LazyLock<PathBuf> =
        LazyLock::new(|| std::env::temp_dir().join(format!("lodestone-fuzz-{}.pool", std::process::id())));
    &PATH
}
