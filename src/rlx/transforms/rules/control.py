"""Loops and branches. The gradient of a scan is a scan from its last step to its first, so higher orders work too.

A scan with checkpoints becomes a scan of segments that saves the carry before each segment and recomputes the rest.
A while loop with `max_steps` becomes a scan of that many steps. A branch saves the values its gradient needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import inline
from rlx.transforms.build import declare, move_axis, sum_to, zeros
from rlx.transforms.jvp import push as push_graph
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Pull, Vmapped, batching, jvp, vjp
from rlx.transforms.rule_tables import linearise as linearising
from rlx.transforms.rule_tables import push as pushing
from rlx.transforms.rules.elementwise import aligned
from rlx.transforms.scan_backward import Loop, Reverse, segmented
from rlx.transforms.vjp import joint, linearise, split
from rlx.transforms.vmap import batched_graph, batched_outputs, with_batch_axis
from rlx.transforms.walk import active_carries, active_outputs, active_scan, leaves
from rlx.types import Size, TensorType


def present(values: Cotangents) -> list[Value]:
    """Return the values that are not None."""
    return [v for v in values if v is not None]


# -- scans ------------------------------------------------------------------------------------------------------------
@linearising("scan")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    loop, values = Loop.of(node), present(operands)
    if loop.checkpoints == 0 or loop.checkpoints == loop.length:
        return Reverse(into, node, loop, values, wanted).run()
    outputs = linearise(into, segmented(loop, [v.type for v in values]), values, wanted)
    return outputs.outputs, outputs.pull


# -- forward mode -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pushed:
    """Bodies in forward mode: each group of inputs is followed by its tangents."""

    groups: Sequence[Sequence[int]]
    active: set[int]

    def operands(self, into: Graph, values: Sequence[Value], tangents: Cotangents) -> list[list[Value]]:
        """Return the operands, group by group; a missing tangent is zero."""
        groups = []
        for group in self.groups:
            group_tangents = [tangents[i] for i in group if i in self.active]
            types = [values[i].type for i in group if i in self.active]
            filled = [zeros(into, t) if v is None else v for v, t in zip(group_tangents, types, strict=True)]
            groups.append([*(values[i] for i in group), *filled])
        return groups

    def declare(self, graph: Graph, body: Graph) -> tuple[list[Value], Cotangents]:
        """Declare the inputs of a new body: those of the old one in order, and their tangents."""
        old = leaves(body)
        values: dict[int, Value] = {}
        tangents: dict[int, Value] = {}
        for group in self.groups:
            for into in (values, tangents):
                for i in group:
                    if into is values or i in self.active:
                        into[i] = declare(graph, old[i].attrs["name"], old[i].types[0])
        return [values[i] for i in range(len(old))], [tangents.get(i) for i in range(len(old))]

    def body(self, old: Graph, carries: int) -> tuple[Graph, list[int]]:
        """Build a body that returns next carries, their tangents, ys, their tangents; and list which ys have one."""
        graph = Graph(f"{old.name}_jvp")
        graph.limits = dict(old.limits)
        outputs, tangents = push_graph(graph, old, *self.declare(graph, old))
        ys = [i for i in range(carries, len(outputs)) if tangents[i] is not None]
        moved = [zeros(graph, outputs[i].type) if (t := tangents[i]) is None else t
                 for i in range(carries) if i in self.active]  # fmt: skip
        graph.set_outputs([*outputs[:carries], *moved, *outputs[carries:], *present([tangents[i] for i in ys])])
        return graph, ys


def _floats(body: Graph, flags: Sequence[bool]) -> set[int]:
    return {i for i, (n, f) in enumerate(zip(leaves(body), flags, strict=True)) if f and n.types[0].dtype.is_float}


@pushing("scan")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    loop, values = Loop.of(node), present(operands)
    n, m = loop.carries, loop.carries + loop.broadcasts
    active = _floats(loop.body, active_scan(node, [t is not None for t in tangents])[0])
    pushed = Pushed((range(n), range(n, m), range(m, len(values))), active)
    body, ys = pushed.body(loop.body, n)
    carries, shared, xs = pushed.operands(into, values, tangents)
    finals, per_branch = into.scan_general(
        carries, body, loop.length, broadcasts=shared, xs=xs, reverse=loop.reverse,
        checkpoints=loop.checkpoints,  # type: ignore[arg-type]
    )  # fmt: skip
    count = len(loop.body.outputs) - n
    outputs = dict(zip(sorted(i for i in active if i < n), finals[n:], strict=True))
    outputs |= dict(zip(ys, per_branch[count:], strict=True))
    return (*finals[:n], *per_branch[:count]), [outputs.get(i) for i in range(n + count)]


@pushing("while_loop")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    values, n, body = present(operands), node.attrs["carries"], node.attrs["body"]
    active = _floats(body, active_carries(body, [t is not None for t in tangents], n))
    pushed = Pushed((range(n), range(n, len(values))), active)
    more = Graph(node.attrs["cond"].name)
    more.set_outputs(inline(more, node.attrs["cond"], pushed.declare(more, body)[0]))
    carries, shared = pushed.operands(into, values, tangents)
    next_, _ = pushed.body(body, n)
    per_branch = into.while_loop(carries, more, next_, broadcasts=shared, max_steps=node.attrs["max_steps"])
    outputs = dict(zip(sorted(i for i in active if i < n), per_branch[n:], strict=True))
    return per_branch[:n], [outputs.get(i) for i in range(n)]


@pushing("cond")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    predicate, *values = present(operands)
    bodies = [node.attrs[k] for k in ("then_body", "else_body")]
    pushed = Pushed((range(len(values)),), _floats(bodies[0], [t is not None for t in tangents[1:]]))
    outputs = [pushed.body(body, 0) for body in bodies]
    count = len(bodies[0].outputs)
    moved = sorted({i for _, ys in outputs for i in ys})
    for body, ys in outputs:  # a tangent that only the other branch has is zero here
        own_tangents = dict(zip(ys, body.outputs[count:], strict=True))
        filled = [own_tangents[i] if i in own_tangents else zeros(body, body.outputs[i].type) for i in moved]
        body.set_outputs([*body.outputs[:count], *filled])
    (all_,) = pushed.operands(into, values, tangents[1:])
    results = into.build("cond", [predicate, *all_], {"then_body": outputs[0][0], "else_body": outputs[1][0]}).results
    per_branch = dict(zip(moved, results[count:], strict=True))
    return results[:count], [per_branch.get(i) for i in range(count)]


# -- while, backwards -------------------------------------------------------------------------------------------------
@linearising("while_loop")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    values, steps = present(operands), node.attrs["max_steps"]
    if steps is None:
        raise GraphError(
            "while_loop: its gradient needs a maximum number of steps",
            hint="give max_steps=, or use scan (fori_loop with static bounds is one); jvp needs neither",
            notes=[f"at: {node.origin}"],
        )
    outputs = linearise(into, _as_scan(node, [v.type for v in values], steps), values, wanted)
    return outputs.outputs, outputs.pull


def _as_scan(node: Node, types: Sequence[TensorType], steps: int) -> Graph:
    """Return the loop as a scan of `max_steps` steps. Once its condition is false, a step changes nothing."""
    n = node.attrs["carries"]
    body = Graph("step")
    inner = [declare(body, f"x{i}", t) for i, t in enumerate(types)]
    (more,) = inline(body, node.attrs["cond"], inner)
    stay = Graph("stay")
    stay.set_outputs([declare(stay, f"x{i}", t) for i, t in enumerate(types)][:n])
    attrs = {"then_body": node.attrs["body"], "else_body": stay}
    body.set_outputs(body.build("cond", [more, *inner], attrs).results)
    graph = Graph("counted")
    inputs = [declare(graph, f"x{i}", t) for i, t in enumerate(types)]
    return graph.set_outputs(graph.scan_general(inputs[:n], body, steps, broadcasts=inputs[n:])[0])


# -- the end of a while loop ------------------------------------------------------------------------------------------
@vjp("ended")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """Check the gradient too: it is wrong if the loop was cut off, and may be the only output."""
    return [sum_to(at.graph.one("ended", ct, at.operand(1)), at.operand(0).type), None]


@jvp("ended")
def _(at: NodeCtx, tangent: Value, _: Value | None) -> Cotangents:
    return [at.graph.one("ended", tangent, at.operand(1))]


@batching("ended")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("ended", *aligned(vmapped, present(vmapped.operands), vmapped.batched))]


# -- branches, backwards ----------------------------------------------------------------------------------------------
@linearising("cond")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    predicate, *values = present(operands)
    bodies = [node.attrs[k] for k in ("then_body", "else_body")]
    per_branch = [active_outputs(body, wanted[1:]) for body in bodies]
    seeded = [(a or b) and o.dtype.is_float for a, b, o in zip(*per_branch, bodies[0].outputs, strict=True)]
    joints = [joint(body, wanted[1:], seeded) for body in bodies]
    parts = [split(j) for j in joints]
    count = len(bodies[0].outputs)
    saved = [[v.type for v in p.saved] for p in parts]
    for mine, part in enumerate(parts):  # each branch returns zeros for values that only the other saves
        g = part.forward
        own_saved = list(g.outputs[count:])
        other = [zeros(g, t) for t in saved[1 - mine]]
        g.set_outputs([*g.outputs[:count], *(own_saved + other if mine == 0 else other + own_saved)])
    attrs = {"then_body": parts[0].forward, "else_body": parts[1].forward}
    outputs = into.build("cond", [predicate, *values], attrs).results
    seeds = [i for i, s in enumerate(seeded) if s]
    gradients = sorted({i for j in joints for i in j.gradients})

    def pull(cts: Cotangents) -> Cotangents:
        filled = [zeros(into, outputs[i].type) if (ct := cts[i]) is None else ct for i in seeds]
        outer = [*values, *outputs[count:], *filled]
        back = {}
        for mine, (j, part) in enumerate(zip(joints, parts, strict=True)):
            g = Graph("branch_back")
            inner = [declare(g, f"x{i}", v.type) for i, v in enumerate(outer)]
            start = len(values) + (len(saved[0]) if mine else 0)
            own = dict(zip(part.saved, inner[start:], strict=False))
            own |= dict(zip((n[0] for n in j.graph.inputs), inner[: len(values)], strict=False))
            operands_ = [own[v] for v in part.needs] + inner[len(outer) - len(filled) :]
            grads = dict(zip(j.gradients, inline(g, part.backward, operands_), strict=True))
            g.set_outputs([grads[i] if i in grads else zeros(g, values[i].type) for i in gradients])
            back["else_body" if mine else "then_body"] = g
        if not gradients:
            return [None] * (1 + len(values))
        pulled = dict(zip(gradients, into.build("cond", [predicate, *outer], back).results, strict=True))
        return [None, *(pulled.get(i) for i in range(len(values)))]

    return outputs[:count], pull


# -- vmap -------------------------------------------------------------------------------------------------------------
def _batched_carries(body: Graph, flags: Sequence[bool], carries: int, size: Size) -> list[bool]:
    """Return batch flags of a loop's operands; carries may become batched during the loop."""
    current = list(flags)
    while True:
        after = batched_outputs(body, current, size)[:carries]
        grown = [a or b for a, b in zip(current[:carries], after, strict=True)]
        if grown == current[:carries]:
            return current
        current[:carries] = grown


@batching("scan")
def _(vmapped: Vmapped) -> Sequence[Value]:
    loop, size = Loop.of(vmapped.node), vmapped.size
    n, m = loop.carries, loop.carries + loop.broadcasts
    flags = _batched_carries(loop.body, vmapped.batched, n, size)
    out = [*flags[:n], *batched_outputs(loop.body, flags, size)[n:]]
    body = batched_graph(loop.body, flags, size, out)
    values = present(vmapped.operands)
    carries = [
        with_batch_axis(v, b, size) if f else v for v, b, f in zip(values[:n], vmapped.batched, flags, strict=False)
    ]
    xs = [move_axis(v, 0, 1) if f else v for v, f in zip(values[m:], flags[m:], strict=True)]
    inner = Loop(body, loop.length, n, loop.broadcasts, loop.reverse, loop.checkpoints)
    outputs = inner.emit(vmapped.graph, body, [*carries, *values[n:m], *xs], loop.checkpoints)
    moved = [move_axis(v, 1, 0) if f else v for v, f in zip(outputs[n:], out[n:], strict=True)]
    return [with_batch_axis(v, f, size) for v, f in zip([*outputs[:n], *moved], out, strict=True)]


@batching("while_loop")
def _(vmapped: Vmapped) -> Sequence[Value]:
    size, n = vmapped.size, vmapped.node.attrs["carries"]
    more, body = vmapped.node.attrs["cond"], vmapped.node.attrs["body"]
    flags = _batched_carries(body, vmapped.batched, n, size)
    ends_differ = batched_outputs(more, flags, size)[0]  # entries of the batch stop at different steps
    if ends_differ:
        flags[:n] = [True] * n
    values = present(vmapped.operands)
    carries = [
        with_batch_axis(v, b, size) if f else v for v, b, f in zip(values[:n], vmapped.batched, flags, strict=False)
    ]
    more = batched_graph(more, flags, size, [ends_differ])
    body = batched_graph(body, flags, size, flags[:n])
    if ends_differ:
        body = _update_running(more, body, n, size)
        running = more.outputs[0].reshape(size).astype("i32")
        more.set_outputs([more.one("sum", running) > 0])
    steps = vmapped.node.attrs["max_steps"]
    outputs = vmapped.graph.while_loop(carries, more, body, broadcasts=values[n:], max_steps=steps)
    return [with_batch_axis(v, f, size) for v, f in zip(outputs, flags, strict=False)]


def _update_running(more: Graph, body: Graph, carries: int, size: Size) -> Graph:
    """Return the body that updates only the entries of the batch that are still running."""
    graph = Graph(body.name)
    inputs = [declare(graph, n.attrs["name"], n.types[0]) for n in leaves(body)]
    (running,) = inline(graph, more, inputs)
    outputs = inline(graph, body, inputs)
    pairs = zip(outputs, inputs, strict=False)
    return graph.set_outputs([_select_entries(running, new, old, size) for new, old in pairs])


def _select_entries(where: Value, yes: Value, no: Value, size: Size) -> Value:
    """Select entries of `yes` or `no`; `where` has one boolean per entry."""
    return where.graph.one("where", where.reshape(size, *(1,) * (yes.rank - 1)), yes, no)


@batching("cond")
def _(vmapped: Vmapped) -> Sequence[Value]:
    size, flags = vmapped.size, vmapped.batched[1:]
    values = present(vmapped.operands)
    bodies = [vmapped.node.attrs[k] for k in ("then_body", "else_body")]
    outputs = [batched_graph(b, flags, size, [True] * len(b.outputs)) for b in bodies]
    if not vmapped.batched[0]:
        return vmapped.graph.build("cond", values, {"then_body": outputs[0], "else_body": outputs[1]}).results
    yes, no = (inline(vmapped.graph, body, values[1:]) for body in outputs)
    return [_select_entries(values[0], a, b, size) for a, b in zip(yes, no, strict=True)]
