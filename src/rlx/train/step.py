"""Training steps: turns the graph of a loss into one graph of loss, gradients and updates, and compiles it.

Trained parameters and moments are states of that graph, which its kernels update in place. A run returns the loss and
updates the parameters; it allocates nothing but the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import BindError, FormatError, GraphError, RequestError, ShapeError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel
from rlx.flow.patterns import check_names_matched, check_not_shadowed
from rlx.flow.stages.parts import DROPOUT_KEY
from rlx.fork_safe_locks import Lock, Waits
from rlx.free_memory import writable
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.profile import CompileProfile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.inputs import as_array, check_fixed, check_names, not_set
from rlx.runtime.session import Session
from rlx.train.optimisers import Optimiser
from rlx.train.schedules import Schedule
from rlx.transforms import value_and_grad
from rlx.transforms.api import Policy, Wrt, as_graph, select_wrt
from rlx.types import TensorType, concrete

if TYPE_CHECKING:
    from rlx.inspect.profiler import Report

TINY = 1e-6  # added to the norm of all gradients before dividing by it, as in torch


@dataclass(frozen=True)
class StepGraph:
    """The graph of a step. Outputs: the loss, auxiliary outputs, and the gradient norm if gradients are clipped."""

    graph: Graph
    updated: tuple[Value, ...]  # the states after a step, in the order of `states`
    params: dict[str, TensorType]  # trained params
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
        raise RequestError(f"step: clip is {clip!r}, expected the largest norm of all gradients, or None")
    if inspect.isroutine(loss) or hasattr(loss, "__wrapped__"):  # or made by rlx.jit or rlx.grad
        hint = "for functions, docs/coming-from-jax.md has Adam over a tree of parameters, with rlx.value_and_grad"
        raise GraphError(f"step: {type(loss).__name__} is neither a Graph nor a GraphModule", hint=hint)
    source = as_graph("step", loss)
    trained = {str(n.attrs["name"]): n.types[0] for n in select_wrt("step", source, wrt)}
    for name, type_ in trained.items():
        if source.named(name).node.op != "param":
            raise GraphError(f"step: {name!r} is an input, only params are trained", hint="declare it with g.param")
        if not all(isinstance(size, int) for size in type_.shape):
            raise ShapeError(f"step: {name!r} is {type_}, a trained param has fixed sizes")
    check_names_matched(f"{optimiser.name}: weight_decay", optimiser.patterns, trained)
    check_not_shadowed(f"{optimiser.name}: weight_decay", optimiser.patterns, trained)
    if source.outputs and source.outputs[0].rank:
        hint = "end it with a mean or a sum over all numbers"
        raise ShapeError(f"step: the loss is {source.outputs[0].type}, expected one number", hint=hint)
    both = value_and_grad(source, list(trained), has_aux=has_aux, keep=keep)
    graph = Graph(f"{source.name}_{optimiser.name}")
    graph.limits = dict(both.limits)
    leaves = []
    for node in both.nodes:
        if node.op in ("input", "param"):
            op = "state" if node.attrs["name"] in trained else node.op
            leaves.append(graph.append(op, (), node.attrs, node.types, node.origin)[0])
        elif node.op == "state":
            raise GraphError(f"step: the loss reads state {node.attrs['name']!r}, which has no gradient")
    # Values read after the first update must not alias memory that an update changes.
    results = [graph.one("read_before_update", v) for v in inline(graph, both, leaves)]
    outputs, grads = results[: -len(trained)], results[-len(trained) :]
    moment_states = {p: tuple(f"{optimiser.name}.{m}:{p}" for m in optimiser.moments) for p in trained}
    moments = {
        p: {
            m: graph.state(s, trained[p].shape, trained[p].dtype)
            for m, s in zip(optimiser.moments, moment_states[p], strict=True)
        }
        for p in trained
    }
    inputs = {n: f"{optimiser.name}.{n}" for n in optimiser.numbers(1, rate_of(optimiser.lr, 0))}
    numbers = {n: graph.input(name, ()) for n, name in inputs.items()}
    scale = None
    if clip is not None:
        norm = _norm(graph, grads)
        scale = graph.one("minimum", clip / (norm + TINY), 1.0)
        outputs = [*outputs, norm]
    updated: list[Value] = []
    for (name, type_), grad in zip(trained.items(), grads, strict=True):
        after = optimiser.update(graph.named(name), moments[name], grad, numbers, scale)
        if [v.type for v in after] != [type_] * (1 + len(moment_states[name])):
            returned = ", ".join(str(v.type) for v in after)
            raise GraphError(f"step: {optimiser.name} gives {returned} for {name!r}, {type_}, and its moments")
        updated += after
    graph.set_outputs([graph.one("depends_on", outputs[0], *updated), *outputs[1:]])
    return StepGraph(graph, tuple(updated), trained, moment_states, inputs)


def rate_of(lr: float | Schedule, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    rate = lr(step) if callable(lr) else lr
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.floating) or not 0 <= rate < math.inf:
        raise RequestError(f"step: lr is {rate!r}, expected a number from 0, or a function of the steps made")
    return float(rate)


def _norm(graph: Graph, grads: Sequence[Value]) -> Value:
    """The L2 norm of all gradients together."""
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
    profile: CompileProfile | None = None, seed: int = 0,
) -> TrainStep:  # fmt: skip
    """Compile a training step: one call computes the loss and its gradients, and updates the params in place.

    `loss` is a graph, a module or a built model whose output is one float. A built model brings its weights and its
    profile along; for the others call `set_params` before the first step. `wrt` names the params to train (None: all
    floats except the tables that a flow computes itself); the others stay as they are set. `clip` is the largest norm
    of all gradients together; larger ones are scaled down to it. `has_aux` and `keep` are those of
    `rlx.transforms.value_and_grad`. `seed` is that of dropout, whose numbers depend on it and on the steps made.
    """
    built = loss if isinstance(loss, BuiltModel) else None
    if built is not None:
        if built.skips_dropout:
            hint = "flow.build(params, training=True)"
            raise GraphError(f"step: the dropout of {built.module.name!r} is off", hint=hint)
        loss, profile = built.module, profile or built.profile
    spec = step_graph(loss, optimiser, wrt, clip=clip, has_aux=has_aux, keep=keep)
    session = Session(device, threads=threads)
    in_place = not session.device.backend.interprets
    if not in_place:  # an interpreter does not update in place: return the new states as outputs
        spec.graph.set_outputs([*spec.graph.outputs, *spec.updated])
    compiled = session.compile(spec.graph, profile=profile)
    train_step = TrainStep(spec, compiled, optimiser, has_norm=clip is not None, in_place=in_place, seed=seed)
    if built is not None:
        train_step.set_params(built.params)
    return train_step


class TrainStep:
    """A compiled training step with its parameters and moments. Set the params, then run it batch by batch."""

    def __init__(
        self, spec: StepGraph, compiled: CompiledGraph, optimiser: Optimiser, *, has_norm: bool, in_place: bool,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.compiled = compiled
        self.optimiser = optimiser
        self.schedule = optimiser.lr  # a number, or a function of the steps made
        self.seed = seed  # of dropout
        self.steps = 0  # number of steps so far
        self.norm: float | None = None  # gradient norm of the last step, if gradients are clipped
        self._spec = spec
        self._has_norm, self._in_place = has_norm, in_place
        self._memory = compiled.allocator
        zeros = self._memory.zeros
        self._states = {s: zeros(concrete(t.shape, {}), t.dtype.numpy) for s, t in self._types().items()}
        self._set: set[str] = set()
        self._lock = Lock(waits=Waits.TRAIN_STEP)  # a fork waits for it: a child must not see half of an update

    def _types(self) -> dict[str, TensorType]:
        spec = self._spec
        return {state: type_ for p, type_ in spec.params.items() for state in (p, *spec.moments[p])}

    # -- parameters ---------------------------------------------------------------------------------------------------
    @property
    def params(self) -> dict[str, Array]:
        """Copies of the trained params, which `set_params` of another compiled graph accepts."""
        with self._lock:
            return {name: self._copy(name) for name in self._spec.params}

    def _copy(self, state: str) -> Array:
        """A copy in host memory."""
        return np.array(self._memory.download(self._states[state]))

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set params: trained ones, which are copied, and others. Moments do not change."""
        if not isinstance(values, Mapping):
            raise BindError(f"params: expected a mapping from names to arrays, found {type(values).__name__}")
        known = {**self._spec.params, **self.compiled.param_types}
        for name in values:
            if name not in known:
                hint = nearest(str(name), known) or f"params have names such as {next(iter(known))!r}"
                raise BindError(f"param: nothing is called {name!r}", hint=hint)
        with self._lock:
            for name, value in values.items():
                if name not in self._spec.params:
                    self.compiled.set_param(name, value)
                    continue
                type_ = self._spec.params[name]
                array = as_array("param", name, value, type_)
                check_fixed("param", name, array, type_)
                self._memory.copy(array, self._states[name])
                self._set.add(name)

    @property
    def lr(self) -> float:
        """The learning rate of the next step. Set it to a number or to a schedule, a function of the steps made."""
        return rate_of(self.schedule, self.steps)

    @lr.setter
    def lr(self, lr: float | Schedule) -> None:
        rate_of(lr, self.steps)
        self.schedule = lr

    # -- steps --------------------------------------------------------------------------------------------------------
    def run(self, inputs: Mapping[str, Any] | None = None, *, lr: float | Schedule | None = None) -> Any:
        """Run one step; returns the loss before the update as a number and, with `has_aux`, the auxiliary outputs.

        A KernelError, such as for a label out of range, is raised after the update: go back to a checkpoint.
        """
        with self._lock:
            arrays = self._all_inputs({} if inputs is None else inputs, self.schedule if lr is None else lr)
            outputs = self.compiled.run(arrays)
            if not self._in_place:
                for name, array in zip(self._spec.states, outputs[-len(self._spec.states) :], strict=True):
                    self._memory.copy(array, self._states[name])
                outputs = outputs[: -len(self._spec.states)]
            self.steps += 1
            if self._has_norm:
                self.norm = float(np.asarray(outputs.pop()))
        loss = float(np.asarray(outputs[0]).reshape(()))
        return (loss, outputs[1:]) if len(outputs) > 1 else loss

    def __call__(self, **inputs: Any) -> Any:
        return self.run(inputs)

    def _all_inputs(self, inputs: Mapping[str, Any], lr: float | Schedule) -> dict[str, Any]:
        missing = [name for name in self._spec.params if name not in self._set]
        if missing:
            raise not_set(missing, "call set_params before run")
        rate = rate_of(lr, self.steps)
        scalars = {self._spec.numbers[n]: v for n, v in self.optimiser.numbers(self.steps + 1, rate).items()}
        if DROPOUT_KEY in self.compiled.input_types and DROPOUT_KEY not in inputs:
            key = np.random.SeedSequence([self.seed, self.steps]).generate_state(2)  # u32
            inputs = {**inputs, DROPOUT_KEY: key}
        reserved = [name for name in inputs if name in scalars or name in self._states]
        if reserved:
            raise BindError(f"input: {reserved[0]!r} belongs to the step", hint="set_params sets params")
        wanted = [n for n in self.compiled.input_types if n not in scalars and n not in self._states]
        check_names("input", inputs, wanted, optional=[DROPOUT_KEY] if DROPOUT_KEY in wanted else [])
        return {**inputs, **{n: np.array(v, np.float32) for n, v in scalars.items()}, **self._states}

    def report(self, inputs: Mapping[str, Any]) -> Report:
        """Report the time of each launch. Runs several steps and restores the parameters afterwards."""
        with self._lock:
            before = {name: self._copy(name) for name in self._states}
            try:
                return self.compiled.report(self._all_inputs(inputs, self.schedule))
            finally:
                for name, array in before.items():
                    self._memory.copy(array, self._states[name])

    # -- files --------------------------------------------------------------------------------------------------------
    def save(self, path: str | PathLike[str]) -> Path:
        """Write trained params, moments and the number of steps to a safetensors file."""
        from rlx.formats.safetensors import write_safetensors

        file = writable(path)
        part = file.with_name(f".{file.name}.part")  # an existing checkpoint stays until the new one is complete
        try:
            with self._lock:
                tensors = {n: (t, partial(self._download, n)) for n, t in self._types().items()}
                write_safetensors(part, tensors, optimiser=self.optimiser.name, steps=str(self.steps))
            return part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _download(self, state: str) -> Array:
        return self._memory.download(self._states[state])

    def load(self, path: str | PathLike[str]) -> None:
        """Restore params, moments and the number of steps from a file of `save`."""
        from rlx.formats import open_safetensors

        try:
            file = open_safetensors(path)
        except FormatError as error:
            error.add_note("  hint: load reads the safetensors file that save wrote; set_params takes arrays by name")
            raise
        name, steps = (str(file.metadata.get(k, "")) for k in ("optimiser", "steps"))
        if name != self.optimiser.name or not steps.isdecimal():
            raise FormatError(f"{path}: is no checkpoint of {self.optimiser.name}, its optimiser is {name or 'none'!r}")
        types = self._types()
        for state in sorted(set(types) ^ set(file.names)):
            problem = "is not in the file" if state in types else "is not a state of this step"
            raise FormatError(f"{path}: {state!r} {problem}")
        arrays = {n: as_array("param", n, file.array(n), t) for n, t in types.items()}
        for n, type_ in types.items():
            check_fixed("param", n, arrays[n], type_)
        with self._lock:
            for n, array in arrays.items():
                self._memory.copy(array, self._states[n])
            self._set.update(self._spec.params)
            self.steps = int(steps)

    def __repr__(self) -> str:
        count = sum(self._states[name].size for name in self._spec.params)
        return f"<{self.optimiser.name} step of {self.compiled.name!r}, {count:,} parameters, {self.steps} steps made>"
