"""The command line: one file per command. Errors are printed without traceback; the exit code tells their kind."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import rlx
from rlx.cli import console
from rlx.cli.console import BAD_FILE, FAILED, INTERRUPTED, NO_MEMORY, NOT_FOUND, OK, USAGE, UsageError, note
from rlx.errors import FormatError, NotFoundError, ParseError, RlxError, nearest
from rlx.ir.provenance import Origin, added_at

COMMANDS = (
    "run", "embed", "search", "pull", "models", "show", "rm", "export", "inspect", "tour", "ops", "stages", "verify",
    "bench", "demo", "env", "cache", "serve", "batch",
)  # fmt: skip
ALIASES = {"list": "models", "ls": "models"}
CODES: dict[type[BaseException], int] = {
    UsageError: USAGE,
    NotFoundError: NOT_FOUND,
    FormatError: BAD_FILE,
    ParseError: BAD_FILE,
    MemoryError: NO_MEMORY,
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser for all commands, or for one, which imports only that command."""
    top = argparse.ArgumentParser(prog="rlx", description="An ML compiler and runtime.")
    top.add_argument("--version", action="version", version=f"rlx {rlx.__version__}")
    top.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS if command is None else [command]:
        importlib.import_module(f"rlx.cli.{name}").add(commands)
    for inner in commands.choices.values():  # also accepted after the command
        inner.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = console.warn
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    console.prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    place = next((i for i, w in enumerate(words) if not w.startswith("-")), None)
    first = "" if place is None else ALIASES.get(words[place], words[place])
    if place is not None:
        words[place] = first
    try:
        if not words:
            parser().print_help(sys.stderr)
            return USAGE
        if words == ["--version"]:  # without a command
            print(f"rlx {rlx.__version__}")
            return OK
        arguments = _parsed(words, first)
        with added_at(Origin(f"rlx {first}"), sys._getframe()):  # not the script that calls `main`
            code = int(arguments.run(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # report write errors here, not when Python exits
        return code
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        _drop_output()
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if "--debug" in words:
            raise
        _explain(error, first)
        return _code(error)


def _parsed(words: Sequence[str], command: str) -> argparse.Namespace:
    """The arguments of a command; an unknown option is an error of that command."""
    top = parser(command if command in COMMANDS else None)
    arguments, unknown = top.parse_known_args(words)
    if unknown:
        inner = next(iter(top._subparsers._group_actions)).choices[command]  # type: ignore[union-attr, index]
        options = [name for action in inner._actions for name in action.option_strings if name.startswith("--")]
        option = unknown[0].partition("=")[0]
        hint = nearest(option, options) if option.startswith("--") else None
        usage = f"rlx {command} --help lists the options"
        raise UsageError(f"{command}: unknown argument {unknown[0]!r}", hint=f"{hint} {usage}" if hint else usage)
    return arguments


def _code(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return NO_MEMORY
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), FAILED)


def _explain(error: Exception, command: str) -> None:
    match error:
        case RlxError():
            console.explain(error)
        case MemoryError() | OSError(errno=errno.ENOMEM):
            note(f"rlx: there is not enough memory{f': {error}' if str(error) else ''}")
            note("  hint: a smaller model or quantisation, a smaller --context, or --cache f16 or q8_0")
        case OSError() if error.filename is None and error.errno in _NO_ROOM:
            note(f"rlx: the output cannot be written: {error.strerror}")
            _drop_output()
        case OSError():
            note(f"rlx: {error}")
            note(f"  hint: rlx {command} --debug ... shows where it happened")
        case _:
            note(f"rlx: {type(error).__name__}: {error}")
            note("  hint: this is a defect of rlx; please report it, with what these print:")
            note(f"    rlx {command} --debug ...    and    rlx env")


def _drop_output() -> None:
    """Discard the rest of stdout's buffer, so that Python exits without an error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
