"""Flows as text: a short tree of stages, with their paths."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import MISSING, fields, is_dataclass

from rlx.errors import shortened
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.structure import Named, Repeat, Sequence

WIDTH = 72  # characters of a stage's description
Line = tuple[int, str, str]  # depth, path within the parent, description


def stage_lines(stages: Iterable[FlowStage], indent: str = "  ") -> Iterator[str]:
    """Yield one line per stage: its path within its parent and its settings, then its parts.

    Repeats that differ in their index only are shown once.
    """
    return (f"{indent * depth}{name}{shortened(text, WIDTH)}" for depth, name, text in _lines(stages, 1))


def _lines(stages: Iterable[FlowStage], depth: int) -> Iterator[Line]:
    for stage in stages:
        match stage:
            case Repeat():
                yield from _repeats(stage, depth)
            case Sequence():
                yield from _lines(stage.stages, depth)
            case Named():
                yield from _named(depth, stage.name, stage.inner)
            case _:
                yield from _named(depth, stage.path, stage)


def _named(depth: int, name: str, stage: FlowStage) -> Iterator[Line]:
    if isinstance(stage, Sequence):
        yield depth, name, "" if list(stage.stages) else ": removed"
        yield from _lines(stage.stages, depth + 1)
    else:
        yield depth, f"{name}: " if name else "", _description(stage)


def _repeats(stage: Repeat, depth: int) -> Iterator[Line]:
    first = 0
    layers = [list(_named(depth, "", stage.at(i))) for i in range(stage.count)]
    for last in range(stage.count):
        if last + 1 < stage.count and _same_layer(layers[first], first, layers[last + 1], last + 1):
            continue
        path = f"{stage.name}.{first}" + (f" to {stage.name}.{last}" if last > first else "")
        (_, _, text), *parts = layers[first]
        yield depth, path, f": {text}" if text and not text.startswith(":") else text
        yield from parts
        first = last + 1


def _same_layer(lines: ListOf[Line], i: int, others: ListOf[Line], j: int) -> bool:
    """Whether two layers differ only where one has its index i and the other j."""
    if [line[:2] for line in lines] != [line[:2] for line in others]:
        return False
    words, other_words = (re.split(r"(\d+)", "\n".join(line[2] for line in each)) for each in (lines, others))
    pairs = itertools.zip_longest(words, other_words)
    return all(a == b or (a, b) == (str(i), str(j)) for a, b in pairs)


def _description(stage: FlowStage) -> str:
    """The class of a stage and its settings, without defaults and arrays."""
    name = type(stage).__name__
    if not is_dataclass(stage):
        return name
    settings = []
    for item in fields(stage):
        value = getattr(stage, item.name)
        default = item.default if item.default is not MISSING else None
        if isinstance(value, (str, int, float, tuple, type(None))) and value != default and item.name != "name":
            settings.append(f"{item.name}={value!r}")
    return f"{name}({', '.join(settings)})" if settings else name
