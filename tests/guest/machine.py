"""A machine with emulated NVDIMMs: QEMU without hardware virtualisation, spoken to over its serial lines.

The first serial line carries commands and their output. The second goes to a file, byte by byte: QEMU's
processor thread has handed a byte to the host before the guest's store to the port returns, so that what the
guest acknowledged there is known whenever the machine dies.
"""

import os
import select
import signal
import subprocess
import time

QEMU = "qemu-system-x86_64"
# The guest got a line that is not whole.
AGAIN = b"@again\n"
BOOT_S_MAX = 180
MEMORY_MIB = 1536


class Failed(Exception):
    """A command in the guest failed, or the machine did."""


class Machine:
    """A machine that runs. `modules` are (path, MiB) of its NVDIMMs. `persistence` is what they declare: cpu or
    mem-ctrl, or that they are not armed: what is stored to them does not survive."""

    def __init__(self, kernel, initrd, modules, log, acknowledged, persistence):
        unarmed = ",unarmed=on" if persistence == "unarmed" else ""
        declared = "mem-ctrl" if unarmed else persistence
        command = [
            QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-M", f"q35,nvdimm=on,nvdimm-persistence={declared}", "-cpu", "max,la57=off",
            "-accel", "tcg,thread=multi", "-smp", "2", "-m", f"{MEMORY_MIB}M,slots=8,maxmem=16G",
            "-kernel", os.path.join(kernel, "vmlinux"), "-initrd", initrd,
            "-append", "console=ttyS0 panic=-1 loglevel=4 tsc=reliable mitigations=off no_timer_check",
            "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
            "-chardev", f"file,id=acknowledged,path={acknowledged}", "-serial", "chardev:acknowledged",
        ]
        for number, (path, mib) in enumerate(modules):
            command += [
                "-object", f"memory-backend-file,id=m{number},share=on,mem-path={path},size={mib}M",
                "-device", f"nvdimm,id=nvdimm{number},memdev=m{number}{unarmed}",
            ]
        self.log = log
        self.log.write(f"\n+ {' '.join(command)}\n".encode())
        self.log.flush()
        self.pending = b""
        self.begun = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        try:
            self.read_until(b"@ready", BOOT_S_MAX)
        except BaseException:
            self.kill()
            raise
        self.boot_s = time.monotonic() - self.begun

    def read_until(self, mark, seconds):
        """What the guest says before a line that begins with `mark`, and that line."""
        give_up = time.monotonic() + seconds
        while True:
            lines = self.pending.split(b"\n")
            for number, line in enumerate(lines[:-1]):
                if line.strip().startswith(mark):
                    self.pending = b"\n".join(lines[number + 1 :])
                    return b"\n".join(lines[:number]), line.strip()
            left = give_up - time.monotonic()
            if left <= 0:
                raise Failed(f"the guest says nothing like {mark.decode()} within {seconds} s")
            if not select.select([self.process.stdout], [], [], left)[0]:
                continue
            if not self.receive():
                raise Failed(f"the machine stopped (status {self.process.wait()}): {self.pending[-400:].decode(errors='replace')}")

    def peek(self):
        """What the guest has said that nobody has taken yet."""
        while select.select([self.process.stdout], [], [], 0)[0] and self.receive():
            pass
        return self.pending

    def receive(self):
        """Takes what the guest says at this moment; false where it is off."""
        got = os.read(self.process.stdout.fileno(), 1 << 16)
        self.log.write(got)
        self.log.flush()
        self.pending += got.replace(b"\r", b"")
        if AGAIN in self.pending:
            self.pending = self.pending.replace(AGAIN, b"", 1)
            self.start(self.line)
        return bool(got)

    def start(self, line):
        """Hands a command over without waiting for its end."""
        self.line = line
        self.log.write(f"\n+ {line}\n".encode())
        self.process.stdin.write(f"{len(line.encode())} {line}\n".encode())
        self.process.stdin.flush()

    def status(self, line, seconds=120):
        """Runs a shell command in the guest: its status and output."""
        self.start(line)
        output, done = self.read_until(b"@done", seconds)
        return int(done.split()[1]), output.decode(errors="replace").strip("\n")

    def run(self, line, seconds=120):
        """Runs a command that must succeed; its output."""
        status, output = self.status(line, seconds)
        if status != 0:
            raise Failed(f"`{line}` ended with status {status}: {output[-1500:]}")
        return output

    def kill(self):
        """The power goes: SIGKILL to QEMU, wherever it is."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

