"""NaN and infinity checks: a run that returns one raises an error that names the node that produced it.

Runs cost nothing extra while the check is off. While it is on, outputs are checked after each run; after a failure the
graph is evaluated node by node (`ir.evaluate`) from the same inputs, weights and states.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import NonFiniteError
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node, Value
    from rlx.runtime.compiled import CompiledGraph


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Counts of NaN, infinite and all elements of an array."""

    nan: int
    infinite: int
    elements: int

    @classmethod
    def of(cls, array: Array) -> NonFinite | None:
        """None if all elements are finite; integers always are."""
        if array.dtype.kind in "biu" or not array.size:
            return None
        try:
            finite = np.isfinite(array)
        except TypeError:  # packed bytes, or a narrow type without isfinite in NumPy
            return None
        if finite.all():
            return None
        nan = int(np.isnan(array).sum())
        return cls(nan, int(array.size - finite.sum()) - nan, array.size)

    def __str__(self) -> str:
        parts = [f"{n} {kind}" for n, kind in ((self.nan, "NaN"), (self.infinite, "infinite")) if n]
        return f"{' and '.join(parts)} of {self.elements} elements"


class WatchedRun:
    """One run of a compiled graph, with a copy of the states before it."""

    def __init__(self, compiled: CompiledGraph, arrays: Sequence[Array]) -> None:
        self.compiled = compiled
        self.arrays = dict(zip(compiled.input_types, arrays, strict=True))
        self.before = {n: self.arrays[n].copy() for n in compiled._states}

    def check(self, outputs: Sequence[Array]) -> None:
        """Raise if an output, or a state that was finite before the run, contains NaN or infinity."""
        failures = {f"output {i}": bad for i, bad in enumerate(map(NonFinite.of, outputs)) if bad}
        for name, old in self.before.items():
            bad = NonFinite.of(self.arrays[name])
            if bad and bool((~np.isfinite(self.arrays[name]) & np.isfinite(old)).any()):
                failures[f"state {name!r}"] = bad
        if failures:
            raise self._error(failures)

    def _error(self, failures: Mapping[str, NonFinite]) -> NonFiniteError:
        where, bad = next(iter(failures.items()))
        seen = [f"seen in: {name} of {self.compiled.name!r}, {b}" for name, b in failures.items()]
        weights = self.compiled.known_params()
        if any(n not in weights for n in self.compiled.param_types):
            hint = "only packed weights are available; run the graph that was exported"
            return NonFiniteError(f"{self.compiled.name}: {where} has {bad}", hint=hint)
        leaves = {**weights, **self.arrays, **self.before}
        culprit = search(self._graph(), leaves, self._sizes(weights))
        if culprit is None:
            note = "NumPy's reference is finite for the same inputs: this comes from rounding, or is a defect of rlx"
            return NonFiniteError(f"{self.compiled.name}: {where} has {bad}", notes=[note])
        return NonFiniteError(culprit.message, notes=[*culprit.notes, *seen])

    def _graph(self) -> Graph:
        from rlx.hir.lower import lower

        return lower(self.compiled.graph)

    def _sizes(self, weights: Mapping[str, Array]) -> dict[str, int]:
        from rlx.runtime.inputs import Leaf, solve_symbols

        types = self.compiled.param_types | self.compiled.input_types
        leaves = [Leaf(n, {**weights, **self.arrays}[n], t) for n, t in types.items()]
        return solve_symbols(leaves, self.compiled._limits)


# -- the search -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Culprit:
    """A node that produced non-finite elements, and the range of its operands."""

    node: Node
    bad: NonFinite
    finite: bool  # whether its operands were
    operands: str

    @classmethod
    def of(cls, node: Node, operands: Sequence[Any], results: Sequence[Array], finite: bool) -> Culprit:
        bad = next(b for b in map(NonFinite.of, results) if b)
        return cls(node, bad, finite, ", ".join(_range(o) for o in operands if o is not None))

    @property
    def message(self) -> str:
        if not self.node.operands:
            name = f" {self.node.attrs['name']!r}" if "name" in self.node.attrs else ""
            return f"{self.node.op}{name}: has {self.bad} before anything is computed"
        return f"{self.node.op}: makes {self.bad} from {'finite operands' if self.finite else 'infinities'}"

    @property
    def notes(self) -> list[str]:
        shown = f"%{self.node.id} {self.node.op} : {', '.join(map(str, self.node.types))}"
        lines = {"node": shown, "operands": self.operands, "built at": str(self.node.origin)}
        return [f"{name}: {line}" for name, line in lines.items() if line]


def _range(array: Array) -> str:
    if not array.size:
        return "empty"
    low, high = array.min(), array.max()
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def search(graph: Graph, leaves: Mapping[str, Array], sizes: Mapping[str, int]) -> Culprit | None:
    """The first node with non-finite results of finite operands that reach an output or state; None if there is none.

    Infinities that do not reach an output, such as those of a mask before a softmax, are not reported.
    """
    from rlx.ir import evaluate

    uses = Counter(o for n in graph.nodes for o in n.operands if o is not None)
    values: dict[Value, Array] = {}
    bad: dict[Value, NonFinite] = {}
    suspects: dict[Node, Culprit] = {}
    for node in graph.nodes:
        operands = [None if o is None else values[o] for o in node.operands]
        finite = not any(o in bad for o in node.operands)
        inner: list[Culprit] = []
        with evaluate.observe_nodes(functools.partial(_record_first, inner)):
            results = evaluate.results_of(node, operands, leaves, sizes)
        values |= zip(node.results, results, strict=True)
        failures = {v: b for v, b in zip(node.results, map(NonFinite.of, results), strict=True) if b}
        if failures:
            bad |= failures
            suspects[node] = inner[0] if inner and finite else Culprit.of(node, operands, results, finite)
        uses.subtract(o for o in node.operands if o is not None)
        for o in node.operands:
            if o is not None and not uses[o]:
                values.pop(o, None)
    roots = [o for o in graph.outputs if o in bad] or list(bad)
    return _first(suspects, bad, roots)


def _record_first(into: list[Culprit], node: Node, operands: Sequence[Any], results: Sequence[Array]) -> None:
    """Record the first node of a body that produces non-finite elements from finite ones."""
    if not into and any(map(NonFinite.of, results)) and not any(NonFinite.of(o) for o in operands if o is not None):
        into.append(Culprit.of(node, operands, results, finite=True))


def _first(suspects: Mapping[Node, Culprit], bad: Mapping[Value, NonFinite], roots: Sequence[Value]) -> Culprit | None:
    """Follow non-finite values back from the roots. Prefers a node that produced them from finite operands, then one
    that produced NaN from infinities, then a leaf that contains them."""
    reached: dict[int, Node] = {}
    worklist = list(roots)
    while worklist:
        node = worklist.pop().node
        if node.id not in reached:
            reached[node.id] = node
            worklist += [o for o in node.operands if o is not None and o in bad]
    nodes = [reached[i] for i in sorted(reached)]
    inside = [n for n in nodes if n.operands]
    makers = [n for n in inside if not any(o in bad for o in n.operands)]
    nan_makers = [
        n
        for n in inside
        if any(r in bad and bad[r].nan for r in n.results)
        and not any(o is not None and o in bad and bad[o].nan for o in n.operands)
    ]
    candidates = [*makers, *nan_makers, *nodes]
    return suspects[candidates[0]] if candidates else None
