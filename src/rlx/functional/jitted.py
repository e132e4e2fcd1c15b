"""`rlx.jit`: traces and compiles a function once per argument signature, and explains why it was retraced."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rlx.backends.base import device as find_device
from rlx.errors import GraphError, nearest
from rlx.functional import tree
from rlx.functional.absent_keywords import without
from rlx.functional.cache_keys import ALL_NUMBERS, TypeReader, Unkeyable, typed
from rlx.functional.graph_values import on_values
from rlx.functional.tracers import current, is_weak
from rlx.functional.tracing import (
    CachedCall,
    CallCache,
    function_key,
    label_of,
    leaf_types,
    need_function,
    session,
    trace_leaves,
)
from rlx.functional.transforms import describe
from rlx.ir.graph import Graph, Value
from rlx.runtime import nan_switch
from rlx.runtime.compiled import CompiledGraph
from rlx.types import TensorType, as_size

if TYPE_CHECKING:  # reports are imported on demand
    from rlx.inspect.memory import MemoryReport
    from rlx.inspect.profiler import Report

Fun = Callable[..., Any]
MAX_KNOWN = 1024  # combinations of argument types that are found without binding the signature
_shared = CallCache()  # of all jitted functions, by what they read


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
                raise GraphError(f"jit: static_argnums has {n}, {label_of(function)} has {len(names)} parameters")
            self.static.add(names[n])
        for name in [*self.dims, *self.static]:
            if names and name.split(".")[0].split("[")[0] not in names:
                raise GraphError(f"jit: {label_of(function)} has no parameter {name!r}", hint=nearest(name, names))
        self.compiled: dict[Any, CachedCall] = {}
        self.history: list[str] = []
        self._known: dict[Any, CachedCall] = {}  # by the types of arguments as they are passed
        self._last_call: CachedCall | None = None
        functools.update_wrapper(self, function, updated=())  # does not copy the function's __dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:  # inlined into the enclosing trace
            return self.function(*args, **kwargs)
        match = self._find(args, kwargs)
        if match is None:
            return on_values(self.function)(*args, **kwargs)
        self._last_call, arrays = match
        return self._last_call(arrays)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CachedCall, Sequence[Any]] | None:
        """Return the program for these arguments and the arrays it takes; None if values of a graph are among them."""
        if self.static:
            return self._find_by_name(args, kwargs)
        reader = TypeReader()
        try:
            key = reader.arguments(args, ALL_NUMBERS), reader.arguments(kwargs, ALL_NUMBERS) if kwargs else None
        except Unkeyable:
            return self._find_by_name(args, kwargs)
        call = self._known.get(key)
        if call is None:
            match = self._find_by_name(args, kwargs)
            if match is None:
                return None
            call, arrays = match
            if len(arrays) != len(reader.data) or any(a is not b for a, b in zip(arrays, reader.data, strict=True)):
                return match  # arguments by name come in another order
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = call
        return call, reader.data

    def _find_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CachedCall, Sequence[Any]] | None:
        traced_args, static = self._split_static(args, kwargs)
        leaves, shape = tree.flatten(traced_args)
        if any([isinstance(x, Value) for x in leaves]):
            return None
        paths = shape.paths()
        types = [self._type(path, t) for path, t in zip(paths, leaf_types("jit", leaves, paths), strict=True)]
        weak = tuple([type(x) is not np.ndarray and is_weak(x) for x in leaves])
        key = (shape, tuple(types), weak, static, typed(static))
        call = self.compiled.get(key)
        if call is None:
            call = self._new_call(key, traced_args, static, paths, types, weak)
        return call, leaves

    def _new_call(
        self, key: Any, traced_args: dict[str, Any], static: tuple[tuple[str, Any], ...], paths: list[str],
        types: list[TensorType], weak: tuple[bool, ...],
    ) -> CachedCall:  # fmt: skip
        """Trace and compile the function, unless another `rlx.jit` of it already did."""
        reason = self._why(paths, types, weak, static)
        before = None if nan_switch.watching else function_key(self.function)
        shared_key = None if before is None else (before[0], self.device, key)
        call = _shared.get(shared_key) if shared_key is not None else None
        if call is None:
            called, inputs = self._bind_static(static), tree.structure(((traced_args,), {}))
            drawn = _numpy_draws()
            function = trace_leaves(called, inputs, types, paths, weak=weak, prints=True)
            if drawn != _numpy_draws():
                _warn_of_draws(self.function)
            call = CachedCall(function, session(self.device).compile)
            after = function_key(self.function)
            if before is not None and after is not None and after[0] == before[0]:
                _shared.put(shared_key, call, before[1])
        else:
            reason += "; reuses the program of an earlier rlx.jit of the same function"
        self.history.append(reason)
        self.compiled[key] = call
        return call

    def __rlx_reads__(self) -> tuple[Any, ...]:
        """Return what a result depends on besides the arguments, inside another transform."""
        return (self.function,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        hint = _ELSEWHERE.get(name) or nearest(name, _LOOKING)
        raise AttributeError(f"a function made by rlx.jit has no attribute {name!r}" + (f": {hint}" if hint else ""))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _split_static(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
        """Return the traced and the static arguments of this call, by name. Defaults stay the function's own."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{label_of(self.function)}: {error}") from None
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
                hint = "static values are hashable: a tuple for a list, a frozen dataclass; arrays are not static"
                problem = f"jit: static argument {name!r} cannot be hashed, {type(value).__name__}"
                raise GraphError(problem, hint=hint) from None
        return traced_args, tuple(static)

    def _bind_static(self, static: tuple[tuple[str, Any], ...]) -> Fun:
        signature = self.signature

        def call(traced_args: dict[str, Any]) -> Any:
            arguments = {**traced_args, **dict(static)}
            bound = inspect.BoundArguments(signature, {n: arguments[n] for n in signature.parameters if n in arguments})
            return self.function(*bound.args, **bound.kwargs)

        call.__name__ = label_of(self.function)
        return call

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

    # -- looking ------------------------------------------------------------------------------------------------------
    def _looked_at(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CachedCall, Any]:
        """Return the program for these arguments and its inputs, or that of the last call and None."""
        if not args and not kwargs and self._last_call is not None:
            return self._last_call, None
        if not args and not kwargs and self.signature.parameters:
            hint = f"call it first, or give arguments: f.{verb}(*args)"
            raise GraphError(f"{verb}: {label_of(self.function)} has not been called", hint=hint)
        match = self._find(args, kwargs)
        if match is None:
            raise GraphError(f"{verb}: takes arrays, found values of a graph")
        call, arrays = match
        return call, call.inputs(arrays)

    def program(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """Return the compiled graph for these arguments, by default those of the last call."""
        call, _ = self._looked_at("program", args, kwargs)
        if call.compiled is None:
            raise GraphError(f"program: {label_of(self.function)} returns no arrays, so nothing is compiled")
        return call.compiled

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Return the traced graph for these arguments, by default those of the last call."""
        return self._looked_at("graph", args, kwargs)[0].function.graph

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Return launches, bytes, flops and times of a run with these arguments, by default like the last call."""
        call, inputs = self._looked_at("report", args, kwargs)
        return self.program(*args, **kwargs).report(inputs if call.compiled is not None else None)

    def memory(self, *args: Any, **kwargs: Any) -> MemoryReport:
        """Return every buffer of a run and its lifetime, for these arguments or those of the last call."""
        self.report(*args, **kwargs)  # sets the sizes
        return self.program(*args, **kwargs).memory()

    def trace(self, path: str | Path, *args: Any, **kwargs: Any) -> Path:
        """Run with these arguments and write a timeline for chrome://tracing."""
        _, inputs = self._looked_at("trace", args, kwargs)
        if inputs is None:
            hint = f"f.trace({str(path)!r}, *args)"
            raise GraphError("trace: needs the arguments of a run", hint=hint)
        self.program(*args, **kwargs).run(inputs, trace=path)
        return Path(path)

    def page(self, path: str | Path, *args: Any, assembly: bool = False, **kwargs: Any) -> Path:
        """Write a web page that shows the program at every level; `assembly` adds the machine code."""
        return self.program(*args, **kwargs).page(path, assembly=assembly)

    def export(self, path: str | Path, *args: Any, **kwargs: Any) -> Path:
        """Write the program for these arguments, or those of the last call, to a file for `rlx.load_exported`.

        The loaded program is called like this function, without static arguments. Named tuples and dataclasses of its
        result become dicts; inputs of its `run` have names such as `params.w`.
        """
        from rlx.functional.exported import ExportedCall  # few programs need it
        from rlx.runtime.export import Extras, export_graph

        program = self.program(*args, **kwargs)
        call, _ = self._looked_at("export", args, kwargs)
        kind = inspect.Parameter
        by_kind: dict[Any, list[str]] = {}
        for name, parameter in self.signature.parameters.items():
            if name not in self.static:
                by_kind.setdefault(parameter.kind, []).append(name)
        positional = (*by_kind.get(kind.POSITIONAL_ONLY, ()), *by_kind.get(kind.POSITIONAL_OR_KEYWORD, ()))
        (rest,), (named,) = (by_kind.get(k, [""]) for k in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD))
        keywords = tuple(by_kind.get(kind.KEYWORD_ONLY, ()))
        convention = ExportedCall(positional, call.function.structure, keywords, rest, named)
        return export_graph(program, path, extras=Extras(about={"function": convention.to_json()}))

    def __repr__(self) -> str:
        times = "once" if len(self.history) == 1 else f"{len(self.history)} times"
        return f"<rlx.jit of {describe(self.function)}, {f'traced {times}' if self.history else 'not traced yet'}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import box, fold, note, preformatted  # few programs need it

        parts = [note(self.explain())] if not self.history else [preformatted(self.explain().split("\n"))]
        if self._last_call is not None:
            parts.append(fold("graph of the last call", preformatted(str(self._last_call.function.graph).split("\n"))))
        return box(repr(self)[1:-1], *parts)

    def explain(self) -> str:
        """List each time the function was traced, and why."""
        lines = [f"{i + 1}. {line}" for i, line in enumerate(self.history)]
        return "\n".join(lines) or "not traced yet"


def _numpy_draws() -> Any:
    """Return the state of NumPy's global generator, which changes with each draw."""
    if "numpy.random" not in sys.modules:
        return None
    state: Any = np.random.get_state()
    return state[1].tobytes(), *state[2:]


def _warn_of_draws(function: Fun) -> None:
    problem = (
        f"jit: {label_of(function)} draws from np.random while it is traced, and its program repeats these numbers"
    )
    warnings.warn(f"{problem}; rlx.random.normal(key, shape) draws new ones for each key", stacklevel=6)


_LOOKING = ["explain", "export", "graph", "memory", "page", "program", "report", "trace"]
_ELSEWHERE = {
    "lower": "f.graph(*args) is the traced graph, f.program(*args) the compiled one",
    "compile": "f.program(*args) is the compiled graph",
    "plan": "f.program(*args).plan is the LIR program",
    "dispatch": "f.program(*args).dispatch() says what became of each node",
    "asm": "f.export('f.rlxp'), then rlx inspect f.rlxp --level asm; f.page('f.html', assembly=True) shows it too",
    "hlo": "f.graph(*args) is the traced graph",
    "clear_cache": "rlx.jit(f) again starts without programs",
}


def _signature(function: Fun) -> inspect.Signature:
    """Return the function's signature, or (*args, **kwargs) if it has none, as for some C functions."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


_DONATE = "results own their memory; training steps of rlx.train update parameters in place"


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
@without(
    donate_argnums=_DONATE, donate_argnames=_DONATE, backend='device="cpu" chooses where it runs',
    inline="a jitted function is inlined into the traced function that calls it",
)  # fmt: skip
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
        transform = getattr(function, "_transform", None)
        jitted = "rlx.jit(f)" if transform is None else f"rlx.jit(rlx.{transform}(f))"
        hint = (
            f"{jitted} can be explained; outside of jit a program is cached, and traced again if a type, "
            "a Python integer or anything the function reads has changed"
        )
        raise GraphError(f"explain: {function!r} is not a function made by rlx.jit", hint=hint)
    return function.explain()
