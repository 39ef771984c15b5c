//! The file of one generation's device state: sealed when it is complete, verified before it is loaded.
//!
//! A guest's state is a stream that the one who made it hardly checks when it loads it: QEMU takes most flipped bits, a
//! stream of another generation, and one of another processor model. So the seal covers every byte of the file, and
//! stands in front, where it is found without trust in any length.

use super::image::{IDENTITY_BYTES_MAX, Record, SEAL_BYTES, Seal};
use crate::error::{Error, Result};
use crate::media::{Addr, Durable, Media};

const SITE: &str = "wsp::slot";

/// Seals the stream that stands behind the seal's place. All of the slot is durable on return, and means nothing before
/// the record names its generation.
///
/// ENAMETOOLONG for an identity that does not fit.
pub(super) fn seal<M: Media>(slot: &M, seal: Seal) -> Result<Durable> {
    if seal.identity.len() > IDENTITY_BYTES_MAX {
        let message = format!(
            "what this guest runs in takes {} bytes to say, {IDENTITY_BYTES_MAX} are possible: use a shorter command line",
            seal.identity.len()
        );
        return Err(Error::message(libc::ENAMETOOLONG, SITE, message));
    }
    let bytes = behind_seal(slot)?;
    if seal.stream_bytes == 0 || seal.stream_bytes > bytes {
        return Err(Error::message(libc::EIO, SITE, "the state of the devices was not written to the slot"));
    }
    let stream_crc = slot.crc32c(Addr(SEAL_BYTES as u64), bytes as usize, 0)?;
    let page = Seal { slot_bytes: slot.len(), stream_crc, ..seal }.encode();
    slot.copy_cached(Addr(0), &page[..])?.redundant("all of the slot is written back");
    slot.persist(&[(Addr(0), slot.len() as usize)]).map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        Error::message(errno, SITE, format!("the slot cannot be made durable: {e}"))
    })
}

/// The seal of a slot of which every byte verifies, and which is of the memory and the generation that `record` names.
///
/// EPROTO for a later version, EILSEQ for what does not verify, ESTALE for another generation or another memory.
pub fn verify<M: Media>(slot: &M, record: &Record) -> Result<Seal> {
    let refused = |errno, message: String| Err(Error::message(errno, SITE, message));
    let damaged = |what: String| {
        let message =
            format!("the slot of generation {} is damaged ({what}): put back what it was", record.generation);
        refused(libc::EILSEQ, message)
    };
    let Ok(bytes) = behind_seal(slot) else {
        return damaged(format!("it has {} bytes, fewer than its seal", slot.len()));
    };
    let mut page: Box<[u8; SEAL_BYTES]> = vec![0; SEAL_BYTES].try_into().expect("as long as it was made");
    slot.read(Addr(0), &mut page[..])?;
    match Seal::recognise(&page) {
        Ok(()) => {}
        Err(newer @ super::image::Refused::Newer(_)) if Seal::verifies(&page) => {
            return refused(libc::EPROTO, format!("the slot of generation {}: {newer}", record.generation));
        }
        Err(_) => return damaged("it does not begin with a seal".into()),
    }
    if !slot.verified(&[(Addr(0), SEAL_BYTES)], Seal::verifies(&page)) {
        return damaged("the checksum of its seal does not match".into());
    }
    let Ok(seal) = Seal::decode(&page) else { return damaged("its seal says nothing that can be".into()) };
    if seal.image != record.image {
        return refused(
            libc::ESTALE,
            "the slot belongs to the memory of another guest, or of another boot: put back the one that fits"
                .into(),
        );
    }
    if seal.generation != record.generation {
        let message = format!(
            "the slot is of generation {}, the memory of generation {}, and they do not fit: put back the ones that do",
            seal.generation, record.generation
        );
        return refused(libc::ESTALE, message);
    }
    if seal.slot_bytes != slot.len() || seal.stream_bytes > bytes {
        return damaged(format!("it has {} bytes, {} were written", slot.len(), seal.slot_bytes));
    }
    let crc = slot.crc32c(Addr(SEAL_BYTES as u64), bytes as usize, 0)?;
    if !slot.verified(&[(Addr(SEAL_BYTES as u64), bytes as usize)], crc == seal.stream_crc) {
        return damaged("the checksum of the state does not match".into());
    }
    Ok(seal)
}

fn behind_seal<M: Media>(slot: &M) -> Result<u64> {
    match slot.len().checked_sub(SEAL_BYTES as u64) {
        None | Some(0) => Err(Error::message(libc::EIO, SITE, "the slot has no room for a state")),
        Some(bytes) => Ok(bytes),
    }
}
