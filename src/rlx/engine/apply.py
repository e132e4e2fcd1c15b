"""A model with other parameters: one compiled graph for each choice of types, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32, F64, dtype
from rlx.engine.sampler import shown
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
    """Arrays by name, and the types of those that the model stores as another one."""
    if not isinstance(params, Mapping):
        raise BindError(f"{where}: params are {shown(params)}, expected arrays by name", hint="model.params has them")
    given: dict[str, Array] = {}
    kinds: dict[str, str] = {}
    for name, value in params.items():
        if name not in names:
            raise BindError(f"{where}: no parameter is called {name!r}", hint=nearest(str(name), names))
        array = np.asarray(value)
        found, own = dtype(array.dtype), weights.type(name)
        if found is F64:
            array, found = array.astype(np.float32), F32
        if found not in STORED:
            raise DTypeError(f"{where}: parameter {name!r} is {found}, expected numbers such as {own.dtype} or f32")
        shape = MapWeights({name: array}).type(name).shape
        if shape != own.shape:
            raise ShapeError(f"{where}: parameter {name!r} has shape {list(shape)}, expected {list(own.shape)}")
        given[name] = array
        if found is not own.dtype:
            kinds[name] = found.name
    return given, kinds


def apply_params(model: Model, params: Mapping[str, Any], values: Callable[[CompiledGraph], list[Array]]) -> Array:
    """The main output of a model with other parameters; `values` runs the graph."""
    given, kinds = checked_params(params, model.checkpoint.weights, model.params)

    def make() -> Applied:
        built = model._patched(model._hidden_flow()).build_with(
            model.checkpoint.weights, {name: given[name] for name in kinds}
        )
        return Applied(model._session.compile(built.module, profile=built.profile), built.params.computed)

    found = model._applications.get_or_make(frozenset(kinds.items()), make)
    return found.run(given, model._own_array, values)


class Applied:
    """A graph whose weights change from call to call."""

    def __init__(self, compiled: CompiledGraph, made: Mapping[str, Array]) -> None:
        self.compiled = compiled
        self._made = made  # by stages
        self._lock = Lock()

    def run(
        self, given: Mapping[str, Array], own: Callable[[str], Array], values: Callable[[CompiledGraph], list[Array]]
    ) -> Array:
        """The main output with these weights, and the model's own where none is given."""
        with self._lock:
            for name in self.compiled.param_types:
                array = given[name] if name in given else self._made[name] if name in self._made else own(name)
                # an array that can be written to may have other numbers than at the last call
                if array.flags.writeable or self.compiled.known_params().get(name) is not array:
                    self.compiled.set_param(name, array)
            return values(self.compiled)[0]
