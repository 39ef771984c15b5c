//! One operation on the heap and on the oracle, in step; and what a heap says that it holds.
//!
//! A node's first word leads to the next one; its second has its size, a tag and a mark; the words behind follow from
//! the tag. So a node that holds what was never written tells of itself.

use std::collections::BTreeMap;
use std::ops::Range;

use super::workload::{List, Op};
use crate::media::Media;
use crate::sim::media::{Keep, SimMedia};
use crate::wsp::heap::{Heap, Offset, Transaction, prefer};

/// What the roots are: a program's number.
const TYPE: u64 = 0x6c69_7374;

/// An object of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    pub bytes: u32,
    pub tag: u32,
    pub mark: u8,
}

impl Node {
    fn word(self) -> u64 {
        (self.bytes as u64) << 40 | (self.tag as u64) << 8 | self.mark as u64
    }

    fn of(word: u64) -> Node {
        Node { bytes: (word >> 40) as u32, tag: (word >> 8) as u32, mark: word as u8 }
    }

    /// Everything but the link.
    fn content(self) -> Vec<u8> {
        let mut bytes = self.word().to_le_bytes().to_vec();
        let words = (self.bytes as u64).div_ceil(8);
        bytes.extend((2..words).flat_map(|n| pattern(self.tag, n).to_le_bytes()));
        bytes.truncate(self.bytes as usize - 8);
        bytes
    }
}

fn pattern(tag: u32, n: u64) -> u64 {
    (tag as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(n as u32 % 64) ^ n
}

/// What two lists hold; a list without a root is not there.
pub type Lists = BTreeMap<List, Vec<Node>>;

/// A heap that is used.
pub struct Machine {
    heap: Option<Heap<SimMedia>>,
    pub model: Lists,
    /// Operations so far: the tag of what is stored.
    step: u32,
    /// Operations alternate between two threads and two lanes.
    alternates: bool,
}

/// Opens media as after a failure.
pub fn open(media: SimMedia) -> Result<Heap<SimMedia>, String> {
    Heap::open(media).map_err(|e| format!("it cannot be opened: {e:?}"))
}

impl Machine {
    pub fn new(media: SimMedia, model: Lists, step: u32, alternates: bool) -> Result<Machine, String> {
        prefer(Some(0));
        Ok(Machine { heap: Some(open(media)?), model, step, alternates })
    }

    /// Goes on with a heap that is open and holds this.
    pub fn resume(heap: Heap<SimMedia>, model: Lists) -> Machine {
        Machine { heap: Some(heap), model, step: 0, alternates: false }
    }

    pub fn heap(&self) -> &Heap<SimMedia> {
        self.heap.as_ref().expect("it is open between operations")
    }

    pub fn step(&self) -> u32 {
        self.step
    }

    /// One operation on both. Whether a full heap refused it, which changes nothing.
    pub fn apply(&mut self, op: Op) -> Result<bool, String> {
        self.step += 1;
        let done = match op {
            Op::Reopen => {
                let heap = self.heap.take().expect("it is open between operations");
                let media = heap.close().map_err(|e| format!("it cannot be closed: {e:?}"))?;
                let heap = open(media.crash_point().media(Keep::Everything))?;
                if !heap.opened().was_closed || heap.opened().records > 0 {
                    return Err(format!("after a close something had to be applied: {:?}", heap.opened()));
                }
                self.heap = Some(heap);
                Ok(())
            }
            Op::Crash => {
                let left = self.heap().media().crash_point().media(Keep::Nothing);
                self.heap = Some(open(left)?);
                Ok(())
            }
            op if self.alternates && self.step % 2 == 1 => {
                let (heap, step) = (self.heap.as_ref().expect("as above"), self.step);
                std::thread::scope(|s| {
                    let beside = s.spawn(|| {
                        prefer(Some(1));
                        attempt(heap, op, step)
                    });
                    beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            }
            op => attempt(self.heap(), op, self.step),
        };
        match done {
            Ok(()) => {
                on_model(&mut self.model, op, self.step);
                Ok(false)
            }
            Err(e) if e.errno() == libc::ENOSPC => Ok(true),
            Err(e) => Err(format!("{op} answers {e:?}")),
        }
    }

    /// What there is now; the oracle must say the same.
    pub fn seen(&self) -> Result<Lists, String> {
        let seen = lists(self.heap())?;
        match seen == self.model {
            true => Ok(seen),
            false => Err(format!("without any failure, {}", differs(&seen, &self.model))),
        }
    }

    pub fn close(mut self) -> Result<SimMedia, String> {
        let heap = self.heap.take().expect("it is open between operations");
        heap.close().map_err(|e| format!("it cannot be closed: {e:?}"))
    }
}

/// In words.
pub fn differs(is: &Lists, wanted: &Lists) -> String {
    format!("the lists are {is:?}, should be {wanted:?}")
}

/// The first object of a list; none where the list has no root or nothing in it.
fn first<M: Media>(heap: &Heap<M>, list: List) -> crate::Result<Option<Offset>> {
    match heap.root(list.name().as_bytes(), TYPE) {
        Err(e) if e.errno() == libc::ENOENT => Ok(None),
        to => to,
    }
}

fn next<M: Media>(heap: &Heap<M>, at: Offset) -> crate::Result<Option<Offset>> {
    Ok(heap.linked(heap.word(at)?))
}

/// All objects from this one on.
fn chain<M: Media>(heap: &Heap<M>, mut at: Option<Offset>) -> crate::Result<Vec<Offset>> {
    let mut all = Vec::new();
    while let Some(node) = at {
        all.push(node);
        at = next(heap, node)?;
    }
    Ok(all)
}

/// Reserves a node and fills it.
fn node<'h, M: Media>(
    heap: &'h Heap<M>,
    node: Node,
    next: Option<Offset>,
) -> crate::Result<crate::wsp::heap::Reservation<'h, M>> {
    let mut reserved = heap.reserve(node.bytes as u64)?;
    let mut bytes = next.map_or(0, |at| heap.link_value(at)).to_le_bytes().to_vec();
    bytes.extend(node.content());
    reserved.write(0, &bytes)?;
    Ok(reserved)
}

fn set_root<M: Media>(t: &mut Transaction<'_, M>, list: List, to: Option<Offset>) {
    t.set_root(list.name().as_bytes(), TYPE, to);
}

/// One operation on the heap alone.
fn attempt<M: Media>(heap: &Heap<M>, op: Op, step: u32) -> crate::Result<()> {
    let new = |bytes: u32| Node { bytes, tag: step << 8, mark: 0 };
    let mut t = heap.transaction();
    match op {
        Op::Put(list, bytes) => {
            let old = chain(heap, first(heap, list)?)?;
            let at = t.publish(node(heap, new(bytes), None)?);
            set_root(&mut t, list, Some(at));
            old.into_iter().for_each(|at| t.free(at));
        }
        Op::Push(list, bytes) => {
            let at = t.publish(node(heap, new(bytes), first(heap, list)?)?);
            set_root(&mut t, list, Some(at));
        }
        Op::Append(list, bytes) => {
            let made = node(heap, new(bytes), None)?;
            match chain(heap, first(heap, list)?)?.last() {
                Some(&last) => drop(t.link(last, made)),
                None => {
                    let at = t.publish(made);
                    set_root(&mut t, list, Some(at));
                }
            }
        }
        Op::Many(list, count, bytes) => {
            let mut at = first(heap, list)?;
            for n in (0..count).rev() {
                let tag = step << 8 | n;
                at = Some(t.publish(node(heap, Node { tag, ..new(bytes) }, at)?));
            }
            set_root(&mut t, list, at);
        }
        Op::Pop(list) => {
            let Some(at) = first(heap, list)? else { return Ok(()) };
            set_root(&mut t, list, next(heap, at)?);
            t.free(at);
        }
        Op::Mark(list) => {
            let Some(at) = first(heap, list)? else { return Ok(()) };
            t.set(at.add(8), marked(Node::of(heap.word(at.add(8))?)).word());
        }
        Op::Overwrite(list) => {
            let Some(at) = first(heap, list)? else { return Ok(()) };
            let word = marked(Node::of(heap.word(at.add(8))?)).word();
            return heap.overwrite(at.add(8), &word.to_le_bytes());
        }
        Op::Renew(list) => {
            let Ok(to) = heap.root(list.name().as_bytes(), TYPE) else { return Ok(()) };
            t.remove_root(list.name().as_bytes());
            set_root(&mut t, list, to);
        }
        Op::Drop(list) => {
            if heap.root(list.name().as_bytes(), TYPE).is_err() {
                return Ok(());
            }
            let old = chain(heap, first(heap, list)?)?;
            t.remove_root(list.name().as_bytes());
            old.into_iter().for_each(|at| t.free(at));
        }
        Op::Move(from, to) => {
            let Some(at) = first(heap, from)? else { return Ok(()) };
            let (rest, behind) = (next(heap, at)?, first(heap, to)?);
            t.point(at, behind);
            set_root(&mut t, from, rest);
            set_root(&mut t, to, Some(at));
        }
        Op::Swap => {
            let (a, b) = (first(heap, List::A)?, first(heap, List::B)?);
            set_root(&mut t, List::A, b);
            set_root(&mut t, List::B, a);
        }
        Op::Abandon(bytes) => return node(heap, new(bytes), None).map(drop),
        Op::Keep(bytes) => {
            // Nobody will ever give it back but recovery.
            std::mem::forget(node(heap, new(bytes), None)?);
            return Ok(());
        }
        Op::Reopen | Op::Crash => unreachable!("not a call"),
    }
    t.commit()
}

fn marked(node: Node) -> Node {
    Node { mark: node.mark.wrapping_add(1), ..node }
}

/// The same on the oracle.
fn on_model(lists: &mut Lists, op: Op, step: u32) {
    let new = |bytes: u32| Node { bytes, tag: step << 8, mark: 0 };
    match op {
        Op::Put(list, bytes) => drop(lists.insert(list, vec![new(bytes)])),
        Op::Push(list, bytes) => lists.entry(list).or_default().insert(0, new(bytes)),
        Op::Append(list, bytes) => lists.entry(list).or_default().push(new(bytes)),
        Op::Many(list, count, bytes) => {
            let made = (0..count).map(|n| Node { tag: step << 8 | n, ..new(bytes) });
            drop(lists.entry(list).or_default().splice(0..0, made));
        }
        Op::Pop(list) => {
            if let Some(nodes) = lists.get_mut(&list).filter(|nodes| !nodes.is_empty()) {
                nodes.remove(0);
            }
        }
        Op::Mark(list) | Op::Overwrite(list) => {
            if let Some(node) = lists.get_mut(&list).and_then(|nodes| nodes.first_mut()) {
                *node = marked(*node);
            }
        }
        Op::Drop(list) => drop(lists.remove(&list)),
        Op::Move(from, to) => {
            if from != to
                && let Some(nodes) = lists.get_mut(&from).filter(|nodes| !nodes.is_empty())
            {
                let node = nodes.remove(0);
                lists.entry(to).or_default().insert(0, node);
            }
        }
        Op::Swap => {
            let (a, b) = (lists.remove(&List::A), lists.remove(&List::B));
            lists.insert(List::A, b.unwrap_or_default());
            lists.insert(List::B, a.unwrap_or_default());
        }
        Op::Renew(_) | Op::Abandon(_) | Op::Keep(_) | Op::Reopen | Op::Crash => {}
    }
}

/// What a heap holds, all of it: what is live and in no list is an error, and so is a node that nobody wrote.
pub fn lists<M: Media>(heap: &Heap<M>) -> Result<Lists, String> {
    let said = |e: crate::Error| format!("it cannot be read: {e:?}");
    let mut all = Lists::new();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut used = 0;
    for root in heap.roots() {
        let name = String::from_utf8_lossy(&root.name).into_owned();
        let list = List::ALL.into_iter().find(|list| list.name() == name);
        let list = list.filter(|_| root.type_number == TYPE);
        let list = list.ok_or_else(|| format!("there is a root that nobody made: {root:?}"))?;
        let mut nodes = Vec::new();
        let mut at = root.to;
        while let Some(node) = at {
            let held = heap.usable_bytes(node).map_err(said)?;
            if ranges.iter().any(|r| r.start < node.0 + held && node.0 < r.end) {
                return Err(format!("the object at {:#x} is in two lists, or overlaps another", node.0));
            }
            ranges.push(node.0..node.0 + held);
            used += held;
            nodes.push(read_node(heap, node, held)?);
            at = next(heap, node).map_err(said)?;
        }
        all.insert(list, nodes);
    }
    let usage = heap.usage();
    if (usage.objects, usage.used) != (ranges.len() as u64, used) {
        return Err(format!("{} objects of {used} bytes are in lists, and {usage:?}", ranges.len()));
    }
    Ok(all)
}

fn read_node<M: Media>(heap: &Heap<M>, at: Offset, held: u64) -> Result<Node, String> {
    let said = |e: crate::Error| format!("it cannot be read: {e:?}");
    let node = Node::of(heap.word(at.add(8)).map_err(said)?);
    if (node.bytes as u64) < 16 || node.bytes as u64 > held {
        return Err(format!("the object at {:#x} says {node:?} and has {held} bytes", at.0));
    }
    let mut content = vec![0; node.bytes as usize - 8];
    heap.read(at.add(8), &mut content).map_err(said)?;
    match content == node.content() {
        true => Ok(node),
        false => Err(format!("the object at {:#x}, {node:?}, holds what nobody stored there", at.0)),
    }
}
