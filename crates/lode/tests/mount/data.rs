//! Bytes: random access, appends, mappings, holes, direct I/O, copies, locks.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::process::Command;

use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom, XattrFlags, getxattr, setxattr};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

use crate::need_mount;
use crate::rig::{Rig, errno, pattern, wait_until};

/// The attribute of files that others store to.
const FIXED: &str = "system.lode.fixed";
/// Every way the kernel may hold a file's data.
const CACHES: [&str; 3] = ["cache=auto", "cache=none", "cache=always"];

/// The kernel writes back long after a store was accepted, and what it is told then no program may ever hear.
#[test]
fn stores_through_a_mapping_over_what_is_there_outlive_a_full_pool() {
    need_mount!();
    const LEN: usize = 1 << 20;
    let rig = Rig::mounted();
    let mut f = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
    f.write_all(&[1; LEN]).unwrap();
    f.sync_all().unwrap();
    let mut mapping = Mapping::of(&f, LEN, MapFlags::SHARED);
    let mut filler = File::create(rig.at("filler")).unwrap();
    for bytes in [1 << 20, 4096, 1] {
        while filler.write_all(&vec![7; bytes]).is_ok() {}
    }
    let refused = f.write_all_at(&[2; 64 << 10], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    let expected = pattern(LEN, 3);
    mapping.bytes_mut().copy_from_slice(&expected);
    f.sync_all().unwrap();
    drop((mapping, f, filler));
    rig.umount();
    rig.mount("cache=auto");
    assert!(fs::read(rig.at("f")).unwrap() == expected);
    // And deleting works.
    fs::remove_file(rig.at("filler")).unwrap();
    fs::remove_file(rig.at("f")).unwrap();
}

#[test]
fn a_write_across_the_largest_size_is_cut_there() {
    need_mount!();
    const LARGEST: u64 = (1 << 44) - 4096;
    for cache in CACHES {
        let rig = Rig::mounted_with(cache);
        let f = File::options().write(true).create_new(true).open(rig.at("f")).unwrap();
        assert_eq!(f.write_at(&[1; 8192], LARGEST - 4096).unwrap(), 4096, "{cache}");
        assert_eq!(f.write_at(&[1; 1], LARGEST).unwrap_err().raw_os_error(), Some(libc::EFBIG), "{cache}");
        assert_eq!(f.metadata().unwrap().len(), LARGEST, "{cache}");
    }
}

#[test]
fn random_writes_and_reads_agree_with_a_model() {
    need_mount!();
    for cache in CACHES {
        let rig = Rig::mounted_with(cache);
        let f = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
        let mut model: Vec<u8> = Vec::new();
        let random = pattern(8 * 300, 11);
        for (step, r) in random.chunks_exact(8).enumerate() {
            let r = u64::from_le_bytes(r.try_into().unwrap());
            let at = (r % (3 << 20)) as usize;
            let len = 1 + (r >> 32) as usize % if r & 7 == 0 { 1_500_000 } else { 9000 };
            match (r >> 60) & 7 {
                0 => {
                    f.set_len(at as u64).unwrap();
                    model.resize(at, 0);
                }
                1..=5 => {
                    let data = pattern(len, step as u64);
                    f.write_all_at(&data, at as u64).unwrap();
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&data);
                }
                _ => {
                    let mut got = vec![0xee; len];
                    let n = read_up_to(&f, &mut got, at as u64);
                    let want = &model[at.min(model.len())..(at + len).min(model.len())];
                    assert!(&got[..n] == want, "{cache}: step {step}: {len} bytes at {at} differ");
                }
            }
            assert_eq!(f.metadata().unwrap().len(), model.len() as u64, "{cache}: step {step}");
        }
        drop(f);
        assert!(fs::read(rig.at("f")).unwrap() == model, "{cache}: the whole differs");
        rig.umount();
        rig.mount(cache);
        assert!(fs::read(rig.at("f")).unwrap() == model, "{cache}: after a remount the whole differs");
    }
}

fn read_up_to(f: &File, buffer: &mut [u8], at: u64) -> usize {
    let mut done = 0;
    loop {
        match f.read_at(&mut buffer[done..], at + done as u64).unwrap() {
            0 => return done,
            n => done += n,
        }
    }
}

#[test]
fn two_processes_append_without_loss() {
    need_mount!();
    for cache in CACHES {
        let rig = Rig::mounted_with(cache);
        let append = |who: &str| {
            let script =
                format!("exec 3>>log; i=0; while [ $i -lt 1000 ]; do echo {who} $i >&3; i=$((i+1)); done");
            Command::new("/bin/sh").args(["-c", &script]).current_dir(rig.dir()).spawn().unwrap()
        };
        let children = [append("a"), append("b")];
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        let log = fs::read_to_string(rig.at("log")).unwrap();
        for who in ["a", "b"] {
            let numbers = log.lines().filter_map(|l| l.strip_prefix(who)?.trim().parse::<u32>().ok());
            assert!(numbers.eq(0..1000), "{cache}: lines of {who} are lost or out of order");
        }
        assert_eq!(log.lines().count(), 2000, "{cache}");
    }
}

/// A direct append larger than one request arrives as several at once.
#[test]
fn large_direct_appends_keep_their_order() {
    need_mount!();
    let rig = Rig::mounted();
    let mut f =
        File::options().append(true).create_new(true).custom_flags(libc::O_DIRECT).open(rig.at("f")).unwrap();
    let mut whole = Vec::new();
    for seed in 0..4 {
        let data = pattern(5 << 20, seed);
        let aligned = Aligned::of(&data);
        f.write_all(aligned.bytes()).unwrap();
        whole.extend_from_slice(&data);
    }
    assert!(fs::read(rig.at("f")).unwrap() == whole);
}

#[test]
fn direct_and_cached_reads_agree() {
    need_mount!();
    let rig = Rig::mounted();
    let cached = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
    let direct =
        File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(rig.at("f")).unwrap();
    cached.write_all_at(&pattern(1 << 20, 1), 0).unwrap();
    let page = Aligned::of(&pattern(4096, 2));
    direct.write_all_at(page.bytes(), 8192).unwrap();
    let mut got = vec![0; 4096];
    cached.read_exact_at(&mut got, 8192).unwrap();
    assert!(got == page.bytes());
    cached.write_all_at(b"cached", 100).unwrap();
    let mut block = Aligned::of(&[0; 4096]);
    direct.read_exact_at(block.bytes_mut(), 0).unwrap();
    assert_eq!(&block.bytes()[100..106], b"cached");
}

#[test]
fn shared_mappings_and_files_are_one() {
    need_mount!();
    for cache in CACHES {
        let rig = Rig::mounted_with(cache);
        let f = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
        let data = pattern(3 * 4096, 5);
        f.write_all_at(&data, 0).unwrap();
        {
            let mut map = Mapping::of(&f, 3 * 4096, MapFlags::SHARED);
            assert!(map.bytes() == data, "{cache}: the mapping shows the file");
            map.bytes_mut()[4096..4101].copy_from_slice(b"by mm");
            map.sync();
            let mut got = [0; 5];
            f.read_exact_at(&mut got, 4096).unwrap();
            assert_eq!(&got, b"by mm", "{cache}: a store shows in the file");
            if cache != "cache=none" {
                // Without msync too, because both see the same page. Uncached reads go past it.
                map.bytes_mut()[0..5].copy_from_slice(b"no sy");
                f.read_exact_at(&mut got, 0).unwrap();
                assert_eq!(&got, b"no sy");
                f.write_all_at(b"write", 8192).unwrap();
                assert_eq!(&map.bytes()[8192..8197], b"write");
            }
        }
        // Unmapped and closed: the kernel writes what is dirty.
        drop(f);
        rig.umount();
        rig.mount(cache);
        let kept = fs::read(rig.at("f")).unwrap();
        assert_eq!(&kept[4096..4101], b"by mm", "{cache}");
        if cache != "cache=none" {
            assert_eq!(&kept[0..5], b"no sy");
        }
    }
}

#[test]
fn private_mappings_keep_to_themselves() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), pattern(4096, 6)).unwrap();
    let f = File::open(rig.at("f")).unwrap();
    let mut map = Mapping::of(&f, 4096, MapFlags::PRIVATE);
    map.bytes_mut()[0..4].copy_from_slice(b"mine");
    assert_eq!(fs::read(rig.at("f")).unwrap(), pattern(4096, 6));
}

/// The kernel is asked for what it has of a hole, whoever else is served meanwhile.
#[test]
fn holes_are_found_by_a_single_thread_and_by_many_at_once() {
    need_mount!();
    let rig = Rig::mounted_with("threads=1");
    std::thread::scope(|scope| {
        for n in 0..4 {
            let path = rig.at(format!("f{n}"));
            scope.spawn(move || {
                let f = File::options().read(true).write(true).create_new(true).open(path).unwrap();
                f.set_len(1 << 40).unwrap();
                f.write_all_at(&[1; 4096], 1 << 30).unwrap();
                let mut map = Mapping::of(&f, 4096, MapFlags::SHARED);
                for _ in 0..50 {
                    let seek = |from| rustix::fs::seek(&f, from).unwrap();
                    assert_eq!(seek(SeekFrom::Data(1 << 20)), 1 << 30);
                    assert_eq!(seek(SeekFrom::Hole(1 << 30)), (1 << 30) + 4096);
                }
                // What only the kernel has so far is data.
                map.bytes_mut()[0] = 1;
                assert_eq!(rustix::fs::seek(&f, SeekFrom::Data(0)).unwrap(), 0);
                assert_eq!(rustix::fs::seek(&f, SeekFrom::Hole(0)).unwrap(), 4096);
            });
        }
    });
}

/// Nobody writes who may not keep it: the kernel writes what was stored before.
#[test]
fn write_back_of_a_mapping_takes_no_capability() {
    need_mount!();
    let rig = Rig::mounted();
    let path = rig.at("program");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    // Version 2: nothing permitted, nothing inherited.
    let capability = [1u8, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let has = || rustix::fs::getxattr(&path, "security.capability", &mut [0u8; 64]).is_ok();
    if rustix::fs::setxattr(&path, "security.capability", &capability, rustix::fs::XattrFlags::empty())
        .is_err()
    {
        eprintln!("SKIPPED: write_back_of_a_mapping_takes_no_capability: capabilities cannot be set here");
        return;
    }
    let mut map = Mapping::of(&file, 4096, MapFlags::SHARED);
    map.bytes_mut()[0] = 1;
    file.sync_all().unwrap();
    assert!(has());
    file.write_all_at(b"x", 0).unwrap();
    assert!(!has(), "a write takes it");
}

#[test]
fn holes() {
    need_mount!();
    let rig = Rig::mounted();
    let f = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
    f.write_all_at(&[1; 4096], 1 << 30).unwrap();
    assert_eq!(f.metadata().unwrap().len(), (1 << 30) + 4096);
    assert!(f.metadata().unwrap().blocks() < 100);
    let seek = |from| rustix::fs::seek(&f, from).map_err(std::io::Error::from);
    assert_eq!(seek(SeekFrom::Data(0)).unwrap(), 1 << 30);
    assert_eq!(seek(SeekFrom::Hole(0)).unwrap(), 0);
    assert_eq!(seek(SeekFrom::Hole(1 << 30)).unwrap(), (1 << 30) + 4096);
    assert_eq!(errno(seek(SeekFrom::Data((1 << 30) + 4096))), libc::ENXIO);
    let mut zeros = [1; 8192];
    f.read_exact_at(&mut zeros, 12345).unwrap();
    assert_eq!(zeros, [0; 8192]);

    let allocate = |mode, at, len| rustix::fs::fallocate(&f, mode, at, len).map_err(std::io::Error::from);
    f.write_all_at(&[2; 3 * 4096], 0).unwrap();
    let before = f.metadata().unwrap().blocks();
    allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096).unwrap();
    assert_eq!(before - f.metadata().unwrap().blocks(), 8);
    assert_eq!(seek(SeekFrom::Hole(0)).unwrap(), 4096);
    assert_eq!(seek(SeekFrom::Data(4096)).unwrap(), 8192);
    let mut block = [9; 4096];
    f.read_exact_at(&mut block, 4096).unwrap();
    assert_eq!(block, [0; 4096]);

    // The kernel does not ask.
    assert_eq!(errno(allocate(FallocateFlags::UNSHARE_RANGE, 0, 4096)), libc::EOPNOTSUPP);

    let size = f.metadata().unwrap().len();
    allocate(FallocateFlags::KEEP_SIZE, size, 1 << 20).unwrap();
    assert_eq!(f.metadata().unwrap().len(), size);
    allocate(FallocateFlags::empty(), size, 1 << 20).unwrap();
    assert_eq!(f.metadata().unwrap().len(), size + (1 << 20));
    assert_eq!(errno(allocate(FallocateFlags::COLLAPSE_RANGE, 0, 4096)), libc::EOPNOTSUPP);
}

#[test]
fn bytes_beyond_a_cut_read_as_zeros() {
    need_mount!();
    for cache in CACHES {
        let rig = Rig::mounted_with(cache);
        let f = File::options().read(true).write(true).create_new(true).open(rig.at("f")).unwrap();
        f.write_all_at(&[7; 10_000], 0).unwrap();
        f.set_len(5000).unwrap();
        f.set_len(10_000).unwrap();
        let mut got = vec![1; 10_000];
        f.read_exact_at(&mut got, 0).unwrap();
        assert!(got[..5000].iter().all(|b| *b == 7) && got[5000..].iter().all(|b| *b == 0), "{cache}");
    }
}

#[test]
fn ranges_are_copied_inside_the_pool() {
    need_mount!();
    let rig = Rig::mounted();
    let data = pattern(20 << 20, 8);
    fs::write(rig.at("from"), &data).unwrap();
    let from = File::open(rig.at("from")).unwrap();
    let to = File::options().read(true).write(true).create_new(true).open(rig.at("to")).unwrap();
    let (mut in_at, mut out_at, mut left) = (1000, 77, data.len());
    while left > 0 {
        let n = rustix::fs::copy_file_range(&from, Some(&mut in_at), &to, Some(&mut out_at), left).unwrap();
        if n == 0 {
            break;
        }
        left -= n;
    }
    let copy = fs::read(rig.at("to")).unwrap();
    assert_eq!(copy.len(), 77 + data.len() - 1000);
    assert!(copy[..77] == [0; 77] && copy[77..] == data[1000..]);
}

#[test]
fn locks_exclude() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "").unwrap();
    let open = || File::options().read(true).write(true).open(rig.at("f")).unwrap();
    let (a, b) = (open(), open());
    let flock = |f: &File, how| rustix::fs::flock(f, how).map_err(std::io::Error::from);
    flock(&a, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(errno(flock(&b, FlockOperation::NonBlockingLockShared)), libc::EWOULDBLOCK);
    flock(&a, FlockOperation::Unlock).unwrap();
    flock(&b, FlockOperation::NonBlockingLockShared).unwrap();

    record_lock(&a, libc::F_WRLCK, 0, 100).unwrap();
    assert_eq!(errno(record_lock(&b, libc::F_WRLCK, 50, 10)), libc::EAGAIN);
    record_lock(&b, libc::F_WRLCK, 100, 10).unwrap();
    record_lock(&a, libc::F_UNLCK, 0, 100).unwrap();
    record_lock(&b, libc::F_WRLCK, 50, 10).unwrap();
}

/// A lock of the open file description, which excludes inside one process too.
fn record_lock(f: &File, kind: libc::c_int, start: i64, len: i64) -> std::io::Result<()> {
    // SAFETY: all-zero is a valid flock; the fields that matter are set below.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (start, len);
    // SAFETY: the descriptor is open and the lock outlives the call.
    match unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(f), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Memory that O_DIRECT accepts.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn of(data: &[u8]) -> Aligned {
        let memory = vec![0; data.len() + 4096];
        let start = memory.as_ptr().align_offset(4096);
        let mut aligned = Aligned { memory, start, len: data.len() };
        aligned.bytes_mut().copy_from_slice(data);
        aligned
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// A mapped file of one test, which nobody cuts while it is mapped.
struct Mapping {
    base: *mut u8,
    len: usize,
}

impl Mapping {
    fn of(f: &File, len: usize, how: MapFlags) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at a place of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, how, f, 0) };
        Mapping { base: base.unwrap().cast(), len }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for `len` bytes until drop; the test writes the file only between its looks.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    fn sync(&self) {
        // SAFETY: mapped for `len` bytes.
        unsafe { rustix::mm::msync(self.base.cast(), self.len, MsyncFlags::SYNC) }.unwrap();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `of`, and no slice of it outlives `self`.
        unsafe { rustix::mm::munmap(self.base.cast(), self.len) }.unwrap();
    }
}

/// What is stored to a fixed file past the mount, as a guest does that has it mapped: the kernel keeps no pages of it.
#[test]
fn a_fixed_file_shows_what_others_store_to_it() {
    need_mount!();
    for options in ["cache=auto,threads=1", "cache=none"] {
        let rig = Rig::mounted_with(options);
        let path = rig.at("memory");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        setxattr(&path, FIXED, b"2097152", XattrFlags::empty()).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 2 << 20, "{options}");
        let mut place = vec![0; 4096];
        let len = getxattr(&path, FIXED, &mut place[..]).unwrap();
        let place = String::from_utf8(place[..len].to_vec()).unwrap();
        let begin: u64 = place.split(' ').next().unwrap().parse().unwrap();

        let pool = File::options().write(true).open(rig.pool()).unwrap();
        let mut seen = vec![0; 256 << 10];
        for round in 1..=20u8 {
            fs::read(&path).unwrap();
            pool.write_all_at(&vec![round; seen.len()], begin + 12_288).unwrap();
            wait_until("the file shows what was stored", || {
                file.read_exact_at(&mut seen, 12_288).unwrap();
                seen.iter().all(|&byte| byte == round)
            });
        }
        rustix::fs::removexattr(&path, FIXED).unwrap();
        file.read_exact_at(&mut seen, 12_288).unwrap();
        assert!(seen.iter().all(|&byte| byte == 20), "{options}");
        file.write_all_at(&[21], 12_288).unwrap();
        file.read_exact_at(&mut seen, 12_288).unwrap();
        assert_eq!((seen[0], seen[1]), (21, 20), "{options}: a file like others");
    }
}
