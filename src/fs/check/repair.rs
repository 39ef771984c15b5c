//! Mends what the checker found. What validates stays; nothing is made up.
//!
//! Whatever is damaged of an inode, its log is written again, whole, in blocks that nobody has, with what its image
//! says. One 8-byte store of its log head then makes that count. So a crash at any time leaves each inode as it was
//! or as it is to be, and the next repair goes on from there:
//!
//! 1. All new logs and copied blocks are stored and synced.
//! 2. The state line says that the pool is not closed. It still names the checkpoint: who repairs next learns from
//!    its link counts which inodes had names.
//! 3. The heads of what names others move first (lost+found, the root): what no path leads to has a name before the damage
//!    is gone that shows that it needs one. Then, each after a sync, the inode table's, and all others.
//!
//! It goes in rounds until a check finds nothing any more. Before each, recovery voids what a crash interrupted, if
//! it can open the pool at all; after the last one the pool is opened and closed: a checkpoint is written.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use super::super::alloc::{Block, Run};
use super::super::fixed::{FIXED, STAMP_BYTES, remove_stamp};
use super::super::format::*;
use super::super::log::{Owner, block_addr};
use super::super::mount::{sync_behind, write_state, write_super};
use super::super::types::Kind;
use super::super::{Fs, OpenOptions};
use super::image::{Entry, Image, Value};
use super::rewrite::{self, Seed, no_space};
use super::tree::{Age, Fix, age};
use super::{Ask, Checked, Finding, NOWHERE, Report, Watch, What, heads, run, unreadable};
use crate::error::{Error, Result};
use crate::media::{Addr, LINE, Media};

/// Rounds of one repair: damage that hides other damage is nowhere deeper.
const ROUNDS_MAX: usize = 8;
const LOST_AND_FOUND: &str = "lost+found";

/// What a repair did.
#[derive(Clone, Debug)]
pub struct Repaired {
    /// What was wrong, in the order in which it was found, and mended where `after` does not say it again.
    pub found: Report,
    /// What is left.
    pub after: Report,
}

/// Mends the file system on `media`, which nobody uses. A pool without damage that was not closed is recovered and
/// closed.
pub fn repair<M: Media>(media: Arc<M>, power_lost: bool, watch: Option<Watch>) -> Result<Repaired> {
    let ask = Ask { power_lost, scrub: true, watch };
    if media.is_used(Addr(0), media.len()) {
        let message = "a guest runs whose memory is in this pool: suspend or stop it first";
        return Err(Error::message(libc::EBUSY, "check::repair", message));
    }
    let mut found = None::<Report>;
    for _ in 0..ROUNDS_MAX {
        let mut report = Report::default();
        let (sb, state) = heads(&*media, &mut report)?;
        if !report.is_clean() {
            // Of what cannot be stored the other copy counts; the check says it again.
            if let Err(e) = write_super(&*media, &sb) {
                tracing::warn!("a copy of the superblock cannot be written back: {e}");
            }
            write_state(&*media, &sb, &State { serial: state.serial + 1, ..state })?;
            write_state(&*media, &sb, &State { serial: state.serial + 2, ..state })?;
        }
        // With a checkpoint it is a repair that was cut short: nothing is in doubt, and recovery would free what
        // has no name yet.
        if !state.clean && state.checkpoint == 0 {
            // What it cannot open is mended first.
            let options = OpenOptions { no_ticker: true, power_lost, ..OpenOptions::default() };
            drop(Fs::open(media.clone(), &options));
        }
        let mut checked = run(&*media, ask, None)?;
        checked.report.findings.splice(0..0, report.findings);
        let mut mender = Mender::new(checked);
        let wants = mender.plan()?;
        mender.checked.name_paths();
        match &mut found {
            Some(found) => found.merge(&mender.checked.report),
            None => found = Some(mender.checked.report.clone()),
        }
        if !wants {
            break;
        }
        mender.commit()?;
    }
    let (_, state) = heads(&*media, &mut Report::default())?;
    if !state.clean {
        let options = OpenOptions { no_ticker: true, power_lost, ..OpenOptions::default() };
        match Fs::open(media.clone(), &options) {
            Ok(fs) => fs.close()?,
            Err(e) => tracing::warn!("the repaired pool does not open: {e}"),
        }
    }
    let after = run(&*media, ask, None)?.finish();
    Ok(Repaired { found: found.expect("there was a round"), after })
}

pub(super) struct Mender<'m, M: Media> {
    pub(super) checked: Checked<'m, M>,
    seed: Seed,
    /// What is written again.
    pub(super) images: BTreeMap<u32, Image>,
    /// Headers of slots that are written, too.
    headers: BTreeMap<u32, SlotHeader>,
    /// Directories whose heads move before those of others.
    first: BTreeSet<u32>,
    /// Pages of the inode table that have a new block.
    moved: BTreeSet<u32>,
    /// Blocks with other bytes than an inode wrote there by its checksums, and that inode.
    disproved: BTreeSet<(u32, u32)>,
    generations: u64,
}

/// This name, and others for where it is taken.
fn names(first: &str) -> impl Iterator<Item = Vec<u8>> + '_ {
    (1u32..).map(move |n| match n {
        1 => first.as_bytes().to_vec(),
        2 => format!("{first}~").into_bytes(),
        _ => format!("{first}~{n}").into_bytes(),
    })
}

/// Whose are blocks that more than one has.
#[derive(Default)]
struct Claims {
    /// Whose checksums say that the bytes are theirs.
    proved: BTreeMap<u32, BTreeSet<u32>>,
    /// Whose checksums say that they are not, and whose they are not.
    disproved: BTreeSet<(u32, u32)>,
    /// When the latest of those whose logs are whole, and that may have it, was last written to.
    newest: BTreeMap<u32, Age>,
    /// What a log stood in.
    logged: BTreeSet<u32>,
    /// What somebody has from now on.
    kept: BTreeSet<u32>,
}

impl Claims {
    fn others_proved(&self, ino: u32, block: u32) -> bool {
        self.proved.get(&block).is_some_and(|owners| !owners.contains(&ino))
    }

    fn are_kept_by(&self, ino: u32, block: u32) -> bool {
        let yields = self.disproved.contains(&(block, ino)) && self.newest.contains_key(&block);
        let is_others = yields || self.others_proved(ino, block);
        !is_others && !self.kept.contains(&block)
    }

    /// Whether the bytes are certainly not those of this inode, which was last written to then.
    fn are_anothers(&self, ino: u32, age: Age, block: u32) -> bool {
        let is_proved = self.proved.get(&block).is_some_and(|owners| owners.contains(&ino));
        let is_older = self.newest.get(&block).is_some_and(|&newest| age < newest);
        let is_wrong = self.disproved.contains(&(block, ino));
        self.logged.contains(&block) || self.others_proved(ino, block) || (is_older || is_wrong) && !is_proved
    }
}

impl<'m, M: Media> Mender<'m, M> {
    pub(super) fn new(mut checked: Checked<'m, M>) -> Mender<'m, M> {
        // The checkpoint may still be needed.
        checked.keep_checkpoint();
        let state = checked.pool.state;
        let seed = Seed { key_crc: checked.pool.key_crc, incarnation: state.mount + 1, epoch: state.settled };
        Mender {
            checked,
            seed,
            images: BTreeMap::new(),
            headers: BTreeMap::new(),
            first: BTreeSet::new(),
            moved: BTreeSet::new(),
            disproved: BTreeSet::new(),
            generations: 0,
        }
    }

    /// Decides what every damaged inode is from now on. Whether there is anything to do.
    pub(super) fn plan(&mut self) -> Result<bool> {
        let dirty: Vec<u32> = self.checked.dirty.iter().copied().collect();
        for ino in dirty {
            self.image(ino);
        }
        self.table()?;
        let rescued: Vec<(u32, SlotHeader)> =
            self.checked.tree.rescued.iter().map(|(&ino, &header)| (ino, header)).collect();
        for (ino, header) in rescued {
            self.headers.insert(ino, header);
            self.image(ino);
        }
        for ((dir, cookie), fix) in self.checked.tree.fixes.clone() {
            let Some(image) = self.image(dir) else { continue };
            match fix {
                Fix::Remove => _ = image.take(cookie),
                Fix::Type(kind) => {
                    if let Some(e) = image.entries.get_mut(&cookie) {
                        e.kind = kind;
                    }
                }
            }
        }
        self.links_without_target();
        self.values();
        self.fixed();
        self.data()?;
        self.blocks()?;
        self.orphans()?;
        let only_checkpoint = |f: &Finding| {
            matches!(f.what, What::Checkpoint | What::BlockLost | What::BlockFree | What::Links)
        };
        Ok(!self.images.is_empty() || self.checked.report.findings.iter().any(only_checkpoint))
    }

    /// The image of an inode that is to be written again.
    fn image(&mut self, ino: u32) -> Option<&mut Image> {
        if ino == TABLE_INO {
            return Some(self.images.entry(ino).or_insert_with(|| self.checked.table.clone()));
        }
        if !self.images.contains_key(&ino) {
            let image = self.checked.tree.image(&self.checked.pool, ino)?;
            self.images.insert(ino, Arc::unwrap_or_clone(image));
        }
        self.images.get_mut(&ino)
    }

    /// Table pages with lines that cannot be read get another block; those that are nowhere any.
    fn table(&mut self) -> Result<()> {
        let table = &self.checked.pool.table;
        let missing: Vec<u32> =
            (0..).zip(table).filter(|&(_, &block)| block == NOWHERE).map(|(page, _)| page).collect();
        for page in missing {
            let new = self.checked.space.allocate().ok_or_else(no_space)?;
            let flushed = self.checked.pool.media.zero_nt(block_addr(new), BLOCK)?;
            self.checked.pool.media.fence(flushed);
            self.give_page(page, new);
        }
        let faults = self.images.values().flat_map(|image| image.log.faults());
        let failed: BTreeSet<u32> = faults.map(|at| (at.0 / BLOCK as u64) as u32).collect();
        let slots = self.checked.pool.bad_slots.iter().map(|ino| ino / SLOTS_PER_BLOCK);
        let lines = (0..).zip(&self.checked.pool.table).filter(|(_, block)| failed.contains(block));
        let pages: BTreeSet<u32> = slots.chain(lines.map(|(page, _)| page)).collect();
        // What else of logs failed: they are written again elsewhere.
        failed.into_iter().for_each(|block| self.quarantine(block));
        for page in pages {
            let old = self.checked.pool.table[page as usize];
            let new = self.checked.space.allocate().ok_or_else(no_space)?;
            self.copy_lines(old, new)?;
            self.quarantine(old);
            self.give_page(page, new);
        }
        Ok(())
    }

    fn give_page(&mut self, page: u32, block: Block) {
        let table = self.image(TABLE_INO).expect("the table is always there");
        table.map(page, super::image::Piece { count: 1, block: block.0, unwritten: false });
        self.checked.pool.table[page as usize] = block.0;
        self.moved.insert(page);
    }

    /// Copies what can be read of a block; zeros where nothing can.
    fn copy_lines(&self, from: u32, to: Block) -> Result<()> {
        let media = self.checked.pool.media;
        let mut bytes = [0; BLOCK];
        for (n, line) in bytes.chunks_exact_mut(LINE).enumerate() {
            if media.read(block_addr(Block(from)).add((n * LINE) as u64), line).is_err() {
                line.fill(0);
            }
        }
        let flushed = media.copy_nt(block_addr(to), &bytes)?;
        media.fence(flushed);
        Ok(())
    }

    /// The block is never used again.
    fn quarantine(&mut self, block: u32) {
        let run = Run::new(Block(block), 1);
        let table = self.image(TABLE_INO).expect("the table is always there");
        table.bad.insert(run);
    }

    /// Symbolic links whose targets are lost go, with all their names.
    fn links_without_target(&mut self) {
        let empty: BTreeSet<(u32, u64)> = self
            .images
            .values()
            .filter(|image| image.kind == Kind::Symlink && image.target.is_empty())
            .map(|image| (image.owner.ino, image.owner.generation))
            .collect();
        if empty.is_empty() {
            return;
        }
        let dirs: Vec<u32> = self.checked.tree.dirs.keys().copied().collect();
        for dir in dirs {
            let names = |e: &Entry| empty.contains(&(e.ino, e.generation));
            let image = self.images.get(&dir).or_else(|| self.checked.tree.dirs.get(&dir).map(|d| &**d));
            if image.is_some_and(|image| image.entries.values().any(names)) {
                let image = self.image(dir).expect("it is there");
                let gone: Vec<u32> =
                    image.entries.iter().filter(|(_, e)| names(e)).map(|(&cookie, _)| cookie).collect();
                gone.into_iter().for_each(|cookie| _ = image.take(cookie));
            }
        }
        self.images.retain(|&ino, image| !empty.contains(&(ino, image.owner.generation)));
    }

    /// Attributes whose values do not hold go.
    fn values(&mut self) {
        let pool = &self.checked.pool;
        let mut failed = BTreeSet::new();
        for image in self.images.values_mut() {
            for run in image.xattrs.values().filter_map(|value| value.blocks) {
                let is_bad = |block: &u32| pool.media.crc32c(block_addr(Block(*block)), BLOCK, 0).is_err();
                failed.extend(run.blocks().filter(is_bad));
            }
            image.xattrs.retain(|name, value| value.holds(pool) && value.is_list(pool, name));
        }
        failed.into_iter().for_each(|block| self.quarantine(block));
    }

    /// A fixed file that is damaged is one like others, for its blocks may go to others now; and its stamp says so to whoever
    /// would map it.
    fn fixed(&mut self) {
        let twice = &self.checked.space.twice;
        for image in self.images.values_mut().filter(|image| image.xattrs.contains_key(FIXED)) {
            let pieces = || image.pages.values();
            let sound = super::is_one_run(image)
                && !image.lost_records()
                && pieces().all(|p| twice.range(p.block..p.block + p.count).next().is_none())
                && unreadable(&self.checked.pool, image).is_empty();
            if sound {
                continue;
            }
            if let Some(last) = pieces().next_back() {
                let end = block_addr(Block(last.block + last.count));
                remove_stamp(self.checked.pool.media, Addr(end.0 - STAMP_BYTES));
            }
            image.xattrs.remove(FIXED);
        }
    }

    /// Bytes that cannot be read are zeros from now on, in another block; bytes that do not match their checksum
    /// stay, unless they may be another file's.
    fn data(&mut self) -> Result<()> {
        let inos: Vec<u32> = self.images.keys().copied().collect();
        for ino in inos {
            let image = &self.images[&ino];
            if image.kind != Kind::File || ino == TABLE_INO {
                continue;
            }
            let pool = &self.checked.pool;
            let failed: Vec<(u64, u64)> = image
                .sums
                .iter()
                .filter(|(start, sum)| image.holds(pool, **start, sum) != Some(true))
                .map(|(&start, sum)| (start, sum.end))
                .collect();
            let wrong =
                image.sums.iter().filter(|(start, sum)| image.holds(pool, **start, sum) == Some(false));
            let places = wrong.flat_map(|(&start, sum)| super::span(start, sum.end));
            let blocks = places.filter_map(|(at, _)| Some((image.place(at)?.0 / BLOCK as u64) as u32));
            self.disproved.extend(blocks.map(|block| (block, ino)));
            let faults = unreadable(pool, image);
            let foreign = image.lost_records();
            let bad: BTreeSet<u32> = faults.iter().map(|f| (f.2.0 / BLOCK as u64) as u32).collect();
            for (from, to) in failed {
                let image = self.images.get_mut(&ino).expect("it is there");
                image.changed(from, to);
                let unread = |block: u32| bad.contains(&block);
                let fault = faults.get(faults.partition_point(|&(_, end, _)| end <= from));
                if foreign && fault.is_none_or(|&(begin, ..)| begin >= to) {
                    let pages = (from / BLOCK as u64) as u32..to.div_ceil(BLOCK as u64) as u32;
                    for page in pages {
                        if image
                            .place(page as u64 * BLOCK as u64)
                            .is_some_and(|at| !unread((at.0 / BLOCK as u64) as u32))
                        {
                            image.unmap(page, 1);
                        }
                    }
                }
            }
            for (page, block) in self.images[&ino].pages_with(&bad) {
                let new = self.checked.space.allocate().ok_or_else(no_space)?;
                self.copy_lines(block, new)?;
                let image = self.images.get_mut(&ino).expect("it is there");
                image.give_block(page, new.0);
            }
            bad.into_iter().for_each(|block| self.quarantine(block));
            let image = self.images.get_mut(&ino).expect("it is there");
            let behind = image.size.div_ceil(BLOCK as u64) as u32;
            let written = image.pages.iter().filter(|(_, p)| !p.unwritten);
            let written: Vec<(u32, u32)> = written
                .map(|(&page, p)| (page.max(behind), page + p.count))
                .filter(|(from, end)| from < end)
                .collect();
            written.into_iter().for_each(|(from, end)| image.unmap(from, end - from));
        }
        Ok(())
    }

    /// Of those that have one block, one keeps it: who can prove that it is theirs, else who wrote last, for no block has two owners
    /// at a time.
    fn blocks(&mut self) -> Result<()> {
        let twice = self.checked.space.twice.clone();
        if twice.is_empty() {
            return Ok(());
        }
        // Logs are written elsewhere, but what stood in the block is a log's.
        let logs: BTreeSet<u32> = self
            .images
            .values()
            .flat_map(|image| image.log.segments.iter().map(|&(at, _)| (at.0 / BLOCK as u64) as u32))
            .collect();
        let logged: BTreeSet<u32> = logs.intersection(&twice).copied().collect();
        let disproved = self.disproved.clone();
        // The table's slot stands there, whoever seems to have it.
        let kept = logged.iter().copied().chain([TABLE_BLOCK]).collect();
        let mut claims = Claims { kept, logged, disproved, ..Claims::default() };
        let mut order: Vec<u32> = self.images.keys().copied().collect();
        order.sort_by_key(|&ino| {
            let image = &self.images[&ino];
            (image.lost_records(), ino != TABLE_INO, Reverse(age(image)), ino)
        });
        for &ino in &order {
            let image = &self.images[&ino];
            let values = image.xattrs.values().filter_map(|v| v.blocks);
            let sums = image
                .sums
                .iter()
                .filter(|(start, sum)| image.holds(&self.checked.pool, **start, sum) == Some(true));
            let places = sums.flat_map(|(&start, sum)| super::span(start, sum.end)).filter_map(|(at, _)| {
                image.place(at).map(|at| Run::new(Block((at.0 / BLOCK as u64) as u32), 1))
            });
            for &block in values.chain(places).flat_map(|run| twice.range(run.blocks())) {
                claims.proved.entry(block).or_default().insert(ino);
            }
            // What a log lost may be that it gave the block up.
            if !image.lost_records() {
                let blocks = image.runs().flat_map(|run| twice.range(run.blocks()));
                for &block in blocks.filter(|&&block| !self.disproved.contains(&(block, ino))) {
                    claims.newest.entry(block).or_insert(age(image));
                }
            }
        }
        for ino in order {
            match ino {
                TABLE_INO => self.give_up_pages(&twice, &mut claims)?,
                _ => self.give_up(ino, &twice, &mut claims)?,
            }
        }
        Ok(())
    }

    /// Moves pages of the inode table whose blocks are another's, or another page's. That of a table whose log lost records it may
    /// have been once; what it has of slots stays with both.
    fn give_up_pages(&mut self, twice: &BTreeSet<u32>, claims: &mut Claims) -> Result<()> {
        for (page, block) in self.images[&TABLE_INO].pages_with(twice) {
            if block == TABLE_BLOCK || claims.logged.contains(&block) || claims.kept.insert(block) {
                continue;
            }
            let new = self.checked.space.allocate().ok_or_else(no_space)?;
            self.copy_lines(block, new)?;
            self.give_page(page, new);
        }
        Ok(())
    }

    /// Takes from an inode the blocks that are another's, with a copy where that may be its own content.
    fn give_up(&mut self, ino: u32, twice: &BTreeSet<u32>, claims: &mut Claims) -> Result<()> {
        let image = self.images.get_mut(&ino).expect("the caller saw it");
        let (lost, age) = (image.lost_records(), age(image));
        let values: Vec<(Box<[u8]>, Run)> =
            image.xattrs.iter().filter_map(|(name, v)| v.blocks.map(|run| (name.clone(), run))).collect();
        let pages: Vec<(u32, u32)> = image
            .pages
            .iter()
            .flat_map(|(&page, p)| {
                twice.range(p.block..p.block + p.count).map(move |&block| (page + (block - p.block), block))
            })
            .collect();
        let (keep, go): (Vec<_>, Vec<_>) =
            pages.into_iter().partition(|&(_, block)| claims.are_kept_by(ino, block));
        let mut seen = BTreeSet::new();
        let (keep, again): (Vec<_>, Vec<_>) = keep.into_iter().partition(|&(_, block)| seen.insert(block));
        let (stay, leave): (Vec<_>, Vec<_>) = values.into_iter().partition(|(_, run)| {
            twice.range(run.blocks()).all(|&block| claims.are_kept_by(ino, block) && !seen.contains(&block))
        });
        claims.kept.extend(keep.iter().map(|&(_, block)| block));
        claims.kept.extend(stay.iter().flat_map(|(_, run)| twice.range(run.blocks())));
        for (page, block) in go.into_iter().chain(again) {
            let image = self.images.get_mut(&ino).expect("the caller saw it");
            if lost || claims.are_anothers(ino, age, block) {
                image.unmap(page, 1);
                continue;
            }
            let new = self.checked.space.allocate().ok_or_else(no_space)?;
            self.copy_lines(block, new)?;
            let image = self.images.get_mut(&ino).expect("the caller saw it");
            image.give_block(page, new.0);
        }
        for (name, run) in leave {
            let new = self.checked.space.allocate_run(run.count).ok_or_else(no_space)?;
            for n in 0..run.count {
                self.copy_lines(run.start.0 + n, Block(new.start.0 + n))?;
            }
            let image = self.images.get_mut(&ino).expect("the caller saw it");
            let value = image.xattrs.get_mut(&name).expect("it is there");
            (value.at, value.blocks) = (block_addr(new.start), Some(new));
        }
        Ok(())
    }

    /// What no path leads to gets a name in lost+found.
    fn orphans(&mut self) -> Result<()> {
        let orphans = self.checked.tree.orphans.clone();
        if orphans.is_empty() {
            return Ok(());
        }
        let found = self.lost_and_found()?;
        for ino in orphans {
            let Some(header) = self.checked.pool.header(ino) else { continue };
            let Some(kind) = Kind::from_mode(header.mode) else { continue };
            let image = self.image(found).expect("it was just found");
            let name = names(&format!("#{ino}")).find(|name| image.named(name).is_none());
            let name = name.expect("there is always another").into();
            image.name(Entry { name, ino, generation: header.generation, kind, linked: false });
        }
        self.first.insert(found);
        Ok(())
    }

    /// The directory lost+found of the root, made where there is none.
    fn lost_and_found(&mut self) -> Result<u32> {
        let root = self.image(ROOT_INO).expect("the root is always there");
        let is_other = |name: &Vec<u8>| root.named(name).is_some_and(|e| e.kind != Kind::Directory);
        let name = names(LOST_AND_FOUND).find(|name| !is_other(name)).expect("there is always another");
        if let Some(e) = root.named(&name) {
            return Ok(e.ino);
        }
        let (uid, gid) = (root.uid, root.gid);
        // Another inode where a rename's other half is looked for would void it.
        let partners: HashSet<u32> =
            self.checked.tree.halves_in_doubt().map(|half| half.partner.ino).collect();
        let taken = |ino: &u32| {
            self.checked.tree.is_named(*ino)
                || partners.contains(ino)
                || self.checked.pool.bad_slots.contains(ino)
                || self.headers.contains_key(ino)
        };
        let ino = (ROOT_INO + 1..self.checked.pool.slots()).find(|ino| !taken(ino)).ok_or_else(no_space)?;
        let generation = (self.seed.incarnation as u64) << 40 | self.generations;
        self.generations += 1;
        let now = super::super::now();
        let mode = libc::S_IFDIR | 0o700;
        let header = SlotHeader { mode, uid, gid, generation, rdev: 0, btime: now };
        let owner = Owner { ino, generation, slot: self.checked.pool.slot(ino) };
        self.headers.insert(ino, header);
        self.images.insert(ino, Image::new(owner, header));
        let root = self.image(ROOT_INO).expect("the root is always there");
        root.name(Entry { name: name.into(), ino, generation, kind: Kind::Directory, linked: false });
        self.first.insert(ROOT_INO);
        Ok(ino)
    }

    /// Stores it all: see the file's head.
    fn commit(mut self) -> Result<()> {
        let media = self.checked.pool.media;
        let sb = &self.checked.pool.sb;
        let sync = |last: &State| sync_behind(media, sb, last, "check::repair");
        let mut heads = BTreeMap::new();
        for (&ino, image) in &self.images {
            let value = |v: &Value| {
                let mut bytes = vec![0; v.len as usize];
                media.read(v.at, &mut bytes)?;
                Ok(bytes)
            };
            heads.insert(ino, rewrite::write(media, &mut self.checked.space, self.seed, image, &value)?);
        }
        // In a block that is not part of the table yet, slots are complete before it is.
        let in_moved = |ino: u32| self.moved.contains(&(ino / SLOTS_PER_BLOCK)) && ino != TABLE_INO;
        for &ino in heads.keys().filter(|&&ino| in_moved(ino)) {
            self.write_slot(ino, heads[&ino])?;
        }
        let state = self.checked.pool.state;
        sync(&state)?;
        let begun =
            State { clean: false, closed: false, serial: state.serial + 1, mount: state.mount + 1, ..state };
        write_state(media, sb, &begun)?;
        sync(&begun)?;
        let last = u8::MAX;
        let rank = |ino: u32| match ino {
            _ if self.headers.contains_key(&ino) && self.first.contains(&ino) => 0,
            ROOT_INO if self.first.contains(&ino) => 1,
            _ if self.first.contains(&ino) => 2,
            TABLE_INO => 3,
            _ => last,
        };
        let mut order: Vec<(u8, u32)> = heads.keys().map(|&ino| (rank(ino), ino)).collect();
        order.sort_unstable();
        for step in order.chunk_by(|a, b| a.0 == b.0) {
            for &(_, ino) in step.iter().filter(|&&(_, ino)| !in_moved(ino)) {
                self.write_slot(ino, heads[&ino])?;
            }
            sync(&begun)?;
        }
        // What the checkpoint knew is put to use.
        let done = State { serial: begun.serial + 1, checkpoint: 0, ..begun };
        write_state(media, sb, &done)?;
        sync(&done)
    }

    /// Lets a slot lead to its new log; its header, too, where that was lost.
    fn write_slot(&self, ino: u32, head: crate::media::Addr) -> Result<()> {
        let pool = &self.checked.pool;
        let slot = if ino == TABLE_INO { block_addr(Block(TABLE_BLOCK)) } else { pool.slot(ino) };
        let header = match ino {
            TABLE_INO => (!self.checked.table_header).then_some(self.images[&ino].header),
            _ => self.headers.get(&ino).copied(),
        };
        let flushed = match header {
            Some(header) => {
                let mut words = header.encode(pool.key_crc, ino);
                words[LOG_HEAD_OFFSET as usize / 8] = pack_log_head(head);
                pool.media.store_lines(slot, &[words])?
            }
            None => {
                let dirty = pool.media.store64(slot.add(LOG_HEAD_OFFSET), pack_log_head(head))?;
                pool.media.flush(dirty)
            }
        };
        pool.media.fence(flushed);
        Ok(())
    }
}
