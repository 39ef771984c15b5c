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
        let name =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("kept."));
        name.is_some_and(|n| n.parse::<u32>().is_ok())
            && path.symlink_metadata().is_ok_and(|about| about.is_dir())
    };
    entries.filter(is_kept).collect()
}

/// Removes an image that was put aside, and its memory, wherever that lies.
fn remove_kept(place: &Place, image: &Path) -> lodestone::Result<()> {
    match Kept::read(image) {
        Ok(kept) => kept.map_or(Ok(()), |kept| kept.remove())?,
        // Nothing of it can be mended here, and nobody else needs it.
        Err(e) => complain(format_args!(
            "guest {}: {e}; if that image has memory elsewhere, it stays there",
            place.name
        )),
    }
    std::fs::remove_dir_all(image).map_err(|e| lodestone::Error::io(e, "wsp::end", "cannot remove", image))
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
        let kept = kept_images(&config);
        if let (Some(first), false) = (kept.first(), force) {
            let message = format!("guest {} has an image that was put aside in {}", place.name, show(first));
            return Err(Failure::failed(message + ": --force loses it"));
        }
        for image in &kept {
            remove_kept(place, image).map_err(failed)?;
        }
        forget(&config).map_err(failed)?;
        if config.own_disks {
            config.disks.iter().try_for_each(|disk| super::start::remove(disk)).map_err(failed)?;
        }
        // What else is there is its owner's to remove.
        let _ = std::fs::remove_dir(&config.slots);
    }
    std::fs::remove_dir_all(&place.dir)
        .map_err(|e| Failure::failed(format_args!("cannot remove {}: {e}", show(&place.dir))))
}
