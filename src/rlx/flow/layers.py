"""The builder methods of flows and layers: one method per stage, each of which returns a longer list of stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from typing import Any, Self

from rlx.arrays import Array
from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.positions import rope_tables
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages import attention, decoder, embed, encoder, ffn, norm, parts, streams, structure, vision
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.custom import Author, Custom, plugin_stage
from rlx.flow.state import MAIN_ROPE
from rlx.ir.provenance import Origin, here
from rlx.ops.attention import MaskKind
from rlx.types import Size

# Hugging Face's names of a decoder's token table and final norm.
TOKENS, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"


class StageList(ABC):
    """Stages in order. Every method returns a longer list; nothing is changed in place."""

    stages: tuple[FlowStage, ...]
    places: tuple[Origin, ...]  # where the user added each of them

    @abstractmethod
    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        """Return a copy with other stages."""

    def places_of(self, stages: Iterable[FlowStage]) -> tuple[Origin, ...]:
        """Return where stages were added: the recorded place for stages of this list, the current line for others."""
        known = {id(stage): place for stage, place in zip(self.stages, self.places, strict=False)}
        place = here()
        return tuple(known.get(id(stage), place) for stage in stages)

    # -- any stage --
    def stage(self, stage: FlowStage) -> Self:
        """Append a stage."""
        if not isinstance(stage, FlowStage):
            hint = "create an instance" if isinstance(stage, type) else "derive from FlowStage, or use custom(f)"
            raise GraphError(f"stage: {stage!r} is not a stage", hint=hint)
        return self.with_stages((*self.stages, stage))

    def sequence(self, *stages: FlowStage) -> Self:
        """Stages in order, as one stage."""
        return self.stage(structure.Sequence(stages))

    def custom(self, f: Author) -> Self:
        """Append a custom function `f(emit, value) -> value`."""
        return self.stage(Custom(f))

    def custom_named(self, name: str, f: Author) -> Self:
        """Append a custom function under a name, which is its path and the name of its result."""
        return self.stage(Custom(f, name))

    def plugin(self, plugin: str | FlowStage, **settings: Any) -> Self:
        """Append a custom stage: an instance, or a name registered with `register_stage` and its settings."""
        return self.stage(plugin_stage(plugin, settings))

    def plugin_named(self, name: str, plugin: str | FlowStage, **settings: Any) -> Self:
        """Append a custom stage like `plugin`, and name its result."""
        return self.named_layer(name, plugin_stage(plugin, settings))

    def patch(self, f: Callable[[Self], Self]) -> Self:
        """Return `f(self)`."""
        return f(self)

    def when(self, condition: bool, f: Callable[[Self], Self]) -> Self:
        """Return `f(self)` if the condition holds, else self."""
        return f(self) if condition else self

    # -- layers --
    def repeat_layers(
        self, count: int, stage_for_index: Callable[[int], FlowStage | LayerStack], name: str = "layers"
    ) -> Self:
        """Append layers under paths such as `layers.3`; `stage_for_index(i)` returns a stage or a `LayerStack`."""

        def stage(i: int) -> FlowStage:
            layer = stage_for_index(i)
            return layer.as_stage() if isinstance(layer, LayerStack) else layer

        return self.stage(structure.Repeat(count, stage if callable(stage_for_index) else stage_for_index, name))

    def named_layer(self, name: str, stage: FlowStage) -> Self:
        """Append a stage under a name, which is its path and the name of its result."""
        return self.stage(structure.Named(name, stage))

    def layer(self, name: str, build: Callable[[LayerStack], LayerStack]) -> Self:
        """Append a layer of several stages under one name; `build` gets an empty stack and returns the full one."""
        stack = build(LayerStack())
        if not isinstance(stack, LayerStack):
            hint = "return the stack: its methods return a longer one"
            raise GraphError(f"layer {name!r}: its function returned a {type(stack).__name__}", hint=hint)
        return self.named_layer(name, stack.as_stage())

    def residual_save(self) -> Self:
        """Save the value for a later `residual_add`; pairs nest."""
        return self.stage(structure.ResidualSave())

    def residual_add(self) -> Self:
        """Add the value that was saved last."""
        return self.stage(structure.ResidualAdd())

    def llama_prefill_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, mask: str = MaskKind.CAUSAL
    ) -> Self:
        """Append Llama layer i, with Hugging Face's weight names."""
        heads = num_heads, num_kv_heads, head_dim
        layer = decoder.LlamaDecoder(f"model.layers.{i}", *heads, eps, layer_idx=i, mask=mask)
        return self.named_layer(f"layers.{i}", layer)

    def llama_prefill_layer_composed(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, mask: str = MaskKind.CAUSAL
    ) -> Self:
        """Append Llama layer i as small stages, which can be edited one by one.

        `h = x + attention(rms_norm(x)) @ o_projᵀ`, `y = h + swiglu(rms_norm(h))`.
        """
        at = f"model.layers.{i}"
        q, k, v = (f"{at}.self_attn.{name}_proj.weight" for name in "qkv")
        return self.layer(
            f"layers.{i}",
            lambda stack: stack.residual_save().rms_norm(f"{at}.input_layernorm.weight", eps)
            .self_attn_prefill(q, k, v, num_heads, num_kv_heads, head_dim, mask, layer_idx=i)
            .linear(f"{at}.self_attn.o_proj.weight").residual_add()
            .residual_save().rms_norm(f"{at}.post_attention_layernorm.weight", eps)
            .swiglu_hf_mlp(f"{at}.mlp").residual_add(),
        )  # fmt: skip

    def llama_decode_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, kv_out: SideOutputs | None = None,
        use_custom_mask: bool = False,
    ) -> Self:  # fmt: skip
        """Append Llama layer i for decode, after `bind_decode_inputs`; all keys and values go to `kv_out`."""
        layer = decoder.LlamaDecodeLayer(
            f"model.layers.{i}", num_heads, num_kv_heads, head_dim, eps, layer_idx=i, use_custom_mask=use_custom_mask,
            kv_out=kv_out,
        )  # fmt: skip
        return self.named_layer(f"layers.{i}", layer)

    def qwen3_prefill_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, qk_norm: bool = True,
        attention_bias: bool = False, kv_sink: SideOutputs | None = None,
    ) -> Self:  # fmt: skip
        """Append Qwen3 layer i; Qwen2 is `qk_norm=False, attention_bias=True`."""
        layer = decoder.Qwen3Decoder(
            f"model.layers.{i}", num_heads, num_kv_heads, head_dim, eps, layer_idx=i, qk_norm=qk_norm,
            attention_bias=attention_bias, kv_sink=kv_sink,
        )  # fmt: skip
        return self.named_layer(f"layers.{i}", layer)

    def qwen3_decode_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, kv_out: SideOutputs | None = None,
        use_custom_mask: bool = False, qk_norm: bool = True, attention_bias: bool = False,
    ) -> Self:  # fmt: skip
        """Append Qwen3 layer i for decode, after `bind_decode_inputs`."""
        layer = decoder.Qwen3DecodeLayer(
            f"model.layers.{i}", num_heads, num_kv_heads, head_dim, eps, layer_idx=i, use_custom_mask=use_custom_mask,
            kv_out=kv_out, qk_norm=qk_norm, attention_bias=attention_bias,
        )  # fmt: skip
        return self.named_layer(f"layers.{i}", layer)

    def gemma_decode_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, style: str,
        mask: str = MaskKind.CAUSAL, kv_out: SideOutputs | None = None, use_custom_mask: bool = False,
        score_scale: float | None = None, attn_logit_softcap: float | None = None,
    ) -> Self:  # fmt: skip
        """Append Gemma layer i for decode, after `bind_decode_inputs`."""
        layer = decoder.GemmaDecodeLayer(
            f"model.layers.{i}", num_heads, num_kv_heads, head_dim, eps, layer_idx=i, style=style, mask=mask,
            score_scale=score_scale, attn_logit_softcap=attn_logit_softcap, use_custom_mask=use_custom_mask,
            kv_out=kv_out,
        )  # fmt: skip
        return self.named_layer(f"layers.{i}", layer)

    def llama_kv_tap(self, i: int, head_dim: int, eps: float, outputs: SideOutputs) -> Self:
        """Export keys and values of Llama layer i as side outputs; the value is unchanged."""
        return self.stage(attention.LlamaKvTap(f"model.layers.{i}", head_dim, eps, outputs))

    def gemma_kv_tap(self, i: int, head_dim: int, outputs: SideOutputs) -> Self:
        """Export keys and values of Gemma layer i as side outputs; the value is unchanged."""
        return self.stage(attention.GemmaKvTap(f"model.layers.{i}", head_dim, outputs))

    def nomic_encoder_layer(self, prefix: str, hidden: int, heads: int, eps: float) -> Self:
        """One NomicBERT layer: rotary attention and SwiGLU, each followed by a layer norm."""
        return self.stage(encoder.NomicEncoderLayer(prefix, hidden, heads, hidden // heads, eps))

    def bert_encoder_layer(self, prefix: str, hidden: int, heads: int, eps: float) -> Self:
        """One BERT layer: attention and a GELU feed-forward, each followed by a layer norm."""
        return self.stage(encoder.BertEncoderLayer(prefix, hidden, heads, hidden // heads, eps))

    def repeat_bert_layers(
        self, count: int, prefix: str, hidden: int, heads: int, eps: float, *, intermediate_size: int | None = None
    ) -> Self:
        """Append BERT layers, with weights under `prefix.0` and so on. `init` needs `intermediate_size`.

        `h = norm(x + attention(x))`, `y = norm(h + gelu_ffn(h))`. Padding is what the input `attention_mask` has 0 for.
        """
        sizes = hidden, heads, hidden // heads, eps

        def layer(i: int) -> FlowStage:
            return encoder.BertEncoderLayer(f"{prefix}.{i}", *sizes, intermediate_size=intermediate_size)

        return self.repeat_layers(count, layer)

    def repeat_nomic_layers(
        self, count: int, prefix: str, hidden: int, heads: int, eps: float, *, intermediate_size: int | None = None
    ) -> Self:
        """Append NomicBERT layers, with weights under `prefix.0` and so on. They need RoPE tables.

        `h = norm(x + attention(x))`, `y = norm(h + swiglu(h))`. Padding is what the input `attention_mask` has 0 for.
        `init` needs `intermediate_size`.
        """
        sizes = hidden, heads, hidden // heads, eps

        def layer(i: int) -> FlowStage:
            return encoder.NomicEncoderLayer(f"{prefix}.{i}", *sizes, intermediate_size=intermediate_size)

        return self.repeat_layers(count, layer)

    def repeat_dinov2_layers(self, count: int, prefix: str, heads: int, head_dim: int, eps: float) -> Self:
        """Append DINOv2 layers with its original weight names: `prefix.0.attn.qkv`, `prefix.0.ls1.gamma` and so on.

        `h = x + ls1 · attention(norm(x))`, `y = h + ls2 · gelu_ffn(norm(h))`.
        """

        def layer(i: int) -> FlowStage:
            at = f"{prefix}.{i}"
            attention = _fused_attention(f"{at}.attn.qkv", f"{at}.attn.proj", heads, head_dim)
            scales = (f"{at}.ls1.gamma", f"{at}.ls2.gamma")
            return vision.pre_norm_layer((f"{at}.norm1", f"{at}.norm2"), attention, ffn.GeluFfn.dinov2(at), eps, scales)

        return self.repeat_layers(count, layer)

    def repeat_vision_layers(self, count: int, prefix: str, heads: int, head_dim: int, eps: float) -> Self:
        """Append NomicVision layers, with weights such as `prefix.0.attn.Wqkv` and `prefix.0.mlp.fc11`.

        `h = x + attention(norm(x))`, `y = h + vision_swiglu_ffn(norm(h))`.
        """

        def layer(i: int) -> FlowStage:
            at = f"{prefix}.{i}"
            attention = _fused_attention(f"{at}.attn.Wqkv", f"{at}.attn.out_proj", heads, head_dim)
            gated = vision.VisionSwiGluFfn(at, eps)
            return vision.pre_norm_layer((f"{at}.norm1", f"{at}.norm2"), attention, gated, eps)

        return self.repeat_layers(count, layer)

    # -- streams --
    def store_stream(self, name: str) -> Self:
        """Copy the value into a named stream; the value flows on."""
        return self.stage(streams.StoreStream(name))

    def load_stream(self, name: str) -> Self:
        """Continue with the value of a named stream."""
        return self.stage(streams.LoadStream(name))

    def dual_stream(self, name: str, a: str, b: str, f: Callable[..., Any]) -> Self:
        """Transform two streams together by `f(emit, a, b) -> (a, b)`."""
        return self.stage(streams.DualStream(name, a, b, f))

    def bind_inputs_to_streams(self, pairs: Iterable[tuple[str, str]]) -> Self:
        """Bind inputs to streams, by pairs (input name, stream name)."""
        return self.stage(streams.BindInputs(tuple((name, stream) for name, stream in pairs)))

    # -- tables --
    def embed(self, key: str, *, shape: tuple[int, int] | None = None) -> Self:
        """Look up token embeddings in the table `key`, which a tied head uses again."""
        return self.stage(embed.Embed(key, shape=shape))

    def token_embed(self, key: str = TOKENS, *, shape: tuple[int, int] | None = None) -> Self:
        """`embed` with the table where Hugging Face keeps it."""
        return self.embed(key, shape=shape)

    def embed_scale(self, hidden: int) -> Self:
        """Multiply token embeddings by √hidden, as Gemma does."""
        return self.stage(parts.EmbedScale(hidden))

    def gather_from_input(self, input_name: str, key: str) -> Self:
        """Replace the value by the rows of a table that a named input selects."""
        return self.stage(parts.GatherFromInput(input_name, key))

    def gather_add(self, input_name: str, key: str, *, rows: int | None = None) -> Self:
        """Add the rows of a table that a named input selects: position and type embeddings."""
        return self.stage(embed.GatherAdd(input_name, key, rows=rows))

    def rope_tables(self, cos: Array, sin: Array, style: str = "halves") -> Self:
        """RoPE tables `[positions, half]` for the layers that follow; the value passes through."""
        return self.stage(embed.RopeTables(cos, sin, style))

    def rope(self, positions: int, head_dim: int, theta: float = 10_000.0, style: str = "halves") -> Self:
        """RoPE for heads of `head_dim` numbers at up to `positions` positions, for the layers that follow.

        `theta` is the base of the frequencies. `style` is how a head is paired: "halves" (i, i + half), as in Hugging
        Face's files, or "pairs" (2i, 2i + 1).
        """
        return self.rope_tables(*rope_tables(positions, head_dim, theta), style)

    def zero_beta(self, len: int) -> Self:
        """A vector of zeros as the beta of norms that have none; the value passes through."""
        return self.zero_beta_named("zero_beta", len)

    def zero_beta_named(self, name: str, len: int) -> Self:
        """`zero_beta` under another name."""
        return self.stage(parts.ZeroBeta(name, len))

    def attn_mask(self, batch: Size | str, seq: Size | str, input_name: str) -> Self:
        """A padding mask `[batch, seq]` from a named input, 1 for tokens; attention after it does not see padding."""
        return self.stage(parts.AttnMask(batch, seq, input_name))

    def attn_mask_ones(self, batch: Size | str, seq: Size | str) -> Self:
        """A padding mask `[batch, seq]` of ones, so no token is padding; the value passes through."""
        return self.stage(parts.AttnMask(batch, seq))

    def decode_rope_params(self, cos: Array, sin: Array, style: str = "halves") -> Self:
        """Add fixed RoPE rows for a decode step, `[1, half]` or one row per new token."""
        return self.stage(parts.DecodeRopeParams(cos, sin, style))

    def bind_decode_inputs(self, num_layers: int, use_custom_mask: bool = False, *, rope: bool = True) -> Self:
        """Bind the inputs of a decode step whose caller keeps the cache."""
        return self.stage(parts.BindDecodeInputs(num_layers, use_custom_mask, rope=rope))

    # -- parts of layers --
    def rms_norm(self, key: str, eps: float) -> Self:
        """RMSNorm with the weight `key`."""
        return self.stage(norm.RmsNorm(key, eps))

    def final_norm(self, eps: float, key: str = FINAL_NORM) -> Self:
        """The RMSNorm before the head, with the weight where Hugging Face keeps it."""
        return self.rms_norm(key, eps)

    def layer_norm(self, prefix: str, eps: float) -> Self:
        """LayerNorm with `prefix.weight` and `prefix.bias`."""
        return self.stage(norm.LayerNorm(f"{prefix}.weight", f"{prefix}.bias", eps))

    def gemma_rms_norm(self, key: str, eps: float) -> Self:
        """RMSNorm scaled by 1 + weight, as in Gemma."""
        return self.stage(norm.GemmaRmsNorm(key, eps))

    def attention(
        self, prefix: str, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None, *,
        mask: str = MaskKind.CAUSAL, rope: str | None = MAIN_ROPE, bias: bool = False, qk_norm: bool = False,
        eps: float = 1e-6, score_scale: float | None = None,
    ) -> Self:  # fmt: skip
        """Self-attention with its output projection, with weights `prefix.q_proj.weight`, `k`, `v` and `o`.

        `num_kv_heads` below `num_heads` is grouped-query attention. `rope` names the RoPE tables that `rope(...)` adds
        before; None is for no RoPE. With `mask="none"`, tokens attend to all tokens, padding included, unless
        `attn_mask` comes before. `qk_norm` norms queries and keys per head, with `eps`. Scores are multiplied by
        `score_scale`, by default 1/√head_dim.
        """
        stage = attention.Attention(
            prefix, num_heads, num_kv_heads, head_dim, mask=mask, rope=rope, bias=bias, qk_norm=qk_norm, eps=eps,
            score_scale=score_scale,
        )  # fmt: skip
        return self.stage(stage)

    def dropout(self, rate: float) -> Self:
        """Set numbers to 0 with probability `rate` in training; nothing otherwise. See `build(training=True)`."""
        return self.stage(parts.Dropout(rate))

    def self_attn_prefill(
        self, q_key: str, k_key: str, v_key: str, num_heads: int, num_kv_heads: int, head_dim: int,
        mask: str = MaskKind.CAUSAL, score_scale: float | None = None, attn_logit_softcap: float | None = None,
        *, rope: str | None = MAIN_ROPE, layer_idx: int | None = None,
    ) -> Self:  # fmt: skip
        """Causal grouped-query attention with separate q, k and v weights, without the output projection.

        `attention` has one. `rope` names the RoPE tables; None is for no RoPE.
        """
        heads = num_heads, num_kv_heads, head_dim
        stage = attention.SelfAttnPrefill(
            q_key, k_key, v_key, *heads, mask, score_scale, attn_logit_softcap, rope=rope, layer_idx=layer_idx
        )
        return self.stage(stage)

    def vit_self_attn(
        self, qkv_weight: str, qkv_bias: str, out_weight: str, out_bias: str, num_heads: int, head_dim: int
    ) -> Self:
        """Self-attention of a vision transformer, including the output projection."""
        return self.stage(vision.VitSelfAttn(qkv_weight, qkv_bias, out_weight, out_bias, num_heads, head_dim))

    def linear(
        self, key: str, transpose: bool = True, bias_key: str | None = None, *, out: int | None = None
    ) -> Self:  # fmt: skip
        """Multiply by a weight and add a bias. `out` is the output size, which `init` needs to create the weight."""
        return self.stage(parts.Linear(key, transpose, bias_key, out=out))

    def swiglu(
        self, gate_key: str, up_key: str, down_key: str, *, intermediate_size: int | None = None, bias: bool = False,
        activation: str = "silu",
    ) -> Self:  # fmt: skip
        """SwiGLU: down(silu(gate(x)) · up(x)). `init` needs `intermediate_size`, the output size of gate and up.

        With `bias`, each weight has one, under the key that ends in `bias`.
        """
        return self.stage(ffn.SwiGlu(gate_key, up_key, down_key, intermediate_size, bias, activation))

    def swiglu_hf_mlp(
        self, prefix: str, *, intermediate_size: int | None = None, bias: bool = False, activation: str = "silu"
    ) -> Self:
        """`swiglu` by Hugging Face's names, such as `prefix.gate_proj.weight`."""
        stage = ffn.SwiGlu.hf_mlp(prefix, intermediate_size=intermediate_size, bias=bias, activation=activation)
        return self.stage(stage)

    def geglu(
        self, gate_key: str, up_key: str, down_key: str, *, intermediate_size: int | None = None, bias: bool = False
    ) -> Self:
        """GeGLU: down(gelu(gate(x)) · up(x)), with the tanh approximation of GELU."""
        return self.stage(ffn.GeGlu(gate_key, up_key, down_key, intermediate_size, bias))

    def geglu_hf_mlp(self, prefix: str, *, intermediate_size: int | None = None) -> Self:
        """`geglu` by Hugging Face's names, such as `prefix.mlp.gate_proj.weight`."""
        return self.stage(ffn.GeGlu.hf_mlp(prefix, intermediate_size=intermediate_size))

    def vision_swiglu_ffn(self, prefix: str, eps: float) -> Self:
        """NomicVision's gated feed-forward, with a LayerNorm before the last projection."""
        return self.stage(vision.VisionSwiGluFfn(prefix, eps))

    def gelu_ffn(
        self, intermediate_w: str, intermediate_b: str, output_w: str, output_b: str, *,
        intermediate_size: int | None = None, activation: str = "gelu",
    ) -> Self:  # fmt: skip
        """output(gelu(intermediate(x))), with biases, or with another activation. `init` needs `intermediate_size`."""
        keys = intermediate_w, intermediate_b, output_w, output_b
        return self.stage(ffn.GeluFfn(*keys, intermediate_size=intermediate_size, activation=activation))

    def layer_scale(self, key: str) -> Self:
        """Multiply each channel by a weight, as DINOv2 does."""
        return self.stage(parts.LayerScale(key))

    def gdn_scan(self, state_size: int, carry_state: bool = False, state_key: str | None = None) -> Self:
        """The gated-delta-net scan over what an earlier stage published: `[batch, seq, heads, state_size]`."""
        return self.stage(parts.GdnScan(state_size, carry_state, state_key))

    # -- ends --
    def cls_token_pool(self) -> Self:
        """Keep the class token, which is the first: `[batch, seq, hidden]` to `[batch, hidden]`."""
        return self.stage(parts.ClsTokenPool())

    def gather_last_token(self, batch: int | None = None) -> Self:
        """Select the tokens that the input `last_token_idx` picks."""
        return self.stage(embed.GatherLastToken(batch))

    def gather_last_token_at(self, index: int) -> Self:
        """Select the token at a fixed index of every sequence; -1 is the last."""
        return self.stage(embed.GatherLastToken(index=index))

    def logit_softcap(self, cap: float) -> Self:
        """cap · tanh(x / cap), which bounds logits by the cap."""
        return self.stage(parts.LogitSoftcap(cap))


def _fused_attention(qkv: str, out: str, heads: int, head_dim: int) -> FlowStage:
    return vision.VitSelfAttn(f"{qkv}.weight", f"{qkv}.bias", f"{out}.weight", f"{out}.bias", heads, head_dim)


@dataclass(frozen=True)
class LayerStack(StageList):
    """The stages of one layer during assembly."""

    stages: tuple[FlowStage, ...] = ()
    places: tuple[Origin, ...] = field(default=(), compare=False, repr=False)

    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        """The same layer with other stages."""
        stages = tuple(stages)
        return replace(self, stages=stages, places=self.places_of(stages))

    def as_stage(self) -> FlowStage:
        """The layer as one stage."""
        return structure.Sequence(self.stages, places=self.places)
