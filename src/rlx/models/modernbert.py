"""ModernBERT: pre-norm encoder with GeGLU; most layers have a sliding window and their own RoPE base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import fused_gated_ffn, linear
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, LayerNorm
from rlx.flow.stages.encoder import attend, rotation_of
from rlx.flow.state import FlowValue
from rlx.formats.tensor_file import quoted
from rlx.ir.graph import Value
from rlx.ir.provenance import stage as provenance
from rlx.models.config import FULL, SLIDING, EncoderConfig, check_layer_types, key
from rlx.models.family import family
from rlx.models.rope import Rope, of_layer_kind, rope_stage
from rlx.ops.attention import MaskKind
from rlx.types import sym

LOCAL, GLOBAL = "rope.local", "rope.global"  # names of RoPE tables


@dataclass(frozen=True)
class Config(EncoderConfig):
    """ModernBERT's configuration."""

    GGUF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EncoderConfig.GGUF_IGNORABLE, "rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1),
    }  # fmt: skip

    eps: float = key(gguf="attention.layer_norm_epsilon", hf="norm_eps", default=1e-5)
    activation: str = key(hf="hidden_activation", default="gelu")
    window: int = key(gguf="attention.sliding_window", hf="local_attention", default=128)  # half on each side
    every: int = key(gguf="attention.sliding_window_pattern", hf="global_attn_every_n_layers", default=3)
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)
    global_base: float = key(gguf="rope.freq_base", hf="global_rope_theta", default=160000.0)
    local_base: float = key(gguf="rope.freq_base_swa", hf="local_rope_theta", default=10000.0)
    global_scaling: Mapping[str, Any] | None = key(hf="global_rope_scaling", default=None)
    local_scaling: Mapping[str, Any] | None = key(hf="local_rope_scaling", default=None)
    norm_bias: bool = key(hf="norm_bias", default=False)
    attention_bias: bool = key(hf="attention_bias", default=False)
    mlp_bias: bool = key(hf="mlp_bias", default=False)

    def is_local(self, layer: int) -> bool:
        return bool(layer % self.every) if self.layer_types is None else self.layer_types[layer] == SLIDING

    @property
    def global_rope(self) -> Rope:
        return Rope(self.head_dim, self.global_base, self.positions, self.global_scaling or {})

    @property
    def local_rope(self) -> Rope:
        return Rope(self.head_dim, self.local_base, self.positions, self.local_scaling or {})

    def omitted_weights(self) -> tuple[str, ...]:
        has = {"norm": self.norm_bias, "attn": self.attention_bias, "mlp": self.mlp_bias}
        biases = [name for name in WEIGHTS if name.endswith(".bias")]
        return tuple(b for b in biases if not next(on for part, on in has.items() if part in b))

    def check(self, where: str) -> None:
        super().check(where)
        if self.head_dim % 2:
            raise FormatError(f"{where}: heads of {self.head_dim} elements; rotary positions turn pairs")
        check_layer_types(where, self.layer_types, self.layers, self.window)
        for rope in (self.global_rope, self.local_rope):
            rope.check(where)


_LINEAR = {"attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down"}
_NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
WEIGHTS = {"embeddings.tok_embeddings.weight": "token_embd.weight"} | {
    f"{hf}.{part}": f"{gguf}.{part}"
    for hf, gguf in {
        "embeddings.norm": "token_embd_norm", "final_norm": "output_norm",
        **{f"layers.{{i}}.{hf}": f"blk.{{i}}.{gguf}" for hf, gguf in {**_LINEAR, **_NORMS}.items()},
    }.items()
    for part in ("weight", "bias")
}  # fmt: skip


def settings(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Translates newer configurations, with bases and scalings in `rope_parameters`, to the original names."""
    ropes = config.get("rope_parameters") or {}
    if not isinstance(ropes, Mapping):
        raise FormatError(f"{where}: rope_parameters: expected an object, found {quoted(ropes)}")
    renamed = dict(config)
    for kind, name in ((FULL, "global"), (SLIDING, "local")):
        rope = of_layer_kind(ropes, kind, where)
        if "rope_theta" in rope:
            renamed[f"{name}_rope_theta"] = rope["rope_theta"]
        renamed[f"{name}_rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return renamed


@family("modernbert", kind="encoder", gguf=["modern-bert"], hf=["modernbert"], config=Config, weights=WEIGHTS,
        prefixes=["model."], settings=settings)  # fmt: skip
def modernbert(c: Config) -> ModelFlow:
    near = [c.is_local(i) for i in range(c.layers)]

    def add_rope(flow: ModelFlow, rope: Rope, name: str) -> ModelFlow:
        return flow.stage(rope_stage(rope, c.context, name=name))

    return (
        ModelFlow("modernbert").input("tokens", (sym.BATCH, sym.SEQ), "i32")
        .input("positions", (sym.BATCH, sym.SEQ), "i32")
        .token_embed("embeddings.tok_embeddings.weight", shape=(c.vocab, c.dim))
        .stage(norm(c, "embeddings.norm"))
        .when(any(near), lambda flow: add_rope(flow, c.local_rope, LOCAL))
        .when(not all(near), lambda flow: add_rope(flow, c.global_rope, GLOBAL))
        .repeat_layers(c.layers, lambda i: ModernBertLayer(c, i, near[i])).stage(norm(c, "final_norm"))
    )  # fmt: skip


def norm(c: Config, name: str) -> LayerNorm:
    return LayerNorm(f"{name}.weight", f"{name}.bias" if c.norm_bias else None, c.eps)


@dataclass(frozen=True)
class ModernBertLayer(FlowStage):
    """x + attention(norm x), then + feed-forward(norm ·). The first layer has no norm, since one precedes it."""

    c: Config
    index: int
    near: bool

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "ModernBertLayer")
        with provenance("attn"):
            h = self.normed(ctx, x, "attn_norm") if self.index else x
            attended = self.attention(ctx, h)
        x = x + attended
        with provenance("ffn"):
            inner = self.ffn(ctx, self.normed(ctx, x, "mlp_norm"))
        return ctx.wrap(x + inner)

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        c = self.c
        qkv = self.dense(ctx, x, "attn.Wqkv", 3 * c.dim, c.attention_bias)
        q, k, v = ctx.hir().apply("split_qkv", qkv, num_heads=c.heads)
        rotation = rotation_of(ctx, "ModernBertLayer", q, LOCAL if self.near else GLOBAL)
        kind = MaskKind.near(c.window // 2) if self.near else MaskKind.NONE
        out = attend(ctx, q, k, v, "attention_mask", kind, rotation=rotation)
        return self.dense(ctx, out, "attn.Wo", c.dim, c.attention_bias)

    def ffn(self, ctx: FlowCtx, x: Value) -> Value:
        c, at = self.c, f"layers.{self.index}.mlp"
        keys = f"{at}.Wi", f"{at}.Wo"
        return fused_gated_ffn(ctx, x, *keys, activation=c.activation, bias=c.mlp_bias, inner=c.ffn)

    def dense(self, ctx: FlowCtx, x: Value, name: str, out: int, bias: bool) -> Value:
        base = f"layers.{self.index}.{name}"
        return linear(ctx, x, f"{base}.weight", f"{base}.bias" if bias else None, out=out)

    def normed(self, ctx: FlowCtx, x: Value, name: str) -> Value:
        return norm(self.c, f"layers.{self.index}.{name}").emit(ctx, ctx.wrap(x)).id
