"""Every setting of every stage does something: with another value the graph is another one, or the stage refuses it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlx.errors import RlxError
from rlx.flow import GdnInputSlots, ModelFlow, SideOutputs
from rlx.flow import stages as st
from rlx.flow.init import WantedWeights
from rlx.flow.stages import FlowStage
from rlx.ops.attention import MaskKind

H, HEADS, KV, HEAD, FFN = 8, 4, 2, 4, 12
ANGLES = np.outer(np.arange(16), [1.0, 0.1])
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
FREQUENCIES = np.outer(np.linspace(1.0, 0.5, 5), [1.0, 0.1])
TABLES = (st.RopeTables(SIN, COS, cos_key="other.cos", sin_key="other.sin"), st.RopeTables(COS, SIN))
SIDE = SideOutputs()


@dataclass(frozen=True)
class Shifted(FlowStage):
    """x + 1."""

    def emit(self, ctx: Any, value: Any) -> Any:
        return ctx.wrap(ctx.need(value, "Shifted") + 1.0)


@dataclass(frozen=True)
class Twice(Shifted):
    """x + 1 + 1."""

    def emit(self, ctx: Any, value: Any) -> Any:
        return super().emit(ctx, super().emit(ctx, value))


@dataclass
class Case:
    """A stage that builds, other values of its settings, and what flows around it."""

    stage: FlowStage
    other: dict[str, Any]
    before: tuple[FlowStage, ...] = ()
    after: tuple[FlowStage, ...] = ()
    shape: tuple[Any, ...] = (2, 3, H)
    dtype: str = "f32"
    inputs: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    cache: bool = False


def layer(**more: Any) -> dict[str, Any]:
    """Other values of what all decoder layers have."""
    return {
        "layer_prefix": "m", "num_heads": 2, "num_kv_heads": 4, "head_dim": 2, "eps": 0.1, "mask": MaskKind.sliding(2),
        "score_scale": 0.3, "attn_logit_softcap": 2.0, "attention_bias": True, "qk_norm": True, "output_bias": True,
        "mlp_bias": True, "intermediate_size": 6, "activation": "gelu", "post_norms": True, "unit_offset": True,
        "rope": "other", "ffn": Shifted(), "kv_sink": SIDE, **more,
    }  # fmt: skip


SIZES = ("l", HEADS, KV, HEAD, 1e-5)
PAST = tuple((f"past_{n}_{i}", (2, 5, KV * HEAD), "f32") for i in range(2) for n in "kv")
STEP: dict[str, Any] = {
    "before": (*TABLES, st.BindDecodeInputs(2, True)), "inputs": (*PAST, ("mask", (2, 8), "f32")),
}  # fmt: skip
FIVE = {"layer_idx": 1, "use_custom_mask": True, "kv_out": SIDE}
ENCODER = ("l", H, 2, 4, 1e-5)
CACHED: dict[str, Any] = {"cache": True, "shape": ("batch", "seq", H), "before": TABLES}
MASKED = (("attention_mask", (2, 3), "f32"), ("other", (2, 3), "f32"))
QKV = {"qkv": (24, H), "other": (24, H), "o": (H, H), "o2": (H, H), "b": (24,), "b2": (24,), "c": (H,), "c2": (H,)}


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


DECODER = layer(layer_idx=1)
GEMMA = without(layer(style="gemma2", unit_offset=False), "qk_norm", "post_norms")
CASES: dict[str, Case] = {
    "Embed": Case(
        st.Embed("t", shape=(9, H)), {"weight_key": "u", "axis": 1, "shape": (7, H)}, shape=(2, 3), dtype="i32",
    ),
    "RopeTables": Case(
        st.RopeTables(COS, SIN),
        {"cos": COS[:9], "sin": SIN * 2, "style": "pairs", "cos_key": "a.cos", "sin_key": "a.sin"},
        after=(st.SelfAttnPrefill("q", "k", "v", HEADS, KV, HEAD),),
    ),
    "RopeSwitch": Case(
        st.RopeSwitch(COS, SIN, 4), {"cos": COS[:9], "sin": SIN * 2, "limit": 5, "style": "pairs", "name": "a"},
        after=(st.SelfAttnPrefill("q", "k", "v", HEADS, KV, HEAD),),
    ),
    "RopeGrowth": Case(
        st.RopeGrowth(FREQUENCIES, 2), {"frequencies": FREQUENCIES[:3], "limit": 3, "scale": 2.0, "style": "pairs",
                                        "name": "a"}, after=(st.SelfAttnPrefill("q", "k", "v", HEADS, KV, HEAD),),
    ),
    "ZeroBeta": Case(st.ZeroBeta("z", 4), {"name": "y", "len": 5}),
    "BindDecodeInputs": Case(
        st.BindDecodeInputs(1), {"num_layers": 2, "use_custom_mask": True, "rope": False}, inputs=(
            *STEP["inputs"], ("rope_cos", (3, 2), "f32"), ("rope_sin", (3, 2), "f32")
        ), after=(st.Custom(lambda e, v: _bound(e, v)),),
    ),
    "AttnMask": Case(st.AttnMask(2, 3), {"batch": 3, "seq": 4, "input_name": "m"}),
    "LlamaDecodeLayer": Case(st.LlamaDecodeLayer(*SIZES, layer_idx=0), layer(**FIVE), **STEP),
    "LlamaDecoder": Case(st.LlamaDecoder(*SIZES, layer_idx=0), DECODER, **CACHED),
    "DecoderLayer": Case(st.DecoderLayer(*SIZES, layer_idx=0), DECODER, **CACHED),
    "Qwen3Decoder": Case(st.Qwen3Decoder(*SIZES, layer_idx=0), layer(layer_idx=1, qk_norm=False), **CACHED),
    "Qwen3DecodeLayer": Case(st.Qwen3DecodeLayer(*SIZES, layer_idx=0), layer(**FIVE, qk_norm=False), **STEP),
    "GemmaDecoder": Case(st.GemmaDecoder(*SIZES, layer_idx=0), GEMMA | {"layer_idx": 1}, **CACHED),
    "GemmaDecodeLayer": Case(st.GemmaDecodeLayer(*SIZES, layer_idx=0), GEMMA | FIVE, **STEP),
    "GatedAttentionLayer": Case(
        st.GatedAttentionLayer(*SIZES, layer_idx=0), layer(layer_idx=1, qk_norm=False, unit_offset=False), **CACHED,
    ),
    "DeltaNetLayer": Case(
        st.DeltaNetLayer("l", 1e-5, layer_idx=0, key_heads=2, value_heads=4, state_size=4),
        {"layer_prefix": "m", "eps": 0.1, "layer_idx": 1, "key_heads": 4, "value_heads": 2, "state_size": 8,
         "value_size": 8, "kernel": 3, "tiled": True, "rates": True, "intermediate_size": 6, "activation": "gelu",
         "mlp_bias": True, "unit_offset": False, "ffn": Shifted()}, **CACHED,
    ),
    "LlamaKvTap": Case(
        st.LlamaKvTap("l", HEAD, 1e-5, SIDE), {"layer_prefix": "m", "head_dim": 2, "eps": 0.1, "outputs": SideOutputs(),
                                               "rope": "other"}, before=TABLES,
        shapes=(("l.self_attn.k_proj.weight", (H, H)), ("m.self_attn.k_proj.weight", (H, H))),
    ),
    "GemmaKvTap": Case(
        st.GemmaKvTap("l", HEAD, SIDE), {"layer_prefix": "m", "head_dim": 2, "eps": 0.1, "outputs": SideOutputs(),
                                         "rope": "other", "unit_offset": False}, before=TABLES,
        shapes=(("l.self_attn.k_proj.weight", (H, H)), ("m.self_attn.k_proj.weight", (H, H)),
                ("l.self_attn.k_norm.weight", (HEAD,))),
    ),
    "Repeat": Case(
        st.Repeat(2, lambda i: Shifted()), {"count": 3, "stage_for_index": lambda i: Twice(), "name": "blocks"},
    ),
    "Sequence": Case(st.Sequence([Shifted()]), {"stages": [Twice()]}),
    "Named": Case(st.Named("n", Shifted()), {"name": "m", "inner": Twice()}),
    "RmsNorm": Case(st.RmsNorm("w", 1e-5), {"weight_key": "v", "eps": 0.1}),
    "GemmaRmsNorm": Case(st.GemmaRmsNorm("w", 1e-5), {"weight_key": "v", "eps": 0.1}),
    "LayerNorm": Case(st.LayerNorm("w", "b", 1e-5), {"gamma_key": "v", "beta_key": None, "eps": 0.1}),
    "GatherLastToken": Case(st.GatherLastToken(), {"batch": 2, "input_name": "other", "index": 1}),
    "LmHead": Case(
        st.LmHead(9, H, "g"), {"vocab_size": 8, "hidden_size": 7, "weight_key": "h", "tie_word_embeddings": True},
        before=(st.Embed("e", shape=(9, H)),), shape=(2, 3), dtype="i32",
    ),
    "Linear": Case(
        st.Linear("w"), {"weight_key": "v", "transpose": False, "bias_key": "b", "out": H + 1},
        shapes=(("w", (H, H)), ("v", (H, H))),
    ),
    "ResidualSave": Case(st.ResidualSave(), {}, after=(st.ResidualAdd(),)),
    "ResidualAdd": Case(st.ResidualAdd(), {}, before=(st.ResidualSave(),)),
    "SwiGlu": Case(
        st.SwiGlu("g", "u", "d", FFN),
        {"gate_key": "a", "up_key": "b", "down_key": "c", "intermediate_size": 6, "bias": True, "activation": "relu"},
    ),
    "GeGlu": Case(
        st.GeGlu("g", "u", "d", FFN),
        {"gate_key": "a", "up_key": "b", "down_key": "c", "intermediate_size": 6, "bias": True, "activation": "relu"},
    ),
    "GeluFfn": Case(
        st.GeluFfn("a", "b", "c", "d", intermediate_size=FFN),
        {"intermediate_w": "e", "intermediate_b": "f", "output_w": "g", "output_b": "h", "approx_gelu": True,
         "intermediate_size": 6, "activation": "relu"},
    ),
    "SelfAttnPrefill": Case(
        st.SelfAttnPrefill("q", "k", "v", HEADS, KV, HEAD, layer_idx=0),
        {"q_key": "a", "k_key": "b", "v_key": "c", "num_heads": 2, "num_kv_heads": 4, "head_dim": 2,
         "mask": MaskKind.NONE, "score_scale": 0.3, "attn_logit_softcap": 2.0, "rope": "other", "layer_idx": 1},
        **CACHED,
    ),
    "Attention": Case(
        st.Attention("a", HEADS, KV, HEAD, qk_norm=True, layer_idx=0),
        {"prefix": "b", "num_heads": 2, "num_kv_heads": 4, "head_dim": 2, "mask": MaskKind.NONE, "rope": "other",
         "bias": True, "qk_norm": False, "eps": 0.1, "score_scale": 0.3, "layer_idx": 1},
        **CACHED,
    ),
    "Dropout": Case(st.Dropout(0.5), {"rate": 0.25}),
    "GdnScan": Case(
        st.GdnScan(4, True, "s"), {"state_size": 8, "carry_state": False, "state_key": "t"},
        before=(st.Custom(lambda e, v: _publish(e)),),
    ),
    "StoreStream": Case(st.StoreStream("a"), {"name": "b"}, before=(st.StoreStream("a"), Shifted()),
                        after=(st.LoadStream("a"),)),
    "LoadStream": Case(st.LoadStream("a"), {"name": "b"}, before=(st.StoreStream("a"), Shifted(), st.StoreStream("b"))),
    "BindInputs": Case(st.BindInputs((("i", "a"),)), {"pairs": (("j", "a"),)}, after=(st.LoadStream("a"),),
                       inputs=(("i", (2,), "f32"), ("j", (3,), "f32"))),
    "DualStream": Case(
        st.DualStream("d", "a", "b", lambda e, a, b: (a + b, b)),
        {"name": "e", "a": "b2", "b": "c", "f": lambda e, a, b: (a - b, b)},
        before=(st.StoreStream("a"), Shifted(), st.StoreStream("b"), Shifted(), st.StoreStream("b2"), Shifted(),
                st.StoreStream("c")), after=(st.LoadStream("a"),),
    ),
    "Custom": Case(st.Custom(lambda e, v: v + 1.0), {"f": lambda e, v: v - 1.0, "name": "c"}),
    "BertEncoderLayer": Case(
        st.BertEncoderLayer(*ENCODER, intermediate_size=FFN),
        {"layer_prefix": "m", "hidden_size": 7, "num_heads": 4, "head_dim": 2, "eps": 0.1, "qkv_style": "mpnet",
         "attention_mask_input": "other", "intermediate_size": 6, "activation": "relu", "causal": True}, inputs=MASKED,
    ),
    "NomicEncoderLayer": Case(
        st.NomicEncoderLayer(*ENCODER, intermediate_size=FFN),
        {"layer_prefix": "m", "hidden_size": 7, "num_heads": 4, "head_dim": 2, "eps": 0.1,
         "attention_mask_input": "other", "intermediate_size": 6, "activation": "relu"}, inputs=MASKED, before=TABLES,
    ),
    "VitSelfAttn": Case(
        st.VitSelfAttn("qkv", "b", "o", "c", 2, 4),
        {"qkv_weight": "other", "qkv_bias": "b2", "out_weight": "o2", "out_bias": None, "num_heads": 4, "head_dim": 2},
        shapes=tuple(QKV.items()),
    ),
    "LayerScale": Case(st.LayerScale("g"), {"gamma_key": "h"}),
    "VisionSwiGluFfn": Case(
        st.VisionSwiGluFfn("l", 1e-5), {"layer_prefix": "m", "eps": 0.1},
        shapes=tuple((f"{p}.mlp.{n}.weight", (H, H)) for p in "lm" for n in ("fc11", "fc12", "fc2")),
    ),
    "ClsTokenPool": Case(st.ClsTokenPool(), {}),
    "GatherFromInput": Case(
        st.GatherFromInput("i", "t"), {"input_name": "j", "weight_key": "u", "axis": 1},
        shapes=(("t", (9, H)), ("u", (9, H))),
    ),
    "GatherAdd": Case(
        st.GatherAdd("i", "t", rows=9), {"input_name": "j", "weight_key": "u", "axis": 1, "rows": 7},
    ),
    "EmbedScale": Case(st.EmbedScale(16), {"hidden_size": 25}),
    "LogitSoftcap": Case(st.LogitSoftcap(3.0), {"cap": 2.0}),
    "DecodeRopeParams": Case(
        st.DecodeRopeParams(COS[:3], SIN[:3]), {"cos": COS[1:4], "sin": SIN[1:4], "style": "pairs"},
        after=(st.BindDecodeInputs(1), st.LlamaDecodeLayer(*SIZES, layer_idx=0)), inputs=PAST,
    ),
    "MoeFfn": Case(
        st.MoeFfn("m", 4, 2, intermediate_size=FFN),
        {"prefix": "n", "experts": 5, "chosen": 3, "normalise": False, "intermediate_size": 6, "activation": "gelu",
         "router_key": "r"},
    ),
    "SharedMoeFfn": Case(
        st.SharedMoeFfn(st.MoeFfn("m", 4, 2, intermediate_size=FFN), FFN),
        {"mixture": st.MoeFfn("m", 4, 1, intermediate_size=FFN), "shared_size": 6},
    ),
}  # fmt: skip


def _bound(emit: Any, value: Any) -> Any:
    step = emit.state.decode
    for bound in (*step.past_k, *step.past_v, step.mask, step.cos, step.sin):
        value = value if bound is None else value + bound.sum()
    return value


def _publish(emit: Any) -> None:
    heads = [emit.input(n, (1, 3, 2, 4)) for n in "abc"]
    gates = [emit.input(n, (1, 3, 2)) for n in "de"]
    emit.state.gdn = GdnInputSlots(*heads, *gates)
    for name in "st":
        emit.set_named(name, emit.input(name, (1, 2, 4, 4)))


def built(case: Case, stage: FlowStage) -> str:
    """What a build comes to: the graph with its stage paths, its outputs, and the numbers that stages made."""
    flow = ModelFlow("f").input("x", case.shape, case.dtype)
    for name, shape, kind in case.inputs:
        flow = flow.input(name, shape, kind)
    flow = flow.kv_cache(2, KV, HEAD) if case.cache else flow
    flow = flow.with_stages((*case.before, stage, *case.after))
    SIDE.drain()
    shapes = dict(case.shapes) | {k: s for k, s in _MLP.items() if not isinstance(case.stage, st.MoeFfn)}
    model = flow.build(WantedWeights(shapes), training=True)
    side = [(name, value.node.id) for name, value in SIDE.drain()]
    params = {name: array.tobytes() for name, array in model.params.computed.items()}
    stages = [(node.op, node.origin.stage, sorted(node.attrs.items(), key=str)) for node in model.module.nodes]
    return repr((model.module.text(full=True), stages, side, params, model.output_names))


# Layers that are not told the size of their feed-forward have it from here.
_MLP = {f"{p}.mlp.{n}_proj.weight": (FFN, H) for p in "lm" for n in ("gate", "up")} | {
    f"{p}.mlp.down_proj.weight": (H, FFN) for p in "lm"
}


@pytest.mark.parametrize("name", CASES)
def test_every_setting_of_a_stage_does_something(name: str) -> None:
    case = CASES[name]
    stage: Any = case.stage
    plain = built(case, stage)
    assert built(case, stage) == plain, "a build is the same each time"
    settings = [f.name for f in dataclasses.fields(stage) if f.init and f.compare]
    assert set(case.other) == set(settings), "each setting has another value here"
    for setting, value in case.other.items():
        try:
            changed = built(case, dataclasses.replace(stage, **{setting: value}))
        except RlxError:
            continue  # checked: the value does not fit the weights, the inputs or the other settings
        assert changed != plain, f"{name}({setting}={value!r}) is the same as {getattr(stage, setting)!r}"


def test_no_stage_is_left_out() -> None:
    every = {n for n, c in vars(st).items() if isinstance(c, type) and issubclass(c, FlowStage)} - {"FlowStage"}
    assert every == set(CASES)
