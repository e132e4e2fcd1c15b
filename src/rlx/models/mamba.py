"""Mamba: selective-scan layers with a fixed-size state in place of a KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, RmsNorm, linear
from rlx.flow.stages.recurrent import cached_positions, carried, conv_weight, token_rows
from rlx.flow.state import FlowValue
from rlx.models.config import key
from rlx.models.family import Change, family
from rlx.models.state_space import StateSpaceConfig
from rlx.types import sym


@dataclass(frozen=True)
class Config(StateSpaceConfig):
    """Mamba's configuration."""

    inner_given: int | None = key(gguf="ssm.inner_size", hf="intermediate_size", default=None)
    state: int = key(gguf="ssm.state_size", hf="state_size", default=16, maximum=256)
    rank_given: int | None = key(gguf="ssm.time_step_rank", hf="time_step_rank", default=None)
    tied: bool = key(hf="tie_word_embeddings", default=True)

    @property
    def rank(self) -> int:
        """Rank of the time-step projection."""
        return self.rank_given or math.ceil(self.dim / 16)

    def gguf_only_settings(self) -> dict[str, Any]:
        return {**super().gguf_only_settings(), "ssm.time_step_rank": self.rank, "ssm.dt_b_c_rms": False}


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
    """Changes made by GGUF converters to decay rates."""
    return Change(lambda x: -np.exp(x), lambda x: np.log(-x)) if name.endswith(".A_log") else None


def resolve_auto(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Treats `auto` as absent."""
    return {**settings, "time_step_rank": None} if settings.get("time_step_rank") == "auto" else settings


@dataclass(frozen=True)
class Mixer(FlowStage):
    """A Mamba layer: x + out(scan(conv(x)) · silu(gate))."""

    c: Config
    layer: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, c, prefix = ctx.need(value, "Mixer"), self.c, f"backbone.layers.{self.layer}"
        mixer, n = f"{prefix}.mixer", c.state

        def bias(name: str) -> str | None:
            return f"{mixer}.{name}.bias" if c.bias else None

        normed = RmsNorm(f"{prefix}.norm.weight", c.eps).emit(ctx, ctx.wrap(x)).id
        both = linear(ctx, normed, f"{mixer}.in_proj.weight", bias("in_proj"), out=2 * c.inner)
        operands = {  # in read order
            "conv": conv_weight(ctx, f"{mixer}.conv1d.weight", c.inner, c.kernel),
            "conv_state": carried(ctx, f"conv.{self.layer}", c.kernel - 1, c.inner),
            "positions": cached_positions(ctx, x),
            "token_rows": token_rows(ctx),
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
    """Recurrent layers between a token table and a head."""
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers)
        .embed("backbone.embeddings.weight", shape=(c.vocab, c.dim))
        .repeat_layers(c.layers, layer).final_norm(c.eps, "backbone.norm_f.weight")
        .gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip


@family("mamba", kind="decoder", gguf=["mamba"], hf=["mamba"], config=Config, weights=WEIGHTS, settings=resolve_auto,
        changes=changes)  # fmt: skip
def mamba(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("mamba", c, lambda i: Mixer(c, i))
