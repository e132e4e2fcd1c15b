"""Decoders with gated delta rule layers and, every few layers, gated attention.

The shared configuration of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorFile
from rlx.models.config import FULL, LINEAR, MAX_HEAD_DIM, DecoderConfig, Ignorable, group, key, unsupported
from rlx.models.config_fields import NO_WINDOW, Biases, Experts, check_rotary, head_dim_key, said_in_gguf, without

# Experts, as both families have them.
EXPERTS = {
    "expert_ffn": key(gguf="expert_feed_forward_length", hf="moe_intermediate_size", default=512),
    "shared_ffn": key(gguf="expert_shared_feed_forward_length", hf="shared_expert_intermediate_size", default=512),
    "normalise": key(hf="norm_topk_prob", default=True),
}


@dataclass(frozen=True)
class DeltaNets:
    """Gated delta rule layers, and which layers use attention instead."""

    every: int = key(gguf="full_attention_interval", hf="full_attention_interval", default=4)
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)
    key_heads: int = key(gguf="ssm.group_count", hf="linear_num_key_heads", default=16)
    value_heads: int = key(gguf="ssm.time_step_rank", hf="linear_num_value_heads", default=32)
    state: int = key(gguf="ssm.state_size", hf="linear_key_head_dim", default=128, maximum=MAX_HEAD_DIM)
    value_size: int = key(hf="linear_value_head_dim", default=128, maximum=MAX_HEAD_DIM)
    kernel: int = key(gguf="ssm.conv_kernel", hf="linear_conv_kernel_dim", default=4, maximum=64)
    rates: bool = False  # A_log is stored as -exp(A_log)
    tiled: bool = False  # value heads are interleaved
    joined: bool = False  # a GGUF file from an early converter, with Hugging Face's fused projections

    @property
    def share(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0 if self.layer_types is None else self.layer_types[layer] == FULL

    def gguf_only_settings(self, layers: int) -> dict[str, Any]:
        first = next((i + 1 for i in range(layers) if self.attends(i)), self.every)
        return {"ssm.inner_size": self.value_heads * self.value_size, "full_attention_interval": first}

    def check(self, where: str, layers: int) -> None:
        kinds = self.layer_types
        if kinds is not None and len(kinds) != layers:
            raise FormatError(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
        for kind in kinds or ():
            if kind not in (FULL, LINEAR):
                raise unsupported(where, "a layer type", kind, hint=f"known: {FULL}, {LINEAR}")
        if self.value_heads % self.key_heads:
            raise FormatError(f"{where}: {self.value_heads} value heads are no multiple of {self.key_heads} key heads")


@dataclass(frozen=True)
class DeltaNetConfig(DecoderConfig):
    """Shared configuration: RoPE on a part of each head, and norms that multiply by 1 + weight."""

    HF_IGNORABLE: ClassVar[Ignorable] = {
        **without(DecoderConfig.HF_IGNORABLE, "partial_rotary_factor"), "use_sliding_window": (None, False)
    }  # fmt: skip
    GGUF_IGNORABLE: ClassVar[Ignorable] = Experts.ignorable(NO_WINDOW)

    stated_head_dim: int | None = head_dim_key(256)
    partial: float = key(hf="partial_rotary_factor", default=0.25)
    biases: Biases = group(Biases)
    delta: DeltaNets = group(DeltaNets)
    moe: Experts = group(Experts)
    unit_offset: bool = True  # the stored norms lack the 1

    @property
    def rotary(self) -> int:
        return self.rope_dim or int(self.head_dim * self.partial)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        inner, heads = said_in_gguf(file.metadata, "ssm.inner_size", "ssm.time_step_rank")
        rotary, size = said_in_gguf(file.metadata, "rope.dimension_count", "attention.key_length")
        # llama.cpp always normalises
        known: dict[str, Any] = {**cls.IN_GGUF, "normalise": True, "joined": "blk.0.ssm_in.weight" in file}
        if type(inner) is int and type(heads) is int and heads:
            known["value_size"] = inner // heads if inner % heads == 0 else inner
        if type(rotary) is int and type(size) is int and size:
            known["partial"] = rotary / size
        return known

    def gguf_only_settings(self) -> dict[str, Any]:
        return self.delta.gguf_only_settings(self.layers)

    def check(self, where: str) -> None:
        self.delta.check(where, self.layers)
        check_rotary(where, self.rotary, self.head_dim)
        super().check(where)
        if self.moe.experts:
            self.moe.check(where)

    def omitted_weights(self) -> tuple[str, ...]:
        return self.biases.omitted_weights(BIASES)


BIASES = tuple(f"model.layers.{{i}}.self_attn.{name}_proj.bias" for name in "qkvo")
