//! A moment of polling: as long as it takes for a look to be worthwhile again, in a state of the processor that leaves
//! the core to its other hardware thread, where there is one.
//!
//! With WAITPKG that is TPAUSE: the core rests until a time stamp. (UMWAIT would rest until a line changes; but who waits
//! here has no one line: a device's record, a word of another thread, a ring. A rest is a fraction of what is worth
//! polling for, so nothing is gained by being woken in the middle of it.) Otherwise it is the processor's hint for
//! loops that spin.

use std::sync::OnceLock;

/// A rest is so many ticks of the time stamp: about a tenth of a microsecond.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const REST_TICKS: u64 = 250;
/// Hints in a row where there is no such instruction: each takes 10 to 50 ns.
const HINTS: u32 = 4;

/// How a moment passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// TPAUSE.
    Rest,
    /// The hint.
    Hint,
}

impl Pause {
    /// What this processor has.
    pub fn here() -> Pause {
        static HERE: OnceLock<Pause> = OnceLock::new();
        *HERE.get_or_init(|| if has_waitpkg() { Pause::Rest } else { Pause::Hint })
    }

    pub fn name(self) -> &'static str {
        match self {
            Pause::Rest => "tpause",
            Pause::Hint => "pause",
        }
    }
}

/// Lets a moment pass.
#[inline]
pub fn moment() {
    match Pause::here() {
        Pause::Rest => rest(),
        Pause::Hint => (0..HINTS).for_each(|_| std::hint::spin_loop()),
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn has_waitpkg() -> bool {
    const WAITPKG: u32 = 1 << 5;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & WAITPKG != 0
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn has_waitpkg() -> bool {
    false
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn rest() {
    // The light state (C0.1), from which a core is back at once.
    const LIGHT: u32 = 1;
    // SAFETY: called where `has_waitpkg` has found the instruction; it reads registers alone, and the system bounds how
    // long it rests.
    unsafe {
        let until = std::arch::x86_64::_rdtsc() + REST_TICKS;
        std::arch::asm!(
            "tpause {state:e}",
            state = in(reg) LIGHT,
            in("eax") until as u32,
            in("edx") (until >> 32) as u32,
            options(nomem, nostack),
        );
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn rest() {
    unreachable!("this processor has no such instruction")
}
