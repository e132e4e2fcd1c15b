"""Weight hoisting: moves nodes that depend only on weights into the bind program, which runs once when weights are set.

In: one MIR graph. Out: the main graph, in which derived weights are params named `@0`, `@1`, ..., and the bind graph
that computes them. The bind graph also packs matmul weights into the layout that the target asks for; without one,
matmuls read weights as stored, quantised ones as the blocks of the file, 16-bit ones as rows along k if the target
wants that (`Target.reads_rows`). 16-bit weights stay 16-bit in all cases: the matmul kernel widens them as it loads.
"""

from __future__ import annotations

import itertools
from dataclasses import field

from rlx.dtypes import F32
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import Rewriter, live_copy
from rlx.mir.fused_bodies import identity
from rlx.mir.weight_only_values import packed_rows, stored, weight_nodes
from rlx.operand_layouts import Layout, WeightLayout
from rlx.target import Target


@dataclass(frozen=True)
class Hoisted:
    """The two graphs. `derived[i]` is the main graph's param for output i of the bind graph."""

    main: Graph
    bind: Graph
    derived: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        """Number of nodes in both graphs."""
        return len(self.main) + len(self.bind)


def hoist_weights(graph: Graph, target: Target, *, certain: bool = True, exact: bool = False) -> Hoisted:
    """Split the graph into main and bind; matmuls by weights become `fused_matmul`s in the layout the target asks for.

    If the body is not `certain` to run, nodes that can fail are not hoisted out of it. With `exact`, 16-bit weights are
    widened if the target would round the other operand to their type.
    """
    return _Hoister(graph, target, certain, exact).run()


class _Hoister:
    def __init__(self, graph: Graph, target: Target, certain: bool, exact: bool) -> None:
        self.graph = graph
        self.exact = exact
        self.target = target
        self.weights = weight_nodes(graph, certain=certain)
        self.main = Rewriter(graph, "hoist_weights")
        self.bind = Rewriter(graph, "hoist_weights")
        self.bind.graph.name = f"{graph.name}.bind"
        self.derived: list[str] = []
        self.names = (f"@{i}" for i in itertools.count())
        self.outputs: list[Value] = []
        self.packed: dict[tuple[tuple[Value, ...], Layout], Value] = {}
        self.lefts: dict[tuple[Value, Layout], Value] = {}  # packed left operands
        self.rows: dict[Value, Value] = {}  # weights as transposed views of derived ones

    def run(self) -> Hoisted:
        for node in self.graph.nodes:
            if node in self.weights:
                self.bind.keep(node)
            else:
                self._main(node)
        self.main.graph.outputs = tuple(self._operand(o) for o in self.graph.outputs)
        self.bind.graph.outputs = tuple(self.outputs)
        bind = live_copy(self.bind.graph, keep=(), made_by="hoist_weights")  # drops unused params
        return Hoisted(self.main.graph, bind, self.derived)

    def _main(self, node: Node) -> None:
        results = self._matmul_by_weights(node)
        if results is None:
            matrices = _matrices(node)
            operands = tuple(
                None if o is None else self._rows(node, o) if i in matrices else self._operand(o)
                for i, o in enumerate(node.operands)
            )
            results = self.main.graph.append(node.op, operands, node.attrs, node.types, node.origin).results
        self.main.values.update(zip(node.results, results, strict=True))

    def _operand(self, value: Value) -> Value:
        """Return the main graph's version of a value: itself, a plain param or constant, or a derived weight."""
        if value not in self.main.values:
            node = value.node
            if node.op in ("param", "const"):
                self.main.values[value] = self.main.copy(node)[0]
            elif node.op == "expand" and node.operands[0] is not None and node.operands[0].type.elements == 1:
                # A broadcast scalar, such as the zeros that a gradient is added to: a view, which needs no memory.
                one = self._operand(node.operands[0])
                view = self.main.graph.append(node.op, (one,), node.attrs, node.types, node.origin)
                self.main.values[value] = view[0]
            elif node.op == "transpose" and not self.target.prepacks and node.operands[0] is not None:
                # A view: kernels accept strides, so the weight needs no second copy.
                source = self._operand(node.operands[0])
                view = self.main.graph.append(node.op, (source,), node.attrs, node.types, node.origin)
                self.main.values[value] = view[0]
            else:
                self.main.values[value] = self._derive(node, self.bind.values[value])
        return self.main.values[value]

    def _rows(self, like: Node, matrix: Value) -> Value:
        """Return a right operand of a matmul, as a view of rows along k if it is a weight that the target wants so."""
        is_weight = matrix.node in self.weights and matrix.dtype.is_float and matrix.dtype.size == 2
        if not is_weight or not self.target.reads_rows or matrix.node.op == "transpose":
            return self._operand(matrix)
        if matrix not in self.rows:
            axes = (*range(matrix.rank - 2), matrix.rank - 1, matrix.rank - 2)
            stored = self._derive(like, self.bind.one(like, "transpose", self.bind.values[matrix], axes=axes))
            self.rows[matrix] = self.main.one(like, "transpose", stored, axes=axes)
        return self.rows[matrix]

    def _derive(self, like: Node, value: Value) -> Value:
        name = next(n for n in self.names if not self.graph.has(n))
        self.derived.append(name)
        self.outputs.append(value)
        return self.main.graph.append("param", (), {"name": name}, (value.type,), like.origin.by("hoist_weights"))[0]

    def _matmul_by_weights(self, node: Node) -> tuple[Value, ...] | None:
        """Rewrite a matmul to read weights in the layout of the target's kernel; None if the node stays unchanged."""
        if node.op in ("matmul", "grouped_matmul", "integer_matmul"):
            weights, body = 1, identity(node[0])
        elif node.op in ("fused_matmul", "fused_grouped") and node.attrs["layout"] is None:
            weights, body = node.attrs["weights"], node.attrs["body"]
        else:
            return None
        grouped = node.op in ("grouped_matmul", "fused_grouped")
        x, *rest = (o for o in node.operands if o is not None)
        matrices = rest[:weights]
        if x.node in self.weights or not all(m.node in self.weights and m.rank == 2 + grouped for m in matrices):
            return None
        if not matrices[0].dtype.is_float and node.op != "integer_matmul":
            return None
        read, layout = self._weights_to_read(x, matrices)
        if layout is None and (read[0].dtype is x.dtype or read[0].dtype.is_integer):
            return None
        left = self._left(node, x, layout)
        packed = [self._rows(node, r) for r in read] if layout is None else [self._prepack(node, tuple(read), layout)]
        others = [self._operand(o) for o in rest[weights:]]
        return self.main.make(
            node, "fused_grouped" if grouped else "fused_matmul", left, *packed, *others,
            body=body, weights=weights, columns=matrices[0].shape[-1], layout=layout,
        )  # fmt: skip

    def _weights_to_read(self, x: Value, matrices: list[Value]) -> tuple[list[Value], WeightLayout | None]:
        """Return the matrices as the matmul reads them (packed rows or 16-bit floats), and their layout."""
        rows = [r for m in matrices if (r := packed_rows(m)) is not None]
        if len(rows) == len(matrices) and x.dtype is F32:
            rounded = x.node.op == "round_blocks" and x.node.attrs["block"] == rows[0].dtype.block
            layout = self.target.layout(x.dtype, rows[0].type, rounded=rounded)
            if layout is not None or not self.target.prepacks:
                return rows, layout
        narrow = [stored(m) for m in matrices]
        rounds = self.target.multiplied(narrow[0].dtype) is not F32  # the kernel rounds x to the type of the weights
        if len({n.dtype for n in narrow}) == 1 and x.dtype is F32 and not (self.exact and rounds):
            matrices = narrow
        return matrices, self.target.layout(x.dtype, matrices[0].type)

    def _left(self, like: Node, x: Value, layout: WeightLayout | None) -> Value:
        """Return the left operand of a matmul, packed if the layout of the weights requires it."""
        if layout is None or layout.left is None:
            return self._operand(x)
        if (x, layout.left) not in self.lefts:
            source = x.node.operands[0]  # before rounding, since packing rounds too
            assert source is not None
            self.lefts[x, layout.left] = self.main.one(like, "prepack", self._operand(source), layout=layout.left)
        return self.lefts[x, layout.left]

    def _prepack(self, like: Node, weights: tuple[Value, ...], layout: WeightLayout) -> Value:
        if (weights, layout) not in self.packed:
            packed = self.bind.one(like, "prepack", *(self.bind.values[w] for w in weights), layout=layout)
            self.packed[weights, layout] = self._derive(like, packed)
        return self.packed[weights, layout]


def _matrices(node: Node) -> range:
    """Return the positions of the right operands of a matmul; empty for other ops."""
    if node.op in ("matmul", "grouped_matmul"):
        return range(1, 2)
    plain = node.op in ("fused_matmul", "fused_grouped") and node.attrs["layout"] is None
    return range(1, 1 + node.attrs["weights"]) if plain else range(0)
