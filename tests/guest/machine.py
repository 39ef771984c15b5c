"""A machine with emulated NVDIMMs, or with a disk: QEMU without hardware virtualisation, spoken to over its serial lines.

The first serial line carries commands and their output. It may lose what comes while somebody at its other end
opens or closes it, in either direction: so commands have numbers and lengths, what is not answered is sent again, and
the guest runs each number once. The second goes to a file, byte by byte: QEMU's processor thread has handed a byte to
the host before the guest's store to the port returns, so that what the guest acknowledged there is known whenever the
machine dies.
"""

import os
import select
import signal
import subprocess
import time

QEMU = "qemu-system-x86_64"
# The guest got a line that is not whole.
AGAIN = b"@again"
# Without a word from the guest a command is sent again after so long; then after twice that, and so on.
UNTAKEN_S, SILENT_S = 2, 10
# A machine is there after 5 to 11 s, on a busy host too.
BOOT_S_FIRST = 45
MEMORY_MIB = 1536


class Failed(Exception):
    """A command in the guest failed, or the machine did."""


class Machine:
    """A machine that runs. `modules` are (path, MiB) of its NVDIMMs. `persistence` is what they declare: cpu or
    mem-ctrl, or that they are not armed: what is stored to them does not survive. `disk` is (path, bytes per second that it
    writes, or 0: as many as it can). `boot_s`: it has failed if it is not there after so long."""

    def __init__(self, kernel, initrd, modules, log, acknowledged, persistence, disk=None, boot_s=BOOT_S_FIRST):
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
        if disk:
            path, rate = disk
            # What the guest has written is in the host's page cache, which outlives QEMU.
            drive = f"id=disk,if=none,format=raw,cache=writeback,file={path}"
            command += ["-drive", drive + (f",throttling.bps-write={rate}" if rate else ""), "-device", "virtio-blk-pci,drive=disk"]
        self.log = log
        self.log.write(f"\n+ {' '.join(command)}\n".encode())
        self.log.flush()
        self.pending = b""
        self.number = 0
        self.command = b""
        self.done = b"@ready"
        self.taken = True
        self.heard, self.patience = time.monotonic(), SILENT_S
        self.begun = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        try:
            self.until_done(boot_s)
        except BaseException:
            self.kill()
            raise
        self.boot_s = time.monotonic() - self.begun

    def until_done(self, seconds):
        """What the guest says before the line that ends the command, and that line."""
        give_up = time.monotonic() + seconds
        while True:
            lines = self.pending.split(b"\n")
            for number, line in enumerate(lines[:-1]):
                if line.strip().startswith(self.done):
                    self.pending = b"\n".join(lines[number + 1 :])
                    said = [line for line in lines[:number] if not line.startswith((b"@took ", b"@done "))]
                    return b"\n".join(said), line.strip()
            left = give_up - time.monotonic()
            if left <= 0:
                taken = "did not end" if self.taken else "was not taken"
                raise Failed(f"`{self.command.decode()}` {taken} within {seconds} s: {self.pending[-400:].decode(errors='replace')}")
            if select.select([self.process.stdout], [], [], min(left, 1))[0]:
                if not self.receive():
                    raise Failed(f"the machine stopped (status {self.process.wait()}): {self.pending[-400:].decode(errors='replace')}")
            self.remind()

    def ended(self):
        """Whether the command that was started has ended; takes what the guest has said."""
        while select.select([self.process.stdout], [], [], 0)[0] and self.receive():
            pass
        self.remind()
        return self.done in self.pending

    def receive(self):
        """Takes what the guest says at this moment; false where it is off."""
        got = os.read(self.process.stdout.fileno(), 1 << 16)
        self.log.write(got)
        self.log.flush()
        self.pending += got.replace(b"\r", b"")
        self.heard = time.monotonic()
        if not self.taken and b"@took %d\n" % self.number in self.pending:
            self.taken = True
            self.patience = SILENT_S
        if AGAIN + b"\n" in self.pending:
            self.pending = self.pending.replace(AGAIN + b"\n", b"")
            self.send()
        return bool(got)

    def remind(self):
        """Sends the command again, if nothing has been heard of it for long."""
        if self.number and time.monotonic() - self.heard > self.patience:
            self.patience *= 2
            self.heard = time.monotonic()
            self.send()

    def start(self, line):
        """Hands a command over without waiting for its end."""
        self.number += 1
        self.command = line.encode()
        self.done = b"@done %d " % self.number
        self.taken = False
        self.patience = UNTAKEN_S
        self.heard = time.monotonic()
        self.send()

    def send(self):
        whole = b"%d %s" % (self.number, self.command)
        self.log.write(b"\n+ %s\n" % whole)
        # The first newline ends what arrived of the last time.
        self.process.stdin.write(b"\n%d %s\n" % (len(whole), whole))
        self.process.stdin.flush()

    def status(self, line, seconds=120):
        """Runs a shell command in the guest: its status and output."""
        self.start(line)
        output, done = self.until_done(seconds)
        return int(done.split()[2]), output.decode(errors="replace").strip("\n")

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

