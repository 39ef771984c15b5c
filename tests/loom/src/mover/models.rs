//! Places: their holders give them back by plain stores.

use std::sync::Arc;
use std::time::Instant;

use loom::thread;

use super::places::{Entry, Places};
use super::turns::Turns;
use crate::models::{Cell, explore, holds_by_its_fences};

/// One place, which a thread has that need not ask; then another falls asleep for it, or workers come.
fn is_given_back(entry: Entry, sleeps: bool) {
    let places = Arc::new(Places::new(1));
    let (mut turns, now) = (Turns::new(1), Instant::now());
    let place = places.take_unasked().expect("nobody sleeps");
    let holder = thread::spawn({
        let places = places.clone();
        move || places.give_back(place)
    });
    if sleeps {
        turns.falls_asleep(now);
        // Its turn is over, so that who goes is to be asked at once.
        turns.wakes_one(false, || now);
    }
    places.note(entry, &turns, || now);
    let free = places.free();
    let asks = holder.join().unwrap();
    assert!(asks || free == 1, "nobody is asked what becomes of a place that seems taken");
}

#[test]
fn who_gives_a_place_back_asks_once_somebody_sleeps() {
    holds_by_its_fences(|| is_given_back(Entry::ByTurns, true));
}

#[test]
fn who_gives_a_place_back_asks_once_there_are_workers() {
    holds_by_its_fences(|| is_given_back(Entry::Asked, false));
}

/// The same where callers need not ask for a while, since whose turn it is stays.
#[test]
fn who_gives_a_place_back_asks_once_a_turn_ends() {
    holds_by_its_fences(|| {
        let places = Arc::new(Places::new(1));
        let (mut turns, now) = (Turns::new(1), Instant::now());
        turns.falls_asleep(now);
        places.note(Entry::ByTurns, &turns, || now);
        let place = places.take_unasked().expect("its turn stays");
        let holder = thread::spawn({
            let places = places.clone();
            move || places.give_back(place)
        });
        places.note(Entry::Asked, &turns, || now);
        let free = places.free();
        assert!(holder.join().unwrap() || free == 1);
    });
}

fn begins(sleeps: bool, first: Option<Entry>) {
    let places = Arc::new(Places::new(1));
    let (mut turns, now) = (Turns::new(1), Instant::now());
    if sleeps {
        turns.falls_asleep(now);
        places.note(Entry::ByTurns, &turns, || now);
    }
    let caller = thread::spawn({
        let places = places.clone();
        move || places.take_unasked().is_some()
    });
    for entry in first.into_iter().chain([Entry::Suspended]) {
        places.note(entry, &turns, || now);
    }
    let free = places.free();
    let began = caller.join().unwrap();
    assert!(!began || free == 0, "a copy begins in front of a region at rest");
}

#[test]
fn nobody_begins_while_places_are_suspended() {
    holds_by_its_fences(|| begins(false, None));
    holds_by_its_fences(|| begins(true, None));
    // Callers had to ask before.
    holds_by_its_fences(|| begins(false, Some(Entry::Asked)));
}

#[test]
fn a_place_is_one_callers() {
    explore(|| {
        let places = Arc::new(Places::new(1));
        let inside = Arc::new(Cell::default());
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let (places, inside) = (places.clone(), inside.clone());
                thread::spawn(move || {
                    if let Some(place) = places.take_unasked() {
                        inside.add();
                        places.give_back(place);
                    }
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}
