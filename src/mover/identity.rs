//! On which machine, and in front of which memory, a profile was measured: on others its numbers mean nothing.
//!
//! A machine is its processor, how many CPUs there are, and how they divide into nodes. Memory is what bytes lie in, not
//! what makes them durable: the page cache, tmpfs and anonymous memory are the same DRAM, copied to by the same stores,
//! while each persistent device is known by its name.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::node::nodes;
use crate::media::{RegionDescription, RegionKind};

/// What every file that is not on DAX lies in.
pub const DRAM: &str = "dram";
/// A processor that does not say what it is.
const UNNAMED: &str = "unknown processor";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// As /proc/cpuinfo names it.
    pub cpu: String,
    pub cpus: usize,
    /// The CPUs of each node, as `0-3,8`.
    pub nodes: Vec<String>,
}

impl Machine {
    pub fn here() -> Machine {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let nodes = nodes().iter().map(|node| ranges(node.cpus())).collect();
        Machine { nodes, ..Machine::of_cpuinfo(&cpuinfo) }
    }

    fn of_cpuinfo(cpuinfo: &str) -> Machine {
        let named = |key: &'static str| {
            cpuinfo.lines().filter_map(|line| line.split_once(':')).filter(move |(k, _)| k.trim() == key)
        };
        let cpu = named("model name").next().map_or(UNNAMED, |(_, value)| value.trim());
        Machine { cpu: cpu.to_owned(), cpus: named("processor").count(), nodes: Vec::new() }
    }

    /// In words, how this machine differs from one that a profile was made on.
    pub fn differs_from(&self, other: &Machine) -> Option<String> {
        if self.cpu != other.cpu {
            return Some(format!("its processor is `{}`, this one's `{}`", other.cpu, self.cpu));
        }
        if self.cpus != other.cpus {
            return Some(format!("it has {} CPUs, this one {}", other.cpus, self.cpus));
        }
        let shown = |nodes: &[String]| match nodes {
            [] => "not known".to_owned(),
            some => some.join(" and "),
        };
        let (there, here) = (shown(&other.nodes), shown(&self.nodes));
        (here != there).then(|| format!("the CPUs of its nodes are {there}, this one's {here}"))
    }
}

/// What the bytes of these regions lie in: each once, in order.
pub fn memory(regions: &[RegionDescription]) -> Vec<String> {
    let mut memory: Vec<String> = regions.iter().map(memory_of).collect();
    memory.sort();
    memory.dedup();
    memory
}

fn memory_of(region: &RegionDescription) -> String {
    match region.kind {
        RegionKind::File | RegionKind::BlockDevice | RegionKind::Memfd => DRAM.to_owned(),
        RegionKind::DeviceDax => last_name(&region.path).unwrap_or_else(|| region.kind.name().to_owned()),
        // A file is named otherwise than the device that it lies on, which the kernel knows.
        RegionKind::DaxFile => block_device(&region.path)
            .unwrap_or_else(|| format!("{} on {}", region.kind.name(), region.host_fs)),
    }
}

/// The device of the file system that a file is on, as `pmem0`.
fn block_device(file: &Path) -> Option<String> {
    let number = std::fs::metadata(file).ok()?.dev();
    let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    last_name(&std::fs::read_link(link).ok()?)
}

fn last_name(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Numbers in order as `0-3,8`.
fn ranges(cpus: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let shown = |(first, last): (usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.into_iter().map(shown).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::{Pool, PoolOptions};

    const CPUINFO: &str =
        "processor\t: 0\nmodel name\t: Xeon\nmodel\t\t: 7\n\nprocessor\t: 1\nmodel name\t: Xeon\n";

    fn machine(cpu: &str, cpus: usize, nodes: &[&str]) -> Machine {
        Machine { cpu: cpu.to_owned(), cpus, nodes: nodes.iter().map(|n| n.to_string()).collect() }
    }

    #[test]
    fn a_processor_is_read_and_counted() {
        assert_eq!(Machine::of_cpuinfo(CPUINFO), machine("Xeon", 2, &[]));
        assert_eq!(Machine::of_cpuinfo(""), machine(UNNAMED, 0, &[]));
    }

    #[test]
    fn this_machine_is_itself() {
        assert!(Machine::here().cpus > 0);
        assert_eq!(Machine::here().differs_from(&Machine::here()), None);
    }

    #[test]
    fn each_difference_is_named() {
        let here = machine("Xeon", 4, &["0-1", "2-3"]);
        for (other, says) in [
            (machine("Epyc", 4, &["0-1", "2-3"]), "its processor is `Epyc`, this one's `Xeon`"),
            (machine("Xeon", 2, &["0-1", "2-3"]), "it has 2 CPUs, this one 4"),
            (machine("Xeon", 4, &["0-3"]), "the CPUs of its nodes are 0-3, this one's 0-1 and 2-3"),
            (machine("Xeon", 4, &[]), "the CPUs of its nodes are not known, this one's 0-1 and 2-3"),
        ] {
            assert_eq!(here.differs_from(&other).as_deref(), Some(says));
        }
    }

    #[test]
    fn cpus_are_shown_as_ranges() {
        for (cpus, shown) in [(&[0, 1, 2, 3, 8][..], "0-3,8"), (&[5], "5"), (&[], ""), (&[0, 2, 3], "0,2-3")]
        {
            assert_eq!(ranges(cpus), shown);
        }
    }

    #[test]
    fn what_is_not_on_dax_is_dram() {
        let pool = Pool::memfd(1 << 20, &PoolOptions::default()).unwrap();
        assert_eq!(memory(&pool.describe().regions), [DRAM]);
        let region = pool.describe().regions[0].clone();
        let of =
            |kind, path: &str| memory_of(&RegionDescription { kind, path: path.into(), ..region.clone() });
        assert_eq!(of(RegionKind::File, "/srv/a.pool"), DRAM);
        assert_eq!(of(RegionKind::DeviceDax, "/dev/dax1.0"), "dax1.0");
        let mut two = pool.describe();
        two.regions = ["/dev/dax1.0", "/dev/dax0.0", "/dev/dax1.0"]
            .map(|path| RegionDescription {
                kind: RegionKind::DeviceDax,
                path: path.into(),
                ..region.clone()
            })
            .to_vec();
        assert_eq!(memory(&two.regions), ["dax0.0", "dax1.0"]);
    }
}
