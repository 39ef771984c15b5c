//! From what was named (a pool, a mount point, an address) to the address where its server answers.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use lodestone::fs::format::{BLOCK, SUPER_BLOCK, SUPER_BYTES, Super};
use lodestone::media::mounts;
use rustix::io::Errno;

use crate::failure::{Failure, Result};
use crate::live::address::Address;
use crate::live::listen::is_alive;
use crate::live::place::{self, Identity, Which};
use crate::target::show;

/// What exists is a path, whatever it looks like; but not behind `unix:`.
pub fn address(target: &OsStr) -> Result<Address> {
    if is_socket(target) {
        return parsed(target);
    }
    let path = Path::new(target);
    // The table of mounts first: who looks into a mount whose server hangs, hangs.
    let mount = mounts::resolve(path).ok().and_then(|dir| mounts::at(&dir).ok().flatten());
    if let Some(mount) = mount.filter(mounts::Entry::is_pool) {
        return of_mount(path, mount.device.1);
    }
    match std::fs::metadata(path) {
        Ok(about) if about.is_dir() => Err(Failure::failed(format_args!(
            "no pool is mounted on {}: name its mount point, or the pool itself",
            show(path)
        ))),
        Ok(_) => of_pool(path),
        Err(e) if target.as_bytes().contains(&b':') && e.kind() == std::io::ErrorKind::NotFound => {
            parsed(target)
        }
        Err(e) => Err(Failure::failed(format_args!(
            "{}: {e}; name a mounted pool, a mount point, HOST:PORT or unix:PATH",
            show(path)
        ))),
    }
}

/// Whatever there is of that name.
fn is_socket(target: &OsStr) -> bool {
    target.as_bytes().starts_with(b"unix:")
}

/// Not the address that was named.
pub fn is_found(target: &OsStr, address: &Address) -> bool {
    matches!(address, Address::Unix(_)) && !is_socket(target)
}

fn parsed(target: &OsStr) -> Result<Address> {
    target.to_string_lossy().parse().map_err(Failure::Usage)
}

fn of_mount(dir: &Path, minor: u32) -> Result<Address> {
    let sockets = place::find(Which::OfMount(minor));
    match sockets.iter().find(|socket| is_alive(socket)) {
        Some(first) => Ok(Address::Unix(first.clone())),
        // Where it left a socket: of a server that hangs this asks nothing.
        None if !sockets.is_empty() && is_dead(dir) => Err(Failure::failed(format_args!(
            "{}: its server is gone, it was killed or crashed: mount the pool there again, or lode umount it",
            show(dir)
        ))),
        None => Err(Failure::failed(format_args!(
            "{}: its server cannot be found: it is another user's, older than this command, or could not listen; \
             run as that user or as root, or name the address of its --metrics",
            show(dir)
        ))),
    }
}

/// Asked while its server dies, a mount says that it was aborted.
fn is_dead(dir: &Path) -> bool {
    matches!(rustix::fs::statfs(dir), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

fn of_pool(pool: &Path) -> Result<Address> {
    let failed = |e: std::io::Error| Failure::failed(format_args!("{}: {e}", show(pool)));
    let identity = Identity::of(pool).map_err(failed)?;
    let (alive, left): (Vec<_>, Vec<_>) =
        place::find(Which::OfPool(identity)).into_iter().partition(|socket| is_alive(socket));
    match &alive[..] {
        [only] => Ok(Address::Unix(only.clone())),
        [] if is_no_pool(pool) => Err(Failure::failed(format_args!(
            "{} is no Lodestone pool: name a pool that is mounted, or a mount point",
            show(pool)
        ))),
        [] if !left.is_empty() => Err(Failure::failed(format_args!(
            "{} is not mounted: its server is gone, it was killed or crashed; mount it with lode mount",
            show(pool)
        ))),
        [] => Err(Failure::failed(format_args!(
            "{} is not mounted, or by another user: mount it with lode mount, run as that user, or name the address of \
             its --metrics",
            show(pool)
        ))),
        several => Err(Failure::failed(format_args!(
            "{} is mounted {} times: name one of its mount points",
            show(pool),
            several.len()
        ))),
    }
}

/// Certainly: what cannot be read (a device, another's file) may be one.
fn is_no_pool(path: &Path) -> bool {
    let mut bytes = [0; SUPER_BYTES];
    // To open a pipe waits for who writes to it.
    if !path.metadata().is_ok_and(|about| about.is_file()) {
        return false;
    }
    let Ok(file) = File::open(path) else { return false };
    file.read_exact_at(&mut bytes, SUPER_BLOCK * BLOCK as u64).is_err() || Super::decode(&bytes).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_an_address() {
        let tcp = |text: &str| Address::Tcp(text.to_owned());
        assert_eq!(address(OsStr::new("localhost:9847")).unwrap(), tcp("localhost:9847"));
        assert_eq!(address(OsStr::new("unix:/")).unwrap(), Address::Unix("/".into()));
        assert!(matches!(address(OsStr::new("localhost:")), Err(Failure::Usage(_))));
        assert!(matches!(address(OsStr::new("unix:")), Err(Failure::Usage(_))));
        for other in ["/no/such/pool", "/", "/proc/self/status"] {
            assert!(matches!(address(OsStr::new(other)), Err(Failure::Failed(_))), "{other}");
        }
    }
}
