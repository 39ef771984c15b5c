//! The state of a mounted pool at one moment, as one JSON document: what `GET /state` and `lode top --json` print.
//!
//! Counts are since the mount unless it is said otherwise, and never shrink. Numbers are read one by one while the pool is
//! used: each is right, and together they are nearly of one moment.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use lodestone::account::{Op, Phase, Times};
use lodestone::fs::Fs;
use lodestone::media::Media;
use lodestone::mover::class::Class;
use lodestone::mover::manager::{ClassState, GroupState};
use lodestone::mover::owners::OwnerState;
use lodestone::mover::state::EngineState;
use serde::{Deserialize, Serialize};

use crate::door::traffic::Traffic;
use crate::pool::uuid_text;
use crate::target::HostPath;

/// See the file's head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: String,
    pub server: ServerState,
    pub pool: PoolState,
    pub served: Served,
    pub mover: MoverState,
    pub accounting: Accounting,
}

/// The process that serves the mount.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerState {
    pub pid: u32,
    pub uptime_ns: u64,
    /// None where the mount is another process's.
    pub mount_point: Option<String>,
    /// The exact mount point where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_point_hex: Option<String>,
    pub read_only: bool,
    /// Addresses that are answered on.
    pub listens: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolState {
    pub path: String,
    /// The exact path where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_hex: Option<String>,
    pub label: String,
    pub uuid: String,
    /// The persistence domain that the pool works by.
    #[serde(default)]
    pub domain: String,
    /// It is only assumed: *emulated PM*.
    #[serde(default)]
    pub emulated: bool,
    pub bytes: u64,
    pub block_bytes: u64,
    pub blocks: u64,
    pub blocks_free: u64,
    pub blocks_bad: u64,
    pub inodes: u64,
    pub inodes_free: u64,
    /// Goes on from mount to mount.
    pub sync_epoch: u64,
}

/// What requests moved that reached the server: the kernel answers some of its own cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub read_bytes: u64,
    pub written_bytes: u64,
}

/// Who copies data, and how much of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoverState {
    /// Of whoever names none.
    pub engine: String,
    /// No device, but a model of one.
    pub emulated: bool,
    /// Why it cannot be used: then the CPU copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    pub class: Option<String>,
    /// Of class bandwidth.
    pub owner: Option<u32>,
    /// Copies handed over to engines, and bytes that engines copied of them.
    pub copies: u64,
    pub bytes: u64,
    /// Copies that were left to the CPU.
    pub busy: u64,
    /// Copies of which the CPU did what the engine left undone.
    pub finished: u64,
    /// How long an epoch of the channel manager is.
    pub epoch_ns: u64,
    /// Those that have had a copy of a class.
    pub engines: Vec<Engine>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Engine {
    pub engine: String,
    pub emulated: bool,
    pub groups: Vec<Group>,
    pub owners: Vec<Owner>,
}

/// The channels in front of some regions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub group: usize,
    /// Copies of a class under way, channel by channel.
    pub depths: Vec<u32>,
    pub latency: ClassCounts,
    pub bandwidth: ClassCounts,
    /// What class bandwidth may hand over in an epoch.
    pub budget_bytes: u64,
    /// The channel of class bandwidth is at rest, and was told to so often.
    pub at_rest: bool,
    pub rests: u64,
    /// Epochs that were looked at, and those in which class latency was late.
    pub epochs: u64,
    pub late_epochs: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassCounts {
    pub under_way: u32,
    /// Of class bandwidth, pieces.
    pub copies: u64,
    pub bytes: u64,
    pub held_back: u64,
}

/// Whose copies of class bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Owner {
    pub owner: u32,
    pub bytes: u64,
    /// Pieces with the engine, and requests that have more of them.
    pub under_way: u32,
    pub waiting: u32,
}

/// Where the time of reads and writes goes: of those that were watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accounting {
    /// One operation in so many is watched, on average.
    pub one_in: u32,
    pub operations: Vec<Watched>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Watched {
    pub op: String,
    pub operations: u64,
    pub bytes: u64,
    pub copy_ns: u64,
    pub metadata_ns: u64,
    pub index_ns: u64,
    pub wait_ns: u64,
}

/// The phases of an operation, in the order in which they are shown.
pub const PHASES: [Phase; 4] = Phase::ALL;

impl Watched {
    pub fn ns(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Copy => self.copy_ns,
            Phase::Metadata => self.metadata_ns,
            Phase::Index => self.index_ns,
            Phase::Wait => self.wait_ns,
        }
    }

    fn of(op: Op, times: &Times, ns: &[u64; PHASES.len()]) -> Watched {
        let [copy_ns, metadata_ns, index_ns, wait_ns] = *ns;
        let (operations, bytes) = (times.operations, times.bytes);
        Watched { op: name(op).to_owned(), operations, bytes, copy_ns, metadata_ns, index_ns, wait_ns }
    }
}

const OPS: [Op; 2] = [Op::Read, Op::Write];

fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
    }
}

/// Whoever knows the state; none once there is nothing left to tell.
pub trait Source: Send + Sync {
    fn state(&self) -> Option<State>;
}

/// A mounted pool. It does not keep it open.
pub struct Mounted<M: Media> {
    fs: Weak<Fs<M>>,
    traffic: Arc<Traffic>,
    path: PathBuf,
    mount_point: Option<PathBuf>,
    listens: Vec<String>,
    /// The domain is only assumed.
    emulated: bool,
    begun: Instant,
    /// Largest so far, by operation and phase. How long a tick is becomes known ever better, and with that sums that
    /// nothing was added to would shrink.
    ns: Mutex<[[u64; PHASES.len()]; OPS.len()]>,
}

impl<M: Media> Mounted<M> {
    pub fn new(
        fs: &Arc<Fs<M>>,
        traffic: &Arc<Traffic>,
        path: PathBuf,
        mount_point: Option<PathBuf>,
        listens: Vec<String>,
        emulated: bool,
    ) -> Mounted<M> {
        let (fs, traffic, begun) = (Arc::downgrade(fs), Arc::clone(traffic), Instant::now());
        Mounted { fs, traffic, path, mount_point, listens, emulated, begun, ns: Mutex::default() }
    }

    fn pool(&self, fs: &Fs<M>) -> PoolState {
        let (info, space) = (fs.info(), fs.statfs());
        let (path, path_hex) = HostPath::of(&self.path);
        PoolState {
            path: path.text(),
            path_hex,
            label: info.label,
            uuid: uuid_text(&info.uuid),
            domain: fs.media().domain().to_string(),
            emulated: self.emulated,
            bytes: info.bytes,
            block_bytes: space.block_bytes.into(),
            blocks: space.blocks,
            blocks_free: space.blocks_free,
            blocks_bad: info.bad_blocks,
            inodes: space.inodes,
            inodes_free: space.inodes_free,
            sync_epoch: fs.sync_epoch(),
        }
    }

    fn accounting(&self, fs: &Fs<M>) -> Accounting {
        let times = OPS.map(|op| fs.times(op));
        let mut largest = self.ns.lock().expect("nobody panics with it");
        for (largest, times) in largest.iter_mut().zip(&times) {
            for (ns, phase) in largest.iter_mut().zip(PHASES) {
                *ns = (*ns).max(times.ns(phase));
            }
        }
        let operations =
            OPS.iter().zip(&times).zip(largest.iter()).map(|((op, times), ns)| Watched::of(*op, times, ns));
        Accounting { one_in: fs.ledger().one_in(), operations: operations.collect() }
    }
}

impl<M: Media + Send + Sync + 'static> Source for Mounted<M> {
    fn state(&self) -> Option<State> {
        let fs = self.fs.upgrade()?;
        let (mount_point, mount_point_hex) = HostPath::of_some(self.mount_point.as_deref());
        Some(State {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            server: ServerState {
                pid: std::process::id(),
                uptime_ns: self.begun.elapsed().as_nanos() as u64,
                mount_point: mount_point.map(|dir| dir.text()),
                mount_point_hex,
                read_only: fs.statfs().read_only,
                listens: self.listens.clone(),
            },
            pool: self.pool(&fs),
            served: Served {
                read_bytes: self.traffic.read_bytes(),
                written_bytes: self.traffic.written_bytes(),
            },
            mover: MoverState::of(&fs.mover().state()),
            accounting: self.accounting(&fs),
        })
    }
}

impl MoverState {
    fn of(state: &lodestone::mover::state::State) -> MoverState {
        MoverState {
            engine: state.engine.name().to_owned(),
            emulated: state.engine.emulated(),
            missing: state.missing.clone(),
            class: state.class.map(|class| class.name().to_owned()),
            owner: state.class.and_then(|class| match class {
                Class::Bandwidth(owner) => Some(owner.id()),
                Class::Latency => None,
            }),
            copies: state.moved.copies,
            bytes: state.moved.bytes,
            busy: state.moved.busy,
            finished: state.moved.finished,
            epoch_ns: state.epoch_ns,
            engines: state.engines.iter().map(Engine::of).collect(),
        }
    }
}

impl Engine {
    fn of(state: &EngineState) -> Engine {
        Engine {
            engine: state.engine.name().to_owned(),
            emulated: state.engine.emulated(),
            groups: state.groups.iter().map(Group::of).collect(),
            owners: state.owners.iter().map(Owner::of).collect(),
        }
    }
}

impl Group {
    fn of(state: &GroupState) -> Group {
        Group {
            group: state.group,
            depths: state.depths.clone(),
            latency: ClassCounts::of(&state.latency),
            bandwidth: ClassCounts::of(&state.bandwidth),
            budget_bytes: state.budget_bytes,
            at_rest: state.at_rest,
            rests: state.rests,
            epochs: state.epochs,
            late_epochs: state.late_epochs,
        }
    }

    /// Both classes, by name.
    pub fn classes(&self) -> [(&'static str, &ClassCounts); 2] {
        [("latency", &self.latency), ("bandwidth", &self.bandwidth)]
    }
}

impl ClassCounts {
    fn of(state: &ClassState) -> ClassCounts {
        let ClassState { under_way, copies, bytes, held_back } = *state;
        ClassCounts { under_way, copies, bytes, held_back }
    }
}

impl Owner {
    fn of(state: &OwnerState) -> Owner {
        let OwnerState { owner, bytes, under_way, waiting } = *state;
        Owner { owner, bytes, under_way, waiting }
    }
}

/// A state as tests want it: two engines' worth of everything.
#[cfg(test)]
pub fn example() -> State {
    let class = |copies, bytes| ClassCounts { under_way: 1, copies, bytes, held_back: copies / 2 };
    let watched = |op: &str, operations| Watched {
        op: op.to_owned(),
        operations,
        bytes: operations * 4096,
        copy_ns: operations * 1000,
        metadata_ns: operations * 500,
        index_ns: operations * 100,
        wait_ns: operations * 400,
    };
    State {
        version: "0.1.0".to_owned(),
        server: ServerState {
            pid: 4711,
            uptime_ns: 3_000_000_000,
            mount_point: Some("/mnt".to_owned()),
            mount_point_hex: None,
            read_only: false,
            listens: vec!["127.0.0.1:9847".to_owned()],
        },
        pool: PoolState {
            path: "/pools/demo.pool".to_owned(),
            path_hex: None,
            label: "a \"label\"\\".to_owned(),
            uuid: "00112233-4455-6677-8899-aabbccddeeff".to_owned(),
            domain: "page-cache".to_owned(),
            emulated: false,
            bytes: 4 << 30,
            block_bytes: 4096,
            blocks: 1 << 20,
            blocks_free: 1 << 19,
            blocks_bad: 0,
            inodes: 1000,
            inodes_free: 990,
            sync_epoch: 12,
        },
        served: Served { read_bytes: 10 << 20, written_bytes: 20 << 20 },
        mover: MoverState {
            engine: "emu".to_owned(),
            emulated: true,
            missing: None,
            class: Some("bandwidth".to_owned()),
            owner: Some(7),
            copies: 100,
            bytes: 100 << 16,
            busy: 3,
            finished: 1,
            epoch_ns: 200_000,
            engines: vec![Engine {
                engine: "emu".to_owned(),
                emulated: true,
                groups: vec![Group {
                    group: 0,
                    depths: vec![1, 0, 0, 2],
                    latency: class(40, 40 << 16),
                    bandwidth: class(60, 60 << 16),
                    budget_bytes: 64 << 16,
                    at_rest: true,
                    rests: 9,
                    epochs: 5000,
                    late_epochs: 12,
                }],
                owners: vec![
                    Owner { owner: 7, bytes: 40 << 16, under_way: 2, waiting: 1 },
                    Owner { owner: 9, bytes: 20 << 16, under_way: 0, waiting: 0 },
                ],
            }],
        },
        accounting: Accounting { one_in: 64, operations: vec![watched("read", 10), watched("write", 20)] },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_understood() {
        let state = example();
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<State>(&text).unwrap(), state);
    }
}
