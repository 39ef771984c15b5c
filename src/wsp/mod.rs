//! Whole-system persistence: an unmodified system that is suspended and resumed in milliseconds (WSP).
//!
//! A guest's memory is a file or device on the media, which the guest stores to all the time. To suspend it, the state
//! of its devices is saved beside that memory, both are made durable, and one record says that they belong together. To
//! resume it, the same memory is mapped again and the state is loaded. Memory is not copied either way, so how much
//! there is of it does not count.
//!
//! **Invariants.** An *image* is the memory and the state of one generation.
//! 1. Memory is the only copy, and moves on as soon as the guest runs. So before a guest runs on an image, the record says
//!    durably that it has been *consumed*; state never meets memory of another generation.
//! 2. The record says *suspended* only when memory and state are durable.
//! 3. Whatever a crash leaves in between, the guest boots cold. That is said, not hidden.
//! 4. State is believed only where every byte of it verifies: the one who loads it looks at little.
//!
//! | file | owns |
//! |---|---|
//! | `image` | every byte of the record and of the slot's seal |
//! | `record` | the record in the memory's file, and how it changes |
//! | `slot` | the file of one generation's state: sealed, verified |
//! | `cycle` | suspend and resume, step by step, whatever the guest runs in |
//!
//! And memory whose content outlives the program, for those that ask for it: `heap`, objects, names for them, and commits.
//! And memory that is slow and does not outlive it, chosen for each allocation or for all: `memory` (feature `memory-type`).

pub mod cycle;
pub mod heap;
pub mod image;
#[cfg(feature = "memory-type")]
pub mod memory;
pub mod record;
pub mod slot;

pub use cycle::{
    Machine, Phase, Resumed, Saved, Suspended, adopt, go_on_standing, resume, resume_clone, suspend,
};
pub use image::{Record, Seal, State};
pub use record::Ram;
