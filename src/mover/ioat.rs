//! What an Intel I/OAT function is told, and what it answers: registers (in BAR 0) and descriptors of 64 bytes. The
//! numbers are those of versions 3.0 to 3.4, as the kernel's driver and SPDK have them. No access to memory here: who
//! reads and writes at these places is a device's user, or its model.
//!
//! A function has one channel or several. A channel follows a ring of descriptors that link to each other: `CHAINADDR`
//! says where it begins, `DMACOUNT` how many there are by now (modulo 2^16), counted from there. What it has finished it
//! writes to where `CHANCMP` points, in the format of `CHANSTS`: the address of the last finished descriptor, and
//! the channel's state in the bits below.

/// Channels of the function, 8 bits.
pub const CHANCNT: usize = 0x00;
/// Bytes of one descriptor at most, as a power of two, 8 bits: see [`transfer_bytes_max`].
pub const XFERCAP: usize = 0x01;
/// General control, 8 bits: debugging alone.
pub const GENCTRL: usize = 0x02;
/// Interrupts, 8 bits: none are wanted here.
pub const INTRCTRL: usize = 0x03;
/// Which channels ask for attention, 32 bits.
pub const ATTNSTATUS: usize = 0x04;
/// Version, 8 bits: 0x32 is 3.2.
pub const CBVER: usize = 0x08;
/// Interrupt delay, 16 bits.
pub const INTRDELAY: usize = 0x0c;
/// State of the function, 16 bits.
pub const CS_STATUS: usize = 0x0e;
/// What it can do besides copies, 32 bits.
pub const DMACAPABILITY: usize = 0x10;

/// Registers of channel n are this many bytes times n + 1 behind the function's.
pub const CHANNEL_BYTES: usize = 0x80;
/// Of a channel: control, 16 bits.
pub const CHANCTRL: usize = 0x00;
/// Of a channel: command, 8 bits.
pub const CHANCMD: usize = 0x04;
/// Of a channel: descriptors since `CHAINADDR` was written, 16 bits. Writing it is the doorbell.
pub const DMACOUNT: usize = 0x06;
/// Of a channel: [`Status`], 64 bits.
pub const CHANSTS: usize = 0x08;
/// Of a channel: where its first descriptor is, 64 bits.
pub const CHAINADDR: usize = 0x10;
/// Of a channel: where it writes its status when a descriptor asks for that, 64 bits, aligned to 8 bytes.
pub const CHANCMP: usize = 0x18;
/// Of a channel: what went wrong, 32 bits; a bit is cleared by writing it.
pub const CHANERR: usize = 0x28;
/// Of a channel: errors that do not count, 32 bits.
pub const CHANERRMASK: usize = 0x2c;
/// Of a channel: which CPU's cache completions go to where direct cache access is on, 32 bits.
pub const DCACTRL: usize = 0x30;

/// In configuration space: `CHANERR` once more, 32 bits, to be cleared like it before version 3.3.
pub const CONFIG_CHANERR_INT: usize = 0x180;
/// In configuration space: command, of the low 16 bits.
pub const CONFIG_COMMAND: usize = 0x04;
pub const COMMAND_MEMORY: u32 = 0x2;
/// Without it the function reads and writes no memory.
pub const COMMAND_MASTER: u32 = 0x4;

pub const VERSION_3_0: u8 = 0x30;
pub const VERSION_3_3: u8 = 0x33;

/// In `CHANCTRL`: any error ends all that the channel has.
pub const CTRL_ANY_ERR_ABORT: u16 = 0x0008;
/// In `CHANCTRL`: an error is told like a completion.
pub const CTRL_ERR_COMPLETION: u16 = 0x0004;

pub const CMD_RESET: u8 = 0x20;
pub const CMD_RESUME: u8 = 0x10;
pub const CMD_SUSPEND: u8 = 0x04;

/// In `CHANERR`: memory cannot be read, or not be written.
pub const ERR_READ_DATA: u32 = 0x0100;
pub const ERR_WRITE_DATA: u32 = 0x0200;
/// In `CHANERR`: the next descriptor cannot be read.
pub const ERR_NEXT_ADDRESS: u32 = 0x0004;
/// In `CHANERR`: the first descriptor is at no place for one.
pub const ERR_CHAIN_ADDRESS: u32 = 0x0010;
/// In `CHANERR`: it does not know this descriptor, or its length.
pub const ERR_CONTROL: u32 = 0x0400;
pub const ERR_LENGTH: u32 = 0x0800;
/// In `CHANERR`: a completion cannot be written.
pub const ERR_COMPLETION_ADDRESS: u32 = 0x1000;

/// Bit by bit, as people read it.
const ERRORS: [&str; 19] = [
    "source address",
    "destination address",
    "next descriptor's address",
    "descriptor not aligned",
    "chain address",
    "command",
    "data integrity in the chipset",
    "data integrity in the device",
    "memory could not be read",
    "memory could not be written",
    "descriptor's control bits",
    "descriptor's length",
    "completion address",
    "interrupt configuration",
    "soft error",
    "unaffiliated error",
    "checksum or XOR P",
    "XOR Q",
    "descriptor count",
];

/// What `CHANERR` says, in words.
pub fn errors(chanerr: u32) -> String {
    let named = ERRORS.iter().enumerate().filter(|(bit, _)| chanerr >> bit & 1 == 1).map(|(_, name)| *name);
    let words: Vec<&str> = named.collect();
    if words.is_empty() { "no reason given".to_owned() } else { words.join(", ") }
}

/// Bytes of one descriptor at most, by what `XFERCAP` says; none for what no device may say.
pub fn transfer_bytes_max(xfercap: u8) -> Option<u64> {
    match xfercap & 0x1f {
        0 => Some(1 << 32),
        exponent @ 12.. => Some(1 << exponent),
        _ => None,
    }
}

/// What a channel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Active,
    /// All that it was given is done.
    Idle,
    Suspended,
    /// It stopped, after an error or a reset.
    Halted,
    /// It waits for a trigger.
    Armed,
    /// None of those.
    Unknown,
}

/// What `CHANSTS` says, and what is written where `CHANCMP` points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    /// Address of the descriptor that was finished last; 0 where none was.
    pub finished: u64,
}

const STATUS_STATE: u64 = 0x7;
const STATUS_FINISHED: u64 = !0x3f;

impl Status {
    pub fn of(word: u64) -> Status {
        let state = match word & STATUS_STATE {
            0 => State::Active,
            1 => State::Idle,
            2 => State::Suspended,
            3 => State::Halted,
            4 => State::Armed,
            _ => State::Unknown,
        };
        Status { state, finished: word & STATUS_FINISHED }
    }

    pub fn word(self) -> u64 {
        let state = match self.state {
            State::Active => 0,
            State::Idle => 1,
            State::Suspended => 2,
            State::Halted => 3,
            State::Armed => 4,
            State::Unknown => 7,
        };
        self.finished & STATUS_FINISHED | state
    }

    /// A channel in this state may read and write memory, or will as soon as it is told more.
    pub fn runs(self) -> bool {
        matches!(self.state, State::Active | State::Idle | State::Armed)
    }
}

/// What is read from a device that is not there any more.
pub const VANISHED: u64 = u64::MAX;

/// In a descriptor: its end is told.
pub const CONTROL_COMPLETION: u32 = 1 << 3;
/// In a descriptor: nothing is copied.
pub const CONTROL_NULL: u32 = 1 << 5;
/// In a descriptor: the destination is not looked for in caches, which must not have it then. Never set here: on
/// memory that the CPU uses as well it would lose what is in a cache.
pub const CONTROL_DESTINATION_SNOOP_OFF: u32 = 1 << 2;
const OPERATION_SHIFT: u32 = 24;
const OPERATION_COPY: u32 = 0;
/// A descriptor of no bytes is an error, also where nothing is copied.
const NULL_BYTES: u32 = 8;

pub const DESCRIPTOR_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    /// In bytes.
    pub size: u32,
    pub control: u32,
    pub source: u64,
    pub destination: u64,
    pub next: u64,
    pub reserved: [u64; 2],
    pub user: [u64; 2],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

impl Descriptor {
    pub fn copy(source: u64, destination: u64, size: u32) -> Descriptor {
        let control = OPERATION_COPY << OPERATION_SHIFT;
        Descriptor { size, control, source, destination, ..Descriptor::default() }
    }

    /// Copies nothing, and tells when it did: so a channel is seen to work.
    pub fn null() -> Descriptor {
        let control = OPERATION_COPY << OPERATION_SHIFT | CONTROL_NULL | CONTROL_COMPLETION;
        Descriptor { size: NULL_BYTES, control, ..Descriptor::default() }
    }

    pub fn is_copy(&self) -> bool {
        self.control >> OPERATION_SHIFT == OPERATION_COPY
    }

    pub fn has(&self, bit: u32) -> bool {
        self.control & bit != 0
    }
}

pub const VENDOR_INTEL: u16 = 0x8086;

/// PCI device numbers of functions that speak version 3.0 or later, first and last, with the processors that have them.
const DEVICES: [(u16, u16, &str); 17] = [
    (0x3429, 0x342c, "Xeon 5500"),
    (0x3430, 0x3433, "Xeon 5500"),
    (0x3710, 0x3719, "Xeon C5500"),
    (0x3c20, 0x3c27, "Xeon E5"),
    (0x3c2e, 0x3c2f, "Xeon E5"),
    (0x0e20, 0x0e27, "Xeon E5 v2"),
    (0x0e2e, 0x0e2f, "Xeon E5 v2"),
    (0x2f20, 0x2f27, "Xeon E5 v3"),
    (0x2f2e, 0x2f2f, "Xeon E5 v3"),
    (0x0c50, 0x0c51, "Atom S1200"),
    (0x0c52, 0x0c53, "Atom S1200"),
    (0x6f20, 0x6f27, "Xeon E5 v4"),
    (0x6f2e, 0x6f2f, "Xeon E5 v4"),
    (0x6f50, 0x6f51, "Xeon D-1500"),
    (0x6f52, 0x6f53, "Xeon D-1500"),
    (0x2021, 0x2021, "Xeon Scalable"),
    (0x0b00, 0x0b00, "Xeon Scalable of the third generation"),
];

/// The processors that have this PCI device as an I/OAT function; none for another device.
pub fn platform(vendor: u16, device: u16) -> Option<&'static str> {
    let known = DEVICES.iter().find(|(first, last, _)| (*first..=*last).contains(&device));
    known.filter(|_| vendor == VENDOR_INTEL).map(|(.., name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::read_to_string;

    /// No package of Debian's installs a header that has these numbers, so they are held against a second derivation:
    /// the registers laid out one after another by their widths, as SPDK has them.
    #[test]
    fn registers_follow_each_other_without_gaps_that_nobody_knows() {
        let laid_out = [
            ("chancnt", 1, Some(CHANCNT)),
            ("xfercap", 1, Some(XFERCAP)),
            ("genctrl", 1, Some(GENCTRL)),
            ("intrctrl", 1, Some(INTRCTRL)),
            ("attnstatus", 4, Some(ATTNSTATUS)),
            ("cbver", 1, Some(CBVER)),
            ("", 3, None),
            ("intrdelay", 2, Some(INTRDELAY)),
            ("cs_status", 2, Some(CS_STATUS)),
            ("dmacapability", 4, Some(DMACAPABILITY)),
            ("", 0x6c, None),
            ("chanctrl", 2, Some(CHANNEL_BYTES + CHANCTRL)),
            ("", 2, None),
            ("chancmd", 1, Some(CHANNEL_BYTES + CHANCMD)),
            ("", 1, None),
            ("dmacount", 2, Some(CHANNEL_BYTES + DMACOUNT)),
            ("chansts", 8, Some(CHANNEL_BYTES + CHANSTS)),
            ("chainaddr", 8, Some(CHANNEL_BYTES + CHAINADDR)),
            ("chancmp", 8, Some(CHANNEL_BYTES + CHANCMP)),
            ("", 8, None),
            ("chanerr", 4, Some(CHANNEL_BYTES + CHANERR)),
            ("chanerrmask", 4, Some(CHANNEL_BYTES + CHANERRMASK)),
            ("dcactrl", 4, Some(CHANNEL_BYTES + DCACTRL)),
        ];
        let mut at = 0;
        for (name, bytes, register) in laid_out {
            assert_eq!(register.unwrap_or(at), at, "{name}");
            assert!(register.is_none() || at % bytes == 0, "{name} is aligned to its width");
            at += bytes;
        }
        assert!(at <= 2 * CHANNEL_BYTES);
    }

    /// Where somebody has the kernel's source, against that.
    #[test]
    fn numbers_are_those_of_the_kernel() {
        let trees = std::fs::read_dir("/usr/src").into_iter().flatten().flatten();
        let headers = trees.filter_map(|tree| {
            let text = |path| read_to_string(tree.path().join(path)).ok();
            let own = text("drivers/dma/ioat/registers.h")? + &text("drivers/dma/ioat/hw.h")?;
            Some(own + &text("include/linux/pci_ids.h")?)
        });
        let Some(header) = headers.into_iter().next() else {
            eprintln!("SKIPPED: no source of the kernel below /usr/src");
            return;
        };
        let defined = |name: &str| {
            let mut values = header.lines().filter_map(|line| {
                let mut words = line.strip_prefix("#define")?.split_whitespace();
                let value = (words.next()? == name).then(|| words.next())??;
                let hex = value.trim_end_matches("ULL").strip_prefix("0x").map(str::to_owned);
                hex.map_or(value.parse().ok(), |hex| u64::from_str_radix(&hex, 16).ok())
            });
            values.next().unwrap_or_else(|| panic!("{name} is not in the header"))
        };
        let offsets = [
            ("CHANCNT", CHANCNT),
            ("XFERCAP", XFERCAP),
            ("GENCTRL", GENCTRL),
            ("INTRCTRL", INTRCTRL),
            ("ATTNSTATUS", ATTNSTATUS),
            ("VER", CBVER),
            ("INTRDELAY", INTRDELAY),
            ("DEVICE_STATUS", CS_STATUS),
            ("DMA_CAP", DMACAPABILITY),
            ("CHANCTRL", CHANCTRL),
            ("CHAN_DMACOUNT", DMACOUNT),
            ("CHANSTS", CHANSTS),
            ("CHANCMP", CHANCMP),
            ("CHANERR", CHANERR),
            ("CHANERR_MASK", CHANERRMASK),
            ("DCACTRL", DCACTRL),
            ("PCI_CHANERR_INT", CONFIG_CHANERR_INT),
        ];
        for (name, offset) in offsets {
            assert_eq!(defined(&format!("IOAT_{name}_OFFSET")), offset as u64, "{name}");
        }
        let numbers = [
            ("IOAT2_CHANCMD_OFFSET", CHANCMD as u64),
            ("IOAT2_CHAINADDR_OFFSET", CHAINADDR as u64),
            ("IOAT_CHANNEL_MMIO_SIZE", CHANNEL_BYTES as u64),
            ("IOAT_CHANCTRL_ANY_ERR_ABORT_EN", CTRL_ANY_ERR_ABORT.into()),
            ("IOAT_CHANCTRL_ERR_COMPLETION_EN", CTRL_ERR_COMPLETION.into()),
            ("IOAT_CHANCMD_RESET", CMD_RESET.into()),
            ("IOAT_CHANCMD_RESUME", CMD_RESUME.into()),
            ("IOAT_CHANCMD_SUSPEND", CMD_SUSPEND.into()),
            ("IOAT_CHANSTS_STATUS", STATUS_STATE),
            ("IOAT_CHANERR_NEXT_ADDR_ERR", ERR_NEXT_ADDRESS.into()),
            ("IOAT_CHANERR_CHAIN_ADDR_VALUE_ERR", ERR_CHAIN_ADDRESS.into()),
            ("IOAT_CHANERR_READ_DATA_ERR", ERR_READ_DATA.into()),
            ("IOAT_CHANERR_WRITE_DATA_ERR", ERR_WRITE_DATA.into()),
            ("IOAT_CHANERR_CONTROL_ERR", ERR_CONTROL.into()),
            ("IOAT_CHANERR_LENGTH_ERR", ERR_LENGTH.into()),
            ("IOAT_CHANERR_COMPLETION_ADDR_ERR", ERR_COMPLETION_ADDRESS.into()),
            ("IOAT_VER_3_0", VERSION_3_0.into()),
            ("IOAT_VER_3_3", VERSION_3_3.into()),
        ];
        for (name, number) in numbers {
            assert_eq!(defined(name), number, "{name}");
        }
        // Those without a number behind their name are of earlier versions.
        let devices =
            header.lines().filter_map(|line| line.strip_prefix("#define PCI_DEVICE_ID_INTEL_IOAT_"));
        for device in devices.filter_map(|device| device.split_whitespace().next()) {
            if device.ends_with(|c: char| c.is_ascii_digit()) || ["SKX", "ICX"].contains(&device) {
                let number = defined(&format!("PCI_DEVICE_ID_INTEL_IOAT_{device}")) as u16;
                assert!(platform(VENDOR_INTEL, number).is_some(), "{device} is not known");
            }
        }
        for (name, state) in [("ACTIVE", 0), ("DONE", 1), ("SUSPENDED", 2), ("HALTED", 3)] {
            assert_eq!(defined(&format!("IOAT_CHANSTS_{name}")), state, "{name}");
        }
    }

    /// Against the list that distributions install with pciutils.
    #[test]
    fn device_numbers_are_those_of_the_list() {
        let lists = ["/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"];
        let Some(list) = lists.iter().find_map(|path| read_to_string(path).ok()) else {
            eprintln!("SKIPPED: no pci.ids here (the package pci.ids has it)");
            return;
        };
        let intel = list.lines().skip_while(|line| !line.starts_with("8086 ")).skip(1);
        let intel = intel.take_while(|line| line.is_empty() || line.starts_with(['\t', '#']));
        let device = |line: &str| {
            let (number, name) = line.strip_prefix('\t').filter(|l| !l.starts_with('\t'))?.split_once(' ')?;
            Some((u16::from_str_radix(number, 16).ok()?, name.trim().to_owned()))
        };
        // Those that also compute parity are listed by that.
        let words = ["DMA", "QuickData", "Quickdata", "I/OAT", "RAID"];
        for (number, name) in intel.filter_map(device) {
            if platform(VENDOR_INTEL, number).is_some() {
                assert!(words.iter().any(|word| name.contains(word)), "{number:04x} is {name}");
            }
        }
    }

    #[test]
    fn descriptors_have_their_fields_where_the_device_looks() {
        assert_eq!(std::mem::offset_of!(Descriptor, control), 4);
        assert_eq!(std::mem::offset_of!(Descriptor, source), 8);
        assert_eq!(std::mem::offset_of!(Descriptor, destination), 16);
        assert_eq!(std::mem::offset_of!(Descriptor, next), 24);
        assert_eq!(std::mem::offset_of!(Descriptor, user), 48);
        let copy = Descriptor::copy(0x1111, 0x2222, 77);
        assert_eq!((copy.size, copy.control, copy.source, copy.destination), (77, 0, 0x1111, 0x2222));
        let null = Descriptor::null();
        assert!(null.size > 0 && null.is_copy() && null.has(CONTROL_NULL) && null.has(CONTROL_COMPLETION));
        assert_eq!(null.control, 0x28);
    }

    #[test]
    fn a_status_is_an_address_and_a_state() {
        assert_eq!(Status::of(0x1_0043), Status { state: State::Halted, finished: 0x1_0040 });
        assert_eq!(Status::of(0), Status { state: State::Active, finished: 0 });
        assert_eq!(Status::of(VANISHED).state, State::Unknown);
        for state in [State::Active, State::Idle, State::Suspended, State::Halted, State::Armed] {
            let status = Status { state, finished: 0x7fc0 };
            assert_eq!(Status::of(status.word()), status);
            assert_eq!(status.runs(), !matches!(state, State::Suspended | State::Halted), "{state:?}");
        }
    }

    #[test]
    fn limits_and_errors_are_read() {
        assert_eq!(transfer_bytes_max(20), Some(1 << 20));
        assert_eq!(transfer_bytes_max(12), Some(4096));
        assert_eq!(transfer_bytes_max(0), Some(1 << 32));
        assert_eq!(transfer_bytes_max(0xe0 | 13), Some(8192), "the upper bits say nothing");
        assert_eq!(transfer_bytes_max(11), None);
        assert_eq!(errors(ERR_READ_DATA | ERR_LENGTH), "memory could not be read, descriptor's length");
        assert_eq!(errors(0), "no reason given");
        assert_eq!(errors(ERR_COMPLETION_ADDRESS), "completion address");
        assert_eq!(platform(0x8086, 0x2021), Some("Xeon Scalable"));
        assert_eq!(platform(0x8086, 0x2022), None);
        assert_eq!(platform(0x1022, 0x2021), None);
    }
}
