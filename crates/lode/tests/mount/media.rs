//! Media that are bad when a pool is mounted, or become so under a mount: what is lost is told, all else goes on.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, Signal, kill_process};

use crate::need_mount;
use crate::rig::{Rig, errno, fail, lode, pattern, succeed, text, wait_until};

const MIB: usize = 1 << 20;
const POOL_BYTES: u64 = 64 << 20;
const BLOCK: usize = 4096;

fn set_len(path: &Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

/// Reads through to the pool: the kernel's copy is dropped before.
fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let file = File::open(path)?;
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    fs::read(path)
}

/// Byte of the pool where the first of `data`'s blocks stands, and where the last one ends.
fn stands_at(pool: &[u8], data: &[u8]) -> (u64, u64) {
    let blocks = data.chunks(BLOCK);
    let at = blocks.map(|block| pool.chunks(BLOCK).position(|b| b == block).expect("the data are there"));
    let (first, last) = at.fold((usize::MAX, 0), |(first, last), at| (first.min(at), last.max(at)));
    ((first * BLOCK) as u64, ((last + 1) * BLOCK) as u64)
}

/// A disk of its own, a quarter as large as the pool on it, which has holes.
struct Disk(PathBuf);

impl Disk {
    fn below(rig: &Rig) -> Disk {
        let disk = rig.beside("disk");
        fs::create_dir(&disk).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("lode-test", &disk, "tmpfs", flags, Some(c"size=16M")).unwrap();
        let disk = Disk(disk);
        File::create(disk.pool()).unwrap().set_len(POOL_BYTES).unwrap();
        let made = lode().arg("mkfs").arg(disk.pool()).output().unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
        disk
    }

    fn pool(&self) -> PathBuf {
        self.0.join("pool")
    }

    /// What is said of it.
    fn is_full(&self) -> String {
        format!("the disk below {} is full: make room there", self.pool().display())
    }

    fn make_room(&self) {
        rustix::mount::mount_remount(&self.0, rustix::mount::MountFlags::empty(), c"size=80M").unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// A file with holes is no larger than its disk: what finds no room says so, and blames no medium.
#[test]
fn a_full_disk_below_a_sparse_pool_is_told() {
    need_mount!();
    let rig = Rig::new("64M");
    let disk = Disk::below(&rig);
    fs::write(rig.beside("big"), pattern(24 * MIB, 3)).unwrap();
    let to = format!("{}:/big", disk.pool().display());
    let copied = lode().arg("cp").arg(rig.beside("big")).arg(to).output().unwrap();
    let said = text(&copied.stderr);
    assert_eq!(copied.status.code(), Some(1), "{said}");
    assert!(said.contains(&disk.is_full()) && !said.contains("kernel log"), "{said}");
}

/// Nor is what found none lost to the pool: with room below it all of it is there again.
#[test]
fn a_full_disk_below_a_mount_costs_no_blocks() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let disk = Disk::below(&rig);
    fs::remove_file(rig.pool()).unwrap();
    std::os::unix::fs::symlink(disk.pool(), rig.pool()).unwrap();
    let free = |rig: &Rig| rustix::fs::statvfs(rig.dir()).unwrap().f_bfree;
    rig.mount("rw");
    let before = free(&rig);
    rig.umount();

    rig.mount_foreground("rw");
    assert_eq!(errno(fs::write(rig.at("big"), pattern(24 * MIB, 3))), libc::EIO);
    let big = File::options().write(true).open(rig.at("big")).unwrap();
    for n in 0..8 {
        assert_eq!(errno(big.write_all_at(&pattern(MIB, n), (n << 20) | 1 << 25)), libc::EIO);
    }
    drop(big);
    disk.make_room();
    succeed(lode().arg("umount").arg(rig.dir()));
    let (code, said) = rig.wait_for_server();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&disk.is_full()) && !said.contains("of the media failed"), "{said}");

    for round in 0..2 {
        rig.mount("rw");
        fs::remove_file(rig.at("big")).unwrap();
        // What was freed waits for syncs, and for the kernel, which forgets it.
        wait_until(&format!("all is free in round {round}"), || {
            File::open(rig.dir()).unwrap().sync_all().unwrap();
            // The directory has a log by now.
            free(&rig) + 2 >= before
        });
        fs::write(rig.at("big"), pattern(40 * MIB, 4)).unwrap();
        assert!(read(&rig.at("big")).unwrap() == pattern(40 * MIB, 4));
        rig.umount();
    }
    let checked = lode().arg("fsck").arg(rig.pool()).output().unwrap();
    let said = text(&checked.stdout);
    assert!(checked.status.success() && said.contains(", 0 bad, "), "{said}");
}

/// A load that raises SIGBUS costs its caller an error, and nobody else anything. The pool's last block is lost, too,
/// so that the mount takes no changes any more once it tries to write there; reads go on all the same.
fn a_pool_cut_short_under_its_mount(options: &str) {
    let mut rig = Rig::new("64M");
    rig.mount_foreground(options);
    let data = [pattern(MIB, 1), pattern(MIB, 2)];
    for (name, data) in ["one", "two"].iter().zip(&data) {
        fs::write(rig.at(name), data).unwrap();
        File::open(rig.at(name)).unwrap().sync_all().unwrap();
    }
    let image = fs::read(rig.pool()).unwrap();
    let places = [stands_at(&image, &data[0]), stands_at(&image, &data[1])];
    let (lost, kept) = if places[0] < places[1] { (1, 0) } else { (0, 1) };
    assert!(places[kept].1 <= places[lost].0, "they do not stand apart: {places:?}");
    let (lost_path, kept_path) = (rig.at(["one", "two"][lost]), rig.at(["one", "two"][kept]));
    let goes_on = |when: &str| {
        assert_eq!(errno(read(&lost_path)), libc::EIO, "{when}");
        assert!(read(&kept_path).unwrap() == data[kept], "{when}");
        assert_eq!(fs::metadata(&lost_path).unwrap().len(), MIB as u64, "{when}");
        assert_eq!(fs::read_dir(rig.dir()).unwrap().count(), 2, "{when}");
        assert!(rustix::fs::statvfs(rig.dir()).unwrap().f_bfree > 0, "{when}");
    };
    set_len(&rig.pool(), places[lost].0);
    goes_on("cut");
    let is_refused =
        || fs::set_permissions(rig.dir(), fs::metadata(rig.dir()).unwrap().permissions()).is_err();
    wait_until("no change is taken", is_refused);
    assert_eq!(errno(File::create(rig.at("new"))), libc::EIO);
    goes_on("takes no changes");

    set_len(&rig.pool(), POOL_BYTES);
    assert!(read(&kept_path).unwrap() == data[kept]);
    fail(lode().arg("umount").arg(rig.dir()), 1, "could not close it");
    assert!(!rig.is_mounted());
    let (code, said) = rig.wait_for_server();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("closing the pool") && said.contains("the next mount recovers it"), "{said}");

    // What was acknowledged is there, but for the bytes that are gone; what was wrong with the pool's own is mended.
    let output = rig.mount_command("rw").output().unwrap();
    let note = text(&output.stderr);
    assert!(output.status.success(), "{note}");
    assert!(note.contains("the second copy of the superblock is damaged"), "{note}");
    assert!(read(&kept_path).unwrap() == data[kept]);
    assert!(read(&lost_path).unwrap() == vec![0; MIB]);
    fs::write(rig.at("new"), "new").unwrap();
    rig.umount();
    let checked = lode().arg("fsck").arg(rig.pool()).output().unwrap();
    let said = text(&checked.stdout);
    assert_eq!(checked.status.code(), Some(4), "{said}");
    let name = format!("/{}", ["one", "two"][lost]);
    let findings: Vec<&str> = said.lines().filter(|line| line.contains("; a repair: ")).collect();
    assert!(!findings.is_empty());
    for finding in findings {
        assert!(finding.contains(&name) && finding.contains("do not match their checksum"), "{said}");
    }
    rig.mount("rw");
    assert_eq!(fs::read(rig.at("new")).unwrap(), b"new");
    rig.umount();
}

#[test]
fn a_pool_cut_short_is_read_through_the_kernels_cache() {
    need_mount!();
    a_pool_cut_short_under_its_mount("cache=auto");
}

#[test]
fn a_pool_cut_short_is_read_by_every_call() {
    need_mount!();
    a_pool_cut_short_under_its_mount("cache=none");
}

/// What comes back before anything had to be written there has done no harm: the server closes the pool.
#[test]
fn a_pool_that_is_whole_again_is_closed() {
    need_mount!();
    let mut rig = Rig::new("64M");
    fs::create_dir(rig.beside("in")).unwrap();
    fs::write(rig.beside("in/file"), pattern(MIB, 1)).unwrap();
    // Nothing is changed, so nothing is written behind our back.
    succeed(lode().args(["cp", "-r"]).arg(rig.beside("in")).arg(format!("{}:/", rig.pool().display())));
    let image = fs::read(rig.pool()).unwrap();
    let (from, _) = stands_at(&image, &pattern(MIB, 1));
    rig.mount_foreground("noatime");
    set_len(&rig.pool(), from);
    assert_eq!(errno(read(&rig.at("in/file"))), libc::EIO);
    let file = File::options().write(true).open(rig.pool()).unwrap();
    file.write_all_at(&image[from as usize..], from).unwrap();
    assert!(read(&rig.at("in/file")).unwrap() == pattern(MIB, 1));
    rig.umount();
    let (code, said) = rig.wait_for_server();
    assert_eq!(code, Some(0), "{said}");
    rig.mount("rw");
    assert!(read(&rig.at("in/file")).unwrap() == pattern(MIB, 1));
    rig.umount();
}

#[test]
fn one_good_superblock_is_enough_for_a_mount() {
    need_mount!();
    let last = POOL_BYTES / BLOCK as u64 - 1;
    for (name, block) in [("first", 1), ("second", last)] {
        let rig = Rig::mounted();
        fs::write(rig.at("f"), pattern(100_000, 3)).unwrap();
        rig.umount();
        let file = File::options().write(true).open(rig.pool()).unwrap();
        file.write_all_at(&[0xa5; 64], block * BLOCK as u64).unwrap();
        let output = rig.mount_command("rw").output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with(&format!("lode: warning: the {name} copy of the superblock")), "{said}");
        assert!(fs::read(rig.at("f")).unwrap() == pattern(100_000, 3));
        rig.umount();
        // It was written back, and nothing is said of it any more.
        rig.mount("rw");
        rig.umount();
        let checked = lode().arg("fsck").arg(rig.pool()).output().unwrap();
        assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stdout));
    }
}

/// A directory with a damaged record, after a crash: which blocks are in use cannot be known.
fn damaged() -> Rig {
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    fs::write(rig.at("kept"), "kept").unwrap();
    fs::create_dir(rig.at("d")).unwrap();
    let names = ["a-name-that-is-found", "another", "a-third"];
    for name in names {
        fs::write(rig.at("d").join(name), "").unwrap();
    }
    File::open(rig.at("d")).unwrap().sync_all().unwrap();
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    rig.wait_for_server();
    rig.umount();
    let image = fs::read(rig.pool()).unwrap();
    let file = File::options().write(true).open(rig.pool()).unwrap();
    let is_there = |at: &usize| image[*at..].starts_with(names[0].as_bytes());
    let places: Vec<usize> = (0..image.len()).filter(is_there).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| file.write_all_at(&[0xa5; 8], *at as u64).unwrap());
    rig
}

#[test]
fn a_pool_that_opens_for_reading_only_is_mounted_so() {
    need_mount!();
    let rig = damaged();
    let output = rig.mount_command("rw").output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("open for reading only"), "{said}");
    let line = rig.mount_line().unwrap();
    assert!(line[3].split(',').any(|o| o == "ro"), "{line:?}");
    assert_eq!(errno(File::options().read(true).write(true).open(rig.at("kept"))), libc::EROFS);
    assert_eq!(errno(File::create(rig.at("new"))), libc::EROFS);
    assert_eq!(fs::read(rig.at("kept")).unwrap(), b"kept");
    let top = lode().args(["top", "--json"]).arg(rig.dir()).output().unwrap();
    assert!(top.status.success(), "{}", text(&top.stderr));
    let state: serde_json::Value = serde_json::from_slice(&top.stdout).unwrap();
    assert_eq!(state["server"]["read_only"], true, "{state}");
    rig.umount();
}

/// What the kernel may write there was said before by whoever made the mount.
#[test]
fn nobody_opens_for_writing_what_is_open_for_reading_only() {
    need_mount!();
    let rig = damaged();
    let mut server = rig.serve_handed();
    for _ in 0..2 {
        assert_eq!(fs::read(rig.at("kept")).unwrap(), b"kept");
        assert_eq!(errno(File::options().read(true).write(true).open(rig.at("kept"))), libc::EROFS);
    }
    assert_eq!(errno(File::create(rig.at("new"))), libc::EROFS);
    succeed(Command::new("umount").arg(rig.dir()));
    assert!(server.wait().unwrap().success());
}
