//! Which work queues of Intel DSAs this process may use, and why not the others: read from what the kernel's driver `idxd`
//! exports (its `sysfs-driver-dma-idxd` names all attributes) and from the queues' device files.
//!
//! Nothing is opened, changed or switched on. An attribute that an older kernel lacks has the value that is safe; one
//! that is there and makes no sense rules its queue out, in words. What a queue says about itself is believed only within
//! what this program can use.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::dsa::{OPCODE_BATCH, OPCODE_COPY_CRC, OPCODE_MEMMOVE, TRANSFER_BYTES_MAX};
use super::engine_dsa::Offer;
use super::engine_port::Routes;

use crate::quote::Shown;

/// Bits of the attribute `gen_cap`, a device's general capabilities.
const GEN_CAP_BLOCK_ON_FAULT: u64 = 1 << 0;
const GEN_CAP_CACHE_CONTROL: u64 = 1 << 2;
const GEN_CAP_READBACK: u64 = 1 << 8;

/// Where to look.
#[derive(Clone, Debug)]
pub struct Places {
    /// Devices and queues, as the driver lists them.
    pub sys: PathBuf,
    /// Device files of queues.
    pub dev: PathBuf,
}

impl Default for Places {
    fn default() -> Places {
        Places { sys: "/sys/bus/dsa/devices".into(), dev: "/dev/dsa".into() }
    }
}

/// A queue that can be used, as far as one can tell without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// `wq0.1`.
    pub name: String,
    pub file: PathBuf,
    /// Several processes use it, and it says when it is full. A dedicated one has one user, and drops what is too much.
    pub shared: bool,
    /// Descriptors that it holds.
    pub size: usize,
    /// Its device's NUMA node.
    pub node: Option<u32>,
    pub offer: Offer,
}

/// One that cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    pub name: String,
    /// Its device's NUMA node.
    pub node: Option<u32>,
    pub why: Why,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    DeviceDisabled { device: String, state: String },
    NoPasid { device: String },
    Disabled { device: String, state: String },
    NotUser { kind: String },
    NoCopies,
    NoFile(PathBuf),
    Denied(PathBuf),
    Malformed { attribute: &'static str, says: String },
    Missing { attribute: &'static str },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::DeviceDisabled { device, state } => write!(f, "its device {device} is {state}"),
            Why::NoPasid { device } => {
                write!(f, "its device {device} has no PASID, so it cannot follow a process's addresses")
            }
            Why::Disabled { state, .. } => write!(f, "it is {state}"),
            Why::NotUser { kind } => write!(f, "its type is {kind}, not user"),
            Why::NoCopies => write!(f, "it is not allowed to copy"),
            Why::NoFile(file) => write!(f, "{} is not there", file.shown()),
            Why::Denied(file) => write!(f, "{} is not permitted to this user", file.shown()),
            Why::Malformed { attribute, says } => write!(f, "its {attribute} is '{says}'"),
            Why::Missing { attribute } => write!(f, "its {attribute} cannot be read"),
        }
    }
}

impl Why {
    /// What to do about it.
    pub fn remedy(&self) -> String {
        match self {
            Why::DeviceDisabled { device, .. } => format!("accel-config enable-device {device}"),
            Why::NoPasid { .. } => "start the kernel with intel_iommu=on,sm_on".to_owned(),
            Why::Disabled { device, .. } => {
                format!("accel-config config-wq --type=user, enable-wq of {device}")
            }
            Why::NotUser { .. } => "accel-config disable-wq, config-wq --type=user, enable-wq".to_owned(),
            Why::NoCopies => {
                "accel-config config-wq --op-config with the operations memmove and batch".to_owned()
            }
            Why::NoFile(_) => "let udev make it, or mount devtmpfs on /dev".to_owned(),
            Why::Denied(file) => format!("chgrp a group of this user and chmod g+rw {}", file.shown()),
            Why::Malformed { .. } | Why::Missing { .. } => {
                "use a kernel whose driver idxd is unchanged".to_owned()
            }
        }
    }
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The driver is there.
    pub driver: bool,
    /// Devices: `dsa0`.
    pub devices: Vec<String>,
    pub usable: Vec<Queue>,
    pub unusable: Vec<Unusable>,
}

impl Found {
    /// Why there is nothing to use, in one line; none where there is something.
    pub fn missing(&self) -> Option<String> {
        if !self.usable.is_empty() {
            return None;
        }
        if !self.driver {
            return Some("no Intel DSA here, or its driver idxd is not loaded".to_owned());
        }
        if self.devices.is_empty() {
            return Some("the driver idxd knows no Intel DSA".to_owned());
        }
        if self.unusable.is_empty() {
            return Some(format!("{} has no work queue", self.devices.join(", ")));
        }
        let why = |queue: &Unusable| format!("{}: {} ({})", queue.name, queue.why, queue.why.remedy());
        Some(self.unusable.iter().map(why).collect::<Vec<_>>().join("; "))
    }
}

/// Looks at all queues of all devices.
pub fn find(places: &Places) -> Found {
    let listed = names(&places.sys);
    let mut found = Found { driver: listed.is_some(), ..Found::default() };
    let listed = listed.unwrap_or_default();
    for (number, device) in numbered(&listed, "dsa") {
        found.devices.push(device.to_owned());
        let dir = Dir(places.sys.join(device));
        let about = About::read(device, &dir);
        for (_, name) in numbered(&listed, &format!("wq{number}.")) {
            match queue(name, device, &about, &Dir(places.sys.join(name)), places.dev.join(name)) {
                Ok(queue) => found.usable.push(queue),
                Err(why) => found.unusable.push(Unusable { name: name.to_owned(), node: about.node, why }),
            }
        }
    }
    found
}

fn names(dir: &Path) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(dir).ok()?;
    Some(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Those that are `prefix` and a number, in the order of numbers.
fn numbered<'a>(names: &'a [String], prefix: &str) -> Vec<(u32, &'a str)> {
    let number = |name: &'a String| Some((name.strip_prefix(prefix)?.parse().ok()?, name.as_str()));
    let mut found: Vec<(u32, &str)> = names.iter().filter_map(number).collect();
    found.sort_unstable();
    found
}

/// Attributes of one device or queue.
struct Dir(PathBuf);

impl Dir {
    /// None where the kernel does not export it.
    fn text(&self, attribute: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.join(attribute)).ok()?;
        Some(text.trim().to_owned())
    }

    fn number<T: FromStr>(&self, attribute: &'static str) -> Result<Option<T>, Why> {
        let Some(says) = self.text(attribute) else { return Ok(None) };
        says.parse().map(Some).map_err(|_| Why::Malformed { attribute, says })
    }

    fn flag(&self, attribute: &'static str) -> Result<bool, Why> {
        Ok(self.number::<u8>(attribute)?.unwrap_or(0) != 0)
    }

    /// Operations, by their codes; none where all of the device's are meant.
    fn operations(&self, attribute: &'static str) -> Result<Option<Operations>, Why> {
        let Some(says) = self.text(attribute) else { return Ok(None) };
        Operations::parse(&says).map(Some).ok_or(Why::Malformed { attribute, says })
    }
}

/// The first 64 operations of a mask of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operations(u64);

impl Operations {
    /// Kernels have written it as `0x..` words of 64 bits, the lowest first, and as hexadecimal words of 32 bits
    /// behind commas, the lowest last.
    fn parse(text: &str) -> Option<Operations> {
        if text.starts_with("0x") {
            let lowest = text.split(' ').next()?.strip_prefix("0x")?;
            return u64::from_str_radix(lowest, 16).ok().map(Operations);
        }
        let mut words = text.rsplit(',').map(|word| u32::from_str_radix(word, 16));
        let low = words.next()?.ok()?;
        let high = words.next().transpose().ok()?.unwrap_or(0);
        words.all(|word| word.is_ok()).then_some(Operations(u64::from(high) << 32 | u64::from(low)))
    }

    fn has(self, opcode: u32) -> bool {
        self.0 >> opcode & 1 == 1
    }
}

/// What all queues of a device have in common.
struct About {
    node: Option<u32>,
    common: Result<Common, Why>,
}

#[derive(Clone)]
struct Common {
    transfer_bytes_max: Option<u64>,
    /// 0: it takes no batches.
    batch_max: usize,
    operations: Option<Operations>,
    gen_cap: u64,
}

impl About {
    fn read(device: &str, dir: &Dir) -> About {
        let node = dir.number::<i32>("numa_node").ok().flatten().and_then(|node| u32::try_from(node).ok());
        About { node, common: common(device, dir) }
    }
}

fn common(device: &str, dir: &Dir) -> Result<Common, Why> {
    let state = dir.text("state").ok_or(Why::Missing { attribute: "device's state" })?;
    if state != "enabled" {
        return Err(Why::DeviceDisabled { device: device.to_owned(), state });
    }
    // Kernels before 5.11 do not say: then opening the file tells.
    if dir.number::<u8>("pasid_enabled")? == Some(0) {
        return Err(Why::NoPasid { device: device.to_owned() });
    }
    let gen_cap = dir.text("gen_cap").unwrap_or_default();
    Ok(Common {
        transfer_bytes_max: dir.number("max_transfer_size")?,
        batch_max: dir.number("max_batch_size")?.unwrap_or(0),
        operations: dir.operations("op_cap")?,
        // What it does not say it cannot.
        gen_cap: u64::from_str_radix(gen_cap.trim_start_matches("0x"), 16).unwrap_or(0),
    })
}

fn queue(name: &str, device: &str, about: &About, dir: &Dir, file: PathBuf) -> Result<Queue, Why> {
    let common = about.common.clone()?;
    let state = dir.text("state").ok_or(Why::Missing { attribute: "state" })?;
    if state != "enabled" {
        return Err(Why::Disabled { device: device.to_owned(), state });
    }
    let kind = dir.text("type").ok_or(Why::Missing { attribute: "type" })?;
    if kind != "user" {
        return Err(Why::NotUser { kind });
    }
    let mode = dir.text("mode").ok_or(Why::Missing { attribute: "mode" })?;
    let shared = match mode.as_str() {
        "shared" => true,
        "dedicated" => false,
        _ => return Err(Why::Malformed { attribute: "mode", says: mode }),
    };
    let positive = |attribute, number: Option<u64>| match number {
        Some(0) => Err(Why::Malformed { attribute, says: "0".to_owned() }),
        number => Ok(number),
    };
    let size = positive("size", dir.number("size")?)?.ok_or(Why::Missing { attribute: "size" })?;
    let transfer = positive("max_transfer_size", dir.number("max_transfer_size")?)?;
    let transfer = [transfer, common.transfer_bytes_max].into_iter().flatten().min();
    let batch = dir.number("max_batch_size")?.unwrap_or(common.batch_max).min(common.batch_max);
    let (allowed, able) = (dir.operations("op_config")?, common.operations);
    // A device that says nothing of its operations can copy; the others are not to be relied upon.
    let offers = |opcode, otherwise: bool| {
        able.map_or(otherwise, |able| able.has(opcode)) && allowed.is_none_or(|allowed| allowed.has(opcode))
    };
    if !offers(OPCODE_MEMMOVE, true) {
        return Err(Why::NoCopies);
    }
    // A page that is not there is fetched by asking the system, which both of these rule out.
    let asks = !dir.flag("ats_disable")? && !dir.flag("prs_disable")?;
    let has = |bit| common.gen_cap & bit != 0;
    let offer = Offer {
        transfer_bytes_max: transfer
            .map_or(TRANSFER_BYTES_MAX, |bytes| bytes.min(TRANSFER_BYTES_MAX as u64) as usize),
        batch_max: if offers(OPCODE_BATCH, false) { batch } else { 0 },
        routes: Routes { past_caches: has(GEN_CAP_READBACK), into_caches: true },
        cache_control: has(GEN_CAP_CACHE_CONTROL),
        copy_crc: offers(OPCODE_COPY_CRC, false),
        block_on_fault: dir.flag("block_on_fault")? && asks && has(GEN_CAP_BLOCK_ON_FAULT),
    };
    permitted(&file)?;
    Ok(Queue { name: name.to_owned(), file, shared, size: size as usize, node: about.node, offer })
}

/// Whether this process may read and write a device file.
fn permitted(file: &Path) -> Result<(), Why> {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    match accessat(CWD, file, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Err(Why::NoFile(file.to_owned())),
        Err(_) => Err(Why::Denied(file.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_read_as_any_kernel_writes_them() {
        let copies = |text: &str| {
            let operations = Operations::parse(text)?;
            Some([OPCODE_BATCH, OPCODE_MEMMOVE, OPCODE_COPY_CRC].map(|opcode| operations.has(opcode)))
        };
        // The device of 2023, in the order of the releases.
        assert_eq!(copies("0x1003f03ff"), Some([true; 3]));
        assert_eq!(copies("0x1003f03ff 0x0 0x0 0x0"), Some([true; 3]));
        assert_eq!(
            copies("00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff"),
            Some([true; 3])
        );
        // Where users may not submit batches, their bit is clear.
        assert_eq!(
            copies("00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03fd"),
            Some([false, true, true])
        );
        assert_eq!(copies("00000001,00000008"), Some([false, true, false]));
        for bad in ["", "0x", "zz", "1,x", "x,00000000,00000008", "100000000"] {
            assert_eq!(Operations::parse(bad), None, "{bad}");
        }
    }
}
