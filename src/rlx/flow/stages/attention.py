"""Self-attention of decoders, with RoPE, grouped heads and a KV cache.

Keys and values of earlier tokens are in the runtime's KV cache (`FlowState.cache`), in inputs that the caller passes
(`FlowState.decode`), or nowhere, if the sequence starts here. One class handles all three, so prefill and decode are
the same code.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

from rlx.errors import GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear, normed_heads
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_rows, has_positions, rope_tables_of, size_of, token_positions
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.norm import RmsNorm, check_eps
from rlx.flow.state import MAIN_ROPE, DecodeBindings, FlowValue
from rlx.hir.heads import rotate_heads
from rlx.hir.lower import default_positions
from rlx.ir.graph import Value
from rlx.ops.attention import MaskKind, parse_mask
from rlx.types import Size, known_equal

# Cosines, sines, the row of each token (None: its position), positions (None: counted from 0), and the style.
Rotation = tuple[Value, Value, Value | None, Value | None, str]


@dataclass(frozen=True)
class SelfAttention:
    """Self-attention of a decoder layer: everything between its norm and its output projection."""

    stage: str  # name of the stage, for errors
    q_key: str
    k_key: str
    v_key: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None  # 1/√head_dim unless given
    attn_logit_softcap: float | None = None
    bias: bool = False  # each projection has a bias
    norm_keys: tuple[str, str] | None = None  # per-head norms of queries and keys
    eps: float = 1e-6
    unit_offset: bool = False  # these norms multiply by 1 + weight
    rope: str | None = MAIN_ROPE  # name of the RoPE tables; None for no RoPE
    layer_idx: int | None = None  # its layer in the cache: counted in order unless given
    decodes: bool = False  # needs earlier keys and values
    use_custom_mask: bool = False
    kv_sink: SideOutputs | None = None  # receives keys and values of the new tokens, `[batch, seq, kv_heads · dim]`
    kv_out: SideOutputs | None = None  # receives all keys and values

    def emit(self, ctx: FlowCtx, x: Value) -> Value:
        """Map [batch, seq, hidden] to [batch, seq, heads · head_dim]."""
        q, k, v = (self.project(ctx, x, which) for which in "qkv")
        return self.attend_heads(ctx, q, k, v)

    def attend_heads(self, ctx: FlowCtx, q: Value, k: Value, v: Value, gate: Value | None = None) -> Value:
        """Like `emit`, from queries, keys and values `[batch, seq, heads, head_dim]` before RoPE.

        The result is multiplied by sigmoid(gate).
        """
        if self.bindings(ctx) is None and self.kv_sink is None and self.kv_out is None:
            return self.block(ctx, q, k, v, gate)
        q, k = self.apply_rope(ctx, q), self.apply_rope(ctx, k)  # side outputs want rotated keys
        self.push(self.kv_sink, k, v)
        return self.attend_rotated(ctx, q, k, v, gate)

    def block(self, ctx: FlowCtx, q: Value, k: Value, v: Value, gate: Value | None) -> Value:
        """Emit RoPE, the runtime's cache if there is one, and attention as one block."""
        padding = ctx.state.padding
        if padding is None and parse_mask(self.mask).takes_operand:
            raise GraphError(
                f"stage {self.stage}: mask kind {self.mask!r} reads a mask, and none flows here",
                hint='flow.attn_mask("batch", "seq", "attention_mask") before it hides padding, with any mask kind',
            )
        attrs: dict[str, Any] = {"scale": self.score_scale, "softcap": self.attn_logit_softcap, "gate": gate}
        tables: dict[str, Any] = {} if self.rope is None else self.block_rotation(ctx, q)
        positions = tables.pop("positions", None)
        if ctx.state.cache is not None:
            self.check_cache()
            layer, at = self.cached_layer(ctx), token_positions(ctx, q)
            return ctx.state.cache.attend(layer, q, k, v, at, mask_kind=self.mask, **tables, **attrs)
        self.check_past(ctx)
        kind = MaskKind.NONE if self.mask == MaskKind.CUSTOM else self.mask  # the mask of padding is the custom one
        attrs |= {"mask_kind": kind, "kept_tokens": padding}
        return ctx.hir().one("self_attention", q, k, v, **tables, positions=positions, **attrs)

    def block_rotation(self, ctx: FlowCtx, x: Value) -> dict[str, Any]:
        """Return the operands and the attribute by which a block rotates heads."""
        return dict(zip(("cos", "sin", "rows", "positions", "style"), self.tables(ctx, x), strict=True))

    def project(self, ctx: FlowCtx, x: Value, which: str) -> Value:
        """Project x to queries, keys or values, `[batch, seq, heads, head_dim]`; the first two normed if they are."""
        heads = self.num_heads if which == "q" else self.num_kv_heads
        if self.norm_keys is not None and which != "v":
            return self.normed(ctx, x, which)
        weight, bias = self.projection_keys(which)
        return linear(ctx, x, weight, bias, out=heads * self.head_dim, heads=heads)

    def normed(self, ctx: FlowCtx, x: Value, which: str, *, rotated: bool = False) -> Value:
        """Project x to queries or keys with a norm per head, after RoPE if `rotated`."""
        assert self.norm_keys is not None
        check_eps(self.stage, self.eps)
        return normed_heads(
            ctx, x, (*self.projection_keys(which), self.norm_keys["qk".index(which)]), head_dim=self.head_dim,
            heads=self.num_heads if which == "q" else self.num_kv_heads, eps=self.eps, unit_offset=self.unit_offset,
            rotation=lambda: self.block_rotation(ctx, x) if rotated else {},
        )  # fmt: skip

    def projection_keys(self, which: str) -> tuple[str, str | None]:
        """Return the keys of the weight and of the bias of queries, keys or values."""
        key = {"q": self.q_key, "k": self.k_key, "v": self.v_key}[which]
        return key, key.removesuffix("weight") + "bias" if self.bias else None

    def apply_rope(self, ctx: FlowCtx, x: Value) -> Value:
        """Rotate queries or keys by their positions, which follow those of the past."""
        return x if self.rope is None else rotate_heads(x, *self.rotation(ctx, x))

    def rotation(self, ctx: FlowCtx, x: Value) -> Rotation:
        """Like `tables`, but also for a decode step after a past."""
        assert self.rope is not None
        past, (batch, seq) = self.bindings(ctx), x.shape[:2]
        if past is None:
            return self.tables(ctx, x)
        step = self.step_rows(ctx, past, self.rope)
        if step is not None:
            cos, sin = (self.check_step_rows(table, seq) for table in step)
            step_style = past.style if self.rope == MAIN_ROPE else None
            return cos, sin, default_positions(ctx.hir(), batch, seq), None, step_style or ctx.state.style_of(self.rope)
        if rope_tables_of(ctx, self.stage, self.rope)[2] is not None:
            raise GraphError(
                f"stage {self.stage}: RoPE tables {self.rope!r} depend on the length of the sequence, which is not"
                " known where the caller keeps the cache",
                hint="give the flow a kv_cache, or the rows of each step as inputs `rope_cos` and `rope_sin`",
            )
        before = self.past_of(past.past_k).shape[1]
        cos, sin, _, positions, style = self.tables(ctx, x, before)
        if positions is not None:
            return cos, sin, None, positions, style
        return cos, sin, default_positions(ctx.hir(), batch, seq) + size_of(ctx.hir(), before), None, style

    def tables(self, ctx: FlowCtx, x: Value, before: Size = 0) -> Rotation:
        """Return the RoPE tables and how tokens index them; see `Rotation`."""
        assert self.rope is not None
        cos, sin, rows, style = rope_tables_of(ctx, self.stage, self.rope)
        if rows is not None:
            return cos, sin, rows, None, style
        if has_positions(ctx):
            return cos, sin, None, token_positions(ctx, x), style
        check_rows(self.stage, cos.shape[0], before + x.shape[1])
        return cos, sin, None, None, style

    def check_step_rows(self, table: Value, seq: Size) -> Value:
        """Check that a step has one row per new token; a symbolic number of rows is checked at run time."""
        if known_equal(table.shape[0], seq) is False:
            raise ShapeError(
                f"stage {self.stage}: a step of {seq} tokens has {table.shape[0]} rows of RoPE tables",
                hint="give one row per new token, or put RopeTables before BindDecodeInputs",
            )
        return table if table.shape[0] == seq else table.assume_equal(shape=(seq, *table.shape[1:]))

    def step_rows(self, ctx: FlowCtx, past: DecodeBindings, rope: str) -> tuple[Value, Value] | None:
        """Return the caller's RoPE rows, one per new token: bound ones, or inputs `<rope>_cos` and `_sin`."""
        if rope == MAIN_ROPE:
            return (past.cos, past.sin) if past.rows and past.cos is not None and past.sin is not None else None
        names = f"{rope}_cos", f"{rope}_sin"
        if not all(name in ctx.state.inputs for name in names):
            return None
        return ctx.flow_input(names[0]).id, ctx.flow_input(names[1]).id

    def attend_rotated(self, ctx: FlowCtx, q: Value, k: Value, v: Value, gate: Value | None) -> Value:
        """Attend with queries and keys after RoPE: `[batch, seq, heads · head_dim]`."""
        attrs: dict[str, Any] = {"scale": self.score_scale, "softcap": self.attn_logit_softcap, "gate": gate}
        past, cache = self.bindings(ctx), ctx.state.cache
        mask: Value | None = None
        kind = self.mask
        if past is None and cache is not None:
            self.check_cache()
            return cache.attend(self.cached_layer(ctx), q, k, v, token_positions(ctx, q), mask_kind=self.mask, **attrs)
        if past is not None:
            k, v = (self.append_past(ctx, before, new) for before, new in ((past.past_k, k), (past.past_v, v)))
        self.check_past(ctx)
        self.push(self.kv_out, k, v)
        if ctx.state.padding is not None:
            self.check_padding(past)
            kind = MaskKind.NONE if self.mask == MaskKind.CUSTOM else self.mask
            attrs["kept_tokens"] = ctx.state.padding
        if self.use_custom_mask and past is not None:
            if past.mask is None:
                hint = "BindDecodeInputs(..., use_custom_mask=True)"
                raise GraphError(f"stage {self.stage}: use_custom_mask, but no mask is bound", hint=hint)
            if past.mask.rank != 2:
                raise ShapeError(f"stage {self.stage}: a custom mask is [batch, keys], found {past.mask.type}")
            keep = past.mask.assume_equal(shape=k.shape[:2])  # its symbols may have other names
            if q.shape[1] == 1 and self.mask == MaskKind.CAUSAL:  # the only query sees all unmasked keys
                mask, kind = keep, MaskKind.CUSTOM
            else:
                mask, kind = _combined_mask(q, k, self.mask, keep), MaskKind.BIAS
        return ctx.hir().one("self_attention", q, k, v, mask, mask_kind=kind, **attrs)

    def check_padding(self, past: DecodeBindings | None) -> None:
        """Raise if a mask of padding meets a past, which it says nothing of."""
        if past is not None:
            raise GraphError(
                f"stage {self.stage}: attn_mask is a mask of new tokens, but earlier keys are attended to as well",
                hint="BindDecodeInputs(..., use_custom_mask=True), with a mask of all keys",
            )

    def check_cache(self) -> None:
        """Raise if a field is set that needs a cache kept by the caller."""
        setting = "kv_out" if self.kv_out is not None else "use_custom_mask" if self.use_custom_mask else None
        if setting is not None:
            raise GraphError(
                f"stage {self.stage}: {setting} needs a cache kept by the caller, but this flow has its own",
                hint="leave out kv_cache, or use BindDecodeInputs",
            )

    def check_past(self, ctx: FlowCtx) -> None:
        """Raise if a decode step has no past."""
        if self.decodes and self.bindings(ctx) is None:
            hint = "put BindDecodeInputs before the layers, or give the flow a kv_cache"
            raise GraphError(f"stage {self.stage}: no earlier keys and values flow here", hint=hint)

    def bindings(self, ctx: FlowCtx) -> DecodeBindings | None:
        return ctx.state.decode if self.decodes else None

    def append_past(self, ctx: FlowCtx, before: list[Value], new: Value) -> Value:
        """Append new keys or values to earlier ones, `[batch, past, kv_heads, head_dim]` or flat."""
        past = self.past_of(before)
        if past.rank == 3:
            past = past.reshape(*past.shape[:2], self.num_kv_heads, self.head_dim)
        return ctx.hir().one("concatenate", past, new, axis=1)

    def past_of(self, before: list[Value]) -> Value:
        """Return the past of this layer, kept by the caller."""
        layer = self.layer
        if not 0 <= layer < len(before):
            raise GraphError(f"stage {self.stage}: layer {layer} has no past, {len(before)} are bound")
        return before[layer]

    @property
    def layer(self) -> int:
        """The index of the layer whose past it reads."""
        if self.layer_idx is None:
            raise GraphError(
                f"stage {self.stage}: reads a cache, but layer_idx is not set", hint="layer_idx counts from 0"
            )
        return self.layer_idx

    def cached_layer(self, ctx: FlowCtx) -> int:
        """The layer of the runtime's cache: `layer_idx`, else the first that has not attended yet."""
        assert ctx.state.cache is not None
        return ctx.state.cache.next_layer if self.layer_idx is None else self.layer_idx

    def push(self, side: SideOutputs | None, k: Value, v: Value) -> None:
        if side is not None:
            push_kv(side, self.k_key.split(".self_attn.")[0], k, v)


def push_kv(side: SideOutputs, prefix: str, k: Value, v: Value) -> None:
    """Push keys and values as side outputs `prefix.k` and `prefix.v`, flat as in a caller's cache."""
    for name, value in (("k", k), ("v", v)):
        batch, seq, heads, dim = value.shape
        side.push(value.reshape(batch, seq, heads * dim), f"{prefix}.{name}")


def _combined_mask(q: Value, k: Value, kind: str, custom: Value) -> Value:
    """Return a bias [batch, 1, seq, keys] for scores: 0 for keys that both masks keep, else minus infinity."""
    keep = (custom if custom.dtype.name == "bool" else custom >= 0.5).reshape(custom.shape[0], 1, 1, k.shape[1])
    return only_where(seen_keys(q, k, kind, keep), q.graph.constant(0.0))


def seen_keys(q: Value, k: Value, kind: str, keep: Value | None = None) -> Value:
    """Return a bool mask [batch, 1, seq, keys]: keys visible by the mask kind, out of those in `keep`."""
    graph, seq, keys = q.graph, q.shape[1], k.shape[1]
    shape = parse_mask(kind)
    if shape.takes_operand:
        raise GraphError(f"a custom mask cannot be combined with mask kind {kind!r}, which takes an operand of its own")
    at = default_positions(graph, 1, keys)  # queries and keys end at the same position
    before = size_of(graph, keys - seq + shape.ahead)
    back = (default_positions(graph, 1, seq) + before).reshape(1, 1, seq, 1) - at.reshape(1, 1, 1, keys)
    if shape.limited:
        keep = back >= 0 if keep is None else keep.logical_and(back >= 0)
    if shape.window:
        keep = back < shape.window if keep is None else keep.logical_and(back < shape.window)
    assert keep is not None, "where every key is seen, there is nothing to say"
    return keep


def only_where(seen: Value, bias: Value) -> Value:
    """What is added to scores: the bias of keys that are seen, minus infinity for others."""
    return bias.graph.one("where", seen, bias, bias.graph.constant(-math.inf))


# -- stages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SelfAttnPrefill(FlowStage):
    """Self-attention without the output projection: `[batch, seq, hidden]` to `[batch, seq, heads · head_dim]`.

    q, k and v are `x @ weightᵀ`; RoPE rotates q and k; then per head `y = softmax(scale · q @ kᵀ + mask) @ v`, where
    scale is `1/√head_dim` unless given. A softcap c turns scores into `c · tanh(scores / c)`. Each key head serves
    `num_heads / num_kv_heads` query heads. In a flow with a KV cache, attends over the cache: prefill and decode alike.
    """

    q_key: str
    k_key: str
    v_key: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    _: KW_ONLY
    rope: str | None = MAIN_ROPE  # name of the RoPE tables; None for no RoPE
    layer_idx: int | None = None  # its layer in the KV cache: counted in order unless given

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "SelfAttnPrefill")
        attention = SelfAttention(
            "SelfAttnPrefill", self.q_key, self.k_key, self.v_key, self.num_heads, self.num_kv_heads, self.head_dim,
            self.mask, self.score_scale, self.attn_logit_softcap, rope=self.rope, layer_idx=self.layer_idx,
        )  # fmt: skip
        return ctx.wrap(attention.emit(ctx, x))

    @property
    def path(self) -> str:
        return "attn"


@dataclass(frozen=True)
class Attention(FlowStage):
    """Self-attention with its output projection: `y = attention(x) @ o_projᵀ`, with weights `prefix.q_proj.weight` ...

    attention is that of `SelfAttnPrefill`: grouped heads, RoPE, and the flow's KV cache if it has one. With `bias`, the
    four projections have biases, such as `prefix.q_proj.bias`; with `qk_norm`, queries and keys are normed per head.
    """

    prefix: str
    num_heads: int
    num_kv_heads: int | None = None  # as many as heads unless given
    head_dim: int | None = None  # the width divided by the heads unless given
    _: KW_ONLY
    mask: str = MaskKind.CAUSAL  # "none": every token attends to all, except padding that `AttnMask` marks
    rope: str | None = MAIN_ROPE  # name of the RoPE tables; None for no RoPE
    bias: bool = False
    qk_norm: bool = False  # by `prefix.q_norm.weight` and `prefix.k_norm.weight`
    eps: float = 1e-6  # of these norms
    score_scale: float | None = None  # 1/√head_dim unless given
    layer_idx: int | None = None  # its layer in the KV cache: counted in order unless given

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "Attention")
        width, heads = x.shape[-1], self.num_heads
        if heads < 1:
            raise ShapeError(f"stage Attention: num_heads is {heads}, expected an integer from 1")
        head_dim = self.head_dim
        if head_dim is None:
            if not isinstance(width, int) or width % heads:
                raise ShapeError(
                    f"stage Attention: {width} numbers do not divide into {heads} heads", hint="give head_dim="
                )
            head_dim = width // heads
        q, k, v, out = (f"{self.prefix}.{name}_proj.weight" for name in "qkvo")
        attention = SelfAttention(
            "Attention", q, k, v, heads, self.num_kv_heads or heads, head_dim, self.mask, self.score_scale,
            bias=self.bias, eps=self.eps, rope=self.rope, layer_idx=self.layer_idx,
            norm_keys=(f"{self.prefix}.q_norm.weight", f"{self.prefix}.k_norm.weight") if self.qk_norm else None,
        )  # fmt: skip
        bias = f"{self.prefix}.o_proj.bias" if self.bias else None
        return ctx.wrap(linear(ctx, attention.emit(ctx, x), out, bias, out=width))

    @property
    def path(self) -> str:
        return "attn"


@dataclass(frozen=True)
class LlamaKvTap(FlowStage):
    """Exports a layer's keys, after RoPE, and values as side outputs `[batch, seq, kv_heads · head_dim]`; `y = x`.

    `k = rope(rms_norm(x) @ k_projᵀ)` and `v = rms_norm(x) @ v_projᵀ`. Biases and the norm of keys are applied if the
    weights of the layer include them.
    """

    layer_prefix: str
    head_dim: int
    eps: float
    outputs: SideOutputs
    _: KW_ONLY
    rope: str | None = MAIN_ROPE

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        x = ctx.wrap(ctx.need_sequence(value, "LlamaKvTap"))
        normed = RmsNorm(f"{self.layer_prefix}.input_layernorm.weight", self.eps).emit(ctx, x)
        _tap(ctx, self, normed.id, unit_offset=False)
        return value


@dataclass(frozen=True)
class GemmaKvTap(FlowStage):
    """Exports keys and values of a Gemma layer, from a value that is normed already; `y = x`.

    `k = rope(x @ k_projᵀ)` and `v = x @ v_projᵀ`. The local layers of Gemma 3 use `rope="rope.local"`.
    """

    layer_prefix: str
    head_dim: int
    outputs: SideOutputs
    eps: float = 1e-6
    unit_offset: bool = True  # norms multiply by 1 + weight, as in Hugging Face files; GGUF files include the 1
    _: KW_ONLY
    rope: str | None = MAIN_ROPE

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        _tap(ctx, self, ctx.need_sequence(value, "GemmaKvTap"), unit_offset=self.unit_offset)
        return value


def _tap(ctx: FlowCtx, tap: LlamaKvTap | GemmaKvTap, x: Value, unit_offset: bool) -> None:
    stage, at, head_dim = type(tap).__name__, f"{tap.layer_prefix}.self_attn", tap.head_dim
    q_key, k_key, v_key = (f"{at}.{n}_proj.weight" for n in "qkv")
    norms = f"{at}.q_norm.weight", f"{at}.k_norm.weight"
    width = ctx.load_param(k_key).shape[0]
    if not isinstance(width, int) or width % head_dim:
        raise ShapeError(f"stage {stage}: weight {k_key!r} has {width} rows, not a multiple of head_dim {head_dim}")
    heads = width // head_dim
    attention = SelfAttention(
        stage, q_key, k_key, v_key, heads, heads, head_dim, eps=tap.eps, unit_offset=unit_offset, rope=tap.rope,
        bias=ctx.weights.has(f"{at}.k_proj.bias"), norm_keys=norms if ctx.weights.has(norms[1]) else None,
    )  # fmt: skip
    k, v = attention.project(ctx, x, "k"), attention.project(ctx, x, "v")
    push_kv(tap.outputs, tap.layer_prefix, attention.apply_rope(ctx, k), v)
