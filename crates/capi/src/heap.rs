//! Persistent heaps: objects that are there again after a restart, a crash or a power failure.
//!
//! A commit is one call with a table of changes, so that C has no transaction to lose. Objects are passed by where they
//! are mapped.

use crate::call::{on, without_pool};
use crate::convert::{efault, store, string};
use crate::handle::{Handles, Held};
use crate::pools::{bad_option, options, pairs};
use libc::off_t;
use lodestone::error::{Error, Result};
use lodestone::media::{Domain, Span};
use lodestone::wsp::heap::{Change, CreateOptions, Heap, Offset, OpenOptions, Place};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A persistent heap that is open: any number of threads may use it.
pub struct lode_heap {
    _opaque: [u8; 0],
}

/// An object that lode_heap_reserve returned is in use from the commit on: at.
pub const LODE_HEAP_PUBLISH: c_int = 1;
/// The 8 bytes at at, a multiple of 8 in an object, are set to value.
pub const LODE_HEAP_SET: c_int = 2;
/// The 8 bytes at at lead to the object to, or nowhere (NULL): see lode_heap_linked.
pub const LODE_HEAP_LINK: c_int = 3;
/// An object is free from the commit on: at. Nothing may lead to it then.
pub const LODE_HEAP_FREE: c_int = 4;
/// The root name, of type value, leads to the object to, or nowhere (NULL); it is made where it is not there.
pub const LODE_HEAP_ROOT: c_int = 5;
/// The root name is removed.
pub const LODE_HEAP_REMOVE_ROOT: c_int = 6;

/// One thing that a commit does: one of the LODE_HEAP_ numbers, and what is named there; the rest is not looked at.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct lode_heap_change {
    pub what: c_int,
    pub at: *mut c_void,
    pub to: *mut c_void,
    pub value: u64,
    pub name: *const c_char,
}

/// What is in use of a heap: bytes that objects can have, objects, and bytes that these take.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct lode_heap_usage {
    pub capacity: u64,
    pub objects: u64,
    pub used: u64,
}

/// What a handle stands for.
struct OpenHeap {
    heap: Heap<Span>,
}

static HEAPS: Handles<OpenHeap> = Handles::new();

impl Held for OpenHeap {
    const NOT_ONE: &str = "not a heap that lode_heap_create or lode_heap_open returned";
    const CLOSED: &str = "the heap is closed";
    const INHERITED: &str =
        "the heap was opened before fork(): the child cannot use it; use threads, or let the child exec";
    const DISTRUSTED: &str = "the heap met an internal error: close it and open it again";
    const TOO_MANY: &str = "heaps are open in this process: close some";

    fn handles() -> &'static Handles<OpenHeap> {
        &HEAPS
    }
}

impl OpenHeap {
    /// Where an address of C's is in the heap. EFAULT for NULL, EINVAL outside.
    fn offset(&self, at: *const c_void) -> Result<Offset> {
        if at.is_null() {
            return Err(efault());
        }
        self.heap.offset_of(at.cast()).ok_or_else(|| {
            let message = format!("{at:p} is not where the heap's objects are");
            Error::message(libc::EINVAL, "capi::heap", message)
        })
    }

    fn target(&self, to: *const c_void) -> Result<Option<Offset>> {
        if to.is_null() { Ok(None) } else { self.offset(to).map(Some) }
    }

    fn address(&self, at: Offset) -> *mut c_void {
        self.heap.address(at).expect("a heap in a file is mapped").cast()
    }
}

fn invalid(what: String) -> Error {
    Error::message(libc::EINVAL, "capi::heap", what)
}

fn number(option: &str, value: &str) -> Result<u64> {
    let parsed = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    };
    parsed.map_err(|_| bad_option(option))
}

/// The options of both ways to come by a heap; whether there were some that only make one.
fn settings(opts: &str) -> Result<(CreateOptions, bool)> {
    let (mut settings, mut makes) = (CreateOptions::default(), false);
    for (option, key, value) in pairs(opts) {
        match (key, value) {
            ("prefault", None) => settings.open.prefault = true,
            ("assume", Some(domain)) => {
                settings.open.assume = Some(domain.parse::<Domain>().map_err(invalid)?);
            }
            _ => {
                makes = true;
                match (key, value) {
                    ("size", Some(bytes)) => settings.size = Some(number(option, bytes)?),
                    ("label", Some(label)) => settings.label = label.to_owned(),
                    ("fixed", None) => settings.place = Place::Fixed,
                    ("address", Some(at)) => settings.place = Place::At(number(option, at)?),
                    ("force", None) => settings.force = true,
                    _ => return Err(bad_option(option)),
                }
            }
        }
    }
    Ok((settings, makes))
}

/// Makes a persistent heap in a file (which is made with size= where there is none), a file on a DAX mount, a block
/// device or a device-dax node, and opens it. Returns NULL on failure, and then leaves no file that it made; one
/// that was there is as long as before.
///
/// opts: NULL, or a comma-separated list of
///   size=BYTES              the size of the file
///   label=TEXT              at most 63 bytes
///   fixed                   always mapped at one address, which is chosen now: objects may hold addresses
///   address=ADDRESS         the same with this one, a multiple of 2 MiB
///   force                   also where something is
///   prefault                take every page now
///   assume=DOMAIN           cpu-cache, memory or page-cache, as lode_open_pool explains it
///
/// Errors: EACCES, EADDRINUSE (the place is taken), EBUSY (in use), EEXIST (something is there: force), EINVAL, EIO,
/// EISDIR, EMFILE (256 are open, or 1024 regions mapped), ENODEV (neither a file nor a device that can be mapped), ENOENT (no
/// file, and no size for one), ENOMEM, ENOSPC. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_create(path: *const c_char, opts: *const c_char) -> *mut lode_heap {
    without_pool("lode_heap_create", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let (settings, _) = settings(&opts)?;
        let handle = HEAPS.take()?;
        let heap = Heap::create(Path::new(OsStr::from_bytes(path)), &settings)
            .inspect_err(|_| handle.give_back())?;
        Ok(handle.fill(OpenHeap { heap }).cast())
    })
}

/// Opens a heap. What a crash interrupted is finished or gone; objects that no commit published are free again.
/// Returns NULL on failure, and then has changed nothing, but for EIO: then perhaps some of what was interrupted is
/// finished. opts: NULL, or prefault, assume=DOMAIN as above. One process at a time has a heap open.
///
/// Errors: EACCES, EADDRINUSE (it has its place, and something else is mapped there), EBUSY (in use), EINVAL (no heap;
/// the file was cut), EIO, EMFILE, ENOENT, ENOMEM, EOPNOTSUPP (of a later version), EUCLEAN (damaged).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_open(path: *const c_char, opts: *const c_char) -> *mut lode_heap {
    without_pool("lode_heap_open", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let (settings, makes) = settings(&opts)?;
        if makes {
            return Err(invalid("only prefault and assume= are for lode_heap_open".into()));
        }
        let handle = HEAPS.take()?;
        let options: OpenOptions = settings.open;
        let path = Path::new(OsStr::from_bytes(path));
        let heap = Heap::open_path(path, &options).map_err(|e| {
            handle.give_back();
            match e.errno() {
                libc::EEXIST => invalid(format!("{} is a pool, no heap", path.display())),
                _ => e,
            }
        })?;
        Ok(handle.fill(OpenHeap { heap }).cast())
    })
}

/// Waits for the calls in flight and closes the heap. The handle and every address in the heap are invalid afterwards,
/// after an error too. Errors: EBADF (closed already), EINVAL, EIO (what was acknowledged is there all the same).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_close(heap: *mut lode_heap) -> c_int {
    without_pool("lode_heap_close", || {
        let handle = HEAPS.of(heap.addr())?;
        // Asked after all calls have ended: the last of them may have panicked.
        let closed = handle.empty(|open| match handle.check() {
            Ok(()) => open.heap.close().map(drop),
            // What a panic left behind is recovered at the next opening.
            Err(e) => Err(e),
        })?;
        handle.give_back();
        closed.map(|()| 0)
    })
}

/// Memory of bytes bytes for the caller alone, until a commit publishes it; content: whatever was there. It is given
/// back by lode_heap_give_back, or by itself when the program ends. Fill it by plain stores: the commit makes them
/// durable. Its address is a multiple of 16. NULL on failure: EINVAL, EIO, ENOSPC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_reserve(heap: *mut lode_heap, bytes: usize) -> *mut c_void {
    on_heap("lode_heap_reserve", heap, |open| Ok(open.address(open.heap.reserve_offset(bytes as u64)?)))
}

/// Memory that was reserved and not published is free again. Errors: EINVAL where it is not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_give_back(heap: *mut lode_heap, object: *mut c_void) -> c_int {
    on_heap("lode_heap_give_back", heap, |open| open.heap.give_back(open.offset(object)?).map(|()| 0))
}

/// All count changes, or none, in every kind of crash. Commits of several threads must not set the same 8 bytes at the
/// same time; nor may one set 8 bytes of an object that another one frees, or lead a root to it. After an error other
/// than EIO nothing has changed, and what was reserved is still reserved.
///
/// Errors: EBUSY (an object is in two commits), EEXIST (the root has another type), EINVAL (not reserved, not in use,
/// not in an object, no such change), EIO (it may have happened; the heap refuses changes until it is opened again),
/// ENAMETOOLONG (a name of more than 255 bytes), ENOENT (no such root), ENOSPC (no room for a large commit, or for
/// another root). Durable, against power loss in every domain but volatile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_commit(
    heap: *mut lode_heap,
    changes: *const lode_heap_change,
    count: usize,
) -> c_int {
    on_heap("lode_heap_commit", heap, |open| {
        if count == 0 {
            return Ok(0);
        }
        if changes.is_null() {
            return Err(efault());
        }
        // SAFETY: the contract at the head of the header: so many are there, and nobody writes them.
        let changes = unsafe { std::slice::from_raw_parts(changes, count) };
        // SAFETY: their names are strings, by the same contract.
        let changes = changes.iter().map(|change| unsafe { understood(open, change) });
        open.heap.commit(&changes.collect::<Result<Vec<_>>>()?).map(|()| 0)
    })
}

/// # Safety
/// The name is NULL or a string that outlives the change.
unsafe fn understood<'a>(open: &OpenHeap, change: &lode_heap_change) -> Result<Change<'a>> {
    let at = || open.offset(change.at);
    // SAFETY: the caller's contract.
    let name = || unsafe { string::<'a>(change.name) };
    Ok(match change.what {
        LODE_HEAP_PUBLISH => Change::Publish { at: at()?, stored: u64::MAX },
        LODE_HEAP_SET => Change::Set { at: at()?, value: change.value },
        LODE_HEAP_LINK => {
            let to = open.target(change.to)?;
            Change::Set { at: at()?, value: to.map_or(0, |to| open.heap.link_value(to)) }
        }
        LODE_HEAP_FREE => Change::Free(at()?),
        LODE_HEAP_ROOT => {
            Change::Root { name: name()?, type_number: change.value, to: open.target(change.to)? }
        }
        LODE_HEAP_REMOVE_ROOT => Change::RemoveRoot { name: name()? },
        other => return Err(invalid(format!("a commit has no change number {other}"))),
    })
}

/// The object that a root leads to; NULL with errno 0 where it leads nowhere. Errors: EEXIST (it has another type),
/// ENOENT (no such root), EUCLEAN (its object was freed).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_root(
    heap: *mut lode_heap,
    name: *const c_char,
    type_number: u64,
) -> *mut c_void {
    on_heap("lode_heap_root", heap, |open| {
        // SAFETY: the contract at the head of the header.
        let to = open.heap.root(unsafe { string(name) }?, type_number)?;
        if to.is_none() {
            // SAFETY: the C library gives every thread its errno.
            unsafe { *libc::__errno_location() = 0 };
        }
        Ok(to.map_or(std::ptr::null_mut(), |at| open.address(at)))
    })
}

/// What was stored to these bytes of published objects is durable on return. A crash before that may leave any part of
/// it: what has to be whole is for lode_heap_commit. Errors: EFAULT, EINVAL (not in the heap), EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_persist(heap: *mut lode_heap, at: *const c_void, bytes: usize) -> c_int {
    on_heap("lode_heap_persist", heap, |open| open.heap.persist(open.offset(at)?, bytes as u64).map(|()| 0))
}

/// What 8 bytes that LODE_HEAP_LINK set lead to; NULL for nowhere, or where it is not in the heap. (In a heap that has
/// its place they hold the address itself.)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_linked(heap: *mut lode_heap, value: u64) -> *mut c_void {
    on_heap("lode_heap_linked", heap, |open| {
        Ok(open.heap.linked(value).map_or(std::ptr::null_mut(), |at| open.address(at)))
    })
}

/// Where an address is, counted from the beginning of the heap: the same at every opening. Errors: EFAULT, EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_offset(heap: *mut lode_heap, at: *const c_void) -> off_t {
    on_heap("lode_heap_offset", heap, |open| Ok(open.offset(at)?.0 as off_t))
}

/// Bytes that an object can hold, at least what was asked for. Errors: EFAULT, EINVAL where none begins there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_usable_size(heap: *mut lode_heap, object: *const c_void) -> off_t {
    on_heap("lode_heap_usable_size", heap, |open| Ok(open.heap.usable_bytes(open.offset(object)?)? as off_t))
}

/// What is in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_used(heap: *mut lode_heap, usage: *mut lode_heap_usage) -> c_int {
    on_heap("lode_heap_used", heap, |open| {
        let used = open.heap.usage();
        let out = lode_heap_usage { capacity: used.capacity, objects: used.objects, used: used.used };
        // SAFETY: the contract at the head of the header.
        unsafe { store(usage, out) }?;
        Ok(0)
    })
}

/// Whether no object is there twice, none is lost to the heap, and every root leads to one. Other threads must not
/// reserve or give back meanwhile. Errors: EIO; EUCLEAN where something is wrong: lode_last_error says what.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_heap_check(heap: *mut lode_heap) -> c_int {
    on_heap("lode_heap_check", heap, |open| {
        let report = open.heap.check()?;
        match report.findings.first() {
            None => Ok(0),
            Some(first) => {
                let message = format!("{} findings, the first: {first}", report.findings.len());
                Err(Error::message(libc::EUCLEAN, "capi::heap", message))
            }
        }
    })
}

fn on_heap<R: crate::call::Failed>(
    call: &'static str,
    heap: *mut lode_heap,
    run: impl FnOnce(&OpenHeap) -> Result<R>,
) -> R {
    on(call, heap.addr(), run)
}
