"""Weight hoisting: what depends on weights alone moves into the bind program, which runs once when weights are set.

In: one MIR graph. Out: the main graph, in which derived weights are params called `@0`, `@1`, ..., and the bind graph
that computes them. For a target that prepacks weights, right sides of matmuls are packed into panels there; for others
matmuls read weights as they are, quantised ones as the blocks of the file. Narrow weights stay narrow in both cases:
the matmul widens what it loads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rlx.dtypes import F32, I32, DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter
from rlx.mir.bodies import identity
from rlx.mir.weights import packed_rows, stored, weight_nodes
from rlx.ops.activations import WHOLE
from rlx.ops.fused import FOUR, has_panels
from rlx.target import Target


@dataclass(frozen=True)
class Hoisted:
    """The two graphs. `derived[i]` is the main graph's param for output i of the bind graph."""

    main: Graph
    bind: Graph
    derived: list[str] = field(default_factory=list)


def hoist_weights(graph: Graph, target: Target, *, certain: bool = True) -> Hoisted:
    """Split the graph; matmuls by float matrices that are weights become packed `fused_matmul`s if the target prepacks.

    Of a body that is not `certain` to run, nothing that can fail leaves it.
    """
    return _Hoister(graph, target, certain).run()


class _Hoister:
    def __init__(self, graph: Graph, target: Target, certain: bool) -> None:
        self.graph = graph
        self.target = target
        self.weights = weight_nodes(graph, certain=certain)
        self.main = Rewriter(graph, "hoist_weights")
        self.bind = Rewriter(graph, "hoist_weights")
        self.bind.graph.name = f"{graph.name}.bind"
        self.derived: list[str] = []
        self.names = (f"@{i}" for i in itertools.count())
        self.outputs: list[Value] = []
        self.panels: dict[tuple[Value, ...], Value] = {}
        self.blocks: dict[tuple[tuple[Value, ...], bool], Value] = {}
        self.words: dict[Value, Value] = {}  # of rounded left sides

    def run(self) -> Hoisted:
        for node in self.graph.nodes:
            if node in self.weights:
                self.bind.values.update(zip(node.results, self.bind.copy(node), strict=True))
            else:
                self._main(node)
        self.main.graph.outputs = tuple(self._operand(o) for o in self.graph.outputs)
        self.bind.graph.outputs = tuple(self.outputs)
        bind = _only_needed(self.bind.graph)
        return Hoisted(self.main.graph, bind, self.derived)

    def _main(self, node: Node) -> None:
        if node.op == "integer_matmul":
            results = self._packed_bytes(node) if self.target.prepacks else None
        else:
            results = self._matmul_by_weights(node)
        if results is None:
            operands = tuple(None if o is None else self._operand(o) for o in node.operands)
            results = self.main.graph.append(node.op, operands, node.attrs, node.types, node.origin).results
        self.main.values.update(zip(node.results, results, strict=True))

    def _operand(self, value: Value) -> Value:
        """A value for the main graph: itself, a plain param or constant, or a derived weight."""
        if value not in self.main.values:
            node = value.node
            if node.op in ("param", "const"):
                self.main.values[value] = self.main.copy(node)[0]
            elif node.op == "expand" and node.operands[0] is not None and node.operands[0].type.elements == 1:
                # One number everywhere, such as zeros that a gradient is added to: a view, which needs no memory.
                one = self._operand(node.operands[0])
                made = self.main.graph.append(node.op, (one,), node.attrs, node.types, node.origin)
                self.main.values[value] = made[0]
            elif node.op == "transpose" and not self.target.prepacks and node.operands[0] is not None:
                # A view: kernels take strides, so there is no need for a second copy of the weight.
                source = self._operand(node.operands[0])
                made = self.main.graph.append(node.op, (source,), node.attrs, node.types, node.origin)
                self.main.values[value] = made[0]
            else:
                self.main.values[value] = self._derive(node, self.bind.values[value])
        return self.main.values[value]

    def _derive(self, like: Node, value: Value) -> Value:
        name = next(n for n in self.names if not self.graph.has(n))
        self.derived.append(name)
        self.outputs.append(value)
        return self.main.graph.append("param", (), {"name": name}, (value.type,), like.origin.by("hoist_weights"))[0]

    def _matmul_by_weights(self, node: Node) -> tuple[Value, ...] | None:
        """The matmul that reads weights as the target's kernel does; None if the node stays as it is."""
        if node.op in ("matmul", "grouped_matmul"):
            weights, body = 1, identity(node[0])
        elif node.op in ("fused_matmul", "fused_grouped") and not node.attrs["packed"]:
            weights, body = node.attrs["weights"], node.attrs["body"]
        else:
            return None
        grouped = node.op in ("grouped_matmul", "fused_grouped")
        x, *rest = (o for o in node.operands if o is not None)
        matrices = rest[:weights]
        if x.node in self.weights or not all(
            m.node in self.weights and m.rank == 2 + grouped and m.dtype.is_float for m in matrices
        ):
            return None
        rows = tuple(r for m in matrices if (r := packed_rows(m)) is not None)
        in_blocks = len(rows) == weights and x.dtype is F32
        blocks = rows[0].dtype if in_blocks else None
        narrow = [stored(m) for m in matrices]
        if len({n.dtype for n in narrow}) == 1 and x.dtype is F32:
            matrices = narrow
        if not self.target.prepacks:
            if blocks is None and matrices[0].dtype is x.dtype:
                return None
            left, read = self._operand(x), [self._operand(r) for r in (rows if blocks is not None else matrices)]
        elif blocks is not None and has_panels(blocks):
            left = self._left(node, x, blocks)
            read = [self._interleave(node, rows, whole=left.dtype is I32)]
        else:
            blocks = None
            left, read = self._operand(x), [self._pack(node, tuple(matrices), x.dtype)]
        others = [self._operand(o) for o in rest[weights:]]
        return self.main.make(
            node,
            "fused_grouped" if grouped else "fused_matmul",
            left,
            *read,
            *others,
            body=body,
            weights=weights,
            columns=matrices[0].shape[-1],
            packed=self.target.prepacks,
            blocks=blocks,
        )

    def _packed_bytes(self, node: Node) -> tuple[Value, ...] | None:
        """A product of bytes: words of four are multiplied at once."""
        x, w = (o for o in node.operands if o is not None)
        k = w.shape[0]
        if w.node not in self.weights or x.node in self.weights or w.rank != 2 or not isinstance(k, int) or k % FOUR:
            return None
        if (w,) not in self.panels:
            width = self.target.panel(I32.size)
            packed = self.bind.one(node, "pack_bytes", self.bind.values[w], width=width)
            self.panels[w,] = self._derive(node, packed)
        return self.main.make(
            node, "fused_matmul", self._operand(x), self.panels[w,], body=identity(node[0]), weights=1,
            columns=w.shape[1], packed=True,
        )  # fmt: skip

    def _left(self, like: Node, x: Value, blocks: DType) -> Value:
        """The left side of a matmul by packed weights: words for kernels of whole numbers, where x was rounded."""
        if x.node.op != "round_blocks" or blocks.name not in WHOLE or x.node.attrs["block"] != blocks.block:
            return self._operand(x)
        if x not in self.words:
            source = x.node.operands[0]
            assert source is not None
            self.words[x] = self.main.one(like, "activation_blocks", self._operand(source), block=blocks.block)
        return self.words[x]

    def _pack(self, like: Node, matrices: tuple[Value, ...], computed: DType) -> Value:
        """Panels as wide as those of the type that is multiplied, in the type that the matrices are stored in."""
        if matrices not in self.panels:
            width = self.target.panel(computed.size)
            packed = self.bind.one(like, "pack_panels", *(self.bind.values[m] for m in matrices), width=width)
            self.panels[matrices] = self._derive(like, packed)
        return self.panels[matrices]

    def _interleave(self, like: Node, rows: tuple[Value, ...], *, whole: bool) -> Value:
        if (rows, whole) not in self.blocks:
            attrs = {"width": self.target.panel(F32.size), "lanes": self.target.lanes(F32.size), "whole": whole}
            packed = self.bind.one(like, "interleave_blocks", *(self.bind.values[r] for r in rows), **attrs)
            self.blocks[rows, whole] = self._derive(like, packed)
        return self.blocks[rows, whole]


def _only_needed(graph: Graph) -> Graph:
    """The bind graph without params that nothing in it reads."""
    live = graph.reachable(graph.outputs)
    rewriter = Rewriter(graph, "hoist_weights")
    for node in graph.nodes:
        if node in live:
            rewriter.values.update(zip(node.results, rewriter.copy(node), strict=True))
    rewriter.graph.outputs = tuple(rewriter.values[o] for o in graph.outputs)
    return rewriter.graph
