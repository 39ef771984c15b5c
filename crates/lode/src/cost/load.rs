//! Time that all processors spent working, from /proc/stat: the one count that includes kernel threads, servers
//! and interrupts. It goes in steps of 10 ms, and most kernels give a whole step to whoever runs at its end: work that always ends
//! before is not in it. So the same is counted by process as well, which the scheduler does to the nanosecond; interrupts, and
//! processes of others that ended, are not in that.

use std::collections::HashMap;
use std::path::Path;

use crate::failure::{Failure, Result};

const STAT: &str = "/proc/stat";
/// USER_HZ, part of the kernel's interface on every architecture that we run on.
const TICKS_PER_S: f64 = 100.0;

/// Ticks summed over all processors since boot, or between two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTimes {
    /// user, nice, system, irq and softirq. Guests are part of user and nice already.
    pub busy: u64,
    /// What the hypervisor gave to others while we wanted to run: nobody's work here, but a reason for doubt.
    pub steal: u64,
}

impl CpuTimes {
    pub fn now() -> Result<CpuTimes> {
        let text = std::fs::read_to_string(STAT)
            .map_err(|e| Failure::failed(format_args!("cannot read the CPU time in {STAT}: {e}")))?;
        CpuTimes::parse(&text).ok_or_else(|| {
            Failure::failed(format_args!("{STAT} does not begin with the CPU time of all processors"))
        })
    }

    /// Reads the line `cpu  user nice system idle iowait irq softirq [steal [guest guest_nice]]`.
    pub fn parse(text: &str) -> Option<CpuTimes> {
        let line = text.lines().find_map(|l| l.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        let &[user, nice, system, _idle, _iowait, irq, softirq, ref later @ ..] = ticks.as_slice() else {
            return None;
        };
        let steal = later.first().copied().unwrap_or(0);
        Some(CpuTimes { busy: user + nice + system + irq + softirq, steal })
    }

    pub fn since(&self, before: &CpuTimes) -> CpuTimes {
        CpuTimes {
            busy: self.busy.saturating_sub(before.busy),
            steal: self.steal.saturating_sub(before.steal),
        }
    }

    pub fn busy_s(&self) -> f64 {
        self.busy as f64 / TICKS_PER_S
    }

    pub fn steal_s(&self) -> f64 {
        self.steal as f64 / TICKS_PER_S
    }
}

/// Ticks that each process has run for, kernel threads too, by its number and when it began; ours is left out.
pub struct Processes(HashMap<(u32, u64), u64>);

impl Processes {
    /// Empty where processes of others are not shown.
    pub fn now() -> Processes {
        Processes::under(Path::new("/proc"), std::process::id())
    }

    fn under(proc: &Path, except: u32) -> Processes {
        let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let one = |number: u32| {
            // What has ended meanwhile is not there.
            let text = std::fs::read(proc.join(number.to_string()).join("stat")).ok()?;
            let (began, ran) = Processes::parse(&text)?;
            Some(((number, began), ran))
        };
        Processes(numbers.filter(|number| *number != except).filter_map(one).collect())
    }

    /// When it began and how long it ran, in ticks, from `number (name) state ...`; a name may hold anything.
    fn parse(text: &[u8]) -> Option<(u64, u64)> {
        const UTIME: usize = 11;
        const STIME: usize = 12;
        const STARTTIME: usize = 19;
        let behind_name = text.iter().rposition(|byte| *byte == b')')? + 1;
        let fields: Vec<&str> = std::str::from_utf8(&text[behind_name..]).ok()?.split_whitespace().collect();
        let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
        Some((number(STARTTIME)?, number(UTIME)? + number(STIME)?))
    }

    /// Seconds that those ran which are there now.
    pub fn since(&self, before: &Processes) -> f64 {
        let grown =
            |(who, ran): (&(u32, u64), &u64)| ran.saturating_sub(before.0.get(who).copied().unwrap_or(0));
        self.0.iter().map(grown).sum::<u64>() as f64 / TICKS_PER_S
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_count_from_where_they_stood() {
        let dir = std::env::temp_dir().join(format!("lode-cost-processes-{}", std::process::id()));
        let set = |number: u32, name: &str, began: u64, ran: (u64, u64)| {
            std::fs::create_dir_all(dir.join(number.to_string())).unwrap();
            let text = format!(
                "{number} ({name}) S 1 1 1 0 -1 0 0 0 0 0 {} {} 9 9 20 0 1 0 {began} 4096 1",
                ran.0, ran.1
            );
            std::fs::write(dir.join(number.to_string()).join("stat"), text).unwrap();
        };
        std::fs::create_dir_all(dir.join("self")).unwrap();
        set(1, "init", 5, (100, 50));
        set(2, "a) b (c", 6, (10, 10));
        set(3, "us", 7, (1000, 1000));
        set(4, "ends", 8, (70, 70));
        let before = Processes::under(&dir, 3);
        set(1, "init", 5, (110, 70));
        set(3, "us", 7, (2000, 2000));
        set(2, "another with its number", 9, (1, 2));
        set(5, "new", 9, (0, 40));
        std::fs::remove_dir_all(dir.join("4")).unwrap();
        let spent = Processes::under(&dir, 3).since(&before);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!((spent - 0.73).abs() < 1e-9, "{spent}");
    }

    #[test]
    fn waiting_is_no_work_and_guests_count_once() {
        let text = "cpu  100 20 300 5000 600 7 8 90 50 10\ncpu0 100 20 300 5000 600 7 8 90 50 10\nintr 1\n";
        assert_eq!(CpuTimes::parse(text), Some(CpuTimes { busy: 435, steal: 90 }));
    }

    #[test]
    fn kernels_before_steal_have_seven_fields() {
        assert_eq!(CpuTimes::parse("cpu 1 1 1 9 9 1 1\n"), Some(CpuTimes { busy: 5, steal: 0 }));
    }

    #[test]
    fn what_is_no_such_line_is_refused() {
        for bad in
            ["", "cpu0 1 2 3 4 5 6 7\n", "cpu 1 2 3 4 5 6\n", "cpu 1 2 3 4 5 6 x\n", "cpu -1 2 3 4 5 6 7\n"]
        {
            assert_eq!(CpuTimes::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_kernel_counts_on() {
        let before = CpuTimes::now().unwrap();
        let after = CpuTimes::now().unwrap();
        assert!(before.busy > 0 && after.busy >= before.busy, "{before:?} {after:?}");
        assert_eq!(after.since(&before).busy_s(), (after.busy - before.busy) as f64 / 100.0);
    }
}
