"""Mamba 2: Mamba with matrix states per head, one decay rate each, and a norm after the gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, RmsNorm, linear
from rlx.flow.stages.recurrent import cached_positions, carried, conv_weight, token_rows
from rlx.flow.state import FlowValue
from rlx.formats import TensorFile
from rlx.formats.tensor_file import quoted
from rlx.ir.graph import Value
from rlx.models import mamba
from rlx.models.config import key
from rlx.models.family import Change, family
from rlx.models.rope import is_number
from rlx.models.state_space import StateSpaceConfig


@dataclass(frozen=True)
class Config(StateSpaceConfig):
    """Mamba 2's configuration."""

    state: int = key(gguf="ssm.state_size", hf="state_size", default=128, maximum=4096)
    heads: int = key(gguf="ssm.time_step_rank", hf="num_heads", default=128)
    stated_head_dim: int | None = key(hf="head_dim", default=None)
    groups: int = key(gguf="ssm.group_count", hf="n_groups", default=8)
    norm_by_group: bool = False  # as in llama.cpp; transformers norms all channels together
    least_step: float = key(hf="least_step", default=0.0)
    most_step: float | None = key(hf="most_step", default=None)
    tied: bool = key(hf="tie_word_embeddings", default=False)

    @property
    def head_dim(self) -> int:
        return self.inner // self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner + 2 * self.groups * self.state

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**super().inferred_from_gguf(file), "norm_by_group": True}

    def gguf_only_settings(self) -> dict[str, Any]:
        if self.groups > 1:
            raise CapabilityError(
                f"save: n_groups is {self.groups}, and llama.cpp norms each group of channels by itself, not all as one"
            )
        return super().gguf_only_settings()

    def check(self, where: str) -> None:
        super().check(where)
        if self.inner % self.heads or self.stated_head_dim not in (None, self.head_dim):
            of_size = "" if self.stated_head_dim is None else f" of {self.stated_head_dim}"
            raise FormatError(f"{where}: {self.inner} channels do not split into {self.heads} heads{of_size}")
        if self.heads % self.groups:
            raise FormatError(f"{where}: {self.heads} heads are no multiple of {self.groups} groups")


def with_limits(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Splits `time_step_limit` into two numbers. Infinity, which JSON cannot express, becomes None."""
    limits = settings.get("time_step_limit", (0.0, None))
    if not isinstance(limits, (list, tuple)) or len(limits) != 2 or not is_number(limits[0]):
        raise FormatError(f"{where}: time_step_limit: expected two numbers, found {quoted(limits)}")
    max_step = None if limits[1] == {"__float__": "Infinity"} or limits[1] == math.inf else limits[1]
    return {**settings, "least_step": limits[0], "most_step": max_step}


_MIXER = "backbone.layers.{i}.mixer"
_LINEAR = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
WEIGHTS = mamba.SHARED | {
    f"{_MIXER}.dt_bias": "blk.{i}.ssm_dt.bias",
    f"{_MIXER}.norm.weight": "blk.{i}.ssm_norm.weight",
} | {
    f"{_MIXER}.{hf}.{part}": f"blk.{{i}}.{gguf}.{part}"
    for hf, gguf in _LINEAR.items()
    for part in ("weight", "bias")
}  # fmt: skip


def changes(c: Config, name: str) -> Change | None:
    """Changes made by GGUF converters: rates instead of logarithms, and an extra axis for heads and groups."""
    if name.endswith(".A_log"):
        return _reshaping((c.heads, 1), (c.heads,), lambda x: -np.exp(x), lambda x: np.log(-x))
    if name.endswith(".mixer.D"):
        return _reshaping((c.heads, 1), (c.heads,))
    if name.endswith(".mixer.norm.weight"):
        return _reshaping((c.groups, c.inner // c.groups), (c.inner,))
    return None


def _reshaping(
    stored: tuple[int, ...], ours: tuple[int, ...], change: Callable[[Array], Array] = lambda x: x,
    back: Callable[[Array], Array] = lambda x: x,
) -> Change:  # fmt: skip
    return Change(lambda x: change(x).reshape(stored), lambda x: back(x).reshape(ours), (stored, ours))


@dataclass(frozen=True)
class Mixer(FlowStage):
    """A Mamba 2 layer: x + out(norm(attention(conv(x)) · silu(gate)))."""

    c: Config
    layer: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x, c, prefix = ctx.need(value, "Mixer"), self.c, f"backbone.layers.{self.layer}"
        mixer = f"{prefix}.mixer"

        def bias(name: str) -> str | None:
            return f"{mixer}.{name}.bias" if c.bias else None

        normed = RmsNorm(f"{prefix}.norm.weight", c.eps).emit(ctx, ctx.wrap(x)).id
        size = c.inner + c.channels + c.heads
        mixed = linear(ctx, normed, f"{mixer}.in_proj.weight", bias("in_proj"), out=size)
        operands = {  # in read order
            "conv": conv_weight(ctx, f"{mixer}.conv1d.weight", c.channels, c.kernel),
            "conv_state": carried(ctx, f"conv.{self.layer}", c.kernel - 1, c.channels),
            "positions": cached_positions(ctx, x),
            "token_rows": token_rows(ctx),
            "conv_bias": ctx.stored_param(f"{mixer}.conv1d.bias", shape=(c.channels,)) if c.conv_bias else None,
            "step_bias": vector(ctx, f"{mixer}.dt_bias", c.heads),
            "rates": vector(ctx, f"{mixer}.A_log", c.heads),
            "state": carried(ctx, f"scan.{self.layer}", c.heads, c.state, c.head_dim),
            "skip": vector(ctx, f"{mixer}.D", c.heads),
            "norm": vector(ctx, f"{mixer}.norm.weight", c.inner),
        }  # fmt: skip
        mixed = ctx.hir().one(
            "mamba2_block", mixed, **operands, groups=c.groups, eps=c.eps, activation=c.activation,
            log_rates=not c.rates, least_step=c.least_step, most_step=c.most_step,
            norm_groups=c.groups if c.norm_by_group else 1,
        )  # fmt: skip
        return ctx.wrap(x + linear(ctx, mixed, f"{mixer}.out_proj.weight", bias("out_proj"), out=c.dim))


def vector(ctx: FlowCtx, key: str, size: int) -> Value:
    """Loads a vector that GGUF may store as a column or as one row per group."""
    return ctx.stored_param(key, shape=None if ctx.weights.has(key) else (size,))


@family("mamba2", kind="decoder", gguf=["mamba2"], hf=["mamba2"], config=Config, weights=WEIGHTS, settings=with_limits,
        changes=changes)  # fmt: skip
def mamba2(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return mamba.decoder("mamba2", c, lambda i: Mixer(c, i))
