#!/bin/sh
# Runs the library's tests of what is concurrent under thread sanitizer: sanitize.sh [FILTER ...].
#
# With nightly Rust, and the standard library rebuilt with the sanitizer, because a lock that it does not see would be
# a race to it. Nothing is suppressed. (Address sanitizer: tests/fuzz.py --sanitizer address.)
set -eu
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
out=${CARGO_TARGET_DIR:-target}/tsan
unset RUSTUP_TOOLCHAIN
export RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS="halt_on_error=1"

[ $# -gt 0 ] || set -- sync:: fs::alloc fs::epoch fs::namei
cargo +nightly test -q -Zbuild-std --target "$target" --target-dir "$out" --lib -- "$@"
cargo +nightly test -q -Zbuild-std --target "$target" --target-dir "$out" --test fs -- threads deadlock
