//! Lodestone as a program meets it that links the library: the public API, each call durable on
//! return as far as the domain goes.

use std::sync::Arc;

use lodestone::Result;
use lodestone::fs::{Cred, DirEntry, Fs, Ino, Node};
use lodestone::media::Media;

use super::worker::{Name, Worker};

pub struct LodeWorker<M: Media> {
    fs: Arc<Fs<M>>,
    cred: Cred,
    home: Ino,
    data: Node,
    append: Option<Node>,
    names: Node,
    names_ino: Ino,
}

const APPEND_NAME: &[u8] = b"append";
const FILL_BYTES: usize = 1 << 20;
/// Entries in one call, about what a getdents64 buffer of 32 KiB holds: a directory is not read in one
/// go by anybody, so the cost of resuming belongs to the measure.
const READDIR_BATCH: usize = 1024;
const DIR_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

impl<M: Media> LodeWorker<M> {
    /// Makes the worker's file (shared by workers of one `file` number) and its own directory.
    pub fn new(fs: Arc<Fs<M>>, file: usize, tag: &str, file_bytes: u64) -> Result<LodeWorker<M>> {
        let cred = Cred::process();
        let home = fs.mkdir(&cred, Ino::ROOT, tag.as_bytes(), DIR_MODE, 0)?.ino;
        let names_ino = fs.mkdir(&cred, home, b"names", DIR_MODE, 0)?.ino;
        let names = fs.node(names_ino)?;
        let data = open_data(&fs, &cred, &format!("data.{file}"), file_bytes)?;
        Ok(LodeWorker { fs, cred, home, data, append: None, names, names_ino })
    }
}

fn open_data<M: Media>(fs: &Fs<M>, cred: &Cred, name: &str, bytes: u64) -> Result<Node> {
    let flags = libc::O_RDWR | libc::O_CREAT;
    let (attr, _) = fs.create(cred, Ino::ROOT, name.as_bytes(), FILE_MODE, 0, flags)?;
    let node = fs.node(attr.ino)?;
    if attr.size < bytes {
        let block = vec![0x5a; FILL_BYTES.min(bytes as usize)];
        for offset in (0..bytes).step_by(block.len()) {
            fs.write_at(cred, &node, offset, &block, false)?;
        }
    }
    Ok(node)
}

impl<M: Media> Worker for LodeWorker<M> {
    #[inline(always)]
    fn read(&mut self, at: u64, dst: &mut [u8]) -> Result<()> {
        let n = self.fs.read_at(&self.data, at, dst)?;
        assert_eq!(n, dst.len(), "the bench reads inside its file");
        Ok(())
    }

    #[inline(always)]
    fn write(&mut self, at: u64, src: &[u8]) -> Result<()> {
        self.fs.write_at(&self.cred, &self.data, at, src, false)?;
        Ok(())
    }

    fn append_begin(&mut self) -> Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let (attr, _) = self.fs.create(&self.cred, self.home, APPEND_NAME, FILE_MODE, 0, flags)?;
        self.append = Some(self.fs.node(attr.ino)?);
        Ok(())
    }

    #[inline(always)]
    fn append(&mut self, src: &[u8]) -> Result<()> {
        let node = self.append.as_ref().expect("append_begin comes first");
        self.fs.write_at(&self.cred, node, 0, src, true)?;
        Ok(())
    }

    fn append_end(&mut self) -> Result<u64> {
        let node = self.append.take().expect("append_begin comes first");
        let bytes = self.fs.attr_of(&node)?.size;
        self.fs.unlink(&self.cred, self.home, APPEND_NAME)?;
        self.fs.release(node.ino());
        self.fs.forget(node.ino(), 1);
        Ok(bytes)
    }

    /// open(O_CREAT | O_EXCL) and close.
    #[inline(always)]
    fn create(&mut self, name: &Name) -> Result<()> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let (attr, _) = self.fs.create(&self.cred, self.names_ino, name.bytes(), FILE_MODE, 0, flags)?;
        self.fs.release(attr.ino);
        self.fs.forget(attr.ino, 1);
        Ok(())
    }

    #[inline(always)]
    fn stat(&mut self, name: &Name) -> Result<()> {
        let attr = self.fs.stat(&self.cred, Some(&self.names), name.bytes(), true)?;
        std::hint::black_box(attr.size);
        Ok(())
    }

    #[inline(always)]
    fn rename(&mut self, from: &Name, to: &Name) -> Result<()> {
        self.fs.rename(&self.cred, self.names_ino, from.bytes(), self.names_ino, to.bytes(), 0)
    }

    #[inline(always)]
    fn unlink(&mut self, name: &Name) -> Result<()> {
        self.fs.unlink(&self.cred, self.names_ino, name.bytes())
    }

    fn readdir(&mut self) -> Result<u64> {
        let (mut cookie, mut count) = (0, 0);
        loop {
            let mut batch = 0;
            self.fs.readdir(self.names_ino, cookie, &mut |entry: &DirEntry| {
                std::hint::black_box(entry.ino);
                count += u64::from(!matches!(entry.name, b"." | b".."));
                cookie = entry.cookie;
                batch += 1;
                batch < READDIR_BATCH
            })?;
            if batch < READDIR_BATCH {
                return Ok(count);
            }
        }
    }
}
