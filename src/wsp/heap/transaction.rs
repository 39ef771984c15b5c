//! A commit put together step by step: what the program means, in its own words.

use super::{Change, Heap, Offset, Ptr, Reservation};
use crate::error::Result;
use crate::media::Media;

/// Changes that happen together, or not at all. Dropped without [`commit`](Transaction::commit) it has changed
/// nothing, and what it was to publish is given back.
pub struct Transaction<'h, M: Media> {
    heap: &'h Heap<M>,
    steps: Vec<Step>,
    reserved: Vec<Reservation<'h, M>>,
}

/// A change that owns its name.
enum Step {
    Change(Change<'static>),
    Root { name: Vec<u8>, type_number: u64, to: Option<Offset> },
    RemoveRoot { name: Vec<u8> },
}

impl Step {
    fn change(&self) -> Change<'_> {
        match self {
            Step::Change(change) => *change,
            Step::Root { name, type_number, to } => Change::Root { name, type_number: *type_number, to: *to },
            Step::RemoveRoot { name } => Change::RemoveRoot { name },
        }
    }
}

impl<M: Media> Heap<M> {
    pub fn transaction(&self) -> Transaction<'_, M> {
        Transaction { heap: self, steps: Vec::new(), reserved: Vec::new() }
    }
}

impl<'h, M: Media> Transaction<'h, M> {
    /// An object is live from the commit on. Something has to lead to it, or it is lost to the program. Panics for an
    /// object of another heap.
    pub fn publish(&mut self, object: Reservation<'h, M>) -> Offset {
        assert!(std::ptr::eq(object.heap(), self.heap), "an object of another heap");
        let at = object.offset();
        self.steps.push(Step::Change(object.change()));
        self.reserved.push(object);
        at
    }

    /// As [`publish`](Transaction::publish), and a word points to it: see [`Heap::link_value`].
    pub fn link(&mut self, word: Offset, object: Reservation<'h, M>) -> Offset {
        let at = self.publish(object);
        self.point(word, Some(at));
        at
    }

    /// A word of an object, at a multiple of 8, is set.
    pub fn set(&mut self, word: Offset, value: u64) {
        self.steps.push(Step::Change(Change::Set { at: word, value }));
    }

    /// A word points to an object, or to none (0).
    pub fn point(&mut self, word: Offset, to: Option<Offset>) {
        let value = to.map_or(0, |at| self.heap.link_value(at));
        self.set(word, value);
    }

    /// An object is free from the commit on. Nothing may lead to it then.
    pub fn free(&mut self, at: Offset) {
        self.steps.push(Step::Change(Change::Free(at)));
    }

    /// A root leads to an object, or nowhere; it is made where it is not there.
    pub fn set_root(&mut self, name: &[u8], type_number: u64, to: Option<Offset>) {
        self.steps.push(Step::Root { name: name.to_vec(), type_number, to });
    }

    pub fn remove_root(&mut self, name: &[u8]) {
        self.steps.push(Step::RemoveRoot { name: name.to_vec() });
    }

    /// As [`set_root`](Transaction::set_root) for a pointer with a type.
    pub fn set_root_to<T>(&mut self, name: &[u8], type_number: u64, to: Ptr<T>) {
        self.set_root(name, type_number, Some(to.offset()));
    }

    /// Durable on return: see [`Heap::commit`] for what may go wrong. After an error other than EIO nothing has
    /// changed, and what was to be published is given back.
    pub fn commit(self) -> Result<()> {
        let changes: Vec<Change<'_>> = self.steps.iter().map(Step::change).collect();
        self.heap.commit(&changes)?;
        self.reserved.into_iter().for_each(Reservation::published);
        Ok(())
    }
}
