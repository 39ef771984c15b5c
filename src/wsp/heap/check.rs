//! Whether a heap is what it should be (the invariants at the head of this room), and what of it a program can no
//! longer reach.

use std::collections::{BTreeMap, BTreeSet};

use super::format::Chunk;
use super::{Heap, Offset};
use crate::error::Result;
use crate::media::Media;

/// Calls its second argument with every object that the one at this place, of so many bytes, leads to.
pub type Trace<'a> = dyn FnMut(Offset, u64, &mut dyn FnMut(Offset)) -> Result<()> + 'a;

/// What was looked at, and what is wrong with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// One sentence each.
    pub findings: Vec<String>,
    pub objects: u64,
    pub roots: u64,
    /// Live objects that no root leads to; always empty without a trace.
    pub lost: Vec<Offset>,
}

impl Report {
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty() && self.lost.is_empty()
    }
}

impl<M: Media> Heap<M> {
    /// Looks at everything, while commits wait. Other threads must not reserve or give back meanwhile. EIO for bad
    /// media.
    pub fn check(&self) -> Result<Report> {
        let roots = self.roots.lock();
        let _state = self.state.lock();
        // In their order, as who settles has them; a commit has one.
        let _lanes: Vec<_> = self.lanes.iter().map(|lane| lane.lock()).collect();
        let mut report = Report::default();
        self.alloc.check(&mut report.findings);
        for chunk in 0..self.layout.chunks as u32 {
            self.check_chunk(chunk, &mut report.findings)?;
        }
        roots.check(&mut report.findings);
        for (slot, root) in roots.by_slot().iter().enumerate() {
            let Some(root) = root else { continue };
            report.roots += 1;
            if let Some(at) = root.to.filter(|&at| !self.alloc.is_live_at(at)) {
                let name = String::from_utf8_lossy(&root.name);
                let what = format!(
                    "the root `{name}` (slot {slot}) leads to {:#x}, where nothing live begins",
                    at.0
                );
                report.findings.push(what);
            }
        }
        report.objects = self.alloc.usage().objects;
        Ok(report)
    }

    /// Whether the media say of a chunk what DRAM does.
    fn check_chunk(&self, chunk: u32, findings: &mut Vec<String>) -> Result<()> {
        let mut content = |n: usize| -> Result<u64> {
            let at = self.layout.word(chunk, n);
            let (content, is_right) = self.keys.unseal(at, self.media.load64(at)?);
            if !self.media.verified(&[(at, 8)], is_right) {
                findings.push(format!("the word at {:#x}, of chunk {chunk}, fails its check", at.0));
            }
            Ok(content)
        };
        let found = Chunk::decode(content(0)?);
        let what = match self.alloc.wanted(chunk) {
            Some((wanted, bits)) => {
                let mut same = found == Some(wanted);
                for (n, &bits) in bits.iter().enumerate() {
                    same &= content(1 + n)? == bits;
                }
                (!same).then(|| format!("chunk {chunk} is {found:?} on the media, and {wanted:?} in memory"))
            }
            None => match found {
                Some(Chunk::Free) => None,
                Some(Chunk::Run { class }) => {
                    let mut used = 0;
                    for n in 1..=super::format::map_words(class) {
                        used |= content(n)?;
                    }
                    (used != 0)
                        .then(|| format!("chunk {chunk} has objects in use on the media, none in memory"))
                }
                found => Some(format!("chunk {chunk} is {found:?} on the media, and nothing in memory")),
            },
        };
        findings.extend(what);
        Ok(())
    }

    /// As [`check`](Heap::check), and follows what leads from object to object, beginning at the roots: what is live
    /// and not reached the program has lost; a link to what is not live is a finding.
    pub fn reach(&self, trace: &mut Trace<'_>) -> Result<Report> {
        let mut report = self.check()?;
        let live: BTreeMap<Offset, u64> =
            self.alloc.live().into_iter().map(|(at, object)| (at, object.bytes())).collect();
        let around = |at: Offset| {
            let (&begin, &bytes) = live.range(..=at).next_back()?;
            (at.0 < begin.0 + bytes).then_some(begin)
        };
        let mut reached: BTreeSet<Offset> = BTreeSet::new();
        let mut queue: Vec<Offset> = self.roots().iter().filter_map(|root| around(root.to?)).collect();
        while let Some(at) = queue.pop() {
            if !reached.insert(at) {
                continue;
            }
            trace(at, live[&at], &mut |to| match around(to) {
                Some(begin) => queue.push(begin),
                None => {
                    report.findings.push(format!("{:#x} leads to {:#x}, where nothing is live", at.0, to.0))
                }
            })?;
        }
        report.lost = live.into_keys().filter(|at| !reached.contains(at)).collect();
        Ok(report)
    }
}
