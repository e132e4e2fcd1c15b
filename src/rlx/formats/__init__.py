"""Readers for GGUF, safetensors and llama2.c model files; each returns a `TensorFile`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.formats.tensor_file import PathLike, TensorEntry, TensorFile, broken, open_bytes

if TYPE_CHECKING:
    from rlx.formats.gguf import open_gguf
    from rlx.formats.gguf_quants import dequantise
    from rlx.formats.llama2c import open_llama2c
    from rlx.formats.safetensors import open_safetensors

__all__ = [
    "TensorEntry",
    "TensorFile",
    "dequantise",
    "open_gguf",
    "open_llama2c",
    "open_safetensors",
    "open_tensors",
]

# Imported on first use: a model loaded from a snapshot needs none of the readers.
_LAZY = {"open_gguf": "gguf", "open_llama2c": "llama2c", "open_safetensors": "safetensors", "dequantise": "gguf_quants"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def open_tensors(path: PathLike, *, mapped: bool = True) -> TensorFile:
    """Open a GGUF or safetensors file, a shard index, a llama2.c `.bin`, or a folder that holds one model."""
    from rlx.formats import gguf, llama2c, safetensors

    file = Path(path)
    if os.path.isdir(file):
        file = _find_model(file)
    if file.name.endswith((".safetensors", ".json")):
        return safetensors.open_safetensors(file, mapped=mapped)
    start = bytes(open_bytes(file).view[:8])
    if start[:4] == gguf.MAGIC:
        return gguf.open_gguf(file, mapped=mapped)
    other = _identify_foreign(file.suffix.lower(), start)
    if other is not None:
        raise broken(file, f"{other[0]}: rlx does not read it", hint=other[1])
    if file.suffix == ".bin":
        return llama2c.open_llama2c(file, mapped=mapped)
    magic = start[:4]
    if magic == b"RLXP":
        hint = "rlx.load_exported(path) runs it, and rlx inspect shows it if it is named .rlxp"
        raise broken(file, "an export of rlx, with machine code in place of a model's file", hint=hint)
    raise broken(file, "not a known model file", at=0, expected="GGUF, safetensors or a llama2.c .bin", actual=magic)


_CONVERT = "transformers writes it as safetensors: AutoModel.from_pretrained(folder).save_pretrained(other)"
_PICKLE = "a pickle of PyTorch, which can run code when it is opened", _CONVERT
_OTHER = "look for its GGUF or safetensors files"


def _identify_foreign(suffix: str, start: bytes) -> tuple[str, str] | None:
    """Identify an unsupported format by its first bytes or suffix: returns a description and a hint."""
    if start.startswith((b"PK\x03\x04", b"\x80")) and suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        return _PICKLE
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return "an HDF5 file of Keras or TensorFlow", _OTHER
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):  # ggml, ggmf, ggjt and ggla, little endian
        return "a file of ggml from before GGUF, such as rwkv.cpp's", "convert the original model with llama.cpp"
    match suffix:
        case ".onnx":
            return "an ONNX graph", "look for the model that it was exported from"
        case ".h5" | ".keras":
            return "a file of Keras or TensorFlow", _OTHER
        case ".ckpt" | ".pkl" | ".pt" | ".pth":
            return "a checkpoint of another program", _CONVERT
        case ".msgpack":
            return "a file of Flax", _OTHER
    return None


def _reject_foreign(folder: Path, files: list[Path]) -> None:
    """Raise if a folder without supported weights holds weights in a known foreign format."""
    for path in files:
        if path.suffix.lower() in (".bin", ".pt", ".pth", ".onnx", ".h5", ".keras", ".ckpt", ".pkl", ".msgpack"):
            start = bytes(open_bytes(path).view[:8]) if path.is_file() else b""
            other = _identify_foreign(path.suffix.lower(), start)
            if other is not None:
                raise broken(folder, f"{path.name} is {other[0]}: rlx does not read it", hint=other[1])


def _find_model(folder: Path) -> Path:
    from rlx.formats.gguf import is_later_part
    from rlx.formats.safetensors import INDEX_NAME

    for name in (INDEX_NAME, "model.safetensors"):
        if os.path.exists(folder / name):
            return folder / name
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise broken(folder, f"the folder cannot be read: {error.strerror}") from error
    candidates = [p for p in files if p.suffix in (".safetensors", ".gguf") and not is_later_part(p)]
    if not candidates:
        _reject_foreign(folder, files)
    if len(candidates) != 1:
        names = ", ".join(p.name for p in candidates[:8]) or "none"
        raise broken(folder, "model files in the folder", expected=f"{INDEX_NAME} or one model file", actual=names)
    return candidates[0]
