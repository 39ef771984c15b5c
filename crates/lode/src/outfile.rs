//! Files that commands write what they found to: pictures, profiles, pages of the manual.
//!
//! They replace what has the name, whole or not at all: who reads meanwhile, and whoever is left with a full disk, has the
//! old file. A pool, or a region of one, is never replaced: its name stands on the same command lines, and is soon taken
//! for that of a picture.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use lodestone::media::holds_pool;
use lodestone::{Error, Result};
use rustix::fs::Access;

use crate::failure::Output;
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

/// Says before long work what would keep a picture from being written after it.
pub fn refuse_place(picture: &Path) -> Result<()> {
    refuse_pool(picture)?;
    let may_write = |path: &Path| rustix::fs::access(path, Access::WRITE_OK).map_err(io::Error::from);
    let may = match fs::metadata(picture) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => may_write(picture),
        // Where a link that leads nowhere leads to is seen when it is written.
        Err(_) if picture.is_symlink() => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => may_write(directory(picture)),
        Err(e) => Err(e),
    };
    may.map_err(|e| failed(picture, "the picture", e))
}

/// Writes `what`, instead of what was there.
pub fn write(path: &Path, what: &str, content: impl AsRef<[u8]>) -> Result<()> {
    refuse_pool(path)?;
    replace(path, content.as_ref()).map_err(|e| failed(path, what, e))
}

/// What a command that measured answers, once its picture is written. Where that fails what was measured is printed all the
/// same: it took long.
pub fn with_picture<E: From<Error>>(
    answer: String,
    picture: Option<&Path>,
    draw: impl FnOnce() -> Result<String>,
) -> Result<String, E> {
    let drawn = picture.map_or(Ok(()), |path| write(path, "the picture", draw()?));
    if drawn.is_err()
        && let Err(failure) = Output::print(|out| out.bytes(answer.as_bytes()))
    {
        failure.report();
    }
    drawn.map(|()| answer).map_err(E::from)
}

/// By a file beside it, which then takes the name.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // A link stays one, and what it leads to is replaced.
    let there = fs::canonicalize(path).and_then(|to| Ok((fs::metadata(&to)?, to)));
    let (before, to) = match &there {
        Ok((before, to)) if before.is_file() => (Some(before), to.as_path()),
        Err(_) if !path.is_symlink() => (None, path),
        // Pipes, terminals, devices take what is written; of directories, and links that lead nowhere, the host speaks.
        _ => return fs::write(path, content),
    };
    // What this user may not write stays, though a name in its directory were his to take.
    if before.is_some() {
        rustix::fs::access(to, Access::WRITE_OK)?;
    }
    match Beside::new(to, before) {
        Ok(beside) => beside.publish(content),
        // A directory that takes no other file.
        Err(_) if before.is_some() => fs::write(to, content),
        Err(e) => Err(e),
    }
}

/// A file in the making; gone when it is dropped, unless it was published.
struct Beside<'a> {
    to: &'a Path,
    temporary: PathBuf,
    file: File,
}

impl Beside<'_> {
    /// With the permissions of what was there `before`.
    fn new<'a>(to: &'a Path, before: Option<&Metadata>) -> io::Result<Beside<'a>> {
        let name = to.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let temporary = directory(to).join(hidden);
        // Of a process with this number that was killed.
        let _ = fs::remove_file(&temporary);
        let file = File::create_new(&temporary)?;
        let beside = Beside { to, temporary, file };
        if let Some(before) = before {
            beside.file.set_permissions(before.permissions())?;
        }
        Ok(beside)
    }

    fn publish(mut self, content: &[u8]) -> io::Result<()> {
        self.file.write_all(content)?;
        fs::rename(&self.temporary, self.to)
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        // Gone where it was published.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// The directory that a file is in.
pub fn directory(file: &Path) -> &Path {
    match file.parent() {
        Some(dir) if dir != Path::new("") => dir,
        _ => Path::new("."),
    }
}

fn failed(path: &Path, what: &str, e: io::Error) -> Error {
    let message = format!("cannot write {what} {}: {e}", show(path));
    Error::message(e.raw_os_error().unwrap_or(libc::EIO), "lode::outfile", message)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

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
        refuse_place(Path::new("/dev/null")).unwrap();
        let refused = write(&dir, "the picture", "x").unwrap_err().to_string();
        assert!(refused.starts_with("cannot write the picture "), "{refused}");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_old_one_stands_until_the_new_one_is_whole() {
        let dir = std::env::temp_dir().join(format!("lode-outfile-whole-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (real, link) = (dir.join("real.svg"), dir.join("link.svg"));
        write(&real, "the picture", "old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let mut reader = File::open(&real).unwrap();
        write(&link, "the picture", "new").unwrap();
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!((read.as_str(), fs::read_to_string(&real).unwrap().as_str()), ("old", "new"));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
        // Given up before it was whole.
        let about = fs::metadata(&real).unwrap();
        Beside::new(&real, Some(&about)).unwrap().file.write_all(b"half").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "nothing else is left");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_is_said_before() {
        let dir = std::env::temp_dir().join(format!("lode-outfile-place-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for place in [dir.clone(), dir.join("none/picture.svg")] {
            let refused = refuse_place(&place).unwrap_err().to_string();
            assert!(refused.starts_with("cannot write the picture "), "{refused}");
        }
        refuse_place(&dir.join("picture.svg")).unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "asking makes nothing");
        fs::remove_dir_all(&dir).unwrap();
    }
}
