//! Rows whose result is a value that is to be small: a time, or bytes.

use super::report::{Claim, Outcome, Row, median};

/// Such rows, and the claims on them.
pub type Values = (Vec<Row>, Vec<Claim>);

impl From<Values> for Outcome {
    fn from((rows, claims): Values) -> Outcome {
        Outcome { rows, claims, ..Outcome::default() }
    }
}

/// A row whose result is `unit`, and the claim that it is at most `limit`.
pub fn value(name: &str, all: &[f64], unit: &'static str, limit: f64) -> (Row, Claim) {
    let middle = median(all);
    let (min, max) = all.iter().fold((middle, middle), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
    // Rows of bytes have no rate and no time; times are also given as those of one operation.
    let ms = if unit == "ms" { middle } else { 0.0 };
    let rate = |ms: f64| if ms > 0.0 { 1e3 / ms } else { 0.0 };
    let rates: Vec<f64> = if unit == "ms" { all.iter().map(|v| rate(*v)).collect() } else { Vec::new() };
    let row = Row {
        name: name.to_string(),
        system: "lode".to_string(),
        threads: 1,
        ops_per_s: rate(ms),
        gib_per_s: None,
        p50_us: ms * 1e3,
        p99_us: if unit == "ms" { max * 1e3 } else { 0.0 },
        cpu_s_per_gib: None,
        cpu_us_per_op: None,
        waiting_share: None,
        cpu_scope: "process",
        promise: "",
        memory: None,
        rounds: all.len(),
        ops_per_s_min: rates.iter().copied().fold(rate(ms), f64::min),
        ops_per_s_max: rates.iter().copied().fold(rate(ms), f64::max),
        ops_per_s_rounds: rates,
        value: Some(middle),
        unit: Some(unit),
    };
    let claim = Claim {
        row: name.to_string(),
        system: "lode".to_string(),
        threads: 1,
        metric: unit,
        against: String::new(),
        ratio: middle,
        ratio_min: min,
        ratio_max: max,
        bound: "at most",
        target: limit,
        ok: middle <= limit,
    };
    (row, claim)
}
