//! The classes of bugs that were found in published file systems for persistent memory, and the traps of this
//! design: for each the sequences in which it would show, with every failure explored.
//!
//! A test fails where a promise is broken, and also where its failures were not reached. That each of these bugs
//! is noticed once it is there is shown by planting them (`docs/crash.md`).

use lodestone::fs::DataMode;
use lodestone::media::Domain;
use lodestone::sim::explore::Bounds;
use lodestone::sim::run::{Copier, Effort, Image, Place, Start, Tally, sequence};
use lodestone::sim::workload;

const PM: &[Domain] = &[Domain::Memory, Domain::CpuCache];
const ALL: &[Domain] = &[Domain::Memory, Domain::CpuCache, Domain::PageCache];

/// Runs sequences, one after an empty line, and gives what was looked at.
fn explore(domains: &[Domain], image: Image, text: &str) -> Tally {
    explored(domains, DataMode::Cow, image, false, text)
}

fn explored(domains: &[Domain], data: DataMode, image: Image, twice: bool, text: &str) -> Tally {
    let mut total = Tally::default();
    for &domain in domains {
        let start = Start::new(Place { domain, data, image, copier: Copier::Cpu }).unwrap();
        for each in workload::parse(text).unwrap() {
            let effort = Effort {
                bounds: Bounds { leaves_max: 1 << 10, lane_states: 4, seed: 1 },
                twice,
                ..Effort::default()
            };
            let (tally, broken) = sequence(&start, &each, &effort);
            assert!(broken.is_none(), "{}", broken.unwrap());
            assert!(tally.crash_points > 1 && tally.states > tally.crash_points, "nothing failed: {tally:?}");
            total += tally;
        }
    }
    total
}

/// Class 1: a flush is missing. Whatever was acknowledged is there although nothing in doubt survives.
#[test]
fn class_1_every_store_of_a_new_directory_is_flushed() {
    explore(PM, Image::Fresh, "| mkdir A\n\n| mkdir A\n| mkdir A/C\n\n| mkdir A\n| create A/foo");
}

/// Class 2: a fence is missing at return, and the failure in the *next* operation loses an acknowledged one.
#[test]
fn class_2_an_acknowledged_write_survives_a_failure_in_the_next_operation() {
    let text = "foo | append foo 65\n| create bar\n\nfoo:9000 | write foo 13 7\n| write foo 8191 9\n\n\
                foo:9000 | write foo 0 4096\n| unlink foo\n\n| create foo\n| link foo bar";
    explore(PM, Image::Fresh, text);
}

/// Class 3: the unaligned edges of a non-temporal copy are left in the cache.
#[test]
fn class_3_the_edges_of_a_copy_are_durable() {
    let sizes = [1, 7, 9, 63, 65, 4095, 4097];
    let one =
        |at: u64, len: usize| format!("foo:9000 | write foo {at} {len}\n\nfoo:{at} | append foo {len}\n\n");
    let text: String =
        sizes.iter().zip([3, 61, 4093, 4097, 127, 1, 65]).map(|(len, at)| one(at, *len)).collect();
    explore(PM, Image::Fresh, &text);
    explored(PM, DataMode::InPlace, Image::Fresh, false, &text);
}

/// Class 4: a rename shows both names, or none.
#[test]
fn class_4_a_rename_is_under_one_name() {
    let text = "foo:100 !bar | rename foo bar\n\nfoo:100 bar:5000 | rename foo bar\n\n\
                A/foo:100 B/bar:5000 | rename A/foo B/bar\n\nA/C/foo B/ !B/C | rename A/C B/C\n\n\
                A/foo B/bar | rename A/foo B/bar exchange";
    explore(ALL, Image::Fresh, text);
    explore(ALL, Image::Cleaning, text);
}

/// Class 5: link counts or directory entries that are updated in place.
#[test]
fn class_5_links_and_names_change_together() {
    let text = "foo A/ !A/bar | link foo A/bar\n\nfoo bar=foo | unlink foo\n\nA/ !A/C | mkdir A/C\n\n\
                A/C/! | rmdir A/C\n\nfoo bar=foo | rename foo A\n\nA/C/ B/ !B/C | rename A/C B/C";
    explore(ALL, Image::Fresh, text);
}

/// Class 6: recovery depends on what was only in memory, or on an order. Pools that were never closed are
/// recovered, used, and recovered again.
#[test]
fn class_6_recovery_needs_nothing_but_the_media() {
    let text = "A/foo:9000 | unlink A/foo\n!bar | create bar\n\nbar !A/bar | rename bar A/bar\n| reopen\n\n| reopen\n| mkdir B";
    explored(ALL, DataMode::Cow, Image::Crashed, true, text);
}

/// Class 7: primary, replica and checksum out of step: the state line has two places, written at each tick,
/// opening and closing.
#[test]
fn class_7_the_copies_of_the_state_line_agree() {
    let tally = explored(
        ALL,
        DataMode::Cow,
        Image::Reused,
        true,
        "foo | tick\n\n| create foo\n| reopen\n\n| create foo ; sync ; create bar",
    );
    assert!(tally.recovery_points > 0, "{tally:?}");
}

/// Class 8: truncate and orphans: a number is used again while its last owner is still on a list; a file that
/// shrank grows.
#[test]
fn class_8_truncates_and_orphans_leave_nothing() {
    let text = "foo:9000 | open 0 foo ; unlink foo ; truncate @0 100 ; close 0 ; create bar ; append bar 65\n\n\
                foo:9000 | truncate foo 100 ; truncate foo 9000\n\nA/ | tmpfile 0 A ; append @0 5000 ; close 0 ; create foo\n\n\
                foo:9000 | truncate foo 4097 ; append foo 4097";
    explore(ALL, Image::Fresh, text);
    explore(ALL, Image::Reused, text);
}

/// Class 9: "atomic" updates wider than 8 bytes: non-temporal words survive in any subset.
#[test]
fn class_9_no_update_relies_on_more_than_a_word() {
    let tally = explore(
        &[Domain::Memory],
        Image::Fresh,
        "foo:9000 | write foo 0 300\n\n| symlink ~300 ln\n\nfoo | setxattr foo user.a 1000",
    );
    assert!(tally.states > 100, "{tally:?}");
}

/// Class 10: replay is not idempotent, or gives other inode numbers. Recovery is cut short at each of its fences.
#[test]
fn class_10_recovery_can_be_repeated() {
    let text = "foo:9000 | write foo 13 700\n\nA/foo B/bar | rename A/foo B/bar\n\nfoo A/ | rename foo A/bar ; create foo";
    let tally = explored(ALL, DataMode::Cow, Image::Fresh, true, text);
    assert!(tally.recovery_states > tally.distinct, "{tally:?}");
}

/// Trap: what a killed process left in a cache is seen by the next one, which decides by it, and power takes it then: a log's head,
/// a name that was withdrawn, a completion word.
#[test]
fn trap_what_recovery_decides_by_stays() {
    let heads = "foo:9000 | churn foo 290\n\nfoo A/ A/bar=foo | churn A 290";
    let removals = "foo | unlink foo\n\nfoo:100 bar:5000 | rename foo bar\n\nA/C/! | rmdir A/C";
    for (image, text) in [(Image::Fresh, heads), (Image::Cleaning, removals), (Image::Crammed, removals)] {
        let tally = explored(ALL, DataMode::Cow, image, true, text);
        assert!(tally.kills > tally.sequences, "{tally:?}");
    }
}

/// Trap: a fixed file, which somebody maps past the file system, is whole and fixed or not at all; and nobody else has its
/// blocks, whatever fails when.
#[test]
fn trap_fixed_files_are_whole_and_keep_their_blocks() {
    let text = "foo | fix foo 8192\n\n| create foo ; fix foo 12288 ; sync ; create bar ; append bar 9000\n\n\
                foo | fix foo 4096 ; churn foo 60\n\nfoo | fix foo 8192 ; unfix foo ; unlink foo ; create bar ; append bar 9000\n\n\
                foo:9000 bar | unlink foo ; fix bar 12288 ; reopen ; write bar 0 64";
    explore(ALL, Image::Fresh, text);
    explore(ALL, Image::Reused, text);
    explored(ALL, DataMode::InPlace, Image::Crashed, true, "foo | fix foo 8192 ; sync ; create bar");
}

/// Trap: a tombstone is cleaned away before what it cancels, or before a rename that waits for it.
#[test]
fn trap_tombstones_outlive_what_they_cancel() {
    let text = "A/foo B/ !B/bar | rename A/foo B/bar ; create A/foo ; unlink A/foo ; churn A 60\n\n\
                foo | unlink foo ; churn . 60\n\nA/foo B/bar | rename A/foo B/bar exchange ; churn B 60";
    explore(PM, Image::Cleaning, text);
}

/// Trap: a name is used again after a rename: the old name's end is matched by number, never by name.
#[test]
fn trap_a_new_file_under_a_name_that_moved() {
    let text = "foo A/ !A/bar | rename foo A/bar ; create foo\n\nfoo !bar | rename foo bar ; create foo\n\n\
                A/foo B/ !B/foo | rename A/foo B/foo ; mkdir A/foo";
    explore(ALL, Image::Fresh, text);
}

/// Trap: a directory's record adopts an inode that was reused.
#[test]
fn trap_a_record_never_adopts_a_reused_inode() {
    explore(
        ALL,
        Image::Reused,
        "foo bar=foo | unlink foo ; unlink bar ; create A ; link A foo\n\nA/! | rmdir A ; create foo",
    );
}

/// Trap: an in-place store to data whose record is still in doubt, which is verified by it.
#[test]
fn trap_a_store_in_place_does_not_void_the_record_before() {
    let text = "foo:9000 | write foo 0 4096\n| write foo 10 9\n\nfoo | append foo 100\n| write foo 10 9\n\n\
                foo:9000 | write foo 13 9\n| write foo 17 9\n\nfoo:5000 | append foo 100\n| truncate foo 5050\n| append foo 7";
    explore(ALL, Image::Fresh, text);
    explored(ALL, DataMode::InPlace, Image::Fresh, false, text);
}

/// Trap: an epoch is named while an operation that began in it is not through.
#[test]
fn trap_a_named_epoch_is_complete() {
    explore(
        ALL,
        Image::Fresh,
        "| create foo ; tick ; create bar\n\nA/foo B/ | rename A/foo B/bar ; tick ; unlink B/bar",
    );
}

/// Trap: bytes between a smaller size and a later one read as zeros.
#[test]
fn trap_what_a_truncate_cut_off_stays_away() {
    let text = "foo:9000 | truncate foo 100 ; truncate foo 9000\n\nfoo:9000 | truncate foo 100 ; write foo 8000 9\n\n\
                foo:9000 | truncate foo 100 ; fallocate foo reserve 0 9000\n\nfoo:9000 | truncate foo 4097 ; append foo 1 ; write foo 5000 1";
    explore(ALL, Image::Fresh, text);
}

/// Trap: a block that was freed is used again while the record that freed it is in doubt.
#[test]
fn trap_a_freed_block_is_not_used_too_early() {
    let text = "foo:9000 bar | fallocate foo punch 0 8192 ; write bar 0 8192\n\n\
                foo:9000 bar | unlink foo ; write bar 0 9000\n\nfoo:9000 | write foo 0 4096 ; write foo 0 4096\n\n\
                foo%user.big:5000 | removexattr foo user.big ; write foo 0 5000";
    explore(ALL, Image::Fresh, text);
    explore(ALL, Image::Full, text);
}

/// Found by pairs: a directory that was removed took with it the change time of a file that had lost a name in it.
#[test]
fn found_a_removed_directory_takes_no_change_time_with_it() {
    let text = "foo A/ A/bar=foo | unlink A/bar ; rmdir A\n\nfoo A/ A/bar=foo B/ | unlink A/bar ; rename B A\n\n\
                foo A/ A/bar=foo | unlink A/bar\n| rmdir A\n\nfoo A/ A/bar=foo | unlink foo ; unlink A/bar";
    explore(ALL, Image::Fresh, text);
}

/// Found by threads: cleaning a directory's log lost the change time of a file that had lost a name in it, at once
/// where another file had taken the name.
#[test]
fn found_a_cleaned_directory_takes_no_change_time_with_it() {
    explore(ALL, Image::Cleaning, "A/foo A/bar B/bar=A/bar | rename A/foo B/bar");
    let text = "foo A/ A/bar=foo | unlink A/bar ; churn A 600\n\n\
                foo bar A/ A/bar=foo | rename bar A/bar ; churn A 600";
    explore(ALL, Image::Fresh, text);
}

/// Found by a long sequence on an ordinary file: after a sync and a power loss an entry was back in the directory that
/// it had left, because the one it had left for was gone; that had been removed in between.
#[test]
fn found_a_synced_rename_stays_when_its_directory_was_removed() {
    let text = "A/foo B/bar | rename A/foo B/bar exchange ; unlink A/foo ; rmdir A ; tick\n\n\
                B/bar A/ !A/foo | rename B/bar A/foo ; unlink A/foo ; rmdir A ; tick\n\n\
                B/bar A/ C/ !A/foo !C/foo | rename B/bar A/foo ; rename A/foo C/foo ; rmdir A ; tick\n\n\
                B/bar A/C/ !A/C/foo | rename B/bar A/C/foo ; unlink A/C/foo ; rmdir A/C ; rmdir A ; tick";
    explore(ALL, Image::Fresh, text);
}

/// Found by three operations on an ordinary file: the removal of the directory that the entry had left for was on media,
/// what had emptied it was not; so the entry was kept in reach, at the expense of the synced rename.
#[test]
fn found_a_synced_rename_stays_when_what_emptied_its_directory_is_lost() {
    let text = "A/C/ B/C/! bar | rename A/C B/C ; fsync bar ; rmdir B/C ; rmdir B\n\n\
                A/C/foo B/C/! | rename A/C B/C\nfoo | fsync foo\nA/foo B/! | rename A B";
    explore(ALL, Image::Fresh, text);
}

/// Found by failures after recoveries: a log that had been lost from its link on was linked to the same place again, and a
/// second failure took the new records and left the link; the old ones counted.
#[test]
fn found_what_a_failure_took_does_not_come_back_behind_a_new_link() {
    let text = "A/foo B/ !B/foo | rename A/foo B/foo ; create A/foo";
    for image in [Image::Full, Image::Reused] {
        explored(&[Domain::PageCache], DataMode::Cow, image, true, text);
    }
}

/// Found by failures in recoveries: repairs took blocks of a directory that had been removed, and the next recovery, which
/// decides anew whether a rename out of it counts, did not find the other half.
#[test]
fn found_repairs_leave_alone_what_the_next_recovery_asks() {
    let text = "A/C/foo B/C/! bar | rename A/C B/C ; unlink B/C/foo ; rmdir B/C ; rename A B";
    for image in [Image::Full, Image::Reused] {
        explored(&[Domain::PageCache], DataMode::Cow, image, true, text);
    }
}

/// Found by reading: the directory that an entry had left for was out of reach, since it, or one above it, was moved or removed
/// after that, and half of that was lost. The synced rename was undone instead of what had come after it.
#[test]
fn found_a_synced_rename_stays_when_its_directory_went_on() {
    let text = "A/foo B/C/ !B/C/foo !D | rename A/foo B/C/foo ; fsync B/C/foo ; mkdir D ; rename B/C D/C\n\n\
                A/ B/ C/ A/a/ B/b/ | rename A/a B/b/a ; fsync A ; rename B/b/a C/a ; rename B/b C/a/b\n\n\
                A/foo B/z B/y B/C/d/ E/ !E/d | rename A/foo B/C/d/foo ; fsync B/z ; rename B/C/d E/d\n| rmdir B/C";
    explore(ALL, Image::Fresh, text);
}

/// Found by reading: what an exchange put in the place of a directory passed for its removal.
#[test]
fn found_an_exchange_is_no_removal() {
    let text = "A/ B/ A/f B/d/ C/x E/ !E/x | rename B/d A/f exchange ; rename C/x A/f/x ; fsync A ; rename A/f/x E/x\n\
                | rmdir A/f\n\n\
                A/ A/f A/d/ C/x E/ !E/x | rename A/d A/f exchange ; rename C/x A/f/x ; fsync A ; rename A/f/x E/x\n\
                | rmdir A/f";
    explore(ALL, Image::Fresh, text);
}

/// Found by reading: the removal of a directory was on media and what had emptied it was not; what had been in it was nowhere.
#[test]
fn found_what_left_a_removed_directory_is_somewhere() {
    let text = "A/u A/v A/w A/C/foo B/ !B/foo | rename A/C/foo B/foo ; rmdir A/C\n\n\
                A/u A/v A/w A/C/D/ B/ !B/D | rename A/C/D B/D ; rmdir A/C ; rename A B/A";
    explore(ALL, Image::Fresh, text);
}

/// Found by reading: an entry had left for a directory that the power loss took, and what it had left was removed.
#[test]
fn found_what_left_a_removed_directory_for_one_that_is_lost_is_somewhere() {
    let text = "X/A/foo B/u B/v B/w !B/C | mkdir B/C ; rename X/A/foo B/C/foo ; rmdir X/A\n\n\
                X/A/D/foo B/u B/v B/w !B/C | mkdir B/C ; rename X/A/D B/C/D ; rmdir X/A ; rmdir X\n\n\
                X/A/foo B/u B/v B/w Y/! !B/C | mkdir B/C ; rename X/A/foo B/C/foo ; rename Y X/A\n\n\
                X/foo Y/A/ B/u B/v B/w !Y/A/foo !B/C | rename X/foo Y/A/foo ; mkdir B/C ; rename Y/A/foo B/C/foo ; rmdir Y/A\n\n\
                X/A/foo B/u B/v B/w !B/C | mkdir B/C ; create B/C/bar ; rename X/A/foo B/C/bar exchange ; unlink X/A/foo ; rmdir X/A";
    explore(&[Domain::PageCache], Image::Fresh, text);
    explored(&[Domain::PageCache], DataMode::Cow, Image::Fresh, true, text);
}

/// Found by two operations, once removals were cut: a rename behind the cut counted, for the cut was looked for among renames.
#[test]
fn found_what_stands_behind_a_cut_removal_is_cut() {
    let text = "A/C/foo B/C/! | rename A/C B/C\nA/C/ B/ !B/C | rename A/C B/C\n\n\
                A/C/foo B/bar | rename A/C B/bar exchange\nA/foo B/ !B/bar | rename A/foo B/bar";
    explore(&[Domain::PageCache], Image::Fresh, text);
}

/// Found by reading: repairs took blocks by which the next recovery tells whether writes and values count that were not settled,
/// where later ones had taken their place.
#[test]
fn found_repairs_leave_alone_what_the_next_recovery_verifies() {
    let text = "A/ !A/foo !A/bar | create A/foo ; write A/foo 0 40960 ; write A/foo 0 40960\n| rename A/foo A/bar\n\n\
                A/ !A/foo !A/bar | create A/foo ; setxattr A/foo user.big 50000 ; setxattr A/foo user.big 5000\n\
                | rename A/foo A/bar\n\n\
                A/ !A/foo !A/bar | create A/foo ; write A/foo 0 45000 ; truncate A/foo 0\n| rename A/foo A/bar";
    explored(&[Domain::PageCache], DataMode::Cow, Image::Fresh, true, text);
}
