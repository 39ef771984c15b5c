#!/bin/sh
# fio writes, verifies, trims and misuses a pool: test.sh ENGINE HELLO. HELLO makes the pool.
set -eu

here=$(realpath "$(dirname "$0")")
engine=$(realpath "$1")
hello=$(realpath "$2")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"$hello" test.pool >/dev/null
pool=test.pool

run() { # NAME OPTIONS...
    name=$1
    shift
    fio --output-format=json --output="$name.json" --name="$name" --ioengine=external:"$engine" \
        ${pool:+"--pool=$pool"} --thread=1 "$@" 2>"$name.err"
}
passes() {
    run "$@" || { echo "fio test: $1 failed"; cat "$1.err" "$1.json"; exit 1; }
    # fio reports a failed verification in the job's error too.
    grep -q '"error" : 0' "$1.json" && ! grep -q '"error" : [^0]' "$1.json" || { echo "fio test: $1 reports an error"; cat "$1.json"; exit 1; }
}
fails() { # NAME TEXT OPTIONS...
    name=$1 text=$2
    shift 2
    ! run "$name" "$@" || { echo "fio test: $name should have failed"; exit 1; }
    grep -q -- "$text" "$name.err" "$name.json" || { echo "fio test: $name does not say: $text"; cat "$name.err" "$name.json"; exit 1; }
}
moved() { # NAME DIRECTION BYTES
    sed -n "/\"$2\" : {/,/io_bytes/s/.*\"io_bytes\" : \([0-9]*\),.*/\1/p" "$1.json" | grep -qx "$3" ||
        { echo "fio test: $1 did not $2 $3 bytes"; cat "$1.json"; exit 1; }
}

ENGINE=$engine POOL=$pool fio --output-format=json --output=verify.json "$here/verify.fio" || exit 1
moved verify write 8388608
moved verify read 8388608
passes odd --rw=randwrite --bsrange=512-20000 --bs_unaligned --size=3m --numjobs=2 --group_reporting \
    --verify=crc32c --do_verify=1 --filename=dir/odd --offset_increment=3m
passes layout --rw=randread --bs=4k --size=4m --nrfiles=4
moved layout read 4194304
passes rest --rw=randread --bs=4k --size=4m --nrfiles=3
passes mixed --rw=randrw --bs=4k --size=4m --numjobs=2 --fsync=16 --fdatasync=8
passes trim --rw=randtrimwrite --bs=4k --size=4m --allow_file_create=1
passes append --rw=write --bs=64k --size=8m --fallocate=none --sync=1
passes again --rw=randread --bs=4k --filename=append.0.0 --size=8m
passes unlink --rw=write --bs=64k --size=8m --unlink=1

fails full 'No space left' --rw=write --bs=1m --size=1g
pool=
fails nopool 'pool= is missing' --rw=write --size=1m
pool=nowhere.pool
fails wrongpool 'nowhere.pool' --rw=write --size=1m
pool=test.pool
fails process 'thread=1' --thread=0 --numjobs=2 --rw=write --size=1m
fails options 'colour' --pool_opts=colour=red --rw=write --size=1m
[ -z "$(find . -name '*.0.0')" ] || { echo "fio test: files outside the pool"; exit 1; }
"$hello" test.pool >/dev/null
echo "fio test: passed"
