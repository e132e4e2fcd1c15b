"""Lineage: traces each node through all levels, by compiling the graph with its nodes marked.

Passes preserve origins. Here the origin of a node is its own number, so nodes, bodies and launches that carry the
number came from it. Only reports and pages use this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.hir.lower import lower
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.passes import record_graphs
from rlx.ir.provenance import Origin
from rlx.ir.rewrite import Rewriter, rebuild
from rlx.lir.module import LirModule, plan_lir
from rlx.lir.program import Program
from rlx.profile import CompileProfile
from rlx.target import Target

_MARK = re.compile(r"#([0-9]+)")


@dataclass(frozen=True)
class Lineage:
    """A graph after each pass, its optimised main and bind graphs, and their programs."""

    graph: Graph  # the source graph, with its own origins
    steps: list[tuple[str, Graph]]  # (pass, main graph after it); the first is the lowered graph
    bind_steps: list[tuple[str, Graph]]
    plan: LirModule

    @property
    def lowered(self) -> Graph:
        return self.steps[0][1]

    @property
    def main(self) -> Graph:
        return self.steps[-1][1]

    @property
    def bind(self) -> Graph:
        return self.bind_steps[-1][1]

    @cached_property
    def _weights(self) -> dict[str, frozenset[int]]:
        """The source weights of each derived weight."""
        outputs = zip(self.plan.optimised.derived, self.bind.outputs, strict=True)
        needed = {name: self.bind.reachable([output]) for name, output in outputs}
        return {
            name: frozenset().union(*(marks(n) for n in nodes if n.op == "param")) for name, nodes in needed.items()
        }

    def sources(self, node: Node) -> frozenset[int]:
        """The source nodes of a node in a marked graph; for a derived weight also its source weights."""
        derived = self._weights.get(node.attrs["name"], frozenset()) if node.op == "param" else frozenset()
        return sources(node) | derived

    def stage(self, node: Node) -> str:
        """The stage path of a node in a marked graph: that of its first source node."""
        first = _MARK.fullmatch(node.origin.stage)
        number = int(first[1]) if first else min(self.sources(node), default=-1)
        return self.graph.nodes[number].origin.stage if number >= 0 else ""

    @cached_property
    def launched(self) -> dict[Node, list[int]]:
        """The launches that compute each node of the optimised main graph; views have none."""
        return _launches_by_node(self.main, self.plan.main)

    @cached_property
    def main_launches(self) -> dict[int, list[int]]:
        """The launches of the main program that compute each source node."""
        return _launches(self.main, self.plan.main)

    @cached_property
    def bind_launches(self) -> dict[int, list[int]]:
        return _launches(self.bind, self.plan.bind)


def lineage(graph: Graph, target: Target, profile: CompileProfile | None = None) -> Lineage:
    """Compile the graph with its nodes marked."""
    with record_graphs() as seen:
        plan = plan_lir(_with_marks(graph), target, profile or CompileProfile())
    main = [(name, g) for name, g in seen if g.name == graph.name]
    bind = [(name, g) for name, g in seen if g.name == f"{graph.name}.bind"]
    return Lineage(graph, main, bind, plan)


def lowered_blocks(graph: Graph, profile: CompileProfile | None = None) -> tuple[Graph, list[frozenset[int]]]:
    """The lowered graph with its own origins, and for each op its source nodes (blocks, at HIR)."""
    policy = (profile or CompileProfile()).fusion.policy
    return lower(graph, policy), [marks(node) for node in lower(_with_marks(graph), policy).nodes]


def _with_marks(graph: Graph, mark: str = "") -> Graph:
    """The graph again, with marks for origins; inside a body all nodes have the mark of the node around it."""

    def marked(rewriter: Rewriter, node: Node) -> tuple[Value, ...]:
        own = mark or f"#{node.id}"
        attrs = {k: _with_marks(v, own) if isinstance(v, Graph) else v for k, v in node.attrs.items()}
        return rewriter.graph.append(node.op, rewriter.operands(node), attrs, node.types, Origin(stage=own)).results

    return rebuild(graph, marked, made_by="lineage")


def sources(node: Node) -> frozenset[int]:
    """The source nodes of a node in a marked graph, including those of its bodies."""
    return frozenset().union(*(marks(n) for n in (node, *inner_nodes(node))))


def marks(node: Node) -> frozenset[int]:
    """The source nodes of a node itself, without its bodies."""
    matches = (_MARK.fullmatch(origin.stage) for origin in _origins(node.origin))
    return frozenset(int(m[1]) for m in matches if m)


def _origins(origin: Origin) -> Iterator[Origin]:
    yield origin
    for other in origin.merged:
        yield from _origins(other)


def inner_nodes(node: Node) -> Iterator[Node]:
    """The nodes of a node's bodies."""
    for value in node.attrs.values():
        if isinstance(value, Graph):
            for inner in value.nodes:
                yield inner
                yield from inner_nodes(inner)


def launch_nodes(graph: Graph, program: Program, number: int) -> list[Node]:
    """The nodes of the optimised graph that a launch computes."""
    launch = program.launches[number]
    if any(control.first <= number < control.end for control in program.controls):  # the launch belongs to a body
        match = _MARK.match(launch.where)
        return [n for n in graph.nodes if _has_body(n) and match and int(match[1]) in marks(n)]
    return [graph.nodes[n] for n in (launch.node, *launch.also) if n >= 0]


def _has_body(node: Node) -> bool:
    return any(isinstance(v, Graph) for v in node.attrs.values())


def launch_sources(graph: Graph, program: Program, number: int) -> frozenset[int]:
    """The source nodes of a launch."""
    return frozenset().union(*(sources(node) for node in launch_nodes(graph, program, number)))


def _launches_by_node(graph: Graph, program: Program) -> dict[Node, list[int]]:
    own: dict[Node, list[int]] = {}
    for number in range(len(program.launches)):
        for node in launch_nodes(graph, program, number):
            own.setdefault(node, []).append(number)
    return own


def _launches(graph: Graph, program: Program) -> dict[int, list[int]]:
    own = _launches_by_node(graph, program)
    computed: dict[int, set[int]] = {}
    fallback: dict[int, set[int]] = {}
    nearest_launches: list[set[int]] = []  # per node: its launches, or for a view those of its operands
    for node in graph.nodes:
        operand_launches = [nearest_launches[o.node.id] for o in node.operands if o is not None]
        nearest_launches.append(set(own.get(node, ())) or set().union(*operand_launches))
        for source in sources(node):
            computed.setdefault(source, set()).update(own.get(node, ()))
            fallback.setdefault(source, set()).update(nearest_launches[-1])
    return {source: sorted(launches or fallback[source]) for source, launches in computed.items()}
