//! Grep: reads a file into a buffer and searches it for the lines that a regular expression matches (crate regex).
//!
//! The buffer is searched as a whole, as greps do: no match goes beyond its line, for `.` is no newline.

use lodestone::Result;
use regex::bytes::Regex;

use super::app::{App, Desk, Shelf, input, malformed, write_inputs};
use super::text;

const DIR: &str = "/grep";
/// Of EasyIO's Table 1: what is read.
const FILE_BYTES: usize = 2 << 20;
const INPUTS: usize = 8;
/// Warnings and errors of failed requests that took 100 ms and more.
const PATTERN: &str = r"level=(warn|error) .*status=5[0-9]{2} took=[0-9]{3,}ms";

pub struct Grep {
    inputs: Vec<Vec<u8>>,
    pattern: Regex,
}

impl Grep {
    /// With files of a `shrink`th of the size.
    pub fn new(shrink: usize) -> Result<Grep> {
        let file = |n| text::log_lines(n as u64 + 1, FILE_BYTES / shrink);
        let pattern = Regex::new(PATTERN).map_err(malformed)?;
        Ok(Grep { inputs: (0..INPUTS).map(file).collect(), pattern })
    }

    /// How many lines match, and the sum of the places where the matches begin.
    fn search(&self, text: &[u8]) -> (u64, u64) {
        let places = self.pattern.find_iter(text).map(|found| found.start() as u64);
        places.fold((0, 0), |(count, sum), place| (count + 1, sum + place))
    }
}

impl App for Grep {
    fn prepare(&self, shelf: &Shelf, _items: usize) -> Result<()> {
        write_inputs(shelf, DIR, &self.inputs)
    }

    fn work(&self, shelf: &Shelf, desk: &mut Desk, n: usize) -> Result<u64> {
        desk.read(shelf, &input(DIR, n % INPUTS))?;
        let (count, sum) = self.search(&desk.input);
        Ok(count << 40 | sum)
    }

    /// It writes nothing.
    fn collect(&self, _: &Shelf, _: &mut Desk, _items: usize) -> Result<u64> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::Bed;
    use super::*;

    /// The same by hand, field by field.
    fn matches(line: &str) -> bool {
        let field = |name: &str| line.split(' ').find_map(|field| field.strip_prefix(name)).unwrap_or("");
        let took = field("took=");
        let slow = took.strip_suffix("ms").is_some_and(|digits| digits.len() >= 3);
        ["warn", "error"].contains(&field("level=")) && field("status=").starts_with('5') && slow
    }

    #[test]
    fn the_lines_are_those_that_a_search_by_hand_finds() {
        let (bed, app) = (Bed::new(), Grep::new(4).unwrap());
        app.prepare(&bed.shelf, INPUTS).unwrap();
        for n in 0..INPUTS {
            let text = String::from_utf8(app.inputs[n].clone()).unwrap();
            let begins =
                |line: &&str| line.as_ptr().addr() - text.as_ptr().addr() + line.find("level=").unwrap();
            let places: Vec<usize> =
                text.lines().filter(|line| matches(line)).map(|line| begins(&line)).collect();
            assert!(places.len() > 10 && places.len() < text.lines().count() / 10, "{}", places.len());
            let want = (places.len() as u64) << 40 | places.iter().sum::<usize>() as u64;
            assert_eq!(app.work(&bed.shelf, &mut Desk::default(), n).unwrap(), want);
        }
    }
}
