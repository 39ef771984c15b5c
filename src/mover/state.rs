//! What goes on in a mover, for people and for programs that watch: engines in use, their channels, who waits.
//!
//! Numbers are read one by one, while copies go on: they are each right, and together nearly of one moment.

use super::class::Class;
use super::manager::{EPOCH_NS, GroupState};
use super::owners::OwnerState;
use super::{EngineKind, Moved, Mover};
use crate::media::Media;

/// See the file's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Who copies for whoever names nobody, and in which class.
    pub engine: EngineKind,
    /// Why that one cannot be used: then the CPU copies.
    pub missing: Option<String>,
    pub class: Option<Class>,
    pub moved: Moved,
    /// How long an epoch of the channel manager is.
    pub epoch_ns: u64,
    /// Engines that have had a copy of a class.
    pub engines: Vec<EngineState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineState {
    pub engine: EngineKind,
    pub groups: Vec<GroupState>,
    pub owners: Vec<OwnerState>,
}

impl<M: Media> Mover<M> {
    /// Starts no engine.
    pub fn state(&self) -> State {
        let kinds = EngineKind::NAMED.into_iter().chain([EngineKind::Given]);
        let engines = kinds.filter_map(|engine| {
            let manager = self.in_use(engine)?.manager;
            let groups = manager.state();
            (!groups.is_empty()).then(|| EngineState { engine, groups, owners: manager.owners() })
        });
        State {
            engine: self.kind(),
            missing: self.missing().map(str::to_owned),
            class: self.class,
            moved: self.moved(),
            epoch_ns: EPOCH_NS,
            engines: engines.collect(),
        }
    }
}
