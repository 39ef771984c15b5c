//! Which descriptor is whose: a program may close ours, and open something else of that number.
//!
//! Programs that start others close all descriptors that they do not know (closefrom(3)). What is opened next gets such a
//! number, be it the program's or ours: then two memories of one process on one file would both believe in it, and the kernel
//! says nothing that tells them apart. They would claim the same units, because locks are the open file's. So each number is
//! noted here with its owner, and who opens something takes its number from whoever thought to have it.
//!
//! Nothing here allocates: it runs inside of `malloc`.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::fs::Stat;

use super::gate::Gate;
use crate::limits::MEMORIES_MAX;

/// A memory has a file, one to spare, and in a child one that was handed down; so many again for those that come and go.
const DESCRIPTORS_MAX: usize = 6 * MEMORIES_MAX;
/// Ours stand high, where programs do not count.
const NUMBER_MIN: u64 = 1000;
/// A place of the table that is free, and one whose number went to somebody else.
const FREE: RawFd = -1;
const LOST: RawFd = -2;

static NUMBERS: Gate<[RawFd; DESCRIPTORS_MAX]> = Gate::new([FREE; DESCRIPTORS_MAX]);

/// What tells one file or device from another.
pub(super) type Identity = (u64, u64, u64);

pub(super) fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino, stat.st_rdev)
}

/// A descriptor of ours, unless the program closed it.
#[derive(Debug)]
pub(super) struct Descriptor {
    place: usize,
    number: RawFd,
    identity: Identity,
}

impl Descriptor {
    /// Moves a descriptor up, if that is possible, and notes it. None where the table is full.
    pub fn new(file: OwnedFd, identity: Identity) -> Option<Descriptor> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let least = NUMBER_MIN.min(limit.saturating_sub(8)) as RawFd;
        let mut numbers = NUMBERS.enter()?;
        let place = numbers.iter().position(|number| *number == FREE)?;
        let number = match rustix::io::fcntl_dupfd_cloexec(&file, least) {
            Ok(high) => high.into_raw_fd(),
            Err(_) => file.into_raw_fd(),
        };
        lose(&mut numbers[..], number);
        numbers[place] = number;
        Some(Descriptor { place, number, identity })
    }

    /// None where the program closed it.
    pub fn get(&self) -> Option<BorrowedFd<'static>> {
        if NUMBERS.enter()?[self.place] != self.number {
            return None;
        }
        // SAFETY: if it is no longer open, or another file, that is what the look tells.
        let file = unsafe { BorrowedFd::borrow_raw(self.number) };
        rustix::fs::fstat(file).is_ok_and(|stat| identity(&stat) == self.identity).then_some(file)
    }

    /// The open file itself, which is no longer noted.
    pub fn into_file(self) -> Option<OwnedFd> {
        // SAFETY: ours still, and this was its only owner.
        self.get().map(|file| unsafe { OwnedFd::from_raw_fd(file.as_raw_fd()) })
    }

    /// `/proc/self/fd/N`, whatever is there by now.
    pub fn name<'a>(&self, buffer: &'a mut [u8; 32]) -> &'a CStr {
        name_of(self.number, buffer)
    }
}

impl Drop for Descriptor {
    /// It stays open: `into_file` says where it ends.
    fn drop(&mut self) {
        if let Some(mut numbers) = NUMBERS.enter() {
            numbers[self.place] = FREE;
        }
    }
}

/// A number that was given out just now is nobody else's.
pub(super) fn opened(file: &OwnedFd) {
    if let Some(mut numbers) = NUMBERS.enter() {
        lose(&mut numbers[..], file.as_raw_fd());
    }
}

fn lose(numbers: &mut [RawFd], number: RawFd) {
    numbers.iter_mut().filter(|other| **other == number).for_each(|other| *other = LOST);
}

/// In the child of a fork, whose only thread this is.
pub(super) fn in_child() {
    drop(NUMBERS.open_in_child());
}

/// Without an allocation.
fn name_of(number: RawFd, buffer: &mut [u8; 32]) -> &CStr {
    const DIRECTORY: &[u8] = b"/proc/self/fd/";
    let mut digits = [0; 10];
    let (mut rest, mut count) = (number.unsigned_abs(), 0);
    while count == 0 || rest > 0 {
        digits[count] = b'0' + (rest % 10) as u8;
        (rest, count) = (rest / 10, count + 1);
    }
    buffer[..DIRECTORY.len()].copy_from_slice(DIRECTORY);
    for (place, digit) in buffer[DIRECTORY.len()..].iter_mut().zip(digits[..count].iter().rev()) {
        *place = *digit;
    }
    CStr::from_bytes_until_nul(buffer).expect("the buffer is longer than any number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_have_names() {
        for (number, name) in [(0, c"/proc/self/fd/0"), (1017, c"/proc/self/fd/1017")] {
            assert_eq!(name_of(number, &mut [0; 32]), name);
        }
    }
}
