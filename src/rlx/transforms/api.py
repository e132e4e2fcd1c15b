"""Graph transforms: each takes a graph (or a module, whose blocks are lowered first) and returns a new one.

Inputs and params keep their names and order; inputs that a transform adds come after them. The result consists of
ordinary ops, so transforms compose to any order, and the result compiles like any graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rlx.transforms.rules  # noqa: F401  fills the tables
from rlx.errors import DTypeError, GraphError, ShapeError, nearest
from rlx.hir.lower import lower
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import inline, live_copy
from rlx.transforms.build import declare, eye, full, move_axis, zeros
from rlx.transforms.jvp import push
from rlx.transforms.vjp import Joint, Keep, Linear, linearise, split
from rlx.transforms.vmap import batch, with_batch_axis
from rlx.transforms.walk import leaves
from rlx.types import Size, TensorType, as_size, axis_index, product

Wrt = str | Value | Sequence[str | Value] | None
Axes = int | None | Mapping[str, int | None]
Policy = str | Keep
MATMULS = ("matmul", "fused_matmul", "dequant_matmul", "attention", "attention_lse", "conv1d", "conv2d")
POLICIES: dict[str, Keep | None] = {
    "everything": None,
    "matmuls": lambda node: node.op in MATMULS,
    "nothing": lambda node: False,
}


# -- arguments --------------------------------------------------------------------------------------------------------
def as_graph(where: str, source: Any) -> Graph:
    """Return the MIR graph of a graph, a module or a built flow; raises if it has no outputs."""
    graph = source if isinstance(source, Graph) else source.into_graph() if hasattr(source, "into_graph") else None
    if graph is None:
        hint = "build it: flow.build(params)" if hasattr(source, "build") else None
        raise GraphError(f"{where}: {type(source).__name__} is neither a Graph nor a GraphModule", hint=hint)
    if not graph.outputs:
        raise GraphError(f"{where}: graph {graph.name!r} has no outputs", hint="call set_outputs([...])")
    return lower(graph)


def select_wrt(where: str, graph: Graph, wrt: Wrt) -> list[Node]:
    """Return the inputs and params that derivatives are taken with respect to.

    None selects all float params except those that the model computes itself; if there are none, all float inputs.
    """
    if wrt is None:
        floats = [n for n in leaves(graph) if n.types[0].dtype.is_float and n.attrs["name"] not in graph.fixed]
        nodes = [n for n in floats if n.op == "param"] or floats
        if not nodes:
            raise GraphError(f"{where}: graph {graph.name!r} has no float inputs")
        return nodes
    names = [_name(where, w) for w in ((wrt,) if isinstance(wrt, (str, Value)) else wrt)]
    known = {n.attrs["name"]: n for n in leaves(graph)}
    for name in names:
        if name not in known:
            raise GraphError(f"{where}: nothing is called {name!r} in graph {graph.name!r}", hint=nearest(name, known))
        type_ = known[name].types[0]
        if not type_.dtype.is_float:
            raise DTypeError(f"{where}: {name!r} is {type_}, only floats have a gradient")
    if not names or len(set(names)) != len(names):
        raise GraphError(f"{where}: wrt names {names}, expected each once and at least one")
    return [known[name] for name in names]


def _name(where: str, wrt: str | Value) -> str:
    if isinstance(wrt, str):
        return wrt
    if not isinstance(wrt, Value) or wrt.node.op not in ("input", "param"):
        raise GraphError(f"{where}: {wrt!r} is neither an input nor a param")
    return str(wrt.node.attrs["name"])


def with_same_leaves(graph: Graph, name: str) -> tuple[Graph, list[Value]]:
    """Return a new graph with the same leaves, and their values."""
    new_graph = Graph(f"{graph.name}_{name}")
    new_graph.limits, new_graph.fixed = dict(graph.limits), set(graph.fixed)
    return new_graph, [new_graph.append(n.op, (), n.attrs, n.types, n.origin)[0] for n in leaves(graph)]


def or_zeros(values: Iterable[Value | None], types: Iterable[TensorType], into: Graph) -> list[Value]:
    """Replace missing values by zeros."""
    return [zeros(into, t) if v is None else v for v, t in zip(values, types, strict=True)]


def _prune(graph: Graph) -> Graph:
    """Drop nodes that the outputs do not need; all inputs and params stay and come first, in order."""
    return live_copy(graph, leaves_first=True, made_by="prune")


# -- reverse mode -----------------------------------------------------------------------------------------------------
def vjp(graph: Any, wrt: Wrt = None, *, keep: Policy = "everything") -> Graph:
    """Return a graph with the outputs, then the gradient of each of `wrt` for cotangents of the outputs.

    Cotangents are new inputs: `d_output`, or `d_output_0`, `d_output_1`, ... if there are several outputs; outputs that
    are not floats have none.
    """
    source = as_graph("vjp", graph)
    return _reverse("vjp", source, select_wrt("vjp", source, wrt), None, keep)


def value_and_grad(graph: Any, wrt: Wrt = None, *, has_aux: bool = False, keep: Policy = "everything") -> Graph:
    """Return a graph with the loss, then its gradient with respect to each of `wrt`. The loss is one float.

    With `has_aux` the graph may have further outputs after the loss. `keep` says which values of the forward pass are
    stored for the backward pass: "everything", "matmuls", "nothing", or a function of a node.
    """
    return _gradient("value_and_grad", graph, wrt, has_aux, keep)


def grad(graph: Any, wrt: Wrt = None, *, has_aux: bool = False, keep: Policy = "everything") -> Graph:
    """Return a graph with the gradient of the loss (one float) with respect to each of `wrt`; see `value_and_grad`."""
    new_graph = _gradient("grad", graph, wrt, has_aux, keep)
    new_graph.outputs = new_graph.outputs[1:]
    return _prune(new_graph)


def _gradient(where: str, graph: Any, wrt: Wrt, has_aux: bool, keep: Policy) -> Graph:
    source = as_graph(where, graph)
    if len(source.outputs) != 1 and not has_aux:
        hint = "has_aux=True takes the first as the loss; vjp takes any number"
        raise GraphError(f"{where}: graph {source.name!r} has {len(source.outputs)} outputs, expected one", hint=hint)
    loss = source.outputs[0].type
    if not loss.dtype.is_float:
        raise DTypeError(f"{where}: the output is {loss}, expected one float")
    if loss.elements != 1:
        raise ShapeError(f"{where}: the output is {loss}, expected one number", hint="sum it, or use vjp or jacrev")
    return _reverse(where, source, select_wrt(where, source, wrt), 0, keep)


def _reverse(where: str, source: Graph, wrt: list[Node], loss: int | None, keep: Policy) -> Graph:
    """Build outputs and gradients; cotangents are new inputs, or 1 for output number `loss`."""
    if isinstance(keep, str) and keep not in POLICIES:
        raise GraphError(f"{where}: keep is {keep!r}", hint=nearest(keep, POLICIES))
    policy = POLICIES[keep] if isinstance(keep, str) else keep
    new_graph, leaf_values = with_same_leaves(source, where)
    several = len(source.outputs) > 1
    seeds: list[Value | None] = []
    for i, output in enumerate(source.outputs):
        if not output.dtype.is_float or (loss is not None and i != loss):
            seeds.append(None)
        elif policy is not None or loss is None:
            seeds.append(declare(new_graph, f"d_output_{i}" if several else "d_output", output.type))
        else:
            seeds.append(full(new_graph, 1, output.type))
    linear = linearise(new_graph, source, leaf_values, [n in wrt for n in leaves(source)])
    start = len(new_graph.nodes)
    grads = _pull_gradients(where, linear, seeds, wrt)
    new_graph.set_outputs([*linear.outputs, *or_zeros(grads, [n.types[0] for n in wrt], new_graph)])
    if policy is None:
        return _prune(new_graph)
    return _rematerialise(where, source, new_graph, start, policy, loss)


def _pull_gradients(where: str, linear: Linear, seeds: Sequence[Value | None], wrt: list[Node]) -> list[Value | None]:
    try:
        gradients = dict(zip(leaves(linear.body), linear.pull(seeds), strict=True))
    except GraphError as error:
        error.add_note(f"  in {where} of graph {linear.body.name!r}")
        raise
    return [gradients[n] for n in wrt]


def _rematerialise(where: str, source: Graph, new_graph: Graph, start: int, keep: Keep, loss: int | None) -> Graph:
    """Recompute values that are not stored in the backward part, which reads the stored ones behind a barrier."""
    old = leaves(source)
    body = _as_inputs(new_graph)
    cut = split(Joint(source, body, len(old), len(source.outputs), start, [], []), keep)
    final, leaf_values = with_same_leaves(source, where)
    cts = [
        full(final, 1, n.types[0]) if loss is not None else declare(final, n.attrs["name"], n.types[0])
        for n in leaves(new_graph)[len(old) :]
    ]
    results = inline(final, cut.forward, leaf_values)
    count = len(source.outputs)
    saved = dict(zip(cut.saved, results[count:], strict=True))
    saved |= dict(zip((n[0] for n in body.inputs), leaf_values, strict=False))
    # Weights need no barrier: values that depend on them alone are computed once, when weights are set.
    needed = [saved[n] for n in cut.needs]
    barriers = [v if v.node.op == "param" else final.one("optimization_barrier", v) for v in needed]
    return _prune(final.set_outputs([*results[:count], *inline(final, cut.backward, [*barriers, *cts])]))


def _as_inputs(graph: Graph) -> Graph:
    """Return the graph with its params as inputs."""
    new_graph = Graph(graph.name)
    new_graph.limits = dict(graph.limits)
    inputs = [declare(new_graph, n.attrs["name"], n.types[0]) for n in leaves(graph)]
    return new_graph.set_outputs(inline(new_graph, graph, inputs))


# -- forward mode -----------------------------------------------------------------------------------------------------
def jvp(graph: Any, wrt: Wrt = None) -> Graph:
    """Return a graph with the outputs, then the tangent of each float output; `tangent_<name>` are new inputs."""
    source = as_graph("jvp", graph)
    return _forward(source, select_wrt("jvp", source, wrt))


def _forward(source: Graph, wrt: list[Node]) -> Graph:
    new_graph, leaf_values = with_same_leaves(source, "jvp")
    tangents = {n: declare(new_graph, f"tangent_{n.attrs['name']}", n.types[0]) for n in wrt}
    outputs, out_tangents = push(new_graph, source, leaf_values, [tangents.get(n) for n in leaves(source)])
    floats = [i for i, o in enumerate(outputs) if o.dtype.is_float]
    filled = or_zeros([out_tangents[i] for i in floats], [outputs[i].type for i in floats], new_graph)
    return _prune(new_graph.set_outputs([*outputs, *filled]))


def hvp(graph: Any, wrt: Wrt = None) -> Graph:
    """Return a graph with the Hessian of the output (one float) times a vector: new inputs `tangent_<name>`."""
    source = as_graph("hvp", graph)
    nodes = select_wrt("hvp", source, wrt)
    names = [n.attrs["name"] for n in nodes]
    gradient = grad(source, names)
    new_graph = _forward(gradient, select_wrt("hvp", gradient, names))
    new_graph.outputs = new_graph.outputs[len(names) :]
    return _prune(new_graph)


# -- jacobians --------------------------------------------------------------------------------------------------------
def jacfwd(graph: Any, wrt: Wrt = None) -> Graph:
    """Return a graph with the Jacobian of each output with respect to each of `wrt`, `[*output, *input]`.

    Uses forward mode, all columns at once: faster than `jacrev` if inputs are smaller than outputs.
    """
    source = as_graph("jacfwd", graph)
    nodes = select_wrt("jacfwd", source, wrt)
    new_graph, leaf_values = with_same_leaves(source, "jacfwd")
    columns = []
    for node in nodes:
        pushed = _forward(source, [node])
        size, basis = _basis(new_graph, node.types[0])
        flags = [False] * len(leaf_values) + [True]
        outputs, wide = batch(new_graph, pushed, [*leaf_values, basis], flags, size)
        first = len(source.outputs)
        rows = [with_batch_axis(t, w, size) for t, w in zip(outputs[first:], wide[first:], strict=True)]
        columns.append([move_axis(r, 0, r.rank - 1).reshape(*r.shape[1:], *node.types[0].shape) for r in rows])
    return _prune(new_graph.set_outputs([column[i] for i in range(len(columns[0])) for column in columns]))


def jacrev(graph: Any, wrt: Wrt = None) -> Graph:
    """Like `jacfwd`, but by reverse mode, all rows at once: faster if outputs are smaller than inputs."""
    source = as_graph("jacrev", graph)
    nodes = select_wrt("jacrev", source, wrt)
    new_graph, leaf_values = with_same_leaves(source, "jacrev")
    rows = []
    for i, output in enumerate(source.outputs):
        if not output.dtype.is_float:
            continue
        alone = _with_output(source, i)
        wanted = select_wrt("jacrev", alone, [n.attrs["name"] for n in nodes])
        pulled = _reverse("vjp", alone, wanted, None, "everything")
        size, basis = _basis(new_graph, output.type)
        outputs, wide = batch(new_graph, pulled, [*leaf_values, basis], [False] * len(leaf_values) + [True], size)
        for node, grad_, flag in zip(nodes, outputs[1:], wide[1:], strict=True):
            rows.append(with_batch_axis(grad_, flag, size).reshape(*output.shape, *node.types[0].shape))
    return _prune(new_graph.set_outputs(rows))


def _basis(into: Graph, type_: TensorType) -> tuple[Size, Value]:
    """Return all unit vectors of a type, stacked along a new first axis, and their number."""
    size = product(type_.shape)
    return size, eye(into, size, type_.dtype).reshape(size, *type_.shape)


def _with_output(graph: Graph, i: int) -> Graph:
    """Return the graph with only output i."""
    new_graph = graph.copy()
    new_graph.outputs = new_graph.outputs[i : i + 1]
    return new_graph


# -- vmap -------------------------------------------------------------------------------------------------------------
def vmap(graph: Any, in_axes: Axes = 0, out_axes: int | Sequence[int] = 0, *, size: Any = None) -> Graph:
    """Return the graph on a batch of `size`: a number or a dim, by default "batch" (or "batch_1" if that is used).

    `in_axes` is the position of the batch axis in each input: one number for all inputs, or a mapping by name, with
    None for shared inputs. Params are shared unless named. `out_axes` is its position in each output.
    """
    source = as_graph("vmap", graph)
    count = as_size(_unused_symbol(source) if size is None else size)
    new_graph = Graph(f"{source.name}_vmap")
    new_graph.limits, new_graph.fixed = dict(source.limits), set(source.fixed)
    leaf_values, flags = [], []
    for node, axis in _in_axes(source, in_axes):
        type_ = node.types[0]
        shape = list(type_.shape)
        if axis is not None:
            axis = axis_index(axis, type_.rank + 1, f"vmap: {node.attrs['name']!r}")
            shape.insert(axis, count)
        leaf = new_graph.leaf(node.op, node.attrs["name"], shape, type_.dtype)
        leaf_values.append(leaf if axis is None else move_axis(leaf, axis, 0))
        flags.append(axis is not None)
    if not any(flags):
        raise GraphError(f"vmap: in_axes is {in_axes!r}, nothing in graph {source.name!r} is batched")
    outputs, wide = batch(new_graph, source, leaf_values, flags, count)
    places = [out_axes] * len(outputs) if isinstance(out_axes, int) else list(out_axes)
    if len(places) != len(outputs):
        raise GraphError(f"vmap: {len(places)} out_axes for {len(outputs)} outputs")
    moved = []
    for i, (value, flag, place) in enumerate(zip(outputs, wide, places, strict=True)):
        value = with_batch_axis(value, flag, count)
        moved.append(move_axis(value, 0, axis_index(place, value.rank, f"vmap: output {i}")))
    return _prune(new_graph.set_outputs(moved))


def _unused_symbol(source: Graph) -> str:
    """Return a name for the batch axis that no symbol of the graph has."""
    used = set(source.symbols())
    return next(name for i in itertools.count() if (name := f"batch_{i}" if i else "batch") not in used)


def _in_axes(source: Graph, in_axes: Axes) -> list[tuple[Node, int | None]]:
    nodes = leaves(source)
    if not isinstance(in_axes, Mapping):
        return [(n, None if n.op == "param" else in_axes) for n in nodes]
    names = {n.attrs["name"] for n in nodes}
    for name in in_axes:
        if name not in names:
            raise GraphError(f"vmap: nothing is called {name!r} in graph {source.name!r}", hint=nearest(name, names))
    return [(n, in_axes.get(n.attrs["name"])) for n in nodes]


# -- checkpoints ------------------------------------------------------------------------------------------------------
def checkpoint(body: Any, *, keep: Policy = "nothing") -> Callable[..., Any]:
    """Return a graph as a function of values whose gradient recomputes intermediates instead of storing them.

    `checkpoint(layer)(x, w)` inlines the graph `layer` into the graph of `x`; the values are its inputs and params in
    order. Several outputs are returned as a tuple. `keep` is as in `grad`.
    """
    inner = _as_inputs(as_graph("checkpoint", body))
    floats = [n.attrs["name"] for n in leaves(inner) if n.types[0].dtype.is_float]
    pulled = _reverse("vjp", inner, select_wrt("checkpoint", inner, floats), None, keep)
    rule = _vjp_body(inner, pulled)

    def apply(*operands: Value) -> Any:
        graph = operands[0].graph
        new_graph = graph.custom_fn_multi(operands, inner, rule)
        return new_graph.output(0) if new_graph.n_outputs == 1 else tuple(new_graph)

    return apply


def _vjp_body(inner: Graph, pulled: Graph) -> Graph:
    """The rule of a custom function: operands, results and cotangents -> a gradient for each operand."""
    rule = Graph(f"{inner.name}_back")
    operands = [declare(rule, n.attrs["name"], n.types[0]) for n in leaves(inner)]
    several = len(inner.outputs) > 1
    cts = {}
    for i, output in enumerate(inner.outputs):
        suffix = f"_{i}" if several else ""
        rule.input(f"primal_output{suffix}", output.shape, output.dtype)
        cts[i] = rule.input(f"d_output{suffix}", output.shape, output.dtype)
    leaf_values = [*operands, *(cts[i] for i, o in enumerate(inner.outputs) if o.dtype.is_float)]
    new_graph = iter(inline(rule, pulled, leaf_values)[len(inner.outputs) :])
    return rule.set_outputs([next(new_graph) if o.dtype.is_float else o for o in operands])
