//! Removing a name where no record of that finds room: the record that added it is *withdrawn*, with one store of eight bytes.
//!
//! The checksum of the record is changed by a constant ([`WITHDRAWN`]). Whoever reads it so takes it as the addition that it is,
//! and what it added as removed at once. So nothing has to be allocated, and no state of the pool refuses a removal.
//! (Not a pool of an older version: who reads that one would take the record for the end of its log.)
//!
//! On an ordinary file a store in place may be on the disk before all that came before it is: a directory would be gone, and with it
//! what had been moved out of it. Or it may not be there when records are that were appended after it: the name would have come back beside
//! another of the same name. So the media are synced before and behind it, with the directory locked. (That is no sync of an
//! epoch, which would wait for others, who may wait for this lock.) On persistent memory all that came before is durable.
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
    /// Without.
    Withdrawn,
}

impl<M: Media> Fs<M> {
    /// Whether names can be withdrawn from this pool.
    pub(super) fn withdraws(&self) -> bool {
        self.core.sb.version >= VERSION_WITHDRAWS
    }

    /// Withdraws the record of `entry`, durably. The caller has the directory's lock, and that of what the name stands for.
    pub(super) fn withdraw(&self, dir: &Inode, body: &Body, entry: &Dirent) -> Result<()> {
        let at = body.log.addr_of(&dir.owner(), entry.seq);
        let mut line = [0; LINE];
        self.core.media.read(at, &mut line)?;
        let is_its = |head: Head| head.kind == Type::Add && head.seq == entry.seq;
        if !Head::decode(&line).is_some_and(is_its) || get32(&line, field::add::COOKIE) != entry.cookie {
            return Err(log::damaged(&dir.owner(), "the record of a name is not where it was"));
        }
        if self.core.deferring {
            self.sync_media()?;
        }
        let word = get64(&line, 0) ^ WITHDRAWN as u64;
        let stored = self.core.media.store64(at, word).map_err(Error::from);
        let dirty = self.alive_after(stored)?;
        self.core.fence(self.core.media.flush(dirty));
        if self.core.deferring {
            self.sync_media()?;
        }
        Ok(())
    }
}
