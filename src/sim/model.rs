//! The oracle: what POSIX and Linux say a file system does, in memory, without a thought for speed or for
//! crashes. It shares no code and no types with `fs/`, so that the two cannot be wrong together.
//!
//! Every call is the superuser's. A call answers `Ok` or the errno that Linux answers, and an error changes
//! nothing. Times are what [`Model::now`] was when something changed; access times are not kept.

use std::collections::{BTreeMap, BTreeSet};

/// Numbers nodes; never used twice.
pub type Id = u32;
/// The errno where it failed.
pub type Outcome<T = ()> = Result<T, i32>;

pub const ROOT: Id = 1;
const PAGE: u64 = 4096;
const NAME_BYTES_MAX: usize = 255;
const LINKS_FOLLOWED_MAX: u32 = 40;

/// A whole file system.
#[derive(Clone)]
pub struct Model {
    nodes: BTreeMap<Id, Node>,
    last: Id,
    /// What a slot that a program keeps open stands for.
    opens: BTreeMap<u8, Id>,
    /// The time, in seconds.
    pub now: i64,
}

#[derive(Clone, Debug)]
pub struct Node {
    /// Type and permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    /// Directory entries that name it; of a directory also its own "." and its children's "..".
    pub links: u32,
    pub mtime: i64,
    pub ctime: i64,
    pub btime: i64,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub body: Body,
    /// A file whose blocks stand still: neither its data nor its names change.
    pub fixed: bool,
    /// Made without a name and never named: may get one.
    linkable: bool,
}

#[derive(Clone, Debug)]
pub enum Body {
    File(File),
    Directory {
        names: BTreeMap<Vec<u8>, Id>,
        parent: Id,
    },
    Symlink(Vec<u8>),
    /// A fifo, a socket or a device.
    Special,
}

/// The content, and which of its pages have space: with data (true), or only reserved.
#[derive(Clone, Debug, Default)]
pub struct File {
    pub bytes: Vec<u8>,
    pub pages: BTreeMap<u64, bool>,
}

/// What a call is made on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Path(String),
    Slot(u8),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Target::Path(path) => f.write_str(path),
            Target::Slot(slot) => write!(f, "@{slot}"),
        }
    }
}

/// How a range of a file gets or loses its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Falloc {
    Reserve,
    ReserveKeepSize,
    Punch,
    Zero,
    ZeroKeepSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rename {
    Plain,
    NoReplace,
    Exchange,
    Whiteout,
}

/// Whether an attribute may or must be there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Any,
    Create,
    Replace,
}

impl File {
    /// Bytes `[from, to)` are written, whatever the file had there.
    fn write(&mut self, at: u64, src: &[u8]) {
        let end = at + src.len() as u64;
        if self.bytes.len() < end as usize {
            self.bytes.resize(end as usize, 0);
        }
        self.bytes[at as usize..end as usize].copy_from_slice(src);
        for page in at / PAGE..end.div_ceil(PAGE) {
            self.pages.insert(page, true);
        }
    }

    /// What is reserved behind the end is given back, but where the file grows.
    fn resize(&mut self, size: u64) {
        if size <= self.bytes.len() as u64 {
            self.pages.retain(|page, _| *page < size.div_ceil(PAGE));
        }
        self.bytes.resize(size as usize, 0);
    }

    fn reserve(&mut self, pages: std::ops::Range<u64>) {
        for page in pages {
            self.pages.entry(page).or_insert(false);
        }
    }

    fn zero(&mut self, from: u64, to: u64) {
        let end = (self.bytes.len() as u64).min(to);
        if from < end {
            self.bytes[from as usize..end as usize].fill(0);
        }
        // Whole pages lose their data.
        self.pages.retain(|page, _| !(from.div_ceil(PAGE)..to / PAGE).contains(page));
    }

    /// Where data is, as SEEK_DATA and SEEK_HOLE tell: ranges of bytes in front of the end of file.
    pub fn data(&self) -> Vec<(u64, u64)> {
        let size = self.bytes.len() as u64;
        let mut found: Vec<(u64, u64)> = Vec::new();
        for page in self.pages.iter().filter(|(page, data)| **data && **page * PAGE < size).map(|(p, _)| *p) {
            let (from, to) = (page * PAGE, ((page + 1) * PAGE).min(size));
            match found.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => found.push((from, to)),
            }
        }
        found
    }
}

impl Node {
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    fn is_dir(&self) -> bool {
        matches!(self.body, Body::Directory { .. })
    }

    fn names(&self) -> Outcome<&BTreeMap<Vec<u8>, Id>> {
        match &self.body {
            Body::Directory { names, .. } => Ok(names),
            _ => Err(libc::ENOTDIR),
        }
    }

    fn names_mut(&mut self) -> &mut BTreeMap<Vec<u8>, Id> {
        match &mut self.body {
            Body::Directory { names, .. } => names,
            _ => panic!("not a directory"),
        }
    }

    /// Blocks of 512 bytes that stat(2) counts.
    pub fn blocks(&self) -> u64 {
        match &self.body {
            Body::File(file) => file.pages.len() as u64 * (PAGE / 512),
            _ => 0,
        }
    }
}

impl Model {
    /// An empty root directory.
    pub fn new(now: i64) -> Model {
        let mut model = Model { nodes: BTreeMap::new(), last: ROOT - 1, opens: BTreeMap::new(), now };
        model.add(libc::S_IFDIR | 0o755, Body::Directory { names: BTreeMap::new(), parent: ROOT });
        model.node_mut(ROOT).links = 2;
        model
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[&id]
    }

    pub fn nodes(&self) -> impl Iterator<Item = (Id, &Node)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).expect("a node in use is there")
    }

    /// What is open, by slot.
    pub fn opens(&self) -> &BTreeMap<u8, Id> {
        &self.opens
    }

    /// Every path but the root's, parents first.
    pub fn paths(&self) -> Vec<(String, Id)> {
        let mut found = Vec::new();
        let mut queue = vec![(String::new(), ROOT)];
        while let Some((path, dir)) = queue.pop() {
            let Ok(names) = self.node(dir).names() else { continue };
            for (name, id) in names {
                let path = format!("{path}{}", String::from_utf8_lossy(name));
                queue.push((format!("{path}/"), *id));
                found.push((path, *id));
            }
        }
        found.sort();
        found
    }

    // ---------------------------------------------------------------------------------------------
    // Paths

    /// What a path leads to, from the root, or as `@7/name` from what is open at a slot; `follow`: also where its
    /// last name is a symbolic link.
    pub fn resolve(&self, path: &str, follow: bool) -> Outcome<Id> {
        let (from, path) = match path.strip_prefix('@') {
            Some(at) => {
                let (slot, path) = at.split_once('/').unwrap_or((at, ""));
                let open = slot.parse().ok().and_then(|slot: u8| self.opens.get(&slot));
                (*open.ok_or(libc::EBADF)?, path)
            }
            None => (ROOT, path),
        };
        self.walk(from, path.as_bytes(), follow, &mut 0)
    }

    fn walk(&self, from: Id, path: &[u8], follow: bool, followed: &mut u32) -> Outcome<Id> {
        let mut at = if path.first() == Some(&b'/') { ROOT } else { from };
        let parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).collect();
        for (n, part) in parts.iter().enumerate() {
            let last = n + 1 == parts.len();
            let child = self.child(at, part)?;
            at = match &self.node(child).body {
                Body::Symlink(target) if !last || follow => {
                    *followed += 1;
                    if *followed > LINKS_FOLLOWED_MAX {
                        return Err(libc::ELOOP);
                    }
                    self.walk(at, target, true, followed)?
                }
                _ => child,
            };
        }
        Ok(at)
    }

    fn child(&self, dir: Id, name: &[u8]) -> Outcome<Id> {
        let node = self.node(dir);
        let names = node.names()?;
        match (name, &node.body) {
            (b".", _) => Ok(dir),
            (b"..", Body::Directory { parent, .. }) => Ok(*parent),
            _ if name.len() > NAME_BYTES_MAX => Err(libc::ENAMETOOLONG),
            _ => names.get(name).copied().ok_or(libc::ENOENT),
        }
    }

    /// The directory of a path's last name, and the name.
    fn place(&self, path: &str) -> Outcome<(Id, Vec<u8>)> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.resolve(dir, true)?;
        self.node(dir).names()?;
        Ok((dir, name.as_bytes().to_vec()))
    }

    /// A place where a name can appear.
    fn free_place(&self, path: &str) -> Outcome<(Id, Vec<u8>)> {
        let (dir, name) = self.place(path)?;
        match self.child(dir, &name) {
            Ok(_) => Err(libc::EEXIST),
            Err(libc::ENOENT) if self.node(dir).links == 0 => Err(libc::ENOENT),
            Err(libc::ENOENT) => Ok((dir, name)),
            Err(e) => Err(e),
        }
    }

    fn target(&self, target: &Target, follow: bool) -> Outcome<Id> {
        match target {
            Target::Path(path) => self.resolve(path, follow),
            Target::Slot(slot) => self.opens.get(slot).copied().ok_or(libc::EBADF),
        }
    }

    /// A regular file opened for writing.
    fn writable(&self, target: &Target) -> Outcome<Id> {
        let id = self.target(target, true)?;
        match self.node(id).body {
            Body::File(_) => Ok(id),
            Body::Directory { .. } => Err(libc::EISDIR),
            Body::Symlink(_) => Err(libc::ELOOP),
            Body::Special => Err(libc::ENXIO),
        }
    }

    fn file_mut(&mut self, id: Id) -> &mut File {
        match &mut self.node_mut(id).body {
            Body::File(file) => file,
            _ => panic!("not a file"),
        }
    }

    // ---------------------------------------------------------------------------------------------
    // What a change leaves behind

    fn add(&mut self, mode: u32, body: Body) -> Id {
        self.last += 1;
        let node = Node {
            mode,
            uid: 0,
            gid: 0,
            rdev: 0,
            links: 0,
            mtime: self.now,
            ctime: self.now,
            btime: self.now,
            xattrs: BTreeMap::new(),
            body,
            fixed: false,
            linkable: false,
        };
        self.nodes.insert(self.last, node);
        self.last
    }

    /// Content changed.
    fn modified(&mut self, id: Id) {
        let now = self.now;
        let node = self.node_mut(id);
        (node.mtime, node.ctime) = (now, now);
    }

    /// Something else about it changed.
    fn changed(&mut self, id: Id) {
        self.node_mut(id).ctime = self.now;
    }

    /// `name` now leads from `dir` to `id`.
    fn enter(&mut self, dir: Id, name: Vec<u8>, id: Id) {
        self.node_mut(dir).names_mut().insert(name, id);
        self.modified(dir);
        self.node_mut(id).links += 1;
        if let Body::Directory { parent, .. } = &mut self.node_mut(id).body {
            *parent = dir;
            self.node_mut(dir).links += 1;
        }
    }

    /// `name` leads from `dir` nowhere.
    fn leave(&mut self, dir: Id, name: &[u8]) -> Id {
        let id = self.node_mut(dir).names_mut().remove(name).expect("the caller looked it up");
        self.modified(dir);
        self.node_mut(id).links -= 1;
        if self.node(id).is_dir() {
            self.node_mut(dir).links -= 1;
        }
        id
    }

    /// It lost a name for good.
    fn unnamed(&mut self, id: Id) {
        self.changed(id);
        let node = self.node_mut(id);
        node.linkable = false;
        if node.is_dir() {
            node.links = 0;
        }
        self.forget_unused(id);
    }

    /// A node lives as long as it has a name or is open.
    fn forget_unused(&mut self, id: Id) {
        if self.node(id).links == 0 && !self.opens.values().any(|open| *open == id) {
            self.nodes.remove(&id);
        }
    }

    // ---------------------------------------------------------------------------------------------
    // Calls on names

    fn make(&mut self, path: &str, mode: u32, body: Body) -> Outcome<Id> {
        let (dir, name) = self.free_place(path)?;
        let id = self.add(mode, body);
        self.inherit(dir, id);
        self.enter(dir, name, id);
        Ok(id)
    }

    /// A directory with the set-group-id bit gives its group to what is made in it, and the bit to directories.
    fn inherit(&mut self, dir: Id, id: Id) {
        let (mode, gid) = (self.node(dir).mode, self.node(dir).gid);
        if mode & libc::S_ISGID != 0 {
            let node = self.node_mut(id);
            node.gid = gid;
            if node.is_dir() {
                node.mode |= libc::S_ISGID;
            }
        }
    }

    pub fn create(&mut self, path: &str) -> Outcome {
        self.make(path, libc::S_IFREG | 0o644, Body::File(File::default())).map(drop)
    }

    pub fn mkdir(&mut self, path: &str) -> Outcome {
        let body = Body::Directory { names: BTreeMap::new(), parent: ROOT };
        let id = self.make(path, libc::S_IFDIR | 0o755, body)?;
        self.node_mut(id).links += 1;
        Ok(())
    }

    pub fn mknod(&mut self, path: &str, mode: u32, rdev: u64) -> Outcome {
        let id = self.make(path, mode, Body::Special)?;
        self.node_mut(id).rdev = rdev;
        Ok(())
    }

    pub fn symlink(&mut self, target: &str, path: &str) -> Outcome {
        self.make(path, libc::S_IFLNK | 0o777, Body::Symlink(target.as_bytes().to_vec())).map(drop)
    }

    pub fn link(&mut self, from: &Target, path: &str) -> Outcome {
        let id = self.target(from, false)?;
        let (dir, name) = self.free_place(path)?;
        let node = self.node(id);
        if node.is_dir() {
            return Err(libc::EPERM);
        }
        if node.links == 0 && !node.linkable {
            return Err(libc::ENOENT);
        }
        self.enter(dir, name, id);
        self.changed(id);
        Ok(())
    }

    pub fn unlink(&mut self, path: &str) -> Outcome {
        let (dir, name) = self.place(path)?;
        let node = self.node(self.child(dir, &name)?);
        if node.is_dir() {
            return Err(libc::EISDIR);
        }
        if node.fixed {
            return Err(libc::EPERM);
        }
        let id = self.leave(dir, &name);
        self.unnamed(id);
        Ok(())
    }

    pub fn rmdir(&mut self, path: &str) -> Outcome {
        let (dir, name) = self.place(path)?;
        let node = self.node(self.child(dir, &name)?);
        if node.fixed {
            return Err(libc::EPERM);
        }
        if !node.names()?.is_empty() {
            return Err(libc::ENOTEMPTY);
        }
        let id = self.leave(dir, &name);
        self.unnamed(id);
        Ok(())
    }

    pub fn rename(&mut self, from: &str, to: &str, how: Rename) -> Outcome {
        let (from_dir, from_name) = self.place(from)?;
        let (to_dir, to_name) = self.place(to)?;
        let source = self.child(from_dir, &from_name)?;
        let target = match self.child(to_dir, &to_name) {
            Ok(id) => Some(id),
            Err(libc::ENOENT) => None,
            Err(e) => return Err(e),
        };
        match (how, target) {
            (Rename::NoReplace, Some(_)) => return Err(libc::EEXIST),
            (Rename::Exchange, None) => return Err(libc::ENOENT),
            _ => {}
        }
        if from_dir != to_dir && self.is_above(source, to_dir) {
            return Err(libc::EINVAL);
        }
        if from_dir != to_dir && target.is_some_and(|t| self.is_above(t, from_dir)) {
            return Err(if how == Rename::Exchange { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        if target == Some(source) {
            return Ok(());
        }
        if self.node(source).fixed || target.is_some_and(|target| self.node(target).fixed) {
            return Err(libc::EPERM);
        }
        if let Some(target) = target.filter(|_| how != Rename::Exchange) {
            match (self.node(source).is_dir(), &self.node(target).body) {
                (true, Body::Directory { names, .. }) if !names.is_empty() => return Err(libc::ENOTEMPTY),
                (true, Body::Directory { .. }) => {}
                (true, _) => return Err(libc::ENOTDIR),
                (false, Body::Directory { .. }) => return Err(libc::EISDIR),
                (false, _) => {}
            }
        }
        self.leave(from_dir, &from_name);
        let replaced = target.map(|_| self.leave(to_dir, &to_name));
        self.enter(to_dir, to_name, source);
        self.changed(source);
        match replaced {
            Some(other) if how == Rename::Exchange => {
                self.enter(from_dir, from_name, other);
                self.changed(other);
                return Ok(());
            }
            Some(other) => self.unnamed(other),
            None => {}
        }
        if how == Rename::Whiteout {
            let whiteout = self.add(libc::S_IFCHR, Body::Special);
            self.inherit(from_dir, whiteout);
            self.enter(from_dir, from_name, whiteout);
        }
        Ok(())
    }

    fn is_above(&self, id: Id, mut below: Id) -> bool {
        loop {
            match self.node(below).body {
                _ if below == id => return true,
                Body::Directory { parent, .. } if below != ROOT => below = parent,
                _ => return false,
            }
        }
    }

    // ---------------------------------------------------------------------------------------------
    // Calls on descriptors

    pub fn open(&mut self, slot: u8, path: &str, truncates: bool) -> Outcome {
        let id = self.writable(&Target::Path(path.to_owned()))?;
        if truncates {
            self.changeable(id)?;
        }
        self.opens.insert(slot, id);
        if truncates {
            self.file_mut(id).resize(0);
            self.modified(id);
        }
        Ok(())
    }

    /// What a path leads to, whatever it is, open at a slot.
    pub fn hold(&mut self, slot: u8, path: &str) -> Outcome {
        let id = self.resolve(path, true)?;
        self.opens.insert(slot, id);
        Ok(())
    }

    /// A file without a name.
    pub fn tmpfile(&mut self, slot: u8, dir: &str) -> Outcome {
        let dir = self.resolve(dir, true)?;
        self.node(dir).names()?;
        let id = self.add(libc::S_IFREG | 0o644, Body::File(File::default()));
        self.inherit(dir, id);
        self.node_mut(id).linkable = true;
        self.opens.insert(slot, id);
        Ok(())
    }

    pub fn close(&mut self, slot: u8) -> Outcome {
        let id = self.opens.remove(&slot).ok_or(libc::EBADF)?;
        self.forget_unused(id);
        Ok(())
    }

    // ---------------------------------------------------------------------------------------------
    // Calls on one file

    pub fn write(&mut self, target: &Target, at: u64, src: &[u8]) -> Outcome {
        let id = self.writable(target)?;
        self.changeable(id)?;
        if !src.is_empty() {
            self.file_mut(id).write(at, src);
            self.modified(id);
        }
        Ok(())
    }

    pub fn append(&mut self, target: &Target, src: &[u8]) -> Outcome {
        let id = self.writable(target)?;
        let end = self.file_mut(id).bytes.len() as u64;
        self.write(target, end, src)
    }

    /// Stored through a mapping, which reaches no further than the file.
    pub fn write_back(&mut self, target: &Target, at: u64, src: &[u8]) -> Outcome {
        let id = self.writable(target)?;
        let size = self.file_mut(id).bytes.len() as u64;
        match src.len().min(size.saturating_sub(at) as usize) {
            // Nothing is written, also of what may not be.
            0 => Ok(()),
            len => self.write(target, at, &src[..len]),
        }
    }

    pub fn truncate(&mut self, target: &Target, size: u64) -> Outcome {
        let id = self.target(target, true)?;
        match self.node(id).body {
            Body::File(_) => {}
            Body::Directory { .. } => return Err(libc::EISDIR),
            _ => return Err(libc::EINVAL),
        }
        self.changeable(id)?;
        self.file_mut(id).resize(size);
        self.modified(id);
        Ok(())
    }

    pub fn fallocate(&mut self, target: &Target, how: Falloc, at: u64, len: u64) -> Outcome {
        let id = self.writable(target)?;
        if len == 0 {
            return Err(libc::EINVAL);
        }
        self.changeable(id)?;
        let end = at + len;
        let file = self.file_mut(id);
        if matches!(how, Falloc::Punch | Falloc::Zero | Falloc::ZeroKeepSize) {
            file.zero(at, end);
        }
        if how != Falloc::Punch {
            file.reserve(at / PAGE..end.div_ceil(PAGE));
        }
        if matches!(how, Falloc::Reserve | Falloc::Zero) && (file.bytes.len() as u64) < end {
            file.bytes.resize(end as usize, 0);
        }
        self.modified(id);
        Ok(())
    }

    pub fn setxattr(&mut self, target: &Target, name: &str, value: &[u8], how: Setting) -> Outcome {
        let id = self.attributed(target)?;
        let there = self.node(id).xattrs.contains_key(name.as_bytes());
        match how {
            Setting::Create if there => return Err(libc::EEXIST),
            Setting::Replace if !there => return Err(libc::ENODATA),
            _ => {}
        }
        self.node_mut(id).xattrs.insert(name.as_bytes().to_vec(), value.to_vec());
        self.changed(id);
        Ok(())
    }

    pub fn removexattr(&mut self, target: &Target, name: &str) -> Outcome {
        let id = self.attributed(target)?;
        self.node_mut(id).xattrs.remove(name.as_bytes()).ok_or(libc::ENODATA)?;
        self.changed(id);
        Ok(())
    }

    /// Zeros in an empty file, which from then on stand still.
    pub fn fix(&mut self, target: &Target, bytes: u64) -> Outcome {
        let id = self.target(target, true)?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(libc::EINVAL);
        }
        let node = self.node(id);
        let Body::File(file) = &node.body else { return Err(libc::EINVAL) };
        match node.fixed {
            _ if node.links == 0 => return Err(libc::ENOENT),
            true if file.bytes.len() as u64 == bytes => return Ok(()),
            true => return Err(libc::EEXIST),
            false if !file.bytes.is_empty() || !file.pages.is_empty() => return Err(libc::EEXIST),
            false => {}
        }
        self.file_mut(id).write(0, &vec![0; bytes as usize]);
        self.node_mut(id).fixed = true;
        self.modified(id);
        Ok(())
    }

    pub fn unfix(&mut self, target: &Target) -> Outcome {
        let id = self.target(target, true)?;
        let node = self.node_mut(id);
        if !std::mem::take(&mut node.fixed) {
            return Err(libc::ENODATA);
        }
        self.changed(id);
        Ok(())
    }

    /// ETXTBSY of a file whose data stand still.
    fn changeable(&self, id: Id) -> Outcome {
        if self.node(id).fixed { Err(libc::ETXTBSY) } else { Ok(()) }
    }

    /// What can have attributes of users: neither links nor special files.
    fn attributed(&self, target: &Target) -> Outcome<Id> {
        let id = self.target(target, true)?;
        match self.node(id).body {
            Body::File(_) | Body::Directory { .. } => Ok(id),
            _ => Err(libc::EPERM),
        }
    }

    pub fn chmod(&mut self, target: &Target, mode: u32) -> Outcome {
        let id = self.target(target, true)?;
        let node = self.node_mut(id);
        node.mode = node.kind() | mode & 0o7777;
        self.changed(id);
        Ok(())
    }

    /// Set-id bits fall, even for the superuser: set-group-id where it means execution.
    pub fn chown(&mut self, target: &Target, uid: u32, gid: u32) -> Outcome {
        let id = self.target(target, true)?;
        let node = self.node_mut(id);
        (node.uid, node.gid) = (uid, gid);
        if !node.is_dir() {
            node.mode &= !libc::S_ISUID;
            if node.mode & libc::S_IXGRP != 0 {
                node.mode &= !libc::S_ISGID;
            }
        }
        self.changed(id);
        Ok(())
    }

    pub fn utimens(&mut self, target: &Target, mtime: i64) -> Outcome {
        let id = self.target(target, true)?;
        self.node_mut(id).mtime = mtime;
        self.changed(id);
        Ok(())
    }

    pub fn fsync(&mut self, target: &Target) -> Outcome {
        match self.node(self.target(target, true)?).body {
            Body::Special => Err(libc::ENXIO),
            _ => Ok(()),
        }
    }

    /// All descriptors go; what had no name goes with them.
    pub fn close_all(&mut self) {
        let open: BTreeSet<Id> = std::mem::take(&mut self.opens).into_values().collect();
        open.into_iter().for_each(|id| self.forget_unused(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Target {
        Target::Path(text.to_owned())
    }

    #[test]
    fn a_directory_counts_its_children() {
        let mut m = Model::new(1);
        m.mkdir("A").unwrap();
        m.mkdir("A/C").unwrap();
        m.mkdir("B").unwrap();
        let links = |m: &Model, p: &str| m.node(m.resolve(p, true).unwrap()).links;
        assert_eq!((links(&m, ""), links(&m, "A"), links(&m, "B")), (4, 3, 2));
        m.rename("A/C", "B/C", Rename::Plain).unwrap();
        assert_eq!((links(&m, ""), links(&m, "A"), links(&m, "B")), (4, 2, 3));
        assert_eq!(m.rename("B", "B/C/D", Rename::Plain), Err(libc::EINVAL));
        assert_eq!(m.rename("B/C", "A", Rename::Plain), Ok(()));
        assert_eq!((links(&m, ""), links(&m, "B")), (4, 2));
        assert_eq!(m.rmdir("A"), Ok(()));
        assert_eq!(links(&m, ""), 3);
    }

    #[test]
    fn bytes_behind_a_smaller_size_never_come_back() {
        let mut m = Model::new(1);
        m.create("f").unwrap();
        m.write(&path("f"), 0, &[7; 9000]).unwrap();
        m.truncate(&path("f"), 5000).unwrap();
        m.truncate(&path("f"), 9000).unwrap();
        let Body::File(f) = &m.node(m.resolve("f", true).unwrap()).body else { panic!() };
        assert!(f.bytes[..5000].iter().all(|b| *b == 7) && f.bytes[5000..].iter().all(|b| *b == 0));
        assert_eq!(f.data(), [(0, 8192)]);
    }

    #[test]
    fn an_unlinked_file_lives_until_it_is_closed() {
        let mut m = Model::new(1);
        m.create("f").unwrap();
        m.open(0, "f", false).unwrap();
        m.unlink("f").unwrap();
        assert_eq!(m.write(&Target::Slot(0), 0, b"x"), Ok(()));
        assert_eq!(m.link(&Target::Slot(0), "g"), Err(libc::ENOENT));
        m.close(0).unwrap();
        assert_eq!(m.nodes.len(), 1);
        m.tmpfile(0, "").unwrap();
        assert_eq!(m.link(&Target::Slot(0), "g"), Ok(()));
        m.close(0).unwrap();
        assert_eq!(m.nodes.len(), 2);
    }
}
