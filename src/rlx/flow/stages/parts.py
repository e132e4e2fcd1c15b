"""Small stages that many models use: linear maps, scaling, pooling, masks and the inputs of a decode step."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from numbers import Real

import numpy as np

from rlx.arrays import Array
from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_style, check_tables
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import rows_input
from rlx.flow.state import DecodeBindings, FlowValue
from rlx.ir.graph import Value
from rlx.types import Size, as_shape, sym

DROPOUT_KEY = "dropout.key"  # the input with the random key of all dropout of a run
MASK = "attn_mask"  # the name of the mask that `AttnMask` binds


# -- stages that change the value -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Linear(FlowStage):
    """Linear map: `y = x @ weightᵀ + bias` for a weight stored `[out, in]`, as in files; else `transpose=False`."""

    weight_key: str
    transpose: bool = True
    bias_key: str | None = None
    _: KW_ONLY
    out: int | None = None  # output size: checks the weight, and lets `ModelFlow.init` make one

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "Linear")
        return ctx.wrap(linear(ctx, x, self.weight_key, self.bias_key, out=self.out, transpose=self.transpose))

    @property
    def path(self) -> str:
        """The last part of the weight's name: `o_proj` for `layers.0.attn.o_proj.weight`."""
        return self.weight_key.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True)
class EmbedScale(FlowStage):
    """Gemma's scaling of token embeddings: `y = x · √hidden_size`."""

    hidden_size: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        return ctx.wrap(ctx.need(value, "EmbedScale") * self.hidden_size**0.5)


@dataclass(frozen=True)
class Dropout(FlowStage):
    """Dropout: in training, `y = x / (1 - rate)` or, with probability `rate`, 0; otherwise `y = x`.

    A flow has dropout if it is built with `training=True`; the graph then has an input `dropout.key`, a random key,
    which a training step of `rlx.train` sets anew in each run.
    """

    rate: float

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, Real) or not 0 <= self.rate < 1:
            raise GraphError(f"stage Dropout: rate is {self.rate!r}, expected a number from 0 to below 1")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "Dropout")
        if not self.rate:
            return ctx.wrap(x)
        ctx.state.dropouts += 1
        if not ctx.state.training:
            return ctx.wrap(x)
        graph = ctx.hir()
        key = ctx.input(DROPOUT_KEY, (2,), "u32")
        number = graph.constant(np.array([ctx.state.dropouts, 0], np.uint32))  # each stage has numbers of its own
        own_key = graph.one("random_bits", key + number, shape=(2,))
        stays = graph.one("random_uniform", own_key, shape=x.shape) >= float(self.rate)
        return ctx.wrap(stays.where(x * (1 / (1 - float(self.rate))), 0.0))

    @property
    def path(self) -> str:
        return "dropout"


@dataclass(frozen=True)
class LayerScale(FlowStage):
    """DINOv2's LayerScale, one weight per channel: `y = x · gamma`."""

    gamma_key: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LayerScale")
        return ctx.wrap(x * ctx.load_param(self.gamma_key, shape=x.shape[-1:], init=1.0))


@dataclass(frozen=True)
class LogitSoftcap(FlowStage):
    """Soft cap on the magnitude of logits: `y = cap · tanh(x / cap)`."""

    cap: float

    def __post_init__(self) -> None:
        if not isinstance(self.cap, Real) or not 0 < self.cap < math.inf:
            raise GraphError(f"stage LogitSoftcap: cap is {self.cap!r}, expected a number above 0")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LogitSoftcap")
        return ctx.wrap((x / self.cap).tanh() * self.cap)

    @property
    def path(self) -> str:
        return "softcap"


@dataclass(frozen=True)
class ClsTokenPool(FlowStage):
    """Pools `[batch, seq, hidden]` to `[batch, hidden]` by the class token, the first one: `y = x[:, 0]`."""

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "ClsTokenPool")
        return ctx.wrap(x[:, 0])

    @property
    def path(self) -> str:
        return "pool"


@dataclass(frozen=True)
class GatherFromInput(FlowStage):
    """Replaces the value by table rows that a named input picks: `y = table[index]`."""

    input_name: str
    weight_key: str
    axis: int = 0

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        ctx.need(value, "GatherFromInput")
        index = rows_input(ctx, self.input_name, (sym.BATCH, sym.SEQ))
        return ctx.wrap(ctx.load_param(self.weight_key).gather(index, axis=self.axis))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class GdnScan(FlowStage):
    """Gated-delta-net scan of the slots in `FlowState.gdn`; returns `[batch, seq, heads, state_size]`.

    Per head and token: `S = exp(g) · S`, `S = S + k (beta (v - Sᵀ k))ᵀ`, `y = Sᵀ q / √state_size`. S starts at zero;
    with `carry_state`, at the value named `state_key`, and the final state is stored under that name.
    """

    state_size: int
    carry_state: bool = False
    state_key: str | None = None

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        ctx.need(value, "GdnScan")
        slots = ctx.state.gdn
        if slots is None:
            raise GraphError("stage GdnScan: no inputs were published", hint="a stage sets ctx.state.gdn before it")
        operands = (slots.q, slots.k, slots.v, slots.g, slots.beta)
        graph = ctx.hir()
        if not self.carry_state:
            return ctx.wrap(graph.one("gated_delta_net", *operands, state_size=self.state_size))
        if self.state_key is None:
            raise GraphError("stage GdnScan: carry_state needs a state_key", hint='GdnScan(..., state_key="gdn.0")')
        before = ctx.state.value(self.state_key, "stage GdnScan")
        out, after = graph.apply("gated_delta_net_carry", *operands, before, state_size=self.state_size)
        ctx.state.named[self.state_key] = after
        return ctx.wrap(out)

    @property
    def path(self) -> str:
        return "gdn"


# -- stages that bind values for others -------------------------------------------------------------------------------
@dataclass(frozen=True)
class ZeroBeta(FlowStage):
    """Adds a zero vector as a param, for norms without a beta; the first one is the default; `y = x`."""

    name: str
    len: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        zeros = ctx.synth_zeros(self.name, self.len)
        ctx.state.named[self.name] = zeros
        ctx.state.zero_beta = ctx.state.zero_beta if ctx.state.zero_beta is not None else zeros
        return value


@dataclass(frozen=True)
class AttnMask(FlowStage):
    """Binds the padding mask `attn_mask`, 1 for tokens and 0 for padding: a named input, or all ones; `y = x`.

    Attention after it does not see padding: `Attention`, `SelfAttnPrefill`, the decoder layers and `VitSelfAttn`. The
    layers of BERT and NomicBERT read the input `attention_mask` themselves. With a KV cache, padding is what has a
    negative position; `rlx.load` leaves the mask out.
    """

    batch: Size | str
    seq: Size | str
    input_name: str | None = None

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        shape = as_shape((self.batch, self.seq))
        if self.input_name is not None:
            if ctx.state.cache is not None:
                raise GraphError(
                    "stage AttnMask: the flow has a KV cache, where padding is what has a negative position",
                    hint="leave out attn_mask, or kv_cache",
                )
            mask = ctx.state.padding = ctx.mask_input(self.input_name, shape)
            ctx.state.padding_input = self.input_name
        elif all(isinstance(size, int) for size in shape):
            mask = ctx.synth_param(MASK, np.ones([int(size) for size in shape], np.float32))
        else:  # symbolic sizes
            mask = ctx.hir().one("expand", ctx.hir().constant(1.0), shape=shape)
        ctx.state.named[MASK] = mask
        return value


@dataclass(frozen=True, eq=False)
class DecodeRopeParams(FlowStage):
    """Adds fixed RoPE rows for a decode step as params, `[1, half]` or one row per new token; `y = x`."""

    cos: Array
    sin: Array
    style: str = "halves"  # how a head is paired: "halves" (i, i + half) or "pairs" (2i, 2i + 1)

    def __post_init__(self) -> None:
        check_style("DecodeRopeParams", self.style)
        check_tables("DecodeRopeParams", self.cos, self.sin)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        cos, sin = (
            ctx.synth_param(f"decode.rope.{of}", np.asarray(rows, np.float32))
            for of, rows in (("cos", self.cos), ("sin", self.sin))
        )
        ctx.state.bind_rope_rows(cos, sin, self.style)
        return value


@dataclass(frozen=True)
class BindDecodeInputs(FlowStage):
    """Binds the inputs of a decode step to `FlowState.decode`: RoPE rows, mask, one past K and V per layer; `y = x`.

    The flow declares `past_k_0`, `past_v_0` and so on, and `mask` if it is used. RoPE rows, one per new token, are the
    inputs `rope_cos` and `rope_sin` (styled like earlier tables, else "halves") or those of `DecodeRopeParams`. After
    `RopeTables`, new tokens are at the positions after the past, or at those of the input `positions`. `rope=False`
    is for models without RoPE.
    """

    num_layers: int
    use_custom_mask: bool = False
    _: KW_ONLY
    rope: bool = True

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        cos, sin, rows = ctx.state.rope_cos, ctx.state.rope_sin, ctx.state.rope_per_token
        style = ctx.state.rope_style if rows else None
        if self.rope and (cos is None or sin is None or "rope_cos" in ctx.state.inputs):
            cos, sin, rows, style = self.bound(ctx, "rope_cos"), self.bound(ctx, "rope_sin"), True, None
        past_k, past_v = ([self.bound(ctx, f"past_{x}_{i}") for i in range(self.num_layers)] for x in "kv")
        mask = self.bound(ctx, "mask") if self.use_custom_mask else None
        if mask is not None:
            mask = ctx.mask_input("mask", mask.shape)  # integers become booleans
        ctx.state.decode = DecodeBindings(cos, sin, mask, past_k, past_v, rows, style)
        return value

    def bound(self, ctx: FlowCtx, name: str) -> Value:
        try:
            return ctx.flow_input(name).id
        except GraphError as error:
            raise GraphError(f"stage BindDecodeInputs: {error}", hint=error.hint) from error
