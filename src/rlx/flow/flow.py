"""ModelFlow: a model as a line of stages, and what building it gives.

ModelFlow("llama").input("tokens", (BATCH, SEQ), "i32").token_embed().repeat_layers(...).final_norm(eps).lm_head(...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.errors import GraphError
from rlx.flow.context import Array, FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.embed import Embed, GatherAdd, GatherLastToken, LmHead, RopeTables
from rlx.flow.stages.norm import LayerNorm, RmsNorm
from rlx.flow.stages.structure import Repeat, emit_stage
from rlx.flow.state import CacheBindings, FlowValue
from rlx.flow.weights import WeightSource
from rlx.ir.graph import Graph
from rlx.ir.registry import HIR
from rlx.types import ShapeLike, as_shape, dim, sym


@dataclass(frozen=True)
class KvCacheSpec:
    """The cache that a decoder needs: one keys and one values tensor a layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "f32"


@dataclass(frozen=True)
class BuiltModel:
    """A graph, the params that stages made, and the names of its outputs."""

    module: Graph
    params: dict[str, Array]
    output_names: list[str]
    cache: KvCacheSpec | None = None


@dataclass(frozen=True)
class ModelFlow:
    """Stages in order. Every method returns a longer flow; nothing is changed in place."""

    name: str
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    stages: tuple[FlowStage, ...] = ()
    output_name: str = "output"
    cache: KvCacheSpec | None = field(default=None)

    # -- assembling --
    def input(self, name: str, shape: ShapeLike, dtype: str = "f32") -> ModelFlow:
        """A graph input; the first one starts the flow."""
        return replace(self, inputs=(*self.inputs, (name, as_shape(shape), dtype)))

    def stage(self, stage: FlowStage) -> ModelFlow:
        """Any stage."""
        return replace(self, stages=(*self.stages, stage))

    def token_embed(self, key: str = "model.embed_tokens.weight") -> ModelFlow:
        return self.stage(Embed(key))

    def gather_add(self, input_name: str, key: str) -> ModelFlow:
        return self.stage(GatherAdd(input_name, key))

    def rope_tables(self, cos: Array, sin: Array, style: str = "halves") -> ModelFlow:
        return self.stage(RopeTables(cos, sin, style))

    def repeat_layers(self, count: int, stage_for_index: Callable[[int], FlowStage]) -> ModelFlow:
        return self.stage(Repeat(count, stage_for_index))

    def layer_norm(self, prefix: str, eps: float) -> ModelFlow:
        return self.stage(LayerNorm(f"{prefix}.weight", f"{prefix}.bias", eps))

    def final_norm(self, eps: float, key: str = "model.norm.weight") -> ModelFlow:
        return self.stage(RmsNorm(key, eps))

    def gather_last_token(self) -> ModelFlow:
        return self.stage(GatherLastToken())

    def lm_head(self, vocab: int, hidden: int, *, tied: bool) -> ModelFlow:
        head = LmHead(vocab, hidden, tie_word_embeddings=tied)
        return replace(self.stage(head), output_name="logits")

    def kv_cache(self, layers: int, kv_heads: int, head_dim: int) -> ModelFlow:
        """Attention layers keep keys and values in a cache that the runtime owns."""
        return replace(self, cache=KvCacheSpec(layers, kv_heads, head_dim))

    # -- building --
    def build(self, weights: WeightSource) -> BuiltModel:
        """The graph of this flow over these weights."""
        if not self.inputs:
            raise GraphError(f"flow {self.name!r}: has no input")
        ctx = FlowCtx(Graph(self.name, level=HIR), weights)
        for name, shape, kind in self.inputs:
            ctx.input(name, shape, kind)
        if self.cache is not None:
            ctx.state.cache = _bind_cache(ctx, self.cache)
        value: FlowValue | None = FlowValue.of(ctx.state.inputs[self.inputs[0][0]])
        for stage in self.stages:
            value = emit_stage(ctx, stage, value)
        ctx.module.set_outputs([ctx.need(value, self.name)])
        return BuiltModel(ctx.module, ctx.params, [self.output_name], self.cache)


def _bind_cache(ctx: FlowCtx, spec: KvCacheSpec) -> CacheBindings:
    blocks = dim("blocks")
    keys = [
        ctx.module.state(f"keys.{i}", (sym.BATCH, spec.kv_heads, blocks, spec.head_dim, 64), spec.dtype)
        for i in range(spec.layers)
    ]
    values = [
        ctx.module.state(f"values.{i}", (sym.BATCH, spec.kv_heads, blocks * 64, spec.head_dim), spec.dtype)
        for i in range(spec.layers)
    ]
    return CacheBindings(keys, values)
