//! Small valid images of every kind: crashed and closed, on persistent memory and on an ordinary file, fresh and
//! aged. Made once per process by the file system itself, so that they are never of an older format.

use std::sync::{Arc, LazyLock};

use arbitrary::Arbitrary;
use lodestone::fs::{Cred, Fs, Ino, MkfsOptions, OpenOptions, RENAME_EXCHANGE, SetAttr};
use lodestone::media::Domain;
use lodestone::sim::media::SimMedia;

const POOL_BYTES: usize = 1 << 20;

/// An image, how its last user left it, and what recovery is told of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Arbitrary)]
pub enum Base {
    /// Empty but for one inode of each type: room for records.
    Fresh,
    Crashed,
    /// Crashed twice: logs have seals.
    CrashedAgain,
    Closed,
    FreshFile,
    CrashedFile,
    ClosedFile,
}

impl Base {
    const ALL: [Base; 7] = [
        Base::Fresh,
        Base::Crashed,
        Base::CrashedAgain,
        Base::Closed,
        Base::FreshFile,
        Base::CrashedFile,
        Base::ClosedFile,
    ];

    pub fn domain(self) -> Domain {
        match self {
            Base::FreshFile | Base::CrashedFile | Base::ClosedFile => Domain::PageCache,
            _ => Domain::Memory,
        }
    }

    /// Whether the next mount loads a checkpoint, and so believes it.
    pub fn is_closed(self) -> bool {
        matches!(self, Base::Closed | Base::ClosedFile)
    }

    pub fn image(self) -> &'static [u8] {
        static IMAGES: LazyLock<Vec<Vec<u8>>> =
            LazyLock::new(|| Base::ALL.into_iter().map(Base::make).collect());
        &IMAGES[self as usize]
    }

    fn make(self) -> Vec<u8> {
        let media = SimMedia::new(vec![0; POOL_BYTES], self.domain());
        let media = Fs::mkfs(media, &MkfsOptions::default()).expect("an empty pool is made");
        let fs = mount(media);
        match self {
            Base::Fresh | Base::FreshFile => one_of_each(&fs),
            _ => populate(&fs),
        }
        if self.is_closed() {
            fs.close().expect("a good pool is closed");
        }
        let mut fs = fs;
        if self == Base::CrashedAgain {
            fs = mount(fs.media().copy());
            age(&fs);
        }
        fs.media().image()
    }
}

type F = Arc<Fs<SimMedia>>;

fn mount(media: SimMedia) -> F {
    let options = OpenOptions { no_ticker: true, power_lost: true, ..OpenOptions::default() };
    Fs::open(media, &options).expect("a good pool is opened")
}

fn root() -> Cred {
    Cred::root()
}

fn create(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.create(&root(), dir, name, 0o644, 0, libc::O_EXCL).expect("a file is made").0.ino;
    fs.forget(ino, 2);
    ino
}

fn mkdir(fs: &F, dir: Ino, name: &[u8]) -> Ino {
    let ino = fs.mkdir(&root(), dir, name, 0o755, 0).expect("a directory is made").ino;
    fs.forget(ino, 1);
    ino
}

fn write(fs: &F, ino: Ino, offset: u64, bytes: &[u8]) {
    fs.write(&root(), ino, offset, bytes, false).expect("there is room");
}

fn resize(fs: &F, ino: Ino, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.setattr(&root(), ino, &set).expect("a file is cut");
}

fn chmod(fs: &F, ino: Ino, mode: u32) {
    let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
    fs.setattr(&root(), ino, &set).expect("a mode is changed");
}

/// Inodes 2, 3 and 4.
fn one_of_each(fs: &F) {
    let file = create(fs, Ino::ROOT, b"file");
    write(fs, file, 0, &[7; 5000]);
    mkdir(fs, Ino::ROOT, b"dir");
    let link = fs.symlink(&root(), Ino::ROOT, b"link", b"dir/f").expect("a link is made");
    fs.forget(link.ino, 1);
    fs.sync().expect("sound media");
}

/// Every type of record, of log segment and of inode.
fn populate(fs: &F) {
    one_of_each(fs);
    let dir = mkdir(fs, Ino::ROOT, b"a");
    let other = mkdir(fs, dir, b"b");
    let long = create(fs, dir, b"long");
    write(fs, long, 0, &[1; 30_000]);
    write(fs, long, 100, b"in place, later");
    write(fs, long, 8192, &[2; 4096]);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    fs.fallocate(&root(), long, punch, 12_288, 4096).expect("a hole is punched");
    fs.fallocate(&root(), long, libc::FALLOC_FL_KEEP_SIZE, 40_000, 20_000).expect("there is room");
    resize(fs, long, 29_000);
    let sparse = create(fs, dir, b"sparse");
    (0..8).for_each(|i| write(fs, sparse, i * 100_000, &[3; 300]));
    for i in 0..20u8 {
        create(fs, other, &[b'n', b'a' + i]);
    }
    for i in 0..5u8 {
        fs.unlink(&root(), other, &[b'n', b'a' + i]).expect("it is there");
    }
    let rename = |from, name: &[u8], to, new: &[u8], flags| {
        fs.rename(&root(), from, name, to, new, flags).expect("a name is changed");
    };
    rename(other, b"nf", other, b"renamed", 0);
    rename(other, b"ng", other, b"nh", 0);
    rename(other, b"ni", dir, b"moved", 0);
    rename(other, b"nj", dir, b"sparse", RENAME_EXCHANGE);
    let linked = fs.link(&root(), long, other, b"hard").expect("a link is made");
    fs.forget(linked.ino, 1);
    let target = fs.symlink(&root(), dir, b"far", &[b'x'; 3000]).expect("a link is made");
    fs.forget(target.ino, 1);
    fs.setxattr(&root(), long, b"user.small", b"value", 0).expect("there is room");
    fs.setxattr(&root(), dir, b"user.large", &[9; 5000], 0).expect("there is room");
    let fifo = fs.mknod(&root(), dir, b"fifo", libc::S_IFIFO | 0o600, 0, 0).expect("a fifo is made");
    fs.forget(fifo.ino, 1);
    // Enough for a segment, and for the cleaner.
    let busy = create(fs, Ino::ROOT, b"busy");
    for i in 0..400 {
        chmod(fs, busy, 0o600 + i % 64);
        write(fs, busy, (i as u64 % 8) * 4096, &[i as u8; 4096]);
    }
    // Without a name, and open until the end.
    fs.create(&root(), dir, b"orphan", 0o644, 0, libc::O_EXCL).expect("a file is made");
    fs.unlink(&root(), dir, b"orphan").expect("it is there");
    (0..3).for_each(|_| fs.sync().expect("sound media"));
    age(fs);
}

/// A few operations that no sync covers.
fn age(fs: &F) {
    let dir = fs.lookup(&root(), Ino::ROOT, b"a").expect("it is there").ino;
    let file = fs.lookup(&root(), Ino::ROOT, b"file").expect("it is there").ino;
    write(fs, file, 4096, &[5; 9000]);
    chmod(fs, file, 0o640);
    let name = format!("late{}", fs.info().mounts);
    write(fs, create(fs, dir, name.as_bytes()), 0, b"late");
    fs.rename(&root(), dir, name.as_bytes(), Ino::ROOT, name.as_bytes(), 0).expect("a name is changed");
}
