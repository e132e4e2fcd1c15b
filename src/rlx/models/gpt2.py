"""GPT-2: learned positions, pre-norm LayerNorm, biases everywhere, tanh-approximated GELU.

Hugging Face files store weights `[in, out]` with q, k and v fused; GGUF files store them transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, GeluFfn, LayerNorm, SelfAttention, emit_stage, linear, token_positions
from rlx.flow.state import FlowValue
from rlx.ir.provenance import stage as provenance
from rlx.models.config import MAX_LAYERS, MAX_POSITIONS, DecoderConfig, key
from rlx.models.family import family
from rlx.models.weight_views import Rows, WeightViews
from rlx.types import sym


@dataclass(frozen=True)
class Config(DecoderConfig):
    """GPT-2's configuration, which has its own key names."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DecoderConfig.HF_IGNORABLE, "add_cross_attention": (None, False)
    }  # fmt: skip

    dim: int = key(gguf="embedding_length", hf="n_embd")
    layers: int = key(gguf="block_count", hf="n_layer", maximum=MAX_LAYERS)
    heads: int = key(gguf="attention.head_count", hf="n_head")
    ffn: int = key(gguf="feed_forward_length", hf="n_inner")
    eps: float = key(gguf="attention.layer_norm_epsilon", hf="layer_norm_epsilon")
    trained: int = key(gguf="context_length", hf="n_positions", maximum=MAX_POSITIONS)
    stated_kv_heads: int | None = key(gguf="attention.head_count_kv", default=None)
    stated_head_dim: int | None = None
    activation: str = key(hf="activation_function", default="gelu_new")
    tied: bool = key(hf="tie_word_embeddings", default=True)
    scaled: bool = key(hf="scale_attn_weights", default=True)
    scaled_by_layer: bool = key(hf="scale_attn_by_inverse_layer_idx", default=False)

    @property
    def uses_rope(self) -> bool:
        return False

    def score_scale(self, layer: int) -> float:
        return (self.head_dim**-0.5 if self.scaled else 1.0) / (layer + 1 if self.scaled_by_layer else 1)


def fill_defaults(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Fills in omitted settings: the feed-forward is four times as wide as the model."""
    width = settings.get("n_embd")
    usual = {"n_inner": 4 * width if type(width) is int else width, "layer_norm_epsilon": 1e-5}
    return usual | {name: value for name, value in settings.items() if value is not None or name not in usual}


_MODULES = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
WEIGHTS = {
    "wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight", "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias", "lm_head.weight": "output.weight",
} | {
    f"h.{{i}}.{hf}.{part}": f"blk.{{i}}.{gguf}.{part}" for hf, gguf in _MODULES.items() for part in ("weight", "bias")
}  # fmt: skip


def weight_views(c: Config, format: str) -> WeightViews:
    """Weights `[out, in]`, with q, k and v split."""
    transposed = format != "gguf"
    stored = [f"h.{{i}}.{name}.weight" for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    views = {name: Rows(name, transposed=transposed) for name in stored}
    for at, name in enumerate("qkv"):
        rows = at * c.dim, (at + 1) * c.dim
        views[f"h.{{i}}.attn.{name}.weight"] = Rows("h.{i}.attn.c_attn.weight", *rows, transposed=transposed)
        views[f"h.{{i}}.attn.{name}.bias"] = Rows("h.{i}.attn.c_attn.bias", *rows)
    return views


@dataclass(frozen=True)
class Positions(FlowStage):
    """Adds the position table's row of each token."""

    shape: tuple[int, int]

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "Positions")
        table = ctx.load_param("wpe.weight", shape=self.shape)
        return ctx.wrap(x + table.gather(token_positions(ctx, x).maximum(0)))  # padding has negative positions

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class Layer(FlowStage):
    """x + attention(norm x), then + feed-forward(norm ·)."""

    config: Config
    index: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "gpt2.Layer")
        c, at = self.config, f"h.{self.index}"
        attend = SelfAttention(
            "gpt2.Layer", f"{at}.attn.q.weight", f"{at}.attn.k.weight", f"{at}.attn.v.weight", c.heads, c.heads,
            c.head_dim, bias=True, rope=None, score_scale=c.score_scale(self.index), layer_idx=self.index,
        )  # fmt: skip
        with provenance("attn"):
            normed = LayerNorm(f"{at}.ln_1.weight", f"{at}.ln_1.bias", c.eps).emit(ctx, ctx.wrap(x))
            seen = attend.emit(ctx, normed.id)
            x = x + linear(ctx, seen, f"{at}.attn.c_proj.weight", f"{at}.attn.c_proj.bias", out=c.dim)
        ffn = GeluFfn(
            f"{at}.mlp.c_fc.weight", f"{at}.mlp.c_fc.bias", f"{at}.mlp.c_proj.weight", f"{at}.mlp.c_proj.bias",
            intermediate_size=c.ffn, activation=c.activation,
        )  # fmt: skip
        after = emit_stage(ctx, LayerNorm(f"{at}.ln_2.weight", f"{at}.ln_2.bias", c.eps), ctx.wrap(x), "ffn.norm")
        return ctx.wrap(x + ctx.need(emit_stage(ctx, ffn, after), "ffn"))


@family(
    "gpt2", kind="decoder", gguf=["gpt2"], hf=["gpt2"], config=Config, weights=WEIGHTS, prefixes=["transformer."],
    settings=fill_defaults, weight_views=weight_views,
)  # fmt: skip
def gpt2(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return (
        ModelFlow("gpt2").input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.heads, c.head_dim)
        .token_embed("wte.weight", shape=(c.vocab, c.dim)).stage(Positions((c.trained, c.dim)))
        .repeat_layers(c.layers, lambda i: Layer(c, i)).layer_norm("ln_f", c.eps).gather_last_token()
        .lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip
