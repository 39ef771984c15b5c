//! Requests such as a kernel sends, with arguments such as no program has, and some that no kernel sends: each is answered
//! once and in its form, none by a panic, and the pool is whole behind them.
//!
//! Here the kernel is a socket, whose messages have bounds as requests of /dev/fuse have. It holds references as the kernel
//! does (an answer that names an inode is one, and each comes back once), and may name inodes that it has none to.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use lodestone::fs::{Fs, Ino, Kind, MkfsOptions, OpenOptions, check};
use lodestone::media::{Domain, Pool, PoolOptions};
use proptest::prelude::*;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::FuseDoor;
use crate::door::{Cache, Door, Settings};

const POOL_BYTES: u64 = 16 << 20;
/// What requests may carry and ask for.
const DATA_BYTES_MAX: u32 = 64 << 10;
const THREADS: usize = 3;
/// Requests under way at once, at most.
const AT_ONCE: usize = 4;
/// An answer that takes longer never comes.
const LATE: Duration = Duration::from_secs(60);

const REQUEST_HEAD: usize = 40;
const ANSWER_HEAD: usize = 16;
const ROOT: u64 = 1;

/// Operation codes of the protocol.
mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BMAP: u32 = 37;
    pub const IOCTL: u32 = 39;
    pub const POLL: u32 = 40;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;

    /// What any request may be; the frequent ones of programs more often.
    pub const ALL: &[u32] = &[
        LOOKUP,
        LOOKUP,
        LOOKUP,
        GETATTR,
        SETATTR,
        SETATTR,
        SETATTR,
        READLINK,
        SYMLINK,
        MKNOD,
        MKNOD,
        MKDIR,
        MKDIR,
        UNLINK,
        UNLINK,
        RMDIR,
        RENAME,
        RENAME,
        LINK,
        LINK,
        OPEN,
        READ,
        READ,
        WRITE,
        WRITE,
        WRITE,
        WRITE,
        STATFS,
        FSYNC,
        SETXATTR,
        SETXATTR,
        GETXATTR,
        LISTXATTR,
        REMOVEXATTR,
        FLUSH,
        OPENDIR,
        READDIR,
        RELEASEDIR,
        FSYNCDIR,
        GETLK,
        SETLKW,
        ACCESS,
        CREATE,
        CREATE,
        CREATE,
        INTERRUPT,
        BMAP,
        IOCTL,
        POLL,
        FALLOCATE,
        FALLOCATE,
        READDIRPLUS,
        READDIRPLUS,
        RENAME2,
        RENAME2,
        LSEEK,
        COPY_FILE_RANGE,
        COPY_FILE_RANGE,
        SYNCFS,
        TMPFILE,
        STATX,
        0,
        7,
        63,
        4096,
    ];
}

/// Whose inode a request names.
#[derive(Clone, Debug)]
enum Which {
    Root,
    /// One of those that are referred to.
    Known(prop::sample::Index),
    /// Any number: of one that was forgotten, or never was.
    Any(u64),
}

#[derive(Clone)]
struct Step {
    code: u32,
    node: Which,
    other: Which,
    names: [Vec<u8>; 2],
    /// Offsets, sizes, lengths, times.
    numbers: [u64; 3],
    /// Modes and flags.
    words: [u32; 3],
    data: u32,
    uid: u32,
    /// Bytes of its arguments that are there, where it is cut short.
    cut: Option<u16>,
    /// References that come back behind it, of which inode.
    forgets: Option<(prop::sample::Index, u64)>,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Step { code, node, other, names: [first, second], numbers, words, data, uid, cut, forgets } =
            self;
        let (first, second) = (first.escape_ascii(), second.escape_ascii());
        write!(f, "{code} of {node:?}, {other:?}: {first} {second} {numbers:?} {words:?} {data} by {uid}")?;
        write!(f, ", cut {cut:?}, forgets {forgets:?}")
    }
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![
        2 => Just(Which::Root),
        8 => any::<prop::sample::Index>().prop_map(Which::Known),
        1 => prop_oneof![0..40_u64, Just(u64::from(u32::MAX)), any::<u64>()].prop_map(Which::Any),
    ]
}

/// Few, so that they meet; and those that trouble somebody.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        12 => (0..6_u8).prop_map(|n| vec![b'a' + n]),
        1 => (250..260_usize).prop_map(|n| vec![b'n'; n]),
        1 => prop::collection::vec(1..=255_u8, 0..20),
        1 => Just(b".".to_vec()),
        1 => Just(b"..".to_vec()),
        3 => prop::sample::select(&[
            "user.a", "user.b", "trusted.a", "security.capability", "system.posix_acl_access", "system.posix_acl_default",
            "user.", "system.", "lode.fixed", "user.lode.fixed", "",
        ][..]).prop_map(|n| n.as_bytes().to_vec()),
    ]
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..200_000_u64,
        4 => (0..40_u64).prop_map(|n| n * 4096),
        2 => (0..64_u32, -3..3_i64).prop_map(|(bit, off)| (1_u64 << bit).wrapping_add_signed(off)),
        1 => any::<u64>(),
    ]
}

fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0..4_u32,
        4 => prop::sample::select(&[
            libc::S_IFREG | 0o644, libc::S_IFDIR | 0o755, libc::S_IFLNK | 0o777, libc::S_IFIFO | 0o600, libc::S_IFCHR, libc::S_IFBLK,
            libc::S_IFSOCK | 0o600, 0o6755, 0o7777,
        ][..]),
        2 => (0..32_u32).prop_map(|bit| 1 << bit),
        1 => 0..256_u32,
        1 => any::<u32>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let node = (prop::sample::select(op::ALL), which(), which());
    let arguments = ([name(), name()], [number(), number(), number()], [word(), word(), word()]);
    let rest = (
        prop_oneof![3 => 0..5000_u32, 1 => 0..=DATA_BYTES_MAX],
        prop::sample::select(&[0, 0, 0, 1000, u32::MAX][..]),
        prop::option::weighted(0.03, 0..100_u16),
        prop::option::weighted(0.15, (any::<prop::sample::Index>(), 1..4_u64)),
    );
    (node, arguments, rest).prop_map(
        |((code, node, other), (names, numbers, words), (data, uid, cut, forgets))| Step {
            code,
            node,
            other,
            names,
            numbers,
            words,
            data,
            uid,
            cut,
            forgets,
        },
    )
}

/// The arguments of a request, as they lie in it.
#[derive(Default)]
struct Arguments(Vec<u8>);

impl Arguments {
    fn u32s(mut self, words: &[u32]) -> Arguments {
        words.iter().for_each(|word| self.0.extend_from_slice(&word.to_ne_bytes()));
        self
    }

    fn u64s(mut self, words: &[u64]) -> Arguments {
        words.iter().for_each(|word| self.0.extend_from_slice(&word.to_ne_bytes()));
        self
    }

    fn name(mut self, name: &[u8]) -> Arguments {
        self.0.extend_from_slice(name);
        self.0.push(0);
        self
    }

    fn bytes(mut self, count: u32, of: u8) -> Arguments {
        self.0.resize(self.0.len() + count as usize, of);
        self
    }
}

impl Step {
    fn arguments(&self, other: u64) -> Vec<u8> {
        let none = Arguments::default();
        let ([first, second], [x, y, z], [a, b, c]) = (&self.names, self.numbers, self.words);
        let size = self.data;
        let filled = match self.code {
            op::LOOKUP | op::UNLINK | op::RMDIR | op::REMOVEXATTR => none.name(first),
            op::GETATTR => none.u32s(&[0, 0]).u64s(&[0]),
            // Valid ones; size; times; their nanoseconds, mode, owner, group.
            op::SETATTR => none.u32s(&[a, 0]).u64s(&[0, x, 0, y, z, z]).u32s(&[
                self.data.wrapping_mul(40_000),
                a,
                b,
                b,
                0,
                c,
                self.uid,
                0,
            ]),
            op::SYMLINK => none.name(first).name(&second.repeat(1 + size as usize % 40)),
            op::MKNOD => none.u32s(&[a, b, c & 0o777, 0]).name(first),
            op::MKDIR => none.u32s(&[a, c & 0o777]).name(first),
            op::RENAME => none.u64s(&[other]).name(first).name(second),
            op::RENAME2 => none.u64s(&[other]).u32s(&[a, 0]).name(first).name(second),
            op::LINK => none.u64s(&[other]).name(first),
            op::OPEN | op::OPENDIR => none.u32s(&[a, 0]),
            op::READ | op::READDIR | op::READDIRPLUS => {
                none.u64s(&[0, x]).u32s(&[size, 0]).u64s(&[0]).u32s(&[a, 0])
            }
            op::WRITE => {
                none.u64s(&[0, x]).u32s(&[size, a & 7]).u64s(&[0]).u32s(&[b, 0]).bytes(size, x as u8)
            }
            op::RELEASEDIR => none.u64s(&[0]).u32s(&[a, b]).u64s(&[0]),
            op::FSYNC | op::FSYNCDIR => none.u64s(&[0]).u32s(&[a & 1, 0]),
            op::SETXATTR => none.u32s(&[size, a & 3]).name(first).bytes(size, x as u8),
            op::GETXATTR => none.u32s(&[size * (a & 1), 0]).name(first),
            op::LISTXATTR => none.u32s(&[size * (a & 1), 0]),
            op::FLUSH => none.u64s(&[0]).u32s(&[0, 0]).u64s(&[x]),
            op::GETLK | op::SETLKW => none.u64s(&[0, x, y, z]).u32s(&[a, b, c, 0]),
            op::ACCESS => none.u32s(&[a, 0]),
            op::CREATE | op::TMPFILE => none.u32s(&[a, b, c & 0o777, 0]).name(first),
            op::INTERRUPT => none.u64s(&[x]),
            op::BMAP => none.u64s(&[x]).u32s(&[a, 0]),
            op::IOCTL => none.u64s(&[0]).u32s(&[a, b]).u64s(&[x]).u32s(&[0, size]),
            op::POLL => none.u64s(&[0, x]).u32s(&[a, b]),
            op::FALLOCATE => none.u64s(&[0, x, y]).u32s(&[a, 0]),
            op::LSEEK => none.u64s(&[0, x]).u32s(&[a, 0]),
            op::COPY_FILE_RANGE => none.u64s(&[0, x, other, 0, y, z, u64::from(a)]),
            op::SYNCFS => none.u64s(&[0]),
            op::STATX => none.u32s(&[0, 0]).u64s(&[0]).u32s(&[a, b]),
            _ => none.u64s(&[x, y, z]),
        };
        let mut filled = filled.0;
        filled.truncate(self.cut.map_or(usize::MAX, usize::from));
        filled
    }

    /// Whether an answer names an inode, to which that is a reference.
    fn refers(&self) -> bool {
        matches!(
            self.code,
            op::LOOKUP | op::SYMLINK | op::MKNOD | op::MKDIR | op::LINK | op::CREATE | op::TMPFILE
        )
    }
}

/// An answer: its errno, or what it says.
type Answer = Result<Vec<u8>, i32>;

/// The end of the kernel.
struct Kernel {
    end: OwnedFd,
    cache: Cache,
    unique: u64,
    /// How many references there are to an inode.
    referred: BTreeMap<u64, u64>,
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

impl Kernel {
    fn send(&mut self, code: u32, node: u64, uid: u32, arguments: &[u8]) -> u64 {
        self.unique += 2;
        let len = (REQUEST_HEAD + arguments.len()) as u32;
        let head = Arguments::default().u32s(&[len, code]).u64s(&[self.unique, node]).u32s(&[uid, uid, 0, 0]);
        let request = [head.0, arguments.to_vec()].concat();
        rustix::net::send(&self.end, &request, SendFlags::empty()).unwrap();
        self.unique
    }

    /// The next answer, and to what; none in time. What the server says unasked is passed over.
    fn next(&self) -> Option<(u64, Answer)> {
        let mut message = vec![0; ANSWER_HEAD + 2 * DATA_BYTES_MAX as usize];
        loop {
            let (count, whole) = match rustix::net::recv(&self.end, &mut message[..], RecvFlags::TRUNC) {
                Err(Errno::AGAIN) => return None,
                received => received.expect("the server is there"),
            };
            assert_eq!(count, whole, "an answer is longer than anything that was asked for");
            assert!(count >= ANSWER_HEAD, "no answer has {count} bytes");
            let message = &message[..count];
            assert_eq!(word_at(message, 0) as usize, count, "an answer says its length");
            let (error, unique) = (word_at(message, 4) as i32, number_at(message, 8));
            if unique == 0 {
                continue;
            }
            assert!((-4095..=0).contains(&error), "no error is {error}");
            assert!(error == 0 || count == ANSWER_HEAD, "an error says no more");
            return Some((
                unique,
                if error == 0 { Ok(message[ANSWER_HEAD..].to_vec()) } else { Err(-error) },
            ));
        }
    }

    fn ask(&mut self, code: u32, node: u64, arguments: &[u8]) -> Answer {
        let asked = self.send(code, node, 0, arguments);
        let (unique, answer) = self.next().expect("an answer in time");
        assert_eq!(unique, asked);
        answer
    }

    fn number_of(&self, which: &Which) -> u64 {
        match which {
            Which::Root => ROOT,
            Which::Known(_) if self.referred.is_empty() => ROOT,
            Which::Known(at) => *at.get(&self.referred.keys().copied().collect::<Vec<_>>()),
            Which::Any(number) => *number,
        }
    }

    /// Where opens are counted, the one of a file that was made is given back at once.
    fn refer(&mut self, step: &Step, said: &[u8]) {
        let number = number_at(said, 0);
        if number == 0 {
            return;
        }
        *self.referred.entry(number).or_default() += 1;
        if self.cache == Cache::None && matches!(step.code, op::CREATE | op::TMPFILE) {
            self.released(number);
        }
    }

    fn released(&mut self, number: u64) {
        let arguments = Arguments::default().u64s(&[0]).u32s(&[0, 0]).u64s(&[0]);
        self.ask(op::RELEASE, number, &arguments.0).expect("a release is taken");
    }

    /// All entries of a listing but `.` and `..` are references.
    fn refer_listed(&mut self, mut said: &[u8]) {
        const ENTRY: usize = 128;
        while !said.is_empty() {
            let (number, len) = (number_at(said, 0), word_at(said, ENTRY + 16) as usize);
            let name = &said[ENTRY + 24..ENTRY + 24 + len];
            if number != 0 && !matches!(name, b"." | b"..") {
                *self.referred.entry(number).or_default() += 1;
            }
            said = &said[(ENTRY + 24 + len).next_multiple_of(8)..];
        }
    }

    fn take(&mut self, step: &Step, node: u64, answer: Answer) -> Result<(), TestCaseError> {
        match answer {
            // A panic, or media and memory that disagree.
            Err(libc::EIO) => return Err(TestCaseError::fail(format!("EIO: {step:?} of {node}"))),
            Err(_) => {}
            Ok(said) if step.refers() => self.refer(step, &said),
            Ok(said) if step.code == op::READDIRPLUS => self.refer_listed(&said),
            Ok(_) if step.code == op::OPEN && self.cache == Cache::None => self.released(node),
            Ok(_) => {}
        }
        Ok(())
    }

    /// Some references come back, by either of two requests. The root's are the kernel's for good.
    fn forget(&mut self, number: u64, count: u64) {
        let Some(referred) = self.referred.get_mut(&number) else { return };
        let count = count.min(*referred);
        *referred -= count;
        if *referred == 0 {
            self.referred.remove(&number);
        }
        if count % 2 == 0 {
            self.send(op::FORGET, number, 0, &Arguments::default().u64s(&[count]).0);
        } else {
            let each = Arguments::default().u32s(&[1, 0]).u64s(&[number, count]);
            self.send(op::BATCH_FORGET, 0, 0, &each.0);
        }
    }

    fn begin(&mut self) {
        // All that a kernel may have, said in both words.
        let arguments = Arguments::default().u32s(&[7, 40, 128 << 10, u32::MAX, u32::MAX]).u32s(&[0; 11]);
        self.send(op::INIT, 0, 0, &arguments.0);
    }

    fn run(&mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for together in steps.chunks(AT_ONCE) {
            let mut asked = BTreeMap::new();
            for step in together {
                let (node, other) = (self.number_of(&step.node), self.number_of(&step.other));
                asked.insert(self.send(step.code, node, step.uid, &step.arguments(other)), (step, node));
            }
            let mut said = Vec::new();
            while !asked.is_empty() {
                let (unique, answer) =
                    self.next().unwrap_or_else(|| panic!("no answer in {LATE:?} to {asked:#?}"));
                let (step, node) = asked.remove(&unique).expect("an answer was asked for, and is the first");
                said.push((step, node, answer));
            }
            for (step, node, answer) in said {
                self.take(step, node, answer)?;
            }
            for (at, count) in together.iter().filter_map(|step| step.forgets.as_ref()) {
                self.forget(self.number_of(&Which::Known(*at)), *count);
            }
        }
        Ok(())
    }
}

fn used(fs: &Fs<Pool>) -> u64 {
    let told = fs.statfs();
    told.inodes - told.inodes_free
}

/// How many inodes have a name.
fn named(fs: &Fs<Pool>) -> u64 {
    let (mut found, mut left) = (HashSet::new(), vec![Ino::ROOT]);
    while let Some(dir) = left.pop() {
        let listed = fs.readdir(dir, 0, &mut |e| {
            if !matches!(e.name, b"." | b"..") && found.insert(e.ino) && e.kind == Kind::Directory {
                left.push(e.ino);
            }
            true
        });
        listed.expect("a directory is listed");
    }
    found.len() as u64
}

fn serve_all(steps: &[Step], cache: Cache) -> Result<(), TestCaseError> {
    let pool =
        Pool::memfd(POOL_BYTES, &PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() })
            .unwrap();
    let fs = Fs::open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap(), &OpenOptions::default()).unwrap();
    let used_at_first = used(&fs);
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Recv, Some(LATE)).unwrap();
    let mut kernel = Kernel { end: ours, cache, unique: 0, referred: BTreeMap::new() };
    kernel.begin();
    let settings = Settings {
        threads: THREADS,
        cache,
        write_bytes_max: DATA_BYTES_MAX,
        sync_names: false,
        asks_opens: false,
        class_by_priority: false,
    };
    let door = FuseDoor::agree(Arc::clone(&fs), theirs, &settings, false).unwrap();
    let (_, agreed) = kernel.next().expect("an answer in time");
    prop_assert!(agreed.is_ok());
    let served = door.serve().unwrap();
    let result = kernel.run(steps);
    let all: Vec<_> = kernel.referred.clone().into_iter().collect();
    for (number, count) in all {
        kernel.forget(number, count);
    }
    drop(kernel);
    // A connection that ends without a word is no end that the kernel makes.
    let _ = served();
    result?;
    prop_assert_eq!(used(&fs) - used_at_first, named(&fs), "what has no name and no reference goes");
    fs.close().map_err(|e| TestCaseError::fail(e.to_string()))?;
    // Who was asked to make the kernel forget may not have ended.
    while Arc::strong_count(&fs) > 1 {
        std::thread::yield_now();
    }
    let media = fs.abandon().expect("nobody else has it");
    let report = check::check(&media).map_err(|e| TestCaseError::fail(e.to_string()))?;
    prop_assert!(report.is_clean(), "{:?}", report);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_requests_are_answered_and_leave_the_pool_whole(
        steps in prop::collection::vec(step(), 1..200),
        cache in prop::sample::select(&[Cache::Auto, Cache::None][..]),
    ) {
        serve_all(&steps, cache)?;
    }
}
