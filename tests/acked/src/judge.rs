//! Whether what is found after a crash is what the acknowledgements allow, where each is durable.

use std::io::BufRead;

use crate::Result;
use crate::model::Model;
use crate::op::Draw;

/// What each thread had made when it was last looked at.
pub struct Judge {
    models: Vec<Model>,
}

impl Judge {
    pub fn new(threads: usize) -> Judge {
        Judge { models: vec![Model::new(); threads] }
    }

    pub fn threads(&self) -> usize {
        self.models.len()
    }

    /// Compares the lines found after a round with what `counts` acknowledged operations per thread allow. Says
    /// for how many threads the interrupted operation had happened, or what is wrong.
    pub fn verdict(
        &mut self,
        seed: u64,
        counts: &[u64],
        found: &[String],
    ) -> std::result::Result<usize, String> {
        let mut happened = 0;
        for (thread, &count) in counts.iter().enumerate() {
            let of_thread: Vec<&String> =
                found.iter().filter(|line| line.starts_with(&format!("{thread} "))).collect();
            let model = &mut self.models[thread];
            let mut draw = Draw::new(seed, thread);
            for _ in 0..count {
                let op = draw.next(model);
                op.change(model);
            }
            let before = model.lines(thread);
            let interrupted = draw.next(model);
            if of_thread == before.iter().collect::<Vec<_>>() {
                continue;
            }
            interrupted.change(model);
            happened += 1;
            let after = model.lines(thread);
            if of_thread != after.iter().collect::<Vec<_>>() {
                return Err(format!(
                    "seed {seed}, thread {thread}, {count} operations acknowledged: neither before nor after \
                     `{interrupted}`:\n  against before: {}\n  against after: {}",
                    difference(&before, &of_thread),
                    difference(&after, &of_thread)
                ));
            }
        }
        Ok(happened)
    }
}

/// The first lines that differ.
pub fn difference(wanted: &[String], found: &[&String]) -> String {
    let missing = wanted.iter().filter(|line| !found.contains(line)).map(|line| format!("-{line}"));
    let surplus = found.iter().filter(|line| !wanted.contains(line)).map(|line| format!("+{line}"));
    missing.chain(surplus).take(6).collect::<Vec<_>>().join("; ")
}

/// Rounds on stdin, each `round SEED SENT`, the listing, `end`. What `verdict` makes of each on stdout: `ok ...` or
/// `violation: ...`.
pub fn answer(
    mut verdict: impl FnMut(u64, &[u8], &[String]) -> std::result::Result<String, String>,
) -> Result<()> {
    let (mut seed, mut sent, mut found) = (0, Vec::new(), Vec::new());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split(' ');
        match words.next() {
            Some("round") => {
                seed = words.next().unwrap_or_default().parse()?;
                sent = words.next().unwrap_or_default().into();
                found.clear();
            }
            Some("end") => match verdict(seed, &sent, &found) {
                Ok(said) => println!("ok {said}"),
                Err(why) => println!("violation: {}", why.replace('\n', " ")),
            },
            _ => found.push(line),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::File;

    const SEED: u64 = 7;
    const COUNT: u64 = 400;

    /// What one thread has made after so many operations.
    fn made(count: u64) -> Model {
        let (mut model, mut draw) = (Model::new(), Draw::new(SEED, 0));
        for _ in 0..count {
            let op = draw.next(&model);
            op.change(&mut model);
        }
        model
    }

    fn verdict(found: &[String]) -> std::result::Result<usize, String> {
        Judge::new(1).verdict(SEED, &[COUNT], found)
    }

    /// The first file of this kind.
    fn file(model: &mut Model, is: impl Fn(&File) -> bool) -> &mut File {
        Arc::make_mut(model.files.values_mut().find(|file| is(file)).unwrap())
    }

    #[test]
    fn only_what_was_acknowledged_or_one_more_is_right() {
        assert_eq!(verdict(&made(COUNT).lines(0)), Ok(0));
        let beyond = (COUNT + 1..).map(|count| made(count).lines(0));
        let mut differing = beyond.filter(|lines| *lines != made(COUNT).lines(0));
        let next = differing.next().unwrap();
        // The operation after the last acknowledged one may change nothing that shows.
        if made(COUNT + 1).lines(0) == next {
            assert_eq!(verdict(&next), Ok(1));
        }
        let later = differing.next().unwrap();
        assert!(verdict(&later).unwrap_err().contains("neither before nor after"));
        let earlier = (0..COUNT).rev().map(|count| made(count).lines(0)).find(|l| *l != made(COUNT).lines(0));
        assert!(verdict(&earlier.unwrap()).is_err());
    }

    #[test]
    fn every_change_of_a_byte_a_name_or_an_attribute_is_seen() {
        let whole = made(COUNT);
        let changed: [&dyn Fn(&mut Model); 6] = [
            &|m| *file(m, |f| !f.data.is_empty()).data.last_mut().unwrap() ^= 1,
            &|m| Arc::make_mut(&mut m.shared)[100] ^= 1,
            &|m| file(m, |_| true).mode ^= 1,
            &|m| file(m, |f| !f.xattrs.is_empty()).xattrs.clear(),
            &|m| drop(m.entries.pop_first()),
            &|m| {
                let (path, entry) = m.entries.pop_last().unwrap();
                m.entries.insert(path + "x", entry);
            },
        ];
        for (n, change) in changed.iter().enumerate() {
            let mut model = whole.clone();
            change(&mut model);
            assert!(verdict(&model.lines(0)).is_err(), "change {n}");
        }
    }
}
