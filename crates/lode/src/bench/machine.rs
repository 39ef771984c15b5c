//! On what a result was measured: without this a number is an anecdote.

use std::fs;

use lodestone::media::{Media, Pool};
use lodestone::{Error, Result};
use serde::Serialize;

use super::clock::Clock;

#[derive(Serialize, Clone, Debug)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
    /// Persistence domain the first pool ran in.
    pub domain: String,
    /// The domain of a pool was assumed, its memory is not persistent: *emulated PM*. Of which, its rows say.
    pub emulated: bool,
    /// One line for people: domain and emulation of the first pool in words.
    pub media: String,
    /// Lines about pools in other memory than that.
    #[serde(skip)]
    pub other_media: Vec<String>,
    /// Instructions that decide how stores and flushes are done, of those this processor has.
    pub isa: Vec<&'static str>,
    /// Where pool and tmpfs files lay.
    pub place: String,
    /// What said which engines pay; none: the defaults.
    pub profile: Option<String>,
    /// What the peer `ext4` stood on, where it ran.
    pub ext4: Option<String>,
    pub timer: &'static str,
    /// Cost of the time stamp in every latency, not subtracted.
    pub timer_ns: f64,
    /// 1-minute load average when the run began: other work on the machine shows here.
    pub load_before: f64,
    pub load_after: f64,
    pub rounds: usize,
    pub slice_ms: f64,
    pub pool_bytes: u64,
    pub file_bytes: u64,
    pub names_per_directory: usize,
}

/// What a pool says of the memory that it lies in.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    pub domain: &'static str,
    /// The domain was assumed, the memory is not persistent: *emulated PM*.
    pub emulated: bool,
    /// One line for people: domain and emulation in words.
    pub media: String,
}

impl Memory {
    fn of(pool: &Pool) -> Memory {
        let says = pool.describe();
        let (domain, host) = (says.domain, says.regions[0].host_fs);
        let media = match says.emulated {
            true if domain.is_persistent_memory() => {
                format!("emulated PM: domain {domain} assumed on {host}")
            }
            true => format!("emulated: domain {domain} assumed on {host}"),
            false => format!("domain {domain} on {host}"),
        };
        Memory { domain: pool.domain().name(), emulated: says.emulated, media }
    }
}

const ISA: &[&str] = &["sse2", "sse4_2", "avx2", "avx512f", "vpclmulqdq", "clflushopt", "clwb", "movdir64b"];

impl Machine {
    /// Everything that does not depend on the run.
    pub fn here() -> Machine {
        let clock = Clock::get();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |key: &str| {
            let line = cpuinfo.lines().find(|l| l.starts_with(key));
            line.and_then(|l| l.split_once(':')).map_or("", |(_, v)| v.trim()).to_string()
        };
        let flags = field("flags");
        let has = |name: &&&str| flags.split(' ').any(|f| f == **name);
        Machine {
            cpu: field("model name"),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory_gib: memory_bytes() as f64 / (1u64 << 30) as f64,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            domain: String::new(),
            emulated: false,
            media: String::new(),
            other_media: Vec::new(),
            isa: ISA.iter().filter(has).copied().collect(),
            place: String::new(),
            profile: None,
            ext4: None,
            timer: clock.source(),
            timer_ns: clock.stamp_ns,
            load_before: load(),
            load_after: 0.0,
            rounds: 0,
            slice_ms: 0.0,
            pool_bytes: 0,
            file_bytes: 0,
            names_per_directory: 0,
        }
    }

    /// For people, behind where the files are.
    pub fn profile_note(&self) -> String {
        self.profile.as_ref().map_or_else(String::new, |file| format!("; engines by {file}"))
    }

    /// What a pool under measure says of its memory. It goes into each of its rows; that of the first pool stands at the
    /// head, and that of others in a line of its own where it is another.
    pub fn memory_of(&mut self, whose: &str, pool: &Pool) -> Memory {
        let memory = Memory::of(pool);
        self.note(whose, &memory);
        memory
    }

    fn note(&mut self, whose: &str, memory: &Memory) {
        self.emulated |= memory.emulated;
        if self.media.is_empty() {
            (self.domain, self.media) = (memory.domain.to_string(), memory.media.clone());
        } else if self.media != memory.media {
            let line = format!("{whose}: {}", memory.media);
            if !self.other_media.contains(&line) {
                self.other_media.push(line);
            }
        }
    }
}

pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|l| l.parse().ok()).unwrap_or(0.0)
}

pub fn memory_available_bytes() -> u64 {
    kib_of("/proc/meminfo", "MemAvailable:").unwrap_or(0) * 1024
}

/// Refuses what takes more memory than is free.
pub fn check_memory(what: &str, need: u64) -> Result<()> {
    let free = memory_available_bytes();
    if need <= free {
        return Ok(());
    }
    let message = format!("{what} needs {} MiB of memory, {} MiB are free", need >> 20, free >> 20);
    Err(Error::message(libc::ENOMEM, "bench::machine", message))
}

fn memory_bytes() -> u64 {
    kib_of("/proc/meminfo", "MemTotal:").unwrap_or(0) * 1024
}

/// Anonymous resident memory of this process: what DRAM it uses, mapped pools not counted.
pub fn resident_anonymous_bytes() -> Option<u64> {
    kib_of("/proc/self/status", "RssAnon:").map(|kib| kib * 1024)
}

/// Memory that the kernel uses for this process's page tables.
pub fn table_bytes() -> Option<u64> {
    kib_of("/proc/self/status", "VmPTE:").map(|kib| kib * 1024)
}

/// The number in a `key:   123 kB` line.
fn kib_of(file: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pool_stands_at_the_head_and_others_beside_it() {
        let real = Memory { domain: "memory", emulated: false, media: "domain memory on ext4".into() };
        let emulated = Memory { domain: "memory", emulated: true, media: "emulated PM".into() };
        let mut machine = Machine::here();
        machine.note("lode", &real);
        machine.note("limit", &real);
        assert!(!machine.emulated && machine.other_media.is_empty(), "{machine:?}");
        machine.note("million", &emulated);
        machine.note("million", &emulated);
        machine.note("apps", &real);
        assert!(machine.emulated, "what any row stands on");
        assert_eq!((machine.domain.as_str(), machine.media.as_str()), ("memory", "domain memory on ext4"));
        assert_eq!(machine.other_media, ["million: emulated PM"]);
    }

    #[test]
    fn what_does_not_fit_the_memory_is_refused_in_words() {
        assert!(check_memory("nothing", 0).is_ok());
        let error = check_memory("all of it", u64::MAX).unwrap_err();
        assert_eq!(error.errno(), libc::ENOMEM);
        assert!(error.to_string().starts_with("all of it needs "), "{error}");
    }
}
