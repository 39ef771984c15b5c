//! The report as text for a terminal: what the profile says, what it said before, and the numbers behind it.

use std::fmt::Write;

use lodestone::mover::profile::{BIN_BYTES, BINS};

use super::report::{BandwidthRow, BinFacts, EngineFacts, InFlight, Report, SizeRow, Sweep, Threshold};
use crate::bench::digits;
use crate::size::Size;

const HEAD_WIDTH: usize = 26;
const CELL_WIDTH: usize = 9;
const WIDE_CELL_WIDTH: usize = 14;

pub fn render(report: &Report) -> String {
    let mut out = String::new();
    header(&mut out, report);
    copies(&mut out, report);
    thresholds(&mut out, report);
    bandwidth(&mut out, report);
    cpu_time(&mut out, report);
    beside(&mut out, report);
    footer(&mut out, report);
    out
}

/// Where and how, in two lines; the picture has them too.
pub fn subtitle(report: &Report) -> [String; 2] {
    let (machine, media, method) = (&report.machine, &report.media, &report.method);
    let pool = media.pool.as_deref().unwrap_or("a pool made for it");
    let emulated = if media.emulated { ": emulated PM" } else { "" };
    let place = format!(
        "{}, {} CPUs; {pool} in {}, domain {}{emulated}",
        machine.cpu,
        machine.cpus,
        media.memory.join(" and "),
        media.domain
    );
    let quick = if method.quick { "quick: " } else { "" };
    let how = format!(
        "{quick}{} rounds of {} ms, engines in turn; {} files of {}",
        method.rounds,
        method.slice_ms,
        method.files,
        Size(method.file_bytes)
    );
    [place, how]
}

fn header(out: &mut String, report: &Report) {
    for text in subtitle(report) {
        let _ = writeln!(out, "{text}");
    }
    let decision = &report.decision;
    let _ = writeln!(
        out,
        "a decision of the scheduler takes {} ns (noise {}, aim {})",
        digits(decision.ns),
        digits(decision.noise_ns),
        decision.aim_ns
    );
}

fn line(out: &mut String, head: &str, cells: impl IntoIterator<Item = String>, width: usize) {
    let _ = write!(out, "{head:<HEAD_WIDTH$}");
    for cell in cells {
        let _ = write!(out, " {cell:>width$}");
    }
    let end = out.trim_end().len();
    out.truncate(end);
    out.push('\n');
}

fn words(lane: &str) -> String {
    lane.replace('_', " ")
}

/// The name as it is everywhere: an emulated device says so.
fn name(engine: &EngineFacts) -> String {
    if engine.emulated { format!("{} (emulated)", engine.name) } else { engine.name.to_owned() }
}

fn sweep(out: &mut String, who: &str, sweep: &Sweep) {
    let rates = sweep.points.iter().map(|point| digits(point.gib_per_s.median));
    let found = match (sweep.enough, sweep.saturated) {
        (Some(copies), true) => format!("  {copies} are enough"),
        (Some(copies), false) => format!("  {copies}, and perhaps more"),
        (None, _) => String::new(),
    };
    line(out, who, rates.chain([found]), CELL_WIDTH);
}

/// What copies by the calling threads bring, and what they take.
fn callers(out: &mut String, way: &str, sweep: &Sweep) {
    let rates = sweep.points.iter().map(|point| digits(point.gib_per_s.median));
    line(out, &format!("cpu {way}, GiB/s"), rates, CELL_WIDTH);
    let cpu = sweep.points.iter().map(|point| format!("{:.3}", point.cpu_s_per_gib.median));
    let found = match (sweep.enough, sweep.saturated) {
        (Some(copies), true) => format!("  more than {copies} cost more than they bring"),
        (Some(copies), false) => format!("  {copies}, and perhaps more"),
        (None, _) => String::new(),
    };
    line(out, &format!("cpu {way}, CPU s/GiB"), cpu.chain([found]), CELL_WIDTH);
}

fn counts(out: &mut String, sweep: &Sweep, head: &str) {
    line(out, head, sweep.points.iter().map(|point| point.copies.to_string()), CELL_WIDTH);
}

fn copies(out: &mut String, report: &Report) {
    let copies = &report.copies;
    let head = format!("\ncopies at a time, {}", Size(copies.size_bytes as u64));
    counts(out, &copies.write, &format!("{head:<width$}", width = HEAD_WIDTH + 1));
    callers(out, "write", &copies.write);
    callers(out, "read", &copies.read);
    for engine in &report.engines {
        for (lane, of_device) in engine.limits.iter().flat_map(|limits| &limits.in_flight) {
            counts(out, of_device, "");
            sweep(out, &format!("{} {}", name(engine), words(lane)), of_device);
        }
    }
    let was = match copies.was {
        Some(was) if was != copies.concurrency => format!(" (was {was})"),
        Some(_) => " (as before)".to_owned(),
        None => String::new(),
    };
    let _ = writeln!(
        out,
        "concurrency {}{was}: copies of semaphore, threads of delegate, for each region",
        copies.concurrency
    );
}

fn shown(threshold: Threshold) -> String {
    match threshold {
        Threshold(lodestone::mover::profile::NEVER) => "never".to_owned(),
        Threshold(bytes) => Size(bytes as u64).to_string(),
    }
}

fn in_flight(max: InFlight) -> String {
    max.0.map_or("none".to_owned(), |max| max.to_string())
}

fn thresholds(out: &mut String, report: &Report) {
    if report.engines.iter().all(|engine| engine.limits.is_none()) {
        return;
    }
    let heads = ["from size on", "was", "change"].map(str::to_owned);
    line(out, &format!("\n{:<HEAD_WIDTH$}", "the engine copies"), heads, WIDE_CELL_WIDTH);
    for engine in &report.engines {
        let Some(limits) = &engine.limits else { continue };
        for row in &limits.thresholds {
            let was = row.was.map_or("-".to_owned(), shown);
            let change = match (row.was, row.change_percent) {
                (Some(was), _) if was == row.threshold => "=".to_owned(),
                (_, Some(percent)) => percent_text(percent),
                _ => "-".to_owned(),
            };
            let cells = [shown(row.threshold), was, change];
            line(out, &format!("{} {}", name(engine), words(row.lane)), cells, WIDE_CELL_WIDTH);
        }
        if !limits.in_flight.is_empty() {
            let was = limits.in_flight_was.map_or("-".to_owned(), in_flight);
            let cells = [in_flight(limits.in_flight_max), was];
            line(out, &format!("{} in flight at most", name(engine)), cells, WIDE_CELL_WIDTH);
        }
    }
}

fn percent_text(percent: f64) -> String {
    if percent == 0.0 { "=".to_owned() } else { format!("{percent:+.0} %") }
}

fn bandwidth(out: &mut String, report: &Report) {
    let head = |bin: usize| match BIN_BYTES.get(bin) {
        Some(end) => format!("<= {}", Size(*end as u64)),
        None => format!("> {}", Size(BIN_BYTES[BINS - 2] as u64)),
    };
    line(out, &format!("\n{:<HEAD_WIDTH$}", "GiB/s, change"), (0..BINS).map(head), WIDE_CELL_WIDTH);
    let cell = |bin: &BinFacts| {
        let change =
            bin.change_percent.map_or(String::new(), |percent| format!(" {}", percent_text(percent)));
        format!("{}{change}", digits(bin.gib_per_s.median))
    };
    for engine in &report.engines {
        let row = |out: &mut String, row: &BandwidthRow| {
            let head = format!("{} {} x{}", name(engine), words(row.lane), row.threads);
            line(out, &head, row.bins.iter().map(cell), WIDE_CELL_WIDTH);
        };
        engine.bandwidth.iter().for_each(|bandwidth| row(out, bandwidth));
    }
}

/// The sizes that were measured, for the head of a table.
fn sizes(report: &Report) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        report.engines.iter().flat_map(|engine| engine.sizes.iter().map(|size| size.bytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// As `4K`: a column is narrow.
pub fn short(bytes: usize) -> String {
    match bytes >> 20 {
        0 => format!("{}K", bytes >> 10),
        mib => format!("{mib}M"),
    }
}

fn cpu_time(out: &mut String, report: &Report) {
    line(out, &format!("\n{:<HEAD_WIDTH$}", "CPU s/GiB"), sizes(report).into_iter().map(short), CELL_WIDTH);
    for engine in &report.engines {
        for bandwidth in &engine.bandwidth {
            let of_row = |size: &&SizeRow| size.lane == bandwidth.lane && size.threads == bandwidth.threads;
            let rows: Vec<&SizeRow> = engine.sizes.iter().filter(of_row).collect();
            let head = format!("{} {} x{}", name(engine), words(bandwidth.lane), bandwidth.threads);
            line(out, &head, rows.iter().map(|row| format!("{:.3}", row.cpu_s_per_gib.median)), CELL_WIDTH);
            if rows.iter().any(|row| row.device_cpu_s_per_gib.is_some()) {
                let device = rows.iter().map(|row| format!("{:.3}", row.device_cpu_s_per_gib.unwrap_or(0.0)));
                line(out, "  of the emulated device", device, CELL_WIDTH);
            }
        }
    }
}

fn beside(out: &mut String, report: &Report) {
    if report.engines.iter().all(|engine| engine.beside_cpu.is_empty()) {
        return;
    }
    let head = format!("\n{:<HEAD_WIDTH$}", "times the cpu's; *: pays");
    line(out, &head, sizes(report).into_iter().map(short), CELL_WIDTH);
    for engine in &report.engines {
        for lane in ["local_write", "local_read", "remote_write", "remote_read"] {
            let rows: Vec<_> = engine.beside_cpu.iter().filter(|row| row.lane == lane).collect();
            if rows.is_empty() {
                continue;
            }
            let star = |pays: bool| if pays { "*" } else { "" };
            let cpu = rows.iter().map(|row| format!("{:.2}{}", row.cpu_time.median, star(row.pays)));
            line(out, &format!("{} {}, CPU", name(engine), words(lane)), cpu, CELL_WIDTH);
            let time = rows.iter().map(|row| format!("{:.2}{}", row.time.median, star(row.pays)));
            line(out, &format!("{} {}, time", name(engine), words(lane)), time, CELL_WIDTH);
        }
    }
}

fn footer(out: &mut String, report: &Report) {
    let profile = &report.profile;
    let path = profile.path.as_deref().unwrap_or("nowhere");
    let _ = match (profile.written, &profile.path) {
        (true, _) => writeln!(out, "\nwritten to {path}"),
        (false, Some(_)) => writeln!(out, "\nnot written; it would go to {path}"),
        (false, None) => writeln!(out, "\nnot written"),
    };
    if let Some(before) = &profile.before {
        let _ = writeln!(out, "compared with the one of {before}; =: no difference beyond the noise");
    }
    if let Some(why) = &profile.not_compared {
        let _ = writeln!(out, "not compared with the one that stands there: {why}");
    }
    if !profile.kept.is_empty() {
        let _ = writeln!(out, "kept from the one before: {}", profile.kept.join(", "));
    }
    for skipped in &report.skipped {
        let _ = writeln!(out, "SKIPPED    {skipped}");
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "WARNING    {warning}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::*;

    #[test]
    fn what_changed_stands_beside_what_it_was() {
        let text = render(&sample());
        let cells = |head: &str| -> Vec<&str> {
            let line = text.lines().find(|line| line.starts_with(head));
            line.unwrap_or_else(|| panic!("no {head} in {text}")).split_whitespace().collect()
        };
        assert_eq!(cells("delegate local write ")[3..], ["64", "KiB", "128", "KiB", "-50", "%"]);
        assert_eq!(cells("delegate local read ")[3..], ["never", "never", "="]);
        assert_eq!(cells("cpu local write x1")[4..7], ["2.00", "+100", "%"], "{text}");
        for part in [
            "concurrency 2 (was 3)",
            "emu (emulated) local write",
            "emu (emulated) in flight at most",
            "of the emulated device",
            "emulated PM",
            "aim 50",
            "kept from the one before: semaphore",
            "written to /p.toml",
            "SKIPPED    x: why",
            "WARNING    doubt",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!([4 << 10, 512 << 10, 1 << 20, 4 << 20].map(short), ["4K", "512K", "1M", "4M"]);
    }
}
