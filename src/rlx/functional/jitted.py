"""`rlx.jit`: traces and compiles a function once per argument signature, and explains why it was retraced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from rlx.backends.base import DeviceArray
from rlx.backends.base import device as find_device
from rlx.errors import DTypeError, GraphError, nearest
from rlx.functional import tree
from rlx.functional.graph_values import on_values
from rlx.functional.printing import emit_all
from rlx.functional.tracers import as_array, current, is_weak, type_of
from rlx.functional.tracing import Function, leaf_types, need_function, session, trace_leaves
from rlx.ir.graph import Value
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType, as_size

Fun = Callable[..., Any]


class Jitted:
    """A function that is compiled once per combination of argument structures, shapes and dtypes."""

    def __init__(
        self, function: Fun, dims: Mapping[str, Any], static_argnums: Sequence[int], static_argnames: Sequence[str],
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.function = need_function("jit", function)
        self.device = str(find_device(device))
        self.dims = dict(dims)
        self.static = set(static_argnames)
        self.signature = _signature(function)
        names = [n for n, p in self.signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        for n in static_argnums:
            if n >= len(names):
                raise GraphError(f"jit: static_argnums has {n}, {_label(function)} has {len(names)} parameters")
            self.static.add(names[n])
        for name in [*self.dims, *self.static]:
            if names and name.split(".")[0].split("[")[0] not in names:
                raise GraphError(f"jit: {_label(function)} has no parameter {name!r}", hint=nearest(name, names))
        self.compiled: dict[Any, tuple[Function, Any]] = {}
        self.history: list[str] = []
        functools.update_wrapper(self, function, updated=())  # does not copy the function's __dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:  # inlined into the enclosing trace
            return self.function(*args, **kwargs)
        traced_args, static = self._split_static(args, kwargs)
        leaves, shape = tree.flatten(traced_args)
        if any([isinstance(x, Value) for x in leaves]):
            return on_values(self.function)(*args, **kwargs)
        paths = self._paths(traced_args)
        try:
            arrays = [x if isinstance(x, DeviceArray) else np.asarray(as_array(x), order="C") for x in leaves]
        except DTypeError:
            leaf_types("jit", leaves, paths)  # raises an error that names the argument
            raise
        types = [self._type(path, type_of(a)) for path, a in zip(paths, arrays, strict=True)]
        weak = tuple([type(x) is not np.ndarray and is_weak(x) for x in leaves])
        key = (shape, tuple(types), weak, static)
        entry = self.compiled.get(key)
        if entry is None:
            self.history.append(self._why(paths, types, weak, static))
            called, inputs = self._bind_static(static), tree.structure(((traced_args,), {}))
            function = trace_leaves(called, inputs, types, paths, weak=weak, prints=True)
            graph = function.full_graph
            entry = self.compiled[key] = (function, session(self.device).compile(graph) if graph.outputs else None)
        function, compiled = entry
        outputs: list[Any] = []
        if compiled is not None:
            names = [n.attrs["name"] for n in leaf_nodes(function.graph)]
            held = map(as_array, function.captured)  # weights of models
            outputs = compiled.run(dict(zip(names, [*arrays, *held], strict=True)))
        if function.prints:
            emit_all(function, outputs)
        return function.outputs(outputs[: len(function.graph.outputs)])

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _split_static(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
        """Return the traced and the static arguments of this call, by name. Defaults stay the function's own."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_label(self.function)}: {error}") from None
        traced_args: dict[str, Any] = {}
        static: list[tuple[str, Any]] = []
        for name, value in bound.arguments.items():
            if name in self.static:
                static.append((name, value))
            else:
                traced_args[name] = value
        for name, value in static:
            try:
                hash(value)
            except TypeError:
                raise GraphError(f"jit: static argument {name!r} cannot be hashed, {type(value).__name__}") from None
        return traced_args, tuple(static)

    def _bind_static(self, static: tuple[tuple[str, Any], ...]) -> Fun:
        signature = self.signature

        def call(traced_args: dict[str, Any]) -> Any:
            arguments = {**traced_args, **dict(static)}
            bound = inspect.BoundArguments(signature, {n: arguments[n] for n in signature.parameters if n in arguments})
            return self.function(*bound.args, **bound.kwargs)

        call.__name__ = _label(self.function)
        return call

    def _paths(self, traced_args: dict[str, Any]) -> list[str]:
        return tree.structure(traced_args).paths()

    def _type(self, path: str, type_: TensorType) -> TensorType:
        """Return the type of a leaf, with symbolic sizes where `dims` names axes of it or of its argument."""
        named = self.dims.get(path, self.dims.get(path.split(".")[0].split("[")[0]))
        if named is None:
            return type_
        if len(named) != type_.rank:
            raise GraphError(f"jit: dims of {path!r} are {named}, it has {type_.rank} axes")
        sizes = [have if n is None else as_size(n) for n, have in zip(named, type_.shape, strict=True)]
        return type_.with_shape(*sizes)

    def _why(self, paths: list[str], types: list[TensorType], weak: Sequence[bool], static: Any) -> str:
        now = {p: f"{t.dtype} number" if w else str(t) for p, t, w in zip(paths, types, weak, strict=True)}
        now |= {n: repr(v) for n, v in static}
        before, self._last = getattr(self, "_last", None), now
        shown = ", ".join(f"{p}: {t}" for p, t in now.items())
        if before is None:
            return f"traced for {shown}"
        changes = [f"{p} is {t}, was {before.get(p, 'not there')}" for p, t in now.items() if before.get(p) != t]
        changes += [f"{p} is gone" for p in before if p not in now]
        return "traced again, " + ("; ".join(changes) or "the structure of the arguments changed")

    def __repr__(self) -> str:
        return f"<rlx.jit of {_label(self.function)}, traced {len(self.history)} times>"

    def explain(self) -> str:
        """List each time the function was traced, and why."""
        lines = [f"{i + 1}. {line}" for i, line in enumerate(self.history)]
        return "\n".join(lines) or "not traced yet"


def _label(function: Fun) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _signature(function: Fun) -> inspect.Signature:
    """Return the function's signature, or (*args, **kwargs) if it has none, as for some C functions."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


@overload
def jit(function: Fun) -> Jitted: ...
@overload
def jit(
    function: None = None, *, dims: Mapping[str, Any] | None = None, static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (), device: str = "cpu",
) -> Callable[[Fun], Jitted]: ...  # fmt: skip
@overload
def jit(
    function: Fun, *, dims: Mapping[str, Any] | None = None, static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (), device: str = "cpu",
) -> Jitted: ...  # fmt: skip
def jit(
    function: Fun | None = None, *, dims: Mapping[str, Any] | None = None, static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (), device: str = "cpu",
) -> Any:  # fmt: skip
    """Trace and compile a function for the shapes of its arguments; `@rlx.jit` or `@rlx.jit(dims=...)`.

    `dims={"x": ("batch", "seq", None)}` makes axes symbolic: the function is compiled once for all their sizes. Static
    arguments are Python values; each new value is traced again. Arguments and results are NumPy arrays on the CPU;
    another `device` returns arrays in its own memory, and accepts them without a copy.
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if function is None:
        return lambda f: Jitted(f, dims or {}, numbers, names, device)
    return Jitted(function, dims or {}, numbers, names, device)


def explain(function: Any) -> str:
    """List each time a jitted function was traced, and why."""
    if not isinstance(function, Jitted):
        raise GraphError(f"explain: {function!r} is not a function made by rlx.jit")
    return function.explain()
