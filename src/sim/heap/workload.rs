//! What programs do with a heap, and sequences of it: all of one and of two operations, longer ones by chance.
//!
//! As text, one operation a line; a file of such sequences begins with the line `heap`, and an empty line stands
//! between two.

use std::fmt;

use crate::sim::media::Rng;

/// The first line of a file of sequences.
pub const HEADING: &str = "heap";

/// One of the two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum List {
    A,
    B,
}

impl List {
    pub const ALL: [List; 2] = [List::A, List::B];

    pub fn name(self) -> &'static str {
        match self {
            List::A => "a",
            List::B => "b",
        }
    }

    fn parse(text: &str) -> Option<List> {
        List::ALL.into_iter().find(|list| list.name() == text)
    }
}

/// One operation: at most one commit. What has nothing to work on does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// One object becomes the whole list; all that was in it is freed.
    Put(List, u32),
    /// A new first object, which leads to the others.
    Push(List, u32),
    /// A new last object, to which a word of the one before is set.
    Append(List, u32),
    /// So many new objects in front, in one commit.
    Many(List, u32, u32),
    /// The first object is freed.
    Pop(List),
    /// A word of the first object is set by a commit.
    Mark(List),
    /// The same word is overwritten in place.
    Overwrite(List),
    /// The root goes and comes again in one commit, as when its type changes.
    Renew(List),
    /// Root and objects go.
    Drop(List),
    /// The first object changes the list.
    Move(List, List),
    /// Two roots change at once.
    Swap,
    /// An object is reserved, filled and given back.
    Abandon(u32),
    /// An object is reserved, filled, and nothing else.
    Keep(u32),
    /// Closed and opened.
    Reopen,
    /// Power fails; nothing in doubt survives.
    Crash,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Put(list, bytes) => write!(f, "put {} {bytes}", list.name()),
            Op::Push(list, bytes) => write!(f, "push {} {bytes}", list.name()),
            Op::Append(list, bytes) => write!(f, "append {} {bytes}", list.name()),
            Op::Many(list, count, bytes) => write!(f, "many {} {count} {bytes}", list.name()),
            Op::Pop(list) => write!(f, "pop {}", list.name()),
            Op::Mark(list) => write!(f, "mark {}", list.name()),
            Op::Overwrite(list) => write!(f, "overwrite {}", list.name()),
            Op::Renew(list) => write!(f, "renew {}", list.name()),
            Op::Drop(list) => write!(f, "drop {}", list.name()),
            Op::Move(from, to) => write!(f, "move {} {}", from.name(), to.name()),
            Op::Swap => write!(f, "swap"),
            Op::Abandon(bytes) => write!(f, "abandon {bytes}"),
            Op::Keep(bytes) => write!(f, "keep {bytes}"),
            Op::Reopen => write!(f, "reopen"),
            Op::Crash => write!(f, "crash"),
        }
    }
}

/// Smallest and largest object of a text.
const BYTES: std::ops::RangeInclusive<u32> = 16..=1 << 20;
const COUNTS: std::ops::RangeInclusive<u32> = 1..=1000;

impl Op {
    pub fn parse(text: &str) -> Option<Op> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let list = |n: usize| List::parse(words.get(n)?);
        let bytes = |n: usize| words.get(n)?.parse().ok().filter(|bytes| BYTES.contains(bytes));
        let op = match *words.first()? {
            "put" => Op::Put(list(1)?, bytes(2)?),
            "push" => Op::Push(list(1)?, bytes(2)?),
            "append" => Op::Append(list(1)?, bytes(2)?),
            "many" => {
                let count = words.get(2)?.parse().ok().filter(|count| COUNTS.contains(count))?;
                Op::Many(list(1)?, count, bytes(3)?)
            }
            "pop" => Op::Pop(list(1)?),
            "mark" => Op::Mark(list(1)?),
            "overwrite" => Op::Overwrite(list(1)?),
            "renew" => Op::Renew(list(1)?),
            "drop" => Op::Drop(list(1)?),
            // To itself it would be no move.
            "move" => Op::Move(list(1)?, list(2).filter(|to| Some(*to) != list(1))?),
            "swap" => Op::Swap,
            "abandon" => Op::Abandon(bytes(1)?),
            "keep" => Op::Keep(bytes(1)?),
            "reopen" => Op::Reopen,
            "crash" => Op::Crash,
            _ => return None,
        };
        (op.to_string() == words.join(" ")).then_some(op)
    }
}

/// Every operation that sequences are made of: objects that travel in their record, that do not, of several chunks;
/// commits of one line, of several, and of more than a ring holds.
pub const OPS: &[Op] = &[
    Op::Put(List::A, 16),
    Op::Put(List::A, 100),
    Op::Put(List::A, 300),
    Op::Put(List::A, 40_000),
    Op::Put(List::B, 16),
    Op::Push(List::A, 24),
    Op::Push(List::A, 300),
    Op::Push(List::B, 24),
    Op::Push(List::B, 40_000),
    Op::Append(List::A, 24),
    Op::Append(List::B, 300),
    Op::Many(List::A, 3, 24),
    Op::Many(List::A, 40, 24),
    Op::Pop(List::A),
    Op::Pop(List::B),
    Op::Mark(List::A),
    Op::Mark(List::B),
    Op::Overwrite(List::A),
    Op::Renew(List::A),
    Op::Renew(List::B),
    Op::Drop(List::A),
    Op::Drop(List::B),
    Op::Move(List::A, List::B),
    Op::Swap,
    Op::Abandon(24),
    Op::Abandon(40_000),
    Op::Keep(24),
    Op::Reopen,
    Op::Crash,
];

/// Operations one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Sequence {
    pub ops: Vec<Op>,
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ops.iter().try_for_each(|op| writeln!(f, "{op}"))
    }
}

/// How many sequences of so many operations there are.
pub fn count(length: u32) -> u64 {
    (OPS.len() as u64).pow(length)
}

/// The `n`th of them.
pub fn sequence(length: u32, mut n: u64) -> Sequence {
    let mut ops = Vec::new();
    for _ in 0..length {
        ops.push(OPS[(n % OPS.len() as u64) as usize]);
        n /= OPS.len() as u64;
    }
    Sequence { ops }
}

/// A long one, by chance.
pub fn random(seed: u64, length: usize) -> Sequence {
    let mut rng = Rng::new(seed);
    let ops = (0..length).map(|_| {
        let list = List::ALL[rng.below(2) as usize];
        let bytes = match rng.below(8) {
            0 => 16 + rng.below(8_000) as u32,
            1 => 16_000 + rng.below(60_000) as u32,
            _ => 16 + rng.below(240) as u32,
        };
        match rng.below(25) {
            0 => Op::Put(list, bytes),
            1..=5 => Op::Push(list, bytes),
            6..=8 => Op::Append(list, bytes.min(4000)),
            9 => Op::Many(list, 1 + rng.below(30) as u32, 16 + rng.below(200) as u32),
            10..=13 => Op::Pop(list),
            14..=16 => Op::Mark(list),
            17 => Op::Overwrite(list),
            18 => Op::Move(list, if list == List::A { List::B } else { List::A }),
            19 => Op::Swap,
            20 => Op::Abandon(bytes),
            21 => Op::Keep(bytes.min(1000)),
            22 if rng.below(4) == 0 => Op::Drop(list),
            24 => Op::Renew(list),
            23 if rng.below(3) == 0 => [Op::Reopen, Op::Crash][rng.below(2) as usize],
            _ => Op::Push(list, 24),
        }
    });
    Sequence { ops: ops.collect() }
}

/// Whether a text has such sequences.
pub fn is_text(text: &str) -> bool {
    text.lines().map(str::trim).find(|line| !line.is_empty()) == Some(HEADING)
}

/// The sequences of a text, one after an empty line.
pub fn parse(text: &str) -> Result<Vec<Sequence>, String> {
    let mut all = vec![Sequence::default()];
    let mut lines = text.lines().enumerate().skip_while(|(_, line)| line.trim() != HEADING);
    lines.next();
    for (number, line) in lines {
        let line = line.trim();
        if line.is_empty() {
            all.push(Sequence::default());
            continue;
        }
        let op = Op::parse(line).ok_or_else(|| format!("line {}: `{line}` is no operation", number + 1))?;
        all.last_mut().expect("one was pushed").ops.push(op);
    }
    all.retain(|sequence| !sequence.ops.is_empty());
    if all.is_empty() { Err("it has no operations".to_owned()) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_read_as_it_is_written() {
        for op in OPS {
            assert_eq!(Op::parse(&op.to_string()), Some(*op), "{op}");
        }
        for no in ["", "put", "put c 16", "put a 3", "pop", "swap a", "many a 0 24", "move a a"] {
            assert_eq!(Op::parse(no), None, "{no}");
        }
    }

    #[test]
    fn sequences_are_read_as_they_are_written() {
        let all: Vec<Sequence> = (0..5).map(|seed| random(seed, 40)).collect();
        let text: Vec<String> = all.iter().map(Sequence::to_string).collect();
        let text = format!("{HEADING}\n{}", text.join("\n"));
        assert!(is_text(&text));
        assert_eq!(parse(&text).unwrap(), all);
        assert!(parse("heap\nput a 16\nfly\n").unwrap_err().contains("line 3"));
    }

    #[test]
    fn all_sequences_of_a_length_differ() {
        let all: std::collections::HashSet<String> =
            (0..count(2)).map(|n| sequence(2, n).to_string()).collect();
        assert_eq!(all.len() as u64, count(2));
    }
}
