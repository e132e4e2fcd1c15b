"""Unsupported model formats, alone or in a folder: errors name them and say what to do."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest

import rlx
from rlx.errors import FormatError
from rlx.formats import open_tensors

HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(64)
RWKV = (0x67676D66).to_bytes(4, "little") + (101).to_bytes(4, "little") + bytes(64)
FILES: dict[str, tuple[str, bytes, str]] = {
    "pickle": ("pytorch_model.bin", pickle.dumps({"w": 1}), "a pickle of PyTorch"),
    "pkl": ("model.pkl", pickle.dumps({"w": 1}), "a pickle of PyTorch"),
    "checkpoint": ("model.ckpt", pickle.dumps({"w": 1}), "a pickle of PyTorch"),
    "old checkpoint": ("model.ckpt", b"\x00\x01\x02\x03" + bytes(64), "a checkpoint of another program"),
    "onnx": ("model.onnx", b"\x08\x07\x12\x07pytorch" + bytes(64), "an ONNX graph"),
    "keras": ("tf_model.h5", HDF5, "an HDF5 file of Keras or TensorFlow"),
    "rwkv.cpp": ("rwkv.bin", RWKV, "a file of ggml from before GGUF, such as rwkv.cpp's"),
    "flax": ("flax_model.msgpack", b"\x83\xa4" + bytes(64), "a file of Flax"),
}


def write(path: Path, name: str) -> Path:
    file, content, _ = FILES[name]
    (path / file).write_bytes(content)
    return path / file


@pytest.mark.parametrize("name", FILES)
def test_a_file_and_a_folder_with_nothing_else_say_the_same(tmp_path: Path, name: str) -> None:
    file, says = write(tmp_path, name), FILES[name][2]
    (tmp_path / "config.json").write_text("{}")
    hints = []
    for path in (file, tmp_path):
        with pytest.raises(FormatError) as caught:
            open_tensors(path)
        assert f"{says}" in str(caught.value) and "rlx does not read it" in str(caught.value)
        hints.append(caught.value.hint)
    assert hints[0] == hints[1] and hints[0]
    with pytest.raises(FormatError, match="rlx does not read it"):
        rlx.load(tmp_path)


def test_a_zip_of_pytorch_is_a_pickle_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", b"x")
    with pytest.raises(FormatError, match="a pickle of PyTorch") as caught:
        open_tensors(tmp_path)
    assert "save_pretrained" in str(caught.value.hint)


def test_safetensors_next_to_a_pickle_are_read(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    write(tmp_path, "pickle")
    save_file({"w": np.ones(3, np.float32)}, str(tmp_path / "model.safetensors"))
    assert open_tensors(tmp_path).names == ("w",) or list(open_tensors(tmp_path).names) == ["w"]
