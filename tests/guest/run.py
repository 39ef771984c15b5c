#!/usr/bin/env python3
"""Runs Lodestone on real persistent memory interfaces: the distribution's kernel in QEMU, with emulated NVDIMMs.

Two NVDIMMs: one carries ext4 with `-o dax`, whose files are mapped with MAP_SYNC, the other is a device-dax
node. Another machine has a disk instead, with pools in ordinary files. One line per suite: PASS or FAIL, with the reason; what
the guest said goes to `--logs`. Where QEMU or the kernel cannot be had, all is skipped, and a line says why. The last suites cut
the power: QEMU is killed with SIGKILL under load, and the next boot is asked what is there.

    run.py                       the short form, some minutes
    run.py --long                all of pjdfstest, more operations, 80 power cuts
    run.py --only power          some of the suites; --list names all

Hardware virtualisation is not used: what is measured here is only that it runs.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "mount"))

import image
import machine
import nested
from conformance import PJDFSTEST
from machine import Failed

TARGET = os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target")
CARGO = os.environ.get("CARGO", "cargo")
FSDAX_MIB, DEVDAX_MIB = 768, 256
FILE = "/mnt/test.pool"
DEVICE = "/dev/dax1.0"
POOLS = {"fsdax": FILE, "devdax": DEVICE}
MKFS = {"fsdax": f"lode mkfs {FILE} --size 256M --force", "devdax": f"lode mkfs {DEVICE} --force"}
DISK_MIB, DISK_POOL_MIB = 384, 96
DISK_CUTS_TELLING, DISK_CUT_AGAIN_EVERY = 8, 5
DISK_POOLS = {mode: f"/mnt/{mode}.pool" for mode in ("cow", "inplace")}
# When the kernel writes dirty pages: when chance has it, which takes any of them; at once; when there are some; or not before a sync.
WRITE_BACK = {
    "stirred": {"dirty_writeback_centisecs": 0},
    "at once": {"dirty_writeback_centisecs": 1, "dirty_expire_centisecs": 1},
    "little": {"dirty_background_bytes": 256 << 10, "dirty_bytes": 1 << 20},
    "never": {"dirty_writeback_centisecs": 0, "dirty_expire_centisecs": 360_000},
}
# Bytes per second that the disk writes; 0: as many as it can.
DISK_RATES = [0, 4 << 20]
ACKNOWLEDGED_PORT = "2f8"
THREADS = 4
BOOTS_MAX = 3
LIBRARY_TESTS = ["fs", "media_pool", "media_fault"]


class Guest:
    """The NVDIMMs of one run of the tests, and the machine that is on at the moment, if one is."""

    def __init__(self, work, kernel, initrd, log, options):
        self.work, self.kernel, self.initrd, self.log, self.options = work, kernel, initrd, log, options
        self.modules = [(os.path.join(work, "fsdax.img"), FSDAX_MIB), (os.path.join(work, "devdax.img"), DEVDAX_MIB)]
        self.disk = os.path.join(work, "disk.img")
        self.acknowledged = os.path.join(work, "acknowledged")
        self.on = None
        self.boots = 0
        self.note = ""
        self.blank()

    def blank(self):
        """NVDIMMs that hold nothing."""
        self.off()
        for path, mib in self.modules:
            with open(path, "wb") as file:
                file.truncate(mib << 20)
        self.prepared = False

    def boot(self, persistence="mem-ctrl"):
        """A machine that has just been switched on, with ext4 mounted and the device there."""
        self.off()
        self.on = self.switched_on(persistence, self.modules)
        self.boots += 1
        if not self.prepared:
            self.on.run("use_as 0 pfn nd_pmem && use_as 1 dax dax_pmem && mkfs.ext4 -q -b 4096 /dev/pmem0")
            self.prepared = True
        # Drivers look at the NVDIMMs in their own time.
        self.on.run(f"for i in $(seq 600); do test -b /dev/pmem0 -a -c {DEVICE} && break; sleep 0.1; done; test $i -lt 600")
        # The kernel lets nobody write to a block device on NVDIMMs that are not armed.
        if persistence != "unarmed":
            self.on.run("mount -t ext4 -o dax /dev/pmem0 /mnt")
        return self.on

    def boot_on_disk(self, rate, new=False):
        """A machine with a disk that writes at this rate, and nothing else, with ext4 mounted from it."""
        self.off()
        if new:
            with open(self.disk, "wb") as file:
                file.truncate(DISK_MIB << 20)
        self.on = self.switched_on("mem-ctrl", [], (self.disk, rate))
        self.boots += 1
        self.on.run("for i in $(seq 600); do test -b /dev/vda && break; sleep 0.1; done; test $i -lt 600")
        self.on.run(("mkfs.ext4 -q -b 4096 /dev/vda && " if new else "") + "mount -t ext4 /dev/vda /mnt")
        return self.on

    def switched_on(self, persistence, modules, disk=None):
        # On a busy host an emulated machine may find its own timers broken before it has started anything, or go
        # round for ever and say nothing, which was seen once.
        for attempt in range(BOOTS_MAX):
            try:
                return machine.Machine(
                    self.kernel, self.initrd, modules, self.log, self.acknowledged, persistence, disk,
                    machine.BOOT_S_FIRST << attempt,
                )
            except Failed:
                if attempt == BOOTS_MAX - 1:
                    raise

    def machine(self):
        """The machine that is on; one is switched on if need be."""
        return self.on or self.boot()

    def off(self):
        """Switched off without any warning."""
        if self.on:
            self.on.kill()
            self.on = None

    def mounted(self, medium):
        """A fresh file system on this medium, mounted on /tmp/mount."""
        guest = self.machine()
        guest.run(MKFS[medium])
        guest.run(f"mkdir -p /tmp/mount && lode mount {POOLS[medium]} /tmp/mount")
        return guest


def info(guest, pool):
    return json.loads(guest.run(f"lode info {pool} --json"))["pool"]["media"]


def mapping_flags(guest, pool):
    """The VmFlags that all parts of the mount server's mapping of its pool have."""
    smaps = guest.run("cat /proc/$(pidof lode)/smaps")
    parts = re.findall(rf"^\S+-\S+ .* {re.escape(pool)}$.*?^VmFlags:(.*?)$", smaps, re.MULTILINE | re.DOTALL)
    assert parts, f"{pool} is not mapped:\n{smaps[:2000]}"
    return set.intersection(*(set(part.split()) for part in parts))


def detection(context):
    """What lode takes the media for: kind and domain; and MAP_SYNC, as the mount server's smaps have it"""
    for persistence, domain in (("cpu", "cpu-cache"), ("mem-ctrl", "memory")):
        guest = context.boot(persistence)
        for medium, kind in (("fsdax", "dax-file"), ("devdax", "device-dax")):
            guest.run(MKFS[medium])
            media = info(guest, POOLS[medium])
            region = media["regions"][0]
            found = (region["kind"], media["detected"], media["domain"], media["emulated"], region["numa_node"])
            assert found == (kind, domain, domain, False, 0), f"{medium} with {persistence}: {media}"
            synchronous = "sf" in mapping_flags(context.mounted(medium), POOLS[medium])
            assert synchronous == (medium == "fsdax"), f"{medium}: MAP_SYNC is {synchronous}"
            guest.run("lode umount /tmp/mount")
    guest.run(f"lode mkfs /mnt/first.pool,{DEVICE} --size 128M --force")
    media = info(guest, "/mnt/first.pool")
    assert [r["kind"] for r in media["regions"]] == ["dax-file", "device-dax"] and media["domain"] == "memory", media
    status, said = guest.status(f"lode mkfs /tmp/first.pool,{DEVICE} --size 128M --force")
    assert status == 1 and "cannot mix persistent memory" in said, said
    guest.run(f"umount /mnt && mount -t ext4 -o dax=never /dev/pmem0 /mnt && {MKFS['fsdax']}")
    media = info(guest, FILE)
    assert (media["detected"], media["regions"][0]["kind"]) == ("page-cache", "file"), f"without -o dax: {media}"
    guest = context.boot("unarmed")
    said = guest.run(f"lode mkfs {DEVICE} --force")
    assert "domain volatile" in said and "read-only" in said, f"NVDIMMs that are not armed: {said}"
    context.off()
    context.note = "dax-file with MAP_SYNC and device-dax, as memory and as cpu-cache; not armed; ext4 without dax"


def bench(context):
    """lode bench --smoke on both media: that every row runs"""
    # It takes no device that holds anything.
    if context.prepared:
        context.blank()
    guest = context.machine()
    rows = {}
    for medium, pool in POOLS.items():
        command = f"lode bench --smoke --only data,names --peers tmpfs --pool {pool} --threads 1 --json 2>/tmp/progress || cat /tmp/progress"
        report = json.loads(guest.run(command, seconds=300))
        assert report["machine"]["domain"] == "memory" and not report["machine"]["emulated"], report["machine"]
        rows[medium] = sum(row["system"] == "lode" for row in report["rows"])
        assert rows[medium] >= 8, f"{medium}: only {rows[medium]} rows"
    guest.run(f"test -c {DEVICE}")
    context.note = f"rows of lode: {rows}; an emulated NVDIMM under an emulated processor, so no figures"


def use(context):
    """A tree is copied to the mount, the pool closed, opened again, and compared; lode ls and cat agree; hello.c"""
    for medium, pool in POOLS.items():
        guest = context.mounted(medium)
        guest.run("cp -a /lib/guest /tmp/mount/tree && ln /tmp/mount/tree/order /tmp/mount/tree/link")
        sums = guest.run("cd /tmp/mount && find . -type f | sort | xargs md5sum; cd /")
        guest.run("lode umount /tmp/mount")
        assert "state     clean" in guest.run(f"lode info {pool}"), f"{medium}: not clean after umount"
        assert "tree" in guest.run(f"lode ls {pool}:/").split()
        assert guest.run(f"lode cat {pool}:/tree/link") == guest.run("cat /lib/guest/order")
        guest.run(f"lode mount {pool} /tmp/mount")
        again = guest.run("cd /tmp/mount && find . -type f | sort | xargs md5sum; cd /")
        assert sums == again and sums.count("\n") > 8, f"{medium}: the tree differs:\n{sums}\n{again}"
        status, said = guest.status(f"lode mkfs {pool} --force")
        assert status == 1 and "in use by" in said, f"{medium} is mounted, and mkfs says {said}"
        guest.run("lode umount /tmp/mount")
        for _ in range(2):
            said = guest.run(f"hello {pool}")
            assert "Hello from slow memory." in said, said


def library(context):
    """The library's tests with their pools in files on ext4 with -o dax"""
    guest = context.machine()
    guest.run("rm -rf /mnt/* && mkdir -p /mnt/tests")
    total = 0
    for name in LIBRARY_TESTS:
        said = guest.run(
            f"LODESTONE_TEST_DIR=/mnt/tests TMPDIR=/mnt/tests test-{name} --test-threads=2", seconds=600
        )
        done = re.search(r"test result: ok\. (\d+) passed; 0 failed", said)
        assert done, f"{name}: {said[-600:]}"
        total += int(done[1]) - said.count("SKIPPED: ")
    context.note = f"{total} tests of {', '.join(LIBRARY_TESTS)}"


def fsx(context):
    """fsx 0.3.2 on the mount of each medium, memory-mapped operations included"""
    operations = 10_000 if context.options.long else 1_000
    for seed, medium in enumerate(POOLS, 1):
        guest = context.mounted(medium)
        said = guest.run(f"fsx -f /lib/guest/fsx.toml -N {operations} -S {seed} -P /tmp /tmp/mount/f 2>&1 | tail -3", seconds=1800)
        assert "A-OK" in said, f"{medium}: {said}"
        guest.run("lode umount /tmp/mount")
    context.note = f"{operations} operations each"


def pjdfstest(context):
    """pjdfstest 0.2.2 on the mount; the short form runs rename, link and unlink, on fsdax, the long one all on both"""
    tests = "" if context.options.long else "rename link unlink"
    notes = []
    for medium in POOLS if context.options.long else ["fsdax"]:
        guest = context.mounted(medium)
        guest.run("mkdir -p /tmp/second && mount -t tmpfs none /tmp/second")
        said = guest.run(
            f"NO_COLOR=1 pjdfstest -c /lib/guest/pjdfstest.toml -p /tmp/mount {tests} > /tmp/pjdfstest.log 2>&1; "
            "grep -E 'FAILED|failed,' /tmp/pjdfstest.log", seconds=1800,
        )
        summary = re.search(r"(\d+) failed, (\d+) skipped, (\d+) passed", said)
        assert summary and summary[1] == "0" and int(summary[3]) >= (384 if context.options.long else 50), f"{medium}: {said[-1500:]}"
        notes.append(f"{medium} {summary[3]} passed, {summary[2]} skipped by pjdfstest")
        guest.run("umount /tmp/second; lode umount /tmp/mount")
    context.note = "; ".join(notes)


def power(context):
    """Power cuts: QEMU killed under load; what was acknowledged over the serial line is there at the next boot"""
    cuts = context.options.cuts or (50 if context.options.long else 4)
    rng = random.Random(context.options.seed)
    context.blank()
    guest = context.boot()
    # The first cut comes right after the pools were made, with nothing synced by hand.
    guest.run(f"acked make {FILE} {160 << 20} && acked make {DEVICE}")
    judges = {medium: Judge(context.options, "judge") for medium in POOLS}
    pending = {}
    acknowledged = happened = early = 0
    for cut in range(cuts + len(POOLS)):
        medium = list(POOLS)[cut % len(POOLS)]
        if cut:
            # Both media meet both domains.
            guest = context.boot(("mem-ctrl", "cpu")[cut // 2 % 2])
        if medium in pending:
            found = guest.run(f"acked list {POOLS[medium]} {THREADS}")
            happened += judges[medium].verdict(*pending.pop(medium), found)[0]
        if cut >= cuts:
            continue
        seed = context.options.seed * 1000 + cut
        guest.start(f"acked load {POOLS[medium]} {seed} {THREADS} port:{ACKNOWLEDGED_PORT}")
        wait(guest, context.acknowledged, rng.random() < 0.8)
        time.sleep(rng.uniform(0, 3))
        ended = guest.ended()
        context.off()
        sent = image.read(context.acknowledged)
        assert not ended, f"cut {cut}, {medium}: the load ended by itself, see the log"
        counts = [sent.count(b"abcdefgh"[t : t + 1]) for t in range(THREADS)]
        context.log.write(f"\ncut {cut}, {medium}, seed {seed}: {counts} operations acknowledged\n".encode())
        early += b"R" not in sent
        acknowledged += sum(counts)
        pending[medium] = (seed, sent)
    assert acknowledged > 20 * cuts, f"only {acknowledged} operations in {cuts} cuts"
    context.note = (
        f"{cuts} cuts ({early} before the pool was open), {acknowledged} operations acknowledged, "
        f"{happened} interrupted ones had happened, 0 violations"
    )


def disk(context):
    """Power cuts that lose the page cache: pools in ordinary files on ext4 on a disk; what a sync covers is there, byte for byte

    After a failure the disk as the cut left it is in the logs' folder, and so are all rounds, for `acked judge-deferred`.
    """
    cuts = context.options.cuts or (30 if context.options.long else 2)
    rng = random.Random(context.options.seed)
    guest = context.boot_on_disk(0, new=True)
    judges = {}
    for mode, pool in DISK_POOLS.items():
        guest.run(f"lode mkfs {pool} --size {DISK_POOL_MIB}M --data {mode} && acked furnish {pool}")
        judges[mode] = Judge(context.options, "judge-deferred", os.path.join(context.options.logs, f"disk-{mode}.rounds"))
    kept = os.path.join(context.options.logs, "disk.img")
    total = dict.fromkeys(("acknowledged", "covered", "older", "mixed", "early"), 0)
    for cut in range(cuts):
        mode, pool = list(DISK_POOLS.items())[cut % len(DISK_POOLS)]
        # Each pool meets all of them.
        how = list(WRITE_BACK)[(cut + cut // len(WRITE_BACK)) % len(WRITE_BACK)]
        seed = context.options.seed * 1000 + cut
        load = [f"echo {value} > /proc/sys/vm/{name};" for name, value in WRITE_BACK[how].items()]
        load += [f"acked stir {pool} {seed} &"] if how == "stirred" else []
        load += [f"acked load-deferred {pool} {seed} {THREADS} port:{ACKNOWLEDGED_PORT}"]
        guest.start(" ".join(load))
        opened = rng.random() < 0.8
        wait(guest, context.acknowledged, opened)
        time.sleep(rng.uniform(0, 4 if opened else 1))
        ended = guest.ended()
        context.off()
        sent = image.read(context.acknowledged)
        assert not ended, f"cut {cut}, {mode}: the load ended by itself, see the log"
        # The next boot changes it.
        subprocess.run(["cp", "--sparse=always", context.disk, kept], check=True)
        guest = context.boot_on_disk(rng.choice(DISK_RATES))
        if cut % DISK_CUT_AGAIN_EVERY == DISK_CUT_AGAIN_EVERY - 1:
            # While it recovers.
            guest.start(f"acked list {pool} {THREADS}")
            time.sleep(rng.uniform(0, 1))
            guest = context.boot_on_disk(rng.choice(DISK_RATES))
        found = guest.run(f"acked list {pool} {THREADS}")
        covered, older, mixed = judges[mode].verdict(seed, sent, found)
        acknowledged = len(sent) - sent.count(b"R")
        context.log.write(
            f"\ncut {cut}, {mode}, seed {seed}, written back {how}: {acknowledged} acknowledged, {covered} covered, {older} older, "
            f"{mixed} threads mixed\n".encode()
        )
        for name, count in zip(total, (acknowledged, covered, older, mixed, b"R" not in sent)):
            total[name] += count
    for pool in DISK_POOLS.values():
        guest.run(f"lode fsck {pool}")
    context.off()
    os.remove(kept)
    # Or nothing was tried. A few cuts may all come before a sync, or right behind one.
    assert cuts < DISK_CUTS_TELLING or total["covered"] and total["older"], total
    context.note = (
        f"{cuts} cuts ({total['early']} before the pool was open) and {cuts // DISK_CUT_AGAIN_EVERY} more in the next boot, "
        f"{total['acknowledged']} operations acknowledged, {total['covered']} covered by a sync; {total['older']} files and directories "
        f"older, as is allowed, {total['mixed']} threads of several moments; 0 violations"
    )


def wait(guest, acknowledged, opened):
    """Until the load has begun; where `opened` says so, until it has opened the pool."""
    give_up = time.monotonic() + 60
    while opened and b"R" not in image.read(acknowledged):
        if guest.ended() or time.monotonic() > give_up:
            raise Failed("the load did not open its pool")
        time.sleep(0.02)


def wsp(context):
    """lode wsp in the guest, with memory on both media: power cuts behind suspends, in them, and while guests run"""
    domains = {"mem-ctrl": "memory", "cpu": "cpu-cache"} if context.options.long else {"mem-ctrl": "memory"}
    context.note = nested.run(context, domains, 6 if context.options.long else 0)


class Judge:
    """A judge that `acked` has, which knows what the pool must hold."""

    def __init__(self, options, kind, log=os.devnull):
        self.process = subprocess.Popen([acked(options), kind, str(THREADS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.log = open(log, "w", encoding="utf-8")

    def verdict(self, seed, sent, found):
        """The numbers it gives; a violation is an AssertionError."""
        opened = re.search(r"^opened: voided \d+ damaged 0 ", found, re.MULTILINE)
        assert opened, f"seed {seed}: the pool was not opened without damage: {found[-300:]}"
        lines = [line for line in found.splitlines() if re.match(r"\d ", line)]
        for file in (self.log, self.process.stdin):
            file.write("\n".join([f"round {seed} {sent.decode()}", *lines, "end"]) + "\n")
            file.flush()
        verdict = self.process.stdout.readline().split()
        assert verdict and verdict[0] == "ok", f"seed {seed}: {' '.join(verdict)}"
        return [int(number) for number in verdict[1:]]


SUITES = [bench, detection, use, library, fsx, pjdfstest, power, disk, wsp]


def acked(options):
    return os.path.join(os.path.dirname(options.lode), "acked")


def programs(options, chosen):
    """What is to run in the guest, with what else was built beside lode; name: path."""
    release = os.path.dirname(options.lode)
    subprocess.run(
        ["make", "-s", "-C", "crates/capi", "example", "CARGO=true", f"CARGO_TARGET_DIR={os.path.dirname(release)}"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )
    found = {
        "busybox": image.which("busybox"), "mkfs.ext4": image.which("mkfs.ext4"), "lode": options.lode, "acked": acked(options),
        "hello": os.path.join(release, "capi", "hello"),
    }
    for tool in ("pjdfstest", "fsx"):
        found[tool] = os.path.join(options.tools, tool)
    if library not in chosen:
        return found
    tests = [argument for name in LIBRARY_TESTS for argument in ("--test", name)]
    # Of the whole workspace, as the gate builds them (tests/all.py): else they would be compiled anew.
    workspace = ["--workspace"] if options.long else ["--profile", "bench", "--workspace", "--exclude", "lodestone-preload"]
    built = subprocess.run(
        [CARGO, "test", "-q", *workspace, "--no-run", "--message-format=json", *tests],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] in LIBRARY_TESTS:
            found["test-" + message["target"]["name"]] = message["executable"]
    return found


def main():
    options = parse()
    if options.list:
        for suite in SUITES:
            print(f"{suite.__name__:12} {suite.__doc__.splitlines()[0]}")
        return 0
    chosen = choose(options.only)
    # The machine goes with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run.py: ended by SIGTERM"))
    os.makedirs(options.logs, exist_ok=True)
    cache = os.path.join(TARGET, "guest")
    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix="lode-guest-")
    try:
        return run_chosen(chosen, cache, work, options)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run_chosen(chosen, cache, work, options):
    initrd = os.path.join(work, "initrd.cpio")
    try:
        image.which(machine.QEMU)
        kernel = image.fetch_kernel(cache, print)
        files = {"fsx.toml": image.read(os.path.join(ROOT, "tests", "mount", "fsx.toml"))}
        files["pjdfstest.toml"] = PJDFSTEST.format(second="/tmp/second").encode()
        image.build(initrd, kernel, programs(options, chosen), files)
    except image.Unavailable as missing:
        print(f"SKIP guest: {missing}")
        print(f"guest: 0 passed, 0 failed, {len(chosen)} skipped")
        return 1
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    begun = time.monotonic()
    with open(os.path.join(options.logs, "console.log"), "wb") as log:
        guest = Guest(work, kernel, initrd, log, options)
        for suite in chosen:
            counts[run_suite(suite, guest)] += 1
        guest.off()
    print(f"guest: {guest.boots} boots in {time.monotonic() - begun:.0f} s, kernel {os.path.basename(kernel)}")
    print(f"guest: {counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


def run_suite(suite, guest):
    """One suite; prints its line and returns the verdict. After a failure the next one gets a fresh machine."""
    begun = time.monotonic()
    guest.note = ""
    guest.log.write(f"\n==== {suite.__name__}\n".encode())
    try:
        suite(guest)
        verdict, reason = "PASS", guest.note
    except image.Unavailable as missing:
        verdict, reason = "SKIP", str(missing)
    except (AssertionError, Failed, OSError, ValueError, KeyError) as failure:
        verdict, reason = "FAIL", f"{type(failure).__name__}: {failure}".replace("\n", "\n      ") + f"\n      log: {guest.log.name}"
        guest.log.write(traceback.format_exc().encode())
        guest.blank()
    except BaseException:
        guest.off()
        raise
    print(f"{verdict} {suite.__name__} ({time.monotonic() - begun:.1f} s){': ' + reason if reason else ''}", flush=True)
    return verdict


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lode", default=os.path.join(TARGET, "release", "lode"))
    parser.add_argument("--tools", default=os.path.join(TARGET, "tools", "bin"))
    parser.add_argument("--logs", default=os.path.join(TARGET, "test-logs", "guest"))
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--cuts", type=int, default=0, help="power cuts in each suite that has them, instead of 4 and 2, or 50 and 30")
    parser.add_argument("--seed", type=int, default=1, help="another number, other operations and moments")
    return parser.parse_args()


def choose(only):
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {suite.__name__ for suite in SUITES}
    if unknown:
        sys.exit(f"run.py: no suite is called {', '.join(sorted(unknown))} (--list names them)")
    return [suite for suite in SUITES if not names or suite.__name__ in names]


if __name__ == "__main__":
    sys.exit(main())
