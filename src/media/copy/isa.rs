//! Which instruction set moves the data: the best one, unless someone asks for another.
//!
//! The choice is made when a pool is opened: `PoolOptions::isa`, else the environment's `LODE_ISA`, else
//! what the processor has. The slower sets stay selectable, because tools that interpret a program
//! (memory checkers) know no wide vectors.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use super::{CrcFn, Routines};
use crate::error::{Error, Result};

#[cfg(any(miri, not(target_arch = "x86_64")))]
use super::portable as native;
#[cfg(all(not(miri), target_arch = "x86_64"))]
use super::x86_64 as native;

pub(in crate::media) use native::{Features, return_fault};

/// The instruction sets that have routines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Isa {
    /// Plain Rust, for other processors than x86-64: no write-back, no recovery from faults.
    Portable,
    Sse2,
    Avx2,
    Avx512,
}

impl Isa {
    const ALL: [Isa; 4] = [Isa::Portable, Isa::Sse2, Isa::Avx2, Isa::Avx512];

    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Sse2 => "sse2",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Those that this processor can run, the best one last; never empty.
    pub fn available() -> Vec<Isa> {
        let features = features();
        Isa::ALL.into_iter().filter(|&isa| features.has(isa)).collect()
    }

    fn best() -> Isa {
        let features = features();
        Isa::ALL.into_iter().rfind(|&isa| features.has(isa)).unwrap_or(Isa::Portable)
    }

    /// What `LODE_ISA` asks for.
    fn of_environment() -> Result<Option<Isa>, String> {
        match std::env::var("LODE_ISA") {
            Ok(name) if name.is_empty() => Ok(None),
            Ok(name) => name.parse().map(Some).map_err(|e| format!("LODE_ISA: {e}")),
            Err(_) => Ok(None),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(s: &str) -> Result<Isa, String> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == s)
            .ok_or_else(|| format!("unknown instruction set `{s}`: use sse2, avx2 or avx512"))
    }
}

pub(in crate::media) fn features() -> &'static Features {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    FEATURES.get_or_init(Features::detect)
}

impl Routines {
    /// The routines of the instruction set asked for, by option or environment, or of the best one.
    pub fn choose(wanted: Option<Isa>) -> Result<(Isa, Routines)> {
        let refuse = |message| Error::message(libc::EINVAL, "media::copy::choose", message);
        let named = match wanted {
            Some(isa) => Some(isa),
            None => Isa::of_environment().map_err(refuse)?,
        };
        let isa = named.unwrap_or_else(Isa::best);
        if !features().has(isa) {
            let available: Vec<&str> = Isa::available().iter().map(|i| i.name()).collect();
            return Err(refuse(format!(
                "this processor has no routines for {isa}: use {}, or leave it out",
                available.join(", ")
            )));
        }
        Ok((isa, native::routines(isa, features())))
    }

    /// As [`choose`](Routines::choose) where nobody can be told of a wrong `LODE_ISA`: it counts for
    /// nothing then.
    pub fn default_choice() -> Routines {
        let named = Isa::of_environment().ok().flatten().filter(|&isa| features().has(isa));
        native::routines(named.unwrap_or_else(Isa::best), features())
    }
}

/// CRC-32C (Castagnoli) of bytes in DRAM, continuing from `crc` (0 to begin), so that
/// `crc32c(b, crc32c(a, 0))` is the checksum of `a` and `b` together.
#[inline]
pub fn crc32c(bytes: &[u8], crc: u32) -> u32 {
    static ROUTINE: OnceLock<CrcFn> = OnceLock::new();
    let routine = ROUTINE.get_or_init(|| Routines::default_choice().crc);
    // SAFETY: a slice is readable as long as it says; memory of our own does not fault.
    let outcome = unsafe { routine(bytes.as_ptr(), bytes.len(), !crc) };
    !(outcome.value as u32)
}
