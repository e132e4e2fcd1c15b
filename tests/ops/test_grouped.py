"""Products in which each row chooses its matrix: against NumPy in float64, plain and packed, and what they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import ORACLES, Array
from targets import supported

import rlx
from rlx.dtypes import DType, dtype
from rlx.errors import KernelError
from rlx.ir.registry import packed
from rlx.lir.kernels import MatmulKernel
from rlx.profile import CompileProfile, Precision

TARGETS = [t.name for t in supported()]
INT8 = CompileProfile(precision=Precision(activations="int8"))
rng = np.random.default_rng(23)


def product(x: Array, w: Array, index: Array) -> Array:
    return np.stack([row.astype(np.float64) @ w[at].astype(np.float64) for row, at in zip(x, index, strict=True)])


def near(actual: Array, wanted: Array, tolerance: float = 2e-6) -> bool:
    return bool(np.abs(actual - wanted).max() <= tolerance * np.abs(wanted).max())


def matmuls(f: Any) -> list[MatmulKernel]:
    return [launch.kernel for launch in f.plan.main.launches if isinstance(launch.kernel, MatmulKernel)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["param", "input"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_row_has_its_matrix(target: str, kind: str, dtype: str) -> None:
    """In any order of rows, of any number, to the bit the same with other rows around."""
    groups, k, n = 5, 530, 75
    g = rlx.Graph("rows")
    x, index = g.input("x", ("m", k), dtype), g.input("index", ("m",), "i32")
    w = getattr(g, kind)("w", (groups, k, n), dtype)
    g.set_outputs([g.grouped_matmul(x, w, index)])
    f = rlx.compile(g, target=target, threads=2)
    assert [(k.grouped, k.layout is not None) for k in matmuls(f)] == [("rows", kind == "param")]
    a, b = (rng.normal(size=s).astype(f"{dtype[0]}{int(dtype[1:]) // 8}") for s in ((450, k), (groups, k, n)))
    at = np.concatenate([np.sort(rng.integers(0, groups, 400)), rng.integers(0, groups, 50)]).astype(np.int32)
    inputs = {"w": b} if kind == "input" else {}
    if not inputs:
        f.set_param("w", b)
    (actual,) = f.run({"x": a, "index": at, **inputs})
    assert near(actual, product(a, b, at))
    for rows in (slice(0, 1), slice(7, 12), slice(395, 450), slice(0, 0)):
        (part,) = f.run({"x": a[rows], "index": at[rows], **inputs})
        np.testing.assert_array_equal(part, actual[rows])


@pytest.mark.parametrize("kind", ["i64", "i8", "u8", "u32"])
def test_indices_are_of_any_integer_type(kind: str) -> None:
    g = rlx.Graph("kinds")
    x, index = g.input("x", (6, 8)), g.input("index", (6,), kind)
    g.set_outputs([g.grouped_matmul(x, g.param("w", (3, 8, 9)), index)])
    f = rlx.compile(g)
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((6, 8), (3, 8, 9)))
    f.set_param("w", b)
    at = np.array([2, 0, 1, 1, 0, 2], dtype_of(kind))
    assert near(f.run({"x": a, "index": at})[0], product(a, b, at))


def dtype_of(name: str) -> Any:
    return dtype(name).numpy


@pytest.mark.parametrize("wrong", [-1, 3, 1 << 33])
@pytest.mark.parametrize("op", ["grouped_matmul", "group_rows", "grouped_outer"])
def test_an_index_outside_the_groups_is_an_error(op: str, wrong: int) -> None:
    g = rlx.Graph("outside")
    x, index = g.input("x", (4, 8)), g.input("index", (4,), "i64")
    if op == "grouped_matmul":
        g.set_outputs([g.grouped_matmul(x, g.input("w", (3, 8, 9)), index)])
    elif op == "group_rows":
        g.set_outputs([x, *g.group_rows(index, groups=3)])
    else:
        g.set_outputs([g.grouped_outer(x, x, index, groups=3)])
    f = rlx.compile(g)
    inputs = {"x": np.ones((4, 8), np.float32)} | (
        {"w": np.ones((3, 8, 9), np.float32)} if op == "grouped_matmul" else {}
    )
    f.run({**inputs, "index": np.array([0, 1, 2, 1])})
    with pytest.raises(KernelError, match="outside"):
        f.run({**inputs, "index": np.array([0, 1, wrong, 1])})


def blocks(storage: DType, *shape: int) -> Array:
    return packed(str(storage), *shape).array(rng)


def numbers(x: Array) -> Array:
    return ORACLES["dequantise"](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_integer", [False, True], ids=["f32", "int8"])
@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "mxfp4", "iq4_nl"])
def test_packed_matrices_stay_packed(kind: str, is_integer: bool) -> None:
    """As many bytes as in the file, one arithmetic whatever the number of rows: few of a group, many, and both."""
    storage = dtype(kind)
    groups, n, k = 3, 70, 2 * storage.block
    g = rlx.Graph("packed")
    w, x, index = g.param("w", (groups, n, k), storage), g.input("x", ("m", k)), g.input("index", ("m",), "i32")
    g.set_outputs([g.grouped_matmul(x, w.dequantise().mT, index)])
    f = rlx.compile(g, profile=INT8 if is_integer else None)
    stored = blocks(storage, groups, n, k)
    f.set_param("w", stored)
    assert [k.layout.storage for k in matmuls(f)] == [storage]  # type: ignore[union-attr]
    (panels,) = (f.plan.main.buffers[name].type for name in f.plan.main.weights)  # type: ignore[attr-defined]
    assert panels.bytes <= stored.nbytes * -(-n // 64) * 64 / n
    at = np.array([0] * 3 + [1] * 40 + [2] * 5, np.int32)
    codes = rng.integers(-126, 127, (len(at), k)) + rng.uniform(-0.4, 0.4, (len(at), k))
    codes[:, ::32] = 127
    a = (codes * 0.01).astype(np.float32)
    left = ORACLES["round_blocks"](a.astype(np.float64), block=storage.block) if matmuls(f)[0].layout.integer else a  # type: ignore[union-attr]
    wanted = product(left, numbers(stored).astype(np.float64).swapaxes(1, 2), at)
    (actual,) = f.run({"x": a, "index": at})
    assert near(actual, wanted)
    for rows in (slice(0, 1), slice(2, 6), slice(3, 20), slice(43, 48)):
        np.testing.assert_array_equal(f.run({"x": a[rows], "index": at[rows]})[0], actual[rows])
    assert matmuls(f)[0].layout.integer == (is_integer and kind != "iq4_nl")  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["f32", "q4_k"])
def test_gate_and_up_are_one_pass(kind: str) -> None:
    storage = dtype(kind)
    groups, n, k = 4, 90, 256
    g = rlx.Graph("gate")
    x, index = g.input("x", ("m", k)), g.input("index", ("m",), "i32")
    gate, up = (g.param(name, (groups, n, k), storage) for name in ("gate", "up"))
    sides = [w.dequantise().mT if storage.is_packed else w.mT for w in (gate, up)]
    g.set_outputs([g.grouped_matmul(x, sides[0], index).silu() * g.grouped_matmul(x, sides[1], index)])
    f = rlx.compile(g)
    if storage.is_packed:
        stored = [blocks(storage, groups, n, k) for _ in range(2)]
        for w in stored:
            w["d"] *= np.float16(0.1)
            w["dmin"] *= np.float16(0.1)
        wide = [numbers(w) for w in stored]
    else:
        stored = wide = [rng.normal(size=(groups, n, k)).astype(np.float32) for _ in range(2)]
    f.set_params(dict(zip(("gate", "up"), stored, strict=True)))
    assert [launch.kernel.weights for launch in f.plan.main.launches] == [2]  # type: ignore[attr-defined]
    a, at = rng.normal(size=(50, k)).astype(np.float32), np.sort(rng.integers(0, groups, 50)).astype(np.int32)
    left, right = (product(a, w.swapaxes(1, 2), at) for w in wide)
    with np.errstate(over="ignore"):
        wanted = left / (1 + np.exp(-left)) * right
    assert near(f.run({"x": a, "index": at})[0], wanted, 1e-5)


def test_the_gradient_of_the_matrices_multiplies_each_row_once() -> None:
    groups, rows, k, n = 16, 200, 24, 40
    g = rlx.Graph("outer")
    x, y, index = g.input("x", (rows, k)), g.input("y", (rows, n)), g.input("index", (rows,), "i32")
    g.set_outputs([g.grouped_outer(x, y, index, groups=groups)])
    f = rlx.compile(g, threads=2)
    a, b = (rng.normal(size=(rows, s)).astype(np.float32) for s in (k, n))
    at = rng.choice([0, 3, 4, 15], rows).astype(np.int32)
    (actual,) = f.run({"x": a, "y": b, "index": at})
    wanted = np.zeros((groups, k, n))
    for i in range(rows):
        wanted[at[i]] += np.outer(a[i].astype(np.float64), b[i])
    assert near(actual, wanted)
    (launch,) = (one for one in f.plan.main.launches if isinstance(one.kernel, MatmulKernel))  # type: ignore[attr-defined]
    assert launch.flops == 2 * rows * k * n


@pytest.mark.parametrize("length", [1, 4])
def test_a_loop_rounds_what_meets_packed_weights(length: int) -> None:
    """x -> x @ w again and again, w packed: the body rounds as the same steps outside a loop do."""
    body = rlx.Graph("body")
    c, w = body.input("c", (2, 64)), body.input("w", (64, 64), "q8_0")
    body.set_outputs([(c @ w.dequantise().mT).tanh()])
    g = rlx.Graph("loop")
    start, weight = g.input("x", (2, 64)), g.param("w", (64, 64), "q8_0")
    carries, _ = g.scan_general([start], body, length, broadcasts=[weight])
    g.set_outputs([carries[0]])
    plain = rlx.Graph("plain")
    value, weight = plain.input("x", (2, 64)), plain.param("w", (64, 64), "q8_0")
    for _ in range(length):
        value = (value @ weight.dequantise().mT).tanh()
    plain.set_outputs([value])
    stored, x = blocks(dtype("q8_0"), 64, 64), rng.normal(size=(2, 64)).astype(np.float32)
    actual = []
    for graph in (g, plain):
        f = rlx.compile(graph, profile=INT8)
        f.set_param("w", stored)
        assert all(k.layout.integer for k in matmuls(f)) and matmuls(f)  # type: ignore[union-attr]
        actual.append(f.run({"x": x})[0])
    np.testing.assert_array_equal(*actual)
    value = x.astype(np.float64)
    for _ in range(length):
        value = np.tanh(ORACLES["round_blocks"](value, block=32) @ numbers(stored).T)
    assert np.abs(actual[0] - value).max() < 2e-2
