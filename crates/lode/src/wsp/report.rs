//! What a suspend or resume took, by phase (WSP Figures 2 and 3): noted for each, told by `lode wsp status`, drawn.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lodestone::media::{Part, RegionKind, Unsynced, unsynced};
use serde::{Deserialize, Serialize};

use super::place::Config;
use crate::size::Size;
use crate::svg;
use crate::target::show;

/// One suspend or resume, a line of a guest's history.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Entry {
    pub what: String,
    /// Since 1970, UTC.
    pub at_ns: u64,
    pub generation: u64,
    /// Of the devices' state; of a resume none.
    pub state_bytes: u64,
    /// What had to be written back, of all media; none where nobody could say.
    pub dirty_bytes: Option<u64>,
    /// The same by media.
    #[serde(default)]
    pub dirty: Vec<Dirty>,
    pub domain: String,
    pub phases: Vec<Phase>,
    /// What became of the guest's clock.
    pub clock: Option<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Phase {
    pub name: String,
    pub us: f64,
}

/// What had to be written back of one media, for one guest.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Dirty {
    /// `memory`, `state` or `disk`.
    pub media: String,
    pub path: String,
    pub bytes: u64,
    /// There may have been more: to count on would have taken longer than it may.
    pub at_least: bool,
    /// There may have been less: these are the pages that the guest reached, of which the kernel knows alone what it stored to.
    #[serde(default)]
    pub at_most: bool,
}

impl Dirty {
    /// Pages of a guest's memory whose lines are written back.
    pub fn of_pages(config: &Config, kind: Option<RegionKind>, bytes: u64) -> Dirty {
        let at_most = kind == Some(RegionKind::DaxFile);
        Dirty { media: "memory".into(), path: config.memory(), bytes, at_least: false, at_most }
    }

    /// What the kernel has still to write of a file. None where it does not say.
    pub fn of(media: &str, path: &Path, part: Option<Part>, at_most: Duration) -> Option<Dirty> {
        let Unsynced { bytes, at_least } = unsynced(path, part, at_most).ok()?;
        Some(Dirty { media: media.into(), path: show(path).to_string(), bytes, at_least, at_most: false })
    }
}

/// Of all media; none where nobody could say.
pub fn sum(dirty: &[Dirty]) -> Option<u64> {
    (!dirty.is_empty()).then(|| dirty.iter().map(|dirty| dirty.bytes).sum())
}

/// `3 MiB of memory, 300 KiB of state`; empty where nothing had to be written back.
pub fn by_media(dirty: &[Dirty]) -> String {
    let mut kinds: Vec<(&str, u64, bool, bool)> = Vec::new();
    for Dirty { media, bytes, at_least, at_most, .. } in dirty {
        match kinds.iter_mut().find(|(kind, ..)| kind == media) {
            Some((_, sum, is_least, is_most)) => {
                (*sum, *is_least, *is_most) = (*sum + bytes, *is_least || *at_least, *is_most || *at_most);
            }
            None => kinds.push((media, *bytes, *at_least, *at_most)),
        }
    }
    let some = kinds.into_iter().filter(|(_, bytes, ..)| *bytes > 0).map(|(kind, bytes, least, most)| {
        let bound = match (least, most) {
            (false, false) => "",
            (true, false) => "at least ",
            (false, true) => "at most ",
            (true, true) => "about ",
        };
        format!("{bound}{} of {kind}", Size(bytes))
    });
    some.collect::<Vec<_>>().join(", ")
}

pub fn phases(phases: [(&str, Duration); 3]) -> Vec<Phase> {
    phases.map(|(name, time)| Phase { name: name.to_string(), us: time.as_nanos() as f64 / 1e3 }).into()
}

impl Entry {
    pub fn total_us(&self) -> f64 {
        self.phases.iter().map(|phase| phase.us).sum()
    }

    /// For people.
    pub fn sentence(&self) -> String {
        let done = match self.what.as_str() {
            "suspend" => "suspended",
            "clone" => "cloned",
            "go-on" => "had been left standing, and runs on; told",
            _ => "resumed",
        };
        let phases: Vec<String> =
            self.phases.iter().map(|p| format!("{} {:.1}", p.name, p.us / 1e3)).collect();
        let mut text = format!(
            "{done} in {:.1} ms ({}), generation {}",
            self.total_us() / 1e3,
            phases.join(", "),
            self.generation
        );
        if self.state_bytes > 0 {
            let _ = write!(text, ", state {}", Size(self.state_bytes));
        }
        let dirty = by_media(&self.dirty);
        if !dirty.is_empty() {
            let _ = write!(text, ", written back {dirty}");
        }
        if let Some(clock) = &self.clock {
            let _ = write!(text, ", clock {clock}");
        }
        text
    }
}

/// Entries of one kind, together.
#[derive(Serialize, Clone, Debug)]
pub struct Summary {
    pub what: String,
    pub count: usize,
    pub median_us: f64,
    pub worst_us: f64,
    /// Median of each phase.
    pub phases: Vec<Phase>,
    /// What had to be written back: the median and the most, where it is known.
    pub dirty_bytes: Option<(u64, u64)>,
}

pub fn summarize(entries: &[Entry], what: &str) -> Option<Summary> {
    let entries: Vec<&Entry> = entries.iter().filter(|entry| entry.what == what).collect();
    let first = entries.first()?;
    let totals: Vec<f64> = entries.iter().map(|entry| entry.total_us()).collect();
    let phases = first.phases.iter().enumerate().map(|(n, phase)| {
        let of_all = entries.iter().filter_map(|entry| Some(entry.phases.get(n)?.us)).collect();
        Phase { name: phase.name.clone(), us: median(of_all) }
    });
    let dirty: Vec<u64> = entries.iter().filter_map(|entry| entry.dirty_bytes).collect();
    let most = dirty.iter().max().copied();
    Some(Summary {
        what: what.to_string(),
        count: entries.len(),
        median_us: median(totals.clone()),
        worst_us: totals.into_iter().fold(0.0, f64::max),
        phases: phases.collect(),
        dirty_bytes: most.map(|most| (median(dirty.iter().map(|n| *n as f64).collect()) as u64, most)),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// How the phases of a guest are drawn: told apart without colour.
const PATTERNS: [&str; 3] = ["light", "lines", "dark"];
/// Bars at most: the last ones.
const BARS_MAX: usize = 24;

/// Bars of the last suspends and resumes, each of its phases, with what was written back; and how long there must be energy.
pub fn draw(name: &str, entries: &[Entry]) -> String {
    let suspends = summarize(entries, "suspend");
    let entries = &entries[entries.len().saturating_sub(BARS_MAX)..];
    let (left, right, top, row) = (150.0, 540.0, 116.0, 26.0);
    let worst_us = suspends.as_ref().map_or(1.0, |suspends| suspends.worst_us);
    let longest = entries.iter().map(Entry::total_us).fold(worst_us, f64::max);
    let mut page = String::new();
    svg::page(
        &mut page,
        (960.0, top + row * entries.len() as f64 + 40.0),
        "text { font-size: 13px; fill: #1a1a1a } .title { font-size: 17px } .small { font-size: 11px; fill: #4d4d4d }\n\
         .bar { stroke: #1a1a1a; stroke-width: 0.8 } .window { stroke: #a32020; stroke-width: 1.5; stroke-dasharray: 5 3 }\n",
        r##"<pattern id="light" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#dbe6f4"/></pattern>
<pattern id="lines" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/><rect width="2" height="6" fill="#3d6ea8"/></pattern>
<pattern id="dark" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#274c77"/></pattern>
"##,
    );
    svg::text(&mut page, 20.0, 30.0, "start", "title", &format!("Suspends and resumes of {name}"));
    let legend = ["suspend: prepare, resume: start", "write-back, load", "finish"];
    let mut x = 20.0;
    for (pattern, what) in PATTERNS.iter().zip(legend) {
        bar(&mut page, (x, 46.0), 18.0, 14.0, pattern);
        svg::text(&mut page, x + 24.0, 58.0, "start", "small", what);
        x += 60.0 + 6.6 * what.len() as f64;
    }
    if let Some(suspends) = &suspends {
        let mut text = format!(
            "Energy window: {:.1} ms at worst, {:.1} ms at the median",
            suspends.worst_us / 1e3,
            suspends.median_us / 1e3
        );
        if let Some((median, most)) = suspends.dirty_bytes {
            let _ = write!(text, "; to write back: {} at most, {} at the median", Size(most), Size(median));
        }
        svg::text(&mut page, 20.0, 84.0, "start", "", &text);
        let x = left + (right - left) * suspends.worst_us / longest;
        let bottom = top + row * entries.len() as f64;
        let _ = writeln!(
            page,
            r#"<line x1="{x:.1}" y1="{:.1}" x2="{x:.1}" y2="{bottom:.1}" class="window"/>"#,
            top - 10.0
        );
        svg::text(&mut page, x, top - 14.0, "middle", "small", "energy window");
    }
    for (n, entry) in entries.iter().enumerate() {
        let y = top + row * n as f64;
        svg::text(
            &mut page,
            left - 10.0,
            y + 13.0,
            "end",
            "",
            &format!("{} {}", entry.what, entry.generation),
        );
        let mut x = left;
        for (phase, pattern) in entry.phases.iter().zip(PATTERNS) {
            let width = (right - left) * phase.us / longest;
            bar(&mut page, (x, y), width, 18.0, pattern);
            x += width;
        }
        let mut text = format!("{:.1} ms", entry.total_us() / 1e3);
        let dirty = by_media(&entry.dirty);
        if !dirty.is_empty() {
            let _ = write!(text, ", {dirty}");
        }
        svg::text(&mut page, x + 8.0, y + 13.0, "start", "", &text);
    }
    page.push_str("</svg>\n");
    page
}

fn bar(page: &mut String, (x, y): (f64, f64), width: f64, height: f64, pattern: &str) {
    let _ = writeln!(
        page,
        r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height}" class="bar" fill="url(#{pattern})"/>"#
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(what: &str, us: f64) -> Entry {
        let phase = |name: &str| Phase { name: name.into(), us };
        Entry {
            what: what.into(),
            at_ns: 1,
            generation: 2,
            state_bytes: 300 << 10,
            dirty_bytes: Some(3 << 20),
            dirty: vec![
                Dirty {
                    media: "memory".into(),
                    path: "/m".into(),
                    bytes: 3 << 20,
                    at_least: true,
                    at_most: false,
                },
                Dirty { media: "state".into(), path: "/s".into(), bytes: 0, at_least: false, at_most: false },
            ],
            domain: "memory".into(),
            phases: vec![phase("a"), phase("b"), phase("c")],
            clock: None,
        }
    }

    #[test]
    fn summaries_are_medians_of_their_kind() {
        let entries =
            [entry("suspend", 1.0), entry("resume", 50.0), entry("suspend", 3.0), entry("suspend", 8.0)];
        let summary = summarize(&entries, "suspend").unwrap();
        assert_eq!((summary.count, summary.median_us, summary.worst_us), (3, 9.0, 24.0));
        assert_eq!(summary.phases[1].us, 3.0);
        assert_eq!(summary.dirty_bytes, Some((3 << 20, 3 << 20)));
        assert!(summarize(&entries, "clone").is_none());
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
    }

    #[test]
    fn the_picture_names_what_it_shows() {
        let page = draw("db<1>", &[entry("suspend", 1000.0), entry("resume", 2000.0)]);
        assert!(page.contains("db&lt;1&gt;") && page.contains("3.0 ms") && page.contains("6.0 ms"), "{page}");
        assert!(page.contains("Energy window: 3.0 ms at worst"), "{page}");
        assert!(
            page.contains("3 MiB at most") && page.contains("3.0 ms, at least 3 MiB of memory"),
            "{page}"
        );
        assert!(page.ends_with("</svg>\n"));
    }

    #[test]
    fn a_sentence_has_the_phases() {
        let text = entry("suspend", 1500.0).sentence();
        assert!(
            text.contains("suspended in 4.5 ms (a 1.5, b 1.5, c 1.5)") && text.contains("300 KiB"),
            "{text}"
        );
        assert!(text.ends_with("written back at least 3 MiB of memory"), "{text}");
    }

    #[test]
    fn media_of_a_kind_are_together() {
        let of = |media: &str, bytes, at_least, at_most| Dirty {
            media: media.into(),
            path: "/d".into(),
            bytes,
            at_least,
            at_most,
        };
        let disk = |bytes, at_least| of("disk", bytes, at_least, false);
        assert_eq!(by_media(&[disk(1 << 20, false), disk(2 << 20, true)]), "at least 3 MiB of disk");
        assert_eq!(by_media(&[disk(0, false)]), "");
        let memory = of("memory", 3 << 20, false, true);
        assert_eq!(by_media(&[memory, disk(1 << 20, false)]), "at most 3 MiB of memory, 1 MiB of disk");
    }

    #[test]
    fn a_history_of_an_earlier_version_is_read() {
        let mut entry = serde_json::to_value(entry("suspend", 1.0)).unwrap();
        entry.as_object_mut().unwrap().remove("dirty").unwrap();
        let entry: Entry = serde_json::from_value(entry).unwrap();
        assert!(entry.dirty.is_empty() && entry.dirty_bytes == Some(3 << 20));
    }
}
