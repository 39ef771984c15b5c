#!/usr/bin/env python3
"""Suspends and resumes a guest with a database in QEMU, cuts it short at every step, and spoils what it left.

One line per suite: PASS, FAIL or SKIP, with the reason; what lode and the guests said goes to `--logs`. Where QEMU or the kernel
cannot be had, all is skipped, and a line says why. SKIP is also a suite of which a part could not be tried.

    run.py                     the short form
    run.py --long              200 cycles, more kills
    run.py --only cycles       some of the suites; --list names all
    run.py --media DIR         guests' memory there, instead of in a tmpfs

Times that are shown are of an emulated processor on a machine with other work; `make bench-wsp` measures.
"""

import argparse
import copy
import errno
import fcntl
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.dont_write_bytecode = True

import guest
import steps as tracing
from guest import CHECK, Failed, Host, Qmp, Unavailable, image, make_disk

TARGET = os.environ.get("CARGO_TARGET_DIR") or os.path.join(guest.ROOT, "target")
SEAL_BYTES = 16 << 10
# The way out where an image cannot be resumed.
BOOTS_FRESH = "`lode wsp start db --fresh` boots the guest"
# The first QEMU that maps memory from an offset in its file.
OFFSETS_SINCE = (8, 1)
# What marks a file whose blocks stand still.
FIXED = "system.lode.fixed"


class Context:
    def __init__(self, host, options, work, cache):
        self.host, self.options, self.work, self.cache = host, options, work, cache
        self.random = random.Random(options.seed)
        self.note = ""
        # What cannot be tried on this machine: a suite that leaves something out has not passed.
        self.untried = []
        self.disk = os.path.join(work, "disk.img")

    def booted(self):
        """A guest called db that runs and answers, with nothing behind it that another suite left."""
        if not self.host.emulators("db"):
            self.fresh()
        return self.host

    def cleared(self):
        """No guest at all, and an empty disk for one."""
        self.host.end_all()
        shutil.rmtree(self.host.guests, ignore_errors=True)
        for left in os.listdir(self.host.media):
            path = os.path.join(self.host.media, left)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        make_disk(self.disk)
        return self.host

    def fresh(self, *options, append=""):
        self.cleared()
        self.host.start("db", disk=self.disk, options=options, append=append)
        self.host.wait_requests("db", 3)
        return self.host

    def bare(self, *names, options=()):
        """Guests that never come further than their firmware: started in no time, for what does not ask what they do."""
        for name in names:
            self.host.run("start", name, "--ram", "64M", "--media", self.host.media, *options)
        return self.host

    def suspended(self):
        host = self.booted()
        host.run("suspend", "db")
        return host


def expect(condition, what):
    if not condition:
        raise Failed(what)


def goes_on(host):
    """It was resumed where it was."""
    host.run("resume", "db")
    host.wait_requests("db", 3)
    return host.whole("db")


def cycles(context):
    """Suspended and resumed again and again under requests: none is lost, the database is whole"""
    # Memory that is written back line by line, where the guest reached it.
    host = context.fresh("--cpus", "2", "--assume", "memory")
    count = 200 if context.options.long else 20
    # Somebody looks all the time, and is in nobody's way.
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(host, ended))
    watcher.start()
    try:
        for cycle in range(1, count + 1):
            one_cycle(context, host, cycle)
    finally:
        ended.set()
        watcher.join()
    answered = host.whole("db")
    status = host.json("status", "db")
    for what in ("suspends", "resumes"):
        expect(status[what]["count"] == count, f"{what}: {status[what]}")
    median = status["suspends"]["median_us"] / 1e3, status["resumes"]["median_us"] / 1e3
    picture = os.path.join(context.work, "phases.svg")
    dirty = {each["media"]: each["bytes"] for each in host.json("suspend", "db")["guests"][0]["dirty"]}
    host.run("resume", "db")
    expect(0 < dirty["memory"] < 512 << 20, f"what is written back of memory: {dirty}")
    host.run("status", "db", "--svg", picture)
    expect(b"Energy window" in read(picture) and b" of memory" in read(picture), "the picture does not tell the window")
    subprocess.run([sys.executable, "-c", "import sys, xml.dom.minidom as m; m.parse(sys.argv[1])", picture], check=True)
    context.note = f"{count} cycles, {answered} requests; {median[0]:.1f} and {median[1]:.1f} ms at the median"


def one_cycle(context, host, cycle):
    time.sleep(context.random.random() * 0.05)
    suspended = host.json("suspend", "db")["guests"][0]
    expect(suspended["generation"] == cycle, f"generation {suspended['generation']} in cycle {cycle}")
    expect(suspended["state_bytes"] < 1 << 20, f"the state has {suspended['state_bytes']} bytes")
    expect(not host.emulators("db"), "the emulator is still there")
    host.run("resume", "db")
    # The database looks at all of itself.
    host.wait("db", CHECK)


def watch(host, ended):
    while not ended.is_set():
        host.status("list")
        host.status("status", "db")


def cold(context):
    """A guest that was not suspended is not resumed: it says so, and boots"""
    host = context.booted()
    os.kill(host.emulators("db")[0], signal.SIGKILL)
    wait_gone(host)
    said = host.refused("resume", "db")
    expect("consumed" in said or "not suspended" in said, said)
    expect("`lode wsp start db` boots" in said, f"no way out is named: {said}")
    expect(host.json("status", "db")["state"] == "off", "its state")
    stored = host.requests("db")[-1][2]
    host.run("start", "db")
    host.wait_requests("db", 3)
    host.whole("db")
    expect(host.requests("db")[-1][2] >= stored, "what was on its disk is gone")
    # A second time: the slot that was consumed is not believed.
    host.run("suspend", "db")
    slot = host.slot("db")
    shutil.copy(slot, slot + ".kept")
    goes_on(host)
    os.kill(host.emulators("db")[0], signal.SIGKILL)
    wait_gone(host)
    os.rename(slot + ".kept", slot)
    said = host.refused("resume", "db")
    expect("consumed" in said and "moved on" in said, said)
    host.run("start", "db")
    host.wait_requests("db", 3)


def wait_gone(host, name="db"):
    give_up = time.monotonic() + 20
    while host.emulators(name) or host.json("status", name)["state"] == "running":
        expect(time.monotonic() < give_up, "the emulator does not end")
        time.sleep(0.01)


def kills(context):
    """The emulator, or lode, is killed somewhere in a suspend or a resume: it goes on where it was, or boots"""
    host = context.booted()
    count = 60 if context.options.long else 12
    outcomes = {"went on": 0, "booted": 0}
    for n in range(count):
        what, victim = (("suspend", "resume")[n % 2], ("emulator", "lode")[n // 2 % 2])
        if what == "resume":
            host.run("suspend", "db")
        # Somewhere in what that takes.
        delay = context.random.random() * (0.02 if what == "suspend" else 0.05)
        process = host.start_process(what, "db")
        time.sleep(delay)
        if victim == "lode":
            process.kill()
        else:
            for emulator in host.emulators("db"):
                try:
                    os.kill(emulator, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        process.communicate()
        # What is there now is suspended, stands, runs, or is off.
        status, _, said = host.status("resume", "db")
        if status != 0 and "it runs" not in said:
            expect("consumed" in said or "not suspended" in said, f"{what}, {victim} killed: {said}")
            wait_gone(host)
            host.run("start", "db")
            outcomes["booted"] += 1
        else:
            outcomes["went on"] += 1
        host.wait_requests("db", 2)
        host.whole("db")
    context.note = f"{count} kills: {outcomes['went on']} times it went on, {outcomes['booted']} times it booted"


def steps(context):
    """The emulator, or lode, is killed before each step of a suspend and of a resume: it goes on at its request, or boots"""
    host = context.cleared()
    media = Disk(context)
    if media.missing:
        context.untried.append(f"media that are synced: {media.missing}")
    try:
        host.start("db", ram="128M", disk=context.disk, media=media.directory)
        host.wait_requests("db", 3)
        tracer = tracing.Kills(host, "db", os.path.join(context.work, "traced"))
        every = [("suspend", step) for step in tracer.steps("suspend")] + [("resume", step) for step in tracer.steps("resume")]
        host.wait_requests("db", 2)
        host.run("suspend", "db")
        image_of = Image(context, host)
        host.run("resume", "db")
        outcomes = {(what, victim): [] for what in ("suspend", "resume") for victim in ("lode", "emulator")}
        for n, (what, step) in enumerate(every):
            for victim in ("lode", "emulator"):
                if context.options.long or n % STEPS_EVERY == context.options.seed % STEPS_EVERY or step.startswith(ALWAYS):
                    went_on = one_step(context, tracer, image_of, what, step, victim)
                    outcomes[what, victim] += [] if went_on is None else [(step, went_on)]
    finally:
        host.end_all()
        shutil.rmtree(host.guests, ignore_errors=True)
        media.end()
    # There is one moment at which an image comes to be, and one at which it is used up.
    for what, order in (("suspend", [False, True]), ("resume", [True, False])):
        found = [went_on for _, went_on in outcomes[what, "emulator"]]
        expect(found == sorted(found, key=order.index), f"{what}: emulators killed in turn: {outcomes[what, 'emulator']}")
        expect(set(found) == {True, False}, f"{what}: emulators killed in turn: {outcomes[what, 'emulator']}")
    total = sum(map(len, outcomes.values()))
    expect(total > len(every) // STEPS_EVERY, f"only {total} steps were come to")
    booted = sum(not went_on for some in outcomes.values() for _, went_on in some)
    context.note = f"{total} kills before {len(every)} steps: {total - booted} times it went on, {booted} times it could only boot"


# In the short form of so many steps one has its kills, and those always that begin so.
STEPS_EVERY = 6
ALWAYS = ("send migrate ", "send cont", "sync ram")


def one_step(context, tracer, image_of, what, step, victim):
    """Whether the guest went on where it was; none where the command did not come to the step this time."""
    host = context.host
    if what == "resume":
        host.run("suspend", "db")
    status = tracer.run(what, step, victim)
    if status is None:
        # In that order it was another time.
        if what == "suspend":
            host.run("resume", "db")
        return None
    where = f"{what}, {victim} killed before `{step}`"
    done, _, said = host.status("resume", "db")
    if done == 0 or "it runs" in said:
        host.wait_requests("db", 2)
        host.whole("db")
        return True
    # Whoever was told that it is suspended, or runs, and a guest whose lode alone was killed, lose nothing.
    expect(victim != "lode", f"{where}: {said}")
    expect(what != "suspend" or status != 0, f"{where}: it was acknowledged, and {said}")
    expect(said.count("\n") == 1 and ("consumed" in said or "not suspended" in said) and "`lode wsp start db` boots" in said, f"{where}: {said}")
    wait_gone(host)
    # To make all of its memory takes longer than the rest.
    if context.options.long or what not in tracer.booted:
        tracer.booted.add(what)
        host.run("start", "db")
        expect(host.json("status", "db")["state"] == "running", f"{where}: it does not boot")
        host.run("stop", "db")
    image_of.put_back()
    host.run("resume", "db")
    host.wait_requests("db", 1)
    host.whole("db")
    return False


class Image:
    """A guest as it was suspended: its memory, state, disk, and what it had said."""

    def __init__(self, context, host):
        self.disk, self.there = context.disk, os.path.dirname(host.ram("db"))
        self.console, self.kept = host.file("db", "console.log"), os.path.join(context.work, "kept")
        shutil.copytree(self.there, self.kept, copy_function=copy_sparse)
        self.content, self.said, self.about = read(self.disk), read(self.console), os.stat(self.disk)

    def put_back(self):
        shutil.rmtree(self.there)
        shutil.copytree(self.kept, self.there, copy_function=copy_sparse)
        # The same file, of the same time: a disk that was written to is not the one that was sealed.
        with open(self.disk, "r+b") as disk:
            disk.write(self.content)
            os.fsync(disk.fileno())
        os.utime(self.disk, ns=(self.about.st_atime_ns, self.about.st_mtime_ns))
        write(self.console, self.said)


def copy_sparse(source, target):
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


class Disk:
    """A directory on a disk that is in memory, so that what is synced is seen to be synced, and soon; without root an ordinary one."""

    def __init__(self, context, mib=288, kind="ext4"):
        self.directory, self.disk = os.path.join(context.work, "on-disk"), os.path.join(context.host.media, "on-disk.img")
        os.makedirs(self.directory)
        self.missing = self._mount(mib, kind)

    def _mount(self, mib, kind):
        """What is missing for it."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        if not shutil.which("mkfs." + kind, path=path):
            return f"mkfs.{kind} is not installed (tests/setup.sh guest installs it)"
        subprocess.run(["truncate", "-s", f"{mib}M", self.disk], check=True)
        force = {"ext4": "-F", "xfs": "-f"}[kind]
        subprocess.run([shutil.which("mkfs." + kind, path=path), "-q", force, self.disk], check=True)
        done = subprocess.run(["mount", "-o", "loop", self.disk, self.directory], capture_output=True, text=True, check=False)
        return f"no {kind} can be mounted here ({done.stderr.strip()})" if done.returncode else None

    def end(self):
        subprocess.run(["umount", "-l", self.directory], capture_output=True, check=False)
        shutil.rmtree(self.directory)
        if os.path.exists(self.disk):
            os.remove(self.disk)


def unfinished(context):
    """Whoever suspended it was killed, and the emulator is still at its state: the guest goes on, and is not stopped by that"""
    host = context.fresh()
    for _ in range(2):
        with Qmp(host.file("db", "qmp")) as monitor, open(os.path.join(context.work, "stream"), "wb") as stream:
            monitor.run("stop")
            # Memory, too, and slowly: this takes minutes.
            ignored = {"capability": "x-ignore-shared", "state": False}
            monitor.run("migrate-set-capabilities", capabilities=[ignored])
            monitor.run("migrate-set-parameters", **{"max-bandwidth": 1 << 16})
            monitor.run("getfd", file=stream, fdname="stream")
            monitor.run("migrate", uri="fd:stream")
        goes_on(host)
        with Qmp(host.file("db", "qmp")) as monitor:
            expect(monitor.run("query-migrate")["status"] == "cancelled", "the emulator is still at it")
    # And by one who suspends it anew.
    with Qmp(host.file("db", "qmp")) as monitor, open(os.path.join(context.work, "stream"), "wb") as stream:
        monitor.run("getfd", file=stream, fdname="stream")
        monitor.run("migrate", uri="fd:stream")
    host.run("suspend", "db")
    goes_on(host)


def spoiled(context):
    """The slot, or memory, is not what it was: refused with words; put back it is resumed"""
    host = context.suspended()
    slot, ram = host.slot("db"), host.ram("db")
    size = os.path.getsize(slot)
    places = [0, 9, 13, 70, SEAL_BYTES - 1, SEAL_BYTES, size - 1]
    places += [context.random.randrange(size) for _ in range(40)]
    for place in places:
        bit = context.random.randrange(8)
        flip(slot, place, bit)
        said = host.refused("resume", "db")
        expect("slot" in said and "put back" in said and BOOTS_FRESH in said, said)
        expect(not host.emulators("db"), "an emulator was left behind")
        flip(slot, place, bit)
    # Each byte, by what verifies it; and the record behind memory.
    flipped = every_byte(context, ram, slot)
    record = os.path.getsize(ram) - 4096
    for place in [at + n * 256 for at in (0, 9, 13, 17, 25, 33, 49, 57, 63) for n in range(2)]:
        flip(ram, record + place, 2)
    said = host.refused("resume", "db")
    expect("no record" in said, said)
    for place in [at + n * 256 for at in (0, 9, 13, 17, 25, 33, 49, 57, 63) for n in range(2)]:
        flip(ram, record + place, 2)
    for shorter in (size - 1, SEAL_BYTES, 100, 0):
        kept = read(slot)
        os.truncate(slot, shorter)
        said = host.refused("resume", "db")
        expect("damaged" in said and BOOTS_FRESH in said, said)
        write(slot, kept)
    os.rename(slot, slot + ".away")
    said = host.refused("resume", "db")
    expect("missing" in said and BOOTS_FRESH in said, said)
    expect(host.json("status", "db")["state"] == "lost", "its state without a slot")
    expect("is suspended" in host.refused("start", "db"), "an image is lost whose slot was away for a moment")
    os.rename(slot + ".away", slot)
    # Memory: gone, shorter, of another guest, of another generation.
    os.rename(ram, ram + ".away")
    said = host.refused("resume", "db")
    expect("missing" in said and "put it back" in said and "`lode wsp start db` boots" in said, said)
    os.rename(ram + ".away", ram)
    bytes_of_ram = os.path.getsize(ram)
    with open(ram, "rb") as file:
        file.seek(bytes_of_ram - 4096)
        trailer = file.read()
    os.truncate(ram, bytes_of_ram - 4096)
    said = host.refused("resume", "db")
    expect("cut short" in said, said)
    os.truncate(ram, bytes_of_ram)
    said = host.refused("resume", "db")
    expect("no record" in said, said)
    with open(ram, "r+b") as file:
        file.seek(bytes_of_ram - 4096)
        file.write(trailer)
    host.refused("start", "db")
    goes_on(host)
    host.run("suspend", "db")
    # Memory as it was a generation before, as far as its record says, with the new slot under the old name.
    new = host.slot("db")
    with open(ram, "r+b") as file:
        file.seek(bytes_of_ram - 4096)
        now = file.read()
        file.seek(bytes_of_ram - 4096)
        file.write(trailer)
    os.rename(new, slot)
    said = host.refused("resume", "db")
    expect("generation" in said and "do not fit" in said, said)
    os.rename(slot, new)
    with open(ram, "r+b") as file:
        file.seek(bytes_of_ram - 4096)
        file.write(now)
    goes_on(host)
    # What is said is the way out.
    context.bare("lost")
    host.run("suspend", "lost")
    flip(host.slot("lost"), SEAL_BYTES + 5, 0)
    expect("start lost --fresh" in host.refused("resume", "lost"), "no way out is named")
    host.run("start", "lost", "--fresh")
    expect(host.json("status", "lost")["state"] == "running", "it does not boot")
    host.run("stop", "lost")
    host.run("rm", "lost")
    context.note = f"{len(places)} bytes flipped, 4 lengths, memory in 4 ways; {flipped}"


def every_byte(context, ram, slot):
    """Each byte of a real slot, and each bit of its seal and of the record, is flipped in turn: what verifies an image refuses it."""
    flips = os.path.join(os.path.dirname(context.options.lode), "flips")
    if not os.path.exists(flips):
        context.untried.append(f"every byte of a slot: there is no {flips} (`make binaries` builds it)")
        return ""
    command = [flips, ram, str(os.path.getsize(ram) - 4096), slot]
    done = subprocess.run(command + ["--all"] * context.options.long, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stderr.strip())
    return done.stdout.strip()


def flip(path, place, bit):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def changed(context):
    """The emulator, its machine, the command line or a disk changed meanwhile: both are named"""
    host = context.suspended()
    real = shutil.which(host.described("db")["qemu"])
    other = os.path.join(context.work, "other-qemu")
    # Another version: the same program with another package in its greeting.
    text = read(real)
    found = re.search(rb"Debian 1:[^)\0\s]+", text)
    package = found and found[0]
    if package:
        write(other + ".real", text.replace(package, package[:-1] + b"~"))
        modules = os.path.dirname((glob.glob("/usr/lib/*/qemu/accel-tcg-x86_64.so") + ["/none"])[0])
        found = subprocess.run([real, "-L", "help"], capture_output=True, text=True, check=True).stdout.split()
        firmware = " ".join(f"-L {directory}" for directory in found)
        write(other, f'#!/bin/sh\nQEMU_MODULE_DIR={modules} exec {other}.real {firmware} "$@"\n'.encode())
        os.chmod(other, 0o755)
        os.chmod(other + ".real", 0o755)
        host.describe("db", qemu=other)
        said = host.refused("resume", "db")
        expect("version" in said and package.decode() in said and package.decode()[:-1] + "~" in said, said)
    write(other, f'#!/bin/sh\nfor word; do shift; set -- "$@" "$(echo "$word" | sed s/type=q35/type=pc-q35-7.1/)"; done\nexec {real} "$@"\n'.encode())
    os.chmod(other, 0o755)
    host.describe("db", qemu=other)
    said = host.refused("resume", "db")
    expect("machine type" in said and "pc-q35-7.1" in said, said)
    write(other, f'#!/bin/sh\nexec {real} "$@" -cpu max,-avx2\n'.encode())
    said = host.refused("resume", "db")
    expect("processor" in said, said)
    host.describe("db", qemu=os.path.join(context.work, "none"))
    said = host.refused("resume", "db")
    expect("cannot start" in said and "--qemu" in said, said)
    host.describe("db", qemu=real, cpus=host.described("db")["cpus"] + 1)
    said = host.refused("resume", "db")
    expect("command line" in said, said)
    host.describe("db", cpus=host.described("db")["cpus"] - 1)
    # The disk: touched, and then taken for what it is.
    about = os.stat(context.disk)
    os.utime(context.disk, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    said = host.refused("resume", "db")
    expect("disk.img" in said and "written to" in said and "--force" in said and BOOTS_FRESH in said, said)
    host.run("resume", "db", "--force")
    host.wait_requests("db", 3)
    host.whole("db")
    relative(context, host)
    header(context, host)
    device(context, host)
    context.note = "version, machine, processor, command line, disks"
    if not package:
        context.untried.append("another version: this QEMU's greeting names no package")


def relative(context, host):
    """A disk that is named relative to where the guest was started is looked at there."""
    disk = os.path.join(context.work, "relative.img")
    write(disk, bytes(1 << 20))
    drive = ("-drive", "if=none,id=relative,file=relative.img,format=raw", "-device", "virtio-blk-pci,drive=relative")
    words = ("start", "relative", "--ram", "64M", "--media", host.media, "--", *drive)
    process = host.start_process(*words, cwd=context.work)
    _, err = process.communicate(timeout=60)
    expect(process.returncode == 0, err.decode())
    os.rename(disk, disk + ".away")
    said = host.refused("suspend", "relative")
    expect("runs on" in said, said)
    os.rename(disk + ".away", disk)
    host.run("suspend", "relative")
    write(disk, bytes(1 << 20))
    said = host.refused("resume", "relative")
    expect(disk in said and "written to" in said, said)
    host.run("rm", "relative", "--force")


def header(context, host):
    """What a guest writes at the beginning of its raw disk makes nothing else of that."""
    disk = os.path.join(context.work, "raw.img")
    write(disk, bytes(1 << 20))
    context.bare("raw", options=("--disk", disk))
    with open(disk, "r+b") as file:
        file.write(b"QFI\xfb\0\0\0\3")
    for words in (("suspend", "resume"), ("stop", "start")):
        for word in words:
            host.run(word, "raw")
        command = read(f"/proc/{host.emulators('raw')[0]}/cmdline")
        expect(b"raw.img,format=raw" in command, f"{words}: {command}")
    host.run("stop", "raw")
    said = host.refused("start", "raw", "--ram", "64M", "--media", host.media, "--disk", disk)
    expect("is raw, and begins as qcow2" in said, said)
    host.run("rm", "raw")


def device(context, host):
    """A disk that is a device is the same after a start of the host, where its node is another; another device is not."""
    files = [os.path.join(context.work, name) for name in ("one.img", "two.img")]
    for file in files:
        write(file, bytes(1 << 20))
    attached = losetup("--find", "--show", files[0])
    if not attached:
        context.untried.append("a disk that is a device: no loop device can be had, which takes root")
        return
    try:
        context.bare("device", options=("--disk", attached))
        expect("not noticed" in host.run("status", "device"), "who has a device as a disk is not told what that means")
        host.run("suspend", "device")
        # Nobody detaches while another looks at it.
        for file in files[::-1]:
            losetup("--detach", attached)
            os.utime(attached)
            expect(losetup(attached, file) is not None, f"{attached} is somebody else's now")
            if file == files[1]:
                said = host.refused("resume", "device")
                expect(attached in said and "was replaced" in said, said)
        host.run("resume", "device")
        host.run("stop", "device")
        host.run("rm", "device")
    finally:
        host.status("stop", "device")
        losetup("--detach", attached)


def losetup(*arguments):
    """What it prints; None where that goes wrong."""
    program = shutil.which("losetup", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    done = program and subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done and done.returncode == 0 else None


def clones(context):
    """Copies of an image run beside each other and leave it as it is"""
    host = context.suspended()
    last = host.requests("db")[-1][0]
    for name in ("one", "two"):
        host.run("resume", "db", "--clone", name)
    for name in ("one", "two"):
        host.wait_requests(name, 5)
        first = host.requests(name)[0]
        expect(last <= first[0] <= last + 2, f"clone {name} begins with {first}, after {last}")
    said = host.refused("resume", "db")
    expect("in use" in said, said)
    said = host.refused("resume", "db", "--boot-after", "1")
    expect("in use" in said and host.json("status", "db")["failed_resumes"] == 0, f"its image is not to blame: {said}")
    said = host.refused("suspend", "one")
    expect("is a clone" in said, said)
    host.wait_requests("one", 2)
    for name in ("one", "two"):
        host.run("stop", name)
    host.run("rm", "one")
    # Whoever asks for it again and again takes nothing from the original.
    for _ in range(2):
        expect("is a clone" in host.refused("resume", "two", "--boot-after", "1"), "a dead clone")
    host.run("resume", "--all", "--boot-after", "1")
    host.wait_requests("db", 3)
    host.whole("db")
    # Memory that was replaced meanwhile is not the guest's.
    ram = host.ram("db")
    os.rename(ram, ram + ".away")
    shutil.copy(ram + ".away", ram)
    expect("other memory" in host.refused("suspend", "db"), "memory that was replaced")
    os.rename(ram + ".away", ram)
    host.run("suspend", "db")
    goes_on(host)
    host.run("rm", "two")
    expect(sorted(guest["name"] for guest in host.json("list")["guests"]) == ["db"], "clones are still listed")


def reflinked(context):
    """A copy that shares blocks with its original is a guest of its own: both go on, and are suspended in turn"""
    host = context.suspended()
    said = host.refused("resume", "db", "--clone", "own", "--reflink")
    if file_system(host.media) != "xfs" and file_system(context.work) != "xfs":
        expect("shares no blocks" in said and "leave --reflink out" in said, said)
        expect(not os.path.exists(os.path.join(host.media, "own.wsp")) and not os.path.exists(context.disk + ".own"), "something is left of it")
    goes_on(host)
    context.cleared()
    media = Disk(context, 512, "xfs")
    try:
        if media.missing:
            raise Unavailable(f"files that share blocks: {media.missing}")
        there = media.directory
        disk = os.path.join(there, "db.img")
        make_disk(disk)
        host.start("db", ram="128M", disk=disk, media=there)
        host.wait_requests("db", 3)
        host.run("suspend", "db")
        last = host.requests("db")[-1][0]
        free = shutil.disk_usage(there).free
        host.run("resume", "db", "--clone", "own", "--reflink")
        expect(free - shutil.disk_usage(there).free < 64 << 20, "memory was copied")
        # Neither waits for the other, and each has its own.
        goes_on(host)
        host.wait_requests("own", 3)
        expect(last <= host.requests("own")[0][0] <= last + 2, f"the copy begins with {host.requests('own')[0]}, after {last}")
        host.run("suspend", "own", "db")
        kept = {name: read(host.slot(name)) for name in ("own", "db")}
        for name, other in (("own", "db"), ("db", "own")):
            write(host.slot(name), kept[other])
            said = host.refused("resume", name)
            expect("another guest" in said and "put back" in said, said)
            write(host.slot(name), kept[name])
        host.run("resume", "own", "db")
        for name in ("own", "db"):
            host.wait(name, CHECK)
            answers = host.requests(name)
            expect(all(after[0] == before[0] + 1 == after[1] for before, after in zip(answers, answers[1:])), f"{name}: {answers}")
            expect(all(check == b"ok" for check in CHECK.findall(host.console(name))), f"{name}: its database is damaged")
        host.whole("db")
        expect("there is a guest own already" in host.refused("resume", "db", "--clone", "own", "--reflink"), "another guest is overwritten")
        # A copy of the copy; and one with a disk that is not copied.
        host.run("suspend", "own")
        host.run("resume", "own", "--clone", "third", "--reflink")
        host.wait_requests("third", 2)
        for name in ("own", "third"):
            host.status("stop", name)
            host.run("rm", "--force", name)
        expect(sorted(os.listdir(there)) == ["db.img", "db.wsp"], f"left: {os.listdir(there)}")
        host.wait_requests("db", 2)
        host.whole("db")
        drive = ("-drive", f"if=none,id=other,file={disk},format=raw,read-only=on")
        host.run("start", "drive", "--ram", "64M", "--media", there, "--", *drive)
        host.run("suspend", "drive")
        expect("not copied" in host.refused("resume", "drive", "--clone", "fourth", "--reflink"), "a disk that is not copied")
        expect(not os.path.exists(os.path.join(there, "fourth.wsp")), "something is left of it")
    finally:
        host.end_all()
        shutil.rmtree(host.guests, ignore_errors=True)
        media.end()


def repeated(context):
    """Resumes that fail again and again: the guest boots, and its image is kept"""
    host = context.suspended()
    slot = host.slot("db")
    flip(slot, SEAL_BYTES + 5, 0)
    for _ in range(2):
        host.refused("resume", "db", "--boot-after", "3")
    status, _, said = host.status("resume", "db", "--boot-after", "3")
    expect(status == 1 and "booted instead" in said and "kept" in said, said)
    host.wait_requests("db", 3)
    host.whole("db")
    kept = os.path.join(os.path.dirname(slot), "kept.1")
    expect(sorted(os.listdir(kept)) == ["ram", os.path.basename(slot)], f"kept: {os.listdir(kept)}")
    host.run("suspend", "db")
    goes_on(host)
    # Memory that is a file of its own gets a name that nobody has, and goes with the guest.
    memory, other = (os.path.join(host.media, name) for name in ("vm.ram", "vm.ram.kept.1"))
    write(other, b"somebody's file")
    host.run("start", "own", "--ram", "64M", "--media", memory)
    host.run("suspend", "own")
    flip(host.slot("own"), SEAL_BYTES + 5, 0)
    status, _, said = host.status("resume", "own", "--boot-after", "1")
    expect(status == 1 and "booted instead" in said, said)
    host.run("stop", "own")
    expect(os.path.exists(memory + ".kept.2") and read(other) == b"somebody's file", f"{os.listdir(host.media)}")
    expect("put aside" in host.refused("rm", "own"), "an image that was kept is lost")
    host.run("rm", "own", "--force")
    expect(read(other) == b"somebody's file", "somebody's file is gone")
    expect(not [name for name in os.listdir(host.media) if name in ("vm.ram", "vm.ram.kept.2")], f"{os.listdir(host.media)}")
    os.remove(other)
    # What was counted is of an image, and ends with it.
    context.bare("counted")
    host.run("suspend", "counted")
    flip(host.slot("counted"), SEAL_BYTES + 5, 0)
    host.refused("resume", "counted", "--boot-after", "2")
    host.run("start", "counted", "--fresh")
    expect(host.json("status", "counted")["failed_resumes"] == 0, "failures of an image that is gone are counted")
    host.run("suspend", "counted")
    flip(host.slot("counted"), SEAL_BYTES + 5, 0)
    expect("booted instead" not in host.refused("resume", "counted", "--boot-after", "2"), "it is booted too early")
    # An image beside slots goes with the guest, too.
    expect("booted instead" in host.status("resume", "counted", "--boot-after", "2")[2], "it is not booted")
    host.run("stop", "counted")
    expect("put aside" in host.refused("rm", "counted"), "an image that was kept is lost")
    host.run("rm", "counted", "--force")
    expect(not os.path.exists(os.path.join(host.media, "counted.wsp")), "its memory is left")
    # Where the memory of one lies is not to be read any more: the rest goes.
    host.run("start", "own", "--ram", "64M", "--media", memory)
    host.run("suspend", "own")
    flip(host.slot("own"), SEAL_BYTES + 5, 0)
    host.status("resume", "own", "--boot-after", "1")
    host.run("stop", "own")
    write(host.file("own", "slots", "kept.1", "memory.json"), b"{")
    status, _, said = host.status("rm", "own", "--force")
    expect(status == 0 and "is not understood" in said and "stays there" in said, said)
    expect(not os.path.exists(host.file("own")) and os.path.exists(memory + ".kept.1"), f"{os.listdir(host.media)}")
    os.remove(memory + ".kept.1")


def taken(context):
    """Memory that was given to another guest is resumed by nobody else, and stays that one's"""
    host = context.cleared()
    memory = os.path.join(host.media, "vm.ram")
    for first, second in (("128M", "64M"), ("64M", "128M"), ("64M", "64M")):
        give_away(host, memory, first, second)
        # It goes when its guest does.
        host.run("suspend", "two")
        if first != second:
            said = host.refused("start", "one")
            expect("has the memory of a guest that is suspended" in said, said)
        # Of one size the record may be that of either.
        host.run("rm", "one", *["--force"] * (first == second))
        expect(os.path.exists(memory), "the other guest's memory is gone")
        host.run("resume", "two")
        host.run("stop", "two")
        host.run("rm", "two")
        expect(not os.path.exists(memory), "memory is left")
    # While the other runs.
    give_away(host, memory, "128M", "64M")
    host.run("rm", "one")
    host.run("suspend", "two")
    host.run("resume", "two")
    host.run("stop", "two")
    host.run("rm", "two")
    give_device_away(context, host)
    theirs(context, host)


def give_away(host, memory, first, second):
    """The guest one is suspended, and its memory becomes that of two, which runs."""
    host.run("start", "one", "--ram", first, "--media", memory)
    host.run("suspend", "one")
    taken_by = ("start", "two", "--ram", second, "--media", memory)
    expect("has the memory of a guest" in host.refused(*taken_by), "memory is given away unasked")
    host.run(*taken_by, "--fresh")
    said = host.refused("resume", "one")
    expect("a guest runs in" in said, f"two guests are in one memory: {said}")
    host.run("stop", "two")
    said = host.refused("resume", "one")
    expect(any(words in said for words in ("cut short", "no record", "not suspended")), f"a guest goes on in memory that was another's: {said}")
    expect(not host.emulators("one"), "an emulator was left behind")
    host.run("start", "two")


def give_device_away(context, host):
    """A device stays as long as it is, with the records of all who had it."""
    file = os.path.join(context.work, "device.img")
    write(file, bytes(160 << 20))
    with open(file, "r+b") as begins:
        begins.seek(0x10040)
        begins.write(b"_BHRfS_M")
    attached = losetup("--find", "--show", file)
    if not attached:
        context.untried.append("memory that is a device: no loop device can be had, which takes root")
        return
    try:
        said = host.refused("start", "one", "--ram", "64M", "--media", attached)
        expect("holds something" in said, f"a file system is overwritten: {said}")
        with open(attached, "r+b", buffering=0) as begins:
            begins.write(bytes(1 << 20))
        for first, second in (("128M", "64M"), ("64M", "128M")):
            give_away(host, attached, first, second)
            host.run("suspend", "two")
            said = host.refused("start", "one")
            expect("has the memory of a guest that is suspended" in said, said)
            host.run("rm", "one")
            host.run("resume", "two")
            host.run("stop", "two")
            host.run("rm", "two")
            with open(attached, "r+b", buffering=0) as begins:
                for _ in range(160):
                    begins.write(bytes(1 << 20))
    finally:
        host.end_all()
        losetup("--detach", attached)


def theirs(context, host):
    """A directory, or a link to one, that somebody else made holds no guest's memory."""
    if os.geteuid():
        context.untried.append("directories of others: this is not root")
        return
    directory, nobody = os.path.join(host.media, "theirs.wsp"), 65534
    for make in (os.mkdir, lambda path: os.symlink(context.work, path)):
        make(directory)
        os.chown(directory, nobody, nobody, follow_symlinks=False)
        said = host.refused("start", "theirs", "--ram", "64M", "--media", host.media, "--fresh")
        expect("somebody else's" in said and said.count("\n") == 0, said)
        if os.path.islink(directory):
            os.remove(directory)
        elif os.path.exists(directory):
            os.rmdir(directory)
    context.bare("theirs")
    host.run("suspend", "theirs")
    os.chown(directory, nobody, nobody)
    for words in (("resume", "theirs"), ("start", "theirs", "--fresh"), ("rm", "theirs", "--force")):
        said = host.refused(*words)
        expect("somebody else's" in said, f"{words}: {said}")
    os.chown(directory, 0, 0)
    host.run("resume", "theirs")
    host.run("stop", "theirs")
    host.run("rm", "theirs")


def power(context):
    """SIGPWR: all guests at a time, in the order of their priorities, in a window that is checked; one that fails holds up none"""
    host = context.booted()
    names = {"low": "-1", "high": "5"}
    for name, priority in names.items():
        host.start(name, ram="256M", options=("--priority", priority))
    for name in names:
        host.wait_requests(name, 2)
    daemon = host.start_process("daemon", "--window", "20s")
    try:
        wait_line(daemon, "waiting for SIGPWR")
        # One that cannot be suspended.
        low = host.emulators("low")[0]
        os.kill(low, signal.SIGKILL)
        wait_gone(host, "low")
        daemon.send_signal(signal.SIGPWR)
        said = wait_line(daemon, "all done")
        ended = [line.split()[1].rstrip(":") for line in said if "suspended in" in line]
        expect(sorted(ended) == ["db", "high"], "\n".join(said))
        for name in ended:
            expect(host.json("status", name)["state"] == "suspended", name)
        daemon.send_signal(signal.SIGTERM)
        expect(daemon.wait(10) == 0, "the daemon does not end in order")
    finally:
        daemon.kill()
        daemon.communicate()
    # A name that nobody knows keeps nobody from the others.
    status, out, err = host.status("resume", "nobody", "db", "high")
    expect(status == 1 and err.count("\n") == 1 and "no guest nobody" in err and "db: resumed" in out and "high: resumed" in out, out + err)
    for name in ("db", "high"):
        host.wait_requests(name, 2)
        host.whole(name)
    status, out, err = host.status("suspend", "db", "nobody", "high")
    expect(status == 1 and err.count("\n") == 1 and "no guest nobody" in err and "db: suspended" in out and "high: suspended" in out, out + err)
    host.run("resume", "--all")
    status, out, err = host.status("suspend", "--all", "--window", "0.001ms", "--json")
    expect(status == 1 and "window" in err and '"within_window": false' in out, err)
    host.run("rm", "--force", "low", "high")
    goes_on(host)


def order(context):
    """Of several the one with the highest priority is suspended first, and who hangs holds up none, neither then nor at a resume"""
    host = context.cleared()
    # Neither in the order of their names nor in the other.
    by_priority = ["c", "a", "d", "b"]
    for priority, name in enumerate(by_priority[::-1]):
        context.bare(name, options=("--priority", str(priority)))
    one_at_a_time = {"preexec_fn": lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])}
    process = host.start_process("suspend", "--all", "--json", **one_at_a_time)
    out, err = process.communicate(timeout=60)
    expect(process.returncode == 0, err.decode())
    turns = sorted((guest["begun_us"], guest["name"]) for guest in json.loads(out)["guests"])
    expect([name for _, name in turns] == by_priority, f"turns in the order {turns}")
    host.run("resume", "--all")

    # The first one does not answer: all others have their turn, and it has its image when it answers again.
    hung = host.emulators("c")[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        process = host.start_process("suspend", "--all", "--window", "2s", "--json", **one_at_a_time)
        # What was reached by then is said then, and not when all is done.
        said = process.stderr.readline().decode()
        expect(process.poll() is None, "one that hangs is not waited for")
        expect("window of 2000.0 ms has ended; suspended: a, d, b; in prepare: c;" in said, said)
        for name in by_priority[1:]:
            wait_state(host, name, "suspended")
    finally:
        os.kill(hung, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    expect(process.returncode == 1 and "was missed: 3 of 4" in err.decode(), err.decode())
    expect(host.json("status", "c")["state"] == "suspended", "it has its image when it answers again")
    outcome = json.loads(out)
    reached = {at["name"]: at["reached"] for at in outcome["at_window"]}
    expect(reached == {"c": "prepare", "a": "durable", "d": "durable", "b": "durable"}, f"{reached}")
    expect(outcome["energy_window_us"] > 2e6 and outcome["within_window"] is False, f"{outcome}")

    # One slot is damaged, and the emulator of another guest hangs.
    flip(host.slot("a"), SEAL_BYTES + 5, 0)
    qemu, stuck = host.described("d")["qemu"], os.path.join(context.work, "stuck-qemu")
    write(stuck, b"#!/bin/sh\nexec sleep 600\n")
    os.chmod(stuck, 0o755)
    host.describe("d", qemu=stuck)
    process = host.start_process("resume", "--all")
    for name in ("b", "c"):
        wait_state(host, name, "running")
    expect(process.poll() is None, "one that hangs is not waited for")
    os.kill(process_of(host, "d", b"sleep"), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    err = err.decode()
    expect(process.returncode == 1 and err.count("\n") == 2, err)
    expect("guest a: " in err and "damaged" in err and "start a --fresh" in err, err)
    expect("guest d: " in err and "did not start" in err, err)
    flip(host.slot("a"), SEAL_BYTES + 5, 0)
    host.describe("d", qemu=qemu)
    host.run("resume", "--all")
    expect({guest["state"] for guest in host.json("list")["guests"]} == {"running"}, "not all run")
    for name in by_priority:
        host.run("stop", name)
    host.run("rm", *by_priority)


def process_of(host, name, program_name, seconds=20):
    """What a guest has as its emulator, when that is this program."""
    give_up = time.monotonic() + seconds
    while True:
        number = int(read(host.file(name, "process")))
        try:
            if read(f"/proc/{number}/comm").strip() == program_name:
                return number
        except FileNotFoundError:
            pass
        expect(time.monotonic() < give_up, f"{name} has no {program_name} as its emulator")
        time.sleep(0.01)


def wait_state(host, name, state, seconds=20):
    give_up = time.monotonic() + seconds
    while (found := host.json("status", name)["state"]) != state:
        expect(time.monotonic() < give_up, f"{name} is {found}, not {state}")
        time.sleep(0.01)


def restart(context):
    """The host starts: the daemon resumes all, lets those go on that stand, and boots who could not be resumed too often"""
    host = context.cleared()
    context.bare("plain", "spoilt", "stands", "runs")
    host.run("suspend", "plain", "spoilt")
    flip(host.slot("spoilt"), SEAL_BYTES + 5, 0)

    def stand():
        with Qmp(host.file("stands", "qmp")) as monitor:
            monitor.run("stop")
        expect(host.json("status", "stands")["state"] == "standing", "it does not stand")

    def daemon(*options):
        process = host.start_process("daemon", *options)
        try:
            said = "\n".join(wait_line(process, "all resumes have ended" if "--resume" in options else "waiting for SIGPWR"))
            process.send_signal(signal.SIGTERM)
            expect(process.wait(10) == 0, "the daemon does not end in order")
        finally:
            process.kill()
            process.communicate()
        return said

    def states(**wanted):
        found = {guest["name"]: guest["state"] for guest in host.json("list")["guests"]}
        expect(found == wanted, f"{found}")

    stand()
    said = daemon("--resume")
    states(plain="running", spoilt="suspended", stands="running", runs="running")
    expect("plain: resumed" in said and "start spoilt --fresh" in said and "stands: had been left standing" in said, said)
    expect("runs:" not in said, f"a guest that runs is none of its business: {said}")
    said = daemon("--resume", "--boot-after", "3")
    states(plain="running", spoilt="suspended", stands="running", runs="running")
    expect(host.json("status", "spoilt")["failed_resumes"] == 2, "failures are not counted")
    said = daemon("--resume", "--boot-after", "3")
    expect("guest spoilt" in said and "booted instead" in said, said)
    states(plain="running", spoilt="running", stands="running", runs="running")
    stand()
    status, out, err = host.status("resume", "--all")
    expect(status == 0 and out.count("\n") == 1 and "stands: had been left standing" in out, out + err)
    unread(host)
    hangs(context, host)
    called_off(host)
    read_only(context, host)
    status, _, err = host.status("daemon", "--boot-after", "3")
    expect(status == 2 and "--resume" in err, err)
    # No guest at all is told from a wrong directory.
    for name in ("plain", "spoilt", "stands", "runs"):
        host.run("stop", name)
    host.run("rm", "--force", "plain", "spoilt", "stands", "runs")
    expect("no guest runs" in host.run("suspend", "--all"), "that nothing was suspended is not said")
    os.rmdir(host.guests)
    said = host.refused("suspend", "--all", "--window", "50ms")
    expect(host.guests in said and "does not exist" in said and "/var/lib/lode/wsp" in said, said)
    daemon("--resume")
    expect("no guest runs" in host.run("suspend", "--all"), "the daemon leaves no directory")


def unread(host):
    """Guests of which nobody can tell whether they are suspended are not passed over in silence."""
    described, ram = read(host.file("plain", "guest.json")), host.ram("spoilt")
    # A guest that runs is not forgotten for it.
    write(host.file("plain", "guest.json"), b"{")
    host.refused("start", "plain")
    host.refused("start", "plain", "--ram", "64M", "--media", host.media, "--fresh")
    write(host.file("plain", "guest.json"), described)
    expect(host.json("status", "plain")["state"] == "running", "it is taken for dead")
    host.run("suspend", "plain", "spoilt", "stands")
    write(host.file("plain", "guest.json"), b"{")
    expect("there is a guest plain already" in host.refused("resume", "stands", "--clone", "plain"), "its name is given away")
    os.rename(ram, ram + ".away")
    status, out, err = host.status("resume", "--all")
    expect(status == 1 and "stands: resumed" in out and err.count("\n") == 2, f"{out}{err}")
    expect("guest plain: " in err and "guest.json" in err and "start the guest with all its options" in err, err)
    expect("guest spoilt: " in err and "cannot be told" in err and "missing" in err and "`lode wsp start spoilt` boots" in err, err)
    os.remove(host.file("plain", "guest.json"))
    # Of another size no record verifies.
    write(ram, bytes(1 << 20))
    status, out, err = host.status("resume", "--all", "--json")
    expect(status == 1 and err.count("\n") == 2, f"{out}{err}")
    expect("guest plain: its description" in err and "is missing: put it back" in err, err)
    expect("guest spoilt: " in err and "cut short" in err, err)
    expect({guest["name"]: guest["state"] for guest in json.loads(out)["guests"]} == {"plain": "unknown", "spoilt": "unknown"}, out)
    write(host.file("plain", "guest.json"), described)
    os.rename(ram + ".away", ram)
    expect(host.status("resume", "--all")[0] == 0, "what was put back is not resumed")


def hangs(context, host):
    """An emulator that does not answer holds up neither the daemon's start nor what that does when power fails meanwhile."""
    host.run("suspend", "plain", "stands")
    qemu, stuck = host.described("plain")["qemu"], os.path.join(context.work, "stuck-qemu")
    program(stuck, "exec sleep 600")
    host.describe("plain", qemu=stuck)
    process = host.start_process("daemon", "--resume", "--window", "500ms")
    try:
        wait_line(process, "waiting for SIGPWR")
        wait_line(process, "stands: resumed")
        hung = process_of(host, "plain", b"sleep")
        begun = time.monotonic()
        process.send_signal(signal.SIGPWR)
        said = wait_line(process, "has ended")[-1]
        expect("in prepare: plain" in said and time.monotonic() - begun < 20, said)
        for name in ("spoilt", "stands", "runs"):
            wait_state(host, name, "suspended")
        os.kill(hung, signal.SIGKILL)
        wait_line(process, "all done")
        process.send_signal(signal.SIGTERM)
        expect(process.wait(20) == 0, "the daemon does not end in order")
    finally:
        process.kill()
        process.communicate()
    host.describe("plain", qemu=qemu)
    host.run("resume", "--all")


def called_off(host):
    """Power fails while guests are being resumed: none of them runs in the end."""
    host.run("suspend", "plain")
    generation = host.json("status", "plain")["generation"]
    with open(host.ram("plain"), "rb") as looked_at:
        # Whoever looks at memory is waited for.
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        process = host.start_process("daemon", "--resume")
        try:
            wait_line(process, "waiting for SIGPWR")
            time.sleep(0.3)
            process.send_signal(signal.SIGPWR)
            time.sleep(0.4)
            fcntl.flock(looked_at, fcntl.LOCK_UN)
            process.send_signal(signal.SIGTERM)
            expect(process.wait(60) == 0, "the daemon does not end in order")
        finally:
            process.kill()
            said = process.communicate()[1].decode()
        found = {guest["name"]: guest["state"] for guest in host.json("list")["guests"]}
        expect(set(found.values()) == {"suspended"}, f"{found}: {said}")
        expect(host.json("status", "plain")["generation"] == generation, f"its image was used up: {said}")
        # By somebody else, who is waited for.
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        resumes = host.start_process("resume", "plain")
        time.sleep(0.3)
        suspends = host.start_process("suspend", "--all")
        time.sleep(0.3)
        fcntl.flock(looked_at, fcntl.LOCK_UN)
        for process in (resumes, suspends):
            out, err = process.communicate(timeout=60)
            expect(process.returncode == 0, (out + err).decode())
    expect(b"plain: suspended" in out and host.json("status", "plain")["state"] == "suspended", f"{out}")
    host.run("resume", "--all")


def read_only(context, host):
    """Guests whose directory cannot be written to any more are suspended all the same."""
    bound = subprocess.run(["mount", "--bind", host.guests, host.guests], capture_output=True, check=False)
    if bound.returncode:
        context.untried.append("a directory that is read-only: nothing can be mounted here")
        return
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", host.guests], check=True)
        host.run("suspend", "--all")
        found = {guest["name"]: guest["state"] for guest in host.json("list")["guests"]}
        expect(set(found.values()) == {"suspended"}, f"{found}")
    finally:
        subprocess.run(["umount", host.guests], check=True)
    host.run("resume", "--all")


def hook(context):
    """What NUT's upsmon runs as its own user, when the battery is low: root's guests are suspended"""
    host = context.cleared()
    context.bare("one", "two")
    source = os.path.join(guest.ROOT, "dist", "nut", "lode-wsp-notify")
    with tempfile.TemporaryDirectory(prefix="lode-wsp-hook-") as prefix:
        os.chmod(prefix, 0o755)
        notify = os.path.join(prefix, "lib", "lode", "lode-wsp-notify")
        asked, logged = os.path.join(prefix, "asked"), os.path.join(prefix, "logged")
        for directory in ("bin", "lib/lode", "path"):
            os.makedirs(os.path.join(prefix, directory))
        shutil.copy(source, notify)
        # Root's directory of guests is this test's.
        program(os.path.join(prefix, "bin", "lode"), f'shift; exec {context.options.lode} wsp --wsp-dir {host.guests} "$@"')
        program(os.path.join(prefix, "path", "logger"), f'printf "%s\\n" "$@" >> {logged}')
        for file in (asked, logged):
            write(file, b"")
            os.chmod(file, 0o666)

        def run(kind, user):
            environment = {"NOTIFYTYPE": kind, "PATH": f"{prefix}/path:/usr/bin:/bin"}
            return subprocess.run([notify], env=environment, user=user, cwd="/", capture_output=True, text=True, check=False)

        def states(state):
            found = {guest["name"]: guest["state"] for guest in host.json("list")["guests"]}
            expect(found == {"one": state, "two": state}, f"{found}")

        is_root = os.geteuid() == 0
        other = 65534 if is_root else None
        program(os.path.join(prefix, "path", "sudo"), f'printf "%s\\n" "$@" > {asked}')
        expect(run("ONBATT", other).returncode == 0 and not read(asked), "on battery there is time yet")
        done = run("LOWBATT", other)
        expect(done.returncode == 0, done.stderr)
        # sudo lets it do what the line says that is to be put into its files, and nothing else.
        allowed = re.search(r"NOPASSWD: (.*)", read(source).decode())[1].replace("/usr/local", prefix)
        words_asked = read(asked).decode().splitlines()
        expect(words_asked == ["-n", *allowed.split()], f"sudo is asked for {words_asked}, and lets it do {allowed}")
        states("running")
        subprocess.run(words_asked[1:], capture_output=True, check=False)
        states("suspended")
        host.run("resume", "--all")
        # Nobody allowed it.
        program(os.path.join(prefix, "path", "sudo"), "echo sudo: a password is required >&2; exit 1")
        done = run("FSD", other)
        expect(done.returncode == 1 and "a password is required" in read(logged).decode(), f"it fails in silence: {done}")
        states("running")
        if is_root:
            # Where upsmon is root, too. Emulated processors may miss the window.
            done = run("FSD", 0)
            expect(done.returncode == int("was missed" in done.stdout), f"{done}")
            states("suspended")
        else:
            context.untried.append("upsmon that runs as root: this is not root")
        host.run("rm", "--force", "one", "two")


def program(path, script):
    write(path, f"#!/bin/sh\n{script}\n".encode())
    os.chmod(path, 0o755)


def paged(context):
    """Memory that is a plain file on a disk: what is dirty is written there"""
    host = context.cleared()
    there = [directory for directory in (context.work, TARGET) if file_system(directory) not in ("tmpfs", "ramfs")]
    if not there:
        raise Unavailable("a file on a disk: all directories here are in memory")
    directory = tempfile.mkdtemp(prefix="lode-wsp-paged-", dir=there[0])
    try:
        memory = os.path.join(directory, "db.ram")
        host.start("db", ram="256M", disk=context.disk, media=memory)
        host.wait_requests("db", 3)
        status = host.json("status", "db")
        expect(status["domain"] == "page-cache" and "energy window" in status["survives"], f"{status}")
        for _ in range(3):
            suspended = host.json("suspend", "db")["guests"][0]
            expect(suspended["domain"] == "page-cache" and os.path.isfile(memory), f"{suspended}")
            dirty = {each["media"]: each["bytes"] for each in suspended["dirty"]}
            goes_on(host)
        if not dirty:
            context.untried.append("what is dirty: this kernel does not count it (Linux 6.5 does)")
        else:
            expect(set(dirty) == {"memory", "state", "disk"} and 0 < dirty["memory"] < 256 << 20 and dirty["state"] > 0, f"{dirty}")
            expect(suspended["dirty_bytes"] == sum(dirty.values()), f"{suspended}")
            status = host.json("status", "db")
            expect({each["media"] for each in status["dirty"]} == {"memory", "disk"}, f"{status}")
            expect(status["suspends"]["dirty_bytes"][1] >= dirty["memory"], f"{status}")
        host.run("stop", "db")
        host.run("rm", "db")
    finally:
        host.end_all()
        shutil.rmtree(directory)
    phases = {phase["name"]: phase["us"] / 1e3 for phase in suspended["phases"]}
    context.note = f"{phases['write-back']:.1f} ms to write back {dirty.get('memory', 0) >> 10} KiB of memory"


def huge(context):
    """Memory in huge pages, which are a file system of their own"""
    host = context.cleared()
    pages, mount = "/proc/sys/vm/nr_hugepages", os.path.join(context.work, "huge")
    os.makedirs(mount, exist_ok=True)
    before = int(read(pages)) if os.path.exists(pages) else 0
    done = subprocess.run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", mount], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"huge pages: hugetlbfs cannot be mounted here ({done.stderr.strip()})")
    try:
        # 128 MiB, and a page for the record.
        try:
            write(pages, str(before + 66).encode())
        except OSError as failure:
            raise Unavailable(f"huge pages: the kernel is not to be asked for some ({failure})") from None
        if int(read(pages)) < before + 65:
            raise Unavailable("huge pages: the kernel has not so many")
        host.start("db", ram="128M", disk=context.disk, media=mount)
        host.wait_requests("db", 3)
        status = host.json("status", "db")
        expect(status["domain"] == "volatile" and os.path.dirname(status["ram"]) == mount, f"{status}")
        for _ in range(3):
            host.run("suspend", "db")
            goes_on(host)
        host.wait("db", CHECK)
        host.run("suspend", "db")
        flip(host.slot("db"), SEAL_BYTES + 9, 1)
        expect("damaged" in host.refused("resume", "db"), "a slot that is damaged")
        flip(host.slot("db"), SEAL_BYTES + 9, 1)
        goes_on(host)
        host.run("stop", "db")
        host.run("rm", "db")
        expect(not os.listdir(mount), f"memory is left: {os.listdir(mount)}")
        too_large = host.refused("start", "big", "--ram", "1G", "--media", mount)
        expect("room" in too_large or "memory" in too_large, too_large)
    finally:
        host.end_all()
        shutil.rmtree(host.guests, ignore_errors=True)
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
        write(pages, str(before).encode())


def file_system(directory):
    return image.command_output("stat", "-f", "-c", "%T", directory).strip()


def cut(context):
    """Power fails after a suspend: what has come to the disks, of memory, state and the guest's own disk, is resumed from"""
    host = context.cleared()
    # File systems of their own: to sync one would sync the other. None comes to its disk unasked.
    memory, files = cuts = Cut(context, "memory", 224), Cut(context, "files", 128)
    try:
        for each in cuts:
            each.attach()
        disk = os.path.join(files.mount, "disk.img")
        make_disk(disk)
        # All blocks are there, holes too: what the guest writes changes the file's time, and nothing else.
        content = read(disk)
        with open(disk, "r+b") as file:
            file.write(content)
            os.fsync(file.fileno())
        host.start("db", ram="128M", disk=disk, media=memory.mount)
        host.wait_requests("db", 3)
        expect(host.json("suspend", "db")["guests"][0]["domain"] == "page-cache", "its domain")
        for each in cuts:
            each.fail()
        goes_on(host)
        host.wait("db", CHECK)
    finally:
        host.end_all()
        shutil.rmtree(host.guests, ignore_errors=True)
        for each in cuts:
            each.end()


class Cut:
    """A file system on a disk, which has what was written to it when power fails, and nothing else."""

    def __init__(self, context, name, mib):
        self.mount, self.disk = os.path.join(context.work, name), os.path.join(context.work, name + ".disk")
        os.makedirs(self.mount, exist_ok=True)
        make_disk(self.disk, mib)

    def attach(self):
        done = subprocess.run(["mount", "-o", "loop,commit=300", self.disk, self.mount], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"a disk whose power fails: no file system can be mounted here ({done.stderr.strip()})")

    def fail(self):
        left = self.disk + ".left"
        shutil.copyfile(self.disk, left)
        subprocess.run(["umount", self.mount], check=True)
        os.replace(left, self.disk)
        self.attach()

    def end(self):
        subprocess.run(["umount", "-l", self.mount], capture_output=True, check=False)


def wait_line(process, wanted, seconds=60):
    lines, give_up = [], time.monotonic() + seconds
    while time.monotonic() < give_up:
        line = process.stderr.readline().decode()
        if not line:
            break
        lines.append(line.strip())
        if wanted in line:
            return lines
    raise Failed(f"the daemon does not say `{wanted}`: {lines}")


def full(context):
    """Media without room: refused at the start; a suspend that finds none leaves the guest running"""
    host = context.booted()
    small = os.path.join(context.work, "small")
    os.makedirs(small, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300M", "none", small], capture_output=True, check=False)
    if mounted.returncode != 0:
        raise Unavailable("a tmpfs cannot be mounted here")
    try:
        status, _, said = host.status("start", "big", "--ram", "512M", "--media", small)
        expect(status == 1 and "no room" in said, said)
        expect(not os.path.exists(os.path.join(small, "big.wsp", "ram")), "memory was left behind")
        host.start("tight", ram="256M", media=small)
        host.wait_requests("tight", 2)
        directory = os.path.join(small, "tight.wsp")
        for name in os.listdir(directory):
            if name.startswith("slot."):
                os.remove(os.path.join(directory, name))
        with open(os.path.join(small, "filler"), "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
        said = host.refused("suspend", "tight")
        expect("room" in said and "runs on" in said, said)
        host.wait_requests("tight", 2)
        os.remove(os.path.join(small, "filler"))
        host.run("suspend", "tight")
        host.run("resume", "tight")
        host.wait_requests("tight", 2)
        host.whole("tight")
        host.run("stop", "tight")
        host.run("rm", "tight")
    finally:
        host.status("stop", "tight")
        subprocess.run(["umount", "-l", small], check=False)


def clock(context):
    """The guest's clock is set forward by its agent"""
    host = context.fresh("--agent")
    host.run("suspend", "db")
    time.sleep(3)
    resumed = host.json("resume", "db")["guests"][0]
    expect(resumed["clock"] == "set by the agent", resumed)
    host.wait_requests("db", 5)
    off = time.time() - host.requests("db")[-1][3]
    expect(abs(off) < 2.5, f"the guest's clock is {off:.1f} s behind")
    host.whole("db")
    # Nobody waits for an agent that is not there.
    context.bare("mute", options=("--agent",))
    host.run("suspend", "mute")
    resumes = host.start_process("resume", "mute")
    wait_state(host, "mute", "running")
    begun = time.monotonic()
    host.run("suspend", "mute")
    took = time.monotonic() - begun
    _, err = resumes.communicate(timeout=60)
    expect(resumes.returncode == 0 and took < 3, f"a suspend waited {took:.1f} s: {err.decode()}")
    host.run("rm", "mute", "--force")
    context.note = f"{off:.1f} s off, after 3 s"


def words(context):
    """What is asked for wrongly is answered in one line, and changes nothing"""
    host = context.suspended()
    said = host.refused("start", "db")
    expect("is suspended" in said and "--fresh" in said, said)
    expect("is suspended" in host.refused("rm", "db"), "rm of a suspended guest")
    unknown(host)
    expect("does not run" in host.refused("suspend", "db"), "suspend of a suspended guest")
    expect("does not run" in host.refused("stop", "db"), "stop of a suspended guest")
    goes_on(host)
    expect("runs already" in host.refused("start", "db"), "start of a guest that runs")
    expect("it runs" in host.refused("resume", "db"), "resume of a guest that runs")
    expect("runs" in host.refused("rm", "db", "--force"), "rm of a guest that runs")
    for name in ("status", "stop", "suspend", "resume", "rm"):
        expect("no guest nobody" in host.refused(name, "nobody"), name)
    for bad in (["start", "x"], ["start", "x", "--ram", "3M", "--media", "/"], ["start", "../x"], ["suspend"], ["start", "x", "--ram", "64M"]):
        status, _, said = host.status(*bad)
        expect(status == 2 and said.count("\n") == 1, f"{bad}: {status} {said}")
    status, _, said = host.status("start", "x", "--ram", "64M", "--media", host.media, "--", "-m", "1G")
    expect(status == 2 and "--ram" in said, said)
    status, _, said = host.status("start", "x", "--ram", "64M", "--media", host.media, "--", "-nonsense")
    expect(status == 1 and "nonsense" in said and said.count("\n") == 1, said)
    host.status("rm", "--force", "x")
    elsewhere = copy.copy(host)
    elsewhere.guests = os.path.join(context.work, "elsewhere")
    for more in ([], ["--fresh"]):
        said = elsewhere.refused("start", "z", "--ram", "512M", "--media", host.ram("db"), *more)
        expect("a guest runs in" in said, f"memory is given away under a guest: {said}")
    host.wait_requests("db", 2)
    foreign = os.path.join(context.work, "foreign")
    write(foreign, b"somebody's file")
    status, _, said = host.status("start", "y", "--ram", "64M", "--media", foreign)
    expect(status == 1 and "exists" in said and read(foreign) == b"somebody's file", said)
    for said in (host.run("status", "db"), host.run("status")):
        expect("db: runs" in said, said)
    expect("db" in host.run("list") and host.json("status")["guests"][0]["name"] == "db", "list and status")


def unknown(host):
    """Memory that cannot be looked at may be suspended: nothing of it is lost unasked."""
    ram = host.ram("db")
    os.rename(ram, ram + ".away")
    os.symlink(ram, ram)
    for words in (["rm", "db"], ["start", "db"]):
        said = host.refused(*words)
        expect("cannot be told" in said and "--f" in said, said)
    os.remove(ram)
    os.rename(ram + ".away", ram)
    expect(os.path.exists(host.slot("db")), "its slot is gone")


def pooled(context):
    """Memory that is a file of a pool, whether the pool is mounted or not, and whose server is killed"""
    qemu = image.fetch_emulator(context.cache, OFFSETS_SINCE, print)
    host = context.cleared()
    pool, mount = os.path.join(host.media, "pool"), os.path.join(context.work, "mnt")
    os.makedirs(mount, exist_ok=True)
    lode(context, "mkfs", pool, "--size", "1G")
    old = shutil.which("qemu-system-x86_64")
    if image.emulator_version(old) < OFFSETS_SINCE:
        status, _, said = host.status("start", "db", "--ram", "64M", "--media", pool, "--qemu", old)
        expect(status == 1 and "8.1" in said and old in said and said.count("\n") == 1, said)
        expect(lode(context, "ls", pool + ":/").strip() == "", "a file is left of a guest that was never started")
    status, _, said = host.status("start", "db", "--ram", "64M", "--media", pool, "--qemu", qemu, "--", "-device", "virtio-balloon-pci")
    expect(status == 1 and "balloon" in said, said)
    status, _, said = host.status("start", "db", "--ram", "2G", "--media", pool, "--qemu", qemu)
    expect(status == 1 and "larger pool" in said and said.count("\n") == 1, said)
    host.status("rm", "--force", "db")

    # Nobody has the pool.
    lode(context, "cp", __file__, pool + ":/before")
    host.start("db", ram="256M", media=pool, disk=context.disk, options=("--qemu", qemu, "--assume", "memory"))
    host.wait_requests("db", 3)
    described = host.described("db")
    expect(described["ram"] == os.path.realpath(pool) and described["ram_offset"] % (2 << 20) == 0, f"{described}")
    expect(f"{pool}:/db.ram" in host.run("status", "db"), "status does not say where memory is")
    said = lode(context, "mkfs", "--force", pool, status=1)
    expect("a guest runs" in said and said.count("\n") == 1, said)
    lode(context, "ls", pool + ":/")
    host.run("suspend", "db")
    lode(context, "fsck", pool)
    goes_on(host)

    # Its server has it, and changes all but the guest.
    server = Server(context, pool, mount, "allow_other")
    try:
        for n in range(40):
            write(os.path.join(mount, f"file{n}"), bytes([n]) * 3_000_000)
            if n % 2:
                os.remove(os.path.join(mount, f"file{n}"))
        memory = os.path.join(mount, "db.ram")
        for what, number in ((lambda: os.remove(memory), errno.EPERM), (lambda: os.rename(memory, memory + "2"), errno.EPERM),
                             (lambda: os.truncate(memory, 0), errno.ETXTBSY), (lambda: write(memory, b"x"), errno.ETXTBSY),
                             (lambda: flip(memory, 5000, 1), errno.ETXTBSY), (lambda: os.removexattr(memory, FIXED), errno.EBUSY)):
            expect(error_of(what) == number, f"memory is not left alone: {error_of(what)} instead of {number}")
        # The kernel leaves attributes of this kind to the server: others get nothing.
        os.chmod(mount, 0o777)
        empty = os.path.join(mount, "empty")
        write(empty, b"")
        others = f"import os; os.setuid(65534)\nfor path in {[memory, empty]}:\n for what in (lambda: os.removexattr(path, {FIXED!r}), " \
                 f"lambda: os.setxattr(path, {FIXED!r}, b'4096')):\n  try: what(); print('no error')\n  except PermissionError: pass"
        done = subprocess.run([sys.executable, "-c", others], capture_output=True, text=True, check=False)
        expect(done.returncode == 0 and not done.stdout, f"others fix files, or end that: {done.stdout}{done.stderr}")
        expect(os.stat(empty).st_size == 0, "others gave a file a size")
        # A mapping of the file is what the guest stores.
        before = sum(read(memory)[:64 << 20]), len(read(memory))
        expect(before[0] > 0 and before[1] >= 256 << 20, "memory cannot be read")
        host.run("suspend", "db")
        goes_on(host)
        host.wait("db", CHECK)
        server.kill()
        host.run("suspend", "db")
        goes_on(host)
        server = Server(context, pool, mount, "allow_other")
        for n in range(0, 40, 2):
            expect(read(os.path.join(mount, f"file{n}")) == bytes([n]) * 3_000_000, f"file{n} changed")

        # Another guest, through the mount; a third with the name of the first, from another directory of guests.
        os.mkdir(os.path.join(mount, "guests"))
        host.start("second", ram="128M", media=os.path.join(mount, "guests"), options=("--qemu", qemu))
        host.wait_requests("second", 2)
        elsewhere = copy.copy(host)
        elsewhere.guests = os.path.join(context.work, "elsewhere")
        said = elsewhere.refused("start", "db", "--ram", "256M", "--media", mount, "--qemu", qemu)
        expect("has the memory of a guest" in said, said)
        host.run("suspend", "second")
        host.run("resume", "second", "--clone", "copy")
        host.wait_requests("copy", 3)
        expect("in use" in host.refused("resume", "second"), "a guest goes on whose copy runs")
        for words in (["rm", "second", "--force"], ["start", "second", "--fresh", "--ram", "64M", "--media", host.media, "--qemu", qemu]):
            said = host.refused(*words)
            expect("in use" in said or "runs" in said, f"memory is given away under a copy: {said}")
        host.wait_requests("copy", 3)
        host.run("stop", "copy")
        expect("is a clone" in host.refused("start", "copy", "--ram", "64M", "--media", host.media), "a clone becomes another guest")
        host.run("rm", "copy")
        host.run("resume", "second")
        host.wait_requests("second", 3)
        host.whole("second")
        host.run("suspend", "db")
    finally:
        server.end()
    lode(context, "fsck", pool)
    goes_on(host)

    # What was made by the mount goes without it, and the other way round. All of it comes back.
    host.run("stop", "second")
    # The same file by another name of its directory, and another size.
    server = Server(context, pool, mount)
    try:
        os.symlink("guests", os.path.join(mount, "also"))
    finally:
        server.end()
    small = ("--qemu", qemu, "--fresh")
    host.start("second", ram="128M", media=pool + ":/also", options=small)
    host.wait_requests("second", 2)
    host.run("stop", "second")
    host.start("second", ram="160M", media=pool + ":/also", options=small)
    host.wait_requests("second", 2)
    host.run("suspend", "second")
    # Who takes the file away takes the guest's memory away, and is noticed.
    server = Server(context, pool, mount)
    try:
        second = os.path.join(mount, "guests", "second.ram")
        os.removexattr(second, FIXED)
        os.remove(second)
    finally:
        server.end()
    expect("no longer those" in host.refused("resume", "second"), "a guest goes on in memory that is others' now")
    host.run("rm", "second", "--force")
    expect("guests" in lode(context, "ls", pool + ":/") and lode(context, "ls", pool + ":/guests").strip() == "", "second.ram is still there")
    image_kept(context, host, pool, qemu)
    server = Server(context, pool, mount)
    try:
        host.run("stop", "db")
        expect("put aside" in host.refused("rm", "db"), "an image that was kept is lost")
        host.run("rm", "db", "--force")
        expect(not [name for name in os.listdir(mount) if name.endswith(".ram")], f"memory is still there: {os.listdir(mount)}")
    finally:
        server.end()
    lode(context, "fsck", pool)


def image_kept(context, host, pool, qemu):
    """An image that cannot be resumed stays in the pool, and the guest boots beside it."""
    host.run("suspend", "db")
    flip(host.slot("db"), SEAL_BYTES + 1000, 1)
    status, _, said = host.status("resume", "db", "--boot-after", "1")
    expect(status == 1 and "is kept in" in said, said)
    host.wait_requests("db", 3)
    listed = lode(context, "ls", pool + ":/")
    expect("db.ram" in listed and "db.1.ram" in listed, listed)
    expect(host.described("db")["pooled"]["path"] == "/db.1.ram", "the guest boots in its old memory")
    kept = json.loads(read(os.path.join(host.described("db")["slots"], "kept.1", "memory.json")))
    expect(kept["file"] == {"pool": os.path.realpath(pool), "path": "/db.ram"}, f"{kept} is said to be where the image is")


class Server:
    """A mount, and what serves it."""

    def __init__(self, context, pool, mount, options="rw"):
        self.mount, self.lode, self.log = mount, context.options.lode, context.host.log
        self.process = subprocess.Popen([self.lode, "mount", "-f", "-o", options, pool, mount], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        give_up = time.monotonic() + 30
        while not os.path.ismount(mount):
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise Failed(f"{pool} is not mounted")
            time.sleep(0.01)

    def kill(self):
        self.process.kill()
        self.process.wait()
        subprocess.run(["umount", "-l", self.mount], check=True)

    def end(self):
        if self.process.poll() is None:
            subprocess.run([self.lode, "umount", self.mount], stdout=self.log, stderr=self.log, check=False)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise Failed("the server does not end") from None


def lode(context, *arguments, status=0):
    """What it prints, with another status than 0 where that goes wrong."""
    done = subprocess.run([context.options.lode, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    context.host.log.write(f"+ lode {' '.join(arguments)}\n{done.stdout}{done.stderr}".encode())
    expect(done.returncode == status, f"lode {' '.join(arguments)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stderr if status else done.stdout


def error_of(what):
    try:
        what()
    except OSError as failure:
        return failure.errno
    return 0


SUITES = [cycles, cold, kills, steps, unfinished, spoiled, changed, clones, reflinked, repeated, taken, power, order, restart, hook, full, paged, huge, cut, words, clock, pooled]


def main():
    options = parse()
    if options.list:
        for suite in SUITES:
            print(f"{suite.__name__:10} {suite.__doc__}")
        return 0
    names = [name for name in options.only.split(",") if name]
    unknown = set(names) - {suite.__name__ for suite in SUITES}
    if unknown:
        sys.exit(f"run.py: no suite is called {', '.join(sorted(unknown))} (--list names them)")
    chosen = [suite for suite in SUITES if not names or suite.__name__ in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run.py: ended by SIGTERM"))
    os.makedirs(options.logs, exist_ok=True)
    cache = os.path.join(TARGET, "guest")
    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix="lode-wsp-")
    media = tempfile.mkdtemp(prefix="lode-wsp-", dir=options.media or guest.media_dir(3))
    try:
        return run_chosen(chosen, cache, work, media, options)
    finally:
        shutil.rmtree(media, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def run_chosen(chosen, cache, work, media, options):
    initrd = os.path.join(work, "initrd.cpio")
    try:
        image.which("qemu-system-x86_64")
        kernel = image.fetch_kernel(cache, print)
        guest.build(initrd, kernel, cache)
    except Unavailable as missing:
        print(f"SKIP wsp: {missing}")
        print(f"wsp: 0 passed, 0 failed, {len(chosen)} skipped")
        return 1
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    with open(os.path.join(options.logs, "lode.log"), "wb") as log:
        host = Host(options.lode, work, media, kernel, initrd, log)
        context = Context(host, options, work, cache)
        try:
            for suite in chosen:
                counts[run_suite(suite, context, log)] += 1
        finally:
            host.end_all()
    print(f"wsp: {counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


def run_suite(suite, context, log):
    begun = time.monotonic()
    context.note, context.untried = "", []
    log.write(f"\n==== {suite.__name__}\n".encode())
    try:
        suite(context)
        verdict, reason = ("SKIP", "all but " + "; ".join(context.untried)) if context.untried else ("PASS", context.note)
    except Unavailable as missing:
        verdict, reason = "SKIP", str(missing)
    except (Failed, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as failure:
        verdict, reason = "FAIL", f"{type(failure).__name__}: {failure}".replace("\n", "\n      ") + f"\n      log: {log.name}"
        log.write(traceback.format_exc().encode())
        keep(context)
        context.host.end_all()
    print(f"{verdict} {suite.__name__} ({time.monotonic() - begun:.1f} s){': ' + reason if reason else ''}", flush=True)
    return verdict


def keep(context):
    """What the guest said, for whoever looks into the failure."""
    for name in os.listdir(context.host.guests) if os.path.isdir(context.host.guests) else []:
        for file in ("console.log", "qemu.log", "guest.json"):
            path = context.host.file(name, file)
            if os.path.exists(path):
                shutil.copy(path, os.path.join(context.options.logs, f"{name}-{file}"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lode", type=os.path.abspath, default=os.path.join(TARGET, "release", "lode"))
    parser.add_argument("--logs", default=os.path.join(TARGET, "test-logs", "wsp"))
    parser.add_argument("--media", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="another number, other moments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
