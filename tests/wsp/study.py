#!/usr/bin/env python3
"""How long whole systems take to suspend and resume, beside what else there is (WSP Figures 2 to 4).

    sizes      suspend and resume by size of memory and number of processors; medians, and the spread over sizes
    save       the same guest with QEMU's own save of all memory to a file
    hibernate  and the guest's own suspend to disk
    database   RocksDB in the guest (db_bench): the first reads after a cold boot, and after a resume

Systems take turns. All of it is of an emulated processor where KVM does not work: ratios, not figures of a machine.

    study.py --out DIR             a table, DIR/wsp.json and DIR/wsp.svg
    study.py --out DIR --quick     small memory, few rounds: does it work at all
    study.py --out DIR --media DIR --only sizes,save
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True

import guest
from guest import APPEND, Failed, Host, Qmp, Unavailable, image, make_disk

PARTS = ["sizes", "save", "hibernate", "database"]
TOUCHED_MIB = 1024


class Study:
    def __init__(self, host, options, work):
        self.host, self.options, self.work = host, options, work
        self.results, self.accelerated = {}, False

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def boot(self, name, ram, append, cpus=1, options=(), qemu=()):
        boot = [*self.host.boot, f"{APPEND} {append}", *qemu]
        media = ("--media", self.host.media)
        self.host.run("start", name, "--ram", ram, *media, "--cpus", str(cpus), *options, "--", *boot)
        self.accelerated = self.host.described(name)["accel"] == "kvm"

    def wait(self, name, word, count=1, seconds=600):
        give_up = time.monotonic() + seconds
        while self.host.console(name).count(word) < count:
            text = self.host.console(name)
            if time.monotonic() > give_up or b"@broken" in text or not self.host.emulators(name):
                raise Failed(f"{name} does not say {word.decode()}: {text[-300:].decode(errors='replace')}")
            time.sleep(0.005)

    def end(self, name):
        self.host.run("stop", name)
        self.host.run("rm", name)

    def sizes(self):
        """Suspend and resume, by size and processors"""
        rounds = 3 if self.options.quick else self.options.rounds
        rows = []
        sizes = [("512M", 256)] if self.options.quick else [("512M", 256), ("2G", TOUCHED_MIB), ("6G", TOUCHED_MIB)]
        for cpus in (1, 2):
            for size, touched in sizes:
                self.say(f"sizes: {size}, {cpus} processors")
                self.boot("size", size, f"touch={touched}", cpus)
                self.wait("size", b"@idle")
                for _ in range(rounds):
                    self.host.run("suspend", "size")
                    self.host.run("resume", "size")
                    time.sleep(0.1)
                status = self.host.json("status", "size")
                row = {"ram": size, "cpus": cpus, "touched_mib": touched}
                for what in ("suspends", "resumes"):
                    row[what] = {
                        "median_ms": status[what]["median_us"] / 1e3, "worst_ms": status[what]["worst_us"] / 1e3,
                        "phases_ms": {phase["name"]: phase["us"] / 1e3 for phase in status[what]["phases"]},
                        "count": status[what]["count"],
                    }
                rows.append(row)
                self.end("size")
        self.results["sizes"] = rows

    def save(self):
        """QEMU's own save of everything to a file, taking turns with ours"""
        size, touched = ("512M", 256) if self.options.quick else ("2G", TOUCHED_MIB)
        rows = []
        self.say(f"save: {size} with {touched} MiB touched")
        self.boot("save", size, f"touch={touched}")
        self.wait("save", b"@idle")
        for _ in range(2 if self.options.quick else 5):
            path = os.path.join(self.work, "whole")
            begun = time.monotonic()
            with Qmp(self.host.file("save", "qmp")) as qmp:
                qmp.run("stop")
                for name in ("x-ignore-shared", "events"):
                    qmp.run("migrate-set-capabilities", capabilities=[{"capability": name, "state": False}])
                qmp.run("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
                with open(path, "wb") as file:
                    qmp.run("getfd", file, fdname="whole")
                qmp.run("migrate", uri="fd:whole")
                while (status := qmp.run("query-migrate")["status"]) not in ("completed", "failed"):
                    time.sleep(0.002)
                whole = time.monotonic() - begun
                if status != "completed":
                    raise Failed("QEMU does not save the guest")
                qmp.run("cont")
            bytes_saved = os.path.getsize(path)
            os.remove(path)
            ours = self.host.json("suspend", "save")["guests"][0]
            self.host.run("resume", "save")
            rows.append({"save_ms": whole * 1e3, "suspend_ms": total_ms(ours), "save_bytes": bytes_saved})
        self.end("save")
        ratio = statistics.median(row["save_ms"] / row["suspend_ms"] for row in rows)
        self.results["save"] = {"ram": size, "touched_mib": touched, "rounds": rows, "ratio": ratio}

    def hibernate(self):
        """The guest's own suspend to disk"""
        size, touched = ("512M", 128) if self.options.quick else ("2G", TOUCHED_MIB)
        self.say(f"hibernate: {size} with {touched} MiB touched")
        disk = os.path.join(self.work, "swap.img")
        subprocess.run(["truncate", "-s", "4G", disk], check=True)
        self.boot("hibernate", size, f"touch={touched}", options=("--disk", disk))
        self.wait("hibernate", b"@idle")
        self.host.run("suspend", "hibernate")
        ours = history(self.host, "hibernate")[-1]
        self.host.run("rm", "--force", "hibernate")
        self.boot("hibernate", size, f"touch={touched} swap", options=("--disk", disk))
        self.wait("hibernate", b"@hibernate")
        begun = time.monotonic()
        while self.host.emulators("hibernate"):
            if time.monotonic() - begun > 300 or b"@broken" in self.host.console("hibernate"):
                raise Failed("the guest does not hibernate")
            time.sleep(0.01)
        whole = (time.monotonic() - begun) * 1e3
        while self.host.json("status", "hibernate")["state"] == "running":
            time.sleep(0.01)
        self.host.run("rm", "hibernate")
        os.remove(disk)
        self.results["hibernate"] = {
            "ram": size, "touched_mib": touched, "hibernate_ms": whole, "suspend_ms": total_ms(ours), "ratio": whole / total_ms(ours),
        }

    def database(self):
        """First reads after a cold boot and after a resume"""
        entries = 20_000 if self.options.quick else 100_000
        disk = os.path.join(self.work, "db.img")
        make_disk(disk, 1024)
        # Past the host's cache, so that a disk is a disk.
        direct = f"if=none,id=d0,file={disk},format=raw,cache=none"
        qemu = ("-drive", direct, "-device", "virtio-blk-pci,drive=d0")
        self.say(f"database: {entries} entries")
        self.boot("db", "2G", f"fill={entries}", qemu=qemu)
        self.wait("db", b"@filled", seconds=1200)
        self.end("db")
        rows = []
        for order in ("random", "seq"):
            cold, resumed = [], []
            for _ in range(1 if self.options.quick else 5):
                self.boot("db", "2G", f"entries={entries} order={order} read=1000", qemu=qemu)
                self.wait("db", b"Percentiles", 12)
                cold.append(reads(self.host.console("db"))[0])
                self.host.run("suspend", "db")
                before = self.host.console("db").count(b"Percentiles")
                self.host.run("resume", "db")
                self.wait("db", b"Percentiles", before + 2)
                # It went on in the middle of one: the rest of that and the next.
                after = reads(self.host.console("db"))[before - 1 : before + 1]
                resumed.append(max(after, key=lambda run: run["p999_us"]))
                self.end("db")
            middle = {
                which: {key: statistics.median(run[key] for run in runs) for key in ("p50_us", "p999_us")}
                for which, runs in (("cold", cold), ("resumed", resumed))
            }
            less = 1 - middle["resumed"]["p999_us"] / middle["cold"]["p999_us"]
            rows.append({"order": order, **middle, "p999_less": less})
        self.results["database"] = {"entries": entries, "reads": 1000, "rows": rows}


def reads(console):
    """Percentiles of the benchmarks with so many reads: not of the one that reads all."""
    found = re.findall(rb"Percentiles: P50: ([\d.]+) .*?P99\.9: ([\d.]+)", console)
    runs = [{"p50_us": float(p50), "p999_us": float(p999)} for p50, p999 in found]
    return runs[:1] + runs[2:]


def total_ms(entry):
    return sum(phase["us"] for phase in entry["phases"]) / 1e3


def history(host, name):
    with open(host.file(name, "history.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def table(results):
    lines = []
    if "sizes" in results:
        lines.append("memory  cpus   suspend: median   worst    resume: median   worst   (ms)")
        for row in results["sizes"]:
            s, r = row["suspends"], row["resumes"]
            lines.append(f"{row['ram']:>6}  {row['cpus']:>4}  {s['median_ms']:16.1f} {s['worst_ms']:7.1f} {r['median_ms']:17.1f} {r['worst_ms']:7.1f}")
    if "save" in results:
        save = results["save"]
        lines.append(f"QEMU's save to a file ({save['ram']}, {save['touched_mib']} MiB touched) takes {save['ratio']:.0f} times as long as a suspend")
    if "hibernate" in results:
        found = results["hibernate"]
        lines.append(f"hibernate takes {found['ratio']:.0f} times as long ({found['hibernate_ms'] / 1e3:.1f} s)")
    for row in results.get("database", {}).get("rows", []):
        cold, resumed = row["cold"], row["resumed"]
        lines.append(
            f"first {results['database']['reads']} reads ({row['order']}): p99.9 {cold['p999_us']:.0f} us after a cold boot, "
            f"{resumed['p999_us']:.0f} us after a resume ({100 * row['p999_less']:.0f} % less); p50 {cold['p50_us']:.0f} and {resumed['p50_us']:.0f}"
        )
    return "\n".join(lines)


def picture(results):
    """Phases by size: told apart without colour."""
    rows = [(f"{what[:-1]}, {row['ram']}, {row['cpus']} cpu", row[what]) for what in ("suspends", "resumes") for row in results["sizes"]]
    longest = max(sum(found["phases_ms"].values()) for _, found in rows)
    height = 90 + 26 * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" height="{height}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
        '<defs><pattern id="p0" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#dbe6f4"/></pattern>'
        '<pattern id="p1" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/><rect width="2" height="6" fill="#3d6ea8"/></pattern>'
        '<pattern id="p2" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#274c77"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="20" y="28" font-size="17">Suspend and resume of whole systems, medians ({results["accelerator"]})</text>',
    ]
    for n, name in enumerate(("prepare / start", "write-back / load", "finish")):
        out.append(f'<rect x="{20 + 190 * n}" y="42" width="18" height="14" fill="url(#p{n})" stroke="#1a1a1a" stroke-width="0.8"/>')
        out.append(f'<text x="{44 + 190 * n}" y="54" font-size="12">{name}</text>')
    for n, (name, found) in enumerate(rows):
        x, y = 210.0, 76 + 26 * n
        out.append(f'<text x="{x - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
        for phase, ms in enumerate(found["phases_ms"].values()):
            width = 520 * ms / longest
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="url(#p{phase})" stroke="#1a1a1a" stroke-width="0.8"/>')
            x += width
        out.append(f'<text x="{x + 8:.1f}" y="{y + 14}">{found["median_ms"]:.1f} ms</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lode", default=os.path.join(guest.ROOT, "target", "release", "lode"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--media", default="")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if set(chosen) - set(PARTS):
        sys.exit(f"study.py: there is only {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("study.py: ended by SIGTERM"))
    os.makedirs(options.out, exist_ok=True)
    cache = os.path.join(os.path.dirname(os.path.abspath(options.out)), "guest")
    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix="lode-study-", dir=options.out)
    media = tempfile.mkdtemp(prefix="lode-study-", dir=options.media or guest.media_dir(7))
    try:
        with open(os.path.join(options.out, "study.log"), "wb") as log:
            initrd = os.path.join(work, "initrd.cpio")
            kernel = image.fetch_kernel(cache, lambda text: print(text, file=sys.stderr))
            programs = {"busybox": image.which("busybox")}
            if "database" in chosen:
                programs["db_bench"] = guest.program("db_bench", cache)
            image.build(initrd, kernel, programs, {}, guest.MODULES, os.path.join(guest.HERE, "study_init"))
            study = Study(Host(options.lode, work, media, kernel, initrd, log), options, work)
            try:
                for part in chosen:
                    getattr(study, part)()
            finally:
                study.host.end_all()
    except (Unavailable, Failed) as failure:
        sys.exit(f"study.py: {failure}")
    finally:
        shutil.rmtree(media, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    results = study.results | {"accelerator": "kvm" if study.accelerated else "emulated processor"}
    with open(os.path.join(options.out, "wsp.json"), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=2)
    if "sizes" in results:
        with open(os.path.join(options.out, "wsp.svg"), "w", encoding="utf-8") as file:
            file.write(picture(results))
    print(json.dumps(results, indent=2) if options.json else table(results))


if __name__ == "__main__":
    main()
