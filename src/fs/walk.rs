//! Path walks, for callers by path.
//!
//! A thread remembers the last directory it walked to. While no directory was renamed, removed or had
//! its permissions changed since (`Fs::namespace`), the next path with the same directory part costs
//! one comparison instead of a lock and a look-up per component, and threads do not meet at the root.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inode::{Data, Inode};
use super::*;
use crate::limits::{PATH_BYTES_MAX, SYMLINK_DEPTH_MAX, WALK_RETRIES_MAX};

/// A walk that a thread remembers.
struct Remembered {
    fs: u64,
    namespace: u64,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    enforce: bool,
    path: Vec<u8>,
    dir: Arc<Inode>,
}

impl Remembered {
    /// Whether it is what a walk of `path` by `cred` would find.
    #[inline]
    fn holds<M: Media>(&self, fs: &Fs<M>, cred: &Cred, path: &[u8]) -> bool {
        self.path == path
            && self.fs == fs.id
            && self.namespace == fs.namespace.load(Ordering::Acquire)
            && (self.uid, self.gid, self.enforce) == (cred.uid, cred.gid, cred.enforce)
            && self.groups == cred.groups
    }
}

crate::sync::primitive::thread_local!(static LAST: RefCell<Option<Remembered>> = const { RefCell::new(None) });

/// What the thread remembers: nothing any more where it is being torn down, and a destructor of it asks.
#[inline]
fn remembered<R>(look: impl FnOnce(Option<&Remembered>) -> Option<R>) -> Option<R> {
    LAST.try_with(|last| look(last.borrow().as_ref())).ok()?
}

impl<M: Media> Fs<M> {
    /// Walks `path` from `base` (the root where the path is absolute or `base` is None), checking search
    /// permission. `follow`: the last component too, if it is a symbolic link. A trailing slash follows
    /// and wants a directory.
    pub fn walk(&self, cred: &Cred, base: Option<&Node>, path: &[u8], follow: bool) -> Result<Node> {
        check_path(path)?;
        let (dir_part, name) = split(path);
        let mut links = 0;
        if name.is_empty() || path.ends_with(b"/") {
            return self.resolve(cred, self.start_of(base, path)?, path, true, &mut links).map(Node::new);
        }
        let dir = self.directory(cred, base, dir_part, &mut links)?;
        let child = {
            let body = dir.body.read();
            self.child(cred, &dir, &body, name)?
        };
        if follow && child.kind == Kind::Symlink {
            return self.resolve(cred, dir, name, true, &mut links).map(Node::new);
        }
        Ok(Node::new(child))
    }

    /// What stat(2) reports of a path from `base`; `follow`: the last component too. As
    /// [`walk`](Fs::walk) and [`attr_of`](Fs::attr_of), but where the directory is remembered nothing is
    /// taken and given back on the way.
    pub fn stat(&self, cred: &Cred, base: Option<&Node>, path: &[u8], follow: bool) -> Result<Attr> {
        check_path(path)?;
        let (dir_part, name) = split(path);
        if !name.is_empty() {
            let known = match base {
                Some(dir) if dir_part.is_empty() => self.stat_in(cred, &dir.inode, name, follow),
                Some(_) if !path.starts_with(b"/") => None,
                _ => remembered(|last| {
                    let last = last.filter(|l| l.holds(self, cred, dir_part))?;
                    self.stat_in(cred, &last.dir, name, follow)
                }),
            };
            if let Some(attr) = known {
                return Ok(attr);
            }
        }
        for _ in 0..WALK_RETRIES_MAX {
            match self.walk(cred, base, path, follow).and_then(|node| self.attr_of(&node)) {
                // It, or a directory on the way, lost its last name: as if the call had come a little later.
                Err(e) if e.errno() == libc::ESTALE => continue,
                done => return done,
            }
        }
        Err(Error::new(libc::ENOENT, "walk::stat"))
    }

    /// The attributes of an entry that is loaded and needs no further walk.
    #[inline]
    fn stat_in(&self, cred: &Cred, dir: &Inode, name: &[u8], follow: bool) -> Option<Attr> {
        let body = dir.body.read();
        let found = body.dir().ok()?.lookup_and(name, |ino| self.table.prefetch_line(ino.0))?;
        super::attr::permit(cred, &body, libc::X_OK as u32).ok()?;
        if follow && found.kind == Kind::Symlink {
            return None;
        }
        // It has a name here, and nobody takes that away before this lets go of the directory.
        if let Some(attr) = self.table.line(found.ino.0).read(found.ino, found.generation) {
            return Some(attr);
        }
        let entry = self.table.entry(found.ino.0);
        let pin = pin();
        let inode = entry.node.get(&pin).filter(|inode| inode.generation == found.generation)?;
        let child = inode.body.read();
        Some(inode.attr(&child, entry.links()))
    }

    /// Walks all but the last component: the directory and the last name (without trailing slashes;
    /// "." and ".." and an empty name are returned as they are, the operation refuses them).
    pub fn walk_parent<'p>(
        &self,
        cred: &Cred,
        base: Option<&Node>,
        path: &'p [u8],
    ) -> Result<(Node, &'p [u8])> {
        self.walk_parent_on(cred, base, path, &mut 0)
    }

    /// As [`walk_parent`](Fs::walk_parent), on a walk on which so many symbolic links were followed.
    pub(super) fn walk_parent_on<'p>(
        &self,
        cred: &Cred,
        base: Option<&Node>,
        path: &'p [u8],
        links: &mut u32,
    ) -> Result<(Node, &'p [u8])> {
        check_path(path)?;
        let trimmed = trim_slashes(path);
        let (dir_part, name) = split(trimmed);
        let dir = if trimmed.is_empty() {
            self.start_of(base, path)?
        } else {
            self.directory(cred, base, dir_part, links)?
        };
        if dir.kind != Kind::Directory {
            return Err(Error::new(libc::ENOTDIR, "walk::walk_parent"));
        }
        Ok((Node::new(dir), name))
    }

    fn start_of(&self, base: Option<&Node>, path: &[u8]) -> Result<Arc<Inode>> {
        match base {
            Some(node) if !path.starts_with(b"/") => Ok(node.inode.clone()),
            _ => self.inode(Ino::ROOT),
        }
    }

    /// The directory that `path` (all but a last component) names, remembered or walked; `links` as [`resolve`](Fs::resolve).
    #[inline]
    fn directory(
        &self,
        cred: &Cred,
        base: Option<&Node>,
        path: &[u8],
        links: &mut u32,
    ) -> Result<Arc<Inode>> {
        if let Some(node) = base.filter(|_| !path.starts_with(b"/")) {
            if path.is_empty() {
                return Ok(node.inode.clone());
            }
            return self.resolve(cred, self.start_of(base, path)?, path, true, links);
        }
        let namespace = self.namespace.load(Ordering::Acquire);
        let known = remembered(|last| last.filter(|l| l.holds(self, cred, path)).map(|l| l.dir.clone()));
        if let Some(dir) = known {
            return Ok(dir);
        }
        let before = *links;
        let dir = self.resolve(cred, self.inode(Ino::ROOT)?, path, true, links)?;
        if *links == before && dir.kind == Kind::Directory {
            let last = Remembered {
                fs: self.id,
                namespace,
                uid: cred.uid,
                gid: cred.gid,
                groups: cred.groups.clone(),
                enforce: cred.enforce,
                path: path.to_vec(),
                dir: dir.clone(),
            };
            let _ = LAST.try_with(|place| place.replace(Some(last)));
        }
        Ok(dir)
    }

    /// Walks component by component; `links` counts the symbolic links followed, from the whole path's beginning on.
    fn resolve(
        &self,
        cred: &Cred,
        from: Arc<Inode>,
        path: &[u8],
        follow: bool,
        links: &mut u32,
    ) -> Result<Arc<Inode>> {
        let mut at = from;
        let (mut path, mut walked) = (path.to_vec(), 0);
        loop {
            let rest = &path[walked..];
            let begin = rest.iter().position(|&c| c != b'/').unwrap_or(rest.len());
            if begin == rest.len() {
                // A slash at the end, also that of a symbolic link's target, wants a directory.
                if begin > 0 && at.kind != Kind::Directory {
                    return Err(Error::new(libc::ENOTDIR, "walk::resolve"));
                }
                return Ok(at);
            }
            let end = rest[begin..].iter().position(|&c| c == b'/').map_or(rest.len(), |n| begin + n);
            let child = {
                let body = at.body.read();
                self.child(cred, &at, &body, &rest[begin..end])?
            };
            let last = end == rest.len();
            if child.kind == Kind::Symlink && (!last || follow) {
                follow_one(links)?;
                let mut next = {
                    let body = child.body.read();
                    let Data::Symlink(target) = &body.data else { unreachable!("its kind says so") };
                    self.touch(&child, &body);
                    target.to_vec()
                };
                if next.starts_with(b"/") {
                    at = self.inode(Ino::ROOT)?;
                }
                // Longer than a path may be, but no more than forty targets and one path.
                next.extend_from_slice(&rest[end..]);
                (path, walked) = (next, 0);
                continue;
            }
            at = child;
            walked += end;
        }
    }
}

/// Counts a symbolic link that is about to be followed.
pub(super) fn follow_one(links: &mut u32) -> Result<()> {
    *links += 1;
    match *links {
        0..=SYMLINK_DEPTH_MAX => Ok(()),
        _ => Err(Error::new(libc::ELOOP, "walk::follow_one")),
    }
}

fn check_path(path: &[u8]) -> Result<()> {
    match path.len() {
        0 => Err(Error::new(libc::ENOENT, "walk::check_path")),
        n if n > PATH_BYTES_MAX => Err(Error::new(libc::ENAMETOOLONG, "walk::check_path")),
        _ => Ok(()),
    }
}

fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&c| c != b'/').map_or(0, |i| i + 1);
    &path[..end]
}

/// The directory part, its slash included, and the name behind it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    path.split_at(last_slash(path).map_or(0, |at| at + 1))
}

/// Eight bytes at a time: most names are longer than that.
#[inline]
fn last_slash(path: &[u8]) -> Option<usize> {
    const SLASHES: u64 = u64::from_ne_bytes([b'/'; 8]);
    const LOW_BITS: u64 = u64::from_ne_bytes([0x7f; 8]);
    let mut rest = path;
    while let Some((before, last)) = rest.split_last_chunk::<8>() {
        let differ = u64::from_le_bytes(*last) ^ SLASHES;
        // The highest bit of each byte that is a slash.
        let slashes = !(((differ & LOW_BITS) + LOW_BITS) | differ | LOW_BITS);
        if slashes != 0 {
            return Some(before.len() + 7 - slashes.leading_zeros() as usize / 8);
        }
        rest = before;
    }
    rest.iter().rposition(|&c| c == b'/')
}

#[cfg(test)]
mod tests {
    use super::last_slash;

    #[test]
    fn the_last_slash_is_found_wherever_it_stands() {
        // Bytes that differ from a slash in one bit, or are one with a carry from their neighbour.
        for other in [0, b'.', b'0', b'o', b'/' ^ 0x80, 0xff, b'/' - 8] {
            for len in 0..40 {
                let mut path = vec![other; len];
                assert_eq!(last_slash(&path), None, "{other:#x}, {len} bytes");
                for first in 0..len {
                    path[first] = b'/';
                    for last in first..len {
                        let before = std::mem::replace(&mut path[last], b'/');
                        assert_eq!(last_slash(&path), Some(last), "{other:#x}, {len} bytes");
                        path[last] = before;
                    }
                    path[first] = other;
                }
            }
        }
    }
}
