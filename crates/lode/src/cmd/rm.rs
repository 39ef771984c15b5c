//! `lode rm POOL:/path ...`: removes names from a pool.
//!
//! Directories are emptied by inode number, with a list instead of recursion, so that neither the depth of a
//! tree nor the length of a path is a limit.

use lodestone::fs::{Ino, Kind};
use lodestone::{Error, Result};

use crate::cli;
use crate::failure::{self, Failure, complain, reason, remedy};
use crate::pool::{Access, Pools, Tree as PoolTree};
use crate::target::PoolPath;

pub fn run(args: &cli::Rm) -> failure::Result<()> {
    let mut pools = Pools::new();
    for path in &args.paths {
        pools.open(&path.pool, Access::Write)?;
    }
    crate::interrupt::catch();
    let mut failures = 0;
    for path in &args.paths {
        match remove(pools.tree(&path.pool), path, args) {
            Err(e) if args.force && matches!(e.errno(), libc::ENOENT | libc::ENOTDIR) => {}
            Err(e) => {
                complain(format_args!("cannot remove {path}: {}{}", reason(&e), remedy(e.errno())));
                failures += 1;
            }
            Ok(()) => {}
        }
    }
    pools.close()?;
    if failures == 0 { Ok(()) } else { Err(Failure::Reported) }
}

fn remove(tree: &PoolTree, path: &PoolPath, args: &cli::Rm) -> Result<()> {
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
        return tree.fs.unlink(&tree.cred, dir.ino(), name);
    }
    if !args.recursive {
        return Err(Error::message(libc::EISDIR, "lode::rm", "it is a directory; add -r"));
    }
    empty(tree, attr.ino)?;
    tree.fs.rmdir(&tree.cred, dir.ino(), name)
}

/// A directory on the way down: what it is called in the one above, and which directories it still holds.
struct Level {
    ino: Ino,
    name: Vec<u8>,
    below: Vec<(Vec<u8>, Ino)>,
}

/// Removes everything below `dir`.
fn empty(tree: &PoolTree, dir: Ino) -> Result<()> {
    let mut levels = vec![Level { ino: dir, name: Vec::new(), below: unlink_files(tree, dir)? }];
    while let Some(level) = levels.last_mut() {
        if let Some((name, ino)) = level.below.pop() {
            levels.push(Level { ino, name, below: unlink_files(tree, ino)? });
            continue;
        }
        let emptied = levels.pop().expect("the loop's condition");
        if let Some(above) = levels.last() {
            tree.fs.rmdir(&tree.cred, above.ino, &emptied.name)?;
        }
    }
    Ok(())
}

/// Unlinks what is no directory, gives the directories.
fn unlink_files(tree: &PoolTree, dir: Ino) -> Result<Vec<(Vec<u8>, Ino)>> {
    let mut directories = Vec::new();
    for (name, ino) in tree.entries(dir)? {
        if crate::interrupt::requested() {
            return Err(Error::message(libc::EINTR, "lode::rm", "interrupted; what was not reached is left"));
        }
        if tree.fs.getattr(ino)?.kind() == Kind::Directory {
            directories.push((name, ino));
        } else {
            tree.fs.unlink(&tree.cred, dir, &name)?;
        }
    }
    Ok(directories)
}
