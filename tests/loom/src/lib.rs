//! The files of Lodestone in which threads share memory without a lock, built with loom's atomics: it runs each model through all
//! orders that C++'s memory model allows, weak ones too, up to so many forced switches. (shuttle, which has whole file systems,
//! knows sequentially consistent memory only: `src/sync/primitive.rs`.)
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p lodestone-loom --target-dir target/loom`. Without `--cfg loom` this is empty.

#![cfg(loom)]
#![allow(dead_code, unused_imports, reason = "models use a part of each file")]

mod account;
mod fs;
#[cfg(test)]
mod models;
mod mover;
mod sync;
mod wait;
