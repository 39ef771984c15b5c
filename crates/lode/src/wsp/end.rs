//! `lode wsp stop` and `rm`: a guest ends, or is forgotten.

use std::time::Duration;

use lodestone::wsp::{Machine, Ram, State};

use super::guest::{Guest, open_ram};
use super::place::{Guests, Place};
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
        let record = open_ram(&config).and_then(|media| Ram::new(&media, config.ram_bytes)?.record());
        let is_suspended = matches!(&record, Ok(Some(record)) if record.state == State::Suspended);
        let in_use = record.as_ref().err().filter(|e| e.errno() == libc::EBUSY);
        if let Some(e) = in_use {
            return Err(Failure::failed(format_args!("guest {}: {e}", place.name)));
        }
        if is_suspended && !force {
            return Err(Failure::failed(format_args!("guest {} is suspended: --force loses it", place.name)));
        }
        forget(&config).map_err(|e| Failure::failed(format_args!("guest {}: {e}", place.name)))?;
        // Images that were put aside are their owner's to remove.
        let _ = std::fs::remove_dir(&config.slots);
    }
    std::fs::remove_dir_all(&place.dir)
        .map_err(|e| Failure::failed(format_args!("cannot remove {}: {e}", show(&place.dir))))
}
