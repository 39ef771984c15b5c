#!/usr/bin/env python3
"""Builds and runs the fuzzers of fuzz/: each target for a while, beginning with the committed corpus.

    tests/fuzz.py                          all targets, a minute each, two at a time
    tests/fuzz.py image --seconds 600      one, for longer
    tests/fuzz.py --same                   as many inputs as ever, and the same, as far as that goes: what `make test` does
    tests/fuzz.py image CRASH-FILE ...     replays inputs: how a crash is looked at
    tests/fuzz.py image --merge            adds what the runs found to fuzz/corpus, as few files as cover it

No tool is needed beside cargo and a C++ compiler: the flags are those of cargo-fuzz, which can be used as well
(`cargo fuzz run image`, on nightly Rust). Without a sanitizer the stable Rust does; `--sanitizer address` takes
nightly. What a run finds stays in target/fuzz/found, crashes in target/fuzz/crashes; nothing is written to
fuzz/ but by --merge.

A run that finds a crash, a hang of 20 s or 2 GiB of memory fails, and says how to replay it.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FUZZ = os.path.join(ROOT, "fuzz")
OUT = os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"), "fuzz")
CARGO = os.environ.get("CARGO", "cargo")
TARGETS = ["image", "fsck", "record", "superblock", "text", "c_api"]
# Inputs of the one are inputs of the other.
CORPUS_OF = {"fsck": "image"}
# Coverage for libFuzzer, as cargo-fuzz asks for it.
COVERAGE = [
    "-Cpasses=sancov-module", "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters", "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares", "--cfg", "fuzzing",
]
# Some dozen edits or calls, and reached soon; a whole profile.
INPUT_BYTES_MAX = {"text": 4096}
INPUT_BYTES_MAX_ELSE = 1024
LENGTH_PATIENCE = 20
# With `--same`: so many inputs each, of a seed that stays. They take less time to run than to build: so our code is not optimised,
# which takes a third of the time, and is a quarter to two thirds as fast.
SAME_INPUTS = {"image": 700, "fsck": 300, "record": 3500, "superblock": 3500, "text": 60_000, "c_api": 2000}
SAME_FLAGS = [flag for name in ("lodestone", "lode_c") for flag in ("--config", f"profile.release.package.{name}.opt-level=0")]
HANG_S = 20
MEMORY_MIB = 2048
SAY = threading.Lock()


def host():
    said = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    return re.search(r"^host: (.*)$", said, re.MULTILINE)[1]


def build(sanitizer, flags_of_cargo=()):
    """Where the binaries are; or why they cannot be built here."""
    if not (shutil.which("c++") or shutil.which("g++")):
        return None, "no C++ compiler (make setup installs it)"
    toolchain, flags = [], list(COVERAGE)
    if sanitizer != "none":
        toolchain, flags = ["+nightly"], [*COVERAGE, f"-Zsanitizer={sanitizer}"]
        if subprocess.run(["rustc", "+nightly", "-V"], capture_output=True, check=False).returncode:
            return None, f"the {sanitizer} sanitizer takes nightly Rust (rustup toolchain install nightly)"
    target_dir = os.path.join(OUT, sanitizer)
    # Of the toolchain of the caller's cargo nothing may be left for another one.
    env = {k: v for k, v in os.environ.items() if not toolchain or k != "RUSTUP_TOOLCHAIN"}
    env["RUSTFLAGS"] = " ".join(flags)
    # With a target named, build scripts and macros are built without the flags.
    command = [
        CARGO, *toolchain, "build", "-q", "--release", "--manifest-path", os.path.join(FUZZ, "Cargo.toml"),
        "--target", host(), "--target-dir", target_dir, *flags_of_cargo,
    ]
    subprocess.run(command, env=env, check=True)
    return os.path.join(target_dir, host(), "release"), None


def in_memory(command, **streams):
    """Runs a target with a folder for its pools that is no disk where there is such; its status."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as pools:
        env = os.environ | {"TMPDIR": pools, "RUST_BACKTRACE": "1"}
        return subprocess.run(command, check=False, env=env, **streams).returncode


def options(target):
    longest = INPUT_BYTES_MAX.get(target, INPUT_BYTES_MAX_ELSE)
    return [f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={longest}", f"-len_control={LENGTH_PATIENCE}"]


def folder(*parts):
    path = os.path.join(OUT, *parts)
    os.makedirs(path, exist_ok=True)
    return path


def fuzz(binaries, target, given):
    """Runs one target; whether it found nothing."""
    crashes, log_path = folder("crashes", target), os.path.join(folder("logs"), f"{target}.log")
    # The same inputs every time: a gate fails for what changed, not by chance; and chance has its turn at night.
    if given.same:
        shutil.rmtree(os.path.join(OUT, "same", target), ignore_errors=True)
        found, limits = folder("same", target), ["-seed=1", f"-runs={SAME_INPUTS[target]}"]
    else:
        found, limits = folder("found", target), [f"-max_total_time={given.seconds}"]
    command = [
        os.path.join(binaries, target), found, os.path.join(FUZZ, "corpus", CORPUS_OF.get(target, target)), *limits,
        f"-artifact_prefix={crashes}/", "-print_final_stats=1", *options(target),
    ]
    began = time.monotonic()
    with open(log_path, "wb") as log:
        status = in_memory(command, stdout=log, stderr=subprocess.STDOUT)
    with open(log_path, encoding="utf-8", errors="replace") as log:
        said = log.read()
    runs = re.search(r"stat::number_of_executed_units: (\d+)", said)
    covered = re.findall(r"cov: (\d+)", said)
    with SAY:
        if status == 0:
            print(f"{target}: {runs[1]} inputs in {time.monotonic() - began:.0f} s, {covered[-1]} edges covered", flush=True)
            return True
        written = re.search(r"Test unit written to (\S+)", said)
        replay = f"tests/fuzz.py {target} {written[1]}" if written else f"see {log_path}"
        print(f"FAIL {target}: replay with: {replay}")
        for line in re.findall(r"panicked at .*\n.*|^.*ERROR: .*$|^SUMMARY: .*$", said, re.MULTILINE)[:4]:
            print("  " + line.replace("\n", "\n  "))
        sys.stdout.flush()
        return False


def replay(binaries, target, inputs):
    command = [os.path.join(binaries, target), *inputs, *options(target)]
    return in_memory(command)


def merge(binaries, target):
    """Makes the committed corpus the fewest files that cover what it and the runs covered."""
    corpus, fresh = os.path.join(FUZZ, "corpus", target), os.path.join(OUT, "merged", target)
    shutil.rmtree(fresh, ignore_errors=True)
    os.makedirs(fresh)
    found = [folder("found", one) for one in TARGETS if CORPUS_OF.get(one, one) == target]
    in_memory(
        [os.path.join(binaries, target), "-merge=1", fresh, corpus, *found, *options(target)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    # What once was a crash stays, whatever it covers.
    for name in os.listdir(corpus):
        if not name.startswith("crash-"):
            os.remove(os.path.join(corpus, name))
    for name in os.listdir(fresh):
        shutil.copy(os.path.join(fresh, name), corpus)
    files = [os.path.join(corpus, name) for name in os.listdir(corpus)]
    print(f"{target}: {len(files)} files, {sum(map(os.path.getsize, files))} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("inputs", nargs="*", help="files to replay")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; with --same it is a number of inputs instead")
    parser.add_argument("--same", action="store_true", help="not by chance, and from nothing but the committed corpus")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--sanitizer", choices=["none", "address"], default="none")
    parser.add_argument("--merge", action="store_true")
    given = parser.parse_args()
    targets = [given.target] if given.target else TARGETS
    binaries, why_not = build(given.sanitizer, SAME_FLAGS if given.same else ())
    if not binaries:
        print(f"SKIP fuzz: {why_not}")
        print(f"fuzz: 0 passed, 0 failed, {len(targets)} skipped")
        return 0
    if given.inputs:
        return replay(binaries, given.target, given.inputs)
    if given.merge:
        for target in targets:
            merge(binaries, CORPUS_OF.get(target, target))
        return 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        passed = list(pool.map(lambda target: fuzz(binaries, target, given), targets))
    print(f"fuzz: {sum(passed)} passed, {passed.count(False)} failed, 0 skipped")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
