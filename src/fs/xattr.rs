//! Extended attributes: small values in their record, large ones in blocks of their own.

use super::acl::{self, Acl};
use super::alloc::{Class, Run};
use super::fixed::FIXED;
use super::format::*;
use super::inode::{Body, Data, Xattr, value_crc};
use super::log::{Batch, block_addr};
use super::*;
use crate::limits::{NAME_BYTES_MAX, XATTR_LIST_BYTES_MAX, XATTR_VALUE_BYTES_MAX};
use crate::media::Flushed;

/// Largest value that stands in its record, in bytes.
const INLINE_BYTES_MAX: usize = 2048;
pub(super) const CAPABILITY: &[u8] = b"security.capability";

impl<M: Media> Fs<M> {
    /// The value. ENODATA where there is none.
    pub fn getxattr(&self, cred: &Cred, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        check_length(name)?;
        if name == FIXED {
            return self.fixed_text(ino);
        }
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        permit_name(cred, &body, name, false)?;
        check_name(&body, name)?;
        let x = body.xattrs.iter().find(|x| *x.name == *name);
        let x = x.ok_or_else(|| Error::new(libc::ENODATA, "xattr::getxattr"))?;
        if name == acl::ACCESS
            && let Some(acl) = acl::access(&body)
        {
            return Ok(acl.encode());
        }
        match &x.list {
            Some(list) => Ok(list.to_vec()),
            None => self.value_of(&inode, x),
        }
    }

    /// Reads and verifies a value. The caller holds the inode's lock, so it stays where it is.
    fn value_of(&self, inode: &Inode, x: &Xattr) -> Result<Vec<u8>> {
        let mut value = vec![0; x.len as usize];
        self.core.media.read(x.at, &mut value)?;
        if !self.core.media.verified(&[(x.at, value.len())], value_crc(&value) == x.crc) {
            let name = String::from_utf8_lossy(&x.name);
            let what = format!("attribute {name} of inode {} is damaged on media", inode.ino.0);
            return Err(Error::message(libc::EIO, "xattr::getxattr", what));
        }
        Ok(value)
    }

    /// Names, each closed by a NUL. `trusted.` names show to the superuser alone, [`FIXED`] to nobody.
    pub fn listxattr(&self, cred: &Cred, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        let mut list = Vec::new();
        let shows = |x: &&Xattr| (cred.is_root() || !x.name.starts_with(b"trusted.")) && *x.name != *FIXED;
        for x in body.xattrs.iter().filter(shows) {
            list.extend_from_slice(&x.name);
            list.push(0);
        }
        Ok(list)
    }

    /// `flags`: 0, XATTR_CREATE or XATTR_REPLACE. Durable and atomic.
    pub fn setxattr(&self, cred: &Cred, ino: Ino, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        check_setting(name, value, flags)?;
        if name == FIXED {
            return self.fix_by_text(cred, ino, value, flags);
        }
        let inode = self.inode(ino)?;
        self.with_room(|| {
            let mut body = self.table.change(&inode);
            let guard = self.core.enter()?;
            let done = self.set_locked(cred, &inode, &mut body, &guard, name, value, flags);
            self.tidy_log(&inode, &mut body, &guard);
            done
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn set_locked(
        &self,
        cred: &Cred,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        check_alive(body)?;
        if acl::is_list(name) {
            return self.set_acl(cred, inode, body, guard, name, value); // whatever the flags
        }
        permit_name(cred, body, name, true)?;
        check_name(body, name)?;
        let old = body.xattrs.iter().position(|x| *x.name == *name);
        if flags & libc::XATTR_CREATE != 0 && old.is_some() {
            return Err(Error::new(libc::EEXIST, "xattr::setxattr"));
        }
        if flags & libc::XATTR_REPLACE != 0 && old.is_none() {
            return Err(Error::new(libc::ENODATA, "xattr::setxattr"));
        }
        self.store(inode, body, guard, name, value, Batch::new())
    }

    /// A list that the mode can say is not kept; the mode follows an access list. An empty one removes what
    /// is there, if anything. Errors come in the kernel's order.
    fn set_acl(
        &self,
        cred: &Cred,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
        value: &[u8],
    ) -> Result<()> {
        let list = Acl::parse(value)?;
        check_name(body, name)?;
        if name == acl::DEFAULT && !matches!(body.data, Data::Dir(_)) {
            let refused = Err(Error::new(libc::EACCES, "xattr::set_acl"));
            return if list.is_some() { refused } else { Ok(()) };
        }
        if cred.enforce && !cred.is_root() && cred.uid != body.uid {
            return Err(Error::new(libc::EPERM, "xattr::set_acl"));
        }
        list.as_ref().map_or(Ok(()), Acl::check)?;
        if list.is_none() && !body.xattrs.iter().any(|x| *x.name == *name) {
            return Ok(());
        }
        self.namespace.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
        let old = (body.mode, body.ctime);
        let mut batch = Batch::new();
        if name == acl::ACCESS
            && let Some(acl) = &list
        {
            body.mode = body.mode & !0o777 | acl.mode();
            if !cred.is_root() && !cred.in_group(body.gid) {
                body.mode &= !libc::S_ISGID;
            }
        }
        body.ctime = now();
        body.attr_record(inode.atime.load(Ordering::Relaxed), 0, &mut batch);
        let keep = list.as_ref().filter(|acl| name == acl::DEFAULT || !acl.is_minimal());
        let done = match keep {
            Some(acl) => self.store(inode, body, guard, name, &acl.encode(), batch),
            None => self.unset(inode, body, guard, name, batch),
        };
        if done.is_err() {
            (body.mode, body.ctime) = old;
        }
        done
    }

    /// Commits a new value, and what `batch` holds already.
    fn store(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
        value: &[u8],
        mut batch: Batch,
    ) -> Result<()> {
        let others = body.xattrs.iter().filter(|x| *x.name != *name).map(|x| x.name.len() + 1);
        if others.sum::<usize>() + name.len() + 1 > XATTR_LIST_BYTES_MAX {
            return Err(Error::new(libc::ENOSPC, "xattr::store"));
        }
        let blocks = self.blocks_for(value)?;
        let now = now();
        let at = batch.count();
        value_record(&mut batch, name, value, blocks, now);
        if let Err(e) = self.commit(inode, body, &mut batch, guard, Class::Data, Flushed::issued()) {
            if let Some(run) = blocks {
                self.core.free(run, None);
            }
            return Err(e);
        }
        let mut x = Xattr::new(name, value, blocks);
        x.place(batch.placed(at).0, batch.addr(at));
        self.drop_value(body, guard, name);
        body.xattrs.push(x);
        body.ctime = now;
        Ok(())
    }

    /// Where a value stands that is too large for its record: stored, durably.
    pub(super) fn blocks_for(&self, value: &[u8]) -> Result<Option<Run>> {
        (value.len() > INLINE_BYTES_MAX).then(|| self.store_blocks(value)).transpose()
    }

    /// Stores a large value, durably, in one run.
    fn store_blocks(&self, value: &[u8]) -> Result<Run> {
        let count = value.len().div_ceil(BLOCK) as u32;
        let full = || Error::new(libc::ENOSPC, "xattr::store_blocks");
        let run = self.core.alloc.alloc(count, Class::Data, None).ok_or_else(full)?;
        let run = if run.count == count {
            run
        } else {
            // That looked at some of the pool only.
            self.core.free(run, None);
            self.core.alloc.alloc_whole(count).ok_or_else(full)?
        };
        match self.core.media.copy_nt(block_addr(run.start), value) {
            Ok(flushed) => {
                self.core.fence(flushed);
                Ok(run)
            }
            Err(fault) => {
                self.core.free(run, None);
                Err(fault.into())
            }
        }
    }

    /// Forgets a value in DRAM and frees its blocks; the record that replaces it is durable.
    fn drop_value(&self, body: &mut Body, guard: &epoch::Guard, name: &[u8]) {
        if let Some(i) = body.xattrs.iter().position(|x| *x.name == *name) {
            let x = body.xattrs.swap_remove(i);
            if let Some(run) = x.blocks {
                self.core.free(run, self.core.reuse_after(guard));
            }
        }
    }

    pub fn removexattr(&self, cred: &Cred, ino: Ino, name: &[u8]) -> Result<()> {
        if acl::is_list(name) {
            return self.setxattr(cred, ino, name, &[], 0);
        }
        check_length(name)?;
        if name == FIXED {
            return self.unfix(cred, ino);
        }
        let inode = self.inode(ino)?;
        self.with_room(|| {
            let mut body = self.table.change(&inode);
            let guard = self.core.enter()?;
            check_alive(&body)?;
            permit_name(cred, &body, name, true)?;
            check_name(&body, name)?;
            if !body.xattrs.iter().any(|x| *x.name == *name) {
                return Err(Error::new(libc::ENODATA, "xattr::removexattr"));
            }
            let done = self.unset(&inode, &mut body, &guard, name, Batch::new());
            self.tidy_log(&inode, &mut body, &guard);
            done
        })
    }

    /// A fixed file is one like others from now on.
    pub(super) fn remove_mark(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard) -> Result<()> {
        self.unset(inode, body, guard, FIXED, Batch::new())?;
        body.fixed = false;
        Ok(())
    }

    /// Commits the removal of a value, if there is one, and what `batch` holds already.
    fn unset(
        &self,
        inode: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
        mut batch: Batch,
    ) -> Result<()> {
        let now = now();
        if body.xattrs.iter().any(|x| *x.name == *name) {
            removal_record(&mut batch, name, now);
        }
        self.commit(inode, body, &mut batch, guard, Class::Release, Flushed::issued())?;
        self.drop_value(body, guard, name);
        body.ctime = now;
        Ok(())
    }

    /// File capabilities do not survive a change of the data: their removal joins the change.
    pub(super) fn drop_capability(&self, body: &Body, batch: &mut Batch) -> bool {
        let has = has_capability(body);
        if has {
            removal_record(batch, CAPABILITY, now());
        }
        has
    }

    pub(super) fn capability_dropped(&self, body: &mut Body, guard: &epoch::Guard) {
        self.drop_value(body, guard, CAPABILITY);
    }
}

#[inline]
pub(super) fn has_capability(body: &Body) -> bool {
    !body.xattrs.is_empty() && body.xattrs.iter().any(|x| *x.name == *CAPABILITY)
}

/// Puts a record that sets an attribute into `batch`.
pub(super) fn value_record(batch: &mut Batch, name: &[u8], value: &[u8], blocks: Option<Run>, now: u64) {
    let inline: &[u8] = if blocks.is_some() { &[] } else { value };
    let end = field::xattr::NAME + name.len();
    let r = batch.record(Type::Xattr, end + inline.len());
    put64(r, field::xattr::CTIME, now);
    put32(r, field::xattr::VALUE_LEN, value.len() as u32);
    put32(r, field::xattr::CRC, value_crc(value));
    r[field::xattr::NAME_LEN] = name.len() as u8;
    r[field::xattr::NAME..end].copy_from_slice(name);
    r[end..end + inline.len()].copy_from_slice(inline);
    if let Some(run) = blocks {
        put32(r, field::xattr::BLOCK, run.start.0);
        r[field::xattr::FLAGS] = field::xattr::IN_BLOCKS;
    }
}

fn removal_record(batch: &mut Batch, name: &[u8], now: u64) {
    let r = batch.record(Type::Xattr, field::xattr::NAME + name.len());
    put64(r, field::xattr::CTIME, now);
    r[field::xattr::NAME_LEN] = name.len() as u8;
    r[field::xattr::FLAGS] = field::xattr::REMOVE;
    r[field::xattr::NAME..field::xattr::NAME + name.len()].copy_from_slice(name);
}

/// What is wrong with a name whatever it is set on.
pub(super) fn check_length(name: &[u8]) -> Result<()> {
    match name.len() {
        1..=NAME_BYTES_MAX => Ok(()),
        _ => Err(Error::new(libc::ERANGE, "xattr::check_length")),
    }
}

/// What is wrong with an attribute to be set whatever it is set on.
pub(super) fn check_setting(name: &[u8], value: &[u8], flags: i32) -> Result<()> {
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
        return Err(Error::new(libc::EINVAL, "xattr::check_setting"));
    }
    check_length(name)?;
    if value.len() > XATTR_VALUE_BYTES_MAX {
        return Err(Error::new(libc::E2BIG, "xattr::check_setting"));
    }
    Ok(())
}

/// The namespaces that there are: EOPNOTSUPP for others, EINVAL for one alone.
fn check_name(body: &Body, name: &[u8]) -> Result<()> {
    let namespace =
        [b"user.".as_slice(), b"trusted.", b"security."].into_iter().find(|p| name.starts_with(p));
    let list = acl::is_list(name);
    let errno = match namespace {
        Some(prefix) if name.len() == prefix.len() => libc::EINVAL,
        None if !list || matches!(body.data, Data::Symlink(_)) => libc::EOPNOTSUPP,
        _ => return Ok(()),
    };
    Err(Error::new(errno, "xattr::check_name"))
}

fn check_alive(body: &Body) -> Result<()> {
    if body.dead { Err(Error::new(libc::ESTALE, "xattr::check_alive")) } else { Ok(()) }
}

/// The kernel's rules: who may read or write an attribute of this name.
fn permit_name(cred: &Cred, body: &Body, name: &[u8], write: bool) -> Result<()> {
    let not_permitted =
        || Err(Error::new(if write { libc::EPERM } else { libc::ENODATA }, "xattr::permit_name"));
    if name.starts_with(b"user.") {
        if !matches!(body.data, Data::File(_) | Data::Dir(_)) {
            return not_permitted();
        }
        let sticky = matches!(body.data, Data::Dir(_)) && body.mode & libc::S_ISVTX != 0;
        if cred.enforce && write && sticky && !cred.is_root() && cred.uid != body.uid {
            return not_permitted();
        }
        return super::attr::permit(cred, body, if write { libc::W_OK } else { libc::R_OK } as u32);
    }
    if !cred.enforce || cred.is_root() || name.starts_with(b"system.") {
        return Ok(());
    }
    if name.starts_with(b"trusted.") || write && name.starts_with(b"security.") {
        return not_permitted();
    }
    if name.starts_with(b"security.") {
        return Ok(());
    }
    super::attr::permit(cred, body, if write { libc::W_OK } else { libc::R_OK } as u32)
}
