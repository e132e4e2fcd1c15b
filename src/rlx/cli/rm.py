"""`rlx rm NAME`: deletes a downloaded model, after asking."""

from __future__ import annotations

import argparse
import sys

from rlx import hub
from rlx.hub.store import show_size


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("rm", help="delete a downloaded model")
    command.add_argument("names", nargs="+", metavar="NAME", help="a catalogue name or org/name[:quant]")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    code = 0
    for name in arguments.names:
        hub.locate(name)  # raises for an invalid name
        if not arguments.yes and not _confirm(name):
            print(f"{name}: kept", file=sys.stderr)
            code = 1
            continue
        freed = hub.remove(name)
        print(f"{name}: {show_size(freed)} freed" if freed else f"{name}: was not here", file=sys.stderr)
    return code


def _confirm(name: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        print("cannot ask without a terminal: use -y", file=sys.stderr)
        return False
    print(f"Delete {name}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
