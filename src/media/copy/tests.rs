//! Every routine of every instruction set of this machine, at all alignments, against plain Rust.
//!
//! The media here is a buffer with guard bytes around each range: a store outside its range shows.

use crc_fast::CrcAlgorithm;
use proptest::prelude::*;

use super::*;
use crate::media::Domain;

const GUARD: u8 = 0xa5;
/// Room for every start within two lines and the longest length, and guards.
const MEDIA_BYTES: usize = 3 * (64 << 10);

/// Aligned as a mapping is.
#[repr(align(4096))]
struct Media([u8; MEDIA_BYTES]);

fn media() -> Box<Media> {
    // SAFETY: zeros are bytes; built on the heap, because a stack may be too small for it.
    let mut media: Box<Media> = unsafe { Box::new_zeroed().assume_init() };
    media.0.fill(GUARD);
    media
}

fn copiers() -> Vec<(String, Copier)> {
    let mut all = Vec::new();
    for domain in [Domain::CpuCache, Domain::Memory, Domain::PageCache, Domain::Volatile] {
        for isa in Isa::available() {
            let routines = Routines::choose(Some(isa)).unwrap().1;
            all.push((format!("{isa} {domain}"), Copier::new(routines, domain, ReadTable::default())));
        }
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let oldest = x86_64::routines(Isa::Sse2, &x86_64::Features::oldest());
            all.push((format!("oldest {domain}"), Copier::new(oldest, domain, ReadTable::default())));
        }
        let portable = portable::routines(Isa::Portable, &portable::Features::detect());
        all.push((format!("portable {domain}"), Copier::new(portable, domain, ReadTable::default())));
    }
    all
}

fn reference_crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// What lies around [at, at + len) is untouched.
fn assert_guards(media: &Media, at: usize, len: usize, what: &str) {
    const UNTOUCHED: &[u8] = &[GUARD; MEDIA_BYTES];
    let is_untouched = |bytes: &[u8]| bytes == &UNTOUCHED[..bytes.len()];
    let around = is_untouched(&media.0[..at]) && is_untouched(&media.0[at + len..]);
    assert!(around, "{what} stored outside {at}..{}", at + len);
}

fn check_stores(at: usize, src: &[u8], split: usize) {
    let crc = reference_crc(src);
    let len = src.len();
    let range = at..at + len;
    for (name, copier) in copiers() {
        let mut m = media();
        // SAFETY: the buffer is larger than `at + len`, and `src` is another.
        unsafe {
            let dst = m.0.as_mut_ptr().add(at);
            copier.copy_cached(dst, src).unwrap();
            assert!(&m.0[range.clone()] == src, "{name} copy_cached at {at}, {len} bytes");
            assert_guards(&m, at, len, &format!("{name} copy_cached"));

            copier.zero_nt(dst, len).unwrap();
            assert!(m.0[range.clone()].iter().all(|&b| b == 0), "{name} zero_nt at {at}, {len} bytes");
            assert_guards(&m, at, len, &format!("{name} zero_nt"));

            copier.copy_nt(dst, src).unwrap();
            assert!(&m.0[range.clone()] == src, "{name} copy_nt at {at}, {len} bytes");
            assert_guards(&m, at, len, &format!("{name} copy_nt"));

            copier.zero_nt(dst, len).unwrap();
            let got = copier.copy_nt_crc(dst, &src[..split], 0).unwrap();
            let got = copier.copy_nt_crc(dst.add(split), &src[split..], got).unwrap();
            assert_eq!(got, crc, "{name} copy_nt_crc at {at}, {len} bytes split at {split}");

            if len > 0 {
                copier.write_back(dst, len).unwrap();
            }
            copier.fence();
            assert!(&m.0[range.clone()] == src, "{name} copy_nt_crc at {at}, {len} bytes");
            assert_guards(&m, at, len, &format!("{name} copy_nt_crc"));
        }
    }
}

fn check_loads(at: usize, src: &[u8], split: usize, dst_at: usize) {
    let crc = reference_crc(src);
    let len = src.len();
    let mut m = media();
    m.0[at..at + len].copy_from_slice(src);
    for (name, copier) in copiers() {
        let mut dst = vec![GUARD; dst_at + len + 64];
        // SAFETY: the buffer is larger than `at + len`, and `dst` is another.
        let got = unsafe {
            let media = m.0.as_ptr().add(at);
            copier.read(&mut dst[dst_at..dst_at + len], media).unwrap();
            let got = copier.crc32c(media, split, 0).unwrap();
            copier.crc32c(media.add(split), len - split, got).unwrap()
        };
        assert!(&dst[dst_at..dst_at + len] == src, "{name} read at {at}, {len} bytes");
        let guards = dst[..dst_at].iter().chain(&dst[dst_at + len..]);
        assert!(guards.copied().all(|b| b == GUARD), "{name} read at {at} left its {len} bytes");
        assert_eq!(got, crc, "{name} crc32c at {at}, {len} bytes split at {split}");
    }
}

/// Every length and start around the sizes where a routine takes another way.
#[test]
fn lengths_around_every_branch() {
    let src = pattern(2200, 7);
    let near = |n: usize| [n - 1, n, n + 1];
    let lengths = (0..=130).chain([191, 255, 256, 257, 319, 320, 511, 512, 513, 1024]).chain(near(2048));
    for (i, len) in lengths.enumerate() {
        for at in [4096, 4097, 4096 + 63, 4096 + (i * 7) % 64] {
            let split = (i * 31) % (len + 1);
            check_stores(at, &src[i % 3..][..len], split);
            check_loads(at, &src[i % 3..][..len], split, i % 64);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn stores_of_any_size_and_alignment(
        at in 4096usize..4096 + 128, len in prop_oneof![0usize..600, 0usize..(100 << 10)],
        from in 0usize..64, seed in any::<u64>(), split in any::<prop::sample::Index>(),
    ) {
        let src = pattern(from + len, seed);
        check_stores(at, &src[from..], split.index(len + 1));
    }

    #[test]
    fn loads_of_any_size_and_alignment(
        at in 4096usize..4096 + 128, len in prop_oneof![0usize..600, 0usize..(150 << 10)],
        dst_at in 0usize..64, seed in any::<u64>(), split in any::<prop::sample::Index>(),
    ) {
        check_loads(at, &pattern(len, seed), split.index(len + 1), dst_at);
    }

    #[test]
    fn checksum_of_dram(bytes in proptest::collection::vec(any::<u8>(), 0..5000), split in any::<prop::sample::Index>()) {
        let (a, b) = bytes.split_at(split.index(bytes.len() + 1));
        prop_assert_eq!(crc32c(b, crc32c(a, 0)), reference_crc(&bytes));
    }
}

#[test]
fn words_are_loaded_and_stored_whole() {
    for (name, copier) in copiers() {
        let mut m = media();
        // SAFETY: word 1 of the buffer, which is aligned.
        unsafe {
            let word = m.0.as_mut_ptr().add(8).cast::<u64>();
            copier.store64(word, 0x0123_4567_89ab_cdef).unwrap();
            assert_eq!(copier.load64(word).unwrap(), 0x0123_4567_89ab_cdef, "{name}");
        }
        assert_eq!(m.0[8..16], 0x0123_4567_89ab_cdef_u64.to_le_bytes());
        assert_guards(&m, 8, 8, &name);
    }
}

thread_local! {
    /// What the recording routines were called with: (address, bytes).
    static ON_THE_WAY: std::cell::RefCell<Vec<(usize, usize)>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn record(at: usize, len: usize) -> Outcome {
    ON_THE_WAY.with_borrow_mut(|ranges| ranges.push((at, len)));
    Outcome::done(0)
}

unsafe extern "C" fn record_write_back(at: *const u8, len: usize) -> Outcome {
    record(at.addr(), len)
}

unsafe extern "C" fn record_copy_lines(dst: *mut u8, _src: *const u8, len: usize) -> Outcome {
    record(dst.addr(), len)
}

unsafe extern "C" fn record_copy_lines_crc(
    dst: *mut u8,
    _src: *const u8,
    len: usize,
    _state: u32,
) -> Outcome {
    record(dst.addr(), len)
}

unsafe extern "C" fn record_zero_lines(dst: *mut u8, len: usize) -> Outcome {
    record(dst.addr(), len)
}

/// In the domain `memory` every byte of a non-temporal store is either streamed or written back, the
/// unaligned edges too; elsewhere nothing is written back.
#[test]
fn no_edge_of_a_store_is_left_in_the_cache() {
    let recording = Routines {
        write_back: record_write_back,
        copy_lines: record_copy_lines,
        copy_lines_crc: record_copy_lines_crc,
        zero_lines: record_zero_lines,
        ..Routines::default_choice()
    };
    let memory = Copier::new(recording, Domain::Memory, ReadTable::default());
    let cpu_cache = Copier::new(recording, Domain::CpuCache, ReadTable::default());
    let mut m = media();
    let src = pattern(700, 5);
    for (at, len) in (0..64).flat_map(|at| [1, 8, 63, 64, 65, 127, 128, 700].map(|len| (at, len))) {
        // SAFETY: the buffer is larger than `at + len`.
        let dst = unsafe { m.0.as_mut_ptr().add(at) };
        for store in 0..3 {
            let run = |copier: &Copier| {
                // SAFETY: as above, and `src` is another.
                unsafe {
                    match store {
                        0 => copier.copy_nt(dst, &src[..len]).unwrap(),
                        1 => _ = copier.copy_nt_crc(dst, &src[..len], 0).unwrap(),
                        _ => copier.zero_nt(dst, len).unwrap(),
                    }
                }
                ON_THE_WAY.take()
            };
            let mut ranges = run(&memory);
            ranges.sort();
            let mut covered = dst.addr();
            for (from, bytes) in ranges {
                assert_eq!(from, covered, "store {store} of {len} bytes at {at} leaves a gap");
                covered += bytes;
            }
            assert_eq!(covered, dst.addr() + len, "store {store} of {len} bytes at {at}");
            let streamed = run(&cpu_cache);
            assert!(streamed.iter().all(|(from, bytes)| from % LINE == 0 && bytes % LINE == 0));
        }
    }
}

/// Ends at the second page, at the third, and at none behind.
unsafe extern "C" fn write_back_of_bad_pages(at: *const u8, len: usize) -> Outcome {
    let mut outcome = record(at.addr(), len);
    let first = ON_THE_WAY.with_borrow(|ranges| ranges[0].0);
    let bad = (first & !(PAGE - 1)) + PAGE;
    let reached = at.addr().max(bad);
    if reached < bad + 2 * PAGE && at.addr() + len > reached {
        outcome.fault = reached as u64;
    }
    outcome
}

/// The lines behind a page that went bad would stay in the cache, and nobody would ever say so.
#[test]
fn a_write_back_goes_on_behind_pages_that_went_bad() {
    let routines = Routines { write_back: write_back_of_bad_pages, ..Routines::default_choice() };
    let copier = Copier::new(routines, Domain::Memory, ReadTable::default());
    let m = media();
    let page = m.0.as_ptr().addr();
    let from = page + 100;
    for (len, ranges) in [
        (PAGE - 100, vec![from]),
        (PAGE, vec![from]),
        (2 * PAGE, vec![from, page + 2 * PAGE]),
        (5 * PAGE, vec![from, page + 2 * PAGE, page + 3 * PAGE]),
    ] {
        // SAFETY: the buffer is larger, and the routine touches nothing of it.
        let written = unsafe { copier.write_back(m.0.as_ptr().add(100), len) };
        assert_eq!(written, if len < PAGE { Ok(()) } else { Err(page + PAGE) }, "{len} bytes");
        let tried: Vec<_> = ranges.into_iter().map(|range| (range, from + len - range)).collect();
        assert_eq!(ON_THE_WAY.take(), tried, "{len} bytes");
    }
}

/// Stream counts other than the default's, as tuning may set them.
#[test]
fn every_stream_count_reads_the_same() {
    let src = pattern(40_000, 3);
    for isa in Isa::available() {
        let routines = Routines::choose(Some(isa)).unwrap().1;
        for streams in [
            Streams::One,
            Streams::OneAhead,
            Streams::OneBurst,
            Streams::Four,
            Streams::FourAhead,
            Streams::Eight,
        ] {
            for span_max in [64, 4096, 1 << 20] {
                let step = ReadStep { bytes_min: 512, streams, span_max };
                let table = ReadTable::new(&[step]).unwrap();
                let copier = Copier::new(routines, Domain::Volatile, table);
                for len in [512, 513, 4096, 4160, 8192, 33_333] {
                    let mut dst = vec![0; len];
                    // SAFETY: `src` is longer than `len`.
                    unsafe { copier.read(&mut dst, src.as_ptr()) }.unwrap();
                    assert!(dst == src[..len], "{isa}: {streams:?} of {span_max}, {len} bytes");
                }
            }
        }
    }
}

#[test]
fn tables_that_no_routine_serves_are_refused() {
    let good = ReadStep { bytes_min: 512, streams: Streams::Eight, span_max: 64 };
    assert!(ReadTable::new(&[good; 3]).is_ok());
    assert!(ReadTable::new(&[]).is_err());
    assert!(ReadTable::new(&[good; 4]).is_err());
    for bad in [
        ReadStep { bytes_min: 511, ..good },
        ReadStep { span_max: 0, ..good },
        ReadStep { span_max: 65, ..good },
    ] {
        assert!(ReadTable::new(&[good, bad]).is_err(), "{bad:?}");
    }
    let descending = [ReadStep { bytes_min: 4096, ..good }, good];
    assert!(ReadTable::new(&descending).is_err());
}

/// The slowest checksum, for processors without crc32, is not the one this machine chooses.
#[test]
fn portable_checksum_agrees() {
    let bytes = pattern(1000, 9);
    assert_eq!(!crc_table::update(!0, bytes.iter().copied()), reference_crc(&bytes));
}

#[test]
fn an_unknown_instruction_set_is_refused() {
    let error = Routines::choose(Some(Isa::Portable));
    if cfg!(all(target_arch = "x86_64", not(miri))) {
        let error = error.err().expect("x86-64 has routines of its own");
        assert!(error.to_string().contains("sse2"), "{error}");
    }
    assert!("sse9".parse::<Isa>().unwrap_err().contains("avx512"));
}
