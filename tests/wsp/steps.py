"""Stops `lode` before each step that others can see, and kills it or the emulator there.

A step is a system call that changes a file, a lock or a process, that sends a command to the emulator or takes its answer: between
two of them nobody else can tell how far lode is, but for what it stores to memory and slot, which the step behind shows. The
calls are those of an unmodified lode: it is traced (ptrace(2)), and asked for nothing.
"""

import collections
import ctypes
import json
import os
import re
import signal
import struct
import time

from guest import Failed

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
LIBC.ptrace.restype = ctypes.c_long
TRACEME, SYSCALL, DETACH, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 17, 0x4200, 0x420E
# Threads, too; system calls are told from signals; nothing is left behind when this program ends.
OPTIONS = 0x1 | 0x8 | 0x100000
ALL_THREADS = 0x40000000
ENTRY = 1
INFO_BYTES = 88

# x86-64. With the argument that is a descriptor or a path.
OF_FILE = {1: "write", 18: "write", 20: "write", 77: "truncate", 285: "allocate", 74: "sync", 75: "sync", 277: "sync", 73: "lock"}
OF_PATH = {82: ("rename", 0), 87: ("remove", 0), 263: ("remove", 1), 264: ("rename", 1), 316: ("rename", 1), 84: ("remove", 0), 83: ("make", 0), 258: ("make", 1)}
OTHER = {26: "sync mapping", 42: "connect", 49: "bind", 50: "listen", 56: "start", 57: "start", 58: "start", 62: "kill", 435: "start", 231: "end"}
READ, RECVFROM, SENDMSG, OPENAT, FCNTL, FLOCK = 0, 45, 46, 257, 72, 73
O_CREAT, F_OFD_SETLK, LOCK_SH = 0o100, 37, 1

Call = collections.namedtuple("Call", "number arguments")


class Traced:
    """A command that stands before each step. `at` is told each step's name, and says what is to be done there."""

    def __init__(self, command, output):
        self.output = output
        self.pid = os.fork()
        if self.pid == 0:
            self._run(command)
        self.last, self.counts, self.threads = "", collections.Counter(), set()
        self.status = None
        self._wait()
        self._ptrace(SETOPTIONS, self.pid, OPTIONS)
        self._go_on(self.pid)

    def _run(self, command):
        try:
            os.setpgid(0, 0)
            sink = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            null = os.open("/dev/null", os.O_RDONLY)
            for number, file in ((0, null), (1, sink), (2, sink)):
                os.dup2(file, number)
            LIBC.ptrace(TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.execv(command[0], command)
        finally:
            os._exit(127)

    def run(self, at):
        """To the end, or until `at` has it killed: its exit status, negative for a signal."""
        while self.status is None:
            stopped, how = self._wait()
            if stopped is None:
                continue
            signal_number = os.WSTOPSIG(how)
            passed = 0
            if signal_number == signal.SIGTRAP | 0x80:
                call = self._call(stopped)
                name = call and self._name(call)
                if name:
                    self.counts[name] += 1
                    at(f"{name} {self.counts[name]}")
            elif signal_number == signal.SIGTRAP or (signal_number == signal.SIGSTOP and stopped not in self.threads):
                self.threads.add(stopped)
            else:
                passed = signal_number
            self._go_on(stopped, passed)
        return self.status

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def said(self):
        with open(self.output, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _wait(self):
        """A thread that stands, and how; none where one ended."""
        stopped, how = os.waitpid(-self.pid if self.threads else self.pid, ALL_THREADS)
        self.threads.add(self.pid)
        if os.WIFSTOPPED(how):
            return stopped, how
        if stopped == self.pid:
            self.status = os.WEXITSTATUS(how) if os.WIFEXITED(how) else -os.WTERMSIG(how)
        return None, how

    def _ptrace(self, request, thread, data):
        done = LIBC.ptrace(request, thread, None, data)
        # One that was killed is not there.
        if done < 0 and ctypes.get_errno() != 3:
            raise OSError(ctypes.get_errno(), f"ptrace request {request}: {os.strerror(ctypes.get_errno())}")

    def _go_on(self, thread, passed=0):
        self._ptrace(SYSCALL, thread, passed)

    def _call(self, thread):
        """What it is about to call; none when it comes back from that."""
        info = ctypes.create_string_buffer(INFO_BYTES)
        if LIBC.ptrace(GET_SYSCALL_INFO, thread, INFO_BYTES, ctypes.addressof(info)) <= 0 or info.raw[0] != ENTRY:
            return None
        number, *arguments = struct.unpack_from("<7Q", info.raw, 24)
        return Call(number, arguments)

    def _name(self, call):
        number, arguments = call
        if number == SENDMSG:
            return self._command(arguments[1])
        if number in (READ, RECVFROM):
            is_answer = self._file(arguments[0]).startswith("socket:") and self.last
            name, self.last = (f"take the answer to {self.last}", "") if is_answer else (None, self.last)
            return name
        if number in OF_FILE:
            file = self._file(arguments[0])
            # Who asks whether the emulator lives has that lock for a moment, as often as it takes.
            if number == FLOCK and arguments[1] & LOCK_SH:
                return None
            return None if arguments[0] in (1, 2) or "pipe:" in file else f"{OF_FILE[number]} {base(file)}"
        if number in OF_PATH:
            word, n = OF_PATH[number]
            return f"{word} {base(self._text(arguments[n]))}"
        if number == OPENAT:
            path = self._text(arguments[1])
            return f"make {base(path)}" if arguments[2] & O_CREAT and not os.path.exists(path) else None
        if number == FCNTL:
            return f"lock {base(self._file(arguments[0]))}" if arguments[1] == F_OFD_SETLK else None
        return OTHER.get(number)

    def _command(self, header):
        vectors, = struct.unpack("<Q", self._memory(header + 16, 8))
        start, length = struct.unpack("<QQ", self._memory(vectors, 16))
        self.last = json.loads(self._memory(start, length))["execute"]
        return f"send {self.last}"

    def _file(self, number):
        try:
            return os.readlink(f"/proc/{self.pid}/fd/{number}")
        except OSError:
            return ""

    def _memory(self, start, length):
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(start)
            return memory.read(length)

    def _text(self, start):
        # To the end of the page at most, which is there.
        return self._memory(start, min(4096 - start % 4096, 512)).split(b"\0")[0].decode(errors="replace")


def base(path):
    return re.sub(r"\d+", "N", os.path.basename(path.replace(" (deleted)", "")))


class Kills:
    """Every step of a command, with a victim at each in turn."""

    def __init__(self, host, name, output):
        self.host, self.name, self.output = host, name, output
        # Commands after which it was booted.
        self.booted = set()

    def command(self, what):
        return [self.host.lode, "wsp", "--wsp-dir", self.host.guests, what, self.name]

    def steps(self, what):
        """The names of all steps, in their order; the command comes to its end."""
        found = []
        traced = Traced(self.command(what), self.output)
        if traced.run(found.append) != 0:
            raise Failed(f"{what}, traced, ended with status {traced.status}: {traced.said()}")
        return found

    def run(self, what, step, victim):
        """The exit status of the command; none where it never came to that step."""
        met = []
        traced = Traced(self.command(what), self.output)

        def at(name):
            if name == step and not met:
                met.append(name)
                traced.kill() if victim == "lode" else self.kill_emulator()

        status = traced.run(at)
        what_was = f"{victim} killed before `{step}`" if met else f"never at `{step}`"
        self.host.log.write(f"+ {what}, {what_was}: status {status}: {traced.said()}\n".encode())
        return status if met else None

    def kill_emulator(self):
        give_up = time.monotonic() + 20
        while found := self.host.emulators(self.name):
            for emulator in found:
                try:
                    os.kill(emulator, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if time.monotonic() > give_up:
                raise Failed("an emulator that was killed does not end")
            time.sleep(0.002)
