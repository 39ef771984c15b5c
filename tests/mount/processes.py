"""Several processes on one mount: what they share must behave as on any local file system.

The predecessors of this file system failed here first: a second process got EIO, or its locks silently
did nothing.
"""

import errno
import fcntl
import mmap
import os
import random
import signal
import struct
import time
import traceback
import zlib

from conformance import PAGE, fails_with, pattern, read_file, write_file

WRITERS = 2
RECORDS = 5000
COUNTERS = 4
TURNS = 400
CROSSINGS = 2000
F_OFD_SETLK = 37


def start(call, *arguments):
    """Runs `call` in a child process; `finish` collects its failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            call(*arguments)
        except BaseException:
            os.write(writer, traceback.format_exc(limit=-3).encode()[-4000:])
        os._exit(0)
    os.close(writer)
    return child, reader


def finish(*children):
    """Waits for all, then fails with the first failure."""
    failures = []
    for child, reader in children:
        with os.fdopen(reader, "rb") as pipe:
            failures.append(pipe.read().decode())
        os.waitpid(child, 0)
    assert not any(failures), "; ".join(filter(None, failures))


def append(context):
    """Two processes append to one file: no record lost, torn or out of order"""
    path = context.path("log")
    write_file(path, b"")
    finish(*[start(append_records, path, writer) for writer in range(WRITERS)])
    expected = [0] * WRITERS
    for line in read_file(path).splitlines():
        writer, number, crc, body = line.split(b" ", 3)
        assert int(crc, 16) == zlib.crc32(body), f"a torn record: {line[:80]}"
        assert int(number) == expected[int(writer)], f"writer {writer}: {number} after {expected[int(writer)] - 1}"
        expected[int(writer)] += 1
    assert expected == [RECORDS] * WRITERS, f"records found: {expected}"


def append_records(path, writer):
    """Lines of 1 to 9,000 bytes, so that some cross pages and some cross several."""
    lengths = random.Random(writer)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in range(RECORDS):
        body = b"%c" % (97 + writer) * (lengths.randrange(1, 200) if number % 50 else lengths.randrange(1, 9000))
        record = b"%d %d %08x %s\n" % (writer, number, zlib.crc32(body), body)
        assert os.write(fd, record) == len(record)
    os.close(fd)


def flock(context):
    """flock between processes: exclusive, shared, released by death"""
    path = context.path("lock")
    write_file(path, b"")
    count_under(context, path, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN))
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_SH)
    fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try_exclusively = lambda: fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    finish(start(fails_with, errno.EAGAIN, try_exclusively))
    os.close(first)
    os.close(second)
    released_by_death(path, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def fcntl_locks(context):
    """fcntl and open-file-description locks between processes, by byte range"""
    path = context.path("lock")
    write_file(path, pattern(100))
    count_under(context, path, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX, 10, 5), lambda fd: fcntl.lockf(fd, fcntl.LOCK_UN, 10, 5))
    held = os.open(path, os.O_RDWR)
    fcntl.lockf(held, fcntl.LOCK_EX, 10, 20)
    finish(start(beside_a_lock, path, os.getpid()))
    os.close(held)
    released_by_death(path, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    one, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    write_lock = struct.pack("hhqqhxx", fcntl.F_WRLCK, 0, 0, 0, 0)
    fcntl.fcntl(one, F_OFD_SETLK, write_lock)
    fails_with(errno.EAGAIN, fcntl.fcntl, other, F_OFD_SETLK, write_lock)
    os.close(one)
    fcntl.fcntl(other, F_OFD_SETLK, write_lock)
    os.close(other)


def beside_a_lock(path, holder):
    """Another process: refused inside bytes 20..30, told who holds them, free to lock beside them."""
    fd = os.open(path, os.O_RDWR)
    fails_with(errno.EAGAIN, fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 29)
    fails_with(errno.EAGAIN, fcntl.lockf, fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 0, 0)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 20, 0)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 30)
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 25, 1, 0))
    kind, _, begin, length, pid = struct.unpack("hhqqi4x", answer)
    assert (kind, begin, length, pid) == (fcntl.F_WRLCK, 20, 10, holder), (kind, begin, length, pid)


def count_under(context, lock_path, lock, unlock):
    """Processes increment one number in a file; without mutual exclusion, increments are lost."""
    path = context.path("counter")
    write_file(path, b"0")
    finish(*[start(increment, path, lock_path, lock, unlock) for _ in range(COUNTERS)])
    assert int(read_file(path)) == COUNTERS * TURNS, f"{int(read_file(path))} of {COUNTERS * TURNS} increments"


def increment(path, lock_path, lock, unlock):
    fd, guard = os.open(path, os.O_RDWR), os.open(lock_path, os.O_RDWR)
    for _ in range(TURNS):
        lock(guard)
        value = int(os.pread(fd, 20, 0))
        os.pwrite(fd, b"%d" % (value + 1), 0)
        unlock(guard)


def released_by_death(path, lock, try_lock):
    """A process that holds the lock is killed; the next one gets it."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        lock(os.open(path, os.O_RDWR))
        os.write(told, b"!")
        signal.pause()
    os.close(told)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    fd = os.open(path, os.O_RDWR)
    fails_with(errno.EAGAIN, try_lock, fd)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # The kernel tells the server of a closed file after the process is gone.
    give_up = time.monotonic() + 5
    while True:
        try:
            try_lock(fd)
            break
        except BlockingIOError:
            assert time.monotonic() < give_up, "the lock of a dead process stays"
            time.sleep(0.01)
    os.close(fd)


def rename_race(context):
    """Readers of a file that others replace by rename see an old or a new one, never none or half"""
    path = context.path("current")
    write_file(path, b"0" * 8192)
    stop = context.outside("stop")
    readers = [start(read_whole, path, stop) for _ in range(2)]
    for turn in range(1500):
        fresh = context.path(f"fresh{turn % 3}")
        write_file(fresh, b"%d" % (turn % 10) * 8192)
        os.rename(fresh, path)
    write_file(stop, b"")
    finish(*readers)


def read_whole(path, stop):
    turns = 0
    while not os.path.exists(stop) or turns < 100:
        data = read_file(path)
        assert len(data) == 8192 and data.count(data[:1]) == 8192, f"{len(data)} bytes, mixed"
        turns += 1


def shared_memory_map(context):
    """Two processes map one file and hand a number to and fro through its memory"""
    path = context.path("map")
    write_file(path, bytes(2 * PAGE))
    finish(*[start(pass_on, path, player) for player in range(2)])
    assert struct.unpack_from("q", read_file(path), PAGE)[0] == 2 * TURNS


def pass_on(path, player):
    """Counts up whenever the number's parity is this player's; nothing but the mapping connects the two."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 2 * PAGE) as mapped:
        give_up = time.monotonic() + 30
        for turn in range(TURNS):
            while struct.unpack_from("q", mapped, PAGE)[0] != 2 * turn + player:
                assert time.monotonic() < give_up, f"turn {turn} never came"
                time.sleep(0)
            struct.pack_into("q", mapped, PAGE, 2 * turn + player + 1)


def create_race(context):
    """O_EXCL, mkdir and link: of many processes that try at once, one wins each name"""
    os.mkdir(context.path("d"))
    wins = context.outside("wins")
    write_file(wins, b"")
    finish(*[start(try_names, context.path("d"), wins) for _ in range(4)])
    won = read_file(wins).split()
    assert len(won) == len(set(won)) == 600, f"{len(won)} wins for {len(set(won))} of 600 names"
    assert len(os.listdir(context.path("d"))) == 601


def try_names(directory, wins):
    own = os.path.join(directory, f"own{os.getpid()}")
    write_file(own, b"")
    log = os.open(wins, os.O_WRONLY | os.O_APPEND)
    for i in range(200):
        for kind, take in (
            ("file", lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))),
            ("dir", os.mkdir),
            ("link", lambda path: os.link(own, path)),
        ):
            try:
                take(os.path.join(directory, f"{kind}{i}"))
            except FileExistsError:
                continue
            os.write(log, f"{kind}{i}\n".encode())
    os.unlink(own)
    os.close(log)
    if not os.path.exists(os.path.join(directory, "done")):
        write_file(os.path.join(directory, "done"), b"")


def late_answers(context):
    """Answers about attributes that cross a change are not kept: names, directories, attributes, holes, reads"""
    program = context.outside("late_answers")
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "late_answers.c")
    context.run("gcc", "-O1", "-pthread", "-o", program, source)
    os.mkdir(context.path("late"))
    context.run(program, context.path("late"), str(CROSSINGS))


SUITES = [append, flock, fcntl_locks, rename_race, shared_memory_map, create_race, late_answers]
