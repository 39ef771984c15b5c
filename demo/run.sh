#!/usr/bin/env bash
# The demo: an unmodified SQLite on a mounted pool, whose server is killed (SIGKILL) in mid-transaction;
# what survived; then the quick bench against tmpfs and ext4. `make demo` builds first and calls this.
#
# Environment: LODE the binary, OUT where pool, mount point and picture go, PYTHON a Python with sqlite3.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LODE=${LODE:-$here/../target/release/lode}
OUT=${OUT:-$here/../target/demo}
PYTHON=${PYTHON:-python3}
MOUNT_S_MAX=30

fail() {
    echo "demo: $*" >&2
    exit 1
}

[ -x "$LODE" ] || fail "$LODE is not built; run make demo"
[ -c /dev/fuse ] || fail "there is no /dev/fuse here, so nothing can be mounted (modprobe fuse; in a container: --device /dev/fuse)"
"$PYTHON" -c 'import sqlite3' || fail "$PYTHON has no sqlite3 module"

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
pool=$OUT/demo.pool
dir=$OUT/mnt
server=
bank=

unmount_dead() {
    if [ "$(id -u)" -eq 0 ]; then umount -l "$dir"; else fusermount3 -uz "$dir"; fi
}

# Nothing stays: neither a process nor a mount nor the pool. Also what an interrupted demo left.
clean_up() {
    for child in $bank $server; do kill -9 "$child" 2>/dev/null || true; done
    unmount_dead 2>/dev/null || true
    rm -f "$pool"
    if [ -d "$dir" ]; then rmdir "$dir"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

mount_pool() {
    "$LODE" mount "$pool" "$dir" -f &
    server=$!
    local outside waited=0
    outside=$(stat -c %d "$OUT")
    while [ "$(stat -c %d "$dir")" = "$outside" ]; do
        kill -0 "$server" 2>/dev/null || fail "the mount server ended"
        waited=$((waited + 1))
        [ "$waited" -lt $((MOUNT_S_MAX * 50)) ] || fail "nothing was mounted within $MOUNT_S_MAX s"
        sleep 0.02
    done
}

kill_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    server=
}

# SQLite in one journal mode, killed and looked at.
survives() {
    local mode=$1 seconds=$2 round
    echo
    echo "SQLite, journal mode $mode: transfers for $seconds s, then SIGKILL to the mount server"
    for round in 1 2 3 4 5; do
        if interrupted "$mode" "$seconds" "$dir/$mode$round.db" "$OUT/notes"; then return; fi
        echo "  that kill fell between two transfers: once more"
    done
    fail "no kill out of $round fell into a transfer"
}

# One kill and what it left; fails where it did not come in mid-transaction.
interrupted() {
    local mode=$1 seconds=$2 database=$3 notes=$4 status=0
    rm -f "$notes"
    "$PYTHON" "$here/bank.py" work "$database" "$mode" "$notes" &
    bank=$!
    sleep "$seconds"
    kill -0 "$bank" 2>/dev/null || fail "the bank ended before the kill"
    kill_server
    wait "$bank" || status=$?
    bank=
    unmount_dead || fail "the dead mount cannot be taken away"
    mount_pool
    "$PYTHON" "$here/bank.py" check "$database" "$notes" || fail "SQLite in mode $mode lost something"
    rm -f "$notes"
    case $status in
    0) return 0 ;;
    3) return 1 ;;
    *) fail "the bank failed in another way than by its storage" ;;
    esac
}

clean_up
mkdir "$dir"
echo "A pool of 1 GiB in an ordinary file, mounted through FUSE:"
"$LODE" mkfs "$pool" --size 1G
mount_pool
df -h "$dir"
survives WAL 3
survives DELETE 3
echo
echo "Unmounted cleanly, mounted again, all is as it was:"
"$LODE" umount "$dir"
wait "$server" || fail "the mount server did not end well"
server=
mount_pool
ls -l "$dir"
"$LODE" umount "$dir"
wait "$server"
server=
clean_up

echo
echo "The quick bench (make bench runs all of it):"
"$LODE" bench --quick --peers tmpfs,ext4 --svg "$OUT/bench.svg"
echo
echo "The picture is $OUT/bench.svg"
