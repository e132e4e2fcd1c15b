"""EmbeddingGemma: Gemma 3 with bidirectional attention, in most layers within a window.

Pooling (a mean and two dense layers) is set by the files next to the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages import FlowStage, GemmaDecoder, GemmaRmsNorm, GemmaStyle, RmsNorm
from rlx.flow.stages.encoder import attend
from rlx.formats import TensorFile
from rlx.ir.graph import Value
from rlx.models import gemma
from rlx.models.config import DecoderConfig, Ignorable, group
from rlx.models.config_fields import rope_base_key, window_key, without
from rlx.models.family import family
from rlx.models.gemma_base import FINAL_CAP, GemmaConfig, LocalRope, Scores, Windows
from rlx.models.rope import Rope, rope_stage
from rlx.ops.attention import MaskKind
from rlx.types import sym


@dataclass(frozen=True)
class Config(GemmaConfig):
    """EmbeddingGemma's configuration: Gemma 3's, with half of the window on each side."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA3
    HF_IGNORABLE: ClassVar[Ignorable] = {**GemmaConfig.HF_IGNORABLE, "use_bidirectional_attention": (True,)}
    GGUF_IGNORABLE: ClassVar[Ignorable] = {
        **without(DecoderConfig.GGUF_IGNORABLE, FINAL_CAP, "pooling_type"), "attention.causal": (False,)
    }  # fmt: skip
    PERIOD: ClassVar[int] = 6
    LARGEST: ClassVar[int] = 62

    rope_base: float = rope_base_key(1_000_000.0)
    scores: Scores = group(Scores, **gemma.SCORES3)
    windows: Windows = group(Windows, sliding_window=window_key(512))
    local: LocalRope = group(LocalRope)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**super().inferred_from_gguf(file), **LocalRope.windows_of_gguf(file), "tied": True}

    @property
    def local_rope(self) -> Rope:
        return self.local.rope(self.head_dim, self.trained)


@dataclass(frozen=True, kw_only=True)
class EmbeddingGemmaLayer(GemmaDecoder):
    """A Gemma 3 layer with bidirectional attention and no cache."""

    reach: int | None = None  # attention span on each side; None: all tokens
    layer_idx: int | None = field(init=False, default=None)  # these four do not apply here
    mask: str = field(init=False, default=MaskKind.NONE)
    attn_logit_softcap: float | None = field(init=False, default=None)
    kv_sink: SideOutputs | None = field(init=False, default=None)

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        heads = self.self_attention()
        queries, keys = (heads.normed(ctx, x, which, rotated=True) for which in "qk")
        kind = MaskKind.NONE if self.reach is None else MaskKind.near(self.reach)
        attended = attend(ctx, queries, keys, heads.project(ctx, x, "v"), "attention_mask", kind, self.score_scale)
        return self.output_projection(ctx, attended, x.shape[-1])


def is_bidirectional(settings: Mapping[str, Any]) -> bool:
    return settings.get("use_bidirectional_attention") is True


@family("embeddinggemma", kind="encoder", gguf=["gemma-embedding"], hf=["gemma3_text"], config=Config,
        weights=gemma.WEIGHTS3, settings=gemma.split_rope_parameters, reads=is_bidirectional)  # fmt: skip
def embeddinggemma(c: Config) -> ModelFlow:
    near, reach = [c.window(i) is not None for i in range(c.layers)], (c.windows.sliding_window or 0) // 2

    def layer(i: int) -> FlowStage:
        return EmbeddingGemmaLayer(
            f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, style=c.STYLE,
            score_scale=c.scores.scale(c.head_dim), unit_offset=c.unit_offset,
            rope="rope.local" if near[i] else "rope", intermediate_size=c.ffn,
            activation=c.activation, reach=reach if near[i] else None, attention_bias=c.attention_bias,
            output_bias=c.attention_bias,
        )  # fmt: skip

    norm = GemmaRmsNorm if c.unit_offset else RmsNorm
    local = rope_stage(c.local_rope, c.context, name="rope.local")
    return (
        ModelFlow("embeddinggemma").input("tokens", (sym.BATCH, sym.SEQ), "i32")
        .when(any(near), lambda flow: flow.stage(local).input("positions", (sym.BATCH, sym.SEQ), "i32"))
        .stage(rope_stage(c.rope, c.context)).token_embed(shape=(c.vocab, c.dim)).embed_scale(c.dim)
        .repeat_layers(c.layers, layer).stage(norm("model.norm.weight", c.eps))
    )  # fmt: skip
