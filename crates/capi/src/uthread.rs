//! Uthreads for C: one runtime for the process, made when it is first needed.
//!
//! A handle is a number, looked up when it is used, so that one that was joined already is an error and not a crash.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

use lodestone::error::{Error, Result};
use lodestone::runtime::{self, JoinHandle, Options, Runtime};
use parking_lot::Mutex;

use crate::call::without_pool;

/// A uthread: a thread of this program, light enough to have one for each request.
pub struct lode_uthread {
    _opaque: [u8; 0],
}

/// A pointer that C handed over: whom it belongs to is C's affair.
struct Word(*mut c_void);

// SAFETY: it is carried, never followed.
unsafe impl Send for Word {}

/// Set in a process that fork() made: the workers stayed with its parent.
static INHERITED: AtomicBool = AtomicBool::new(false);

fn process_runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        extern "C" fn in_child() {
            INHERITED.store(true, Ordering::Relaxed);
        }
        // SAFETY: the handler stores to an atomic, which is safe in a child of several threads. It fails only for want
        // of memory, and then nothing is lost but this protection.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    if INHERITED.load(Ordering::Relaxed) {
        let message = "uthreads stay with the process that made them: a child of fork() has none";
        return Err(Error::message(libc::EBADF, "capi::uthread", message));
    }
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Runtime::new(options()?)?;
    Ok(RUNTIME.get_or_init(|| made))
}

/// With stacks as large as `LODE_STACK_BYTES` says.
fn options() -> Result<Options> {
    let default = Options::default();
    let Some(bytes) = std::env::var_os("LODE_STACK_BYTES") else { return Ok(default) };
    let stack_bytes = bytes.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        let message = format!("LODE_STACK_BYTES={}: a number of bytes is wanted", bytes.display());
        Error::message(libc::EINVAL, "capi::uthread", message)
    })?;
    Ok(Options { stack_bytes, ..default })
}

type Handles = Mutex<HashMap<u64, JoinHandle<Word>>>;

fn handles() -> &'static Handles {
    static HANDLES: OnceLock<Handles> = OnceLock::new();
    HANDLES.get_or_init(Handles::default)
}

/// Makes a uthread that runs body(argument). It begins when lode_run runs uthreads, which may be later, or
/// when the uthread that made it waits. Its stack has 64 KiB, or LODE_STACK_BYTES. A uthread stays on the
/// thread where it began; it lets others run in lode_yield and lode_join. It keeps its errno over that, but
/// lode_last_error() is of all that run on its thread: ask before others run. Its body has to return:
/// pthread_exit(3) in it ends the process. Join it: its result is kept until then. Errors: EBADF after
/// fork(), EINVAL (LODE_STACK_BYTES), ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_spawn(
    body: Option<extern "C" fn(argument: *mut c_void) -> *mut c_void>,
    argument: *mut c_void,
) -> *mut lode_uthread {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    without_pool("lode_spawn", || {
        let body = body.ok_or_else(|| Error::new(libc::EFAULT, "capi::uthread"))?;
        let argument = Word(argument);
        let run = move || {
            let argument = argument;
            Word(body(argument.0))
        };
        let runtime = process_runtime()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let handle = runtime.spawn(run)?;
        handles().lock().insert(number, handle);
        Ok(std::ptr::without_provenance_mut(number as usize))
    })
}

/// The handle, for the one call that joins it.
fn take(number: u64) -> Result<JoinHandle<Word>> {
    let mut handles = handles().lock();
    let (errno, message) = match handles.remove(&number) {
        Some(handle) if handle.is_own() => {
            handles.insert(number, handle);
            (libc::EDEADLK, "a uthread cannot join itself: it would wait for ever")
        }
        Some(handle) => return Ok(handle),
        None => (libc::ESRCH, "not a uthread that lode_spawn returned, or it was joined already"),
    };
    Err(Error::message(errno, "capi::uthread", message))
}

/// Waits for a uthread's end and gives it back; what its body returned goes to *result, unless that is NULL.
/// From uthreads and from threads, once for each uthread. Errors: EBADF after fork(), EDEADLK (a uthread joins
/// itself), ESRCH for one that is none or was joined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_join(uthread: *mut lode_uthread, result: *mut *mut c_void) -> c_int {
    without_pool("lode_join", || {
        process_runtime()?;
        let handle = take(uthread.addr() as u64)?;
        let outcome = handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // SAFETY: the contract at the head of the header.
        if let Some(result) = unsafe { result.as_mut() } {
            *result = outcome.0;
        }
        Ok(0)
    })
}

/// Lets other uthreads run; outside of a uthread, other threads. In a child of fork() that a uthread called no uthread runs
/// any more: it has to end by _exit(2) or execute a program before the body returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_yield() {
    if INHERITED.load(Ordering::Relaxed) {
        // The worker's others are the parent's.
        return std::thread::yield_now();
    }
    runtime::yield_now();
}

/// Runs uthreads until none is left, on this thread and on nworkers - 1 more; 0 stands for as many as there
/// are CPUs. What another thread spawns as it ends may be left to the next lode_run. Errors: EAGAIN (no
/// thread can be started), EBADF after fork(), EBUSY (another thread is in lode_run), EDEADLK (called by a
/// uthread), EINVAL (more than 1024).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_run(nworkers: c_uint) -> c_int {
    without_pool("lode_run", || {
        let cpus = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = if nworkers == 0 { cpus() } else { nworkers as usize };
        process_runtime()?.run(workers).map(|()| 0)
    })
}
