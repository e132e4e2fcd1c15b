"""The pass runner: runs passes in order, and verifies, times and dumps after each.

A pass is a function from graph to graph. `RLX_DUMP=dir` writes the graph after each pass to `dir/NNN-graph.pass.rlx`;
`record_graphs()` collects them.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

from rlx import garbage
from rlx.errors import CapabilityError, VerifyError, shortened
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph
from rlx.ir.rewrite import count_rewrites
from rlx.ir.verify import Typed, verify

Pass = Callable[[Graph], Graph]
_serial = itertools.count()
_recorded: ContextVar[list[tuple[str, Graph]] | None] = ContextVar("recorded", default=None)


@dataclass(frozen=True)
class PassEntry:
    """One run of a pass. `rewrites` counts replaced and dropped nodes, `number` is its step in a pipeline."""

    name: str
    seconds: float
    before: int  # nodes
    after: int
    rewrites: int
    number: int = 0


@dataclass
class PassLog:
    """The passes that ran, in order. `typed` is the verifier's cache."""

    entries: list[PassEntry] = field(default_factory=list)
    typed: Typed = field(default_factory=dict)

    def text(self) -> str:
        """One line per run of a pass."""
        return "\n".join(
            f"{e.name:24} {e.seconds * 1e3:8.2f} ms  {e.before:5} -> {e.after:5} nodes  {e.rewrites:5} rewritten"
            for e in self.entries
        )


def run_passes(graph: Graph, passes: Sequence[Pass], log: PassLog | None = None) -> Graph:
    """Runs all passes and returns the resulting graph."""
    log = log or PassLog()
    with garbage.paused():  # passes leave dead graphs full of cycles; searching them can take longer than the passes
        for apply in passes:
            name = getattr(apply, "func", apply).__name__
            before, count = graph, len(graph)
            graph = timed(log, getattr(apply, "number", 0), apply, graph)
            try:
                if graph is not before or len(graph) != count:
                    verify(graph, log.typed)
                    _check_outputs(before, graph)
            except VerifyError as error:
                error.add_note(f"  after pass: {name}")
                raise
            dump(graph, name)
    return graph


def _check_outputs(before: Graph, after: Graph) -> None:
    """Raises if a pass has changed the number or the types of the outputs."""
    if len(before.outputs) != len(after.outputs):
        raise VerifyError(f"{after.name}: {len(after.outputs)} outputs, before {len(before.outputs)}")
    for i, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        if old.type != new.type:
            raise VerifyError(f"{after.name}: output {i} is {new.type}, before {old.type}")


Result = TypeVar("Result", bound=Sized)


def timed(
    log: PassLog, number: int, apply: Callable[..., Result], graph: Graph, *others: Any, **options: Any
) -> Result:
    """Runs a pass and logs its statistics."""
    with count_rewrites() as tally:
        started, before = time.perf_counter(), len(graph)
        result = apply(graph, *others, **options)
        seconds = time.perf_counter() - started
    name = getattr(apply, "func", apply).__name__
    log.entries.append(PassEntry(name, seconds, before, len(result), tally.rewrites, number))
    return result


@contextmanager
def record_graphs() -> Iterator[list[tuple[str, Graph]]]:
    """Collects (pass, graph) after each pass run inside, in order; the input graph comes first.

    Reports compile a graph again to do this, so nothing inside is written to `RLX_DUMP`.
    """
    seen: list[tuple[str, Graph]] = []
    token = _recorded.set(seen)
    try:
        yield seen
    finally:
        _recorded.reset(token)


def dump(graph: Graph, name: str) -> None:
    """Pass the graph to `record_graphs`, or else write it to the `RLX_DUMP` folder, if set."""
    seen = _recorded.get()
    if seen is not None:
        seen.append((name, graph))
        return
    folder = os.environ.get("RLX_DUMP")
    if folder:
        plain = shortened(re.sub(r"[^\w.+-]", "_", graph.name), 100)
        path = Path(folder, f"{next(_serial):03}-{plain}.{name}.rlx")
        text = graph.text(origins=True) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the name
            reason = getattr(error, "strerror", None) or error
            raise CapabilityError(
                f"RLX_DUMP: the folder {folder!r} cannot be written: {reason}",
                hint="set RLX_DUMP to a folder that you may write to, or unset it",
            ) from error
