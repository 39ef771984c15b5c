//! The record that stands behind a guest's memory, in the same file or device.
//!
//! It is there, and not in a file of its own, so that it goes wherever the memory goes: memory that was put back from a
//! copy brings the record of its own generation along, and fits no other state.

use super::State;
use super::image::{NUMBER_MAX, RECORD_BYTES, RECORD_STRIDE_BYTES, RECORDS, Record, Refused};
use crate::error::{Error, Result};
use crate::media::{Addr, Durable, Flushed, LINE, Media};

const SITE: &str = "wsp::record";

/// The guest's memory, and the record behind it.
pub struct Ram<'a, M: Media> {
    media: &'a M,
    bytes: u64,
}

impl<'a, M: Media> Ram<'a, M> {
    /// Memory of so many bytes at the beginning of `media`.
    ///
    /// EINVAL where it is not whole lines, or nothing is left behind it for the record.
    pub fn new(media: &'a M, bytes: u64) -> Result<Ram<'a, M>> {
        let end = bytes.checked_add(RECORDS * RECORD_STRIDE_BYTES);
        if !bytes.is_multiple_of(LINE as u64) || end.is_none_or(|end| end > media.len()) {
            let message = format!(
                "the memory's file has {} bytes, fewer than {bytes} of memory and its record: it was cut short, or is of \
                 another guest",
                media.len()
            );
            return Err(Error::message(libc::EINVAL, SITE, message));
        }
        Ok(Ram { media, bytes })
    }

    pub fn media(&self) -> &'a M {
        self.media
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the record says; none where there is none that verifies. A record of a later version is EPROTO.
    pub fn record(&self) -> Result<Option<Record>> {
        let mut found: Option<Record> = None;
        for n in 0..RECORDS {
            let at = self.at(n);
            let mut line = [0; RECORD_BYTES];
            self.media.read(at, &mut line)?;
            match Record::recognise(&line) {
                Ok(()) => {}
                Err(Refused::Newer(_)) if !Record::verifies(&line) => continue,
                Err(newer @ Refused::Newer(_)) => {
                    return Err(Error::message(
                        libc::EPROTO,
                        SITE,
                        format!("the memory's record cannot be used: {newer}"),
                    ));
                }
                Err(_) => continue,
            }
            if !self.media.verified(&[(at, RECORD_BYTES)], Record::verifies(&line)) {
                continue;
            }
            if let Ok(record) = Record::decode(&line)
                && record.ram_bytes == self.bytes
                && found.is_none_or(|other| other.serial < record.serial)
            {
                found = Some(record);
            }
        }
        Ok(found)
    }

    /// Replaces the record; `serial` is chosen here. Durable on return, all or nothing.
    pub(super) fn write(&self, record: Record) -> Result<Durable> {
        let serial = self.record()?.map_or(1, |before| before.serial + 1);
        if serial.max(record.generation) >= NUMBER_MAX {
            let message = "the memory's record claims to have been written more often than there is time";
            return Err(Error::message(libc::EUCLEAN, SITE, message));
        }
        let line = Record { serial, ram_bytes: self.bytes, ..record }.encode();
        let stored = self.media.copy_nt(self.at(serial % RECORDS), &line)?;
        let durable = self.media.fence(stored);
        self.media.sync().map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            Error::message(errno, SITE, format!("the memory's record cannot be made durable: {e}"))
        })?;
        Ok(durable)
    }

    /// Says that a guest was booted on this memory: whatever image there was is gone. Durable on return.
    pub fn begin(&self, image: [u8; 16]) -> Result<Durable> {
        self.write(Record { serial: 0, state: State::Running, generation: 0, image, ram_bytes: self.bytes })
    }

    fn at(&self, n: u64) -> Addr {
        Addr(self.bytes + n * RECORD_STRIDE_BYTES)
    }
}

/// The record of any guest whose memory begins where `media` does, which may be as long as any multiple of `unit` bytes: what stands
/// behind memory of one size is within that of another. Of several one that says suspended.
pub fn of_any_size<M: Media>(media: &M, unit: u64) -> Result<Option<Record>> {
    let mut found = None;
    for bytes in sizes(media, unit) {
        match (Ram { media, bytes }).record()? {
            Some(record) if record.state == State::Suspended => return Ok(Some(record)),
            Some(record) => found = Some(record),
            None => {}
        }
    }
    Ok(found)
}

/// Leaves no record that [`of_any_size`] would find, nor one of a later version: nothing is resumed from here on memory that becomes
/// another guest's. Durable on return.
pub fn forget_of_any_size<M: Media>(media: &M, unit: u64) -> Result<Durable> {
    let mut forgotten = Flushed::issued();
    for bytes in sizes(media, unit) {
        for n in 0..RECORDS {
            let at = (Ram { media, bytes }).at(n);
            let mut line = [0; RECORD_BYTES];
            // From what cannot be read nothing is resumed.
            let is_read = media.read(at, &mut line).is_ok();
            let is_record = Record::recognise(&line) != Err(Refused::Foreign) && Record::verifies(&line);
            if is_read && is_record {
                forgotten = forgotten.and(media.zero_nt(at, RECORD_BYTES)?);
            }
        }
    }
    let durable = media.fence(forgotten);
    media.sync().map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        Error::message(errno, SITE, format!("former records cannot be removed from the memory: {e}"))
    })?;
    Ok(durable)
}

/// All that memory with a record behind it may have there, in bytes.
fn sizes<M: Media>(media: &M, unit: u64) -> impl Iterator<Item = u64> {
    let most = media.len().saturating_sub(RECORDS * RECORD_STRIDE_BYTES);
    (1..=most / unit).map(move |n| n * unit)
}
