//! Several threads at a work that is divided among those who come.

use std::panic::resume_unwind;
use std::thread;

use super::signals::kept_off;

/// Runs `work` on the calling thread and on so many in all, and answers what each came to. Where no more threads can be made those
/// that there are do it all.
pub fn together<T: Send>(threads: usize, work: impl Fn() -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let start = |_| kept_off(|| thread::Builder::new().spawn_scoped(scope, &work)).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut all = vec![work()];
        // Not left to the scope, which waits by the thread's `park`, whose token may be the program's.
        all.extend(others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic))));
        all
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn so_many_work_and_a_panic_of_one_is_everybodys() {
        let meet = Barrier::new(3);
        assert_eq!(together(3, || meet.wait().is_leader()).into_iter().filter(|led| *led).count(), 1);
        assert_eq!(together(0, || 7), [7]);
        let own = thread::current().id();
        let fails = || together(2, || assert!(thread::current().id() == own, "another thread failed"));
        assert!(std::panic::catch_unwind(fails).is_err());
    }
}
