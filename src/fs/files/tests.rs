//! What the C interface's own test cannot see: bases, identities, races between calls by path, the
//! balance of opens.

use super::*;
use crate::fs::{Attr, MkfsOptions, OpenOptions, RENAME_EXCHANGE, RENAME_NOREPLACE, SetTime, Time, acl};
use crate::limits::{FILE_BYTES_MAX, LINKS_MAX, SUBDIRECTORIES_MAX};
use crate::media::{Domain, Pool, PoolOptions};
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
fn a_read_at_the_end_and_a_link_that_is_followed_set_the_access_time() {
    let files = files();
    make(&files, "f", "text");
    files.symlink(b"f", b"link").unwrap();
    let old = Time::new(1, 0);
    for name in [b"f".as_slice(), b"link"] {
        files.utimensat(AT_FDCWD, name, Some(SetTime::To(old)), None, libc::AT_SYMLINK_NOFOLLOW).unwrap();
    }
    let fd = files.open(b"f", O_RDONLY, 0).unwrap();
    assert_eq!(files.pread(fd, &mut [], 0).unwrap(), 0);
    assert_eq!(files.stat(b"f").unwrap().atime, old, "nothing was asked for");
    assert_eq!(files.pread(fd, &mut [0; 9], 4).unwrap(), 0);
    assert!(files.stat(b"f").unwrap().atime > old);
    files.close(fd).unwrap();
    assert_eq!(files.lstat(b"link").unwrap().atime, old);
    files.stat(b"link").unwrap();
    assert!(files.lstat(b"link").unwrap().atime > old);
}

#[test]
fn on_a_pool_that_is_only_read_access_times_stay() {
    let files = files();
    make(&files, "f", "text");
    files.symlink(b"f", b"link").unwrap();
    files.mkdir(b"d", 0o777).unwrap();
    let old = Time::new(1, 0);
    let names = [b"f".as_slice(), b"link", b"d"];
    for name in names {
        files.utimensat(AT_FDCWD, name, Some(SetTime::To(old)), None, libc::AT_SYMLINK_NOFOLLOW).unwrap();
    }
    let fs = files.fs.clone();
    drop(files);
    fs.close().unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let files = Files::new(Fs::open(fs.abandon().unwrap(), &options).unwrap(), Cred::root(), 0o022);
    assert_eq!(text(&files, "link"), "text");
    files.readlink(b"link").unwrap();
    let dir = files.opendir(b"d").unwrap();
    assert!(files.getdents(dir, &mut [0; 200]).unwrap() > 0);
    assert_eq!(names.map(|name| files.lstat(name).unwrap().atime), [old; 3]);
}

/// As one finds it whose walk had come to it by then.
#[test]
fn in_a_directory_that_has_just_gone_a_path_finds_nothing() {
    let files = files();
    files.mkdir(b"d", 0o777).unwrap();
    let gone = files.fs.walk(&files.cred, None, b"d", true).unwrap();
    files.rmdir(b"d").unwrap();
    for path in [b".".as_slice(), b"..", b"./", b"./x", b"../x"] {
        fails(libc::ENOENT, files.at_walked(Some(&gone), path, true, |_| Ok(())));
        fails(libc::ENOENT, files.fs.stat(&files.cred, Some(&gone), path, true));
    }
    for path in [b"./x".as_slice(), b"../x", b"./../x"] {
        fails(libc::ENOENT, files.place_from(Some(&gone), path, &mut 0));
    }
}

/// As Linux counts them: of the directories and of the last component together.
#[test]
fn forty_links_are_followed_in_one_path() {
    let files = files();
    files.mkdir(b"d", 0o777).unwrap();
    make(&files, "d/f", "text");
    let chain = |dir: &str, name: &str, end: &str| {
        for n in 1..=41 {
            let target = if n == 1 { end.to_owned() } else { format!("{name}{}", n - 1) };
            files.symlink(target.as_bytes(), format!("{dir}{name}{n}").as_bytes()).unwrap();
        }
    };
    chain("", "l", "d");
    chain("d/", "x", "f");
    chain("d/", "new", "../l1/made");
    for (dirs, last) in [(0, 40), (1, 39), (20, 20), (39, 1), (40, 0)] {
        let dir = if dirs == 0 { "d".to_owned() } else { format!("l{dirs}") };
        let path = |last: u32| match last {
            0 => format!("{dir}/f"),
            _ => format!("{dir}/x{last}"),
        };
        assert_eq!(files.stat(path(last).as_bytes()).unwrap().size, 4);
        fails(libc::ELOOP, files.stat(path(last + 1).as_bytes()));
        for flags in [O_RDONLY, O_RDWR | O_CREAT] {
            files.close(files.open(path(last).as_bytes(), flags, 0o666).unwrap()).unwrap();
            fails(libc::ELOOP, files.open(path(last + 1).as_bytes(), flags, 0o666));
        }
    }
    // What the last link leads through counts, too.
    fails(libc::ELOOP, files.open(b"l20/new20", O_RDWR | O_CREAT, 0o666));
    fails(libc::ENOENT, files.stat(b"d/made"));
    files.open(b"l19/new20", O_RDWR | O_CREAT, 0o666).unwrap();
    assert_eq!(files.stat(b"d/made").unwrap().size, 0);
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
    fails(libc::EINVAL, root.mknod(b"shared/far", libc::S_IFBLK | 0o600, 1 << 32));
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

/// A write ends with the largest file, wherever it was to begin; the next is refused.
#[test]
fn writes_fill_up_the_largest_file() {
    let files = files();
    let fd = files.open(b"f", O_RDWR | O_CREAT, 0o666).unwrap();
    let appender = files.open(b"f", O_WRONLY | O_APPEND, 0).unwrap();
    let largest = FILE_BYTES_MAX as i64;
    files.ftruncate(fd, largest - 10).unwrap();
    assert_eq!(files.write(appender, &[7; 100]).unwrap(), 10);
    assert_eq!(files.lseek(appender, 0, libc::SEEK_CUR).unwrap(), FILE_BYTES_MAX);
    fails(libc::EFBIG, files.write(appender, &[7; 100]));
    assert_eq!(files.pwrite(fd, &[8; 100], largest - 3).unwrap(), 3);
    fails(libc::EFBIG, files.pwrite(fd, &[8; 1], largest));
    assert_eq!(files.pwrite(fd, &[], largest).unwrap(), 0);
    let mut end = [0; 20];
    assert_eq!(files.pread(fd, &mut end, largest - 11).unwrap(), 11);
    assert_eq!(end[..11], [0, 7, 7, 7, 7, 7, 7, 7, 8, 8, 8]);
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

/// What this kernel answers on ext4 and tmpfs (tests/mount/differential.py compares at random).
#[test]
fn errors_come_in_the_order_of_linux() {
    let files = files();
    files.mkdir(b"d", 0o777).unwrap();
    files.symlink(b"d", b"l").unwrap();
    make(&files, "f", "text");
    files.symlink(b"f/", b"slash").unwrap();
    let f = files.open(b"f", O_RDWR, 0).unwrap();
    let long = vec![b'n'; 256];
    let far = i64::MAX;

    fails(libc::EEXIST, files.link(b"d", b"f"));
    fails(libc::EPERM, files.link(b"d", b"new"));
    fails(libc::ENOENT, files.link(b"none", &long));
    fails(libc::ENOENT, files.rename(b"none", &long, 0));
    fails(libc::ENAMETOOLONG, files.rename(b"f", &long, 0));
    fails(libc::EEXIST, files.rename(b"f", b"d/", RENAME_NOREPLACE));
    fails(libc::ENOENT, files.rename(b"f", b"none/", RENAME_EXCHANGE));
    fails(libc::EISDIR, files.open(b"l", O_CREAT | O_WRONLY, 0o600));
    fails(libc::ENOTDIR, files.open(b"slash", O_RDONLY, 0));
    fails(libc::EEXIST, files.open(b"d/./", O_CREAT | O_EXCL | O_WRONLY, 0o600));

    fails(libc::EINVAL, files.pread(99, &mut [0], -1));
    fails(libc::EINVAL, files.pwrite(99, &[0], -1));
    fails(libc::EINVAL, files.ftruncate(99, -1));
    fails(libc::EINVAL, files.pwrite(f, &[0, 0], far));
    let d = files.opendir(b"d").unwrap();
    fails(libc::EINVAL, files.pread(d, &mut [0, 0], far));
    fails(libc::EISDIR, files.pread(d, &mut [0, 0], 0));
    fails(libc::EFBIG, files.pwrite(f, &[0, 0], far - 2));
    fails(libc::EBADF, files.fallocate(99, 0, -1, 1));
    files.utimensat(AT_FDCWD, b"none", None, None, 77).unwrap();

    files.mkdir(b"d/below", 0o777).unwrap();
    fails(libc::ENOTEMPTY, files.rename(b"d/below", b"d", 0));
    make(&files, "d/file", "");
    fails(libc::ENOTEMPTY, files.rename(b"d/file", b"d", 0));
    fails(libc::EISDIR, files.rename(b"f", b"d", 0));

    let gone = files.open(b"d/below", O_RDONLY, 0).unwrap();
    files.rmdir(b"d/below").unwrap();
    fails(libc::ENOENT, files.getdents(gone, &mut [0; 100]));
}

#[test]
fn who_may_not_search_learns_nothing() {
    let fs = filesystem();
    let root = Files::new(fs.clone(), Cred::root(), 0);
    let anna = Files::new(fs, user(1000), 0);
    root.mkdir(b"closed", 0o600).unwrap();
    root.mkdir(b"open", 0o777).unwrap();
    fails(libc::EACCES, anna.unlink(b"closed/none"));
    fails(libc::EACCES, anna.rmdir(b"closed/none"));
    fails(libc::EACCES, anna.rename(b"open/none", b"closed/none", 0));
    fails(libc::EACCES, anna.rename(b"closed/.", b"open/none", 0));
    fails(libc::EACCES, anna.mknod(b"closed/new", libc::S_IFBLK | 0o600, 0x103));
    fails(libc::EPERM, anna.mknod(b"open/new", libc::S_IFBLK | 0o600, 0x103));
    anna.mknod(b"open/whiteout", libc::S_IFCHR | 0o600, 0).unwrap();
    root.mknod(b"open/pipe", libc::S_IFIFO | 0o600, 0).unwrap();
    fails(libc::EACCES, anna.open(b"open/pipe", O_RDONLY, 0));
    fails(libc::ENXIO, root.open(b"open/pipe", O_RDONLY, 0));
    make(&root, "open/roots", "");
    fails(libc::EPERM, anna.open(b"open/roots", O_RDONLY | libc::O_NOATIME, 0));

    // The root stands in nothing that would be searched.
    root.chmod(b"/", 0o600).unwrap();
    fails(libc::EBUSY, anna.rmdir(b"/"));
    fails(libc::EEXIST, anna.mkdir(b"//", 0o700));
    fails(libc::EBUSY, anna.rename(b"/", b"/", 0));
    fails(libc::EACCES, anna.rmdir(b"/."));
}

#[test]
fn sticky_directories_decide_before_kinds_do() {
    let fs = filesystem();
    let root = Files::new(fs.clone(), Cred::root(), 0);
    let anna = Files::new(fs, user(1000), 0);
    root.mkdir(b"t", 0o1777).unwrap();
    root.mkdir(b"t/roots", 0o777).unwrap();
    make(&anna, "t/annas", "");
    fails(libc::EPERM, anna.rename(b"t/annas", b"t/roots", 0));
    fails(libc::EPERM, anna.rename(b"t/roots", b"t/annas", 0));
    // Two names of one file: nothing happens, and nothing has to be permitted.
    root.mkdir(b"shut", 0o755).unwrap();
    make(&root, "shut/a", "");
    root.link(b"shut/a", b"shut/b").unwrap();
    anna.rename(b"shut/a", b"shut/b", 0).unwrap();
    fails(libc::EACCES, anna.rename(b"shut/a", b"shut/c", 0));
}

fn mode(files: &Files<Pool>, path: &str) -> u32 {
    files.stat(path.as_bytes()).unwrap().mode & 0o7777
}

/// As should_remove_sgid and chown_common of Linux have it.
#[test]
fn set_id_bits_fall_as_in_linux() {
    let fs = filesystem();
    let root = Files::new(fs.clone(), Cred::root(), 0);
    let anna = Files::new(fs, Cred { groups: vec![50], ..user(1000) }, 0);
    root.chmod(b"/", 0o777).unwrap();
    let prepare = |path: &str, gid: u32, bits: u32| {
        make(&root, path, "text");
        root.chown(path.as_bytes(), 1000, gid).unwrap();
        root.chmod(path.as_bytes(), bits).unwrap();
    };
    type Change<'a> = &'a dyn Fn(&[u8]);
    let write = |path: &[u8], run: &dyn Fn(Fd)| {
        let fd = anna.open(path, O_RDWR, 0).unwrap();
        run(fd);
        anna.close(fd).unwrap();
    };
    let changes: [(&str, Change); 7] = [
        ("write", &|f| write(f, &|fd| assert_eq!(anna.write(fd, b"x").unwrap(), 1))),
        ("truncate", &|f| anna.truncate(f, 2).unwrap()),
        ("reserve", &|f| write(f, &|fd| anna.fallocate(fd, 0, 0, 100).unwrap())),
        ("reserve again", &|f| write(f, &|fd| anna.fallocate(fd, libc::FALLOC_FL_KEEP_SIZE, 0, 1).unwrap())),
        ("punch", &|f| {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            write(f, &|fd| anna.fallocate(fd, punch, 1 << 20, 1).unwrap())
        }),
        ("zero", &|f| write(f, &|fd| anna.fallocate(fd, libc::FALLOC_FL_ZERO_RANGE, 0, 2).unwrap())),
        ("chown", &|f| anna.chown(f, u32::MAX, u32::MAX).unwrap()),
    ];
    for (name, change) in changes {
        // Whose group, which mode, what is left of it.
        for (i, (gid, before, after)) in
            [(1000, 0o6755, 0o755), (50, 0o6745, 0o2745), (60, 0o6745, 0o745)].into_iter().enumerate()
        {
            let path = format!("{name}{i}");
            prepare(&path, gid, before);
            change(path.as_bytes());
            assert_eq!(mode(&anna, &path), after, "{path}");
        }
    }
    // Who owns it not may say nothing about its owner, unless that changes nothing.
    root.chown(b"write0", 7, 7).unwrap();
    anna.chown(b"write0", u32::MAX, u32::MAX).unwrap();
    root.chmod(b"write0", 0o4755).unwrap();
    fails(libc::EPERM, anna.chown(b"write0", u32::MAX, u32::MAX));
    root.chown(b"write0", u32::MAX, u32::MAX).unwrap();
    assert_eq!(mode(&root, "write0"), 0o755);
    // A directory keeps its bits, and root's writes take none.
    root.mkdir(b"d", 0o755).unwrap();
    root.chmod(b"d", 0o6755).unwrap();
    root.chown(b"d", 5, 5).unwrap();
    assert_eq!(mode(&root, "d"), 0o6755);
    prepare("roots", 60, 0o6755);
    let fd = root.open(b"roots", O_RDWR, 0).unwrap();
    root.write(fd, b"x").unwrap();
    root.fallocate(fd, 0, 0, 100).unwrap();
    assert_eq!(mode(&root, "roots"), 0o6755);
}

#[test]
fn fallocate_knows_the_modes_of_linux() {
    let files = files();
    let fd = files.open(b"f", O_RDWR | O_CREAT, 0o600).unwrap();
    let reader = files.open(b"f", O_RDONLY, 0).unwrap();
    use libc::{
        FALLOC_FL_COLLAPSE_RANGE as COLLAPSE, FALLOC_FL_INSERT_RANGE as INSERT, FALLOC_FL_KEEP_SIZE as KEEP,
        FALLOC_FL_PUNCH_HOLE as PUNCH, FALLOC_FL_UNSHARE_RANGE as UNSHARE, FALLOC_FL_ZERO_RANGE as ZERO,
    };
    for mode in [PUNCH, ZERO | PUNCH, ZERO | UNSHARE, COLLAPSE | KEEP, COLLAPSE | INSERT, 4, 1 << 20] {
        fails(libc::EOPNOTSUPP, files.fallocate(fd, mode, 0, 4096));
        fails(libc::EOPNOTSUPP, files.fallocate(reader, mode, 0, 4096));
    }
    for mode in [COLLAPSE, INSERT] {
        fails(libc::EOPNOTSUPP, files.fallocate(fd, mode, 0, 4096));
        fails(libc::EBADF, files.fallocate(reader, mode, 0, 4096));
    }
    for (mode, size) in
        [(KEEP, 0), (PUNCH | KEEP, 0), (ZERO | KEEP, 0), (0, 4096), (ZERO, 8192), (UNSHARE, 12288)]
    {
        let offset = if size == 0 { 0 } else { size - 4096 };
        files.fallocate(fd, mode, offset, 4096).unwrap();
        assert_eq!(files.fstat(fd).unwrap().size, size as u64, "{mode}");
        fails(libc::EBADF, files.fallocate(reader, mode, offset, 4096));
        fails(libc::EINVAL, files.fallocate(fd, mode, 0, 0));
        fails(libc::EFBIG, files.fallocate(fd, mode, i64::MAX - 1, 1));
    }
    // Also where there is nothing to do the times say that it was called.
    files.futimens(fd, None, Some(SetTime::To(Time::new(1, 0)))).unwrap();
    files.fallocate(fd, 0, 0, 4096).unwrap();
    assert!(files.fstat(fd).unwrap().mtime.sec > 1);
}

#[test]
fn attribute_names_and_lists_as_linux_takes_them() {
    let files = files();
    make(&files, "f", "");
    files.mkdir(b"d", 0o777).unwrap();
    files.symlink(b"f", b"s").unwrap();
    let fd = files.open(b"f", O_RDWR, 0).unwrap();
    let (access, default) = (acl::ACCESS, acl::DEFAULT);
    let set = |path: &[u8], name: &[u8], value: &[u8]| files.setxattr(path, false, name, value, 0);
    for name in [b"user.".as_slice(), b"trusted.", b"security."] {
        fails(libc::EINVAL, set(b"f", name, b""));
        fails(libc::EINVAL, files.getxattr(b"f", true, name));
        fails(libc::EINVAL, files.removexattr(b"f", true, name));
    }
    for name in [b"user".as_slice(), b"system.x", b"none.x"] {
        fails(libc::EOPNOTSUPP, set(b"f", name, b""));
    }
    // The name is looked at before the path and the descriptor, the flags before the name.
    fails(libc::ERANGE, files.getxattr(b"none", true, b""));
    fails(libc::ERANGE, files.fremovexattr(99, &[b'n'; 256]));
    fails(libc::EINVAL, files.fsetxattr(99, b"", b"", 8));

    let list = [
        2u32.to_le_bytes().as_slice(),
        &[1, 0, 6, 0],
        &[0xff; 4],
        &[4, 0, 6, 0],
        &[0xff; 4],
        &[32, 0, 4, 0],
        &[0xff; 4],
    ]
    .concat();
    fails(libc::EOPNOTSUPP, set(b"s", access, &list));
    fails(libc::EOPNOTSUPP, files.getxattr(b"s", false, access));
    fails(libc::EACCES, set(b"f", default, &list));
    set(b"f", default, b"").unwrap();
    fails(libc::EINVAL, set(b"f", access, &list[..12]));
    fails(libc::EINVAL, set(b"f", access, b"v"));
    // XATTR_CREATE and XATTR_REPLACE say nothing of lists; removing none is no error.
    files.setxattr(b"f", true, access, &list, libc::XATTR_REPLACE).unwrap();
    assert_eq!(mode(&files, "f"), 0o664);
    fails(libc::ENODATA, files.getxattr(b"f", true, access));
    for path in [b"f", b"d"] {
        files.removexattr(path, true, access).unwrap();
        files.removexattr(path, true, default).unwrap();
    }
    files.fremovexattr(fd, access).unwrap();
    let anna = Files::new(Arc::clone(files.fs()), user(1000), 0);
    fails(libc::EPERM, anna.removexattr(b"f", true, access));
    fails(libc::EACCES, anna.setxattr(b"f", true, b"none.x", b"", 0));
}

/// The kernel does not look at a list whose mask leaves nothing: who is named in it is another.
#[test]
fn an_empty_mask_makes_named_users_others() {
    let files = files();
    make(&files, "f", "text");
    let entry = |tag: u16, perm: u16, id: u32| {
        [tag.to_le_bytes().as_slice(), &perm.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let list = [
        2u32.to_le_bytes().to_vec(),
        entry(1, 6, !0),
        entry(2, 6, 1000),
        entry(4, 6, !0),
        entry(16, 0, !0),
        entry(32, 4, !0),
    ]
    .concat();
    files.setxattr(b"f", true, acl::ACCESS, &list, 0).unwrap();
    let anna = Files::new(Arc::clone(files.fs()), user(1000), 0);
    anna.access(b"f", libc::R_OK).unwrap();
    fails(libc::EACCES, anna.access(b"f", libc::W_OK));
}

#[test]
fn a_read_only_pool_says_what_linux_says() {
    let pool = Pool::memfd(32 << 20, &PoolOptions::default()).unwrap();
    let fs = Fs::open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap(), &OpenOptions::default()).unwrap();
    {
        let files = Files::new(fs.clone(), Cred::root(), 0);
        make(&files, "f", "text");
        files.mkdir(b"d", 0o777).unwrap();
        files.symlink(b"none", b"s").unwrap();
        files.mknod(b"pipe", libc::S_IFIFO | 0o600, 0).unwrap();
    }
    fs.close().unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let files = Files::new(Fs::open(fs.abandon().unwrap(), &options).unwrap(), Cred::root(), 0);
    for path in [b"f".as_slice(), b"d", b"s"] {
        fails(libc::EEXIST, files.mkdir(path, 0o777));
        fails(libc::EEXIST, files.symlink(b"x", path));
        fails(libc::EEXIST, files.link(b"f", path));
        fails(libc::EEXIST, files.mknod(path, 0o600, 0));
        fails(libc::EEXIST, files.open(path, O_CREAT | O_EXCL | O_RDWR, 0o600));
        fails(libc::EROFS, files.faccessat(AT_FDCWD, path, libc::W_OK, libc::AT_SYMLINK_NOFOLLOW));
    }
    fails(libc::EROFS, files.mkdir(b"new", 0o777));
    fails(libc::EROFS, files.open(b"new", O_CREAT | O_RDONLY, 0o600));
    fails(libc::EROFS, files.open(b"s", O_CREAT | O_RDONLY, 0o600));
    files.close(files.open(b"f", O_CREAT | O_RDONLY, 0o600).unwrap()).unwrap();
    fails(libc::EROFS, files.open(b"f", O_WRONLY, 0));
    fails(libc::EROFS, files.unlink(b"f/"));
    fails(libc::EROFS, files.rmdir(&[b'n'; 256]));
    fails(libc::EROFS, files.rename(b"none/", b"f", 0));
    fails(libc::ENOTDIR, files.open(b"f", O_TMPFILE | O_RDWR, 0o600));
    fails(libc::EROFS, files.open(b"d", O_TMPFILE | O_RDWR, 0o600));
    files.access(b"pipe", libc::W_OK).unwrap();
    files.access(b"f", libc::R_OK).unwrap();
}

#[test]
fn a_listing_goes_on_behind_an_inode_that_cannot_be_read() {
    let files = files();
    for name in ["a", "b", "c"] {
        make(&files, name, "text");
    }
    let damaged = files.stat(b"b").unwrap().ino;
    let fs = Arc::clone(files.fs());
    drop(files);
    fs.close().unwrap();
    let fs = Fs::open(fs.abandon().unwrap(), &OpenOptions::default()).unwrap();
    let slot = fs.slot(damaged.0).unwrap();
    let flushed = fs.media().copy_nt(slot, &[0; 64]).unwrap();
    fs.media().fence(flushed);
    fails(libc::EUCLEAN, fs.getattr(damaged));
    let mut seen = Vec::new();
    fs.readdir_plus(Ino::ROOT, 0, &mut |entry, attr| {
        assert!(attr.is_none_or(|a| a.ino == entry.ino));
        seen.push((String::from_utf8_lossy(entry.name).into_owned(), entry.ino, attr.is_some()));
        true
    })
    .unwrap();
    for (_, ino, _) in seen.iter().filter(|s| s.2) {
        fs.forget(*ino, 1);
    }
    let said: Vec<(&str, bool)> = seen.iter().map(|(name, _, known)| (name.as_str(), *known)).collect();
    assert_eq!(said, [(".", false), ("..", false), ("c", true), ("b", false), ("a", true)]);
    assert_eq!(seen[3].1, damaged);
}

#[test]
fn a_directory_has_more_subdirectories_than_a_file_has_names() {
    let files = files();
    for dir in [b"d".as_slice(), b"d/below", b"other", b"other/below"] {
        files.mkdir(dir, 0o777).unwrap();
    }
    make(&files, "d/file", "");
    let fs = files.fs();
    let links = |path: &[u8], count: u32| {
        fs.table.entry(files.stat(path).unwrap().ino.0).nlink.store(count, Ordering::Relaxed);
    };
    links(b"d", LINKS_MAX);
    files.mkdir(b"d/new", 0o777).unwrap();
    assert_eq!(files.stat(b"d").unwrap().nlink, LINKS_MAX + 1);
    links(b"d", SUBDIRECTORIES_MAX);
    fails(libc::EMLINK, files.mkdir(b"d/more", 0o777));
    fails(libc::EMLINK, files.rename(b"other/below", b"d/more", 0));
    fails(libc::EMLINK, files.rename(b"other/below", b"d/file", RENAME_EXCHANGE));
    fails(libc::EMLINK, files.rename(b"d/file", b"other/below", RENAME_EXCHANGE));
    files.rename(b"other/below", b"d/below", RENAME_EXCHANGE).unwrap();
    links(b"d/file", LINKS_MAX);
    fails(libc::EMLINK, files.link(b"d/file", b"d/name"));
}

#[test]
fn what_is_given_back_too_often_stays_as_it_was() {
    let files = files();
    let fs = files.fs();
    make(&files, "f", "");
    let ino = fs.lookup(&Cred::root(), Ino::ROOT, b"f").unwrap().ino;
    let too_often = std::panic::AssertUnwindSafe(|| fs.forget(ino, 5));
    assert!(std::panic::catch_unwind(too_often).is_err());
    files.unlink(b"f").unwrap();
    fs.getattr(ino).unwrap(); // the reference holds it
    fs.forget(ino, 1);
    fails(libc::ESTALE, fs.getattr(ino));
}

/// Whether `work` ends within some seconds; where not, its threads stay behind.
fn ends(work: impl FnOnce() + Send + 'static) -> bool {
    let (done, ended) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    match ended.recv_timeout(std::time::Duration::from_secs(10)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => false,
        _ => thread.join().is_ok(),
    }
}

/// A directory with one file, opened and used so often by this thread that the descriptor leans to it.
fn directory_in_use(files: &Files<Pool>, name: &str) -> Fd {
    files.mkdir(name.as_bytes(), 0o777).unwrap();
    make(files, &format!("{name}/f"), name);
    let fd = files.open(name.as_bytes(), O_RDONLY | O_DIRECTORY, 0).unwrap();
    for _ in 0..100 {
        files.fstatat(fd, b"f", 0).unwrap();
    }
    fd
}

#[test]
fn calls_with_two_descriptors_do_not_wait_for_each_other() {
    assert!(ends(|| {
        let files = files();
        let fds = [AtomicI32::new(-1), AtomicI32::new(-1)];
        let start = std::sync::Barrier::new(3);
        std::thread::scope(|s| {
            for me in 0..2 {
                let (files, fds, start) = (&files, &fds, &start);
                s.spawn(move || {
                    let mine = directory_in_use(files, ["a", "b"][me]);
                    fds[me].store(mine, Ordering::SeqCst);
                    start.wait();
                    start.wait();
                    let other = fds[1 - me].load(Ordering::SeqCst);
                    files.linkat(mine, b"f", other, b"l", 0).unwrap();
                    files.renameat2(mine, b"f", other, b"g", 0).unwrap();
                });
            }
            start.wait();
            let nodes = [b"a", b"b"].map(|name| files.fs().walk(&Cred::root(), None, name, true).unwrap());
            let held = [&nodes[0], &nodes[1]].map(|node| files.fs().table.change(&node.inode));
            start.wait();
            // Both have their own descriptor, and go on to the other's.
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(held);
        });
        assert_eq!((text(&files, "a/l"), text(&files, "b/g")), ("b".into(), "a".into()));
    }));
}

#[test]
fn a_rename_holds_both_its_directories_against_a_close() {
    let files = files();
    let from = directory_in_use(&files, "from");
    files.mkdir(b"to", 0o777).unwrap();
    let target = AtomicI32::new(-1);
    let until = std::time::Instant::now() + std::time::Duration::from_millis(1500);
    std::thread::scope(|s| {
        s.spawn(|| {
            while std::time::Instant::now() < until {
                let to = target.load(Ordering::SeqCst);
                match files.renameat2(from, b"f", to, b"f", 0) {
                    Ok(()) => files.rename(b"to/f", b"from/f", 0).unwrap(),
                    Err(e) => assert_eq!(e.errno(), libc::EBADF),
                }
            }
        });
        while std::time::Instant::now() < until {
            let to = files.open(b"to", O_RDONLY | O_DIRECTORY, 0).unwrap();
            for _ in 0..40 {
                files.fstat(to).unwrap();
            }
            target.store(to, Ordering::SeqCst);
            for _ in 0..20 {
                files.fstat(to).unwrap();
            }
            files.close(to).unwrap();
        }
    });
}

#[test]
fn who_waits_for_an_inode_is_in_no_epoch_yet() {
    assert!(ends(|| {
        let files = Arc::new(files());
        make(&files, "f", "text");
        let node = files.fs().walk(&Cred::root(), None, b"f", true).unwrap();
        // One that waits, and one that copies first.
        for bytes in [&b"next"[..], &[5; 8192]] {
            let held = files.fs().table.change(&node.inode);
            let waiting = {
                let (files, node) = (files.clone(), node.clone());
                std::thread::spawn(move || {
                    files.fs().write_at(&Cred::root(), &node, 0, bytes, false).unwrap()
                })
            };
            std::thread::sleep(std::time::Duration::from_millis(100));
            // The epoch ends though a write waits, so that its record is of the next one: what is done with the
            // lock meanwhile stands in front of it in the log, and must not be of a later epoch.
            files.fs().tick().unwrap();
            assert!(!waiting.is_finished());
            drop(held);
            waiting.join().unwrap();
        }
    }));
}

#[test]
fn a_destructor_of_a_thread_uses_the_file_system() {
    /// The file system, and where it says that all went well.
    type Task = (Arc<Files<Pool>>, Arc<AtomicBool>);
    struct Late(std::cell::RefCell<Option<Task>>);
    impl Drop for Late {
        fn drop(&mut self) {
            let (files, fine) = self.0.take().unwrap();
            let used = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                assert_eq!(files.stat(b"/d/f").unwrap().size, 4);
                make(&files, "/d/late", "late");
                assert_eq!(text(&files, "/d/late"), "late");
                files.unlink(b"/d/late").unwrap();
            }));
            fine.store(used.is_ok(), Ordering::SeqCst);
        }
    }
    // Torn down last, for it is the first that is used.
    thread_local!(static LATE: Late = const { Late(std::cell::RefCell::new(None)) });
    let files = Arc::new(files());
    files.mkdir(b"d", 0o777).unwrap();
    make(&files, "/d/f", "text");
    let fine = Arc::new(AtomicBool::new(false));
    let (f, said) = (files.clone(), fine.clone());
    std::thread::spawn(move || {
        LATE.with(|late| late.0.replace(Some((f.clone(), said))));
        assert_eq!(text(&f, "/d/f"), "text");
    })
    .join()
    .unwrap();
    assert!(fine.load(Ordering::SeqCst));
}

/// Inodes that no one has loaded are asked for by number while their names go and their numbers are given to
/// new files.
#[test]
fn a_number_never_names_an_inode_that_is_gone() {
    let mut pool = Some(
        Fs::mkfs(Pool::memfd(32 << 20, &PoolOptions::default()).unwrap(), &MkfsOptions::default()).unwrap(),
    );
    for _ in 0..20 {
        let fs = Fs::open(pool.take().unwrap(), &OpenOptions::default()).unwrap();
        let files = Files::new(fs.clone(), Cred::root(), 0);
        let names: Vec<String> = (0..300).map(|n| format!("f{n}")).collect();
        for name in &names {
            make(&files, name, "text");
        }
        let inos: Vec<_> = names.iter().map(|n| files.stat(n.as_bytes()).unwrap().ino).collect();
        fs.close().unwrap();
        drop(files);
        let fs = Fs::open(fs.abandon().unwrap(), &OpenOptions::default()).unwrap();
        let files = Files::new(fs.clone(), Cred::root(), 0);
        std::thread::scope(|s| {
            s.spawn(|| {
                for ino in &inos {
                    while let Ok(attr) = fs.getattr(*ino) {
                        assert!(attr.size <= 4);
                    }
                }
            });
            for name in &names {
                files.unlink(name.as_bytes()).unwrap();
                make(&files, "new", "");
                files.unlink(b"new").unwrap();
            }
        });
        drop(files);
        fs.close().unwrap();
        pool = fs.abandon();
    }
}

/// The attributes of a path, which are those of its inode, read with the lock and without.
#[track_caller]
fn shown(files: &Files<Pool>, path: &[u8], what: &str) -> Attr {
    let fs = files.fs();
    let attr = fs.attr_of(&fs.walk(&Cred::root(), None, path, false).unwrap()).unwrap();
    assert_eq!(files.lstat(path).unwrap(), attr, "{what}");
    let Attr { ino, generation, .. } = attr;
    let unlocked = fs.table.line(ino.0).read(ino, generation);
    assert_eq!(unlocked, (attr.rdev == 0).then_some(attr), "{what}: without a lock");
    attr
}

/// A stat by path reads a line of its own, which whatever changes an inode has to keep.
#[test]
fn a_path_shows_what_a_descriptor_shows() {
    let files = files();
    files.mkdir(b"d", 0o777).unwrap();
    make(&files, "d/f", "text");
    let fd = files.open(b"d/f", O_RDWR, 0).unwrap();
    let steps: &[(&str, &dyn Fn() -> Result<()>)] = &[
        ("write", &|| files.pwrite(fd, &[1; 5000], 100).map(drop)),
        ("truncate", &|| files.ftruncate(fd, 7000)),
        ("fallocate", &|| files.fallocate(fd, 0, 0, 1 << 20)),
        ("chmod", &|| files.chmod(b"d/f", 0o4751)),
        ("chown", &|| files.chown(b"d/f", 3, 4)),
        ("utimens", &|| {
            let time = |sec| Some(SetTime::To(Time::new(sec, 5)));
            files.utimensat(AT_FDCWD, b"d/f", time(-7), time(1 << 33), 0)
        }),
        ("read", &|| files.pread(fd, &mut [0; 10], 0).map(drop)),
        ("setxattr", &|| files.setxattr(b"d/f", true, b"user.a", b"v", 0)),
        ("removexattr", &|| files.removexattr(b"d/f", true, b"user.a")),
        ("link", &|| files.link(b"d/f", b"d/g")),
        ("unlink", &|| files.unlink(b"d/g")),
        ("mkdir", &|| files.mkdir(b"d/d", 0o2777)),
        ("rename a directory", &|| files.rename(b"d/d", b"e", 0)),
        ("and back", &|| files.rename(b"e", b"d/d", 0)),
        ("rmdir", &|| files.rmdir(b"d/d")),
        ("replace", &|| {
            make(&files, "d/h", "other");
            files.link(b"d/h", b"i")?;
            files.rename(b"d/f", b"d/h", 0)?;
            shown(&files, b"i", "what was replaced");
            files.rename(b"d/h", b"d/f", 0)
        }),
    ];
    for (what, step) in steps {
        step().unwrap();
        shown(&files, b"d/f", what);
        shown(&files, b"d", what);
        shown(&files, b"/d", what);
    }
    files.symlink(b"f", b"d/s").unwrap();
    assert_eq!(shown(&files, b"d/s", "a symbolic link").size, 1);
    let device = libc::S_IFCHR | 0o600;
    files.mknod(b"d/c", device, 0x105).unwrap();
    assert_eq!(shown(&files, b"d/c", "a device").rdev, 0x105);
    // A number that is used again.
    files.close(fd).unwrap();
    for size in 0..50 {
        files.unlink(b"d/f").unwrap();
        make(&files, "d/f", &"x".repeat(size));
        assert_eq!(shown(&files, b"d/f", "anew").size, size as u64);
    }
    // Inodes that come from their logs, after a clean close and after a crash.
    let mut fs = files.fs().clone();
    drop(files);
    for clean in [true, false] {
        if clean {
            fs.close().unwrap();
        }
        fs = Fs::open(fs.abandon().expect("nobody else uses it"), &OpenOptions::default()).unwrap();
        let files = Files::new(fs.clone(), Cred::root(), 0o022);
        assert_eq!(shown(&files, b"d/f", "loaded").size, 49);
        shown(&files, b"d", "loaded");
        shown(&files, b"d/s", "loaded");
    }
}

/// A copy may end after an operation has found no block free, and before it looks for copies that keep some.
#[test]
fn what_a_copy_gave_back_meanwhile_is_looked_for_once() {
    let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
    let pool = Fs::mkfs(Pool::memfd(32 << 20, &options).unwrap(), &MkfsOptions::default()).unwrap();
    let options = OpenOptions { engine: EngineKind::Emu, ..OpenOptions::default() };
    let files = Files::new(Fs::open(pool, &options).unwrap(), Cred::root(), 0o022);
    let fs = files.fs();
    let fd = files.open(b"file", O_RDWR | O_CREAT, 0o666).unwrap();
    assert!(!fs.make_room(&mut fs.room()), "there was no copy yet");
    let mut room = fs.room();
    files.submit_pwrite(fd, vec![1; 256 << 10].into(), 0).unwrap().wait().unwrap();
    assert!(fs.make_room(&mut room));
    assert!(!fs.make_room(&mut room), "once");
}
