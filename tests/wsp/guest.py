"""A guest with a database, and `lode wsp` as its user has it.

The guest answers one request after the other on its serial line, which `lode wsp` keeps in console.log:

    @boot STORED              it was booted, with so many rows on its disk
    @request N SEEN STORED T  request N: rows in memory, rows on disk, the guest's clock
    @check N ok               the database has looked at all of itself

A guest that goes on where it was answers N + 1 after N, and has seen N + 1 of them.
"""

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "guest"))

import image
from image import Unavailable

# In the order of loading; a kernel may have some of them built in.
MODULES = [
    "crypto/crc32c_generic", "lib/libcrc32c", "lib/crc16", "fs/mbcache", "fs/jbd2/jbd2", "fs/ext4/ext4",
    "drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
    "drivers/char/virtio_console",
]
APPEND = "console=ttyS0 panic=-1 loglevel=4 tsc=reliable mitigations=off no_timer_check"
# Programs of the guest, and the packages that have them.
PACKAGES = {"sqlite3": ("sqlite3", "usr/bin/sqlite3"), "qemu-ga": ("qemu-guest-agent", "usr/sbin/qemu-ga")}
REQUEST = re.compile(rb"^@request (\d+) (\d+) (\d+) (\d+)\r?\n", re.MULTILINE)
CHECK = re.compile(rb"^@check \d+ (.*?)\r?\n", re.MULTILINE)
BOOT_S_MAX = 240


class Failed(Exception):
    """The guest, or lode, did not do what it should."""


def program(name, cache):
    """A program of this machine, or one out of its package, which is downloaded and not installed."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found:
        return found
    if name not in PACKAGES:
        raise Unavailable(f"{name} is not installed (tests/setup.sh study installs it)")
    package, inside = PACKAGES[name]
    there = os.path.join(cache, "programs")
    path = os.path.join(there, inside)
    if not os.path.exists(path):
        os.makedirs(there, exist_ok=True)
        done = subprocess.run(
            ["apt-get", "-q", "download", package], cwd=there, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )
        debs = glob.glob(os.path.join(there, package + "_*.deb"))
        if done.returncode or not debs:
            raise Unavailable(f"{name} is not here, and apt-get cannot download {package}")
        subprocess.run(["dpkg-deb", "-x", debs[0], there], check=True)
    return path


def build(path, kernel, cache):
    """The guest's initial file system."""
    programs = {name: program(name, cache) for name in PACKAGES}
    programs["busybox"] = image.which("busybox")
    image.build(path, kernel, programs, {}, MODULES, os.path.join(HERE, "init"))


class Host:
    """`lode wsp` with guests of its own, below `work`; their memory is in `media`."""

    def __init__(self, lode, work, media, kernel, initrd, log):
        self.lode, self.work, self.media, self.log = lode, work, media, log
        self.boot = ["-kernel", os.path.join(kernel, "vmlinux"), "-initrd", initrd, "-append"]
        self.guests = os.path.join(work, "guests")

    def start_process(self, *arguments, **more):
        command = [self.lode, "wsp", "--wsp-dir", self.guests, *arguments]
        self.log.write(f"+ {' '.join(command)}\n".encode())
        self.log.flush()
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

    def status(self, *arguments, seconds=120):
        """Exit status, standard output and standard error."""
        process = self.start_process(*arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failed(f"lode wsp {' '.join(arguments)} did not end within {seconds} s") from None
        self.log.write(out + err)
        return process.returncode, out.decode(), err.decode()

    def run(self, *arguments):
        status, out, err = self.status(*arguments)
        if status != 0:
            raise Failed(f"lode wsp {' '.join(arguments)} ended with status {status}: {err.strip()}")
        return out

    def json(self, *arguments):
        return json.loads(self.run(*arguments, "--json"))

    def refused(self, *arguments):
        """What it says: one line, and status 1."""
        status, _, err = self.status(*arguments)
        if status != 1 or err.count("\n") != 1:
            raise Failed(f"lode wsp {' '.join(arguments)} ended with status {status}: {err!r}")
        return err.strip()

    def start(self, name, ram="512M", disk=None, options=(), append="", media=None):
        disks = ["--disk", disk] if disk else []
        there = " ".join(word for word, is_there in (("disk", disk), ("agent", "--agent" in options)) if is_there)
        boot = [*self.boot, f"{APPEND} {there} {append}"]
        return self.run("start", name, "--ram", ram, "--media", media or self.media, *disks, *options, "--", *boot)

    def file(self, name, *parts):
        return os.path.join(self.guests, name, *parts)

    def described(self, name):
        with open(self.file(name, "guest.json"), encoding="utf-8") as file:
            return json.load(file)

    def describe(self, name, **changes):
        described = self.described(name) | changes
        with open(self.file(name, "guest.json"), "w", encoding="utf-8") as file:
            json.dump(described, file)

    def ram(self, name):
        return self.described(name)["ram"]

    def slot(self, name):
        """The slot of the guest's generation."""
        generation = self.json("status", name)["generation"]
        return os.path.join(self.described(name)["slots"], f"slot.{generation}")

    def console(self, name):
        with open(self.file(name, "console.log"), "rb") as file:
            return file.read()

    def requests(self, name):
        """All requests answered: number, seen, stored, clock."""
        return [tuple(int(field) for field in found) for found in REQUEST.findall(self.console(name))]

    def wait_requests(self, name, more=1, seconds=BOOT_S_MAX):
        """Waits for so many more answers than there are."""
        self.wait(name, REQUEST, more, seconds)

    def wait(self, name, what, more=1, seconds=BOOT_S_MAX):
        """Waits for so many more such lines than there are."""
        wanted = len(what.findall(self.console(name))) + more
        give_up = time.monotonic() + seconds
        while len(what.findall(self.console(name))) < wanted:
            if time.monotonic() > give_up:
                tail = self.console(name)[-300:].decode(errors="replace")
                raise Failed(f"{name} says no more within {seconds} s; its last words: {tail!r}")
            time.sleep(0.002)

    def whole(self, name):
        """Answers since the last boot follow one another, and nothing was lost of memory, disk or database."""
        text = self.console(name)
        since = text.rfind(b"@boot ")
        before = int(re.match(rb"@boot (\d+)", text[since:])[1])
        answers = [tuple(int(field) for field in found) for found in REQUEST.findall(text[since:])]
        for n, (number, seen, stored, _) in enumerate(answers, 1):
            if (number, seen, stored) != (n, n, before + n):
                raise Failed(f"{name}: answer {n} is request {number}, with {seen} in memory and {stored} - {before} on disk")
        checks = CHECK.findall(text[since:])
        if any(check != b"ok" for check in checks) or b"@broken" in text:
            raise Failed(f"{name}: the database is damaged: {set(checks)}")
        return len(answers)

    def emulators(self, name):
        """Process numbers of the emulators of a guest."""
        found = []
        for entry in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(entry, "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if b"-name" in words and words[words.index(b"-name") + 1] == name.encode() and self.guests.encode() in b"".join(words):
                found.append(int(entry.split("/")[2]))
        return found

    def end_all(self):
        if not os.path.isdir(self.guests):
            return
        for name in os.listdir(self.guests):
            for process in self.emulators(name):
                try:
                    os.kill(process, 9)
                except ProcessLookupError:
                    pass


class Qmp:
    """QMP, as far as it is needed here."""

    def __init__(self, path):
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
        self.file = self.socket.makefile("r")
        self.file.readline()
        self.run("qmp_capabilities")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.socket.close()

    def run(self, command, file=None, **arguments):
        line = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        if file:
            socket.send_fds(self.socket, [line], [file.fileno()])
        else:
            self.socket.sendall(line)
        while True:
            answer = json.loads(self.file.readline())
            if "error" in answer:
                raise Failed(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]


def media_dir(gib):
    """Where guests' memory lies unless somebody says: memory, where there is so much of it, else among temporary files."""
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and shutil.disk_usage(shared).free >= gib << 30 else None


def make_disk(path, mib=64):
    subprocess.run(["truncate", "-s", f"{mib}M", path], check=True)
    subprocess.run([image.which("mkfs.ext4"), "-q", "-F", path], check=True)
