"""What flows and layers are assembled with: one method a stage, each of which gives a longer list of stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from rlx.errors import GraphError
from rlx.flow.context import Array
from rlx.flow.stages import decoder, embed, encoder, ffn, norm, parts, streams, structure
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.custom import Author, Custom, plugin_stage
from rlx.ops.attention import MaskKind

# Names under which Hugging Face keeps the ends of a decoder.
TOKENS, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"


class StageList(ABC):
    """Stages in order. Every method returns a longer list; nothing is changed in place."""

    stages: tuple[FlowStage, ...]

    @abstractmethod
    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        """The same with other stages."""

    # -- any stage --
    def stage(self, stage: FlowStage) -> Self:
        """Any stage."""
        if not isinstance(stage, FlowStage):
            hint = "make one of the class" if isinstance(stage, type) else "derive from FlowStage, or use custom(f)"
            raise GraphError(f"stage: {stage!r} is not a stage", hint=hint)
        return self.with_stages((*self.stages, stage))

    def sequence(self, *stages: FlowStage) -> Self:
        return self.stage(structure.Sequence(stages))

    def custom(self, f: Author) -> Self:
        """A part of the graph by a function `f(emit, value) -> value`."""
        return self.stage(Custom(f))

    def custom_named(self, name: str, f: Author) -> Self:
        """The same, under a name in paths, by which its result is found later."""
        return self.stage(Custom(f, name))

    def plugin(self, plugin: str | FlowStage, **settings: Any) -> Self:
        """A stage of the author's own: one that is made already, or a registered name and the settings of one."""
        return self.stage(plugin_stage(plugin, settings))

    def plugin_named(self, name: str, plugin: str | FlowStage, **settings: Any) -> Self:
        """The same; its result is known by a name."""
        return self.named_layer(name, plugin_stage(plugin, settings))

    def patch(self, f: Callable[[Self], Self]) -> Self:
        """What a function makes of it."""
        return f(self)

    def when(self, condition: bool, f: Callable[[Self], Self]) -> Self:
        """What a function makes of it, if the condition holds."""
        return f(self) if condition else self

    # -- layers --
    def repeat_layers(self, count: int, stage_for_index: Callable[[int], FlowStage], name: str = "layers") -> Self:
        """Stages 0 .. count-1, under paths such as `layers.3`."""
        return self.stage(structure.Repeat(count, stage_for_index, name))

    def named_layer(self, name: str, stage: FlowStage) -> Self:
        """A stage under a name, by which its result is found later."""
        return self.stage(structure.Named(name, stage))

    def layer(self, name: str, build: Callable[[LayerStack], LayerStack]) -> Self:
        """A layer of several stages under one name: `build` gets an empty stack and returns the one it assembled."""
        stack = build(LayerStack())
        if not isinstance(stack, LayerStack):
            hint = "return the stack, every method of which gives a longer one"
            raise GraphError(f"layer {name!r}: its function gave a {type(stack).__name__}", hint=hint)
        return self.named_layer(name, structure.Sequence(stack.stages))

    def residual_save(self) -> Self:
        return self.stage(structure.ResidualSave())

    def residual_add(self) -> Self:
        return self.stage(structure.ResidualAdd())

    def llama_prefill_layer(
        self, i: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, mask: str = MaskKind.CAUSAL
    ) -> Self:
        """Layer i of a Llama under the names of Hugging Face."""
        layer = decoder.LlamaDecoder(f"model.layers.{i}", num_heads, num_kv_heads, head_dim, eps, i, mask)
        return self.named_layer(f"layers.{i}", layer)

    def bert_encoder_layer(self, prefix: str, hidden: int, heads: int, eps: float) -> Self:
        return self.stage(encoder.BertEncoderLayer(prefix, hidden, heads, hidden // heads, eps))

    def repeat_bert_layers(self, count: int, prefix: str, hidden: int, heads: int, eps: float) -> Self:
        """BERT layers whose weights are under `prefix.0` and so on."""

        def layer(i: int) -> FlowStage:
            return encoder.BertEncoderLayer(f"{prefix}.{i}", hidden, heads, hidden // heads, eps)

        return self.repeat_layers(count, layer)

    # -- streams --
    def store_stream(self, name: str) -> Self:
        return self.stage(streams.StoreStream(name))

    def load_stream(self, name: str) -> Self:
        return self.stage(streams.LoadStream(name))

    def dual_stream(self, name: str, a: str, b: str, f: Callable[..., Any]) -> Self:
        """Two streams through `f(emit, a, b) -> (a, b)`."""
        return self.stage(streams.DualStream(name, a, b, f))

    def bind_inputs_to_streams(self, pairs: Iterable[tuple[str, str]]) -> Self:
        """Inputs as streams, from pairs of both names."""
        return self.stage(streams.BindInputs(tuple((name, stream) for name, stream in pairs)))

    # -- tables --
    def embed(self, key: str, *, shape: tuple[int, int] | None = None) -> Self:
        return self.stage(embed.Embed(key, shape=shape))

    def token_embed(self, key: str = TOKENS, *, shape: tuple[int, int] | None = None) -> Self:
        return self.embed(key, shape=shape)

    def embed_scale(self, hidden: int) -> Self:
        return self.stage(parts.EmbedScale(hidden))

    def gather_from_input(self, input_name: str, key: str) -> Self:
        return self.stage(parts.GatherFromInput(input_name, key))

    def gather_add(self, input_name: str, key: str, *, rows: int | None = None) -> Self:
        return self.stage(embed.GatherAdd(input_name, key, rows=rows))

    def rope_tables(self, cos: Array, sin: Array, style: str = "halves") -> Self:
        return self.stage(embed.RopeTables(cos, sin, style))

    def zero_beta(self, len: int) -> Self:
        return self.zero_beta_named("zero_beta", len)

    def zero_beta_named(self, name: str, len: int) -> Self:
        return self.stage(parts.ZeroBeta(name, len))

    def attn_mask(self, batch: int, seq: int, input_name: str) -> Self:
        return self.stage(parts.AttnMask(batch, seq, input_name))

    def attn_mask_ones(self, batch: int, seq: int) -> Self:
        return self.stage(parts.AttnMask(batch, seq))

    def bind_decode_inputs(self, num_layers: int, use_custom_mask: bool = False) -> Self:
        return self.stage(parts.BindDecodeInputs(num_layers, use_custom_mask))

    # -- parts of layers --
    def rms_norm(self, key: str, eps: float) -> Self:
        return self.stage(norm.RmsNorm(key, eps))

    def final_norm(self, eps: float, key: str = FINAL_NORM) -> Self:
        return self.rms_norm(key, eps)

    def layer_norm(self, prefix: str, eps: float) -> Self:
        return self.stage(norm.LayerNorm(f"{prefix}.weight", f"{prefix}.bias", eps))

    def linear(self, key: str, transpose: bool = True, bias_key: str | None = None) -> Self:
        return self.stage(parts.Linear(key, transpose, bias_key))

    def swiglu(self, gate_key: str, up_key: str, down_key: str) -> Self:
        return self.stage(ffn.SwiGlu(gate_key, up_key, down_key))

    def swiglu_hf_mlp(self, prefix: str) -> Self:
        return self.stage(ffn.SwiGlu.hf_mlp(prefix))

    def gelu_ffn(self, intermediate_w: str, intermediate_b: str, output_w: str, output_b: str) -> Self:
        return self.stage(ffn.GeluFfn(intermediate_w, intermediate_b, output_w, output_b))

    def layer_scale(self, key: str) -> Self:
        return self.stage(parts.LayerScale(key))

    def gdn_scan(self, state_size: int, carry_state: bool = False, state_key: str | None = None) -> Self:
        return self.stage(parts.GdnScan(state_size, carry_state, state_key))

    # -- ends --
    def cls_token_pool(self) -> Self:
        return self.stage(parts.ClsTokenPool())

    def gather_last_token(self) -> Self:
        return self.stage(embed.GatherLastToken())

    def logit_softcap(self, cap: float) -> Self:
        return self.stage(parts.LogitSoftcap(cap))


@dataclass(frozen=True)
class LayerStack(StageList):
    """The stages of one layer while it is assembled."""

    stages: tuple[FlowStage, ...] = ()

    def with_stages(self, stages: Iterable[FlowStage]) -> Self:
        return replace(self, stages=tuple(stages))
