//! What a guest runs in, in words: what must be the same when its state is loaded.
//!
//! The emulator takes a state of another processor, another machine or another version of itself, and the guest dies of it
//! later. So the seal of each slot has these words, and each difference has a sentence of its own.
//!
//! A disk that is a file is known by its inode, size and time of change, which are synced before they are sealed: the file system may
//! keep a time of change in memory long after the data is durable, and a power failure would leave an earlier one. A disk that is a
//! device is known by its own name for itself and its size. The node in `/dev` says nothing of it: it is made anew at each start
//! of the host, and its time of change is not the data's. So writes to a device by others cannot be noticed.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lodestone::error::{Error, Result};
use lodestone::quote::Shown;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::qmp::Qmp;

const SITE: &str = "wsp::identity";
/// Those whose `filename` is a path, whatever it looks like.
const LOCAL_DRIVERS: [&str; 3] = ["file", "host_device", "host_cdrom"];

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    #[serde(flatten)]
    pub emulator: Emulator,
    pub command: Vec<String>,
    pub disks: Vec<Disk>,
}

/// What an emulator that was started says of itself.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Emulator {
    pub version: String,
    pub machine: String,
    pub processor: String,
    /// What its processor tells the guest of itself: registers of CPUID, as hexadecimal numbers.
    pub features: String,
    /// Where its first processor is among its objects, so that it can be asked for at once. Images of earlier versions lack it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
}

/// A file or device that a disk of the guest is in.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    pub path: PathBuf,
    /// Of a device 0.
    pub inode: u64,
    pub bytes: u64,
    /// Of a device 0.
    pub modified_ns: i64,
    /// What a device calls itself: the first of [`names_of_device`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

impl Emulator {
    pub fn of(qmp: &mut Qmp) -> Result<Emulator> {
        let [machine, cpus] = qmp.run_all([get("/machine", "type"), ("query-cpus-fast", json!({}))])?;
        let path = text(&cpus?[0]["qom-path"]);
        let [processor, words] = qmp.run_all([get(&path, "type"), get(&path, "feature-words")])?;
        Ok(Emulator::said(qmp, path, &machine?, &processor?, words))
    }

    /// As [`of`](Emulator::of), of one that most likely has its first processor where another had it.
    pub fn like(other: &Emulator, qmp: &mut Qmp) -> Result<Emulator> {
        if other.path.is_empty() {
            return Emulator::of(qmp);
        }
        let [machine, cpus, processor, words] = qmp.run_all([
            get("/machine", "type"),
            ("query-cpus-fast", json!({})),
            get(&other.path, "type"),
            get(&other.path, "feature-words"),
        ])?;
        match text(&cpus?[0]["qom-path"]) == other.path {
            true => Ok(Emulator::said(qmp, other.path.clone(), &machine?, &processor?, words)),
            false => Emulator::of(qmp),
        }
    }

    fn said(qmp: &Qmp, path: String, machine: &Value, processor: &Value, words: Result<Value>) -> Emulator {
        let machine = text(machine);
        // An emulator of another architecture has other words, or none.
        let words = words.unwrap_or_default();
        let registers = words.as_array().into_iter().flatten().map(|word| {
            let number = |name: &str| word[name].as_u64().unwrap_or_default();
            let register = word["cpuid-register"].as_str().unwrap_or_default();
            format!(
                "{:x}.{:x}.{register}={:x}",
                number("cpuid-input-eax"),
                number("cpuid-input-ecx"),
                number("features")
            )
        });
        let features = registers.collect::<Vec<_>>().join(" ");
        let machine = machine.strip_suffix("-machine").unwrap_or(&machine).to_string();
        Emulator { version: qmp.version.clone(), machine, processor: text(processor), features, path }
    }

    /// ESTALE with the first difference to what the state was saved in.
    pub fn fits(&self, saved: &Emulator) -> Result<()> {
        let differs = |what: &str, then: &str, now: &str| {
            refuse(format!(
                "{what} was {then} when the guest was suspended, and is {now} now: use the former again"
            ))
        };
        if self.version != saved.version {
            return differs("the emulator's version", &saved.version, &self.version);
        }
        if self.machine != saved.machine {
            return differs("the machine type", &saved.machine, &self.machine);
        }
        if self.processor != saved.processor {
            return differs("the processor model", &saved.processor, &self.processor);
        }
        if self.features != saved.features {
            let message = "the processor has other features than when the guest was suspended";
            return refuse(format!(
                "{message} ({} then, {} now): use the same host",
                saved.features, self.features
            ));
        }
        Ok(())
    }
}

fn get(path: &str, property: &str) -> (&'static str, Value) {
    ("qom-get", json!({ "path": path, "property": property }))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

/// Files of the disks that an emulator has, with those that they are based on; it runs in the directory `cwd`. All are synced, at
/// once: what is said of them is durable.
pub fn synced_disks_of(qmp: &mut Qmp, cwd: &Path) -> Result<Vec<Disk>> {
    let blocks = qmp.run("query-block", json!({}))?;
    let mut paths: Vec<PathBuf> = Vec::new();
    for block in blocks.as_array().into_iter().flatten() {
        paths.extend(files_of_image(&block["inserted"]["image"])?.into_iter().map(|file| cwd.join(file)));
    }
    paths.sort();
    paths.dedup();
    std::thread::scope(|scope| {
        // Most guests have one, which needs no thread.
        let (first, others) = match paths.split_first() {
            Some((first, others)) => (Some(first), others),
            None => (None, &paths[..]),
        };
        let others: Vec<_> = others.iter().map(|path| scope.spawn(|| Disk::synced(path))).collect();
        let first = first.map(|path| Disk::synced(path));
        let others = others.into_iter().map(|thread| thread.join().expect("syncing does not panic"));
        first.into_iter().chain(others).collect()
    })
}

/// Local files of an image and of those that it is based on.
fn files_of_image(mut image: &Value) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    while let Some(file) = image["filename"].as_str() {
        files.extend(files_of(file)?);
        // A qcow2's clusters may lie in a file of their own.
        if let Some(data) = image["format-specific"]["data"]["data-file"].as_str() {
            files.extend(files_of(data)?);
        }
        image = &image["backing-image"];
    }
    Ok(files)
}

/// Local files that a name of the emulator's stands for; none for a disk over the network, which nobody here can look at.
fn files_of(name: &str) -> Result<Vec<PathBuf>> {
    let Some(described) = name.strip_prefix("json:") else {
        return Ok(if name.is_empty() || has_protocol(name) { Vec::new() } else { vec![name.into()] });
    };
    // One that is too long is cut by the emulator.
    let described: Value = serde_json::from_str(described).map_err(|e| {
        let message = format!("the emulator has a disk {name}, whose files cannot be told from that: {e}");
        Error::message(libc::EPROTO, SITE, message)
    })?;
    let mut files = Vec::new();
    named_in(&described, &mut files);
    Ok(files)
}

/// Values of `filename`, however deep; options may be nested, or written with dots.
fn named_in(described: &Value, files: &mut Vec<PathBuf>) {
    match described {
        Value::Object(options) => options.iter().for_each(|(key, value)| match value.as_str() {
            Some(file) if key.rsplit('.').next() == Some("filename") => {
                let driver =
                    key.strip_suffix("filename").and_then(|before| options.get(&format!("{before}driver")));
                let is_local = driver.and_then(Value::as_str).is_some_and(|d| LOCAL_DRIVERS.contains(&d));
                if is_local || !(file.is_empty() || has_protocol(file)) {
                    files.push(file.into());
                }
            }
            _ => named_in(value, files),
        }),
        Value::Array(values) => values.iter().for_each(|value| named_in(value, files)),
        _ => {}
    }
}

/// As the emulator sees it: a colon before the first slash (`nbd://`, `rbd:`).
fn has_protocol(name: &str) -> bool {
    name.split('/').next().is_some_and(|first| first.contains(':'))
}

impl Disk {
    pub fn of(path: &Path) -> Result<Disk> {
        let about = fs::metadata(path).map_err(|e| Error::io(e, SITE, "cannot examine the disk", path))?;
        Disk::described(path, &about)
    }

    /// As it is after a power failure.
    pub fn synced(path: &Path) -> Result<Disk> {
        let failed = |e: io::Error| Error::io(e, SITE, "cannot sync the disk", path);
        let about = fs::metadata(path).map_err(|e| Error::io(e, SITE, "cannot examine the disk", path))?;
        let is_device = about.file_type().is_block_device();
        if !is_device && !about.is_file() {
            return Disk::described(path, &about);
        }
        // The emulator's locks are those of its own open file. A drive without a medium is opened all the same.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        sync(&file).map_err(failed)?;
        match is_device {
            true => Disk::described(path, &about),
            false => Disk::described(path, &file.metadata().map_err(failed)?),
        }
    }

    fn described(path: &Path, about: &Metadata) -> Result<Disk> {
        let kind = about.file_type();
        let path = path.to_owned();
        if !kind.is_block_device() && !kind.is_char_device() {
            let modified_ns = about.mtime() * 1_000_000_000 + about.mtime_nsec();
            return Ok(Disk { path, inode: about.ino(), bytes: about.len(), modified_ns, device: None });
        }
        let device = names_of_device(about)
            .map_err(|e| Error::io(e, SITE, "cannot tell which device is the disk", &path))?
            .into_iter()
            .next();
        Ok(Disk { path, inode: 0, bytes: bytes_of_device(about), modified_ns: 0, device })
    }

    /// ESTALE where the file is not what it was.
    pub fn unchanged(&self) -> Result<()> {
        let now = match Disk::of(&self.path) {
            Ok(now) => now,
            Err(e) if e.errno() == libc::ENOENT => {
                return refuse(format!("the disk {} is gone: put it back", self.path.shown()));
            }
            Err(e) => return Err(e),
        };
        // A device has several names, and may have got another first one.
        let is_same_device = match (&self.device, &now.device) {
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
            (Some(then), Some(now)) if then == now => true,
            (Some(then), Some(_)) => fs::metadata(&self.path)
                .and_then(|about| names_of_device(&about))
                .is_ok_and(|names| names.contains(then)),
        };
        let what = match () {
            _ if !is_same_device || now.inode != self.inode => "was replaced",
            _ if now.bytes != self.bytes => "has another size",
            _ if now.modified_ns != self.modified_ns => "was written to",
            _ => return Ok(()),
        };
        refuse(format!(
            "the disk {} {what} since the guest was suspended: what the guest remembers of it may be wrong, and would damage \
             it; --force resumes the guest all the same",
            self.path.shown()
        ))
    }
}

/// Makes data and description durable. A file system that is never written to may not know how.
fn sync(file: &File) -> io::Result<()> {
    match file.sync_all() {
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::EINVAL | libc::EROFS | libc::EOPNOTSUPP | libc::ENOMEDIUM)
            ) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

/// Names that a device has whenever and in whatever order devices are found, the surest first. The last one always is there: where it
/// is attached.
fn names_of_device(about: &Metadata) -> io::Result<Vec<String>> {
    let dir = fs::canonicalize(dir_of_device(about))?;
    let mut names = Vec::new();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        Some(text.trim().to_string()).filter(|text| !text.is_empty())
    };
    // A partition is a number in what has the name.
    let (whole, part) = match (read(dir.join("partition")), dir.parent()) {
        (Some(number), Some(whole)) => (whole, format!(" partition {number}")),
        _ => (&*dir, String::new()),
    };
    let text = |file: &str| read(whole.join(file));
    for file in ["dm/uuid", "md/uuid", "wwid", "device/wwid", "device/cid", "serial"] {
        names.extend(text(file).map(|name| format!("{file} {name}{part}")));
    }
    // A loop device is what it stands for.
    let offset = text("loop/offset").unwrap_or_default();
    names.extend(text("loop/backing_file").map(|file| format!("loop {file} at {offset}{part}")));
    // As udev calls it.
    let node = |path: &Path| fs::metadata(path).is_ok_and(|other| other.rdev() == about.rdev());
    for by in ["/dev/disk/by-id", "/dev/disk/by-partuuid"] {
        let links = fs::read_dir(by).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut links: Vec<String> =
            links.filter(|link| node(link)).map(|link| link.display().to_string()).collect();
        links.sort();
        names.extend(links);
    }
    names.push(dir.display().to_string());
    Ok(names)
}

/// Sectors of the kernel's have one size, whatever the device's have.
fn bytes_of_device(about: &Metadata) -> u64 {
    const SECTOR_BYTES: u64 = 512;
    let sectors = fs::read_to_string(dir_of_device(about).join("size")).unwrap_or_default();
    sectors.trim().parse::<u64>().unwrap_or(0) * SECTOR_BYTES
}

fn dir_of_device(about: &Metadata) -> PathBuf {
    let kind = if about.file_type().is_block_device() { "block" } else { "char" };
    let (major, minor) = (rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
    PathBuf::from(format!("/sys/dev/{kind}/{major}:{minor}"))
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::message(libc::ESTALE, SITE, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulator() -> Emulator {
        let text = |t: &str| t.to_string();
        Emulator {
            version: text("7.2.22"),
            machine: text("pc-q35-7.2"),
            processor: text("max"),
            features: text("1=2"),
            path: text("/machine/unattached/device[0]"),
        }
    }

    #[test]
    fn each_difference_has_a_sentence_with_both() {
        let now = emulator();
        assert!(now.fits(&emulator()).is_ok());
        // Where it is asked for says nothing of it.
        assert!(now.fits(&Emulator { path: text(&json!("/machine/cpu")), ..emulator() }).is_ok());
        let others = [
            ("version", Emulator { version: "10.0.2".into(), ..emulator() }),
            ("machine type", Emulator { machine: "pc-i440fx-7.2".into(), ..emulator() }),
            ("processor model", Emulator { processor: "qemu64".into(), ..emulator() }),
            ("features", Emulator { features: "1=3".into(), ..emulator() }),
        ];
        for (what, saved) in others {
            let e = now.fits(&saved).unwrap_err();
            assert!(e.errno() == libc::ESTALE && e.to_string().contains(what), "{e}");
        }
        let e = now.fits(&Emulator { version: "10.0.2".into(), ..emulator() }).unwrap_err().to_string();
        assert!(e.contains("10.0.2") && e.contains("7.2.22"), "{e}");
    }

    #[test]
    fn local_files_are_told_from_disks_elsewhere() {
        let files = |name: &str| files_of(name).unwrap();
        assert_eq!(files("disk.img"), [Path::new("disk.img")]);
        assert_eq!(files("./a:b"), [Path::new("./a:b")]);
        for elsewhere in ["nbd://host/disk", "nbd:unix:/socket", "rbd:pool/disk", "null-co://", ""] {
            assert!(files(elsewhere).is_empty(), "{elsewhere}");
        }
        let nested = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a:b"},"backing":{"file.filename":"/c"}}"#;
        let mut found = files(nested);
        found.sort();
        assert_eq!(found, [Path::new("/c"), Path::new("a:b")]);
        assert!(files(r#"json:{"driver":"nbd","server":{"host":"h","port":"1"}}"#).is_empty());
        assert!(
            files(r#"json:{"driver":"raw","file":{"driver":"http","filename":"http://h/d"}}"#).is_empty()
        );
        assert!(files_of(r#"json:{"driver":"qcow2","fil"#).is_err(), "one that was cut");
    }

    #[test]
    fn an_image_has_all_files_below_it() {
        let image = json!({
            "filename": "/top",
            "format-specific": { "type": "qcow2", "data": { "data-file": "clusters", "data-file-raw": false } },
            "backing-image": { "filename": "nbd://host/middle", "backing-image": { "filename": "base" } },
        });
        assert_eq!(files_of_image(&image).unwrap(), ["/top", "clusters", "base"].map(PathBuf::from));
        assert!(files_of_image(&Value::Null).unwrap().is_empty(), "no medium in the drive");
    }

    #[test]
    fn disks_that_changed_are_noticed() {
        let path = std::env::temp_dir().join(format!("lode-wsp-disk-{}", std::process::id()));
        fs::write(&path, b"one").unwrap();
        let disk = Disk::of(&path).unwrap();
        assert!(disk.unchanged().is_ok());
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert!(disk.unchanged().unwrap_err().to_string().contains("written to"));
        let disk = Disk::of(&path).unwrap();
        file.set_len(2).unwrap();
        assert!(disk.unchanged().unwrap_err().to_string().contains("size"));
        fs::remove_file(&path).unwrap();
        assert!(disk.unchanged().unwrap_err().to_string().contains("gone"));
    }

    #[test]
    fn a_file_that_nobody_can_sync_is_taken_as_it_is() {
        // As on a file system that is only ever read.
        assert_eq!(
            File::open("/proc/version").unwrap().sync_all().unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
        assert!(Disk::synced(Path::new("/proc/version")).is_ok());
        assert!(Disk::synced(Path::new("/proc/none")).unwrap_err().errno() == libc::ENOENT);
    }

    #[test]
    fn a_device_is_known_by_its_name_for_itself_and_its_size() {
        let Ok(disk) = Disk::synced(Path::new("/dev/null")) else {
            return println!(
                "SKIPPED: a_device_is_known_by_its_name_for_itself_and_its_size: there is no sysfs"
            );
        };
        assert!(disk.device.as_ref().is_some_and(|name| name.ends_with("mem/null")), "{disk:?}");
        assert_eq!((disk.inode, disk.modified_ns), (0, 0));
        assert!(disk.unchanged().is_ok());
        let refused = |disk: Disk, what: &str| {
            let said = disk.unchanged().unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        };
        refused(Disk { device: Some("wwid another".into()), ..disk.clone() }, "was replaced");
        refused(Disk { bytes: 1, ..disk.clone() }, "another size");
        // Sealed before devices were known by name, and the other way round.
        refused(Disk { device: None, ..disk.clone() }, "was replaced");
        refused(Disk { path: "/proc/version".into(), ..disk }, "was replaced");
    }

    #[test]
    fn a_loop_device_is_what_it_stands_for() {
        let skipped = |why: &str| println!("SKIPPED: a_loop_device_is_what_it_stands_for: {why}");
        let losetup = |words: &[&str]| {
            let done = std::process::Command::new("losetup").args(words).output().ok()?;
            done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_string())
        };
        let files = ["one", "two"].map(|name| {
            let path = std::env::temp_dir().join(format!("lode-wsp-loop-{name}-{}", std::process::id()));
            fs::write(&path, vec![0; 1 << 20]).unwrap();
            path.to_str().unwrap().to_string()
        });
        let attach = |file: &str| losetup(&["--find", "--show", file]);
        let Some(device) = attach(&files[0]) else {
            files.iter().for_each(|file| fs::remove_file(file).unwrap());
            return skipped("no loop device can be had, which takes root");
        };
        let look = || {
            let disk = Disk::synced(Path::new(&device)).unwrap();
            assert_eq!((disk.bytes, disk.inode, disk.modified_ns), (1 << 20, 0, 0));
            assert!(disk.device.as_ref().unwrap().contains(&files[0]), "{disk:?}");
            disk.unchanged().unwrap();
            // The next start of the host makes another node.
            let node = std::env::temp_dir().join(format!("lode-wsp-loop-node-{}", std::process::id()));
            let mknod = std::process::Command::new("cp").args(["-a", &device]).arg(&node).status().unwrap();
            assert!(mknod.success());
            let elsewhere = Disk { path: node.clone(), ..disk.clone() }.unchanged();
            fs::remove_file(&node).unwrap();
            elsewhere.unwrap();
            disk
        };
        let outcome = std::panic::catch_unwind(look);
        losetup(&["--detach", &device]).unwrap();
        let disk = outcome.unwrap();
        // The same device for another file. Somebody else may have got it meanwhile.
        let other = losetup(&[&device, &files[1]]).map(|_| disk.unchanged().unwrap_err().to_string());
        losetup(&["--detach", &device]);
        files.iter().for_each(|file| fs::remove_file(file).unwrap());
        match other {
            Some(said) => assert!(said.contains("was replaced"), "{said}"),
            None => skipped("the device is somebody else's now"),
        }
    }
}
