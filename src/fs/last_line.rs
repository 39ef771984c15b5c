//! The last line of a file that grows by less than lines.
//!
//! A store to a part of a line fetches the line first, and the fence waits for that: on slow memory it costs more than
//! everything else that a small append does. So what stands in a file's last line is kept in DRAM, and the next append
//! stores that line once more as a whole, non-temporally: what was acknowledged is stored again as it is, and what stands
//! behind the end of file is nobody's.

use super::format::put_bytes;
use super::inode::Body;
use crate::media::{LINE, Words};

/// What stands in a file's last line, up to its end.
pub struct LastLine {
    /// The log's next record and the size when this was so: if nothing was logged since, nothing has changed.
    seq: u32,
    size: u64,
    /// Zeros behind the end of file.
    words: Words,
}

/// The offset in its line of the byte at `offset`.
fn in_line(offset: u64) -> usize {
    (offset % LINE as u64) as usize
}

impl LastLine {
    /// The last line of `body`, a file, if it is known: zeros behind the end of file.
    #[inline]
    pub fn of(body: &Body) -> Option<&Words> {
        let last = body.last_line.as_ref()?;
        (last.seq == body.log.seq() && last.size == body.size).then_some(&last.words)
    }

    /// Takes over that `src` was appended, and committed: `body` has grown by it. `knew` is whether its last line was
    /// [known](LastLine::of) before.
    ///
    /// Nothing is kept of a file that was written once.
    #[inline]
    pub fn appended(body: &mut Body, src: &[u8], knew: bool) {
        let (seq, size) = (body.log.seq(), body.size);
        let (from, to) = (in_line(size - src.len() as u64), in_line(size));
        if from == 0 && body.last_line.is_none() {
            return;
        }
        let new = || Box::new(LastLine { seq, size: u64::MAX, words: Words::default() });
        let last = body.last_line.get_or_insert_with(new);
        if let Some(start) = src.len().checked_sub(to) {
            last.words = Words::default();
            put_bytes(&mut last.words, 0, &src[start..]);
        } else if knew {
            put_bytes(&mut last.words, from, src);
        } else {
            last.size = u64::MAX;
            return;
        }
        (last.seq, last.size) = (seq, size);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fs::files::{Fd, Files};
    use crate::fs::{Cred, DataMode, Fs, MkfsOptions, OpenOptions};
    use crate::media::{Domain, Pool, PoolOptions};

    fn new_file(domain: Domain, data: DataMode) -> (Files<Pool>, Fd) {
        let options = PoolOptions { assume: Some(domain), ..PoolOptions::default() };
        let media = Pool::memfd(16 << 20, &options).unwrap();
        let media = Fs::mkfs(media, &MkfsOptions { data, ..MkfsOptions::default() }).unwrap();
        let files = Files::new(Fs::open(media, &OpenOptions::default()).unwrap(), Cred::root(), 0);
        let fd = files.open(b"file", libc::O_CREAT | libc::O_RDWR, 0o600).unwrap();
        (files, fd)
    }

    fn knows(files: &Files<Pool>, fd: Fd) -> bool {
        let inode = files.fs().inode(files.fstat(fd).unwrap().ino).unwrap();
        let body = inode.body.read();
        LastLine::of(&body).is_some()
    }

    #[test]
    fn a_file_that_grows_by_less_than_lines_is_known() {
        let (files, fd) = new_file(Domain::Memory, DataMode::Cow);
        files.write(fd, &[1; 100]).unwrap();
        assert!(!knows(&files, fd), "it may be all that is ever written");
        files.write(fd, &[2; 10]).unwrap();
        assert!(!knows(&files, fd), "what was there before is not known");
        files.write(fd, &[3; 100]).unwrap();
        assert!(knows(&files, fd));
        files.write(fd, &[4; 3]).unwrap();
        assert!(knows(&files, fd));
        files.pwrite(fd, &[5; 1], 209).unwrap();
        assert!(!knows(&files, fd));
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Append(usize),
        /// Bytes from the end of file back, and how many.
        Overwrite(usize, usize),
        Cut(usize),
        Grow(usize),
        /// So many bytes behind the end of file, so many.
        Behind(usize, usize),
        Zero(usize, usize),
        Chmod,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            6 => (1..300usize).prop_map(Op::Append),
            1 => (1..5000usize).prop_map(Op::Append),
            2 => (1..150usize, 1..100usize).prop_map(|(back, len)| Op::Overwrite(back, len)),
            1 => (1..200usize).prop_map(Op::Cut),
            1 => (1..200usize).prop_map(Op::Grow),
            1 => (1..200usize, 1..5000usize).prop_map(|(gap, len)| Op::Behind(gap, len)),
            1 => (1..200usize, 1..100usize).prop_map(|(back, len)| Op::Zero(back, len)),
            1 => Just(Op::Chmod),
        ];
        prop::collection::vec(op, 1..60)
    }

    proptest! {
        /// Nothing that happens between two appends is undone by the second.
        #[test]
        fn what_was_last_in_a_file_stays(
            ops in ops(),
            domain in prop_oneof![Just(Domain::Memory), Just(Domain::CpuCache), Just(Domain::PageCache)],
            data in prop_oneof![Just(DataMode::Cow), Just(DataMode::InPlace)],
        ) {
            let (files, fd) = new_file(domain, data);
            let mut wanted = Vec::new();
            for (n, op) in (1u8..).zip(ops) {
                let size = wanted.len();
                match op {
                    Op::Append(len) => {
                        files.pwrite(fd, &vec![n; len], size as i64).unwrap();
                        wanted.resize(size + len, n);
                    }
                    Op::Overwrite(back, len) => {
                        let from = size.saturating_sub(back);
                        files.pwrite(fd, &vec![n; len], from as i64).unwrap();
                        wanted.resize(size.max(from + len), 0);
                        wanted[from..from + len].fill(n);
                    }
                    Op::Cut(by) => {
                        wanted.truncate(size.saturating_sub(by));
                        files.ftruncate(fd, wanted.len() as i64).unwrap();
                    }
                    Op::Behind(gap, len) => {
                        files.pwrite(fd, &vec![n; len], (size + gap) as i64).unwrap();
                        wanted.resize(size + gap, 0);
                        wanted.resize(size + gap + len, n);
                    }
                    Op::Grow(by) => {
                        wanted.resize(size + by, 0);
                        files.ftruncate(fd, wanted.len() as i64).unwrap();
                    }
                    Op::Zero(back, len) => {
                        let from = size.saturating_sub(back);
                        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                        files.fallocate(fd, mode, from as i64, len as i64).unwrap();
                        wanted[from..(from + len).min(size)].fill(0);
                    }
                    Op::Chmod => files.fchmod(fd, 0o600 + n as u32 % 8).unwrap(),
                }
                let mut found = vec![0xee; wanted.len()];
                prop_assert_eq!(files.pread(fd, &mut found, 0).unwrap(), wanted.len());
                prop_assert!(found == wanted, "after {:?}", op);
            }
            let media = files.fs().clone();
            drop(files);
            let options = OpenOptions { power_lost: true, ..OpenOptions::default() };
            let again = Files::new(Fs::open(media.abandon().unwrap(), &options).unwrap(), Cred::root(), 0);
            let fd = again.open(b"file", libc::O_RDONLY, 0).unwrap();
            let mut found = vec![0xee; wanted.len()];
            prop_assert_eq!(again.pread(fd, &mut found, 0).unwrap(), wanted.len());
            prop_assert!(found == wanted, "after a power loss");
        }
    }
}
