//! The C interface: liblodestone.so, liblodestone.a and `include/lodestone.h`.
//!
//! Every function is a thin skin over [`lodestone::fs::files::Files`], over
//! [`lodestone::mover::copies::Copies`], or over [`lodestone::wsp::heap::Heap`]: it checks pointers, turns C types into Rust ones and an
//! [`Error`](lodestone::Error) into -1 and errno. The header is made from these files by cbindgen;
//! `tests/header.rs` checks that the committed one is current, so doc comments here speak to C programmers.
//!
//! Nothing unwinds into C: a panic becomes EIO, and the pool answers EIO from then on, because what the
//! panic left behind in memory cannot be trusted. A pool that crossed fork() answers EBADF in the child,
//! which shares the memory of the media but not the locks.
//!
//! Files: `handle` what C holds, `pools` open pools, `media` copies without a pool, `heap` persistent heaps, `memory` allocations on slow
//! memory, `profile` what engines are
//! worth, `call` the boundary, `failure` errno and the sentence behind it, `convert` C types, `file`,
//! `tickets`, `names`, `attrs`, `xattr`, `dir`, `uthread` the functions by theme.

// The names of the C interface are C's.
#![allow(non_camel_case_types)]
// What a caller owes is the same in every function and is said once, at the head of the header.
#![allow(clippy::missing_safety_doc)]

mod attrs;
mod call;
mod convert;
mod dir;
mod failure;
mod file;
mod handle;
mod heap;
mod media;
// Its jemalloc takes longer to build than all else that a fuzzer needs, and no fuzzer calls it.
#[cfg(not(fuzzing))]
mod memory;
mod names;
mod pools;
mod profile;
mod tickets;
mod uthread;
mod xattr;
