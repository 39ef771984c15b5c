//! What the logs of directories say: which of their operations count, and what the root reaches.

use super::*;

/// Directories replayed.
#[derive(Default)]
struct Replayed {
    dirs: HashMap<u32, Arc<Inode>>,
    /// By directory, those that cannot be read among them.
    said: BTreeMap<u32, Said>,
    /// Where logs were cut.
    cuts: HashMap<u32, u32>,
    /// What were exchanges.
    exchanges: HashSet<u64>,
    /// Those that cannot be read. A removed directory's log is anything by now, and may be on bad media; only
    /// the root's reach decides whether it matters.
    broken: HashMap<u32, Error>,
}

/// What a directory says of others.
#[derive(Default)]
struct Said {
    /// Change times: (inode, time).
    stamps: Vec<(u32, u64)>,
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
    /// Nothing in it is settled: its first operation is not, or there is none.
    is_new: bool,
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

impl<M: Media> Recovery<'_, M> {
    /// What the root reaches goes into the table; the inodes among it are returned that are lost for now, with all
    /// below them.
    pub(super) fn recover_directories(
        &self,
        table: &table::Table,
        slots: u32,
        repairs: &mut Repairs,
    ) -> Result<Damaged> {
        let parts = parallel(self.core, slots, |range, out: &mut Vec<(u32, Scan)>| {
            for ino in range.filter(|&ino| self.is_dir(ino)) {
                // The replay fails in the same way.
                out.extend(self.scan(ino).ok().map(|scan| (ino, scan)));
            }
            Ok(())
        })?;
        let mut scans: HashMap<u32, Scan> = parts.into_iter().flatten().collect();
        let mut replayed = Replayed::default();
        loop {
            self.settle_pairs(&mut scans);
            self.replay_directories(&scans, slots, &mut replayed)?;
            if self.power_loss && self.keep_what_was_left(&mut scans, &replayed) {
                continue; // a directory was removed, and what had emptied it is lost
            }
            let (reached, damaged) = self.reach(&mut replayed)?;
            if self.power_loss && self.keep_in_reach(&mut scans, &reached, &replayed) {
                continue; // an entry had left for a directory that the power loss took
            }
            for (&dir, said) in replayed.said.iter().filter(|(dir, _)| reached.contains_key(*dir)) {
                for &(ino, time) in &said.stamps {
                    note(&mut repairs.stamps, ino, (time, dir));
                }
            }
            let removed = replayed.removed().filter(|(_, removal)| !removal.settled);
            repairs.asked_inodes.extend(removed.map(|((ino, _), _)| *ino));
            repairs.asked_inodes.extend(replayed.dirs.keys().filter(|ino| !reached.contains_key(*ino)));
            repairs.asked.extend(replayed.said.values().flat_map(|said| &said.asked));
            self.adopt(table, replayed.dirs, &reached, &scans, repairs)?;
            return Ok(damaged);
        }
    }

    /// Finds where a directory's log must be cut for reasons of its own, and its paired records.
    fn scan(&self, ino: u32) -> Result<Scan> {
        let mut reader = Reader::new(self.core, self.owner(ino))?;
        let head_seq = reader.log().head_seq();
        let (mut op, mut next) = (Op::default(), Op::default());
        let mut more = reader.next(&mut op)?;
        let is_new = !more || op.epoch() > self.settled;
        let mut scan = Scan { cut: None, head_seq, is_new, pairs: Vec::new() };
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
    pub(super) fn depends_on_media(&self, op: &Op) -> Result<bool> {
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
        // What cannot be read counts: an inode that was acknowledged would be gone without a word.
        if self.bad_slots.contains(&add.ino) {
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
        // A recovery that was cut short may have condemned it: that it was there is as certain as it was then.
        let mut reader = match Reader::even_condemned(self.core, self.owner(add.ino)) {
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
                        && !self.other_half_counts(&p.partner, &heads)
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

    /// Whether the other half, which nobody read, was surely durable once: its log was cleaned past it, or its directory
    /// was removed and its slot taken by another inode. (After a power loss another inode there is an older
    /// one: no slot is taken before all that named it is settled.) Or whether it may stand where nothing can be read.
    fn other_half_counts(&self, partner: &Partner, heads: &HashMap<u32, u32>) -> bool {
        match self.headers.get(partner.ino as usize).copied().flatten() {
            Some(h) if h.generation != partner.generation => !self.power_loss,
            Some(_) => heads.get(&partner.ino).is_none_or(|head| (head.wrapping_sub(partner.seq) as i32) > 0),
            None => self.bad_slots.contains(&partner.ino),
        }
    }

    /// Replays all directories up to their cuts, but for those that would say what they said before.
    fn replay_directories(&self, scans: &HashMap<u32, Scan>, slots: u32, all: &mut Replayed) -> Result<()> {
        let exchanges = exchanges(scans);
        let others: HashSet<u64> = exchanges.symmetric_difference(&all.exchanges).copied().collect();
        let cut_of = |ino: u32| scans.get(&ino).and_then(|scan| scan.cut);
        let is_as_it_was = |ino: u32| {
            let mut pairs = scans.get(&ino).into_iter().flat_map(|scan| &scan.pairs);
            all.dirs.contains_key(&ino)
                && all.cuts.get(&ino).copied() == cut_of(ino)
                && !pairs.any(|pair| others.contains(&pair.partner.transaction))
        };
        let parts = parallel(self.core, slots, |range, out: &mut Replayed| {
            for ino in range.filter(|&ino| self.is_dir(ino) && !is_as_it_was(ino)) {
                let mut said = Said::default();
                match self.replay_directory(ino, cut_of(ino), &exchanges, &mut said) {
                    Ok(dir) => _ = out.dirs.insert(ino, Arc::new(dir)),
                    Err(e) => _ = out.broken.insert(ino, e),
                }
                if !said.is_empty() {
                    out.said.insert(ino, said);
                }
                out.cuts.extend(cut_of(ino).map(|cut| (ino, cut)));
            }
            Ok(())
        })?;
        for part in parts {
            for ino in part.dirs.keys().chain(part.broken.keys()) {
                all.dirs.remove(ino);
                all.said.remove(ino);
            }
            all.dirs.extend(part.dirs);
            all.said.extend(part.said);
            all.cuts.extend(part.cuts);
            all.broken.extend(part.broken);
        }
        all.exchanges = exchanges;
        Ok(())
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
            // Whose number another inode has since says nothing of that one.
            let lives = |inode: (u32, u64)| {
                let header = self.headers.get(inode.0 as usize).copied().flatten();
                header.is_some_and(|header| header.generation == inode.1)
            };
            let stamp = |said: &mut Said, inode: (u32, u64), time| {
                if lives(inode) {
                    said.stamps.push((inode.0, time));
                }
            };
            for record in op.records().filter(|r| r.kind == Type::Add) {
                let replaced = body.dir()?.by_cookie(get32(record.bytes, field::add::REPLACES));
                if let Some(old) = replaced {
                    let inode = (old.entry.ino.0, old.entry.generation);
                    if !is_exchange(&op, &record, exchanges) {
                        said.removed.push((inode, removal));
                    }
                    stamp(said, inode, get64(record.bytes, field::add::MTIME));
                }
            }
            self.asks(&op, None, &mut said.asked);
            inode::apply(self.core, &owner, &mut body, &mut atime, &op, None)?;
            for record in op.records() {
                let added = |b: &[u8]| (get32(b, field::add::INO), get64(b, field::add::GENERATION));
                if record.withdrawn {
                    keep(self.core, record.addr);
                    // It cannot come back, so that nobody asks for what it named.
                    let inode = added(record.bytes);
                    said.removed.push((inode, Removal { settled: true, in_doubt: false, ..removal }));
                }
                match record.kind {
                    Type::Add if record.bytes[field::add::FLAGS] & field::add::CREATE == 0 => {
                        stamp(said, added(record.bytes), get64(record.bytes, field::add::MTIME));
                    }
                    Type::Remove | Type::RemoveMoved => {
                        let gone = (
                            get32(record.bytes, field::remove::INO),
                            get64(record.bytes, field::remove::GENERATION),
                        );
                        stamp(said, gone, get64(record.bytes, field::remove::MTIME));
                        if record.kind == Type::Remove {
                            said.removed.push((gone, removal));
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
        let removals = replayed.removed().filter(|(_, removal)| removal.in_doubt);
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
        // Nobody reaches one that was removed since, and where its removal counts it may be the last that had the entry.
        let left = |(ino, generation): (u32, u64)| {
            replayed.dirs.get(&ino).is_some_and(|dir| dir.generation == generation)
        };
        let removals = replayed.removed().filter(|(_, removal)| removal.in_doubt);
        let removed: HashSet<u32> =
            removals.map(|(inode, _)| *inode).filter(|inode| left(*inode)).map(|(ino, _)| ino).collect();
        let asked = |ino: &u32| reached.contains_key(ino) || removed.contains(ino);
        let mut tree = None;
        let mut cuts = Vec::new();
        for (&ino, scan) in scans.iter().filter(|(ino, _)| asked(ino)) {
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
            if cut {
                repairs.seals.push((dir.owner(), body.log.clone()));
            }
        }
        // All that are in a directory have been counted.
        for (&ino, dir) in dirs.iter().filter(|(ino, _)| reached.contains_key(ino)) {
            let links = table.entry(ino).links();
            table.line(ino).show(&dir.body.read(), dir.atime.load(Ordering::Relaxed), links);
            table.fill(dir.clone());
        }
        Ok(())
    }
}

impl Said {
    fn is_empty(&self) -> bool {
        self.stamps.is_empty() && self.removed.is_empty() && self.asked.is_empty()
    }
}

impl Replayed {
    fn removed(&self) -> impl Iterator<Item = &((u32, u64), Removal)> {
        self.said.values().flat_map(|said| &said.removed)
    }
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
pub(super) fn value_run(b: &[u8]) -> Run {
    let len = get32(b, field::xattr::VALUE_LEN) as usize;
    Run { start: Block(get32(b, field::xattr::BLOCK)), count: len.div_ceil(BLOCK) as u32 }
}

/// Whose entry it is, the partner, and whether an entry leaves for that one's directory. (Where a rename leaves a whiteout, the entry is
/// the whiteout's, and another leaves.)
fn partner_of(record: &log::Record) -> Option<(u32, Partner, bool)> {
    match record.kind {
        Type::RemoveMoved => {
            let partner = Partner::decode(&record.bytes[field::remove::PARTNER..]);
            Some((get32(record.bytes, field::remove::INO), partner, true))
        }
        Type::Add => {
            let add = AddRecord::decode(record.bytes)?;
            add.partner.map(|partner| (add.ino, partner, add.sends()))
        }
        _ => None,
    }
}

/// Transactions whose two halves both bring an entry that the other's directory had.
fn exchanges(scans: &HashMap<u32, Scan>) -> HashSet<u64> {
    let mut added = HashSet::new();
    let additions = scans.values().flat_map(Scan::counted).filter(|pair| !pair.leaves);
    additions.map(|pair| pair.partner.transaction).filter(|transaction| !added.insert(*transaction)).collect()
}

/// Whether what an addition takes the place of gets another name by the same operation: in one directory one whose
/// records both take a place. (A whiteout takes none: what had its name is called moved.)
fn is_exchange(op: &Op, add: &log::Record, exchanges: &HashSet<u64>) -> bool {
    match AddRecord::decode(add.bytes).and_then(|add| add.partner) {
        Some(partner) => exchanges.contains(&partner.transaction),
        None => {
            let takes_place =
                |r: &log::Record| r.kind == Type::Add && get32(r.bytes, field::add::REPLACES) != 0;
            op.records().filter(takes_place).count() > 1
        }
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
    /// The directory that names each.
    parents: HashMap<u32, u32>,
    /// With their generations.
    removed: HashSet<(u32, u64)>,
    /// By directory and inode, the last record by which the inode came there.
    came: HashMap<(u32, u32), &'a Pair>,
    /// What was asked before, by inode.
    found: HashMap<u32, Way>,
}

/// Where one comes to who goes up from an unreached directory: a directory and the number of a record in it, by which something
/// was moved there.
#[derive(Clone, Copy)]
enum Way {
    /// To one that nobody names. What was moved first of all that is on the way: the one nearest to it.
    Up(Option<(u32, u32)>),
    /// Into a circle: what was moved last in it.
    Round(Option<(u32, u32)>),
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
        let unreached = || replayed.dirs.iter().filter(|(ino, _)| !reached.contains_key(*ino));
        let named = |dir: &Inode| -> Vec<u32> {
            let body = dir.body.read();
            let entries = body.dir().into_iter().flat_map(|index| index.iter());
            let is_there = |e: &Named| {
                let named = replayed.dirs.get(&e.entry.ino.0);
                named.is_some_and(|named| named.generation == e.entry.generation)
            };
            entries.filter(is_there).map(|e| e.entry.ino.0).filter(|ino| !reached.contains_key(ino)).collect()
        };
        let going: HashSet<(u32, u64)> =
            replayed.removed().filter(|(_, removal)| removal.in_doubt).map(|(inode, _)| *inode).collect();
        // Who was out of reach before this failure says nothing: nobody names it, nor was it made or removed just now.
        let mut names: HashMap<u32, Vec<u32>> = unreached().map(|(&ino, dir)| (ino, named(dir))).collect();
        let mut namers: HashMap<u32, u32> = HashMap::new();
        names.values().flatten().for_each(|ino| *namers.entry(*ino).or_default() += 1);
        let mut queue: Vec<u32> = names.keys().filter(|ino| !namers.contains_key(*ino)).copied().collect();
        while let Some(ino) = queue.pop() {
            let is_new = scans.get(&ino).is_none_or(|scan| scan.is_new);
            if is_new || going.contains(&(ino, replayed.dirs[&ino].generation)) {
                continue;
            }
            for named in names.remove(&ino).into_iter().flatten() {
                let left = namers.get_mut(&named).expect("it was counted");
                *left -= 1;
                if *left == 0 {
                    queue.push(named);
                }
            }
        }
        let parents =
            names.into_iter().flat_map(|(ino, names)| names.into_iter().map(move |named| (named, ino)));
        let removed = replayed.removed().map(|(inode, _)| *inode).collect();
        Unreached::of(scans, parents.collect(), removed)
    }

    fn of(
        scans: &'a HashMap<u32, Scan>,
        parents: HashMap<u32, u32>,
        removed: HashSet<(u32, u64)>,
    ) -> Unreached<'a> {
        let mut came = HashMap::new();
        for (&dir, scan) in scans {
            came.extend(scan.counted().filter(|pair| !pair.leaves).map(|pair| ((dir, pair.ino), pair)));
        }
        Unreached { parents, removed, came, found: HashMap::new() }
    }

    fn cause(&mut self, ino: u32, generation: u64) -> Cause {
        if !self.parents.contains_key(&ino) && self.removed.contains(&(ino, generation)) {
            return Cause::Removed;
        }
        match self.way(ino) {
            Way::Up(Some((dir, seq))) | Way::Round(Some((dir, seq))) => Cause::Move(dir, seq),
            Way::Up(None) | Way::Round(None) => Cause::NeverThere,
        }
    }

    /// Where one comes to that goes up from a directory. It is noted for all that are on the way.
    fn way(&mut self, ino: u32) -> Way {
        let (mut links, mut places, mut at) = (Vec::new(), HashMap::new(), ino);
        let mut way = loop {
            if let Some(&way) = self.found.get(&at) {
                break way;
            }
            if let Some(&begin) = places.get(&at) {
                // No tree ever had this: the move that closed the circle came last, so it was not synced.
                let circle: &[(u32, u32)] = &links[begin..];
                let moves = circle.iter().filter_map(|&(ino, dir)| self.moved(ino, dir));
                let last = moves.max_by_key(|(_, pair)| pair.partner.transaction);
                break Way::Round(last.map(|(dir, pair)| (dir, pair.seq)));
            }
            // The highest never came to be.
            let Some(&above) = self.parents.get(&at) else { break Way::Up(None) };
            places.insert(at, links.len());
            links.push((at, above));
            at = above;
        };
        for (ino, dir) in links.into_iter().rev() {
            if let Way::Up(None) = way {
                way = Way::Up(self.moved(ino, dir).map(|(dir, pair)| (dir, pair.seq)));
            }
            self.found.insert(ino, way);
        }
        way
    }

    /// The move, if it was one and is in doubt, by which `ino` came into `dir`.
    fn moved(&self, ino: u32, dir: u32) -> Option<(u32, &'a Pair)> {
        let came = *self.came.get(&(dir, ino))?;
        came.in_doubt.then_some((dir, came))
    }
}

/// Of two numbers of a log's records.
fn earlier(a: u32, b: u32) -> u32 {
    if (a.wrapping_sub(b) as i32) < 0 { a } else { b }
}

/// The latest time of an inode, and the directory that has it.
fn note(stamps: &mut HashMap<u32, (u64, u32)>, ino: u32, stamp: (u64, u32)) {
    let known = stamps.entry(ino).or_insert(stamp);
    *known = stamp.max(*known);
}

#[cold]
fn bad_entry(ino: u32, what: &str) -> Error {
    Error::message(
        libc::EUCLEAN,
        "recover::reach",
        format!("directory {ino} {what}; lode fsck --repair mends it"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(ino: u32, seq: u32, in_doubt: bool) -> Pair {
        let partner = Partner { ino: 1, generation: 1, seq: 0, transaction: seq as u64 };
        Pair { seq, ino, partner, in_doubt, leaves: false }
    }

    fn moved(unreached: &mut Unreached, ino: u32) -> Option<(u32, u32)> {
        match unreached.cause(ino, 1) {
            Cause::Move(dir, seq) => Some((dir, seq)),
            Cause::Removed | Cause::NeverThere => None,
        }
    }

    /// At a size at which it would take minutes to go up to the highest from each, or to look through all that came to a
    /// directory for each.
    #[test]
    fn why_each_of_many_directories_is_not_reached() {
        const DIRS: u32 = 100_000;
        let parents = (3..=DIRS).map(|ino| (ino, ino - 1));
        let circle = [1, 2, 3].map(|n| (DIRS + n, DIRS + n % 3 + 1));
        let parents = parents.chain(circle).chain([(DIRS + 4, DIRS + 2), (DIRS + 5, DIRS + 4)]).collect();
        let mut pairs = HashMap::from([
            (2, vec![came(3, 10, false)]),
            (5000, vec![came(5001, 20, true)]),
            (DIRS + 2, vec![came(DIRS + 1, 31, true), came(DIRS + 4, 40, true)]),
            (DIRS + 3, vec![came(DIRS + 2, 32, true)]),
        ]);
        let many = (0..DIRS).map(|n| came(2 * DIRS + n, n, true));
        pairs.insert(
            1000,
            [came(1001, 1, true)].into_iter().chain(many).chain([came(1001, 77, true)]).collect(),
        );
        let scan = |pairs| Scan { cut: None, head_seq: 0, is_new: false, pairs };
        let scans = pairs.into_iter().map(|(dir, pairs)| (dir, scan(pairs))).collect();
        let removed = HashSet::from([(2, 1), (900, 1)]);
        let mut unreached = Unreached::of(&scans, parents, removed);
        for ino in (2..=DIRS).rev() {
            let wanted = (ino > 1000).then_some((1000, 77));
            assert_eq!(moved(&mut unreached, ino), wanted, "{ino}");
        }
        assert!(matches!(unreached.cause(2, 1), Cause::Removed), "it is empty");
        assert!(matches!(unreached.cause(900, 1), Cause::NeverThere), "another names it");
        assert!(matches!(unreached.cause(2, 2), Cause::NeverThere), "another inode was removed");
        // What was moved last in a circle closed it, whatever was moved to where one comes from.
        for ino in (DIRS + 1..=DIRS + 5).rev() {
            assert_eq!(moved(&mut unreached, ino), Some((DIRS + 3, 32)), "{ino}");
        }
    }
}
