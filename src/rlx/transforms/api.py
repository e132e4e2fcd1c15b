"""The transforms of graphs: each takes a graph (or a module, whose blocks are lowered first) and gives a new one.

Inputs and params keep their names and order; inputs that a transform adds come after them. What comes out consists of
ordinary ops, so transforms compose to any order, and what comes out of one compiles as any graph does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rlx.transforms.rules  # noqa: F401  fills the tables
from rlx.errors import DTypeError, GraphError, ShapeError, nearest
from rlx.hir.lower import lower
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import inline, live_copy, rebuild
from rlx.transforms.build import declare, eye, full, move_axis, zeros
from rlx.transforms.jvp import push
from rlx.transforms.vjp import Joint, Keep, Linear, linearise, split
from rlx.transforms.vmap import batch, widened
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


# -- what is given ----------------------------------------------------------------------------------------------------
def as_graph(where: str, given: Any) -> Graph:
    """The MIR graph of a graph or a module, with outputs."""
    graph = given if isinstance(given, Graph) else given.into_mir() if hasattr(given, "into_mir") else None
    if graph is None:
        hint = "its .module is a graph" if isinstance(getattr(given, "module", None), Graph) else None
        raise GraphError(f"{where}: {type(given).__name__} is neither a Graph nor a GraphModule", hint=hint)
    if not graph.outputs:
        raise GraphError(f"{where}: graph {graph.name!r} has no outputs", hint="call set_outputs([...])")
    return lower(graph)


def chosen(where: str, graph: Graph, wrt: Wrt) -> list[Node]:
    """The inputs and params that derivatives are taken with respect to.

    None: all float params but those that the model computes itself, or else inputs.
    """
    if wrt is None:
        floats = [n for n in leaves(graph) if n.types[0].dtype.is_float and n.attrs["name"] not in graph.fixed]
        found = [n for n in floats if n.op == "param"] or floats
        if not found:
            raise GraphError(f"{where}: graph {graph.name!r} has no inputs that are floats")
        return found
    names = [_name(where, w) for w in ((wrt,) if isinstance(wrt, (str, Value)) else wrt)]
    known = {n.attrs["name"]: n for n in leaves(graph)}
    for name in names:
        if name not in known:
            raise GraphError(f"{where}: nothing is called {name!r} in graph {graph.name!r}", hint=nearest(name, known))
        type_ = known[name].types[0]
        if not type_.dtype.is_float:
            raise DTypeError(f"{where}: {name!r} is {type_}, only floats have a gradient")
    if not names or len(set(names)) != len(names):
        raise GraphError(f"{where}: wrt names {names}, wanted each once and at least one")
    return [known[name] for name in names]


def _name(where: str, wrt: str | Value) -> str:
    if isinstance(wrt, str):
        return wrt
    if not isinstance(wrt, Value) or wrt.node.op not in ("input", "param"):
        raise GraphError(f"{where}: {wrt!r} is neither an input nor a param")
    return str(wrt.node.attrs["name"])


def with_same_leaves(graph: Graph, name: str) -> tuple[Graph, list[Value]]:
    """A new graph with the same leaves."""
    made = Graph(f"{graph.name}_{name}")
    made.limits, made.fixed = dict(graph.limits), set(graph.fixed)
    return made, [made.append(n.op, (), n.attrs, n.types, n.origin)[0] for n in leaves(graph)]


def there(values: Iterable[Value | None], types: Iterable[TensorType], into: Graph) -> list[Value]:
    """Values, and zeros where there is none."""
    return [zeros(into, t) if v is None else v for v, t in zip(values, types, strict=True)]


def _pruned(graph: Graph) -> Graph:
    """The graph without what its outputs do not need; inputs and params all stay and come first, in order."""
    return live_copy(graph, leaves_first=True, made_by="prune")


# -- reverse mode -----------------------------------------------------------------------------------------------------
def vjp(graph: Any, wrt: Wrt = None, *, keep: Policy = "everything") -> Graph:
    """Outputs, then for each of `wrt` its gradient from cotangents of the outputs.

    Cotangents are new inputs: `d_output`, or `d_output_0`, `d_output_1`, ... where there are several outputs; one that
    is no float has none.
    """
    source = as_graph("vjp", graph)
    return _reverse("vjp", source, chosen("vjp", source, wrt), None, keep)


def value_and_grad(graph: Any, wrt: Wrt = None, *, has_aux: bool = False, keep: Policy = "everything") -> Graph:
    """The loss, then its gradient with respect to each of `wrt`. The loss is the graph's output, one float.

    With `has_aux` the graph may have further outputs, which come after the loss. `keep` says which values of the
    forward pass are kept for the backward one: "everything", "matmuls", "nothing", or a function of a node.
    """
    return _gradient("value_and_grad", graph, wrt, has_aux, keep)


def grad(graph: Any, wrt: Wrt = None, *, has_aux: bool = False, keep: Policy = "everything") -> Graph:
    """The gradient of the graph's output, one float, with respect to each of `wrt`; see `value_and_grad`."""
    made = _gradient("grad", graph, wrt, has_aux, keep)
    made.outputs = made.outputs[1:]
    return _pruned(made)


def _gradient(where: str, graph: Any, wrt: Wrt, has_aux: bool, keep: Policy) -> Graph:
    source = as_graph(where, graph)
    if len(source.outputs) != 1 and not has_aux:
        hint = "has_aux=True takes the first as the loss; vjp takes any number"
        raise GraphError(f"{where}: graph {source.name!r} has {len(source.outputs)} outputs, wanted one", hint=hint)
    loss = source.outputs[0].type
    if not loss.dtype.is_float:
        raise DTypeError(f"{where}: the output is {loss}, wanted one float")
    if loss.elements != 1:
        raise ShapeError(f"{where}: the output is {loss}, wanted one number", hint="sum it, or use vjp or jacrev")
    return _reverse(where, source, chosen(where, source, wrt), 0, keep)


def _reverse(where: str, source: Graph, wrt: list[Node], loss: int | None, keep: Policy) -> Graph:
    """Outputs and gradients; seeded by inputs, or by a one for the output number `loss`."""
    if isinstance(keep, str) and keep not in POLICIES:
        raise GraphError(f"{where}: keep is {keep!r}", hint=nearest(keep, POLICIES))
    policy = POLICIES[keep] if isinstance(keep, str) else keep
    made, given = with_same_leaves(source, where)
    several = len(source.outputs) > 1
    seeds: list[Value | None] = []
    for i, output in enumerate(source.outputs):
        if not output.dtype.is_float or (loss is not None and i != loss):
            seeds.append(None)
        elif policy is not None or loss is None:
            seeds.append(declare(made, f"d_output_{i}" if several else "d_output", output.type))
        else:
            seeds.append(full(made, 1, output.type))
    linear = linearise(made, source, given, [n in wrt for n in leaves(source)])
    start = len(made.nodes)
    grads = _pulled(where, linear, seeds, wrt)
    made.set_outputs([*linear.outputs, *there(grads, [n.types[0] for n in wrt], made)])
    if policy is None:
        return _pruned(made)
    return _rematerialised(where, source, made, start, policy, loss)


def _pulled(where: str, linear: Linear, seeds: Sequence[Value | None], wrt: list[Node]) -> list[Value | None]:
    try:
        found = dict(zip(leaves(linear.body), linear.pull(seeds), strict=True))
    except GraphError as error:
        error.add_note(f"  in {where} of graph {linear.body.name!r}")
        raise
    return [found[n] for n in wrt]


def _rematerialised(where: str, source: Graph, made: Graph, start: int, keep: Keep, loss: int | None) -> Graph:
    """The gradient with values computed again that are not kept: the backward part reads kept ones behind a barrier."""
    old = leaves(source)
    body = _as_inputs(made)
    cut = split(Joint(source, body, len(old), len(source.outputs), start, [], []), keep)
    final, given = with_same_leaves(source, where)
    cts = [
        full(final, 1, n.types[0]) if loss is not None else declare(final, n.attrs["name"], n.types[0])
        for n in leaves(made)[len(old) :]
    ]
    results = inline(final, cut.forward, given)
    count = len(source.outputs)
    saved = dict(zip(cut.saved, results[count:], strict=True))
    saved |= dict(zip((n[0] for n in body.inputs), given, strict=False))
    # Weights need no barrier: what depends on them alone is computed once, when they are set.
    behind = [v if v.node.op == "param" else final.one("barrier", v) for v in (saved[n] for n in cut.needs)]
    return _pruned(final.set_outputs([*results[:count], *inline(final, cut.backward, [*behind, *cts])]))


def _as_inputs(graph: Graph) -> Graph:
    """The graph with params as inputs."""
    made = Graph(graph.name)
    made.limits = dict(graph.limits)
    return made.set_outputs(inline(made, graph, [declare(made, n.attrs["name"], n.types[0]) for n in leaves(graph)]))


# -- forward mode -----------------------------------------------------------------------------------------------------
def jvp(graph: Any, wrt: Wrt = None) -> Graph:
    """Outputs, then the tangent of each that is a float, given tangents of `wrt`: new inputs `tangent_<name>`."""
    source = as_graph("jvp", graph)
    return _forward(source, chosen("jvp", source, wrt))


def _forward(source: Graph, wrt: list[Node]) -> Graph:
    made, given = with_same_leaves(source, "jvp")
    tangents = {n: declare(made, f"tangent_{n.attrs['name']}", n.types[0]) for n in wrt}
    outputs, found = push(made, source, given, [tangents.get(n) for n in leaves(source)])
    floats = [i for i, o in enumerate(outputs) if o.dtype.is_float]
    moved = there([found[i] for i in floats], [outputs[i].type for i in floats], made)
    return _pruned(made.set_outputs([*outputs, *moved]))


def hvp(graph: Any, wrt: Wrt = None) -> Graph:
    """The Hessian of the graph's output, one float, times a vector: new inputs `tangent_<name>`, an output for each."""
    source = as_graph("hvp", graph)
    nodes = chosen("hvp", source, wrt)
    names = [n.attrs["name"] for n in nodes]
    gradient = grad(source, names)
    made = _forward(gradient, chosen("hvp", gradient, names))
    made.outputs = made.outputs[len(names) :]
    return _pruned(made)


# -- jacobians --------------------------------------------------------------------------------------------------------
def jacfwd(graph: Any, wrt: Wrt = None) -> Graph:
    """For each output and each of `wrt` the derivatives of all elements by all elements, `[*output, *input]`.

    By forward mode, all columns at once: the better one where inputs are smaller than outputs.
    """
    source = as_graph("jacfwd", graph)
    nodes = chosen("jacfwd", source, wrt)
    made, given = with_same_leaves(source, "jacfwd")
    columns = []
    for node in nodes:
        pushed = _forward(source, [node])
        size, basis = _basis(made, node.types[0])
        flags = [False] * len(given) + [True]
        outputs, wide = batch(made, pushed, [*given, basis], flags, size)
        first = len(source.outputs)
        rows = [widened(t, w, size) for t, w in zip(outputs[first:], wide[first:], strict=True)]
        columns.append([move_axis(r, 0, r.rank - 1).reshape(*r.shape[1:], *node.types[0].shape) for r in rows])
    return _pruned(made.set_outputs([column[i] for i in range(len(columns[0])) for column in columns]))


def jacrev(graph: Any, wrt: Wrt = None) -> Graph:
    """What `jacfwd` gives, by reverse mode, all rows at once: the better one where outputs are smaller than inputs."""
    source = as_graph("jacrev", graph)
    nodes = chosen("jacrev", source, wrt)
    made, given = with_same_leaves(source, "jacrev")
    rows = []
    for i, output in enumerate(source.outputs):
        if not output.dtype.is_float:
            continue
        alone = _only(source, i)
        wanted = chosen("jacrev", alone, [n.attrs["name"] for n in nodes])
        pulled = _reverse("vjp", alone, wanted, None, "everything")
        size, basis = _basis(made, output.type)
        outputs, wide = batch(made, pulled, [*given, basis], [False] * len(given) + [True], size)
        for node, grad_, flag in zip(nodes, outputs[1:], wide[1:], strict=True):
            rows.append(widened(grad_, flag, size).reshape(*output.shape, *node.types[0].shape))
    return _pruned(made.set_outputs(rows))


def _basis(into: Graph, type_: TensorType) -> tuple[Size, Value]:
    """Unit vectors of a type, one after the other."""
    size = product(type_.shape)
    return size, eye(into, size, type_.dtype).reshape(size, *type_.shape)


def _only(graph: Graph, i: int) -> Graph:
    """The graph with one of its outputs."""
    made = rebuild(graph, lambda rewriter, node: None, made_by="jacrev")
    made.outputs = made.outputs[i : i + 1]
    return made


# -- vmap -------------------------------------------------------------------------------------------------------------
def vmap(graph: Any, in_axes: Axes = 0, out_axes: int | Sequence[int] = 0, *, size: Any = None) -> Graph:
    """The graph on a batch of `size`: a number or a dim; unless given "batch", or "batch_1" where the graph has that.

    `in_axes` is where the axis of the batch is in each input: a number for all inputs, or one by name, None for what
    all share. Params are shared unless named. `out_axes` is where it is in each output.
    """
    source = as_graph("vmap", graph)
    count = as_size(_unused_symbol(source) if size is None else size)
    made = Graph(f"{source.name}_vmap")
    made.limits, made.fixed = dict(source.limits), set(source.fixed)
    given, flags = [], []
    for node, axis in _in_axes(source, in_axes):
        type_ = node.types[0]
        shape = list(type_.shape)
        if axis is not None:
            axis = axis_index(axis, type_.rank + 1, f"vmap: {node.attrs['name']!r}")
            shape.insert(axis, count)
        leaf = made.leaf(node.op, node.attrs["name"], shape, type_.dtype)
        given.append(leaf if axis is None else move_axis(leaf, axis, 0))
        flags.append(axis is not None)
    if not any(flags):
        raise GraphError(f"vmap: in_axes is {in_axes!r}, nothing in graph {source.name!r} is batched")
    outputs, wide = batch(made, source, given, flags, count)
    places = [out_axes] * len(outputs) if isinstance(out_axes, int) else list(out_axes)
    if len(places) != len(outputs):
        raise GraphError(f"vmap: {len(places)} out_axes for {len(outputs)} outputs")
    moved = []
    for i, (value, flag, place) in enumerate(zip(outputs, wide, places, strict=True)):
        value = widened(value, flag, count)
        moved.append(move_axis(value, 0, axis_index(place, value.rank, f"vmap: output {i}")))
    return _pruned(made.set_outputs(moved))


def _unused_symbol(source: Graph) -> str:
    """A name for the axis of a batch that no size of the graph has."""
    taken = set(source.symbols())
    return next(name for i in itertools.count() if (name := f"batch_{i}" if i else "batch") not in taken)


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
    """A graph as a function of values, whose gradient computes its inside again instead of keeping it.

    `checkpoint(layer)(x, w)` puts the graph `layer` into the graph of `x`; values stand for its inputs and params in
    order. Several outputs come as a tuple. `keep` is that of `grad`.
    """
    inner = _as_inputs(as_graph("checkpoint", body))
    floats = [n.attrs["name"] for n in leaves(inner) if n.types[0].dtype.is_float]
    pulled = _reverse("vjp", inner, chosen("checkpoint", inner, floats), None, keep)
    rule = _vjp_body(inner, pulled)

    def apply(*operands: Value) -> Any:
        graph = operands[0].graph
        made = graph.custom_fn_multi(operands, inner, rule)
        return made.output(0) if made.n_outputs == 1 else tuple(made)

    return apply


def _vjp_body(inner: Graph, pulled: Graph) -> Graph:
    """The rule of a custom function: operands, results and cotangents -> a gradient for each operand."""
    rule = Graph(f"{inner.name}_back")
    operands = [declare(rule, n.attrs["name"], n.types[0]) for n in leaves(inner)]
    several = len(inner.outputs) > 1
    cts = {}
    for i, output in enumerate(inner.outputs):
        end = f"_{i}" if several else ""
        rule.input(f"primal_output{end}", output.shape, output.dtype)
        cts[i] = rule.input(f"d_output{end}", output.shape, output.dtype)
    given = [*operands, *(cts[i] for i, o in enumerate(inner.outputs) if o.dtype.is_float)]
    made = iter(inline(rule, pulled, given)[len(inner.outputs) :])
    return rule.set_outputs([next(made) if o.dtype.is_float else o for o in operands])
