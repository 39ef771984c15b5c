//! What went through a door: bytes that requests read and wrote, all of them, since the mount.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counted by whoever serves, read by whoever tells.
#[derive(Debug, Default)]
pub struct Traffic {
    read: AtomicU64,
    written: AtomicU64,
}

impl Traffic {
    pub fn count_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn count_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn read_bytes(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    pub fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}
