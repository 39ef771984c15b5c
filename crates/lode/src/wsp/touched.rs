//! Which parts of its memory a guest may have stored to: those that its emulator has in its page tables.
//!
//! An emulator lives from one boot or resume to the next suspend. What it never mapped it never stored to, and what was
//! stored before that was made durable by the suspend then. So of a memory of many GiB those pages are written back that were
//! looked at since, and no others: nothing in user space names the lines that are dirty. The kernel takes no page of persistent
//! memory out of a page table again, and what KVM lets a guest reach is in its emulator's, too.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use lodestone::media::{Addr, Part};

use super::place::Config;

/// Of an entry of `/proc/PID/pagemap` (Linux: Documentation/admin-guide/mm/pagemap.rst): there, or swapped out.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const ENTRY_BYTES: usize = 8;
/// Entries read at a time.
const ENTRIES: usize = 1 << 17;
/// Parts that are so near are one, in bytes.
const GAP_BYTES: u64 = 64 << 10;

/// Parts of a guest's memory that process `process` has mapped pages of. NotFound where it does not map all of it in one piece.
pub fn touched(process: u32, config: &Config) -> io::Result<Vec<(Addr, usize)>> {
    let page = rustix::param::page_size() as u64;
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let about = std::fs::metadata(&config.ram)?;
    let part = Part { offset: config.ram_offset, bytes: config.ram_bytes };
    let (start, end) = mapped(&maps, &about, part).ok_or(io::ErrorKind::NotFound)?;
    let pagemap = File::open(format!("/proc/{process}/pagemap"))?;
    let mut found: Vec<(Addr, usize)> = Vec::new();
    let mut entries = vec![0; ENTRIES * ENTRY_BYTES];
    let pages = (end - start) / page;
    for first in (0..pages).step_by(ENTRIES) {
        let some = &mut entries[..ENTRY_BYTES * (pages - first).min(ENTRIES as u64) as usize];
        pagemap.read_exact_at(some, (start / page + first) * ENTRY_BYTES as u64)?;
        for (n, entry) in some.chunks_exact(ENTRY_BYTES).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().expect("as long as a chunk"));
            if entry & (PRESENT | SWAPPED) != 0 {
                add(&mut found, (first + n as u64) * page, page);
            }
        }
    }
    Ok(found)
}

/// Whether process `process` maps the memory that stands at the guest's path. None where it maps nothing of that size: it is no
/// emulator, but what started one.
pub fn maps_ram(process: u32, config: &Config) -> io::Result<Option<bool>> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
    let about = std::fs::metadata(&config.ram)?;
    let part = Part { offset: config.ram_offset, bytes: config.ram_bytes };
    if mapped(&maps, &about, part).is_some() {
        return Ok(Some(true));
    }
    let mut shared = maps.lines().filter_map(Mapped::of).filter(|m| m.bytes() >= part.bytes).peekable();
    if shared.peek().is_none() {
        return Ok(None);
    }
    // Some file systems (btrfs, overlayfs) are named otherwise there than by stat; the emulator has its memory open, too.
    Ok(Some(shared.any(|m| m.offset == part.offset) && has_open(process, &about)?))
}

fn has_open(process: u32, file: &std::fs::Metadata) -> io::Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        // What was closed meanwhile is not there.
        if let Ok(about) = std::fs::metadata(entry?.path())
            && (about.dev(), about.ino()) == (file.dev(), file.ino())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn add(found: &mut Vec<(Addr, usize)>, at: u64, bytes: u64) {
    match found.last_mut() {
        Some((last, len)) if at <= last.0 + *len as u64 + GAP_BYTES => *len = (at + bytes - last.0) as usize,
        _ => found.push((Addr(at), bytes as usize)),
    }
}

/// A line of `/proc/PID/maps` with a shared mapping.
struct Mapped {
    start: u64,
    end: u64,
    offset: u64,
    dev: (u64, u64),
    inode: u64,
}

impl Mapped {
    fn of(line: &str) -> Option<Mapped> {
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (flags, offset) = (fields.next()?, hexadecimal(fields.next()?)?);
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
        let dev = (hexadecimal(major)?, hexadecimal(minor)?);
        flags.ends_with('s').then_some(Mapped { start, end, offset, dev, inode })
    }

    fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// A device is known by its node's inode alone.
    fn is_of(&self, file: &std::fs::Metadata) -> bool {
        let dev = file.dev();
        let dev = (rustix::fs::major(dev).into(), rustix::fs::minor(dev).into());
        self.inode == file.ino() && (file.rdev() != 0 || self.dev == dev)
    }
}

/// Where a part of a file is mapped, shared, by a mapping that begins with it.
fn mapped(maps: &str, file: &std::fs::Metadata, part: Part) -> Option<(u64, u64)> {
    let mut shared = maps.lines().filter_map(Mapped::of);
    let found = shared.find(|m| m.is_of(file) && m.offset == part.offset && m.bytes() >= part.bytes)?;
    Some((found.start, found.start + part.bytes))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn near_parts_are_one() {
        let mut found = Vec::new();
        for at in [0, 4096, 40960, 1 << 20] {
            add(&mut found, at, 4096);
        }
        assert_eq!(found, [(Addr(0), 45056), (Addr(1 << 20), 4096)]);
    }

    /// As much of a file as the memory of a guest has.
    fn guest(path: &Path, ram_offset: u64, ram_bytes: u64) -> Config {
        let text = serde_json::json!({
            "version": 1, "qemu": "", "accel": "", "ram": path, "ram_bytes": ram_bytes, "trailer_bytes": 0,
            "ram_offset": ram_offset, "slots": "", "assume": null, "disks": [], "cpus": 1, "priority": 0,
            "agent": false, "cwd": "", "options": [], "clone_of": null, "failed": 0,
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn what_was_stored_to_is_found() {
        use lodestone::media::{Media, Span, SpanOptions};

        let path = std::env::temp_dir().join(format!("lode-wsp-touched-{}", std::process::id()));
        let bytes = 16 << 20;
        let span = Span::open(&path, &SpanOptions { size: Some(bytes), ..SpanOptions::default() }).unwrap();
        let at = Addr(9 << 20);
        span.copy_cached(at, b"stored").unwrap().redundant("only where counts");
        let found = touched(std::process::id(), &guest(&path, 0, bytes)).unwrap();
        assert!(found.iter().any(|(from, len)| from.0 <= at.0 && at.0 < from.0 + *len as u64), "{found:?}");
        let total: usize = found.iter().map(|(_, len)| len).sum();
        assert!(total < 4 << 20, "what was not stored to is not found: {found:?}");
        let more = touched(std::process::id(), &guest(&path, 0, 2 * bytes));
        assert!(more.is_err(), "not all of it is mapped");
        let maps = |ram: &Path, bytes| maps_ram(std::process::id(), &guest(ram, 0, bytes)).unwrap();
        assert_eq!(maps(&path, bytes), Some(true));
        assert_eq!(maps(&path, 1 << 50), None, "who maps nothing so large is no emulator");
        let replaced = path.with_extension("replaced");
        std::fs::write(&replaced, b"").unwrap();
        assert_eq!(maps(&replaced, bytes), Some(false));
        std::fs::remove_file(&replaced).unwrap();
        drop(span);
        let part = Part { offset: 8 << 20, bytes: 4 << 20 };
        let span = Span::open_part(&path, part, &SpanOptions::default()).unwrap();
        span.copy_cached(Addr(1 << 20), b"stored").unwrap().redundant("only where counts");
        let found = touched(std::process::id(), &guest(&path, part.offset, part.bytes)).unwrap();
        let stored = 1 << 20;
        assert!(
            found.iter().any(|(from, len)| (from.0..from.0 + *len as u64).contains(&stored)),
            "{found:?}"
        );
        assert!(touched(std::process::id(), &guest(&path, 0, part.bytes)).is_err(), "another part");
        drop(span);
        std::fs::remove_file(&path).unwrap();
    }
}
