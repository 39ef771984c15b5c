//! A small pool for tests of applications, at the speed of the memory it lies in.

use std::sync::Arc;

use lodestone::fs::{Cred, Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions};

use super::app::{Desk, Shelf};
use super::slow::Slow;

const POOL_BYTES: u64 = 64 << 20;

pub struct Bed {
    pub shelf: Arc<Shelf>,
}

impl Bed {
    pub fn new() -> Bed {
        let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
        let media = Slow::new(Pool::memfd(POOL_BYTES, &options).unwrap(), None);
        let media = Fs::mkfs(media, &MkfsOptions::default()).unwrap();
        let fs = Fs::open(media, &OpenOptions::default()).unwrap();
        Bed { shelf: Arc::new(Shelf::new(fs, Cred::process(), 0)) }
    }

    pub fn read(&self, path: &str) -> Vec<u8> {
        let mut desk = Desk::default();
        desk.read(&self.shelf, path).unwrap();
        desk.input
    }
}
