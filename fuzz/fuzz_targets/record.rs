//! Records of any content with a right checksum, behind the logs of one inode of each type; and the decoders on
//! any bytes at all.
#![no_main]

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use lodestone::fs::format::*;
use lodestone::fs::{Fs, OpenOptions};
use lodestone::media::{LINE, crc32c};
use lodestone::sim::media::SimMedia;
use lodestone_fuzz::edit::{self, Appended, Edit};
use lodestone_fuzz::image::Base;
use lodestone_fuzz::visit;

#[derive(Debug, Arbitrary)]
struct Input {
    on_file: bool,
    power_lost: bool,
    /// Of inodes 0 (the table) to 4.
    records: Vec<(u8, Appended)>,
    raw: [u8; LINE],
}

fuzz_target!(|input: Input| {
    decode(&input.raw);
    let base = if input.on_file { Base::FreshFile } else { Base::Fresh };
    let mut image = base.image().to_vec();
    let edits = input.records.into_iter().map(|(ino, record)| Edit::Append { ino: ino % 5, record });
    edit::apply(&mut image, &edits.collect::<Vec<_>>());
    let options = OpenOptions { no_ticker: true, power_lost: input.power_lost, ..OpenOptions::default() };
    let Ok(fs) = Fs::open(SimMedia::new(image, base.domain()), &options) else { return };
    visit::look(&fs);
    visit::change(&fs);
    visit::close(fs);
});

/// As it is, and with the checksum that makes it count.
fn decode(raw: &[u8; LINE]) {
    let key = [0; 16];
    if let Some(head) = Head::decode(raw) {
        assert!((1..=RECORD_LINES_MAX).contains(&head.lines) && head.epoch >> 48 == 0);
    }
    let mut line = *raw;
    let crc = crc32c(&line[4..], crc32c(&key, 0));
    put32(&mut line, 0, crc);
    if let Some(state) = State::decode(&line, &key) {
        assert_eq!(State::decode(&state.encode(&key), &key), Some(state));
    }
    let mut line = *raw;
    line[44..48].fill(0);
    let (key_crc, ino) = (crc32c(&key, 0), get32(raw, 40));
    let crc = crc32c(&line[4..48], key_crc);
    put32(&mut line, 0, crc);
    let header = SlotHeader::decode(&line, key_crc, ino).expect("its checksum is right");
    let words = header.encode(key_crc, ino);
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    assert_eq!(bytes[..44], line[..44]);
    if let Some(addr) = unpack_log_head(get64(raw, 0)) {
        assert_eq!(pack_log_head(addr), get64(raw, 0));
    }
    let time = unpack_time(get64(raw, 8));
    assert_eq!(unpack_time(pack_time(time)), time);
}
