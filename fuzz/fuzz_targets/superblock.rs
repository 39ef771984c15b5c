//! The label, the superblock and the state lines of a pool in a file, forged, and the file cut short or too long:
//! through the production media.
#![no_main]

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use lodestone::fs::format::{BLOCK, put32};
use lodestone::fs::{Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions, crc32c};
use lodestone_fuzz::edit::{self, Edit, Value};
use lodestone_fuzz::visit;

const POOL_BYTES: u64 = 1 << 20;

#[derive(Debug, Arbitrary)]
struct Input {
    label: Vec<(u16, Value)>,
    /// The label's checksum stays wrong.
    label_broken: bool,
    edits: Vec<Head>,
    length: Length,
    read_only: bool,
    domain: Option<bool>,
}

#[derive(Debug, Arbitrary)]
enum Length {
    Right,
    Bytes(u32),
    Blocks(u8),
}

#[derive(Debug, Arbitrary)]
enum Head {
    Super { copies: u8, at: u8, value: Value },
    State { line: u8, at: u8, value: Value },
    Bytes { at: u16, value: Value },
}

/// A file without a name on any disk.
static FILE: LazyLock<OwnedFd> = LazyLock::new(|| {
    rustix::fs::memfd_create("lodestone-fuzz", rustix::fs::MemfdFlags::empty()).expect("memory")
});

fn path() -> PathBuf {
    format!("/proc/self/fd/{}", FILE.as_raw_fd()).into()
}

static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    rustix::fs::ftruncate(&*FILE, POOL_BYTES).expect("memory");
    let pool = Pool::create(&[path()], Some(POOL_BYTES), &PoolOptions::default()).expect("a pool is made");
    drop(Fs::mkfs(pool, &MkfsOptions::default()).expect("a file system is made"));
    std::fs::read(path()).expect("it is there")
});

fuzz_target!(|input: Input| {
    let mut image = IMAGE.clone();
    for (at, value) in &input.label {
        value.put(&mut image[..BLOCK], *at as usize % BLOCK);
    }
    if !input.label_broken {
        image[12..16].fill(0);
        let crc = crc32c(&image[..BLOCK], 0);
        put32(&mut image, 12, crc);
    }
    let edits = input.edits.into_iter().map(|head| match head {
        Head::Super { copies, at, value } => Edit::Super { copies, at, value },
        Head::State { line, at, value } => Edit::State { line, at, value },
        Head::Bytes { at, value } => Edit::Bytes { at: at as u32 % (3 * BLOCK as u32), value },
    });
    edit::apply(&mut image, &edits.collect::<Vec<_>>());
    match input.length {
        Length::Right => {}
        Length::Bytes(n) => image.resize(n as usize % (2 * POOL_BYTES as usize), 0),
        Length::Blocks(n) => image.truncate(n as usize * BLOCK),
    }
    std::fs::write(path(), &image).expect("memory");
    let assume = input.domain.map(|durable| if durable { Domain::Memory } else { Domain::PageCache });
    let options = PoolOptions { read_only: input.read_only, assume, ..PoolOptions::default() };
    let Ok(pool) = Pool::open(&path(), &options) else { return };
    let _ = Fs::probe(&pool);
    let options = OpenOptions { read_only: input.read_only, no_ticker: true, ..OpenOptions::default() };
    let Ok(fs) = Fs::open(pool, &options) else { return };
    visit::look(&fs);
    visit::add(&fs);
    visit::close(fs);
    if input.read_only {
        assert!(std::fs::read(path()).expect("it is there") == image, "a pool opened for reading changed");
    }
});
