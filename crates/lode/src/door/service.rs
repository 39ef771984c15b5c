//! What requests mean, in terms of no protocol: the few rules that stand between the kernel's view and
//! [`Fs`], written once for every door.
//!
//! **Who checks what.** The kernel has checked permissions before it asks (`default_permissions`), so
//! credentials only decide ownership. Set-id bits that a write, a truncation or a change of owner must
//! take away are the file system's business (FUSE_HANDLE_KILLPRIV_V2): a writer without CAP_FSETID is
//! handed to the core as an ordinary user, one with it as the superuser. The kernel does not learn that
//! bits fell, and it would honour a set-user-id bit that is gone; so the answers here say when they did
//! and the door makes the kernel forget the inode's attributes before the caller goes on.

use std::cell::RefCell;
use std::sync::Arc;

use lodestone::fs::{Attr, Cred, Fs, Ino, Node, SetAttr};
use lodestone::media::Media;
use lodestone::mover::class::Owner;
use lodestone::mover::priority::class_of;
use lodestone::{Error, Result};

use super::traffic::Traffic;

/// Bytes that one copy request moves at most: a caller of copy_file_range(2) asks again for the rest, and
/// a signal does not wait for a whole disk image.
const COPY_REQUEST_BYTES_MAX: u64 = 16 << 20;
/// Bytes copied at a time, as many as a large read brings.
const COPY_STEP_BYTES: usize = 1 << 20;

const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;
const ACL_ACCESS: &[u8] = b"system.posix_acl_access";

/// The process that asks.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
}

impl Caller {
    pub fn cred(self) -> Cred {
        Cred { uid: self.uid, gid: self.gid, groups: Vec::new(), enforce: false }
    }

    /// Membership is asked for rarely (a new ACL on a set-group-id file), so it is read where the kernel
    /// shows it instead of with every request. A process that has ended is in no group.
    fn in_group(self, gid: u32) -> bool {
        let status = || std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok();
        self.uid == 0 || self.gid == gid || status().is_some_and(|s| groups_in(&s).any(|g| g == gid))
    }
}

/// The supplementary groups that a `/proc/PID/status` lists.
fn groups_in(status: &str) -> impl Iterator<Item = u32> {
    let line = status.lines().find_map(|l| l.strip_prefix("Groups:")).unwrap_or("");
    line.split_ascii_whitespace().filter_map(|g| g.parse().ok())
}

/// What was done, and whether set-id bits fell by it.
pub struct Written {
    pub bytes: u64,
    pub set_id_fell: bool,
}

pub struct Service<M: Media> {
    pub fs: Arc<Fs<M>>,
    /// What is wanted of a caller's copies follows from its I/O priority.
    pub class_by_priority: bool,
    pub traffic: Arc<Traffic>,
}

impl<M: Media> Service<M> {
    /// Reads into `buffer` from `offset` on; fewer bytes only at the end of the file.
    pub fn read(&self, caller: Caller, ino: Ino, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let got = self.fs.read_at(&self.node(caller, ino)?, offset, buffer)?;
        self.traffic.count_read(got as u64);
        Ok(got)
    }

    /// For copies of this caller's. The bulk ones of a user share one part.
    fn node(&self, caller: Caller, ino: Ino) -> Result<Node> {
        let node = self.fs.node(ino)?;
        // 0 is somebody whom this server cannot see, or the kernel; to ask for it would be to ask for ourselves.
        if self.class_by_priority && caller.pid != 0 {
            node.set_class(class_of(caller.pid, Owner::of(caller.uid)));
        }
        Ok(node)
    }

    /// `kill` says that who truncates may not keep set-id bits. A new owner takes them from everyone: the core sees to both.
    ///
    /// Nothing to set is what arrives of chown(-1, -1), and before a write to a file with set-id bits. The
    /// owner takes them so. Of others only the write may, and its own request does.
    pub fn setattr(&self, caller: Caller, ino: Ino, set: &SetAttr, kill: bool) -> Result<Attr> {
        let falls = set.mode.is_none() && (set.size.is_some() || set.is_chown());
        let cred = if set.size.is_some() { writer(caller, kill) } else { caller.cred() };
        let cred = if falls { self.member(cred, caller, ino)? } else { cred };
        let enforce = set.is_chown() && set.uid.is_none() && set.gid.is_none();
        match self.fs.setattr(&Cred { enforce, ..cred }, ino, set) {
            Err(e) if enforce && e.errno() == libc::EPERM => self.fs.getattr(ino),
            done => done,
        }
    }

    /// The identity with the groups that decide whether a set-group-id bit that does not mean execution
    /// stays. Asked for rarely, because few files have one.
    fn member(&self, mut cred: Cred, caller: Caller, ino: Ino) -> Result<Cred> {
        let attr = self.fs.getattr(ino)?;
        if attr.mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID && caller.in_group(attr.gid) {
            cred.groups.push(attr.gid);
        }
        Ok(cred)
    }

    /// Writes `data` at `offset`. `kill` says that the writer may not keep set-id bits, `written_back` that programs stored it through a
    /// mapping, and the kernel writes it.
    ///
    /// The offset is the kernel's for O_APPEND too. It appends under the inode's lock at a size only it
    /// can change, and a large direct write arrives as several requests at once: only their offsets say
    /// which part is which, "at the end" would shuffle them.
    pub fn write(
        &self,
        caller: Caller,
        ino: Ino,
        offset: u64,
        data: &[u8],
        (kill, written_back): (bool, bool),
    ) -> Result<Written> {
        let set_id_fell = kill && self.has_set_id(ino)?;
        let cred = writer(caller, kill);
        let cred = if set_id_fell { self.member(cred, caller, ino)? } else { cred };
        let node = self.node(caller, ino)?;
        if written_back {
            node.set_written_back();
        }
        let mut bytes = self.fs.write_at(&cred, &node, offset, data, false)? - offset;
        // On a full pool these go in pieces. The kernel would not come back for the rest.
        while written_back && bytes < data.len() as u64 {
            let at = offset + bytes;
            bytes = self.fs.write_at(&cred, &node, at, &data[bytes as usize..], false)? - offset;
        }
        self.traffic.count_written(bytes);
        Ok(Written { bytes, set_id_fell })
    }

    /// As fallocate(2). The protocol does not say whether the caller may keep set-id bits, so that only
    /// the superuser may.
    pub fn fallocate(&self, caller: Caller, ino: Ino, mode: i32, offset: u64, len: u64) -> Result<bool> {
        let set_id_fell = caller.uid != 0 && self.has_set_id(ino)?;
        let cred = if set_id_fell { self.member(caller.cred(), caller, ino)? } else { caller.cred() };
        self.fs.fallocate(&cred, ino, mode, offset, len)?;
        Ok(set_id_fell)
    }

    /// Copies a range between two files of this pool, at most [`COPY_REQUEST_BYTES_MAX`]. Less than asked
    /// is an answer: the end of the source, or a failure after the first step (which the next call meets).
    pub fn copy_range(&self, caller: Caller, from: (Ino, u64), to: (Ino, u64), len: u64) -> Result<Written> {
        let kill = caller.uid != 0;
        let set_id_fell = kill && self.has_set_id(to.0)?;
        let cred = writer(caller, kill);
        let cred = if set_id_fell { self.member(cred, caller, to.0)? } else { cred };
        let len = len.min(COPY_REQUEST_BYTES_MAX);
        let (source, target) = (self.node(caller, from.0)?, self.node(caller, to.0)?);
        let mut done = 0;
        while done < len {
            let step = (len - done).min(COPY_STEP_BYTES as u64) as usize;
            let copied = with_buffer(step, |buffer| {
                let got = self.fs.read_at(&source, from.1 + done, buffer)?;
                let at = to.1 + done;
                match got {
                    0 => Ok(0),
                    _ => self
                        .fs
                        .write_at(&cred, &target, at, &buffer[..got], false)
                        .map(|end| (end - at) as usize),
                }
            });
            match copied {
                Ok(0) => break,
                Ok(got) => done += got as u64,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
        }
        self.traffic.count_read(done);
        self.traffic.count_written(done);
        Ok(Written { bytes: done, set_id_fell })
    }

    /// As chmod(2): one who changes the permissions (an access ACL is permissions) of a file of a group
    /// he is not in loses its set-group-id bit.
    pub fn setxattr(&self, caller: Caller, ino: Ino, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        let mut cred = caller.cred();
        if name == ACL_ACCESS {
            let attr = self.fs.getattr(ino)?;
            if attr.mode & libc::S_ISGID != 0 && caller.in_group(attr.gid) {
                cred.groups.push(attr.gid);
            }
        }
        self.fs.setxattr(&cred, ino, name, value, flags)
    }

    fn has_set_id(&self, ino: Ino) -> Result<bool> {
        Ok(self.fs.getattr(ino)?.mode & SET_ID != 0)
    }
}

/// The identity under which data is written: it decides set-id bits and nothing else, because the kernel
/// has checked the rest.
fn writer(caller: Caller, kill: bool) -> Cred {
    let uid = match (kill, caller.uid) {
        (false, _) => 0,
        // A superuser without CAP_FSETID.
        (true, 0) => u32::MAX,
        (true, uid) => uid,
    };
    Cred { uid, ..caller.cred() }
}

/// Lends this thread's buffer of `len` bytes, whose contents are old. Requests are bounded by what the
/// kernel was told at mount, and so is the buffer.
pub fn with_buffer<T>(len: usize, work: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.try_reserve(len - buffer.len()).map_err(|_| Error::new(libc::ENOMEM, "door::buffer"))?;
            buffer.resize(len, 0);
        }
        work(&mut buffer[..len])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_status_file() {
        let status = "Name:\tcat\nUid:\t1000\t1000\t1000\t1000\nGroups:\t4 24 1000 \nVmPeak:\t1\n";
        assert_eq!(groups_in(status).collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups_in("Name:\tcat\n").count(), 0);
    }

    #[test]
    fn only_a_writer_that_may_keep_them_is_the_superuser() {
        let user = Caller { uid: 7, gid: 7, pid: 1 };
        assert!(writer(user, false).is_root());
        assert_eq!(writer(user, true).uid, 7);
        assert!(!writer(Caller { uid: 0, ..user }, true).is_root());
    }
}
