//! Reading file data: straight from media into the caller's buffer, under the inode's shared lock, so
//! that no block is freed while it is copied.

use std::sync::atomic::Ordering;

use super::format::BLOCK;
use super::index::Mapping;
use super::inode::Data;
use super::log::block_addr;
use super::offload::Parts;
use super::*;

const PAGE: u64 = BLOCK as u64;
/// Bytes that are asked for before the CPU copies: the string copy of Zen 5 takes a while to begin (decision 0093).
const BEGIN_AHEAD: usize = 512;
/// Bytes of the next piece of a fragmented file that are fetched while one is copied; from there on the processor fetches by
/// itself.
const PIECE_AHEAD: usize = 1024;
/// relatime: an access time older than this is renewed, in packed time.
const DAY: u64 = (24 * 60 * 60) << 30;

impl<M: Media> Fs<M> {
    /// Bytes read; less than asked only at the end of file. EISDIR for directories, EIO for bad media.
    pub fn read_at(&self, node: &Node, offset: u64, dst: &mut [u8]) -> Result<usize> {
        self.read_and_wait(dst, |dst| self.begin_read(node, offset, dst))
    }

    /// As [`read_at`](Fs::read_at), up to where it would wait for a copy: that is then the caller's to wait for, with
    /// nothing of the file system held.
    pub fn begin_read(&self, node: &Node, offset: u64, mut dst: LentRoom) -> ReadStep<usize> {
        let mut watch = self.core.ledger.begin(Op::Read, dst.bytes().len());
        let inode = &*node.inode;
        let body = inode.body.read();
        watch.did(Phase::Wait);
        let index = match &body.data {
            Data::File(index) if !body.dead => index,
            Data::File(_) => return Err(Error::new(libc::ESTALE, "read::read_at")),
            Data::Dir(_) => return Err(Error::new(libc::EISDIR, "read::read_at")),
            _ => return Err(Error::new(libc::EINVAL, "read::read_at")),
        };
        let len = body.size.saturating_sub(offset).min(dst.bytes().len() as u64) as usize;
        let pages = || offset / PAGE..(offset + len as u64).div_ceil(PAGE);
        if let Some(write) = body.writes.touching(pages) {
            watch.forget();
            return Ok(Step::Blocked(write));
        }
        let engine = node.engine();
        let mut parts = Parts::new();
        let mut done = 0;
        let piece = |done: usize| {
            let at = offset + done as u64;
            let pages = (at % PAGE + (len - done) as u64).div_ceil(PAGE) as u32;
            let (mapping, count) = index.run_at((at / PAGE) as u32, pages);
            (mapping, (count as u64 * PAGE - at % PAGE).min((len - done) as u64) as usize)
        };
        let mut next = if len > 0 { piece(0) } else { (Mapping::Hole, 0) };
        while done < len {
            let at = offset + done as u64;
            let (mapping, n) = next;
            if done + n < len {
                next = piece(done + n);
                if let (Mapping::Written(block), n) = next
                    && !self.core.mover.takes(engine, n)
                {
                    self.core.media.expect_read(block_addr(block), n.min(PIECE_AHEAD));
                }
            }
            watch.did(Phase::Index);
            match mapping {
                Mapping::Written(block) => {
                    let at = block_addr(block).add(at % PAGE);
                    match self.core.mover.takes(engine, n) {
                        true => parts.push(dst.part_from_media(at, done, n)),
                        false => {
                            self.core.media.expect_read(at, n.min(BEGIN_AHEAD));
                            self.core.media.read(at, &mut dst.bytes()[done..done + n])?
                        }
                    }
                }
                Mapping::Hole | Mapping::Unwritten(_) => dst.bytes()[done..done + n].fill(0),
            }
            watch.did(Phase::Copy);
            done += n;
        }
        if !dst.bytes().is_empty() {
            self.touch(inode, &body);
            watch.did(Phase::Metadata);
        }
        if parts.is_empty() {
            return Ok(Step::Done(len));
        }
        // A uthread has others to let run meanwhile.
        let flight = self.hand_over(engine, &parts, dst.waits() && !crate::wait::lets_others_run());
        if flight.ended_at_once() || self.core.ordered {
            self.abort_copy(flight)?;
            watch.did(Phase::Copy);
            return Ok(Step::Done(len));
        }
        let read = self.read_under_way(inode.ino.0, pages(), flight, watch.is_on())?;
        watch.did(Phase::Copy);
        Ok(read.map_or(Step::Done(len), |read| Step::UnderWay(len, read)))
    }

    pub fn read(&self, ino: Ino, offset: u64, dst: &mut [u8]) -> Result<usize> {
        self.read_at(&Node::new(self.inode(ino)?), offset, dst)
    }

    /// SEEK_DATA and SEEK_HOLE; ENXIO behind the end of file.
    pub fn seek(&self, ino: Ino, offset: u64, whence: i32) -> Result<u64> {
        self.seek_node(&Node::new(self.inode(ino)?), offset, whence)
    }

    pub fn seek_node(&self, node: &Node, offset: u64, whence: i32) -> Result<u64> {
        let body = node.inode.body.read();
        let Data::File(index) = &body.data else {
            return Err(Error::new(libc::EINVAL, "read::seek"));
        };
        if offset >= body.size {
            return Err(Error::new(libc::ENXIO, "read::seek"));
        }
        let page = (offset / PAGE) as u32;
        let found = match whence {
            libc::SEEK_DATA => index.next_data(page),
            libc::SEEK_HOLE => index.next_hole(page),
            _ => return Err(Error::new(libc::EINVAL, "read::seek")),
        };
        let at = found.map(|p| (p as u64 * PAGE).max(offset));
        match whence {
            libc::SEEK_DATA => {
                at.filter(|&a| a < body.size).ok_or_else(|| Error::new(libc::ENXIO, "read::seek"))
            }
            _ => Ok(at.unwrap_or(body.size).min(body.size)),
        }
    }

    /// Sets the access time as relatime does: where it is not newer than the last change, or a day old.
    /// It reaches the log with the next attribute change or at close. On a pool that is only read it stays.
    #[inline]
    pub(super) fn touch(&self, inode: &Inode, body: &Body) {
        let atime = inode.atime.load(Ordering::Relaxed);
        if atime > body.mtime.max(body.ctime)
            && self.seconds.load(Ordering::Relaxed) <= atime.saturating_add(DAY)
        {
            return;
        }
        if self.core.read_only {
            return;
        }
        let now = now();
        // Who followed a name and has no use of it may find it gone, and its number another's.
        if now != atime && !body.dead {
            self.table.set_atime(inode, now);
            inode.set_atime_ahead();
        }
    }
}
