//! Where a guest is described, who may change it, and whether it runs.
//!
//! ```text
//! DIR/NAME/guest.json     what it runs in
//! DIR/NAME/lock           held by whoever starts, suspends, resumes or removes it
//! DIR/NAME/alive          held by the machine emulator, and by it alone: as long as it lives, whoever started it
//! DIR/NAME/process        the emulator's number
//! DIR/NAME/qmp            the emulator's socket
//! DIR/NAME/history.jsonl  its suspends and resumes
//! DIR/NAME/console.log, qemu.log
//! ```
//!
//! Locks are those of open files: a process that is killed leaves none.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lodestone::fs::FixedPlace;
use lodestone::media::Part;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::pooled::PoolFile;
use crate::failure::{Failure, Result};
use crate::target::show;

const SITE: &str = "wsp::place";
/// Others' work on a guest is waited for so long.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);
const LOCK_PAUSE: Duration = Duration::from_micros(500);
/// To ask whether an emulator lives takes less by far.
const ASKED_FOR_MAX: Duration = Duration::from_secs(1);
const ASKED_PAUSE: Duration = Duration::from_micros(200);
/// A description or history that is longer was not written by us, in bytes.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// Where root's guests are described.
const ROOT_DIR: &str = "/var/lib/lode/wsp";

/// What a guest runs in.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub version: u32,
    pub qemu: PathBuf,
    pub accel: String,
    /// The file or device of its memory.
    pub ram: PathBuf,
    pub ram_bytes: u64,
    /// Bytes behind it, with the record.
    pub trailer_bytes: u64,
    /// Where it begins there, in bytes.
    #[serde(default)]
    pub ram_offset: u64,
    /// The file of a pool that it is; then `ram` is what the pool lies in.
    #[serde(default)]
    pub pooled: Option<PoolFile>,
    /// Of that file.
    #[serde(default)]
    pub ram_number: u64,
    /// The directory of its slots.
    pub slots: PathBuf,
    /// Of the image in its memory, in hexadecimal: memory with another is another guest's. None of a guest that an older version booted.
    #[serde(default)]
    pub image: Option<String>,
    pub assume: Option<String>,
    pub disks: Vec<PathBuf>,
    /// What they were taken for when they were named, each; none of a guest that an older version booted. The guest may have written
    /// anything to them since.
    #[serde(default)]
    pub formats: Vec<String>,
    pub cpus: i64,
    pub priority: i32,
    pub agent: bool,
    /// Where relative paths of its options begin.
    pub cwd: PathBuf,
    pub options: Vec<String>,
    /// Whose image it was made of: its memory ends with it.
    pub clone_of: Option<String>,
    /// Its disks were copied for it, and go with it.
    #[serde(default)]
    pub own_disks: bool,
    /// Resumes that failed since the last that did not.
    pub failed: u32,
}

/// The version of a description.
pub const VERSION: u32 = 1;

impl Config {
    /// What of the file or device is the guest's, where that is a part.
    pub fn part(&self) -> Option<Part> {
        self.fixed().map(|place| Part { offset: place.offset, bytes: place.bytes })
    }

    /// Where the file of a pool was when it was made.
    pub fn fixed(&self) -> Option<FixedPlace> {
        self.pooled.as_ref().map(|_| FixedPlace {
            offset: self.ram_offset,
            bytes: self.ram_bytes + self.trailer_bytes,
            number: self.ram_number,
            path: self.ram.clone(),
        })
    }

    /// Where its memory is, for people.
    pub fn memory(&self) -> String {
        match &self.pooled {
            Some(file) => file.to_string(),
            None => show(&self.ram).to_string(),
        }
    }
}

/// The number of an image, as a description has it.
pub fn image_number(image: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(image))
}

/// All guests.
#[derive(Clone)]
pub struct Guests {
    dir: PathBuf,
}

impl Guests {
    pub fn new(dir: Option<&Path>) -> Result<Guests> {
        let dir = match dir {
            Some(dir) => std::path::absolute(dir)
                .map_err(|e| Failure::failed(format_args!("cannot find {}: {e}", show(dir))))?,
            None => standard_dir()?,
        };
        Ok(Guests { dir })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn place(&self, name: &str) -> Place {
        Place { name: name.to_string(), dir: self.dir.join(name) }
    }

    /// A guest that was started once.
    pub fn known(&self, name: &str) -> Result<Place> {
        let place = self.place(name);
        match place.is_there() {
            true => Ok(place),
            false => Err(Failure::failed(format_args!(
                "there is no guest {name} in {}: lode wsp list shows those that are",
                show(&self.dir)
            ))),
        }
    }

    /// Those of these names, and what is wrong with each that is not known: it keeps nobody from the others.
    pub fn named(&self, names: &[String]) -> (Vec<Place>, Vec<(String, Failure)>) {
        let mut unknown = Vec::new();
        let known = names.iter().filter_map(|name| {
            self.known(name).map_err(|failure| unknown.push((name.clone(), failure))).ok()
        });
        let known = known.collect();
        (known, unknown)
    }

    /// Those that run, for whoever suspends all, and those that somebody works on: he may be resuming them. Where nobody ever started
    /// one, somebody else's guests may be meant: that is no success when power fails.
    pub fn running(&self) -> Result<(Vec<Place>, Vec<Place>)> {
        if !self.dir.exists() {
            return Err(Failure::failed(format_args!(
                "there are no guests: {} does not exist; root's are in {ROOT_DIR}: run as root, or give --wsp-dir",
                show(&self.dir)
            )));
        }
        let (mut running, mut busy) = (Vec::new(), Vec::new());
        for place in self.all()? {
            // In that order: of whoever is through by then the guest is seen.
            match (place.lock_if_free().is_none(), place.is_alive()) {
                (_, true) => running.push(place),
                (true, false) => busy.push(place),
                (false, false) => {}
            }
        }
        Ok((running, busy))
    }

    /// Makes the directory, so that no guest at all is told from a wrong directory.
    pub fn make(&self) -> Result<()> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|e| Failure::failed(format_args!("cannot make the directory {}: {e}", show(&self.dir))))
    }

    /// In the order of their names.
    pub fn all(&self) -> Result<Vec<Place>> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Failure::failed(format_args!("cannot list {}: {e}", show(&self.dir)))),
        };
        let entries: io::Result<Vec<_>> = entries.collect();
        let entries = entries
            .map_err(|e| Failure::failed(format_args!("cannot list {} to its end: {e}", show(&self.dir))))?;
        let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
        let mut places: Vec<Place> = names.map(|name| self.place(&name)).filter(Place::is_there).collect();
        places.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(places)
    }
}

fn standard_dir() -> Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(ROOT_DIR));
    }
    let home = |name: &str| std::env::var_os(name).filter(|v| Path::new(v).is_absolute()).map(PathBuf::from);
    let state = home("XDG_STATE_HOME").or_else(|| home("HOME").map(|h| h.join(".local/state")));
    state.map(|dir| dir.join("lode/wsp")).ok_or_else(|| {
        Failure::failed("neither XDG_STATE_HOME nor HOME says where guests are described: give --wsp-dir")
    })
}

/// The directory of one guest.
#[derive(Clone)]
pub struct Place {
    pub name: String,
    pub dir: PathBuf,
}

/// Who has it may change the guest.
pub struct Lock {
    _file: File,
}

impl Place {
    pub fn make(&self) -> Result<()> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|e| self.failed("make the directory", &self.dir, e))
    }

    fn failed(&self, what: &str, path: &Path, e: io::Error) -> Failure {
        Failure::failed(format_args!("guest {}: cannot {what} {}: {e}", self.name, show(path)))
    }

    /// Whether a guest was started here once. One whose description is lost, or cannot be looked at, is not forgotten.
    pub fn is_there(&self) -> bool {
        let is_missing = |name: &str| fs::metadata(self.dir.join(name)).is_err_and(|e| is_nothing(&e));
        !["guest.json", "console.log", "history.jsonl"].into_iter().all(is_missing)
    }

    pub fn config(&self) -> Result<Config> {
        let path = self.dir.join("guest.json");
        let text = read_text(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Failure::failed(format_args!(
                "guest {}: its description {} is missing: put it back, or start the guest with all its options",
                self.name,
                show(&path)
            )),
            _ => self.failed("read", &path, e),
        })?;
        let config: Config = serde_json::from_str(&text).map_err(|e| {
            let message = format!("guest {}: {} is not understood: {e}", self.name, show(&path));
            Failure::failed(format_args!("{message}; start the guest with all its options"))
        })?;
        match config.version {
            VERSION => Ok(config),
            other => Err(Failure::failed(format_args!(
                "guest {}: {} has version {other}, this program knows {VERSION}",
                self.name,
                show(&path)
            ))),
        }
    }

    /// Replaces the description: the old or the new one is there after a power failure.
    pub fn write_config(&self, config: &Config) -> Result<()> {
        let (path, new) = (self.dir.join("guest.json"), self.dir.join("guest.json.new"));
        let text = serde_json::to_string_pretty(config).expect("our documents have string keys only");
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.dir)?.sync_all()
        });
        written.map_err(|e| self.failed("write", &path, e))
    }

    /// Waits for whoever works on the guest.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.dir.join("lock");
        let open = || open_lock(&path).map_err(|e| self.failed("open", &path, e));
        let mut file = open()?;
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&file, &path) => return Ok(Lock { _file: file }),
                // Whoever had it removed it: others have another.
                Ok(()) => file = open()?,
                Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_WAIT_MAX => std::thread::sleep(LOCK_PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    return Err(Failure::failed(format_args!(
                        "guest {}: another command has worked on it for {} s: wait for it, or end it",
                        self.name,
                        LOCK_WAIT_MAX.as_secs()
                    )));
                }
                Err(e) => return Err(self.failed("lock", &path, e.into())),
            }
        }
    }

    /// None where somebody works on the guest.
    pub fn lock_if_free(&self) -> Option<Lock> {
        let path = self.dir.join("lock");
        let file = open_lock(&path).ok()?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        is_at(&file, &path).then_some(Lock { _file: file })
    }

    /// Whether the emulator lives. One that cannot be looked at is not taken for dead: whoever does something with it is told why.
    pub fn is_alive(&self) -> bool {
        self.lives().unwrap_or(true)
    }

    /// As [`is_alive`](Place::is_alive), for who tells why that cannot be told.
    pub fn lives(&self) -> Result<bool> {
        let path = self.dir.join("alive");
        match open_lock(&path) {
            Ok(file) => {
                let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
                Ok(locked == Err(Errno::WOULDBLOCK))
            }
            Err(e) if is_nothing(&e) => Ok(false),
            Err(e) => Err(self.failed("tell whether it runs: cannot open", &path, e)),
        }
    }

    /// What the emulator is to hold: an open file with a lock, which ends with the last process that has it.
    pub fn life(&self) -> Result<File> {
        let path = self.dir.join("alive");
        let file = open_lock(&path).map_err(|e| self.failed("open", &path, e))?;
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                // Whoever asks whether it lives has the lock for a moment.
                Err(Errno::WOULDBLOCK) if begun.elapsed() < ASKED_FOR_MAX => std::thread::sleep(ASKED_PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    return Err(Failure::failed(format_args!("guest {} runs already", self.name)));
                }
                Err(e) => return Err(self.failed("lock", &path, e.into())),
            }
        }
    }

    /// Kills an emulator that does not end by itself; whether it is gone.
    pub fn kill_emulator(&self, at_most: Duration) -> bool {
        if self.process().is_none() {
            return !self.is_alive();
        }
        if let Some(process) = self.emulator().and_then(|n| rustix::process::Pid::from_raw(n as i32)) {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        }
        self.wait_end(at_most)
    }

    /// Notes the emulator's number, for those who look at its page tables.
    pub fn note_process(&self, process: u32) -> lodestone::Result<()> {
        let path = self.dir.join("process");
        fs::write(&path, process.to_string())
            .map_err(|e| lodestone::Error::io(e, SITE, "cannot write", &path))
    }

    fn process(&self) -> Option<u32> {
        read_text(&self.dir.join("process")).ok()?.parse().ok()
    }

    /// The emulator's number: what has its life open as standard output is it, and no other process that got the number.
    pub fn emulator(&self) -> Option<u32> {
        let process = self.process()?;
        // By the file itself, for its path may have been given in several ways.
        let file = |path: PathBuf| fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
        let standard_output = file(format!("/proc/{process}/fd/1").into());
        (standard_output.is_some() && standard_output == file(self.dir.join("alive"))).then_some(process)
    }

    /// Waits until the emulator is gone; whether it is.
    pub fn wait_end(&self, at_most: Duration) -> bool {
        let begun = Instant::now();
        while self.is_alive() {
            if begun.elapsed() > at_most {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// A socket in the guest's directory, however long that one's path is.
    pub fn listen(&self, name: &str) -> Result<UnixListener> {
        let path = self.dir.join(name);
        let bound = remove_if_there(&path).and_then(|()| self.through_dir(name, UnixListener::bind));
        bound.map_err(|e| self.failed("listen on", &path, e))
    }

    pub fn connect(&self, name: &str) -> io::Result<UnixStream> {
        self.through_dir(name, UnixStream::connect)
    }

    fn through_dir<T>(&self, name: &str, does: impl FnOnce(PathBuf) -> io::Result<T>) -> io::Result<T> {
        use std::os::fd::AsRawFd;
        let dir = File::open(&self.dir)?;
        does(PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd())))
    }

    /// The last lines of what the emulator said.
    pub fn last_words(&self) -> String {
        let text = read_text(&self.dir.join("qemu.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("; ")
    }

    pub fn history(&self) -> Vec<serde_json::Value> {
        let text = read_text(&self.dir.join("history.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Best effort: what happened has happened.
    pub fn note(&self, entry: &impl Serialize) {
        let line = serde_json::to_string(entry).expect("our documents have string keys only");
        let file = OpenOptions::new().append(true).create(true).open(self.dir.join("history.jsonl"));
        let _ = file.and_then(|mut file| writeln!(file, "{line}"));
    }

    /// Has what was noted survive a power failure.
    pub fn keep_notes(&self) {
        let _ = File::open(self.dir.join("history.jsonl")).and_then(|file| file.sync_all());
    }
}

/// Makes a directory for memory and slots, whatever the umask. See [`check_own_dir`].
pub fn make_own_dir(dir: &Path) -> lodestone::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|e| lodestone::Error::io(e, SITE, "cannot make the directory", dir))?;
    check_own_dir(dir)
}

/// EPERM for a directory, or a link to one, that somebody else made, or that others may change: memory and slots there would be
/// theirs. He who owns what it lies in might do so anyway. Nothing where there is none.
pub fn check_own_dir(dir: &Path) -> lodestone::Result<()> {
    let examined = |e| lodestone::Error::io(e, SITE, "cannot examine", dir);
    let link = match fs::symlink_metadata(dir) {
        Ok(link) => link,
        Err(e) if is_nothing(&e) => return Ok(()),
        Err(e) => return Err(examined(e)),
    };
    let (us, parent) =
        (rustix::process::geteuid().as_raw(), dir.parent().and_then(|dir| fs::metadata(dir).ok()));
    let is_ours = |about: &fs::Metadata| {
        about.uid() == us || parent.as_ref().is_some_and(|parent| parent.uid() == about.uid())
    };
    let refused = |what: &str| {
        let message = format!("{} {what}: guests' memory is not kept there", show(dir));
        Err(lodestone::Error::message(libc::EPERM, SITE, message))
    };
    if !is_ours(&link) {
        return refused("is somebody else's; remove it, or chown it");
    }
    let about = fs::metadata(dir).map_err(examined)?;
    let group = if about.gid() == rustix::process::getegid().as_raw() { 0 } else { 0o020 };
    match about.mode() & (group | 0o002) {
        _ if !about.is_dir() => refused("is no directory; remove it"),
        _ if !is_ours(&about) => refused("is a link to what is somebody else's; remove it"),
        0 => Ok(()),
        _ => refused("can be changed by others; chmod go-w it"),
    }
}

pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Nothing is written to it, so that a file system that is read-only by now hides no guest.
fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    opened.or_else(|e| if is_nothing(&e) { Err(e) } else { File::open(path) })
}

/// Whether an open file is still the one that has this name.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |about: fs::Metadata| (about.dev(), about.ino());
    fs::metadata(path)
        .map(identity)
        .is_ok_and(|named| file.metadata().map(identity).is_ok_and(|it| it == named))
}

/// Nothing is there, as opposed to nobody knows.
fn is_nothing(e: &io::Error) -> bool {
    [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&e.kind())
}

fn read_text(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > TEXT_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"));
    }
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// A file's extended attributes are nobody's business here; its file system is.
pub fn is_hugetlbfs(dir: &Path) -> Option<u64> {
    const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
    let path = CString::new(dir.as_os_str().as_encoded_bytes()).ok()?;
    let about = rustix::fs::statfs(&path).ok()?;
    (about.f_type as u32 == HUGETLBFS_MAGIC).then_some(about.f_bsize as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> (tempdir::Dir, Place) {
        let dir = tempdir::Dir::new(name);
        let place = Guests { dir: dir.0.clone() }.place("g");
        place.make().unwrap();
        (dir, place)
    }

    mod tempdir {
        pub struct Dir(pub std::path::PathBuf);

        impl Dir {
            pub fn new(name: &str) -> Dir {
                let dir = std::env::temp_dir().join(format!("lode-wsp-{name}-{}", std::process::id()));
                std::fs::create_dir_all(&dir).unwrap();
                Dir(dir)
            }
        }

        impl Drop for Dir {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    fn who_holds_its_life_is_alive() {
        let (_dir, place) = place("life");
        assert!(!place.is_alive());
        let life = place.life().unwrap();
        assert!(place.is_alive() && place.life().is_err());
        let other = life.try_clone().unwrap();
        drop(life);
        assert!(place.is_alive(), "as long as anybody has it");
        drop(other);
        assert!(!place.is_alive() && place.wait_end(Duration::ZERO));
    }

    #[test]
    fn a_lock_that_was_removed_is_nobodys() {
        let (_dir, place) = place("lock");
        let first = place.lock().unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| place.lock().map(|lock| (lock, place.lock_if_free().is_none())));
            std::thread::sleep(Duration::from_millis(50));
            fs::remove_file(place.dir.join("lock")).unwrap();
            drop(first);
            let (_lock, is_taken) = second.join().unwrap().unwrap();
            assert!(is_taken, "another has it, too");
        });
    }

    #[test]
    fn a_guest_that_cannot_be_looked_at_is_not_dead() {
        let (_dir, place) = place("looked-at");
        assert!(!Place { name: "none".into(), dir: place.dir.join("none") }.is_alive());
        // What opens for nobody, root included.
        std::os::unix::fs::symlink("alive", place.dir.join("alive")).unwrap();
        assert!(place.is_alive() && place.lives().is_err());
        fs::write(place.dir.join("guest.json"), "{").unwrap();
        let guests = Guests { dir: place.dir.parent().unwrap().into() };
        assert_eq!(guests.running().unwrap().0.len(), 1);
        fs::remove_file(place.dir.join("alive")).unwrap();
        assert!(guests.running().unwrap().0.is_empty());
        let _lock = place.lock().unwrap();
        assert_eq!(guests.running().unwrap().1.len(), 1, "somebody may be resuming it");
    }

    #[test]
    fn memory_is_kept_in_nobody_elses_directory() {
        let (_dir, place) = place("own");
        let dir = place.dir.join("m.wsp");
        check_own_dir(&dir).unwrap();
        make_own_dir(&dir).unwrap();
        make_own_dir(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        let refused = |dir: &Path| make_own_dir(dir).unwrap_err().to_string();
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert!(refused(&dir).contains("chmod"));
        let link = place.dir.join("link.wsp");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(refused(&link).contains("chmod"));
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        make_own_dir(&link).unwrap();
        if !rustix::process::geteuid().is_root() {
            return println!("SKIPPED: memory_is_kept_in_nobody_elses_directory: others' takes root");
        }
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(refused(&link).contains("somebody else's"));
        std::os::unix::fs::chown(&dir, Some(65534), None).unwrap();
        assert!(refused(&dir).contains("somebody else's"));
    }

    #[test]
    fn an_emulator_is_killed_however_its_directory_is_called() {
        let (dir, place) = place("kill");
        let mut sleep = std::process::Command::new("sleep");
        let mut child = sleep.arg("600").stdout(place.life().unwrap()).spawn().unwrap();
        // What it was started with is open in it, too.
        drop(sleep);
        place.note_process(child.id()).unwrap();
        std::os::unix::fs::symlink(&dir.0, dir.0.join("link")).unwrap();
        let other = Place { name: "g".into(), dir: dir.0.join("link").join("g") };
        assert!(other.kill_emulator(Duration::from_secs(60)) && !place.is_alive());
        child.wait().unwrap();
    }

    #[test]
    fn sockets_have_long_paths() {
        let (_dir, short) = place("long");
        let dir = short.dir.join("x".repeat(120));
        let place = Place { name: "g".into(), dir };
        place.make().unwrap();
        let listener = place.listen("qmp").unwrap();
        place.connect("qmp").unwrap();
        drop(listener);
        assert!(place.connect("qmp").is_err());
        place.listen("qmp").unwrap();
    }

    #[test]
    fn a_description_is_read_back_and_a_foreign_one_refused() {
        let (_dir, place) = place("config");
        let config = Config {
            version: VERSION,
            qemu: "qemu".into(),
            accel: "tcg".into(),
            ram: "/m/ram".into(),
            ram_bytes: 1 << 29,
            trailer_bytes: 4096,
            ram_offset: 2 << 20,
            pooled: Some(PoolFile { pool: "/m/ram".into(), path: "/g.ram".into() }),
            ram_number: 7 << 40,
            slots: "/m".into(),
            image: Some(image_number([0xab; 16])),
            assume: None,
            disks: vec!["/d".into()],
            formats: vec!["raw".into()],
            cpus: 1,
            priority: -3,
            agent: false,
            cwd: "/".into(),
            options: vec!["-kernel".into(), "k".into()],
            clone_of: None,
            own_disks: true,
            failed: 0,
        };
        place.write_config(&config).unwrap();
        assert_eq!(place.config().unwrap(), config);
        let newer = Config { version: 2, ..config };
        place.write_config(&newer).unwrap();
        assert!(place.config().is_err());
        fs::write(place.dir.join("guest.json"), "{").unwrap();
        assert!(place.config().is_err());
    }
}
