//! A pool whose label is lost: block 0 of its only region is damaged, or something has written over it.
//!
//! Block 0 has no second copy, and needs none where there is one region: all that it says is in the superblock. That it
//! is such a pool both copies of the superblock must prove, each at the place that the other one names. Of several
//! regions the label alone says where the others are, and in which order.

use std::path::Path;

use super::super::format::BLOCK;
use super::super::mount::SuperCopies;
use super::{Finding, Report, What};
use crate::error::{Error, Result};
use crate::media::{Media, Pool, PoolOptions};
use crate::quote::Shown;

/// The pool at `path` without its label, where that is what is wrong with it: none where it is no pool of one region,
/// or where its label is whole. [`Pool::write_label`] makes it one that opens again. EUCLEAN where a superblock says that
/// there is more of the pool than this.
pub fn open_unlabelled(path: &Path, options: &PoolOptions) -> Result<Option<Pool>> {
    let Some(all) = Pool::open_unlabelled(path, None, options)? else { return Ok(None) };
    let copies = SuperCopies::read(&all)?;
    let Ok(first) = copies.first else { return Ok(None) };
    let bytes = first.blocks * BLOCK as u64;
    if bytes > all.len() {
        let message = format!(
            "{} has no label, and only a part of its pool of {bytes} bytes: restore block 0 from a copy, which alone says \
             where other regions are; if it was cut, restore all of it",
            path.shown()
        );
        return Err(Error::message(libc::EUCLEAN, "check::label", message));
    }
    if copies.second.ok().as_ref() != Some(&first) {
        return Ok(None);
    }
    // It is locked.
    drop(all);
    Pool::open_unlabelled(path, Some(bytes), options)
}

/// Opens the media of a pool, and tells one that has lost its label alone (EUCLEAN) from what is no pool (EINVAL).
pub fn open_pool(path: &Path, options: &PoolOptions) -> Result<Pool> {
    Pool::open(path, options).map_err(|e| {
        // What is damaged is told so, what has no label is told that it is no pool.
        if e.errno() != libc::EINVAL {
            return e;
        }
        match open_unlabelled(path, &PoolOptions { read_only: true, ..*options }) {
            Ok(Some(_)) => {
                let name = path.shown();
                let message =
                    format!("the label of {name} is overwritten: lode fsck --repair {name} writes it again");
                Error::message(libc::EUCLEAN, "check::label", message)
            }
            Err(part) if part.errno() == libc::EUCLEAN => part,
            _ => e,
        }
    })
}

impl Report {
    /// Says, before all else, that the label is lost.
    pub fn add_lost_label(&mut self) {
        let detail = "the label in block 0 is damaged or overwritten";
        self.findings.insert(0, Finding { block: Some(0), ..Finding::new(What::Label, detail) });
    }
}
