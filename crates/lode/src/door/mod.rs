//! The doors through which the kernel brings requests of unmodified programs to a pool.
//!
//! A [`Door`] is one protocol. `service` holds what every protocol needs said in terms of none (whose
//! set-id bits fall, how a range is copied); `fuse` speaks FUSE through the `fuser` crate, `translate`
//! turns its types into ours; `connect` gets and gives back the kernel's end of a mount. Replacing FUSE over /dev/fuse (by FUSE over io_uring, or by our own reading of
//! the protocol) means another `Door`, and nothing else. `traffic` counts the bytes that go through.

pub mod connect;
pub mod fuse;
mod handed_out;
mod pages;
mod service;
pub mod traffic;
mod translate;

use std::io;

/// One way for requests to come in.
pub trait Door {
    /// Serves from now on, with all the threads that this takes. What it gives waits until the file system is unmounted or
    /// the connection is cut.
    fn serve(self) -> io::Result<impl FnOnce() -> io::Result<()> + Send + 'static>;
}

/// What the kernel may keep of what it was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Cache {
    /// As long as that is right. A mounted pool has no other user, so today it is `Always`.
    #[default]
    Auto,
    /// Nothing: every call reaches the file system, reads and writes bypass the page cache.
    None,
    /// Names, attributes and data, until the kernel itself changes them or needs the memory.
    Always,
}

/// How a door serves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads that take requests, at least one.
    pub threads: usize,
    pub cache: Cache,
    /// Bytes of the largest write request.
    pub write_bytes_max: u32,
    /// Changes but for the bytes of a write are durable when they are answered, on an ordinary file too.
    pub sync_names: bool,
    /// Every open is asked for, so that one for writing is refused where the kernel takes the mount for writable.
    pub asks_opens: bool,
    /// Copies have the class of their caller's I/O priority.
    pub class_by_priority: bool,
}
