//! `docs/format.md` draws what `fs/format.rs` and `wsp/image.rs` fix, `docs/heap-format.md` what `wsp/heap/format.rs` does.
//! These tests render the tables from the constants and compare; `UPDATE_DOCS=1 cargo test --test format_doc` writes them anew.

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
                (
                    "1: closed, and the checkpoint is whole; 2: written through the host's page cache; 4: closed, whether with a checkpoint or not",
                    20,
                    4,
                ),
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
        record(
            "Link",
            &[
                ("address of the next segment", link::ADDR, 8),
                ("its lines", link::LINES, 4),
                ("its incarnation", link::INCARNATION, 4),
            ],
        ),
        record("Segment", &[("lines", segment::LINES, 4), ("incarnation", segment::INCARNATION, 4)]),
        record("Seal", &[("incarnation from here on", seal::INCARNATION, 4)]),
        record(
            "Attr",
            &[
                ("mode", attr::MODE, 4),
                ("uid", attr::UID, 4),
                ("gid", attr::GID, 4),
                ("flags: 1 pages behind the size go, 2 the size is larger than before", attr::FLAGS, 4),
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
                (
                    "cookie of the entry that it was in this directory, or 0; with a partner, of the one that goes there",
                    add::MOVED,
                    4,
                ),
                ("type, as DT_*", add::KIND, 1),
                ("bytes of the name", add::NAME_LEN, 1),
                ("flags: 1 made for this entry, 2 has a partner, 4 kept by the cleaner", add::FLAGS, 1),
                ("lines that the new inode's log must have", add::LINES, 1),
                ("partner, if any, then the name", add::NAME, 0),
            ],
        ),
        list("withdrawn", &[format!("{:08x}", format::WITHDRAWN)]),
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

// ---------------------------------------------------------------------------------------------------
// Persistent heaps

fn list(title: &str, rows: &[String]) -> String {
    let rows: String = rows.iter().map(|row| format!("- {row}\n")).collect();
    format!("<!-- {title} -->\n{rows}<!-- end -->")
}

/// What `docs/heap-format.md` says.
fn heap_blocks() -> Vec<String> {
    use lodestone::wsp::heap::format::{
        self, Chunk, header, kind, record, record_lines_max, record_words, root, state,
    };
    use lodestone::wsp::heap::{FormatOptions, Heap};
    let classes: Vec<String> = format::CLASSES.iter().map(u32::to_string).collect();
    let options = FormatOptions { identity: Some(1), ..FormatOptions::default() };
    let media = lodestone::sim::media::SimMedia::new(vec![0; 4 << 20], lodestone::media::Domain::Memory);
    let usual = Heap::format(media, &options).unwrap().info().shape;
    let bits = |from: u32, count: u32| format!("bits {from} to {}", from + count - 1);
    let (class_at, count_at) = (format::KIND_BITS, format::KIND_BITS + format::CLASS_BITS);
    let place_at = count_at + format::COUNT_BITS;
    vec![
        list(
            "heap numbers",
            &[
                format!("version {}, chunks of {} bytes, lines of 64", format::VERSION, format::CHUNK),
                format!("descriptors of {} bytes, root slots of {}", format::DESCRIPTOR, root::BYTES),
                format!("lanes from byte {} on", format::LANES_AT),
                format!(
                    "a heap of 4 MiB has {} lanes of {} lines and {} roots, if nobody says otherwise; a record has up \
                     to {} lines there, with {} words of entries",
                    usual.lanes,
                    usual.ring_lines,
                    usual.roots,
                    record_lines_max(usual),
                    record_words(record_lines_max(usual))
                ),
                format!("classes: {}", classes.join(", ")),
            ],
        ),
        table(
            "heap header",
            &[
                ("magic \"LODEHEAP\"", header::MAGIC, 8),
                ("format version", header::VERSION, 4),
                ("CRC-32C of bytes 16 to the end, seeded with the version", header::CRC, 4),
                ("uuid", header::UUID, 16),
                ("secret key", header::KEY, 16),
                ("bytes of the heap", header::HEAP_BYTES, 8),
                ("address at which it is mapped always, or 0", header::BASE, 8),
                ("made, in seconds since 1970", header::CREATED, 8),
                ("chunks", header::CHUNKS, 8),
                ("lanes", header::LANES, 2),
                ("lines of each lane's ring", header::RING_LINES, 2),
                ("root slots", header::ROOTS, 4),
                ("label, closed by a zero", header::LABEL, header::LABEL_BYTES),
            ],
            header::BYTES,
        ),
        table(
            "heap state line",
            &[
                ("CRC-32C of all that follows, seeded with the key", state::CRC, 4),
                ("\"STAT\"", state::TAG, 4),
                ("serial", state::SERIAL, 8),
                ("generation: openings so far", state::GENERATION, 8),
                ("settled: records up to this number are not looked at", state::SETTLED, 8),
                ("1: closed", state::CLOSED, 8),
            ],
            64,
        ),
        table(
            "heap record",
            &[
                ("CRC-32C of all that follows", record::CHECK * 8, 4),
                ("lines", record::CHECK * 8 + 4, 2),
                ("number, less the number that was settled when it was written", record::CHECK * 8 + 6, 2),
                ("number", record::NUMBER * 8, 8),
                ("entries", record::WORDS * 8, 0),
            ],
            64,
        ),
        list(
            "heap entries",
            &[
                format!(
                    "first word: kind ({}), class ({}), count of words that follow ({}), address in units of 8 bytes ({})",
                    bits(0, format::KIND_BITS),
                    bits(class_at, format::CLASS_BITS),
                    bits(count_at, format::COUNT_BITS),
                    bits(place_at, format::PLACE_BITS)
                ),
                format!("{}: the words that follow are stored from the address on", kind::WORDS),
                format!(
                    "{}: the object of this class at the address is in use; the words that follow are its content",
                    kind::ALLOC
                ),
                format!("{}: the object of this class at the address is free", kind::FREE),
                format!(
                    "{}: an object of so many chunks as the next word says is in use",
                    kind::ALLOC_CHUNKS
                ),
                format!("{}: such an object is free", kind::FREE_CHUNKS),
                format!(
                    "{}: the entries are at the address, so many words as the next word says; the word behind that is \
                     their CRC-32C, seeded with the key",
                    kind::ELSEWHERE
                ),
            ],
        ),
        list(
            "heap descriptor",
            &[
                format!("free: {}", Chunk::Free.encode()),
                format!("a run of objects of class n: {} + 16 n", Chunk::Run { class: 0 }.encode()),
                format!("an object of n chunks begins: {} + 16 n", Chunk::Large { chunks: 1 }.encode() - 16),
                format!("{} words of bits", format::MAP_WORDS),
            ],
        ),
        table(
            "heap root",
            &[
                ("value, a sealed word", root::VALUE, 8),
                ("type", root::TYPE, 8),
                (
                    "CRC-32C of the slot's number, the type and all that follows, seeded with the key",
                    root::CRC,
                    4,
                ),
                ("bytes of the name", root::NAME_LEN, 2),
                ("name", root::NAME, lodestone::limits::NAME_BYTES_MAX),
            ],
            root::BYTES,
        ),
    ]
}

// ---------------------------------------------------------------------------------------------------

/// Compares the drawings of a page, or draws them anew.
fn check(page: &str, blocks: impl IntoIterator<Item = String>) {
    let path = format!("{}/docs/{page}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut rendered = text.clone();
    for block in blocks {
        let title = block.lines().next().unwrap();
        let from = text.find(title).unwrap_or_else(|| panic!("docs/{page} has no {title}"));
        let old = &text[from..from + text[from..].find("<!-- end -->").unwrap() + "<!-- end -->".len()];
        rendered = rendered.replacen(old, &block, 1);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &rendered).unwrap();
    } else {
        assert!(rendered == text, "docs/{page} is stale: UPDATE_DOCS=1 cargo test --test format_doc");
    }
}

#[test]
fn the_format_page_is_what_the_code_says() {
    check("format.md", tables().into_iter().chain([numbers()]));
}

#[test]
fn the_page_of_heaps_is_what_the_code_says() {
    check("heap-format.md", heap_blocks());
}
