"""From a path to a checkpoint: the file, its family, its configuration, its weights by name and its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlx.models.bert
import rlx.models.llama
import rlx.models.qwen2  # noqa: F401  declares the family
from rlx.errors import FormatError
from rlx.flow.weights import Array
from rlx.formats import TensorFile, open_tensors
from rlx.formats.strict_json import parse_json
from rlx.formats.tokenizer import Tokenizer
from rlx.models import config as configs
from rlx.models.family import Family, FileWeights, find


@dataclass(frozen=True)
class Checkpoint:
    """An opened model."""

    path: Path
    file: TensorFile
    family: Family
    config: Any
    weights: FileWeights
    tokenizer: Tokenizer | None
    rope_factors: Array | None = None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a llama2.c file or a Hugging Face folder."""
    where = Path(path)
    file = open_tensors(where)
    match file.format:
        case "gguf":
            return _from_gguf(where, file)
        case "llama2c":
            return _from_hf(where, file, file.metadata, _llama2c_tokenizer(where, file.metadata["vocab_size"]))
        case _:
            folder = where if where.is_dir() else where.parent
            settings = _settings(folder / "config.json")
            tokenizer = folder / "tokenizer.json"
            return _from_hf(where, file, settings, Tokenizer.from_json(tokenizer) if tokenizer.exists() else None)


def _from_gguf(path: Path, file: TensorFile) -> Checkpoint:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise FormatError(f"{path}: the metadata has no general.architecture")
    family = find(architecture, "gguf")
    config: Any = configs.from_gguf(family.config, metadata, str(path))
    weights = FileWeights(file, family.weights, config.layers)
    if family.kind == "decoder":
        table = weights.type("model.embed_tokens.weight")
        config = dataclasses.replace(
            config, vocab=table.shape[0], tied=not weights.has("lm_head.weight"), pairs=family.name == "llama"
        )
    factors = file.dequantised("rope_freqs.weight") if "rope_freqs.weight" in file else None
    tokenizer = Tokenizer.from_gguf(metadata, source=path)
    return Checkpoint(path, file, family, config, weights, tokenizer, factors)


def _from_hf(path: Path, file: TensorFile, settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> Checkpoint:
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        raise FormatError(f"{path}: config.json has no model_type")
    family = find(kind, "hf")
    config: Any = configs.from_hf(family.config, _older_names(settings), str(path))
    weights = FileWeights(file, family.weights, config.layers)
    return Checkpoint(path, file, family, config, weights, tokenizer)


def _older_names(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer configurations keep all that is said of RoPE in one object; older ones in two places."""
    rope = settings.get("rope_parameters")
    if not isinstance(rope, dict):
        return settings
    return {**settings, "rope_theta": rope.get("rope_theta"), "rope_scaling": rope}


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: is not a JSON object")
    return found


def _llama2c_tokenizer(path: Path, vocab: int) -> Tokenizer | None:
    """llama2.c keeps the vocabulary beside the model."""
    for name in ("tok512.bin", "tokenizer.bin"):
        if (path.parent / name).exists():
            return Tokenizer.from_tok512(path.parent / name, vocab)
    return None
