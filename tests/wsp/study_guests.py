"""The guests of the study: under `lode wsp`, and as QEMU has them by itself, with memory that is no file.

Both run the same initial file system (study_init), say what they have to on their first serial line, and take commands on the
second: a pipe, which keeps a command until an emulator is there to read it.
"""

import itertools
import json
import os
import subprocess
import time

import guest
from guest import APPEND, Failed, Qmp, Unavailable, image

# Seldom: whoever looks takes a processor from those that are measured.
POLL_S = 0.02
# To find an emulator takes a look at all processes.
ALIVE_POLLS = 50
# With the model of slow memory a boot takes minutes.
WAIT_S_MAX = 600


class Guest:
    """What both have: a console that is a file, and commands."""

    def __init__(self, host, work, name, append, cpus, qemu):
        self.host, self.work, self.name, self.cpus = host, work, name, cpus
        self.pipe = os.path.join(work, f"{name}.commands")
        for end in (".in", ".out"):
            if os.path.exists(self.pipe + end):
                os.remove(self.pipe + end)
            os.mkfifo(self.pipe + end)
        self.commands = os.open(self.pipe + ".in", os.O_RDWR)
        # A second serial line needs no driver that a guest might lack, and blocks where nobody has opened the other end.
        line = ["-chardev", f"pipe,id=commands,path={self.pipe}", "-device", "isa-serial,chardev=commands,index=1"]
        self.options = [*host.boot, f"{APPEND} {append}", *line, *qemu]

    def console(self, since=0):
        with open(self.console_path(), "rb") as file:
            file.seek(since)
            return file.read()

    def say(self, command):
        os.write(self.commands, command.encode() + b"\n")

    def wait(self, word, since=0, seconds=WAIT_S_MAX):
        """Until it says that; what it said since."""
        give_up = time.monotonic() + seconds
        for polls in itertools.count(1):
            alive = polls % ALIVE_POLLS or self.is_alive()
            text = self.console(since)
            if word in text:
                return text
            if time.monotonic() > give_up or b"@broken" in text or not alive:
                raise Failed(f"{self.name} does not say {word.decode()}: {text[-300:].decode(errors='replace')!r}")
            time.sleep(POLL_S)

    def ask(self, command, answer):
        since = len(self.console())
        self.say(command)
        return self.wait(answer, since)

    def translated(self):
        """How many blocks of its code an emulated processor has translated so far; none where it is not emulated."""
        with Qmp(self.qmp_path()) as qmp:
            try:
                text = qmp.run("human-monitor-command", **{"command-line": "info jit"})
            except Failed:
                return None
        counts = [line.split()[2] for line in text.splitlines() if line.startswith("TB count")]
        return int(counts[0]) if counts else None

    def close(self):
        os.close(self.commands)
        for end in (".in", ".out"):
            os.remove(self.pipe + end)


class Lode(Guest):
    """A guest of `lode wsp`, whose memory is a file in `media`."""

    def __init__(self, host, work, name, ram, append, cpus=1, qemu=(), media=None, options=()):
        super().__init__(host, work, name, append, cpus, qemu)
        media = media or host.media
        host.run("start", name, "--ram", ram, "--media", media, "--cpus", str(cpus), *options, "--", *self.options)

    def accelerator(self):
        return self.host.described(self.name)["accel"]

    def console_path(self):
        return self.host.file(self.name, "console.log")

    def qmp_path(self):
        return self.host.file(self.name, "qmp")

    def is_alive(self):
        return bool(self.host.emulators(self.name))

    def suspend(self):
        """Its phases, and how long the command took."""
        return self.timed("suspend")

    def resume(self):
        return self.timed("resume")

    def timed(self, command):
        begun = time.monotonic()
        self.host.run(command, self.name)
        taken = (time.monotonic() - begun) * 1e3
        with open(self.host.file(self.name, "history.jsonl"), encoding="utf-8") as file:
            entry = json.loads(file.readlines()[-1])
        phases = {phase["name"]: phase["us"] / 1e3 for phase in entry["phases"]}
        return {"ms": sum(phases.values()), "phases_ms": phases, "command_ms": taken, "state_bytes": entry["state_bytes"]}

    def end(self):
        if self.is_alive():
            self.host.run("stop", self.name)
        self.host.run("rm", "--force", self.name)
        self.close()


class Plain(Guest):
    """QEMU by itself: memory is its own, anonymous. Kept for its end whatever happens (`end_all`)."""

    started = []

    def __init__(self, host, work, name, ram_mib, append, accelerator, cpus=1, qemu=()):
        super().__init__(host, work, name, append, cpus, qemu)
        self.ram_mib, self.accelerator, self.process = ram_mib, accelerator, None
        Plain.started.append(self)
        self.start()

    def start(self, *more):
        """What it says is appended to what it said before."""
        tcg = "tcg,thread=multi"
        command = [
            image.which("qemu-system-x86_64"), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", self.name,
            "-machine", "q35", "-accel", tcg if self.accelerator == "tcg" else self.accelerator, "-cpu", "max",
            "-smp", str(self.cpus), "-m", f"{self.ram_mib}M",
            "-chardev", f"file,id=console,path={self.name}.console,append=on", "-serial", "chardev:console",
            "-chardev", f"socket,id=qmp,path={self.name}.qmp,server=on,wait=off", "-mon", "chardev=qmp,mode=control",
            *self.options, *more,
        ]
        open(self.console_path(), "ab").close()
        self.process = subprocess.Popen(command, cwd=self.work, stdin=subprocess.DEVNULL, stdout=self.host.log, stderr=self.host.log)

    def console_path(self):
        return os.path.join(self.work, f"{self.name}.console")

    def qmp_path(self):
        return os.path.join(self.work, f"{self.name}.qmp")

    def is_alive(self):
        return self.process.poll() is None

    def qmp(self):
        """As soon as it listens: a socket that is not connected to yet belongs to the emulator before."""
        give_up = time.monotonic() + 30
        while True:
            try:
                return Qmp(self.qmp_path())
            except (OSError, ValueError):
                if time.monotonic() > give_up or not self.is_alive():
                    raise Failed(f"{self.name}: QEMU does not listen") from None
                time.sleep(0.001)

    def save(self, path):
        """All of it goes to a file, as fast as QEMU can: how long that took, and how long until the disk had it."""
        begun = time.monotonic()
        with self.qmp() as qmp, open(path, "wb") as file:
            qmp.run("stop")
            qmp.run("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
            qmp.run("getfd", file, fdname="whole")
            qmp.run("migrate", uri="fd:whole")
            migrated(qmp, self.name)
            written = time.monotonic()
            os.fsync(file.fileno())
        return (written - begun) * 1e3, (time.monotonic() - begun) * 1e3

    def load(self, path):
        """A new emulator goes on with it: how long until its guest runs."""
        begun = time.monotonic()
        self.start("-incoming", "defer")
        with self.qmp() as qmp, open(path, "rb") as file:
            qmp.run("getfd", file, fdname="whole")
            qmp.run("migrate-incoming", uri="fd:whole")
            migrated(qmp, self.name)
            # It stood when it was saved, and so it does now.
            qmp.run("cont")
        return (time.monotonic() - begun) * 1e3

    def kill(self):
        self.process.kill()
        self.process.wait()
        if os.path.exists(self.qmp_path()):
            os.remove(self.qmp_path())

    def end(self):
        self.kill()
        Plain.started.remove(self)
        os.remove(self.console_path())
        self.close()

    @classmethod
    def end_all(cls):
        for left in list(cls.started):
            if left.process:
                left.end()


def migrated(qmp, name):
    while (status := qmp.run("query-migrate").get("status")) not in ("completed", "failed"):
        time.sleep(0.002)
    if status != "completed":
        raise Failed(f"{name}: QEMU neither saves nor loads the guest")


def compiled(work, name, *flags):
    """A program of this folder's, compiled."""
    out = os.path.join(work, name)
    done = subprocess.run(
        ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", out, os.path.join(guest.HERE, f"{name}.c"), *flags],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )
    if done.returncode and "rocksdb" in done.stderr:
        raise Unavailable("RocksDB is not installed (tests/setup.sh study installs it)")
    if done.returncode:
        raise Failed(f"{name}.c: {done.stderr}")
    return out


def database_disk(work, program, entries, mib):
    """A disk with the database, which was made here: an emulated processor takes minutes for it."""
    disk, tree = os.path.join(work, "db.img"), os.path.join(work, "tree")
    os.makedirs(tree)
    subprocess.run([program, os.path.join(tree, "db"), "fill", str(entries)], check=True)
    subprocess.run(["truncate", "-s", f"{mib}M", disk], check=True)
    subprocess.run([image.which("mkfs.ext4"), "-q", "-F", "-d", tree, disk], check=True)
    return disk
