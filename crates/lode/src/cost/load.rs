//! Time that all processors spent working, from /proc/stat: the one count that includes kernel threads, servers
//! and interrupts. It goes in steps of 10 ms.

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

#[cfg(test)]
mod tests {
    use super::*;

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
