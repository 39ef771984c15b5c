#!/usr/bin/env python3
"""Unmodified programs with their memory on slow memory: `lode run --heap`.

What a program prints there is compared with what it prints without; that the bytes lie on the media is looked up in
the program's own maps, and in the file. Each test has a media of its own in a folder of the suite's.
"""

import argparse
import errno
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target")
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
MIB = 1 << 20
SECONDS_MAX = 60


class Skipped(Exception):
    """Why a test cannot run here."""


class Heap:
    """A folder with a media in it, and programs that run on that."""

    def __init__(self, folder, lode):
        self.folder, self.lode = folder, lode
        self.media = os.path.join(folder, "heap")
        self.stats = os.path.join(folder, "stats")

    def path(self, name):
        return os.path.join(self.folder, name)

    def command(self, *command, size="256M", options=()):
        size = ["--heap-size", size] if size else []
        return [self.lode, "run", "--heap", self.media, *size, "--heap-stats", self.stats, *options, "--", *command]

    def run(self, *command, size="256M", options=(), **how):
        return plain(*self.command(*command, size=size, options=options), **how)

    def same(self, *command, **how):
        """Runs it with and without, and wants the same answer; gives the statistics of those who ran on the media."""
        without, on_media = plain(*command), self.run(*command, **how)
        assert without.returncode == 0, f"without: {without}"
        assert (on_media.returncode, on_media.stdout) == (0, without.stdout), f"{on_media}\nwithout: {without}"
        assert on_media.stderr == without.stderr, on_media.stderr
        return self.statistics()

    def statistics(self):
        with open(self.stats, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


def plain(*command, **how):
    how = {"capture_output": True, "text": True, "timeout": SECONDS_MAX, "check": False} | how
    return subprocess.run(command, **how)


def python(code):
    return [PYTHON, "-c", code]


# Says of an object where it lies: the line of /proc/self/maps around its address.
WHERE = """
import ctypes, sys
def where(at):
    for line in open("/proc/self/maps"):
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= at < end:
            return line.split()[1], line.split()[-1]
def buffer(bytes):
    made = ctypes.create_string_buffer(bytes)
    return made, ctypes.addressof(made)
"""


def on_media(heap):
    """The address is mapped from the media, shared; and the bytes are in the file."""
    answer = heap.run(*python(WHERE + """
made, at = buffer(1 << 20)
made.raw = b"lodestone in slow memory!" * 41943 + b"!"
print(*where(at))
import os
media = os.environ["LODE_HEAP"]
print(open(media, "rb").read().count(b"lodestone in slow memory!" * 40000))
"""))
    mode, where, found = answer.stdout.split()
    # The program made it of pieces, and those are there too.
    assert (mode, where) == ("rw-s", heap.media) and int(found) >= 1, answer
    found = heap.statistics()[0]
    assert found["on_media"] > MIB and found["in_dram"] == 0 and found["program"].startswith("python3"), found
    assert found["claimed"] >= found["on_media"] and found["resident"] > MIB, found
    # Of those that are in use: some of what jemalloc had before the media was opened is in DRAM.
    assert sum(arena["on_media"] for arena in found["arenas"]) == found["on_media"], found


def threads(heap):
    """Python with threads that allocate and free each other's objects."""
    heap.same(*python("""
import threading, hashlib, queue
q, sums = queue.Queue(), []
def make(n):
    for i in range(300):
        q.put(bytes([n]) * (i * 97 + 1))
def take():
    h = 0
    for _ in range(600):
        h ^= int(hashlib.sha256(q.get()).hexdigest(), 16)
    sums.append(h)
ts = [threading.Thread(target=make, args=(n,)) for n in range(8)] + [threading.Thread(target=take) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]
print(hex(sums[0] ^ sums[1] ^ sums[2] ^ sums[3]))
"""))


# Parent and child write the same object at the same time, and tell what they see.
BOTH_WRITE = """
import os, sys
table = [bytes([1]) * 1000 for _ in range(5000)]
big = bytearray(b"p" * (8 << 20))
down, up = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    fine = big == b"p" * (8 << 20)
    big[: 4 << 20] = b"c" * (4 << 20)
    table[:2500] = [bytes([2]) * 1000 for _ in range(2500)]
    os.write(up[1], b"x"); os.read(down[0], 1)
    fine = fine and big == b"c" * (4 << 20) + b"p" * (4 << 20)
    fine = fine and sum(map(sum, table)) == 2500 * 1000 + 2500 * 2000
    more = [bytearray(b"m" * 100000) for _ in range(100)]
    fine = fine and all(m == b"m" * 100000 for m in more)
    del table, more
    sys.stdout.write("child %s\\n" % fine); sys.stdout.flush()
    os._exit(0 if fine else 1)
os.read(up[0], 1)
fine = big == b"p" * (8 << 20)
big[:] = b"q" * (8 << 20)
table = [bytes([3]) * 1000 for _ in range(5000)]
more = [bytearray(b"n" * 100000) for _ in range(100)]
os.write(down[1], b"x")
status = os.waitpid(pid, 0)[1]
fine = fine and big == b"q" * (8 << 20) and sum(map(sum, table)) == 15000000
fine = fine and all(m == b"n" * 100000 for m in more)
print("parent", fine, status)
"""


def fork(heap):
    """Parent and child each see their own, and both go on to the end."""
    answer = heap.run(*python(BOTH_WRITE))
    assert answer.stdout.split("\n")[:2] == ["child True", "parent True 0"], answer


def fork_with_threads(heap):
    """The same while other threads allocate."""
    busy = """
import threading, time
stop = False
def work():
    while not stop:
        mine = [bytearray(n * 50) for n in range(200)]
        assert not any(map(any, mine))
for _ in range(3): threading.Thread(target=work, daemon=True).start()
"""
    answer = heap.run(*python(busy + BOTH_WRITE + "\nstop = True"))
    assert answer.stdout.split("\n")[:2] == ["child True", "parent True 0"], answer


def multiprocessing(heap):
    """Workers that are forked, and live on."""
    found = heap.same(*python("""
import multiprocessing
data = list(range(200000))
def work(n):
    mine = [x * n for x in data]
    return sum(mine)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        print(pool.map(work, range(16)))
    print(sum(data))
"""))
    assert found, "nobody said what came of it"


def daemon(heap):
    """A process that forks twice, closes all descriptors and lives on without its parents."""
    result = heap.path("result")
    answer = heap.run(*python(f"""
import os, time
kept = [bytes([7]) * 3000 for _ in range(3000)]
if os.fork(): os._exit(0)
os.setsid()
os.closerange(3, 4096)
more = [bytes([8]) * 3000 for _ in range(3000)]
if os.fork(): os._exit(0)
time.sleep(0.3)
last = [bytes([9]) * 3000 for _ in range(3000)]
fine = all(b == bytes([7]) * 3000 for b in kept) and all(b == bytes([8]) * 3000 for b in more)
with open({result!r} + ".part", "w") as to: to.write(str(fine and sum(map(sum, last)) == 9 * 9000000))
os.rename({result!r} + ".part", {result!r})
"""))
    assert answer.returncode == 0, answer
    # Others take what the parents left, and write it.
    for _ in range(40):
        if os.path.exists(result):
            break
        assert heap.run(*python("x = [bytes([1]) * 3000 for _ in range(9000)]")).returncode == 0
    with open(result, encoding="utf-8") as text:
        assert text.read() == "True"


def memory_comes_back(heap):
    """A process that forks again and again does not use the media up."""
    answer = heap.run(*python("""
import os
for n in range(40):
    mine = bytearray(b"x" * (20 << 20))
    if os.fork() == 0: os._exit(0 if mine == b"x" * (20 << 20) else 1)
    assert os.wait()[1] == 0
    mine[: 1 << 20] = b"y" * (1 << 20)
    del mine
"""), size="128M", options=("--heap-full", "fail"))
    assert answer.returncode == 0, answer


def fork_without_memory(heap):
    """Where the kernel maps no private copies fork says so, and nobody loses anything."""
    answer = heap.run(*python("""
import os, resource
big = bytearray(b"x" * (64 << 20))
def fork():
    try:
        child = os.fork()
    except OSError as e:
        return e.errno
    if child == 0:
        os._exit(0 if big.count(b"x") == 64 << 20 else 1)
    return os.waitpid(child, 0)[1]
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (48 << 20, before[1]))
first = fork()
resource.setrlimit(resource.RLIMIT_DATA, before)
print(first, big.count(b"x") == 64 << 20, fork())
"""), size="512M")
    assert answer.stdout == f"{errno.ENOMEM} True 0\n", answer


def rights_given_up(heap):
    """A program that becomes another user, who may not open the media, forks a child that has memory there."""
    if os.geteuid() != 0:
        raise Skipped("to become another user takes root")
    answer = heap.run(*python(WHERE + """
import os
os.setgid(65534); os.setuid(65534)
child = os.fork()
if child == 0:
    made, at = buffer(8 << 20)
    os._exit(0 if where(at)[0] == "rw-s" else 1)
print(os.waitpid(child, 0)[1])
"""))
    assert answer.stdout == "0\n", answer


def begin_at_once(heap):
    """The programs of a pipe make the file together."""
    for n in range(30):
        heap.media = heap.path(f"heap{n}")
        one, other = (" ".join(map(shlex.quote, heap.command(program, size=size)))
                      for program, size in (("true", "256M"), ("cat", "64M")))
        answer = plain("sh", "-c", f"{one} | {other} | {one} || exit 9")
        assert (answer.returncode, answer.stderr) == (0, ""), answer
        assert os.path.getsize(heap.media) == 256 * MIB


def signals_are_left_alone(heap):
    """What is ignored stays so for the program: no handler of ours was in its place."""
    code = "import signal; print(signal.getsignal(signal.SIGBUS).name)"
    command = " ".join(map(shlex.quote, heap.command(*python(code))))
    answer = plain("sh", "-c", f"trap '' BUS; {command}; {command}")
    assert answer.stdout == "SIG_IGN\nSIG_IGN\n", answer


def devices(heap):
    """Of a block device only what nobody else has or wrote is taken."""
    image = heap.path("image")
    with open(image, "wb") as to:
        to.truncate(64 * MIB)
        to.seek(0x10040)
        to.write(b"_BHRfS_M")
    made = plain("losetup", "--find", "--show", image) if shutil.which("losetup") and os.geteuid() == 0 else None
    if made is None or made.returncode:
        raise Skipped("there are no loop devices")
    heap.media = made.stdout.strip()

    def refused(word):
        answer = heap.run("echo", "ran", size=None)
        assert answer.returncode == 1 and answer.stdout == "" and word in answer.stderr, answer

    try:
        refused("begins with zeros")
        with open(heap.media, "r+b") as to:
            to.seek(0x10000)
            to.write(bytes(4096))
        alone = os.open(heap.media, os.O_RDONLY | os.O_EXCL)
        refused("in use")
        os.close(alone)
        answer = heap.run("sh", "-c", "echo a | cat", size=None)
        assert answer.stdout == "a\n" and answer.stderr == "", answer
        alone = os.open(heap.media, os.O_RDONLY | os.O_EXCL)
        refused("in use")
        os.close(alone)
    finally:
        plain("losetup", "--detach", heap.media)


def sqlite(heap):
    """A database in memory and in a file, by its library."""
    heap.same(*python("""
import sqlite3
for place in (":memory:", "%s"):
    db = sqlite3.connect(place)
    db.execute("create table t (a integer primary key, b text)")
    db.executemany("insert into t values (?, ?)", ((n, "x" * (n %% 700)) for n in range(20000)))
    db.execute("create index i on t (b)")
    print(db.execute("select count(*), sum(length(b)) from t").fetchone(), db.execute("pragma integrity_check").fetchone())
    db.close()
import os; os.remove("%s")
""" % ((heap.path("db"),) * 2)))


def sort(heap):
    """A large file, by several threads."""
    lines = heap.path("lines")
    with open(lines, "w", encoding="ascii") as to:
        to.writelines(f"{n * 2654435761 % 4294967296:010}\n" for n in range(800000))
    found = heap.same("sort", "--parallel=4", "-S", "64M", lines)
    assert found[0]["program"] == "sort" and found[0]["fallen_back"] == 0, found
    # It exits with all its memory in use.
    assert found[0]["on_media"] > 8 * MIB or found[0]["claimed"] > 8 * MIB, found


def compiler(heap):
    """gcc and the programs that it starts, each with its own part."""
    if not shutil.which("gcc"):
        raise Skipped("gcc is not installed")
    source = heap.path("a.c")
    with open(source, "w", encoding="ascii") as to:
        to.write("#include <stdio.h>\n")
        to.writelines(f"static int f{n}(int a) {{ return a * {n} + (a >> 3); }}\n" for n in range(1500))
        to.write("int main(void) { int s = 0;\n")
        to.writelines(f"s ^= f{n}(s + {n});\n" for n in range(1500))
        to.write('printf("%d\\n", s); return 0; }\n')
    built = {}
    for name, run in (("without", plain), ("with", heap.run)):
        out = heap.path(name)
        answer = run("gcc", "-O1", "-g0", source, "-o", out)
        assert answer.returncode == 0 and answer.stderr == "", answer
        built[name] = plain(out).stdout
        with open(out, "rb") as program:
            built[name] += str(hash(program.read()))
    assert built["with"] == built["without"]
    programs = {found["program"] for found in heap.statistics()}
    assert {"gcc", "cc1"} <= programs, programs


def pipeline(heap):
    """A shell, tar and gzip at once on one media."""
    heap.same("sh", "-c", f"cd {ROOT} && tar --sort=name --mtime=@0 --owner=0 --group=0 -cf - docs src | gzip -9 -n | sha256sum")
    programs = [found["program"] for found in heap.statistics()]
    assert "tar" in programs, programs


def full_falls_back(heap):
    """What does not fit lies in DRAM, and is counted."""
    answer = heap.run(*python("x = bytearray(100 << 20); x[:] = b'1' * len(x); print(x.count(b'1'))"), size="32M")
    assert answer.stdout == f"{100 * MIB}\n", answer
    found = heap.statistics()[0]
    assert found["fallen_back"] > 0 and found["refused"] == 0, found


def full_fails(heap):
    """The program is told, and goes on with what there is."""
    answer = heap.run(*python("""
try:
    x = bytearray(100 << 20)
except MemoryError:
    x = bytearray(4 << 20)
    print("told", len(x))
"""), size="32M", options=("--heap-full", "fail"))
    assert answer.stdout == f"told {4 * MIB}\n", answer
    found = heap.statistics()[0]
    assert found["refused"] > 0 and found["in_dram"] == 0 and found["fallen_back"] == 0, found


def host_full(heap):
    """A host without room is a full media, not a signal."""
    folder = heap.path("small")
    os.mkdir(folder)
    if os.geteuid() != 0 or plain("mount", "-t", "tmpfs", "-o", "size=24m", "none", folder).returncode:
        raise Skipped("a file system of its own takes root")
    try:
        heap.media = os.path.join(folder, "heap")
        answer = heap.run(*python("x = bytearray(100 << 20); x[:] = b'1' * len(x); print(x.count(b'1'))"), size="1G")
        assert answer.stdout == f"{100 * MIB}\n", answer
        assert heap.statistics()[0]["fallen_back"] > 0
    finally:
        plain("umount", "-l", folder)


def least_bytes(heap):
    """Small allocations stay in DRAM, large ones do not, and realloc goes from one to the other."""
    answer = heap.run(*python(WHERE + """
small, large = buffer(2000), buffer(300000)
print(where(small[1])[1] == where(large[1])[1], *where(large[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.realloc.argtypes = ctypes.c_void_p, ctypes.c_size_t
at = libc.malloc(500)
ctypes.memset(at, 65, 500)
for size in (100000, 900000, 700, 5000000, 500):
    at = libc.realloc(at, size)
    assert ctypes.string_at(at, 500) == b"A" * 500
    print(where(at)[0], end=" ")
libc.free.argtypes = ctypes.c_void_p,
libc.free(at)
"""), options=("--heap-min", "64K"))
    lines = answer.stdout.split("\n")
    assert lines[0] == f"False rw-s {heap.media}", answer
    assert lines[1].split() == ["rw-s", "rw-s", "rw-p", "rw-s", "rw-p"], answer
    # What an alignment makes larger than it was asked for: of one kind from first to last.
    answer = heap.run(*python(WHERE + """
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memalign.restype = ctypes.c_void_p
libc.malloc.argtypes = ctypes.c_size_t,
libc.memalign.argtypes = ctypes.c_size_t, ctypes.c_size_t
libc.free.argtypes = ctypes.c_void_p,
aligned = [libc.memalign(4096, 5000) for _ in range(100)]
modes = {where(at)[0] for at in aligned}
for at in aligned: libc.free(at)
print(*modes, *{where(libc.malloc(8192))[0] for _ in range(200)})
"""), options=("--heap-min", "8K"))
    assert answer.stdout == "rw-s rw-s\n", answer


def children_have_none(heap):
    """Only the program itself has its memory there."""
    code = "import os, subprocess, sys; print('LODE_HEAP' in os.environ); " \
           "print(subprocess.run([sys.executable, '-c', 'print(open(\"/proc/self/maps\").read().count(\"/heap\"))']," \
           " stdout=subprocess.PIPE, text=True).stdout.strip())"
    assert heap.run(*python(code), options=("--heap-children", "none")).stdout == "False\n0\n"
    assert len(heap.statistics()) == 1
    own = heap.run(*python(code)).stdout.split()
    assert own[0] == "True" and int(own[1]) > 0, own


def names_of_malloc(heap):
    """Every name that is exported, by its contract."""
    if not shutil.which("cc"):
        raise Skipped("cc is not installed")
    source, program = heap.path("names.c"), heap.path("names")
    with open(source, "w", encoding="ascii") as to:
        to.write(r"""
#define _GNU_SOURCE 1
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CHECK(x) do { if (!(x)) { printf("line %d: %s\n", __LINE__, #x); exit(1); } } while (0)
static volatile size_t huge = (size_t)-1 / 2, nothing = 0;
int main(void)
{
    for (size_t align = 8; align <= 1 << 22; align *= 2) {
        void *p = NULL;
        errno = 7;
        CHECK(posix_memalign(&p, align, 100) == 0 && (uintptr_t)p % align == 0 && errno == 7);
        memset(p, 1, malloc_usable_size(p));
        free(p);
        for (size_t small = 0; small < 4; small++) {
            CHECK(posix_memalign(&p, align, small * 8 / 3) == 0 && (uintptr_t)p % align == 0);
        }
        p = memalign(align, 5000);
        CHECK((uintptr_t)p % align == 0 && malloc_usable_size(p) >= 5000);
        free(p);
        p = aligned_alloc(align, align);
        CHECK((uintptr_t)p % align == 0);
        free(p);
    }
    void *p;
    CHECK(posix_memalign(&p, 24, 8) == EINVAL && posix_memalign(&p, 4, 8) == EINVAL);
    CHECK(posix_memalign(&p, 16, huge) == ENOMEM);
    errno = 0; CHECK(!malloc(huge) && errno == ENOMEM);
    errno = 0; CHECK(!calloc(huge, 4) && errno == ENOMEM);
    errno = 0; CHECK(!reallocarray(NULL, huge, 4) && errno == ENOMEM);
    p = malloc(100); memset(p, 5, 100);
    errno = 0; CHECK(!realloc(p, huge) && errno == ENOMEM && ((char *)p)[99] == 5);
    p = reallocarray(p, 50, 100); CHECK(((char *)p)[99] == 5);
    free(p);
    CHECK((p = malloc(nothing)) != NULL); free(p);
    CHECK((p = calloc(nothing, 5)) != NULL); free(p);
    CHECK((p = realloc(NULL, 10)) != NULL); free(p);
    for (size_t bytes = 1; bytes < 8 << 20; bytes *= 4) CHECK(realloc(malloc(bytes), nothing) == NULL);
    for (int i = 0; i < 1000; i++) {
        void *a = memalign(4096, 5000), *b = malloc(8192), *c = memalign(64, 4000);
        memset(a, 1, malloc_usable_size(a)); memset(b, 2, malloc_usable_size(b)); memset(c, 3, malloc_usable_size(c));
        CHECK(((char *)a)[4999] == 1 && ((char *)b)[8191] == 2 && ((char *)c)[3999] == 3);
        free(a); free(b); free(c);
    }
    free(NULL);
    CHECK(malloc_usable_size(NULL) == 0);
    p = valloc(10); CHECK((uintptr_t)p % 4096 == 0); free(p);
    p = pvalloc(10); CHECK((uintptr_t)p % 4096 == 0 && malloc_usable_size(p) >= 4096); free(p);
    for (size_t bytes = 1; bytes < 64 << 20; bytes *= 3) {
        unsigned char *z = malloc(bytes);
        memset(z, 255, bytes); free(z);
        z = calloc(bytes, 1);
        for (size_t i = 0; i < bytes; i++) CHECK(z[i] == 0);
        free(z);
    }
    puts("fine");
    return 0;
}
""")
    assert plain("cc", "-O0", "-fno-builtin", "-w", source, "-o", program).returncode == 0
    for options in ((), ("--heap-min", "4K"), ("--heap-min", "8K"), ("--heap-min", "1"), ("--heap-min", "16"), ("--heap-min", "1M"), ("--heap-full", "fail")):
        answer = heap.run(program, options=options)
        assert answer.stdout == "fine\n" and answer.returncode == 0, (options, answer)
    # The library without a media is an allocator like any other.
    library = os.path.join(os.path.dirname(heap.lode), "liblode_preload.so")
    assert plain(program, env=os.environ | {"LD_PRELOAD": library}).stdout == "fine\n"


def loaded_later(heap):
    """Many libraries with thread-local variables, loaded after the start: the linker allocates while it makes room for them."""
    if not shutil.which("cc"):
        raise Skipped("cc is not installed")
    for n in range(40):
        with open(heap.path(f"t{n}.c"), "w", encoding="ascii") as to:
            to.write(f"__thread int v{n} = {n}; int get{n}(void) {{ return v{n}++; }}\n")
        built = plain("cc", "-shared", "-fPIC", heap.path(f"t{n}.c"), "-o", heap.path(f"t{n}.so"))
        assert built.returncode == 0, built
    heap.same(*python(f"""
import ctypes, threading
loaded, total = [], []
def use():
    total.append(sum(getattr(library, "get%d" % n)() for n, library in enumerate(loaded)))
for n in range(40):
    loaded.append(ctypes.CDLL("{heap.folder}/t%d.so" % n))
    t = threading.Thread(target=use); t.start(); t.join()
print(sum(total))
"""))


def library_loaded_later(heap):
    """The C library, with an allocator of its own in it, is loaded by a program that runs."""
    library = os.path.join(os.path.dirname(heap.lode), "liblodestone.so")
    answer = plain(*python(f"""
import ctypes
lode = ctypes.CDLL({library!r})
lode.lode_memory_open.restype = lode.lode_memory_alloc.restype = ctypes.c_void_p
lode.lode_memory_open.argtypes = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int
lode.lode_memory_alloc.argtypes = ctypes.c_void_p, ctypes.c_size_t
memory = lode.lode_memory_open({heap.media!r}.encode(), 64 << 20, 1)
at = lode.lode_memory_alloc(memory, 1 << 20)
ctypes.memset(at, 76, 1 << 20)
print(open({heap.media!r}, "rb").read().count(b"L" * (1 << 20)))
"""))
    assert answer.stdout == "1\n", answer


def static_storage(heap):
    """What is preloaded has its thread-local variables in the space of the start (DF_STATIC_TLS): see its Cargo.toml."""
    del heap
    library = os.path.join(os.path.dirname(LODE), "liblode_preload.so")
    with open(library, "rb") as file:
        image = file.read()
    headers, = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    dynamic = [struct.unpack_from("<IIQQQQ", image, headers + n * size) for n in range(count)]
    _, _, at, _, _, length = next(found for found in dynamic if found[0] == 2)
    entries = [struct.unpack_from("<qQ", image, at + n) for n in range(0, length, 16)]
    flags = next((value for tag, value in entries if tag == 30), 0)
    assert flags & 0x10, f"{library} was built with the library that others load later: make binaries"


def ends(heap):
    """Exit codes and signals are the program's own."""
    for code in (0, 1, 3, 255):
        assert heap.run("sh", "-c", f"exit {code}").returncode == code
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
        assert heap.run("sh", "-c", f"kill -{int(number)} $$").returncode == -number
    assert heap.run("no-such-program").returncode == 127
    assert heap.run("/etc/passwd").returncode == 126
    child = subprocess.Popen(heap.command(*python(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); print('up', flush=True); time.sleep(60)")),
        stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    child.terminate()
    assert child.wait(SECONDS_MAX) == 42
    child.stdout.close()


def bad_media(heap):
    """One line each, and the program does not run."""
    def refused(word, media, size=None):
        heap.media = media
        answer = heap.run("echo", "ran", size=size)
        assert answer.returncode == 1 and answer.stdout == "" and answer.stderr.count("\n") == 1, answer
        assert answer.stderr.startswith("lode: ") and word in answer.stderr, answer

    refused("give a size", heap.path("missing"))
    refused("a directory", heap.folder)
    refused("No such file", heap.path("no/where"), "64M")
    refused("character device", "/dev/null")
    small = heap.path("short")
    with open(small, "wb") as to:
        to.truncate(MIB)
    refused("give a larger size", small)
    letter = heap.path("letter")
    with open(letter, "wb") as to:
        to.write(b"dear" * (4 * MIB))
    refused("holds other data", letter)
    image = heap.path("image")
    with open(image, "wb") as to:
        to.truncate(32 * MIB)
        to.seek(0x10040)
        to.write(b"_BHRfS_M")
    refused("begins with zeros", image)
    refused("begins with zeros", image, "64M")
    assert os.path.getsize(image) == 32 * MIB
    pool = heap.path("pool")
    assert plain(heap.lode, "mkfs", pool, "--size", "64M").returncode == 0
    refused("holds a pool", pool)
    heap.media = heap.path("kept")
    assert heap.run("true").returncode == 0
    os.chmod(heap.media, 0o444)
    if os.geteuid() == 0:
        # Root may write all files, but not on a file system that is mounted read-only.
        folder = heap.path("ro")
        os.mkdir(folder)
        mounted = plain("mount", "-t", "tmpfs", "-o", "ro", "none", folder).returncode == 0
        try:
            if mounted:
                refused("ead-only", os.path.join(folder, "heap"), "64M")
        finally:
            plain("umount", "-l", folder)
    else:
        refused("ermission denied", heap.media)
    usage = plain(heap.lode, "run", "--heap", heap.media, "--heap-size", "1K", "--", "true")
    assert usage.returncode == 2 and "too small" in usage.stderr, usage


def unreachable(heap):
    """A program that no library reaches runs, and that is said."""
    if not shutil.which("gcc"):
        raise Skipped("gcc is not installed")
    with open(heap.path("s.c"), "w", encoding="ascii") as to:
        to.write("#include <stdio.h>\nint main(void) { puts(\"ran\"); return 5; }\n")
    if plain("gcc", "-static", heap.path("s.c"), "-o", heap.path("s")).returncode:
        raise Skipped("there is no static C library")
    answer = heap.run(heap.path("s"))
    assert (answer.returncode, answer.stdout) == (5, "ran\n") and "linked statically" in answer.stderr, answer


def own_allocator(heap):
    """A program with a malloc of its own runs, in DRAM, and that is said; or it does not, where nothing but the media was asked for."""
    source, program = heap.path("own.c"), heap.path("own")
    with open(source, "w", encoding="ascii") as to:
        to.write(r"""
#define _GNU_SOURCE 1
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static _Alignas(16) char room[8 << 20];
static size_t used;
void *malloc(size_t bytes)
{
    size_t *p = (size_t *)(room + used);
    used += (bytes + 31) & ~(size_t)15;
    if (used > sizeof room) abort();
    *p = bytes;
    return p + 2;
}
void free(void *p) { if (p && ((char *)p < room || (char *)p >= room + sizeof room)) abort(); }
void *calloc(size_t n, size_t bytes) { return memset(malloc(n * bytes), 0, n * bytes); }
void *realloc(void *p, size_t bytes)
{
    void *to = malloc(bytes);
    if (p) { free(p); size_t had = ((size_t *)p)[-2]; memcpy(to, p, had < bytes ? had : bytes); }
    return to;
}
int main(void)
{
    char *p = strdup("ran");
    p = reallocarray(p, 1000, 10);
    puts(p);
    free(p);
    return 0;
}
""")
    assert plain("cc", "-O0", "-fno-builtin", "-w", source, "-o", program).returncode == 0
    assert plain(program).stdout == "ran\n"
    answer = heap.run(program)
    assert (answer.returncode, answer.stdout) == (0, "ran\n") and answer.stderr.count("\n") == 1, answer
    assert "an allocator of its own" in answer.stderr and program in answer.stderr, answer
    answer = heap.run(program, options=("--heap-full", "fail"))
    assert (answer.returncode, answer.stdout) == (1, "") and "an allocator of its own" in answer.stderr, answer


def nothing_is_left(heap):
    """A process that is killed leaves nothing claimed."""
    child = subprocess.Popen(heap.command(*python(
        "x = bytearray(40 << 20); x[::4096] = b'1' * 10240; print('up', flush=True); import time; time.sleep(60)"), size="64M"),
        stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    fits = python("x = bytearray(40 << 20); x[::4096] = b'2' * 10240; print(len(x))")
    beside = heap.run(*fits, size="64M", options=("--heap-full", "fail"))
    assert beside.returncode != 0, "there was no room beside it"
    child.kill()
    child.wait()
    child.stdout.close()
    after = heap.run(*fits, size="64M", options=("--heap-full", "fail"))
    assert after.stdout == f"{40 * MIB}\n", after


TESTS = [
    static_storage, library_loaded_later, on_media, threads, fork, fork_with_threads, multiprocessing, daemon, memory_comes_back, fork_without_memory,
    rights_given_up, begin_at_once, signals_are_left_alone, devices, sqlite, sort, compiler,
    pipeline, full_falls_back, full_fails, host_full, least_bytes, children_have_none, names_of_malloc, loaded_later, ends,
    bad_media, unreachable, own_allocator, nothing_is_left,
]


def main():
    passed = failed = skipped = 0
    # On memory where there is some: a media of a disk would be measured by its disk.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lode-heap-", dir=place) as top:
        for test in TESTS:
            if OPTIONS.only and test.__name__ not in OPTIONS.only.split(","):
                continue
            folder = os.path.join(top, test.__name__)
            os.mkdir(folder)
            try:
                test(Heap(folder, LODE))
                passed += 1
            except Skipped as why:
                skipped += 1
                print(f"SKIP {test.__name__}: {why}")
            except (AssertionError, subprocess.TimeoutExpired, OSError, ValueError, IndexError, KeyError) as e:
                failed += 1
                said = re.sub(r"\n+", "\n  ", str(e) or repr(e))
                print(f"FAIL {test.__name__}: line {e.__traceback__.tb_next.tb_lineno if e.__traceback__.tb_next else 0}\n  {said[:3000]}")
            shutil.rmtree(folder, ignore_errors=True)
    print(f"heap: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lode", default=os.environ.get("LODE") or os.path.join(TARGET, "release", "lode"))
    parser.add_argument("--only", default="", help="of " + ", ".join(test.__name__ for test in TESTS))
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()
    LODE = os.path.abspath(OPTIONS.lode)
    sys.exit(main())
