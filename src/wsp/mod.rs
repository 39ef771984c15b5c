//! Whole-system persistence: memory whose content outlives the program, and the machine.
//!
//! `heap` is for programs that ask for it: objects, names for them, and commits.

pub mod heap;
