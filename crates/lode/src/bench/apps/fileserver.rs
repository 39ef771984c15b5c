//! Fileserver, after the workload of Filebench that EasyIO names: each item deletes a file, creates it anew and writes it,
//! appends to it, reads another one and asks for its attributes.

use lodestone::Result;

use super::app::{App, Desk, Shelf, digest, glance, input, output, weigh, write_inputs, write_new};
use crate::bench::Random;

const DIR: &str = "/fileserver";
/// Of EasyIO's Table 1: what is read, and 1040 KB that are written in two.
const FILE_BYTES: usize = 1 << 20;
const APPEND_BYTES: usize = 16 << 10;
const INPUTS: usize = 8;
const PAGE_BYTES: usize = 4 << 10;

pub struct Fileserver {
    file_bytes: usize,
    append_bytes: usize,
}

impl Fileserver {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Fileserver {
        Fileserver { file_bytes: FILE_BYTES / shrink, append_bytes: APPEND_BYTES / shrink }
    }

    fn input(&self, n: usize) -> Vec<u8> {
        let mut random = Random::new(n as u64 + 1);
        (0..self.file_bytes).map(|_| random.below(256) as u8).collect()
    }

    /// What item `n` writes: the same bytes for all, but for the first word of each page. `bytes` are of another item, or none.
    fn fill(&self, n: usize, bytes: &mut Vec<u8>) {
        if bytes.len() != self.file_bytes {
            *bytes = self.input(INPUTS);
        }
        for (page, number) in bytes.chunks_mut(PAGE_BYTES).zip(0u64..) {
            let word = (n as u64) << 32 | number;
            page[..8].copy_from_slice(&word.to_le_bytes());
        }
    }
}

impl App for Fileserver {
    fn prepare(&self, shelf: &Shelf, items: usize) -> Result<()> {
        let inputs: Vec<Vec<u8>> = (0..INPUTS).map(|n| self.input(n)).collect();
        write_inputs(shelf, DIR, &inputs)?;
        // What the first round deletes.
        (0..items).try_for_each(|n| write_new(shelf, &output(DIR, n), &inputs[n % INPUTS]))
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        let (own, other) = (output(DIR, n), input(DIR, n % INPUTS));
        shelf.unlink(own.as_bytes())?;
        self.fill(n, &mut desk.output);
        desk.write_new(shelf, &own)?;
        desk.append(shelf, &own, self.append_bytes)?;
        desk.read(shelf, &other)?;
        let size = shelf.stat(other.as_bytes())?.size;
        Ok(glance(&desk.input) ^ size)
    }

    /// The files stay: the next round deletes them.
    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64> {
        let mut sum = 0u64;
        for n in 0..items {
            desk.read(shelf, &output(DIR, n))?;
            sum = sum.wrapping_add(weigh(n, digest(&desk.input)));
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    #[test]
    fn files_hold_what_was_written_and_appended() {
        let (bed, app) = (Bed::new(), Fileserver::new(16));
        app.prepare(&bed.shelf, 3).unwrap();
        for round in 0..2 {
            for n in 0..3 {
                let result = app.work(&bed.shelf, &mut Desk::default(), n).unwrap();
                assert_eq!(result, glance(&app.input(n)) ^ app.file_bytes as u64, "round {round}");
                let mut want = Vec::new();
                app.fill(n, &mut want);
                want.extend_from_within(..app.append_bytes);
                assert_eq!(bed.read(&output(DIR, n)), want, "round {round}");
            }
        }
        let sum = app.collect(&bed.shelf, &mut Desk::default(), 3).unwrap();
        let file = |n| digest(&bed.read(&output(DIR, n)));
        assert_eq!(sum, (0..3).fold(0u64, |sum, n| sum.wrapping_add(weigh(n, file(n)))));
    }

    #[test]
    fn sizes_are_those_of_table_1() {
        let Fileserver { file_bytes, append_bytes } = Fileserver::new(1);
        assert_eq!((file_bytes, file_bytes + append_bytes), (1 << 20, 1040 << 10));
    }
}
