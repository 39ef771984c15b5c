//! The report as a picture: for each lane two panels, what all threads reach together and what a GiB costs in CPU time,
//! by size. Thresholds are marked on the size axis.
//!
//! Every line has its engine's name at its end and a dash pattern of its own, so that the picture reads without colour.

use std::fmt::Write;

use lodestone::mover::profile::NEVER;

use super::report::{EngineFacts, Report, SizeRow};
use super::table::{short, subtitle};
use crate::bench::digits;
use crate::svg::{page, text};

const WIDTH: f64 = 1180.0;
const TOP: f64 = 96.0;
const PANEL_WIDTH: f64 = 360.0;
const PANEL_HEIGHT: f64 = 210.0;
const LEFT: f64 = 70.0;
/// From the left edge of one panel to that of the next: names stand between them.
const COLUMN: f64 = 540.0;
const ROW: f64 = 340.0;
/// Colour and dashes of a line, by the order of engines.
const PAINT: [(&str, &str); 6] = [
    ("#1f5fa8", "none"),
    ("#9a6a00", "7 3"),
    ("#7a3b8f", "2 3"),
    ("#2b7a4b", "10 3 2 3"),
    ("#8a1f1f", "4 2"),
    ("#444444", "1 2"),
];
/// Names at the ends of lines are this far apart at least.
const NAME_GAP: f64 = 15.0;

pub fn render(report: &Report) -> String {
    let lanes: Vec<&str> = ["local_write", "local_read", "remote_write", "remote_read"]
        .into_iter()
        .filter(|lane| report.engines.iter().any(|engine| engine.sizes.iter().any(|size| size.lane == *lane)))
        .collect();
    let height = TOP + lanes.len() as f64 * ROW;
    let mut svg = String::new();
    open(&mut svg, report, height);
    for (n, lane) in lanes.iter().enumerate() {
        let y = TOP + n as f64 * ROW + 30.0;
        let many = report.engines.iter().flat_map(|e| &e.sizes).map(|size| size.threads).max().unwrap_or(1);
        let rate =
            Panel { x: LEFT, y, lane, threads: many, unit: "GiB/s", number: |size| size.gib_per_s.median };
        rate.draw(&mut svg, report);
        let cost = Panel {
            x: LEFT + COLUMN,
            y,
            lane,
            threads: many,
            unit: "CPU s/GiB",
            number: |size| size.cpu_s_per_gib.median,
        };
        cost.draw(&mut svg, report);
    }
    svg.push_str("</svg>\n");
    svg
}

struct Panel<'a> {
    x: f64,
    y: f64,
    lane: &'a str,
    threads: usize,
    unit: &'static str,
    number: fn(&SizeRow) -> f64,
}

impl Panel<'_> {
    fn of<'e>(&self, engine: &'e EngineFacts) -> Vec<&'e SizeRow> {
        let of_lane = || engine.sizes.iter().filter(|size| size.lane == self.lane);
        // A lane may have fewer CPUs than another.
        let threads = of_lane().map(|size| size.threads).max().unwrap_or(1).min(self.threads);
        of_lane().filter(|size| size.threads == threads).collect()
    }

    fn draw(&self, svg: &mut String, report: &Report) {
        let all: Vec<Vec<&SizeRow>> = report.engines.iter().map(|engine| self.of(engine)).collect();
        let numbers = all.iter().flatten().map(|size| (self.number)(size));
        let most = ceiling(numbers.fold(0.0, f64::max));
        let mut sizes: Vec<usize> = all.iter().flatten().map(|size| size.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let steps = (sizes.len().max(2) - 1) as f64;
        let place = |bytes: usize| sizes.iter().position(|size| *size == bytes).unwrap_or(0) as f64;
        let x = |bytes: usize| self.x + place(bytes) / steps * PANEL_WIDTH;
        let y = |number: f64| self.y + PANEL_HEIGHT * (1.0 - number / most);
        let foot = self.y + PANEL_HEIGHT;
        let threads = all.iter().flatten().map(|size| size.threads).max().unwrap_or(1);
        let title =
            format!("{}, {}, {threads} thread{}", self.lane.replace('_', " "), self.unit, plural(threads));
        text(svg, self.x, self.y - 12.0, "start", "name", &title);
        for n in 0..=4 {
            let number = most * f64::from(n) / 4.0;
            let _ =
                writeln!(svg, r#"<path d="M{:.1} {:.1}h{PANEL_WIDTH}" class="grid"/>"#, self.x, y(number));
            text(svg, self.x - 8.0, y(number) + 4.0, "end", "tick", &digits(number));
        }
        for bytes in &sizes {
            text(svg, x(*bytes), foot + 17.0, "middle", "tick", &short(*bytes));
        }
        let mut ends = Vec::new();
        for (n, (engine, rows)) in report.engines.iter().zip(&all).enumerate() {
            let Some(last) = rows.last() else { continue };
            let (colour, dashes) = PAINT[n % PAINT.len()];
            let points: Vec<String> = rows
                .iter()
                .map(|size| format!("{:.1},{:.1}", x(size.bytes), y((self.number)(size))))
                .collect();
            let _ = writeln!(
                svg,
                r#"<polyline points="{}" class="line" stroke="{colour}" stroke-dasharray="{dashes}"/>"#,
                points.join(" ")
            );
            let emulated = if engine.emulated { " (emulated)" } else { "" };
            let name = format!("{}{emulated} {}", engine.name, digits((self.number)(last)));
            ends.push((y((self.number)(last)), name, colour));
            self.threshold(svg, engine, colour, &sizes, &x, foot + 22.0 + 13.0 * n as f64);
        }
        names(svg, ends, self.x + PANEL_WIDTH + 8.0, foot);
    }

    /// From where on the engine copies, below the axis.
    fn threshold(
        &self,
        svg: &mut String,
        engine: &EngineFacts,
        colour: &str,
        sizes: &[usize],
        x: &dyn Fn(usize) -> f64,
        y: f64,
    ) {
        let of_lane =
            engine.limits.iter().flat_map(|limits| &limits.thresholds).find(|row| row.lane == self.lane);
        let Some(bytes) =
            of_lane.map(|row| row.threshold.0).filter(|bytes| *bytes != NEVER && sizes.contains(bytes))
        else {
            return;
        };
        let (from, to) = (x(bytes), self.x + PANEL_WIDTH);
        let _ = writeln!(svg, r#"<path d="M{from:.1} {y:.1}H{to:.1}" class="from" stroke="{colour}"/>"#);
        text(svg, to + 8.0, y + 4.0, "start", "tick", &format!("{} from {}", engine.name, short(bytes)));
    }
}

/// Names beside the ends of their lines, pushed apart where they would meet, and not below `foot`.
fn names(svg: &mut String, mut ends: Vec<(f64, String, &str)>, x: f64, foot: f64) {
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut above = f64::NEG_INFINITY;
    for (y, ..) in &mut ends {
        *y = y.max(above + NAME_GAP);
        above = *y;
    }
    let mut below = foot + NAME_GAP;
    for (y, name, colour) in ends.into_iter().rev() {
        let y = y.min(below - NAME_GAP);
        below = y;
        let _ = writeln!(svg, r#"<path d="M{:.1} {y:.1}h5" class="line" stroke="{colour}"/>"#, x - 6.0);
        text(svg, x + 3.0, y + 4.0, "start", "name", &name);
    }
}

fn plural(n: usize) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// A round number that is not below the highest.
fn ceiling(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(most.log10().floor());
    [1.0, 2.0, 4.0, 5.0, 8.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|n| *n >= most)
        .unwrap_or(10.0 * power)
}

const STYLES: &str = r##".title { font-size: 20px; font-weight: bold; fill: #111 }
.sub { font-size: 14px; fill: #333 }
.name { font-size: 13px; fill: #111 }
.tick { font-size: 12px; fill: #555 }
.grid { stroke: #d8d8d8; fill: none }
.line { stroke-width: 2; fill: none }
.from { stroke-width: 4; fill: none }
"##;

fn open(svg: &mut String, report: &Report, height: f64) {
    page(svg, (WIDTH, height), STYLES, "");
    text(svg, 16.0, 30.0, "start", "title", "lode tune: engines beside the CPU, by size of a copy");
    for (n, words) in subtitle(report).iter().enumerate() {
        text(svg, 16.0, 52.0 + 20.0 * n as f64, "start", "sub", words);
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::*;

    #[test]
    fn a_line_and_a_name_for_each_engine_and_lane() {
        let svg = render(&sample());
        // Three engines write, two read; two panels each.
        assert_eq!(svg.matches("<polyline").count(), 2 * (3 + 2), "{svg}");
        for part in
            ["emu (emulated) ", "delegate from 64K", "local read, CPU s/GiB, 2 threads", "emulated PM"]
        {
            assert!(svg.contains(part), "no {part:?} in {svg}");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn axes_end_at_round_numbers() {
        for (most, end) in [(0.0, 1.0), (0.07, 0.08), (3.1, 4.0), (5.0, 5.0), (9.1, 10.0), (12.0, 20.0)] {
            assert!((ceiling(most) - end).abs() < 1e-9, "{most}: {}", ceiling(most));
        }
    }
}
