"""The dispatch report: what computes each node of a graph."""

from __future__ import annotations

from collections import Counter

from rlx.fast_dataclass import dataclass
from rlx.inspect.lineage import Lineage, inner_nodes, marks, sources
from rlx.ir.graph import Graph, Node
from rlx.ir.registry import HIR, LEAF, VIEW
from rlx.mir.common_forms import common_form
from rlx.mir.weight_only_values import weight_nodes
from rlx.notebook import box, table

# At run time a node is computed by machine code of its op, by machine code of the ops it is decomposed into, or, on the
# reference device, in Python ...
NATIVE, DECOMPOSED, HOST = "native", "decomposed", "host"
# ... or needs no work: it is a view, was computed earlier, or is not used.
VIEWED, WEIGHTS, FOLDED, REMOVED, UNUSED = "view", "weights", "folded", "removed", "unused"
MEANING = {
    NATIVE: "machine code",
    DECOMPOSED: "machine code of the ops that it consists of",
    HOST: "Python",
    VIEWED: "no work: the same memory, seen with other strides",
    WEIGHTS: "computed once, when weights are set",
    FOLDED: "computed when the graph was compiled",
    REMOVED: "no work: simplified away",
    UNUSED: "no output needs it",
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One node: its path, the ops it was compiled to, its kernels and launches, and where it was built."""

    node: str
    op: str
    path: str
    became: tuple[str, ...]
    kernels: tuple[str, ...]
    launches: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        became = f"as {' + '.join(self.became)}" if self.became not in ((), (self.op,)) else ""
        runs = ", ".join(f"{k} [{i}]" for k, i in zip(self.kernels, self.launches, strict=True))
        parts = [f"{self.node:5} {self.op:20} {self.path:10}", *(p for p in (became, runs, self.where) if p)]
        return "  ".join(parts).rstrip()


@dataclass(frozen=True)
class DispatchReport:
    """All nodes of a graph but its inputs, weights and constants. `str` of it is a table."""

    name: str
    rows: tuple[Dispatch, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of nodes per path."""
        counter = Counter(row.path for row in self.rows)
        return {path: counter[path] for path in MEANING if counter[path] or path in (NATIVE, DECOMPOSED, HOST)}

    def __getitem__(self, path: str) -> list[Dispatch]:
        """The nodes of a path."""
        return [row for row in self.rows if row.path == path]

    @property
    def _summary(self) -> str:
        said = ", ".join(f"{n} {path}" for path, n in self.counts.items())
        return f"{self.name}: {len(self.rows)} node{'s' * (len(self.rows) != 1)}: {said}"

    def __str__(self) -> str:
        return "\n".join([self._summary, *(f"  {row}" for row in self.rows)])

    def __repr__(self) -> str:
        return f"<dispatch of {self._summary}>"

    def _repr_html_(self) -> str:
        rows = [(r.node, r.op, r.path, " + ".join(r.became), ", ".join(r.kernels), r.where) for r in self.rows]
        return box(self._summary, table(("node", "op", "path", "became", "kernels", "built at"), rows))


def dispatch_report(line: Lineage) -> DispatchReport:
    """The report of a compiled graph."""
    images: dict[int, list[Node]] = {}
    for graph in (line.main, line.bind):
        for node in graph.nodes:
            for source in sources(node):
                images.setdefault(source, []).append(node)
    needed, weights = line.graph.reachable(line.graph.outputs), _weight_only_nodes(line.graph)
    rows = []
    for node in line.graph.nodes:
        if not _is_leaf(node):
            gone = UNUSED if node not in needed else WEIGHTS if node in weights else REMOVED
            rows.append(_row(line, node, images.get(node.id, []), gone))
    return DispatchReport(line.graph.name, tuple(rows))


def _weight_only_nodes(graph: Graph) -> set[Node]:
    """The nodes that depend only on weights, which packing may compute in one step."""
    dependent: set[Node] = set()
    for node in graph.nodes:
        if node.op == "param" or any(o is not None and o.node in dependent for o in node.operands):
            dependent.add(node)
    return dependent & weight_nodes(graph)


def all_on_host(graph: Graph) -> DispatchReport:
    """The report of a device that interprets every op in Python."""
    rows = [Dispatch(f"%{n.id}", n.op, HOST, (), (), (), str(n.origin)) for n in graph.nodes if not _is_leaf(n)]
    return DispatchReport(graph.name, tuple(rows))


def _row(line: Lineage, node: Node, images: list[Node], gone: str) -> Dispatch:
    """A row; `gone` is the path of a node without any image."""
    in_main = [n for n in images if n.graph is line.main]
    became = _ops(node, in_main)
    launches: list[int] = []
    program = line.plan.main
    if not images:
        path = gone
    elif not became:
        path = WEIGHTS if any(n.graph is line.bind for n in images) else FOLDED
        program, launches = line.plan.bind, line.bind_launches.get(node.id, [])
        became = _ops(node, images)
    else:
        launches = _own_launches(line, node, in_main)
        path = _path(node, became) if launches else VIEWED
    kernels = tuple(program.launches[i].kernel.symbol for i in launches)
    shown = became if path == DECOMPOSED or node.definition.level == HIR else ()
    return Dispatch(f"%{node.id}", node.op, path, shown, kernels, tuple(launches), str(node.origin))


def _own_launches(line: Lineage, node: Node, in_main: list[Node]) -> list[int]:
    """The launches that compute a node; a view has none unless it had to be copied."""
    if VIEW in node.definition.traits:
        return sorted({i for n in in_main for i in line.launched.get(n, ())})
    return line.main_launches.get(node.id, [])


def _path(node: Node, became: tuple[str, ...]) -> str:
    has_parts = node.definition.decompose is not None or node.op in common_form
    return DECOMPOSED if has_parts and node.op not in became else NATIVE


def _ops(node: Node, images: list[Node]) -> tuple[str, ...]:
    """The ops that carry a node's mark, in order. An input of a fused body is the sum of its matmul."""
    ops: dict[str, None] = {}
    for image in images:
        for n in (*inner_nodes(image), image):
            if node.id in marks(n) and n.op != "const" and not (n is image and (_is_leaf(n) or ops)):
                ops["matmul" if n.op == "input" else n.op] = None
    return tuple(ops)


def _is_leaf(node: Node) -> bool:
    return LEAF in node.definition.traits
