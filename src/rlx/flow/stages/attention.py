"""Attention of decoders: queries, keys and values of one input, rotary positions, grouped heads, and earlier keys.

Keys and values of earlier tokens are in a cache of the runtime (`FlowState.cache`), in inputs that the caller keeps
(`FlowState.decode`), or nowhere: then the tokens given are all there are. One record serves all three, so prefill and
decode are the same code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlx.errors import GraphError, ShapeError
from rlx.flow.context import FlowCtx
from rlx.flow.side import SideOutputs
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import linear
from rlx.flow.stages.norm import GemmaRmsNorm, RmsNorm
from rlx.flow.state import DecodeBindings, FlowValue
from rlx.hir.lower import counted
from rlx.ir.graph import Value
from rlx.ops.attention import MaskKind, split_mask
from rlx.types import sym


@dataclass(frozen=True)
class SelfAttention:
    """What a decoder layer does between its norm and its output projection."""

    stage: str  # whose part it is, for errors
    q_key: str
    k_key: str
    v_key: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None  # 1/√head_dim unless given
    attn_logit_softcap: float | None = None
    bias: bool = False  # beside each weight
    norm_keys: tuple[str, str] | None = None  # of queries and keys, each head by itself
    eps: float = 1e-6
    unit_offset: bool = False  # those norms multiply by 1 + weight
    rope: str | None = "rope"  # the name of its tables; None: heads do not turn
    layer_idx: int = 0
    decodes: bool = False  # wants earlier keys and values
    use_custom_mask: bool = False
    kv_sink: SideOutputs | None = None  # gets the keys and values of the tokens given, `[batch, seq, kv_heads · dim]`
    kv_out: SideOutputs | None = None  # gets all that is attended to

    def emit(self, ctx: FlowCtx, x: Value) -> Value:
        """[batch, seq, hidden] to [batch, seq, heads · head_dim]."""
        batch, seq, _ = x.shape
        q, k, v = (self.project(ctx, x, which) for which in "qkv")
        if self.rope is not None:
            q, k = self.turned(ctx, q), self.turned(ctx, k)
        self.push(self.kv_sink, k, v)
        out = self.attended(ctx, q, k, v)
        return out.reshape(batch, seq, self.num_heads * self.head_dim)

    def project(self, ctx: FlowCtx, x: Value, which: str) -> Value:
        """Queries, keys or values, `[batch, seq, heads, head_dim]`."""
        heads = self.num_heads if which == "q" else self.num_kv_heads
        key = {"q": self.q_key, "k": self.k_key, "v": self.v_key}[which]
        bias = key.removesuffix("weight") + "bias" if self.bias else None
        flat = linear(ctx, x, key, bias, out=heads * self.head_dim)
        split = flat.reshape(*x.shape[:2], heads, self.head_dim)
        if self.norm_keys is None or which == "v":
            return split
        norm = GemmaRmsNorm if self.unit_offset else RmsNorm
        return norm(self.norm_keys["qk".index(which)], self.eps).emit(ctx, ctx.wrap(split)).id

    def turned(self, ctx: FlowCtx, x: Value) -> Value:
        assert self.rope is not None
        cos, sin, positions = rope_of(ctx, x, self.stage, self.rope, self.bindings(ctx))
        return ctx.hir().one("rope", x, cos, sin, positions, style=ctx.state.rope_style)

    def attended(self, ctx: FlowCtx, q: Value, k: Value, v: Value) -> Value:
        how = {"scale": self.score_scale, "softcap": self.attn_logit_softcap}
        past, cache = self.bindings(ctx), ctx.state.cache
        mask: Value | None = None
        kind = self.mask
        if past is None and cache is not None:
            if self.kv_out is not None or self.use_custom_mask:
                what = "kv_out" if self.kv_out is not None else "use_custom_mask"
                raise GraphError(
                    f"stage {self.stage}: {what} is for a cache that the caller keeps, and this flow has its own",
                    hint="leave out kv_cache, or use BindDecodeInputs",
                )
            return cache.attend(self.layer_idx, q, k, v, token_positions(ctx, q), mask_kind=self.mask, **how)
        if past is not None:
            k, v = (self.appended(ctx, before, new) for before, new in ((past.past_k, k), (past.past_v, v)))
        elif self.decodes:
            hint = "put BindDecodeInputs before the layers, or give the flow a kv_cache"
            raise GraphError(f"stage {self.stage}: no earlier keys and values flow here", hint=hint)
        self.push(self.kv_out, k, v)
        if self.use_custom_mask and past is not None:
            if past.mask is None:
                hint = "BindDecodeInputs(..., use_custom_mask=True)"
                raise GraphError(f"stage {self.stage}: use_custom_mask, and no mask flows here", hint=hint)
            if past.mask.rank != 2:
                raise ShapeError(f"stage {self.stage}: a custom mask is [batch, keys], found {past.mask.type}")
            kept = past.mask.assume_equal(shape=k.shape[:2])  # its sizes may have names of their own
            if q.shape[1] == 1 and split_mask(self.mask)[0] == "causal":  # the only query sees all that is kept
                mask, kind = kept, MaskKind.CUSTOM
            else:
                mask, kind = _seen_and_kept(q, k, self.mask, kept), MaskKind.BIAS
        return ctx.hir().one("attention", q, k, v, mask, mask_kind=kind, **how)

    def bindings(self, ctx: FlowCtx) -> DecodeBindings | None:
        return ctx.state.decode if self.decodes else None

    def appended(self, ctx: FlowCtx, before: list[Value], new: Value) -> Value:
        """Earlier keys or values, `[batch, past, kv_heads, head_dim]` or flat, and the new ones after them."""
        if self.layer_idx >= len(before):
            raise GraphError(f"stage {self.stage}: layer {self.layer_idx} has no past, {len(before)} are bound")
        past = before[self.layer_idx]
        if past.rank == 3:
            past = past.reshape(*past.shape[:2], self.num_kv_heads, self.head_dim)
        return ctx.hir().one("concatenate", past, new, axis=1)

    def push(self, side: SideOutputs | None, k: Value, v: Value) -> None:
        if side is not None:
            push_kv(side, self.k_key.split(".self_attn.")[0], k, v)


def push_kv(side: SideOutputs, prefix: str, k: Value, v: Value) -> None:
    """Keys and values as side outputs `prefix.k` and `prefix.v`, flat as a caller's cache has them."""
    for name, value in (("k", k), ("v", v)):
        batch, seq, heads, dim = value.shape
        side.push(value.reshape(batch, seq, heads * dim), f"{prefix}.{name}")


def token_positions(ctx: FlowCtx, x: Value) -> Value:
    """[batch, seq]: an input where a cache or the flow asks for it, else counted from 0."""
    if ctx.state.cache is not None or "positions" in ctx.state.inputs:
        return ctx.input("positions", (sym.BATCH, sym.SEQ), "i32")
    return counted(ctx.hir(), x.shape[0], x.shape[1])


def rope_of(ctx: FlowCtx, x: Value, stage: str, name: str, past: DecodeBindings | None) -> tuple[Value, Value, Value]:
    """Tables of cosines and sines and the rows of them that x turns by."""
    if past is not None:  # its rows are those of the new tokens, in order
        return past.cos, past.sin, counted(ctx.hir(), x.shape[0], x.shape[1])
    main = ctx.state.rope_cos, ctx.state.rope_sin
    cos, sin = (ctx.state.named.get(f"{name}.{of}", table) for of, table in zip(("cos", "sin"), main, strict=True))
    if cos is None or sin is None:
        raise GraphError(f"stage {stage}: no RoPE tables flow here", hint="put RopeTables before the layers")
    # rows are not positions where tables depend on the length of the sequence
    rows = ctx.state.named.get(f"{name}.rows") if f"{name}.cos" in ctx.state.named else ctx.state.rope_rows
    # padding has a negative position; what it turns to is never looked at
    return cos, sin, token_positions(ctx, x).maximum(0) if rows is None else rows


def _seen_and_kept(q: Value, k: Value, kind: str, kept: Value) -> Value:
    """[batch, 1, seq, keys] to add to scores: 0 where the kind of mask shows a key that the custom mask keeps."""
    graph, seq, keys = q.graph, q.shape[1], k.shape[1]
    name, window = split_mask(kind)
    keep = (kept if kept.dtype.name == "bool" else kept >= 0.5).reshape(kept.shape[0], 1, 1, keys)
    at = counted(graph, 1, keys)  # queries and keys end at the same position
    before = graph.one("expand", graph.constant(1, "i32"), shape=(keys - seq,)).sum(axis=0)
    back = (counted(graph, 1, seq) + before).reshape(1, 1, seq, 1) - at.reshape(1, 1, 1, keys)
    if name in ("causal", "sliding"):
        keep = keep.logical_and(back >= 0)
    if name == "sliding":
        keep = keep.logical_and(back < window)
    return graph.one("where", keep, graph.constant(0.0), graph.constant(-math.inf))


# -- stages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SelfAttnPrefill(FlowStage):
    """Attention over the value by three weights, with rotary positions and without the output projection."""

    q_key: str
    k_key: str
    v_key: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None
    attn_logit_softcap: float | None = None

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "SelfAttnPrefill")
        attention = SelfAttention(
            "SelfAttnPrefill", self.q_key, self.k_key, self.v_key, self.num_heads, self.num_kv_heads, self.head_dim,
            self.mask, self.score_scale, self.attn_logit_softcap,
        )  # fmt: skip
        return ctx.wrap(attention.emit(ctx, x))

    @property
    def path(self) -> str:
        return "attn"


@dataclass(frozen=True)
class LlamaKvTap(FlowStage):
    """Keys, after RoPE, and values of a layer as side outputs `[batch, seq, kv_heads · head_dim]`. The value passes."""

    layer_prefix: str
    head_dim: int
    eps: float
    outputs: SideOutputs

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        x = ctx.wrap(ctx.need(value, "LlamaKvTap"))
        normed = RmsNorm(f"{self.layer_prefix}.input_layernorm.weight", self.eps).emit(ctx, x)
        _tap(ctx, "LlamaKvTap", normed.id, self.layer_prefix, self.head_dim, self.outputs)
        return value


@dataclass(frozen=True)
class GemmaKvTap(FlowStage):
    """The same of a Gemma layer, whose value is normed already. Where the model norms keys (Gemma 3), so does this."""

    layer_prefix: str
    head_dim: int
    outputs: SideOutputs
    eps: float = 1e-6
    unit_offset: bool = True  # as in Hugging Face's files; GGUF's have the 1 in the weight

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        x = ctx.need(value, "GemmaKvTap")
        _tap(ctx, "GemmaKvTap", x, self.layer_prefix, self.head_dim, self.outputs, self.eps, self.unit_offset)
        return value


def _tap(
    ctx: FlowCtx, stage: str, x: Value, prefix: str, head_dim: int, outputs: SideOutputs, eps: float = 1e-6,
    unit_offset: bool = False,
) -> None:  # fmt: skip
    names = tuple(f"{prefix}.self_attn.{n}_norm.weight" for n in "qk")
    q_key, k_key, v_key = (f"{prefix}.self_attn.{n}_proj.weight" for n in "qkv")
    width = ctx.load_param(k_key).shape[0]
    if not isinstance(width, int) or width % head_dim:
        raise ShapeError(f"stage {stage}: weight {k_key!r} has {width} rows, no multiple of heads of {head_dim}")
    heads = width // head_dim
    attention = SelfAttention(
        stage, q_key, k_key, v_key, heads, heads, head_dim, eps=eps, unit_offset=unit_offset,
        norm_keys=(names[0], names[1]) if ctx.weights.has(names[1]) else None,
    )  # fmt: skip
    k, v = attention.project(ctx, x, "k"), attention.project(ctx, x, "v")
    push_kv(outputs, prefix, attention.turned(ctx, k), v)
