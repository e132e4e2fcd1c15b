"""Editing values inside a model: runs up to each edited stage, applies a function to its value, and continues.

The graph is split at the edited values, so only nodes that both sides of a split need are computed twice, and an
identity function changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.sampler import short_repr
from rlx.errors import RequestError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel
from rlx.flow.stage_values import matching, stage_hint, stage_values
from rlx.ir.graph import Value
from rlx.runtime.compiled import CompiledGraph

Edit = Callable[[Array], Array]
TRACED_EDIT = "under rlx.grad, rlx.jit or rlx.vmap, use model.apply(params, tokens, edit=...)"
Values = Callable[[CompiledGraph, Mapping[str, Array]], list[Array]]  # runs a graph with additional inputs


def checked_edits(edit: Any) -> dict[str, Edit]:
    """Check the `edit` argument: functions by pattern."""
    if edit is None:
        return {}
    if not isinstance(edit, Mapping) or not all(isinstance(p, str) and callable(f) for p, f in edit.items()):
        hint = 'edit={"layers.3": lambda value: value + vector}'
        raise RequestError(f"edit: found {short_repr(edit)}, expected functions by patterns of stage paths", hint=hint)
    return dict(edit)


@dataclass(frozen=True)
class Step:
    """The part of a model that computes an edited stage, and the patterns whose functions apply to it, in order."""

    path: str
    patterns: tuple[str, ...]
    compiled: CompiledGraph

    @property
    def input(self) -> str:
        """The name of the input of later parts that replaces the value."""
        return f"edit.{self.path}"


@dataclass(frozen=True)
class EditedModel:
    """A model split at its edited stages. `same` maps outputs that are edited values to the input that holds them."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    last: CompiledGraph | None  # computes the other outputs, if there are any
    same: Mapping[str, str]

    @property
    def graphs(self) -> list[CompiledGraph]:
        return [*(step.compiled for step in self.steps), *([self.last] if self.last else [])]

    def run(self, edits: Mapping[str, Edit], values: Values) -> dict[str, Array]:
        """Run all parts; returns the outputs by name."""
        edited: dict[str, Array] = {}
        for step in self.steps:
            (value,) = values(step.compiled, _needed(edited, step.compiled))
            for pattern in step.patterns:
                value = _replacement(step.path, value, edits[pattern](value.copy()))
            edited[step.input] = value
        outputs = {name: edited[input] for name, input in self.same.items()}
        if self.last is not None:
            outputs |= zip(self.names, values(self.last, _needed(edited, self.last)), strict=True)
        return outputs


def _needed(edited: Mapping[str, Array], compiled: CompiledGraph) -> dict[str, Array]:
    return {name: array for name, array in edited.items() if name in compiled.input_types}


def edited_values(built: BuiltModel, patterns: Sequence[str]) -> dict[Value, tuple[str, list[str]]]:
    """The values of the stages that match the patterns, in order: the path of each, and its patterns."""
    values = stage_values(built.module)
    main = dict(zip(built.output_names, built.module.outputs, strict=True))
    edited: dict[Value, tuple[str, list[str]]] = {}
    for pattern in patterns:
        matches = matching(values, pattern) or matching(main, pattern)
        if not matches:
            hint = stage_hint(pattern, [*values, *main])
            raise RequestError(f"edit: no stage of {built.module.name!r} matches {pattern!r}", hint=hint)
        for value, path in {value: path for path, value in matches.items()}.items():
            edited.setdefault(value, (path, []))[1].append(pattern)
    return dict(sorted(edited.items(), key=lambda item: (item[0].node.id, item[0].index)))


def split_at_stages(
    built: BuiltModel, patterns: Sequence[str], compile: Callable[[BuiltModel], CompiledGraph]
) -> EditedModel:
    """Split a model at the stages that match the patterns."""
    main = dict(zip(built.output_names, built.module.outputs, strict=True))
    edited = edited_values(built, patterns)
    inputs: dict[str, Value] = {}
    steps = []
    for value, (path, named) in edited.items():
        step = Step(path, tuple(named), compile(built.cut(inputs, {path: value})))
        inputs[step.input] = value
        steps.append(step)
    input_names = {value: name for name, value in inputs.items()}
    rest = {name: value for name, value in main.items() if value not in edited}
    last = compile(built.cut(inputs, rest)) if rest else None
    same = {name: input_names[value] for name, value in main.items() if value in input_names}
    return EditedModel(tuple(steps), tuple(rest), last, same)


def _replacement(path: str, value: Array, result: Any) -> Array:
    """The checked result of an edit function: same shape and dtype as the value."""
    from rlx.functional.tracers import Traced

    if isinstance(result, Traced):
        raise RequestError(f"edit {path!r}: its function gave {result!r}, a traced array", hint=TRACED_EDIT)
    if not hasattr(result, "__array__"):
        message = f"edit {path!r}: its function gave {short_repr(result)}, expected an array"
        raise RequestError(message, hint="return the array, changed or not")
    array = np.asarray(result)
    if array.shape != value.shape or array.dtype != value.dtype:
        kinds = [f"{a.dtype}{list(a.shape)}" for a in (array, value)]
        hint = "cast what it adds: vector.astype(np.float32)" if array.dtype != value.dtype else None
        raise ShapeError(
            f"edit {path!r}: its function gave {kinds[0]}, expected {kinds[1]}, as the stage has it", hint=hint
        )
    return np.ascontiguousarray(array)
