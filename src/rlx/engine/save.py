"""Saves a model for other programs: a Hugging Face folder, a safetensors file, or a GGUF file.

Within one format, tensors and the other files of the folder are copied unchanged. Between formats, decoders are
converted. Converted models are read back and must build the same graph, so a setting that the format cannot express
raises an error instead of saving a wrong model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import F32
from rlx.engine.apply import checked_params
from rlx.engine.save_check import atomic_path, check_same
from rlx.engine.save_gguf import write_gguf
from rlx.engine.save_tensors import FLOATS, Source, Tensor
from rlx.errors import CapabilityError, FormatError, RequestError
from rlx.formats.safetensors import DTYPES, INDEX_NAME, write_safetensors
from rlx.models.config import FULL, LINEAR, SLIDING, DecoderConfig, leaves
from rlx.models.load import Checkpoint
from rlx.types import TensorType

if TYPE_CHECKING:
    from rlx.engine.model import Model

FILE = "model.safetensors"
INVENTED = ("rope_local", "least_step", "most_step")  # prefixes of settings that rlx derives from others
# Suffixes of weight files, in this or other formats.
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index.json")


def save_model(model: Model, path: Path, params: Mapping[str, Any], kind: str | None) -> Path:
    """Write a model in the format of the path's suffix; no suffix is a folder."""
    checkpoint = model.checkpoint
    check_patch(model)
    arrays, _ = checked_params(params, checkpoint.weights, model.params, "save")
    if kind is not None and kind not in FLOATS:
        raise RequestError(f"save: dtype is {kind!r}", hint=f"known: {', '.join(FLOATS)}")
    source = Source(checkpoint, {name: Tensor.of(np.ascontiguousarray(array)) for name, array in arrays.items()})
    names = list(model.params)
    match path.suffix:
        case ".gguf":
            write_gguf(source, names, _folder_of(path) / path.name, kind)
        case ".safetensors":
            with atomic_path(_folder_of(path) / path.name) as at:
                write_safetensors(at, _for_safetensors(_tensors(source, names, kind), kind))
        case suffix if is_suffix(suffix) and not path.is_dir():
            raise RequestError(
                f"save: {path.name!r} ends in {suffix!r}, which is not a format for saving models",
                hint=".gguf, .safetensors, or a folder without a suffix",
            )
        case _:
            _write_folder(source, names, path, kind)
    return path


def is_suffix(text: str) -> bool:
    """Whether the text looks like a file suffix, unlike `.5` in `model-1.5`."""
    return len(text) > 1 and text[1].isalpha() and text[1:].isalnum()


def check_patch(model: Model) -> None:
    """Raise CapabilityError for a patched model whose graph differs from that of its files."""
    if not model.is_patched:
        return
    plain = model.unpatched_flow().profile(model.profile).build(model.checkpoint.weights)
    if plain.module != model.flow.build(model.checkpoint.weights).module:
        raise CapabilityError(
            f"save: {model.name} was loaded with a patch, which cannot be saved",
            hint="load it without patch= to save its weights",
        )


def _folder_of(path: Path) -> Path:
    if not path.parent.is_dir():
        raise FormatError(f"{path}: there is no folder {path.parent}", hint="create it first")
    if path.is_dir():
        raise FormatError(f"{path}: is a folder, expected the path of a file")
    return path.parent


# -- folders ---------------------------------------------------------------------------------------------------------
def _write_folder(source: Source, names: Sequence[str], folder: Path, kind: str | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder}: is a file, expected a folder")
    checkpoint = source.checkpoint
    tensors = _for_safetensors(_tensors(source, names, kind), kind)
    folder.mkdir(parents=True, exist_ok=True)
    copied = checkpoint.file.format == "safetensors"
    if copied:
        _copy_other_files(checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent, folder)
    else:
        _write_config_files(checkpoint, folder)
    if kind is not None:
        _set_dtype(folder / "config.json", kind)
    if copied and not getattr(checkpoint.config, "tied", True):
        _set_untied(folder / "config.json")
    if checkpoint.config.quantization is not None:
        _set_quantization(checkpoint, folder / "config.json", None if kind else tensors)
    with atomic_path(folder / FILE) as at:
        write_safetensors(at, tensors)
    for other in folder.iterdir():  # shards of an earlier model
        if other.name == INDEX_NAME or (other.suffix == ".safetensors" and other.name != FILE):
            other.unlink()
    if not copied:
        wanted = checkpoint.config.changed(**_folder_defaults(checkpoint.config))
        check_same(checkpoint, wanted, folder)


def _tensors(source: Source, names: Sequence[str], kind: str | None) -> dict[str, Tensor]:
    """The tensors to write. Without `kind`, weights and their separate scales are copied; otherwise they are joined."""
    return source.in_format("safetensors", names, joined=kind is not None)


def _for_safetensors(
    tensors: Mapping[str, Tensor], kind: str | None
) -> dict[str, tuple[TensorType, Callable[[], Array]]]:
    """Convert to types that safetensors has: quantised blocks become f32."""
    known = set(DTYPES.values())
    converted = {}
    for name, tensor in tensors.items():
        wanted = FLOATS[kind] if kind and tensor.type.dtype.kind in ("float", "packed") else tensor.type.dtype
        tensor = tensor.as_type(wanted if wanted in known else F32)
        converted[name] = tensor.type, tensor.read
    return converted


def _copy_other_files(source: Path, folder: Path) -> None:
    if folder.resolve() == source.resolve():
        return
    for path in sorted(source.rglob("*")):
        wanted = not path.name.endswith(WEIGHT_FILES) or path.parent.name.endswith("_Dense")  # layers after the pooling
        if path.is_file() and not path.name.startswith(".") and wanted:
            to = folder / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


def _set_dtype(path: Path, kind: str) -> None:
    settings = json.loads(path.read_text("utf-8"))
    settings.pop("torch_dtype", None)
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    _write_json(path, settings | {"dtype": names[kind]})


def _set_untied(path: Path) -> None:
    """Set tie_word_embeddings to False: the head is written, and loading would warn about the contradiction."""
    settings = json.loads(path.read_text("utf-8"))
    if settings.get("tie_word_embeddings"):
        _write_json(path, settings | {"tie_word_embeddings": False})


def _set_quantization(checkpoint: Checkpoint, path: Path, written: Mapping[str, Any] | None) -> None:
    """List modules with unquantised weights in the config; drop the quantisation config if `written` is None."""
    settings = json.loads(path.read_text("utf-8"))
    places = [s for s in (settings, settings.get("text_config")) if s and "quantization_config" in s]
    file = checkpoint.file
    for place in places:
        if written is None:
            del place["quantization_config"]
            continue
        unquantised = [n for n in file.names if n in written and not all(part in written for part in file.parts(n))]
        config = place["quantization_config"]
        known = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
        modules = [name.removesuffix(".weight") for name in unquantised]
        if modules:
            config["modules_to_not_convert"] = [*dict.fromkeys([*known, *modules])]
    _write_json(path, settings)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_config_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json and the tokenizer files for a model from GGUF."""
    _write_json(folder / "config.json", _settings(checkpoint))
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        return
    (folder / "tokenizer.json").write_bytes(tokenizer.to_json())
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unk_id, "pad": tokenizer.pad_id}
    named = {f"{role}_token": tokenizer.token_bytes(i).decode() for role, i in special.items() if i is not None}
    if tokenizer.chat_template is not None:
        named["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(tokenizer.stop_ids)})


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """A decoder's configuration with Hugging Face's keys."""
    c, tokenizer = checkpoint.config, checkpoint.tokenizer
    config: dict[str, Any] = {"model_type": checkpoint.family.hf[0], "dtype": "float32"}
    for leaf in leaves(type(c)):
        place, value = leaf.metadata.get("hf"), c.value(leaf)
        if place and place not in ("rope_scaling", "rope_theta") and not (value is None and leaf.default is None):
            config[place] = list(value) if isinstance(value, tuple) else value
    config |= _attention_config(c, config) if isinstance(c, DecoderConfig) else _state_space_config(c)
    for role in ("bos", "eos", "pad"):  # null if there is none: transformers has defaults per family
        config[f"{role}_token_id"] = None if tokenizer is None else getattr(tokenizer, f"{role}_id")
    return {name: value for name, value in config.items() if not name.startswith(INVENTED)}


def _state_space_config(c: Any) -> dict[str, Any]:
    """The state-space settings of Mamba models."""
    config: dict[str, Any] = {"expand": c.inner // c.dim, "intermediate_size": c.inner}
    if hasattr(c, "rank"):
        return config | {"time_step_rank": c.rank}
    max_step = {"__float__": "Infinity"} if c.most_step is None else c.most_step
    return config | {"head_dim": c.head_dim, "time_step_limit": [c.least_step, max_step]}


def _attention_config(c: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(config)
    config["head_dim"] = c.head_dim
    config["num_key_value_heads"] = c.kv_heads
    if hasattr(c, "scores") and c.scores.query_scalar is None:
        config["query_pre_attn_scalar"] = c.head_dim
    config["rope_parameters"] = _rope(c.rope_base, c.rope_scaling)
    original = config["rope_parameters"].get("original_max_position_embeddings")
    if config["model_type"] == "phi3" and original:  # phi3 reads it at the top level first
        config["original_max_position_embeddings"] = int(original)
    if hasattr(c, "delta"):
        config["layer_types"] = [FULL if c.delta.attends(i) else LINEAR for i in range(c.layers)]
    elif any(leaf.metadata.get("hf") == "layer_types" for leaf in leaves(type(c))):
        config["layer_types"] = [SLIDING if c.window(i) else FULL for i in range(c.layers)]
    if hasattr(c, "local"):  # newer files have both kinds in one object
        local = _rope(c.local.local_base, c.local.local_scaling)
        config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: local}
    return config


def _rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    settings = {name: value for name, value in (scaling or {}).items() if value is not None}
    return {"rope_theta": base, "rope_type": "default", **settings}


def _folder_defaults(c: Any) -> dict[str, Any]:
    """Defaults of the settings that GGUF changes: RoPE in halves, norms without the offset of 1."""
    return {leaf.name: leaf.default for leaf in leaves(type(c)) if leaf.name in c.IN_GGUF}
