//! What a pool says of itself: where it lies, what makes its stores durable, which instructions move
//! its data, and what this machine lacks, in words.
//!
//! Plain fields, so that any door can print them in its own format.

use std::fs;
use std::path::PathBuf;

use super::copy::features;
use super::open::join_domains;
use super::pool::Pool;
use super::region::{Region, RegionKind};
use super::span::Span;
use super::{Domain, Isa, Media, domain};

use crate::quote::Shown;

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
    /// The instruction set chosen, and those that there are.
    pub isa: Isa,
    pub isas: Vec<Isa>,
    /// What writes a cache line back: `clwb`, `clflushopt`, `clflush`; `none` where the domain needs
    /// no write-back.
    pub write_back: &'static str,
    /// What computes checksums.
    pub crc: &'static str,
    /// Instructions that routines could use, and whether the processor has them.
    pub instructions: Vec<(&'static str, bool)>,
    /// What is missing here, in sentences.
    pub missing: Vec<String>,
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
    pub pages: Pages,
    /// Where the kernel tells.
    pub numa_node: Option<u32>,
}

/// How a region is mapped at this moment, as /proc/self/smaps tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pages {
    /// Bytes present.
    pub resident_bytes: u64,
    /// Bytes mapped by 2 MiB pages (transparent ones; asked for at every mapping).
    pub huge_bytes: u64,
    /// The page size of the mapping itself: above 4096 for hugetlbfs and device-dax.
    pub kernel_page_bytes: u64,
}

impl Span {
    /// The region that it is; none of a range that was mapped already.
    pub fn describe(&self) -> Option<RegionDescription> {
        self.region().map(describe_region)
    }
}

impl Pool {
    pub fn describe(&self) -> Description {
        let detected = join_domains(self.regions()).unwrap_or(Domain::Volatile);
        let domain = self.domain();
        let regions: Vec<_> = self.regions().iter().map(describe_region).collect();
        let mut description = Description {
            uuid: self.uuid(),
            bytes: self.len(),
            stripe_bytes: self.stripe_bytes(),
            regions,
            detected,
            domain,
            emulated: detected.is_emulated_by(domain),
            read_only: self.options().read_only,
            isa: self.isa(),
            isas: Isa::available(),
            write_back: if domain == Domain::Memory { features().write_back_name() } else { "none" },
            crc: features().crc_name(self.isa()),
            instructions: features().list(),
            missing: Vec::new(),
        };
        description.missing = missing(&description);
        description
    }
}

fn missing(d: &Description) -> Vec<String> {
    let mut missing = Vec::new();
    if d.emulated {
        missing.push(format!(
            "emulated PM: the media is {}, and {} is only assumed; a power failure loses data",
            d.detected, d.domain
        ));
    }
    for region in &d.regions {
        let path = region.path.shown();
        match region.detected {
            Domain::PageCache => missing.push(format!(
                "{path} is not mapped directly (the host's {} refuses MAP_SYNC): stores survive power \
                 loss only after fsync",
                region.host_fs
            )),
            Domain::Volatile if region.kind == RegionKind::DeviceDax => missing.push(format!(
                "{path} is in memory that a power failure clears, or whose NVDIMM is not armed (see \
                 /sys/bus/nd/devices/nmem*/nfit/flags)"
            )),
            Domain::Volatile => missing.push(format!("{path} is in memory that a power failure clears")),
            Domain::CpuCache | Domain::Memory => {}
        }
        let pages = region.pages;
        if pages.kernel_page_bytes <= 4096 && pages.resident_bytes > pages.huge_bytes {
            missing.push(format!(
                "{path} is mapped by 4 KiB pages, wholly or in part: the host grants no huge pages there \
                 (a tmpfs does with huge=advise, a memfd with transparent_hugepage/shmem_enabled)"
            ));
        }
    }
    for (instruction, found) in &d.instructions {
        if !found {
            missing.push(format!("this processor has no {instruction}"));
        }
    }
    missing
}

fn describe_region(region: &Region) -> RegionDescription {
    RegionDescription {
        path: region.path.clone(),
        kind: region.kind,
        bytes: region.bytes,
        detected: region.detected,
        host_fs: region.host_fs(),
        pages: mapped_pages(region.map.base().addr(), region.map.bytes()),
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

fn mapped_pages(start: usize, bytes: usize) -> Pages {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    parse_smaps(&smaps, start, start + bytes)
}

/// Adds up the parts of [start, end): the kernel splits a mapping where its parts differ.
fn parse_smaps(smaps: &str, start: usize, end: usize) -> Pages {
    let mut pages = Pages::default();
    let mut inside = false;
    for line in smaps.lines() {
        let mut fields = line.split_whitespace();
        let Some(first) = fields.next() else { continue };
        if let Some((from, to)) = first.split_once('-') {
            let range = usize::from_str_radix(from, 16).ok().zip(usize::from_str_radix(to, 16).ok());
            inside = range.is_some_and(|(from, to)| from < end && to > start);
            continue;
        }
        let number = fields.next().and_then(|n| n.parse::<u64>().ok());
        let (true, Some(kib)) = (inside, number) else { continue };
        match first {
            "Rss:" => pages.resident_bytes += kib << 10,
            "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:" => pages.huge_bytes += kib << 10,
            "KernelPageSize:" => pages.kernel_page_bytes = pages.kernel_page_bytes.max(kib << 10),
            _ => {}
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_mapping_add_up() {
        let smaps = "1000-2000 rw-s 0 00:00 1 /other\nRss: 4 kB\nKernelPageSize: 4 kB\n\
                     200000-400000 rw-s 0 00:00 1 /pool\nKernelPageSize: 4 kB\nRss: 2048 kB\n\
                     ShmemPmdMapped: 2048 kB\nVmFlags: rd wr\n\
                     400000-600000 rw-s 0 00:00 1 /pool\nKernelPageSize: 4 kB\nRss: 12 kB\n";
        let pages = parse_smaps(smaps, 0x20_0000, 0x60_0000);
        assert_eq!(pages.resident_bytes, (2048 + 12) << 10);
        assert_eq!((pages.huge_bytes, pages.kernel_page_bytes), (2 << 20, 4096));
    }
}
