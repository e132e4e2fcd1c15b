"""The terminal: output on stdout; notes, timings and progress on stderr, coloured only on a terminal.

Either stream may be missing, closed, no terminal, or unable to write some characters; none of that stops a command.
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
# Model output may contain anything; control characters must not reach a terminal.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


CHUNK = 1 << 20  # bytes per read


class UsageError(RequestError):
    """An invalid command line."""


def read_at_most(source: IO[bytes], limit: int, name: str, *, before: int = 0) -> bytes:
    """Read a file or pipe to its end. Raises UsageError if its size and `before` together exceed `limit`."""
    parts, size = list[bytes](), before
    while chunk := source.read(CHUNK):
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            which = "has" if not before else "and what was read before it have"
            raise UsageError(f"{name} {which} more than {limit >> 20} MiB, which is the limit")
    return b"".join(parts)


def prepare() -> None:
    """Make stdout accept any character: undecodable file names are written unchanged, others become question marks."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        known = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        reconfigure(errors="surrogateescape" if known else "replace")


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def is_rich(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal with colours and cursor control."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")


def write(text: str) -> None:
    """Write a piece of the output and flush."""
    if sys.stdout is not None:
        sys.stdout.write(text.translate(_CONTROLS) if is_terminal(sys.stdout) else text)
        sys.stdout.flush()


def note(text: str) -> None:
    """Print a line on stderr."""
    if sys.stderr is not None:  # print would fall back to stdout
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
    """Show a warning as one line, without the source line that `warnings` prints."""
    note(f"rlx: warning: {message}")


def dim_note(text: str) -> None:
    """Print a line on stderr, grey on a terminal."""
    coloured = is_rich(sys.stderr) and not os.environ.get("NO_COLOR")
    note(f"{_GREY}{text}{_PLAIN}" if coloured else text)


def explain(error: RlxError) -> None:
    """Print an error and its notes."""
    note(f"rlx: {error}")
    for line in error.notes:
        note(line)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show what is running: a line on a terminal, erased afterwards."""
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


def join(parts: Sequence[str]) -> str:
    """Join parts of a line with dots, or bars if stderr cannot encode dots."""
    try:
        "·".encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return " | ".join(parts)
    return " · ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[str] | None = None) -> None:
    """Print a table on stdout: drawn on a terminal, plain columns elsewhere.

    Columns in `numbers` are right-aligned; by default all but the first and the last.
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
