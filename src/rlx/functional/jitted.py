"""`rlx.jit`: a function traced and compiled once for each kind of arguments, and why it was traced again."""

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
from rlx.functional.printing import say_all
from rlx.functional.tracers import as_array, current, is_weak, type_of
from rlx.functional.tracing import Function, leaf_types, need_function, session, trace_leaves
from rlx.ir.graph import Value
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType, as_size

Fun = Callable[..., Any]


class Jitted:
    """A function that is compiled for arguments of given structures, shapes and element types, and run."""

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
        functools.update_wrapper(self, function, updated=())  # what wraps a jitted function has that one's attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:  # part of a larger graph
            return self.function(*args, **kwargs)
        moving, static = self._parted(args, kwargs)
        leaves, shape = tree.flatten(moving)
        if any([isinstance(x, Value) for x in leaves]):
            return on_values(self.function)(*args, **kwargs)
        paths = self._paths(moving)
        try:
            arrays = [x if isinstance(x, DeviceArray) else np.asarray(as_array(x), order="C") for x in leaves]
        except DTypeError:
            leaf_types("jit", leaves, paths)  # says which one it is
            raise
        types = [self._type(path, type_of(a)) for path, a in zip(paths, arrays, strict=True)]
        weak = tuple([type(x) is not np.ndarray and is_weak(x) for x in leaves])
        key = (shape, tuple(types), weak, static)
        found = self.compiled.get(key)
        if found is None:
            self.history.append(self._why(paths, types, weak, static))
            called, inputs = self._called(static), tree.structure(((moving,), {}))
            function = trace_leaves(called, inputs, types, paths, weak=weak, prints=True)
            graph = function.whole
            found = self.compiled[key] = (function, session(self.device).compile(graph) if graph.outputs else None)
        function, compiled = found
        outputs: list[Any] = []
        if compiled is not None:
            names = [n.attrs["name"] for n in leaf_nodes(function.graph)]
            outputs = compiled.run(dict(zip(names, arrays, strict=True)))
        if function.prints:
            say_all(function, outputs)
        return function.outputs(outputs[: len(function.graph.outputs)])

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _parted(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
        """Arguments of this call by name: traced and static ones. A default that nobody passed stays the function's."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_label(self.function)}: {error}") from None
        moving: dict[str, Any] = {}
        static: list[tuple[str, Any]] = []
        for name, value in bound.arguments.items():
            if name in self.static:
                static.append((name, value))
            else:
                moving[name] = value
        for name, value in static:
            try:
                hash(value)
            except TypeError:
                raise GraphError(f"jit: static argument {name!r} cannot be hashed, {type(value).__name__}") from None
        return moving, tuple(static)

    def _called(self, static: tuple[tuple[str, Any], ...]) -> Fun:
        signature = self.signature

        def call(moving: dict[str, Any]) -> Any:
            given = {**moving, **dict(static)}
            bound = inspect.BoundArguments(signature, {n: given[n] for n in signature.parameters if n in given})
            return self.function(*bound.args, **bound.kwargs)

        call.__name__ = _label(self.function)
        return call

    def _paths(self, moving: dict[str, Any]) -> list[str]:
        return tree.structure(moving).paths()

    def _type(self, path: str, type_: TensorType) -> TensorType:
        """The type of a leaf, with run-time sizes where `dims` names axes of it or of the argument that it is in."""
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
        """Each time that the function was traced, and why."""
        lines = [f"{i + 1}. {line}" for i, line in enumerate(self.history)]
        return "\n".join(lines) or "not traced yet"


def _label(function: Fun) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _signature(function: Fun) -> inspect.Signature:
    """The function's own; that of any call where it has none, as functions of C may."""
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
    """The function, traced and compiled for the shapes of its arguments; `@rlx.jit` or `@rlx.jit(dims=...)`.

    `dims={"x": ("batch", "seq", None)}` names axes whose sizes the code does not depend on: it is compiled once for all
    of them. Static arguments are Python values, of which each new one is traced anew. Arguments and results are NumPy
    arrays on the CPU; another `device` gives arrays in its own memory, and takes them without a copy.
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if function is None:
        return lambda f: Jitted(f, dims or {}, numbers, names, device)
    return Jitted(function, dims or {}, numbers, names, device)


def explain(function: Any) -> str:
    """Why a jitted function was traced, each time."""
    if not isinstance(function, Jitted):
        raise GraphError(f"explain: {function!r} is not a function that rlx.jit made")
    return function.explain()
