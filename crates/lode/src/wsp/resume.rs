//! `lode wsp resume`: what was suspended goes on, each guest for itself.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lodestone::error::Error;
use lodestone::media::{Media, device_align};
use lodestone::quote::Shown;
use lodestone::wsp::image::Seal;
use lodestone::wsp::{self, Machine, Ram, State};
use rustix::io::Errno;
use serde::Serialize;

use super::emulator::{self, Mode};
use super::guest::{
    Guest, identity_of, make_slot, open_ram, open_ram_to_read, open_slot, open_to_use, record_there,
    slot_path, use_ram, with_ram,
};
use super::place::{Config, Guests, Lock, Place, check_own_dir, remove_if_there};
use super::pooled::Kept;
use super::report::{Entry, now_ns, phases};
use super::suspend::words;
use crate::cli::wsp::WspResume;
use crate::failure::{Failure, Output, Result, complain};
use crate::target::show;

const SITE: &str = "wsp::resume";

/// How long an emulator lives that answers nobody any more.
const ENDS_MAX: Duration = Duration::from_secs(2);

/// What says nothing of the image, and boots no guest: somebody uses its memory, all are being suspended, the host has no room, or does
/// not allow it.
const OF_HOST: [i32; 9] = [
    libc::EBUSY,
    libc::ECANCELED,
    libc::EAGAIN,
    libc::ENOMEM,
    libc::ENOSPC,
    libc::EMFILE,
    libc::ENFILE,
    libc::EPERM,
    libc::EACCES,
];

#[derive(Clone, Copy)]
struct How<'a> {
    /// Leaves the guests alone that are neither suspended nor stand.
    only_idle: bool,
    /// All guests are being suspended: those that are not resumed yet stay so.
    called_off: &'a AtomicBool,
    /// A copy is a guest of its own.
    reflink: bool,
    force: bool,
    boot_after: Option<u32>,
}

#[derive(Serialize, Debug)]
struct Outcome {
    name: String,
    /// What came of it: resumed, or booted where that failed too often.
    state: &'static str,
    #[serde(flatten)]
    entry: Option<Entry>,
    error: Option<String>,
}

pub fn run(guests: &Guests, args: &WspResume) -> Result<()> {
    if args.clone.is_some() && args.names.len() != 1 {
        return Err(Failure::usage("a clone has one original: name one guest"));
    }
    // Who is interrupted here would leave guests standing.
    crate::interrupt::catch();
    let (places, unknown) = match args.all {
        true => (guests.all()?, Vec::new()),
        false => guests.named(&args.names),
    };
    let clone = args.clone.as_deref().map(|name| guests.place(name));
    let how = How {
        only_idle: args.all,
        called_off: &AtomicBool::new(false),
        reflink: args.reflink,
        force: args.force,
        boot_after: args.boot_after,
    };
    let mut outcomes = all(&places, clone.as_ref(), how, &|_| {});
    outcomes.extend(unknown.into_iter().map(|(name, failure)| {
        let error = Some(words(failure));
        Outcome { name, state: "unknown", entry: None, error }
    }));
    outcomes.iter().filter_map(|outcome| outcome.error.as_ref()).for_each(complain);
    Output::print(|out| match args.json {
        true => out.json(&serde_json::json!({ "guests": outcomes })),
        false => outcomes.iter().try_for_each(|outcome| match &outcome.entry {
            Some(entry) => out.line(format_args!("{}: {}", outcome.name, entry.sentence())),
            None => Ok(()),
        }),
    })?;
    match outcomes.iter().any(|outcome| outcome.error.is_some()) {
        true => Err(Failure::Reported),
        false => Ok(()),
    }
}

/// Whether whoever resumes all means this guest: it is suspended, or stands. Words where that cannot be told, with what to do: nobody
/// would miss a guest that is passed over in silence. A clone's description names its original's image, which is not its own to
/// resume. Who does not answer neither stands nor waits for a resume.
fn is_idle(place: &Place) -> std::result::Result<bool, String> {
    let config = place.config().map_err(words)?;
    if config.clone_of.is_some() {
        return Ok(false);
    }
    let alive = place.lives().map_err(words)?;
    let look = |alive| match alive {
        true => Ok(super::status::stands(place, &config)),
        false => is_suspended(place, &config),
    };
    let looked = match look(alive) {
        // Somebody works on it, and it may be another guest then.
        Err(e) if e.errno() == libc::EBUSY => {
            drop(place.lock().map_err(words)?);
            look(place.is_alive())
        }
        looked => looked,
    };
    looked.map_err(|e| {
        let remedy = cold_boot(place, &config, &e);
        format!("guest {}: whether it is suspended cannot be told: {e}{remedy}", place.name)
    })
}

/// What the record of a guest without an emulator says; ENODATA where there is none.
fn is_suspended(place: &Place, config: &Config) -> lodestone::Result<bool> {
    there(config)?;
    let record = with_ram(place, config, |media| Ram::new(media, config.ram_bytes)?.record())?;
    let no_record = || Error::message(libc::ENODATA, SITE, "its memory has no record that verifies");
    record.map(|record| record.state == State::Suspended).ok_or_else(no_record)
}

/// Resumes all that are suspended or stand, for those who report to a log: `told` hears of each guest when it is through, or
/// cannot be. Those stay that are not resumed yet when it is `called_off`.
pub fn every(
    guests: &Guests,
    boot_after: Option<u32>,
    called_off: &AtomicBool,
    told: &(dyn Fn(&str, std::result::Result<String, String>) + Sync),
) -> Result<()> {
    let how = How { only_idle: true, called_off, reflink: false, force: false, boot_after };
    all(&guests.all()?, None, how, &|outcome| {
        let result = match (&outcome.entry, &outcome.error) {
            (Some(entry), None) => Ok(entry.sentence()),
            (_, error) => Err(error.clone().unwrap_or_default()),
        };
        told(&outcome.name, result);
    });
    Ok(())
}

/// Guests are compartments: each is resumed by a thread of its own, and none waits for another (WSP §3.4). `told` hears of each as
/// soon as it is through.
fn all(places: &[Place], clone: Option<&Place>, how: How, told: &(dyn Fn(&Outcome) + Sync)) -> Vec<Outcome> {
    let chosen = |place: &Place| match if how.only_idle { is_idle(place) } else { Ok(true) } {
        Ok(true) => Some(one(place, clone, how)),
        Ok(false) => None,
        Err(why) => {
            Some(Outcome { name: place.name.clone(), state: "unknown", entry: None, error: Some(why) })
        }
    };
    let one_told = |place| chosen(place).inspect(told);
    std::thread::scope(|scope| {
        let one_told = &one_told;
        let threads: Vec<_> = places.iter().map(|place| scope.spawn(move || one_told(place))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("resuming does not panic")).collect()
    })
}

fn one(place: &Place, clone: Option<&Place>, how: How) -> Outcome {
    let How { reflink, force, boot_after, .. } = how;
    let ended = |state, entry, error| Outcome { name: place.name.clone(), state, entry, error };
    let failed = |failure: Failure| ended("failed", None, Some(words(failure)));
    let lock = match place.lock() {
        Ok(lock) => lock,
        Err(failure) => return failed(failure),
    };
    let mut config = match place.config() {
        Ok(config) => config,
        Err(failure) => return failed(failure),
    };
    let done = match clone {
        Some(clone) if reflink => resume_copy(place, &config, clone, how),
        Some(clone) => resume_clone(place, &config, clone, force),
        // Whoever calls it off later finds the guest locked, or running.
        None => goes_on(how).and_then(|()| resume(place, &config, how)),
    };
    match done {
        Ok(mut entry) => {
            if std::mem::take(&mut config.failed) > 0
                && let Err(failure) = place.write_config(&config)
            {
                complain(words(failure));
            }
            // An agent that is slow to answer, or never does, keeps nobody from suspending the guest.
            drop(lock);
            let place = clone.unwrap_or(place);
            entry.clock.get_or_insert_with(|| super::agent::set_clock(&config, place));
            place.note(&entry);
            ended("running", Some(entry), None)
        }
        Err(e) => {
            let message = format!("guest {}: {e}", place.name);
            let remedy = cold_boot(place, &config, &e);
            // Memory and slots that a clone's description names are its original's: nothing may be put aside for it.
            let is_of_host = OF_HOST.contains(&e.errno());
            if clone.is_some() || config.clone_of.is_some() || place.is_alive() || is_of_host {
                return ended("failed", None, Some(message + &remedy));
            }
            config.failed += 1;
            if let Err(failure) = place.write_config(&config) {
                return failed(failure);
            }
            match boot_after.filter(|n| config.failed >= *n) {
                None => ended("failed", None, Some(message + &remedy)),
                Some(_) => match boot_instead(place, &mut config) {
                    Ok(kept) => {
                        let failed = format!(
                            "{message}; it was booted instead, and its image is kept in {}",
                            show(&kept)
                        );
                        ended("booted", None, Some(failed))
                    }
                    Err(e) => ended("failed", None, Some(format!("{message}; nor can it be booted: {e}"))),
                },
            }
        }
    }
}

/// What boots a guest whose image cannot be resumed as it is, in words; nothing where that would help nobody.
fn cold_boot(place: &Place, config: &Config, why: &Error) -> String {
    let is_of_image =
        [libc::ENOENT, libc::ENODATA, libc::EILSEQ, libc::EPROTO, libc::ESTALE].contains(&why.errno());
    if config.clone_of.is_some() || place.is_alive() || !is_of_image {
        return String::new();
    }
    let name = &place.name;
    match record_there(config).map(|record| record.is_some_and(|record| record.state == State::Suspended)) {
        Ok(false) => format!("; `lode wsp start {name}` boots the guest"),
        // So does `start` want it where that cannot be told.
        Ok(true) | Err(_) => {
            format!("; `lode wsp start {name} --fresh` boots the guest, and its image is lost")
        }
    }
}

/// ECANCELED when all guests are being suspended.
fn goes_on(how: How) -> lodestone::Result<()> {
    match how.called_off.load(Ordering::SeqCst) {
        false => Ok(()),
        true => {
            let message = "it was not resumed, for all guests are being suspended: it is as it was";
            Err(Error::message(libc::ECANCELED, SITE, message))
        }
    }
}

fn resume(place: &Place, config: &Config, how: How) -> lodestone::Result<Entry> {
    if config.clone_of.is_some() && !place.is_alive() {
        return Err(Error::message(libc::ESTALE, SITE, "it is a clone, whose memory ended with it"));
    }
    let begun = Instant::now();
    there(config)?;
    if let Some(mut guest) = standing(config, place)? {
        guest.maps_its_ram()?;
        if guest.runs()? {
            return Err(Error::message(libc::EALREADY, SITE, "it runs"));
        }
        match go_on(config, &mut guest)? {
            Some(entry) => return Ok(entry),
            None => guest.end(),
        }
    }
    check_own_dir(&config.slots)?;
    let (media, used) = open_to_use(config, || open_ram(config))?;
    let ram = Ram::new(&media, config.ram_bytes)?;
    let generation = wsp::cycle::suspended(&ram)?.generation;
    let slot = open_slot(config, generation)?;
    let mut guest = Guest::new(config, place, Mode::Resume, used);
    let opened = begun.elapsed();
    // To wait for memory may have taken long.
    let accept = |seal: &Seal| disks_fit(seal, how.force).and_then(|()| goes_on(how));
    let mut done = wsp::resume(&ram, &slot, &mut guest, accept)?;
    done.start += opened;
    // For next time; who has no room for it now may have then.
    if let Err(e) = make_slot(config, generation + 1) {
        complain(format_args!("guest {}: {e}", place.name));
    }
    drop(slot);
    let _ = remove_if_there(&slot_path(config, generation));
    Ok(entry("resume", &done, media.domain().name(), None))
}

/// A guest whose emulator is there. One that ends just now is not: whoever suspended it was killed when he had told it to.
fn standing<'a>(config: &'a Config, place: &'a Place) -> lodestone::Result<Option<Guest<'a>>> {
    if !place.is_alive() {
        return Ok(None);
    }
    match Guest::running(config, place) {
        Ok(guest) => Ok(Some(guest)),
        Err(_) if place.wait_end(ENDS_MAX) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whoever suspended the guest was killed at it, and the emulator is still there. Before the record was written the guest
/// goes on; afterwards the image is what counts, and the emulator ends.
fn go_on(config: &Config, guest: &mut Guest) -> lodestone::Result<Option<Entry>> {
    let begun = Instant::now();
    if config.clone_of.is_some() {
        let message = "it is a clone that was not resumed to the end: stop it, and make another";
        return Err(Error::message(libc::ESTALE, SITE, message));
    }
    let media = open_ram(config)?;
    let Some(generation) = wsp::go_on_standing(&Ram::new(&media, config.ram_bytes)?, guest)? else {
        return Ok(None);
    };
    let done = wsp::Resumed {
        generation,
        suspended_ns: 0,
        start: Duration::ZERO,
        load: Duration::ZERO,
        finish: begun.elapsed(),
    };
    Ok(Some(entry("go-on", &done, media.domain().name(), Some("as it was: the guest only stood"))))
}

/// Without a word of the clock that is set when nobody has to wait for it.
fn entry(what: &str, done: &wsp::Resumed, domain: &str, clock: Option<&str>) -> Entry {
    Entry {
        what: what.into(),
        at_ns: now_ns(),
        generation: done.generation,
        state_bytes: 0,
        dirty_bytes: None,
        dirty: Vec::new(),
        domain: domain.into(),
        phases: phases([("start", done.start), ("load", done.load), ("finish", done.finish)]),
        clock: clock.map(str::to_string),
    }
}

/// Memory is private to the clone, and so is what it writes to its disks.
fn resume_clone(place: &Place, config: &Config, clone: &Place, force: bool) -> lodestone::Result<Entry> {
    let failed = |failure: Failure| Error::message(libc::EIO, SITE, words(failure));
    if clone.name == place.name {
        return Err(Error::message(libc::EINVAL, SITE, "a clone has another name than its original"));
    }
    if matches!(device_align(&config.ram), Ok(Some(_))) {
        let message = format!(
            "the kernel maps {} for no private copy, as a clone's memory is: keep a guest that is cloned in a file",
            config.ram.shown()
        );
        return Err(Error::message(libc::EOPNOTSUPP, SITE, message));
    }
    if let Some(why) = emulator::refused_for_clone(&config.options) {
        return Err(Error::message(libc::EOPNOTSUPP, SITE, why));
    }
    let _lock = take_name(clone)?;
    there(config)?;
    check_own_dir(&config.slots)?;
    let used = use_ram(config)?;
    let media = open_ram_to_read(config)?;
    let ram = Ram::new(&media, config.ram_bytes)?;
    let slot = open_slot(config, wsp::cycle::suspended(&ram)?.generation)?;
    let copy = Config { clone_of: Some(place.name.clone()), failed: 0, ..config.clone() };
    clone.write_config(&copy).map_err(failed)?;
    let mut guest = Guest::new(&copy, clone, Mode::Clone, used);
    let done = wsp::resume_clone(&ram, &slot, &mut guest, |seal| disks_fit(seal, force))?;
    Ok(entry("clone", &done, media.domain().name(), None))
}

/// A copy that shares blocks with its original is a guest like any other, and is resumed as such.
fn resume_copy(place: &Place, config: &Config, clone: &Place, how: How) -> lodestone::Result<Entry> {
    let begun = Instant::now();
    if clone.name == place.name {
        return Err(Error::message(libc::EINVAL, SITE, "a clone has another name than its original"));
    }
    there(config)?;
    let _lock = take_name(clone)?;
    let copy = super::reflink::copy(config, clone, |seal| disks_fit(seal, how.force))?;
    let copied = begun.elapsed();
    let how = How { force: false, ..how };
    let mut entry = resume(clone, &copy, how)
        .map_err(|e| e.context(format_args!("the copy {} was made, and is suspended", clone.name)))?;
    entry.what = "clone".into();
    entry.phases[0].us += copied.as_nanos() as f64 / 1e3;
    Ok(entry)
}

/// The directory of a clone, for whoever makes it; EEXIST where another guest has its name.
fn take_name(clone: &Place) -> lodestone::Result<Lock> {
    let failed = |failure: Failure| Error::message(libc::EIO, SITE, words(failure));
    clone.make().map_err(failed)?;
    let lock = clone.lock().map_err(failed)?;
    // What cannot be read is somebody's all the same.
    let is_free = clone.config().map_or(!clone.is_there(), |config| config.clone_of.is_some());
    if clone.is_alive() || !is_free {
        let message = format!("there is a guest {} already: choose another name, or remove it", clone.name);
        return Err(Error::message(libc::EEXIST, SITE, message));
    }
    Ok(lock)
}

/// ENOENT with a remedy where memory is gone.
fn there(config: &Config) -> lodestone::Result<()> {
    match config.ram.exists() {
        true => Ok(()),
        false => {
            let message = format!("its memory, {}, is missing: put it back", config.memory());
            Err(Error::message(libc::ENOENT, SITE, message))
        }
    }
}

fn disks_fit(seal: &Seal, force: bool) -> lodestone::Result<()> {
    match force {
        true => Ok(()),
        false => identity_of(seal)?.disks.iter().try_for_each(|disk| disk.unchanged()),
    }
}

/// After too many resumes that failed: memory and slot are put aside, the guest boots on new ones.
fn boot_instead(place: &Place, config: &mut Config) -> lodestone::Result<PathBuf> {
    if config.clone_of.is_some() {
        let message = "it is a clone: its memory is its original's";
        return Err(Error::message(libc::ESTALE, SITE, message));
    }
    if config.pooled.is_none() && config.ram.exists() && !config.ram.is_file() {
        let message =
            "its memory is a device, of which there is one: its image cannot be kept; boot it with --fresh";
        return Err(Error::message(libc::EOPNOTSUPP, SITE, message));
    }
    // What others made is not written to.
    check_own_dir(&config.slots)?;
    config.failed = 0;
    let Some(file) = &config.pooled else {
        let kept = put_aside(config)?;
        super::start::boot(place, config, None, false)?;
        return Ok(kept);
    };
    // Before anything moves: there may be no room for a second.
    let (next, fixed) = file.make_beside(config.ram_bytes + config.trailer_bytes)?;
    let kept = put_aside(config).inspect_err(|_| drop(next.remove(fixed.number)))?;
    config.pooled = Some(next);
    (config.ram, config.ram_offset, config.ram_number) = (fixed.path, fixed.offset, fixed.number);
    // Before anything fails: the image that is kept is no longer the guest's.
    place.write_config(config).map_err(|f| Error::message(libc::EIO, SITE, words(f)))?;
    let before = config.clone();
    super::start::boot(place, config, Some(&before), false)?;
    Ok(kept)
}

/// Moves memory and slots to where they are kept; memory in a pool stays in its place, under its name.
fn put_aside(config: &Config) -> lodestone::Result<PathBuf> {
    let mut n = 1;
    let kept = loop {
        let kept = config.slots.join(format!("kept.{n}"));
        match std::fs::create_dir(&kept) {
            Ok(()) => match put_memory_aside(config, &kept, n) {
                Ok(true) => break kept,
                // Somebody has a file of the name that memory would get.
                Ok(false) => drop(std::fs::remove_dir(&kept)),
                Err(e) => {
                    let _ = std::fs::remove_dir(&kept);
                    return Err(e);
                }
            },
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(e, SITE, "cannot make", &kept)),
        }
        n += 1;
    };
    let entries =
        std::fs::read_dir(&config.slots).map_err(|e| Error::io(e, SITE, "cannot list", &config.slots))?;
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|n| n.starts_with("slot.")) {
            moved(&path, &kept.join(name))?;
        }
    }
    Ok(kept)
}

fn moved(from: &Path, to: &Path) -> lodestone::Result<()> {
    std::fs::rename(from, to).map_err(|e| Error::io(e, SITE, "cannot put aside", from))
}

/// Whether it could be: not where a file of the name is there already.
fn put_memory_aside(config: &Config, kept: &Path, n: u32) -> lodestone::Result<bool> {
    if let Some(file) = &config.pooled {
        Kept::InPool { file: file.clone(), number: config.ram_number }.write(kept)?;
        return Ok(true);
    }
    let ram = &config.ram;
    if !ram.exists() {
        return Ok(true);
    }
    if ram.parent() == Some(&config.slots) {
        return moved(ram, &kept.join("ram")).map(|()| true);
    }
    // Memory moves within its own file system only. Its whole name stays: vm.ram and vm.img may be two guests'.
    let mut path = ram.clone().into_os_string();
    path.push(format!(".kept.{n}"));
    let path = PathBuf::from(path);
    let about = std::fs::symlink_metadata(ram).map_err(|e| Error::io(e, SITE, "cannot examine", ram))?;
    // Before it moves, so that it is found by whoever removes it.
    Kept::Moved { path: path.clone(), inode: about.ino() }.write(kept)?;
    match rename_to_new(ram, &path) {
        Ok(()) => Ok(true),
        Err(e) => {
            let _ = std::fs::remove_file(kept.join(Kept::NAME));
            match e.kind() {
                ErrorKind::AlreadyExists => Ok(false),
                _ => Err(Error::io(e, SITE, "cannot put aside", ram)),
            }
        }
    }
}

/// Replaces nothing.
fn rename_to_new(from: &Path, to: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that does not know how.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)
        }
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(ErrorKind::AlreadyExists.into()),
        renamed => Ok(renamed?),
    }
}
