//! The report as a picture: one group of bars per row, speed relative to tmpfs (of applications: to their
//! synchronous run), targets marked.
//!
//! Written as SVG by hand: bars, ticks and text need no plotting library. Every bar carries its system's
//! name and its number, and every system its own pattern, so the picture reads without colour.

use std::fmt::Write;

use super::apps;
use super::report::{Report, Row};
use super::table::si;
use crate::svg::{page, text};

const WIDTH: f64 = 1120.0;
const LEFT: f64 = 285.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 118.0;
const BAR: f64 = 17.0;
const BAR_GAP: f64 = 3.0;
const GROUP_GAP: f64 = 16.0;
const NOTE: f64 = 18.0;
/// Longer bars are cut here and say so: one outlier must not flatten every other row.
const RATIO_MAX: f64 = 6.0;
/// Systems that others are compared with: the first that a row has.
const BASES: [&str; 3] = ["tmpfs", "bindfs", apps::SYNC];

/// Pattern name and colour of a system; the pattern alone tells them apart.
fn paint(system: &str) -> (&'static str, &'static str) {
    match system {
        "lode" | "async-emu" => ("solid", "#1f5fa8"),
        "tmpfs" | "bindfs" | apps::SYNC => ("stripes", "#9a6a00"),
        "ext4" => ("dots", "#7a3b8f"),
        "limit" => ("outline", "#444444"),
        _ => ("cross", "#2b7a4b"),
    }
}

/// The picture, or `None` where no row has anything to compare with.
pub fn render(report: &Report) -> Option<String> {
    let groups: Vec<Group> = report.lines().iter().filter_map(|(n, t)| Group::of(report, n, *t)).collect();
    let widest =
        groups.iter().map(Group::widest).fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))));
    let scale = Scale { ratio_max: widest?.ceil().clamp(2.0, RATIO_MAX) };
    let height = TOP + groups.iter().map(Group::height).sum::<f64>() + 46.0;
    let mut svg = String::new();
    open(&mut svg, report, height + NOTE * report.notes.len() as f64);
    axis(&mut svg, &scale, height);
    let mut y = TOP;
    for group in &groups {
        group.draw(&mut svg, &scale, y);
        y += group.height();
    }
    for (note, y) in report.notes.iter().zip(0..) {
        text(&mut svg, 16.0, height + NOTE * f64::from(y), "start", "note", note);
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

struct Scale {
    ratio_max: f64,
}

impl Scale {
    fn x(&self, ratio: f64) -> f64 {
        LEFT + ratio.min(self.ratio_max) / self.ratio_max * (WIDTH - LEFT - RIGHT)
    }
}

/// One row of the report at one thread count.
struct Group<'r> {
    title: String,
    threads: usize,
    /// Row and its speed relative to the base.
    bars: Vec<(&'r Row, f64)>,
    /// System, position and text of each target.
    targets: Vec<(&'r str, f64, String)>,
}

impl<'r> Group<'r> {
    fn of(report: &'r Report, name: &str, threads: usize) -> Option<Group<'r>> {
        let rows: Vec<&Row> = report
            .rows
            .iter()
            .filter(|r| r.name == name && r.threads == threads && r.value.is_none())
            .collect();
        let base = BASES.iter().find_map(|base| rows.iter().find(|r| r.system == *base))?;
        let ratio_of = |r: &Row| r.ops_per_s / base.ops_per_s;
        let targets = report
            .claims
            .iter()
            .filter(|c| c.row == name && c.threads == threads && c.metric == "ops_per_s")
            .filter_map(|c| {
                let peer = report.find(name, &c.against, threads)?;
                Some((c.system.as_str(), c.target * ratio_of(peer), format!("{} x {}", c.target, c.against)))
            })
            .collect();
        let bars = rows.into_iter().map(|r| (r, ratio_of(r))).collect();
        Some(Group { title: name.to_string(), threads, bars, targets })
    }

    fn widest(&self) -> f64 {
        let bars = self.bars.iter().map(|(_, ratio)| *ratio);
        bars.chain(self.targets.iter().map(|(_, ratio, _)| *ratio)).fold(1.0, f64::max)
    }

    fn height(&self) -> f64 {
        self.bars.len() as f64 * (BAR + BAR_GAP) + GROUP_GAP
    }

    fn draw(&self, svg: &mut String, scale: &Scale, top: f64) {
        let middle = top + self.bars.len() as f64 * (BAR + BAR_GAP) / 2.0 + 5.0;
        match self.threads {
            1 => text(svg, 16.0, middle, "start", "name", &self.title),
            n => {
                text(svg, 16.0, middle - 9.0, "start", "name", &self.title);
                text(svg, 16.0, middle + 9.0, "start", "system", &format!("{n} threads"));
            }
        }
        for (i, (row, ratio)) in self.bars.iter().enumerate() {
            let y = top + i as f64 * (BAR + BAR_GAP);
            let targets = || self.targets.iter().filter(|(system, ..)| *system == row.system);
            // The number stands clear of the flags.
            let clear = targets().map(|(_, at, _)| scale.x(*at)).fold(scale.x(*ratio), f64::max);
            bar(svg, scale, y, row, *ratio, clear);
            targets().for_each(|(_, at, what)| target(svg, scale.x(*at), y, what));
        }
    }
}

fn bar(svg: &mut String, scale: &Scale, y: f64, row: &Row, ratio: f64, clear: f64) {
    let (pattern, colour) = paint(&row.system);
    let fill = match pattern {
        "solid" => colour.to_string(),
        "outline" => "none".to_string(),
        _ => format!("url(#{pattern})"),
    };
    let width = (scale.x(ratio) - LEFT).max(1.0);
    let _ = writeln!(
        svg,
        r#"<rect x="{LEFT}" y="{y}" width="{width:.1}" height="{BAR}" fill="{fill}" stroke="{colour}"/>"#
    );
    text(svg, LEFT - 8.0, y + 13.0, "end", "system", &row.system);
    let cut = if ratio > scale.ratio_max { ", bar cut" } else { "" };
    let label = format!("{}/s ({ratio:.2} x){cut}", si(row.ops_per_s));
    text(svg, clear + 7.0, y + 13.0, "start", "number", &label);
}

/// A tick across the bar with a small flag; the words show when the pointer rests on it.
fn target(svg: &mut String, x: f64, y: f64, what: &str) {
    let (over, under) = (y - 4.0, y + BAR + 2.0);
    let _ = writeln!(
        svg,
        r#"<g><title>target: {what}</title><path d="M{x:.1} {under}V{over}l-5 -5h10l-5 5" class="target"/></g>"#
    );
}

const STYLES: &str = r##".title { font-size: 22px; font-weight: bold; fill: #111 }
.sub { font-size: 15px; fill: #333 }
.name { font-size: 15px; font-weight: bold; fill: #111 }
.system, .number { font-size: 13px; fill: #222 }
.number { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
.tick { font-size: 13px; fill: #555 }
.note { font-size: 12px; fill: #333 }
.grid { stroke: #d8d8d8; fill: none }
.target { stroke: #b00020; stroke-width: 2; fill: #b00020 }
"##;
const PATTERNS: &str = r##"<pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" fill="#f7ecd4"/><path d="M0 0V7" stroke="#9a6a00" stroke-width="5"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#f3e8f6"/><circle cx="3" cy="3" r="1.7" fill="#7a3b8f"/></pattern>
<pattern id="cross" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#e6f3ea"/><path d="M0 0L8 8M8 0L0 8" stroke="#2b7a4b" stroke-width="1.4"/></pattern>
"##;

fn open(svg: &mut String, report: &Report, height: f64) {
    let m = &report.machine;
    page(svg, (WIDTH, height), STYLES, PATTERNS);
    text(svg, 16.0, 32.0, "start", "title", &format!("lode bench, {}", m.media));
    let machine = format!("{}, {} cores, Linux {}", m.cpu, m.cores, m.kernel);
    text(svg, 16.0, 56.0, "start", "sub", &machine);
    let method = format!(
        "Operations per second against {}: longer is better. Flag: lode's target. Median of {} rounds of {} ms, in turn.",
        bases(report),
        m.rounds,
        m.slice_ms
    );
    text(svg, 16.0, 78.0, "start", "sub", &method);
}

/// What the rows are compared with.
fn bases(report: &Report) -> String {
    let has = |system: &&str| report.rows.iter().any(|row| row.system == *system && row.value.is_none());
    BASES.into_iter().filter(has).collect::<Vec<_>>().join(", ")
}

fn axis(svg: &mut String, scale: &Scale, height: f64) {
    for ratio in 0..=scale.ratio_max as u32 {
        let x = scale.x(f64::from(ratio));
        let (top, bottom) = (TOP - 10.0, height - 34.0);
        let _ = writeln!(svg, r#"<path d="M{x:.1} {top}V{bottom:.1}" class="grid"/>"#);
        text(svg, x, height - 16.0, "middle", "tick", &format!("{ratio} x"));
    }
}
