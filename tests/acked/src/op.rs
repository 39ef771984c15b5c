//! The operations: drawn from a seed and a model, executed on a pool, applied to the model.

use std::fmt;
use std::sync::Arc;

use lodestone::Error;
use lodestone::fs::RENAME_EXCHANGE;
use lodestone::fs::files::Files;
use lodestone::media::Pool;

use crate::model::{DIRECTORIES, Entry, File, Model, SHARED, SHARED_BYTES};

const FILE_BYTES_MAX: usize = 160 << 10;
const WRITE_BYTES_MAX: usize = 40 << 10;
const FILES_MAX: usize = 24;
const OWN_DIRECTORIES_MAX: usize = 6;
const PAGE: usize = 4096;

/// One call, or a few of which one changes something.
pub enum Op {
    Create { path: String, mode: u32 },
    Mkdir { path: String },
    Symlink { path: String, target: String },
    Write { path: String, at: usize, data: Vec<u8> },
    Append { path: String, data: Vec<u8> },
    Shared { thread: usize, at: usize, data: Vec<u8> },
    Truncate { path: String, size: usize },
    Punch { path: String, at: usize, len: usize },
    Chmod { path: String, mode: u32 },
    SetXattr { path: String, name: String, value: Vec<u8> },
    RemoveXattr { path: String, name: String },
    Link { from: String, to: String },
    Unlink { path: String },
    Rmdir { path: String },
    Rename { from: String, to: String },
    Exchange { from: String, to: String },
    Fsync { path: String },
}

impl Op {
    /// Makes the change through the library.
    pub fn execute(&self, files: &Files<Pool>) -> Result<(), Error> {
        let with = |path: &str, flags: i32, mode: u32, call: &dyn Fn(i32) -> Result<(), Error>| {
            let fd = files.open(path.as_bytes(), flags, mode)?;
            let done = call(fd);
            files.close(fd)?;
            done
        };
        match self {
            Op::Create { path, mode } => {
                with(path, libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, *mode, &|_| Ok(()))
            }
            Op::Mkdir { path } => files.mkdir(path.as_bytes(), 0o755),
            Op::Symlink { path, target } => files.symlink(target.as_bytes(), path.as_bytes()),
            Op::Write { path, at, data } => {
                with(path, libc::O_WRONLY, 0, &|fd| whole(files.pwrite(fd, data, *at as i64)?, data))
            }
            Op::Append { path, data } => {
                with(path, libc::O_WRONLY | libc::O_APPEND, 0, &|fd| whole(files.write(fd, data)?, data))
            }
            Op::Shared { thread, at, data } => with(SHARED, libc::O_WRONLY, 0, &|fd| {
                whole(files.pwrite(fd, data, (thread * SHARED_BYTES + at) as i64)?, data)
            }),
            Op::Truncate { path, size } => files.truncate(path.as_bytes(), *size as i64),
            Op::Punch { path, at, len } => with(path, libc::O_WRONLY, 0, &|fd| {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                files.fallocate(fd, mode, *at as i64, *len as i64)
            }),
            Op::Chmod { path, mode } => files.chmod(path.as_bytes(), *mode),
            Op::SetXattr { path, name, value } => {
                files.setxattr(path.as_bytes(), true, name.as_bytes(), value, 0)
            }
            Op::RemoveXattr { path, name } => files.removexattr(path.as_bytes(), true, name.as_bytes()),
            Op::Link { from, to } => files.link(from.as_bytes(), to.as_bytes()),
            Op::Unlink { path } => files.unlink(path.as_bytes()),
            Op::Rmdir { path } => files.rmdir(path.as_bytes()),
            Op::Rename { from, to } => files.rename(from.as_bytes(), to.as_bytes(), 0),
            Op::Exchange { from, to } => files.rename(from.as_bytes(), to.as_bytes(), RENAME_EXCHANGE),
            Op::Fsync { path } => with(path, libc::O_RDONLY, 0, &|fd| files.fsync(fd)),
        }
    }

    /// The same change to the model.
    pub fn change(&self, model: &mut Model) {
        match self {
            Op::Create { path, mode } => {
                let number = model.number();
                model.files.insert(number, Arc::new(File { mode: *mode, ..File::default() }));
                model.entries.insert(path.clone(), Entry::File(number));
            }
            Op::Mkdir { path } => {
                let number = model.number();
                model.entries.insert(path.clone(), Entry::Dir(number));
            }
            Op::Symlink { path, target } => {
                let number = model.number();
                model.entries.insert(path.clone(), Entry::Symlink(number, target.clone()));
            }
            Op::Write { path, at, data } => store(&mut model.file_at(path).data, *at, data),
            Op::Append { path, data } => model.file_at(path).data.extend_from_slice(data),
            Op::Shared { at, data, .. } => store(Arc::make_mut(&mut model.shared), *at, data),
            Op::Truncate { path, size } => model.file_at(path).data.resize(*size, 0),
            Op::Punch { path, at, len } => {
                let file = &mut model.file_at(path).data;
                let end = file.len().min(at + len);
                if *at < end {
                    file[*at..end].fill(0);
                }
            }
            Op::Chmod { path, mode } => model.file_at(path).mode = *mode,
            Op::SetXattr { path, name, value } => {
                model.file_at(path).xattrs.insert(name.clone(), value.clone());
            }
            Op::RemoveXattr { path, name } => {
                model.file_at(path).xattrs.remove(name);
            }
            Op::Link { from, to } => {
                let entry = model.entries[from].clone();
                model.entries.insert(to.clone(), entry);
            }
            Op::Unlink { path } => {
                model.entries.remove(path);
                model.forget_nameless();
            }
            Op::Rmdir { path } => {
                model.entries.remove(path);
            }
            // Two names of one file: rename does nothing and succeeds.
            Op::Rename { from, to } if model.entries.get(to) == Some(&model.entries[from]) => {}
            Op::Rename { from, to } => {
                move_below(model, from, to);
                model.forget_nameless();
            }
            Op::Exchange { from, to } => {
                let entry = model.entries[from].clone();
                let other = model.entries.insert(to.clone(), entry).expect("both exist");
                model.entries.insert(from.clone(), other);
            }
            Op::Fsync { .. } => {}
        }
    }
}

/// A name, and where it is a directory all below it, moves.
fn move_below(model: &mut Model, from: &str, to: &str) {
    let inside = format!("{from}/");
    let moving: Vec<String> =
        model.entries.keys().filter(|p| *p == from || p.starts_with(&inside)).cloned().collect();
    for path in moving {
        let entry = model.entries.remove(&path).expect("it was listed");
        model.entries.insert(format!("{to}{}", &path[from.len()..]), entry);
    }
}

fn store(held: &mut Vec<u8>, at: usize, data: &[u8]) {
    if held.len() < at + data.len() {
        held.resize(at + data.len(), 0);
    }
    held[at..at + data.len()].copy_from_slice(data);
}

fn whole(done: usize, data: &[u8]) -> Result<(), Error> {
    if done == data.len() {
        return Ok(());
    }
    Err(Error::message(libc::EIO, "acked::op", format!("{done} of {} bytes written", data.len())))
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Create { path, mode } => write!(f, "create {path} {mode:o}"),
            Op::Mkdir { path } => write!(f, "mkdir {path}"),
            Op::Symlink { path, .. } => write!(f, "symlink {path}"),
            Op::Write { path, at, data } => write!(f, "write {path} {at}+{}", data.len()),
            Op::Append { path, data } => write!(f, "append {path} {}", data.len()),
            Op::Shared { thread, at, data } => write!(f, "write {SHARED} of {thread} {at}+{}", data.len()),
            Op::Truncate { path, size } => write!(f, "truncate {path} {size}"),
            Op::Punch { path, at, len } => write!(f, "punch {path} {at}+{len}"),
            Op::Chmod { path, mode } => write!(f, "chmod {path} {mode:o}"),
            Op::SetXattr { path, name, value } => write!(f, "setxattr {path} {name} {}", value.len()),
            Op::RemoveXattr { path, name } => write!(f, "removexattr {path} {name}"),
            Op::Link { from, to } => write!(f, "link {from} {to}"),
            Op::Unlink { path } => write!(f, "unlink {path}"),
            Op::Rmdir { path } => write!(f, "rmdir {path}"),
            Op::Rename { from, to } => write!(f, "rename {from} {to}"),
            Op::Exchange { from, to } => write!(f, "exchange {from} {to}"),
            Op::Fsync { path } => write!(f, "fsync {path}"),
        }
    }
}

/// The operations of one thread in one round: the same for the same seed and the same models.
pub struct Draw {
    random: Random,
    seed: u64,
    thread: usize,
    count: u64,
    /// Of so many syncs that are drawn one is made.
    syncs: usize,
}

impl Draw {
    pub fn new(seed: u64, thread: usize) -> Draw {
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ (thread as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
        Draw { random: Random(random), seed, thread, count: 0, syncs: 1 }
    }

    /// Where operations are durable by syncs alone: in two of three rounds there are few of them.
    pub fn deferred(seed: u64, thread: usize) -> Draw {
        Draw { syncs: [24, 1, 6][(seed % 3) as usize], ..Draw::new(seed, thread) }
    }

    pub fn next(&mut self, model: &Model) -> Op {
        loop {
            match self.any(model) {
                Op::Fsync { .. } if self.syncs > 1 && self.below(self.syncs) > 0 => {}
                op => return op,
            }
        }
    }

    fn any(&mut self, model: &Model) -> Op {
        self.count += 1;
        let files: Vec<&String> = of_kind(model, |e| matches!(e, Entry::File(_)));
        let own: Vec<&String> = of_kind(model, |e| matches!(e, Entry::Dir(_)));
        let symlinks: Vec<&String> = of_kind(model, |e| matches!(e, Entry::Symlink(..)));
        let below = |dir: &str| model.entries.keys().any(|p| p.starts_with(&format!("{dir}/")));
        let fresh = self.fresh(&own);
        let roll = self.below(100);
        if files.is_empty() || roll < 8 && files.len() < FILES_MAX {
            return Op::Create { path: fresh, mode: [0o644, 0o600][self.below(2)] };
        }
        let path = files[self.below(files.len())].clone();
        let other = files[self.below(files.len())].clone();
        let Some(Entry::File(number)) = model.entries.get(&path) else {
            unreachable!("it was found by kind")
        };
        let file = &model.files[number];
        let size = file.data.len();
        match roll {
            0..8 => Op::Unlink { path },
            8..28 => {
                let data = self.data();
                let at = self.below((size + 3 * PAGE).min(FILE_BYTES_MAX - data.len()) + 1);
                Op::Write { path, at, data }
            }
            28..44 => match self.data() {
                data if size + data.len() <= FILE_BYTES_MAX => Op::Append { path, data },
                _ => Op::Truncate { path, size: 10 },
            },
            44..52 => {
                let mut data = self.data();
                data.truncate(SHARED_BYTES);
                let at = self.below(SHARED_BYTES - data.len() + 1);
                Op::Shared { thread: self.thread, at, data }
            }
            52..58 => Op::Truncate { path, size: self.below((size + 2 * PAGE).min(FILE_BYTES_MAX)) },
            58..61 => Op::Punch { path, at: self.below(size + 1), len: 1 + self.below(3 * PAGE) },
            61..64 => Op::Chmod { path, mode: [0o640, 0o604, 0o755][self.below(3)] },
            64..69 => {
                let name = format!("user.{}", self.below(4));
                let value_bytes = [0, 20, 300][self.below(3)];
                Op::SetXattr { path, name, value: self.bytes(value_bytes) }
            }
            69..71 => match file.xattrs.keys().next() {
                Some(name) => Op::RemoveXattr { path, name: name.clone() },
                None => Op::Fsync { path },
            },
            71..75 if files.len() < FILES_MAX => Op::Link { from: path, to: fresh },
            71..79 => Op::Unlink { path },
            79..84 => Op::Rename { from: path, to: fresh },
            84..88 => Op::Rename { from: path, to: other },
            88..91 => Op::Exchange { from: path, to: other },
            91..93 if own.len() < OWN_DIRECTORIES_MAX => Op::Mkdir { path: fresh },
            91..95 => match own.iter().find(|dir| !below(dir)) {
                Some(dir) => Op::Rmdir { path: (*dir).clone() },
                None => Op::Unlink { path },
            },
            95..97 => match own.get(self.below(own.len().max(1))) {
                // A directory may go anywhere but below itself.
                Some(dir) if !fresh.starts_with(&format!("{dir}/")) => {
                    Op::Rename { from: (*dir).clone(), to: fresh }
                }
                _ => Op::Fsync { path },
            },
            97..99 => match symlinks.first() {
                Some(link) => Op::Unlink { path: (*link).clone() },
                None => Op::Symlink { path: fresh, target: "t".repeat(1 + self.below(300)) },
            },
            _ => Op::Fsync { path },
        }
    }

    /// A path that never was.
    fn fresh(&mut self, own: &[&String]) -> String {
        let dir = self.below(DIRECTORIES.len() + own.len());
        let dir = DIRECTORIES.get(dir).copied().unwrap_or_else(|| own[dir - DIRECTORIES.len()]);
        format!("{dir}/t{}-{}-{}", self.thread, self.seed, self.count)
    }

    fn data(&mut self) -> Vec<u8> {
        let any = 1 + self.below(WRITE_BYTES_MAX);
        let bytes = [1, 64, 500, PAGE, 1 + any % (2 * PAGE), any][self.below(6)];
        self.bytes(bytes)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.random.next().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u64) as usize
    }
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

fn of_kind(model: &Model, is: impl Fn(&Entry) -> bool) -> Vec<&String> {
    model.entries.iter().filter(|(_, e)| is(e)).map(|(path, _)| path).collect()
}
