//! A uthread that runs off its stack ends the process with a line that names it.
//!
//! The guard below each stack raises SIGSEGV. The handler runs on a stack of its own, sees whether the address lies in
//! the guard of the fiber that this thread runs, says so, and aborts. Every other fault goes to who had the signal
//! before.

use std::fmt::Write;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Once;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Stack of the handler, in bytes.
const SIGNAL_STACK_BYTES: usize = 64 << 10;
/// Longest message, in bytes.
const MESSAGE_BYTES_MAX: usize = 256;

/// Who had the signal before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// While it lives, overflows on the calling thread are told.
pub struct Watch {
    /// A stack for handlers, where this thread had none.
    stack: Option<Box<[MaybeUninit<u8>]>>,
    /// It is taken from the thread that it was given to.
    this_thread: PhantomData<*const ()>,
}

impl Watch {
    pub fn new() -> Result<Watch> {
        install();
        let mut before = MaybeUninit::<libc::stack_t>::zeroed();
        // SAFETY: asks only, into a place of the right type, for which zeros are a valid value.
        let before = unsafe {
            libc::sigaltstack(std::ptr::null(), before.as_mut_ptr());
            before.assume_init()
        };
        if !before.ss_sp.is_null() && before.ss_flags & libc::SS_DISABLE == 0 {
            return Ok(Watch { stack: None, this_thread: PhantomData });
        }
        let mut memory = Box::new_uninit_slice(SIGNAL_STACK_BYTES);
        let ss_sp = memory.as_mut_ptr().cast();
        let stack = libc::stack_t { ss_sp, ss_flags: 0, ss_size: SIGNAL_STACK_BYTES };
        // SAFETY: the memory stays until `drop` has taken it from this thread.
        if unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) } != 0 {
            let e = std::io::Error::last_os_error();
            let message = format!("a worker gets no stack for signals: sigaltstack: {e}");
            return Err(Error::message(e.raw_os_error().unwrap_or(libc::EIO), "runtime::overflow", message));
        }
        Ok(Watch { stack: Some(memory), this_thread: PhantomData })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(memory) = self.stack.take() {
            let none = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
            // SAFETY: takes the memory from this thread before it goes.
            unsafe { libc::sigaltstack(&none, std::ptr::null_mut()) };
            drop(memory);
        }
    }
}

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: `sigaction` is plain data, for which zeros are a valid value. The handler is told of `BEFORE` before
        // it can run.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSEGV, std::ptr::null(), &mut before);
            BEFORE.get_or_init(|| before);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigsegv as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut());
        }
    });
}

// SAFETY: called by the kernel with what SA_SIGINFO promises. Takes no lock and allocates nothing.
unsafe extern "C" fn on_sigsegv(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's, valid during the handler; SIGSEGV has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let frame = super::current();
    // SAFETY: invariant 2 of the switch: the fiber of this thread is in the middle of an instruction.
    if let Some(frame) = unsafe { frame.as_ref() }
        && frame.guard.contains(&address)
    {
        let mut line = Line { bytes: [0; MESSAGE_BYTES_MAX], len: 0 };
        // What does not fit is left out.
        let _ = writeln!(
            line,
            "lode: {} overflowed its stack of {} bytes: give uthreads larger ones (LODE_STACK_BYTES)",
            frame.label, frame.stack_bytes
        );
        // SAFETY: the line's own bytes; both calls may be made by a handler.
        unsafe {
            libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len);
            libc::abort();
        }
    }
    // SAFETY: the kernel's arguments, handed on.
    unsafe { hand_on(signal, info, context) };
}

/// To who had the signal before.
///
/// # Safety
///
/// Within a handler, with its arguments.
unsafe fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get().map(|action| (action.sa_sigaction, action.sa_flags));
    // SAFETY: the kernel's, valid during the handler.
    let sent = unsafe { (*info).si_code } <= 0;
    match before {
        Some((handler, flags)) if handler != libc::SIG_DFL && handler != libc::SIG_IGN => {
            // SAFETY: whoever installed it said by its flags which of the two it is.
            unsafe {
                if flags & libc::SA_SIGINFO != 0 {
                    type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                    std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
                } else {
                    std::mem::transmute::<usize, unsafe extern "C" fn(libc::c_int)>(handler)(signal);
                }
            }
        }
        // Which a fault cannot be.
        Some((libc::SIG_IGN, _)) if sent => {}
        // The instruction is repeated, and the process ends as it would have without us.
        _ => {
            // SAFETY: plain data, for which zeros are a valid value; both calls may be made by a handler.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, std::ptr::null_mut());
                // What somebody sent comes from no instruction.
                if sent {
                    libc::raise(signal);
                }
            }
        }
    }
}

/// A message without allocation.
struct Line {
    bytes: [u8; MESSAGE_BYTES_MAX],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let len = text.len().min(room.len());
        room[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}
