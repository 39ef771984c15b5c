//! A profile as it stands in a file: TOML, written by `lode tune` and read by every door.
//!
//! What is read is checked key by key, and nothing is guessed: an unknown key or engine, a missing table, a number that
//! nobody can have measured and a later version are errors that name what is wrong. So a file that was cut short or
//! edited wrongly is never half a profile. docs/tune.md lists the keys, which a test holds against this file.
//!
//! No file is touched here: who has one gives its text.

use std::fmt::Write;

use toml::{Table, Value};

use super::EngineKind;
use super::identity::Machine;
use super::profile::{
    BANDWIDTH_BYTES_PER_S_MAX, BANDWIDTH_BYTES_PER_S_MIN, BINS, Bandwidths, Bins, CONCURRENCY_MAX,
    IN_FLIGHT_MAX, Lane, NEVER, Profile, SMALLEST_BYTES, THRESHOLD_BYTES_MAX,
};

/// Version of the format; files of others are refused.
pub const VERSION: i64 = 1;
/// Largest profile, in bytes: it is read whole.
pub const PROFILE_BYTES_MAX: u64 = 64 << 10;
/// What to do about one that is not used.
pub const REMEDY: &str = "run `lode tune` to make a new one, or remove it";

const NONE: &str = "none";
const NEVER_WORD: &str = "never";
const DEFAULT_WORD: &str = "default";

/// All that a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// When, for people.
    pub written: String,
    pub machine: Machine,
    /// What the pool's bytes lay in ([`memory`](super::identity::memory)).
    pub memory: Vec<String>,
    /// The persistence domain that it worked by, for people.
    pub domain: String,
    /// It was memory that was taken for persistent memory.
    pub emulated_memory: bool,
    /// Engines that were measured; of others the profile has the defaults.
    pub engines: Vec<EngineKind>,
    pub profile: Profile,
}

/// Why a file is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is damaged, or another machine's: worth a line to whoever asked for it.
    Refused(String),
    /// It is good, but was measured on other memory than the pool's.
    Elsewhere(String),
}

/// Reads what a file holds, and holds it against the machine `here` and what the pool's bytes lie in, where there is a
/// pool.
pub fn suit(bytes: &[u8], here: &Machine, memory: Option<&[String]>) -> Result<Document, Unfit> {
    let document = decode(bytes).map_err(Unfit::Refused)?;
    if let Some(why) = document.wrong_machine(here) {
        return Err(Unfit::Refused(why));
    }
    match memory.and_then(|memory| document.wrong_memory(memory)) {
        Some(why) => Err(Unfit::Elsewhere(why)),
        None => Ok(document),
    }
}

/// Reads what a file holds, of which no more than [`PROFILE_BYTES_MAX`] and one byte need be given.
pub fn decode(bytes: &[u8]) -> Result<Document, String> {
    if bytes.len() as u64 > PROFILE_BYTES_MAX {
        return Err(format!("it is no profile: it is larger than {PROFILE_BYTES_MAX} bytes"));
    }
    parse(std::str::from_utf8(bytes).map_err(|_| "it is no profile: not UTF-8".to_owned())?)
}

impl Document {
    /// In words, why this machine is not the one.
    pub fn wrong_machine(&self, here: &Machine) -> Option<String> {
        here.differs_from(&self.machine).map(|how| format!("it was made on another machine: {how}"))
    }

    /// In words, why it says nothing about a pool whose bytes lie in `memory`.
    pub fn wrong_memory(&self, memory: &[String]) -> Option<String> {
        let (there, here) = (self.memory.join(" and "), memory.join(" and "));
        (there != here).then(|| format!("it was measured on {there}, and the pool lies in {here}"))
    }
}

pub fn render(document: &Document) -> String {
    let Document { written, machine, memory, domain, emulated_memory, engines, profile } = document;
    let mut out = String::from("# Written by `lode tune`; its documentation explains each key.\n");
    let names: Vec<String> = engines.iter().map(|kind| kind.name().to_owned()).collect();
    let _ = write!(
        out,
        "version = {VERSION}\nwritten = {}\nconcurrency = {}\nengines = {}\n\n\
         [machine]\ncpu = {}\ncpus = {}\nnodes = {}\n\n\
         [media]\nmemory = {}\ndomain = {}\nemulated = {emulated_memory}\n",
        quoted(written),
        profile.concurrency,
        list(&names),
        quoted(&machine.cpu),
        machine.cpus,
        list(&machine.nodes),
        list(memory),
        quoted(domain),
    );
    for &kind in engines {
        let bandwidths = profile.bandwidths(kind).copied().unwrap_or_default();
        if kind.emulated() {
            out.push_str("\n# An emulated device: its figures say nothing about a device's speed.");
        }
        if let Some(limits) = profile.limits(kind) {
            let max = limits.in_flight_max.map_or(quoted(NONE), |max| max.to_string());
            let _ = writeln!(out, "\n[{kind}]\nin_flight_max = {max}");
            for lane in Lane::ALL {
                let bytes = limits.thresholds.of(lane);
                let unmeasured = bandwidths.of(lane).one == [0; BINS];
                let untouched = default_threshold(kind, lane) == Some(bytes);
                let shown = match bytes {
                    _ if unmeasured && untouched => quoted(DEFAULT_WORD),
                    NEVER => quoted(NEVER_WORD),
                    bytes => bytes.to_string(),
                };
                let _ = writeln!(out, "{} = {shown}", lane.name());
            }
        }
        let _ = writeln!(out, "\n[{kind}.bandwidth]");
        for lane in Lane::ALL {
            let peak = bandwidths.of(lane);
            let _ = writeln!(
                out,
                "{0}_one = {1}\n{0}_all = {2}",
                lane.name(),
                rates(&peak.one),
                rates(&peak.all)
            );
        }
    }
    out
}

fn default_threshold(kind: EngineKind, lane: Lane) -> Option<usize> {
    Profile::default().limits(kind).map(|limits| limits.thresholds.of(lane))
}

/// A TOML string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out + "\""
}

fn list(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

/// Nothing where nobody measured.
fn rates(bins: &Bins) -> String {
    match bins {
        [0, 0, 0, 0, 0] => "[]".to_owned(),
        some => format!("{some:?}"),
    }
}

/// Reads a file's text; the message says what is wrong with it, and where.
pub fn parse(text: &str) -> Result<Document, String> {
    let table = text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        let message = e.message().lines().collect::<Vec<_>>().join(", ");
        format!("it is damaged or no profile: line {line}: {message}")
    })?;
    let mut top = Keys { place: String::new(), table };
    // Before all else: whatever is unknown may be known to a later version.
    match top.number("version", 0..=i64::MAX)? {
        VERSION => {}
        newer if newer > VERSION => {
            return Err(format!(
                "its version is {newer}, and this program knows {VERSION} at most: it is newer"
            ));
        }
        older => return Err(format!("its version is {older}, and this program knows only {VERSION}")),
    }
    let written = top.text("written")?;
    let concurrency = top.number("concurrency", 1..=CONCURRENCY_MAX as i64)? as usize;
    let mut profile = Profile { concurrency, ..Profile::default() };
    let mut engines: Vec<EngineKind> = Vec::new();
    for name in top.texts("engines")? {
        let kind = name.parse::<EngineKind>().map_err(|e| format!("`engines`: {e}"))?;
        if engines.contains(&kind) {
            return Err(format!("`engines` names {kind} twice"));
        }
        engines.push(kind);
    }
    let mut keys = top.table("machine")?;
    let machine = Machine {
        cpu: keys.text("cpu")?,
        cpus: keys.number("cpus", 0..=i64::MAX)? as usize,
        nodes: keys.texts("nodes")?,
    };
    keys.end()?;
    let mut keys = top.table("media")?;
    let (memory, domain) = (keys.texts("memory")?, keys.text("domain")?);
    let emulated_memory = keys.truth("emulated")?;
    keys.end()?;
    for &kind in &engines {
        engine(&mut profile, kind, top.table(kind.name())?)?;
    }
    top.end()?;
    Ok(Document { written, machine, memory, domain, emulated_memory, engines, profile })
}

fn engine(profile: &mut Profile, kind: EngineKind, mut keys: Keys) -> Result<(), String> {
    if let Some(limits) = profile.limits_mut(kind) {
        limits.in_flight_max = keys.in_flight_max("in_flight_max")?;
        for lane in Lane::ALL {
            if let Some(bytes) = keys.threshold(lane.name())? {
                limits.thresholds.set(lane, bytes);
            }
        }
    }
    let mut bandwidths = Bandwidths::default();
    let mut rates = keys.table("bandwidth")?;
    for lane in Lane::ALL {
        let peak = bandwidths.of_mut(lane);
        peak.one = rates.rates(&format!("{}_one", lane.name()))?;
        peak.all = rates.rates(&format!("{}_all", lane.name()))?;
    }
    rates.end()?;
    keys.end()?;
    profile.set_bandwidths(kind, bandwidths);
    Ok(())
}

/// A table whose keys are taken out one by one: what is left is unknown.
struct Keys {
    /// As ` in [machine]`, for messages.
    place: String,
    table: Table,
}

impl Keys {
    fn take(&mut self, key: &str) -> Result<Value, String> {
        self.table.remove(key).ok_or_else(|| format!("`{key}`{} is missing: it is cut short", self.place))
    }

    fn wrong(&self, key: &str, wanted: &str) -> String {
        format!("`{key}`{}: {wanted} is wanted", self.place)
    }

    fn text(&mut self, key: &str) -> Result<String, String> {
        match self.take(key)? {
            Value::String(text) => Ok(text),
            _ => Err(self.wrong(key, "a text")),
        }
    }

    fn texts(&mut self, key: &str) -> Result<Vec<String>, String> {
        let text = |value: Value| value.as_str().map(str::to_owned);
        let texts: Option<Vec<String>> = match self.take(key)? {
            Value::Array(values) => values.into_iter().map(text).collect(),
            _ => None,
        };
        texts.ok_or_else(|| self.wrong(key, "a list of texts"))
    }

    fn truth(&mut self, key: &str) -> Result<bool, String> {
        self.take(key)?.as_bool().ok_or_else(|| self.wrong(key, "true or false"))
    }

    fn number(&mut self, key: &str, range: std::ops::RangeInclusive<i64>) -> Result<i64, String> {
        let number = self.take(key)?.as_integer().filter(|n| range.contains(n));
        number.ok_or_else(|| self.wrong(key, &format!("a number from {} to {}", range.start(), range.end())))
    }

    fn in_flight_max(&mut self, key: &str) -> Result<Option<u32>, String> {
        let value = self.take(key)?;
        if value.as_str() == Some(NONE) {
            return Ok(None);
        }
        let number = value.as_integer().filter(|n| (1..=i64::from(IN_FLIGHT_MAX)).contains(n));
        let wanted = format!("\"{NONE}\" or a number from 1 to {IN_FLIGHT_MAX}");
        number.map(|n| Some(n as u32)).ok_or_else(|| self.wrong(key, &wanted))
    }

    /// None: the default stays.
    fn threshold(&mut self, key: &str) -> Result<Option<usize>, String> {
        let value = self.take(key)?;
        match value.as_str() {
            Some(NEVER_WORD) => return Ok(Some(NEVER)),
            Some(DEFAULT_WORD) => return Ok(None),
            _ => {}
        }
        let (least, most) = (SMALLEST_BYTES as i64, THRESHOLD_BYTES_MAX as i64);
        let number = value.as_integer().filter(|n| (least..=most).contains(n));
        let wanted =
            format!("\"{NEVER_WORD}\", \"{DEFAULT_WORD}\" or a number of bytes from {least} to {most}");
        number.map(|n| Some(n as usize)).ok_or_else(|| self.wrong(key, &wanted))
    }

    fn rates(&mut self, key: &str) -> Result<Bins, String> {
        let (least, most) = (BANDWIDTH_BYTES_PER_S_MIN, BANDWIDTH_BYTES_PER_S_MAX);
        let is_rate = |n: &u64| *n == 0 || (least..=most).contains(n);
        let rate = |value: Value| value.as_integer().and_then(|n| u64::try_from(n).ok()).filter(is_rate);
        let rates: Option<Vec<u64>> = match self.take(key)? {
            Value::Array(values) => values.into_iter().map(rate).collect(),
            _ => None,
        };
        match rates {
            Some(none) if none.is_empty() => Ok([0; BINS]),
            Some(rates) if rates.len() == BINS => Ok(std::array::from_fn(|bin| rates[bin])),
            _ => {
                let wanted =
                    format!("{BINS} numbers of bytes a second, 0 or from {least} to {most}, or none");
                Err(self.wrong(key, &wanted))
            }
        }
    }

    fn table(&mut self, key: &str) -> Result<Keys, String> {
        let inside = |outer: &str| match outer.split_once('[') {
            Some((_, rest)) => format!(" in [{}.{key}]", rest.trim_end_matches(']')),
            None => format!(" in [{key}]"),
        };
        match self.table.remove(key) {
            Some(Value::Table(table)) => Ok(Keys { place: inside(&self.place), table }),
            Some(_) => Err(self.wrong(key, "a table")),
            None => Err(format!(
                "the table{} is missing: it is cut short",
                inside(&self.place).replace(" in", "")
            )),
        }
    }

    fn end(self) -> Result<(), String> {
        match self.table.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("`{key}`{} is not known to this program", self.place)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Document {
        let mut profile = Profile { concurrency: 3, ..Profile::default() };
        profile.delegate.in_flight_max = None;
        profile.delegate.thresholds.set(Lane::LocalWrite, 128 << 10);
        profile.delegate.thresholds.set(Lane::LocalRead, NEVER);
        profile.emu.in_flight_max = Some(8);
        for (kind, rate) in [(EngineKind::Cpu, 10), (EngineKind::Delegate, 7), (EngineKind::Emu, 5)] {
            let mut bandwidths = Bandwidths::default();
            for lane in [Lane::LocalWrite, Lane::LocalRead] {
                bandwidths.of_mut(lane).one = [1, 2, 3, 4, 5].map(|n| n * rate * 100_000_000);
                bandwidths.of_mut(lane).all = [6, 7, 8, 9, 10].map(|n| n * rate * 100_000_000);
            }
            profile.set_bandwidths(kind, bandwidths);
        }
        Document {
            written: "2026-01-02 03:04:05 UTC".to_owned(),
            machine: Machine { cpu: "Xeon \"\\\u{7} é".to_owned(), cpus: 2, nodes: vec!["0-1".to_owned()] },
            memory: vec!["dram".to_owned()],
            domain: "memory".to_owned(),
            emulated_memory: true,
            engines: vec![EngineKind::Cpu, EngineKind::Delegate, EngineKind::Emu],
            profile,
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let sample = sample();
        let text = render(&sample);
        assert_eq!(parse(&text).as_ref(), Ok(&sample), "{text}");
        // What nobody measured is not shown as if somebody had.
        assert!(
            text.contains("remote_write = \"default\"") && text.contains("local_read = \"never\""),
            "{text}"
        );
        assert!(text.contains("remote_read_all = []"), "{text}");
        assert_eq!(text.matches("emulated device").count(), 1, "{text}");
        assert_eq!(render(&parse(&text).unwrap()), text);
    }

    #[test]
    fn an_engine_that_is_not_named_keeps_its_defaults() {
        let mut sample = sample();
        sample.engines = vec![EngineKind::Cpu];
        let read = parse(&render(&sample)).unwrap().profile;
        assert_eq!((read.delegate, read.emu), (Profile::default().delegate, Profile::default().emu));
        assert_eq!(read.bandwidths(EngineKind::Delegate), None);
        assert!(read.bandwidths(EngineKind::Cpu).is_some());
    }

    /// Each edit of a good file, and a part of what is said about it.
    #[test]
    fn what_is_wrong_is_named() {
        let good = render(&sample());
        for (from, to, says) in [
            ("version = 1", "version = 2", "it is newer"),
            ("version = 1", "version = 0", "its version is 0"),
            ("version = 1", "version = \"1\"", "`version`"),
            ("concurrency = 3", "concurrency = 0", "`concurrency`: a number from 1 to 1024 is wanted"),
            ("concurrency = 3", "concurrency = 1152921504606846976", "`concurrency`"),
            ("concurrency = 3", "concurrency = -3", "`concurrency`"),
            ("concurrency = 3", "concurrency = 3.5", "`concurrency`"),
            ("concurrency = 3", "concurrency = 3\ncolour = 1", "`colour` is not known"),
            ("[machine]", "[machine]\nrack = 1", "`rack` in [machine] is not known"),
            ("[delegate]", "[delegate]\nturbo = true", "`turbo` in [delegate] is not known"),
            (
                "[delegate.bandwidth]",
                "[delegate.bandwidth]\nx = []",
                "`x` in [delegate.bandwidth] is not known",
            ),
            ("\"delegate\", ", "\"gpu\", ", "`engines`: there is no engine 'gpu': cpu, semaphore"),
            ("\"delegate\", ", "", "`delegate` is not known"),
            ("\"delegate\", ", "\"delegate\", \"delegate\", ", "delegate twice"),
            ("\"delegate\", ", "\"delegate\", \"semaphore\", ", "the table [semaphore] is missing"),
            ("engines = [", "engines = [1, ", "`engines`: a list of texts"),
            ("in_flight_max = 8", "in_flight_max = 0", "`in_flight_max` in [emu]: \"none\" or a number"),
            ("in_flight_max = 8", "in_flight_max = 4294967297", "`in_flight_max` in [emu]"),
            ("local_write = 131072", "local_write = 4095", "`local_write` in [delegate]: \"never\""),
            ("local_write = 131072", "local_write = 1152921504606846976", "`local_write` in [delegate]"),
            ("local_write = 131072", "local_write = \"sometimes\"", "`local_write` in [delegate]"),
            ("local_write = 131072\n", "", "`local_write` in [delegate] is missing"),
            (
                "remote_read_all = []",
                "remote_read_all = [1]",
                "`remote_read_all` in [cpu.bandwidth]: 5 numbers",
            ),
            ("remote_read_all = []", "remote_read_all = [0, 0, 0, 0, -5]", "5 numbers"),
            ("remote_read_all = []", "remote_read_all = [0, 0, 0, 0, 1152921504606846976]", "5 numbers"),
            ("remote_read_all = []", "remote_read_all = [0, 0, 0, 0, 999999]", "0 or from 1000000 to"),
            ("emulated = true", "emulated = 1", "`emulated` in [media]: true or false"),
            ("cpus = 2", "cpus = ", "line"),
        ] {
            assert!(good.contains(from), "{from}");
            let said = parse(&good.replacen(from, to, 1)).expect_err(to);
            assert!(said.contains(says) && !said.contains('\n'), "{to}: {said}");
        }
        assert!(parse("").unwrap_err().contains("`version` is missing"));
        assert!(parse("\u{0}\u{1}garbage").unwrap_err().contains("line 1"));
    }

    /// Wherever a file is cut short, it is refused: never half a profile.
    #[test]
    fn a_file_that_is_cut_short_is_refused() {
        let whole = render(&sample());
        let end = whole.trim_end().len();
        for cut in (0..end).filter(|cut| whole.is_char_boundary(*cut)) {
            assert!(parse(&whole[..cut]).is_err(), "cut at {cut} of {end}: {}", &whole[..cut]);
        }
    }

    #[test]
    fn another_machine_and_other_memory_are_told() {
        let sample = sample();
        assert_eq!(sample.wrong_machine(&sample.machine), None);
        let other = Machine { cpus: 8, ..sample.machine.clone() };
        let said = sample.wrong_machine(&other).unwrap();
        assert!(said.contains("another machine") && said.contains("2 CPUs, this one 8"), "{said}");
        assert_eq!(sample.wrong_memory(&["dram".to_owned()]), None);
        let said = sample.wrong_memory(&["dax0.0".to_owned()]).unwrap();
        assert_eq!(said, "it was measured on dram, and the pool lies in dax0.0");
    }

    #[test]
    fn the_document_lists_every_key() {
        let page = include_str!("../../docs/tune.md");
        let table: Table = render(&sample()).parse().unwrap();
        let mut keys = Vec::new();
        for (key, value) in &table {
            match value {
                Value::Table(inner) if ["machine", "media"].contains(&key.as_str()) => {
                    keys.extend(inner.keys().map(|inner| format!("`{key}.{inner}`")));
                }
                Value::Table(inner) => {
                    let leaf = |name: &String| *name != "bandwidth";
                    keys.extend(
                        inner.keys().filter(|name| leaf(name)).map(|name| format!("`ENGINE.{name}`")),
                    );
                    let rates = inner["bandwidth"].as_table().unwrap();
                    keys.extend(rates.keys().map(|name| format!("`ENGINE.bandwidth.{name}`")));
                }
                _ => keys.push(format!("`{key}`")),
            }
        }
        keys.sort();
        keys.dedup();
        for key in &keys {
            assert!(
                page.lines().any(|line| line.starts_with(&format!("| {key} |"))),
                "docs/tune.md has no row {key}"
            );
        }
        let rows = page.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, keys.len(), "docs/tune.md has rows of keys that there are not");
        for number in [CONCURRENCY_MAX as u64, u64::from(IN_FLIGHT_MAX), THRESHOLD_BYTES_MAX as u64] {
            assert!(page.contains(&number.to_string()), "docs/tune.md does not say {number}");
        }
    }

    #[test]
    fn a_file_is_held_against_machine_and_memory() {
        let sample = sample();
        let (text, here, dram) = (render(&sample), &sample.machine, ["dram".to_owned()]);
        assert_eq!(suit(text.as_bytes(), here, Some(&dram)), Ok(sample.clone()));
        assert_eq!(suit(text.as_bytes(), here, None), Ok(sample.clone()), "no pool, no memory to differ");
        let refused = |bytes: &[u8], here, says: &str| match suit(bytes, here, Some(&dram)) {
            Err(Unfit::Refused(why)) => assert!(why.contains(says), "{why}"),
            other => panic!("{other:?}"),
        };
        let other = Machine { cpus: 3, ..here.clone() };
        refused(text.as_bytes(), &other, "another machine");
        refused(&text.as_bytes()[..text.len() / 2], here, "");
        refused(&[0xff, 0xfe], here, "not UTF-8");
        refused(&vec![b'#'; PROFILE_BYTES_MAX as usize + 1], here, "larger than 65536 bytes");
        let elsewhere = suit(text.as_bytes(), here, Some(&["dax0.0".to_owned()]));
        assert!(matches!(elsewhere, Err(Unfit::Elsewhere(_))), "{elsewhere:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn no_text_makes_it_panic(text in "[ -~\n]{0,200}", at in 0usize..2000, byte in any::<u8>()) {
            let _ = parse(&text);
            let mut edited = render(&sample()).into_bytes();
            let at = at % edited.len();
            edited[at] = byte;
            if let Ok(edited) = String::from_utf8(edited) {
                let _ = parse(&edited);
            }
        }
    }
}
