"""Builders for loops and branches on `Graph`, all in terms of the ops `scan`, `while_loop` and `cond`.

A body is a graph whose inputs are, in declaration order: carries, broadcasts, one row of each xs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import GraphError, ShapeError, nearest
from rlx.fast_dataclass import dataclass
from rlx.types import ShapeLike, Size, as_shape, as_size

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node, Value


class ControlBuilders:
    """Mixin of `Graph`: builders for ops whose attributes are graphs."""

    if TYPE_CHECKING:
        limits: dict[str, int]

        def build(self, op: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Node: ...
        def one(self, op: str, *operands: Any, **attrs: Any) -> Value: ...
        def constant(self, data: Any, dtype: Any = None) -> Value: ...
        def _value(self, where: str, operand: Any, scalar_type: Any) -> Value: ...

    def _control(self, op: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Node:
        node = self.build(op, operands, attrs)
        for body in node.attrs.values():
            for symbol, limit in getattr(body, "limits", {}).items():  # limits of a body apply to the graph
                self.limits[symbol] = min(limit, self.limits.get(symbol, limit))
        return node

    # -- scans ----------------------------------------------------------------------------------------------------
    def scan_general(
        self,
        carries: Sequence[Any],
        body: Graph,
        length: Size,
        *,
        broadcasts: Sequence[Any] = (),
        xs: Sequence[Any] = (),
        reverse: bool = False,
        checkpoints: int = 0,
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The general scan: returns the last carries, and ys `[length, *y]` stacked from the body's other outputs."""
        operands = (*carries, *broadcasts, *xs)
        attrs = {
            "body": body, "length": as_size(length), "carries": len(carries), "broadcasts": len(broadcasts),
            "reverse": reverse, "checkpoints": checkpoints,
        }  # fmt: skip
        results = self._control("scan", operands, attrs).results
        return results[: len(carries)], results[len(carries) :]

    def scan(self, init: Any, body: Graph, length: Size) -> Value:
        """The carry after `length` steps of `body`, which maps a carry to the next one."""
        return self.scan_with_bcasts_and_xs(init, (), (), body, length)

    def scan_with_xs(self, init: Any, xs: Sequence[Any], body: Graph, length: Size) -> Value:
        """`scan` with inputs `[length, *step]`; step t sees row t."""
        return self.scan_with_bcasts_and_xs(init, (), xs, body, length)

    def scan_with_bcasts_and_xs(
        self, init: Any, bcasts: Sequence[Any], xs: Sequence[Any], body: Graph, length: Size
    ) -> Value:
        """`scan_with_xs` with additional inputs that every step sees in full."""
        finals, _ = self.scan_general([init], _one_carry(body), length, broadcasts=bcasts, xs=xs)
        return finals[0]

    def scan_trajectory(self, init: Any, body: Graph, length: Size) -> Value:
        """The carries after each step, `[length, *carry]`; the last row is the result of `scan`."""
        return self.scan_general([init], _with_outputs(_one_carry(body), (0, 0)), length)[1][0]

    def scan_checkpointed(self, init: Any, body: Graph, length: int, num_checkpoints: int) -> Value:
        """The result of `scan`. Its gradient stores `num_checkpoints` carries and recomputes the others."""
        for name, value in (("length", length), ("num_checkpoints", num_checkpoints)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise GraphError(f"scan_checkpointed: {name} is {value!r}, expected a number of steps")
        if not 1 <= num_checkpoints <= length:
            hint = f"choose from 1 to {length}; scan keeps all"
            raise GraphError(f"scan_checkpointed: {num_checkpoints} checkpoints for {length} steps", hint=hint)
        return self.scan_general([init], _one_carry(body), length, checkpoints=num_checkpoints)[0][0]

    # -- scans backwards ------------------------------------------------------------------------------------------
    def scan_backward(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size, *,
        save_trajectory: bool, out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """The gradient of `init`, by one scan from the last step to the first.

        `trajectory` is the result of `scan_trajectory`. `upstream` is the gradient of all its rows (`save_trajectory`),
        or of the last carry. `body_vjp` takes the inputs of the body and `d_output`, and returns the gradients of the
        carry and of a row of each xs.
        """
        sweep = self._sweep("scan_backward", (init, trajectory, upstream, *xs), body_vjp, length, save_trajectory)
        return self._gradient(sweep, 0, out_shape)

    def scan_backward_xs(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: Size,
        xs_idx: int, *, save_trajectory: bool, out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """The gradient of `xs[xs_idx]`, `[length, *step]`; shares a scan with `scan_backward` of the same operands."""
        sweep = self._sweep("scan_backward_xs", (init, trajectory, upstream, *xs), body_vjp, length, save_trajectory)
        return self._gradient(sweep, sweep.result(xs_idx), out_shape)

    def scan_backward_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int,
        num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """`scan_backward` from K = `num_checkpoints` carries; those in between are recomputed with `forward_body`.

        `trajectory` is `[K, *carry]`: row k is the carry after the first ceil((k + 1) * length / K) steps. A K of 0 or
        `length` means all rows.
        """
        sweep = self._sweep(
            "scan_backward_with_checkpoints", (init, trajectory, upstream, *xs), body_vjp, length, save_trajectory,
            num_checkpoints, forward_body,
        )  # fmt: skip
        return self._gradient(sweep, 0, out_shape)

    def scan_backward_xs_with_checkpoints(
        self, init: Any, trajectory: Any, upstream: Any, xs: Sequence[Any], body_vjp: Graph, length: int,
        xs_idx: int, num_checkpoints: int, forward_body: Graph | None = None, *, save_trajectory: bool,
        out_shape: ShapeLike | None = None,
    ) -> Value:  # fmt: skip
        """`scan_backward_xs` from checkpoints, as in `scan_backward_with_checkpoints`."""
        sweep = self._sweep(
            "scan_backward_xs_with_checkpoints", (init, trajectory, upstream, *xs), body_vjp, length, save_trajectory,
            num_checkpoints, forward_body,
        )  # fmt: skip
        return self._gradient(sweep, sweep.result(xs_idx), out_shape)

    def _sweep(self, where: str, operands: Sequence[Any], body_vjp: Graph, length: Size, *rest: Any) -> _Sweep:
        init, trajectory, upstream, *xs = (self._value(where, o, None) for o in operands)
        sweep = _Sweep(where, init, trajectory, upstream, xs, body_vjp, as_size(length), *rest)
        sweep.check()
        return sweep

    def _gradient(self, sweep: _Sweep, which: int, out_shape: ShapeLike | None) -> Value:
        """One gradient of a sweep, checked against the caller's shape."""
        wanted = sweep.init if which == 0 else sweep.xs[which - 1]
        if out_shape is not None and wanted.shape != as_shape(out_shape):
            shown = ", ".join(map(str, as_shape(out_shape)))
            raise ShapeError(f"{sweep.where}: the result is {wanted.type}, out_shape is [{shown}]")
        return self._gradients(sweep)[which]

    def _gradients(self, sweep: _Sweep) -> tuple[Value, ...]:
        """The gradients of the first carry and of all xs. Equal sweeps are equal nodes, which CSE merges."""
        carry = sweep.init.type
        start = sweep.upstream
        if sweep.save_trajectory:
            start = self.one("expand", self.constant(0, carry.dtype), shape=carry.shape)
        first = sweep.init.reshape(1, *carry.shape)
        before = self.one("concatenate", first, sweep.trajectory, axis=0)  # [rows + 1, *carry]
        before = before[: sweep.trajectory.shape[0]]
        rows = [sweep.upstream] if sweep.save_trajectory else []
        rows += sweep.xs
        if not sweep.recomputes:
            finals, ys = self.scan_general([start], _step_back(sweep), sweep.length, xs=[before, *rows], reverse=True)
            return (*finals, *ys)
        parts = _Segments(int(sweep.length), sweep.checkpoints)
        mask = [self.constant(parts.valid)] if parts.uneven else []
        cut = [self._split(row, parts) for row in rows]
        body = _segment_back(sweep, parts)
        finals, ys = self.scan_general([start], body, parts.count, xs=[before, *mask, *cut], reverse=True)
        return (*finals, *(self._join(y, parts) for y in ys))

    def _split(self, rows: Value, parts: _Segments) -> Value:
        """[length, ...] to [segments, steps, ...]; short segments end with a row of the next."""
        if parts.uneven:
            rows = self.one("gather", rows, parts.rows, axis=0)
        return rows.reshape(parts.count, parts.steps, *rows.shape[1:])

    def _join(self, parts_of: Value, parts: _Segments) -> Value:
        """[segments, steps, ...] to [length, ...]."""
        flat = parts_of.reshape(parts.count * parts.steps, *parts_of.shape[2:])
        return self.one("gather", flat, parts.places, axis=0) if parts.uneven else flat

    # -- while and if ---------------------------------------------------------------------------------------------
    def while_loop(
        self, init: Any, cond: Graph, body: Graph, *, broadcasts: Sequence[Any] = (), max_steps: int | None = None
    ) -> Any:
        """The carries once `cond` returns false, or after `max_steps` steps; one value, or a tuple for a tuple."""
        carries = tuple(init) if isinstance(init, (tuple, list)) else (init,)
        attrs = {"cond": cond, "body": body, "carries": len(carries), "max_steps": max_steps}
        results = self._control("while_loop", (*carries, *broadcasts), attrs).results
        return results if isinstance(init, (tuple, list)) else results[0]

    def cond(self, predicate: Any, operands: Sequence[Any], then_body: Graph, else_body: Graph) -> Any:
        """The outputs of `then_body` if the predicate is true, else those of `else_body`; only one of them runs."""
        node = self._control("cond", (predicate, *operands), {"then_body": then_body, "else_body": else_body})
        return node.results if len(node.results) > 1 else node.results[0]


# -- bodies -----------------------------------------------------------------------------------------------------------
def _need_graph(where: str, role: str, body: Any) -> None:
    from rlx.ir.graph import Graph

    if not isinstance(body, Graph):
        raise GraphError(f"{where}: {role} is a {type(body).__name__}, not a Graph")


def _one_carry(body: Graph) -> Graph:
    """Check a body that returns the next carry and nothing else."""
    _need_graph("scan", "its body", body)
    if len(body.outputs) != 1:
        hint = "scan_general takes several carries and ys"
        raise GraphError(f"scan: graph {body.name!r} gives {len(body.outputs)} values, expected one carry", hint=hint)
    return body


def _with_outputs(body: Graph, which: Sequence[int]) -> Graph:
    """The body with a selection of its outputs, possibly reordered or repeated."""
    copy = body.copy()
    copy.outputs = tuple(copy.outputs[i] for i in which)
    return copy


@dataclass(frozen=True)
class _Sweep:
    """The arguments of a backward scan."""

    where: str
    init: Value
    trajectory: Value
    upstream: Value
    xs: Sequence[Value]
    body_vjp: Graph
    length: Size
    save_trajectory: bool
    checkpoints: int = 0
    forward_body: Graph | None = None

    @property
    def recomputes(self) -> bool:
        return self.checkpoints not in (0, self.length)

    def result(self, xs_idx: int) -> int:
        if not 0 <= xs_idx < len(self.xs):
            raise GraphError(f"{self.where}: xs_idx is {xs_idx}, there are {len(self.xs)} xs")
        return 1 + xs_idx

    def check(self) -> None:
        _need_graph(self.where, "body_vjp", self.body_vjp)
        names = [n.attrs["name"] for n in self.body_vjp.inputs]
        if "d_output" not in names:
            hint = nearest("d_output", names)
            raise GraphError(f"{self.where}: body_vjp has no input called 'd_output' among {names}", hint=hint)
        wanted = 2 + len(self.xs)
        if len(names) != wanted:
            contents = "a carry, a row of each xs and d_output"
            raise GraphError(f"{self.where}: body_vjp has {len(names)} inputs, expected {wanted}: {contents}")
        if len(self.body_vjp.outputs) != wanted - 1:
            count = len(self.body_vjp.outputs)
            raise GraphError(f"{self.where}: body_vjp gives {count} gradients, expected {wanted - 1}: carry and xs")
        if self.recomputes:
            if not isinstance(self.length, int) or not 0 < self.checkpoints < self.length:
                raise GraphError(f"{self.where}: {self.checkpoints} checkpoints for {self.length} steps")
            if self.forward_body is None:
                hint = "hand in the body of the scan"
                raise GraphError(f"{self.where}: {self.checkpoints} checkpoints need a forward_body", hint=hint)
        rows = self.checkpoints if self.recomputes else self.length
        carry = self.init.type
        for name, value, shape in (
            ("trajectory", self.trajectory, (rows, *carry.shape)),
            ("upstream", self.upstream, (self.length, *carry.shape) if self.save_trajectory else carry.shape),
        ):
            if value.shape != shape:
                shown = carry.with_shape(*shape)
                raise ShapeError(f"{self.where}: {name} is {value.type}, expected {shown} for a carry {carry}")

    def gradients(self, into: Graph, carry: Value, row: Sequence[Value], d_output: Value) -> tuple[Value, ...]:
        """Inlines `body_vjp` into another body and returns its gradients."""
        from rlx.ir.rewrite import inline

        primals = iter([carry, *row])
        names = [n.attrs["name"] for n in self.body_vjp.inputs]
        return inline(into, self.body_vjp, [d_output if n == "d_output" else next(primals) for n in names])


def _step_back(sweep: _Sweep, *, masked: bool = False) -> Graph:
    """One backward step: the gradient of the next carry, the carry before, [valid,] [upstream,] xs -> gradients."""
    from rlx.ir.graph import Graph

    carry = sweep.init.type
    g = Graph("step_back")
    d = g.input("d", carry.shape, carry.dtype)
    before = g.input("carry", carry.shape, carry.dtype)
    valid = g.input("valid", (), "bool") if masked else None
    total = d + g.input("upstream", carry.shape, carry.dtype) if sweep.save_trajectory else d
    row = [g.input(f"x{i}", x.shape[1:], x.dtype) for i, x in enumerate(sweep.xs)]
    first, *others = sweep.gradients(g, before, row, total)
    return g.set_outputs([first if valid is None else g.where(valid, first, d), *others])


def _segment_back(sweep: _Sweep, parts: _Segments) -> Graph:
    """The steps of one segment: forward again from its checkpoint, then backward."""
    from rlx.ir.graph import Graph
    from rlx.ir.rewrite import inline

    assert sweep.forward_body is not None
    carry, steps = sweep.init.type, parts.steps
    forward = Graph("forward")
    state = forward.input("carry", carry.shape, carry.dtype)
    row = [forward.input(f"x{i}", x.shape[1:], x.dtype) for i, x in enumerate(sweep.xs)]
    (following,) = inline(forward, _one_carry(sweep.forward_body), [state, *row])
    forward.set_outputs([following, state])

    g = Graph("segment_back")
    d = g.input("d", carry.shape, carry.dtype)
    anchor = g.input("anchor", carry.shape, carry.dtype)
    mask = [g.input("valid", (steps,), "bool")] if parts.uneven else []
    up = [g.input("upstream", (steps, *carry.shape), carry.dtype)] if sweep.save_trajectory else []
    xs = [g.input(f"x{i}", (steps, *x.shape[1:]), x.dtype) for i, x in enumerate(sweep.xs)]
    _, (before,) = g.scan_general([anchor], forward, steps, xs=xs)
    back = _step_back(sweep, masked=parts.uneven)
    finals, ys = g.scan_general([d], back, steps, xs=[before, *mask, *up, *xs], reverse=True)
    return g.set_outputs([*finals, *ys])


class _Segments:
    """`length` steps in `count` segments: segment k ends after ceil((k + 1) * length / count) steps."""

    def __init__(self, length: int, count: int) -> None:
        ends = -(-np.arange(count + 1) * length // count)
        self.count = count
        self.steps = -(-length // count)
        self.uneven = length % count != 0
        at = ends[:-1, None] + np.arange(self.steps)  # [count, steps]
        self.valid = at < ends[1:, None]
        self.rows = np.minimum(at, length - 1).reshape(-1).astype(np.int32)
        self.places = np.flatnonzero(self.valid).astype(np.int32)
