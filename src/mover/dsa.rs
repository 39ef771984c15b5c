//! What an Intel Data Streaming Accelerator is told, and what it answers: descriptors of 64 bytes and completion records
//! of 32, as `linux/idxd.h` has them. No access to memory here: who follows these addresses is a portal's other end.
//!
//! **Checksums.** Of a copy with a checksum the device inverts the seed before and the result after (unless a flag asks it
//! not to, which is never set here), bits reflected, with the polynomial of CRC-32C: what it writes down is what
//! [`crate::media::crc32c`] gives for the same bytes and the same seed, 0 to begin. So one result is the next one's seed,
//! in memory as well. (Concluded from SPDK, which inverts a device's result once more to get the bare state; no device has
//! confirmed it here. The checksum of what was copied is verified at recovery as every other.)

use super::completion::Status;

pub const OPCODE_BATCH: u32 = 1;
pub const OPCODE_MEMMOVE: u32 = 3;
pub const OPCODE_COPY_CRC: u32 = 0x11;

/// It begins when all before it in its batch have ended.
pub const FLAG_FENCE: u32 = 0x0001;
/// A page that is not there is waited for; without it the copy ends there.
pub const FLAG_BOF: u32 = 0x0002;
/// The completion record's address is valid, and a record is wanted.
pub const FLAG_CRAV: u32 = 0x0004;
pub const FLAG_RCR: u32 = 0x0008;
/// The destination goes into the caches (DDIO), and not past them.
pub const FLAG_CC: u32 = 0x0100;
/// The destination is read back before the completion record is written: then all of it has reached memory.
pub const FLAG_DRDBK: u32 = 0x4000;
/// Of a checksum: its seed is read from memory.
pub const FLAG_SEED_FROM_MEMORY: u32 = 0x01_0000;
/// All of them: the operation is above.
const FLAGS: u32 = 0x00ff_ffff;

pub const NONE: u8 = 0;
pub const SUCCESS: u8 = 1;
pub const PAGE_FAULT_NOBOF: u8 = 3;
pub const BATCH_FAIL: u8 = 5;
pub const BAD_OPCODE: u8 = 0x10;
pub const INVALID_FLAGS: u8 = 0x11;
pub const XFER_ERANGE: u8 = 0x13;
pub const DESC_CNT_ERANGE: u8 = 0x14;
pub const HW_ERR1: u8 = 0x20;
/// The fault was met while writing.
const FAULT_OF_WRITE: u8 = 0x80;
const STATUS_BITS: u8 = 0x7f;

/// Bytes of one descriptor at most, in this program: devices take 2 MiB at least.
pub const TRANSFER_BYTES_MAX: usize = 2 << 20;
/// Descriptors of one batch at most, in this program: devices take 16 at least.
pub const BATCH_MAX: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    pub(super) pasid: u32,
    pub(super) flags_opcode: u32,
    pub completion_addr: u64,
    /// Of a batch: where its descriptors are.
    pub src_addr: u64,
    pub dst_addr: u64,
    /// In bytes; of a batch: how many descriptors it has.
    pub size: u32,
    pub(super) int_handle: u16,
    pub(super) reserved: u16,
    pub crc_seed: u32,
    pub(super) crc_reserved: u32,
    pub seed_addr: u64,
    pub(super) operation: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 64);

impl Descriptor {
    pub fn copy(src_addr: u64, dst_addr: u64, size: u32, flags: u32) -> Descriptor {
        let flags_opcode = flags | FLAG_CRAV | FLAG_RCR | OPCODE_MEMMOVE << 24;
        Descriptor { flags_opcode, src_addr, dst_addr, size, ..Descriptor::default() }
    }

    /// A copy with a checksum of what is copied, continued from here.
    pub fn with_crc(self, crc_seed: u32) -> Descriptor {
        let flags = self.flags_opcode & FLAGS;
        Descriptor { flags_opcode: flags | OPCODE_COPY_CRC << 24, crc_seed, ..self }
    }

    pub fn batch(list_addr: u64, count: u32) -> Descriptor {
        let flags_opcode = FLAG_CRAV | FLAG_RCR | OPCODE_BATCH << 24;
        Descriptor { flags_opcode, src_addr: list_addr, size: count, ..Descriptor::default() }
    }

    /// As this, the checksum continued from the record at this address, once what writes it has ended.
    pub fn seeded_from(self, record_addr: u64) -> Descriptor {
        let flags_opcode = self.flags_opcode | FLAG_SEED_FROM_MEMORY | FLAG_FENCE;
        Descriptor { flags_opcode, seed_addr: record_addr + CRC_OFFSET, ..self }
    }

    pub fn opcode(&self) -> u32 {
        self.flags_opcode >> 24
    }

    pub fn has(&self, flag: u32) -> bool {
        self.flags_opcode & flag != 0
    }
}

/// Written by the device, `status` last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(32))]
pub struct Record {
    pub status: u8,
    pub result: u8,
    pub(super) reserved: u16,
    /// Of a batch: descriptors that ended.
    pub bytes_completed: u32,
    pub fault_addr: u64,
    pub crc: u64,
    pub(super) operation: u64,
}

const _: () = assert!(size_of::<Record>() == 32);
pub const CRC_OFFSET: u64 = std::mem::offset_of!(Record, crc) as u64;

impl Record {
    /// How a copy of `bytes` ended, and how many of them count.
    pub fn outcome(&self, bytes: u32) -> (Status, u32) {
        match self.status & STATUS_BITS {
            SUCCESS => (Status::Done, bytes),
            PAGE_FAULT_NOBOF if self.bytes_completed > 0 => {
                (Status::Partial, self.bytes_completed.min(bytes))
            }
            _ => (Status::Failed, 0),
        }
    }

    /// Why it did not end well, for the log.
    pub fn cause(&self) -> String {
        match self.status & STATUS_BITS {
            PAGE_FAULT_NOBOF => {
                let access = if self.status & FAULT_OF_WRITE == 0 { "read" } else { "written" };
                format!("the page at {:#x}, to be {access}, is not there", self.fault_addr)
            }
            NONE => "the device did not answer".to_owned(),
            status => format!("the device reports status {status:#04x}"),
        }
    }

    /// That a copy met a page that is not there.
    pub fn page_fault(bytes_completed: u32, fault_addr: u64, of_write: bool) -> Record {
        let status = PAGE_FAULT_NOBOF | if of_write { FAULT_OF_WRITE } else { 0 };
        Record { status, bytes_completed, fault_addr, ..Record::default() }
    }

    pub fn of_status(status: u8) -> Record {
        Record { status, ..Record::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are the kernel's: held against its header, where that is installed.
    #[test]
    fn numbers_are_those_of_the_kernel() {
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/idxd.h") else {
            eprintln!("SKIPPED: no linux/idxd.h here (linux-libc-dev has it)");
            return;
        };
        let flags = [
            ("FENCE", FLAG_FENCE),
            ("BOF", FLAG_BOF),
            ("CRAV", FLAG_CRAV),
            ("RCR", FLAG_RCR),
            ("CC", FLAG_CC),
            ("DRDBK", FLAG_DRDBK),
        ];
        for (name, value) in flags {
            let defined = format!("#define IDXD_OP_FLAG_{name}\t");
            let line = header.lines().find(|line| line.starts_with(&defined)).expect(name);
            assert_eq!(line.split_whitespace().last(), Some(&*format!("0x{value:04x}")), "{name}");
        }
        // Enumerators count on from the last one that has a number.
        let mut next = 0;
        let mut known = std::collections::HashMap::new();
        for line in header.lines().map(str::trim).filter(|line| line.starts_with("DSA_")) {
            let (name, value) = line.trim_end_matches(',').split_once(" = ").unwrap_or((line, ""));
            let number = value.strip_prefix("0x").map(|hex| u32::from_str_radix(hex, 16).unwrap());
            let number = number.or_else(|| value.parse().ok()).unwrap_or(next);
            known.insert(name.trim_end_matches(',').to_owned(), number);
            next = number + 1;
        }
        let numbers = [
            ("OPCODE_BATCH", OPCODE_BATCH),
            ("OPCODE_MEMMOVE", OPCODE_MEMMOVE),
            ("OPCODE_COPY_CRC", OPCODE_COPY_CRC),
            ("COMP_NONE", NONE.into()),
            ("COMP_SUCCESS", SUCCESS.into()),
            ("COMP_PAGE_FAULT_NOBOF", PAGE_FAULT_NOBOF.into()),
            ("COMP_BATCH_FAIL", BATCH_FAIL.into()),
            ("COMP_BAD_OPCODE", BAD_OPCODE.into()),
            ("COMP_INVALID_FLAGS", INVALID_FLAGS.into()),
            ("COMP_XFER_ERANGE", XFER_ERANGE.into()),
            ("COMP_DESC_CNT_ERANGE", DESC_CNT_ERANGE.into()),
            ("COMP_HW_ERR1", HW_ERR1.into()),
        ];
        for (name, value) in numbers {
            assert_eq!(known.get(&format!("DSA_{name}")), Some(&value), "{name}");
        }
    }

    #[test]
    fn a_record_says_how_far_a_copy_came() {
        assert_eq!(Record::of_status(SUCCESS).outcome(4096), (Status::Done, 4096));
        assert_eq!(Record::page_fault(100, 7, true).outcome(4096), (Status::Partial, 100));
        assert_eq!(Record::page_fault(0, 7, false).outcome(4096), (Status::Failed, 0));
        // Whatever a device says, no more counts than was asked for.
        assert_eq!(Record::page_fault(9000, 7, false).outcome(4096), (Status::Partial, 4096));
        assert_eq!(Record::of_status(HW_ERR1).outcome(4096), (Status::Failed, 0));
        assert_eq!(
            Record::page_fault(0, 0x7000, true).cause(),
            "the page at 0x7000, to be written, is not there"
        );
        assert_eq!(
            Record::page_fault(9, 0x8000, false).cause(),
            "the page at 0x8000, to be read, is not there"
        );
        assert_eq!(Record::of_status(XFER_ERANGE).cause(), "the device reports status 0x13");
        assert_eq!(Record::default().cause(), "the device did not answer");
    }

    #[test]
    fn descriptors_have_their_fields_where_the_device_looks() {
        let copy = Descriptor::copy(0x1111, 0x2222, 77, FLAG_CC).with_crc(5).seeded_from(0x4000);
        assert_eq!(std::mem::offset_of!(Descriptor, completion_addr), 8);
        assert_eq!(std::mem::offset_of!(Descriptor, src_addr), 16);
        assert_eq!(std::mem::offset_of!(Descriptor, dst_addr), 24);
        assert_eq!(std::mem::offset_of!(Descriptor, size), 32);
        assert_eq!(std::mem::offset_of!(Descriptor, crc_seed), 40);
        assert_eq!(std::mem::offset_of!(Descriptor, seed_addr), 48);
        assert_eq!(std::mem::offset_of!(Record, bytes_completed), 4);
        assert_eq!(std::mem::offset_of!(Record, fault_addr), 8);
        assert_eq!((copy.opcode(), copy.seed_addr), (OPCODE_COPY_CRC, 0x4010));
        assert!(copy.has(FLAG_CC) && copy.has(FLAG_FENCE) && !copy.has(FLAG_DRDBK));
        let batch = Descriptor::batch(0x5000, 3);
        assert_eq!((batch.opcode(), batch.src_addr, batch.size), (OPCODE_BATCH, 0x5000, 3));
    }
}
