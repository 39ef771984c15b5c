//! What is compiled once for all who are compiled with assertions: on this level of optimisation a crate takes the instances that
//! a crate below it has, and a file system is large. Each of thirty test programs would compile its own.

use super::Fs;
use super::files::Files;
use crate::media::Pool;

macro_rules! addresses {
    ($($of:ident: $($method:ident)+;)+) => { [$($($of::<Pool>::$method as usize,)+)+] };
}

/// Nobody calls it. That it names them is enough; what is not named, or has parameters of its own, each compiles for itself.
#[inline(never)]
#[expect(function_casts_as_integer, reason = "nobody goes to these addresses")]
pub fn instances() -> impl Sized {
    addresses! {
        Fs: getattr attr_of setattr setattr_node access open_node open_inode lookup take readlink mknod mkdir symlink create tmpfile
            link unlink rmdir rename dump_super dump_inode getxattr listxattr setxattr removexattr mkfs probe info open tick sync
            fsync close abandon read_at begin_read read seek seek_node write_at begin_write write fallocate fallocate_node walk stat
            walk_parent check statfs fix unfix;
        Files: new close dup open openat stat lstat fstat fstatat chmod fchmod fchmodat chown lchown fchown fchownat utimensat
            futimens access faccessat statvfs fstatvfs getxattr fgetxattr setxattr fsetxattr listxattr flistxattr removexattr
            fremovexattr read begin_read pread begin_pread write begin_write pwrite begin_pwrite submit_pwrite submit_pread lseek
            ftruncate truncate fallocate fsync fdatasync fsync_async fdatasync_async opendir closedir readdir getdents mkdir mkdirat
            mknod mknodat symlink symlinkat link linkat unlink rmdir unlinkat rename renameat2 readlink readlinkat;
    }
}
