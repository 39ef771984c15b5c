//! What a program can see of a file system: every inode that has a name, or is open.
//!
//! Access times are left out: they are kept in memory and may be lost.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::fs::{Attr, Cred, Fs, Ino, Kind, STAMP_BYTES, Time};
use crate::media::Media;

use super::model::{self, Body, Model};
use super::undecided;

/// One inode.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Seen {
    pub generation: u64,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub size: u64,
    pub blocks: u64,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
    /// Of a file its bytes, of a symbolic link its target.
    pub content: Vec<u8>,
    /// Where a file has data: ranges of bytes.
    pub data: Vec<(u64, u64)>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Its blocks stand still, in one piece.
    pub fixed: bool,
    pub names: BTreeMap<Vec<u8>, u32>,
    /// What ".." leads to.
    pub parent: u32,
}

/// By number.
pub type Inodes = BTreeMap<u32, Arc<Seen>>;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tree {
    /// What the root reaches.
    pub named: Inodes,
    /// What is open and has no name.
    pub nameless: Inodes,
}

impl Tree {
    /// Reads everything. The error says what could not be read.
    pub fn read<M: Media>(fs: &Fs<M>, open: impl IntoIterator<Item = Ino>) -> Result<Tree, String> {
        let mut tree = Tree::default();
        let mut queue = vec![Ino::ROOT];
        while let Some(ino) = queue.pop() {
            let Entry::Vacant(place) = tree.named.entry(ino.0) else { continue };
            let seen = Seen::read(fs, ino).map_err(|(_, e)| e)?;
            queue.extend(seen.names.values().map(|child| Ino(*child)));
            place.insert(Arc::new(seen));
        }
        for ino in open {
            if let (false, Entry::Vacant(place)) =
                (tree.named.contains_key(&ino.0), tree.nameless.entry(ino.0))
            {
                place.insert(Arc::new(Seen::read(fs, ino).map_err(|(_, e)| e)?));
            }
        }
        Ok(tree)
    }

    /// What the oracle says, by its own numbers.
    pub fn of(model: &Model) -> Tree {
        let with_name: BTreeSet<model::Id> =
            model.paths().into_iter().map(|(_, id)| id).chain([model::ROOT]).collect();
        let (named, nameless) = model.nodes().partition(|(id, _)| with_name.contains(id));
        let seen = |nodes: Vec<(model::Id, &model::Node)>| -> Inodes {
            nodes.into_iter().map(|(id, node)| (id, Arc::new(Seen::of_node(node)))).collect()
        };
        Tree { named: seen(named), nameless: seen(nameless) }
    }

    /// The same with the oracle's numbers, and without what it knows nothing of.
    pub fn numbered(&self, ids: &BTreeMap<u32, model::Id>) -> Tree {
        let numbered = |seen: &Seen| Seen {
            generation: 0,
            size: if seen.mode & libc::S_IFMT == libc::S_IFREG { seen.size } else { 0 },
            names: seen.names.iter().map(|(name, ino)| (name.clone(), ids[ino])).collect(),
            parent: ids.get(&seen.parent).copied().unwrap_or_default(),
            ..seen.clone()
        };
        let named = self.named.iter().map(|(ino, seen)| (ids[ino], Arc::new(numbered(seen)))).collect();
        Tree { named, nameless: Inodes::new() }
    }

    /// Whether stat of every name, which asks no inode, reports what the inode is.
    pub fn compare_stat<M: Media>(&self, fs: &Fs<M>) -> Result<(), String> {
        let root = Cred::root();
        for (dir, seen) in &self.named {
            for (name, child) in &seen.names {
                let say =
                    |e: crate::Error| format!("{} in inode {dir}: {e:?}", String::from_utf8_lossy(name));
                let by_name =
                    fs.stat(&root, Some(&fs.node(Ino(*dir)).map_err(say)?), name, false).map_err(say)?;
                let is = fs.getattr(Ino(*child)).map_err(say)?;
                if by_name != is {
                    return Err(format!("stat of inode {child} reports {by_name:?}, which is {is:?}"));
                }
            }
        }
        Ok(())
    }

    /// The same number for the same names and what is behind them.
    pub fn digest(&self) -> u64 {
        let mut hasher = rapidhash::fast::RapidHasher::default();
        self.named.hash(&mut hasher);
        hasher.finish()
    }

    /// Takes over what is the same as in `before`, so that it is one thing in memory, too.
    pub fn share(&mut self, before: &Tree) {
        for (ino, seen) in self.named.iter_mut().chain(&mut self.nameless) {
            let was = before.named.get(ino).or_else(|| before.nameless.get(ino));
            if let Some(was) = was.filter(|was| *was == seen) {
                *seen = was.clone();
            }
        }
    }

    /// Every path but the root's.
    pub fn paths(&self) -> Vec<(String, u32)> {
        let mut found = Vec::new();
        let mut queue = vec![(String::new(), Ino::ROOT.0)];
        while let Some((path, dir)) = queue.pop() {
            for (name, ino) in self.named.get(&dir).iter().flat_map(|seen| &seen.names) {
                let path = format!("{path}{}", String::from_utf8_lossy(name));
                queue.push((format!("{path}/"), *ino));
                found.push((path, *ino));
            }
        }
        found.sort();
        found
    }

    /// Where this one, found, differs from what was wanted, in words.
    pub fn differs(&self, wanted: &Tree) -> String {
        let (a, b) = (self.paths(), wanted.paths());
        let mut words = String::new();
        for (path, ino) in a.iter().filter(|p| !b.contains(p)) {
            write!(words, "{path} (inode {ino}) is there; ").expect("memory");
        }
        for (path, ino) in b.iter().filter(|p| !a.contains(p)) {
            write!(words, "{path} (inode {ino}) is missing; ").expect("memory");
        }
        for (ino, seen) in &self.named {
            if let Some(other) = wanted.named.get(ino).filter(|other| *other != seen) {
                let path = a.iter().find(|(_, i)| i == ino).map_or("/", |(p, _)| p.as_str());
                write!(words, "{path} (inode {ino}) {}; ", seen.differs(other)).expect("memory");
            }
        }
        words
    }
}

impl Seen {
    /// The error is a number, and words.
    pub(super) fn read<M: Media>(fs: &Fs<M>, ino: Ino) -> Result<Seen, (i32, String)> {
        Seen::read_all(fs, ino).map_err(|e| (e.errno(), format!("inode {} cannot be read: {e:?}", ino.0)))
    }

    fn read_all<M: Media>(fs: &Fs<M>, ino: Ino) -> crate::Result<Seen> {
        let node = fs.node(ino)?;
        let attr = fs.attr_of(&node)?;
        let mut seen = Seen::of(&attr);
        match attr.kind() {
            Kind::File => {
                seen.content.resize(attr.size as usize, 0);
                let mut at = 0;
                // Holes are zeros already.
                while at < attr.size
                    && let Ok(from) = fs.seek_node(&node, at, libc::SEEK_DATA)
                {
                    at = fs.seek_node(&node, from, libc::SEEK_HOLE)?;
                    undecided::content(|| {
                        fs.read_at(&node, from, &mut seen.content[from as usize..at as usize])
                    })?;
                    seen.data.push((from, at));
                }
            }
            Kind::Symlink => seen.content = fs.readlink(ino)?,
            Kind::Directory => fs.readdir(ino, 0, &mut |e| {
                match e.name {
                    b"." => {}
                    b".." => seen.parent = e.ino.0,
                    name => drop(seen.names.insert(name.to_vec(), e.ino.0)),
                }
                true
            })?,
            _ => {}
        }
        let root = Cred::root();
        for name in fs.listxattr(&root, ino)?.split(|b| *b == 0).filter(|name| !name.is_empty()) {
            seen.xattrs.insert(name.to_vec(), fs.getxattr(&root, ino, name)?);
        }
        // The simulator's pool is in no file.
        seen.fixed = match fs.fixed_place(ino).map_err(|e| (e.errno(), e)) {
            Ok(_) | Err((libc::EOPNOTSUPP, _)) => true,
            Err((libc::ENODATA, _)) => false,
            Err((_, e)) => return Err(e),
        };
        if seen.fixed {
            // The stamp is the file system's business.
            let end = seen.content.len();
            seen.content[end - STAMP_BYTES as usize..].fill(0);
        }
        Ok(seen)
    }

    fn of_node(node: &model::Node) -> Seen {
        let time = |seconds| Time::new(seconds, 0);
        let seen = Seen {
            generation: 0,
            mode: node.mode,
            nlink: node.links,
            uid: node.uid,
            gid: node.gid,
            rdev: node.rdev,
            size: 0,
            blocks: node.blocks(),
            mtime: time(node.mtime),
            ctime: time(node.ctime),
            btime: time(node.btime),
            content: Vec::new(),
            data: Vec::new(),
            xattrs: node.xattrs.clone(),
            fixed: node.fixed,
            names: BTreeMap::new(),
            parent: 0,
        };
        match &node.body {
            Body::File(file) => {
                Seen { size: file.bytes.len() as u64, content: file.bytes.clone(), data: file.data(), ..seen }
            }
            Body::Directory { names, parent } => Seen { names: names.clone(), parent: *parent, ..seen },
            Body::Symlink(target) => Seen { content: target.clone(), ..seen },
            Body::Special => seen,
        }
    }

    fn of(attr: &Attr) -> Seen {
        Seen {
            generation: attr.generation,
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            size: attr.size,
            blocks: attr.blocks,
            mtime: attr.mtime,
            ctime: attr.ctime,
            btime: attr.btime,
            content: Vec::new(),
            data: Vec::new(),
            xattrs: BTreeMap::new(),
            fixed: false,
            names: BTreeMap::new(),
            parent: 0,
        }
    }

    /// Which fields differ, in words.
    pub fn differs(&self, wanted: &Seen) -> String {
        let mut words = String::from("differs:");
        let mut field = |name: &str, a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| {
            let (a, b) = (format!("{a:?}"), format!("{b:?}"));
            if a != b {
                write!(words, " {name} {a}, not {b}").expect("memory");
            }
        };
        field("generation", &self.generation, &wanted.generation);
        field("mode", &format_args!("{:o}", self.mode), &format_args!("{:o}", wanted.mode));
        field("nlink", &self.nlink, &wanted.nlink);
        field("owner", &(self.uid, self.gid), &(wanted.uid, wanted.gid));
        field("rdev", &self.rdev, &wanted.rdev);
        field("size", &self.size, &wanted.size);
        field("blocks", &self.blocks, &wanted.blocks);
        field("mtime", &self.mtime, &wanted.mtime);
        field("ctime", &self.ctime, &wanted.ctime);
        field("btime", &self.btime, &wanted.btime);
        field("data at", &self.data, &wanted.data);
        field("fixed", &self.fixed, &wanted.fixed);
        field("parent", &self.parent, &wanted.parent);
        let names = |seen: &Seen| -> Vec<String> {
            seen.names.iter().map(|(n, i)| format!("{}={i}", String::from_utf8_lossy(n))).collect()
        };
        field("names", &names(self), &names(wanted));
        let xattrs = |seen: &Seen| -> Vec<String> {
            let brief = |(n, v): (&Vec<u8>, &Vec<u8>)| {
                format!("{} of {} bytes {:?}", String::from_utf8_lossy(n), v.len(), v.first())
            };
            seen.xattrs.iter().map(brief).collect()
        };
        field("xattrs", &xattrs(self), &xattrs(wanted));
        if let Some(at) = self.content.iter().zip(&wanted.content).position(|(a, b)| a != b) {
            let same = self.content.iter().zip(&wanted.content).skip(at).position(|(a, b)| a == b);
            let (a, b) = (self.content[at], wanted.content[at]);
            let end = same.map_or("the end".to_owned(), |n| (at + n).to_string());
            write!(words, " content from byte {at} to {end} ({a:#x}, not {b:#x})").expect("memory");
        }
        words
    }
}

// ---------------------------------------------------------------------------------------------------
// Against the oracle

/// Holds a tree against the model: the same names, and behind each the same. `open` tells for slots that the
/// model has open which inodes they stand for.
pub fn compare(tree: &Tree, model: &Model, open: &[(u8, Ino)]) -> Result<(), String> {
    let mut pairs: BTreeMap<u32, model::Id> = BTreeMap::new();
    let mut queue = vec![("/".to_owned(), Ino::ROOT.0, model::ROOT)];
    for (slot, ino) in open {
        let id = model.opens().get(slot).ok_or_else(|| format!("slot {slot} is not open in the model"))?;
        queue.push((format!("slot {slot}"), ino.0, *id));
    }
    let mut by_id: BTreeMap<model::Id, u32> = BTreeMap::new();
    while let Some((path, ino, id)) = queue.pop() {
        match (pairs.insert(ino, id), by_id.insert(id, ino)) {
            (None, None) => {}
            (Some(i), Some(n)) if i == id && n == ino => continue,
            _ => {
                return Err(format!(
                    "{path}: names that should lead to one inode lead to two, or two to one"
                ));
            }
        }
        let seen = tree.named.get(&ino).or_else(|| tree.nameless.get(&ino));
        let seen = seen.ok_or_else(|| format!("{path}: inode {ino} cannot be found"))?;
        let node = model.node(id);
        compare_node(seen, node).map_err(|what| format!("{path}: {what}"))?;
        if let Body::Directory { names, .. } = &node.body {
            if !seen.names.keys().eq(names.keys()) {
                let list = |keys: Vec<&Vec<u8>>| {
                    keys.iter().map(|n| String::from_utf8_lossy(n).into_owned()).collect::<Vec<_>>()
                };
                let (a, b) = (list(seen.names.keys().collect()), list(names.keys().collect()));
                return Err(format!("{path} has {a:?}, should have {b:?}"));
            }
            for ((name, child), id) in seen.names.iter().zip(names.values()) {
                queue.push((format!("{path}{}/", String::from_utf8_lossy(name)), *child, *id));
            }
        }
    }
    let extra = tree.named.len() + tree.nameless.len() - pairs.len();
    if extra > 0 { Err(format!("{extra} inodes are there that should not be")) } else { Ok(()) }
}

fn compare_node(seen: &Seen, node: &model::Node) -> Result<(), String> {
    let same = |name: &str, a: u64, b: u64| {
        if a == b { Ok(()) } else { Err(format!("{name} is {a}, should be {b}")) }
    };
    same("mode", seen.mode.into(), node.mode.into())?;
    same("nlink", seen.nlink.into(), node.links.into())?;
    same("uid", seen.uid.into(), node.uid.into())?;
    same("gid", seen.gid.into(), node.gid.into())?;
    same("rdev", seen.rdev, node.rdev)?;
    same("blocks", seen.blocks, node.blocks())?;
    same("mtime", seen.mtime.sec as u64, node.mtime as u64)?;
    same("ctime", seen.ctime.sec as u64, node.ctime as u64)?;
    same("btime", seen.btime.sec as u64, node.btime as u64)?;
    same("fixed", seen.fixed.into(), node.fixed.into())?;
    if seen.xattrs != node.xattrs {
        return Err("extended attributes are not those it should have".to_owned());
    }
    match &node.body {
        Body::File(file) => {
            same("size", seen.size, file.bytes.len() as u64)?;
            if let Some(at) = seen.content.iter().zip(&file.bytes).position(|(a, b)| a != b) {
                let (a, b) = (seen.content[at], file.bytes[at]);
                return Err(format!("byte {at} is {a:#x}, should be {b:#x}"));
            }
            if seen.data != file.data() {
                return Err(format!("data stands at {:?}, should at {:?}", seen.data, file.data()));
            }
        }
        Body::Symlink(target) if seen.content != *target => {
            return Err("it leads elsewhere than it should".to_owned());
        }
        _ => {}
    }
    Ok(())
}
