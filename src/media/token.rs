//! The three states of a store on its way to durability, as types.
//!
//! `Dirty -> Flushed -> Durable`: [`Media::flush`](super::Media::flush) and
//! [`Media::fence`](super::Media::fence) are the only steps between them, and what acknowledges an
//! operation takes [`Durable`], so that a forgotten fence does not compile. Three states and no more:
//! finer ones would leak into every signature of the file system.

use super::Addr;

/// Stored through the cache; nothing durable yet.
#[must_use = "a dirty store is lost at power failure: flush it"]
#[derive(Debug)]
pub struct Dirty {
    pub(crate) at: Addr,
    pub(crate) len: usize,
}

/// Written back or stored non-temporally; durable only after a fence by the *same thread*.
#[must_use = "a flushed store is not ordered: fence it"]
#[derive(Debug)]
pub struct Flushed(());

/// Survives power failure, as far as the domain goes.
#[derive(Clone, Copy, Debug)]
pub struct Durable(());

impl Dirty {
    /// For media implementations only.
    #[inline]
    pub fn stored(at: Addr, len: usize) -> Dirty {
        Dirty { at, len }
    }

    /// Gives up the claim to durability, because the same bytes are durable elsewhere (a redo record) and
    /// recovery would store them again. `why` is for the reader.
    #[inline]
    pub fn redundant(self, _why: &'static str) {}

    #[inline]
    pub fn at(&self) -> Addr {
        self.at
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Flushed {
    /// Not fenced: on a medium where a fence makes nothing durable the next sync does it, and nothing relies on
    /// it before.
    #[inline]
    pub fn left_to_sync(self) {}

    /// Another token stands for these stores: the one that whoever is told of them gets.
    #[inline]
    pub fn stood_for(self) {}

    /// For media implementations, and for what stands for others' tokens.
    #[inline]
    pub fn issued() -> Flushed {
        Flushed(())
    }

    /// One fence covers both.
    #[inline]
    pub fn and(self, _other: Flushed) -> Flushed {
        self
    }
}

impl Durable {
    /// For media implementations only.
    #[inline]
    pub fn fenced() -> Durable {
        Durable(())
    }
}
