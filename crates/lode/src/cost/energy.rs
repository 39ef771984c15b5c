//! Joules: of the processor packages, which the kernel reads from RAPL, or from a meter that a command asks.
//!
//! Where neither is there no number is made up. RAPL counts packages only: not the board, not the disks, and DRAM
//! only where the package includes it. Idle power is part of every number.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::{Failure, Result};
use crate::target::show;

/// What a meter prints at most, in bytes.
const METER_BYTES_MAX: u64 = 4096;

pub enum Source {
    Rapl(Vec<Package>),
    Meter(OsString),
}

/// Counters of all packages in microjoules, or the meter's joules.
pub enum Reading {
    Rapl(Vec<u64>),
    Meter(f64),
}

pub struct Package {
    energy: PathBuf,
    /// The counter goes from this back to 0, in microjoules.
    range_uj: u64,
}

impl Source {
    /// The meter where there is one, else RAPL below `root`; or, in words, why there is none.
    pub fn find(root: &Path, meter: Option<&OsStr>) -> Result<Source, String> {
        match meter {
            Some(command) => Ok(Source::Meter(command.to_os_string())),
            None => packages(&root.join("sys/class/powercap")).map(Source::Rapl),
        }
    }

    /// "rapl" or "meter".
    pub fn name(&self) -> &'static str {
        match self {
            Source::Rapl(_) => "rapl",
            Source::Meter(_) => "meter",
        }
    }

    pub fn read(&self) -> Result<Reading> {
        match self {
            Source::Rapl(packages) => {
                let counters = packages.iter().map(|p| number(&p.energy).map_err(Failure::Failed));
                Ok(Reading::Rapl(counters.collect::<Result<_>>()?))
            }
            Source::Meter(command) => Ok(Reading::Meter(ask(command)?)),
        }
    }

    /// Joules since an earlier reading.
    pub fn since(&self, before: &Reading) -> Result<f64> {
        let now = self.read()?;
        match (self, before, now) {
            (Source::Rapl(packages), Reading::Rapl(before), Reading::Rapl(now)) => {
                let each = packages.iter().zip(before.iter().zip(now));
                Ok(each.map(|(p, (before, now))| joules(*before, now, p.range_uj)).sum())
            }
            (Source::Meter(command), Reading::Meter(before), Reading::Meter(now)) => match now - before {
                joules if joules >= 0.0 => Ok(joules),
                _ => Err(Failure::failed(format_args!(
                    "the meter {} went back from {before} J to {now} J; it must print joules so far",
                    show(Path::new(command))
                ))),
            },
            _ => unreachable!("a source reads its own kind"),
        }
    }
}

/// Joules between two values of a counter that may have gone over its end once.
fn joules(before_uj: u64, now_uj: u64, range_uj: u64) -> f64 {
    let spent = match now_uj.checked_sub(before_uj) {
        Some(spent) => spent,
        None => range_uj.saturating_sub(before_uj) + now_uj + 1,
    };
    spent as f64 / 1e6
}

/// `intel-rapl:N` that are packages, on AMD as well; `intel-rapl:N:M` are parts of them, and psys counts them again.
fn packages(powercap: &Path) -> Result<Vec<Package>, String> {
    let none = || {
        "not available here: the kernel shows no RAPL counters (no /sys/class/powercap/intel-rapl:*); an external meter can be given with --meter".to_string()
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(powercap).map_err(|_| none())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_domain =
            name.strip_prefix("intel-rapl:").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
        let kind = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if !is_domain || !kind.starts_with("package") {
            continue;
        }
        let energy = entry.path().join("energy_uj");
        let range_uj = number(&entry.path().join("max_energy_range_uj"))?;
        number(&energy)?;
        found.push(Package { energy, range_uj });
    }
    if found.is_empty() { Err(none()) } else { Ok(found) }
}

fn number(file: &Path) -> Result<u64, String> {
    let text = fs::read_to_string(file).map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => {
            format!("not available here: only root may read {}", file.display())
        }
        _ => format!("not available here: cannot read {}: {e}", file.display()),
    })?;
    text.trim().parse().map_err(|_| format!("not available here: {} holds no number", file.display()))
}

/// Runs the meter's command in a shell; it prints joules so far and nothing else.
fn ask(command: &OsStr) -> Result<f64> {
    let name = show(Path::new(command));
    let failed = |e| Failure::failed(format_args!("cannot run the meter {name}: {e}"));
    let mut meter = Command::new("sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut output = Vec::new();
    // What prints more prints no number, and ends by a pipe that nobody reads.
    let printed = meter.stdout.take().expect("it is a pipe").take(METER_BYTES_MAX).read_to_end(&mut output);
    let status = printed.and_then(|_| meter.wait()).map_err(failed)?;
    if !status.success() {
        return Err(Failure::failed(format_args!("the meter {name} ended with {status}")));
    }
    let text = String::from_utf8_lossy(&output);
    match text.trim().parse::<f64>() {
        Ok(joules) if joules.is_finite() => Ok(joules),
        _ => Err(Failure::failed(format_args!(
            "the meter {name} printed {:?}, not a number of joules",
            text.trim()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_goes_over_its_end() {
        assert_eq!(joules(1_000_000, 3_500_000, 262_143_328_850), 2.5);
        assert_eq!(joules(262_143_328_850, 999_999, 262_143_328_850), 1.0);
        assert_eq!(joules(7, 7, 100), 0.0);
    }

    fn domain(root: &Path, name: &str, kind: &str, energy: &str) {
        let dir = root.join("sys/class/powercap").join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("name"), kind).unwrap();
        fs::write(dir.join("energy_uj"), energy).unwrap();
        fs::write(dir.join("max_energy_range_uj"), "9999999\n").unwrap();
    }

    #[test]
    fn packages_count_and_their_parts_do_not() {
        let root = std::env::temp_dir().join(format!("lode-cost-rapl-{}", std::process::id()));
        assert!(Source::find(&root, None).err().unwrap().contains("not available here"));
        domain(&root, "intel-rapl:0", "package-0\n", "1000000\n");
        domain(&root, "intel-rapl:1", "package-1\n", "9000000\n");
        domain(&root, "intel-rapl:0:0", "core\n", "5\n");
        domain(&root, "intel-rapl:2", "psys\n", "5\n");
        let source = Source::find(&root, None).unwrap();
        let before = source.read().unwrap();
        domain(&root, "intel-rapl:0", "package-0\n", "3000000\n");
        domain(&root, "intel-rapl:1", "package-1\n", "500000\n");
        domain(&root, "intel-rapl:0:0", "core\n", "900000\n");
        assert_eq!((source.name(), source.since(&before).unwrap()), ("rapl", 2.0 + 1.5));
        domain(&root, "intel-rapl:0", "package-0\n", "much\n");
        assert!(source.since(&before).is_err());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_meter_prints_joules_so_far() {
        let meter = |command: &str| Source::find(Path::new("/"), Some(OsStr::new(command))).unwrap();
        assert_eq!(meter("echo 12.5").since(&Reading::Meter(10.0)).unwrap(), 2.5);
        for (command, says) in [
            ("echo 9", "went back"),
            ("echo x", "not a number"),
            ("echo NaN", "not a number"),
            ("exit 4", "status: 4"),
        ] {
            let Err(Failure::Failed(message)) = meter(command).since(&Reading::Meter(10.0)) else {
                panic!("{command} was taken")
            };
            assert!(message.contains(says), "{message}");
        }
    }
}
