"""`lode wsp` in the machine: guests within the guest, in memory of both media, whose power goes with the machine's.

The inner guests are firmware alone (inner.s), which says on its serial line what round over its memory it is in, and how many
words it found wrong. That line is a file on tmpfs: after a power cut it begins with what a resumed guest says.
"""

import glob
import json
import os
import random
import re
import subprocess
import time

import image
from machine import Failed

HERE = os.path.dirname(os.path.abspath(__file__))
LODE = "lode wsp --wsp-dir /mnt/wsp"
MEDIA = {"fsdax": "/mnt/guests", "devdax": "/dev/dax1.0"}
MIB = 1 << 20
# Of the inner guests: memory, what they store to, and what they only look at behind that.
RAM_BYTES, FIRST, END, LOOKED_END = 64 * MIB, 2 * MIB, 34 * MIB, 42 * MIB
# One round may have been looked at by half, and what is missing shows in the next.
ROUNDS = 3
# Power cuts of a cycle besides those in suspends.
CUTS = 3
ROUND = re.compile(r"^round ([0-9a-f]{8}) wrong ([0-9a-f]{8})$", re.MULTILINE)
TRACING = "/sys/kernel/tracing"
PAGE_BYTES = 4096


def firmware(work):
    """The bytes of inner.s."""
    unlinked, linked = os.path.join(work, "inner.o"), os.path.join(work, "inner.bin")
    extent = ["--defsym", f"END={END}", "--defsym", f"LOOKED_END={LOOKED_END}"]
    for command in (
        [image.which("as"), "--32", *extent, "-o", unlinked, os.path.join(HERE, "inner.s")],
        [image.which("ld"), "-m", "elf_i386", "-Ttext", "0xffff0000", "--oformat", "binary", "-o", linked, unlinked],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise image.Unavailable(f"the inner guest is not to be made with {command[0]}: {done.stderr.strip()[-200:]}")
    return image.read(linked)


def emulator():
    """QEMU and what it loads at its start, all of which lies in the machine where it lies here."""
    qemu = os.path.realpath(image.which("qemu-system-x86_64"))
    if not image.read(qemu).startswith(b"\x7fELF"):
        raise image.Unavailable(f"{qemu} is no program that could be copied into the machine with its libraries")
    firmware_of_qemu = "/usr/share/qemu/kvmvapic.bin"
    if not os.path.exists(firmware_of_qemu):
        raise image.Unavailable(f"QEMU's {firmware_of_qemu} is not there")
    # Where it is not a module it is built in.
    return qemu, [qemu, firmware_of_qemu, *glob.glob("/usr/lib/*/qemu/accel-tcg-x86_64.so")]


def build(work, kernel, lode):
    """The initial file system, and the path of QEMU there."""
    initrd = os.path.join(work, "nested.cpio")
    programs = {"busybox": image.which("busybox"), "mkfs.ext4": image.which("mkfs.ext4"), "lode": lode}
    qemu, others = emulator()
    image.build(initrd, kernel, programs, {"inner.bin": firmware(work)}, others=others)
    return initrd, qemu


def start(guest, qemu, name):
    guest.run(f"mkdir -p {MEDIA['fsdax']}")
    guest.run(
        f"{LODE} start {name} --ram {RAM_BYTES // MIB}M --media {MEDIA[name]} --accel tcg --qemu {qemu} -- "
        f"-bios /lib/guest/inner.bin -serial file:/tmp/{name}.serial"
    )


def booted(guest, name):
    """That it begins anew, and its memory is whole."""
    said = rounds(guest, name)
    assert said.startswith("boot\n") and ROUND.search(said)[1] == "00000001", f"{name} did not boot: {said[:200]}"


def rounds(guest, name):
    """What a guest says, when that is some whole rounds. No word of its memory was wrong."""
    guest.run(f"until test $(grep -c '^round.*wrong ........$' /tmp/{name}.serial) -ge {ROUNDS}; do sleep 0.1; done")
    said = guest.run(f"cat /tmp/{name}.serial") + "\n"
    wrong = [found[0] for found in ROUND.finditer(said) if int(found[2], 16)]
    assert not wrong, f"{name}: memory is not what it was: {wrong[0]}"
    return said


def goes_on(guest, name, last):
    """That what a guest says since its resume comes right behind what it said before."""
    said = rounds(guest, name)
    first = int(ROUND.search(said)[1], 16)
    # It may have been in the middle of a line.
    expected = last + (1 if said.startswith("round ") else 2)
    assert "boot" not in said and first == expected, f"{name}: round {last} before the suspend, and then {said[:200]!r}"


def last_rounds(said):
    """The last round of each guest, of what `tail` says of all their files."""
    parts = re.findall(r"==> /tmp/(\w+)\.serial <==\n(.*?)(?=\n==>|\Z)", said + "\n", re.DOTALL)
    return {name: int(ROUND.findall(text)[-1][0], 16) for name, text in parts}


def document(said):
    """The JSON document that begins what was said, and what comes behind it."""
    found, end = json.JSONDecoder().raw_decode(said)
    return found, said[end:]


def suspend_all(guest):
    """The entry of each guest, and the last round that it told."""
    found, behind = document(guest.run(f"{LODE} suspend --all --json && tail -n 3 /tmp/*.serial"))
    entries = {entry["name"]: entry for entry in found["guests"]}
    assert sorted(entries) == sorted(MEDIA), f"not all were suspended: {found}"
    return entries, last_rounds(behind)


def resume_all(guest):
    found, _ = document(guest.run(f"{LODE} resume --all --json"))
    for entry in found["guests"]:
        assert entry["state"] == "running" and [phase["name"] for phase in entry["phases"]] == ["start", "load", "finish"], entry
    return {entry["name"]: entry for entry in found["guests"]}


def status_of(guest, name):
    return json.loads(guest.run(f"{LODE} status {name} --json"))


def refused(guest, line, words):
    status, said = guest.status(f"{LODE} {line}")
    assert status == 1 and words in said, f"{line}: status {status}, {said}"


def trace(guest):
    """Has the kernel note each page of a DAX mount that it writes back; whether it can."""
    events = f"{TRACING}/events/fs_dax/dax_writeback_one"
    status, _ = guest.status(f"mount -t tracefs none {TRACING} && echo 8192 > {TRACING}/buffer_size_kb && echo 1 > {events}/enable")
    return status == 0


def traced_bytes(guest, path):
    """What the kernel wrote back of a guest's memory, without the record behind it. A page counts once: what has been dirty for
    some 30 s the kernel writes by itself, and again when it was stored to since.
    """
    inode = int(guest.run(f"stat -c %i {path}"))
    said = guest.run(f"sed -n 's/.* ino {inode:#x} pgoff 0x/0x/p' {TRACING}/trace | sort -u; echo 0 > {TRACING}/events/enable")
    runs = ((int(first, 16), int(pages, 16)) for first, pages in (line.split(" pglen ") for line in said.splitlines()))
    written = {page for first, pages in runs for page in range(first, first + pages)}
    return sum(page < RAM_BYTES // PAGE_BYTES for page in written) * PAGE_BYTES


def told(guest, domain, figures):
    """Suspended and resumed with the power on: what is told of it, beside what the kernel did."""
    # Where caches survive the kernel goes over its pages, too, and flushes none.
    write_cache = guest.run("cat /sys/block/pmem0/dax/write_cache")
    assert write_cache == str(int(domain == "memory")), f"as {domain} the kernel's write_cache is {write_cache}"
    traces = domain == "memory" and trace(guest)
    entries, last = suspend_all(guest)
    for name, entry in entries.items():
        assert entry["domain"] == domain and [p["name"] for p in entry["phases"]] == ["prepare", "write-back", "finish"], entry
        memory = next(dirty for dirty in entry["dirty"] if dirty["media"] == "memory")
        if domain == "cpu-cache":
            assert memory["bytes"] == 0, f"{name}: caches survive, and lines are written back: {memory}"
        else:
            assert LOOKED_END - FIRST <= memory["bytes"] <= RAM_BYTES and memory["at_most"] == (name == "fsdax"), (name, memory)
        figures[domain, name, "told"] = memory["bytes"]
        status = status_of(guest, name)
        found = (status["state"], status["domain"], status["survives"], status["suspends"]["count"])
        assert found == ("suspended", domain, "power loss", 1) and status["energy_window_us"][1] > 0, status
    if traces:
        figures[domain, "fsdax", "written"] = written = traced_bytes(guest, f"{MEDIA['fsdax']}/fsdax.wsp/ram")
        assert written >= END - FIRST, f"the kernel wrote back {written} bytes alone"
        assert written <= figures[domain, "fsdax", "told"], figures
    resume_all(guest)
    for name in MEDIA:
        goes_on(guest, name, last[name])


def cut_after_suspend(context, persistence, domain):
    """The power goes when the suspend is acknowledged; then while the resumed guests run; then while they run that were booted."""
    entries, last = suspend_all(context.on)
    guest = context.boot(persistence)
    for name in MEDIA:
        status = status_of(guest, name)
        assert (status["state"], status["domain"], status["suspends"]["count"]) == ("suspended", domain, 2), status
    guest.run(f"{LODE} resume fsdax --clone copy")
    goes_on(guest, "fsdax", last["fsdax"])
    guest.run(f"{LODE} stop copy && {LODE} rm copy --force && rm /tmp/fsdax.serial")
    refused(guest, "resume devdax --clone copy", "for no private copy")
    resumed = resume_all(guest)
    for name in MEDIA:
        goes_on(guest, name, last[name])
    for why in ("has been consumed", "was not suspended since it was booted"):
        guest = context.boot(persistence)
        for name in MEDIA:
            assert status_of(guest, name)["state"] == "off"
            refused(guest, f"resume {name}", why)
            refused(guest, f"resume {name}", f"`lode wsp start {name}` boots the guest")
            guest.run(f"{LODE} start {name}")
            booted(guest, name)
    return entries, resumed


def cut_in_suspend(context, persistence, rng, at_most_s):
    """The power goes while guests are being suspended; each is suspended then, and whole, or not: how many are."""
    context.on.start(f"{LODE} suspend --all")
    time.sleep(rng.uniform(0, at_most_s))
    guest = context.boot(persistence)
    suspended = 0
    for name in MEDIA:
        status = status_of(guest, name)
        if status["state"] == "suspended":
            guest.run(f"{LODE} resume {name}")
            assert "boot" not in rounds(guest, name)
            suspended += 1
        else:
            assert status["state"] == "off", status
            refused(guest, f"resume {name}", "boots the guest")
            guest.run(f"{LODE} start {name}")
            booted(guest, name)
    return suspended


def cycle(context, qemu, persistence, domain, cuts, figures):
    """All of it in one domain; how many guests were suspended by the moment of each cut."""
    context.blank()
    guest = context.boot(persistence)
    for name in MEDIA:
        start(guest, qemu, name)
        booted(guest, name)
        assert status_of(guest, name)["state"] == "running"
    told(guest, domain, figures)
    entries, resumed = cut_after_suspend(context, persistence, domain)
    for name in MEDIA:
        for what, entry in (("suspend", entries[name]), ("resume", resumed[name])):
            figures[domain, name, what] = {phase["name"]: round(phase["us"] / 1e3) for phase in entry["phases"]}
    rng = random.Random(f"{context.options.seed} {domain}")
    # From before the command runs to where all is done.
    return sum(cut_in_suspend(context, persistence, rng, 1.5) for _ in range(cuts))


def run(context, domains, cuts):
    """`cuts` power cuts in suspends, in each of `domains` (what the NVDIMMs declare: the domain); what is noted of it."""
    plain = context.initrd
    context.initrd, qemu = build(context.work, context.kernel, context.options.lode)
    figures = {}
    try:
        suspended = sum(cycle(context, qemu, *domain, cuts, figures) for domain in domains.items())
    except Failed:
        log_of_emulators(context)
        raise
    finally:
        context.initrd = plain
        # Its guests are in the way of other suites.
        context.blank()
    context.log.write(f"\nfigures: {figures}\n".encode())
    return "; ".join(sentences(domains, cuts, suspended, figures))


def sentences(domains, cuts, suspended, figures):
    """What the run showed, in words."""
    yield f"{len(domains) * (CUTS + cuts)} cuts, no word of memory was wrong"
    if cuts:
        in_suspends = len(domains) * cuts
        yield f"{in_suspends} of them in suspends, where {suspended} of {in_suspends * len(MEDIA)} guests were suspended already"
    for domain in domains.values():
        for name in MEDIA:
            suspend, resume = figures[domain, name, "suspend"], figures[domain, name, "resume"]
            told = f"{figures[domain, name, 'told'] / MIB:.2f} MiB"
            written = figures.get((domain, name, "written"))
            beside = f" (the kernel: {written / MIB:.2f})" if written else ""
            yield f"{name} as {domain}: suspend {phases(suspend)}, told {told}{beside}, resume {phases(resume)}"


def phases(times):
    return " + ".join(f"{name} {ms}" for name, ms in times.items()) + " ms"


def log_of_emulators(context):
    """What the emulators said, into the log."""
    if context.on:
        try:
            context.on.status("tail -n 5 /mnt/wsp/*/qemu.log", seconds=10)
        except Failed:
            context.log.write(b"\nnothing to be had of the emulators\n")
