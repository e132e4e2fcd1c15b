"""Groups of fields that several decoder families share.

A family's configuration is one flat class that holds such records (`config.group`); it never inherits from another
family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorFile
from rlx.models.config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    SLIDING,
    DecoderConfig,
    Ignorable,
    check_layer_types,
    key,
)

MAX_EXPERTS = 4096
# GGUF does not say which Qwen layers have a sliding window.
NO_WINDOW: Ignorable = {**DecoderConfig.GGUF_IGNORABLE, "attention.sliding_window": (0,)}


# -- single fields ---------------------------------------------------------------------------------------------------
def head_dim_key(default: int | None) -> Any:
    return key(gguf="attention.key_length", hf="head_dim", default=default, maximum=MAX_HEAD_DIM)


def eps_key(default: float) -> Any:
    return key(gguf="attention.layer_norm_rms_epsilon", hf="rms_norm_eps", default=default, said_in_gguf=True)


def rope_base_key(default: float) -> Any:
    return key(gguf="rope.freq_base", hf="rope_theta", default=default)


def window_key(default: int | None, *, minimum: int = 1) -> Any:
    return key(
        gguf="attention.sliding_window", hf="sliding_window", default=default, minimum=minimum, maximum=MAX_POSITIONS
    )


# -- groups ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Biases:
    """Which projections of a layer add a bias."""

    qkv_bias: bool = key(hf="attention_bias", default=False)
    output_bias: bool = key(hf="attention_bias", default=False)
    mlp_bias: bool = False

    def omitted_weights(self, weights: Iterable[str]) -> tuple[str, ...]:
        """The biases among these weights that the model does not have."""
        has = {".self_attn.o_proj.": self.output_bias, ".self_attn.": self.qkv_bias, ".mlp.": self.mlp_bias}
        biases = [name for name in weights if name.endswith(".bias")]
        return tuple(b for b in biases if not next(on for part, on in has.items() if part in b))

    @staticmethod
    def in_gguf(file: TensorFile, *names: str) -> dict[str, bool]:
        """Infers these fields from the presence of bias tensors in the file."""
        tensors = {"qkv_bias": "attn_q", "output_bias": "attn_output", "mlp_bias": "ffn_gate"}
        return {name: f"blk.0.{tensors[name]}.bias" in file for name in names}


@dataclass(frozen=True)
class QwenWindows:
    """Sliding windows in Qwen's settings: off, from some layer on, or in the layers of a list."""

    use_sliding_window: bool = key(hf="use_sliding_window", default=False)
    sliding_window: int | None = key(hf="sliding_window", default=4096, maximum=MAX_POSITIONS)
    max_window_layers: int = key(hf="max_window_layers", default=28, minimum=0, maximum=MAX_LAYERS)
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)

    @property
    def everywhere(self) -> int | None:
        """The window, if all layers have one."""
        return self.sliding_window if self.use_sliding_window else None

    def of(self, layer: int) -> int | None:
        """The window of a layer, or None if it attends to all keys."""
        if self.layer_types is None:
            return self.everywhere if layer >= self.max_window_layers else None
        return self.everywhere if self.layer_types[layer] == SLIDING else None

    def check(self, where: str, layers: int) -> None:
        check_layer_types(where, self.layer_types, layers, self.everywhere)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward; some layers may be dense."""

    experts: int = key(gguf="expert_count", hf="num_experts", default=128, maximum=MAX_EXPERTS)
    chosen: int = key(gguf="expert_used_count", hf="num_experts_per_tok", default=8)
    expert_ffn: int = key(gguf="expert_feed_forward_length", hf="moe_intermediate_size", default=768)
    shared_ffn: int = 0  # inner size of the shared expert
    normalise: bool = key(hf="norm_topk_prob", default=False)
    step: int = key(hf="decoder_sparse_step", default=1)
    dense: tuple[int, ...] | None = key(hf="mlp_only_layers", default=None)

    def is_dense(self, layer: int) -> bool:
        return not self.experts or layer in (self.dense or ()) or bool((layer + 1) % self.step)

    def check(self, where: str) -> None:
        if self.chosen > self.experts:
            raise FormatError(f"{where}: {self.chosen} experts a token are asked for, there are {self.experts}")

    @staticmethod
    def ignorable(others: Ignorable) -> dict[str, tuple[Any, ...]]:
        """Ignorable GGUF settings for this kind of mixture, in addition to `others`."""
        of_mixtures = {
            "expert_shared_count": (0,), "expert_weights_scale": (0, 1), "leading_dense_block_count": (0,),
            "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
        }  # fmt: skip
        return without(others, "expert_count") | of_mixtures


def without(settings: Ignorable, *names: str) -> dict[str, tuple[Any, ...]]:
    """Returns a table of ignorable settings without those that the family reads."""
    return {name: values for name, values in settings.items() if name not in names}


def check_rotary(where: str, rotary: int, head_dim: int) -> None:
    """Check that RoPE can rotate this part of a head."""
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise FormatError(f"{where}: {rotary} of {head_dim} elements of a head turn; expected an even part")


def said_in_gguf(metadata: Mapping[str, Any], *names: str) -> list[Any]:
    """Values from GGUF metadata under the architecture's prefix, None for absent ones."""
    prefix = metadata.get("general.architecture")
    return [metadata.get(f"{prefix}.{name}") for name in names]
