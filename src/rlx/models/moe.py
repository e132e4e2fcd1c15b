"""Qwen3-MoE and Mixtral: Qwen3 and Mistral with mixtures of experts as feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import MoeFfn, Qwen3Decoder
from rlx.formats import TensorFile
from rlx.models import llama, qwen3
from rlx.models.config import DecoderConfig, Ignorable, group, key
from rlx.models.config_fields import (
    MAX_EXPERTS,
    NO_WINDOW,
    Biases,
    Experts,
    QwenWindows,
    eps_key,
    rope_base_key,
    said_in_gguf,
    window_key,
)
from rlx.models.family import family
from rlx.models.weight_views import Stack, WeightViews


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Qwen3-MoE's configuration; in Hugging Face files some layers may be dense.

    Its window, unlike Qwen3's, applies to all layers.
    """

    GGUF_IGNORABLE: ClassVar[Ignorable] = Experts.ignorable(NO_WINDOW)

    biases: Biases = group(Biases)
    windows: QwenWindows = group(QwenWindows)
    moe: Experts = group(Experts)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**Biases.in_gguf(file, "qkv_bias", "output_bias"), "normalise": True}  # llama.cpp always normalises

    def window(self, layer: int) -> int | None:
        return self.windows.everywhere

    def check(self, where: str) -> None:
        super().check(where)
        self.windows.check(where, self.layers)
        self.moe.check(where)

    def omitted_weights(self) -> tuple[str, ...]:
        return self.biases.omitted_weights(QWEN_WEIGHTS)


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """Mixtral's configuration: all layers are mixtures. GGUF calls it a Llama with experts."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = Experts.ignorable(DecoderConfig.GGUF_IGNORABLE)
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"pairs": True}

    eps: float = eps_key(1e-5)
    rope_base: float = rope_base_key(1_000_000.0)
    sliding_window: int | None = window_key(None)
    pairs: bool = False  # as in Llama
    moe: Experts = group(
        Experts, experts=key(gguf="expert_count", hf="num_local_experts", default=8, maximum=MAX_EXPERTS),
        chosen=key(gguf="expert_used_count", hf="num_experts_per_tok", default=2), expert_ffn=0, normalise=True, step=1,
        dense=None,
    )  # fmt: skip

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        (base,) = said_in_gguf(file.metadata, "rope.freq_base")
        return {**cls.IN_GGUF, **({"rope_base": 10_000.0} if base is None else {})}  # llama.cpp's default

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def check(self, where: str) -> None:
        super().check(where)
        self.moe.check(where)


_LAYER = "model.layers.{i}"
_PARTS = ("gate", "up", "down")
_STACKED = {f"{_LAYER}.mlp.experts.{n}_proj.weight": f"blk.{{i}}.ffn_{n}_exps.weight" for n in _PARTS}
OF_QWEN = {f"{_LAYER}.mlp.experts.{{j}}.{n}_proj.weight": "" for n in _PARTS}  # in Hugging Face's files
_OF_MIXTRAL = {f"{_LAYER}.block_sparse_moe.experts.{{j}}.{n}.weight": "" for n in ("w1", "w3", "w2")}
QWEN_WEIGHTS = qwen3.WEIGHTS | {f"{_LAYER}.mlp.gate.weight": "blk.{i}.ffn_gate_inp.weight"} | _STACKED | OF_QWEN
MIXTRAL_WEIGHTS = {n: g for n, g in llama.WEIGHTS.items() if ".mlp." not in n and not n.endswith(".bias")} | {
    f"{_LAYER}.block_sparse_moe.gate.weight": "blk.{i}.ffn_gate_inp.weight", **_STACKED, **_OF_MIXTRAL
}  # fmt: skip


def rename_expert_count(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Puts the number of experts under its original name; `transformers` 5 writes another."""
    count = settings.get("num_experts", settings.get("num_local_experts"))
    return settings if count is None else {**settings, "num_experts": count}


def has_experts(metadata: Mapping[str, Any]) -> bool:
    """Whether a GGUF Llama is a Mixtral, which has no architecture name of its own."""
    (experts,) = said_in_gguf(metadata, "expert_count")
    return isinstance(experts, int) and experts > 0


def stacks(names: Mapping[str, str]) -> Callable[[Any, str], WeightViews]:
    """Stacks experts that Hugging Face files store one by one; GGUF files have them stacked."""

    def weight_views(c: Any, format: str) -> WeightViews:
        if format == "gguf":
            return {}
        return {ours: Stack(theirs, c.moe.experts) for ours, theirs in zip(_STACKED, names, strict=True)}

    return weight_views


def mixture(c: Any, layer: int, ffn: int, router: str | None = None) -> MoeFfn | None:
    """The mixture of a layer, or None if it is dense; `ffn` is the size of an expert."""
    moe, at = c.moe, f"model.layers.{layer}.mlp"
    if moe.is_dense(layer):
        return None
    return MoeFfn(at, moe.experts, moe.chosen, moe.normalise, ffn, c.activation, router)


@family(
    "qwen3moe", kind="decoder", gguf=["qwen3moe"], hf=["qwen3_moe"], config=Config, weights=QWEN_WEIGHTS,
    settings=rename_expert_count, weight_views=stacks(OF_QWEN),
)  # fmt: skip
def qwen3moe(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder(
        "qwen3moe", c, context, rope_factors, stage=Qwen3Decoder, biases=c.biases,
        ffn=lambda i: mixture(c, i, c.moe.expert_ffn),
    )  # fmt: skip


@family(
    "mixtral", kind="decoder", gguf=["llama"], hf=["mixtral"], config=MixtralConfig, weights=MIXTRAL_WEIGHTS,
    weight_views=stacks(_OF_MIXTRAL), reads_gguf=has_experts,
)  # fmt: skip
def mixtral(c: MixtralConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder(
        "mixtral", c, context, rope_factors, pairs=c.pairs,
        ffn=lambda i: mixture(c, i, c.ffn, f"model.layers.{i}.block_sparse_moe.gate.weight"),
    )  # fmt: skip
