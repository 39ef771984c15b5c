//! `lode wsp suspend`: several guests at a time, those with the highest priority first.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lodestone::media::Media;
use lodestone::wsp::{self, Ram};
use serde::Serialize;

use super::guest::{Guest, open_ram};
use super::place::{Guests, Place};
use super::report::{Entry, phases};
use crate::cli::wsp::WspSuspend;
use crate::failure::{Failure, Output, Result, complain};

pub fn run(guests: &Guests, args: &WspSuspend) -> Result<()> {
    // Who is interrupted here would leave guests standing.
    crate::interrupt::catch();
    let begun = Instant::now();
    let places = match args.all {
        true => guests.all()?.into_iter().filter(Place::is_alive).collect(),
        false => args.names.iter().map(|name| guests.known(name)).collect::<Result<Vec<_>>>()?,
    };
    let outcome = all(places, args.window, begun);
    let mut out = Output::new();
    match args.json {
        true => out.json(&outcome)?,
        false => {
            for guest in &outcome.guests {
                match &guest.entry {
                    Some(entry) => out.line(format_args!("{}: {}", guest.name, entry.sentence()))?,
                    None => complain(guest.error.as_deref().unwrap_or_default()),
                }
            }
            if let Some(missed) = outcome.missed() {
                complain(missed);
            }
        }
    }
    out.finish()?;
    outcome.verdict(args.json)
}

/// What became of all.
#[derive(Serialize, Debug)]
pub struct Outcome {
    pub guests: Vec<Ended>,
    pub window_us: Option<u64>,
    pub within_window: Option<bool>,
    pub total_us: u64,
}

#[derive(Serialize, Debug)]
pub struct Ended {
    pub name: String,
    pub priority: i32,
    /// Since the trigger.
    pub done_us: u64,
    #[serde(flatten)]
    pub entry: Option<Entry>,
    pub error: Option<String>,
}

impl Outcome {
    /// What was not reached in time, in words.
    pub fn missed(&self) -> Option<String> {
        let window = self.window_us?;
        let late = self.guests.iter().filter(|g| g.entry.is_some() && g.done_us > window);
        let late: Vec<String> =
            late.map(|g| format!("{} after {:.1} ms", g.name, g.done_us as f64 / 1e3)).collect();
        let in_time = self.guests.iter().filter(|g| g.entry.is_some() && g.done_us <= window).count();
        (!late.is_empty()).then(|| {
            format!(
                "the window of {:.1} ms was missed: {in_time} of {} were suspended in it, then {}",
                window as f64 / 1e3,
                self.guests.len(),
                late.join(", ")
            )
        })
    }

    fn verdict(&self, told_in_json: bool) -> Result<()> {
        if told_in_json {
            self.guests.iter().filter_map(|guest| guest.error.as_ref()).for_each(complain);
            if let Some(missed) = self.missed() {
                complain(missed);
            }
        }
        let failed =
            self.guests.iter().any(|guest| guest.error.is_some()) || self.within_window == Some(false);
        if failed { Err(Failure::Reported) } else { Ok(()) }
    }
}

/// Suspends these guests. None waits for one of lower priority, and one that fails holds up none (WSP §3.4).
pub fn all(places: Vec<Place>, window: Option<Duration>, begun: Instant) -> Outcome {
    let mut queue: Vec<(i32, Place)> =
        places.into_iter().map(|place| (place.config().map_or(0, |config| config.priority), place)).collect();
    queue.sort_by_key(|(priority, _)| std::cmp::Reverse(*priority));
    let (next, ended) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((priority, place)) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = one(place);
            let done_us = begun.elapsed().as_micros() as u64;
            let (entry, error) = match result {
                Ok(entry) => (Some(entry), None),
                Err(failure) => (None, Some(words(failure))),
            };
            let guest = Ended { name: place.name.clone(), priority: *priority, done_us, entry, error };
            ended.lock().expect("nobody panics with it").push(guest);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(queue.len());
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let guests = ended.into_inner().expect("nobody panics with it");
    let window_us = window.map(|window| window.as_micros() as u64);
    let within_window =
        window_us.map(|us| guests.iter().all(|guest| guest.done_us <= us && guest.error.is_none()));
    Outcome { guests, window_us, within_window, total_us: begun.elapsed().as_micros() as u64 }
}

fn one(place: &Place) -> Result<Entry> {
    let begun = Instant::now();
    let _lock = place.lock()?;
    let failed = |e: lodestone::Error| Failure::failed(format_args!("guest {}: {e}", place.name));
    let config = place.config()?;
    if !place.is_alive() {
        return Err(Failure::failed(format_args!("guest {} does not run", place.name)));
    }
    if config.clone_of.is_some() {
        let what = "is a clone, whose memory is its own alone and ends with it: it cannot be suspended";
        return Err(Failure::failed(format_args!("guest {} {what}", place.name)));
    }
    let mut guest = Guest::running(&config, place).map_err(failed)?;
    let media = open_ram(&config).map_err(failed)?;
    guest.maps_its_ram().map_err(failed)?;
    let ram = Ram::new(&media, config.ram_bytes).map_err(failed)?;
    let written = super::report::written_by_device(&config.ram);
    let opened = begun.elapsed();
    let done = wsp::suspend(&ram, &mut guest).map_err(failed)?;
    let dirty = super::report::written_by_device(&config.ram)
        .zip(written)
        .map(|(now, then)| now.saturating_sub(then));
    let entry = Entry {
        what: "suspend".into(),
        at_ns: super::report::now_ns(),
        generation: done.generation,
        state_bytes: done.stream_bytes,
        dirty_bytes: dirty,
        domain: media.domain().name().into(),
        phases: phases([
            ("prepare", opened + done.prepare),
            ("write-back", done.write_back),
            ("finish", done.finish),
        ]),
        clock: None,
    };
    place.note(&entry);
    Ok(entry)
}

pub fn words(failure: Failure) -> String {
    match failure {
        Failure::Failed(message) | Failure::Usage(message) => message,
        _ => "it failed".into(),
    }
}
