//! `lode wsp list` and `status`: what guests are, what they survive, and how long that takes.

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::time::Duration;

use lodestone::media::{Domain, Media, RegionKind};
use lodestone::wsp::{Ram, Record, State};
use serde::Serialize;

use super::guest::{Guest, slot_path, with_ram};
use super::place::{Config, Guests, Place};
use super::report::{Dirty, Entry, Summary, by_media, draw, summarize};
use crate::cli::wsp::{WspList, WspStatus};
use crate::failure::{Output, Result};
use crate::outfile;
use crate::size::Size;
use crate::target::show;

/// To count what is dirty takes so long at most.
const COUNT_MAX: Duration = Duration::from_millis(100);

#[derive(Serialize, Debug)]
struct Status {
    name: String,
    state: &'static str,
    /// The state in a sentence, with what to do.
    note: String,
    generation: Option<u64>,
    ram_bytes: u64,
    ram: String,
    slots: String,
    accelerator: String,
    domain: Option<&'static str>,
    survives: Option<&'static str>,
    priority: i32,
    failed_resumes: u32,
    /// Disks whose changes nobody notices.
    devices: Vec<String>,
    clone_of: Option<String>,
    /// How long there must be energy: the median and the worst of all suspends.
    energy_window_us: Option<(f64, f64)>,
    /// What would have to be written back now, if power failed; none where nobody can say.
    dirty: Option<Vec<Dirty>>,
    suspends: Option<Summary>,
    resumes: Option<Summary>,
}

pub fn list(guests: &Guests, args: &WspList) -> Result<()> {
    let all: Vec<Status> = guests.all()?.iter().map(|place| Status::of(place).0).collect();
    let mut out = Output::new();
    if args.json {
        out.json(&serde_json::json!({ "guests": all }))?;
        return out.finish();
    }
    if all.is_empty() {
        out.line(format_args!("no guests in {}", show(guests.dir())))?;
        return out.finish();
    }
    let width = all.iter().map(|status| status.name.len()).max().unwrap_or(0).max(4);
    out.line(format_args!(
        "{:width$}  {:9}  {:>9}  {:>10}  {:>9}  {:>10}  {}",
        "name", "state", "memory", "generation", "energy", "dirty", "survives"
    ))?;
    for s in &all {
        let generation = s.generation.map_or("-".into(), |g| g.to_string());
        let energy = s.energy_window_us.map_or("-".into(), |(_, worst)| format!("{:.1} ms", worst / 1e3));
        let dirty = s.suspends.as_ref().and_then(|suspends| suspends.dirty_bytes);
        let dirty = dirty.map_or("-".into(), |(_, most)| Size(most).to_string());
        out.line(format_args!(
            "{:width$}  {:9}  {:>9}  {generation:>10}  {energy:>9}  {dirty:>10}  {}",
            s.name,
            s.state,
            Size(s.ram_bytes).to_string(),
            s.survives.unwrap_or("-")
        ))?;
    }
    out.finish()
}

pub fn status(guests: &Guests, args: &WspStatus) -> Result<()> {
    let mut out = Output::new();
    let Some(name) = &args.name else {
        let all: Vec<Status> = guests.all()?.iter().map(|place| Status::of(place).0).collect();
        match args.json {
            true => out.json(&serde_json::json!({ "guests": all }))?,
            false => all.iter().try_for_each(|status| tell(&mut out, status))?,
        }
        return out.finish();
    };
    let (status, entries) = Status::of(&guests.known(name)?);
    if let Some(path) = &args.svg {
        outfile::write(path, "the picture", draw(name, &entries))?;
    }
    match args.json {
        true => out.json(&status)?,
        false => tell(&mut out, &status)?,
    }
    out.finish()
}

fn tell(out: &mut Output, status: &Status) -> Result<()> {
    out.line(format_args!("{}: {}", status.name, status.note))?;
    out.line(format_args!("  memory    {} in {}", Size(status.ram_bytes), status.ram))?;
    out.line(format_args!("  slots     {}", status.slots))?;
    out.line(format_args!("  runs by   {}", status.accelerator))?;
    if let (Some(domain), Some(survives)) = (status.domain, status.survives) {
        out.line(format_args!("  survives  {survives} (domain {domain})"))?;
    }
    for device in &status.devices {
        out.line(format_args!("  disk      {device}: a device, so writes to it by others while the guest is suspended are not noticed"))?;
    }
    if let Some((median, worst)) = status.energy_window_us {
        out.line(format_args!(
            "  energy    {:.1} ms at the median, {:.1} ms at worst",
            median / 1e3,
            worst / 1e3
        ))?;
    }
    if let Some(dirty) = &status.dirty {
        let dirty = match by_media(dirty) {
            nothing if nothing.is_empty() => "nothing".into(),
            some => some,
        };
        out.line(format_args!("  dirty     {dirty}, now"))?;
    }
    for summary in [&status.suspends, &status.resumes].into_iter().flatten() {
        let phases: Vec<String> =
            summary.phases.iter().map(|p| format!("{} {:.1}", p.name, p.us / 1e3)).collect();
        out.line(format_args!(
            "  {:8}  {} times, median {:.1} ms ({}), worst {:.1} ms",
            summary.what,
            summary.count,
            summary.median_us / 1e3,
            phases.join(", "),
            summary.worst_us / 1e3
        ))?;
        if let Some((median, most)) = summary.dirty_bytes {
            out.line(format_args!(
                "            written back {} at the median, {} at most",
                Size(median),
                Size(most)
            ))?;
        }
    }
    Ok(())
}

impl Status {
    fn of(place: &Place) -> (Status, Vec<Entry>) {
        let entries: Vec<Entry> =
            place.history().into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect();
        let suspends = summarize(&entries, "suspend");
        let mut status = Status {
            name: place.name.clone(),
            state: "unknown",
            note: String::new(),
            generation: None,
            ram_bytes: 0,
            ram: String::new(),
            slots: String::new(),
            accelerator: String::new(),
            domain: None,
            survives: None,
            priority: 0,
            failed_resumes: 0,
            devices: Vec::new(),
            clone_of: None,
            energy_window_us: suspends.as_ref().map(|s| (s.median_us, s.worst_us)),
            dirty: None,
            suspends,
            resumes: summarize(&entries, "resume"),
        };
        match place.config() {
            Ok(config) => status.describe(place, config),
            Err(failure) => status.note = super::suspend::words(failure),
        }
        (status, entries)
    }

    fn describe(&mut self, place: &Place, config: Config) {
        let alive = place.is_alive();
        (self.ram, self.slots) = (config.memory(), show(&config.slots).to_string());
        (self.ram_bytes, self.priority, self.failed_resumes) =
            (config.ram_bytes, config.priority, config.failed);
        let is_device =
            |disk: &&PathBuf| std::fs::metadata(disk).is_ok_and(|about| about.file_type().is_block_device());
        self.devices = config.disks.iter().filter(is_device).map(|disk| show(disk).to_string()).collect();
        let (mut domain, mut kind) = (None, None);
        let record = with_ram(place, &config, |media| {
            (domain, kind) = (Some(media.domain()), media.kind());
            Ram::new(media, config.ram_bytes)?.record()
        });
        let record = record.map_err(|e| e.to_string());
        if let Some(domain) = domain {
            self.domain = Some(domain.name());
            self.survives = Some(survives(domain, config.assume.is_some()));
        }
        if let Ok(Some(record)) = &record {
            self.generation = Some(record.generation);
        }
        (self.state, self.note) = state(&config, alive, record);
        if self.state == "running" && stands(place, &config) {
            let note =
                "stands, for whoever suspended or resumed it was killed: lode wsp resume lets it go on";
            (self.state, self.note) = ("standing", note.into());
        }
        if self.state == "running" {
            self.dirty = domain.map(|domain| dirty_now(place, &config, domain, kind));
        }
        self.accelerator = config.accel;
        self.clone_of = config.clone_of;
    }
}

/// What a suspend would have to write back now.
fn dirty_now(place: &Place, config: &Config, domain: Domain, kind: Option<RegionKind>) -> Vec<Dirty> {
    let lines = || {
        let lines = super::touched::touched(place.emulator()?, config).ok()?;
        let bytes = lines.iter().map(|(_, bytes)| *bytes as u64).sum();
        Some(Dirty::of_pages(config, kind, bytes))
    };
    let memory = match domain {
        Domain::PageCache => Dirty::of("memory", &config.ram, config.part(), COUNT_MAX),
        Domain::Memory => lines(),
        Domain::Volatile | Domain::CpuCache => None,
    };
    let disks = config.disks.iter().map(|disk| Dirty::of("disk", disk, None, COUNT_MAX));
    std::iter::once(memory).chain(disks).flatten().collect()
}

/// Whether the guest of an emulator that lives does not run. Not asked while somebody works on it.
pub fn stands(place: &Place, config: &Config) -> bool {
    let lock = place.lock_if_free();
    let runs = lock.and_then(|_lock| Guest::running(config, place).ok()?.runs().ok());
    runs == Some(false)
}

fn state(
    config: &Config,
    alive: bool,
    record: std::result::Result<Option<Record>, String>,
) -> (&'static str, String) {
    if let Some(original) = &config.clone_of {
        return match alive {
            true => ("clone", format!("a clone of {original}, which runs; it ends with its memory")),
            false => ("ended", format!("a clone of {original}, which has ended")),
        };
    }
    match (alive, record) {
        (true, Ok(Some(record))) if record.state == State::Suspended => (
            "suspended",
            "suspended, but its emulator did not end: lode wsp resume ends it, and lets the guest go on"
                .into(),
        ),
        (true, _) => ("running", "runs".into()),
        (false, Err(why)) => ("unknown", why),
        (false, Ok(None)) => {
            ("unknown", "its memory has no record that verifies: lode wsp start boots it".into())
        }
        (false, Ok(Some(record))) => match record.state {
            State::Suspended if !slot_path(config, record.generation).exists() => {
                let message =
                    format!("suspended, but the slot of generation {} is missing", record.generation);
                (
                    "lost",
                    message + ": put it back; lode wsp start --fresh boots the guest, and its image is lost",
                )
            }
            State::Suspended => ("suspended", format!("suspended, generation {}", record.generation)),
            State::Running => ("off", "ended without being suspended: lode wsp start boots it".into()),
            State::Consumed => {
                let message = format!(
                    "ended after it was resumed from generation {}, whose image is consumed",
                    record.generation
                );
                ("off", message + ": lode wsp start boots it")
            }
        },
    }
}

/// What a suspended guest survives, by the domain of its memory.
fn survives(domain: Domain, assumed: bool) -> &'static str {
    match (domain, assumed) {
        (Domain::CpuCache | Domain::Memory, false) => "power loss",
        (Domain::CpuCache | Domain::Memory, true) => "what the media survives (its domain is assumed)",
        (Domain::PageCache, _) => "power loss, once memory is written to its disk: see the energy window",
        (Domain::Volatile, _) => "the end of the emulator, not a power loss",
    }
}
