//! Writing the profile: whole or not at all. A temporary file beside it is written, synced and renamed over it, and the
//! directory is synced; a reader, or a crash, finds the old one or the new one.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};
use crate::outfile;
use crate::target::show;

const FILE_MODE: u32 = 0o644;

/// A file in the making, made before anything is measured: a place that cannot be written to is said at once. What is
/// left of it goes when it is dropped.
pub struct Draft {
    /// Where it is to stand.
    to: PathBuf,
    temporary: PathBuf,
    file: File,
    /// Directories that were made for it, the outermost first; gone with it unless it is published.
    made: Vec<PathBuf>,
}

impl Draft {
    pub fn new(path: &Path) -> Result<Draft> {
        outfile::refuse_pool(path)?;
        let failed = |e: std::io::Error| {
            Failure::failed(format_args!(
                "cannot write the profile {}: {e}; name another place with --out",
                show(path)
            ))
        };
        // A link stays one, and what it leads to is written.
        let to = match fs::canonicalize(path) {
            Ok(there) if !there.is_file() => {
                return Err(Failure::failed(format_args!(
                    "cannot write the profile {}: it is not a file; name another place with --out",
                    show(path)
                )));
            }
            Ok(there) => there,
            Err(_) => path.to_path_buf(),
        };
        let name = to.file_name().ok_or_else(|| failed(std::io::ErrorKind::IsADirectory.into()))?;
        let dir = outfile::directory(&to);
        let mut made: Vec<PathBuf> =
            dir.ancestors().take_while(|dir| !dir.exists()).map(Path::to_path_buf).collect();
        made.reverse();
        fs::create_dir_all(dir).map_err(failed)?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let temporary = dir.join(hidden);
        // Of a process with this number that was killed.
        let _ = fs::remove_file(&temporary);
        let file =
            File::options().write(true).create_new(true).mode(FILE_MODE).open(&temporary).map_err(failed)?;
        Ok(Draft { to, temporary, file, made })
    }

    /// Durable on return.
    pub fn publish(mut self, text: &str) -> Result<()> {
        let mut write = || -> std::io::Result<()> {
            self.file.write_all(text.as_bytes())?;
            self.file.sync_all()?;
            fs::rename(&self.temporary, &self.to)?;
            self.made.clear();
            File::open(outfile::directory(&self.to))?.sync_all()
        };
        write().map_err(|e| Failure::failed(format_args!("cannot write the profile {}: {e}", show(&self.to))))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone where it was published.
        let _ = fs::remove_file(&self.temporary);
        // One in which there is something by now stays.
        for dir in self.made.iter().rev() {
            let _ = fs::remove_dir(dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let dir = std::env::temp_dir().join(format!("lode-tune-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Dir(dir)
        }

        fn names(&self) -> Vec<String> {
            names(&self.0)
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.collect();
        names.sort();
        names
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_old_one_stands_until_the_new_one_is_whole() {
        let dir = Dir::new("store");
        let path = dir.0.join("a/profile.toml");
        Draft::new(&path).unwrap().publish("old").unwrap();
        let draft = Draft::new(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        drop(draft);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old", "a draft that is given up changes nothing");
        Draft::new(&path).unwrap().publish("new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(path.parent().unwrap()), ["profile.toml"], "nothing else is left");
    }

    #[test]
    fn one_that_is_given_up_leaves_no_directory() {
        let dir = Dir::new("given-up");
        drop(Draft::new(&dir.0.join("a/b/profile.toml")).unwrap());
        assert!(dir.names().is_empty(), "{:?}", dir.names());
        let draft = Draft::new(&dir.0.join("a/b/profile.toml")).unwrap();
        fs::write(dir.0.join("a/other"), "").unwrap();
        drop(draft);
        assert_eq!(names(&dir.0.join("a")), ["other"]);
    }

    #[test]
    fn a_link_stays_a_link() {
        let dir = Dir::new("link");
        let (real, link) = (dir.0.join("real.toml"), dir.0.join("link.toml"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        Draft::new(&link).unwrap().publish("new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(dir.names(), ["link.toml", "real.toml"]);
    }

    #[test]
    fn a_place_that_cannot_be_is_said_before() {
        let dir = Dir::new("nowhere");
        fs::write(dir.0.join("file"), "").unwrap();
        for (path, says) in [(dir.0.clone(), "not a file"), (dir.0.join("file/profile.toml"), "--out")] {
            match Draft::new(&path).map(|_| ()) {
                Err(Failure::Failed(said)) => {
                    assert!(said.contains(says) && said.contains("lode-tune"), "{said}")
                }
                other => panic!("{path:?}: {other:?}"),
            }
        }
    }
}
