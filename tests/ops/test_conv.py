"""Convolutions as PyTorch has them, and patch embeddings as one matmul."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import ORACLES

import rlx
from rlx.backends.base import kernels_compiled
from rlx.errors import GraphError, ShapeError

rng = np.random.default_rng(3)


def test_a_patch_embedding_is_one_matmul() -> None:
    g = rlx.Graph("patches")
    image = g.input("image", ("batch", 3, 32, 48))
    weight, bias = g.param("weight", (40, 3, 16, 16)), g.param("bias", (40,))
    g.set_outputs([g.conv2d(image, weight, bias, stride=16)])
    f = rlx.compile(g)
    arrays = {"weight": rng.normal(size=(40, 3, 16, 16)), "bias": rng.normal(size=40)}
    f.set_params({n: a.astype(np.float32) for n, a in arrays.items()})
    x = rng.normal(size=(2, 3, 32, 48)).astype(np.float32)
    (y,) = f.run({"image": x})
    exact = ORACLES["conv2d"](x.astype(np.float64), arrays["weight"], arrays["bias"], stride=16)
    assert np.abs(y - exact).max() < 1e-5 * np.abs(exact).max()
    kinds = [launch.kernel.kind for launch in f.plan.main.launches]  # type: ignore[attr-defined]
    assert kinds.count("matmul") == 1
    assert not any("conv2d" in launch.kernel.symbol for launch in f.plan.main.launches)  # type: ignore[attr-defined]


def test_pixels_that_no_patch_reaches_are_left_out() -> None:
    g = rlx.Graph("patches")
    g.set_outputs([g.conv2d(g.input("x", (1, 2, 9, 11)), g.param("w", (3, 2, 4, 4)), stride=4)])
    f = rlx.compile(g)
    x, w = rng.normal(size=(1, 2, 9, 11)), rng.normal(size=(3, 2, 4, 4))
    f.set_param("w", w.astype(np.float32))
    np.testing.assert_allclose(
        f.run({"x": x.astype(np.float32)})[0], ORACLES["conv2d"](x, w, stride=4), rtol=0, atol=1e-4
    )


def test_the_batch_may_be_known_at_run_time_only() -> None:
    g = rlx.Graph("conv")
    g.set_outputs([g.conv2d(g.input("x", ("n", 2, 9, 11)), g.param("w", (3, 2, 3, 3)), padding=1)])
    f = rlx.compile(g)
    w = rng.normal(size=(3, 2, 3, 3)).astype(np.float32)
    f.set_param("w", w)
    before = kernels_compiled()
    for n in (1, 3, 0, 5):
        x = rng.normal(size=(n, 2, 9, 11)).astype(np.float32)
        (y,) = f.run({"x": x})
        assert y.shape == (n, 3, 9, 11)
        if n:
            np.testing.assert_allclose(y, ORACLES["conv2d"](x, w, padding=1), atol=1e-4)
    assert kernels_compiled() == before


@pytest.mark.parity
@pytest.mark.parametrize(
    ("shape", "kernel", "settings"),
    [
        ((2, 3, 17, 19), (8, 3, 3, 5), {"stride": (2, 1), "padding": (1, 2)}),
        ((1, 8, 12, 12), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
        ((1, 4, 20, 21), (6, 2, 3, 3), {"groups": 2, "dilation": (2, 3), "padding": 2}),
        ((3, 3, 28, 28), (16, 3, 14, 14), {"stride": 14}),
    ],
)
def test_convolutions_are_those_of_torch(shape: Any, kernel: Any, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x, w, b = (rng.normal(size=s).astype(np.float32) for s in (shape, kernel, kernel[:1]))
    g = rlx.Graph("conv")
    g.set_outputs([g.conv2d(g.input("x", shape), g.input("w", kernel), g.input("b", kernel[:1]), **settings)])
    wanted = torch.nn.functional.conv2d(*(torch.from_numpy(a) for a in (x, w, b)), **settings).numpy()
    for f in (rlx.compile(g), rlx.compile(g, "reference")):
        np.testing.assert_allclose(f.run({"x": x, "w": w, "b": b})[0], wanted, atol=2e-5 * np.abs(wanted).max())


def test_no_images_give_no_images_with_groups_too() -> None:
    g = rlx.Graph("conv")
    g.set_outputs([g.conv2d(g.input("x", ("n", 4, 5, 5)), g.input("w", (6, 2, 3, 3)), groups=2)])
    inputs = {"x": np.zeros((0, 4, 5, 5), np.float32), "w": np.zeros((6, 2, 3, 3), np.float32)}
    for device in ("reference", "cpu"):
        assert rlx.compile(g, device).run(inputs)[0].shape == (0, 6, 3, 3)


def test_settings_that_mean_nothing_are_refused() -> None:
    g = rlx.Graph("conv")
    x, w = g.input("x", (1, 2, 5, 5)), g.input("w", (3, 2, 3, 3))
    for stride in (True, (1, False), 1.5, None, "2"):
        with pytest.raises(GraphError, match="expected one or two integers"):
            g.conv2d(x, w, stride=stride)
    with pytest.raises(ShapeError, match="have no elements"):
        g.conv2d(x, g.input("none", (3, 2, 0, 3)))
