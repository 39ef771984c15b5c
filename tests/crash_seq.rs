//! Every sequence of one operation (ACE's set), with power failing at each of its fences, in every domain and data mode.
//!
//! The gate has `lode crash` do the same, further, on all kinds of pools whose files are overwritten by copies, and on new ones
//! in place; so here are the others, and one of those with our assertions.

use lodestone::fs::DataMode;
use lodestone::media::Domain;
use lodestone::sim::explore::Bounds;
use lodestone::sim::run::{Copier, Effort, Image, Place, Plan, run};
use lodestone::sim::workload;

/// A new pool whose files are overwritten by copies, and one that was not closed whose files are overwritten in place.
fn both(domain: Domain) {
    let place = Place { domain, data: DataMode::Cow, image: Image::Fresh, copier: Copier::Cpu };
    hold(vec![place, Place { data: DataMode::InPlace, image: Image::Crashed, ..place }]);
}

fn in_place(image: Image) {
    for domain in [Domain::Memory, Domain::CpuCache, Domain::PageCache] {
        hold(vec![Place { domain, data: DataMode::InPlace, image, copier: Copier::Cpu }]);
    }
}

fn hold(places: Vec<Place>) {
    let bounds = Bounds { leaves_max: 256, lane_states: 2, seed: 1 };
    hold_by(places, Effort { bounds, ..Effort::default() });
}

fn hold_by(places: Vec<Place>, effort: Effort) {
    let domain = places[0].domain;
    let plan = Plan {
        places,
        count: workload::count(1),
        sequence: Box::new(|n| workload::sequence(1, n)),
        effort,
        threads: 1,
    };
    let report = run(&plan, &|_, _, _| true).unwrap_or_else(|e| panic!("{domain}: {e}"));
    for broken in &report.broken {
        println!("{broken}");
    }
    let tally = report.tally;
    println!("{domain}: {tally:?}");
    assert_eq!(tally.violations, 0, "promises were broken");
    assert!(tally.crash_points > tally.sequences && tally.states > tally.crash_points);
    assert_eq!(
        tally.adr_failed > 0,
        domain == Domain::Memory,
        "of ADR that failed {} pools opened",
        tally.adr_failed
    );
}

#[test]
fn one_operation_on_persistent_memory() {
    both(Domain::Memory);
}

#[test]
fn one_operation_with_caches_that_are_flushed() {
    both(Domain::CpuCache);
}

#[test]
fn one_operation_on_an_ordinary_file() {
    both(Domain::PageCache);
}

/// Of each page the disk has sectors of several moments.
#[test]
fn one_operation_on_an_ordinary_file_whose_pages_are_torn() {
    let place =
        Place { domain: Domain::PageCache, data: DataMode::Cow, image: Image::Fresh, copier: Copier::Cpu };
    let bounds = Bounds { leaves_max: 32, lane_states: 2, seed: 1 };
    let crashed = Place { data: DataMode::InPlace, image: Image::Crashed, ..place };
    hold_by(vec![place, crashed], Effort { bounds, torn_pages: true, ..Effort::default() });
}

/// Names are withdrawn where a removal finds no room for its record.
#[test]
fn one_operation_where_removals_find_no_room() {
    in_place(Image::Crammed);
}

/// The inode table gives its end back where there is no other room.
#[test]
fn one_operation_where_the_inode_table_has_what_it_does_not_need() {
    in_place(Image::Grown);
}

/// As where checksums are slow.
#[test]
fn one_operation_whose_data_is_fenced_before_its_record() {
    let place =
        Place { domain: Domain::Memory, data: DataMode::Cow, image: Image::Fresh, copier: Copier::CpuFenced };
    hold(vec![place, Place { data: DataMode::InPlace, image: Image::Crashed, ..place }]);
}

#[test]
fn one_operation_whose_data_a_device_copies() {
    let place = Place {
        domain: Domain::Memory,
        data: DataMode::Cow,
        image: Image::Fresh,
        copier: Copier::PastCaches,
    };
    let by_alignment = Place { copier: Copier::ByAlignment, ..place };
    hold(vec![place, Place { copier: Copier::IntoCaches, data: DataMode::InPlace, ..place }, by_alignment]);
}

/// Its copies go on when the record is committed.
#[test]
fn one_operation_whose_data_a_late_device_copies() {
    let place =
        Place { domain: Domain::Memory, data: DataMode::Cow, image: Image::Fresh, copier: Copier::Late };
    let by_alignment = Place { copier: Copier::LateByAlignment, data: DataMode::InPlace, ..place };
    let striped = Place { copier: Copier::LateStriped, ..place };
    let in_pieces = Place { copier: Copier::LateInPieces, ..place };
    hold(vec![place, by_alignment, striped, in_pieces, Place { domain: Domain::PageCache, ..place }]);
}
