//! Whether what a power cut left of a pool in an ordinary file is what its syncs allow (docs/crash.md, "Promises per mode").
//!
//! A sync covers what had ended when it began. When that was nobody says; but a thread begins an `fsync` after its
//! operation before was acknowledged, and all acknowledgements come over one line: whatever precedes *that* byte
//! had ended by then. So of each thread some operations are certainly covered, all of them before the others.
//! Since these, up to the interrupted one, it has a moment after each operation, and what is found of it must be of them:
//! each file, each directory (in those of all threads: the thread's names) and its range of the shared file as at some
//! moment, a rename in both directories or in neither, and what had one name all the time is there.
//!
//! What is found is what the next round begins with: it has been read from the disk, so it is durable.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use crate::OPENED;
use crate::judge::difference;
use crate::model::{DIRECTORIES, Entry, File, Model};
use crate::op::{Draw, Op};

/// What each thread had made when it was last looked at.
pub struct Judge {
    models: Vec<Model>,
}

/// What came of a cut that left nothing amiss.
#[derive(Debug, Default, PartialEq)]
pub struct Verdict {
    /// Acknowledged operations that a sync certainly covers.
    pub covered: usize,
    /// Files, directories and ranges that are older than the last acknowledged operation, or missing.
    pub older: usize,
    /// Threads of which no single moment shows.
    pub mixed: usize,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.covered, self.older, self.mixed)
    }
}

impl Judge {
    pub fn new(threads: usize) -> Judge {
        Judge { models: vec![Model::new(); threads] }
    }

    /// Compares the lines found after a cut with what `sent`, all that was acknowledged in that round, allows.
    pub fn verdict(&mut self, seed: u64, sent: &[u8], found: &[String]) -> Result<Verdict, String> {
        let mut verdict = Verdict::default();
        for (thread, history) in self.histories(seed, sent).iter().enumerate() {
            let found = Found::of(found, thread);
            let left = history.left(&found).map_err(|why| {
                let (covered, acknowledged) = (history.covered, history.covered + history.acknowledged);
                format!("seed {seed}, thread {thread}, {covered} of {acknowledged} operations covered: {why}")
            })?;
            verdict.covered += history.covered;
            verdict.older += left.older;
            verdict.mixed += usize::from(left.mixed);
            self.models[thread] = left.model;
        }
        Ok(verdict)
    }

    fn histories(&self, seed: u64, sent: &[u8]) -> Vec<History> {
        let threads = self.models.len();
        let mut moments: Vec<Vec<Model>> = self.models.iter().map(|model| vec![model.clone()]).collect();
        let mut draws: Vec<Draw> = (0..threads).map(|thread| Draw::deferred(seed, thread)).collect();
        let mut next = |thread: usize, moments: &mut Vec<Model>| {
            let mut model = moments.last().expect("the first is there").clone();
            let op = draws[thread].next(&model);
            op.change(&mut model);
            moments.push(model);
            op
        };
        // How many operations of each thread were acknowledged when the last one of this thread was.
        let mut before = vec![vec![0; threads]; threads];
        let mut count = vec![0; threads];
        let mut covered = vec![0; threads];
        for thread in sent.iter().filter(|byte| **byte != OPENED).map(|byte| usize::from(byte - b'a')) {
            if let Op::Fsync { .. } = next(thread, &mut moments[thread]) {
                covered
                    .iter_mut()
                    .zip(&before[thread])
                    .for_each(|(covered, sure)| *covered = (*covered).max(*sure));
            }
            count[thread] += 1;
            before[thread].clone_from(&count);
        }
        let mut histories = Vec::new();
        for (thread, mut moments) in moments.into_iter().enumerate() {
            if sent.contains(&OPENED) {
                next(thread, &mut moments);
            }
            let covered = covered[thread];
            histories.push(History::new(moments.split_off(covered), covered, count[thread] - covered));
        }
        histories
    }
}

/// By name in its directory.
type Names = BTreeMap<String, Entry>;

/// What one thread had made at each moment that may show.
struct History {
    /// From the last that is certainly covered to that after the interrupted operation.
    moments: Vec<Model>,
    /// Of each moment what is in each directory, by its number.
    dirs: Vec<BTreeMap<usize, Names>>,
    /// What each file was: number, line, content.
    files: Vec<(usize, String, Arc<File>)>,
    renames: Vec<Rename>,
    covered: usize,
    /// The moment after the last acknowledged operation.
    acknowledged: usize,
}

/// An operation that changed the names in two directories.
struct Rename {
    at: usize,
    from: usize,
    to: usize,
}

impl History {
    fn new(moments: Vec<Model>, covered: usize, acknowledged: usize) -> History {
        let dirs: Vec<_> = moments.iter().map(directories).collect();
        let mut files: Vec<(usize, String, Arc<File>)> = Vec::new();
        let mut last = BTreeMap::new();
        for (number, file) in moments.iter().flat_map(|model| &model.files) {
            if last.insert(number, file).is_none_or(|was| !Arc::ptr_eq(was, file)) {
                files.push((*number, file.line(), Arc::clone(file)));
            }
        }
        let renames = renames(&dirs);
        History { moments, dirs, files, renames, covered, acknowledged }
    }

    /// What the cut left.
    fn left(&self, found: &Found) -> Result<Left, String> {
        let Some(shared) = self.moments.iter().rev().find(|m| m.shared_line() == found.shared) else {
            return Err(format!("its range of the shared file is as it never was: {}", self.amiss(found)));
        };
        let mut search = Search { history: self, found, could_be: Vec::new(), why: (0, String::new()) };
        for (inode, seen) in found.inodes.iter().enumerate() {
            let alike = self.files.iter().filter(|(_, line, _)| *seen == Seen::File(line.clone()));
            search.could_be.push(alike.map(|(number, ..)| *number).collect());
            if matches!(seen, Seen::File(_)) && search.could_be[inode].is_empty() {
                let (path, _) = found.paths.iter().find(|(_, of)| **of == inode).expect("it has a name");
                return Err(format!("{path} is as no file was since the sync: {}", self.amiss(found)));
            }
        }
        let roots = DIRECTORIES.iter().enumerate().map(|(number, path)| (number, (*path).to_owned()));
        let Some(choice) = search.place(roots.collect(), &Choice::default()) else {
            return Err(format!("{}: {}", search.why.1, self.amiss(found)));
        };
        let mut model = self.moments[self.moments.len() - 1].clone();
        model.shared = Arc::clone(&shared.shared);
        (model.entries, model.files) = (BTreeMap::new(), BTreeMap::new());
        for (path, inode) in &found.paths {
            let number = choice.numbers[inode];
            let entry = match &found.inodes[*inode] {
                Seen::Dir => Entry::Dir(number),
                Seen::Symlink(target) => Entry::Symlink(number, target.clone()),
                Seen::File(line) => {
                    let alike = self.files.iter().find(|(of, was, _)| *of == number && was == line);
                    model.files.insert(number, Arc::clone(&alike.expect("it could be that").2));
                    Entry::File(number)
                }
            };
            model.entries.insert(path.clone(), entry);
        }
        let (older, mixed) = (self.older(&model), !self.moments.iter().any(|moment| same(moment, &model)));
        Ok(Left { model, older, mixed })
    }

    /// How much of what the last acknowledged operation left is in `left` as it was before; what the interrupted one changes
    /// does not count.
    fn older(&self, left: &Model) -> usize {
        let (now, after) = (&self.moments[self.acknowledged], &self.moments[self.moments.len() - 1]);
        let line = |model: &Model, number: &usize| model.files.get(number).map(|file| file.line());
        let of_files = now.files.keys().filter(|number| {
            let found = line(left, number);
            found != line(now, number) && found != line(after, number)
        });
        let (dirs, now_dirs, after_dirs) =
            (directories(left), &self.dirs[self.acknowledged], &self.dirs[self.dirs.len() - 1]);
        let of_dirs = now_dirs.iter().filter(|(number, names)| {
            dirs.get(*number) != Some(*names) && dirs.get(*number) != after_dirs.get(*number)
        });
        let of_shared = left.shared != now.shared && left.shared != after.shared;
        of_files.count() + of_dirs.count() + usize::from(of_shared)
    }

    /// How what was found differs from the last moment.
    fn amiss(&self, found: &Found) -> String {
        let last = self.moments[self.acknowledged].lines(found.thread);
        format!("against all that was acknowledged: {}", difference(&last, &found.lines))
    }
}

struct Left {
    model: Model,
    older: usize,
    mixed: bool,
}

fn same(a: &Model, b: &Model) -> bool {
    let is = |(number, file): (&usize, &Arc<File>)| {
        b.files.get(number).is_some_and(|other| Arc::ptr_eq(file, other) || file.line() == other.line())
    };
    a.entries == b.entries && a.shared == b.shared && a.files.iter().all(is)
}

fn directories(model: &Model) -> BTreeMap<usize, Names> {
    let mut dirs: BTreeMap<usize, Names> =
        (0..DIRECTORIES.len()).map(|number| (number, Names::new())).collect();
    for (path, entry) in &model.entries {
        if let Entry::Dir(number) = entry {
            dirs.entry(*number).or_default();
        }
        let (dir, name) = path.rsplit_once('/').expect("paths are absolute");
        let dir = match DIRECTORIES.iter().position(|shared| *shared == dir) {
            Some(number) => number,
            None => model.entries[dir].number(),
        };
        dirs.entry(dir).or_default().insert(name.to_owned(), entry.clone());
    }
    dirs
}

fn renames(dirs: &[BTreeMap<usize, Names>]) -> Vec<Rename> {
    let mut found = Vec::new();
    for (n, two) in dirs.windows(2).enumerate() {
        let changed: Vec<usize> = two[1]
            .iter()
            .filter(|(dir, names)| two[0].get(*dir).is_some_and(|was| was != *names))
            .map(|(dir, _)| *dir)
            .collect();
        if let [a, b] = changed[..] {
            // In an exchange both get one.
            let has = |moment: usize, entry: &Entry| two[moment][&a].values().any(|e| e == entry);
            let grew = two[1][&a].values().any(|entry| !has(0, entry));
            let (from, to) = if grew { (b, a) } else { (a, b) };
            found.push(Rename { at: n + 1, from, to });
        }
    }
    found
}

/// What a listing says of one thread's.
struct Found<'a> {
    thread: usize,
    lines: Vec<&'a String>,
    /// What each path leads to, by its place in `inodes`.
    paths: BTreeMap<String, usize>,
    inodes: Vec<Seen>,
    shared: String,
}

#[derive(PartialEq)]
enum Seen {
    /// All but its names.
    File(String),
    Dir,
    Symlink(String),
}

impl<'a> Found<'a> {
    fn of(lines: &'a [String], thread: usize) -> Found<'a> {
        let lines: Vec<&String> = lines.iter().filter(|l| l.starts_with(&format!("{thread} "))).collect();
        let mut found =
            Found { thread, lines, paths: BTreeMap::new(), inodes: Vec::new(), shared: String::new() };
        for line in &found.lines {
            let mut words = line.splitn(4, ' ').skip(1);
            let mut word = || words.next().unwrap_or_default();
            let (kind, names, rest) = (word(), word(), word());
            let seen = match kind {
                "file" => Seen::File(rest.to_owned()),
                "dir" => Seen::Dir,
                "link" => Seen::Symlink(rest.to_owned()),
                _ => {
                    names.clone_into(&mut found.shared);
                    continue;
                }
            };
            found.paths.extend(names.split(',').map(|name| (name.to_owned(), found.inodes.len())));
            found.inodes.push(seen);
        }
        found
    }

    /// The names in a directory.
    fn names(&self, dir: &str) -> BTreeMap<&str, usize> {
        let below = |path: &'_ String| path.rsplit_once('/').is_some_and(|(parent, _)| parent == dir);
        let inside = self.paths.iter().filter(|(path, _)| below(path));
        inside.map(|(path, inode)| (&path[dir.len() + 1..], *inode)).collect()
    }
}

/// Of which moment each directory is, and which number what was found had.
#[derive(Clone, Default)]
struct Choice {
    moments: BTreeMap<usize, usize>,
    numbers: BTreeMap<usize, usize>,
}

struct Search<'a> {
    history: &'a History,
    found: &'a Found<'a>,
    /// The numbers that each file found may have had.
    could_be: Vec<BTreeSet<usize>>,
    /// Why not: from where most directories had found their moment.
    why: (usize, String),
}

impl Search<'_> {
    /// Chooses moments for these directories, and for all below them, newer ones first.
    fn place(&mut self, mut dirs: Vec<(usize, String)>, chosen: &Choice) -> Option<Choice> {
        let Some((dir, path)) = dirs.pop() else {
            let why = self.not_all(chosen);
            return match why {
                None => Some(chosen.clone()),
                Some(why) => {
                    self.why = (usize::MAX, why);
                    None
                }
            };
        };
        let of = &self.history.dirs;
        let changed =
            |n: &usize| of[*n].contains_key(&dir) && (*n == 0 || of[n - 1].get(&dir) != of[*n].get(&dir));
        for moment in (0..of.len()).rev().filter(changed) {
            if let Some((chosen, below)) = self.fits(dir, &path, moment, chosen) {
                let all = dirs.iter().cloned().chain(below).collect();
                if let Some(choice) = self.place(all, &chosen) {
                    return Some(choice);
                }
            }
        }
        if self.why.0 <= chosen.moments.len() {
            let why =
                format!("{path} is as that directory never was since the sync, with what its names lead to");
            self.why = (chosen.moments.len(), why);
        }
        None
    }

    /// The choice with this directory as it was at that moment, and the directories in it.
    fn fits(
        &self,
        dir: usize,
        path: &str,
        moment: usize,
        chosen: &Choice,
    ) -> Option<(Choice, Vec<(usize, String)>)> {
        let (names, found) = (&self.history.dirs[moment][&dir], self.found.names(path));
        if !names.keys().eq(found.keys()) {
            return None;
        }
        let mut choice = chosen.clone();
        choice.moments.insert(dir, moment);
        let mut below = Vec::new();
        for (entry, (name, inode)) in names.values().zip(found) {
            let number = entry.number();
            let alike = match (entry, &self.found.inodes[inode]) {
                (Entry::File(_), Seen::File(_)) => self.could_be[inode].contains(&number),
                (Entry::Symlink(_, target), Seen::Symlink(seen)) => target == seen,
                (Entry::Dir(_), Seen::Dir) => {
                    below.push((number, format!("{path}/{name}")));
                    true
                }
                _ => false,
            };
            let taken = choice.numbers.iter().find(|(other, of)| **other == inode || **of == number);
            if !alike || taken.is_some_and(|(other, of)| (*other, *of) != (inode, number)) {
                return None;
            }
            choice.numbers.insert(inode, number);
        }
        Some((choice, below))
    }

    /// What does not hold of all directories together.
    fn not_all(&self, choice: &Choice) -> Option<String> {
        let (first, last) = (&self.history.moments[0], &self.history.dirs[self.history.dirs.len() - 1]);
        let half = self.history.renames.iter().find(|rename| {
            let has = |dir: usize| choice.moments.get(&dir).map(|moment| *moment >= rename.at);
            match (has(rename.from), has(rename.to)) {
                (Some(left), Some(came)) => left != came,
                // What left for a directory that is not there has stayed; unless that one was removed afterwards.
                (Some(left), None) => left && last.contains_key(&rename.to),
                (None, _) => false,
            }
        });
        if let Some(Rename { at, .. }) = half {
            return Some(format!(
                "a rename is in one directory and not in the other, {at} operations after the sync"
            ));
        }
        // A file that had two names may have lost both.
        let one = |model: &Model, entry: &Entry| model.entries.values().filter(|e| *e == entry).count() == 1;
        let found: BTreeSet<usize> = choice.numbers.values().copied().collect();
        let lost = first.entries.iter().find(|(_, entry)| {
            !found.contains(&entry.number()) && self.history.moments.iter().all(|model| one(model, entry))
        });
        lost.map(|(path, _)| {
            format!("what {path} led to had a name all the time since the sync, and is lost")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Syncs in the middle, renames between directories after that.
    const SEED: u64 = 19;
    const COUNT: usize = 120;

    /// What one thread has made after each operation, the interrupted one too; and how many of them are covered.
    fn made() -> (Vec<Model>, usize) {
        let (mut moments, mut draw) = (vec![Model::new()], Draw::deferred(SEED, 0));
        let mut covered = 0;
        for n in 0..=COUNT {
            let mut model = moments[n].clone();
            let op = draw.next(&model);
            if matches!(op, Op::Fsync { .. }) && n < COUNT {
                covered = n;
            }
            op.change(&mut model);
            moments.push(model);
        }
        assert!(covered > 30 && covered + 30 < COUNT, "{covered} of {COUNT} are covered");
        (moments, covered)
    }

    fn verdict(found: &Model) -> Result<Verdict, String> {
        let sent: Vec<u8> = [OPENED].into_iter().chain(std::iter::repeat_n(b'a', COUNT)).collect();
        let mut judge = Judge::new(1);
        let verdict = judge.verdict(SEED, &sent, &found.lines(0))?;
        assert_eq!(judge.models[0].lines(0), found.lines(0), "the next round begins with what was found");
        Ok(verdict)
    }

    #[test]
    fn every_moment_since_the_sync_is_right_and_none_before() {
        let (moments, covered) = made();
        for (n, moment) in moments.iter().enumerate() {
            let same_as_later = moments[covered..].iter().any(|later| later.lines(0) == moment.lines(0));
            let said = verdict(moment);
            assert_eq!(said.is_ok(), same_as_later, "after {n} of {COUNT}, {covered} covered: {said:?}");
            assert!(said.is_err() || said.is_ok_and(|v| v.covered == covered && v.mixed == 0));
        }
        assert_eq!(verdict(&moments[COUNT]).unwrap().older, 0);
        assert!(verdict(&moments[covered]).unwrap().older > 0);
    }

    #[test]
    fn each_file_is_of_a_moment_of_its_own_but_of_none_before_the_sync() {
        let (moments, covered) = made();
        let (mut right, mut wrong) = (0, 0);
        for (n, moment) in moments.iter().enumerate().step_by(3) {
            for (number, file) in &moment.files {
                let mut mixed = moments[COUNT].clone();
                let Some(now) = mixed.files.get_mut(number) else { continue };
                let is = |model: &Model| model.files.get(number).is_some_and(|was| was.line() == file.line());
                let allowed = moments[covered..].iter().any(is);
                now.clone_from(file);
                let said = verdict(&mixed);
                assert_eq!(said.is_ok(), allowed, "file {number} of {n}: {said:?}");
                right += usize::from(said.is_ok_and(|v| v.older == 1));
                wrong += usize::from(!allowed);
            }
        }
        assert!(right > 5 && wrong > 5, "{right} right, {wrong} wrong");
    }

    #[test]
    fn a_rename_is_in_both_directories_or_in_neither() {
        let (moments, covered) = made();
        let dirs: Vec<_> = moments[covered..].iter().map(directories).collect();
        let mut halves = 0;
        for rename in renames(&dirs) {
            let [before, after] = [rename.at - 1, rename.at].map(|n| &moments[covered + n]);
            // Both names, or none.
            for (from, to) in [(after, before), (before, after)] {
                let of = |dir: usize| DIRECTORIES.get(dir).map(|path| format!("{path}/"));
                let Some((from_dir, to_dir)) = of(rename.from).zip(of(rename.to)) else { continue };
                let mut half = before.clone();
                half.entries.clear();
                for (model, dir) in [(from, from_dir), (to, to_dir)] {
                    let inside = |path: &str| path.starts_with(&dir);
                    half.entries.extend(
                        model.entries.iter().filter(|(p, _)| inside(p)).map(|(p, e)| (p.clone(), e.clone())),
                    );
                }
                let third = (0..DIRECTORIES.len()).find(|d| ![rename.from, rename.to].contains(d)).unwrap();
                let rest = before.entries.iter().filter(|(p, _)| p.starts_with(&of(third).unwrap()));
                half.entries.extend(rest.map(|(p, e)| (p.clone(), e.clone())));
                half.files.extend(after.files.iter().map(|(n, file)| (*n, Arc::clone(file))));
                half.forget_nameless();
                // Unless a later moment of one of them is alike.
                let said = verdict(&half);
                halves += usize::from(said.is_err_and(|why| why.contains("not in the other")));
            }
        }
        assert!(halves > 2, "{halves}");
    }

    #[test]
    fn what_had_a_name_all_the_time_is_there_and_nothing_that_never_was() {
        let (moments, covered) = made();
        let last = &moments[COUNT];
        let kept =
            |entry: &&Entry| moments[covered..].iter().all(|m| m.entries.values().any(|e| e == *entry));
        let path = last.entries.iter().find(|(_, e)| matches!(e, Entry::File(_)) && kept(e)).unwrap().0;
        let changed: [&dyn Fn(&mut Model); 5] = [
            &|m| {
                m.entries.remove(path);
                m.forget_nameless();
            },
            &|m| {
                let entry = m.entries.remove(path).unwrap();
                m.entries.insert(format!("{path}x"), entry);
            },
            &|m| m.file_at(path).mode ^= 1,
            &|m| Arc::make_mut(&mut m.shared)[100] ^= 1,
            &|m| {
                let number = m.number();
                m.entries.insert("/d0/t0-x".to_owned(), Entry::Dir(number));
            },
        ];
        for (n, change) in changed.iter().enumerate() {
            let mut model = last.clone();
            change(&mut model);
            assert!(verdict(&model).is_err(), "change {n}");
        }
    }

    #[test]
    fn a_sync_covers_what_had_been_acknowledged_before_its_thread_was_last_heard_of() {
        // What each of two threads does in a round that syncs often.
        const OFTEN: u64 = 1;
        let mut model = Model::new();
        let mut draw = Draw::deferred(OFTEN, 1);
        let mut syncs = Vec::new();
        for n in 0..200 {
            let op = draw.next(&model);
            syncs.extend(matches!(op, Op::Fsync { .. }).then_some(n));
            op.change(&mut model);
        }
        let sync = *syncs.iter().find(|n| **n > 3).unwrap();
        let covered = |sent: Vec<u8>| -> Vec<usize> {
            Judge::new(2).histories(OFTEN, &sent).iter().map(|history| history.covered).collect()
        };
        let others = |n| std::iter::repeat_n(b'b', n);
        let before: Vec<u8> = others(sync - 1).chain(*b"aab").collect();
        let with = |more: &[u8]| covered([&[OPENED], &before[..], more].concat());
        let first = syncs[0];
        // The two were acknowledged before the operation that stands before the sync; a third may have ended after it began.
        assert_eq!(with(b"ab")[0], 2, "the sync is operation {sync}, the first {first}");
        assert_eq!(with(b"ab")[1], sync);
        assert!(with(b"a")[1] < sync, "what is not acknowledged covers nothing");
    }
}
