//! The progress of long work, on a terminal only.
//!
//! Nothing is drawn in the first second, so that short work stays silent, and nothing is left behind.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A copy that is done sooner shows nothing.
const SILENT: Duration = Duration::from_secs(1);
const REDRAWS_PER_SECOND: u8 = 10;

pub struct Progress {
    bar: ProgressBar,
    begun: Instant,
    drawn: bool,
}

impl Progress {
    pub fn new() -> Progress {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        let style = "{bar:24} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
        Progress { bar, begun: Instant::now(), drawn: !std::io::stderr().is_terminal() }
    }

    /// The next file, of `size` bytes; the total grows as files are met.
    pub fn file(&self, name: &str, size: u64) {
        self.bar.inc_length(size);
        self.bar.set_message(name.to_string());
    }

    pub fn advance(&mut self, bytes: u64) {
        self.bar.inc(bytes);
        if !self.drawn && self.begun.elapsed() > SILENT {
            self.drawn = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
        }
    }

    /// Runs `print` while no bar stands in the way.
    pub fn suspend(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Work in so many steps of about the same length: what is left, and how long that takes.
pub struct Steps {
    bar: ProgressBar,
    begun: Instant,
    drawn: Cell<bool>,
}

impl Steps {
    pub fn new() -> Steps {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        let style = "{bar:24} {percent}%, {eta} left: {wide_msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
        Steps { bar, begun: Instant::now(), drawn: Cell::new(!std::io::stderr().is_terminal()) }
    }

    /// More is to be done than was known.
    pub fn expect(&self, steps: u64) {
        self.bar.inc_length(steps);
    }

    /// What the steps that follow are.
    pub fn name(&self, what: String) {
        self.bar.set_message(what);
    }

    pub fn advance(&self) {
        self.bar.inc(1);
        if !self.drawn.get() && self.begun.elapsed() > SILENT {
            self.drawn.set(true);
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Work of which nobody knows how long it takes: a sign that it goes on, until it is dropped.
pub struct Waiting {
    bar: ProgressBar,
    what: &'static str,
    /// When [`Waiting::at`] takes the next word.
    next: Cell<Instant>,
    /// Dropped to end the thread that waits for the first second to pass.
    _done: std::sync::mpsc::Sender<()>,
}

impl Waiting {
    pub fn new(what: &'static str) -> Waiting {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("a constant template");
        bar.set_style(style);
        bar.set_message(what);
        let (done, wait) = std::sync::mpsc::channel();
        let later = bar.clone();
        if std::io::stderr().is_terminal() {
            // Where no thread starts, nothing is shown.
            let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
                if wait.recv_timeout(SILENT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    later.set_draw_target(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
                    later.enable_steady_tick(SILENT / REDRAWS_PER_SECOND as u32);
                }
            });
        }
        Waiting { bar, what, next: Cell::new(Instant::now() + SILENT), _done: done }
    }

    /// How far it is, in words; asked for where they would be drawn.
    pub fn at(&self, how_far: impl FnOnce() -> String) {
        let now = Instant::now();
        if now >= self.next.get() {
            self.next.set(now + SILENT / REDRAWS_PER_SECOND as u32);
            self.bar.set_message(format!("{}, {}", self.what, how_far()));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
