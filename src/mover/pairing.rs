//! Which descriptors a copy becomes on a device that follows no virtual addresses (Fastmove §5.1, *page pairing*).
//!
//! Memory that is pinned page by page has an address for each page. A device must not run over the end of such a page.
//! If both ends of a copy were cut at their pages, a copy whose ends lie differently within their pages would need two
//! descriptors for each page. But media is contiguous: only the pages of the DRAM end are cut at, and one descriptor for
//! each of them remains ([`unpaired`] says how many there would be otherwise).
//!
//! This matters where bus addresses are physical ones. Behind an IOMMU, memory that is contiguous for the program can be
//! contiguous for the device: then both ends are, and a copy is cut at nothing but the largest transfer.

use smallvec::SmallVec;

/// What is pinned at a time, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// One end of a copy, as the bus has it.
#[derive(Clone, Copy, Debug)]
pub enum End<'a> {
    /// All in one piece from this address on.
    Contiguous(u64),
    /// Pages anywhere; the copy begins so many bytes after the beginning of the first.
    Pages { pages: &'a [u64], offset: usize },
}

impl End<'_> {
    /// The address of a byte, and how many follow it in one piece.
    fn at(&self, byte: usize) -> (u64, usize) {
        match self {
            End::Contiguous(address) => (address + byte as u64, usize::MAX),
            End::Pages { pages, offset } => {
                let within = offset + byte;
                let into = within % PAGE_BYTES;
                (pages[within / PAGE_BYTES] + into as u64, PAGE_BYTES - into)
            }
        }
    }
}

/// What becomes one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub source: u64,
    pub destination: u64,
    pub bytes: u32,
}

/// In order: exactly these bytes, each once; no part runs over the end of a page of an end that has pages, and none has
/// more than `bytes_max`.
pub fn plan(source: End, destination: End, bytes: usize, bytes_max: usize) -> SmallVec<[Part; 4]> {
    let mut parts = SmallVec::new();
    let mut done = 0;
    while done < bytes {
        let ((from, room), (to, space)) = (source.at(done), destination.at(done));
        let now = (bytes - done).min(bytes_max).min(room).min(space);
        parts.push(Part { source: from, destination: to, bytes: now as u32 });
        done += now;
    }
    parts
}

/// How many descriptors a copy would be if it were cut at the pages of both ends, of which these are the first bytes'
/// places.
pub fn unpaired(source: u64, destination: u64, bytes: usize) -> usize {
    let cuts = |at: u64| (at as usize % PAGE_BYTES + bytes.saturating_sub(1)) / PAGE_BYTES;
    if (source ^ destination).is_multiple_of(PAGE_BYTES as u64) {
        1 + cuts(source)
    } else {
        1 + cuts(source) + cuts(destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const XFER_BYTES: usize = 1 << 20;

    /// Pages that do not follow each other.
    fn scattered(count: usize, seed: u64) -> Vec<u64> {
        (0..count as u64).map(|n| (((n * 7 + seed) % 1024) * 2 + 1) << 20).collect()
    }

    fn count(offset: usize, media: u64, bytes: usize) -> (usize, usize) {
        let pages = scattered((offset + bytes).div_ceil(PAGE_BYTES), 3);
        let dram = End::Pages { pages: &pages, offset };
        let parts = plan(dram, End::Contiguous(media), bytes, XFER_BYTES).len();
        assert_eq!(plan(End::Contiguous(media), dram, bytes, XFER_BYTES).len(), parts, "in either direction");
        (parts, unpaired(offset as u64, media, bytes))
    }

    #[test]
    fn pairing_halves_the_descriptors_of_unaligned_copies() {
        // Both at a page's beginning: nothing to gain.
        assert_eq!(count(0, 0, 64 << 10), (16, 16));
        // Both equally off.
        assert_eq!(count(100, 100, 64 << 10), (17, 17));
        // The buffer is off, media is not: Fastmove's figure 7 against its figure 3.
        assert_eq!(count(100, 0, 64 << 10), (17, 32));
        assert_eq!(count(0, 100, 64 << 10), (16, 32));
        assert_eq!(count(100, 200, 64 << 10), (17, 33));
        assert_eq!(count(100, 0, 1 << 20), (257, 512));
        assert_eq!(count(4095, 4094, 3), (2, 3));
        assert_eq!(count(10, 10, 1), (1, 1));
    }

    #[test]
    fn contiguous_ends_are_cut_at_the_largest_transfer_alone() {
        let parts = plan(End::Contiguous(0x1234_5678), End::Contiguous(0x9_0000), (2 << 20) + 5, XFER_BYTES);
        let sizes: Vec<u32> = parts.iter().map(|p| p.bytes).collect();
        assert_eq!(sizes, [1 << 20, 1 << 20, 5]);
        assert_eq!(parts[2].source, 0x1234_5678 + (2 << 20));
        assert!(plan(End::Contiguous(1), End::Contiguous(2), 0, XFER_BYTES).is_empty());
    }

    /// The address of each byte of an end, one at a time.
    fn address(end: &End, byte: usize) -> u64 {
        match end {
            End::Contiguous(address) => address + byte as u64,
            End::Pages { pages, offset } => {
                pages[(offset + byte) / PAGE_BYTES] + ((offset + byte) % PAGE_BYTES) as u64
            }
        }
    }

    fn stays_in_a_page(end: &End, at: u64, bytes: u32) -> bool {
        let paged = matches!(end, End::Pages { .. });
        !paged || at / PAGE_BYTES as u64 == (at + u64::from(bytes) - 1) / PAGE_BYTES as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn every_byte_is_copied_once_and_no_page_is_left(
            offsets in (0usize..PAGE_BYTES, 0usize..PAGE_BYTES), bytes in 1usize..60_000, paged in 0u8..4,
            exponent in 12u32..21, seed in any::<u16>(),
        ) {
            let pages = |offset: usize, seed| scattered((offset + bytes).div_ceil(PAGE_BYTES), seed);
            let (from, to) = (pages(offsets.0, seed.into()), pages(offsets.1, u64::from(seed) + 500));
            let end = |pages, offset, paged| match paged {
                true => End::Pages { pages, offset },
                false => End::Contiguous(0x40_0000_0000 + offset as u64),
            };
            let source = end(&from, offsets.0, paged & 1 != 0);
            let destination = end(&to, offsets.1, paged & 2 != 0);
            let parts = plan(source, destination, bytes, 1 << exponent);
            let mut byte = 0;
            for part in &parts {
                prop_assert!(part.bytes > 0 && part.bytes <= 1 << exponent);
                prop_assert!(stays_in_a_page(&source, part.source, part.bytes));
                prop_assert!(stays_in_a_page(&destination, part.destination, part.bytes));
                for n in 0..u64::from(part.bytes) {
                    prop_assert_eq!(part.source + n, address(&source, byte));
                    prop_assert_eq!(part.destination + n, address(&destination, byte));
                    byte += 1;
                }
            }
            prop_assert_eq!(byte, bytes);
            // Cut at both ends' pages it is as many as said; cut at fewer places never more.
            let both = unpaired(offsets.0 as u64, offsets.1 as u64, bytes);
            if paged == 3 {
                prop_assert_eq!(parts.len(), both);
            } else if exponent >= 16 {
                prop_assert!(parts.len() <= both);
            }
        }
    }
}
