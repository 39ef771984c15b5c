//! The handles that C holds, of pools and of media.
//!
//! A handle is an entry of a fixed array that is never freed, so that a NULL, a stray pointer, something
//! that is closed or that came through fork() is an error instead of a crash.
//!
//! Closing must wait for the calls in flight, yet calls must not meet on one cache line. So what a handle
//! stands for is in several *stripes*, each a readers-writer lock of its own: a call read-locks the stripe
//! of its thread, the close write-locks them one after the other.

use crate::file::Waiting;
use crossbeam_utils::CachePadded;
use lodestone::error::{Error, Result};
use lodestone::wait::keeping_thread;
use parking_lot::RwLock;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// Handles of a kind open at a time in one process.
const HANDLES_MAX: usize = 256;
/// Threads beyond this many share stripes.
const STRIPES: usize = 32;

/// What handles stand for, and what callers are told of one that is of no use.
pub trait Held: Sized + 'static {
    const NOT_ONE: &str;
    const CLOSED: &str;
    const INHERITED: &str;
    const DISTRUSTED: &str;
    /// Behind a number.
    const TOO_MANY: &str;

    fn handles() -> &'static Handles<Self>;

    /// Returns once no copy that has begun uses bytes of a caller's any more.
    fn end_copies(&self) {}
}

/// All handles of one kind.
pub struct Handles<T> {
    all: [Handle<T>; HANDLES_MAX],
    next: AtomicUsize,
    protected: Once,
}

pub struct Handle<T> {
    /// Given out by an open, until its close has ended.
    taken: AtomicBool,
    /// One of the constants below.
    state: AtomicU8,
    stripes: [CachePadded<RwLock<Option<Arc<T>>>>; STRIPES],
}

const USABLE: u8 = 0;
/// A panic left it in a state that cannot be trusted.
const DISTRUSTED: u8 = 1;
/// Opened by the parent process.
const INHERITED: u8 = 2;

impl<T: Held> Handles<T> {
    pub const fn new() -> Handles<T> {
        Handles {
            all: [const { Handle::new() }; HANDLES_MAX],
            next: AtomicUsize::new(0),
            protected: Once::new(),
        }
    }

    /// A free handle, the one longest out of use first, so that a stale pointer stays stale for long.
    pub fn take(&self) -> Result<&Handle<T>> {
        self.forget_in_children();
        for _ in 0..HANDLES_MAX {
            let handle = &self.all[self.next.fetch_add(1, Ordering::Relaxed) % HANDLES_MAX];
            if !handle.taken.swap(true, Ordering::Acquire) {
                return Ok(handle);
            }
        }
        let message = format!("{HANDLES_MAX} {}", T::TOO_MANY);
        Err(Error::message(libc::EMFILE, "capi::handle", message))
    }

    /// The handle behind a pointer that C passes; the pointer is compared, not followed.
    #[inline]
    pub fn of(&self, address: usize) -> Result<&Handle<T>> {
        let offset = address.wrapping_sub(self.all.as_ptr().addr());
        if offset >= size_of_val(&self.all) || !offset.is_multiple_of(size_of::<Handle<T>>()) {
            return Err(Error::message(libc::EINVAL, "capi::handle", T::NOT_ONE));
        }
        Ok(&self.all[offset / size_of::<Handle<T>>()])
    }

    /// Locks and the media's memory do not survive fork() together: a child finds what its parent opened closed.
    fn forget_in_children(&self) {
        extern "C" fn in_child<T: Held>() {
            for handle in &T::handles().all {
                if handle.taken.load(Ordering::Relaxed) {
                    handle.state.store(INHERITED, Ordering::Relaxed);
                }
            }
        }
        self.protected.call_once(|| {
            // SAFETY: the handler only stores to atomics, which is safe in a child of several threads. It
            // fails only for want of memory, and then nothing is lost but this protection.
            unsafe { libc::pthread_atfork(None, None, Some(in_child::<T>)) };
        });
    }
}

impl<T> Handle<T> {
    const fn new() -> Handle<T> {
        Handle {
            taken: AtomicBool::new(false),
            state: AtomicU8::new(USABLE),
            stripes: [const { CachePadded::new(RwLock::new(None)) }; STRIPES],
        }
    }
}

impl<T: Held> Handle<T> {
    pub fn give_back(&self) {
        self.state.store(USABLE, Ordering::Relaxed);
        self.taken.store(false, Ordering::Release);
    }

    /// The pointer for C.
    pub fn fill(&'static self, held: T) -> *mut c_void {
        let held = Arc::new(held);
        for stripe in &self.stripes {
            *stripe.write() = Some(Arc::clone(&held));
        }
        (&raw const *self).cast_mut().cast()
    }

    /// Ends what it stands for, once the calls in flight and the copies under way have ended. Later calls wait for that, too:
    /// who is told that it is closed knows that nothing of it goes on.
    pub fn empty<R>(&self, end: impl FnOnce(T) -> R) -> Result<R> {
        if self.state.load(Ordering::Relaxed) == INHERITED {
            return Err(refusal::<T>(INHERITED));
        }
        // The first stripe decides which of two closes wins.
        let mut first = self.stripes[0].write();
        let held = first.take().ok_or_else(closed::<T>)?;
        let mut others: Vec<_> = self.stripes[1..].iter().map(|stripe| stripe.write()).collect();
        others.iter_mut().for_each(|stripe| drop(stripe.take()));
        let held = Arc::into_inner(held).expect("calls hold a stripe, not what it stands for");
        end_copies(&held);
        Ok(end(held))
    }

    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.state.load(Ordering::Relaxed) {
            USABLE => Ok(()),
            state => Err(refusal::<T>(state)),
        }
    }

    /// Who is told that it cannot be trusted may let go of buffers as well as who is told that it is closed.
    #[cold]
    fn refused(&self, error: Error) -> Error {
        if self.state.load(Ordering::Relaxed) == DISTRUSTED
            && let Some(held) = &*self.stripes[thread_number() % STRIPES].read()
        {
            end_copies(&**held);
        }
        error
    }
}

/// With a stripe locked, so with the thread kept.
fn end_copies<T: Held>(held: &T) {
    let _waiting = Waiting;
    keeping_thread(|| held.end_copies());
}

#[cold]
fn refusal<T: Held>(state: u8) -> Error {
    let (errno, message) = match state {
        INHERITED => (libc::EBADF, T::INHERITED),
        _ => (libc::EIO, T::DISTRUSTED),
    };
    Error::message(errno, "capi::handle", message)
}

/// Runs one call on what a handle stands for, which cannot be closed meanwhile.
#[inline]
pub fn with<T: Held, R>(address: usize, run: impl FnOnce(&T) -> Result<R>) -> Result<R> {
    let handle = T::handles().of(address)?;
    handle.check().map_err(|e| handle.refused(e))?;
    let stripe = handle.stripes[thread_number() % STRIPES].read();
    match &*stripe {
        // A uthread that let others run with the stripe locked might wait for one of them that closes the handle.
        Some(held) => keeping_thread(|| run(held)),
        None => Err(closed::<T>()),
    }
}

/// From now on calls on it fail, and closing it writes nothing. No copy uses bytes of a caller's any more: who is told lets go
/// of them.
#[cold]
pub fn distrust<T: Held>(address: usize, held: &T) {
    if let Ok(handle) = T::handles().of(address) {
        // A child process keeps its own reason.
        let _ = handle.state.compare_exchange(USABLE, DISTRUSTED, Ordering::Relaxed, Ordering::Relaxed);
    }
    end_copies(held);
}

#[cold]
fn closed<T: Held>() -> Error {
    Error::message(libc::EBADF, "capi::handle", T::CLOSED)
}

/// Threads are numbered as they come.
#[inline]
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) });
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
