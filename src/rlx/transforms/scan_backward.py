"""Reverse mode of scans: the gradient of a scan is a scan from its last step to its first.

A scan with checkpoints becomes a scan of segments that saves the carry before each segment and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import inline
from rlx.transforms.build import declare, slice_axis, zeros
from rlx.transforms.rule_tables import Cotangents, Pull
from rlx.transforms.vjp import joint, split
from rlx.transforms.walk import active_scan
from rlx.types import Size, TensorType, dim_floordiv


def save_nothing(_: Node) -> bool:
    """Policy that saves only inputs."""
    return False


@dataclass(frozen=True)
class Loop:
    """The parts of a scan node."""

    body: Graph
    length: Size
    carries: int
    broadcasts: int
    reverse: bool
    checkpoints: Size

    @staticmethod
    def of(node: Node) -> Loop:
        return Loop(**node.attrs)

    def split_operands(self, values: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Split operands into carries, broadcasts and xs."""
        n, m = self.carries, self.carries + self.broadcasts
        return list(values[:n]), list(values[n:m]), list(values[m:])

    def emit(self, into: Graph, body: Graph, operands: Sequence[Value], checkpoints: Size) -> tuple[Value, ...]:
        """Emit the loop with another body that has the same inputs."""
        carries, shared, xs = self.split_operands(operands)
        finals, ys = into.scan_general(
            carries, body, self.length, broadcasts=shared, xs=xs, reverse=self.reverse,
            checkpoints=checkpoints,  # type: ignore[arg-type]  # may be symbolic
        )  # fmt: skip
        return (*finals, *ys)


def segmented(loop: Loop, types: Sequence[TensorType]) -> Graph:
    """Return the scan as a scan over `checkpoints` segments, of length // checkpoints steps or one more."""
    graph = Graph("segments")
    inputs = [declare(graph, f"x{i}", t) for i, t in enumerate(types)]
    carries, shared, xs = loop.split_operands(inputs)
    short = dim_floordiv(loop.length, loop.checkpoints)
    longer = loop.length - short * loop.checkpoints  # number of segments with one more step
    at: Size = 0
    ys: list[list[Value]] = []
    for how_many, steps in ((longer, short + 1), (loop.checkpoints - longer, short)):
        if how_many == 0:
            continue
        rows = how_many * steps
        start = loop.length - at - rows if loop.reverse else at
        parts = [slice_axis(x, 0, start, start + rows).reshape(how_many, steps, *x.shape[1:]) for x in xs]
        body = _segment(loop, types, steps)
        finals, segment_ys = graph.scan_general(
            carries, body, how_many, broadcasts=shared, xs=parts, reverse=loop.reverse,
            checkpoints=how_many,  # type: ignore[arg-type]
        )  # fmt: skip
        carries = list(finals)
        ys.append([y.reshape(rows, *y.shape[2:]) for y in segment_ys])
        at = at + rows
    ordered = reversed(ys) if loop.reverse else iter(ys)
    joined = [p[0] if len(p) == 1 else graph.one("concatenate", *p, axis=0) for p in zip(*ordered, strict=True)]
    return graph.set_outputs([*carries, *joined])


def _segment(loop: Loop, types: Sequence[TensorType], steps: Size) -> Graph:
    """Return the body of one segment: it takes the loop's operands, with `steps` rows of each xs."""
    graph = Graph("segment")
    n = loop.carries + loop.broadcasts
    inputs = [declare(graph, f"x{i}", t) for i, t in enumerate(types[:n])]
    inputs += [declare(graph, f"xs{i}", t.with_shape(steps, *t.shape[1:])) for i, t in enumerate(types[n:])]
    if steps == 1:
        rows = [x.reshape(x.shape[1:]) for x in inputs[n:]]
        outputs = inline(graph, loop.body, [*inputs[:n], *rows])
        carries, ys = outputs[: loop.carries], outputs[loop.carries :]
        return graph.set_outputs([*carries, *(y.reshape(1, *y.shape) for y in ys)])
    inner = Loop(loop.body, steps, loop.carries, loop.broadcasts, loop.reverse, 0)
    return graph.set_outputs(inner.emit(graph, loop.body, inputs, 0))


class Reverse:
    """A forward scan that saves the values its gradient needs, and the backward scan.

    Without checkpoints it saves every value of the body that the gradient reads; with one checkpoint per step it saves
    the carries and recomputes the body.
    """

    def __init__(self, into: Graph, node: Node, loop: Loop, operands: list[Value], wanted: Sequence[bool]) -> None:
        self.into, self.node, self.loop, self.operands = into, node, loop, operands
        self.inputs, self.outputs = active_scan(node, wanted)
        # Active carries are active in the joint graph too, whether or not the body's outputs read them.
        seeded = [f and o.dtype.is_float for f, o in zip(self.outputs, loop.body.outputs, strict=True)]
        self.joint = joint(loop.body, self.inputs, seeded)
        constant = range(loop.carries, loop.carries + loop.broadcasts)
        self.parts = split(self.joint, save_nothing if loop.checkpoints != 0 else None, constant)

    def run(self) -> tuple[Sequence[Value], Pull]:
        loop, parts = self.loop, self.parts
        inside = self.joint.graph.inputs
        before = [i for i in range(loop.carries) if inside[i][0] in parts.needs]  # carries to save
        fresh = [v for v in parts.saved if self._source(v) is None]
        body = parts.forward
        count = self.joint.outputs
        saved = dict(zip(parts.saved, body.outputs[count:], strict=True))
        body.set_outputs([*body.outputs[:count], *(saved[v] for v in fresh), *(body.inputs[i][0] for i in before)])
        outputs = loop.emit(self.into, body, self.operands, loop.checkpoints)
        rows = dict(zip(fresh, outputs[count:], strict=False))
        rows |= {inside[i][0]: y for i, y in zip(before, outputs[count + len(fresh) :], strict=True)}
        results = outputs[:count]
        return results, lambda cts: self.back(cts, results, rows)

    def _source(self, value: Value) -> tuple[str, int] | None:
        """Return where a saved value exists already: among the ys, or as the carry before the next step."""
        if value.node.op == "input":
            return None
        outputs = self.joint.graph.outputs[: self.joint.outputs]
        places = [i for i, o in enumerate(outputs) if o is value]
        for i in places:
            if i >= self.loop.carries:
                return "y", i
        for i in places:
            if self.joint.graph.inputs[i][0] in self.parts.needs:
                return "next", i
        return None

    def back(self, cts: Cotangents, results: Sequence[Value], rows: dict[Value, Value]) -> Cotangents:
        """Build the scan from the last step to the first; it carries gradients of carries, and sums for broadcasts."""
        into, loop, parts, combined = self.into, self.loop, self.parts, self.joint
        inside = [n[0] for n in combined.graph.inputs[: combined.inputs]]
        active = [i for i in range(loop.carries) if self.inputs[i]]
        constant = range(loop.carries, loop.carries + loop.broadcasts)
        summed = [i for i in constant if i in combined.gradients]
        follows = sorted({s[1] for v in parts.saved if (s := self._source(v)) and s[0] == "next"})
        ys = [i for i in combined.cotangents if i >= loop.carries]

        body = Graph(f"{loop.body.name}_back")
        body.limits = dict(loop.body.limits)
        bound: dict[Value, Value] = {}  # values of the joint graph in the new body
        d_carry = {i: declare(body, f"d_carry{i}", inside[i].type) for i in active}
        sums = {i: declare(body, f"d_shared{i}", inside[i].type) for i in summed}
        after = {i: declare(body, f"next{i}", inside[i].type) for i in follows}
        shared = [i for i in constant if inside[i] in parts.needs]
        bound |= {inside[i]: declare(body, f"shared{i}", inside[i].type) for i in shared}
        xs: list[Value] = []
        for value in parts.needs:
            if value in bound:
                continue
            source = self._source(value)
            if value in rows:
                stack = rows[value]
            elif source is not None and source[0] == "y":
                stack = results[source[1]]
            elif source is not None:
                bound[value] = after[source[1]]
                continue
            else:
                stack = self.operands[inside.index(value)]  # a row of xs
            bound[value] = declare(body, f"r{len(xs)}", value.type)
            xs.append(stack)
        d_y = {i: declare(body, f"d_y{i}", loop.body.outputs[i].type) for i in ys}
        seeds = [d_carry[i] if i in d_carry else d_y[i] for i in combined.cotangents]
        pulled_back = inline(body, parts.backward, [*(bound[v] for v in parts.needs), *seeds])
        grads = dict(zip(combined.gradients, pulled_back, strict=True))
        rest = [i for i in combined.gradients if i >= loop.carries + loop.broadcasts]
        body.set_outputs([
            *(grads[i] if i in grads else zeros(body, inside[i].type) for i in active),
            *(sums[i] + grads[i] for i in summed),
            *(bound[inside[i]] for i in follows),
            *(grads[i] for i in rest),
        ])  # fmt: skip

        if not body.outputs:  # no wanted gradient depends on the loop's results
            return [None] * len(self.operands)

        def seed(i: int) -> Value:
            ct = cts[i]
            return zeros(into, results[i].type) if ct is None else ct

        start = [*(seed(i) for i in active), *(zeros(into, inside[i].type) for i in summed)]
        start += [results[i] for i in follows]
        finals, row_grads = into.scan_general(
            start, body, loop.length, broadcasts=[self.operands[i] for i in shared],
            xs=[*xs, *(seed(i) for i in ys)], reverse=not loop.reverse,
            checkpoints=loop.checkpoints,  # type: ignore[arg-type]
        )  # fmt: skip
        pulled: dict[int, Value] = dict(zip([*active, *summed], finals, strict=False)) | dict(
            zip(rest, row_grads, strict=True)
        )
        return [pulled.get(i) for i in range(len(self.operands))]
