"""How far a download is: a bar on a terminal, two lines elsewhere, all on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rlx.hub.store import show_size

Tick = Callable[[int], None]


def say(text: str, *, quiet: bool = False) -> None:
    """A line to the user, beside the output."""
    if not quiet and sys.stderr is not None:  # print would take stdout instead
        print(text, file=sys.stderr, flush=True)


def after(tick: Tick, start: int) -> Tick:
    """The same bar for one file of several: `start` bytes were done before it."""
    return lambda done: tick(start + done)


@contextlib.contextmanager
def bar(label: str, total: int, *, quiet: bool = False) -> Iterator[Tick]:
    """Gives a function that takes the bytes done so far."""
    started = time.monotonic()
    if quiet:
        yield lambda done: None
        return
    with _drawn(label, total) as tick:
        yield tick
    say(f"fetched {label}: {show_size(total)} in {time.monotonic() - started:.1f} s")


@contextlib.contextmanager
def _drawn(label: str, total: int) -> Iterator[Tick]:
    try:
        terminal = sys.stderr.isatty()
        from rich.console import Console  # 0.08 s, so only where it is looked at
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed
    except (ImportError, AttributeError, ValueError):  # no rich; stderr is None or closed
        terminal = False
    if not terminal:
        say(f"fetching {label}: {show_size(total)}")
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"fetching {label}", total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
