//! The label in block 0 of every region: what the region is, and where the pool's other regions are.
//!
//! The label is media's own; the file system begins at block 1 and never touches block 0. Every region
//! carries the whole description of its pool, so that region 0 alone leads to the others and a region
//! given by mistake can name the right one. The magic, the version and the CRC keep their places in
//! every future version: an older program can then tell a newer label from a damaged one.

use std::ffi::OsStr;
use std::mem::{offset_of, size_of, transmute};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::copy::crc32c;
use crate::error::{Error, Result};
use crate::limits::REGIONS_MAX;

/// Bytes of the label: one block.
pub(super) const LABEL_BYTES: usize = 4096;
const MAGIC: [u8; 8] = *b"LodeRegn";
const VERSION: u32 = 1;
const PATHS_BYTES: usize = 4032;

/// The bytes on media. Integers are little-endian.
#[repr(C)]
struct RawLabel {
    magic: [u8; 8],
    version: [u8; 4],
    /// CRC-32C of the whole block with this field zero.
    crc: [u8; 4],
    pool_uuid: [u8; 16],
    region_index: [u8; 4],
    region_count: [u8; 4],
    stripe_bytes: [u8; 8],
    /// Bytes of each region that the pool uses, the label included.
    region_bytes: [u8; 8],
    /// Zero.
    reserved: [u8; 8],
    /// Absolute paths of all regions, of devices as they were named: per region a 2-byte length and the bytes. The rest is zero.
    paths: [u8; PATHS_BYTES],
}

const _: () = {
    assert!(size_of::<RawLabel>() == LABEL_BYTES);
    assert!(align_of::<RawLabel>() == 1);
    assert!(offset_of!(RawLabel, magic) == 0);
    assert!(offset_of!(RawLabel, version) == 8);
    assert!(offset_of!(RawLabel, crc) == 12);
    assert!(offset_of!(RawLabel, pool_uuid) == 16);
    assert!(offset_of!(RawLabel, region_index) == 32);
    assert!(offset_of!(RawLabel, region_count) == 36);
    assert!(offset_of!(RawLabel, stripe_bytes) == 40);
    assert!(offset_of!(RawLabel, region_bytes) == 48);
    assert!(offset_of!(RawLabel, reserved) == 56);
    assert!(offset_of!(RawLabel, paths) == 64);
};

/// Smallest and largest stripe unit, in bytes; it is a power of two between them.
pub(super) const STRIPE_BYTES_MIN: u64 = 4096;
pub(super) const STRIPE_BYTES_MAX: u64 = 1 << 30;

/// A region's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub pool_uuid: [u8; 16],
    pub region_index: usize,
    pub stripe_bytes: u64,
    /// Bytes of each region that the pool uses, the label included.
    pub region_bytes: u64,
    /// One per region.
    pub paths: Vec<PathBuf>,
}

/// What block 0 of a region holds.
#[derive(Debug)]
pub(super) enum Block0 {
    Label(Label),
    /// Nothing but zeros.
    Blank,
    /// Something that is not ours.
    Foreign,
    /// A label of a later version of the format.
    Newer(u32),
    /// A label whose checksum is right for no content, or whose content cannot be.
    Damaged(&'static str),
}

impl Label {
    /// Fails where the paths do not fit.
    pub fn encode(&self) -> Result<[u8; LABEL_BYTES]> {
        let mut raw = RawLabel {
            magic: MAGIC,
            version: VERSION.to_le_bytes(),
            crc: [0; 4],
            pool_uuid: self.pool_uuid,
            region_index: (self.region_index as u32).to_le_bytes(),
            region_count: (self.paths.len() as u32).to_le_bytes(),
            stripe_bytes: self.stripe_bytes.to_le_bytes(),
            region_bytes: self.region_bytes.to_le_bytes(),
            reserved: [0; 8],
            paths: encode_paths(&self.paths)?,
        };
        raw.crc = checksum(&raw).to_le_bytes();
        // SAFETY: RawLabel is repr(C) of byte arrays only: same size, no padding, any bytes valid.
        Ok(unsafe { transmute::<RawLabel, [u8; LABEL_BYTES]>(raw) })
    }

    pub fn decode(block: &[u8; LABEL_BYTES]) -> Block0 {
        // SAFETY: as in `encode`, the other way round; bytes need no alignment.
        let raw = unsafe { transmute::<&[u8; LABEL_BYTES], &RawLabel>(block) };
        if raw.magic != MAGIC {
            return if block.iter().all(|&b| b == 0) { Block0::Blank } else { Block0::Foreign };
        }
        if checksum(raw) != u32::from_le_bytes(raw.crc) {
            return Block0::Damaged("its checksum does not match");
        }
        match u32::from_le_bytes(raw.version) {
            VERSION => decode_content(raw).map_or_else(Block0::Damaged, Block0::Label),
            version if version > VERSION => Block0::Newer(version),
            _ => Block0::Damaged("its version is not one that was ever in use"),
        }
    }
}

fn checksum(raw: &RawLabel) -> u32 {
    let crc = crc32c(&raw.magic, 0);
    let crc = crc32c(&raw.version, crc);
    let crc = crc32c(&[0; 4], crc);
    let crc = crc32c(&raw.pool_uuid, crc);
    let crc = crc32c(&raw.region_index, crc);
    let crc = crc32c(&raw.region_count, crc);
    let crc = crc32c(&raw.stripe_bytes, crc);
    let crc = crc32c(&raw.region_bytes, crc);
    let crc = crc32c(&raw.reserved, crc);
    crc32c(&raw.paths, crc)
}

fn encode_paths(paths: &[PathBuf]) -> Result<[u8; PATHS_BYTES]> {
    let mut out = [0; PATHS_BYTES];
    let mut at = 0;
    for path in paths {
        let bytes = path.as_os_str().as_bytes();
        let end = at + 2 + bytes.len();
        if end > PATHS_BYTES {
            return Err(Error::message(
                libc::ENAMETOOLONG,
                "media::label",
                format!(
                    "the absolute paths of the {} regions need more than {PATHS_BYTES} bytes together: \
                     use shorter paths or fewer regions",
                    paths.len()
                ),
            ));
        }
        out[at..at + 2].copy_from_slice(&(bytes.len() as u16).to_le_bytes());
        out[at + 2..end].copy_from_slice(bytes);
        at = end;
    }
    Ok(out)
}

fn decode_content(raw: &RawLabel) -> Result<Label, &'static str> {
    let count = u32::from_le_bytes(raw.region_count) as usize;
    let region_index = u32::from_le_bytes(raw.region_index) as usize;
    let stripe_bytes = u64::from_le_bytes(raw.stripe_bytes);
    let region_bytes = u64::from_le_bytes(raw.region_bytes);
    if count == 0 || count > REGIONS_MAX || region_index >= count {
        return Err("its region count is out of range");
    }
    if !stripe_bytes.is_power_of_two() || !(STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&stripe_bytes) {
        return Err("its stripe unit is out of range");
    }
    if !is_region_size(region_bytes, count, stripe_bytes) {
        return Err("its region size is out of range");
    }
    let paths = decode_paths(&raw.paths, count).ok_or("its paths do not parse")?;
    Ok(Label { pool_uuid: raw.pool_uuid, region_index, stripe_bytes, region_bytes, paths })
}

/// Whole blocks for one region, whole stripes for several; below the address space of 2^62 bytes, so
/// that sums of sizes cannot overflow.
fn is_region_size(bytes: u64, count: usize, stripe_bytes: u64) -> bool {
    let unit = if count == 1 { LABEL_BYTES as u64 } else { stripe_bytes };
    bytes >= 2 * unit && bytes.is_multiple_of(unit) && bytes <= (1 << 62) / count as u64
}

fn decode_paths(mut bytes: &[u8], count: usize) -> Option<Vec<PathBuf>> {
    let mut paths = Vec::with_capacity(count);
    for _ in 0..count {
        let (len, rest) = bytes.split_first_chunk::<2>()?;
        let (path, rest) = rest.split_at_checked(u16::from_le_bytes(*len) as usize)?;
        paths.push(Path::new(OsStr::from_bytes(path)).to_owned());
        bytes = rest;
    }
    Some(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn label() -> Label {
        Label {
            pool_uuid: *b"0123456789abcdef",
            region_index: 1,
            stripe_bytes: 2 << 20,
            region_bytes: 64 << 20,
            paths: vec!["/pool/a".into(), "/pool/b".into(), "/pool/c".into()],
        }
    }

    #[test]
    fn label_survives_encoding() {
        let block = label().encode().unwrap();
        assert!(matches!(Label::decode(&block), Block0::Label(l) if l == label()));
    }

    #[test]
    fn each_kind_of_block_is_told_apart() {
        assert!(matches!(Label::decode(&[0; LABEL_BYTES]), Block0::Blank));
        assert!(matches!(Label::decode(&[7; LABEL_BYTES]), Block0::Foreign));
        let mut newer = label().encode().unwrap();
        newer[8..12].copy_from_slice(&9u32.to_le_bytes());
        newer[12..16].fill(0);
        let crc = crc32c(&newer, 0);
        newer[12..16].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(Label::decode(&newer), Block0::Newer(9)));
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        let good = label().encode().unwrap();
        for at in 0..LABEL_BYTES {
            for flip in [0x01, 0x80, 0xff] {
                let mut bad = good;
                bad[at] ^= flip;
                assert!(!matches!(Label::decode(&bad), Block0::Label(_)), "byte {at} ^ {flip:#x}");
            }
        }
    }

    #[test]
    fn paths_that_do_not_fit_are_refused() {
        let mut long = label();
        long.paths = vec![PathBuf::from(format!("/{}", "x".repeat(2000))); 3];
        assert_eq!(long.encode().unwrap_err().errno(), libc::ENAMETOOLONG);
    }

    proptest! {
        /// Content behind a right checksum may still be nonsense (an attacker's image).
        #[test]
        fn any_content_behind_a_right_checksum_is_judged(
            head in proptest::array::uniform32(any::<u8>()), lengths in proptest::collection::vec(any::<u16>(), 0..8),
        ) {
            let mut block = label().encode().unwrap();
            block[32..64].copy_from_slice(&head);
            for (i, len) in lengths.iter().enumerate() {
                block[64 + i * 9..][..2].copy_from_slice(&len.to_le_bytes());
            }
            block[12..16].fill(0);
            let crc = crc32c(&block, 0);
            block[12..16].copy_from_slice(&crc.to_le_bytes());
            if let Block0::Label(l) = Label::decode(&block) {
                prop_assert!(l.region_index < l.paths.len() && l.paths.len() <= REGIONS_MAX);
                prop_assert!(l.region_bytes.checked_mul(l.paths.len() as u64).is_some());
            }
        }
    }
}
