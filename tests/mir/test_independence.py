"""Which graphs may be cut along their batch: found by rules, and true for every graph that the rules let through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import examples, float_graphs, random_leaves
from hypothesis import given
from layers import TINY_BERT, TINY_LLAMA, bert_graph, llama_graph
from targets import AVX512

import rlx
from rlx import Graph
from rlx.errors import RlxError
from rlx.ir.evaluate import run
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import LEAF, MIR, OPS, OpDef, Sample
from rlx.mir.independence import independent_symbol
from rlx.mir.pipeline import optimise

Make = Callable[[Graph, Value], Value]
BATCH = rlx.dim("batch")


def graph(make: Make) -> Graph:
    """A graph of one input [batch, seq, 6] and of what `make` does with it."""
    g = Graph("g")
    return g.set_outputs([make(g, g.input("x", ("batch", "seq", 6)))])


INDEPENDENT: dict[str, Make] = {
    "elementwise": lambda g, x: (x * 2.0).tanh() + g.param("p", (6,)),
    "a factor for each entry": lambda g, x: x * x.sum(axis=2, keepdims=True),
    "a weight": lambda g, x: x @ g.param("w", (6, 4)),
    "products of two batches": lambda g, x: x @ x.transpose(axes=(0, 2, 1)),
    "softmax": lambda g, x: x.softmax(axis=1),
    "a mean over the sequence": lambda g, x: x.mean(axis=1),
    "a norm": lambda g, x: x.layer_norm(),
    "a reshape behind the batch": lambda g, x: g.reshape(x, shape=("batch", rlx.dim("seq") * 6)),
    "a part of each entry": lambda g, x: x[:, :, 1:3],
    "columns side by side": lambda g, x: g.concatenate(x, x, axis=2),
    "rows of a table": lambda g, x: g.gather(g.param("t", (9, 3)), g.cast(x, "i32")),
    "a constant for all": lambda g, x: x + g.expand(g.param("p", (1, 1, 6)), shape=("batch", "seq", 6)),
}
MEETING: dict[str, Make] = {
    "softmax along the batch": lambda g, x: x.softmax(axis=0),
    "a sum over the batch": lambda g, x: x.sum(axis=0),
    "its mean taken off": lambda g, x: x - x.mean(axis=0, keepdims=True),
    "another order": lambda g, x: g.transpose(x, axes=(1, 0, 2)),
    "all but the first": lambda g, x: x[1:],
    "batches after each other": lambda g, x: g.concatenate(x, x, axis=0),
    "a running sum": lambda g, x: x.cumsum(axis=0),
    "rows as one": lambda g, x: g.reshape(x, shape=(rlx.dim("batch") * rlx.dim("seq"), 6)),
    "entries that look at others": lambda g, x: g.gather(x, g.cast(x[:, 0, 0], "i32")),
    "no batch": lambda g, x: g.param("p", (3,)) * 2.0,
    "columns that the size of the batch chooses": lambda g, x: g.slice(
        x, start=(0, 0, BATCH), stop=(BATCH, rlx.dim("seq"), BATCH + 2), step=(1, 1, 1)
    ),
    "a row that the size of the batch chooses": lambda g, x: (
        x + g.slice(g.param("t", (9, 6)), start=(BATCH, 0), stop=(BATCH + 1, 6), step=(1, 1))
    ),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_entries_that_do_not_meet(name: str) -> None:
    assert independent_symbol(graph(INDEPENDENT[name])) == "batch"


@pytest.mark.parametrize("name", MEETING)
def test_entries_that_meet(name: str) -> None:
    assert independent_symbol(graph(MEETING[name])) is None


def test_all_inputs_have_the_batch() -> None:
    g = Graph("g")
    x, y = g.input("x", ("batch", 4)), g.input("y", (4,))
    assert independent_symbol(g.set_outputs([x + y])) is None
    fixed = Graph("fixed")
    assert independent_symbol(fixed.set_outputs([fixed.input("x", (3, 4)) * 2.0])) is None


def test_an_encoder_is_independent_before_and_after_all_passes() -> None:
    for g in (bert_graph(TINY_BERT), llama_graph(TINY_LLAMA)):
        assert independent_symbol(g) == independent_symbol(optimise(g, AVX512).main) == "batch"


@given(float_graphs())
@examples(60)
def test_what_the_rules_let_through_is_so(g: Graph) -> None:
    """Three entries together are what each is alone, by the NumPy of every op."""
    symbol = independent_symbol(g)
    if symbol is None:
        return
    sizes = {name: 3 if name == symbol else 4 for name in g.symbols()}
    leaves = random_leaves(g, sizes)
    inputs = [node.attrs["name"] for node in g.inputs]
    f = rlx.compile(g, device="reference")
    f.set_params({name: array for name, array in leaves.items() if name not in inputs})
    together = f.run({name: leaves[name] for name in inputs})
    alone = [f.run({name: leaves[name][i : i + 1] for name in inputs}) for i in range(3)]
    for i, array in enumerate(together):
        np.testing.assert_allclose(array, np.concatenate([entry[i] for entry in alone]), rtol=1e-9, atol=1e-12)


# -- the trait of ops -------------------------------------------------------------------------------------------------
TENSOR_OPS = [o for o in OPS.values() if o.level == MIR and o.is_builtin and LEAF not in o.traits]
# Rules that samples do not reach: of ops that passes make, and of those whose attributes have the sizes. The graphs
# above, and the encoder after all passes, do.
ELSEWHERE = {
    "region",
    "prepack",
    "fused_matmul",
    "integer_matmul",
    "residual_norm",
    "quantised_norm",
    "reshape",
    "slice",
    "expand",
}


def test_every_op_declares_whether_entries_meet() -> None:
    missing = [f"{o.name} ({o.place})" for o in TENSOR_OPS if o.independent is None]
    assert not missing, f"say @op(..., independent=...), a rule of rlx.ir.independence, for {missing}"


def batched(definition: OpDef, case: Sample, which: Sequence[int]) -> Graph | None:
    """A graph of the sample, in which these operands are inputs with a batch as first axis; None if it has no type."""
    g = Graph("g")
    operands: list[Value | None] = []
    for i, spec in enumerate(case.operands):
        if spec is None:
            operands.append(None)
        elif i in which:
            operands.append(g.input(f"x{i}", ("batch", *spec.shape[1:]), spec.dtype))
        else:
            operands.append(g.param(f"x{i}", spec.shape, spec.dtype))
    try:
        results = g.build(definition.name, operands, dict(case.attrs)).results
    except RlxError:
        return None
    return g.set_outputs(results) if independent_symbol(g.set_outputs(results)) else None


def are_alike(g: Graph, case: Sample) -> bool:
    """Whether a batch of three gives what its entries give one by one, by the op's NumPy reference."""
    rng = np.random.default_rng(0)
    inputs = {n.attrs["name"] for n in g.inputs}
    arrays = {}
    for i, spec in enumerate(case.operands):
        if spec is not None:
            shape = (3, *spec.shape[1:]) if f"x{i}" in inputs else spec.shape
            arrays[f"x{i}"] = replace(spec, shape=shape).array(rng)

    def evaluated(first: int, last: int) -> list[np.ndarray[Any, Any]]:
        part = {name: a[first:last] if name in inputs else a for name, a in arrays.items()}
        return run(g, part, {"batch": last - first})

    together, alone = evaluated(0, 3), [evaluated(i, i + 1) for i in range(3)]
    return all(
        np.allclose(batch, np.concatenate([entry[k] for entry in alone]), rtol=1e-4, atol=1e-4, equal_nan=True)
        for k, batch in enumerate(together)
    )


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, min(count, 4) + 1))


@pytest.mark.parametrize("definition", [o for o in TENSOR_OPS if o.independent is not never], ids=str)
def test_what_an_op_declares_is_so(definition: OpDef) -> None:
    tried = 0
    for case in definition.samples[:4]:
        ranked = [i for i, spec in enumerate(case.operands) if spec is not None and spec.shape]
        for which in subsets(len(ranked)):
            g = batched(definition, case, [ranked[i] for i in which])
            if g is not None:
                tried += 1
                assert are_alike(g, case), f"{g}\nlets entries meet"
    assert tried or definition.name in ELSEWHERE, "no sample shows that the rule ever holds"
