#!/usr/bin/env python3
"""The demo of whole-system persistence: a guest with a database is suspended in mid-load, its emulator is killed, and the
database goes on at the request after the last that it had answered. `make demo-wsp` builds first and calls this."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "wsp"))

import guest
from guest import Failed, Host, Unavailable, image, make_disk


def say(text):
    print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lode", required=True)
    parser.add_argument("--out", required=True, help="where the picture goes, and the kernel is kept")
    options = parser.parse_args()
    cache = os.path.join(os.path.dirname(options.out), "guest")
    for directory in (options.out, cache):
        os.makedirs(directory, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: ended by SIGTERM"))
    work = tempfile.mkdtemp(prefix="lode-demo-")
    media = tempfile.mkdtemp(prefix="lode-demo-", dir=guest.media_dir(2))
    try:
        with open(os.path.join(options.out, "wsp.log"), "wb") as log:
            initrd = os.path.join(work, "initrd.cpio")
            kernel = image.fetch_kernel(cache, say)
            guest.build(initrd, kernel, cache)
            host = Host(options.lode, work, media, kernel, initrd, log)
            try:
                show(host, work, options.out)
            finally:
                host.end_all()
    except (Unavailable, Failed) as failure:
        sys.exit(f"demo: {failure}")
    finally:
        shutil.rmtree(media, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def show(host, work, out):
    disk = os.path.join(work, "disk.img")
    make_disk(disk)
    say("== A guest with 1 GiB of memory and a SQLite database boots (emulated processor: some seconds)")
    say(host.start("db", ram="1G", disk=disk).strip())
    host.wait_requests("db", 100)
    say(f"   it has answered request {host.requests('db')[-1][0]}, and goes on")
    say("== It is suspended in mid-load")
    say("$ lode wsp suspend db")
    say("   " + host.run("suspend", "db").strip())
    last = host.requests("db")[-1]
    say(f"   the last answer: request {last[0]}, {last[1]} rows in memory, {last[2]} on disk")
    if host.emulators("db"):
        raise Failed("the emulator is still there")
    say("   no emulator is there any more; memory, the devices' state and the disk are all that is left")
    say("$ lode wsp list")
    say("\n".join("   " + line for line in host.run("list").splitlines()))
    say("== The power is back")
    say("$ lode wsp resume db")
    say("   " + host.run("resume", "db").strip())
    host.wait_requests("db", 200)
    following = next(answer for answer in host.requests("db") if answer[0] > last[0])
    say(f"   the next answer: request {following[0]}, {following[1]} rows in memory, {following[2]} on disk")
    if following[:3] != (last[0] + 1, last[1] + 1, last[2] + 1):
        raise Failed("the database did not go on where it was")
    say(f"   {host.whole('db')} requests in all, each answered once, in order; the database finds itself whole")
    say("== Ten times more")
    for _ in range(10):
        host.run("suspend", "db")
        host.run("resume", "db")
        host.wait_requests("db", 5)
    host.whole("db")
    picture = os.path.join(out, "wsp.svg")
    say("$ lode wsp status db --svg wsp.svg")
    say("\n".join("   " + line for line in host.run("status", "db", "--svg", picture).splitlines()))
    say(f"   the phases as a picture: {os.path.relpath(picture, ROOT)}")
    say("== And without being suspended: the emulator is killed")
    os.kill(host.emulators("db")[0], signal.SIGKILL)
    while host.emulators("db"):
        time.sleep(0.01)
    say("$ lode wsp resume db")
    say("   " + host.refused("resume", "db"))
    say("   Memory has moved on since the image: it fits no state any more, and nobody pretends it does.")


if __name__ == "__main__":
    main()
