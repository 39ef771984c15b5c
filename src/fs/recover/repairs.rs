//! What recovery changes on media, and what it leaves alone for the one that follows if it is cut short.

use super::directories::value_run;
use super::*;

/// Work on a log that waits until free space is known.
#[derive(Default)]
pub(super) struct Repairs {
    pub(super) seals: Vec<(Owner, Log)>,
    /// Change times that only directories know, and which directory it is.
    pub(super) stamps: HashMap<u32, (u64, u32)>,
    /// Files that are less than their logs say.
    pub(super) restored: Vec<Restored>,
    /// Files.
    pub(super) damaged: Damaged,
    /// Inodes without a name, and blocks, that a recovery would ask for which follows this one if it is cut short.
    pub(super) asked_inodes: Vec<u32>,
    pub(super) asked: Vec<Run>,
}

/// A file as it is without what its log says and does not hold.
pub(super) struct Restored {
    pub(super) owner: Owner,
    pub(super) body: Body,
    pub(super) atime: u64,
    /// Of the writes that were skipped.
    pub(super) pages: Vec<Pages>,
    /// Its log was cut.
    pub(super) cut: bool,
}

/// Space that an inode has.
pub(super) enum Owned {
    Blocks(Run),
    Mini(Mini),
}

impl<M: Media> Recovery<'_, M> {
    /// Marks what a recovery that follows this one would ask for, if this one is cut short, and nobody has any more: so repairs
    /// take none of it, and it decides again as this one did. Of inodes that nobody names all is held, of others the blocks
    /// of operations that are not settled.
    pub(super) fn hold(&self, table: &table::Table, repairs: &Repairs) -> Vec<Owned> {
        let mut held = Vec::new();
        if self.core.media.omits("what the next recovery would ask for stays until this one is through") {
            return held;
        }
        for &ino in &repairs.asked_inodes {
            let header = self.headers.get(ino as usize).copied().flatten();
            if header.is_some() && table.entry(ino).links() == 0 {
                self.salvage(ino, &mut held, None);
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
    pub(super) fn asks(&self, op: &Op, file: Option<(&Owner, &SlotHeader, &Body)>, asked: &mut Vec<Run>) {
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

    /// Marks what a log still names, unless others have it, and adds it to `held`; of a file also gathers what its redo records
    /// have. Whether the log could be followed to its end.
    fn salvage(&self, ino: u32, held: &mut Vec<Owned>, mut redos: Option<&mut Redos>) -> (bool, Body) {
        let owner = self.owner(ino);
        let header = self.headers[ino as usize].expect("a directory names it");
        let mut body = Body::new(&header, Log::new(self.core.key_crc, &owner));
        let Ok(mut reader) = Reader::salvage(self.core, owner) else { return (false, body) };
        let (mut op, mut atime, mut asked) = (Op::default(), 0, Vec::new());
        let followed = loop {
            match reader.next(&mut op) {
                // A record that says nonsense is left out, too.
                Ok(true) => {
                    self.asks(&op, Some((&owner, &header, &body)), &mut asked);
                    drop(inode::apply(self.core, &owner, &mut body, &mut atime, &op, redos.as_deref_mut()));
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
        (followed, body)
    }

    /// The same of a file that is damaged, and what its redo records have is stored again, where a power loss may have taken it: a
    /// repair keeps what is in place. On persistent memory nothing tells whether there was one. (Otherwise it is there, or
    /// what a record had that is lost and came later.)
    fn salvage_file(&self, ino: u32) -> bool {
        let (mut held, mut redos) = (Vec::new(), Redos::default());
        let (followed, body) = self.salvage(ino, &mut held, Some(&mut redos));
        let own: HashSet<u32> = held
            .iter()
            .filter_map(|owned| match owned {
                Owned::Blocks(run) => Some(run.start.0),
                Owned::Mini(_) => None,
            })
            .collect();
        if (self.power_loss || !self.deferred)
            && let Data::File(index) = &body.data
            && let Err(e) = redos.apply(self.core, index, &|block| own.contains(&block.0))
        {
            tracing::error!("inode {ino}: of its last writes not all bytes could be stored again: {e}");
        }
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

    /// Names what is damaged and keeps from others what damaged files have, as far as their logs say. Whether
    /// that is too little for anything to be changed.
    pub(super) fn report_damage(&self, lost: &Damaged, files: &Damaged) -> bool {
        let mut read_only = false;
        for (ino, e) in lost {
            read_only = true;
            tracing::error!("inode {ino}, and what is below it, cannot be used: {e}");
        }
        for (ino, e) in files {
            tracing::error!("inode {ino} cannot be used: {e}");
            read_only |= !self.salvage_file(*ino);
        }
        if read_only {
            tracing::error!(
                "which blocks belong to what is damaged cannot be known: so that nothing of it is overwritten \
                 the pool is open for reading only; lode fsck --repair keeps what validates"
            );
        }
        read_only
    }

    /// Where nothing can be written down: files of which not all holds that their logs say are shown as they were found to be.
    pub(super) fn show(&self, table: &table::Table, repairs: Repairs) {
        for Restored { owner, body, atime, .. } in repairs.restored {
            let header = self.headers[owner.ino as usize].expect("its log was replayed");
            let links = table.entry(owner.ino).links();
            table.fill(table.share(inode::assemble(&header, &owner, body, atime), links));
        }
    }

    /// Condemns what is damaged, seals what was cut, and writes down times that only directories knew; those that found no
    /// room, by directory.
    pub(super) fn repair(&self, table: &table::Table, repairs: Repairs) -> Result<LeftTimes> {
        for (ino, _) in repairs.damaged {
            self.condemn(ino)?;
        }
        let epoch = self.core.epochs.current();
        let mut pending = Flushed::issued();
        for Restored { owner, mut body, atime, pages, cut } in repairs.restored {
            let skipped = !pages.is_empty();
            if skipped && self.core.media.omits("what the pages of a skipped write are is written down") {
                continue;
            }
            if cut && !self.core.media.omits("a log that was cut is sealed") {
                pending = pending.and(body.log.seal_void(self.core, &owner, epoch)?);
            }
            if !skipped {
                table.log_end(owner.ino).store(body.log.seq(), Ordering::Relaxed);
                continue;
            }
            let mut batch = Batch::new();
            offload::restoring_records(&body, pages.into_iter(), &mut batch);
            body.attr_record(atime, 0, &mut batch);
            let mut append = || body.log.append(self.core, &owner, &mut batch, epoch, Class::Last);
            let appended = match append() {
                // Rather than not to open: what is held in case that this recovery is cut short.
                Err(e) if e.errno() == libc::ENOSPC && self.core.alloc.release(epoch) => append(),
                appended => appended,
            };
            pending = pending.and(appended?);
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
        let mut left = LeftTimes::new();
        for (ino, (time, dir)) in repairs.stamps {
            if self.core.media.omits("change times that only directories know are written down") {
                continue;
            }
            let links = table.entry(ino).links();
            if links == 0 {
                continue;
            }
            let loaded = table.entry(ino).node.share();
            let is_loaded = loaded.is_some();
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
                Err(e) if e.errno() == libc::ENOSPC => {
                    // It stays in memory, and where it stands.
                    node.set_ctime_ahead();
                    left.entry(dir).or_default().push((ino, node.generation));
                    if !is_loaded {
                        table.line(ino).show(&body, node.atime.load(Ordering::Relaxed), links);
                        drop(body);
                        table.fill(node.clone());
                    }
                }
                Err(e) => return Err(e),
            }
        }
        self.core.fence(pending);
        Ok(left)
    }
}

/// Marks all that an inode has as used.
pub(super) fn mark<M: Media>(core: &Core<M>, ino: u32, body: &Body) -> Result<()> {
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

pub(super) fn conflict(ino: u32) -> impl Fn(Conflict) -> Error {
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
