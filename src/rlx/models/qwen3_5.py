"""Qwen3.5, dense and with experts: Qwen3-Next with separate projections, and all experts of a layer in one tensor.

GGUF files interleave the value heads: one per key head, then the next round. Multi-token prediction layers, stored
after the others, are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.formats import TensorFile
from rlx.formats.tensor_file import broken, quoted
from rlx.models import qwen3, qwen3_next
from rlx.models.config import TEXT_PREFIXES, Ignorable, group, key, text_settings
from rlx.models.config_fields import MAX_EXPERTS, Experts, said_in_gguf, without
from rlx.models.delta_net import EXPERTS, DeltaNetConfig
from rlx.models.family import Change, family
from rlx.models.weight_views import Rows, Stack, WeightViews


@dataclass(frozen=True)
class Config(DeltaNetConfig):
    """Configuration of Qwen3.5 with experts."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = without(DeltaNetConfig.GGUF_IGNORABLE, "rope.dimension_sections")
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False, "rates": True, "tiled": True}

    moe: Experts = group(
        Experts, experts=key(gguf="expert_count", hf="num_experts", default=256, maximum=MAX_EXPERTS), **EXPERTS
    )  # fmt: skip
    extra_layers: int = 0  # multi-token prediction layers stored after the others

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return super().inferred_from_gguf(file) | layer_fields(file)

    def gguf_only_settings(self) -> dict[str, Any]:
        return {**super().gguf_only_settings(), **rope_sections(self.rotary)}


@dataclass(frozen=True)
class DenseConfig(DeltaNetConfig):
    """Configuration of dense Qwen3.5."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = Config.GGUF_IGNORABLE
    IN_GGUF: ClassVar[Mapping[str, Any]] = Config.IN_GGUF

    moe: Experts = group(Experts, **EXPERTS | {"experts": 0, "chosen": 0, "expert_ffn": 0, "shared_ffn": 0})
    extra_layers: int = 0

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return super().inferred_from_gguf(file) | layer_fields(file)

    def gguf_only_settings(self) -> dict[str, Any]:
        return {**super().gguf_only_settings(), **rope_sections(self.rotary)}


def layer_fields(file: TensorFile) -> dict[str, Any]:
    """The layer count without multi-token prediction layers, and a dense feed-forward size for models without any."""
    layers, extra = said_in_gguf(file.metadata, "block_count", "nextn_predict_layers")
    ffn, each = said_in_gguf(file.metadata, "feed_forward_length", "expert_feed_forward_length")
    known = {"ffn": each} if ffn is None and type(each) is int else {}
    if extra is None or type(layers) is not int:
        return known
    limit = max(layers - 1, 0)
    if type(extra) is not int or not 0 <= extra <= limit:
        name = f"{file.metadata.get('general.architecture')}.nextn_predict_layers"
        raise broken(file.path, f"metadata: {name}", expected=f"0 to {limit}", actual=quoted(extra))
    _check_prediction_layers(file, range(layers - extra, layers))
    return known | {"layers": layers - extra, "extra_layers": extra}


def rope_sections(rotary: int) -> dict[str, Any]:
    """Rotary pairs per head for time, height and width: a third each; for text all three positions are equal."""
    half = rotary // 2
    return {"rope.dimension_sections": [(half + 2 - i) // 3 for i in range(3)] + [0]}


def _check_prediction_layers(file: TensorFile, layers: range) -> None:
    """Check that the ignored layers are multi-token prediction layers: a wrong count would drop others."""
    named = [match for name in file.names if (match := re.match(r"blk\.([0-9]{1,9})\.(nextn\.)?", name))]
    guessing = {int(match[1]) for match in named if match[2]}
    for i in sorted({int(match[1]) for match in named} - guessing):
        if i in layers:
            where = f"metadata: the last {len(layers)} layers guess further tokens"
            raise broken(file.path, where, expected=f"tensors blk.{i}.nextn.*", actual="none")


_LAYER = "model.layers.{i}"
_BOTH, _DOWN = f"{_LAYER}.mlp.experts.gate_up_proj", f"{_LAYER}.mlp.experts.down_proj"
_GATES = {
    f"{_LAYER}.linear_attn.in_proj_{hf}.weight": f"blk.{{i}}.ssm_{gguf}.weight"
    for hf, gguf in (("b", "beta"), ("a", "alpha"))
}
WEIGHTS = qwen3.WEIGHTS | qwen3_next.SHARED | _GATES
MOE_WEIGHTS = qwen3_next.MIXTURE | _GATES | {_BOTH: "", _DOWN: ""}


def with_size(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Adds the dense feed-forward size, which files omit because no layer is dense."""
    settings = text_settings(settings, where)
    return {"intermediate_size": settings.get("moe_intermediate_size"), **settings}


def weight_views(c: Config, format: str) -> WeightViews:
    """Hugging Face files store experts one by one, or all in two tensors."""
    if format == "gguf":
        return {}
    ffn = c.moe.expert_ffn
    both = {"gate": Rows(_BOTH, 0, ffn, axis=1), "up": Rows(_BOTH, ffn, axis=1), "down": Rows(_DOWN)}
    one, all_ = f"{_LAYER}.mlp.experts.{{j}}", f"{_LAYER}.mlp.experts"
    return {
        f"{all_}.{name}_proj.weight": (Stack(f"{one}.{name}_proj.weight", c.moe.experts), rows)
        for name, rows in both.items()
    }


def changes(c: DeltaNetConfig, name: str) -> Change | None:
    """Changes made by GGUF converters: those of Qwen3-Next, and another order of value heads."""
    numbers = qwen3_next.changes(c, name)
    if ".linear_attn." not in name or name.endswith(".norm.weight"):
        return numbers
    size = 1 if name.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else c.delta.value_size
    axis = 1 if name.endswith("out_proj.weight") else 0

    def moved(outer: int, inner: int) -> Callable[[Array], Array]:
        """Returns a function that reorders the heads, which come last along an axis."""

        def apply(x: Array) -> Array:
            before, heads = np.split(np.moveaxis(x, axis, 0), [x.shape[axis] - c.delta.value_heads * size])
            other = heads.reshape(outer, inner, size, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)
            return np.moveaxis(np.concatenate([before, other]), 0, axis)

        return apply

    heads, share = c.delta.key_heads, c.delta.share
    interleave, restore = moved(heads, share), moved(share, heads)
    if numbers is None:
        return Change(interleave, restore)
    return Change(lambda x: numbers.to_gguf(interleave(x)), lambda x: numbers.from_gguf(restore(x)))


@family("qwen3.5", kind="decoder", gguf=["qwen35"], hf=["qwen3_5_text", "qwen3_5"], config=DenseConfig, weights=WEIGHTS,
        prefixes=TEXT_PREFIXES, settings=text_settings, changes=changes)  # fmt: skip
def qwen35(c: DenseConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return qwen3_next.decoder("qwen3.5", c, context)


@family("qwen3.5moe", kind="decoder", gguf=["qwen35moe"], hf=["qwen3_5_moe_text", "qwen3_5_moe"], config=Config,
        weights=MOE_WEIGHTS, prefixes=TEXT_PREFIXES, settings=with_size, weight_views=weight_views,
        changes=changes)  # fmt: skip
def qwen35moe(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return qwen3_next.decoder("qwen3.5moe", c, context)
