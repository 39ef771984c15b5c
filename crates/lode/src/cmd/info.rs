//! `lode info [POOL]`: what a pool is, what this machine can do for it, and what is missing.
//!
//! Nothing is changed, and nothing has to be right: a pool in use is described by what its file says, one
//! with a damaged superblock by the copy that is left. The pool is never opened as a file system, so that a
//! pool of any size is described at once.

use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::Path;

use lodestone::fs::format::{BLOCK, SUPER_BLOCK, SUPER_BYTES, Super, unpack_time};
use lodestone::fs::{DataMode, Fs, PoolInfo};
use lodestone::limits::POOL_BYTES_MIN;
use lodestone::media::{Description, Domain, Pool, PoolOptions, RegionDescription};
use lodestone::mover::EngineKind;
use lodestone::mover::identity::memory;
use lodestone::mover::profile_text::REMEDY;
use lodestone::quote::Quoted;
use serde::Serialize;

use super::ls::utc;
use crate::cli;
use crate::failure::{Failure, Output, Result, reason};
use crate::machine::Machine;
use crate::pool::{Access, about, map, uuid_text};
use crate::profile::{self, Found};
use crate::size::Size;
use crate::target::HostPath;

pub fn run(args: &cli::Info) -> Result<()> {
    let (pool, lies_in) = match args.pool.as_deref() {
        Some(pool) => describe(pool, args).map(|(about, memory)| (Some(about), memory))?,
        None => (None, None),
    };
    let found = profile::find(args.profile.as_deref(), lies_in.as_deref());
    let document = Document {
        version: env!("CARGO_PKG_VERSION"),
        pool,
        machine: Machine::probe(Path::new("/")),
        profile: ProfileFacts::of(&found),
        routines: Routines::chosen()?,
    };
    let mut out = Output::new();
    if args.json {
        out.json(&document)?;
    } else {
        document.print(&mut out)?;
    }
    out.finish()
}

#[derive(Serialize)]
struct Document {
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<About>,
    machine: Machine,
    profile: ProfileFacts,
    routines: Routines,
}

/// What engines are worth here: whose word is taken for it.
#[derive(Serialize)]
struct ProfileFacts {
    /// Null where there is none.
    path: Option<HostPath>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    used: bool,
    /// Why it is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// Of the one that is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engines: Option<Vec<&'static str>>,
    /// Copies at a time in front of a region: the profile's, or the default.
    concurrency: usize,
}

impl ProfileFacts {
    fn of(found: &Found) -> ProfileFacts {
        let concurrency = found.profile().concurrency;
        let (path, path_hex) = HostPath::of_some(match found {
            Found::Nothing => None,
            Found::Used(path, _) | Found::Elsewhere(path, _) | Found::Refused(path, _) => Some(path),
        });
        let none = ProfileFacts {
            path,
            path_hex,
            used: false,
            why: None,
            written: None,
            engines: None,
            concurrency,
        };
        match found {
            Found::Nothing => none,
            Found::Used(_, document) => ProfileFacts {
                used: true,
                written: Some(document.written.clone()),
                engines: Some(document.engines.iter().map(|kind| kind.name()).collect()),
                ..none
            },
            Found::Elsewhere(_, why) | Found::Refused(_, why) => {
                ProfileFacts { why: Some(why.clone()), ..none }
            }
        }
    }

    fn words(&self) -> String {
        match (&self.path, &self.why) {
            (None, _) => "none, so defaults; lode tune makes one".to_owned(),
            (Some(path), Some(why)) => format!("{path} is not used: {why}: {REMEDY}; defaults are used"),
            (Some(path), None) => {
                let emulated = |name: &str| name.parse().is_ok_and(EngineKind::emulated);
                let label = |name: &&str| match emulated(name) {
                    true => format!("{name} (emulated)"),
                    false => name.to_string(),
                };
                let engines: Vec<String> = self.engines.iter().flatten().map(label).collect();
                let (written, engines) = (self.written.as_deref().unwrap_or_default(), engines.join(", "));
                format!("{path}, of {written}, for {engines}; {} copies at a time", self.concurrency)
            }
        }
    }
}

/// How this process moves data on this processor.
#[derive(Serialize)]
struct Routines {
    copy: String,
    available: Vec<String>,
    write_back: &'static str,
    checksum: &'static str,
}

impl Routines {
    /// The same choice as for any pool; asked of one in memory, because there may be no other.
    fn chosen() -> Result<Routines> {
        let assume = Some(Domain::Memory);
        let options = PoolOptions { assume, ..PoolOptions::default() };
        let pool = Pool::memfd(POOL_BYTES_MIN, &options)
            .or_else(|_| Pool::memfd(POOL_BYTES_MIN, &PoolOptions::default()))?;
        let d = pool.describe();
        Ok(Routines {
            copy: d.isa.to_string(),
            available: d.isas.iter().map(|isa| isa.to_string()).collect(),
            write_back: d.write_back,
            checksum: d.crc,
        })
    }
}

#[derive(Serialize)]
struct About {
    path: HostPath,
    /// The exact path where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    label: String,
    uuid: String,
    bytes: u64,
    format_version: u32,
    data: &'static str,
    created: String,
    /// Not known of a pool in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<State>,
    /// Who uses it, as far as the kernel tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_use: Option<String>,
    /// What of it is damaged.
    damage: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    media: Option<MediaFacts>,
}

#[derive(Serialize)]
struct State {
    clean: bool,
    /// Closed, whether with a checkpoint or not.
    closed: bool,
    bad_blocks: u64,
    mounts: u32,
}

#[derive(Serialize)]
struct MediaFacts {
    domain: &'static str,
    detected: &'static str,
    emulated: bool,
    stripe_bytes: u64,
    regions: Vec<RegionFacts>,
}

#[derive(Serialize)]
struct RegionFacts {
    path: HostPath,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    kind: &'static str,
    host_fs: &'static str,
    bytes: u64,
    detected: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
}

/// A pool, and what its bytes lie in, where that can be told.
fn describe(pool: &OsStr, args: &cli::Info) -> Result<(About, Option<Vec<String>>)> {
    match map(Path::new(pool), Access::Read, args.assume.map(|a| a.domain())) {
        Ok((media, _)) => {
            let info = Fs::probe(&media).map_err(|e| about(pool, &e))?;
            let d = media.describe();
            Ok((
                About { media: Some(MediaFacts::of(&d)), ..About::of_info(pool, &info) },
                Some(memory(&d.regions)),
            ))
        }
        Err(e) if e.errno() == libc::EBUSY => in_use(pool, &e).map(|about| (about, None)),
        Err(e) => Err(e.into()),
    }
}

/// A pool that another process has locked, described by the first superblock of its file. That process may
/// change everything else while we read; the superblock is written by mkfs alone.
fn in_use(pool: &OsStr, busy: &lodestone::Error) -> Result<About> {
    let mut bytes = [0; SUPER_BYTES];
    let read =
        std::fs::File::open(pool).and_then(|f| f.read_exact_at(&mut bytes, SUPER_BLOCK * BLOCK as u64));
    let sb = read.ok().and_then(|()| Super::decode(&bytes).ok());
    // Nothing to add: a device that cannot be read as a file, or a pool being made right now.
    let Some(sb) = sb else { return Err(Failure::failed(reason(busy))) };
    let user = reason(busy);
    let user = user.split(" is in use by ").nth(1).and_then(|rest| rest.split(':').next()).unwrap_or(&user);
    Ok(About { in_use: Some(user.to_string()), ..About::of_superblock(pool, &sb) })
}

/// Which copy of the superblock is bad. One is enough to use the pool.
fn damage(info: &PoolInfo) -> Vec<String> {
    let last = info.bytes / BLOCK as u64 - 1;
    let copies =
        [("first", SUPER_BLOCK, info.first_copy_damaged), ("second", last, info.second_copy_damaged)];
    let damaged = copies.into_iter().filter(|(_, _, bad)| *bad);
    damaged.map(|(name, block, _)| format!("the {name} copy of the superblock (block {block})")).collect()
}

impl About {
    fn of_info(pool: &OsStr, info: &PoolInfo) -> About {
        let (path, path_hex) = HostPath::of(pool);
        About {
            path,
            path_hex,
            label: info.label.clone(),
            uuid: uuid_text(&info.uuid),
            bytes: info.bytes,
            format_version: info.format_version,
            data: mode_name(info.data),
            created: utc(info.created),
            state: Some(State {
                clean: info.clean,
                closed: info.closed,
                bad_blocks: info.bad_blocks,
                mounts: info.mounts,
            }),
            in_use: None,
            damage: damage(info),
            media: None,
        }
    }

    fn of_superblock(pool: &OsStr, sb: &Super) -> About {
        let (path, path_hex) = HostPath::of(pool);
        About {
            path,
            path_hex,
            label: sb.label.clone(),
            uuid: uuid_text(&sb.uuid),
            bytes: sb.blocks * BLOCK as u64,
            format_version: sb.version,
            data: mode_name(if sb.data_in_place { DataMode::InPlace } else { DataMode::Cow }),
            created: utc(unpack_time(sb.created)),
            state: None,
            in_use: None,
            damage: Vec::new(),
            media: None,
        }
    }

    fn print(&self, out: &mut Output) -> Result<()> {
        out.line(format_args!("pool        {}", self.path))?;
        if !self.label.is_empty() {
            out.line(format_args!("  label     {}", Quoted(self.label.as_bytes())))?;
        }
        out.line(format_args!("  uuid      {}", self.uuid))?;
        out.line(format_args!("  size      {}", Size(self.bytes)))?;
        out.line(format_args!("  format    version {}, data={}", self.format_version, self.data))?;
        out.line(format_args!("  created   {}", self.created))?;
        if let Some(user) = &self.in_use {
            out.line(format_args!("  state     in use by {user}"))?;
        }
        if let Some(state) = &self.state {
            let word = match (state.clean, state.closed) {
                (true, _) => "clean",
                (false, true) => "closed, too full for a checkpoint; the next use scans the logs",
                (false, false) => "not closed; the next use recovers it",
            };
            out.line(format_args!("  state     {word}"))?;
            if state.bad_blocks > 0 {
                let bad = state.bad_blocks;
                out.line(format_args!("  bad       {bad} blocks failed and are not used; see lode fsck"))?;
            }
        }
        for damage in &self.damage {
            out.line(format_args!("  damaged   {damage}; the other serves, the next change mends it"))?;
        }
        if let Some(media) = &self.media {
            media.print(out)?;
        }
        out.line("")
    }
}

impl MediaFacts {
    fn of(d: &Description) -> MediaFacts {
        MediaFacts {
            domain: d.domain.name(),
            detected: d.detected.name(),
            emulated: d.emulated,
            stripe_bytes: d.stripe_bytes,
            regions: d.regions.iter().map(RegionFacts::of).collect(),
        }
    }

    fn print(&self, out: &mut Output) -> Result<()> {
        let assumed = match (self.emulated, self.domain == self.detected) {
            (true, _) => format!(" (assumed; detected {}): emulated PM", self.detected),
            (false, false) => format!(" (assumed; detected {})", self.detected),
            (false, true) => String::new(),
        };
        out.line(format_args!("  domain    {}{assumed}", self.domain))?;
        out.line(format_args!("            {}", meaning(self.domain)))?;
        for r in &self.regions {
            let host = if r.host_fs == "none" { String::new() } else { format!(" on {}", r.host_fs) };
            let node = r.numa_node.map_or(String::new(), |n| format!(", node {n}"));
            out.line(format_args!("  region    {}, {}{host}{node}: {}", Size(r.bytes), r.kind, r.path))?;
        }
        if self.regions.len() > 1 {
            out.line(format_args!("  stripe    {}", Size(self.stripe_bytes)))?;
        }
        Ok(())
    }
}

impl RegionFacts {
    fn of(r: &RegionDescription) -> RegionFacts {
        let (path, path_hex) = HostPath::of(&r.path);
        RegionFacts {
            path,
            path_hex,
            kind: r.kind.name(),
            host_fs: r.host_fs,
            bytes: r.bytes,
            detected: r.detected.name(),
            numa_node: r.numa_node,
        }
    }
}

impl Document {
    fn print(&self, out: &mut Output) -> Result<()> {
        if let Some(pool) = &self.pool {
            pool.print(out)?;
        }
        let m = &self.machine;
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let (cpus, nodes) = (plural(m.cpus), plural(m.numa_nodes));
        out.line(format_args!(
            "machine     {}, {} CPU{cpus}, {} NUMA node{nodes}",
            m.cpu, m.cpus, m.numa_nodes
        ))?;
        out.line(format_args!("  kernel    {}", m.kernel))?;
        out.line(format_args!("  cpu has   {}", m.instructions.join(" ")))?;
        let r = &self.routines;
        out.line(format_args!("  copies by {} (of {})", r.copy, r.available.join(", ")))?;
        out.line(format_args!("            write-back {}, checksums {}", r.write_back, r.checksum))?;
        out.line(format_args!("  profile   {}", self.profile.words()))?;
        for f in m.facilities.iter().filter(|f| f.found) {
            out.line(format_args!("  found     {}: {}", f.name, f.detail))?;
        }
        for f in m.facilities.iter().filter(|f| !f.found) {
            let remedy = f.remedy.as_ref().map_or(String::new(), |r| format!("; {r}"));
            out.line(format_args!("  missing   {}: {}{remedy}", f.name, f.detail))?;
        }
        for queue in &m.dsa_queues {
            let word = if queue.usable { "usable" } else { "unusable" };
            let node = queue.numa_node.map_or(String::new(), |node| format!(", node {node}"));
            let remedy = queue.remedy.as_ref().map_or(String::new(), |remedy| format!("; {remedy}"));
            out.line(format_args!("  {word:<8}  {}{node}: {}{remedy}", queue.name, queue.detail))?;
        }
        Ok(())
    }
}

/// What a persistence domain promises.
fn meaning(domain: &str) -> &'static str {
    match domain {
        "cpu-cache" => "a store survives power loss after a fence",
        "memory" => "a store survives power loss after flush and fence",
        "page-cache" => "a store survives the process at once, power loss after fsync",
        _ => "a store survives the process, never power loss",
    }
}

fn mode_name(mode: DataMode) -> &'static str {
    match mode {
        DataMode::Cow => "cow",
        DataMode::InPlace => "inplace",
    }
}
