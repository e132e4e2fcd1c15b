"""Every family lowers to the recorded MIR, and captures find the recorded stage paths.

`fixtures/hir/families.json` has, per model, the fingerprint of its MIR, the number of its MIR nodes and a digest of its
stage paths. Encoders and layers without a cache have the MIR of the time when stages built ops one by one. Since then,
decoders with attention gained an input per page table (one for all layers, one more for those with a sliding window),
which `kv_append` and `cached_attention` read, and recurrent ops an optional operand `rows`, which is absent here; other
nodes are the same. Run this file as a program to record them again, which is right only after a deliberate change of
what a family computes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_encoders
import numpy as np
import pytest
from test_golden import ARCHITECTURES, Golden, converted, gguf, write

from rlx.flow import BuiltModel, ModelFlow, SideOutputs
from rlx.flow import stages as st
from rlx.flow.stage_values import stage_values
from rlx.hir.lower import lower
from rlx.ir.registry import HIR, LEAF, OPS, get
from rlx.models.load import Checkpoint, open_checkpoint
from rlx.models.pooling import pooled, read_settings
from rlx.profile import FusionPolicy
from rlx.types import sym

RECORDED = Path(__file__).parents[1] / "fixtures" / "hir" / "families.json"
DECODERS = sorted(path.stem for path in (golden_encoders.FOLDER.parent / "models").glob("*.npz"))
ENCODERS = sorted(path.stem for path in golden_encoders.FOLDER.glob("*.json") if path.stem != "mpnet")
WRITTEN = sorted(ARCHITECTURES)
CONTEXT = 64
EPS = 1e-5


# -- models of families ----------------------------------------------------------------------------------------------
def of_folder(name: str, folder: Path) -> BuiltModel:
    """A family as Hugging Face stores it: decoders with a cache, encoders with their pooling."""
    if name in DECODERS:
        return _built(open_checkpoint(Golden(name).folder(folder)))
    golden_encoders.write_folder(folder, json.loads((golden_encoders.FOLDER / f"{name}.json").read_text()))
    return _built(open_checkpoint(folder))


def of_gguf(name: str, folder: Path) -> BuiltModel:
    """A decoder from GGUF, with q8_0 blocks where rows are whole blocks."""
    golden = Golden(name)
    tensors = converted(golden)
    kinds = {n: gguf.GGMLQuantizationType.Q8_0 for n, w in tensors.items() if w.ndim > 1 and w.shape[-1] % 32 == 0}
    return _built(open_checkpoint(write(golden, folder / "m.gguf", tensors, kinds)), cache="f16")


def _built(checkpoint: Checkpoint, cache: str = "f32") -> BuiltModel:
    family, config = checkpoint.family, checkpoint.config
    if family.kind == "decoder":
        flow = family.flow(config, min(CONTEXT, int(config.context)), checkpoint.rope_factors).cache_dtype(cache)
    else:
        flow = family.flow(config)
        flow = flow if family.kind == "vision model" else pooled(flow, checkpoint, read_settings(checkpoint))
    return flow.build(checkpoint.weights)


# -- layers without a cache, and with one that the caller keeps --------------------------------------------------------
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "eps": EPS}
TABLE = np.ones((32, 2), np.float32)
LAYERS: dict[str, type[st.DecoderLayer]] = {
    "llama": st.LlamaDecoder, "qwen3": st.Qwen3Decoder, "gemma": st.GemmaDecoder, "gated": st.GatedAttentionLayer,
}  # fmt: skip


def layer_weights(wide_q: bool) -> dict[str, Any]:
    """Weights of a layer with the sizes of `SIZES` and a width of 8; `wide_q` has gates beside its queries."""
    at = "model.layers.0"
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    q = 32 if wide_q else 16
    linear = {"self_attn.q": (q, 8), "self_attn.k": (8, 8), "self_attn.v": (8, 8), "self_attn.o": (8, 16)}
    linear |= {"mlp.gate": (12, 8), "mlp.up": (12, 8), "mlp.down": (8, 12)}
    shapes: dict[str, tuple[int, ...]] = {f"{at}.{name}_layernorm.weight": (8,) for name in norms}
    shapes |= {f"{at}.self_attn.{n}_norm.weight": (4,) for n in "qk"}
    shapes |= {f"{at}.{name}_proj.weight": shape for name, shape in linear.items()}
    shapes |= {f"{at}.{name}_proj.bias": shape[:1] for name, shape in linear.items()}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def of_layer(name: str, folder: Path) -> BuiltModel:
    """One layer over inputs, without a cache; `name` says which, and how it is used."""
    kind, _, use = name.partition("-")
    side = SideOutputs()
    sizes = SIZES | {"layer_prefix": "model.layers.0"}
    flow = ModelFlow(name).input("x", (sym.BATCH, sym.SEQ, 8))
    if use == "positions":
        flow = flow.input("positions", (sym.BATCH, sym.SEQ), "i32")
    if use.startswith("step"):
        for which in "kv":
            flow = flow.input(f"past_{which}_0", (sym.BATCH, sym.PAST_SEQ, 8))
        if use == "step-mask":
            flow = flow.input("mask", (sym.BATCH, sym.PAST_SEQ + sym.SEQ))
    flow = flow.rope_tables(TABLE, TABLE)
    if use.startswith("step"):
        masked = use == "step-mask"
        flow = flow.bind_decode_inputs(1, masked)
        steps = {"llama": st.LlamaDecodeLayer, "qwen3": st.Qwen3DecodeLayer, "gemma": st.GemmaDecodeLayer}
        flow = flow.stage(steps[kind](**sizes, layer_idx=0, use_custom_mask=masked, kv_out=side))
    elif use == "tap":
        flow = flow.llama_kv_tap(0, 4, EPS, side)
    else:
        extra: dict[str, Any] = {"kv_sink": side} if use == "sink" else {"attention_bias": True, "output_bias": True}
        extra |= {"style": "gemma3"} if kind == "gemma" else {}
        flow = flow.stage(LAYERS[kind](**sizes, **extra))
    flow = flow.with_extra_outputs(side)
    return flow.build(layer_weights(kind == "gated"), strict=False)


USES = ["", "-positions", "-sink"]
OF_LAYERS = [f"{kind}{use}" for kind in LAYERS for use in USES]
OF_LAYERS += [f"{kind}-{use}" for kind in ("llama", "qwen3", "gemma") for use in ("step", "step-mask")] + ["llama-tap"]
CASES: dict[str, tuple[Callable[[str, Path], BuiltModel], str]] = {
    **{f"folder {name}": (of_folder, name) for name in (*DECODERS, *ENCODERS)},
    **{f"gguf {name}": (of_gguf, name) for name in WRITTEN},
    **{f"layer {name}": (of_layer, name) for name in OF_LAYERS},
}


def built(case: str, folder: Path) -> BuiltModel:
    make, name = CASES[case]
    return make(name, folder)


def paths_of(model: BuiltModel) -> str:
    """A digest of the paths that `capture=` and `edit=` know, and of the types of their values."""
    result = [f"{path}: {value.type}" for path, value in sorted(stage_values(model.module).items())]
    return hashlib.blake2b("\n".join(result).encode(), digest_size=16).hexdigest()


def record(model: BuiltModel) -> dict[str, Any]:
    lowered = lower(model.module)
    return {"mir": lowered.fingerprint(), "nodes": len(lowered), "paths": paths_of(model)}


@pytest.mark.parametrize("case", CASES)
def test_lowering_gives_the_recorded_mir_and_the_recorded_stage_paths(tmp_path: Path, case: str) -> None:
    wanted = json.loads(RECORDED.read_text())[case]
    model = built(case, tmp_path)
    for policy in FusionPolicy:
        lowered = lower(model.module, policy)
        assert (len(lowered), lowered.fingerprint()) == (wanted["nodes"], wanted["mir"]), f"{case}: MIR differs"
    assert paths_of(model) == wanted["paths"], f"{case}: stage paths differ"


# -- how it reads ------------------------------------------------------------------------------------------------------
LAYER = "norm linear linear linear cached_self_attention linear add norm gated_ffn add"
NORMED = LAYER.replace("linear linear linear", "normed_heads normed_heads linear")
GEMMA3 = NORMED.replace("linear add", "linear norm add").replace("ffn add", "ffn norm add")
GATED = NORMED.replace("normed_heads", "gated_queries", 1)
READS = {
    "folder mistral": LAYER, "folder phi3": LAYER, "folder qwen2": LAYER, "folder gemma": LAYER, "gguf llama": LAYER,
    "folder qwen3": NORMED, "folder mixtral": LAYER.replace("gated_ffn", "moe_ffn"),
    "folder gpt2": LAYER.replace("gated_ffn", "linear linear"),
    "folder qwen3_5": GATED, "folder qwen3_next": GATED.replace("gated_ffn", "moe_ffn"),
    "folder gemma3": GEMMA3, "folder embeddinggemma": GEMMA3.replace("cached_", ""),
    "folder bert": "linear linear linear self_attention linear add norm linear linear add norm",
    "folder nomic_bert": "linear split_qkv self_attention linear add norm gated_ffn add norm",
    "folder modernbert": "norm linear split_qkv self_attention linear add norm fused_gated_ffn add",
    "folder mamba": "norm linear mamba_block linear add", "folder mamba2": "norm linear mamba2_block linear add",
    "folder vit": "norm linear linear linear self_attention linear add norm linear linear add",
}  # fmt: skip
MOST = 13  # DINOv2's: two layer scales beside the norms, the projections, the feed-forward and the residuals


def layers_of(case: str, folder: Path) -> dict[str, list[str]]:
    """The ops of each layer, without weights and other leaves."""
    layers: dict[str, list[str]] = {}
    for node in built(case, folder).module.nodes:
        path = node.origin.stage.split(".")
        if path[0] == "layers" and LEAF not in node.definition.traits:
            layers.setdefault(path[1], []).append(node.op.removesuffix("_stored"))
    return layers


@pytest.mark.parametrize("case", READS)
def test_a_layer_reads_as_about_ten_blocks(tmp_path: Path, case: str) -> None:
    layers = layers_of(case, tmp_path)
    assert " ".join(layers[max(layers)]) == READS[case]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("layer ")])
def test_no_layer_of_a_family_reads_as_many_more(tmp_path: Path, case: str) -> None:
    layers = layers_of(case, tmp_path)
    assert layers
    for number, ops in layers.items():
        assert len(ops) <= MOST, f"layer {number}: {' '.join(ops)}"
        plain = [name for name in ops if get(name if name in OPS else f"{name}_stored").level != HIR]
        assert set(plain) <= {"add", "mul"}, f"layer {number}: {' '.join(ops)}"


def test_the_pooling_of_siglip_reads_as_six_blocks(tmp_path: Path) -> None:
    nodes = built("folder siglip", tmp_path).module.nodes
    pool = [n.op for n in nodes if n.origin.stage == "pool" and LEAF not in n.definition.traits]
    assert pool == ["attention_pool", "linear_stored", "norm", "linear_stored", "linear_stored", "add"]


if __name__ == "__main__":
    recorded = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            recorded[case] = record(built(case, Path(folder)))
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    sys.stdout.write(f"{len(recorded)} models in {RECORDED}\n")
