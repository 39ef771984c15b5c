//! `lode wsp daemon`: waits for SIGPWR, and suspends every guest; before, and beside that, it resumes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::signal::unix::{SignalKind, signal};

use super::place::Guests;
use super::resume;
use super::suspend;
use crate::cli::wsp::WspDaemon;
use crate::failure::{Failure, Result};

pub fn run(guests: &Guests, args: &WspDaemon) -> Result<()> {
    guests.make()?;
    let failed = |e: std::io::Error| Failure::failed(format_args!("cannot wait for signals: {e}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(failed)?;
    runtime.block_on(async {
        let (to, mut signals) = tokio::sync::mpsc::unbounded_channel();
        for number in [libc::SIGPWR, libc::SIGTERM, libc::SIGINT] {
            let (to, mut signal) = (to.clone(), signal(SignalKind::from_raw(number)).map_err(failed)?);
            tokio::spawn(async move { while signal.recv().await.is_some() && to.send(number).is_ok() {} });
        }
        // Beside all that follows: power may fail meanwhile, and an emulator that hangs keeps nobody from being suspended.
        let called_off = Arc::new(AtomicBool::new(false));
        let resumes = args.resume.then(|| {
            let (guests, boot_after, called_off) = (guests.clone(), args.boot_after, called_off.clone());
            let resume = move || resume_all(&guests, boot_after, &called_off);
            std::thread::Builder::new().name("resumes".to_owned()).spawn(resume)
        });
        let resumes = resumes.transpose().map_err(|e| {
            Failure::failed(format_args!("cannot start a thread (raise ulimit -u or pids.max): {e}"))
        })?;
        say("waiting for SIGPWR");
        while let Some(signal) = signals.recv().await {
            // Nobody's image is used up from here on.
            called_off.store(true, Ordering::SeqCst);
            if signal != libc::SIGPWR {
                break;
            }
            power_fails(guests, args);
        }
        // Who ends here would leave guests standing.
        if let Some(resumes) = resumes {
            if !resumes.is_finished() {
                say("ends when the resumes have");
            }
            resumes.join().expect("resuming does not panic");
        }
        Ok(())
    })
}

/// Says of each guest what came of it as soon as that is known.
fn resume_all(guests: &Guests, boot_after: Option<u32>, called_off: &AtomicBool) {
    let told = |name: &str, outcome: std::result::Result<String, String>| match outcome {
        Ok(told) => say(&format!("{name}: {told}")),
        Err(why) => say(&why),
    };
    match resume::every(guests, boot_after, called_off, &told) {
        Ok(()) => say("all resumes have ended"),
        Err(failure) => say(&suspend::words(failure)),
    }
}

/// Nobody waits for this thread meanwhile.
fn power_fails(guests: &Guests, args: &WspDaemon) {
    let begun = Instant::now();
    let (places, busy) = match guests.running() {
        Ok(places) => places,
        Err(failure) => return say(&suspend::words(failure)),
    };
    let outcome = suspend::all(places, busy, Vec::new(), args.window, begun);
    for guest in &outcome.guests {
        match (&guest.entry, &guest.error) {
            (Some(entry), _) => {
                say(&format!(
                    "{}: {}, {:.1} ms after the signal",
                    guest.name,
                    entry.sentence(),
                    guest.done_us as f64 / 1e3
                ));
            }
            (None, error) => say(error.as_deref().unwrap_or("it failed")),
        }
    }
    match outcome.missed() {
        Some(missed) => say(&missed),
        None => say(&format!("all done {:.1} ms after the signal", outcome.total_us as f64 / 1e3)),
    }
}

/// To the log of whoever runs the daemon.
fn say(what: &str) {
    crate::failure::complain(what);
}
