//! `docs/heap-format.md` draws what `wsp/heap/format.rs` fixes. This test renders the tables from the constants and
//! compares; `UPDATE_DOCS=1 cargo test --test heap_format_doc` writes them anew.

use lodestone::wsp::heap::format::{
    self, Chunk, header, kind, record, record_lines_max, record_words, root, state,
};
use lodestone::wsp::heap::{FormatOptions, Heap};

/// A field: name, first byte, bytes.
type Field = (&'static str, usize, usize);

fn table(title: &str, fields: &[Field], total: usize) -> String {
    let mut rows = String::new();
    let mut end = 0;
    for &(name, at, bytes) in fields {
        assert!(at >= end, "{title}: {name} overlaps the field before it");
        end = at + bytes;
        rows += &format!("| {at} | {bytes} | {name} |\n");
    }
    assert!(end <= total, "{title}: longer than {total} bytes");
    format!("<!-- {title} -->\n| byte | bytes | what |\n|---|---|---|\n{rows}<!-- end -->")
}

fn list(title: &str, rows: &[String]) -> String {
    let rows: String = rows.iter().map(|row| format!("- {row}\n")).collect();
    format!("<!-- {title} -->\n{rows}<!-- end -->")
}

fn blocks() -> Vec<String> {
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
                ("entries begin", record::WORDS * 8, 0),
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

#[test]
fn the_format_page_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/heap-format.md");
    let page = std::fs::read_to_string(path).expect("docs/heap-format.md is there");
    let mut rendered = page.clone();
    for block in blocks() {
        let title = block.lines().next().unwrap();
        let from = page.find(title).unwrap_or_else(|| panic!("docs/heap-format.md has no {title}"));
        let old = &page[from..from + page[from..].find("<!-- end -->").unwrap() + "<!-- end -->".len()];
        rendered = rendered.replacen(old, &block, 1);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &rendered).unwrap();
    } else {
        assert!(
            rendered == page,
            "docs/heap-format.md is stale: UPDATE_DOCS=1 cargo test --test heap_format_doc"
        );
    }
}
