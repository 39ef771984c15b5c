//! SIGBUS on media turned into an error of the one call that hit it.
//!
//! A load from poisoned memory, from behind the end of a file that somebody cut, or from a hole that a
//! full host cannot fill, raises SIGBUS. Every access to media runs inside a routine of `copy`, whose
//! code lies in one section and needs no clean-up: the handler lets it return at once, with the fault
//! address in its second result register. Any other SIGBUS goes to the handler that was there before,
//! or kills the process as it would have without us.
//!
//! The handler runs at any instruction of any thread, so it takes no lock and calls nothing that may:
//! mappings are found in a fixed table of atomics.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::copy;
use crate::limits::REGIONS_MAPPED_MAX;

/// A mapped range. `end` is zero while the slot is free or half written; `start` is claimed first and
/// released last.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
}

static SLOTS: [Slot; REGIONS_MAPPED_MAX] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; REGIONS_MAPPED_MAX];

/// A range of addresses whose faults are caught, until dropped.
#[derive(Debug)]
pub(super) struct Registration {
    slot: usize,
}

/// None where the process has mapped [`REGIONS_MAPPED_MAX`] regions already.
pub(super) fn register(start: usize, bytes: usize) -> Option<Registration> {
    install();
    let claimed = |s: &Slot| s.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let slot = SLOTS.iter().position(claimed)?;
    // Release: who sees the end sees the start.
    SLOTS[slot].end.store(start + bytes, Ordering::Release);
    Some(Registration { slot })
}

impl Drop for Registration {
    fn drop(&mut self) {
        SLOTS[self.slot].end.store(0, Ordering::Release);
        SLOTS[self.slot].start.store(0, Ordering::Release);
    }
}

/// Whether an address lies in a registered mapping. A slot that another thread is just changing may be
/// missed or not; the calling thread's own mappings are stable while it uses them.
fn is_media(address: usize) -> bool {
    SLOTS.iter().any(|s| {
        let end = s.end.load(Ordering::Acquire);
        address < end && s.start.load(Ordering::Acquire) <= address
    })
}

/// The action that was there before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Puts the handler in place, once per process, before the first mapping is used.
fn install() {
    PREVIOUS.get_or_init(|| {
        // SAFETY: `sigaction` is plain data, for which zeros are a valid value.
        let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a null new action only reads the old one into `previous`.
        unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) };
        previous
    });
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        // On the alternate stack, because a coroutine's stack may be short; not masking others.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: the action is complete and its handler lives as long as the program. PREVIOUS is set,
        // so that the handler may run from now on.
        unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
    });
}

/// # Safety
/// Called by the kernel, with a valid `info` and `context`.
unsafe extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; its address field is set for every SIGBUS with a
    // positive code.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 && is_media(address) {
        // A page that went bad and that nobody has read yet: the load that does will say so.
        if code == libc::BUS_MCEERR_AO {
            return;
        }
        // SAFETY: the context is the interrupted thread's.
        if unsafe { copy::return_fault(context, address) } {
            return;
        }
    }
    // SAFETY: the kernel's own arguments, passed on.
    unsafe { chain(signal, info, context) };
}

/// Does what would have happened without us.
///
/// # Safety
/// As [`on_sigbus`].
unsafe fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else { return };
    // SAFETY: valid by contract.
    let is_raised_by_hardware = unsafe { (*info).si_code > 0 };
    match previous.sa_sigaction {
        libc::SIG_IGN if !is_raised_by_hardware => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: the default action; the fault repeats on return, or the signal is sent again,
            // and either kills the process with the right status.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, std::ptr::null_mut());
                if !is_raised_by_hardware {
                    libc::raise(signal);
                }
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the address is a function of these three arguments.
            let handler: unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            // SAFETY: what the kernel would have called it with.
            unsafe { handler(signal, info, context) };
        }
        handler => {
            // SAFETY: without SA_SIGINFO the address is a function of the signal's number.
            let handler: unsafe extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            // SAFETY: as above.
            unsafe { handler(signal) };
        }
    }
}
