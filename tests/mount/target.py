"""The file system under test: a fresh pool behind a FUSE mount, or a known good one to test the tests.

A suite sees only `dir`. What a suite may ask beyond that (kill the server, mount again) depends on the
target; one that cannot do it raises `Skip`, so that a suite never passes without having run.

Every suite passes on tmpfs or ext4 before its verdict on Lodestone counts: `run.py --on tmpfs`.
"""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import time


PIECE = 1 << 16


class Skip(Exception):
    """This suite cannot run here; the message says why."""


def mount_option(directory, name):
    """Whether `directory` is a mount point that carries the option `name`."""
    wanted = os.path.realpath(directory)
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            fields = line.split()
            if fields[4].encode().decode("unicode_escape") == wanted:
                return name in fields[5].split(",")
    return False


class Target:
    """A file system made afresh in `work`, mounted on `dir`."""

    name = "?"

    def __init__(self, work, log, mib):
        self.work = work
        self.log = log
        self.mib = mib
        self.dir = os.path.join(work, "mnt")
        os.makedirs(self.dir, exist_ok=True)

    def run(self, *command):
        print("+", *command, file=self.log, flush=True)
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, check=True)

    def make(self):
        """Makes the file system and mounts it."""
        raise NotImplementedError

    def mount(self):
        raise Skip(f"{self.name} is not remounted by these tests")

    def unmount(self):
        """A clean unmount; fails where the file system is busy."""
        if os.path.ismount(self.dir):
            self.run("umount", self.dir)

    def kill(self):
        """SIGKILL to the process that serves the mount."""
        raise Skip(f"{self.name} has no server process to kill")

    def stop(self):
        """SIGTERM to that process, begun; `stopped` waits for its end, with status 0."""
        raise Skip(f"what a server of {self.name} does at SIGTERM is its own business")

    def free(self):
        """Nothing stays mounted, whatever happened."""
        subprocess.run(["umount", "-l", self.dir], stdout=self.log, stderr=self.log, check=False)


class Tmpfs(Target):
    name = "tmpfs"

    def make(self):
        self.run("mount", "-t", "tmpfs", "-o", f"size={self.mib}m,mode=755", "none", self.dir)


class Ext4(Target):
    name = "ext4"

    def make(self):
        self.image = os.path.join(self.work, "ext4.img")
        with open(self.image, "wb") as image:
            image.truncate(self.mib << 20)
        # -N: as many inodes as the suites need files, where 1 for 16 KiB would be too few.
        self.run("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "40000", self.image)
        self.mount()

    def mount(self):
        self.run("mount", "-o", "loop", self.image, self.dir)
        shutil.rmtree(os.path.join(self.dir, "lost+found"), ignore_errors=True)


class Served(Target):
    """A FUSE mount: its server is a child process of ours, which can be killed."""

    mount_s_max = 30
    server = None

    def command(self):
        """What serves the mount in the foreground."""
        raise NotImplementedError

    def mount(self):
        print("+", *self.command(), "&", file=self.log, flush=True)
        outside = os.stat(self.dir).st_dev
        self.server = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        give_up = time.monotonic() + self.mount_s_max
        while os.stat(self.dir).st_dev == outside:
            if self.server.poll() is not None:
                raise AssertionError(f"the mount server ended with status {self.server.returncode}")
            if time.monotonic() > give_up:
                raise AssertionError(f"nothing was mounted within {self.mount_s_max} s")
            time.sleep(0.01)

    def unmount_command(self):
        return ["umount", self.dir]

    def unmount(self):
        if not self.server:
            return
        self.run(*self.unmount_command())
        status = self.server.wait(timeout=self.mount_s_max)
        self.server = None
        if status != 0:
            raise AssertionError(f"after umount the mount server ended with status {status}, not 0")

    def kill(self):
        """The server dies in whatever it does; the dead mount is taken away."""
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        self.server = None
        self.run("umount", "-l", self.dir)

    def free(self):
        if self.server:
            self.server.kill()
            self.server.wait()
        super().free()


class Lode(Served):
    name = "lode"
    binary = "lode"
    options = "allow_other"

    def make(self):
        self.pool = os.path.join(self.work, "test.pool")
        self.run(self.binary, "mkfs", self.pool, "--size", f"{self.mib}M", "--force")
        self.mount()

    def command(self):
        return [self.binary, "mount", self.pool, self.dir, "-f", "-o", self.options]

    def unmount_command(self):
        return [self.binary, "umount", self.dir]

    def stop(self):
        self.server.send_signal(signal.SIGTERM)

    def stopped(self):
        status = self.server.wait(timeout=self.mount_s_max)
        self.server = None
        assert status == 0, f"after SIGTERM the mount server ended with status {status}, not 0"


class Bindfs(Served):
    """tmpfs seen through FUSE: what fails here too is the kernel's FUSE, not Lodestone."""

    name = "bindfs"

    def make(self):
        self.below = os.path.join(self.work, "below")
        os.mkdir(self.below)
        self.run("mount", "-t", "tmpfs", "-o", f"size={self.mib}m,mode=755", "none", self.below)
        self.mount()

    def command(self):
        return ["bindfs", "-f", "-o", "allow_other,dev,suid", self.below, self.dir]

    def free(self):
        super().free()
        subprocess.run(["umount", "-l", self.below], stdout=self.log, stderr=self.log, check=False)


TARGETS = {target.name: target for target in (Lode, Tmpfs, Ext4, Bindfs)}


def tree(root, contents=True):
    """Everything that stat and read can say of a tree, by path, times of reading left out."""
    found = {}
    for parent, directories, files in os.walk(os.fsencode(root)):
        for name in directories + files:
            path = os.path.join(parent, name)
            found[os.path.relpath(path, os.fsencode(root))] = describe(path, contents)
    return found


def describe(path, contents=True):
    """What must be the same of one file before and after a mount."""
    meta = os.lstat(path)
    says = [meta.st_mode, meta.st_uid, meta.st_gid, meta.st_mtime_ns, meta.st_ctime_ns, meta.st_ino, meta.st_nlink]
    if not stat.S_ISDIR(meta.st_mode):
        says += [meta.st_size, meta.st_rdev]
    if stat.S_ISLNK(meta.st_mode):
        says.append(os.readlink(path))
    else:
        for name in sorted(os.listxattr(path, follow_symlinks=False)):
            says.append((name, os.getxattr(path, name, follow_symlinks=False)))
    if contents and stat.S_ISREG(meta.st_mode):
        says.append(digest(path, meta.st_size))
    return tuple(says)


def digest(path, size):
    """Of the data, holes skipped: a sparse file may claim a TiB. Zeros count as a hole."""
    hasher = hashlib.blake2b()
    with open(path, "rb") as file:
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            piece = os.pread(file.fileno(), PIECE - at % PIECE, at)
            if piece.count(0) < len(piece):
                hasher.update(at.to_bytes(8, "little") + piece)
            at += len(piece)
    return hasher.hexdigest()


def differences(before, after, limit=10):
    """The first paths on which two trees disagree, for people."""
    lines = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            lines.append(f"{os.fsdecode(path)}: {before.get(path)} became {after.get(path)}")
    return lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])
