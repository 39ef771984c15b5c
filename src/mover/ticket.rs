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
//! **Waiting.** A thread waits on the ladder of the room `wait`; in a uthread others run meanwhile. A task awaits the ticket,
//! on any executor ([`future`](super::future)), or polls it with its context. Whoever sees first that the engine is
//! through, by whatever way, ends the copy and rings for all others.
//!
//! **Invariants.**
//! 1. A copy under way is in `Home::under_way`, and one whose sync is on a thread of its own: whoever drops the last ticket
//!    does not drop the flight with it, and media do not go while somebody is at them.
//! 2. Its bytes are there until its flight has ended: an owned buffer is not touched before, whoever owns the ticket.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use parking_lot::Mutex;

use super::Mover;
use super::copies::{Copied, Copies, CopyOptions, bad_media, sync_failed};
use super::engine_port::{RawTransfer, Transfer};
use super::flight::Flight;
use crate::error::{Error, Result};
use crate::media::{Addr, Fault, Media, Span};
use crate::sync::signals::kept_off;
use crate::wait::{Bell, Ending, Holding, Seat, Seen, look_again, until};

/// What tickets share with their [`Copies`].
pub(super) struct Home<M: Media> {
    // Before media: engines end first.
    mover: Mover<M>,
    media: M,
    /// Shared with threads that sync, which let go of the rest first.
    under_way: Arc<Mutex<HashMap<u64, Arc<Op>>>>,
    next: AtomicU64,
}

/// One copy.
struct Op {
    number: u64,
    options: CopyOptions,
    bytes: u64,
    to_media: bool,
    state: Mutex<State>,
    /// Rung when engines are through with a part, when it has ended, and when it is synced.
    bell: Bell,
    /// Its own, at the bells of engines.
    seat: Seat,
    begun: Instant,
    /// When the engines are expected to be through.
    due: Option<Instant>,
    /// They all ring.
    rings: bool,
}

/// An engine rings for a part of it.
impl Wake for Op {
    fn wake(self: Arc<Op>) {
        self.bell.ring();
    }
}

impl Op {
    /// The host has written it back, or could not; whoever waits is told.
    fn settled(&self, synced: Result<()>) {
        let mut state = self.state.lock();
        if let Err(e) = synced {
            state.outcome = Err(Failure::Sync(e.errno()));
        }
        (state.synced, state.syncing) = (true, false);
        drop(state);
        self.bell.ring();
    }
}

struct State {
    /// Under way.
    flight: Option<Flight>,
    outcome: std::result::Result<Copied, Failure>,
    /// Nothing is left that has to be written back by the host.
    synced: bool,
    /// Somebody sees to that.
    syncing: bool,
}

impl State {
    /// See [`Flight::held_back`].
    fn held_back(&self) -> Option<usize> {
        self.flight.as_ref()?.held_back()
    }

    fn is_through(&self) -> bool {
        self.flight.is_none() && (self.synced || self.outcome.is_err())
    }

    /// How it ended.
    fn answer(&self) -> Result<Copied> {
        self.outcome.clone().map_err(|failure| failure.error())
    }
}

/// What is waited for: that no engine is at it any more; while pieces are held back, that it goes on.
struct Landed<'a, M: Media>(&'a Home<M>, &'a Arc<Op>, Option<usize>);

impl<M: Media> Ending for Landed<'_, M> {
    fn look(&self) -> bool {
        let Landed(home, op, held_back) = self;
        home.has_landed(op) || held_back.is_some() && op.state.lock().held_back() != *held_back
    }

    fn bell(&self) -> Option<&Bell> {
        self.1.rings.then_some(&self.1.bell)
    }
}

/// What is waited for: that another has synced it.
struct Synced<'a>(&'a Op);

impl Ending for Synced<'_> {
    fn look(&self) -> bool {
        self.0.state.lock().is_through()
    }

    fn bell(&self) -> Option<&Bell> {
        Some(&self.0.bell)
    }
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
        Home { mover, media, under_way: Arc::default(), next: AtomicU64::new(0) }
    }

    pub(super) fn media(&self) -> &M {
        &self.media
    }

    pub(super) fn mover(&self) -> &Mover<M> {
        &self.mover
    }

    pub(super) fn wait_for_all(&self) {
        let all = self.under_way.lock().values().cloned().collect();
        self.wait_for_each(all);
    }

    /// Those of class bandwidth last: their pieces are held back while others are under way, also such as have ended where
    /// nobody has looked.
    fn wait_for_each(&self, all: Vec<Arc<Op>>) {
        let is_of_bandwidth =
            |op: &Arc<Op>| op.state.lock().flight.as_ref().is_some_and(Flight::is_of_bandwidth);
        let (last, first): (Vec<_>, Vec<_>) = all.into_iter().partition(is_of_bandwidth);
        for op in first.iter().chain(&last) {
            // How it ended its ticket says.
            let _ = self.wait(op, Holding::Nothing);
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
        let (under_way, due, rings) = (!flight.is_over(), flight.due(), self.mover.rings(&flight));
        let to_media = transfers.first().is_some_and(RawTransfer::is_to_media);
        let state = State {
            flight: Some(flight),
            outcome: Ok(Copied::default()),
            synced: !(to_media && options.durable),
            syncing: false,
        };
        let op = Arc::new(Op {
            number,
            options: *options,
            bytes,
            to_media,
            state: Mutex::new(state),
            bell: Bell::new(),
            seat: Seat::new(),
            begun: Instant::now(),
            due,
            rings,
        });
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
        // Who has the lock looks, too, or is ending it.
        let Some(mut state) = op.state.try_lock() else { return false };
        let Some(flight) = &mut state.flight else { return true };
        // SAFETY: as in `end`.
        if !unsafe { self.mover.has_ended(&self.media, flight) } {
            return false;
        }
        self.end(op, &mut state);
        drop(state);
        op.bell.ring();
        true
    }

    /// Whether the engines are through with it. Where they are not the op's bell rings when they are, if they ring.
    fn has_landed(&self, op: &Arc<Op>) -> bool {
        let mut state = op.state.lock();
        let Some(flight) = &mut state.flight else { return true };
        // SAFETY: as in `end`.
        if unsafe { self.mover.has_ended(&self.media, flight) } {
            return true;
        }
        if op.rings {
            self.mover.listen(flight, &op.seat, &Waker::from(op.clone()));
        }
        // It may have rung before.
        // SAFETY: as in `end`.
        op.rings && unsafe { self.mover.has_ended(&self.media, flight) }
    }

    /// Ends what has landed, and tells the others who wait.
    fn land(&self, op: &Op, seen: Option<Seen>) {
        let mut state = op.state.lock();
        let Some(flight) = &mut state.flight else { return };
        if let Some(seen) = seen {
            flight.was_seen(seen);
        }
        self.end(op, &mut state);
        drop(state);
        op.bell.ring();
    }

    fn wait(&self, op: &Arc<Op>, holding: Holding) -> Result<Copied> {
        let mut held_back = {
            let state = op.state.lock();
            state.flight.iter().for_each(|flight| self.mover.help(flight));
            state.held_back()
        };
        let seen = loop {
            let seen = until(&Landed(self, op, held_back), op.due, holding);
            if held_back.is_none() {
                break seen;
            }
            held_back = op.state.lock().held_back();
        };
        self.land(op, Some(seen));
        self.settle(op);
        op.state.lock().answer()
    }

    /// Has the host write back what has ended, where that was asked for, once.
    fn settle(&self, op: &Op) {
        let mut state = op.state.lock();
        if state.is_through() {
            return;
        }
        if state.syncing {
            drop(state);
            until(&Synced(op), None, Holding::Something);
            return;
        }
        state.syncing = true;
        drop(state);
        op.settled(self.sync());
    }

    /// As a future is polled; `seat` is the asking task's. See [`RawTicket::poll_with`].
    fn poll_with(self: &Arc<Self>, op: &Arc<Op>, seat: &Seat, waker: &Waker) -> Poll<Result<Copied>> {
        op.bell.listen(seat, waker);
        if !self.has_landed(op) {
            if !op.rings {
                let now = Instant::now();
                let left = op.due.map(|due| due.saturating_duration_since(now));
                seat.set_alarm(now + look_again(now - op.begun, left), waker);
            }
            return Poll::Pending;
        }
        // It needs no waking by itself.
        leave(op, seat);
        self.land(op, None);
        if !op.state.lock().is_through() {
            op.bell.listen(seat, waker);
            self.settle_elsewhere(op);
        }
        let state = op.state.lock();
        if state.is_through() { Poll::Ready(state.answer()) } else { Poll::Pending }
    }

    /// As [`settle`](Home::settle), on a thread of its own: a sync takes as long as the device does. It is under way meanwhile.
    fn settle_elsewhere(self: &Arc<Self>, op: &Arc<Op>) {
        {
            let mut state = op.state.lock();
            // Somebody who waits may have seen to it meanwhile.
            if state.is_through() || std::mem::replace(&mut state.syncing, true) {
                return;
            }
        }
        self.under_way.lock().insert(op.number, op.clone());
        let settle = {
            let (home, op) = (self.clone(), op.clone());
            move || {
                // Where somebody's media panic nobody knows what is kept, as where they fail.
                let synced = catch_unwind(AssertUnwindSafe(|| home.sync()));
                let synced = synced.unwrap_or_else(|_| Err(sync_failed(std::io::ErrorKind::Other.into())));
                let under_way = home.under_way.clone();
                // Whoever is told may go on to let go of the media.
                drop(home);
                op.settled(synced);
                under_way.lock().remove(&op.number);
            }
        };
        let thread = std::thread::Builder::new().name("lode-sync".to_owned());
        if let Err(e) = kept_off(|| thread.spawn(settle)) {
            tracing::warn!("a sync is waited for by the task that asked for it: no thread starts: {e}");
            op.settled(self.sync());
            self.under_way.lock().remove(&op.number);
        }
    }
}

/// Nobody asks from this seat any more.
fn leave(op: &Op, seat: &Seat) {
    op.bell.leave(seat);
    if !op.rings {
        seat.cancel_alarm();
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
    /// Of the task that polls it.
    seat: Seat,
    /// That there is one.
    sits: AtomicBool,
}

impl<M: Media> Clone for RawTicket<M> {
    fn clone(&self) -> RawTicket<M> {
        RawTicket::of(self.home.clone(), self.op.clone())
    }
}

impl<M: Media> Drop for RawTicket<M> {
    fn drop(&mut self) {
        if *self.sits.get_mut() {
            leave(&self.op, &self.seat);
        }
    }
}

impl<M: Media> RawTicket<M> {
    fn of(home: Arc<Home<M>>, op: Arc<Op>) -> RawTicket<M> {
        RawTicket { home, op, seat: Seat::new(), sits: AtomicBool::new(false) }
    }

    /// Whether the copy has ended: then nobody uses its bytes any more. May copy what an engine left undone.
    pub fn poll(&self) -> bool {
        self.home.poll(&self.op)
    }

    /// Waits until it has ended, and is durable where that was asked for. Again and again, and on any thread: the answer
    /// stays the same. In a uthread others run meanwhile. EIO for bad media, or a sync that failed.
    pub fn wait(&self) -> Result<Copied> {
        self.home.wait(&self.op, Holding::Nothing)
    }

    /// As [`wait`](RawTicket::wait), for a task: where it has not ended the task's waker is woken when it has, or when it is
    /// worth another look. A ticket serves one task at a time; a clone serves another.
    ///
    /// Engines that wake nobody (devices) are looked at when they are expected to be through, which a thread of this
    /// process sees to that begins with the first such task; its CPU time is the process's. A sync of an ordinary file
    /// runs on a thread of its own.
    pub fn poll_with(&self, context: &mut Context<'_>) -> Poll<Result<Copied>> {
        self.sits.store(true, Ordering::Relaxed);
        self.home.poll_with(&self.op, &self.seat, context.waker())
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
        Ok(RawTicket::of(self.home.clone(), op))
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
            let state = State { flight: None, outcome: refused, synced: true, syncing: false };
            let op = Op {
                number: u64::MAX,
                options: *options,
                bytes: 0,
                to_media: false,
                state: Mutex::new(state),
                bell: Bell::new(),
                seat: Seat::new(),
                begun: Instant::now(),
                due: None,
                rings: true,
            };
            RawTicket::of(self.home.clone(), Arc::new(op))
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
            self.home.wait_for_each(scope.begun.lock().iter().map(|ticket| ticket.op.clone()).collect());
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

    /// For a task: as [`RawTicket::poll_with`]. Once it is ready [`wait`](Ticket::wait) waits for nothing.
    pub fn poll_with(&self, context: &mut Context<'_>) -> Poll<()> {
        self.raw.poll_with(context).map(drop)
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
