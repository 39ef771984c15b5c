//! Open pools and the handles that C holds.
//!
//! A handle is an entry of a fixed array that is never freed, so that a NULL, a stray pointer, a pool
//! that is closed or one that came through fork() is an error instead of a crash.
//!
//! Closing a pool must wait for the calls in flight, yet calls must not meet on one cache line. So the
//! pool stands in several *stripes*, each a readers-writer lock of its own: a call read-locks the stripe
//! of its thread, the close write-locks them one after the other.

use crate::call::without_pool;
use crate::convert::string;
use crate::dir::Stream;
use crate::failure::remark;
use crate::profile;
use crossbeam_utils::CachePadded;
use lodestone::error::{Error, Result};
use lodestone::fs::files::{Files, table::Table};
use lodestone::fs::{Cred, DataMode, Fs, MkfsOptions, OpenOptions};
use lodestone::limits::OPEN_FILES_MAX;
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::{EngineKind, UnknownEngine};
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::ffi::{OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// An open pool. Every function takes one; it may be used by any number of threads.
pub struct lode_fs {
    _opaque: [u8; 0],
}

/// What a handle stands for.
pub struct OpenPool {
    pub files: Files<Pool>,
    pub streams: Table<Mutex<Stream>>,
    /// `st_dev` of everything in the pool.
    pub device: u64,
}

/// Pools open at a time in one process.
const POOLS_OPEN_MAX: usize = 256;
/// Threads beyond this many share stripes.
const STRIPES: usize = 32;

static HANDLES: [Handle; POOLS_OPEN_MAX] = [const { Handle::new() }; POOLS_OPEN_MAX];

struct Handle {
    /// Given out by an open, until its close has ended.
    taken: AtomicBool,
    /// One of the constants below.
    state: AtomicU8,
    stripes: [CachePadded<RwLock<Option<Arc<OpenPool>>>>; STRIPES],
}

const USABLE: u8 = 0;
/// A panic left it in a state that cannot be trusted.
const DISTRUSTED: u8 = 1;
/// Opened by the parent process.
const INHERITED: u8 = 2;

impl Handle {
    const fn new() -> Handle {
        Handle {
            taken: AtomicBool::new(false),
            state: AtomicU8::new(USABLE),
            stripes: [const { CachePadded::new(RwLock::new(None)) }; STRIPES],
        }
    }

    /// A free handle, the one longest out of use first, so that a stale pointer stays stale for long.
    fn take() -> Result<&'static Handle> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        for _ in 0..POOLS_OPEN_MAX {
            let handle = &HANDLES[NEXT.fetch_add(1, Ordering::Relaxed) % POOLS_OPEN_MAX];
            if !handle.taken.swap(true, Ordering::Acquire) {
                return Ok(handle);
            }
        }
        let message = format!("{POOLS_OPEN_MAX} pools are open in this process: close one");
        Err(Error::message(libc::EMFILE, "capi::pools", message))
    }

    fn give_back(&self) {
        self.state.store(USABLE, Ordering::Relaxed);
        self.taken.store(false, Ordering::Release);
    }

    fn fill(&'static self, pool: OpenPool) -> *mut lode_fs {
        let pool = Arc::new(pool);
        for stripe in &self.stripes {
            *stripe.write() = Some(Arc::clone(&pool));
        }
        (&raw const *self).cast_mut().cast()
    }

    /// The handle behind a pointer that C passes; the pointer is compared, not followed.
    #[inline]
    fn of(fs: *mut lode_fs) -> Result<&'static Handle> {
        let offset = fs.addr().wrapping_sub(HANDLES.as_ptr().addr());
        if offset >= size_of_val(&HANDLES) || !offset.is_multiple_of(size_of::<Handle>()) {
            return Err(Error::message(
                libc::EINVAL,
                "capi::pools",
                "not a pool that lode_open_pool returned",
            ));
        }
        Ok(&HANDLES[offset / size_of::<Handle>()])
    }

    #[inline]
    fn check(&self) -> Result<()> {
        match self.state.load(Ordering::Relaxed) {
            USABLE => Ok(()),
            state => Err(refusal(state)),
        }
    }
}

#[cold]
fn refusal(state: u8) -> Error {
    let (errno, message) = match state {
        INHERITED => (
            libc::EBADF,
            "the pool was opened before fork(): the child cannot use it, open another or use threads",
        ),
        _ => (libc::EIO, "the pool met an internal error: close it and open it again"),
    };
    Error::message(errno, "capi::pools", message)
}

/// Runs one call on the pool of a handle, which cannot be closed meanwhile.
#[inline]
pub fn with<R>(fs: *mut lode_fs, run: impl FnOnce(&OpenPool) -> Result<R>) -> Result<R> {
    let handle = Handle::of(fs)?;
    handle.check()?;
    let stripe = handle.stripes[thread_number() % STRIPES].read();
    match &*stripe {
        Some(pool) => run(pool),
        None => Err(closed()),
    }
}

/// From now on calls on this pool fail, and closing it writes nothing.
#[cold]
pub fn distrust(fs: *mut lode_fs) {
    if let Ok(handle) = Handle::of(fs) {
        // A child process keeps its own reason.
        let _ = handle.state.compare_exchange(USABLE, DISTRUSTED, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cold]
fn closed() -> Error {
    Error::message(libc::EBADF, "capi::pools", "the pool is closed")
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

/// Opens the pool at path, a file or a device; of a pool of several regions the first. Returns NULL on
/// failure.
///
/// opts: NULL, or a comma-separated list of
///   ro                      nothing on media changes; writing calls fail with EROFS
///   user=process            permissions are checked for the process's user and groups (the default)
///   user=root               every permission is granted, and new files belong to root
///   umask=OCTAL             instead of the process's
///   assume=DOMAIN           cpu-cache, memory or page-cache: the persistence domain to work by instead
///                           of the one detected. On ordinary memory this emulates persistent memory.
///   engine=ENGINE           who copies data: cpu, the calling thread (the default); semaphore, the calling
///                           thread, at most two at a time per region; delegate, threads of the pool;
///                           emu, an emulated device, for tests
///   profile=FILE            what engines are worth, as `lode tune` wrote it; else the file that LODE_PROFILE
///                           names. One that is damaged or was made on another machine is not used: the
///                           pool opens with the defaults, and lode_last_error() says why.
///
/// A pool that was not closed is recovered first. One process has a pool open at a time, except ro.
/// Errors: EACCES, EBUSY (another process), EFAULT, EINVAL (an option, or not a pool), EIO, EMFILE (256 are
/// open), ENOENT, ENOMEM. lode_last_error() names the file and the remedy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_open_pool(path: *const c_char, opts: *const c_char) -> *mut lode_fs {
    without_pool("lode_open_pool", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let settings = OpenSettings::parse(&opts)?;
        forget_pools_in_children();
        let handle = Handle::take()?;
        match open(Path::new(OsStr::from_bytes(path)), &settings) {
            Ok((pool, about_profile)) => {
                if let Some(why) = about_profile {
                    remark("lode_open_pool", why);
                }
                Ok(handle.fill(pool))
            }
            Err(error) => {
                handle.give_back();
                Err(error)
            }
        }
    })
}

/// Waits for the calls in flight, closes the descriptors and streams that are open, writes a checkpoint
/// so that the next open need not recover, and gives the pool free. The handle is invalid afterwards, also
/// on failure. Errors: EBADF (closed already), EINVAL (not a pool), EIO. Durable: everything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_close_pool(fs: *mut lode_fs) -> c_int {
    without_pool("lode_close_pool", || close(Handle::of(fs)?).map(|()| 0))
}

/// Makes an empty file system in the file or device at path. size: bytes of the pool, a file being made
/// where none is; 0 takes an existing file or device as large as it is.
///
/// opts: NULL, or a comma-separated list of
///   force                   also where something is already
///   label=TEXT              at most 63 bytes
///   data=cow                each write is atomic (the default)
///   data=inplace            a crash can tear a write
///
/// The root directory belongs to the process's user. Errors: EACCES, EBUSY, EEXIST (something is there:
/// force), EFAULT, EINVAL, EIO, ENOENT, ENOSPC. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_mkfs(path: *const c_char, size: u64, opts: *const c_char) -> c_int {
    without_pool("lode_mkfs", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let settings = mkfs_settings(&opts)?;
        let path = Path::new(OsStr::from_bytes(path)).to_owned();
        let pool_options = PoolOptions { force: settings.force, ..PoolOptions::default() };
        let pool = Pool::create(&[path], (size != 0).then_some(size), &pool_options)?;
        Fs::mkfs(pool, &settings).map(|_| 0)
    })
}

/// The pool, and why its profile is not used, where that is so.
fn open(path: &Path, settings: &OpenSettings) -> Result<(OpenPool, Option<String>)> {
    let media = Pool::open(path, &settings.pool)?;
    let (profile, about_profile) = profile::of_pool(settings.profile.as_deref(), &media);
    let (read_only, engine) = (settings.pool.read_only, settings.engine);
    let open_options = OpenOptions { read_only, engine, profile, ..OpenOptions::default() };
    let fs = Fs::open(media, &open_options)?;
    let device = fs.statfs().fsid;
    let files = Files::new(fs, settings.cred.clone(), settings.umask);
    Ok((OpenPool { files, streams: Table::new(OPEN_FILES_MAX), device }, about_profile))
}

fn close(handle: &Handle) -> Result<()> {
    if handle.state.load(Ordering::Relaxed) == INHERITED {
        return Err(refusal(INHERITED));
    }
    // The first stripe decides which of two closes wins.
    let pool = handle.stripes[0].write().take().ok_or(closed())?;
    for stripe in &handle.stripes[1..] {
        stripe.write().take();
    }
    let fs = Arc::clone(pool.files.fs());
    // Descriptors first: files without a name go with them.
    drop(Arc::into_inner(pool).expect("calls hold a stripe, not the pool"));
    let closed = handle.check().and_then(|()| fs.close());
    fs.abandon();
    handle.give_back();
    closed
}

/// Locks and the media's memory do not survive fork() together: a child finds its pools closed.
fn forget_pools_in_children() {
    extern "C" fn in_child() {
        for handle in &HANDLES {
            if handle.taken.load(Ordering::Relaxed) {
                handle.state.store(INHERITED, Ordering::Relaxed);
            }
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to atomics, which is safe in a child of several threads. It
        // fails only for want of memory, and then nothing is lost but this protection.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

struct OpenSettings {
    pool: PoolOptions,
    engine: EngineKind,
    profile: Option<PathBuf>,
    cred: Cred,
    umask: u32,
}

impl OpenSettings {
    fn parse(opts: &str) -> Result<OpenSettings> {
        let mut settings = OpenSettings {
            pool: PoolOptions::default(),
            engine: EngineKind::Cpu,
            profile: None,
            cred: Cred::process(),
            umask: process_umask(),
        };
        for (option, key, value) in pairs(opts) {
            match (key, value) {
                ("ro", None) => settings.pool.read_only = true,
                ("user", Some("process")) => settings.cred = Cred::process(),
                ("user", Some("root")) => settings.cred = Cred::root(),
                ("umask", Some(octal)) => {
                    let mask = u32::from_str_radix(octal, 8).ok().filter(|&m| m <= 0o777);
                    settings.umask = mask.ok_or_else(|| bad_option(option))?;
                }
                ("engine", Some(name)) => settings.engine = engine(name)?,
                ("profile", Some(file)) if !file.is_empty() => settings.profile = Some(PathBuf::from(file)),
                ("assume", Some(domain)) => {
                    let domain = domain.parse::<Domain>();
                    settings.pool.assume =
                        Some(domain.map_err(|e| Error::message(libc::EINVAL, "capi::options", e))?);
                }
                _ => return Err(bad_option(option)),
            }
        }
        Ok(settings)
    }
}

/// EINVAL with a line that names those that there are.
pub fn engine(name: &str) -> Result<EngineKind> {
    name.parse().map_err(|e: UnknownEngine| Error::message(libc::EINVAL, "capi::engine", e.to_string()))
}

fn mkfs_settings(opts: &str) -> Result<MkfsOptions> {
    let process = Cred::process();
    let mut settings = MkfsOptions { root_uid: process.uid, root_gid: process.gid, ..MkfsOptions::default() };
    for (option, key, value) in pairs(opts) {
        match (key, value) {
            ("force", None) => settings.force = true,
            ("label", Some(label)) => settings.label = label.to_owned(),
            ("data", Some("cow")) => settings.data = DataMode::Cow,
            ("data", Some("inplace")) => settings.data = DataMode::InPlace,
            _ => return Err(bad_option(option)),
        }
    }
    Ok(settings)
}

/// The options of a list: the whole, the key, the value behind "=".
fn pairs(opts: &str) -> impl Iterator<Item = (&str, &str, Option<&str>)> {
    opts.split(',').filter(|option| !option.is_empty()).map(|option| match option.split_once('=') {
        Some((key, value)) => (option, key, Some(value)),
        None => (option, option, None),
    })
}

fn bad_option(option: &str) -> Error {
    let message = format!("unknown option `{option}`: the options are listed in lodestone.h");
    Error::message(libc::EINVAL, "capi::options", message)
}

/// The option string; NULL means none.
///
/// # Safety
/// As [`string`].
unsafe fn options(opts: *const c_char) -> Result<String> {
    if opts.is_null() {
        return Ok(String::new());
    }
    // SAFETY: the caller's contract.
    let bytes = unsafe { string(opts) }?;
    let text = std::str::from_utf8(bytes);
    Ok(text.map_err(|_| Error::message(libc::EINVAL, "capi::options", "options are UTF-8"))?.to_owned())
}

/// Read from /proc, because umask(2) cannot be asked without being changed.
fn process_umask() -> u32 {
    const WHERE_UNKNOWN: u32 = 0o022;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok()).unwrap_or(WHERE_UNKNOWN)
}
