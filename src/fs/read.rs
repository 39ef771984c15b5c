//! Reading file data: straight from media into the caller's buffer, under the inode's shared lock, so
//! that no block is freed while it is copied.

use std::sync::atomic::Ordering;

use super::format::BLOCK;
use super::index::Mapping;
use super::inode::Data;
use super::log::block_addr;
use super::*;

const PAGE: u64 = BLOCK as u64;
/// relatime: an access time older than this is renewed, in packed time.
const DAY: u64 = (24 * 60 * 60) << 30;

impl<M: Media> Fs<M> {
    /// Bytes read; less than asked only at the end of file. EISDIR for directories, EIO for bad media.
    pub fn read_at(&self, node: &Node, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let mut watch = self.core.ledger.begin(Op::Read, dst.len());
        let inode = &*node.inode;
        let body = inode.body.read();
        watch.did(Phase::Wait);
        let index = match &body.data {
            Data::File(index) if !body.dead => index,
            Data::File(_) => return Err(Error::new(libc::ESTALE, "read::read_at")),
            Data::Dir(_) => return Err(Error::new(libc::EISDIR, "read::read_at")),
            _ => return Err(Error::new(libc::EINVAL, "read::read_at")),
        };
        let len = body.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let pages = (at % PAGE + (len - done) as u64).div_ceil(PAGE) as u32;
            let (mapping, count) = index.run_at((at / PAGE) as u32, pages);
            let n = (count as u64 * PAGE - at % PAGE).min((len - done) as u64) as usize;
            let part = &mut dst[done..done + n];
            watch.did(Phase::Index);
            match mapping {
                Mapping::Written(block) => self.copy_out(node, block_addr(block).add(at % PAGE), part)?,
                Mapping::Hole | Mapping::Unwritten(_) => part.fill(0),
            }
            watch.did(Phase::Copy);
            done += n;
        }
        if len > 0 {
            self.touch(inode, body.mtime.max(body.ctime));
            watch.did(Phase::Metadata);
        }
        Ok(len)
    }

    #[inline]
    fn copy_out(&self, node: &Node, at: Addr, to: &mut [u8]) -> Result<()> {
        let Core { media, mover, .. } = &self.core;
        let engine = node.engine();
        if mover.takes(engine, to.len()) {
            media.watch(|media| mover.load(media, engine, at, to))?;
        } else {
            media.read(at, to)?;
        }
        Ok(())
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
    /// It reaches the log with the next attribute change or at close.
    #[inline]
    pub(super) fn touch(&self, inode: &Inode, changed: u64) {
        let atime = inode.atime.load(Ordering::Relaxed);
        if atime > changed && self.seconds.load(Ordering::Relaxed) <= atime.saturating_add(DAY) {
            return;
        }
        let now = now();
        if now != atime {
            self.table.set_atime(inode, now);
            inode.set_attrs_ahead();
        }
    }
}
