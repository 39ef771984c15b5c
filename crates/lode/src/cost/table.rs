//! The report as text for a terminal: a line per run, their mean and deviation, and what the numbers mean.

use std::fmt::Write;

use crate::bench::digits;
use crate::size::Size;

use super::report::{Report, Run, Spread, Summary};

const CELL_WIDTH: usize = 10;

/// A column: its head, a run's number, and the numbers of all runs.
type Column = (&'static str, fn(&Run) -> Option<f64>, fn(&Summary) -> Option<Spread>);

const COLUMNS: &[Column] = &[
    ("wall s", |r| Some(r.wall_s), |s| s.wall_s),
    ("CPU s", |r| Some(r.cpu_s), |_| None),
    ("noise s", |r| Some(r.noise_s), |_| None),
    ("net CPU s", |r| Some(r.net_cpu_s), |s| s.net_cpu_s),
    ("own", |r| Some(r.own_cpu_s), |s| s.own_cpu_s),
    ("elsewhere", |r| Some(r.elsewhere_cpu_s), |s| s.elsewhere_cpu_s),
    ("processes", |r| Some(r.processes_cpu_s), |s| s.processes_cpu_s),
    ("steal s", |r| Some(r.steal_s), |_| None),
    ("GiB/s", |r| r.gib_per_s, |s| s.gib_per_s),
    ("CPU s/GiB", |r| r.cpu_s_per_gib, |s| s.cpu_s_per_gib),
    ("proc s/GiB", |r| r.processes_cpu_s_per_gib, |s| s.processes_cpu_s_per_gib),
    ("J", |r| r.joules, |s| s.joules),
    ("J/GiB", |r| r.joules_per_gib, |s| s.joules_per_gib),
];

pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let m = &report.machine;
    let _ = writeln!(out, "{}", command_line(report));
    let _ = writeln!(out, "{}, {} CPUs, Linux {}", m.cpu, m.cpus, m.kernel);
    let has = |column: &&Column| report.runs.iter().any(|r| column.1(r).is_some());
    let columns: Vec<&Column> = COLUMNS.iter().filter(has).collect();
    line(&mut out, "\nrun", columns.iter().map(|c| c.0.to_string()));
    for (i, run) in report.runs.iter().enumerate() {
        line(&mut out, &(i + 1).to_string(), columns.iter().map(|c| cell(c.1(run))));
    }
    line(&mut out, "mean", columns.iter().map(|c| cell(c.2(&report.summary).map(|s| s.mean))));
    let deviation = |c: &&Column| cell(c.2(&report.summary).and_then(|s| s.deviation));
    line(&mut out, "deviation", columns.iter().map(deviation));
    out.push('\n');
    footer(&mut out, report);
    out
}

fn line(out: &mut String, head: &str, cells: impl Iterator<Item = String>) {
    let width = CELL_WIDTH + head.matches('\n').count();
    let _ = write!(out, "{head:<width$}");
    for cell in cells {
        let _ = write!(out, " {cell:>CELL_WIDTH$}");
    }
    let end = out.trim_end().len();
    out.truncate(end);
    out.push('\n');
}

/// Three digits behind the point, as many as steps of 10 ms deserve.
fn cell(number: Option<f64>) -> String {
    number.map_or(String::new(), |n| format!("{n:.3}"))
}

fn footer(out: &mut String, report: &Report) {
    let _ = match &report.idle {
        Some(idle) => writeln!(
            out,
            "noise      {:.3} CPU s per second ({:.1} % of all CPUs), seen for {:.1} s before; subtracted from CPU s",
            idle.cpu_s_per_s,
            idle.busy_share * 100.0,
            idle.seconds
        ),
        None => writeln!(out, "noise      not measured, nothing subtracted"),
    };
    let _ = writeln!(
        out,
        "own        what the command's processes used; elsewhere: kernel threads, servers, interrupts"
    );
    let _ = writeln!(
        out,
        "processes  net CPU s summed over all processes, to which the kernel is exact; without interrupts"
    );
    let _ = writeln!(out, "bytes      {}", bytes(report));
    let _ = match (&report.energy_note, report.energy_from) {
        (Some(note), _) => writeln!(out, "energy     {note}"),
        (None, from) => {
            let idle = report.idle.as_ref().and_then(|i| i.watts);
            let idle =
                idle.map_or(String::new(), |w| format!("; {} W while idle, not subtracted", digits(w)));
            writeln!(out, "energy     from {}{idle}", from.unwrap_or("nowhere"))
        }
    };
    for warning in &report.warnings {
        let _ = writeln!(out, "WARNING    {warning}");
    }
}

/// How many bytes each run moved and who says so.
fn bytes(report: &Report) -> String {
    let all: Vec<u64> = report.runs.iter().filter_map(|r| r.bytes).collect();
    let (Some(least), Some(most)) = (all.iter().min(), all.iter().max()) else {
        return report.bytes_note.unwrap_or("not known").to_string();
    };
    let from = match report.runs.iter().find_map(|r| r.bytes_from) {
        Some("fio") => "as fio reports",
        Some("pool") => "as the pool's server counted, whoever caused it",
        Some("block") => "as the block device counted, whoever caused it",
        _ => "as --bytes says",
    };
    match least == most {
        true => format!("{} in each run, {from}", Size(*most)),
        false => format!("{} to {} in a run, {from}", Size(*least), Size(*most)),
    }
}

/// The command as people typed it, or nearly: words with blanks are quoted.
pub fn command_line(report: &Report) -> String {
    let words =
        report.command.iter().map(|word| match word.contains(char::is_whitespace) || word.is_empty() {
            true => format!("'{word}'"),
            false => word.clone(),
        });
    words.collect::<Vec<_>>().join(" ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::*;

    #[test]
    fn every_run_and_the_mean_have_a_line() {
        let text = render(&sample(true));
        let cells = |head: &str| -> Vec<String> {
            let line =
                text.lines().find(|l| l.starts_with(head)).unwrap_or_else(|| panic!("no {head} in {text}"));
            line.split_whitespace().map(String::from).collect()
        };
        assert_eq!(
            cells("1 "),
            [
                "1", "2.000", "2.000", "0.080", "1.920", "1.500", "0.420", "1.920", "0.000", "0.500",
                "1.920", "1.920"
            ]
        );
        let means = ["mean", "2.000", "2.420", "1.500", "0.920", "2.420", "0.500", "2.420", "2.420"];
        assert_eq!(cells("mean"), means);
        assert!(cells("deviation").last().unwrap() == "0.500");
        for part in ["2.0 % of all CPUs", "1 GiB in each run", "not available here", "CPU s/GiB"] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn columns_that_nobody_filled_are_left_out() {
        let text = render(&sample(false));
        assert!(!text.contains("s/GiB") && !text.contains("J/GiB"), "{text}");
        assert!(text.contains("--pool POOL or --block DEV"), "{text}");
    }
}
