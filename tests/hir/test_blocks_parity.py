"""Layer blocks against the layers of `transformers`, in float64 but for norms and softmax, which they do in f32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import FusionPolicy, GraphModule
from rlx.profile import CompileProfile, Fusion

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Array = np.ndarray[Any, Any]
BATCH, SEQ = 2, 7


def randomised(layer: Any) -> Any:
    """The layer in float64 with random weights; scales near what they start at."""
    generator = torch.Generator().manual_seed(0)
    layer = layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)
    return layer


def tables(half: int) -> tuple[Array, Array]:
    angles = np.outer(np.arange(SEQ), 10000.0 ** (-np.arange(half) / half))
    return np.cos(angles), np.sin(angles)


def both(table: Array) -> Any:
    """[1, seq, 2 · half], as `transformers` has it."""
    return torch.from_numpy(np.concatenate([table, table], -1))[None]


def causal() -> Any:
    return torch.triu(torch.full((1, 1, SEQ, SEQ), -torch.inf, dtype=torch.float64), 1)


def run(block: str, operands: dict[str, Array], **attrs: Any) -> list[Array]:
    """A block of params on both devices under both policies; all four agree."""
    results = []
    for policy in FusionPolicy:
        m = GraphModule.hir(block).with_fusion_policy(policy)
        values = [m.param(n, a.shape, a.dtype) for n, a in operands.items()]
        m.finish_hir(getattr(m, block)(*values, **attrs))
        for device in ("reference", "cpu"):
            f = rlx.compile(m, device, profile=CompileProfile(Fusion(policy)))
            f.set_params(operands)
            results.append(f.run()[0])
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-10, atol=1e-10)
    return results


def weight(linear: Any) -> Array:
    return np.ascontiguousarray(linear.weight.detach().numpy().T)


def test_llama_decoder_block_is_a_llama_layer() -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                         attn_implementation="eager")  # fmt: skip
    layer = randomised(LlamaDecoderLayer(config, 0))
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, 32))
    cos, sin = tables(4)
    with torch.no_grad():
        inputs = layer(torch.from_numpy(x), attention_mask=causal(), position_embeddings=(both(cos), both(sin)))
    want = inputs[0].numpy() if isinstance(inputs, tuple) else inputs.numpy()
    attn, mlp = layer.self_attn, layer.mlp
    projections = {n: weight(getattr(attn, f"{n}_proj")) for n in "qkvo"}
    operands = {
        "x": x, "input_norm": layer.input_layernorm.weight.detach().numpy(), **projections,
        "post_norm": layer.post_attention_layernorm.weight.detach().numpy(),
        **{n: weight(getattr(mlp, f"{n}_proj")) for n in ("gate", "up", "down")}, "cos": cos, "sin": sin,
    }  # fmt: skip
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "eps": config.rms_norm_eps}
    np.testing.assert_allclose(run("llama_decoder_block", operands, **sizes)[0], want, rtol=1e-5, atol=1e-5)


def test_the_layer_of_the_mtp_head_is_a_qwen_layer_of_full_attention() -> None:
    """Around the layer of `transformers`: norms, joint projection and head written out in torch."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

    hidden, head_dim, vocab, n_rot = 32, 16, 23, 4
    config = Qwen3NextConfig(
        hidden_size=hidden, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        num_experts=0, mlp_only_layers=[0], layer_types=["full_attention"], num_hidden_layers=1,
        attn_implementation="eager",
    )  # fmt: skip
    layer = randomised(Qwen3NextDecoderLayer(config, 0))
    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((BATCH, SEQ, hidden)), rng.standard_normal((vocab, hidden))
    ids, last = rng.integers(0, vocab, (BATCH, SEQ)), np.array([SEQ - 1, 2])
    scales = {n: rng.uniform(0.5, 1.5, hidden) for n in ("hidden_norm", "embed_norm", "norm")}
    joint, head = rng.standard_normal((2 * hidden, hidden)) * 0.2, rng.standard_normal((hidden, vocab))
    cos, sin = tables(n_rot // 2)
    eps = config.rms_norm_eps

    def norm(value: Any, scale: str) -> Any:
        weight = torch.from_numpy(scales[scale])
        return torch.nn.functional.rms_norm(value, weight.shape, weight, eps)

    with torch.no_grad():
        tokens = torch.nn.functional.embedding(torch.from_numpy(ids), torch.from_numpy(table))
        sides = [norm(tokens, "embed_norm"), norm(torch.from_numpy(x), "hidden_norm")]
        h = torch.cat(sides, -1) @ torch.from_numpy(joint)
        h = layer(h, attention_mask=causal(), position_embeddings=(both(cos), both(sin)))
        h = h[0] if isinstance(h, tuple) else h
        want = norm(h[torch.arange(BATCH), torch.from_numpy(last)], "norm") @ torch.from_numpy(head)

    def scale(module: Any) -> Array:
        return np.asarray(1 + module.weight.detach().numpy())  # the file keeps what is to be added to 1

    attn, mlp = layer.self_attn, layer.mlp
    operands = {
        "x": x, "ids": ids.astype(np.int32), "last": last.astype(np.int32), "embed": table,
        "hidden_norm": scales["hidden_norm"], "embed_norm": scales["embed_norm"], "eh_proj": joint,
        "input_norm": scale(layer.input_layernorm), **{n: weight(getattr(attn, f"{n}_proj")) for n in "qkvo"},
        "q_norm": scale(attn.q_norm), "k_norm": scale(attn.k_norm), "cos": cos, "sin": sin,
        "post_norm": scale(layer.post_attention_layernorm),
        **{n: weight(getattr(mlp, f"{n}_proj")) for n in ("gate", "up", "down")}, "norm": scales["norm"], "head": head,
    }  # fmt: skip
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "eps": eps, "n_rot": n_rot}
    np.testing.assert_allclose(run("qwen35_mtp_head", operands, **sizes)[0], want.numpy(), rtol=1e-5, atol=1e-5)
