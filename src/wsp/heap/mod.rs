//! A persistent heap: objects that are there again after a restart, a crash or a power failure.
//!
//! A heap is a media of its own (a file, a DAX file, device-dax, memory), which one process has open. It holds
//! **objects** of 16 bytes and more, found through **roots**, which have names. What a program keeps of an object is
//! its [`Offset`], or, where the heap has its place in the address space, its address.
//!
//! **Nothing is lost between an allocation and the pointer to it.** An object is *reserved* (in DRAM only: a crash
//! gives it back), filled, and *published* by a commit, which in one step makes new objects live, sets words that
//! point to them, sets roots and frees old objects. A commit that returned is durable; one that was cut short
//! happened wholly or not at all.
//!
//! **One record, one fence.** A commit is a record in the ring of a *lane*: it validates itself, so that a torn one
//! never happened. Small objects travel in it, so that nothing has to be durable before it; larger ones are, at the
//! price of a second fence. Behind the fence the record is *applied*: words and descriptors are stored, and written
//! back by whoever uses the lane next. Until then recovery applies it again: all records that are not **settled** by
//! number, in their order. A line of a ring is used again only when its record is settled, by name, on the media.
//!
//! **What a later record freed is not stored to** when records are applied again: the space may have been reserved
//! and filled since, by stores that are in no record.
//!
//! Invariants, checked by [`Heap::check`]:
//!
//! 1. Every chunk is one thing: free, a run of objects, or part of a larger object.
//! 2. Descriptors say what the allocator's live bits say, when every applied word is stored.
//! 3. A root leads to the beginning of a live object, or nowhere.
//! 4. Of two records with a word in common the one whose commit began later has the higher number.
//! 5. Every record with a number above the settled one is whole in its ring, or its commit is under way.
//!
//! | file | owns |
//! |---|---|
//! | `format` | every byte on media |
//! | `place` | files and devices: making and opening a heap there |
//! | `alloc` | which bytes are whose, in DRAM |
//! | `lane` | rings of records, and settling them |
//! | `commit` | what a commit is, from claims to the stores |
//! | `reserve` | objects on their way: reserved, filled |
//! | `transaction` | a commit put together step by step |
//! | `pointer` | offsets with a type, and values that are plain bytes |
//! | `roots` | names |
//! | `recover` | formatting, opening, closing |
//! | `check` | whether all this is so, and what cannot be reached |

mod alloc;
mod check;
mod commit;
pub mod format;
mod lane;
mod place;
mod pointer;
mod recover;
mod reserve;
mod roots;
mod transaction;

use crossbeam_utils::CachePadded;

pub use alloc::Usage;
pub use check::{Report, Trace};
pub use commit::Change;
pub use format::Shape;
pub use lane::prefer;
pub use place::{CreateOptions, OpenOptions, Place};
pub use pointer::{Plain, Ptr};
pub use recover::{FormatOptions, Info, Opened};
pub use reserve::Reservation;
pub use roots::Root;
pub use transaction::Transaction;

use alloc::Allocator;
use format::{Header, Keys, Layout, State};
use lane::{Group, Lane};
use roots::Roots;

use crate::error::Error;
use crate::media::{Media, Span};
use crate::sync::primitive::Mutex;
use crate::sync::primitive::atomic::{AtomicBool, AtomicU64};

/// Why a store is not written back where it is made.
const IN_RECORD: &str = "the record says it too until it is settled, and whoever settles it writes this back";

/// Where an object is: its first byte, counted from the beginning of the heap. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Offset(pub u64);

impl Offset {
    /// So many bytes further, in the same object.
    #[inline]
    #[must_use]
    pub const fn add(self, bytes: u64) -> Offset {
        Offset(self.0 + bytes)
    }
}

/// See the file's head. Any number of threads may use one.
pub struct Heap<M: Media = Span> {
    media: M,
    header: Header,
    layout: Layout,
    keys: Keys,
    alloc: Allocator,
    roots: Mutex<Roots>,
    lanes: Box<[CachePadded<Mutex<Lane>>]>,
    /// The number of the next record.
    next: CachePadded<AtomicU64>,
    /// Records up to this number are settled, and the media say so.
    settled: CachePadded<AtomicU64>,
    /// The state line as it is on the media. Who settles has it.
    state: Mutex<State>,
    group: Group,
    /// It could not make something durable: nothing is acknowledged any more.
    failed: AtomicBool,
    opened: Opened,
}

impl<M: Media> std::fmt::Debug for Heap<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap")
            .field("label", &self.header.label)
            .field("bytes", &self.header.bytes)
            .finish_non_exhaustive()
    }
}

/// EINVAL with a sentence.
#[cold]
fn invalid(site: &'static str, what: String) -> Error {
    Error::message(libc::EINVAL, site, what)
}

/// EUCLEAN with a sentence: the media hold what no heap would write.
#[cold]
fn damaged(site: &'static str, what: String) -> Error {
    let message = format!("the heap is damaged: {what}; restore it from a copy");
    Error::message(libc::EUCLEAN, site, message)
}
