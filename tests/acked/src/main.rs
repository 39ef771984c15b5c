//! A load that acknowledges each operation outside of the pool, and a judge of what is found after a crash.
//!
//! ```text
//! acked make POOL [BYTES]                     a pool with the directories the load uses
//! acked load POOL SEED THREADS SINK [DOMAIN [ENGINE]]
//!                                             operations until the process dies; one byte per operation that
//!                                             returned goes to SINK: `-` is stdout, `port:2f8` an I/O port.
//!                                             DOMAIN is assumed; ENGINE copies from a page on
//! acked list POOL THREADS                     what the pool holds, a line per file
//! acked judge THREADS                         reads rounds and listings on stdin, answers with verdicts
//! acked furnish POOL                          the directories the load uses, in a pool that is new
//! acked load-deferred POOL SEED THREADS SINK  the load for a pool in an ordinary file: in most rounds with few syncs
//! acked stir POOL SEED                        has the kernel write parts of that file back, by chance, for ever
//! acked judge-deferred THREADS                the judge for such rounds
//! acked kill DIR KILLS SEED                   kills `acked load` with SIGKILL, again and again, and judges
//! ```
//!
//! Each thread draws its operations from the seed and from what it has made so far; nobody else changes that,
//! so the judge draws the same ones. The threads share directories, and one file in which each has a range.
//! After a crash, what a thread made must be as it is after all operations it acknowledged, or after one more:
//! the interrupted one happened wholly or not at all. The next round goes on from there. Where an operation is
//! durable by a sync, `deferred.rs` says what that means.
//!
//! `tests/guest` runs this on emulated NVDIMMs and on a disk whose machine loses its power.

mod deferred;
mod judge;
mod kill;
mod model;
mod op;

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::profile::{Profile, SMALLEST_BYTES};

use model::{DIRECTORIES, Model, SHARED, SHARED_BYTES};
use op::{Draw, Random};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const POOL_BYTES: u64 = 64 << 20;
const THREADS_MAX: usize = 8;
/// What the load sends when the pool is open.
const OPENED: u8 = b'R';

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("acked: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["make", pool] => make(Path::new(pool), POOL_BYTES, None),
        ["make", pool, bytes] => make(Path::new(pool), bytes.parse()?, None),
        ["load", pool, seed, threads, sink, ref how @ ..] if how.len() <= 2 => {
            let assume = how.first().map(|domain| domain.parse()).transpose()?;
            let engine = how.get(1).map_or(Ok(EngineKind::Cpu), |engine| engine.parse())?;
            let fs = open_with(Path::new(pool), assume, OpenOptions { engine, ..OpenOptions::default() })?;
            load(&fs, seed.parse()?, checked(threads)?, Sink::open(sink)?, Draw::new)
        }
        ["list", pool, threads] => list(Path::new(pool), checked(threads)?),
        ["judge", threads] => {
            let mut judge = judge::Judge::new(checked(threads)?);
            judge::answer(|seed, sent, found| {
                let count = |thread| sent.iter().filter(|byte| **byte == letter(thread)).count() as u64;
                let counts: Vec<u64> = (0..judge.threads()).map(count).collect();
                judge.verdict(seed, &counts, found).map(|happened| happened.to_string())
            })
        }
        ["furnish", pool] => furnish(&open(Path::new(pool), None)?),
        ["load-deferred", pool, seed, threads, sink] => {
            let seed = seed.parse()?;
            // In half of the rounds nothing is synced but by the load, few syncs or many.
            let options = OpenOptions { no_ticker: seed / 6 % 2 == 1, ..OpenOptions::default() };
            let fs = open_with(Path::new(pool), None, options)?;
            load(&fs, seed, checked(threads)?, Sink::open(sink)?, Draw::deferred)
        }
        ["stir", pool, seed] => stir(Path::new(pool), seed.parse()?),
        ["judge-deferred", threads] => {
            let mut judge = deferred::Judge::new(checked(threads)?);
            judge::answer(|seed, sent, found| judge.verdict(seed, sent, found).map(|v| v.to_string()))
        }
        ["kill", dir, kills, seed] => kill::run(Path::new(dir), kills.parse()?, seed.parse()?),
        _ => {
            Err("usage: acked make|load|list|judge|kill|... (see the head of tests/acked/src/main.rs)".into())
        }
    }
}

fn checked(threads: &str) -> Result<usize> {
    let threads = threads.parse()?;
    if (1..=THREADS_MAX).contains(&threads) { Ok(threads) } else { Err("1 to 8 threads".into()) }
}

fn open(pool: &Path, assume: Option<Domain>) -> Result<Arc<Fs<Pool>>> {
    open_with(pool, assume, OpenOptions::default())
}

fn open_with(pool: &Path, assume: Option<Domain>, options: OpenOptions) -> Result<Arc<Fs<Pool>>> {
    let media = Pool::open(pool, &PoolOptions { assume, ..PoolOptions::default() })?;
    let profile = Profile::default().handing_over_from(SMALLEST_BYTES);
    Ok(Fs::open(media, &OpenOptions { profile, ..options })?)
}

fn files(fs: &Arc<Fs<Pool>>) -> Files<Pool> {
    Files::new(Arc::clone(fs), Cred::root(), 0)
}

/// A new pool. A device is taken as it is.
fn make(pool: &Path, bytes: u64, assume: Option<Domain>) -> Result<()> {
    let options = PoolOptions { force: true, assume, ..PoolOptions::default() };
    let is_device = pool.metadata().is_ok_and(|m| !m.is_file());
    let media = Pool::create(&[PathBuf::from(pool)], (!is_device).then_some(bytes), &options)?;
    let media = Fs::mkfs(media, &MkfsOptions { force: true, ..MkfsOptions::default() })?;
    furnish(&Fs::open(media, &OpenOptions::default())?)
}

/// Makes what all threads share, and closes the pool.
fn furnish(fs: &Arc<Fs<Pool>>) -> Result<()> {
    let files = files(fs);
    for dir in DIRECTORIES {
        files.mkdir(dir.as_bytes(), 0o755)?;
    }
    let fd = files.open(SHARED.as_bytes(), libc::O_CREAT | libc::O_WRONLY, 0o644)?;
    files.pwrite(fd, &vec![0; SHARED_BYTES * THREADS_MAX], 0)?;
    files.close(fd)?;
    Ok(fs.close()?)
}

/// Where acknowledgements go. A byte is outside of this process, and of this machine where it is a port, when
/// `send` returns.
struct Sink {
    file: File,
    /// The number of a port.
    port: Option<u64>,
}

impl Sink {
    fn open(name: &str) -> Result<Sink> {
        let (path, port) = match name.split_once(':') {
            None if name == "-" => ("/proc/self/fd/1", None),
            Some(("port", number)) => ("/dev/port", Some(u64::from_str_radix(number, 16)?)),
            _ => return Err("a sink is - or port:NUMBER".into()),
        };
        Ok(Sink { file: File::options().write(true).open(path)?, port })
    }

    fn send(&self, byte: u8) -> std::io::Result<()> {
        match self.port {
            None => (&self.file).write_all(&[byte]),
            Some(port) => self.file.write_all_at(&[byte], port),
        }
    }
}

/// The byte by which a thread acknowledges.
fn letter(thread: usize) -> u8 {
    b'a' + thread as u8
}

/// Runs until it is killed. What fails here is a failure of the file system.
fn load(
    fs: &Arc<Fs<Pool>>,
    seed: u64,
    threads: usize,
    sink: Sink,
    draw: fn(u64, usize) -> Draw,
) -> Result<()> {
    let files = files(fs);
    let models = Model::read_all(&files, threads)?;
    sink.send(OPENED)?;
    std::thread::scope(|scope| {
        for (thread, mut model) in models.into_iter().enumerate() {
            let (files, sink) = (&files, &sink);
            scope.spawn(move || {
                let mut draw = draw(seed, thread);
                loop {
                    let op = draw.next(&model);
                    let done = op.execute(files).map_err(|e| format!("{op}: {e}"));
                    let sent = done.and_then(|()| sink.send(letter(thread)).map_err(|e| e.to_string()));
                    if let Err(e) = sent {
                        eprintln!("acked: {e}");
                        std::process::exit(1);
                    }
                    op.change(&mut model);
                }
            });
        }
    });
    Ok(())
}

/// As memory pressure does: pages go to the disk in any order, and nobody waits for them.
fn stir(pool: &Path, seed: u64) -> Result<()> {
    const PAGE: u64 = 4096;
    const PAGES_MAX: u64 = 256;
    const PAUSE_US_MAX: u64 = 3000;
    let file = File::open(pool)?;
    let pages = file.metadata()?.len() / PAGE;
    let mut random = Random::new(seed);
    loop {
        let (at, len) = (random.below(pages), 1 + random.below(PAGES_MAX));
        // What is dirty of that range begins to be written.
        rustix::fs::fadvise(&file, at * PAGE, NonZeroU64::new(len * PAGE), rustix::fs::Advice::DontNeed)?;
        std::thread::sleep(Duration::from_micros(random.below(PAUSE_US_MAX)));
    }
}

/// A line per file of each thread, sorted; then the pool is left as it was found: not closed.
fn list(pool: &Path, threads: usize) -> Result<()> {
    let fs = open(pool, None)?;
    let report = fs.open_report();
    let mut out = String::new();
    for line in Model::read_all(&files(&fs), threads)?.iter().enumerate().flat_map(|(t, m)| m.lines(t)) {
        out += &format!("{line}\n");
    }
    let free = fs.statfs().blocks_free;
    out += &format!("opened: voided {} damaged {} free {free}\n", report.voided, report.damaged);
    std::io::stdout().write_all(out.as_bytes())?;
    Ok(())
}
