//! What this machine offers: processor, copy engines, persistent memory, kernel interfaces; and for each
//! thing that is missing, in words, what to do about it.
//!
//! Everything is read from /proc, /sys and /dev below one root directory, so that tests can lay out a
//! machine that we do not have. Nothing is loaded, mounted or switched on.

use std::fs;
use std::path::Path;

use lodestone::mover::dsa_sysfs::{self, Found, Places};
use lodestone::mover::profile::Profile;
use lodestone::mover::vfio_sysfs;
use serde::Serialize;

use crate::size::Size;

/// One facility of the machine.
#[derive(Clone, Debug, Serialize)]
pub struct Facility {
    pub name: &'static str,
    pub found: bool,
    /// What was found, or what is missing.
    pub detail: String,
    /// What to do where it is missing and something can be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// A work queue of an Intel DSA.
#[derive(Clone, Debug, Serialize)]
pub struct WorkQueue {
    pub name: String,
    pub usable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// What it can, or why it cannot be used.
    pub detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cpus: usize,
    pub numa_nodes: usize,
    pub kernel: String,
    /// Instructions that decide how stores are made and flushed, of those this processor has.
    pub instructions: Vec<&'static str>,
    /// Persistent memory that the kernel knows, as device nodes.
    pub persistent_memory: Vec<String>,
    pub facilities: Vec<Facility>,
    pub dsa_queues: Vec<WorkQueue>,
}

/// Names as /proc/cpuinfo spells them.
const INSTRUCTIONS: &[&str] = &[
    "sse2",
    "sse4_2",
    "avx2",
    "avx512f",
    "vpclmulqdq",
    "clflush",
    "clflushopt",
    "clwb",
    "movdir64b",
    "enqcmd",
    "waitpkg",
];

impl Machine {
    pub fn probe(root: &Path) -> Machine {
        let sys = Sys { root };
        let cpuinfo = sys.text("proc/cpuinfo").unwrap_or_default();
        let flags = Flags::of(&cpuinfo);
        let persistent_memory = sys.persistent_memory();
        let dsa = dsa_sysfs::find(&sys.dsa_places());
        Machine {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown processor").to_string(),
            cpus: cpuinfo.lines().filter(|l| l.starts_with("processor")).count(),
            numa_nodes: sys.count("sys/devices/system/node", "node").max(1),
            kernel: sys.text("proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string(),
            instructions: INSTRUCTIONS.iter().filter(|i| flags.has(i)).copied().collect(),
            facilities: vec![
                cpu_engine(&flags),
                semaphore_engine(),
                delegate_engine(),
                emulated_engine(),
                emulated_registers(),
                dsa_engine(&dsa, &flags),
                sys.ioat(),
                sys.memory_facility(&persistent_memory),
                sys.resctrl(&flags),
                sys.fuse(),
                sys.userfaultfd(),
                sys.io_uring(),
            ],
            persistent_memory,
            dsa_queues: work_queues(&dsa),
        }
    }
}

struct Flags<'a>(&'a str);

impl<'a> Flags<'a> {
    fn of(cpuinfo: &'a str) -> Flags<'a> {
        Flags(field(cpuinfo, "flags").unwrap_or_default())
    }

    fn has(&self, flag: &str) -> bool {
        self.0.split(' ').any(|f| f == flag)
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|l| l.split(':').next().is_some_and(|n| n.trim() == name))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

fn found(name: &'static str, detail: impl Into<String>) -> Facility {
    Facility { name, found: true, detail: detail.into(), remedy: None }
}

fn missing(name: &'static str, detail: impl Into<String>, remedy: &str) -> Facility {
    Facility { name, found: false, detail: detail.into(), remedy: Some(remedy.to_string()) }
}

/// The calling thread's own copies: always there; the flush instruction decides what they cost.
fn cpu_engine(flags: &Flags) -> Facility {
    let flush = ["clwb", "clflushopt", "clflush"].into_iter().find(|i| flags.has(i));
    match flush {
        Some("clwb") => found("cpu", "non-temporal stores, clwb"),
        Some(other) => Facility {
            remedy: Some("a processor with clwb keeps flushed lines in its cache".into()),
            ..found("cpu", format!("non-temporal stores, {other}; no clwb"))
        },
        None => missing("cpu", "no instruction flushes a cache line", "use an x86-64 processor"),
    }
}

fn semaphore_engine() -> Facility {
    let copies = Profile::default().concurrency;
    let what =
        format!("the cpu, at most {copies} copies at a time per region, or as many as the profile says");
    found("semaphore", format!("{what}; --engine semaphore"))
}

fn delegate_engine() -> Facility {
    let threads = Profile::default().concurrency;
    let what = format!("{threads} threads per region, or as many as the profile says, copy; callers sleep");
    found("delegate", format!("{what}; --engine delegate"))
}

fn emulated_engine() -> Facility {
    let what = "a device in software that takes the descriptors of a DSA, for tests: its thread's CPU is used instead";
    found("emu", format!("{what} of a device's; --engine emu"))
}

/// Intel DSA: work queues that user space may submit to.
fn dsa_engine(dsa: &Found, flags: &Flags) -> Facility {
    let devices = dsa.devices.len();
    if !dsa.usable.is_empty() {
        let usable = dsa.usable.len();
        return found("dsa", format!("{devices} devices, {usable} user work queues; --engine dsa"));
    }
    if devices == 0 {
        let remedy = match (flags.has("movdir64b"), dsa.driver) {
            (true, false) => {
                "on a Xeon since 2023: enable it in firmware, or pass it to this machine, and load idxd"
            }
            _ => "needs a Xeon since 2023 with DSA enabled in firmware",
        };
        return missing("dsa", "no Intel DSA device; copies run on the cpu", remedy);
    }
    match dsa.unusable.first() {
        None => missing(
            "dsa",
            format!("{devices} devices, but no work queue is configured"),
            "configure one: accel-config config-wq --type=user, enable-wq",
        ),
        Some(first) => {
            let queues = dsa.unusable.len();
            missing(
                "dsa",
                format!(
                    "{devices} devices, but none of {queues} work queues can be used: {}: {}",
                    first.name, first.why
                ),
                &first.why.remedy(),
            )
        }
    }
}

fn work_queues(dsa: &Found) -> Vec<WorkQueue> {
    let usable = dsa.usable.iter().map(|queue| {
        let mode = if queue.shared { "shared" } else { "dedicated" };
        let mut detail =
            format!("{mode}, {} descriptors, {}", queue.size, Size(queue.offer.transfer_bytes_max as u64));
        let without = [
            (queue.offer.batch_max < 2, "no batches"),
            (!queue.offer.copy_crc, "no checksums"),
            (!queue.offer.routes.past_caches, "into the caches only"),
            (!queue.offer.block_on_fault, "page faults end copies"),
        ];
        without.iter().filter(|(lacks, _)| *lacks).for_each(|(_, what)| detail += &format!(", {what}"));
        WorkQueue { name: queue.name.clone(), usable: true, numa_node: queue.node, detail, remedy: None }
    });
    let unusable = dsa.unusable.iter().map(|queue| WorkQueue {
        name: queue.name.clone(),
        usable: false,
        numa_node: queue.node,
        detail: queue.why.to_string(),
        remedy: Some(queue.why.remedy()),
    });
    usable.chain(unusable).collect()
}

fn emulated_registers() -> Facility {
    let what =
        "a device in software with the registers of an I/OAT, for tests: its thread's CPU is used instead";
    found("emu-ioat", format!("{what} of a device's; --engine emu-ioat"))
}

struct Sys<'a> {
    root: &'a Path,
}

impl Sys<'_> {
    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Entries named `prefix` and a number.
    fn count(&self, path: &str, prefix: &str) -> usize {
        let numbered = |n: &String| n.strip_prefix(prefix).is_some_and(|r| r.parse::<u32>().is_ok());
        self.names(path).iter().filter(|n| numbered(n)).count()
    }

    /// This process may read and write it.
    fn usable(&self, path: &str) -> bool {
        let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
        rustix::fs::access(self.root.join(path), access).is_ok()
    }

    fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    fn dsa_places(&self) -> Places {
        Places { sys: self.root.join("sys/bus/dsa/devices"), dev: self.root.join("dev/dsa") }
    }

    /// Intel I/OAT: functions that this user may open through VFIO, or what stands in the way.
    fn ioat(&self) -> Facility {
        let unusable = match vfio_sysfs::usable(self.root) {
            Ok(functions) => {
                let (first, more) = (&functions[0], functions.len() - 1);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let what =
                    format!("function {}{more} ({}), bound to vfio-pci", first.address, first.platform);
                return found("ioat", format!("{what}; never tried on hardware; --engine ioat"));
            }
            Err(unusable) => unusable,
        };
        // A function that is too new to be known is one all the same where the kernel drives it.
        let channels = self.names("sys/class/dma").iter().filter(|c| self.is_ioat(c)).count();
        if channels > 0 && vfio_sysfs::functions(self.root).is_empty() {
            let what = format!("{channels} channels, held by the kernel's ioatdma driver");
            return missing("ioat", what, "bind a channel's PCI device to vfio-pci");
        }
        missing("ioat", unusable.what, &unusable.remedy)
    }

    fn is_ioat(&self, channel: &str) -> bool {
        let driver = self.root.join("sys/class/dma").join(channel).join("device/driver");
        fs::canonicalize(driver).is_ok_and(|d| d.file_name().is_some_and(|n| n == "ioatdma"))
    }

    fn persistent_memory(&self) -> Vec<String> {
        let devices = |n: &String| {
            ["pmem", "dax"]
                .iter()
                .any(|p| n.strip_prefix(p).is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit())))
        };
        let class = |path| self.names(path).into_iter().filter(devices).map(|n| format!("/dev/{n}"));
        class("sys/class/block").chain(class("sys/bus/dax/devices")).collect()
    }

    fn memory_facility(&self, devices: &[String]) -> Facility {
        match devices {
            [] => missing(
                "persistent-memory",
                "no persistent memory; pools are files",
                "none is needed; --assume memory measures as if there were some",
            ),
            some => found("persistent-memory", some.join(" ")),
        }
    }

    fn resctrl(&self, flags: &Flags) -> Facility {
        let mounts = self.text("proc/self/mounts").unwrap_or_default();
        let mounted = mounts.lines().find_map(|l| {
            let mut words = l.split(' ').skip(1);
            let dir = words.next()?;
            (words.next() == Some("resctrl")).then_some(dir)
        });
        let kernel =
            self.text("proc/filesystems").is_some_and(|t| t.lines().any(|l| l.ends_with("\tresctrl")));
        match (mounted, kernel && (flags.has("cat_l3") || flags.has("cat_l2"))) {
            (Some(dir), _) => found("resctrl", format!("cache ways can be reserved at {dir}")),
            (None, true) => missing(
                "resctrl",
                "not mounted: cache ways cannot be reserved",
                "mount -t resctrl resctrl /sys/fs/resctrl",
            ),
            (None, false) => missing(
                "resctrl",
                "no cache allocation in this processor or kernel: cache ways cannot be reserved",
                "needs a Xeon with CAT and a kernel with CONFIG_X86_CPU_RESCTRL",
            ),
        }
    }

    fn fuse(&self) -> Facility {
        if !self.exists("dev/fuse") {
            return missing("fuse", "no /dev/fuse: pools cannot be mounted", "modprobe fuse");
        }
        let helper = ["usr/bin/fusermount3", "bin/fusermount3", "usr/local/bin/fusermount3"]
            .into_iter()
            .find(|p| self.exists(p));
        let uring = match self.text("sys/module/fuse/parameters/enable_uring").as_deref().map(str::trim) {
            Some("Y" | "1") => "; io_uring transport on",
            Some(_) => "; io_uring transport off",
            None => "",
        };
        match (self.usable("dev/fuse"), helper) {
            (true, _) => found("fuse", format!("/dev/fuse{uring}")),
            (false, Some(_)) => found("fuse", format!("/dev/fuse through fusermount3{uring}")),
            (false, None) => missing(
                "fuse",
                "/dev/fuse is not permitted to this user, and there is no fusermount3",
                "install fuse3, or mount as root",
            ),
        }
    }

    fn userfaultfd(&self) -> Facility {
        let unprivileged = self.text("proc/sys/vm/unprivileged_userfaultfd");
        match unprivileged.as_deref().map(str::trim) {
            None => missing(
                "userfaultfd",
                "not in this kernel: mapped files cannot be watched for hot pages",
                "use a kernel with CONFIG_USERFAULTFD",
            ),
            Some("1") => found("userfaultfd", "permitted to every user"),
            Some(_) if self.usable("dev/userfaultfd") => found("userfaultfd", "/dev/userfaultfd"),
            Some(_) => missing(
                "userfaultfd",
                "not permitted to this user: mapped files cannot be watched for hot pages",
                "sysctl vm.unprivileged_userfaultfd=1, or run as root",
            ),
        }
    }

    fn io_uring(&self) -> Facility {
        let disabled = self.text("proc/sys/kernel/io_uring_disabled");
        let symbols = || self.text("proc/kallsyms").is_some_and(|t| t.contains(" io_uring_setup"));
        match disabled.as_deref().map(str::trim) {
            Some("0") => found("io_uring", "permitted to every user"),
            Some("1") => missing(
                "io_uring",
                "permitted to the group in kernel.io_uring_group alone",
                "sysctl kernel.io_uring_disabled=0",
            ),
            Some(_) => missing("io_uring", "switched off", "sysctl kernel.io_uring_disabled=0"),
            None if symbols() => found("io_uring", "permitted to every user"),
            None => missing("io_uring", "not in this kernel", "use Linux 5.10 or later with CONFIG_IO_URING"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    /// A machine laid out as files.
    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str) -> Fake {
            let dir = std::env::temp_dir().join(format!("lode-machine-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Fake(dir)
        }

        fn file(&self, path: &str, text: &str) -> &Fake {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn facility(&self, name: &str) -> Facility {
            let machine = Machine::probe(&self.0);
            machine.facilities.into_iter().find(|f| f.name == name).unwrap()
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const XEON: &str = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: sse2 clwb movdir64b enqcmd cat_l3\n\n\
                        processor\t: 1\nmodel name\t: Xeon\nflags\t\t: sse2 clwb movdir64b enqcmd cat_l3\n";

    #[test]
    fn an_empty_machine_says_what_is_missing_and_how_to_get_it() {
        let machine = Machine::probe(&Fake::new("empty").0);
        // Threads there are everywhere.
        let needs_something = |f: &&Facility| !["semaphore", "delegate", "emu", "emu-ioat"].contains(&f.name);
        for f in machine.facilities.iter().filter(needs_something) {
            assert!(!f.found, "{} found in an empty machine", f.name);
            assert!(f.remedy.is_some(), "{} has no remedy", f.name);
        }
    }

    #[test]
    fn the_processor_is_read() {
        let fake = Fake::new("cpu");
        let machine = Machine::probe(&fake.file("proc/cpuinfo", XEON).0);
        assert_eq!((machine.cpu.as_str(), machine.cpus), ("Xeon", 2));
        assert_eq!(machine.instructions, ["sse2", "clwb", "movdir64b", "enqcmd"]);
    }

    #[test]
    fn dsa_is_found_only_with_a_queue() {
        let fake = Fake::new("dsa");
        fake.file("proc/cpuinfo", XEON).file("sys/bus/dsa/devices/dsa0/numa_node", "0");
        let without = fake.facility("dsa");
        assert!(!without.found && without.remedy.unwrap().contains("accel-config"));
        fake.file("sys/bus/dsa/devices/dsa0/state", "enabled");
        for (attribute, text) in [("state", "disabled"), ("type", "user"), ("mode", "shared"), ("size", "32")]
        {
            fake.file(&format!("sys/bus/dsa/devices/wq0.0/{attribute}"), text);
        }
        let disabled = fake.facility("dsa");
        assert!(!disabled.found && disabled.detail.ends_with("wq0.0: it is disabled"), "{disabled:?}");
        assert!(disabled.remedy.unwrap().contains("enable-wq"));
        fake.file("sys/bus/dsa/devices/wq0.0/state", "enabled");
        let with = fake.file("dev/dsa/wq0.0", "").facility("dsa");
        assert!(with.found && with.detail.contains("1 user work queues"), "{with:?}");
    }

    #[test]
    fn each_work_queue_says_what_it_is_or_why_not() {
        let fake = Fake::new("dsa-queues");
        fake.file("sys/bus/dsa/devices/dsa1/state", "enabled")
            .file("sys/bus/dsa/devices/dsa1/numa_node", "1");
        for (queue, kind) in [("wq1.0", "user"), ("wq1.1", "kernel")] {
            for (attribute, text) in
                [("state", "enabled"), ("type", kind), ("mode", "dedicated"), ("size", "8")]
            {
                fake.file(&format!("sys/bus/dsa/devices/{queue}/{attribute}"), text);
            }
            fake.file(&format!("dev/dsa/{queue}"), "");
        }
        let queues = serde_json::to_value(Machine::probe(&fake.0).dsa_queues).unwrap();
        assert_eq!(queues[0]["name"], "wq1.0");
        assert_eq!((&queues[0]["usable"], &queues[0]["numa_node"]), (&true.into(), &1.into()));
        let detail = queues[0]["detail"].as_str().unwrap();
        assert!(
            detail.starts_with("dedicated, 8 descriptors, ") && detail.contains("no batches"),
            "{detail}"
        );
        assert_eq!((&queues[1]["name"], &queues[1]["usable"]), (&"wq1.1".into(), &false.into()));
        assert_eq!(queues[1]["detail"], "its type is kernel, not user");
        assert!(queues[1]["remedy"].as_str().unwrap().contains("--type=user"));
    }

    #[test]
    fn ioat_channels_of_the_kernel_need_vfio() {
        let fake = Fake::new("ioat");
        fake.file("sys/bus/pci/drivers/ioatdma/bind", "").file("sys/class/dma/dma0chan0/device/vendor", "");
        symlink("../../../../bus/pci/drivers/ioatdma", fake.0.join("sys/class/dma/dma0chan0/device/driver"))
            .unwrap();
        let held = fake.facility("ioat");
        assert!(!held.found && held.remedy.unwrap().contains("vfio-pci"));
    }

    #[test]
    fn ioat_functions_are_told_by_address() {
        let fake = Fake::new("ioat-functions");
        let dir = "sys/bus/pci/devices/0000:00:04.0";
        fake.file(&format!("{dir}/vendor"), "0x8086\n").file(&format!("{dir}/device"), "0x2021\n");
        symlink("../../drivers/ioatdma", fake.0.join(dir).join("driver")).unwrap();
        let held = fake.facility("ioat");
        assert!(
            !held.found
                && held.detail
                    == "I/OAT function 0000:00:04.0 (Xeon Scalable), held by the kernel's driver ioatdma"
        );
        assert_eq!(
            held.remedy.unwrap(),
            "bind one to vfio-pci: driverctl set-override 0000:00:04.0 vfio-pci"
        );
        fs::remove_file(fake.0.join(dir).join("driver")).unwrap();
        symlink("../../drivers/vfio-pci", fake.0.join(dir).join("driver")).unwrap();
        symlink("../../groups/3", fake.0.join(dir).join("iommu_group")).unwrap();
        let ready = fake.file("dev/vfio/vfio", "").file("dev/vfio/3", "").facility("ioat");
        assert!(ready.found && ready.detail.contains("never tried on hardware"), "{ready:?}");
    }

    #[test]
    fn resctrl_tells_mounted_from_mountable() {
        let fake = Fake::new("resctrl");
        fake.file("proc/cpuinfo", XEON).file("proc/filesystems", "nodev\tsysfs\nnodev\tresctrl\n");
        assert!(fake.facility("resctrl").remedy.unwrap().contains("mount -t resctrl"));
        fake.file("proc/self/mounts", "resctrl /sys/fs/resctrl resctrl rw 0 0\n");
        assert!(fake.facility("resctrl").found);
    }

    #[test]
    fn fuse_says_whether_io_uring_is_on() {
        let fake = Fake::new("fuse");
        fake.file("dev/fuse", "").file("sys/module/fuse/parameters/enable_uring", "N\n");
        let fuse = fake.facility("fuse");
        assert!(fuse.found && fuse.detail.ends_with("transport off"), "{fuse:?}");
    }

    #[test]
    fn persistent_memory_is_listed_by_node() {
        let fake = Fake::new("pmem");
        fake.file("sys/class/block/pmem0/size", "").file("sys/class/block/sda/size", "");
        fake.file("sys/bus/dax/devices/dax1.0/size", "");
        assert_eq!(Machine::probe(&fake.0).persistent_memory, ["/dev/pmem0", "/dev/dax1.0"]);
    }
}
