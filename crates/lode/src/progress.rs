//! The progress of a long copy, on a terminal only.
//!
//! Nothing is drawn in the first second, so that short copies stay silent, and nothing is left behind.

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
