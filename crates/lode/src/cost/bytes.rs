//! How many bytes a run moved: from fio's own report, or from the counters of a mounted pool or a block device.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::{Failure, Output, Result};
use crate::live::client::Client;
use crate::target::show;
use crate::top;

/// What the kernel counts a sector as, whatever the device has.
const SECTOR_BYTES: u64 = 512;
/// Before this version fio's io_bytes were KiB.
const FIO_MAJOR_MIN: u32 = 3;

/// Bytes that a run moved, and who counted them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub bytes: u64,
    /// "option", "fio", "pool" or "block".
    pub from: &'static str,
}

/// What the command printed, with fio's report taken out of it.
pub struct Printed<'o> {
    before: &'o [u8],
    report: Option<Value>,
    after: &'o [u8],
}

impl<'o> Printed<'o> {
    /// fio may print remarks before and after its report, which begins on a line of its own.
    pub fn of(output: &'o [u8]) -> Printed<'o> {
        let starts = std::iter::once(0)
            .chain(output.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1));
        for begin in starts.filter(|&i| output.get(i) == Some(&b'{')) {
            let mut documents = serde_json::Deserializer::from_slice(&output[begin..]).into_iter::<Value>();
            if let Some(Ok(report)) = documents.next().filter(|d| d.as_ref().is_ok_and(is_fio)) {
                let after = output[begin + documents.byte_offset()..].trim_ascii_start();
                return Printed { before: &output[..begin], report: Some(report), after };
            }
        }
        Printed::whole(output)
    }

    /// Output that nobody looks into.
    pub fn whole(output: &'o [u8]) -> Printed<'o> {
        Printed { before: output, report: None, after: &[] }
    }

    /// Everything but fio's report goes where it would have gone: to standard output, or beside the JSON document.
    pub fn hand_on(&self, json: bool) -> Result<()> {
        if json {
            // Where stderr is gone nothing can be done about it.
            let _ = std::io::stderr()
                .write_all(self.before)
                .and_then(|()| std::io::stderr().write_all(self.after));
            return Ok(());
        }
        let mut out = Output::new();
        out.bytes(self.before)?;
        out.bytes(self.after)?;
        out.finish()
    }

    /// Bytes read and written by all jobs of fio's report; `None` where there is none.
    pub fn moved(&self) -> Result<Option<Counted>> {
        let Some(report) = &self.report else { return Ok(None) };
        let bytes = fio_bytes(report)
            .map_err(|why| Failure::failed(format_args!("fio's report: {why}; give --bytes SIZE")))?;
        Ok(Some(Counted { bytes, from: "fio" }))
    }
}

fn is_fio(document: &Value) -> bool {
    document["fio version"].is_string() && document["jobs"].is_array()
}

/// Bytes that all jobs read and wrote. Jobs that report both directions as one (`unified_rw_reporting`) have "mixed".
fn fio_bytes(report: &Value) -> Result<u64, String> {
    let version = report["fio version"].as_str().unwrap_or_default();
    let major = version.strip_prefix("fio-").and_then(|v| v.split('.').next()).and_then(|v| v.parse().ok());
    if major.is_none_or(|major: u32| major < FIO_MAJOR_MIN) {
        return Err(format!("it is of version {version:?}, whose units are not known"));
    }
    let jobs = report["jobs"].as_array().filter(|jobs| !jobs.is_empty()).ok_or("it has no jobs")?;
    let of = |job: &Value, direction: &str| job[direction]["io_bytes"].as_u64();
    let bytes = jobs.iter().map(|job| {
        let split = of(job, "read").zip(of(job, "write")).map(|(read, write)| read + write);
        split.or_else(|| of(job, "mixed")).ok_or("a job lacks io_bytes")
    });
    let bytes = bytes.sum::<Result<u64, _>>()?;
    if bytes == 0 { Err("no job moved a byte".to_string()) } else { Ok(bytes) }
}

/// Who counts bytes, of the command and of everybody else.
pub enum Counters {
    Pool(MountedPool),
    Block(BlockDevice),
}

impl Counters {
    /// Bytes read and written so far.
    pub fn read(&self) -> Result<u64> {
        match self {
            Counters::Pool(pool) => pool.read(),
            Counters::Block(device) => device.read(),
        }
    }

    /// What was moved between two readings. Nothing is an error: what stays in the kernel's cache has no cost per byte.
    pub fn moved(&self, before: u64, after: u64) -> Result<Counted> {
        let (from, name) = match self {
            Counters::Pool(pool) => ("pool", &pool.name),
            Counters::Block(device) => ("block", &device.name),
        };
        match after.saturating_sub(before) {
            0 => Err(Failure::failed(format_args!(
                "{} moved nothing while the command ran; is it the right one, and does the command sync?",
                show(name)
            ))),
            bytes => Ok(Counted { bytes, from }),
        }
    }
}

/// A pool whose mount server counts the bytes of all requests.
pub struct MountedPool {
    server: Client,
    /// As the user called it.
    name: PathBuf,
}

impl MountedPool {
    /// `target` is what `lode top` takes: the pool, its mount point, or the address of its metrics.
    pub fn find(target: &OsStr) -> Result<MountedPool> {
        Ok(MountedPool { server: top::reach(target)?.0, name: target.into() })
    }

    fn read(&self) -> Result<u64> {
        let served = top::ask(&self.server)?.served;
        Ok(served.read_bytes + served.written_bytes)
    }
}

/// A block device, or a partition of one.
pub struct BlockDevice {
    stat: PathBuf,
    /// As the user called it.
    name: PathBuf,
}

impl BlockDevice {
    /// `device` is a name (`sda1`) or a path (`/dev/disk/by-label/data`); `root` is `/` but in tests.
    pub fn open(root: &Path, device: &Path) -> Result<BlockDevice> {
        let real =
            std::fs::canonicalize(root.join("dev").join(device)).unwrap_or_else(|_| device.to_path_buf());
        let name = real.strip_prefix(root.join("dev")).unwrap_or(&real);
        // As the kernel spells names with a slash: cciss!c0d0.
        let name = name.to_string_lossy().replace('/', "!");
        let stat = root.join("sys/class/block").join(name).join("stat");
        let device = BlockDevice { stat, name: device.to_path_buf() };
        device.read()?;
        Ok(device)
    }

    /// Bytes that it has read and written since boot.
    fn read(&self) -> Result<u64> {
        let text = std::fs::read_to_string(&self.stat).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Failure::failed(format_args!(
                "{} is no block device of this machine; /sys/class/block lists them",
                show(&self.name)
            )),
            _ => Failure::failed(format_args!("cannot read {}: {e}", show(&self.stat))),
        })?;
        block_bytes(&text).ok_or_else(|| {
            Failure::failed(format_args!("{} does not hold a device's counters", show(&self.stat)))
        })
    }
}

/// Bytes read and written, from the line of a device's `stat`: fields 3 and 7 are sectors.
fn block_bytes(text: &str) -> Option<u64> {
    let field: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    field.get(2)?.checked_add(*field.get(6)?)?.checked_mul(SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIO: &str = r#"{
  "fio version" : "fio-3.33",
  "jobs" : [
    { "jobname" : "a", "read" : { "io_bytes" : 4096 }, "write" : { "io_bytes" : 8192 } },
    { "jobname" : "b", "read" : { "io_bytes" : 0 }, "write" : { "io_bytes" : 131072 } }
  ]
}"#;

    fn moved(text: &str) -> Result<Option<Counted>> {
        Printed::of(text.as_bytes()).moved()
    }

    #[test]
    fn fio_counts_both_directions_of_all_jobs() {
        assert_eq!(moved(FIO).unwrap(), Some(Counted { bytes: 4096 + 8192 + 131_072, from: "fio" }));
    }

    #[test]
    fn remarks_around_the_report_stay() {
        let text = format!("fio: a remark {{\n{{ no json\n{FIO}\nand another\n");
        let printed = Printed::of(text.as_bytes());
        assert_eq!(printed.before, b"fio: a remark {\n{ no json\n");
        assert_eq!(printed.after, b"and another\n");
        assert_eq!(printed.moved().unwrap().unwrap().bytes, 143_360);
    }

    #[test]
    fn what_is_not_fio_is_left_alone() {
        for text in ["", "plain\n", "{\"jobs\": []}\n", "{\"fio version\": \"fio-3.33\"", "{\n"] {
            let printed = Printed::of(text.as_bytes());
            assert_eq!((printed.before, printed.moved().unwrap()), (text.as_bytes(), None), "{text:?}");
        }
    }

    #[test]
    fn unified_reporting_counts_once() {
        let text = r#"{"fio version": "fio-3.41-2-gabc", "jobs": [{"mixed": {"io_bytes": 7}},
            {"read": {"io_bytes": 1}, "write": {"io_bytes": 2}, "mixed": {"io_bytes": 3}}]}"#;
        assert_eq!(moved(text).unwrap().unwrap().bytes, 10);
    }

    #[test]
    fn a_report_that_cannot_be_trusted_is_refused() {
        for (text, says) in [
            (FIO.replace("fio-3.33", "fio-2.21"), "2.21"),
            (r#"{"fio version": "fio-3.33", "jobs": []}"#.to_string(), "no jobs"),
            (r#"{"fio version": "fio-3.33", "jobs": [{"read": {}}]}"#.to_string(), "lacks io_bytes"),
            (
                r#"{"fio version": "fio-3.33", "jobs": [{"mixed": {"io_bytes": 0}}]}"#.to_string(),
                "no job moved",
            ),
        ] {
            let Err(Failure::Failed(message)) = moved(&text) else { panic!("{text} was taken") };
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn sectors_are_512_bytes() {
        let text = "  361018   116733 13098378   102375   281237   329834  9763904   370871        0   183144   489327\n";
        assert_eq!(block_bytes(text), Some((13_098_378 + 9_763_904) * 512));
        assert_eq!(block_bytes("1 2 3 4 5 6\n"), None);
        assert_eq!(block_bytes("1 2 x 4 5 6 7\n"), None);
        assert_eq!(block_bytes("1 2 18446744073709551615 4 5 6 7\n"), None);
    }

    #[test]
    fn a_device_is_found_by_name_path_and_link() {
        let root = std::env::temp_dir().join(format!("lode-cost-block-{}", std::process::id()));
        let stat = root.join("sys/class/block/sda1");
        std::fs::create_dir_all(&stat).unwrap();
        std::fs::create_dir_all(root.join("dev")).unwrap();
        std::fs::write(stat.join("stat"), "0 0 2 0 0 0 4 0\n").unwrap();
        std::fs::write(root.join("dev/sda1"), "").unwrap();
        std::os::unix::fs::symlink("sda1", root.join("dev/data")).unwrap();
        for name in ["sda1", "data", root.join("dev/sda1").to_str().unwrap()] {
            let device = BlockDevice::open(&root, Path::new(name)).unwrap();
            let device = Counters::Block(device);
            assert_eq!(device.read().unwrap(), 3072, "{name}");
            assert_eq!(device.moved(1024, 3072).unwrap(), Counted { bytes: 2048, from: "block" });
            assert!(device.moved(3072, 3072).is_err());
        }
        assert!(BlockDevice::open(&root, Path::new("sdb")).is_err());
        std::fs::remove_dir_all(&root).unwrap();
    }
}
