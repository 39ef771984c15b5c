//! Files that commands write what they found to: pictures, profiles, pages of the manual.
//!
//! They replace what has the name. A pool, or a region of one, is never replaced: its name stands on the same command
//! lines, and is soon taken for that of a picture.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use lodestone::media::holds_pool;
use lodestone::{Error, Result};

use crate::target::show;

/// Refuses what holds a pool, or what is left of one. Asked again when it is written; before long work it is asked first.
pub fn refuse_pool(path: &Path) -> Result<()> {
    // What is not there is made, or the reason why not is said then.
    let Ok(there) = fs::metadata(path).map(|about| about.file_type()) else { return Ok(()) };
    let holds = match holds_pool(path) {
        // No terminal or pipe is a pool.
        Err(_) if !there.is_file() && !there.is_block_device() => false,
        holds => holds?,
    };
    match holds {
        true => {
            let message = format!("{} holds a pool, and would be overwritten: name another file", show(path));
            Err(Error::message(libc::EEXIST, "lode::outfile", message))
        }
        false => Ok(()),
    }
}

/// Writes `what`, instead of what was there.
pub fn write(path: &Path, what: &str, content: impl AsRef<[u8]>) -> Result<()> {
    refuse_pool(path)?;
    fs::write(path, content).map_err(|e| {
        let message = format!("cannot write {what} {}: {e}", show(path));
        Error::message(e.raw_os_error().unwrap_or(libc::EIO), "lode::outfile", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lodestone::media::{Pool, PoolOptions};

    #[test]
    fn pools_are_not_overwritten() {
        let dir = std::env::temp_dir().join(format!("lode-outfile-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let regions = [dir.join("r0"), dir.join("r1")];
        Pool::create(&regions, Some(8 << 20), &PoolOptions::default()).unwrap();
        let damaged = dir.join("damaged");
        let mut bytes = fs::read(&regions[0]).unwrap();
        bytes[40] ^= 1;
        fs::write(&damaged, &bytes).unwrap();
        for path in regions.iter().chain([&damaged]) {
            let before = fs::read(path).unwrap();
            let refused = write(path, "the picture", "x").unwrap_err().to_string();
            assert!(refused.contains("holds a pool") && refused.contains("name another file"), "{refused}");
            assert!(fs::read(path).unwrap() == before);
        }
        let other = dir.join("other");
        for text in ["first", "second"] {
            write(&other, "the picture", text).unwrap();
            assert_eq!(fs::read_to_string(&other).unwrap(), text);
        }
        write(Path::new("/dev/null"), "the picture", "x").unwrap();
        let refused = write(&dir, "the picture", "x").unwrap_err().to_string();
        assert!(refused.starts_with("cannot write the picture "), "{refused}");
        fs::remove_dir_all(&dir).unwrap();
    }
}
