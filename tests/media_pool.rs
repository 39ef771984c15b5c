//! Pools on files: creation, opening, labels, locks, striping, and what each mistake is answered with.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use lodestone::media::{
    Addr, Domain, Isa, Media, Overlay, Part, Pool, PoolOptions, RegionKind, Span, SpanOptions, crc32c,
    crc32c_words, holds_pool,
};

/// A directory of its own for one test, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("lodestone-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn paths(&self, count: usize) -> Vec<PathBuf> {
        (0..count).map(|i| self.path(&format!("region{i}"))).collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const MIB: u64 = 1 << 20;

fn options() -> PoolOptions {
    PoolOptions::default()
}

/// Bytes that differ at every place of a few GiB.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn who_only_reads_for_a_moment_is_waited_for() {
    let dir = Dir::new("reader");
    let path = dir.path("pool");
    drop(Pool::create(std::slice::from_ref(&path), Some(MIB), &options()).unwrap());
    let read_only = PoolOptions { read_only: true, ..options() };
    let reader = Pool::open(&path, &read_only).unwrap();
    std::thread::scope(|scope| {
        // Long before it is given up.
        scope.spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(reader);
        });
        drop(Pool::open(&path, &options()).unwrap());
    });
    // One that stays is named, and so is one that writes.
    for held in [read_only, options()] {
        let holder = Pool::open(&path, &held).unwrap();
        let error = Pool::open(&path, &options()).unwrap_err();
        assert_eq!(error.errno(), libc::EBUSY);
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(holder);
    }
}

#[test]
fn what_is_stored_is_there_after_reopening() {
    let dir = Dir::new("reopen");
    let paths = dir.paths(1);
    let data = pattern(100_000, 1);
    let pool = Pool::create(&paths, Some(8 * MIB), &options()).unwrap();
    assert_eq!(pool.len(), 8 * MIB);
    let uuid = pool.uuid();
    let flushed = pool.copy_nt(Addr(5001), &data).unwrap();
    pool.fence(flushed);
    pool.sync().unwrap();
    drop(pool);

    let pool = Pool::open(&paths[0], &options()).unwrap();
    assert_eq!((pool.len(), pool.uuid()), (8 * MIB, uuid));
    let mut back = vec![0; data.len()];
    pool.read(Addr(5001), &mut back).unwrap();
    assert!(back == data);
}

#[test]
fn striping_covers_every_byte_once() {
    let dir = Dir::new("stripe");
    let paths = dir.paths(3);
    let options = PoolOptions { stripe_bytes: Some(64 << 10), ..options() };
    let pool = Pool::create(&paths, Some(12 * MIB), &options).unwrap();
    let len = pool.len();
    assert_eq!(len, (64 << 10) * (1 + 3 * 63));
    let data = pattern(len as usize - 4096, 2);
    let flushed = pool.copy_nt(Addr(4096), &data).unwrap();
    pool.fence(flushed);
    drop(pool);

    // Region 0 alone leads to the others, and the data lies where the invariant says.
    let pool = Pool::open(&paths[0], &options).unwrap();
    let mut back = vec![0; data.len()];
    pool.read(Addr(4096), &mut back).unwrap();
    assert!(back == data);
    let unit = 64 << 10;
    for (region, path) in paths.iter().enumerate() {
        let file = fs::read(path).unwrap();
        for stripe in 1..file.len() / unit {
            let pool_stripe = 1 + (stripe - 1) * 3 + region;
            let at = pool_stripe * unit - 4096;
            assert!(file[stripe * unit..][..unit] == data[at..][..unit], "region {region} stripe {stripe}");
        }
    }
}

#[test]
fn a_sparse_pool_of_a_tebibyte_opens_at_once() {
    let dir = Dir::new("sparse");
    let paths = dir.paths(1);
    fs::File::create(&paths[0]).unwrap().set_len(1 << 40).unwrap();
    drop(Pool::create(&paths, None, &options()).unwrap());
    let begin = std::time::Instant::now();
    let pool = Pool::open(&paths[0], &options()).unwrap();
    assert!(begin.elapsed().as_millis() < 500, "took {:?}", begin.elapsed());
    assert_eq!(pool.len(), 1 << 40);
    let far = Addr((1 << 40) - 8);
    let flushed = pool.flush(pool.store64(far, 0x1122_3344_5566_7788).unwrap());
    pool.fence(flushed);
    assert_eq!(pool.load64(far).unwrap(), 0x1122_3344_5566_7788);
}

/// All that may have been stored to.
fn stored(media: &impl Media) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(part) = media.stored(Addr(at)) {
        assert!(part.start >= at && part.end > part.start, "{part:?} from {at} on");
        at = part.end;
        found.push((part.start, part.end));
    }
    found
}

fn store(media: &impl Media, at: u64) {
    let flushed = media.flush(media.store64(Addr(at), 7).unwrap());
    media.fence(flushed);
}

#[test]
fn holes_of_a_sparse_pool_are_told() {
    const STRIPE: u64 = 64 << 10;
    for count in [1, 3] {
        let dir = Dir::new("holes");
        let paths = dir.paths(count);
        for path in &paths {
            fs::File::create(path).unwrap().set_len(64 * MIB).unwrap();
        }
        let options = PoolOptions { stripe_bytes: Some(STRIPE).filter(|_| count > 1), ..options() };
        let pool = Pool::create(&paths, None, &options).unwrap();
        let bytes = pool.len();
        let before = stored(&pool);
        let host = pool.describe().regions[0].host_fs;
        let told = before.iter().map(|(from, to)| to - from).sum::<u64>() < bytes;
        // That these do is what is tested.
        if !["ext4", "tmpfs", "xfs"].contains(&host) && !told {
            eprintln!("SKIPPED: {host} below {} tells no holes", dir.0.display());
            return;
        }
        assert!(before.iter().map(|(from, to)| to - from).sum::<u64>() < bytes / 4, "{count}: {before:?}");
        // Where nothing is yet, at the begin of a piece and at its end.
        let places = [17 * MIB, 29 * MIB + STRIPE - 4096, bytes - 8 * MIB + 2 * 4096 + 512];
        for at in places {
            assert!(before.iter().all(|&(from, to)| at < from || at >= to), "{count}: {at} in {before:?}");
            store(&pool, at);
        }
        let after = stored(&pool);
        for at in places {
            assert!(after.iter().any(|&(from, to)| from <= at && at < to), "{count}: {at} not in {after:?}");
        }
        assert!(after.iter().map(|(from, to)| to - from).sum::<u64>() < bytes / 2, "{count}: {after:?}");
        // A private copy adds what is its own, in order, and only that.
        let copy = Overlay::new(std::sync::Arc::new(pool));
        assert_eq!(stored(&copy), after);
        let own = 41 * MIB + 8192;
        store(&copy, own + 16);
        let mut with_own = after.clone();
        with_own.push((own, own + 4096));
        with_own.sort_unstable();
        assert_eq!(stored(&copy), with_own, "{count}");
        store(&copy, places[0]);
        let covers = |all: &[(u64, u64)], at| all.iter().any(|&(from, to)| from <= at && at < to);
        let last = stored(&copy);
        assert!(places.iter().all(|&at| covers(&last, at)) && covers(&last, own), "{last:?}");
    }
}

#[test]
fn memfd_pool_is_volatile_and_can_emulate() {
    let pool = Pool::memfd(4 * MIB, &options()).unwrap();
    assert_eq!(pool.domain(), Domain::Volatile);
    let d = pool.describe();
    assert_eq!((d.regions[0].kind, d.emulated), (RegionKind::Memfd, false));
    let emulated = PoolOptions { assume: Some(Domain::Memory), ..options() };
    let pool = Pool::memfd(4 * MIB, &emulated).unwrap();
    let d = pool.describe();
    assert_eq!((d.domain, d.detected, d.emulated), (Domain::Memory, Domain::Volatile, true));
}

fn message(result: lodestone::Result<Pool>) -> (i32, String) {
    let error = result.expect_err("must fail");
    (error.errno(), error.to_string())
}

fn open_message(path: &Path) -> (i32, String) {
    message(Pool::open(path, &options()))
}

#[track_caller]
fn expect(got: (i32, String), errno: i32, words: &[&str]) {
    assert_eq!(got.0, errno, "{}", got.1);
    for word in words {
        assert!(got.1.contains(word), "`{}` lacks `{word}`", got.1);
    }
    assert!(!got.1.contains('\n'), "one line: {}", got.1);
}

#[test]
fn each_mistake_has_its_answer() {
    let dir = Dir::new("mistakes");
    expect(open_message(&dir.0), libc::EISDIR, &["directory", dir.0.to_str().unwrap()]);
    expect(open_message(&dir.path("none")), libc::ENOENT, &["none"]);
    expect(open_message(Path::new("/dev/null")), libc::ENODEV, &["/dev/null", "device-dax"]);
    fs::write(dir.path("empty"), b"").unwrap();
    expect(open_message(&dir.path("empty")), libc::EINVAL, &["empty", "lode mkfs"]);
    fs::write(dir.path("short"), b"hello").unwrap();
    expect(open_message(&dir.path("short")), libc::EINVAL, &["too short", "lode mkfs"]);
    fs::write(dir.path("foreign"), vec![7; 2 << 20]).unwrap();
    expect(open_message(&dir.path("foreign")), libc::EINVAL, &["foreign", "no Lodestone pool"]);
    fs::write(dir.path("blank"), vec![0; 2 << 20]).unwrap();
    expect(open_message(&dir.path("blank")), libc::EINVAL, &["no Lodestone pool"]);

    let create = |name: &str, size| message(Pool::create(&[dir.path(name)], size, &options()));
    expect(create("none", None), libc::ENOENT, &["give a size"]);
    std::os::unix::fs::symlink("nowhere", dir.path("link")).unwrap();
    expect(create("link", Some(4 * MIB)), libc::ENOENT, &["link", "leads nowhere"]);
    expect(create("empty", None), libc::EINVAL, &["empty"]);
    expect(create("foreign", None), libc::EEXIST, &["other data", "--force"]);
    expect(create("short", Some(4 * MIB)), libc::EEXIST, &["other data"]);
    expect(create("tiny", Some(4096)), libc::EINVAL, &["needs"]);
    assert!(!dir.path("tiny").exists(), "a file made by a failed creation stays");
    assert_eq!(fs::metadata(dir.path("short")).unwrap().len(), 5);
    // As a device may be; some file systems have no files so large.
    let huge = fs::File::create_new(dir.path("huge")).unwrap();
    if huge.set_len(9 << 40).is_ok() {
        expect(create("huge", None), libc::EINVAL, &["to 8796093022208 bytes"]);
        assert_eq!(huge.metadata().unwrap().blocks(), 0, "something was stored there");
    }

    // What leaves its first blocks alone, as btrfs does.
    let image = fs::File::create_new(dir.path("image")).unwrap();
    image.set_len(64 * MIB).unwrap();
    image.write_all_at(b"_BHRfS_M", 0x10040).unwrap();
    for size in [None, Some(4 * MIB), Some(128 * MIB)] {
        expect(create("image", size), libc::EEXIST, &["data at byte 65600", "--force"]);
    }
    assert_eq!(image.metadata().unwrap().len(), 64 * MIB);

    drop(Pool::create(&[dir.path("pool")], Some(4 * MIB), &options()).unwrap());
    expect(create("pool", None), libc::EEXIST, &["holds a pool", "--force"]);
    let forced = PoolOptions { force: true, ..options() };
    drop(Pool::create(&[dir.path("pool")], None, &forced).unwrap());
    fs::OpenOptions::new().write(true).open(dir.path("pool")).unwrap().set_len(3 * MIB).unwrap();
    expect(open_message(&dir.path("pool")), libc::EINVAL, &["was cut", "pool"]);

    let twice = [dir.path("a"), dir.path("a")];
    expect(message(Pool::create(&twice, Some(16 * MIB), &options())), libc::EINVAL, &["twice"]);
    assert!(!dir.path("a").exists());
}

#[test]
fn a_busy_pool_names_its_user() {
    let dir = Dir::new("busy");
    let path = dir.path("pool");
    let pool = Pool::create(std::slice::from_ref(&path), Some(4 * MIB), &options()).unwrap();
    let me = format!("process {}", std::process::id());
    expect(open_message(&path), libc::EBUSY, &[path.to_str().unwrap(), &me, "unmount"]);
    let read_only = PoolOptions { read_only: true, ..options() };
    expect(message(Pool::open(&path, &read_only)), libc::EBUSY, &[&me]);
    drop(pool);

    let first = Pool::open(&path, &read_only).unwrap();
    let second = Pool::open(&path, &read_only).unwrap();
    expect(open_message(&path), libc::EBUSY, &[&me]);
    drop((first, second));
    drop(Pool::open(&path, &options()).unwrap());
}

#[test]
fn a_read_only_pool_never_changes_its_files() {
    let dir = Dir::new("read-only");
    let paths = dir.paths(2);
    let data = pattern(1 << 20, 3);
    let pool = Pool::create(&paths, Some(16 * MIB), &options()).unwrap();
    let flushed = pool.copy_nt(Addr(MIB * 3), &data).unwrap();
    pool.fence(flushed);
    drop(pool);
    for path in &paths {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    }
    let before: Vec<_> = paths.iter().map(|p| fs::read(p).unwrap()).collect();
    let times: Vec<_> = paths.iter().map(|p| fs::metadata(p).unwrap().modified().unwrap()).collect();

    let pool = Pool::open(&paths[0], &PoolOptions { read_only: true, ..options() }).unwrap();
    let mut back = vec![0; data.len()];
    pool.read(Addr(MIB * 3), &mut back).unwrap();
    assert!(back == data);
    // Every way of storing works on the private copy and is read back from there.
    let flushed = pool.zero_nt(Addr(4096), (pool.len() - 4096) as usize).unwrap();
    pool.fence(flushed);
    let dirty = pool.store64(Addr(8192), 5).unwrap();
    pool.fence(pool.flush(dirty));
    let (_, flushed) = pool.copy_nt_crc(Addr(6 * MIB), &data, 0).unwrap();
    pool.fence(flushed);
    assert_eq!(pool.load64(Addr(8192)).unwrap(), 5);
    pool.sync().unwrap();
    drop(pool);

    for (i, path) in paths.iter().enumerate() {
        assert!(fs::read(path).unwrap() == before[i], "{} changed", path.display());
        assert_eq!(fs::metadata(path).unwrap().modified().unwrap(), times[i]);
    }
}

#[test]
fn damaged_labels_are_refused_and_left_alone() {
    let dir = Dir::new("damage");
    let path = dir.path("pool");
    drop(Pool::create(std::slice::from_ref(&path), Some(2 * MIB), &options()).unwrap());
    let good = fs::read(&path).unwrap();
    for at in 0..4096 {
        let mut bad = good[..4096].to_vec();
        bad[at] ^= 1 << (at % 8);
        let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, &bad).unwrap();
        let (errno, text) = open_message(&path);
        let want = if at < 8 { libc::EINVAL } else { libc::EUCLEAN };
        assert_eq!(errno, want, "byte {at}: {text}");
        assert!(text.contains("pool"), "{text}");
    }
    fs::write(&path, &good).unwrap();
    drop(Pool::open(&path, &options()).unwrap());
}

#[test]
fn regions_that_do_not_belong_together_are_told() {
    let dir = Dir::new("foreign-region");
    let ours = [dir.path("a0"), dir.path("a1")];
    let theirs = [dir.path("b0"), dir.path("b1")];
    drop(Pool::create(&ours, Some(16 * MIB), &options()).unwrap());
    drop(Pool::create(&theirs, Some(16 * MIB), &options()).unwrap());
    expect(open_message(&ours[1]), libc::EINVAL, &["region 1 of the 2", "a0"]);

    fs::copy(&theirs[1], &ours[1]).unwrap();
    expect(open_message(&ours[0]), libc::EINVAL, &["a1", "another pool"]);
    fs::write(&ours[1], b"").unwrap();
    expect(open_message(&ours[0]), libc::EINVAL, &["a1 has 0 bytes", "was cut"]);
    fs::remove_file(&ours[1]).unwrap();
    expect(open_message(&ours[0]), libc::ENOENT, &["a1", "region 1 of the 2"]);
    // Not "in use by" this very process.
    fs::hard_link(&ours[0], &ours[1]).unwrap();
    expect(open_message(&ours[0]), libc::EINVAL, &["a1 is the same file or device as region 0"]);
}

/// The kernel numbers devices as it finds them; links such as those in /dev/disk/by-id lead to the same ones.
#[test]
fn devices_are_found_by_the_links_that_a_pool_was_made_by() {
    let dir = Dir::new("links");
    let (files, links) = (dir.paths(2), [dir.path("first"), dir.path("second")]);
    for file in &files {
        fs::File::create(file).unwrap().set_len(16 * MIB).unwrap();
    }
    let attach = |at: usize| -> Result<Device, String> {
        let device = Device::of(&files[at])?;
        let _ = fs::remove_file(&links[at]);
        std::os::unix::fs::symlink(&device.0, &links[at]).unwrap();
        Ok(device)
    };
    let (first, second) = match (attach(0), attach(1)) {
        (Ok(first), Ok(second)) => (first, second),
        (Err(why), _) | (_, Err(why)) => return eprintln!("SKIPPED: no loop device can be made: {why}"),
    };
    let uuid = Pool::create(&links, None, &options()).unwrap().uuid();
    drop((first, second));
    let _devices = [attach(1).unwrap(), attach(0).unwrap()];
    let pool = Pool::open(&links[0], &options()).unwrap();
    assert_eq!(pool.uuid(), uuid);
    let paths = pool.describe().regions.into_iter().map(|region| region.path);
    assert!(paths.eq(links), "as they were named");
}

/// A file as a block device, as long as this lives.
struct Device(String);

impl Device {
    /// Why not, in words.
    fn of(file: &Path) -> Result<Device, String> {
        let made = std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let made = made.map_err(|e| e.to_string())?;
        match made.status.success() {
            true => Ok(Device(String::from_utf8_lossy(&made.stdout).trim().to_owned())),
            false => Err(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_pool_moved_to_another_directory_is_found() {
    let dir = Dir::new("moved");
    let paths = dir.paths(2);
    let uuid = Pool::create(&paths, Some(16 * MIB), &options()).unwrap().uuid();
    fs::create_dir(dir.path("new")).unwrap();
    for path in &paths {
        fs::rename(path, dir.path("new").join(path.file_name().unwrap())).unwrap();
    }
    assert_eq!(Pool::open(&dir.path("new/region0"), &options()).unwrap().uuid(), uuid);
}

/// A copy of files that was made past the pool has labels that name the original's regions.
#[test]
fn a_copy_of_a_pool_never_takes_regions_of_the_original() {
    let dir = Dir::new("copied");
    let paths = dir.paths(2);
    drop(Pool::create(&paths, Some(16 * MIB), &options()).unwrap());
    fs::create_dir(dir.path("copy")).unwrap();
    let copies: Vec<_> = (0..2).map(|i| dir.path(&format!("copy/region{i}"))).collect();
    for (path, copy) in paths.iter().zip(&copies) {
        fs::copy(path, copy).unwrap();
    }
    let files = |pool: &Path| {
        let regions = Pool::open(pool, &options()).unwrap().describe().regions;
        regions.into_iter().map(|region| fs::canonicalize(region.path).unwrap()).collect::<Vec<_>>()
    };
    let real = |paths: &[PathBuf]| paths.iter().map(|p| fs::canonicalize(p).unwrap()).collect::<Vec<_>>();
    assert_eq!(files(&copies[0]), real(&copies));
    assert_eq!(files(&paths[0]), real(&paths));
    // A name more is no copy.
    fs::create_dir(dir.path("link")).unwrap();
    fs::hard_link(&paths[0], dir.path("link/region0")).unwrap();
    assert_eq!(files(&dir.path("link/region0"))[1], real(&paths)[1]);

    let alone = ["region0", "region1", "is a copy of"];
    fs::remove_file(&copies[1]).unwrap();
    expect(open_message(&copies[0]), libc::EINVAL, &alone);
    fs::copy(&paths[0], dir.path("backup")).unwrap();
    expect(open_message(&dir.path("backup")), libc::EINVAL, &alone);
    // Whose regions nobody else has were moved.
    fs::remove_file(&paths[0]).unwrap();
    assert_eq!(files(&copies[0])[1], real(&paths[1..])[0]);
}

#[test]
fn assumptions_and_instruction_sets_are_judged() {
    let dir = Dir::new("assume");
    let path = dir.path("pool");
    drop(Pool::create(std::slice::from_ref(&path), Some(4 * MIB), &options()).unwrap());
    let detected = Pool::open(&path, &options()).unwrap().describe().detected;
    for (assume, emulated) in [(Domain::Memory, true), (Domain::CpuCache, true), (Domain::PageCache, false)] {
        let pool = Pool::open(&path, &PoolOptions { assume: Some(assume), ..options() });
        // Persistent memory is what it is: nothing weaker may be assumed, and nothing is emulated.
        if detected.is_persistent_memory() && assume != detected && assume != Domain::Memory {
            expect(message(pool), libc::EINVAL, &["would weaken"]);
            continue;
        }
        let d = pool.unwrap().describe();
        // The directory of temporary files may be memory itself.
        let emulated = (emulated || detected == Domain::Volatile) && !detected.is_persistent_memory();
        assert_eq!((d.domain, d.emulated), (assume, emulated));
        assert_eq!(d.missing.iter().any(|m| m.contains("emulated PM")), emulated);
    }
    for isa in lodestone::media::Isa::available() {
        let pool = Pool::open(&path, &PoolOptions { isa: Some(isa), ..options() }).unwrap();
        assert_eq!(pool.describe().isa, isa);
    }
    let bad = PoolOptions { stripe_bytes: Some(3000), ..options() };
    expect(message(Pool::memfd(8 * MIB, &bad)), libc::EINVAL, &["stripe unit", "power of two"]);
}

#[test]
fn prefault_takes_every_page() {
    let pool = Pool::memfd(8 * MIB, &PoolOptions { prefault: true, ..options() }).unwrap();
    assert_eq!(pool.describe().regions[0].pages.resident_bytes, 8 * MIB);
}

#[test]
fn a_pool_on_a_tmpfs_with_huge_pages_lies_in_them() {
    let dir = Dir::new("huge");
    let _mounted = match Mounted::at(&dir.0, "tmpfs", "size=64m,huge=advise") {
        Ok(mounted) => mounted,
        Err(why) => return eprintln!("SKIPPED: a tmpfs with huge pages cannot be mounted: {why}"),
    };
    let bytes = 16 * MIB;
    let huge_of = |path: &Path| {
        let pool = Pool::open(path, &PoolOptions { prefault: true, ..options() }).unwrap();
        pool.describe().regions[0].pages.huge_bytes
    };
    // What a pool takes at first use is huge where the kernel has any, but for where its label was written.
    let (sparse, reserved) = (dir.path("sparse"), dir.path("reserved"));
    fs::File::create_new(&sparse).unwrap().set_len(bytes).unwrap();
    drop(Pool::create(std::slice::from_ref(&sparse), None, &options()).unwrap());
    drop(Pool::create(std::slice::from_ref(&reserved), Some(bytes), &options()).unwrap());
    if huge_of(&sparse) < bytes / 2 {
        return eprintln!("SKIPPED: this machine has no 16 MiB of huge pages to give");
    }
    assert_eq!(huge_of(&reserved), bytes);
    assert_eq!(fs::metadata(&reserved).unwrap().len(), bytes);
    // What does not fit is refused, and leaves nothing behind.
    let (errno, said) = message(Pool::create(&[dir.path("large")], Some(64 * MIB), &options()));
    assert_eq!(errno, libc::ENOSPC, "{said}");
    assert!(!dir.path("large").exists());
}

/// The kernel maps whole huge pages there, whatever it is asked for.
#[test]
fn a_pool_on_hugetlbfs_lies_in_whole_huge_pages() {
    let dir = Dir::new("hugetlbfs");
    let bytes = 4 * MIB + 4096;
    let _pages = match HugePages::more(8) {
        Ok(pages) => pages,
        Err(why) => return eprintln!("SKIPPED: the kernel sets no huge pages aside: {why}"),
    };
    let _mounted = match Mounted::at(&dir.0, "hugetlbfs", "pagesize=2M") {
        Ok(mounted) => mounted,
        Err(why) => return eprintln!("SKIPPED: hugetlbfs cannot be mounted: {why}"),
    };
    let path = dir.path("pool");
    let mapped = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let of_pool = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap()));
        let range = |line: &str| {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).unwrap());
            to - from
        };
        of_pool.map(range).collect::<Vec<_>>()
    };
    let pool = Pool::create(std::slice::from_ref(&path), Some(bytes), &options()).unwrap();
    assert_eq!((pool.len(), mapped()), (bytes, vec![6 * MIB]));
    let last = Addr(bytes - 8);
    let flushed = pool.flush(pool.store64(last, 7).unwrap());
    pool.fence(flushed);
    drop(pool);
    assert_eq!(mapped(), [], "what is mapped past the end stays, over what is others'");
    let pool = Pool::open(&path, &options()).unwrap();
    assert_eq!((pool.load64(last), mapped()), (Ok(7), vec![6 * MIB]));
}

/// So many huge pages that the kernel sets aside, until this is dropped.
struct HugePages(u64);

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn more(pages: u64) -> Result<HugePages, String> {
        let count = || fs::read_to_string(Self::COUNT).map_err(|e| e.to_string());
        let before: u64 = count()?.trim().parse().map_err(|e| format!("{e}"))?;
        fs::write(Self::COUNT, (before + pages).to_string()).map_err(|e| e.to_string())?;
        let set_aside = HugePages(before);
        match count()?.trim().parse::<u64>() {
            Ok(now) if now >= before + pages => Ok(set_aside),
            _ => Err("it has too few".to_owned()),
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(Self::COUNT, self.0.to_string());
    }
}

/// Mounted as long as this lives.
struct Mounted(PathBuf);

impl Mounted {
    /// Why not, in words.
    fn at(at: &Path, kind: &str, with: &str) -> Result<Mounted, String> {
        let mount =
            std::process::Command::new("mount").args(["-t", kind, "-o", with, "none"]).arg(at).output();
        match mount {
            Ok(output) if output.status.success() => Ok(Mounted(at.to_path_buf())),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(e) => Err(e.to_string()),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}

#[test]
#[should_panic(expected = "outside the pool")]
fn a_range_outside_the_pool_is_a_broken_caller() {
    let pool = Pool::memfd(MIB, &options()).unwrap();
    let _ = pool.read(Addr(MIB - 4), &mut [0; 8]);
}

#[test]
fn lines_of_words_are_their_bytes() {
    let lines: [[u64; 8]; 3] = std::array::from_fn(|line| {
        std::array::from_fn(|i| 0x9e37_79b9_7f4a_7c15u64.wrapping_mul((8 * line + i) as u64 + 3))
    });
    let bytes: Vec<u8> = lines.as_flattened().iter().flat_map(|w| w.to_le_bytes()).collect();
    assert_eq!(crc32c_words(lines.as_flattened(), 0x1234_5678), crc32c(&bytes[4..], 0x1234_5678));
    for isa in Isa::available() {
        for assume in [Domain::Memory, Domain::PageCache] {
            let options = PoolOptions { assume: Some(assume), isa: Some(isa), ..PoolOptions::default() };
            let pool = Pool::memfd(1 << 20, &options).unwrap();
            let flushed = pool.store_lines(Addr(8192), &lines).unwrap();
            pool.fence(flushed);
            let mut stored = vec![0; bytes.len() + 64];
            pool.read(Addr(8192), &mut stored).unwrap();
            assert_eq!(stored[..bytes.len()], bytes, "{isa:?} {assume:?}");
            assert_eq!(stored[bytes.len()..], [0; 64], "{isa:?} {assume:?}");
        }
    }
}

/// Between fork and exec a child has everything open that its parent has.
#[test]
fn a_pool_is_free_once_it_is_dropped_whatever_children_hold() {
    let dir = Dir::new("child");
    let path = dir.path("pool");
    let pool = Pool::create(std::slice::from_ref(&path), Some(8 << 20), &PoolOptions::default()).unwrap();
    // SAFETY: the child calls nothing but pause, which may be called after a fork of several threads.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        loop {
            // SAFETY: it has no arguments, and ends by a signal.
            unsafe { libc::pause() };
        }
    }
    drop(pool);
    let again = Pool::open(&path, &PoolOptions::default());
    // SAFETY: the child is this process's, and not waited for yet.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    again.expect("a child does not keep it");
}

/// As a guest's memory is: stored to by another process, written back from here, by several threads where it is much.
#[test]
fn what_others_stored_is_written_back() {
    let dir = Dir::new("persist");
    let path = dir.path("memory");
    let bytes: Vec<u8> = (0..40 * MIB).map(|i| (i * 7 + i / 4096) as u8).collect();
    for assume in [None, Some(Domain::Memory)] {
        let size = Some(bytes.len() as u64);
        let span = Span::open(&path, &SpanOptions { size, assume, ..SpanOptions::default() }).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&bytes, 0).unwrap();
        for (at, len) in [(0, bytes.len()), (0, 0), (64, 1), (4095, 2), (MIB, 33 * MIB as usize + 17)] {
            span.persist(&[(Addr(at), len)]).unwrap();
        }
        span.persist(&[(Addr(0), 4096), (Addr(20 * MIB), 20 * MIB as usize)]).unwrap();
        assert_eq!(span.crc32c(Addr(0), bytes.len(), 0).unwrap(), crc32c(&bytes, 0), "{assume:?}");
    }
}

/// Others may write to a file, move it or put another in its place, and ask for no lock.
#[test]
fn what_is_refused_leaves_what_others_did() {
    let dir = Dir::new("refused");
    let path = dir.path("memory");
    let refused = |then: &dyn Fn()| {
        let places = |_| {
            then();
            Err(lodestone::Error::new(libc::EEXIST, "test"))
        };
        let options = SpanOptions { size: Some(MIB), ..SpanOptions::default() };
        assert_eq!(Span::open_at(&path, &options, places).unwrap_err().errno(), libc::EEXIST);
    };
    fs::write(&path, b"old").unwrap();
    refused(&|| fs::write(&path, b"of another").unwrap());
    assert_eq!(fs::read(&path).unwrap(), b"of another");

    fs::remove_file(&path).unwrap();
    refused(&|| ());
    assert!(!path.exists());
    refused(&|| {
        fs::rename(&path, dir.path("moved")).unwrap();
        fs::write(&path, b"of another").unwrap();
    });
    assert_eq!(fs::read(&path).unwrap(), b"of another");

    // What was made longer is cut back: its place is taken.
    let (taken, ours) =
        (Pool::memfd(MIB, &options()).unwrap(), SpanOptions { size: Some(MIB), ..SpanOptions::default() });
    let place = taken.mapped(Addr(0), 1).unwrap().addr() as u64;
    assert_eq!(Span::open_at(&path, &ours, |_| Ok(vec![place])).unwrap_err().errno(), libc::EADDRINUSE);
    assert_eq!(fs::read(&path).unwrap(), b"of another");
    drop(Span::open(&path, &ours).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB);
}

#[test]
fn who_waits_for_the_lock_sees_the_file_as_it_is_then() {
    let dir = Dir::new("length");
    let path = dir.path("memory");
    let file = fs::File::create(&path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| Span::open(&path, &SpanOptions::default()).map(|span| span.len()));
        // Long before it is given up.
        std::thread::sleep(std::time::Duration::from_millis(50));
        file.set_len(MIB).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
        assert_eq!(opened.join().unwrap().unwrap(), MIB);
    });
}

/// As a guest's memory lies in a pool that its server has.
#[test]
fn parts_are_used_beside_who_has_the_whole() {
    let dir = Dir::new("part");
    let path = dir.path("pool");
    let pool = Pool::create(std::slice::from_ref(&path), Some(16 * MIB), &options()).unwrap();
    assert!(holds_pool(&path).unwrap(), "also while it is in use");
    let part = Part { offset: 4 * MIB, bytes: 2 * MIB };
    let open =
        |part, read_only| Span::open_part(&path, part, &SpanOptions { read_only, ..SpanOptions::default() });
    let span = open(part, false).unwrap();
    assert_eq!((span.len(), span.domain()), (part.bytes, pool.domain()));
    let flushed = span.copy_nt(Addr(8), b"stored").unwrap();
    span.fence(flushed);
    span.persist(&[(Addr(0), 4096)]).unwrap();
    let mut seen = [0; 6];
    pool.read(Addr(part.offset + 8), &mut seen).unwrap();
    assert_eq!(&seen, b"stored");
    fs::File::open(&path).unwrap().read_exact_at(&mut seen, part.offset + 8).unwrap();
    assert_eq!(&seen, b"stored");

    // Nobody else has it, nor a piece of it; others are free.
    for (other, free) in [
        (part, false),
        (Part { offset: 6 * MIB - 4096, bytes: 8192 }, false),
        (Part { offset: 6 * MIB, bytes: MIB }, true),
    ] {
        let opened = open(other, false);
        assert_eq!(opened.err().map_or(0, |e| e.errno()), if free { 0 } else { libc::EBUSY }, "{other:?}");
    }
    drop(span);
    let readers = [open(part, true).unwrap(), open(part, true).unwrap()];
    assert_eq!(open(part, false).unwrap_err().errno(), libc::EBUSY);
    drop(readers);
    let held = Span::hold_part(&path, part).unwrap();
    assert_eq!(open(part, false).unwrap_err().errno(), libc::EBUSY);
    let handed_on = held.try_clone().unwrap();
    drop(held);
    assert_eq!(open(part, false).unwrap_err().errno(), libc::EBUSY, "as long as the file is open anywhere");
    drop(handed_on);
    open(part, false).unwrap();

    for (offset, bytes) in
        [(16 * MIB, 4096), (15 * MIB, 2 * MIB), (0, 0), (u64::MAX - 4095, 8192), (100, 4096)]
    {
        let errno = open(Part { offset, bytes }, false).unwrap_err().errno();
        assert_eq!(errno, libc::EINVAL, "{bytes} bytes at {offset}");
    }
    drop(pool);
    let alone = Pool::open(&path, &options());
    alone.expect("a part that was used leaves no lock");
    fs::write(dir.path("other"), b"short").unwrap();
    assert!(!holds_pool(&dir.path("other")).unwrap());
    assert_eq!(holds_pool(&dir.path("none")).unwrap_err().errno(), libc::ENOENT);
}
