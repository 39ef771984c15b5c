//! A guest in QEMU, as the steps of `lodestone::wsp` want it.
//!
//! Memory is never in the stream (`x-ignore-shared`), and the stream goes to a file that is open here (`fd:`): of a program
//! at the other end of a pipe QEMU would not notice that it failed.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use lodestone::error::{Error, Result};
use lodestone::media::{Addr, Domain, Part, Span, SpanOptions};
use lodestone::quote::Shown;
use lodestone::wsp::image::{RECORD_STRIDE_BYTES, RECORDS, SEAL_BYTES};
use lodestone::wsp::{Machine, Phase, Ram, Record, Saved, Seal, record};
use rustix::fs::FlockOperation;
use serde_json::json;

use super::emulator::{self, Mode, command_line};
use super::identity::{self, Emulator, Identity};
use super::place::{Config, Place, image_number, remove_if_there};
use super::qmp::Qmp;
use crate::cli::wsp::RAM_BYTES_UNIT;
use crate::failure;

const SITE: &str = "wsp::guest";
/// A slot is made before it is needed, so that nothing has to be found for it when power fails. A state that is longer makes it
/// longer.
const SLOT_BYTES: usize = SEAL_BYTES + (1 << 20);
/// What an emulator has left to do when it has said that a state was not moved, or was told to leave off.
const FINISH_WAIT_MAX: Duration = Duration::from_secs(5);
const FINISH_PAUSE: Duration = Duration::from_millis(1);
/// The first QEMU that has a mode of moving a state.
const MODE_SINCE: (u64, u64) = (8, 2);
/// A user of memory that is about to end.
const USER_WAIT_MAX: Duration = Duration::from_secs(1);
const USER_PAUSE: Duration = Duration::from_millis(1);
/// The emulator gives its memory back before it is gone.
const END_WAIT_MAX: Duration = Duration::from_secs(10);

/// The memory of a guest, with the record behind it.
pub fn open_ram(config: &Config) -> Result<Span> {
    // The guest's first page may look like anything, a pool's too.
    open_as(config, &SpanOptions { force: true, ..assumed(config)? })
}

/// As [`open_ram`], for those who store nothing to it; several may have it so.
pub fn open_ram_to_read(config: &Config) -> Result<Span> {
    open_as(config, &SpanOptions { read_only: true, ..assumed(config)? })
}

fn open_as(config: &Config, options: &SpanOptions) -> Result<Span> {
    let (Some(place), Some(part)) = (config.fixed(), config.part()) else {
        return Span::open(&config.ram, options);
    };
    let span = Span::open_part(&config.ram, part, options)?;
    place.check(&span).map_err(|e| e.context(config.memory()))?;
    Ok(span)
}

/// Looks at memory, beside whoever else looks. Of a device the kernel maps nothing that is only read: whoever looks at that has
/// it alone for a moment, and not while somebody works on the guest (EBUSY), who might need it in that moment.
pub fn with_ram<T>(place: &Place, config: &Config, look: impl FnOnce(&Span) -> Result<T>) -> Result<T> {
    match open_ram_to_read(config) {
        Err(e) if e.errno() == libc::EOPNOTSUPP => {
            let busy = || Error::message(libc::EBUSY, SITE, "another command works on the guest just now");
            let _lock = place.lock_if_free().ok_or_else(busy)?;
            look(&open_ram(config)?)
        }
        media => look(&media?),
    }
}

/// The record of a guest's memory. None where nothing could be resumed from it: it is gone, was cut short, has become others', or
/// has no record that verifies. After any other error nobody knows, and whoever would remove it asks.
pub fn record_there(config: &Config) -> Result<Option<Record>> {
    let is_gone = |e: &Error| match e.errno() {
        libc::ENOENT => true,
        // So says the pool of a part that is no longer the guest's.
        libc::ESTALE => config.pooled.is_some(),
        _ => false,
    };
    let end =
        config.ram_offset.saturating_add(config.ram_bytes).saturating_add(RECORDS * RECORD_STRIDE_BYTES);
    match std::fs::metadata(&config.ram) {
        Ok(about) if about.is_file() && about.len() < end => return Ok(None),
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(e, SITE, "cannot examine", &config.ram)),
    }
    match open_ram(config) {
        Ok(media) => Ram::new(&media, config.ram_bytes)?.record(),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The record of another guest, where the memory at this one's path has become that one's: it was started there with `--fresh`. None
/// where it is the guest's own, or nothing tells whose.
pub fn others_record(config: &Config) -> Result<Option<Record>> {
    let is_short = |about: std::fs::Metadata| about.is_file() && about.len() < RAM_BYTES_UNIT;
    // Of a part the pool says whose it is.
    if config.pooled.is_some() || std::fs::metadata(&config.ram).map_or(true, is_short) {
        return Ok(None);
    }
    let media = open_ram(config)?;
    let is_own =
        |record: &Record| config.image.as_ref().is_none_or(|image| *image == image_number(record.image));
    let own = Ram::new(&media, config.ram_bytes).and_then(|ram| ram.record());
    match own.is_ok_and(|record| record.is_some_and(|record| is_own(&record))) {
        true => Ok(None),
        false => record::of_any_size(&media, RAM_BYTES_UNIT),
    }
}

/// Leaves nothing by which a guest could be resumed that had its memory here, of whatever size: the record behind that may lie where
/// nobody stores to.
pub fn forget_others(config: &Config) -> Result<()> {
    let is_file = match std::fs::metadata(&config.ram) {
        Ok(about) if about.is_file() && about.len() == 0 => return Ok(()),
        Ok(about) => about.is_file(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(e, SITE, "cannot examine", &config.ram)),
    };
    // As long as it is open nobody else opens it, and a guest that is being resumed there has said so.
    let media = open_ram(config)?;
    refuse_used(config)?;
    if !is_file {
        return record::forget_of_any_size(&media, RAM_BYTES_UNIT).map(drop);
    }
    let cut = File::options().write(true).open(&config.ram).and_then(|file| {
        file.set_len(0)?;
        file.sync_all()
    });
    cut.map_err(|e| Error::io(e, SITE, "cannot empty", &config.ram))
}

/// Opens memory that nobody uses, and says that somebody is about to. In a pool that comes first: opening looks whether the part is
/// still the guest's, and from there on it cannot be given to others.
pub fn open_to_use(config: &Config, open: impl FnOnce() -> Result<Span>) -> Result<(Span, Option<OwnedFd>)> {
    if config.pooled.is_some() {
        let used = use_ram(config)?;
        return Ok((open()?, used));
    }
    let media = open()?;
    refuse_used(config)?;
    Ok((media, use_ram(config)?))
}

/// Says that somebody is about to use memory, as long as this is open anywhere. In a pool before memory is opened, which looks
/// whether it is still the guest's: from here on it cannot be given to others. None where a file system has no such locks.
pub fn use_ram(config: &Config) -> Result<Option<OwnedFd>> {
    match config.part() {
        Some(part) => Span::use_part(&config.ram, part).map(Some),
        None => Ok(Span::use_part(&config.ram, all_of(config)).ok()),
    }
}

/// EBUSY where somebody's guest is in memory that is in no pool; a pool looks for itself.
pub fn refuse_used(config: &Config) -> Result<()> {
    if config.pooled.is_some() || !config.ram.exists() {
        return Ok(());
    }
    let begun = Instant::now();
    // Who cannot look is told by what comes after.
    while Span::is_part_used(&config.ram, all_of(config)).unwrap_or(false) {
        if begun.elapsed() > USER_WAIT_MAX {
            let message = format!("a guest runs in {}: stop that first", config.memory());
            return Err(Error::message(libc::EBUSY, SITE, message));
        }
        // An emulator that was killed has not let go of all at once.
        std::thread::sleep(USER_PAUSE);
    }
    Ok(())
}

fn all_of(config: &Config) -> Part {
    Part { offset: config.ram_offset, bytes: config.ram_bytes + config.trailer_bytes }
}

/// Memory that is made, where it is a file; all of it is taken from the host now, or was from its pool. Over a pool only by
/// `force`.
pub fn make_ram(config: &Config, force: bool) -> Result<Span> {
    if config.pooled.is_some() {
        return open_ram(config);
    }
    let size = Some(config.ram_bytes + config.trailer_bytes);
    Span::open(&config.ram, &SpanOptions { size, force, ..assumed(config)? })
}

fn assumed(config: &Config) -> Result<SpanOptions> {
    let assume = config.assume.as_deref().map(|name| name.parse::<Domain>());
    let assume = assume.transpose().map_err(|e| Error::message(libc::EINVAL, SITE, e))?;
    Ok(SpanOptions { assume, ..SpanOptions::default() })
}

pub fn slot_path(config: &Config, generation: u64) -> PathBuf {
    config.slots.join(format!("slot.{generation}"))
}

/// The slot of a generation, as it is.
pub fn open_slot(config: &Config, generation: u64) -> Result<Span> {
    let path = slot_path(config, generation);
    if !path.exists() {
        let message = format!(
            "the slot {} is missing, with the state of the guest's devices: put it back",
            path.shown()
        );
        return Err(Error::message(libc::ENOENT, SITE, message));
    }
    // Of no bytes there is no media.
    if std::fs::metadata(&path).is_ok_and(|about| about.len() == 0) {
        let message =
            format!("the slot of generation {generation} is damaged (it is empty): put back what it was");
        return Err(Error::message(libc::EILSEQ, SITE, message));
    }
    open_slot_at(config, &path)
}

fn open_slot_at(config: &Config, path: &Path) -> Result<Span> {
    let assume = config.assume.as_deref().and_then(|name| name.parse::<Domain>().ok());
    let options = SpanOptions { assume, force: true, ..SpanOptions::default() };
    // A slot may lie where its memory does not, and there nothing is assumed.
    Span::open(path, &options).or_else(|e| match assume {
        Some(_) => Span::open(path, &SpanOptions { assume: None, ..options }),
        None => Err(e),
    })
}

/// Makes the slot of a generation: long enough, with its blocks, durable.
pub fn make_slot(config: &Config, generation: u64) -> Result<()> {
    let path = slot_path(config, generation);
    let made = (|| {
        remove_if_there(&path)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&vec![0; SLOT_BYTES])?;
        file.sync_all()?;
        File::open(&config.slots)?.sync_all()
    })();
    made.map_err(|e| Error::io(e, SITE, "cannot make the slot", &path).context("make room there"))
}

/// What [`Machine`] is told of a guest.
pub struct Guest<'a> {
    config: &'a Config,
    place: &'a Place,
    mode: Mode,
    /// By [`use_ram`].
    used: Option<OwnedFd>,
    qmp: Option<Qmp>,
    child: Option<Child>,
    /// The emulator loaded a state, and was told nothing since.
    has_loaded: bool,
    watch: Option<&'a (dyn Fn(Phase) + Sync)>,
    /// Bytes of memory that [`touched`](Machine::touched) named; all where it could not.
    pub touched_bytes: Option<u64>,
}

impl<'a> Guest<'a> {
    /// One that is to be started, on memory that is used.
    pub fn new(config: &'a Config, place: &'a Place, mode: Mode, used: Option<OwnedFd>) -> Guest<'a> {
        let (qmp, child, watch, touched_bytes) = (None, None, None, None);
        Guest { config, place, mode, used, qmp, child, has_loaded: false, watch, touched_bytes }
    }

    /// One that runs.
    pub fn running(config: &'a Config, place: &'a Place) -> Result<Guest<'a>> {
        let mut guest = Guest::new(config, place, Mode::Boot, None);
        let stream = place.connect("qmp");
        let stream =
            stream.map_err(|e| Error::io(e, SITE, "cannot reach the emulator at", &place.dir.join("qmp")))?;
        guest.qmp = Some(Qmp::begin(stream)?);
        Ok(guest)
    }

    /// Has each phase of a suspend told.
    pub fn watched_by(&mut self, watch: &'a (dyn Fn(Phase) + Sync)) {
        self.watch = Some(watch);
    }

    /// Whether the guest of a running emulator runs, too. It stands where whoever suspended it was killed.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.state()? == "running")
    }

    /// ESTALE where the emulator maps something else than the memory that stands at its path: that was moved or replaced while
    /// the guest ran, and a record there would speak of what the guest never stored to. Who cannot look believes it.
    pub fn maps_its_ram(&self) -> Result<()> {
        let looked = self.place.emulator().map(|process| super::touched::maps_ram(process, self.config));
        if !matches!(looked, Some(Ok(Some(false)))) {
            return Ok(());
        }
        let message = format!(
            "its emulator has other memory than {}, which was moved or replaced while the guest ran: put the former back",
            self.config.memory()
        );
        Err(Error::message(libc::ESTALE, SITE, message))
    }

    /// In the emulator's words.
    fn state(&mut self) -> Result<String> {
        let status = self.qmp()?.run("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_string())
    }

    /// Starts the emulator and waits until it listens. The guest does not run yet.
    pub fn spawn(&mut self) -> Result<&mut Qmp> {
        let spawned = emulator::spawn(self.config, self.place, self.mode);
        let spawned = spawned.map_err(|failure| Error::message(libc::EIO, SITE, words(&failure)))?;
        let number = spawned.id();
        self.child = Some(spawned);
        // One that nobody knows of would be left behind.
        self.place.note_process(number).inspect_err(|_| self.end())?;
        let stream = self.place.connect("qmp");
        let qmp = stream.map_err(|e| Error::io(e, SITE, "cannot reach the emulator of", &self.place.dir));
        match qmp.and_then(Qmp::begin).and_then(|qmp| self.uses_ram(qmp)) {
            Ok(qmp) => Ok(self.qmp.insert(qmp)),
            Err(e) => Err(self.did_not_start(e)),
        }
    }

    /// Ends the emulator, with what it said of itself: some fail when they have been greeted.
    pub fn did_not_start(&mut self, e: Error) -> Error {
        self.end();
        let said = self.place.last_words();
        let said = if said.is_empty() { String::new() } else { format!(" (it says: {said})") };
        e.context(format_args!("{} did not start{said}", self.config.qemu.shown()))
    }

    /// Has the emulator say, as long as it lives, that it uses its memory.
    fn uses_ram(&mut self, mut qmp: Qmp) -> Result<Qmp> {
        if let Some(used) = self.used.take() {
            qmp.tell("getfd", json!({ "fdname": "use" }), Some(used.as_fd()))?;
        }
        Ok(qmp)
    }

    fn qmp(&mut self) -> Result<&mut Qmp> {
        self.qmp.as_mut().ok_or_else(|| Error::message(libc::ENOTCONN, SITE, "the emulator does not run"))
    }

    /// State without memory, and a word when it is through. No limits: it is small.
    fn prepare_to_move(&mut self) -> Result<()> {
        let on = |name: &str| json!({ "capability": name, "state": true });
        let capabilities = json!({ "capabilities": [on("x-ignore-shared"), on("events")] });
        let qmp = self.qmp()?;
        qmp.tell("migrate-set-capabilities", capabilities, None)?;
        // For who comes back on the same host: what forbids only to leave it hinders nobody.
        if qmp.release >= MODE_SINCE {
            qmp.tell("migrate-set-parameters", json!({ "mode": "cpr-reboot" }), None)?;
        }
        Ok(())
    }

    fn wait_moved(&mut self) -> Result<()> {
        let ended = |data: &serde_json::Value| match data["status"].as_str() {
            Some("completed") => Some(true),
            Some("failed" | "cancelled") => Some(false),
            _ => None,
        };
        match self.qmp()?.event("MIGRATION", ended) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let why = self.qmp()?.run("query-migrate", json!({})).unwrap_or_default();
                let why = why["error-desc"].as_str().unwrap_or("no reason given").to_string();
                let said = self.place.last_words();
                Err(Error::message(
                    libc::EIO,
                    SITE,
                    format!("the emulator cannot move the state: {why}; {said}"),
                ))
            }
            Err(e) => Err(e),
        }
    }

    /// Has the emulator leave off to move its state: whoever told it to may be gone, and it would stop the guest when it is through,
    /// after somebody let that go on.
    fn leave_off(&mut self) -> Result<()> {
        let begun = Instant::now();
        let mut told = false;
        loop {
            let moved = self.qmp()?.run("query-migrate", json!({}))?;
            match moved["status"].as_str() {
                None | Some("none" | "completed" | "failed" | "cancelled") => break,
                Some(_) if begun.elapsed() > FINISH_WAIT_MAX => {
                    let message = "the emulator does not leave off to move the guest's state";
                    return Err(Error::message(libc::ETIMEDOUT, SITE, message));
                }
                Some("cancelling") => {}
                // It may be through before it hears that.
                Some(_) if !told => drop(self.qmp()?.run("migrate_cancel", json!({}))),
                Some(_) => {}
            }
            told = true;
            std::thread::sleep(FINISH_PAUSE);
        }
        // An emulator says that it is through with a state before it is ready for anything else.
        while self.state()? == "finish-migrate" && begun.elapsed() < FINISH_WAIT_MAX {
            std::thread::sleep(FINISH_PAUSE);
        }
        Ok(())
    }

    fn open_stream(&self, generation: u64, write: bool) -> Result<File> {
        let path = slot_path(self.config, generation);
        let opened = File::options().read(true).write(write).open(&path);
        let seeked = opened.and_then(|mut file| file.seek(SeekFrom::Start(SEAL_BYTES as u64)).map(|_| file));
        seeked.map_err(|e| Error::io(e, SITE, "cannot open the slot", &path))
    }

    /// Memory that nobody opens to store to it, as long as the file is open.
    fn hold_ram(&self) -> Result<OwnedFd> {
        let Config { ram, .. } = self.config;
        if let Some(part) = self.config.part() {
            return Span::hold_part(ram, part);
        }
        let failed = |e: std::io::Error| Error::io(e, SITE, "cannot hold", ram);
        let held = File::open(ram).map_err(failed)?;
        rustix::fs::flock(&held, FlockOperation::NonBlockingLockShared).map_err(|e| failed(e.into()))?;
        Ok(held.into())
    }
}

/// What a seal says of where its state fits.
pub fn identity_of(seal: &Seal) -> Result<Identity> {
    serde_json::from_slice(&seal.identity).map_err(|e| {
        let message = format!("the slot does not say in words known here what the guest ran in: {e}");
        Error::message(libc::EPROTO, SITE, message)
    })
}

/// A failure of the command as an error of the library.
fn words(failure: &failure::Failure) -> String {
    match failure {
        failure::Failure::Failed(message) | failure::Failure::Usage(message) => message.clone(),
        _ => "it failed".into(),
    }
}

impl Machine for Guest<'_> {
    type Slot = Span;

    fn reached(&mut self, phase: Phase) {
        if let Some(watch) = self.watch {
            watch(phase);
        }
    }

    fn stop(&mut self) -> Result<()> {
        self.leave_off()?;
        match self.state()?.as_str() {
            "running" | "paused" | "postmigrate" => self.qmp()?.run("stop", json!({})).map(drop),
            other => {
                let message = format!("the guest is in the state {other}, in which nobody could resume it");
                Err(Error::message(libc::EBUSY, SITE, message))
            }
        }
    }

    fn save(&mut self, generation: u64) -> Result<Saved<Span>> {
        let path = slot_path(self.config, generation);
        if !path.exists() {
            make_slot(self.config, generation)?;
        }
        let mut stream = self.open_stream(generation, true)?;
        self.qmp()?.tell("getfd", json!({ "fdname": "slot" }), Some(stream.as_fd()))?;
        self.prepare_to_move()?;
        self.qmp()?.run("migrate", json!({ "uri": "fd:slot" }))?;
        self.wait_moved()?;
        // The emulator wrote through the same open file.
        let failed = |e| Error::io(e, SITE, "cannot measure the slot", &path);
        let end = stream.stream_position().map_err(failed)?;
        if end as usize > SLOT_BYTES {
            stream.sync_all().map_err(|e| Error::io(e, SITE, "cannot sync the slot", &path))?;
        }
        let slot = open_slot_at(self.config, &path)?;
        Ok(Saved { slot, stream_bytes: end.saturating_sub(SEAL_BYTES as u64) })
    }

    fn identity(&mut self) -> Result<Vec<u8>> {
        let config = self.config;
        let emulator = Emulator::of(self.qmp()?)?;
        let disks = identity::synced_disks_of(self.qmp()?, &config.cwd)?;
        let identity = Identity { emulator, command: command_line(config), disks };
        Ok(serde_json::to_vec(&identity).expect("our documents have string keys only"))
    }

    fn touched(&mut self) -> Option<Vec<(Addr, usize)>> {
        self.touched_bytes = Some(self.config.ram_bytes);
        // Device back ends in processes of their own store by mappings of their own.
        if self.config.options.iter().any(|option| option.contains("vhost-user")) {
            return None;
        }
        let touched = super::touched::touched(self.place.emulator()?, self.config);
        let touched = touched
            .inspect_err(|e| {
                tracing::info!(guest = self.place.name, "all of its memory is written back: {e}")
            })
            .ok()?;
        self.touched_bytes = Some(touched.iter().map(|(_, bytes)| *bytes as u64).sum());
        Some(touched)
    }

    fn discard(&mut self, generation: u64) {
        // The next attempt makes it anew.
        let _ = remove_if_there(&slot_path(self.config, generation));
    }

    fn start(&mut self, seal: &Seal) -> Result<()> {
        let saved = identity_of(seal)?;
        if saved.command != command_line(self.config) {
            let message = format!(
                "the guest's command line was `{}` when it was suspended, and is `{}` now",
                saved.command.join(" "),
                command_line(self.config).join(" ")
            );
            return Err(Error::message(libc::ESTALE, SITE, message));
        }
        let now = self.spawn().and_then(|qmp| Emulator::like(&saved.emulator, qmp))?;
        now.fits(&saved.emulator)
    }

    fn load(&mut self, seal: &Seal) -> Result<()> {
        if self.mode == Mode::Clone {
            // Of pages that it has not stored to the clone sees those of the file: as long as it lives nobody may change it.
            let held = self.hold_ram()?;
            self.qmp()?.tell("getfd", json!({ "fdname": "ram" }), Some(held.as_fd()))?;
        }
        let stream = self.open_stream(seal.generation, false)?;
        self.qmp()?.tell("getfd", json!({ "fdname": "slot" }), Some(stream.as_fd()))?;
        self.prepare_to_move()?;
        self.qmp()?.run("migrate-incoming", json!({ "uri": "fd:slot" }))?;
        self.wait_moved()?;
        self.has_loaded = true;
        Ok(())
    }

    fn go_on(&mut self) -> Result<()> {
        // One that has just said that its state is loaded moves nothing any more.
        if !std::mem::take(&mut self.has_loaded) {
            self.leave_off()?;
        }
        self.qmp()?.run("cont", json!({})).map(drop)
    }

    /// Its memory is the media's already, and its disks were flushed when it was stopped: nothing is waited for but that it
    /// lets go of both.
    fn end(&mut self) {
        match &mut self.child {
            Some(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            None => {
                if let Some(qmp) = &mut self.qmp {
                    let _ = qmp.run("quit", json!({}));
                }
            }
        }
        if !self.place.wait_end(END_WAIT_MAX) && !self.place.kill_emulator(END_WAIT_MAX) {
            tracing::warn!(guest = self.place.name, "the emulator does not end");
        }
    }
}
