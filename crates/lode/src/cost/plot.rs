//! The report as a picture: one bar per run, the mean as a line across them, the deviation as a hatched band.
//!
//! Every bar carries its number, and line and band their names, so that the picture reads without colour.

use std::fmt::Write;

use super::report::{Report, Run, Spread};
use super::table::command_line;
use crate::svg::{page, text};

const WIDTH: f64 = 900.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 112.0;
const BAR: f64 = 22.0;
const BAR_GAP: f64 = 10.0;
const BOTTOM: f64 = 52.0;
/// Half the width of the longest label of the mean.
const LABEL_HALF: f64 = 150.0;
/// A command line that is longer is cut in the title.
const TITLE_CHARS_MAX: usize = 60;

pub fn render(report: &Report) -> String {
    let (unit, number, spread) = measure(report);
    let values: Vec<f64> = report.runs.iter().map(&number).collect();
    let band = spread.and_then(|s| s.deviation.map(|d| (s.mean - d, s.mean + d)));
    let most = values.iter().copied().chain(band.map(|b| b.1)).fold(0.0, f64::max);
    let (step, most) = ticks(most);
    let x = |value: f64| LEFT + value.clamp(0.0, most) / most * (WIDTH - LEFT - RIGHT);
    let height = TOP + values.len() as f64 * (BAR + BAR_GAP) + BOTTOM;
    let foot = height - BOTTOM;
    let mut svg = String::new();
    open(&mut svg, report, unit, height);
    if let Some((low, high)) = band {
        let (left, width) = (x(low), x(high) - x(low));
        let _ = writeln!(
            svg,
            r##"<rect x="{left:.1}" y="{TOP}" width="{width:.1}" height="{:.1}" fill="url(#band)" stroke="#888"/>"##,
            foot - TOP
        );
    }
    for i in 0..=(most / step).round() as u32 {
        let at = x(f64::from(i) * step);
        let _ = writeln!(svg, r#"<path d="M{at:.1} {TOP}V{foot:.1}" class="grid"/>"#);
        text(&mut svg, at, foot + 18.0, "middle", "tick", &tick_label(f64::from(i) * step, step));
    }
    for (i, value) in values.iter().enumerate() {
        let y = TOP + i as f64 * (BAR + BAR_GAP) + BAR_GAP / 2.0;
        let width = (x(*value) - LEFT).max(1.0);
        let _ =
            writeln!(svg, r#"<rect x="{LEFT}" y="{y:.1}" width="{width:.1}" height="{BAR}" class="bar"/>"#);
        text(&mut svg, LEFT - 8.0, y + 16.0, "end", "name", &format!("run {}", i + 1));
        text(&mut svg, WIDTH - RIGHT + 12.0, y + 16.0, "start", "name", &format!("{value:.3} {unit}"));
    }
    if let Some(spread) = spread {
        let at = x(spread.mean);
        let _ = writeln!(svg, r#"<path d="M{at:.1} {}V{:.1}" class="mean"/>"#, TOP - 8.0, foot + 4.0);
        let middle = at.clamp(LEFT + LABEL_HALF, WIDTH - LABEL_HALF);
        text(&mut svg, middle, TOP - 12.0, "middle", "name", &mean_label(spread, unit));
    }
    svg.push_str("</svg>\n");
    svg
}

/// What the bars show: CPU seconds per GiB, or CPU seconds where no bytes are known.
fn measure(report: &Report) -> (&'static str, fn(&Run) -> f64, Option<Spread>) {
    match report.summary.cpu_s_per_gib {
        Some(spread) => ("CPU s/GiB", |r| r.cpu_s_per_gib.unwrap_or(0.0), Some(spread)),
        None => ("CPU s", |r| r.net_cpu_s, report.summary.net_cpu_s),
    }
}

fn mean_label(spread: Spread, unit: &str) -> String {
    match spread.deviation {
        Some(deviation) => format!("mean {:.3} {unit}, hatched: ± {deviation:.3}", spread.mean),
        None => format!("{:.3} {unit}", spread.mean),
    }
}

/// A step of 1, 2 or 5 times a power of ten that gives at most six ticks up to `most`, and where they end.
fn ticks(most: f64) -> (f64, f64) {
    if most <= 0.0 {
        return (1.0, 1.0);
    }
    let power = 10f64.powf((most / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| step * 5.0 >= most);
    let step = step.unwrap_or(10.0 * power);
    (step, (most / step).ceil() * step)
}

fn tick_label(value: f64, step: f64) -> String {
    let places = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.places$}")
}

const STYLES: &str = r##".title { font-size: 20px; font-weight: bold; fill: #111 }
.sub { font-size: 14px; fill: #333 }
.name { font-size: 13px; fill: #111 }
.tick { font-size: 13px; fill: #555 }
.grid { stroke: #d8d8d8; fill: none }
.bar { fill: #1f5fa8; fill-opacity: 0.75; stroke: #0d2f55 }
.mean { stroke: #111; stroke-width: 2; stroke-dasharray: 6 3; fill: none }
"##;
const PATTERNS: &str = r##"<pattern id="band" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" fill="#ffffff"/><path d="M0 0V7" stroke="#aaaaaa" stroke-width="2"/></pattern>
"##;

fn open(svg: &mut String, report: &Report, unit: &str, height: f64) {
    page(svg, (WIDTH, height), STYLES, PATTERNS);
    let mut title = command_line(report);
    if title.chars().count() > TITLE_CHARS_MAX {
        title = title.chars().take(TITLE_CHARS_MAX).chain(['…']).collect();
    }
    text(svg, 16.0, 30.0, "start", "title", &title);
    let m = &report.machine;
    text(svg, 16.0, 53.0, "start", "sub", &format!("{}, {} CPUs, Linux {}", m.cpu, m.cpus, m.kernel));
    let noise = report.idle.as_ref().map_or("noise not measured".to_string(), |idle| {
        let loud = if idle.quiet { "" } else { ", a busy machine" };
        format!("noise of {:.3} CPU s per second subtracted{loud}", idle.cpu_s_per_s)
    });
    text(svg, 16.0, 75.0, "start", "sub", &format!("{unit} on all processors, less is better; {noise}"));
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::*;

    #[test]
    fn a_bar_and_a_number_per_run_and_the_mean() {
        let svg = render(&sample(true));
        assert_eq!(svg.matches(r#"class="bar""#).count(), 3);
        for part in [
            "run 3",
            "1.920 CPU s/GiB",
            "mean 2.420 CPU s/GiB, hatched: ± 0.500",
            "of=&lt;a &amp; b&gt;",
            "</svg>\n",
        ] {
            assert!(svg.contains(part), "no {part:?} in {svg}");
        }
    }

    #[test]
    fn ticks_are_round_and_few() {
        for (most, step, end) in
            [(0.37, 0.1, 0.4), (2.92, 1.0, 3.0), (7.0, 2.0, 8.0), (23.0, 5.0, 25.0), (0.0, 1.0, 1.0)]
        {
            let got = ticks(most);
            assert!((got.0 - step).abs() < 1e-9 && (got.1 - end).abs() < 1e-9, "{most}: {got:?}");
        }
        assert_eq!((tick_label(0.3, 0.1), tick_label(2.0, 1.0)), ("0.3".to_string(), "2".to_string()));
    }
}
