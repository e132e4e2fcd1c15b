"""Loops and branches over functions: scan, while_loop, fori_loop and cond, with JAX's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.dtypes import I32
from rlx.errors import GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.arrays import arange, at, expand_dims, minimum
from rlx.functional.operands import is_traced
from rlx.functional.printing import say
from rlx.functional.tracing import (
    Function,
    Repeated,
    Trace,
    Traced,
    as_array,
    at_once,
    call,
    current,
    trace_leaves,
    type_of,
)
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.transforms.build import count, declare, zeros
from rlx.types import Size, TensorType, as_size

Fun = Callable[..., Any]
KEPT_STEPS = 1000  # of a while_loop, whose values are kept to be printed


def _trace() -> Trace:
    found = current()
    assert found is not None
    return found


def _body(function: Fun, *arguments: Any, types: Sequence[TensorType], prints: bool = True) -> Function:
    """The graph of a function of trees whose leaves have these types."""
    return trace_leaves(function, tree.structure((arguments, {})), types, prints=prints)


def _reordered(body: Function, count: int, captured: Sequence[Traced]) -> Graph:
    """The graph with what it captured (and what others did) after its first `count` inputs."""
    graph = Graph(body.graph.name)
    inputs = body.whole.inputs
    own = len(inputs) - len(body.captured)
    first = [declare(graph, n.attrs["name"], n.types[0]) for n in inputs[:count]]
    shared = {x: declare(graph, "captured", x.value.type) for x in captured}
    rest = [declare(graph, n.attrs["name"], n.types[0]) for n in inputs[count:own]]
    return graph.set_outputs(inline(graph, body.whole, [*first, *rest, *(shared[x] for x in body.captured)]))


def _values(leaves: Sequence[Any]) -> list[Value]:
    trace = _trace()
    return [trace.constant(x) for x in leaves]


def _made(values: Sequence[Value]) -> list[Traced]:
    trace = _trace()
    return [Traced(trace, v) for v in values]


def _check_carry(
    where: str, found: tree.Structure, made: Sequence[Value], wanted: tree.Structure, types: Sequence[TensorType]
) -> None:
    if found != wanted:
        raise GraphError(f"{where}: the carry is {wanted}, the function gives {found}")
    for path, value, type_ in zip(wanted.paths("carry"), made, types, strict=False):
        if value.type != type_:
            hint = "give it the type of what the function gives, or cast inside"
            raise ShapeError(f"{where}: {path} starts as {type_}, the function gives {value.type}", hint=hint)


@at_once
def scan(
    f: Fun, init: Any, xs: Any = None, length: Any = None, reverse: bool = False, checkpoints: int | None = None
) -> tuple[Any, Any]:
    """`carry, y = f(carry, x)` for each row x of xs: the last carry, and all y as rows.

    `checkpoints` is how many carries the gradient keeps (None: all that it needs); what is between is computed again.
    """
    carry, shape = tree.flatten(init)
    rows = tree.leaves(xs)
    sizes = {type_of(x).shape[0] if type_of(x).rank else None for x in rows} | (
        {as_size(length)} if length is not None else set()
    )
    if len(sizes) != 1 or None in sizes:
        shown = ", ".join(str(type_of(x)) for x in rows)
        raise ShapeError(f"scan: length is {length}, xs are {shown or 'none'}; wanted one number of rows")
    steps: Size = next(iter(sizes))  # type: ignore[assignment]
    types = [type_of(x) for x in carry]
    inner = [t.with_shape(*t.shape[1:]) for t in (type_of(x) for x in rows)]
    body = _body(f, init, xs, types=[*types, *inner])
    if body.given.kind not in (tuple, list) or len(body.given.children) != 2:
        raise GraphError(f"scan: the function gives {body.given}, wanted a pair (carry, y)")
    _check_carry("scan", body.given.children[0], body.graph.outputs, shape, types)
    graph = _reordered(body, len(carry), body.captured)
    finals, ys = _trace().graph.scan_general(
        _values(carry), graph, steps, broadcasts=_values(body.captured), xs=_values(rows), reverse=reverse,
        checkpoints=checkpoints or 0,
    )  # fmt: skip
    given, printed = _parted(_made(ys), len(body.graph.outputs) - len(carry))
    if body.prints:
        number = count(_trace().graph, steps, I32)
        say(Repeated(body.prints, printed, number if isinstance(number, int) else _made([number])[0], reverse))
    return shape.unflatten(_made(finals)), body.given.children[1].unflatten(given)


def _parted(values: Sequence[Traced], results: int) -> tuple[Sequence[Traced], Sequence[Traced]]:
    """What a body gives, and what it prints."""
    return values[:results], values[results:]


@at_once
def while_loop(cond_fun: Fun, body_fun: Fun, init: Any, max_steps: int | None = None) -> Any:
    """`carry = body_fun(carry)` as long as `cond_fun(carry)` holds; a gradient needs `max_steps`."""
    carry, shape = tree.flatten(init)
    types = [type_of(x) for x in carry]
    more, body = _body(cond_fun, init, types=types, prints=False), _body(body_fun, init, types=types)
    _check_carry("while_loop", body.given, body.graph.outputs, shape, types)
    if body.prints:
        return _printing_while(cond_fun, body, init, shape, max_steps)
    captured = list(dict.fromkeys([*more.captured, *body.captured]))
    graphs = [_reordered(b, len(carry), captured) for b in (more, body)]
    found = _trace().graph.while_loop(_values(carry), *graphs, broadcasts=_values(captured), max_steps=max_steps)
    return shape.unflatten(_made(found))


def _printing_while(cond_fun: Fun, body: Function, init: Any, shape: tree.Structure, max_steps: int | None) -> Any:
    """A while_loop that also carries how many steps there were, and what the first of them print, as rows."""
    kept = KEPT_STEPS if max_steps is None else min(max_steps, KEPT_STEPS)
    types = [o.type for o in body.whole.outputs[len(body.graph.outputs) :]]
    graph = _trace().graph
    empty = _made([zeros(graph, t.with_shape(kept + 1, *t.shape)) for t in types])  # the last row: of all steps after

    def step(state: Any) -> Any:
        carry, number, rows = state
        given, shown = _parted(call(body.whole, [*tree.leaves(carry), *body.captured]), len(body.graph.outputs))
        place = minimum(number, kept)
        return shape.unflatten(given), number + 1, [at(r)[place].set(v) for r, v in zip(rows, shown, strict=True)]

    start = (init, as_array(0), empty)
    carry, number, rows = while_loop(lambda state: cond_fun(state[0]), step, start, max_steps)
    say(Repeated(body.prints, [r[:kept] for r in rows], number))
    return carry


def fori_loop(lower: Any, upper: Any, body_fun: Fun, init: Any) -> Any:
    """`carry = body_fun(i, carry)` for i from `lower` to below `upper`; both known numbers, or sizes from 0."""
    if is_traced(lower) or is_traced(upper):
        start = (lower if is_traced(lower) else as_array(lower), init)
        return while_loop(lambda c: c[0] < upper, lambda c: (c[0] + 1, body_fun(c[0], c[1])), start)[1]
    rows = arange(upper) if lower == 0 else arange(lower, upper)
    return scan(lambda carry, i: (body_fun(i, carry), None), init, rows)[0]


@at_once
def _cond(predicate: Any, true_fun: Fun, false_fun: Fun, *operands: Any) -> Any:
    leaves, _ = tree.flatten(operands)
    types = [type_of(x) for x in leaves]
    yes, no = (_body(f, *operands, types=types) for f in (true_fun, false_fun))
    if yes.given != no.given:
        raise GraphError(f"cond: the branches give {yes.given} and {no.given}")
    for a, b in zip(yes.graph.outputs, no.graph.outputs, strict=True):
        if a.type != b.type:
            raise ShapeError(f"cond: the branches give {a.type} and {b.type}")
    captured = list(dict.fromkeys([*yes.captured, *no.captured]))
    graphs = [_reordered(b, len(leaves), captured) for b in (yes, no)]
    results = len(yes.graph.outputs)
    shown = [[o.type for o in g.outputs[results:]] for g in graphs]
    for i, g in enumerate(graphs):  # a branch gives zeros for what the other one prints
        before, after = ([zeros(g, t) for types in part for t in types] for part in (shown[:i], shown[i + 1 :]))
        g.set_outputs([*g.outputs[:results], *before, *g.outputs[results:], *after])
    trace = _trace()
    found = trace.graph.cond(trace.constant(predicate), _values([*leaves, *captured]), *graphs)
    made = _made(found if isinstance(found, tuple) else (found,))
    for branch, first in ((yes, results), (no, results + len(shown[0]))):
        if branch.prints:
            values = made[first : first + len(branch.whole.outputs) - results]
            taken = Traced(trace, trace.constant(predicate)).astype("i32")
            say(Repeated(branch.prints, [expand_dims(v, 0) for v in values], taken if branch is yes else 1 - taken))
    return yes.outputs(made[:results])


def cond(predicate: Any, true_fun: Fun, false_fun: Fun, *operands: Any) -> Any:
    """What one of two functions gives for the operands; only that one runs."""
    if not is_traced(predicate):
        return (true_fun if bool(predicate) else false_fun)(*operands)
    return _cond(predicate, true_fun, false_fun, *operands)
