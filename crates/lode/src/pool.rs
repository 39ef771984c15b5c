//! The pools that one command works on: each opened once, however often and by which names it is given.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lodestone::fs::{Fs, OpenOptions, check};
use lodestone::media::{Domain, FileIdentity, Pool, PoolOptions};

use crate::cli::Assume;
use crate::failure::{Failure, Result, reason, remedy};
use crate::profile;
use crate::target::show;
use crate::tree::PoolTree;

pub type Tree = PoolTree<Pool>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The files of the pool do not change; what recovery has to do, it does to a private copy.
    Read,
    Write,
}

/// Pools in use by this command.
pub struct Pools {
    open: Vec<Open>,
    /// All that they are made of.
    files: HashSet<FileIdentity>,
    paths: Vec<PathBuf>,
}

struct Open {
    /// The names it was given by.
    names: Vec<OsString>,
    identity: Option<(u64, u64)>,
    writable: bool,
    closed: Cell<bool>,
    tree: Tree,
}

impl Pools {
    pub fn new() -> Pools {
        Pools { open: Vec::new(), files: HashSet::new(), paths: Vec::new() }
    }

    /// Opens `pool`, unless that is done. Of several uses of a pool the first says for what it is opened.
    pub fn open(&mut self, pool: &OsStr, access: Access) -> Result<()> {
        let identity = std::fs::metadata(pool).ok().map(|m| (m.dev(), m.ino()));
        let same =
            |o: &&mut Open| o.names.iter().any(|n| n == pool) || identity.is_some() && o.identity == identity;
        if let Some(open) = self.open.iter_mut().find(same) {
            open.names.push(pool.to_os_string());
            return Ok(());
        }
        let (media, writable) = map(Path::new(pool), access, None)?;
        let profile = profile::of_pool(None, &media);
        let (files, regions) = (media.files(), media.describe().regions);
        let fs = Fs::open(media, &OpenOptions { read_only: !writable, profile, ..OpenOptions::default() })
            .map_err(|e| about(pool, &e))?;
        // No device of the host has such a number.
        let device = u64::MAX - self.open.len() as u64;
        let tree = PoolTree::new(fs, device);
        self.files.extend(files);
        self.paths.extend(regions.into_iter().map(|region| region.path));
        self.open.push(Open {
            names: vec![pool.to_os_string()],
            identity,
            writable,
            closed: Cell::new(false),
            tree,
        });
        Ok(())
    }

    /// A pool that was opened before.
    pub fn tree(&self, pool: &OsStr) -> &Tree {
        let named = |o: &&Open| o.names.iter().any(|n| n == pool);
        &self.open.iter().find(named).expect("a command opens all its pools first").tree
    }

    /// Whether one of the pools is made of this file of the host.
    pub fn is_made_of(&self, file: FileIdentity) -> bool {
        self.files.contains(&file)
    }

    /// What to do about an errno: where a file with holes found no room below it, that is no failure of the medium.
    pub fn remedy(&self, errno: i32) -> String {
        let full = self.paths.iter().find(|path| {
            errno == libc::EIO && std::fs::File::open(path).is_ok_and(lodestone::media::is_out_of_room)
        });
        full.map_or_else(
            || remedy(errno).to_string(),
            |path| format!("; the disk below {} is full: make room there", show(path)),
        )
    }

    /// Closes what is open for writing, changed or not: everything is safe from here on.
    pub fn close(self) -> Result<()> {
        self.close_all()
    }

    /// All, whatever becomes of one; the first failure.
    fn close_all(&self) -> Result<()> {
        let mut closed = Ok(());
        for open in self.open.iter().filter(|o| o.writable && !o.closed.replace(true)) {
            let ended = open.tree.fs.close().map_err(|e| {
                let name = show(Path::new(&open.names[0]));
                let full = if e.errno() == libc::EIO { self.remedy(libc::EIO) } else { String::new() };
                Failure::failed(format_args!(
                    "cannot close {name}: {}{full}; the next use recovers it",
                    reason(&e)
                ))
            });
            closed = closed.and(ended);
        }
        closed
    }
}

/// On the way out of a command that failed: its own failure is what is said.
impl Drop for Pools {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = self.close_all();
        }
    }
}

/// Maps the media of a pool; the bool says whether for writing.
pub fn map(pool: &Path, access: Access, assume: Option<Domain>) -> lodestone::Result<(Pool, bool)> {
    let options = PoolOptions { read_only: access == Access::Read, assume, ..PoolOptions::default() };
    match check::open_pool(pool, &options) {
        Ok(media) => Ok((media, access == Access::Write)),
        // Of device-dax there are no private copies. The pool is closed as any other that is open for writing.
        Err(e) if e.errno() == libc::EOPNOTSUPP && access == Access::Read => map(pool, Access::Write, assume),
        Err(e) => Err(e),
    }
}

/// What the file system says of a pool, with the pool's name.
pub fn about(pool: &OsStr, e: &lodestone::Error) -> Failure {
    Failure::failed(format_args!("{}: {}", show(Path::new(pool)), reason(e)))
}

/// As people write them.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

impl Assume {
    pub fn domain(self) -> Domain {
        match self {
            Assume::Memory => Domain::Memory,
            Assume::CpuCache => Domain::CpuCache,
            Assume::PageCache => Domain::PageCache,
        }
    }
}
