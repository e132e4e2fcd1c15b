"""Qwen3-MoE and Mixtral: decoders of Qwen3 and Mistral whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import DecoderLayer, LlamaDecoder, MoeFfn, Qwen3Decoder
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models import llama, qwen3
from rlx.models.arrange import Arrangement, Stack
from rlx.models.config import MAX_HEAD_DIM, MAX_POSITIONS, key
from rlx.models.family import family

MAX_EXPERTS = 4096


def check_experts(where: str, experts: int, chosen: int) -> None:
    if chosen > experts:
        raise FormatError(f"{where}: {chosen} experts a token are asked for, there are {experts}")


def _without_experts(neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """What a file may say besides: no other kind of mixture than these."""
    others = {
        "expert_shared_count": (0,), "expert_weights_scale": (0, 1), "leading_dense_block_count": (0,),
        "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
    }  # fmt: skip
    return {name: values for name, values in neutral.items() if name != "expert_count"} | others


@dataclass(frozen=True)
class Config(qwen3.Config):
    """Qwen3-MoE's configuration; in Hugging Face's, some layers may have one feed-forward for all tokens.

    Its window, unlike Qwen3's, is that of all layers.
    """

    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _without_experts(qwen3.Config.GGUF_NEUTRAL)

    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=None, most=MAX_HEAD_DIM)
    experts: int = key(gguf="expert_count", hf="num_experts", default=128, most=MAX_EXPERTS)
    chosen: int = key(gguf="expert_used_count", hf="num_experts_per_tok", default=8)
    expert_ffn: int = key(gguf="expert_feed_forward_length", hf="moe_intermediate_size", default=768)
    normalise: bool = key(hf="norm_topk_prob", default=False)
    step: int = key(hf="decoder_sparse_step", default=1)
    dense: tuple[int, ...] | None = key(hf="mlp_only_layers", default=None)

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**super().known_of_gguf(file), "normalise": True}  # llama.cpp always does it

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def is_dense(self, layer: int) -> bool:
        return layer in (self.dense or ()) or bool((layer + 1) % self.step)

    def check(self, where: str) -> None:
        super().check(where)
        check_experts(where, self.experts, self.chosen)


@dataclass(frozen=True)
class MixtralConfig(llama.MistralConfig):
    """Mixtral's configuration: all layers are mixtures. GGUF calls it a Llama with experts."""

    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _without_experts(llama.Config.GGUF_NEUTRAL)

    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="rms_norm_eps", default=1e-5, said_in_gguf=True)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=1_000_000.0)
    sliding_window: int | None = key(
        gguf="attention.sliding_window", hf="sliding_window", default=None, most=MAX_POSITIONS
    )
    experts: int = key(gguf="expert_count", hf="num_local_experts", default=8, most=MAX_EXPERTS)
    chosen: int = key(gguf="expert_used_count", hf="num_experts_per_tok", default=2)
    normalise: bool = True

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        known = super().known_of_gguf(file)
        return known if "llama.rope.freq_base" in file.metadata else {**known, "rope_base": 10_000.0}  # llama.cpp's

    @property
    def expert_ffn(self) -> int:
        return self.ffn

    def is_dense(self, layer: int) -> bool:
        return False

    def check(self, where: str) -> None:
        super().check(where)
        check_experts(where, self.experts, self.chosen)


_LAYER = "model.layers.{i}"
_PARTS = ("gate", "up", "down")
_STACKED = {f"{_LAYER}.mlp.experts.{n}_proj.weight": f"blk.{{i}}.ffn_{n}_exps.weight" for n in _PARTS}
OF_QWEN = {f"{_LAYER}.mlp.experts.{{j}}.{n}_proj.weight": "" for n in _PARTS}  # in Hugging Face's files
_OF_MIXTRAL = {f"{_LAYER}.block_sparse_moe.experts.{{j}}.{n}.weight": "" for n in ("w1", "w3", "w2")}
QWEN_WEIGHTS = qwen3.WEIGHTS | {f"{_LAYER}.mlp.gate.weight": "blk.{i}.ffn_gate_inp.weight"} | _STACKED | OF_QWEN
MIXTRAL_WEIGHTS = {n: g for n, g in llama.WEIGHTS.items() if ".mlp." not in n and not n.endswith(".bias")} | {
    f"{_LAYER}.block_sparse_moe.gate.weight": "blk.{i}.ffn_gate_inp.weight", **_STACKED, **_OF_MIXTRAL
}  # fmt: skip


def counted_experts(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The number of experts under the name that files had first; `transformers` 5 writes another."""
    found = settings.get("num_experts", settings.get("num_local_experts"))
    return settings if found is None else {**settings, "num_experts": found}


def stacks(names: Mapping[str, str]) -> Callable[[Any, str], Arrangement]:
    """Experts that lie one by one in Hugging Face's files; GGUF has them stacked."""

    def arrange(c: Any, format: str) -> Arrangement:
        if format == "gguf":
            return {}
        return {ours: Stack(theirs, c.experts) for ours, theirs in zip(_STACKED, names, strict=True)}

    return arrange


def decoder(
    name: str, c: Any, context: int, rope_factors: Array | None, stage: type[DecoderLayer], mixture: str
) -> ModelFlow:
    """A relative of Llama in which mixtures of experts take the place of feed-forwards."""

    def ffn(i: int) -> MoeFfn | None:
        if c.is_dense(i):
            return None
        return MoeFfn(
            f"model.layers.{i}.mlp", c.experts, c.chosen, c.normalise, c.expert_ffn, c.activation, mixture.format(i=i)
        )

    return llama.decoder(name, c, context, rope_factors, stage, ffn)


@family(
    "qwen3moe", kind="decoder", gguf=["qwen3moe"], hf=["qwen3_moe"], config=Config, weights=QWEN_WEIGHTS,
    settings=counted_experts, arrange=stacks(OF_QWEN),
)  # fmt: skip
def qwen3moe(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("qwen3moe", c, context, rope_factors, Qwen3Decoder, "model.layers.{i}.mlp.gate.weight")


@family(
    "mixtral", kind="decoder", hf=["mixtral"], config=MixtralConfig, weights=MIXTRAL_WEIGHTS,
    arrange=stacks(_OF_MIXTRAL), saved_as="llama",
)  # fmt: skip
def mixtral(c: MixtralConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("mixtral", c, context, rope_factors, LlamaDecoder, "model.layers.{i}.block_sparse_moe.gate.weight")
