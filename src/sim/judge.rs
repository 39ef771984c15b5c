//! Whether a state that a failure left is one that `docs/semantics.md` allows.
//!
//! What is held against it are trees that the live file system showed, and that the oracle agreed to.
//!
//! **Persistent memory**: the tree is the one before the interrupted operation or the one after it, in all that a
//! program can see, times included; after an acknowledged one the one after it. With `data=inplace` the bytes of
//! an interrupted overwrite may be old or new, word by word.
//!
//! **An ordinary file**: every inode is as it was at some moment since the last sync. A rename between two
//! directories is in both or in neither. What had a name all the time has one. Link counts are what the names say. A change
//! time is no older than the change that shows, and no newer than any that its inode had.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::machine;
use super::media::{CrashPoint, Keep, Rng, SimMedia};
use super::mutation::Mutation;
use super::tree::{CONTRADICTS, Inodes, Seen, Tree};
use crate::fs::format::SUPER_BYTES;
use crate::fs::{Cred, FIXED, Fs, Ino, Kind, Time};
use crate::media::Media;

/// What a failure may leave.
#[derive(Clone)]
pub enum Allowed {
    OneOf {
        trees: Vec<Arc<Tree>>,
        /// The bytes of an inode that an interrupted overwrite may have torn, from the first tree's to the last's.
        torn: Option<(u32, Range<u64>)>,
    },
    SinceSync {
        /// Trees since the last sync, oldest first.
        trees: Vec<Arc<Tree>>,
        /// The pool may be too full for records of change times.
        crowded: bool,
    },
}

impl Allowed {
    /// Which of those it is, in a number: where it is torn, as which.
    pub fn judge(&self, found: &Tree) -> Result<u64, String> {
        match self {
            Allowed::OneOf { trees, torn } => one_of(found, trees, torn.as_ref()),
            Allowed::SinceSync { trees, crowded } => {
                since_sync(found, trees, *crowded)?;
                Ok(found.digest())
            }
        }
    }
}

fn one_of(found: &Tree, trees: &[Arc<Tree>], torn: Option<&(u32, Range<u64>)>) -> Result<u64, String> {
    if let Some(whole) = trees.iter().find(|t| t.named == found.named) {
        return Ok(whole.digest());
    }
    let (first, last) = (&trees[0], &trees[trees.len() - 1]);
    if let Some((ino, range)) = torn
        && let Some(whole) = untorn(found, (first, last), *ino, range)
        && whole.named == last.named
    {
        return Ok(last.digest() ^ 1);
    }
    let after = found.differs(last);
    Err(match trees.len() {
        1 => format!("not what was acknowledged: {after}"),
        _ => format!("neither before the operation: {}nor after it: {after}", found.differs(first)),
    })
}

/// The tree with the overwrite complete, if each word of it is old or new.
fn untorn(found: &Tree, (old, new): (&Tree, &Tree), ino: u32, range: &Range<u64>) -> Option<Tree> {
    const WORD: usize = 8;
    let (seen, old, new) = (found.named.get(&ino)?, old.named.get(&ino)?, new.named.get(&ino)?);
    if seen.content.len() != new.content.len() {
        return None;
    }
    let mut whole = Seen::clone(seen);
    let (from, to) = (range.start as usize / WORD * WORD, (range.end as usize).min(new.content.len()));
    for at in (from..to).step_by(WORD) {
        let word = at..(at + WORD).min(new.content.len());
        let is = |other: &Seen| other.content.get(word.clone()) == Some(&seen.content[word.clone()]);
        if !is(old) && !is(new) {
            return None;
        }
        whole.content[word.clone()].copy_from_slice(&new.content[word.clone()]);
    }
    let mut tree = found.clone();
    tree.named.insert(ino, Arc::new(whole));
    Some(tree)
}

// ---------------------------------------------------------------------------------------------------
// Since the last sync

pub(super) fn since_sync(found: &Tree, trees: &[Arc<Tree>], crowded: bool) -> Result<(), String> {
    counts(&found.named)?;
    let mut moments: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (ino, seen) in &found.named {
        let versions: Vec<Option<&Arc<Seen>>> =
            trees.iter().map(|t| t.named.get(ino).or_else(|| t.nameless.get(ino))).collect();
        let mut fits = Vec::new();
        // What came before, and the change time that its log had at the first of those that are alike.
        let (mut was_alike, mut since) = (false, None);
        for (n, version) in versions.iter().enumerate() {
            // Trees share what did not change.
            let same_as_before =
                n > 0 && version.zip(versions[n - 1]).is_some_and(|(new, old)| Arc::ptr_eq(new, old));
            let alike = match same_as_before {
                true => was_alike,
                false => version.is_some_and(|v| same_log(seen, v)),
            };
            if alike && !was_alike {
                let may_be_older = |ctime| n == 0 && seen.ctime < ctime && (crowded || removes_one(trees));
                since = version.map(|v| v.ctime).filter(|ctime| !may_be_older(*ctime));
            }
            was_alike = alike;
            let fit =
                alike && since.is_none_or(|since| since <= seen.ctime) && same_names(found, &trees[n], seen);
            fits.extend(fit.then_some(n));
        }
        // Names change this time, too, and directories that keep it may be lost: then an older one shows. A newer one
        // never was.
        let is_own = |v: Option<&Arc<Seen>>| v.is_some_and(|v| v.generation == seen.generation);
        let own = versions.iter().flatten().filter(|v| v.generation == seen.generation);
        // Who took its last name set it once more, though no tree shows it: another of its names may be back.
        let went = (1..trees.len()).filter(|&n| is_own(versions[n - 1]) && !is_own(versions[n]));
        let newest = own.map(|v| v.ctime).chain(went.filter_map(|n| newest_of(&trees[n]))).max();
        if fits.is_empty() || newest.is_none_or(|newest| seen.ctime > newest) {
            let last = versions.iter().flatten().next_back();
            let how = last.map_or("never there".to_owned(), |v| seen.differs(v));
            return Err(format!(
                "inode {ino} is as it never was since the last sync; at the end of it: {how}"
            ));
        }
        moments.insert(*ino, fits);
    }
    let pairs = pairs(trees);
    let mut dirs: Vec<u32> = pairs.iter().flat_map(|p| [p.from, p.to]).collect();
    dirs.sort_unstable();
    dirs.dedup();
    dirs.retain(|dir| moments.contains_key(dir));
    let last = trees.last().expect("there is one moment");
    if choose(&dirs, &moments, &mut BTreeMap::new(), &|chosen| {
        pairs.iter().all(|p| p.holds(chosen, last.named.contains_key(&p.to)))
    }) {
        lost(found, trees)
    } else {
        Err(format!("a rename is in one directory and not in the other: {}", found.differs(last)))
    }
}

/// When the last operation was, by what it changed.
fn newest_of(tree: &Tree) -> Option<Time> {
    tree.named.values().chain(tree.nameless.values()).map(|seen| seen.ctime).max()
}

/// Whether a directory went: change times that it alone had may be older then.
fn removes_one(trees: &[Arc<Tree>]) -> bool {
    let is_dir = |seen: &Seen| seen.mode & libc::S_IFMT == libc::S_IFDIR;
    trees[0].named.iter().filter(|(_, seen)| is_dir(seen)).any(|(ino, first)| {
        let stays = |tree: &Arc<Tree>| tree.named.get(ino).is_some_and(|s| s.generation == first.generation);
        !trees.iter().all(stays)
    })
}

/// Whether the names of `seen` lead to the same in both trees, not to others that have the numbers now.
fn same_names(found: &Tree, tree: &Tree, seen: &Seen) -> bool {
    let generation = |tree: &Tree, ino| Some(Inodes::get(&tree.named, ino)?.generation);
    seen.names.values().all(|child| generation(tree, child) == generation(found, child))
}

/// What had a name all the time is there. (A file that had two of them may have lost both: what a `link` in one directory and an
/// `unlink` in another left is not ordered.)
fn lost(found: &Tree, trees: &[Arc<Tree>]) -> Result<(), String> {
    let keeps = |seen: &Seen| seen.mode & libc::S_IFMT == libc::S_IFDIR || seen.nlink == 1;
    let is_there = |tree: &Tree, ino: &u32, first: &Seen| {
        tree.named.get(ino).is_some_and(|seen| seen.generation == first.generation && keeps(seen))
    };
    for (ino, first) in &trees[0].named {
        let stays = trees.iter().all(|tree| is_there(tree, ino, first));
        if stays && found.named.get(ino).is_none_or(|seen| seen.generation != first.generation) {
            return Err(format!("inode {ino} had a name all the time since the last sync, and is lost"));
        }
    }
    Ok(())
}

/// The same, but for what other logs decide: link counts, parents, and the time of the last change of names.
fn same_log(a: &Seen, b: &Seen) -> bool {
    a.generation == b.generation
        && a.mode == b.mode
        && (a.uid, a.gid, a.rdev) == (b.uid, b.gid, b.rdev)
        && (a.size, a.blocks) == (b.size, b.blocks)
        && (a.mtime, a.btime) == (b.mtime, b.btime)
        && a.content == b.content
        && a.data == b.data
        && a.xattrs == b.xattrs
        && a.fixed == b.fixed
        && a.names == b.names
        && a.listed == b.listed
}

/// Link counts and parents are what the names say.
fn counts(named: &Inodes) -> Result<(), String> {
    let is_dir = |ino: &u32| named.get(ino).is_some_and(|s| s.mode & libc::S_IFMT == libc::S_IFDIR);
    let mut links: BTreeMap<u32, u32> = BTreeMap::from([(Ino::ROOT.0, 1)]);
    for (dir, seen) in named {
        for child in seen.names.values() {
            *links.entry(*child).or_default() += 1;
            if is_dir(child) {
                *links.entry(*dir).or_default() += 1;
                if named[child].parent != *dir {
                    return Err(format!("inode {child}: \"..\" leads to {}, not {dir}", named[child].parent));
                }
            }
        }
        if is_dir(dir) {
            *links.entry(*dir).or_default() += 1;
        }
    }
    match named.iter().find(|(ino, seen)| links.get(ino) != Some(&seen.nlink)) {
        Some((ino, seen)) => {
            Err(format!("inode {ino} has {} links, its names say {:?}", seen.nlink, links[ino]))
        }
        None => Ok(()),
    }
}

/// An operation that changed the names of two directories, at a moment.
struct Pair {
    at: usize,
    /// Which lost the name, and which got it.
    from: u32,
    to: u32,
}

impl Pair {
    fn holds(&self, chosen: &BTreeMap<u32, usize>, to_stays: bool) -> bool {
        let has = |dir: u32| chosen.get(&dir).map(|moment| *moment >= self.at);
        match (has(self.from), has(self.to)) {
            (Some(a), Some(b)) => a == b,
            // What left for a directory that is not there has stayed; unless that one was removed afterwards.
            (Some(left), None) => !left || !to_stays,
            (None, _) => true,
        }
    }
}

fn pairs(trees: &[Arc<Tree>]) -> Vec<Pair> {
    let mut found = Vec::new();
    for (n, two) in trees.windows(2).enumerate() {
        let changed: Vec<(&u32, &Arc<Seen>)> = two[1]
            .named
            .iter()
            .filter(|(ino, seen)| two[0].named.get(ino).is_some_and(|was| was.names != seen.names))
            .collect();
        if let [(a, seen_a), (b, _)] = changed[..] {
            // In an exchange both get one; a whiteout comes from nowhere.
            let came = seen_a.names.values().any(|child| two[0].named[b].names.values().any(|c| c == child));
            let (from, to) = if came { (*b, *a) } else { (*a, *b) };
            found.push(Pair { at: n + 1, from, to });
        }
    }
    found
}

/// Whether moments can be chosen for all directories so that `holds`.
fn choose(
    dirs: &[u32],
    moments: &BTreeMap<u32, Vec<usize>>,
    chosen: &mut BTreeMap<u32, usize>,
    holds: &dyn Fn(&BTreeMap<u32, usize>) -> bool,
) -> bool {
    let Some((dir, rest)) = dirs.split_first() else { return holds(chosen) };
    moments[dir].iter().any(|moment| {
        chosen.insert(*dir, *moment);
        choose(rest, moments, chosen, holds)
    })
}

// ---------------------------------------------------------------------------------------------------
// Beyond the tree

/// What the media of a file system holds now, as if everything had been written back.
pub fn settled(fs: Arc<Fs<SimMedia>>) -> CrashPoint {
    fs.media().crash_point()
}

/// What else must hold of a recovered file system, checked by other means than its own operations.
pub fn independent(fs: &Fs<SimMedia>) -> Result<(), String> {
    let (report, stat) = (fs.open_report(), fs.statfs());
    if report.damaged > 0 {
        return Err(format!("{} inodes are called damaged, and only power failed", report.damaged));
    }
    if report.checkpoint_damaged {
        return Err("its checkpoint is damaged, and only power failed".to_owned());
    }
    if stat.blocks_free > stat.blocks || stat.inodes_free > stat.inodes {
        return Err(format!("it counts more free than there is: {stat:?}"));
    }
    Ok(())
}

/// What the checker says of it, which shares with recovery the format alone.
pub fn checked<M: Media>(fs: &Fs<M>) -> Result<(), String> {
    let report = fs.check().map_err(|e| format!("it cannot be checked: {e:?}"))?;
    match report.findings.first() {
        Some(finding) => {
            Err(format!("the check finds {}: {finding}", report.findings.len() as u64 + report.more))
        }
        None => Ok(()),
    }
}

/// Opens it again, uses it, removes everything: nothing may have been lost on the way. `free_when_empty` blocks
/// are free then, or nearly.
pub fn use_up(point: &CrashPoint, found: &Tree, free_when_empty: u64) -> Result<(), String> {
    let fs = machine::open(point.media(Keep::Everything))?;
    let again = Tree::read(&fs, [])?;
    if again.named != found.named {
        return Err(format!("a second recovery changes it: {}", again.differs(found)));
    }
    work(&fs)?;
    let after = Tree::read(&fs, [])?;
    remove_all(&fs, &after)?;
    (0..3).try_for_each(|_| fs.sync()).map_err(|e| format!("it cannot be synced: {e:?}"))?;
    let free = fs.statfs().blocks_free;
    // The root's log and the inode table may have grown.
    let slack = 4 + (fs.statfs().inodes - fs.statfs().inodes_free) / 8;
    if free + slack < free_when_empty {
        return Err(format!("{free} blocks are free when everything is removed, not {free_when_empty}"));
    }
    fs.close().map_err(|e| format!("it cannot be closed: {e:?}"))?;
    let closed = machine::open(settled(fs).media(Keep::Everything))?;
    if !closed.open_report().was_clean {
        return Err("a clean close is not seen by the next open".to_owned());
    }
    checked(&closed)?;
    let left = Tree::read(&closed, [])?;
    if left.named.len() > 1 { Err("what was removed is back after a clean close".to_owned()) } else { Ok(()) }
}

/// Opens what is left when one bit of it goes wrong, `count` times: it is as it was, but for the bytes of files
/// (nothing promises that a read verifies them), or an error says that it is not. `mutation`: what is left out.
pub fn flipped(
    closed: &CrashPoint,
    whole: &Tree,
    mutation: Option<&Arc<Mutation>>,
    count: u32,
    seed: u64,
) -> Result<(), String> {
    let image = closed.image(Keep::Everything);
    let used: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    let wanted = without_content(whole);
    let says = |fs: &Fs<SimMedia>| {
        let info = fs.info();
        (info.uuid, info.label, info.format_version, info.bytes, info.created)
    };
    let said = says(&*machine::open(closed.media(Keep::Everything))?);
    let mut rng = Rng::new(seed);
    for n in 0..count as usize {
        // The superblock is small, and the first there is.
        let used = if n % 8 == 0 { &used[..used.len().min(SUPER_BYTES)] } else { &used[..] };
        let at = used[rng.below(used.len() as u64) as usize];
        let media = closed.media(Keep::Everything);
        media.mutate(mutation.cloned());
        media.flip(at, rng.below(8) as u32);
        let what = |e: String| format!("byte {at:#x} went wrong, and nobody says so: {e}");
        let Ok(fs) = machine::open(media) else { continue };
        let found = match Tree::look(&fs, []) {
            Ok(found) => without_content(&found),
            // That is what the judge says.
            Err((CONTRADICTS, e)) => return Err(what(e)),
            Err(_) => continue,
        };
        if says(&fs) != said {
            return Err(what(format!("the pool calls itself {:?}, not {said:?}", says(&fs))));
        }
        if fs.open_report().damaged == 0 && found.named != wanted.named {
            return Err(what(found.differs(&wanted)));
        }
    }
    Ok(())
}

fn without_content(tree: &Tree) -> Tree {
    let mut tree = tree.clone();
    for seen in tree.named.values_mut().filter(|seen| seen.mode & libc::S_IFMT == libc::S_IFREG) {
        Arc::make_mut(seen).content.clear();
    }
    tree
}

/// A little of everything; a full pool may refuse it.
fn work(fs: &Fs<SimMedia>) -> Result<(), String> {
    let cred = Cred::root();
    let works = || -> crate::Result<bool> {
        let (attr, _) = fs.create(&cred, Ino::ROOT, b"judge", 0o600, 0, libc::O_EXCL)?;
        let src = super::workload::bytes(1 << 20, 0, 5000);
        let written = fs.write(&cred, attr.ino, 100, &src, false).and_then(|_| {
            let mut back = vec![0; src.len()];
            fs.read(attr.ino, 100, &mut back)?;
            Ok(back == src)
        });
        fs.release(attr.ino);
        fs.forget(attr.ino, 1);
        let moved = fs.rename(&cred, Ino::ROOT, b"judge", Ino::ROOT, b"judged", 0);
        Ok(written? && moved.map(|()| true)?)
    };
    match works() {
        Ok(true) => Ok(()),
        Ok(false) => Err("what is written is not read back".to_owned()),
        Err(e) if e.errno() == libc::ENOSPC => Ok(()),
        Err(e) => Err(format!("it cannot be used: {e:?}")),
    }
}

/// Refused while it is fixed, a file of several names is fixed once.
fn unfix(fs: &Fs<SimMedia>, ino: Ino) -> Result<(), String> {
    match fs.removexattr(&Cred::root(), ino, FIXED).map_err(|e| (e.errno(), e)) {
        Ok(()) | Err((libc::ENODATA, _)) => Ok(()),
        Err((_, e)) => Err(format!("inode {} stays fixed: {e:?}", ino.0)),
    }
}

/// Removes every name.
pub fn remove_all(fs: &Fs<SimMedia>, tree: &Tree) -> Result<(), String> {
    let mut dirs = vec![(String::from("/"), Ino::ROOT)];
    let mut at = 0;
    while at < dirs.len() {
        let (path, dir) = dirs[at].clone();
        at += 1;
        for (name, child) in &tree.named[&dir.0].names {
            let path = format!("{path}{}", String::from_utf8_lossy(name));
            if Kind::from_mode(tree.named[child].mode) == Some(Kind::Directory) {
                dirs.push((format!("{path}/"), Ino(*child)));
            } else {
                if tree.named[child].fixed {
                    unfix(fs, Ino(*child))?;
                }
                fs.unlink(&Cred::root(), dir, name)
                    .map_err(|e| format!("{path} cannot be removed: {e:?}"))?;
            }
        }
    }
    for (path, dir) in dirs.iter().skip(1).rev() {
        let parent = Ino(tree.named[&dir.0].parent);
        let name = path.trim_end_matches('/').rsplit('/').next().expect("a name");
        fs.rmdir(&Cred::root(), parent, name.as_bytes())
            .map_err(|e| format!("{path} cannot be removed: {e:?}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::model::Model;
    use crate::sim::tree::time;
    use crate::sim::workload::Op;

    /// What there is after each operation, in steps of a second: the last one of `before` is synced.
    fn history(before: &[&str], ops: &[&str]) -> (Model, Vec<Arc<Tree>>) {
        let mut model = Model::new(1);
        let mut does = |op: &&str| {
            model.now += 1;
            op.parse::<Op>().unwrap().on_model(&mut model, 1).unwrap();
            Arc::new(Tree::of(&model))
        };
        let mut trees: Vec<_> = before.iter().chain(ops).map(&mut does).collect();
        trees.drain(..before.len() - 1);
        (model, trees)
    }

    /// A tree with another change time of what a path leads to.
    fn changed(tree: &Tree, path: &str, sec: i64) -> Tree {
        let (mut tree, ino) = (tree.clone(), tree.paths().into_iter().find(|(p, _)| p == path).unwrap().1);
        Arc::make_mut(tree.named.get_mut(&ino).unwrap()).ctime = time(sec);
        tree
    }

    #[test]
    fn a_change_time_is_of_the_change_that_shows_or_of_a_later_one() {
        let (model, trees) =
            history(&["create a", "create b"], &["chmod a 600", "chmod b 600", "chmod a 640", "chmod b 640"]);
        let created = trees[0].named[&model.resolve("a", true).unwrap()].ctime.sec;
        let judged = |tree: &Tree, sec| since_sync(&changed(tree, "a", sec), &trees, false).is_ok();
        trees.iter().for_each(|tree| since_sync(tree, &trees, false).unwrap());
        let found: Vec<bool> = (created - 1..created + 7).map(|sec| judged(&trees[0], sec)).collect();
        // Links and renames may have made it newer, of which nothing else shows.
        assert_eq!(found, [false, true, true, true, true, true, false, false], "of the first");
        let found: Vec<bool> = (created - 1..created + 7).map(|sec| judged(&trees[4], sec)).collect();
        assert_eq!(found, [false, false, false, false, false, true, false, false], "of the last");
    }

    #[test]
    fn a_directory_that_goes_takes_change_times_with_it() {
        let before = ["create a", "mkdir A", "link a A/a", "unlink A/a"];
        for (ops, goes) in [(["rmdir A", "create b"], true), (["create b", "create c"], false)] {
            let (_, trees) = history(&before, &ops);
            let older = changed(&trees[2], "a", 2);
            let found = since_sync(&older, &trees, false);
            assert_eq!(found.is_ok(), goes, "{ops:?}: {found:?}");
            since_sync(&older, &trees, true).unwrap();
        }
    }

    #[test]
    fn a_name_leads_to_no_other_who_has_the_number_now() {
        let (_, mut trees) = history(&["create a"], &["unlink a", "create b"]);
        let ids: BTreeMap<u32, u32> = [(0, 0), (1, 1), (3, 2)].into();
        let mut last = trees[2].numbered(&ids);
        Arc::make_mut(last.named.get_mut(&2).unwrap()).generation = 1;
        trees[2] = Arc::new(last);
        trees.iter().for_each(|tree| since_sync(tree, &trees, false).unwrap());
        let mut found = Tree::clone(&trees[0]);
        found.named.insert(2, trees[2].named[&2].clone());
        let refused = since_sync(&found, &trees, false).unwrap_err();
        assert!(refused.contains("inode 1 is as it never was"), "{refused}");
    }
}
