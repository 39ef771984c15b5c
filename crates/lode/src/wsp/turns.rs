//! Whose turn it is when several guests are suspended: those that began first get the processors.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Longer than a suspend takes where nothing hangs and little is written back, and short beside what a power supply holds.
const TURN_MAX: Duration = Duration::from_millis(20);

/// Who is suspended now: as many as there are processors, so that those that began first have them, and whoever takes longer than
/// a suspend does is no longer counted. It waits for its emulator, which may hang, or for its media, and holds up none.
pub struct Turns {
    at_most: usize,
    running: Mutex<Vec<(usize, Instant)>>,
    ended: Condvar,
}

impl Turns {
    pub fn new(at_most: usize) -> Turns {
        Turns { at_most, running: Mutex::default(), ended: Condvar::new() }
    }

    /// Waits for `n`'s turn.
    pub fn begin(&self, n: usize) {
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

    pub fn end(&self, n: usize) {
        self.running.lock().expect("nobody panics with it").retain(|(other, _)| *other != n);
        self.ended.notify_all();
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
