//! Names: look-up, create, link, unlink, rename, readdir. Each change commits with records in the
//! directories it touches and one fence.
//!
//! Link counts and `..` are DRAM only. So create is the new inode's slot and one add record, unlink
//! one remove record; a rename inside a directory is one add record that takes two other entries with
//! it, and between directories two records that name each other, both void without the other where
//! they are the last of their logs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::alloc::{Block, Class};
use super::attr::permit;
use super::dirindex::{COOKIE_FIRST, Dirent, Named};
use super::format::*;
use super::inode::{self, AddRecord, Body, Data, Inode, Partner};
use super::log::{Batch, Log, Owner};
use super::statline::Changing;
use super::withdraw::Removing;
use super::*;
use crate::limits::{LINKS_MAX, NAME_BYTES_MAX, SUBDIRECTORIES_MAX};
use crate::media::{Flushed, crc32c, prefetch};

const W: u32 = libc::W_OK as u32;
const X: u32 = libc::X_OK as u32;

/// What is to be made.
struct New<'a> {
    /// Type and permissions.
    mode: u32,
    umask: u32,
    rdev: u64,
    target: Option<&'a [u8]>,
    /// Takes an open besides the reference.
    open: bool,
}

/// What a rename leaves under the old name where it is asked to: to an overlay, that the layers below have none there.
const WHITEOUT: New = New { mode: libc::S_IFCHR, umask: 0, rdev: 0, target: None, open: false };

/// What a rename is to store besides the names that it moves.
struct Besides {
    /// What takes the old name, and its cookie there.
    whiteout: Option<(Arc<Inode>, u32)>,
    /// What of a full pool its records may take: of what makes something less than of what does not.
    class: Class,
    pending: Flushed,
}

/// An inode whose slot is stored but not named.
struct Made {
    inode: Arc<Inode>,
    /// As for an inode without a name: the caller sets the link count.
    attr: Attr,
    pending: Flushed,
}

impl<M: Media> Fs<M> {
    pub fn lookup(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<Attr> {
        let dir = self.inode(dir)?;
        let body = dir.body.read();
        let inode = self.child(cred, &dir, &body, name)?;
        if name == b".." {
            drop(body); // a parent's lock comes before its child's
            let parent = inode.body.read();
            if parent.dead {
                return Err(Error::new(libc::ESTALE, "namei::lookup"));
            }
            inode.uses.fetch_add(1, Ordering::AcqRel);
            return Ok(self.attr(&inode, &parent));
        }
        inode.uses.fetch_add(1, Ordering::AcqRel);
        if Arc::ptr_eq(&inode, &dir) {
            return Ok(self.attr(&inode, &body));
        }
        let child = inode.body.read();
        Ok(self.attr(&inode, &child))
    }

    /// An inode by number, for who has kept that alone (a file handle); takes a reference, as a look-up does. Whether it is still
    /// the same one its generation says. ESTALE where it has no name: a kernel asks for what it has not open itself, and what is in use
    /// then is what it has not given back yet.
    pub fn take(&self, ino: Ino) -> Result<Attr> {
        let stale = || Error::new(libc::ESTALE, "namei::take");
        if ino.0 == TABLE_INO || ino.0 >= self.slot_count.load(Ordering::Acquire) {
            return Err(stale());
        }
        // Of a slot that nobody has there is nothing to load.
        if self.table.entry(ino.0).links() == 0 {
            return Err(stale());
        }
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        if body.dead || self.links(&inode) == 0 {
            return Err(stale());
        }
        inode.uses.fetch_add(1, Ordering::AcqRel);
        Ok(self.attr(&inode, &body))
    }

    /// What stands for a generation where 32 bits are kept of it: in file handles, which outlive mounts.
    ///
    /// Half of it will not do: the count begins anew in every mount, and the mount is the same for all that it makes. A CRC differs for
    /// certain where two generations differ within 32 adjacent bits: those of one mount by the count, those of the same count
    /// by the mount. (Of others one in four billion is another's.) The key makes handles of another pool's files strangers.
    pub fn handle_number(&self, generation: u64) -> u32 {
        crc32c(&generation.to_le_bytes(), self.core.key_crc)
    }

    /// What `name` stands for in a directory whose lock the caller holds.
    #[inline]
    pub(super) fn child(
        &self,
        cred: &Cred,
        dir: &Arc<Inode>,
        body: &Body,
        name: &[u8],
    ) -> Result<Arc<Inode>> {
        let index = body.dir()?;
        permit(cred, body, X)?;
        let Some(entry) = index.lookup(name) else {
            return match name {
                b"." | b".." if body.dead => Err(Error::new(libc::ESTALE, "namei::child")),
                b"." => Ok(dir.clone()),
                // A removed directory keeps no parent: the number may be another inode's by now.
                b".." if self.links(dir) == 0 => Err(Error::new(libc::ENOENT, "namei::child")),
                b".." => self.inode(Ino(self.table.entry(dir.ino.0).parent.load(Ordering::Acquire))),
                _ => Err(absent(name)),
            };
        };
        self.named_by(dir, &entry)
    }

    /// What an entry leads to, of a directory whose lock the caller holds.
    #[inline]
    fn named_by(&self, dir: &Inode, entry: &Dirent) -> Result<Arc<Inode>> {
        let inode = self.inode(entry.ino)?;
        if !self.is_named_by(dir, entry.kind, &inode) || inode.generation != entry.generation {
            return Err(misled(dir));
        }
        Ok(inode)
    }

    /// The same without a count, and asked for whole before its lock is taken: a locked instruction keeps what is behind it from
    /// beginning.
    #[inline]
    fn named_pinned<'p>(&self, dir: &Inode, entry: &Dirent, pin: &'p Pin) -> Result<&'p Inode> {
        let inode = self.inode_pinned(entry.ino, pin)?;
        prefetch(inode);
        if !self.is_named_by(dir, entry.kind, inode) || inode.generation != entry.generation {
            return Err(misled(dir));
        }
        Ok(inode)
    }

    /// Whether an inode can be what a directory's entry of this type leads to. In an image that somebody made up it may be the
    /// directory itself or another that holds it, and whoever locked both in their order would wait for himself.
    #[inline]
    fn is_named_by(&self, dir: &Inode, kind: Kind, inode: &Inode) -> bool {
        let is_below = || self.table.entry(inode.ino.0).parent.load(Ordering::Acquire) == dir.ino.0;
        inode.kind == kind && inode.ino != dir.ino && (kind != Kind::Directory || is_below())
    }

    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        match &body.data {
            Data::Symlink(target) => {
                self.touch(&inode, &body);
                Ok(target.to_vec())
            }
            _ => Err(Error::new(libc::EINVAL, "namei::readlink")),
        }
    }

    /// `mode` holds type and permissions, umask not yet applied (a default ACL replaces it); `umask`
    /// is the caller's.
    pub fn mknod(
        &self,
        cred: &Cred,
        dir: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        rdev: u64,
    ) -> Result<Attr> {
        let mode = if mode & libc::S_IFMT == 0 { mode | libc::S_IFREG } else { mode };
        match Kind::from_mode(mode) {
            None | Some(Kind::Directory | Kind::Symlink) => {
                return Err(Error::new(libc::EINVAL, "namei::mknod"));
            }
            _ => {}
        }
        self.make(cred, dir, name, &New { mode, umask, rdev, target: None, open: false })
    }

    pub fn mkdir(&self, cred: &Cred, dir: Ino, name: &[u8], mode: u32, umask: u32) -> Result<Attr> {
        // As Linux: set-id bits come from the parent alone.
        let mode = libc::S_IFDIR | mode & 0o1777;
        self.make(cred, dir, name, &New { mode, umask, rdev: 0, target: None, open: false })
    }

    /// EINVAL for an empty target or one longer than a path.
    pub fn symlink(&self, cred: &Cred, dir: Ino, name: &[u8], target: &[u8]) -> Result<Attr> {
        if target.is_empty() {
            return Err(Error::new(libc::ENOENT, "namei::symlink"));
        }
        if target.len() > crate::limits::PATH_BYTES_MAX {
            return Err(Error::new(libc::ENAMETOOLONG, "namei::symlink"));
        }
        let mode = libc::S_IFLNK | 0o777;
        self.make(cred, dir, name, &New { mode, umask: 0, rdev: 0, target: Some(target), open: false })
    }

    /// open(O_CREAT): the bool says whether it was created. Takes a reference and an open.
    /// `flags` are open(2)'s; O_EXCL, O_TRUNC and the access mode are honoured.
    pub fn create(
        &self,
        cred: &Cred,
        dir: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        flags: i32,
    ) -> Result<(Attr, bool)> {
        let mode = libc::S_IFREG | mode & 0o7777;
        loop {
            match self.make(cred, dir, name, &New { mode, umask, rdev: 0, target: None, open: true }) {
                Err(e) if e.errno() == libc::EEXIST && flags & libc::O_EXCL == 0 => {}
                made => return Ok((made?, true)),
            }
            match self.lookup(cred, dir, name) {
                // It went in between; but for what every directory has, until the directory has gone itself.
                Err(e) if e.errno() == libc::ENOENT && !matches!(name, b"." | b"..") => continue,
                found => {
                    let found = found?;
                    let ino = found.ino;
                    let opened = match found.kind() {
                        Kind::Directory => Err(Error::new(libc::EISDIR, "namei::create")),
                        // What it leads to is opened with the rest of the flags.
                        Kind::Symlink => self.open_node(cred, ino, libc::O_RDONLY).map(|()| found),
                        _ => self.open_node(cred, ino, flags).and_then(|()| self.getattr(ino)),
                    };
                    return opened.map(|attr| (attr, false)).inspect_err(|_| self.forget(ino, 1));
                }
            }
        }
    }

    /// O_TMPFILE: a file without a name. Takes a reference and an open. A crash or a close of the pool
    /// ends it.
    pub fn tmpfile(&self, cred: &Cred, dir: Ino, mode: u32, umask: u32) -> Result<Attr> {
        let dir = self.inode(dir)?;
        if dir.kind != Kind::Directory {
            return Err(Error::new(libc::ENOTDIR, "namei::tmpfile"));
        }
        let new = New { mode: libc::S_IFREG | mode & 0o7777, umask, rdev: 0, target: None, open: true };
        let mut room = self.room();
        loop {
            let made = {
                let body = dir.body.read();
                let guard = self.core.enter()?;
                body.dir()?;
                self.check_grows(cred, &dir, &body)?;
                self.new_inode(cred, &body, (&new, 0), &guard, now()).map(|made| {
                    self.core.fence(made.pending);
                    made.inode.linkable.store(true, Ordering::Relaxed);
                    self.table.entry(made.inode.ino.0).nlink.store(0, Ordering::Release);
                    // In the epoch: a close, which waits for those inside, takes back what has no name.
                    self.table.fill(made.inode);
                    made.attr
                })
            };
            match made {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                made => return made,
            }
        }
    }

    fn make(&self, cred: &Cred, dir: Ino, name: &[u8], new: &New) -> Result<Attr> {
        check_name(name, libc::EEXIST)?;
        let pin = pin();
        let dir = self.inode_pinned(dir, &pin)?;
        let mut room = self.room();
        loop {
            let done = {
                let mut body = self.table.change(dir);
                let guard = self.core.enter().map_err(|e| existing(cred, &body, name, e))?;
                self.make_locked(cred, dir, &mut body, &guard, name, new)
            };
            match done {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                done => return done,
            }
        }
    }

    fn make_locked(
        &self,
        cred: &Cred,
        dir: &Inode,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
        new: &New,
    ) -> Result<Attr> {
        if body.dir()?.lookup(name).is_some() {
            permit(cred, body, X)?;
            return Err(Error::new(libc::EEXIST, "namei::make"));
        }
        self.check_grows(cred, dir, body)?;
        if cred.enforce && !cred.is_root() && is_device(new) {
            return Err(Error::new(libc::EPERM, "namei::make"));
        }
        let is_dir = new.mode & libc::S_IFMT == libc::S_IFDIR;
        let parent = self.table.entry(dir.ino.0);
        if is_dir && parent.links() >= SUBDIRECTORIES_MAX {
            return Err(Error::new(libc::EMLINK, "namei::make"));
        }
        let now = now();
        let links = 1 + is_dir as u32;
        let cookie = next_cookie(body)?;
        let made = self.new_inode(cred, body, (new, links), guard, now)?;
        let record = created(&made.inode, name, cookie, now);
        if let Err(e) = self.commit_add(dir, body, &record, guard, Class::Data, made.pending) {
            self.unmake(&made.inode);
            return Err(e);
        }
        self.enter_new(made.inode, dir, links);
        if is_dir {
            self.table.change_links(dir.ino.0, |links| links + 1);
        }
        self.tidy_log(dir, body, guard);
        Ok(made.attr)
    }

    /// A new inode has its name: it can be found.
    #[inline]
    fn enter_new(&self, inode: Arc<Inode>, dir: &Inode, links: u32) {
        let entry = self.table.entry(inode.ino.0);
        // Before the link count: whoever asks for the number finds this inode or none, and loads no other.
        self.table.fill(inode);
        entry.parent.store(dir.ino.0, Ordering::Release);
        entry.nlink.store(links, Ordering::Release);
    }

    /// Its name could not be stored: gives all back that a new inode has.
    #[cold]
    fn unmake(&self, inode: &Inode) {
        // Nothing of what was stored to it may come after what others store.
        self.core.fence(Flushed::issued());
        let mut unmade = self.table.change(inode);
        unmade.dead = true;
        self.free_contents(&mut unmade, None);
        unmade.log.free_all(&self.core, None);
        drop(unmade);
        self.slots.put(inode.ino.0, None);
    }

    /// Commits one add record and enters its name, in place of those that it says are gone; with it change the directory's
    /// times.
    #[inline]
    fn commit_add(
        &self,
        dir: &Inode,
        body: &mut Body,
        record: &AddRecord,
        guard: &epoch::Guard,
        class: Class,
        pending: Flushed,
    ) -> Result<()> {
        let enter = |body: &mut Body, placed| {
            for cookie in [record.moved, record.replaces] {
                if cookie != 0 {
                    body.dir_mut().remove_cookie(cookie);
                }
            }
            insert(body, record, placed);
            (body.mtime, body.ctime) = (record.mtime, record.mtime);
        };
        let mut lines = [Words::default(); inode::ADD_LINES_MAX];
        if let Some(count) = record.words(&mut lines) {
            let words = (Type::Add, &mut lines[..count]);
            let meanwhile = |body: &mut Body, seq| enter(body, (seq, count as u8));
            return self.commit_lines_and(dir, body, words, guard, class, pending, meanwhile);
        }
        let mut batch = Batch::new();
        record.encode(&mut batch);
        self.commit(dir, body, &mut batch, guard, class, pending)?;
        enter(body, batch.placed(0));
        Ok(())
    }

    /// A directory in which a name may appear: alive, and the caller may write and search it.
    fn check_grows(&self, cred: &Cred, dir: &Inode, body: &Body) -> Result<()> {
        if body.dead || self.links(dir) == 0 {
            return Err(Error::new(libc::ENOENT, "namei::check_grows"));
        }
        permit(cred, body, W | X)
    }

    /// Stores a new inode's slot and what its log must hold from the start. Not named yet: the caller
    /// fences, and gives the slot back if it fails.
    fn new_inode(
        &self,
        cred: &Cred,
        dir: &Body,
        (new, links): (&New, u32),
        guard: &epoch::Guard,
        now: u64,
    ) -> Result<Made> {
        let (mode, acls) = inherited(dir, new);
        let gid = if dir.mode & libc::S_ISGID != 0 { dir.gid } else { cred.gid };
        let ino = self.take_slot(guard)?;
        self.table.prefetch(ino);
        let header = SlotHeader {
            mode: set_gid_bit(cred, dir, mode, gid, new.mode),
            uid: cred.uid,
            gid,
            generation: self.core.generation(),
            rdev: new.rdev,
            btime: now,
        };
        let slot = self.slot(ino)?;
        let owner = Owner { ino, generation: header.generation, slot };
        let mut body = Body::new(&header, Log::new(self.core.key_crc, &owner));
        let mut batch = Batch::new();
        if let Some(target) = new.target {
            target_records(&mut batch, target);
            body.data = Data::Symlink(target.into());
        }
        let listed = acls.into_iter().try_for_each(|(name, acl)| {
            let value = acl.encode();
            let blocks = self.blocks_for(&value)?;
            super::xattr::value_record(&mut batch, name, &value, blocks, now);
            body.xattrs.push(inode::Xattr::new(name, &value, blocks));
            Ok(())
        });
        let stored = listed.and_then(|()| {
            let pending = self.core.media.store_lines(slot, &[header.encode(self.core.key_crc, ino)])?;
            if batch.is_empty() {
                return Ok(pending);
            }
            let first = batch.count() - body.xattrs.len();
            let logged = body.log.append(&self.core, &owner, &mut batch, guard.epoch(), Class::Data)?;
            for (i, x) in body.xattrs.iter_mut().enumerate() {
                x.place(batch.placed(first + i).0, batch.addr(first + i));
            }
            Ok(pending.and(logged))
        });
        match stored {
            Ok(pending) => {
                let born_lines = body.log.lines().min(u8::MAX as u32) as u8;
                let mut inode = inode::assemble(&header, &owner, body, now);
                inode.uses = AtomicU64::new(1 + new.open as u64);
                inode.born_lines = born_lines;
                let attr = inode.new_attr(links);
                Ok(Made { inode: self.table.share(inode, links), attr, pending })
            }
            Err(e) => {
                // Nothing of what was stored to them may come after what others store.
                self.core.fence(Flushed::issued());
                self.free_contents(&mut body, None);
                body.log.free_all(&self.core, None);
                self.slots.put(ino, None);
                Err(e)
            }
        }
    }

    fn take_slot(&self, guard: &epoch::Guard) -> Result<u32> {
        loop {
            if let Some(ino) = self.first_sound(|| self.slots.take()) {
                return Ok(ino);
            }
            // Others may take all that the table gained.
            if self.grow_table(guard).is_err() {
                match self.first_sound(|| self.slots.steal()) {
                    Some(ino) => return Ok(ino),
                    // Another thread gave back what it had, or took it to keep it.
                    None if self.slots.any() => continue,
                    None => return Err(Error::new(libc::ENOSPC, "namei::take_slot")),
                }
            }
        }
    }

    /// Of free slots the first that is in no block which failed. Those before it are nobody's until the pool is opened again.
    #[inline]
    fn first_sound(&self, mut next: impl FnMut() -> Option<u32>) -> Option<u32> {
        let is_bad = |ino| {
            self.core.media.any()
                && self.slot(ino).is_ok_and(|at| self.core.media.is_bad(Block((at.0 / BLOCK as u64) as u32)))
        };
        loop {
            match next() {
                Some(ino) if is_bad(ino) => continue,
                found => return found,
            }
        }
    }

    pub fn link(&self, cred: &Cred, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        check_name(name, libc::EEXIST)?;
        let (inode, dir) = (self.inode(ino)?, self.inode(dir)?);
        let mut room = self.room();
        loop {
            let done = {
                let mut body = self.table.change(&dir);
                let guard = self.core.enter().map_err(|e| existing(cred, &body, name, e))?;
                self.link_locked(cred, &inode, &dir, &mut body, &guard, name)
            };
            match done {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                done => return done,
            }
        }
    }

    fn link_locked(
        &self,
        cred: &Cred,
        inode: &Arc<Inode>,
        dir: &Arc<Inode>,
        body: &mut Body,
        guard: &epoch::Guard,
        name: &[u8],
    ) -> Result<Attr> {
        if body.dir()?.lookup(name).is_some() {
            permit(cred, body, X)?;
            return Err(Error::new(libc::EEXIST, "namei::link"));
        }
        self.check_grows(cred, dir, body)?;
        if inode.kind == Kind::Directory {
            return Err(Error::new(libc::EPERM, "namei::link"));
        }
        let mut child = self.table.change(inode);
        let entry = self.table.entry(inode.ino.0);
        let nameless = entry.links() == 0;
        if child.dead || nameless && !inode.linkable.load(Ordering::Relaxed) {
            return Err(Error::new(libc::ENOENT, "namei::link"));
        }
        if entry.links() >= LINKS_MAX {
            return Err(Error::new(libc::EMLINK, "namei::link"));
        }
        let now = now();
        let cookie = next_cookie(body)?;
        let record = AddRecord { flags: 0, ..created(inode, name, cookie, now) };
        self.commit_add(dir, body, &record, guard, Class::Data, Flushed::issued())?;
        (body.mtime, body.ctime) = (now, now);
        self.table.change_links(inode.ino.0, |links| links + 1);
        child.ctime = now;
        inode.set_ctime_ahead();
        inode.uses.fetch_add(1, Ordering::AcqRel);
        let attr = self.attr(inode, &child);
        drop(child);
        self.tidy_log(dir, body, guard);
        Ok(attr)
    }

    /// EISDIR for a directory.
    pub fn unlink(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<()> {
        self.remove(cred, dir, name, false)
    }

    /// ENOTEMPTY, ENOTDIR, EINVAL for ".", as rmdir(2).
    pub fn rmdir(&self, cred: &Cred, dir: Ino, name: &[u8]) -> Result<()> {
        match name {
            b"." => return Err(Error::new(libc::EINVAL, "namei::rmdir")),
            b".." => return Err(Error::new(libc::ENOTEMPTY, "namei::rmdir")),
            _ => {}
        }
        self.remove(cred, dir, name, true)
    }

    fn remove(&self, cred: &Cred, dir: Ino, name: &[u8], want_dir: bool) -> Result<()> {
        check_old_name(name, libc::EISDIR)?;
        let remove = |how| {
            // Its record may find the pool full, and what waits for a sync make room.
            self.with_room(|| {
                let pin = pin();
                let dir = self.inode_pinned(dir, &pin)?;
                let victim = {
                    let mut body = self.table.change(dir);
                    let guard = self.core.enter()?;
                    let remove = |body: &mut Body| {
                        self.remove_locked(cred, dir, body, (&guard, &pin), (name, want_dir), how)
                    };
                    let mut victim = remove(&mut body);
                    if is_full(&victim) && self.make_room_in_log(dir, &mut body, &guard) {
                        victim = remove(&mut body);
                    }
                    let victim = victim?;
                    self.tidy_log(dir, &mut body, &guard);
                    if self.core.alloc.is_short() {
                        self.give_dead_parts_back(dir, &mut body, &guard);
                    }
                    victim
                };
                self.reclaim_if_unused(victim);
                Ok(())
            })
        };
        let is_refused = |removed: &Result<()>| is_full(removed) && !super::offload::is_put_off();
        let removed = remove(Removing::Recorded(Class::Release));
        if !is_refused(&removed) {
            return removed;
        }
        // What is kept for removals alone is for those that nothing else makes room for.
        if self.core.deferring {
            self.make_room_over_syncs(dir)?;
        }
        let removed = remove(Removing::Recorded(Class::Last));
        if !is_refused(&removed) || !self.withdraws() {
            return removed;
        }
        remove(Removing::Withdrawn)
    }

    pub(super) fn reclaim_if_unused(&self, inode: &Inode) {
        let links = &self.table.entry(inode.ino.0).nlink;
        if inode.uses.load(Ordering::SeqCst) == 0 && links.load(Ordering::SeqCst) == 0 {
            self.reclaim(inode, false);
        }
    }

    fn remove_locked<'p>(
        &self,
        cred: &Cred,
        dir: &Inode,
        body: &mut Body,
        (guard, pin): (&epoch::Guard, &'p Pin),
        (name, want_dir): (&[u8], bool),
        how: Removing,
    ) -> Result<&'p Inode> {
        permit(cred, body, X)?;
        let entry = body.dir()?.lookup(name).ok_or_else(|| absent(name))?;
        permit(cred, body, W | X)?;
        let victim = self.named_pinned(dir, &entry, pin)?;
        let mut child = self.table.change(victim);
        check_removable(cred, body, &child)?;
        match (victim.kind == Kind::Directory, want_dir) {
            (true, false) => return Err(Error::new(libc::EISDIR, "namei::remove")),
            (false, true) => return Err(Error::new(libc::ENOTDIR, "namei::remove")),
            (true, true) if !child.dir()?.is_empty() => {
                return Err(Error::new(libc::ENOTEMPTY, "namei::remove"));
            }
            _ => {}
        }
        self.keep_times(victim, guard)?;
        let now = now();
        let forget = |body: &mut Body, _| {
            body.dir_mut().remove(name);
            (body.mtime, body.ctime) = (now, now);
        };
        match how {
            Removing::Recorded(class) => {
                if self.core.media.refuses_removals() {
                    return Err(Error::new(libc::ENOSPC, "namei::remove"));
                }
                let mut line = [remove_line(&entry, now)];
                let (record, pending) = ((Type::Remove, &mut line[..]), Flushed::issued());
                self.commit_lines_and(dir, body, record, guard, class, pending, forget)?;
            }
            Removing::Withdrawn => {
                self.withdraw(dir, body, &entry)?;
                dir.set_ctime_ahead();
                forget(body, 0);
            }
        }
        self.unlinked(dir, victim, &mut child, now);
        drop(child);
        Ok(victim)
    }

    /// One name of `victim` in `dir` is gone.
    fn unlinked(&self, dir: &Inode, victim: &Inode, child: &mut Body, now: u64) {
        child.ctime = now;
        victim.set_ctime_ahead();
        victim.linkable.store(false, Ordering::Relaxed);
        let is_dir = victim.kind == Kind::Directory;
        let before = self.table.change_links(victim.ino.0, |links| if is_dir { 0 } else { links - 1 });
        if is_dir {
            self.table.change_links(dir.ino.0, |links| links - 1);
            self.namespace.fetch_add(1, Ordering::AcqRel);
        } else if before > 1 {
            self.left.lock().entry(dir.ino.0).or_default().push((victim.ino.0, victim.generation));
        }
    }

    /// Before records of a directory go, with its log or by cleaning: change times that stand in them alone, of
    /// files that lost a name there and have others, go into their own logs. (On an ordinary file nothing orders
    /// those two: there a power loss may bring back an older time.) Of a full pool they take no more than leaves removals
    /// enough: then memory alone has them, until a close finds room. The caller has the directory's lock, and no file's.
    pub(super) fn keep_times(&self, dir: &Inode, guard: &epoch::Guard) -> Result<()> {
        if dir.kind != Kind::Directory {
            return Ok(());
        }
        let Some(left) = self.left.lock().remove(&dir.ino.0) else { return Ok(()) };
        for (ino, generation) in left {
            // Another inode of that number may be a directory that the caller has locked.
            let Some(inode) = self.table.entry(ino).node.share().filter(|i| i.generation == generation)
            else {
                continue;
            };
            let mut body = self.table.change(&inode);
            if body.dead || !inode.ctime_ahead.load(Ordering::Relaxed) {
                continue;
            }
            let mut batch = Batch::new();
            body.attr_record(inode.atime.load(Ordering::Relaxed), 0, &mut batch);
            match self.append(&inode, &mut body, &mut batch, guard, Class::Release) {
                Ok(flushed) => {
                    inode.set_attrs_logged();
                    // Before others append behind it.
                    self.core.fence(flushed);
                }
                Err(e) if e.errno() == libc::ENOSPC => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// `flags`: 0, `RENAME_NOREPLACE` or `RENAME_EXCHANGE`, or `RENAME_WHITEOUT`, which may stand with the first: a character device
    /// 0:0 takes the old name in the same step. Others are EINVAL.
    pub fn rename(
        &self,
        cred: &Cred,
        from: Ino,
        name: &[u8],
        to: Ino,
        newname: &[u8],
        flags: u32,
    ) -> Result<()> {
        if !types::is_rename(flags) {
            return Err(Error::new(libc::EINVAL, "namei::rename"));
        }
        check_old_name(name, libc::EBUSY)?;
        check_old_name(newname, libc::EBUSY)?;
        let mut two_directories = false;
        let mut room = self.room();
        loop {
            let pin = pin();
            let (from, to) = (self.inode_pinned(from, &pin)?, self.inode_pinned(to, &pin)?);
            let done = {
                let names = (name, newname);
                if from.ino == to.ino {
                    let _tree = two_directories.then(|| self.rename_lock.lock());
                    let mut body = self.table.change(from);
                    if !two_directories && names_directory(&body, name) && names_directory(&body, newname) {
                        two_directories = true;
                        continue;
                    }
                    let guard = self.core.enter()?;
                    let rename =
                        |body: &mut Body| self.rename_in(cred, from, body, (&guard, &pin), names, flags);
                    let done = rename(&mut body);
                    match is_full(&done) && self.make_room_in_log(from, &mut body, &guard) {
                        true => rename(&mut body),
                        false => done,
                    }
                } else {
                    let _tree = self.rename_lock.lock();
                    let (mut a, mut b) = self.lock_two(from, to);
                    let guard = self.core.enter()?;
                    self.rename_between(cred, (from, &mut a), (to, &mut b), (&guard, &pin), names, flags)
                }
            };
            match done {
                Ok(Some(replaced)) => {
                    self.reclaim_if_unused(replaced);
                    return Ok(());
                }
                Ok(None) => return Ok(()),
                Err(e) => {
                    drop(pin);
                    if e.errno() != libc::ENOSPC || !self.make_room(&mut room) {
                        return Err(e);
                    }
                }
            }
        }
    }

    /// Locks two directories, an ancestor first. The caller holds the rename lock.
    fn lock_two<'a>(&'a self, a: &'a Inode, b: &'a Inode) -> (Changing<'a>, Changing<'a>) {
        let a_first =
            self.is_ancestor(a.ino.0, b.ino.0) || !self.is_ancestor(b.ino.0, a.ino.0) && a.ino < b.ino;
        if a_first {
            let first = self.table.change(a);
            (first, self.table.change(b))
        } else {
            let first = self.table.change(b);
            (self.table.change(a), first)
        }
    }

    /// Locks what a rename moves and replaces. A directory goes before a file, which may have a name in it.
    /// Files with names in several directories may come in any order, so the lower number goes first. So it
    /// does of two directories, and their caller holds the rename lock: the order by numbers and the one from
    /// parent to child are no order together, unless only one thread uses the first.
    fn lock_children<'a>(
        &'a self,
        moved: &'a Inode,
        replaced: Option<&'a Inode>,
    ) -> (Changing<'a>, Option<Changing<'a>>) {
        let place = |inode: &Inode| (inode.kind != Kind::Directory, inode.ino);
        match replaced {
            Some(r) if place(r) < place(moved) => {
                let first = self.table.change(r);
                (self.table.change(moved), Some(first))
            }
            _ => (self.table.change(moved), replaced.map(|r| self.table.change(r))),
        }
    }

    /// Whether `a` is `b` or above it. The caller holds the rename lock, so the tree stands still.
    fn is_ancestor(&self, a: u32, mut b: u32) -> bool {
        let end = self.slot_count.load(Ordering::Acquire);
        // A forged checkpoint may say that directories are above one another.
        for _ in 0..end {
            if a == b {
                return true;
            }
            // The last one was removed.
            if b == ROOT_INO || b == TABLE_INO || b >= end {
                return false;
            }
            b = self.table.entry(b).parent.load(Ordering::Acquire);
        }
        false
    }

    /// Finds what a rename moves and replaces, and checks everything that does not need locks on them.
    #[allow(clippy::type_complexity)]
    fn rename_entries(
        &self,
        cred: &Cred,
        (from_dir, from): (&Inode, &Body),
        (to_dir, to): (&Inode, &Body),
        (name, newname): (&[u8], &[u8]),
        flags: u32,
    ) -> Result<Option<(Dirent, Option<Dirent>)>> {
        let fail = |errno| Err(Error::new(errno, "namei::rename"));
        let (from_index, to_index) = (from.dir()?, to.dir()?);
        permit(cred, from, X)?;
        permit(cred, to, X)?;
        let source = from_index.lookup(name).ok_or_else(|| absent(name))?;
        if newname.len() > NAME_BYTES_MAX {
            return fail(libc::ENAMETOOLONG);
        }
        let target = to_index.lookup(newname);
        match target {
            Some(_) if flags & RENAME_NOREPLACE != 0 => return fail(libc::EEXIST),
            None if flags == RENAME_EXCHANGE => return fail(libc::ENOENT),
            _ => {}
        }
        let is_dir = |e: &Dirent| e.kind == Kind::Directory;
        let between = from_dir.ino != to_dir.ino;
        if between && is_dir(&source) && self.is_ancestor(source.ino.0, to_dir.ino.0) {
            return fail(libc::EINVAL);
        }
        if between && target.is_some_and(|t| is_dir(&t) && self.is_ancestor(t.ino.0, from_dir.ino.0)) {
            return fail(if flags == RENAME_EXCHANGE { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        if target.is_some_and(|t| t.ino == source.ino) {
            return Ok(None); // two names of one file: nothing happens
        }
        if from.dead || to.dead || self.links(to_dir) == 0 || self.links(from_dir) == 0 {
            return fail(libc::ENOENT);
        }
        permit(cred, from, W | X)?;
        let exchange = flags == RENAME_EXCHANGE;
        let target_is_dir = target.is_some_and(|t| is_dir(&t));
        let gains = is_dir(&source) && !target_is_dir && self.links(to_dir) >= SUBDIRECTORIES_MAX
            || exchange && !is_dir(&source) && target_is_dir && self.links(from_dir) >= SUBDIRECTORIES_MAX;
        if between && gains {
            return fail(libc::EMLINK);
        }
        Ok(Some((source, target)))
    }

    /// Permission to move and replace, with the locks of both inodes; what is replaced must be of the same
    /// kind, a directory empty. In the kernel's order: all of the source first.
    #[allow(clippy::too_many_arguments)]
    fn check_rename(
        &self,
        cred: &Cred,
        from: &Body,
        to: &Body,
        moved: &Body,
        replaced: Option<&Body>,
        between: bool,
        flags: u32,
    ) -> Result<()> {
        let is_dir = |body: &Body| matches!(body.data, Data::Dir(_));
        let exchange = flags == RENAME_EXCHANGE;
        check_removable(cred, from, moved)?;
        permit(cred, to, W | X)?;
        if let Some(replaced) = replaced {
            check_removable(cred, to, replaced)?;
            match (is_dir(moved), is_dir(replaced)) {
                (true, false) if !exchange => return Err(Error::new(libc::ENOTDIR, "namei::rename")),
                (false, true) if !exchange => return Err(Error::new(libc::EISDIR, "namei::rename")),
                _ => {}
            }
        }
        if between && is_dir(moved) {
            permit(cred, moved, W)?; // its ".." changes
        }
        match replaced.map(|r| (r, &r.data)) {
            Some((r, Data::Dir(_))) if exchange && between => permit(cred, r, W),
            Some((_, Data::Dir(d))) if !exchange && !d.is_empty() => {
                Err(Error::new(libc::ENOTEMPTY, "namei::rename"))
            }
            _ => Ok(()),
        }
    }

    /// Makes the whiteout that a rename from this directory is to leave, if it is. The caller enters it, or unmakes it.
    fn besides(
        &self,
        cred: &Cred,
        from: &Body,
        guard: &epoch::Guard,
        now: u64,
        flags: u32,
    ) -> Result<Besides> {
        if flags & RENAME_WHITEOUT == 0 {
            return Ok(Besides { whiteout: None, class: Class::Release, pending: Flushed::issued() });
        }
        let cookie = next_cookie(from)?;
        let Made { inode, pending, .. } = self.new_inode(cred, from, (&WHITEOUT, 1), guard, now)?;
        Ok(Besides { whiteout: Some((inode, cookie)), class: Class::Data, pending })
    }

    /// The old name is stored, with its whiteout, or could not be.
    fn end_whiteout(&self, whiteout: Option<(Arc<Inode>, u32)>, from: &Inode, stored: &Result<()>) {
        let Some((inode, _)) = whiteout else { return };
        match stored {
            Ok(()) => {
                self.enter_new(inode.clone(), from, 1);
                self.put(&inode, 1);
            }
            Err(_) => self.unmake(&inode),
        }
    }

    /// Inside one directory: one record, or two in one operation for an exchange or a whiteout.
    fn rename_in<'p>(
        &self,
        cred: &Cred,
        dir: &Inode,
        body: &mut Body,
        (guard, pin): (&epoch::Guard, &'p Pin),
        names: (&[u8], &[u8]),
        flags: u32,
    ) -> Result<Option<&'p Inode>> {
        let Some((source, target)) = self.rename_entries(cred, (dir, body), (dir, body), names, flags)?
        else {
            return Ok(None);
        };
        let moved = self.named_pinned(dir, &source, pin)?;
        let replaced = target.map(|t| self.named_pinned(dir, &t, pin)).transpose()?;
        let (mut moved_body, mut replaced_body) = self.lock_children(moved, replaced);
        self.check_rename(cred, body, body, &moved_body, replaced_body.as_deref(), false, flags)?;
        if let Some(replaced) = replaced.filter(|_| flags != RENAME_EXCHANGE) {
            self.keep_times(replaced, guard)?;
        }
        let now = now();
        let exchange = target.filter(|_| flags == RENAME_EXCHANGE);
        let Besides { whiteout, class, pending } = self.besides(cred, body, guard, now, flags)?;
        let first = AddRecord {
            replaces: target.map_or(0, |t| t.cookie),
            moved: if exchange.is_some() { 0 } else { source.cookie },
            ..named(&source, names.1, target.map_or(source.cookie, |t| t.cookie), now)
        };
        let second = match (exchange, &whiteout) {
            (Some(t), _) => {
                Some(AddRecord { replaces: source.cookie, ..named(&t, names.0, source.cookie, now) })
            }
            (None, Some((inode, cookie))) => Some(created(inode, names.0, *cookie, now)),
            (None, None) => None,
        };
        match second {
            Some(second) => {
                let mut batch = Batch::new();
                first.encode(&mut batch);
                second.encode(&mut batch);
                let stored = self.commit(dir, body, &mut batch, guard, class, pending).map(drop);
                self.end_whiteout(whiteout, dir, &stored);
                stored?;
                for gone in [Some(source), target].into_iter().flatten() {
                    body.dir_mut().remove_cookie(gone.cookie);
                }
                insert(body, &first, batch.placed(0));
                insert(body, &second, batch.placed(1));
                (body.mtime, body.ctime) = (now, now);
            }
            None => self.commit_add(dir, body, &first, guard, Class::Release, Flushed::issued())?,
        }
        stamp(moved, &mut moved_body, now);
        if let (Some(r), Some(rb)) = (replaced, &mut replaced_body) {
            if exchange.is_some() {
                stamp(r, rb, now);
            } else {
                self.unlinked(dir, r, rb, now);
            }
        }
        if moved.kind == Kind::Directory || replaced.is_some_and(|r| r.kind == Kind::Directory) {
            self.namespace.fetch_add(1, Ordering::AcqRel);
        }
        drop((moved_body, replaced_body));
        self.tidy_log(dir, body, guard);
        Ok(replaced.filter(|_| exchange.is_none()))
    }

    /// Between two directories: a record in each, which name each other, and one fence.
    fn rename_between<'p>(
        &self,
        cred: &Cred,
        (from_dir, from): (&Inode, &mut Body),
        (to_dir, to): (&Inode, &mut Body),
        (guard, pin): (&epoch::Guard, &'p Pin),
        names: (&[u8], &[u8]),
        flags: u32,
    ) -> Result<Option<&'p Inode>> {
        let entries = self.rename_entries(cred, (from_dir, from), (to_dir, to), names, flags)?;
        let Some((source, target)) = entries else { return Ok(None) };
        let moved = self.named_pinned(from_dir, &source, pin)?;
        let replaced = target.map(|t| self.named_pinned(to_dir, &t, pin)).transpose()?;
        let (mut moved_body, mut replaced_body) = self.lock_children(moved, replaced);
        self.check_rename(cred, from, to, &moved_body, replaced_body.as_deref(), true, flags)?;
        if let Some(replaced) = replaced.filter(|_| flags != RENAME_EXCHANGE) {
            self.keep_times(replaced, guard)?;
        }
        let now = now();
        let transaction = self.core.transaction();
        let partner = |dir: &Inode, body: &Body| {
            Some(Partner { generation: dir.generation, ino: dir.ino.0, seq: body.log.seq(), transaction })
        };
        let exchange = target.filter(|_| flags == RENAME_EXCHANGE);
        let cookie = target.map_or_else(|| next_cookie(to), |t| Ok(t.cookie))?;
        let Besides { whiteout, class, pending } = self.besides(cred, from, guard, now, flags)?;
        let added = AddRecord {
            replaces: target.map_or(0, |t| t.cookie),
            partner: partner(from_dir, from),
            ..named(&source, names.1, cookie, now)
        };
        let (mut to_batch, mut from_batch) = (Batch::new(), Batch::new());
        added.encode(&mut to_batch);
        let back = match (exchange, &whiteout) {
            (Some(t), _) => Some(AddRecord {
                replaces: source.cookie,
                partner: partner(to_dir, to),
                ..named(&t, names.0, source.cookie, now)
            }),
            (None, Some((inode, cookie))) => Some(AddRecord {
                moved: source.cookie,
                partner: partner(to_dir, to),
                ..created(inode, names.0, *cookie, now)
            }),
            (None, None) => None,
        };
        match &back {
            Some(add) => add.encode(&mut from_batch),
            None => {
                let r = from_batch.record(Type::RemoveMoved, field::remove::PARTNER + field::partner::BYTES);
                remove_fields(r, &source, now);
                partner(to_dir, to).expect("always").encode(&mut r[field::remove::PARTNER..]);
            }
        }
        let to_log = (to_dir, &mut *to, &mut to_batch);
        let from_log = (from_dir, &mut *from, &mut from_batch);
        let stored = self.commit_two(to_log, from_log, guard, (class, pending));
        self.end_whiteout(whiteout, from_dir, &stored);
        stored?;
        if let Some(t) = target {
            to.dir_mut().remove_cookie(t.cookie);
        }
        from.dir_mut().remove_cookie(source.cookie);
        insert(to, &added, to_batch.placed(0));
        if let Some(add) = &back {
            insert(from, add, from_batch.placed(0));
        }
        (from.mtime, from.ctime, to.mtime, to.ctime) = (now, now, now, now);
        stamp(moved, &mut moved_body, now);
        if let (Some(r), Some(rb)) = (replaced, &mut replaced_body) {
            if exchange.is_some() {
                stamp(r, rb, now);
                self.adopted(r, to_dir, from_dir);
            } else {
                self.unlinked(to_dir, r, rb, now);
            }
        }
        self.adopted(moved, from_dir, to_dir);
        drop((moved_body, replaced_body));
        self.tidy_log(to_dir, to, guard);
        self.tidy_log(from_dir, from, guard);
        Ok(replaced.filter(|_| exchange.is_none()))
    }

    /// Appends to two logs with one fence. Neither is touched if there is no space for both.
    fn commit_two(
        &self,
        (a_dir, a, a_batch): (&Inode, &mut Body, &mut Batch),
        (b_dir, b, b_batch): (&Inode, &mut Body, &mut Batch),
        guard: &epoch::Guard,
        (class, pending): (Class, Flushed),
    ) -> Result<()> {
        let (core, epoch) = (&self.core, guard.epoch());
        let a_room = a.log.reserve(core, a_batch, class)?;
        let b_room = match b.log.reserve(core, b_batch, class) {
            Ok(room) => room,
            Err(e) => {
                a_room.give_back(core);
                return Err(e);
            }
        };
        let appended =
            a.log.append_reserved(core, &a_dir.owner(), a_batch, epoch, a_room).and_then(|first| {
                if core.media.omits("a rename's second record is stored") {
                    return Ok(first);
                }
                let second = b.log.append_reserved(core, &b_dir.owner(), b_batch, epoch, b_room)?;
                Ok(first.and(second))
            });
        let flushed = appended.inspect_err(|e| core.poison(e))?;
        core.fence(pending.and(flushed));
        core.paired.fetch_max(epoch, Ordering::Release);
        Ok(())
    }

    /// A directory moved: its parent and the parents' link counts follow.
    fn adopted(&self, inode: &Inode, from: &Inode, to: &Inode) {
        if inode.kind == Kind::Directory {
            self.table.entry(inode.ino.0).parent.store(to.ino.0, Ordering::Release);
            self.table.change_links(from.ino.0, |links| links - 1);
            self.table.change_links(to.ino.0, |links| links + 1);
            self.namespace.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Calls `each` for the entries behind the one with `cookie` until it answers false: from 0 on "." and ".." (cookies 1 and
    /// 2), then the others, the newest first. So a listing comes to its end whatever is made meanwhile, and what stays, under
    /// whatever name in this directory, is met once. `each` must not call the file system. ENOENT for a directory that was
    /// removed.
    pub fn readdir(&self, ino: Ino, cookie: u64, each: &mut dyn FnMut(&DirEntry) -> bool) -> Result<()> {
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        let index = body.dir()?;
        if body.dead || self.links(&inode) == 0 {
            return Err(Error::new(libc::ENOENT, "namei::readdir"));
        }
        self.touch(&inode, &body);
        let parent = Ino(self.table.entry(ino.0).parent.load(Ordering::Acquire));
        for (i, (ino, name)) in [(ino, b".".as_slice()), (parent, b"..")].into_iter().enumerate() {
            let dot = DirEntry { ino, cookie: i as u64 + 1, kind: Kind::Directory, name };
            if cookie <= i as u64 && !each(&dot) {
                return Ok(());
            }
        }
        let below = if cookie < COOKIE_FIRST as u64 { u64::MAX } else { cookie };
        for Named { name, entry: e } in index.iter_below(below) {
            if !each(&DirEntry { ino: e.ino, cookie: e.cookie as u64, kind: e.kind, name }) {
                break;
            }
        }
        Ok(())
    }

    /// As [`readdir`](Fs::readdir) with attributes, taking a reference for each entry that has some and for
    /// which `each` answers true. "." and ".." have none, for they cost locks and nobody uses them; nor has
    /// an inode that cannot be read: its name is no less there.
    pub fn readdir_plus(
        &self,
        ino: Ino,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> Result<()> {
        // Entries cannot go while the directory's lock is held, so their inodes can be taken.
        let dir = self.inode(ino)?;
        self.readdir(ino, cookie, &mut |entry| {
            if entry.name == b"." || entry.name == b".." {
                return each(entry, None);
            }
            let named = self.inode(entry.ino).ok().filter(|inode| self.is_named_by(&dir, entry.kind, inode));
            let Some(inode) = named else { return each(entry, None) };
            let attr = self.attr(&inode, &inode.body.read());
            inode.uses.fetch_add(1, Ordering::AcqRel);
            let taken = each(entry, Some(&attr));
            if !taken {
                inode.uses.fetch_sub(1, Ordering::AcqRel);
            }
            taken
        })
    }
}

#[cold]
fn misled(dir: &Inode) -> Error {
    let message = format!(
        "an entry of directory {} leads to what it is not: lode fsck --repair removes or mends it",
        dir.ino.0
    );
    Error::message(libc::EUCLEAN, "namei::named_by", message)
}

/// Why a name cannot be made where nothing can be changed: before all it may be there already.
#[cold]
fn existing(cred: &Cred, dir: &Body, name: &[u8], refused: Error) -> Error {
    let searched = dir.dir().and_then(|index| permit(cred, dir, X).map(|()| index.lookup(name)));
    match searched {
        Ok(Some(_)) => Error::new(libc::EEXIST, "namei::existing"),
        Ok(None) => refused,
        Err(e) => e,
    }
}

/// What only the superuser makes. A character device without a number, a whiteout, is none.
fn is_device(new: &New) -> bool {
    match new.mode & libc::S_IFMT {
        libc::S_IFBLK => true,
        libc::S_IFCHR => new.rdev != 0,
        _ => false,
    }
}

/// `dots` is the errno for "." and "..".
fn check_name(name: &[u8], dots: i32) -> Result<()> {
    let errno = match name {
        b"" => libc::ENOENT,
        b"." | b".." => dots,
        _ if name.len() > NAME_BYTES_MAX => libc::ENAMETOOLONG,
        _ if name.iter().fold(false, |bad, &c| bad | (c == b'/') | (c == 0)) => libc::EINVAL,
        _ => return Ok(()),
    };
    Err(Error::new(errno, "namei::check_name"))
}

/// As [`check_name`] for a name that is looked up anyway: then one too long is found to be so.
fn check_old_name(name: &[u8], dots: i32) -> Result<()> {
    check_name(&name[..name.len().min(NAME_BYTES_MAX)], dots)
}

/// Whether that failed for want of room.
#[inline]
fn is_full<T>(done: &Result<T>) -> bool {
    done.as_ref().is_err_and(|e| e.errno() == libc::ENOSPC)
}

/// What a name is that no entry has.
#[cold]
fn absent(name: &[u8]) -> Error {
    let too_long = name.len() > NAME_BYTES_MAX;
    Error::new(if too_long { libc::ENAMETOOLONG } else { libc::ENOENT }, "namei::absent")
}

/// In a sticky directory only the owner of the entry or of the directory removes it; what is fixed keeps its names.
fn check_removable(cred: &Cred, dir: &Body, child: &Body) -> Result<()> {
    let free = dir.mode & libc::S_ISVTX == 0
        || !cred.enforce
        || cred.is_root()
        || cred.uid == child.uid
        || cred.uid == dir.uid;
    match free {
        true if child.fixed => Err(super::fixed::keeps_its_name()),
        true => Ok(()),
        false => Err(Error::new(libc::EPERM, "namei::check_removable")),
    }
}

/// Mode and access lists of a new inode: from the directory's default list, or through the umask.
fn inherited(dir: &Body, new: &New) -> (u32, Vec<(&'static [u8], super::acl::Acl)>) {
    if new.target.is_some() {
        return (new.mode, Vec::new());
    }
    let Some(default) = super::acl::default(dir) else {
        return (new.mode & !(new.umask & 0o777), Vec::new());
    };
    let (access, mode) = default.inherit(new.mode);
    let mut acls = Vec::new();
    if !access.is_minimal() {
        acls.push((super::acl::ACCESS, access));
    }
    if mode & libc::S_IFMT == libc::S_IFDIR {
        acls.push((super::acl::DEFAULT, default));
    }
    (mode, acls)
}

/// Directories pass their setgid bit on; an executable file has one only if its maker is in the group.
/// Whether it is executable the mode `asked` for decides, before the umask.
fn set_gid_bit(cred: &Cred, dir: &Body, mode: u32, gid: u32, asked: u32) -> u32 {
    if mode & libc::S_IFMT == libc::S_IFDIR {
        return mode | dir.mode & libc::S_ISGID;
    }
    let keeps = !cred.enforce || cred.is_root() || cred.in_group(gid);
    if mode & libc::S_ISGID != 0 && asked & libc::S_IXGRP != 0 && !keeps {
        mode & !libc::S_ISGID
    } else {
        mode
    }
}

/// The target of a symbolic link, in one record or, if it is very long, two.
fn target_records(batch: &mut Batch, target: &[u8]) {
    let longest = RECORD_LINES_MAX as usize * crate::media::LINE - field::symlink::TARGET;
    for (i, part) in target.chunks(longest).enumerate() {
        let r = batch.record(Type::Symlink, field::symlink::TARGET + part.len());
        put16(r, field::symlink::LEN, part.len() as u16);
        put16(r, field::symlink::OFFSET, (i * longest) as u16);
        r[field::symlink::TARGET..field::symlink::TARGET + part.len()].copy_from_slice(part);
    }
}

/// A cookie for a name that the directory does not have yet.
fn next_cookie(body: &Body) -> Result<u32> {
    body.dir()?.next_cookie().ok_or_else(|| Error::new(libc::ENOSPC, "namei::next_cookie"))
}

/// The entry under another name.
fn named<'a>(e: &Dirent, name: &'a [u8], cookie: u32, now: u64) -> AddRecord<'a> {
    AddRecord::new(e.ino, e.generation, e.kind, name, cookie, now)
}

/// The entry of an inode that is made for it.
#[inline]
fn created<'a>(inode: &Inode, name: &'a [u8], cookie: u32, now: u64) -> AddRecord<'a> {
    AddRecord {
        flags: field::add::CREATE,
        lines: inode.born_lines,
        ..AddRecord::new(inode.ino, inode.generation, inode.kind, name, cookie, now)
    }
}

fn insert(body: &mut Body, record: &AddRecord, (seq, lines): (u32, u8)) {
    let entry = Dirent {
        ino: Ino(record.ino),
        generation: record.generation,
        kind: Kind::from_dtype(record.kind).expect("made from an inode"),
        cookie: record.cookie,
        seq,
        lines,
    };
    body.dir_mut().insert(record.name, entry).expect("the name was free under this lock");
}

/// A remove record as the words of its line.
fn remove_line(e: &Dirent, now: u64) -> Words {
    [0, 0, e.generation, now, e.ino.0 as u64 | (e.cookie as u64) << 32, 0, 0, 0]
}

fn remove_fields(r: &mut [u8], e: &Dirent, now: u64) {
    put64(r, field::remove::GENERATION, e.generation);
    put64(r, field::remove::MTIME, now);
    put32(r, field::remove::INO, e.ino.0);
    put32(r, field::remove::COOKIE, e.cookie);
}

/// Whether the name is that of a directory.
fn names_directory(body: &Body, name: &[u8]) -> bool {
    body.dir().is_ok_and(|d| d.lookup(name).is_some_and(|e| e.kind == Kind::Directory))
}

fn stamp(inode: &Inode, body: &mut Body, now: u64) {
    body.ctime = now;
    inode.set_ctime_ahead();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::LINE;
    use crate::sim::media::SimMedia;

    fn open(image: Vec<u8>) -> Arc<Fs<SimMedia>> {
        open_as(image, Domain::Memory)
    }

    fn open_as(image: Vec<u8>, domain: Domain) -> Arc<Fs<SimMedia>> {
        let options = OpenOptions { no_ticker: true, ..OpenOptions::default() };
        Fs::open(SimMedia::new(image, domain), &options).unwrap()
    }

    #[test]
    fn an_epoch_with_half_a_rename_is_not_named() {
        let cred = Cred::root();
        let fs = open(
            Fs::mkfs(SimMedia::new(vec![0; 1 << 20], Domain::Memory), &MkfsOptions::default())
                .unwrap()
                .image(),
        );
        let a = fs.mkdir(&cred, Ino::ROOT, b"a", 0o755, 0).unwrap().ino;
        let b = fs.mkdir(&cred, Ino::ROOT, b"b", 0o755, 0).unwrap().ino;
        let x = fs.create(&cred, a, b"x", 0o644, 0, 0).unwrap().0.ino;
        let names = (b"x".as_slice(), b"x".as_slice());
        let (from, to) = (fs.inode(a).unwrap(), fs.inode(b).unwrap());

        // Another thread ends the epoch while a rename is inside, which then fails at its second record.
        let guard = fs.core.enter().unwrap();
        let settled = std::thread::scope(|s| {
            let settling = s.spawn(|| fs.tick());
            while fs.core.epochs.current() == guard.epoch() {
                std::thread::yield_now();
            }
            let second = from.slot.0 as usize + 2 * LINE; // behind the record of x's creation
            fs.media().poison(second..from.slot.0 as usize + SLOT);
            let (mut a, mut b) = (fs.table.change(&from), fs.table.change(&to));
            let pin = pin();
            let renamed = fs.rename_between(&cred, (&from, &mut a), (&to, &mut b), (&guard, &pin), names, 0);
            assert_eq!(renamed.map(drop).unwrap_err().errno(), libc::EIO);
            drop((a, b, guard));
            settling.join().unwrap()
        });
        assert_eq!(settled.map_err(|e| e.errno()), Err(libc::EIO));

        let crashed = open(fs.media().image());
        assert_eq!(crashed.lookup(&cred, a, b"x").map(|a| a.ino).ok(), Some(x));
        assert_eq!(crashed.lookup(&cred, b, b"x").map(|a| a.ino).map_err(|e| e.errno()), Err(libc::ENOENT));
    }

    fn fresh(domain: Domain) -> Arc<Fs<SimMedia>> {
        let media = SimMedia::new(vec![0; 1 << 20], domain);
        open_as(Fs::mkfs(media, &MkfsOptions::default()).unwrap().image(), domain)
    }

    /// Both halves of a generation come again: the mount in all that it makes, the count in every mount.
    #[test]
    fn no_two_files_of_a_number_have_one_handle() {
        let cred = Cred::root();
        let mut image = fresh(Domain::Memory).media().image();
        let mut seen = std::collections::HashSet::new();
        for mount in 0..20 {
            let fs = open(image);
            for n in 0..50 {
                let made = fs.create(&cred, Ino::ROOT, b"f", 0o644, 0, 0).unwrap().0;
                assert!(seen.insert(fs.handle_number(made.generation)), "file {n} of mount {mount}");
                fs.unlink(&cred, Ino::ROOT, b"f").unwrap();
            }
            fs.close().unwrap();
            image = fs.media().image();
        }
    }

    #[test]
    fn parents_that_go_round_in_a_circle_end_a_rename() {
        let cred = Cred::root();
        let fs = fresh(Domain::Memory);
        let [a, b, c] =
            [b"a", b"b", b"c"].map(|name| fs.mkdir(&cred, Ino::ROOT, name, 0o755, 0).unwrap().ino);
        fs.create(&cred, a, b"x", 0o644, 0, 0).unwrap();
        // As a forged checkpoint may say.
        fs.table.entry(a.0).parent.store(b.0, Ordering::Relaxed);
        fs.table.entry(b.0).parent.store(a.0, Ordering::Relaxed);
        fs.rename(&cred, a, b"x", c, b"x", 0).unwrap();
        assert_eq!(fs.lookup(&cred, c, b"x").map(|attr| attr.nlink).ok(), Some(1));
    }

    #[test]
    fn who_followed_a_link_that_is_gone_leaves_the_access_time_of_its_heir_alone() {
        let cred = Cred::root();
        let fs = fresh(Domain::Memory);
        let link = fs.symlink(&cred, Ino::ROOT, b"link", b"target").unwrap().ino;
        fs.forget(link, 1);
        let followed = fs.inode(link).unwrap();
        fs.unlink(&cred, Ino::ROOT, b"link").unwrap();
        let heir = fs.create(&cred, Ino::ROOT, b"heir", 0o644, 0, 0).unwrap().0.ino;
        assert_eq!(heir, link, "its number was given anew");
        let old = SetAttr {
            atime: Some(types::SetTime::To(types::Time { sec: 7, nsec: 0 })),
            ..SetAttr::default()
        };
        fs.setattr(&cred, heir, &old).unwrap();
        fs.touch(&followed, &followed.body.read());
        let stat = fs.stat(&cred, None, b"/heir", true).unwrap();
        assert_eq!((stat.atime.sec, fs.getattr(heir).unwrap().atime.sec), (7, 7));
    }

    /// What an old head leads to is not given to anybody before a new one is durable, however many epochs end between two syncs.
    #[test]
    fn what_a_log_began_with_stays_until_its_new_head_is_durable() {
        let cred = Cred::root();
        let fs = fresh(Domain::PageCache);
        let f = fs.create(&cred, Ino::ROOT, b"f", 0o644, 0, 0).unwrap().0.ino;
        let slot = fs.inode(f).unwrap().slot;
        let head = || fs.core.media.load64(slot.add(LOG_HEAD_OFFSET)).unwrap();
        let chmod = |n: u32| {
            let mode = Some(0o600 | (n % 64));
            fs.setattr(&cred, f, &SetAttr { mode, ..SetAttr::default() }).unwrap();
        };
        // Its log begins in a segment.
        let mut n = 0;
        while head() == 0 {
            chmod(n);
            n += 1;
            if n.is_multiple_of(50) {
                fs.tick().unwrap();
            }
        }
        (0..3).for_each(|_| fs.tick().unwrap());
        let old = log::addr_mini(unpack_log_head(head()).unwrap());
        while fs.core.head_moves.lock().is_empty() {
            chmod(n);
            n += 1;
        }
        let is_free = || {
            let minis: Vec<_> = std::iter::from_fn(|| fs.core.alloc.alloc_mini(Class::Last)).collect();
            let runs: Vec<_> = std::iter::from_fn(|| fs.core.alloc.alloc(1, Class::Last, None)).collect();
            let found = minis.contains(&old) || runs.iter().any(|run| run.start == old.block);
            minis.into_iter().for_each(|mini| fs.core.alloc.free_mini(mini));
            runs.into_iter().for_each(|run| fs.core.free(run, None));
            found
        };
        fs.core.epochs.advance();
        fs.tick().unwrap();
        assert!(!is_free());
        fs.tick().unwrap();
        assert_ne!(
            log::addr_mini(unpack_log_head(head()).unwrap()),
            old,
            "the head is moved, and not yet durable"
        );
        assert!(!is_free());
        (0..2).for_each(|_| fs.tick().unwrap());
        assert!(is_free());
    }
}
