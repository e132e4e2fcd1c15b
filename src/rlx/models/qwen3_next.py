"""Qwen3-Next: most layers keep a matrix by the gated delta rule, every fourth attends, with a gate.

Norms multiply by 1 + weight, a part of each head turns, and a mixture of experts has one that all tokens share. GGUF
files have the 1 in the norms and rates in place of their logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlx.errors import FormatError
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import (
    DeltaNetLayer,
    FlowStage,
    GatedAttentionLayer,
    GemmaRmsNorm,
    MoeFfn,
    RmsNorm,
    SharedMoeFfn,
)
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models import moe
from rlx.models.arrange import Arrangement, Spans
from rlx.models.config import FULL, LINEAR, MAX_HEAD_DIM, DecoderConfig, key, unsupported
from rlx.models.family import Change, family
from rlx.models.rope import rope_stage
from rlx.types import sym


@dataclass(frozen=True)
class Config(moe.Config):
    """Qwen3-Next's configuration."""

    HF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: values for name, values in DecoderConfig.HF_NEUTRAL.items() if name != "partial_rotary_factor"},
        "use_sliding_window": (None, False),
    }
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False, "rates": True}

    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=256, most=MAX_HEAD_DIM)
    partial: float = key(hf="partial_rotary_factor", default=0.25)
    every: int = key(gguf="full_attention_interval", hf="full_attention_interval", default=4)
    key_heads: int = key(gguf="ssm.group_count", hf="linear_num_key_heads", default=16)
    value_heads: int = key(gguf="ssm.time_step_rank", hf="linear_num_value_heads", default=32)
    state: int = key(gguf="ssm.state_size", hf="linear_key_head_dim", default=128, most=MAX_HEAD_DIM)
    value_size: int = key(hf="linear_value_head_dim", default=128, most=MAX_HEAD_DIM)
    kernel: int = key(gguf="ssm.conv_kernel", hf="linear_conv_kernel_dim", default=4, most=64)
    experts: int = key(gguf="expert_count", hf="num_experts", default=512, least=0, most=moe.MAX_EXPERTS)
    chosen: int = key(gguf="expert_used_count", hf="num_experts_per_tok", default=10)
    expert_ffn: int = key(gguf="expert_feed_forward_length", hf="moe_intermediate_size", default=512)
    shared_ffn: int = key(
        gguf="expert_shared_feed_forward_length", hf="shared_expert_intermediate_size", default=512
    )  # fmt: skip
    normalise: bool = key(hf="norm_topk_prob", default=True)
    unit_offset: bool = True  # norms lack the 1
    rates: bool = False  # A_log is -exp of itself
    tiled: bool = False  # heads of values in rounds
    joined: bool = False  # a GGUF file of the first converters, with the projections as Hugging Face has them

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        said = {n.partition(".")[2]: v for n, v in file.metadata.items() if n.partition(".")[0] != "general"}
        names = ("ssm.inner_size", "ssm.time_step_rank", "rope.dimension_count", "attention.key_length")
        inner, heads, turned, size = (said.get(name) for name in names)
        known: dict[str, Any] = {**cls.IN_GGUF, "normalise": True, "joined": "blk.0.ssm_in.weight" in file}
        if type(inner) is int and type(heads) is int and heads:
            known["value_size"] = inner // heads if inner % heads == 0 else inner
        if type(turned) is int and type(size) is int and size:
            known["partial"] = turned / size
        return known

    @property
    def rotary(self) -> int:
        return self.rope_dim or int(self.head_dim * self.partial)

    def is_dense(self, layer: int) -> bool:
        return not self.experts or super().is_dense(layer)

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0 if self.layer_types is None else self.layer_types[layer] == FULL

    def only_in_gguf(self) -> dict[str, Any]:
        first = next((i + 1 for i in range(self.layers) if self.attends(i)), self.every)
        return {"ssm.inner_size": self.value_heads * self.value_size, "full_attention_interval": first}

    def check(self, where: str) -> None:
        kinds = self.layer_types
        if kinds is not None and len(kinds) != self.layers:
            raise FormatError(f"{where}: layer_types has {len(kinds)} entries for {self.layers} layers")
        for kind in kinds or ():
            if kind not in (FULL, LINEAR):
                raise unsupported(where, "a layer type", kind, hint=f"known: {FULL}, {LINEAR}")
        if self.rotary % 2 or not 2 <= self.rotary <= self.head_dim:
            raise FormatError(
                f"{where}: {self.rotary} of {self.head_dim} elements of a head turn; expected an even part"
            )
        if self.value_heads % self.key_heads:
            raise FormatError(f"{where}: {self.value_heads} value heads are no multiple of {self.key_heads} key heads")
        DecoderConfig.check(self, where)
        if self.experts:
            moe.check_experts(where, self.experts, self.chosen)

    def left_out(self) -> tuple[str, ...]:
        of_experts = (".experts.", ".shared_expert", ".mlp.gate.")
        without = () if self.experts else (n for n in WEIGHTS if any(part in n for part in of_experts))
        return (*super().left_out(), *without)


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
    **{f"{_LAYER}.mlp.{n}_proj.weight": "" for n in _PARTS},  # no GGUF file has layers without experts
    f"{_LAYER}.mlp.shared_expert_gate.weight": "blk.{i}.ffn_gate_inp_shexp.weight",
    **{f"{_LAYER}.mlp.shared_expert.{n}_proj.weight": f"blk.{{i}}.ffn_{n}_shexp.weight" for n in _PARTS},
}  # fmt: skip
WEIGHTS = MIXTURE | {_QKVZ: "blk.{i}.ssm_in.weight", _BA: "blk.{i}.ssm_ba.weight"}


def arrange(c: Config, format: str) -> Arrangement:
    """Queries, keys, values and gates each for itself: in files, all that belong to a head of keys lie together."""
    n, share = c.state, c.value_heads // c.key_heads
    v, z = 2 * n + share * c.value_size, 2 * n + 2 * share * c.value_size
    parts = {n: Spans(_BA, c.key_heads, 2 * share, ((at, at + share),)) for n, at in (("b", 0), ("a", share))}
    if format != "gguf" or c.joined:
        parts["qkv"] = Spans(_QKVZ, c.key_heads, z, ((0, n), (n, 2 * n), (2 * n, v)))
        parts["z"] = Spans(_QKVZ, c.key_heads, z, ((v, z),))
    return {**moe.stacks(moe.OF_QWEN)(c, format), **{f"{_DELTA}.in_proj_{n}.weight": p for n, p in parts.items()}}


def changes(c: Config, name: str) -> Change | None:
    """What converters to GGUF do to norms and rates."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return Change(lambda x: x + 1, lambda x: x - 1)
    return Change(lambda x: -np.exp(x), lambda x: np.log(-x)) if name.endswith(".A_log") else None


def decoder(name: str, c: Config, context: int) -> ModelFlow:
    """The flow of Qwen3-Next and Qwen3.5."""

    def layer(i: int) -> FlowStage:
        at = f"model.layers.{i}"
        ffn: FlowStage | None = None
        if not c.is_dense(i):
            mixture = MoeFfn(f"{at}.mlp", c.experts, c.chosen, c.normalise, c.expert_ffn, c.activation)
            ffn = SharedMoeFfn(mixture, c.shared_ffn)
        shared: dict[str, Any] = {
            "layer_idx": i, "intermediate_size": c.ffn, "activation": c.activation, "ffn": ffn,
            "unit_offset": c.unit_offset,
        }  # fmt: skip
        if c.attends(i):
            return GatedAttentionLayer(
                at, c.heads, c.kv_heads, c.head_dim, c.eps, attention_bias=c.attention_bias, output_bias=c.output_bias,
                **shared,
            )  # fmt: skip
        return DeltaNetLayer(
            at, c.eps, key_heads=c.key_heads, value_heads=c.value_heads, state_size=c.state, value_size=c.value_size,
            kernel=c.kernel, tiled=c.tiled, rates=c.rates, **shared,
        )  # fmt: skip

    norm = GemmaRmsNorm if c.unit_offset else RmsNorm
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .stage(rope_stage(c.rope, context)).token_embed(shape=(c.vocab, c.dim)).repeat_layers(c.layers, layer)
        .stage(norm("model.norm.weight", c.eps)).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip


@family(
    "qwen3next", kind="decoder", gguf=["qwen3next"], hf=["qwen3_next"], config=Config, weights=WEIGHTS,
    settings=moe.counted_experts, arrange=arrange, changes=changes,
)  # fmt: skip
def qwen3next(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("qwen3next", c, context)
