//! What callers of the file system see: attributes, credentials, directory entries.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An inode number. The root directory is 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u32);

impl Ino {
    pub const ROOT: Ino = Ino(1);
}

/// Seconds and nanoseconds since 1970; seconds from -2^31 to 2^34 - 2^31 - 1 (year 2446), clamped
/// outside, as ext4 does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time {
    pub sec: i64,
    pub nsec: u32,
}

impl Time {
    pub const SEC_MIN: i64 = -(1 << 31);
    pub const SEC_MAX: i64 = (1 << 34) - (1 << 31) - 1;

    pub fn new(sec: i64, nsec: u32) -> Time {
        debug_assert!(nsec < 1_000_000_000);
        if sec < Self::SEC_MIN {
            Time { sec: Self::SEC_MIN, nsec: 0 }
        } else if sec > Self::SEC_MAX {
            Time { sec: Self::SEC_MAX, nsec: 0 }
        } else {
            Time { sec, nsec }
        }
    }

    pub fn to_system_time(self) -> SystemTime {
        if self.sec >= 0 {
            UNIX_EPOCH + Duration::new(self.sec as u64, self.nsec)
        } else {
            UNIX_EPOCH - Duration::new(self.sec.unsigned_abs(), 0) + Duration::new(0, self.nsec)
        }
    }

    pub fn from_system_time(t: SystemTime) -> Time {
        match t.duration_since(UNIX_EPOCH) {
            Ok(d) => Time::new(d.as_secs() as i64, d.subsec_nanos()),
            Err(e) => {
                let d = e.duration();
                let sec = 0_i64.saturating_sub_unsigned(d.as_secs());
                match d.subsec_nanos() {
                    0 => Time::new(sec, 0),
                    n => Time::new(sec - 1, 1_000_000_000 - n),
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    Fifo = 1,
    CharDevice = 2,
    Directory = 4,
    BlockDevice = 6,
    File = 8,
    Symlink = 10,
    Socket = 12,
}

impl Kind {
    /// From the `S_IFMT` bits of a mode.
    pub fn from_mode(mode: u32) -> Option<Kind> {
        Kind::from_dtype(((mode & libc::S_IFMT) >> 12) as u8)
    }

    /// From a `DT_*` value.
    pub fn from_dtype(dtype: u8) -> Option<Kind> {
        Some(match dtype {
            1 => Kind::Fifo,
            2 => Kind::CharDevice,
            4 => Kind::Directory,
            6 => Kind::BlockDevice,
            8 => Kind::File,
            10 => Kind::Symlink,
            12 => Kind::Socket,
            _ => return None,
        })
    }

    /// The `S_IFMT` bits.
    pub fn mode_bits(self) -> u32 {
        (self as u32) << 12
    }
}

/// What stat reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino,
    pub generation: u64,
    /// Type and permission bits, as `st_mode`.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Device number of a device node, in the kernel's `dev_t` encoding of `st_rdev`.
    pub rdev: u64,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes, as `st_blocks`.
    pub blocks: u64,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
}

impl Attr {
    pub fn kind(&self) -> Kind {
        Kind::from_mode(self.mode).expect("an inode's type was validated when it was loaded")
    }
}

/// A time to set: the clock's, or the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    To(Time),
}

/// What setattr changes; `None` leaves it.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

impl SetAttr {
    /// A change of owner, also one that leaves user and group as they are.
    pub fn is_chown(&self) -> bool {
        let other =
            self.mode.is_some() || self.size.is_some() || self.atime.is_some() || self.mtime.is_some();
        self.uid.is_some() || self.gid.is_some() || !other
    }
}

/// Who asks.
#[derive(Clone, Debug)]
pub struct Cred {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Permissions are checked here. False where the kernel has checked them already (a FUSE mount
    /// with `default_permissions`): the identity then only decides ownership.
    pub enforce: bool,
}

impl Cred {
    /// The superuser: every check passes.
    pub fn root() -> Cred {
        Cred { uid: 0, gid: 0, groups: Vec::new(), enforce: true }
    }

    /// The calling process, with its supplementary groups.
    pub fn process() -> Cred {
        let groups = rustix::process::getgroups().unwrap_or_default();
        Cred {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.into_iter().map(|g| g.as_raw()).collect(),
            enforce: true,
        }
    }

    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// One entry as readdir reports it.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    pub ino: Ino,
    /// Resume after this entry. Never changes while the entry lives, whatever else comes and goes.
    pub cookie: u64,
    pub kind: Kind,
    pub name: &'a [u8],
}

/// What statfs reports.
#[derive(Clone, Copy, Debug)]
pub struct StatFs {
    pub block_bytes: u32,
    pub blocks: u64,
    pub blocks_free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
    pub name_bytes_max: u32,
    pub fsid: u64,
    /// Nothing of it can be changed.
    pub read_only: bool,
}

/// `RENAME_*` of renameat2.
pub const RENAME_NOREPLACE: u32 = libc::RENAME_NOREPLACE;
pub const RENAME_EXCHANGE: u32 = libc::RENAME_EXCHANGE;
pub const RENAME_WHITEOUT: u32 = libc::RENAME_WHITEOUT;

/// Whether a rename can have these flags together. As Linux: who exchanges names takes none away.
pub(super) fn is_rename(flags: u32) -> bool {
    let known = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
    flags & !known == 0 && (flags & RENAME_EXCHANGE == 0 || flags == RENAME_EXCHANGE)
}
