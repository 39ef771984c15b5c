//! Is everything on media as it must be? The checker behind `lode fsck` and the crash simulator.
//!
//! It is written apart from recovery and shares only the format with it: its own reader of logs (`scan`), its own
//! replay (`image`), its own account of blocks (`space`) and of names (`tree`). What it finds it says as
//! [`Finding`]s; `repair` mends what can be mended.
//!
//! It reads the media as they are. Where the pool was not closed, operations in doubt that are not complete do not
//! count, as recovery would have it; [`examine`] lets recovery itself run first, on a private copy.

mod image;
mod label;
mod repair;
mod rewrite;
mod scan;
mod slots;
mod space;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::alloc::{Block, Run};
use super::checkpoint;
use super::fixed::FIXED;
use super::format::*;
use super::log::{Owner, block_addr};
use super::mount::{StateCopies, SuperCopies};
use super::types::Kind;
use super::{Fs, OpenOptions, holds, holds_blocks};
use crate::error::{Error, Result};
use crate::limits::PATH_BYTES_MAX;
use crate::media::{Addr, LINE, Media, Overlay};
use image::{Image, Nonsense};
pub use label::{open_pool, open_unlabelled};
pub use repair::{Repaired, repair};
use scan::{Damage, Owners, Stray, stray_order};
use slots::{Pages, Search, table_of};
use space::{Space, joined};

/// Findings that one check keeps; of more it says how many there are.
pub const FINDINGS_MAX: usize = 10_000;
/// Looks for pages of a damaged inode table, each with what the one before found.
const SEARCHES_MAX: usize = 16;
/// Inodes that a finding names which have one block.
const OWNERS_SHOWN_MAX: usize = 8;

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum What {
    /// Block 0, which says that it is a pool.
    Label,
    /// A copy of the superblock.
    Superblock,
    /// A copy of the state lines.
    StateLine,
    /// What a clean close left for the next mount.
    Checkpoint,
    /// The inode table's own log.
    Table,
    /// The slot of an inode that has a name.
    Slot,
    /// Where an inode's log begins.
    LogHead,
    /// A record in the middle of a log does not validate.
    LogRecord,
    /// A segment of a log does not validate.
    LogSegment,
    /// Recovery found the log damaged and wrote that down.
    LogCondemned,
    /// A record that validates says what cannot be.
    Record,
    /// The media cannot be read.
    Media,
    /// File data do not match their checksum.
    Data,
    /// File data lie behind the end of the file.
    Size,
    /// The value of an extended attribute.
    Value,
    /// An access list.
    AccessList,
    /// A file whose blocks should stand still.
    Fixed,
    /// A symbolic link's target.
    Target,
    /// A block that two have.
    BlockTwice,
    /// A block that nobody has and that is not free.
    BlockLost,
    /// A block that somebody has and that counts as free.
    BlockFree,
    /// An entry leads to no inode.
    Entry,
    /// An entry has another type than its inode.
    EntryType,
    /// Two entries of a directory have one name.
    EntryName,
    /// Two entries lead to one directory.
    TwoParents,
    /// No path leads to an inode that had one.
    Orphan,
    /// A count of links.
    Links,
}

impl What {
    /// For JSON.
    pub fn name(self) -> &'static str {
        match self {
            What::Label => "label",
            What::Superblock => "superblock",
            What::StateLine => "state-line",
            What::Checkpoint => "checkpoint",
            What::Table => "inode-table",
            What::Slot => "slot",
            What::LogHead => "log-head",
            What::LogRecord => "log-record",
            What::LogSegment => "log-segment",
            What::LogCondemned => "log-condemned",
            What::Record => "record",
            What::Media => "media",
            What::Data => "data",
            What::Size => "size",
            What::Value => "xattr-value",
            What::AccessList => "access-list",
            What::Fixed => "fixed-file",
            What::Target => "symlink-target",
            What::BlockTwice => "block-twice",
            What::BlockLost => "block-lost",
            What::BlockFree => "block-free",
            What::Entry => "entry",
            What::EntryType => "entry-type",
            What::EntryName => "entry-name",
            What::TwoParents => "two-parents",
            What::Orphan => "orphan",
            What::Links => "links",
        }
    }

    /// What a repair does about it.
    pub fn remedy(self) -> &'static str {
        match self {
            What::Label => "it is written again from the superblock",
            What::Superblock | What::StateLine => "it is written again from the other copy",
            What::Checkpoint | What::BlockLost | What::BlockFree | What::Links => {
                "the logs are read instead, and a new checkpoint is written"
            }
            What::Table => "the table is put together again from the slots that are found",
            What::Slot => "the slot is written again from the names that lead to it and from its log",
            What::LogHead | What::LogRecord | What::LogSegment | What::LogCondemned | What::Record => {
                "the log is written again with what of it validates"
            }
            What::Media => "what can be read is moved elsewhere, the block is not used again",
            What::Data => "the bytes stay as they are, without a checksum: compare them with a backup",
            What::Size => "the blocks behind the end are freed",
            What::Value | What::AccessList => "the attribute is removed",
            What::Fixed => "it is a file like others, and no guest's memory any more",
            What::Target => "the link is removed",
            What::BlockTwice => "whose checksum matches keeps the block, others get a copy",
            What::Entry => "the entry is removed",
            What::EntryType => "the entry is given the type of the inode",
            What::EntryName => "the newer entry keeps the name, what the older one named goes to lost+found",
            What::TwoParents => "the entry that is further from the root is removed",
            What::Orphan => "it is named in lost+found",
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Finding {
    pub what: What,
    pub ino: Option<u32>,
    /// A path that leads to the inode, where there is one.
    pub path: Option<Vec<u8>>,
    pub block: Option<u64>,
    /// File bytes that are lost or doubtful: from, and the one after the last.
    pub bytes: Option<(u64, u64)>,
    pub detail: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ino) = self.ino {
            write!(f, "inode {ino}")?;
            if let Some(path) = &self.path {
                write!(f, " ({})", path.escape_ascii())?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.detail)?;
        if let Some((from, to)) = self.bytes {
            write!(f, ", bytes {from} to {}", to - 1)?;
        }
        match self.block {
            Some(block) => write!(f, " (block {block})"),
            None => Ok(()),
        }
    }
}

/// What a check saw.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Findings beyond [`FINDINGS_MAX`].
    pub more: u64,
    /// The last user closed the pool.
    pub clean: bool,
    pub files: u64,
    pub directories: u64,
    /// Blocks that somebody has.
    pub blocks_used: u64,
    /// Blocks that are never used again.
    pub blocks_bad: u64,
    /// File bytes that match a checksum.
    pub bytes_verified: u64,
}

impl Report {
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Takes in what a later look found, too.
    fn merge(&mut self, later: &Report) {
        self.more += later.more;
        let known: HashSet<Finding> = self.findings.iter().cloned().collect();
        let mut new = HashSet::new();
        for finding in later.findings.iter().filter(|finding| !known.contains(finding)) {
            if new.insert(finding) {
                self.add(finding.clone());
            }
        }
    }

    fn add(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.more += 1;
        }
    }
}

impl Finding {
    fn new(what: What, detail: impl Into<String>) -> Finding {
        Finding { what, ino: None, path: None, block: None, bytes: None, detail: detail.into() }
    }

    fn of(what: What, ino: u32, detail: impl Into<String>) -> Finding {
        Finding { ino: Some(ino), ..Finding::new(what, detail) }
    }

    fn at(self, at: Addr) -> Finding {
        Finding { block: Some(at.0 / BLOCK as u64), ..self }
    }
}

/// Each inode's are [in order](stray_order).
type Strays = HashMap<(u32, u64), Vec<Stray>>;

/// No block of the inode table: here stands the label.
const NOWHERE: u32 = 0;

/// What one check knows of the pool.
pub(super) struct Pool<'m, M: Media> {
    pub media: &'m M,
    pub sb: Super,
    pub key_crc: u32,
    pub state: State,
    /// Every operation that is not settled is in doubt, not only the last of each log.
    pub power_loss: bool,
    /// The pool is in use by who asks: nothing is in doubt.
    pub live: bool,
    /// Where the inode table's blocks stand, by page; [`NOWHERE`] where its log is damaged and no slot says it either.
    pub table: Vec<u32>,
    pub headers: Vec<Option<SlotHeader>>,
    /// Where logs ended, by inode, when the pool was closed; 0 where that is not known.
    pub ends: Vec<u32>,
    /// Slots that cannot be read.
    pub bad_slots: Vec<u32>,
    /// Segments of logs that cannot be followed, by inode and generation.
    pub strays: Strays,
}

impl<'m, M: Media> Pool<'m, M> {
    fn new(media: &'m M, sb: Super, state: State) -> Pool<'m, M> {
        Pool {
            media,
            key_crc: crate::media::crc32c(&sb.key, 0),
            sb,
            state,
            power_loss: false,
            live: false,
            table: Vec::new(),
            headers: Vec::new(),
            ends: Vec::new(),
            bad_slots: Vec::new(),
            strays: Strays::new(),
        }
    }

    pub fn holds(&self, at: Addr, len: usize) -> bool {
        holds(&self.sb, at, len)
    }

    pub fn holds_blocks(&self, run: Run) -> bool {
        holds_blocks(&self.sb, run)
    }

    pub fn header(&self, ino: u32) -> Option<SlotHeader> {
        self.headers.get(ino as usize).copied().flatten()
    }

    pub fn in_doubt(&self, epoch: u64, last: bool) -> bool {
        !self.live && !self.state.clean && epoch > self.state.settled && (last || self.power_loss)
    }

    /// Whether the table has a block for it.
    pub fn has_slot(&self, ino: u32) -> bool {
        self.table.get((ino / SLOTS_PER_BLOCK) as usize).is_some_and(|&block| block != NOWHERE)
    }

    /// Where blocks are that somebody may have stored to, but for the labels'. All at once: what is read ahead is in the page cache, and
    /// so no hole any more to some file systems.
    fn stored(&self) -> Vec<Range<u32>> {
        let end = self.sb.blocks - 1;
        let mut from = TABLE_BLOCK as u64;
        let next = || {
            let bytes = self.media.stored(Addr(from * BLOCK as u64))?;
            let blocks = (bytes.start / BLOCK as u64).max(from)..bytes.end.div_ceil(BLOCK as u64).min(end);
            from = blocks.end;
            (!blocks.is_empty()).then_some(blocks.start as u32..blocks.end as u32)
        };
        std::iter::from_fn(next).collect()
    }

    /// Of an inode that [has one](Pool::has_slot).
    pub fn slot(&self, ino: u32) -> Addr {
        let block = self.table[(ino / SLOTS_PER_BLOCK) as usize];
        block_addr(Block(block)).add((ino % SLOTS_PER_BLOCK) as u64 * SLOT as u64)
    }

    pub fn owner(&self, ino: u32, generation: u64) -> Owner {
        Owner { ino, generation, slot: self.slot(ino) }
    }

    fn slots(&self) -> u32 {
        self.table.len() as u32 * SLOTS_PER_BLOCK
    }

    fn read_headers(&mut self) {
        for ino in 0..self.slots() {
            if !self.has_slot(ino) {
                self.headers.push(None);
                continue;
            }
            let mut line = [0; LINE];
            let read = self.media.read(self.slot(ino), &mut line);
            if read.is_err() {
                self.bad_slots.push(ino);
            }
            let header = SlotHeader::decode(&line, self.key_crc, ino);
            self.headers.push(header.filter(|h| read.is_ok() && Kind::from_mode(h.mode).is_some()));
        }
    }

    pub fn image(&self, ino: u32) -> Option<Image> {
        let header = self.header(ino)?;
        Some(image::read(self, self.owner(ino, header.generation), header, None))
    }
}

/// Parts of a byte range that lie in one page each.
pub(super) fn span(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = start;
    std::iter::from_fn(move || {
        let from = at;
        let len = (BLOCK as u64 - from % BLOCK as u64).min(end.checked_sub(from)?);
        at += len;
        (len > 0).then_some((from, len))
    })
}

/// What else says which blocks are free and how many names inodes have: a checkpoint, or an open file system.
#[derive(Default)]
pub(super) struct Account {
    /// By inode number: links and, of directories, the parent.
    pub links: Vec<(u32, u32)>,
    /// By inode number: where its log ends. Of a checkpoint alone.
    pub ends: Vec<u32>,
    pub free: Vec<Run>,
    /// Free, or free once something is synced.
    pub freed: Vec<Run>,
    /// Blocks of which only parts are in use, with a bit for each.
    pub minis: BTreeMap<u32, u8>,
    /// The same, once something is synced.
    pub freed_minis: BTreeMap<u32, u8>,
    /// Blocks that failed and that no record says yet.
    pub bad: Vec<Run>,
    /// Inodes without a name that are in use all the same.
    pub nameless: Vec<u32>,
    /// Inodes of which stat reports what they are not.
    pub misshown: Vec<u32>,
}

impl Account {
    /// `None` where it is not what [`checkpoint::load`] takes.
    fn of_checkpoint(body: &[u8], sb: &Super) -> Option<Account> {
        let mut words = body.chunks_exact(4).map(|word| get32(word, 0));
        let mut next = || words.next();
        let mut account = Account::default();
        for _ in 0..next()? {
            account.links.push((next()?, next()?));
            account.ends.push(next()?);
        }
        let mut after = Block(0);
        for _ in 0..next()? {
            let run = Run { start: Block(next()?), count: next()? };
            if !holds_blocks(sb, run) || run.start < after {
                return None;
            }
            after = run.end();
            account.free.push(run);
        }
        for _ in 0..next()? {
            let (block, used) = (Block(next()?), next()?);
            let is_split = holds_blocks(sb, Run { start: block, count: 1 }) && (1..255).contains(&used);
            let n = account.free.partition_point(|run| run.end() <= block);
            let is_free = account.free.get(n).is_some_and(|run| run.start <= block);
            if !is_split || is_free || account.minis.insert(block.0, used as u8).is_some() {
                return None;
            }
        }
        Some(account)
    }
}

/// All that one check found out.
pub(super) struct Checked<'m, M: Media> {
    pub pool: Pool<'m, M>,
    pub report: Report,
    ask: Ask<'m>,
    /// Inodes, of so many.
    looked_at: (u64, u64),
    /// Bytes of files.
    bytes_read: u64,
    pub tree: tree::Tree,
    pub space: Space,
    /// The table's own inode.
    pub table: Image,
    pub account: Option<Account>,
    /// The header of the table's own slot is whole.
    pub table_header: bool,
    /// Inodes whose logs must be written again.
    pub dirty: BTreeSet<u32>,
}

/// How far a check is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Inodes were looked at, of so many, and so many bytes of files read.
    Inodes { done: u64, of: u64, bytes: u64 },
    /// So many bytes of the pool, of so many, were searched for what a damaged log does not say any more.
    Search { done: u64, of: u64 },
}

/// Who hears how far a check is.
pub type Watch<'a> = &'a dyn Fn(Progress);

/// How much is looked at, what is known, and who is told.
#[derive(Clone, Copy, Default)]
struct Ask<'a> {
    /// Take it that the host lost power since the pool was last used.
    power_lost: bool,
    /// Read all that files have, with or without a checksum.
    scrub: bool,
    /// Told of each inode, and often while a file or the pool is read.
    watch: Option<Watch<'a>>,
}

/// Checks what stands on `media`, which are of a pool that nobody uses. An error where it is no pool that can be
/// checked: it says why.
pub fn check<M: Media>(media: &M) -> Result<Report> {
    Ok(run(media, Ask { scrub: true, ..Ask::default() }, None)?.finish())
}

impl Ask<'_> {
    fn tell(&self, progress: Progress) {
        if let Some(watch) = self.watch {
            watch(progress);
        }
    }
}

/// [`check`] of what the next use of the pool would find. Where the pool was not closed, recovery runs first, on a
/// private copy.
pub fn examine<M: Media>(media: Arc<M>, power_lost: bool, watch: Option<Watch>) -> Result<Report> {
    let ask = Ask { power_lost, scrub: true, watch };
    let mut report = Report::default();
    let (_, state) = heads(&*media, &mut report)?;
    if !state.clean {
        let options = OpenOptions { no_ticker: true, power_lost, ..OpenOptions::default() };
        if let Ok(fs) = Fs::open(Overlay::new(media.clone()), &options)
            && !fs.core.read_only
        {
            let mut checked = run(fs.media(), ask, Some(fs.account()))?;
            report.findings.append(&mut checked.report.findings);
            checked.report.findings = report.findings;
            checked.report.clean = state.closed;
            return Ok(checked.finish());
        }
    }
    Ok(run(&*media, ask, None)?.finish())
}

impl<M: Media> Fs<M> {
    /// Whether all that is on media, and what is known of it in memory, is as it must be. Nobody else may use the
    /// file system meanwhile.
    pub fn check(&self) -> Result<Report> {
        Ok(run(self.media(), Ask::default(), Some(self.account()))?.finish())
    }

    fn account(&self) -> Account {
        let slots = self.slot_count.load(Ordering::Acquire);
        let entry = |ino| self.table.entry(ino);
        let alloc = &self.core.alloc;
        let mut account = Account {
            links: (0..slots).map(|n| (entry(n).links(), entry(n).parent.load(Ordering::Acquire))).collect(),
            bad: self.core.media.bad().into_iter().map(|block| Run::new(block, 1)).collect(),
            nameless: self
                .loaded()
                .filter(|inode| self.links(inode) == 0 && !inode.body.read().dead)
                .map(|inode| inode.ino.0)
                .collect(),
            misshown: self.loaded().filter(|i| self.is_misshown(i)).map(|i| i.ino.0).collect(),
            ..Account::default()
        };
        alloc.for_each_free_run(false, &mut |run| account.free.push(run));
        alloc.for_each_free_run(true, &mut |run| account.freed.push(run));
        alloc.for_each_partial_mini(false, &mut |block, used| _ = account.minis.insert(block.0, used));
        alloc.for_each_partial_mini(true, &mut |block, used| _ = account.freed_minis.insert(block.0, used));
        account
    }

    fn is_misshown(&self, inode: &super::inode::Inode) -> bool {
        let body = inode.body.read();
        let shown = self.table.line(inode.ino.0).read(inode.ino, inode.generation);
        !body.dead && shown.is_some_and(|shown| shown != self.attr(inode, &body))
    }
}

/// Blocks that the inode table's log calls bad.
pub(super) fn bad_blocks<M: Media>(media: &M, sb: &Super, state: State) -> Vec<Run> {
    let mut pool = Pool::new(media, sb.clone(), state);
    joined(read_table(&mut pool, &Pages::new(), &mut Report::default()).0.bad)
}

/// The superblock and the state, and what is wrong with their copies.
fn heads<M: Media>(media: &M, report: &mut Report) -> Result<(Super, State)> {
    let copies = SuperCopies::read(media)?;
    let sb = copies.whole(media)?;
    for (name, copy, block) in
        [("first", &copies.first, SUPER_BLOCK), ("second", &copies.second, sb.blocks - 1)]
    {
        if copy.as_ref().ok() != Some(&sb) {
            let detail = format!("the {name} copy of the superblock is damaged");
            report.add(Finding { block: Some(block), ..Finding::new(What::Superblock, detail) });
        }
    }
    let states = StateCopies::read(media, &sb);
    let state = states.newest().ok_or_else(no_state)?;
    for (name, copy, block) in
        [("first", states.first, STATE_BLOCK), ("second", states.second, sb.blocks - 1)]
    {
        // One copy is written after the other.
        if copy.is_none_or(|s| s.serial + 1 < state.serial) {
            let detail = format!("the {name} copy of the state lines is damaged");
            report.add(Finding { block: Some(block), ..Finding::new(What::StateLine, detail) });
        }
    }
    report.clean = state.clean;
    Ok((sb, state))
}

fn run<'m, M: Media>(media: &'m M, ask: Ask<'m>, live: Option<Account>) -> Result<Checked<'m, M>> {
    let mut checked = look(media, ask, live, &Pages::new(), Strays::new())?;
    if checked.pool.live {
        return Ok(checked);
    }
    let pages = if checked.has_short_table() { find_pages(&mut checked, ask)? } else { Pages::new() };
    let strays = checked.strays();
    // What was found beside the logs may belong to them.
    if strays.is_empty() { Ok(checked) } else { look(media, ask, None, &pages, strays) }
}

/// Finds the pages of the inode table that its log does not say, and looks again with them.
fn find_pages<'m, M: Media>(checked: &mut Checked<'m, M>, ask: Ask<'m>) -> Result<Pages> {
    let mut search = Search::of(checked);
    let mut pages = Pages::new();
    // What is found may say more: entries of directories, and who has what was taken for a page.
    for _ in 0..SEARCHES_MAX {
        let found = search.pages(checked);
        if found == pages {
            break;
        }
        pages = found;
        *checked = look(checked.pool.media, ask, None, &pages, Strays::new())?;
    }
    Ok(pages)
}

fn look<'m, M: Media>(
    media: &'m M,
    ask: Ask<'m>,
    live: Option<Account>,
    pages: &Pages,
    strays: Strays,
) -> Result<Checked<'m, M>> {
    let mut report = Report::default();
    let (sb, state) = heads(media, &mut report)?;
    if live.is_none() && state.sync_failed() {
        media.drop_cached();
    }
    let power_loss = state.lost_power(ask.power_lost);
    let mut pool = Pool { power_loss, live: live.is_some(), strays, ..Pool::new(media, sb, state) };
    let account = match live {
        Some(account) => Some(account),
        None if state.checkpoint != 0 => read_checkpoint(&pool, &mut report),
        None => None,
    };
    // Of a repair that was cut short, too: what it has not written again is as it was closed.
    if let Some(account) = &account {
        pool.ends.clone_from(&account.ends);
    }
    let (table, table_header) = read_table(&mut pool, pages, &mut report);
    if pool.table.first().is_none_or(|&block| block == NOWHERE) {
        return Err(no_table());
    }
    let table_is_whole = report.findings.iter().all(|f| f.ino != Some(TABLE_INO));
    pool.read_headers();
    let mut space = Space::new(pool.sb.blocks);
    space.take(Run { start: Block(0), count: TABLE_BLOCK });
    space.take(Run { start: Block(pool.sb.blocks as u32 - 1), count: 1 });
    space.take_image(&table);
    // The slot of the table stands there, whatever its pages are.
    space.keep(Run::new(Block(TABLE_BLOCK), 1));
    let tree = tree::Tree::read(&pool, account.as_ref());
    let dirty = if table_is_whole { BTreeSet::new() } else { BTreeSet::from([TABLE_INO]) };
    let (looked_at, bytes_read) = ((0, 0), 0);
    let mut checked = Checked {
        pool,
        report,
        ask,
        looked_at,
        bytes_read,
        tree,
        space,
        table,
        account,
        table_header,
        dirty,
    };
    checked.inodes();
    checked.names();
    checked.space();
    checked.links();
    Ok(checked)
}

#[cold]
fn no_state() -> Error {
    Error::message(
        libc::EUCLEAN,
        "check::run",
        "all copies of the state line are damaged; restore the pool from a backup",
    )
}

#[cold]
fn no_table() -> Error {
    let message = "the inode table does not say where the root is; restore the pool from a backup";
    Error::message(libc::EUCLEAN, "check::run", message)
}

/// The inode table's own inode, and where its pages stand.
fn read_table<M: Media>(pool: &mut Pool<M>, found: &Pages, report: &mut Report) -> (Image, bool) {
    let slot = block_addr(Block(TABLE_BLOCK));
    let generation = 1 << 40;
    let owner = Owner { ino: TABLE_INO, generation, slot };
    let mut line = [0; LINE];
    let read = pool.media.read(slot, &mut line);
    let header = SlotHeader::decode(&line, pool.key_crc, TABLE_INO).filter(|h| {
        read.is_ok() && h.generation == generation && Kind::from_mode(h.mode) == Some(Kind::File)
    });
    if header.is_none() {
        report.add(Finding::of(What::Slot, TABLE_INO, "the slot of the inode table is damaged"));
    }
    let made =
        SlotHeader { mode: libc::S_IFREG, uid: 0, gid: 0, generation, rdev: 0, btime: pool.sb.created };
    let mut image = image::read(pool, owner, header.unwrap_or(made), None);
    let logged = image.size / BLOCK as u64;
    let mut has_holes = image.pages.values().any(|piece| piece.unwritten);
    // mkfs laid these out, where the log says nothing of them any more.
    for n in 0..TABLE_BLOCKS {
        if image.piece_of(n).is_none_or(|(_, piece)| piece.unwritten) {
            has_holes = true;
            image.map(n, image::Piece { count: 1, block: TABLE_BLOCK + n, unwritten: false });
        }
    }
    report_log(&image, report);
    // As far as it goes.
    let is_whole =
        image.nonsense.is_empty() && image.log.damage.iter().all(|d| matches!(d, Damage::End { .. }));
    let mut table = table_of(&mut image, pool.sb.blocks);
    if is_whole && (has_holes || logged != table.len() as u64 || table.contains(&NOWHERE)) {
        report.add(Finding::of(What::Table, TABLE_INO, "the inode table has holes"));
    }
    if !found.is_empty() {
        let n = found.len();
        let detail =
            format!("{n} of its pages are in no record of its log: their slots say where they stand");
        report.add(Finding::of(What::Table, TABLE_INO, detail));
        for (&page, &block) in found {
            image.map(page, image::Piece { count: 1, block, unwritten: false });
        }
        table = table_of(&mut image, pool.sb.blocks);
    }
    pool.table = table;
    (image, header.is_some())
}

fn read_checkpoint<M: Media>(pool: &Pool<M>, report: &mut Report) -> Option<Account> {
    let body = checkpoint::read(pool.media, &pool.sb, pool.state.checkpoint);
    let account = body.map(|body| Account::of_checkpoint(&body, &pool.sb));
    if let Ok(Some(account)) = account {
        return Some(account);
    }
    // Of a pool that is being repaired it may be overwritten by now.
    if pool.state.clean {
        let block = Some(pool.state.checkpoint as u64);
        report.add(Finding { block, ..Finding::new(What::Checkpoint, "the checkpoint is damaged") });
    }
    None
}

/// Says what is wrong with an inode's log.
fn report_log(image: &Image, report: &mut Report) {
    let ino = image.owner.ino;
    for &damage in &image.log.damage {
        report.add(match damage {
            Damage::Fault(at) => Finding::of(What::Media, ino, "a line of its log cannot be read").at(at),
            Damage::Head => Finding::of(What::LogHead, ino, "its log head is no address of a log"),
            Damage::Condemned => {
                Finding::of(What::LogCondemned, ino, "recovery found its log damaged; nobody can use it")
            }
            Damage::Gap { at, lines, bytes } => {
                let seems = if bytes.is_some() { ", which seem to be a write of its data" } else { "" };
                let detail = format!("{lines} lines in the middle of its log do not validate{seems}");
                Finding { bytes, ..Finding::of(What::LogRecord, ino, detail).at(at) }
            }
            Damage::Segment { at } => {
                Finding::of(What::LogSegment, ino, "a segment of its log does not begin as one").at(at)
            }
            Damage::End { lines } => {
                let detail = match lines {
                    0.. => format!("the last {lines} lines of its log are missing"),
                    _ => format!("its log has {} lines more than when it was closed", -(lines as i64)),
                };
                Finding::of(What::LogRecord, ino, detail)
            }
            Damage::Misplaced { at } => {
                Finding::of(What::LogSegment, ino, "a segment begins in the middle of another").at(at)
            }
        });
    }
    for nonsense in &image.nonsense {
        report.add(match nonsense {
            Nonsense::Record { at, what } => {
                Finding::of(What::Record, ino, format!("a record {what}")).at(*at)
            }
            Nonsense::Name { name } => {
                let detail = format!("two of its entries have the name {}", name.escape_ascii());
                Finding::of(What::EntryName, ino, detail)
            }
        });
    }
}

impl<M: Media> Checked<'_, M> {
    /// The report, with paths.
    pub fn finish(mut self) -> Report {
        self.name_paths();
        self.report
    }

    fn name_paths(&mut self) {
        if !self.report.findings.is_empty() {
            let index = self.tree.index();
            for finding in &mut self.report.findings {
                finding.path = finding.ino.and_then(|ino| path(&index, ino));
            }
        }
    }

    /// Whether pages of the inode table may be missing: its log is damaged, or somebody knows of more than there are.
    fn has_short_table(&self) -> bool {
        let slots = self.pool.slots();
        let counted = self.account.as_ref().filter(|_| self.pool.state.clean).map_or(0, |a| a.links.len());
        let mut entries = self.tree.dirs.values().flat_map(|dir| dir.entries.values());
        self.report.findings.iter().any(|f| f.ino == Some(TABLE_INO))
            || counted > slots as usize
            || entries.any(|e| !self.pool.has_slot(e.ino))
    }

    /// Keeps blocks that hold the checkpoint from being taken.
    fn keep_checkpoint(&mut self) {
        let head = self.pool.state.checkpoint;
        for run in checkpoint::blocks(self.pool.media, &self.pool.sb, head) {
            self.space.keep(run);
        }
    }

    fn add(&mut self, finding: Finding) {
        if let Some(ino) = finding.ino {
            self.dirty.insert(ino);
        }
        self.report.add(finding);
    }

    /// Each inode that a name leads to: its log, its data, its blocks.
    fn inodes(&mut self) {
        let named = self.named();
        for (n, &ino) in named.iter().enumerate() {
            self.looked_at = (n as u64, named.len() as u64);
            self.read(0);
            if let Some(image) = self.tree.image(&self.pool, ino) {
                self.inode(&image);
            }
        }
    }

    /// Says how far the check is, now that so many bytes more of files were read.
    fn read(&mut self, bytes: u64) {
        self.bytes_read += bytes;
        let (done, of) = self.looked_at;
        self.ask.tell(Progress::Inodes { done, of, bytes: self.bytes_read });
    }

    fn inode(&mut self, image: &Image) {
        match image.kind {
            Kind::Directory => self.report.directories += 1,
            _ => self.report.files += 1,
        }
        let ino = image.owner.ino;
        if !image.is_whole() {
            report_log(image, &mut self.report);
            self.dirty.insert(ino);
        }
        if image.cut {
            self.dirty.insert(ino);
        }
        self.space.take_image(image);
        self.data(image);
        for (name, value) in &image.xattrs {
            let shown = name.escape_ascii();
            if !value.holds(&self.pool) {
                let detail = format!("the value of attribute {shown} is damaged");
                self.add(Finding::of(What::Value, ino, detail).at(value.at));
            } else if !value.is_list(&self.pool, name) {
                let detail = format!("attribute {shown} is no access list");
                self.add(Finding::of(What::AccessList, ino, detail).at(value.at));
            }
        }
        if image.xattrs.contains_key(FIXED) && !is_one_run(image) {
            self.add(Finding::of(What::Fixed, ino, "a fixed file is not in one piece"));
        }
        // What is missing begins with the target's record.
        let ends_early = matches!(image.log.damage[..], [Damage::End { .. }]);
        if image.kind == Kind::Symlink && image.target.is_empty() && (ends_early || !image.lost_records()) {
            self.add(Finding::of(What::Target, ino, "the symbolic link has no target"));
        }
    }

    fn data(&mut self, image: &Image) {
        let ino = image.owner.ino;
        for (&start, sum) in &image.sums {
            let holds = image.holds(&self.pool, start, sum);
            self.read(sum.end - start);
            match holds {
                Some(true) => self.report.bytes_verified += sum.end - start,
                Some(false) => {
                    let detail = "file data do not match their checksum";
                    let finding = Finding::of(What::Data, ino, detail);
                    self.add(Finding { bytes: Some((start, sum.end)), ..finding });
                }
                None => {}
            }
        }
        if self.ask.scrub && self.has_faults(image) {
            for (from, to, at) in unreadable(&self.pool, image) {
                let finding = Finding::of(What::Media, ino, "file data cannot be read").at(at);
                self.add(Finding { bytes: Some((from, to)), ..finding });
            }
        }
        let behind = image.size.div_ceil(BLOCK as u64);
        let last = image.pages.iter().rev().find(|(_, piece)| !piece.unwritten);
        if let Some((page, piece)) = last
            && (page + piece.count) as u64 > behind
        {
            let detail = format!("it has blocks with data behind its end at byte {}", image.size);
            self.add(Finding::of(What::Size, ino, detail));
        }
    }

    /// Whether any of the file's blocks cannot be read.
    fn has_faults(&mut self, image: &Image) -> bool {
        image.pages.values().filter(|piece| !piece.unwritten).any(|p| {
            let len = p.count as usize * BLOCK;
            let is_bad = self.pool.media.crc32c(block_addr(Block(p.block)), len, 0).is_err();
            self.read(len as u64);
            is_bad
        })
    }

    /// What each directory says.
    fn names(&mut self) {
        for finding in std::mem::take(&mut self.tree.findings) {
            self.add(finding);
        }
    }

    /// Whether each block has one owner, and free is what has none.
    fn space(&mut self) {
        let noted = self.account.iter().flat_map(|account| &account.bad);
        self.space.take_bad(self.table.bad.iter().chain(noted).copied());
        self.report.blocks_bad =
            joined(self.table.bad.iter().copied()).iter().map(|run| run.count as u64).sum();
        self.report.blocks_used = self.space.used();
        for (block, owners) in self.owners(&self.space.twice) {
            let detail = match &owners[..] {
                [_] => "it has one block twice, or that of the inode table's slot".to_owned(),
                _ => {
                    let shown = owners.iter().take(OWNERS_SHOWN_MAX).map(|ino| ino.to_string());
                    let more = owners.len().saturating_sub(OWNERS_SHOWN_MAX);
                    let shown: Vec<String> =
                        shown.chain((more > 0).then(|| format!("{more} more"))).collect();
                    format!("inodes {} have one block", shown.join(" and "))
                }
            };
            for &ino in &owners {
                let finding = Finding::of(What::BlockTwice, ino, detail.as_str());
                self.add(finding.at(block_addr(Block(block))));
            }
        }
        let authoritative = self.pool.live || self.pool.state.clean;
        let Some(account) = self.account.as_ref().filter(|_| authoritative) else { return };
        // Where a log is damaged its blocks seem lost, or were to recovery.
        if self.report.findings.iter().any(|f| hides_blocks(f.what)) {
            return;
        }
        let (lost, free) = self.space.compare(account);
        for run in lost {
            let detail = format!("nobody has {} blocks that are not free", run.count);
            let finding = Finding::new(What::BlockLost, detail);
            self.report.add(Finding { block: Some(run.start.0 as u64), ..finding });
        }
        let free: BTreeSet<u32> = free.iter().flat_map(|run| run.blocks()).take(FINDINGS_MAX).collect();
        for (block, owners) in self.owners(&free) {
            let finding = Finding::of(What::BlockFree, owners[0], "it has a block that counts as free");
            self.report.add(finding.at(block_addr(Block(block))));
        }
    }

    /// Segments in blocks that nobody has, though they are not free; and of logs whose heads are lost, anywhere.
    fn strays(&self) -> Strays {
        let mut strays = Strays::new();
        let mut note = |owners: &Owners, at: Addr| {
            for (owner, stray) in owners.segments_at(&self.pool, at) {
                strays.entry(owner).or_default().push(stray);
            }
        };
        let units =
            |block: u32| (0..BLOCK as u64).step_by(MINI).map(move |n| block_addr(Block(block)).add(n));
        let begins_segment = |&at: &Addr| {
            let mut line = [0; LINE];
            self.pool.media.read(at, &mut line).is_ok()
                && Head::decode(&line).is_some_and(|h| h.kind == Type::Segment)
        };
        let owner = |&ino: &u32| {
            let header = self.pool.header(ino).or_else(|| self.tree.rescued.get(&ino).copied());
            header.map(|header| (ino, header.generation))
        };
        let headless = self.report.findings.iter().filter(|f| f.what == What::LogHead);
        let key_crc = self.pool.key_crc;
        let headless = Owners::new(key_crc, headless.filter_map(|f| owner(&f.ino?)));
        if !headless.is_empty() {
            self.searched().flat_map(units).filter(begins_segment).for_each(|at| note(&headless, at));
        }
        let lost = self.account.as_ref().map_or(Vec::new(), |account| self.space.compare(account).0);
        if !lost.is_empty() {
            let named = Owners::new(key_crc, self.named().iter().filter_map(owner));
            let places = lost.iter().flat_map(|run| run.blocks()).flat_map(units);
            places.filter(begins_segment).for_each(|at| note(&named, at));
        }
        strays.values_mut().for_each(|of_one| of_one.sort_by_key(stray_order));
        strays
    }

    /// Blocks that somebody may have stored to, one after the other, and how far through the pool that is.
    fn searched(&self) -> impl Iterator<Item = u32> + '_ {
        let of = self.pool.media.len();
        self.pool.stored().into_iter().flatten().inspect(move |&block| {
            self.ask.tell(Progress::Search { done: block as u64 * BLOCK as u64, of });
        })
    }

    /// Who has each of these blocks.
    fn owners(&self, blocks: &BTreeSet<u32>) -> BTreeMap<u32, Vec<u32>> {
        let mut owners: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        if blocks.is_empty() {
            return owners;
        }
        let mut note = |image: &Image| {
            let ino = image.owner.ino;
            for block in space::blocks_of(image).flat_map(|run| blocks.range(run.blocks())) {
                let owners = owners.entry(*block).or_default();
                // It may have the block more than once.
                if owners.last() != Some(&ino) {
                    owners.push(ino);
                }
            }
        };
        note(&self.table);
        for ino in self.named() {
            if let Some(image) = self.tree.image(&self.pool, ino) {
                note(&image);
            }
        }
        owners
    }

    /// Inodes that have a name or are in use without one.
    fn named(&self) -> Vec<u32> {
        let nameless = self.account.iter().flat_map(|account| account.nameless.iter().copied());
        self.tree.named().chain(nameless).collect()
    }

    /// Whether links and parents are what the account says.
    fn links(&mut self) {
        let authoritative = self.pool.live || self.pool.state.clean;
        let Some(account) = self.account.take() else { return };
        if authoritative && !self.report.findings.iter().any(|f| hides_blocks(f.what)) {
            if account.links.len() != self.pool.slots() as usize {
                let detail = "the checkpoint counts other inodes than the table";
                self.report.add(Finding::new(What::Checkpoint, detail));
            }
            for (ino, &(links, parent)) in account.links.iter().enumerate().skip(ROOT_INO as usize) {
                let ino = ino as u32;
                let found = self.tree.links(ino);
                if found != links && found != 0 {
                    let detail = format!("{found} names lead to it, {links} are counted");
                    self.report.add(Finding::of(What::Links, ino, detail));
                } else if found != 0 && self.tree.parent(ino).is_some_and(|p| p != parent) {
                    let detail = format!("it is counted as one of directory {parent}");
                    self.report.add(Finding::of(What::Links, ino, detail));
                }
            }
        }
        for &ino in &account.misshown {
            let detail = "stat reports what it is not";
            self.report.add(Finding::of(What::Links, ino, detail));
        }
        self.account = Some(account);
    }
}

/// The path that leads to an inode, if the root does; of one that is longer than any that the kernel takes the end, behind dots.
fn path(index: &HashMap<u32, (u32, &[u8])>, ino: u32) -> Option<Vec<u8>> {
    let (mut parts, mut bytes, mut seen) = (Vec::new(), 0, HashSet::new());
    let (mut at, mut path) = (ino, Vec::new());
    while at != ROOT_INO {
        let &(dir, name) = index.get(&at)?;
        bytes += 1 + name.len();
        if bytes > PATH_BYTES_MAX {
            path.extend_from_slice(b"...");
            break;
        }
        parts.push(name);
        at = dir;
        if !seen.insert(dir) {
            return None; // round and round
        }
    }
    path.extend(parts.iter().rev().flat_map(|part| [b"/".as_slice(), part].concat()));
    Some(if path.is_empty() { b"/".to_vec() } else { path })
}

/// Whether such damage hides blocks that somebody has.
fn hides_blocks(what: What) -> bool {
    matches!(
        what,
        What::Table
            | What::Slot
            | What::LogHead
            | What::LogRecord
            | What::LogSegment
            | What::LogCondemned
            | What::Record
            | What::Media
            | What::Entry
            | What::EntryType
            | What::Orphan
            | What::TwoParents
            | What::EntryName
            | What::BlockTwice
    )
}

/// File bytes that cannot be read, and where they stand.
pub(super) fn unreadable<M: Media>(pool: &Pool<M>, image: &Image) -> Vec<(u64, u64, Addr)> {
    let mut found: Vec<(u64, u64, Addr)> = Vec::new();
    for (&page, piece) in image.pages.iter().filter(|(_, piece)| !piece.unwritten) {
        for n in 0..piece.count {
            let block = block_addr(Block(piece.block + n));
            if pool.media.crc32c(block, BLOCK, 0).is_ok() {
                continue;
            }
            for line in (0..BLOCK as u64).step_by(LINE) {
                let offset = (page + n) as u64 * BLOCK as u64 + line;
                let at = block.add(line);
                if offset >= image.size || pool.media.crc32c(at, LINE, 0).is_ok() {
                    continue;
                }
                let end = (offset + LINE as u64).min(image.size);
                match found.last_mut() {
                    Some(last) if last.1 == offset => last.1 = end,
                    _ => found.push((offset, end, at)),
                }
            }
        }
    }
    found
}

/// Whether a file is what a fixed one has to be.
fn is_one_run(image: &Image) -> bool {
    let mut pieces = image.pages.iter();
    let first = pieces.next();
    let whole = |piece: &image::Piece| !piece.unwritten && piece.count as u64 * BLOCK as u64 == image.size;
    image.kind == Kind::File
        && first.is_some_and(|(&page, piece)| page == 0 && whole(piece))
        && pieces.next().is_none()
}
