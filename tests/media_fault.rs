//! Media that goes away under a pool: the call fails with the address, the process lives, and nobody
//! else's SIGBUS is swallowed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use lodestone::media::{Addr, Domain, Fault, Isa, Media, Pool, PoolOptions, Span, SpanOptions};
use lodestone::wsp::heap::{CreateOptions, Heap, OpenOptions};

const MIB: u64 = 1 << 20;

/// A directory of its own for one test, perhaps with a small tmpfs in it, removed at the end.
struct Dir {
    path: PathBuf,
    mounted: bool,
}

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("lodestone-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Dir { path, mounted: false }
    }

    /// None, said loudly, where this user may not mount.
    fn tmpfs(name: &str, bytes: u64) -> Option<Dir> {
        let mut dir = Dir::new(name);
        let size = format!("size={bytes}");
        let status =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&dir.path).status();
        if !status.is_ok_and(|s| s.success()) {
            eprintln!("SKIPPED: {name} needs the right to mount a tmpfs");
            return None;
        }
        dir.mounted = true;
        Some(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg(&self.path).status();
        }
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn set_len(path: &Path, bytes: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn options(isa: Isa, domain: Domain) -> PoolOptions {
    PoolOptions { isa: Some(isa), assume: Some(domain), ..PoolOptions::default() }
}

/// Every access to [at, at + len) must fail, inside the range and not before `bad_from`.
fn assert_all_fail(pool: &Pool, at: u64, len: usize, bad_from: u64, what: &str) {
    let src = vec![1; len];
    let mut dst = vec![0; len];
    let a = Addr(at);
    let failures: [(&str, Result<(), Fault>); 6] = [
        ("read", pool.read(a, &mut dst)),
        ("crc32c", pool.crc32c(a, len, 0).map(drop)),
        ("copy_cached", pool.copy_cached(a, &src).map(drop)),
        ("copy_nt", pool.copy_nt(a, &src).map(|f| _ = pool.fence(f))),
        ("copy_nt_crc", pool.copy_nt_crc(a, &src, 0).map(|(_, f)| _ = pool.fence(f))),
        ("zero_nt", pool.zero_nt(a, len).map(|f| _ = pool.fence(f))),
    ];
    for (name, failure) in failures {
        let fault = failure.expect_err(&format!("{what}: {name} of {len} bytes at {at} must fail"));
        let range = at.max(bad_from)..at + len as u64;
        assert!(range.contains(&fault.at.0), "{what}: {name} says {:#x}, not in {range:#x?}", fault.at.0);
    }
    let word = Addr((at + len as u64 - 8).max(bad_from) & !7);
    assert_eq!(pool.load64(word), Err(Fault { at: word }), "{what}: load64");
    let stored = pool.store64(word, 1).map(drop);
    assert_eq!(stored, Err(Fault { at: word }), "{what}: store64");
}

#[test]
fn a_file_cut_under_its_pool() {
    let dir = Dir::new("cut");
    let path = dir.path.join("pool");
    let made = Pool::create(std::slice::from_ref(&path), Some(8 * MIB), &PoolOptions::default()).unwrap();
    let is_persistent_memory = made.domain().is_persistent_memory();
    drop(made);
    for domain in [Domain::Memory, Domain::PageCache] {
        // Persistent memory cannot be taken for less.
        if is_persistent_memory && domain == Domain::PageCache {
            continue;
        }
        for isa in Isa::available() {
            let what = format!("{isa} {domain}");
            let force = PoolOptions { force: true, ..options(isa, domain) };
            let pool = Pool::create(std::slice::from_ref(&path), Some(8 * MIB), &force).unwrap();
            let dirty = pool.store64(Addr(6 * MIB), 1).unwrap();
            set_len(&path, 4 * MIB);
            for at in [5 * MIB, 7 * MIB + 3] {
                for len in [8, 64, 100, 256, 4096, 5000, 100_000] {
                    assert_all_fail(&pool, at, len, at, &what);
                }
            }
            // Ranges that begin on good media.
            for before in [1, 63, 64, 500, 70_000] {
                assert_all_fail(&pool, 4 * MIB - before, before as usize + 64, 4 * MIB, &what);
            }
            // Writing back what is gone must not kill either.
            let flushed = pool.flush(dirty);
            pool.fence(flushed);
            pool.expect_copy(Addr(5 * MIB));

            let data = vec![7; 50_000];
            let flushed = pool.copy_nt(Addr(MIB + 5), &data).unwrap();
            pool.fence(flushed);
            let mut back = vec![0; data.len()];
            pool.read(Addr(MIB + 5), &mut back).unwrap();
            assert!(back == data, "{what}: good media goes on");
            set_len(&path, 8 * MIB);
            assert_eq!(pool.load64(Addr(5 * MIB)).unwrap(), 0, "{what}: the file is whole again");
        }
    }
}

/// The one that QEMU has where it uses no virtualization of the host.
fn is_emulated_processor() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0x4000_0000);
        [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat() == b"TCGTCGTCGTCG"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// What others stored, and what a program stored by address, is not called durable where its page is gone.
#[test]
fn what_cannot_be_written_back_is_said() {
    if is_emulated_processor() {
        eprintln!(
            "SKIPPED: what_cannot_be_written_back_is_said: QEMU's own processor looks at no page when it writes a line back"
        );
        return;
    }
    let dir = Dir::new("write-back");
    let path = dir.path.join("memory");
    let assume = Some(Domain::Memory);
    let span = SpanOptions { size: Some(40 * MIB), assume, ..SpanOptions::default() };
    let span = Span::open(&path, &span).unwrap();
    // By one thread, and by several.
    for (at, len) in [(0, 8 * MIB as usize), (0, 40 * MIB as usize)] {
        span.persist(&[(Addr(at), len)]).unwrap();
    }
    set_len(&path, 4 * MIB);
    for (at, len) in [(0, 8 * MIB as usize), (0, 40 * MIB as usize)] {
        let failed = span.persist(&[(Addr(at), len)]).expect_err("it is gone").to_string();
        assert!(failed.contains("media"), "{failed}");
    }
    assert_eq!(span.write_back(Addr(4 * MIB - 64), 8192).map(drop), Err(Fault { at: Addr(4 * MIB) }));
    span.persist(&[(Addr(0), 4 * MIB as usize)]).unwrap();
    drop(span);

    let paths = [dir.path.join("a"), dir.path.join("b")];
    let stripes = PoolOptions { stripe_bytes: Some(64 << 10), assume, ..PoolOptions::default() };
    let pool = Pool::create(&paths, Some(8 * MIB), &stripes).unwrap();
    set_len(&paths[1], 64 << 10);
    let second = Addr(2 * (64 << 10));
    assert_eq!(pool.write_back(Addr(100), 1 << 20).map(drop), Err(Fault { at: second }));
    assert!(pool.persist(&[(Addr(0), 4096), (second, 8)]).is_err());

    let path = dir.path.join("heap");
    let open = OpenOptions { assume, ..OpenOptions::default() };
    let heap = Heap::create(&path, &CreateOptions { size: Some(8 * MIB), open, ..CreateOptions::default() })
        .unwrap();
    let at = heap.reserve_offset(4096).unwrap();
    heap.persist(at, 4096).unwrap();
    set_len(&path, at.0 & !4095);
    assert_eq!(heap.persist(at, 4096).unwrap_err().errno(), libc::EIO);
}

#[test]
fn a_fault_of_a_striped_pool_has_its_pool_address() {
    let dir = Dir::new("cut-stripe");
    let paths: Vec<_> = (0..3).map(|i| dir.path.join(format!("r{i}"))).collect();
    let options = PoolOptions { stripe_bytes: Some(64 << 10), ..PoolOptions::default() };
    let pool = Pool::create(&paths, Some(12 * MIB), &options).unwrap();
    set_len(&paths[1], 64 << 10);
    // Pool stripes 2, 5, 8 ... lie in region 1, from its second stripe on.
    let unit = 64 << 10;
    for stripe in 1..20 {
        let at = Addr(stripe * unit + 72);
        let loaded = pool.load64(at);
        match stripe % 3 {
            2 => assert_eq!(loaded, Err(Fault { at })),
            _ => assert_eq!(loaded, Ok(0)),
        }
    }
    let fault = pool.read(Addr(0), &mut vec![0; pool.len() as usize]).unwrap_err();
    assert_eq!(fault.at.0 / unit, 2, "the first bad stripe");
}

#[test]
fn faults_of_many_threads_at_once() {
    let dir = Dir::new("threads");
    let path = dir.path.join("pool");
    let pool = Pool::create(std::slice::from_ref(&path), Some(8 * MIB), &PoolOptions::default()).unwrap();
    set_len(&path, 4 * MIB);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let pool = &pool;
            scope.spawn(move || {
                for i in 0..500 {
                    let at = Addr(4 * MIB + ((thread * 500 + i) * 4096) % (3 * MIB));
                    assert_eq!(pool.load64(at), Err(Fault { at }));
                    assert!(pool.load64(Addr(thread * MIB)).is_ok());
                }
            });
        }
    });
}

/// The host cannot fill a hole: stores into it fail, what was stored stays.
#[test]
fn a_full_tmpfs_under_a_sparse_pool() {
    let Some(dir) = Dir::tmpfs("full", 4 * MIB) else { return };
    let path = dir.path.join("pool");
    fs::File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    let pool = Pool::create(&[path], None, &PoolOptions::default()).unwrap();
    let block = vec![9; 64 << 10];
    let mut stored = Vec::new();
    let mut failed = 0;
    for at in (4096..32 * MIB).step_by(block.len()).map(Addr) {
        match pool.copy_nt(at, &block) {
            Ok(flushed) => {
                pool.fence(flushed);
                stored.push(at);
            }
            Err(fault) => {
                assert!((at.0..at.0 + block.len() as u64).contains(&fault.at.0));
                failed += 1;
            }
        }
    }
    assert!(failed > 400 && stored.len() > 30, "{failed} failed, {} stored", stored.len());
    let mut back = vec![0; block.len()];
    for at in stored {
        pool.read(at, &mut back).unwrap();
        assert!(back == block, "{at:?}");
    }
}

#[test]
fn a_host_without_room_is_said_before_anything_is_made() {
    let Some(dir) = Dir::tmpfs("room", 8 * MIB) else { return };
    let error = |paths: &[PathBuf], size| {
        Pool::create(paths, Some(size), &PoolOptions::default()).expect_err("no room")
    };
    let path = dir.path.join("pool");
    let e = error(std::slice::from_ref(&path), 64 * MIB);
    assert_eq!(e.errno(), libc::ENOSPC, "{e}");
    assert!(e.to_string().contains(path.to_str().unwrap()) && e.to_string().contains("smaller"), "{e}");
    assert!(!path.exists(), "a file of a failed creation stays");

    // The second region does not fit: the first goes too, and a file that was there is as it was.
    let old = dir.path.join("old");
    fs::File::create(&old).unwrap().set_len(100).unwrap();
    let e = error(&[path.clone(), old.clone()], 14 * MIB);
    assert_eq!(e.errno(), libc::ENOSPC, "{e}");
    assert!(!path.exists());
    assert_eq!(fs::metadata(&old).unwrap().len(), 100);
    // And the room is there again.
    drop(Pool::create(&[path], Some(6 * MIB), &PoolOptions::default()).unwrap());
}

/// Prefaulting a pool that the host cannot hold fails at opening.
#[test]
fn prefault_finds_a_full_host() {
    let Some(dir) = Dir::tmpfs("prefault", 4 * MIB) else { return };
    let path = dir.path.join("pool");
    fs::File::create(&path).unwrap().set_len(16 * MIB).unwrap();
    let options = PoolOptions { prefault: true, ..PoolOptions::default() };
    let e = Pool::create(&[path], None, &options).expect_err("no room");
    assert!(e.to_string().contains("full"), "{e}");
}

// ---- SIGBUS that is not ours, in child processes ----

const CHILD: &str = "LODESTONE_FAULT_CHILD";

/// Runs this test binary again, for one child part alone.
fn run_child(role: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CHILD, role)
        .status()
        .unwrap()
}

/// A mapping without media behind it.
fn bad_memory() -> *const u8 {
    let file = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let prot = rustix::mm::ProtFlags::READ;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, rustix::mm::MapFlags::SHARED, &file, 0) };
    map.unwrap().cast()
}

extern "C" fn exit_42(_signal: libc::c_int) {
    // SAFETY: _exit may be called from a signal handler.
    unsafe { libc::_exit(42) };
}

/// Not a test by itself: what the children of the tests below do.
#[test]
fn child() {
    let Ok(role) = std::env::var(CHILD) else { return };
    // Rust's own handler was there first; a program in C has none.
    let before = if role == "chained" { exit_42 as *const () as usize } else { libc::SIG_DFL };
    // SAFETY: the handler only calls _exit.
    unsafe { libc::signal(libc::SIGBUS, before) };
    let pool = Pool::memfd(MIB, &PoolOptions::default()).unwrap();
    let bad = bad_memory();
    match role.as_str() {
        // SAFETY: meant to raise SIGBUS.
        "elsewhere" | "chained" => _ = unsafe { bad.read_volatile() },
        "source" => {
            // Inside our routine, but the bad memory is the caller's.
            // SAFETY: meant to raise SIGBUS; the mapping is 4096 bytes long.
            let src = unsafe { std::slice::from_raw_parts(bad, 4096) };
            let _ = pool.copy_nt(Addr(4096), src);
        }
        // SAFETY: meant to end this process.
        "sent" => _ = unsafe { libc::raise(libc::SIGBUS) },
        _ => panic!("unknown role {role}"),
    }
    panic!("{role}: still alive");
}

#[test]
fn a_foreign_fault_still_kills() {
    for role in ["elsewhere", "source", "sent"] {
        let status = run_child(role);
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{role}: {status}");
    }
}

#[test]
fn an_earlier_handler_is_still_called() {
    let status = run_child("chained");
    assert_eq!(status.code(), Some(42), "{status}");
}
