//! The kernel's file systems as peers: plain system calls on a directory of a mounted file system.
//!
//! tmpfs promises nothing, so its calls are bare. ext4 is asked for what lode gives: `O_DSYNC` on
//! data, and an fsync of the directory after each change of a name.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lodestone::{Error, Result};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir};

use super::worker::{Name, Worker};

pub struct KernelWorker {
    durable: bool,
    /// Whether operations are durable where [`Worker::set_durable`] does not say otherwise.
    sync: bool,
    home: PathBuf,
    data: File,
    append: Option<File>,
    names: OwnedFd,
    entries: Vec<u8>,
}

/// What glibc's readdir passes to getdents64.
const DIRENT_BUFFER_BYTES: usize = 32 << 10;
const FILL_BYTES: usize = 1 << 20;

impl KernelWorker {
    /// Makes the worker's file (shared by workers of one `file` number) and its own directory.
    pub fn new(root: &Path, file: usize, tag: &str, file_bytes: u64, sync: bool) -> Result<KernelWorker> {
        let home = root.join(tag);
        make_dir(&home)?;
        let names = home.join("names");
        make_dir(&names)?;
        let dir_flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let names = rustix::fs::open(&names, dir_flags, Mode::empty()).map_err(at("open", &names))?;
        let data = open_data(&root.join(format!("data.{file}")), file_bytes, sync)?;
        let entries = Vec::with_capacity(DIRENT_BUFFER_BYTES);
        Ok(KernelWorker { durable: sync, sync, home, data, append: None, names, entries })
    }

    fn settle(&self) -> Result<()> {
        if self.durable {
            rustix::fs::fsync(&self.names).map_err(call("fsync"))?;
        }
        Ok(())
    }

    fn extend_flags(&self) -> OFlags {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::APPEND | OFlags::CLOEXEC;
        if self.sync { flags | OFlags::DSYNC } else { flags }
    }
}

fn make_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|e| Error::io(e, "bench::peer_kernel", "create", path))
}

fn open_data(path: &Path, bytes: u64, sync: bool) -> Result<File> {
    let io = |what| move |e| Error::io(e, "bench::peer_kernel", what, path);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = File::from(rustix::fs::open(path, flags, mode).map_err(at("open", path))?);
    if file.metadata().map_err(io("stat"))?.len() < bytes {
        let block = vec![0x5a; FILL_BYTES.min(bytes as usize)];
        for offset in (0..bytes).step_by(block.len()) {
            file.write_all_at(&block, offset).map_err(io("fill"))?;
        }
        file.sync_all().map_err(io("fsync"))?;
    }
    if !sync {
        return Ok(file);
    }
    let flags = OFlags::RDWR | OFlags::DSYNC | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(at("open", path))?))
}

fn at<'p>(what: &'static str, path: &'p Path) -> impl Fn(rustix::io::Errno) -> Error + 'p {
    move |e| Error::io(e.into(), "bench::peer_kernel", what, path)
}

/// A timed call failed: which one says enough, the path is a bench file.
fn call(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |e| Error::message(e.raw_os_error(), "bench::peer_kernel", format!("{what}: {e}"))
}

/// The call moved all bytes asked for.
fn whole(what: &'static str, moved: Result<usize, rustix::io::Errno>, asked: usize) -> Result<()> {
    match moved {
        Ok(n) if n == asked => Ok(()),
        Ok(n) => {
            Err(Error::message(libc::EIO, "bench::peer_kernel", format!("{what}: {n} of {asked} bytes")))
        }
        Err(e) => Err(call(what)(e)),
    }
}

impl Worker for KernelWorker {
    #[inline(always)]
    fn read(&mut self, at: u64, dst: &mut [u8]) -> Result<()> {
        let asked = dst.len();
        whole("pread", rustix::io::pread(&self.data, dst, at), asked)
    }

    #[inline(always)]
    fn write(&mut self, at: u64, src: &[u8]) -> Result<()> {
        whole("pwrite", rustix::io::pwrite(&self.data, src, at), src.len())
    }

    fn append_begin(&mut self) -> Result<()> {
        let path = self.home.join("append");
        let file = rustix::fs::open(&path, self.extend_flags(), Mode::RUSR | Mode::WUSR);
        self.append = Some(File::from(file.map_err(at("create", &path))?));
        Ok(())
    }

    #[inline(always)]
    fn append(&mut self, src: &[u8]) -> Result<()> {
        let file = self.append.as_ref().expect("append_begin comes first");
        whole("write", rustix::io::write(file, src), src.len())
    }

    fn append_end(&mut self) -> Result<u64> {
        let file = self.append.take().expect("append_begin comes first");
        let path = self.home.join("append");
        rustix::fs::unlink(&path).map_err(at("unlink", &path))?;
        Ok(rustix::fs::fstat(&file).map_err(call("fstat"))?.st_size as u64)
    }

    #[inline(always)]
    fn create(&mut self, name: &Name) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let file = rustix::fs::openat(&self.names, name.c_str(), flags, mode).map_err(call("create"))?;
        drop(file);
        self.settle()
    }

    #[inline(always)]
    fn stat(&mut self, name: &Name) -> Result<()> {
        let stat = rustix::fs::statat(&self.names, name.c_str(), AtFlags::empty()).map_err(call("stat"))?;
        std::hint::black_box(stat.st_ino);
        Ok(())
    }

    #[inline(always)]
    fn rename(&mut self, from: &Name, to: &Name) -> Result<()> {
        let dir = self.names.as_fd();
        rustix::fs::renameat(dir, from.c_str(), dir, to.c_str()).map_err(call("rename"))?;
        self.settle()
    }

    #[inline(always)]
    fn unlink(&mut self, name: &Name) -> Result<()> {
        rustix::fs::unlinkat(&self.names, name.c_str(), AtFlags::empty()).map_err(call("unlink"))?;
        self.settle()
    }

    fn readdir(&mut self) -> Result<u64> {
        let dir: BorrowedFd = self.names.as_fd();
        rustix::fs::seek(dir, rustix::fs::SeekFrom::Start(0)).map_err(call("lseek"))?;
        let mut entries = RawDir::new(dir, self.entries.spare_capacity_mut());
        let mut count = 0;
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(call("getdents"))?;
            let name: &CStr = entry.file_name();
            std::hint::black_box((entry.ino(), entry.next_entry_cookie()));
            count += u64::from(!matches!(name.to_bytes(), b"." | b".."));
        }
        Ok(count)
    }

    fn set_durable(&mut self, durable: bool) {
        if durable && self.sync && !self.durable {
            // What was not durable would be paid for by whoever syncs next, while the clock runs. That one says what fails.
            let _ = rustix::fs::syncfs(&self.names);
        }
        self.durable = durable && self.sync;
    }
}
