"""`rlx cache`: where compiled programs are kept, how large they are; `--clear` removes them."""

from __future__ import annotations

import argparse

from rlx.backends.cache import current


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("cache", help="show or clear the cache of compiled programs")
    command.add_argument("--clear", action="store_true", help="remove everything in it")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    store = current()
    if store.folder is None:
        print(f"no cache: {store.why}")
        return 0
    if arguments.clear:
        print(f"removed {store.clear()} files from {store.folder}")
        return 0
    files, size = store.size()
    print(f"{store.folder}: {files} files, {size / 1e6:.1f} MB" + ("" if store.writable else " (read only)"))
    return 0
