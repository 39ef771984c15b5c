//! Operations that overlap in time, and whether what came of them is what some serial order of them gives.

use std::collections::BTreeSet;

use super::model::{Model, Outcome};
use super::tree::{self, Tree};
use super::workload::Op;

/// Slots of the model that hold what calls have walked to.
const WALKED: u8 = 100;

/// One operation of a thread.
#[derive(Clone)]
pub struct Call {
    pub thread: usize,
    pub op: Op,
    pub tag: u64,
    /// When it began and ended, as places in one order.
    pub begun: Option<usize>,
    pub ended: Option<(usize, Outcome)>,
}

impl Call {
    /// Whether media failed below it.
    #[cfg(shuttle)]
    fn failed(&self) -> bool {
        self.ended.is_some_and(|(_, answered)| answered == Err(libc::EIO))
    }

    /// Two paths are followed one after the other, on Linux too: the call may be refused for what never was at one
    /// moment, if others change names meanwhile.
    fn is_refused_on_the_way(&self, answered: Outcome, others: &[Call]) -> bool {
        let by_names = matches!(
            answered,
            Err(libc::ENOENT
                | libc::ENOTDIR
                | libc::EEXIST
                | libc::EISDIR
                | libc::ENOTEMPTY
                | libc::EINVAL
                | libc::EPERM)
        );
        let meanwhile = |c: &Call| (c.moves() || c.makes()) && c.overlaps(self);
        matches!(self.op, Op::Link(..) | Op::Rename(..)) && by_names && others.iter().any(meanwhile)
    }

    /// Whether a path may lead elsewhere afterwards.
    fn moves(&self) -> bool {
        matches!(self.op, Op::Rename(..) | Op::Unlink(..) | Op::Rmdir(..) | Op::Link(..) | Op::Create(..))
    }

    /// Whether a path may lead somewhere where it led nowhere.
    fn makes(&self) -> bool {
        matches!(self.op, Op::Mkdir(..) | Op::Mknod(..) | Op::Symlink(..))
    }

    /// Whether it is another call, and neither had ended when the other began.
    fn overlaps(&self, other: &Call) -> bool {
        let before = |a: &Call, b: &Call| match (a.ended, b.begun) {
            (Some((ended, _)), Some(begun)) => ended < begun,
            (_, begun) => begun.is_none(),
        };
        self.begun != other.begun && !before(self, other) && !before(other, self)
    }
}

/// All of them, a thread's in its order.
#[derive(Clone, Default)]
pub struct History {
    pub calls: Vec<Call>,
    events: usize,
    /// Nearly nothing was free: any of them may have found no room.
    full: bool,
}

impl History {
    pub fn new(calls: Vec<Call>) -> History {
        History { calls, events: 0, full: false }
    }

    /// Of a pool in which nearly nothing is free.
    pub fn on_full(self, full: bool) -> History {
        History { full, ..self }
    }

    /// Without what answered EIO: as if it was never called.
    #[cfg(shuttle)]
    pub fn without_failed(&self) -> History {
        let mut history = self.clone();
        history.calls.retain(|call| !call.failed());
        history
    }

    /// What answered EIO may have been done, or not: it is as if it had not ended.
    #[cfg(shuttle)]
    pub fn with_failed_perhaps(&self) -> History {
        let mut history = self.clone();
        history.calls.iter_mut().filter(|call| call.failed()).for_each(|call| call.ended = None);
        history
    }

    pub fn event(&mut self) -> usize {
        self.events += 1;
        self.events
    }

    /// Whether some serial order, in which nothing stands before what had ended when it began, gives all answers,
    /// and the tree in its end. What has not ended may stand in it or not. A call may have walked to files and
    /// directories before others moved them, as Linux's do. If there is no such order: what the ends of those that
    /// give all answers differ in.
    pub fn serial(&self, begin: &Model, found: &Tree) -> Result<(), String> {
        self.some_order(begin, found, &|order| tree::compare(found, order.now(), &[]))
    }

    /// Whether one of the orders that give all answers `fits` what was found.
    pub(super) fn some_order(&self, begin: &Model, found: &Tree, fits: Fits) -> Result<(), String> {
        let mut differ = BTreeSet::new();
        let none = vec![false; self.calls.len()];
        let mut order =
            Order { moments: vec![begin.clone()], calls: Vec::new(), done: none.clone(), walked: none };
        match self.search(&mut order, fits, &mut differ) {
            true => Ok(()),
            false if differ.is_empty() => Err("no serial order gives what was answered".to_owned()),
            false => Err(format!("no serial order gives {:?}: {differ:#?}", found.paths())),
        }
    }

    fn search(&self, order: &mut Order, fits: Fits, differ: &mut BTreeSet<String>) -> bool {
        if !self.calls.iter().zip(&order.done).any(|(c, done)| c.ended.is_some() && !done) {
            match fits(order) {
                Ok(()) => return true,
                Err(difference) => drop(differ.insert(difference)),
            }
        }
        for (n, call) in self.calls.iter().enumerate() {
            let Some(begun) = call.begun.filter(|_| !order.done[n]) else { continue };
            let before = |c: &Call| c.ended.is_some_and(|(ended, _)| ended < begun);
            if self.calls.iter().zip(&order.done).any(|(c, done)| !done && before(c)) {
                continue;
            }
            let mut next = order.now().clone();
            let mut op = call.op.clone();
            let slots = WALKED + 2 * n as u8..;
            if order.walked[n] {
                op.walks().into_iter().zip(slots.clone()).for_each(|(mut walk, slot)| walk.begin_at(slot));
            } else if self.calls.iter().zip(&order.done).any(|(c, done)| !done && c.moves()) {
                let before = order.now().clone();
                let walks = op.walks();
                order.walked[n] = !walks.is_empty()
                    && walks.iter().zip(slots.clone()).all(|(walk, slot)| walk.hold(order.now_mut(), slot));
                if order.walked[n] && self.search(order, fits, differ) {
                    return true;
                }
                order.walked[n] = false;
                *order.now_mut() = before;
            }
            let outcome = op.on_model(&mut next, call.tag);
            let arrive = |model: &mut Model| slots.clone().take(2).for_each(|slot| _ = model.close(slot));
            arrive(&mut next);
            // What was interrupted and would fail changes nothing.
            let could_be = |answered| {
                answered == outcome
                    || self.full && answered == Err(libc::ENOSPC)
                    || call.is_refused_on_the_way(answered, &self.calls)
            };
            if !call.ended.map_or(outcome.is_ok(), |(_, answered)| could_be(answered)) {
                continue;
            }
            if call.ended.is_some_and(|(_, answered)| answered.is_err()) {
                next = order.now().clone();
                arrive(&mut next);
            }
            order.done[n] = true;
            order.calls.push(n);
            order.moments.push(next);
            if self.search(order, fits, differ) {
                return true;
            }
            order.moments.pop();
            order.calls.pop();
            order.done[n] = false;
        }
        false
    }
}

/// Calls one after the other.
pub(super) struct Order {
    /// Which they are; what there is before the first of them, and after each.
    pub calls: Vec<usize>,
    pub moments: Vec<Model>,
    /// Of each call, whether it stands in the order already, or has only walked.
    done: Vec<bool>,
    walked: Vec<bool>,
}

/// Whether what was found is what an order gives.
pub(super) type Fits<'a> = &'a dyn Fn(&Order) -> Result<(), String>;

impl Order {
    fn now(&self) -> &Model {
        self.moments.last().expect("one is always there")
    }

    fn now_mut(&mut self) -> &mut Model {
        self.moments.last_mut().expect("one is always there")
    }
}

impl std::fmt::Display for History {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        for call in &self.calls {
            writeln!(f, "thread {}: {}: from {:?} to {:?}", call.thread, call.op, call.begun, call.ended)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two calls on `a` and `b`; whether there is a serial order that gives both answers.
    fn holds(calls: [(&str, Outcome); 2], overlap: bool) -> bool {
        let mut model = Model::new(1);
        ["create a", "create b", "mkdir A"]
            .iter()
            .for_each(|op| op.parse::<Op>().unwrap().on_model(&mut model, 1).unwrap());
        let call = |(n, (text, answered)): (usize, (&str, Outcome))| {
            let (begun, ended) = if overlap { (n + 1, n + 3) } else { (2 * n + 1, 2 * n + 2) };
            let op = text.parse().unwrap();
            Call { thread: n, op, tag: 1, begun: Some(begun), ended: Some((ended, answered)) }
        };
        let history = History::new(calls.into_iter().enumerate().map(call).collect());
        history.some_order(&model, &Tree::of(&model), &|_| Ok(())).is_ok()
    }

    #[test]
    fn a_rename_is_refused_for_names_that_change_meanwhile_alone() {
        let renames = [("rename a c", Err(libc::ENOENT)), ("link a c", Err(libc::EEXIST))];
        for refused in renames {
            // Both look for names while others come and go.
            assert!(holds([("unlink b", Ok(())), refused], true), "{refused:?}");
            assert!(holds([("mkdir B", Ok(())), refused], true), "{refused:?}");
            assert!(!holds([("unlink b", Ok(())), refused], false), "{refused:?} of what had ended");
            assert!(!holds([refused, ("unlink b", Ok(()))], false), "{refused:?} of what had not begun");
            assert!(!holds([("chmod b 600", Ok(())), refused], true), "{refused:?} of what changes no names");
        }
        for errno in [libc::EIO, libc::ENOSPC, libc::EBUSY, libc::EMFILE] {
            assert!(!holds([("unlink b", Ok(())), ("rename a c", Err(errno))], true), "errno {errno}");
        }
    }
}
