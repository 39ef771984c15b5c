//! `docs/format.md` draws what `fs/format.rs` fixes. This test renders the tables from the constants and
//! compares; `UPDATE_DOCS=1 cargo test --test format_doc` writes them anew.

use lodestone::fs::format::{self, Type, field};
use lodestone::wsp::image;

/// A field: name, first byte, bytes.
type Field = (&'static str, usize, usize);

fn table(title: &str, fields: &[Field], total: usize) -> String {
    let mut rows = String::new();
    let mut end = 0;
    for &(name, at, bytes) in fields {
        assert!(at >= end, "{title}: {name} overlaps the field before it");
        end = at + bytes;
        let bytes = if bytes == 0 { "rest".into() } else { bytes.to_string() };
        rows += &format!("| {at} | {bytes} | {name} |\n");
    }
    assert!(end <= total, "{title}: longer than {total} bytes");
    format!("<!-- {title} -->\n| byte | bytes | what |\n|---|---|---|\n{rows}<!-- end -->")
}

fn record(title: &'static str, fields: &[Field]) -> String {
    let head = [
        ("CRC-32C of all that follows, seeded with key, inode, generation, incarnation", 0, 4),
        ("sequence number", 4, 4),
        ("epoch", 8, 6),
        ("type; bit 7: counts only with the next record", 14, 1),
        ("lines", 15, 1),
    ];
    let all: Vec<Field> = head.into_iter().chain(fields.iter().copied()).collect();
    table(title, &all, 64 * format::RECORD_LINES_MAX as usize)
}

/// What `docs/format.md` says of the words that say how far copies are done.
fn completions() -> String {
    let (lanes, first) = (format::LANES, format::completion_addr(0).0);
    let bits = format::TICKET_BITS;
    format!(
        "<!-- completion words -->\n- {lanes} lanes, the first word at byte {first} of the pool, {} bytes apart\n\
         - a ticket: the number in {bits} bits, the lane above them\n<!-- end -->",
        format::completion_addr(1).0 - first
    )
}

fn images() -> [String; 2] {
    use image::{record, seal};
    [
        table(
            "wsp record",
            &[
                ("magic \"LodeWspR\"", record::MAGIC, 8),
                ("format version", record::VERSION, 4),
                ("CRC-32C of the line without this", record::CRC, 4),
                ("serial", record::SERIAL, 8),
                ("generation", record::GENERATION, 8),
                ("image, drawn at each cold boot", record::IMAGE, 16),
                ("bytes of memory", record::RAM_BYTES, 8),
                ("state", record::STATE, 4),
                ("zero", record::RESERVED, 4),
            ],
            image::RECORD_BYTES,
        ),
        table(
            "wsp seal",
            &[
                ("magic \"LodeWspS\"", seal::MAGIC, 8),
                ("format version", seal::VERSION, 4),
                ("CRC-32C of the seal without this", seal::CRC, 4),
                ("image: the memory's", seal::IMAGE, 16),
                ("generation", seal::GENERATION, 8),
                ("bytes of the slot", seal::SLOT_BYTES, 8),
                ("bytes of the stream", seal::STREAM_BYTES, 8),
                ("when the guest was stopped: nanoseconds since 1970", seal::SUSPENDED_NS, 8),
                ("CRC-32C of all behind the seal", seal::STREAM_CRC, 4),
                ("bytes of the next", seal::IDENTITY_BYTES, 4),
                (
                    "what the guest ran in, in words (JSON); zeros follow",
                    seal::IDENTITY,
                    image::IDENTITY_BYTES_MAX,
                ),
            ],
            image::SEAL_BYTES,
        ),
    ]
}

fn tables() -> Vec<String> {
    use field::*;
    let [wsp_record, wsp_seal] = images();
    vec![
        wsp_record,
        wsp_seal,
        completions(),
        table(
            "superblock",
            &[
                ("magic \"LODESTNE\"", 0, 8),
                ("format version", 8, 4),
                ("CRC-32C of bytes 16 to the end, seeded with the version", 12, 4),
                ("pool uuid", 16, 16),
                ("secret key", 32, 16),
                ("blocks in the pool", 48, 8),
                ("created", 56, 8),
                ("bytes of a block", 64, 4),
                ("data mode: 0 copy-on-write, 1 in place", 68, 1),
                ("label, closed by a zero", 72, 64),
            ],
            format::SUPER_BYTES,
        ),
        table(
            "state line",
            &[
                ("CRC-32C of all that follows, seeded with the key", 0, 4),
                ("\"STAT\"", 4, 4),
                ("serial: of two valid lines the higher one counts", 8, 8),
                ("mount number", 16, 4),
                ("1: closed cleanly", 20, 4),
                ("last mount that crashed", 24, 4),
                ("head block of the checkpoint", 28, 4),
                ("last settled epoch", 32, 8),
                ("boot of the host", 40, 8),
            ],
            64,
        ),
        table(
            "slot header",
            &[
                ("CRC-32C of bytes 4 to 47, seeded with the key", 0, 4),
                ("mode", 4, 4),
                ("uid", 8, 4),
                ("gid", 12, 4),
                ("generation", 16, 8),
                ("device number", 24, 8),
                ("time of birth", 32, 8),
                ("inode number", 40, 4),
                (
                    "log head: segment address and check bits, or 0; the check bits inverted where the log is damaged",
                    format::LOG_HEAD_OFFSET as usize,
                    8,
                ),
            ],
            64,
        ),
        record("Link", &[("address of the next segment", link::ADDR, 8), ("its lines", link::LINES, 4)]),
        record("Segment", &[("lines", segment::LINES, 4), ("incarnation", segment::INCARNATION, 4)]),
        record("Seal", &[("incarnation from here on", seal::INCARNATION, 4)]),
        record(
            "Attr",
            &[
                ("mode", attr::MODE, 4),
                ("uid", attr::UID, 4),
                ("gid", attr::GID, 4),
                ("flags: 1 pages behind the size go", attr::FLAGS, 4),
                ("size", attr::SIZE, 8),
                ("access time", attr::ATIME, 8),
                ("modification time", attr::MTIME, 8),
                ("change time", attr::CTIME, 8),
            ],
        ),
        record(
            "Write",
            &[
                (
                    "first file byte that the data CRC covers; of an offloaded write its ticket",
                    write::START,
                    8,
                ),
                ("file size after the write", write::SIZE, 8),
                ("modification and change time", write::MTIME, 8),
                ("bytes that the data CRC covers", write::LEN, 4),
                ("CRC-32C of the data", write::CRC, 4),
                (
                    "flags: 1 data durable before, 2 reserved, 4 kept by the cleaner, 8 offloaded",
                    write::FLAGS,
                    2,
                ),
                ("number of extents", write::EXTENTS, 2),
                (
                    "first extent: page, count, block (five more in each further line)",
                    write::FIRST,
                    format::EXTENT,
                ),
            ],
        ),
        record(
            "Hole",
            &[
                ("first page", hole::PAGE, 4),
                ("pages", hole::COUNT, 4),
                ("file size", hole::SIZE, 8),
                ("modification and change time", hole::MTIME, 8),
            ],
        ),
        record(
            "Pages",
            &[
                ("first page", pages::PAGE, 4),
                ("pages", pages::COUNT, 4),
                ("a word for each page: its block, or 0; bit 31: reserved, reads as zeros", pages::WORDS, 0),
            ],
        ),
        record("Bad", &[("first block", bad::BLOCK, 4), ("blocks", bad::COUNT, 4)]),
        record(
            "Redo",
            &[
                ("file offset", redo::OFFSET, 8),
                ("modification and change time", redo::MTIME, 8),
                ("bytes", redo::LEN, 2),
                ("the bytes", redo::DATA, 0),
            ],
        ),
        record(
            "Add",
            &[
                ("generation of the inode", add::GENERATION, 8),
                ("time", add::MTIME, 8),
                ("inode number", add::INO, 4),
                ("cookie of the entry", add::COOKIE, 4),
                ("cookie of the entry of that name that goes, or 0", add::REPLACES, 4),
                ("cookie of the entry that it was in this directory, or 0", add::MOVED, 4),
                ("type, as DT_*", add::KIND, 1),
                ("bytes of the name", add::NAME_LEN, 1),
                ("flags: 1 made for this entry, 2 has a partner, 4 kept by the cleaner", add::FLAGS, 1),
                ("lines that the new inode's log must have", add::LINES, 1),
                ("partner, if any, then the name", add::NAME, 0),
            ],
        ),
        table(
            "partner",
            &[
                ("generation of the other directory", partner::GENERATION, 8),
                ("its inode number", partner::INO, 4),
                ("sequence number from which its half is found", partner::SEQ, 4),
                ("transaction", partner::TRANSACTION, 8),
            ],
            partner::BYTES,
        ),
        record(
            "Remove",
            &[
                ("generation of the inode", remove::GENERATION, 8),
                ("time", remove::MTIME, 8),
                ("inode number", remove::INO, 4),
                ("cookie of the entry", remove::COOKIE, 4),
                ("partner (RemoveMoved alone)", remove::PARTNER, partner::BYTES),
            ],
        ),
        record(
            "Xattr",
            &[
                ("change time", xattr::CTIME, 8),
                ("bytes of the value", xattr::VALUE_LEN, 4),
                ("first block of the value", xattr::BLOCK, 4),
                ("CRC-32C of the value", xattr::CRC, 4),
                ("bytes of the name", xattr::NAME_LEN, 1),
                ("flags: 1 removed, 2 value in blocks, 4 kept by the cleaner", xattr::FLAGS, 1),
                ("name, then the value", xattr::NAME, 0),
            ],
        ),
        record(
            "Symlink",
            &[
                ("bytes of this part", symlink::LEN, 2),
                ("where it stands in the target", symlink::OFFSET, 2),
                ("the part", symlink::TARGET, 0),
            ],
        ),
    ]
}

fn numbers() -> String {
    let types: Vec<String> = (0..=u8::MAX)
        .filter_map(|b| Type::from_byte(b).filter(|t| *t as u8 == b).map(|t| format!("{t:?} {b}")))
        .collect();
    format!(
        "<!-- numbers -->\n\
         - version {}, blocks of {} bytes, lines of 64\n\
         - superblock in block {}, state lines in block {}, inode slots from block {} on ({} blocks at first)\n\
         - slots of {} bytes: a header line and {} log lines\n\
         - log segments of {} bytes while a log is small, then of {}\n\
         - record types: {}\n\
         <!-- end -->",
        format::VERSION,
        format::BLOCK,
        format::SUPER_BLOCK,
        format::STATE_BLOCK,
        format::TABLE_BLOCK,
        format::TABLE_BLOCKS,
        format::SLOT,
        format::SLOT_LINES,
        format::MINI,
        format::BLOCK,
        types.join(", ")
    )
}

#[test]
fn the_format_page_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/format.md");
    let page = std::fs::read_to_string(path).expect("docs/format.md is there");
    let mut rendered = page.clone();
    for block in tables().into_iter().chain([numbers()]) {
        let title = block.lines().next().unwrap();
        let from = page.find(title).unwrap_or_else(|| panic!("docs/format.md has no {title}"));
        let old = &page[from..from + page[from..].find("<!-- end -->").unwrap() + "<!-- end -->".len()];
        rendered = rendered.replacen(old, &block, 1);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &rendered).unwrap();
    } else {
        assert!(rendered == page, "docs/format.md is stale: UPDATE_DOCS=1 cargo test --test format_doc");
    }
}
