//! A hash table in a persistent heap: one commit for each change, nothing to repair after a crash.
//!
//! A root leads to the table, an object of words; each word points to the first entry of its bucket, and each entry's
//! first word to the next one. An entry never changes but for that word: a new value is a new entry in the old one's
//! place, and the old one is freed by the same commit.

use lodestone::media::Media;
use lodestone::wsp::heap::{Heap, Offset, Report};
use lodestone::{Error, Result};

const ROOT: &[u8] = b"map";
/// This program's number for it, and the version of what is below.
const TYPE: u64 = 0x6d61_7001;
const BUCKETS: u64 = 1 << 10;

/// Bytes of an entry in front of key and value: next, hash, bytes of the key, bytes of the value.
const HEAD: u64 = 32;

/// See the file's head. One thread changes it at a time.
pub struct Map<M: Media> {
    pub heap: Heap<M>,
    table: Offset,
}

struct Entry {
    at: Offset,
    /// The word that points to it.
    from: Offset,
    next: u64,
    value: Vec<u8>,
}

/// FNV-1a: the table is on media, so that its hash must be the same for ever.
fn hash(key: &[u8]) -> u64 {
    key.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ b as u64).wrapping_mul(0x0100_0000_01b3))
}

impl<M: Media> Map<M> {
    /// The map of a heap; it is made where there is none.
    pub fn of(heap: Heap<M>) -> Result<Map<M>> {
        let table = match heap.root(ROOT, TYPE) {
            Ok(Some(table)) => table,
            Err(e) if e.errno() != libc::ENOENT => return Err(e),
            _ => {
                let mut table = heap.reserve(BUCKETS * 8)?;
                table.zero()?;
                let mut t = heap.transaction();
                let table = t.publish(table);
                t.set_root(ROOT, TYPE, Some(table));
                t.commit()?;
                table
            }
        };
        Ok(Map { heap, table })
    }

    fn bucket(&self, key: &[u8]) -> Offset {
        self.table.add(hash(key) % BUCKETS * 8)
    }

    /// Head, key and value of an entry.
    fn entry(&self, at: Offset) -> Result<([u64; 4], Vec<u8>, Vec<u8>)> {
        let mut head = [0; 4];
        for (n, word) in head.iter_mut().enumerate() {
            *word = self.heap.word(at.add(n as u64 * 8))?;
        }
        let bytes = |from: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            self.heap.read(at.add(from), &mut bytes).map(|()| bytes)
        };
        Ok((head, bytes(HEAD, head[2])?, bytes(HEAD + head[2], head[3])?))
    }

    fn find(&self, key: &[u8]) -> Result<Option<Entry>> {
        let mut from = self.bucket(key);
        while let Some(at) = self.heap.linked(self.heap.word(from)?) {
            let ([next, hashed, ..], found, value) = self.entry(at)?;
            if hashed == hash(key) && found == key {
                return Ok(Some(Entry { at, from, next, value }));
            }
            from = at;
        }
        Ok(None)
    }

    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.find(key)?.map(|entry| entry.value))
    }

    /// Durable on return.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let old = self.find(key)?;
        let (from, next) = match &old {
            Some(entry) => (entry.from, entry.next),
            None => (self.bucket(key), self.heap.word(self.bucket(key))?),
        };
        let mut bytes = Vec::with_capacity(HEAD as usize + key.len() + value.len());
        for word in [next, hash(key), key.len() as u64, value.len() as u64] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(key);
        bytes.extend(value);
        let mut new = self.heap.reserve(bytes.len() as u64)?;
        new.write(0, &bytes)?;
        let mut t = self.heap.transaction();
        t.link(from, new);
        old.into_iter().for_each(|entry| t.free(entry.at));
        t.commit()
    }

    /// Whether it was there. Durable on return.
    pub fn remove(&mut self, key: &[u8]) -> Result<bool> {
        let Some(entry) = self.find(key)? else { return Ok(false) };
        let mut t = self.heap.transaction();
        t.set(entry.from, entry.next);
        t.free(entry.at);
        t.commit()?;
        Ok(true)
    }

    /// Calls `each` with every key and value, in no order.
    pub fn for_each(&self, mut each: impl FnMut(Vec<u8>, Vec<u8>)) -> Result<()> {
        for bucket in 0..BUCKETS {
            let mut at = self.heap.linked(self.heap.word(self.table.add(bucket * 8))?);
            while let Some(entry) = at {
                let ([next, ..], key, value) = self.entry(entry)?;
                each(key, value);
                at = self.heap.linked(next);
            }
        }
        Ok(())
    }

    /// Whether the heap is sound, and every object of it in the map.
    pub fn check(&self) -> Result<()> {
        let (heap, table) = (&self.heap, self.table);
        let report: Report = heap.reach(&mut |at, _, link| {
            let words = if at == table { BUCKETS } else { 1 };
            for n in 0..words {
                heap.linked(heap.word(at.add(n * 8))?).into_iter().for_each(&mut *link);
            }
            Ok(())
        })?;
        if report.is_clean() {
            return Ok(());
        }
        let message = format!("the map is damaged: {:?}, lost: {:?}", report.findings, report.lost);
        Err(Error::message(libc::EUCLEAN, "map::check", message))
    }
}
