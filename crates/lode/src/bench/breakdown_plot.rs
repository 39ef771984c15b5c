//! The breakdown as a picture: a bar for each operation, cut into its phases.
//!
//! Every phase has a pattern of its own, and a number where there is room for it, so the picture reads without colour.

use std::fmt::Write;

use lodestone::account::Phase;

use super::breakdown::{Breakdown, Part};
use super::table::digits;
use crate::svg::{page, text};

const WIDTH: f64 = 1120.0;
const LEFT: f64 = 330.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 136.0;
const BAR: f64 = 22.0;
const BAR_GAP: f64 = 6.0;
/// Between reads and writes.
const GROUP_GAP: f64 = 18.0;
/// A narrower piece has no number.
const NUMBER_WIDTH: f64 = 34.0;

/// Fill of a phase.
fn fill(phase: Phase) -> &'static str {
    match phase {
        Phase::Copy => "#9dbfe3",
        Phase::Metadata => "url(#stripes)",
        Phase::Index => "url(#dots)",
        Phase::Wait => "#ffffff",
    }
}

pub fn render(breakdown: &Breakdown) -> String {
    let mut svg = String::new();
    let mut bars = String::new();
    let mut y = TOP;
    let mut kind = None;
    for part in &breakdown.breakdown {
        let of = part.name.split('-').next();
        if kind.is_some() && kind != of {
            y += GROUP_GAP;
        }
        kind = of;
        bar(&mut bars, part, y);
        y += BAR + BAR_GAP;
    }
    open(&mut svg, breakdown, y + 16.0);
    svg.push_str(&bars);
    svg.push_str("</svg>\n");
    svg
}

fn bar(svg: &mut String, part: &Part, y: f64) {
    let line = y + 15.5;
    text(svg, 16.0, line, "start", "name", &part.name);
    let who = match part.threads {
        1 => part.system.clone(),
        n => format!("{}, {n} threads", part.system),
    };
    text(svg, LEFT - 8.0, line, "end", "system", &who);
    let mut x = LEFT;
    for (phase, share) in part.shares.all() {
        let width = share * (WIDTH - LEFT - RIGHT);
        let (name, percent, fill) = (phase.name(), share * 100.0, fill(phase));
        let _ = writeln!(
            svg,
            r##"<rect x="{x:.1}" y="{y}" width="{width:.1}" height="{BAR}" fill="{fill}" stroke="#333333"><title>{name}: {percent:.1} %</title></rect>"##
        );
        if width >= NUMBER_WIDTH {
            text(svg, x + width / 2.0, line, "middle", "number", &format!("{percent:.0} %"));
        }
        x += width;
    }
    let time = format!("{} us of {}", digits(part.accounted_us), digits(part.measured_us));
    text(svg, WIDTH - RIGHT + 8.0, line, "start", "system", &time);
}

const STYLES: &str = r##".title { font-size: 22px; font-weight: bold; fill: #111 }
.sub { font-size: 15px; fill: #333 }
.name { font-size: 15px; font-weight: bold; fill: #111 }
.system, .number { font-size: 13px; fill: #111 }
.number { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
"##;
const PATTERNS: &str = r##"<pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" fill="#f7ecd4"/><path d="M0 0V7" stroke="#9a6a00" stroke-width="4"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#f3e8f6"/><circle cx="3" cy="3" r="1.7" fill="#7a3b8f"/></pattern>
"##;

fn open(svg: &mut String, breakdown: &Breakdown, height: f64) {
    let m = &breakdown.machine;
    page(svg, (WIDTH, height), STYLES, PATTERNS);
    text(svg, 16.0, 32.0, "start", "title", &format!("lode bench --breakdown, {}", m.media));
    text(svg, 16.0, 56.0, "start", "sub", &format!("{}, {} cores, Linux {}", m.cpu, m.cores, m.kernel));
    let method = format!(
        "Shares of an operation's time; at the right its mean, and what the loop measured. Middle of {} rounds of {} ms.",
        m.rounds, m.slice_ms
    );
    text(svg, 16.0, 78.0, "start", "sub", &method);
    let mut x = LEFT;
    for phase in Phase::ALL {
        let fill = fill(phase);
        let _ = writeln!(
            svg,
            r##"<rect x="{x:.1}" y="98" width="28" height="18" fill="{fill}" stroke="#333333"/>"##
        );
        text(svg, x + 36.0, 112.0, "start", "sub", phase.name());
        x += 150.0;
    }
}
