//! A persistent heap under power failures: the production code (`wsp::heap`) on simulated media.
//!
//! | file | owns |
//! |---|---|
//! | `workload` | operations, the sequences of them |
//! | `machine` | one operation on the heap and on the oracle, in step; what a heap says that it holds |
//! | `run` | sequences cut short by failures, and the judge of what is left |
//! | `mutants` | steps left out on purpose, and whether that is noticed |
//! | `schedules` | threads, under schedules that a model checker chooses |
//!
//! What programs do is lists: objects that lead to each other, from two roots. The oracle is a map from names to lists.
//! A state that a failure left is good if the lists are those before the operation or those after it; no object is live
//! that no list has; the check finds nothing; what is reserved afterwards overlaps nothing; and all space is one piece
//! once everything is freed.

pub mod machine;
pub mod mutants;
pub mod run;
#[cfg(all(test, shuttle))]
mod schedules;
pub mod workload;
