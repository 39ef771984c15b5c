//! Owners, set-id bits, and POSIX ACLs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use rustix::fs::XattrFlags;

use crate::need_mount;
use crate::rig::{Rig, errno, succeed, text};

pub const NOBODY: u32 = 65534;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn make(rig: &Rig, name: &str, mode: u32) -> std::path::PathBuf {
    let path = rig.at(name);
    fs::write(&path, "content").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

/// Every way an ordinary user changes a file takes its set-id bits away.
#[test]
fn set_id_bits_fall_when_an_ordinary_user_changes_the_file() {
    need_mount!();
    for cache in ["cache=auto", "cache=none"] {
        let rig = Rig::mounted_with(cache);
        let changes = [
            ("write", "printf x >> f"),
            ("overwrite", "printf x 1<> f"),
            ("truncating open", ": > f"),
            ("truncate", "truncate -s 3 f"),
            ("fallocate", "fallocate -l 100000 f"),
            ("direct write", "dd if=/dev/zero of=f bs=4096 count=1 oflag=direct conv=notrunc status=none"),
        ];
        for (what, script) in changes {
            let f = make(&rig, "f", 0o6777);
            assert_eq!(mode(&f), 0o6777);
            let output = rig.as_nobody(script);
            assert!(output.status.success(), "{what}: {}", text(&output.stderr));
            assert_eq!(mode(&f), 0o777, "{cache}: {what}");
        }
        // Where the group may not execute it stays for its members, as on tmpfs and ext4.
        for (group, left) in [(0, 0o767), (NOBODY, 0o2767)] {
            let f = make(&rig, "f", 0o767);
            std::os::unix::fs::chown(&f, None, Some(group)).unwrap();
            fs::set_permissions(&f, Permissions::from_mode(0o2767)).unwrap();
            assert!(rig.as_nobody("printf x >> f").status.success());
            assert_eq!(mode(&f), left, "{cache}: group {group}");
        }
        // The superuser keeps them, whatever he writes.
        let f = make(&rig, "f", 0o6777);
        fs::write(&f, "by root").unwrap();
        assert_eq!(mode(&f), 0o6777, "{cache}");
    }
}

/// CAP_FSETID decides, not the user's number: as on the file system beside the mount.
#[test]
fn set_id_bits_stay_with_whoever_may_keep_them() {
    need_mount!();
    if Command::new("setpriv").arg("--version").output().is_err() {
        eprintln!("SKIPPED: set-id bits and capabilities: it needs setpriv");
        return;
    }
    let rig = Rig::mounted();
    let beside = rig.beside("others");
    fs::create_dir(&beside).unwrap();
    let without: &[&str] = &["--bounding-set", "-fsetid", "--inh-caps", "-fsetid"];
    let with: &[&str] = &[
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--inh-caps",
        "+fsetid",
        "--ambient-caps",
        "+fsetid",
    ];
    for (who, falls) in [(without, true), (with, false)] {
        for script in ["printf x >> f", "printf x 1<> f", ": > f", "truncate -s 3 f"] {
            let modes = [rig.dir(), beside.clone()].map(|dir| {
                let f = dir.join("f");
                fs::write(&f, "content").unwrap();
                fs::set_permissions(&f, Permissions::from_mode(0o6777)).unwrap();
                let mut setpriv = Command::new("setpriv");
                succeed(setpriv.args(who).args(["sh", "-c", script]).current_dir(&dir));
                mode(&f)
            });
            assert_eq!(modes, [if falls { 0o777 } else { 0o6777 }; 2], "{who:?}: {script}");
        }
    }
}

/// The kernel caches the mode, and asks nobody when it executes: the bit must be gone there as well.
#[test]
fn a_program_changed_by_an_ordinary_user_does_not_run_as_its_owner() {
    need_mount!();
    let rig = Rig::mounted();
    fs::copy("/usr/bin/id", rig.at("id")).unwrap();
    fs::set_permissions(rig.at("id"), Permissions::from_mode(0o4777)).unwrap();
    let before = rig.as_nobody("./id -u");
    assert_eq!(text(&before.stdout).trim(), "0", "set-user-id works to begin with");
    // One process, which looks at nothing in between.
    let after = rig.as_nobody("printf tail >> id && exec ./id -u");
    assert_eq!(text(&after.stdout).trim(), NOBODY.to_string(), "{}", text(&after.stderr));
}

#[test]
fn set_id_bits_fall_with_a_new_owner() {
    need_mount!();
    let rig = Rig::mounted();
    for (what, uid, gid) in [("owner", Some(5), None), ("group", None, Some(5)), ("both", Some(6), Some(6))] {
        let f = make(&rig, "f", 0o6755);
        chown(&f, uid, gid).unwrap();
        assert_eq!(mode(&f), 0o755, "{what}");
        let meta = fs::metadata(&f).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (uid.unwrap_or(meta.uid()), gid.unwrap_or(meta.gid())));
    }
    fs::create_dir(rig.at("d")).unwrap();
    fs::set_permissions(rig.at("d"), Permissions::from_mode(0o6755)).unwrap();
    chown(rig.at("d"), Some(5), Some(5)).unwrap();
    assert_eq!(mode(&rig.at("d")), 0o6755, "directories keep theirs");
}

#[test]
fn set_group_id_directories_hand_their_group_on() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    chown(rig.at("d"), Some(NOBODY), Some(1234)).unwrap();
    fs::set_permissions(rig.at("d"), Permissions::from_mode(0o2777)).unwrap();
    assert!(rig.as_nobody("umask 022; touch d/f; mkdir d/e; ln -s x d/s; mkfifo d/p").status.success());
    for name in ["f", "e", "s", "p"] {
        assert_eq!(fs::symlink_metadata(rig.at("d").join(name)).unwrap().gid(), 1234, "{name}");
    }
    assert_eq!(mode(&rig.at("d/e")), 0o2755);
    assert_eq!(mode(&rig.at("d/f")), 0o644);
    // Not a member of the group: the bit cannot be set on a file.
    assert!(rig.as_nobody("chmod 2755 d/f").status.success());
    assert_eq!(mode(&rig.at("d/f")), 0o755);
}

#[test]
fn capabilities_of_a_program_fall_with_a_write() {
    need_mount!();
    let rig = Rig::mounted();
    let f = make(&rig, "f", 0o777);
    // Version 2, CAP_NET_RAW permitted.
    let mut value = [0u8; 20];
    value[3] = 2;
    value[5] = 0x20;
    rustix::fs::setxattr(&f, "security.capability", &value, XattrFlags::empty()).unwrap();
    assert!(rig.as_nobody("printf x >> f").status.success());
    let gone = rustix::fs::getxattr(&f, "security.capability", &mut [0u8; 20]);
    assert_eq!(gone.unwrap_err().raw_os_error(), libc::ENODATA);
}

/// One ACL in the kernel's format: version 2, then (tag, permissions, id), little-endian.
pub fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

pub const USER_OBJ: u16 = 0x01;
pub const USER: u16 = 0x02;
pub const GROUP_OBJ: u16 = 0x04;
pub const MASK: u16 = 0x10;
pub const OTHER: u16 = 0x20;
pub const NO_ID: u32 = u32::MAX;

#[test]
fn access_acls_bind() {
    need_mount!();
    let rig = Rig::mounted();
    let f = make(&rig, "f", 0o600);
    assert!(!rig.as_nobody("cat f").status.success());
    let list = acl(&[
        (USER_OBJ, 6, NO_ID),
        (USER, 4, NOBODY),
        (GROUP_OBJ, 0, NO_ID),
        (MASK, 4, NO_ID),
        (OTHER, 0, NO_ID),
    ]);
    rustix::fs::setxattr(&f, "system.posix_acl_access", &list, XattrFlags::empty()).unwrap();
    assert_eq!(mode(&f), 0o640, "the mask stands as the group's permissions");
    assert!(rig.as_nobody("cat f").status.success());
    assert!(!rig.as_nobody("echo x >> f").status.success());
    let mut got = [0; 100];
    let n = rustix::fs::getxattr(&f, "system.posix_acl_access", &mut got[..]).unwrap();
    assert_eq!(got[..n], list);
    // chmod changes the mask, and with it what the named user may do.
    fs::set_permissions(&f, Permissions::from_mode(0o600)).unwrap();
    assert!(!rig.as_nobody("cat f").status.success());
}

#[test]
fn default_acls_take_the_place_of_the_umask() {
    need_mount!();
    let rig = Rig::mounted();
    fs::create_dir(rig.at("d")).unwrap();
    fs::set_permissions(rig.at("d"), Permissions::from_mode(0o777)).unwrap();
    let list = acl(&[(USER_OBJ, 7, NO_ID), (GROUP_OBJ, 7, NO_ID), (OTHER, 5, NO_ID)]);
    rustix::fs::setxattr(rig.at("d"), "system.posix_acl_default", &list, XattrFlags::empty()).unwrap();
    assert!(rig.as_nobody("umask 077; touch d/f f2 2>/dev/null; mkdir d/e").status.success());
    assert_eq!(mode(&rig.at("d/f")), 0o664);
    assert_eq!(mode(&rig.at("d/e")), 0o775);
    let inherited = rustix::fs::getxattr(rig.at("d/e"), "system.posix_acl_default", &mut [0u8; 64]);
    assert_eq!(inherited.unwrap(), list.len());
}

#[test]
fn who_sets_an_acl_on_a_foreign_groups_file_loses_set_group_id() {
    need_mount!();
    let rig = Rig::mounted();
    if Command::new("setfacl").arg("--version").output().is_err() {
        eprintln!("SKIPPED: setting an ACL as an ordinary user: it needs setfacl");
        return;
    }
    let f = make(&rig, "f", 0o755);
    chown(&f, Some(NOBODY), Some(1234)).unwrap();
    fs::set_permissions(&f, Permissions::from_mode(0o2755)).unwrap();
    assert!(rig.as_nobody("setfacl -m u:1:r f").status.success());
    assert_eq!(mode(&f) & 0o2000, 0);
    // A member of the group keeps it.
    chown(&f, None, Some(NOBODY)).unwrap();
    fs::set_permissions(&f, Permissions::from_mode(0o2755)).unwrap();
    assert!(rig.as_nobody("setfacl -m u:2:r f").status.success());
    assert_eq!(mode(&f), 0o2755);
}

#[test]
fn only_the_mounting_user_enters_where_others_are_not_allowed() {
    need_mount!();
    // The mount of an ordinary user, by way of fusermount3.
    let rig = Rig::mounted();
    chown(rig.dir(), Some(NOBODY), Some(NOBODY)).unwrap();
    rig.umount();
    for path in [rig.pool(), rig.dir()] {
        chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let mut mount = as_nobody(&rig.mount_command("rw"));
    let output = mount.output().unwrap();
    if !output.status.success() {
        let said = text(&output.stderr);
        assert!(said.starts_with("lode: cannot mount on"), "{said}");
        eprintln!("SKIPPED: a mount by an ordinary user: {said}");
        return;
    }
    assert!(rig.as_nobody("echo mine > f && cat f").status.success());
    assert_eq!(errno(fs::read_dir(rig.dir())), libc::EACCES, "not even root");
    let line = rig.mount_line().unwrap();
    assert_eq!(line[2], "fuse.lode");
    assert!(line[3].split(',').any(|o| o == "nosuid"), "{line:?}");
    succeed(&mut as_nobody(crate::rig::lode().arg("umount").arg(rig.dir())));
    assert!(!rig.is_mounted());
}

/// The same command as the ordinary user.
fn as_nobody(command: &Command) -> Command {
    use std::os::unix::process::CommandExt;
    let mut other = Command::new(command.get_program());
    other.args(command.get_args()).uid(NOBODY).gid(NOBODY).current_dir("/").env_remove("HOME");
    other
}
