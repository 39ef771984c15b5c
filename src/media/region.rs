//! One file or device of a pool: opened, locked against other users, measured, and mapped.
//!
//! What a path turns out to be decides everything else: how large it is, whether stores to it survive
//! power loss and by what, and whether the host may refuse a page later. Exclusive use is a lock on the
//! open file, not a mark on media, so that a killed process leaves nothing to clean up.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::copy::{Copier, ReadTable, Routines};
use super::domain::{self, Domain};
use super::holder;
use super::mapping::{self, HUGE_PAGE_BYTES, Mapping, Sharing};
use super::ofd;
use crate::error::{Error, Result};
use crate::quote::Shown;

/// What a region is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionKind {
    /// A regular file in the host's page cache.
    File,
    /// A regular file on a DAX mount: mapped with `MAP_SYNC`.
    DaxFile,
    /// A `/dev/daxX.Y` node.
    DeviceDax,
    /// A block device in the host's page cache.
    BlockDevice,
    /// Anonymous memory behind a descriptor.
    Memfd,
}

impl RegionKind {
    pub fn name(self) -> &'static str {
        match self {
            RegionKind::File => "file",
            RegionKind::DaxFile => "dax-file",
            RegionKind::DeviceDax => "device-dax",
            RegionKind::BlockDevice => "block-device",
            RegionKind::Memfd => "memfd",
        }
    }
}

/// What tells files apart, whatever their names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileIdentity {
    File { dev: u64, ino: u64 },
    BlockDevice { rdev: u64 },
    CharDevice { rdev: u64 },
}

impl FileIdentity {
    fn of(stat: &Stat) -> FileIdentity {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => FileIdentity::BlockDevice { rdev: stat.st_rdev },
            FileType::CharacterDevice => FileIdentity::CharDevice { rdev: stat.st_rdev },
            _ => FileIdentity::File { dev: stat.st_dev, ino: stat.st_ino },
        }
    }
}

/// A file or device opened and locked, not mapped yet.
#[derive(Debug)]
pub(super) struct OpenRegion {
    pub path: PathBuf,
    file: Locked,
    stat: Stat,
    kind: RegionKind,
    /// Bytes that the file or device has.
    pub bytes: u64,
    /// Alignment of address and length that the device, or hugetlbfs, asks of a mapping; elsewhere a huge page's.
    align: usize,
    read_only: bool,
    /// Where the first byte stands in the file or device.
    offset: u64,
}

/// Whether a file has holes that its disk has no room for: a store there fails, and the medium is not to blame.
pub fn is_out_of_room(file: impl AsFd) -> bool {
    /// What a file system keeps for itself, at most.
    const LEFT_BYTES_MAX: u64 = 1 << 20;
    let is_regular = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let has_holes = rustix::fs::fstat(&file)
        .is_ok_and(|stat| is_regular(&stat) && stat.st_blocks as u64 * 512 < stat.st_size as u64);
    let room = || rustix::fs::fstatvfs(&file).map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    has_holes && room().is_ok_and(|bytes| bytes < LEFT_BYTES_MAX)
}

/// A region in use.
#[derive(Debug)]
pub(super) struct Region {
    pub path: PathBuf,
    pub kind: RegionKind,
    pub bytes: u64,
    /// What the kernel says makes stores durable.
    pub detected: Domain,
    pub map: Mapping,
    /// Others have the rest of the file.
    pub is_part: bool,
    file: Locked,
    stat: Stat,
}

impl OpenRegion {
    /// Opens what is at `path` and locks it: shared for `read_only`, else exclusively.
    pub fn open(path: &Path, read_only: bool) -> Result<OpenRegion> {
        const SITE: &str = "media::region::open";
        // Judged before it is opened, because opening a fifo or a tape has effects.
        let before = rustix::fs::stat(path).map_err(|e| cannot("open", SITE, path, e))?;
        // Opening it for writing may succeed, and only writing fail.
        if !read_only && is_write_protected(&before) {
            let message = format!("{} is a device that is read-only", path.shown());
            return Err(Error::message(libc::EROFS, SITE, message));
        }
        let file = match kind_of(&before, path)? {
            _ if read_only => rustix::fs::open(path, OFlags::RDONLY | OPEN_FLAGS, Mode::empty()),
            RegionKind::BlockDevice => holder::behind_umount(&before, || open_device_alone(path)),
            _ => open_writable(path),
        };
        let file = file.map_err(|e| match e {
            Errno::BUSY => cannot("open", SITE, path, e).context("it is mounted, or somebody has it alone"),
            _ => cannot("open", SITE, path, e),
        });
        Self::from_file(file?, path, read_only)
    }

    /// What is at `path`; a file on a DAX mount is told from others only where it is open.
    pub fn kind_of(path: &Path) -> Result<RegionKind> {
        let stat = rustix::fs::stat(path).map_err(|e| cannot("open", "media::region::open", path, e))?;
        kind_of(&stat, path)
    }

    /// Creates a file, which is removed unless it is [kept](Region::keep); EEXIST where there is one.
    pub fn create(path: &Path) -> Result<OpenRegion> {
        Self::make(path, false)
    }

    fn make(path: &Path, shared: bool) -> Result<OpenRegion> {
        const SITE: &str = "media::region::create";
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| cannot("create", SITE, path, e))?;
        let made = Self::locked(file, path, false, |file, stat| Locked::new(file, stat, path, shared));
        let mut region = made.inspect_err(|e| {
            // Who has it locked uses it. Where nobody can lock it nobody does.
            if e.errno() != libc::EBUSY {
                let _ = fs::remove_file(path);
            }
        })?;
        region.file.undo = Undo::Remove(region.path.clone());
        Ok(region)
    }

    /// Anonymous memory of `bytes`.
    pub fn memfd(bytes: u64) -> Result<OpenRegion> {
        const SITE: &str = "media::region::memfd";
        let path = Path::new("memfd:lodestone");
        let file = rustix::fs::memfd_create("lodestone", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|e| cannot("create", SITE, path, e))?;
        rustix::fs::ftruncate(&file, bytes).map_err(|e| cannot("size", SITE, path, e))?;
        let mut region = Self::from_file(file, path, false)?;
        region.kind = RegionKind::Memfd;
        region.path = path.to_owned();
        Ok(region)
    }

    /// Opens a part of what is at `path`, whoever has the whole: the lock is that of the part, shared for `read_only`, else
    /// exclusive.
    ///
    /// EINVAL where it does not end within the file or device.
    pub fn open_part(path: &Path, part: Range<u64>, read_only: bool) -> Result<OpenRegion> {
        const SITE: &str = "media::region::open_part";
        Self::kind_of(path)?;
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let file = rustix::fs::open(path, access | OPEN_FLAGS, Mode::empty())
            .map_err(|e| cannot("open", SITE, path, e))?;
        let lock = |file, _: &Stat| Locked::part(file, path, &part, read_only);
        let mut region = Self::locked(file, path, read_only, lock)?;
        if part.is_empty() || part.end > region.bytes {
            let message = format!(
                "{} has {} bytes, and no part from {} to {}",
                path.shown(),
                region.bytes,
                part.start,
                part.end
            );
            return Err(Error::message(libc::EINVAL, SITE, message));
        }
        (region.offset, region.bytes) = (part.start, part.end - part.start);
        Ok(region)
    }

    fn from_file(file: OwnedFd, path: &Path, read_only: bool) -> Result<OpenRegion> {
        Self::locked(file, path, read_only, |file, stat| Locked::new(file, stat, path, read_only))
    }

    fn locked(
        file: OwnedFd,
        path: &Path,
        read_only: bool,
        lock: impl FnOnce(OwnedFd, &Stat) -> Result<Locked>,
    ) -> Result<OpenRegion> {
        const SITE: &str = "media::region::open";
        let failed = |e| cannot("examine", SITE, path, e);
        let before = rustix::fs::fstat(&file).map_err(failed)?;
        let kind = kind_of(&before, path)?;
        let file = lock(file, &before)?;
        // Who had it locked until now may have made it longer.
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        // A link to a device (/dev/disk/by-id) leads there whatever number the kernel gives it next time.
        let absolute = match kind {
            RegionKind::DeviceDax | RegionKind::BlockDevice => std::path::absolute(path),
            _ => fs::canonicalize(path),
        };
        let path = absolute.unwrap_or_else(|_| path.to_owned());
        let (bytes, align) = match kind {
            RegionKind::DeviceDax => device_dax_size(&stat, &path)?,
            RegionKind::BlockDevice => {
                let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
                (end.map_err(|e| cannot("measure", SITE, &path, e))?, HUGE_PAGE_BYTES)
            }
            _ if is_hugetlbfs(&file) => (stat.st_size as u64, HUGE_PAGE_BYTES.max(stat.st_blksize as usize)),
            _ => (stat.st_size as u64, HUGE_PAGE_BYTES),
        };
        let is_dax = kind == RegionKind::File && mapping::is_dax(file.as_fd());
        let kind = if is_dax { RegionKind::DaxFile } else { kind };
        Ok(OpenRegion { path, file, stat, kind, bytes, align, read_only, offset: 0 })
    }

    /// Opens what is at `path` and says of a part of it that somebody uses it: see [`Region::is_used`].
    pub fn use_part(path: &Path, part: Range<u64>) -> Result<OwnedFd> {
        const SITE: &str = "media::region::use_part";
        Self::kind_of(path)?;
        let failed = |e| cannot("lock", SITE, path, e);
        let file = open_writable(path).map_err(failed)?;
        lock_part(&file, libc::F_RDLCK, &use_of(&part)).map_err(failed)?;
        Ok(file)
    }

    /// Whether somebody uses any of a part of what is at `path`: false, too, where the kernel has no such locks.
    pub fn is_part_used(path: &Path, part: Range<u64>) -> Result<bool> {
        const SITE: &str = "media::region::is_part_used";
        Self::kind_of(path)?;
        let file = rustix::fs::open(path, OFlags::RDONLY | OPEN_FLAGS, Mode::empty())
            .map_err(|e| cannot("open", SITE, path, e))?;
        let uses = use_of(&part);
        let found = ofd::conflict(file.as_raw_fd(), uses.start as i64, (uses.end - uses.start) as i64);
        Ok(matches!(found, Some(Some(_))))
    }

    /// As [`Region::is_used`], of all of it.
    pub fn is_used(&self) -> bool {
        self.file.is_used(&(0..self.bytes.max(1)))
    }

    /// The open file, which stays, and keeps its lock until it and all that is mapped of it are gone.
    pub fn into_file(self) -> OwnedFd {
        self.file.into_file()
    }

    /// Equal for two names of one file or device.
    pub fn identity(&self) -> FileIdentity {
        FileIdentity::of(&self.stat)
    }

    /// The same of a path that is not open.
    pub fn identity_of(path: &Path) -> Option<FileIdentity> {
        Some(FileIdentity::of(&rustix::fs::stat(path).ok()?))
    }

    /// Makes a regular file `bytes` long and takes its blocks from the host now, so that no store can
    /// find the host full later. A file that is longer stays; one that is not is cut back again unless it is
    /// [kept](Region::keep). A device only has to be large enough.
    pub fn reserve(&mut self, bytes: u64) -> Result<()> {
        const SITE: &str = "media::region::reserve";
        if matches!(self.kind, RegionKind::DeviceDax | RegionKind::BlockDevice) {
            if self.bytes >= bytes {
                return Ok(());
            }
            return Err(Error::message(
                libc::ENOSPC,
                SITE,
                format!(
                    "{} has {} bytes, {bytes} were asked for: give a smaller size",
                    self.path.shown(),
                    self.bytes
                ),
            ));
        }
        // With its length of now: whoever asks for no lock may write to it.
        self.stat = rustix::fs::fstat(&self.file).map_err(|e| cannot("examine", SITE, &self.path, e))?;
        self.bytes = self.stat.st_size as u64;
        // To take what there is until no more comes would fill the host's disk for that long.
        let held = self.stat.st_blocks as u64 * 512;
        let has_room = |space: rustix::fs::StatVfs| {
            space.f_blocks == 0 || bytes.saturating_sub(held) <= space.f_bfree.saturating_mul(space.f_frsize)
        };
        if !rustix::fs::fstatvfs(&self.file).is_ok_and(has_room) {
            return Err(self.host_full(bytes));
        }
        if matches!(self.file.undo, Undo::Nothing) && self.bytes < bytes {
            let from = self.mapped_bytes(bytes).map_or(bytes, |whole| whole as u64);
            self.file.undo = Undo::CutBack { from, to: self.bytes };
        }
        self.take_huge_pages(bytes);
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            // The host cannot reserve (an old network file system): as long as it should be, at least.
            Err(Errno::OPNOTSUPP) if self.bytes >= bytes => {}
            Err(Errno::OPNOTSUPP) => {
                rustix::fs::ftruncate(&self.file, bytes).map_err(|e| cannot("extend", SITE, &self.path, e))?
            }
            Err(Errno::NOSPC) => return Err(self.host_full(bytes)),
            Err(e) => return Err(cannot("reserve space for", SITE, &self.path, e)),
        }
        self.bytes = self.bytes.max(bytes);
        Ok(())
    }

    /// A tmpfs with `huge=advise` reserves small pages, and gives huge ones to a mapping alone: so it is asked through one
    /// first. Whatever it does not give, the reservation that follows takes, or says why not.
    fn take_huge_pages(&self, bytes: u64) {
        let has_all = self.bytes >= bytes && self.stat.st_blocks as u64 * 512 >= bytes;
        if self.offset != 0 || has_all || !has_huge_pages(&self.stat) {
            return;
        }
        let grows = self.bytes < bytes;
        if grows && rustix::fs::ftruncate(&self.file, bytes).is_err() {
            return;
        }
        let taken = self.map_prefix(bytes).is_ok_and(|map| map.prefault(Sharing::Shared).is_ok());
        if grows && !taken {
            // A full host: as long as it was, and small pages are tried.
            let _ = rustix::fs::ftruncate(&self.file, self.bytes);
        }
    }

    fn host_full(&self, bytes: u64) -> Error {
        let free = rustix::fs::fstatvfs(&self.file).map_or(0, |s| s.f_bavail * s.f_frsize);
        Error::message(
            libc::ENOSPC,
            "media::region::reserve",
            format!(
                "the host file system of {} has no room for {bytes} bytes ({free} are free): \
                 give a smaller size, or make room there",
                self.path.shown()
            ),
        )
    }

    /// Maps the first `bytes`, with every page present where `prefault` asks for it.
    pub fn map(self, bytes: u64, prefault: bool) -> Result<Region> {
        let map = self.map_prefix(bytes)?;
        self.mapped(map, bytes, prefault)
    }

    /// As [`map`](OpenRegion::map), at the first of these addresses where nothing is mapped. EADDRINUSE where all are
    /// taken.
    pub fn map_at(self, bytes: u64, prefault: bool, places: &[u64]) -> Result<Region> {
        let map = self.map_prefix_at(bytes, places)?;
        self.mapped(map, bytes, prefault)
    }

    fn mapped(self, map: Mapping, bytes: u64, prefault: bool) -> Result<Region> {
        if prefault {
            self.prefault(&map)?;
        }
        let detected = self.detect();
        let OpenRegion { path, file, stat, kind, .. } = self;
        let is_part = file.part.is_some();
        Ok(Region { path, kind, bytes, detected, map, is_part, file, stat })
    }

    fn prefault(&self, map: &Mapping) -> Result<()> {
        match map.prefault(self.sharing()?) {
            // A kernel before 5.14 has no such call; pages then come at first use.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(e) => Err(cannot("take all pages of", "media::region::prefault", &self.path, e)
                .context("the host is full or the media is bad")),
        }
    }

    fn detect(&self) -> Domain {
        match self.kind {
            RegionKind::Memfd => Domain::Volatile,
            RegionKind::DaxFile => domain::of_device(&domain::sysfs_dir("block", self.stat.st_dev)),
            RegionKind::DeviceDax => domain::of_device(&domain::sysfs_dir("char", self.stat.st_rdev)),
            RegionKind::BlockDevice => Domain::PageCache,
            RegionKind::File if is_memory_fs(&self.file) => Domain::Volatile,
            RegionKind::File => Domain::PageCache,
        }
    }

    /// How this region is mapped. EOPNOTSUPP for a private copy of a device-dax node: the kernel has
    /// none.
    pub fn sharing(&self) -> Result<Sharing> {
        match self.kind {
            RegionKind::DeviceDax if self.read_only => Err(Error::message(
                libc::EOPNOTSUPP,
                "media::region::map",
                format!(
                    "{} is a device-dax node, of which the kernel maps no private copy: it cannot be \
                     opened read-only; copy it to a file first",
                    self.path.shown()
                ),
            )),
            _ if self.read_only => Ok(Sharing::Private),
            RegionKind::DaxFile => Ok(Sharing::SharedSync),
            _ => Ok(Sharing::Shared),
        }
    }

    /// A mapping of the first `bytes`.
    pub fn map_prefix(&self, bytes: u64) -> Result<Mapping> {
        let failed = |e: Errno| {
            let remedy = match e {
                Errno::MFILE => "this process has too many regions open",
                Errno::NOMEM => "it does not fit the address space (see ulimit -v)",
                Errno::PERM => "it is read-only: a seal says so",
                _ => "the kernel refused",
            };
            cannot("map", "media::region::map", &self.path, e).context(format!("{bytes} bytes, {remedy}"))
        };
        let length = self.mapped_bytes(bytes).ok_or_else(|| failed(Errno::NOMEM))?;
        Mapping::new(self.file.as_fd(), self.offset, length, self.align, self.sharing()?).map_err(failed)
    }

    /// Devices ask for whole huge pages, and hugetlbfs maps no less, over whatever is behind; another file may end anywhere.
    fn mapped_bytes(&self, bytes: u64) -> Option<usize> {
        let length = usize::try_from(bytes).ok()?;
        let is_whole = self.kind == RegionKind::DeviceDax || is_hugetlbfs(&self.file);
        if is_whole { length.checked_next_multiple_of(self.align) } else { Some(length) }
    }

    fn map_prefix_at(&self, bytes: u64, places: &[u64]) -> Result<Mapping> {
        const SITE: &str = "media::region::map_at";
        let length = self.mapped_bytes(bytes).unwrap_or(usize::MAX);
        let sharing = self.sharing()?;
        let mut refused = Errno::EXIST;
        for &place in places {
            let Ok(address) = usize::try_from(place) else { continue };
            match Mapping::at(self.file.as_fd(), length, address, sharing) {
                Ok(map) => return Ok(map),
                Err(e) => refused = e,
            }
        }
        let first = places.first().copied().unwrap_or(0);
        let range = format!("{bytes} bytes at {first:#x}");
        if refused != Errno::EXIST {
            return Err(cannot("map", SITE, &self.path, refused).context(range));
        }
        let message = format!(
            "{} cannot be mapped in its place, {range}: something else is mapped there in this process; open it \
             earlier, or in another process",
            self.path.shown()
        );
        Err(Error::message(libc::EADDRINUSE, SITE, message))
    }

    /// Where the first byte stands that is not zero, as far as is looked: 256 MiB, holes not counted; of device-dax, which has
    /// none, where labels of file systems, arrays and partitions stand.
    pub fn first_data(&self) -> Result<Option<u64>> {
        const SITE: &str = "media::region::first_data";
        const LOOKED_INTO_MAX: u64 = 256 << 20;
        const LOOK_BYTES: usize = 1 << 20;
        let first = |bytes: &[u8]| bytes.iter().position(|byte| *byte != 0);
        if self.kind == RegionKind::DeviceDax {
            return Ok(first(&super::open::read_beginning(self)?).map(|at| at as u64));
        }
        let mut buffer = vec![0; LOOK_BYTES];
        let (mut at, mut looked) = (0, 0);
        while looked < LOOKED_INTO_MAX {
            at = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(None),
                Err(Errno::INVAL) => at, // cannot tell holes from data: all is data
                Err(e) => return Err(cannot("examine", SITE, &self.path, e)),
            };
            let n = match rustix::io::pread(&self.file, &mut buffer, at) {
                Ok(0) => return Ok(None),
                Ok(n) => n,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(cannot("read", SITE, &self.path, e)),
            };
            if let Some(inside) = first(&buffer[..n]) {
                return Ok(Some(at + inside as u64));
            }
            at += n as u64;
            looked += n as u64;
        }
        Ok(None)
    }

    /// Reads the first bytes; what lies behind the end is as it was. Without a mapping where that can be: no handler of signals
    /// is put in place for it, and the kernel takes no page of persistent memory for one that somebody may have stored to.
    pub fn read_head(&self, to: &mut [u8]) -> Result<()> {
        const SITE: &str = "media::region::read_head";
        let have = self.bytes.min(to.len() as u64) as usize;
        let to = &mut to[..have];
        let bad = || {
            let path = self.path.shown();
            let message = format!("the first {have} bytes of {path} cannot be read: the media is bad there");
            Error::message(libc::EIO, SITE, message)
        };
        if self.kind == RegionKind::DeviceDax {
            let copier = Copier::new(Routines::default_choice(), Domain::Volatile, ReadTable::default());
            let map = self.map_prefix(have as u64)?;
            // SAFETY: the mapping covers as many bytes as `to`, which the device has.
            return unsafe { copier.read(to, map.base()) }.map_err(|_| bad());
        }
        let mut read = 0;
        while read < have {
            match rustix::io::pread(&self.file, &mut to[read..], self.offset + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(Errno::INTR) => {}
                Err(Errno::IO) => return Err(bad()),
                Err(e) => return Err(cannot("read", SITE, &self.path, e)),
            }
        }
        Ok(())
    }
}

/// What tracts need of it.
#[cfg(feature = "memory-type")]
impl OpenRegion {
    /// As [`open`](OpenRegion::open) for writing beside others that do so, who divide it among themselves: the lock is
    /// shared, and keeps off only those who want it alone.
    pub fn open_beside(path: &Path) -> Result<OpenRegion> {
        const SITE: &str = "media::region::open";
        let before = rustix::fs::stat(path).map_err(|e| cannot("open", SITE, path, e))?;
        kind_of(&before, path)?;
        let file = open_writable(path).map_err(|e| cannot("open", SITE, path, e))?;
        Self::locked(file, path, false, |file, stat| Locked::new(file, stat, path, true))
    }

    /// As [`create`](OpenRegion::create), for several who divide it among themselves: none of them removes it while others
    /// have it.
    pub fn create_beside(path: &Path) -> Result<OpenRegion> {
        Self::make(path, true)
    }

    /// Runs `run` while nobody else runs something so with this file or device, and with its size of now. EBUSY where that
    /// lasts too long, and for a block device that somebody else has to himself: a mounted file system, an array, swap.
    pub fn by_turns<R>(&mut self, run: impl FnOnce(&mut OpenRegion) -> Result<R>) -> Result<R> {
        const SITE: &str = "media::region::by_turns";
        let path = self.path.clone();
        let busy = |what| Error::message(libc::EBUSY, SITE, format!("{} {what}", path.shown()));
        let begun = Instant::now();
        loop {
            match lock_part(&self.file.file, libc::F_WRLCK, &TURN) {
                Ok(()) => break,
                Err(Errno::AGAIN | Errno::ACCESS) if begun.elapsed() < TURN_WAIT_MAX => {
                    std::thread::sleep(READERS_PAUSE)
                }
                Err(Errno::AGAIN | Errno::ACCESS) => {
                    return Err(busy("is just being made by another process: try again"));
                }
                Err(e) => return Err(cannot("lock", SITE, &self.path, e)),
            }
        }
        let done = match self.kind {
            RegionKind::BlockDevice => {
                // As others hold it who have it to themselves, until this is done.
                let flags = OFlags::RDONLY | OFlags::EXCL | OPEN_FLAGS;
                match rustix::fs::open(&path, flags, Mode::empty()) {
                    Ok(_held) => run(self),
                    Err(Errno::BUSY) => Err(busy("is in use: it is mounted, or part of another device")),
                    Err(e) => Err(cannot("open", SITE, &path, e)),
                }
            }
            RegionKind::DeviceDax => run(self),
            _ => match rustix::fs::fstat(&self.file) {
                Ok(stat) => {
                    self.bytes = stat.st_size as u64;
                    run(self)
                }
                Err(e) => Err(cannot("examine", SITE, &path, e)),
            },
        };
        // A child that was forked meanwhile has the file too, so that to close it would not do. It cannot fail.
        let _ = lock_part(&self.file.file, libc::F_UNLCK, &TURN);
        done
    }

    /// Whether nobody has put anything there: a file of holes alone, a device whose begin is zeros, as far as labels of
    /// file systems, arrays and partitions stand.
    pub fn is_unused(&self) -> Result<bool> {
        const SITE: &str = "media::region::is_unused";
        if matches!(self.kind, RegionKind::DeviceDax | RegionKind::BlockDevice) {
            let mut head = vec![0; DEVICE_HEAD_BYTES];
            self.read_head(&mut head)?;
            return Ok(head.iter().all(|byte| *byte == 0));
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(0)) {
            Err(Errno::NXIO) => Ok(true),
            Ok(_) | Err(Errno::INVAL) => Ok(self.bytes == 0),
            Err(e) => Err(cannot("examine", SITE, &self.path, e)),
        }
    }

    /// Writes the first bytes, without a mapping where that can be.
    pub fn write_head(&self, from: &[u8]) -> Result<()> {
        const SITE: &str = "media::region::write_head";
        if self.kind == RegionKind::DeviceDax || self.is_hugetlbfs() {
            let copier = Copier::new(Routines::default_choice(), Domain::Volatile, ReadTable::default());
            let map = self.map_prefix(self.align as u64)?;
            // SAFETY: the mapping covers a page of the device, which is longer than what is written.
            return unsafe { copier.copy_cached(map.base(), from) }.map(drop).map_err(|_| {
                let message = format!("{} has no room for its label, or is bad there", self.path.shown());
                Error::message(libc::EIO, SITE, message)
            });
        }
        let mut done = 0;
        while done < from.len() {
            match rustix::io::pwrite(&self.file, &from[done..], done as u64) {
                Ok(more) => done += more,
                Err(Errno::INTR) => {}
                Err(e) => return Err(cannot("write the label of", SITE, &self.path, e)),
            }
        }
        Ok(())
    }

    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// What of it is mapped at a time, in bytes: a huge page, or what the device or hugetlbfs asks for.
    pub fn unit_bytes(&self) -> usize {
        self.align
    }

    /// Its pages are huge ones that the kernel set aside.
    pub fn is_hugetlbfs(&self) -> bool {
        is_hugetlbfs(&self.file)
    }

    /// Makes a regular file `bytes` long at least and takes nothing from the host; of anything else only says that it is too
    /// short. By turns: two who do so at once would shorten it.
    pub fn extend(&mut self, bytes: u64) -> Result<()> {
        const SITE: &str = "media::region::extend";
        if self.bytes >= bytes {
            return Ok(());
        }
        if matches!(self.kind, RegionKind::DeviceDax | RegionKind::BlockDevice) {
            return self.reserve(bytes);
        }
        rustix::fs::ftruncate(&self.file, bytes).map_err(|e| cannot("extend", SITE, &self.path, e))?;
        self.bytes = bytes;
        Ok(())
    }
}

/// Behind all data, and before what `wsp::memory` locks there: whoever has it makes something of the file.
#[cfg(feature = "memory-type")]
const TURN: Range<u64> = (1 << 62) - 1..1 << 62;
#[cfg(feature = "memory-type")]
const TURN_WAIT_MAX: Duration = Duration::from_secs(10);
/// How far from its begin a device says what it is of: file systems do so within 68 KiB, arrays within 8, partitions within 34.
#[cfg(feature = "memory-type")]
const DEVICE_HEAD_BYTES: usize = 128 << 10;

/// Who uses a part of a file locks as many bytes, so far behind: beside those who open the part for a moment.
fn use_of(part: &Range<u64>) -> Range<u64> {
    const USES_OFFSET: u64 = 1 << 61;
    USES_OFFSET + part.start..USES_OFFSET + part.end
}

fn lock_part(file: &OwnedFd, kind: i32, part: &Range<u64>) -> rustix::io::Result<()> {
    ofd::set(file.as_raw_fd(), kind, part.start as i64, (part.end - part.start) as i64)
}

impl Region {
    /// What was done to the file is right.
    pub fn keep(&mut self) {
        self.file.undo = Undo::Nothing;
    }

    /// Makes stores durable where the page cache stands between. A signal, which some file systems end a sync for, is no
    /// failure of the media.
    pub fn sync(&self) -> std::io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.file))?)
    }

    /// See [`Media::drop_cached`](super::Media::drop_cached). Pages that are mapped stay, so they are unmapped first; the next
    /// access maps them again.
    pub fn drop_cached(&self) {
        let _ = self.map.unmap_pages();
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Makes the file itself (a new one also its name) survive power loss.
    pub fn settle(&self) -> Result<()> {
        const SITE: &str = "media::region::settle";
        if !matches!(self.kind, RegionKind::File | RegionKind::DaxFile | RegionKind::BlockDevice) {
            return Ok(());
        }
        rustix::fs::fsync(&self.file).map_err(|e| cannot("sync", SITE, &self.path, e))?;
        if let Some(dir) = self.path.parent().filter(|_| self.kind != RegionKind::BlockDevice)
            && let Ok(dir) = fs::File::open(dir)
        {
            match dir.sync_all() {
                // That of a memfd, in /proc, is none of a disk.
                Err(e) if e.raw_os_error() != Some(libc::EINVAL) => {
                    return Err(Error::io(e, SITE, "cannot sync the directory of", &self.path));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// See [`is_out_of_room`].
    pub fn is_out_of_room(&self) -> bool {
        is_out_of_room(&self.file.file)
    }

    /// The first bytes of a part that are no hole of a file, as far as they lie in one piece. Where holes are not told, all of it.
    pub fn stored(&self, part: Range<u64>) -> Option<Range<u64>> {
        use rustix::fs::{SeekFrom, seek};
        let tells = match self.kind {
            // Of others what was stored through a mapping may be a hole until it is written back.
            RegionKind::File | RegionKind::DaxFile => TELL_HOLES.contains(&self.host_fs()),
            RegionKind::Memfd => true,
            RegionKind::DeviceDax | RegionKind::BlockDevice => false,
        };
        if !tells {
            return Some(part);
        }
        match seek(&self.file.file, SeekFrom::Data(part.start)) {
            Ok(start) if start >= part.end => None,
            Ok(start) => {
                let end = seek(&self.file.file, SeekFrom::Hole(start)).unwrap_or(part.end);
                Some(start..end.min(part.end))
            }
            Err(Errno::NXIO) => None,
            Err(_) => Some(part),
        }
    }

    /// Whether somebody [uses](OpenRegion::use_part) a part of it: an emulator whose guest has its memory there.
    pub fn is_used(&self, part: Range<u64>) -> bool {
        self.file.is_used(&part)
    }

    pub fn identity(&self) -> FileIdentity {
        FileIdentity::of(&self.stat)
    }

    /// The device number of the file system or, for a device, of itself, and its class in sysfs.
    pub fn device(&self) -> (&'static str, u64) {
        match self.kind {
            RegionKind::DeviceDax => ("char", self.stat.st_rdev),
            RegionKind::BlockDevice => ("block", self.stat.st_rdev),
            _ => ("block", self.stat.st_dev),
        }
    }

    /// The type of the host's file system.
    pub fn host_fs(&self) -> &'static str {
        match self.kind {
            RegionKind::DeviceDax | RegionKind::BlockDevice => "none",
            _ => rustix::fs::fstatfs(&self.file).map_or("unknown", |s| fs_name(s.f_type as u32)),
        }
    }
}

/// Nothing is done to a terminal, and nobody is waited for.
const OPEN_FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

fn open_writable(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDWR | OPEN_FLAGS, Mode::empty())
}

/// A block device that is mounted, or part of a volume, is refused, and stays ours while it is open: who uses it so asks
/// for no lock. A child that another thread forked has it too until it executes something, and is waited for.
fn open_device_alone(path: &Path) -> rustix::io::Result<OwnedFd> {
    let begun = Instant::now();
    loop {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::EXCL | OPEN_FLAGS, Mode::empty());
        if !matches!(file, Err(Errno::BUSY)) || begun.elapsed() >= READERS_WAIT_MAX {
            return file;
        }
        std::thread::sleep(READERS_PAUSE);
    }
}

/// Whether a block device may not be written, by whomever.
fn is_write_protected(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice
        && domain::attribute(&domain::sysfs_dir("block", stat.st_rdev), "ro").is_some_and(|ro| ro == "1")
}

/// A failed system call on a region, as people see it.
fn cannot(what: &str, site: &'static str, path: &Path, e: Errno) -> Error {
    Error::io(e.into(), site, &format!("cannot {what}"), path)
}

fn kind_of(stat: &Stat, path: &Path) -> Result<RegionKind> {
    let wrong = |errno, what: &str| {
        let message =
            format!("{} is {what}: a pool is a file, a block device or a device-dax node", path.shown());
        Err(Error::message(errno, "media::region::open", message))
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(RegionKind::File),
        FileType::BlockDevice => Ok(RegionKind::BlockDevice),
        FileType::CharacterDevice => {
            let subsystem = fs::read_link(domain::sysfs_dir("char", stat.st_rdev).join("subsystem"));
            match subsystem {
                Ok(link) if link.ends_with("dax") => Ok(RegionKind::DeviceDax),
                _ => wrong(libc::ENODEV, "a character device that is not device-dax"),
            }
        }
        FileType::Directory => wrong(libc::EISDIR, "a directory"),
        _ => wrong(libc::EINVAL, "neither file nor device"),
    }
}

/// The alignment that a device-dax node asks of every mapping, in bytes; none of a path that is anything else.
pub fn device_align(path: &Path) -> Result<Option<u64>> {
    match OpenRegion::kind_of(path)? {
        RegionKind::DeviceDax => {
            let stat = rustix::fs::stat(path)
                .map_err(|e| Error::io(e.into(), "media::region::device_align", "cannot examine", path))?;
            device_dax_size(&stat, path).map(|(_, align)| Some(align as u64))
        }
        _ => Ok(None),
    }
}

/// Size and alignment of a device-dax node, from sysfs.
fn device_dax_size(stat: &Stat, path: &Path) -> Result<(u64, usize)> {
    let dir = domain::sysfs_dir("char", stat.st_rdev);
    let number = |name| domain::attribute(&dir, name).and_then(|s| s.parse::<u64>().ok());
    let bytes = number("size").ok_or_else(|| {
        let message = format!("the kernel does not tell the size of {} ({})", path.shown(), dir.shown());
        Error::message(libc::ENODEV, "media::region::open", message)
    })?;
    let align = number("align").filter(|a| a.is_power_of_two()).unwrap_or(0) as usize;
    Ok((bytes, align.max(HUGE_PAGE_BYTES)))
}

/// Those who only read a pool are waited for so long, and looked for so often.
const READERS_WAIT_MAX: Duration = Duration::from_secs(1);
const READERS_PAUSE: Duration = Duration::from_millis(10);

/// A file with a lock on it, which ends with this. Closing alone would not do: a child that another thread forks
/// has the file open too until it executes something, and with it the lock.
#[derive(Debug)]
struct Locked {
    file: OwnedFd,
    /// A child that drops what it inherited does not end its parent's lock.
    process: u32,
    /// Nothing but this is locked.
    part: Option<Range<u64>>,
    undo: Undo,
}

/// What was done to a file that does not stay unless it is [kept](Region::keep).
#[derive(Default, Debug)]
enum Undo {
    #[default]
    Nothing,
    /// It was made, with this name.
    Remove(PathBuf),
    /// It was made longer, in bytes.
    CutBack { from: u64, to: u64 },
}

impl Locked {
    fn new(file: OwnedFd, stat: &Stat, path: &Path, shared: bool) -> Result<Locked> {
        let locked = holder::behind_umount(stat, || match shared {
            true => rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared),
            false => lock_alone(&file),
        });
        match locked {
            Ok(()) => Ok(Locked { file, process: std::process::id(), part: None, undo: Undo::Nothing }),
            Err(Errno::WOULDBLOCK) => Err(Error::message(
                libc::EBUSY,
                "media::region::lock",
                format!(
                    "{} is in use by {}: unmount it there or end that process, then try again",
                    path.shown(),
                    holder::in_words(stat)
                ),
            )),
            Err(e) => Err(cannot("lock", "media::region::lock", path, e)),
        }
    }

    /// Whether somebody uses a part of the file past this program.
    fn is_used(&self, part: &Range<u64>) -> bool {
        let uses = use_of(part);
        let found = ofd::conflict(self.file.as_raw_fd(), uses.start as i64, (uses.end - uses.start) as i64);
        // Where the kernel does not say, nothing is given away.
        found != Some(None)
    }

    fn part(file: OwnedFd, path: &Path, part: &Range<u64>, shared: bool) -> Result<Locked> {
        let begun = Instant::now();
        loop {
            match lock_part(&file, if shared { libc::F_RDLCK } else { libc::F_WRLCK }, part) {
                Ok(()) => {
                    let part = Some(part.clone());
                    return Ok(Locked { file, process: std::process::id(), part, undo: Undo::Nothing });
                }
                // Who only reads is gone soon.
                Err(Errno::AGAIN | Errno::ACCESS) if begun.elapsed() < READERS_WAIT_MAX => {
                    std::thread::sleep(READERS_PAUSE)
                }
                Err(Errno::AGAIN | Errno::ACCESS) => {
                    let (path, Range { start, end }) = (path.shown(), part);
                    let message = format!(
                        "{path} is in use from {start} to {end}: end whoever uses it, then try again"
                    );
                    return Err(Error::message(libc::EBUSY, "media::region::lock", message));
                }
                Err(e) => return Err(cannot("lock", "media::region::lock", path, e)),
            }
        }
    }
}

impl Locked {
    /// Nothing that was done to the file stays, but for what others did. Through the file itself, for its name may be
    /// another's by now. Best effort: the error that led here is what the user needs to see.
    fn undo(&mut self) {
        let undo = std::mem::take(&mut self.undo);
        // Whose lock is shared is not alone, perhaps.
        if matches!(undo, Undo::Nothing)
            || rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            return;
        }
        let Ok(stat) = rustix::fs::fstat(&self.file) else { return };
        match undo {
            Undo::Remove(path) => {
                // A child that another thread forks has it open until it executes its program: what the file takes of the
                // host is given back before.
                let _ = rustix::fs::ftruncate(&self.file, 0);
                if OpenRegion::identity_of(&path) == Some(FileIdentity::of(&stat)) {
                    let _ = fs::remove_file(path);
                }
            }
            // Unless somebody has written on behind it.
            Undo::CutBack { from, to } if (to..=from).contains(&(stat.st_size as u64)) => {
                let _ = rustix::fs::ftruncate(&self.file, to);
            }
            Undo::CutBack { .. } | Undo::Nothing => {}
        }
    }

    /// The file without an end of its lock.
    fn into_file(mut self) -> OwnedFd {
        self.undo = Undo::Nothing;
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so that there is one owner; its other fields own nothing.
        unsafe { std::ptr::read(&raw const this.file) }
    }
}

/// Waits a moment for those who only read, such as `lode info`: they are gone soon. Not for who writes.
fn lock_alone(file: &OwnedFd) -> std::result::Result<(), Errno> {
    let begun = Instant::now();
    loop {
        let locked = rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
        if locked != Err(Errno::WOULDBLOCK) || begun.elapsed() >= READERS_WAIT_MAX {
            return locked;
        }
        // A lock that can be shared is one of readers.
        rustix::fs::flock(file, FlockOperation::NonBlockingLockShared)?;
        rustix::fs::flock(file, FlockOperation::Unlock)?;
        std::thread::sleep(READERS_PAUSE);
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // While nobody else has the file.
            self.undo();
            // It cannot fail: the file is open.
            let _ = match &self.part {
                None => rustix::fs::flock(&self.file, FlockOperation::Unlock),
                Some(part) => lock_part(&self.file, libc::F_UNLCK, part),
            };
        }
    }
}

impl AsFd for Locked {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// File systems that say of a page that was stored to through a mapping at once that it is no hole.
const TELL_HOLES: [&str; 6] = ["tmpfs", "ext4", "xfs", "btrfs", "f2fs", "overlayfs"];
const TMPFS_MAGIC: u32 = 0x0102_1994;
const RAMFS_MAGIC: u32 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

fn is_hugetlbfs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| s.f_type as u32 == HUGETLBFS_MAGIC)
}

fn is_memory_fs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|s| [TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC].contains(&(s.f_type as u32)))
}

/// Whether a file lies on a tmpfs that was mounted with huge pages.
fn has_huge_pages(stat: &Stat) -> bool {
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    has_huge_pages_by(&String::from_utf8_lossy(&mounts), stat.st_dev)
}

/// As a table of mounts says (proc_pid_mountinfo(5)) for the file system of this number.
fn has_huge_pages_by(mounts: &str, device: u64) -> bool {
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mounts.lines().filter(|line| line.split(' ').nth(2) == Some(&device)).any(|line| {
        let of_the_file_system = line.rsplit(' ').next().unwrap_or_default();
        of_the_file_system.split(',').any(|option| option.starts_with("huge=") && option != "huge=never")
    })
}

/// The name of a file system from its `statfs` type (linux/magic.h).
fn fs_name(magic: u32) -> &'static str {
    match magic {
        TMPFS_MAGIC => "tmpfs",
        RAMFS_MAGIC => "ramfs",
        HUGETLBFS_MAGIC => "hugetlbfs",
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0xf2f5_2010 => "f2fs",
        0x2fc1_2fc1 => "zfs",
        0x794c_7630 => "overlayfs",
        0x6969 => "nfs",
        0xff53_4d42 => "cifs",
        0x6573_5546 => "fuse",
        0x0102_1997 => "9p",
        0x4d44 => "vfat",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_says_whether_it_has_huge_pages() {
        let mounts = "25 24 0:23 / /dev/shm rw,relatime shared:1 - tmpfs tmpfs rw,size=24684084k\n\
                      43 27 0:39 / /mnt/huge=always rw,relatime - tmpfs t rw,size=2097152k,huge=advise\n\
                      44 27 0:40 / /mnt/none rw,huge=advise - tmpfs t rw,huge=never\nnonsense\n";
        let has = [23, 39, 40, 41].map(|minor| has_huge_pages_by(mounts, rustix::fs::makedev(0, minor)));
        assert_eq!(has, [false, true, false, false]);
    }

    #[cfg(feature = "memory-type")]
    #[test]
    fn what_was_made_for_several_is_removed_by_the_last_that_fails() {
        let path = std::env::temp_dir().join(format!("lodestone-beside-{}", std::process::id()));
        for others in [false, true] {
            let _ = fs::remove_file(&path);
            let made = OpenRegion::create_beside(&path).unwrap();
            fs::write(&path, b"of another").unwrap();
            let other = others.then(|| OpenRegion::open_beside(&path).unwrap());
            drop(made);
            assert_eq!(fs::read(&path).ok(), others.then(|| b"of another".to_vec()));
            drop(other);
            assert_eq!(path.exists(), others, "who only opened it leaves it");
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn only_a_dax_node_asks_for_an_alignment() {
        let program = std::env::current_exe().unwrap();
        assert_eq!(device_align(&program).unwrap(), None);
        assert_eq!(device_align(Path::new("/dev/null")).unwrap_err().errno(), libc::ENODEV);
        assert_eq!(device_align(&program.join("none")).unwrap_err().errno(), libc::ENOTDIR);
    }
}
