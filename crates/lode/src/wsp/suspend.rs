//! `lode wsp suspend`: several guests at a time, those with the highest priority first.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use lodestone::media::Media;
use lodestone::wsp::{self, Ram};
use serde::Serialize;

use super::guest::{Guest, open_ram};
use super::place::{Guests, Place};
use super::report::{Entry, phases};
use crate::cli::wsp::WspSuspend;
use crate::failure::{Failure, Output, Result, complain};
use crate::target::show;

/// Longer than a suspend takes where nothing hangs and little is written back, and short beside what a power supply holds.
const TURN_MAX: Duration = Duration::from_millis(20);

pub fn run(guests: &Guests, args: &WspSuspend) -> Result<()> {
    // Who is interrupted here would leave guests standing.
    crate::interrupt::catch();
    let begun = Instant::now();
    let (places, unknown) = match args.all {
        true => (guests.running()?, Vec::new()),
        false => guests.named(&args.names),
    };
    let outcome = all(places, unknown, args.window, begun);
    outcome.guests.iter().filter_map(|guest| guest.error.as_ref()).for_each(complain);
    outcome.missed().into_iter().for_each(complain);
    Output::print(|out| match args.json {
        true => out.json(&outcome),
        false if outcome.guests.is_empty() => {
            out.line(format_args!("no guest runs in {}", show(guests.dir())))
        }
        false => outcome.guests.iter().try_for_each(|guest| match &guest.entry {
            Some(entry) => out.line(format_args!("{}: {}", guest.name, entry.sentence())),
            None => Ok(()),
        }),
    })?;
    outcome.verdict()
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
    /// Since the trigger, when its turn came.
    pub begun_us: u64,
    /// Since the trigger, until the image was durable, or the suspend had failed.
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

    fn verdict(&self) -> Result<()> {
        let failed =
            self.guests.iter().any(|guest| guest.error.is_some()) || self.within_window == Some(false);
        if failed { Err(Failure::Reported) } else { Ok(()) }
    }
}

/// Suspends these guests. None waits for one of lower priority, and one that fails holds up none (WSP §3.4). Nor does a name that
/// nobody knows, which is a failure all the same.
pub fn all(
    places: Vec<Place>,
    unknown: Vec<(String, Failure)>,
    window: Option<Duration>,
    begun: Instant,
) -> Outcome {
    let mut queue: Vec<(i32, Place)> =
        places.into_iter().map(|place| (place.config().map_or(0, |config| config.priority), place)).collect();
    queue.sort_by_key(|(priority, _)| std::cmp::Reverse(*priority));
    let turns = Turns::new(std::thread::available_parallelism().map_or(1, |n| n.get()));
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (n, (priority, place)) in queue.iter().enumerate() {
            turns.begin(n);
            let begun_us = begun.elapsed().as_micros() as u64;
            let (turns, ended) = (&turns, &ended);
            scope.spawn(move || {
                let result = one(place, begun);
                turns.end(n);
                let (done, entry, error) = match result {
                    Ok((durable, entry)) => (durable, Some(entry), None),
                    Err(failure) => (begun.elapsed(), None, Some(words(failure))),
                };
                let (name, done_us) = (place.name.clone(), done.as_micros() as u64);
                let guest = Ended { name, priority: *priority, begun_us, done_us, entry, error };
                ended.lock().expect("nobody panics with it").push(guest);
            });
        }
    });
    let mut guests = ended.into_inner().expect("nobody panics with it");
    guests.extend(unknown.into_iter().map(|(name, failure)| {
        let error = Some(words(failure));
        Ended { name, priority: 0, begun_us: 0, done_us: 0, entry: None, error }
    }));
    let window_us = window.map(|window| window.as_micros() as u64);
    let within_window =
        window_us.map(|us| guests.iter().all(|guest| guest.done_us <= us && guest.error.is_none()));
    Outcome { guests, window_us, within_window, total_us: begun.elapsed().as_micros() as u64 }
}

/// Who is suspended now: as many as there are processors, so that those that began first have them, and whoever takes longer than
/// a suspend does is no longer counted. It waits for its emulator, which may hang, or for its media, and holds up none.
struct Turns {
    at_most: usize,
    running: Mutex<Vec<(usize, Instant)>>,
    ended: Condvar,
}

impl Turns {
    fn new(at_most: usize) -> Turns {
        Turns { at_most, running: Mutex::default(), ended: Condvar::new() }
    }

    /// Waits for `n`'s turn.
    fn begin(&self, n: usize) {
        let mut running = self.running.lock().expect("nobody panics with it");
        loop {
            let left = |since: &Instant| TURN_MAX.checked_sub(since.elapsed());
            let mut counted: Vec<Duration> = running.iter().filter_map(|(_, since)| left(since)).collect();
            counted.sort();
            if counted.len() < self.at_most {
                running.push((n, Instant::now()));
                return;
            }
            running = self.ended.wait_timeout(running, counted[0]).expect("nobody panics with it").0;
        }
    }

    fn end(&self, n: usize) {
        self.running.lock().expect("nobody panics with it").retain(|(other, _)| *other != n);
        self.ended.notify_all();
    }
}

/// And when, since `trigger`, the image was durable: nobody whose power fails waits for the emulator's end.
fn one(place: &Place, trigger: Instant) -> Result<(Duration, Entry)> {
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
    let durable = begun.duration_since(trigger) + opened + done.prepare + done.write_back + done.finish;
    Ok((durable, entry))
}

pub fn words(failure: Failure) -> String {
    match failure {
        Failure::Failed(message) | Failure::Usage(message) => message,
        _ => "it failed".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_hangs_holds_up_none() {
        let turns = Turns::new(1);
        // None of them ends.
        (0..3).for_each(|n| turns.begin(n));
        let running = turns.running.lock().unwrap().clone();
        assert_eq!(running.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [0, 1, 2]);
        turns.end(1);
        assert_eq!(turns.running.lock().unwrap().len(), 2);
        let turns = Turns::new(2);
        (0..1000).for_each(|n| {
            turns.begin(n);
            turns.end(n);
        });
        assert!(turns.running.lock().unwrap().is_empty());
    }
}
