"""Qwen3.5 with and without experts: Qwen3-Next whose projections lie apart, and all experts of a layer in one tensor.

In GGUF files heads of values come in rounds, one for each head of keys, and layers behind the others, which guess
further tokens, are left out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.flow.flow import ModelFlow
from rlx.formats import TensorFile
from rlx.formats.tensor_file import broken, quoted
from rlx.models import qwen3, qwen3_next
from rlx.models.config import TEXT_PREFIXES, Neutral, group, key, text_settings
from rlx.models.config_fields import MAX_EXPERTS, Experts, said_in_gguf, without
from rlx.models.delta_net import EXPERTS, DeltaNetConfig
from rlx.models.family import Change, family
from rlx.models.weight_views import Rows, Stack, WeightViews


@dataclass(frozen=True)
class Config(DeltaNetConfig):
    """That of Qwen3.5 with experts."""

    GGUF_NEUTRAL: ClassVar[Neutral] = without(DeltaNetConfig.GGUF_NEUTRAL, "rope.dimension_sections")
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False, "rates": True, "tiled": True}

    moe: Experts = group(
        Experts, experts=key(gguf="expert_count", hf="num_experts", default=256, most=MAX_EXPERTS), **EXPERTS
    )  # fmt: skip
    extra_layers: int = 0  # of a file, behind the others: they guess further tokens

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return super().known_of_gguf(file) | known_layers(file)

    def only_in_gguf(self) -> dict[str, Any]:
        return {**super().only_in_gguf(), **turns_by_kind(self.rotary)}


@dataclass(frozen=True)
class DenseConfig(DeltaNetConfig):
    """That of Qwen3.5 without experts."""

    GGUF_NEUTRAL: ClassVar[Neutral] = Config.GGUF_NEUTRAL
    IN_GGUF: ClassVar[Mapping[str, Any]] = Config.IN_GGUF

    moe: Experts = group(Experts, **EXPERTS | {"experts": 0, "chosen": 0, "expert_ffn": 0, "shared_ffn": 0})
    extra_layers: int = 0

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return super().known_of_gguf(file) | known_layers(file)

    def only_in_gguf(self) -> dict[str, Any]:
        return {**super().only_in_gguf(), **turns_by_kind(self.rotary)}


def known_layers(file: TensorFile) -> dict[str, Any]:
    """The number of layers without those that guess further tokens, and the size of feed-forwards that no layer has."""
    layers, extra = said_in_gguf(file.metadata, "block_count", "nextn_predict_layers")
    ffn, each = said_in_gguf(file.metadata, "feed_forward_length", "expert_feed_forward_length")
    known = {"ffn": each} if ffn is None and type(each) is int else {}
    if extra is None or type(layers) is not int:
        return known
    most = max(layers - 1, 0)
    if type(extra) is not int or not 0 <= extra <= most:
        name = f"{file.metadata.get('general.architecture')}.nextn_predict_layers"
        raise broken(file.path, f"metadata: {name}", expected=f"0 to {most}", actual=quoted(extra))
    _check_guessing(file, range(layers - extra, layers))
    return known | {"layers": layers - extra, "extra_layers": extra}


def turns_by_kind(rotary: int) -> dict[str, Any]:
    """How many turns of a head go by time, height and width: a third each, which texts have alike."""
    half = rotary // 2
    return {"rope.dimension_sections": [(half + 2 - i) // 3 for i in range(3)] + [0]}


def _check_guessing(file: TensorFile, layers: range) -> None:
    """That layers which are left out are such as guess: a wrong number would drop others."""
    named = [match for name in file.names if (match := re.match(r"blk\.([0-9]{1,9})\.(nextn\.)?", name))]
    guessing = {int(match[1]) for match in named if match[2]}
    for i in sorted({int(match[1]) for match in named} - guessing):
        if i in layers:
            what = f"metadata: the last {len(layers)} layers guess further tokens"
            raise broken(file.path, what, expected=f"tensors blk.{i}.nextn.*", actual="none")


_LAYER = "model.layers.{i}"
_BOTH, _DOWN = f"{_LAYER}.mlp.experts.gate_up_proj", f"{_LAYER}.mlp.experts.down_proj"
_GATES = {
    f"{_LAYER}.linear_attn.in_proj_{hf}.weight": f"blk.{{i}}.ssm_{gguf}.weight"
    for hf, gguf in (("b", "beta"), ("a", "alpha"))
}
WEIGHTS = qwen3.WEIGHTS | qwen3_next.SHARED | _GATES
MOE_WEIGHTS = qwen3_next.MIXTURE | _GATES | {_BOTH: "", _DOWN: ""}


def with_size(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """With the size of feed-forwards without experts, which files leave out: there are none."""
    settings = text_settings(settings, where)
    return {"intermediate_size": settings.get("moe_intermediate_size"), **settings}


def weight_views(c: Config, format: str) -> WeightViews:
    """Experts of Hugging Face's files lie one by one, or all in two tensors."""
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
    """What converters to GGUF do: as for Qwen3-Next, and heads of values change their order."""
    numbers = qwen3_next.changes(c, name)
    if ".linear_attn." not in name or name.endswith(".norm.weight"):
        return numbers
    size = 1 if name.endswith((".A_log", ".dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else c.delta.value_size
    axis = 1 if name.endswith("out_proj.weight") else 0

    def moved(outer: int, inner: int) -> Callable[[Array], Array]:
        """Heads, which lie behind everything else along an axis, from one order to the other."""

        def apply(x: Array) -> Array:
            before, heads = np.split(np.moveaxis(x, axis, 0), [x.shape[axis] - c.delta.value_heads * size])
            other = heads.reshape(outer, inner, size, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)
            return np.moveaxis(np.concatenate([before, other]), 0, axis)

        return apply

    heads, share = c.delta.key_heads, c.delta.share
    there, back = moved(heads, share), moved(share, heads)
    if numbers is None:
        return Change(there, back)
    return Change(lambda x: numbers.to_gguf(there(x)), lambda x: numbers.from_gguf(back(x)))


@family("qwen3.5", kind="decoder", gguf=["qwen35"], hf=["qwen3_5_text", "qwen3_5"], config=DenseConfig, weights=WEIGHTS,
        prefixes=TEXT_PREFIXES, settings=text_settings, changes=changes)  # fmt: skip
def qwen35(c: DenseConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return qwen3_next.decoder("qwen3.5", c, context)


@family("qwen3.5moe", kind="decoder", gguf=["qwen35moe"], hf=["qwen3_5_moe_text", "qwen3_5_moe"], config=Config,
        weights=MOE_WEIGHTS, prefixes=TEXT_PREFIXES, settings=with_size, weight_views=weight_views,
        changes=changes)  # fmt: skip
def qwen35moe(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return qwen3_next.decoder("qwen3.5moe", c, context)
