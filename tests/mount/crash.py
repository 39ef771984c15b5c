"""The server is killed (SIGKILL) while programs write; what it had acknowledged must be there.

A process crash loses nothing in any persistence domain: stores that were made stay in the page cache
or the memory. So every call that returned counts, synced or not. The writer notes each call that
returned in a file outside of the mount; the same seed then replays the calls on a model, and the tree
found after the next mount must equal the model after all acknowledged calls, or after one more (the
call that was interrupted happened wholly or not at all). Nothing else may differ.

One call is more than one operation to the server: the kernel cuts a cached write(2) at page boundaries
into FUSE requests as it likes, and each of these is atomic. So an interrupted write may leave its first
pages, cut at a page boundary and nowhere else; what a short write acknowledged is there.
"""

import errno
import mmap
import os
import random
import sqlite3
import stat
import time

from conformance import AT_FDCWD, PAGE, RENAME_EXCHANGE, fill, libc, pattern, read_file, write_file
from processes import finish, start
from programs import check_database, connect, insert

ROUNDS = 50
# In how many rounds the mount is then unmounted in good order, and must come back the same.
UNMOUNTED_EVERY = 10
WRITERS = 3
WRITE_BYTES_MAX = 32_768
FILE_BYTES_MAX = 200_000


class Model:
    """What the tree of one writer must hold: path -> kind and contents, hard links shared."""

    def __init__(self):
        self.entries = {}
        self.names = 0

    def copy_of(self):
        """An independent copy in which hard links stay links to one file."""
        twin, files = Model(), {}
        twin.names = self.names
        for path, entry in self.entries.items():
            if entry[0] == "file":
                entry = files.setdefault(id(entry), ["file", bytearray(entry[1]), entry[2], dict(entry[3])])
            twin.entries[path] = entry
        return twin

    def snapshot(self):
        links = {}
        for path, entry in self.entries.items():
            links.setdefault(id(entry), []).append(path)
        shown = {}
        for path, entry in self.entries.items():
            if entry[0] == "file":
                xattrs = tuple(sorted(entry[3].items()))
                shown[path] = ("file", bytes(entry[1]), entry[2], xattrs, tuple(sorted(links[id(entry)])))
            else:
                shown[path] = entry
        return shown


def found(root):
    """The same description of what is there."""
    inodes, kinds = {}, {}
    for parent, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(parent, name)
            meta = os.lstat(path)
            kinds[os.path.relpath(path, root)] = (path, meta)
            inodes.setdefault(meta.st_ino, []).append(os.path.relpath(path, root))
    shown = {}
    for relative, (path, meta) in kinds.items():
        if stat.S_ISDIR(meta.st_mode):
            shown[relative] = ("dir",)
        elif stat.S_ISLNK(meta.st_mode):
            shown[relative] = ("symlink", os.readlink(path))
        else:
            names = tuple(sorted(inodes[meta.st_ino]))
            assert meta.st_nlink == len(names), f"{relative}: {meta.st_nlink} links, names {names}"
            xattrs = tuple((name, os.getxattr(path, name)) for name in sorted(os.listxattr(path)))
            shown[relative] = ("file", read_file(path), meta.st_mode & 0o777, xattrs, names)
    return shown


class Step:
    """One call, as it changes the model and as it is made; drawn from the model's state alone.

    `cuts` are the states between, of a call that is several operations: bytes done, and their change.
    """

    def __init__(self, name, change, call, cuts=()):
        self.name, self.change, self.call, self.cuts = name, change, call, cuts


class ShortWrite(Exception):
    """The server died inside of a write(2), of which the kernel had some bytes acknowledged."""


def draw(rng, model):
    """The next call. Draws the same for the same random state and model, so that a replay agrees."""
    files = [path for path, entry in model.entries.items() if entry[0] == "file"]
    directories = [""] + [path for path, entry in model.entries.items() if entry[0] == "dir"]
    others = [path for path, entry in model.entries.items() if entry[0] == "symlink"]
    model.names += 1
    fresh = os.path.join(rng.choice(directories), f"n{model.names}")
    kinds = ["create", "mkdir", "symlink"]
    if files:
        kinds += ["write"] * 6 + ["append"] * 6 + ["mapped", "truncate", "link", "unlink", "rename", "replace", "exchange"]
        kinds += ["chmod", "setxattr", "setxattr", "removexattr", "fsync"]
    if len(files) > 60:
        kinds += ["unlink"] * 6
    if len(directories) > 3:
        kinds += ["rename_dir"] * 2
    if len(directories) > 12:
        kinds += ["rmdir"] * 6
    if others:
        kinds += ["unlink_other"]
    kind = rng.choice(kinds)
    pick = lambda: rng.choice(files)
    return STEPS[kind](rng, model, fresh, pick, directories, others)


def step_create(rng, model, fresh, pick, directories, others):
    mode = rng.choice((0o644, 0o600))

    def change(entries):
        entries[fresh] = ["file", bytearray(), mode, {}]

    return Step(f"create {fresh}", change, lambda at: os.close(os.open(at(fresh), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)))


def step_mkdir(rng, model, fresh, pick, directories, others):
    return Step(f"mkdir {fresh}", lambda entries: entries.update({fresh: ("dir",)}), lambda at: os.mkdir(at(fresh)))


def step_symlink(rng, model, fresh, pick, directories, others):
    target = "t" * rng.randrange(1, 300)
    return Step(f"symlink {fresh}", lambda entries: entries.update({fresh: ("symlink", target)}), lambda at: os.symlink(target, at(fresh)))


def on_descriptor(path, flags, call):
    """open, `call`, close; only `call` changes anything."""

    def run(at):
        fd = os.open(at(path), flags)
        try:
            call(fd)
        finally:
            os.close(fd)

    return run


def step_write(rng, model, fresh, pick, directories, others):
    path = pick()
    size = len(model.entries[path][1])
    at = rng.randrange(min(size + 3 * PAGE, FILE_BYTES_MAX - WRITE_BYTES_MAX))
    data = rng.randbytes(rng.choice((1, 64, 500, PAGE, rng.randrange(1, WRITE_BYTES_MAX))))
    return written(f"write {path}", path, at, data, os.O_WRONLY, lambda fd: os.pwrite(fd, data, at))


def step_append(rng, model, fresh, pick, directories, others):
    path = pick()
    at = len(model.entries[path][1])
    data = rng.randbytes(rng.choice((1, 100, PAGE, rng.randrange(1, WRITE_BYTES_MAX))))
    if at + len(data) > FILE_BYTES_MAX:
        return truncated(path, 10)
    return written(f"append {path}", path, at, data, os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, data))


def step_mapped(rng, model, fresh, pick, directories, others):
    """A store through a mapping, within one page, acknowledged by msync."""
    path = pick()
    size = len(model.entries[path][1])
    if size < 2:
        return truncated(path, 3 * PAGE)
    at = rng.randrange(size - 1)
    data = rng.randbytes(min(rng.randrange(1, 200), size - at, PAGE - at % PAGE))

    def call(fd):
        with mmap.mmap(fd, size) as mapped:
            mapped[at : at + len(data)] = data
            mapped.flush()

    return Step(f"msync {path} {at}+{len(data)}", store(path, at, data), on_descriptor(path, os.O_RDWR, call))


def step_truncate(rng, model, fresh, pick, directories, others):
    path = pick()
    return truncated(path, rng.randrange(len(model.entries[path][1]) + 2 * PAGE))


def truncated(path, size):
    def change(entries):
        data = entries[path][1]
        data[size:] = bytes(max(0, size - len(data)))

    return Step(f"truncate {path} {size}", change, lambda at: os.truncate(at(path), size))


def step_chmod(rng, model, fresh, pick, directories, others):
    path, mode = pick(), rng.choice((0o640, 0o604, 0o755))

    def change(entries):
        entries[path][2] = mode

    return Step(f"chmod {path} {mode:o}", change, lambda at: os.chmod(at(path), mode))


def step_setxattr(rng, model, fresh, pick, directories, others):
    path, name = pick(), f"user.{rng.randrange(4)}"
    value = rng.randbytes(rng.choice((0, 20, 300)))

    def change(entries):
        entries[path][3][name] = value

    return Step(f"setxattr {path} {name}", change, lambda at: os.setxattr(at(path), name, value))


def step_removexattr(rng, model, fresh, pick, directories, others):
    path = pick()
    names = sorted(model.entries[path][3])
    if not names:
        return step_setxattr(rng, model, fresh, lambda: path, directories, others)
    return Step(
        f"removexattr {path} {names[0]}", lambda entries: entries[path][3].pop(names[0]),
        lambda at: os.removexattr(at(path), names[0]),
    )


def step_fsync(rng, model, fresh, pick, directories, others):
    path = pick()
    return Step(f"fsync {path}", lambda entries: None, on_descriptor(path, os.O_RDONLY, os.fsync))


def step_link(rng, model, fresh, pick, directories, others):
    path = pick()
    return Step(f"link {path} {fresh}", lambda entries: entries.update({fresh: entries[path]}), lambda at: os.link(at(path), at(fresh)))


def step_unlink(rng, model, fresh, pick, directories, others):
    path = pick()
    return Step(f"unlink {path}", lambda entries: entries.pop(path), lambda at: os.unlink(at(path)))


def step_unlink_other(rng, model, fresh, pick, directories, others):
    path = rng.choice(others)
    return Step(f"unlink {path}", lambda entries: entries.pop(path), lambda at: os.unlink(at(path)))


def step_rename(rng, model, fresh, pick, directories, others):
    path = pick()
    return Step(f"rename {path} {fresh}", lambda entries: entries.update({fresh: entries.pop(path)}), lambda at: os.rename(at(path), at(fresh)))


def step_replace(rng, model, fresh, pick, directories, others):
    path, over = pick(), pick()

    def change(entries):
        # Two names of one file: rename does nothing and succeeds.
        if entries[path] is not entries[over]:
            entries[over] = entries.pop(path)

    return Step(f"rename {path} over {over}", change, lambda at: os.rename(at(path), at(over)))


def step_exchange(rng, model, fresh, pick, directories, others):
    path, other = pick(), pick()

    def change(entries):
        entries[path], entries[other] = entries[other], entries[path]

    return Step(
        f"exchange {path} {other}", change,
        lambda at: libc("renameat2", AT_FDCWD, os.fsencode(at(path)), AT_FDCWD, os.fsencode(at(other)), RENAME_EXCHANGE),
    )


def step_rename_dir(rng, model, fresh, pick, directories, others):
    """A directory with all below it moves to another parent, never to one below itself."""
    path = rng.choice(directories[1:])
    parent = rng.choice([d for d in directories if d != path and not d.startswith(path + "/")])
    to = os.path.join(parent, os.path.basename(fresh))

    def change(entries):
        for name in [name for name in entries if name == path or name.startswith(path + "/")]:
            entries[to + name[len(path) :]] = entries.pop(name)

    return Step(f"rename directory {path} {to}", change, lambda at: os.rename(at(path), at(to)))


def step_rmdir(rng, model, fresh, pick, directories, others):
    empty = [path for path in directories[1:] if not any(name.startswith(path + "/") for name in model.entries)]
    if not empty:
        return step_create(rng, model, fresh, pick, directories, others)
    path = rng.choice(empty)
    return Step(f"rmdir {path}", lambda entries: entries.pop(path), lambda at: os.rmdir(at(path)))


STEPS = {name.removeprefix("step_"): step for name, step in list(globals().items()) if name.startswith("step_")}


def store(path, at, data):
    def change(entries):
        held = entries[path][1]
        if len(held) < at:
            held.extend(bytes(at - len(held)))
        held[at : at + len(data)] = data

    return change


def written(name, path, at, data, flags, write):
    """A write(2) with the places at which the kernel may have cut it."""
    boundaries = range(at - at % PAGE + PAGE, at + len(data), PAGE)
    cuts = [(end - at, store(path, at, data[: end - at])) for end in boundaries]

    def call(fd):
        done = write(fd)
        if done != len(data):
            raise ShortWrite(done)

    return Step(f"{name} {at}+{len(data)}", store(path, at, data), on_descriptor(path, flags, call), cuts)


def write_until_death(root, acknowledged, seed, model):
    """Makes calls and notes each that returned, until one fails because the server is gone."""
    rng = random.Random(seed)
    log = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    write_file(acknowledged + ".short", b"0")
    at = lambda path: os.path.join(root, path)
    while True:
        step = draw(rng, model)
        try:
            step.call(at)
        except ShortWrite as short:
            write_file(acknowledged + ".short", str(short).encode())
            os._exit(0)
        except OSError as error:
            # ENOTCONN and ECONNABORTED are what a dead FUSE server leaves, EIO what its pages do.
            if error.errno in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED):
                os._exit(0)
            # Between two calls the dead mount may have been taken away.
            if error.errno == errno.ENOENT and not os.path.lexists(root):
                os._exit(0)
            raise AssertionError(f"{step.name}: {error}") from error
        step.change(model.entries)
        os.write(log, b"!")


def replay(seed, model, count, short):
    """The states that `count` calls, and `short` bytes of one more, allow; and what that one was."""
    rng = random.Random(seed)
    for _ in range(count):
        draw(rng, model).change(model.entries)
    step = draw(rng, model.copy_of())
    changes = [step.change] + [change for done, change in step.cuts if done >= short]
    if short == 0:
        changes.append(lambda entries: None)
    states = []
    for change in changes:
        states.append(model.copy_of())
        # The name is spent, whether its call happened or not.
        states[-1].names += 1
        change(states[-1].entries)
    return states, step.name


def server_killed(context):
    """SIGKILL to the server under a mixed load, 50 times: acknowledged calls are there, the last wholly or not"""
    models = [Model() for _ in range(WRITERS)]
    roots = [context.path(f"writer{i}") for i in range(WRITERS)]
    for root in roots:
        os.mkdir(root)
    total = 0
    for turn in range(ROUNDS):
        logs = [context.outside(f"log{i}") for i in range(WRITERS)]
        seeds = [context.seed * 10_000 + turn * 100 + i for i in range(WRITERS)]
        writers = [start(write_until_death, *each) for each in zip(roots, logs, seeds, [m.copy_of() for m in models])]
        time.sleep(0.05 + 0.07 * (turn % 5))
        context.target.kill()
        finish(*writers)
        context.target.mount()
        for i in range(WRITERS):
            count = os.path.getsize(logs[i])
            context.say(f"round {turn}, writer {i}: {count} calls acknowledged")
            total += count
            models[i] = settle(roots[i], *replay(seeds[i], models[i], count, int(read_file(logs[i] + ".short"))))
        if turn % UNMOUNTED_EVERY == 0:
            context.target.unmount()
            context.target.mount()
            for root, model in zip(roots, models):
                settle(root, [model], "nothing")
    assert total > 20 * ROUNDS * WRITERS, f"only {total} calls"
    context.note = f"{total} calls acknowledged, {ROUNDS} kills"


def settle(root, states, interrupted):
    """Which of the allowed states is on the mount; anything else is a lost or torn call."""
    there = found(root)
    for model in states:
        if there == model.snapshot():
            return model
    wanted = states[-1].snapshot()
    wrong = sorted(path for path in there.keys() | wanted.keys() if there.get(path) != wanted.get(path))
    shown = "; ".join(f"{path}: {brief(wanted.get(path))} became {brief(there.get(path))}" for path in wrong[:5])
    raise AssertionError(f"neither before nor after '{interrupted}': {len(wrong)} paths differ: {shown}")


def brief(entry):
    if entry and entry[0] == "file":
        return f"file of {len(entry[1])} bytes, mode {entry[2]:o}, names {entry[4]}, {len(entry[3])} attributes"
    return entry


def server_killed_sqlite(context):
    """SIGKILL to the server under SQLite (WAL, then DELETE): integrity_check, acknowledged commits are there"""
    for mode in ("WAL", "DELETE"):
        path = context.path(f"{mode}.db")
        db = connect(path)
        assert db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0].upper() == mode
        db.execute("CREATE TABLE entries (writer INTEGER, number INTEGER, body BLOB, PRIMARY KEY (writer, number))")
        db.close()
        for turn in range(3):
            reader, pipe = os.pipe()
            client = start(insert_until_death, path, turn, pipe)
            os.close(pipe)
            time.sleep(0.3 + 0.1 * turn)
            context.target.kill()
            finish(client)
            with os.fdopen(reader, "rb") as acknowledgements:
                acknowledged = len(acknowledgements.read())
            context.target.mount()
            context.say(f"{mode}, round {turn}: {acknowledged} commits acknowledged")
            assert acknowledged > 0, "no commit before the kill"
            check_database(path, {turn: acknowledged}, exactly=False)


def insert_until_death(path, writer, pipe):
    try:
        insert(path, writer, 1 << 30, pipe)
    except sqlite3.Error:
        pass


def server_killed_full(context):
    """SIGKILL to the server of a full pool: it mounts, deletes work, the space comes back"""
    names = []
    first = fill(context, names)
    context.target.kill()
    context.target.mount()
    for name in names[:-1]:
        assert read_file(name) == pattern(60 << 10), f"{name} is torn"
    for name in names:
        os.unlink(name)
    context.target.kill()
    context.target.mount()
    assert os.listdir(context.dir) == []
    again = fill(context, [])
    assert again >= 0.97 * first, f"{first} bytes fitted at first, then only {again}"


server_killed_full.mib = 64


def server_killed_open_files(context):
    """SIGKILL to the server with nameless open files: their space comes back, nothing else is missed"""
    free = os.statvfs(context.dir).f_bfree
    write_file(context.path("stays"), pattern(PAGE))
    held = []
    for i in range(50):
        path = context.path(f"gone{i}")
        held.append(os.open(path, os.O_RDWR | os.O_CREAT))
        os.write(held[-1], pattern(100 * PAGE))
        os.unlink(path)
    taken = free - os.statvfs(context.dir).f_bfree
    assert taken * os.statvfs(context.dir).f_frsize >= 50 * 100 * PAGE
    context.target.kill()
    for fd in held:
        os.close(fd)
    context.target.mount()
    assert os.listdir(context.dir) == ["stays"], os.listdir(context.dir)
    assert read_file(context.path("stays")) == pattern(PAGE)
    left = (free - os.statvfs(context.dir).f_bfree) * os.statvfs(context.dir).f_frsize
    assert left < 1 << 20, f"{left} bytes stay taken by files that no name reaches"


SUITES = [server_killed, server_killed_sqlite, server_killed_full, server_killed_open_files]
