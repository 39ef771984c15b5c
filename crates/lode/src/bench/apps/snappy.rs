//! Snappy: reads a compressed file, decompresses it, writes a new file (crate snap).

use lodestone::Result;
use snap::raw::{Decoder, Encoder, decompress_len};

use super::app::{App, Desk, Shelf, input, malformed, output, take_outputs, write_inputs};
use super::text;

const DIR: &str = "/snappy";
/// Of EasyIO's Table 1: what is written. What is read follows from how compressible the words are: 910 KiB.
const PLAIN_BYTES: usize = 1946 << 10;
const INPUTS: usize = 8;

pub struct Snappy {
    inputs: Vec<Vec<u8>>,
}

impl Snappy {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Result<Snappy> {
        let compress = |n| {
            let plain = text::words(n as u64 + 1, PLAIN_BYTES / shrink);
            Encoder::new().compress_vec(&plain).map_err(malformed)
        };
        Ok(Snappy { inputs: (0..INPUTS).map(compress).collect::<Result<_>>()? })
    }
}

impl App for Snappy {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        desk.output.resize(decompress_len(&desk.input).map_err(malformed)?, 0);
        let bytes = Decoder::new().decompress(&desk.input, &mut desk.output).map_err(malformed)?;
        desk.write_new(shelf, &output(DIR, n))?;
        Ok(bytes as u64)
    }

    fn collect(&self, shelf: &Shelf, desk: &mut Desk, items: usize) -> Result<u64> {
        take_outputs(shelf, desk, DIR, items)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    #[test]
    fn each_output_is_what_was_compressed() {
        let (bed, app) = (Bed::new(), Snappy::new(32).unwrap());
        app.prepare(&bed.shelf, 9).unwrap();
        for n in 0..9 {
            app.work(&bed.shelf, &mut Desk::default(), n).unwrap();
            let seed = (n % INPUTS) as u64 + 1;
            assert_eq!(bed.read(&output(DIR, n)), text::words(seed, PLAIN_BYTES / 32));
        }
    }

    #[test]
    fn a_damaged_input_is_an_error() {
        let (bed, app) = (Bed::new(), Snappy { inputs: vec![vec![0xff; 100]; INPUTS] });
        app.prepare(&bed.shelf, 1).unwrap();
        let error = app.work(&bed.shelf, &mut Desk::default(), 0).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }

    #[test]
    fn inputs_have_the_size_of_table_1() {
        let bytes = Encoder::new().compress_vec(&text::words(1, PLAIN_BYTES)).unwrap().len();
        assert!((865 << 10..955 << 10).contains(&bytes), "{} KiB", bytes >> 10);
    }
}
