"""Progress on stderr: a bar on a terminal; for downloads, two lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rlx.hub.store import show_size

Tick = Callable[[int], None]


def say(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr."""
    if not quiet and sys.stderr is not None:  # print would fall back to stdout
        print(text, file=sys.stderr, flush=True)


def offset_tick(tick: Tick, start: int) -> Tick:
    """Shift progress by `start`, for one file of several."""
    return lambda done: tick(start + done)


@contextlib.contextmanager
def bar(label: str, total: int, *, quiet: bool = False) -> Iterator[Tick]:
    """Show a download; yields a function to call with the bytes done so far."""
    started = time.monotonic()
    if quiet:
        yield lambda done: None
        return
    with progress_bar(f"fetching {label}", total) as tick:
        if tick is None:
            say(f"fetching {label}: {show_size(total)}")
        yield tick or (lambda done: None)
    say(f"fetched {label}: {show_size(total)} in {time.monotonic() - started:.1f} s")


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, of_bytes: bool = True) -> Iterator[Tick | None]:
    """Show a transient bar; yields a function to call with the amount done so far, or None without a terminal."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is None or closed
        terminal = False
    if not terminal:
        yield None
        return
    from rich import progress as parts  # lazy: takes 0.08 s
    from rich.console import Console

    amount = (parts.DownloadColumn(), parts.TransferSpeedColumn()) if of_bytes else (parts.MofNCompleteColumn(),)
    columns = (parts.TextColumn("{task.description}"), parts.BarColumn(), *amount, parts.TimeRemainingColumn())
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
