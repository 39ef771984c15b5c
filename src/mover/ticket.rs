//! Copies that go on while their caller does something else.
//!
//! Any thread may poll a ticket or wait for it. What an engine leaves undone is copied by whoever finds that out; with
//! the engines `cpu` and `semaphore`, and for copies that are too small for others, all is done when the submission
//! returns.
//!
//! **Nothing is used after it is gone.** A ticket of this module's safe functions owns its buffer, and gives it back; or
//! lends it for a scope, which waits. [`Copies`] waits for all tickets before it goes. A ticket that is forgotten leaks
//! its buffer, which an engine may go on using: so buffers are `'static`, or their scope waits for them all the same.
//!
//! **Invariants.**
//! 1. A copy under way is in `Home::under_way`: whoever drops the last ticket does not drop the flight with it.
//! 2. Its bytes are there until its flight has ended: an owned buffer is not touched before, whoever owns the ticket.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Mover;
use super::copies::{Copied, Copies, CopyOptions, bad_media, sync_failed};
use super::engine_port::{RawTransfer, Transfer};
use super::flight::Flight;
use crate::error::{Error, Result};
use crate::media::{Addr, Fault, Media, Span};

/// What tickets share with their [`Copies`].
pub(super) struct Home<M: Media> {
    // Before media: engines end first.
    mover: Mover<M>,
    media: M,
    under_way: Mutex<HashMap<u64, Arc<Op>>>,
    next: AtomicU64,
}

/// One copy.
struct Op {
    number: u64,
    options: CopyOptions,
    bytes: u64,
    to_media: bool,
    state: Mutex<State>,
}

struct State {
    /// Under way.
    flight: Option<Flight>,
    outcome: std::result::Result<Copied, Failure>,
    /// Nothing is left that has to be written back by the host.
    synced: bool,
}

/// Told to everybody who waits.
#[derive(Clone)]
enum Failure {
    Fault(Fault),
    /// By its errno.
    Sync(i32),
    Refused {
        errno: i32,
        site: &'static str,
        message: String,
    },
}

impl Failure {
    fn error(&self) -> Error {
        match self {
            Failure::Fault(fault) => bad_media(*fault),
            Failure::Sync(errno) => sync_failed(std::io::Error::from_raw_os_error(*errno)),
            Failure::Refused { errno, site, message } => Error::message(*errno, site, message.clone()),
        }
    }
}

impl<M: Media> Home<M> {
    pub(super) fn new(media: M, mover: Mover<M>) -> Home<M> {
        Home { mover, media, under_way: Mutex::default(), next: AtomicU64::new(0) }
    }

    pub(super) fn media(&self) -> &M {
        &self.media
    }

    pub(super) fn mover(&self) -> &Mover<M> {
        &self.mover
    }

    pub(super) fn wait_for_all(&self) {
        let all: Vec<Arc<Op>> = self.under_way.lock().values().cloned().collect();
        for op in all {
            // How it ended its ticket says.
            let _ = self.wait(&op);
        }
    }

    /// # Safety
    ///
    /// The transfers' bytes are there until the copy has ended, as `Engine::submit` asks for. The request was checked.
    unsafe fn submit(&self, transfers: &[RawTransfer], bytes: u64, options: &CopyOptions) -> Arc<Op> {
        // SAFETY: the caller's; the flight ends in `end`, with these.
        let flight =
            unsafe { self.mover.begin(&self.media, options.via(), transfers, options.crc.is_some(), false) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let under_way = !flight.is_over();
        let to_media = transfers.first().is_some_and(RawTransfer::is_to_media);
        let state = State {
            flight: Some(flight),
            outcome: Ok(Copied::default()),
            synced: !(to_media && options.durable),
        };
        let op = Arc::new(Op { number, options: *options, bytes, to_media, state: Mutex::new(state) });
        if under_way {
            self.under_way.lock().insert(number, op.clone());
        } else {
            self.end(&op, &mut op.state.lock());
        }
        op
    }

    /// Ends the flight, if it has not.
    fn end(&self, op: &Op, state: &mut State) {
        let Some(flight) = &mut state.flight else { return };
        // SAFETY: begun by `submit`, with this mover and these media; the bytes are there by invariant 2.
        let ended = unsafe { self.mover.end(&self.media, flight) };
        let crc = flight.crc(op.options.crc);
        state.outcome = ended.map(|()| Copied { bytes: op.bytes, crc }).map_err(Failure::Fault);
        state.flight = None;
        self.under_way.lock().remove(&op.number);
    }

    fn poll(&self, op: &Op) -> bool {
        // Who has the lock waits for it: so it has not ended, or will have soon.
        let Some(mut state) = op.state.try_lock() else { return false };
        let Some(flight) = &mut state.flight else { return true };
        // SAFETY: as in `end`.
        if !unsafe { self.mover.has_ended(&self.media, flight) } {
            return false;
        }
        self.end(op, &mut state);
        true
    }

    fn wait(&self, op: &Op) -> Result<Copied> {
        let mut state = op.state.lock();
        self.end(op, &mut state);
        if !state.synced && state.outcome.is_ok() {
            if let Err(e) = self.sync() {
                state.outcome = Err(Failure::Sync(e.errno()));
            }
            state.synced = true;
        }
        state.outcome.clone().map_err(|failure| failure.error())
    }
}

/// Waits for the tickets under way.
impl<M: Media> Drop for Copies<M> {
    fn drop(&mut self) {
        self.home.wait_for_all();
    }
}

/// A copy whose bytes the caller vouches for: see [`Copies::submit_raw`]. Dropping it waits for nothing.
pub struct RawTicket<M: Media = Span> {
    home: Arc<Home<M>>,
    op: Arc<Op>,
}

impl<M: Media> Clone for RawTicket<M> {
    fn clone(&self) -> RawTicket<M> {
        RawTicket { home: self.home.clone(), op: self.op.clone() }
    }
}

impl<M: Media> RawTicket<M> {
    /// Whether the copy has ended: then nobody uses its bytes any more. May copy what an engine left undone.
    pub fn poll(&self) -> bool {
        self.home.poll(&self.op)
    }

    /// Waits until it has ended, and is durable where that was asked for. Again and again, and on any thread: the answer
    /// stays the same. EIO for bad media, or a sync that failed.
    pub fn wait(&self) -> Result<Copied> {
        self.home.wait(&self.op)
    }

    /// Whether it goes to media.
    pub fn is_to_media(&self) -> bool {
        self.op.to_media
    }
}

impl<M: Media> Copies<M> {
    /// Begins to copy many parts, all to media or all from it. What is wrong with the request is told at once, as
    /// [`vectored`](Copies::vectored) tells it.
    ///
    /// # Safety
    ///
    /// Until the ticket has ended (`wait` returned, `poll` answered true, or this `Copies` was dropped or drained): the
    /// parts' bytes are there; nobody changes them, and nobody uses those that are copied to.
    pub unsafe fn submit_raw(&self, parts: &[RawTransfer], options: &CopyOptions) -> Result<RawTicket<M>> {
        let bytes = self.check(parts)?;
        // SAFETY: the caller's.
        let op = unsafe { self.home.submit(parts, bytes, options) };
        Ok(RawTicket { home: self.home.clone(), op })
    }

    /// As `submit_raw`, what is wrong with the request being told by the ticket.
    ///
    /// # Safety
    ///
    /// As for [`submit_raw`](Copies::submit_raw).
    unsafe fn submit_any(&self, parts: &[RawTransfer], options: &CopyOptions) -> RawTicket<M> {
        // SAFETY: the caller's.
        unsafe { self.submit_raw(parts, options) }.unwrap_or_else(|error| {
            let (errno, site, message) = (error.errno(), error.site(), error.to_string());
            let refused = Err(Failure::Refused { errno, site, message });
            let state = Mutex::new(State { flight: None, outcome: refused, synced: true });
            let op = Op { number: u64::MAX, options: *options, bytes: 0, to_media: false, state };
            RawTicket { home: self.home.clone(), op: Arc::new(op) }
        })
    }

    /// Begins to copy to media. The ticket has the buffer meanwhile; what is wrong with the request it tells when it is
    /// waited for.
    pub fn submit_to_media<B>(&self, at: Addr, buffer: B, options: &CopyOptions) -> Ticket<B, M>
    where
        B: AsRef<[u8]> + 'static,
    {
        self.lend(buffer, options, |buffer| vec![Transfer::to_media(at, B::as_ref(buffer))])
    }

    /// Begins to copy from media, as much as the buffer has room for.
    pub fn submit_from_media<B>(&self, at: Addr, buffer: B, options: &CopyOptions) -> Ticket<B, M>
    where
        B: AsMut<[u8]> + 'static,
    {
        self.lend(buffer, options, |buffer| vec![Transfer::FromMedia { at, to: B::as_mut(buffer) }])
    }

    /// Begins to copy many buffers to media, each to an address of its own.
    pub fn submit_vectored_to_media<B>(
        &self,
        parts: Vec<(Addr, B)>,
        options: &CopyOptions,
    ) -> Ticket<Vec<(Addr, B)>, M>
    where
        B: AsRef<[u8]> + 'static,
    {
        self.lend(parts, options, |parts| {
            parts.iter().map(|(at, buffer)| Transfer::to_media(*at, buffer.as_ref())).collect()
        })
    }

    /// Begins to fill many buffers from media.
    pub fn submit_vectored_from_media<B>(
        &self,
        parts: Vec<(Addr, B)>,
        options: &CopyOptions,
    ) -> Ticket<Vec<(Addr, B)>, M>
    where
        B: AsMut<[u8]> + 'static,
    {
        self.lend(parts, options, |parts| {
            parts
                .iter_mut()
                .map(|(at, buffer)| Transfer::FromMedia { at: *at, to: buffer.as_mut() })
                .collect()
        })
    }

    fn lend<B: 'static>(
        &self,
        buffer: B,
        options: &CopyOptions,
        parts: impl for<'b> FnOnce(&'b mut B) -> Vec<Transfer<'b>>,
    ) -> Ticket<B, M> {
        let lent = Lent(NonNull::from(Box::leak(Box::new(buffer))));
        // SAFETY: just made, and nobody else's. The parts borrow from it for as long as nobody touches it, which is until
        // the ticket takes it back: after the copy has ended. If that never happens it is never freed.
        let raw = unsafe {
            let mut parts = parts(&mut *lent.0.as_ptr());
            let raw: Vec<RawTransfer> = parts.iter_mut().map(Transfer::raw).collect();
            self.submit_any(&raw, options)
        };
        Ticket { raw, lent: Some(lent) }
    }

    /// Runs what may begin copies with borrowed buffers; all of them have ended when this returns, or panics, also those
    /// whose tickets were forgotten.
    pub fn scope<'env, T>(
        &'env self,
        run: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env, M>) -> T,
    ) -> T {
        let scope = Scope { copies: self, begun: Mutex::default(), scope: PhantomData, env: PhantomData };
        let made = catch_unwind(AssertUnwindSafe(|| run(&scope)));
        // The borrows end with this call: there is no going on while an engine may use them.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            scope.begun.lock().iter().for_each(|ticket| drop(ticket.wait()));
        }));
        if ended.is_err() {
            std::process::abort();
        }
        made.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// A buffer on the heap, of which an engine may have the address. Freed by nobody but the ticket's end.
struct Lent<B>(NonNull<B>);

// SAFETY: whoever has it has the buffer, which goes where `B` may go.
unsafe impl<B: Send> Send for Lent<B> {}
// SAFETY: a reference to it leads nowhere: the buffer is reached by value alone.
unsafe impl<B> Sync for Lent<B> {}

/// A copy that has its buffer. Dropped early it waits, so that the buffer can go.
#[must_use = "dropped, it waits for the copy"]
pub struct Ticket<B, M: Media = Span> {
    raw: RawTicket<M>,
    /// None once it was given back.
    lent: Option<Lent<B>>,
}

impl<B, M: Media> Ticket<B, M> {
    /// Whether the copy has ended: [`wait`](Ticket::wait) then waits for no engine.
    pub fn poll(&self) -> bool {
        self.raw.poll()
    }

    /// Waits until it has ended, and is durable where that was asked for; gives the buffer back. Errors: those of
    /// [`Copies::vectored`].
    pub fn wait(mut self) -> (B, Result<Copied>) {
        let ended = self.raw.wait();
        let lent = self.lent.take().expect("it is given back once");
        // SAFETY: made by `Box::leak`, and of no use to the engine any more.
        (*unsafe { Box::from_raw(lent.0.as_ptr()) }, ended)
    }
}

impl<B, M: Media> Drop for Ticket<B, M> {
    fn drop(&mut self) {
        if self.lent.is_some() {
            // Nobody is there to be told how it ended. If this panics the buffer is leaked.
            let _ = self.raw.wait();
        }
        if let Some(lent) = self.lent.take() {
            // SAFETY: as in `wait`.
            drop(unsafe { Box::from_raw(lent.0.as_ptr()) });
        }
    }
}

/// See [`Copies::scope`]. (The lifetimes are those of `std::thread::scope`.)
pub struct Scope<'scope, 'env: 'scope, M: Media = Span> {
    copies: &'env Copies<M>,
    begun: Mutex<Vec<RawTicket<M>>>,
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, M: Media> Scope<'scope, '_, M> {
    /// Begins to copy to media. What is wrong with the request is told at once, as [`Copies::vectored`] tells it.
    pub fn to_media(
        &'scope self,
        at: Addr,
        from: &'scope [u8],
        options: &CopyOptions,
    ) -> Result<ScopedTicket<'scope, M>> {
        self.vectored([Transfer::to_media(at, from)], options)
    }

    /// Begins to copy from media.
    pub fn from_media(
        &'scope self,
        at: Addr,
        to: &'scope mut [u8],
        options: &CopyOptions,
    ) -> Result<ScopedTicket<'scope, M>> {
        self.vectored([Transfer::FromMedia { at, to }], options)
    }

    /// Begins to copy many parts, all to media or all from it.
    pub fn vectored(
        &'scope self,
        parts: impl IntoIterator<Item = Transfer<'scope>>,
        options: &CopyOptions,
    ) -> Result<ScopedTicket<'scope, M>> {
        let raw: Vec<RawTransfer> = parts.into_iter().map(|mut part| part.raw()).collect();
        // SAFETY: the parts are borrowed for 'scope, which ends after `Copies::scope` has waited for `begun`.
        let ticket = unsafe { self.copies.submit_raw(&raw, options)? };
        let mut begun = self.begun.lock();
        if begun.len() == begun.capacity() {
            begun.retain(|ticket| !ticket.poll());
        }
        begun.push(ticket.clone());
        Ok(ScopedTicket { raw: ticket, lent: PhantomData })
    }
}

/// A copy whose buffers are borrowed until its scope ends. Dropping it waits for nothing: the scope does.
pub struct ScopedTicket<'scope, M: Media = Span> {
    raw: RawTicket<M>,
    lent: PhantomData<&'scope mut [u8]>,
}

impl<M: Media> ScopedTicket<'_, M> {
    /// Whether the copy has ended.
    pub fn poll(&self) -> bool {
        self.raw.poll()
    }

    /// Waits until it has ended, and is durable where that was asked for. Errors: EIO.
    pub fn wait(&self) -> Result<Copied> {
        self.raw.wait()
    }
}
