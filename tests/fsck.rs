//! `fsck` held against damage that is made on purpose: each kind is found, mended, and what is mended can be used;
//! what was not damaged is as it was.

use std::sync::Arc;

use lodestone::fs::check::{self, Report, What};
use lodestone::fs::format::*;
use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, OpenOptions, SetAttr};
use lodestone::media::{Addr, Domain, LINE, crc32c};
use lodestone::sim::media::SimMedia;

type F = Arc<Fs<SimMedia>>;

const POOL_BYTES: usize = 2 << 20;

fn options() -> OpenOptions {
    OpenOptions { no_ticker: true, ..OpenOptions::default() }
}

fn open(image: Vec<u8>, domain: Domain) -> F {
    Fs::open(SimMedia::new(image, domain), &options()).expect("the pool opens")
}

fn create(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.create(&Cred::root(), dir, name, 0o644, 0, libc::O_EXCL).unwrap().0.ino;
    fs.forget(ino, 2);
    ino
}

fn mkdir(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.mkdir(&Cred::root(), dir, name, 0o755, 0).unwrap().ino;
    fs.forget(ino, 1);
    ino
}

fn write(fs: &F, ino: Ino, offset: u64, bytes: &[u8]) {
    fs.write(&Cred::root(), ino, offset, bytes, false).unwrap();
}

fn chmod(fs: &F, ino: Ino, mode: u32) {
    fs.setattr(&Cred::root(), ino, &SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
}

fn find(fs: &F, dir: Ino, name: &[u8]) -> Option<Ino> {
    let ino = fs.lookup(&Cred::root(), dir, name).ok()?.ino;
    fs.forget(ino, 1);
    Some(ino)
}

fn content(fs: &F, ino: Ino) -> Vec<u8> {
    let mut bytes = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(ino, 0, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// A pool with a little of everything, closed or as a crash leaves it, and what is in it.
struct Sample {
    domain: Domain,
    image: Vec<u8>,
    sb: Super,
    key_crc: u32,
}

/// Inodes of the sample, in the order in which they were made.
const DIR: Ino = Ino(2);
const INNER: Ino = Ino(3);
const FILE: Ino = Ino(4);
const OTHER: Ino = Ino(5);
const DEEP: Ino = Ino(6);
const LINK: Ino = Ino(7);
const EMPTY: Ino = Ino(8);

fn other_bytes() -> Vec<u8> {
    (0..20_000u32).map(|n| (n * 7 >> 3) as u8 | 1).collect()
}

impl Sample {
    fn new(domain: Domain, closed: bool) -> Sample {
        let fresh = Fs::mkfs(SimMedia::new(vec![0; POOL_BYTES], domain), &MkfsOptions::default()).unwrap();
        let fs = open(fresh.image(), domain);
        let cred = Cred::root();
        assert_eq!(mkdir(&fs, Ino::ROOT, b"dir"), DIR);
        assert_eq!(mkdir(&fs, DIR, b"inner"), INNER);
        assert_eq!(create(&fs, DIR, b"file"), FILE);
        assert_eq!(create(&fs, Ino::ROOT, b"other"), OTHER);
        assert_eq!(create(&fs, INNER, b"deep"), DEEP);
        let link = fs.symlink(&cred, Ino::ROOT, b"link", b"dir/file").unwrap().ino;
        fs.forget(link, 1);
        assert_eq!(link, LINK);
        assert_eq!(create(&fs, Ino::ROOT, b"empty"), EMPTY);
        chmod(&fs, FILE, 0o601);
        write(&fs, FILE, 0, &[0xa1; BLOCK]);
        (0..3).for_each(|n| chmod(&fs, FILE, 0o610 | n));
        write(&fs, FILE, BLOCK as u64, &[0xb2; BLOCK]);
        write(&fs, OTHER, 0, &other_bytes());
        write(&fs, DEEP, 0, b"deep down");
        fs.link(&cred, OTHER, INNER, b"again").unwrap();
        fs.forget(OTHER, 1);
        fs.setxattr(&cred, FILE, b"user.small", &[0x51; 900], 0).unwrap();
        fs.setxattr(&cred, FILE, b"user.large", &[0x52; 9000], 0).unwrap();
        (0..3).for_each(|_| fs.sync().unwrap());
        fs.tick().unwrap();
        if closed {
            fs.close().unwrap();
        }
        let image = fs.media().image();
        let at = SUPER_BLOCK as usize * BLOCK;
        let sb = Super::decode(image[at..at + SUPER_BYTES].try_into().unwrap()).unwrap();
        let key_crc = crc32c(&sb.key, 0);
        Sample { domain, image, sb, key_crc }
    }

    fn slot(&self, ino: Ino) -> usize {
        TABLE_BLOCK as usize * BLOCK + ino.0 as usize * SLOT
    }

    fn report(&self) -> Report {
        check::examine(Arc::new(SimMedia::new(self.image.clone(), self.domain)), false).unwrap()
    }
}

#[test]
fn a_whole_pool_is_clean() {
    for domain in [Domain::Memory, Domain::PageCache] {
        for closed in [true, false] {
            let sample = Sample::new(domain, closed);
            let report = sample.report();
            assert!(report.is_clean(), "{domain:?} {closed}: {:#?}", report.findings);
            assert_eq!((report.directories, report.files, report.clean), (3, 5, closed));
            assert!(report.bytes_verified > 8000, "{}", report.bytes_verified);
        }
    }
}
