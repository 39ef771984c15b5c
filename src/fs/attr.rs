//! Attributes: stat, chmod, chown, utimens, truncate, access; and the kernel's permission rules.

use std::sync::atomic::Ordering;

use super::alloc::{Class, Runs};
use super::format::*;
use super::inode::{Body, Data};
use super::log::Batch;
use super::write::{check_writable, set_gid_that_falls, set_id_that_falls};
use super::*;
use crate::limits::FILE_BYTES_MAX;
use crate::media::Flushed;

impl<M: Media> Fs<M> {
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        self.attr_of(&Node::new(self.inode(ino)?))
    }

    pub fn attr_of(&self, node: &Node) -> Result<Attr> {
        let body = node.inode.body.read();
        if body.dead {
            return Err(Error::new(libc::ESTALE, "attr::attr_of"));
        }
        Ok(self.attr(&node.inode, &body))
    }

    pub fn node(&self, ino: Ino) -> Result<Node> {
        self.inode(ino).map(Node::new)
    }

    /// chmod, chown, utimens and truncate in one durable, atomic step. Nothing set is a chown that names
    /// neither user nor group: it takes set-id bits all the same.
    pub fn setattr(&self, cred: &Cred, ino: Ino, set: &SetAttr) -> Result<Attr> {
        self.setattr_node(cred, &Node::new(self.inode(ino)?), set)
    }

    pub fn setattr_node(&self, cred: &Cred, node: &Node, set: &SetAttr) -> Result<Attr> {
        self.with_room(|| self.try_setattr(cred, node, set))
    }

    fn try_setattr(&self, cred: &Cred, node: &Node, set: &SetAttr) -> Result<Attr> {
        let inode = &node.inode;
        let mut body = match set.size {
            Some(_) => self.change_at_rest(inode),
            None => self.table.change(inode),
        };
        let guard = self.core.enter()?;
        let body = &mut *body;
        if body.dead {
            return Err(Error::new(libc::ESTALE, "attr::setattr"));
        }
        let now = now();
        check_setattr(cred, body, set)?;
        let before = (body.mode, body.uid, body.gid, body.mtime, body.ctime, body.size);
        let old_atime = inode.atime.load(Ordering::Relaxed);
        let atime = change(cred, body, set, old_atime, now);
        let mut batch = Batch::new();
        let uncaps = set.size.is_some() || set.is_chown() && inode.kind != Kind::Directory;
        let uncapped = uncaps && self.drop_capability(body, &mut batch);
        let done = match set.size {
            Some(size) => self.resize(inode, body, &guard, size, atime, before.5, &mut batch),
            None => {
                body.attr_record(atime, 0, &mut batch);
                self.commit(inode, body, &mut batch, &guard, Class::Release, Flushed::issued()).map(|_| ())
            }
        };
        if let Err(e) = done {
            (body.mode, body.uid, body.gid, body.mtime, body.ctime, body.size) = before;
            return Err(e);
        }
        if uncapped {
            self.capability_dropped(body, &guard);
        }
        if atime != old_atime {
            self.table.set_atime(inode, atime);
        }
        inode.set_attrs_logged();
        if inode.kind == Kind::Directory {
            self.namespace.fetch_add(1, Ordering::AcqRel); // who may search it may have changed
        }
        self.tidy_log(inode, body, &guard);
        Ok(self.attr(inode, body))
    }

    /// Sets the size: blocks behind it go; what lies between the old end and a larger one reads as
    /// zeros, whatever stood in the last block before.
    #[allow(clippy::too_many_arguments)]
    fn resize(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        size: u64,
        atime: u64,
        old: u64,
        batch: &mut Batch,
    ) -> Result<()> {
        check_writable(body)?;
        if size > FILE_BYTES_MAX {
            return Err(Error::new(libc::EFBIG, "attr::resize"));
        }
        const PAGE: u64 = BLOCK as u64;
        let mut fresh = Runs::new();
        let tail = match self.settle_tail(body, size, batch, &mut fresh) {
            Ok(tail) => tail,
            Err(e) => return Err(self.give_back(&fresh, e)),
        };
        body.size = size;
        let grows = size > old;
        body.attr_record(atime, if grows { field::attr::GROW } else { field::attr::TRUNCATE }, batch);
        // It has to work on a full pool where it makes room.
        let makes_room = size.div_ceil(PAGE) < old.div_ceil(PAGE);
        let class = if makes_room { Class::Last } else { Class::Release };
        if let Err(e) = self.commit(inode, body, batch, guard, class, Flushed::issued()) {
            return Err(self.give_back(&fresh, e));
        }
        let reuse = self.core.reuse_after(guard);
        self.tail_settled(body, tail, reuse);
        if size < old {
            // Or somebody reads it just now.
            let is_read = self.core.copies.reads().touch(inode.ino.0, size / PAGE..u64::MAX);
            body.tail_shared = (self.core.deferring || is_read)
                && !size.is_multiple_of(PAGE)
                && !self.core.media.omits("what a truncate cut off is not written in place");
        }
        if !grows {
            let page = size.div_ceil(PAGE) as u32;
            body.file_mut().clear(page, u32::MAX - page, &mut |run, _| self.core.free(run, reuse));
        }
        Ok(())
    }

    /// As access(2): `mask` of `R_OK`, `W_OK`, `X_OK`.
    pub fn access(&self, cred: &Cred, ino: Ino, mask: i32) -> Result<()> {
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        let stored = matches!(inode.kind, Kind::File | Kind::Directory | Kind::Symlink);
        if mask & libc::W_OK != 0 && stored && self.core.read_only {
            return Err(Error::new(libc::EROFS, "attr::access"));
        }
        permit(cred, &body, mask as u32 & 7)
    }

    /// open(2) on an inode: permission by the access mode, O_TRUNC. Takes an open.
    pub fn open_node(&self, cred: &Cred, ino: Ino, flags: i32) -> Result<()> {
        self.open_inode(cred, &Node::new(self.inode(ino)?), flags)
    }

    /// [`Fs::open_node`] for callers that hold the node.
    pub fn open_inode(&self, cred: &Cred, node: &Node, flags: i32) -> Result<()> {
        let inode = &node.inode;
        let mode = flags & libc::O_ACCMODE;
        let writes = mode != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        {
            let body = inode.body.read();
            if body.dead {
                return Err(Error::new(libc::ESTALE, "attr::open_node"));
            }
            if writes && inode.kind == Kind::Directory {
                return Err(Error::new(libc::EISDIR, "attr::open_node"));
            }
            if writes && self.core.read_only && inode.kind == Kind::File {
                return Err(Error::new(libc::EROFS, "attr::open_node"));
            }
            let read = if mode == libc::O_WRONLY { 0 } else { libc::R_OK as u32 };
            permit(cred, &body, read | if writes { libc::W_OK as u32 } else { 0 })?;
            if flags & libc::O_NOATIME != 0 && cred.enforce && !cred.is_root() && cred.uid != body.uid {
                return Err(Error::new(libc::EPERM, "attr::open_node"));
            }
            inode.uses.fetch_add(1, Ordering::AcqRel);
        }
        if flags & libc::O_TRUNC != 0 && inode.kind == Kind::File {
            let truncated = self.truncate_opened(cred, node);
            if let Err(e) = truncated {
                self.put(inode, 1);
                return Err(e);
            }
        }
        Ok(())
    }

    /// Takes an open of a directory that names are looked up in: ESTALE where it has gone, EACCES where
    /// `cred` may not search it.
    pub(super) fn hold_directory(&self, cred: &Cred, node: &Node) -> Result<()> {
        let body = node.inode.body.read();
        if body.dead {
            return Err(Error::new(libc::ESTALE, "attr::hold_directory"));
        }
        permit(cred, &body, libc::X_OK as u32)?;
        node.inode.uses.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// O_TRUNC: times change even where the file is empty already; set-id bits go as for a write.
    fn truncate_opened(&self, cred: &Cred, node: &Node) -> Result<()> {
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        let unchecked = Cred { enforce: false, ..cred.clone() };
        self.setattr_node(&unchecked, node, &set).map(|_| ())
    }
}

/// Changes what setattr asks for (but the size); returns the new access time.
fn change(cred: &Cred, body: &mut Body, set: &SetAttr, atime: u64, now: u64) -> u64 {
    let old = body.mode;
    if let Some(mode) = set.mode {
        body.mode = old & libc::S_IFMT | mode & 0o7777;
        if cred.enforce && !cred.is_root() && !cred.in_group(set.gid.unwrap_or(body.gid)) {
            body.mode &= !libc::S_ISGID;
        }
    }
    if set.is_chown() {
        let falls = if set.mode.is_none() { falls_by_chown(cred, body) } else { 0 };
        body.mode &= !falls;
        body.uid = set.uid.unwrap_or(body.uid);
        body.gid = set.gid.unwrap_or(body.gid);
        if falls != 0 && cred.enforce && !cred.is_root() && !cred.in_group(body.gid) {
            body.mode &= !libc::S_ISGID; // as after a chmod
        }
    }
    if let Some(size) = set.size {
        if size != body.size || set.mtime.is_none() {
            body.mtime = now;
        }
        if set.mode.is_none() {
            body.mode &= !set_id_that_falls(cred, body);
        }
    }
    let time = |t: SetTime| match t {
        SetTime::Now => now,
        SetTime::To(t) => pack_time(Time::new(t.sec, t.nsec)),
    };
    if let Some(t) = set.mtime {
        body.mtime = time(t);
    }
    body.ctime = now;
    set.atime.map_or(atime, time)
}

/// What a new owner, even the same one, takes from anything but a directory, and even where root gives it
/// (as Linux does).
fn falls_by_chown(cred: &Cred, body: &Body) -> u32 {
    match body.data {
        Data::Dir(_) => 0,
        _ => body.mode & libc::S_ISUID | set_gid_that_falls(cred, body),
    }
}

/// The kernel's rules for chmod, chown, utimens and truncate.
fn check_setattr(cred: &Cred, body: &Body, set: &SetAttr) -> Result<()> {
    if set.size.is_some() {
        check_writable(body)?;
    }
    check_permitted(cred, body, set)?;
    match set.size {
        Some(size) if size > FILE_BYTES_MAX => Err(Error::new(libc::EFBIG, "attr::setattr")),
        _ => Ok(()),
    }
}

fn check_permitted(cred: &Cred, body: &Body, set: &SetAttr) -> Result<()> {
    if !cred.enforce || cred.is_root() {
        return Ok(());
    }
    let owner = cred.uid == body.uid;
    let not_permitted = || Err(Error::new(libc::EPERM, "attr::setattr"));
    if set.mode.is_some() && !owner {
        return not_permitted();
    }
    if set.is_chown() && !owner && falls_by_chown(cred, body) != 0 {
        return not_permitted();
    }
    if set.uid.is_some_and(|uid| uid != body.uid || !owner) {
        return not_permitted();
    }
    if set.gid.is_some_and(|gid| !owner || !(gid == body.gid || cred.in_group(gid))) {
        return not_permitted();
    }
    let explicit = |t: Option<SetTime>| matches!(t, Some(SetTime::To(_)));
    if !owner {
        if explicit(set.atime) || explicit(set.mtime) || set.atime.is_some() != set.mtime.is_some() {
            return not_permitted();
        }
        if set.atime.is_some() {
            permit(cred, body, libc::W_OK as u32)?;
        }
    }
    if set.size.is_some() {
        permit(cred, body, libc::W_OK as u32)?;
    }
    Ok(())
}

/// Whether `cred` may do `mask` (of R_OK, W_OK, X_OK): EACCES if not. The superuser may all but
/// execute what nobody may.
pub(super) fn permit(cred: &Cred, body: &Body, mask: u32) -> Result<()> {
    if !cred.enforce || mask == 0 {
        return Ok(());
    }
    if cred.is_root() {
        let searchable = matches!(body.data, Data::Dir(_)) || body.mode & 0o111 != 0;
        return if mask & 1 == 0 || searchable { Ok(()) } else { denied() };
    }
    let bits = if cred.uid == body.uid {
        body.mode >> 6
    } else if body.mode & 0o070 != 0
        && let Some(acl) = super::acl::access(body)
    {
        // Where the mask leaves nothing the kernel does not look at the list: those it names are others.
        return if acl.permits(cred, body, mask) { Ok(()) } else { denied() };
    } else if cred.in_group(body.gid) {
        body.mode >> 3
    } else {
        body.mode
    };
    if bits & mask == mask { Ok(()) } else { denied() }
}

#[cold]
fn denied() -> Result<()> {
    Err(Error::new(libc::EACCES, "attr::permit"))
}
