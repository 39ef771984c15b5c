//! `lode wsp suspend`: several guests at a time, those with the highest priority first.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use lodestone::media::{Domain, Media};
use lodestone::wsp::{self, Phase, Ram};
use serde::Serialize;

use super::guest::{Guest, open_ram, slot_path};
use super::place::{Config, Guests, Place};
use super::report::{Dirty, Entry, phases, sum};
use super::turns::Turns;
use super::window::{At, Moment, Window};
use crate::cli::wsp::WspSuspend;
use crate::failure::{Failure, Output, Result, complain};
use crate::target::show;

/// To count what has to be written back takes so long at most, of memory and of anything else: it is time in which power may fail.
const COUNT_MEMORY_MAX: Duration = Duration::from_millis(1);
const COUNT_MAX: Duration = Duration::from_micros(200);

pub fn run(guests: &Guests, args: &WspSuspend) -> Result<()> {
    // Who is interrupted here would leave guests standing.
    crate::interrupt::catch();
    let begun = Instant::now();
    let outcome = match args.all {
        true => {
            let (places, busy) = guests.running()?;
            all(places, busy, Vec::new(), args.window, begun)
        }
        false => {
            let (places, unknown) = guests.named(&args.names);
            all(places, Vec::new(), unknown, args.window, begun)
        }
    };
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
    /// Where each guest was when the window ended; none where all were done by then.
    pub at_window: Option<Vec<At>>,
    /// How long there had to be energy: until the last image was durable.
    pub energy_window_us: Option<u64>,
    /// What had to be written back of all media of all guests.
    pub dirty_bytes: Option<u64>,
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
/// nobody knows, which is a failure all the same. Those that are `busy` come last, when whoever works on them is through: they may run
/// then.
pub fn all(
    places: Vec<Place>,
    busy: Vec<Place>,
    unknown: Vec<(String, Failure)>,
    window: Option<Duration>,
    begun: Instant,
) -> Outcome {
    let with_priority = |place: Place| (place.config().map_or(0, |config| config.priority), place);
    let by_priority = |places: Vec<Place>| {
        let mut places: Vec<(i32, Place)> = places.into_iter().map(with_priority).collect();
        places.sort_by_key(|(priority, _)| std::cmp::Reverse(*priority));
        places
    };
    let mut queue = by_priority(places);
    let surely = queue.len();
    queue.extend(by_priority(busy));
    let turns = Turns::new(std::thread::available_parallelism().map_or(1, |n| n.get()));
    let ended = Mutex::new(Vec::new());
    let moments = Window::new(queue.iter().map(|(_, place)| place.name.clone()));
    let at_window = std::thread::scope(|scope| {
        // Says it when it is so: whoever reads that may still cut what is less important.
        let watch = window.map(|window| {
            let moments = &moments;
            scope.spawn(move || {
                let at = moments.wait_until(begun + window)?;
                complain(super::window::words(window, &at));
                Some(at)
            })
        });
        for (n, (priority, place)) in queue.iter().enumerate() {
            turns.begin(n);
            let begun_us = begun.elapsed().as_micros() as u64;
            let (turns, ended, moments) = (&turns, &ended, &moments);
            scope.spawn(move || {
                let result = one(place, begun, &|moment| moments.note(n, moment));
                turns.end(n);
                let (done, entry, error) = match result {
                    Ok(Some((durable, entry))) => (durable, Some(entry), None),
                    Ok(None) if n >= surely => return moments.note(n, Moment::Off),
                    Ok(None) => {
                        let why = format!("guest {} does not run", place.name);
                        (begun.elapsed(), None, Some(why))
                    }
                    Err(failure) => (begun.elapsed(), None, Some(words(failure))),
                };
                moments.note(n, if error.is_some() { Moment::Failed } else { Moment::In(Phase::Durable) });
                let (name, done_us) = (place.name.clone(), done.as_micros() as u64);
                let guest = Ended { name, priority: *priority, begun_us, done_us, entry, error };
                ended.lock().expect("nobody panics with it").push(guest);
            });
        }
        watch.and_then(|watch| watch.join().expect("waiting does not panic"))
    });
    let mut guests = ended.into_inner().expect("nobody panics with it");
    let suspended = || guests.iter().filter_map(|guest| Some((guest.done_us, guest.entry.as_ref()?)));
    let energy_window_us = suspended().map(|(done_us, _)| done_us).max();
    let dirty: Vec<Dirty> = suspended().flat_map(|(_, entry)| entry.dirty.iter().cloned()).collect();
    guests.extend(unknown.into_iter().map(|(name, failure)| {
        let error = Some(words(failure));
        Ended { name, priority: 0, begun_us: 0, done_us: 0, entry: None, error }
    }));
    let window_us = window.map(|window| window.as_micros() as u64);
    let within_window =
        window_us.map(|us| guests.iter().all(|guest| guest.done_us <= us && guest.error.is_none()));
    let total_us = begun.elapsed().as_micros() as u64;
    // When all is durable: no image waits for it.
    queue.iter().for_each(|(_, place)| place.keep_notes());
    Outcome {
        guests,
        window_us,
        within_window,
        at_window,
        energy_window_us,
        dirty_bytes: sum(&dirty),
        total_us,
    }
}

/// And when, since `trigger`, the image was durable: nobody whose power fails waits for the emulator's end. `told` hears where it is.
/// None of a guest that does not run.
fn one(place: &Place, trigger: Instant, told: &(dyn Fn(Moment) + Sync)) -> Result<Option<(Duration, Entry)>> {
    let begun = Instant::now();
    told(Moment::In(Phase::Prepare));
    let _lock = place.lock()?;
    let failed = |e: lodestone::Error| Failure::failed(format_args!("guest {}: {e}", place.name));
    if !place.lives()? {
        return Ok(None);
    }
    let config = place.config()?;
    if config.clone_of.is_some() {
        let what = "is a clone, whose memory is its own alone and ends with it: it cannot be suspended";
        return Err(Failure::failed(format_args!("guest {} {what}", place.name)));
    }
    let mut guest = Guest::running(&config, place).map_err(failed)?;
    let media = open_ram(&config).map_err(failed)?;
    guest.maps_its_ram().map_err(failed)?;
    let ram = Ram::new(&media, config.ram_bytes).map_err(failed)?;
    let dirty = Mutex::new(Vec::new());
    let generation = ram.record().map_err(failed)?.map_or(1, |record| record.generation + 1);
    let watch = |phase| {
        let found = found_dirty(&config, media.domain(), generation, phase);
        dirty.lock().expect("nobody panics with it").extend(found);
        told(match phase {
            Phase::WriteBack if media.domain() == Domain::PageCache => {
                Moment::Writes(config.ram.clone(), config.part())
            }
            phase => Moment::In(phase),
        });
    };
    guest.watched_by(&watch);
    let opened = begun.elapsed();
    let done = wsp::suspend(&ram, &mut guest).map_err(failed)?;
    let lines = guest.touched_bytes.take();
    drop(guest);
    let mut dirty = dirty.into_inner().expect("nobody panics with it");
    if let Some(bytes) = lines {
        dirty.insert(0, Dirty::of_pages(&config, media.kind(), bytes));
    }
    let entry = Entry {
        what: "suspend".into(),
        at_ns: super::report::now_ns(),
        generation: done.generation,
        state_bytes: done.stream_bytes,
        dirty_bytes: sum(&dirty),
        dirty,
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
    Ok(Some((durable, entry)))
}

/// What has to be written back of the media that a phase is about: of disks before the guest stands, for then they are flushed; of
/// memory and state before they are. Where memory is written back line by line the guest itself knows which, and where nothing
/// is, nothing is counted.
fn found_dirty(config: &Config, domain: Domain, generation: u64, phase: Phase) -> Vec<Dirty> {
    let found = match phase {
        Phase::Prepare => config.disks.iter().map(|disk| Dirty::of("disk", disk, None, COUNT_MAX)).collect(),
        Phase::WriteBack => {
            let memory = match domain {
                Domain::PageCache => Dirty::of("memory", &config.ram, config.part(), COUNT_MEMORY_MAX),
                Domain::Memory => None,
                Domain::Volatile | Domain::CpuCache => Some(Dirty::of_pages(config, None, 0)),
            };
            vec![memory, Dirty::of("state", &slot_path(config, generation), None, COUNT_MAX)]
        }
        Phase::Finish | Phase::Durable => Vec::new(),
    };
    found.into_iter().flatten().collect()
}

pub fn words(failure: Failure) -> String {
    match failure {
        Failure::Failed(message) | Failure::Usage(message) => message,
        _ => "it failed".into(),
    }
}
