//! `lode wsp stop` and `rm`: a guest ends, or is forgotten.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lodestone::wsp::{Machine, State};

use super::guest::{Guest, record_there};
use super::place::{Config, Guests, Place};
use super::pooled::Kept;
use super::start::forget;
use crate::cli::wsp::{WspRm, WspStop};
use crate::failure::{Failure, Result, complain};
use crate::target::show;

/// A process that was killed gives its memory back before it is gone.
const KILL_WAIT_MAX: Duration = Duration::from_secs(30);

pub fn stop(guests: &Guests, args: &WspStop) -> Result<()> {
    let place = guests.known(&args.name)?;
    let _lock = place.lock()?;
    if !place.is_alive() {
        return Err(Failure::failed(format_args!("guest {} does not run", place.name)));
    }
    let config = place.config()?;
    let failed = |e: lodestone::Error| Failure::failed(format_args!("guest {}: {e}", place.name));
    // An emulator that hangs answers nobody.
    match Guest::running(&config, &place).map_err(failed) {
        Ok(mut guest) => guest.end(),
        Err(failure) if !place.kill_emulator(KILL_WAIT_MAX) => return Err(failure),
        Err(_) => {}
    }
    match place.is_alive() {
        true => {
            Err(Failure::failed(format_args!("guest {}: its emulator does not end: kill it", place.name)))
        }
        false => Ok(()),
    }
}

pub fn rm(guests: &Guests, args: &WspRm) -> Result<()> {
    let mut failed = false;
    for name in &args.names {
        if let Err(failure) = guests.known(name).and_then(|place| remove(&place, args.force)) {
            complain(super::suspend::words(failure));
            failed = true;
        }
    }
    if failed { Err(Failure::Reported) } else { Ok(()) }
}

/// Images of a guest that were put aside.
fn kept_images(config: &Config) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&config.slots).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_kept = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("kept."))
    };
    entries.filter(is_kept).collect()
}

/// Removes the memory of an image that was put aside, where that lies elsewhere; the rest goes with the guest's directory.
fn remove_kept(image: &Path) -> lodestone::Result<()> {
    Kept::read(image)?.map_or(Ok(()), |kept| kept.remove())
}

fn remove(place: &Place, force: bool) -> Result<()> {
    let _lock = place.lock()?;
    if place.is_alive() {
        return Err(Failure::failed(format_args!("guest {} runs: stop it first", place.name)));
    }
    let config = match place.config() {
        Ok(config) => Some(config),
        Err(_) if force => None,
        Err(failure) => return Err(failure),
    };
    if let Some(config) = config.filter(|config| config.clone_of.is_none()) {
        match record_there(&config) {
            Err(e) if e.errno() == libc::EBUSY => {
                return Err(Failure::failed(format_args!("guest {}: {e}", place.name)));
            }
            Err(e) if !force => {
                return Err(Failure::failed(format_args!(
                    "guest {}: whether it is suspended cannot be told: {e}; mend that, or lose what may be there with --force",
                    place.name
                )));
            }
            Ok(Some(record)) if record.state == State::Suspended && !force => {
                return Err(Failure::failed(format_args!(
                    "guest {} is suspended: --force loses it",
                    place.name
                )));
            }
            _ => {}
        }
        let failed = |e: lodestone::Error| Failure::failed(format_args!("guest {}: {e}", place.name));
        super::place::check_own_dir(&config.slots).map_err(failed)?;
        // Those that lie elsewhere stay there.
        let kept = if config.slots.starts_with(&place.dir) { kept_images(&config) } else { Vec::new() };
        if let (Some(first), false) = (kept.first(), force) {
            let message = format!("guest {} has an image that was put aside in {}", place.name, show(first));
            return Err(Failure::failed(message + ": --force loses it"));
        }
        for image in &kept {
            remove_kept(image).map_err(failed)?;
        }
        forget(&config).map_err(failed)?;
        if config.own_disks {
            config.disks.iter().try_for_each(|disk| super::start::remove(disk)).map_err(failed)?;
        }
        // Images that were put aside are their owner's to remove.
        let _ = std::fs::remove_dir(&config.slots);
    }
    std::fs::remove_dir_all(&place.dir)
        .map_err(|e| Failure::failed(format_args!("cannot remove {}: {e}", show(&place.dir))))
}
