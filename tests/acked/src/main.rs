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
//! acked kill DIR KILLS SEED                   kills `acked load` with SIGKILL, again and again, and judges
//! ```
//!
//! Each thread draws its operations from the seed and from what it has made so far; nobody else changes that,
//! so the judge draws the same ones. The threads share directories, and one file in which each has a range.
//! After a crash, what a thread made must be as it is after all operations it acknowledged, or after one more:
//! the interrupted one happened wholly or not at all. The next round goes on from there.
//!
//! `tests/guest` runs this on emulated NVDIMMs whose machine loses its power.

mod judge;
mod kill;
mod model;
mod op;

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use lodestone::fs::files::Files;
use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};
use lodestone::mover::EngineKind;
use lodestone::mover::profile::{Profile, SMALLEST_BYTES};

use model::{DIRECTORIES, Model, SHARED, SHARED_BYTES};
use op::Draw;

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
            let fs = open_with(Path::new(pool), assume, engine)?;
            load(&fs, seed.parse()?, checked(threads)?, Sink::open(sink)?)
        }
        ["list", pool, threads] => list(Path::new(pool), checked(threads)?),
        ["judge", threads] => judge::answer(checked(threads)?),
        ["kill", dir, kills, seed] => kill::run(Path::new(dir), kills.parse()?, seed.parse()?),
        _ => {
            Err("usage: acked make|load|list|judge|kill ... (see the head of tests/acked/src/main.rs)".into())
        }
    }
}

fn checked(threads: &str) -> Result<usize> {
    let threads = threads.parse()?;
    if (1..=THREADS_MAX).contains(&threads) { Ok(threads) } else { Err("1 to 8 threads".into()) }
}

fn open(pool: &Path, assume: Option<Domain>) -> Result<Arc<Fs<Pool>>> {
    open_with(pool, assume, EngineKind::Cpu)
}

fn open_with(pool: &Path, assume: Option<Domain>, engine: EngineKind) -> Result<Arc<Fs<Pool>>> {
    let media = Pool::open(pool, &PoolOptions { assume, ..PoolOptions::default() })?;
    let profile = Profile::default().handing_over_from(SMALLEST_BYTES);
    Ok(Fs::open(media, &OpenOptions { engine, profile, ..OpenOptions::default() })?)
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
    let fs = Fs::open(media, &OpenOptions::default())?;
    let files = files(&fs);
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
fn load(fs: &Arc<Fs<Pool>>, seed: u64, threads: usize, sink: Sink) -> Result<()> {
    let files = files(fs);
    let models = Model::read_all(&files, threads)?;
    sink.send(OPENED)?;
    std::thread::scope(|scope| {
        for (thread, mut model) in models.into_iter().enumerate() {
            let (files, sink) = (&files, &sink);
            scope.spawn(move || {
                let mut draw = Draw::new(seed, thread);
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
