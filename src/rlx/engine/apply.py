"""Models with other parameters: one compiled graph per combination of dtypes, whatever the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, F64, dtype
from rlx.engine.sampler import short_repr
from rlx.errors import BindError, DTypeError, ShapeError, nearest
from rlx.flow.weights import MapWeights, WeightSource
from rlx.fork_safe_locks import Lock
from rlx.models.family import STORED
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.engine.model import Model


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
            raise BindError(f"{where}: no parameter is called {name!r}", hint=nearest(str(name), names))
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
        built = model._patched(model._hidden_flow()).build_with(
            model.checkpoint.weights, {name: arrays[name] for name in kinds}
        )
        return Applied(model._session.compile(built.module, profile=built.profile), built.params.computed)

    applied = model._applications.get_or_make(frozenset(kinds.items()), make)
    return applied.run(arrays, model._own_array, values)


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
