"""Checks that a model treats tokens one by one: it generates in pieces, a prompt in chunks, then one token per step.

Only blocks with a state may read earlier tokens, such as attention with its KV cache. Everything between them is run
with NumPy on a few random tokens, together and one by one, and must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.arrays import Array
from rlx.errors import GraphError
from rlx.flow.built import BuiltModel
from rlx.ir import evaluate
from rlx.ir.graph import Node, Value
from rlx.ir.registry import HIR, PER_TOKEN
from rlx.runtime.kv_spec import table_name
from rlx.types import TensorType, concrete

TOKENS = 3  # of the check
TOLERANCE = 1e-3
SCALES = (1.0, 0.1)  # of random values: where scores are large, a softmax may look at one token only
LARGE = 1 << 24  # weights with more numbers are not replaced by random ones


def same_apart(together: Array, apart: Sequence[Array]) -> bool:
    """Whether a value of all tokens consists of the values of each token."""
    if all(array.shape == together.shape for array in apart):
        return all(_close(array, together) for array in apart)
    axes = [axis for axis, sizes in enumerate(zip(together.shape, apart[0].shape, strict=True)) if len({*sizes}) > 1]
    if len(axes) != 1 or together.shape[axes[0]] != len(apart) or apart[0].shape[axes[0]] != 1:
        return False
    return _close(np.concatenate(apart, axes[0]), together)


def _close(a: Array, b: Array) -> bool:
    return np.allclose(a.astype(np.float64), b.astype(np.float64), TOLERANCE, TOLERANCE, equal_nan=True)


def check_flow(built: BuiltModel) -> None:
    """Raise if a stage of a model with a cache mixes tokens without a state."""
    mixing = (_TokenCheck(built, scale).first_mixing() for scale in SCALES)
    node = next((node for node in mixing if node is not None), None)
    if node is None:
        return
    stage = f"stage {node.origin.stage!r}" if node.origin.stage else "a stage"
    raise GraphError(
        f"load: {stage} of flow {built.module.name!r} mixes tokens, and a model generates one token at a time",
        notes=[f"the op {node.op}, built at: {node.origin}"],
        hint='carry what it needs of earlier tokens in a state: "Stages with a state" in docs/flow.md',
    )


class _TokenCheck:
    """One evaluation of a graph with all tokens, and one per token."""

    def __init__(self, built: BuiltModel, scale: float) -> None:
        self.graph, self.params, self.scale = built.module, built.params, scale
        self.rng = np.random.default_rng(0)
        symbols = {symbol: 1 for symbol in self.graph.symbols()}
        self.bindings = [symbols | {"seq": n, "picked": n} for n in (TOKENS, *(1,) * TOKENS)]
        self.states = self._states()
        self.varying = self._varying()
        self.values: dict[Value, list[Array]] = {}  # with all tokens, then of each

    def first_mixing(self) -> Node | None:
        """The first node that mixes tokens; None if there is none."""
        needed = self._needed()
        for node in self.graph.nodes:
            if self._is_cut(node):
                if self._is_mixing_block(node) and not self._reads_state(node):
                    return node
                for operand in self._read_by(node):
                    if not self._is_apart(operand):
                        return self._origin_of(operand)
                for value in node.results:
                    self.values[value] = self._random(value.type)
            elif node in needed:
                runs = [self._run(node, i) for i in range(TOKENS + 1)]
                self.values |= dict(zip(node.results, map(list, zip(*runs, strict=True)), strict=True))
        outputs = [value for value in self._checked(self.graph.outputs) if not self._is_apart(value)]
        return self._origin_of(outputs[0]) if outputs else None

    # -- the parts of the graph --
    def _states(self) -> set[Value]:
        """States and their views."""
        states: set[Value] = set()
        for node in self.graph.nodes:
            operands = [operand for operand in node.operands if operand is not None]
            if node.op == "state" or (operands and all(operand in states for operand in operands)):
                states.update(node.results)
        return states

    def _varying(self) -> set[Value]:
        """Values that depend on tokens, or on their number."""
        varying: set[Value] = set()
        for node in self.graph.nodes:
            is_input = node.op == "input" and not str(node.attrs["name"]).startswith(table_name(0))
            counts = any(concrete(t.shape, self.bindings[0]) != concrete(t.shape, self.bindings[1]) for t in node.types)
            if node[0] not in self.states and (
                is_input or counts or any(operand in varying for operand in node.operands)
            ):
                varying.update(node.results)
        return varying

    def _is_cut(self, node: Node) -> bool:
        """Whether the values of a node are taken as random: a block, a lookup of rows, or a reader of a state."""
        if node[0] not in self.varying or not node.operands:
            return False
        if node.op == "gather":
            return node.operands[0] not in self.varying
        return node.definition.level == HIR or self._reads_state(node)

    def _is_mixing_block(self, node: Node) -> bool:
        return node.definition.level == HIR and PER_TOKEN not in node.definition.traits

    def _reads_state(self, node: Node) -> bool:
        return any(operand in self.states for operand in node.operands)

    def _read_by(self, node: Node) -> list[Value]:
        """The operands of a cut node that are checked. With a state, integers say which tokens are padding."""
        values = self._checked(node.operands)
        return [value for value in values if value.dtype.is_float] if self._reads_state(node) else values

    def _checked(self, values: Sequence[Value | None]) -> list[Value]:
        return [value for value in values if value is not None and value in self.varying]

    def _needed(self) -> set[Node]:
        """Nodes that decide a checked value."""
        needed: set[Node] = set()
        for node in reversed(self.graph.nodes):
            is_output = any(value in self.graph.outputs for value in node.results)
            if self._is_cut(node):
                needed.update(value.node for value in self._read_by(node))
            elif node in needed or is_output:
                needed.update({node, *(operand.node for operand in node.operands if operand is not None)})
        return needed

    # -- numbers --
    def _run(self, node: Node, i: int) -> Sequence[Array]:
        if not node.operands and node.op != "const":
            if node[0] not in self.values:
                self.values[node[0]] = self._leaf(node)
            return [self.values[node[0]][i]]
        operands = [None if operand is None else self.values[operand][i] for operand in node.operands]
        return evaluate.results_of(node, operands, {}, self.bindings[i])

    def _leaf(self, node: Node) -> list[Array]:
        name, type_ = str(node.attrs.get("name")), node.types[0]
        if node.op == "param":
            size = int(np.prod(concrete(type_.shape, self.bindings[0])))
            if name in self.params.computed or not type_.dtype.is_float or type_.dtype.is_packed or size > LARGE:
                return [self.params[name]] * (TOKENS + 1)
        elif node.op == "input" and type_.dtype.is_integer:
            shape = concrete(type_.shape, self.bindings[0])
            numbers = np.arange(int(np.prod(shape)), dtype=type_.dtype.numpy).reshape(shape)
            apart = self._split(type_, numbers)
            return [numbers, *(array * 0 for array in apart)] if name == "last_token_idx" else [numbers, *apart]
        elif node.op != "input":  # counts along an axis, such as iota
            return [evaluate.results_of(node, [], {}, binding)[0] for binding in self.bindings]
        return self._random(type_)

    def _random(self, type_: TensorType) -> list[Array]:
        """Random numbers for all tokens, and those of each."""
        numbers = self.rng.standard_normal(concrete(type_.shape, self.bindings[0])) * self.scale
        numbers = numbers.astype(type_.dtype.numpy)
        return [numbers, *self._split(type_, numbers)]

    def _split(self, type_: TensorType, numbers: Array) -> list[Array]:
        sizes = concrete(type_.shape, self.bindings[1])
        axes = [axis for axis, size in enumerate(sizes) if size != numbers.shape[axis]]
        parts = []
        for i in range(TOKENS):
            index = tuple(slice(i, i + 1) if axis in axes else slice(None) for axis in range(numbers.ndim))
            parts.append(numbers[index])
        return parts

    def _is_apart(self, value: Value) -> bool:
        together, *apart = self.values[value]
        return same_apart(together, apart)

    def _origin_of(self, value: Value) -> Node:
        """The first node before a value that mixes tokens."""
        before, pending = {value.node}, [value.node]
        while pending:
            for operand in pending.pop().operands:
                if operand is not None and operand.node not in before and operand in self.values:
                    before.add(operand.node)
                    if not self._is_cut(operand.node):
                        pending.append(operand.node)
        ordered = sorted(before, key=lambda node: node.id)
        return next(node for node in ordered if not self._is_apart(node[0]))
