//! What is done to a file system before power fails: operations, sequences of them, and the pools they begin on.
//!
//! After ACE (CrashMonkey): a small set of operations on few names, *complete* in all sequences of one and of
//! two, and numbered so that longer ones can be sampled. Everything is one line of text, so that a sequence can
//! be replayed from a file:
//!
//! ```text
//! foo:9000 !bar | link foo bar ; write bar 100 4097
//! needs         | operations, one system call each
//! ```
//!
//! A *need* is brought about before the operations, as ACE does: `A/` a directory, `A/!` an empty one, `!foo` a
//! name that is free, `foo` a file, `foo:9000` one of at least so many bytes, `bar=foo` a second name of it,
//! `ln@foo` a symbolic link, `foo%user.a:10` an attribute of so many bytes. Parents of names are needed, too.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::model::{Body, Falloc, Model, Rename, Setting, Target};
use crate::fs::Time;
use crate::limits::{PATH_BYTES_MAX, XATTR_VALUE_BYTES_MAX};

/// Sizes and places in files of a text: the oracle keeps every byte.
const BYTES: RangeInclusive<u64> = 0..=16 << 20;
/// What one call of a text writes.
const WRITTEN: RangeInclusive<usize> = 0..=4 << 20;
const VALUE: RangeInclusive<usize> = 0..=XATTR_VALUE_BYTES_MAX;
const CHURN: RangeInclusive<usize> = 1..=10_000;
/// The one behind them means that it stays.
const OWNERS: RangeInclusive<u32> = 0..=u32::MAX - 1;
const SECONDS: RangeInclusive<i64> = Time::SEC_MIN..=Time::SEC_MAX;

/// One system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Create(String),
    Mkdir(String),
    Mknod(String, Special),
    Symlink(String, String),
    Link(Target, String),
    Unlink(String),
    Rmdir(String),
    Rename(String, String, Rename),
    /// The slot, the path, and whether the file is emptied.
    Open(u8, String, bool),
    Tmpfile(u8, String),
    Close(u8),
    /// Where and how many bytes.
    Write(Target, u64, usize),
    Append(Target, usize),
    /// Bytes of the file were stored through a shared mapping, and are written back: whole pages, as far as the file goes.
    WriteBack(Target, u64, usize),
    Truncate(Target, u64),
    Fallocate(Target, Falloc, u64, u64),
    Setxattr(Target, String, usize, Setting),
    Removexattr(Target, String),
    /// How many bytes.
    Fix(Target, u64),
    Unfix(Target),
    Chmod(Target, u32),
    Chown(Target, u32, u32),
    Utimens(Target, i64),
    Fsync(Target),
    Sync,
    /// The background's part: epochs are named.
    Tick,
    /// A clean close, and the next open.
    Reopen,
    /// Power fails, with nothing under way (on an ordinary file: synced), and takes all that is not durable.
    Crash,
    /// The process is killed, and the next one opens the pool.
    Kill,
    /// So many changes of attributes and small overwrites: the log grows until it is cleaned.
    Churn(String, usize),
}

/// How an operation finds something.
pub enum Walk<'a> {
    File(&'a mut Target),
    /// The last name is looked up when the operation acts.
    Name(&'a mut String),
}

impl Walk<'_> {
    /// Has the model hold what it leads to at a slot; false where it leads nowhere.
    pub fn hold(&self, model: &mut Model, slot: u8) -> bool {
        match self {
            Walk::File(Target::Path(path)) => model.hold(slot, path).is_ok(),
            Walk::Name(path) => path.rsplit_once('/').is_none_or(|(dir, _)| model.hold(slot, dir).is_ok()),
            Walk::File(Target::Slot(_)) => true,
        }
    }

    /// From now on it begins at what a slot holds.
    pub fn begin_at(&mut self, slot: u8) {
        match self {
            Walk::File(target) => **target = Target::Slot(slot),
            Walk::Name(path) => {
                if let Some((_, name)) = path.rsplit_once('/') {
                    **path = format!("@{slot}/{name}");
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    Fifo,
    CharDevice,
    Socket,
}

impl Special {
    pub fn mode(self) -> u32 {
        0o600
            | match self {
                Special::Fifo => libc::S_IFIFO,
                Special::CharDevice => libc::S_IFCHR,
                Special::Socket => libc::S_IFSOCK,
            }
    }

    pub fn rdev(self) -> u64 {
        match self {
            Special::CharDevice => libc::makedev(1, 3),
            _ => 0,
        }
    }
}

/// What must be so before an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    Directory(String),
    EmptyDirectory(String),
    Free(String),
    File(String, u64),
    SecondName(String, String),
    Symlink(String, String),
    Xattr(String, String, usize),
}

/// Needs and operations: one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub needs: Vec<Need>,
    pub ops: Vec<Op>,
}

/// Lines, one after the other. What a failure interrupts is the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub lines: Vec<Line>,
}

/// The operations whose sequences are tried.
pub const ACE: &[&str] = &[
    // Names that come.
    "!foo | create foo",
    "A/ !A/foo | create A/foo",
    "A/C/ !A/C/bar | create A/C/bar",
    "!A | mkdir A",
    "A/ !A/C | mkdir A/C",
    "!pipe | mknod pipe fifo",
    "A/ !A/null | mknod A/null chr",
    "!ln | symlink A/foo ln",
    "A/ !A/ln | symlink ~300 A/ln",
    "foo !bar | link foo bar",
    "foo A/ !A/bar | link foo A/bar",
    "A/foo B/ !B/bar | link A/foo B/bar",
    // Names that go.
    "foo | unlink foo",
    "A/foo:5000 | unlink A/foo",
    "foo bar=foo | unlink bar",
    "foo A/ A/bar=foo | unlink foo",
    "A/! | rmdir A",
    "A/C/! | rmdir A/C",
    "foo !bar | link foo bar ; unlink bar",
    "foo | unlink foo ; create foo",
    // Names that move.
    "foo !bar | rename foo bar",
    "foo:100 bar:5000 | rename foo bar",
    "foo A/ !A/bar | rename foo A/bar",
    "foo:100 A/bar:5000 | rename foo A/bar",
    "A/foo !bar | rename A/foo bar",
    "A/foo A/bar | rename A/foo A/bar",
    "A/foo B/ !B/bar | rename A/foo B/bar",
    "A/foo:100 B/bar:5000 | rename A/foo B/bar",
    "A/ !B | rename A B",
    "A/foo B/! | rename A B",
    "A/C/ B/ !B/C | rename A/C B/C",
    "A/C/foo B/C/! | rename A/C B/C",
    "foo bar=foo | rename foo bar",
    "foo A/ A/bar=foo | rename foo A/bar",
    "ln@foo bar:100 | rename ln bar",
    "foo bar:100 | rename foo bar exchange",
    "A/foo B/bar | rename A/foo B/bar exchange",
    "A/C/foo B/bar | rename A/C B/bar exchange",
    "A/C/ B/C/foo | rename A/C B/C exchange",
    "foo !bar | rename foo bar noreplace",
    "foo A/bar | rename foo A/bar noreplace",
    "foo:100 bar:5000 | rename foo bar whiteout",
    "A/foo:100 B/bar:5000 | rename A/foo B/bar whiteout",
    "A/C/foo B/C/! | rename A/C B/C whiteout",
    "foo !bar | rename foo bar ; create foo",
    "A/foo B/ !B/foo | rename A/foo B/foo ; create A/foo",
    // Data.
    "foo | write foo 0 1",
    "foo:9000 | write foo 13 7",
    "foo:9000 | write foo 4093 9",
    "foo:9000 | write foo 1001 63",
    "foo:9000 | write foo 63 65",
    "foo:9000 | write foo 0 4096",
    "foo:9000 | write foo 1 4095",
    "A/foo:9000 | write A/foo 3 4097",
    "foo:20000 | write foo 7 16500",
    "foo:5000 | write foo 5003 9",
    "foo:5000 | write foo 9001 63",
    "foo:5000 | append foo 1",
    "foo:5000 | append foo 65",
    "A/foo | append A/foo 4097",
    "foo:100 | append foo 20001",
    "foo:9000 | truncate foo 0",
    "foo:9000 | truncate foo 4097",
    "foo:5000 | truncate foo 12289",
    "foo:9000 | truncate foo 100 ; truncate foo 9000",
    "foo:9000 | truncate foo 5000 ; append foo 7",
    "foo:5000 | fallocate foo reserve 0 20000",
    "foo:5000 | fallocate foo keep 4096 16384",
    "foo:9000 | fallocate foo punch 100 6000",
    "foo:9000 | fallocate foo punch 0 4096",
    "foo:9000 | fallocate foo zero 1000 9000",
    "foo:9000 | fallocate foo zerokeep 4096 9001",
    "foo | fallocate foo reserve 0 8192 ; write foo 100 4097",
    "foo:9000 | write foo 4096 4096 ; fsync foo",
    // Attributes.
    "foo | setxattr foo user.a 10",
    "A/ | setxattr A user.a 64 create",
    "foo%user.a:10 | setxattr foo user.a 100 replace",
    "foo | setxattr foo user.big 5000",
    "foo%user.big:5000 | setxattr foo user.big 4000",
    "foo%user.a:10 | removexattr foo user.a",
    "foo%user.big:5000 | removexattr foo user.big",
    "foo | chmod foo 4755",
    "A/ | chmod A 700",
    "foo | chown foo 7 8",
    "foo | utimens foo 12345",
    // Descriptors.
    "foo:5000 | open 0 foo trunc ; close 0",
    "foo:9000 | open 0 foo ; unlink foo ; write @0 0 4096 ; append @0 9 ; close 0",
    "foo:5000 | open 0 foo ; open 1 foo ; write @0 60 9 ; truncate @1 61 ; append @0 65 ; close 1 ; close 0",
    "A/ !A/foo | tmpfile 0 A ; write @0 0 4097 ; link @0 A/foo ; close 0",
    "A/ | tmpfile 0 A ; append @0 100 ; close 0",
    "foo:9000 bar | open 0 bar ; rename foo bar ; append @0 4097 ; close 0",
    // Durability, and what happens behind the program's back.
    "foo | fsync foo",
    "| sync",
    "| tick",
    "| reopen",
    "foo:9000 | churn foo 230",
    "A/foo | churn A 230",
];

/// Sequences that wait long for what can go wrong in them: in logs that are cleaned, after failures in the middle.
/// They stand among those of one operation, and are not put together with others.
pub const LONG: &[&str] = &[
    // What was stored in place, when cleaning takes its redo record away; the same after a recovery stored it again.
    "foo:9000 | write foo 13 7 ; churn foo 290",
    "foo:9000 | write foo 13 7 ; crash ; churn foo 290",
    // Lines at the end of a file that are stored again as they were remembered.
    "foo:100 | append foo 70 ; append foo 50 ; write foo 150 60 ; append foo 9 ; append foo 100 ; append foo 3",
    "foo:100 | append foo 100 ; append foo 100 ; truncate foo 250 ; append foo 30 ; write foo 310 5 ; append foo 70",
    "foo:4000 | append foo 80 ; append foo 40 ; crash ; append foo 20 ; append foo 60 ; crash ; append foo 7",
    // What only DRAM knows, and goes into logs that grow at a close.
    "foo:9000 | fallocate foo zerokeep 4096 9001 ; reopen",
    "foo A/ A/bar=foo | chmod foo 4755 ; unlink A/bar ; reopen",
    // Change times that only a directory knows, when it goes, or its log is cleaned.
    "foo A/ A/bar=foo | unlink A/bar ; rmdir A",
    "foo A/ A/bar=foo | unlink A/bar ; churn A 290",
    "foo bar A/ A/bar=foo | rename bar A/bar ; churn A 290",
    // Half a rename, when the directory of the other half goes, and its number to somebody else.
    "A/foo B/ !B/foo !new | rename A/foo B/foo ; rmdir A ; mkdir new ; create new/bar",
    "A/foo B/bar !new | rename A/foo B/bar exchange ; unlink A/foo ; rmdir A ; mkdir new ; tick ; unlink B/bar",
    "B/bar A/ !A/foo | rename B/bar A/foo ; unlink A/foo ; rmdir A ; tick",
    "B/bar A/C/ !A/C/foo | rename B/bar A/C/foo ; unlink A/C/foo ; rmdir A/C ; rmdir A ; tick",
    "B/bar A/ C/ !A/foo !C/foo | rename B/bar A/foo ; rename A/foo C/foo ; rmdir A ; tick",
    "B/bar A/ C/ !A/foo | rename B/bar A/foo ; unlink A/foo ; rename C A ; tick",
    "A/C/ B/C/! bar | rename A/C B/C ; fsync bar ; rmdir B/C ; rmdir B",
    "A/C/foo B/C/! bar | rename A/C B/C ; fsync bar ; unlink B/C/foo ; rmdir B/C ; create A/foo ; rename A B",
    "X/A/foo B/u B/v B/w !B/C | mkdir B/C ; rename X/A/foo B/C/foo ; rmdir X/A",
    "A/foo B/bar !new | rename A/foo B/bar whiteout ; unlink A/foo ; rmdir A ; mkdir new ; tick ; unlink B/bar",
    "A/foo B/bar:9000 | rename A/foo B/bar whiteout ; tick ; create B/new ; write B/new 0 9000 ; rename B/bar A/foo",
    "A/foo !A/bar B/ !B/foo | rename A/foo A/bar whiteout ; rename A/foo B/foo whiteout ; unlink A/foo ; churn A 60",
    "A/C/ B/C/foo B/C/bar | unlink B/C/foo ; rename B/C/bar foo ; rename A/C B/C whiteout",
    "A/ B/foo B/bar !new | unlink B/foo ; rename B/bar new ; rename A B whiteout",
    // The same, when recovery needs room for a change time and is itself cut short.
    "foo A/ B/bar C/C=foo | churn B 26 ; chmod foo 600 ; rename B/bar A/bar ; unlink C/C ; rmdir B",
    // Numbers and blocks that others had before, with a recovery in between.
    "foo:9000 !bar | unlink foo ; crash ; create bar ; write bar 0 9000",
    "A/foo A/bar:5000 B/ !B/new | rename A/foo A/bar ; unlink A/bar ; create B/new",
    // Processes that are killed: what the one before did not sync, and numbers that the next one takes at once.
    "A/foo B/bar !new | rename A/foo B/bar exchange ; unlink A/foo ; rmdir A ; mkdir new ; kill ; create new/bar",
    "A/foo B/bar !new | rename A/foo B/bar whiteout ; kill ; unlink A/foo ; rmdir A ; mkdir new ; kill ; create new/bar",
    "foo A/ A/bar=foo | unlink A/bar ; rmdir A ; kill ; mkdir A ; create A/bar",
    "foo:9000 !bar | unlink foo ; kill ; create bar ; write bar 0 9000 ; kill ; append bar 70",
    "A/! B/! bar !C | mkdir A/C ; rename A/C B/C ; kill ; create B/C/foo ; rmdir A ; kill ; rename B/C C ; unlink bar",
    "foo:9000 | setxattr foo user.a 5000 ; write foo 13 7 ; kill ; write foo 15 3 ; append foo 70",
    // Names that go, and records behind that which are on the disk earlier, in another page.
    "A/ B/C/bar B/C/foo B/C/new !A/new | unlink B/C/foo ; rename B/C/new A/new",
    "A/a A/b A/c A/d A/e A/f A/g A/h A/i A/j A/k A/l A/m A/n A/o A/p A/q A/r A/s | unlink A/a ; create A/a",
    "foo:9000 | truncate foo 100 ; crash ; append foo 5000 ; crash ; write foo 50 100",
    "foo | setxattr foo user.a 9000 ; crash ; setxattr foo user.a 5000 ; crash ; removexattr foo user.a",
    "A/foo B/ !B/bar | rename A/foo B/bar ; crash ; rename B/bar A/foo ; crash ; unlink A/foo",
    "A/ !A/bar | symlink ~300 A/bar ; crash ; rename A/bar bar ; crash ; unlink bar",
    "A/ !A/foo | tmpfile 0 A ; write @0 0 4097 ; crash ; create A/foo ; write A/foo 0 100",
    // What the inode table gives back where nothing else is free, when small writes that take it are not fenced before their records.
    "foo:20000 bar | append bar 9000",
    "foo:20000 A/bar | append A/bar 13000 ; unlink foo ; append A/bar 5000",
    "foo:16000 A/bar | write A/bar 0 9000 ; kill ; write A/bar 4000 9000",
    // Numbers of mounts that a failure took back.
    "foo:9000 | reopen ; chmod foo 600 ; chmod foo 640 ; setxattr foo user.a 10 ; chmod foo 644",
    // What was stored through a shared mapping, when `msync` asks for it, or the kernel writes it back by itself.
    "foo:9000 | writeback foo 5000 100 ; fsync foo",
    "foo:9000 | writeback foo 4090 10 ; writeback foo 8200 800 ; write foo 8500 9 ; writeback foo 8190 5 ; fsync foo",
    "foo:9000 | truncate foo 30000 ; writeback foo 20000 3 ; fsync foo ; writeback foo 28671 2 ; truncate foo 21000",
    "foo:9000 A/bar=foo | open 0 foo ; writeback @0 0 9000 ; unlink foo ; writeback @0 1 4096 ; fsync @0 ; close 0",
];

/// All sequences of `length` operations, by number; of one, the long ones too.
pub fn count(length: u32) -> u64 {
    (ACE.len() as u64).pow(length) + if length == 1 { LONG.len() as u64 } else { 0 }
}

/// The `n`th sequence of `length` operations: the last one changes fastest.
pub fn sequence(length: u32, n: u64) -> Sequence {
    let size = ACE.len() as u64;
    if n >= size.pow(length) {
        return Sequence { lines: vec![LONG[(n - size) as usize].parse().expect("a test parses them all")] };
    }
    let line = |place: u32| {
        let text = ACE[(n / size.pow(length - 1 - place) % size) as usize];
        text.parse().expect("a test parses them all")
    };
    Sequence { lines: (0..length).map(line).collect() }
}

/// Sequences from a text: lines, with an empty line between sequences; `#` begins a comment.
pub fn parse(text: &str) -> Result<Vec<Sequence>, String> {
    let mut sequences = vec![Sequence { lines: Vec::new() }];
    for (n, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        let last = sequences.last_mut().expect("one is always there");
        if !line.is_empty() {
            last.lines.push(line.parse().map_err(|e| format!("line {}: {e}", n + 1))?);
        } else if !last.lines.is_empty() {
            sequences.push(Sequence { lines: Vec::new() });
        }
    }
    sequences.retain(|s| !s.lines.is_empty());
    if sequences.is_empty() { Err("it has no operations".to_owned()) } else { Ok(sequences) }
}

// ---------------------------------------------------------------------------------------------------
// Needs

impl Need {
    /// What is to be done so that it is so, on this state of things. Empty if it is so.
    pub fn bring_about(&self, model: &Model) -> Vec<Op> {
        let mut plan = Plan { model: model.clone(), ops: Vec::new() };
        match self {
            Need::Directory(path) => plan.directory(path),
            Need::EmptyDirectory(path) => {
                plan.directory(path);
                plan.empty(path);
            }
            Need::Free(path) => plan.remove(path),
            Need::File(path, size) => plan.file(path, *size),
            Need::SecondName(path, of) => {
                plan.file(of, 0);
                if plan.model.resolve(path, false) != plan.model.resolve(of, false) {
                    plan.remove(path);
                    plan.parent(path);
                    plan.push(Op::Link(Target::Path(of.clone()), path.clone()));
                }
            }
            Need::Symlink(path, target) => {
                plan.remove(path);
                plan.parent(path);
                plan.push(Op::Symlink(target.clone(), path.clone()));
            }
            Need::Xattr(path, name, len) => {
                plan.file(path, 0);
                let id = plan.model.resolve(path, false).expect("just made");
                let value = plan.model.node(id).xattrs.get(name.as_bytes());
                if value.is_none_or(|v| v.len() != *len) {
                    let set = Op::Setxattr(Target::Path(path.clone()), name.clone(), *len, Setting::Any);
                    plan.push(set);
                }
            }
        }
        plan.ops
    }
}

struct Plan {
    model: Model,
    ops: Vec<Op>,
}

impl Plan {
    fn push(&mut self, op: Op) {
        op.on_model(&mut self.model, 0).expect("a plan is made of what works");
        self.ops.push(op);
    }

    fn body(&self, path: &str) -> Option<&Body> {
        self.model.resolve(path, false).ok().map(|id| &self.model.node(id).body)
    }

    fn parent(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn directory(&mut self, path: &str) {
        self.parent(path);
        if !matches!(self.body(path), Some(Body::Directory { .. })) {
            self.remove(path);
            self.push(Op::Mkdir(path.to_owned()));
        }
    }

    fn file(&mut self, path: &str, size: u64) {
        self.parent(path);
        if !matches!(self.body(path), Some(Body::File(_))) {
            self.remove(path);
            self.push(Op::Create(path.to_owned()));
        }
        let Some(Body::File(file)) = self.body(path) else { unreachable!("it was just made") };
        if (file.bytes.len() as u64) < size {
            self.push(Op::Write(Target::Path(path.to_owned()), 0, size as usize));
        }
    }

    fn empty(&mut self, path: &str) {
        if let Some(Body::Directory { names, .. }) = self.body(path) {
            for name in names.keys().cloned().collect::<Vec<_>>() {
                self.remove(&format!("{path}/{}", String::from_utf8_lossy(&name)));
            }
        }
    }

    fn remove(&mut self, path: &str) {
        match self.body(path) {
            None => {}
            Some(Body::Directory { .. }) => {
                self.empty(path);
                self.push(Op::Rmdir(path.to_owned()));
            }
            Some(_) => self.push(Op::Unlink(path.to_owned())),
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// On the model

/// Bytes that are different in every word, by their place and by who wrote them.
pub fn bytes(tag: u64, at: u64, len: usize) -> Vec<u8> {
    let word = |n: u64| {
        let mut x = (tag << 32 ^ n).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // No byte is zero: zeros are what holes have.
        (x ^ x >> 31) | 0x0101_0101_0101_0101
    };
    (at..at + len as u64).map(|n| word(n / 8).to_le_bytes()[(n % 8) as usize]).collect()
}

impl Op {
    /// What the oracle answers. `tag` makes the bytes that are written.
    pub fn on_model(&self, m: &mut Model, tag: u64) -> Result<(), i32> {
        match self {
            Op::Create(path) => m.create(path),
            Op::Mkdir(path) => m.mkdir(path),
            Op::Mknod(path, special) => m.mknod(path, special.mode(), special.rdev()),
            Op::Symlink(target, path) => m.symlink(target, path),
            Op::Link(from, path) => m.link(from, path),
            Op::Unlink(path) => m.unlink(path),
            Op::Rmdir(path) => m.rmdir(path),
            Op::Rename(from, to, how) => m.rename(from, to, *how),
            Op::Open(slot, path, truncates) => m.open(*slot, path, *truncates),
            Op::Tmpfile(slot, dir) => m.tmpfile(*slot, dir),
            Op::Close(slot) => m.close(*slot),
            Op::Write(target, at, len) => m.write(target, *at, &bytes(tag, *at, *len)),
            Op::Append(target, len) => m.append(target, &bytes(tag, 0, *len)),
            Op::WriteBack(target, at, len) => m.write_back(target, *at, &bytes(tag, *at, *len)),
            Op::Truncate(target, size) => m.truncate(target, *size),
            Op::Fallocate(target, how, at, len) => m.fallocate(target, *how, *at, *len),
            Op::Setxattr(target, name, len, how) => m.setxattr(target, name, &bytes(tag, 0, *len), *how),
            Op::Removexattr(target, name) => m.removexattr(target, name),
            Op::Fix(target, bytes) => m.fix(target, *bytes),
            Op::Unfix(target) => m.unfix(target),
            Op::Chmod(target, mode) => m.chmod(target, *mode),
            Op::Chown(target, uid, gid) => m.chown(target, *uid, *gid),
            Op::Utimens(target, mtime) => m.utimens(target, *mtime),
            Op::Fsync(target) => m.fsync(target),
            Op::Sync | Op::Tick => Ok(()),
            Op::Reopen | Op::Crash | Op::Kill => {
                m.close_all();
                Ok(())
            }
            Op::Churn(..) => panic!("churn is done step by step"),
        }
    }

    /// What it walks to before it acts: whole files, and directories that it changes names in.
    pub fn walks(&mut self) -> Vec<Walk<'_>> {
        match self {
            Op::Write(target, ..)
            | Op::Append(target, ..)
            | Op::WriteBack(target, ..)
            | Op::Truncate(target, ..)
            | Op::Fallocate(target, ..)
            | Op::Setxattr(target, ..)
            | Op::Removexattr(target, ..)
            | Op::Fix(target, _)
            | Op::Unfix(target)
            | Op::Chmod(target, ..)
            | Op::Chown(target, ..)
            | Op::Utimens(target, ..)
            | Op::Fsync(target) => vec![Walk::File(target)],
            Op::Link(from, to) => vec![Walk::File(from), Walk::Name(to)],
            Op::Rename(from, to, _) => vec![Walk::Name(from), Walk::Name(to)],
            Op::Create(path) | Op::Mkdir(path) | Op::Mknod(path, _) => vec![Walk::Name(path)],
            Op::Symlink(_, path) | Op::Unlink(path) | Op::Rmdir(path) => vec![Walk::Name(path)],
            _ => Vec::new(),
        }
    }

    /// Itself, or the many that it stands for.
    pub fn steps(&self) -> Vec<Op> {
        let Op::Churn(path, count) = self else { return vec![self.clone()] };
        let target = || Target::Path(path.clone());
        // What is not synced makes more states than can be tried.
        const SYNC_STEPS: usize = 58;
        let step = |n: usize| match n % 3 {
            _ if n % SYNC_STEPS == SYNC_STEPS - 1 => Op::Sync,
            0 => Op::Setxattr(target(), "user.churn".to_owned(), n % 40, Setting::Any),
            _ => Op::Chmod(target(), 0o700 | (n as u32 % 64)),
        };
        (0..*count).map(step).collect()
    }
}

// ---------------------------------------------------------------------------------------------------
// As text

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Op::Create(path) => write!(f, "create {path}"),
            Op::Mkdir(path) => write!(f, "mkdir {path}"),
            Op::Mknod(path, special) => write!(f, "mknod {path} {}", name_of(SPECIALS, special)),
            Op::Symlink(target, path) => write!(f, "symlink {target} {path}"),
            Op::Link(from, path) => write!(f, "link {from} {path}"),
            Op::Unlink(path) => write!(f, "unlink {path}"),
            Op::Rmdir(path) => write!(f, "rmdir {path}"),
            Op::Rename(from, to, how) => write!(f, "rename {from} {to}{}", suffix(name_of(RENAMES, how))),
            Op::Open(slot, path, truncates) => {
                write!(f, "open {slot} {path}{}", if *truncates { " trunc" } else { "" })
            }
            Op::Tmpfile(slot, dir) => write!(f, "tmpfile {slot} {dir}"),
            Op::Close(slot) => write!(f, "close {slot}"),
            Op::Write(target, at, len) => write!(f, "write {target} {at} {len}"),
            Op::Append(target, len) => write!(f, "append {target} {len}"),
            Op::WriteBack(target, at, len) => write!(f, "writeback {target} {at} {len}"),
            Op::Truncate(target, size) => write!(f, "truncate {target} {size}"),
            Op::Fallocate(target, how, at, len) => {
                write!(f, "fallocate {target} {} {at} {len}", name_of(FALLOCS, how))
            }
            Op::Setxattr(target, name, len, how) => {
                write!(f, "setxattr {target} {name} {len}{}", suffix(name_of(SETTINGS, how)))
            }
            Op::Removexattr(target, name) => write!(f, "removexattr {target} {name}"),
            Op::Fix(target, bytes) => write!(f, "fix {target} {bytes}"),
            Op::Unfix(target) => write!(f, "unfix {target}"),
            Op::Chmod(target, mode) => write!(f, "chmod {target} {mode:o}"),
            Op::Chown(target, uid, gid) => write!(f, "chown {target} {uid} {gid}"),
            Op::Utimens(target, mtime) => write!(f, "utimens {target} {mtime}"),
            Op::Fsync(target) => write!(f, "fsync {target}"),
            Op::Sync => write!(f, "sync"),
            Op::Tick => write!(f, "tick"),
            Op::Reopen => write!(f, "reopen"),
            Op::Crash => write!(f, "crash"),
            Op::Kill => write!(f, "kill"),
            Op::Churn(path, count) => write!(f, "churn {path} {count}"),
        }
    }
}

const SPECIALS: &[(&str, Special)] =
    &[("fifo", Special::Fifo), ("chr", Special::CharDevice), ("sock", Special::Socket)];
const RENAMES: &[(&str, Rename)] = &[
    ("", Rename::Plain),
    ("noreplace", Rename::NoReplace),
    ("exchange", Rename::Exchange),
    ("whiteout", Rename::Whiteout),
];
const SETTINGS: &[(&str, Setting)] =
    &[("", Setting::Any), ("create", Setting::Create), ("replace", Setting::Replace)];
const FALLOCS: &[(&str, Falloc)] = &[
    ("reserve", Falloc::Reserve),
    ("keep", Falloc::ReserveKeepSize),
    ("punch", Falloc::Punch),
    ("zero", Falloc::Zero),
    ("zerokeep", Falloc::ZeroKeepSize),
];

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, v)| v == value).expect("each has a name").0
}

fn suffix(word: &str) -> String {
    if word.is_empty() { String::new() } else { format!(" {word}") }
}

/// The words of an operation, taken one by one.
struct Words<'a>(std::str::SplitWhitespace<'a>);

impl Words<'_> {
    fn text(&mut self) -> Result<String, String> {
        self.0.next().map(str::to_owned).ok_or_else(|| "a word is missing at its end".to_owned())
    }

    fn number<T: FromStr>(&mut self) -> Result<T, String> {
        let word = self.text()?;
        word.parse().map_err(|_| format!("{word} is no number that fits"))
    }

    fn within<T: FromStr + PartialOrd + fmt::Display>(
        &mut self,
        bounds: RangeInclusive<T>,
    ) -> Result<T, String> {
        within(&self.text()?, bounds)
    }

    fn octal(&mut self) -> Result<u32, String> {
        let word = self.text()?;
        u32::from_str_radix(&word, 8).map_err(|_| format!("{word} is no octal number"))
    }

    fn target(&mut self) -> Result<Target, String> {
        let word = self.text()?;
        match word.strip_prefix('@') {
            Some(slot) => slot.parse().map(Target::Slot).map_err(|_| format!("{word} is no slot")),
            None => Ok(Target::Path(word)),
        }
    }

    /// One of these names; the empty one where there is no word left.
    fn one_of<T: Copy>(&mut self, names: &[(&str, T)]) -> Result<T, String> {
        let word = self.0.next().unwrap_or("");
        let found = names.iter().find(|(name, _)| *name == word);
        found.map(|(_, value)| *value).ok_or_else(|| format!("{word:?} is none of its kinds"))
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Op, String> {
        let mut w = Words(text.split_whitespace());
        let verb = w.text().map_err(|_| "an operation is empty".to_owned())?;
        let op = match verb.as_str() {
            "create" => Op::Create(w.text()?),
            "mkdir" => Op::Mkdir(w.text()?),
            "mknod" => Op::Mknod(w.text()?, w.one_of(SPECIALS)?),
            "symlink" => {
                let target = w.text()?;
                // ~300 is a target of 300 bytes.
                let target = match target.strip_prefix('~') {
                    Some(len) => "t".repeat(within(len, 1..=PATH_BYTES_MAX)?),
                    None => target,
                };
                Op::Symlink(target, w.text()?)
            }
            "link" => Op::Link(w.target()?, w.text()?),
            "unlink" => Op::Unlink(w.text()?),
            "rmdir" => Op::Rmdir(w.text()?),
            "rename" => Op::Rename(w.text()?, w.text()?, w.one_of(RENAMES)?),
            "open" => Op::Open(w.number()?, w.text()?, w.one_of(&[("", false), ("trunc", true)])?),
            "tmpfile" => Op::Tmpfile(w.number()?, w.text()?),
            "close" => Op::Close(w.number()?),
            "write" => Op::Write(w.target()?, w.within(BYTES)?, w.within(WRITTEN)?),
            "append" => Op::Append(w.target()?, w.within(WRITTEN)?),
            "writeback" => Op::WriteBack(w.target()?, w.within(BYTES)?, w.within(WRITTEN)?),
            "truncate" => Op::Truncate(w.target()?, w.within(BYTES)?),
            "fallocate" => Op::Fallocate(w.target()?, w.one_of(FALLOCS)?, w.within(BYTES)?, w.within(BYTES)?),
            "setxattr" => Op::Setxattr(w.target()?, w.text()?, w.within(VALUE)?, w.one_of(SETTINGS)?),
            "removexattr" => Op::Removexattr(w.target()?, w.text()?),
            "fix" => Op::Fix(w.target()?, w.within(BYTES)?),
            "unfix" => Op::Unfix(w.target()?),
            "chmod" => Op::Chmod(w.target()?, w.octal()?),
            "chown" => Op::Chown(w.target()?, w.within(OWNERS)?, w.within(OWNERS)?),
            "utimens" => Op::Utimens(w.target()?, w.within(SECONDS)?),
            "fsync" => Op::Fsync(w.target()?),
            "sync" => Op::Sync,
            "tick" => Op::Tick,
            "reopen" => Op::Reopen,
            "crash" => Op::Crash,
            "kill" => Op::Kill,
            "churn" => Op::Churn(w.text()?, w.within(CHURN)?),
            _ => return Err(format!("{verb} is no operation")),
        };
        match w.0.next() {
            Some(word) => Err(format!("{word} is one word too many for {verb}")),
            None => Ok(op),
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Need::Directory(path) => write!(f, "{path}/"),
            Need::EmptyDirectory(path) => write!(f, "{path}/!"),
            Need::Free(path) => write!(f, "!{path}"),
            Need::File(path, 0) => write!(f, "{path}"),
            Need::File(path, size) => write!(f, "{path}:{size}"),
            Need::SecondName(path, of) => write!(f, "{path}={of}"),
            Need::Symlink(path, target) => write!(f, "{path}@{target}"),
            Need::Xattr(path, name, len) => write!(f, "{path}%{name}:{len}"),
        }
    }
}

impl FromStr for Need {
    type Err = String;

    fn from_str(word: &str) -> Result<Need, String> {
        // What tells needs apart has no place in a name.
        let plain = |name: &str| match name.is_empty()
            || name.ends_with('/')
            || name.contains(['!', '@', '=', '%', ':'])
        {
            true => Err(format!("{word} names no path that can be told from the rest of it")),
            false => Ok(name.to_owned()),
        };
        Ok(if let Some(path) = word.strip_prefix('!') {
            Need::Free(plain(path)?)
        } else if let Some(path) = word.strip_suffix("/!") {
            Need::EmptyDirectory(plain(path)?)
        } else if let Some(path) = word.strip_suffix('/') {
            Need::Directory(plain(path)?)
        } else if let Some((path, target)) = word.split_once('@') {
            Need::Symlink(plain(path)?, plain(target)?)
        } else if let Some((path, of)) = word.split_once('=') {
            Need::SecondName(plain(path)?, plain(of)?)
        } else if let Some((path, rest)) = word.split_once('%') {
            let (name, len) = rest.split_once(':').ok_or_else(|| format!("{word} names no length"))?;
            Need::Xattr(plain(path)?, plain(name)?, within(len, VALUE)?)
        } else if let Some((path, size)) = word.split_once(':') {
            Need::File(plain(path)?, within(size, BYTES)?)
        } else {
            Need::File(plain(word)?, 0)
        })
    }
}

/// A number in these bounds.
fn within<T: FromStr + PartialOrd + fmt::Display>(
    text: &str,
    bounds: RangeInclusive<T>,
) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| bounds.contains(number));
    number.ok_or_else(|| format!("{text} is no number from {} to {}", bounds.start(), bounds.end()))
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for need in &self.needs {
            write!(f, "{need} ")?;
        }
        let ops: Vec<String> = self.ops.iter().map(Op::to_string).collect();
        write!(f, "| {}", ops.join(" ; "))
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(text: &str) -> Result<Line, String> {
        let (needs, ops) = text.split_once('|').unwrap_or(("", text));
        Ok(Line {
            needs: needs.split_whitespace().map(str::parse).collect::<Result<_, _>>()?,
            ops: ops.split(';').map(str::parse).collect::<Result<_, _>>()?,
        })
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_could_be_read_in_two_ways_is_none() {
        for text in [
            "a/!:0 | sync",
            "a@b@c | sync",
            "! | sync",
            "a: | sync",
            "a%user.x | sync",
            "| symlink ~0 a",
            "| symlink ~99999999999 a",
        ] {
            assert!(text.parse::<Line>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_number_that_nobody_could_do_is_refused_with_its_bounds() {
        for text in [
            "foo:99999999999 | sync",
            "| write foo 99999999999 1",
            "| write foo 0 99999999999",
            "| append foo 99999999999",
            "| writeback foo 99999999999 1",
            "| truncate foo 99999999999",
            "| fallocate foo keep 18446744073709551615 2",
            "| fallocate foo reserve 0 99999999999",
            "| setxattr foo user.a 65537",
            "| fix foo 99999999999",
            "| chown foo 4294967295 0",
            "| utimens foo 99999999999",
            "| churn foo 10001",
            "| churn foo 0",
        ] {
            let refused = text.parse::<Line>().unwrap_err();
            assert!(refused.contains("is no number from"), "{text}: {refused}");
        }
        let refused = parse("| sync\n| truncate foo 16777217").unwrap_err();
        assert_eq!(refused, "line 2: 16777217 is no number from 0 to 16777216");
    }

    #[test]
    fn every_line_reads_as_it_was_written() {
        for text in ACE.iter().chain(LONG) {
            let line: Line = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(line.to_string().parse::<Line>().as_ref(), Ok(&line), "{text}");
        }
    }

    #[test]
    fn every_operation_finds_what_it_needs() {
        for text in ACE.iter().chain(LONG) {
            let line: Line = text.parse().unwrap();
            let mut model = Model::new(1);
            for need in &line.needs {
                for op in need.bring_about(&model) {
                    op.on_model(&mut model, 1).unwrap_or_else(|e| panic!("{text}: {need}: errno {e}"));
                }
            }
            for step in line.ops.iter().flat_map(Op::steps) {
                let done = step.on_model(&mut model, 2);
                let refused = text.contains("noreplace") && done == Err(libc::EEXIST);
                assert!(done.is_ok() || refused, "{text}: errno {done:?}");
            }
        }
    }

    #[test]
    fn a_text_is_sequences() {
        let text = "# two\nfoo | unlink foo\n| sync # now\n\n\n| create bar\n";
        let found = parse(text).unwrap();
        assert_eq!(found.iter().map(|s| s.lines.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(found[0].to_string(), "foo | unlink foo\n| sync\n");
        assert_eq!(parse("# none\n\n"), Err("it has no operations".to_owned()));
        assert!(parse("| unlink").is_err() && parse("| fly foo").is_err() && parse("| sync now").is_err());
    }
}
