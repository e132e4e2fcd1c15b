"""`rlx cache`: shows location and size of the cache of compiled programs and model snapshots; `--clear` empties it."""

from __future__ import annotations

import argparse

from rlx.backends.cache_folder import SNAPSHOTS, Cache, current, file_of, snapshot_limit


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "cache",
        help="show or clear the cache of compiled programs and model snapshots",
        epilog="RLX_CACHE is off, readonly or a folder; RLX_CACHE_LIMIT limits model snapshots, in gigabytes",
    )
    command.add_argument("--clear", action="store_true", help="remove everything in it")
    command.add_argument("--verify", action="store_true", help="read the weights of all snapshots; remove damaged ones")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    store = current()
    if store.folder is None:
        print(f"no cache: {store.why}")
        return 0
    if arguments.clear:
        print(f"removed {store.clear()} files from {store.folder}")
        return 0
    if arguments.verify:
        return verify(store)
    files, size = store.size()
    print(f"{store.folder}: {files} files, {size / 1e6:.1f} MB" + ("" if store.writable else " (read only)"))
    for kind, count, held in store.kinds():
        limit = f" of {snapshot_limit() / 1e6:,.0f} MB" if kind == SNAPSHOTS else ""
        print(f"  {kind:10} {count:6} files  {held / 1e6:10.1f} MB{limit}")
    return 0


def verify(store: Cache) -> int:
    """Check the digest of every snapshot, and remove damaged ones."""
    from rlx.errors import FormatError
    from rlx.runtime import container

    snapshots = store.snapshots()
    bad = 0
    for path in snapshots:
        seen = file_of(path)
        try:
            file = container.read(path, "a snapshot")
            file.check(file.manifest["sections"])
        except FormatError as error:
            bad += 1
            print(f"{error}: {'removed' if store.drop(path, seen) else 'could not be removed'}")
    print(f"{bad} of {len(snapshots)} snapshots were damaged")
    return 0
