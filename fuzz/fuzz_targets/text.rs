//! What people write, and what a program is told: profiles, workloads, the words of classes, engines, domains and floors, values
//! of access control lists; and the lines that guard a guest's image. No input panics a reader, and what one has accepted
//! means the same when it is written and read again. The first byte of an input chooses the reader.
#![no_main]

use std::fmt::{Debug, Display};

use libfuzzer_sys::fuzz_target;
use lodestone::fs::acl::Acl;
use lodestone::media::Domain;
use lodestone::mover::EngineKind;
use lodestone::mover::class::Class;
use lodestone::mover::manager::Qos;
use lodestone::mover::profile_text;
use lodestone::sim;
use lodestone::wsp::image::{RECORD_BYTES, Record, SEAL_BYTES, Seal};

fuzz_target!(|data: &[u8]| {
    let Some((&reader, bytes)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match reader {
        b'p' => profile(bytes),
        b'w' => again("", &text, sim::workload::parse),
        b'h' => again(sim::heap::workload::HEADING, &text, sim::heap::workload::parse),
        b'a' => acl(bytes),
        b'r' => record(&cut(bytes)),
        b's' => seal(&cut(bytes)),
        _ => {
            drop(text.parse::<Class>());
            let mut qos = Qos::default();
            let _ = (qos.set_floor(&text), qos.set_starve(&text));
            word::<EngineKind>(&text);
            word::<Domain>(&text);
        }
    }
});

fn profile(bytes: &[u8]) {
    let Ok(document) = profile_text::decode(bytes) else { return };
    let text = profile_text::render(&document);
    assert_eq!(profile_text::parse(&text).as_ref(), Ok(&document), "{text}");
}

/// Sequences, as they are and as they print themselves below a heading.
fn again<T: Display + Debug + PartialEq>(
    heading: &str,
    text: &str,
    parse: fn(&str) -> Result<Vec<T>, String>,
) {
    let Ok(sequences) = parse(text) else { return };
    for sequence in sequences {
        let text = format!("{heading}\n{sequence}");
        assert_eq!(parse(&text), Ok(vec![sequence]), "{text}");
    }
}

fn acl(value: &[u8]) {
    let Ok(Some(acl)) = Acl::parse(value) else { return };
    let _ = (acl.check(), acl.mode(), acl.is_minimal());
    assert_eq!(Acl::parse(&acl.encode()).ok(), Some(Some(acl)));
}

fn word<T: std::str::FromStr + Display>(text: &str) {
    if let Ok(word) = text.parse::<T>() {
        assert_eq!(word.to_string(), text);
    }
}

fn record(line: &[u8; RECORD_BYTES]) {
    let _ = (Record::recognise(line), Record::verifies(line));
    if let Ok(record) = Record::decode(line) {
        let written = record.encode();
        assert!(Record::verifies(&written) && Record::recognise(&written).is_ok());
        assert_eq!(Record::decode(&written).as_ref().ok(), Some(&record));
    }
}

fn seal(page: &[u8; SEAL_BYTES]) {
    let _ = (Seal::recognise(page), Seal::verifies(page));
    if let Ok(seal) = Seal::decode(page) {
        let written = seal.encode();
        assert!(Seal::verifies(&written) && Seal::recognise(&written).is_ok());
        assert_eq!(Seal::decode(&written).as_ref().ok(), Some(&seal));
    }
}

/// As many bytes as are wanted, zeros behind what there is.
fn cut<const N: usize>(bytes: &[u8]) -> Box<[u8; N]> {
    let mut all: Box<[u8; N]> = vec![0; N].try_into().expect("as long as it was made");
    let len = bytes.len().min(N);
    all[..len].copy_from_slice(&bytes[..len]);
    all
}
