"""The whole system on a device whose memory is not the host's: weights, caches, optimiser state, models, snapshots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

import rlx
from rlx.backends.toy import ToyBuffer
from rlx.engine.language_model import LanguageModel
from rlx.engine.model_snapshot import SnapshotCheckpoint
from rlx.errors import BindError, CapabilityError

f32 = np.float32


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise AssertionError("nobody asked for this array on the host")

    monkeypatch.setattr(ToyBuffer, "numpy", refuse)


def chained() -> tuple[rlx.CompiledGraph, rlx.CompiledGraph]:
    g = rlx.Graph("product")
    g.set_outputs([(g.input("x", ("n", 8)) @ g.param("w", (8, 4))).tanh()])
    h = rlx.Graph("softmax")
    h.set_outputs([h.input("y", ("n", 4)).softmax(axis=-1)])
    first, second = rlx.compile(g, "toy"), rlx.compile(h, "toy")
    first.set_param("w", np.eye(8, 4, dtype=f32))
    return first, second


@pytest.mark.usefixtures("no_downloads")
def test_a_result_feeds_the_next_call_without_a_download() -> None:
    first, second = chained()
    (y,) = first.run({"x": np.ones((3, 8), f32)})
    (z,) = second.run({"y": y})
    assert isinstance(y, ToyBuffer) and isinstance(z, ToyBuffer) and z.shape == (3, 4)


def test_arrays_of_the_device_speak_numpy_and_dlpack() -> None:
    first, second = chained()
    (z,) = second.run({"y": first.run({"x": np.ones((3, 8), f32)})[0]})
    assert np.asarray(z).tolist() == np.from_dlpack(z).tolist() == [[0.25] * 4] * 3
    assert np.asarray(z, np.float64).dtype == np.float64 and len(z) == 3 and z.ndim == 2 and z.size == 12
    with pytest.raises(ValueError, match="a copy is needed"):
        np.asarray(z, copy=False)


def test_wrong_buffers_are_refused_as_arrays_are() -> None:
    first, _ = chained()
    (y,) = first.run({"x": np.ones((3, 8), f32)})
    with pytest.raises(BindError, match=r"input 'x': shape is \[3, 4\], expected f32\[n, 8\]"):
        first.run({"x": y})
    g = rlx.Graph("whole")
    g.set_outputs([g.input("n", (3, 4), "i32") + 1])
    with pytest.raises(BindError, match="element type is float32, expected i32"):
        rlx.compile(g, "toy").run({"n": y})
    h = rlx.Graph("cache")
    h.set_outputs([h.state("s", (4,)).sum()])
    with pytest.raises(BindError, match="state 's': is changed in place, so it must be a buffer of toy"):
        rlx.compile(h, "toy").run({"s": np.zeros(4, f32)})


def test_a_jitted_function_takes_and_gives_arrays_of_its_device() -> None:
    f = rlx.jit(lambda x: np.tanh(x) * 2, device="toy")
    once = f(np.array([0.5, 1.0], f32))
    assert isinstance(once, ToyBuffer)
    x = np.array([0.5, 1.0])
    np.testing.assert_allclose(np.asarray(f(once)), np.tanh(np.tanh(x) * 2) * 2, rtol=1e-6)
    assert len(f.history) == 1


def test_parameters_and_moments_stay_on_the_device(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, start = rng.standard_normal((4, 3)).astype(f32), rng.standard_normal(3).astype(f32)
    g = rlx.Graph("loss")
    g.set_outputs([((g.input("x", (4, 3)) * g.param("w", (3,))).sum(axis=-1) ** 2).mean()])
    steps = {device: rlx.train.step(g, rlx.train.adamw(1e-2), device=device) for device in ("cpu", "toy")}
    losses = {}
    for device, step in steps.items():
        step.set_params({"w": start})
        losses[device] = [step.run({"x": x}) for _ in range(5)]
    np.testing.assert_allclose(losses["toy"], losses["cpu"], rtol=1e-6)
    assert losses["toy"][-1] < losses["toy"][0]
    np.testing.assert_allclose(steps["toy"].params["w"], steps["cpu"].params["w"], rtol=1e-6)
    again = rlx.train.step(g, rlx.train.adamw(1e-2), device="toy")
    again.load(steps["toy"].save(tmp_path / "checkpoint.safetensors"))
    assert again.run({"x": x}) == steps["toy"].run({"x": x})


def test_a_model_generates_the_same_tokens_from_caches_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_llama.write(folder)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [3, 1, 4, 1, 5, 9, 2]]
    expected: list[Any] = []
    for device in ("cpu", "toy", "toy"):  # the last one may start from a snapshot
        model = rlx.load(folder, device=device)
        assert isinstance(model, LanguageModel)
        tokens = [c.tokens for c in model.generate(prompts, max_tokens=6)]
        tokens.append(model.generate(prompts[0] + tokens[0], max_tokens=4).tokens)  # goes on from a cached prefix
        expected = expected or tokens
        assert tokens == expected
        assert model.memory().weights + model.memory().mapped > 0
        model.close()


def test_a_snapshot_of_a_model_on_the_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_llama.write(folder)
    time.sleep(0.1)  # files that changed just now are not trusted to stay
    first, second = rlx.load(folder, device="toy"), rlx.load(folder, device="toy")
    assert isinstance(second, LanguageModel) and isinstance(second._checkpoint, SnapshotCheckpoint)
    assert first.logits([1, 2, 3]).tobytes() == second.logits([1, 2, 3]).tobytes()


def test_the_reference_runs_no_models_and_toys_are_not_exported(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "model")
    with pytest.raises(CapabilityError, match="'reference' is the reference for graphs"):
        rlx.load(tmp_path / "model", device="reference")
    first, _ = chained()
    with pytest.raises(CapabilityError, match="export: device 'toy' has no machine code"):
        first.export(tmp_path / "product.rlxp")
