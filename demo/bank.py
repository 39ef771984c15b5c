#!/usr/bin/env python3
"""A small bank in SQLite, the demo's unmodified program: it moves money until its storage dies.

    bank.py work DATABASE MODE NOTES    transfers in journal mode MODE, until the first error
    bank.py check DATABASE NOTES        what survived, against what was acknowledged

NOTES lies outside of the mount. It holds a line for each transfer that was begun and one for each whose
COMMIT returned. Each transfer is one transaction over four tables' pages, so that half a transfer shows
in the sum of all accounts.
"""

import os
import random
import sqlite3
import sys

ACCOUNTS = 2000
BALANCE = 1000
# Exit status: the kill came before the transaction was open.
BETWEEN_TRANSFERS = 3


def main():
    if len(sys.argv) == 5 and sys.argv[1] == "work":
        return work(sys.argv[2], sys.argv[3], sys.argv[4])
    if len(sys.argv) == 4 and sys.argv[1] == "check":
        return check(sys.argv[2], sys.argv[3])
    sys.exit(__doc__)


def work(path, mode, notes):
    """Transfers without a pause; the error that ends them is what this program is made to meet."""
    log = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    db = open_bank(path, mode)
    rng = random.Random(1)
    number = 0
    while True:
        number += 1
        os.write(log, b"begun %d\n" % number)
        for statement, values in transfer(rng, number):
            try:
                db.execute(statement, values)
            except sqlite3.Error as error:
                print(f"  transfer {number} stopped at {statement.split()[0]}: {error}", flush=True)
                # Without closing the database, which would wait for a file system that is gone.
                os._exit(BETWEEN_TRANSFERS if statement.startswith("BEGIN") else 0)
        os.write(log, b"acknowledged %d\n" % number)


def open_bank(path, mode):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode={mode}")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("BEGIN")
    db.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT)")
    db.execute("CREATE TABLE ledger (number INTEGER PRIMARY KEY, origin INTEGER, target INTEGER, amount INTEGER)")
    db.execute("CREATE INDEX by_account ON ledger (origin, target)")
    rows = ((account, BALANCE, "x" * 100) for account in range(ACCOUNTS))
    db.executemany("INSERT INTO accounts VALUES (?, ?, ?)", rows)
    db.execute("COMMIT")
    return db


def transfer(rng, number):
    """The statements of one transfer."""
    origin, target, amount = rng.randrange(ACCOUNTS), rng.randrange(ACCOUNTS), rng.randrange(1, 50)
    return (
        ("BEGIN IMMEDIATE", ()),
        ("UPDATE accounts SET balance = balance - ? WHERE id = ?", (amount, origin)),
        ("INSERT INTO ledger VALUES (?, ?, ?, ?)", (number, origin, target, amount)),
        ("UPDATE accounts SET balance = balance + ? WHERE id = ?", (amount, target)),
        ("COMMIT", ()),
    )


def check(path, notes):
    begun, acknowledged = read_notes(notes)
    db = sqlite3.connect(path)
    sound = db.execute("PRAGMA integrity_check").fetchone()[0]
    total = db.execute("SELECT sum(balance) FROM accounts").fetchone()[0]
    numbers = [row[0] for row in db.execute("SELECT number FROM ledger ORDER BY number")]
    replayed = replay(db)
    db.close()
    interrupted = begun - acknowledged
    print(f"  transfers begun {begun}, acknowledged {acknowledged}, found {len(numbers)}")
    print(f"  PRAGMA integrity_check: {sound}")
    print(f"  money: {total} of {ACCOUNTS * BALANCE}")
    verdicts = {
        "the database is sound": sound == "ok",
        "no money was made or lost": total == ACCOUNTS * BALANCE,
        "every acknowledged transfer is there": numbers[:acknowledged] == list(range(1, acknowledged + 1)),
        "the interrupted one is there wholly or not at all": len(numbers) in (acknowledged, acknowledged + interrupted),
        "balances are what the ledger says": replayed,
    }
    for verdict, holds in verdicts.items():
        print(f"  {'yes' if holds else 'NO '}  {verdict}")
    return 0 if all(verdicts.values()) else 1


def read_notes(notes):
    last = {"begun": 0, "acknowledged": 0}
    with open(notes, encoding="ascii") as lines:
        for line in lines:
            what, number = line.split()
            last[what] = int(number)
    return last["begun"], last["acknowledged"]


def replay(db):
    """Whether the balances follow from the ledger alone."""
    balances = [BALANCE] * ACCOUNTS
    for origin, target, amount in db.execute("SELECT origin, target, amount FROM ledger"):
        balances[origin] -= amount
        balances[target] += amount
    return balances == [row[0] for row in db.execute("SELECT balance FROM accounts ORDER BY id")]


if __name__ == "__main__":
    sys.exit(main())
