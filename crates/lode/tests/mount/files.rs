//! Names, links, directories and attributes.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags};

use crate::need_mount;
use crate::rig::{Rig, errno, pattern};

/// Longer than a step of the coarse clock that stamps files (4 ms, or 10 at 100 Hz).
const TICK: Duration = Duration::from_millis(12);

#[test]
fn files_and_directories_come_and_go() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    fs::write(rig.at("d/f"), "one").unwrap();
    assert_eq!(fs::read(rig.at("d/f")).unwrap(), b"one");
    File::options().append(true).open(rig.at("d/f")).unwrap().write_all(b" two").unwrap();
    assert_eq!(fs::read(rig.at("d/f")).unwrap(), b"one two");
    symlink("d/f", rig.at("s")).unwrap();
    assert_eq!(fs::read_link(rig.at("s")).unwrap(), Path::new("d/f"));
    assert_eq!(fs::read(rig.at("s")).unwrap(), b"one two");
    fs::rename(rig.at("d/f"), rig.at("g")).unwrap();
    assert_eq!(errno(fs::read(rig.at("s"))), libc::ENOENT);
    assert_eq!(names(&rig.dir()), set(["d", "g", "s"]));
    assert_eq!(names(&rig.at("d")), set([]));
    assert_eq!(errno(fs::remove_dir(rig.at("g"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_file(rig.at("d"))), libc::EISDIR);
    fs::write(rig.at("d/x"), "").unwrap();
    assert_eq!(errno(fs::remove_dir(rig.at("d"))), libc::ENOTEMPTY);
    fs::remove_file(rig.at("d/x")).unwrap();
    fs::remove_dir(rig.at("d")).unwrap();
    fs::remove_file(rig.at("g")).unwrap();
    fs::remove_file(rig.at("s")).unwrap();
    assert_eq!(names(&rig.dir()), set([]));
}

#[test]
fn exclusive_creation_and_truncating_opens() {
    need_mount!();
    let rig = Rig::mounted();
    let new = || File::options().write(true).create_new(true).open(rig.at("f"));
    new().unwrap().write_all(b"content").unwrap();
    assert_eq!(errno(new()), libc::EEXIST);
    assert_eq!(fs::metadata(rig.at("f")).unwrap().len(), 7);
    let kept = File::open(rig.at("f")).unwrap();
    File::create(rig.at("f")).unwrap();
    assert_eq!(kept.metadata().unwrap().len(), 0);
    assert_eq!(fs::metadata(rig.at("f")).unwrap().len(), 0);
}

#[test]
fn rename_flags() {
    need_mount!();
    let rig = Rig::mounted();
    let rename = |a: &str, b: &str, flags| {
        rustix::fs::renameat_with(CWD, rig.at(a), CWD, rig.at(b), flags).map_err(std::io::Error::from)
    };
    fs::write(rig.at("a"), "a").unwrap();
    fs::write(rig.at("b"), "b").unwrap();
    assert_eq!(errno(rename("a", "b", RenameFlags::NOREPLACE)), libc::EEXIST);
    rename("a", "c", RenameFlags::NOREPLACE).unwrap();
    rename("b", "c", RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(rig.at("b")).unwrap(), fs::read(rig.at("c")).unwrap()), (b"a".into(), b"b".into()));
    assert_eq!(errno(rename("b", "none", RenameFlags::EXCHANGE)), libc::ENOENT);
    assert_eq!(errno(rename("b", "c", RenameFlags::WHITEOUT | RenameFlags::EXCHANGE)), libc::EINVAL);

    // A directory and a file change places: the link counts of both parents follow.
    fs::create_dir(rig.at("p")).unwrap();
    fs::create_dir(rig.at("p/q")).unwrap();
    assert_eq!((fs::metadata(rig.dir()).unwrap().nlink(), nlink(&rig, "p")), (3, 3));
    rename("p/q", "b", RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::metadata(rig.dir()).unwrap().nlink(), nlink(&rig, "p")), (4, 2));
    assert_eq!(fs::read(rig.at("p/q")).unwrap(), b"a");
}

#[test]
fn a_directory_cannot_move_below_itself() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir_all(rig.at("a/b/c")).unwrap();
    assert_eq!(errno(fs::rename(rig.at("a"), rig.at("a/b/c/d"))), libc::EINVAL);
    fs::create_dir(rig.at("x")).unwrap();
    fs::rename(rig.at("a/b"), rig.at("x/b")).unwrap();
    assert_eq!((nlink(&rig, "a"), nlink(&rig, "x")), (2, 3));
    assert!(rig.at("x/b/c/../../../a").exists());
}

/// The kernel remembers attributes without limit, so each change of one name must show under the other.
#[test]
fn all_names_of_a_file_agree() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("a"), "x").unwrap();
    let open = File::open(rig.at("a")).unwrap();
    let mut last = ctime(&rig, "a");
    let mut later = |what: &str, name: &str| {
        let now = ctime(&rig, name);
        assert!(now > last, "{what}: ctime did not move");
        last = now;
    };
    let step = || thread::sleep(TICK);

    step();
    fs::hard_link(rig.at("a"), rig.at("b")).unwrap();
    assert_eq!((nlink(&rig, "a"), nlink(&rig, "b"), open.metadata().unwrap().nlink()), (2, 2, 2));
    later("link", "a");

    step();
    fs::set_permissions(rig.at("b"), Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(rig.at("a")).unwrap().mode() & 0o7777, 0o600);
    later("chmod of the other name", "a");

    step();
    fs::rename(rig.at("b"), rig.at("c")).unwrap();
    later("rename of the other name", "a");

    step();
    fs::write(rig.at("victim"), "").unwrap();
    fs::hard_link(rig.at("a"), rig.at("d")).unwrap();
    fs::rename(rig.at("victim"), rig.at("d")).unwrap();
    assert_eq!(nlink(&rig, "a"), 2);
    later("rename over another name", "a");

    step();
    rustix::fs::setxattr(rig.at("c"), "user.k", b"v", XattrFlags::empty()).unwrap();
    later("setxattr of the other name", "a");

    step();
    fs::write(rig.at("c"), "longer").unwrap();
    assert_eq!(fs::metadata(rig.at("a")).unwrap().len(), 6);
    later("write to the other name", "a");

    step();
    fs::remove_file(rig.at("c")).unwrap();
    assert_eq!((nlink(&rig, "a"), open.metadata().unwrap().nlink()), (1, 1));
    later("unlink of the other name", "a");

    fs::remove_file(rig.at("a")).unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

#[test]
fn directory_times_follow_their_entries() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    let mut last = times(&rig.at("d"));
    let mut changes = |what: &str, change: &dyn Fn()| {
        thread::sleep(TICK);
        change();
        let now = times(&rig.at("d"));
        assert!(now.0 > last.0 && now.1 > last.1, "{what}: {last:?} {now:?}");
        last = now;
    };
    changes("create", &|| fs::write(rig.at("d/a"), "").unwrap());
    changes("link", &|| fs::hard_link(rig.at("d/a"), rig.at("d/b")).unwrap());
    changes("rename", &|| fs::rename(rig.at("d/b"), rig.at("d/c")).unwrap());
    changes("unlink", &|| fs::remove_file(rig.at("d/c")).unwrap());
    changes("mkdir", &|| fs::create_dir(rig.at("d/e")).unwrap());
    changes("rmdir", &|| fs::remove_dir(rig.at("d/e")).unwrap());
    changes("symlink", &|| symlink("x", rig.at("d/s")).unwrap());
}

/// What a server of NFS keeps of a file: its number and its generation.
#[test]
fn a_handle_finds_what_the_kernel_has_forgotten_and_nothing_else() {
    need_mount!();
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        content: [u8; 128],
    }
    let name = |path: &Path| {
        let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        let mut handle = Handle { bytes: 128, kind: 0, content: [0; 128] };
        let mut mount = 0i32;
        // SAFETY: a path, room for as many bytes as it says, and for a number.
        let named = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                libc::AT_FDCWD,
                path.as_ptr(),
                &raw mut handle,
                &raw mut mount,
                0,
            )
        };
        assert_eq!(named, 0, "{}", std::io::Error::last_os_error());
        handle
    };
    let open = |rig: &Rig, handle: &mut Handle| {
        let mount = File::open(rig.dir()).unwrap();
        // SAFETY: a descriptor, and a handle that the kernel made.
        let fd = unsafe {
            libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut *handle, libc::O_RDONLY)
        };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: nobody else has it.
        Ok(unsafe { File::from_raw_fd(fd as i32) })
    };
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    fs::write(rig.at("d/f"), "content").unwrap();
    let (mut file, mut dir) = (name(&rig.at("d/f")), name(&rig.at("d")));
    rig.umount();
    rig.mount("rw");
    match open(&rig, &mut file) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            eprintln!(
                "SKIPPED: a_handle_finds_what_the_kernel_has_forgotten_and_nothing_else: only root opens handles"
            );
            return;
        }
        opened => assert_eq!(std::io::read_to_string(opened.unwrap()).unwrap(), "content"),
    }
    assert!(open(&rig, &mut dir).unwrap().metadata().unwrap().is_dir());
    fs::remove_file(rig.at("d/f")).unwrap();
    // The kernel may keep what was opened by a handle.
    rig.umount();
    rig.mount("rw");
    assert_eq!(errno(open(&rig, &mut file)), libc::ESTALE);
    // Another one may have its number.
    for n in 0..50 {
        fs::write(rig.at(format!("n{n}")), "other").unwrap();
    }
    assert_eq!(errno(open(&rig, &mut file)), libc::ESTALE);
}

#[test]
fn an_unlinked_file_lives_while_it_is_open() {
    need_mount!();
    let rig = Rig::mounted();
    let data = pattern(100_000, 1);
    let mut open = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
    open.write_all(&data).unwrap();
    let free_before = rustix::fs::statvfs(rig.dir()).unwrap().f_bfree;
    fs::remove_file(rig.at("f")).unwrap();
    // Its number may not be given to another file while this one is open.
    fs::write(rig.at("g"), "another").unwrap();
    assert_ne!(fs::metadata(rig.at("g")).unwrap().ino(), open.metadata().unwrap().ino());
    open.write_all(b"tail").unwrap();
    let mut again = Vec::new();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
    File::open(path).unwrap().read_to_end(&mut again).unwrap();
    assert_eq!(again, [&data[..], b"tail"].concat());
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    drop(open);
    // The kernel gives the last reference back soon after.
    crate::rig::wait_until("the blocks are free", || {
        rustix::fs::statvfs(rig.dir()).unwrap().f_bfree > free_before
    });
}

#[test]
fn a_directory_read_while_it_is_emptied() {
    need_mount!();
    const FILES: usize = 10_000;
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    for i in 0..FILES {
        File::create(rig.at(format!("d/{i}"))).unwrap();
    }
    assert_eq!(names(&rig.at("d")).len(), FILES);
    // As `rm -r` does: each entry goes as it is seen. Every one must be seen once.
    let mut seen = BTreeSet::new();
    for entry in fs::read_dir(rig.at("d")).unwrap() {
        let entry = entry.unwrap();
        assert!(seen.insert(entry.file_name()), "{:?} came twice", entry.file_name());
        fs::remove_file(entry.path()).unwrap();
    }
    assert_eq!(seen.len(), FILES);
    fs::remove_dir(rig.at("d")).unwrap();
}

#[test]
fn a_directory_read_while_others_come_and_go() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    for i in 0..2000 {
        File::create(rig.at(format!("d/stays-{i}"))).unwrap();
    }
    let mut stays = BTreeSet::new();
    for (n, entry) in fs::read_dir(rig.at("d")).unwrap().enumerate() {
        let name = entry.unwrap().file_name();
        if name.to_str().unwrap().starts_with("stays") {
            assert!(stays.insert(name.clone()), "{name:?} came twice");
        }
        if n % 3 == 0 {
            File::create(rig.at(format!("d/comes-{n}"))).unwrap();
        }
        if n % 6 == 3 {
            fs::remove_file(rig.at(format!("d/comes-{}", n - 3))).unwrap();
        }
    }
    assert_eq!(stays.len(), 2000);
}

#[test]
fn any_name_is_a_name() {
    need_mount!();
    let rig = Rig::mounted();
    let all: Vec<Vec<u8>> = vec![
        b"line\nbreak".to_vec(),
        b"\xff\xfe not UTF-8 \x80".to_vec(),
        b" ".to_vec(),
        b"...".to_vec(),
        b"\x01\x7f".to_vec(),
        vec![b'n'; 255],
        "ü".repeat(127).into_bytes(),
    ];
    for name in &all {
        let path = rig.at(OsString::from_vec(name.clone()));
        fs::write(&path, name).unwrap();
        assert_eq!(&fs::read(&path).unwrap(), name);
    }
    let listed: BTreeSet<Vec<u8>> = names(&rig.dir()).into_iter().map(OsString::into_vec).collect();
    assert_eq!(listed, all.into_iter().collect());
    let long = rig.at("n".repeat(256));
    assert_eq!(errno(File::create(&long)), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::metadata(&long)), libc::ENAMETOOLONG);
    let target = "t".repeat(4095);
    symlink(&target, rig.at("s")).unwrap();
    assert_eq!(fs::read_link(rig.at("s")).unwrap(), Path::new(&target));
}

#[test]
fn special_files() {
    need_mount!();
    let rig = Rig::mounted();
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(CWD, rig.at(name), kind, Mode::from(0o600), device).unwrap();
        fs::symlink_metadata(rig.at(name)).unwrap()
    };
    assert!(make("fifo", rustix::fs::FileType::Fifo, 0).file_type().is_fifo());
    assert!(make("socket", rustix::fs::FileType::Socket, 0).file_type().is_socket());
    let number = rustix::fs::makedev(8, 300_000);
    let device = make("disk", rustix::fs::FileType::BlockDevice, number);
    assert!(device.file_type().is_block_device());
    assert_eq!(device.rdev(), number);
    make("null", rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    // Devices work, as on any file system that the superuser mounts.
    assert_eq!(fs::read(rig.at("null")).unwrap(), b"");
    File::options().write(true).open(rig.at("null")).unwrap().write_all(b"gone").unwrap();
}

#[test]
fn times_are_kept_to_the_nanosecond() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "").unwrap();
    let set = |atime: (i64, i64), mtime: (i64, i64)| {
        let at = |(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec };
        let stamps = Timestamps { last_access: at(atime), last_modification: at(mtime) };
        rustix::fs::utimensat(CWD, rig.at("f"), &stamps, AtFlags::empty()).unwrap();
        let m = fs::metadata(rig.at("f")).unwrap();
        ((m.atime(), m.atime_nsec()), (m.mtime(), m.mtime_nsec()))
    };
    let (a, m) = ((1, 999_999_999), (4_102_444_800, 1));
    assert_eq!(set(a, m), (a, m));
    let before_1970 = ((-1, 1), (-1000, 999_999_999));
    assert_eq!(set(before_1970.0, before_1970.1), before_1970);
    let (kept, now) = set((0, UTIME_OMIT), (0, UTIME_NOW));
    assert_eq!(kept, (-1, 1));
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(now.0.abs_diff(clock.as_secs() as i64) < 60);
}

#[test]
fn extended_attributes() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "").unwrap();
    let f = rig.at("f");
    let set = |name: &str, value: &[u8], flags| {
        rustix::fs::setxattr(&f, name, value, flags).map_err(std::io::Error::from)
    };
    let get = |name: &str, room: usize| {
        let mut buffer = vec![0u8; room];
        let got = rustix::fs::getxattr(&f, name, &mut buffer[..]).map_err(std::io::Error::from)?;
        buffer.truncate(got);
        Ok::<_, std::io::Error>((got, buffer))
    };
    assert_eq!(errno(get("user.a", 10)), libc::ENODATA);
    assert_eq!(errno(set("user.a", b"x", XattrFlags::REPLACE)), libc::ENODATA);
    set("user.a", b"value", XattrFlags::CREATE).unwrap();
    assert_eq!(errno(set("user.a", b"x", XattrFlags::CREATE)), libc::EEXIST);
    assert_eq!(get("user.a", 10).unwrap().1, b"value");
    assert_eq!(rustix::fs::getxattr_query(&f, "user.a").unwrap(), 5);
    assert_eq!(errno(get("user.a", 4)), libc::ERANGE);
    set("user.empty", b"", XattrFlags::empty()).unwrap();
    assert_eq!(get("user.empty", 4).unwrap().0, 0);
    let large = pattern(60_000, 3);
    set("user.large", &large, XattrFlags::empty()).unwrap();
    assert_eq!(get("user.large", 65536).unwrap().1, large);
    set("trusted.t", b"1", XattrFlags::empty()).unwrap();
    set("security.s", b"2", XattrFlags::empty()).unwrap();

    let mut list = vec![0u8; 4096];
    let got = rustix::fs::listxattr(&f, &mut list[..]).unwrap();
    let listed: BTreeSet<&[u8]> = list[..got].split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    let expected: [&[u8]; 5] = [b"security.s", b"trusted.t", b"user.a", b"user.empty", b"user.large"];
    assert_eq!(listed, expected.into_iter().collect());
    assert_eq!(rustix::fs::listxattr_query(&f).unwrap(), got);

    rustix::fs::removexattr(&f, "user.a").unwrap();
    assert_eq!(errno(get("user.a", 10)), libc::ENODATA);
    assert_eq!(errno(rustix::fs::removexattr(&f, "user.a").map_err(Into::into)), libc::ENODATA);
}

#[test]
fn space_is_reported_and_given_back() {
    need_mount!();
    let rig = Rig::mounted();
    let space = || rustix::fs::statvfs(rig.dir()).unwrap();
    let empty = space();
    assert_eq!(empty.f_namemax, 255);
    let bytes = empty.f_blocks * empty.f_frsize;
    assert!((48 << 20..=64 << 20).contains(&bytes), "{bytes}");
    fs::write(rig.at("f"), vec![1; 8 << 20]).unwrap();
    assert_eq!(fs::metadata(rig.at("f")).unwrap().blocks(), (8 << 20) / 512);
    let used = (empty.f_bfree - space().f_bfree) * empty.f_frsize;
    assert!((8 << 20..9 << 20).contains(&used), "{used}");
    fs::remove_file(rig.at("f")).unwrap();
    crate::rig::wait_until("the blocks are free", || {
        (empty.f_bfree - space().f_bfree) * empty.f_frsize < 1 << 20
    });
}

#[test]
fn a_full_pool_says_so_and_recovers() {
    need_mount!();
    let rig = Rig::mounted();
    let mut f = File::create(rig.at("f")).unwrap();
    let full = loop {
        if let Err(e) = f.write_all(&[7; 1 << 20]) {
            break e;
        }
    };
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    drop(f);
    fs::remove_file(rig.at("f")).unwrap();
    crate::rig::wait_until("there is room again", || fs::write(rig.at("g"), [1; 1 << 20]).is_ok());
}

#[test]
fn what_is_not_there_is_refused_with_its_own_errno() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "").unwrap();
    let f = File::open(rig.at("f")).unwrap();
    // A terminal's ioctl on a file.
    // SAFETY: the descriptor is open.
    let is_terminal = unsafe { libc::isatty(std::os::fd::AsRawFd::as_raw_fd(&f)) };
    assert_eq!(is_terminal, 0);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
}

#[test]
fn permissions_bind_ordinary_users() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("secret"), "s").unwrap();
    fs::set_permissions(rig.at("secret"), Permissions::from_mode(0o600)).unwrap();
    assert!(!rig.as_nobody("cat secret").status.success());
    assert!(!rig.as_nobody("touch new").status.success());
    fs::set_permissions(rig.dir(), Permissions::from_mode(0o1777)).unwrap();
    assert!(rig.as_nobody("umask 027; touch new; mkdir dir").status.success());
    let new = fs::metadata(rig.at("new")).unwrap();
    assert_eq!((new.uid(), new.gid(), new.mode() & 0o7777), (65534, 65534, 0o640));
    assert_eq!(fs::metadata(rig.at("dir")).unwrap().mode() & 0o7777, 0o750);
    assert!(!rig.as_nobody("rm -f secret").status.success());
    let sync = File::options().custom_flags(libc::O_SYNC).write(true).open(rig.at("new")).unwrap();
    rustix::fs::fsync(&sync).unwrap();
    rustix::fs::fsync(File::open(rig.dir()).unwrap()).unwrap();
}

fn names(dir: &Path) -> BTreeSet<OsString> {
    fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect()
}

fn set<const N: usize>(names: [&str; N]) -> BTreeSet<OsString> {
    names.into_iter().map(OsString::from).collect()
}

fn nlink(rig: &Rig, name: &str) -> u64 {
    fs::metadata(rig.at(name)).unwrap().nlink()
}

fn ctime(rig: &Rig, name: &str) -> (i64, i64) {
    let m = fs::metadata(rig.at(name)).unwrap();
    (m.ctime(), m.ctime_nsec())
}

/// Modification and change.
fn times(path: &Path) -> ((i64, i64), (i64, i64)) {
    let m = fs::metadata(path).unwrap();
    ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()))
}
