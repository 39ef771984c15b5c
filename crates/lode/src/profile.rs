//! Which profile a command works by: finds the file, reads it, and says why it is not used where it is not.
//!
//! Read is the file that `--profile`, the mount option `profile=` or `LODE_PROFILE` names, else the user's, else the
//! machine's. A profile is advice: without it, and with one that is damaged or was made elsewhere, the defaults hold and
//! the pool opens. What was refused is said in one line; a profile that was measured on other memory than the pool's is
//! a good one for other pools, and is said by `lode info` alone.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use lodestone::media::Pool;
use lodestone::mover::identity::{Machine, memory};
use lodestone::mover::profile::Profile;
use lodestone::mover::profile_text::{Document, PROFILE_BYTES_MAX, REMEDY, Unfit, decode, suit};

use crate::target::show;

/// The machine's, for every user.
const MACHINE_FILE: &str = "/etc/lode/profile.toml";

/// What came of looking for a profile.
#[derive(Debug)]
pub enum Found {
    /// Nobody named one, and there is none.
    Nothing,
    Used(PathBuf, Box<Document>),
    /// It was measured on other memory than the pool's.
    Elsewhere(PathBuf, String),
    /// It is damaged, cannot be read, or is another machine's.
    Refused(PathBuf, String),
}

impl Found {
    /// What engines are worth: by the file, or the defaults.
    pub fn profile(&self) -> Profile {
        match self {
            Found::Used(_, document) => document.profile.clone(),
            _ => Profile::default(),
        }
    }

    /// The file that holds.
    pub fn used(&self) -> Option<&Path> {
        match self {
            Found::Used(path, _) => Some(path),
            _ => None,
        }
    }

    /// The one line about a profile that was refused.
    pub fn complaint(&self) -> Option<String> {
        match self {
            Found::Refused(path, why) => {
                Some(format!("the profile {} is not used: {why}: {REMEDY}; defaults are used", show(path)))
            }
            _ => None,
        }
    }
}

/// The profile for a pool, which is logged where it is refused.
pub fn of_pool(named: Option<&Path>, pool: &Pool) -> Profile {
    for_pool(named, pool).profile()
}

/// Likewise, with the file.
pub fn for_pool(named: Option<&Path>, pool: &Pool) -> Found {
    let found = find(named, Some(&memory(&pool.describe().regions)));
    if let Some(complaint) = found.complaint() {
        tracing::warn!("{complaint}");
    }
    found
}

/// Looks for a profile that suits this machine, and `memory` where a pool is looked at.
pub fn find(named: Option<&Path>, memory: Option<&[String]>) -> Found {
    let Some((path, asked_for)) = file(named) else { return Found::Nothing };
    let bytes = match bytes(&path) {
        Ok(Some(bytes)) => bytes,
        Ok(None) if !asked_for => return Found::Nothing,
        Ok(None) => return Found::Refused(path, "there is no such file".to_owned()),
        Err(why) => return Found::Refused(path, why),
    };
    match suit(&bytes, &Machine::here(), memory) {
        Ok(document) => Found::Used(path, Box::new(document)),
        Err(Unfit::Elsewhere(why)) => Found::Elsewhere(path, why),
        Err(Unfit::Refused(why)) => Found::Refused(path, why),
    }
}

/// The file to read, and whether somebody asked for this one.
fn file(named: Option<&Path>) -> Option<(PathBuf, bool)> {
    if let Some(path) = named.map(Path::to_path_buf).or_else(from_environment) {
        return Some((path, true));
    }
    standard_files().into_iter().find(|path| !is_absent(path)).map(|path| (path, false))
}

fn from_environment() -> Option<PathBuf> {
    std::env::var_os("LODE_PROFILE").filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// Where profiles are looked for, first to last.
pub fn standard_files() -> Vec<PathBuf> {
    let user = crate::config::user_dir().map(|dir| dir.join("profile.toml"));
    user.into_iter().chain([PathBuf::from(MACHINE_FILE)]).collect()
}

/// Where a new profile goes unless somebody says: the one that is named, else the machine's for root, the user's for
/// others.
pub fn place() -> Option<PathBuf> {
    let mut standard = standard_files();
    from_environment().or_else(|| match rustix::process::geteuid().is_root() {
        true => standard.pop(),
        false => Some(standard.remove(0)).filter(|first| first != Path::new(MACHINE_FILE)),
    })
}

fn is_absent(file: &Path) -> bool {
    let absent = |e: std::io::Error| matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    std::fs::metadata(file).is_err_and(absent)
}

/// What a file says; none where it is not there. The message says what is wrong with it.
pub fn read(file: &Path) -> Result<Option<Document>, String> {
    bytes(file)?.map(|bytes| decode(&bytes)).transpose()
}

/// What a file holds, or the beginning of it, where it is too large for a profile; none where it is not there.
fn bytes(file: &Path) -> Result<Option<Vec<u8>>, String> {
    if is_absent(file) {
        return Ok(None);
    }
    let failed = |e: std::io::Error| format!("it cannot be read: {e}");
    let mut bytes = Vec::new();
    // Before it is opened: a pipe would have us wait for who writes it.
    if !std::fs::metadata(file).map_err(failed)?.is_file() {
        return Err("it is not a file".to_owned());
    }
    let opened = std::fs::File::open(file).map_err(failed)?;
    opened.take(PROFILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}
