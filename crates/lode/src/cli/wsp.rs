//! The command line of `lode wsp`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::cli::Assume;
use crate::size;

/// Smallest memory of a guest, in bytes, and what all sizes are multiples of.
pub const RAM_BYTES_UNIT: u64 = 2 << 20;
/// Processors of a guest at most.
const CPUS_MAX: i64 = 1024;
/// Resumes that fail before a guest is booted, at most.
const BOOT_AFTER_MAX: i64 = 1000;
/// Longest window, in seconds.
const WINDOW_S_MAX: f64 = 3600.0;

/// Suspend and resume whole systems in milliseconds
///
/// A guest runs in QEMU, its memory is a file or device on the media. To suspend it, the state of its devices is saved
/// beside that memory, and one record says that they belong together; to resume it, the same memory is mapped again.
/// Memory is the only copy: a guest that was not suspended, or that was resumed since, boots cold.
#[derive(Args, Debug)]
pub struct Wsp {
    #[command(subcommand)]
    pub command: WspSub,
    /// Where guests are described [default: /var/lib/lode/wsp for root, else ~/.local/state/lode/wsp]
    #[arg(long = "wsp-dir", global = true, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

#[derive(Subcommand, Debug)]
pub enum WspSub {
    Start(WspStart),
    Suspend(WspSuspend),
    Resume(WspResume),
    List(WspList),
    Status(WspStatus),
    Stop(WspStop),
    Rm(WspRm),
    Daemon(WspDaemon),
}

/// Boot a guest whose memory is on the media
///
/// A guest that was started before needs its name only. What it runs in is kept: resume uses the same. Where no -serial is
/// given, the guest's first serial line goes to console.log beside its description; there is no screen, no network and no
/// disk unless something says so.
#[derive(Args, Debug)]
pub struct WspStart {
    /// What the guest is called: letters, digits, dots, - and _
    #[arg(value_parser = parse_name)]
    pub name: String,
    /// The guest's memory; K, M, G and T are binary
    #[arg(long, value_name = "SIZE", value_parser = parse_ram)]
    pub ram: Option<u64>,
    /// Where memory lies: a directory (on a DAX mount, tmpfs, hugetlbfs, a pool's mount or any other), a file, a device-dax
    /// node, a pool, or a directory in one (POOL:/DIR)
    #[arg(long, value_name = "PATH")]
    pub media: Option<PathBuf>,
    /// A disk of the guest, raw or qcow2; may be given several times
    #[arg(long = "disk", value_name = "FILE")]
    pub disks: Vec<PathBuf>,
    /// The guest's processors
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(i64).range(1..=CPUS_MAX))]
    pub cpus: i64,
    /// Who is suspended first when power fails: the highest
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    pub priority: i32,
    /// The machine emulator
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// What executes the guest: kvm where it works, or the one named
    #[arg(long, value_name = "ACCEL", default_value = "auto")]
    pub accel: Accel,
    /// Connect QEMU's guest agent, which then sets the guest's clock after a resume
    #[arg(long)]
    pub agent: bool,
    /// Take the media for persistent memory of this kind (emulation)
    #[arg(long, value_name = "DOMAIN")]
    pub assume: Option<Assume>,
    /// Boot although the guest is suspended, or that cannot be told, or its memory is another's: what was there is lost
    #[arg(long)]
    pub fresh: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// What else QEMU is told
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    pub options: Vec<OsString>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    Auto,
    Kvm,
    Tcg,
}

/// Suspend guests: on return they survive what their media survives
///
/// Several at a time, those with the highest priority first. One that cannot be suspended runs on, and holds up none; nor does a
/// name that nobody knows. Exit 1 where it was not all.
#[derive(Args, Debug)]
pub struct WspSuspend {
    /// Which guests
    #[arg(required_unless_present = "all", value_name = "NAME", value_parser = parse_name)]
    pub names: Vec<String>,
    /// All that run; where no directory of guests is there, that is said, and no success
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// How long there is energy: 50ms or 2s. What was reached by then is said; exit 1 where it was not all
    #[arg(long, value_name = "TIME", value_parser = parse_window)]
    pub window: Option<Duration>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Let suspended guests go on where they were
///
/// State and memory are verified first, byte by byte of the state, and refused where they do not fit; then the image is
/// marked as consumed, durably, before the guest runs.
#[derive(Args, Debug)]
pub struct WspResume {
    /// Which guests
    #[arg(required_unless_present = "all", value_name = "NAME", value_parser = parse_name)]
    pub names: Vec<String>,
    /// All that are suspended, and those that stand because whoever suspended or resumed them was killed
    #[arg(long, conflicts_with_all = ["names", "clone"])]
    pub all: bool,
    /// Resume a copy under this name, with memory and disks of its own that end with it; the image stays
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub clone: Option<String>,
    /// The copy is a guest of its own, which may be suspended, and beside which the original goes on: memory and disks are files that
    /// share their blocks with the original's (XFS, btrfs)
    #[arg(long, requires = "clone")]
    pub reflink: bool,
    /// Boot a guest that could not be resumed so often in a row, and keep its image [default: never]
    #[arg(long, value_name = "N", value_parser = parse_boot_after())]
    pub boot_after: Option<u32>,
    /// Resume although disks were changed since
    #[arg(long)]
    pub force: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// List all guests
#[derive(Args, Debug)]
pub struct WspList {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Say what a guest is, what it survives, and how long its suspends and resumes took
#[derive(Args, Debug)]
pub struct WspStatus {
    /// Which guest [default: all]
    #[arg(value_parser = parse_name)]
    pub name: Option<String>,
    /// Draw the phases of its suspends and resumes into this file
    #[arg(long, value_name = "FILE", requires = "name")]
    pub svg: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// End a guest without suspending it, as if its power were cut
#[derive(Args, Debug)]
pub struct WspStop {
    /// Which guest
    #[arg(value_parser = parse_name)]
    pub name: String,
}

/// Forget guests that do not run, with their memory and their state
#[derive(Args, Debug)]
pub struct WspRm {
    /// Which guests
    #[arg(required = true, value_name = "NAME", value_parser = parse_name)]
    pub names: Vec<String>,
    /// Also one that is suspended, or of which that cannot be told: it is lost
    #[arg(long)]
    pub force: bool,
}

/// Wait for power to fail, and suspend all guests then
///
/// SIGPWR is the trigger: init, a UPS monitor, or kill -PWR sends it. Runs in the foreground; SIGTERM ends it, and leaves
/// guests as they are.
#[derive(Args, Debug)]
pub struct WspDaemon {
    /// How long there is energy after SIGPWR: 50ms or 2s
    #[arg(long, value_name = "TIME", value_parser = parse_window)]
    pub window: Option<Duration>,
    /// First resume all guests that are suspended, and let those go on that only stand
    #[arg(long)]
    pub resume: bool,
    /// Boot a guest that could not be resumed so often in a row, and keep its image [default: never]
    #[arg(long, value_name = "N", requires = "resume", value_parser = parse_boot_after())]
    pub boot_after: Option<u32>,
}

fn parse_boot_after() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=BOOT_AFTER_MAX)
}

/// Becomes a file's name, and part of a line.
fn parse_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match text {
        "" => Err("a guest has a name".into()),
        _ if text.len() > 64 => Err("longer than 64 bytes".into()),
        _ if text.starts_with(['.', '-']) || !text.chars().all(is_plain) => {
            Err("a name has letters, digits, - _ and ., and begins with a letter, a digit or _".into())
        }
        _ => Ok(text.into()),
    }
}

fn parse_ram(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("a guest has memory".into()),
        bytes if !bytes.is_multiple_of(RAM_BYTES_UNIT) => Err("not a multiple of 2M".into()),
        bytes => Ok(bytes),
    }
}

fn parse_window(text: &str) -> Result<Duration, String> {
    let refused = || "not a time: write 50ms or 2s".to_string();
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').ok_or_else(refused)?, 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|n| n * unit);
    let fits = seconds.filter(|s| s.is_finite() && *s > 0.0 && *s <= WINDOW_S_MAX);
    fits.map(Duration::from_secs_f64).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sizes_and_windows() {
        assert!(parse_name("db-1.a_b").is_ok());
        for bad in ["", "a/b", "..", "-x", "a b", "ä", "a\n"] {
            assert!(parse_name(bad).is_err(), "{bad:?}");
        }
        assert_eq!(parse_ram("512M"), Ok(512 << 20));
        assert!(parse_ram("0").is_err() && parse_ram("3M").is_err() && parse_ram("1").is_err());
        assert_eq!(parse_window("50ms"), Ok(Duration::from_millis(50)));
        assert_eq!(parse_window("1.5s"), Ok(Duration::from_millis(1500)));
        for bad in ["", "50", "0ms", "-1s", "nans", "infs", "1h", "99999s"] {
            assert!(parse_window(bad).is_err(), "{bad}");
        }
    }
}
