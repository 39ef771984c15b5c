//! What a run reports: rows, claims, and the JSON document that outside checks read.
//!
//! Rates and times are medians over rounds. The spread (lowest and highest round) stands beside every
//! rate, and no round is ever dropped.

use serde::Serialize;

use super::machine::{Machine, Memory};
use super::rows::{
    BOUNDED_BYTES_MIN, CPU_GROWTH_AT_MOST, MOUNT_ROWS, ROWS, SCALING_AT_LEAST, Target, WAITING_AT_MOST,
};

#[derive(Serialize)]
pub struct Report {
    pub machine: Machine,
    pub rows: Vec<Row>,
    pub claims: Vec<Claim>,
    /// How some rows came about, in words.
    pub notes: Vec<String>,
    /// Peers that could not be had, and why.
    pub skipped: Vec<String>,
}

/// One system's result in one row.
#[derive(Serialize, Clone, Debug)]
pub struct Row {
    pub name: String,
    pub system: String,
    pub threads: usize,
    pub ops_per_s: f64,
    /// Null where an operation moves no data.
    pub gib_per_s: Option<f64>,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Null where an operation moves no data, and where the CPU's clock was too coarse to say.
    pub cpu_s_per_gib: Option<f64>,
    pub cpu_us_per_op: Option<f64>,
    /// CPU time that threads spent on waiting for each other's copies, beside all the rest, as a ratio. Absent where
    /// nobody waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_share: Option<f64>,
    /// "process": all threads of this process. "machine": all processors less their idle rate, so that
    /// kernel threads and servers count.
    pub cpu_scope: &'static str,
    /// What each operation had reached when it returned.
    pub promise: &'static str,
    /// What its pool lies in: `domain`, `emulated` and `media`. Absent where there is no pool; what is emulated of a row that
    /// is a number its unit says.
    #[serde(flatten)]
    pub memory: Option<Memory>,
    pub rounds: usize,
    pub ops_per_s_min: f64,
    pub ops_per_s_max: f64,
    /// Every round, in order: round n of one system ran next to round n of the others.
    pub ops_per_s_rounds: Vec<f64>,
    /// Set in rows whose result is not a rate (mount times, bytes per file).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<&'static str>,
}

/// Rows, claims, and what a reader has to know.
#[derive(Default)]
pub struct Outcome {
    pub rows: Vec<Row>,
    pub claims: Vec<Claim>,
    pub notes: Vec<String>,
    pub skipped: Vec<String>,
}

impl Outcome {
    pub fn extend(&mut self, more: Outcome) {
        self.rows.extend(more.rows);
        self.claims.extend(more.claims);
        self.notes.extend(more.notes);
        self.skipped.extend(more.skipped);
    }
}

/// A target and what became of it.
#[derive(Serialize, Clone, Debug)]
pub struct Claim {
    pub row: String,
    /// Of which it is claimed.
    pub system: String,
    pub threads: usize,
    /// "ops_per_s", "cpu_s_per_gib", "waiting_share" or the unit of a row with a value.
    pub metric: &'static str,
    pub against: String,
    pub ratio: f64,
    /// Lowest and highest ratio of rounds that ran next to each other.
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// "at least" or "at most".
    pub bound: &'static str,
    pub target: f64,
    pub ok: bool,
}

impl Report {
    pub fn find(&self, name: &str, system: &str, threads: usize) -> Option<&Row> {
        find(&self.rows, name, system, threads)
    }

    /// Row names in report order, each with a thread count, once.
    pub fn lines(&self) -> Vec<(String, usize)> {
        let mut lines: Vec<(String, usize)> = Vec::new();
        for r in &self.rows {
            if !lines.iter().any(|(n, t)| *n == r.name && *t == r.threads) {
                lines.push((r.name.clone(), r.threads));
            }
        }
        lines
    }

    /// Systems in order of first appearance.
    pub fn systems(&self) -> Vec<&str> {
        let mut systems: Vec<&str> = Vec::new();
        for r in &self.rows {
            if !systems.contains(&r.system.as_str()) {
                systems.push(&r.system);
            }
        }
        systems
    }
}

fn find<'r>(rows: &'r [Row], name: &str, system: &str, threads: usize) -> Option<&'r Row> {
    rows.iter().find(|r| r.name == name && r.system == system && r.threads == threads)
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Holds the rows against the catalogue.
pub fn claims(rows: &[Row], cores: usize) -> Vec<Claim> {
    let mut claims = Vec::new();
    for spec in ROWS.iter().chain(MOUNT_ROWS) {
        for lode in rows.iter().filter(|r| r.name == spec.name && r.system == "lode") {
            claims.extend(spec.targets.iter().filter_map(|t| claim(rows, lode, *t)));
            // Threads that share a core do not scale.
            claims.extend(scaling_claim(rows, lode).filter(|_| lode.threads <= cores));
        }
        if spec.bytes >= BOUNDED_BYTES_MIN {
            let bounded =
                |row: &&Row| row.name == spec.name && row.waiting_share.is_some() && row.threads > 1;
            claims.extend(rows.iter().filter(bounded).flat_map(|row| bounded_claims(rows, row)));
        }
    }
    claims
}

/// Where an engine holds callers down, more of them take no more of the CPU for each byte than one does, and those that
/// wait next to nothing (efficient-pm §7.2).
fn bounded_claims(rows: &[Row], row: &Row) -> Vec<Claim> {
    let of = |metric, against: &str, ratio: f64, target| Claim {
        row: row.name.clone(),
        system: row.system.clone(),
        threads: row.threads,
        metric,
        against: against.to_owned(),
        ratio,
        ratio_min: ratio,
        ratio_max: ratio,
        bound: "at most",
        target,
        ok: ratio <= target,
    };
    let one = find(rows, &row.name, &row.system, 1).and_then(|one| one.cpu_s_per_gib);
    let growth = row.cpu_s_per_gib.zip(one).map(|(many, one)| many / one);
    let growth = growth.map(|growth| of("cpu_s_per_gib", "one thread", growth, CPU_GROWTH_AT_MOST));
    let waiting = row.waiting_share.map(|share| of("waiting_share", "the rest", share, WAITING_AT_MOST));
    growth.into_iter().chain(waiting).collect()
}

/// `None` where the peer did not run, or the CPU clock said nothing.
fn claim(rows: &[Row], lode: &Row, target: Target) -> Option<Claim> {
    let (against, metric, bound, want) = match target {
        Target::Speed { against, ratio } => (against, "ops_per_s", "at least", ratio),
        Target::Cpu { against, ratio } => (against, "cpu_s_per_gib", "at most", ratio),
    };
    let peer = find(rows, &lode.name, against, lode.threads)?;
    let (ratio, rounds) = match target {
        Target::Speed { .. } => (lode.ops_per_s / peer.ops_per_s, paired_ratios(lode, peer)),
        Target::Cpu { .. } => {
            let ratio = lode.cpu_s_per_gib? / peer.cpu_s_per_gib?;
            (ratio, vec![ratio])
        }
    };
    let ok = if bound == "at least" { ratio >= want } else { ratio <= want };
    Some(Claim {
        row: lode.name.clone(),
        system: lode.system.clone(),
        threads: lode.threads,
        metric,
        against: against.to_string(),
        ratio,
        ratio_min: rounds.iter().copied().fold(ratio, f64::min),
        ratio_max: rounds.iter().copied().fold(ratio, f64::max),
        bound,
        target: want,
        ok,
    })
}

fn paired_ratios(a: &Row, b: &Row) -> Vec<f64> {
    a.ops_per_s_rounds.iter().zip(&b.ops_per_s_rounds).map(|(x, y)| x / y).collect()
}

/// More threads against one thread of lode, where both ran.
fn scaling_claim(rows: &[Row], lode: &Row) -> Option<Claim> {
    if lode.threads == 1 {
        return None;
    }
    let one = find(rows, &lode.name, "lode", 1)?;
    let limit_gain = find(rows, &lode.name, "limit", lode.threads)
        .zip(find(rows, &lode.name, "limit", 1))
        .map(|(many, one)| many.ops_per_s / one.ops_per_s);
    // What two threads must reach, for each doubling.
    let wanted = SCALING_AT_LEAST.powf((lode.threads as f64).log2());
    let target = limit_gain.map_or(wanted, |gain| wanted.min(gain));
    let ratio = lode.ops_per_s / one.ops_per_s;
    let rounds = paired_ratios(lode, one);
    Some(Claim {
        row: lode.name.clone(),
        system: lode.system.clone(),
        threads: lode.threads,
        metric: "ops_per_s",
        against: "lode, 1 thread".to_string(),
        ratio,
        ratio_min: rounds.iter().copied().fold(ratio, f64::min),
        ratio_max: rounds.iter().copied().fold(ratio, f64::max),
        bound: "at least",
        target,
        ok: ratio >= target,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(system: &str, threads: usize, ops: f64, cpu: f64) -> Row {
        Row {
            name: "write-rand-4k".into(),
            system: system.into(),
            threads,
            ops_per_s: ops,
            gib_per_s: Some(ops * 4096.0 / (1u64 << 30) as f64),
            p50_us: 1.0,
            p99_us: 2.0,
            cpu_s_per_gib: Some(cpu),
            cpu_us_per_op: Some(1.0),
            waiting_share: None,
            cpu_scope: "process",
            promise: "durable",
            memory: None,
            rounds: 1,
            ops_per_s_min: ops,
            ops_per_s_max: ops,
            ops_per_s_rounds: vec![ops],
            value: None,
            unit: None,
        }
    }

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn a_target_is_judged_against_the_peer_of_the_same_row_and_thread_count() {
        let rows = [
            row("lode", 1, 210.0, 1.0),
            row("tmpfs", 1, 100.0, 2.0),
            row("limit", 1, 220.0, 1.0),
            row("lode", 2, 300.0, 1.0),
            row("limit", 2, 308.0, 1.0),
        ];
        let claims = claims(&rows, 2);
        let verdict: Vec<(&str, usize, bool)> =
            claims.iter().map(|c| (c.against.as_str(), c.threads, c.ok)).collect();
        assert_eq!(
            verdict,
            [
                ("tmpfs", 1, true),          // 2.1 x, needs 2 x
                ("limit", 1, false),         // 0.95 x, needs 1 x
                ("tmpfs", 1, true),          // CPU 0.5 x, may be 0.55 x
                ("limit", 2, false),         // 0.97 x
                ("lode, 1 thread", 2, true), // 1.43 x; limit itself gains 1.4 x only
            ]
        );
    }
}
