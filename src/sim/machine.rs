//! The production code and the oracle, in step: what one answers the other must answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fs::files::{AT_FDCWD, Fd, Files};
use crate::fs::{
    Cred, FIXED, Fs, Ino, OpenOptions, RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, ReadTicket,
    SetTime, WriteTicket, clock,
};
use crate::media::{Domain, Media};
use crate::mover::class::{Class, Owner};

use super::engine::SimEngine;
use super::media::SimMedia;
use super::model::{Falloc, Model, Outcome, Rename, Setting, Target};
use super::source::{self, Source};
use super::tree::{self, Tree};
use super::workload::{Op, bytes};

/// The time of the first step, in seconds.
const BEGIN: i64 = 1_700_000_000;
/// What the kernel writes back at once.
const PAGE: u64 = 4096;

/// A file system that is used.
pub struct Machine {
    files: Arc<Files<SimMedia>>,
    pub model: Model,
    slots: BTreeMap<u8, Fd>,
    /// Steps so far: the time, and the tag of the bytes that are written.
    step: i64,
}

/// Opens media as after a failure of power. Background work is done when the simulation says so.
pub fn open(media: SimMedia) -> Result<Arc<Fs<SimMedia>>, String> {
    open_after(media, true)
}

/// Opens media as after a failure of power, or else as after a process was killed.
pub fn open_after(media: SimMedia, power_lost: bool) -> Result<Arc<Fs<SimMedia>>, String> {
    let mut options = OpenOptions { no_ticker: true, power_lost, ..OpenOptions::default() };
    if media.engine().is_some_and(|device| device.in_pieces) {
        (options.class, options.qos) = (Some(Class::Bandwidth(Owner::of(1))), SimEngine::qos());
    }
    let fs = Fs::open(media, &options).map_err(|e| format!("it cannot be opened: {e:?}"))?;
    if let Some(device) = fs.media().engine() {
        fs.mover().give(Box::new(SimEngine::new(device)), SimEngine::limits());
    }
    Ok(fs)
}

fn files_of(fs: Arc<Fs<SimMedia>>) -> Arc<Files<SimMedia>> {
    Arc::new(Files::new(fs, Cred::root(), 0))
}

/// What the kernel does with its pages where `stored` was stored to them.
fn write_back(files: &Files<SimMedia>, fd: Fd, at: u64, stored: &[u8], tag: u64) -> crate::Result<()> {
    let size = files.fstat(fd)?.size;
    let end = size.min(at + stored.len() as u64);
    if end <= at {
        return files.pwrite(fd, &[], at as i64).map(drop);
    }
    let first = at / PAGE * PAGE;
    let mut pages = vec![0; (end.next_multiple_of(PAGE).min(size) - first) as usize];
    files.pread(fd, &mut pages, first as i64)?;
    pages[(at - first) as usize..(end - first) as usize].copy_from_slice(&stored[..(end - at) as usize]);
    files.pwrite(fd, &Source::of(&pages, first, tag), first as i64).map(drop)
}

impl Machine {
    /// `model` is what the media holds after `step` steps.
    pub fn new(media: SimMedia, model: Model, step: i64) -> Result<Machine, String> {
        let mut machine = Machine { files: files_of(open(media)?), model, slots: BTreeMap::new(), step };
        machine.tell_time();
        Ok(machine)
    }

    /// For another thread, which shares the descriptors that are open. Operations are tried on it with
    /// [`attempt`](Machine::attempt), and the times are this one's last.
    pub fn beside(&self) -> Machine {
        let files = self.files.clone();
        Machine { files, model: self.model.clone(), slots: self.slots.clone(), step: self.step }
    }

    /// Begins a write on the production code alone, by a descriptor of its own that is closed at once, of a class or the
    /// pool's.
    pub fn begin_write(
        &self,
        op: &Op,
        tag: u64,
        class: Option<Class>,
    ) -> crate::Result<WriteTicket<SimMedia>> {
        let Op::Write(Target::Path(path), at, len) = op else { unreachable!("only such writes are begun") };
        let fd = self.files.open(path.as_bytes(), libc::O_WRONLY, 0)?;
        let (src, at) = (source::owned(&bytes(tag, *at, *len), *at), *at as i64);
        let ticket = match class {
            Some(class) => self.files.classed(class).submit_pwrite(fd, src, at),
            None => self.files.submit_pwrite(fd, src, at),
        };
        self.files.close(fd)?;
        ticket
    }

    /// The same of a read.
    pub fn begin_read(&self, path: &str, at: u64, len: usize) -> crate::Result<ReadTicket<SimMedia>> {
        let fd = self.files.open(path.as_bytes(), libc::O_RDONLY, 0)?;
        let ticket = self.files.submit_pread(fd, vec![0; len].into(), at as i64);
        self.files.close(fd)?;
        ticket
    }

    /// One operation on the production code alone; `tag` makes the bytes that are written.
    pub fn attempt(&mut self, op: &Op, tag: u64) -> Outcome {
        self.call(op, tag).map_err(|e| e.errno())
    }

    /// The next step on the production code alone: what [`apply`](Machine::apply) would do there.
    pub fn attempt_next(&mut self, op: &Op) -> Outcome {
        self.step += 1;
        self.tell_time();
        self.attempt(op, self.step as u64)
    }

    /// Whether anything is open.
    pub fn holds_open(&self) -> bool {
        !self.slots.is_empty()
    }

    /// What there is now, whatever the model says.
    pub fn seen(&self) -> Result<Tree, String> {
        let open: Vec<Ino> =
            self.slots.values().filter_map(|fd| Some(self.files.fstat(*fd).ok()?.ino)).collect();
        Tree::read(self.fs(), open)
    }

    pub fn fs(&self) -> &Arc<Fs<SimMedia>> {
        self.files.fs()
    }

    pub fn step(&self) -> i64 {
        self.step
    }

    /// When everything began.
    pub fn begin() -> i64 {
        clock::set(Some(tree::time(BEGIN)));
        BEGIN
    }

    fn tell_time(&mut self) {
        let since = if self.fs().media().is_crammed() { 0 } else { self.step };
        self.model.now = BEGIN + since;
        clock::set(Some(tree::time(self.model.now)));
    }

    /// One operation on both; what it answered. Fails where they disagree, and leaves the model as it was
    /// where the pool is full.
    pub fn apply(&mut self, op: &Op) -> Result<Outcome, String> {
        self.step += 1;
        self.tell_time();
        let at_begin;
        let op = match op {
            Op::Utimens(target, _) if self.fs().media().is_crammed() => {
                at_begin = Op::Utimens(target.clone(), BEGIN);
                &at_begin
            }
            op => op,
        };
        let done = match op {
            Op::Reopen => self.reopen().map(Ok)?,
            Op::Crash => self.crash().map(Ok)?,
            Op::Kill => self.kill().map(Ok)?,
            _ => self.attempt(op, self.step as u64),
        };
        if done == Err(libc::ENOSPC) {
            return Ok(done);
        }
        let wanted = op.on_model(&mut self.model, self.step as u64);
        if done == wanted {
            Ok(done)
        } else {
            Err(format!("{op} answers {}, should answer {}", said(done), said(wanted)))
        }
    }

    /// What there is now; the model must say the same.
    pub fn tree(&self) -> Result<Tree, String> {
        let mut open = Vec::new();
        for (slot, fd) in &self.slots {
            open.push((*slot, self.files.fstat(*fd).map_err(|e| format!("slot {slot}: {e:?}"))?.ino));
        }
        let tree = Tree::read(self.fs(), open.iter().map(|(_, ino)| *ino))?;
        let found = tree::compare(&tree, &self.model, &open).and_then(|()| tree.compare_stat(self.fs()));
        found.map_err(|what| format!("without any failure, {what}"))?;
        Ok(tree)
    }

    /// Closes the pool and opens it again. Descriptors are lost.
    fn reopen(&mut self) -> Result<(), String> {
        let fs = self.files.fs().clone();
        fs.close().map_err(|e| format!("it cannot be closed: {e:?}"))?;
        let image = fs.media().crash_point();
        let reopened = open(image.media(super::media::Keep::Everything))?;
        if !reopened.open_report().was_clean {
            return Err("after a clean close its logs had to be scanned".to_owned());
        }
        self.go_on_with(reopened);
        Ok(())
    }

    /// On persistent memory everything that was answered is durable; elsewhere a sync makes it so.
    fn crash(&mut self) -> Result<(), String> {
        if self.fs().media().domain() == Domain::PageCache {
            self.fs().sync().map_err(|e| format!("it cannot be synced: {e:?}"))?;
        }
        let left = self.fs().media().crash_point().media(super::media::Keep::Nothing);
        self.go_on_with(open(left)?);
        Ok(())
    }

    fn kill(&mut self) -> Result<(), String> {
        let left = self.fs().media().crash_point().killed();
        self.go_on_with(open_after(left, false)?);
        Ok(())
    }

    fn go_on_with(&mut self, fs: Arc<Fs<SimMedia>>) {
        self.slots.clear();
        self.files = files_of(fs);
    }

    /// Ends the use of the pool with a clean close.
    pub fn close(self) -> Result<Arc<Fs<SimMedia>>, String> {
        let fs = self.files.fs().clone();
        fs.close().map_err(|e| format!("it cannot be closed: {e:?}"))?;
        Ok(fs)
    }

    fn call(&mut self, op: &Op, tag: u64) -> crate::Result<()> {
        let f = &self.files;
        match op {
            Op::Create(path) => {
                let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
                f.open(path.as_bytes(), flags, 0o644).and_then(|fd| f.close(fd))
            }
            Op::Mkdir(path) => f.mkdir(path.as_bytes(), 0o755),
            Op::Mknod(path, special) => f.mknod(path.as_bytes(), special.mode(), special.rdev()),
            Op::Symlink(target, path) => f.symlink(target.as_bytes(), path.as_bytes()),
            Op::Link(Target::Path(from), path) => f.link(from.as_bytes(), path.as_bytes()),
            Op::Link(Target::Slot(slot), path) => {
                f.linkat(self.fd(*slot)?, b"", AT_FDCWD, path.as_bytes(), libc::AT_EMPTY_PATH)
            }
            Op::Unlink(path) => f.unlink(path.as_bytes()),
            Op::Rmdir(path) => f.rmdir(path.as_bytes()),
            Op::Rename(from, to, how) => {
                let flags = match how {
                    Rename::Plain => 0,
                    Rename::NoReplace => RENAME_NOREPLACE,
                    Rename::Exchange => RENAME_EXCHANGE,
                    Rename::Whiteout => RENAME_WHITEOUT,
                };
                f.rename(from.as_bytes(), to.as_bytes(), flags)
            }
            Op::Open(slot, path, truncates) => {
                let flags = libc::O_RDWR | if *truncates { libc::O_TRUNC } else { 0 };
                let fd = f.open(path.as_bytes(), flags, 0)?;
                self.slots.insert(*slot, fd);
                Ok(())
            }
            Op::Tmpfile(slot, dir) => {
                let dir = if dir.is_empty() { "/" } else { dir };
                let fd = f.open(dir.as_bytes(), libc::O_TMPFILE | libc::O_RDWR, 0o644)?;
                self.slots.insert(*slot, fd);
                Ok(())
            }
            Op::Close(slot) => {
                let fd = self.fd(*slot)?;
                self.slots.remove(slot);
                self.files.close(fd)
            }
            Op::Write(target, at, len) => {
                let src = Source::of(&bytes(tag, *at, *len), *at, tag);
                self.on_open(target, libc::O_WRONLY, |f, fd| f.pwrite(fd, &src, *at as i64).map(drop))
            }
            Op::WriteBack(target, at, len) => {
                let stored = bytes(tag, *at, *len);
                self.on_open(target, libc::O_RDWR, |f, fd| write_back(f, fd, *at, &stored, tag))
            }
            // The flag would be others' too who write by this descriptor meanwhile.
            Op::Append(Target::Slot(slot), len) => {
                let attr = f.fstat(self.fd(*slot)?)?;
                let src = Source::of(&bytes(tag, 0, *len), attr.size, tag);
                f.fs().write(&Cred::root(), attr.ino, 0, &src, true).map(drop)
            }
            Op::Append(target, len) => self.on_open(target, libc::O_WRONLY, |f, fd| {
                let src = Source::of(&bytes(tag, 0, *len), f.fstat(fd)?.size, tag);
                f.set_append(fd, true)?;
                let done = f.write(fd, &src).map(drop);
                f.set_append(fd, false)?;
                done
            }),
            Op::Truncate(Target::Path(path), size) => f.truncate(path.as_bytes(), *size as i64),
            Op::Truncate(Target::Slot(slot), size) => f.ftruncate(self.fd(*slot)?, *size as i64),
            Op::Fallocate(target, how, at, len) => {
                let mode = match how {
                    Falloc::Reserve => 0,
                    Falloc::ReserveKeepSize => libc::FALLOC_FL_KEEP_SIZE,
                    Falloc::Punch => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    Falloc::Zero => libc::FALLOC_FL_ZERO_RANGE,
                    Falloc::ZeroKeepSize => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                };
                self.on_open(target, libc::O_WRONLY, |f, fd| f.fallocate(fd, mode, *at as i64, *len as i64))
            }
            Op::Setxattr(target, name, len, how) => {
                let value = Source::of(&bytes(tag, 0, *len), 0, tag);
                let flags = match how {
                    Setting::Any => 0,
                    Setting::Create => libc::XATTR_CREATE,
                    Setting::Replace => libc::XATTR_REPLACE,
                };
                match target {
                    Target::Path(path) => f.setxattr(path.as_bytes(), true, name.as_bytes(), &value, flags),
                    Target::Slot(slot) => f.fsetxattr(self.fd(*slot)?, name.as_bytes(), &value, flags),
                }
            }
            Op::Removexattr(Target::Path(path), name) => {
                f.removexattr(path.as_bytes(), true, name.as_bytes())
            }
            Op::Removexattr(Target::Slot(slot), name) => f.fremovexattr(self.fd(*slot)?, name.as_bytes()),
            Op::Fix(target, bytes) => {
                let value = bytes.to_string().into_bytes();
                match target {
                    Target::Path(path) => f.setxattr(path.as_bytes(), true, FIXED, &value, 0),
                    Target::Slot(slot) => f.fsetxattr(self.fd(*slot)?, FIXED, &value, 0),
                }
            }
            Op::Unfix(Target::Path(path)) => f.removexattr(path.as_bytes(), true, FIXED),
            Op::Unfix(Target::Slot(slot)) => f.fremovexattr(self.fd(*slot)?, FIXED),
            Op::Chmod(Target::Path(path), mode) => f.chmod(path.as_bytes(), *mode),
            Op::Chmod(Target::Slot(slot), mode) => f.fchmod(self.fd(*slot)?, *mode),
            Op::Chown(Target::Path(path), uid, gid) => f.chown(path.as_bytes(), *uid, *gid),
            Op::Chown(Target::Slot(slot), uid, gid) => f.fchown(self.fd(*slot)?, *uid, *gid),
            Op::Utimens(target, mtime) => {
                let mtime = Some(SetTime::To(tree::time(*mtime)));
                match target {
                    Target::Path(path) => f.utimensat(AT_FDCWD, path.as_bytes(), None, mtime, 0),
                    Target::Slot(slot) => f.futimens(self.fd(*slot)?, None, mtime),
                }
            }
            Op::Fsync(target) => self.on_open(target, libc::O_RDONLY, |f, fd| f.fsync(fd)),
            Op::Sync => self.fs().sync(),
            Op::Tick => self.fs().tick(),
            Op::Reopen | Op::Crash | Op::Kill | Op::Churn(..) => unreachable!("not a call"),
        }
    }

    fn fd(&self, slot: u8) -> crate::Result<Fd> {
        self.slots.get(&slot).copied().ok_or(crate::Error::new(libc::EBADF, "machine::fd"))
    }

    fn on_open(
        &self,
        target: &Target,
        flags: i32,
        call: impl FnOnce(&Files<SimMedia>, Fd) -> crate::Result<()>,
    ) -> crate::Result<()> {
        match target {
            Target::Slot(slot) => call(&self.files, self.fd(*slot)?),
            Target::Path(path) => {
                let fd = self.files.open(path.as_bytes(), flags, 0)?;
                let done = call(&self.files, fd);
                self.files.close(fd)?;
                done
            }
        }
    }

    /// The number and the size of a regular file.
    pub fn file(&self, target: &Target) -> Option<(u32, u64)> {
        let attr = match target {
            Target::Path(path) => self.files.stat(path.as_bytes()),
            Target::Slot(slot) => self.fd(*slot).and_then(|fd| self.files.fstat(fd)),
        };
        attr.ok().map(|attr| (attr.ino.0, attr.size))
    }
}

fn said(outcome: Outcome) -> String {
    match outcome {
        Ok(()) => "success".to_owned(),
        Err(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
    }
}
