//! `lode cp FROM... TO`: files into, out of and between pools.
//!
//! A file is written where it will stay, not beside it, as cp(1) does: what cannot be finished (the pool is
//! full, somebody pressed Ctrl-C) is removed again if this copy created it, and told in any case. What a
//! command cannot copy does not keep it from the rest, unless the medium itself fails.
//!
//! Two things are never written over: the files of the host behind the pools that are open, by whatever name, and
//! what the same command just made of another source.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use lodestone::fs::Kind;
use lodestone::media::FileIdentity;
use lodestone::quote::Quoted;
use lodestone::{Error, Result};

use crate::cli;
use crate::failure::{self, Failure, complain, reason, remedy};
use crate::interrupt;
use crate::pool::{Access, Pools};
use crate::progress::Progress;
use crate::target::{PoolPath, Target};
use crate::tree::{HostTree, Sink, Source, Stat, Tree, base_name, check_length, join, parent};

/// One read and one write, in bytes; an interrupt is asked for once in each.
const CHUNK_BYTES: usize = 1 << 20;

pub fn run(args: &cli::Cp) -> failure::Result<()> {
    if args.from.iter().chain([&args.to]).all(|t| matches!(t, Target::Host(_))) {
        return Err(Failure::usage("no argument names a pool (POOL:/path); for files of the host use cp"));
    }
    let mut pools = Pools::new();
    // The pool that is written first: one that is read and written must be opened for writing.
    if let Target::Pool(to) = &args.to {
        pools.open(&to.pool, Access::Write)?;
    }
    for from in &args.from {
        if let Target::Pool(from) = from {
            pools.open(&from.pool, Access::Read)?;
        }
    }
    interrupt::catch();
    let complete = {
        let mut copier = Copier::new(args, &pools);
        let ended = copier.all();
        copier.progress.finish();
        ended.map(|()| copier.failures == 0)
    };
    pools.close()?;
    if complete? { Ok(()) } else { Err(Failure::Reported) }
}

/// A file on one of the sides.
#[derive(Clone)]
struct Place<'a> {
    tree: &'a dyn Tree,
    of_host: bool,
    /// As messages begin: `demo.pool:`, or nothing for the host.
    prefix: Rc<[u8]>,
    path: Vec<u8>,
}

impl<'a> Place<'a> {
    fn of(target: &Target, pools: &'a Pools) -> Place<'a> {
        match target {
            Target::Host(path) => {
                let path = path.as_os_str().as_bytes().to_vec();
                Place { tree: &HostTree, of_host: true, prefix: Rc::from([]), path }
            }
            Target::Pool(PoolPath { pool, path }) => Place {
                tree: pools.tree(pool),
                of_host: false,
                prefix: Rc::from([pool.as_bytes(), b":"].concat()),
                path: path.clone(),
            },
        }
    }

    fn below(&self, name: &[u8]) -> Place<'a> {
        Place { path: join(&self.path, name), ..self.clone() }
    }

    /// Goes to what has this name in the directory.
    fn go_down(&mut self, name: &[u8]) {
        self.path = join(&self.path, name);
    }

    fn stat(&self, follow: bool) -> Result<Option<Stat>> {
        match self.tree.stat(&self.path, follow) {
            Ok(stat) => Ok(Some(stat)),
            Err(e) if e.errno() == libc::ENOENT => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl std::fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Quoted(&[&self.prefix, &self.path[..]].concat()).fmt(f)
    }
}

/// A directory that is being copied: how long its paths are on both sides, what it is, and which names are left.
struct Level {
    from: usize,
    to: usize,
    stat: Stat,
    lent: u32,
    names: std::vec::IntoIter<Vec<u8>>,
}

/// What became of an entry.
enum Copied {
    /// All of it is there, or nothing had to be done.
    Done,
    /// The directory is there, with nothing in it.
    Begun(Stat, Begun),
}

/// A directory that is there to be filled.
struct Begun {
    names: Vec<Vec<u8>>,
    /// Rights that its owner has only until all is in it.
    lent: u32,
}

/// Why one file was not copied, with what became of the destination.
struct Stopped {
    error: Error,
    aftermath: String,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Stopped {
        Stopped { error, aftermath: String::new() }
    }
}

struct Copier<'a> {
    args: &'a cli::Cp,
    pools: &'a Pools,
    /// What -a has copied of files with more than one name.
    copied: HashMap<(u64, u64), Vec<u8>>,
    /// Directories that this copy made: they must not be copied into themselves.
    made: HashSet<(u64, u64)>,
    /// What was copied, and of which source: nothing else may be written over it.
    written: HashMap<(u64, u64), (u64, u64)>,
    buffer: Vec<u8>,
    failures: u64,
    progress: Progress,
}

impl<'a> Copier<'a> {
    fn new(args: &'a cli::Cp, pools: &'a Pools) -> Copier<'a> {
        Copier {
            args,
            pools,
            copied: HashMap::new(),
            made: HashSet::new(),
            written: HashMap::new(),
            buffer: vec![0; CHUNK_BYTES],
            failures: 0,
            progress: Progress::new(),
        }
    }

    /// Ends early only where going on makes no sense.
    fn all(&mut self) -> failure::Result<()> {
        let to = Place::of(&self.args.to, self.pools);
        let found = check_length(&to.path).and_then(|()| to.stat(true)).map_err(|e| cannot_write(&to, &e))?;
        let into = found.is_some_and(|s| s.kind == Kind::Directory);
        if !into && (self.args.from.len() > 1 || to.path.ends_with(b"/") && !self.is_recursive()) {
            return Err(Failure::failed(format_args!("{to} is no directory")));
        }
        for from in &self.args.from {
            let from = Place::of(from, self.pools);
            let name = base_name(&from.path);
            // "dir/." and the root directory are copied as their contents.
            let contents = name.is_empty() || matches!(name, b"." | b"..");
            let target = if into && !contents { to.below(name) } else { to.clone() };
            self.tree(from, target)?;
        }
        Ok(())
    }

    fn is_recursive(&self) -> bool {
        self.args.recursive || self.args.archive
    }

    /// Copies what stands at `from` and all below it, however deep; tells a failure and goes on where that makes sense.
    fn tree(&mut self, mut from: Place, mut to: Place) -> failure::Result<()> {
        let mut levels: Vec<Level> = Vec::new();
        loop {
            match self.copy(&from, &to, levels.is_empty()) {
                Ok(Copied::Done) => {}
                Ok(Copied::Begun(stat, Begun { names, lent })) => levels.push(Level {
                    from: from.path.len(),
                    to: to.path.len(),
                    stat,
                    lent,
                    names: names.into_iter(),
                }),
                Err(stopped) => self.tell(&from, &to, stopped)?,
            }
            // To the next name, and up from directories that have none left.
            loop {
                let Some(level) = levels.last_mut() else { return Ok(()) };
                from.path.truncate(level.from);
                to.path.truncate(level.to);
                if let Some(name) = level.names.next() {
                    from.go_down(&name);
                    to.go_down(&name);
                    break;
                }
                let (stat, lent) = (level.stat, level.lent);
                levels.pop();
                if let Err(e) = self.end_directory(&from, &to, &stat, lent) {
                    self.tell(&from, &to, e.into())?;
                }
            }
        }
    }

    /// Says what was not copied. The error ends the command: going on makes no sense.
    fn tell(&mut self, from: &Place, to: &Place, stopped: Stopped) -> failure::Result<()> {
        self.failures += 1;
        let (errno, why) = (stopped.error.errno(), reason(&stopped.error));
        let line =
            format!("cannot copy {from} to {to}: {why}{}{}", self.pools.remedy(errno), stopped.aftermath);
        self.progress.suspend(|| complain(line));
        match errno {
            libc::EINTR | libc::EIO | libc::ENOSPC | libc::EDQUOT | libc::EROFS => Err(Failure::Reported),
            _ => Ok(()),
        }
    }

    /// Of a directory without what is in it.
    fn copy(&mut self, from: &Place, to: &Place, top: bool) -> Result<Copied, Stopped> {
        let Some(stat) = self.prepare(from, to, top)? else { return Ok(Copied::Done) };
        match stat.kind {
            // Asked of what the user named: nothing below it can lead out of the one and into the other.
            Kind::Directory if top && is_inside(to, stat.file) => Err(into_itself().into()),
            Kind::Directory if self.made.contains(&stat.file) => Err(into_itself().into()),
            Kind::Directory => Ok(Copied::Begun(stat, self.make_directory(from, to, &stat)?)),
            _ => {
                self.file(from, to, &stat)?;
                self.note(to, &stat)?;
                Ok(Copied::Done)
            }
        }
    }

    /// One source has no place twice. A link that was followed stays one.
    fn note(&mut self, to: &Place, stat: &Stat) -> Result<()> {
        if self.args.from.len() > 1
            && let Some(written) = to.stat(stat.kind != Kind::Symlink)?
        {
            self.written.insert(written.file, stat.file);
        }
        Ok(())
    }

    /// Refuses what one of the pools is made of, by whatever name.
    fn refuse_pool(&self, place: &Place, stat: &Stat) -> Result<()> {
        match place.of_host && self.pools.is_made_of(identity(stat)) {
            true => Err(refused(libc::EINVAL, format!("{place} is the pool that is being copied"))),
            false => Ok(()),
        }
    }

    /// What the source is, once it is clear that it may stand at `to`; none where this command has copied it there.
    fn prepare(&self, from: &Place, to: &Place, top: bool) -> Result<Option<Stat>> {
        if interrupt::requested() {
            return Err(interrupted());
        }
        if top {
            check_length(&from.path)?;
        }
        let follow = !self.is_recursive();
        let stat = from.tree.stat(&from.path, follow)?;
        if stat.kind == Kind::Directory && !self.is_recursive() {
            return Err(refused(libc::EISDIR, "it is a directory; add -r"));
        }
        self.refuse_pool(from, &stat)?;
        // As with open(2): a slash asks for a directory, and only one is made by such a name.
        if top && to.path.ends_with(b"/") && stat.kind != Kind::Directory {
            return Err(Error::new(libc::ENOTDIR, "lode::cp"));
        }
        let Some(old) = to.stat(false)? else { return Ok(Some(stat)) };
        // A link met inside a tree could lead anywhere, and -a keeps attributes of what has the name: only
        // the one that the user named is followed, and not by -a.
        let followed = top && (stat.kind == Kind::Directory || !self.args.archive);
        let led = match to.stat(true) {
            Err(e) if followed => return Err(e),
            led => led.ok().flatten(),
        };
        led.iter().try_for_each(|led| self.refuse_pool(to, led))?;
        if old.file == stat.file {
            return Err(refused(libc::EINVAL, "they are the same file"));
        }
        match (stat.kind == Kind::Directory, old.kind == Kind::Directory) {
            (true, false) if !(top && is_directory(to)?) => {
                return Err(refused(libc::ENOTDIR, "there is a file of this name"));
            }
            (false, true) => return Err(refused(libc::EISDIR, "there is a directory of this name")),
            _ => {}
        }
        let target = if followed { led } else { Some(old) };
        let Some(target) = target else {
            return Err(refused(libc::ENOENT, "it is a symbolic link that leads nowhere; remove it first"));
        };
        if target.file == stat.file {
            return Err(refused(libc::EINVAL, "they are the same file"));
        }
        match [target, old].iter().find_map(|there| self.written.get(&there.file)) {
            Some(source) if *source == stat.file => {
                let what = if stat.kind == Kind::Directory { "directory" } else { "file" };
                let line = format!("warning: source {what} {from} specified more than once");
                self.progress.suspend(|| complain(line));
                return Ok(None);
            }
            Some(_) if stat.kind != Kind::Directory => {
                return Err(refused(libc::EEXIST, "it would overwrite what this copy just made"));
            }
            _ => {}
        }
        // As cp(1) with -a: what has other names, too, stays what it is under those.
        let is_shared = self.args.archive && old.nlink > 1;
        if stat.kind != Kind::Directory && is_shared || old.kind == Kind::Symlink && !followed {
            to.tree.unlink(&to.path)?;
        }
        Ok(Some(stat))
    }

    /// All that is in it has been copied, or told of.
    fn end_directory(&mut self, from: &Place, to: &Place, stat: &Stat, lent: u32) -> Result<()> {
        // Last, because it may take the right to write into it, and writing changes its times.
        if self.args.archive {
            self.keep_attributes_of_directory(from, to, stat)?;
        } else if lent != 0 {
            let mode = to.tree.stat(&to.path, true)?.mode;
            to.tree.chmod(&to.path, mode & !lent)?;
        }
        self.note(to, stat)
    }

    fn make_directory(&mut self, from: &Place, to: &Place, stat: &Stat) -> Result<Begun> {
        let names = from.tree.names(&from.path)?;
        let mut lent = 0;
        if to.stat(true)?.is_none() {
            lent = 0o700 & !stat.mode;
            to.tree.mkdir(&to.path, stat.mode & 0o777 | lent)?;
            self.made.insert(to.tree.stat(&to.path, true)?.file);
        }
        Ok(Begun { names, lent })
    }

    /// Anything but a directory.
    fn file(&mut self, from: &Place, to: &Place, stat: &Stat) -> Result<(), Stopped> {
        let linked = self.args.archive && stat.nlink > 1;
        if linked && let Some(first) = self.copied.get(&stat.file) {
            replace(to)?;
            return Ok(to.tree.link(first, &to.path)?);
        }
        match stat.kind {
            Kind::Symlink => {
                replace(to)?;
                to.tree.symlink(&from.tree.readlink(&from.path)?, &to.path)?;
            }
            Kind::File => self.contents(from, to, stat)?,
            _ if self.is_recursive() => {
                replace(to)?;
                to.tree.mknod(&to.path, stat.kind.mode_bits() | stat.mode & 0o777, stat.rdev)?;
            }
            _ => self.contents(from, to, stat)?,
        }
        if self.args.archive {
            self.keep_attributes(from, to, stat)?;
        }
        if linked {
            self.copied.insert(stat.file, to.path.clone());
        }
        Ok(())
    }

    /// As [`keep_attributes`](fn@keep_attributes); what is lost of them is said, and counts as a failure.
    fn keep_attributes(&mut self, from: &Place, to: &Place, stat: &Stat) -> Result<()> {
        let mut lost = Vec::new();
        let kept = keep_attributes(from, to, stat, &mut lost);
        for (name, e) in lost {
            self.failures += 1;
            let (name, why, remedy) = (Quoted(&name), reason(&e), remedy(e.errno()));
            let line = format!("cannot copy attribute {name} of {from} to {to}: {why}{remedy}");
            self.progress.suspend(|| complain(line));
        }
        kept
    }

    /// Of what a symbolic link leads to where one stands for the directory.
    fn keep_attributes_of_directory(&mut self, from: &Place, to: &Place, stat: &Stat) -> Result<()> {
        match to.stat(false)? {
            Some(link) if link.kind == Kind::Symlink => self.keep_attributes(from, &to.below(b"."), stat),
            _ => self.keep_attributes(from, to, stat),
        }
    }

    fn contents(&mut self, from: &Place, to: &Place, stat: &Stat) -> Result<(), Stopped> {
        let source = from.tree.open(&from.path)?;
        let existed = to.stat(true)?.is_some();
        // With -a the mode comes last: until then it is the owner's alone, who must write it to give it xattrs.
        let mode = if self.args.archive { stat.mode & 0o700 | 0o200 } else { stat.mode & 0o777 };
        let sink = to.tree.create(&to.path, mode, false)?;
        self.progress.file(&to.to_string(), stat.size);
        let mut written = 0;
        let copied = self.data(&*source, &*sink, &mut written);
        drop(sink);
        copied.map_err(|error| {
            let aftermath = if existed {
                let of_all = match stat.kind {
                    Kind::File => format!(" of {}", stat.size),
                    _ => String::new(),
                };
                format!("; {to} is incomplete: {written}{of_all} bytes")
            } else if to.tree.unlink(&to.path).is_ok() {
                "; the incomplete copy was removed".to_string()
            } else {
                format!("; {to} is incomplete and could not be removed")
            };
            Stopped { error, aftermath }
        })
    }

    /// The data that is there, at its offset; holes stay where there can be some.
    fn data(&mut self, source: &dyn Source, sink: &dyn Sink, written: &mut u64) -> Result<()> {
        let mut at = 0;
        while let Some((start, end)) = source.next_data(at)? {
            self.hole(sink, at..start, written)?;
            at = start;
            while at < end {
                let room = (end - at).min(CHUNK_BYTES as u64) as usize;
                let read = source.read(at, &mut self.buffer[..room]);
                if interrupt::requested() {
                    return Err(interrupted());
                }
                let n = read?;
                if n == 0 {
                    return sink.set_len(at);
                }
                sink.write(at, &self.buffer[..n])?;
                at += n as u64;
                *written = at;
                self.progress.advance(n as u64);
            }
        }
        let size = source.stat()?.size.max(at);
        self.hole(sink, at..size, written)?;
        sink.set_len(size)
    }

    /// A hole of the source: zeros for what would keep its old bytes there, or hand on those behind it too early.
    fn hole(&mut self, sink: &dyn Sink, hole: Range<u64>, written: &mut u64) -> Result<()> {
        if sink.has_holes() {
            self.progress.advance(hole.end - hole.start);
            return Ok(());
        }
        let mut at = hole.start;
        while at < hole.end {
            if interrupt::requested() {
                return Err(interrupted());
            }
            let room = (hole.end - at).min(CHUNK_BYTES as u64) as usize;
            let zeros = &mut self.buffer[..room];
            zeros.fill(0);
            sink.write(at, zeros)?;
            at += room as u64;
            *written = at;
            self.progress.advance(room as u64);
        }
        Ok(())
    }
}

fn cannot_write(to: &Place, e: &Error) -> Failure {
    Failure::failed(format_args!("cannot copy to {to}: {}{}", reason(e), remedy(e.errno())))
}

fn refused(errno: i32, why: impl Into<String>) -> Error {
    Error::message(errno, "lode::cp", why)
}

/// What a file of the host is, as the media of pools know it.
fn identity(stat: &Stat) -> FileIdentity {
    match stat.kind {
        Kind::BlockDevice => FileIdentity::BlockDevice { rdev: stat.rdev },
        Kind::CharDevice => FileIdentity::CharDevice { rdev: stat.rdev },
        _ => FileIdentity::File { dev: stat.file.0, ino: stat.file.1 },
    }
}

fn into_itself() -> Error {
    refused(libc::EINVAL, "it would be copied into itself")
}

fn interrupted() -> Error {
    refused(libc::EINTR, "interrupted")
}

fn is_directory(place: &Place) -> Result<bool> {
    Ok(place.stat(true)?.is_some_and(|s| s.kind == Kind::Directory))
}

/// Whether `place` is, or is to be, somewhere below the directory `above`.
fn is_inside(place: &Place, above: (u64, u64)) -> bool {
    let mut path = join(parent(&place.path), b".");
    let mut below = None;
    // What cannot be asked for is left to the directories that were made.
    while let Ok(stat) = place.tree.stat(&path, true) {
        if stat.file == above {
            return true;
        }
        if below.replace(stat.file) == Some(stat.file) {
            return false; // the root is its own parent
        }
        path.extend_from_slice(b"/..");
    }
    false
}

/// Makes room for something that cannot be created over what is there.
fn replace(to: &Place) -> Result<()> {
    match to.tree.unlink(&to.path) {
        Err(e) if e.errno() == libc::ENOENT => Ok(()),
        other => other,
    }
}

/// Owner, mode, xattrs and times, in an order in which none undoes another. As cp(1) with -a: what only
/// root may give is left where the caller is not root, and xattrs where the other side has none. What else it does
/// not take is added to `lost`, with the reason.
fn keep_attributes(from: &Place, to: &Place, stat: &Stat, lost: &mut Vec<(Vec<u8>, Error)>) -> Result<()> {
    let tree = to.tree;
    let owned = match tree.chown(&to.path, Some(stat.uid), stat.gid) {
        Ok(()) => true,
        Err(e) if matches!(e.errno(), libc::EPERM | libc::EACCES | libc::EINVAL) => {
            // The group may be one of the caller's: the mode's bits for the group are meant for that one.
            let _ = tree.chown(&to.path, None, stat.gid);
            false
        }
        Err(e) => return Err(e),
    };
    let attributes = xattrs(from)?;
    for list in access_lists(stat.kind) {
        // From a directory's default list, or of what was overwritten: rights that the source does not give.
        if attributes.iter().any(|(name, _)| name == list) {
            continue;
        }
        match tree.set_xattr(&to.path, list, b"") {
            Ok(()) => {}
            Err(e) if matches!(e.errno(), libc::EOPNOTSUPP | libc::ENODATA) => {}
            Err(e) if matches!(e.errno(), libc::EIO | libc::EROFS) => return Err(e),
            Err(e) => lost.push((list.to_vec(), e)),
        }
    }
    for (name, value) in attributes {
        match tree.set_xattr(&to.path, &name, &value) {
            Ok(()) => {}
            Err(e) if e.errno() == libc::EOPNOTSUPP => {}
            Err(e) if matches!(e.errno(), libc::EPERM | libc::EACCES) && is_of_root(&name) => {}
            Err(e) if matches!(e.errno(), libc::EIO | libc::EROFS) => return Err(e),
            Err(e) => lost.push((name, e)),
        }
    }
    tree.set_times(&to.path, stat.atime, stat.mtime)?;
    if stat.kind != Kind::Symlink {
        // Last, because it may take the right to search it. Set-id bits would give away the rights of the wrong owner.
        tree.chmod(&to.path, if owned { stat.mode } else { stat.mode & 0o1777 })?;
    }
    Ok(())
}

/// Those of a file, access lists last: they may take the right to give it others.
fn xattrs(from: &Place) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    match from.tree.xattrs(&from.path) {
        Err(e) if e.errno() == libc::EOPNOTSUPP => Ok(Vec::new()),
        Err(e) => Err(e),
        Ok(mut all) => {
            all.sort_by_key(|(name, _)| name.starts_with(b"system."));
            Ok(all)
        }
    }
}

/// The access control lists that a file of this kind may have.
fn access_lists(kind: Kind) -> &'static [&'static [u8]] {
    const LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    match kind {
        Kind::Symlink => &[],
        Kind::Directory => &LISTS,
        _ => &LISTS[..1],
    }
}

/// Whether xattrs of such a name are for the superuser alone to give.
fn is_of_root(name: &[u8]) -> bool {
    name.starts_with(b"trusted.") || name.starts_with(b"security.")
}
