# Lodestone: build, test, show, measure, install.
#
#   make              the release build: lode, what it preloads, man pages, completions, C library, fio engine
#   make demo         SQLite on a mount whose server is killed; then a quick bench against tmpfs and ext4
#   make demo-wsp     a guest with a database, suspended in mid-load and resumed
#   make test         every test; installs what it needs and says so
#   make test-guest   on real persistent memory interfaces: boots a machine with emulated NVDIMMs and cuts its
#                     power 50 times, and on a disk 30 times; takes forty minutes (GUEST="--only power --seed 2"
#                     and the like)
#   make bench        the whole bench, as a table (BENCH="--only write-rand-4k --json" and the like)
#   make bench-wsp    how long suspends and resumes of whole systems take, beside what else there is
#   make install      PREFIX=/usr/local DESTDIR=
#   make uninstall    the same, backwards
#   make nightly      more seeds, cases, fuzzing; model checker, sanitizers; takes hours, and after ten nights every
#                     sequence of three operations was cut short (LODE_NIGHTS=1: in one, which takes days)
#   make setup        only what `make test` installs
#   make clean        what was built; test tools included

PREFIX ?= /usr/local
DESTDIR ?=
# mount(8) looks for helpers here, whatever the prefix.
SBINDIR ?= /sbin
BENCH ?= --peers tmpfs,ext4 --mount
GUEST ?=
WSP ?=
RUST_MIN = 1.95
PJDFSTEST_VERSION = 0.2.2
FSX_VERSION = 0.3.2

SHELL = /bin/sh
# A bare environment (CI) may have neither.
HOME ?= $(shell getent passwd "$$(id -u)" | cut -d: -f6)
export HOME
export PATH := $(HOME)/.cargo/bin:$(PATH):/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin

# A Rust that is missing or too old is set aside for one that rustup installs (tests/setup.sh).
RUST_FITS := $(shell rustc -V 2>/dev/null | awk -v min=$(RUST_MIN) \
	'{ split($$2, v, "."); split(min, m, "."); print (v[1] * 1000 + v[2] >= m[1] * 1000 + m[2]) }')
ifneq ($(RUST_FITS),1)
export RUSTUP_TOOLCHAIN := $(RUST_MIN).0
endif

CARGO ?= cargo
# jemalloc's own build, which cargo runs, makes three libraries of the same sources; cargo links this one.
export GNUMAKEFLAGS += -- STATIC_LIBS=lib/libjemalloc_pic.a
override CARGO_TARGET_DIR := $(abspath $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target))
export CARGO_TARGET_DIR
TARGET := $(CARGO_TARGET_DIR)
LODE := $(TARGET)/release/lode
SHARE := $(TARGET)/share
TOOLS := $(TARGET)/tools
# The system's own Python: others may lack the sqlite3 module.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)

.PHONY: all binaries manual library engine demo demo-wsp bench-wsp test test-guest tools bench install uninstall nightly setup clean help

all: binaries manual library engine

# One cargo call for all, so that nothing is compiled twice; but for what is preloaded, whose jemalloc has to be another one
# (crates/preload/Cargo.toml).
binaries:
	$(CARGO) build --release --workspace --exclude lodestone-preload --bins --lib
	$(CARGO) build --release -p lodestone-preload

manual: binaries
	rm -rf $(SHARE)
	mkdir -p $(SHARE)/completions
	$(LODE) man $(SHARE)/man
	$(LODE) completions bash > $(SHARE)/completions/lode
	$(LODE) completions zsh > $(SHARE)/completions/_lode
	$(LODE) completions fish > $(SHARE)/completions/lode.fish

library: binaries
	$(MAKE) -C crates/capi library CARGO=true

engine: library
	@if command -v fio >/dev/null; then $(MAKE) -C crates/capi fio CARGO=true; \
	else echo "fio engine: not built, because fio is not installed (make setup installs it)"; fi

setup:
	@tests/setup.sh test
	@tests/setup.sh guest || echo "setup: without these the guest suite is skipped"
	@tests/setup.sh study || echo "setup: without these the study of whole systems is run without a database"

demo:
	@tests/setup.sh demo
	$(MAKE) --no-print-directory binaries
	LODE=$(LODE) PYTHON=$(PYTHON) OUT=$(TARGET)/demo demo/run.sh

demo-wsp:
	@tests/setup.sh guest
	$(MAKE) --no-print-directory binaries
	$(PYTHON) demo/wsp.py --lode $(LODE) --out $(TARGET)/demo

bench-wsp:
	@tests/setup.sh study
	$(MAKE) --no-print-directory binaries
	$(PYTHON) tests/wsp/study.py --lode $(LODE) --out $(TARGET)/wsp $(WSP)

test: setup
	@LODE=$(LODE) $(PYTHON) tests/all.py

test-guest: setup
	@$(MAKE) --no-print-directory library tools
	@$(PYTHON) tests/guest/run.py --long $(GUEST)

# Public conformance tests, kept in target/ and built once.
tools: setup
	@$(MAKE) --no-print-directory $(TOOLS)/pjdfstest-$(PJDFSTEST_VERSION) $(TOOLS)/fsx-$(FSX_VERSION)

# How fast they are is nobody's matter: what they depend on takes less to run as it is than to optimise.
$(TOOLS)/%:
	CARGO_PROFILE_RELEASE_OPT_LEVEL=1 $(CARGO) install -q --locked --root $(TOOLS) --target-dir $(TOOLS)/build \
		--config 'profile.release.package."*".opt-level=0' \
		--version $(lastword $(subst -, ,$*)) $(firstword $(subst -, ,$*))
	rm -rf $(TOOLS)/build
	touch $@

bench: binaries
	$(LODE) bench $(BENCH)

nightly: setup
	@LODE=$(LODE) $(PYTHON) tests/all.py --nightly

install:
	@test -x $(LODE) || { echo "make install: nothing is built; run make first" >&2; exit 1; }
	install -D -m 755 $(LODE) $(DESTDIR)$(PREFIX)/bin/lode
	install -D -m 755 $(TARGET)/release/liblode_preload.so $(DESTDIR)$(PREFIX)/lib/liblode_preload.so
	install -d $(DESTDIR)$(SBINDIR) $(DESTDIR)$(PREFIX)/share/man/man1
	ln -sf $(PREFIX)/bin/lode $(DESTDIR)$(SBINDIR)/mount.fuse.lode
	install -m 644 $(SHARE)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -D -m 644 $(SHARE)/completions/lode $(DESTDIR)$(PREFIX)/share/bash-completion/completions/lode
	install -D -m 644 $(SHARE)/completions/_lode $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_lode
	install -D -m 644 $(SHARE)/completions/lode.fish \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/lode.fish
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	install -m 644 dist/systemd/*.service $(DESTDIR)$(PREFIX)/lib/systemd/system/
	install -D -m 755 dist/nut/lode-wsp-notify $(DESTDIR)$(PREFIX)/lib/lode/lode-wsp-notify
	$(MAKE) -C crates/capi install CARGO=true PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/lode $(DESTDIR)$(SBINDIR)/mount.fuse.lode
	rm -f $(DESTDIR)$(PREFIX)/lib/liblode_preload.so
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/lode.1 $(DESTDIR)$(PREFIX)/share/man/man1/lode-*.1
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/lode
	rm -f $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_lode
	rm -f $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/lode.fish
	rm -f $(DESTDIR)$(PREFIX)/lib/systemd/system/lode-wsp.service
	rm -f $(DESTDIR)$(PREFIX)/lib/systemd/system/lode-wsp-powerfail.service
	rm -f $(DESTDIR)$(PREFIX)/lib/lode/lode-wsp-notify
	$(MAKE) -C crates/capi uninstall PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)

clean:
	rm -rf $(TARGET)

help:
	@sed -n 's/^#   make/  make/p' Makefile
