//! `vendor/fuser` is fuser 0.18.0 and `vendor/fuser.patch`, nothing else.
//!
//! The patch is taken off a copy, and what is left must be the files of `vendor/fuser.sha256`. That list is held
//! against cargo's copy of the release, where there is one: cargo fetches none for this repository.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn vendor() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor")
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

fn succeed(command: &mut Command) {
    let output = run(command);
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&said));
}

/// The files below `dir`, relative to it.
fn files(dir: &Path) -> BTreeSet<String> {
    let found = run(Command::new("find").args([".", "-type", "f", "-printf", "%P\\n"]).current_dir(dir));
    String::from_utf8(found.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// True where every file of the list has the content that it says.
fn matches(dir: &Path) -> bool {
    let list = File::open(vendor().join("fuser.sha256")).unwrap();
    let mut check = Command::new("sha256sum");
    check.args(["--check", "--strict", "--quiet"]).current_dir(dir).stdin(Stdio::from(list));
    run(&mut check).status.success()
}

#[test]
fn fuser_is_the_release_and_the_patch() {
    let copy = std::env::temp_dir().join(format!("lode-vendor-{}", std::process::id()));
    let _ = fs::remove_dir_all(&copy);
    succeed(Command::new("cp").arg("-R").arg(vendor().join("fuser")).arg(&copy));
    assert!(!matches(&copy), "the patch is not there");
    let mut unpatch = Command::new("git");
    unpatch.args(["apply", "-R"]).arg(vendor().join("fuser.patch")).current_dir(&copy);
    // Not a repository, whatever lies around it.
    succeed(unpatch.env("GIT_CEILING_DIRECTORIES", std::env::temp_dir()));
    let left = matches(&copy);
    fs::remove_dir_all(&copy).unwrap();
    assert!(left, "without the patch it is not what fuser.sha256 lists");

    let list = fs::read_to_string(vendor().join("fuser.sha256")).unwrap();
    let listed: BTreeSet<String> = list.lines().map(|line| line[66..].to_owned()).collect();
    assert_eq!(files(&vendor().join("fuser")), listed);
}

#[test]
fn the_list_is_that_of_the_release() {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo"))).unwrap_or_default();
    let sources = fs::read_dir(home.join("registry/src")).into_iter().flatten();
    let releases: Vec<PathBuf> =
        sources.map(|source| source.unwrap().path().join("fuser-0.18.0")).filter(|at| at.is_dir()).collect();
    if releases.is_empty() {
        eprintln!("SKIPPED: the_list_is_that_of_the_release: cargo has no copy of fuser 0.18.0");
    }
    for release in releases {
        assert!(matches(&release), "{} differs from fuser.sha256", release.display());
    }
}
