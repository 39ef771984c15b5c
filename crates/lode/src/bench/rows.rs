//! What is measured: one entry per row, with the operation, its size and what it is held to.
//!
//! The targets are ratios against another system *in the same run*, because an absolute number says
//! more about the machine and its neighbours than about the code.

/// The operation that a row repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    WriteRandom,
    WriteSequential,
    ReadRandom,
    ReadSequential,
    Append,
    Create,
    Stat,
    Readdir,
    Rename,
    Unlink,
}

impl Work {
    /// Works on names; such rows share one directory per worker and run in catalogue order, each on
    /// what the one before left.
    pub fn on_names(self) -> bool {
        matches!(self, Work::Create | Work::Stat | Work::Readdir | Work::Rename | Work::Unlink)
    }
}

/// What lode must reach.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Target {
    /// Operations per second, at least `ratio` times those of `against`.
    Speed { against: &'static str, ratio: f64 },
    /// CPU seconds per GiB, at most `ratio` times those of `against`.
    Cpu { against: &'static str, ratio: f64 },
}

#[derive(Debug)]
pub struct RowSpec {
    pub name: &'static str,
    pub work: Work,
    /// Bytes per operation; 0 where an operation moves no data.
    pub bytes: usize,
    pub targets: &'static [Target],
}

const fn tmpfs(ratio: f64) -> Target {
    Target::Speed { against: "tmpfs", ratio }
}

const fn limit(ratio: f64) -> Target {
    Target::Speed { against: "limit", ratio }
}

const fn cpu_tmpfs(ratio: f64) -> Target {
    Target::Cpu { against: "tmpfs", ratio }
}

const fn row(name: &'static str, work: Work, bytes: usize, targets: &'static [Target]) -> RowSpec {
    RowSpec { name, work, bytes, targets }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The rows of the in-process bench, in the order they run.
pub const ROWS: &[RowSpec] = &[
    row("write-rand-4k", Work::WriteRandom, 4 * KIB, &[tmpfs(2.0), limit(1.0), cpu_tmpfs(0.55)]),
    row("write-rand-64k", Work::WriteRandom, 64 * KIB, &[tmpfs(3.2), limit(0.90), cpu_tmpfs(0.30)]),
    row("write-rand-1m", Work::WriteRandom, MIB, &[tmpfs(3.3), limit(0.92)]),
    row("write-seq-1m", Work::WriteSequential, MIB, &[tmpfs(3.3), limit(0.92)]),
    row("read-rand-4k", Work::ReadRandom, 4 * KIB, &[tmpfs(1.5), limit(0.90)]),
    row("read-rand-64k", Work::ReadRandom, 64 * KIB, &[tmpfs(1.5), limit(1.10)]),
    row("read-seq-1m", Work::ReadSequential, MIB, &[tmpfs(1.65), limit(1.30)]),
    row("append-100b", Work::Append, 100, &[tmpfs(1.0)]),
    row("append-4k", Work::Append, 4 * KIB, &[tmpfs(2.5)]),
    row("overwrite-64b", Work::WriteRandom, 64, &[tmpfs(1.5)]),
    row("overwrite-512b", Work::WriteRandom, 512, &[tmpfs(1.5)]),
    row("create", Work::Create, 0, &[tmpfs(2.5)]),
    row("stat", Work::Stat, 0, &[tmpfs(4.0)]),
    row("readdir", Work::Readdir, 0, &[tmpfs(2.0)]),
    row("rename", Work::Rename, 0, &[tmpfs(2.5)]),
    row("unlink", Work::Unlink, 0, &[tmpfs(2.5)]),
];

/// Where the time of one operation goes: the sizes of EasyIO's Figure 1, and larger ones.
pub const BREAKDOWN_ROWS: &[RowSpec] = &[
    row("write-4k", Work::WriteRandom, 4 * KIB, &[]),
    row("write-8k", Work::WriteRandom, 8 * KIB, &[]),
    row("write-16k", Work::WriteRandom, 16 * KIB, &[]),
    row("write-32k", Work::WriteRandom, 32 * KIB, &[]),
    row("write-64k", Work::WriteRandom, 64 * KIB, &[]),
    row("write-128k", Work::WriteRandom, 128 * KIB, &[]),
    row("write-256k", Work::WriteRandom, 256 * KIB, &[]),
    row("write-512k", Work::WriteRandom, 512 * KIB, &[]),
    row("write-1m", Work::WriteRandom, MIB, &[]),
    row("read-4k", Work::ReadRandom, 4 * KIB, &[]),
    row("read-8k", Work::ReadRandom, 8 * KIB, &[]),
    row("read-16k", Work::ReadRandom, 16 * KIB, &[]),
    row("read-32k", Work::ReadRandom, 32 * KIB, &[]),
    row("read-64k", Work::ReadRandom, 64 * KIB, &[]),
    row("read-128k", Work::ReadRandom, 128 * KIB, &[]),
    row("read-256k", Work::ReadRandom, 256 * KIB, &[]),
    row("read-512k", Work::ReadRandom, 512 * KIB, &[]),
    row("read-1m", Work::ReadRandom, MIB, &[]),
];

/// An engine that holds callers down does so for copies of this size and more.
pub const BOUNDED_BYTES_MIN: usize = 64 * KIB;

/// CPU time a byte of many such callers, beside that of one.
pub const CPU_GROWTH_AT_MOST: f64 = 1.15;

/// CPU time of those that wait, beside all the rest.
pub const WAITING_AT_MOST: f64 = 0.02;

/// More threads on private files must give this much of one thread, or what `limit` gains.
pub const SCALING_AT_LEAST: f64 = 1.8;

/// The rows of the mount: the same programs on lode's mount and on bindfs over tmpfs. Data rows are run
/// by fio, name rows by the loop of the other rows.
pub const MOUNT_ROWS: &[RowSpec] = &[
    row("mount-write-seq-128k", Work::WriteSequential, 128 * KIB, &[MOUNT_TARGET]),
    row("mount-read-seq-128k", Work::ReadSequential, 128 * KIB, &[MOUNT_TARGET]),
    row("mount-write-rand-4k", Work::WriteRandom, 4 * KIB, &[MOUNT_TARGET]),
    row("mount-read-rand-4k", Work::ReadRandom, 4 * KIB, &[MOUNT_TARGET]),
    row("mount-create", Work::Create, 0, &[MOUNT_TARGET]),
    row("mount-stat", Work::Stat, 0, &[MOUNT_TARGET]),
    row("mount-rename", Work::Rename, 0, &[]),
    row("mount-unlink", Work::Unlink, 0, &[]),
];

/// Every mount row has to be better than its peer.
const MOUNT_TARGET: Target = Target::Speed { against: "bindfs", ratio: 1.0 };

/// Groups of rows with a value each: pools of a size that shows what mounting and files cost at rest, what uthreads
/// cost, what a device leaves of a core, what applications make of that, what waiting costs, and what classes of copies
/// do to each other.
pub const VALUE_ROWS: &[&str] =
    &["million", "terabyte", "uthreads", "offload", "orderless", "apps", "waits", "qos"];
