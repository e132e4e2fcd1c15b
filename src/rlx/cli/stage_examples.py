"""An example of every stage and layer, for the page of stages: its settings, and what has to come before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from rlx.fast_dataclass import dataclass
from rlx.flow import Emit, ModelFlow, SideOutputs, stages
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue, GdnInputSlots
from rlx.ops.attention import MaskKind
from rlx.runtime.kv_spec import KvCacheSpec

# Sizes differ from each other, so that a size in a shape tells its name.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS, EXPERTS, SHARED = 24, 6, 2, 8, 40, 100, 66, 7, 44
KEY_HEADS, STATE, VALUE_HEADS, VALUE, KERNEL = 5, 12, 10, 14, 3
NAMES: Mapping[int, str] = {
    HIDDEN: "hidden", HEADS * HEAD_DIM: "heads·head_dim", KV_HEADS * HEAD_DIM: "kv_heads·head_dim", INNER: "inner",
    VOCAB: "vocab", POSITIONS: "positions", EXPERTS: "experts", SHARED: "shared", HEAD_DIM: "head_dim",
    HEAD_DIM // 2: "half", HEADS: "heads", KV_HEADS: "kv_heads", 2 * HEADS * HEAD_DIM: "heads·2·head_dim",
    3 * HEADS * HEAD_DIM: "3·heads·head_dim", POSITIONS + 1: "limit + positions", KERNEL: "kernel",
    2 * KEY_HEADS * STATE + VALUE_HEADS * VALUE: "2·key_heads·state_size + value_heads·value_size", STATE: "state_size",
    VALUE_HEADS * VALUE: "value_heads·value_size", VALUE: "value_size", VALUE_HEADS: "value_heads",
}  # fmt: skip
SQUARE = {**NAMES, HEADS * HEAD_DIM: "hidden", 3 * HEADS * HEAD_DIM: "3·hidden"}  # where hidden is heads·head_dim
Sizes = tuple[int | str, ...]
HIDDEN_STATES: Sizes = ("batch", "seq", HIDDEN)
HEAD_SIZES = HEADS, KV_HEADS, HEAD_DIM
LAYER = "model.layers.0"


@dataclass(frozen=True)
class Example:
    """A stage, the value that it takes (None for none), and what a flow needs before it."""

    stage: FlowStage
    value: Sizes | None = HIDDEN_STATES
    dtype: str = "f32"
    before: tuple[FlowStage, ...] = ()
    inputs: Mapping[str, tuple[Sizes, str]] = field(default_factory=dict)  # that the flow declares
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of weights whose shape no stage knows
    cache: KvCacheSpec | None = None
    names: Mapping[int, str] = field(default_factory=lambda: NAMES)  # of sizes


def _table(rows: int = POSITIONS) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.zeros((rows, HEAD_DIM // 2), np.float32)


def _publish(emit: Emit, value: FlowValue) -> None:
    """Publish the slots of a gated delta net, all of one value."""
    heads, gates = value.id, value.id.mean(axis=-1)
    emit.state.gdn = GdnInputSlots(heads, heads, heads, gates, gates)


def _ffn_shapes(gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    return {gate: (INNER, HIDDEN), up: (INNER, HIDDEN), down: (HIDDEN, INNER)}


def _mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    return _ffn_shapes(*(f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")))


ROPE = stages.RopeTables(_table(), _table())
ENCODER = ("encoder.layer.0", HIDDEN, HEADS, HEAD_DIM, 1e-12)
NOMIC = ("encoder.layers.0", *ENCODER[1:])
PAST: dict[str, tuple[Sizes, str]] = {f"past_{x}_0": (("batch", "past", KV_HEADS * HEAD_DIM), "f32") for x in "kv"}
ROWS: dict[str, tuple[Sizes, str]] = {name: (("seq", HEAD_DIM // 2), "f32") for name in ("rope_cos", "rope_sin")}
STEP = (ROPE, stages.BindDecodeInputs(1))
_EXPERTS = {
    f"{LAYER}.mlp.experts.{name}_proj.weight": (EXPERTS, *sizes)
    for name, sizes in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items()
}
_MIXTURE = stages.MoeFfn(f"{LAYER}.mlp", EXPERTS, 2, intermediate_size=INNER)

EXAMPLES: dict[str, Example] = {
    "Embed": Example(
        stages.Embed("model.embed_tokens.weight", shape=(VOCAB, HIDDEN)), ("batch", "seq"), "i32",
    ),
    "GatherAdd": Example(stages.GatherAdd("position_ids", "position_embeddings.weight", rows=POSITIONS)),
    "RopeTables": Example(ROPE),
    "GatherLastToken": Example(stages.GatherLastToken()),
    "LmHead": Example(stages.LmHead(VOCAB, HIDDEN)),
    "Repeat": Example(stages.Repeat(2, lambda i: stages.RmsNorm(f"{i}.weight", 1e-5))),
    "Sequence": Example(stages.Sequence([stages.RmsNorm("norm.weight", 1e-5), stages.LogitSoftcap(30.0)])),
    "Named": Example(stages.Named("normed", stages.RmsNorm("norm.weight", 1e-5))),
    "ResidualSave": Example(stages.ResidualSave()),
    "ResidualAdd": Example(stages.ResidualAdd(), before=(stages.ResidualSave(),)),
    "RmsNorm": Example(stages.RmsNorm("model.norm.weight", 1e-5)),
    "GemmaRmsNorm": Example(stages.GemmaRmsNorm("model.norm.weight", 1e-6)),
    "LayerNorm": Example(stages.LayerNorm("norm.weight", "norm.bias", 1e-12)),
    "SwiGlu": Example(stages.SwiGlu.hf_mlp(f"{LAYER}.mlp", intermediate_size=INNER)),
    "GeGlu": Example(stages.GeGlu.hf_mlp(LAYER, intermediate_size=INNER)),
    "GeluFfn": Example(stages.GeluFfn.hf_bert(ENCODER[0], intermediate_size=INNER)),
    "Attention": Example(stages.Attention(f"{LAYER}.self_attn", *HEAD_SIZES), before=(ROPE,)),
    "SelfAttnPrefill": Example(
        stages.SelfAttnPrefill(
            f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight",
            *HEAD_SIZES,
        ),
        before=(ROPE,),
    ),
    "LlamaKvTap": Example(
        stages.LlamaKvTap(LAYER, HEAD_DIM, 1e-5, SideOutputs()), before=(ROPE,),
        shapes={f"{LAYER}.self_attn.{x}_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN) for x in "kv"},
    ),
    "GemmaKvTap": Example(
        stages.GemmaKvTap(LAYER, HEAD_DIM, SideOutputs()), before=(ROPE,),
        shapes={f"{LAYER}.self_attn.{x}_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN) for x in "kv"},
    ),
    "DecoderLayer": Example(
        stages.DecoderLayer(LAYER, *HEAD_SIZES, 1e-5, layer_idx=0, intermediate_size=INNER), before=(ROPE,),
        cache=KvCacheSpec(1, KV_HEADS, HEAD_DIM),
    ),
    "LlamaDecoder": Example(
        stages.LlamaDecoder(LAYER, *HEAD_SIZES, 1e-5, intermediate_size=INNER), before=(ROPE,),
    ),
    "LlamaDecodeLayer": Example(
        stages.LlamaDecodeLayer(LAYER, *HEAD_SIZES, 1e-5, layer_idx=0, intermediate_size=INNER, kv_out=SideOutputs()),
        before=STEP, inputs=PAST,
    ),
    "Qwen3Decoder": Example(
        stages.Qwen3Decoder(LAYER, *HEAD_SIZES, 1e-6, intermediate_size=INNER), before=(ROPE,),
    ),
    "Qwen3DecodeLayer": Example(
        stages.Qwen3DecodeLayer(LAYER, *HEAD_SIZES, 1e-6, layer_idx=0, intermediate_size=INNER, kv_out=SideOutputs()),
        before=STEP, inputs=PAST,
    ),
    "GemmaDecoder": Example(
        stages.GemmaDecoder(LAYER, *HEAD_SIZES, 1e-6, style="gemma3", intermediate_size=INNER), before=(ROPE,),
    ),
    "GemmaDecodeLayer": Example(
        stages.GemmaDecodeLayer(
            LAYER, *HEAD_SIZES, 1e-6, layer_idx=0, style="gemma2", mask=MaskKind.CAUSAL, intermediate_size=INNER,
            kv_out=SideOutputs(),
        ),
        before=STEP, inputs=PAST,
    ),
    "BertEncoderLayer": Example(stages.BertEncoderLayer(*ENCODER, intermediate_size=INNER)),
    "NomicEncoderLayer": Example(stages.NomicEncoderLayer(*NOMIC, intermediate_size=INNER), before=(ROPE,)),
    "VitSelfAttn": Example(
        stages.VitSelfAttn(
            "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "blocks.0.attn.proj.weight",
            "blocks.0.attn.proj.bias", HEADS, HEAD_DIM,
        ),
    ),
    "VisionSwiGluFfn": Example(
        stages.VisionSwiGluFfn("layers.0", 1e-6),
        shapes=_ffn_shapes("layers.0.mlp.fc12.weight", "layers.0.mlp.fc11.weight", "layers.0.mlp.fc2.weight"),
    ),
    "MoeFfn": Example(_MIXTURE, shapes=_EXPERTS),
    "SharedMoeFfn": Example(stages.SharedMoeFfn(_MIXTURE, SHARED), shapes=_EXPERTS),
    "GatedAttentionLayer": Example(
        stages.GatedAttentionLayer(LAYER, *HEAD_SIZES, 1e-6, intermediate_size=INNER), before=(ROPE,),
    ),
    "DeltaNetLayer": Example(
        stages.DeltaNetLayer(
            LAYER, 1e-6, layer_idx=0, key_heads=KEY_HEADS, value_heads=VALUE_HEADS, state_size=STATE,
            value_size=VALUE, kernel=KERNEL, intermediate_size=INNER,
        ),
    ),
    "Linear": Example(stages.Linear("proj.weight", bias_key="proj.bias"), shapes={"proj.weight": (INNER, HIDDEN)}),
    "EmbedScale": Example(stages.EmbedScale(HIDDEN)),
    "Dropout": Example(stages.Dropout(0.1)),
    "LayerScale": Example(stages.LayerScale("blocks.0.ls1.gamma")),
    "LogitSoftcap": Example(stages.LogitSoftcap(30.0), ("batch", "seq", VOCAB)),
    "ClsTokenPool": Example(stages.ClsTokenPool()),
    "GatherFromInput": Example(
        stages.GatherFromInput("input_ids", "word_embeddings.weight"),
        shapes={"word_embeddings.weight": (VOCAB, HIDDEN)},
    ),
    "GdnScan": Example(
        stages.GdnScan(HEAD_DIM), ("batch", "seq", HEADS, HEAD_DIM), before=(stages.Custom(_publish),),
    ),
    "ZeroBeta": Example(stages.ZeroBeta("zero_beta", HIDDEN), None),
    "AttnMask": Example(stages.AttnMask("batch", "seq", "attention_mask"), None),
    "DecodeRopeParams": Example(stages.DecodeRopeParams(_table(1), _table(1)), None),
    "BindDecodeInputs": Example(
        stages.BindDecodeInputs(1, use_custom_mask=True), None,
        inputs=ROWS | PAST | {"mask": (("batch", "keys"), "f32")},
    ),
    "RopeSwitch": Example(stages.RopeSwitch(_table(POSITIONS + 1), _table(POSITIONS + 1), 1)),
    "RopeGrowth": Example(stages.RopeGrowth(_table(), POSITIONS)),
    "StoreStream": Example(stages.StoreStream("img")),
    "LoadStream": Example(stages.LoadStream("img"), before=(stages.StoreStream("img"),)),
    "BindInputs": Example(stages.BindInputs((("image", "img"),)), inputs={"image": (HIDDEN_STATES, "f32")}),
    "DualStream": Example(
        stages.DualStream("swap", "img", "txt", lambda emit, img, txt: (txt, img)),
        before=(stages.StoreStream("img"), stages.StoreStream("txt")),
    ),
    "Custom": Example(stages.Custom(lambda emit, x: x * emit.load_param("scale")), shapes={"scale": (HIDDEN,)}),
}  # fmt: skip


def _appended(flow: ModelFlow) -> FlowStage:
    return stages.Sequence(flow.stages)


# Methods of a flow that append layers made of several stages.
LAYERS: dict[str, Example] = {
    "llama_prefill_layer_composed": Example(
        _appended(ModelFlow("").llama_prefill_layer_composed(0, *HEAD_SIZES, 1e-5)), before=(ROPE,),
        shapes={f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM), **_mlp(f"{LAYER}.mlp")},
    ),
    "repeat_bert_layers": Example(
        _appended(ModelFlow("").repeat_bert_layers(1, "encoder.layer", HEADS * HEAD_DIM, HEADS, 1e-12)),
        ("batch", "seq", HEADS * HEAD_DIM),
        shapes={
            "encoder.layer.0.intermediate.dense.weight": (INNER, HEADS * HEAD_DIM),
            "encoder.layer.0.output.dense.weight": (HEADS * HEAD_DIM, INNER),
        },
        names=SQUARE,
    ),
    "repeat_nomic_layers": Example(
        _appended(ModelFlow("").repeat_nomic_layers(1, "encoder.layers", HEADS * HEAD_DIM, HEADS, 1e-12)),
        ("batch", "seq", HEADS * HEAD_DIM), before=(ROPE,),
        shapes={
            **{f"encoder.layers.0.mlp.{name}.weight": (INNER, HEADS * HEAD_DIM) for name in ("fc11", "fc12")},
            "encoder.layers.0.mlp.fc2.weight": (HEADS * HEAD_DIM, INNER),
        },
        names=SQUARE,
    ),
    "repeat_dinov2_layers": Example(
        _appended(ModelFlow("").repeat_dinov2_layers(1, "blocks", HEADS, HEAD_DIM, 1e-6)),
        shapes={"blocks.0.mlp.fc1.weight": (INNER, HIDDEN)},
    ),
    "repeat_vision_layers": Example(
        _appended(ModelFlow("").repeat_vision_layers(1, "layers", HEADS, HEAD_DIM, 1e-6)),
        shapes=_ffn_shapes(*(f"layers.0.mlp.{name}.weight" for name in ("fc12", "fc11", "fc2"))),
    ),
}  # fmt: skip
