"""Self-attention of decoders, with RoPE, grouped heads and a KV cache.

Keys and values of earlier tokens are in the runtime's KV cache (`FlowState.cache`), in inputs that the caller passes
(`FlowState.decode`), or nowhere, if the sequence starts here. One class handles all three, so prefill and decode are
the same code.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rlx.errors import GraphError, ShapeError
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_rows, has_positions, rope_tables_of, size_of, token_positions
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.norm import GemmaRmsNorm, RmsNorm
from rlx.flow.state import MAIN_ROPE, DecodeBindings, FlowValue
from rlx.hir.layers import rotate_heads
from rlx.hir.lower import default_positions
from rlx.ir.graph import Value
from rlx.ops.attention import MaskKind, parse_mask
from rlx.types import Size, known_equal

# Cosines, sines, the row of each token in them if it is not its position, positions if they are given, and the style.
Rotation = tuple[Value, Value, Value | None, Value | None, str]


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
    rope: str | None = MAIN_ROPE  # the name of its tables; None: heads do not turn
    layer_idx: int | None = None  # needed where there is a cache
    decodes: bool = False  # wants earlier keys and values
    use_custom_mask: bool = False
    kv_sink: SideOutputs | None = None  # gets the keys and values of the tokens given, `[batch, seq, kv_heads · dim]`
    kv_out: SideOutputs | None = None  # gets all that is attended to

    def emit(self, ctx: FlowCtx, x: Value) -> Value:
        """[batch, seq, hidden] to [batch, seq, heads · head_dim]."""
        q, k, v = (self.project(ctx, x, which) for which in "qkv")
        return self.of_heads(ctx, q, k, v)

    def of_heads(self, ctx: FlowCtx, q: Value, k: Value, v: Value) -> Value:
        """The same from queries, keys and values `[batch, seq, heads, head_dim]` that have not turned yet."""
        if self.bindings(ctx) is None and self.kv_sink is None and self.kv_out is None:
            return self.block(ctx, q, k, v)
        q, k = self.turned(ctx, q), self.turned(ctx, k)  # rotated keys are wanted outside
        self.push(self.kv_sink, k, v)
        return self.attended(ctx, q, k, v)

    def block(self, ctx: FlowCtx, q: Value, k: Value, v: Value) -> Value:
        """All of it as one block: RoPE, the runtime's cache where there is one, and attention."""
        how: dict[str, Any] = {"mask_kind": self.mask, "scale": self.score_scale, "softcap": self.attn_logit_softcap}
        tables: dict[str, Any] = {}
        positions = None
        if self.rope is not None:
            cos, sin, rows, positions, how["style"] = self.tables(ctx, q)
            tables = {"cos": cos, "sin": sin, "rows": rows}
        if ctx.state.cache is not None:
            self.check_cache()
            return ctx.state.cache.attend(self.layer, q, k, v, token_positions(ctx, q), **tables, **how)
        self.check_past(ctx)
        return ctx.hir().one("self_attention", q, k, v, **tables, positions=positions, **how)

    def project(self, ctx: FlowCtx, x: Value, which: str) -> Value:
        """Queries, keys or values, `[batch, seq, heads, head_dim]`."""
        heads = self.num_heads if which == "q" else self.num_kv_heads
        key = {"q": self.q_key, "k": self.k_key, "v": self.v_key}[which]
        bias = key.removesuffix("weight") + "bias" if self.bias else None
        return self.normed(ctx, linear(ctx, x, key, bias, out=heads * self.head_dim, heads=heads), which)

    def normed(self, ctx: FlowCtx, heads: Value, which: str) -> Value:
        """Each head of queries or keys by itself, where the model norms them."""
        if self.norm_keys is None or which == "v":
            return heads
        norm = GemmaRmsNorm if self.unit_offset else RmsNorm
        return norm(self.norm_keys["qk".index(which)], self.eps).emit(ctx, ctx.wrap(heads)).id

    def turned(self, ctx: FlowCtx, x: Value) -> Value:
        """Queries or keys rotated by their positions, which follow those of the past."""
        return x if self.rope is None else rotate_heads(x, *self.rotation(ctx, x))

    def rotation(self, ctx: FlowCtx, x: Value) -> Rotation:
        """The same as `tables`, in a step after a past too."""
        assert self.rope is not None
        past, (batch, seq) = self.bindings(ctx), x.shape[:2]
        if past is None:
            return self.tables(ctx, x)
        step = self.rows_of_step(ctx, past, self.rope)
        if step is not None:
            cos, sin = (self.of_new_tokens(table, seq) for table in step)
            own = past.style if self.rope == MAIN_ROPE else None
            return cos, sin, default_positions(ctx.hir(), batch, seq), None, own or ctx.state.style_of(self.rope)
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
        """Cosines and sines, the row of each token in them if it is not its position, positions if they are given, and
        how the two parts of a pair lie."""
        assert self.rope is not None
        cos, sin, rows, style = rope_tables_of(ctx, self.stage, self.rope)
        if rows is not None:
            return cos, sin, rows, None, style
        if has_positions(ctx):
            return cos, sin, None, token_positions(ctx, x), style
        check_rows(self.stage, cos.shape[0], before + x.shape[1])
        return cos, sin, None, None, style

    def of_new_tokens(self, table: Value, seq: Size) -> Value:
        """Rows of a step, one per new token. A number of rows that is known at run time only is checked then."""
        if known_equal(table.shape[0], seq) is False:
            raise ShapeError(
                f"stage {self.stage}: a step of {seq} tokens has {table.shape[0]} rows of RoPE tables",
                hint="give one row per new token, or put RopeTables before BindDecodeInputs",
            )
        return table if table.shape[0] == seq else table.assume_equal(shape=(seq, *table.shape[1:]))

    def rows_of_step(self, ctx: FlowCtx, past: DecodeBindings, rope: str) -> tuple[Value, Value] | None:
        """One row per new token where the caller gives them: the bound ones, or inputs `<rope>_cos` and `_sin`."""
        if rope == MAIN_ROPE:
            return (past.cos, past.sin) if past.rows and past.cos is not None and past.sin is not None else None
        names = f"{rope}_cos", f"{rope}_sin"
        if not all(name in ctx.state.inputs for name in names):
            return None
        return ctx.flow_input(names[0]).id, ctx.flow_input(names[1]).id

    def attended(self, ctx: FlowCtx, q: Value, k: Value, v: Value) -> Value:
        """What queries find, `[batch, seq, heads · head_dim]`; queries and keys have turned."""
        how: dict[str, Any] = {"scale": self.score_scale, "softcap": self.attn_logit_softcap}
        past, cache = self.bindings(ctx), ctx.state.cache
        mask: Value | None = None
        kind = self.mask
        if past is None and cache is not None:
            self.check_cache()
            return cache.attend(self.layer, q, k, v, token_positions(ctx, q), mask_kind=self.mask, **how)
        if past is not None:
            k, v = (self.appended(ctx, before, new) for before, new in ((past.past_k, k), (past.past_v, v)))
        self.check_past(ctx)
        self.push(self.kv_out, k, v)
        if self.use_custom_mask and past is not None:
            if past.mask is None:
                hint = "BindDecodeInputs(..., use_custom_mask=True)"
                raise GraphError(f"stage {self.stage}: use_custom_mask, and no mask flows here", hint=hint)
            if past.mask.rank != 2:
                raise ShapeError(f"stage {self.stage}: a custom mask is [batch, keys], found {past.mask.type}")
            kept = past.mask.assume_equal(shape=k.shape[:2])  # its sizes may have names of their own
            if q.shape[1] == 1 and self.mask == MaskKind.CAUSAL:  # the only query sees all that is kept
                mask, kind = kept, MaskKind.CUSTOM
            else:
                mask, kind = _seen_and_kept(q, k, self.mask, kept), MaskKind.BIAS
        return ctx.hir().one("self_attention", q, k, v, mask, mask_kind=kind, **how)

    def check_cache(self) -> None:
        """Raise for what only a cache of the caller has."""
        what = "kv_out" if self.kv_out is not None else "use_custom_mask" if self.use_custom_mask else None
        if what is not None:
            raise GraphError(
                f"stage {self.stage}: {what} is for a cache that the caller keeps, and this flow has its own",
                hint="leave out kv_cache, or use BindDecodeInputs",
            )

    def check_past(self, ctx: FlowCtx) -> None:
        """Raise for a step without a past."""
        if self.decodes and self.bindings(ctx) is None:
            hint = "put BindDecodeInputs before the layers, or give the flow a kv_cache"
            raise GraphError(f"stage {self.stage}: no earlier keys and values flow here", hint=hint)

    def bindings(self, ctx: FlowCtx) -> DecodeBindings | None:
        return ctx.state.decode if self.decodes else None

    def appended(self, ctx: FlowCtx, before: list[Value], new: Value) -> Value:
        """Earlier keys or values, `[batch, past, kv_heads, head_dim]` or flat, and the new ones after them."""
        past = self.past_of(before)
        if past.rank == 3:
            past = past.reshape(*past.shape[:2], self.num_kv_heads, self.head_dim)
        return ctx.hir().one("concatenate", past, new, axis=1)

    def past_of(self, before: list[Value]) -> Value:
        """What the caller keeps for this layer."""
        layer = self.layer
        if not 0 <= layer < len(before):
            raise GraphError(f"stage {self.stage}: layer {layer} has no past, {len(before)} are bound")
        return before[layer]

    @property
    def layer(self) -> int:
        """The number of the layer, which decides whose past it reads."""
        if self.layer_idx is None:
            raise GraphError(
                f"stage {self.stage}: reads a cache, and layer_idx is not given", hint="layer_idx counts from 0"
            )
        return self.layer_idx

    def push(self, side: SideOutputs | None, k: Value, v: Value) -> None:
        if side is not None:
            push_kv(side, self.k_key.split(".self_attn.")[0], k, v)


def push_kv(side: SideOutputs, prefix: str, k: Value, v: Value) -> None:
    """Keys and values as side outputs `prefix.k` and `prefix.v`, flat as a caller's cache has them."""
    for name, value in (("k", k), ("v", v)):
        batch, seq, heads, dim = value.shape
        side.push(value.reshape(batch, seq, heads * dim), f"{prefix}.{name}")


def _seen_and_kept(q: Value, k: Value, kind: str, kept: Value) -> Value:
    """[batch, 1, seq, keys] to add to scores: 0 where the kind of mask shows a key that the custom mask keeps."""
    keep = (kept if kept.dtype.name == "bool" else kept >= 0.5).reshape(kept.shape[0], 1, 1, k.shape[1])
    return only_where(seen_keys(q, k, kind, keep), q.graph.constant(0.0))


def seen_keys(q: Value, k: Value, kind: str, keep: Value | None = None) -> Value:
    """[batch, 1, seq, keys] truth values: which keys the kind of mask shows, of those to keep."""
    graph, seq, keys = q.graph, q.shape[1], k.shape[1]
    shape = parse_mask(kind)
    if shape.takes_operand:
        raise GraphError(f"a custom mask beside mask kind {kind!r}, which takes an operand of its own")
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
    layer_idx: int | None = None  # its layer in the KV cache; required if the flow has one

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
        raise ShapeError(f"stage {stage}: weight {k_key!r} has {width} rows, no multiple of heads of {head_dim}")
    heads = width // head_dim
    attention = SelfAttention(
        stage, q_key, k_key, v_key, heads, heads, head_dim, eps=tap.eps, unit_offset=unit_offset, rope=tap.rope,
        bias=ctx.weights.has(f"{at}.k_proj.bias"), norm_keys=norms if ctx.weights.has(norms[1]) else None,
    )  # fmt: skip
    k, v = attention.project(ctx, x, "k"), attention.project(ctx, x, "v")
    push_kv(tap.outputs, tap.layer_prefix, attention.turned(ctx, k), v)
