"""Control flow over functions with JAX's signatures: scan, associative_scan, while_loop, fori_loop, cond, switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.dtypes import F64, I32, DType, promote
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.absent_keywords import without
from rlx.functional.arrays import (
    arange,
    asarray,
    astype,
    at,
    concatenate,
    expand_dims,
    flip,
    minimum,
    not_equal,
    pad,
    reshape,
    stack,
)
from rlx.functional.operands import is_traced
from rlx.functional.printing import emit
from rlx.functional.tracers import Repeated, Trace, Traced, as_array, current, is_weak, type_of, weak_kind
from rlx.functional.tracing import Function, apply, apply_graph, eager, eval_shape, trace_leaves
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.transforms.build import count, declare, zeros
from rlx.types import Dim, Size, TensorType, as_size, axis_index

Fun = Callable[..., Any]
MAX_PRINTED_STEPS = 1000  # steps of a while_loop whose values are stored for printing


def _trace() -> Trace:
    trace = current()
    assert trace is not None
    return trace


def _body(
    function: Fun, *arguments: Any, types: Sequence[TensorType], weak: Sequence[bool], prints: bool = True
) -> Function:
    """Trace a function of trees whose leaves have these types."""
    return trace_leaves(function, tree.structure((arguments, {})), types, weak=weak, prints=prints)


def _step(
    where: str, function: Fun, init: Any, xs: Any = None, rows: Sequence[TensorType] = (), *, pair: bool
) -> tuple[Function, list[Any]]:
    """Trace the body of a loop; returns it and the leaves of the initial carry, cast to types that no step changes.

    A carry that begins as a Python number takes the dtype that the body returns, as in JAX: `scan(f, 0.0, np.ones(3))`
    is f64.
    """
    leaves, shape = tree.flatten(init)
    started = [type_of(x) for x in leaves]
    while True:
        types, weak = [type_of(x) for x in leaves], [is_weak(x) for x in leaves]
        arguments = (init, xs) if pair else (init,)
        body = _body(function, *arguments, types=[*types, *rows], weak=[*weak, *[False] * len(rows)])
        if pair and (body.structure.kind not in (tuple, list) or len(body.structure.children) != 2):
            hint = "return carry, y; y may be None"
            raise GraphError(f"{where}: the function returns {body.structure}, expected a pair (carry, y)", hint=hint)
        carry_structure = body.structure.children[0] if pair else body.structure
        promoted = leaves
        if carry_structure == shape:
            promoted = [_promoted(x, out.type) for x, out in zip(leaves, body.graph.outputs, strict=False)]
        if all(a is b for a, b in zip(leaves, promoted, strict=True)):
            _check_carry(where, carry_structure, body.graph.outputs, shape, types, started)
            return body, leaves
        leaves = promoted


def _promoted(x: Any, returned: TensorType) -> Any:
    """Cast an initial carry that is a Python number to the dtype that the body returns."""
    kind = weak_kind(x)
    if kind is None or type_of(x).dtype is returned.dtype:
        return x
    wanted = promote(returned.dtype, kind)
    return astype(x, wanted)


def _reordered(body: Function, count: int, captured: Sequence[Traced]) -> Graph:
    """Return the graph with all captured values (its own and those of others) after its first `count` inputs."""
    graph = Graph(body.graph.name)
    inputs = body.full_graph.inputs
    own = len(inputs) - len(body.captured)
    first = [declare(graph, n.attrs["name"], n.types[0]) for n in inputs[:count]]
    shared = {x: declare(graph, "captured", x.value.type) for x in captured}
    rest = [declare(graph, n.attrs["name"], n.types[0]) for n in inputs[count:own]]
    return graph.set_outputs(inline(graph, body.full_graph, [*first, *rest, *(shared[x] for x in body.captured)]))


def _values(leaves: Sequence[Any]) -> list[Value]:
    trace = _trace()
    return [trace.constant(x) for x in leaves]


def _as_traced(values: Sequence[Value]) -> list[Traced]:
    trace = _trace()
    return [Traced(trace, v) for v in values]


def _check_carry(
    where: str, structure: tree.Structure, outputs: Sequence[Value], wanted: tree.Structure,
    types: Sequence[TensorType], started: Sequence[TensorType],
) -> None:  # fmt: skip
    """Raise if a step changes the type of the carry; `started` are its types before Python numbers were cast."""
    if structure != wanted:
        hint = "the function returns a carry with the structure of the initial one"
        raise GraphError(f"{where}: the carry is {wanted}, the function returns {structure}", hint=hint)
    for path, value, type_, first in zip(wanted.paths("carry"), outputs, types, started, strict=False):
        if value.type != type_:
            hint = "start with the type that the function returns, or cast inside"
            if value.type.shape != type_.shape:
                hint = "a carry keeps its shape in every step: start with the shape that the function returns"
                if where == "scan":
                    hint += ", and collect results as the second one, return carry, y"
            if value.type.shape == type_.shape and type_.dtype.is_float and value.dtype is F64:
                hint = (
                    f"an f64 array, as np.ones(3) is, makes the result f64: create it with dtype=np.{type_.dtype.numpy}"
                )
            raise ShapeError(f"{where}: {path} starts as {first}, the function returns {value.type}", hint=hint)


@without(unroll="a scan is a loop in machine code; a Python loop is unrolled")
@eager
def scan(
    f: Fun, init: Any, xs: Any = None, length: Any = None, reverse: bool = False, checkpoints: int | None = None
) -> tuple[Any, Any]:
    """Run `carry, y = f(carry, x)` for each row x of xs; returns the last carry and all y stacked as rows.

    `checkpoints` is how many carries the gradient stores (None: all that it needs); the others are recomputed.
    """
    rows = tree.leaves(xs)
    sizes = {type_of(x).shape[0] if type_of(x).rank else None for x in rows} | (
        {as_size(length)} if length is not None else set()
    )
    if len(sizes) != 1 or None in sizes:
        shown = ", ".join(str(type_of(x)) for x in rows)
        hint = "give xs with one row per step, or length="
        raise ShapeError(f"scan: length is {length}, xs are {shown or 'none'}; expected one number of rows", hint=hint)
    steps: Size = next(iter(sizes))  # type: ignore[assignment]
    inner = [t.with_shape(*t.shape[1:]) for t in (type_of(x) for x in rows)]
    body, carry = _step("scan", f, init, xs, inner, pair=True)
    graph = _reordered(body, len(carry), body.captured)
    finals, ys = _trace().graph.scan_general(
        _values(carry), graph, steps, broadcasts=_values(body.captured), xs=_values(rows), reverse=reverse,
        checkpoints=checkpoints or 0,
    )  # fmt: skip
    y_leaves, printed = _split_printed(_as_traced(ys), len(body.graph.outputs) - len(carry))
    if body.prints:
        number = count(_trace().graph, steps, I32)
        emit(Repeated(body.prints, printed, number if isinstance(number, int) else _as_traced([number])[0], reverse))
    return tree.structure(init).unflatten(_as_traced(finals)), body.structure.children[1].unflatten(y_leaves)


def _split_printed(values: Sequence[Traced], results: int) -> tuple[Sequence[Traced], Sequence[Traced]]:
    """Split the outputs of a body into its results and its printed values."""
    return values[:results], values[results:]


@eager
def while_loop(cond_fun: Fun, body_fun: Fun, init: Any, max_steps: int | None = None, *, truncate: bool = False) -> Any:
    """Run `carry = body_fun(carry)` while `cond_fun(carry)` holds; gradients need `max_steps`.

    A loop that has not ended after `max_steps` raises a KernelError at run time, since a truncated carry is easily
    mistaken for a result. `truncate=True` returns that carry, for loops with a step budget.
    """
    if truncate and max_steps is None:
        raise GraphError("while_loop: truncate needs max_steps, after which the loop is cut off")
    shape = tree.structure(init)
    body, carry = _step("while_loop", body_fun, init, pair=False)
    weak = [is_weak(x) for x in carry]
    more = _body(cond_fun, init, types=[type_of(x) for x in carry], weak=weak, prints=False)
    if [(o.type.rank, o.dtype.is_bool) for o in more.graph.outputs] != [(0, True)]:
        shown = ", ".join(str(o.type) for o in more.graph.outputs) or "nothing"
        hint = "compare it with a number, as in c > 0, or use np.any(c)"
        raise DTypeError(f"while_loop: cond_fun returns {shown}, expected one bool", hint=hint)
    if body.prints:
        return _printing_while(cond_fun, body, shape.unflatten(carry), shape, max_steps, truncate)
    captured = list(dict.fromkeys([*more.captured, *body.captured]))
    graphs = [_reordered(b, len(carry), captured) for b in (more, body)]
    values = _trace().graph.while_loop(_values(carry), *graphs, broadcasts=_values(captured), max_steps=max_steps)
    final = _as_traced(values)
    if max_steps is not None and not truncate:
        (running,) = apply_graph(more.graph, [*final, *more.captured])
        final = [apply("ended", x, running) for x in final]
    return shape.unflatten(final)


def _printing_while(
    cond_fun: Fun, body: Function, init: Any, shape: tree.Structure, max_steps: int | None, truncate: bool
) -> Any:
    """Run a while_loop that also carries the step count, and the values that its first steps print, as rows."""
    capacity = MAX_PRINTED_STEPS if max_steps is None else min(max_steps, MAX_PRINTED_STEPS)
    types = [o.type for o in body.full_graph.outputs[len(body.graph.outputs) :]]
    graph = _trace().graph
    # The last row is scratch space for steps beyond the capacity.
    empty = _as_traced([zeros(graph, t.with_shape(capacity + 1, *t.shape)) for t in types])

    def step(state: Any) -> Any:
        carry, number, rows = state
        outputs = apply_graph(body.full_graph, [*tree.leaves(carry), *body.captured])
        results, shown = _split_printed(outputs, len(body.graph.outputs))
        place = minimum(number, capacity)
        return shape.unflatten(results), number + 1, [at(r)[place].set(v) for r, v in zip(rows, shown, strict=True)]

    start = (init, as_array(0), empty)
    carry, number, rows = while_loop(lambda state: cond_fun(state[0]), step, start, max_steps, truncate=truncate)
    emit(Repeated(body.prints, [r[:capacity] for r in rows], number))
    return carry


def fori_loop(lower: Any, upper: Any, body_fun: Fun, init: Any) -> Any:
    """Run `carry = body_fun(i, carry)` for integers i in [lower, upper).

    Static bounds become a scan, which has a gradient; traced bounds become a while_loop, which has none (a while_loop
    of your own with `max_steps=` has).
    """
    for name, bound in (("lower", lower), ("upper", upper)):
        if not isinstance(bound, Dim) and (isinstance(bound, bool) or not type_of(bound).dtype.is_integer):
            raise DTypeError(f"fori_loop: {name} is {bound!r}, expected an integer", hint="cast it with int(...)")
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
    if yes.structure != no.structure:
        hint = "both branches return trees of the same structure"
        raise GraphError(f"cond: the branches return {yes.structure} and {no.structure}", hint=hint)
    wanted = _shared_types(yes, no)
    if wanted is not None:  # Python numbers take the dtype of the other branch
        yes, no = (_body(_cast(f, wanted), *operands, types=types, weak=weak) for f in (true_fun, false_fun))
    for a, b in zip(yes.graph.outputs, no.graph.outputs, strict=True):
        if a.type != b.type:
            raise ShapeError(f"cond: the branches return {a.type} and {b.type}", hint="cast one, or broadcast it")
    captured = list(dict.fromkeys([*yes.captured, *no.captured]))
    graphs = [_reordered(b, len(leaves), captured) for b in (yes, no)]
    results = len(yes.graph.outputs)
    shown = [[o.type for o in g.outputs[results:]] for g in graphs]
    for i, g in enumerate(graphs):  # a branch returns zeros for values that the other one prints
        before, after = ([zeros(g, t) for types in part for t in types] for part in (shown[:i], shown[i + 1 :]))
        g.set_outputs([*g.outputs[:results], *before, *g.outputs[results:], *after])
    trace = _trace()
    outputs = trace.graph.cond(trace.constant(predicate), _values([*leaves, *captured]), *graphs)
    values = _as_traced(outputs if isinstance(outputs, tuple) else (outputs,))
    for branch, first in ((yes, results), (no, results + len(shown[0]))):
        if branch.prints:
            printed = values[first : first + len(branch.full_graph.outputs) - results]
            is_true = Traced(trace, trace.constant(predicate)).astype("i32")
            steps = is_true if branch is yes else 1 - is_true
            emit(Repeated(branch.prints, [expand_dims(v, 0) for v in printed], steps))
    return yes.outputs(values[:results])


def _shared_types(yes: Function, no: Function) -> list[DType | None] | None:
    """Return common dtypes of both branches' outputs, where Python numbers yield to arrays; None if they agree."""
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
    """Wrap the function to cast its outputs to these dtypes; None leaves an output unchanged."""

    def cast(*operands: Any) -> Any:
        leaves, shape = tree.flatten(function(*operands))
        return shape.unflatten([x if t is None else astype(x, t) for x, t in zip(leaves, wanted, strict=True)])

    cast.__name__ = getattr(function, "__name__", "branch")
    return cast


def cond(predicate: Any, true_fun: Fun, false_fun: Fun, *operands: Any) -> Any:
    """Return `true_fun(*operands)` or `false_fun(*operands)`; only the chosen one runs.

    A number is true unless it is 0. If the predicate is traced, both branches must return the same types; otherwise the
    chosen one is simply called.
    """
    type_ = type_of(predicate)
    if type_.rank:
        hint = "rlx.where chooses by element; np.any(x) and np.all(x) are one bool"
        raise ShapeError(f"cond: the predicate is {type_}, expected one bool", hint=hint)
    if not is_traced(predicate):
        return (true_fun if bool(predicate) else false_fun)(*operands)
    return _cond(predicate if type_.dtype.is_bool else not_equal(predicate, 0), true_fun, false_fun, *operands)


def switch(index: Any, branches: Sequence[Fun], *operands: Any) -> Any:
    """Return `branches[index](*operands)`; only the chosen branch runs. An index out of range takes the nearest one."""
    functions = list(branches)
    if not functions or not all(map(callable, functions)):
        raise GraphError(f"switch: branches are {branches!r}, expected a list of functions")
    type_ = type_of(index)
    if type_.rank or not type_.dtype.is_integer:
        raise DTypeError(f"switch: the index is {type_}, expected one integer", hint="rlx.cond takes a bool")
    if not is_traced(index):
        return functions[min(max(int(index), 0), len(functions) - 1)](*operands)
    try:
        return _switch(index, functions, operands)
    except GraphError:
        _check_branches(functions, operands)  # says which branches differ
        raise


def _switch(index: Any, functions: list[Fun], operands: tuple[Any, ...]) -> Any:
    if len(functions) == 1:
        return functions[0](*operands)
    half = len(functions) // 2
    return cond(
        index < half,
        lambda *xs: _switch(index, functions[:half], xs),
        lambda *xs: _switch(index - half, functions[half:], xs),
        *operands,
    )


def _check_branches(functions: Sequence[Fun], operands: tuple[Any, ...]) -> None:
    results = [eval_shape(f, *operands) for f in functions]
    for i, result in enumerate(results[1:], 1):
        if tree.structure(result) != tree.structure(results[0]):
            structures = tree.structure(result), tree.structure(results[0])
            raise GraphError(f"switch: branch {i} returns {structures[0]}, branch 0 {structures[1]}")
        for a, b in zip(tree.leaves(result), tree.leaves(results[0]), strict=True):
            if a != b:
                raise ShapeError(f"switch: branch {i} returns {a}, branch 0 {b}", hint="cast one, or broadcast it")


@eager
def associative_scan(fn: Fun, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combine rows from the first to each: y[i] = fn(y[i - 1], x[i]), in about 2 log2(n) calls of `fn`.

    `fn(a, b)` is associative and takes many rows at once, as slices of `elems` along the axis; elems is a tree.
    """
    leaves, shape = tree.flatten(elems)
    if not leaves:
        raise GraphError("associative_scan: elems has no arrays")
    leaves = [asarray(x) for x in leaves]
    axes = [axis_index(axis, type_of(x).rank, "associative_scan") for x in leaves]
    sizes = {type_of(x).shape[a] for x, a in zip(leaves, axes, strict=True)}
    if len(sizes) != 1 or not isinstance(next(iter(sizes)), int):
        shown = ", ".join(str(type_of(x)) for x in leaves)
        raise ShapeError(f"associative_scan: elems are {shown}; expected one static size on axis {axis}")
    types = [type_of(x) for x in leaves]

    def rows(parts: Sequence[Any], key: slice) -> list[Any]:
        return [x[(*[slice(None)] * a, key)] for x, a in zip(parts, axes, strict=True)]

    def combine(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        results, structure = tree.flatten(fn(shape.unflatten(a), shape.unflatten(b)))
        if structure != shape:
            raise GraphError(f"associative_scan: elems are {shape}, the function returns {structure}")
        for result, part, type_ in zip(results, a, types, strict=True):
            wanted = type_.with_shape(*type_of(part).shape)
            if type_of(result) != wanted:
                hint = "fn takes and returns many rows at once"
                raise ShapeError(f"associative_scan: fn returns {type_of(result)} for {wanted}", hint=hint)
        return results

    def scan_parts(parts: Sequence[Any], n: int) -> Sequence[Any]:
        """Combine neighbours, scan the pairs, and combine these with the rows between them."""
        if n < 2:
            return parts
        odd = scan_parts(combine(rows(parts, slice(0, n - 1, 2)), rows(parts, slice(1, None, 2))), n // 2)
        even = rows(parts, slice(0, 1))
        if n > 2:
            later = combine(rows(odd, slice(0, (n - 1) // 2)), rows(parts, slice(2, None, 2)))
            even = [concatenate([a, b], axis) for a, b, axis in zip(even, later, axes, strict=True)]
        return [_interleave(a, b, n, axis) for a, b, axis in zip(even, odd, axes, strict=True)]

    if reverse:
        leaves = [flip(x, a) for x, a in zip(leaves, axes, strict=True)]
    results = scan_parts(leaves, int(next(iter(sizes))))
    if reverse:
        results = [flip(x, a) for x, a in zip(results, axes, strict=True)]
    return shape.unflatten(results)


def _interleave(even: Any, odd: Any, n: int, axis: int) -> Any:
    """Return n rows: even[0], odd[0], even[1], odd[1], ..."""
    if n % 2:  # even has one more row
        padding = [(0, int(a == axis)) for a in range(type_of(odd).rank)]
        odd = pad(odd, padding)
    both = stack([even, odd], axis + 1)
    shape = list(type_of(even).shape)
    shape[axis] = 2 * ((n + 1) // 2)
    return reshape(both, shape)[(*[slice(None)] * axis, slice(0, n))]
