//! The label, the superblock and the state lines of a pool in a file, forged, and the file cut short or too long:
//! through the production media.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use lodestone::fs::format::{BLOCK, put32};
use lodestone::fs::{Fs, MkfsOptions, OpenOptions};
use lodestone::media::{Domain, Pool, PoolOptions, crc32c};
use lodestone_fuzz::edit::{self, Edit, Value};
use lodestone_fuzz::{pool_path, visit};

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

static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let pool = Pool::create(&[pool_path().to_owned()], Some(POOL_BYTES), &PoolOptions::default())
        .expect("a pool is made");
    drop(Fs::mkfs(pool, &MkfsOptions::default()).expect("a file system is made"));
    std::fs::read(pool_path()).expect("it is there")
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
    std::fs::write(pool_path(), &image).expect("there is room");
    let assume = input.domain.map(|durable| if durable { Domain::Memory } else { Domain::PageCache });
    let options = PoolOptions { read_only: input.read_only, assume, ..PoolOptions::default() };
    let Ok(pool) = Pool::open(pool_path(), &options) else { return };
    let _ = Fs::probe(&pool);
    let options = OpenOptions { read_only: input.read_only, no_ticker: true, ..OpenOptions::default() };
    let Ok(fs) = Fs::open(pool, &options) else { return };
    visit::look(&fs);
    // A forged state line may name a checkpoint of old, see the target `image`.
    let is_believed = fs.open_report().was_clean;
    visit::add(&fs, is_believed);
    visit::close(fs);
    if input.read_only {
        assert!(
            std::fs::read(pool_path()).expect("it is there") == image,
            "a pool opened for reading changed"
        );
    }
});
