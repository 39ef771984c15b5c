//! What makes a store durable here: the persistence domains, how they are detected, and which of them
//! a user may assume instead.
//!
//! Detection asks the kernel only, never the user: a mapping that took `MAP_SYNC` and a device-dax node
//! are persistent memory, whose region directory in sysfs may say that CPU caches are inside the power
//! fail protected part. An override may only make the file system do *more* than the hardware needs.
//! On plain DRAM a persistent domain may be assumed for measurements; it is then *emulated*, and
//! [`Description`](super::Description) says so.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::quote::Shown;

/// What makes a store durable on this media (design: persistence domains).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Domain {
    /// eADR, CXL global persistent flush: after a fence.
    CpuCache,
    /// ADR: after flush and fence.
    Memory,
    /// An ordinary file: survives the process at once, power loss after
    /// [`Media::sync`](super::Media::sync).
    PageCache,
    /// memfd, tmpfs: survives the process at most.
    Volatile,
}

impl Domain {
    pub fn name(self) -> &'static str {
        match self {
            Domain::CpuCache => "cpu-cache",
            Domain::Memory => "memory",
            Domain::PageCache => "page-cache",
            Domain::Volatile => "volatile",
        }
    }

    /// True where a fence makes stores survive power loss.
    pub fn is_persistent_memory(self) -> bool {
        matches!(self, Domain::CpuCache | Domain::Memory)
    }

    /// The domain of a pool whose regions were detected as `self` and `other`; None where no single
    /// way of making stores durable covers both.
    pub(super) fn join(self, other: Domain) -> Option<Domain> {
        use Domain::*;
        match (self, other) {
            (a, b) if a == b => Some(a),
            (CpuCache, Memory) | (Memory, CpuCache) => Some(Memory),
            (PageCache, Volatile) | (Volatile, PageCache) => Some(Volatile),
            _ => None,
        }
    }

    /// Whether a user may assume `wanted` on media detected as `self`.
    pub(super) fn may_assume(self, wanted: Domain) -> bool {
        use Domain::*;
        match (self, wanted) {
            (CpuCache, Memory) => true,
            // On DRAM nothing survives power loss by itself, so that no promise is weakened.
            (PageCache, CpuCache | Memory) => true,
            (Volatile, CpuCache | Memory | PageCache) => true,
            (a, b) => a == b,
        }
    }

    /// Whether assuming `wanted` on media detected as `self` promises more than the media keeps.
    pub(super) fn is_emulated_by(self, wanted: Domain) -> bool {
        self != wanted && !self.is_persistent_memory()
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Domain {
    type Err = String;

    fn from_str(s: &str) -> Result<Domain, String> {
        [Domain::CpuCache, Domain::Memory, Domain::PageCache, Domain::Volatile]
            .into_iter()
            .find(|d| d.name() == s)
            .ok_or_else(|| {
                format!("unknown persistence domain `{s}`: use cpu-cache, memory, page-cache or volatile")
            })
    }
}

/// The domain of persistent memory whose device is `dev` (`/sys/dev/block/M:m` or `/sys/dev/char/M:m`).
///
/// The nd region (or the CXL region) is an ancestor of the device's directory. The kernel sets one read-only
/// whose NVDIMM is not armed: what is stored there does not survive, and a device-dax node takes it all the same.
pub(super) fn of_device(dev: &Path) -> Domain {
    let Ok(device) = fs::canonicalize(dev) else { return Domain::Memory };
    for dir in device.ancestors().take_while(|d| d.starts_with("/sys/devices")) {
        if attribute(dir, "read_only").as_deref() == Some("1") {
            let region = dir.shown();
            tracing::warn!(%region, "the kernel took this persistent memory for read-only: what is written may be lost");
            return Domain::Volatile;
        }
        match attribute(dir, "persistence_domain").as_deref() {
            Some("cpu_cache") => return Domain::CpuCache,
            Some(_) => return Domain::Memory,
            None => {}
        }
        // A CXL region of volatile capacity, or memory that firmware merely set aside.
        let name = dir.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let is_ram = name.starts_with("region") && attribute(dir, "mode").as_deref() == Some("ram");
        if is_ram || name.starts_with("hmem") {
            return Domain::Volatile;
        }
    }
    Domain::Memory
}

/// A one-line attribute of a sysfs directory.
pub(super) fn attribute(dir: &Path, name: &str) -> Option<String> {
    fs::read_to_string(dir.join(name)).ok().map(|s| s.trim().to_owned())
}

/// The sysfs directory of a device number.
pub(super) fn sysfs_dir(class: &str, dev: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/{class}/{}:{}", libc::major(dev), libc::minor(dev)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assuming_never_weakens_persistent_memory() {
        use Domain::*;
        assert!(CpuCache.may_assume(Memory));
        for unsafe_choice in [CpuCache, PageCache, Volatile] {
            assert!(!Memory.may_assume(unsafe_choice), "memory as {unsafe_choice}");
        }
        assert!(!CpuCache.may_assume(PageCache) && !CpuCache.may_assume(Volatile));
        assert!(!PageCache.may_assume(Volatile));
        for emulated in [CpuCache, Memory] {
            assert!(PageCache.may_assume(emulated) && PageCache.is_emulated_by(emulated));
            assert!(Volatile.may_assume(emulated) && Volatile.is_emulated_by(emulated));
        }
        assert!(!CpuCache.is_emulated_by(Memory));
    }

    #[test]
    fn regions_join_to_the_weaker_domain_or_not_at_all() {
        use Domain::*;
        assert_eq!(CpuCache.join(Memory), Some(Memory));
        assert_eq!(PageCache.join(Volatile), Some(Volatile));
        assert_eq!(Memory.join(PageCache), None);
        assert_eq!(Volatile.join(CpuCache), None);
    }

    #[test]
    fn names_parse_back() {
        for d in [Domain::CpuCache, Domain::Memory, Domain::PageCache, Domain::Volatile] {
            assert_eq!(d.name().parse::<Domain>().unwrap(), d);
        }
        assert!("ram".parse::<Domain>().unwrap_err().contains("cpu-cache"));
    }
}
