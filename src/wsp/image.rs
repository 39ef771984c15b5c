//! Every byte of an image that is ours: the record behind the guest's memory, and the seal in front of its state.
//!
//! Integers are little-endian. Magic, version and checksum keep their places in every future version, so that an older
//! program can tell a newer image from a damaged one.

use std::fmt;

use crate::media::crc32c;

/// Bytes of a record: one line.
pub const RECORD_BYTES: usize = 64;
/// Records are written by turns, so that the valid one is never overwritten.
pub const RECORDS: u64 = 2;
/// From one record to the next, in bytes: no unit that a device may lose holds both.
pub const RECORD_STRIDE_BYTES: u64 = 256;
/// What stands behind the guest's memory, in bytes, where the media has no larger pages.
pub const TRAILER_BYTES: u64 = 4096;
/// What stands in front of the state, in bytes.
pub const SEAL_BYTES: usize = 16 << 10;
/// Longest description of what a guest runs in, in bytes.
pub const IDENTITY_BYTES_MAX: usize = SEAL_BYTES - seal::IDENTITY;

const RECORD_MAGIC: [u8; 8] = *b"LodeWspR";
const SEAL_MAGIC: [u8; 8] = *b"LodeWspS";
pub const VERSION: u32 = 1;
/// Numbers that only grow end far below their type: nobody writes or reads higher ones.
pub const NUMBER_MAX: u64 = 1 << 62;

/// Where the fields of a record begin.
pub mod record {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 8;
    pub const CRC: usize = 12;
    pub const SERIAL: usize = 16;
    pub const GENERATION: usize = 24;
    pub const IMAGE: usize = 32;
    pub const RAM_BYTES: usize = 48;
    pub const STATE: usize = 56;
    pub const RESERVED: usize = 60;
}

/// Where the fields of a seal begin.
pub mod seal {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 8;
    pub const CRC: usize = 12;
    pub const IMAGE: usize = 16;
    pub const GENERATION: usize = 32;
    pub const SLOT_BYTES: usize = 40;
    pub const STREAM_BYTES: usize = 48;
    pub const SUSPENDED_NS: usize = 56;
    pub const STREAM_CRC: usize = 64;
    pub const IDENTITY_BYTES: usize = 68;
    pub const IDENTITY: usize = 72;
}

const _: () = {
    assert!(record::CRC + 4 == record::SERIAL);
    assert!(record::IMAGE + 16 == record::RAM_BYTES);
    assert!(record::RESERVED + 4 == RECORD_BYTES);
    assert!(RECORD_STRIDE_BYTES as usize >= RECORD_BYTES);
    assert!(RECORDS * RECORD_STRIDE_BYTES <= TRAILER_BYTES);
    assert!(seal::CRC + 4 == seal::IMAGE);
    assert!(seal::IDENTITY_BYTES + 4 == seal::IDENTITY);
    assert!(SEAL_BYTES.is_multiple_of(4096));
};

/// What the record says of memory and state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The guest was booted, and not suspended since: nothing but what it wrote to its disks survives it.
    Running,
    /// Memory and the slot of this generation belong together; the guest stands.
    Suspended,
    /// The guest was resumed from the slot of this generation, and memory has moved on.
    Consumed,
}

impl State {
    const ALL: [State; 3] = [State::Running, State::Suspended, State::Consumed];

    pub fn name(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Suspended => "suspended",
            State::Consumed => "consumed",
        }
    }
}

/// What stands behind a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Of two valid records the one with the higher counts.
    pub serial: u64,
    pub state: State,
    /// How often the guest was suspended before; for `Suspended`, this time included.
    pub generation: u64,
    /// Drawn at each cold boot.
    pub image: [u8; 16],
    /// Bytes of the guest's memory, all in front of the first record.
    pub ram_bytes: u64,
}

/// Why bytes are not taken for what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Another magic: nothing of ours, or not whole.
    Foreign,
    /// Of a later version, this one.
    Newer(u32),
    Damaged,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Foreign => f.write_str("it is not one of Lodestone's"),
            Refused::Newer(version) => {
                write!(f, "it has format version {version}, this program knows {VERSION}")
            }
            Refused::Damaged => f.write_str("its checksum does not match"),
        }
    }
}

impl Record {
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut line = [0; RECORD_BYTES];
        line[record::MAGIC..][..8].copy_from_slice(&RECORD_MAGIC);
        put32(&mut line, record::VERSION, VERSION);
        put64(&mut line, record::SERIAL, self.serial);
        put64(&mut line, record::GENERATION, self.generation);
        line[record::IMAGE..][..16].copy_from_slice(&self.image);
        put64(&mut line, record::RAM_BYTES, self.ram_bytes);
        put32(&mut line, record::STATE, self.state as u32);
        let crc = checksum(&line);
        put32(&mut line, record::CRC, crc);
        line
    }

    /// Whether the checksum of these bytes, which have the magic and the version, is right.
    pub fn verifies(line: &[u8; RECORD_BYTES]) -> bool {
        checksum(line) == get32(line, record::CRC)
    }

    /// Magic and version of these bytes are ours.
    pub fn recognise(line: &[u8; RECORD_BYTES]) -> Result<(), Refused> {
        recognise(line, RECORD_MAGIC)
    }

    /// Of bytes that verify.
    pub fn decode(line: &[u8; RECORD_BYTES]) -> Result<Record, Refused> {
        let state = get32(line, record::STATE);
        let number = |at| Some(get64(line, at)).filter(|&n| n < NUMBER_MAX).ok_or(Refused::Damaged);
        Ok(Record {
            serial: number(record::SERIAL)?,
            state: *State::ALL.get(state as usize).ok_or(Refused::Damaged)?,
            generation: number(record::GENERATION)?,
            image: line[record::IMAGE..][..16].try_into().expect("16 bytes"),
            ram_bytes: get64(line, record::RAM_BYTES),
        })
    }
}

/// What stands in front of the state of a guest's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seal {
    /// The memory's.
    pub image: [u8; 16],
    pub generation: u64,
    /// Bytes of the slot: this, the stream, and what is behind it.
    pub slot_bytes: u64,
    pub stream_bytes: u64,
    /// Of all that is behind the seal.
    pub stream_crc: u32,
    /// When the guest was stopped: nanoseconds since 1970, UTC.
    pub suspended_ns: u64,
    /// What the guest ran in, in words of whoever runs it: what must be the same for the state to fit.
    pub identity: Vec<u8>,
}

impl Seal {
    /// Panics for an identity that is longer than [`IDENTITY_BYTES_MAX`].
    pub fn encode(&self) -> Box<[u8; SEAL_BYTES]> {
        assert!(self.identity.len() <= IDENTITY_BYTES_MAX);
        let mut page: Box<[u8; SEAL_BYTES]> = vec![0; SEAL_BYTES].try_into().expect("as long as it was made");
        page[seal::MAGIC..][..8].copy_from_slice(&SEAL_MAGIC);
        put32(&mut page[..], seal::VERSION, VERSION);
        page[seal::IMAGE..][..16].copy_from_slice(&self.image);
        put64(&mut page[..], seal::GENERATION, self.generation);
        put64(&mut page[..], seal::SLOT_BYTES, self.slot_bytes);
        put64(&mut page[..], seal::STREAM_BYTES, self.stream_bytes);
        put64(&mut page[..], seal::SUSPENDED_NS, self.suspended_ns);
        put32(&mut page[..], seal::STREAM_CRC, self.stream_crc);
        put32(&mut page[..], seal::IDENTITY_BYTES, self.identity.len() as u32);
        page[seal::IDENTITY..][..self.identity.len()].copy_from_slice(&self.identity);
        let crc = checksum(&page[..]);
        put32(&mut page[..], seal::CRC, crc);
        page
    }

    pub fn recognise(page: &[u8; SEAL_BYTES]) -> Result<(), Refused> {
        recognise(page, SEAL_MAGIC)
    }

    pub fn verifies(page: &[u8; SEAL_BYTES]) -> bool {
        checksum(page) == get32(page, seal::CRC)
    }

    /// Of bytes that verify.
    pub fn decode(page: &[u8; SEAL_BYTES]) -> Result<Seal, Refused> {
        let identity = page[seal::IDENTITY..].get(..get32(page, seal::IDENTITY_BYTES) as usize);
        Ok(Seal {
            image: page[seal::IMAGE..][..16].try_into().expect("16 bytes"),
            generation: get64(page, seal::GENERATION),
            slot_bytes: get64(page, seal::SLOT_BYTES),
            stream_bytes: get64(page, seal::STREAM_BYTES),
            stream_crc: get32(page, seal::STREAM_CRC),
            suspended_ns: get64(page, seal::SUSPENDED_NS),
            identity: identity.ok_or(Refused::Damaged)?.to_vec(),
        })
    }
}

fn recognise(bytes: &[u8], magic: [u8; 8]) -> Result<(), Refused> {
    // Both begin alike.
    if bytes[..8] != magic {
        return Err(Refused::Foreign);
    }
    match get32(bytes, record::VERSION) {
        VERSION => Ok(()),
        0 => Err(Refused::Damaged),
        newer => Err(Refused::Newer(newer)),
    }
}

/// Of all bytes but the checksum's own.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c(&bytes[record::CRC + 4..], crc32c(&bytes[..record::CRC], 0))
}

fn get32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn get64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record { serial: 7, state: State::Suspended, generation: 3, image: [9; 16], ram_bytes: 1 << 30 }
    }

    fn seal() -> Seal {
        Seal {
            image: [9; 16],
            generation: 3,
            slot_bytes: 1 << 20,
            stream_bytes: 300_000,
            stream_crc: 5,
            suspended_ns: 6,
            identity: b"qemu 7.2".to_vec(),
        }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        for state in State::ALL {
            let line = Record { state, ..record() }.encode();
            assert!(Record::verifies(&line));
            assert_eq!(Record::recognise(&line), Ok(()));
            assert_eq!(Record::decode(&line), Ok(Record { state, ..record() }));
        }
        let page = seal().encode();
        assert!(Seal::verifies(&page));
        assert_eq!(Seal::recognise(&page), Ok(()));
        assert_eq!(Seal::decode(&page), Ok(seal()));
    }

    #[test]
    fn every_bit_counts() {
        let line = record().encode();
        for bit in 0..RECORD_BYTES * 8 {
            let mut flipped = line;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!Record::verifies(&flipped), "bit {bit} of a record");
        }
        let mut page = seal().encode();
        for bit in 0..SEAL_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(!Seal::verifies(&page), "bit {bit} of a seal");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn others_are_told_apart() {
        assert_eq!(Record::recognise(&[0; RECORD_BYTES]), Err(Refused::Foreign));
        let mut line = record().encode();
        put32(&mut line, record::VERSION, 2);
        assert_eq!(Record::recognise(&line), Err(Refused::Newer(2)));
        assert_eq!(Seal::recognise(&vec![0; SEAL_BYTES].try_into().unwrap()), Err(Refused::Foreign));
    }
}
