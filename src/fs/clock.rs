//! The clock of times on media: the kernel's own for files, a tick coarse. A simulation sets it by hand, for
//! its thread, so that the same run gives the same bytes.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::format::pack_time;
use super::types::Time;

/// Whether any thread ever set its clock.
static SIMULATED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static SET: Cell<Option<Time>> = const { Cell::new(None) };
}

/// From now on it is `time` for this thread; `None` gives it the host's clock again.
pub fn set(time: Option<Time>) {
    SIMULATED.store(true, Ordering::Relaxed);
    SET.set(time);
}

#[inline]
pub(crate) fn now() -> u64 {
    if SIMULATED.load(Ordering::Relaxed)
        && let Some(time) = SET.get()
    {
        return pack_time(time);
    }
    let t = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    pack_time(Time { sec: t.tv_sec.clamp(Time::SEC_MIN, Time::SEC_MAX), nsec: t.tv_nsec as u32 })
}
