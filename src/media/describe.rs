//! What a pool says of itself: where it lies, what makes its stores durable, which instructions move
//! its data, and what this machine lacks, in words.
//!
//! Plain fields, so that any door can print them in its own format.

use std::fs;
use std::path::PathBuf;

use super::open::join_domains;
use super::pool::Pool;
use super::region::{Region, RegionKind};
use super::{Domain, Media, domain};

/// A pool, as `lode info` shows it.
#[derive(Clone, Debug)]
pub struct Description {
    pub uuid: [u8; 16],
    pub bytes: u64,
    pub stripe_bytes: u64,
    pub regions: Vec<RegionDescription>,
    /// The persistence domain that the kernel tells.
    pub detected: Domain,
    /// The one the pool works by.
    pub domain: Domain,
    /// `domain` promises more than the media keeps: figures are those of *emulated PM*.
    pub emulated: bool,
    pub read_only: bool,
}

/// One region of a [`Description`].
#[derive(Clone, Debug)]
pub struct RegionDescription {
    pub path: PathBuf,
    pub kind: RegionKind,
    /// Bytes that the pool uses of it.
    pub bytes: u64,
    pub detected: Domain,
    /// The type of the host's file system; `none` for a device.
    pub host_fs: &'static str,
    /// Where the kernel tells.
    pub numa_node: Option<u32>,
}

impl Pool {
    pub fn describe(&self) -> Description {
        let detected = join_domains(self.regions()).unwrap_or(Domain::Volatile);
        Description {
            uuid: self.uuid(),
            bytes: self.len(),
            stripe_bytes: self.stripe_bytes(),
            regions: self.regions().iter().map(describe_region).collect(),
            detected,
            domain: self.domain(),
            emulated: detected.is_emulated_by(self.domain()),
            read_only: self.options().read_only,
        }
    }
}

fn describe_region(region: &Region) -> RegionDescription {
    RegionDescription {
        path: region.path.clone(),
        kind: region.kind,
        bytes: region.bytes,
        detected: region.detected,
        host_fs: region.host_fs(),
        numa_node: numa_node(region),
    }
}

/// The node of the device below a region, or the only node there is.
fn numa_node(region: &Region) -> Option<u32> {
    let (class, dev) = region.device();
    let device = fs::canonicalize(domain::sysfs_dir(class, dev)).ok();
    let told = device.iter().flat_map(|d| d.ancestors()).find_map(|dir| domain::attribute(dir, "numa_node"));
    let node = told.and_then(|n| n.parse().ok());
    node.or_else(|| match fs::read_to_string("/sys/devices/system/node/online") {
        Ok(online) if online.trim() == "0" => Some(0),
        _ => None,
    })
}
