//! I/OAT functions that a program holds through VFIO: the kernel gives it their registers, and an IOMMU keeps them to the
//! memory that was named to it. **No hardware has been driven by this so far**: everything above it runs on a model of the
//! registers (`engine_emu_ioat`), and what the ioctls are told is held against the kernel's header.
//!
//! All functions share one container, so that memory is registered once for all of them. Registered and pinned memory
//! gets bus addresses from [`Space`], below 2^39: some of these devices have 40 address lines, some IOMMUs 39. Each request
//! has a window of its own there, so that pinning is one call for each range, and unpinning one for all.
//!
//! The kernel pins what is named: pages on fsdax and of files on disks it refuses, device-dax, tmpfs, anonymous memory and
//! huge pages it takes, up to the user's limit of locked memory. Taking a range away is certain: when the call returned the
//! IOMMU lets no access there through, whatever the function does.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use parking_lot::{Mutex, RwLock};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use smallvec::SmallVec;

use super::engine_ioat::{Device, PIECE_BYTES_MAX, Pin, Pinned, SHARES_MAX, SLOTS};
use super::engine_port::Durability;
use super::ioat::{COMMAND_MASTER, COMMAND_MEMORY, CONFIG_COMMAND};
use super::pairing::PAGE_BYTES;
use super::vfio_sysfs::{self as sysfs, Unusable, unusable};

/// `_IO(';', 100 + n)`.
const fn request(n: u64) -> u64 {
    (b';' as u64) << 8 | (100 + n)
}

const GET_API_VERSION: u64 = request(0);
const CHECK_EXTENSION: u64 = request(1);
const SET_IOMMU: u64 = request(2);
const GROUP_GET_STATUS: u64 = request(3);
const GROUP_SET_CONTAINER: u64 = request(4);
const GROUP_GET_DEVICE_FD: u64 = request(6);
const DEVICE_GET_REGION_INFO: u64 = request(8);
const IOMMU_GET_INFO: u64 = request(12);
const IOMMU_MAP_DMA: u64 = request(13);
const IOMMU_UNMAP_DMA: u64 = request(14);

const API_VERSION: i32 = 0;
const TYPE1V2_IOMMU: usize = 3;
const GROUP_FLAGS_VIABLE: u32 = 1;
const BAR0_REGION: u32 = 0;
const CONFIG_REGION: u32 = 7;
const REGION_FLAG_MMAP: u32 = 1 << 2;
const MAP_FLAG_READ: u32 = 1;
const MAP_FLAG_WRITE: u32 = 2;
const INFO_FLAG_CAPS: u32 = 1 << 1;
const CAP_IOVA_RANGE: u16 = 1;

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct MapDma {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

#[repr(C)]
#[derive(Default)]
struct UnmapDma {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

const _: () = assert!(size_of::<GroupStatus>() == 8 && size_of::<RegionInfo>() == 32);
const _: () = assert!(size_of::<MapDma>() == 32 && size_of::<UnmapDma>() == 24);

/// What `IOMMU_GET_INFO` may answer at most, in words of 64 bits: a head, and capabilities that list ranges.
const INFO_WORDS: usize = 512;
/// The registers of a function and of up to 31 channels.
const BAR_BYTES: usize = 4096;
/// Functions held at most.
const FUNCTIONS_MAX: usize = 16;

/// Addresses that are given out: from here, and below that.
const SPACE_FROM: u64 = 1 << 32;
const SPACE_TO: u64 = 1 << 39;
/// Large ranges begin where large pages do.
const SPACE_ALIGN: u64 = 2 << 20;
const WINDOW_BYTES: u64 = (PIECE_BYTES_MAX + 2 * SHARES_MAX * PAGE_BYTES) as u64;

/// Bus addresses, each given out once.
struct Space {
    /// What is left: first address, and the first behind it.
    ranges: Vec<(u64, u64)>,
}

impl Space {
    /// Of the ranges that the IOMMU translates, first and last address; all where it does not say.
    fn new(translated: &[(u64, u64)]) -> Space {
        let all = [(0, u64::MAX)];
        let translated = if translated.is_empty() { &all[..] } else { translated };
        let clip =
            |(first, last): &(u64, u64)| ((*first).max(SPACE_FROM), last.saturating_add(1).min(SPACE_TO));
        Space { ranges: translated.iter().map(clip).filter(|(from, to)| from < to).collect() }
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let fits = |(from, to): &(u64, u64)| {
            let begin = from.next_multiple_of(SPACE_ALIGN);
            (begin.checked_add(bytes)? <= *to).then_some(begin)
        };
        let (n, begin) = self.ranges.iter().enumerate().find_map(|(n, range)| Some((n, fits(range)?)))?;
        self.ranges[n].0 = begin + bytes;
        Some(begin)
    }
}

/// The ranges in what `IOMMU_GET_INFO` answered.
fn iova_ranges(info: &[u8]) -> Vec<(u64, u64)> {
    let u32_at = |at: usize| info.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("four")));
    let u64_at = |at: usize| info.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("eight")));
    if u32_at(4).is_none_or(|flags| flags & INFO_FLAG_CAPS == 0) {
        return Vec::new();
    }
    let mut at = u32_at(16).unwrap_or(0) as usize;
    // Each capability is behind the one before, or it is a loop.
    while let (Some(head), Some(next)) = (u32_at(at), u32_at(at + 4))
        && at > 0
    {
        if head as u16 == CAP_IOVA_RANGE {
            let count = u32_at(at + 8).unwrap_or(0) as usize;
            let pairs = (0..count.min(INFO_WORDS)).map(|n| at + 16 + n * 16);
            return pairs.map_while(|pair| Some((u64_at(pair)?, u64_at(pair + 8)?))).collect();
        }
        if next as usize <= at {
            break;
        }
        at = next as usize;
    }
    Vec::new()
}

/// The functions, held.
pub struct Vfio {
    // In this order they are closed: the kernel resets a function when it is.
    functions: Vec<Function>,
    _groups: Vec<OwnedFd>,
    container: OwnedFd,
    space: Mutex<Space>,
    /// Where the windows of requests are.
    windows: u64,
    /// What is registered: bus address and bytes; none once the functions are stopped.
    registered: RwLock<Option<Vec<(u64, u64)>>>,
}

struct Function {
    bar: *mut u8,
    device: File,
    config: u64,
    node: Option<u32>,
}

// SAFETY: registers of a device, which are read and written with accesses of one instruction.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

fn ioctl<T>(file: &impl AsRawFd, request: u64, argument: *mut T) -> io::Result<i32> {
    // SAFETY: each caller passes a number without memory behind it, or a struct that lives during the call and whose size the
    // kernel is told in its first field (or a name with its end).
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, argument) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// An argument that is no address.
fn plain(n: usize) -> *mut u8 {
    std::ptr::without_provenance_mut(n)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

impl Function {
    fn open(group: &OwnedFd, found: &sysfs::Function) -> io::Result<Function> {
        let name = std::ffi::CString::new(found.address.as_str())?;
        let fd = ioctl(group, GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut())?;
        // SAFETY: the kernel just made it, for nobody else.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let region = |index| {
            let mut info =
                RegionInfo { argsz: size_of::<RegionInfo>() as u32, index, ..RegionInfo::default() };
            ioctl(&device, DEVICE_GET_REGION_INFO, &raw mut info).map(|_| info)
        };
        let (bar0, config) = (region(BAR0_REGION)?, region(CONFIG_REGION)?);
        if bar0.flags & REGION_FLAG_MMAP == 0 || bar0.size < BAR_BYTES as u64 {
            return Err(io::Error::other("its registers cannot be mapped"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let bar = unsafe {
            mmap(std::ptr::null_mut(), BAR_BYTES, protection, MapFlags::SHARED, &device, bar0.offset)?
        };
        let function = Function { bar: bar.cast(), device, config: config.offset, node: found.node };
        let command = function.read_config(CONFIG_COMMAND)?;
        function.write_config(CONFIG_COMMAND, command | COMMAND_MEMORY | COMMAND_MASTER)?;
        Ok(function)
    }

    fn read_config(&self, at: usize) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.device.read_exact_at(&mut bytes, self.config + at as u64)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write_config(&self, at: usize, value: u32) -> io::Result<()> {
        // The status half behind the command is cleared by writing ones: it is left as it is.
        let bytes = value.to_le_bytes();
        let bytes = if at == CONFIG_COMMAND { &bytes[..2] } else { &bytes[..] };
        self.device.write_all_at(bytes, self.config + at as u64)
    }

    fn register<T>(&self, at: usize) -> *mut T {
        assert!(
            at + size_of::<T>() <= BAR_BYTES && at.is_multiple_of(size_of::<T>()),
            "no register at {at:#x}"
        );
        // SAFETY: inside of the mapping, as just checked.
        unsafe { self.bar.add(at).cast() }
    }

    fn read<T>(&self, at: usize) -> T {
        // SAFETY: a register's address; volatile, because the device changes it and takes notice of accesses.
        unsafe { self.register::<T>(at).read_volatile() }
    }

    fn write<T>(&self, at: usize, value: T) {
        // SAFETY: as for `read`.
        unsafe { self.register::<T>(at).write_volatile(value) }
    }

    /// Whether it was kept from being the master of its bus.
    fn silence(&self) -> io::Result<bool> {
        let command = self.read_config(CONFIG_COMMAND)?;
        self.write_config(CONFIG_COMMAND, command & !COMMAND_MASTER)?;
        // Answered behind all that it wrote before.
        let after = self.read_config(CONFIG_COMMAND)?;
        Ok(after != u32::MAX && after & COMMAND_MASTER == 0)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // SAFETY: the mapping that `open` made; nobody else uses it.
        if let Err(e) = unsafe { munmap(self.bar.cast(), BAR_BYTES) } {
            tracing::debug!("the registers of an I/OAT function stay mapped: {e}");
        }
    }
}

/// Whether what these devices store is durable when they report it, as far as the domain goes. Whether they store into
/// the caches (DDIO) is a switch of the firmware for the bus that they are on, which no program can read in the same way
/// on all machines; so it is taken as on unless the user says `LODE_IOAT_DDIO=off`.
pub fn durability() -> Durability {
    durability_of(std::env::var("LODE_IOAT_DDIO").ok().as_deref())
}

fn durability_of(ddio: Option<&str>) -> Durability {
    match ddio {
        Some("off") => Durability::OnCompletion,
        None | Some("on") => Durability::WriteBack,
        Some(other) => {
            tracing::warn!("engine ioat: LODE_IOAT_DDIO is '{other}', on or off are wanted: taken as on");
            Durability::WriteBack
        }
    }
}

impl Vfio {
    /// All functions below this root directory (of the machine: `/`) that a program may use, up to a number; or in words
    /// why there is none.
    pub fn open(root: &Path) -> Result<Vfio, Unusable> {
        let mut found = sysfs::usable(root)?;
        found.truncate(FUNCTIONS_MAX);
        let node = root.join("dev/vfio/vfio");
        let container = open(&node).map_err(|e| {
            let remedy = "chown it to the user, or to a group with a udev rule: chown USER /dev/vfio/vfio";
            unusable(format!("/dev/vfio/vfio cannot be opened: {e}"), remedy)
        })?;
        let version = ioctl(&container, GET_API_VERSION, plain(0));
        let has_iommu = ioctl(&container, CHECK_EXTENSION, plain(TYPE1V2_IOMMU));
        if version.ok() != Some(API_VERSION) || has_iommu.ok() != Some(1) {
            let what = "/dev/vfio/vfio does not speak the VFIO that is known here";
            return Err(unusable(what, "use Linux 4.0 or later with CONFIG_VFIO_IOMMU_TYPE1"));
        }
        let mut groups: Vec<(u32, OwnedFd)> = Vec::new();
        for number in sysfs::groups(&found) {
            let group = open_group(root, &container, number)?;
            if groups.is_empty() {
                ioctl(&container, SET_IOMMU, plain(TYPE1V2_IOMMU)).map_err(|e| {
                    unusable(format!("the IOMMU cannot be used: {e}"), "see the kernel's log (dmesg)")
                })?;
            }
            groups.push((number, group));
        }
        let mut info = [0u64; INFO_WORDS];
        info[0] = size_of_val(&info) as u64;
        // Without an answer all addresses are taken for good ones: those that are not are refused one by one.
        let _ = ioctl(&container, IOMMU_GET_INFO, &raw mut info);
        let bytes: Vec<u8> = info.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut space = Space::new(&iova_ranges(&bytes));
        let windows = space.take(SLOTS as u64 * WINDOW_BYTES).ok_or_else(|| {
            unusable("the IOMMU translates too few addresses", "see the kernel's log (dmesg)")
        })?;
        let mut functions = Vec::new();
        for function in &found {
            let number = function.group.expect("a usable function is in a group");
            let (_, group) = groups.iter().find(|(n, _)| *n == number).expect("all groups are open");
            functions.push(Function::open(group, function).map_err(|e| {
                unusable(format!("{} cannot be used: {e}", function.address), "see the kernel's log (dmesg)")
            })?);
        }
        Ok(Vfio {
            functions,
            _groups: groups.into_iter().map(|(_, group)| group).collect(),
            container: container.into(),
            space: Mutex::new(space),
            windows,
            registered: RwLock::new(Some(Vec::new())),
        })
    }

    fn map(&self, at: usize, iova: u64, size: u64, flags: u32) -> io::Result<()> {
        let argsz = size_of::<MapDma>() as u32;
        let mut map = MapDma { argsz, flags, vaddr: at as u64, iova, size };
        ioctl(&self.container, IOMMU_MAP_DMA, &raw mut map).map(drop)
    }

    /// All mappings that lie in a range.
    fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        let mut unmap = UnmapDma { argsz: size_of::<UnmapDma>() as u32, flags: 0, iova, size };
        ioctl(&self.container, IOMMU_UNMAP_DMA, &raw mut unmap).map(drop)
    }

    fn window(&self, request: usize) -> u64 {
        self.windows + request as u64 * WINDOW_BYTES
    }
}

fn open_group(root: &Path, container: &File, number: u32) -> Result<OwnedFd, Unusable> {
    let node = format!("/dev/vfio/{number}");
    let group = open(&root.join(&node[1..])).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => unusable(format!("{node} is in use by another process"), "end that process"),
        _ => unusable(format!("{node} cannot be opened: {e}"), format!("chown USER {node}")),
    })?;
    let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, flags: 0 };
    let told = ioctl(&group, GROUP_GET_STATUS, &raw mut status);
    if told.is_err() || status.flags & GROUP_FLAGS_VIABLE == 0 {
        let what = format!("IOMMU group {number} is not viable: another driver holds a device of it");
        return Err(unusable(
            what,
            format!("bind all of /sys/kernel/iommu_groups/{number}/devices to vfio-pci"),
        ));
    }
    let mut fd = container.as_raw_fd();
    ioctl(&group, GROUP_SET_CONTAINER, &raw mut fd).map_err(|e| {
        unusable(format!("IOMMU group {number} cannot be used: {e}"), "see the kernel's log (dmesg)")
    })?;
    Ok(group.into())
}

impl Device for Vfio {
    fn name(&self) -> &'static str {
        "ioat"
    }

    fn functions(&self) -> usize {
        self.functions.len()
    }

    fn node(&self, function: usize) -> Option<u32> {
        self.functions[function].node
    }

    fn read8(&self, function: usize, at: usize) -> u8 {
        self.functions[function].read(at)
    }

    fn read32(&self, function: usize, at: usize) -> u32 {
        self.functions[function].read(at)
    }

    fn read64(&self, function: usize, at: usize) -> u64 {
        self.functions[function].read(at)
    }

    fn write8(&self, function: usize, at: usize, value: u8) {
        self.functions[function].write(at, value);
    }

    fn write16(&self, function: usize, at: usize, value: u16) {
        self.functions[function].write(at, value);
    }

    fn write32(&self, function: usize, at: usize, value: u32) {
        self.functions[function].write(at, value);
    }

    fn write64(&self, function: usize, at: usize, value: u64) {
        self.functions[function].write(at, value);
    }

    fn read_config(&self, function: usize, at: usize) -> u32 {
        // All ones, as from a device that is not there.
        self.functions[function].read_config(at).unwrap_or(u32::MAX)
    }

    fn write_config(&self, function: usize, at: usize, value: u32) {
        if let Err(e) = self.functions[function].write_config(at, value) {
            tracing::debug!("the configuration of an I/OAT function cannot be written: {e}");
        }
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn register(&self, at: *mut u8, bytes: usize) -> io::Result<u64> {
        let mut registered = self.registered.write();
        let Some(registered) = &mut *registered else { return Err(io::Error::other("it was stopped")) };
        let bytes = bytes.next_multiple_of(PAGE_BYTES) as u64;
        let bus = self.space.lock().take(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        // The device stores there.
        self.map(at.expose_provenance(), bus, bytes, MAP_FLAG_READ | MAP_FLAG_WRITE)?;
        registered.push((bus, bytes));
        Ok(bus)
    }

    // SAFETY: what the trait asks of the caller.
    unsafe fn pin(&self, request: usize, ranges: &[Pin]) -> io::Result<SmallVec<[Pinned; 2]>> {
        // Not while it is being stopped, or it would be let in again.
        let registered = self.registered.read();
        if registered.is_none() {
            return Err(io::Error::other("it was stopped"));
        }
        let mut iova = self.window(request);
        let mut pinned = SmallVec::new();
        for range in ranges {
            let offset = range.at.addr() % PAGE_BYTES;
            let size = (offset + range.bytes).next_multiple_of(PAGE_BYTES) as u64;
            let flags = if range.stored_to { MAP_FLAG_WRITE } else { MAP_FLAG_READ };
            if let Err(e) = self.map(range.at.expose_provenance() - offset, iova, size, flags) {
                self.unpin(request);
                return Err(e);
            }
            pinned.push(Pinned::Contiguous(iova + offset as u64));
            iova += size;
        }
        Ok(pinned)
    }

    fn unpin(&self, request: usize) {
        if let Err(e) = self.unmap(self.window(request), WINDOW_BYTES) {
            // The pages stay pinned, and the next request in this window cannot be: it goes through a buffer.
            tracing::debug!("engine ioat: memory stays pinned: {e}");
        }
    }

    fn stop(&self) -> bool {
        let mut registered = self.registered.write();
        let Some(ranges) = registered.take() else { return true };
        let all = [(self.windows, SLOTS as u64 * WINDOW_BYTES)];
        let unmapped = all.iter().chain(&ranges).all(|(iova, size)| self.unmap(*iova, *size).is_ok());
        // Either is enough.
        let silent = self.functions.iter().all(|function| function.silence().is_ok_and(|silent| silent));
        let stopped = unmapped || silent;
        if !stopped {
            *registered = Some(ranges);
        }
        stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_kernel() {
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/vfio.h") else {
            eprintln!("SKIPPED: no linux/vfio.h here (linux-libc-dev has it)");
            return;
        };
        let defined = |name: &str| {
            let mut lines = header.lines().map(str::trim).filter_map(|line| line.strip_prefix("#define"));
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let line = lines.find(|line| words(line).first().is_some_and(|word| word == name));
            words(line.unwrap_or_else(|| panic!("{name} is not in the header")))[1..].join(" ")
        };
        let requests = [
            ("VFIO_GET_API_VERSION", GET_API_VERSION),
            ("VFIO_CHECK_EXTENSION", CHECK_EXTENSION),
            ("VFIO_SET_IOMMU", SET_IOMMU),
            ("VFIO_GROUP_GET_STATUS", GROUP_GET_STATUS),
            ("VFIO_GROUP_SET_CONTAINER", GROUP_SET_CONTAINER),
            ("VFIO_GROUP_GET_DEVICE_FD", GROUP_GET_DEVICE_FD),
            ("VFIO_DEVICE_GET_REGION_INFO", DEVICE_GET_REGION_INFO),
            ("VFIO_IOMMU_GET_INFO", IOMMU_GET_INFO),
            ("VFIO_IOMMU_MAP_DMA", IOMMU_MAP_DMA),
            ("VFIO_IOMMU_UNMAP_DMA", IOMMU_UNMAP_DMA),
        ];
        for (name, number) in requests {
            let n = number - request(0);
            assert_eq!(defined(name), format!("_IO(VFIO_TYPE, VFIO_BASE + {n})"), "{name}");
        }
        assert_eq!((defined("VFIO_TYPE"), defined("VFIO_BASE")), ("(';')".to_owned(), "100".to_owned()));
        let numbers = [
            ("VFIO_API_VERSION", API_VERSION.to_string()),
            ("VFIO_TYPE1v2_IOMMU", TYPE1V2_IOMMU.to_string()),
            ("VFIO_GROUP_FLAGS_VIABLE", "(1 << 0)".to_owned()),
            ("VFIO_REGION_INFO_FLAG_MMAP", "(1 << 2)".to_owned()),
            ("VFIO_DMA_MAP_FLAG_READ", "(1 << 0)".to_owned()),
            ("VFIO_DMA_MAP_FLAG_WRITE", "(1 << 1)".to_owned()),
            ("VFIO_IOMMU_INFO_CAPS", "(1 << 1)".to_owned()),
            ("VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE", CAP_IOVA_RANGE.to_string()),
        ];
        for (name, value) in numbers {
            let found = defined(name);
            assert_eq!(found.split(" /*").next(), Some(value.as_str()), "{name}");
        }
        let indices = header.split("VFIO_PCI_BAR0_REGION_INDEX,").nth(1).unwrap();
        let before_config = indices.split("VFIO_PCI_CONFIG_REGION_INDEX").next().unwrap();
        assert_eq!(before_config.matches("REGION_INDEX,").count() as u32 + 1, CONFIG_REGION);
    }

    /// By its own number, which `_IO` makes of `;` and 100.
    #[test]
    fn requests_have_the_numbers_that_the_macro_makes() {
        assert_eq!((GET_API_VERSION, IOMMU_MAP_DMA), (0x3b64, 0x3b71));
    }

    #[test]
    fn addresses_are_given_out_once_and_only_where_they_are_translated() {
        // As an Intel IOMMU says it: all but where interrupts are.
        let mut space = Space::new(&[(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        let first = space.take(4096).unwrap();
        assert_eq!(first, SPACE_FROM);
        let second = space.take(SPACE_ALIGN + 1).unwrap();
        assert_eq!(second, SPACE_FROM + SPACE_ALIGN);
        assert_eq!(space.take(4096), Some(SPACE_FROM + 3 * SPACE_ALIGN));
        assert_eq!(space.take(SPACE_TO), None, "more than there is");
        assert!(space.take(1 << 30).is_some(), "less is still there");
        // Wider than the device's address lines.
        let mut space = Space::new(&[]);
        assert_eq!(space.take(SPACE_TO - SPACE_FROM), Some(SPACE_FROM));
        assert_eq!(space.take(1), None);
        assert_eq!(Space::new(&[(0, 1 << 20)]).take(4096), None);
        assert_eq!(Space::new(&[(0, u64::MAX)]).take(u64::MAX), None);
    }

    #[test]
    fn ranges_are_read_and_nonsense_is_not_followed() {
        let word = |info: &mut Vec<u8>, at: usize, value: u32| {
            info.resize(info.len().max(at + 4), 0);
            info[at..at + 4].copy_from_slice(&value.to_le_bytes());
        };
        let mut info = Vec::new();
        word(&mut info, 4, INFO_FLAG_CAPS);
        word(&mut info, 16, 32);
        // First another capability, then the one that is looked for.
        word(&mut info, 32, 3);
        word(&mut info, 36, 48);
        word(&mut info, 48, CAP_IOVA_RANGE.into());
        word(&mut info, 56, 2);
        for (n, value) in [(0, 0u32), (8, 0xfedf_ffff), (16, 0xfef0_0000), (24, u32::MAX)] {
            word(&mut info, 64 + n, value);
            word(&mut info, 68 + n, 0);
        }
        assert_eq!(iova_ranges(&info), [(0, 0xfedf_ffff), (0xfef0_0000, u32::MAX.into())]);
        word(&mut info, 56, u32::MAX);
        assert_eq!(iova_ranges(&info).len(), 2, "as many as there are");
        word(&mut info, 36, 32);
        assert!(iova_ranges(&info).is_empty(), "a loop");
        word(&mut info, 36, 1 << 20);
        assert!(iova_ranges(&info).is_empty(), "outside");
        word(&mut info, 4, 0);
        assert!(iova_ranges(&info).is_empty());
        assert!(iova_ranges(&[]).is_empty());
    }

    #[test]
    fn caches_are_passed_only_where_somebody_says_so() {
        assert_eq!(durability_of(Some("off")), Durability::OnCompletion);
        for unsure in [None, Some("on"), Some("Off"), Some("")] {
            assert_eq!(durability_of(unsure), Durability::WriteBack, "{unsure:?}");
        }
    }

    #[test]
    fn what_cannot_be_opened_is_told() {
        let root = std::env::temp_dir().join(format!("lodestone-vfio-open-{}", std::process::id()));
        let device = root.join("sys/bus/pci/devices/0000:00:04.0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::create_dir_all(root.join("dev/vfio")).unwrap();
        std::fs::write(device.join("vendor"), "0x8086\n").unwrap();
        std::fs::write(device.join("device"), "0x2021\n").unwrap();
        std::os::unix::fs::symlink("../drivers/vfio-pci", device.join("driver")).unwrap();
        std::os::unix::fs::symlink("../groups/7", device.join("iommu_group")).unwrap();
        for node in ["vfio", "7"] {
            std::fs::write(root.join("dev/vfio").join(node), "").unwrap();
        }
        // Files instead of devices: they know no ioctl.
        let said = Vfio::open(&root).err().unwrap().to_string();
        assert!(said.starts_with("/dev/vfio/vfio does not speak"), "{said}");
        std::fs::remove_dir_all(&root).unwrap();
        let said = Vfio::open(&root).err().unwrap().to_string();
        assert!(said.starts_with("no Intel I/OAT function"), "{said}");
    }
}
