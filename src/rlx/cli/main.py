"""The command line: one file a command. Errors are messages without tracebacks; exit codes tell failures apart."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import rlx
from rlx.cli import cache, demo, embed, env, inspect, models, ops, pull, rm, run, show
from rlx.errors import FormatError, NotFoundError, ParseError, RlxError

COMMANDS = (run, embed, pull, models, show, rm, inspect, ops, demo, env, cache)
OK, FAILED, USAGE, NOT_FOUND, BAD_FILE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="rlx", description="An ML compiler and runtime.")
    top.add_argument("--version", action="version", version=f"rlx {rlx.__version__}")
    top.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RlxError as error:
        if arguments.debug:
            raise
        print(f"rlx: {error}", file=sys.stderr)
        for note in error.notes:
            print(note, file=sys.stderr)
        if isinstance(error, NotFoundError):
            return NOT_FOUND
        return BAD_FILE if isinstance(error, (FormatError, ParseError)) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


if __name__ == "__main__":
    sys.exit(main())
