"""Transforms of functions: the graph of a function is transformed, then run at once or made part of the trace around.

They take and give functions, so they nest in any order; arguments are trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlx import transforms as graphs
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.arrays import astype, zeros_like
from rlx.functional.graph_values import on_values
from rlx.functional.printing import say_batch, say_called
from rlx.functional.tracers import is_weak, type_of
from rlx.functional.tracing import Function, call, leaf_types, names_of, need_function, trace_leaves
from rlx.ir.graph import Graph
from rlx.transforms.vjp import joint, split
from rlx.transforms.walk import leaves as leaf_nodes
from rlx.types import TensorType, axis_index

Fun = Callable[..., Any]


def _traced(where: str, function: Fun, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Function, list[Any]]:
    """The graph of a function for these arguments, and their leaves."""
    found, shape = tree.flatten((tuple(args), kwargs))
    names = names_of(function, args, kwargs)
    types, weak = leaf_types(where, found, names), [is_weak(x) for x in found]
    made = trace_leaves(function, shape, types, names, weak=weak, prints=True)
    say_called(made, [*found, *made.captured])
    return made, found


def _name(graph: Graph, i: int) -> str:
    return str(leaf_nodes(graph)[i].attrs["name"])


def _chosen(where: str, args: Sequence[Any], argnums: int | Sequence[int]) -> tuple[list[int], list[tree.Structure]]:
    """The numbers of the leaves of some arguments, and the structure of each."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, (tuple, list)) or not all(isinstance(n, int) for n in numbers):
        hint = "the number of an argument, counted from 0, or a tuple of numbers"
        raise GraphError(f"{where}: argnums is {argnums!r}", hint=hint)
    starts, at = [], 0
    for argument in args:
        starts.append(at)
        at += tree.structure(argument).leaves
    found: list[int] = []
    shapes: list[tree.Structure] = []
    for n in numbers:
        if not -len(args) <= n < len(args):
            hint = "argnums counts arguments given by position, not by name"
            raise GraphError(f"{where}: argnums is {argnums}, there are {len(args)} arguments", hint=hint)
        shapes.append(tree.structure(args[n]))
        found += range(starts[n], starts[n] + shapes[-1].leaves)
    return found, shapes


def _need_floats(made: Function, which: Sequence[int]) -> None:
    for node in (leaf_nodes(made.graph)[i] for i in which):
        if not node.types[0].dtype.is_float:
            found = f"{node.attrs['name']!r} is {node.types[0]}"
            raise DTypeError(f"grad: {found}, only floats have a gradient", hint="3.0 is a float, 3 is not")


def _shared(argnums: int | Sequence[int], shapes: Sequence[tree.Structure], leaves: Sequence[Any]) -> Any:
    """Leaves as the trees of the arguments: one for a number, a tuple for several."""
    given = iter(leaves)
    made = tuple(s.unflatten([next(given) for _ in range(s.leaves)]) for s in shapes)
    return made[0] if isinstance(argnums, int) else made


# -- reverse mode -----------------------------------------------------------------------------------------------------
def value_and_grad(
    function: Fun, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, keep: Any = "everything"
) -> Fun:
    """A function that gives what `function` gives, one float, and its gradient with respect to some arguments.

    With `has_aux` the function gives a pair, of which the second part is passed on: ((value, aux), gradient).
    """
    need_function("value_and_grad", function)

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made, leaves = _traced("grad", function, args, kwargs)
        which, shapes = _chosen("grad", args, argnums)
        _need_floats(made, which)
        outputs = made.graph.outputs
        if has_aux and (made.given.kind is not tuple or len(made.given.children) != 2):
            raise GraphError(f"grad: has_aux wants a pair of value and aux, the function gives {made.given}")
        loss = made.given.children[0] if has_aux else made.given
        if loss.leaves != 1 or outputs[0].type.elements != 1:
            shown = ", ".join(str(o.type) for o in outputs[: loss.leaves])
            raise ShapeError(f"grad: {_label(function)} gives {shown}, wanted one float", hint="sum it, or use jacrev")
        names = [_name(made.graph, i) for i in which]
        graph = graphs.value_and_grad(made.graph, names, has_aux=True, keep=keep) if names else made.graph
        found = call(graph, [*leaves, *made.captured])
        value = made.outputs(found[: len(outputs)])
        return value, _shared(argnums, shapes, found[len(outputs) :])

    return wrapped


def grad(function: Fun, argnums: int | Sequence[int] = 0, has_aux: bool = False, *, keep: Any = "everything") -> Fun:
    """A function that gives the gradient of what `function` gives, one float; with `has_aux` (gradient, aux)."""
    both = value_and_grad(need_function("grad", function), argnums, has_aux, keep=keep)

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


def _label(function: Fun) -> str:
    return getattr(function, "__name__", type(function).__name__)


def vjp(function: Fun, *primals: Any) -> tuple[Any, Fun]:
    """What the function gives, and a function from cotangents of that to a tuple of cotangents of the arguments."""
    made, leaves = _traced("vjp", need_function("vjp", function), primals, {})
    graph = made.graph
    nodes = leaf_nodes(graph)
    wanted = [i < len(leaves) and n.types[0].dtype.is_float for i, n in enumerate(nodes)]
    seeded = [o.dtype.is_float for o in graph.outputs]
    both = joint(graph, wanted, seeded)
    parts = split(both)
    operands = [*leaves, *made.captured]
    found = call(parts.forward, operands)
    kept = dict(zip(parts.saved, found[len(seeded) :], strict=True))
    kept |= dict(zip((n[0] for n in both.graph.inputs), operands, strict=False))

    def back(cotangents: Any) -> Any:
        given, shape = tree.flatten(cotangents)
        if shape != made.given:
            raise GraphError(f"vjp: cotangents are {shape}, {_label(function)} gives {made.given}")
        given = _of_types("vjp: a cotangent", given, [o.type for o in graph.outputs])
        seeds = [given[i] for i in both.cotangents]
        pulled = dict(zip(both.gradients, call(parts.backward, [*(kept[v] for v in parts.needs), *seeds]), strict=True))
        grads = [pulled[i] if i in pulled else zeros_like(x) for i, x in enumerate(leaves)]
        return tree.flatten(primals)[1].unflatten(grads)

    return made.outputs(found[: len(seeded)]), back


def _of_types(where: str, given: Sequence[Any], wanted: Sequence[TensorType]) -> list[Any]:
    """Tangents or cotangents of these types: numbers take the type that is wanted, arrays must have it."""
    made = [astype(x, t.dtype) if is_weak(x) and t.dtype.is_float else x for x, t in zip(given, wanted, strict=True)]
    for x, t in zip(made, wanted, strict=True):
        if t.dtype.is_float and type_of(x) != t:
            raise ShapeError(f"{where} is {type_of(x)}, wanted {t}")
    return made


# -- forward mode -----------------------------------------------------------------------------------------------------
def jvp(function: Fun, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """What the function gives, and the tangent of that, for tangents of the arguments."""
    need_function("jvp", function)
    _need_tuples("jvp", primals=primals, tangents=tangents)
    made, leaves = _traced("jvp", function, primals, {})
    given, shape = tree.flatten(tuple(tangents))
    if shape != tree.structure(tuple(primals)):
        raise GraphError(f"jvp: tangents are {shape}, primals {tree.structure(tuple(primals))}")
    given = _of_types("jvp: a tangent", given, [type_of(x) for x in leaves])
    floats = [i for i, x in enumerate(leaves) if type_of(x).dtype.is_float]
    if not floats:
        value = made.outputs(call(made.graph, [*leaves, *made.captured]))
        return value, tree.map(zeros_like, value)
    graph = graphs.jvp(made.graph, [_name(made.graph, i) for i in floats])
    found = call(graph, [*leaves, *made.captured, *(given[i] for i in floats)])
    count = len(made.graph.outputs)
    pushed = iter(found[count:])
    moved = [next(pushed) if o.dtype.is_float else zeros_like(found[i]) for i, o in enumerate(made.graph.outputs)]
    return made.outputs(found[:count]), made.outputs(moved)


def _need_tuples(where: str, **given: Any) -> None:
    for name, value in given.items():
        if type(value) not in (tuple, list):
            hint = f"a tuple with one for each argument: rlx.{where}(f, (x,), (tangent,))"
            raise GraphError(f"{where}: {name} is a {type(value).__name__}, wanted a tuple", hint=hint)


def hvp(function: Fun, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The Hessian of what the function gives, one float, times tangents of the arguments."""
    need_function("hvp", function)
    _need_tuples("hvp", primals=primals, tangents=tangents)
    numbers = tuple(range(len(primals)))
    found = jvp(grad(function, numbers), tuple(primals), tuple(tangents))[1]
    return found[0] if len(numbers) == 1 else found


# -- jacobians --------------------------------------------------------------------------------------------------------
def jacfwd(function: Fun, argnums: int | Sequence[int] = 0) -> Fun:
    """A function that gives all derivatives, `[*output, *input]` for each output and each leaf, by forward mode."""
    return _jacobian(need_function("jacfwd", function), argnums, graphs.jacfwd)


def jacrev(function: Fun, argnums: int | Sequence[int] = 0) -> Fun:
    """What `jacfwd` gives, by reverse mode: better where outputs are smaller than inputs."""
    return _jacobian(need_function("jacrev", function), argnums, graphs.jacrev)


def hessian(function: Fun, argnums: int = 0) -> Fun:
    """A function that gives all second derivatives of what `function` gives, one float."""
    return jacfwd(grad(function, argnums), argnums)


def _jacobian(function: Fun, argnums: int | Sequence[int], transform: Callable[..., Graph]) -> Fun:
    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made, leaves = _traced("jacobian", function, args, kwargs)
        which, shapes = _chosen("jacobian", args, argnums)
        _need_floats(made, which)
        graph = transform(made.graph, [_name(made.graph, i) for i in which])
        found = call(graph, [*leaves, *made.captured])
        rows = [found[i : i + len(which)] for i in range(0, len(found), len(which))]
        return made.outputs([_shared(argnums, shapes, row) for row in rows])

    return wrapped


# -- vmap -------------------------------------------------------------------------------------------------------------
def vmap(function: Fun, in_axes: Any = 0, out_axes: Any = 0) -> Fun:
    """A function of batches. `in_axes` says where the axis of the batch is: one number for all arguments, or a tuple
    with a number, None (shared) or a tree of them for each; `out_axes` likewise for what the function gives. Arguments
    by name have it first, as in JAX."""
    need_function("vmap", function)

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, shape = tree.flatten((args, kwargs))
        prefix = (in_axes,) * len(args) if not isinstance(in_axes, (tuple, list)) else tuple(in_axes)
        if len(prefix) != len(args):
            raise GraphError(f"vmap: {len(prefix)} in_axes for {len(args)} arguments")
        axes = tree.broadcast_prefix(prefix, args, "vmap: in_axes")
        axes += [0] * (len(leaves) - len(axes))
        types, sizes = [], {}
        names = names_of(function, args, kwargs)
        for i, (type_, axis) in enumerate(zip(leaf_types("vmap", leaves, names), axes, strict=True)):
            if axis is not None:
                axis = axes[i] = axis_index(axis, type_.rank, f"vmap: {names[i]}")
                sizes[names[i]] = type_.shape[axis]
                type_ = type_.with_shape(*type_.shape[:axis], *type_.shape[axis + 1 :])
            types.append(type_)
        if not sizes:
            raise GraphError(f"vmap: in_axes is {in_axes!r}, no argument is batched")
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{n}: {s}" for n, s in sizes.items())
            raise ShapeError(f"vmap: sizes of the batch differ, {shown}")
        made = trace_leaves(function, shape, types, names, weak=[is_weak(x) for x in leaves], prints=True)
        graph = made.graph
        where = {_name(graph, i): axis for i, axis in enumerate(axes)}
        where |= {n.attrs["name"]: None for n in leaf_nodes(graph)[len(leaves) :]}
        out = tree.broadcast_prefix(out_axes, made.outputs([0] * len(graph.outputs)), "vmap: out_axes")
        size, operands = next(iter(sizes.values())), [*leaves, *made.captured]
        if made.printed is not None:
            say_batch(made, call(graphs.vmap(made.printed, where, 0, size=size), operands))
        return made.outputs(call(graphs.vmap(graph, where, out, size=size), operands))

    return wrapped


# -- checkpoints ------------------------------------------------------------------------------------------------------
def checkpoint(function: Fun, *, keep: Any = "nothing") -> Fun:
    """The function, whose gradient computes its inside again instead of keeping it; `keep` is that of `grad`."""
    need_function("checkpoint", function)

    @on_values
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made, leaves = _traced("checkpoint", function, args, kwargs)
        operands = [*leaves, *made.captured]
        body = Graph("checkpoint")
        inputs = [body.input(n.attrs["name"], n.types[0].shape, n.types[0].dtype) for n in leaf_nodes(made.graph)]
        results = graphs.checkpoint(made.graph, keep=keep)(*inputs)
        body.set_outputs(results if isinstance(results, tuple) else [results])
        return made.outputs(call(body, operands))

    return wrapped
