//! What stands in for Intel DSAs, which these tests have none of: a machine laid out as files, and behind its device files
//! the emulated device, which follows the descriptors that the production code stored or wrote there.
//!
//! A FIFO takes what write(2) brings; a file of one page what MOVDIR64B stores. Nothing here says how a real device
//! behaves, only that it is told the right things and that every answer is borne.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use lodestone::mover::dsa::{Descriptor, OPCODE_BATCH, OPCODE_COPY_CRC};
use lodestone::mover::dsa_sysfs::{Found, Places, find};
use lodestone::mover::engine_dsa::Portal;
use lodestone::mover::engine_emu::Emulated;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const EACH: usize = size_of::<Descriptor>();
const PAGE_BYTES: usize = 4096;
const PLACES: usize = PAGE_BYTES / EACH;

/// All that a device of 2023 says: every operation and capability that is made use of.
pub const DEVICE: &[(&str, &str)] = &[
    ("state", "enabled"),
    ("numa_node", "0"),
    ("pasid_enabled", "1"),
    ("max_transfer_size", "2147483648"),
    ("max_batch_size", "1024"),
    ("gen_cap", "0x40915f0107"),
    ("op_cap", "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff"),
];

pub const SHARED: &[(&str, &str)] = &[
    ("state", "enabled"),
    ("type", "user"),
    ("mode", "shared"),
    ("size", "32"),
    ("threshold", "28"),
    ("max_transfer_size", "2097152"),
    ("max_batch_size", "32"),
    ("block_on_fault", "1"),
    ("ats_disable", "0"),
    ("cdev_minor", "0"),
];

pub const DEDICATED: &[(&str, &str)] = &[
    ("state", "enabled"),
    ("type", "user"),
    ("mode", "dedicated"),
    ("size", "16"),
    ("max_transfer_size", "2097152"),
    ("max_batch_size", "32"),
];

/// A machine laid out as files.
pub struct Tree(PathBuf);

impl Tree {
    pub fn new() -> Tree {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let n = MADE.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("lodestone-dsa-{}-{n}", std::process::id()));
        fs::create_dir_all(dir.join("dev")).unwrap();
        Tree(dir)
    }

    /// A device or queue with these attributes, and then those instead.
    pub fn lists(&self, name: &str, attributes: &[(&str, &str)], instead: &[(&str, &str)]) -> &Tree {
        let dir = self.0.join("sys").join(name);
        fs::create_dir_all(&dir).unwrap();
        for (attribute, text) in attributes.iter().chain(instead) {
            fs::write(dir.join(attribute), format!("{text}\n")).unwrap();
        }
        self
    }

    pub fn lacks(&self, name: &str, attribute: &str) -> &Tree {
        fs::remove_file(self.0.join("sys").join(name).join(attribute)).unwrap();
        self
    }

    pub fn file(&self, queue: &str) -> PathBuf {
        self.0.join("dev").join(queue)
    }

    pub fn places(&self) -> Places {
        Places { sys: self.0.join("sys"), dev: self.0.join("dev") }
    }

    pub fn find(&self) -> Found {
        find(&self.places())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// What came through a queue.
#[derive(Default)]
pub struct Seen {
    pub descriptors: AtomicU64,
    pub batches: AtomicU64,
    pub checksums: AtomicU64,
    /// Descriptors that lay in the page at a time.
    pub most: AtomicUsize,
}

impl Seen {
    fn note(&self, descriptor: &Descriptor) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        let counter = match descriptor.opcode() {
            OPCODE_BATCH => &self.batches,
            OPCODE_COPY_CRC => &self.checksums,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The other end of a device file.
pub struct Peer {
    pub seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    /// Of a FIFO: wakes who reads it.
    wake: Option<File>,
    thread: Option<JoinHandle<()>>,
}

pub fn descriptor_of(bytes: [u8; EACH]) -> Descriptor {
    // SAFETY: any 64 bytes are a descriptor.
    unsafe { std::mem::transmute(bytes) }
}

/// Has the device follow it, sooner or later. None: nobody does.
pub fn follow(device: Option<&Emulated>, turn: usize, descriptor: Descriptor) {
    let Some(device) = device else { return };
    let channel = turn % device.channels();
    // SAFETY: what the production code submitted, it vouches for.
    while unsafe { device.submit(channel, &[descriptor]) }.count == 0 {
        std::thread::yield_now();
    }
}

pub fn fifo(path: &Path) -> File {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

impl Peer {
    /// Reads a FIFO that is made at `path`; a peer without a device takes everything and does nothing.
    pub fn of_fifo(path: &Path, device: Option<Emulated>) -> Peer {
        Peer::reads(fifo(path), device)
    }

    pub fn reads(file: File, device: Option<Emulated>) -> Peer {
        let (seen, stop) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
        let wake = file.try_clone().unwrap();
        let thread = std::thread::spawn({
            let (seen, stop, mut file) = (seen.clone(), stop.clone(), file);
            move || {
                let mut bytes = [0; EACH];
                for turn in 0.. {
                    file.read_exact(&mut bytes).unwrap();
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let descriptor = descriptor_of(bytes);
                    seen.note(&descriptor);
                    follow(device.as_ref(), turn, descriptor);
                }
            }
        });
        Peer { seen, stop, wake: Some(wake), thread: Some(thread) }
    }

    /// Looks at a file of one page that is made at `path`.
    pub fn of_page(path: &Path, device: Emulated) -> Peer {
        fs::write(path, [0; PAGE_BYTES]).unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let (seen, stop) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
        let thread = std::thread::spawn({
            let (seen, stop) = (seen.clone(), stop.clone());
            move || look_at_page(&file, &device, &seen, &stop)
        });
        Peer { seen, stop, wake: None, thread: Some(thread) }
    }
}

fn look_at_page(file: &File, device: &Emulated, seen: &Seen, stop: &AtomicBool) {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping that nobody else has.
    let page =
        unsafe { mmap(std::ptr::null_mut(), PAGE_BYTES, prot, MapFlags::SHARED, file.as_fd(), 0) }.unwrap();
    let place = |n: usize| page.cast::<[u64; EACH / 8]>().wrapping_add(n % PLACES);
    // SAFETY: within the page; 64 bytes come at once, the second word's half with the operation is never 0.
    let word = |n: usize, at: usize| unsafe { place(n).cast::<u64>().add(at).read_volatile() };
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        // Whoever opens the file again begins at its beginning.
        let Some(next) = (turn..turn + PLACES).find(|n| word(*n, 0) != 0) else {
            std::thread::yield_now();
            continue;
        };
        turn = next;
        let lying = (0..PLACES).filter(|n| word(*n, 0) != 0).count();
        seen.most.fetch_max(lying, Ordering::Relaxed);
        let words: [u64; EACH / 8] = std::array::from_fn(|at| word(turn, at));
        // SAFETY: as above; the place is used again only when as many came as there are places.
        unsafe { place(turn).write_volatile([0; EACH / 8]) };
        // SAFETY: the same bytes.
        let descriptor = descriptor_of(unsafe { std::mem::transmute::<[u64; EACH / 8], [u8; EACH]>(words) });
        seen.note(&descriptor);
        follow(Some(device), turn, descriptor);
        turn += 1;
    }
    // SAFETY: mapped above.
    unsafe { munmap(page, PAGE_BYTES) }.unwrap();
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(wake) = &mut self.wake {
            wake.write_all(&[0; EACH]).unwrap();
        }
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the peer panicked");
    }
}
