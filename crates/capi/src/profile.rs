//! The profile that a program names: by the option `profile=`, or by `LODE_PROFILE`. No other place is looked at.
//!
//! It is advice: with one that is damaged or was made on another machine the pool, or the media, opens with the defaults, and
//! the sentence about it is left for `lode_last_error`.

use lodestone::media::RegionDescription;
use lodestone::mover::identity::{Machine, memory};
use lodestone::mover::profile::Profile;
use lodestone::mover::profile_text::{PROFILE_BYTES_MAX, REMEDY, Unfit, suit};
use lodestone::quote::Shown;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What engines are worth in front of these regions, if they are known, and where that is not what the file says, why.
pub fn of_regions(named: Option<&Path>, regions: Option<&[RegionDescription]>) -> (Profile, Option<String>) {
    let from_environment =
        || std::env::var_os("LODE_PROFILE").filter(|name| !name.is_empty()).map(PathBuf::from);
    let Some(path) = named.map(Path::to_path_buf).or_else(from_environment) else {
        return (Profile::default(), None);
    };
    let memory = regions.map(memory);
    let refused = |why: String| {
        let sentence =
            format!("the profile {} is not used: {why}: {REMEDY}; defaults are used", path.shown());
        (Profile::default(), Some(sentence))
    };
    match read(&path).map(|bytes| suit(&bytes, &Machine::here(), memory.as_deref())) {
        Ok(Ok(document)) => (document.profile, None),
        Ok(Err(Unfit::Elsewhere(_))) => (Profile::default(), None),
        Ok(Err(Unfit::Refused(why))) => refused(why),
        Err(e) => refused(format!("it cannot be read: {e}")),
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    // Before it is opened: a pipe would have us wait for who writes it.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(PROFILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
