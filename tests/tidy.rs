//! The rules of the house that no compiler checks, executed: arrows between rooms, where `unsafe` and raw
//! memory may stand, how files begin, what may not land.
//!
//! Rust is read with comments and literals blanked out (`Source::code`), so that neither can hide or fake a
//! finding. Each rule returns its findings as lines, and each has a test of its own on a small sample: a
//! rule that finds nothing must be able to find something.

use std::fs;
use std::path::{Path, PathBuf};

/// Who may import whom inside the library. `error`, `limits`, `quote`, `sync` and `account` are open to all.
const ARROWS: &[(&str, &[&str])] = &[
    ("account", &[]),
    ("error", &["media"]),
    ("limits", &[]),
    ("quote", &[]),
    ("sync", &[]),
    ("wait", &[]),
    ("media", &[]),
    ("mover", &["media", "wait"]),
    ("policy", &[]),
    ("fs", &["media", "mover", "policy", "wait"]),
    ("runtime", &["mover::completion", "wait"]),
    ("mediator", &["fs", "media", "mover", "policy"]),
    ("wsp", &["fs", "media", "mover", "policy", "wait"]),
    ("sim", &["fs", "media", "mover", "policy", "runtime", "wsp"]),
];

/// Where `unsafe` may stand (a folder, or a file without its suffix), and why there.
const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("src/media/", "the only room that touches mapped memory"),
    ("src/sync/", "a lock's value, and the kernel's barrier"),
    ("src/account/stamp", "the processor's time stamp"),
    ("src/wait/pause", "an instruction that the compiler has no name for"),
    ("src/mover/engine_", "device portals and descriptors"),
    ("src/mover/vfio", "a device's registers, and what the kernel is asked for them"),
    ("src/mover/priority", "an I/O priority, which only a system call tells"),
    ("src/mover/flight", "the bytes of copies under way, which whoever began them vouches for"),
    ("src/mover/ticket", "buffers that copies under way own or borrow"),
    ("src/sim/engine", "the bytes that a simulated device was lent"),
    ("src/runtime/switch", "context switch"),
    ("src/runtime/lock", "a lock's promise that one has it"),
    ("src/runtime/mod", "the promise of who makes a uthread that moves"),
    ("src/mediator/ring", "memory shared with clients"),
    ("src/wsp/", "guest memory"),
    ("src/fs/offload", "bytes lent to copies that go on after their operation"),
    ("src/fs/alloc", "zeroed memory for the groups, so that a pool of TiBs opens without touching them"),
    ("crates/capi/", "the foreign boundary"),
    ("crates/preload/", "the foreign boundary"),
    ("crates/python/", "the foreign boundary"),
    ("crates/lode/src/door/", "descriptors handed in by mount(8)"),
    ("crates/lode/src/mount/", "fork and signals of the mount server"),
    ("crates/lode/src/interrupt", "signal handlers of the command"),
    ("crates/lode/src/allocator", "a symbol that the allocator reads"),
    ("crates/lode/src/cost/child", "what a process has used, which only wait4 says"),
    ("crates/lode/src/bench/", "clocks and raw copies, measured at their own cost"),
    ("crates/study/", "comparison peers behind C interfaces"),
    ("crates/lode/tests/", "system calls that the standard library lacks"),
    ("examples/copy", "the plain copies that ours are measured against"),
    ("fuzz/", "the C interface, called as C does"),
    ("tests/", "system calls that the standard library lacks"),
];

/// Ways to reach memory by address. Inside the library they may stand where `unsafe` may.
const RAW_MEMORY: &[&str] = &[
    "*const ",
    "*mut ",
    "as_ptr()",
    "as_mut_ptr()",
    "from_raw_parts",
    "ptr::",
    "NonNull",
    "transmute",
    "read_volatile",
    "write_volatile",
    "arch::x86_64",
    "asm!",
];

/// Words that say that something is unfinished, cut so that this file does not say them.
const UNFINISHED: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("X", "XX"),
    concat!("todo", "!("),
    concat!("unimpl", "emented!("),
    concat!("dbg", "!("),
];

/// Names that say nothing of what a module owns.
const NO_NAMES: &[&str] = &["common", "utils", "util", "helpers", "helper", "misc"];

/// Folders of one machine, which no file of a repository should know.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Opens a place that someone has still to fill in.
const TO_FILL: &str = concat!("<!-- FI", "LL");

/// Lines of comment above an `unsafe` within which its reason must begin.
const SAFETY_LINES_MAX: usize = 12;

/// Sources of others, kept as they are (tests/vendor.rs).
const FOREIGN: &str = "vendor/fuser";

struct Source {
    /// Relative to the repository, with slashes.
    path: String,
    text: String,
    /// The same lines with comments and the insides of literals blanked out.
    code: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned(), code: blank(text) }
    }

    fn finding(&self, line: usize, what: &str) -> String {
        format!("{}:{}: {what}", self.path, line + 1)
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the repository with one of these suffixes (or names), read as text.
fn sources(suffixes: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    collect(&root(), &mut |path| {
        let relative = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        if suffixes.iter().any(|s| relative.ends_with(s)) {
            let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{relative}: {e}"));
            found.push(Source::new(&relative, &text));
        }
    });
    assert!(!found.is_empty(), "no file ends in {suffixes:?}");
    found
}

fn collect(dir: &Path, each: &mut dyn FnMut(&Path)) {
    let mut entries: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let hidden = name.starts_with('.') && name != ".ci";
        let foreign = path.strip_prefix(root()).is_ok_and(|inside| inside == Path::new(FOREIGN));
        let made = ["target", "out", "__pycache__"].contains(&name.as_str());
        if path.is_symlink() || hidden || foreign || made {
            continue;
        }
        if path.is_dir() { collect(&path, each) } else { each(&path) }
    }
}

fn assert_none(findings: Vec<String>) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

/// Rust with comments, strings and characters replaced by spaces, line for line.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => line_end(bytes, at),
            [b'/', b'*', ..] => comment_end(bytes, at),
            [b'"', ..] => string_end(bytes, at + 1),
            [b'r', b'"' | b'#', ..] if !is_word(bytes, at) => raw_string_end(bytes, at + 1).unwrap_or(at),
            [b'\'', ..] => character_end(bytes, at).unwrap_or(at),
            _ => at,
        };
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(out).expect("whole characters were replaced")
}

fn is_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |n| at + n)
}

fn comment_end(bytes: &[u8], at: usize) -> usize {
    let (mut depth, mut at) = (1, at + 2);
    while at < bytes.len() && depth > 0 {
        match &bytes[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// `at` is behind the `r`; None where this is a raw identifier.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at..].iter().take_while(|b| **b == b'#').count();
    if bytes.get(at + hashes) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    let body = at + hashes + 1;
    let found = bytes[body..].windows(close.len()).position(|w| w == close);
    Some(found.map_or(bytes.len(), |n| body + n + close.len()))
}

/// None where the quote opens a lifetime.
fn character_end(bytes: &[u8], at: usize) -> Option<usize> {
    if bytes.get(at + 1) == Some(&b'\\') {
        return Some(bytes[at + 3..].iter().position(|b| *b == b'\'')? + at + 4);
    }
    let character = std::str::from_utf8(&bytes[at + 1..(at + 5).min(bytes.len())]);
    let valid = character.map_or_else(|e| e.valid_up_to(), str::len);
    let width = std::str::from_utf8(&bytes[at + 1..at + 1 + valid]).unwrap().chars().next()?.len_utf8();
    (bytes.get(at + 1 + width) == Some(&b'\'')).then_some(at + 2 + width)
}

/// Code without its `#[cfg(test)]` modules: tests may import whatever they test.
fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    while let Some(begin) = out.find("#[cfg(test)]") {
        let rest = &out[begin..];
        let end = match (rest.find('{'), rest.find(';')) {
            (Some(open), semicolon) if semicolon.is_none_or(|s| open < s) => block_end(rest, open),
            (_, Some(semicolon)) => semicolon + 1,
            _ => rest.len(),
        };
        let blanked: String = rest[..end].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
        out.replace_range(begin..begin + end, &blanked);
    }
    out
}

fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, c) in code[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return open + at + 1;
        }
    }
    code.len()
}

/// The module path of a library file: `src/fs/files/io.rs` is fs, files, io.
fn module_path(path: &str) -> Vec<&str> {
    let inside = path.strip_prefix("src/").expect("a file of the library").strip_suffix(".rs").unwrap();
    let mut parts: Vec<&str> = inside.split('/').collect();
    if matches!(parts.last(), Some(&("mod" | "lib" | "main"))) {
        parts.pop();
    }
    parts
}

/// Every `room::next` that code of `depth` modules below the root names, with its line.
fn imports(code: &str, depth: usize) -> Vec<(usize, String)> {
    let climb = "super::".repeat(depth.max(1));
    let mut found = Vec::new();
    for prefix in ["crate::", climb.as_str()] {
        for (at, _) in code.match_indices(prefix) {
            let longer = code[..at].ends_with("super::") || is_word(code.as_bytes(), at);
            if longer || (prefix != "crate::" && depth == 0) {
                continue;
            }
            let line = code[..at].matches('\n').count();
            let paths = heads(&code[at + prefix.len()..]);
            found.extend(paths.into_iter().map(|path| (line, path)));
        }
    }
    found
}

/// The first two names of each path at the start of `rest`: one, or a braced group.
fn heads(rest: &str) -> Vec<String> {
    let head = |text: &str| {
        let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(text.len());
        text[..end].split("::").take(2).collect::<Vec<_>>().join("::")
    };
    let Some(group) = rest.strip_prefix('{') else { return vec![head(rest)] };
    let (mut depth, mut begin, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.push(head(group[begin..at].trim_start()));
                begin = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found.retain(|path| !path.is_empty());
    found
}

fn arrows(source: &Source) -> Vec<String> {
    let path = module_path(&source.path);
    let Some(room) = path.first() else { return Vec::new() };
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| name == room) else {
        return vec![source.finding(0, &format!("the room {room} is not in ARROWS"))];
    };
    let named = imports(&without_tests(&source.code), path.len());
    let forbidden = named.into_iter().filter(|(_, import)| {
        let target = import.split("::").next().unwrap();
        let is_room = ARROWS.iter().any(|(name, _)| *name == target);
        let open = target == *room || ["error", "limits", "quote", "sync", "account"].contains(&target);
        is_room && !open && !allowed.iter().any(|a| *a == target || a == import)
    });
    forbidden.map(|(line, import)| source.finding(line, &format!("{room} may not import {import}"))).collect()
}

#[test]
fn rooms_import_only_what_their_arrows_allow() {
    let library = sources(&[".rs"]).into_iter().filter(|s| s.path.starts_with("src/"));
    assert_none(library.flat_map(|source| arrows(&source)).collect());
}

#[test]
fn arrows_see_every_form_of_import() {
    let at = |path, text| arrows(&Source::new(path, text)).len();
    assert_eq!(at("src/media/pool.rs", "use crate::fs::Fs;"), 1);
    assert_eq!(at("src/media/pool.rs", "use crate::{error::Error, fs::{Fs, Ino}, limits, policy};"), 2);
    assert_eq!(at("src/media/copy/mod.rs", "fn f() { super::super::fs::go() }"), 1);
    assert_eq!(at("src/media/pool.rs", "use super::super::fs;"), 1);
    assert_eq!(at("src/media/pool.rs", "use super::region;"), 0);
    assert_eq!(at("src/fs/log.rs", "use crate::media::Media;\nuse crate::error::Result;"), 0);
    assert_eq!(at("src/runtime/task.rs", "use crate::mover::completion::Ticket;"), 0);
    assert_eq!(at("src/runtime/task.rs", "use crate::mover::engine_cpu::Cpu;"), 1);
    assert_eq!(at("src/media/pool.rs", "// use crate::fs;\nlet s = \"crate::fs\";"), 0);
    assert_eq!(at("src/media/pool.rs", "#[cfg(test)]\nmod tests { use crate::fs::Fs; }\nuse crate::fs;"), 1);
    assert_eq!(at("src/attic/mod.rs", ""), 1);
}

/// What the package of a manifest is called.
fn package(manifest: &Source) -> String {
    let line = manifest.text.lines().find_map(|l| l.strip_prefix("name = ")).expect("a package has a name");
    line.trim_matches('"').to_owned()
}

/// A crate that is not named there would be tested as it is released, where assertions are left out.
#[test]
fn the_gate_tests_every_crate_with_its_assertions() {
    let manifests = sources(&["Cargo.toml"]);
    let whole = manifests.iter().find(|s| s.path == "Cargo.toml").expect("the workspace has a manifest");
    let (_, named) = whole.text.split_once("[profile.bench.package]").expect("the gate has a profile");
    let is_member =
        |s: &&Source| s.path == "Cargo.toml" || s.path.starts_with("crates/") || s.path.starts_with("tests/");
    let is_asserted =
        |line: &str| ["debug-assertions = true", "overflow-checks = true"].iter().all(|a| line.contains(a));
    let findings = manifests.iter().filter(is_member).map(package).filter(|name| {
        let line = named.lines().find(|line| line.starts_with(&format!("{name} = ")));
        !line.is_some_and(is_asserted)
    });
    assert_none(
        findings.map(|name| format!("Cargo.toml: profile.bench has no assertions for {name}")).collect(),
    );
}

/// It names the library's unit tests and its features by themselves, and of other crates programs and integration tests alone.
#[test]
fn the_gate_runs_every_unit_test() {
    let (manifests, gate) = (sources(&["Cargo.toml"]), sources(&["tests/all.py"]));
    let whole = manifests.iter().find(|s| s.path == "Cargo.toml").expect("the workspace has a manifest");
    let (_, features) = whole.text.split_once("\n[features]\n").expect("the library has features");
    let named = features.lines().take_while(|line| !line.starts_with('['));
    let named = named.filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(" = "));
    let (_, asked) = gate[0].text.split_once("\"--features\", \"").expect("the gate asks for features");
    let asked = asked.split('"').next().expect("what is in front of the end");
    let is_asked = |name: &str| asked.split(',').any(|feature| feature == name);
    let (defaults, others): (Vec<_>, Vec<_>) = named.partition(|(name, _)| *name == "default");
    let is_default = |name: &str| defaults.iter().any(|(_, list)| list.contains(&format!("\"{name}\"")));
    let unasked = others.iter().filter(|(name, _)| !is_default(name) && !is_asked(name));
    let mut findings: Vec<String> =
        unasked.map(|(name, _)| format!("tests/all.py: no unit tests with feature {name}")).collect();
    let is_member = |s: &&Source| s.path.starts_with("crates/") || s.path.starts_with("tests/");
    for lib in sources(&["src/lib.rs"]).iter().filter(is_member) {
        let manifest = lib.path.replace("src/lib.rs", "Cargo.toml");
        let own = manifests.iter().find(|s| s.path == manifest).expect("a crate has a manifest");
        if !own.text.contains("\ntest = false\n") && !lib.text.contains("#![cfg(loom)]") {
            findings.push(format!(
                "{manifest}: the gate runs no unit tests of this library: test = false says so"
            ));
        }
    }
    assert_none(findings);
}

#[test]
fn crates_depend_on_the_library_not_on_each_other() {
    let manifests: Vec<Source> =
        sources(&["Cargo.toml"]).into_iter().filter(|s| s.path.starts_with("crates/")).collect();
    let names: Vec<String> = manifests.iter().map(package).collect();
    let mut findings = Vec::new();
    for (manifest, own) in manifests.iter().zip(&names) {
        for (number, line) in manifest.text.lines().enumerate() {
            let dependency = line.split(['.', ' ', '=']).next().unwrap();
            if dependency != own && names.iter().any(|n| n == dependency) {
                findings.push(manifest.finding(number, &format!("{own} may not depend on {dependency}")));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn every_file_begins_with_what_it_owns() {
    let silent = sources(&[".rs"]).into_iter().filter(|s| !s.text.starts_with("//! "));
    assert_none(silent.map(|s| s.finding(0, "the file does not begin with //!")).collect());
}

fn unfinished(source: &Source) -> Vec<String> {
    let mut findings = Vec::new();
    for (number, line) in source.text.lines().enumerate() {
        for word in UNFINISHED {
            let whole = |at: usize| {
                let after = line.as_bytes().get(at + word.len());
                !is_word(line.as_bytes(), at)
                    && (word.ends_with('(') || !after.is_some_and(u8::is_ascii_alphanumeric))
            };
            if line.match_indices(word).any(|(at, _)| whole(at)) {
                findings.push(source.finding(number, &format!("unfinished: {word}")));
            }
        }
        if line.contains(TO_FILL) {
            findings.push(source.finding(number, "a place that is still to be filled in"));
        }
    }
    findings
}

const TEXTS: &[&str] =
    &[".rs", ".md", ".py", ".sh", ".toml", ".c", ".h", ".s", ".in", "Makefile", ".ci/run", "LICENSE-MIT"];

#[test]
fn nothing_is_unfinished() {
    assert_none(sources(TEXTS).iter().flat_map(unfinished).collect());
}

#[test]
fn unfinished_finds_words_not_parts_of_words() {
    let count = |text: &str| unfinished(&Source::new("a.rs", text)).len();
    assert_eq!(UNFINISHED.iter().map(|word| count(&format!("// {word} x"))).sum::<usize>(), UNFINISHED.len());
    assert_eq!(count(&format!("{TO_FILL}: the table -->")), 1);
    assert_eq!(count(&format!("mktemp -d lode.{}{}", UNFINISHED[2], UNFINISHED[2])), 0);
    assert_eq!(count("the todo list"), 0);
}

fn permits_unsafe(path: &str) -> bool {
    UNSAFE_ALLOWED.iter().any(|(place, _)| path.starts_with(place))
}

/// Each `unsafe` stands where it may, with its reason above it.
fn unsafe_findings(source: &Source) -> Vec<String> {
    let text: Vec<&str> = source.text.lines().collect();
    let mut findings = Vec::new();
    for (number, line) in source.code.lines().enumerate() {
        let words = line.match_indices("unsafe").filter(|(at, word)| {
            let after = line.as_bytes().get(at + word.len()).copied().unwrap_or(b' ');
            // `#[unsafe(no_mangle)]` and the lint's own name make nothing unsafe happen.
            let goes_on = after.is_ascii_alphanumeric() || after == b'_' || after == b'(';
            !(goes_on || is_word(line.as_bytes(), *at))
        });
        if words.count() == 0 {
            continue;
        }
        if !permits_unsafe(&source.path) {
            findings.push(source.finding(number, "unsafe may not stand here (UNSAFE_ALLOWED)"));
        }
        let acts = ["unsafe {", "unsafe impl", "unsafe fn "].iter().any(|form| line.contains(form));
        if acts && !has_reason(&text, number) {
            findings.push(source.finding(number, "unsafe without a SAFETY comment"));
        }
    }
    findings
}

/// A reason close above, or one for "each" of several in the same function.
fn has_reason(text: &[&str], number: usize) -> bool {
    let above = &text[number.saturating_sub(SAFETY_LINES_MAX)..=number];
    let function = text[..number].iter().rposition(|l| l.contains("fn ")).unwrap_or(0);
    above.iter().any(|l| l.contains("SAFETY:") || l.contains("# Safety"))
        || text[function..number].iter().any(|l| l.contains("SAFETY (each"))
}

#[test]
fn unsafe_stands_where_it_may_and_says_why() {
    assert_none(sources(&[".rs"]).iter().flat_map(unsafe_findings).collect());
}

#[test]
fn unsafe_findings_see_place_and_reason() {
    let count = |path, text| unsafe_findings(&Source::new(path, text)).len();
    assert_eq!(count("src/fs/log.rs", "// SAFETY: none.\nunsafe { go() }"), 1);
    assert_eq!(count("src/fs/log.rs", "unsafe { go() }"), 2);
    assert_eq!(count("src/media/pool.rs", "unsafe { go() }"), 1);
    assert_eq!(count("src/media/pool.rs", "// SAFETY: it is ours.\nunsafe { go() }"), 0);
    assert_eq!(count("src/fs/log.rs", "// unsafe\n\"unsafe\"; #[unsafe(no_mangle)] let unsafe_code = 1;"), 0);
}

fn raw_memory(source: &Source) -> Vec<String> {
    let code = without_tests(&source.code);
    let lines = code.lines().enumerate().flat_map(|(number, line)| {
        let named = RAW_MEMORY.iter().filter(|word| line.contains(**word));
        named.map(move |word| source.finding(number, &format!("{} outside src/media", word.trim())))
    });
    lines.collect()
}

#[test]
fn only_media_reaches_memory_by_address() {
    let library =
        sources(&[".rs"]).into_iter().filter(|s| s.path.starts_with("src/") && !permits_unsafe(&s.path));
    assert_none(library.flat_map(|source| raw_memory(&source)).collect());
}

#[test]
fn raw_memory_is_seen() {
    let count = |text| raw_memory(&Source::new("src/fs/log.rs", text)).len();
    assert_eq!(count("let p = base.as_mut_ptr() as *mut u8;\nstd::ptr::copy(p, q, 1);"), 3);
    assert_eq!(count("// *mut u8\nlet a = b * mutable;"), 0);
}

#[test]
fn modules_have_names_that_say_something() {
    let mut findings = Vec::new();
    collect(&root(), &mut |path| {
        let relative = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let parts = relative.split('/').map(|part| part.split('.').next().unwrap());
        for part in parts.filter(|part| NO_NAMES.contains(part)) {
            findings.push(format!("{relative}: {part} says nothing of what it owns"));
        }
    });
    assert_none(findings);
}

#[test]
fn no_file_knows_one_machine() {
    let mut findings = Vec::new();
    for source in sources(TEXTS).iter().filter(|s| s.path != file!()) {
        for (number, line) in source.text.lines().enumerate() {
            if MACHINE_PATHS.iter().any(|path| line.contains(path)) {
                findings.push(source.finding(number, "a path of one machine"));
            }
        }
    }
    assert_none(findings);
}

/// Targets of `[text](target)` and `src="target"` that are files here.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (open, close) in [("](", ')'), ("src=\"", '"')] {
            for (at, _) in line.match_indices(open) {
                let rest = &line[at + open.len()..];
                let target = rest.split(close).next().unwrap().split('#').next().unwrap();
                if !target.is_empty() && !target.contains("://") && !target.contains(' ') {
                    found.push((number, target.to_owned()));
                }
            }
        }
    }
    found
}

#[test]
fn links_lead_somewhere() {
    let mut findings = Vec::new();
    for page in sources(&[".md"]) {
        let folder = root().join(&page.path).parent().unwrap().to_owned();
        for (number, target) in links(&page.text) {
            if !folder.join(&target).exists() {
                findings.push(page.finding(number, &format!("{target} is not there")));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn links_are_seen() {
    let text = "[a](docs/a.md#part) and [b](https://b.example) and [c](#c) ![d](d.svg)\n<img src=\"e.svg\">";
    let found: Vec<String> = links(text).into_iter().map(|(_, target)| target).collect();
    assert_eq!(found, ["docs/a.md", "d.svg", "e.svg"]);
}

#[test]
fn blanking_keeps_code_and_lines() {
    let text = "let a = \"x\\\"y\"; // z\nlet b = 'c'; fn f<'a>(r: &'a str) {} /* q /* r */ s */\nlet d = r#\"t\"u\"#; '\\n' é";
    let blanked = blank(text);
    assert_eq!(blanked.lines().count(), text.lines().count());
    for gone in ["x", "y", "z", "q", "s */", "t\"", "u\""] {
        assert!(!blanked.contains(gone), "{gone} is left in {blanked}");
    }
    for kept in ["let a =", "fn f<'a>(r: &'a str) {}", "let d =", "é"] {
        assert!(blanked.contains(kept), "{kept} is gone from {blanked}");
    }
}
