//! `lode rm POOL:/path ...`: removes names from a pool.
//!
//! Directories are emptied by inode number, with a list instead of recursion, so that neither the depth of a
//! tree nor the length of a path is a limit. What cannot be removed is told and does not keep the rest, unless the
//! medium itself fails or somebody wants an end.

use lodestone::fs::{Ino, Kind};
use lodestone::{Error, Result};

use crate::cli;
use crate::failure::{self, Failure, complain, reason, remedy};
use crate::interrupt;
use crate::pool::{Access, Pools, Tree as PoolTree};
use crate::target::PoolPath;
use crate::tree::join;

pub fn run(args: &cli::Rm) -> failure::Result<()> {
    let mut pools = Pools::new();
    for path in &args.paths {
        pools.open(&path.pool, Access::Write)?;
    }
    interrupt::catch();
    let mut complete = true;
    for path in &args.paths {
        match remove(pools.tree(&path.pool), path, args) {
            Err(e) if args.force && matches!(e.errno(), libc::ENOENT | libc::ENOTDIR) => {}
            Err(e) => {
                tell(path, &e);
                complete = false;
                if e.errno() == libc::EINTR {
                    break;
                }
            }
            Ok(removed) => complete &= removed,
        }
    }
    pools.close()?;
    if complete { Ok(()) } else { Err(Failure::Reported) }
}

fn tell(path: &PoolPath, e: &Error) {
    complain(format_args!("cannot remove {path}: {}{}", reason(e), remedy(e.errno())));
}

fn check_interrupt() -> Result<()> {
    match interrupt::requested() {
        true => Err(Error::message(libc::EINTR, "lode::rm", "interrupted; what was not reached is left")),
        false => Ok(()),
    }
}

/// Whether all of it is gone; of what is not was told why.
fn remove(tree: &PoolTree, path: &PoolPath, args: &cli::Rm) -> Result<bool> {
    check_interrupt()?;
    let (dir, name) = tree.fs.walk_parent(&tree.cred, None, &path.path)?;
    if name.is_empty() {
        return Err(Error::message(libc::EBUSY, "lode::rm", "it is the root directory"));
    }
    if matches!(name, b"." | b"..") {
        return Err(Error::message(libc::EINVAL, "lode::rm", "its name is . or .."));
    }
    // The entry itself, never what a symbolic link with a slash behind it leads to.
    let attr = tree.fs.attr_of(&tree.fs.walk(&tree.cred, Some(&dir), name, false)?)?;
    if attr.kind() != Kind::Directory {
        if path.path.ends_with(b"/") {
            return Err(Error::new(libc::ENOTDIR, "lode::rm"));
        }
        return tree.fs.unlink(&tree.cred, dir.ino(), name).map(|()| true);
    }
    if !args.recursive {
        return Err(Error::message(libc::EISDIR, "lode::rm", "it is a directory; add -r"));
    }
    let emptied = match (Emptying { tree, top: path, levels: Vec::new() }).all(attr.ino) {
        Err(e) if is_unreadable(&e) && tree.fs.rmdir(&tree.cred, dir.ino(), name).is_ok() => return Ok(true),
        emptied => emptied?,
    };
    if emptied {
        tree.fs.rmdir(&tree.cred, dir.ino(), name)?;
    }
    Ok(emptied)
}

/// Of a directory that could not be listed: one that is empty may be removed all the same.
fn is_unreadable(e: &Error) -> bool {
    e.errno() == libc::EACCES
}

/// A directory on the way down: what it is called in the one above, and which directories it still holds.
struct Level {
    ino: Ino,
    name: Vec<u8>,
    below: Vec<(Vec<u8>, Ino)>,
    /// Something in it could not be removed.
    stays: bool,
}

/// The removal of everything below a directory.
struct Emptying<'a> {
    tree: &'a PoolTree,
    top: &'a PoolPath,
    levels: Vec<Level>,
}

impl Emptying<'_> {
    /// Whether `dir` is empty now.
    fn all(mut self, dir: Ino) -> Result<bool> {
        self.enter(Vec::new(), dir)?;
        loop {
            let level = self.levels.last_mut().expect("it ends with the first");
            if let Some((name, ino)) = level.below.pop() {
                let above = level.ino;
                if let Err(e) = self.enter(name.clone(), ino)
                    && !(is_unreadable(&e) && self.tree.fs.rmdir(&self.tree.cred, above, &name).is_ok())
                {
                    self.stays(&name, e)?;
                }
                continue;
            }
            let emptied = self.levels.pop().expect("it was just there");
            let Some(above) = self.levels.last_mut() else { return Ok(!emptied.stays) };
            if emptied.stays {
                above.stays = true;
                continue;
            }
            let above = above.ino;
            if let Err(e) = self.tree.fs.rmdir(&self.tree.cred, above, &emptied.name) {
                self.stays(&emptied.name, e)?;
            }
        }
    }

    /// Unlinks what is no directory, and leaves the directories to be emptied.
    fn enter(&mut self, name: Vec<u8>, dir: Ino) -> Result<()> {
        let entries = self.tree.entries(dir)?;
        self.levels.push(Level { ino: dir, name, below: Vec::new(), stays: false });
        for entry in entries {
            check_interrupt()?;
            if entry.kind == Kind::Directory {
                let level = self.levels.last_mut().expect("just pushed");
                level.below.push((entry.name, entry.ino));
            } else if let Err(e) = self.tree.fs.unlink(&self.tree.cred, dir, &entry.name) {
                self.stays(&entry.name, e)?;
            }
        }
        Ok(())
    }

    /// Tells what of the last level was not removed. The error ends the removal: going on makes no sense.
    fn stays(&mut self, name: &[u8], e: Error) -> Result<()> {
        if matches!(e.errno(), libc::EINTR | libc::EIO | libc::EROFS) {
            return Err(e);
        }
        let names = self.levels.iter().skip(1).map(|level| &level.name[..]).chain([name]);
        let path = names.fold(self.top.path.clone(), |path, name| join(&path, name));
        tell(&PoolPath { path, ..self.top.clone() }, &e);
        self.levels.last_mut().expect("something is in it").stays = true;
        Ok(())
    }
}
