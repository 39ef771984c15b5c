//! The name table of a directory's index: from a name's hash to its record and its inode.
//!
//! A bucket is one cache line: a byte of the hash, the inode number and the place of the record of seven
//! entries. So a look-up waits for the bucket, and then for the record with the name and for what the caller
//! wants of the inode *at the same time*: it knows the number before it has compared the name.
//!
//! An entry that finds its bucket full goes to the next one with room, and all buckets that it passed count it.
//! A look-up goes on behind a bucket only while that counts any.
//!
//! No call rebuilds the whole: it is linear hashing over small tables of buckets, and grows and shrinks by one of
//! them at a time.
//!
//! Invariants, executed by [`Names::check_state`]:
//!
//! 1. An entry lies in its bucket, or behind it with no bucket in between that does not count it.
//! 2. A bucket counts the entries that passed it, or has stopped counting at [`PASSED_MAX`].
//! 3. A table holds at most [`Table::room`] entries. Lengths are counted right.
//! 4. Of every entry its hash is known.

use super::types::Ino;

/// Where a record is.
pub type Place = u32;

/// Names per table, on average, at most: tables then hold 400 to 1600.
const TABLE_NAMES_MAX: usize = 800;
/// Names per table, on average, at least, where there is more than one.
const TABLE_NAMES_MIN: usize = 200;
/// Bits of a name's hash that choose a bucket in a table; those above choose the table.
const BUCKET_BITS: u32 = 11;
/// Entries in a bucket.
const SLOTS: usize = 7;
/// The count of a bucket that stays, because more may have passed.
const PASSED_MAX: u8 = u8::MAX;

/// An entry of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Named {
    pub ino: Ino,
    pub place: Place,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    /// By slot; 0 where it is free.
    tags: [u8; SLOTS],
    /// Entries that lie further on because this bucket was full.
    passed: u8,
    places: [Place; SLOTS],
    inos: [u32; SLOTS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

/// The lowest bit of each byte of a word.
const ONES: u64 = u64::MAX / 0xff;
/// The highest bit of the byte of each slot.
const SLOT_BITS: u64 = (ONES << 7) & (u64::MAX >> 8);

impl Bucket {
    const EMPTY: Bucket = Bucket { tags: [0; SLOTS], passed: 0, places: [0; SLOTS], inos: [0; SLOTS] };

    /// The slots with this tag, by the highest bit of their byte.
    #[inline]
    fn bits_with(&self, tag: u8) -> u64 {
        let [a, b, c, d, e, f, g] = self.tags;
        let differ = u64::from_le_bytes([a, b, c, d, e, f, g, 0]) ^ (ONES * tag as u64);
        // The highest bit of each byte that is zero.
        let low_bits = ONES * 0x7f;
        !(((differ & low_bits) + low_bits) | differ) & SLOT_BITS
    }

    #[inline]
    fn slots_with(&self, tag: u8) -> impl Iterator<Item = usize> + use<> {
        slots(self.bits_with(tag))
    }

    #[inline]
    fn slots_in_use(&self) -> impl Iterator<Item = usize> + use<> {
        slots(!self.bits_with(0) & SLOT_BITS)
    }

    fn named(&self, slot: usize) -> Named {
        Named { ino: Ino(self.inos[slot]), place: self.places[slot] }
    }
}

/// The slots of these bits.
#[inline]
fn slots(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let slot = (bits != 0).then(|| bits.trailing_zeros() as usize / 8)?;
        bits &= bits - 1;
        Some(slot)
    })
}

/// Buckets in a row; the first comes behind the last.
#[derive(Default)]
struct Table {
    buckets: Box<[Bucket]>,
    /// Of the entries, apart from them: no look-up needs them, and whoever moves entries reads them side by side.
    hashes: Box<[[u32; SLOTS]]>,
    len: usize,
}

/// Tells entries of one bucket apart. Bits that chose neither bucket nor table decide it, while there are any.
#[inline]
fn tag_of(hash: u32) -> u8 {
    ((hash as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).max(1) as u8
}

impl Table {
    /// For so many entries, and half as many more. As many more come before it is split again, so that it is made anew once in between:
    /// which costs less than what a look-up waits for where buckets lie half empty in the caches.
    fn with_room_for(len: usize) -> Table {
        let len = len + len / 2 + 1;
        let count = if len <= SLOTS { 1 } else { (2 * len).div_ceil(11).max(2) };
        let (buckets, hashes) = (vec![Bucket::EMPTY; count], vec![[0; SLOTS]; count]);
        Table { buckets: buckets.into(), hashes: hashes.into(), len: 0 }
    }

    /// Those that stay, and those that leave.
    fn split(&self, leaves: impl Fn(u32) -> bool) -> [Table; 2] {
        let leaving = self.entries().filter(|&(hash, _)| leaves(hash)).count();
        let mut tables = [self.len - leaving, leaving].map(Table::with_room_for);
        self.entries().for_each(|(hash, named)| tables[leaves(hash) as usize].place(hash, named));
        tables
    }

    /// Entries in so many buckets: five and a half in each, so that few find theirs full.
    fn room(buckets: usize) -> usize {
        if buckets <= 1 { buckets * SLOTS } else { buckets * 11 / 2 }
    }

    #[inline]
    fn home(&self, hash: u32) -> usize {
        ((hash as usize & ((1 << BUCKET_BITS) - 1)) * self.buckets.len()) >> BUCKET_BITS
    }

    #[inline]
    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Bucket and slot of the entry with this hash that `is` the one.
    #[inline]
    fn find(&self, hash: u32, is: impl Fn(Named) -> bool) -> Option<(usize, usize)> {
        let tag = tag_of(hash);
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for slot in bucket.slots_with(tag) {
                if is(bucket.named(slot)) {
                    return Some((at, slot));
                }
            }
            if bucket.passed == 0 {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    fn insert(&mut self, hash: u32, named: Named) {
        if self.len >= Table::room(self.buckets.len()) {
            [*self, _] = self.split(|_| false);
        }
        self.place(hash, named);
    }

    /// There is room.
    fn place(&mut self, hash: u32, named: Named) {
        let mut at = self.home(hash);
        loop {
            let next = self.next(at);
            let bucket = &mut self.buckets[at];
            if let Some(slot) = bucket.slots_with(0).next() {
                (bucket.tags[slot], bucket.places[slot], bucket.inos[slot]) =
                    (tag_of(hash), named.place, named.ino.0);
                self.hashes[at][slot] = hash;
                self.len += 1;
                return;
            }
            bucket.passed = bucket.passed.saturating_add(1);
            at = next;
        }
    }

    fn remove(&mut self, hash: u32, bucket: usize, slot: usize) {
        self.buckets[bucket].tags[slot] = 0;
        self.len -= 1;
        let mut at = self.home(hash);
        while at != bucket {
            let passed = &mut self.buckets[at].passed;
            *passed -= (*passed != PASSED_MAX) as u8;
            at = self.next(at);
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u32, Named)> {
        self.buckets
            .iter()
            .zip(&self.hashes)
            .flat_map(|(bucket, hashes)| bucket.slots_in_use().map(|slot| (hashes[slot], bucket.named(slot))))
    }
}

/// With `n` tables, 2^k the highest power of two up to `n`, a hash modulo 2^(k+1) names its table if there is that
/// many, else the one 2^k before, which is split next but not yet.
#[derive(Default)]
pub struct Names {
    tables: Vec<Table>,
    len: usize,
}

/// The table of a hash among `tables`, at least one.
#[inline]
fn table_of(hash: u32, tables: usize) -> usize {
    let half = 1 << tables.ilog2();
    let index = (hash >> BUCKET_BITS) as usize & (2 * half - 1);
    if index < tables { index } else { index - half }
}

impl Names {
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The entry with this hash that `is` the one.
    #[inline]
    pub fn find(&self, hash: u32, is: impl Fn(Named) -> bool) -> Option<Named> {
        if self.tables.is_empty() {
            return None;
        }
        let table = &self.tables[table_of(hash, self.tables.len())];
        let (bucket, slot) = table.find(hash, is)?;
        Some(table.buckets[bucket].named(slot))
    }

    pub fn insert(&mut self, hash: u32, named: Named) {
        if self.len >= self.tables.len() * TABLE_NAMES_MAX {
            self.grow();
        }
        let index = table_of(hash, self.tables.len());
        self.tables[index].insert(hash, named);
        self.len += 1;
    }

    pub fn remove(&mut self, hash: u32, place: Place) {
        let (index, bucket, slot) = self.at(hash, place);
        self.tables[index].remove(hash, bucket, slot);
        self.len -= 1;
        if self.tables.len() > 1 && self.len < self.tables.len() * TABLE_NAMES_MIN {
            self.shrink();
        }
    }

    /// The entry at `place` is another one now.
    pub fn replace(&mut self, hash: u32, place: Place, new: Named) {
        let (index, bucket, slot) = self.at(hash, place);
        let bucket = &mut self.tables[index].buckets[bucket];
        (bucket.places[slot], bucket.inos[slot]) = (new.place, new.ino.0);
    }

    pub fn heap_bytes(&self) -> usize {
        let size = |table: &Table| size_of_val(&*table.buckets) + size_of_val(&*table.hashes);
        self.tables.iter().map(size).sum::<usize>() + self.tables.capacity() * size_of::<Table>()
    }

    /// Table, bucket and slot of an entry that is there.
    fn at(&self, hash: u32, place: Place) -> (usize, usize, usize) {
        let index = table_of(hash, self.tables.len());
        let found = self.tables[index].find(hash, |named| named.place == place);
        let (bucket, slot) = found.expect("every record is in the table");
        (index, bucket, slot)
    }

    /// One table more: it takes its share from the one that stood in for it.
    fn grow(&mut self) {
        let new = self.tables.len();
        if new == 0 {
            self.tables.push(Table::default());
            return;
        }
        let source = new - (1 << new.ilog2());
        let [stay, leave] = self.tables[source].split(|hash| table_of(hash, new + 1) == new);
        self.tables[source] = stay;
        self.tables.push(leave);
    }

    /// One table less: its names go back.
    fn shrink(&mut self) {
        let Some(table) = self.tables.pop() else { return };
        let last = self.tables.len();
        let target = &mut self.tables[last - (1 << last.ilog2())];
        let mut merged = Table::with_room_for(target.len + table.len);
        target.entries().chain(table.entries()).for_each(|(hash, named)| merged.place(hash, named));
        *target = merged;
    }

    /// Panics with the number of the invariant that does not hold. `rehash` knows the hash of every place that was
    /// inserted.
    pub fn check_state(&self, rehash: impl Fn(Place) -> u32) {
        for (index, table) in self.tables.iter().enumerate() {
            let mut passed = vec![0u32; table.buckets.len()];
            for (bucket, entry) in table
                .buckets
                .iter()
                .enumerate()
                .flat_map(|(b, bucket)| bucket.slots_in_use().map(move |slot| (b, bucket.named(slot))))
            {
                let hash = rehash(entry.place);
                assert_eq!(table_of(hash, self.tables.len()), index, "1: its table");
                let mut at = table.home(hash);
                while at != bucket {
                    passed[at] += 1;
                    at = table.next(at);
                }
            }
            for (bucket, passed) in table.buckets.iter().zip(passed) {
                let counted = bucket.passed;
                assert!(counted == PASSED_MAX || counted as u32 == passed, "2: {counted} is not {passed}");
            }
            assert_eq!(table.entries().count(), table.len, "3: a table's length");
            assert!(table.entries().all(|(hash, named)| hash == rehash(named.place)), "4: hashes");
            assert!(table.len <= Table::room(table.buckets.len()), "3: a table's room");
        }
        assert_eq!(self.tables.iter().map(|table| table.len).sum::<usize>(), self.len, "3: the length");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries whose hashes all choose one bucket and have one tag, as an enemy would wish.
    #[test]
    fn entries_with_one_hash_are_kept_apart() {
        let mut names = Names::default();
        let count = 3 * PASSED_MAX as u32;
        for place in 0..count {
            names.insert(77, Named { ino: Ino(place + 9), place });
        }
        names.check_state(|_| 77);
        for place in 0..count {
            assert_eq!(names.find(77, |at| at.place == place), Some(Named { ino: Ino(place + 9), place }));
        }
        assert_eq!(names.find(77, |_| false), None);
        for place in (0..count).rev() {
            names.remove(77, place);
        }
        names.check_state(|_| 77);
        assert_eq!((names.len(), names.find(77, |_| true)), (0, None));
    }

    #[test]
    fn an_entry_that_passed_a_full_bucket_is_found_until_it_goes() {
        let mut names = Names::default();
        // Two buckets, and more in the first than it has slots.
        let hash = |place: Place| if place < 9 { 0 } else { (1 << BUCKET_BITS) - 1 };
        for place in 0..11 {
            names.insert(hash(place), Named { ino: Ino(place), place });
        }
        assert!(names.tables[0].buckets[0].passed > 0);
        names.check_state(hash);
        for gone in [0, 8, 10, 7, 3] {
            names.remove(hash(gone), gone);
            names.check_state(hash);
            assert_eq!(names.find(hash(gone), |at| at.place == gone), None);
        }
        for place in [1, 2, 4, 5, 6, 9] {
            assert_eq!(
                names.find(hash(place), |at| at.place == place).map(|named| named.ino),
                Some(Ino(place))
            );
        }
    }
}
