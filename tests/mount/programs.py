"""Unmodified programs: what people do with a file system all day, checked to the byte.

Inputs are generated from fixed seeds, so that a failure repeats; nothing is fetched from anywhere.
"""

import ctypes
import os
import random
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import time

from conformance import pattern, read_file, write_file
from processes import finish, start
from target import Skip


def make_files(root, count, seed, size_max):
    """A tree of `count` files of random bytes, in some hundred directories."""
    rng = random.Random(seed)
    for number in range(count):
        directory = os.path.join(root, f"d{number % 97:02}", f"e{number % 7}")
        os.makedirs(directory, exist_ok=True)
        name = os.path.join(directory, f"file{number}")
        write_file(name, rng.randbytes(rng.randrange(size_max)))
        os.chmod(name, rng.choice((0o644, 0o600, 0o755)))
        os.utime(name, ns=(number * 1_000_000_007, number * 1_000_000_007))


def git(context):
    """git: clone 2,000 files, branches, commit, push, fsck, gc, and fsck again"""
    origin = context.outside("origin")
    base = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
    here = lambda *words, at=origin: context.run("git", *base, *words, cwd=at)
    os.mkdir(origin)
    here("init", "-q")
    make_files(origin, 2000, 1, 3000)
    commit = lambda message, at=origin: (here("add", "-A", at=at), here("commit", "-q", "-m", message, at=at))
    commit("two thousand files")
    for branch in ("red", "green"):
        here("checkout", "-q", "-b", branch, "main")
        make_files(origin, 600, branch, 2000)
        os.symlink("file0", os.path.join(origin, "d00", branch))
        commit(branch)
    here("checkout", "-q", "--detach")
    copy = context.path("clone")
    context.run("git", "clone", "-q", "--no-local", origin, copy)
    for branch in ("red", "main", "green", "red"):
        here("checkout", "-q", branch, at=copy)
        assert here("status", "--porcelain", at=copy) == "", f"{branch}: not what was committed"
    here("checkout", "-q", "-b", "work", "main", at=copy)
    make_files(copy, 300, 9, 5000)
    commit("work", at=copy)
    here("merge", "-q", "-m", "merge", "-X", "ours", "green", at=copy)
    here("push", "-q", "origin", "work", at=copy)
    here("fsck", "--full", "--strict", at=copy)
    here("gc", "-q", "--prune=now", at=copy)
    here("fsck", "--full", "--strict", at=copy)
    here("checkout", "-q", "work")
    context.run("diff", "-r", "--no-dereference", "--exclude=.git", origin, copy)


def tar(context):
    """tar: 20,000 small files in and out, compared byte for byte"""
    source, archive = context.outside("source"), context.outside("in.tar")
    make_files(source, 20_000, 2, 4000)
    os.symlink("d00/e0/file0", os.path.join(source, "symlink"))
    os.link(os.path.join(source, "d01/e1/file1"), os.path.join(source, "hardlink"))
    os.mkdir(os.path.join(source, "empty"))
    context.run("tar", "--format=posix", "-cf", archive, "-C", source, ".")
    inside = context.path("inside")
    os.mkdir(inside)
    context.run("tar", "-xpf", archive, "-C", inside)
    context.run("diff", "-r", "--no-dereference", source, inside)
    assert context.run("tar", "--compare", "-f", archive, "-C", inside) == ""
    back = context.outside("back.tar")
    context.run("tar", "--format=posix", "-cf", back, "-C", inside, ".")
    assert context.run("tar", "--compare", "-f", back, "-C", source) == ""
    context.run("rm", "-rf", inside)
    assert os.listdir(context.dir) == []


tar.mib = 512


def sqlite_wal(context):
    """SQLite in WAL mode: two writers, integrity_check, and a client that is killed"""
    sqlite(context, "WAL")


def sqlite_delete(context):
    """SQLite in DELETE mode: two writers, integrity_check, and a client that is killed"""
    sqlite(context, "DELETE")


def sqlite(context, mode):
    path = context.path("test.db")
    with connect(path) as db:
        assert db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0].upper() == mode
        db.execute("CREATE TABLE entries (writer INTEGER, number INTEGER, body BLOB, PRIMARY KEY (writer, number))")
    db.close()
    finish(*[start(insert, path, writer, 60) for writer in range(2)])
    check_database(path, {0: 60, 1: 60}, exactly=True)
    for round_ in range(3):
        writer = 10 + round_
        acknowledged = killed_client(path, writer, 0.15 + 0.1 * round_)
        context.say(f"killed after {acknowledged} acknowledged transactions")
        check_database(path, {writer: acknowledged}, exactly=False)
    db = connect(path)
    db.execute("VACUUM")
    db.close()
    check_database(path, {0: 60, 1: 60}, exactly=True)


def connect(path):
    return sqlite3.connect(path, timeout=60, isolation_level=None)


def insert(path, writer, count, acknowledge=None):
    """Transactions of several rows each; `acknowledge` hears of each commit that returned."""
    db = connect(path)
    bodies = random.Random(writer)
    for number in range(count):
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO entries VALUES (?, ?, ?)", (writer, number, bodies.randbytes(500)))
        db.execute("UPDATE entries SET body = body || ? WHERE writer = ? AND number < 3", (b"x" * 40, writer))
        db.execute("COMMIT")
        if acknowledge is not None:
            os.write(acknowledge, b"!")
    db.close()


def killed_client(path, writer, seconds):
    """A client killed in the middle of its work; how many commits had returned."""
    reader, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        insert(path, writer, 1 << 30, pipe)
    os.close(pipe)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as acknowledgements:
        return len(acknowledgements.read())


def check_database(path, expected, exactly):
    """Sound, and each writer's transactions are there: all that were acknowledged, at most one more."""
    db = connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)], "integrity_check"
    for writer, acknowledged in expected.items():
        numbers = [row[0] for row in db.execute("SELECT number FROM entries WHERE writer = ? ORDER BY number", (writer,))]
        assert numbers == list(range(len(numbers)))
        allowed = (acknowledged,) if exactly else (acknowledged, acknowledged + 1)
        assert len(numbers) in allowed, f"{acknowledged} transactions acknowledged, {len(numbers)} found"
    db.close()


UNITS = 100
# On an ordinary file freed space may wait for the next background sync.
FREED_S_MAX = 15


def make_project(root):
    """A C program of a hundred units; what it prints depends on every one of them."""
    rng = random.Random(3)
    numbers = [rng.randrange(1 << 20) for _ in range(UNITS)]
    os.makedirs(os.path.join(root, "src"))
    source = lambda name, text: write_file(os.path.join(root, "src", name), text.encode())
    source("all.h", "".join(f"unsigned unit{i}(unsigned);\n" for i in range(UNITS)))
    for i, number in enumerate(numbers):
        source(f"unit{i}.h", f"#define NUMBER{i} {number}u\n")
        source(f"unit{i}.c", f'#include "all.h"\n#include "unit{i}.h"\n#include <stdio.h>\n'
               f"unsigned unit{i}(unsigned x) {{ return x * 31u + NUMBER{i}; }}\n")
    calls = "".join(f"  x = unit{i}(x);\n" for i in range(UNITS))
    source("main.c", f'#include "all.h"\n#include <stdio.h>\nint main(void) {{\n  unsigned x = 0;\n{calls}  printf("%u\\n", x);\n}}\n')
    write_file(os.path.join(root, "Makefile"), b"""
OBJECTS := $(patsubst src/%.c,build/%.o,$(wildcard src/*.c))
program: $(OBJECTS)
\t$(CC) -o $@ $^
build/%.o: src/%.c | build
\t$(CC) -O1 -MMD -c -o $@ $<
build:
\tmkdir -p build
-include $(OBJECTS:.o=.d)
""")
    result = 0
    for number in numbers:
        result = (result * 31 + number) & 0xFFFFFFFF
    return result


def c_project(context):
    """make -j2 of a C project of 100 units, run it, and rebuild exactly what changed"""
    root = context.path("project")
    result = make_project(root)
    compiled = lambda output: len(re.findall(r" -c -o ", output))
    build = lambda: compiled(context.run("make", "-j2", cwd=root))
    run = lambda: int(context.run(os.path.join(root, "program")))
    assert build() == UNITS + 1
    assert run() == result
    assert build() == 0, "nothing changed, but make rebuilt"
    os.utime(os.path.join(root, "src", "unit7.c"))
    assert build() == 1
    os.utime(os.path.join(root, "src", "unit8.h"))
    assert build() == 1
    write_file(os.path.join(root, "src", "unit99.h"), b"#define NUMBER99 5u\n")
    assert build() == 1
    assert run() == result_with_last(root, 5)
    context.run("make", "-j2", "-B", cwd=root)


def result_with_last(root, last):
    numbers = []
    for i in range(UNITS):
        with open(os.path.join(root, "src", f"unit{i}.h"), encoding="ascii") as header:
            numbers.append(int(re.search(r"(\d+)u", header.read())[1]))
    assert numbers[-1] == last
    result = 0
    for number in numbers:
        result = (result * 31 + number) & 0xFFFFFFFF
    return result


def execute(context):
    """Compile, execute, load as a library, run as a script; a running program is not written to"""
    write_file(context.path("hello.c"), b'#include <stdio.h>\nint number(void) { return 42; }\n'
               b'int main(void) { puts("hello"); getchar(); return number(); }\n')
    context.run("gcc", "-o", context.path("hello"), context.path("hello.c"))
    context.run("gcc", "-shared", "-fPIC", "-o", context.path("libhello.so"), context.path("hello.c"))
    assert ctypes.CDLL(context.path("libhello.so")).number() == 42
    running = subprocess.Popen([context.path("hello")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        os.close(os.open(context.path("hello"), os.O_WRONLY))
        raise AssertionError("a program that runs could be opened for writing")
    except OSError as error:
        assert error.errno == 26, error
    assert running.communicate(b"\n")[0] == b"hello\n" and running.returncode == 42
    write_file(context.path("script"), b"#!/bin/sh\ncat \"$0\" | wc -l\n")
    os.chmod(context.path("script"), 0o755)
    assert context.run(context.path("script")).split() == ["2"]
    os.chmod(context.path("script"), 0o644)
    assert not os.access(context.path("script"), os.X_OK)
    # The library stays mapped in this process, which would keep the mount busy.
    libdl_close(context.path("libhello.so"))


def libdl_close(path):
    handle = ctypes.CDLL(path)._handle
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    close(handle)
    close(handle)


def rich_tree(context, root):
    """Everything that rsync -aHAX carries: links, ACLs, attributes, holes, devices, odd times and owners."""
    make_files(root, 300, 4, 20_000)
    path = lambda name: os.path.join(root, name)
    os.link(path("d00/e0/file0"), path("linked"))
    os.link(path("d00/e0/file0"), path("d01/linked too"))
    os.symlink("d00", path("to directory"))
    os.symlink("nowhere", path("dangling"))
    os.mkfifo(path("fifo"), 0o640)
    os.mknod(path("null"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(path("disk"), stat.S_IFBLK | 0o660, os.makedev(7, 200))
    with open(path("sparse"), "wb") as file:
        file.seek(1 << 26)
        file.write(pattern(100))
    os.chown(path("d02"), 1234, 4321)
    os.chown(path("dangling"), 99, 98, follow_symlinks=False)
    os.chmod(path("d03"), 0o3775)
    os.chmod(path("d00/e0/file0"), 0o4711)
    context.run("setfacl", "-m", "u:daemon:rw,g:1234:r,m::rw", path("d04"))
    context.run("setfacl", "-d", "-m", "u:daemon:rwx,o::-", path("d04"))
    context.run("setfacl", "-m", "u:4000:-", path("linked"))
    os.setxattr(path("linked"), "user.one", b"1")
    os.setxattr(path("d05"), "user.directory", pattern(900))
    os.setxattr(path("d05"), "trusted.directory", b"\0\1")
    os.utime(path("dangling"), ns=(1, 999_999_999), follow_symlinks=False)
    os.utime(path("d06"), ns=(0, 1_234_567_890_123_456_789))


def rsync(context):
    """rsync -aHAX there and back; a second run finds nothing to change"""
    source, there, back = context.outside("source"), context.path("there"), context.outside("back")
    os.mkdir(source)
    try:
        os.setxattr(source, "trusted.probe", b"")
        os.removexattr(source, "trusted.probe")
        context.run("setfacl", "-m", "u:daemon:r", source)
    except (OSError, AssertionError) as error:
        raise Skip(f"{source} itself holds no trusted attributes or ACLs: {error}") from None
    rich_tree(context, source)
    for begin, end in ((source, there), (there, back)):
        context.run("rsync", "-aHAXS", "--numeric-ids", begin + "/", end + "/")
        changed = context.run("rsync", "-aHAXcni", "--numeric-ids", "--delete", begin + "/", end + "/")
        assert changed == "", f"rsync would change again:\n{changed}"
    assert context.run("rsync", "-aHAXcni", "--numeric-ids", "--delete", source + "/", back + "/") == ""
    assert os.stat(os.path.join(there, "sparse")).st_blocks * 512 < 1 << 20, "a sparse file was filled"
    assert os.stat(os.path.join(there, "linked")).st_nlink == 3
    context.run("rsync", "-aHAX", "--inplace", "--no-whole-file", "--numeric-ids", back + "/", there + "/")
    acl = context.run("getfacl", "-ncp", os.path.join(there, "d04"))
    assert acl == context.run("getfacl", "-ncp", os.path.join(source, "d04"))


def snapshot(root):
    """Paths below a directory with what they are, their permissions, owners, contents and where links point to."""
    found = {}
    for parent, dirs, files in os.walk(root):
        for name in dirs + files:
            path = os.path.join(parent, name)
            about = os.lstat(path)
            content = None
            if stat.S_ISLNK(about.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(about.st_mode):
                content = read_file(path)
            found[os.path.relpath(path, root)] = (about.st_mode, about.st_uid, about.st_gid, content)
    return found


def change_tree(rng, root, steps):
    """The same changes for the same random state and tree, whatever file system the tree is on."""
    for _ in range(steps):
        dirs, files = [root], []
        for parent, below, names in sorted(os.walk(root)):
            dirs += [os.path.join(parent, name) for name in sorted(below)]
            files += [os.path.join(parent, name) for name in sorted(names)]
        fresh = os.path.join(rng.choice(dirs), f"new{rng.getrandbits(40):x}")
        at, path = rng.choice(dirs[1:] or dirs), rng.choice(files)
        match rng.randrange(12):
            case 0 | 9 | 10:
                write_file(fresh, pattern(rng.randrange(9000)))
            case 1:
                os.mkdir(fresh)
            case 2:
                with open(path, "ab") as file:
                    file.write(pattern(rng.randrange(100)))
            case 3:
                os.chmod(path, rng.choice([0o600, 0o4755, 0o644]))
            case 4:
                os.rename(path, fresh)
            case 5:
                os.rename(path, rng.choice(files))
            case 6 if at != root and not fresh.startswith(at + "/"):
                os.rename(at, fresh)
            case 7:
                os.unlink(path)
            case 8 if at != root and rng.randrange(3) == 0:
                shutil.rmtree(at)


def overlay(context):
    """The upper layer of an overlay: random changes above a tree, as they are without one, and after it is mounted again"""
    with open("/proc/filesystems", encoding="ascii") as known:
        if "\toverlay\n" not in known.read():
            raise Skip("this kernel has no overlays (modprobe overlay)")
    lower, plain, merged = (context.outside(name) for name in ("lower", "plain", "merged"))
    os.mkdir(merged)
    os.mkdir(lower)
    make_files(lower, 60, 6, 8000)
    context.run("cp", "-a", lower, plain)
    layers = f"lowerdir={lower},upperdir={context.path('upper')},workdir={context.path('work')},redirect_dir=on"
    mount = lambda: context.run("mount", "-t", "overlay", "-o", layers, "overlay", merged)
    os.mkdir(context.path("upper"))
    os.mkdir(context.path("work"))
    before = snapshot(lower)
    for mounted in range(3):
        mount()
        try:
            for part in range(3):
                seed = f"{context.seed} {mounted} {part}"
                change_tree(random.Random(seed), merged, 40)
                change_tree(random.Random(seed), plain, 40)
                assert snapshot(merged) == snapshot(plain), "the overlay is not what the tree is that was changed alike"
        finally:
            context.run("umount", merged)
    # Without RENAME_WHITEOUT it could only be read.
    upper = [os.lstat(os.path.join(parent, name)) for parent, _, names in os.walk(context.path("upper")) for name in names]
    assert any(stat.S_ISCHR(found.st_mode) and found.st_rdev == 0 for found in upper), "no whiteout is in the upper layer"
    assert snapshot(lower) == before, "the lower layer was changed"


def coreutils(context):
    """find, du, df, cp, mv, install, sort, ls: counts and sums are what was written"""
    root = context.path("tree")
    available = lambda: int(context.run("df", "--output=avail", "-B1", context.dir).split()[1])
    before = available()
    make_files(root, 1000, 5, 8000)
    sizes = [os.stat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(root) for name in names]
    assert len(sizes) == 1000
    assert len(context.run("find", root, "-type", "f").splitlines()) == 1000
    assert len(context.run("find", root, "-type", "f", "-size", "+3k").splitlines()) == sum(s > 3072 for s in sizes)
    assert len(context.run("find", root, "-newermt", "1970-01-01 00:10:00 UTC", "-type", "f").splitlines()) == 400
    total = sum(int(size) for size in context.run("find", root, "-type", "f", "-printf", "%s\n").split())
    assert total == sum(sizes)
    taken = int(context.run("du", "-s", "-B1", root).split()[0])
    assert total <= taken <= 4 * total, f"du says {taken} for {total} bytes"
    assert total <= before - available() <= 4 * total, f"df fell by {before - available()} for {total} bytes"
    context.run("cp", "-a", root, context.path("copy"))
    context.run("diff", "-r", root, context.path("copy"))
    context.run("mv", context.path("copy"), context.outside("moved"))
    context.run("mv", context.outside("moved"), context.path("moved back"))
    context.run("diff", "-r", root, context.path("moved back"))
    context.run("install", "-D", "-m", "0750", "/bin/sh", context.path("a", "b", "sh"))
    assert stat.S_IMODE(os.stat(context.path("a", "b", "sh")).st_mode) == 0o750
    lines = "\n".join(str(i) for i in random.Random(6).sample(range(50_000), 50_000))
    write_file(context.path("lines"), lines.encode())
    context.run("sort", "-n", "-T", context.dir, "-S", "100K", "-o", context.path("lines"), context.path("lines"))
    assert read_file(context.path("lines")).split() == [b"%d" % i for i in range(50_000)]
    context.run("rm", "-rf", *[context.path(name) for name in os.listdir(context.dir)])
    give_up = time.monotonic() + FREED_S_MAX
    while before - available() > 2 << 20:
        assert time.monotonic() < give_up, f"{before - available()} bytes stay taken after everything was removed"
        time.sleep(0.2)


SUITES = [git, tar, sqlite_wal, sqlite_delete, c_project, execute, rsync, overlay, coreutils]
