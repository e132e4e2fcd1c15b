"""NomicBERT: random small models against `transformers`, in Nomic's own words, and as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
from gguf_writing import finish
from reference_encoders import check, embedded, save
from safetensors.numpy import load_file

import rlx
from rlx.errors import CapabilityError
from rlx.models.load import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": len(small_bert.VOCAB), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "intermediate_size": 80, "max_position_embeddings": 160,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd heads": {"hidden_size": 60, "num_attention_heads": 3, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "wide heads, another base": {
        "head_dim": 16, "num_hidden_layers": 3, "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"},
    },
    "another gate": {"hidden_act": "gelu", "num_attention_heads": 1},
}  # fmt: skip
WORDS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
TEXTS = [" ".join((small_bert.WORDS * 2)[i : i + n]) for i, n in enumerate((5, 1, 70, 0, 130))]


def write(folder: Path, **changes: Any) -> None:
    """A folder as the authors of NomicBERT write it, with weights of NumPy."""
    from safetensors.numpy import save_file

    said: dict[str, Any] = {
        "model_type": "nomic_bert", "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "n_positions": 8192,
        "max_trained_positions": 2048, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "type_vocab_size": 2,
        "rotary_emb_fraction": 1.0, "activation_function": "swiglu", "vocab_size": len(small_bert.VOCAB),
        "prenorm": False, "qkv_proj_bias": False, "rotary_scaling_factor": None, **changes,
    }  # fmt: skip
    dim, inner = said["n_embd"], said["n_inner"]
    rng = np.random.default_rng(0)
    shapes = {"embeddings.word_embeddings": (said["vocab_size"], dim), "embeddings.token_type_embeddings": (2, dim)}
    for i in range(2):
        layer = f"encoder.layers.{i}"
        shapes |= {f"{layer}.attn.Wqkv": (3 * dim, dim), f"{layer}.attn.out_proj": (dim, dim)}
        shapes |= {
            f"{layer}.mlp.fc11": (inner, dim),
            f"{layer}.mlp.fc12": (inner, dim),
            f"{layer}.mlp.fc2": (dim, inner),
        }
    weights = {f"{name}.weight": (rng.standard_normal(s) * 0.3).astype(np.float32) for name, s in shapes.items()}
    for norm in ("emb_ln", *(f"encoder.layers.{i}.norm{n}" for i in range(2) for n in (1, 2))):
        weights |= {f"{norm}.weight": np.ones(dim, np.float32), f"{norm}.bias": np.zeros(dim, np.float32)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(said))
    small_bert.write_tokenizer(folder)


# -- against transformers --------------------------------------------------------------------------------------------
@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "NomicBert", **{**SIZES, **CONFIGS[name]}))


@pytest.mark.parity
def test_the_words_of_its_authors_mean_the_same(tmp_path: Path) -> None:
    model = save(tmp_path, "NomicBert", **SIZES)
    small_bert.write_tokenizer(tmp_path)
    embedded(tmp_path, model, TEXTS)
    said = json.loads((tmp_path / "config.json").read_text())
    said = {WORDS.get(name, name): value for name, value in said.items() if name not in ("rope_parameters", "head_dim")}
    said |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "prenorm": False}
    (tmp_path / "config.json").write_text(json.dumps(said))
    embedded(tmp_path, model, TEXTS)


# -- GGUF ------------------------------------------------------------------------------------------------------------
def write_gguf(path: Path, folder: Path, kind: str = "F32") -> None:
    """The model of a folder as llama.cpp's converter writes it, its matrices in blocks of a kind."""
    gguf = pytest.importorskip("gguf")
    said = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "nomic-bert")
    writer.add_block_count(said["n_layer"])
    writer.add_context_length(2048)
    writer.add_embedding_length(said["n_embd"])
    writer.add_feed_forward_length(said["n_inner"])
    writer.add_head_count(said["n_head"])
    writer.add_layer_norm_eps(said["layer_norm_epsilon"])
    writer.add_rope_freq_base(float(said["rotary_emb_base"]))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    small_bert.add_gguf_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT, said["n_layer"])
    for name, array in load_file(folder / "model.safetensors").items():
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 and "embeddings" not in name else "F32"]
        packed = gguf.quants.quantize(array, stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=stored)
    finish(writer)


def test_gguf_and_hugging_face_files_give_the_same_vectors(tmp_path: Path) -> None:
    write(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    ours, theirs = rlx.load(tmp_path / "m.gguf"), rlx.load(tmp_path / "hf")
    assert isinstance(ours, rlx.EmbeddingModel) and isinstance(theirs, rlx.EmbeddingModel)
    assert (ours.family.name, ours.pooling, ours.limit) == ("nomic-bert", "mean", 2048)
    assert np.array_equal(ours.embed(TEXTS), theirs.embed(TEXTS, normalize=True))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_packed_weights_are_computed_with_as_they_are(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.numpy import save_file

    write(tmp_path / "hf", n_embd=96, n_inner=160)
    write_gguf(tmp_path / "m.gguf", tmp_path / "hf", kind)
    stored = gguf.GGMLQuantizationType[kind]
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, stored), stored).astype(np.float32)
        if array.ndim == 2 and "embeddings" not in name else array
        for name, array in load_file(tmp_path / "hf" / "model.safetensors").items()
    }  # fmt: skip
    save_file(rounded, str(tmp_path / "hf" / "model.safetensors"))
    theirs = rlx.load(tmp_path / "hf")
    for precision, most in (("f32", 1e-5), ("auto", 0.03)):  # usually what is multiplied is rounded too
        ours = rlx.load(tmp_path / "m.gguf", precision=precision)
        assert isinstance(ours, rlx.EmbeddingModel) and isinstance(theirs, rlx.EmbeddingModel)
        assert np.abs(ours.embed(TEXTS) - theirs.embed(TEXTS, normalize=True)).max() < most


# -- what files say --------------------------------------------------------------------------------------------------
def test_texts_are_as_long_as_the_files_say(tmp_path: Path) -> None:
    write(tmp_path)
    assert open_checkpoint(tmp_path).config.context == 8192
    write(tmp_path, rotary_scaling_factor=2)  # beyond, angles would depend on the longest text of a batch
    assert open_checkpoint(tmp_path).config.context == 2048


def test_the_prefixes_of_its_files_go_before_texts(tmp_path: Path) -> None:
    write(tmp_path)
    prompts = {"prompts": {"query": "bal bam ", "document": "dal "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = rlx.load(tmp_path)
    assert isinstance(model, rlx.EmbeddingModel)
    assert np.array_equal(model.embed("fan gas", prompt="query"), model.embed("bal bam fan gas"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("activation_function", "gelu"), ("activation_function", ["swiglu"]), ("prenorm", True), ("use_rms_norm", True),
     ("rotary_emb_fraction", 0.5), ("rotary_emb_interleaved", True), ("qkv_proj_bias", True), ("num_experts", 8),
     ("causal", True)],
)  # fmt: skip
def test_switches_that_it_does_not_have_are_named(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, **{name: value})
    with pytest.raises(CapabilityError, match=f"{name} is"):
        open_checkpoint(tmp_path)
