"""Ops on an emulated GPU, on their samples: against outside oracles.

Plain runs take a few ops, `RLX_EMULATE=all` every op in every element type. Each is run as planned; with 64 threads
per unit in reverse order, as if all operands shared memory; and with one thread per unit, 64-bit indices, and memory
that ends at a page without access.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from emulator import Changes, emulated_gpu, missing
from sample_graphs import element_types, rounded_on_gpus, sample_graph, user_ops

import rlx

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

WAYS: dict[str, tuple[Changes, dict[str, Any]]] = {
    "planned": (Changes(), {}),
    "in reverse": (Changes(lanes=64, aliased=True), {"backwards": True}),
    "guarded": (Changes(lanes=1, wide=True), {"guarded": True}),
}
FEW = [
    ("softmax", "bf16"),
    ("layer_norm", "f32"),
    ("rope", "f16"),
    ("cumsum", "i32"),
    ("topk", "f32"),
    ("gather", "i64"),
    ("attention_lse", "bf16"),
    ("triangular_solve", "f32"),  # sums whose length a unit computes
]
EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]
CASES = EVERY_CASE if os.environ.get("RLX_EMULATE") == "all" else FEW


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("op", "element_type"), CASES)
def test_an_op_gives_what_its_oracle_says(op: str, element_type: str, way: str) -> None:
    case = sample_graph(op, element_type)
    changes, options = WAYS[way]
    with emulated_gpu(changes, **options):
        compiled = rlx.compile(case.graph, "cuda")
        outputs = [np.asarray(output) for output in compiled.run(case.inputs)]
        case.check(outputs, rounded_on_gpus(op, element_type))


def test_repeated_runs_replay_a_graph() -> None:
    case = sample_graph("softmax", "f32")
    with emulated_gpu() as gpu:
        compiled = rlx.compile(case.graph, "cuda")
        for _ in range(3):  # launch by launch, captured, replayed
            before = gpu.launches
            case.check([np.asarray(output) for output in compiled.run(case.inputs)])
            assert gpu.launches > before


@pytest.mark.parametrize("backwards", [False, True])
def test_blocks_split_long_reductions(backwards: bool) -> None:
    """Rows of more than 65,536 terms: the same bits alone and among others."""
    x = np.random.default_rng(0).standard_normal((3, 70_001)).astype(np.float32)
    results = []
    with emulated_gpu(backwards=backwards) as gpu:
        for rows in (1, 3):
            g = rlx.Graph("long")
            value = g.input("x", (rows, 70_001))
            g.set_outputs([value.mean(axis=(1,)), value.max(axis=(1,)), (value * value).sum(axis=(1,)) + 1.0])
            results.append([np.asarray(y) for y in rlx.compile(g, "cuda").run({"x": x[:rows]})])
    assert any(name.endswith("_join") for name in gpu.functions)
    for one, many in zip(*results, strict=True):
        assert one[0].tobytes() == many[0].tobytes()
    mean, top, squares = results[1]
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(top, x.max(1))
    np.testing.assert_allclose(squares, (x.astype(np.float64) ** 2).sum(1) + 1, rtol=1e-6)


def test_loops_and_branches_are_walked_by_the_host() -> None:
    """A loop of known length, replayed as a graph, and one whose length and branches data decide."""

    def collatz(n: Any) -> Any:
        def step(state: Any) -> Any:
            n, count = state
            return rlx.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), count + 1

        return rlx.while_loop(lambda state: state[0] > 1, step, (n, 0))[1]

    def sums(x: Any) -> Any:
        return rlx.scan(lambda total, v: (total + v, total * v), np.float32(0), x)

    x = np.arange(6, dtype=np.float32)
    with emulated_gpu():
        for _ in range(3):
            assert int(np.asarray(rlx.jit(collatz, device="cuda")(np.int32(6)))) == 8
            total, products = rlx.jit(sums, device="cuda")(x)
            assert float(np.asarray(total)) == 15.0
            np.testing.assert_array_equal(np.asarray(products), [0, 0, 2, 9, 24, 50])
