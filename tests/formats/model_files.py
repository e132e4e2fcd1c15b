"""Model files assembled field by field for reader tests, so that any field can be wrong.

Nothing here shares code with `rlx.formats`. `ASSETS` is the folder of real files, if it exists.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.errors import NotFoundError
from rlx.formats import TensorFile
from rlx.formats.gguf import StringArray
from rlx.hub.pull import resolve

ASSETS = Path(os.environ.get("RLX_ASSETS") or Path(__file__).parents[3] / "shared" / "assets")


def asset(*parts: str) -> Path:
    """A real file; skips the test if it is missing."""
    path = ASSETS.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no {path}; set RLX_ASSETS to the folder of assets")
    return path


def pulled(name: str) -> Path:
    """A catalogue model; skips the test if it is missing."""
    try:
        return resolve(name, offline=True).path
    except NotFoundError:
        pytest.skip(f"{name} is absent: rlx pull {name}")


def replace(path: Path, data: bytes) -> Path:
    """Write a new file under this name: views of the old one stay valid, and ext4 does not wait for the disk."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def read_everything(file: TensorFile) -> int:
    """Read every byte that the API exposes; returns the number of tensors."""
    for value in file.metadata.values():
        touch(value)
    for name in file.names:
        entry = file.entry(name)
        raw = file.array(name)
        assert raw.nbytes == entry.nbytes
        values = file.dequantised(name)
        assert values.shape == entry.shape and values.dtype == np.float32
        values.tobytes()
    return len(file.names)


def touch(value: Any) -> None:
    if isinstance(value, (StringArray, tuple)):
        for inner in value:
            touch(inner)
    elif isinstance(value, np.ndarray):
        value.tobytes()
    else:
        assert isinstance(value, (bool, int, float, str, list, dict, type(None)))


# -- GGUF ------------------------------------------------------------------------------------------------------------
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def g_size(n: int, wide: bool = True) -> bytes:
    return struct.pack("<Q" if wide else "<I", n)


def g_string(text: str | bytes, wide: bool = True) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return g_size(len(data), wide) + data


def g_array(kind: int, items: Sequence[Any], wide: bool = True, count: int | None = None) -> bytes:
    """An array's element type, length and elements; inner arrays are given as bytes."""
    body = b"".join(item if kind == ARRAY else g_payload(kind, item, wide) for item in items)
    return struct.pack("<I", kind) + g_size(len(items) if count is None else count, wide) + body


def g_payload(kind: int, value: Any, wide: bool = True) -> bytes:
    if kind == STRING:
        return g_string(value, wide)
    return struct.pack("<" + CODES[kind], value)


def g_key(name: str | bytes, kind: int, payload: bytes, wide: bool = True) -> bytes:
    return g_string(name, wide) + struct.pack("<I", kind) + payload


def g_info(name: str | bytes, shape: Sequence[int], kind: int, offset: int, wide: bool = True) -> bytes:
    """A tensor info; takes a row-major shape and writes it reversed."""
    dims = b"".join(g_size(n, wide) for n in reversed(shape))
    return g_string(name, wide) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def g_file(
    keys: Sequence[bytes] = (), infos: Sequence[bytes] = (), data: bytes = b"", *, version: int = 3,
    alignment: int = 32, key_count: int | None = None, tensor_count: int | None = None,
) -> bytes:  # fmt: skip
    wide = version != 1
    head = b"GGUF" + struct.pack("<I", version)
    head += g_size(len(infos) if tensor_count is None else tensor_count, wide)
    head += g_size(len(keys) if key_count is None else key_count, wide)
    head += b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data if data else head


def small_gguf(version: int = 3) -> bytes:
    """A valid file with every kind of value and five kinds of tensor."""
    w = version != 1
    rng = np.random.default_rng(version)
    keys = [
        g_key("general.architecture", STRING, g_string("llama", w), w),
        g_key("general.alignment", U32, g_payload(U32, 32), w),
        *(g_key(f"k.{kind}", kind, g_payload(kind, 1), w) for kind in CODES),
        g_key("tokens", ARRAY, g_array(STRING, ["<s>", "é", "", "the"], w), w),
        g_key("scores", ARRAY, g_array(F32, [0.5, -1.0, 2.0, 3.0], w), w),
        g_key("flags", ARRAY, g_array(BOOL, [True, False, True], w), w),
        g_key("nested", ARRAY, g_array(ARRAY, [g_array(I32, [1, 2], w), g_array(STRING, ["x"], w)], w), w),
    ]
    parts = [
        ("plain", (3, 4), 0, rng.standard_normal(12).astype(np.float32).tobytes()),
        ("half", (2, 5), 1, rng.standard_normal(10).astype(np.float16).tobytes()),
        ("packed", (2, 64), 8, b"".join(b"\x00\x3c" + rng.bytes(32) for _ in range(4))),
        ("k", (256,), 12, b"\x00\x3c\x00\x38" + rng.bytes(140)),
        ("ids", (7,), 26, rng.integers(0, 99, 7, dtype=np.int32).tobytes()),
    ]
    infos, data = [], b""
    for name, shape, kind, raw in parts:
        data += bytes(-len(data) % 32)
        infos.append(g_info(name, shape, kind, len(data), w))
        data += raw
    return g_file(keys, infos, data, version=version)


# -- safetensors -----------------------------------------------------------------------------------------------------
def s_entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def s_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The header may be text already; `length` lies about it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def small_safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": s_entry("F32", (2, 3), 0, 24),
        "b": s_entry("BF16", (4,), 24, 32),
        "c": s_entry("F8_E4M3", (2, 2), 32, 36),
        "d": s_entry("BOOL", (3,), 36, 39),
        "e": s_entry("I64", (), 39, 47),
        "f": s_entry("F16", (0, 5), 47, 47),
    }
    data = np.random.default_rng(0).bytes(36) + b"\x00\x01\x01" + bytes(range(8))
    return s_file(header, data)


# -- llama2.c --------------------------------------------------------------------------------------------------------
L_SIZES = (8, 12, 2, 4, 2, 10, 6)  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len


def l_tensors(dim: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, tuple[int, ...]]:
    kv = dim // heads * kv_heads
    parts = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (ffn, dim), "mlp.down_proj": (dim, ffn), "mlp.up_proj": (ffn, dim),
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{n}.weight": s for n, s in parts.items() for i in range(layers)}
    embedding = (vocab, dim)
    return shapes | {"model.norm.weight": (dim,), "model.embed_tokens.weight": embedding, "lm_head.weight": embedding}


def l_file(version: int, *, shared: bool = True, sizes: tuple[int, ...] = L_SIZES) -> tuple[bytes, dict[str, Any]]:
    """A checkpoint as llama2.c's export.py writes it, and its tensors by name."""
    dim, ffn, layers, heads, kv_heads, vocab, seq = sizes
    rng = np.random.default_rng(version)
    shapes = l_tensors(dim, ffn, layers, heads, kv_heads, vocab)
    if shared:
        del shapes["lm_head.weight"]
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def every(*parts: str) -> Iterable[str]:
        return (f"model.layers.{i}.{part}.weight" for part in parts for i in range(layers))

    attention = every("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = every("mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
    first, second = every("input_layernorm"), every("post_attention_layernorm")
    end = [] if shared else ["lm_head.weight"]

    def joined(names: Iterable[str]) -> bytes:
        return b"".join(tensors[n].tobytes() for n in names)

    if version == 0:
        signed = vocab if shared else -vocab
        head = struct.pack("<7i", dim, ffn, layers, heads, kv_heads, signed, seq)
        body = joined(["model.embed_tokens.weight", *first, *attention, *second, *mlp, "model.norm.weight"])
        tables = np.full(seq * (dim // heads // 2) * 2, 7, np.float32).tobytes()
        return head + body + tables + joined(end), tensors
    head = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, shared).ljust(256, b"\0")
    order = [*first, *second, "model.norm.weight", "model.embed_tokens.weight", *attention, *mlp, *end]
    return head + joined(order), tensors
