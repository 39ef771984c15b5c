//! Whose attributes the kernel may have, or be about to have.
//!
//! An answer with attributes may cross a change: it was read before it, and the thread that asked takes it up behind the thread that
//! changed. The kernel drops such an answer if it was told meanwhile that the inode changed. Of writes, truncations and new modes it
//! knows that itself; of what a directory, an attribute or `fallocate` changes, and of the time that a read sets, it only notes that
//! it has to ask again, and the late answer takes the note away. So it is told, once for all attributes that were handed out since
//! the last time.
//!
//! A word for each inode (and others that share it) says how often it changed, and in its lowest bit whether attributes were handed out
//! since. Who hands out sets the bit, reads, and looks whether the word is still the same; who changes counts, takes the bit
//! away, and tells the kernel where it was there. So either the reader sees the change, or the kernel hears of it while the answer
//! is on its way.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use lodestone::fs::Ino;

const WORDS: usize = 4096;
const OUT: u64 = 1;
const CHANGE: u64 = 2;
/// Readings before it is given up: then nobody may remember the last one for long.
const TRIES: usize = 4;

pub struct HandedOut {
    words: Box<[AtomicU64]>,
    /// Of all inodes: for answers that have many.
    changes: AtomicU64,
}

impl HandedOut {
    pub fn new() -> HandedOut {
        HandedOut { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), changes: AtomicU64::new(0) }
    }

    fn word(&self, ino: Ino) -> &AtomicU64 {
        &self.words[ino.0 as usize % WORDS]
    }

    /// What `read` says of an inode, and whether the kernel may keep it until it hears of a change.
    pub fn read<T, E>(&self, ino: Ino, mut read: impl FnMut() -> Result<T, E>) -> Result<(T, bool), E> {
        let word = self.word(ino);
        for _ in 0..TRIES {
            let before = word.fetch_or(OUT, SeqCst) | OUT;
            let found = read()?;
            if word.load(SeqCst) == before {
                return Ok((found, true));
            }
        }
        read().map(|found| (found, false))
    }

    /// Attributes of an inode that were read since [`changes`](HandedOut::changes) was asked go out.
    pub fn goes_out(&self, ino: Ino) {
        self.word(ino).fetch_or(OUT, SeqCst);
    }

    /// How often anything changed: where that stays the same, nothing did meanwhile.
    pub fn changes(&self) -> u64 {
        self.changes.load(SeqCst)
    }

    /// Behind a change, and before the answer to it. Whether the kernel has to be told.
    pub fn changed(&self, ino: Ino) -> bool {
        self.changes.fetch_add(1, SeqCst);
        let word = self.word(ino);
        let mut now = word.load(SeqCst);
        while let Err(other) =
            word.compare_exchange_weak(now, (now & !OUT).wrapping_add(CHANGE), SeqCst, SeqCst)
        {
            now = other;
        }
        now & OUT != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_once_for_what_was_handed_out() {
        let (out, ino) = (HandedOut::new(), Ino(7));
        assert!(!out.changed(ino), "nothing was handed out");
        assert_eq!(out.read(ino, || Ok::<_, ()>(1)), Ok((1, true)));
        assert!(out.changed(ino));
        assert!(!out.changed(ino), "it was told already");
        out.goes_out(ino);
        assert!(out.changed(ino));
        assert!(!out.changed(Ino(8)));
    }

    #[test]
    fn what_changes_while_it_is_read_is_read_again() {
        let (out, ino) = (HandedOut::new(), Ino(7));
        let mut reads = 0;
        let found = out.read(ino, || {
            reads += 1;
            if reads == 1 {
                out.changed(ino);
            }
            Ok::<_, ()>(reads)
        });
        assert_eq!(found, Ok((2, true)));
        assert!(out.changed(ino), "the second answer is on its way");
        let always = out.read(ino, || {
            out.changed(ino);
            Ok::<_, ()>(())
        });
        assert_eq!(always, Ok(((), false)));
    }
}
