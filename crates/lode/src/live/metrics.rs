//! The state in Prometheus' text format, version 0.0.4: names begin with `lodestone_`, seconds and bytes, `_total` for what
//! only grows.

use std::fmt::{Display, Write};

use super::state::{Engine, Group, PHASES, State};

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const NS_PER_S: f64 = 1e9;

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

type Labels<'a> = &'a [(&'a str, &'a dyn Display)];

/// Metrics, family by family.
struct Text {
    out: String,
    family: &'static str,
}

impl Text {
    /// What follows is samples of this one.
    fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> &mut Text {
        self.family = name;
        let kind = kind.name();
        let _ = writeln!(self.out, "# HELP lodestone_{name} {help}\n# TYPE lodestone_{name} {kind}");
        self
    }

    fn sample(&mut self, labels: Labels<'_>, value: impl Display) {
        let _ = write!(self.out, "lodestone_{}", self.family);
        for (n, (name, value)) in labels.iter().enumerate() {
            let before = if n == 0 { '{' } else { ',' };
            let _ = write!(self.out, "{before}{name}=\"{}\"", escaped(&value.to_string()));
        }
        let _ = writeln!(self.out, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn one(&mut self, name: &'static str, kind: Kind, help: &str, value: impl Display) {
        self.family(name, kind, help).sample(&[], value);
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All of it.
pub fn render(state: &State) -> String {
    let mut text = Text { out: String::with_capacity(8192), family: "" };
    mount(&mut text, state);
    pool(&mut text, state);
    copies(&mut text, state);
    channels(&mut text, state);
    owners(&mut text, state);
    accounting(&mut text, state);
    text.out
}

fn mount(text: &mut Text, state: &State) {
    let (server, pool, mover) = (&state.server, &state.pool, &state.mover);
    let none = String::new();
    let mount_point = server.mount_point.as_ref().unwrap_or(&none);
    let class = mover.class.as_ref().unwrap_or(&none);
    let owner = mover.owner.map(|owner| owner.to_string()).unwrap_or_default();
    text.family("mount_info", Kind::Gauge, "Always 1: which pool is mounted where, and who copies for whom.")
        .sample(
            &[
                ("version", &state.version),
                ("pool", &pool.path),
                ("label", &pool.label),
                ("uuid", &pool.uuid),
                ("mount_point", mount_point),
                ("domain", &pool.domain),
                ("domain_emulated", &pool.emulated),
                ("engine", &mover.engine),
                ("emulated", &mover.emulated),
                ("class", class),
                ("owner", &owner),
            ],
            1,
        );
    let read_only = u8::from(server.read_only);
    text.one("mount_read_only", Kind::Gauge, "1 where the pool is mounted for reading only.", read_only);
    let uptime = server.uptime_ns as f64 / NS_PER_S;
    text.one("mount_uptime_seconds", Kind::Gauge, "Time since the pool was mounted.", uptime);
}

fn pool(text: &mut Text, state: &State) {
    let pool = &state.pool;
    let free_bytes = pool.blocks_free.saturating_mul(pool.block_bytes);
    let gauges = [
        ("pool_size_bytes", "Size of the pool.", pool.bytes),
        ("pool_free_bytes", "Bytes that are free in the pool, in whole blocks.", free_bytes),
        ("pool_blocks", "Blocks of the pool.", pool.blocks),
        ("pool_blocks_free", "Blocks that are free.", pool.blocks_free),
        ("pool_blocks_bad", "Blocks that failed and are not used.", pool.blocks_bad),
        ("pool_inodes", "Inodes that the pool can have as it is.", pool.inodes),
        ("pool_inodes_free", "Inodes that are free.", pool.inodes_free),
        ("sync_epoch", "Current sync epoch; it goes on from mount to mount.", pool.sync_epoch),
    ];
    for (name, help, value) in gauges {
        text.one(name, Kind::Gauge, help, value);
    }
}

fn copies(text: &mut Text, state: &State) {
    let mover = &state.mover;
    let counters = [
        ("served_read_bytes_total", "Bytes that requests read.", state.served.read_bytes),
        ("served_written_bytes_total", "Bytes that requests wrote.", state.served.written_bytes),
        ("copies_total", "Copies handed over to engines.", mover.copies),
        ("copied_bytes_total", "Bytes that engines copied.", mover.bytes),
        ("copies_left_to_cpu_total", "Copies that no engine took, and the CPU made.", mover.busy),
        (
            "copies_finished_by_cpu_total",
            "Copies of which the CPU did what an engine left undone.",
            mover.finished,
        ),
    ];
    for (name, help, value) in counters {
        text.one(name, Kind::Counter, help, value);
    }
}

fn channels(text: &mut Text, state: &State) {
    type Of = fn(&super::state::ClassCounts) -> u64;
    let by_class: [(&str, Kind, &str, Of); 4] = [
        (
            "class_copies_total",
            Kind::Counter,
            "Copies of a class that ended; of class bandwidth, pieces.",
            |c| c.copies,
        ),
        ("class_bytes_total", Kind::Counter, "Bytes of a class that were copied.", |c| c.bytes),
        (
            "class_held_back_total",
            Kind::Counter,
            "Times that one was not let in: a read that the CPU copied, a piece that had to wait.",
            |c| c.held_back,
        ),
        ("class_under_way", Kind::Gauge, "Copies of a class with the engine.", |c| c.under_way.into()),
    ];
    for (name, kind, help, of) in by_class {
        text.family(name, kind, help);
        for (engine, group) in groups(state) {
            for (class, counts) in group.classes() {
                let labels: Labels<'_> =
                    &[("engine", &engine.engine), ("group", &group.group), ("class", &class)];
                text.sample(labels, of(counts));
            }
        }
    }
    text.family("channel_depth", Kind::Gauge, "Copies of a class under way on a channel.");
    for (engine, group) in groups(state) {
        for (channel, depth) in group.depths.iter().enumerate() {
            let labels: Labels<'_> =
                &[("engine", &engine.engine), ("group", &group.group), ("channel", &channel)];
            text.sample(labels, depth);
        }
    }
    let epoch = state.mover.epoch_ns as f64 / NS_PER_S;
    text.one("channel_epoch_seconds", Kind::Gauge, "How long an epoch of the channel manager is.", epoch);
    type OfGroup = fn(&Group) -> u64;
    let by_group: [(&str, Kind, &str, OfGroup); 5] = [
        (
            "bandwidth_budget_bytes",
            Kind::Gauge,
            "Bytes that class bandwidth may hand over in an epoch of the channel manager.",
            |g| g.budget_bytes,
        ),
        ("bandwidth_at_rest", Kind::Gauge, "1 while the channel of class bandwidth is at rest.", |g| {
            g.at_rest.into()
        }),
        ("bandwidth_rests_total", Kind::Counter, "Times that it was told to rest.", |g| g.rests),
        ("channel_epochs_total", Kind::Counter, "Epochs that the channel manager looked at.", |g| g.epochs),
        ("channel_late_epochs_total", Kind::Counter, "Those in which class latency was late.", |g| {
            g.late_epochs
        }),
    ];
    for (name, kind, help, of) in by_group {
        text.family(name, kind, help);
        for (engine, group) in groups(state) {
            text.sample(&[("engine", &engine.engine), ("group", &group.group)], of(group));
        }
    }
}

fn groups(state: &State) -> impl Iterator<Item = (&Engine, &Group)> {
    state.mover.engines.iter().flat_map(|engine| engine.groups.iter().map(move |group| (engine, group)))
}

fn owners(text: &mut Text, state: &State) {
    type Of = fn(&super::state::Owner) -> u64;
    let by_owner: [(&str, Kind, &str, Of); 3] = [
        (
            "owner_bytes_total",
            Kind::Counter,
            "Bytes of class bandwidth that were copied for an owner.",
            |o| o.bytes,
        ),
        ("owner_under_way", Kind::Gauge, "Pieces of an owner with the engine.", |o| o.under_way.into()),
        ("owner_waiting", Kind::Gauge, "Requests of an owner that have more pieces.", |o| o.waiting.into()),
    ];
    for (name, kind, help, of) in by_owner {
        text.family(name, kind, help);
        for engine in &state.mover.engines {
            for owner in &engine.owners {
                text.sample(&[("engine", &engine.engine), ("owner", &owner.owner)], of(owner));
            }
        }
    }
}

fn accounting(text: &mut Text, state: &State) {
    let accounting = &state.accounting;
    let sampled = format!("sampled: one in {} is watched, on average", accounting.one_in);
    let help = "One read or write in so many is watched, on average.";
    text.one("watched_one_in", Kind::Gauge, help, accounting.one_in);
    let help = format!("Reads and writes that were watched ({sampled}).");
    text.family("watched_operations_total", Kind::Counter, &help);
    for watched in &accounting.operations {
        text.sample(&[("op", &watched.op)], watched.operations);
    }
    let help = format!("Bytes that reads and writes asked for which were watched ({sampled}).");
    text.family("watched_bytes_total", Kind::Counter, &help);
    for watched in &accounting.operations {
        text.sample(&[("op", &watched.op)], watched.bytes);
    }
    let help = format!("Time of reads and writes that were watched, by what it went into ({sampled}).");
    text.family("watched_seconds_total", Kind::Counter, &help);
    for watched in &accounting.operations {
        for phase in PHASES {
            let labels: Labels<'_> = &[("op", &watched.op), ("phase", &phase.name())];
            text.sample(labels, watched.ns(phase) as f64 / NS_PER_S);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::super::state::example;
    use super::*;

    #[test]
    fn every_sample_has_a_family_and_no_two_are_the_same() {
        let text = render(&example());
        let mut kinds = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut helped = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                helped = rest.split(' ').next().unwrap();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(name, helped, "HELP stands before TYPE");
                assert!(kinds.insert(name, kind).is_none(), "{name} comes twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
                assert_eq!(series.split('{').next(), Some(helped), "{line} stands in its family");
                assert!(seen.insert(series), "{line} comes twice");
            }
        }
        assert!(
            text.contains("lodestone_channel_depth{engine=\"emu\",group=\"0\",channel=\"3\"} 2\n"),
            "{text}"
        );
        assert!(
            text.contains("lodestone_watched_seconds_total{op=\"write\",phase=\"copy\"} 0.00002\n"),
            "{text}"
        );
        assert!(text.contains("label=\"a \\\"label\\\"\\\\\""), "{text}");
        assert!(text.contains("sampled: one in 64"), "{text}");
    }
}
