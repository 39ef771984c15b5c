#!/bin/sh
# Installs what `make demo`, `make test`, `make test-guest` and `make bench-wsp` need and this machine lacks:
# setup.sh demo|test|guest|study.
#
# Through apt-get, as root or with sudo, and says what. Where all is there, it does nothing, so that it
# can run before every build. A missing Rust (or one too old, where the Makefile has set
# RUSTUP_TOOLCHAIN) comes through rustup.
set -eu

# package:probe, the probe a command or a file that shows that the package is there.
demo="fuse3:fusermount3 python3:python3 e2fsprogs:mkfs.ext4 util-linux:mount"
test="$demo gcc:cc g++:c++ libc6-dev:/usr/include/stdio.h make:make git:git tar:tar rsync:rsync diffutils:diff
acl:setfacl libacl1-dev:/usr/include/sys/acl.h attr:setfattr pkg-config:pkg-config fio:fio xz-utils:xz
bindfs:bindfs"
# What boots a machine with emulated NVDIMMs. Its kernel is downloaded by tests/guest, not installed.
guest="qemu-system-x86:qemu-system-x86_64 busybox-static:busybox binutils:strip e2fsprogs:mkfs.ext4
xfsprogs:mkfs.xfs"

# The database of the study of whole systems, and what compiles its program.
study="$guest gcc:cc libc6-dev:/usr/include/stdio.h librocksdb-dev:/usr/include/rocksdb/c.h"

case ${1-} in
demo) wanted=$demo ;;
test) wanted=$test ;;
guest) wanted=$guest ;;
study) wanted=$study ;;
*) echo "usage: setup.sh demo|test|guest|study" >&2; exit 2 ;;
esac

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
present() {
    case $1 in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

missing=
for pair in $wanted; do
    present "${pair#*:}" || missing="$missing ${pair%%:*}"
done

if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "setup: these are missing, and there is no apt-get to install them:$missing" >&2
        exit 1
    fi
    sudo=
    [ "$(id -u)" -eq 0 ] || sudo="sudo -n"
    if [ -n "$sudo" ] && ! $sudo true 2>/dev/null; then
        echo "setup: missing; run: sudo apt-get install$missing" >&2
        exit 1
    fi
    echo "setup: installing with apt-get:$missing"
    log=$(mktemp)
    # Lists may be old or absent on a fresh machine; one of many repositories may fail to answer.
    $sudo apt-get -q update >"$log" 2>&1 </dev/null || true
    if ! $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
        $missing >>"$log" 2>&1 </dev/null; then
        tail -20 "$log" >&2
        echo "setup: apt-get could not install$missing; all it said is in $log" >&2
        exit 1
    fi
    rm -f "$log"
fi

if [ -n "${RUSTUP_TOOLCHAIN-}" ] && command -v rustup >/dev/null; then
    if ! rustup run "$RUSTUP_TOOLCHAIN" rustc -V >/dev/null 2>&1; then
        echo "setup: installing Rust $RUSTUP_TOOLCHAIN with rustup"
        rustup toolchain install "$RUSTUP_TOOLCHAIN" --profile minimal -c rustfmt -c clippy >/dev/null
    fi
fi
if ! cargo --version >/dev/null 2>&1; then
    echo "setup: cargo is missing: install Rust with rustup (https://rustup.rs)" >&2
    exit 1
fi
