//! A damaged or forged image is mounted, read, used, closed and mounted again: nothing may panic, hang or take
//! memory without bound, and where recovery has looked at it, new files may not change old ones.
#![no_main]

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use lodestone::fs::{Fs, OpenOptions};
use lodestone::sim::media::SimMedia;
use lodestone_fuzz::edit::{self, Edit};
use lodestone_fuzz::image::Base;
use lodestone_fuzz::visit;

#[derive(Debug, Arbitrary)]
struct Input {
    base: Base,
    power_lost: bool,
    read_only: bool,
    edits: Vec<Edit>,
}

fuzz_target!(|input: Input| {
    let mut image = input.base.image().to_vec();
    edit::apply(&mut image, &input.edits);
    let options = OpenOptions {
        no_ticker: true,
        power_lost: input.power_lost,
        read_only: input.read_only,
        ..OpenOptions::default()
    };
    let media = SimMedia::new(image, input.base.domain());
    let _ = Fs::probe(&media);
    let Ok(fs) = Fs::open(media, &options) else { return };
    let before = visit::look(&fs);
    // A checkpoint is believed, and the logs are not held against it: where they disagree, as they never do unless
    // somebody changed one of them, blocks may have two owners.
    let is_believed = fs.open_report().was_clean && !input.edits.is_empty();
    let added = visit::add(&fs, is_believed);
    let after = visit::look(&fs);
    for (ino, crc) in before.iter().filter(|_| !is_believed) {
        let same = after.get(ino).is_none_or(|now| now == crc);
        assert!(same || added.iter().any(|a| a.0 == *ino), "a new file changed inode {ino}");
    }
    visit::change(&fs);
    let Some(media) = visit::close(fs) else { return };
    if let Ok(fs) = Fs::open(media, &options) {
        visit::look(&fs);
        visit::close(fs);
    }
});
