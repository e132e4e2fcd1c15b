"""Loops and branches over functions: scan, while_loop, fori_loop and cond, with JAX's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.dtypes import I32, DType, promote
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.arrays import arange, astype, at, expand_dims, minimum
from rlx.functional.operands import is_traced
from rlx.functional.printing import say
from rlx.functional.tracers import Repeated, Trace, Traced, as_array, current, is_weak, type_of, weak_kind
from rlx.functional.tracing import Function, apply, call, eager, trace_leaves
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.transforms.build import count, declare, zeros
from rlx.types import Dim, Size, TensorType, as_size

Fun = Callable[..., Any]
KEPT_STEPS = 1000  # of a while_loop, whose values are kept to be printed


def _trace() -> Trace:
    found = current()
    assert found is not None
    return found


def _body(
    function: Fun, *arguments: Any, types: Sequence[TensorType], weak: Sequence[bool], prints: bool = True
) -> Function:
    """The graph of a function of trees whose leaves have these types."""
    return trace_leaves(function, tree.structure((arguments, {})), types, weak=weak, prints=prints)


def _step(
    where: str, function: Fun, init: Any, xs: Any = None, rows: Sequence[TensorType] = (), *, pair: bool
) -> tuple[Function, list[Any]]:
    """The body of a loop, and the leaves of its first carry, in types that stay as they are from step to step.

    A carry that starts as a number takes the type that the body gives it, as in JAX: `scan(f, 0.0, np.ones(3))` is f64.
    """
    leaves, shape = tree.flatten(init)
    while True:
        types, weak = [type_of(x) for x in leaves], [is_weak(x) for x in leaves]
        arguments = (init, xs) if pair else (init,)
        body = _body(function, *arguments, types=[*types, *rows], weak=[*weak, *[False] * len(rows)])
        if pair and (body.given.kind not in (tuple, list) or len(body.given.children) != 2):
            hint = "return carry, y; y may be None"
            raise GraphError(f"{where}: the function gives {body.given}, wanted a pair (carry, y)", hint=hint)
        found = body.given.children[0] if pair else body.given
        settled = leaves
        if found == shape:
            settled = [_promoted(x, out.type) for x, out in zip(leaves, body.graph.outputs, strict=False)]
        if all(a is b for a, b in zip(leaves, settled, strict=True)):
            _check_carry(where, found, body.graph.outputs, shape, types)
            return body, leaves
        leaves = settled


def _promoted(x: Any, given: TensorType) -> Any:
    """A first carry: a number whose type the body does not keep becomes an array of the type of both."""
    kind = weak_kind(x)
    if kind is None or type_of(x).dtype is given.dtype:
        return x
    wanted = promote(given.dtype, kind)
    return astype(x, wanted)


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


@eager
def scan(
    f: Fun, init: Any, xs: Any = None, length: Any = None, reverse: bool = False, checkpoints: int | None = None
) -> tuple[Any, Any]:
    """`carry, y = f(carry, x)` for each row x of xs: the last carry, and all y as rows.

    `checkpoints` is how many carries the gradient keeps (None: all that it needs); what is between is computed again.
    """
    rows = tree.leaves(xs)
    sizes = {type_of(x).shape[0] if type_of(x).rank else None for x in rows} | (
        {as_size(length)} if length is not None else set()
    )
    if len(sizes) != 1 or None in sizes:
        shown = ", ".join(str(type_of(x)) for x in rows)
        raise ShapeError(f"scan: length is {length}, xs are {shown or 'none'}; wanted one number of rows")
    steps: Size = next(iter(sizes))  # type: ignore[assignment]
    inner = [t.with_shape(*t.shape[1:]) for t in (type_of(x) for x in rows)]
    body, carry = _step("scan", f, init, xs, inner, pair=True)
    graph = _reordered(body, len(carry), body.captured)
    finals, ys = _trace().graph.scan_general(
        _values(carry), graph, steps, broadcasts=_values(body.captured), xs=_values(rows), reverse=reverse,
        checkpoints=checkpoints or 0,
    )  # fmt: skip
    given, printed = _parted(_made(ys), len(body.graph.outputs) - len(carry))
    if body.prints:
        number = count(_trace().graph, steps, I32)
        say(Repeated(body.prints, printed, number if isinstance(number, int) else _made([number])[0], reverse))
    return tree.structure(init).unflatten(_made(finals)), body.given.children[1].unflatten(given)


def _parted(values: Sequence[Traced], results: int) -> tuple[Sequence[Traced], Sequence[Traced]]:
    """What a body gives, and what it prints."""
    return values[:results], values[results:]


@eager
def while_loop(cond_fun: Fun, body_fun: Fun, init: Any, max_steps: int | None = None, *, truncate: bool = False) -> Any:
    """`carry = body_fun(carry)` as long as `cond_fun(carry)` holds; a gradient needs `max_steps`.

    A loop that has not ended after `max_steps` is a KernelError when it runs: a carry that was cut off looks like a
    result and is none. `truncate=True` gives that carry, for loops with a budget of steps.
    """
    if truncate and max_steps is None:
        raise GraphError("while_loop: truncate needs max_steps, after which the loop is cut off")
    shape = tree.structure(init)
    body, carry = _step("while_loop", body_fun, init, pair=False)
    weak = [is_weak(x) for x in carry]
    more = _body(cond_fun, init, types=[type_of(x) for x in carry], weak=weak, prints=False)
    if body.prints:
        return _printing_while(cond_fun, body, shape.unflatten(carry), shape, max_steps, truncate)
    captured = list(dict.fromkeys([*more.captured, *body.captured]))
    graphs = [_reordered(b, len(carry), captured) for b in (more, body)]
    found = _trace().graph.while_loop(_values(carry), *graphs, broadcasts=_values(captured), max_steps=max_steps)
    made = _made(found)
    if max_steps is not None and not truncate:
        (still,) = call(more.graph, [*made, *more.captured])
        made = [apply("ended", x, still) for x in made]
    return shape.unflatten(made)


def _printing_while(
    cond_fun: Fun, body: Function, init: Any, shape: tree.Structure, max_steps: int | None, truncate: bool
) -> Any:
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
    carry, number, rows = while_loop(lambda state: cond_fun(state[0]), step, start, max_steps, truncate=truncate)
    say(Repeated(body.prints, [r[:kept] for r in rows], number))
    return carry


def fori_loop(lower: Any, upper: Any, body_fun: Fun, init: Any) -> Any:
    """`carry = body_fun(i, carry)` for i from `lower` to below `upper`, whole numbers.

    Numbers that are known make a scan, which has a gradient; traced ones a while_loop.
    """
    for name, bound in (("lower", lower), ("upper", upper)):
        if not isinstance(bound, Dim) and (isinstance(bound, bool) or not type_of(bound).dtype.is_integer):
            raise DTypeError(f"fori_loop: {name} is {bound!r}, wanted a whole number", hint="cast it with int(...)")
    if is_traced(lower) or is_traced(upper):
        start = (lower if is_traced(lower) else as_array(lower), init)
        return while_loop(lambda c: c[0] < upper, lambda c: (c[0] + 1, body_fun(c[0], c[1])), start)[1]
    rows = arange(upper) if lower == 0 else arange(lower, upper)
    return scan(lambda carry, i: (body_fun(i, carry), None), init, rows)[0]


@eager
def _cond(predicate: Any, true_fun: Fun, false_fun: Fun, *operands: Any) -> Any:
    leaves, _ = tree.flatten(operands)
    types, weak = [type_of(x) for x in leaves], [is_weak(x) for x in leaves]
    yes, no = (_body(f, *operands, types=types, weak=weak) for f in (true_fun, false_fun))
    if yes.given != no.given:
        raise GraphError(f"cond: the branches give {yes.given} and {no.given}")
    wanted = _shared_types(yes, no)
    if wanted is not None:  # a branch that gives a number gives it in the type of the other
        yes, no = (_body(_cast(f, wanted), *operands, types=types, weak=weak) for f in (true_fun, false_fun))
    for a, b in zip(yes.graph.outputs, no.graph.outputs, strict=True):
        if a.type != b.type:
            raise ShapeError(f"cond: the branches give {a.type} and {b.type}", hint="cast one, or broadcast it")
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


def _shared_types(yes: Function, no: Function) -> list[DType | None] | None:
    """Element types for the outputs of both branches, where numbers among them yield to arrays; None: as they are."""
    wanted: list[DType | None] = []
    for a, b, weak_a, weak_b in zip(yes.graph.outputs, no.graph.outputs, yes.weak, no.weak, strict=True):
        if weak_a == weak_b:
            wanted.append(promote(a.dtype, b.dtype) if weak_a else None)
        else:
            array, number = (b, a) if weak_a else (a, b)
            wanted.append(promote(array.dtype, number.dtype.weak))
    differ = any(a.dtype is not b.dtype for a, b in zip(yes.graph.outputs, no.graph.outputs, strict=True))
    return wanted if differ else None


def _cast(function: Fun, wanted: Sequence[DType | None]) -> Fun:
    """The function with its outputs in these element types; None leaves one as it is."""

    def cast(*operands: Any) -> Any:
        leaves, shape = tree.flatten(function(*operands))
        return shape.unflatten([x if t is None else astype(x, t) for x, t in zip(leaves, wanted, strict=True)])

    cast.__name__ = getattr(function, "__name__", "branch")
    return cast


def cond(predicate: Any, true_fun: Fun, false_fun: Fun, *operands: Any) -> Any:
    """What one of two functions gives for the operands; only that one runs."""
    if not is_traced(predicate):
        return (true_fun if bool(predicate) else false_fun)(*operands)
    return _cond(predicate, true_fun, false_fun, *operands)
