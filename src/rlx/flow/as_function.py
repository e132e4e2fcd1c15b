"""Flows as functions of arrays, for `rlx.grad`, `rlx.jvp`, `rlx.vmap` and `rlx.jit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dtypes import dtype
from rlx.errors import BindError, GraphError, ShapeError, nearest
from rlx.flow.generation import for_sequences
from rlx.flow.stages.parts import DROPOUT_KEY
from rlx.hir.lower import lower
from rlx.ir import registry
from rlx.ir.graph import Graph
from rlx.mir.bind_dims import bind_dims
from rlx.types import Size, TensorType, known_equal, symbol_name

if TYPE_CHECKING:
    from rlx.flow.flow import ModelFlow


class TypedWeights:
    """A weight source that knows only types: the arrays are arguments of the function."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = types

    def has(self, key: str) -> bool:
        return key in self._types

    def type(self, key: str) -> TensorType:
        return self._types[key]

    def array(self, key: str) -> Any:
        raise BindError(f"as_function: weight {key!r} is an argument, it has no numbers here")

    def keys(self) -> Any:
        return self._types.keys()


def flow_function(
    flow: ModelFlow, params: Mapping[str, Any], *, training: bool = False, strict: bool | None = None
) -> Callable[..., Any]:
    """Return the flow as a function of its inputs; see `ModelFlow.as_function`."""
    from rlx.functional.tracers import type_of  # lazy: imports all transforms
    from rlx.functional.tracing import apply_graph, eager

    if not isinstance(params, Mapping):
        hint = "flow.init(rlx.random.key(0)) makes random ones"
        raise BindError(f"as_function: params are a {type(params).__name__}, expected arrays by name", hint=hint)
    weights_by_name = {name: dequantised(value) for name, value in params.items()}
    sequences = for_sequences(flow)
    graphs: dict[Any, tuple[Graph, Mapping[str, Any], list[str]]] = {}

    def build(types: Mapping[str, TensorType], shapes: Mapping[str, TensorType]) -> Any:
        """Return the graph for these weights and sizes, its own tables, and the names of its outputs."""
        key = tuple(types.items()), tuple(shapes.items())
        if key not in graphs:
            built = sequences.build(TypedWeights(types), strict=strict, training=training)
            graph = lower(built.module)
            declared = {n.attrs["name"]: n.types[0] for n in graph.inputs}
            bound = bind_dims(graph, sizes_of(declared, shapes), strict=False)
            graphs[key] = bound, built.params.computed, built.output_names
        return graphs[key]

    def compute(weights: dict[str, Any], arrays: dict[str, Any]) -> Any:
        types = {name: type_of(x) for name, x in weights.items()}
        graph, computed, names = build(types, {name: type_of(x) for name, x in arrays.items()})
        values = {**weights, **computed, **arrays}
        leaves = [str(node.attrs["name"]) for node in graph.nodes if node.op in ("input", "param")]
        missing = [name for name in leaves if name not in values]
        if missing:
            hint = f"takes {', '.join(all_inputs())}, in order or by name"
            if missing[0] == DROPOUT_KEY:
                hint = f'pass a random key by name: f(..., **{{"{DROPOUT_KEY}": rlx.random.key(0)}})'
            raise BindError(f"flow {flow.name!r}: input {missing[0]!r} is missing", hint=hint)
        outputs = apply_graph(graph, [values[name] for name in leaves])
        return outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))

    inputs = [name for name, _, _ in sequences.inputs]
    run = eager(compute)

    def all_inputs() -> list[str]:
        """The inputs of the flow, then those that its stages declare."""
        types = {name: type_of(x) for name, x in weights_by_name.items()}
        graph = sequences.build(TypedWeights(types), strict=False, training=training).module
        return list(dict.fromkeys([*inputs, *(str(node.attrs["name"]) for node in graph.inputs)]))

    def function(*args: Any, **named: Any) -> Any:
        names = inputs if len(args) <= len(inputs) else all_inputs()
        if len(args) > len(names):
            raise BindError(f"flow {flow.name!r}: takes {', '.join(names)}, found {len(args)} inputs")
        arrays = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name in arrays:
                raise BindError(f"flow {flow.name!r}: input {name!r} is given twice")
            arrays[name] = value
        return run(weights_by_name, arrays)

    function.__name__ = flow.name if flow.name.isidentifier() else "flow"
    function.__qualname__ = f"{function.__name__}({', '.join(inputs)})"  # what repr shows
    function.__doc__ = f"The flow {flow.name!r} as a function of {', '.join(inputs)}."
    return function


def dequantised(value: Any) -> Any:
    """Return a weight as numbers: functions have no arrays of quantised blocks."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "V" or not dtype(value.dtype).is_packed:
        return value
    reference = registry.get("dequantise").reference
    assert reference is not None
    return reference(value)


def sizes_of(declared: Mapping[str, TensorType], actual: Mapping[str, TensorType]) -> dict[str, int]:
    """Return the symbols of declared inputs by the sizes of actual ones; raises where they do not fit."""
    sizes: dict[str, int] = {}
    for name, type_ in actual.items():
        if name not in declared:
            raise BindError(f"input: nothing is called {name!r}", hint=nearest(name, declared))
        wanted = declared[name]
        if type_.rank != wanted.rank or type_.dtype.is_float != wanted.dtype.is_float:
            raise ShapeError(f"input {name!r}: is {type_}, expected {wanted}")
        for size, symbol in zip(type_.shape, wanted.shape, strict=True):
            _bind(sizes, name, size, symbol)
    return sizes


def _bind(sizes: dict[str, int], name: str, size: Size, symbol: Size) -> None:
    if isinstance(symbol, int):
        if known_equal(size, symbol) is False:
            raise ShapeError(f"input {name!r}: an axis of {size}, expected {symbol}")
        return
    if size == symbol:
        return
    if not isinstance(size, int):
        raise GraphError(f"input {name!r}: size {size} is symbolic, the flow calls it {symbol}", hint="use one name")
    key = symbol_name(symbol, "input")
    if sizes.setdefault(key, size) != size:
        raise ShapeError(f"input {name!r}: {key} is {size}, but {sizes[key]} in another input")
