"""Mamba: layers without attention, whose selective scan keeps a state of fixed size in place of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlx.errors import FormatError
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, RmsNorm, linear
from rlx.flow.stages.recurrent import cached_positions, carried, conv_weight
from rlx.flow.state import FlowValue
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models.config import MAX_LAYERS, MAX_POSITIONS, ModelConfig, check_activation, key
from rlx.models.family import Change, family
from rlx.types import sym


@dataclass(frozen=True)
class StateSpaceConfig(ModelConfig):
    """What Mamba 1 and 2 share."""

    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"ssm.dt_b_c_rms": (False,), "expert_count": (0,)}
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"rates": True}

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", most=MAX_LAYERS)
    vocab: int = key(hf="vocab_size")
    inner_given: int | None = key(gguf="ssm.inner_size", default=None)
    grows: float = key(hf="expand", default=2.0)  # by this factor, where the inner size is not given
    kernel: int = key(gguf="ssm.conv_kernel", hf="conv_kernel", default=4, most=64)
    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="layer_norm_epsilon", default=1e-5)
    bias: bool = key(hf="use_bias", default=False)
    conv_bias: bool = key(hf="use_conv_bias", default=True)
    activation: str = key(hf="hidden_act", default="silu")
    rates: bool = False  # GGUF has -exp(A_log) where Hugging Face has A_log

    @property
    def inner(self) -> int:
        return self.inner_given or int(self.grows * self.dim)

    @property
    def context(self) -> int:
        """Nothing bounds it: a state takes in as many tokens as there are."""
        return MAX_POSITIONS

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {"rates": True, "conv_bias": "blk.0.ssm_conv1d.bias" in file, "bias": "blk.0.ssm_in.bias" in file}

    def only_in_gguf(self) -> dict[str, Any]:
        # llama.cpp wants the first three of every model
        nothing = {"context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0}
        return {**nothing, "ssm.inner_size": self.inner}

    def check(self, where: str) -> None:
        check_activation(where, self.activation)
        if not 1 <= self.inner <= 1 << 24:
            raise FormatError(f"{where}: layers are {self.inner} wide inside; expected 1 to {1 << 24}")

    def left_out(self) -> tuple[str, ...]:
        has = {"in_proj.bias": self.bias, "out_proj.bias": self.bias, "conv1d.bias": self.conv_bias}
        return tuple(f"{_LAYER}.mixer.{name}" for name, on in has.items() if not on)


@dataclass(frozen=True)
class Config(StateSpaceConfig):
    """Mamba's configuration."""

    inner_given: int | None = key(gguf="ssm.inner_size", hf="intermediate_size", default=None)
    state: int = key(gguf="ssm.state_size", hf="state_size", default=16, most=256)
    rank_given: int | None = key(gguf="ssm.time_step_rank", hf="time_step_rank", default=None)
    tied: bool = key(hf="tie_word_embeddings", default=True)

    @property
    def rank(self) -> int:
        """Of the map that says how far a token moves the state."""
        return self.rank_given or math.ceil(self.dim / 16)

    def only_in_gguf(self) -> dict[str, Any]:
        return {**super().only_in_gguf(), "ssm.time_step_rank": self.rank, "ssm.dt_b_c_rms": False}


_LAYER = "backbone.layers.{i}"
_LINEAR = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"}
SHARED = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    f"{_LAYER}.norm.weight": "blk.{i}.attn_norm.weight",
    f"{_LAYER}.mixer.A_log": "blk.{i}.ssm_a",
    f"{_LAYER}.mixer.D": "blk.{i}.ssm_d",
}
WEIGHTS = SHARED | {
    f"{_LAYER}.mixer.{hf}.{part}": f"blk.{{i}}.{gguf}.{part}"
    for hf, gguf in _LINEAR.items()
    for part in (("weight",) if hf == "x_proj" else ("weight", "bias"))
}


def changes(c: Any, name: str) -> Change | None:
    """What converters to GGUF do to the rates of decay."""
    return Change(lambda x: -np.exp(x), lambda x: np.log(-x)) if name.endswith(".A_log") else None


def numbered(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`auto` is the same as nothing."""
    return {**settings, "time_step_rank": None} if settings.get("time_step_rank") == "auto" else settings


@dataclass(frozen=True)
class Mixer(FlowStage):
    """x + out(scan(conv(x)) · silu(gate)): a layer of Mamba."""

    c: Config
    layer: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, c, prefix = ctx.need(value, "Mixer"), self.c, f"backbone.layers.{self.layer}"
        mixer, n = f"{prefix}.mixer", c.state

        def bias(name: str) -> str | None:
            return f"{mixer}.{name}.bias" if c.bias else None

        normed = RmsNorm(f"{prefix}.norm.weight", c.eps).emit(ctx, ctx.wrap(x)).id
        both = linear(ctx, normed, f"{mixer}.in_proj.weight", bias("in_proj"), out=2 * c.inner)
        operands = {  # in the order in which they are read
            "conv": conv_weight(ctx, f"{mixer}.conv1d.weight", c.inner, c.kernel),
            "conv_state": carried(ctx, f"conv.{self.layer}", c.kernel - 1, c.inner),
            "positions": cached_positions(ctx, x),
            "conv_bias": ctx.stored_param(f"{mixer}.conv1d.bias", shape=(c.inner,)) if c.conv_bias else None,
            "mix": ctx.stored_param(f"{mixer}.x_proj.weight", True, shape=(c.inner, c.rank + 2 * n)),
            "step": ctx.stored_param(f"{mixer}.dt_proj.weight", True, shape=(c.rank, c.inner)),
            "step_bias": ctx.stored_param(f"{mixer}.dt_proj.bias", shape=(c.inner,), init=0.0),
            "rates": ctx.stored_param(f"{mixer}.A_log", shape=(c.inner, n)),
            "state": carried(ctx, f"scan.{self.layer}", c.inner, n),
            "skip": ctx.stored_param(f"{mixer}.D", shape=(c.inner,)),
        }  # fmt: skip
        y = ctx.hir().one("mamba_block", both, **operands, activation=c.activation, log_rates=not c.rates)
        return ctx.wrap(x + linear(ctx, y, f"{mixer}.out_proj.weight", bias("out_proj"), out=c.dim))


def decoder(name: str, c: Any, layer: Callable[[int], FlowStage]) -> ModelFlow:
    """Layers with states between a token table and a head."""
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers)
        .embed("backbone.embeddings.weight", shape=(c.vocab, c.dim))
        .repeat_layers(c.layers, layer).final_norm(c.eps, "backbone.norm_f.weight")
        .gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip


@family("mamba", kind="decoder", gguf=["mamba"], hf=["mamba"], config=Config, weights=WEIGHTS, settings=numbered,
        changes=changes)  # fmt: skip
def mamba(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("mamba", c, lambda i: Mixer(c, i))
