#!/bin/sh
# Puts the headers that an external engine for this machine's fio needs into DIRECTORY and prints their
# path. They are not installed by any Debian package, so they come from the source package of the same
# version, configured here to make config-host.h. Idempotent; changes nothing outside DIRECTORY.
set -eu

[ $# -eq 1 ] || { echo "usage: fetch-headers.sh DIRECTORY" >&2; exit 2; }
fail() { echo "fetch-headers: $*" >&2; exit 1; }

command -v fio >/dev/null || fail "fio is not installed: apt-get install fio"
package=$(dpkg-query -W -f '${source:Package}=${source:Version}' fio 2>/dev/null) || package=
upstream=$(fio --version | sed 's/^fio-//')
mkdir -p "$1"
root=$(cd "$1" && pwd)
dir=$root/fio-$upstream

if [ ! -f "$dir/config-host.h" ]; then
    [ -n "$package" ] || fail "fio $upstream is not from a Debian package: unpack its source as $dir and run ./configure there"
    apt=$root/apt
    rm -rf "$dir" "$dir.part"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/parts"
    # This machine's own sources, turned into source-package ones, in a place of our own.
    for list in /etc/apt/sources.list.d/*.sources; do
        [ ! -f "$list" ] || sed 's/^Types:.*/Types: deb-src/' "$list" > "$apt/parts/${list##*/}"
    done
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ ! -f "$list" ] || sed -n 's/^deb\(-src\)\{0,1\} /deb-src /p' "$list" > "$apt/parts/${list##*/}"
    done
    [ ! -f "$apt/parts/sources.list" ] || mv "$apt/parts/sources.list" "$apt/parts/sources-list.list"
    apt_get() {
        apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/parts" \
            -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root "$@"
    }
    # Some repository may have no sources; what counts is whether fio's are found.
    apt_get update >&2 || true
    (cd "$root" && apt_get source --download-only "$package" >&2) || fail "the source of $package cannot be fetched"
    mkdir "$dir.part"
    tar -xf "$(find "$root" -maxdepth 1 -name "fio_$upstream.orig.tar.*" ! -name '*.asc')" \
        -C "$dir.part" --strip-components=1 || fail "the source of $package has an unexpected form"
    # As Debian configures it. What else is installed here changes no layout that an engine sees.
    (cd "$dir.part" && ./configure --disable-native >/dev/null 2>&1) || fail "fio's configure failed in $dir.part"
    mv "$dir.part" "$dir"
fi
echo "$dir"
