//! Where in memory the bytes of a write lie. A device takes them only where lines of theirs and of the media begin together
//! (`mover::schedule`); where the allocator puts them is chance, with which nothing would replay.

use std::ops::Deref;

use super::engine::lies;
use crate::media::LINE;

/// Of every so many writes one lies where no device takes it past the caches.
const ELSEWHERE_EVERY: u64 = 4;
/// Bytes into a line, that one.
const ELSEWHERE: u64 = 16;
/// Places that are tried for bytes that a device is to keep. An allocator that has another order may have no such place.
const TRIES_MAX: usize = 400;

/// Bytes that lie where their tag and the place in a file that they are for say.
pub(super) struct Source {
    room: Vec<u8>,
    from: usize,
    len: usize,
}

impl Source {
    /// For the file's bytes from `at` on.
    pub fn of(bytes: &[u8], at: u64, tag: u64) -> Source {
        let elsewhere = if tag % ELSEWHERE_EVERY == ELSEWHERE_EVERY - 1 { ELSEWHERE } else { 0 };
        let mut room = vec![0; bytes.len() + LINE];
        let from = (within(at + elsewhere) + LINE - lies(&room)) % LINE;
        room[from..from + bytes.len()].copy_from_slice(bytes);
        Source { room, from, len: bytes.len() }
    }
}

impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[self.from..][..self.len]
    }
}

/// As a source that lies well, of bytes that are given away.
pub(super) fn owned(bytes: &[u8], at: u64) -> Box<[u8]> {
    // Those that lie elsewhere stay there until then, and what is between them differs in size, so that each is another place.
    let (mut elsewhere, mut between) = (Vec::new(), Vec::new());
    loop {
        let found: Box<[u8]> = bytes.into();
        if lies(&found) == within(at) || elsewhere.len() == TRIES_MAX {
            return found;
        }
        between.push(vec![0u8; 8 + 16 * (elsewhere.len() % 4)]);
        elsewhere.push(found);
    }
}

fn within(at: u64) -> usize {
    (at % LINE as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lie_where_they_should() {
        let bytes: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        for at in [0, 1, 16, 63, 64, 4000, 20_480] {
            for tag in 0..8 {
                let source = Source::of(&bytes, at, tag);
                let wanted = if tag % 4 == 3 { within(at + 16) } else { within(at) };
                assert_eq!(lies(&source), wanted, "{at} {tag}");
                assert!(*source == *bytes);
            }
        }
        for (at, len) in [0, 32, 4000, 30_000].into_iter().flat_map(|at| [(at, 300), (at, 4096), (at, 5000)])
        {
            let owned = owned(&bytes[..len], at);
            assert!(*owned == bytes[..len]);
            assert_eq!(lies(&owned), within(at), "{at} {len}");
        }
    }
}
