"""Truth values are no numbers: ops that add or multiply refuse them, ops that take them give what NumPy gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import Array
from sample_graphs import user_ops

import rlx
from rlx.cli.ops import operand_types
from rlx.errors import DTypeError, RlxError
from rlx.ir import registry
from rlx.ir.registry import ELEMENTWISE, Sample

MOST = 3  # operands of which all choices are tried
SOME = ("add", "equal", "where", "cast")  # of the elementwise ops, which have one loop form


def with_bools(s: Sample, which: tuple[bool, ...], rng: np.random.Generator) -> list[Array | None]:
    pairs = zip(s.operands, which, strict=True)
    return [None if o is None else rng.random(o.shape) < 0.5 if b else o.array(rng) for o, b in pairs]


@pytest.mark.parametrize(
    "name",
    [o.name for o in user_ops() if o.level == registry.MIR and (o.name in SOME or ELEMENTWISE not in o.traits)],
)
def test_wherever_bools_are_taken_the_cpu_gives_what_numpy_gives(name: str) -> None:
    rng, op = np.random.default_rng(5), registry.get(name)
    graph, inputs = rlx.Graph("bools"), {}
    outputs: list[rlx.Value] = []
    for number, s in enumerate(op.samples):
        kinds = [None if o is None else o.dtype for o in s.operands]
        if len(kinds) > MOST or not set(kinds) <= {"f32", "i32", "bool", None}:
            continue
        for choice, which in enumerate(itertools.product([False, True], repeat=len(kinds))):
            if not any(w and k not in ("bool", None) for w, k in zip(which, kinds, strict=True)):
                continue  # as the sample has it
            arrays = with_bools(s, which, rng)
            names = [f"x{number}_{choice}_{i}" for i in range(len(arrays))]
            trial = rlx.Graph("trial")
            try:
                trial.apply(name, *[None if a is None else trial.constant(a) for a in arrays], **s.attrs)
            except RlxError:
                continue
            arguments = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
            values = [graph.input(n, arguments[n].shape, arguments[n].dtype) if n in arguments else None for n in names]
            built = graph.apply(name, *values, **s.attrs)
            outputs += built if isinstance(built, (list, tuple)) else [built]
            inputs |= arguments
    if not outputs:
        return
    graph.set_outputs(outputs)
    for wanted, actual in zip(rlx.compile(graph, "reference").run(inputs), rlx.compile(graph).run(inputs), strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual.astype(np.float64), wanted.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_bools_are_not_added_up() -> None:
    g = rlx.Graph("bools")
    x = g.input("x", (2,), "bool")
    for build in (
        lambda: x + x,
        lambda: x * x,
        lambda: x.sum(),
        lambda: x.cumsum(),
        lambda: g.scatter_add(x, np.array([0]), x[:1]),
        lambda: g.matmul(x.reshape(1, 2), x.reshape(2, 1)),
    ):
        with pytest.raises(DTypeError, match=r"takes numbers|takes floats and integers"):
            build()
    with pytest.raises(DTypeError, match="scatter_add: takes numbers, found bool"):
        rlx.at(np.array([True, False]))[0].add(True)


def test_the_page_of_ops_says_bool_only_where_it_is_taken() -> None:
    assert operand_types(registry.get("add"))["a"] == "numbers; bool beside a number"
    assert operand_types(registry.get("matmul"))["b"] == "numbers; bool beside a number"
    assert operand_types(registry.get("equal"))["a"] == "numbers and bool"
    assert operand_types(registry.get("scatter_add"))["x"] == "numbers"
    assert operand_types(registry.get("scatter"))["x"] == "numbers and bool"
    g = rlx.Graph("bools")
    x = g.input("x", (2, 2), "bool")
    for op in (o for o in user_ops() if o.group == "elementwise" and len(o.schema.operands) == 2):
        if set(operand_types(op).values()) == {"numbers and bool"}:
            g.apply(op.name, x, x)
