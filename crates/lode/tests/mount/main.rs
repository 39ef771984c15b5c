//! Mounted pools, seen as programs see them: the built `lode` binary mounts, and the kernel's own calls
//! look.
//!
//! `rig` makes and mounts pools, `files` checks what POSIX promises of files and names, `data` what it
//! promises of bytes, `nameless` O_TMPFILE, `identity` owners, set-id bits and ACLs, `life` mounting, signals, crashes and
//! options, `live` what a server tells of its mount, `media` media that fail, `system` mount(8) and fstab. All of it needs
//! root and /dev/fuse; where either is missing each test says so and checks nothing.

mod data;
mod files;
mod identity;
mod life;
mod live;
mod media;
mod nameless;
mod rig;
mod system;
