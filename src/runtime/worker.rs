//! Workers: threads that run uthreads, each from queues of its own first.
//!
//! A worker takes, in this order: what began with it and can go on (`own`, which nobody else touches), what may run
//! anywhere (`shelf`, from which others steal), what other threads sent it (`mail`), what came from outside of all
//! workers, and what it can steal. Between uthreads, every [`LOOK_EVERY`] of them and whenever it has none, it fires
//! timers and polls for completions: there is no thread for either. With nothing to do it sleeps.
//!
//! **Nobody sleeps over work.** Who queues something, then passes a fence and looks for sleepers; who goes to sleep says
//! so, passes a fence, and looks at the queues once more. So one of the two sees the other. One sleeper is woken for what anybody may
//! run, and may find something else first: what is bound to it, say, whose slice may be long. So whoever has slept and
//! then runs something, looks whether more is left, and wakes the next ([`Local::hand_on`]).
//!
//! **Nor over an alarm** of what may run anywhere. Who goes to sleep knows of all alarms that are set by then, and says when it
//! wakes by itself. Who set one meanwhile, or has slept and watches no more, and then runs something, looks whether a sleeper wakes
//! in time for the first of them, and otherwise wakes one, which sees it before it sleeps again. Who sleeps itself wakes nobody for it.
//!
//! **A run ends once, for all of its workers** ([`Shared::end`]). Whoever finds that no uthread is left locks the crew,
//! looks again, and both says that it is over and takes the crew away before it unlocks. Threads that are not in a uthread
//! count what they spawn, and then queue it with the crew locked. So what they queue before the end keeps the run from
//! ending; of what they queue after it a worker that finds it sees the end, too, and leaves it to the next run. What has
//! begun is counted until it ends, so its crew is there for as long as it can be woken.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Wake;
use std::time::Duration;

use crossbeam_deque::{Injector, Steal, Stealer, Worker as Shelf};
use crossbeam_utils::CachePadded;
use rustix::time::{ClockId, clock_gettime};

use super::switch::{self, Fiber, Label, Stack, Stacks, Watch, Why};
use super::task::{JoinHandle, Runnable, Task, with_outcome};
use super::timer::{Alarm, NEVER, Next, Timers};
use super::wait::Waiter;
use super::{Options, Pending, Poller, Stats};
use crate::error::{Error, Result};
use crate::limits::WORKERS_MAX;
use crate::sync::primitive::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::primitive::{self, Condvar, Mutex, RwLock, thread_local};
use crate::wait::{POLL_MAX, Sleeper, pause};

/// Uthreads that run before a worker looks at timers, completions and its mail.
const LOOK_EVERY: u32 = 64;
/// A worker sleeps no longer than to a moment that is as near as this.
const HURRY_MAX: Duration = Duration::from_millis(1);
/// Stacks that a worker keeps for its next uthreads.
const STACKS_KEPT_MAX: usize = 32;

type Queue = VecDeque<Box<Runnable>>;

/// What all workers share.
pub struct Shared {
    /// See [`Options::long_slice`].
    long_slice_ns: u64,
    stacks: Stacks,
    /// Uthreads that have not ended. Counted before they are queued.
    live: CachePadded<AtomicUsize>,
    spawned: AtomicU64,
    /// From whoever is in no uthread of this runtime. Pushed to with `crew` locked, but by workers whose run is over: the
    /// next has not begun then.
    outside: Injector<Box<Runnable>>,
    timers: Timers,
    /// Replaced as a whole: a poller may add another.
    pollers: RwLock<Arc<[Arc<dyn Poller>]>>,
    /// Workers that sleep, or are about to.
    idle: CachePadded<AtomicUsize>,
    /// A thread is in `run`. Stays where one panicked there: what its workers have begun can go on nowhere else.
    running: AtomicBool,
    /// Who works now, until its run is over.
    crew: RwLock<Option<Arc<Crew>>>,
    /// What workers did that are gone.
    past: Mutex<Stats>,
}

struct Crew {
    /// No uthread was left: none begins any more. Set with `Shared::crew` locked.
    over: AtomicBool,
    remotes: Vec<Arc<Remote>>,
    shelves: Vec<Stealer<Box<Runnable>>>,
}

/// A worker, as others see it.
pub struct Remote {
    mail: Mutex<Queue>,
    has_mail: AtomicBool,
    asleep: AtomicBool,
    /// While it sleeps: when it wakes by itself, at the latest, as the timers count; [`NEVER`] otherwise. Written by itself alone.
    wakes_ns: AtomicU64,
    /// Its own: the token of its thread's `park` is the program's, where the program runs it.
    sleeper: Arc<Sleeper>,
    /// Written by itself alone.
    slices: AtomicU64,
    steals: AtomicU64,
    long_slices: AtomicU64,
}

/// A worker, as it sees itself.
struct Local {
    shared: Arc<Shared>,
    crew: Arc<Crew>,
    number: usize,
    /// Nobody steals from it: what may run anywhere may as well be its own.
    alone: bool,
    remote: Arc<Remote>,
    own: RefCell<Queue>,
    shelf: Shelf<Box<Runnable>>,
    stacks: RefCell<Vec<Stack>>,
    current: Cell<Option<Arc<Task>>>,
    ticks: Cell<u32>,
    /// Before it runs something it looks whether others are to be woken ([`Local::hand_on`]).
    owes: Cell<bool>,
}

thread_local! {
    static LOCAL: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

/// The worker that this thread is; none, too, where the thread ends and what it had is gone. A call of its own: see `switch`.
#[inline(never)]
fn with_local<T>(f: impl FnOnce(&Rc<Local>) -> T) -> Option<T> {
    LOCAL.try_with(|local| local.borrow().as_ref().map(f)).ok().flatten()
}

/// The uthread that calls.
pub fn current_task() -> Option<Arc<Task>> {
    with_local(|local| {
        let task = local.current.take();
        local.current.set(task.clone());
        task
    })?
}

/// As [`Shared::spawn`], in the runtime of the uthread that calls; none where no uthread does.
pub fn spawn_beside<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Option<Result<JoinHandle<T>>> {
    // In two steps, so that a closure for which there is no stack is dropped out here: what it holds may wait.
    let stack = match with_local(|local| Shared::stack(&local.shared))? {
        Ok(stack) => stack,
        Err(e) => return Some(Err(e)),
    };
    with_local(|local| Ok(Shared::begin(&local.shared, stack, None, false, run)))
}

/// Wakes `waiter` after so long. Panics outside of uthreads.
pub fn wake_after(time: Duration, waiter: Arc<Waiter>) -> Alarm {
    let set = |local: &Rc<Local>| {
        // Who waits now gives the worker to others, for as long as they like.
        local.owes.set(local.owes.get() || waiter.is_movable());
        local.shared.timers.set(time, waiter)
    };
    with_local(set).expect("only uthreads have timers")
}

impl Shared {
    pub fn new(options: Options) -> Result<Shared> {
        Ok(Shared {
            stacks: Stacks::new(options.stack_bytes)?,
            long_slice_ns: u64::try_from(options.long_slice.as_nanos()).unwrap_or(u64::MAX),
            live: CachePadded::default(),
            spawned: AtomicU64::new(0),
            outside: Injector::new(),
            timers: Timers::default(),
            pollers: RwLock::default(),
            idle: CachePadded::default(),
            running: AtomicBool::new(false),
            crew: RwLock::default(),
            past: Mutex::default(),
        })
    }

    pub fn spawn<T: Send + 'static>(
        this: &Arc<Shared>,
        name: Option<Arc<str>>,
        movable: bool,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        let stack = Shared::stack(this)?;
        Ok(Shared::begin(this, stack, name, movable, run))
    }

    /// For a uthread; one that the calling worker has kept, if there is any.
    fn stack(this: &Arc<Shared>) -> Result<Stack> {
        let kept = with_local(|local| {
            let ours = Arc::ptr_eq(&local.shared, this);
            if ours { local.stacks.borrow_mut().pop() } else { None }
        });
        kept.flatten().map_or_else(|| this.stacks.take(), Ok)
    }

    fn begin<T: Send + 'static>(
        this: &Arc<Shared>,
        stack: Stack,
        name: Option<Arc<str>>,
        movable: bool,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let (body, handle) = with_outcome(run);
        let number = this.spawned.fetch_add(1, Ordering::Relaxed);
        let label = Label { number, name, result: handle.address() };
        let fiber = Fiber::new(stack, label.clone(), body);
        let task = Some(Task::new(label, this.clone(), movable));
        this.live.fetch_add(1, Ordering::Relaxed);
        let runnable = Box::new(Runnable { fiber, task });
        if switch::inside() {
            // If it is one of this runtime, it has not ended: the run goes on.
            Shared::enqueue(this, runnable);
        } else {
            this.send(runnable);
        }
        handle
    }

    /// Queues it where it may run.
    pub fn enqueue(this: &Arc<Shared>, runnable: Box<Runnable>) {
        let mut left = Some(runnable);
        with_local(|local| {
            if Arc::ptr_eq(&local.shared, this) {
                left = left.take().and_then(|runnable| local.admit(runnable));
            }
        });
        if let Some(runnable) = left {
            this.send(runnable);
        }
    }

    /// To where it has begun, or for anybody. Where there is no crew the next one finds it.
    fn send(&self, runnable: Box<Runnable>) {
        let crew = self.crew.read();
        match (runnable.bound_to(), &*crew) {
            (Some(home), Some(crew)) => crew.remotes[home].send(self, runnable),
            (Some(_), None) => unreachable!("a runtime is run until what began has ended"),
            (None, crew) => {
                self.outside.push(runnable);
                if let Some(crew) = crew {
                    self.rouse(crew);
                }
            }
        }
    }

    /// Wakes a sleeper for what was queued for anybody.
    fn rouse(&self, crew: &Crew) {
        self.rouse_where(crew, || true);
    }

    /// Wakes a sleeper, if there are any and it is of use.
    fn rouse_where(&self, crew: &Crew, is_of_use: impl FnOnce() -> bool) {
        fence(Ordering::SeqCst);
        if self.idle.load(Ordering::Relaxed) > 0 && is_of_use() {
            crew.remotes.iter().any(|remote| remote.wake(self));
        }
    }

    pub fn add_poller(&self, poller: Arc<dyn Poller>) {
        {
            let mut pollers = self.pollers.write();
            *pollers = pollers.iter().cloned().chain([poller]).collect();
        }
        // Nobody who sleeps has polled it, nor would who adds it from a poller, and sleeps then.
        if let Some(crew) = &*self.crew.read() {
            self.rouse(crew);
        }
    }

    /// In how long the next completion is expected. A panic ends its poller, not the worker, with which all that began there would
    /// stand still.
    fn poll(&self) -> Option<Pending> {
        let pollers = {
            let pollers = self.pollers.read();
            if pollers.is_empty() {
                return None;
            }
            pollers.clone()
        };
        let (mut soonest, mut panicked) = (None, None);
        for poller in pollers.iter() {
            match catch_unwind(AssertUnwindSafe(|| poller.poll())) {
                Ok(pending) => soonest = soonest.into_iter().chain(pending).min(),
                Err(_) => panicked = Some(poller.clone()),
            }
        }
        if let Some(panicked) = panicked {
            {
                let mut pollers = self.pollers.write();
                let others = pollers.iter().filter(|poller| !Arc::ptr_eq(poller, &panicked));
                *pollers = others.cloned().collect();
            }
            tracing::error!(
                "a poller panicked and is polled no more: uthreads that wait for it alone wait for ever"
            );
        }
        soonest
    }

    /// Ends the run of `crew`, unless a uthread came, or another worker has ended it.
    fn end(&self, crew: &Crew) {
        let mut now = self.crew.write();
        // This one counts: what is not seen here is queued once the lock is free.
        if crew.is_over() || self.live() > 0 {
            return;
        }
        crew.over.store(true, Ordering::Relaxed);
        *now = None;
        let mut past = self.past.lock();
        *past = crew.remotes.iter().fold(*past, |sum, remote| remote.count(sum));
        drop((past, now));
        // Whoever sleeps is to see it, and whoever goes to sleep.
        fence(Ordering::SeqCst);
        for remote in &crew.remotes {
            remote.wake(self);
        }
    }

    pub fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    pub fn stats(&self) -> Stats {
        let crew = self.crew.read();
        let past = *self.past.lock();
        let now = crew.iter().flat_map(|crew| &crew.remotes).fold(past, |sum, remote| remote.count(sum));
        Stats { live: self.live(), spawned: self.spawned.load(Ordering::Relaxed), ..now }
    }

    /// What never ran is dropped: those who wait for it are told. So are alarms that were cancelled, which lead back here.
    pub fn clear(&self) {
        while let Steal::Success(_) | Steal::Retry = self.outside.steal() {}
        self.timers.clear();
    }

    /// Runs until no uthread is left: on this thread, and on `workers - 1` more.
    pub fn run(this: &Arc<Shared>, workers: usize) -> Result<()> {
        if !(1..=WORKERS_MAX).contains(&workers) {
            let message = format!("a runtime has 1 to {WORKERS_MAX} workers, not {workers}");
            return Err(Error::message(libc::EINVAL, "runtime::run", message));
        }
        if LOCAL.try_with(|_| ()).is_err() {
            let message = "this thread ends, and can run nothing any more: run uthreads on another";
            return Err(Error::message(libc::EAGAIN, "runtime::run", message));
        }
        if with_local(|_| ()).is_some() {
            let message = "a uthread cannot run a runtime: its worker would wait for itself";
            return Err(Error::message(libc::EDEADLK, "runtime::run", message));
        }
        // Until all workers of the last run have left it: they may still hand on what came too late.
        if this.running.swap(true, Ordering::Acquire) {
            let message = "this runtime is being run already";
            return Err(Error::message(libc::EBUSY, "runtime::run", message));
        }
        let ended = Shared::run_alone(this, workers);
        this.running.store(false, Ordering::Release);
        ended
    }

    fn run_alone(this: &Arc<Shared>, workers: usize) -> Result<()> {
        let shelves: Vec<_> = (0..workers).map(|_| Shelf::new_fifo()).collect();
        let stealers = shelves.iter().map(Shelf::stealer).collect();
        let meeting = Meeting::default();
        primitive::scope(|scope| {
            let mut shelves = shelves.into_iter();
            let own = shelves.next().expect("there is one worker at least");
            let mut threads = Vec::new();
            let mut failed = None;
            for (number, shelf) in (1..).zip(shelves) {
                let (this, meeting) = (this.clone(), &meeting);
                let work = move || {
                    if let Some(crew) = meeting.wait() {
                        work(this, crew, number, shelf);
                    }
                };
                let name = format!("lode-uthreads-{number}");
                match primitive::spawn_scoped(scope, name, work) {
                    Ok(thread) => threads.push(thread),
                    Err(e) => failed = Some(e),
                }
            }
            let ended = match failed {
                Some(e) => {
                    meeting.end(None);
                    let message = format!("{workers} workers cannot be started: {e}");
                    let errno = e.raw_os_error().unwrap_or(libc::EAGAIN);
                    Err(Error::message(errno, "runtime::run", message))
                }
                None => {
                    let remotes = (0..workers).map(|_| Arc::new(Remote::new())).collect();
                    let crew = Arc::new(Crew { over: AtomicBool::new(false), remotes, shelves: stealers });
                    *this.crew.write() = Some(crew.clone());
                    meeting.end(Some(crew.clone()));
                    work(this.clone(), crew, 0, own);
                    Ok(())
                }
            };
            // Not left to the scope, which waits by the thread's `park`. Shuttle's does not, and its join may return while what
            // belongs to the thread is dropped, and say that it failed.
            if !cfg!(shuttle) {
                for thread in threads {
                    thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                }
            }
            ended
        })
    }
}

/// Where workers wait until all of them are known.
#[derive(Default)]
struct Meeting {
    crew: Mutex<Option<Option<Arc<Crew>>>>,
    ended: Condvar,
}

impl Meeting {
    fn end(&self, crew: Option<Arc<Crew>>) {
        *self.crew.lock() = Some(crew);
        self.ended.notify_all();
    }

    fn wait(&self) -> Option<Arc<Crew>> {
        let mut crew = self.crew.lock();
        while crew.is_none() {
            crew = primitive::wait_notified(&self.ended, crew, Duration::MAX);
        }
        crew.clone().flatten()
    }
}

impl Crew {
    /// Whoever takes what was queued after the end sees it: the queue carries it from who had the lock after [`Shared::end`].
    #[inline]
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Something is queued that anybody may run.
    fn has_left(&self) -> bool {
        self.shelves.iter().any(|shelf| !shelf.is_empty())
    }

    /// A sleeper wakes by itself at that time, or before.
    fn watches(&self, at_ns: u64) -> bool {
        at_ns == NEVER || self.remotes.iter().any(|remote| remote.wakes_ns.load(Ordering::Relaxed) <= at_ns)
    }
}

impl Remote {
    fn new() -> Remote {
        Remote {
            mail: Mutex::default(),
            has_mail: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wakes_ns: AtomicU64::new(NEVER),
            sleeper: Arc::new(Sleeper::new()),
            slices: AtomicU64::new(0),
            steals: AtomicU64::new(0),
            long_slices: AtomicU64::new(0),
        }
    }

    fn count(&self, sum: Stats) -> Stats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            slices: sum.slices + of(&self.slices),
            steals: sum.steals + of(&self.steals),
            long_slices: sum.long_slices + of(&self.long_slices),
            ..sum
        }
    }

    fn send(&self, shared: &Shared, runnable: Box<Runnable>) {
        self.mail.lock().push_back(runnable);
        self.has_mail.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.wake(shared);
    }

    /// Whether it slept.
    fn wake(&self, shared: &Shared) -> bool {
        let slept = self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel);
        if slept {
            shared.idle.fetch_sub(1, Ordering::Relaxed);
            self.sleeper.wake_by_ref();
        }
        slept
    }
}

/// A worker's life: until its crew's run is over.
fn work(shared: Arc<Shared>, crew: Arc<Crew>, number: usize, shelf: Shelf<Box<Runnable>>) {
    // Without it an overflow still ends the process, only less clearly.
    let watch = (!cfg!(shuttle)).then(|| Watch::new().inspect_err(|e| tracing::warn!("{e}")));
    let remote = crew.remotes[number].clone();
    let local = Rc::new(Local {
        shared,
        alone: crew.remotes.len() == 1,
        crew,
        number,
        remote,
        own: RefCell::default(),
        shelf,
        stacks: RefCell::default(),
        current: Cell::new(None),
        ticks: Cell::new(0),
        owes: Cell::new(false),
    });
    LOCAL.with(|of| of.replace(Some(local.clone())));
    let mut now = coarse_ns();
    loop {
        let found = local.next();
        if local.crew.is_over() {
            local.leave_to_the_next(found);
            break;
        }
        match found {
            Some(runnable) => {
                if local.owes.get() {
                    local.hand_on();
                }
                now = local.slice(runnable, now);
            }
            // It is this worker that ended the last one, or another, which is about to do this, too.
            None if local.shared.live() == 0 => local.shared.end(&local.crew),
            None => {
                local.sleep();
                now = coarse_ns();
            }
        }
    }
    LOCAL.with(|of| of.replace(None));
    local.stacks.take().into_iter().for_each(|stack| local.shared.stacks.give(stack));
    drop(watch);
}

/// A clock that is cheap, and as exact as a tick of the kernel.
fn coarse_ns() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Local {
    fn next(&self) -> Option<Box<Runnable>> {
        let ticks = self.ticks.get().wrapping_add(1);
        self.ticks.set(ticks);
        if ticks.is_multiple_of(LOOK_EVERY) {
            self.look();
            // What was put back alone, with nobody woken for it, may have to wait for what came now.
            self.owes.set(true);
            // What came from outside waits for no queue that never empties.
            if let Steal::Success(runnable) = self.shared.outside.steal() {
                return Some(runnable);
            }
        }
        let own = || self.own.borrow_mut().pop_front();
        let shelf = || self.shelf.pop();
        // In turns, so that neither waits for the other to be empty.
        let found = if ticks.is_multiple_of(2) { own().or_else(shelf) } else { shelf().or_else(own) };
        found.or_else(|| self.find())
    }

    /// Timers, completions, mail; how long nothing of that is expected.
    fn look(&self) -> (Option<Next>, Option<Pending>) {
        let timer = self.shared.timers.fire();
        let pending = self.shared.poll();
        self.open_mail();
        (timer, pending)
    }

    fn open_mail(&self) {
        if self.remote.has_mail.load(Ordering::Acquire) && self.remote.has_mail.swap(false, Ordering::AcqRel)
        {
            let mut mail = std::mem::take(&mut *self.remote.mail.lock());
            self.own.borrow_mut().append(&mut mail);
        }
    }

    /// With both queues empty.
    fn find(&self) -> Option<Box<Runnable>> {
        self.look();
        self.own.borrow_mut().pop_front().or_else(|| self.shelf.pop()).or_else(|| self.steal())
    }

    /// Others may have looked in vain for what comes with it, while it was on its way.
    fn steal(&self) -> Option<Box<Runnable>> {
        let count = self.crew.shelves.len();
        loop {
            let outside = self.shared.outside.steal_batch_and_pop(&self.shelf);
            let others = || -> Steal<Box<Runnable>> {
                let from = (1..count).map(|step| (self.number + step) % count);
                from.map(|other| self.crew.shelves[other].steal_batch_and_pop(&self.shelf)).collect()
            };
            let found = match outside {
                Steal::Success(runnable) => {
                    self.owes.set(true);
                    return Some(runnable);
                }
                Steal::Empty => others(),
                Steal::Retry => others().or_else(|| Steal::Retry),
            };
            match found {
                Steal::Success(runnable) => {
                    add(&self.remote.steals);
                    self.owes.set(true);
                    return Some(runnable);
                }
                Steal::Empty => return None,
                Steal::Retry => std::hint::spin_loop(),
            }
        }
    }

    fn sleep(&self) {
        self.remote.asleep.store(true, Ordering::Relaxed);
        self.shared.idle.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let (timer, pending) = self.look();
        let found = self.own.borrow_mut().pop_front().or_else(|| self.shelf.pop()).or_else(|| self.steal());
        let soonest = timer.map(|next| next.left).into_iter().chain(pending.map(|p| p.0)).min();
        if found.is_none() && !self.crew.is_over() {
            let remote = &self.remote;
            remote.wakes_ns.store(timer.map_or(NEVER, |next| next.at_ns), Ordering::Relaxed);
            match soonest {
                // To sleep costs as much: the wait ladder's first rung, for a worker.
                Some(time) if time <= POLL_MAX => pause::moment(),
                // Under a model checker no time passes.
                Some(time) if time <= HURRY_MAX || cfg!(shuttle) => remote.sleeper.nap(time),
                Some(time) => remote.sleeper.sleep(time),
                None => remote.sleeper.sleep(Duration::MAX),
            }
            remote.wakes_ns.store(NEVER, Ordering::Relaxed);
        }
        if self.remote.asleep.swap(false, Ordering::AcqRel) {
            self.shared.idle.fetch_sub(1, Ordering::Relaxed);
        }
        self.owes.set(true);
        // Awake by now, so that it wakes another for it.
        if let Some(runnable) = found {
            self.put_back(runnable);
        }
    }

    /// Wakes another for what is left for anybody, and for an alarm of such that no sleeper knows of: it is not known for what this one
    /// was woken, and whoever wakes looks for something to do before it sleeps again.
    #[cold]
    fn hand_on(&self) {
        self.owes.set(false);
        if !self.alone {
            let (shared, crew) = (&self.shared, &self.crew);
            let is_left = || !shared.outside.is_empty() || crew.has_left();
            shared.rouse_where(crew, || is_left() || !crew.watches(shared.timers.next_movable_ns()));
        }
    }

    /// Queues it here, or answers it, where it is another worker's.
    fn admit(&self, runnable: Box<Runnable>) -> Option<Box<Runnable>> {
        match runnable.bound_to() {
            None if self.alone => {
                self.own.borrow_mut().push_back(runnable);
                None
            }
            None => {
                self.shelf.push(runnable);
                self.shared.rouse(&self.crew);
                None
            }
            Some(home) if home == self.number => {
                self.own.borrow_mut().push_back(runnable);
                None
            }
            Some(_) => Some(runnable),
        }
    }

    /// Back to where it would have been found.
    fn put_back(&self, runnable: Box<Runnable>) {
        match runnable.bound_to() {
            None if !self.alone => {
                // Where others wait here, too, an idle worker may as well take it.
                let only = self.shelf.is_empty() && self.own.borrow().is_empty();
                self.shelf.push(runnable);
                if !only {
                    self.shared.rouse(&self.crew);
                }
            }
            _ => self.own.borrow_mut().push_back(runnable),
        }
    }

    /// Once the run is over: hands on what came too late for it, of which none has begun.
    fn leave_to_the_next(&self, found: Option<Box<Runnable>>) {
        // Nobody of this crew puts anything here any more. What others steal meanwhile they hand on themselves.
        let shelved = std::iter::from_fn(|| self.shelf.pop());
        for runnable in found.into_iter().chain(shelved).chain(self.own.take()) {
            assert!(!runnable.fiber.begun(), "a run goes on until what began has ended");
            self.shared.outside.push(runnable);
        }
    }

    /// Runs a uthread until it gives the worker back; the time then.
    fn slice(&self, mut runnable: Box<Runnable>, began_ns: u64) -> u64 {
        let task = runnable.task.take().expect("it does not run");
        if !runnable.fiber.begun() {
            task.begins(self.number);
        }
        self.current.set(Some(task));
        let why = runnable.fiber.resume();
        let task = self.current.take().expect("it was set for this uthread");
        add(&self.remote.slices);
        let now = coarse_ns();
        let ran = now.saturating_sub(began_ns);
        if ran > self.shared.long_slice_ns {
            self.long_slice(&task, ran);
        }
        match why {
            Some(Why::Yield) => {
                runnable.task = Some(task);
                self.put_back(runnable);
            }
            Some(Why::Rest(rest)) => {
                if let Some(mut woken) = Task::rest(&task, rest, runnable) {
                    woken.task = Some(task);
                    self.put_back(woken);
                }
            }
            None => self.ended(runnable.fiber),
        }
        now
    }

    fn ended(&self, fiber: Fiber) {
        let stack = fiber.into_stack();
        let mut kept = self.stacks.borrow_mut();
        if kept.len() < STACKS_KEPT_MAX {
            kept.push(stack);
        } else {
            drop(kept);
            self.shared.stacks.give(stack);
        }
        self.shared.live.fetch_sub(1, Ordering::Release);
    }

    /// A uthread kept its worker from all others.
    #[cold]
    fn long_slice(&self, task: &Task, ran_ns: u64) {
        let before = self.remote.long_slices.load(Ordering::Relaxed);
        add(&self.remote.long_slices);
        // Each of the first, then ever fewer of them.
        if before < 8 || before.is_power_of_two() {
            tracing::warn!(
                "{} ran for {} ms without giving its worker back: let it yield, or run it on a thread",
                task.label,
                ran_ns / 1_000_000
            );
        }
    }
}

/// Of a counter that one thread writes.
fn add(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}
