"""BERT through the whole house: random small models against `transformers`, in every file format, and MiniLM itself."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import golden_encoders
import numpy as np
import pytest
import small_bert
from gguf_writing import finish
from small_bert import VOCAB, WORDS, pooled, sentence_transformers, tokens_of

import rlx
from rlx.engine.embedding_model import EmbeddingModel
from rlx.errors import CapabilityError, FormatError
from rlx.models.load import open_checkpoint
from rlx.models.pooling import KINDS

Array = np.ndarray[Any, Any]
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STSB = ASSETS / "text" / "stsb-en-test.csv"
SPEARMAN = 0.82032  # of transformers with mean pooling on STS-B's test set
TOLERANCE = 2e-4
CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    {"hidden_size": 60, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 100},
    {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1, "intermediate_size": 65},
    {
        "hidden_size": 77,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "intermediate_size": 33,
        "type_vocab_size": 1,
    },
]
TEXTS = [" ".join((WORDS * 2)[i : i + n]) for i, n in enumerate((5, 1, 70, 0, 9, 33, 130))]


def theirs(folder: Path, dtype: str = "float32") -> Any:
    """The model of a folder as transformers reads it, computed in float32."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.BertModel.from_pretrained(
        folder, add_pooling_layer=False, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval().float()


def states(model: Any, tokens: list[int]) -> Array:
    """[seq, hidden] of one text."""
    import torch

    with torch.no_grad():
        result: Array = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return result


def encoder(path: Path | str, **options: Any) -> EmbeddingModel:
    model = rlx.load(path, **options)
    assert isinstance(model, EmbeddingModel)
    return model


# -- against transformers --------------------------------------------------------------------------------------------
@pytest.mark.parity
@pytest.mark.parametrize("config", CONFIGS)
def test_random_models_equal_transformers_at_every_token(tmp_path: Path, config: dict[str, Any]) -> None:
    """In a batch of unequal texts: what is masked reaches no other token."""
    import torch

    small_bert.write(tmp_path, **config)
    model = theirs(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    f = rlx.compile(built.module)
    f.set_params({n: checkpoint.weights.array(n) for n in f.param_types})
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, len(VOCAB), (4, 75)).astype(np.int32)
    mask = np.ones(tokens.shape, np.float32)
    mask[0, 9:], mask[2, 1:], mask[3, 65:] = 0, 0, 0
    positions = np.repeat(np.arange(75, dtype=np.int32)[None], 4, axis=0)
    inputs = {"tokens": tokens, "token_types": np.zeros_like(tokens), "positions": positions, "attention_mask": mask}
    (actual,) = f.run(inputs)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long(), torch.from_numpy(mask)).last_hidden_state.numpy()
    seen = mask.astype(bool)
    assert np.abs(actual - wanted)[seen].max() / np.abs(wanted)[seen].max() < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pooling_equals_that_of_torch(tmp_path: Path, kind: str) -> None:
    small_bert.write(tmp_path, files=sentence_transformers(kind, normalize=False), **CONFIGS[1])
    model = theirs(tmp_path)
    wanted = np.stack([pooled(states(model, tokens_of(text)), kind) for text in TEXTS])
    actual = encoder(tmp_path).embed(TEXTS)
    assert np.abs(actual - wanted).max() / np.abs(wanted).max() < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_two_bytes_equal_transformers(tmp_path: Path, dtype: str) -> None:
    import torch

    small_bert.write(tmp_path)
    theirs(tmp_path).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    model = theirs(tmp_path, dtype)
    wanted = np.stack([states(model, tokens_of(text)).mean(0) for text in TEXTS])
    actual = encoder(tmp_path).embed(TEXTS, normalize=False)
    assert np.abs(actual - wanted).max() / np.abs(wanted).max() < TOLERANCE


# -- GGUF ------------------------------------------------------------------------------------------------------------
def write_gguf(path: Path, weights: dict[str, Array], pooling: int | None, *, half: bool = False) -> None:
    """The small model as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")
    config = small_bert.settings()
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    small_bert.add_gguf_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, array in weights.items():
        matrix = array.ndim == 2 and "embeddings" not in name
        stored = array.astype(np.float16) if half and matrix else array
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored)
    finish(writer)


@pytest.mark.parametrize(("pooling", "kind"), [(1, "mean"), (2, "cls"), (3, "lasttoken"), (None, "mean")])
def test_a_gguf_file_gives_the_vectors_of_numpy(tmp_path: Path, pooling: int | None, kind: str) -> None:
    weights = small_bert.random_weights(small_bert.settings())
    write_gguf(tmp_path / "m.gguf", weights, pooling)
    model = encoder(tmp_path / "m.gguf")
    assert (model.pooling, model.normalize, model.limit) == (kind, True, 160)
    wanted = np.stack([pooled(small_bert.hidden_states(weights, tokens_of(text)), kind) for text in TEXTS])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.abs(model.embed(TEXTS) - wanted).max() < 2e-6


def test_a_gguf_file_of_halves_gives_the_vectors_of_numpy(tmp_path: Path) -> None:
    weights = small_bert.random_weights(small_bert.settings())
    write_gguf(tmp_path / "m.gguf", weights, 1, half=True)
    rounded = {n: a.astype(np.float16) if a.ndim == 2 and "embeddings" not in n else a for n, a in weights.items()}
    wanted = np.stack([pooled(small_bert.hidden_states(rounded, tokens_of(text)), "mean") for text in TEXTS])
    actual = encoder(tmp_path / "m.gguf").embed(TEXTS, normalize=False)
    assert np.abs(actual - wanted).max() / np.abs(wanted).max() < TOLERANCE


def test_attention_is_captured_without_residual_and_norm(tmp_path: Path) -> None:
    """As in decoders: norm(x + attention) and norm(· + feed-forward) give the layer, by NumPy."""
    weights = {n: a.astype(np.float64) for n, a in small_bert.write(tmp_path).items()}
    actual = encoder(tmp_path).run(tokens_of(TEXTS[0]), capture=["norm", "layers.0", "layers.0.attn", "layers.0.ffn"])

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return x * weights[f"encoder.layer.0.{name}.weight"] + weights[f"encoder.layer.0.{name}.bias"]

    inner = norm(actual["norm"] + actual["layers.0.attn"], "attention.output.LayerNorm")
    layer = norm(inner + actual["layers.0.ffn"], "output.LayerNorm")
    assert np.abs(actual["layers.0"] - layer).max() < 1e-5


# -- what is refused -------------------------------------------------------------------------------------------------
def test_a_missing_weight_names_stage_and_nearest_key(tmp_path: Path) -> None:
    small_bert.write(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.weights._names.pop("encoder.layer.1.output.dense.weight")
    with pytest.raises(FormatError, match=r"'encoder.layer.1.output.dense.weight' is not in the file") as caught:
        checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    notes = "\n".join(caught.value.notes)
    assert "did you mean" in notes and "in stage: layers.1.ffn" in notes


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    small_bert.write(tmp_path, model_type="bertt")
    with pytest.raises(CapabilityError, match="'bertt' is not supported") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint and caught.value.hint.startswith("did you mean 'bert'")
    assert "docs/adding-a-model.md" in caught.value.hint


def test_a_configuration_without_a_size_is_a_format_error(tmp_path: Path) -> None:
    small_bert.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 4}))
    with pytest.raises(FormatError, match="num_hidden_layers"):
        open_checkpoint(tmp_path)


# -- MiniLM ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def minilm() -> EmbeddingModel:
    return encoder("minilm-l6")


def pairs() -> list[tuple[str, str, float]]:
    """STS-B's test set: two sentences and how alike people find them."""
    if not STSB.exists():
        pytest.skip(f"{STSB} is absent")
    with STSB.open(encoding="utf-8", newline="") as file:
        return [(a, b, float(score)) for a, b, score in csv.reader(file)]


@pytest.mark.weights
def test_minilm_is_read_as_its_files_say(minilm: EmbeddingModel) -> None:
    assert (minilm.pooling, minilm.normalize, minilm.limit, minilm.dim) == ("mean", True, 256, 384)
    assert minilm.similarity("a cat", "a kitten") > minilm.similarity("a cat", "a tax form") + 0.3


@pytest.mark.weights
def test_minilm_gives_the_same_bits_in_any_company(minilm: EmbeddingModel) -> None:
    texts = ["a cat", "dogs bark", "A much longer sentence, with many words. " * 12, "", "one more"]
    rows = minilm.embed(texts)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    for text, row in zip(texts, rows, strict=True):
        assert np.array_equal(minilm.embed(text), row)
    assert np.array_equal(minilm.embed(texts, batch_size=2), rows)
    assert np.array_equal(encoder("minilm-l6", threads=1).embed(texts), rows)


@pytest.mark.parity
@pytest.mark.weights
def test_minilm_equals_transformers_on_a_hundred_sentences(minilm: EmbeddingModel) -> None:
    import torch

    transformers = pytest.importorskip("transformers")
    texts = [row[0] for row in pairs()[::13]][:100]
    path = minilm.checkpoint.path
    folder = path if path.is_dir() else path.parent
    model, tokenizer = theirs(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        actual = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    wanted = torch.nn.functional.normalize((actual * mask).sum(1) / mask.sum(1), dim=1).numpy()
    assert wanted.shape == (100, 384)
    assert np.abs(minilm.embed(texts) - wanted).max() < 1e-5


@pytest.mark.weights
def test_minilm_ranks_sentence_pairs_as_transformers_does(minilm: EmbeddingModel) -> None:
    from scipy.stats import spearmanr

    rows = pairs()
    assert len(rows) == 1379
    vectors = minilm.embed([a for a, _, _ in rows] + [b for _, b, _ in rows])
    first, second = np.split(vectors.astype(np.float64), 2)
    actual = spearmanr((first * second).sum(1), [score for _, _, score in rows]).statistic
    assert abs(actual - SPEARMAN) < 0.0005


def test_a_bert_that_reads_from_the_left_keeps_no_matrix_of_scores(tmp_path: Path) -> None:
    settings = json.loads((Path(__file__).parents[1] / "fixtures" / "encoders" / "bert.json").read_text())
    settings["config"]["is_decoder"] = True
    golden_encoders.write_folder(tmp_path, settings)
    checkpoint = open_checkpoint(tmp_path)
    graph = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).into_graph()
    kinds = {node.attrs["mask_kind"] for node in graph.nodes if "mask_kind" in node.attrs}
    assert kinds == {"causal+segments"}
