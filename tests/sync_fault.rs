//! An `fdatasync` that fails: who asked for durability hears of it, nothing that failed is ever called durable
//! afterwards, what was synced before is there, and the pool is usable again once it is opened anew.

use std::path::PathBuf;
use std::sync::Arc;

use lodestone::fs::format::{BLOCK, SLOT, STATE_BLOCK, State, TABLE_BLOCK};
use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, OpenOptions, SetAttr, check};
use lodestone::media::{Domain, LINE, Media, Pool, PoolOptions};
use lodestone::sim::media::{Keep, SimMedia};

const POOL_BYTES: usize = 2 << 20;

fn options() -> OpenOptions {
    OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() }
}

fn create<M: Media>(fs: &Fs<M>, name: &[u8], byte: u8) -> lodestone::Result<Ino> {
    let ino = fs.create(&Cred::root(), Ino::ROOT, name, 0o644, 0, libc::O_EXCL)?.0.ino;
    fs.write(&Cred::root(), ino, 0, &[byte; 9000], false)?;
    Ok(ino)
}

/// Whether the file is there, whole; a part of it may not be.
fn has<M: Media>(fs: &Fs<M>, name: &[u8], byte: u8) -> bool {
    let Ok(attr) = fs.lookup(&Cred::root(), Ino::ROOT, name) else { return false };
    let mut bytes = vec![0; 9000];
    let n = fs.read(attr.ino, 0, &mut bytes).unwrap();
    assert!(n == 0 || bytes.iter().all(|b| *b == byte), "{} is torn", name.escape_ascii());
    n == bytes.len()
}

/// The file system after its sync failed: `fails` makes it fail from then on.
fn fail<M: Media>(fs: &Fs<M>, fails: impl FnOnce()) {
    let synced = create(fs, b"synced", 1).unwrap();
    fs.fsync(synced, true).unwrap();
    let lost = create(fs, b"lost", 2).unwrap();
    // The write is not the last that the log has.
    for mode in [0o600, 0o640] {
        fs.setattr(&Cred::root(), lost, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
    }
    fails();
    for call in ["first", "second"] {
        let e = fs.fsync(lost, true).expect_err(call);
        assert_eq!(e.errno(), libc::EIO, "the {call} fsync: {e}");
    }
    let e = fs.fsync(synced, true).expect_err("a sync covers all files");
    assert_eq!(e.errno(), libc::EIO, "{e}");
    assert_eq!(create(fs, b"later", 3).unwrap_err().errno(), libc::EIO);
    assert_eq!(fs.write(&Cred::root(), synced, 0, &[4; 10], false).unwrap_err().errno(), libc::EIO);
    assert_eq!(fs.unlink(&Cred::root(), Ino::ROOT, b"synced").unwrap_err().errno(), libc::EIO);
    assert!(has(fs, b"synced", 1) && has(fs, b"lost", 2), "what is there can be read");
    assert!(fs.sync().is_err() && fs.close().is_err(), "it must not pass for clean");
}

#[test]
fn a_failed_sync_is_never_forgotten() {
    let pool =
        Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(pool, &options()).unwrap();
    fail(&fs, || fs.media().fail_syncs(true));
    let point = fs.media().crash_point();
    for keep in [Keep::Nothing, Keep::Everything].into_iter().chain((0..200).map(Keep::Random)) {
        let fs = Fs::open(point.media(keep), &options()).unwrap_or_else(|e| panic!("{keep:?}: {e}"));
        assert!(has(&fs, b"synced", 1), "{keep:?}");
        has(&fs, b"lost", 2);
        assert!(!has(&fs, b"later", 3), "{keep:?}");
        assert!(fs.check().unwrap().is_clean(), "{keep:?}");
        create(&fs, b"again", 5).unwrap();
        fs.close().unwrap();
    }
}

/// The kernel calls pages clean that it could not write: it shows them, nobody writes them, and one day they are gone. Whoever
/// opens the pool next, on the same boot, takes them for lost where they are.
#[test]
fn what_a_failed_sync_lost_is_missed_by_the_same_boot() {
    let pool =
        Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(pool, &same_boot()).unwrap();
    fail(&fs, || fs.media().fail_syncs(true));
    let point = fs.media().crash_point();
    let mut missed = 0;
    for seed in 0..200 {
        let mut image = point.image(Keep::Random(seed));
        // What the mount said last of itself is in the cache.
        let told = point.image(Keep::Everything);
        for block in [STATE_BLOCK as usize, POOL_BYTES / BLOCK - 1] {
            image[block * BLOCK..][..BLOCK].copy_from_slice(&told[block * BLOCK..][..BLOCK]);
        }
        let fs = Fs::open(SimMedia::new(image, Domain::PageCache), &same_boot()).unwrap();
        assert!(has(&fs, b"synced", 1), "{seed}");
        missed += !has(&fs, b"lost", 2) as u32;
        assert!(fs.check().unwrap().is_clean(), "{seed}");
    }
    assert!(missed > 0, "nothing was lost");
}

#[test]
fn a_sync_that_fails_at_the_close_leaves_a_pool_to_recover() {
    let pool =
        Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache), &MkfsOptions::default()).unwrap();
    let fs = Fs::open(pool, &options()).unwrap();
    let synced = create(&fs, b"synced", 1).unwrap();
    fs.fsync(synced, false).unwrap();
    create(&fs, b"lost", 2).unwrap();
    fs.media().fail_syncs(true);
    assert_eq!(fs.close().unwrap_err().errno(), libc::EIO);
    let point = fs.media().crash_point();
    for seed in 0..200 {
        let fs = Fs::open(point.media(Keep::Random(seed)), &options()).unwrap();
        assert!(has(&fs, b"synced", 1), "{seed}");
        assert!(fs.check().unwrap().is_clean(), "{seed}");
    }
}

fn same_boot() -> OpenOptions {
    OpenOptions { power_lost: false, ..options() }
}

/// A new pool on media that outlive whoever has it open.
fn made() -> Arc<SimMedia> {
    let media = Arc::new(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache));
    drop(Fs::mkfs(media.clone(), &MkfsOptions::default()).unwrap());
    media
}

/// The state line that counts.
fn newest(media: &SimMedia) -> State {
    let image = media.image();
    let lines = image[STATE_BLOCK as usize * BLOCK..][..2 * LINE].chunks(LINE);
    let newest = lines.filter_map(|line| State::fields(line.try_into().unwrap())).max_by_key(|s| s.serial);
    newest.unwrap()
}

/// The state line that counts says that a sync failed, and of no pool that it was closed.
fn assert_doubted(media: &SimMedia, which: &str) {
    let State { boot, clean, closed, .. } = newest(media);
    assert_eq!((boot, clean, closed), (0, false, false), "{which}");
}

/// What was stored before is in the page cache only; the kernel says that it could not write it to whoever syncs next, once.
#[test]
fn a_sync_that_fails_while_the_pool_is_opened_is_never_forgotten() {
    for nth in 0.. {
        let media = made();
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        let synced = create(&fs, b"synced", 1).unwrap();
        fs.fsync(synced, true).unwrap();
        create(&fs, b"lost", 2).unwrap();
        fs.abandon().unwrap();
        media.fail_sync_behind(nth);
        let Err(e) = Fs::open(media.clone(), &same_boot()) else {
            assert!(nth >= 3, "an open has three syncs");
            return;
        };
        assert_eq!(e.errno(), libc::EIO, "{nth}: {e}");
        assert_doubted(&media, &format!("sync {nth} of the open"));
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        assert!(has(&fs, b"synced", 1), "{nth}");
        let there = has(&fs, b"lost", 2);
        let again = create(&fs, b"again", 3).unwrap();
        fs.fsync(again, true).unwrap();
        let fs = Fs::open(media.crash_point().media(Keep::Nothing), &options()).unwrap();
        assert!(has(&fs, b"synced", 1) && has(&fs, b"again", 3), "{nth}");
        assert_eq!(has(&fs, b"lost", 2), there, "{nth}: what a sync covered is lost");
        assert!(fs.check().unwrap().is_clean(), "{nth}");
    }
}

/// The blocks that the inode table gave back at the end are others' after the next open.
#[test]
fn a_sync_that_fails_while_the_pool_is_closed_is_never_forgotten() {
    for nth in 0.. {
        let media = made();
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        let names: Vec<String> = (0..600).map(|n| format!("f{n}")).collect();
        for name in &names {
            fs.create(&Cred::root(), Ino::ROOT, name.as_bytes(), 0o644, 0, libc::O_EXCL).unwrap();
        }
        create(&fs, b"synced", 1).unwrap();
        fs.sync().unwrap();
        for name in &names {
            let ino = fs.lookup(&Cred::root(), Ino::ROOT, name.as_bytes()).unwrap().ino;
            fs.unlink(&Cred::root(), Ino::ROOT, name.as_bytes()).unwrap();
            fs.release(ino);
            fs.forget(ino, 2);
        }
        media.fail_sync_behind(nth);
        let Err(e) = fs.close() else {
            assert!(nth >= 5, "a close has five syncs");
            return;
        };
        assert_eq!(e.errno(), libc::EIO, "{nth}: {e}");
        assert_doubted(&media, &format!("sync {nth} of the close"));
        assert_eq!(newest(&media).checkpoint, 0, "{nth}: it passes for a repair that was cut short");
        drop(fs);
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        assert!(has(&fs, b"synced", 1), "{nth}");
        let made =
            (0..u8::MAX).take_while(|n| create(&fs, &[b'g', b'a' + n / 16, b'a' + n % 16], *n).is_ok());
        let made = made.count() as u8;
        fs.sync().unwrap();
        let fs = Fs::open(media.crash_point().media(Keep::Nothing), &options())
            .unwrap_or_else(|e| panic!("{nth}: {e}"));
        assert!(has(&fs, b"synced", 1), "{nth}");
        assert!((0..made).all(|n| has(&fs, &[b'g', b'a' + n / 16, b'a' + n % 16], n)), "{nth}");
        assert!(fs.check().unwrap().is_clean(), "{nth}");
    }
}

#[test]
fn a_sync_that_fails_in_a_repair_is_never_forgotten() {
    for nth in 0.. {
        let media = made();
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        create(&fs, b"synced", 1).unwrap();
        create(&fs, b"damaged", 2).unwrap();
        fs.close().unwrap();
        drop(fs);
        let at = media.image().windows(7).position(|bytes| bytes == b"damaged").unwrap();
        media.flip(at, 0);
        media.fail_sync_behind(nth);
        let Err(e) = check::repair(media.clone(), false, None) else {
            assert!(nth >= 6, "a repair has six syncs, and opens and closes the pool");
            return;
        };
        assert_eq!(e.errno(), libc::EIO, "{nth}: {e}");
        assert_doubted(&media, &format!("sync {nth} of the repair"));
        check::repair(media.clone(), false, None).unwrap();
        let fs = Fs::open(media.crash_point().media(Keep::Nothing), &options()).unwrap();
        assert!(has(&fs, b"synced", 1), "{nth}");
        assert!(fs.check().unwrap().is_clean(), "{nth}");
    }
}

/// What was synced is damaged behind an open that failed once it had recovered: no crash left that.
#[test]
fn damage_is_told_from_a_crash_after_a_sync_that_failed_in_recovery() {
    for nth in 0..2 {
        let media = made();
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        let synced = create(&fs, b"synced", 1).unwrap();
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        fs.setattr(&Cred::root(), synced, &mode).unwrap();
        fs.fsync(synced, true).unwrap();
        fs.abandon().unwrap();
        media.fail_sync_behind(nth);
        let e = Fs::open(media.clone(), &same_boot()).map(drop).unwrap_err();
        assert_eq!(e.errno(), libc::EIO, "{nth}: {e}");
        let write = TABLE_BLOCK as usize * BLOCK + synced.0 as usize * SLOT + LINE;
        media.flip(write + LINE - 1, 0);
        let fs = Fs::open(media.clone(), &same_boot()).unwrap();
        let e = fs.read(synced, 0, &mut [0; 10]).expect_err("damage passes for the end of the log");
        assert_eq!(e.errno(), libc::EUCLEAN, "{nth}: {e}");
    }
}

#[test]
fn a_pool_whose_making_was_not_synced_is_none() {
    let media = Arc::new(SimMedia::new(vec![0; POOL_BYTES], Domain::PageCache));
    media.fail_sync_once();
    let e = Fs::mkfs(media.clone(), &MkfsOptions::default()).map(drop).unwrap_err();
    assert_eq!(e.errno(), libc::EIO, "{e}");
    assert_doubted(&media, "mkfs");
}

/// From now on `fdatasync` fails in this thread, as on a disk that is broken. The kernel does it: a filter of
/// system calls.
fn break_fdatasync() -> std::io::Result<()> {
    let op = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the call's number
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_fdatasync as u32, 0, 1),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EIO as u32, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls change the calling thread alone; the program and its instructions outlive the second.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) != 0
    };
    if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn a_disk_that_cannot_sync_is_told_of() {
    let path: PathBuf = std::env::temp_dir().join(format!("lodestone-sync-fault-{}", std::process::id()));
    let made =
        Pool::create(std::slice::from_ref(&path), Some(POOL_BYTES as u64), &PoolOptions::default()).unwrap();
    drop(Fs::mkfs(made, &MkfsOptions::default()).unwrap());
    let open = || Pool::open(&path, &PoolOptions::default()).unwrap();
    if open().domain() != Domain::PageCache {
        println!("SKIPPED: a_disk_that_cannot_sync_is_told_of: the temporary directory is on memory");
        std::fs::remove_file(&path).unwrap();
        return;
    }
    if let Err(e) = std::thread::spawn(break_fdatasync).join().unwrap() {
        println!(
            "SKIPPED: a_disk_that_cannot_sync_is_told_of: a filter of system calls is refused here: {e}"
        );
        std::fs::remove_file(&path).unwrap();
        return;
    }
    let fs: Arc<Fs<Pool>> = Fs::open(open(), &OpenOptions { power_lost: false, ..options() }).unwrap();
    // A filter stays: the thread must not be the tests' own.
    let done = std::thread::spawn({
        let fs = fs.clone();
        move || fail(&fs, || break_fdatasync().expect("a filter of system calls"))
    });
    done.join().unwrap();
    drop(fs);
    // The host was up all the time, and still what was not synced is looked at anew.
    let fs = Fs::open(open(), &OpenOptions { power_lost: false, ..options() }).unwrap();
    assert!(has(&fs, b"synced", 1) && !has(&fs, b"later", 3));
    has(&fs, b"lost", 2);
    create(&fs, b"again", 5).unwrap();
    fs.close().unwrap();
    drop(fs);
    std::fs::remove_file(&path).unwrap();
}
