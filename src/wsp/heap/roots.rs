//! Roots: names that lead to objects.
//!
//! A root has a slot on the media: its name and type, written once before a commit puts the slot in use, and its value,
//! one sealed word that records alone change. Names are found through a map in DRAM.

use std::collections::BTreeMap;

use super::format::{encode_root_name, root};
use super::{Change, Heap, Offset, invalid};
use crate::error::{Error, Result};
use crate::limits::NAME_BYTES_MAX;
use crate::media::{Addr, Flushed, Media};

/// A root, as it is now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    pub name: Vec<u8>,
    pub type_number: u64,
    pub to: Option<Offset>,
}

/// All roots. Who changes some has them locked until the commit has ended.
#[derive(Default)]
pub(super) struct Roots {
    slots: Vec<Option<Root>>,
    by_name: BTreeMap<Vec<u8>, usize>,
}

/// What a commit changes: by slot; a name that comes in the place of none is new.
#[derive(Default)]
pub(super) struct Staged {
    slots: BTreeMap<usize, Option<Root>>,
    new: Vec<usize>,
}

impl Staged {
    /// Slots and their values: an address, 0 for nowhere, none where the slot is free.
    pub fn values(&self) -> impl Iterator<Item = (usize, Option<u64>)> {
        self.slots.iter().map(|(&slot, root)| (slot, root.as_ref().map(|r| r.to.map_or(0, |at| at.0))))
    }

    /// Slots whose names are to be stored.
    pub fn new_names(&self) -> impl Iterator<Item = (usize, &Root)> {
        self.new.iter().filter_map(|slot| Some((*slot, self.slots[slot].as_ref()?)))
    }
}

impl Roots {
    pub fn new(slots: Vec<Option<Root>>) -> Roots {
        let names = slots.iter().enumerate().filter_map(|(n, root)| Some((root.as_ref()?.name.clone(), n)));
        let by_name = names.collect();
        Roots { slots, by_name }
    }

    pub fn get(&self, name: &[u8]) -> Option<&Root> {
        self.slots[*self.by_name.get(name)?].as_ref()
    }

    pub fn all(&self) -> impl Iterator<Item = &Root> {
        self.by_name.values().filter_map(|&slot| self.slots[slot].as_ref())
    }

    pub fn by_slot(&self) -> &[Option<Root>] {
        &self.slots
    }

    /// Checks one change, and notes it if it is one of a root.
    pub fn stage(
        &self,
        change: &Change<'_>,
        leads: &dyn Fn(Offset) -> Result<()>,
        staged: &mut Staged,
    ) -> Result<()> {
        match *change {
            Change::Root { name, type_number, to } => {
                check_name(name)?;
                to.map_or(Ok(()), leads)?;
                let slot = match self.slot_of(name, staged) {
                    Some((slot, root)) => {
                        check_type(root, type_number)?;
                        slot
                    }
                    None => {
                        let slot = self.free_slot(staged)?;
                        staged.new.push(slot);
                        slot
                    }
                };
                staged.slots.insert(slot, Some(Root { name: name.to_vec(), type_number, to }));
                Ok(())
            }
            Change::RemoveRoot { name } => {
                let Some((slot, _)) = self.slot_of(name, staged) else {
                    return Err(no_root(name));
                };
                // One that was made by this very commit need not be stored.
                staged.new.retain(|&new| new != slot);
                staged.slots.insert(slot, None);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The slot of a name, as it is after what is staged.
    fn slot_of<'a>(&'a self, name: &[u8], staged: &'a Staged) -> Option<(usize, &'a Root)> {
        let of_name = |(&slot, root): (&usize, &'a Option<Root>)| {
            root.as_ref().filter(|r| r.name == name).map(|root| (slot, root))
        };
        if let Some(found) = staged.slots.iter().find_map(of_name) {
            return Some(found);
        }
        let slot = *self.by_name.get(name)?;
        let root = self.slots[slot].as_ref()?;
        (!staged.slots.contains_key(&slot)).then_some((slot, root))
    }

    /// A slot that is free before this commit: one that it frees still has its name on the media.
    fn free_slot(&self, staged: &Staged) -> Result<usize> {
        let free = (0..self.slots.len()).find(|n| self.slots[*n].is_none() && !staged.slots.contains_key(n));
        free.ok_or_else(|| {
            let message = format!(
                "the heap has {} roots, as many as it was made for: remove one, or make a heap for more",
                self.slots.len()
            );
            Error::message(libc::ENOSPC, "heap::root", message)
        })
    }

    /// The commit is durable. Old names go before new ones come: a name may change its slot.
    pub fn take(&mut self, staged: Staged) {
        for &slot in staged.slots.keys() {
            if let Some(old) = self.slots[slot].take() {
                self.by_name.remove(&old.name);
            }
        }
        for (slot, root) in staged.slots {
            if let Some(new) = &root {
                self.by_name.insert(new.name.clone(), slot);
            }
            self.slots[slot] = root;
        }
    }

    /// That each name leads to its slot, and each slot has a name.
    pub fn check(&self, findings: &mut Vec<String>) {
        for (slot, root) in self.slots.iter().enumerate() {
            let Some(root) = root else { continue };
            if self.by_name.get(&root.name) != Some(&slot) {
                let name = String::from_utf8_lossy(&root.name);
                findings.push(format!("the root `{name}` (slot {slot}) cannot be found by its name"));
            }
        }
        let used = self.slots.iter().flatten().count();
        if used != self.by_name.len() {
            findings.push(format!("{used} roots are in slots, and {} names", self.by_name.len()));
        }
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() {
        return Err(invalid("heap::root", "a root has a name of 1 to 255 bytes".into()));
    }
    if name.len() > NAME_BYTES_MAX {
        let message = format!("the name of a root has at most {NAME_BYTES_MAX} bytes, not {}", name.len());
        return Err(Error::message(libc::ENAMETOOLONG, "heap::root", message));
    }
    Ok(())
}

fn check_type(root: &Root, type_number: u64) -> Result<()> {
    if root.type_number == type_number {
        return Ok(());
    }
    let message = format!(
        "the root `{}` has the type {:#x}, not {type_number:#x}: it was made by another program, or another version",
        String::from_utf8_lossy(&root.name),
        root.type_number
    );
    Err(Error::message(libc::EEXIST, "heap::root", message))
}

fn no_root(name: &[u8]) -> Error {
    let message = format!("there is no root `{}`", String::from_utf8_lossy(name));
    Error::message(libc::ENOENT, "heap::root", message)
}

impl<M: Media> Heap<M> {
    /// Where a root leads. ENOENT where there is none of that name, EEXIST where it has another type, EUCLEAN where
    /// it leads to what was freed, also if that was reserved again since.
    pub fn root(&self, name: &[u8], type_number: u64) -> Result<Option<Offset>> {
        let roots = self.roots.lock();
        let root = roots.get(name).ok_or_else(|| no_root(name))?;
        check_type(root, type_number)?;
        if let Some(at) = root.to.filter(|&at| !self.alloc.is_live_at(at)) {
            let message = format!(
                "the root `{}` leads to {:#x}, which the program freed: set the root, or remove it",
                String::from_utf8_lossy(name),
                at.0
            );
            return Err(Error::message(libc::EUCLEAN, "heap::root", message));
        }
        Ok(root.to)
    }

    /// All of them, by name.
    pub fn roots(&self) -> Vec<Root> {
        self.roots.lock().all().cloned().collect()
    }

    /// Stores the name of a root whose slot is not in use.
    pub(super) fn store_root_name(&self, (slot, new): (usize, &Root)) -> Result<Flushed> {
        let bytes = encode_root_name(self.keys, slot, &new.name, new.type_number);
        let at = Addr(self.layout.root(slot).0 + root::TYPE as u64);
        self.media.copy_nt(at, &bytes).map_err(|fault| self.fault(fault))
    }
}
