"""Loops and branches. The gradient of a scan is a scan from its last step to its first, so any order closes.

A scan with checkpoints becomes a scan of segments that keeps the carry before each and computes a segment once more.
A while loop with `max_steps` becomes a scan of that many steps. A branch keeps what its gradient needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.errors import GraphError
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
from rlx.transforms.vmap import batched_graph, depends, widened
from rlx.transforms.walk import leaves, moving_carries, moving_outputs, moving_scan
from rlx.types import Size, TensorType


def there(values: Cotangents) -> list[Value]:
    """Operands of a loop, none of which is missing."""
    return [v for v in values if v is not None]


# -- scans ------------------------------------------------------------------------------------------------------------
@linearising("scan")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    loop, given = Loop.of(node), there(operands)
    if loop.checkpoints == 0 or loop.checkpoints == loop.length:
        return Reverse(into, node, loop, given, wanted).run()
    made = linearise(into, segmented(loop, [v.type for v in given]), given, wanted)
    return made.outputs, made.pull


# -- forward mode -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pushed:
    """Bodies in forward mode: each group of inputs, and then its tangents."""

    groups: Sequence[Sequence[int]]
    active: set[int]

    def operands(self, into: Graph, given: Sequence[Value], tangents: Cotangents) -> list[list[Value]]:
        """What stands for the inputs, group by group; a tangent that is missing is zero."""
        made = []
        for group in self.groups:
            found = [tangents[i] for i in group if i in self.active]
            types = [given[i].type for i in group if i in self.active]
            filled = [zeros(into, t) if v is None else v for v, t in zip(found, types, strict=True)]
            made.append([*(given[i] for i in group), *filled])
        return made

    def declare(self, graph: Graph, body: Graph) -> tuple[list[Value], Cotangents]:
        """The inputs of a new body: those of the old one in order, and their tangents."""
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
        """Next carries, their tangents, ys, their tangents; and which ys have one."""
        graph = Graph(f"{old.name}_jvp")
        graph.limits = dict(old.limits)
        outputs, found = push_graph(graph, old, *self.declare(graph, old))
        ys = [i for i in range(carries, len(outputs)) if found[i] is not None]
        moved = [zeros(graph, outputs[i].type) if (t := found[i]) is None else t
                 for i in range(carries) if i in self.active]  # fmt: skip
        graph.set_outputs([*outputs[:carries], *moved, *outputs[carries:], *there([found[i] for i in ys])])
        return graph, ys


def _floats(body: Graph, flags: Sequence[bool]) -> set[int]:
    return {i for i, (n, f) in enumerate(zip(leaves(body), flags, strict=True)) if f and n.types[0].dtype.is_float}


@pushing("scan")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    loop, given = Loop.of(node), there(operands)
    n, m = loop.carries, loop.carries + loop.broadcasts
    active = _floats(loop.body, moving_scan(node, [t is not None for t in tangents])[0])
    pushed = Pushed((range(n), range(n, m), range(m, len(given))), active)
    body, ys = pushed.body(loop.body, n)
    carries, shared, xs = pushed.operands(into, given, tangents)
    finals, found = into.scan_general(
        carries, body, loop.length, broadcasts=shared, xs=xs, reverse=loop.reverse,
        checkpoints=loop.checkpoints,  # type: ignore[arg-type]
    )  # fmt: skip
    count = len(loop.body.outputs) - n
    made = dict(zip(sorted(i for i in active if i < n), finals[n:], strict=True))
    made |= dict(zip(ys, found[count:], strict=True))
    return (*finals[:n], *found[:count]), [made.get(i) for i in range(n + count)]


@pushing("while_loop")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    given, n, body = there(operands), node.attrs["carries"], node.attrs["body"]
    active = _floats(body, moving_carries(body, [t is not None for t in tangents], n))
    pushed = Pushed((range(n), range(n, len(given))), active)
    more = Graph(node.attrs["cond"].name)
    more.set_outputs(inline(more, node.attrs["cond"], pushed.declare(more, body)[0]))
    carries, shared = pushed.operands(into, given, tangents)
    next_, _ = pushed.body(body, n)
    found = into.while_loop(carries, more, next_, broadcasts=shared, max_steps=node.attrs["max_steps"])
    made = dict(zip(sorted(i for i in active if i < n), found[n:], strict=True))
    return found[:n], [made.get(i) for i in range(n)]


@pushing("cond")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    predicate, *given = there(operands)
    bodies = [node.attrs[k] for k in ("then_body", "else_body")]
    pushed = Pushed((range(len(given)),), _floats(bodies[0], [t is not None for t in tangents[1:]]))
    made = [pushed.body(body, 0) for body in bodies]
    count = len(bodies[0].outputs)
    moved = sorted({i for _, ys in made for i in ys})
    for body, ys in made:  # a tangent that only the other branch has is zero
        there_ = dict(zip(ys, body.outputs[count:], strict=True))
        filled = [there_[i] if i in there_ else zeros(body, body.outputs[i].type) for i in moved]
        body.set_outputs([*body.outputs[:count], *filled])
    (all_,) = pushed.operands(into, given, tangents[1:])
    results = into.build("cond", [predicate, *all_], {"then_body": made[0][0], "else_body": made[1][0]}).results
    found = dict(zip(moved, results[count:], strict=True))
    return results[:count], [found.get(i) for i in range(count)]


# -- while, backwards -------------------------------------------------------------------------------------------------
@linearising("while_loop")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    given, steps = there(operands), node.attrs["max_steps"]
    if steps is None:
        raise GraphError(
            "while_loop: its gradient needs to know how many steps there are at most",
            hint="give max_steps=, or use scan; forward mode (jvp) needs neither",
            notes=[f"at: {node.origin}"],
        )
    made = linearise(into, _counted(node, [v.type for v in given], steps), given, wanted)
    return made.outputs, made.pull


def _counted(node: Node, types: Sequence[TensorType], steps: int) -> Graph:
    """The loop as a scan of `max_steps` steps. When its condition is false, a step changes nothing, and so on."""
    n = node.attrs["carries"]
    body = Graph("step")
    inner = [declare(body, f"x{i}", t) for i, t in enumerate(types)]
    (more,) = inline(body, node.attrs["cond"], inner)
    stay = Graph("stay")
    stay.set_outputs([declare(stay, f"x{i}", t) for i, t in enumerate(types)][:n])
    attrs = {"then_body": node.attrs["body"], "else_body": stay}
    body.set_outputs(body.build("cond", [more, *inner], attrs).results)
    graph = Graph("counted")
    given = [declare(graph, f"x{i}", t) for i, t in enumerate(types)]
    return graph.set_outputs(graph.scan_general(given[:n], body, steps, broadcasts=given[n:])[0])


# -- the end of a while loop ------------------------------------------------------------------------------------------
@vjp("ended")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """A gradient is wrong too where the loop was cut off, and may be all that is asked for."""
    return [sum_to(at.graph.one("ended", ct, at.operand(1)), at.operand(0).type), None]


@jvp("ended")
def _(at: NodeCtx, tangent: Value, _: Value | None) -> Cotangents:
    return [at.graph.one("ended", tangent, at.operand(1))]


@batching("ended")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("ended", *aligned(vmapped, there(vmapped.operands), vmapped.batched))]


# -- branches, backwards ----------------------------------------------------------------------------------------------
@linearising("cond")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    predicate, *given = there(operands)
    bodies = [node.attrs[k] for k in ("then_body", "else_body")]
    found = [moving_outputs(body, wanted[1:]) for body in bodies]
    seeded = [(a or b) and o.dtype.is_float for a, b, o in zip(*found, bodies[0].outputs, strict=True)]
    joints = [joint(body, wanted[1:], seeded) for body in bodies]
    parts = [split(j) for j in joints]
    count = len(bodies[0].outputs)
    saved = [[v.type for v in p.saved] for p in parts]
    for mine, part in enumerate(parts):  # each branch gives zeros where the other would have saved something
        g = part.forward
        kept = list(g.outputs[count:])
        other = [zeros(g, t) for t in saved[1 - mine]]
        g.set_outputs([*g.outputs[:count], *(kept + other if mine == 0 else other + kept)])
    attrs = {"then_body": parts[0].forward, "else_body": parts[1].forward}
    made = into.build("cond", [predicate, *given], attrs).results
    seeds = [i for i, s in enumerate(seeded) if s]
    gradients = sorted({i for j in joints for i in j.gradients})

    def pull(cts: Cotangents) -> Cotangents:
        filled = [zeros(into, made[i].type) if (ct := cts[i]) is None else ct for i in seeds]
        outer = [*given, *made[count:], *filled]
        back = {}
        for mine, (j, part) in enumerate(zip(joints, parts, strict=True)):
            g = Graph("branch_back")
            inner = [declare(g, f"x{i}", v.type) for i, v in enumerate(outer)]
            start = len(given) + (len(saved[0]) if mine else 0)
            own = dict(zip(part.saved, inner[start:], strict=False))
            own |= dict(zip((n[0] for n in j.graph.inputs), inner[: len(given)], strict=False))
            taken_ = [own[v] for v in part.needs] + inner[len(outer) - len(filled) :]
            grads = dict(zip(j.gradients, inline(g, part.backward, taken_), strict=True))
            g.set_outputs([grads[i] if i in grads else zeros(g, given[i].type) for i in gradients])
            back["else_body" if mine else "then_body"] = g
        if not gradients:
            return [None] * (1 + len(given))
        pulled = dict(zip(gradients, into.build("cond", [predicate, *outer], back).results, strict=True))
        return [None, *(pulled.get(i) for i in range(len(given)))]

    return made[:count], pull


# -- vmap -------------------------------------------------------------------------------------------------------------
def _batched_carries(body: Graph, flags: Sequence[bool], carries: int, size: Size) -> list[bool]:
    """The flags of a loop's operands, with those of carries that come to differ between entries of the batch."""
    found = list(flags)
    while True:
        after = depends(body, found, size)[:carries]
        grown = [a or b for a, b in zip(found[:carries], after, strict=True)]
        if grown == found[:carries]:
            return found
        found[:carries] = grown


@batching("scan")
def _(vmapped: Vmapped) -> Sequence[Value]:
    loop, size = Loop.of(vmapped.node), vmapped.size
    n, m = loop.carries, loop.carries + loop.broadcasts
    flags = _batched_carries(loop.body, vmapped.batched, n, size)
    out = [*flags[:n], *depends(loop.body, flags, size)[n:]]
    body = batched_graph(loop.body, flags, size, out)
    given = there(vmapped.operands)
    carries = [widened(v, b, size) if f else v for v, b, f in zip(given[:n], vmapped.batched, flags, strict=False)]
    xs = [move_axis(v, 0, 1) if f else v for v, f in zip(given[m:], flags[m:], strict=True)]
    inner = Loop(body, loop.length, n, loop.broadcasts, loop.reverse, loop.checkpoints)
    made = inner.emit(vmapped.graph, body, [*carries, *given[n:m], *xs], loop.checkpoints)
    moved = [move_axis(v, 1, 0) if f else v for v, f in zip(made[n:], out[n:], strict=True)]
    return [widened(v, f, size) for v, f in zip([*made[:n], *moved], out, strict=True)]


@batching("while_loop")
def _(vmapped: Vmapped) -> Sequence[Value]:
    size, n = vmapped.size, vmapped.node.attrs["carries"]
    more, body = vmapped.node.attrs["cond"], vmapped.node.attrs["body"]
    flags = _batched_carries(body, vmapped.batched, n, size)
    apart = depends(more, flags, size)[0]  # vmapped stop at different times
    if apart:
        flags[:n] = [True] * n
    given = there(vmapped.operands)
    carries = [widened(v, b, size) if f else v for v, b, f in zip(given[:n], vmapped.batched, flags, strict=False)]
    more = batched_graph(more, flags, size, [apart])
    body = batched_graph(body, flags, size, flags[:n])
    if apart:
        body = _only_where(more, body, n, size)
        running = more.outputs[0].reshape(size).astype("i32")
        more.set_outputs([more.one("sum", running) > 0])
    steps = vmapped.node.attrs["max_steps"]
    made = vmapped.graph.while_loop(carries, more, body, broadcasts=given[n:], max_steps=steps)
    return [widened(v, f, size) for v, f in zip(made, flags, strict=False)]


def _only_where(more: Graph, body: Graph, carries: int, size: Size) -> Graph:
    """The body for vmapped that still run; others stay as they are."""
    graph = Graph(body.name)
    given = [declare(graph, n.attrs["name"], n.types[0]) for n in leaves(body)]
    (running,) = inline(graph, more, given)
    made = inline(graph, body, given)
    return graph.set_outputs([_chosen(running, new, old, size) for new, old in zip(made, given, strict=False)])


def _chosen(where: Value, yes: Value, no: Value, size: Size) -> Value:
    """Entries of `yes` and of `no`; `where` has one truth value per entry."""
    return where.graph.one("where", where.reshape(size, *(1,) * (yes.rank - 1)), yes, no)


@batching("cond")
def _(vmapped: Vmapped) -> Sequence[Value]:
    size, flags = vmapped.size, vmapped.batched[1:]
    given = there(vmapped.operands)
    bodies = [vmapped.node.attrs[k] for k in ("then_body", "else_body")]
    made = [batched_graph(b, flags, size, [True] * len(b.outputs)) for b in bodies]
    if not vmapped.batched[0]:
        return vmapped.graph.build("cond", given, {"then_body": made[0], "else_body": made[1]}).results
    yes, no = (inline(vmapped.graph, body, given[1:]) for body in made)
    return [_chosen(given[0], a, b, size) for a, b in zip(yes, no, strict=True)]
