//! A look as lines of text, at most 80 columns wide as far as names and channels allow: plain, aligned, no colour.

use std::fmt::Write;

use super::rates::{Look, class};
use crate::live::state::{PHASES, State};
use crate::size::Size;

/// Owners that are shown, those first who got most.
const OWNERS_MAX: usize = 10;

/// What a line is, for those who show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// Over columns.
    Head(String),
    Row(String),
}

impl Line {
    pub fn text(&self) -> &str {
        match self {
            Line::Head(text) | Line::Row(text) => text,
        }
    }
}

/// All of it.
pub fn lines(look: &Look<'_>) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut row = |text: String| lines.push(Line::Row(text));
    row(title(look.state));
    row(mount(look.state));
    if let Some(why) = &look.state.mover.missing {
        row(clean(&format!("        which cannot be used, so that the CPU copies: {why}")));
    }
    row(space(look.state));
    row(served(look));
    row(copies(look));
    let tables = [classes(look), channels(look), owners(look), operations(look)];
    for (head, rows) in tables.into_iter().filter(|(_, rows)| !rows.is_empty()) {
        lines.push(Line::Row(String::new()));
        lines.push(Line::Head(head));
        lines.extend(rows.into_iter().map(Line::Row));
    }
    if look.state.mover.engines.is_empty() {
        lines.push(Line::Row(String::new()));
        lines.push(Line::Row("no copy of a class so far: mount with --class, and an engine".to_owned()));
    }
    lines
}

/// What is mounted where.
fn title(state: &State) -> String {
    let place = state.server.mount_point.as_deref().unwrap_or("a device");
    let mode = if state.server.read_only { ", read only" } else { "" };
    let emulated = if state.pool.emulated { ", emulated PM" } else { "" };
    clean(&format!("{} on {place}{mode}{emulated}", state.pool.path))
}

fn mount(state: &State) -> String {
    let (server, mover) = (&state.server, &state.mover);
    let mut class =
        mover.class.as_deref().map_or_else(|| "no class".to_owned(), |class| format!("class {class}"));
    if let Some(owner) = mover.owner {
        let _ = write!(class, ":{owner}");
    }
    let up = time(server.uptime_ns);
    let emulated = if mover.emulated { " (emulated)" } else { "" };
    clean(&format!("mount   engine {}{emulated}, {class}, pid {}, up {up}", mover.engine, server.pid))
}

fn space(state: &State) -> String {
    let pool = &state.pool;
    let free = pool.blocks_free.saturating_mul(pool.block_bytes);
    let percent = if pool.bytes > 0 { free as f64 / pool.bytes as f64 * 100.0 } else { 0.0 };
    let bad = if pool.blocks_bad > 0 { format!(", {} blocks bad", pool.blocks_bad) } else { String::new() };
    format!(
        "space   {} free of {} ({percent:.0} %), {} inodes free{bad}, sync epoch {}",
        bytes(free as f64),
        Size(pool.bytes),
        count(pool.inodes_free as f64),
        pool.sync_epoch
    )
}

fn served(look: &Look<'_>) -> String {
    format!(
        "served  {}/s read, {}/s written",
        bytes(look.moved(|state| state.served.read_bytes)),
        bytes(look.moved(|state| state.served.written_bytes)),
    )
}

fn copies(look: &Look<'_>) -> String {
    format!(
        "copies  {}/s in {}/s by engines; {}/s left to the CPU, {}/s finished by it",
        bytes(look.moved(|state| state.mover.bytes)),
        count(look.moved(|state| state.mover.copies)),
        count(look.moved(|state| state.mover.busy)),
        count(look.moved(|state| state.mover.finished)),
    )
}

type Table = (String, Vec<String>);

fn classes(look: &Look<'_>) -> Table {
    let head = format!(
        "{:<10} {:>5} {:<9} {:>10} {:>8} {:>9} {:>9} {:>10}",
        "engine", "group", "class", "bytes/s", "copies/s", "under way", "held/s", "total"
    );
    let mut rows = Vec::new();
    for (engine, group, before) in look.groups() {
        for (n, (name, now)) in group.classes().into_iter().enumerate() {
            let before = class(before, n);
            rows.push(format!(
                "{:<10} {:>5} {name:<9} {:>10} {:>8} {:>9} {:>9} {:>10}",
                clean(&engine.engine),
                group.group,
                bytes(look.rate(now.bytes, before.bytes)),
                count(look.rate(now.copies, before.copies)),
                now.under_way,
                count(look.rate(now.held_back, before.held_back)),
                bytes(now.bytes as f64),
            ));
        }
    }
    (head, rows)
}

fn channels(look: &Look<'_>) -> Table {
    let head = format!(
        "{:<10} {:>5} {:>12} {:>7} {:>8} {:>11}  {}",
        "engine", "group", "budget", "at rest", "rests/s", "late epochs", "depth by channel"
    );
    let epochs_per_s = 1e9 / look.state.mover.epoch_ns.max(1) as f64;
    let of =
        |(engine, group, before): (&crate::live::state::Engine, &crate::live::state::Group, Option<&_>)| {
            let before: Option<&crate::live::state::Group> = before;
            let depths: Vec<String> = group.depths.iter().map(u32::to_string).collect();
            let epochs = group.epochs.saturating_sub(before.map_or(0, |before| before.epochs));
            let late = group.late_epochs.saturating_sub(before.map_or(0, |before| before.late_epochs));
            let late = if epochs > 0 {
                format!("{:.1} %", late as f64 / epochs as f64 * 100.0)
            } else {
                "-".to_owned()
            };
            format!(
                "{:<10} {:>5} {:>12} {:>7} {:>8} {late:>11}  {}",
                clean(&engine.engine),
                group.group,
                format!("{}/s", bytes(group.budget_bytes as f64 * epochs_per_s)),
                if group.at_rest { "yes" } else { "no" },
                count(look.rate(group.rests, before.map_or(0, |before| before.rests))),
                depths.join(" "),
            )
        };
    (head, look.groups().map(of).collect())
}

fn owners(look: &Look<'_>) -> Table {
    let head = format!(
        "{:<10} {:>10} {:>6} {:>10} {:>9} {:>8} {:>10}",
        "engine", "owner", "share", "bytes/s", "under way", "requests", "total"
    );
    let owners = look.owners();
    let mut rows: Vec<String> = owners
        .iter()
        .take(OWNERS_MAX)
        .map(|share| {
            format!(
                "{:<10} {:>10} {:>6} {:>10} {:>9} {:>8} {:>10}",
                clean(&share.engine.engine),
                share.owner.owner,
                percent(share.share),
                bytes(share.bytes_per_s),
                share.owner.under_way,
                share.owner.waiting,
                bytes(share.owner.bytes as f64),
            )
        })
        .collect();
    if owners.len() > OWNERS_MAX {
        rows.push(format!("and {} owners more", owners.len() - OWNERS_MAX));
    }
    (head, rows)
}

fn operations(look: &Look<'_>) -> Table {
    let mut head = format!("{:<10} {:>8} {:>10} {:>8}", "operation", "ops/s", "bytes/s", "us each");
    for phase in PHASES {
        let _ = write!(head, " {:>8}", phase.name());
    }
    let mut rows = Vec::new();
    let mut watched = 0;
    for operations in look.operations() {
        watched += operations.watched;
        let mut row = format!(
            "{:<10} {:>8} {:>10} {:>8}",
            clean(operations.op),
            count(operations.per_s),
            bytes(operations.bytes_per_s),
            digits(operations.us),
        );
        for share in operations.shares {
            let _ =
                write!(row, " {:>8}", if operations.watched > 0 { percent(share) } else { "-".to_owned() });
        }
        rows.push(row);
    }
    let one_in = look.state.accounting.one_in;
    rows.push(format!("estimated: {watched} were watched, one in {one_in} on average"));
    (head, rows)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Three digits.
fn digits(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value.max(0.0);
    let mut unit = 0;
    // What would be shown as 1000 is one of the next unit.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    match unit {
        0 if value.fract() == 0.0 => format!("{value:.0}{}", units[0]),
        _ => format!("{}{}", digits(value), units[unit]),
    }
}

fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"])
}

fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

fn time(ns: u64) -> String {
    match ns / 1_000_000_000 {
        s @ ..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s @ 7200..172_800 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}

/// A terminal obeys control characters, and who answers may be anybody.
fn clean(text: &str) -> String {
    text.replace(|c: char| c.is_control(), "?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::state::example;

    #[test]
    fn lines_fit_a_terminal_and_say_what_happened() {
        let before = example();
        let mut now = before.clone();
        now.server.uptime_ns += 1_000_000_000;
        now.mover.bytes += 5 << 20;
        let group = &mut now.mover.engines[0].groups[0];
        group.bandwidth.bytes += 3 << 20;
        group.epochs += 1000;
        group.late_epochs += 5;
        now.accounting.operations[0].operations += 100;
        now.accounting.operations[0].bytes += 409_600;
        now.accounting.operations[0].index_ns += 1_000_000;
        let text: Vec<String> =
            lines(&Look::new(&before, &now)).iter().map(|line| line.text().to_owned()).collect();
        let all = text.join("\n");
        assert!(text.iter().skip(1).all(|line| line.len() <= 80), "{all}");
        for part in [
            "/pools/demo.pool on /mnt",
            "mount   engine emu (emulated), class bandwidth:7, pid 4711, up 4 s",
            "2.00 GiB free of 4 GiB (50 %)",
            "5.00 MiB/s in 0/s by engines",
            "bandwidth   3.00 MiB",
            "0.5 %  1 0 0 2",
            "read          6.40k   25.0 MiB     10.0      0 %      0 %    100 %      0 %",
            "100 were watched, one in 64",
        ] {
            assert!(all.contains(part), "no {part:?} in\n{all}");
        }
    }

    #[test]
    fn an_engine_that_cannot_be_used_is_told_of() {
        let mut state = example();
        let said = |state: &State| {
            let lines = lines(&Look::new(state, state));
            lines.iter().any(|line| line.text().ends_with("cannot be used, so that the CPU copies: no queue"))
        };
        assert!(!said(&state));
        state.mover.missing = Some("no queue".to_owned());
        assert!(said(&state));
    }

    #[test]
    fn nothing_on_a_terminal_is_obeyed() {
        let mut state = example();
        state.mover.missing = Some("no\x1b[2J".to_owned());
        state.pool.path = "a\x1b[2Jb".to_owned();
        state.mover.engines[0].engine = "e\nf".to_owned();
        state.mover.epoch_ns = 0;
        state.pool.bytes = 0;
        let lines = lines(&Look::new(&state, &state));
        assert!(lines.iter().all(|line| !line.text().contains(|c: char| c.is_control())), "{lines:?}");
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, shown) in [
            (0.0, "0 B"),
            (1.0, "1 B"),
            (999.6, "0.98 KiB"),
            (1536.0, "1.50 KiB"),
            (2e30, "1734723475977 EiB"),
        ] {
            assert_eq!(bytes(value), shown);
        }
        for (value, shown) in
            [(0.0, "0"), (0.25, "0.25"), (1000.0, "1.00k"), (12_345.0, "12.3k"), (f64::NAN, "0")]
        {
            assert_eq!(count(value), shown);
        }
        assert_eq!((time(119_000_000_000), time(u64::MAX)), ("119 s".to_owned(), "213503 days".to_owned()));
    }
}
