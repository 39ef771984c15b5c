//! A readers-writer lock that leans towards one thread.
//!
//! While it leans, that thread takes and leaves it with plain loads and stores; every other thread first sets
//! it upright, once, with a [heavy barrier](super::barrier::heavy). Upright it is an ordinary lock
//! (parking_lot's) until one thread has taken it [`PATIENCE_FIRST`] times in a row. Each time it was set
//! upright it takes twice as long to lean again, so that a lock that threads share pays for few barriers.
//! (The idea is that of biased locking in Java machines.)
//!
//! Who is in by leaning has noted the lock's address among the *notes* of its thread. Invariants:
//!
//! 1. `leaning` changes only under the exclusive `raw` lock: to upright by another thread, and from upright to the
//!    thread that changes it. Who fails to set it upright (no barrier can be had) puts back what was there.
//! 2. A thread writes only its own notes: one that loaded `leaning` and was then stopped for a while may
//!    still make a note, before it looks again, and disturbs nobody with it.
//! 3. Who is in through `raw` has, since it had that, seen the lock upright and in no note of the thread that
//!    it leaned to. A lock that leans has nobody in through `raw`.
//!
//! Why two threads are never in at once: the thread that it leans to makes its note, then loads `leaning`; the
//! other stores UPRIGHT, passes the heavy barrier, then reads the notes. One of them sees the other's store.
//!
//! A thread that holds the lock and takes it again panics where it is in by leaning, and else stops for ever, as with
//! any lock. And a reader waits for a reader that it leans to: who holds one lock and takes another keeps to an order of locks, also where
//! both are only read.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crossbeam_utils::{Backoff, CachePadded};
use parking_lot::lock_api::{RawRwLock as _, RawRwLockDowngrade as _};

use super::primitive::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicUsize, Ordering};
use super::primitive::{RawRwLock, shared_static, wait};
use super::thread::NotSend;
use super::{barrier, thread};

/// Times in a row that a thread takes an upright lock before it leans towards it, at first.
const PATIENCE_FIRST: u16 = if cfg!(any(shuttle, loom)) { 2 } else { 32 };
/// Doublings of that.
const PATIENCE_STEPS_MAX: u8 = 10;
/// More is not counted.
const _: () = assert!((PATIENCE_FIRST as u32) << PATIENCE_STEPS_MAX < u16::MAX as u32);
/// In `leaning`: to nobody. Equals no slot.
const UPRIGHT: u32 = thread::NONE - 1;
/// Locks that a thread may be in by leaning at one time; the others it takes upright.
const NOTES_MAX: usize = 7;

shared_static! {
    /// The notes of each slot: addresses of locks, or 0.
    static NOTES: [CachePadded<[AtomicUsize; NOTES_MAX]>; thread::SLOTS_MAX] =
        [const { CachePadded::new([const { AtomicUsize::new(0) }; NOTES_MAX]) }; thread::SLOTS_MAX];
}

/// See the file's head. In memory order: beside what is read first of the value.
#[repr(C)]
pub struct Lock<T> {
    raw: RawRwLock,
    leaning: AtomicU32,
    /// Who took it last while it was upright, and how often in a row.
    last: AtomicU32,
    in_a_row: AtomicU16,
    /// Doublings of the patience.
    patience: AtomicU8,
    value: UnsafeCell<T>,
}

// SAFETY: as std's RwLock: the value moves with the lock, and references to it are shared between threads
// only by readers; the file's head says why a writer is alone.
unsafe impl<T: Send> Send for Lock<T> {}
// SAFETY: see above.
unsafe impl<T: Send + Sync> Sync for Lock<T> {}

/// Stays with its thread, which alone may write its notes.
pub struct ReadGuard<'a, T> {
    lock: &'a Lock<T>,
    /// If by leaning.
    note: Option<&'static AtomicUsize>,
    here: NotSend,
}

/// As [`ReadGuard`].
pub struct WriteGuard<'a, T> {
    lock: &'a Lock<T>,
    note: Option<&'static AtomicUsize>,
    here: NotSend,
}

impl<T> Lock<T> {
    /// Upright.
    pub fn new(value: T) -> Lock<T> {
        Lock::with(value, UPRIGHT)
    }

    /// Leans towards the thread with this slot.
    pub fn leaning_to(slot: u32, value: T) -> Lock<T> {
        Lock::with(value, if barrier::is_available() { slot } else { UPRIGHT })
    }

    #[inline]
    fn with(value: T, leaning: u32) -> Lock<T> {
        Lock {
            raw: RawRwLock::INIT,
            leaning: AtomicU32::new(leaning),
            last: AtomicU32::new(thread::NONE),
            in_a_row: AtomicU16::new(0),
            patience: AtomicU8::new(0),
            value: UnsafeCell::new(value),
        }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    #[inline]
    pub fn read(&self) -> ReadGuard<'_, T> {
        loop {
            let note = self.lean();
            if note.is_some() || self.read_upright() {
                return ReadGuard { lock: self, note, here: PhantomData };
            }
        }
    }

    #[inline]
    pub fn write(&self) -> WriteGuard<'_, T> {
        loop {
            let note = self.lean();
            if note.is_some() || self.write_upright() {
                return WriteGuard { lock: self, note, here: PhantomData };
            }
        }
    }

    /// Whether somebody is in who would be waited for. A hint: it may be otherwise by now, and nobody knows it of a lock that
    /// leans.
    #[inline]
    pub fn seems_taken(&self) -> bool {
        self.leaning.load(Ordering::Relaxed) == UPRIGHT && self.raw.is_locked()
    }

    #[inline]
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Gets in without a locked instruction, if the lock leans towards this thread.
    #[inline]
    fn lean(&self) -> Option<&'static AtomicUsize> {
        let me = thread::slot();
        if self.leaning.load(Ordering::Relaxed) != me {
            return None;
        }
        let note = self.free_note(me)?;
        note.store(self.address(), Ordering::Relaxed);
        barrier::light();
        if self.leaning.load(Ordering::Acquire) == me {
            return Some(note);
        }
        note.store(0, Ordering::Release);
        None
    }

    /// A note of this thread that is free. Panics where another is this lock's: the thread is in.
    #[inline]
    fn free_note(&self, me: u32) -> Option<&'static AtomicUsize> {
        let mut free = None;
        for note in NOTES[me as usize].iter().rev() {
            let address = note.load(Ordering::Relaxed);
            assert!(address != self.address(), "a thread takes a lock that it holds");
            free = if address == 0 { Some(note) } else { free };
        }
        free
    }

    /// Waits for the upright lock. False where it leans to the caller now, who is not in.
    #[cold]
    #[inline(never)]
    fn write_upright(&self) -> bool {
        let upright = self.lock_exclusive();
        if !upright {
            // SAFETY: locked just above, by this thread.
            unsafe { self.raw.unlock_exclusive() };
        }
        upright
    }

    /// As [`write_upright`](Lock::write_upright).
    #[cold]
    #[inline(never)]
    fn read_upright(&self) -> bool {
        if self.leaning.load(Ordering::Relaxed) == UPRIGHT && !self.is_patience_over() {
            self.raw.lock_shared();
            // It may have begun to lean before the lock was had; not since.
            if self.leaning.load(Ordering::Relaxed) == UPRIGHT {
                return true;
            }
            // SAFETY: locked just above, by this thread.
            unsafe { self.raw.unlock_shared() };
        }
        let upright = self.lock_exclusive();
        // SAFETY: locked just above, by this thread.
        unsafe { if upright { self.raw.downgrade() } else { self.raw.unlock_exclusive() } };
        upright
    }

    /// Waits for the exclusive `raw` lock, and answers whether the lock stands. A panic leaves both as they were, so that
    /// others do not wait for ever.
    fn lock_exclusive(&self) -> bool {
        self.raw.lock_exclusive();
        let unless_panicked = Undo { lock: self, leaning: self.leaning.load(Ordering::Relaxed) };
        let upright = self.stands();
        std::mem::forget(unless_panicked);
        upright
    }

    /// The caller has the exclusive `raw` lock: sets a lock upright that leans, or lets it lean to a thread that has
    /// been alone with it, and answers whether it stands.
    fn stands(&self) -> bool {
        let (leaning, me) = (self.leaning.load(Ordering::Relaxed), thread::slot());
        if leaning == UPRIGHT {
            if !self.is_patience_over() {
                return true;
            }
            self.in_a_row.store(0, Ordering::Relaxed);
            self.leaning.store(me, Ordering::Relaxed);
            return false;
        }
        if leaning == me {
            // No note was free; and none is this lock's.
            let _ = self.free_note(me);
            self.leaning.store(UPRIGHT, Ordering::Relaxed);
        } else {
            self.set_upright(leaning);
        }
        true
    }

    /// Counts that the calling thread takes an upright lock. True once it did so long enough.
    fn is_patience_over(&self) -> bool {
        let me = thread::slot();
        if self.last.load(Ordering::Relaxed) != me {
            self.last.store(me, Ordering::Relaxed);
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        let times = self.in_a_row.load(Ordering::Relaxed).saturating_add(1);
        self.in_a_row.store(times, Ordering::Relaxed);
        let patience = PATIENCE_FIRST << self.patience.load(Ordering::Relaxed);
        times > patience && me != thread::NONE && barrier::is_available()
    }

    fn set_upright(&self, slot: u32) {
        self.leaning.store(UPRIGHT, Ordering::Relaxed);
        barrier::heavy();
        let backoff = Backoff::new();
        // Acquire: what the other thread did under the lock is seen here.
        while NOTES[slot as usize].iter().any(|note| note.load(Ordering::Acquire) == self.address()) {
            wait(&backoff);
        }
        let patience = self.patience.load(Ordering::Relaxed);
        self.patience.store((patience + 1).min(PATIENCE_STEPS_MAX), Ordering::Relaxed);
    }
}

/// What a panic with the exclusive `raw` lock puts back, as it lets go of that.
struct Undo<'a, T> {
    lock: &'a Lock<T>,
    leaning: u32,
}

impl<T> Drop for Undo<'_, T> {
    fn drop(&mut self) {
        self.lock.leaning.store(self.leaning, Ordering::Relaxed);
        // SAFETY: locked by this thread, which is not in.
        unsafe { self.lock.raw.unlock_exclusive() };
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: readers are in; no writer is (the file's head).
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> Drop for ReadGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match self.note {
            Some(note) => note.store(0, Ordering::Release),
            // SAFETY: this guard stands for one shared lock, taken by this thread.
            None => unsafe { self.lock.raw.unlock_shared() },
        }
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread is in alone (the file's head).
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread is in alone (the file's head).
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match self.note {
            Some(note) => note.store(0, Ordering::Release),
            // SAFETY: this guard stands for the exclusive lock, taken by this thread.
            None => unsafe { self.lock.raw.unlock_exclusive() },
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::time::Duration;

    impl<T> Lock<T> {
        fn new_leaning(value: T) -> Lock<T> {
            Lock::leaning_to(thread::slot(), value)
        }

        fn leans(&self) -> bool {
            self.leaning.load(Ordering::Relaxed) != UPRIGHT
        }
    }

    #[test]
    fn it_leans_after_some_patience_to_whoever_is_alone_with_it() {
        let lock = Lock::new(0);
        for i in 0..=PATIENCE_FIRST {
            assert!(!lock.leans());
            if i % 2 == 0 { *lock.write() += 1 } else { assert!(*lock.read() > 0) }
        }
        assert_eq!(lock.leans(), barrier::is_available());
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..=2 * PATIENCE_FIRST {
                    *lock.write() += 1;
                    assert!(!lock.leans(), "it was wrong once, so it waits longer");
                }
                *lock.write() += 1;
                assert_eq!(lock.leans(), barrier::is_available());
            });
        });
        drop(lock.read());
        assert!(!lock.leans());
    }

    #[test]
    #[cfg_attr(miri, ignore = "a million uses")]
    fn a_lock_that_threads_share_hardly_ever_leans() {
        let lock = Lock::new(0);
        for _ in 0..2 * PATIENCE_STEPS_MAX {
            while barrier::is_available() && !lock.leans() {
                *lock.write() += 1;
            }
            std::thread::scope(|s| s.spawn(|| *lock.write() += 1).join().unwrap());
        }
        for _ in 0..PATIENCE_FIRST << (PATIENCE_STEPS_MAX - 1) {
            *lock.write() += 1;
            assert!(!lock.leans());
        }
    }

    #[test]
    fn nobody_is_in_twice() {
        // From the first use that leans on, whatever was held in between and in whatever order it went.
        for taken in [0, PATIENCE_FIRST + 1] {
            let lock = if taken == 0 { Lock::new_leaning(0) } else { Lock::new(0) };
            (0..taken).for_each(|_| drop(lock.write()));
            if !lock.leans() {
                continue; // no barrier here: it stops for ever
            }
            let others: Vec<Lock<usize>> = (0..NOTES_MAX - 1).map(Lock::new_leaning).collect();
            let mut held: Vec<_> = others.iter().map(Lock::write).collect();
            let first = lock.write();
            let again =
                || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(lock.read()))).is_err();
            assert!(again(), "all notes are taken");
            held.remove(0);
            assert!(again(), "a note in front is free");
            drop(first);
        }
    }

    /// From now on the kernel refuses it to the calling thread, as a sandbox does; whether that can be had here.
    #[cfg(not(any(miri, shuttle)))]
    fn forbid_membarrier() -> bool {
        let step = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let mut steps = [
            // The number of the call is what it is told first.
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_membarrier as u32),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the filter outlives the call, which copies it. Both change this thread alone.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
        }
    }

    #[test]
    #[cfg(not(any(miri, shuttle)))]
    fn who_may_pass_no_barrier_panics_and_leaves_the_lock_as_it_was() {
        let lock = Lock::new_leaning(0);
        if !lock.leans() {
            println!("SKIPPED: membarrier_refused: the kernel has none");
            return;
        }
        std::thread::scope(|s| {
            s.spawn(|| {
                if !forbid_membarrier() {
                    println!("SKIPPED: membarrier_refused: no seccomp");
                    return;
                }
                let panics = |take: fn(&Lock<i32>)| {
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| take(&lock))).is_err()
                };
                assert!(panics(|lock| drop(lock.write())) && panics(|lock| drop(lock.read())));
            });
        });
        assert!(lock.leans());
        *lock.write() += 1;
        std::thread::scope(|s| s.spawn(|| *lock.write() += 1).join().unwrap());
        assert_eq!(*lock.read(), 2);
    }

    #[test]
    fn guards_may_go_in_any_order() {
        let locks: Vec<Lock<usize>> = (0..3).map(Lock::new_leaning).collect();
        let (a, b, c) = (locks[0].read(), locks[1].write(), locks[2].read());
        drop(b);
        let b = locks[1].read();
        drop(a);
        assert_eq!((*b, *c, *locks[0].write()), (1, 2, 0));
        drop((c, b));
        assert!(std::thread::spawn(move || locks.iter().all(|lock| *lock.write() < 3)).join().unwrap());
    }

    #[test]
    fn a_panic_lets_go_of_the_lock() {
        for lock in [Lock::new(0), Lock::new_leaning(0)] {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut held = lock.write();
                *held = 1;
                panic!("with the lock");
            }));
            assert!(panicked.is_err());
            let seen = std::thread::scope(|s| s.spawn(|| *lock.read()).join().unwrap());
            assert_eq!((seen, *lock.write()), (1, 1));
        }
    }

    /// A slot passes from thread to thread, and with it what leans to it, while others take the lock.
    #[test]
    fn heirs_of_a_slot_are_never_in_with_others() {
        let (lives, uses) = if cfg!(miri) { (3, 20) } else { (150, 200) };
        let lock = Lock::new_leaning((0u64, 0u64));
        let add = |times: u64| {
            for _ in 0..times {
                let mut both = lock.write();
                both.0 += 1;
                std::hint::black_box(&mut *both);
                both.1 += 1;
                assert_eq!(both.0, both.1);
            }
        };
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..lives {
                        std::thread::scope(|s| s.spawn(|| add(uses)).join().unwrap());
                    }
                });
            }
        });
        assert_eq!(*lock.read(), (2 * lives * uses, 2 * lives * uses));
    }

    #[test]
    fn more_locks_than_notes() {
        let locks: Vec<Lock<usize>> = (0..3 * NOTES_MAX).map(Lock::new_leaning).collect();
        let held: Vec<_> = locks.iter().map(Lock::write).collect();
        assert!(held.iter().enumerate().all(|(i, guard)| **guard == i));
        std::thread::scope(|s| {
            let other = s.spawn(|| locks.iter().map(|lock| *lock.read()).sum::<usize>());
            std::thread::sleep(Duration::from_millis(5));
            assert!(!other.is_finished());
            drop(held);
            assert_eq!(other.join().unwrap(), (0..locks.len()).sum());
        });
    }

    /// Writers add to two numbers in turn; who ever sees them differ was in with another.
    #[test]
    fn nobody_is_in_with_a_writer() {
        let rounds = if cfg!(miri) { 50 } else { 30_000 };
        for born in [Lock::new, Lock::new_leaning] {
            let lock = born((0u64, 0u64));
            let start = Barrier::new(3);
            std::thread::scope(|s| {
                for t in 0..3u64 {
                    let (lock, start) = (&lock, &start);
                    s.spawn(move || {
                        start.wait();
                        for i in 0..rounds {
                            // Runs of one thread, so that it comes to lean, and breaks.
                            if (i / 64 + t) % 3 != 0 && i % 7 != 0 {
                                std::hint::spin_loop();
                                continue;
                            }
                            if i % 4 == 0 {
                                let mut both = lock.write();
                                both.0 += 1;
                                std::hint::black_box(&mut *both);
                                both.1 += 1;
                            } else {
                                let both = lock.read();
                                assert_eq!(both.0, both.1);
                            }
                        }
                    });
                }
            });
            let both = lock.read();
            assert!(both.0 == both.1 && both.0 > 0);
        }
    }

    #[test]
    fn what_a_dead_thread_left_leaning_is_anybodys() {
        for _ in 0..100 {
            let lock = std::thread::spawn(|| Lock::new_leaning(1)).join().unwrap();
            *lock.write() += 1;
            assert_eq!(*lock.read(), 2);
        }
    }
}
