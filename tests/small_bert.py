"""A small random BERT as files, with a tokenizer of a hundred words, and what it gives, in NumPy's float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import erf

Array = np.ndarray[Any, Any]
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmns"]  # bal, bam, ...
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##la", "##mo"]
CLS, SEP = 2, 3
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
ST = "sentence_transformers.models"


def settings(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    return {
        "model_type": "bert", "vocab_size": len(VOCAB), "max_position_embeddings": 160, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu", **SIZES, **changes,
    }  # fmt: skip


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Weights under Hugging Face's names; biases and norms are random too."""
    rng = np.random.default_rng(seed)
    dim, ffn = config["hidden_size"], config["intermediate_size"]

    def normal(*shape: int, mean: float = 0.0, spread: float = 0.3) -> Array:
        return (mean + spread * rng.standard_normal(shape)).astype(np.float32)

    weights: dict[str, Array] = {}

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = normal(dim, mean=1.0), normal(dim)

    for name, rows in {
        "word": "vocab_size",
        "position": "max_position_embeddings",
        "token_type": "type_vocab_size",
    }.items():
        weights[f"embeddings.{name}_embeddings.weight"] = normal(config[rows], dim)
    norm("embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        shapes = {f"attention.self.{n}": (dim, dim) for n in ("query", "key", "value")}
        shapes |= {"attention.output.dense": (dim, dim), "intermediate.dense": (ffn, dim), "output.dense": (dim, ffn)}
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"] = normal(*shape, spread=shape[1] ** -0.5)
            weights[f"{layer}.{name}.bias"] = normal(shape[0])
        norm(f"{layer}.attention.output.LayerNorm")
        norm(f"{layer}.output.LayerNorm")
    return weights


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    rust = Tokenizer(WordPiece({word: i for i, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    rust.normalizer, rust.pre_tokenizer = BertNormalizer(lowercase=False), BertPreTokenizer()
    rust.add_special_tokens(VOCAB[:5])
    rust.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    rust.save(str(folder / "tokenizer.json"))


def add_gguf_vocabulary(writer: Any) -> None:
    """The same words as llama.cpp's converter writes them."""
    words = [w if w[0] == "[" else w.removeprefix("##") if w[0] == "#" else f"\u2581{w}" for w in VOCAB]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(words)
    writer.add_token_types([3 if w[0] == "[" else 1 for w in VOCAB])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)


def write(folder: Path, *, files: Mapping[str, Any] | None = None, seed: int = 0, **changes: Any) -> dict[str, Array]:
    """A model in a folder, with these further JSON files; gives its weights."""
    from safetensors.numpy import save_file

    config = settings(**changes)
    weights = random_weights(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    write_tokenizer(folder)
    for name, content in {"config.json": config, **(sentence_transformers() if files is None else files)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return weights


def sentence_transformers(kind: str = "mean", *, normalize: bool = True, **transformer: Any) -> dict[str, Any]:
    """The files that sentence-transformers keeps beside a model."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"{ST}.{name}"}
        for i, name in enumerate(modules)
    ]
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode": kind}
    result = {"modules.json": entries, "1_Pooling/config.json": pooling}
    return result | ({"sentence_bert_config.json": transformer} if transformer else {})


def tokens_of(text: str) -> list[int]:
    """The ids of words of the vocabulary with spaces between them."""
    return [CLS, *(VOCAB.index(word) for word in text.split()), SEP]


def hidden_states(weights: Mapping[str, Array], tokens: Sequence[int], heads: int = 3, eps: float = 1e-12) -> Array:
    """[seq, hidden] of one text, by the formulas of the paper, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def linear(x: Array, name: str) -> Array:
        result: Array = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        return result

    def norm(x: Array, name: str) -> Array:
        result: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return result * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][list(tokens)] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + w["embeddings.position_embeddings.weight"][: len(tokens)], "embeddings.LayerNorm")
    for i in range(sum(name.endswith("query.weight") for name in w)):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{layer}.attention.self.{n}").reshape(len(tokens), heads, -1).swapaxes(0, 1)
            for n in ("query", "key", "value")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        seen = ((scores / scores.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(len(tokens), -1)
        x = norm(x + linear(seen, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.intermediate.dense")
        inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


def pooled(states: Array, kind: str) -> Array:
    """[hidden] of one text's states."""
    places = np.arange(1, len(states) + 1)[:, None]
    result: Array = {
        "mean": states.mean(0), "mean_sqrt_len_tokens": states.sum(0) / np.sqrt(len(states)), "cls": states[0],
        "lasttoken": states[-1], "max": states.max(0), "weightedmean": (states * places).sum(0) / places.sum(),
    }[kind]  # fmt: skip
    return result
