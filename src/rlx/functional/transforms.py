"""Function transforms: trace a function, transform its graph, then run it or inline it into the enclosing trace.

They map functions to functions, so they nest in any order; arguments are trees.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlx import transforms as graphs
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.absent_keywords import without
from rlx.functional.arrays import astype, zeros_like
from rlx.functional.graph_values import on_values
from rlx.functional.printing import emit_batch, emit_called
from rlx.functional.tracers import current, is_weak, type_of
from rlx.functional.tracing import (
    Function,
    apply_graph,
    apply_transformed,
    cached_call,
    is_static,
    label_of,
    leaf_types,
    names_of,
    need_function,
    reusable,
    static_leaves,
    trace_leaves,
)
from rlx.ir.graph import Graph
from rlx.transforms.vjp import joint, joint_of_jvp, split
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType, axis_index

Fun = Callable[..., Any]
Live = Callable[[Sequence[Any], dict[str, Any]], Sequence[int]]


class Transformed:
    """A function made by a transform, such as `rlx.grad(f)`.

    `live(args, kwargs)` returns the positions of the arguments that are differentiated or batched; Python values of the
    others, such as a number of steps, are passed on as they are (`static_leaves`). Inside a trace it is traced.
    Outside, its program is cached by the types of the arguments, the code of the function and the values that the
    function reads (`cache_keys`).
    """

    def __init__(self, name: str, function: Fun, call: Fun, live: Live, **options: Any) -> None:
        functools.update_wrapper(self, function, updated=())  # does not copy the function's __dict__
        self._live = live
        self._transform, self._function, self._options = name, function, options
        self._call = on_values(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            call = cached_call(self, args, kwargs, lambda: self._trace(args, kwargs), live=self._live(args, kwargs))
            if call is not None:
                return call[0](call[1])
        return self._call(*args, **kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Function:
        return _trace_leaves(self._transform, self._call, args, kwargs, self._live(args, kwargs))[0]

    def __rlx_reads__(self) -> tuple[Any, ...]:
        """Return what a result depends on besides the arguments."""
        return (self._transform, self._function, self._options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<{describe(self)}>"


def describe(function: Any) -> str:
    """Return what a function is, for messages: `rlx.grad of loss`."""
    if not isinstance(function, Transformed):
        return label_of(function)
    options = {n: v for n, v in function._options.items() if v != _DEFAULTS[n]}
    shown = "".join(f", {n}={label_of(v) if callable(v) else repr(v)}" for n, v in options.items())
    return f"rlx.{function._transform} of {describe(function._function)}{shown}"


_DEFAULTS = {"argnums": 0, "has_aux": False, "keep": "everything", "in_axes": 0, "out_axes": 0}


def _trace_args(
    where: str, function: Fun, args: Sequence[Any], kwargs: dict[str, Any], live: Sequence[int] | None = None
) -> tuple[Function, list[Any]]:
    """Trace a function for these arguments; returns it and the leaves of the arguments that are inputs of its graph.

    Without `live` (see `Transformed`) all leaves are inputs.
    """
    traced, leaves = _trace_leaves(where, function, args, kwargs, range(len(args)) if live is None else live)
    emit_called(traced, [*leaves, *traced.captured])
    return traced, leaves


def _trace_leaves(
    where: str, function: Fun, args: Sequence[Any], kwargs: dict[str, Any], live: Sequence[int]
) -> tuple[Function, list[Any]]:
    leaves, shape = tree.flatten((tuple(args), kwargs))
    static = static_leaves(args, kwargs, live)
    inputs = [
        (x, name)
        for i, (x, name) in enumerate(zip(leaves, names_of(function, args, kwargs), strict=True))
        if i not in static
    ]
    leaves, names = [x for x, _ in inputs], [name for _, name in inputs]
    types, weak = leaf_types(where, leaves, names), [is_weak(x) for x in leaves]
    return trace_leaves(function, shape, types, names, weak=weak, prints=True, static=static), leaves


def _name(graph: Graph, i: int) -> str:
    return str(leaf_nodes(graph)[i].attrs["name"])


def _selected_leaves(
    where: str, args: Sequence[Any], argnums: int | Sequence[int]
) -> tuple[list[int], list[tree.Structure]]:
    """Return the leaves of the arguments in `argnums`, as indices of inputs, and the structures of these arguments."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, (tuple, list)) or not all(isinstance(n, int) for n in numbers):
        hint = "the number of an argument, counted from 0, or a tuple of numbers"
        raise GraphError(f"{where}: argnums is {argnums!r}", hint=hint)
    live = _differentiated(argnums)(args, {})
    offsets, at = [], 0
    for i, argument in enumerate(args):
        offsets.append(at)
        at += len([x for x in tree.leaves(argument) if i in live or not is_static(x)])
    indices: list[int] = []
    shapes: list[tree.Structure] = []
    for n in numbers:
        if not -len(args) <= n < len(args):
            hint = "argnums counts arguments given by position, not by name"
            raise GraphError(f"{where}: argnums is {argnums}, there are {len(args)} arguments", hint=hint)
        shapes.append(tree.structure(args[n]))
        indices += range(offsets[n], offsets[n] + shapes[-1].leaves)
    return indices, shapes


def _all_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[int]:
    return range(len(args) + len(kwargs))


def _differentiated(argnums: int | Sequence[int]) -> Live:
    """Return the positions of the arguments in `argnums`, for `Transformed`; `_selected_leaves` checks them."""

    def live(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[int]:
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        return [n % len(args) for n in numbers if isinstance(n, int)] if args else []

    return live


def _need_floats(traced: Function, which: Sequence[int]) -> None:
    for node in (leaf_nodes(traced.graph)[i] for i in which):
        if not node.types[0].dtype.is_float:
            description = f"{node.attrs['name']!r} is {node.types[0]}"
            raise DTypeError(f"grad: {description}, only floats have a gradient", hint="3.0 is a float, 3 is not")


def _as_argument_trees(argnums: int | Sequence[int], shapes: Sequence[tree.Structure], leaves: Sequence[Any]) -> Any:
    """Rebuild the trees of the arguments from leaves: one tree for a single argnum, a tuple for several."""
    values = iter(leaves)
    trees = tuple(s.unflatten([next(values) for _ in range(s.leaves)]) for s in shapes)
    return trees[0] if isinstance(argnums, int) else trees


# -- reverse mode -----------------------------------------------------------------------------------------------------
def value_and_grad(
    function: Fun, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, keep: Any = "everything"
) -> Fun:
    """Return a function that computes the value of `function` (one float) and its gradient w.r.t. `argnums`.

    With `has_aux` the function returns (value, aux), and the new function ((value, aux), gradient).
    """
    need_function("value_and_grad", function)
    call = _value_and_grad(function, argnums, has_aux, keep)
    return Transformed(
        "value_and_grad", function, call, _differentiated(argnums), argnums=argnums, has_aux=has_aux, keep=keep
    )


def _value_and_grad(function: Fun, argnums: int | Sequence[int], has_aux: bool, keep: Any) -> Fun:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        traced, leaves = _trace_args("grad", function, args, kwargs, _differentiated(argnums)(args, kwargs))
        which, shapes = _selected_leaves("grad", args, argnums)
        _need_floats(traced, which)
        outputs = traced.graph.outputs
        if has_aux and (traced.structure.kind is not tuple or len(traced.structure.children) != 2):
            raise GraphError(f"grad: has_aux wants a pair of value and aux, the function returns {traced.structure}")
        loss = traced.structure.children[0] if has_aux else traced.structure
        if loss.leaves != 1 or outputs[0].type.elements != 1:
            shown = ", ".join(str(o.type) for o in outputs[: loss.leaves]) or "no array"
            problem = f"grad: {describe(function)} returns {shown}, expected one float"
            hint = "sum it, or use jacrev" if loss.leaves else "does it end in a return?"
            if loss.kind is tuple and len(loss.children) == 2 and loss.children[0].leaves == 1:
                hint = "has_aux=True if the function returns a pair of the value and other results"
            raise ShapeError(problem, hint=hint)
        if not outputs[0].dtype.is_float:
            hint = "an integer has no gradient: return a float, such as a mean, or x.astype(np.float32)"
            raise DTypeError(f"grad: {describe(function)} returns {outputs[0].type}, expected one float", hint=hint)
        names = [_name(traced.graph, i) for i in which]

        def transform() -> Graph:
            return graphs.value_and_grad(traced.graph, names, has_aux=True, keep=keep) if names else traced.graph

        options = ("value_and_grad", tuple(names), keep)
        outputs_and_grads = apply_transformed(traced.graph, options, transform, [*leaves, *traced.captured])
        value = traced.outputs(outputs_and_grads[: len(outputs)])
        return value, _as_argument_trees(argnums, shapes, outputs_and_grads[len(outputs) :])

    return call


def grad(function: Fun, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, keep: Any = "everything") -> Fun:
    """Return a function that computes the gradient of `function` (one float); with `has_aux` (gradient, aux)."""
    both = _value_and_grad(need_function("grad", function), argnums, has_aux, keep)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return Transformed("grad", function, call, _differentiated(argnums), argnums=argnums, has_aux=has_aux, keep=keep)


def vjp(function: Fun, *primals: Any) -> tuple[Any, Fun]:
    """Return the function's value, and a function from its cotangents to a tuple of cotangents of the arguments."""
    _need_primals("vjp", need_function("vjp", function), primals, "value, pull")
    traced, leaves = _trace_args("vjp", function, primals, {})
    graph = traced.graph
    nodes = leaf_nodes(graph)
    wanted = [i < len(leaves) and n.types[0].dtype.is_float for i, n in enumerate(nodes)]
    seeded = [o.dtype.is_float for o in graph.outputs]
    both = joint(graph, wanted, seeded)
    parts = split(both)
    operands = [*leaves, *traced.captured]
    results = apply_graph(parts.forward, operands)
    saved = dict(zip(parts.saved, results[len(seeded) :], strict=True))
    saved |= dict(zip((n[0] for n in both.graph.inputs), operands, strict=False))
    backward = reusable(parts.backward)

    def back(cotangents: Any) -> Any:
        cts, shape = tree.flatten(cotangents)
        if shape != traced.structure:
            raise GraphError(f"vjp: cotangents are {shape}, {describe(function)} returns {traced.structure}")
        paths = traced.structure.paths("the cotangent")
        cts = _check_types("vjp", paths, cts, [o.type for o in graph.outputs])
        seeds = [cts[i] for i in both.cotangents]
        pulled = dict(zip(both.gradients, backward([*(saved[v] for v in parts.needs), *seeds]), strict=True))
        grads = [pulled[i] if i in pulled else zeros_like(x) for i, x in enumerate(leaves)]
        return tree.flatten(primals)[1].unflatten(grads)

    return traced.outputs(results[: len(seeded)]), back


def _check_types(where: str, paths: Sequence[str], values: Sequence[Any], wanted: Sequence[TensorType]) -> list[Any]:
    """Check tangents or cotangents against types; Python numbers are cast, arrays must match."""
    cast = [astype(x, t.dtype) if is_weak(x) and t.dtype.is_float else x for x, t in zip(values, wanted, strict=True)]
    for path, x, t in zip(paths, cast, wanted, strict=True):
        if t.dtype.is_float and type_of(x) != t:
            hint = "it has the shape and dtype of the value that it belongs to; f64 is the dtype of np.ones"
            raise ShapeError(f"{where}: {path} is {type_of(x)}, expected {t}", hint=hint)
    return cast


# -- forward mode -----------------------------------------------------------------------------------------------------
def jvp(function: Fun, primals: Sequence[Any] | None = None, tangents: Sequence[Any] | None = None) -> tuple[Any, Any]:
    """Return the function's value and its tangent: `jvp(f, (x, y), (dx, dy))`, with a tangent for every argument."""
    need_function("jvp", function)
    primals, tangents = _need_tuples("jvp", primals=primals, tangents=tangents)
    transformed = Transformed("jvp", function, functools.partial(_jvp, function), _all_arguments)
    return transformed(primals, tangents)  # type: ignore[no-any-return]


def _jvp(function: Fun, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    traced, leaves = _trace_args("jvp", function, primals, {})
    tangent_leaves = _tangent_leaves("jvp", primals, tangents, leaves)
    floats = [i for i, x in enumerate(leaves) if type_of(x).dtype.is_float]
    if not floats:
        value = traced.outputs(apply_graph(traced.graph, [*leaves, *traced.captured]))
        return value, tree.map(zeros_like, value)
    names = [_name(traced.graph, i) for i in floats]
    operands = [*leaves, *traced.captured, *(tangent_leaves[i] for i in floats)]
    options = ("jvp", tuple(names))
    results = apply_transformed(traced.graph, options, lambda: graphs.jvp(traced.graph, names), operands)
    count = len(traced.graph.outputs)
    pushed = iter(results[count:])
    tangents_out = [
        next(pushed) if o.dtype.is_float else zeros_like(results[i]) for i, o in enumerate(traced.graph.outputs)
    ]
    return traced.outputs(results[:count]), traced.outputs(tangents_out)


def _tangent_leaves(where: str, primals: Sequence[Any], tangents: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves of the tangents, checked against those of the primals."""
    tangent_leaves, shape = tree.flatten(tuple(tangents))
    if shape != tree.structure(tuple(primals)):
        raise GraphError(f"{where}: tangents are {shape}, primals {tree.structure(tuple(primals))}")
    return _check_types(where, shape.paths("tangents"), tangent_leaves, [type_of(x) for x in leaves])


def linearize(function: Fun, *primals: Any) -> tuple[Any, Fun]:
    """Return the function's value, and its derivative at `primals`: a linear function from tangents to a tangent.

    What does not depend on tangents is computed once, so many calls of it cost less than as many of `jvp`.
    """
    _need_primals("linearize", need_function("linearize", function), primals, "value, push")
    traced, leaves = _trace_args("linearize", function, primals, {})
    outputs = traced.graph.outputs
    operands = [*leaves, *traced.captured]
    floats = [i for i, x in enumerate(leaves) if type_of(x).dtype.is_float]
    if not floats:
        value = traced.outputs(apply_graph(traced.graph, operands))
        return value, lambda *tangents: tree.map(zeros_like, value)
    both = joint_of_jvp(traced.graph, graphs.jvp(traced.graph, [_name(traced.graph, i) for i in floats]))
    parts = split(both)
    results = apply_graph(parts.forward, operands)
    known = dict(zip(parts.saved, results[len(outputs) :], strict=True))
    known |= dict(zip((n[0] for n in both.graph.inputs), operands, strict=False))
    push = reusable(parts.backward)

    def linear(*tangents: Any) -> Any:
        tangent_leaves = _tangent_leaves("linearize", primals, tangents, leaves)
        pushed = iter(push([*(known[v] for v in parts.needs), *(tangent_leaves[i] for i in floats)]))
        pairs = zip(outputs, results, strict=False)
        return traced.outputs([next(pushed) if o.dtype.is_float else zeros_like(r) for o, r in pairs])

    return traced.outputs(results[: len(outputs)]), linear


def _takes_arguments(function: Fun) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # as for some C functions
        return True
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _need_primals(where: str, function: Fun, primals: Sequence[Any], returned: str) -> None:
    """Raise if there are no arguments, as in `rlx.vjp(f)(x)`, and the function takes some."""
    if not primals and _takes_arguments(function):
        problem = f"{where}: takes a function and its arguments, found the function alone"
        raise GraphError(problem, hint=f"{returned} = rlx.{where}(f, x)")


def _need_tuples(where: str, **arguments: Any) -> list[tuple[Any, ...]]:
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        problem = f"{where}: takes a function, its arguments and their tangents; {' and '.join(missing)} are missing"
        raise GraphError(problem, hint=f"rlx.{where}(f, (x,), (tangent,)), with a tangent for every argument")
    for name, value in arguments.items():
        if type(value) not in (tuple, list):
            hint = f"a tuple with one entry per argument: rlx.{where}(f, (x,), (tangent,))"
            raise GraphError(f"{where}: {name} is a {type(value).__name__}, expected a tuple", hint=hint)
    return [tuple(value) for value in arguments.values()]


def hvp(function: Fun, primals: Sequence[Any] | None = None, tangents: Sequence[Any] | None = None) -> Any:
    """Return the Hessian of the function (one float) times tangents: `hvp(f, (x, y), (dx, dy))`.

    Every argument has a tangent. The result is a tree for one argument, a tuple of trees for several.
    """
    need_function("hvp", function)
    primals, tangents = _need_tuples("hvp", primals=primals, tangents=tangents)
    numbers = tuple(range(len(primals)))
    product = jvp(grad(function, numbers), primals, tangents)[1]
    return product[0] if len(numbers) == 1 else product


# -- jacobians --------------------------------------------------------------------------------------------------------
def jacfwd(function: Fun, argnums: int | Sequence[int] = 0) -> Fun:
    """Return a function that computes the Jacobian by forward mode: `[*output, *input]` per output and leaf."""
    return _jacobian("jacfwd", need_function("jacfwd", function), argnums, graphs.jacfwd)


def jacrev(function: Fun, argnums: int | Sequence[int] = 0) -> Fun:
    """Return a function that computes the Jacobian by reverse mode: faster if outputs are smaller than inputs."""
    return _jacobian("jacrev", need_function("jacrev", function), argnums, graphs.jacrev)


def hessian(function: Fun, argnums: int = 0) -> Fun:
    """Return a function that computes the Hessian of `function` (one float)."""
    gradient = grad(need_function("hessian", function), argnums)
    jacobian = _jacobian("hessian", gradient, argnums, graphs.jacfwd)
    return Transformed("hessian", function, jacobian, _differentiated(argnums), argnums=argnums)


def _jacobian(name: str, function: Fun, argnums: int | Sequence[int], transform: Callable[..., Graph]) -> Fun:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        traced, leaves = _trace_args("jacobian", function, args, kwargs, _differentiated(argnums)(args, kwargs))
        which, shapes = _selected_leaves("jacobian", args, argnums)
        _need_floats(traced, which)
        names = [_name(traced.graph, i) for i in which]
        operands = [*leaves, *traced.captured]
        options = (transform.__name__, tuple(names))
        blocks = apply_transformed(traced.graph, options, lambda: transform(traced.graph, names), operands)
        rows = [blocks[i : i + len(which)] for i in range(0, len(blocks), len(which))]
        return traced.outputs([_as_argument_trees(argnums, shapes, row) for row in rows])

    return Transformed(name, function, call, _differentiated(argnums), argnums=argnums)


# -- vmap -------------------------------------------------------------------------------------------------------------
@without(
    axis_size="it is that of the batched arguments; rlx.vmap(lambda _, x: f(x), in_axes=(0, None))(np.arange(n), x)",
    axis_name="there are no collectives: reduce the results along their batch axis",
)  # fmt: skip
def vmap(function: Fun, in_axes: Any = 0, out_axes: Any = 0) -> Fun:
    """Vectorise a function over a batch axis.

    `in_axes` is the position of the batch axis: one number for all arguments, or a tuple with a number, None (shared)
    or a tree of those per argument; `out_axes` likewise for the results. Keyword arguments are batched along axis 0,
    as in JAX.
    """
    need_function("vmap", function)

    def batched_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[int]:
        shared = [i for i, axis in enumerate(in_axes) if axis is None] if isinstance(in_axes, (tuple, list)) else []
        return [i for i in _all_arguments(args, kwargs) if i not in shared]

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, shape = tree.flatten((args, kwargs))
        _check_axes(in_axes)
        prefix = (in_axes,) * len(args) if not isinstance(in_axes, (tuple, list)) else tuple(in_axes)
        if len(prefix) != len(args):
            hint = "in_axes has one entry per argument given by position; None is for one that is shared"
            raise GraphError(f"vmap: {len(prefix)} in_axes for {len(args)} arguments", hint=hint)
        axes = tree.broadcast_prefix(prefix, args, "vmap: in_axes")
        axes += [0] * (len(leaves) - len(axes))
        types, sizes = [], {}
        names = names_of(function, args, kwargs)
        static = {i: x for i, (x, axis) in enumerate(zip(leaves, axes, strict=True)) if axis is None and is_static(x)}
        leaves, axes, names = ([x for i, x in enumerate(part) if i not in static] for part in (leaves, axes, names))
        for i, (type_, axis) in enumerate(zip(leaf_types("vmap", leaves, names), axes, strict=True)):
            if axis is not None:
                if not type_.rank:
                    hint = "vmap needs an axis to batch over; in_axes=None is for an argument that is shared"
                    raise ShapeError(f"vmap: {names[i]} is {type_}, one number", hint=hint)
                axis = axes[i] = axis_index(axis, type_.rank, f"vmap: {names[i]}")
                sizes[names[i]] = type_.shape[axis]
                type_ = type_.with_shape(*type_.shape[:axis], *type_.shape[axis + 1 :])
            types.append(type_)
        if not sizes:
            raise GraphError(f"vmap: in_axes is {in_axes!r}, no argument is batched", hint="0 is the first axis")
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{n}: {s}" for n, s in [*sizes.items()][:6]) + (", ..." if len(sizes) > 6 else "")
            hint = "None is for an argument that is shared, such as the params of a model: in_axes=(None, 0)"
            raise ShapeError(f"vmap: batch sizes differ, {shown}", hint=hint)
        weak = [is_weak(x) for x in leaves]
        traced = trace_leaves(function, shape, types, names, weak=weak, prints=True, static=static)
        graph = traced.graph
        where = {_name(graph, i): axis for i, axis in enumerate(axes)}
        where |= {n.attrs["name"]: None for n in leaf_nodes(graph)[len(leaves) :]}
        out = tree.broadcast_prefix(out_axes, traced.outputs([0] * len(graph.outputs)), "vmap: out_axes")
        size, operands = next(iter(sizes.values())), [*leaves, *traced.captured]
        if traced.printed is not None:
            emit_batch(traced, apply_graph(graphs.vmap(traced.printed, where, 0, size=size), operands))
        options = ("vmap", tuple(where.items()), tuple(out), size)
        batched = apply_transformed(graph, options, lambda: graphs.vmap(graph, where, out, size=size), operands)
        return traced.outputs(batched)

    return Transformed("vmap", function, call, batched_arguments, in_axes=in_axes, out_axes=out_axes)


def _check_axes(axes: Any) -> None:
    for axis in tree.leaves(axes):
        if isinstance(axis, bool) or not isinstance(axis, int):
            hint = "an axis is an integer, or None for an argument that is shared"
            raise GraphError(f"vmap: in_axes has {axis!r}", hint=hint)


# -- checkpoints ------------------------------------------------------------------------------------------------------
def checkpoint(function: Fun, *, keep: Any = "nothing") -> Fun:
    """Wrap a function so that its gradient recomputes intermediates instead of storing them; `keep` is as in `grad`."""
    need_function("checkpoint", function)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        traced, leaves = _trace_args("checkpoint", function, args, kwargs, ())
        operands = [*leaves, *traced.captured]
        body = Graph("checkpoint")
        inputs = [body.input(n.attrs["name"], n.types[0].shape, n.types[0].dtype) for n in leaf_nodes(traced.graph)]
        results = graphs.checkpoint(traced.graph, keep=keep)(*inputs)
        body.set_outputs(results if isinstance(results, tuple) else [results])
        return traced.outputs(apply_graph(body, operands))

    return Transformed("checkpoint", function, call, lambda args, kwargs: (), keep=keep)
