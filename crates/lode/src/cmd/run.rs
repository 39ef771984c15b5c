//! `lode run`: starts an unmodified program with its memory on slow memory.
//!
//! The command becomes the program (`exec`), so that there is no process between: its exit status, its signals, its
//! terminal are its own. What places its memory is a library that the dynamic linker loads first, liblode_preload.so, told by
//! the environment. All that can be wrong is found before: the media, the library, programs that no library reaches.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use lodestone::wsp::memory::Memory;

use crate::cli;
use crate::failure::{Failure, Result, complain};
use crate::outfile;
use crate::target::show;

const LIBRARY: &str = "liblode_preload.so";
/// As a shell has it: the program is not there, or cannot be started.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

pub fn run(args: cli::Run) -> Result<()> {
    let program = &args.command[0];
    let mut command = Command::new(program);
    command.args(&args.command[1..]);
    if let Some(media) = &args.heap {
        Memory::check(media, args.heap_size)?;
        let library = library()?;
        if let Some(why) = find(program).and_then(|file| out_of_reach(&file)) {
            complain(format_args!("{}: {why}, so that its memory stays in DRAM", show(Path::new(program))));
        }
        for (name, value) in settings(&args, media)? {
            match value {
                Some(value) => command.env(name, value),
                // One of an outer `lode run` is not meant for this one.
                None => command.env_remove(name),
            };
        }
        command.env("LD_PRELOAD", preloads(&library, env::var_os("LD_PRELOAD")));
    }
    let e = command.exec();
    let code = if e.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED };
    complain(format_args!("cannot start {}: {e}", show(Path::new(program))));
    Err(Failure::Ended(ExitCode::from(code)))
}

/// What the library reads. Paths are made whole, because the program may change its directory.
fn settings(args: &cli::Run, media: &Path) -> Result<Vec<(&'static str, Option<OsString>)>> {
    let whole = |path: &Path| {
        std::path::absolute(path)
            .map_err(|e| Failure::failed(format_args!("cannot find {}: {e}", show(path))))
    };
    let statistics = match &args.heap_stats {
        Some(file) if file != "-" => {
            outfile::refuse_pool(Path::new(file))?;
            if is_same(Path::new(file), media) {
                return Err(Failure::failed(format_args!(
                    "the statistics cannot go to {}, where the memory lies: name another file with --heap-stats",
                    show(media)
                )));
            }
            Some(whole(Path::new(file))?.into_os_string())
        }
        other => other.clone(),
    };
    let number = |n: u64| Some(OsString::from(n.to_string()));
    Ok(vec![
        ("LODE_HEAP", Some(whole(media)?.into_os_string())),
        ("LODE_HEAP_SIZE", args.heap_size.and_then(number)),
        ("LODE_HEAP_FULL", Some(args.heap_full.name().into())),
        ("LODE_HEAP_MIN", number(args.heap_min)),
        ("LODE_HEAP_STATS", statistics),
        ("LODE_HEAP_CHILDREN", Some(args.heap_children.name().into())),
    ])
}

fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| path.metadata().ok().map(|m| (m.dev(), m.ino()));
    identity(a).is_some_and(|a| identity(b) == Some(a))
}

/// Beside the command, as in a build, or in the lib beside its bin, as installed.
fn library() -> Result<PathBuf> {
    let own = env::current_exe()
        .map_err(|e| Failure::failed(format_args!("cannot find the command itself: {e}")))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY), beside.join("../lib").join(LIBRARY)];
    let Some(found) = places.iter().find(|place| place.is_file()) else {
        return Err(Failure::failed(format_args!(
            "{LIBRARY} is neither in {} nor in {}: build it with make, or install it with make install",
            show(beside),
            show(&beside.join("../lib"))
        )));
    };
    let found = found.canonicalize().unwrap_or_else(|_| found.clone());
    // The dynamic linker takes both for separators.
    if found.as_os_str().as_bytes().iter().any(|byte| [b':', b' '].contains(byte)) {
        return Err(Failure::failed(format_args!(
            "{} cannot be loaded first: there is a space or a colon in its path; install it elsewhere",
            show(&found)
        )));
    }
    Ok(found)
}

/// Ours in front: of two allocators the first counts.
fn preloads(library: &Path, others: Option<OsString>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    for other in others.iter().flat_map(|others| others.as_bytes().split(|byte| [b':', b' '].contains(byte)))
    {
        if !other.is_empty() && other != library.as_os_str().as_bytes() {
            list.push(":");
            list.push(OsStr::from_bytes(other));
        }
    }
    list
}

/// The file that a name stands for, as `exec` finds it.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let runs =
        |file: &PathBuf| file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(program)).find(runs)
}

/// Why no library can be loaded into a program; none where one can, or nobody can tell.
fn out_of_reach(file: &Path) -> Option<&'static str> {
    const SETUID: u32 = 0o4000;
    const SETGID: u32 = 0o2000;
    let opened = File::open(file).ok()?;
    let about = opened.metadata().ok()?;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let other_user = about.mode() & SETUID != 0 && about.uid() != user;
    let other_group = about.mode() & SETGID != 0 && about.gid() != group;
    if other_user || other_group {
        return Some("it runs as another user, for whom the dynamic linker loads nothing");
    }
    (is_static(&opened)?).then_some("it is linked statically")
}

/// Whether an ELF program of 64 bits has no dynamic linker. None for a script.
fn is_static(file: &File) -> Option<bool> {
    const PROGRAMS_MAX: usize = 64;
    const PT_INTERP: u32 = 3;
    let mut head = [0; 64];
    let mut reader = file;
    reader.read_exact(&mut head).ok()?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| {
        head[at..at + bytes].iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
    };
    // e_phoff, e_phentsize, e_phnum of Elf64_Ehdr.
    let (offset, bytes, count) = (number(32, 8), number(54, 2), number(56, 2) as usize);
    for program in 0..count.min(PROGRAMS_MAX) as u64 {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, offset.checked_add(program * bytes)?).ok()?;
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_loaded_already_stays_behind_ours() {
        let library = Path::new("/lib/liblode_preload.so");
        let list = |others: Option<&str>| preloads(library, others.map(OsString::from));
        assert_eq!(list(None), "/lib/liblode_preload.so");
        assert_eq!(list(Some("a.so b.so")), "/lib/liblode_preload.so:a.so:b.so");
        assert_eq!(list(Some("/lib/liblode_preload.so:a.so")), "/lib/liblode_preload.so:a.so", "not twice");
    }

    #[test]
    fn statistics_do_not_go_where_the_memory_lies() {
        let dir = env::temp_dir().join(format!("lode-statistics-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (media, link) = (dir.join("media"), dir.join("link"));
        std::fs::write(&media, "").unwrap();
        std::fs::hard_link(&media, &link).unwrap();
        assert!(is_same(&link, &media) && is_same(&media, &media));
        assert!(!is_same(&dir.join("none"), &media) && !is_same(&dir.join("none"), &dir.join("none")));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn programs_are_told_apart() {
        let own = env::current_exe().unwrap();
        assert_eq!(is_static(&File::open(&own).unwrap()), Some(false));
        assert_eq!(is_static(&File::open(file!()).or_else(|_| File::open("src/cmd/run.rs")).unwrap()), None);
        // The same program without the header that names its dynamic linker.
        let mut bytes = std::fs::read(&own).unwrap();
        let offset = u64::from_le_bytes(bytes[32..40].try_into().unwrap()) as usize;
        let (size, count) = (usize::from(bytes[54]), usize::from(bytes[56]));
        for header in (0..count).map(|n| offset + n * size) {
            if bytes[header..header + 4] == 3u32.to_le_bytes() {
                bytes[header] = 0;
            }
        }
        let cut = env::temp_dir().join(format!("lode-static-{}", std::process::id()));
        std::fs::write(&cut, &bytes[..offset + size * count]).unwrap();
        assert_eq!(is_static(&File::open(&cut).unwrap()), Some(true));
        std::fs::remove_file(&cut).unwrap();
        assert!(find(OsStr::new("sh")).is_some() && find(OsStr::new("no-such-program")).is_none());
    }
}
