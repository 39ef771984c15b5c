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

/// In place of an errno: no call failed, and what they answered cannot all be so.
pub(super) const CONTRADICTS: i32 = 0;

/// Times of the simulation are in seconds; each has nanoseconds of its own.
pub(super) fn time(sec: i64) -> Time {
    Time::new(sec, (sec as u32).wrapping_mul(7_654_321) % 1_000_000_000)
}

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
    /// What a listing says of each name besides; the oracle knows nothing of it.
    pub listed: BTreeMap<Vec<u8>, Listed>,
    /// What ".." leads to.
    pub parent: u32,
}

/// An entry of a directory, as it is listed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Listed {
    pub cookie: u64,
    pub kind: Kind,
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
        Tree::look(fs, open).map_err(|(_, e)| e)
    }

    /// The same: the error is a number, and words.
    pub(super) fn look<M: Media>(
        fs: &Fs<M>,
        open: impl IntoIterator<Item = Ino>,
    ) -> Result<Tree, (i32, String)> {
        let mut tree = Tree::default();
        let mut queue = vec![Ino::ROOT];
        while let Some(ino) = queue.pop() {
            let Entry::Vacant(place) = tree.named.entry(ino.0) else { continue };
            let seen = Seen::read(fs, ino)?;
            queue.extend(seen.names.values().map(|child| Ino(*child)));
            place.insert(Arc::new(seen));
        }
        for ino in open {
            if let (false, Entry::Vacant(place)) =
                (tree.named.contains_key(&ino.0), tree.nameless.entry(ino.0))
            {
                place.insert(Arc::new(Seen::read(fs, ino)?));
            }
        }
        tree.kinds().map_err(|e| (CONTRADICTS, e))?;
        Ok(tree)
    }

    /// Names are listed as what they lead to.
    fn kinds(&self) -> Result<(), String> {
        for (dir, seen) in &self.named {
            for (name, entry) in &seen.listed {
                let child = seen.names[name];
                if Kind::from_mode(self.named[&child].mode) != Some(entry.kind) {
                    let (name, kind) = (String::from_utf8_lossy(name), entry.kind);
                    return Err(format!(
                        "inode {dir} lists {name} as a {kind:?}, which inode {child} is not"
                    ));
                }
            }
        }
        Ok(())
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
            size: if seen.mode & libc::S_IFMT == libc::S_IFDIR { 0 } else { seen.size },
            names: seen.names.iter().map(|(name, ino)| (name.clone(), ids[ino])).collect(),
            listed: BTreeMap::new(),
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

/// What bytes are before they are read: nothing that a hole has.
const UNREAD: u8 = 0xa5;

fn contradicts(what: String) -> crate::Error {
    crate::Error::message(CONTRADICTS, "sim::tree", what)
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
                // Holes are read, too, and what is reserved.
                seen.content.resize(attr.size as usize, UNREAD);
                let count = undecided::content(|| fs.read_at(&node, 0, &mut seen.content))?;
                if count as u64 != attr.size {
                    return Err(contradicts(format!("{count} of {} bytes are read", attr.size)));
                }
                let mut at = 0;
                while at < attr.size {
                    let from = match fs.seek_node(&node, at, libc::SEEK_DATA) {
                        Err(e) if e.errno() == libc::ENXIO => break,
                        from => from?,
                    };
                    at = fs.seek_node(&node, from, libc::SEEK_HOLE)?;
                    seen.data.push((from, at));
                }
            }
            Kind::Symlink => seen.content = fs.readlink(ino)?,
            Kind::Directory => seen.list(fs, ino)?,
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

    /// Reads a directory: names, each once, from the newest cookie down; and once more from the middle on.
    fn list<M: Media>(&mut self, fs: &Fs<M>, ino: Ino) -> crate::Result<()> {
        let mut order: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut twice = None;
        fs.readdir(ino, 0, &mut |e| {
            match e.name {
                b"." => {}
                b".." => self.parent = e.ino.0,
                name => {
                    let entry = Listed { cookie: e.cookie, kind: e.kind };
                    self.listed.insert(name.to_vec(), entry);
                    if self.names.insert(name.to_vec(), e.ino.0).is_some() {
                        twice = Some(String::from_utf8_lossy(name).into_owned());
                    }
                    order.push((e.cookie, name.to_vec()));
                }
            }
            true
        })?;
        if let Some(name) = twice {
            return Err(contradicts(format!("{name} is listed twice")));
        }
        if !order.is_sorted_by(|a, b| a.0 > b.0) {
            let cookies: Vec<u64> = order.iter().map(|(cookie, _)| *cookie).collect();
            return Err(contradicts(format!("cookies do not fall: {cookies:?}")));
        }
        let middle = order.len() / 2;
        let Some((cookie, _)) = order.get(middle) else { return Ok(()) };
        let mut rest = Vec::new();
        fs.readdir(ino, *cookie, &mut |e| {
            rest.push((e.cookie, e.name.to_vec()));
            true
        })?;
        match rest == order[middle + 1..] {
            true => Ok(()),
            false => Err(contradicts(format!("listed from cookie {cookie} on, it has {rest:?}"))),
        }
    }

    fn of_node(node: &model::Node) -> Seen {
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
            listed: BTreeMap::new(),
            parent: 0,
        };
        match &node.body {
            Body::File(file) => {
                Seen { size: file.bytes.len() as u64, content: file.bytes.clone(), data: file.data(), ..seen }
            }
            Body::Directory { names, parent } => Seen { names: names.clone(), parent: *parent, ..seen },
            Body::Symlink(target) => Seen { size: target.len() as u64, content: target.clone(), ..seen },
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
            listed: BTreeMap::new(),
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
        let listed = |seen: &Seen| -> Vec<String> {
            let entry = |(n, e): (&Vec<u8>, &Listed)| {
                format!("{}: {:?} at {}", String::from_utf8_lossy(n), e.kind, e.cookie)
            };
            seen.listed.iter().map(entry).collect()
        };
        field("listed", &listed(self), &listed(wanted));
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
    let mut parents = Vec::new();
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
        if let Body::Directory { names, parent } = &node.body {
            // One that has no name leads nowhere that counts.
            if node.links > 0 {
                parents.push((path.clone(), seen.parent, *parent));
            }
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
    if let Some((path, parent, _)) = parents.iter().find(|(_, ino, id)| pairs.get(ino) != Some(id)) {
        return Err(format!("{path}: \"..\" leads to inode {parent}, which is not where it stands"));
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
    for (name, is, sec) in [
        ("mtime", seen.mtime, node.mtime),
        ("ctime", seen.ctime, node.ctime),
        ("btime", seen.btime, node.btime),
    ] {
        if is != time(sec) {
            return Err(format!("{name} is {is:?}, should be {:?}", time(sec)));
        }
    }
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
        Body::Symlink(target) => {
            same("size", seen.size, target.len() as u64)?;
            if seen.content != *target {
                return Err("it leads elsewhere than it should".to_owned());
            }
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::model::Target;
    use crate::sim::workload::Op;

    fn model(ops: &[&str]) -> Model {
        let mut model = Model::new(1);
        ops.iter().for_each(|op| op.parse::<Op>().unwrap().on_model(&mut model, 1).unwrap());
        model
    }

    /// Where, how, and what is said of it.
    type Wrong = (&'static str, fn(&mut Seen), &'static str);

    /// What there should be, but for what `forges` makes of one inode.
    fn forged(model: &Model, path: &str, forges: fn(&mut Seen)) -> Result<(), String> {
        let mut tree = Tree::of(model);
        compare(&tree, model, &[]).unwrap();
        let id = model.resolve(path, false).unwrap();
        forges(Arc::make_mut(tree.named.get_mut(&id).unwrap()));
        compare(&tree, model, &[])
    }

    #[test]
    fn what_is_wrong_with_one_inode_is_told() {
        let model = model(&["mkdir A", "mkdir A/C", "symlink foo ln", "create foo", "write foo 0 9000"]);
        let wrong: [Wrong; 8] = [
            ("A/C", |seen| seen.parent = model::ROOT, "\"..\" leads to"),
            ("A", |seen| seen.parent = 99, "\"..\" leads to"),
            ("", |seen| seen.parent = 99, "\"..\" leads to"),
            ("ln", |seen| seen.size += 1, "size is"),
            ("ln", |seen| seen.content[0] ^= 1, "leads elsewhere"),
            ("foo", |seen| seen.mtime.nsec ^= 1, "mtime is"),
            ("foo", |seen| seen.content[8999] ^= 1, "byte 8999 is"),
            ("foo", |seen| seen.data.clear(), "data stands at"),
        ];
        for (path, forges, says) in wrong {
            let refused = forged(&model, path, forges).unwrap_err();
            assert!(refused.contains(says), "{path}: {refused}");
        }
    }

    #[test]
    fn a_directory_without_a_name_stands_nowhere() {
        let mut model = model(&["mkdir A", "mkdir B"]);
        let a = model.resolve("A", false).unwrap();
        model.hold(0, "A").unwrap();
        model.rmdir("A").unwrap();
        let tree = Tree::of(&model);
        assert!(tree.nameless.contains_key(&a) && model.chmod(&Target::Slot(0), 0o755) == Ok(()));
        compare(&tree, &model, &[(0, Ino(a))]).unwrap();
    }

    #[test]
    fn a_kind_that_is_another_contradicts() {
        let mut tree = Tree::of(&model(&["create foo"]));
        let list = |tree: &mut Tree, kind| {
            let root = Arc::make_mut(tree.named.get_mut(&model::ROOT).unwrap());
            root.listed.insert(b"foo".to_vec(), Listed { cookie: 3, kind });
        };
        list(&mut tree, Kind::File);
        tree.kinds().unwrap();
        list(&mut tree, Kind::Symlink);
        assert!(tree.kinds().unwrap_err().contains("lists foo as a Symlink"));
    }
}
