//! The machine emulator: its command line, how it is started, and which way of executing works here.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lodestone::media::device_align;

use super::place::{Config, Place};
use crate::failure::{Failure, Result};
use crate::target::show;

/// On some hosts KVM is there and hangs.
const PROBE_WAIT_MAX: Duration = Duration::from_secs(3);
const PROBE_PAUSE: Duration = Duration::from_millis(2);
/// What the probe's guest says: QEMU's exit status of a debug exit is twice the value plus one.
const PROBE_VALUE: u8 = 0x10;
const PROBE_STATUS: i32 = 2 * PROBE_VALUE as i32 + 1;

/// How the emulator begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Boots when told to go on.
    Boot,
    /// Waits for a state.
    Resume,
    /// As `Resume`; what the guest stores to memory and disks ends with it.
    Clone,
}

/// The command line of a guest, without what differs between its starts.
pub fn command_line(config: &Config) -> Vec<String> {
    let mut line: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| line.extend(words.iter().map(|word| word.to_string()));
    let given = |names: &[&str]| config.options.iter().any(|option| names.contains(&option.as_str()));
    add(&["-nodefaults", "-no-user-config", "-display", "none"]);
    let machine = if given(&["-M", "-machine", "--machine"]) { "" } else { "type=q35," };
    add(&["-machine", &format!("{machine}memory-backend=lode-ram")]);
    add(&["-accel", if config.accel == "tcg" { "tcg,thread=multi" } else { &config.accel }]);
    if !given(&["-cpu", "--cpu"]) {
        add(&["-cpu", "max"]);
    }
    add(&["-smp", &config.cpus.to_string(), "-m", &format!("{}M", config.ram_bytes >> 20)]);
    if config.agent {
        add(&["-device", "virtio-serial-pci,id=lode-serial"]);
        add(&["-device", "virtserialport,bus=lode-serial.0,chardev=lode-agent,name=org.qemu.guest_agent.0"]);
    }
    for (n, disk) in config.disks.iter().enumerate() {
        let file = escape(disk);
        let format = config.formats.get(n).map_or_else(|| format_of(disk), |format| format.as_str());
        add(&["-drive", &format!("if=none,id=lode-disk{n},file={file},format={format}")]);
        add(&["-device", &format!("virtio-blk-pci,drive=lode-disk{n}")]);
    }
    if !given(&["-serial", "--serial"]) {
        add(&["-serial", "chardev:lode-console"]);
    }
    line.extend(config.options.iter().cloned());
    line
}

/// What differs: files that are the place's own, and how it begins.
fn places(config: &Config, place: &Place, mode: Mode) -> Vec<String> {
    let share = if mode == Mode::Clone { "off" } else { "on" };
    let (ram, dir) = (escape(&config.ram), escape(&place.dir));
    // Older ones do not know the word.
    let offset = config.part().map_or(String::new(), |part| format!(",offset={}", part.offset));
    // Of a device the kernel maps nothing elsewhere, and QEMU does not ask.
    let align = device_align(&config.ram).ok().flatten();
    let align = align.map_or(String::new(), |align| format!(",align={align}"));
    let mut line = vec![
        "-name".into(),
        place.name.clone(),
        "-object".into(),
        format!(
            "memory-backend-file,id=lode-ram,share={share},mem-path={ram},size={}{align}{offset}",
            config.ram_bytes
        ),
        "-chardev".into(),
        "socket,id=lode-qmp,fd=0,server=on,wait=off".into(),
        "-mon".into(),
        "chardev=lode-qmp,mode=control".into(),
        "-chardev".into(),
        format!("file,id=lode-console,path={dir}/console.log,append=on"),
        "-S".into(),
    ];
    if config.agent {
        line.extend(["-chardev".into(), format!("socket,id=lode-agent,path={dir}/agent,server=on,wait=off")]);
    }
    match mode {
        Mode::Boot => {}
        Mode::Resume => line.extend(["-incoming".into(), "defer".into()]),
        Mode::Clone => line.extend(["-incoming".into(), "defer".into(), "-snapshot".into()]),
    }
    line
}

/// Starts the emulator; its guest does not run yet. It lives on when this process ends.
pub fn spawn(config: &Config, place: &Place, mode: Mode) -> Result<Child> {
    let failed = |e: std::io::Error| {
        Failure::failed(format_args!(
            "guest {}: cannot start {}: {e}; install QEMU, or name it with --qemu",
            place.name,
            show(&config.qemu)
        ))
    };
    let life = place.life()?;
    let listener = place.listen("qmp")?;
    let log = place.dir.join("qemu.log");
    let log = OpenOptions::new().create(true).write(true).truncate(true).open(&log).map_err(failed)?;
    Command::new(&config.qemu)
        .args(places(config, place, mode))
        .args(command_line(config))
        .current_dir(&config.cwd)
        // Who has no other way to hand descriptors over uses those that every program gets.
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::from(life))
        .stderr(Stdio::from(log))
        .process_group(0)
        .spawn()
        .map_err(failed)
}

/// The way of executing that works here: a few instructions are run. KVM on a processor without virtualization of its own
/// is somebody's emulation, which runs those and fails at others, minutes later.
pub fn accelerator(qemu: &Path, dir: &Path) -> &'static str {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match virtualizes(&processors)
        && Path::new("/dev/kvm").exists()
        && probe(qemu, dir, "kvm", PROBE_WAIT_MAX).unwrap_or(false)
    {
        true => "kvm",
        false => "tcg",
    }
}

fn virtualizes(processors: &str) -> bool {
    let flags = processors.lines().filter(|line| line.starts_with("flags"));
    flags.flat_map(str::split_whitespace).any(|flag| matches!(flag, "vmx" | "svm"))
}

/// Boots firmware of a few bytes that ends the emulator with a status of its own. One that takes longer than `at_most` hangs.
fn probe(qemu: &Path, dir: &Path, accel: &str, at_most: Duration) -> std::io::Result<bool> {
    let firmware = dir.join("probe.bin");
    let mut image = vec![0; 64 << 10];
    // At the reset vector: mov al, VALUE; out 0xf4, al; hlt.
    let at = image.len() - 16;
    image[at..at + 5].copy_from_slice(&[0xb0, PROBE_VALUE, 0xe6, 0xf4, 0xf4]);
    fs::write(&firmware, image)?;
    let spawned = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-m", "16M"])
        .args(["-accel", accel, "-device", "isa-debug-exit,iobase=0xf4,iosize=1", "-bios"])
        .arg(&firmware)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let status = spawned.and_then(|mut child| {
        let begun = Instant::now();
        loop {
            match child.try_wait()? {
                Some(status) => return Ok(status.code()),
                None if begun.elapsed() < at_most => std::thread::sleep(PROBE_PAUSE),
                None => {
                    child.kill()?;
                    child.wait()?;
                    return Ok(None);
                }
            }
        }
    });
    fs::remove_file(&firmware)?;
    Ok(status? == Some(PROBE_STATUS))
}

/// QEMU's options have commas between them.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// What a disk that is named now is taken for. Asked later, it would be the guest's to say, by what it writes there: as which file of
/// the host QEMU is to show it.
pub fn format_of(disk: &Path) -> &'static str {
    use std::io::Read;
    let mut magic = [0; 4];
    let is_qcow2 =
        File::open(disk).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && &magic == b"QFI\xfb";
    if is_qcow2 { "qcow2" } else { "raw" }
}

/// Options that would take from us what a guest is resumed by.
pub fn refused_option(options: &[String]) -> Option<&'static str> {
    let of = |option: &String| match option.trim_start_matches('-') {
        "m" => Some("give --ram instead of -m"),
        "mem-path" => Some("give --media instead of -mem-path"),
        "smp" => Some("give --cpus instead of -smp"),
        "accel" | "enable-kvm" => Some("give --accel instead"),
        "S" | "incoming" | "daemonize" | "pidfile" => Some("lode wsp starts and resumes the guest itself"),
        "nographic" => {
            Some("a guest has no terminal: give -serial file:PATH or -serial unix:PATH,server,nowait")
        }
        _ => None,
    };
    let names_memory = |part: &str| ["memory-backend=", "memdev="].iter().any(|name| part.starts_with(name));
    let chooses_memory = |words: &[String]| {
        ["machine", "M", "numa"].contains(&words[0].trim_start_matches('-'))
            && words[1].split(',').any(names_memory)
    };
    if options.windows(2).any(chooses_memory) {
        return Some("the guest's memory is what --media names: leave memory-backend= and memdev= out");
    }
    if shares_memory(options) {
        return Some(
            "shared memory besides the guest's own is in no image: give share=off, or memory-backend-ram, or leave it out",
        );
    }
    let of_stdio = options.iter().any(|option| option == "stdio" || option.starts_with("stdio,"));
    options
        .iter()
        .find_map(of)
        .or(of_stdio.then_some("a guest has no terminal: give another place than stdio"))
}

/// Options by which a clone would store to what is its original's: `-snapshot` covers disks of `-drive` and `-hda` alone.
pub fn refused_for_clone(options: &[String]) -> Option<&'static str> {
    let names = |names: &[&str]| {
        options
            .iter()
            .any(|o| o.strip_prefix('-').is_some_and(|o| names.contains(&o.trim_start_matches('-'))))
    };
    let has = |words: &[&str]| options.iter().any(|o| words.iter().any(|word| o.contains(word)));
    if names(&["blockdev"]) {
        return Some(
            "a clone would write to a disk of -blockdev: give the guest its disks by --disk or -drive",
        );
    }
    if options.iter().flat_map(|option| option.split(',')).any(is_snapshot_off) {
        return Some("a clone would write to a disk with snapshot=off: leave that out");
    }
    if names(&["virtfs", "fsdev"]) {
        return Some("a clone would write to the directory that the guest shares with its host");
    }
    if has(&["vhost-user", "vhost-scsi"]) {
        return Some(
            "a clone would share its original's vhost-user or vhost-scsi device, and what that writes to",
        );
    }
    if shares_memory(options) {
        return Some("a clone would store to other shared memory of its original: leave that out");
    }
    if names(&["readconfig"]) {
        return Some("what -readconfig says cannot be looked at: give those options themselves");
    }
    None
}

/// Options by which a copy that shares blocks with its original would store to what is its original's.
pub fn refused_for_reflink(options: &[String]) -> Option<&'static str> {
    const DISKS: [&str; 8] = ["drive", "hda", "hdb", "hdc", "hdd", "sd", "mtdblock", "pflash"];
    let is_disk =
        |o: &String| o.strip_prefix('-').is_some_and(|o| DISKS.contains(&o.trim_start_matches('-')));
    match options.iter().any(is_disk) {
        true => Some("disks of QEMU's own options are not copied: give the guest its disks by --disk"),
        false => refused_for_clone(options),
    }
}

fn is_snapshot_off(part: &str) -> bool {
    match part.split_once('=') {
        // By `-set drive.ID.snapshot=off`, too.
        Some((name, value)) => name.ends_with("snapshot") && !is_on(value),
        None => part == "nosnapshot",
    }
}

fn is_on(value: &str) -> bool {
    ["on", "yes", "true", "y"].contains(&value)
}

/// Whether a guest has memory besides its own that others may have, too: that is in no state (`x-ignore-shared`).
fn shares_memory(options: &[String]) -> bool {
    let objects = options.windows(2).filter(|words| ["-object", "--object"].contains(&words[0].as_str()));
    objects.map(|words| &words[1]).any(|object| is_shared_backend(object))
        || options.iter().any(|option| option.starts_with("ivshmem-doorbell"))
}

fn is_shared_backend(object: &str) -> bool {
    // What QEMU does where the option does not say.
    let is_shared = |kind: &str, share: Option<bool>| {
        let by_itself = ["memory-backend-memfd", "memory-backend-shm", "memory-backend-epc"].contains(&kind);
        kind.starts_with("memory-backend-") && share.unwrap_or(by_itself)
    };
    if let Ok(object) = serde_json::from_str::<serde_json::Value>(object) {
        return is_shared(object["qom-type"].as_str().unwrap_or_default(), object["share"].as_bool());
    }
    // A comma in a value is doubled.
    let object = object.replace(",,", "");
    let (mut kind, mut share) = ("", None);
    for (n, part) in object.split(',').enumerate() {
        match part.split_once('=') {
            Some(("qom-type", name)) => kind = name,
            Some(("share", value)) => share = Some(is_on(value)),
            None if n == 0 => kind = part,
            None if part == "share" => share = Some(true),
            None if part == "noshare" => share = Some(false),
            _ => {}
        }
    }
    is_shared(kind, share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn config(options: &[&str]) -> Config {
        Config {
            version: super::super::place::VERSION,
            qemu: "qemu".into(),
            accel: "tcg".into(),
            ram: "/m,x/ram".into(),
            ram_bytes: 1 << 29,
            trailer_bytes: 4096,
            ram_offset: 0,
            pooled: None,
            ram_number: 0,
            slots: "/m".into(),
            image: None,
            assume: None,
            disks: vec![PathBuf::from("/d,1")],
            formats: vec!["raw".into()],
            cpus: 2,
            priority: 0,
            agent: false,
            cwd: "/".into(),
            options: options.iter().map(|o| o.to_string()).collect(),
            clone_of: None,
            own_disks: false,
            failed: 0,
        }
    }

    #[test]
    fn what_the_user_gives_is_not_given_twice() {
        let plain = command_line(&config(&[])).join(" ");
        assert!(plain.contains("type=q35,memory-backend=lode-ram") && plain.contains("-cpu max"), "{plain}");
        assert!(plain.contains("file=/d,,1,format=raw") && plain.contains("-m 512M"), "{plain}");
        let own = command_line(&config(&["-M", "pc", "-cpu", "qemu64", "-serial", "null"])).join(" ");
        assert!(!own.contains("q35") && !own.contains("max") && !own.contains("lode-console"), "{own}");
    }

    #[test]
    fn no_guest_says_what_its_disk_is() {
        let disk = std::env::temp_dir().join(format!("lode-wsp-format-{}", std::process::id()));
        fs::write(&disk, [0; 512]).unwrap();
        let formats = vec![format_of(&disk).to_string()];
        let raw = Config { disks: vec![disk.clone()], formats, ..config(&[]) };
        let line = command_line(&raw);
        assert!(line.join(" ").contains("format=raw"), "{line:?}");
        fs::write(&disk, b"QFI\xfb\0\0\0\x03").unwrap();
        assert_eq!(command_line(&raw), line);
        assert_eq!(format_of(&disk), "qcow2");
        fs::remove_file(&disk).unwrap();
    }

    #[test]
    fn a_copy_writes_to_nothing_of_its_original() {
        let refused = |options: &[&str]| {
            refused_for_reflink(&options.iter().map(|o| o.to_string()).collect::<Vec<_>>()).is_some()
        };
        assert!(!refused(&["-kernel", "drive", "-append", "x"]));
        assert!(refused(&["-drive", "file=x"]) && refused(&["--hda", "x"]) && refused(&["-virtfs", "x"]));
    }

    #[test]
    fn virtualization_is_a_flag_of_its_own() {
        assert!(virtualizes("processor : 0\nflags : fpu vmx sse\n"));
        assert!(!virtualizes("processor : 0\nflags : fpu sse\nvmx flags : ept\n"));
    }

    #[test]
    fn only_what_executes_and_ends_in_time_is_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("lode-wsp-probe-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let emulator = |does: &str| {
            let path = dir.join("emulator");
            // Written by a process of its own: another thread's child must not have it open when it is run.
            let script = format!("#!/bin/sh\necho $$ > {}/process\n{does}\n", dir.display());
            let copy =
                Command::new("cp").args(["/dev/stdin", path.to_str().unwrap()]).stdin(Stdio::piped()).spawn();
            let mut copy = copy.unwrap();
            std::io::Write::write_all(&mut copy.stdin.take().unwrap(), script.as_bytes()).unwrap();
            assert!(copy.wait().unwrap().success());
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let long = Duration::from_secs(60);
        assert!(probe(&emulator(&format!("exit {PROBE_STATUS}")), &dir, "kvm", long).unwrap());
        assert!(!probe(&emulator("exit 1"), &dir, "kvm", long).unwrap(), "it cannot execute");
        let begun = Instant::now();
        assert!(
            !probe(&emulator("exec sleep 600"), &dir, "kvm", Duration::from_secs(1)).unwrap(),
            "it hangs"
        );
        assert!(begun.elapsed() < Duration::from_secs(30), "it was waited for {:?}", begun.elapsed());
        let process = fs::read_to_string(dir.join("process")).unwrap();
        assert!(!Path::new("/proc").join(process.trim()).exists(), "it was left behind");
        assert!(!dir.join("probe.bin").exists());
        assert!(probe(&dir.join("none"), &dir, "kvm", long).is_err());
        // What is asked of one that works, where there is one.
        match probe(Path::new("qemu-system-x86_64"), &dir, "tcg", long) {
            Ok(works) => assert!(works, "QEMU does not end as the firmware has it"),
            Err(_) => println!("SKIPPED: only_what_executes_and_ends_in_time_is_used: QEMU is not installed"),
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn clones_keep_what_they_store_to_themselves() {
        let place = Place { name: "g".into(), dir: "/g".into() };
        let line = |mode| places(&config(&[]), &place, mode).join(" ");
        assert!(line(Mode::Resume).contains("share=on,mem-path=/m,,x/ram"));
        let clone = line(Mode::Clone);
        assert!(clone.contains("share=off") && clone.contains("-snapshot") && !clone.contains("share=on"));
        assert!(!line(Mode::Boot).contains("-incoming"));
    }

    #[test]
    fn memory_in_a_pool_begins_somewhere_in_it() {
        let place = Place { name: "g".into(), dir: "/g".into() };
        let plain = places(&config(&[]), &place, Mode::Boot).join(" ");
        assert!(!plain.contains("offset"), "older emulators do not know it: {plain}");
        let file = super::super::pooled::PoolFile { pool: "/m,x/ram".into(), path: "/g.ram".into() };
        let pooled = Config { ram_offset: 4 << 20, pooled: Some(file), ..config(&[]) };
        let line = places(&pooled, &place, Mode::Boot).join(" ");
        assert!(line.contains("mem-path=/m,,x/ram,size=536870912,offset=4194304"), "{line}");
    }

    #[test]
    fn clones_of_guests_with_disks_that_they_would_write_to_are_refused() {
        let refused = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|option| option.to_string()).collect();
            refused_for_clone(&options)
        };
        for options in [
            &["-blockdev", "driver=file,node-name=n,filename=/d"],
            &["--blockdev", r#"{"driver":"file"}"#],
            &["-drive", "file=/d,snapshot=off,if=virtio"],
            &["-drive", "file=/d,snapshot=n"],
            &["-set", "drive.d.snapshot=off"],
            &["-virtfs", "local,path=/d,mount_tag=d,security_model=none"],
            &["-fsdev", "local,id=d,path=/d"],
            &["-device", "vhost-user-blk-pci,chardev=c"],
            &["-object", "memory-backend-file,id=m,share=on,mem-path=/m,size=1M"],
            &["-readconfig", "/c"],
        ] {
            assert!(refused(options).is_some(), "{options:?}");
        }
        for options in [
            &["-hda", "/d"],
            &["-drive", "file=/d,if=virtio,snapshot=on"],
            &["-append", "blockdev"],
            &["-netdev", "user,id=n"],
        ] {
            assert_eq!(refused(options), None, "{options:?}");
        }
    }

    #[test]
    fn what_is_ours_cannot_be_given() {
        for option in ["-m", "--smp", "-incoming", "-S", "-nographic", "-mem-path"] {
            assert!(refused_option(&[option.to_string()]).is_some(), "{option}");
        }
        assert!(refused_option(&["-serial".into(), "stdio".into()]).is_some());
        assert!(refused_option(&["-machine".into(), "q35,memory-backend=m".into()]).is_some());
        assert!(refused_option(&["-numa".into(), "node,memdev=m".into()]).is_some());
        assert!(refused_option(&["-machine".into(), "q35,usb=off".into()]).is_none());
        assert!(refused_option(&["-kernel".into(), "vmlinux".into()]).is_none());
    }

    #[test]
    fn memory_that_no_image_would_have_is_refused() {
        let shares = |object: &str| refused_option(&["-object".into(), object.into()]).is_some();
        for object in [
            "memory-backend-file,id=m,share=on,mem-path=/m,size=1M",
            "memory-backend-ram,id=m,size=1M,share=yes",
            "memory-backend-memfd,id=m,size=1M",
            "qom-type=memory-backend-shm,id=m",
            r#"{"qom-type":"memory-backend-file","share":true}"#,
            r#"{"qom-type":"memory-backend-memfd"}"#,
        ] {
            assert!(shares(object), "{object}");
        }
        for object in [
            "memory-backend-file,id=m,mem-path=/m,,share=on,size=1M",
            "memory-backend-memfd,id=m,size=1M,share=off",
            "memory-backend-ram,id=m,size=1M",
            r#"{"qom-type":"memory-backend-memfd","share":false}"#,
            "rng-random,id=r",
        ] {
            assert!(!shares(object), "{object}");
        }
        assert!(refused_option(&["-device".into(), "ivshmem-doorbell,vectors=1,chardev=c".into()]).is_some());
    }
}
