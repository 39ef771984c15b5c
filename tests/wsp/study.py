#!/usr/bin/env python3
"""How long whole systems take to suspend and resume, beside what else there is, and what a database gains (WSP Figures 1 to 4).

    sizes      suspend and resume by size of memory and number of processors; medians, and the spread over sizes
    dirty      suspend by how much the guest stored to since its resume, on media of all three kinds
    save       QEMU's own save of all memory to a file, and going on from there, beside ours
    hibernate  a guest's own suspend to disk, and going on from there, beside ours
    database   RocksDB in the guest (kv.c): the first 1000 reads after a cold boot, and after a resume
    memory     the same reads with all of the database in memory: that in DRAM, or on media
    model      the same with memory that has a latency: that of DRAM, or of Optane (a plugin of the emulator's, slow.c)

Systems take turns. All of it is of an emulated processor where KVM does not work: ratios, not figures of a machine.

    study.py --out DIR             a table, DIR/wsp.json (with all histograms), DIR/wsp.svg, wsp-database.svg and wsp-dirty.svg
    study.py --out DIR --quick     small memory, few rounds: does it work at all; the gate runs it
    study.py --out DIR --media DIR --only sizes,save

A part that fails is said, the others go on, and the status is 1.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree

sys.dont_write_bytecode = True

import guest
import study_figures
import study_guests
from guest import Failed, Host, Unavailable, image
from study_guests import Lode, Plain

PARTS = ["sizes", "dirty", "save", "hibernate", "database", "memory", "model"]
WITH_DATABASE = {"database", "memory", "model"}
# A read takes so many times as long in the model's guest as on the host itself: memory is to be slower by as much.
MODEL_SLOWED = 40
# What a load takes that no cache has, of DRAM and of Optane (Yang et al., FAST 2020: 81 and 305 ns).
MODEL_NS = {"model-dram": 80, "model-media": 300}
TOUCHED_MIB = 1024
READS = 1000
# In which a kernel that goes on has done what it does now and then.
REST_S = 2


class Study:
    def __init__(self, host, options, work, program):
        self.host, self.options, self.work, self.program = host, options, work, program
        self.quick = options.quick
        self.results = {}
        self.accelerator, self.disk = "tcg", None
        self.entries = 5_000 if self.quick else 100_000
        self.size = {"ram": "512M", "touched_mib": 64} if self.quick else {"ram": "2G", "touched_mib": TOUCHED_MIB}

    def lode(self, name, ram, append, **more):
        made = Lode(self.host, self.work, name, ram, append, **more)
        self.accelerator = made.accelerator()
        return made

    def sizes(self):
        """Suspend and resume, by size and processors"""
        rounds = 2 if self.quick else self.options.rounds
        sizes = [("512M", 64), ("1G", 64)] if self.quick else [("512M", 256), ("2G", TOUCHED_MIB), ("6G", TOUCHED_MIB)]
        rows = []
        for cpus in (1,) if self.quick else (1, 2):
            for size, touched in sizes:
                say(f"sizes: {size}, {cpus} processors")
                one = self.lode("size", size, f"touch={touched}", cpus=cpus)
                one.wait(b"@idle")
                took = []
                for _ in range(rounds):
                    took.append((one.suspend(), one.resume()))
                    time.sleep(0.1)
                rows.append({
                    "ram": size, "cpus": cpus, "touched_mib": touched, "state_bytes": max(out["state_bytes"] for out, _ in took),
                    "suspends": phases_of([out for out, _ in took]), "resumes": phases_of([back for _, back in took]),
                })
                one.end()
        return rows

    def dirty(self):
        """Suspend by what was stored to since the resume"""
        amounts = [0, 16] if self.quick else [0, 1, 4, 16, 64, 256, 1024]
        rows = []
        for domain in study_figures.DOMAINS:
            say(f"dirty: {domain}")
            # On a file system of a disk the domain is what it is; tmpfs passes for persistent memory.
            kind = {"media": self.work} if domain == "page-cache" else {"options": ("--assume", domain)}
            touched = max(*amounts, 64)
            one = self.lode("dirty", "512M" if self.quick else "2G", f"touch={touched}", **kind)
            one.wait(b"@idle")
            # The first has all to write back that the boot stored to.
            first = one.suspend()
            one.resume()
            took = {mib: [] for mib in amounts if domain != "page-cache" or mib <= 256}
            for _ in range(1 if self.quick else 5):
                for mib in took:
                    one.ask(f"dirty {mib}", b"@dirtied")
                    took[mib].append(one.suspend())
                    one.resume()
            for mib, of in took.items():
                rows.append({
                    "domain": domain, "dirtied_mib": mib, "suspend_ms": statistics.median(out["ms"] for out in of),
                    "write_back_ms": statistics.median(out["phases_ms"]["write-back"] for out in of),
                    "all_ms": [out["ms"] for out in of], "first_after_boot_ms": first["ms"],
                })
            one.end()
        return rows

    def save(self):
        """QEMU's own save of everything to a file, taking turns with ours"""
        append = f"touch={self.size['touched_mib']}"
        say(f"save: {self.size['ram']} with {self.size['touched_mib']} MiB touched")
        ours = self.lode("ours", self.size["ram"], append)
        plain = Plain(self.host, self.work, "plain", mib_of(self.size["ram"]), append, self.accelerator)
        for one in (ours, plain):
            one.wait(b"@idle")
        path, rounds = os.path.join(self.work, "whole"), []
        for _ in range(1 if self.quick else 5):
            written, durable = plain.save(path)
            plain.kill()
            back = plain.load(path)
            # It is the same guest, and answers.
            plain.ask("dirty 1", b"@dirtied")
            rounds.append({"out_ms": written, "durable_ms": durable, "back_ms": back, "bytes": os.path.getsize(path)} | turn_of(ours))
            os.remove(path)
        plain.end()
        ours.end()
        return self.size | beside(rounds)

    def hibernate(self):
        """The guest's own suspend to disk, taking turns with ours"""
        append = f"touch={self.size['touched_mib']}"
        say(f"hibernate: {self.size['ram']} with {self.size['touched_mib']} MiB touched")
        swap = os.path.join(self.work, "swap.img")
        subprocess.run(["truncate", "-s", "4G", swap], check=True)
        drive = ("-drive", f"if=none,id=d0,file={swap},format=raw", "-device", "virtio-blk-pci,drive=d0")
        ours = self.lode("ours", self.size["ram"], append)
        plain = Plain(self.host, self.work, "plain", mib_of(self.size["ram"]), f"swap {append}", self.accelerator, qemu=drive)
        for one in (ours, plain):
            one.wait(b"@idle")
        rounds = []
        for _ in range(1 if self.quick else 3):
            said = len(plain.console())
            begun = time.monotonic()
            plain.say("hibernate")
            while plain.is_alive():
                if time.monotonic() - begun > 300 or b"@broken" in plain.console(said):
                    raise Failed(f"the guest does not hibernate: {plain.console(said)!r}")
                time.sleep(0.005)
            out = (time.monotonic() - begun) * 1e3
            begun = time.monotonic()
            plain.start()
            if b"@idle" in plain.wait(b"@woke", said):
                raise Failed("the guest booted, and did not go on")
            rounds.append({"out_ms": out, "back_ms": (time.monotonic() - begun) * 1e3} | turn_of(ours))
        plain.end()
        ours.end()
        os.remove(swap)
        return self.size | beside(rounds)

    def drive(self):
        """The database's disk, past the host's cache, so that a disk is a disk."""
        if not self.disk:
            self.disk = study_guests.database_disk(self.work, self.program, self.entries, 256)
        return ("-drive", f"if=none,id=d0,file={self.disk},format=raw,cache=none", "-device", "virtio-blk-pci,drive=d0")

    def database(self):
        """The first reads after a cold boot, and after a resume"""
        runs, translated = {}, {}
        for n in range(1 if self.quick else self.options.rounds):
            for order, _ in study_figures.ORDERS:
                say(f"database: {order}, round {n + 1}")
                one = self.lode("db", self.size["ram"], f"db={self.entries}", qemu=self.drive())
                one.wait(b"@ready")
                seed = 4 * n + 1
                for state in study_figures.STATES_OF["database"]:
                    if state == "resumed":
                        one.ask("warm", b"@warm")
                    if state in ("resumed", "rested"):
                        one.suspend()
                        one.resume()
                    if state == "rested":
                        time.sleep(REST_S)
                    before = one.translated()
                    runs.setdefault((order, state), []).append(reads(one, order, seed))
                    if before is not None:
                        translated.setdefault((order, state), []).append(one.translated() - before)
                    seed += 1
                one.end()
        rows = []
        for (order, state), of in runs.items():
            blocks = translated.get((order, state))
            rows.append(study_figures.row_of(order, state, of, blocks_translated=blocks and statistics.median(blocks)))
        return {"entries": self.entries, "reads": READS, "rows": rows}

    def memory(self):
        """Reads of a database that is in memory, by where that is"""
        append, ram = f"db={self.entries}", self.size["ram"]
        there = {
            "media": self.lode("media", ram, append, qemu=self.own_drive("media")),
            "disk": self.lode("disk", ram, append, qemu=self.own_drive("disk"), media=self.work),
        }
        there["dram"] = Plain(self.host, self.work, "dram", mib_of(ram), append, self.accelerator, qemu=self.own_drive("dram"))
        return self.warm_reads(there)

    def model(self):
        """The same, of memory that is as slow as it is said to be"""
        if self.accelerator == "kvm":
            raise Unavailable("it takes an emulated processor")
        plugin = study_guests.compiled(self.work, "slow", "-fPIC", "-shared")
        there = {}
        for name, ns in MODEL_NS.items():
            qemu = (*self.own_drive(name), "-plugin", f"file={plugin},ns={ns * MODEL_SLOWED}")
            there[name] = Plain(self.host, self.work, name, mib_of(self.size["ram"]), f"db={self.entries}", "tcg", qemu=qemu)
        of = self.warm_reads(there) | {"latency_ns": MODEL_NS, "slowed": MODEL_SLOWED}
        return of | {"on_host": study_figures.run_of(self.reads_on_host())}

    def reads_on_host(self):
        """Random reads of a database in memory without any guest: what an emulated processor is slower than."""
        done = subprocess.run(
            [self.program, os.path.join(self.work, "tree", "db"), "serve", str(self.entries)], input=f"warm\nrandom {READS} 1\nrandom {READS} 2\n",
            capture_output=True, text=True, check=True,
        )
        return latencies_of(done.stdout.encode(), last=True)

    def own_drive(self, name):
        """The database is opened for writing: each guest has a disk of its own."""
        self.drive()
        own = os.path.join(self.work, f"{name}.img")
        shutil.copy(self.disk, own)
        return ("-drive", f"if=none,id=d0,file={own},format=raw,cache=none", "-device", "virtio-blk-pci,drive=d0")

    def warm_reads(self, there):
        """Guests that have read all of it already, in turns."""
        say(f"reads of a database in memory: {', '.join(there)}")
        for one in there.values():
            one.wait(b"@ready")
            one.ask("warm", b"@warm")
        runs = {}
        for n in range(1 + (1 if self.quick else self.options.rounds)):
            for order, _ in study_figures.ORDERS:
                for state, one in there.items():
                    run = reads(one, order, n + 1)
                    # The first round is not counted: only then is all of that code translated.
                    if n > 0:
                        runs.setdefault((order, state), []).append(run)
        for name, one in there.items():
            one.end()
            os.remove(os.path.join(self.work, f"{name}.img"))
        rows = [study_figures.row_of(order, state, of) for (order, state), of in runs.items()]
        return {"entries": self.entries, "reads": READS, "rows": rows}


def say(text):
    print(text, file=sys.stderr, flush=True)


def reads(one, order, seed):
    """The latencies of exactly so many, in ns."""
    return latencies_of(one.ask(f"{order} {READS} {seed}", b"@end"))


def latencies_of(text, last=False):
    begin = (text.rindex if last else text.index)(b"@reads")
    found = [int(word) for word in text[begin:text.index(b"@end", begin)].split()[2:]]
    if len(found) != READS:
        raise Failed(f"{len(found)} reads were timed, not {READS}")
    return found


def phases_of(entries):
    """Median and worst, and the phases of one that took the median."""
    entries = sorted(entries, key=lambda entry: entry["ms"])
    return {
        "median_ms": statistics.median(entry["ms"] for entry in entries), "worst_ms": entries[-1]["ms"],
        "command_ms": statistics.median(entry["command_ms"] for entry in entries),
        "phases_ms": entries[len(entries) // 2]["phases_ms"], "count": len(entries),
    }


def turn_of(ours):
    out, back = ours.suspend(), ours.resume()
    return {
        "suspend_ms": out["ms"], "suspend_command_ms": out["command_ms"], "resume_ms": back["ms"], "resume_command_ms": back["command_ms"],
    }


def beside(rounds):
    """Medians of another way and of ours, and of their ratios, round by round."""
    middle = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    return middle | {
        "ratio": statistics.median(row["out_ms"] / row["suspend_ms"] for row in rounds),
        "back_ratio": statistics.median(row["back_ms"] / row["resume_ms"] for row in rounds), "rounds": rounds,
    }


def mib_of(size):
    return int(size[:-1]) << (10 if size.endswith("G") else 0)


def machine():
    """What it was measured on, and what else that did."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {"processor": names[0] if names else "", "processors": os.cpu_count(), "load": os.getloadavg()[0], "nice": os.nice(0)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lode", type=os.path.abspath, default=os.path.join(guest.ROOT, "target", "release", "lode"))
    parser.add_argument("--out", type=os.path.abspath, required=True)
    parser.add_argument("--media", default="")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    options = parser.parse_args()
    options.chosen = options.only.split(",")
    if set(options.chosen) - set(PARTS):
        sys.exit(f"study.py: there is only {', '.join(PARTS)}")
    return options


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("study.py: ended by SIGTERM"))
    os.makedirs(options.out, exist_ok=True)
    cache = os.path.join(os.path.dirname(options.out), "guest")
    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix="lode-study-", dir=options.out)
    media = tempfile.mkdtemp(prefix="lode-study-", dir=options.media or guest.media_dir(7))
    begun = machine()
    try:
        results, verdicts = run_chosen(options, cache, work, media)
    finally:
        shutil.rmtree(media, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    results["machine"] = begun | {"load_at_end": os.getloadavg()[0]}
    results["claims"] = study_figures.claims(results)
    write(options, results, verdicts)
    print(json.dumps(results, indent=1) if options.json else study_figures.table(results), flush=True)
    for part, (verdict, reason) in verdicts.items():
        print(f"{verdict} {part}{': ' + reason if reason else ''}", file=sys.stderr if options.json else sys.stdout)
    count = lambda which: sum(verdict == which for verdict, _ in verdicts.values())
    print(f"study: {count('PASS')} passed, {count('FAIL')} failed, {count('SKIP')} skipped", file=sys.stderr if options.json else sys.stdout)
    return 1 if count("FAIL") else 0


def run_chosen(options, cache, work, media):
    """The document, and what became of each part."""
    verdicts, chosen = {}, list(options.chosen)
    try:
        image.which("qemu-system-x86_64")
        kernel = image.fetch_kernel(cache, say)
        programs = {"busybox": image.which("busybox")}
    except Unavailable as missing:
        return {}, {part: ("SKIP", str(missing)) for part in chosen}
    program = None
    try:
        if WITH_DATABASE & set(chosen):
            program = programs["kv"] = study_guests.compiled(work, "kv", "-lrocksdb")
    except Unavailable as missing:
        verdicts = {part: ("SKIP", str(missing)) for part in chosen if part in WITH_DATABASE}
    initrd = os.path.join(work, "initrd.cpio")
    image.build(initrd, kernel, programs, {}, guest.MODULES, os.path.join(guest.HERE, "study_init"))
    with open(os.path.join(options.out, "study.log"), "wb") as log:
        study = Study(Host(options.lode, work, media, kernel, initrd, log), options, work, program)
        for part in [part for part in chosen if part not in verdicts]:
            verdicts[part] = run_part(study, part, log)
        study.results["accelerator"] = "kvm" if study.accelerator == "kvm" else "emulated processor"
    return study.results, verdicts


def run_part(study, part, log):
    begun = time.monotonic()
    log.write(f"\n==== {part}\n".encode())
    log.flush()
    try:
        study.results[part] = getattr(study, part)()
        return "PASS", f"{time.monotonic() - begun:.1f} s"
    except Unavailable as missing:
        return "SKIP", str(missing)
    except (Failed, OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as failure:
        log.write(traceback.format_exc().encode())
        return "FAIL", f"{type(failure).__name__}: {failure} (log: {log.name})"
    finally:
        # Whatever became of it: guests of the same names are the next's.
        study.host.end_all()
        Plain.end_all()
        shutil.rmtree(study.host.guests, ignore_errors=True)


def write(options, results, verdicts):
    """The document and its pictures; what they lack is a part's failure."""
    with open(os.path.join(options.out, "wsp.json"), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    passed = [part for part, (verdict, _) in verdicts.items() if verdict == "PASS"]
    lacks = study_figures.missing(results, passed) if passed else []
    # Who says that a document is whole has to see where it is not.
    for part in passed:
        if not study_figures.missing({name: of for name, of in results.items() if name != part}, passed):
            lacks.append(f"somebody who notices that {part} is gone")
    try:
        for name, text in study_figures.pictures(results).items():
            with open(os.path.join(options.out, name), "w", encoding="utf-8") as file:
                file.write(text)
            xml.etree.ElementTree.fromstring(text)
    except (KeyError, ValueError, xml.etree.ElementTree.ParseError) as failure:
        lacks.append(f"pictures: {type(failure).__name__}: {failure}")
    if lacks:
        verdicts["document"] = ("FAIL", "it lacks " + "; ".join(lacks))


if __name__ == "__main__":
    sys.exit(main())
