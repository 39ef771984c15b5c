//! A damaged or forged image is checked and repaired: neither may panic, hang or take memory without bound, a check may
//! change nothing, and what a repair leaves is sound: it opens, is used and is sound still.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use lodestone::fs::{Fs, OpenOptions, check};
use lodestone::sim::media::SimMedia;
use lodestone_fuzz::edit::{self, Edit};
use lodestone_fuzz::image::Base;
use lodestone_fuzz::visit;

/// As `image` has it, whose corpus it shares.
#[derive(Debug, Arbitrary)]
struct Input {
    base: Base,
    power_lost: bool,
    repairs: bool,
    edits: Vec<Edit>,
}

fuzz_target!(|input: Input| {
    let mut image = input.base.image().to_vec();
    edit::apply(&mut image, &input.edits);
    let media = Arc::new(SimMedia::new(image.clone(), input.base.domain()));
    let _ = check::examine(media.clone(), input.power_lost, None);
    assert!(media.image() == image, "a check changed the pool");
    if !input.repairs {
        return;
    }
    let Ok(repaired) = check::repair(media.clone(), input.power_lost, None) else { return };
    assert!(repaired.after.is_clean(), "a repair left {:?}", repaired.after.findings);
    let options = OpenOptions { no_ticker: true, power_lost: input.power_lost, ..OpenOptions::default() };
    let fs = Fs::open(media, &options).expect("a repaired pool opens");
    visit::look(&fs);
    visit::add(&fs, false);
    visit::change(&fs);
    let Some(media) = visit::close(fs) else { return };
    let after = check::check(&media).expect("a closed pool is checked");
    assert!(after.is_clean(), "what was used after a repair has {:?}", after.findings);
});
