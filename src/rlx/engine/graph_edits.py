"""Edits compiled into a model's graph: the functions of `generate(edit=...)` and `apply(edit=...)` are traced.

While a model generates, the numbers of an edit (strengths, vectors) are inputs of the compiled graph: the same function
with other numbers needs no compilation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.check_token_independence import TOKENS, same_apart
from rlx.engine.edits import TRACED_EDIT, Edit, edited_values
from rlx.engine.sampler import short_repr
from rlx.errors import GraphError, RequestError, RlxError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel
from rlx.functional import tree
from rlx.functional.tracers import Trace, Traced, type_of
from rlx.functional.tracing import trace_leaves
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, inline, rebuild
from rlx.types import TensorType, sym
from rlx.types import evaluate as size_of


@dataclass(frozen=True)
class TracedEdit:
    """The functions of one stage as a graph, whose inputs are the stage's value, then numbers."""

    path: str
    graph: Graph
    numbers: Mapping[str, Array]  # by input

    @property
    def key(self) -> tuple[str, str]:
        """Equal for edits that differ only in their numbers."""
        return self.path, self.graph.fingerprint()


@dataclass(frozen=True)
class GraphEdits:
    """The traced edits of a request, by the value that they replace."""

    by_value: Mapping[Value, TracedEdit]

    @classmethod
    def of(cls, built: BuiltModel, edits: Mapping[str, Edit]) -> GraphEdits:
        """Trace the functions of the stages that match the patterns of `edits`."""
        matched = edited_values(built, list(edits))
        traced = {
            value: trace_edit(path, [edits[pattern] for pattern in patterns], value.type)
            for value, (path, patterns) in matched.items()
        }
        return cls(traced)

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Equal for edits that differ only in their numbers."""
        return tuple(edit.key for edit in self.by_value.values())

    @property
    def numbers(self) -> dict[str, Array]:
        """Inputs of the edited graph."""
        return {name: array for edit in self.by_value.values() for name, array in edit.numbers.items()}

    @property
    def digest(self) -> str:
        """A digest of the numbers. Keys and values in a cache depend on them."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in self.numbers.items():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        return digest.hexdigest()

    def inserted(self, built: BuiltModel) -> BuiltModel:
        """The model with the edits in its graph."""
        rewriter = Rewriter(built.module, "edit")
        for node in built.module.nodes:
            rewriter.keep(node)
            for value in node.results:
                if value in self.by_value:
                    rewriter.values[value] = self._edited(rewriter, node, self.by_value[value], rewriter[value])
        graph = rewriter.finish(built.module.outputs)
        graph.stages = {path: rewriter[value] for path, value in built.module.stages.items()}
        return replace(built, module=graph)

    def _edited(self, rewriter: Rewriter, node: Node, edit: TracedEdit, value: Value) -> Value:
        graph = rewriter.graph
        numbers = [graph.input(name, array.shape, array.dtype) for name, array in edit.numbers.items()]
        (result,) = inline(graph, edit.graph, [_flat(value), *numbers], node.origin)
        return result.reshape(*value.shape)

    def check(self) -> None:
        """Raise if an edit mixes tokens, which are computed in pieces: a prompt in chunks, then one per step."""
        for edit in self.by_value.values():
            _check_tokens_apart(edit)


def trace_edit(path: str, functions: Sequence[Edit], type_: TensorType) -> TracedEdit:
    """Trace functions of the value of a stage, `[tokens, ...]`, and turn their numbers into inputs."""
    shape = _flat_shape(type_)

    def edit(value: Any) -> Any:
        for function in functions:
            value = checked_result(path, function, value)
        return value

    traced = trace_leaves(edit, tree.structure(((0,), {})), [type_.with_shape(*shape)], ["value"])
    if traced.captured:
        message = f"edit {path!r}: its function reads {traced.captured[0]!r}, a traced array"
        raise RequestError(message, hint=TRACED_EDIT)
    numbers: dict[str, Array] = {}

    def lift(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != "const" or not node.types[0].dtype.is_float:
            return None
        name = f"edit.{path}.{len(numbers)}"
        numbers[name] = np.array(node.attrs["value"].data, order="C")
        return rewriter.graph.input(name, node.types[0].shape, node.types[0].dtype)

    return TracedEdit(path, rebuild(traced.graph, lift, made_by="edit"), numbers)


def checked_result(path: str, function: Edit, value: Any) -> Any:
    """The result of an edit function on a traced value: an array of the same type."""
    try:
        result = function(value)
    except RlxError as error:
        place = f"in the edit of stage {path!r}, whose function is traced: it gets {type_of(value)}"
        if isinstance(error, ShapeError) and "assume_equal" in (error.hint or ""):  # a number of tokens is never fixed
            notes = [note.strip() for note in error.notes if not note.strip().startswith("hint: ")]
            vector = (
                "tokens come in pieces of any size: use one vector for all, such as captured[-1] or captured.mean(0)"
            )
            raise ShapeError(str(error), hint=vector, notes=[*notes, place]) from error
        error.add_note(f"  {place}")
        raise
    try:
        actual = type_of(result)
    except (GraphError, RlxError) as error:
        message = f"edit {path!r}: its function gave {short_repr(result)}, expected an array"
        raise RequestError(message, hint="return the value, changed or not") from error
    wanted = type_of(value)
    if actual != wanted:
        hint = "cast what it adds: vector.astype(np.float32)" if actual.dtype is not wanted.dtype else None
        hint = hint or "its value is [tokens, ...]: one row per token of the prompt, then one row per step"
        raise ShapeError(
            f"edit {path!r}: its function gave {actual}, expected {wanted}, as the stage has it", hint=hint
        )
    return result


def inline_edited(
    trace: Trace, graph: Graph, operands: Sequence[Any], edits: Mapping[Value, tuple[str, Sequence[Edit]]],
    captured: Sequence[Value] = (),
) -> list[Traced]:  # fmt: skip
    """Copy a graph of one sequence into a trace, applying edits to the values of stages.

    Returns its outputs, then the captured values.
    """
    arguments = iter(operands)
    inside: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.op in ("input", "param"):
            inside[node[0]] = trace.constant(next(arguments))
        else:
            read = tuple(None if o is None else inside[o] for o in node.operands)
            copied = trace.graph.append(node.op, read, node.attrs, node.types, node.origin)
            inside.update(zip(node.results, copied.results, strict=True))
        for value in node.results:
            path, functions = edits.get(value, ("", ()))
            result = Traced(trace, _flat(inside[value]) if functions else inside[value])
            for function in functions:
                result = checked_result(path, function, result)
            inside[value] = trace.constant(result).reshape(*value.shape) if functions else inside[value]
    return [Traced(trace, inside[value]) for value in (*graph.outputs, *captured)]


def _flat_shape(type_: TensorType) -> tuple[Any, ...]:
    """Batch and sequence as one axis of tokens. Values of two axes, as after the last-token gather, have it already."""
    shape = type_.shape
    return (shape[0] * shape[1], *shape[2:]) if len(shape) > 2 and shape[0] in (sym.BATCH, 1) else shape


def _flat(value: Value) -> Value:
    shape = _flat_shape(value.type)
    return value if shape == value.shape else value.reshape(*shape)


def _check_tokens_apart(edit: TracedEdit) -> None:
    (first, *_), rng = edit.graph.inputs, np.random.default_rng(0)
    type_ = first.types[0]
    if not type_.dtype.is_float:
        return

    def run(count: int, values: Array) -> Array:
        sizes = {symbol: 1 for symbol in edit.graph.symbols()} | {"seq": count, "picked": count}
        (result,) = evaluate.run(edit.graph, {first.attrs["name"]: values, **edit.numbers}, sizes)
        return np.asarray(result)

    rest = [size_of(size, {}) for size in type_.shape[1:]]
    values = rng.standard_normal((TOKENS, *rest)).astype(type_.dtype.numpy)
    together = run(TOKENS, values)
    if not same_apart(together, [run(1, values[i : i + 1]) for i in range(TOKENS)]):
        raise RequestError(
            f"edit {edit.path!r}: its function mixes tokens, and a model generates one token at a time",
            hint="model.run(tokens, edit=...) has all tokens of a text at once",
        )
