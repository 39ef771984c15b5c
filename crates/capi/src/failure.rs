//! errno, and the sentence behind the last failure of each thread.
//!
//! The error is kept as it came and put into words only when somebody asks, so that an everyday ENOENT
//! costs no allocation.

use lodestone::Error;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

struct Last {
    /// The C function that failed.
    call: &'static str,
    error: Option<Error>,
    /// What `lode_last_error` and `lode_strerror` handed out.
    text: Option<CString>,
    errno_text: Option<CString>,
}

thread_local! {
    static LAST: RefCell<Last> = const {
        RefCell::new(Last { call: "", error: None, text: None, errno_text: None })
    };
}

/// What may do a lot when it goes, and leaves errno as a call has set it.
pub struct Quiet<T>(ManuallyDrop<T>);

impl<T> Quiet<T> {
    pub fn new(value: T) -> Quiet<T> {
        Quiet(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Quiet<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Quiet<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for Quiet<T> {
    fn drop(&mut self) {
        let errno = errno();
        // SAFETY: nobody uses it after this, and nobody else drops it.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        set_errno(errno);
    }
}

pub fn errno() -> c_int {
    // SAFETY: the C library gives every thread its errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets errno and remembers the sentence.
#[cold]
pub fn fail(call: &'static str, error: Error) {
    let errno = error.errno();
    // Not kept when the thread is already being torn down.
    let _ = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        last.call = call;
        last.error = Some(error);
    });
    set_errno(errno);
}

/// Remembers a sentence about a call that went well.
#[cold]
pub fn remark(call: &'static str, sentence: String) {
    // As above.
    let _ = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        last.call = call;
        last.error = Some(Error::message(0, "capi::failure", sentence));
    });
}

/// The last failure of this thread as one sentence: which function, what, and where there is more to
/// say, on which file and what to do about it. Also why lode_open_pool or lode_media_open did not use
/// the profile or the engine that it was to use. Empty where
/// nothing has failed yet. Valid until the next call of this function in the same thread. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn lode_last_error() -> *const c_char {
    text(|last| {
        let sentence = match &last.error {
            Some(error) => format!("{}: {error}", last.call),
            None => String::new(),
        };
        last.text.insert(c_string(&sentence)).as_ptr()
    })
}

/// What an errno value means, as strerror(3) says it, safe to call from several threads. Valid until the
/// next call of this function in the same thread. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn lode_strerror(errnum: c_int) -> *const c_char {
    text(|last| {
        let mut buffer = [0 as c_char; 256];
        // SAFETY: strerror_r writes at most the given length and closes it with a NUL.
        let known = unsafe { libc::strerror_r(errnum, buffer.as_mut_ptr(), buffer.len()) } == 0;
        let sentence = match known {
            // SAFETY: as above.
            true => unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_owned(),
            false => c_string(&format!("Unknown error {errnum}")),
        };
        last.errno_text.insert(sentence).as_ptr()
    })
}

/// The version of the library, "MAJOR.MINOR.PATCH". Never NULL, valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn lode_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no NUL"),
        };
    VERSION.as_ptr()
}

/// A text that lives in the thread's record, or an empty one when the thread is being torn down.
fn text(make: impl FnOnce(&mut Last) -> *const c_char) -> *const c_char {
    LAST.try_with(|last| make(&mut last.borrow_mut())).unwrap_or(c"".as_ptr())
}

fn c_string(sentence: &str) -> CString {
    let bytes: Vec<u8> = sentence.bytes().filter(|&b| b != 0).collect();
    CString::new(bytes).expect("without NULs")
}
