"""POSIX itself: the two public conformance tests, and the calls that programs make but those do not.

Calls that Python does not wrap go through ctypes to the C library, so that what is tested is what a
program would run.
"""

import ctypes
import errno
import functools
import mmap
import os
import re
import socket
import stat
import struct
import subprocess
import threading
import time

from target import Skip, mount_option

LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 1, 2, 16
PAGE = 4096


def libc(name, *arguments):
    """One call of the C library; -1 raises OSError with its errno."""
    result = getattr(LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def fails_with(number, call, *arguments, **keywords):
    """`call` must fail, and with exactly this errno."""
    try:
        call(*arguments, **keywords)
    except OSError as error:
        assert error.errno == number, f"{call.__name__}: {error}, but {errno.errorcode[number]} was due"
        return
    raise AssertionError(f"{call.__name__} succeeded, but {errno.errorcode[number]} was due")


def write_file(path, data):
    with open(path, "wb") as file:
        file.write(data)


def read_file(path):
    with open(path, "rb") as file:
        return file.read()


@functools.cache
def pattern(length):
    """Bytes without a period that a block or page size would hide."""
    return bytes((i * 131 + (i >> 8) * 7 + 1) & 0xFF for i in range(length))


PJDFSTEST = """
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
stat_st_birthtime = {{}}
utime_now = {{}}
utimensat = {{}}
secondary_fs = "{second}"
[settings]
naptime = 0.02
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"""


def pjdfstest(context):
    """pjdfstest 0.2.2, every test that Linux has, as root"""
    program = context.tool("pjdfstest")
    second = context.outside("second")
    os.mkdir(second)
    config = context.outside("pjdfstest.toml")
    write_file(config, PJDFSTEST.format(second=second).encode())
    context.run("mount", "-t", "tmpfs", "none", second)
    try:
        done = subprocess.run(
            [program, "-c", config, "-p", context.dir], env=context.env | {"NO_COLOR": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True, errors="replace",
        )
    finally:
        context.run("umount", second)
    context.say(done.stdout)
    failed = re.findall(r"^(\S+)\s+FAILED$", done.stdout, re.MULTILINE)
    assert not failed, f"{len(failed)} failed: {', '.join(failed)}"
    summary = re.search(r"(\d+) failed, (\d+) skipped, (\d+) passed", done.stdout)
    assert done.returncode == 0 and summary, f"pjdfstest ended with status {done.returncode}, no summary"
    passed, skipped = int(summary[3]), int(summary[2])
    # 384 of 398 pass on tmpfs; the others remount the file system or need a limit on links.
    assert passed >= 384, f"only {passed} tests ran"
    context.note = f"{passed} passed, {skipped} skipped by pjdfstest (remounts)"


def fsx(context):
    """fsx 0.3.2, 4 seeds x 50,000 operations, mmap included, all four at once"""
    program = context.tool("fsx")
    config = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fsx.toml")
    running = {}
    for seed in range(4 * context.seed + 1, 4 * context.seed + 5):
        command = [program, "-f", config, "-N", "50000", "-S", str(seed), "-P", context.work, context.path(f"f{seed}")]
        context.say("+", *command, "&")
        running[seed] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for seed, process in running.items():
        output = process.communicate()[0]
        context.say(f"seed {seed}, status {process.returncode}:\n{output}")
        assert process.returncode == 0 and "A-OK" in output, f"seed {seed}: {output.splitlines()[-1:]}"


fsx.seconds_max = 600


def statvfs(context):
    """statvfs and statfs: sizes, names, and what a file takes"""
    before = os.statvfs(context.dir)
    size = before.f_blocks * before.f_frsize
    assert 0.8 * (context.target.mib << 20) <= size <= context.target.mib << 20, f"{size} bytes"
    assert before.f_namemax == 255
    assert 0 < before.f_bavail <= before.f_bfree <= before.f_blocks
    write_file(context.path("f"), bytes(8 << 20))
    with open(context.path("f"), "rb") as file:
        os.fsync(file.fileno())
    taken = (before.f_bfree - os.statvfs(context.dir).f_bfree) * before.f_frsize
    assert 8 << 20 <= taken <= 9 << 20, f"8 MiB written, {taken} bytes taken"
    assert os.stat(context.path("f")).st_blocks * 512 >= 8 << 20


def sendfile(context):
    """sendfile from the mount to a socket, a file on it and one outside"""
    data = pattern(3 * PAGE + 77)
    write_file(context.path("from"), data)
    with open(context.path("from"), "rb") as source:
        for to in (context.path("to"), context.outside("to")):
            with open(to, "wb") as out:
                assert os.sendfile(out.fileno(), source.fileno(), 0, len(data)) == len(data)
            assert read_file(to) == data
        left, right = socket.socketpair()
        with left, right:
            assert os.sendfile(left.fileno(), source.fileno(), 5, 1000) == 1000
            assert right.recv(1000, socket.MSG_WAITALL) == data[5:1005]


def copy_file_range(context):
    """copy_file_range between two files and within one, splice to a pipe"""
    data = pattern(40 * PAGE + 9)
    write_file(context.path("from"), data)
    write_file(context.path("to"), b"")
    os.utime(context.path("from"), (1, 2))
    assert os.stat(context.path("from")).st_atime == 1
    with open(context.path("from"), "rb") as source, open(context.path("to"), "r+b") as out:
        done = 0
        while done < len(data):
            done += os.copy_file_range(source.fileno(), out.fileno(), len(data) - done, done, done)
        assert os.stat(context.path("from")).st_atime > 1, "it was read"
        reader, writer = os.pipe()
        assert os.splice(source.fileno(), writer, 1000, offset_src=PAGE - 10) == 1000
        assert os.read(reader, 2000) == data[PAGE - 10 : PAGE + 990]
        os.close(reader)
        os.close(writer)
    assert read_file(context.path("to")) == data
    with open(context.path("to"), "r+b") as file:
        assert os.copy_file_range(file.fileno(), file.fileno(), PAGE, 3, 20 * PAGE) == PAGE
    assert read_file(context.path("to"))[20 * PAGE : 21 * PAGE] == data[3 : PAGE + 3]


def memory_map(context):
    """mmap, shared and private, and what read and write see of it"""
    path = context.path("f")
    write_file(path, pattern(4 * PAGE + 100))
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as shared, mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as private:
        assert shared[:] == pattern(4 * PAGE + 100)
        shared[PAGE - 2 : PAGE + 2] = b"edge"
        assert os.pread(fd, 4, PAGE - 2) == b"edge"
        os.pwrite(fd, b"file", 2 * PAGE)
        assert shared[2 * PAGE : 2 * PAGE + 4] == b"file"
        private[0:4] = b"mine"
        assert os.pread(fd, 4, 0) == pattern(4)
        shared.flush()
    os.close(fd)
    data = read_file(path)
    assert data[PAGE - 2 : PAGE + 2] == b"edge" and len(data) == 4 * PAGE + 100


def stores_before_an_end(context):
    """What was stored through mappings outlives SIGTERM to the server, though the files are in use"""
    FILES = 8
    BYTES = 1 << 20
    files = []
    for n in range(FILES):
        fd = os.open(context.path(f"f{n}"), os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, BYTES)
        files.append((fd, mmap.mmap(fd, BYTES)))
    for _, mapped in files:
        mapped[:] = pattern(BYTES)
    # Not what was stored a moment ago alone.
    time.sleep(1)
    context.target.stop()
    seen = time.monotonic()
    while os.path.ismount(context.dir):
        seen = time.monotonic()
        assert context.target.server.poll() is None, "the server ended before its mount"
        time.sleep(0.01)
    # Out of sight, and its users are not cut off yet.
    files[0][1][:5] = b"later"
    in_time = time.monotonic() - seen < 0.5
    context.target.stopped()
    for fd, mapped in files:
        mapped.close()
        fails_with(errno.ENOTCONN, os.close, fd)
    context.target.mount()
    for n in range(FILES):
        found = read_file(context.path(f"f{n}"))
        assert found[5:] == pattern(BYTES)[5:], f"f{n} lost what was stored before the signal"
    if in_time:
        assert read_file(context.path("f0"))[:5] == b"later", "what was stored out of sight is lost"


def tmpfile(context):
    """O_TMPFILE, and linkat that gives the file a name"""
    try:
        fd = os.open(context.dir, os.O_TMPFILE | os.O_RDWR, 0o640)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP and context.target.name == "bindfs":
            raise Skip(f"bindfs offers no O_TMPFILE ({error.strerror})") from None
        raise
    os.write(fd, b"nameless")
    assert os.fstat(fd).st_nlink == 0 and os.listdir(context.dir) == []
    libc("linkat", AT_FDCWD, f"/proc/self/fd/{fd}".encode(), AT_FDCWD, os.fsencode(context.path("named")), AT_SYMLINK_FOLLOW)
    os.close(fd)
    assert read_file(context.path("named")) == b"nameless"
    assert os.stat(context.path("named")).st_nlink == 1
    os.close(os.open(context.dir, os.O_TMPFILE | os.O_RDWR))


def unlinked_open(context):
    """A file without a name lives as long as it is open"""
    fd = os.open(context.path("f"), os.O_RDWR | os.O_CREAT)
    os.write(fd, pattern(PAGE))
    os.unlink(context.path("f"))
    assert os.fstat(fd).st_nlink == 0
    os.pwrite(fd, b"more", PAGE)
    os.ftruncate(fd, 2 * PAGE)
    assert os.pread(fd, 3 * PAGE, 0) == pattern(PAGE) + b"more" + bytes(PAGE - 4)
    os.mkdir(context.path("d"))
    directory = os.open(context.path("d"), os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(context.path("d"))
    fails_with(errno.ENOENT, os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=directory)
    os.close(directory)
    os.close(fd)


def fallocate(context):
    """posix_fallocate, keep size, punch, zero range"""
    fd = os.open(context.path("f"), os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 10 * PAGE)
    assert os.fstat(fd).st_size == 10 * PAGE and os.fstat(fd).st_blocks * 512 >= 10 * PAGE
    assert os.pread(fd, 10 * PAGE, 0) == bytes(10 * PAGE)
    os.pwrite(fd, pattern(10 * PAGE), 0)
    changed = bytearray(pattern(10 * PAGE))
    extent = lambda mode, at, length: libc("fallocate", fd, mode, ctypes.c_long(at), ctypes.c_long(length))
    extent(FALLOC_KEEP_SIZE, 10 * PAGE, 10 * PAGE)
    assert os.fstat(fd).st_size == 10 * PAGE
    before = os.fstat(fd).st_blocks
    extent(FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, PAGE + 100, 3 * PAGE)
    changed[PAGE + 100 : 4 * PAGE + 100] = bytes(3 * PAGE)
    assert os.pread(fd, 10 * PAGE, 0) == changed, "punch hole left or took other bytes"
    assert os.fstat(fd).st_blocks < before, "punch hole gave no block back"
    zero_range(fd, extent, changed)
    fails_with(errno.EINVAL, extent, 0, 0, 0)
    os.close(fd)


def zero_range(fd, extent, changed):
    """FALLOC_FL_ZERO_RANGE, or the clear EOPNOTSUPP that tmpfs answers."""
    try:
        extent(FALLOC_ZERO_RANGE, 6 * PAGE - 5, PAGE)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP, error
        return
    changed[6 * PAGE - 5 : 7 * PAGE - 5] = bytes(PAGE)
    assert os.pread(fd, 10 * PAGE, 0) == changed, "zero range left or took other bytes"


def seek_hole(context):
    """SEEK_DATA and SEEK_HOLE on a sparse file of 1 TiB"""
    fd = os.open(context.path("f"), os.O_RDWR | os.O_CREAT)
    far = 1 << 39
    os.pwrite(fd, pattern(PAGE), 1 << 20)
    os.pwrite(fd, b"far", far)
    os.ftruncate(fd, 1 << 40)
    assert os.fstat(fd).st_blocks * 512 <= 4 << 20, "a hole takes space"
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20
    assert os.lseek(fd, 1 << 20, os.SEEK_HOLE) == (1 << 20) + PAGE
    assert os.lseek(fd, (1 << 20) + PAGE, os.SEEK_DATA) == far
    fails_with(errno.ENXIO, os.lseek, fd, far + PAGE, os.SEEK_DATA)
    fails_with(errno.ENXIO, os.lseek, fd, 1 << 40, os.SEEK_HOLE)
    assert os.pread(fd, 8, far - 3) == b"\0\0\0far\0\0"
    # What was stored through a mapping is data before it is synced.
    at = (8 << 20) + PAGE
    with mmap.mmap(fd, 4 << 20, offset=6 << 20) as mapping:
        mapping[at - (6 << 20)] = 1
        mapping[(3 << 20) + 5] = 2
        assert os.lseek(fd, 2 << 20, os.SEEK_DATA) == at
        assert os.lseek(fd, at, os.SEEK_HOLE) == at + PAGE
        mapping[at + PAGE - (6 << 20)] = 3
        assert os.lseek(fd, at, os.SEEK_HOLE) == at + 2 * PAGE
        assert os.lseek(fd, at + 2 * PAGE, os.SEEK_DATA) == 9 << 20
        mapping[0] = 4
        assert os.lseek(fd, 2 << 20, os.SEEK_HOLE) == 2 << 20
        assert os.lseek(fd, 2 << 20, os.SEEK_DATA) == 6 << 20
        assert os.lseek(fd, (9 << 20) + PAGE, os.SEEK_DATA) == far
    os.close(fd)


def xattrs(context):
    """Extended attributes: namespaces, flags, sizes, on files, directories and symbolic links"""
    path = context.path("f")
    write_file(path, b"")
    os.mkdir(context.path("d"))
    os.symlink("f", context.path("s"))
    os.setxattr(path, "user.name", b"value")
    os.setxattr(context.path("d"), "user.name", b"directory")
    os.setxattr(context.path("s"), "trusted.link", b"symlink", follow_symlinks=False)
    os.setxattr(path, "trusted.gfid", bytes(range(16)), os.XATTR_CREATE)
    os.setxattr(path, "security.test", b"\0\xff")
    assert sorted(os.listxattr(path)) == ["security.test", "trusted.gfid", "user.name"]
    assert os.getxattr(context.path("s"), "trusted.link", follow_symlinks=False) == b"symlink"
    assert os.getxattr(path, "trusted.gfid") == bytes(range(16))
    fails_with(errno.EEXIST, os.setxattr, path, "user.name", b"", os.XATTR_CREATE)
    fails_with(errno.ENODATA, os.setxattr, path, "user.none", b"", os.XATTR_REPLACE)
    fails_with(errno.ENODATA, os.getxattr, path, "user.none")
    fails_with(errno.EPERM, os.setxattr, context.path("s"), "user.x", b"", follow_symlinks=False)
    fails_with(errno.EOPNOTSUPP, os.setxattr, path, "nonamespace", b"")
    os.setxattr(path, "user.name", b"", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.name") == b""
    os.setxattr(path, "user." + "n" * 250, b"longest name")
    fails_with(errno.ERANGE, os.setxattr, path, "user." + "n" * 251, b"")
    os.setxattr(path, "user.large", pattern(3000))
    assert os.getxattr(path, "user.large") == pattern(3000)
    os.removexattr(path, "user.large")
    fails_with(errno.ENODATA, os.removexattr, path, "user.large")


def refused_fixing(context):
    """Who may not fix a file takes nothing from the kernel's cache of it"""
    FIXED = "system.lode.fixed"
    path = context.path("f")
    write_file(path, pattern(64 * PAGE))
    fd = os.open(path, os.O_RDWR)
    mapped = mmap.mmap(fd, 64 * PAGE)
    view = ctypes.c_char.from_buffer(mapped)
    all_of_it = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(64 * PAGE)

    def cached():
        pages = ctypes.create_string_buffer(64)
        libc("mincore", *all_of_it, pages)
        return sum(page & 1 for page in pages.raw)

    # Locked: where memory is short the kernel would take some of them for itself.
    libc("mlock", *all_of_it)
    assert cached() == 64
    if context.target.name != "lode":
        raise Skip(f"{context.target.name} fixes no files")
    fails_with(errno.EEXIST, os.setxattr, path, FIXED, b"262144")
    fails_with(errno.EINVAL, os.setxattr, path, FIXED, b"5")
    fails_with(errno.ENODATA, os.removexattr, path, FIXED)
    # It would be forgotten a moment later.
    time.sleep(0.3)
    assert cached() == 64, f"{cached()} of 64 pages are left"
    del view
    mapped.close()
    os.close(fd)


def renameat2(context):
    """renameat2: RENAME_NOREPLACE, RENAME_EXCHANGE, and flags that make no sense"""
    rename = lambda a, b, flags: libc(
        "renameat2", AT_FDCWD, os.fsencode(context.path(a)), AT_FDCWD, os.fsencode(context.path(b)), flags
    )
    write_file(context.path("a"), b"a")
    write_file(context.path("b"), b"b")
    fails_with(errno.EEXIST, rename, "a", "b", RENAME_NOREPLACE)
    rename("a", "b", RENAME_EXCHANGE)
    assert (read_file(context.path("a")), read_file(context.path("b"))) == (b"b", b"a")
    os.makedirs(context.path("d", "below"))
    rename("a", "d", RENAME_EXCHANGE)
    assert os.path.isdir(context.path("a", "below")) and read_file(context.path("d")) == b"b"
    rename("d", "a/below/d", RENAME_NOREPLACE)
    assert sorted(os.listdir(context.dir)) == ["a", "b"]
    fails_with(errno.ENOENT, rename, "b", "none", RENAME_EXCHANGE)
    fails_with(errno.EINVAL, rename, "a", "b", RENAME_EXCHANGE | RENAME_NOREPLACE)
    fails_with(errno.EINVAL, rename, "a", "a/below/a", 0)
    whiteouts(context, rename)


def whiteouts(context, rename):
    """What RENAME_WHITEOUT leaves behind: a character device 0:0, of no permissions"""
    def is_whiteout(name):
        found = os.lstat(context.path(name))
        return (found.st_mode, found.st_rdev, found.st_nlink) == (stat.S_IFCHR, 0, 1)

    write_file(context.path("f"), b"f")
    fails_with(errno.EINVAL, rename, "f", "a", RENAME_WHITEOUT | RENAME_EXCHANGE)
    fails_with(errno.EEXIST, rename, "f", "b", RENAME_WHITEOUT | RENAME_NOREPLACE)
    rename("f", "g", RENAME_WHITEOUT | RENAME_NOREPLACE)
    assert is_whiteout("f") and read_file(context.path("g")) == b"f"
    rename("g", "a/below/f", RENAME_WHITEOUT)
    assert is_whiteout("g") and read_file(context.path("a", "below", "f")) == b"f"
    rename("a/below/f", "g", RENAME_WHITEOUT)
    assert is_whiteout("a/below/f") and read_file(context.path("g")) == b"f"
    rename("a/below", "below", RENAME_WHITEOUT)
    assert is_whiteout("a/below") and is_whiteout("below/f")
    assert os.lstat(context.path("a")).st_nlink == 2
    for name in ("a/below", "below/f", "f"):
        os.unlink(context.path(name))


def listed(path):
    """Numbers by name, as getdents tells them, `.` and `..` too."""
    LIBC.opendir.restype = LIBC.readdir.restype = ctypes.c_void_p
    stream, found = ctypes.c_void_p(LIBC.opendir(os.fsencode(path))), {}
    while entry := LIBC.readdir(stream):
        found[ctypes.string_at(entry + 19)] = ctypes.c_uint64.from_address(entry).value
    LIBC.closedir(stream)
    return found


def moved_directories(context):
    """A listing names the parent that a directory has now, whatever was listed before"""
    def check(path, parent):
        for _ in range(2):
            found, expected = listed(context.path(path))[b".."], os.stat(context.path(parent)).st_ino
            assert found == expected, f".. of {path} is {found}, and {parent} is {expected}"
        assert os.stat(context.path(path, "..")).st_ino == expected

    for name in ("a/m/below", "b/n/below"):
        os.makedirs(context.path(name))
    for turn in range(20):
        one, other = ("a", "b") if turn % 2 == 0 else ("b", "a")
        check(f"{one}/m", one)
        os.rename(context.path(one, "m"), context.path(other, "m"))
        check(f"{other}/m", other)
        check("b/n", "b")
    names = [os.fsencode(context.path(name)) for name in ("a/m", "b/n")]
    for _ in range(20):
        libc("renameat2", AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
        check("a/m", "a")
        check("b/n", "b")
    os.rename(context.path("a", "m"), context.path("m"))
    check("m", ".")
    check("m/below", "m")


def deep_paths(context):
    """Paths of 4095 bytes, refused at 4096; trees deeper than any path"""
    here = context.dir
    while len(here) + 201 < 4090:
        here = os.path.join(here, "d" * 200)
        os.mkdir(here)
    last = os.path.join(here, "f" * (4095 - len(here) - 1))
    assert len(last) == 4095
    write_file(last, b"deep")
    assert read_file(last) == b"deep"
    fails_with(errno.ENAMETOOLONG, os.stat, last + "f")
    base = os.open(context.dir, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("deeper", dir_fd=base)
        below = os.open("deeper", os.O_RDONLY | os.O_DIRECTORY, dir_fd=base)
        os.close(base)
        base = below
    above = os.open("..", os.O_RDONLY, dir_fd=base)
    assert os.stat("deeper", dir_fd=above).st_ino == os.fstat(base).st_ino
    os.close(base)
    os.close(above)
    context.run("rm", "-rf", context.path("deeper"))
    assert not os.path.exists(context.path("deeper"))


def odd_names(context):
    """Names of 255 bytes, with newlines, quotes and invalid UTF-8"""
    names = [b"n" * 255, b"new\nline", b"\xff\xfe\x80", b" ", b"-rf", b"\"'`$*?", b"...", "ä€𝄞".encode(), b"\x01\x7f"]
    base = os.fsencode(context.dir)
    for name in names:
        write_file(os.path.join(base, name), name)
    assert sorted(os.listdir(base)) == sorted(names)
    for name in names:
        assert read_file(os.path.join(base, name)) == name
    fails_with(errno.ENAMETOOLONG, os.mkdir, os.path.join(base, b"n" * 256))
    fails_with(errno.ENAMETOOLONG, os.stat, os.path.join(base, b"n" * 256))
    for name in names[:4]:
        os.rename(os.path.join(base, name), os.path.join(base, b"moved" + name[:200]))
    assert len(os.listdir(base)) == len(names)


def special_files(context):
    """A fifo, a Unix socket and device nodes do their work on the mount"""
    fifo = context.path("fifo")
    os.mkfifo(fifo, 0o600)
    sent = pattern(100_000)
    writer = threading.Thread(target=write_file, args=(fifo, sent))
    writer.start()
    assert read_file(fifo) == sent
    writer.join()
    path = context.path("socket")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        client.connect(path)
        client.sendall(b"over the mount")
        assert server.accept()[0].recv(100) == b"over the mount"
    for kind, number in ((stat.S_IFCHR, os.makedev(1, 3)), (stat.S_IFBLK, os.makedev(259, 70000))):
        path = context.path(f"device{kind}")
        os.mknod(path, kind | 0o600, number)
        assert (stat.S_IFMT(os.stat(path).st_mode), os.stat(path).st_rdev) == (kind, number)
    null = context.path(f"device{stat.S_IFCHR}")
    if mount_option(context.dir, "nodev"):
        fails_with(errno.EACCES, os.open, null, os.O_RDWR)
    else:
        write_file(null, b"swallowed")
        assert read_file(null) == b""


def directory_streams(context):
    """readdir while entries come and go: none that stays is missed or seen twice"""
    stay = {f"stay{i}" for i in range(3000)}
    for i in range(3000):
        write_file(context.path(f"stay{i}"), b"")
        write_file(context.path(f"go{i}"), b"")
    seen = []
    with os.scandir(context.dir) as entries:
        for i, entry in enumerate(entries):
            seen.append(entry.name)
            if i < 3000:
                os.unlink(context.path(f"go{i}"))
                write_file(context.path(f"come{i}"), b"")
    missed = stay - set(seen)
    assert not missed, f"{len(missed)} entries missed"
    assert len(seen) == len(set(seen)), f"{len(seen) - len(set(seen))} entries seen twice"
    assert len(os.listdir(context.dir)) == 6000
    # What is made or renamed under a listing does not keep it going.
    os.mkdir(context.path("d"))
    few = {f"few{i}" for i in range(1500)}
    for name in few:
        write_file(context.path("d", name), b"")

    def rename(name):
        os.rename(context.path("d", name), context.path("d", "TEMPFILE"))
        os.rename(context.path("d", "TEMPFILE"), context.path("d", name))

    def replace(name):
        write_file(context.path("d", "TEMPFILE"), b"")
        os.rename(context.path("d", "TEMPFILE"), context.path("d", name))

    def copy(name):
        write_file(context.path("d", f"{name}.bak"), b"")

    for change in (rename, replace, copy):
        seen = []
        with os.scandir(context.path("d")) as entries:
            for entry in entries:
                seen.append(entry.name)
                assert len(seen) <= 10 * len(few), f"{change.__name__}: the listing does not end"
                change(entry.name)
        assert few <= set(seen) and len(seen) == len(set(seen)), change.__name__


def times(context):
    """Nanoseconds, years far away, and which calls change which time"""
    path = context.path("f")
    write_file(path, b"")
    for moment in ((1, 999_999_999), (-1, 500_000_000), (4_000_000_000, 1), (10_000_000_000, 123_456_789)):
        nanoseconds = moment[0] * 10**9 + moment[1]
        os.utime(path, ns=(nanoseconds, nanoseconds))
        meta = os.stat(path)
        assert (meta.st_mtime_ns, meta.st_atime_ns) == (nanoseconds, nanoseconds), moment
    old = lambda: (os.utime(path, ns=(1, 1)), os.utime(context.dir, ns=(1, 1)))
    old()
    write_file(context.path("g"), b"")
    assert os.stat(context.dir).st_mtime_ns > 1, "a new entry leaves its directory's time"
    old()
    os.chmod(path, 0o600)
    assert os.stat(path).st_mtime_ns == 1 and os.stat(path).st_ctime_ns > 10**18
    os.truncate(path, 5)
    assert os.stat(path).st_mtime_ns > 1


class Statx(ctypes.Structure):
    """struct statx of the kernel, as far as the time of birth."""
    _fields_ = [
        ("mask", ctypes.c_uint32), ("sizes", ctypes.c_byte * 76),
        ("birth_s", ctypes.c_int64), ("birth_ns", ctypes.c_uint32), ("others", ctypes.c_byte * 164),
    ]


def birth_time(context):
    """statx: the time of birth is there, whatever is asked for before, and stays"""
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 6):
        raise Skip("the kernel asks no FUSE file system for times of birth before Linux 6.6")
    STATX_BTIME = 0x800

    def birth(path):
        found = Statx()
        libc("statx", AT_FDCWD, os.fsencode(path), 0x100, STATX_BTIME | 0x7FF, ctypes.byref(found))
        assert found.mask & STATX_BTIME, f"{path} has no time of birth"
        return found.birth_s * 10**9 + found.birth_ns

    path, other = context.path("f"), context.path("g")
    born = {}
    for name, make in (
        ("f", lambda path: write_file(path, b"")), ("dir", os.mkdir), ("link", lambda path: os.symlink("f", path)),
        ("fifo", os.mkfifo), ("null", lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))),
    ):
        make(context.path(name))
        born[name] = birth(context.path(name))
        assert born[name] == os.lstat(context.path(name)).st_ctime_ns, name
    device = os.lstat(context.path("null"))
    assert (device.st_rdev, stat.S_ISCHR(device.st_mode)) == (os.makedev(1, 3), True)
    time.sleep(0.02)
    write_file(path, b"later")
    os.utime(path, ns=(1, 1))
    os.rename(path, other)
    assert birth(other) == born["f"] and os.stat(other).st_ctime_ns > born["f"] and os.stat(other).st_size == 5
    write_file(path, b"")
    assert birth(path) > born["f"]


def handle_of(fd):
    """The file handle of what is open, as a server of NFS keeps it."""
    AT_EMPTY_PATH = 0x1000
    BYTES_MAX = 128
    made = ctypes.create_string_buffer(struct.pack("Ii", BYTES_MAX, 0) + bytes(BYTES_MAX))
    libc("name_to_handle_at", fd, b"", made, ctypes.byref(ctypes.c_int()), AT_EMPTY_PATH)
    return made


def by_handle(mount, made):
    """What the file of a handle has; `mount` is a descriptor of any file beside it."""
    fd = libc("open_by_handle_at", mount, made, os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def file_handles(context):
    """open_by_handle_at: what has a name, or is open, is found by its handle, and nothing else"""
    path, mount = context.path("f"), os.open(context.dir, os.O_RDONLY)
    for n in range(200):
        data = b"content %d" % n
        write_file(path, data)
        fd = os.open(path, os.O_RDONLY)
        made = handle_of(fd)
        assert by_handle(mount, made) == data
        os.unlink(path)
        assert by_handle(mount, made) == data, "it is open still"
        os.close(fd)
        # At once: the server may not have heard yet that it is closed.
        fails_with(errno.ESTALE, by_handle, mount, made)
        write_file(path, b"another")
        fails_with(errno.ESTALE, by_handle, mount, made)
        os.unlink(path)
    os.close(mount)


def old_file_handles(context):
    """Handles over mounts: they open what is there still, and never another file with its number"""
    FILES = 40

    def make(names):
        handles = {}
        for name in names:
            write_file(context.path(name), name.encode())
            with open(context.path(name), "rb") as file:
                handles[name] = handle_of(file.fileno())
        return handles

    stay, gone = make(f"stay{n}" for n in range(FILES)), {}
    for mount in range(4):
        gone |= make(f"go{mount}.{n}" for n in range(FILES))
        for n in range(FILES):
            os.unlink(context.path(f"go{mount}.{n}"))
        context.target.unmount()
        context.target.mount()
        # As many as were made the last time, with their numbers.
        new = make(f"new{mount}.{n}" for n in range(FILES))
        root = os.open(context.dir, os.O_RDONLY)
        for name, made in (stay | new).items():
            assert by_handle(root, made) == name.encode()
        for made in gone.values():
            fails_with(errno.ESTALE, by_handle, root, made)
        os.close(root)
        for name in new:
            os.unlink(context.path(name))
        gone |= new


def permissions(context):
    """Owner, group, other, sticky and setgid directories, set-id bits dropped on write"""
    os.chmod(context.dir, 0o777)
    write_file(context.path("secret"), b"")
    os.chmod(context.path("secret"), 0o640)
    os.mkdir(context.path("sticky"))
    os.chmod(context.path("sticky"), 0o1777)
    write_file(context.path("sticky", "roots"), b"")
    os.mkdir(context.path("group"))
    os.chown(context.path("group"), 0, 7777)
    os.chmod(context.path("group"), 0o2777)
    write_file(context.path("setuid"), b"#!")
    os.chmod(context.path("setuid"), 0o6777)
    as_user(4242, 4243, lambda: user_meets_permissions(context))
    made = os.stat(context.path("group", "made"))
    assert (made.st_uid, made.st_gid) == (4242, 7777)
    assert os.stat(context.path("group", "dir")).st_mode & 0o2000, "setgid is not inherited"
    assert os.stat(context.path("setuid")).st_mode & 0o7777 == 0o777, "a write by others left set-id bits"


def user_meets_permissions(context):
    """The same calls without root's rights."""
    fails_with(errno.EACCES, os.open, context.path("secret"), os.O_RDONLY)
    fails_with(errno.EPERM, os.unlink, context.path("sticky", "roots"))
    fails_with(errno.EPERM, os.chown, context.path("setuid"), 4242, 4243)
    write_file(context.path("group", "made"), b"")
    os.mkdir(context.path("group", "dir"))
    with open(context.path("setuid"), "ab") as file:
        file.write(b"changed")


def as_user(uid, gid, call):
    """Runs `call` in a child process that has given up root; its exception becomes ours."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            call()
        except BaseException as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        failure = pipe.read().decode()
    os.waitpid(child, 0)
    assert not failure, failure


def full_pool(context):
    """Full: ENOSPC and nothing else, nothing torn, deletes work, and the space comes back each time"""
    names = []
    first = fill(context, names)
    assert os.statvfs(context.dir).f_bavail * os.statvfs(context.dir).f_frsize < 2 << 20, "ENOSPC with space left"
    for _ in range(3):
        for name in names[: len(names) // 2]:
            assert read_file(name) == pattern(os.stat(name).st_size), f"{name} is torn"
        for name in names:
            os.unlink(name)
        names.clear()
        again = fill(context, names)
        assert again >= 0.97 * first, f"{first} bytes fitted at first, then only {again}"
    for name in names:
        os.unlink(name)
    write_file(context.path("after"), pattern(1 << 20))


def fill(context, names):
    """Writes files of 60 KiB until the pool is full; returns the bytes that were taken."""
    data, taken = pattern(60 << 10), 0
    while True:
        name = context.path(f"f{len(names)}")
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return taken
        names.append(name)
        try:
            written = os.write(fd, data)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            written = 0
        assert os.fstat(fd).st_size == written, "the size is not what was acknowledged"
        os.close(fd)
        taken += written
        if written < len(data):
            return taken


full_pool.mib = 64

SUITES = [
    pjdfstest, fsx, statvfs, sendfile, copy_file_range, memory_map, stores_before_an_end, tmpfile,
    unlinked_open, fallocate, seek_hole, xattrs, refused_fixing, renameat2, moved_directories, deep_paths, odd_names,
    special_files, directory_streams, times, birth_time, file_handles, old_file_handles, permissions, full_pool,
]
