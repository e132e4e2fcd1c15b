"""The whole system on a GPU: results that feed the next call, training, models with caches, faults, DLPack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

import rlx
from rlx.engine.language_model import LanguageModel
from rlx.errors import KernelError

pytestmark = pytest.mark.gpu
f32 = np.float32


def chained() -> tuple[rlx.CompiledGraph, rlx.CompiledGraph]:
    g = rlx.Graph("product")
    g.set_outputs([(g.input("x", ("n", 8)) @ g.param("w", (8, 4))).tanh()])
    h = rlx.Graph("softmax")
    h.set_outputs([h.input("y", ("n", 4)).softmax(axis=-1)])
    first, second = rlx.compile(g, "cuda"), rlx.compile(h, "cuda")
    first.set_param("w", np.eye(8, 4, dtype=f32))
    return first, second


def test_a_result_feeds_the_next_call() -> None:
    first, second = chained()
    for n in (3, 5, 3, 3):
        (z,) = second.run({"y": first.run({"x": np.ones((n, 8), f32)})[0]})
        assert np.asarray(z).tolist() == [[0.25] * 4] * n


def test_arrays_of_the_device_speak_dlpack() -> None:
    torch = pytest.importorskip("torch")
    first, _ = chained()
    (y,) = first.run({"x": np.ones((3, 8), f32)})
    shared = torch.from_dlpack(y)
    assert shared.is_cuda and shared.shape == (3, 4)
    np.testing.assert_array_equal(shared.cpu().numpy(), np.asarray(y))


def test_tensors_of_torch_are_inputs_and_weights_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    first, _ = chained()
    expected = np.tanh(np.arange(24, dtype=np.float64).reshape(3, 8)[:, :4] / 24)
    for _ in range(3):  # launch by launch, captured, replayed
        tensor = torch.arange(24, dtype=torch.float32, device="cuda").reshape(3, 8) / 24  # on torch's stream
        (y,) = first.run({"x": tensor})
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5)
    first.set_param("w", torch.eye(8, 4, device="cuda"))
    np.testing.assert_allclose(np.asarray(first.run({"x": tensor})[0]), expected, rtol=1e-5)
    with pytest.raises(rlx.errors.BindError, match="contiguous"):
        first.run({"x": torch.ones(8, 3, device="cuda").T})


def test_training_on_the_gpu_equals_the_cpu() -> None:
    rng = np.random.default_rng(0)
    x, start = rng.standard_normal((4, 3)).astype(f32), rng.standard_normal(3).astype(f32)
    g = rlx.Graph("loss")
    g.set_outputs([((g.input("x", (4, 3)) * g.param("w", (3,))).sum(axis=-1) ** 2).mean()])
    losses = {}
    for device in ("cpu", "cuda"):
        step = rlx.train.step(g, rlx.train.adamw(1e-2), device=device)
        step.set_params({"w": start})
        losses[device] = [step.run({"x": x}) for _ in range(5)]
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-5)


def test_loops_and_branches_run() -> None:
    def collatz(n: Any) -> Any:
        def step(state: Any) -> Any:
            n, count = state
            return rlx.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), count + 1

        return rlx.while_loop(lambda state: state[0] > 1, step, (n, 0))[1]

    assert int(np.asarray(rlx.jit(collatz, device="cuda")(np.int32(27)))) == 111
    summed = rlx.jit(lambda x: rlx.scan(lambda c, v: (c + v, c * v), np.float32(0.0), x), device="cuda")
    total, partial = summed(np.arange(6, dtype=f32))
    assert float(np.asarray(total)) == 15.0
    np.testing.assert_array_equal(np.asarray(partial), [0, 0, 2, 9, 24, 50])


def test_an_index_out_of_range_is_an_error() -> None:
    g = rlx.Graph("rows")
    g.set_outputs([g.gather(g.input("table", (4, 3)), g.input("i", (2,), "i32"), axis=0)])
    compiled = rlx.compile(g, "cuda")
    table = np.arange(12, dtype=f32).reshape(4, 3)
    for _ in range(3):
        with pytest.raises(KernelError, match="outside"):
            compiled.run({"table": table, "i": np.array([0, 9], np.int32)})
        (rows,) = compiled.run({"table": table, "i": np.array([0, 3], np.int32)})
        np.testing.assert_array_equal(np.asarray(rows), table[[0, 3]])


def test_a_model_generates_the_tokens_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_llama.write(folder)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [3, 1, 4, 1, 5, 9, 2]]
    expected: list[Any] = []
    for device in ("cpu", "cuda", "cuda"):  # the last one may start from a snapshot
        model = rlx.load(folder, device=device)
        assert isinstance(model, LanguageModel)
        tokens = [c.tokens for c in model.generate(prompts, max_tokens=6)]
        tokens.append(model.generate(prompts[0] + tokens[0], max_tokens=4).tokens)  # goes on from a cached prefix
        expected = expected or tokens
        assert tokens == expected
        model.close()
