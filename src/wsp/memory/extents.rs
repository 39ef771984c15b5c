//! Which pages of a media are free: runs of pages, found by size, merged with their neighbours.
//!
//! Good fit with constant effort, after TLSF (Masmano et al., ECRTS 2004): free runs stand in lists by size, eight lists
//! for each power of two, and a map of bits says which lists hold something. A run is marked at its first and its last page
//! only, so that whoever frees the pages next to it finds it at once. Pages that are handed out carry no mark but one
//! bit: jemalloc may split and merge what it holds and give it back in other pieces.
//!
//! All of it is kept in DRAM, in tables that are made once. Nothing here allocates, blocks or knows an address, because it
//! runs inside of `malloc`; nothing is written to media, because the content of this memory means nothing to a later
//! process.
//!
//! Invariants, executed by `check_state`:
//! 1. A page is outside (nobody told of it), held, or in one free run.
//! 2. No two free runs touch.
//! 3. The first and the last page of a run say how long it is; pages between say nothing.
//! 4. A run is in the list of its size, and the map's bit of a list is set where it holds one.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;

/// Pages of one media at most: 4 TiB in pages of 4 KiB.
pub(super) const PAGES_MAX: usize = 1 << 30;

/// Lists for each power of two: two to this power.
const SPLIT_SHIFT: u32 = 3;
const SPLIT: usize = 1 << SPLIT_SHIFT;
const LISTS: usize = (30 - SPLIT_SHIFT as usize + 2) * SPLIT;
/// Runs of one list that are looked at before a larger one is taken.
const LOOKED_AT_MAX: usize = 16;

const FIRST: u32 = 1 << 31;
const LENGTH: u32 = FIRST - 1;
const NONE: u32 = u32::MAX;

/// What is noted at a page.
#[derive(Clone, Copy)]
struct Mark {
    /// At the first and the last page of a free run: its length, and at the first [`FIRST`]. Else 0.
    run: u32,
    /// At the first page: the runs beside it in its list.
    next: u32,
    previous: u32,
}

/// See the file's head. Pages are counted from the begin of the media.
pub(super) struct Extents {
    marks: Box<[Mark]>,
    /// One bit for each page that is handed out.
    held: Box<[u64]>,
    heads: [u32; LISTS],
    lists: [u64; LISTS.div_ceil(64)],
}

/// Zeros that take no memory before they are written. None where there are no addresses for them.
pub(super) fn zeroed<T: Plain>(len: usize) -> Option<Box<[T]>> {
    let layout = Layout::array::<T>(len).ok()?;
    assert!(layout.size() > 0, "a media has pages");
    // SAFETY: of more than no bytes.
    let at = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: allocated for that many just now, and zeros are a value of it, as whoever implements the trait says.
    Some(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(at.cast(), len).as_ptr()) })
}

/// # Safety
///
/// Zeros are a value of the type.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: integers.
unsafe impl Plain for Mark {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

/// The list of runs of so many pages.
fn list_of(pages: usize) -> usize {
    debug_assert!(pages > 0 && pages <= PAGES_MAX);
    if pages < SPLIT {
        return pages;
    }
    let power = pages.ilog2();
    (power - SPLIT_SHIFT + 1) as usize * SPLIT + ((pages >> (power - SPLIT_SHIFT)) & (SPLIT - 1))
}

impl Extents {
    /// No page is free yet. None where there is no memory for the tables.
    pub fn new(pages: usize) -> Option<Extents> {
        assert!(pages <= PAGES_MAX, "a media has at most {PAGES_MAX} pages");
        Some(Extents {
            marks: zeroed(pages)?,
            held: zeroed(pages.div_ceil(64))?,
            heads: [NONE; LISTS],
            lists: [0; LISTS.div_ceil(64)],
        })
    }

    /// Pages that nobody held become free, and one run with their neighbours.
    pub fn add(&mut self, start: usize, pages: usize) {
        debug_assert!(pages > 0 && start + pages <= self.marks.len());
        let (mut start, mut pages) = (start, pages);
        if let Some(before) = start.checked_sub(1).map(|page| self.marks[page].run).filter(|run| *run != 0) {
            let before = (before & LENGTH) as usize;
            start -= before;
            pages += before;
            self.unlink(start);
        }
        if let Some(after) = self.marks.get(start + pages).map(|mark| mark.run).filter(|run| *run != 0) {
            self.unlink(start + pages);
            pages += (after & LENGTH) as usize;
        }
        self.link(start, pages);
    }

    /// Hands out `pages` whose first page is a multiple of `align`, a power of two, counted from `origin` pages before the
    /// begin. None where no run fits.
    pub fn alloc(&mut self, pages: usize, align: usize, origin: usize) -> Option<usize> {
        if pages > self.marks.len() {
            return None;
        }
        let mut list = self.list_from(list_of(pages))?;
        loop {
            let mut run = self.heads[list];
            for _ in 0..LOOKED_AT_MAX {
                if run == NONE {
                    break;
                }
                let first = run as usize;
                let start = (first + origin).next_multiple_of(align) - origin;
                if start + pages <= first + self.length(first) {
                    self.cut(first, start, pages);
                    self.hold(start, pages, true);
                    return Some(start);
                }
                run = self.marks[first].next;
            }
            list = self.list_from(list + 1)?;
        }
    }

    /// Hands out exactly these pages, if they are free.
    pub fn alloc_at(&mut self, start: usize, pages: usize) -> bool {
        let run = self.run_over(start, pages);
        let around = run.filter(|(first, length)| *first <= start && start + pages <= first + length);
        if let Some((first, _)) = around {
            self.cut(first, start, pages);
            self.hold(start, pages, true);
        }
        around.is_some()
    }

    /// Takes pages back that were handed out, in whatever pieces; they are not free until they are added.
    pub fn release(&mut self, start: usize, pages: usize) {
        self.hold(start, pages, false);
    }

    /// Takes free pages out of these, so that nobody gets them; those that are held stay held.
    pub fn withdraw(&mut self, start: usize, pages: usize) {
        let mut at = start;
        while at < start + pages {
            match self.run_over(at, start + pages - at) {
                Some((first, length)) => {
                    let from = first.max(at);
                    let to = (first + length).min(start + pages);
                    self.cut(first, from, to - from);
                    at = to;
                }
                None => break,
            }
        }
    }

    /// Adds those of these pages that nobody holds; none of them may be free.
    pub fn add_unheld(&mut self, start: usize, pages: usize) {
        let mut at = start;
        while at < start + pages {
            let begin = at;
            while at < start + pages && !self.is_held(at) {
                at += 1;
            }
            if at > begin {
                self.add(begin, at - begin);
            }
            at += 1;
        }
    }

    /// Forgets these pages, held or free: they are outside again.
    pub fn forget(&mut self, start: usize, pages: usize) {
        self.withdraw(start, pages);
        self.forget_held(start, pages);
    }

    /// The same, of pages none of which is free.
    pub fn forget_held(&mut self, start: usize, pages: usize) {
        for page in start..start + pages {
            self.held[page / 64] &= !(1 << (page % 64));
        }
    }

    pub fn is_held(&self, page: usize) -> bool {
        self.held[page / 64] >> (page % 64) & 1 == 1
    }

    /// Notes that pages are handed out, or no longer. Whoever frees twice, or what is not held, ends here and not in
    /// somebody else's memory.
    fn hold(&mut self, start: usize, pages: usize, held: bool) {
        let mut at = start;
        while at < start + pages {
            let (word, bit) = (at / 64, at % 64);
            let count = (64 - bit).min(start + pages - at);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let expected = if held { 0 } else { mask };
            assert!(self.held[word] & mask == expected, "an extent is handed out twice, or freed twice");
            self.held[word] ^= mask;
            at += count;
        }
    }

    /// The first free run that has a page in these: its own first page and its length.
    fn run_over(&self, start: usize, pages: usize) -> Option<(usize, usize)> {
        // A run that begins before `start` shows at its end, which may lie behind what was asked for.
        let mut maybe_inside = true;
        let mut page = start;
        while page < self.marks.len() && (page < start + pages || maybe_inside) {
            let run = self.marks[page].run;
            if run & FIRST != 0 {
                return (page < start + pages).then_some((page, (run & LENGTH) as usize));
            }
            if run != 0 {
                return Some((page + 1 - run as usize, run as usize));
            }
            maybe_inside &= !self.is_held(page);
            page += 1;
        }
        None
    }

    /// Cuts pages out of the free run that begins at `first`.
    fn cut(&mut self, first: usize, start: usize, pages: usize) {
        let (end, run_end) = (start + pages, first + self.length(first));
        debug_assert!(first <= start && end <= run_end);
        self.unlink(first);
        if start > first {
            self.link(first, start - first);
        }
        if run_end > end {
            self.link(end, run_end - end);
        }
    }

    fn length(&self, first: usize) -> usize {
        (self.marks[first].run & LENGTH) as usize
    }

    /// The first list from `list` on that holds something.
    fn list_from(&self, list: usize) -> Option<usize> {
        let mut word = list / 64;
        let mut bits = self.lists.get(word)? & (u64::MAX << (list % 64));
        while bits == 0 {
            word += 1;
            bits = *self.lists.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn link(&mut self, first: usize, pages: usize) {
        let list = list_of(pages);
        let next = self.heads[list];
        self.marks[first + pages - 1].run = pages as u32;
        self.marks[first] = Mark { run: FIRST | pages as u32, next, previous: NONE };
        if next != NONE {
            self.marks[next as usize].previous = first as u32;
        }
        self.heads[list] = first as u32;
        self.lists[list / 64] |= 1 << (list % 64);
    }

    fn unlink(&mut self, first: usize) {
        let Mark { run, next, previous } = self.marks[first];
        debug_assert!(run & FIRST != 0, "a run is unlinked at its first page");
        let pages = (run & LENGTH) as usize;
        let list = list_of(pages);
        if next != NONE {
            self.marks[next as usize].previous = previous;
        }
        match previous {
            NONE => self.heads[list] = next,
            _ => self.marks[previous as usize].next = next,
        }
        if self.heads[list] == NONE {
            self.lists[list / 64] &= !(1 << (list % 64));
        }
        self.marks[first].run = 0;
        self.marks[first + pages - 1].run = 0;
    }

    /// Panics where an invariant of the file's head does not hold.
    #[cfg(test)]
    fn check_state(&self) {
        let (mut page, mut runs) = (0, 0);
        let mut after_run = false;
        while page < self.marks.len() {
            let run = self.marks[page].run;
            if run == 0 {
                after_run = false;
                page += 1;
                continue;
            }
            assert!(run & FIRST != 0, "3: page {page} is the end of no run");
            assert!(!after_run, "2: two runs touch at page {page}");
            let length = (run & LENGTH) as usize;
            assert_eq!((self.marks[page + length - 1].run & LENGTH) as usize, length, "3: the end of {page}");
            for inside in page..page + length {
                assert!(!self.is_held(inside), "1: page {inside} is free and held");
                let edge = inside == page || inside == page + length - 1;
                assert!(edge || self.marks[inside].run == 0, "3: inside of a run, page {inside}");
            }
            runs += 1;
            after_run = true;
            page += length;
        }
        for list in 0..LISTS {
            let mut at = self.heads[list];
            assert_eq!(
                self.lists[list / 64] >> (list % 64) & 1 == 1,
                at != NONE,
                "4: the bit of list {list}"
            );
            while at != NONE {
                assert_eq!(list_of(self.length(at as usize)), list, "4: the list of run {at}");
                runs -= 1;
                at = self.marks[at as usize].next;
            }
        }
        assert_eq!(runs, 0, "4: each run is in one list");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_grow_with_the_size() {
        let mut last = 0;
        for pages in 1..5000 {
            let list = list_of(pages);
            assert!(list == last || list == last + 1 || pages == SPLIT, "{pages} pages: {last} to {list}");
            last = list;
        }
        assert!(list_of(PAGES_MAX) < LISTS);
    }

    #[test]
    fn all_of_it_can_be_had_and_comes_back() {
        let mut extents = Extents::new(1000).unwrap();
        extents.add(1, 999);
        let mut had = Vec::new();
        while let Some(at) = extents.alloc(3, 1, 0) {
            had.push(at);
            extents.check_state();
        }
        assert_eq!((had.len(), extents.alloc(1, 1, 0)), (333, None));
        for at in had.iter().rev() {
            extents.release(*at, 3);
            extents.add(*at, 3);
        }
        extents.check_state();
        assert_eq!(extents.alloc(999, 1, 0), Some(1), "one run again");
    }

    #[test]
    fn more_than_any_media_has_is_not_to_be_had() {
        let mut extents = Extents::new(100).unwrap();
        extents.add(0, 100);
        for pages in [101, PAGES_MAX, PAGES_MAX + 1, 1 << 31, 1 << 40, usize::MAX / 4096] {
            assert_eq!(extents.alloc(pages, 1, 0), None, "{pages} pages");
        }
        assert_eq!(extents.alloc(100, 1, 0), Some(0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks the kernel")]
    fn tables_take_no_memory_before_they_are_written() {
        // Of 16 GiB: 48 MiB.
        let extents = Extents::new(4 << 20).unwrap();
        let page = rustix::param::page_size();
        let begin = (extents.marks.as_ptr().expose_provenance()).next_multiple_of(page);
        let end = extents.marks.as_ptr_range().end.addr() & !(page - 1);
        let mut present = vec![0u8; (end - begin) / page];
        let at = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: whole pages of the table, and a byte for each.
        assert_eq!(unsafe { libc::mincore(at, end - begin, present.as_mut_ptr()) }, 0);
        let taken = present.iter().filter(|byte| **byte & 1 == 1).count();
        assert!(taken < present.len() / 8, "{taken} of {} pages", present.len());
    }

    #[test]
    fn alignment_counts_from_the_origin() {
        let mut extents = Extents::new(100).unwrap();
        extents.add(0, 100);
        assert_eq!(extents.alloc(4, 16, 3), Some(13));
        assert!(!extents.alloc_at(10, 4), "page 13 is held");
        assert!(extents.alloc_at(17, 8));
        extents.check_state();
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freed_twice_is_noticed() {
        let mut extents = Extents::new(10).unwrap();
        extents.add(0, 10);
        let at = extents.alloc(2, 1, 0).unwrap();
        extents.release(at, 2);
        extents.release(at, 2);
    }

    const PAGES: usize = 192;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc {
            pages: usize,
            align: usize,
        },
        AllocAt {
            start: usize,
            pages: usize,
        },
        /// Some pages of one that is held, so that extents come back in other pieces.
        Free {
            which: usize,
            from: usize,
            pages: usize,
        },
        Withdraw {
            start: usize,
            pages: usize,
        },
        AddBack {
            start: usize,
            pages: usize,
        },
        Forget {
            start: usize,
            pages: usize,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = || (0..PAGES, 1..40usize).prop_map(|(start, pages)| (start, pages.min(PAGES - start)));
        prop_oneof![
            6 => (1..40usize, 0..5u32).prop_map(|(pages, shift)| Step::Alloc { pages, align: 1 << shift }),
            2 => range().prop_map(|(start, pages)| Step::AllocAt { start, pages }),
            6 => (any::<usize>(), 0..40usize, 1..40usize)
                .prop_map(|(which, from, pages)| Step::Free { which, from, pages }),
            1 => range().prop_map(|(start, pages)| Step::Withdraw { start, pages }),
            2 => range().prop_map(|(start, pages)| Step::AddBack { start, pages }),
            1 => range().prop_map(|(start, pages)| Step::Forget { start, pages }),
        ]
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Page {
        Outside,
        Free,
        Held,
    }

    /// The same by a page at a time.
    struct Model([Page; PAGES]);

    impl Model {
        fn change(&mut self, start: usize, pages: usize, from: &[Page], to: Page) {
            self.0[start..start + pages].iter_mut().filter(|p| from.contains(p)).for_each(|p| *p = to);
        }

        fn all(&self, start: usize, pages: usize, is: Page) -> bool {
            self.0[start..start + pages].iter().all(|p| *p == is)
        }

        /// Whether some free run holds so many pages from an aligned one on.
        fn has(&self, pages: usize, align: usize, origin: usize) -> bool {
            (0..=PAGES - pages)
                .any(|at| (at + origin).is_multiple_of(align) && self.all(at, pages, Page::Free))
        }
    }

    fn run(steps: &[Step], origin: usize) {
        let mut extents = Extents::new(PAGES).unwrap();
        let mut model = Model([Page::Outside; PAGES]);
        extents.add(1, PAGES - 1);
        model.change(1, PAGES - 1, &[Page::Outside], Page::Free);
        for step in steps {
            match *step {
                Step::Alloc { pages, align } => match extents.alloc(pages, align, origin) {
                    Some(at) => {
                        assert!((at + origin).is_multiple_of(align));
                        assert!(model.all(at, pages, Page::Free), "{at} was not free");
                        model.change(at, pages, &[Page::Free], Page::Held);
                    }
                    // Of one list only some runs are looked at; so few pages never have that many.
                    None => assert!(!model.has(pages, align, origin), "{pages} pages were there"),
                },
                Step::AllocAt { start, pages } => {
                    let free = model.all(start, pages, Page::Free);
                    assert_eq!(extents.alloc_at(start, pages), free);
                    if free {
                        model.change(start, pages, &[Page::Free], Page::Held);
                    }
                }
                Step::Free { which, from, pages } => {
                    let held: Vec<usize> = (0..PAGES).filter(|p| model.0[*p] == Page::Held).collect();
                    let Some(start) = held.get(which % held.len().max(1)).map(|p| p.saturating_sub(from))
                    else {
                        continue;
                    };
                    let start = (start..PAGES).find(|p| model.0[*p] == Page::Held).unwrap();
                    let pages =
                        (0..pages).take_while(|n| model.0.get(start + n) == Some(&Page::Held)).count();
                    extents.release(start, pages);
                    extents.add(start, pages);
                    model.change(start, pages, &[Page::Held], Page::Free);
                }
                Step::Withdraw { start, pages } => {
                    extents.withdraw(start, pages);
                    model.change(start, pages, &[Page::Free], Page::Outside);
                }
                Step::AddBack { start, pages } => {
                    extents.withdraw(start, pages);
                    extents.add_unheld(start, pages);
                    model.change(start, pages, &[Page::Outside], Page::Free);
                }
                Step::Forget { start, pages } => {
                    extents.forget(start, pages);
                    model.change(start, pages, &[Page::Free, Page::Held], Page::Outside);
                }
            }
            extents.check_state();
            for page in 0..PAGES {
                assert_eq!(extents.is_held(page), model.0[page] == Page::Held, "page {page} after {step:?}");
            }
            let free = |page| {
                let mut runs = (page..PAGES).filter(|at| extents.marks[*at].run != 0);
                let first = runs.next().map(|at| (at, extents.marks[at].run));
                first.is_some_and(|(at, run)| run & FIRST == 0 || at == page)
            };
            for page in 0..PAGES {
                assert_eq!(free(page), model.0[page] == Page::Free, "page {page} after {step:?}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, ..ProptestConfig::default() })]
        #[test]
        fn extents_do_what_their_model_does(
            steps in proptest::collection::vec(step(), 1..if cfg!(miri) { 8 } else { 80 }),
            origin in 0..64usize,
        ) {
            run(&steps, origin);
        }
    }
}
