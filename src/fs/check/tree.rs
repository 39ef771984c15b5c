//! The names: which inodes the root reaches, by which entries, and which it should.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::super::alloc::{Block, Run};
use super::super::format::*;
use super::super::types::Kind;
use super::image::{self, Entry, Half, Image, Names};
use super::space::Space;
use super::{Account, Finding, Pool, What};
use crate::media::{LINE, Media};

/// An entry that must go or change, for the repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fix {
    Remove,
    /// It is given this type.
    Type(Kind),
}

#[derive(Default)]
pub struct Tree {
    /// Directories that are reached, orphans among them.
    pub dirs: BTreeMap<u32, Arc<Image>>,
    /// Names that lead to an inode, by number.
    names: BTreeMap<u32, u32>,
    parents: HashMap<u32, u32>,
    subdirectories: HashMap<u32, u32>,
    /// Headers made from a name, of slots that are damaged.
    pub rescued: HashMap<u32, SlotHeader>,
    pub findings: Vec<Finding>,
    /// By directory and cookie.
    pub fixes: BTreeMap<(u32, u32), Fix>,
    /// Inodes that lead a tree of their own without a name, and must get one.
    pub orphans: Vec<u32>,
    /// Operations in doubt of which half is missing: where the directory's log ends for that.
    cuts: HashMap<u32, u32>,
}

impl Tree {
    pub fn read<M: Media>(pool: &Pool<M>, account: Option<&Account>) -> Tree {
        let mut cuts = HashMap::new();
        loop {
            let mut tree = Tree { cuts: cuts.clone(), ..Tree::default() };
            tree.root(pool);
            if tree.cut_halves(pool, &mut cuts) {
                continue;
            }
            tree.find_orphans(pool, account);
            return tree;
        }
    }

    /// Halves of operations on two directories that count only with the other one.
    pub fn halves_in_doubt(&self) -> impl Iterator<Item = &Half> {
        self.dirs.values().flat_map(|dir| &dir.halves).filter(|half| half.in_doubt)
    }

    /// Inodes with a name (or that get one), ascending.
    pub fn named(&self) -> impl Iterator<Item = u32> + '_ {
        self.names.keys().copied()
    }

    pub fn is_named(&self, ino: u32) -> bool {
        self.names.contains_key(&ino)
    }

    pub fn links(&self, ino: u32) -> u32 {
        if !self.dirs.contains_key(&ino) {
            return self.names.get(&ino).copied().unwrap_or(0);
        }
        2 + self.subdirectories.get(&ino).copied().unwrap_or(0)
    }

    pub fn parent(&self, ino: u32) -> Option<u32> {
        self.parents.get(&ino).copied()
    }

    /// An inode as its log has it.
    pub fn image<M: Media>(&self, pool: &Pool<M>, ino: u32) -> Option<Arc<Image>> {
        if let Some(dir) = self.dirs.get(&ino) {
            return Some(dir.clone());
        }
        let header = pool.header(ino).or_else(|| self.rescued.get(&ino).copied())?;
        let owner = pool.owner(ino, header.generation);
        Some(Arc::new(image::read(pool, owner, header, self.cuts.get(&ino).copied())))
    }

    /// The entries that lead to inodes: the directory and the name, by inode.
    pub fn index(&self) -> HashMap<u32, (u32, &[u8])> {
        let mut index = HashMap::new();
        for (&dir, image) in &self.dirs {
            for e in image.entries.values() {
                // Of a directory its own one: another entry may lead to it by mistake.
                if self.parents.get(&e.ino).is_none_or(|&parent| parent == dir) {
                    index.entry(e.ino).or_insert((dir, &*e.name));
                }
            }
        }
        index
    }

    fn root<M: Media>(&mut self, pool: &Pool<M>) {
        let header = pool
            .header(ROOT_INO)
            .filter(|h| h.mode & libc::S_IFMT == libc::S_IFDIR && h.generation == 1 << 40 | 1);
        if header.is_none() {
            let detail = "the slot of the root directory is damaged";
            self.findings.push(Finding::of(What::Slot, ROOT_INO, detail));
            // mkfs gives every root this generation.
            self.rescued.insert(ROOT_INO, made_header(Kind::Directory, 1 << 40 | 1, pool.sb.created));
        }
        self.parents.insert(ROOT_INO, ROOT_INO);
        self.names.insert(ROOT_INO, 1);
        self.grow(pool, ROOT_INO);
    }

    /// Follows all names below a directory.
    fn grow<M: Media>(&mut self, pool: &Pool<M>, from: u32) {
        let mut queue = std::collections::VecDeque::from([from]);
        while let Some(ino) = queue.pop_front() {
            let header = self.rescued.get(&ino).copied().or_else(|| pool.header(ino));
            let header = header.expect("what is reached has a header");
            let cut = self.cuts.get(&ino).copied();
            let dir = image::read(pool, pool.owner(ino, header.generation), header, cut);
            for (&cookie, entry) in &dir.entries {
                if self.follow(pool, ino, cookie, entry) {
                    queue.push_back(entry.ino);
                }
            }
            self.dirs.insert(ino, Arc::new(dir));
        }
    }

    /// Whether the entry leads to a directory that nobody led to before.
    fn follow<M: Media>(&mut self, pool: &Pool<M>, dir: u32, cookie: u32, entry: &Entry) -> bool {
        let name = entry.name.escape_ascii();
        let rescued = self.rescued.get(&entry.ino).copied();
        let header = match rescued.or_else(|| pool.header(entry.ino)) {
            Some(header) => Some(header),
            None if is_damaged(pool, entry.ino) => {
                let detail = format!("its slot is damaged; entry {name} of directory {dir} leads to it");
                self.findings.push(Finding::of(What::Slot, entry.ino, detail));
                let header = made_header(entry.kind, entry.generation, pool.sb.created);
                self.rescued.insert(entry.ino, header);
                Some(header)
            }
            None => None,
        };
        let valid = header.filter(|h| h.generation == entry.generation && entry.ino > ROOT_INO);
        let Some(header) = valid else {
            let detail = format!("entry {name} leads to inode {}, which is not there", entry.ino);
            self.findings.push(Finding::of(What::Entry, dir, detail));
            self.fixes.insert((dir, cookie), Fix::Remove);
            return false;
        };
        let kind = Kind::from_mode(header.mode).expect("headers were looked at");
        if kind != entry.kind {
            let detail = format!("entry {name} says {:?}, inode {} is {kind:?}", entry.kind, entry.ino);
            self.findings.push(Finding::of(What::EntryType, dir, detail));
            self.fixes.insert((dir, cookie), Fix::Type(kind));
        }
        if kind == Kind::Directory && self.names.contains_key(&entry.ino) {
            let detail = format!("entry {name} leads to directory {}, which another one names", entry.ino);
            self.findings.push(Finding::of(What::TwoParents, dir, detail));
            self.fixes.insert((dir, cookie), Fix::Remove);
            return false;
        }
        *self.names.entry(entry.ino).or_insert(0) += 1;
        if kind == Kind::Directory {
            self.parents.insert(entry.ino, dir);
            *self.subdirectories.entry(dir).or_insert(0) += 1;
        }
        kind == Kind::Directory
    }

    /// Finds operations on two directories in doubt of which one half is missing: whether there are any yet.
    fn cut_halves<M: Media>(&self, pool: &Pool<M>, cuts: &mut HashMap<u32, u32>) -> bool {
        let mut halves: HashMap<u64, u32> = HashMap::new();
        for half in self.dirs.values().flat_map(|dir| &dir.halves) {
            *halves.entry(half.partner.transaction).or_default() += 1;
        }
        // A directory that is gone, or that is not reached: its log may still say it.
        let mut told: HashMap<(u32, u64), Option<HashSet<u64>>> = HashMap::new();
        let read = |(ino, generation)| -> Option<HashSet<u64>> {
            let header = pool.header(ino).filter(|header| header.generation == generation)?;
            let image = image::read(pool, pool.owner(ino, generation), header, None);
            Some(image.halves.iter().map(|half| half.partner.transaction).collect())
        };
        let mut changed = false;
        for (&ino, dir) in &self.dirs {
            let void = dir.halves.iter().find(|h| {
                h.in_doubt
                    && halves[&h.partner.transaction] < 2
                    && match self.dirs.get(&h.partner.ino) {
                        Some(other) if other.owner.generation == h.partner.generation => {
                            (other.log.head_seq.wrapping_sub(h.partner.seq) as i32) <= 0
                                && !other.lost_records()
                        }
                        _ => {
                            let partner = (h.partner.ino, h.partner.generation);
                            let told = told.entry(partner).or_insert_with(|| read(partner));
                            told.as_ref().is_some_and(|said| !said.contains(&h.partner.transaction))
                        }
                    }
            });
            if let Some(half) = void {
                changed |= cuts.insert(ino, half.seq) != Some(half.seq);
            }
        }
        changed
    }

    /// Finds inodes that had a name and have none.
    fn find_orphans<M: Media>(&mut self, pool: &Pool<M>, account: Option<&Account>) {
        let hidden = self.dirs.values().any(|dir| dir.lost_records())
            || self.findings.iter().any(|f| matches!(f.what, What::Slot));
        let counted = account.filter(|a| !a.links.is_empty());
        let mut lost: BTreeMap<u32, Image> = BTreeMap::new();
        let unnamed = (ROOT_INO + 1..pool.slots()).filter(|ino| !self.names.contains_key(ino));
        if let Some(account) = counted {
            for ino in unnamed {
                if account.links.get(ino as usize).is_some_and(|&(links, _)| links > 0) {
                    lost.extend(pool.image(ino).map(|image| (ino, image)));
                }
            }
        } else if hidden && !pool.live {
            lost = self.guess_orphans(pool, unnamed.collect());
        }
        let named: BTreeSet<(u32, u64)> = lost
            .iter()
            .flat_map(|(&dir, image)| {
                let others = move |e: &&Entry| e.ino != dir;
                image.entries.values().filter(others).map(|e| (e.ino, e.generation))
            })
            .collect();
        let leads =
            |(&ino, image): (&u32, &Image)| (!named.contains(&(ino, image.owner.generation))).then_some(ino);
        let leading: Vec<u32> = lost.iter().filter_map(leads).collect();
        // Behind those that nobody names: circles, which begin anywhere.
        for ino in leading.into_iter().chain(lost.keys().copied()) {
            if self.names.contains_key(&ino) {
                continue;
            }
            let image = &lost[&ino];
            let detail = format!("no path leads to this {:?}, which is whole", image.kind).to_lowercase();
            self.findings.push(Finding::of(What::Orphan, ino, detail));
            self.orphans.push(ino);
            self.names.insert(ino, 1);
            if image.kind == Kind::Directory {
                self.grow(pool, ino);
            }
        }
    }

    /// Where directories are damaged and nobody counted: inodes whose logs and data are whole, that nobody was seen to
    /// remove, and whose blocks are nobody else's. A name yields where it leads to what was last written before the other was:
    /// no block has two owners at a time, so that it was removed, and the line that says so was lost as well.
    fn guess_orphans<M: Media>(&self, pool: &Pool<M>, unnamed: Vec<u32>) -> BTreeMap<u32, Image> {
        let mut lost = BTreeMap::new();
        for ino in unnamed {
            let Some(image) = pool.image(ino) else { continue };
            let holds = image.is_whole()
                && image.sums.iter().all(|(&start, sum)| image.holds(pool, start, sum) != Some(false));
            if holds {
                lost.insert(ino, image);
            }
        }
        let removed = removed(self.dirs.values().map(|dir| &**dir).chain(lost.values()));
        lost.retain(|&ino, image| !removed.contains(&(ino, image.owner.generation)));
        let mut space = Space::new(pool.sb.blocks);
        pool.table.iter().for_each(|&block| space.keep(Run::new(Block(block), 1)));
        // Whoever was written to last is no leftover. A log that is read stands where it stands.
        let mut order: Vec<(Age, bool, u64, u32)> =
            lost.iter().map(|(&ino, image)| (age(image), false, image.owner.generation, ino)).collect();
        for image in self.names.keys().filter_map(|&ino| self.image(pool, ino)) {
            space.take_log(&image);
            order.push((age(&image), true, image.owner.generation, image.owner.ino));
        }
        order.sort_unstable();
        for (_, is_named, _, ino) in order.into_iter().rev() {
            if is_named {
                self.image(pool, ino).iter().for_each(|image| space.take_data(image));
            } else if space.is_free_of(&lost[&ino]) {
                space.take_image(&lost[&ino]);
            } else {
                lost.remove(&ino);
            }
        }
        lost
    }
}

/// Sync epoch, and time within it.
pub type Age = (u64, u64);

/// When an inode was last written to.
pub fn age(image: &Image) -> Age {
    (image.log.newest_epoch, image.ctime)
}

/// Inodes that were seen to lose a name for good.
fn removed<'a>(dirs: impl Iterator<Item = &'a Image> + Clone) -> HashSet<(u32, u64)> {
    let halves = || dirs.clone().flat_map(|dir| &dir.halves);
    let left: HashSet<u64> =
        halves().filter(|h| matches!(h.names, Names::Leaves)).map(|h| h.partner.transaction).collect();
    let replaced = halves().filter(|h| left.contains(&h.partner.transaction)).filter_map(|h| match h.names {
        Names::Comes { instead_of } => instead_of,
        Names::Leaves => None,
    });
    dirs.clone().flat_map(|dir| &dir.removed).copied().chain(replaced).collect()
}

/// Whether a slot holds something that is no header, or cannot be read.
fn is_damaged<M: Media>(pool: &Pool<M>, ino: u32) -> bool {
    if ino <= ROOT_INO || !pool.has_slot(ino) {
        return false;
    }
    let mut line = [0; LINE];
    pool.media.read(pool.slot(ino), &mut line).is_err() || line.iter().any(|&byte| byte != 0)
}

/// What is known of an inode whose slot is lost: nobody but the superuser gets at it.
fn made_header(kind: Kind, generation: u64, btime: u64) -> SlotHeader {
    let permissions = if kind == Kind::Directory { 0o700 } else { 0o600 };
    SlotHeader { mode: kind.mode_bits() | permissions, uid: 0, gid: 0, generation, rdev: 0, btime }
}
