//! What happened between two looks at a mount.
//!
//! Whoever is new since the first look began at 0; where the mount is another one, nothing is known to have happened. The
//! time between is the server's own, so that a late answer does not change rates.

use crate::live::state::{ClassCounts, Engine, Group, Owner, PHASES, State, Watched};

const NS_PER_S: f64 = 1e9;

/// Two looks, and the time in between.
pub struct Look<'a> {
    pub state: &'a State,
    earlier: &'a State,
    /// 0 where they cannot be compared.
    pub seconds: f64,
}

impl<'a> Look<'a> {
    pub fn new(earlier: &'a State, state: &'a State) -> Look<'a> {
        let (before, now) = (&earlier.server, &state.server);
        let same = before.pid == now.pid && earlier.pool.uuid == state.pool.uuid;
        let ns = if same { now.uptime_ns.saturating_sub(before.uptime_ns) } else { 0 };
        Look { state, earlier, seconds: ns as f64 / NS_PER_S }
    }

    /// Each second.
    pub fn rate(&self, now: u64, before: u64) -> f64 {
        match self.seconds > 0.0 {
            true => now.saturating_sub(before) as f64 / self.seconds,
            false => 0.0,
        }
    }

    pub fn moved(&self, of: impl Fn(&State) -> u64) -> f64 {
        self.rate(of(self.state), of(self.earlier))
    }

    fn engine(&self, name: &str) -> Option<&'a Engine> {
        self.earlier.mover.engines.iter().find(|engine| engine.engine == name)
    }

    /// Those of now, each with what it was.
    pub fn groups(&self) -> impl Iterator<Item = (&'a Engine, &'a Group, Option<&'a Group>)> {
        self.state.mover.engines.iter().flat_map(|engine| {
            let before = self.engine(&engine.engine);
            engine.groups.iter().map(move |group| {
                let of = |engine: &'a Engine| engine.groups.iter().find(|other| other.group == group.group);
                (engine, group, before.and_then(of))
            })
        })
    }

    /// Owners that did something, or have something to do, by what they got, and their share of their engine's.
    pub fn owners(&self) -> Vec<Share<'a>> {
        let mut shares = Vec::new();
        for engine in &self.state.mover.engines {
            let before = self.engine(&engine.engine);
            let bytes = |owner: &Owner| {
                let of = |engine: &Engine| {
                    engine.owners.iter().find(|other| other.owner == owner.owner).map(|o| o.bytes)
                };
                self.rate(owner.bytes, before.and_then(of).unwrap_or(0))
            };
            let all: f64 = engine.owners.iter().map(&bytes).sum();
            let of = |owner: &'a Owner| {
                let bytes_per_s = bytes(owner);
                Share { engine, owner, bytes_per_s, share: if all > 0.0 { bytes_per_s / all } else { 0.0 } }
            };
            shares.extend(engine.owners.iter().map(of));
        }
        shares
            .sort_by(|a, b| b.bytes_per_s.total_cmp(&a.bytes_per_s).then(a.owner.owner.cmp(&b.owner.owner)));
        shares
    }

    /// Operations of each kind: of those that were watched, all of them estimated.
    pub fn operations(&self) -> Vec<Operations<'a>> {
        let one_in = f64::from(self.state.accounting.one_in.max(1));
        let of = |now: &'a Watched| {
            let earlier = self.earlier.accounting.operations.iter().find(|before| before.op == now.op);
            let since = |of: &dyn Fn(&Watched) -> u64| of(now).saturating_sub(earlier.map_or(0, of));
            let count = since(&|watched| watched.operations);
            let ns = PHASES.map(|phase| since(&|watched| watched.ns(phase)));
            let total: f64 = ns.iter().map(|ns| *ns as f64).sum();
            Operations {
                op: &now.op,
                watched: count,
                per_s: self.rate(count, 0) * one_in,
                bytes_per_s: self.rate(since(&|watched| watched.bytes), 0) * one_in,
                us: if count > 0 { total / count as f64 / 1000.0 } else { 0.0 },
                shares: ns.map(|ns| if total > 0.0 { ns as f64 / total } else { 0.0 }),
            }
        };
        self.state.accounting.operations.iter().map(of).collect()
    }
}

/// What a class did, and what it was before.
pub fn class(before: Option<&Group>, n: usize) -> ClassCounts {
    before.map_or_else(ClassCounts::default, |group| *group.classes()[n].1)
}

pub struct Share<'a> {
    pub engine: &'a Engine,
    pub owner: &'a Owner,
    pub bytes_per_s: f64,
    /// Of 1, of what owners of the same engine got.
    pub share: f64,
}

pub struct Operations<'a> {
    pub op: &'a str,
    /// So many were watched.
    pub watched: u64,
    /// Estimated.
    pub per_s: f64,
    pub bytes_per_s: f64,
    /// Each, in microseconds.
    pub us: f64,
    /// Of 1, by phase.
    pub shares: [f64; PHASES.len()],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::state::example;

    #[test]
    fn rates_are_by_the_clock_of_the_server() {
        let before = example();
        let mut now = before.clone();
        now.server.uptime_ns += 2_000_000_000;
        now.mover.bytes += 1000;
        now.mover.engines[0].owners[1].bytes += 3000;
        now.mover.engines[0].owners[0].bytes += 1000;
        now.accounting.operations[1].operations += 10;
        now.accounting.operations[1].copy_ns += 30_000;
        now.accounting.operations[1].wait_ns += 10_000;
        let look = Look::new(&before, &now);
        assert_eq!(look.moved(|state| state.mover.bytes), 500.0);
        let owners = look.owners();
        assert_eq!((owners[0].owner.owner, owners[0].bytes_per_s, owners[0].share), (9, 1500.0, 0.75));
        let writes = &look.operations()[1];
        assert_eq!((writes.watched, writes.per_s, writes.us), (10, 320.0, 4.0));
        assert_eq!(writes.shares, [0.75, 0.0, 0.0, 0.25]);
        assert_eq!(look.operations()[0].us, 0.0);
    }

    #[test]
    fn another_mount_is_not_compared() {
        let before = example();
        let mut now = before.clone();
        now.mover.bytes = 0;
        now.server.pid += 1;
        let look = Look::new(&before, &now);
        assert_eq!((look.seconds, look.moved(|state| state.mover.bytes)), (0.0, 0.0));
        // A clock that stands, and counts that shrink, divide by nothing.
        let look = Look::new(&now, &now);
        assert_eq!(look.moved(|state| state.mover.copies), 0.0);
    }
}
