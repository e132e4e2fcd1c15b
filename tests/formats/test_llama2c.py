"""llama2.c checkpoints: the layouts of its export.py, and three formats of stories260K, bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import L_SIZES, asset, l_file, read_everything, replace

from rlx.errors import FormatError
from rlx.formats import TensorFile, open_gguf, open_llama2c

HF_OF_GGUF = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj",
}  # fmt: skip


def opened(tmp_path: Path, data: bytes) -> TensorFile:
    return open_llama2c(replace(tmp_path / "model.bin", data))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_tensors_have_the_names_and_shapes_of_hugging_face(tmp_path: Path, version: int, shared: bool) -> None:
    data, tensors = l_file(version, shared=shared)
    file = opened(tmp_path, data)
    assert set(file.names) == set(tensors)
    for name, values in tensors.items():
        assert file.entry(name).shape == values.shape and np.array_equal(file.array(name), values)
    assert file.metadata["tie_word_embeddings"] is shared and file.metadata["vocab_size"] == 10
    assert (file.metadata["num_key_value_heads"], file.metadata["llama2c.version"]) == (2, version)
    assert ("lm_head.weight" in file) is not shared
    assert read_everything(file) == len(tensors)


def test_the_three_files_of_stories260k_hold_the_same_bits() -> None:
    legacy = open_llama2c(asset("stories260K", "stories260K.bin"))
    first = open_llama2c(asset("stories260K", "stories260K_v1.bin"))
    gguf = open_gguf(asset("stories260K", "tinyllamas-stories-260k-f32.gguf"))
    assert set(legacy.names) == set(first.names) and len(legacy) == 47
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {
        f"blk.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for ours, theirs in HF_OF_GGUF.items()
        for i in range(5)
    }
    assert set(gguf.names) == set(names) | {"output.weight"}
    for ours, theirs in names.items():
        assert gguf.entry(ours).shape == legacy.entry(theirs).shape == first.entry(theirs).shape
        assert gguf.array(ours).tobytes() == legacy.array(theirs).tobytes() == first.array(theirs).tobytes()
    # The .bin files tie the classifier to the embedding; the GGUF stores a copy instead.
    assert gguf.array("output.weight").tobytes() == gguf.array("token_embd.weight").tobytes()


def test_the_metadata_of_stories260k_is_its_config() -> None:
    a = open_llama2c(asset("stories260K", "stories260K.bin")).metadata
    b = open_llama2c(asset("stories260K", "stories260K_v1.bin")).metadata
    gguf = open_gguf(asset("stories260K", "tinyllamas-stories-260k-f32.gguf")).metadata
    assert {**a, "llama2c.version": 1} == dict(b)
    assert (a["hidden_size"], a["intermediate_size"], a["num_hidden_layers"]) == (64, 172, 5)
    assert (a["num_attention_heads"], a["num_key_value_heads"]) == (8, 4)
    assert a["max_position_embeddings"] == gguf["llama.context_length"]
    assert a["rms_norm_eps"] == pytest.approx(gguf["llama.attention.layer_norm_rms_epsilon"])


def changed(version: int, **sizes: int) -> bytes:
    """A valid file with a modified header."""
    names = ("dim", "ffn", "layers", "heads", "kv_heads", "vocab", "seq")
    values = [sizes.get(name, size) for name, size in zip(names, L_SIZES, strict=True)]
    data, _ = l_file(version)
    at = 8 if version else 0
    return data[:at] + struct.pack("<7i", *values) + data[at + 28 :]


BROKEN: dict[str, tuple[bytes, str]] = {
    "short": (bytes(27), "byte 0: header: expected 28 bytes, found a file of 27"),
    "short v1": (l_file(1)[0][:255], "header: expected 256 bytes, found a file of 255"),
    "version 2": (struct.pack("<Ii", 0x616B3432, 2) + bytes(300), "byte 4: llama2.c version: expected 1, found 2"),
    "version 9": (struct.pack("<Ii", 0x616B3432, 9) + bytes(300), "expected 1, found 9"),
    "shared 2": (l_file(1)[0][:36] + b"\2" + l_file(1)[0][37:], "byte 36: shared classifier: expected 0 or 1, found 2"),
    "no dim": (changed(0, dim=0), "byte 0: header dim: expected 1 or more, found 0"),
    "no vocab": (changed(0, vocab=0), "byte 20: header vocab_size: expected 1 or more, found 0"),
    "negative vocab in v1": (changed(1, vocab=-10), "byte 28: header vocab_size: expected 1 or more, found -10"),
    "negative layers": (changed(0, layers=-1), "byte 8: header n_layers: expected 1 or more, found -1"),
    "many layers": (changed(1, layers=2**31 - 1), "byte 16: header n_layers: expected at most 4096, found 2147483647"),
    "heads": (changed(0, heads=3), "header dim: expected heads of one even size, found 8 in 3 heads"),
    "odd heads": (changed(0, heads=8), "expected heads of one even size, found 8 in 8 heads"),
    "kv heads": (changed(0, kv_heads=3), "n_heads: expected a multiple of n_kv_heads, found 4 and 3"),
    "more kv heads": (changed(0, kv_heads=8), "expected a multiple of n_kv_heads, found 4 and 8"),
    "large ffn": (changed(0, ffn=2**31 - 1), "size of the file, for .* expected .* bytes, found"),
    "own classifier": (changed(0, vocab=-10), "size of the file"),
    "smallest vocab": (changed(0, vocab=-(2**31)), "size of the file"),
    "cut": (l_file(0)[0][:-1], "size of the file"),
    "cut v1": (l_file(1)[0][:-4], "size of the file"),
    "rest": (l_file(0)[0] + b"\0", "size of the file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_says_where_and_what(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, data)
    assert "model.bin" in str(caught.value)


@pytest.mark.parametrize("version", [0, 1])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, version: int) -> None:
    data: Any = l_file(version)[0]
    for end in [*range(300), *range(300, len(data), 97)]:
        with pytest.raises(FormatError):
            opened(tmp_path, data[:end])
