//! What the fuzzers share: images to begin with, edits that keep checksums right, and a user of what is mounted.
//!
//! Checksums would stop a fuzzer that flips bytes: nearly everything on media is behind one, and most of them
//! are seeded with a secret key. So an input is a list of [`edit::Edit`]s, and the checksum of what an edit touches
//! is made right again. [`image`] holds the images before the edits, [`visit`] reads and uses what comes of them.

pub mod edit;
pub mod image;
pub mod visit;
