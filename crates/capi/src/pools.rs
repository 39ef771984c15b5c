//! Open pools: what opens, makes and closes them, and with which options.

use crate::call::without_pool;
use crate::convert::string;
use crate::dir::Stream;
use crate::failure::remark;
use crate::handle::{Handle, Handles, Held};
use crate::profile;
use crate::tickets::Tickets;
use lodestone::error::{Error, Result};
use lodestone::fs::files::{Files, table::Table};
use lodestone::fs::{Cred, DataMode, Fs, MkfsOptions, OpenOptions, check};
use lodestone::limits::OPEN_FILES_MAX;
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::class::{Class, Owner, UnknownClass};
use lodestone::mover::manager::{Qos, UnknownQos};
use lodestone::mover::priority::class_of;
use lodestone::mover::{EngineKind, UnknownEngine};
use lodestone::quote::Shown;
use lodestone::wait::{self, Ending, Holding};
use parking_lot::Mutex;
use std::ffi::{OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// An open pool. Every function takes one; it may be used by any number of threads.
pub struct lode_fs {
    _opaque: [u8; 0],
}

/// What a handle stands for.
pub struct OpenPool {
    pub files: Files<Pool>,
    pub streams: Table<Mutex<Stream>>,
    pub tickets: Tickets,
    /// `st_dev` of everything in the pool.
    pub device: u64,
}

static POOLS: Handles<OpenPool> = Handles::new();

impl Held for OpenPool {
    const NOT_ONE: &str = "not a pool that lode_open_pool returned";
    const CLOSED: &str = "the pool is closed";
    const INHERITED: &str =
        "the pool was opened before fork(): the child cannot use it; use threads, or let the child exec";
    const DISTRUSTED: &str = "the pool met an internal error: close it and open it again";
    const TOO_MANY: &str = "pools are open in this process: close one";

    fn handles() -> &'static Handles<OpenPool> {
        &POOLS
    }

    fn end_copies(&self) {
        self.files.fs().end_copying();
    }
}

/// Opens the pool at path, a file or a device; of a pool of several regions the first. Returns NULL on
/// failure.
///
/// opts: NULL, or a comma-separated list of
///   ro                      nothing on media changes; writing calls fail with EROFS
///   user=process            permissions are checked for the user and groups that the process has when it opens the
///                           pool (the default); what it drops later it keeps here
///   user=root               every permission is granted, and new files belong to root
///   umask=OCTAL             instead of the process's
///   assume=DOMAIN           cpu-cache, memory, page-cache or volatile: the persistence domain to work by instead
///                           of the one detected. On ordinary memory this emulates persistent memory.
///   engine=ENGINE           who copies data: cpu, the calling thread (the default); semaphore, the calling
///                           thread, at most two at a time per region; delegate, threads of the pool;
///                           dsa and ioat, Intel's devices, or cpu where none can be used; emu and emu-ioat,
///                           emulated devices, for tests
///   class=CLASS             what is wanted of copies that engines make: latency, each is through soon; bandwidth,
///                           many are, and they give way to the others; bandwidth:N, likewise, with a share of
///                           its own for each number N, instead of one for the process. Else LODE_CLASS, else the
///                           class of the calling thread's I/O priority (ioprio_set(2), ionice(1)): latency of
///                           realtime, bandwidth of idle.
///   floor=PERCENT           what class bandwidth keeps of the bytes that classes copy, if it wants it: 1 to 90
///                           (10 is the default)
///   starve=MS               and so many milliseconds, 1 to 60000, after which it has a piece of a copy where nothing
///                           moves because somebody does not look after copies of class latency (2 is the default)
///   profile=FILE            what engines are worth, as `lode tune` wrote it; else the file that LODE_PROFILE
///                           names. One that is damaged or was made on another machine is not used: the
///                           pool opens with the defaults, and lode_last_error() says why.
///
/// Where the engine that was asked for cannot be used the pool opens all the same, the calling thread copies, and
/// lode_last_error() says why.
///
/// A pool that was not closed is recovered first. One process has a pool open at a time, except ro. After fork() the
/// child has none of the parent's; and where another thread was in one of these functions at the fork, it may do
/// nothing here but exec: a lock of that thread's is taken for ever.
/// Errors: EACCES, EBUSY (another process), EFAULT, EINVAL (an option, or not a pool), EIO, EISDIR, ELOOP, EMFILE (256
/// are open), ENAMETOOLONG, ENODEV (a device that is no memory), ENOENT, ENOMEM, ENOTDIR, EOPNOTSUPP and EPROTONOSUPPORT (made by a version whose format this
/// one does not know), EUCLEAN (damaged). lode_last_error() names the file and the remedy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_open_pool(path: *const c_char, opts: *const c_char) -> *mut lode_fs {
    without_pool("lode_open_pool", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let settings = OpenSettings::parse(&opts)?;
        let handle = POOLS.take()?;
        match open(Path::new(OsStr::from_bytes(path)), &settings) {
            Ok((pool, remarks)) => {
                if let Some(remarks) = remarks {
                    remark("lode_open_pool", remarks);
                }
                Ok(handle.fill(pool).cast())
            }
            Err(error) => {
                handle.give_back();
                Err(error)
            }
        }
    })
}

/// Waits for the calls in flight, closes the descriptors and streams that are open, writes a checkpoint
/// so that the next open need not recover, and gives the pool free. Reads and writes by ticket end with it, and their
/// buffers are the caller's: who is answered EBADF knows that no copy goes on. The handle is invalid afterwards, also
/// on failure. Errors: EBADF (closed already), EINVAL (not a pool), EIO. Durable: everything.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_close_pool(fs: *mut lode_fs) -> c_int {
    without_pool("lode_close_pool", || close(POOLS.of(fs.addr())?).map(|()| 0))
}

/// Makes an empty file system in the file or device at path. size: bytes of the pool, a file being made
/// where none is; 0 takes an existing file or device as large as it is.
///
/// opts: NULL, or a comma-separated list of
///   force                   also where something is already
///   label=TEXT              at most 63 bytes, none of them a control character
///   data=cow                each write is atomic (the default)
///   data=inplace            a crash can tear a write
///
/// The root directory belongs to the process's user. Errors: EACCES, EBUSY, EEXIST (something is there:
/// force), EFAULT, EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENODEV (neither a file nor a device that can be mapped), ENOENT, ENOSPC,
/// ENOTDIR. Durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lode_mkfs(path: *const c_char, size: u64, opts: *const c_char) -> c_int {
    without_pool("lode_mkfs", || {
        // SAFETY: the contract at the head of the header.
        let (path, opts) = unsafe { (string(path)?, options(opts)?) };
        let settings = mkfs_settings(&opts)?;
        // Before anything is made or changed.
        settings.check((size != 0).then_some(size))?;
        let path = Path::new(OsStr::from_bytes(path)).to_owned();
        let pool_options = PoolOptions { force: settings.force, ..PoolOptions::default() };
        let is_new =
            std::fs::symlink_metadata(&path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        let pool = Pool::create(std::slice::from_ref(&path), (size != 0).then_some(size), &pool_options)?;
        Fs::mkfs(pool, &settings).map(|_| 0).inspect_err(|_| {
            if is_new {
                let _ = std::fs::remove_file(&path);
            }
        })
    })
}

/// The pool, and why its profile is not used, where that is so.
fn open(path: &Path, settings: &OpenSettings) -> Result<(OpenPool, Option<String>)> {
    let media = check::open_pool(path, &settings.pool)?;
    let (profile, about_profile) =
        profile::of_regions(settings.profile.as_deref(), Some(&media.describe().regions));
    let (read_only, engine) = (settings.pool.read_only, settings.engine);
    let class = settings.class.map_or_else(class_of_environment, |class| Ok(Some(class)))?;
    let qos = settings.qos;
    let open_options = OpenOptions { read_only, engine, class, qos, profile, ..OpenOptions::default() };
    let fs = Fs::open(media, &open_options).map_err(|e| e.context(path.shown()))?;
    let device = fs.statfs().fsid;
    let remarks = remarks(about_profile, engine, fs.mover().missing());
    let files = Files::new(fs, settings.cred.clone(), settings.umask);
    let (streams, tickets) = (Table::new(OPEN_FILES_MAX), Tickets::default());
    Ok((OpenPool { files, streams, tickets, device }, remarks))
}

/// What is to be said although it was opened: of the profile, and of an engine that cannot be used.
pub fn remarks(about_profile: Option<String>, engine: EngineKind, missing: Option<&str>) -> Option<String> {
    let about_engine =
        missing.map(|why| format!("engine {} cannot be used: {why}; the CPU copies instead", engine.name()));
    let remarks: Vec<String> = about_profile.into_iter().chain(about_engine).collect();
    (!remarks.is_empty()).then(|| remarks.join(". "))
}

/// Copies take less, unless nobody is left to wait for them.
const CALLS_WAIT_MAX: Duration = Duration::from_secs(2);

/// Nobody else has it.
struct Alone<'a>(&'a Arc<Fs<Pool>>);

impl Ending for Alone<'_> {
    fn look(&self) -> bool {
        Arc::strong_count(self.0) == 1
    }
}

fn close(handle: &Handle<OpenPool>) -> Result<()> {
    // Descriptors first: files without a name go with them.
    let fs = handle.empty(|pool| Arc::clone(pool.files.fs()))?;
    // Calls that wait for copies hold nothing but the file system, and the file that they wait for. One may never go on: that
    // of a uthread of this thread, in an exit that another called. Without it all is durable, too, only the lock stays.
    wait::for_at_most(&Alone(&fs), CALLS_WAIT_MAX, Holding::Nothing);
    let closed = handle.check().and_then(|()| fs.close());
    fs.abandon();
    handle.give_back();
    closed
}

struct OpenSettings {
    pool: PoolOptions,
    engine: EngineKind,
    class: Option<Class>,
    qos: Qos,
    profile: Option<PathBuf>,
    cred: Cred,
    umask: u32,
}

impl OpenSettings {
    fn parse(opts: &str) -> Result<OpenSettings> {
        let mut settings = OpenSettings {
            pool: PoolOptions::default(),
            engine: EngineKind::Cpu,
            class: None,
            qos: Qos::default(),
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
                ("class", Some(name)) => settings.class = Some(class(name)?),
                ("floor", Some(percent)) => settings.qos.set_floor(percent).map_err(bad_qos)?,
                ("starve", Some(time)) => settings.qos.set_starve(time).map_err(bad_qos)?,
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

fn bad_qos(e: UnknownQos) -> Error {
    Error::message(libc::EINVAL, "capi::options", e.to_string())
}

/// EINVAL with a line that names those that there are.
pub fn engine(name: &str) -> Result<EngineKind> {
    name.parse().map_err(|e: UnknownEngine| Error::message(libc::EINVAL, "capi::engine", e.to_string()))
}

/// EINVAL with a line that names those that there are.
pub fn class(name: &str) -> Result<Class> {
    name.parse().map_err(|e: UnknownClass| Error::message(libc::EINVAL, "capi::class", e.to_string()))
}

/// For programs that cannot be told otherwise.
fn class_of_environment() -> Result<Option<Class>> {
    match std::env::var_os("LODE_CLASS").filter(|name| !name.is_empty()) {
        Some(name) => class(&name.to_string_lossy()).map(Some).map_err(|e| e.context("LODE_CLASS")),
        None => Ok(class_of(0, Owner::process())),
    }
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
pub fn pairs(opts: &str) -> impl Iterator<Item = (&str, &str, Option<&str>)> {
    opts.split(',').filter(|option| !option.is_empty()).map(|option| match option.split_once('=') {
        Some((key, value)) => (option, key, Some(value)),
        None => (option, option, None),
    })
}

pub fn bad_option(option: &str) -> Error {
    let message = format!("unknown option `{option}`: the options are listed in lodestone.h");
    Error::message(libc::EINVAL, "capi::options", message)
}

/// The option string; NULL means none.
///
/// # Safety
/// As [`string`].
pub unsafe fn options(opts: *const c_char) -> Result<String> {
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
