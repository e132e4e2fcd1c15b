"""Saving a model for other programs: a folder of Hugging Face, its weights alone, or a GGUF file.

A model stays in the format that it came in as far as that is possible: tensors are copied as they are, and so are the
files beside them. From one format to the other, decoders are rewritten. What was written is read again and must give
the same graph, so a setting that a format has no word for is an error and not a wrong model.
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
from rlx.engine.save_check import check_same, replacing
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
INVENTED = ("rope_local", "least_step", "most_step")  # names of settings that rlx reads out of others
# Files beside a model that hold weights, in this or other formats.
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index.json")


def save_model(model: Model, path: Path, params: Mapping[str, Any], kind: str | None) -> Path:
    """Write a model; the suffix of the path says as what, and no suffix is a folder."""
    checkpoint = model.checkpoint
    check_patch(model)
    given, _ = checked_params(params, checkpoint.weights, model.params, "save")
    if kind is not None and kind not in FLOATS:
        raise RequestError(f"save: dtype is {kind!r}", hint=f"known: {', '.join(FLOATS)}")
    source = Source(checkpoint, {name: Tensor.of(np.ascontiguousarray(array)) for name, array in given.items()})
    names = list(model.params)
    match path.suffix:
        case ".gguf":
            write_gguf(source, names, _folder_of(path) / path.name, kind)
        case ".safetensors":
            with replacing(_folder_of(path) / path.name) as at:
                write_safetensors(at, _for_safetensors(_tensors(source, names, kind), kind))
        case suffix if is_suffix(suffix) and not path.is_dir():
            raise RequestError(
                f"save: {path.name!r} ends in {suffix!r}, which is no format that models are saved in",
                hint=".gguf, .safetensors, or a folder without a suffix",
            )
        case _:
            _write_folder(source, names, path, kind)
    return path


def is_suffix(text: str) -> bool:
    """Whether the end of a name is meant as that of a file, unlike `.5` in `model-1.5`."""
    return len(text) > 1 and text[1].isalpha() and text[1:].isalnum()


def check_patch(model: Model) -> None:
    """Refuse a model that computes something else than its file says: a patch cannot be saved."""
    if model._patch is None:
        return
    plain = model._flow().profile(model.profile).build(model.checkpoint.weights)
    if plain.module != model.flow.build(model.checkpoint.weights).module:
        raise CapabilityError(
            f"save: {model.name} was loaded with a patch, which no file of a model can hold",
            hint="load it without patch= to save its weights",
        )


def _folder_of(path: Path) -> Path:
    if not path.parent.is_dir():
        raise FormatError(f"{path}: there is no folder {path.parent}", hint="make it first")
    if path.is_dir():
        raise FormatError(f"{path}: is a folder, wanted the path of a file")
    return path.parent


# -- folders ---------------------------------------------------------------------------------------------------------
def _write_folder(source: Source, names: Sequence[str], folder: Path, kind: str | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder}: is a file, wanted a folder")
    checkpoint = source.checkpoint
    tensors = _for_safetensors(_tensors(source, names, kind), kind)
    folder.mkdir(parents=True, exist_ok=True)
    copied = checkpoint.file.format == "safetensors"
    if copied:
        _copy_beside(checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent, folder)
    else:
        _write_beside(checkpoint, folder)
    if kind is not None:
        _say_type(folder / "config.json", kind)
    if copied and not getattr(checkpoint.config, "tied", True):
        _say_untied(folder / "config.json")
    if checkpoint.config.quantization is not None:
        _say_quantization(checkpoint, folder / "config.json", None if kind else tensors)
    with replacing(folder / FILE) as at:
        write_safetensors(at, tensors)
    for other in folder.iterdir():  # shards of what was there before
        if other.name == INDEX_NAME or (other.suffix == ".safetensors" and other.name != FILE):
            other.unlink()
    if not copied:
        wanted = checkpoint.config.changed(**_plain(checkpoint.config))
        check_same(checkpoint, wanted, folder)


def _tensors(source: Source, names: Sequence[str], kind: str | None) -> dict[str, Tensor]:
    """Weights with scales of their own are copied as they are, or are one number per element in another type."""
    return source.in_format("safetensors", names, joined=kind is not None)


def _for_safetensors(
    tensors: Mapping[str, Tensor], kind: str | None
) -> dict[str, tuple[TensorType, Callable[[], Array]]]:
    """With types that safetensors has: blocks become f32."""
    known = set(DTYPES.values())
    found = {}
    for name, tensor in tensors.items():
        wanted = FLOATS[kind] if kind and tensor.type.dtype.kind in ("float", "packed") else tensor.type.dtype
        made = tensor.as_type(wanted if wanted in known else F32)
        found[name] = made.type, made.read
    return found


def _copy_beside(source: Path, folder: Path) -> None:
    if folder.resolve() == source.resolve():
        return
    for path in sorted(source.rglob("*")):
        kept = not path.name.endswith(WEIGHT_FILES) or path.parent.name.endswith("_Dense")  # behind the pooling
        if path.is_file() and not path.name.startswith(".") and kept:
            to = folder / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


def _say_type(path: Path, kind: str) -> None:
    settings = json.loads(path.read_text("utf-8"))
    settings.pop("torch_dtype", None)
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    _write_json(path, settings | {"dtype": names[kind]})


def _say_untied(path: Path) -> None:
    """A head of its own is written, whatever the folder that the model came from says: it would be warned of again."""
    settings = json.loads(path.read_text("utf-8"))
    if settings.get("tie_word_embeddings"):
        _write_json(path, settings | {"tie_word_embeddings": False})


def _say_quantization(checkpoint: Checkpoint, path: Path, written: Mapping[str, Any] | None) -> None:
    """Name the modules whose weights were replaced by plain numbers; with nothing `written` as it was, all are."""
    settings = json.loads(path.read_text("utf-8"))
    places = [s for s in (settings, settings.get("text_config")) if s and "quantization_config" in s]
    file = checkpoint.file
    for place in places:
        if written is None:
            del place["quantization_config"]
            continue
        replaced = [n for n in file.names if n in written and not all(part in written for part in file.parts(n))]
        said = place["quantization_config"]
        known = said.get("modules_to_not_convert") or said.get("ignored_layers") or []
        modules = [name.removesuffix(".weight") for name in replaced]
        if modules:
            said["modules_to_not_convert"] = [*dict.fromkeys([*known, *modules])]
    _write_json(path, settings)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_beside(checkpoint: Checkpoint, folder: Path) -> None:
    """config.json and tokenizer files of a model that came without them."""
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
    """A decoder's configuration in the words of Hugging Face."""
    c, tokenizer = checkpoint.config, checkpoint.tokenizer
    said: dict[str, Any] = {"model_type": checkpoint.family.hf[0], "dtype": "float32"}
    for leaf in leaves(type(c)):
        place, value = leaf.metadata.get("hf"), c.value(leaf)
        if place and place not in ("rope_scaling", "rope_theta") and not (value is None and leaf.default is None):
            said[place] = list(value) if isinstance(value, tuple) else value
    said |= _of_attention(c, said) if isinstance(c, DecoderConfig) else _of_states(c)
    for role in ("bos", "eos", "pad"):  # null where there is none: families have numbers of their own
        said[f"{role}_token_id"] = None if tokenizer is None else getattr(tokenizer, f"{role}_id")
    return {name: value for name, value in said.items() if not name.startswith(INVENTED)}


def _of_states(c: Any) -> dict[str, Any]:
    """What Mamba's models have instead of attention."""
    said: dict[str, Any] = {"expand": c.inner // c.dim, "intermediate_size": c.inner}
    if hasattr(c, "rank"):
        return said | {"time_step_rank": c.rank}
    most = {"__float__": "Infinity"} if c.most_step is None else c.most_step
    return said | {"head_dim": c.head_dim, "time_step_limit": [c.least_step, most]}


def _of_attention(c: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    said = dict(said)
    said["head_dim"] = c.head_dim
    said["num_key_value_heads"] = c.kv_heads
    if hasattr(c, "scores") and c.scores.query_scalar is None:
        said["query_pre_attn_scalar"] = c.head_dim
    said["rope_parameters"] = _rope(c.rope_base, c.rope_scaling)
    original = said["rope_parameters"].get("original_max_position_embeddings")
    if said["model_type"] == "phi3" and original:  # whose place is beside the others, and counts before this one
        said["original_max_position_embeddings"] = int(original)
    if hasattr(c, "delta"):
        said["layer_types"] = [FULL if c.delta.attends(i) else LINEAR for i in range(c.layers)]
    elif any(leaf.metadata.get("hf") == "layer_types" for leaf in leaves(type(c))):
        said["layer_types"] = [SLIDING if c.window(i) else FULL for i in range(c.layers)]
    if hasattr(c, "local"):  # newer files keep both kinds together
        local = _rope(c.local.local_base, c.local.local_scaling)
        said["rope_parameters"] = {FULL: said["rope_parameters"], SLIDING: local}
    return said


def _rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {name: value for name, value in (scaling or {}).items() if value is not None}
    return {"rope_theta": base, "rope_type": "default", **given}


def _plain(c: Any) -> dict[str, Any]:
    """How a configuration differs in a folder: heads are in halves, norms without the 1."""
    return {leaf.name: leaf.default for leaf in leaves(type(c)) if leaf.name in c.IN_GGUF}
