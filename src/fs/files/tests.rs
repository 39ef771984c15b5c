//! What the C interface's own test cannot see: bases, identities, races between calls by path, the
//! balance of opens.

use super::*;
use crate::fs::{MkfsOptions, OpenOptions, RENAME_EXCHANGE, SetTime, Time};
use crate::media::{Pool, PoolOptions};
use libc::{O_APPEND, O_CREAT, O_DIRECTORY, O_EXCL, O_PATH, O_RDONLY, O_RDWR, O_TMPFILE, O_WRONLY};
use std::sync::atomic::AtomicBool;

fn filesystem() -> Arc<Fs<Pool>> {
    let pool = Pool::memfd(32 << 20, &PoolOptions::default()).unwrap();
    Fs::open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap(), &OpenOptions::default()).unwrap()
}

fn files() -> Files<Pool> {
    Files::new(filesystem(), Cred::root(), 0o022)
}

fn user(uid: u32) -> Cred {
    Cred { uid, gid: uid, groups: Vec::new(), enforce: true }
}

#[track_caller]
fn fails<T>(errno: i32, result: Result<T>) {
    assert_eq!(result.err().expect("it fails").errno(), errno);
}

fn make(files: &Files<Pool>, path: &str, text: &str) {
    let fd = files.open(path.as_bytes(), O_WRONLY | O_CREAT | O_EXCL, 0o666).unwrap();
    assert_eq!(files.write(fd, text.as_bytes()).unwrap(), text.len());
    files.close(fd).unwrap();
}

fn text(files: &Files<Pool>, path: &str) -> String {
    let fd = files.open(path.as_bytes(), O_RDONLY, 0).unwrap();
    let mut buffer = [0; 100];
    let n = files.read(fd, &mut buffer).unwrap();
    files.close(fd).unwrap();
    String::from_utf8(buffer[..n].to_vec()).unwrap()
}

#[test]
fn paths_start_at_descriptors() {
    let files = files();
    files.mkdir(b"a", 0o777).unwrap();
    files.mkdir(b"a/b", 0o777).unwrap();
    let a = files.open(b"a", O_PATH | O_DIRECTORY, 0).unwrap();
    let b = files.openat(a, b"b", O_RDONLY | O_DIRECTORY, 0).unwrap();
    make(&files, "/a/b/f", "f");

    // Both paths from one descriptor.
    files.renameat2(b, b"f", b, b"g", 0).unwrap();
    files.renameat2(b, b"g", a, b"h", 0).unwrap();
    make(&files, "/other", "other");
    files.renameat2(a, b"/other", a, b"h", RENAME_EXCHANGE).unwrap();
    assert_eq!((text(&files, "a/h"), text(&files, "other")), ("other".into(), "f".into()));

    files.linkat(a, b"h", b, b"hard", 0).unwrap();
    files.symlinkat(b"../h", b, b"soft").unwrap();
    assert_eq!(files.readlinkat(b, b"soft").unwrap(), b"../h");
    files.linkat(b, b"soft", b, b"hard-to-soft", 0).unwrap();
    files.linkat(b, b"soft", b, b"hard-to-h", libc::AT_SYMLINK_FOLLOW).unwrap();
    let follow = files.fstatat(b, b"soft", 0).unwrap();
    assert_eq!((follow.nlink, follow.ino), (3, files.stat(b"a/h").unwrap().ino));
    assert_eq!(files.fstatat(b, b"hard-to-soft", libc::AT_SYMLINK_NOFOLLOW).unwrap().nlink, 2);

    assert_eq!(files.fstatat(b, b"", libc::AT_EMPTY_PATH).unwrap(), files.stat(b"a/b").unwrap());
    assert_eq!(files.fstatat(AT_FDCWD, b"", libc::AT_EMPTY_PATH).unwrap(), files.stat(b"/").unwrap());
    fails(libc::ENOENT, files.fstatat(b, b"", 0));
    fails(libc::EINVAL, files.fstatat(b, b"", libc::AT_REMOVEDIR));
    files.fchmodat(b, b"soft", 0o600, 0).unwrap();
    assert_eq!(files.stat(b"a/h").unwrap().mode & 0o7777, 0o600);
    fails(libc::EOPNOTSUPP, files.fchmodat(b, b"soft", 0o600, libc::AT_SYMLINK_NOFOLLOW));
    files.unlinkat(b, b"soft", 0).unwrap();
    files.mkdirat(b, b"c", 0o777).unwrap();
    files.mknodat(b, b"c/pipe", libc::S_IFIFO | 0o600, 0).unwrap();
    fails(libc::ENOTEMPTY, files.unlinkat(b, b"c", libc::AT_REMOVEDIR));
    fails(libc::EINVAL, files.unlinkat(b, b"c", 1));

    let file = files.open(b"other", O_RDONLY, 0).unwrap();
    fails(libc::ENOTDIR, files.mkdirat(file, b"x", 0o777));
    fails(libc::EBADF, files.mkdirat(77, b"x", 0o777));
    fails(libc::EEXIST, files.mkdirat(77, b"/other", 0o777));
    fails(libc::ENOENT, files.readlinkat(file, b""));
}

#[test]
fn permissions_are_those_of_the_identity() {
    let fs = filesystem();
    let root = Files::new(fs.clone(), Cred::root(), 0);
    let anna = Files::new(fs.clone(), user(1000), 0o077);
    let ben = Files::new(fs, user(2000), 0o022);
    root.mkdir(b"shared", 0o1777).unwrap();
    fails(libc::EACCES, anna.mkdir(b"top", 0o777));

    make(&anna, "shared/secret", "of anna");
    let attr = ben.stat(b"shared/secret").unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode & 0o7777), (1000, 1000, 0o600));
    fails(libc::EACCES, ben.open(b"shared/secret", O_RDONLY, 0));
    fails(libc::EACCES, ben.open(b"shared/secret", O_RDWR | O_CREAT, 0o666));
    fails(libc::EACCES, ben.truncate(b"shared/secret", 0));
    fails(libc::EACCES, ben.access(b"shared/secret", libc::R_OK));
    fails(libc::EPERM, ben.chmod(b"shared/secret", 0o666));
    fails(libc::EPERM, ben.chown(b"shared/secret", 2000, u32::MAX));
    fails(libc::EPERM, ben.unlink(b"shared/secret"));
    fails(libc::EACCES, ben.utimensat(AT_FDCWD, b"shared/secret", Some(SetTime::Now), Some(SetTime::Now), 0));
    fails(libc::EPERM, anna.mknod(b"shared/dev", libc::S_IFCHR | 0o600, 0x103));
    root.mknod(b"shared/dev", libc::S_IFCHR | 0o600, 0x103).unwrap();
    assert_eq!(root.stat(b"shared/dev").unwrap().rdev, 0x103);

    // A place needs no permission on the file; reading through an open descriptor needs it no more.
    let place = ben.open(b"shared/secret", O_PATH, 0).unwrap();
    assert_eq!(ben.fstat(place).unwrap().size, 7);
    let fd = anna.open(b"shared/secret", O_RDWR, 0).unwrap();
    anna.chmod(b"shared/secret", 0).unwrap();
    fails(libc::EACCES, anna.open(b"shared/secret", O_RDONLY, 0));
    let mut buffer = [0; 7];
    assert_eq!(anna.pread(fd, &mut buffer, 0).unwrap(), 7);
    assert_eq!(anna.pwrite(fd, b"OF", 0).unwrap(), 2);
    anna.ftruncate(fd, 2).unwrap();
    anna.futimens(fd, Some(SetTime::To(Time::new(1, 0))), None).unwrap();
    assert_eq!(root.stat(b"shared/secret").unwrap().atime, Time::new(1, 0));

    anna.mkdir(b"shared/closed", 0o700).unwrap();
    make(&anna, "shared/closed/f", "");
    fails(libc::EACCES, ben.stat(b"shared/closed/f"));
    fails(libc::EACCES, ben.open(b"shared/closed/f", O_PATH, 0));
}

#[test]
fn flags_that_change_later() {
    let files = files();
    let fd = files.open(b"f", O_RDWR | O_CREAT, 0o666).unwrap();
    let twin = files.dup(fd).unwrap();
    files.write(fd, b"abc").unwrap();
    files.set_append(twin, true).unwrap();
    assert_eq!(files.flags(fd).unwrap() & (O_APPEND | libc::O_ACCMODE), O_APPEND | O_RDWR);
    assert_eq!(files.lseek(fd, 0, libc::SEEK_SET).unwrap(), 0);
    files.write(fd, b"d").unwrap();
    files.set_append(fd, false).unwrap();
    assert_eq!(files.lseek(twin, 0, libc::SEEK_SET).unwrap(), 0);
    files.write(twin, b"A").unwrap();
    assert_eq!(text(&files, "f"), "Abcd");
    assert_eq!(files.set_umask(0o777), 0o022);
    make(&files, "closed", "");
    assert_eq!(files.stat(b"closed").unwrap().mode & 0o7777, 0);
}

#[test]
fn directories_are_read_in_pieces() {
    let files = files();
    for i in 0..300 {
        make(&files, &format!("entry-{i}"), "");
    }
    let fd = files.opendir(b"/").unwrap();
    let mut names = Vec::new();
    let mut buffer = [0; 200];
    loop {
        let n = files.getdents(fd, &mut buffer).unwrap();
        let mut rest = &buffer[..n];
        if rest.is_empty() {
            break;
        }
        while !rest.is_empty() {
            let length = u16::from_ne_bytes([rest[16], rest[17]]) as usize;
            let name = &rest[19..length];
            names.push(name[..name.iter().position(|&b| b == 0).unwrap()].to_vec());
            rest = &rest[length..];
        }
    }
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!((count, names.len()), (302, 302));

    files.rewinddir(fd).unwrap();
    fails(libc::EINVAL, files.getdents(fd, &mut buffer[..20]));
    let mut places = Vec::new();
    files
        .readdir(fd, &mut |entry| {
            places.push((entry.cookie, entry.name.to_vec()));
            true
        })
        .unwrap();
    for pair in places.windows(2) {
        files.seekdir(fd, pair[0].0).unwrap();
        let mut read = Vec::new();
        files
            .readdir(fd, &mut |entry| {
                let first = read.is_empty();
                if first {
                    read.push((entry.cookie, entry.name.to_vec()));
                }
                first
            })
            .unwrap();
        assert_eq!(read, pair[1..]);
        assert_eq!(files.telldir(fd).unwrap(), pair[1].0);
    }
    fails(libc::ENOTDIR, files.telldir(files.open(b"entry-1", O_RDONLY, 0).unwrap()));
}

/// Whoever makes, uses and removes leaves nothing behind: all space and numbers come back.
#[test]
fn what_goes_leaves_nothing() {
    let files = files();
    make(&files, "warm", "up");
    files.unlink(b"warm").unwrap();
    let before = files.statvfs(b"/").unwrap();
    for _ in 0..50 {
        make(&files, "f", "text");
        files.symlink(b"f", b"s").unwrap();
        files.link(b"f", b"g").unwrap();
        files.mkdir(b"d", 0o777).unwrap();
        files.rename(b"g", b"d/g", 0).unwrap();
        let open = files.open(b"s", O_RDWR | O_CREAT, 0).unwrap();
        files.pwrite(open, &[1; 100_000], 0).unwrap();
        let twin = files.dup(open).unwrap();
        let nameless = files.open(b"d", O_TMPFILE | O_RDWR, 0o600).unwrap();
        files.pwrite(nameless, &[1; 100_000], 0).unwrap();
        fails(libc::EEXIST, files.open(b"f", O_CREAT | O_EXCL, 0));
        fails(libc::ENOTDIR, files.open(b"f", O_DIRECTORY, 0));
        fails(libc::EISDIR, files.open(b"d", O_CREAT, 0));
        fails(libc::ENOTDIR, files.rename(b"f", b"new/", 0));
        files.getxattr(b"f", true, b"user.none").unwrap_err();
        for path in [b"f".as_slice(), b"s", b"d/g"] {
            files.unlink(path).unwrap();
        }
        files.rmdir(b"d").unwrap();
        files.close(open).unwrap();
        assert_eq!(files.fstat(twin).unwrap().size, 100_000, "the twin keeps it");
        files.close(twin).unwrap();
        files.close(nameless).unwrap();
    }
    files.fs().sync().unwrap();
    files.fs().sync().unwrap();
    let after = files.statvfs(b"/").unwrap();
    let lost = before.blocks_free - after.blocks_free;
    assert!(lost <= 8, "{lost} blocks are gone: more than the root's log may have grown by");
    assert_eq!(files.open(b"x", O_CREAT | O_RDWR, 0o600).unwrap(), 0);
}

#[track_caller]
fn there_or_not(result: Result<()>) {
    if let Err(e) = result {
        assert_eq!(e.errno(), libc::ENOENT, "{e:?}");
    }
}

/// A name that comes and goes is there or not, never stale.
#[test]
fn calls_by_path_race_with_removal() {
    let files = files();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..2000 {
                make(&files, "f", "x");
                files.unlink(b"f").unwrap();
                files.mkdir(b"d", 0o777).unwrap();
                while let Err(e) = files.rmdir(b"d") {
                    assert_eq!(e.errno(), libc::ENOTEMPTY);
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                there_or_not(files.stat(b"f").map(drop));
                there_or_not(files.open(b"f", O_RDONLY, 0).and_then(|fd| files.close(fd)));
                there_or_not(files.chmod(b"f", 0o600));
                there_or_not(files.setxattr(b"f", true, b"user.x", b"1", 0));
                there_or_not(files.access(b"f", libc::R_OK));
            }
        });
        s.spawn(|| {
            let mut n = 0;
            while !done.load(Ordering::Relaxed) {
                n += 1;
                let inside = format!("d/{n}");
                match files.open(inside.as_bytes(), O_CREAT | O_EXCL | O_RDWR, 0o600) {
                    Ok(fd) => {
                        files.close(fd).unwrap();
                        files.unlink(inside.as_bytes()).unwrap();
                    }
                    Err(e) => assert_eq!(e.errno(), libc::ENOENT, "{e:?}"),
                }
                there_or_not(files.stat(b"d").map(drop));
            }
        });
    });
}

#[test]
fn a_truncation_by_an_ordinary_user_takes_set_id_bits() {
    let fs = filesystem();
    Files::new(Arc::clone(&fs), Cred::root(), 0).chmod(b"/", 0o777).unwrap();
    let files = Files::new(fs, user(7), 0);
    type Change<'a> = &'a dyn Fn(&[u8]);
    let changes: [Change; 3] = [
        &|f| files.truncate(f, 2).unwrap(),
        &|f| {
            let fd = files.open(f, O_RDWR, 0).unwrap();
            files.ftruncate(fd, 2).unwrap();
            files.close(fd).unwrap();
        },
        &|f| files.close(files.open(f, O_WRONLY | libc::O_TRUNC, 0).unwrap()).unwrap(),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let path = format!("f{i}");
        make(&files, &path, "text");
        files.chmod(path.as_bytes(), 0o6755).unwrap();
        change(path.as_bytes());
        assert_eq!(files.stat(path.as_bytes()).unwrap().mode & 0o7777, 0o755, "{i}");
    }
}

#[test]
fn stat_never_meets_a_stale_inode() {
    let files = files();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..20_000 {
                make(&files, "f", "");
                files.unlink(b"f").unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        s.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for path in ["f", "/./f"] {
                    if let Err(e) = files.stat(path.as_bytes()) {
                        assert_eq!(e.errno(), libc::ENOENT);
                    }
                }
            }
        });
    });
}

#[test]
fn a_long_link_leaves_room_for_a_long_path() {
    let files = files();
    files.mkdir(b"d", 0o755).unwrap();
    make(&files, "d/f", "text");
    let stay = |n| "./".repeat(n);
    files.symlink(format!("{}d", stay(2000)).as_bytes(), b"l").unwrap();
    assert_eq!(text(&files, &format!("l/{}f", stay(1000))), "text");
}

#[test]
fn what_linux_takes_from_modes_and_lists() {
    let files = files();
    files.mkdir(b"d", 0o6777).unwrap();
    assert_eq!(files.stat(b"d").unwrap().mode & 0o7777, 0o755);
    files.chmod(b"d", 0o2755).unwrap();
    files.mkdir(b"d/e", 0o700).unwrap();
    assert_eq!(files.stat(b"d/e").unwrap().mode & 0o7777, 0o2700);

    // Users in no order: the kernel takes them.
    let mut list = 2u32.to_le_bytes().to_vec();
    let entries: [(u16, u16, u32); 6] =
        [(1, 7, !0), (2, 5, 2000), (2, 4, 1000), (4, 5, !0), (16, 7, !0), (32, 0, !0)];
    for (tag, perm, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(perm.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    files.setxattr(b"d", true, b"system.posix_acl_access", &list, 0).unwrap();
    let others = Files::new(Arc::clone(files.fs()), user(2000), 0);
    others.access(b"d", libc::X_OK).unwrap();
}
