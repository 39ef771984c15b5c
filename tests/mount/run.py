#!/usr/bin/env python3
"""Runs unmodified programs and system calls on a mount, each suite on a fresh file system of its own.

One line per suite: PASS, FAIL or SKIP, with the reason; the log of each goes to `--logs`. After a suite
the file system is unmounted, mounted again and compared: what was there must be there.

    run.py --lode target/release/lode              a Lodestone pool behind FUSE (as root)
    run.py --on tmpfs | ext4 | bindfs              the same suites where they are known to pass
    run.py --only git,tar                          some of them; --list names all
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.dont_write_bytecode = True

import conformance
import crash
import differential
import processes
import programs
import target as targets
from target import Skip

SUITES = conformance.SUITES + differential.SUITES + processes.SUITES + programs.SUITES + crash.SUITES


class Context:
    """What a suite gets: the mounted directory, a place outside of it, and a logged way to run things."""

    def __init__(self, target, work, log, tools, seed):
        self.target = target
        self.seed = seed
        self.dir = target.dir
        self.work = work
        self.log = log
        self.tools = tools
        self.note = ""
        self.env = os.environ | {
            "LC_ALL": "C",
            "HOME": work,
            "TMPDIR": work,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
        }

    def path(self, *parts):
        return os.path.join(self.dir, *parts)

    def outside(self, *parts):
        return os.path.join(self.work, *parts)

    def say(self, *words):
        print(*words, file=self.log, flush=True)

    def run(self, *command, cwd=None, status=0, env=None):
        """Runs a program to its end; another status than `status` fails the suite."""
        self.say("+", *command)
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd, env=self.env | (env or {}), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )
        output = done.stdout.decode(errors="replace")
        self.say(output[-20000:])
        if done.returncode != status:
            tail = "\n".join(output.splitlines()[-5:])
            raise AssertionError(f"{command[0]} ended with status {done.returncode}, not {status}: {tail}")
        return output

    def tool(self, name):
        """A program that `make test` installed for the tests."""
        found = shutil.which(name, path=self.tools) or shutil.which(name)
        if not found:
            raise Skip(f"{name} is not installed (make tools)")
        return found


def main():
    options = parse()
    if options.list:
        for suite in SUITES:
            print(f"{suite.__name__:20} {suite.__doc__.splitlines()[0]}")
        return 0
    chosen = choose(options.only)
    if os.geteuid() != 0:
        sys.exit("run.py: these suites mount file systems and switch users: run them as root")
    targets.Lode.binary = os.path.abspath(options.lode)
    targets.Lode.options = options.mount_options
    os.makedirs(options.logs, exist_ok=True)
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    for suite in chosen:
        counts[run_suite(suite, options)] += 1
    print(f"mount: {counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--on", choices=sorted(targets.TARGETS), default="lode")
    parser.add_argument("--lode", default="target/release/lode")
    parser.add_argument("--mount-options", default=targets.Lode.options)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0, help="another number, other random operations")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--logs", default="target/test-logs/mount")
    parser.add_argument("--tools", default="target/tools/bin")
    return parser.parse_args()


def choose(only):
    if not only:
        return SUITES
    names = only.split(",")
    unknown = set(names) - {suite.__name__ for suite in SUITES}
    if unknown:
        sys.exit(f"run.py: no suite is called {', '.join(sorted(unknown))} (--list names them)")
    return [suite for suite in SUITES if suite.__name__ in names]


def run_suite(suite, options):
    """One suite on one fresh file system; prints its line and returns the verdict."""
    name = suite.__name__
    log_path = os.path.join(options.logs, f"{name}.log")
    begun = time.monotonic()
    work = tempfile.mkdtemp(prefix=f"lode-{name}-")
    os.chmod(work, 0o755)
    with open(log_path, "w", encoding="utf-8", errors="replace") as log:
        target = targets.TARGETS[options.on](work, log, getattr(suite, "mib", 1024))
        context = Context(target, work, log, os.path.abspath(options.tools), options.seed)
        try:
            with watchdog(target, getattr(suite, "seconds_max", 300)) as timer:
                attempt(suite, target, context, timer)
            verdict, reason = "PASS", context.note
        except Skip as skip:
            verdict, reason = "SKIP", str(skip)
        except BaseException as failure:
            verdict, reason = "FAIL", f"{type(failure).__name__}: {failure}".replace("\n", "\n      ") + f"\n      log: {log_path}"
            traceback.print_exc(file=log)
            if isinstance(failure, (KeyboardInterrupt, SystemExit)):
                raise
        finally:
            target.free()
            shutil.rmtree(work, ignore_errors=True)
    print(f"{verdict} {name} ({time.monotonic() - begun:.1f} s){': ' + reason if reason else ''}", flush=True)
    return verdict


def attempt(suite, target, context, timer):
    """The suite, and then the same tree after a clean unmount and mount."""
    try:
        target.make()
        suite(context)
        before = targets.tree(target.dir)
        with contextlib.suppress(Skip):
            target.unmount()
            target.mount()
            lost = targets.differences(before, targets.tree(target.dir))
            assert not lost, "unmounted and mounted again, the tree differs:\n" + "\n".join(lost)
        target.unmount()
    except (AssertionError, OSError, subprocess.SubprocessError):
        if timer.expired:
            raise AssertionError(f"not done after {timer.interval} s: killed") from None
        raise


@contextlib.contextmanager
def watchdog(target, seconds):
    """Ends a hang: a call that the mount never answers returns once its server is gone."""

    def expire():
        timer.expired = True
        target.free()

    timer = threading.Timer(seconds, expire)
    timer.expired = False
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
