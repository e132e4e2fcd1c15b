"""Matmuls whose sides, or operands of whose epilogues, lie in memory in other orders than the product."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rlx
from rlx.transforms import vjp

Turn = Callable[[rlx.Value], rlx.Value]


def launches(compiled: rlx.CompiledGraph) -> list[str]:
    """What runs, by the first words of kernels' names."""
    return [launch.kernel.split(".")[0] for launch in compiled.report().launches]


@pytest.mark.parametrize("axes", [(0, 1, 3, 2), (1, 0, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_operands_of_epilogues_may_be_transposed(axes: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 3, 10, 5)), rng.normal(size=(2, 3, 5, 8))
    shape = [0] * 4
    for axis, size in zip(axes, (2, 3, 10, 8), strict=True):
        shape[axis] = size
    c = rng.normal(size=shape)
    g = rlx.Graph("epilogue")
    x, y, z = (g.input(n, v.shape, dtype) for n, v in (("x", a), ("y", b), ("z", c)))
    g.set_outputs([x @ y + z.transpose(axes=axes)])
    arrays = {n: v.astype(dtype.replace("f", "float")) for n, v in (("x", a), ("y", b), ("z", c))}
    (result,) = rlx.compile(g).run(arrays)
    np.testing.assert_allclose(result, a @ b + c.transpose(axes), rtol=1e-4, atol=1e-4)


LEFT: dict[str, tuple[tuple[int, ...], Turn, int]] = {  # shape, view of it, copies that it costs
    "a matrix": ((40, 13), lambda x: x.mT, 0),
    "part of one": ((40, 20), lambda x: x[:, 3:16].mT, 0),
    "two batches": ((2, 3, 40, 13), lambda x: x.mT, 0),
    "heads": ((2, 40, 3, 13), lambda x: x.transpose(axes=(0, 2, 3, 1)), 0),
    "a batch for all": ((3, 40, 13), lambda x: x.mT, 0),
    "one row": ((40, 1), lambda x: x.mT, 0),
    "a column": ((2, 40, 5), lambda x: x[:, :, 2:3].mT, 1),
    "every other": ((40, 13, 2), lambda x: x[:, :, 0].mT, 1),
}


@pytest.mark.parametrize("case", LEFT)
@pytest.mark.parametrize("epilogue", [False, True])
def test_a_left_side_of_columns_is_read_where_it_is(case: str, epilogue: bool) -> None:
    shape, turn, copies = LEFT[case]
    rng = np.random.default_rng(3)
    g = rlx.Graph("turned")
    x, y = g.input("x", shape), g.input("y", (*shape[:-2], 40, 70) if case == "two batches" else (40, 70))
    product = turn(x) @ y
    g.set_outputs([product.relu() if epilogue else product])
    arrays = {v.node.attrs["name"]: rng.normal(size=v.shape).astype(np.float32) for v in (x, y)}
    compiled, oracle = rlx.compile(g), rlx.compile(g, device="reference")
    np.testing.assert_allclose(compiled.run(arrays)[0], oracle.run(arrays)[0], rtol=1e-4, atol=1e-4)
    assert launches(compiled).count("copy") == copies


@pytest.mark.parametrize("layout", ["in, out", "out, in"])
def test_the_gradient_of_a_linear_layer_is_two_matmuls(layout: str) -> None:
    g = rlx.Graph("linear")
    x, w = g.input("x", ("batch", 32, 24)), g.input("w", (24, 40) if layout == "in, out" else (40, 24))
    g.set_outputs([x @ (w if layout == "in, out" else w.mT)])
    backward = vjp(g, ["x", "w"])
    backward.set_outputs(backward.outputs[1:])
    compiled = rlx.compile(backward)
    rng = np.random.default_rng(4)
    shapes = {"x": (5, 32, 24), "d_output": (5, 32, 40), "w": w.shape}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    wide, dy, weight = (arrays[n].astype(np.float64) for n in ("x", "d_output", "w"))
    dx, dw = compiled.run(arrays)
    out = "io" if layout == "in, out" else "oi"
    np.testing.assert_allclose(dx, np.einsum(f"bso,{out}->bsi", dy, weight), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum(f"bsi,bso->{out}", wide, dy), rtol=1e-3, atol=1e-3)
    report = compiled.report(arrays)
    assert launches(compiled) == ["matmul", "matmul"]
    touched = sum(a.nbytes for a in (dx, dw, arrays["d_output"], arrays["x"], arrays["d_output"], arrays["w"]))
    assert sum(launch.bytes for launch in report.launches) == touched


def test_the_gradient_of_a_gate_is_part_of_the_product_that_it_reads() -> None:
    rng = np.random.default_rng(6)
    shapes = {"dy": (2, 9, 24), "w": (24, 70), "gate": (2, 9, 70), "up": (2, 9, 70)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    g = rlx.Graph("gate")
    dy, w, gate, up = (g.input(name, shape) for name, shape in shapes.items())
    product = dy @ w
    g.set_outputs([product * gate, (product * up * gate).tanh()])
    compiled = rlx.compile(g)
    results = compiled.run(arrays)
    exact = arrays["dy"].astype(np.float64) @ arrays["w"]
    np.testing.assert_allclose(results[0], exact * arrays["gate"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[1], np.tanh(exact * arrays["up"] * arrays["gate"]), rtol=1e-4, atol=1e-4)
    assert launches(compiled) == ["matmul"]
