"""The emission surface: what a stage sees while it adds its part to the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.dtypes import F32
from rlx.errors import BindError, GraphError, ShapeError, nearest
from rlx.flow.state import FlowState, FlowValue
from rlx.flow.weights import WeightSource
from rlx.ir.graph import Graph, Value
from rlx.types import ShapeLike, Size

Array = np.ndarray[Any, Any]


@dataclass
class FlowCtx:
    """A graph under assembly, its weights, and what stages share."""

    module: Graph
    weights: WeightSource
    params: dict[str, Array] = field(default_factory=dict)  # made by stages, not from the weight source
    state: FlowState = field(default_factory=FlowState)

    def hir(self) -> Graph:
        """The graph that stages build in."""
        return self.module

    def load_param(self, key: str, *, transpose: bool = False, shape: Sequence[Size] | None = None) -> Value:
        """A weight by its key as f32: one param node a tensor, widened or unpacked where the file stores it otherwise.

        `transpose` turns `[out, in]` into `[in, out]`, as a view.

        `shape`, if given, is what the value must have (after transposing).
        """
        value = self.state.loaded_params.get(key)
        if value is None:
            if not self.weights.has(key):
                raise BindError(f"weight {key!r} is not in the file", hint=nearest(key, self.weights.keys()))
            type_ = self.weights.type(key)
            value = self.module.param(key, type_.shape, type_.dtype)
            if type_.dtype.is_packed:
                value = value.dequantise()
            elif type_.dtype is not F32:
                value = value.astype(F32)
            self.state.loaded_params[key] = value
        if transpose:
            value = value.mT
        if shape is not None and value.shape != tuple(shape):
            wanted = "[" + ", ".join(map(str, shape)) + "]"
            raise ShapeError(f"weight {key!r}: shape is {list(value.shape)}, wanted {wanted}")
        return value

    def synth_param(self, name: str, data: Array) -> Value:
        """A weight that the model computes itself, such as a RoPE table."""
        found = self.state.loaded_params.get(name)
        if found is None:
            array = np.ascontiguousarray(data)
            found = self.module.param(name, array.shape, array.dtype)
            self.params[name] = array
            self.state.loaded_params[name] = found
        return found

    def input(self, name: str, shape: ShapeLike, dtype: Any = "f32") -> Value:
        """A graph input by name; asking again gives the same one."""
        if name not in self.state.inputs:
            self.state.inputs[name] = self.module.input(name, shape, dtype)
        return self.state.inputs[name]

    def wrap(self, value: Value) -> FlowValue:
        return FlowValue.of(value)

    def need(self, value: FlowValue | None, stage: str) -> Value:
        """The flowing value; an error that names the stage where there is none."""
        if value is None:
            raise GraphError(
                f"stage {stage}: needs a value, and none flows here", hint="put an Embed or an input before it"
            )
        return value.id
