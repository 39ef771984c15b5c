//! Stacks of uthreads: memory that is reserved in large pieces, touched page by page, and ends in a guard.
//!
//! Large stacks have smaller pieces ([`CHUNK_BYTES_MAX`]), down to one for each: addresses may be few (`ulimit -v`, a kernel that
//! counts what it lends), and a uthread or two is all that such a program has. Where a piece cannot be had a smaller one is tried.
//!
//! A guard is a marker in the page table where the kernel has them (MADV_GUARD_INSTALL, Linux 6.13): then a million
//! stacks are a handful of mappings. Elsewhere it is a page without access, which splits a mapping in two, and the
//! kernel's limit on mappings is met at some 30,000 stacks: that is an error that names the limit.
//!
//! Huge pages are declined: one would make the first touch of a stack that of thirty.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corosensei::stack::StackPointer;
use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};

use crate::error::{Error, Result};
use crate::limits::{STACK_BYTES_MAX, STACK_BYTES_MIN};

/// No access below a stack, in bytes: more than a function's frame that is not probed.
const GUARD_BYTES: usize = 16 << 10;
/// Stacks of one reservation, at most.
const CHUNK_STACKS_MAX: usize = 64;
/// One reservation in bytes, at most, but that there is one stack in it.
const CHUNK_BYTES_MAX: usize = 32 << 20;
/// Stacks that keep the pages they once used while nobody has them; more give them back to the kernel.
const WARM_STACKS_MAX: usize = 1024;
/// The kernel's number for it, which neither crate has yet.
const MADV_GUARD_INSTALL: libc::c_int = 102;

/// One uthread's stack; whoever has it may use its memory.
pub struct Stack {
    chunk: Arc<Chunk>,
    /// Where its guard begins.
    low: usize,
}

impl Stack {
    /// Where no access is, up to where the stack begins.
    pub fn guard(&self) -> std::ops::Range<usize> {
        self.low..self.low + GUARD_BYTES
    }
}

// SAFETY: the memory from `limit` to `base` is mapped while the chunk lives, this stack's alone, at least as large as
// wanted (`STACK_BYTES_MIN`), and begins with a guard.
unsafe impl corosensei::stack::Stack for Stack {
    fn base(&self) -> StackPointer {
        pointer(self.low + GUARD_BYTES + self.chunk.stack_bytes)
    }

    fn limit(&self) -> StackPointer {
        pointer(self.low)
    }
}

fn pointer(address: usize) -> StackPointer {
    NonZeroUsize::new(address).expect("nothing is mapped at 0")
}

/// Memory of several stacks.
struct Chunk {
    memory: NonNull<libc::c_void>,
    stacks: usize,
    stack_bytes: usize,
}

// SAFETY: it is an address range; stacks are cut out of it without overlap.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn bytes(&self) -> usize {
        self.stacks * (GUARD_BYTES + self.stack_bytes)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: mapped by `reserve` with this size; the last stack of it is gone.
        if let Err(e) = unsafe { munmap(self.memory.as_ptr(), self.bytes()) } {
            tracing::error!("stacks of uthreads are not given back: munmap: {e}");
        }
    }
}

/// Where stacks come from, all of one size.
pub struct Stacks {
    stack_bytes: usize,
    free: Mutex<Vec<Stack>>,
    /// The chunk that stacks are being cut from, and how many were.
    cut: Mutex<Option<(Arc<Chunk>, usize)>>,
    /// The kernel has guards that are no mappings.
    markers: AtomicBool,
}

impl Stacks {
    /// `stack_bytes` is rounded up to pages.
    pub fn new(stack_bytes: usize) -> Result<Stacks> {
        if !(STACK_BYTES_MIN..=STACK_BYTES_MAX).contains(&stack_bytes) {
            let wanted = format!("{STACK_BYTES_MIN} to {STACK_BYTES_MAX} bytes are wanted");
            let message = format!("a stack of {stack_bytes} bytes cannot be had: {wanted}");
            return Err(Error::message(libc::EINVAL, "runtime::stack", message));
        }
        let stack_bytes = stack_bytes.next_multiple_of(rustix::param::page_size());
        Ok(Stacks {
            stack_bytes,
            free: Mutex::default(),
            cut: Mutex::default(),
            markers: AtomicBool::new(true),
        })
    }

    /// Fails where the process has no more memory or mappings to reserve.
    pub fn take(&self) -> Result<Stack> {
        if let Some(stack) = self.free.lock().pop() {
            return Ok(stack);
        }
        let mut cut = self.cut.lock();
        if cut.as_ref().is_none_or(|(chunk, count)| *count == chunk.stacks) {
            *cut = Some((Arc::new(self.reserve_most()?), 0));
        }
        let (chunk, count) = cut.as_mut().expect("there is one");
        let low = chunk.memory.as_ptr().addr() + *count * (GUARD_BYTES + self.stack_bytes);
        let stack = Stack { chunk: chunk.clone(), low };
        self.protect(&stack)?;
        *count += 1;
        Ok(stack)
    }

    /// Takes back what nobody uses any more.
    pub fn give(&self, stack: Stack) {
        let mut free = self.free.lock();
        if free.len() >= WARM_STACKS_MAX {
            // SAFETY: the stack is nobody's: what is on it is of no use.
            let dropped = unsafe {
                let at = stack.chunk.memory.as_ptr().with_addr(stack.low + GUARD_BYTES);
                madvise(at, self.stack_bytes, Advice::LinuxDontNeed)
            };
            if let Err(e) = dropped {
                tracing::debug!("the pages of a stack stay: madvise: {e}");
            }
        }
        free.push(stack);
    }

    /// As many stacks as there are addresses for, within the limits.
    fn reserve_most(&self) -> Result<Chunk> {
        let fit = CHUNK_BYTES_MAX / (GUARD_BYTES + self.stack_bytes);
        let mut stacks = fit.clamp(1, CHUNK_STACKS_MAX);
        loop {
            match self.reserve(stacks) {
                Err(_) if stacks > 1 => stacks /= 2,
                reserved => return reserved,
            }
        }
    }

    fn reserve(&self, stacks: usize) -> Result<Chunk> {
        let bytes = stacks * (GUARD_BYTES + self.stack_bytes);
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping, where the kernel likes.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags) };
        let memory = mapped.map_err(|e| self.out_of_stacks("mmap", e.raw_os_error()))?;
        let memory = NonNull::new(memory).expect("nothing is mapped at 0");
        let chunk = Chunk { memory, stacks, stack_bytes: self.stack_bytes };
        // SAFETY: within the new mapping. A kernel without huge pages refuses, which is as good.
        let _ = unsafe { madvise(memory.as_ptr(), bytes, Advice::LinuxNoHugepage) };
        Ok(chunk)
    }

    fn protect(&self, stack: &Stack) -> Result<()> {
        let guard = stack.chunk.memory.as_ptr().with_addr(stack.low);
        if self.markers.load(Ordering::Relaxed) {
            // SAFETY: the range is in the chunk, and nobody's yet.
            if unsafe { libc::madvise(guard, GUARD_BYTES, MADV_GUARD_INSTALL) } == 0 {
                return Ok(());
            }
            self.markers.store(false, Ordering::Relaxed);
        }
        // SAFETY: as above.
        let protected = unsafe { mprotect(guard, GUARD_BYTES, MprotectFlags::empty()) };
        protected.map_err(|e| self.out_of_stacks("mprotect", e.raw_os_error()))
    }

    #[cold]
    fn out_of_stacks(&self, call: &str, errno: i32) -> Error {
        let e = std::io::Error::from_raw_os_error(errno);
        let remedy = match call {
            "mprotect" => {
                "each takes two of the mappings that vm.max_map_count allows; raise it, or use Linux 6.13, \
                 where guards are no mappings"
            }
            _ => "run fewer at a time, or with smaller stacks",
        };
        let message = format!(
            "there is no memory for one more uthread's stack of {} bytes: {call}: {e}: {remedy}",
            self.stack_bytes
        );
        Error::message(libc::ENOMEM, "runtime::stack", message)
    }
}

#[cfg(all(test, not(shuttle), not(miri)))]
mod tests {
    use super::*;
    use std::process::Command;

    /// As on a kernel that has no markers.
    fn without_markers() -> Stacks {
        let stacks = Stacks::new(STACK_BYTES_MIN).unwrap();
        stacks.markers.store(false, Ordering::Relaxed);
        stacks
    }

    fn has_no_access(range: &std::ops::Range<usize>) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (addresses, rest) = line.split_once(' ').unwrap();
            let (from, to) = addresses.split_once('-').unwrap();
            let address = |hex| usize::from_str_radix(hex, 16).unwrap();
            rest.starts_with("---p") && address(from) <= range.start && range.end <= address(to)
        })
    }

    #[test]
    fn without_markers_a_guard_is_a_page_without_access() {
        let stacks = without_markers();
        let taken: Vec<_> = (0..CHUNK_STACKS_MAX + 2).map(|_| stacks.take().unwrap()).collect();
        assert!(taken.iter().all(|stack| has_no_access(&stack.guard())));
        // And the stack above it can be used to its last byte.
        for stack in &taken {
            let low = stack.chunk.memory.as_ptr().with_addr(stack.guard().end).cast::<u8>();
            // SAFETY: the stack is nobody else's.
            unsafe { low.write(1) };
        }
    }

    /// Runs a test that is ignored, in a process of its own.
    fn runs_apart(test: &str) {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", &format!("runtime::switch::stack::tests::{test}")])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn large_stacks_are_reserved_few_at_a_time() {
        for (stack_bytes, stacks) in
            [(STACK_BYTES_MIN, CHUNK_STACKS_MAX), (64 << 10, CHUNK_STACKS_MAX), (4 << 20, 7), (64 << 20, 1)]
        {
            let stack = Stacks::new(stack_bytes).unwrap().take().unwrap();
            assert_eq!(stack.chunk.stacks, stacks, "of {stack_bytes} bytes");
        }
    }

    /// In a process of its own: no other test finds addresses meanwhile.
    #[test]
    fn where_addresses_are_few_fewer_stacks_are_reserved() {
        runs_apart("has_few_addresses");
    }

    #[test]
    #[ignore = "it takes most addresses from its process"]
    fn has_few_addresses() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

        const STACK: usize = 8 << 20;
        let used = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages = statm.split(' ').next().unwrap().parse::<usize>().unwrap();
            pages * rustix::param::page_size()
        };
        let usual = getrlimit(Resource::As);
        let few = (used() + 2 * STACK + STACK / 2) as u64;
        setrlimit(Resource::As, Rlimit { current: Some(few), maximum: usual.maximum }).unwrap();
        let stacks = Stacks::new(STACK).unwrap();
        let taken = [stacks.take(), stacks.take(), stacks.take()];
        setrlimit(Resource::As, usual).unwrap();
        let [Ok(first), Ok(second), Err(third)] = taken else { panic!("two fit") };
        assert_eq!([first.chunk.stacks, second.chunk.stacks], [1, 1]);
        assert!(third.errno() == libc::ENOMEM && third.to_string().contains("mmap"), "{third}");
        // And there are more again where there are more addresses.
        assert!(stacks.take().unwrap().chunk.stacks > 1);
    }

    /// In a process of its own: no other test finds room for its mappings meanwhile.
    #[test]
    fn without_markers_the_limit_on_mappings_is_named() {
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        if limit.trim().parse::<u64>().unwrap() > 300_000 {
            println!("SKIPPED: limit_on_mappings: vm.max_map_count is {}, out of reach", limit.trim());
            return;
        }
        runs_apart("takes_all_mappings");
    }

    #[test]
    #[ignore = "it takes all mappings of its process"]
    fn takes_all_mappings() {
        let stacks = without_markers();
        let mut taken = Vec::new();
        let refused = loop {
            match stacks.take() {
                Ok(stack) => taken.push(stack),
                Err(e) => break e,
            }
        };
        let count = taken.len();
        // Room for what a message takes.
        taken.truncate(count - 100);
        let said = refused.to_string();
        assert!(refused.errno() == libc::ENOMEM && count > 1000, "after {count}: {said}");
        assert!(said.contains("vm.max_map_count") && said.contains("mprotect"), "after {count}: {said}");
        // What was given back can be had again.
        stacks.give(taken.pop().unwrap());
        stacks.take().unwrap();
    }
}
