//! Process crashes: `acked load` is killed with SIGKILL, the pool opened here, and judged.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use lodestone::fs::format::SLOTS_PER_BLOCK;
use lodestone::media::Domain;
use lodestone::mover::EngineKind;

use crate::judge::Judge;
use crate::model::{DIRECTORIES, Entry, Model};
use crate::{OPENED, POOL_BYTES, Result, files, letter, make, open};

const THREADS: usize = 4;
/// In how many rounds the pool is then closed, and must be found clean.
const CLOSED_EVERY: u64 = 5;
/// In how many rounds death comes while the load still opens the pool.
const EARLY_EVERY: u64 = 8;

/// In each domain the CPU copies; and engines do whose copies are under way when the process dies.
const CAMPAIGNS: [(Option<Domain>, EngineKind); 5] = [
    (None, EngineKind::Cpu),
    (Some(Domain::Memory), EngineKind::Cpu),
    (Some(Domain::CpuCache), EngineKind::Cpu),
    (Some(Domain::Memory), EngineKind::Emu),
    (Some(Domain::CpuCache), EngineKind::EmuIoat),
];

/// `kills` kills, as many in each campaign.
pub fn run(dir: &Path, kills: u64, seed: u64) -> Result<()> {
    let mut total = Total::default();
    for (n, (assume, engine)) in CAMPAIGNS.into_iter().enumerate() {
        let pool = dir.join(format!("acked{n}.pool"));
        let rounds = (kills + n as u64) / CAMPAIGNS.len() as u64;
        let campaign = Campaign { pool: &pool, assume, engine, seed: seed * 1_000_000 + n as u64 * 100_000 };
        campaign.run(rounds, &mut total)?;
        std::fs::remove_file(&pool)?;
    }
    println!(
        "acked: {} kills ({} before the pool was open), {} operations acknowledged, {} interrupted ones had \
         happened, 0 violations",
        total.kills, total.early, total.acknowledged, total.happened
    );
    Ok(())
}

#[derive(Default)]
struct Total {
    kills: u64,
    early: u64,
    acknowledged: u64,
    happened: usize,
}

/// Blocks that what is never removed may have.
const STAYS_BLOCKS_MAX: u64 = 256;

struct Campaign<'a> {
    pool: &'a Path,
    assume: Option<Domain>,
    engine: EngineKind,
    seed: u64,
}

impl Campaign<'_> {
    fn run(&self, rounds: u64, total: &mut Total) -> Result<()> {
        make(self.pool, POOL_BYTES, self.assume)?;
        let free = self.free()?;
        let mut judge = Judge::new(THREADS);
        for round in 0..rounds {
            let seed = self.seed + round;
            let counts = self.kill_load(seed)?;
            total.kills += 1;
            total.early += u64::from(counts.is_none());
            let counts = counts.unwrap_or_else(|| vec![0; THREADS]);
            total.acknowledged += counts.iter().sum::<u64>();
            let found = self.found(round.is_multiple_of(CLOSED_EVERY))?;
            total.happened += judge.verdict(seed, &counts, &found).inspect_err(|_| {
                eprintln!("acked: the pool of the violation is {}", self.pool.display());
            })?;
        }
        self.empty()?;
        let left = self.free()?;
        // The directories and the shared file stay, with their logs and its data.
        if left + STAYS_BLOCKS_MAX < free {
            return Err(
                format!("{free} blocks were free at first, {left} after everything was removed").into()
            );
        }
        let report = open(self.pool, self.assume)?.check()?;
        if let Some(finding) = report.findings.first() {
            return Err(format!("the check finds {}: {finding}", report.findings.len()).into());
        }
        Ok(())
    }

    /// Starts the load, kills it; the operations it had acknowledged, by thread. None where it died before the
    /// pool was open.
    fn kill_load(&self, seed: u64) -> Result<Option<Vec<u64>>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("load").arg(self.pool).args([&seed.to_string(), &THREADS.to_string(), "-"]);
        if let Some(domain) = self.assume {
            command.args([domain.name(), self.engine.name()]);
        }
        command.stdout(Stdio::piped());
        let mut load = command.spawn()?;
        let mut pipe = load.stdout.take().expect("it is piped");
        // Other times in each round.
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let mut first = [0];
        if seed.is_multiple_of(EARLY_EVERY) {
            sleep(Duration::from_micros(random % 12_000));
        } else if pipe.read(&mut first)? == 0 {
            return Err(format!("seed {seed}: the load could not open the pool ({})", load.wait()?).into());
        }
        let reader = drain(pipe);
        if first[0] == OPENED {
            sleep(Duration::from_micros(random % 40_000));
        }
        end(&mut load, seed)?;
        let mut bytes = reader.join().expect("reading a pipe does not panic")?;
        if first[0] != OPENED {
            if bytes.first() != Some(&OPENED) {
                return Ok(None);
            }
            bytes.remove(0);
        }
        let count = |thread| bytes.iter().filter(|b| **b == letter(thread)).count() as u64;
        Ok(Some((0..THREADS).map(count).collect()))
    }

    /// What the pool holds now. It is left as a crash leaves it, or, where `close` says so, closed and found
    /// clean with the same content.
    fn found(&self, close: bool) -> Result<Vec<String>> {
        let fs = open(self.pool, self.assume)?;
        if fs.open_report().damaged != 0 {
            return Err(format!("damage after a kill: {:?}", fs.open_report()).into());
        }
        let lines = lines(&Model::read_all(&files(&fs), THREADS)?);
        if close {
            fs.close()?;
            drop(fs);
            let fs = open(self.pool, self.assume)?;
            if !fs.open_report().was_clean || lines != self::lines(&Model::read_all(&files(&fs), THREADS)?) {
                return Err("closed and opened again, the pool is not clean or not the same".into());
            }
            fs.abandon();
        } else {
            fs.abandon();
        }
        Ok(lines)
    }

    /// Blocks that are free or the inode table's, which never shrinks.
    fn free(&self) -> Result<u64> {
        let fs = open(self.pool, self.assume)?;
        let free = fs.statfs().inodes / SLOTS_PER_BLOCK as u64;
        fs.close()?;
        Ok(free)
    }

    /// Removes all that the threads made.
    fn empty(&self) -> Result<()> {
        let fs = open(self.pool, self.assume)?;
        let files = files(&fs);
        for model in Model::read_all(&files, THREADS)? {
            for (path, entry) in model.entries.iter().rev() {
                match entry {
                    Entry::Dir(_) => files.rmdir(path.as_bytes())?,
                    _ => files.unlink(path.as_bytes())?,
                }
            }
        }
        for dir in DIRECTORIES {
            files.rmdir(dir.as_bytes())?;
            files.mkdir(dir.as_bytes(), 0o755)?;
        }
        drop(files);
        Ok(fs.close()?)
    }
}

fn lines(models: &[Model]) -> Vec<String> {
    models.iter().enumerate().flat_map(|(thread, model)| model.lines(thread)).collect()
}

/// Reads until the writer is dead: what it wrote before stays in the pipe.
fn drain(mut pipe: impl Read + Send + 'static) -> JoinHandle<std::io::Result<Vec<u8>>> {
    spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes)?;
        Ok(bytes)
    })
}

/// SIGKILL. A load that ended by itself before failed.
fn end(load: &mut Child, seed: u64) -> Result<()> {
    if let Some(status) = load.try_wait()? {
        return Err(format!("seed {seed}: the load ended by itself: {status}").into());
    }
    load.kill()?;
    load.wait()?;
    Ok(())
}
