"""The same random system calls on the file system under test and on one of the kernel's own.

Each round makes a list of calls from its seed and has it run twice, by two processes in fresh directories:
one below the mount (or, for `calls_of_the_library`, in a pool through liblodestone.so), one on tmpfs or
ext4. After every call both say what it answered (value or errno, data read) and what all files that their
user can see look like: type, mode, owner, links, size, target, extended attributes, and in every fourth
round which times the call changed. The first answer that differs ends the round; what may differ, and why,
is the list EXCEPTIONS and nothing else.

A round is replayed with `run.py --only system_calls --seed S`; a failure names both.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pickle
import random
import stat
import struct
import subprocess
import time
import traceback

from target import Skip

ROUNDS = 48
ROUNDS_MIN = 8
SECONDS = 14
CALLS = 250
POOL_BYTES = 32 << 20
FDS = 4
FILE_BYTES_MAX = (1 << 44) - 4096
# A descriptor that is none.
CLOSED = 999_999
SETS_TIMES = ("utimens", "futimens")
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EACCESS, AT_REMOVEDIR, AT_EMPTY_PATH = -100, 0x100, 0x200, 0x200, 0x1000
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
KEEP_SIZE, PUNCH_HOLE, NO_HIDE_STALE, COLLAPSE, ZERO_RANGE, INSERT, UNSHARE = 1, 2, 4, 8, 16, 32, 64
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
RWF_APPEND = 0x10
CLOCK_REALTIME_COARSE = 5
UNCHANGED_ID = (1 << 32) - 1
# A group without a name in any of the identities, so that chown and setgid meet one that is not theirs.
STRANGE_GROUP = 7003
IDENTITIES = {0: (0, 0, []), 1: (7001, 7001, [7010]), 2: (7002, 7002, [7001, 7010])}
STAT_BYTES = 144
ACL_ACCESS, ACL_DEFAULT = b"system.posix_acl_access", b"system.posix_acl_default"

# ----------------------------------------------------------------------------------------------------
# Which calls

NAMES = [b"a", b"b", b"c", b"d", b"e", b"g", b"l", b"m"]
ODD_NAMES = [b".", b"..", b"n" * 255, b"n" * 256, b""]
SIZES = [0, 1, 100, 4095, 4096, 4097, 8192, 10000, 65536, 70001]
MODES = [0, 0o400, 0o600, 0o644, 0o666, 0o700, 0o755, 0o777, 0o1777, 0o2755, 0o2745, 0o4755, 0o6777, 0o6666, 0o2770, 0o4711]


class Calls:
    """Draws calls; what it draws depends on the seed and the two sides alone, never on an answer."""

    def __init__(self, seed, sides):
        self.random = random.Random(seed)
        self.sides = sides
        self.weights = {name: weight for name, weight in WEIGHTS.items() if name not in sides.lacks}
        self.user_now = 0

    def chance(self, percent):
        return self.random.randrange(100) < percent

    def one(self, choices):
        return self.random.choice(choices)

    def path(self):
        if self.chance(2):
            return self.one([b"", b"/", b".", b"..", b"/..", b"d/" * 2000 + b"a", b"./" * 2060, b"l/" * 45])
        depth = self.random.choices([1, 2, 3], [55, 35, 10])[0]
        parts = [self.one(ODD_NAMES) if self.chance(5) else self.one(NAMES) for _ in range(depth)]
        return (b"/" if self.chance(10) else b"") + b"/".join(parts) + (b"/" if self.chance(6) else b"")

    def target(self):
        if self.chance(20):
            return self.one([b"/", b"/d/a", b"..", b"../b", b"/none", b"t" * 4095, b"t" * 300, b"m", b"l", b"", b"d/", b"a/"])
        return self.path()

    def fd(self):
        return self.random.randrange(FDS + 1)

    def size(self):
        if self.chance(4):
            # The largest file is larger on tmpfs.
            return self.one([-1, -(1 << 63)] + [(1 << 63) - 1] * (self.sides.which == "ext4"))
        return max(0, self.one(SIZES) + (self.one([-1, 0, 1, 7]) if self.chance(50) else 0))

    def mode(self):
        return self.one(MODES) & ~(stat.S_ISVTX if self.sides.kernel_guards_sticky else 0)

    def user(self):
        return self.one([UNCHANGED_ID, 0, 7001, 7002])

    def group(self):
        return self.one([UNCHANGED_ID, 0, 7001, 7002, 7010, STRANGE_GROUP])

    def open_flags(self):
        # Never to wait for the other end of a fifo.
        flags = os.O_NONBLOCK | self.random.choices([os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3], [35, 25, 38, 2])[0]
        for flag, percent in (
            (os.O_CREAT, 40), (os.O_EXCL, 15), (os.O_TRUNC, 20), (os.O_APPEND, 15), (os.O_DIRECTORY, 8),
            (os.O_NOFOLLOW, 10), (os.O_PATH, 5), (os.O_NOATIME, 2), (os.O_SYNC, 3),
        ):
            if self.chance(percent):
                flags |= flag
        return flags

    def xattr_name(self):
        return self.one([b"user.x", b"user.x", b"user.y", b"user.z", b"user.", b"user", b"trusted.x", b"security.x", b"system.x",
                         b"none.x", b"", b"user." + b"n" * 250, b"user." + b"n" * 251, ACL_ACCESS, ACL_ACCESS, ACL_DEFAULT])

    def xattr_value(self, name):
        if name in (ACL_ACCESS, ACL_DEFAULT) and self.chance(90):
            return self.acl()
        return self.one([b"", b"v", b"value", b"x" * 300])

    def acl(self):
        """An access control list, most of them valid."""
        perm = lambda: self.random.randrange(8)
        entries = [(1, perm(), UNCHANGED_ID), (4, perm(), UNCHANGED_ID), (32, perm(), UNCHANGED_ID)]
        if self.chance(60):
            entries.insert(1, (2, perm(), self.one([7001, 7002])))
            if self.chance(50):
                entries.insert(3, (8, perm(), self.one([7010, 7001])))
            if self.chance(90):
                entries.insert(-1, (16, perm(), UNCHANGED_ID))
        if self.chance(5):
            entries = entries[: self.random.randrange(3)]
        if self.chance(5):
            self.random.shuffle(entries)
        version = 2 if self.chance(97) else 1
        return struct.pack("<I", version) + b"".join(struct.pack("<HHI", *e) for e in entries)

    def times(self):
        def one():
            if self.chance(60):
                return (self.random.randrange(4), self.one([UTIME_NOW, UTIME_OMIT]))
            if self.chance(6):
                return (1, self.one([10**9, -1, 1 << 31]))
            return (self.one([0, 1, -1, 10**9, 4 * 10**9]), self.one([0, 1, 999_999_999, 500]))

        return None if self.chance(15) else (one(), one())

    def fallocate_mode(self):
        modes = [0, 0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, PUNCH_HOLE, COLLAPSE | KEEP_SIZE,
                 ZERO_RANGE | PUNCH_HOLE, NO_HIDE_STALE, 1 << 20]
        return self.one(modes + self.sides.fallocate_modes)

    def rename_flags(self):
        flags = [0, NOREPLACE, EXCHANGE, WHITEOUT, WHITEOUT | NOREPLACE, NOREPLACE | EXCHANGE, WHITEOUT | EXCHANGE, 1 << 10]
        return self.random.choices(flags, [54, 14, 20, 5, 2, 2, 1, 2])[0]

    def whence(self):
        return self.one([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE, 9])

    def draw(self):
        """The next call: its name and what it is called with."""
        name = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        if name == "identity":
            self.user_now = self.one([0, 0, 1, 2])
            return (name, self.user_now)
        if name in ("link", "name_tmpfile") and self.user_now and self.sides.kernel_guards_links:
            name = "symlink"
        return (name, *[getattr(self, kind)() for kind in KINDS[name]])


def setting(name):
    with open(f"/proc/sys/fs/protected_{name}", encoding="ascii") as file:
        return int(file.read())


class Sides:
    """What two sides have in common; `which` is the file system of the one that is compared with."""

    def __init__(self, which, library=False):
        self.which = which
        # tmpfs has no ZERO_RANGE; ext4 has COLLAPSE and INSERT, and we have not.
        self.fallocate_modes = [COLLAPSE, INSERT] if which == "tmpfs" else [ZERO_RANGE, ZERO_RANGE | KEEP_SIZE]
        # The library has no pwritev2 and no getdents64.
        self.lacks = {"append", "list_open"} if library else set()
        # Pipes and devices are only names to the library: it answers ENXIO, whatever the kernel makes of them.
        self.only_files = library
        # Protections that the kernel sets above all file systems stand in no library.
        self.kernel_guards_links = library and setting("hardlinks") != 0
        self.kernel_guards_sticky = library and any(map(setting, ("symlinks", "regular", "fifos")))


# What each call takes, by the methods of Calls.
KINDS = {
    "open": ("fd", "path", "open_flags", "mode"), "close": ("fd",),
    "pread": ("fd", "size", "size"), "pwrite": ("fd", "size", "size"), "read": ("fd", "size"), "write": ("fd", "size"),
    "append": ("fd", "size", "size"),
    "lseek": ("fd", "size", "whence"), "truncate": ("path", "size"), "ftruncate": ("fd", "size"),
    "fallocate": ("fd", "fallocate_mode", "size", "size"), "access": ("path", "access_mode"),
    "mkdir": ("path", "mode"), "rmdir": ("path",), "unlink": ("path",), "rename": ("path", "path", "rename_flags"),
    "link": ("path", "path"), "symlink": ("target", "path"), "readlink": ("path",), "mknod": ("path", "node_mode", "device"),
    "stat": ("path",), "lstat": ("path",), "fstat": ("fd",), "list": ("path",), "list_open": ("fd",),
    "chmod": ("path", "mode"), "fchmod": ("fd", "mode"), "chown": ("path", "user", "group"), "lchown": ("path", "user", "group"),
    "fchown": ("fd", "user", "group"), "utimens": ("path", "times", "time_flags"), "futimens": ("fd", "times"),
    "getxattr": ("path", "xattr_name", "room"), "lgetxattr": ("path", "xattr_name", "room"), "fgetxattr": ("fd", "xattr_name", "room"),
    "setxattr": ("path", "xattr", "xattr_flags"), "lsetxattr": ("path", "xattr", "xattr_flags"),
    "fsetxattr": ("fd", "xattr", "xattr_flags"), "removexattr": ("path", "xattr_name"), "lremovexattr": ("path", "xattr_name"),
    "fremovexattr": ("fd", "xattr_name"), "umask": ("mask",), "identity": (), "tmpfile": ("fd", "path", "mode"),
    "name_tmpfile": ("fd", "path"),
}
Calls.access_mode = lambda self: self.one([0, 1, 2, 4, 6, 7, 8])
Calls.node_mode = lambda self: self.one([stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, 0, stat.S_IFDIR, stat.S_IFLNK]) | self.mode()
Calls.device = lambda self: self.one([0, 0x103])
Calls.time_flags = lambda self: self.one([0, 0, AT_SYMLINK_NOFOLLOW])
Calls.room = lambda self: self.one([0, 1, 5, 1000])
Calls.xattr = lambda self: (lambda name: (name, self.xattr_value(name)))(self.xattr_name())
Calls.xattr_flags = lambda self: self.random.choices([0, 1, 2, 3, 8], [60, 15, 15, 5, 5])[0]
Calls.mask = lambda self: self.one([0, 0o022, 0o077, 0o777])
# How often each call is drawn.
WEIGHTS = {name: 4 for name in KINDS} | {
    "open": 22, "pwrite": 10, "write": 6, "rename": 16, "mkdir": 10, "rmdir": 8, "unlink": 8, "link": 8, "symlink": 8,
    "chmod": 8, "chown": 7, "identity": 5, "umask": 1, "fallocate": 7, "close": 3, "stat": 2, "lstat": 2, "setxattr": 7,
}

# ----------------------------------------------------------------------------------------------------
# Running them

LIBC = ctypes.CDLL(None, use_errno=True)
LONG = ctypes.c_long


class Timespec(ctypes.Structure):
    _fields_ = [("sec", LONG), ("nsec", LONG)]


def data(length, seed):
    """Bytes to write that say which call wrote them."""
    return (bytes((seed * 37 + i) % 251 + 1 for i in range(64)) * (length // 64 + 1))[:length]


class System:
    """One side: answers calls with (value, errno name, more)."""

    # Reads and writes of more than this are made of this much.
    BYTES_MAX = 80_000

    def __init__(self):
        self.fds = [CLOSED] * (FDS + 1)
        self.buffer = ctypes.create_string_buffer(self.BYTES_MAX)
        self.number = 0

    def call(self, name, *arguments):
        """One function; the result and errno, None where it succeeded."""
        raise NotImplementedError

    def run(self, number, name, *arguments):
        self.number = number
        return getattr(self, "do_" + name, lambda *a: self.plain(name, *a))(*arguments)

    def plain(self, name, *arguments):
        return self.call(name, *arguments)

    def size(self, n):
        return LONG(n)

    def do_open(self, slot, path, flags, mode):
        result, failure = self.call("open", path, flags, mode)
        return self.keep(slot, result, failure)

    def keep(self, slot, result, failure):
        """A descriptor goes to its slot; its number is nobody's business. The last slot stays closed."""
        if failure is None:
            if slot == FDS:
                self.call("close", result)
            else:
                if self.fds[slot] != CLOSED:
                    self.call("close", self.fds[slot])
                self.fds[slot] = result
            result = "fd"
        return result, failure

    def do_tmpfile(self, slot, path, mode):
        result, failure = self.call("open", path, os.O_TMPFILE | os.O_RDWR, mode)
        return self.keep(slot, result, failure)

    def do_name_tmpfile(self, slot, path):
        return self.call("flink", self.fds[slot], path)

    def do_close(self, slot):
        fd, self.fds[slot] = self.fds[slot], CLOSED
        return self.call("close", fd)

    def count(self, n):
        return max(0, min(n, self.BYTES_MAX))

    def read_back(self, result, failure):
        return result, failure, self.buffer.raw[:result] if failure is None else None

    def do_pread(self, slot, n, at):
        return self.read_back(*self.call("pread", self.fds[slot], self.buffer, LONG(self.count(n)), LONG(at)))

    def do_read(self, slot, n):
        return self.read_back(*self.call("read", self.fds[slot], self.buffer, LONG(self.count(n))))

    def do_pwrite(self, slot, n, at):
        n = self.count(n)
        return self.call("pwrite", self.fds[slot], data(n, self.number), LONG(n), LONG(at))

    def do_write(self, slot, n):
        n = self.count(n)
        return self.call("write", self.fds[slot], data(n, self.number), LONG(n))

    def do_lseek(self, slot, at, whence):
        if whence != os.SEEK_SET and self.is_directory(self.fds[slot]):
            return None, None  # each file system counts in its own way
        return self.call("lseek", self.fds[slot], LONG(at), whence)

    def is_directory(self, fd):
        buffer = ctypes.create_string_buffer(STAT_BYTES)
        _, failure = self.call("fstat", fd, buffer)
        return failure is None and stat.S_ISDIR(describe(buffer)[0])

    def do_truncate(self, path, n):
        return self.call("truncate", path, LONG(n))

    def do_ftruncate(self, slot, n):
        return self.call("ftruncate", self.fds[slot], LONG(n))

    def do_fallocate(self, slot, mode, at, n):
        return self.call("fallocate", self.fds[slot], mode, LONG(at), LONG(n))

    def do_readlink(self, path):
        return self.read_back(*self.call("readlink", path, self.buffer, LONG(5000)))

    def looked(self, result, failure, buffer):
        return (None, failure) if failure else (describe(buffer), None)

    def do_stat(self, path, name="stat"):
        buffer = ctypes.create_string_buffer(STAT_BYTES)
        return self.looked(*self.call(name, path, buffer), buffer)

    def do_lstat(self, path):
        return self.do_stat(path, "lstat")

    def do_fstat(self, slot):
        return self.do_stat(self.fds[slot], "fstat")

    def do_list(self, path):
        return self.names(path)

    def do_list_open(self, slot):
        return self.names_open(self.fds[slot])

    def do_fchmod(self, slot, mode):
        return self.call("fchmod", self.fds[slot], mode)

    def do_fchown(self, slot, uid, gid):
        return self.call("fchown", self.fds[slot], ctypes.c_uint(uid), ctypes.c_uint(gid))

    def do_chown(self, path, uid, gid):
        return self.call("chown", path, ctypes.c_uint(uid), ctypes.c_uint(gid))

    def do_lchown(self, path, uid, gid):
        return self.call("lchown", path, ctypes.c_uint(uid), ctypes.c_uint(gid))

    def timespecs(self, times):
        return times and (Timespec * 2)(*times)

    def do_utimens(self, path, times, flags):
        return self.call("utimens", path, self.timespecs(times), flags)

    def do_futimens(self, slot, times):
        return self.call("futimens", self.fds[slot], self.timespecs(times))

    def get(self, name, where, attribute, room):
        return self.read_back(*self.call(name, where, attribute, self.buffer if room else None, LONG(room))) if room else \
            self.call(name, where, attribute, None, LONG(0))

    def do_getxattr(self, path, name, room):
        return self.get("getxattr", path, name, room)

    def do_lgetxattr(self, path, name, room):
        return self.get("lgetxattr", path, name, room)

    def do_fgetxattr(self, slot, name, room):
        return self.get("fgetxattr", self.fds[slot], name, room)

    def do_setxattr(self, path, pair, flags, name="setxattr"):
        return self.call(name, path, pair[0], pair[1], LONG(len(pair[1])), flags)

    def do_lsetxattr(self, path, pair, flags):
        return self.do_setxattr(path, pair, flags, "lsetxattr")

    def do_fsetxattr(self, slot, pair, flags):
        return self.do_setxattr(self.fds[slot], pair, flags, "fsetxattr")

    def do_fremovexattr(self, slot, name):
        return self.call("fremovexattr", self.fds[slot], name)

    def do_identity(self, who):
        for slot in range(FDS):
            if self.fds[slot] != CLOSED:
                self.do_close(slot)
        self.become(who)
        return None, None

    def attributes(self, path):
        """Extended attributes of what a path names, links not followed."""
        length, failure = self.call("llistxattr", path, self.buffer, LONG(self.BYTES_MAX))
        if failure:
            return failure
        found = []
        for name in sorted(self.buffer.raw[:length].split(b"\0")[:-1]):
            if not name.startswith((b"user.", b"trusted.", b"security.x", b"system.")):
                continue
            length, failure = self.call("lgetxattr", path, name, self.buffer, LONG(self.BYTES_MAX))
            found.append((name, failure or self.buffer.raw[:length]))
        return found

    def look_around(self, attributes):
        """Everything that this user can see: by path, what it is, and its raw times."""
        found, times, pending = {}, {}, [b"."]
        while pending:
            path = pending.pop()
            buffer = ctypes.create_string_buffer(STAT_BYTES)
            _, failure = self.call("lstat", path, buffer)
            if failure:
                found[path] = failure
                continue
            says = describe(buffer)
            times[path] = raw_times(buffer)
            kind = stat.S_IFMT(says[0])
            if kind == stat.S_IFLNK:
                length, failure = self.call("readlink", path, self.buffer, LONG(5000))
                says += (failure or self.buffer.raw[:length],)
            elif attributes:
                says += (self.attributes(path),)
            if kind == stat.S_IFDIR:
                names, failure = self.names(path)
                says += (failure or names,)
                pending += [os.path.join(path, name) for name in names or ()]
            found[path] = says
        return found, times

    def contents(self):
        """The bytes of every regular file, or why they cannot be read."""
        found = {}
        for path, says in self.look_around(False)[0].items():
            if isinstance(says, tuple) and stat.S_ISREG(says[0]):
                fd, failure = self.call("open", path, os.O_RDONLY, 0)
                if failure:
                    found[path] = failure
                    continue
                result, failure = self.call("read", fd, self.buffer, LONG(self.BYTES_MAX))
                found[path] = failure or self.buffer.raw[:result]
                self.call("close", fd)
        return found


def describe(buffer):
    """Mode, links, owner, device, and, but of directories, the size; times that a call set exactly."""
    _, _, links, mode, uid, gid, _, rdev, size = struct.unpack_from("<QQQIIIIQq", buffer.raw)
    is_dir = stat.S_ISDIR(mode)
    return (mode, links, uid, gid, rdev if stat.S_ISCHR(mode) else 0, None if is_dir else size)


def raw_times(buffer):
    """The number of the inode, times of modification and of change; access time where it is far from now."""
    ino = struct.unpack_from("<Q", buffer.raw, 8)[0]
    access, modified, changed = [struct.unpack_from("<qq", buffer.raw, at) for at in (72, 88, 104)]
    return ino, access, modified, changed


class Kernel(System):
    """Calls of this process, which has `root` as its root directory."""

    def __init__(self, root, sides):
        super().__init__()
        self.only_files = sides.only_files
        os.umask(0o022)
        os.chroot(root)
        os.chdir("/")

    def call(self, name, *arguments):
        return self.libc(*RENAMED.get(name, lambda *a: (name, *a))(*arguments))

    def libc(self, name, *arguments):
        ctypes.set_errno(0)
        function = getattr(LIBC, name)
        function.restype = LONG if name in LONGS else ctypes.c_int
        result = function(*arguments)
        if result == -1:
            return None, errno.errorcode[ctypes.get_errno()]
        return result, None

    def keep(self, slot, result, failure):
        if self.only_files and failure is None and stat.S_IFMT(os.fstat(result).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            if not fcntl.fcntl(result, fcntl.F_GETFL) & os.O_PATH:
                os.close(result)
                result, failure = None, "ENXIO"
        return super().keep(slot, result, failure)

    def do_append(self, slot, n, at):
        n = self.count(n)
        source = ctypes.create_string_buffer(data(n, self.number))
        vector = struct.pack("<QQ", ctypes.addressof(source), n)
        return self.libc("pwritev2", self.fds[slot], vector, 1, LONG(at), RWF_APPEND)

    def names(self, path):
        try:
            return sorted(os.listdir(path)), None
        except OSError as error:
            return None, errno.errorcode[error.errno]

    def names_open(self, fd):
        # By the call itself: listdir would duplicate the descriptor and begin again.
        found = []
        result, failure = self.libc("lseek", fd, LONG(0), os.SEEK_SET)
        while failure is None:
            result, failure = self.libc("getdents64", fd, self.buffer, LONG(self.BYTES_MAX))
            if failure or result == 0:
                break
            raw, at = self.buffer.raw[:result], 0
            while at < result:
                length = struct.unpack_from("<H", raw, at + 16)[0]
                found.append(raw[at + 19 : at + length].split(b"\0")[0])
                at += length
        return (None, failure) if failure else (sorted(found), None)

    def become(self, who):
        uid, gid, groups = IDENTITIES[who]
        os.seteuid(0)
        os.setgroups(groups)
        os.setegid(gid)
        os.seteuid(uid)

    def end(self):
        pass


LONGS = {"pread", "pwrite", "read", "write", "lseek", "readlink", "getxattr", "lgetxattr", "fgetxattr", "listxattr",
         "llistxattr", "flistxattr", "pwritev2", "getdents64"}
RENAMED = {
    "rename": lambda a, b, flags: ("renameat2", AT_FDCWD, a, AT_FDCWD, b, flags),
    "access": lambda path, mode: ("faccessat", AT_FDCWD, path, mode, AT_EACCESS),
    "utimens": lambda path, times, flags: ("utimensat", AT_FDCWD, path, times, flags),
    "flink": lambda fd, path: ("linkat", fd, b"", AT_FDCWD, path, AT_EMPTY_PATH),
}


class Library(System):
    """Calls of liblodestone.so on a pool; who calls is decided when the pool is opened."""

    def __init__(self, library, pool):
        super().__init__()
        self.library = ctypes.CDLL(library, use_errno=True)
        self.library.lode_open_pool.restype = ctypes.c_void_p
        self.library.lode_opendir.restype = ctypes.c_void_p
        self.library.lode_readdir.restype = ctypes.c_void_p
        self.pool_path = pool
        self.pool = None
        self.mask = 0o022
        self.become(0)

    def become(self, who):
        if self.pool:
            self.library.lode_close_pool(self.pool)
        os.seteuid(0)
        uid, gid, groups = IDENTITIES[who]
        os.setgroups(groups)
        os.setegid(gid)
        os.seteuid(uid)
        options = b"umask=%o" % self.mask
        pool = self.library.lode_open_pool(self.pool_path, options)
        assert pool, os.strerror(ctypes.get_errno())
        self.pool = ctypes.c_void_p(pool)

    def call(self, name, *arguments):
        ctypes.set_errno(0)
        function = getattr(self.library, "lode_" + name)
        if name not in ("opendir", "readdir"):
            function.restype = LONG if name in LONGS else ctypes.c_int
        result = function(self.pool, *arguments)
        if result == -1 or name == "opendir" and result is None:
            return None, errno.errorcode[ctypes.get_errno()]
        return result, None

    def do_umask(self, mask):
        self.mask = mask
        return self.call("umask", mask)

    def names(self, path):
        stream, failure = self.call("opendir", path)
        if failure:
            return None, failure
        stream = ctypes.c_void_p(stream)
        found = []
        while True:
            entry, failure = self.call("readdir", stream)
            if not entry:
                break
            found.append(ctypes.string_at(entry + 19))
        self.call("closedir", stream)
        return sorted(name for name in found if name not in (b".", b"..")), None

    def end(self):
        self.library.lode_close_pool(self.pool)
        self.pool = None


PREPARATION = [
    ("mkdir", b"d", 0o755), ("mkdir", b"d/g", 0o777), ("mkdir", b"e", 0o1777), ("open", 0, b"a", os.O_CREAT | os.O_RDWR, 0o644),
    ("pwrite", 0, 10000, 0), ("open", 1, b"d/a", os.O_CREAT | os.O_RDWR, 0o6777), ("pwrite", 1, 100, 9000), ("symlink", b"d", b"l"),
    ("chmod", b"d", 0o777), ("chmod", b"e", 0o1777), ("chmod", b".", 0o777), ("chmod", b"d/a", 0o6777),
    ("chown", b"d/g", 7001, 7010), ("chmod", b"d/g", 0o2775), ("symlink", b"../a", b"d/l"), ("link", b"a", b"e/b"),
]


def calls_of(seed, sides):
    calls = Calls(seed, sides)
    return PREPARATION + [calls.draw() for _ in range(CALLS)]


def perform(system, calls, timed):
    """The answers and what they left, call by call."""
    said = []
    _, before = system.look_around(False)
    for number, call in enumerate(calls):
        if timed:
            tick()
        answer = system.run(number, *call)
        found, times = system.look_around(True)
        said.append((answer, found, changed(before, times, call[0] in SETS_TIMES) if timed else None))
        before = times
    said.append((None, system.contents(), None))
    system.end()
    return said


def tick():
    """Waits for the next tick of the clock that times are taken from."""
    begun = time.clock_gettime(CLOCK_REALTIME_COARSE)
    while time.clock_gettime(CLOCK_REALTIME_COARSE) == begun:
        time.sleep(0.0005)


def changed(before, after, sets):
    """By path, which times of an inode that was and is there changed, and those that a call set far from now.
    The access time only of what the call `sets`: who renews it when is each file system's own."""
    known = {times[0]: times for times in before.values()}
    told = {}
    for path, times in after.items():
        old = known.get(times[0])
        access = times[1] if sets and old and old[3] != times[3] and abs(times[1][0] - time.time()) > 10**7 else None
        modified = times[2] if abs(times[2][0] - time.time()) > 10**7 else None
        told[path] = (old and (old[2] != times[2], old[3] != times[3]), access, modified)
    return told


def side(make, calls, timed):
    """Runs one side in a child process; what it said, or its failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = perform(make(), calls, timed)
        except BaseException:
            said = traceback.format_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(said, pipe)
        os._exit(0)
    os.close(writer)
    return child, reader


def gather(child, reader):
    with os.fdopen(reader, "rb") as pipe:
        said = pickle.load(pipe)
    os.waitpid(child, 0)
    assert not isinstance(said, str), said
    return said


# ----------------------------------------------------------------------------------------------------
# What differs

EXCEPTIONS = [
    (
        "FUSE does not say of a chown(-1, -1) what it is: where it is EPERM our mount answers 0 and changes nothing",
        lambda sides, call, our, their: not sides.only_files and "chown" in call[0] and call[2:] == (UNCHANGED_ID, UNCHANGED_ID)
        and (our[0], their[0]) == ((0, None), (None, "EPERM")) and our[1:] == their[1:],
    ),
    (
        "tmpfs leaves the times where truncate(2) gives a file without blocks the size it has; ext4 and we do not",
        lambda sides, call, our, their: sides.which == "tmpfs" and call[0] == "truncate" and our[:2] == their[:2],
    ),
    (
        "ext4 leaves the time of change where an extended attribute is set to the value it has; tmpfs and we do not",
        lambda sides, call, our, their: sides.which == "ext4" and call[0].endswith("setxattr") and our[:2] == their[:2],
    ),
    (
        "ext4 ends a directory's listing so far behind that no read can begin there: EINVAL, before it is EISDIR as elsewhere",
        lambda sides, call, our, their: sides.which == "ext4" and call[0] == "read"
        and (our[0][1], their[0][1]) == ("EISDIR", "EINVAL") and our[1:] == their[1:],
    ),
    (
        "ext4 takes for data what is reserved and lies in a piece of the page cache that also has data (Linux 6.16)",
        lambda sides, call, our, their: sides.which == "ext4" and call[0] == "lseek" and call[3] in (os.SEEK_DATA, os.SEEK_HOLE)
        and our[0][1] in (None, "ENXIO") and their[0][0] is not None and our[1:] == their[1:]
        and (their[0][0] < behind(our[0]) if call[3] == os.SEEK_DATA else their[0][0] > behind(our[0])),
    ),
    (
        "the kernel refuses access mode 3 of pipes, and O_CREAT of others' devices in sticky directories; to the library they are names",
        lambda sides, call, our, their: sides.only_files and call[0] == "open" and our[1:] == their[1:] and our[0] == (None, "ENXIO")
        and (their[0][1] == "EINVAL" and call[3] & os.O_ACCMODE == os.O_ACCMODE or their[0][1] == "EACCES" and call[3] & os.O_CREAT),
    ),
    (
        "ext4 makes a whiteout before it refuses the rename, which leaves times behind; tmpfs and we do not",
        lambda sides, call, our, their: sides.which == "ext4" and call[0] == "rename" and call[3] & WHITEOUT
        and our[0] == their[0] and our[0][1] is not None and our[1] == their[1],
    ),
    (
        "tmpfs renews the time of change where a list is removed that is not there; ext4 and we do not",
        lambda sides, call, our, their: sides.which == "tmpfs" and takes_a_list(call) and our[:2] == their[:2],
    ),
    (
        "the kernel knows no largest file of a FUSE server: on the mount a position may lie behind it; to the library it is EINVAL, as to ext4",
        lambda sides, call, our, their: sides.which == "ext4" and not sides.only_files and call[0] == "lseek"
        and their[0] == (None, "EINVAL") and our[0][1] is None and our[0][0] > FILE_BYTES_MAX and our[1:] == their[1:],
    ),
    (
        "FUSE is not asked for what begins at the end of the file: a read of it leaves the access time, which a call that omits it shows",
        lambda sides, call, our, their: not sides.only_files and call[0] in SETS_TIMES and call[2] and call[2][0][1] == UTIME_OMIT
        and our[:2] == their[:2] and all(is_read_later(our[2][path], times) for path, times in their[2].items()),
    ),
]


def behind(answer):
    """Where `lseek` found what it looked for; behind everything where there is no more of it."""
    return float("inf") if answer[1] == "ENXIO" else answer[0]


def is_read_later(our, their):
    """Whether times differ in nothing but that theirs say it was read a moment ago."""
    return our == their or our and their and (our[0], our[2]) == (their[0], their[2]) and their[1] is None


def takes_a_list(call):
    """Whether it removes an access control list, by one call or the other."""
    name, value = call[-2] if isinstance(call[-2], tuple) else (call[-1], b"")
    return "xattr" in call[0] and name in (ACL_ACCESS, ACL_DEFAULT) and len(value) <= 4


def compare(calls, ours, theirs, sides):
    """The first difference that no exception covers, for people."""
    for number, (our, their) in enumerate(zip(ours, theirs)):
        call = calls[number] if number < len(calls) else ("contents",)
        if our == their:
            continue
        reason = next((why for why, fits in EXCEPTIONS if fits(sides, call, our, their)), None)
        if reason is None:
            return number, explain(call, our, their)
        # From here on they are not the same, or stand at other positions.
        if our[1] != their[1] or call[0] == "lseek":
            return None
    return None


def explain(call, ours, theirs):
    lines = []
    if ours[0] != theirs[0]:
        lines.append(f"{short(call)} answered {short(ours[0])}, but {short(theirs[0])} was due")
    else:
        lines.append(f"{short(call)} answered {short(ours[0])}")
    for part, what in ((1, ""), (2, "times ")):
        our, their = ours[part] or {}, theirs[part] or {}
        for path in sorted(our.keys() | their.keys()):
            if our.get(path) != their.get(path):
                lines.append(f"  {what}{path}: {short(our.get(path))}, but {short(their.get(path))} was due")
    return "\n".join(lines)


def short(value):
    """A value without long runs of bytes."""
    if isinstance(value, bytes) and len(value) > 60:
        return f"{value[:30]!r}...({len(value)})"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(short(v) for v in value) + ")"
    if isinstance(value, int) and value > 0o100:
        return f"{value}={value:#o}"
    return repr(value)


def run_rounds(context, rounds):
    """`rounds` yields a seed, how to make our side, how to make the other, and what they have in common.
    A busy machine runs fewer of them."""
    done, begun = 0, time.monotonic()
    for seed, ours, theirs, sides in rounds:
        if time.monotonic() - begun > SECONDS and done >= ROUNDS_MIN:
            break
        calls = calls_of(seed, sides)
        timed = seed % 4 == 0
        running = [side(make, calls, timed) for make in (ours, theirs)]
        said = [gather(*one) for one in running]
        found = compare(calls, *said, sides)
        done += 1
        if found:
            number, text = found
            history = "\n".join(f"{i:4} {short(c)} -> {short(said[0][i][0])}" for i, c in enumerate(calls[: number + 1]))
            context.say(f"round {seed} on {sides.which}:\n{history}\n{text}")
            raise AssertionError(f"round {seed}, call {number}, against {sides.which}: {text}")
    context.note = f"{done} rounds of {CALLS} calls"


@contextlib.contextmanager
def references(context):
    """The kernel's own file systems that can be had here."""
    mounted = {}
    try:
        for name, command in (
            ("tmpfs", ["mount", "-t", "tmpfs", "none"]),
            ("ext4", ["mount", "-o", "loop", context.outside("reference.img")]),
        ):
            if name == "ext4":
                with open(context.outside("reference.img"), "wb") as image:
                    image.truncate(256 << 20)
                made = subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", context.outside("reference.img")], check=False).returncode
                if made != 0:
                    continue
            directory = context.outside(name)
            os.mkdir(directory)
            if subprocess.run([*command, directory], check=False, stderr=context.log).returncode == 0:
                mounted[name] = directory
        yield mounted
    finally:
        for directory in mounted.values():
            context.run("umount", directory)


def in_fresh(directory, seed):
    path = os.path.join(directory, f"round{seed}")
    os.mkdir(path)
    return path


def system_calls(context):
    """Random system calls on the mount and on tmpfs and ext4: the same answers, the same files"""
    with references(context) as mounted:
        run_rounds(context, rounds_on(context, mounted, lambda seed, sides: on_the_mount(context, seed, sides)))


def on_the_mount(context, seed, sides):
    ours = in_fresh(context.dir, seed)
    return lambda: Kernel(ours, sides)


def rounds_on(context, mounted, ours, library=False):
    """The rounds of a suite, on the file systems of the kernel in turns."""
    # One of the kernel's own is compared with itself alone: the exceptions are ours.
    names = [context.target.name] if context.target.name in mounted else sorted(mounted)
    for i in range(ROUNDS):
        seed = context.seed * ROUNDS + i
        which = names[i % len(names)]
        sides = Sides(which, library)
        theirs = in_fresh(mounted[which], seed)
        yield seed, ours(seed, sides), lambda root=theirs, sides=sides: Kernel(root, sides), sides


def library_calls(context):
    """The same calls on a pool through liblodestone.so and on tmpfs and ext4"""
    library = os.path.join(os.path.dirname(context.target.binary), "liblodestone.so")
    if not os.path.exists(library):
        raise Skip(f"{library} is not built (make library)")
    pools = context.outside("pools")
    os.mkdir(pools)
    os.chmod(pools, 0o777)

    def in_a_pool(seed, sides):
        pool = os.fsencode(os.path.join(pools, f"{seed}.pool"))
        made = ctypes.CDLL(library, use_errno=True).lode_mkfs(pool, ctypes.c_uint64(POOL_BYTES), None)
        assert made == 0, f"{pool}: {os.strerror(ctypes.get_errno())}"
        os.chmod(pool, 0o666)
        return lambda: Library(library, pool)

    with references(context) as mounted:
        # Pools in memory: who syncs what is no question here.
        context.run("mount", "-t", "tmpfs", "none", pools)
        os.chmod(pools, 0o777)
        try:
            run_rounds(context, rounds_on(context, mounted, in_a_pool, library=True))
        finally:
            context.run("umount", pools)


SUITES = [system_calls, library_calls]
