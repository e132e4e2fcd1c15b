"""Loops and branches: ops that run graphs. A body reads its inputs in declaration order.

`scan` is the loop whose number of steps is known when it starts, `while_loop` runs until its condition is false, `cond`
runs one of two graphs. Bodies see nothing but their inputs and constants: weights are passed as broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import BindError, DTypeError, GraphError, KernelError, ShapeError
from rlx.ir import evaluate
from rlx.ir.graph import Graph
from rlx.ir.independence import never
from rlx.ir.registry import CONTROL, FUSED, TAKES_PACKED, op
from rlx.types import Size, TensorType, broadcast, require_equal
from rlx.types import evaluate as size_of

Binding = Mapping[str, int]
Arrays = Sequence[Any]


# -- checks -----------------------------------------------------------------------------------------------------------
def _check_inputs(where: str, body: Graph, wanted: Sequence[tuple[str, TensorType]]) -> None:
    """Check the body's inputs: `wanted` has a name and a type for each."""
    if not isinstance(body, Graph):
        raise GraphError(f"{where}: its body is a {type(body).__name__}, not a Graph")
    for leaf in body.nodes:
        if leaf.op in ("param", "state"):
            hint = "declare it as an input of the body and hand it in as a broadcast"
            raise GraphError(f"{where}: graph {body.name!r} has the {leaf.op} {leaf.attrs['name']!r}", hint=hint)
    inputs = body.inputs
    if len(inputs) != len(wanted):
        shown = ", ".join(label for label, _ in wanted) or "nothing"
        raise GraphError(f"{where}: graph {body.name!r} has {len(inputs)} inputs, it is given {len(wanted)}: {shown}")
    for node, (label, type_) in zip(inputs, wanted, strict=True):
        _same(f"{where}: input {node.attrs['name']!r} of graph {body.name!r}", node.types[0], label, type_)


def _same(where: str, actual: TensorType, label: str, wanted: TensorType) -> None:
    if actual == wanted:
        return
    error = DTypeError if actual.shape == wanted.shape else ShapeError
    raise error(f"{where} is {actual}, {label} is {wanted}")


def _check_carries(where: str, body: Graph, carries: Sequence[TensorType]) -> None:
    """Check that the first outputs of a body are its carries."""
    if len(body.outputs) < len(carries):
        raise GraphError(f"{where}: {len(carries)} carries, graph {body.name!r} has {len(body.outputs)} outputs")
    for i, (output, carry) in enumerate(zip(body.outputs, carries, strict=False)):
        _same(f"{where}: output {i} of graph {body.name!r}", output.type, f"carry {i}", carry)


def _check_bool(where: str, role: str, type_: TensorType) -> None:
    if not type_.dtype.is_bool or type_.elements != 1:
        raise DTypeError(f"{where}: {role} is one bool, found {type_}")


def _check_count(where: str, name: str, count: Any, limit: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= limit:
        raise GraphError(f"{where}: {name} is {count!r}, there are {limit} operands")
    return count


def _check_plain(where: str, labelled: Sequence[tuple[str, TensorType]]) -> None:
    """Check that carries and sliced inputs are not packed; broadcasts may be."""
    for label, type_ in labelled:
        if type_.dtype.is_packed:
            raise DTypeError(f"{where}: {label} is {type_}, which is packed", hint="unpack it with x.dequantise()")


def _label(noun: str, types: Sequence[TensorType]) -> list[tuple[str, TensorType]]:
    return [(f"{noun} {i}", t) for i, t in enumerate(types)]


# -- meanings ---------------------------------------------------------------------------------------------------------
def run_body(body: Graph, arrays: Arrays, binding: Binding) -> list[Any]:
    """The outputs of a body; narrow floats, which references widen, are narrowed inside."""
    pairs = zip(body.inputs, arrays, strict=True)
    leaves = {n.attrs["name"]: np.asarray(a).astype(n.types[0].dtype.numpy, copy=False) for n, a in pairs}
    return evaluate.run(body, leaves, binding)


def _scan(
    *operands: Any, body: Graph, length: int, carries: int, broadcasts: int, reverse: bool, checkpoints: int,
    binding: Binding,
) -> tuple[Any, ...]:  # fmt: skip
    state, shared, xs = list(operands[:carries]), operands[carries:][:broadcasts], operands[carries + broadcasts :]
    ys = []
    for o in body.outputs[carries:]:
        sizes = [size_of(d, binding) for d in o.shape]
        if min(sizes, default=0) < 0:
            raise BindError(f"scan: 0 is 0, more than {o.shape[sizes.index(min(sizes))]}, which is {min(sizes)}")
        ys.append(np.zeros((length, *sizes), o.dtype.numpy))
    for t in reversed(range(length)) if reverse else range(length):
        results = run_body(body, [*state, *shared, *(x[t] for x in xs)], binding)
        state = results[:carries]
        for y, row in zip(ys, results[carries:], strict=True):
            y[t] = row
    return (*state, *ys)


@op("scan", independent=never, reference=_scan, traits=[CONTROL, TAKES_PACKED])
def scan(
    *operands: TensorType,
    body: Graph,
    length: Size,
    carries: int,
    broadcasts: int = 0,
    reverse: bool = False,
    checkpoints: int = 0,
) -> tuple[TensorType, ...]:
    """Runs a body `length` times, passing its carries from step to step.

    Operands are the initial carries, then broadcasts, which every step sees in full, then xs, of which step t sees row
    t. The body takes the carries, the broadcasts and one row of each xs, and returns the next carries and then ys.
    Results are the last carries and each y of all steps, `[length, *y]`. `reverse` walks the rows from the last to the
    first. `checkpoints` does not affect the result: it is the number of steps whose carries are stored for a gradient
    (0: all).
    """
    if isinstance(length, bool) or (isinstance(length, int) and length < 0):
        raise ShapeError(f"scan: length is {length}")
    n = _check_count("scan", "carries", carries, len(operands))
    m = _check_count("scan", "broadcasts", broadcasts, len(operands) - n)
    if isinstance(length, int) and not 0 <= checkpoints <= length:
        raise GraphError(f"scan: checkpoints is {checkpoints}, length is {length}")
    state, shared, xs = operands[:n], operands[n : n + m], operands[n + m :]
    _check_plain("scan", _label("carry", state) + _label("xs", xs))
    rows = []
    for i, x in enumerate(xs):
        if x.rank == 0:
            raise ShapeError(f"scan: xs {i} is {x}, a row a step needs an axis")
        require_equal(x.shape[0], length, f"scan: xs {i} has {x.shape[0]} rows, length is {length}")
        rows.append(x.with_shape(*x.shape[1:]))
    labels = _label("carry", state) + _label("broadcast", shared) + _label("a row of xs", rows)
    _check_inputs("scan", body, labels)
    _check_carries("scan", body, state)
    if not body.outputs:
        raise GraphError(f"scan: graph {body.name!r} gives nothing")
    return (*state, *(TensorType((length, *o.shape), o.dtype) for o in body.outputs[n:]))


def _while_loop(
    *operands: Any, cond: Graph, body: Graph, carries: int, max_steps: int | None, binding: Binding
) -> tuple[Any, ...]:
    state, shared = list(operands[:carries]), operands[carries:]
    steps = 0
    while max_steps is None or steps < max_steps:
        (more,) = run_body(cond, [*state, *shared], binding)
        if not more.item():
            break
        state = run_body(body, [*state, *shared], binding)
        steps += 1
    return tuple(state)


@op("while_loop", independent=never, reference=_while_loop, traits=[CONTROL, TAKES_PACKED])
def while_loop(
    *operands: TensorType, cond: Graph, body: Graph, carries: int, max_steps: int | None = None
) -> tuple[TensorType, ...]:
    """Runs a body as long as `cond` is true, and at most `max_steps` times.

    Operands are the initial carries, then broadcasts. Both graphs take all of them; `cond` returns one bool, `body` the
    next carries. Results are the last carries.
    """
    n = _check_count("while_loop", "carries", carries, len(operands))
    if n == 0:
        raise GraphError("while_loop: needs a carry, nothing else could change")
    if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0):
        raise GraphError(f"while_loop: max_steps is {max_steps!r}")
    _check_plain("while_loop", _label("carry", operands[:n]))
    labels = _label("carry", operands[:n]) + _label("broadcast", operands[n:])
    for graph in (cond, body):
        _check_inputs("while_loop", graph, labels)
    if len(cond.outputs) != 1:
        raise GraphError(f"while_loop: cond gives one bool, graph {cond.name!r} has {len(cond.outputs)} outputs")
    _check_bool("while_loop", "what cond gives", cond.outputs[0].type)
    if len(body.outputs) != n:
        raise GraphError(f"while_loop: {n} carries, graph {body.name!r} has {len(body.outputs)} outputs")
    _check_carries("while_loop", body, operands[:n])
    return tuple(operands[:n])


def _ended(x: Any, more: Any) -> Any:
    if more.any():
        raise KernelError("while_loop: its condition still holds after max_steps")
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, more.shape))


@op("ended", independent=never, reference=_ended, traits=[FUSED])
def ended(x: TensorType, more: TensorType) -> TensorType:
    """`x`, a result of a while loop with `max_steps`; an error at run time if `more`, its condition, still holds."""
    if not more.dtype.is_bool:
        raise DTypeError(f"ended: a condition is bool, found {more}")
    return x.with_shape(*broadcast(x.shape, more.shape, where="ended"))


def _cond(predicate: Any, *operands: Any, then_body: Graph, else_body: Graph, binding: Binding) -> tuple[Any, ...]:
    return tuple(run_body(then_body if predicate.item() else else_body, operands, binding))


@op("cond", independent=never, reference=_cond, traits=[CONTROL, TAKES_PACKED])
def cond(
    predicate: TensorType, *operands: TensorType, then_body: Graph, else_body: Graph
) -> TensorType | tuple[TensorType, ...]:
    """Runs one of two graphs: `then_body` if the predicate, one bool, is true, else `else_body`; never both.

    Both take the operands and return results of the same types.
    """
    _check_bool("cond", "the predicate", predicate)
    for graph in (then_body, else_body):
        _check_inputs("cond", graph, _label("operand", operands))
    one, other = (tuple(o.type for o in g.outputs) for g in (then_body, else_body))
    if len(one) != len(other):
        raise GraphError(f"cond: then_body has {len(one)} outputs, else_body has {len(other)}")
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        _same(f"cond: output {i} of then_body", a, "that of else_body", b)
    if not one:
        raise GraphError("cond: its bodies give nothing")
    return one
