//! What stat reports of an inode, in one cache line that is found by the inode's number and read without a lock.
//!
//! A look-up knows the number before it has compared the name, so this line and the name come from memory at the same
//! time; the inode itself would be two misses behind that. The inode's body
//! stays what everything else reads and changes: who has changed it shows the new attributes here as it lets go of
//! the lock ([`Changing`]). The link count is the table's, and who changes it changes it here, too.
//!
//! A line is a sequence lock. It is changed by one thread at a time:
//!
//! 1. before anybody else knows the inode ([`StatLine::show`]),
//! 2. under the exclusive lock of the inode, if that was not dead when the lock was had: until the inode is dead
//!    and the lock was let go, its number is not given to another,
//! 3. except the access time, which readers of the inode set: a word of its own.
//!
//! A line shows nothing before its inode was loaded and after it died.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::format::{BLOCK, unpack_time};
use super::inode::{Body, Data};
use super::types::{Attr, Ino};
use crate::media::prefetch;
use crate::sync::{Lock, ReadGuard, WriteGuard};

#[derive(Default)]
#[repr(C, align(64))]
pub struct StatLine {
    /// Odd while the line is being changed.
    sequence: AtomicU32,
    /// Type and permissions; 0: nothing is shown.
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    size: AtomicU64,
    /// Mapped blocks; as many as blocks have numbers.
    mapped: AtomicU32,
    links: AtomicU32,
    atime: AtomicU64,
    mtime: AtomicU64,
    ctime: AtomicU64,
    btime: AtomicU64,
}

const _: () = assert!(size_of::<StatLine>() == 64);

impl StatLine {
    /// The attributes, unless there are none or they are just being changed.
    #[inline]
    pub fn read(&self, ino: Ino, generation: u64) -> Option<Attr> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let attr = Attr {
            ino,
            generation,
            mode: self.mode.load(Ordering::Relaxed),
            nlink: self.links.load(Ordering::Relaxed),
            uid: self.uid.load(Ordering::Relaxed),
            gid: self.gid.load(Ordering::Relaxed),
            rdev: 0,
            size: self.size.load(Ordering::Relaxed),
            blocks: self.mapped.load(Ordering::Relaxed) as u64 * (BLOCK as u64 / 512),
            atime: unpack_time(self.atime.load(Ordering::Relaxed)),
            mtime: unpack_time(self.mtime.load(Ordering::Relaxed)),
            ctime: unpack_time(self.ctime.load(Ordering::Relaxed)),
            btime: unpack_time(self.btime.load(Ordering::Relaxed)),
        };
        fence(Ordering::Acquire);
        let whole = sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        (whole && attr.mode != 0).then_some(attr)
    }

    /// Shows an inode that nobody else knows yet.
    pub fn show(&self, body: &Body, atime: u64, links: u32) {
        self.atime.store(atime, Ordering::Relaxed);
        self.begin();
        self.links.store(links, Ordering::Relaxed);
        self.change(body, body.mode);
    }

    /// For who has the inode's exclusive lock: the count is shown with what else changes until that is let go of.
    #[inline]
    pub fn set_links(&self, links: u32) {
        self.begin();
        self.links.store(links, Ordering::Relaxed);
    }

    /// Shows nothing until the change ends: when the caller lets go of the inode's lock. Answers the sequence.
    #[inline]
    fn begin(&self) -> u32 {
        let sequence = self.sequence.load(Ordering::Relaxed) | 1;
        self.sequence.store(sequence, Ordering::Relaxed);
        fence(Ordering::Release);
        sequence
    }

    fn change(&self, body: &Body, mode: u32) {
        let sequence = self.begin();
        // A device's number has no room here.
        let mode = if body.rdev() == 0 { mode } else { 0 };
        let mapped = if let Data::File(index) = &body.data { index.mapped() as u32 } else { 0 };
        self.mode.store(mode, Ordering::Relaxed);
        self.uid.store(body.uid, Ordering::Relaxed);
        self.gid.store(body.gid, Ordering::Relaxed);
        self.size.store(body.size(), Ordering::Relaxed);
        self.mapped.store(mapped, Ordering::Relaxed);
        self.mtime.store(body.mtime, Ordering::Relaxed);
        self.ctime.store(body.ctime, Ordering::Relaxed);
        self.btime.store(body.btime, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Release);
    }
}

/// An access time: the inode's, and the one that its line shows. Several readers may set it at once.
pub fn set_atime(of_inode: &AtomicU64, line: &StatLine, atime: u64) {
    of_inode.store(atime, Ordering::SeqCst);
    // Who shows a time last has seen that it is the inode's.
    loop {
        let now = of_inode.load(Ordering::SeqCst);
        line.atime.store(now, Ordering::SeqCst);
        if of_inode.load(Ordering::SeqCst) == now {
            return;
        }
    }
}

/// The lock on an inode's body.
pub struct BodyLock(Lock<Body>);

/// The exclusive lock; when it goes, the inode's line shows what the body is then.
pub struct Changing<'a> {
    line: Option<&'a StatLine>,
    body: WriteGuard<'a, Body>,
}

impl BodyLock {
    pub fn new(body: Body) -> BodyLock {
        BodyLock(Lock::new(body))
    }

    #[inline]
    pub fn read(&self) -> ReadGuard<'_, Body> {
        self.0.read()
    }

    /// `line`: that of the inode's number.
    #[inline]
    pub fn write<'a>(&'a self, line: &'a StatLine) -> Changing<'a> {
        prefetch(line);
        let body = self.0.write();
        let line = (!body.dead).then_some(line);
        Changing { line, body }
    }

    /// As [`Lock::seems_taken`].
    #[inline]
    pub fn seems_taken(&self) -> bool {
        self.0.seems_taken()
    }

    pub fn get_mut(&mut self) -> &mut Body {
        self.0.get_mut()
    }
}

impl Deref for Changing<'_> {
    type Target = Body;

    #[inline]
    fn deref(&self) -> &Body {
        &self.body
    }
}

impl DerefMut for Changing<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Body {
        &mut self.body
    }
}

impl Drop for Changing<'_> {
    #[inline]
    fn drop(&mut self) {
        // What shows nothing belongs to an inode that is not in the table.
        if let Some(line) = self.line.filter(|line| line.mode.load(Ordering::Relaxed) != 0) {
            line.change(&self.body, if self.body.dead { 0 } else { self.body.mode });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::format::SlotHeader;
    use super::super::log::{Log, Owner};
    use super::*;
    use crate::media::Addr;

    fn lock(uid: u32) -> BodyLock {
        let header =
            SlotHeader { mode: libc::S_IFREG | 0o644, uid, gid: uid, generation: 1, rdev: 0, btime: 0 };
        let owner = Owner { ino: 5, generation: 1, slot: Addr(0) };
        BodyLock::new(Body::new(&header, Log::new(0, &owner)))
    }

    fn read(line: &StatLine) -> Option<Attr> {
        line.read(Ino(5), 1)
    }

    #[test]
    fn what_is_read_belongs_together() {
        let rounds = if cfg!(miri) { 30 } else { 100_000 };
        let (lock, line, done) = (lock(0), StatLine::default(), AtomicBool::new(false));
        line.show(&lock.read(), 0, 0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    let mut last = 0;
                    while !done.load(Ordering::Relaxed) {
                        let Some(attr) = read(&line) else { continue };
                        let size = attr.size as u32;
                        assert_eq!((attr.uid, attr.gid, attr.nlink), (size, size, size));
                        assert!(size >= last, "time runs forwards");
                        last = size;
                    }
                });
            }
            for round in 1..=rounds {
                let mut body = lock.write(&line);
                line.set_links(round);
                (body.uid, body.gid, body.size) = (round, round, round as u64);
                assert!(read(&line).is_none(), "half of it is changed");
                drop(body);
                assert_eq!(read(&line).map(|attr| attr.size), Some(round as u64));
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_dead_inode_leaves_the_line_to_its_heir() {
        let (dead, heir, line) = (lock(1), lock(2), StatLine::default());
        line.show(&dead.read(), 0, 1);
        dead.write(&line).dead = true;
        assert!(read(&line).is_none());
        line.show(&heir.read(), 7, 3);
        dead.write(&line).uid = 3;
        let attr = read(&line).expect("the heir is shown");
        assert_eq!((attr.uid, attr.atime, attr.nlink), (2, unpack_time(7), 3));
    }

    #[test]
    fn what_is_not_in_the_table_or_is_a_device_is_not_shown() {
        let (lock, line) = (lock(1), StatLine::default());
        lock.write(&line).uid = 2;
        assert!(read(&line).is_none());
        lock.write(&line).data = Data::Special(5);
        line.show(&lock.read(), 0, 1);
        assert!(read(&line).is_none());
    }

    #[test]
    fn of_two_access_times_the_inode_and_its_line_have_the_same() {
        let rounds = if cfg!(miri) { 20 } else { 2000 };
        for round in 0..rounds {
            let (of_inode, line) = (AtomicU64::new(0), StatLine::default());
            std::thread::scope(|s| {
                for time in 1..=2 {
                    let (of_inode, line) = (&of_inode, &line);
                    s.spawn(move || set_atime(of_inode, line, 2 * round + time));
                }
            });
            assert_eq!(of_inode.into_inner(), line.atime.into_inner());
        }
    }
}
