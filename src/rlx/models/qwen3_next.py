"""Qwen3-Next: gated delta rule layers; every fourth layer is gated attention.

Norms multiply by 1 + weight, RoPE rotates a part of each head, and the mixture of experts has a shared expert. GGUF
files have the 1 in the norms and store decay rates instead of their logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import DeltaNetLayer, FlowStage, GatedAttentionLayer, GemmaRmsNorm, RmsNorm, SharedMoeFfn
from rlx.models import moe
from rlx.models.config import group, key
from rlx.models.config_fields import MAX_EXPERTS, Experts
from rlx.models.delta_net import EXPERTS, DeltaNetConfig
from rlx.models.family import Change, family
from rlx.models.rope import rope_stage
from rlx.models.weight_views import GroupedRows, WeightViews
from rlx.types import sym


@dataclass(frozen=True)
class Config(DeltaNetConfig):
    """Qwen3-Next's configuration."""

    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False, "rates": True}

    moe: Experts = group(
        Experts, experts=key(gguf="expert_count", hf="num_experts", default=512, minimum=0, maximum=MAX_EXPERTS),
        chosen=key(gguf="expert_used_count", hf="num_experts_per_tok", default=10), **EXPERTS,
    )  # fmt: skip

    def omitted_weights(self) -> tuple[str, ...]:
        of_experts = (".experts.", ".shared_expert", ".mlp.gate.")
        without = () if self.moe.experts else (n for n in WEIGHTS if any(part in n for part in of_experts))
        return (*super().omitted_weights(), *without)


_LAYER = "model.layers.{i}"
_DELTA = f"{_LAYER}.linear_attn"
_QKVZ, _BA = f"{_DELTA}.in_proj_qkvz.weight", f"{_DELTA}.in_proj_ba.weight"
_PARTS = ("gate", "up", "down")
SHARED = {
    f"{_LAYER}.post_attention_layernorm.weight": "blk.{i}.post_attention_norm.weight",
    f"{_DELTA}.A_log": "blk.{i}.ssm_a", f"{_DELTA}.dt_bias": "blk.{i}.ssm_dt.bias",
    f"{_DELTA}.conv1d.weight": "blk.{i}.ssm_conv1d.weight", f"{_DELTA}.norm.weight": "blk.{i}.ssm_norm.weight",
    f"{_DELTA}.out_proj.weight": "blk.{i}.ssm_out.weight", f"{_DELTA}.in_proj_qkv.weight": "blk.{i}.attn_qkv.weight",
    f"{_DELTA}.in_proj_z.weight": "blk.{i}.attn_gate.weight",
}  # fmt: skip
MIXTURE = moe.QWEN_WEIGHTS | SHARED | {
    **{f"{_LAYER}.mlp.{n}_proj.weight": "" for n in _PARTS},  # GGUF has no layers without experts
    f"{_LAYER}.mlp.shared_expert_gate.weight": "blk.{i}.ffn_gate_inp_shexp.weight",
    **{f"{_LAYER}.mlp.shared_expert.{n}_proj.weight": f"blk.{{i}}.ffn_{n}_shexp.weight" for n in _PARTS},
}  # fmt: skip
WEIGHTS = MIXTURE | {_QKVZ: "blk.{i}.ssm_in.weight", _BA: "blk.{i}.ssm_ba.weight"}


def weight_views(c: Config, format: str) -> WeightViews:
    """Splits q, k, v and gates, which files interleave per key head."""
    d = c.delta
    n, share = d.state, d.share
    v, z = 2 * n + share * d.value_size, 2 * n + 2 * share * d.value_size
    parts = {n: GroupedRows(_BA, d.key_heads, 2 * share, ((at, at + share),)) for n, at in (("b", 0), ("a", share))}
    if format != "gguf" or d.joined:
        parts["qkv"] = GroupedRows(_QKVZ, d.key_heads, z, ((0, n), (n, 2 * n), (2 * n, v)))
        parts["z"] = GroupedRows(_QKVZ, d.key_heads, z, ((v, z),))
    return {**moe.stacks(moe.OF_QWEN)(c, format), **{f"{_DELTA}.in_proj_{n}.weight": p for n, p in parts.items()}}


def changes(c: DeltaNetConfig, name: str) -> Change | None:
    """Changes made by GGUF converters to norms and decay rates."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return Change(lambda x: x + 1, lambda x: x - 1)
    return Change(lambda x: -np.exp(x), lambda x: np.log(-x)) if name.endswith(".A_log") else None


def decoder(name: str, c: DeltaNetConfig, context: int) -> ModelFlow:
    """The flow of Qwen3-Next and Qwen3.5."""
    d = c.delta

    def layer(i: int) -> FlowStage:
        at = f"model.layers.{i}"
        mixture = moe.mixture(c, i, c.moe.expert_ffn)
        ffn = None if mixture is None else SharedMoeFfn(mixture, c.moe.shared_ffn)
        shared: dict[str, Any] = {
            "layer_idx": i, "intermediate_size": c.ffn, "activation": c.activation, "ffn": ffn,
            "unit_offset": c.unit_offset,
        }  # fmt: skip
        if d.attends(i):
            return GatedAttentionLayer(
                at, c.heads, c.kv_heads, c.head_dim, c.eps, attention_bias=c.biases.qkv_bias,
                output_bias=c.biases.output_bias, **shared,
            )  # fmt: skip
        return DeltaNetLayer(
            at, c.eps, key_heads=d.key_heads, value_heads=d.value_heads, state_size=d.state, value_size=d.value_size,
            kernel=d.kernel, tiled=d.tiled, rates=d.rates, **shared,
        )  # fmt: skip

    norm = GemmaRmsNorm if c.unit_offset else RmsNorm
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .stage(rope_stage(c.rope, context)).token_embed(shape=(c.vocab, c.dim)).repeat_layers(c.layers, layer)
        .stage(norm("model.norm.weight", c.eps)).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip


@family(
    "qwen3next", kind="decoder", gguf=["qwen3next"], hf=["qwen3_next"], config=Config, weights=WEIGHTS,
    settings=moe.rename_expert_count, weight_views=weight_views, changes=changes,
)  # fmt: skip
def qwen3next(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("qwen3next", c, context)
