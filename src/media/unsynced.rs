//! What of a file the kernel has still to write to its disk: pages that were stored to, or are on their way.
//!
//! Linux 6.5 and later say so of a range (cachestat(2)), page by page of what they have in memory. Of much memory that takes
//! milliseconds, so whoever is in a hurry says how long he waits, and gets what was counted by then.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Part;

/// The same on all architectures that have got it as a new call.
const CACHESTAT: libc::c_long = 451;
/// Looked at in one call, in bytes: some tenths of a millisecond where all of it is in memory.
const STEP_BYTES: u64 = 32 << 20;

/// Bytes that are in memory only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unsynced {
    pub bytes: u64,
    /// Not all was looked at: there may be more.
    pub at_least: bool,
}

/// `struct cachestat_range` of the kernel.
#[repr(C)]
struct Range {
    start: u64,
    bytes: u64,
}

/// `struct cachestat` of the kernel, in pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    written_now: u64,
    evicted: u64,
    evicted_lately: u64,
}

/// What is unsynced of a file or block device, or of a part of it; looks for `at_most` so long, and at one step at least.
///
/// ENOSYS before Linux 6.5, EOPNOTSUPP for a file that is memory only.
pub fn unsynced(path: &Path, part: Option<Part>, at_most: Duration) -> io::Result<Unsynced> {
    let begun = Instant::now();
    // A drive without a medium would keep whoever opens it.
    let mut file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let (start, end) = match part {
        Some(part) => (part.offset, part.offset + part.bytes),
        // A device has no length that a look at its inode would tell.
        None => (0, file.seek(SeekFrom::End(0))?),
    };
    let page = rustix::param::page_size() as u64;
    let mut found = Unsynced::default();
    for at in (start..end).step_by(STEP_BYTES as usize) {
        if at > start && begun.elapsed() > at_most {
            found.at_least = true;
            break;
        }
        let counts = counts(&file, Range { start: at, bytes: STEP_BYTES.min(end - at) })?;
        found.bytes += (counts.dirty + counts.written_now) * page;
    }
    Ok(found)
}

fn counts(file: &File, range: Range) -> io::Result<Counts> {
    let mut counts = Counts::default();
    // SAFETY: the kernel reads one range and writes one structure of counts, both laid out as it wants them and alive during the
    // call; the descriptor is open.
    let done = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0u32) };
    match done {
        0 => Ok(counts),
        _ => Err(io::Error::last_os_error()),
    }
}

const _: () = {
    assert!(size_of::<Range>() == 16);
    assert!(size_of::<Counts>() == 40);
};

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_was_written_and_not_synced_is_counted() {
        let path = std::env::temp_dir().join(format!("lode-unsynced-{}", std::process::id()));
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![1; 3 << 20]).unwrap();
        let found = unsynced(&path, None, Duration::from_secs(1));
        file.sync_all().unwrap();
        let synced = unsynced(&path, None, Duration::from_secs(1));
        std::fs::remove_file(&path).unwrap();
        let (Ok(found), Ok(synced)) = (found, synced) else {
            println!("SKIPPED: unsynced: this kernel does not count (Linux 6.5 does)");
            return;
        };
        // The kernel may have written some of it by itself, and in memory nothing is ever dirty.
        assert!(found.bytes <= 3 << 20 && !found.at_least, "{found:?}");
        assert_eq!(synced, Unsynced::default());
    }

    #[test]
    fn who_is_in_a_hurry_gets_less() {
        let path = std::env::temp_dir().join(format!("lode-unsynced-hurry-{}", std::process::id()));
        File::create(&path).unwrap().set_len(4 * STEP_BYTES).unwrap();
        let found = unsynced(&path, None, Duration::ZERO);
        std::fs::remove_file(&path).unwrap();
        assert!(found.is_err() || found.is_ok_and(|found| found.at_least));
    }
}
