//! Mounting and its end: by command, by signal, by SIGKILL; what is refused, and how.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::need_mount;
use crate::rig::{Rig, errno, fail, lode, pattern, succeed, text, wait_until};

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

#[test]
fn the_table_of_mounts_names_type_and_pool() {
    need_mount!();
    let rig = Rig::mounted();
    let line = rig.mount_line().unwrap();
    assert_eq!(line[0], rig.pool().to_str().unwrap());
    assert_eq!(line[2], "fuse.lode");
    for option in ["rw", "default_permissions", "allow_other"] {
        assert!(line[3].split(',').any(|o| o == option), "{line:?}");
    }
    rig.umount();
    assert!(!rig.is_mounted());
}

#[test]
fn what_was_written_is_there_at_the_next_mount() {
    need_mount!();
    let rig = Rig::mounted();
    let data = pattern(3_000_000, 1);
    for round in 0..3 {
        fs::write(rig.at(format!("f{round}")), &data).unwrap();
        rig.umount();
        // Closed when umount returns: no waiting, no "in use".
        rig.mount("rw");
        for earlier in 0..=round {
            assert!(fs::read(rig.at(format!("f{earlier}"))).unwrap() == data);
        }
    }
}

#[test]
fn after_sigkill_the_next_mount_cleans_up_and_recovers() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    let data = pattern(1_000_000, 2);
    fs::write(rig.at("f"), &data).unwrap();
    fs::create_dir(rig.at("d")).unwrap();
    fs::rename(rig.at("f"), rig.at("d/g")).unwrap();
    let open = File::create(rig.at("nameless")).unwrap();
    fs::remove_file(rig.at("nameless")).unwrap();
    kill(pid, Signal::KILL);
    assert_eq!(rig.wait_for_server().0, None);
    assert_eq!(errno(fs::read_dir(rig.dir())), libc::ENOTCONN);
    drop(open);

    let output = rig.mount_command("rw").output().unwrap();
    assert!(output.status.success());
    let note = text(&output.stderr);
    assert!(note.contains("dead mount") && note.lines().count() == 1, "{note}");
    assert!(fs::read(rig.at("d/g")).unwrap() == data);
    assert!(!rig.at("f").exists() && !rig.at("nameless").exists());
    fs::write(rig.at("more"), "x").unwrap();
    rig.umount();
    assert!(!rig.is_mounted(), "the dead mount is not below");
}

#[test]
fn names_that_are_no_text_are_quoted() {
    need_mount!();
    let rig = Rig::new("64M");
    let odd = rig.dir().with_file_name(OsStr::from_bytes(b"no\xffdir"));
    fs::create_dir(&odd).unwrap();
    fail(lode().arg("umount").arg(&odd), 1, "no\\377dir'");
    fail(lode().arg("mount").arg(odd.join("none")).arg(rig.dir()), 1, "no\\377dir/none'");
}

#[test]
fn a_pool_that_was_cut_under_its_server_was_not_closed() {
    need_mount!();
    let rig = Rig::mounted();
    File::options().write(true).open(rig.pool()).unwrap().set_len(8 << 20).unwrap();
    let output = lode().arg("umount").arg(rig.dir()).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("changed under its server") && said.contains("the file was cut"), "{said}");
}

/// With few descriptors it fails early, or late, or not at all; what was begun is taken away again.
#[test]
fn a_mount_that_the_system_has_too_little_for_is_taken_away_again() {
    need_mount!();
    let rig = Rig::new("64M");
    let mut failed = 0;
    for descriptors in 4..24 {
        let mut command = Command::new("bash");
        command.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"")]);
        let mount = rig.mount_command("rw");
        command.arg(mount.get_program()).args(mount.get_args()).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        if output.status.success() {
            fs::write(rig.at("f"), "x").unwrap();
            rig.umount();
            continue;
        }
        failed += 1;
        assert_eq!(output.status.code(), Some(1), "{descriptors}: {said}");
        assert!(said.starts_with("lode: ") && said.lines().count() == 1, "{descriptors}: {said}");
        assert!(said.contains("Too many open files"), "{descriptors}: {said}");
        assert!(!rig.is_mounted(), "{descriptors}");
        let info = lode().arg("info").arg(rig.pool()).output().unwrap();
        assert!(text(&info.stdout).contains("state     clean"), "{descriptors}: {}", text(&info.stdout));
    }
    assert!((1..20).contains(&failed), "{failed} of 20 failed");
}

#[test]
fn a_dead_mount_can_be_unmounted() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    kill(pid, Signal::KILL);
    rig.wait_for_server();
    rig.umount();
    assert!(!rig.is_mounted());
}

#[test]
fn signals_unmount_and_close() {
    need_mount!();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut rig = Rig::new("64M");
        let pid = rig.mount_foreground("rw");
        fs::write(rig.at("f"), "kept").unwrap();
        kill(pid, signal);
        let (code, said) = rig.wait_for_server();
        assert_eq!(code, Some(0), "{said}");
        assert!(!rig.is_mounted());
        rig.mount_foreground("rw");
        assert_eq!(fs::read(rig.at("f")).unwrap(), b"kept");
        rig.umount();
        let (code, said) = rig.wait_for_server();
        assert_eq!(code, Some(0));
        assert!(said.contains("was_clean: true"), "{signal:?}: {said}");
    }
}

#[test]
fn a_signal_ends_a_mount_in_use() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    let mut open = File::create(rig.at("f")).unwrap();
    open.write_all(b"before").unwrap();
    let begin = Instant::now();
    kill(pid, Signal::TERM);
    wait_until("the mount is out of sight", || !rig.is_mounted());
    let (code, said) = rig.wait_for_server();
    assert_eq!(code, Some(0), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(open.write_all(b"after").is_err());
    drop(open);
    rig.mount_foreground("rw");
    assert_eq!(fs::read(rig.at("f")).unwrap(), b"before");
    rig.umount();
    assert!(rig.wait_for_server().1.contains("was_clean: true"));
}

#[test]
fn a_mount_in_use_is_not_unmounted() {
    need_mount!();
    let rig = Rig::mounted();
    let open = File::create(rig.at("f")).unwrap();
    fail(lode().arg("umount").arg(rig.dir()), 1, "is in use");
    assert!(rig.is_mounted());
    drop(open);
    rig.umount();
    fail(lode().arg("umount").arg(rig.dir()), 1, "no pool is mounted on");
}

#[test]
fn any_unmount_closes_the_pool() {
    need_mount!();
    for command in ["umount", "fusermount3 -u"] {
        let mut rig = Rig::new("64M");
        rig.mount_foreground("rw");
        fs::write(rig.at("f"), command).unwrap();
        let mut words = command.split(' ');
        let mut unmount = Command::new(words.next().unwrap());
        succeed(unmount.args(words).arg(rig.dir()));
        assert_eq!(rig.wait_for_server().0, Some(0));
        rig.mount_foreground("rw");
        assert_eq!(fs::read(rig.at("f")).unwrap(), command.as_bytes());
        rig.umount();
        assert!(rig.wait_for_server().1.contains("was_clean: true"), "{command}");
    }
}

/// umount(2) is back before the server has closed the pool; whoever comes next waits for that, and not for a mount that stands.
#[test]
fn a_pool_is_waited_for_behind_its_umount() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let data = pattern(100_000, 7);
    for word in ["fsck", "cat", "mount"] {
        let pid = rig.mount_foreground("rw");
        fs::write(rig.at("f"), &data).unwrap();
        fail(lode().arg("fsck").arg(rig.pool()), 8, &format!("in use by process {pid}"));
        kill(pid, Signal::STOP);
        rustix::mount::unmount(rig.dir(), rustix::mount::UnmountFlags::empty()).unwrap();
        let mut command = if word == "mount" { rig.mount_command("rw") } else { lode() };
        match word {
            "fsck" => command.arg(word).arg(rig.pool()),
            "cat" => command.arg(word).arg(format!("{}:/f", rig.pool().display())),
            _ => &mut command,
        };
        let mut next = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert!(next.try_wait().unwrap().is_none(), "{word} waits");
        kill(pid, Signal::CONT);
        let output = next.wait_with_output().unwrap();
        assert!(output.status.success(), "{word}: {}", text(&output.stderr));
        assert!(word != "cat" || output.stdout == data);
        assert_eq!(rig.wait_for_server().0, Some(0), "{word}");
    }
    assert!(fs::read(rig.at("f")).unwrap() == data);
    rig.umount();
}

#[test]
fn a_pool_in_use_and_a_directory_in_use_are_refused() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    let elsewhere = rig.beside("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let mut second = lode();
    second.arg("mount").arg(rig.pool()).arg(&elsewhere);
    fail(&mut second, 1, &pid.to_string());
    assert!(fs::read_dir(&elsewhere).unwrap().next().is_none());
    fail(&mut rig.mount_command("rw"), 1, "is a mount point already");
}

#[test]
fn wrong_places_are_refused() {
    need_mount!();
    let rig = Rig::new("64M");
    let mount = |pool: &Path, dir: &Path| {
        let mut command = lode();
        command.arg("mount").arg(pool).arg(dir);
        command
    };
    let (file, text) = (rig.beside("file"), rig.beside("text"));
    fs::write(&file, "").unwrap();
    fs::write(&text, pattern(1 << 20, 9)).unwrap();
    fail(&mut mount(&rig.pool(), &rig.beside("none")), 1, "No such file");
    fail(&mut mount(&rig.pool(), &file), 1, "is not a directory");
    fail(&mut mount(&rig.beside("none"), &rig.dir()), 1, "lode mkfs");
    fail(&mut mount(&file, &rig.dir()), 1, "file");
    fail(&mut mount(&text, &rig.dir()), 1, "text");
    fs::write(rig.at("something"), "").unwrap();
    fail(&mut mount(&rig.pool(), &rig.dir()), 1, "is not empty");
    assert!(!rig.is_mounted());
    rig.mount("nonempty");
    assert!(!rig.at("something").exists());
    rig.umount();
    assert!(rig.at("something").exists());
}

#[test]
fn wrong_options_are_usage_errors() {
    need_mount!();
    let rig = Rig::new("64M");
    fail(&mut rig.mount_command("rw,frobnicate"), 2, "'frobnicate'");
    fail(&mut rig.mount_command("threads=none"), 2, "threads=none");
    fail(&mut rig.mount_command("metrics=:1"), 2, "metrics");
    assert!(!rig.is_mounted());
    for options in ["threads=1", "threads=7,cache=none", "max_read=8192,max_write=4096", "noatime,noexec"] {
        rig.mount(options);
        fs::write(rig.at("f"), options.repeat(1000)).unwrap();
        assert_eq!(fs::read(rig.at("f")).unwrap(), options.repeat(1000).as_bytes());
        rig.umount();
    }
}

#[test]
fn read_only_changes_nothing() {
    need_mount!();
    let rig = Rig::mounted();
    fs::write(rig.at("f"), "kept").unwrap();
    rig.umount();
    let before = fs::read(rig.pool()).unwrap();
    rig.mount("ro");
    assert_eq!(fs::read(rig.at("f")).unwrap(), b"kept");
    assert_eq!(errno(fs::write(rig.at("f"), "x")), libc::EROFS);
    assert_eq!(errno(fs::create_dir(rig.at("d"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(rig.at("f"))), libc::EROFS);
    rig.umount();
    assert!(fs::read(rig.pool()).unwrap() == before, "the pool's file has changed");
}

#[test]
fn read_only_recovers_a_killed_pool_without_changing_it() {
    need_mount!();
    let mut rig = Rig::new("64M");
    let pid = rig.mount_foreground("rw");
    fs::write(rig.at("f"), "kept").unwrap();
    kill(pid, Signal::KILL);
    rig.wait_for_server();
    rig.umount();
    let before = fs::read(rig.pool()).unwrap();
    rig.mount("ro");
    assert_eq!(fs::read(rig.at("f")).unwrap(), b"kept");
    rig.umount();
    assert!(fs::read(rig.pool()).unwrap() == before);
}

#[test]
fn mount_helpers_mount() {
    need_mount!();
    let rig = Rig::new("64M");
    for name in ["mount.fuse.lode", "mount.lode"] {
        let helper = rig.beside(name);
        symlink(env!("CARGO_BIN_EXE_lode"), &helper).unwrap();
        let call = |arguments: &[&str]| {
            let mut command = Command::new(&helper);
            command.arg(rig.pool()).arg(rig.dir()).args(arguments);
            command
        };
        succeed(&mut call(&["-o", "rw,nosuid,_netdev,x-initrd.mount"]));
        assert!(rig.mount_line().unwrap()[3].split(',').any(|o| o == "nosuid"));
        rig.umount();
        succeed(&mut call(&["-sn", "-t", "fuse.lode", "-o", "ro,frobnicate"]));
        assert_eq!(errno(fs::write(rig.at("f"), "")), libc::EROFS);
        rig.umount();
        succeed(&mut call(&["-f", "-o", "rw"]));
        assert!(!rig.is_mounted(), "-f is a rehearsal");
        fail(&mut call(&["-o", "frobnicate"]), 2, "frobnicate");
    }
}

/// As fuse3's mount.fuse calls it.
#[test]
fn a_pool_and_a_directory_as_the_first_words_mount() {
    need_mount!();
    let rig = Rig::new("64M");
    succeed(lode().arg(rig.pool()).arg(rig.dir()).args(["-o", "rw,dev,suid"]));
    assert!(rig.is_mounted());
    rig.umount();
}

#[test]
fn a_device_that_was_opened_and_mounted_before_is_served() {
    need_mount!();
    let rig = Rig::new("64M");
    let mut server = rig.serve_handed();
    fs::write(rig.at("f"), "through a descriptor").unwrap();
    assert_eq!(fs::read(rig.at("f")).unwrap(), b"through a descriptor");
    succeed(Command::new("umount").arg(rig.dir()));
    assert!(server.wait().unwrap().success());
    fail(lode().arg("mount").arg(rig.pool()).arg("/dev/fd/0"), 1, "/dev/fd/0");
}

#[test]
fn the_daemon_lets_its_caller_go() {
    need_mount!();
    let rig = Rig::new("64M");
    // Output to a pipe: it closes only when no process holds it any more.
    let output = rig.mount_command("rw").output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    assert!(rig.is_mounted());
    rig.umount();
}

#[test]
fn many_programs_at_once() {
    need_mount!();
    let rig = Rig::mounted_with("threads=8");
    std::thread::scope(|scope| {
        for who in 0..6u64 {
            let rig = &rig;
            scope.spawn(move || {
                let dir = rig.at(format!("d{who}"));
                fs::create_dir(&dir).unwrap();
                for i in 0..100u64 {
                    let data = pattern(1 + (i as usize * 997) % 40_000, who * 1000 + i);
                    let (temporary, name) = (dir.join("tmp"), dir.join(format!("f{}", i % 10)));
                    fs::write(&temporary, &data).unwrap();
                    fs::rename(&temporary, &name).unwrap();
                    assert!(fs::read(&name).unwrap() == data);
                }
                assert_eq!(fs::read_dir(&dir).unwrap().count(), 10);
            });
        }
    });
    rig.umount();
    rig.mount("rw");
    assert_eq!(fs::read_dir(rig.dir()).unwrap().count(), 6);
}

/// Servers that a bench measures end with it, however it ends.
#[test]
fn a_bench_that_is_killed_leaves_no_servers() {
    need_mount!();
    let can = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !can("bindfs") || !can("setpriv") {
        eprintln!("SKIPPED: a_bench_that_is_killed_leaves_no_servers: it needs bindfs and setpriv");
        return;
    }
    let rig = Rig::new("16M");
    let args = ["bench", "--quick", "--rounds", "1000", "--only", "mount-stat"];
    fs::create_dir(rig.beside("tmp")).unwrap();
    // It would go on for hours, should this fail.
    struct Killed(Child);
    impl Drop for Killed {
        fn drop(&mut self) {
            _ = self.0.kill();
            _ = self.0.wait();
        }
    }
    let bench = lode().args(args).env("TMPDIR", rig.beside("tmp")).stdout(Stdio::null()).spawn().unwrap();
    let Killed(bench) = &mut Killed(bench);
    let parent = format!("PPid:\t{}\n", bench.id());
    // Zombies do not count: whoever has them is to see to it.
    let living = |pid: &str| {
        fs::read_to_string(format!("/proc/{pid}/status")).ok().filter(|s| !s.contains("State:\tZ"))
    };
    let servers = |name: &str| -> Vec<String> {
        let pids = fs::read_dir("/proc").unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let name = format!("Name:\t{name}\n");
        let is_server = |status: String| status.starts_with(&name) && status.contains(&parent);
        pids.filter(|pid| living(pid).is_some_and(is_server)).collect()
    };
    // (What it forks is called as it is until it executes another program.)
    let mut both = Vec::new();
    wait_until("both are mounted", || {
        both = [servers("lode"), servers("bindfs")].concat();
        bench.try_wait().unwrap().is_some() || both.len() == 2 && !servers("bindfs").is_empty()
    });
    assert_eq!(bench.try_wait().unwrap(), None, "it ended by itself");
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait_until("its servers have ended", || both.iter().all(|pid| living(pid).is_none()));
}

/// mount(8) falls back to fuse3's helper, which runs `lode` through a shell.
#[test]
fn fuse3s_helper_mounts() {
    need_mount!();
    let Some(helper) = ["/sbin/mount.fuse3", "/sbin/mount.fuse"].into_iter().find(|h| Path::new(h).exists())
    else {
        eprintln!("SKIPPED: fuse3s_helper_mounts: it needs fuse3's mount.fuse");
        return;
    };
    let rig = Rig::new("64M");
    let binary = Path::new(env!("CARGO_BIN_EXE_lode")).parent().unwrap();
    let mut mount = Command::new(helper);
    mount.arg(rig.pool()).arg(rig.dir()).args(["-t", "fuse.lode", "-o", "rw,noatime"]);
    succeed(mount.env("PATH", format!("{}:/usr/bin:/bin", binary.display())));
    assert_eq!(rig.mount_line().unwrap()[2], "fuse.lode");
    rig.umount();
}

/// Killed at any moment, in the middle of many operations: what had returned before is there.
#[test]
fn sigkill_under_load_loses_nothing_that_was_acknowledged() {
    need_mount!();
    let mut rig = Rig::new("128M");
    let mut acknowledged: Vec<(String, u64)> = Vec::new();
    for round in 0..4u64 {
        let pid = rig.mount_foreground("rw");
        for (name, seed) in &acknowledged {
            assert!(fs::read(rig.at(name)).unwrap() == loaded(*seed), "round {round}: {name}");
        }
        let done: Vec<Vec<(String, u64)>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3u64)
                .map(|who| {
                    let rig = &rig;
                    scope.spawn(move || {
                        let seeds = (0..).map(|i| round << 32 | who << 16 | i);
                        seeds.map_while(|seed| write_one(rig, seed).ok()).collect()
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(150 + 50 * round));
            kill(pid, Signal::KILL);
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        let count: usize = done.iter().map(Vec::len).sum();
        assert!(count > 0, "nothing was written in round {round}");
        acknowledged.extend(done.into_iter().flatten());
        assert_eq!(rig.wait_for_server().0, None);
        rig.umount();
        // Keeps the pool from filling; what is removed may not come back.
        rig.mount("rw");
        let (kept, removed) = acknowledged.split_at(acknowledged.len().min(300));
        for (name, _) in removed {
            fs::remove_file(rig.at(name)).unwrap();
        }
        acknowledged = kept.to_vec();
        rig.umount();
    }
    succeed(lode().arg("mount").arg(rig.pool()).arg(rig.dir()));
    let names = fs::read_dir(rig.dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let whole: usize = names.filter(|n| n.starts_with("whole")).count();
    // At most one rename of each writer and round had happened without its answer.
    assert!((acknowledged.len()..=acknowledged.len() + 12).contains(&whole), "{whole}");
}

fn loaded(seed: u64) -> Vec<u8> {
    pattern(1 + (seed as usize * 7919) % 30_000, seed)
}

/// Writes a file in two parts and gives it its name; all that has returned is acknowledged.
fn write_one(rig: &Rig, seed: u64) -> std::io::Result<(String, u64)> {
    let (temporary, name) = (rig.at(format!("part-{seed}")), format!("whole-{seed}"));
    let data = loaded(seed);
    let mut file = File::create(&temporary)?;
    let (head, tail) = data.split_at(data.len() / 2);
    file.write_all(head)?;
    file.write_all(tail)?;
    fs::rename(&temporary, rig.at(&name))?;
    Ok((name, seed))
}

#[test]
fn a_wrong_profile_is_said_and_the_mount_comes_up() {
    need_mount!();
    let rig = Rig::new("64M");
    let profile = rig.beside("profile.toml");
    for (content, says) in [
        ("version = 99\n", "its version is 99, and this program knows 1 at most: it is newer"),
        ("engines = [", "damaged or no profile"),
    ] {
        fs::write(&profile, content).unwrap();
        let options = format!("engine=delegate,profile={}", profile.display());
        let output = rig.mount_command(&options).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        for part in ["the profile ", "profile.toml is not used: ", says, "; defaults are used"] {
            assert!(said.contains(part), "no {part:?} in {said}");
        }
        fs::write(rig.at("file"), loaded(1)).unwrap();
        assert_eq!(fs::read(rig.at("file")).unwrap(), loaded(1));
        rig.umount();
    }
    // Where nobody named one and there is none, nothing is said.
    let output = rig.mount_command("engine=delegate").env("HOME", "/nonexistent").output().unwrap();
    assert!(
        output.status.success() && (output.stderr.is_empty() || Path::new("/etc/lode").exists()),
        "{output:?}"
    );
    rig.umount();
}
