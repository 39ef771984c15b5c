//! Threads on an ordinary file: a power failure may leave of every inode what it was at another moment of a serial order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::history::{Call, History};
use super::judge;
use super::model::{self, Model};
use super::tree::Tree;
use super::workload::Op;
use crate::fs::Ino;

impl History {
    /// The same for what a power failure left on an ordinary file: of a serial order every inode is as it was at some
    /// moment since what the last sync waited for (see [`judge`]).
    pub fn serial_since_sync(&self, begin: &Model, found: &Tree) -> Result<(), String> {
        let synced = self.synced();
        self.some_order(begin, found, &|order| {
            let last = order.calls.iter().rposition(|n| synced.contains(n));
            let trees: Vec<Arc<Tree>> = order.moments.iter().map(|model| Arc::new(Tree::of(model))).collect();
            since_sync(found, &trees, &trees[last.map_or(0, |n| n + 1)..])
        })
    }

    /// What a sync that was acknowledged has to have made durable: what had ended when it began.
    fn synced(&self) -> Vec<usize> {
        let is_sync = |c: &&Call| matches!(c.op, Op::Sync | Op::Tick | Op::Fsync(_));
        let syncs = self
            .calls
            .iter()
            .filter(is_sync)
            .filter(|c| c.ended.is_some_and(|(_, answered)| answered.is_ok()));
        let Some(last) = syncs.filter_map(|c| c.begun).max() else { return Vec::new() };
        let before = |n: &usize| self.calls[*n].ended.is_some_and(|(ended, _)| ended < last);
        (0..self.calls.len()).filter(before).collect()
    }
}

/// Whether inodes can be told apart by names that they had at any moment, so that the judge finds nothing amiss.
fn since_sync(found: &Tree, ever: &[Arc<Tree>], allowed: &[Arc<Tree>]) -> Result<(), String> {
    let mut names = vec![Ino::ROOT.0];
    let mut seen = BTreeSet::new();
    let mut entries = Vec::new();
    while let Some(dir) = names.pop() {
        for (name, child) in &found.named[&dir].names {
            entries.push((dir, name.as_slice(), *child));
            if seen.insert(*child) {
                names.push(*child);
            }
        }
    }
    let mut why = Err("it has a name that there never was".to_owned());
    let mut ids = BTreeMap::from([(Ino::ROOT.0, model::ROOT)]);
    if identified(&entries, ever, &mut ids, &mut |ids| {
        why = judge::since_sync(&found.numbered(ids), allowed, false);
        why.is_ok()
    }) {
        return Ok(());
    }
    why
}

/// Names and what they lead to, directories first; calls for each way to identify them until one holds.
fn identified(
    entries: &[(u32, &[u8], u32)],
    ever: &[Arc<Tree>],
    ids: &mut BTreeMap<u32, model::Id>,
    holds: &mut dyn FnMut(&BTreeMap<u32, model::Id>) -> bool,
) -> bool {
    let Some(((dir, name, child), rest)) = entries.split_first() else { return holds(ids) };
    if ids.contains_key(child) {
        return identified(rest, ever, ids, holds);
    }
    let dir = ids[dir];
    let led_to = |tree: &Arc<Tree>| {
        let seen = tree.named.get(&dir).or_else(|| tree.nameless.get(&dir))?;
        seen.names.get(*name).copied()
    };
    let could_be: BTreeSet<model::Id> = ever.iter().filter_map(led_to).collect();
    could_be.into_iter().any(|id| {
        if ids.values().any(|taken| *taken == id) {
            return false;
        }
        ids.insert(*child, id);
        let held = identified(rest, ever, ids, holds);
        ids.remove(child);
        held
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of as many threads, each of which ended before the next began, on what `before` made.
    fn history(before: &[&str], calls: &[&str]) -> (Model, History) {
        let mut model = Model::new(1);
        let parse = |text: &str| text.parse::<Op>().unwrap();
        before.iter().for_each(|text| parse(text).on_model(&mut model, 1).unwrap());
        let call = |(n, text): (usize, &&str)| {
            let (begun, ended) = (Some(2 * n + 1), Some((2 * n + 2, Ok(()))));
            Call { thread: n, op: parse(text), tag: 10 + n as u64, begun, ended }
        };
        (model, History::new(calls.iter().enumerate().map(call).collect()))
    }

    /// The tree after the first `n` calls, by numbers of its own.
    fn after(begin: &Model, history: &History, n: usize) -> Tree {
        let mut model = begin.clone();
        history.calls[..n].iter().for_each(|call| call.op.on_model(&mut model, call.tag).unwrap());
        let tree = Tree::of(&model);
        let own = |id: u32| if id <= model::ROOT { id } else { 100 - id };
        tree.numbered(&tree.named.keys().chain([&0]).map(|id| (*id, own(*id))).collect())
    }

    /// `tree` with an inode as it is in `other`, by a path that leads to it in both.
    fn with(mut tree: Tree, other: &Tree, path: &str) -> Tree {
        let ino = match path {
            "" => Ino::ROOT.0,
            _ => other.paths().into_iter().find(|(p, _)| p == path).unwrap().1,
        };
        tree.named.insert(ino, other.named[&ino].clone());
        let paths = tree.paths();
        let links = |ino: u32| paths.iter().filter(|(_, named)| *named == ino).count() as u32;
        tree.named.retain(|ino, _| *ino == Ino::ROOT.0 || links(*ino) > 0);
        for (ino, seen) in tree.named.iter_mut().filter(|(_, seen)| seen.names.is_empty() && seen.parent == 0)
        {
            Arc::make_mut(seen).nlink = links(*ino);
        }
        tree
    }

    #[test]
    fn each_file_is_of_a_moment_of_its_own() {
        let (begin, history) =
            history(&["create a", "create b"], &["write a 0 9", "write b 0 9", "append a 5"]);
        let trees: Vec<Tree> = (0..=3).map(|n| after(&begin, &history, n)).collect();
        for of_a in &trees {
            for of_b in &trees {
                history.serial_since_sync(&begin, &with(of_b.clone(), of_a, "a")).unwrap();
            }
        }
        let mut torn = trees[3].clone();
        let (_, ino) = torn.paths().into_iter().find(|(path, _)| path == "a").unwrap();
        Arc::make_mut(torn.named.get_mut(&ino).unwrap()).content[13] ^= 1;
        history.serial_since_sync(&begin, &torn).unwrap_err();
    }

    #[test]
    fn what_ended_before_a_sync_began_is_there() {
        let (begin, history) = history(&["create a", "create b"], &["write a 0 9", "fsync b", "append a 5"]);
        for n in 0..=3 {
            let found = history.serial_since_sync(&begin, &after(&begin, &history, n));
            assert_eq!(found.is_ok(), n > 0, "after {n} calls: {found:?}");
        }
    }

    #[test]
    fn a_rename_is_in_both_directories_or_in_neither() {
        let (begin, history) =
            history(&["mkdir A", "mkdir B", "create A/a"], &["rename A/a B/b", "chmod B 700"]);
        let trees: Vec<Tree> = (0..=2).map(|n| after(&begin, &history, n)).collect();
        trees.iter().for_each(|tree| history.serial_since_sync(&begin, tree).unwrap());
        for (one, other) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
            let half = with(trees[one].clone(), &trees[other], "B");
            let refused = history.serial_since_sync(&begin, &half).unwrap_err();
            assert!(refused.contains("a rename is in one directory"), "{refused}");
        }
    }

    #[test]
    fn an_older_one_behind_a_name_is_not_the_newer() {
        let (begin, history) = history(&["create a"], &["unlink a", "create a", "write a 0 9"]);
        for n in 0..=3 {
            history.serial_since_sync(&begin, &after(&begin, &history, n)).unwrap();
        }
        let mut newer = after(&begin, &history, 2);
        let (_, ino) = newer.paths().pop().unwrap();
        Arc::make_mut(newer.named.get_mut(&ino).unwrap()).mode ^= 1;
        history.serial_since_sync(&begin, &newer).unwrap_err();
    }
}
