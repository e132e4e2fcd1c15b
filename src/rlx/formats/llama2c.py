"""llama2.c: Karpathy's `.bin` checkpoints in float32, legacy layout and version 1.

Tensors get the names and shapes of Hugging Face's Llama, and `metadata` matches its `config.json`, with one difference:
q_proj and k_proj rows are in the order of Meta's checkpoints, so RoPE rotates neighbouring pairs instead of halves
(`rope_interleaved`). The layouts are those of `legacy_export` and `version1_export` in llama2.c's `export.py`; the
legacy RoPE tables are skipped, as in `run.c`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from rlx.dtypes import F32
from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import FileBytes, PathLike, TensorEntry, TensorFile, broken, open_bytes

MAGIC = 0x616B3432  # "ak42"
_V1_HEADER = 256
_SIZES = struct.Struct("<7i")
_MAX_LAYERS = 4096

_Shape = tuple[int, ...]
_Layout = list[tuple[str | None, _Shape]]  # in file order; None is skipped


@dataclass(frozen=True, slots=True)
class _Config:
    version: int  # 0 is the legacy layout
    dim: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied: bool

    @property
    def kv_dim(self) -> int:
        return self.dim // self.heads * self.kv_heads

    def metadata(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,  # this and rope_theta are constants in run.c
            "rope_theta": 10000.0,
            "rope_interleaved": True,
            "llama2c.version": self.version,
        }


def open_llama2c(path: PathLike, *, mapped: bool = True) -> TensorFile:
    """Open a llama2.c checkpoint; `lm_head.weight` exists only if the classifier is not tied to the embedding."""
    file = open_bytes(path, mapped=mapped)
    config, start = _read_header(file)
    layout = _legacy_layout(config) if config.version == 0 else _v1_layout(config)
    expected = start + 4 * sum(math.prod(shape) for _, shape in layout)
    if expected != file.size:
        raise broken(file.path, f"size of the file, for {config}", expected=f"{expected} bytes", actual=file.size)
    entries, at = [], start
    for name, shape in layout:
        nbytes = 4 * math.prod(shape)
        if name is not None:
            entries.append(TensorEntry(name, shape, F32, at, nbytes, file.path))
        at += nbytes
    return TensorFile(file.path, "llama2c", entries, config.metadata(), [file])


# -- headers ---------------------------------------------------------------------------------------------------------
def _read_header(file: FileBytes) -> tuple[_Config, int]:
    if file.size < _SIZES.size:
        raise broken(file.path, "header", at=0, expected=f"{_SIZES.size} bytes", actual=f"a file of {file.size}")
    magic, version = struct.unpack_from("<Ii", file.view)
    if magic != MAGIC:
        sizes = _SIZES.unpack_from(file.view)
        vocab = sizes[5]  # positive if the classifier is tied to the embedding
        return _check_config(file.path, 0, (*sizes[:5], abs(vocab), sizes[6]), vocab > 0, at=0), _SIZES.size
    if version != 1:
        hint = "version 2 is int8: export the model again with --version 1" if version == 2 else None
        raise broken(file.path, "llama2.c version", at=4, expected=1, actual=version, hint=hint)
    if file.size < _V1_HEADER:
        raise broken(file.path, "header", at=0, expected=f"{_V1_HEADER} bytes", actual=f"a file of {file.size}")
    sizes = _SIZES.unpack_from(file.view, 8)
    shared = file.view[36]
    if shared > 1:
        raise broken(file.path, "shared classifier", at=36, expected="0 or 1", actual=shared)
    return _check_config(file.path, 1, sizes, bool(shared), at=8), _V1_HEADER


def _check_config(path: Path, version: int, sizes: tuple[int, ...], tied: bool, at: int) -> _Config:
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < 1:
            raise broken(path, f"header {name}", at=at + 4 * i, expected="1 or more", actual=size)
    dim, ffn, layers, heads, kv_heads, vocab, context = sizes
    config = _Config(version, dim, ffn, layers, heads, kv_heads, vocab, context, tied)
    if config.layers > _MAX_LAYERS:
        raise broken(path, "header n_layers", at=at + 8, expected=f"at most {_MAX_LAYERS}", actual=config.layers)
    if config.dim % config.heads or config.dim // config.heads % 2:
        actual = f"{config.dim} in {config.heads} heads"
        raise broken(path, "header dim", at=at, expected="heads of one even size", actual=actual)
    if config.heads % config.kv_heads:
        actual = f"{config.heads} and {config.kv_heads}"
        raise broken(path, "header n_heads", at=at + 12, expected="a multiple of n_kv_heads", actual=actual)
    return config


# -- layouts ---------------------------------------------------------------------------------------------------------
def _every_layer(c: _Config, part: str, *shape: int) -> _Layout:
    return [(f"model.layers.{i}.{part}.weight", shape) for i in range(c.layers)]


def _attention(c: _Config) -> _Layout:
    return [
        *_every_layer(c, "self_attn.q_proj", c.dim, c.dim),
        *_every_layer(c, "self_attn.k_proj", c.kv_dim, c.dim),
        *_every_layer(c, "self_attn.v_proj", c.kv_dim, c.dim),
        *_every_layer(c, "self_attn.o_proj", c.dim, c.dim),
    ]


def _mlp(c: _Config) -> _Layout:
    return [
        *_every_layer(c, "mlp.gate_proj", c.ffn, c.dim),
        *_every_layer(c, "mlp.down_proj", c.dim, c.ffn),
        *_every_layer(c, "mlp.up_proj", c.ffn, c.dim),
    ]


def _classifier(c: _Config) -> _Layout:
    return [] if c.tied else [("lm_head.weight", (c.vocab, c.dim))]


def _legacy_layout(c: _Config) -> _Layout:
    rotary = (c.context, c.dim // c.heads // 2)
    return [
        ("model.embed_tokens.weight", (c.vocab, c.dim)),
        *_every_layer(c, "input_layernorm", c.dim),
        *_attention(c),
        *_every_layer(c, "post_attention_layernorm", c.dim),
        *_mlp(c),
        ("model.norm.weight", (c.dim,)),
        (None, rotary),  # cos
        (None, rotary),  # sin
        *_classifier(c),
    ]


def _v1_layout(c: _Config) -> _Layout:
    return [
        *_every_layer(c, "input_layernorm", c.dim),
        *_every_layer(c, "post_attention_layernorm", c.dim),
        ("model.norm.weight", (c.dim,)),
        ("model.embed_tokens.weight", (c.vocab, c.dim)),
        *_attention(c),
        *_mlp(c),
        *_classifier(c),
    ]
