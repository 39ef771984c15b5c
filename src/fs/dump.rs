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
        let _ = writeln!(
            s,
            "blocks {} of {BLOCK} bytes  data {:?}  created {}",
            sb.blocks,
            info.data,
            time(sb.created)
        );
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
                let _ = writeln!(
                    s,
                    "{:>8} @{:#x} epoch {}: {}",
                    record.seq,
                    record.addr.0,
                    record.epoch,
                    describe(&record)
                );
            }
        }
        let log = reader.into_log();
        let _ = writeln!(
            s,
            "log: {} lines in {} segments, next record {}",
            log.lines(),
            log.segments().len(),
            log.seq()
        );
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
            get32(b, field::attr::MODE),
            get32(b, field::attr::UID),
            get32(b, field::attr::GID),
            get64(b, field::attr::SIZE),
            match get32(b, field::attr::FLAGS) {
                f if f & field::attr::TRUNCATE != 0 => " (truncates)",
                f if f & field::attr::GROW != 0 => " (grows)",
                _ => "",
            },
            time(get64(b, field::attr::ATIME)),
            time(get64(b, field::attr::MTIME)),
            time(get64(b, field::attr::CTIME))
        ),
        Type::Write => {
            let flags = get16(b, field::write::FLAGS);
            let mut s = String::from("write");
            for e in extents(b).flatten() {
                let _ = write!(s, " pages {}+{} -> blocks {}+{}", e.page, e.count, e.block.0, e.count);
            }
            if flags & field::write::OFFLOADED != 0 {
                match Ticket::unpack(get64(b, field::write::START)) {
                    Some(ticket) => drop(write!(s, " offloaded lane {} number {}", ticket.lane, ticket.seq)),
                    None => s.push_str(" offloaded, by a ticket that makes no sense"),
                }
            }
            if flags & field::write::UNWRITTEN != 0 {
                s.push_str(" reserved");
            }
            if flags & field::write::MOVED != 0 {
                s.push_str(" (kept by the cleaner)");
            } else {
                let _ = write!(s, " size {}", get64(b, field::write::SIZE));
            }
            if flags & (field::write::SETTLED | field::write::MOVED | field::write::UNWRITTEN) == 0 {
                let (start, len) = (get64(b, field::write::START), get32(b, field::write::LEN));
                let _ = write!(s, " bytes {start}+{len} crc {:08x}", get32(b, field::write::CRC));
            }
            s
        }
        Type::Hole => format!("hole pages {}+{}", get32(b, field::hole::PAGE), get32(b, field::hole::COUNT)),
        Type::Pages => {
            let (page, count) = (get32(b, field::pages::PAGE), get32(b, field::pages::COUNT));
            let mut s = format!("pages {page}+{count} ->");
            for word in b[field::pages::WORDS..].chunks_exact(4).take(count as usize).map(|w| get32(w, 0)) {
                let reserved = if word & field::pages::UNWRITTEN != 0 { "r" } else { "" };
                let _ = write!(s, " {}{reserved}", word & !field::pages::UNWRITTEN);
            }
            s
        }
        Type::Redo => format!("redo bytes {}+{}", get64(b, field::redo::OFFSET), get16(b, field::redo::LEN)),
        Type::Add => match AddRecord::decode(b) {
            Some(a) => format!(
                "add {} inode {} cookie {}{}{}{}{}",
                name(a.name),
                a.ino,
                a.cookie,
                if a.replaces != 0 { format!(" replaces {}", a.replaces) } else { String::new() },
                if a.moved != 0 { format!(" moved from {}", a.moved) } else { String::new() },
                a.partner.as_ref().map(pair).unwrap_or_default(),
                if r.withdrawn { ", withdrawn" } else { "" }
            ),
            None => "add (malformed)".into(),
        },
        Type::Remove => format!(
            "remove cookie {} inode {}",
            get32(b, field::remove::COOKIE),
            get32(b, field::remove::INO)
        ),
        Type::RemoveMoved => format!(
            "remove cookie {} inode {}{}",
            get32(b, field::remove::COOKIE),
            get32(b, field::remove::INO),
            pair(&Partner::decode(&b[field::remove::PARTNER..]))
        ),
        Type::Xattr => {
            let end = field::xattr::NAME + b[field::xattr::NAME_LEN] as usize;
            let Some(n) = b.get(field::xattr::NAME..end).map(name) else {
                return "attribute (malformed)".into();
            };
            if b[field::xattr::FLAGS] & field::xattr::REMOVE != 0 {
                format!("attribute {n} removed")
            } else {
                format!("attribute {n} of {} bytes", get32(b, field::xattr::VALUE_LEN))
            }
        }
        Type::Symlink => {
            format!("target, {} bytes at {}", get16(b, field::symlink::LEN), get16(b, field::symlink::OFFSET))
        }
        Type::Bad => format!("bad blocks {}+{}", get32(b, field::bad::BLOCK), get32(b, field::bad::COUNT)),
        Type::Link | Type::Segment | Type::Seal => format!("{:?}", r.kind),
    }
}
