//! Webserver, after the workload of Filebench that EasyIO names: each item reads ten pages, and appends to a log that all
//! items share.

use lodestone::Result;

use super::app::{App, Desk, Shelf, digest, glance, input, malformed, write_inputs, write_new};
use crate::bench::Random;

const DIR: &str = "/webserver";
const LOG: &str = "/webserver/log";
/// Of EasyIO's Table 1: what is read, what is written, and reads for each write.
const PAGE_BYTES: usize = 256 << 10;
const ENTRY_BYTES: usize = 16 << 10;
const READS: usize = 10;
const INPUTS: usize = 48;

pub struct Webserver {
    page_bytes: usize,
    entry_bytes: usize,
}

impl Webserver {
    /// With pages and entries of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Webserver {
        Webserver { page_bytes: PAGE_BYTES / shrink, entry_bytes: ENTRY_BYTES / shrink }
    }

    fn page(&self, n: usize) -> Vec<u8> {
        let mut random = Random::new(n as u64 + 1);
        (0..self.page_bytes).map(|_| random.below(256) as u8).collect()
    }

    /// What item `n` appends.
    fn entry(&self, n: usize, bytes: &mut Vec<u8>) {
        let line = format!("request {n:012} answered with {READS} pages\n");
        bytes.clear();
        while bytes.len() < self.entry_bytes {
            bytes.extend_from_slice(line.as_bytes());
        }
        bytes.truncate(self.entry_bytes);
    }
}

/// The pages that item `n` reads.
fn pages(n: usize) -> impl Iterator<Item = usize> {
    (0..READS).map(move |read| (n * READS + read) % INPUTS)
}

impl App for Webserver {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        let inputs: Vec<Vec<u8>> = (0..INPUTS).map(|n| self.page(n)).collect();
        write_inputs(shelf, DIR, &inputs)?;
        write_new(shelf, LOG, &[])
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        let mut result = 0u64;
        for page in pages(n) {
            desk.read(shelf, &input(DIR, page))?;
            result = result.rotate_left(7) ^ glance(&desk.input);
        }
        self.entry(n, &mut desk.output);
        desk.append(shelf, LOG, self.entry_bytes)?;
        Ok(result)
    }

    /// Entries lie in the order in which items ended, each whole; then the log begins anew.
    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64> {
        desk.read(shelf, LOG)?;
        if desk.input.len() != items * self.entry_bytes {
            return Err(malformed(format!("{LOG} has {} bytes after {items} entries", desk.input.len())));
        }
        let entries = desk.input.chunks(self.entry_bytes);
        let sum = entries.fold(0u64, |sum, entry| sum.wrapping_add(digest(entry)));
        shelf.truncate(LOG.as_bytes(), 0)?;
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    #[test]
    fn pages_come_and_entries_stay_whole() {
        let (bed, app) = (Bed::new(), Webserver::new(16));
        app.prepare(&bed.shelf, 7).unwrap();
        let mut desk = Desk::default();
        let (mut log, mut sum) = (Vec::new(), 0u64);
        for n in [4, 0, 6, 1, 5, 2, 3] {
            let want = pages(n).fold(0u64, |all, page| all.rotate_left(7) ^ glance(&app.page(page)));
            assert_eq!(app.work(&bed.shelf, &mut desk, n).unwrap(), want);
            let mut entry = Vec::new();
            app.entry(n, &mut entry);
            assert_eq!(entry.len(), app.entry_bytes);
            log.extend_from_slice(&entry);
            sum = sum.wrapping_add(digest(&entry));
        }
        assert_eq!(bed.read(LOG), log);
        assert_eq!(app.collect(&bed.shelf, &mut desk, 7).unwrap(), sum, "in any order");
        assert!(bed.read(LOG).is_empty());
        let error = app.collect(&bed.shelf, &mut desk, 1).unwrap_err();
        assert!(error.to_string().contains("log"), "an entry that is missing is seen: {error}");
    }

    #[test]
    fn sizes_are_those_of_table_1() {
        let Webserver { page_bytes, entry_bytes } = Webserver::new(1);
        assert_eq!((page_bytes, entry_bytes, pages(3).count()), (256 << 10, 16 << 10, 10));
    }
}
