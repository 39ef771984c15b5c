//! Where a mount server is found by those who know its pool or its mount point, and no address.
//!
//! A socket `NAME.DEVICE-INODE.MINOR.sock` in the runtime directory of the server's user: NAME is the pool's, for people;
//! device and inode are those of the pool's file, by whatever name it is given; MINOR is that of the mount's `st_dev`, which
//! no two mounts share. So several mounts, of one pool for reading too, have a socket each.
//!
//! Directories are those of one user alone: what others could have put there is neither connected to nor listened on.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use lodestone::quote::Shown;

/// The pool's name in that of its socket, at most so long: paths of sockets are short.
const NAME_BYTES_MAX: usize = 24;
const SUFFIX: &str = "sock";
const OWNER_ONLY: u32 = 0o700;

/// A pool's file, by whatever name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    pub owner: u32,
}

impl Identity {
    pub fn of(pool: &Path) -> io::Result<Identity> {
        let about = fs::metadata(pool)?;
        Ok(Identity { device: about.dev(), inode: about.ino(), owner: about.uid() })
    }

    fn part(&self) -> String {
        format!("{:x}-{:x}", self.device, self.inode)
    }
}

/// Which sockets are wanted.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    OfPool(Identity),
    /// By the minor number of its mount.
    OfMount(u32),
}

/// Makes the directory of this process's user, and gives it.
pub fn make() -> io::Result<PathBuf> {
    let mut failed = None;
    for dir in own_dirs() {
        match prepare(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) => drop(failed.get_or_insert(io::Error::new(e.kind(), format!("{}: {e}", dir.shown())))),
        }
    }
    Err(failed.expect("there is always one"))
}

fn prepare(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(OWNER_ONLY).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    match is_of(dir, rustix::process::geteuid().as_raw(), !OWNER_ONLY & 0o777) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not this user's alone")),
    }
}

/// A directory of this user's in which none of these permissions is set; no symbolic link.
fn is_of(dir: &Path, user: u32, without: u32) -> bool {
    fs::symlink_metadata(dir)
        .is_ok_and(|about| about.is_dir() && about.uid() == user && about.mode() & without == 0)
}

/// The first that can be made is taken.
fn own_dirs() -> Vec<PathBuf> {
    let user = rustix::process::geteuid();
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // Another user's stays in the environment of su.
    let session = session.filter(|dir| dir.is_absolute() && is_of(dir, user.as_raw(), 0o022));
    let mut dirs: Vec<PathBuf> = session.map(|dir| dir.join("lodestone")).into_iter().collect();
    if user.is_root() {
        dirs.push(PathBuf::from("/run/lodestone"));
    }
    dirs.push(of_tmp(user.as_raw()));
    dirs
}

fn of_tmp(user: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/lodestone-{user}"))
}

fn of_session(user: u32) -> PathBuf {
    PathBuf::from(format!("/run/user/{user}/lodestone"))
}

/// Sockets that are wanted, in a fixed order, whether anybody listens or not.
pub fn find(which: Which) -> Vec<PathBuf> {
    let user = rustix::process::geteuid();
    let mut dirs: Vec<(PathBuf, u32)> = own_dirs().into_iter().map(|dir| (dir, user.as_raw())).collect();
    dirs.push((of_session(user.as_raw()), user.as_raw()));
    dirs.push((PathBuf::from("/run/lodestone"), 0));
    if user.is_root() {
        // Root looks at what others mounted, too.
        let of_pool = match which {
            Which::OfPool(pool) => vec![pool.owner],
            Which::OfMount(_) => session_users(),
        };
        dirs.extend(of_pool.into_iter().flat_map(|user| [(of_session(user), user), (of_tmp(user), user)]));
    }
    dirs.sort();
    dirs.dedup();
    let of_one = |(dir, user): (PathBuf, u32)| match is_of(&dir, user, 0o022) {
        true => sockets(&dir, which),
        false => Vec::new(),
    };
    dirs.into_iter().flat_map(of_one).collect()
}

/// Users who have a session, or a directory of ours in /tmp.
fn session_users() -> Vec<u32> {
    let names = |dir| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let number = |name: &OsStr| name.to_str()?.trim_start_matches("lodestone-").parse().ok();
    let sessions = names("/run/user").filter_map(|name| number(&name));
    let others = names("/tmp").filter(|name| name.as_bytes().starts_with(b"lodestone-"));
    sessions.chain(others.filter_map(|name| number(&name))).collect()
}

/// Of one directory; none where it cannot be read.
pub fn sockets(dir: &Path, which: Which) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut found: Vec<PathBuf> =
        entries.filter(|name| is_wanted(name, which)).map(|name| dir.join(name)).collect();
    found.sort();
    found
}

fn is_wanted(name: &OsStr, which: Which) -> bool {
    let Some(name) = name.to_str() else { return false };
    let mut parts = name.rsplit('.');
    let (suffix, minor, pool) = (parts.next(), parts.next(), parts.next());
    suffix == Some(SUFFIX)
        && match which {
            Which::OfPool(identity) => pool == Some(identity.part().as_str()),
            Which::OfMount(wanted) => minor == Some(wanted.to_string().as_str()),
        }
}

/// What a server's socket is called. Without a mount of its own (its device was handed in) it is known by its process.
pub fn name(pool: &Path, identity: Identity, minor: Option<u32>) -> String {
    let plain = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => byte as char,
        _ => '_',
    };
    let bytes = pool.file_name().unwrap_or(pool.as_os_str()).as_bytes();
    let name: String = bytes.iter().take(NAME_BYTES_MAX).map(|byte| plain(*byte)).collect();
    let minor = minor.map_or_else(|| format!("p{}", std::process::id()), |minor| minor.to_string());
    format!("{name}.{}.{minor}.{SUFFIX}", identity.part())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_found_by_pool_and_by_mount() {
        let pool = Identity { device: 0xfe01, inode: 77, owner: 0 };
        let name = name(Path::new("/pools/my data.pool"), pool, Some(98));
        assert_eq!(name, "my_data_pool.fe01-4d.98.sock");
        let wanted = |which| is_wanted(OsStr::new(&name), which);
        assert!(wanted(Which::OfPool(pool)) && wanted(Which::OfMount(98)));
        assert!(!wanted(Which::OfPool(Identity { inode: 7, ..pool })) && !wanted(Which::OfMount(8)));
        for other in ["", "sock", ".sock", "a.fe01-4d.98", "a.fe01-4d.98.sock.old"] {
            assert!(!is_wanted(OsStr::new(other), Which::OfPool(pool)), "{other}");
        }
    }

    #[test]
    fn a_socket_name_is_short_and_has_no_surprises() {
        let pool = Identity { device: u64::MAX, inode: u64::MAX, owner: 0 };
        let name = name(Path::new(&format!("/p/{}\n", "ä/../".repeat(40))), pool, None);
        assert!(
            name.len() < 85 && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'),
            "{name}"
        );
    }

    #[test]
    fn directories_of_others_are_not_used() {
        let me = rustix::process::geteuid().as_raw();
        let dir = std::env::temp_dir().join(format!("lode-place-{}", std::process::id()));
        prepare(&dir).unwrap();
        prepare(&dir).unwrap();
        assert!(is_of(&dir, me, 0o077) && !is_of(&dir, me + 1, 0));
        let link = dir.join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(!is_of(&link, me, 0o077) && prepare(&link).is_err());
        let open = dir.join("open");
        DirBuilder::new().create(&open).unwrap();
        fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(prepare(&open).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
