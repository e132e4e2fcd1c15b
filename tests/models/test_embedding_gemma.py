"""EmbeddingGemma: states of `transformers`, then a mean, two dense layers and length 1; from folders and from GGUF."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden_encoders
import llama_cpp_of_tokens
import numpy as np
import pytest
import reference_encoders
from gguf_writing import finish
from safetensors.numpy import save_file

import rlx
from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.models.load import open_checkpoint

Array = np.ndarray[Any, Any]
GOLDEN = json.loads((golden_encoders.FOLDER / "embeddinggemma.json").read_text())
WORDS = [f"w{i}" for i in range(40)]
PROMPTS = {"query": "w7 w8 ", "document": "w9 "}
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
LAYERS = {"2_Dense": (24, 36, IDENTITY), "3_Dense": (36, 24, IDENTITY)}  # llama.cpp wants as many as states have


def dense(layers: dict[str, tuple[int, int, str]] = LAYERS) -> dict[str, dict[str, Array]]:
    result = {}
    for folder, (inner, outer, activation) in layers.items():
        weight = golden_encoders.numbers(folder, (outer, inner)).astype(np.float32)
        bias = {"linear.bias": weight[:, 0] * 2} if activation == TANH else {}
        result[folder] = {"linear.weight": weight, **bias}
    return result


def write_modules(folder: Path, layers: dict[str, tuple[int, int, str]] = LAYERS) -> Path:
    """What sentence-transformers has beside the weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ["Transformer", "Pooling", *["Dense"] * len(layers), "Normalize"]
    places = ["", "1_Pooling", *layers, "9_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    said: dict[str, Any] = {
        "modules.json": modules, "config_sentence_transformers.json": {"prompts": PROMPTS},
        "1_Pooling/config.json": {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0"},
    }  # fmt: skip
    for place, (inner, outer, activation) in layers.items():
        said[f"{place}/config.json"] = {
            "in_features": inner, "out_features": outer, "bias": activation == TANH, "activation_function": activation
        }  # fmt: skip
    for name, content in said.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "9_Normalize").mkdir(exist_ok=True)
    for place, weights in dense(layers).items():
        save_file(weights, str(folder / place / "model.safetensors"))
    return folder


def vector(states: Array, layers: dict[str, tuple[int, int, str]] = LAYERS) -> Array:
    """What the modules make of the states of a text, in float64."""
    x = np.asarray(states, np.float64).mean(0)
    for (_, _, activation), weights in zip(layers.values(), dense(layers).values(), strict=True):
        x = weights["linear.weight"].astype(np.float64) @ x + weights.get("linear.bias", 0.0)
        x = np.tanh(x) if activation == TANH else x
    return np.asarray(x / np.linalg.norm(x))


def texts() -> list[str]:
    inputs = golden_encoders.batch()
    rows = zip(inputs["tokens"], golden_encoders.LENGTHS, strict=True)
    return [" ".join(WORDS[t] for t in row[:n]) for row, n in rows]


@pytest.mark.parametrize("layers", [LAYERS, {"2_Dense": (24, 7, TANH)}])
def test_vectors_go_through_the_dense_layers(tmp_path: Path, layers: dict[str, tuple[int, int, str]]) -> None:
    golden_encoders.write_folder(tmp_path, GOLDEN)
    with rlx.load(write_modules(tmp_path, layers)) as model:
        assert isinstance(model, rlx.EmbeddingModel) and model.family.name == "embeddinggemma"
        assert model.dim == list(layers.values())[-1][1]
        actual = model.embed(texts())
        wanted = np.stack([vector(np.array(s), layers) for s in GOLDEN["states"]])
        assert actual.shape == wanted.shape and np.abs(actual - wanted).max() < 1e-5
        for text, row in zip(texts(), actual, strict=True):  # whatever the neighbours are
            assert model.embed(text).tobytes() == row.tobytes()
        assert model.embed("w1", prompt="query").tobytes() == model.embed("w7 w8 w1").tobytes()
        model.save(tmp_path / "again")
        model.export(tmp_path / "m.rlxp")
    for path in ("again", "m.rlxp"):
        with rlx.load(tmp_path / path) as other:
            assert isinstance(other, rlx.EmbeddingModel)
            assert other.embed(texts()).tobytes() == actual.tobytes()


WRONG: list[tuple[str, dict[str, Any], type[RlxError], str]] = [
    ("2_Dense", {"activation_function": "torch.nn.modules.activation.GELU"}, CapabilityError, "activation 'GELU'"),
    ("2_Dense", {"out_features": 35}, FormatError, "'linear.weight': (35, 24)}, found {'linear.weight': (36, 24)}"),
    ("2_Dense", {"in_features": 2**70}, FormatError, "found {'linear.weight': (36, 24)}"),
    ("2_Dense", {"in_features": "24"}, FormatError, "'in_features': expected int, found '24'"),
    ("2_Dense", {"bias": True}, FormatError, "'linear.bias': (36,)"),
    ("2_Dense", {"out_features": None}, FormatError, "'out_features' is missing"),
    ("3_Dense", {"module_input_name": "token_embeddings"}, CapabilityError, "reads 'token_embeddings'"),
]


@pytest.mark.parametrize(("place", "changes", "error", "says"), WRONG)
def test_dense_layers_that_cannot_be_are_named(
    tmp_path: Path, place: str, changes: dict[str, Any], error: type[RlxError], says: str
) -> None:
    golden_encoders.write_folder(tmp_path, GOLDEN)
    path = write_modules(tmp_path) / place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error) as caught:
        rlx.load(tmp_path)
    assert says in str(caught.value)


MODULES: list[tuple[list[int], str]] = [
    ([0, 1, 4, 2, 3], "module 3 is a 'Dense' behind a 'Normalize'"),
    ([0, 1, 1, 4], "module 2 is a 'Pooling' behind a 'Pooling'"),
    ([0, 1, 2, 3, 1], "module 4 is a 'Pooling' behind a 'Dense'"),
    ([0, 0, 1], "module 1 is a 'Transformer' behind a 'Transformer'"),
    ([0, 2, 3, 1, 4], "a dense layer before the pooling"),
]


@pytest.mark.parametrize(("order", "says"), MODULES)
def test_modules_in_another_order_are_refused(tmp_path: Path, order: list[int], says: str) -> None:
    golden_encoders.write_folder(tmp_path, GOLDEN)
    path = write_modules(tmp_path) / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([modules[i] for i in order]))
    with pytest.raises(CapabilityError, match=says) as caught:
        rlx.load(tmp_path)
    assert "the order is Transformer, Pooling" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_dense_layer_without_a_file_is_named(tmp_path: Path, name: str) -> None:
    golden_encoders.write_folder(tmp_path, GOLDEN)
    (write_modules(tmp_path) / "3_Dense" / name).unlink()
    with pytest.raises(FormatError, match=f"3_Dense/{name}: not there, though modules.json names it") as caught:
        rlx.load(tmp_path)
    assert caught.value.hint


def test_dense_weights_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    golden_encoders.write_folder(tmp_path, GOLDEN)
    path = write_modules(tmp_path) / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": np.ones((36, 24), np.int32)}, str(path))
    with pytest.raises(CapabilityError, match=r"tensor 'linear.weight' is stored as i32"):
        rlx.load(tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------------------------
def write_gguf(path: Path, without: tuple[str, ...] = (), said: int = 36) -> Path:
    """As llama.cpp's converter does it with the dense layers: norms plus 1, the window as the folder has it."""
    gguf = pytest.importorskip("gguf")
    s = GOLDEN["config"]
    writer = gguf.GGUFWriter(path, "gemma-embedding")
    writer.add_context_length(s["max_position_embeddings"])
    writer.add_embedding_length(s["hidden_size"])
    writer.add_block_count(7)
    writer.add_feed_forward_length(s["intermediate_size"])
    writer.add_head_count(s["num_attention_heads"])
    writer.add_head_count_kv(s["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(s["rms_norm_eps"])
    writer.add_key_length(s["head_dim"])
    writer.add_value_length(s["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(s["sliding_window"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(s["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, (inner, outer, _) in zip(("dense_2", "dense_3"), LAYERS.values(), strict=True):
        writer.add_dense_features_dims(name, inner, said if name == "dense_2" else outer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, 7)
    for name, array in weights_of_seven().items():
        result = names.get_name(f"model.{name}", try_suffixes=(".weight",))
        writer.add_tensor(result, array + 1 if name.endswith("norm.weight") else array)
    for name, weights in zip(("dense_2", "dense_3"), dense().values(), strict=True):
        if name not in without:
            writer.add_tensor(f"{name}.weight", weights["linear.weight"])
    finish(writer)
    return path


def weights_of_seven() -> dict[str, Array]:
    """GGUF cannot say which layers see near tokens only: all but each sixth."""
    shapes = dict(GOLDEN["shapes"])
    for name, shape in GOLDEN["shapes"].items():
        for i in range(3, 7):
            shapes |= {name.replace("layers.0.", f"layers.{i}."): shape} if name.startswith("layers.0.") else {}
    result = golden_encoders.weights(shapes)
    return {n: a - 1 if n.endswith("norm.weight") else a for n, a in result.items()}


def write_seven(folder: Path) -> Path:
    folder.mkdir()
    save_file(weights_of_seven(), str(folder / "model.safetensors"))
    said = GOLDEN["config"] | {"num_hidden_layers": 7, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(said))
    return write_modules(folder)


def test_a_gguf_file_has_the_dense_layers_too(tmp_path: Path) -> None:
    theirs = rlx.load(write_seven(tmp_path / "hf"))
    ours = rlx.load(write_gguf(tmp_path / "m.gguf"))
    assert isinstance(ours, rlx.EmbeddingModel) and isinstance(theirs, rlx.EmbeddingModel)
    assert (ours.family.name, ours.pooling, ours.dim) == ("embeddinggemma", "mean", 24)
    rows = [theirs.tokenizer.encode(text) for text in texts()]
    actual = ours._run_batch(rows)
    actual /= np.linalg.norm(actual, axis=1, keepdims=True)
    assert np.abs(actual - theirs.embed(texts())).max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"without": ("dense_2",)}, r"expected 36 rows, by gemma-embedding\.dense_2_feat_out, found none"),
        ({"without": ("dense_3",)}, r"expected 24 rows, by gemma-embedding\.dense_3_feat_out, found none"),
        ({"said": 99}, r"expected 99 rows, by gemma-embedding\.dense_2_feat_out, found shape \[36, 24\]"),
    ],
)  # fmt: skip
def test_a_gguf_file_without_a_dense_layer_it_speaks_of_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        rlx.load(write_gguf(tmp_path / "m.gguf", **changes))


@pytest.mark.large
def test_llama_cpp_has_the_same_vectors(tmp_path: Path) -> None:
    ours = rlx.load(write_gguf(tmp_path / "m.gguf"))
    assert isinstance(ours, rlx.EmbeddingModel)
    row = golden_encoders.batch()["tokens"][0].tolist()
    wanted = llama_cpp_of_tokens.computed(tmp_path / "m.gguf", row, size=ours.dim)
    assert reference_encoders.difference(ours._run_batch([row])[0], wanted) < 1e-3


# -- against transformers --------------------------------------------------------------------------------------------
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 13,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd heads, seven layers": {
        "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 7,
        "layer_types": None, "sliding_window": 30, "query_pre_attn_scalar": 9,
    },
    "all near, both bases": {
        "num_key_value_heads": 6, "layer_types": ["sliding_attention"] * 3, "sliding_window": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        },
    },
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    model = reference_encoders.save(tmp_path, "Gemma3Text", **{**SIZES, **CONFIGS[name]})
    assert open_checkpoint(tmp_path).family.name == "embeddinggemma"
    reference_encoders.check(tmp_path, model)


@pytest.mark.parity
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Run by an interpreter that has it: this one, or that of the peers."""
    golden_encoders.write_folder(tmp_path, GOLDEN)
    write_modules(tmp_path)
    script = (
        "import sys, json, sentence_transformers as s\n"
        "m = s.SentenceTransformer(sys.argv[1], device='cpu')\n"
        "texts = json.loads(sys.argv[2])\n"
        "print(json.dumps([m.encode(texts).tolist(), m.encode(texts, prompt_name='query').tolist()]))\n"
    )
    said = subprocess.run(
        [os.environ.get("RLX_PEERS_PYTHON", sys.executable), "-c", script, str(tmp_path), json.dumps(texts())],
        capture_output=True,
    )  # fmt: skip
    if b"No module named 'sentence_transformers'" in said.stderr:
        pytest.skip("sentence-transformers is not there")
    assert said.returncode == 0, said.stderr.decode()[-2000:]
    plain, prompted = json.loads(said.stdout.decode().splitlines()[-1])
    with rlx.load(tmp_path) as model:
        assert isinstance(model, rlx.EmbeddingModel)
        assert np.abs(model.embed(texts()) - np.array(plain)).max() < 1e-5
        assert np.abs(model.embed(texts(), prompt="query") - np.array(prompted)).max() < 1e-5
