//! Files whose blocks stand still: memory that somebody maps from the pool's own file or device, past the file system. A
//! guest of `lode wsp` stores there all the time.
//!
//! A fixed file has one run of blocks, on a boundary of 2 MiB if it has as many, and keeps it: what would give a block away or
//! store to it is refused as Linux refuses it of a swap file (ETXTBSY for data, EPERM for names). The mark is an extended
//! attribute, [`FIXED`], so that whoever has the file through any door can set it, ask where the file lies, and take it away:
//!
//! ```text
//! setxattr    bytes, in decimal          an empty file gets so many, zeros; durable on return
//! getxattr    OFFSET BYTES NUMBER PATH   where they are, in the file or device at PATH
//! removexattr                            it is a file like others again, with what is in it
//! ```
//!
//! **The stamp.** Whoever comes back to the place after a power failure asks no file system. So the last line of the run says
//! whose it is: it is durable before the mark is, and gone durably before the mark goes. Where it stands, nobody else has
//! the run ([`FixedPlace::check`]).
//!
//! **Uses.** A lock behind the end of the pool's file says that somebody has the run mapped (`Span::use_part`): as long as it is
//! held, the mark stays.

use std::path::{Path, PathBuf};

use super::alloc::{Class, Run};
use super::format::*;
use super::index::Mapping;
use super::inode::{Body, Data, Xattr};
use super::log::{Batch, block_addr};
use super::write::{Counted, WriteFields, write_records};
use super::xattr::value_record;
use super::*;
use crate::limits::FILE_BYTES_MAX;
use crate::media::{Addr, Flushed, LINE, Part, Span, SpanOptions, crc32c};
use crate::quote::Shown;

/// The attribute that marks a fixed file; not listed, so that nobody copies it with a file.
pub const FIXED: &[u8] = b"system.lode.fixed";
/// Zeros are stored in parts of so many bytes.
const ZEROED_BYTES: u64 = 64 << 20;

/// Where a fixed file lies in what the pool is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedPlace {
    /// In the file or device at `path`, in bytes.
    pub offset: u64,
    /// The last [`STAMP_BYTES`] are the file system's.
    pub bytes: u64,
    /// Of all fixed files of a pool no other has it.
    pub number: u64,
    pub path: PathBuf,
}

/// Bytes at the end of a fixed file that say whose it is.
pub const STAMP_BYTES: u64 = LINE as u64;

/// Where the fields of a stamp begin.
mod stamp {
    pub const MAGIC: usize = 0;
    pub const CRC: usize = 8;
    pub const POOL: usize = 16;
    pub const NUMBER: usize = 32;
}
const STAMP_MAGIC: [u8; 8] = *b"LodeFixd";

fn encode_stamp(pool: &[u8; 16], number: u64) -> [u8; LINE] {
    let mut line = [0; LINE];
    line[stamp::MAGIC..][..8].copy_from_slice(&STAMP_MAGIC);
    line[stamp::POOL..][..16].copy_from_slice(pool);
    put64(&mut line, stamp::NUMBER, number);
    let crc = crc32c(&line[stamp::POOL..], 0);
    put32(&mut line, stamp::CRC, crc);
    line
}

impl FixedPlace {
    fn encode(&self) -> Vec<u8> {
        let mut text = format!("{} {} {} ", self.offset, self.bytes, self.number).into_bytes();
        text.extend_from_slice(self.path.as_os_str().as_encoded_bytes());
        text
    }

    /// What getxattr of [`FIXED`] answered.
    pub fn decode(value: &[u8]) -> Option<FixedPlace> {
        use std::os::unix::ffi::OsStrExt;
        let mut parts = value.splitn(4, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (offset, bytes, number) = (number()?, number()?, number()?);
        let path = Path::new(std::ffi::OsStr::from_bytes(parts.next()?));
        Some(FixedPlace { offset, bytes, number, path: path.to_path_buf() })
    }

    /// Whether nobody else has got the place since it was told, which `part` is mapped from: the stamp is there, and of the
    /// pool that is at the path.
    ///
    /// ESTALE where the file was removed, or is no longer fixed, or another pool was made there.
    pub fn check<M: Media>(&self, part: &M) -> Result<()> {
        const SITE: &str = "fixed::check";
        let mut line = [0; LINE];
        part.read(Addr(self.bytes - STAMP_BYTES), &mut line)?;
        let pool = pool_at(&self.path)?;
        if pool.is_some_and(|pool| line == encode_stamp(&pool, self.number)) {
            return Ok(());
        }
        let message = format!(
            "{} bytes of {} at {} are no longer those of this file: it was removed, or the pool was made anew",
            self.bytes,
            self.path.shown(),
            self.offset
        );
        Err(Error::message(libc::ESTALE, SITE, message))
    }
}

/// The number of the file system at a path, whoever uses it.
fn pool_at(path: &Path) -> Result<Option<[u8; 16]>> {
    let beginning = Part { offset: 0, bytes: (SUPER_BLOCK + 1) * BLOCK as u64 };
    let opened = Span::open_part(path, beginning, &SpanOptions { read_only: true, ..SpanOptions::default() });
    let span = match opened {
        // Of device-dax the kernel has no private copies.
        Err(e) if e.errno() == libc::EOPNOTSUPP => Span::open_part(path, beginning, &SpanOptions::default())?,
        opened => opened?,
    };
    let mut bytes = [0; SUPER_BYTES];
    span.read(Addr(SUPER_BLOCK * BLOCK as u64), &mut bytes)?;
    Ok(Super::decode(&bytes).ok().map(|sb| sb.uuid))
}

impl<M: Media> Fs<M> {
    /// Gives an empty file `bytes`, whole blocks of zeros but for the stamp, in one run (on a boundary of 2 MiB if it has as many),
    /// and fixes it. Durable on return, all or nothing. Of a file that is fixed and has as many already nothing changes.
    ///
    /// EPERM unless `cred` is the superuser, or owns the file and runs the file system; EINVAL for what is no file and for bytes
    /// that are no whole blocks, ENOENT for a file without a name, EEXIST where something is in it, ENOSPC where no such
    /// run is free, EOPNOTSUPP in a pool of several regions.
    pub fn fix(&self, cred: &Cred, ino: Ino, bytes: u64) -> Result<()> {
        const SITE: &str = "fixed::fix";
        if bytes == 0 || !bytes.is_multiple_of(BLOCK as u64) {
            let message = format!("a fixed file has whole blocks of {BLOCK} bytes, not {bytes} bytes");
            return Err(Error::message(libc::EINVAL, SITE, message));
        }
        if bytes > FILE_BYTES_MAX {
            return Err(Error::new(libc::EFBIG, SITE));
        }
        let inode = self.inode(ino)?;
        // Who is refused waits for nobody: who has the lock may be storing zeros for seconds.
        self.core.check_alive()?;
        self.is_fixed_so(cred, &inode, &inode.body.read(), bytes)?;
        let _one_at_a_time = self.fixing.lock();
        // A close waits for the blocks.
        let _counted = Counted::new(&self.core.fixing);
        self.core.check_alive()?;
        let is_fixed = self.is_fixed_so(cred, &inode, &inode.body.read(), bytes)?;
        if is_fixed {
            let run = self.fixed_blocks(&inode.body.read())?;
            self.store_stamp(&inode, run)?;
            return self.sync();
        }
        let run = self.fixed_run(bytes)?;
        let stored = self.zero(run).and_then(|()| self.store_stamp(&inode, run));
        // The record names them as they are: it verifies nothing.
        let stored = stored.and_then(|()| self.sync());
        if let Err(e) = stored.and_then(|()| self.fix_at(cred, &inode, run)) {
            self.core.free(run, None);
            return Err(e);
        }
        self.sync()
    }

    /// Whether there is nothing to do; or why it cannot be done.
    fn is_fixed_so(&self, cred: &Cred, inode: &Inode, body: &Body, bytes: u64) -> Result<bool> {
        const SITE: &str = "fixed::fix";
        if body.dead {
            return Err(Error::new(libc::ESTALE, SITE));
        }
        let Data::File(index) = &body.data else {
            return Err(Error::message(libc::EINVAL, SITE, "only a file can be fixed"));
        };
        permit_fixing(cred, body)?;
        if self.links(inode) == 0 {
            return Err(Error::message(libc::ENOENT, SITE, "a file without a name cannot be fixed"));
        }
        match body.fixed {
            true if body.size == bytes => Ok(true),
            true => {
                let message = format!("the file is fixed already, with {} bytes", body.size);
                Err(Error::message(libc::EEXIST, SITE, message))
            }
            false if body.size > 0 || index.mapped() > 0 => {
                Err(Error::message(libc::EEXIST, SITE, "something is in the file: fix an empty one"))
            }
            false => Ok(false),
        }
    }

    /// Blocks that nobody else has.
    fn fixed_run(&self, bytes: u64) -> Result<Run> {
        const SITE: &str = "fixed::fix";
        let count = (bytes / BLOCK as u64) as u32;
        let mut room = self.room();
        let run = loop {
            // Where nothing can be changed any more `make_room` says yes for ever.
            self.core.check_alive()?;
            match self.core.alloc.alloc_whole(count) {
                Some(run) => break run,
                None if self.make_room(&mut room) => {}
                None => {
                    let message =
                        format!("no {bytes} bytes are free in one piece: make room, or take a larger pool");
                    return Err(Error::message(libc::ENOSPC, SITE, message));
                }
            }
        };
        if self.core.media.region(block_addr(run.start)).1 < bytes {
            self.core.free(run, None);
            let message = "a pool of several regions has no file in one piece: take a pool of one";
            return Err(Error::message(libc::EOPNOTSUPP, SITE, message));
        }
        Ok(run)
    }

    /// What was there is not the business of whoever maps it.
    fn zero(&self, run: Run) -> Result<()> {
        let (from, bytes) = (block_addr(run.start), bytes_of(run));
        for done in (0..bytes).step_by(ZEROED_BYTES as usize) {
            // A close waits for this.
            self.core.check_alive()?;
            let len = ZEROED_BYTES.min(bytes - done) as usize;
            let flushed = self.core.media.zero_nt(from.add(done), len)?;
            self.core.fence(flushed);
        }
        Ok(())
    }

    fn store_stamp(&self, inode: &Inode, run: Run) -> Result<()> {
        let line = encode_stamp(&self.core.sb.uuid, inode.generation);
        let flushed = self.core.media.copy_nt(stamp_of(run), &line)?;
        self.core.fence(flushed);
        Ok(())
    }

    fn fix_at(&self, cred: &Cred, inode: &Inode, run: Run) -> Result<()> {
        let mut room = self.room();
        loop {
            let done = {
                let mut body = self.change_at_rest(inode);
                let guard = self.core.enter()?;
                // Others may have written to it, or removed it, meanwhile.
                if self.is_fixed_so(cred, inode, &body, bytes_of(run))? {
                    unreachable!("one is fixed at a time");
                }
                let done = self.commit_fixed(inode, &mut body, &guard, run);
                self.tidy_log(inode, &mut body, &guard);
                done
            };
            match done {
                Err(e) if e.errno() == libc::ENOSPC && self.make_room(&mut room) => continue,
                done => return done,
            }
        }
    }

    fn commit_fixed(&self, inode: &Inode, body: &mut Body, guard: &epoch::Guard, run: Run) -> Result<()> {
        let now = now();
        let size = bytes_of(run);
        let value = size.to_string();
        let mut batch = Batch::new();
        let fields = WriteFields { start: 0, len: 0, size, mtime: now, crc: None, flags: 0 };
        write_records(&mut batch, &[Extent { page: 0, count: run.count, block: run.start }], &fields);
        let at = batch.count();
        value_record(&mut batch, FIXED, value.as_bytes(), None, now);
        self.commit(inode, body, &mut batch, guard, Class::Data, Flushed::issued())?;
        body.file_mut().set_run(0, run.count, run.start, false, &mut |_, _| {
            unreachable!("the file was empty");
        });
        let mut mark = Xattr::new(FIXED, value.as_bytes(), None);
        mark.place(batch.placed(at).0, batch.addr(at));
        body.xattrs.push(mark);
        (body.fixed, body.size) = (true, size);
        (body.mtime, body.ctime) = (now, now);
        Ok(())
    }

    /// Makes a fixed file one like others, whose data stay. Durable on return.
    ///
    /// EPERM as [`fix`](Fs::fix), ENODATA where it is not fixed, EBUSY while somebody uses it.
    pub fn unfix(&self, cred: &Cred, ino: Ino) -> Result<()> {
        const SITE: &str = "fixed::unfix";
        let inode = self.inode(ino)?;
        let check = || {
            self.core.check_alive()?;
            let body = inode.body.read();
            permit_fixing(cred, &body)?;
            match body.fixed {
                true => Ok(self.fixed_blocks(&body).ok()),
                false => Err(Error::new(libc::ENODATA, SITE)),
            }
        };
        // As in `fix`.
        check()?;
        let _one_at_a_time = self.fixing.lock();
        let run = check()?;
        if let Some(run) = run {
            let in_use = || self.core.media.is_used(block_addr(run.start), bytes_of(run));
            let used = || {
                let message = "a guest, or a copy of one, runs in it: stop that first";
                Error::message(libc::EBUSY, SITE, message)
            };
            if in_use() {
                return Err(used());
            }
            let flushed = self.core.media.zero_nt(stamp_of(run), STAMP_BYTES as usize)?;
            self.core.fence(flushed);
            // Who says that he uses it looks at the stamp afterwards: one of the two sees the other.
            if in_use() {
                self.store_stamp(&inode, run)?;
                return Err(used());
            }
            self.sync()?;
        }
        let removed = self.with_room(|| {
            let mut body = self.table.change(&inode);
            let guard = self.core.enter()?;
            self.remove_mark(&inode, &mut body, &guard)?;
            self.tidy_log(&inode, &mut body, &guard);
            Ok(())
        });
        if let (Err(e), Some(run)) = (&removed, run)
            && e.errno() == libc::ENOSPC
        {
            // It is fixed as before.
            self.store_stamp(&inode, run)?;
        }
        removed?;
        self.sync()
    }

    /// The run of a fixed file. EIO where it has none: something is damaged.
    fn fixed_blocks(&self, body: &Body) -> Result<Run> {
        let count = (body.size / BLOCK as u64) as u32;
        match body.file().map(|index| index.run_at(0, count)) {
            Some((Mapping::Written(start), pieces)) if pieces == count => Ok(Run::new(start, count)),
            _ => {
                let message = "a fixed file is not in one piece: check the pool with lode fsck";
                Err(Error::message(libc::EIO, "fixed::fixed_blocks", message))
            }
        }
    }

    /// Whether others may store to the file past the file system.
    pub fn is_fixed(&self, ino: Ino) -> bool {
        self.inode(ino).is_ok_and(|inode| inode.body.read().fixed)
    }

    /// Where a fixed file lies. ENODATA for one that is not fixed, EOPNOTSUPP where the pool is in no file or device, EIO
    /// where it is damaged.
    pub fn fixed_place(&self, ino: Ino) -> Result<FixedPlace> {
        const SITE: &str = "fixed::fixed_place";
        let inode = self.inode(ino)?;
        let body = inode.body.read();
        if !body.fixed {
            return Err(Error::new(libc::ENODATA, SITE));
        }
        let run = self.fixed_blocks(&body)?;
        match self.core.media.in_file(block_addr(run.start), bytes_of(run)) {
            Some((path, offset)) => {
                Ok(FixedPlace { offset, bytes: bytes_of(run), number: inode.generation, path })
            }
            None => Err(Error::message(libc::EOPNOTSUPP, SITE, "the pool lies in no file or device")),
        }
    }

    /// Doors ask by the attribute.
    pub(super) fn fixed_text(&self, ino: Ino) -> Result<Vec<u8>> {
        self.fixed_place(ino).map(|place| place.encode())
    }

    /// As doors set it.
    pub(super) fn fix_by_text(&self, cred: &Cred, ino: Ino, value: &[u8], flags: i32) -> Result<()> {
        if flags & libc::XATTR_REPLACE != 0 {
            return Err(Error::new(libc::EINVAL, "fixed::fix"));
        }
        let bytes = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        self.fix(cred, ino, bytes.ok_or_else(|| Error::new(libc::EINVAL, "fixed::fix"))?)
    }
}

/// Removes a stamp, if there is one at `at`. Where that cannot be stored it cannot be read either.
pub(super) fn remove_stamp<M: Media>(media: &M, at: Addr) {
    let mut line = [0; LINE];
    if media.read(at, &mut line).is_ok()
        && line[stamp::MAGIC..][..8] == STAMP_MAGIC
        && let Ok(flushed) = media.zero_nt(at, STAMP_BYTES as usize)
    {
        media.fence(flushed);
    }
}

fn bytes_of(run: Run) -> u64 {
    run.count as u64 * BLOCK as u64
}

fn stamp_of(run: Run) -> Addr {
    block_addr(run.start).add(bytes_of(run) - STAMP_BYTES)
}

/// Who may fix a file, and end that: the superuser, and the owner of a file who also runs the file system. A mount has checked
/// nothing: the kernel leaves attributes of this kind to who keeps them.
fn permit_fixing(cred: &Cred, body: &Body) -> Result<()> {
    let runs_it = cred.uid == rustix::process::geteuid().as_raw();
    match cred.is_root() || runs_it && cred.uid == body.uid {
        true => Ok(()),
        false => Err(Error::new(libc::EPERM, "fixed::permit_fixing")),
    }
}

/// ETXTBSY for what would change the data of a fixed file.
#[cold]
pub(super) fn in_use() -> Error {
    let message = "the file is mapped past the file system (the memory of a guest): its data cannot be changed by others";
    Error::message(libc::ETXTBSY, "fixed::in_use", message)
}

/// EPERM for what would take a name from a fixed file.
#[cold]
pub(super) fn keeps_its_name() -> Error {
    let message = "the file is the memory of a guest: lode wsp rm removes it; of a guest that is forgotten, mount the pool, \
                   and setfattr -x system.lode.fixed and rm do";
    Error::message(libc::EPERM, "fixed::keeps_its_name", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::files::Files;
    use crate::media::{Domain, Pool, PoolOptions};

    const BYTES: u64 = 5 << 20;

    fn open(media: Pool) -> Files<Pool> {
        let fs = Fs::open(media, &OpenOptions::default()).unwrap();
        Files::new(fs, Cred::root(), 0)
    }

    #[test]
    fn where_nothing_can_be_changed_nobody_waits_for_room() {
        for domain in [Domain::Memory, Domain::PageCache] {
            let files = files(16 << 20, domain);
            files.fs().core.poison(&Error::new(libc::EIO, "test"));
            let found = files.fs().fixed_run(1 << 30);
            assert_eq!(found.map(|run| run.count).map_err(|e| e.errno()), Err(libc::EIO));
        }
    }

    /// A pool in a file, of which nothing is left but what the test holds.
    fn files(bytes: u64, domain: Domain) -> Files<Pool> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("lodestone-fixed-{}-{n}", std::process::id()));
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let pool = Pool::create(std::slice::from_ref(&path), Some(bytes), &options).unwrap();
        std::fs::remove_file(path).unwrap();
        open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap())
    }

    fn again(files: Files<Pool>, clean: bool) -> Files<Pool> {
        let fs = Arc::clone(files.fs());
        drop(files);
        if clean {
            fs.close().unwrap();
        }
        open(fs.abandon().expect("nobody else uses it"))
    }

    fn make(files: &Files<Pool>, path: &str, bytes: u64) {
        let fd = files.open(path.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.fsetxattr(fd, FIXED, bytes.to_string().as_bytes(), 0).unwrap();
        files.close(fd).unwrap();
    }

    fn place(files: &Files<Pool>, path: &str) -> FixedPlace {
        FixedPlace::decode(&files.getxattr(path.as_bytes(), true, FIXED).unwrap()).unwrap()
    }

    fn errno<T>(done: Result<T>) -> i32 {
        done.err().map_or(0, |e| e.errno())
    }

    #[test]
    fn a_fixed_file_stands_in_one_piece_across_closes_and_crashes() {
        for domain in [Domain::Memory, Domain::PageCache] {
            let mut files = files(64 << 20, domain);
            // What lies there is no zeros, and free again.
            let fd = files.open(b"/old", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
            files.pwrite(fd, &vec![7; 32 << 20], 0).unwrap();
            files.close(fd).unwrap();
            files.unlink(b"/old").unwrap();
            files.fs().sync().unwrap();
            make(&files, "/ram", BYTES);
            let first = place(&files, "/ram");
            assert!(first.offset.is_multiple_of(2 << 20) && first.bytes == BYTES, "{first:?}");
            let media = std::sync::Arc::clone(files.fs());
            let at = crate::media::Addr(first.offset);
            let mut bytes = vec![1; BYTES as usize];
            media.media().read(at, &mut bytes).unwrap();
            let (zeros, stamp) = bytes.split_at((BYTES - STAMP_BYTES) as usize);
            assert!(zeros.iter().all(|byte| *byte == 0), "what others had is not shown");
            assert_eq!(stamp[..8], STAMP_MAGIC);
            // Somebody stores past the file system.
            let flushed = media.media().copy_nt(at.add(BYTES - 128), &[9; 64]).unwrap();
            media.media().fence(flushed);
            drop(media);
            for clean in [true, false, true] {
                files = again(files, clean);
                make(&files, "/ram", BYTES);
                assert_eq!(place(&files, "/ram"), first);
                for n in 0..300 {
                    files.chmod(b"/ram", 0o600 + n % 8).unwrap();
                    let other = format!("/other{n}");
                    let fd = files.open(other.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
                    files.pwrite(fd, &[3; 70_000], 0).unwrap();
                    files.close(fd).unwrap();
                }
                let fd = files.open(b"/ram", libc::O_RDONLY, 0).unwrap();
                let mut last = [0; 128];
                assert_eq!(files.pread(fd, &mut last, BYTES as i64 - 192).unwrap(), 128);
                assert!(last[..64] == [0; 64] && last[64..] == [9; 64], "nobody stored there");
                files.close(fd).unwrap();
            }
        }
    }

    #[test]
    fn neither_data_nor_names_of_a_fixed_file_change() {
        let files = files(16 << 20, Domain::Memory);
        make(&files, "/ram", BYTES);
        let other = files.open(b"/other", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        let fd = files.open(b"/ram", libc::O_RDWR, 0).unwrap();
        assert_eq!(errno(files.pwrite(fd, b"x", 0)), libc::ETXTBSY);
        assert_eq!(errno(files.pwrite(fd, b"x", BYTES as i64)), libc::ETXTBSY);
        assert_eq!(errno(files.ftruncate(fd, 0)), libc::ETXTBSY);
        assert_eq!(errno(files.ftruncate(fd, 2 * BYTES as i64)), libc::ETXTBSY);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        for mode in [0, punch, libc::FALLOC_FL_ZERO_RANGE] {
            assert_eq!(errno(files.fallocate(fd, mode, 0, 4096)), libc::ETXTBSY);
        }
        assert_eq!(errno(files.open(b"/ram", libc::O_RDWR | libc::O_TRUNC, 0)), libc::ETXTBSY);
        assert_eq!(errno(files.unlink(b"/ram")), libc::EPERM);
        assert_eq!(errno(files.rename(b"/ram", b"/moved", 0)), libc::EPERM);
        assert_eq!(errno(files.rename(b"/other", b"/ram", 0)), libc::EPERM);
        assert_eq!(errno(files.rename(b"/other", b"/ram", RENAME_EXCHANGE)), libc::EPERM);
        // What does not touch them works.
        files.link(b"/ram", b"/second").unwrap();
        files.chmod(b"/ram", 0o640).unwrap();
        files.setxattr(b"/ram", true, b"user.a", b"b", 0).unwrap();
        assert_eq!(files.listxattr(b"/ram", true).unwrap(), b"user.a\0", "the mark is not listed");
        let mut page = [1; 4096];
        assert_eq!(files.pread(fd, &mut page, 0).unwrap(), 4096);
        assert_eq!(page, [0; 4096]);
        let before = place(&files, "/second");
        files.removexattr(b"/ram", true, FIXED).unwrap();
        assert_eq!(errno(files.getxattr(b"/ram", true, FIXED)), libc::ENODATA);
        assert_eq!(errno(files.removexattr(b"/ram", true, FIXED)), libc::ENODATA);
        assert_eq!(files.pwrite(fd, b"x", 0).unwrap(), 1);
        assert_eq!(errno(files.fsetxattr(fd, FIXED, b"5242880", 0)), libc::EEXIST, "something is in it");
        files.unlink(b"/second").unwrap();
        files.unlink(b"/ram").unwrap();
        files.close(fd).unwrap();
        files.fsetxattr(other, FIXED, before.bytes.to_string().as_bytes(), 0).unwrap();
        files.close(other).unwrap();
    }

    #[test]
    fn what_cannot_be_fixed_is_refused_and_nothing_is_lost() {
        let files = files(16 << 20, Domain::PageCache);
        let fd = files.open(b"/ram", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.fs().sync().unwrap();
        let free = files.fs().statfs().blocks_free;
        let set = |value: &str| errno(files.fsetxattr(fd, FIXED, value.as_bytes(), 0));
        for wrong in ["", "x", "0", "5000", "-4096"] {
            assert_eq!(set(wrong), libc::EINVAL, "{wrong}");
        }
        assert_eq!(set("18446744073709547520"), libc::EFBIG);
        assert_eq!(set("16777216"), libc::ENOSPC);
        assert_eq!(files.fs().statfs().blocks_free, free);
        assert_eq!(errno(files.setxattr(b"/", true, FIXED, b"4096", 0)), libc::EINVAL);
        assert_eq!(errno(files.getxattr(b"/", true, FIXED)), libc::ENODATA);
        let other = Cred { uid: 1000, gid: 1000, ..Cred::root() };
        let ino = files.fstat(fd).unwrap().ino;
        files.fchmod(fd, 0o666).unwrap();
        assert_eq!(errno(files.fs().fix(&other, ino, 4096)), libc::EPERM, "only its owner may");
        assert_eq!(set("4194304"), 0);
        assert_eq!(set("4194304"), 0, "again, as long");
        assert_eq!(set("4096"), libc::EEXIST);
        assert_eq!(errno(files.fs().removexattr(&other, ino, FIXED)), libc::EPERM);
        files.close(fd).unwrap();
        files.removexattr(b"/ram", true, FIXED).unwrap();
        files.unlink(b"/ram").unwrap();
        let free = |_| {
            make(&files, "/ram", 4 << 20);
            files.removexattr(b"/ram", true, FIXED).unwrap();
            files.unlink(b"/ram").unwrap();
            files.fs().sync().unwrap();
            files.fs().sync().unwrap();
            files.fs().statfs().blocks_free
        };
        let all = [0; 10].map(free);
        let [first, .., last] = all;
        assert!(
            first.abs_diff(last) < 8,
            "but for the log of the directory, what it had comes back: {all:?}"
        );
        let nameless = files.open(b"/", libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
        assert_eq!(errno(files.fsetxattr(nameless, FIXED, b"4096", 0)), libc::ENOENT);
    }

    /// What a guest looks at before it goes on in memory that it left.
    #[test]
    fn a_stamp_is_gone_with_its_file() {
        let path = std::env::temp_dir().join(format!("lodestone-stamp-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let options = PoolOptions { assume: Some(Domain::Memory), ..PoolOptions::default() };
        let make_pool = || {
            let pool = Pool::create(std::slice::from_ref(&path), Some(16 << 20), &options).unwrap();
            open(Fs::mkfs(pool, &MkfsOptions::default()).unwrap())
        };
        let files = make_pool();
        make(&files, "/ram", BYTES);
        make(&files, "/other", 4096);
        let (ram, other) = (place(&files, "/ram"), place(&files, "/other"));
        let check = |place: &FixedPlace| {
            let part = Part { offset: place.offset, bytes: place.bytes };
            place.check(&Span::open_part(&place.path, part, &SpanOptions::default()).unwrap())
        };
        check(&ram).unwrap();
        check(&other).unwrap();
        assert_eq!(errno(check(&FixedPlace { number: other.number, ..ram.clone() })), libc::ESTALE);

        // As long as somebody uses it, it stays.
        let used = Span::use_part(&path, Part { offset: ram.offset, bytes: ram.bytes }).unwrap();
        assert_eq!(errno(files.removexattr(b"/ram", true, FIXED)), libc::EBUSY);
        check(&ram).expect("it may be opened beside its user");
        files.removexattr(b"/other", true, FIXED).unwrap();
        assert_eq!(errno(check(&other)), libc::ESTALE);
        let files = again(files, true);
        let media = files.fs().media();
        assert!(media.is_used(Addr(0), media.len()), "a pool is not made anew, nor repaired");
        drop(used);
        assert!(!media.is_used(Addr(0), media.len()));
        files.removexattr(b"/ram", true, FIXED).unwrap();
        assert_eq!(errno(check(&ram)), libc::ESTALE);
        drop(again(files, true));

        // The same number in the same place of another pool.
        std::fs::remove_file(&path).unwrap();
        let files = make_pool();
        make(&files, "/ram", BYTES);
        let ram = place(&files, "/ram");
        check(&ram).unwrap();
        drop(again(files, true));
        let pool = Pool::open(&path, &options).unwrap();
        drop(Fs::mkfs(pool, &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap());
        assert_eq!(errno(check(&ram)), libc::ESTALE);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_close_waits_for_a_file_that_is_being_fixed() {
        for _ in 0..20 {
            let files = Arc::new(files(512 << 20, Domain::Memory));
            let fd = files.open(b"/ram", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
            let fixing = std::thread::spawn({
                let files = Arc::clone(&files);
                move || files.fsetxattr(fd, FIXED, b"402653184", 0)
            });
            std::thread::yield_now();
            files.fs().close().unwrap();
            let done = fixing.join().unwrap();
            assert!(matches!(errno(done), 0 | libc::EIO));
            let Ok(files) = Arc::try_unwrap(files) else { unreachable!("the thread has ended") };
            let files = again(files, false);
            let about = files.stat(b"/ram").unwrap();
            let free = files.fs().statfs().blocks_free * BLOCK as u64;
            assert!(
                about.size + free > 500 << 20,
                "{} and {free} bytes: the others are nobody's",
                about.size
            );
        }
    }

    #[test]
    fn who_is_refused_waits_for_nobody_who_fixes() {
        let files = files(64 << 20, Domain::Memory);
        make(&files, "/ram", BYTES);
        let fd = files.open(b"/empty", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        files.close(fd).unwrap();
        let ino = |path: &[u8]| files.stat(path).unwrap().ino;
        let (ram, empty) = (ino(b"/ram"), ino(b"/empty"));
        let other = Cred { uid: 1000, gid: 1000, ..Cred::root() };
        let root = Cred::root();
        // Somebody fixes a file, for long.
        let fixing = files.fs().fixing.lock();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let fs = files.fs();
                let refused = [
                    fs.fix(&other, empty, 4096),
                    fs.fix(&other, ram, BYTES),
                    fs.fix(&root, ram, 4096),
                    fs.unfix(&other, ram),
                    fs.unfix(&root, empty),
                ];
                tell.send(refused.map(errno)).unwrap();
            });
            let refused = told.recv_timeout(std::time::Duration::from_secs(60));
            drop(fixing);
            let expected = [libc::EPERM, libc::EPERM, libc::EEXIST, libc::EPERM, libc::ENODATA];
            assert_eq!(refused, Ok(expected));
        });
    }

    #[test]
    fn two_who_fix_one_file_get_one_run() {
        let files = files(64 << 20, Domain::PageCache);
        for n in 0..20 {
            let path = format!("/ram{n}");
            let fd = files.open(path.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
            std::thread::scope(|scope| {
                let threads = [0; 3].map(|_| scope.spawn(|| files.fsetxattr(fd, FIXED, b"2097152", 0)));
                threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
            });
            files.close(fd).unwrap();
            assert_eq!(files.stat(path.as_bytes()).unwrap().blocks, (2 << 20) / 512);
        }
        let used = files.fs().statfs();
        assert!((used.blocks - used.blocks_free) * (BLOCK as u64) < 45 << 20, "{used:?}");
    }
}
