"""The terminal: output on stdout; notes, timings and progress on stderr, in colour only where somebody looks.

Either stream may be missing, closed, no terminal, or unable to write some characters; none of it stops a command.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

from rlx.errors import RequestError, RlxError

OK, FAILED, USAGE, NOT_FOUND, BAD_FILE, NO_MEMORY, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130  # exit codes
_GREY, _PLAIN, _ERASE = "\033[90m", "\033[0m", "\r\033[2K"
# What a model says may hold anything; on a terminal, control characters would do more than show.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


CHUNK = 1 << 20  # bytes that are read at a time


class UsageError(RequestError):
    """A command line that cannot be meant."""


def read_at_most(source: IO[bytes], most: int, what: str, *, before: int = 0) -> bytes:
    """All bytes of a file or pipe; one that never ends, or has more than `most` with those `before`, is refused."""
    parts, size = list[bytes](), before
    while chunk := source.read(CHUNK):
        parts.append(chunk)
        size += len(chunk)
        if size > most:
            which = "has" if not before else "and what was read before it have"
            raise UsageError(f"{what} {which} more than {most >> 20} MiB, which is the most that is read")
    return b"".join(parts)


def prepare() -> None:
    """Let no character stop the output: names of files go out as they came in, others become question marks."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        known = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        reconfigure(errors="surrogateescape" if known else "replace")


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether somebody sits at the other end."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def is_rich(stream: IO[str] | None) -> bool:
    """Whether it is a terminal that can overwrite a line."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")


def write(text: str) -> None:
    """A piece of the output, at once."""
    if sys.stdout is not None:
        sys.stdout.write(text.translate(_CONTROLS) if is_terminal(sys.stdout) else text)
        sys.stdout.flush()


def note(text: str) -> None:
    """A line to the user, beside the output."""
    if sys.stderr is not None:  # print would take stdout instead
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """A warning as a line, in place of the source that `warnings` shows to programmers."""
    note(f"rlx: warning: {message}")


def aside(text: str) -> None:
    """A line for those who look for it: grey on a terminal."""
    coloured = is_rich(sys.stderr) and not os.environ.get("NO_COLOR")
    note(f"{_GREY}{text}{_PLAIN}" if coloured else text)


def explain(error: RlxError) -> None:
    """An error as people read it: what, then the notes."""
    note(f"rlx: {error}")
    for line in error.notes:
        note(line)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """What is being waited for: a line on a terminal that goes away again, nothing elsewhere."""
    shown = is_rich(sys.stderr)
    if shown:
        sys.stderr.write(f"{text} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


def joined(parts: Sequence[str]) -> str:
    """Parts of a line, with dots between them where stderr can show dots."""
    try:
        "·".encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return " | ".join(parts)
    return " · ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[str] | None = None) -> None:
    """A table on stdout: drawn on a terminal, plain columns elsewhere.

    Columns of `numbers` are at the right: all but the first and the last, if it is not said.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    right = set(header[1:-1] if numbers is None else numbers)
    if is_rich(sys.stdout):
        from rich.console import Console
        from rich.table import Table

        drawn = Table()
        for name in header:
            drawn.add_column(name, justify="right" if name in right else "left")
        for row in cells:
            drawn.add_row(*row)
        Console().print(drawn, markup=False)
        return
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    for row in [list(header), *cells]:
        places = zip(header, row, widths, strict=True)
        aligned = [cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in places]
        print("  ".join(aligned).rstrip())
