//! How far each guest is, and what that was at the moment at which the energy was to end.
//!
//! It is said at that moment, while the suspends go on: there may be energy left, and whoever reads it knows what is safe.

use std::path::PathBuf;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use lodestone::media::{Part, Unsynced, unsynced};
use lodestone::wsp::Phase;
use serde::Serialize;

use crate::size::Size;

/// To count what is still to be written takes so long at most: the window is over, and it is said late.
const COUNT_MAX: Duration = Duration::from_millis(2);

/// Where a guest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Its turn has not come.
    Waits,
    In(Phase),
    /// In the phase write-back, and the kernel writes this file, or a part of it.
    Writes(PathBuf, Option<Part>),
    Failed,
    /// It does not run: somebody worked on it, and let nothing run.
    Off,
}

/// Where a guest was when the window ended.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct At {
    pub name: String,
    /// `waiting`, `prepare`, `write-back`, `finish`, `durable`, `failed` or `off`.
    pub reached: &'static str,
    /// Of its memory, what the kernel had still to write to its disk; none where nobody can say, or it was not so far.
    pub left_bytes: Option<u64>,
}

/// Of all guests that are suspended.
pub struct Window {
    guests: Mutex<Vec<(String, Moment)>>,
    moved: Condvar,
}

impl Window {
    pub fn new(names: impl Iterator<Item = String>) -> Window {
        let guests = names.map(|name| (name, Moment::Waits)).collect();
        Window { guests: Mutex::new(guests), moved: Condvar::new() }
    }

    pub fn note(&self, n: usize, moment: Moment) {
        self.guests.lock().expect("nobody panics with it")[n].1 = moment;
        self.moved.notify_all();
    }

    /// Waits until then, or until all are done: none then, else where each is.
    pub fn wait_until(&self, deadline: Instant) -> Option<Vec<At>> {
        let mut guests = self.guests.lock().expect("nobody panics with it");
        let is_done =
            |moment: &Moment| matches!(moment, Moment::In(Phase::Durable) | Moment::Failed | Moment::Off);
        loop {
            if guests.iter().all(|(_, moment)| is_done(moment)) {
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            guests = self.moved.wait_timeout(guests, left).expect("nobody panics with it").0;
        }
        let reached = guests.clone();
        // Nobody waits for what is counted here.
        drop(guests);
        Some(reached.into_iter().map(|(name, moment)| At::of(name, moment)).collect())
    }
}

impl At {
    fn of(name: String, moment: Moment) -> At {
        let (reached, left_bytes) = match moment {
            Moment::Waits => ("waiting", None),
            Moment::In(phase) => (phase.name(), None),
            Moment::Writes(file, part) => {
                let left = unsynced(&file, part, COUNT_MAX).map(|Unsynced { bytes, .. }| bytes);
                (Phase::WriteBack.name(), left.ok())
            }
            Moment::Failed => ("failed", None),
            Moment::Off => ("off", None),
        };
        At { name, reached, left_bytes }
    }
}

/// For people.
pub fn words(window: Duration, at: &[At]) -> String {
    let names = |reached: &str| -> Vec<&str> {
        at.iter().filter(|at| at.reached == reached).map(|at| at.name.as_str()).collect()
    };
    let safe = match names(Phase::Durable.name()) {
        safe if safe.is_empty() => "no guest is suspended yet".to_string(),
        safe => format!("suspended: {}", safe.join(", ")),
    };
    let mut text = format!("the window of {:.1} ms has ended; {safe}", window.as_secs_f64() * 1e3);
    for phase in [Phase::Finish, Phase::WriteBack, Phase::Prepare] {
        let some = at.iter().filter(|at| at.reached == phase.name()).map(|at| match at.left_bytes {
            Some(left) => format!("{} ({} of its memory still to be written)", at.name, Size(left)),
            None => at.name.clone(),
        });
        let some: Vec<String> = some.collect();
        if !some.is_empty() {
            text += &format!("; in {}: {}", phase.name(), some.join(", "));
        }
    }
    for (reached, what) in [("waiting", "not begun"), ("failed", "failed")] {
        let some = names(reached);
        if !some.is_empty() {
            text += &format!("; {what}: {}", some.join(", "));
        }
    }
    text + "; what is not yet suspended goes on"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> Window {
        Window::new(["a", "b", "c", "d"].into_iter().map(String::from))
    }

    #[test]
    fn at_its_end_is_said_where_each_is() {
        let window = window();
        window.note(0, Moment::In(Phase::Durable));
        window.note(1, Moment::Failed);
        window.note(2, Moment::Writes("/nowhere".into(), None));
        window.guests.lock().unwrap().push(("e".into(), Moment::Off));
        let mut at = window.wait_until(Instant::now() + Duration::from_millis(5)).unwrap();
        assert_eq!(at.pop().unwrap().reached, "off");
        let reached: Vec<&str> = at.iter().map(|at| at.reached).collect();
        assert_eq!(reached, ["durable", "failed", "write-back", "waiting"]);
        let text = words(Duration::from_millis(5), &at);
        assert_eq!(
            text,
            "the window of 5.0 ms has ended; suspended: a; in write-back: c; not begun: d; failed: b; what is not yet suspended \
             goes on"
        );
        let left = At { left_bytes: Some(3 << 20), ..at[2].clone() };
        let text = words(Duration::from_millis(5), &[left]);
        assert!(
            text.contains(
                "no guest is suspended yet; in write-back: c (3 MiB of its memory still to be written)"
            ),
            "{text}"
        );
    }

    #[test]
    fn who_is_done_is_not_waited_for() {
        let window = window();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| window.wait_until(begun + Duration::from_secs(600)));
            for n in 0..4 {
                window.note(n, Moment::In(Phase::Prepare));
                window.note(n, if n == 2 { Moment::Failed } else { Moment::In(Phase::Durable) });
            }
            assert_eq!(waits.join().unwrap(), None);
        });
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
