//! What the logs of files say: which of their writes hold, and what is left of those that do not.

use super::repairs::Restored;
use super::*;

/// What a record behind a skipped write may say that it has from it.
#[derive(Clone, Copy)]
struct Claims {
    size: u64,
    mtime: u64,
    /// What holds.
    holds: (u64, u64),
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

impl<M: Media> Recovery<'_, M> {
    pub(super) fn recover_files(
        &self,
        table: &table::Table,
        slots: u32,
        repairs: &mut Repairs,
    ) -> Result<()> {
        let stamps = std::mem::take(&mut repairs.stamps);
        let parts = parallel(self.core, slots, |range, out: &mut Repairs| {
            for ino in range {
                let is_named = table.entry(ino).links() > 0;
                if is_named && self.headers[ino as usize].is_some() && !self.is_dir(ino) {
                    self.recover_file(table, ino, stamps.get(&ino).copied(), out)?;
                } else if self.is_dir(ino)
                    && let (Some(&stamp), Some(dir)) = (stamps.get(&ino), table.entry(ino).node.share())
                    && stamp.0 > dir.body.read().ctime
                {
                    out.stamps.insert(ino, stamp);
                }
            }
            Ok(())
        })?;
        for part in parts {
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
        stamp: Option<(u64, u32)>,
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
            && let Err(e) = redos.apply(self.core, index, &|_| true)
        {
            // It would show what it was before a write that was acknowledged.
            repairs.damaged.push((ino, e));
            return Ok(());
        }
        if let Some(stamp) = stamp.filter(|stamp| stamp.0 > body.ctime) {
            repairs.stamps.insert(ino, stamp);
        }
        let voided = skipped.len() as u32 + cut as u32;
        self.voided.fetch_add(voided, Ordering::Relaxed);
        if !skipped.is_empty() || cut {
            let pages = skipped.into_iter().flatten().collect();
            repairs.restored.push(Restored { owner: self.owner(ino), body, atime, pages, cut });
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
        keep(self.core, completion_addr(lane));
        let done = unpack_completion(lane, word).ok_or_else(|| {
            log::damaged(
                owner,
                "whether its last writes were complete is not known: a completion word is damaged",
            )
        })?;
        Ok(ticket.seq <= done)
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
    pub(super) fn written(
        &self,
        owner: &Owner,
        header: &SlotHeader,
        body: &Body,
        op: &Op,
    ) -> Result<Option<Body>> {
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
}

impl Claims {
    /// Takes from the body what an operation says that it has from the skipped write: who changes other attributes
    /// writes all of them down.
    fn give_up(self, body: &mut Body, op: &Op) {
        for record in op.records().filter(|r| r.kind == Type::Attr) {
            if field::attr::sets_size(record.bytes) {
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
        Type::Attr => field::attr::sets_size(r.bytes),
        kind => kind == Type::Redo,
    })
}
