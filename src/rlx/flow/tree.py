"""Flows as text: a short tree of stages, with their paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass

from rlx.errors import shortened
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.structure import Named, Repeat, Sequence

WIDTH = 72  # characters of a stage's description


def stage_lines(stages: Iterable[FlowStage], indent: str = "  ") -> Iterator[str]:
    """Yield one line per stage: its path within its parent and its settings, then its parts; repeats are shown once."""
    for stage in stages:
        match stage:
            case Repeat():
                yield from _named(indent, _range(stage), stage.at(0)) if stage.count else ()
            case Sequence():
                yield from stage_lines(stage.stages, indent)
            case Named():
                yield from _named(indent, stage.name, stage.inner)
            case _:
                yield from _named(indent, stage.path, stage)


def _named(indent: str, name: str, stage: FlowStage) -> Iterator[str]:
    if isinstance(stage, Sequence):
        yield f"{indent}{name}"
        yield from stage_lines(stage.stages, indent + "  ")
    else:
        yield f"{indent}{name + ': ' if name else ''}{_description(stage)}"


def _range(stage: Repeat) -> str:
    first, last = (f"{stage.name}.{i}" for i in (0, stage.count - 1))
    return first if stage.count == 1 else f"{first} to {last}"


def _description(stage: FlowStage) -> str:
    """The class of a stage and its settings, without defaults and arrays."""
    name = type(stage).__name__
    if not is_dataclass(stage):
        return name
    settings = []
    for item in fields(stage):
        value = getattr(stage, item.name)
        default = item.default if item.default is not MISSING else None
        if isinstance(value, (str, int, float, tuple)) and value != default and item.name != "name":
            settings.append(f"{item.name}={value!r}")
    return shortened(f"{name}({', '.join(settings)})" if settings else name, WIDTH)
