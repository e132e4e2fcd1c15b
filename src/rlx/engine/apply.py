"""Models with other parameters: one compiled graph per combination of dtypes, whatever the values.

Inside a traced function, as under `rlx.grad`, the model becomes part of the function's graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, F64, dtype
from rlx.engine.capture import checked_patterns, is_captured
from rlx.engine.edits import Edit, checked_edits, edited_values
from rlx.engine.sampler import short_repr
from rlx.errors import BindError, DTypeError, ShapeError, nearest
from rlx.flow.stage_values import matched_stages
from rlx.flow.weights import MapWeights, WeightSource
from rlx.fork_safe_locks import Lock
from rlx.ir.graph import Value
from rlx.models.family import STORED
from rlx.runtime.compiled import CompiledGraph
from rlx.types import concrete, sym

if TYPE_CHECKING:
    from rlx.engine.model import Model
    from rlx.flow.built import BuiltModel
    from rlx.functional.tracers import Trace


def checked_params(
    params: Mapping[str, Any], weights: WeightSource, names: Mapping[str, Any], where: str = "apply"
) -> tuple[dict[str, Array], dict[str, str]]:
    """Checked arrays by name, and the dtypes of those that differ from the model's own."""
    if not isinstance(params, Mapping):
        raise BindError(
            f"{where}: params are {short_repr(params)}, expected arrays by name", hint="model.params has them"
        )
    arrays: dict[str, Array] = {}
    kinds: dict[str, str] = {}
    for name, value in params.items():
        if name not in names:
            raise _unknown_param(where, name, names)
        array = np.asarray(value)
        actual, own = dtype(array.dtype), weights.type(name)
        if actual is F64:
            array, actual = array.astype(np.float32), F32
        if actual not in STORED:
            raise DTypeError(f"{where}: parameter {name!r} is {actual}, expected numbers such as {own.dtype} or f32")
        shape = MapWeights({name: array}).type(name).shape
        if shape != own.shape:
            raise ShapeError(f"{where}: parameter {name!r} has shape {list(shape)}, expected {list(own.shape)}")
        arrays[name] = array
        if actual is not own.dtype:
            kinds[name] = actual.name
    return arrays, kinds


def apply_params(model: Model, params: Mapping[str, Any], values: Callable[[CompiledGraph], list[Array]]) -> Array:
    """Run a model with other parameters and return its main output; `values` runs the graph."""
    arrays, kinds = checked_params(params, model.checkpoint.weights, model.params)

    def make() -> Applied:
        built = model.patched_flow(model.hidden_flow()).build_with(
            model.checkpoint.weights, {name: arrays[name] for name in kinds}
        )
        return Applied(model.compile_without_weights(built), built.params.computed)

    applied = model.graphs.applications.get_or_make(frozenset(kinds.items()), make)
    return applied.run(arrays, model.own_array, values)


class Applied:
    """A graph whose weights change from call to call."""

    def __init__(self, compiled: CompiledGraph, computed: Mapping[str, Array]) -> None:
        self.compiled = compiled
        self._computed = computed  # tables that stages compute
        self._lock = Lock()

    def run(
        self, arrays: Mapping[str, Array], own: Callable[[str], Array], values: Callable[[CompiledGraph], list[Array]]
    ) -> Array:
        """The main output with these weights, and the model's own for the others."""
        with self._lock:
            for name in self.compiled.param_types:
                array = (
                    arrays[name] if name in arrays else self._computed[name] if name in self._computed else own(name)
                )
                # a writable array may have changed since the last call
                if array.flags.writeable or self.compiled.known_params().get(name) is not array:
                    self.compiled.set_param(name, array)
            return values(self.compiled)[0]


# -- inside a traced function ----------------------------------------------------------------------------------------
def traced_outputs(
    model: Model, params: Mapping[str, Any], inputs: Mapping[str, Any], edit: Mapping[str, Edit] | None = None,
    capture: Iterable[str] | str | None = None,
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """The outputs of a model in the current trace, for a batch of one, and captured values of stages, `[seq, ...]`.

    Params and inputs may be traced arrays. Outside of a trace, the graph is compiled and run at once.
    """
    from rlx.functional import tree
    from rlx.functional.tracers import current
    from rlx.functional.tracing import apply_graph, trace_leaves

    edits, patterns = checked_edits(edit), checked_patterns(capture, "apply")
    kinds = _traced_kinds(model, params)
    built = model.graphs.traceable.get_or_make(frozenset(kinds.items()), lambda: _traceable(model, kinds))
    captured = _captured(built, patterns)

    def outputs() -> list[Any]:
        trace = current()
        assert trace is not None
        return _inlined(trace, model, built, params, inputs, edits, list(captured.values()))

    if current() is not None:
        results = outputs()
    else:
        function = trace_leaves(outputs, tree.structure(((), {})), [])
        results = apply_graph(function.graph, function.captured)
    count = len(built.module.outputs)
    return results[:count], dict(zip(captured, results[count:], strict=True))


def _captured(built: BuiltModel, patterns: Sequence[str]) -> dict[str, Value]:
    """The values of the stages and outputs that match the patterns."""
    main = dict(zip(built.output_names, built.module.outputs, strict=True))
    stages = matched_stages(built.module, patterns, main)
    return stages | {name: value for name, value in main.items() if is_captured(name, patterns)}


def _inlined(
    trace: Trace, model: Model, built: BuiltModel, params: Mapping[str, Any], inputs: Mapping[str, Any],
    edits: Mapping[str, Edit], captured: Sequence[Value],
) -> list[Any]:  # fmt: skip
    """Copy a model's graph into a trace; returns its outputs, then the captured values."""
    from rlx.engine.graph_edits import inline_edited
    from rlx.functional.tracers import type_of
    from rlx.mir.bind_dims import bind_dims

    sizes: dict[str, int] = {}
    for node in built.module.inputs:
        for wanted, size in zip(node.types[0].shape, type_of(inputs[node.attrs["name"]]).shape, strict=True):
            assert isinstance(size, int)
            if not isinstance(wanted, int):
                sizes[str(wanted)] = size
    # nodes correspond: binding sizes keeps their order
    graph = bind_dims(built.module, sizes)
    matched = edited_values(built, list(edits))
    by_value = {
        graph.nodes[value.node.id][value.index]: (path, [edits[pattern] for pattern in patterns])
        for value, (path, patterns) in matched.items()
    }
    operands = []
    for node in graph.nodes:
        if node.op in ("input", "param"):
            name = node.attrs["name"]
            operands.append(inputs[name] if node.op == "input" else params.get(name, model.held_weight(built, name)))
    more = [graph.nodes[value.node.id][value.index] for value in captured]
    results = inline_edited(trace, graph, operands, by_value, more)
    count = len(graph.outputs)
    rows = zip(captured, results[count:], strict=True)
    return [*results[:count], *(result[0] if value.shape[0] == sym.BATCH else result for value, result in rows)]


def _traceable(model: Model, kinds: Mapping[str, str]) -> BuiltModel:
    """The model's graph at MIR, without a cache, for parameters of these dtypes."""
    flow, weights = model.patched_flow(model.hidden_flow()), model.checkpoint.weights
    # only types are read, so the arrays take no memory
    shapes = {name: concrete(weights.type(name).shape, {}) for name in kinds}
    floats = {name: np.broadcast_to(np.zeros((), dtype(kind).numpy), shapes[name]) for name, kind in kinds.items()}
    return replace(flow, cache=None, layout=None).build_with(weights, floats).lower()


def _traced_kinds(model: Model, params: Mapping[str, Any]) -> dict[str, str]:
    """Check parameters, traced or not; returns the dtypes of those that differ from the model's own."""
    from rlx.functional.tracers import type_of

    own_params, weights = model.params, model.checkpoint.weights
    kinds: dict[str, str] = {}
    for name, value in params.items():
        if name not in own_params:
            raise _unknown_param("apply", name, own_params)
        type_, own = type_of(value), weights.type(name)
        if type_.shape != own.shape:
            raise ShapeError(f"apply: parameter {name!r} has shape {list(type_.shape)}, expected {list(own.shape)}")
        if type_.dtype not in STORED:
            raise DTypeError(f"apply: parameter {name!r} is {type_.dtype}, expected f32")
        if type_.dtype is not own.dtype:
            kinds[name] = type_.dtype.name
    return kinds


def _unknown_param(where: str, name: str, names: Mapping[str, Any]) -> BindError:
    return BindError(f"{where}: no parameter is called {name!r}", hint=nearest(str(name), names) or _name_hint(names))


def _name_hint(names: Mapping[str, Any]) -> str:
    first = next((name for name in names if "layers.0" in name or "blk.0" in name), next(iter(names)))
    return f"parameters have the names of the file, such as {first!r}; model.params lists them"


def float_params(model: Model, patterns: Sequence[str]) -> dict[str, Array]:
    """The weights whose names match patterns, as f32 arrays."""
    from rlx.flow.patterns import matches

    names = [name for name in model.params if any(matches(name, pattern) for pattern in patterns)]
    if not names:
        deep = [re.sub(r"\*+", "**", pattern) for pattern in patterns]
        deep = [pattern for pattern in deep if any(matches(name, pattern) for name in model.params)]
        if deep:
            raise BindError(f"float_params: no parameter matches {patterns}", hint=f"`*` stops at a dot: {deep[0]!r}")
        close = nearest(patterns[0], model.params)
        hint = _name_hint(model.params)
        raise BindError(f"float_params: no parameter matches {patterns}", hint=f"{hint}; {close}" if close else hint)
    return {name: _as_floats(model.checkpoint.weights, name) for name in names}


def _as_floats(weights: WeightSource, name: str) -> Array:
    """A copy of a weight as f32."""
    from rlx.formats import dequantise

    type_, array = weights.type(name), weights.array(name)
    shape = concrete(type_.shape, {})
    return np.array(dequantise(array, type_.dtype, math.prod(shape)).reshape(shape))
