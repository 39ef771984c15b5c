//! Removing a name where no record of that finds room: the record that added it is *withdrawn*, with one store of eight bytes.
//!
//! The checksum of the record is changed by a constant ([`WITHDRAWN`]). Whoever reads it so takes it as the addition that it is,
//! and what it added as removed at once. So nothing has to be allocated, and no state of the pool refuses a removal.
//! (Not a pool of an older version: who reads that one would take the record for the end of its log.)
//!
//! On an ordinary file a store in place may be on the disk before all that came before it is: a directory would be gone, and with it
//! what had been moved out of it. So that is synced first, with nothing locked; and the name is withdrawn only if neither it nor what it
//! names was changed meanwhile. On persistent memory all that came before is durable.
//!
//! The time of the removal has no place on media. Memory has it, and the logs once there is room for it.

use super::alloc::Class;
use super::dirindex::Dirent;
use super::format::*;
use super::inode::{Body, Inode};
use super::*;
use crate::media::LINE;

/// How a removal becomes durable.
#[derive(Clone, Copy)]
pub(super) enum Removing {
    /// By a record.
    Recorded(Class),
    /// Without: on an ordinary file what came before was synced, and this was seen before that.
    Withdrawn(Option<Seen>),
}

/// A name and its inode, as far as others may change what a removal relies on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    inode: (Ino, u64),
    /// Number of the record that added the name.
    added: u32,
    log_end: u32,
    ctime: u64,
    links: u32,
}

impl<M: Media> Fs<M> {
    /// Whether names can be withdrawn from this pool.
    pub(super) fn withdraws(&self) -> bool {
        self.core.sb.version >= VERSION_WITHDRAWS
    }

    /// What has to be before a name is withdrawn; what was seen of it before. ENOENT where there is none.
    pub(super) fn sync_before_withdrawal(&self, dir: Ino, name: &[u8]) -> Result<Option<Seen>> {
        if !self.core.deferring || self.core.media.omits("what a withdrawn name relies on is synced first") {
            return Ok(None);
        }
        let seen = {
            let dir = self.inode(dir)?;
            let body = dir.body.read();
            let entry = body.dir()?.lookup(name);
            let entry = entry.ok_or_else(|| Error::new(libc::ENOENT, "withdraw::sync_before_withdrawal"))?;
            let inode = self.inode(entry.ino)?;
            let child = inode.body.read();
            self.seen(&entry, &child)
        };
        self.sync()?;
        Ok(Some(seen))
    }

    fn seen(&self, entry: &Dirent, child: &Body) -> Seen {
        Seen {
            inode: (entry.ino, entry.generation),
            added: entry.seq,
            log_end: child.log.seq(),
            ctime: child.ctime,
            links: self.table.entry(entry.ino.0).links(),
        }
    }

    /// Withdraws the record of `entry`, durably where a fence makes it so. ENOSPC, and nothing done, where it or what it names is not as it
    /// was `seen`. The caller has both their locks.
    pub(super) fn withdraw(
        &self,
        dir: &Inode,
        body: &Body,
        (entry, child): (&Dirent, &Body),
        seen: Option<Seen>,
    ) -> Result<()> {
        if seen.is_some_and(|seen| seen != self.seen(entry, child)) {
            return Err(Error::new(libc::ENOSPC, "withdraw::withdraw"));
        }
        let at = body.log.addr_of(&dir.owner(), entry.seq);
        let mut line = [0; LINE];
        self.core.media.read(at, &mut line)?;
        let is_its = |head: Head| head.kind == Type::Add && head.seq == entry.seq;
        if !Head::decode(&line).is_some_and(is_its) || get32(&line, field::add::COOKIE) != entry.cookie {
            return Err(log::damaged(&dir.owner(), "the record of a name is not where it was"));
        }
        let word = get64(&line, 0) ^ WITHDRAWN as u64;
        let stored = self.core.media.store64(at, word).map_err(Error::from);
        let dirty = self.alive_after(stored)?;
        self.core.fence(self.core.media.flush(dirty));
        Ok(())
    }
}
