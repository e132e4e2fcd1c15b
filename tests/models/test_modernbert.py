"""ModernBERT: random small models against `transformers`, as GGUF, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
from gguf_writing import finish
from reference_encoders import check, embedded, save
from safetensors.numpy import load_file, save_file

import rlx
from rlx.errors import CapabilityError, FormatError
from rlx.lir.kernels import AttentionKernel
from rlx.models.init import flow_of
from rlx.models.load import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": len(small_bert.VOCAB), "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
    "intermediate_size": 80, "max_position_embeddings": 160, "local_attention": 12, "pad_token_id": 0,
    "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd heads, all local": {
        "hidden_size": 60, "num_attention_heads": 3, "num_hidden_layers": 2, "local_attention": 7,
        "layer_types": ["sliding_attention"] * 2,
    },
    "all global": {"global_attn_every_n_layers": 1, "num_hidden_layers": 2, "norm_eps": 0.1},
    "bases and every second": {
        "global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 50.0, "local_attention": 128,
    },
    "biases everywhere": {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"},
}  # fmt: skip
TEXTS = [" ".join((small_bert.WORDS * 2)[i : i + n]) for i, n in enumerate((5, 1, 70, 0, 130))]


def write(folder: Path, **changes: Any) -> None:
    """A folder with weights of NumPy, in the words that ModernBERT was published with."""
    said = {
        **SIZES, "model_type": "modernbert", "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40,
        "norm_eps": 1e-5, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "hidden_activation": "gelu", **changes,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings": (len(small_bert.VOCAB), 24)}
    shapes |= {"embeddings.norm": (24,), "final_norm": (24,)}
    for i in range(4):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.attn.Wqkv": (72, 24), f"{layer}.attn.Wo": (24, 24), f"{layer}.mlp.Wi": (80, 24)}
        shapes |= {f"{layer}.mlp.Wo": (24, 40), f"{layer}.mlp_norm": (24,), f"{layer}.attn_norm": (24,)}
    del shapes["layers.0.attn_norm"]
    weights = {f"{name}.weight": (rng.standard_normal(s) * 0.3).astype(np.float32) for name, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(said))
    small_bert.write_tokenizer(folder)


# -- against transformers --------------------------------------------------------------------------------------------
@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "ModernBert", **{**SIZES, **CONFIGS[name]}))


@pytest.mark.parity
def test_texts_become_the_vectors_of_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, "ModernBert", kind="ForMaskedLM", **SIZES)  # its weights lie under `model.`
    small_bert.write_tokenizer(tmp_path)
    embedded(tmp_path, model.model, TEXTS)


@pytest.mark.parity
def test_old_and_new_words_mean_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    transformers = pytest.importorskip("transformers")
    check(tmp_path, transformers.ModernBertModel.from_pretrained(tmp_path, attn_implementation="eager").eval())


# -- memory ----------------------------------------------------------------------------------------------------------
def test_local_layers_keep_nothing_of_all_pairs_of_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    flow = flow_of(tmp_path / "config.json")
    compiled = flow.build(flow.init(rlx.random.key(0))).compile()
    report = compiled.memory({"batch": 2, "seq": 150})
    assert max(buffer.bytes for buffer in report.buffers) < 4 * 2 * 150 * 150
    kernels = [x.kernel for x in compiled.executable.program.launches if isinstance(x.kernel, AttentionKernel)]
    assert [(k.window, k.ahead, k.segments) for k in kernels] == [
        (0, 0, False), (13, 6, True), (13, 6, True), (0, 0, False),
    ]  # fmt: skip


# -- GGUF ------------------------------------------------------------------------------------------------------------
def test_gguf_and_hugging_face_files_give_the_same_vectors(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write(tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "modern-bert")
    writer.add_block_count(said["num_hidden_layers"])
    writer.add_context_length(said["max_position_embeddings"])
    writer.add_embedding_length(said["hidden_size"])
    writer.add_feed_forward_length(said["intermediate_size"])
    writer.add_head_count(said["num_attention_heads"])
    writer.add_layer_norm_eps(said["norm_eps"])
    writer.add_sliding_window(said["local_attention"])
    writer.add_sliding_window_pattern(said["global_attn_every_n_layers"])
    writer.add_rope_freq_base(said["global_rope_theta"])
    writer.add_rope_freq_base_swa(said["local_rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    small_bert.add_gguf_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MODERN_BERT, said["num_hidden_layers"])
    for name, array in load_file(tmp_path / "hf" / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    finish(writer)
    ours, theirs = rlx.load(tmp_path / "m.gguf"), rlx.load(tmp_path / "hf")
    assert isinstance(ours, rlx.EmbeddingModel) and isinstance(theirs, rlx.EmbeddingModel)
    assert (ours.family.name, ours.pooling, theirs.pooling) == ("modernbert", "cls", "mean")
    for text in TEXTS:
        ids = theirs.tokenizer.encode(text)
        wanted = theirs.run(ids, capture=["norm"])["norm"][0]
        wanted /= np.linalg.norm(wanted)
        assert np.abs(ours.embed(text) - wanted).max() < 1e-6


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("layer_types", ["full_attention"], FormatError, "layer_types has 1 entries for 4 layers"),
        ("layer_types", ["other"] * 4, CapabilityError, "a layer type is 'other'"),
        ("rope_parameters", [1], FormatError, "rope_parameters: expected an object"),
        ("rope_parameters", {"full_attention": {"rope_type": "mrope"}}, CapabilityError, "type 'mrope' is not"),
        ("rope_parameters", {"full_attention": {"rope_theta": "x"}}, FormatError, "global_rope_theta: expected float"),
        ("hidden_size", 9, FormatError, "rotary positions turn pairs"),
        ("hidden_activation", "prelu", CapabilityError, "'prelu'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_named(tmp_path: Path, name: str, value: Any, error: Any, match: str) -> None:
    write(tmp_path, **{name: value})
    with pytest.raises(error, match=match):
        open_checkpoint(tmp_path)
