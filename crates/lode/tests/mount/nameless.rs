//! O_TMPFILE: files that have no name, get one by linkat(2) or never.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, XattrFlags};
use rustix::process::{Pid, Signal, kill_process};

use crate::identity::{GROUP_OBJ, MASK, NO_ID, NOBODY, OTHER, USER, USER_OBJ, acl};
use crate::need_mount;
use crate::rig::{Rig, errno, lode, pattern, succeed, text, wait_until};

/// With and without the kernel's caches (and with it opens that are never told), and durable at the answer.
const WAYS: [&str; 3] = ["cache=auto", "cache=none", "sync"];
/// Blocks by which the inode table grows, which are not given back.
const TABLE_GROWS_BLOCKS: u64 = 20;
/// Nameless files on a full pool, before there is certainly no slot left.
const SLOTS_LEFT_MAX: usize = 600;

fn tmpfile(dir: &Path, mode: u32) -> std::io::Result<File> {
    tmpfile_with(dir, OFlags::RDWR, mode)
}

fn tmpfile_with(dir: &Path, flags: OFlags, mode: u32) -> std::io::Result<File> {
    Ok(File::from(rustix::fs::open(dir, OFlags::TMPFILE | OFlags::CLOEXEC | flags, Mode::from(mode))?))
}

type Link = fn(&File, &Path) -> std::io::Result<()>;

/// As a program without rights does it.
fn name(file: &File, path: &Path) -> std::io::Result<()> {
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// As one with CAP_DAC_READ_SEARCH may.
fn name_by_descriptor(file: &File, path: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::linkat(file, "", CWD, path, AtFlags::EMPTY_PATH)?)
}

fn blocks_free(rig: &Rig) -> u64 {
    rustix::fs::statvfs(rig.dir()).unwrap().f_bfree
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

#[test]
fn a_nameless_file_lives_until_its_last_descriptor_is_closed() {
    need_mount!();
    for way in WAYS {
        let rig = Rig::mounted_with(way);
        let before = blocks_free(&rig);
        let data = pattern(8 << 20, 1);
        let mut file = tmpfile(&rig.dir(), 0o600).unwrap();
        file.write_all(&data).unwrap();
        file.sync_all().unwrap();
        file.sync_data().unwrap();
        let told = file.metadata().unwrap();
        assert_eq!((told.nlink(), told.len(), told.blocks()), (0, 8 << 20, (8 << 20) / 512), "{way}");
        assert!(told.is_file());
        assert_eq!(count(&rig.dir()), 0);
        let used = before - blocks_free(&rig);
        assert!((2048..2048 + TABLE_GROWS_BLOCKS).contains(&used), "{way}: {used}");

        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut again = File::options().read(true).write(true).open(link).unwrap();
        drop(file);
        let mut read = Vec::new();
        again.read_to_end(&mut read).unwrap();
        assert!(read == data, "{way}");
        again.set_len(5).unwrap();
        again.write_all_at(b"end", 5).unwrap();
        again.rewind().unwrap();
        read.clear();
        again.read_to_end(&mut read).unwrap();
        assert_eq!(read, [&data[..5], b"end"].concat(), "{way}");
        assert_eq!(again.metadata().unwrap().nlink(), 0);
        again.set_len(8 << 20).unwrap();
        again.write_all_at(&data, 0).unwrap();
        again.sync_all().unwrap();
        drop(again);
        wait_until("its space is free", || before - blocks_free(&rig) < TABLE_GROWS_BLOCKS);
        assert_eq!(count(&rig.dir()), 0);
    }
}

/// Neither blocks nor slots nor logs: 64 slots are a block.
#[test]
fn many_nameless_files_leave_nothing() {
    need_mount!();
    for way in ["cache=auto", "cache=none", "assume=memory"] {
        let rig = Rig::mounted_with(way);
        let round = || {
            let mut open: Vec<File> = (0..100).map(|_| tmpfile(&rig.dir(), 0o600).unwrap()).collect();
            open.iter_mut().for_each(|file| file.write_all(&[1; 5000]).unwrap());
            open[0].sync_all().unwrap();
            drop(open);
            // What was freed may be used again.
            File::open(rig.dir()).unwrap().sync_all().unwrap();
        };
        (0..5).for_each(|_| round());
        let before = blocks_free(&rig);
        (0..30).for_each(|_| round());
        wait_until("nothing is left", || before.saturating_sub(blocks_free(&rig)) < TABLE_GROWS_BLOCKS);
    }
}

#[test]
fn linkat_gives_a_nameless_file_a_name() {
    need_mount!();
    for way in WAYS {
        let rig = Rig::mounted_with(way);
        fs::create_dir(rig.at("d")).unwrap();
        let data = pattern(100_000, 2);
        let ways: [(&str, Link); 2] = [("f", name), ("d/g", name_by_descriptor)];
        for (path, link) in ways {
            let path = rig.at(path);
            let mut file = tmpfile(&rig.dir(), 0o640).unwrap();
            file.write_all(&data).unwrap();
            fs::write(&path, "taken").unwrap();
            assert_eq!(errno(link(&file, &path)), libc::EEXIST);
            assert_eq!(file.metadata().unwrap().nlink(), 0);
            fs::remove_file(&path).unwrap();
            link(&file, &path).unwrap();
            let (there, told) = (fs::metadata(&path).unwrap(), file.metadata().unwrap());
            assert_eq!((there.ino(), there.nlink(), told.nlink()), (told.ino(), 1, 1), "{way}");
            link(&file, &rig.at("second")).unwrap();
            assert_eq!(file.metadata().unwrap().nlink(), 2);
            file.write_all(b"more").unwrap();
            fs::remove_file(rig.at("second")).unwrap();
            drop(file);
            assert!(fs::read(&path).unwrap() == [&data[..], b"more"].concat(), "{way}");

            // Once named, without a name for good, as any other.
            let file = tmpfile(&rig.dir(), 0o600).unwrap();
            link(&file, &rig.at("second")).unwrap();
            fs::remove_file(rig.at("second")).unwrap();
            assert_eq!(file.metadata().unwrap().nlink(), 0);
            assert_eq!(errno(link(&file, &rig.at("second"))), libc::ENOENT);

            let file = tmpfile_with(&rig.dir(), OFlags::WRONLY | OFlags::EXCL, 0o600).unwrap();
            assert_eq!(errno(link(&file, &rig.at("second"))), libc::ENOENT);
        }
        assert_eq!((count(&rig.dir()), count(&rig.at("d"))), (2, 1));
        rig.umount();
        rig.mount(way);
        for path in ["f", "d/g"] {
            assert!(fs::read(rig.at(path)).unwrap() == [&data[..], b"more"].concat(), "{way}: {path}");
            let m = fs::metadata(rig.at(path)).unwrap();
            assert_eq!((m.nlink(), m.mode() & 0o7777), (1, 0o640));
        }
    }
}

/// Owner, group, mode, access ACL.
type Identity = (u32, u32, u32, Vec<u8>);

fn identity(file: &File) -> Identity {
    let told = file.metadata().unwrap();
    let mut acl = [0; 256];
    let n = rustix::fs::fgetxattr(file, "system.posix_acl_access", &mut acl[..]).unwrap_or(0);
    (told.uid(), told.gid(), told.mode() & 0o7777, acl[..n].to_vec())
}

/// Runs as `id` with a umask of its own, both this thread's alone.
fn as_user<T: Send>(id: u32, umask: u32, run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // SAFETY: they take no memory, and change this thread alone, which ends here.
            unsafe {
                assert_eq!(libc::unshare(libc::CLONE_FS), 0);
                libc::umask(umask);
                libc::setfsgid(id);
                libc::setfsuid(id);
            }
            run()
        });
        worker.join().unwrap()
    })
}

#[test]
fn a_nameless_file_belongs_to_whom_a_named_one_would() {
    need_mount!();
    let rig = Rig::mounted();
    let list = acl(&[
        (USER_OBJ, 7, NO_ID),
        (USER, 4, 7002),
        (GROUP_OBJ, 7, NO_ID),
        (MASK, 6, NO_ID),
        (OTHER, 5, NO_ID),
    ]);
    for (dir, mode, listed) in
        [("plain", 0o777, false), ("group", 0o2777, false), ("list", 0o777, true), ("both", 0o2777, true)]
    {
        let dir = rig.at(dir);
        fs::create_dir(&dir).unwrap();
        chown(&dir, None, Some(7001)).unwrap();
        rustix::fs::chmod(&dir, Mode::from(mode)).unwrap();
        if listed {
            rustix::fs::setxattr(&dir, "system.posix_acl_default", &list, XattrFlags::empty()).unwrap();
        }
    }
    let both = |id: u32, umask: u32, dir: &str, mode: u32| {
        as_user(id, umask, || {
            let nameless = identity(&tmpfile(&rig.at(dir), mode).unwrap());
            let path = rig.at(dir).join("named");
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
            let named = identity(&File::from(rustix::fs::open(&path, flags, Mode::from(mode)).unwrap()));
            fs::remove_file(path).unwrap();
            assert_eq!(nameless, named, "{id} {umask:#o} {dir} {mode:#o}");
            nameless
        })
    };
    for id in [0, NOBODY] {
        for umask in [0, 0o027, 0o777] {
            for dir in ["plain", "group", "list", "both"] {
                for mode in [0o666, 0o600, 0o2775, 0o4711, 0] {
                    both(id, umask, dir, mode);
                }
            }
        }
    }
    let (owner, group, mode, acl) = both(NOBODY, 0o027, "plain", 0o666);
    assert_eq!((owner, group, mode, acl.len()), (NOBODY, NOBODY, 0o640, 0));
    let (owner, group, mode, acl) = both(NOBODY, 0o777, "both", 0o666);
    assert_eq!((owner, group, mode), (NOBODY, 7001, 0o664), "a default ACL takes the place of the umask");
    assert_eq!(acl.len(), list.len());
}

#[test]
fn where_no_nameless_file_can_be() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "").unwrap();
    assert_eq!(errno(tmpfile(&rig.at("f"), 0o600)), libc::ENOTDIR);
    assert_eq!(errno(tmpfile(&rig.at("none"), 0o600)), libc::ENOENT);
    assert_eq!(errno(tmpfile_with(&rig.dir(), OFlags::RDONLY, 0o600)), libc::EINVAL);
    assert_eq!(as_user(NOBODY, 0, || errno(tmpfile(&rig.dir(), 0o600))), libc::EACCES);

    fs::create_dir(rig.at("gone")).unwrap();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let gone: OwnedFd = rustix::fs::open(rig.at("gone"), flags, Mode::empty()).unwrap();
    fs::remove_dir(rig.at("gone")).unwrap();
    let there = format!("/proc/self/fd/{}", gone.as_raw_fd());
    assert_eq!(errno(tmpfile(Path::new(&there), 0o600)), libc::ENOENT);
    drop(gone);

    // A name needs a directory on the same file system.
    let file = tmpfile(&rig.dir(), 0o600).unwrap();
    assert_eq!(errno(name(&file, &rig.beside("elsewhere"))), libc::EXDEV);
    drop(file);
    rig.umount();
    rig.mount("ro");
    assert_eq!(errno(tmpfile(&rig.dir(), 0o600)), libc::EROFS);
}

#[test]
fn a_pool_that_nameless_files_filled_has_room_again() {
    need_mount!();
    let rig = Rig::mounted();
    let mut file = tmpfile(&rig.dir(), 0o600).unwrap();
    let full = loop {
        if let Err(e) = file.write_all(&[7; 1 << 20]) {
            break e;
        }
    };
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    // The rest in blocks, then in slots.
    while file.write_all(&[7; 4096]).is_ok() {}
    let mut others = Vec::new();
    let full = loop {
        assert!(others.len() < SLOTS_LEFT_MAX, "there are always more");
        match tmpfile(&rig.dir(), 0o600) {
            Ok(other) => others.push(other),
            Err(e) => break e,
        }
    };
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    drop(others.pop());
    wait_until("a slot is free", || tmpfile(&rig.dir(), 0o600).is_ok());
    drop((others, file));
    wait_until("there is room again", || fs::write(rig.at("g"), [1; 1 << 20]).is_ok());
}

/// Killed, or ended while they are open: nothing is left of nameless files, and all of those that got a name.
#[test]
fn a_server_that_ends_takes_nameless_files_with_it() {
    need_mount!();
    for way in ["rw", "assume=memory", "cache=none"] {
        let mut rig = Rig::new("64M");
        let data = pattern(3 << 20, 3);
        rig.mount_foreground(way);
        for path in ["first", "named"] {
            fs::write(rig.at(path), &data).unwrap();
        }
        rig.umount();
        rig.wait_for_server();
        let mut pid = rig.mount_foreground(way);
        let before = blocks_free(&rig);
        fs::remove_file(rig.at("named")).unwrap();
        for signal in [Signal::KILL, Signal::TERM, Signal::KILL, Signal::KILL] {
            let mut open: Vec<File> = (0..20).map(|_| tmpfile(&rig.dir(), 0o600).unwrap()).collect();
            open.iter_mut().take(4).for_each(|file| file.write_all(&data).unwrap());
            open[0].sync_all().unwrap();
            name(&open[1], &rig.at("named")).unwrap();
            kill(pid, signal);
            rig.wait_for_server();
            drop(open);
            if rig.is_mounted() {
                rig.umount();
            }
            let checked = lode().arg("fsck").arg(rig.pool()).output().unwrap();
            let said = format!("{}{}", text(&checked.stdout), text(&checked.stderr));
            assert_eq!(checked.status.code(), Some(0), "{way}: {signal:?}: {said}");
            pid = rig.mount_foreground(way);
            assert_eq!(count(&rig.dir()), 2);
            assert!(fs::read(rig.at("named")).unwrap() == data, "{way}: {signal:?}");
            assert_eq!(fs::metadata(rig.at("named")).unwrap().nlink(), 1);
            wait_until("as much is free as before", || blocks_free(&rig) == before);
            fs::remove_file(rig.at("named")).unwrap();
        }
        succeed(Command::new("umount").arg(rig.dir()));
        assert_eq!(rig.wait_for_server().0, Some(0));
    }
}
