#!/usr/bin/env python3
"""The gate: every suite there is, one after the other, and one line that sums them up.

Each suite writes all it says to target/test-logs/NAME.log; the terminal gets its verdict, what failed
and what was skipped and why. The exit status is 0 only if nothing failed. `--only NAME,...` runs some,
`--nightly` runs more seeds and more cases.

A test that cannot run on this machine prints a line `SKIPPED: which: why` and returns; it is counted as
skipped, not as passed.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target")
CARGO = os.environ.get("CARGO", "cargo")
LOGS = os.path.join(TARGET, "test-logs")
RELEASE = os.path.join(TARGET, "release")
LODE = os.environ.get("LODE") or os.path.join(RELEASE, "lode")
ACKED = os.path.join(RELEASE, "acked")
# Where what was built is tested (set_aside).
ASIDE = os.path.join(TARGET, "test-release")
# The library is there; building it alone would choose other features and compile it again.
BUILT = ["CARGO=true"]
SHOWN_MAX = 40
# What the commands of a suite took of the processors, by its log's name; without what they left behind.
CPU_S = {}
NIGHTLY_SEEDS = 10
# In which all sequences of three operations are tried, and those of two on pools that are not new.
NIGHTS = int(os.environ.get("LODE_NIGHTS", "10"))


class Result:
    """What one suite came to."""

    def __init__(self, passed=0, failed=0, skipped=0, lines=()):
        self.passed, self.failed, self.skipped, self.lines = passed, failed, skipped, list(lines)


def run(name, *command, minutes=20, env=None):
    """Runs a command with all its output in the suite's log; returns status and output."""
    path = os.path.join(LOGS, f"{name}.log")
    begin = os.path.getsize(path) if os.path.exists(path) else 0
    with open(path, "ab") as log:
        log.write(f"+ {' '.join(command)}\n".encode())
        log.flush()
        child = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"CARGO_TERM_COLOR": "never"} | (env or {}),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )

        def kill():
            log.write(f"\nkilled: not done after {minutes} minutes\n".encode())
            os.killpg(child.pid, signal.SIGKILL)

        late = threading.Timer(minutes * 60, kill)
        late.daemon = True
        late.start()
        # Its number stays its own until nobody kills it any more.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        late.cancel()
        late.join()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = status = os.waitstatus_to_exitcode(status)
        CPU_S[name] = CPU_S.get(name, 0) + used.ru_utime + used.ru_stime
    with open(path, encoding="utf-8", errors="replace") as log:
        log.seek(begin)
        return status, log.read()


def step(name, *command, **options):
    """A suite that is one command: its status is the verdict, its last lines the reason."""
    status, output = run(name, *command, **options)
    if status == 0:
        return Result(passed=1)
    return Result(failed=1, lines=[f"FAIL {' '.join(command)}: status {status}", *output.splitlines()[-15:]])


def together(*results):
    total = Result()
    for result in results:
        total.passed += result.passed
        total.failed += result.failed
        total.skipped += result.skipped
        total.lines += result.lines
    return total


def lint():
    """Format and clippy, under the Rust version that this repository is kept clean with."""
    with open(os.path.join(ROOT, "Cargo.toml"), encoding="utf-8") as manifest:
        kept = re.search(r'^rust-version = "([\d.]+)"', manifest.read(), re.MULTILINE)[1]
    here = subprocess.run(["rustc", "-V"], capture_output=True, text=True, check=False).stdout.split()
    if len(here) < 2 or not here[1].startswith(kept + "."):
        return Result(skipped=1, lines=[f"SKIP lint: this is Rust {here[1:2]}, whose lints are not those of {kept}"])
    results = []
    for tool, command in (
        ("rustfmt", [CARGO, "fmt", "--all", "--check"]),
        # As tests are compiled: build scripts (jemalloc's own build) and what they and macros need is there then.
        ("clippy", [CARGO, "clippy", "-q", "--profile", "bench", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ):
        if subprocess.run([CARGO, command[1], "--version"], capture_output=True, check=False).returncode:
            results.append(Result(skipped=1, lines=[f"SKIP {tool}: not installed (rustup component add {tool})"]))
        else:
            results.append(step("lint", *command))
    return together(*results)


def build():
    """What users get: the release build, man pages, completions, C library, fio engine, and installing it."""
    # All else needs it: on a slow machine, beside the other lane, it may take its time.
    built = step("build", "make", "all", minutes=45)
    if built.failed:
        return built
    set_aside()
    return built


def tools():
    """Public conformance tests, for `mount` and `guest`."""
    return step("tools", "make", "tools")


def set_aside():
    """Cargo puts programs that its tests start, with our assertions and slow, in the place of those of the release."""
    global LODE, ACKED
    shutil.rmtree(ASIDE, ignore_errors=True)
    os.makedirs(os.path.join(ASIDE, "release"))
    for entry in os.scandir(RELEASE):
        if entry.is_file() and not entry.name.endswith(".d"):
            shutil.copy2(entry.path, os.path.join(ASIDE, "release"), follow_symlinks=False)
    for name in ("share", "fio-headers"):
        if os.path.exists(os.path.join(TARGET, name)):
            os.symlink(os.path.join(TARGET, name), os.path.join(ASIDE, name))
    BUILT.append(f"CARGO_TARGET_DIR={ASIDE}")
    LODE, ACKED = (os.path.join(ASIDE, "release", name) for name in ("lode", "acked"))


def cargo():
    """Unit, integration and documentation tests of all crates."""
    is_released = os.path.exists(os.path.join(RELEASE, "lode"))
    # What is preloaded has no tests, and would have others' jemalloc.
    all_but_preloaded = ["--profile", "bench", "--workspace", "--exclude", "lodestone-preload"]
    # With dependencies as released, which are there by then (Cargo.toml); at night with their own assertions.
    chosen = [["--workspace"]] if OPTIONS.nightly else [
        [*all_but_preloaded, "--bins", "--test", "*"],
        [*all_but_preloaded, "--doc"],
        # The library's unit tests are a compilation of it by themselves, and take less to run as they are than to optimise. With the
        # features that all together ask for, so that their jemalloc is that of the others.
        ["--profile", "bench", "-p", "lodestone", "--lib", "--config", "profile.bench.package.lodestone.opt-level=0",
         "--features", "memory-type,profile-text,tikv-jemalloc-sys/disable_initial_exec_tls"],
    ]
    env = {"PROPTEST_CASES": "4096", "LODE_FSCK_FLIPS": "200000", "LODE_CRASH_OPS": "200", "LODE_HEAP_KILLS": "400", "LODE_BEGUN_STEP": "1",
           "LODE_MUTANTS": "all", "LODE_COPIES": "100000", "LODE_FULL_SEEDS": "20000"} if OPTIONS.nightly else None
    minutes = 90 if OPTIONS.nightly else 45
    runs = [
        run("cargo", CARGO, "test", *which, "--no-fail-fast", "--", "--show-output", minutes=minutes, env=env)
        for which in chosen
    ]
    return together(
        *(counted(status, output) for status, output in runs),
        # In their places again: nothing is compiled.
        *([step("cargo", "make", "-s", "binaries")] if is_released else []),
    )


def counted(status, output):
    """What a `cargo test` came to, by what it printed."""
    result = Result()
    for found in re.finditer(r"^test result: .*? (\d+) passed; (\d+) failed; (\d+) ignored;", output, re.MULTILINE):
        result.passed += int(found[1])
        result.failed += int(found[2])
        result.skipped += int(found[3])
    result.lines += [f"FAIL {name}" for name in re.findall(r"^test (.*) \.\.\. FAILED$", output, re.MULTILINE)]
    for line in re.findall(r"^test (.* \.\.\. ignored.*)$", output, re.MULTILINE):
        result.lines.append(f"SKIP {line}")
    left = re.findall(r"^SKIPPED: (.*)$", output, re.MULTILINE)
    result.passed -= len(left)
    result.skipped += len(left)
    result.lines += [f"SKIP {line}" for line in left]
    if status != 0 and result.failed == 0:
        result.failed = 1
        result.lines += [line for line in output.splitlines() if re.match(r"error|\s+process didn't exit|killed", line)]
    return result


def c_api():
    """The C library: header, API against both libraries, install and pkg-config, example."""
    return step("c-api", "make", "-C", "crates/capi", "check", *BUILT)


def fio_engine():
    """fio through the engine, verified."""
    return step("fio-engine", "make", "-C", "crates/capi", "check-fio", *BUILT)


def install():
    """make install and uninstall into a directory of their own."""
    stage = os.path.join(TARGET, "test-install")
    where = [f"DESTDIR={stage}", "PREFIX=/usr", *BUILT]
    result = together(step("install", "rm", "-rf", stage), step("install", "make", "install", *where))
    if result.failed:
        return result
    wanted = [
        "usr/bin/lode", "sbin/mount.fuse.lode", "usr/share/man/man1/lode.1", "usr/share/man/man1/lode-mount.1",
        "usr/share/bash-completion/completions/lode", "usr/share/zsh/site-functions/_lode",
        "usr/share/fish/vendor_completions.d/lode.fish", "usr/lib/liblodestone.so", "usr/lib/liblode_preload.so", "usr/include/lodestone.h",
        "usr/lib/pkgconfig/lodestone.pc", "usr/share/man/man1/lode-wsp.1", "usr/share/man/man1/lode-wsp-resume.1",
        "usr/lib/systemd/system/lode-wsp.service", "usr/lib/lode/lode-wsp-notify",
    ]
    missing = [path for path in wanted if not os.path.lexists(os.path.join(stage, path))]
    helper = os.readlink(os.path.join(stage, "sbin/mount.fuse.lode"))
    if missing or helper != "/usr/bin/lode":
        return Result(failed=1, lines=[f"FAIL make install: missing {missing}, the mount helper is {helper}"])
    result = step("install", "make", "uninstall", *where)
    left = [os.path.join(path, name) for path, _, names in os.walk(stage) for name in names]
    return result if not left else Result(failed=1, lines=[f"FAIL make uninstall leaves {left}"])


def mount():
    """Unmodified programs on the mount, as root: on an ordinary file, and on emulated persistent memory."""
    if not os.path.exists("/dev/fuse"):
        return Result(skipped=1, lines=["SKIP mount: this machine has no /dev/fuse"])
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and subprocess.run([*sudo, "true"], capture_output=True, check=False).returncode:
        return Result(skipped=1, lines=["SKIP mount: it needs root, and sudo asks for a password"])
    results = []
    for domain, options in (("page-cache", "allow_other"), ("memory", "allow_other,assume=memory")):
        for seed in range(NIGHTLY_SEEDS if OPTIONS.nightly else 1):
            results.append(summed(
                "mount", *sudo, sys.executable, "tests/mount/run.py", "--lode", LODE, "--mount-options", options,
                "--logs", os.path.join(LOGS, f"mount-{domain}"), "--tools", os.path.join(TARGET, "tools", "bin"),
                "--seed", str(seed), minutes=25,
            ))
    # Data copied by threads of its own: what concerns data.
    results.append(summed(
        "mount", *sudo, sys.executable, "tests/mount/run.py", "--lode", LODE, "--only", "fsx,tar",
        "--mount-options", "allow_other,assume=memory,engine=delegate", "--tools", os.path.join(TARGET, "tools", "bin"),
        "--logs", os.path.join(LOGS, "mount-delegate"), minutes=10,
    ))
    if sudo:
        run("mount", *sudo, "chown", "-R", str(os.geteuid()), LOGS)
    return together(*results)


def summed(name, *command, minutes):
    """A suite of suites, which sums itself up."""
    status, output = run(name, *command, minutes=minutes)
    summary = re.search(rf"^{name}: (\d+) passed, (\d+) failed, (\d+) skipped$", output, re.MULTILINE)
    if not summary:
        return Result(failed=1, lines=[f"FAIL {name}: status {status}", *output.splitlines()[-15:]])
    shown = re.findall(r"^((?:FAIL|SKIP) .*(?:\n {2,}.*)*)", output, re.MULTILINE)
    return Result(*map(int, summary.groups()), lines=shown)


def heap():
    """Unmodified programs with their memory on slow memory."""
    return summed("heap", sys.executable, "tests/heap.py", "--lode", LODE, minutes=10)


def kills():
    """A process that embeds the library, killed 400 times under load; the mount suites kill the server 100 times."""
    pools = os.path.join(TARGET, "test-kills")
    os.makedirs(pools, exist_ok=True)
    return step("kills", ACKED, "kill", pools, "4000" if OPTIONS.nightly else "400", "1", minutes=30)


def bench():
    """Every row of the bench that meets other systems, small: on the mount beside bindfs, and beside tmpfs and ext4."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        return Result(skipped=1, lines=["SKIP bench: rows on mounts need root and /dev/fuse"])
    out = os.path.join(LOGS, "bench.json")
    status, output = run("bench", "sh", "-c", f"'{LODE}' bench --smoke --only data,names,mount --peers tmpfs,ext4 --json > '{out}'")
    if status:
        return Result(failed=1, lines=[f"FAIL lode bench --smoke: status {status}", *output.splitlines()[-15:]])
    with open(out, encoding="utf-8") as file:
        report = json.load(file)
    rows = {(row["name"], row["system"]) for row in report["rows"] if row["ops_per_s"] > 0}
    on_mounts = [f"mount-{name}" for name in ("write-seq-128k", "read-seq-128k", "write-rand-4k", "read-rand-4k", "create", "stat")]
    wanted = {(name, system) for name in on_mounts for system in ("lode", "bindfs")}
    wanted |= {(name, system) for name in ("write-rand-4k", "append-4k", "create", "stat") for system in ("lode", "tmpfs", "ext4")}
    skipped = [f"SKIP bench: {why}" for why in report["skipped"]]
    # Nothing else may be missing: it says why a system, or all rows on mounts, cannot be had here.
    without = {why.split(":")[0] for why in report["skipped"]}
    missing = sorted((name, system) for name, system in wanted - rows if system not in without and not (name in on_mounts and "mount rows" in without))
    if missing:
        return Result(failed=1, lines=[f"FAIL lode bench --smoke has no row {name} of {system}" for name, system in missing])
    return Result(passed=1, skipped=len(skipped), lines=skipped)


def guest():
    """A machine with emulated NVDIMMs: fsdax, device-dax, power cuts; and power cuts on a disk."""
    if platform.machine() != "x86_64":
        return Result(skipped=1, lines=["SKIP guest: this machine is not x86-64, the guest is"])
    long = ["--long"] if OPTIONS.nightly else []
    return summed("guest", sys.executable, "tests/guest/run.py", "--lode", LODE, *long, minutes=120 if long else 15)


def wsp():
    """Whole systems that are suspended and resumed in QEMU, and killed and spoiled in between."""
    if platform.machine() != "x86_64":
        return Result(skipped=1, lines=["SKIP wsp: this machine is not x86-64, the guest is"])
    long = ["--long"] if OPTIONS.nightly else []
    return summed("wsp", sys.executable, "tests/wsp/run.py", "--lode", LODE, *long, minutes=50 if long else 30)


def study():
    """The study of whole systems, small: that each part comes to figures and pictures, whatever they are; all parts at night."""
    if platform.machine() != "x86_64":
        return Result(skipped=1, lines=["SKIP study: this machine is not x86-64, the guest is"])
    parts = [] if OPTIONS.nightly else ["--only", "save,database"]
    out = os.path.join(TARGET, "test-study")
    return summed("study", sys.executable, "tests/wsp/study.py", "--lode", LODE, "--out", out, "--quick", *parts, minutes=20)


def crash():
    """Simulated power failures: every single operation; nightly every pair on new pools, with devices that are late, too, and
    heaps; in NIGHTS nights every pair and every triple."""
    late = ("--engine", "late")
    torn = ("--domain", "page-cache", "--torn-pages")
    runs = [
        ("seq1", "--data", "cow"), ("seq1", "--data", "inplace", "--image", "fresh", "--depth", "2"),
        ("tests/crashmonkey.workload", "--image", "fresh", *late),
    ]
    if OPTIONS.nightly:
        # Of what takes days a part, another each night.
        night = time.time() // 86_400 % NIGHTS
        part = ("--part", f"{night + 1:.0f}/{NIGHTS}")
        runs += [
            ("seq1", "--depth", "2"), ("seq2", "--image", "fresh"), ("seq2", "--image", "aged", *part),
            ("tests/crashmonkey.workload", *late), ("seq1", "--depth", "2", *late), ("seq1", "--engine", "late-by-alignment"),
            ("seq1", "--depth", "2", "--engine", "late-striped"), ("seq1", "--depth", "2", "--engine", "late-in-pieces"),
            ("seq2", "--image", "fresh", *late), ("seq2", "--image", "aged", *late, *part),
            ("seq3", "--samples", "all", "--image", "fresh", "--leaves", "1024", *late, *part),
            ("seq3", "--samples", "all", "--image", "fresh", "--leaves", "1024", *part), ("heap", "--depth", "2"),
            ("seq1", *torn), ("seq2", "--image", "fresh", "--leaves", "1024", *torn, *part), ("heap", *torn),
        ]
    results = []
    for workload, *options in runs:
        command = [LODE, "crash", "--json", "--workload", workload, *options]
        status, output = run("crash", *command, minutes=60 + 3600 // NIGHTS)
        if status == 0:
            results.append(Result(passed=1))
        else:
            results.append(Result(failed=1, lines=[f"FAIL {' '.join(command)}: status {status}", *output.splitlines()[:40]]))
    return together(*results)


# Steps that no sequence misses, by file and by what stands in the line, or by name: docs/crash.md says why.
SURVIVORS = {
    "memory": [
        ("src/fs/namei.rs", "self.core.fence(made.pending);"),
        ("src/fs/recover/repairs.rs", "self.core.fence(self.core.media.flush(dirty));"),
        ("src/fs/inode.rs", "core.media.fence(pending);"),
        ("src/fs/recover.rs", "core.fence(Flushed::issued());"),
        ("src/fs/write.rs", "self.fence(stored);"),
        ("src/fs/space.rs", "self.core.fence(Flushed::issued());"),
        ("src/fs/namei.rs", "self.core.fence(Flushed::issued());"),
        ("src/fs/recover.rs", "keep(core, log::block_addr(Block(TABLE_BLOCK)).add(LOG_HEAD_OFFSET));"),
    ],
    "page-cache": [("", "who withdraws a name has found its record complete")],
}


def mutants():
    """Each step left out that keeps files in a crash: that some sequence notices it (nightly)."""
    if not OPTIONS.nightly:
        return None
    results = []
    for domain, known in SURVIVORS.items():
        out = os.path.join(LOGS, f"mutants-{domain}.json")
        status, output = run("mutants", "sh", "-c", f"'{LODE}' crash --mutants --domain {domain} --json > '{out}'", minutes=90)
        if status:
            results.append(Result(failed=1, lines=[f"FAIL lode crash --mutants: status {status}", *output.splitlines()[-15:]]))
            continue
        with open(out, encoding="utf-8") as file:
            tried = json.load(file)["tried"]
        missed = [one["without"] for one in tried if one["killed_by"] is None and not any(stands_at(one["without"], *place) for place in known)]
        lines = [f"FAIL {domain}: nobody notices without {site}" for site in missed]
        results.append(Result(passed=len(tried) - len(missed), failed=len(missed) + (not tried), lines=lines))
    return together(*results)


def stands_at(site, file, text):
    """Whether a site (`fence at FILE:LINE`, or a step's name) is that line."""
    if not file:
        return site == text
    found = re.search(r" at (.*):(\d+)$", site)
    if not found or found[1] != file:
        return False
    with open(os.path.join(ROOT, file), encoding="utf-8") as source:
        return text in source.read().splitlines()[int(found[2]) - 1]


def demo():
    """make demo, to the end (nightly)."""
    return step("demo", "make", "demo") if OPTIONS.nightly else None


def fuzz():
    """Every fuzzer for some thousand inputs, from the committed corpus; nightly for longer, other inputs each time, and under address sanitizer."""
    if not OPTIONS.nightly:
        return fuzz_once("--same", "--jobs", "4", minutes=20)
    return together(
        fuzz_once("--seconds", "1800", minutes=90),
        fuzz_once("--seconds", "600", "--sanitizer", "address", minutes=60),
    )


def fuzz_once(*options, minutes):
    status, output = run("fuzz", sys.executable, "tests/fuzz.py", *options, minutes=minutes)
    summary = re.search(r"^fuzz: (\d+) passed, (\d+) failed, (\d+) skipped$", output, re.MULTILINE)
    if not summary:
        return Result(failed=1, lines=[f"FAIL fuzz: status {status}", *output.splitlines()[-15:]])
    shown = re.findall(r"^((?:FAIL|SKIP) .*(?:\n {2,}.*)*)", output, re.MULTILINE)
    return Result(*map(int, summary.groups()), lines=shown)


def schedules():
    """Locks, epochs, allocator, and whole file systems, under schedules that shuttle chooses (nightly)."""
    if not OPTIONS.nightly:
        return None
    return step(
        "schedules", CARGO, "test", "--release", "--lib", "--target-dir", os.path.join(TARGET, "shuttle"), "--", "schedules",
        "concurrent", minutes=300, env={"RUSTFLAGS": "--cfg shuttle", "LODE_SCHEDULES": "8000"},
    )


def loom():
    """What threads share without locks, under every order of memory that is allowed"""
    return step(
        "loom", CARGO, "test", "--release", "-p", "lodestone-loom", "--target-dir", os.path.join(TARGET, "loom"),
        env={"RUSTFLAGS": "--cfg loom"},
    )


def races():
    """Thread sanitizer on what is concurrent (nightly)."""
    if not OPTIONS.nightly:
        return None
    if subprocess.run(["rustc", "+nightly", "-V"], capture_output=True, check=False).returncode:
        return Result(skipped=1, lines=["SKIP races: thread sanitizer takes nightly Rust with rust-src (rustup)"])
    return step("races", "tests/sanitize.sh", minutes=120)


# One after the other; the lanes of a stage run side by side: where the one waits for a last crate, a test or a guest's boot, the
# other has both cores. (No two of `build`, `cargo`'s compiling and `lint` go on at a time: cargo locks its folder.) What a stage has
# beside its lanes is taken by whichever comes to its end first, the longest first; but for what waits for most of its time, which is
# a lane of its own.
STAGES = [
    (([build, cargo], [tools, loom, fuzz, crash, lint]), [mount, guest, kills, c_api, heap, bench, fio_engine, install], [wsp, study]),
    (([schedules, races, mutants, demo],), [], []),
]
# The others use what `build` makes.
NEED_NO_BUILD = [build, tools, lint, cargo, loom, fuzz, schedules, races]
SUITES = [suite for lanes, rest, waiting in STAGES for lane in (*lanes, rest, waiting) for suite in lane]


def log_name(suite):
    return suite.__name__.replace("_", "-")


def log_of(suite):
    return os.path.join(LOGS, f"{log_name(suite)}.log")


def timed(suite):
    if os.path.exists(log_of(suite)):
        os.remove(log_of(suite))
    begun = time.monotonic()
    return suite(), time.monotonic() - begun


def show(suite, result, seconds):
    log = os.path.relpath(log_of(suite), ROOT)
    for line in result.lines[:SHOWN_MAX]:
        print("  " + line)
    if len(result.lines) > SHOWN_MAX:
        print(f"  ... and {len(result.lines) - SHOWN_MAX} lines more in {log}")
    print(f"{suite.__name__}: {result.passed} passed, {result.failed} failed, {result.skipped} skipped "
          f"({seconds:.0f} s, CPU {CPU_S.get(log_name(suite), 0):.0f} s, {log})", flush=True)


def main():
    # A background job of a shell ignores it, and so would all that is started here: there are tests of interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.makedirs(LOGS, exist_ok=True)
    total = Result()
    begun = time.monotonic()
    chosen = [suite for suite in SUITES if not OPTIONS.only or suite.__name__ in OPTIONS.only.split(",")]
    told = threading.Lock()
    built, is_built = threading.Event(), build not in chosen
    if is_built:
        built.set()

    def run_lane(lane, rest):
        nonlocal total, is_built
        while True:
            with told:
                left = lane or rest
                if not left:
                    return
                suite = left.pop(0)
            if suite not in chosen:
                continue
            if suite not in NEED_NO_BUILD:
                built.wait()
                if not is_built:
                    print("  nothing more can be tested without a build")
                    return
            try:
                result, seconds = timed(suite)
                is_built |= suite is build and result.failed == 0
            finally:
                if suite is build:
                    built.set()
            if result is not None:
                with told:
                    show(suite, result, seconds)
                    total = together(total, result)

    for lanes, rest, waiting in STAGES:
        with concurrent.futures.ThreadPoolExecutor(len(lanes) + 1) as pool:
            list(pool.map(run_lane, [*lanes, waiting], [*[rest] * len(lanes), []]))
    print(f"all of it took {(time.monotonic() - begun) / 60:.1f} minutes")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or total.passed == 0 else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="of " + ", ".join(suite.__name__ for suite in SUITES))
    parser.add_argument("--nightly", action="store_true")
    options = parser.parse_args()
    unknown = set(filter(None, options.only.split(","))) - {suite.__name__ for suite in SUITES}
    if unknown:
        parser.error(f"no suite is called {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    OPTIONS = parse()
    sys.exit(main())
