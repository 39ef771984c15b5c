//! Who has the media of a pool, and whether that is a server whose mount has ended: `umount(2)` is back before a server has closed
//! its pool.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Stat, stat};
use rustix::io::{Errno, Result};

use super::mounts;

const LOOKS_FOR_A_HOLDER: u32 = 10;
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// Whose process has ended lets go at once, unless a child has its descriptors.
const GONE_WAIT: Duration = Duration::from_millis(100);
const CLOSE_POLL: Duration = Duration::from_millis(5);

/// The process that the lock of a file names, as far as this process may see it.
fn holder(stat: &Stat) -> Option<u32> {
    // The list changes while it is read, and then an entry may be missed that is there.
    (0..LOOKS_FOR_A_HOLDER).find_map(|_| {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        find_holder(&locks, stat.st_dev, stat.st_ino)
    })
}

pub(super) fn in_words(stat: &Stat) -> String {
    match holder(stat) {
        Some(pid) => match fs::read_to_string(format!("/proc/{pid}/comm")) {
            Ok(name) => format!("process {pid} ({})", name.trim()),
            // A lock stays with the descriptors that its children have.
            Err(_) if is_gone(pid) => format!("a child of process {pid}, which has ended"),
            Err(_) => format!("process {pid}"),
        },
        None => "another process".to_owned(),
    }
}

/// Takes a file (by its lock) or a device, once a server that was unmounted just before has let go of it. Who else has it keeps
/// it: another program, or a server whose mount stands.
pub(super) fn behind_umount<T>(stat: &Stat, mut take: impl FnMut() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match take() {
            Err(busy @ (Errno::WOULDBLOCK | Errno::BUSY))
                if begun.elapsed() < CLOSE_WAIT && is_closing(stat, busy, begun.elapsed() < GONE_WAIT) =>
            {
                thread::sleep(CLOSE_POLL)
            }
            taken => return taken,
        }
    }
}

/// `just_asked`: a process that is gone may have let go meanwhile.
fn is_closing(stat: &Stat, busy: Errno, just_asked: bool) -> bool {
    match holder(stat) {
        Some(pid) if is_gone(pid) => just_asked,
        Some(pid) => is_server(&process_words(pid)) && !has_mounted(Some(pid), stat),
        // Whoever had the lock is gone by now, or cannot be seen from here. A device without one is no server's.
        None => busy == Errno::WOULDBLOCK && !has_mounted(None, stat),
    }
}

fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

/// Whether a process sees a mount of this pool; without one, or where it has ended, whether this process does.
fn has_mounted(pid: Option<u32>, pool: &Stat) -> bool {
    let seen = pid.and_then(|pid| mounts::pools_of(pid).ok());
    let pools = seen.unwrap_or_else(|| mounts::pools().unwrap_or_default());
    let is_pool =
        |source: &Path| stat(source).is_ok_and(|s| (s.st_dev, s.st_ino) == (pool.st_dev, pool.st_ino));
    pools.iter().any(|mount| is_pool(Path::new(&mount.source)))
}

/// The words of a process's command line; none of one that has ended.
fn process_words(pid: u32) -> Vec<Vec<u8>> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
}

/// Whether a command line may be that of a server: it mounts, or is that of a process that has just ended.
fn is_server(words: &[Vec<u8>]) -> bool {
    let Some(program) = words.first() else { return true };
    let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    matches!(name, b"" | b"mount.lode" | b"mount.fuse.lode") || words.iter().any(|word| word == b"mount")
}

/// The process that /proc/locks names for a file. Some file systems show another device number there
/// than stat does, so that the inode number alone is second best.
fn find_holder(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let device = format!("{:02x}:{:02x}", libc::major(dev), libc::minor(dev));
    let mut second_best = None;
    for line in locks.lines() {
        // "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; waiters have "->" behind the number.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields[..] else { continue };
        let (Ok(pid), Some((on, inode))) = (pid.parse::<u32>(), file.rsplit_once(':')) else { continue };
        // A holder outside this process's namespace is shown as 0.
        if pid == 0 || inode.parse() != Ok(ino) {
            continue;
        }
        if on == device {
            return Some(pid);
        }
        second_best.get_or_insert(pid);
    }
    second_best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_is_found_by_device_and_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 fe:01:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 13 fe:00:77 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 14 fe:00:77 0 EOF\n\
                     nonsense\n4: FLOCK\n";
        let dev = libc::makedev(0xfe, 0);
        assert_eq!(find_holder(locks, dev, 77), Some(13));
        assert_eq!(find_holder(locks, libc::makedev(9, 9), 77), Some(12), "the inode alone");
        assert_eq!(find_holder(locks, dev, 78), None);
    }

    #[test]
    fn a_server_is_told_from_who_else_has_a_pool() {
        let is =
            |line: &str| is_server(&line.split(' ').map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>());
        assert!(is("/usr/bin/lode mount pool dir") && is("lode --verbose mount -o ro pool dir"));
        assert!(is("/sbin/mount.fuse.lode pool dir -o rw") && is("mount.lode pool dir"));
        assert!(is(""), "it has just ended");
        assert!(!is("lode bench --pool pool") && !is("/usr/sbin/mysqld"));
    }
}
