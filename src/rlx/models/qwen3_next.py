"""Qwen3-Next and Qwen3.5: most layers keep a matrix by the gated delta rule, every fourth attends, with a gate.

Norms multiply by 1 + weight, a part of each head turns, and a mixture of experts may have one that all tokens share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import DeltaNetLayer, FlowStage, GatedAttentionLayer, GemmaRmsNorm, MoeFfn, SharedMoeFfn
from rlx.flow.weights import Array
from rlx.models import moe, qwen3
from rlx.models.config import FULL, MAX_HEAD_DIM, DecoderConfig, key, unsupported
from rlx.models.family import family
from rlx.models.rope import rope_tables
from rlx.types import sym

LINEAR = "linear_attention"  # the kind of layers with the delta rule


@dataclass(frozen=True)
class Config(moe.Config):
    """Qwen3-Next's configuration."""

    HF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: values for name, values in DecoderConfig.HF_NEUTRAL.items() if name != "partial_rotary_factor"},
        "use_sliding_window": (None, False),
    }

    head_dim_given: int | None = key(hf="head_dim", default=256, most=MAX_HEAD_DIM)
    partial: float = key(hf="partial_rotary_factor", default=0.25)
    every: int = key(hf="full_attention_interval", default=4)
    key_heads: int = key(hf="linear_num_key_heads", default=16)
    value_heads: int = key(hf="linear_num_value_heads", default=32)
    state: int = key(hf="linear_key_head_dim", default=128, most=MAX_HEAD_DIM)
    value_size: int = key(hf="linear_value_head_dim", default=128, most=MAX_HEAD_DIM)
    kernel: int = key(hf="linear_conv_kernel_dim", default=4, most=64)
    experts: int = key(hf="num_experts", default=512, least=0, most=moe.MAX_EXPERTS)
    chosen: int = key(hf="num_experts_per_tok", default=10)
    expert_ffn: int = key(hf="moe_intermediate_size", default=512)
    shared_ffn: int = key(hf="shared_expert_intermediate_size", default=512)
    normalise: bool = key(hf="norm_topk_prob", default=True)

    @property
    def rotary(self) -> int:
        return int(self.head_dim * self.partial)

    def is_dense(self, layer: int) -> bool:
        return not self.experts or super().is_dense(layer)

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0 if self.layer_types is None else self.layer_types[layer] == FULL

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
        if self.value_size != self.state:
            hint = f"keys have {self.state}, and states are square"
            raise unsupported(where, "linear_value_head_dim", self.value_size, hint=hint)
        DecoderConfig.check(self, where)
        if self.experts:
            moe.check_experts(where, self.experts, self.chosen)

    def left_out(self) -> tuple[str, ...]:
        of_experts = (".experts.", ".shared_expert", ".mlp.gate.")
        without = () if self.experts else (n for n in WEIGHTS if any(part in n for part in of_experts))
        return (*super().left_out(), *without)


@dataclass(frozen=True)
class DenseConfig(Config):
    """Qwen3.5's configuration: no experts."""

    experts: int = 0


_LAYER = "model.layers.{i}"
_DELTA = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")
_SHARED = {f"{_LAYER}.linear_attn.{name}": "" for name in _DELTA}
WEIGHTS = moe.QWEN_WEIGHTS | _SHARED | {
    f"{_LAYER}.{name}.weight": "" for name in (
        "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "mlp.shared_expert_gate", "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
    )
}  # fmt: skip
DENSE_WEIGHTS = (
    qwen3.WEIGHTS | _SHARED | {f"{_LAYER}.linear_attn.in_proj_{n}.weight": "" for n in ("qkv", "z", "b", "a")}
)


def decoder(name: str, c: Config, context: int, joined: bool) -> ModelFlow:
    """The flow of both; `joined` says how files have the projections of the delta rule."""

    def layer(i: int) -> FlowStage:
        at = f"model.layers.{i}"
        ffn: FlowStage | None = None
        if not c.is_dense(i):
            mixture = MoeFfn(f"{at}.mlp", c.experts, c.chosen, c.normalise, c.expert_ffn, c.activation)
            ffn = SharedMoeFfn(mixture, c.shared_ffn)
        shared: dict[str, Any] = {
            "layer_idx": i, "intermediate_size": c.ffn, "activation": c.activation, "ffn": ffn,
            "attention_bias": c.attention_bias, "output_bias": c.output_bias,
        }  # fmt: skip
        if c.attends(i):
            return GatedAttentionLayer(at, c.heads, c.kv_heads, c.head_dim, c.eps, **shared)
        return DeltaNetLayer(
            at, c.heads, c.kv_heads, c.head_dim, c.eps, key_heads=c.key_heads, value_heads=c.value_heads,
            state_size=c.state, kernel=c.kernel, joined=joined, **shared,
        )  # fmt: skip

    cos, sin = rope_tables(c.rope, context)
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .rope_tables(cos, sin).token_embed(shape=(c.vocab, c.dim)).repeat_layers(c.layers, layer)
        .stage(GemmaRmsNorm("model.norm.weight", c.eps)).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip


@family(
    "qwen3next", kind="decoder", hf=["qwen3_next"], config=Config, weights=WEIGHTS, settings=moe.counted_experts,
    arrange=moe.stacks(moe.OF_QWEN),
)  # fmt: skip
def qwen3next(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("qwen3next", c, context, joined=True)


@family("qwen3.5", kind="decoder", hf=["qwen3_5_text"], config=DenseConfig, weights=DENSE_WEIGHTS)
def qwen35(c: DenseConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("qwen3.5", c, context, joined=False)
