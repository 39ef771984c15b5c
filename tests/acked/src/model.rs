//! What one thread has made: its names, files and range of the shared file, in plain memory; read from a pool,
//! or changed by the operations.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use lodestone::Error;
use lodestone::fs::files::Files;
use lodestone::fs::{Ino, Kind};
use lodestone::media::Pool;

/// Directories in which all threads make names.
pub const DIRECTORIES: [&str; 3] = ["/d0", "/d1", "/d2"];
/// A file in which thread `t` owns the bytes from `t * SHARED_BYTES` on.
pub const SHARED: &str = "/shared";
pub const SHARED_BYTES: usize = 32 << 10;

/// What a name leads to, by a number of its own.
#[derive(Clone, PartialEq)]
pub enum Entry {
    /// Its names share it.
    File(usize),
    Dir(usize),
    Symlink(usize, String),
}

impl Entry {
    pub fn number(&self) -> usize {
        match self {
            Entry::File(number) | Entry::Dir(number) | Entry::Symlink(number, _) => *number,
        }
    }
}

#[derive(Clone, Default)]
pub struct File {
    pub data: Vec<u8>,
    pub mode: u32,
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// Copies share what did not change.
#[derive(Clone)]
pub struct Model {
    pub entries: BTreeMap<String, Entry>,
    pub files: BTreeMap<usize, Arc<File>>,
    pub shared: Arc<Vec<u8>>,
    /// The next number. Those below it are never given again; the first are the directories' of all threads.
    pub next: usize,
}

impl Model {
    pub fn new() -> Model {
        Model {
            entries: BTreeMap::new(),
            files: BTreeMap::new(),
            shared: Arc::new(vec![0; SHARED_BYTES]),
            next: DIRECTORIES.len(),
        }
    }

    pub fn number(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    /// What each of `threads` finds of its own in the pool. Names that nobody can have made are an error.
    pub fn read_all(files: &Files<Pool>, threads: usize) -> Result<Vec<Model>, Error> {
        let mut models = vec![Model::new(); threads];
        let mut links = BTreeMap::new();
        let mut to_visit: Vec<String> = DIRECTORIES.map(str::to_owned).to_vec();
        while let Some(dir) = to_visit.pop() {
            for (name, ino, kind) in list(files, &dir)? {
                let path = format!("{dir}/{name}");
                let model = owner(&path).and_then(|t| models.get_mut(t));
                let model = model.ok_or_else(|| wrong(format!("{path} was made by nobody")))?;
                let number = u64::from(ino.0) as usize;
                model.next = model.next.max(number + 1);
                let entry = match kind {
                    Kind::Directory => {
                        to_visit.push(path.clone());
                        Entry::Dir(number)
                    }
                    Kind::Symlink => {
                        let target = files.readlink(path.as_bytes())?;
                        Entry::Symlink(number, String::from_utf8_lossy(&target).into_owned())
                    }
                    _ => {
                        let (file, nlink) = File::read(files, &path)?;
                        let expected = links.entry(number).or_insert((nlink, 0u32, path.clone()));
                        expected.1 += 1;
                        model.files.insert(number, Arc::new(file));
                        Entry::File(number)
                    }
                };
                model.entries.insert(path, entry);
            }
        }
        for (nlink, names, path) in links.into_values() {
            if nlink != names {
                return Err(wrong(format!("{path} has {nlink} links and {names} names")));
            }
        }
        let fd = files.open(SHARED.as_bytes(), libc::O_RDONLY, 0)?;
        for (thread, model) in models.iter_mut().enumerate() {
            let shared = Arc::make_mut(&mut model.shared);
            let n = files.pread(fd, shared, (thread * SHARED_BYTES) as i64)?;
            if n != SHARED_BYTES {
                return Err(wrong(format!("{SHARED} is short")));
            }
        }
        files.close(fd)?;
        Ok(models)
    }

    /// All there is to see, a line per file under its first name, and per directory and link; sorted.
    pub fn lines(&self, thread: usize) -> Vec<String> {
        let mut names: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        let mut lines = Vec::new();
        for (path, entry) in &self.entries {
            match entry {
                Entry::File(number) => names.entry(*number).or_default().push(path),
                Entry::Dir(_) => lines.push(format!("{thread} dir {path}")),
                Entry::Symlink(_, target) => lines.push(format!("{thread} link {path} {target}")),
            }
        }
        for (number, names) in names {
            lines.push(format!("{thread} file {} {}", names.join(","), self.files[&number].line()));
        }
        lines.push(format!("{thread} shared {}", self.shared_line()));
        lines.sort();
        lines
    }

    pub fn shared_line(&self) -> String {
        format!("{:016x}", digest(&self.shared))
    }

    pub fn file_at(&mut self, path: &str) -> &mut File {
        let Entry::File(number) = self.entries[path] else { panic!("{path} is no file") };
        let file = self.files.get_mut(&number).expect("a file has a number as long as it has a name");
        Arc::make_mut(file)
    }

    /// Drops files that lost their last name.
    pub fn forget_nameless(&mut self) {
        let entries = &self.entries;
        self.files.retain(|number, _| entries.values().any(|e| *e == Entry::File(*number)));
    }
}

impl File {
    fn read(files: &Files<Pool>, path: &str) -> Result<(File, u32), Error> {
        let fd = files.open(path.as_bytes(), libc::O_RDONLY, 0)?;
        let attr = files.fstat(fd)?;
        let mut data = vec![0; attr.size as usize];
        if files.pread(fd, &mut data, 0)? != data.len() {
            return Err(wrong(format!("{path} is shorter than its size")));
        }
        let mut xattrs = BTreeMap::new();
        for name in files.flistxattr(fd)?.split(|b| *b == 0).filter(|name| !name.is_empty()) {
            xattrs.insert(String::from_utf8_lossy(name).into_owned(), files.fgetxattr(fd, name)?);
        }
        files.close(fd)?;
        Ok((File { data, mode: attr.mode & 0o7777, xattrs }, attr.nlink))
    }

    /// All there is to see of it but its names.
    pub fn line(&self) -> String {
        let File { data, mode, xattrs } = self;
        let mut line = format!("{mode:o} {} {:016x}", data.len(), digest(data));
        for (name, value) in xattrs {
            line += &format!(" {name}={}:{:016x}", value.len(), digest(value));
        }
        line
    }
}

/// The thread that made a path: the first name of the form `tN-...` tells.
fn owner(path: &str) -> Option<usize> {
    let name = path.split('/').find(|part| part.starts_with('t'))?;
    name[1..].split_once('-')?.0.parse().ok()
}

fn list(files: &Files<Pool>, dir: &str) -> Result<Vec<(String, Ino, Kind)>, Error> {
    let fd = files.opendir(dir.as_bytes())?;
    let mut names = Vec::new();
    files.readdir(fd, &mut |entry| {
        if !matches!(entry.name, b"." | b"..") {
            names.push((String::from_utf8_lossy(entry.name).into_owned(), entry.ino, entry.kind));
        }
        true
    })?;
    files.closedir(fd)?;
    Ok(names)
}

/// Of another kind than the checksums that the file system keeps.
fn digest(data: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    hasher.finish()
}

fn wrong(what: String) -> Error {
    Error::message(libc::EUCLEAN, "acked::model", what)
}
