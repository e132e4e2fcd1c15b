"""Changing values inside a model: it runs up to each edited stage, a function changes the value, it runs on from there.

The graph is cut at the edited values, so nothing is computed twice but what both sides of a cut need, and a function
that changes nothing leaves every bit as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.sampler import shown
from rlx.errors import RequestError, ShapeError, nearest
from rlx.flow.flow import BuiltModel, matching, stage_values
from rlx.ir.graph import Value
from rlx.runtime.compiled import CompiledGraph

Edit = Callable[[Array], Array]
Values = Callable[[CompiledGraph, Mapping[str, Array]], list[Array]]  # runs a graph, with more inputs


def checked_edits(edit: Any) -> dict[str, Edit]:
    """Functions by pattern."""
    if edit is None:
        return {}
    if not isinstance(edit, Mapping) or not all(isinstance(p, str) and callable(f) for p, f in edit.items()):
        raise RequestError(f"run: edit is {shown(edit)}, expected functions by patterns of stage paths")
    return dict(edit)


@dataclass(frozen=True)
class Step:
    """The part of a model that gives the value of an edited stage, and whose functions change it, in this order."""

    path: str
    patterns: tuple[str, ...]
    compiled: CompiledGraph

    @property
    def input(self) -> str:
        """What the input of later parts is called that stands for the value."""
        return f"edit.{self.path}"


@dataclass(frozen=True)
class Edited:
    """A model cut at its edited stages. `same` are outputs that are themselves edited, by the input that has them."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    last: CompiledGraph | None  # gives the other outputs, where there are any
    same: Mapping[str, str]

    @property
    def graphs(self) -> list[CompiledGraph]:
        return [*(step.compiled for step in self.steps), *([self.last] if self.last else [])]

    def run(self, edits: Mapping[str, Edit], values: Values) -> dict[str, Array]:
        """The outputs by name."""
        given: dict[str, Array] = {}
        for step in self.steps:
            (value,) = values(step.compiled, _needed(given, step.compiled))
            for pattern in step.patterns:
                value = _replacement(step.path, value, edits[pattern](value.copy()))
            given[step.input] = value
        found = {name: given[input] for name, input in self.same.items()}
        if self.last is not None:
            found |= zip(self.names, values(self.last, _needed(given, self.last)), strict=True)
        return found


def _needed(given: Mapping[str, Array], compiled: CompiledGraph) -> dict[str, Array]:
    return {name: array for name, array in given.items() if name in compiled.input_types}


def cut(built: BuiltModel, patterns: Sequence[str], compile: Callable[[BuiltModel], CompiledGraph]) -> Edited:
    """The parts of a model, cut at the stages that match some patterns."""
    values = stage_values(built.module)
    main = dict(zip(built.output_names, built.module.outputs, strict=True))
    edited: dict[Value, tuple[str, list[str]]] = {}  # path and patterns
    for pattern in patterns:
        found = matching(values, pattern) or matching(main, pattern)
        if not found:
            hint = nearest(pattern, [*values, *main])
            raise RequestError(f"edit: no stage of {built.module.name!r} matches {pattern!r}", hint=hint)
        for value, path in {value: path for path, value in found.items()}.items():
            edited.setdefault(value, (path, []))[1].append(pattern)
    given: dict[str, Value] = {}
    steps = []
    for value in sorted(edited, key=lambda value: (value.node.id, value.index)):
        path, named = edited[value]
        step = Step(path, tuple(named), compile(built.cut(given, {path: value})))
        given[step.input] = value
        steps.append(step)
    inputs = {value: name for name, value in given.items()}
    rest = {name: value for name, value in main.items() if value not in edited}
    last = compile(built.cut(given, rest)) if rest else None
    same = {name: inputs[value] for name, value in main.items() if value in inputs}
    return Edited(tuple(steps), tuple(rest), last, same)


def _replacement(path: str, value: Array, made: Any) -> Array:
    """What a function made of a value, which must be of the same kind."""
    if not hasattr(made, "__array__"):
        what = f"edit {path!r}: its function gave {shown(made)}, expected an array"
        raise RequestError(what, hint="return the array, changed or not")
    array = np.asarray(made)
    if array.shape != value.shape or array.dtype != value.dtype:
        kinds = [f"{a.dtype}{list(a.shape)}" for a in (array, value)]
        raise ShapeError(f"edit {path!r}: its function gave {kinds[0]}, expected {kinds[1]}, as the stage has it")
    return np.ascontiguousarray(array)
