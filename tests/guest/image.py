"""What the guest boots: the distribution's kernel, and an initial file system made of programs of this machine.

The kernel is the newest one that this distribution's archive has. Its package is downloaded and unpacked
under `target/guest`, never installed. QEMU gets the kernel proper, taken out of its compressed wrapper,
and the initial file system as it is: emulated processors decompress slowly.
"""

import fcntl
import functools
import glob
import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
# In the order of loading; a kernel may have some of them built in.
MODULES = [
    "crypto/crc32c_generic", "lib/libcrc32c", "lib/crc16", "fs/mbcache", "fs/jbd2/jbd2", "fs/ext4/ext4", "fs/fuse/fuse",
    "drivers/nvdimm/libnvdimm", "drivers/nvdimm/nd_btt", "drivers/nvdimm/nd_pmem", "drivers/acpi/nfit/nfit",
    "drivers/dax/device_dax", "drivers/dax/dax_pmem",
    "drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
]
# User, group and number. pjdfstest becomes the last two.
USERS = [(b"root", b"root", 0), (b"daemon", b"daemon", 1), (b"nobody", b"nogroup", 65534)]
# Metapackages that depend on the newest kernel: Debian's, then Ubuntu's (whose modules are a package of their own).
KERNELS = ["linux-image-amd64", "linux-image-virtual", "linux-image-generic"]


class Unavailable(Exception):
    """The guest cannot be made here; the message says what is missing."""


def command_output(*command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def kernel_packages():
    """The packages that hold the newest kernel and its modules."""
    for meta in KERNELS:
        depends = command_output("apt-cache", "depends", "--important", meta)
        image = re.search(r"Depends: (linux-image-\d\S+)", depends)
        if image:
            version = re.sub(r"^linux-image-(unsigned-)?", "", image[1])
            modules = [f"linux-modules-{version}", f"linux-modules-extra-{version}"]
            return [image[1]] + [name for name in modules if command_output("apt-cache", "show", "--no-all-versions", name)]
    raise Unavailable("apt-cache knows no kernel (one of " + ", ".join(KERNELS) + "): run apt-get update")


def one_at_a_time(fetch):
    """Of two suites that need the same the second finds what the first has fetched."""
    @functools.wraps(fetch)
    def alone(cache, *rest):
        os.makedirs(cache, exist_ok=True)
        with open(os.path.join(cache, "lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return fetch(cache, *rest)
    return alone


@one_at_a_time
def fetch_kernel(cache, say):
    """Downloads and unpacks the kernel if that was not done before; the directory it is in."""
    for done in sorted(glob.glob(os.path.join(cache, "*", "complete"))):
        return os.path.dirname(done)
    packages = kernel_packages()
    there = os.path.join(cache, packages[0])
    shutil.rmtree(there, ignore_errors=True)
    os.makedirs(there)
    say(f"downloading {' '.join(packages)} (unpacked in {there}, not installed)")
    done = subprocess.run(
        ["apt-get", "-q", "download", *packages], cwd=there, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    debs = glob.glob(os.path.join(there, "*.deb"))
    if done.returncode or len(debs) != len(packages):
        last = (done.stdout.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"apt-get cannot download {' '.join(packages)}: {last}")
    for deb in debs:
        subprocess.run(["dpkg-deb", "-x", deb, there], check=True)
        os.remove(deb)
    write(os.path.join(there, "vmlinux"), kernel_proper(read(glob.glob(os.path.join(there, "boot", "vmlinuz-*"))[0])))
    write(os.path.join(there, "complete"), b"")
    return there


def emulator_version(qemu):
    """(10, 0) and the like; (0, 0) where there is none."""
    found = re.search(r"version (\d+)\.(\d+)", command_output(qemu, "--version")) if shutil.which(qemu) else None
    return (int(found[1]), int(found[2])) if found else (0, 0)


@one_at_a_time
def fetch_emulator(cache, least, say):
    """The path of a QEMU of at least this version: the one that is installed, or the backport of this Debian, with the libraries
    that it takes, downloaded and unpacked under `cache`, never installed."""
    if emulator_version("qemu-system-x86_64") >= least:
        return which("qemu-system-x86_64")
    there = os.path.join(cache, "emulator")
    wrapper = os.path.join(there, "qemu-system-x86_64")
    if os.path.exists(wrapper):
        return wrapper
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', read("/etc/os-release").decode(), re.MULTILINE))
    if release.get("ID") != "debian" or "VERSION_CODENAME" not in release:
        raise Unavailable(f"QEMU {least[0]}.{least[1]} is not installed, and this is no Debian with backports of it")
    suite = release["VERSION_CODENAME"] + "-backports"
    shutil.rmtree(there, ignore_errors=True)
    sources, lists, root = (os.path.join(there, name) for name in ("sources", "lists", "root"))
    for directory in (sources, os.path.join(lists, "partial"), root):
        os.makedirs(directory)
    for source in glob.glob("/etc/apt/sources.list.d/*.sources") + glob.glob("/etc/apt/sources.list.d/*.list"):
        shutil.copy(source, sources)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    write(os.path.join(sources, "backports.list"), f"deb [signed-by={key}] http://deb.debian.org/debian {suite} main\n".encode())
    say(f"downloading QEMU from {suite} (unpacked in {root}, not installed)")
    own = [f"Dir::Etc::SourceParts={sources}", f"Dir::State::Lists={lists}", f"Dir::Cache={there}", "Debug::NoLocking=1", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-q", *(word for option in own for word in ("-o", option))]
    command_output(*apt, "update")
    planned = command_output(*apt, "install", "--print-uris", "-y", "--no-install-recommends", "-t", suite, "qemu-system-x86")
    packages = [(name, version.replace("%3a", ":")) for name, version in re.findall(r"^'\S+' ([^_\s]+)_([^_\s]+)_\S+\.deb", planned, re.MULTILINE)]
    if not packages:
        raise Unavailable(f"apt-get finds no QEMU in {suite}")
    done = subprocess.run(
        [*apt, "download", *(f"{name}={version}" for name, version in packages)], cwd=root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"apt-get cannot download QEMU from {suite}: {last}")
    for deb in glob.glob(os.path.join(root, "*.deb")):
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        os.remove(deb)
    shutil.rmtree(lists)
    libraries = sorted({os.path.dirname(path) for path in glob.glob(os.path.join(root, "**", "*.so*"), recursive=True)})
    firmware = [os.path.join(root, "usr", "share", name) for name in ("qemu", "seabios")]
    write(wrapper, "\n".join([
        "#!/bin/sh",
        f"export LD_LIBRARY_PATH='{':'.join(libraries)}'",
        f"export QEMU_MODULE_DIR='{os.path.join(root, 'usr/lib/x86_64-linux-gnu/qemu')}'",
        f"exec '{root}/usr/bin/qemu-system-x86_64' " + " ".join(f"-L '{path}'" for path in firmware) + ' "$@"',
        "",
    ]).encode())
    os.chmod(wrapper, 0o755)
    if emulator_version(wrapper) < least:
        os.remove(wrapper)
        raise Unavailable(f"the QEMU in {suite} is older than {least[0]}.{least[1]}, or does not run here")
    return wrapper


def kernel_proper(wrapped):
    """The ELF image inside of a bzImage, or the bzImage where its compression is not known here."""
    for magic, unpack in ((b"\xfd7zXZ\0", lzma.LZMADecompressor), (b"\x5d\0\0", lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE))):
        at = wrapped.find(magic)
        while at >= 0:
            try:
                image = unpack().decompress(wrapped[at:])
            except lzma.LZMAError:
                image = b""
            if image.startswith(b"\x7fELF"):
                return image
            at = wrapped.find(magic, at + 1)
    return wrapped


def unzstd(packed):
    return subprocess.run([which("zstd"), "-dc"], input=packed, stdout=subprocess.PIPE, check=True).stdout


# How kernels keep their modules.
MODULE_SUFFIXES = {".ko": bytes, ".ko.xz": lzma.decompress, ".ko.gz": gzip.decompress, ".ko.zst": unzstd}


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


class Archive:
    """An initial file system: a cpio archive in the "newc" format (Linux: Documentation/driver-api/early-userspace)."""

    def __init__(self, path):
        self.file = open(path, "wb")
        self.made = {""}
        self.count = 0

    def entry(self, name, mode, data=b""):
        self.count += 1
        encoded = name.encode() + b"\0"
        fields = [self.count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (head + encoded, data):
            self.file.write(part + bytes(-len(part) % 4))

    def directory(self, name):
        if name not in self.made:
            self.directory(os.path.dirname(name))
            self.made.add(name)
            self.entry(name, stat.S_IFDIR | 0o755)

    def add(self, name, data, mode=0o755):
        name = name.lstrip("/")
        if name not in self.made:
            self.directory(os.path.dirname(name))
            self.made.add(name)
            self.entry(name, stat.S_IFREG | mode, data)

    def add_program(self, path, name=None):
        """A program (in /bin, as `name`) with the libraries it is linked to, without debug information."""
        self.add("bin/" + (name or os.path.basename(path)), stripped(path))
        self.add_libraries(path)

    def add_libraries(self, path):
        for library in re.findall(r"(?:=> )?(/\S+) \(0x", command_output("ldd", path)):
            self.add(library, stripped(os.path.realpath(library)))
            # What a program was linked with in a folder that the guest hides (/tmp) the loader finds here.
            if not library.startswith(("/lib", "/usr/lib")):
                self.add("lib/" + os.path.basename(library), stripped(os.path.realpath(library)))

    def close(self):
        self.entry("TRAILER!!!", 0)
        self.file.close()


def stripped(path):
    # What is no program has strip remove the copy.
    with tempfile.TemporaryDirectory() as directory:
        copy = os.path.join(directory, "copy")
        done = subprocess.run(["strip", "-o", copy, path], capture_output=True, check=False)
        return read(copy if done.returncode == 0 else path)


def which(program):
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not found:
        raise Unavailable(f"{program} is not installed (tests/setup.sh guest installs it)")
    return found


def build(path, kernel, programs, files, modules=MODULES, init=os.path.join(HERE, "init"), others=()):
    """The initial file system: the kernel's modules, `programs` (name: path), `files` (name: content) for them, and `others`,
    which lie where they do here."""
    archive = Archive(path)
    for directory in ("proc", "sys", "dev", "tmp", "mnt", "etc"):
        archive.directory(directory)
    archive.add("init", read(init))
    archive.add("etc/passwd", b"".join(b"%s:x:%d:%d::/:/bin/sh\n" % (user, uid, uid) for user, _, uid in USERS), 0o644)
    archive.add("etc/group", b"".join(b"%s:x:%d:\n" % (group, uid) for _, group, uid in USERS), 0o644)
    order = []
    for module in modules:
        found = glob.glob(os.path.join(kernel, "**", "lib", "modules", "*", "kernel", module + ".ko*"), recursive=True)
        suffix = found and found[0].removeprefix(os.path.splitext(found[0])[0].removesuffix(".ko"))
        if found and suffix in MODULE_SUFFIXES:
            order.append(os.path.basename(module) + ".ko")
            archive.add("lib/guest/" + order[-1], MODULE_SUFFIXES[suffix](read(found[0])), 0o644)
    archive.add("lib/guest/order", "\n".join(order).encode() + b"\n", 0o644)
    for name, content in files.items():
        archive.add("lib/guest/" + name, content, 0o644)
    for name, program in programs.items():
        archive.add_program(program, name)
    for other in others:
        archive.add(other, stripped(other))
        archive.add_libraries(other)
    archive.close()
