//! NUMA nodes: which CPUs one has, and on which one a thread runs.

use std::sync::{Arc, LazyLock};

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A node with CPUs.
#[derive(Clone, Debug)]
pub struct Node {
    pub number: u32,
    cpus: Arc<[usize]>,
}

impl Node {
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// Keeps the calling thread on those of its CPUs that the process may use; where that is none, or the host forbids it,
    /// the thread runs on any that the process may use.
    pub(super) fn keep_thread(&self) {
        keep_thread_on(self.cpus.iter().copied());
    }
}

/// Lets the calling thread run on all CPUs of the process, whatever the thread that started it is kept on.
pub(super) fn free_thread() {
    keep_thread_on(0..CpuSet::MAX_CPU);
}

/// Where the process may run, by its first thread: `taskset`, a service's `CPUAffinity`. Asked once, because a program
/// keeps its own threads where it likes later.
static ALLOWED: LazyLock<Option<CpuSet>> = LazyLock::new(|| sched_getaffinity(Some(getpid())).ok());

/// Notes where the process may run, unless that was done before.
pub(super) fn note_allowed() {
    LazyLock::force(&ALLOWED);
}

fn keep_thread_on(cpus: impl Iterator<Item = usize>) {
    let set = within(cpus, ALLOWED.as_ref());
    if let Err(e) = sched_setaffinity(None, &set) {
        tracing::debug!("a thread that copies stays where it was started: {e}");
    }
}

/// Those of the CPUs that are allowed; all that are where none of them is. Where nobody knows, all of them.
fn within(cpus: impl Iterator<Item = usize>, allowed: Option<&CpuSet>) -> CpuSet {
    let mut set = CpuSet::new();
    let is_allowed = |cpu: &usize| *cpu < CpuSet::MAX_CPU && allowed.is_none_or(|set| set.is_set(*cpu));
    cpus.filter(is_allowed).for_each(|cpu| set.set(cpu));
    match allowed {
        Some(allowed) if set.count() == 0 => *allowed,
        _ => set,
    }
}

/// Nodes with CPUs, as the kernel lists them; none where it does not.
pub fn nodes() -> &'static [Node] {
    static NODES: LazyLock<Vec<Node>> = LazyLock::new(|| {
        let dir = std::fs::read_dir("/sys/devices/system/node");
        let mut found: Vec<Node> =
            dir.into_iter().flatten().flatten().filter_map(|e| node(&e.path())).collect();
        found.sort_by_key(|node| node.number);
        found
    });
    &NODES
}

fn node(dir: &std::path::Path) -> Option<Node> {
    let number = dir.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
    let cpus = cpu_list(&std::fs::read_to_string(dir.join("cpulist")).ok()?)?;
    (!cpus.is_empty()).then(|| Node { number, cpus: cpus.into() })
}

/// `0-3,8`, as sysfs has it.
pub fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// The node that this thread runs on; none where there is one only, or nobody knows.
pub(super) fn current() -> Option<u32> {
    let nodes = nodes();
    if nodes.len() < 2 {
        return None;
    }
    let cpu = sched_getcpu();
    nodes.iter().find(|node| node.cpus.contains(&cpu)).map(|node| node.number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(cpu_list("5"), Some(vec![5]));
        assert_eq!(cpu_list("\n"), Some(vec![]));
        assert_eq!(cpu_list("3-x"), None);
    }

    #[test]
    fn threads_stay_where_the_process_may_run() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|cpu| set.set(*cpu));
            set
        };
        let allowed = set(&[1, 2, 9]);
        let within = |cpus: &[usize], allowed: Option<&CpuSet>| super::within(cpus.iter().copied(), allowed);
        assert!(within(&[0, 1, 2, 3], Some(&allowed)) == set(&[1, 2]));
        assert!(super::within(0..CpuSet::MAX_CPU, Some(&allowed)) == allowed);
        assert!(within(&[4, 5], Some(&allowed)) == allowed, "a node that the process may not use");
        assert!(within(&[4, 5], None) == set(&[4, 5]), "nobody knows");
        assert!(within(&[4, CpuSet::MAX_CPU], None) == set(&[4]));
    }
}
