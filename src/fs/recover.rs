//! Opening a pool that was not closed: what the logs say becomes the state, in parallel.
//!
//! 1. The slot headers are read.
//! 2. Each directory's log is scanned for operations **in doubt**. Normally that is its last one at
//!    most, and only if its epoch is not settled. After a power loss on an ordinary file it is every
//!    operation of an epoch that was not synced, because write-back keeps no order. What is in doubt
//!    counts only if what it depends on is there: the slot it names, its other half in another log.
//!    Where it does not count, the log is cut before it.
//! 3. Cuts are carried from log to log until nothing changes; then the directories are replayed, and
//!    link counts and parents follow from the root down. What the root does not reach is free.
//! 4. The logs of all files reached are replayed, the last operation's data is verified, blocks are
//!    marked, and redo bytes are stored again.
//! 5. Logs that were cut are sealed, so that what was voided once is void for ever. Offloaded writes whose copy had
//!    not ended are skipped, whatever follows them; what their pages are instead is written down, which later replays
//!    come to after them.
//!
//! **Damage** costs the inode that has it, not the pool. A damaged file answers EUCLEAN from then on (its log head
//! says so, because later recoveries cannot tell any more), and the blocks that the rest of its log names stay
//! taken. Where damage hides which blocks are in use (a directory's, or a log that cannot be followed to its end)
//! nothing is changed: the pool is open for reading only. What nobody names may be damaged as it likes.
//!
//! Every step can be repeated: a crash in recovery is followed by the same recovery.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};

use super::alloc::{Block, Class, Conflict, Mini, Run};
use super::dirindex::Named;
use super::format::*;
use super::inode::{self, AddRecord, Body, Data, Inode, Partner, Redos};
use super::log::{self, Batch, Log, Op, Owner, Reader};
use super::mount::{Opened, load_table_inode};
use super::offload::Pages;
use super::*;

/// Slots that a thread takes at a time.
const SLOTS_AT_A_TIME: u32 = 512;
const THREADS_MAX: usize = 64;

type Headers = Vec<Option<SlotHeader>>;

struct Recovery<'a, M: Media> {
    core: &'a Core<M>,
    table_inode: &'a Inode,
    /// Epochs up to this one hold no doubt.
    settled: u64,
    /// What was stored, or is now, may reach the disk in any order.
    deferred: bool,
    power_loss: bool,
    headers: Headers,
    /// Slots on bad media.
    bad_slots: HashSet<u32>,
    voided: AtomicU32,
    /// The highest epoch that a log carries.
    newest: AtomicU64,
}

/// Inodes with names that cannot be read.
type Damaged = Vec<(u32, Error)>;

/// Directories replayed.
#[derive(Default)]
struct Replayed {
    dirs: HashMap<u32, Arc<Inode>>,
    said: Said,
    /// Those that cannot be read. A removed directory's log is anything by now, and may be on bad media; only
    /// the root's reach decides whether it matters.
    broken: HashMap<u32, Error>,
}

/// What directories say of others.
#[derive(Default)]
struct Said {
    /// Change times: (directory, inode, time).
    stamps: Vec<(u32, u32, u64)>,
    /// Inodes that lost a name for good, with their generations, and where that is said.
    removed: Vec<((u32, u64), Removal)>,
    /// Blocks that operations which are not settled name: see [`Recovery::asks`].
    asked: Vec<Run>,
}

/// An operation of a directory that took a name for good.
#[derive(Clone, Copy)]
struct Removal {
    dir: u32,
    seq: u32,
    settled: bool,
    in_doubt: bool,
}

/// What a scan of a directory's log found.
struct Scan {
    /// Number of the first operation that does not count.
    cut: Option<u32>,
    head_seq: u32,
    pairs: Vec<Pair>,
}

/// A record that is void without another one.
struct Pair {
    seq: u32,
    /// Whose entry it is.
    ino: u32,
    partner: Partner,
    in_doubt: bool,
    /// The entry left this directory for the partner's.
    leaves: bool,
}

/// Work on a log that waits until free space is known.
#[derive(Default)]
struct Repairs {
    seals: Vec<(Owner, Log)>,
    /// Change times that only directories know.
    stamps: HashMap<u32, u64>,
    /// Files with writes that were skipped.
    restored: Vec<Restored>,
    /// Files.
    damaged: Damaged,
    /// Inodes without a name, and blocks, that a recovery would ask for which follows this one if it is cut short.
    asked_inodes: Vec<u32>,
    asked: Vec<Run>,
}

/// A file as it is without the writes that were skipped, and their pages.
struct Restored {
    owner: Owner,
    body: Body,
    atime: u64,
    pages: Vec<Pages>,
    /// Its log was cut, too.
    cut: bool,
}

/// What a record behind a skipped write may say that it has from it.
#[derive(Clone, Copy)]
struct Claims {
    size: u64,
    mtime: u64,
    /// What holds.
    holds: (u64, u64),
}

pub(super) fn recover<M: Media>(core: &mut Core<M>, previous: &State, power_lost: bool) -> Result<Opened> {
    let core = &*core;
    tracing::info!("the pool was not closed: scanning its logs");
    let whole = |run| core.alloc.mark_used(run).map_err(conflict(TABLE_INO));
    whole(Run { start: Block(0), count: TABLE_BLOCK })?;
    whole(Run { start: Block(core.sb.blocks as u32 - 1), count: 1 })?;
    let table_inode = load_table_inode(core)?;
    mark(core, TABLE_INO, &table_inode.body.read())?;
    let slots = (table_inode.body.read().size / BLOCK as u64) as u32 * SLOTS_PER_BLOCK;
    let mut r = Recovery {
        core,
        table_inode: &table_inode,
        settled: previous.settled,
        deferred: core.deferring || previous.deferred,
        power_loss: previous.lost_power(power_lost),
        headers: Vec::new(),
        bad_slots: HashSet::new(),
        voided: AtomicU32::new(0),
        newest: AtomicU64::new(0),
    };
    (r.headers, r.bad_slots) = r.read_headers(slots)?;
    if r.headers[ROOT_INO as usize].is_none_or(|h| h.mode & libc::S_IFMT != libc::S_IFDIR) {
        return Err(Error::message(
            libc::EUCLEAN,
            "recover::recover",
            "the root directory is damaged; lode fsck --repair keeps what validates",
        ));
    }
    let table = table::Table::default();
    let mut repairs = Repairs::default();
    let lost = r.recover_directories(&table, slots, &mut repairs)?;
    r.recover_files(&table, slots, &mut repairs)?;
    for block in core.media.bad() {
        // Somebody's, or nobody's from now on.
        let _ = core.alloc.mark_used(Run { start: block, count: 1 });
    }
    let damaged = (lost.len() + repairs.damaged.len()) as u64;
    let read_only = r.report_damage(&lost, &repairs.damaged);
    let held = r.hold(&table, &repairs);
    core.alloc.start();
    // Above all that logs carry, even if the state line is older than they are.
    core.epochs.raise(r.newest.load(Ordering::Relaxed));
    let epoch = Some(core.epochs.current());
    for owned in held {
        match owned {
            Owned::Blocks(run) => core.free(run, epoch),
            Owned::Mini(mini) => log::release(core, log::mini_addr(mini), MINI_LINES as u16, epoch),
        }
    }
    if !read_only {
        r.repair(&table, repairs)?;
    }
    let is_free = |ino: &u32| table.entry(*ino).links() == 0 && !r.bad_slots.contains(ino);
    let mut free_slots: Vec<u32> = (2..slots).filter(is_free).collect();
    let orphans = free_slots.iter().filter(|&&ino| r.headers[ino as usize].is_some()).count() as u64;
    free_slots.reverse();
    let report = OpenReport {
        was_clean: false,
        checkpoint_damaged: false, // the caller knows
        inodes_scanned: slots as u64 - free_slots.len() as u64,
        voided: r.voided.load(Ordering::Relaxed) as u64,
        orphans,
        damaged,
        settled: previous.settled,
        seconds: 0.0,
    };
    Ok(Opened { table, table_inode, slot_count: slots, free_slots, read_only, report })
}

/// Runs `work` over `[0, count)` in parts, on all CPUs.
fn parallel<T: Send + Default>(
    count: u32,
    work: impl Fn(std::ops::Range<u32>, &mut T) -> Result<()> + Sync,
) -> Result<Vec<T>> {
    let parts = (count.div_ceil(SLOTS_AT_A_TIME) as usize).clamp(1, THREADS_MAX);
    // Asking how many CPUs there are reads files: not for a small pool.
    let threads = match parts {
        1 => 1,
        _ => std::thread::available_parallelism().map_or(1, |n| n.get()).min(parts),
    };
    let next = AtomicU32::new(0);
    let failed = Mutex::new(None);
    let run = || {
        let mut out = T::default();
        loop {
            let from = next.fetch_add(SLOTS_AT_A_TIME, Ordering::Relaxed);
            if from >= count || failed.lock().is_some() {
                return out;
            }
            if let Err(e) = work(from..count.min(from + SLOTS_AT_A_TIME), &mut out) {
                failed.lock().get_or_insert(e);
            }
        }
    };
    let parts = std::thread::scope(|s| {
        let others: Vec<_> = (1..threads).map(|_| s.spawn(run)).collect();
        let mut parts = vec![run()];
        parts.extend(others.into_iter().map(|t| t.join().expect("a recovery thread panicked")));
        parts
    });
    match failed.into_inner() {
        Some(e) => Err(e),
        None => Ok(parts),
    }
}

impl<M: Media> Recovery<'_, M> {
    fn slot(&self, ino: u32) -> Addr {
        let body = self.table_inode.body.read();
        let super::index::Mapping::Written(block) = body.file().expect("checked").get(ino / SLOTS_PER_BLOCK)
        else {
            unreachable!("the table has no holes: checked at load");
        };
        log::block_addr(block).add((ino % SLOTS_PER_BLOCK) as u64 * SLOT as u64)
    }

    fn owner(&self, ino: u32) -> Owner {
        let generation = self.headers[ino as usize].expect("the caller saw a header").generation;
        Owner { ino, generation, slot: self.slot(ino) }
    }

    fn is_dir(&self, ino: u32) -> bool {
        self.headers[ino as usize].is_some_and(|h| h.mode & libc::S_IFMT == libc::S_IFDIR)
    }

    fn read_headers(&self, slots: u32) -> Result<(Headers, HashSet<u32>)> {
        type Part = (Vec<(u32, SlotHeader)>, Vec<u32>);
        let parts = parallel(slots, |range, (found, bad): &mut Part| {
            for ino in range.filter(|&ino| ino != TABLE_INO) {
                match inode::read_header(self.core, ino, self.slot(ino)) {
                    Ok(header) => found.extend(header.map(|h| (ino, h))),
                    Err(_) => bad.push(ino),
                }
            }
            Ok(())
        })?;
        let mut headers = vec![None; slots as usize];
        let mut bad_slots = HashSet::new();
        for (found, bad) in parts {
            found.into_iter().for_each(|(ino, h)| headers[ino as usize] = Some(h));
            bad_slots.extend(bad);
        }
        Ok((headers, bad_slots))
    }

    /// Whether an operation needs proof that what it depends on is on media.
    fn in_doubt(&self, op: &Op, last: bool) -> bool {
        let all = self.power_loss
            && !self.core.media.omits("after a power loss all that was not synced is in doubt");
        op.epoch() > self.settled && (last || all)
    }

    // -----------------------------------------------------------------------------------------------
    // Directories

    /// What the root reaches goes into the table; the inodes among it are returned that are lost for now, with all
    /// below them.
    fn recover_directories(
        &self,
        table: &table::Table,
        slots: u32,
        repairs: &mut Repairs,
    ) -> Result<Damaged> {
        let parts = parallel(slots, |range, out: &mut Vec<(u32, Scan)>| {
            for ino in range.filter(|&ino| self.is_dir(ino)) {
                // The replay fails in the same way.
                out.extend(self.scan(ino).ok().map(|scan| (ino, scan)));
            }
            Ok(())
        })?;
        let mut scans: HashMap<u32, Scan> = parts.into_iter().flatten().collect();
        loop {
            self.settle_pairs(&mut scans);
            let mut replayed = self.replay_directories(&scans, slots)?;
            if self.power_loss && self.keep_what_was_left(&mut scans, &replayed) {
                continue; // a directory was removed, and what had emptied it is lost
            }
            let (reached, damaged) = self.reach(&mut replayed)?;
            if self.power_loss && self.keep_in_reach(&mut scans, &reached, &replayed) {
                continue; // an entry had left for a directory that the power loss took
            }
            for (dir, ino, time) in replayed.said.stamps {
                if reached.contains_key(&dir) {
                    note(&mut repairs.stamps, ino, time);
                }
            }
            let removed = replayed.said.removed.iter().filter(|(_, removal)| !removal.settled);
            repairs.asked_inodes.extend(removed.map(|((ino, _), _)| *ino));
            repairs.asked_inodes.extend(replayed.dirs.keys().filter(|ino| !reached.contains_key(*ino)));
            repairs.asked.extend(replayed.said.asked);
            self.adopt(table, replayed.dirs, &reached, &scans, repairs)?;
            return Ok(damaged);
        }
    }

    /// Finds where a directory's log must be cut for reasons of its own, and its paired records.
    fn scan(&self, ino: u32) -> Result<Scan> {
        let mut reader = Reader::new(self.core, self.owner(ino))?;
        let mut scan = Scan { cut: None, head_seq: reader.log().head_seq(), pairs: Vec::new() };
        let (mut op, mut next) = (Op::default(), Op::default());
        let mut more = reader.next(&mut op)?;
        while more {
            more = reader.next(&mut next)?;
            let in_doubt = self.in_doubt(&op, !more);
            if in_doubt && !self.depends_on_media(&op)? {
                scan.cut = Some(op.seq());
                break;
            }
            for record in op.records() {
                if let Some((ino, partner, leaves)) = partner_of(&record) {
                    scan.pairs.push(Pair { seq: op.seq(), ino, partner, in_doubt, leaves });
                }
            }
            std::mem::swap(&mut op, &mut next);
        }
        self.newest.fetch_max(reader.newest(), Ordering::Relaxed);
        Ok(scan)
    }

    /// Whether the slots, logs and values that the operation's records name are there.
    fn depends_on_media(&self, op: &Op) -> Result<bool> {
        for record in op.records() {
            let holds = match record.kind {
                Type::Add => match AddRecord::decode(record.bytes) {
                    Some(add) if add.flags & field::add::COPIED == 0 => self.names_inode(&add)?,
                    Some(_) => true,
                    None => false,
                },
                // On persistent memory values are durable before their records.
                Type::Xattr => !self.power_loss || self.has_value(record.bytes)?,
                _ => true,
            };
            if !holds {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn names_inode(&self, add: &AddRecord) -> Result<bool> {
        if self.core.media.omits("an entry counts only with its inode") {
            return Ok(true);
        }
        let header = self.headers.get(add.ino as usize).copied().flatten();
        if header.is_none_or(|h| h.generation != add.generation) {
            return Ok(false);
        }
        // A link in doubt needs the new inode, too: its creation may stand in a directory that is lost.
        if add.flags & field::add::CREATE == 0 && !self.power_loss {
            return Ok(true);
        }
        let mut reader = match Reader::new(self.core, self.owner(add.ino)) {
            Ok(reader) => reader,
            // Of the new slot all is there but the log head, which is still the last inode's.
            Err(e) if e.errno() == libc::EUCLEAN => return Ok(false),
            Err(_) => return Ok(true), // its log is on bad media: an inode that cannot be read
        };
        if reader.log().head_seq() > 0 {
            return Ok(true); // it was cleaned since: its beginning was there
        }
        let mut op = Op::default();
        while reader.log().seq() < add.lines as u32 {
            match reader.next(&mut op) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(_) => return Ok(true), // it is damaged, but it was there
            }
            // What was settled may be gone again.
            if self.power_loss && self.in_doubt(&op, false) && !self.depends_on_media(&op)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn has_value(&self, b: &[u8]) -> Result<bool> {
        if b[field::xattr::FLAGS] & field::xattr::IN_BLOCKS == 0
            || b[field::xattr::FLAGS] & field::xattr::COPIED != 0
        {
            return Ok(true);
        }
        let len = get32(b, field::xattr::VALUE_LEN) as usize;
        let run = value_run(b);
        if len > crate::limits::XATTR_VALUE_BYTES_MAX || !self.core.holds_blocks(run) {
            return Ok(false);
        }
        let crc = self.core.media.crc32c(log::block_addr(run.start), len, 0);
        // What cannot be read counts, as data do: see `inode::verify_data`.
        let matches = crc.map_or(true, |crc| crc == get32(b, field::xattr::CRC));
        Ok(self.core.media.verified(&[(log::block_addr(run.start), len)], matches))
    }

    /// Cuts every log before a paired record in doubt whose other half is not there, until no cut
    /// takes another half away.
    fn settle_pairs(&self, scans: &mut HashMap<u32, Scan>) {
        loop {
            let mut halves: HashMap<u64, u32> = HashMap::new();
            for pair in scans.values().flat_map(Scan::counted) {
                *halves.entry(pair.partner.transaction).or_default() += 1;
            }
            let heads: HashMap<u32, u32> = scans.iter().map(|(&ino, s)| (ino, s.head_seq)).collect();
            let mut changed = false;
            for scan in scans.values_mut() {
                let void = scan.counted().find(|p| {
                    p.in_doubt
                        && !self.core.media.omits("half a rename is void")
                        && halves[&p.partner.transaction] < 2
                        && !self.partner_moved_on(&p.partner, &heads)
                });
                if let Some(seq) = void.map(|p| p.seq) {
                    scan.cut = Some(seq);
                    changed = true;
                }
            }
            if !changed {
                return;
            }
        }
    }

    /// Whether the other half was surely durable once: its log was cleaned past it, or its directory
    /// was removed and its slot taken by another inode. After a power loss another inode there is an older
    /// one: no slot is taken before all that named it is settled.
    fn partner_moved_on(&self, partner: &Partner, heads: &HashMap<u32, u32>) -> bool {
        match self.headers.get(partner.ino as usize).copied().flatten() {
            Some(h) if h.generation != partner.generation => !self.power_loss,
            Some(_) => {
                heads.get(&partner.ino).is_some_and(|head| (head.wrapping_sub(partner.seq) as i32) > 0)
            }
            None => false,
        }
    }

    /// Replays all directories up to their cuts.
    fn replay_directories(&self, scans: &HashMap<u32, Scan>, slots: u32) -> Result<Replayed> {
        let exchanges = exchanges(scans);
        let parts = parallel(slots, |range, out: &mut Replayed| {
            for ino in range.filter(|&ino| self.is_dir(ino)) {
                let cut = scans.get(&ino).and_then(|s| s.cut);
                match self.replay_directory(ino, cut, &exchanges, &mut out.said) {
                    Ok(dir) => {
                        out.dirs.insert(ino, Arc::new(dir));
                    }
                    Err(e) => {
                        out.broken.insert(ino, e);
                    }
                }
            }
            Ok(())
        })?;
        let mut all = Replayed::default();
        for part in parts {
            all.dirs.extend(part.dirs);
            all.said.stamps.extend(part.said.stamps);
            all.said.removed.extend(part.said.removed);
            all.said.asked.extend(part.said.asked);
            all.broken.extend(part.broken);
        }
        Ok(all)
    }

    fn replay_directory(
        &self,
        ino: u32,
        cut: Option<u32>,
        exchanges: &HashSet<u64>,
        said: &mut Said,
    ) -> Result<Inode> {
        let owner = self.owner(ino);
        let header = self.headers[ino as usize].expect("a directory has one");
        let mut reader = Reader::new(self.core, owner)?;
        let mut body = Body::new(&header, Log::new(self.core.key_crc, &owner));
        let mut atime = header.btime;
        let mut op = Op::default();
        while reader.next(&mut op)? {
            if cut == Some(op.seq()) {
                reader.rewind(op.begin());
                break;
            }
            let settled = op.epoch() <= self.settled;
            let removal = Removal { dir: ino, seq: op.seq(), settled, in_doubt: self.in_doubt(&op, false) };
            for record in op.records().filter(|r| r.kind == Type::Add) {
                let replaced = body.dir()?.by_cookie(get32(record.bytes, field::add::REPLACES));
                if let Some(old) = replaced {
                    if !is_exchange(&op, &record, exchanges) {
                        said.removed.push(((old.entry.ino.0, old.entry.generation), removal));
                    }
                    said.stamps.push((ino, old.entry.ino.0, get64(record.bytes, field::add::MTIME)));
                }
            }
            self.asks(&op, None, &mut said.asked);
            inode::apply(self.core, &owner, &mut body, &mut atime, &op, None)?;
            for record in op.records() {
                match record.kind {
                    Type::Add if record.bytes[field::add::FLAGS] & field::add::CREATE == 0 => {
                        said.stamps.push((
                            ino,
                            get32(record.bytes, field::add::INO),
                            get64(record.bytes, field::add::MTIME),
                        ));
                    }
                    Type::Remove | Type::RemoveMoved => {
                        let gone = get32(record.bytes, field::remove::INO);
                        said.stamps.push((ino, gone, get64(record.bytes, field::remove::MTIME)));
                        if record.kind == Type::Remove {
                            let generation = get64(record.bytes, field::remove::GENERATION);
                            said.removed.push(((gone, generation), removal));
                        }
                    }
                    _ => {}
                }
            }
        }
        body.log = reader.into_log();
        Ok(inode::assemble(&header, &owner, body, atime))
    }

    /// The directories that the root reaches, each with its parent, and what of the tree is damaged.
    fn reach(&self, replayed: &mut Replayed) -> Result<(HashMap<u32, u32>, Damaged)> {
        let mut parents = HashMap::from([(ROOT_INO, ROOT_INO)]);
        let mut queue = vec![ROOT_INO];
        let mut damaged = Damaged::new();
        while let Some(ino) = queue.pop() {
            let Some(dir) = replayed.dirs.get(&ino) else {
                match replayed.broken.remove(&ino) {
                    Some(e) if ino != ROOT_INO => damaged.push((ino, e)),
                    Some(e) => return Err(e),
                    None => return Err(bad_entry(ino, "is named as a directory and is none")),
                }
                continue;
            };
            let body = dir.body.read();
            for Named { entry: e, .. } in body.dir()?.iter() {
                let Some(header) = self.headers.get(e.ino.0 as usize) else {
                    return Err(bad_entry(ino, "names an inode that is not there"));
                };
                let Some(header) = header else {
                    damaged.push((e.ino.0, bad_entry(ino, "names an inode whose slot is damaged")));
                    if e.kind == Kind::Directory {
                        parents.insert(e.ino.0, ino);
                    }
                    continue;
                };
                if header.generation != e.generation || header.mode & libc::S_IFMT != e.kind.mode_bits() {
                    return Err(bad_entry(ino, "names an inode that is not there"));
                }
                if e.kind == Kind::Directory {
                    if parents.insert(e.ino.0, ino).is_some() {
                        return Err(bad_entry(e.ino.0, "is named by two directories"));
                    }
                    queue.push(e.ino.0);
                }
            }
        }
        Ok((parents, damaged))
    }

    /// Cuts logs before the removal of a directory in which something is left: what emptied it is lost, or void. The removal
    /// came later than that, so it was not synced either. Whether it changed any.
    fn keep_what_was_left(&self, scans: &mut HashMap<u32, Scan>, replayed: &Replayed) -> bool {
        if self.core.media.omits("a removal counts only with what emptied the directory") {
            return false;
        }
        let is_left = |(ino, generation): (u32, u64)| {
            replayed.dirs.get(&ino).is_some_and(|dir| {
                dir.generation == generation && dir.body.read().dir().is_ok_and(|entries| !entries.is_empty())
            })
        };
        let removals = replayed.said.removed.iter().filter(|(_, removal)| removal.in_doubt);
        let cuts =
            removals.filter(|(inode, _)| is_left(*inode)).map(|(_, removal)| (removal.dir, removal.seq));
        cut_before(scans, cuts.collect())
    }

    /// Cuts logs where an entry left for a directory that is not reached, and was not removed: not before that entry, which may
    /// have been synced, but before what took the directory out of reach. Whether it changed any.
    fn keep_in_reach(
        &self,
        scans: &mut HashMap<u32, Scan>,
        reached: &HashMap<u32, u32>,
        replayed: &Replayed,
    ) -> bool {
        let is_there = |partner: &Partner| {
            let header = self.headers.get(partner.ino as usize).copied().flatten();
            header.is_some_and(|h| h.generation == partner.generation)
        };
        // Of an exchange both halves are additions, and both take an entry away.
        let exchanges = exchanges(scans);
        let lost = |p: &&Pair| {
            (p.leaves || exchanges.contains(&p.partner.transaction))
                && p.in_doubt
                && !reached.contains_key(&p.partner.ino)
                && is_there(&p.partner)
        };
        let mut tree = None;
        let mut cuts = Vec::new();
        for (&ino, scan) in scans.iter().filter(|(ino, _)| reached.contains_key(*ino)) {
            for pair in scan.counted().filter(lost) {
                let tree = tree.get_or_insert_with(|| Unreached::new(scans, reached, replayed));
                match tree.cause(pair.partner.ino, pair.partner.generation) {
                    Cause::Removed => {}
                    Cause::Move(dir, seq) => cuts.push((dir, seq)),
                    Cause::NeverThere => cuts.push((ino, pair.seq)),
                }
            }
        }
        cut_before(scans, cuts)
    }

    /// Puts what is reached into the table: link counts, parents, the directories themselves.
    fn adopt(
        &self,
        table: &table::Table,
        dirs: HashMap<u32, Arc<Inode>>,
        reached: &HashMap<u32, u32>,
        scans: &HashMap<u32, Scan>,
        repairs: &mut Repairs,
    ) -> Result<()> {
        for (&ino, &parent) in reached {
            let entry = table.entry(ino);
            entry.parent.store(parent, Ordering::Relaxed);
            entry.nlink.fetch_add(2, Ordering::Relaxed);
            if ino != ROOT_INO {
                table.entry(parent).nlink.fetch_add(1, Ordering::Relaxed);
            }
            let Some(dir) = dirs.get(&ino) else { continue };
            let body = dir.body.read();
            for Named { entry: e, .. } in body.dir()?.iter() {
                if e.kind != Kind::Directory {
                    table.entry(e.ino.0).nlink.fetch_add(1, Ordering::Relaxed);
                }
            }
            let cut = scans.get(&ino).is_some_and(|s| s.cut.is_some());
            if cut {
                self.voided.fetch_add(1, Ordering::Relaxed);
            }
            mark(self.core, ino, &body)?;
            table.line(ino).show(&body, dir.atime.load(Ordering::Relaxed));
            drop(body);
            table.fill(dir.clone());
            if cut {
                repairs.seals.push((dir.owner(), dir.body.read().log.clone()));
            }
        }
        Ok(())
    }

    // -----------------------------------------------------------------------------------------------
    // Files

    fn recover_files(&self, table: &table::Table, slots: u32, repairs: &mut Repairs) -> Result<()> {
        let stamps = std::mem::take(&mut repairs.stamps);
        let parts = parallel(slots, |range, out: &mut Repairs| {
            for ino in range {
                let is_named = table.entry(ino).links() > 0;
                if is_named && self.headers[ino as usize].is_some() && !self.is_dir(ino) {
                    self.recover_file(table, ino, stamps.get(&ino).copied(), out)?;
                } else if self.is_dir(ino)
                    && let (Some(&time), Some(dir)) = (stamps.get(&ino), table.entry(ino).node.share())
                    && time > dir.body.read().ctime
                {
                    out.stamps.insert(ino, time);
                }
            }
            Ok(())
        })?;
        for part in parts {
            repairs.seals.extend(part.seals);
            repairs.stamps.extend(part.stamps);
            repairs.restored.extend(part.restored);
            repairs.damaged.extend(part.damaged);
            repairs.asked.extend(part.asked);
        }
        Ok(())
    }

    fn recover_file(
        &self,
        table: &table::Table,
        ino: u32,
        stamp: Option<u64>,
        repairs: &mut Repairs,
    ) -> Result<()> {
        let Replay { body, redos, atime, skipped, cut, asked } = match self.replay_file(ino) {
            Ok(replayed) => replayed,
            Err(e) => {
                repairs.damaged.push((ino, e));
                return Ok(());
            }
        };
        mark(self.core, ino, &body)?;
        repairs.asked.extend(asked);
        table.log_end(ino).store(body.log.seq(), Ordering::Relaxed);
        if let Data::File(index) = &body.data
            && let Err(e) = redos.apply(self.core, index)
        {
            tracing::error!("inode {ino}: of its last writes not all bytes could be stored again: {e}");
        }
        if let Some(time) = stamp.filter(|&t| t > body.ctime) {
            repairs.stamps.insert(ino, time);
        }
        let voided = skipped.len() as u32 + cut as u32;
        self.voided.fetch_add(voided, Ordering::Relaxed);
        let owner = self.owner(ino);
        if !skipped.is_empty() {
            let pages = skipped.into_iter().flatten().collect();
            repairs.restored.push(Restored { owner, body, atime, pages, cut });
        } else if cut {
            repairs.seals.push((owner, body.log));
        }
        Ok(())
    }

    fn replay_file(&self, ino: u32) -> Result<Replay> {
        let owner = self.owner(ino);
        let header = self.headers[ino as usize].expect("a directory names it");
        let mut reader = Reader::new(self.core, owner)?;
        let mut body = Body::new(&header, Log::new(self.core.key_crc, &owner));
        let mut redos = Redos::default();
        let mut atime = header.btime;
        let (mut skipped, mut cut, mut claims): (Vec<Vec<Pages>>, _, Option<Claims>) =
            (Vec::new(), false, None);
        let mut asked = Vec::new();
        let (mut op, mut next) = (Op::default(), Op::default());
        let mut more = reader.next(&mut op)?;
        while more {
            more = reader.next(&mut next)?;
            if self.in_doubt(&op, !more) && !self.data_holds(&owner, &header, &body, &op)? {
                reader.rewind(op.begin());
                cut = true;
                break;
            }
            self.asks(&op, Some((&owner, &header, &body)), &mut asked);
            if !self.was_copied(&owner, &op)? {
                let write = op.records().last().expect("an operation has records").bytes;
                let (size, mtime) = (get64(write, field::write::SIZE), get64(write, field::write::MTIME));
                claims = Some(Claims { size, mtime, holds: (body.size, body.mtime) });
                let extents =
                    op.records().flat_map(|r| inode::extents(r.bytes).flatten().collect::<Vec<_>>());
                skipped.push(extents.map(|e| offload::pages_of(&e)).collect());
                std::mem::swap(&mut op, &mut next);
                continue;
            }
            inode::apply(self.core, &owner, &mut body, &mut atime, &op, Some(&mut redos))?;
            claims = claims.filter(|_| !sets_times(&op));
            if let Some(claims) = claims {
                claims.give_up(&mut body, &op);
            }
            std::mem::swap(&mut op, &mut next);
        }
        self.newest.fetch_max(reader.newest(), Ordering::Relaxed);
        body.log = reader.into_log();
        Ok(Replay { body, redos, atime, skipped, cut, asked })
    }

    /// Whether an operation is none that an engine was to copy the data of, or the copy had ended. Those of settled
    /// epochs had.
    fn was_copied(&self, owner: &Owner, op: &Op) -> Result<bool> {
        let is_offloaded = |r: &log::Record| {
            r.kind == Type::Write && get16(r.bytes, field::write::FLAGS) & field::write::OFFLOADED != 0
        };
        let Some(record) = op.records().find(is_offloaded) else { return Ok(true) };
        if op.epoch() <= self.settled
            || self.core.media.omits("an offloaded write counts only once it is copied")
        {
            return Ok(true);
        }
        let ticket = Ticket::unpack(get64(record.bytes, field::write::START))
            .ok_or_else(|| log::damaged(owner, "a write names a lane that there is not"))?;
        let lane = ticket.lane as usize;
        let word = self.core.media.load64(completion_addr(lane))?;
        let done = unpack_completion(lane, word).ok_or_else(|| {
            log::damaged(
                owner,
                "whether its last writes were complete is not known: a completion word is damaged",
            )
        })?;
        Ok(ticket.seq <= done)
    }

    /// Names what is damaged and keeps from others what damaged files have, as far as their logs say. Whether
    /// that is too little for anything to be changed.
    fn report_damage(&self, lost: &Damaged, files: &Damaged) -> bool {
        let mut read_only = false;
        for (ino, e) in lost {
            read_only = true;
            tracing::error!("inode {ino}, and what is below it, cannot be used: {e}");
        }
        for (ino, e) in files {
            tracing::error!("inode {ino} cannot be used: {e}");
            read_only |= !self.salvage(*ino, &mut Vec::new());
        }
        if read_only {
            tracing::error!(
                "which blocks belong to what is damaged cannot be known: so that nothing of it is overwritten \
                 the pool is open for reading only; lode fsck --repair keeps what validates"
            );
        }
        read_only
    }

    /// Marks what a recovery that follows this one would ask for, if this one is cut short, and nobody has any more: so repairs
    /// take none of it, and it decides again as this one did. Of inodes that nobody names all is held, of others the blocks
    /// of operations that are not settled.
    fn hold(&self, table: &table::Table, repairs: &Repairs) -> Vec<Owned> {
        let mut held = Vec::new();
        if self.core.media.omits("what the next recovery would ask for stays until this one is through") {
            return held;
        }
        for &ino in &repairs.asked_inodes {
            let header = self.headers.get(ino as usize).copied().flatten();
            if header.is_some() && table.entry(ino).links() == 0 {
                self.salvage(ino, &mut held);
            }
        }
        self.hold_blocks(repairs.asked.iter().copied(), &mut held);
        held
    }

    fn hold_blocks(&self, runs: impl Iterator<Item = Run>, held: &mut Vec<Owned>) {
        let blocks =
            runs.flat_map(|run| (0..run.count).map(move |n| Run { start: Block(run.start.0 + n), count: 1 }));
        held.extend(blocks.filter(|block| self.core.alloc.mark_used(*block).is_ok()).map(Owned::Blocks));
    }

    /// Notes the blocks by which an operation that is not settled was, or would be, found to hold: values, and of a file,
    /// whose state before it is given, data. On persistent memory only a log's last operation is, which has what it names.
    fn asks(&self, op: &Op, file: Option<(&Owner, &SlotHeader, &Body)>, asked: &mut Vec<Run>) {
        if !self.deferred || op.epoch() <= self.settled {
            return;
        }
        let values = op
            .records()
            .filter(|r| r.kind == Type::Xattr && r.bytes[field::xattr::FLAGS] & field::xattr::IN_BLOCKS != 0);
        asked.extend(values.map(|r| value_run(r.bytes)).filter(|run| self.core.holds_blocks(*run)));
        if let Some((owner, header, body)) = file
            && let Ok(Some(after)) = self.written(owner, header, body, op)
        {
            let runs = after.file().expect("a file").iter_runs(0);
            asked.extend(runs.map(|run| Run { start: run.block, count: run.count }));
        }
    }

    /// Marks what a log still names, unless others have it, and adds it to `held`. Whether the log could be followed to
    /// its end.
    fn salvage(&self, ino: u32, held: &mut Vec<Owned>) -> bool {
        let owner = self.owner(ino);
        let header = self.headers[ino as usize].expect("a directory names it");
        let Ok(mut reader) = Reader::salvage(self.core, owner) else { return false };
        let mut body = Body::new(&header, Log::new(self.core.key_crc, &owner));
        let (mut op, mut atime, mut asked) = (Op::default(), 0, Vec::new());
        let followed = loop {
            match reader.next(&mut op) {
                // A record that says nonsense is left out, too.
                Ok(true) => {
                    self.asks(&op, Some((&owner, &header, &body)), &mut asked);
                    drop(inode::apply(self.core, &owner, &mut body, &mut atime, &op, None));
                }
                Ok(false) => break true,
                Err(_) => break false,
            }
        };
        body.log = reader.into_log();
        let alloc = &self.core.alloc;
        for_each_owned(&body, &mut |owned| {
            match owned {
                Owned::Blocks(run) => self.hold_blocks([run].into_iter(), held),
                Owned::Mini(mini) => held.extend(alloc.mark_mini_used(mini).is_ok().then_some(owned)),
            }
            Ok(())
        })
        .expect("what others have is left to them");
        self.hold_blocks(asked.into_iter(), held);
        followed
    }

    /// Lets a log's head say that the log is damaged. Idempotent.
    fn condemn(&self, ino: u32) -> Result<()> {
        let at = self.slot(ino).add(LOG_HEAD_OFFSET);
        let head = self.core.media.load64(at)?;
        if !is_condemned(head) {
            let dirty = self.core.media.store64(at, head ^ LOG_CONDEMNED)?;
            self.core.fence(self.core.media.flush(dirty));
        }
        Ok(())
    }

    /// Whether the data and values that an operation's records name are what it wrote.
    fn data_holds(&self, owner: &Owner, header: &SlotHeader, body: &Body, op: &Op) -> Result<bool> {
        if !self.depends_on_media(op)? {
            return Ok(false);
        }
        match self.written(owner, header, body, op)? {
            Some(after) => inode::verify_data(self.core, after.file().expect("a file"), op),
            None => Ok(true),
        }
    }

    /// A file of nothing but what an operation's data lies in: the record's own blocks, and for bytes stored in place those
    /// that the file has already. `None` where it writes none.
    fn written(&self, owner: &Owner, header: &SlotHeader, body: &Body, op: &Op) -> Result<Option<Body>> {
        let Some(index) = body.file() else { return Ok(None) };
        if !op.records().any(|r| r.kind == Type::Write) {
            return Ok(None);
        }
        let mut after = Body::new(header, Log::new(self.core.key_crc, owner));
        for record in op.records().filter(|r| r.kind == Type::Write) {
            let start = get64(record.bytes, field::write::START);
            let pages = get32(record.bytes, field::write::LEN).div_ceil(BLOCK as u32) + 1;
            let mut page = (start / BLOCK as u64) as u32;
            let end = page.saturating_add(pages);
            while page < end {
                let (mapping, count) = index.run_at(page, end - page);
                if let super::index::Mapping::Written(block) = mapping {
                    after.file_mut().set_run(page, count, block, false, &mut |_, _| {});
                }
                page += count;
            }
        }
        let mut atime = 0;
        inode::apply(self.core, owner, &mut after, &mut atime, op, None)?;
        Ok(Some(after))
    }

    // -----------------------------------------------------------------------------------------------

    /// Condemns what is damaged, seals what was cut, and writes down times that only directories knew.
    fn repair(&self, table: &table::Table, repairs: Repairs) -> Result<()> {
        for (ino, _) in repairs.damaged {
            self.condemn(ino)?;
        }
        let epoch = self.core.epochs.current();
        let mut pending = Flushed::issued();
        for Restored { owner, mut body, atime, pages, cut } in repairs.restored {
            if self.core.media.omits("what the pages of a skipped write are is written down") {
                continue;
            }
            if cut && !self.core.media.omits("a log that was cut is sealed") {
                pending = pending.and(body.log.seal_void(self.core, &owner, epoch)?);
            }
            let mut batch = Batch::new();
            offload::restoring_records(&body, pages.into_iter(), &mut batch);
            body.attr_record(atime, 0, &mut batch);
            pending = pending.and(body.log.append(self.core, &owner, &mut batch, epoch, Class::Release)?);
            table.log_end(owner.ino).store(body.log.seq(), Ordering::Relaxed);
        }
        for (owner, mut log) in repairs.seals {
            if self.core.media.omits("a log that was cut is sealed") {
                continue;
            }
            pending = pending.and(log.seal_void(self.core, &owner, epoch)?);
            table.log_end(owner.ino).store(log.seq(), Ordering::Relaxed);
            if let Some(dir) = table.entry(owner.ino).node.share() {
                table.change(&dir).log = log;
            }
        }
        for (ino, time) in repairs.stamps {
            if self.core.media.omits("change times that only directories know are written down") {
                continue;
            }
            if table.entry(ino).links() == 0 {
                continue;
            }
            let loaded = table.entry(ino).node.share();
            let node = match loaded {
                Some(node) => node,
                None => Arc::new(inode::load(self.core, ino, self.slot(ino))?),
            };
            let mut body = table.change(&node);
            if time <= body.ctime {
                continue;
            }
            body.ctime = time;
            let mut batch = Batch::new();
            body.attr_record(node.atime.load(Ordering::Relaxed), 0, &mut batch);
            match body.log.append(self.core, &node.owner(), &mut batch, epoch, Class::Release) {
                Ok(flushed) => {
                    pending = pending.and(flushed);
                    table.log_end(ino).store(body.log.seq(), Ordering::Relaxed);
                }
                Err(e) if e.errno() == libc::ENOSPC => {} // the older time stays
                Err(e) => return Err(e),
            }
        }
        self.core.fence(pending);
        Ok(())
    }
}

/// A file's log, replayed.
struct Replay {
    body: Body,
    redos: Redos,
    atime: u64,
    /// The pages of each write that was skipped.
    skipped: Vec<Vec<Pages>>,
    cut: bool,
    asked: Vec<Run>,
}

impl Claims {
    /// Takes from the body what an operation says that it has from the skipped write: who changes other attributes
    /// writes all of them down.
    fn give_up(self, body: &mut Body, op: &Op) {
        for record in op.records().filter(|r| r.kind == Type::Attr) {
            if get32(record.bytes, field::attr::FLAGS) & field::attr::TRUNCATE != 0 {
                continue;
            }
            if body.size == self.size {
                body.size = self.holds.0;
            }
            if body.mtime == self.mtime {
                body.mtime = self.holds.1;
            }
        }
    }
}

/// Whether an operation changes data: what others say of size and time they have from it from then on.
fn sets_times(op: &Op) -> bool {
    op.records().any(|r| match r.kind {
        Type::Write => get16(r.bytes, field::write::FLAGS) & field::write::MOVED == 0,
        Type::Attr => get32(r.bytes, field::attr::FLAGS) & field::attr::TRUNCATE != 0,
        kind => matches!(kind, Type::Hole | Type::Redo),
    })
}

impl Scan {
    /// The pairs before the cut.
    fn counted(&self) -> impl Iterator<Item = &Pair> {
        let cut = self.cut;
        self.pairs
            .iter()
            .take_while(move |p| cut.is_none_or(|cut| cut != p.seq && earlier(cut, p.seq) != cut))
    }
}

/// The blocks of an attribute's value that has some.
fn value_run(b: &[u8]) -> Run {
    let len = get32(b, field::xattr::VALUE_LEN) as usize;
    Run { start: Block(get32(b, field::xattr::BLOCK)), count: len.div_ceil(BLOCK) as u32 }
}

/// Whose entry it is, the partner, and whether the entry leaves for that one's directory.
fn partner_of(record: &log::Record) -> Option<(u32, Partner, bool)> {
    match record.kind {
        Type::RemoveMoved => {
            let partner = Partner::decode(&record.bytes[field::remove::PARTNER..]);
            Some((get32(record.bytes, field::remove::INO), partner, true))
        }
        Type::Add => {
            let add = AddRecord::decode(record.bytes)?;
            add.partner.map(|partner| (add.ino, partner, false))
        }
        _ => None,
    }
}

/// Transactions whose two halves are both additions.
fn exchanges(scans: &HashMap<u32, Scan>) -> HashSet<u64> {
    let mut added = HashSet::new();
    let additions = scans.values().flat_map(Scan::counted).filter(|pair| !pair.leaves);
    additions.map(|pair| pair.partner.transaction).filter(|transaction| !added.insert(*transaction)).collect()
}

/// Whether what an addition takes the place of gets another name by the same operation.
fn is_exchange(op: &Op, add: &log::Record, exchanges: &HashSet<u64>) -> bool {
    match AddRecord::decode(add.bytes).and_then(|add| add.partner) {
        Some(partner) => exchanges.contains(&partner.transaction),
        None => op.records().filter(|r| r.kind == Type::Add).count() > 1,
    }
}

/// Cuts each log before the earliest that is named of it; whether there was any.
fn cut_before(scans: &mut HashMap<u32, Scan>, cuts: Vec<(u32, u32)>) -> bool {
    let mut changed = false;
    for (dir, seq) in cuts {
        // What was not scanned cannot be read, and is cut by nobody.
        if let Some(scan) = scans.get_mut(&dir) {
            scan.cut = Some(scan.cut.map_or(seq, |cut| earlier(cut, seq)));
            changed = true;
        }
    }
    changed
}

/// Directories that the root does not reach.
struct Unreached<'a> {
    scans: &'a HashMap<u32, Scan>,
    /// The directory that names each.
    parents: HashMap<u32, u32>,
    /// With their generations.
    removed: HashSet<(u32, u64)>,
}

/// Why a directory is not reached.
enum Cause {
    /// It was removed, and is empty.
    Removed,
    /// It, or one above it, was moved: where that is said, in which directory.
    Move(u32, u32),
    /// The entry that made it, or one above it, is lost.
    NeverThere,
}

impl<'a> Unreached<'a> {
    fn new(scans: &'a HashMap<u32, Scan>, reached: &HashMap<u32, u32>, replayed: &Replayed) -> Unreached<'a> {
        let mut parents = HashMap::new();
        for (&ino, dir) in replayed.dirs.iter().filter(|(ino, _)| !reached.contains_key(*ino)) {
            let body = dir.body.read();
            let entries = body.dir().into_iter().flat_map(|index| index.iter());
            parents.extend(entries.filter(|e| e.entry.kind == Kind::Directory).map(|e| (e.entry.ino.0, ino)));
        }
        let removed = replayed.said.removed.iter().map(|(inode, _)| *inode).collect();
        Unreached { scans, parents, removed }
    }

    fn cause(&self, ino: u32, generation: u64) -> Cause {
        let mut path = vec![ino];
        let mut seen = HashSet::from([ino]);
        while let Some(&above) = self.parents.get(&path[path.len() - 1]) {
            if !seen.insert(above) {
                // No tree ever had this: the move that closed the circle came last, so it was not synced.
                let circle = path.iter().position(|&ino| ino == above).expect("it was seen");
                path.push(above);
                let moves = path[circle..].windows(2).filter_map(|link| self.moved(link[0], link[1]));
                let last = moves.max_by_key(|(_, pair)| pair.partner.transaction);
                return last.map_or(Cause::NeverThere, |(dir, pair)| Cause::Move(dir, pair.seq));
            }
            path.push(above);
        }
        if path.len() == 1 && self.removed.contains(&(ino, generation)) {
            return Cause::Removed;
        }
        // The highest never came to be: what was moved there first of all that is on the way.
        let mut moves = path.windows(2).rev().filter_map(|link| self.moved(link[0], link[1]));
        moves.next().map_or(Cause::NeverThere, |(dir, pair)| Cause::Move(dir, pair.seq))
    }

    /// The move, if it was one and is in doubt, by which `ino` came into `dir`.
    fn moved(&self, ino: u32, dir: u32) -> Option<(u32, &Pair)> {
        let came = self.scans.get(&dir)?.counted().filter(|pair| !pair.leaves && pair.ino == ino).last()?;
        came.in_doubt.then_some((dir, came))
    }
}

/// Of two numbers of a log's records.
fn earlier(a: u32, b: u32) -> u32 {
    if (a.wrapping_sub(b) as i32) < 0 { a } else { b }
}

fn note(stamps: &mut HashMap<u32, u64>, ino: u32, time: u64) {
    let known = stamps.entry(ino).or_insert(time);
    *known = time.max(*known);
}

/// Space that an inode has.
enum Owned {
    Blocks(Run),
    Mini(Mini),
}

/// Marks all that an inode has as used.
fn mark<M: Media>(core: &Core<M>, ino: u32, body: &Body) -> Result<()> {
    let marked = for_each_owned(body, &mut |owned| match owned {
        Owned::Blocks(run) => core.alloc.mark_used(run),
        Owned::Mini(mini) => core.alloc.mark_mini_used(mini),
    });
    marked.map_err(conflict(ino))
}

fn for_each_owned(
    body: &Body,
    each: &mut dyn FnMut(Owned) -> std::result::Result<(), Conflict>,
) -> std::result::Result<(), Conflict> {
    if let Data::File(index) = &body.data {
        for run in index.iter_runs(0) {
            each(Owned::Blocks(Run { start: run.block, count: run.count }))?;
        }
    }
    for run in body.xattrs.iter().filter_map(|x| x.blocks) {
        each(Owned::Blocks(run))?;
    }
    for s in body.log.segments() {
        each(if s.lines as u32 == MINI_LINES {
            Owned::Mini(log::addr_mini(s.addr))
        } else {
            Owned::Blocks(Run { start: Block((s.addr.0 / BLOCK as u64) as u32), count: 1 })
        })?;
    }
    Ok(())
}

fn conflict(ino: u32) -> impl Fn(Conflict) -> Error {
    move |c| {
        Error::message(
            libc::EUCLEAN,
            "recover::mark",
            format!(
                "inode {ino} has block {}, which another one has too; lode fsck --repair gives it to one",
                c.block.0
            ),
        )
    }
}

#[cold]
fn bad_entry(ino: u32, what: &str) -> Error {
    Error::message(
        libc::EUCLEAN,
        "recover::reach",
        format!("directory {ino} {what}; lode fsck --repair mends it"),
    )
}
