//! A user of what was mounted: looks at all there is, then changes and adds a little.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use lodestone::fs::{Cred, Fs, Ino, Kind, SetAttr};
use lodestone::media::{Media, crc32c};

/// Names looked at: more than the images have, so only a loop reaches it.
const NAMES_MAX: usize = 20_000;
/// Bytes read of each file, from its begin and its end: sizes may be anything.
const READ_BYTES: usize = 64 << 10;

/// What regular files hold: begin and end of each.
pub type Contents = BTreeMap<u32, u32>;

/// Looks at everything that the root reaches.
pub fn look<M: Media>(fs: &Fs<M>) -> Contents {
    let cred = Cred::root();
    let mut contents = Contents::new();
    let (mut seen, mut dirs, mut names) = (HashSet::from([Ino::ROOT]), vec![Ino::ROOT], 0);
    let _ = (fs.statfs(), fs.info(), fs.dump_super());
    while let Some(dir) = dirs.pop() {
        let mut entries = Vec::new();
        let _ = fs.readdir(dir, 0, &mut |entry| {
            entries.push(entry.name.to_vec());
            entries.len() < NAMES_MAX
        });
        for name in entries {
            names += 1;
            assert!(names < NAMES_MAX, "a tree that does not end");
            let Ok(attr) = fs.lookup(&cred, dir, &name) else { continue };
            look_at(fs, &cred, attr.ino, attr.kind(), attr.size, &mut contents);
            fs.forget(attr.ino, 1);
            if attr.kind() == Kind::Directory && seen.insert(attr.ino) {
                dirs.push(attr.ino);
            }
        }
    }
    (0..16).for_each(|ino| drop(fs.dump_inode(Ino(ino))));
    contents
}

fn look_at<M: Media>(fs: &Fs<M>, cred: &Cred, ino: Ino, kind: Kind, size: u64, contents: &mut Contents) {
    let _ = fs.getattr(ino);
    let list = fs.listxattr(cred, ino).unwrap_or_default();
    for name in list.split(|&b| b == 0).filter(|name| !name.is_empty()) {
        let _ = fs.getxattr(cred, ino, name);
    }
    match kind {
        Kind::Symlink => drop(fs.readlink(ino)),
        Kind::File => {
            let mut bytes = vec![0; READ_BYTES];
            let mut crc = 0;
            for offset in [0, size.saturating_sub(READ_BYTES as u64)] {
                if let Ok(n) = fs.read(ino, offset, &mut bytes) {
                    crc = crc32c(&bytes[..n], crc);
                }
            }
            contents.insert(ino.0, crc);
            let mut at = 0;
            for whence in [libc::SEEK_DATA, libc::SEEK_HOLE, libc::SEEK_DATA] {
                at = fs.seek(ino, at, whence).unwrap_or(0);
            }
        }
        _ => {}
    }
}

/// Adds files and says which: what was there before must not change by it. Where a pool is `believed` that was forged, others may
/// have their blocks, too.
pub fn add<M: Media>(fs: &Fs<M>, believed: bool) -> Vec<Ino> {
    let cred = Cred::root();
    let mut added = Vec::new();
    for (i, bytes) in [100, 5000, 70_000].into_iter().enumerate() {
        let name = format!("added {i}");
        let Ok((attr, _)) = fs.create(&cred, Ino::ROOT, name.as_bytes(), 0o644, 0, libc::O_EXCL) else {
            continue;
        };
        let content = vec![0xa0 | i as u8; bytes];
        let written = fs.write(&cred, attr.ino, 0, &content, false).unwrap_or(0) as usize;
        let mut back = vec![0; written];
        if let Ok(n) = fs.read(attr.ino, 0, &mut back) {
            assert!(believed || back[..n] == content[..n], "what was just written reads back otherwise");
        }
        let _ = fs.setxattr(&cred, attr.ino, b"user.added", &content[..bytes.min(4000)], 0);
        fs.forget(attr.ino, 2);
        added.push(attr.ino);
    }
    if let Ok(attr) = fs.mkdir(&cred, Ino::ROOT, b"added dir", 0o755, 0) {
        let _ = fs.rename(&cred, Ino::ROOT, b"added 0", attr.ino, b"moved", 0);
        fs.forget(attr.ino, 1);
    }
    let _ = fs.sync();
    added
}

/// Changes and removes what is in the root and in its directories.
pub fn change<M: Media>(fs: &Fs<M>) {
    let cred = Cred::root();
    let mut entries = Vec::new();
    for dir in [Ino::ROOT, Ino(3), Ino(5), Ino(6)] {
        let _ = fs.readdir(dir, 0, &mut |entry| {
            entries.push((dir, entry.name.to_vec()));
            entries.len() < 100
        });
    }
    for (i, (dir, name)) in entries.iter().enumerate() {
        let Ok(attr) = fs.lookup(&cred, *dir, name) else { continue };
        let ino = attr.ino;
        let _ = match i % 4 {
            0 => {
                fs.setattr(&cred, ino, &SetAttr { size: Some(attr.size / 2), ..SetAttr::default() }).map(drop)
            }
            1 => fs.write(&cred, ino, attr.size.min(1 << 20), &[0xcc; 6000], true).map(drop),
            2 => fs.write(&cred, ino, 10, b"a few bytes", false).map(drop),
            _ => fs.setattr(&cred, ino, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).map(drop),
        };
        let _ = match i % 3 {
            0 => fs.unlink(&cred, *dir, name).or_else(|_| fs.rmdir(&cred, *dir, name)),
            1 => fs.rename(&cred, *dir, name, Ino::ROOT, format!("renamed {i}").as_bytes(), 0),
            _ => fs.link(&cred, ino, Ino::ROOT, format!("linked {i}").as_bytes()).map(|_| fs.forget(ino, 1)),
        };
        fs.forget(ino, 1);
    }
    (0..3).for_each(|_| drop(fs.tick()));
}

/// Closes, if nothing else is left to do.
pub fn close<M: Media>(fs: Arc<Fs<M>>) -> Option<M> {
    let _ = fs.close();
    fs.abandon()
}
