"""Launches that run as one kernel: the same bits as each by itself, in fewer kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated_gpu, missing

import rlx
from rlx.backends.cuda import launch_plan
from rlx.engine.decoder import Decoder

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
f32 = np.float32
BF16 = ml_dtypes.bfloat16


def layer(size: int) -> rlx.Graph:
    """A norm before a product of stored 16-bit weights, then a chain of small ops on its heads."""
    g = rlx.Graph("layer")
    x = g.input("x", ("rows", size))
    w = g.cast(g.param("w", (96, size), "bf16"), "f32").transpose(axes=(1, 0))
    y = g.rms_norm(x, g.param("gamma", (size,)), eps=1e-6) @ w
    heads = g.reshape(y, shape=("rows", 6, 16))
    normed = g.rms_norm(heads, g.param("head", (16,)), eps=1e-6)
    return g.set_outputs([y, normed.tanh() + 1.0, (normed * 2.0).softmax(axis=-1)])


def run(size: int, rows: int, **options: Any) -> tuple[list[np.ndarray[Any, Any]], int]:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((9, size)).astype(f32)[:rows]
    params = {"w": rng.standard_normal((96, size)).astype(BF16), "gamma": rng.random(size).astype(f32) + 0.5}
    params["head"] = rng.random(16).astype(f32) + 0.5
    with emulated_gpu(**options) as gpu:
        compiled = rlx.compile(layer(size), "cuda")
        compiled.set_params(params)
        outputs = [np.asarray(y) for y in compiled.run({"x": x})]
        return outputs, gpu.launches


@pytest.mark.parametrize("size", [64, 544, 1024])
@pytest.mark.parametrize("backwards", [False, True])
def test_fused_launches_have_the_bits_of_single_ones(size: int, backwards: bool) -> None:
    fused, fewer = run(size, 1, backwards=backwards)
    with (
        mock.patch.object(launch_plan, "fuse_prologues", lambda planned, *_: list(planned)),
        mock.patch.object(launch_plan, "fuse_chains", lambda planned, *_: list(planned)),
    ):
        single, more = run(size, 1)
    assert fewer == 2 and more >= 5
    many, _ = run(size, 9)
    for one, other, batch in zip(fused, single, many, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, batch[:1])


def test_launches_that_run_as_one_share_no_memory() -> None:
    """The row that a prologue reads is needed until the last block of the product has started."""
    g = rlx.Graph("no residual")
    x = g.input("x", (1, 64)) + 1.0
    w = g.cast(g.param("w", (64, 64), "bf16"), "f32").transpose(axes=(1, 0))
    g.set_outputs([(g.rms_norm(x, g.param("gamma", (64,)), eps=0.0) @ w).softmax(axis=-1)])
    rng = np.random.default_rng(0)
    row, weights = rng.standard_normal((1, 64)).astype(f32), (rng.standard_normal((64, 64)) / 8).astype(BF16)
    with emulated_gpu() as gpu:
        compiled = rlx.compile(g, "cuda")
        compiled.set_params({"w": weights, "gamma": np.ones(64, f32)})
        (y,) = (np.asarray(y) for y in compiled.run({"x": row}))
        assert gpu.launches <= 3
    normed = (row + 1) / np.sqrt(((row + 1) ** 2).mean())
    exponentials = np.exp(normed @ weights.astype(f32).T)
    np.testing.assert_allclose(y, exponentials / exponentials.sum(), rtol=0.05)


def test_fused_launches_compute_what_numpy_does() -> None:
    (y, *_), _ = run(544, 1)
    rng = np.random.default_rng(544)
    x = rng.standard_normal((9, 544)).astype(f32)[:1].astype(np.float64)
    w, gamma = rng.standard_normal((96, 544)).astype(BF16).astype(np.float64), rng.random(544).astype(f32) + 0.5
    normed = (x / np.sqrt((x * x).mean() + 1e-6) * gamma).astype(f32).astype(BF16).astype(np.float64)
    np.testing.assert_allclose(y, normed @ w.T, rtol=1e-4, atol=1e-3)


# -- a decoder -------------------------------------------------------------------------------------------------------
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def write_decoder(folder: Path) -> Path:
    from safetensors.numpy import save_file

    rng, tensors = np.random.default_rng(0), {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,)}
    for i in range(2):
        shapes = {
            "self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
            "self_attn.o_proj": (64, 128), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96), "input_layernorm": (64,), "post_attention_layernorm": (64,),
            "self_attn.q_norm": (32,), "self_attn.k_norm": (32,),
        }  # fmt: skip
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    numbers = {name: rng.standard_normal(shape).astype(f32) * shape[-1] ** -0.5 for name, shape in tensors.items()}
    save_file({name: x.astype(BF16) for name, x in numbers.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def decoded(folder: Path, batch: int, **options: Any) -> tuple[list[bytes], int]:
    """Logits of decode steps after a prompt that fills more than a split, and the kernels of a step."""
    with emulated_gpu(**options) as gpu, rlx.load(folder, device="cuda", context=192) as model:
        decoder = Decoder.start(model.compiled, model.caches.spec, batch, 192)  # type: ignore[union-attr]
        prompt = np.random.default_rng(1).integers(0, 64, 127).tolist()
        decoder.prefill([prompt[: 127 - 40 * i] for i in range(batch)], [0] * batch)
        steps = []
        for token in (3, 4, 5):
            before = gpu.launches
            picks = decoder.decode([token] * batch)
            steps.append(np.asarray(picks[0].batch_logits).tobytes())
        return steps, gpu.launches - before


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_has_the_bits_of_single_launches(batch: int, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path)
    fused, fewer = decoded(folder, batch)
    assert decoded(folder, batch, backwards=True)[0] == fused
    with (
        mock.patch.object(launch_plan, "fuse_prologues", lambda planned, *_: list(planned)),
        mock.patch.object(launch_plan, "fuse_chains", lambda planned, *_: list(planned)),
        mock.patch.object(launch_plan, "fuse_heads", lambda planned, *_: list(planned)),
    ):
        single, more = decoded(folder, batch)
    assert single == fused
    # Five launches per layer of one token: qkv, attention with its heads, o, gate and up, down; layer 0 has some more.
    assert fewer <= (2 * 5 + 7 if batch == 1 else more - 8)
