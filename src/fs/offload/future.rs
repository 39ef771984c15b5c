//! Reads, writes and syncs of files as futures, for whatever executor.
//!
//! ```
//! # use lodestone::fs::files::{Fd, Files};
//! # use lodestone::media::Pool;
//! async fn both(files: &Files<Pool>, log: Fd, data: Fd, bytes: Box<[u8]>) -> lodestone::Result<usize> {
//!     let first = files.pwrite_async(data, bytes, 0);
//!     let (bytes, written) = first.await;
//!     let (_, appended) = files.write_async(log, bytes).await;
//!     files.fsync_async(log)?.await?;
//!     Ok(written? + appended?)
//! }
//! ```
//!
//! What has to wait for a copy, be it one's own, one that is in its way, or one that keeps the room that it needs, wakes its
//! task when that has ended: by the engine where it rings, by whoever else sees the end, or by an alarm (`wait`). A sync of an
//! ordinary file takes as long as its device does, and runs on a thread that makes all of them (`syncs`). All else that files
//! do has no future: truncate and fallocate, which may wait for a copy under way in their file, and sync of a pool are plain
//! calls.
//!
//! A future does nothing before it is polled. One that has begun and is dropped waits for its copy, since that has its
//! bytes.

use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, ready};

use super::room::Keeping;
use super::syncs::Requested;
use super::*;
use crate::fs::files::{Classed, Fd, Files, OpenFile, Written};
use crate::wait::look_again;

/// A task that waits for copies, one after the other.
#[derive(Default)]
struct Waits {
    seat: Seat,
    /// For this one.
    begun: Option<Instant>,
}

impl Waits {
    /// Asks again when the waker is woken, unless `look` says that it has ended.
    fn poll(&mut self, copy: &Copy, context: &mut Context<'_>, look: impl Fn() -> bool) -> Poll<()> {
        copy.bell.0.listen(&self.seat, context.waker());
        if look() {
            self.leave(copy);
            return Poll::Ready(());
        }
        // Where it has ended itself it stands behind others, for which somebody else is woken.
        if !copy.rings || copy.has_ended() {
            let now = Instant::now();
            let waited = now - *self.begun.get_or_insert(now);
            let left = copy.due.map(|due| due.saturating_duration_since(now));
            self.seat.set_alarm(now + look_again(waited, left), context.waker());
        }
        Poll::Pending
    }

    fn leave(&mut self, copy: &Copy) {
        copy.bell.0.leave(&self.seat);
        if self.begun.take().is_some() {
            self.seat.cancel_alarm();
        }
    }
}

impl<M: Media> Fs<M> {
    fn poll_until_over(
        &self,
        waits: &mut Waits,
        write: &Arc<WriteUnderWay>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        waits.poll(&write.copy, context, || self.is_over(write))
    }

    /// One after the other: all have to end. How the syncs did is told to who finds the pool still full.
    fn poll_room(&self, waits: &mut Waits, keeping: &mut Keeping, context: &mut Context<'_>) -> Poll<()> {
        while let Some(write) = keeping.writes.last() {
            ready!(self.poll_until_over(waits, write, context));
            keeping.writes.pop();
        }
        while let Some(read) = keeping.reads.last() {
            ready!(waits.poll(&read.copy, context, || self.read_has_ended(read)));
            keeping.reads.pop();
        }
        self.free_departed_beside_copies();
        let Some(syncs) = &keeping.syncs else { return Poll::Ready(()) };
        syncs.bell.listen(&waits.seat, context.waker());
        if syncs.take().is_none() {
            return Poll::Pending;
        }
        syncs.bell.leave(&waits.seat);
        Poll::Ready(())
    }
}

/// What a future does with its bytes; `offset` none: at the file's own, which moves.
#[derive(Clone, Copy)]
enum What {
    Read { offset: Option<i64> },
    Write { offset: Option<i64> },
}

enum Stage<M: Media> {
    Begins,
    Blocked(Arc<WriteUnderWay>),
    /// The pool was full, but for what they keep.
    Full(Keeping),
    Reads(usize, Arc<ReadUnderWay>),
    Writes(Written, Arc<WriteUnderWay>),
    /// By O_SYNC or O_DSYNC; so many bytes.
    Syncs(usize, Syncing<M>),
    Ended(usize),
}

/// A read or write: its bytes, and how many of them were read or written; it fails as the plain call does.
#[must_use = "futures do nothing unless they are polled"]
pub struct Transferring<'a, M: Media> {
    files: &'a Files<M>,
    of: OpenFile<M>,
    what: What,
    /// Its own, lent to a copy; none once they were given back.
    bytes: Option<NonNull<[u8]>>,
    stage: Stage<M>,
    tries: Tries,
    waits: Waits,
}

// SAFETY: the bytes are the future's own, used by a copy alone until that has ended, on whatever thread.
unsafe impl<M: Media> Send for Transferring<'_, M> {}
// SAFETY: a shared future gives nobody the bytes.
unsafe impl<M: Media> Sync for Transferring<'_, M> {}

impl<'a, M: Media> Transferring<'a, M> {
    fn new(files: &'a Files<M>, of: OpenFile<M>, what: What, bytes: Box<[u8]>) -> Transferring<'a, M> {
        let bytes = Some(NonNull::from(Box::leak(bytes)));
        Transferring {
            files,
            of,
            what,
            bytes,
            stage: Stage::Begins,
            tries: Tries::of_task(),
            waits: Waits::default(),
        }
    }

    fn begin(&mut self) -> Result<Stage<M>> {
        let (files, of) = (self.files, &mut self.of);
        let mut bytes = self.bytes.expect("a future is not polled after its end");
        match self.what {
            What::Read { offset } => {
                // SAFETY: the future's own, which it uses no more until the copy has ended, as its stage says.
                let room = unsafe { LentRoom::new(bytes.as_mut()) };
                let step = match offset {
                    Some(offset) => files.begin_pread(of, room, offset)?,
                    None => files.begin_read(of, room)?,
                };
                Ok(match step {
                    Step::Done(read) => Stage::Ended(read),
                    Step::UnderWay(read, copy) => Stage::Reads(read, copy),
                    Step::Blocked(write) => Stage::Blocked(write),
                })
            }
            What::Write { offset } => {
                // SAFETY: as above.
                let bytes = unsafe { Lent::new(bytes.as_ref()) };
                let step = self.tries.attempt(|| match offset {
                    Some(offset) => files.begin_pwrite(of, bytes, offset),
                    None => files.begin_write(of, bytes),
                });
                let Some(step) = step else { return Ok(Stage::Full(files.fs().keeping())) };
                Ok(match step? {
                    Step::Done(written) => self.written(written),
                    Step::UnderWay(written, copy) => Stage::Writes(written, copy),
                    Step::Blocked(write) => Stage::Blocked(write),
                })
            }
        }
    }

    fn written(&self, written: Written) -> Stage<M> {
        match written.to_sync() {
            Some((ino, data_only)) => {
                Stage::Syncs(written.bytes(), Syncing::new(self.files.fs(), ino, data_only))
            }
            None => Stage::Ended(written.bytes()),
        }
    }

    fn go_on(&mut self, context: &mut Context<'_>) -> Poll<Result<usize>> {
        let fs = self.files.fs();
        loop {
            self.stage = match &mut self.stage {
                Stage::Begins => self.begin()?,
                Stage::Blocked(write) => {
                    ready!(fs.poll_until_over(&mut self.waits, write, context));
                    Stage::Begins
                }
                Stage::Full(keeping) => {
                    ready!(fs.poll_room(&mut self.waits, keeping, context));
                    Stage::Begins
                }
                Stage::Reads(bytes, read) => {
                    ready!(self.waits.poll(&read.copy, context, || fs.try_end_copy(&read.copy)));
                    let (bytes, waited) = (*bytes, fs.wait_for_read(read));
                    self.stage = Stage::Ended(bytes);
                    waited?;
                    return Poll::Ready(Ok(bytes));
                }
                Stage::Writes(written, write) => {
                    ready!(fs.poll_until_over(&mut self.waits, write, context));
                    let (written, waited) = (*written, fs.wait_for_write(write));
                    let next = self.written(written);
                    self.stage = Stage::Ended(written.bytes());
                    waited?;
                    next
                }
                Stage::Syncs(bytes, sync) => {
                    ready!(Pin::new(sync).poll(context))?;
                    Stage::Ended(*bytes)
                }
                Stage::Ended(bytes) => return Poll::Ready(Ok(*bytes)),
            };
        }
    }

    fn give_back(&mut self) -> Option<Box<[u8]>> {
        // SAFETY: leaked by `new`, of no use to a copy any more, and taken once.
        self.bytes.take().map(|bytes| unsafe { Box::from_raw(bytes.as_ptr()) })
    }
}

impl<M: Media> Future for Transferring<'_, M> {
    type Output = (Box<[u8]>, Result<usize>);

    /// Panics where it was ready before.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<(Box<[u8]>, Result<usize>)> {
        let done = ready!(self.go_on(context)).inspect_err(|_| self.of.failed());
        self.of.let_go();
        Poll::Ready((self.give_back().expect("a future is not polled after its end"), done))
    }
}

impl<M: Media> Drop for Transferring<'_, M> {
    fn drop(&mut self) {
        let fs = self.files.fs();
        match &self.stage {
            Stage::Blocked(write) => self.waits.leave(&write.copy),
            Stage::Full(keeping) => {
                keeping.last().into_iter().for_each(|copy| self.waits.leave(copy));
                if let Some(syncs) = &keeping.syncs {
                    syncs.bell.leave(&self.waits.seat);
                }
            }
            Stage::Reads(_, read) => {
                self.waits.leave(&read.copy);
                // Nobody asks how it ended.
                let _ = fs.wait_for_read(read);
            }
            Stage::Writes(_, write) => {
                self.waits.leave(&write.copy);
                fs.wait_until_over(write);
            }
            Stage::Begins | Stage::Syncs(..) | Stage::Ended(_) => {}
        }
        drop(self.give_back());
    }
}

/// A sync of one file: durable when it is ready, as far as the domain goes; it fails as fsync does.
#[must_use = "futures do nothing unless they are polled"]
pub struct Syncing<M: Media> {
    fs: Arc<Fs<M>>,
    ino: Ino,
    data_only: bool,
    /// Writes of the file that were under way when it began; none before.
    writes: Option<Vec<Arc<WriteUnderWay>>>,
    requested: Option<Arc<Requested>>,
    waits: Waits,
}

impl<M: Media> Syncing<M> {
    pub(in crate::fs) fn new(fs: &Arc<Fs<M>>, ino: Ino, data_only: bool) -> Syncing<M> {
        let fs = fs.clone();
        Syncing { fs, ino, data_only, writes: None, requested: None, waits: Waits::default() }
    }
}

impl<M: Media> Fs<M> {
    /// As [`fsync`](Fs::fsync), of a caller that holds nothing of its thread: in a uthread others run on its worker meanwhile.
    pub fn fsync_and_wait(self: &Arc<Self>, ino: Ino, data_only: bool) -> Result<()> {
        if wait::lets_others_run() {
            self.writes_of(ino).iter().for_each(|write| self.wait_until_over(write));
        }
        self.sync_elsewhere(|fs| fs.fsync(ino, data_only), move |fs, epoch| fs.fsync_since(ino, epoch))
    }

    /// The same as [`sync`](Fs::sync).
    pub fn sync_and_wait(self: &Arc<Self>) -> Result<()> {
        self.sync_elsewhere(Fs::sync, Fs::sync_since)
    }

    /// A sync of an ordinary file blocks its thread: not that of other uthreads.
    fn sync_elsewhere(
        self: &Arc<Self>,
        here: impl FnOnce(&Fs<M>) -> Result<()>,
        there: impl FnOnce(&Fs<M>, u64) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        // A model checker's threads are its own.
        if !self.core.deferring || self.core.read_only || cfg!(shuttle) || !wait::lets_others_run() {
            return here(self);
        }
        let requested = Requested::of(self, there);
        wait::until(&*requested, None, Holding::Nothing);
        requested.take().expect("it has ended")
    }

    /// Whether any write is under way, of whatever file.
    #[inline]
    pub fn has_writes_under_way(&self) -> bool {
        self.core.copies.writes.load(Ordering::Acquire) > 0
    }

    /// Waits until no write of this file is under way, as a change of its size will: in a uthread others run meanwhile. The
    /// caller holds nothing of the file system. Others may write afterwards.
    pub fn let_writes_end(&self, ino: Ino) {
        let Ok(inode) = self.inode(ino) else { return };
        let _still = Still::of(&inode);
        let under_way = || inode.body.read().writes.all().into_iter().find(|write| !write.is_over());
        while let Some(write) = under_way() {
            self.wait_until_over(&write);
        }
    }
}

impl<M: Media> Future for Syncing<M> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Syncing { fs, ino, data_only, writes, requested, waits } = &mut *self;
        let writes = writes.get_or_insert_with(|| fs.writes_of(*ino));
        while let Some(write) = writes.last() {
            ready!(fs.poll_until_over(waits, write, context));
            writes.pop();
        }
        if !fs.core.deferring {
            return Poll::Ready(fs.fsync(*ino, *data_only));
        }
        let ino = *ino;
        let sync =
            requested.get_or_insert_with(|| Requested::of(fs, move |fs, epoch| fs.fsync_since(ino, epoch)));
        sync.bell.listen(&waits.seat, context.waker());
        match sync.take() {
            Some(done) => {
                sync.bell.leave(&waits.seat);
                Poll::Ready(done)
            }
            None => Poll::Pending,
        }
    }
}

impl<M: Media> Drop for Syncing<M> {
    fn drop(&mut self) {
        let write = self.writes.as_ref().and_then(|writes| writes.last().cloned());
        if let Some(write) = write {
            self.waits.leave(&write.copy);
        }
        if let Some(sync) = &self.requested {
            sync.bell.leave(&self.waits.seat);
        }
    }
}

impl<M: Media> Files<M> {
    /// As [`read`](Files::read), into bytes that come back.
    pub fn read_async(&self, fd: Fd, bytes: Box<[u8]>) -> Transferring<'_, M> {
        Transferring::new(self, OpenFile::of(fd), What::Read { offset: None }, bytes)
    }

    /// As [`pread`](Files::pread), into bytes that come back.
    pub fn pread_async(&self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Transferring<'_, M> {
        Transferring::new(self, OpenFile::of(fd), What::Read { offset: Some(offset) }, bytes)
    }

    /// As [`write`](Files::write); the bytes come back.
    pub fn write_async(&self, fd: Fd, bytes: Box<[u8]>) -> Transferring<'_, M> {
        Transferring::new(self, OpenFile::of(fd), What::Write { offset: None }, bytes)
    }

    /// As [`pwrite`](Files::pwrite); the bytes come back.
    pub fn pwrite_async(&self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Transferring<'_, M> {
        Transferring::new(self, OpenFile::of(fd), What::Write { offset: Some(offset) }, bytes)
    }
}

impl<'a, M: Media> Classed<'a, M> {
    /// As [`Files::read_async`].
    pub fn read_async(self, fd: Fd, bytes: Box<[u8]>) -> Transferring<'a, M> {
        Transferring::new(self.files(), self.of(fd), What::Read { offset: None }, bytes)
    }

    /// As [`Files::pread_async`].
    pub fn pread_async(self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Transferring<'a, M> {
        Transferring::new(self.files(), self.of(fd), What::Read { offset: Some(offset) }, bytes)
    }

    /// As [`Files::write_async`].
    pub fn write_async(self, fd: Fd, bytes: Box<[u8]>) -> Transferring<'a, M> {
        Transferring::new(self.files(), self.of(fd), What::Write { offset: None }, bytes)
    }

    /// As [`Files::pwrite_async`].
    pub fn pwrite_async(self, fd: Fd, bytes: Box<[u8]>, offset: i64) -> Transferring<'a, M> {
        Transferring::new(self.files(), self.of(fd), What::Write { offset: Some(offset) }, bytes)
    }
}
