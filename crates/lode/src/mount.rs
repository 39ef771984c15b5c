//! `lode mount` and `lode umount`: from a command line to a live mount, and back to a closed pool.
//!
//! The order is chosen so that whatever can be wrong is found before anything changes: options, then the
//! mount point, then the pool (which recovers it, if need be), and only then the mount. Nobody is told of a mount
//! before all the threads that serve it have started; where one could not, the mount is taken away again and the pool
//! is closed. A mount point left dead by a killed server is cleaned up on the way. Afterwards the process serves until the kernel lets
//! go, and the last act is [`Fs::close`], which writes the checkpoint: `lode umount` returns when that is
//! done, so that the pool can be used at once.
//!
//! What goes on meanwhile is told by [`live`](crate::live).
//!
//! `options` reads what was asked, `daemon` lets the caller go when the mount is live, `stop` ends it by
//! signal, before which `write_back` has the kernel write what it alone has; the kernel's side is in [`door`](crate::door).

mod daemon;
pub mod options;
mod stop;
mod write_back;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use lodestone::fs::{Fs, OpenOptions, check};
use lodestone::media::{Media, Pool, PoolOptions, mounts};
use lodestone::mover::EngineKind;
use rustix::fs::FlockOperation;
use rustix::mount::MountFlags;

use crate::door::connect::{self, Attachment, Plan};
use crate::door::fuse::FuseDoor;
use crate::door::{Cache, Door, Settings};
use crate::failure::complain;
use crate::live::server::{self, Listening};
use crate::live::state::Mounted;
use crate::profile;
use crate::target::show;
use daemon::{Ready, Side};
use options::Options;
use stop::Signals;

/// How long `lode umount` waits for the server to have closed the pool.
const CLOSE_WAIT: Duration = Duration::from_secs(60);
/// The same for a pool that was mounted read-only: there is nothing to close, and other readers may
/// remain.
const CLOSE_WAIT_READ_ONLY: Duration = Duration::from_secs(1);
const CLOSE_POLL: Duration = Duration::from_millis(5);

const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// What is to be mounted.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    pub pool: OsString,
    /// A directory, or `/dev/fd/N`: an opened and mounted /dev/fuse.
    pub dir: PathBuf,
    /// Each `-o`, commas inside.
    pub options: Vec<OsString>,
    pub foreground: bool,
    /// Unknown options are ignored (mount(8)'s `-s`).
    pub sloppy: bool,
    /// All but the mount itself (mount(8)'s `-f`).
    pub fake: bool,
}

/// Why it did not come to a mount.
struct Failure {
    code: u8,
    /// None where it has been said.
    message: Option<String>,
}

impl Failure {
    fn failed(message: impl Into<String>) -> Failure {
        Failure { code: FAILED, message: Some(message.into()) }
    }
}

/// Mounts, and says why not in one line on stderr. Must be called before the process has a second
/// thread: it forks, unless `foreground` is set.
pub fn run(request: MountOptions) -> ExitCode {
    match mount(&request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(failure),
    }
}

/// Unmounts the pool on `dir` and returns when it is closed.
pub fn umount(dir: &Path) -> ExitCode {
    match unmount(dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(failure),
    }
}

fn report(failure: Failure) -> ExitCode {
    if let Some(message) = failure.message {
        complain(message);
    }
    ExitCode::from(failure.code)
}

fn mount(request: &MountOptions) -> Result<(), Failure> {
    let options = Options::parse(&request.options, request.sloppy)
        .map_err(|message| Failure { code: USAGE, message: Some(message) })?;
    let pool = absolute(&request.pool)?;
    let place = Place::find(&request.dir, &options)?;
    if request.fake {
        return Ok(());
    }
    if request.foreground {
        let signals = Signals::block().map_err(|e| Failure::failed(format!("cannot block signals: {e}")))?;
        return serve(&pool, place, &options, signals, None);
    }
    let split = daemon::split().map_err(|e| {
        // One that was killed leaves its mount dead.
        if let Place::Dir(path) = &place {
            while is_dead(path) && connect::unmount(path, true).is_ok() {}
        }
        Failure::failed(format!("cannot start a server: {}", for_want(&e)))
    })?;
    match split {
        Side::Parent(0) => Ok(()),
        Side::Parent(code) => Err(Failure { code, message: None }),
        Side::Child(signals, ready) => serve(&pool, place, &options, signals, Some(ready)),
    }
}

/// The pool's path as the table of mounts will show it, and as a daemon in `/` can open it.
fn absolute(pool: &OsStr) -> Result<PathBuf, Failure> {
    let pool = Path::new(pool);
    pool.canonicalize().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Failure::failed(format!(
            "cannot open {0}: No such file or directory; name a pool, or make one with `lode mkfs {0}`",
            show(pool)
        )),
        _ => Failure::failed(format!("{}: {e}", show(pool))),
    })
}

/// Where to mount.
enum Place {
    Dir(PathBuf),
    Device(i32),
}

impl Place {
    fn find(dir: &Path, options: &Options) -> Result<Place, Failure> {
        if let Some(fd) = connect::handed_in(dir) {
            return Ok(Place::Device(fd));
        }
        let about = |e: io::Error| Failure::failed(format!("{}: {e}", show(dir)));
        let path = mounts::resolve(dir).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Failure::failed(format!("{}: {e}; make this directory first", show(dir)))
            }
            _ => about(e),
        })?;
        remove_dead_mounts(&path)?;
        if !fs::metadata(&path).map_err(about)?.is_dir() {
            return Err(Failure::failed(format!("{} is not a directory", show(dir))));
        }
        if let Some(entry) = mounts::at(&path).map_err(about)?.filter(mounts::Entry::is_pool) {
            return Err(Failure::failed(format!(
                "{} is a mount point already, of {}: unmount it first, with `lode umount {0}`",
                show(dir),
                show(Path::new(&entry.source))
            )));
        }
        if !options.nonempty && fs::read_dir(&path).map_err(about)?.next().is_some() {
            return Err(Failure::failed(format!(
                "{} is not empty, and a mount would cover what it holds: use an empty directory, or -o nonempty",
                show(dir)
            )));
        }
        Ok(Place::Dir(path))
    }
}

/// A server that was killed leaves its mount behind, on which everything fails with ENOTCONN.
fn remove_dead_mounts(path: &Path) -> Result<(), Failure> {
    while is_dead(path) {
        let failed = |e: io::Error| {
            let path = show(path);
            Failure::failed(format!("{path} is a dead mount that cannot be removed: {e}"))
        };
        connect::unmount(path, true).map_err(failed)?;
        complain(format!("note: removed the dead mount on {}, whose server has gone", show(path)));
    }
    Ok(())
}

fn is_dead(path: &Path) -> bool {
    fs::metadata(path).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
        && mounts::at(path).is_ok_and(|entry| entry.is_some_and(|mounted| mounted.is_pool()))
}

/// The server's life. The parent learns of a failure before the mount is live; afterwards the log does.
fn serve(
    pool: &Path,
    place: Place,
    options: &Options,
    signals: Signals,
    ready: Option<Ready>,
) -> Result<(), Failure> {
    match start(pool, place, options, signals) {
        Ok(server) => {
            let _log = ready.and_then(Ready::live);
            server.run().map_err(said)
        }
        Err(failure) => {
            let failure = said(failure);
            if let Some(ready) = ready {
                ready.failed(failure.code);
            }
            Err(failure)
        }
    }
}

/// Reports it, so that nobody has to later.
fn said(failure: Failure) -> Failure {
    let code = failure.code;
    report(failure);
    Failure { code, message: None }
}

/// A live mount.
struct Server<M: Media> {
    fs: Arc<Fs<M>>,
    attachment: Attachment,
    /// How the door ended, or that a signal came which the kernel's side does not follow.
    end: mpsc::Receiver<io::Result<()>>,
    /// Tells of the pool while it is mounted.
    live: Option<server::Server>,
}

fn start(pool: &Path, place: Place, options: &Options, signals: Signals) -> Result<Server<Pool>, Failure> {
    let listening = listen(options)?;
    let fs = open_pool(pool, options)?;
    let read_only = fs.statfs().read_only;
    let begun = connect_to_kernel(pool, &place, options, read_only).and_then(|(device, attachment)| {
        // Of no use without somebody who serves it, and what is said next is why.
        let undo = |_: &Failure| _ = attachment.unmount(true);
        begin(pool, &fs, device, &attachment, (signals, listening), options).inspect_err(undo)
    });
    if begun.is_err() {
        close(&fs)?;
    }
    begun
}

/// Starts all that serves a mount.
fn begin(
    pool: &Path,
    fs: &Arc<Fs<Pool>>,
    device: OwnedFd,
    attachment: &Attachment,
    (signals, mut listening): (Signals, Listening),
    options: &Options,
) -> Result<Server<Pool>, Failure> {
    let settings = Settings {
        threads: options.threads,
        cache: options.cache,
        write_bytes_max: options.write_bytes_max,
        // Nobody asks for priorities where no copy would be treated otherwise.
        class_by_priority: options.engine != EngineKind::Cpu && fs.mover().state().class.is_none(),
        sync_names: options.flags.intersects(MountFlags::SYNCHRONOUS | MountFlags::DIRSYNC),
        // Who made the mount may have made it for writing.
        asks_opens: attachment.dir().is_none() && fs.statfs().read_only,
    };
    let door = FuseDoor::open(Arc::clone(fs), device, &settings)
        .map_err(|e| Failure::failed(format!("the kernel does not agree to the mount: {}", for_want(&e))))?;
    if options.cache != Cache::None {
        attachment.read_far_ahead();
    }
    if let Err(why) = listening.open_for_pool(pool, attachment.device().map(|(_, minor)| minor)) {
        tracing::warn!("{why}; the mount is not affected");
    }
    let mount_point = attachment.dir().map(Path::to_owned);
    let listens = listening.addresses();
    tracing::info!(?listens, "state and metrics");
    let emulation = fs.media().describe().emulated;
    let source = Mounted::new(fs, door.traffic(), pool.to_owned(), mount_point, listens, emulation);
    let (ended, end) = mpsc::channel();
    let watched = signals.watch(attachment.clone(), ended.clone());
    watched.map_err(|e| Failure::failed(format!("cannot watch for signals: {}", for_want(&e))))?;
    let live = listening.serve(Arc::new(source));
    let live = live.inspect_err(|e| tracing::warn!("no state and no metrics: {}", for_want(e))).ok();
    let serving = door.serve().and_then(|served| {
        // The receiver has gone where a signal was faster.
        thread::Builder::new().name("door".to_owned()).spawn(move || _ = ended.send(served()))
    });
    serving.map_err(|e| Failure::failed(format!("cannot start to serve: {}", for_want(&e))))?;
    Ok(Server { fs: Arc::clone(fs), attachment: attachment.clone(), end, live })
}

/// An error, with what to do where the system gave no more of something.
fn for_want(e: &io::Error) -> String {
    let remedy = match (e.kind(), e.raw_os_error()) {
        (_, Some(libc::EAGAIN)) => "; raise ulimit -u or pids.max",
        (_, Some(libc::EMFILE)) => "; raise ulimit -n",
        (io::ErrorKind::OutOfMemory, _) => "; raise ulimit -v",
        _ => "",
    };
    format!("{e}{remedy}")
}

/// On the address that was asked for, if there is one.
fn listen(options: &Options) -> Result<Listening, Failure> {
    let mut listening = Listening::new()
        .map_err(|e| Failure::failed(format!("cannot prepare to serve metrics: {}", for_want(&e))))?;
    if let Some(address) = &options.metrics {
        listening.open(address).map_err(|why| Failure::failed(format!("metrics: {why}")))?;
    }
    Ok(listening)
}

fn open_pool(path: &Path, options: &Options) -> Result<Arc<Fs<Pool>>, Failure> {
    let read_only = options.read_only();
    let media_options = PoolOptions { assume: options.assume, read_only, ..PoolOptions::default() };
    let media = check::open_pool(path, &media_options).map_err(|e| Failure::failed(e.to_string()))?;
    let profile = profile::of_pool(options.profile.as_deref(), &media);
    let emulation = media.describe();
    if emulation.emulated {
        complain(format!(
            "note: emulated PM: {} is {}, and {} is only assumed; a power failure loses what was acknowledged",
            show(path),
            emulation.detected,
            emulation.domain
        ));
    }
    let Options { class, engine, qos, .. } = *options;
    let open_options = OpenOptions { read_only, engine, class, qos, profile, ..OpenOptions::default() };
    let fs = Fs::open(media, &open_options).map_err(|e| Failure::failed(format!("{}: {e}", show(path))))?;
    tracing::info!(pool = %path.display(), report = ?fs.open_report(), "opened");
    Ok(fs)
}

fn connect_to_kernel(
    pool: &Path,
    place: &Place,
    options: &Options,
    read_only: bool,
) -> Result<(OwnedFd, Attachment), Failure> {
    match place {
        Place::Device(fd) => connect::take(*fd).map_err(|e| Failure::failed(format!("/dev/fd/{fd}: {e}"))),
        Place::Dir(dir) => {
            let plan = Plan {
                source: pool.as_os_str().to_owned(),
                dir: dir.clone(),
                // A damaged pool may have opened so, whatever was asked for.
                flags: if read_only { options.flags | MountFlags::RDONLY } else { options.flags },
                allow_other: options.allow_other,
                read_bytes_max: options.read_bytes_max,
            };
            connect::mount(&plan).map_err(|e| Failure::failed(format!("cannot mount on {}: {e}", show(dir))))
        }
    }
}

impl<M: Media> Server<M> {
    /// Until the mount ends, whoever ends it; then closes the pool.
    fn run(self) -> Result<(), Failure> {
        let Server { fs, attachment, end, live } = self;
        // By the door, or by a signal that the kernel's side does not follow. Either way no request that
        // comes now can change the pool any more.
        let outcome = end.recv().unwrap_or(Ok(()));
        if attachment.stands() {
            // Cut off rather than unmounted: without a server the mount would be dead.
            let _ = attachment.unmount(true);
        }
        // First, so that who sees the pool closed finds no socket of it.
        drop(live);
        close(&fs)?;
        outcome.map_err(|e| Failure::failed(format!("serving the mount ended with: {e}")))
    }
}

fn close<M: Media>(fs: &Fs<M>) -> Result<(), Failure> {
    fs.close().map_err(|e| Failure::failed(format!("closing the pool: {e}; the next mount recovers it")))
}

fn unmount(dir: &Path) -> Result<(), Failure> {
    let about = |e: io::Error| Failure::failed(format!("{}: {e}", show(dir)));
    let path = mounts::resolve(dir).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Failure::failed(format!("no pool is mounted on {}: {e}", show(dir))),
        _ => about(e),
    })?;
    let Some(entry) = mounts::at(&path).map_err(about)?.filter(mounts::Entry::is_pool) else {
        return Err(Failure::failed(format!("no pool is mounted on {}", show(dir))));
    };
    // A mount whose server has gone is taken away all the same.
    let has_server = File::open(&entry.source).is_ok_and(|pool| is_held(&pool));
    connect::unmount(&path, false).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => Failure::failed(format!(
            "{} is in use: a program has a file open or its working directory there (`fuser -vm {0}` names it)",
            show(dir)
        )),
        _ => about(e),
    })?;
    if is_mounted_elsewhere(&entry) {
        return Ok(());
    }
    wait_until_closed(&entry)?;
    if !has_server || entry.read_only {
        return Ok(());
    }
    not_closed(Path::new(&entry.source)).map_or(Ok(()), |why| Err(Failure::failed(why)))
}

/// What has become of a pool that its server did not close; none of one that is closed, or that may not be looked at.
fn not_closed(pool: &Path) -> Option<String> {
    let options = PoolOptions { read_only: true, ..PoolOptions::default() };
    match Pool::open(pool, &options).and_then(|media| Fs::probe(&media)) {
        Ok(info) if info.closed => None,
        Ok(_) => Some(format!(
            "{} is unmounted, but its server could not close it (the system log says why): the next use recovers it",
            show(pool)
        )),
        Err(e) => {
            let is_damaged = matches!(e.errno(), libc::EINVAL | libc::EUCLEAN | libc::EIO);
            is_damaged.then(|| format!("{} is unmounted, but was changed under its server: {e}", show(pool)))
        }
    }
}

/// Whether a server, or somebody else, works on the pool.
fn is_held(pool: &File) -> bool {
    rustix::fs::flock(pool, FlockOperation::NonBlockingLockExclusive).is_err()
}

/// Whether the server goes on: its mount shows in another place (a bind mount), or in another mount namespace.
fn is_mounted_elsewhere(entry: &mounts::Entry) -> bool {
    // The kernel takes it away with the last mount, before umount(2) returns; not every system shows it.
    let connection = Path::new("/sys/fs/fuse/connections").join(entry.device.1.to_string());
    let is_here = |pools: Vec<mounts::Entry>| pools.iter().any(|other| other.device == entry.device);
    connection.exists() || mounts::pools().is_ok_and(is_here)
}

/// The server holds a lock on the pool until it has closed it.
fn wait_until_closed(entry: &mounts::Entry) -> Result<(), Failure> {
    let limit = if entry.read_only { CLOSE_WAIT_READ_ONLY } else { CLOSE_WAIT };
    let end = Instant::now() + limit;
    // A pool that cannot be opened (its file is gone, or another user's) cannot be waited for.
    let Ok(pool) = File::open(&entry.source) else { return Ok(()) };
    while is_held(&pool) {
        if Instant::now() >= end {
            if entry.read_only {
                return Ok(());
            }
            return Err(Failure::failed(format!(
                "{} is unmounted, but its server has not closed it after {} s",
                show(Path::new(&entry.source)),
                limit.as_secs()
            )));
        }
        thread::sleep(CLOSE_POLL);
    }
    Ok(())
}
