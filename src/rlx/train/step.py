"""A training step: the graph of a loss becomes one graph of loss, gradients and updates, compiled as any other.

Trained parameters and moments are states of that graph: memory that its kernels change in place. A run gives the loss
and leaves the parameters as they are after the step; nothing is allocated but the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import BindError, FormatError, GraphError, RequestError, ShapeError, nearest
from rlx.flow.flow import BuiltModel
from rlx.fork_safe_locks import Lock, Waits
from rlx.free_memory import writable
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.inputs import as_array, check_fixed, check_names, not_set
from rlx.runtime.session import Session
from rlx.train.optimisers import Optimiser
from rlx.transforms import value_and_grad
from rlx.transforms.api import Policy, Wrt, as_graph, select_wrt
from rlx.types import TensorType, concrete

if TYPE_CHECKING:
    from rlx.inspect.profiler import Report

TINY = 1e-6  # what is added to the norm of all gradients before dividing by it, as torch does


@dataclass(frozen=True)
class StepGraph:
    """The graph of a step. Outputs: the loss, what came with it, the norm of the gradients if they are clipped."""

    graph: Graph
    updated: tuple[Value, ...]  # the states after a step, in the order of `states`
    params: dict[str, TensorType]  # that are trained
    moments: dict[str, tuple[str, ...]]  # param -> names of its moments' states
    numbers: dict[str, str]  # number of the optimiser -> name of the input

    @property
    def states(self) -> list[str]:
        """Names of all states: each param, then its moments."""
        return [state for param in self.params for state in (param, *self.moments[param])]


def step_graph(
    loss: Any, optimiser: Optimiser, wrt: Wrt = None, *, clip: float | None = None, has_aux: bool = False,
    keep: Policy = "everything",
) -> StepGraph:  # fmt: skip
    """One graph that computes the loss, its gradients and the update; see `step`."""
    if not isinstance(optimiser, Optimiser):
        raise GraphError(f"step: optimiser is a {type(optimiser).__name__}", hint="such as rlx.train.adamw(1e-3)")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf):
        raise RequestError(f"step: clip is {clip!r}, wanted the largest norm of all gradients, or None")
    source = as_graph("step", loss)
    trained = {str(n.attrs["name"]): n.types[0] for n in select_wrt("step", source, wrt)}
    for name, type_ in trained.items():
        if source.named(name).node.op != "param":
            raise GraphError(f"step: {name!r} is an input, only params are trained", hint="declare it with g.param")
        if not all(isinstance(size, int) for size in type_.shape):
            raise ShapeError(f"step: {name!r} is {type_}, a trained param has fixed sizes")
    both = value_and_grad(source, list(trained), has_aux=has_aux, keep=keep)
    made = Graph(f"{source.name}_{optimiser.name}")
    made.limits = dict(both.limits)
    given = []
    for node in both.nodes:
        if node.op in ("input", "param"):
            op = "state" if node.attrs["name"] in trained else node.op
            given.append(made.append(op, (), node.attrs, node.types, node.origin)[0])
        elif node.op == "state":
            raise GraphError(f"step: the loss reads state {node.attrs['name']!r}, which has no gradient")
    # What is read after the first update must not be memory that an update changes.
    results = [made.one("settled", v) for v in inline(made, both, given)]
    outputs, grads = results[: -len(trained)], results[-len(trained) :]
    kept = {p: tuple(f"{optimiser.name}.{m}:{p}" for m in optimiser.moments) for p in trained}
    moments = {
        p: {
            m: made.state(s, trained[p].shape, trained[p].dtype)
            for m, s in zip(optimiser.moments, kept[p], strict=True)
        }
        for p in trained
    }
    inputs = {n: f"{optimiser.name}.{n}" for n in optimiser.numbers(1, optimiser.lr)}
    numbers = {n: made.input(name, ()) for n, name in inputs.items()}
    scale = None
    if clip is not None:
        norm = _norm(made, grads)
        scale = made.one("minimum", clip / (norm + TINY), 1.0)
        outputs = [*outputs, norm]
    updated: list[Value] = []
    for (name, type_), grad in zip(trained.items(), grads, strict=True):
        after = optimiser.update(made.named(name), moments[name], grad, numbers, scale)
        if [v.type for v in after] != [type_] * (1 + len(kept[name])):
            found = ", ".join(str(v.type) for v in after)
            raise GraphError(f"step: {optimiser.name} gives {found} for {name!r}, {type_}, and its moments")
        updated += after
    made.set_outputs([made.one("after", outputs[0], *updated), *outputs[1:]])
    return StepGraph(made, tuple(updated), trained, kept, inputs)


def _norm(graph: Graph, grads: Sequence[Value]) -> Value:
    """The square root of the sum of all squares."""
    total: Value | None = None
    for grad in grads:
        wide = grad.astype(grad.dtype.wide)
        squares = graph.one("sum", wide * wide)
        total = squares if total is None else total + squares
    assert total is not None
    return graph.one("sqrt", total)


def step(
    loss: Any, optimiser: Optimiser, wrt: Wrt = None, *, clip: float | None = None, has_aux: bool = False,
    keep: Policy = "everything", device: str = "cpu", threads: int | None = None,
    profile: CompileProfile | None = None,
) -> TrainStep:  # fmt: skip
    """Compile a training step: one call computes the loss and its gradients, and updates the params in place.

    `loss` is a graph, a module or a built model whose output is one float. A built model brings its weights and its
    profile along; for the others call `set_params` before the first step. `wrt` names the params to train (None: all
    floats except the tables that a flow computes itself); the others stay as they are set. `clip` is the largest norm
    of all gradients together; larger ones are scaled down to it. `has_aux` and `keep` are those of
    `rlx.transforms.value_and_grad`.
    """
    built = loss if isinstance(loss, BuiltModel) else None
    if built is not None:
        loss, profile = built.module, profile or built.profile
    made = step_graph(loss, optimiser, wrt, clip=clip, has_aux=has_aux, keep=keep)
    session = Session(device, threads=threads)
    in_place = not session.device.backend.interprets
    if not in_place:  # it changes nothing in place: what should be in the states comes out beside the loss
        made.graph.set_outputs([*made.graph.outputs, *made.updated])
    compiled = session.compile(made.graph, profile=profile)
    train_step = TrainStep(made, compiled, optimiser, has_norm=clip is not None, in_place=in_place)
    if built is not None:
        train_step.set_params(built.params)
    return train_step


class TrainStep:
    """Parameters, moments and the compiled step that changes them. Give it params, then run it batch by batch."""

    def __init__(
        self, made: StepGraph, compiled: CompiledGraph, optimiser: Optimiser, *, has_norm: bool, in_place: bool
    ) -> None:
        self.compiled = compiled
        self.optimiser = optimiser
        self.lr = optimiser.lr  # of the next step, unless that is given one
        self.steps = 0  # that were made
        self.norm: float | None = None  # of all gradients in the last step, where they are clipped
        self._made = made
        self._has_norm, self._in_place = has_norm, in_place
        self._memory = compiled.allocator
        zeros = self._memory.zeros
        self._states = {s: zeros(concrete(t.shape, {}), t.dtype.numpy) for s, t in self._types().items()}
        self._set: set[str] = set()
        self._lock = Lock(waits=Waits.TRAIN_STEP)  # in a child, half of an update would be lost

    def _types(self) -> dict[str, TensorType]:
        made = self._made
        return {state: type_ for p, type_ in made.params.items() for state in (p, *made.moments[p])}

    # -- parameters ---------------------------------------------------------------------------------------------------
    @property
    def params(self) -> dict[str, Array]:
        """The trained params as they are now, as copies; `compiled.set_params` of another graph takes them."""
        with self._lock:
            return {name: self._copied(name) for name in self._made.params}

    def _copied(self, state: str) -> Array:
        """A copy in host memory."""
        return np.array(self._memory.download(self._states[state]))

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set params, trained ones (which are copied) and others. Moments stay as they are."""
        if not isinstance(values, Mapping):
            raise BindError(f"params: expected a mapping from names to arrays, found {type(values).__name__}")
        known = {**self._made.params, **self.compiled.param_types}
        for name in values:
            if name not in known:
                raise BindError(f"param: nothing is called {name!r}", hint=nearest(str(name), known))
        with self._lock:
            for name, value in values.items():
                if name not in self._made.params:
                    self.compiled.set_param(name, value)
                    continue
                type_ = self._made.params[name]
                array = as_array("param", name, value, type_)
                check_fixed("param", name, array, type_)
                self._memory.copy(array, self._states[name])
                self._set.add(name)

    # -- steps --------------------------------------------------------------------------------------------------------
    def run(self, inputs: Mapping[str, Any] | None = None, *, lr: float | None = None) -> Any:
        """Make one step: the loss before it, as a number; with `has_aux`, and what comes with the loss, as arrays.

        A KernelError, such as for a label out of range, comes after the params were changed: go back to a checkpoint.
        """
        with self._lock:
            given = self._given({} if inputs is None else inputs, self.lr if lr is None else lr)
            outputs = self.compiled.run(given)
            if not self._in_place:
                for name, array in zip(self._made.states, outputs[-len(self._made.states) :], strict=True):
                    self._memory.copy(array, self._states[name])
                outputs = outputs[: -len(self._made.states)]
            self.steps += 1
            if self._has_norm:
                self.norm = float(np.asarray(outputs.pop()))
        loss = float(np.asarray(outputs[0]).reshape(()))
        return (loss, outputs[1:]) if len(outputs) > 1 else loss

    def __call__(self, **inputs: Any) -> Any:
        return self.run(inputs)

    def _given(self, inputs: Mapping[str, Any], lr: float) -> dict[str, Any]:
        missing = [name for name in self._made.params if name not in self._set]
        if missing:
            raise not_set(missing, "call set_params before run")
        if isinstance(lr, bool) or not isinstance(lr, int | float | np.floating) or not 0 <= lr < math.inf:
            raise RequestError(f"step: lr is {lr!r}, wanted a number from 0")
        own = {self._made.numbers[n]: v for n, v in self.optimiser.numbers(self.steps + 1, float(lr)).items()}
        taken = [name for name in inputs if name in own or name in self._states]
        if taken:
            raise BindError(f"input: {taken[0]!r} belongs to the step", hint="set_params sets params")
        check_names("input", inputs, [n for n in self.compiled.input_types if n not in own and n not in self._states])
        return {**inputs, **{n: np.array(v, np.float32) for n, v in own.items()}, **self._states}

    def report(self, inputs: Mapping[str, Any]) -> Report:
        """Where the time of a step goes. It makes several steps; parameters are put back as they were."""
        with self._lock:
            before = {name: self._copied(name) for name in self._states}
            try:
                return self.compiled.report(self._given(inputs, self.lr))
            finally:
                for name, array in before.items():
                    self._memory.copy(array, self._states[name])

    # -- files --------------------------------------------------------------------------------------------------------
    def save(self, path: str | PathLike[str]) -> Path:
        """Write trained params, moments and the number of steps to a safetensors file."""
        from rlx.formats.safetensors import write_safetensors

        file = writable(path)
        part = file.with_name(f".{file.name}.part")  # a checkpoint that was there stays until the new one is complete
        try:
            with self._lock:
                tensors = {n: (t, partial(self._saved, n)) for n, t in self._types().items()}
                write_safetensors(part, tensors, optimiser=self.optimiser.name, steps=str(self.steps))
            return part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _saved(self, state: str) -> Array:
        return self._memory.download(self._states[state])

    def load(self, path: str | PathLike[str]) -> None:
        """Go on from what `save` wrote."""
        from rlx.formats import open_safetensors

        file = open_safetensors(path)
        name, steps = (str(file.metadata.get(k, "")) for k in ("optimiser", "steps"))
        if name != self.optimiser.name or not steps.isdecimal():
            raise FormatError(f"{path}: is no checkpoint of {self.optimiser.name}, its optimiser is {name or 'none'!r}")
        types = self._types()
        for found in sorted(set(types) ^ set(file.names)):
            missing = "is not in the file" if found in types else "is nothing that this step keeps"
            raise FormatError(f"{path}: {found!r} {missing}")
        arrays = {n: as_array("param", n, file.array(n), t) for n, t in types.items()}
        for n, type_ in types.items():
            check_fixed("param", n, arrays[n], type_)
        with self._lock:
            for n, array in arrays.items():
                self._memory.copy(array, self._states[n])
            self._set.update(self._made.params)
            self.steps = int(steps)

    def __repr__(self) -> str:
        count = sum(self._states[name].size for name in self._made.params)
        return f"<{self.optimiser.name} step of {self.compiled.name!r}, {count:,} parameters, {self.steps} steps made>"
