//! POSIX access control lists, in the kernel's xattr form.
//!
//! The entries that equal the permission bits (owner, mask or group, other) live in the mode alone: the
//! stored list's are stale by design and filled in when it is read. So chmod needs no second record.

use super::format::{get16, get32, put16, put32};
use super::inode::Body;
use super::types::Cred;
use crate::error::{Error, Result};

pub const ACCESS: &[u8] = b"system.posix_acl_access";
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const HEADER: usize = 4;
const ENTRY: usize = 8;
/// Entries in one list: what fits the longest attribute value.
const ENTRIES_MAX: usize = (crate::limits::XATTR_VALUE_BYTES_MAX - HEADER) / ENTRY;

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;
const NO_ID: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid list: one owner, one group and one other entry, and a mask where anybody else is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// EINVAL for what is no list, EOPNOTSUPP for another version of it. An empty value or list is `None`.
    /// Whether the list makes sense, [`check`](Acl::check) says.
    pub fn parse(value: &[u8]) -> Result<Option<Acl>> {
        let invalid = || Error::new(libc::EINVAL, "acl::parse");
        if value.is_empty() {
            return Ok(None);
        }
        if value.len() < HEADER || get32(value, 0) != VERSION {
            return Err(if value.len() < HEADER {
                invalid()
            } else {
                Error::new(libc::EOPNOTSUPP, "acl::parse")
            });
        }
        let body = &value[HEADER..];
        if !body.len().is_multiple_of(ENTRY) || body.len() / ENTRY > ENTRIES_MAX {
            return Err(invalid());
        }
        let entries: Vec<Entry> = body
            .chunks_exact(ENTRY)
            .map(|e| Entry { tag: get16(e, 0), perm: get16(e, 2), id: get32(e, 4) })
            .collect();
        if entries.is_empty() {
            return Ok(None);
        }
        let known = |e: &Entry| match e.tag {
            USER | GROUP => e.id != NO_ID,
            USER_OBJ | GROUP_OBJ | MASK | OTHER => true,
            _ => false,
        };
        if !entries.iter().all(known) {
            return Err(invalid());
        }
        Ok(Some(Acl { entries }))
    }

    /// EINVAL where the kernel would say so.
    pub fn check(&self) -> Result<()> {
        if valid(&self.entries) { Ok(()) } else { Err(Error::new(libc::EINVAL, "acl::check")) }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut value = vec![0; HEADER + self.entries.len() * ENTRY];
        put32(&mut value, 0, VERSION);
        for (e, at) in self.entries.iter().zip((HEADER..).step_by(ENTRY)) {
            put16(&mut value, at, e.tag);
            put16(&mut value, at + 2, e.perm);
            put32(&mut value, at + 4, e.id);
        }
        value
    }

    /// The permission bits that the list stands for.
    pub fn mode(&self) -> u32 {
        let perm = |tag| self.entries.iter().find(|e| e.tag == tag).map(|e| e.perm as u32);
        let group = perm(MASK).or(perm(GROUP_OBJ)).unwrap_or(0);
        perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | perm(OTHER).unwrap_or(0)
    }

    /// Whether the permission bits say it all.
    pub fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    fn set_mode(&mut self, mode: u32) {
        let masked = self.entries.iter().any(|e| e.tag == MASK);
        for e in &mut self.entries {
            match e.tag {
                USER_OBJ => e.perm = (mode >> 6 & 7) as u16,
                MASK => e.perm = (mode >> 3 & 7) as u16,
                GROUP_OBJ if !masked => e.perm = (mode >> 3 & 7) as u16,
                OTHER => e.perm = (mode & 7) as u16,
                _ => {}
            }
        }
    }

    /// Whether somebody who is not the owner may do `want`.
    pub fn permits(&self, cred: &Cred, body: &Body, want: u32) -> bool {
        let mask = self.entries.iter().find(|e| e.tag == MASK).map_or(7, |e| e.perm as u32);
        if let Some(e) = self.entries.iter().find(|e| e.tag == USER && e.id == cred.uid) {
            return e.perm as u32 & mask & want == want;
        }
        let mut member = false;
        for e in &self.entries {
            let named = match e.tag {
                GROUP_OBJ => cred.in_group(body.gid),
                GROUP => cred.in_group(e.id),
                _ => false,
            };
            if named {
                member = true;
                if e.perm as u32 & mask & want == want {
                    return true;
                }
            }
        }
        let other = self.entries.iter().find(|e| e.tag == OTHER).map_or(0, |e| e.perm as u32);
        !member && other & want == want
    }

    /// What a file made with `mode` in a directory with this default list gets: its list and its mode.
    pub fn inherit(&self, mode: u32) -> (Acl, u32) {
        let mut acl = self.clone();
        let bits = acl.mode() & mode & 0o777;
        acl.set_mode(bits);
        (acl, mode & !0o777 | bits)
    }
}

/// The rules of posix_acl_valid: order by tag, a mask where needed. Like the kernel's they demand neither
/// order nor uniqueness of who is named: the first entry that fits decides.
fn valid(entries: &[Entry]) -> bool {
    let count = |tag| entries.iter().filter(|e| e.tag == tag).count();
    let ordered = entries.windows(2).all(|w| w[0].tag <= w[1].tag);
    let named = count(USER) + count(GROUP) > 0;
    ordered
        && entries.iter().all(|e| e.perm <= 7)
        && count(USER_OBJ) == 1
        && count(GROUP_OBJ) == 1
        && count(OTHER) == 1
        && (count(MASK) == 1 || count(MASK) == 0 && !named)
}

/// Whether an attribute of this name holds an access list.
pub fn is_list(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

fn stored(body: &Body, name: &[u8]) -> Option<Acl> {
    let x = body.xattrs.iter().find(|x| *x.name == *name)?;
    Acl::parse(x.list.as_ref()?).ok().flatten().filter(|acl| acl.check().is_ok())
}

/// The access list, if it says more than the mode.
pub fn access(body: &Body) -> Option<Acl> {
    if body.xattrs.is_empty() {
        return None;
    }
    let mut acl = stored(body, ACCESS)?;
    acl.set_mode(body.mode);
    Some(acl)
}

/// What the directory's new entries inherit.
pub fn default(body: &Body) -> Option<Acl> {
    if body.xattrs.is_empty() { None } else { stored(body, DEFAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        Acl { entries: entries.iter().map(|&(tag, perm, id)| Entry { tag, perm, id }).collect() }.encode()
    }

    #[test]
    fn what_the_kernel_refuses_is_refused() {
        let good =
            [(USER_OBJ, 7, NO_ID), (USER, 5, 10), (GROUP_OBJ, 4, NO_ID), (MASK, 6, NO_ID), (OTHER, 0, NO_ID)];
        let acl = Acl::parse(&list(&good)).unwrap().unwrap();
        acl.check().unwrap();
        assert_eq!(acl.mode(), 0o760);
        assert!(!acl.is_minimal());
        for missing in 0..good.len() {
            if good[missing].0 == USER {
                continue;
            }
            let mut bad = good.to_vec();
            bad.remove(missing);
            assert!(Acl::parse(&list(&bad)).unwrap().unwrap().check().is_err(), "without entry {missing}");
        }
        assert!(Acl::parse(&[1, 0, 0, 0]).is_err());
        assert!(Acl::parse(&list(&[(USER, 7, NO_ID)])).is_err());
        assert_eq!(Acl::parse(&[2, 0, 0, 0]).unwrap(), None);
        assert_eq!(Acl::parse(&[]).unwrap(), None);
    }

    #[test]
    fn a_new_file_gets_the_common_bits() {
        let good =
            [(USER_OBJ, 7, NO_ID), (USER, 7, 10), (GROUP_OBJ, 5, NO_ID), (MASK, 7, NO_ID), (OTHER, 1, NO_ID)];
        let (acl, mode) = Acl::parse(&list(&good)).unwrap().unwrap().inherit(0o100640);
        assert_eq!(mode, 0o100640);
        assert_eq!(acl.mode(), 0o640);
    }
}
