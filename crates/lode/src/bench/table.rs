//! The report as text for a terminal: plain, aligned, no colour.

use std::fmt::Write;

use super::plan::ROUNDS;
use super::report::{Claim, Report, Row};

const NAME_WIDTH: usize = 24;
const CELL_WIDTH: usize = 15;

pub fn render(report: &Report) -> String {
    let mut out = header(report);
    for note in &report.notes {
        let _ = writeln!(out, "{note}");
    }
    let rates: &dyn Fn(&Row) -> bool = &|r| r.value.is_none();
    section(&mut out, report, "ops/s, median", rates, &|r| si(r.ops_per_s));
    section(&mut out, report, "us, p50 / p99", rates, &|r| {
        format!("{} / {}", digits(r.p50_us), digits(r.p99_us))
    });
    section(&mut out, report, "CPU s/GiB", &|r| r.cpu_s_per_gib.is_some(), &|r| {
        r.cpu_s_per_gib.map_or(String::new(), |s| format!("{s:.3}"))
    });
    section(&mut out, report, "waiting's CPU, % of rest", &|r| r.waiting_share.is_some(), &|r| {
        r.waiting_share.map_or(String::new(), |share| format!("{:.2}", share * 100.0))
    });
    section(&mut out, report, "CPU us per op", &|r| r.gib_per_s.is_none() && r.value.is_none(), &|r| {
        r.cpu_us_per_op.map_or("-".into(), |s| format!("{s:.3}"))
    });
    section(&mut out, report, "at rest", &|r| r.value.is_some(), &|r| {
        format!("{} {}", digits(r.value.unwrap_or(0.0)), r.unit.unwrap_or(""))
    });
    verdicts(&mut out, &report.claims, report.machine.rounds);
    for skipped in &report.skipped {
        let _ = writeln!(out, "SKIPPED  {skipped}");
    }
    out
}

fn header(report: &Report) -> String {
    let m = &report.machine;
    format!(
        "{}\n{}, {} cores, Linux {}; files in {}{}\n{} rounds of {} ms, systems in turn, after a warm-up; \
         timer {} costs {:.0} ns per operation, not subtracted; load {:.1} before, {:.1} after\n",
        m.media,
        m.cpu,
        m.cores,
        m.kernel,
        m.place,
        m.profile_note(),
        m.rounds,
        m.slice_ms,
        m.timer,
        m.timer_ns,
        m.load_before,
        m.load_after
    )
}

/// One table: rows down, systems across.
fn section(
    out: &mut String,
    report: &Report,
    title: &str,
    wanted: &dyn Fn(&Row) -> bool,
    cell: &dyn Fn(&Row) -> String,
) {
    let rows: Vec<&Row> = report.rows.iter().filter(|r| wanted(r)).collect();
    if rows.is_empty() {
        return;
    }
    let has = |system: &&str| rows.iter().any(|r| r.system == *system);
    let systems: Vec<&str> = report.systems().into_iter().filter(has).collect();
    let _ = write!(out, "\n{title:<NAME_WIDTH$} thr");
    for system in &systems {
        let _ = write!(out, " {system:>CELL_WIDTH$}");
    }
    out.push('\n');
    for (name, threads) in report.lines() {
        let of = |system: &&str| {
            rows.iter().find(|r| r.name == name && r.system == *system && r.threads == threads)
        };
        let cells: Vec<String> = systems.iter().map(|s| of(s).map_or("-".to_string(), |r| cell(r))).collect();
        if cells.iter().all(|c| c == "-") {
            continue;
        }
        let _ = write!(out, "{name:<NAME_WIDTH$} {threads:>3}");
        for cell in &cells {
            let _ = write!(out, " {cell:>CELL_WIDTH$}");
        }
        out.push('\n');
    }
}

fn verdicts(out: &mut String, claims: &[Claim], rounds: usize) {
    if claims.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{:<NAME_WIDTH$} thr  lode is (lowest to highest round), target", "claims");
    for c in claims {
        let by = if c.system == "lode" { String::new() } else { format!(", {}", c.system) };
        let what = match c.metric {
            "cpu_s_per_gib" => format!("{:.2} x CPU of {}{by}", c.ratio, c.against),
            "waiting_share" => format!("{:.3} x CPU of {}{by}, waiting", c.ratio, c.against),
            "ops_per_s" => format!("{:.2} x {}{by}", c.ratio, c.against),
            unit => format!("{} {unit}", digits(c.ratio)),
        };
        let spread = format!("({} to {})", digits(c.ratio_min), digits(c.ratio_max));
        let verdict = if c.ok { "ok" } else { "MISS" };
        let _ = writeln!(
            out,
            "{:<NAME_WIDTH$} {:>3}  {what:<24} {spread:<18} {} {:<6} {verdict}",
            c.row,
            c.threads,
            c.bound,
            digits(c.target)
        );
    }
    let missed = claims.iter().filter(|c| !c.ok).count();
    let held = claims.len() - missed;
    let few = too_few(rounds).map_or(String::new(), |few| format!("; {few}"));
    let _ = writeln!(out, "{held} of {} claims hold, {missed} missed{few}", claims.len());
}

/// What is said of claims that stand on fewer rounds than they should.
pub fn too_few(rounds: usize) -> Option<String> {
    let s = if rounds == 1 { "" } else { "s" };
    (rounds < ROUNDS)
        .then(|| format!("claims are of {rounds} round{s}, fewer than the {ROUNDS} that a claim needs"))
}

/// Three significant digits with an SI prefix.
pub fn si(v: f64) -> String {
    let (scaled, prefix) = match v {
        v if v >= 1e9 => (v / 1e9, " G"),
        v if v >= 1e6 => (v / 1e6, " M"),
        v if v >= 1e3 => (v / 1e3, " k"),
        v => (v, ""),
    };
    format!("{}{prefix}", digits(scaled))
}

/// Three significant digits.
pub fn digits(v: f64) -> String {
    match v {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_of_few_rounds_say_so() {
        let claims = super::super::value::value("million-media", &[1.0], "bytes/file", 2.0).1;
        let of = |rounds| {
            let mut out = String::new();
            verdicts(&mut out, std::slice::from_ref(&claims), rounds);
            out
        };
        assert!(of(ROUNDS).ends_with("1 of 1 claims hold, 0 missed\n"), "{}", of(ROUNDS));
        assert!(of(2).contains("claims are of 2 rounds, fewer than the 5"), "{}", of(2));
        assert!(of(1).contains("1 round, fewer"), "{}", of(1));
    }

    #[test]
    fn numbers_keep_three_digits() {
        let got = [0.5, 12.34, 123.4, 1234.0, 2_345_678.0, 1.5e9].map(si);
        assert_eq!(got, ["0.50", "12.3", "123", "1.23 k", "2.35 M", "1.50 G"]);
    }
}
