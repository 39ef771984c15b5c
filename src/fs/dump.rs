//! What stands on media, in words: for `lode dump`.

use std::fmt::Write;

use super::format::*;
use super::inode::{AddRecord, Partner, extents, read_header};
use super::log::{Op, Owner, Reader, Record};
use super::*;

impl<M: Media> Fs<M> {
    /// The superblock, the state line and the inode table.
    pub fn dump_super(&self) -> String {
        let info = self.info();
        let sb = &self.core.sb;
        let state = *self.state.lock();
        let mut s = String::new();
        let uuid: String = info.uuid.iter().map(|b| format!("{b:02x}")).collect();
        let _ = writeln!(s, "format {}  uuid {uuid}  label {:?}", info.format_version, info.label);
        let _ = writeln!(s, "blocks {} of {BLOCK} bytes  data {:?}  created {}", sb.blocks, info.data, time(sb.created));
        let _ = writeln!(
            s,
            "mount {}  last crashed mount {}  settled epoch {}  current epoch {}",
            state.mount,
            state.crashed,
            state.settled,
            self.core.epochs.current()
        );
        let slots = self.slot_count.load(Ordering::Acquire);
        let _ = writeln!(s, "inode slots {slots}, free {}", self.slots.count());
        s
    }

    /// An inode's slot and the records of its log. ENOENT where the slot holds none.
    pub fn dump_inode(&self, ino: Ino) -> Result<String> {
        if ino.0 >= self.slot_count.load(Ordering::Acquire) {
            return Err(Error::new(libc::ENOENT, "dump::inode"));
        }
        let slot = self.slot(ino.0)?;
        let header = read_header(&self.core, ino.0, slot)?;
        let header = header.ok_or_else(|| Error::new(libc::ENOENT, "dump::inode"))?;
        let mut s = String::new();
        let _ = writeln!(
            s,
            "inode {} at {:#x}: mode {:o} uid {} gid {} generation {:#x} born {} links {}",
            ino.0,
            slot.0,
            header.mode,
            header.uid,
            header.gid,
            header.generation,
            time(header.btime),
            self.table.entry(ino.0).links()
        );
        let owner = Owner { ino: ino.0, generation: header.generation, slot };
        let mut reader = Reader::new(&self.core, owner)?;
        let mut op = Op::default();
        while reader.next(&mut op)? {
            for record in op.records() {
                let _ = writeln!(s, "{:>8} @{:#x} epoch {}: {}", record.seq, record.addr.0, record.epoch, describe(&record));
            }
        }
        let log = reader.into_log();
        let _ = writeln!(s, "log: {} lines in {} segments, next record {}", log.lines(), log.segments().len(), log.seq());
        Ok(s)
    }
}

fn time(packed: u64) -> String {
    let t = unpack_time(packed);
    format!("{}.{:09}", t.sec, t.nsec)
}

fn name(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}

fn pair(p: &Partner) -> String {
    format!(" with inode {} record {} (transaction {:#x})", p.ino, p.seq, p.transaction)
}

fn describe(r: &Record) -> String {
    let b = r.bytes;
    match r.kind {
        Type::Attr => format!(
            "attributes mode {:o} uid {} gid {} size {}{} atime {} mtime {} ctime {}",
            get32(b, attr::MODE),
            get32(b, attr::UID),
            get32(b, attr::GID),
            get64(b, attr::SIZE),
            if get32(b, attr::FLAGS) & attr::TRUNCATE != 0 { " (truncates)" } else { "" },
            time(get64(b, attr::ATIME)),
            time(get64(b, attr::MTIME)),
            time(get64(b, attr::CTIME))
        ),
        Type::Write => {
            let flags = get16(b, write::FLAGS);
            let mut s = String::from("write");
            for e in extents(b).flatten() {
                let _ = write!(s, " pages {}+{} -> blocks {}+{}", e.page, e.count, e.block.0, e.count);
            }
            if flags & write::UNWRITTEN != 0 {
                s.push_str(" reserved");
            }
            if flags & write::MOVED != 0 {
                s.push_str(" (kept by the cleaner)");
            } else {
                let _ = write!(s, " size {}", get64(b, write::SIZE));
            }
            if flags & (write::SETTLED | write::MOVED | write::UNWRITTEN) == 0 {
                let (start, len) = (get64(b, write::START), get32(b, write::LEN));
                let _ = write!(s, " bytes {start}+{len} crc {:08x}", get32(b, write::CRC));
            }
            s
        }
        Type::Hole => format!("hole pages {}+{}", get32(b, hole::PAGE), get32(b, hole::COUNT)),
        Type::Redo => format!("redo bytes {}+{}", get64(b, redo::OFFSET), get16(b, redo::LEN)),
        Type::Add => match AddRecord::decode(b) {
            Some(a) => format!(
                "add {} inode {} cookie {}{}{}{}",
                name(a.name),
                a.ino,
                a.cookie,
                if a.replaces != 0 { format!(" replaces {}", a.replaces) } else { String::new() },
                if a.moved != 0 { format!(" moved from {}", a.moved) } else { String::new() },
                a.partner.as_ref().map(pair).unwrap_or_default()
            ),
            None => "add (malformed)".into(),
        },
        Type::Remove => format!("remove cookie {} inode {}", get32(b, remove::COOKIE), get32(b, remove::INO)),
        Type::RemoveMoved => format!(
            "remove cookie {} inode {}{}",
            get32(b, remove::COOKIE),
            get32(b, remove::INO),
            pair(&Partner::decode(&b[remove::PARTNER..]))
        ),
        Type::Xattr => {
            let n = name(&b[xattr::NAME..][..b[xattr::NAME_LEN] as usize]);
            if b[xattr::FLAGS] & xattr::REMOVE != 0 {
                format!("attribute {n} removed")
            } else {
                format!("attribute {n} of {} bytes", get32(b, xattr::VALUE_LEN))
            }
        }
        Type::Symlink => format!("target, {} bytes at {}", get16(b, symlink::LEN), get16(b, symlink::OFFSET)),
        Type::Link | Type::Segment | Type::Seal => format!("{:?}", r.kind),
    }
}
