"""Saving a model for other programs: a folder of Hugging Face, its weights alone, or a GGUF file.

A model stays in the format that it came in as far as that is possible: tensors are copied as they are, and so are the
files beside them. From one format to the other, decoders are rewritten: names, the order of heads, what converters add
to norms. What was written is read again and must give the same graph, so a setting that a format has no word for is an
error and not a wrong model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dtypes import BF16, F16, F32, DType, dtype
from rlx.engine.apply import checked_params
from rlx.errors import CapabilityError, FormatError, RequestError
from rlx.flow.flow import BuiltModel
from rlx.flow.init import WantedWeights
from rlx.formats.quants import dequantise
from rlx.formats.safetensors import DTYPES, INDEX_NAME, write_safetensors
from rlx.models.arrange import ArrangedWeights, Rows, Spans, Stack, in_layers
from rlx.models.config import FULL, LINEAR, SLIDING, DecoderConfig
from rlx.models.family import Family
from rlx.models.load import Checkpoint, open_checkpoint, repeated_head
from rlx.types import TensorType

if TYPE_CHECKING:
    from rlx.engine.model import Model

Array = np.ndarray[Any, Any]
FILE = "model.safetensors"
FLOATS = {"f32": F32, "f16": F16, "bf16": BF16}
# Files beside a model that hold weights, in this or other formats.
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".index.json")


@dataclass(frozen=True)
class Tensor:
    """What a tensor is, and a function that reads it."""

    type: TensorType
    read: Callable[[], Array]

    @classmethod
    def of(cls, array: Array) -> Tensor:
        storage = dtype(array.dtype)
        shape = (*array.shape[:-1], array.shape[-1] * storage.block) if storage.is_packed else array.shape
        return cls(TensorType(tuple(shape), storage), lambda: array)

    def floats(self) -> Array:
        """As f32."""
        shape = tuple(int(n) for n in self.type.shape)
        return dequantise(np.ascontiguousarray(self.read()), self.type.dtype, int(np.prod(shape))).reshape(shape)

    def as_type(self, wanted: DType) -> Tensor:
        if self.type.dtype is wanted:
            return self
        return Tensor(TensorType(self.type.shape, wanted), lambda: self.floats().astype(wanted.numpy))

    def changed(self, change: Callable[[Array], Array], shape: Sequence[Any] | None = None) -> Tensor:
        """What a function makes of it, as f32."""
        kind = TensorType(self.type.shape if shape is None else tuple(shape), F32)
        return Tensor(kind, lambda: np.ascontiguousarray(change(self.floats()), np.float32))


def save_model(model: Model, path: Path, params: Mapping[str, Any], kind: str | None) -> Path:
    """Write a model; the suffix of the path says as what, and no suffix is a folder."""
    checkpoint = model.checkpoint
    given, _ = checked_params(params, checkpoint.weights, model.params, "save")
    if kind is not None and kind not in FLOATS:
        raise RequestError(f"save: dtype is {kind!r}", hint=f"known: {', '.join(FLOATS)}")
    source = _Source(checkpoint, {name: Tensor.of(np.ascontiguousarray(array)) for name, array in given.items()})
    names = list(model.params)
    match path.suffix:
        case ".gguf":
            _write_gguf(source, names, _folder_of(path) / path.name, kind)
        case ".safetensors":
            with _replacing(_folder_of(path) / path.name) as at:
                write_safetensors(at, _for_safetensors(source.in_format("safetensors", names), kind))
        case _:
            _write_folder(source, names, path, kind)
    return path


def _folder_of(path: Path) -> Path:
    if not path.parent.is_dir():
        raise FormatError(f"{path}: there is no folder {path.parent}", hint="make it first")
    if path.is_dir():
        raise FormatError(f"{path}: is a folder, wanted the path of a file")
    return path.parent


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside a path that takes its place when all went well: what is there may be mapped."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".saving-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


# -- tensors as a format has them ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Source:
    """A model's file, and tensors that take the place of its own."""

    checkpoint: Checkpoint
    given: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """A weight by the name that stages know it by."""
        weights = self.checkpoint.weights
        return self.given.get(name) or Tensor(weights.type(name), functools.partial(weights.array, name))

    def in_format(self, format: str, names: Sequence[str]) -> dict[str, Tensor]:
        """All tensors of a file of this format."""
        file, weights = self.checkpoint.file, self.checkpoint.weights
        if file.format != format:
            return _renamed(
                self.checkpoint, format, self._arranged(format, {name: self.tensor(name) for name in names})
            )
        repeated = repeated_head(self.checkpoint)
        raw = {name: _raw(file, name) for name in file.names if name != repeated}
        changed = self._arranged(format, self._whole(format))
        return raw | {weights.entry(name).name: tensor for name, tensor in changed.items()}

    def _whole(self, format: str) -> dict[str, Tensor]:
        """The tensors given, and those that a file keeps in one with them."""
        places = self._places(format)
        touched = {places[name].of for name in self.given if name in places}
        return {n: self.tensor(n) for n, place in places.items() if place.of in touched} | dict(self.given)

    def _places(self, format: str) -> dict[str, Any]:
        """Where in a file of this format the weights are that it arranges in another way."""
        family, c, weights = self.checkpoint.family, self.checkpoint.config, self.checkpoint.weights
        if family.arrange is None:
            return {}
        if isinstance(weights, ArrangedWeights) and self.checkpoint.file.format == format:
            return dict(weights.made)
        return {name: ways[0] for name, ways in in_layers(family.arrange(c, format), c.layers)}

    def _arranged(self, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of stages as a file of this format has them: parts are joined, stacks taken apart."""
        places = self._places(format)
        found: dict[str, Tensor] = {}
        parts: dict[str, list[tuple[Rows | Spans, Tensor]]] = {}
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None:
                found[name] = tensor
            elif not isinstance(place, Stack):
                parts.setdefault(place.of, []).append((place, tensor))
            else:
                one = TensorType(tensor.type.shape[1:], tensor.type.dtype)
                for j, other in enumerate(place.names()):
                    found[other] = Tensor(one, functools.partial(lambda t, i: t.read()[i], tensor, j))
        return found | {name: _joined(*zip(*each, strict=True)) for name, each in parts.items()}


def _raw(file: Any, name: str) -> Tensor:
    entry = file.entry(name)
    return Tensor(TensorType(tuple(entry.shape), entry.storage), functools.partial(file.array, name))


def _joined(places: Sequence[Rows | Spans], tensors: Sequence[Tensor]) -> Tensor:
    """Parts of a tensor at their places, and turned where a file has them so."""
    kinds = {tensor.type.dtype for tensor in tensors}
    parts = list(tensors) if len(kinds) == 1 else [tensor.as_type(F32) for tensor in tensors]
    axis, turned = places[0].axis, places[0].turned

    def whole(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        sizes = list(shapes[0])
        sizes[axis] = sum(int(shape[axis]) for shape in shapes)
        return tuple(sizes)

    def read() -> Array:
        arrays = [tensor.read() for tensor in parts]
        found = np.empty(whole([array.shape for array in arrays]), arrays[0].dtype)
        for place, array in zip(places, arrays, strict=True):
            place.put(found, array)
        return found.T if turned else found

    shape = whole([tensor.type.shape for tensor in parts])
    return Tensor(TensorType(shape[::-1] if turned else shape, parts[0].type.dtype), read)


def _renamed(checkpoint: Checkpoint, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a decoder under the names of another format, with the numbers that it keeps."""
    family, c = checkpoint.family, checkpoint.config
    if not isinstance(c, DecoderConfig) or not (family.gguf if format == "gguf" else family.hf):
        raise CapabilityError(
            f"save: a {family.name} out of a {checkpoint.file.format} file is not written as {format}"
        )
    if checkpoint.rope_factors is not None:
        raise CapabilityError("save: Hugging Face's files have no table of RoPE factors, which this model has")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if format == "gguf":
            found[_gguf_name(family.weights, name, c.layers)] = _to_gguf(family, c, name, tensor)
        else:
            found[name] = _from_gguf(family, c, name, tensor)
    return found


def _gguf_name(names: Mapping[str, str], name: str, layers: int) -> str:
    if names.get(name):
        return names[name]
    for i in range(layers):
        pattern = name.replace(f".{i}.", ".{i}.", 1)
        if names.get(pattern):
            return names[pattern].replace("{i}", str(i))
    raise CapabilityError(f"save: GGUF has no name for {name!r}")


def _to_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    kind = tensor.type.dtype
    if family.changes is not None:
        change = family.changes(c, name)
        tensor = tensor if change is None else tensor.changed(change.there)
    elif getattr(c, "unit_offset", False) and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x + 1)
    elif family.name == "llama" and not c.pairs and _turns(name):
        tensor = tensor.changed(lambda x: _heads(x, c.head_dim, 2, c.head_dim // 2))
    if name.endswith("conv1d.weight"):  # without the axis of length 1 that convolutions have
        channels, _, size = map(int, tensor.type.shape)
        return tensor.changed(lambda x: x.reshape(channels, size), (channels, size))
    if len(tensor.type.shape) == 1:
        return tensor.as_type(F32)  # as llama.cpp wants them
    return tensor.as_type(kind) if kind in FLOATS.values() else tensor  # in another order, they are no other numbers


def _from_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    if family.changes is not None:
        change = family.changes(c, name)
        tensor = tensor if change is None else tensor.changed(change.back)
    elif getattr(c, "unit_offset", True) is False and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x - 1)
    elif getattr(c, "pairs", False) and _turns(name):
        tensor = tensor.changed(lambda x: _heads(x, c.head_dim, c.head_dim // 2, 2))
    if name.endswith("conv1d.weight"):
        channels, size = map(int, tensor.type.shape)
        tensor = tensor.changed(lambda x: x.reshape(channels, 1, size), (channels, 1, size))
    return tensor


def _turns(name: str) -> bool:
    """Whether it makes queries or keys."""
    return ".q_proj." in name or ".k_proj." in name


def _heads(x: Array, head: int, outer: int, inner: int) -> Array:
    """Rows of each head in another order: from halves to pairs, or back."""
    return x.reshape(-1, outer, inner, *x.shape[1:]).swapaxes(1, 2).reshape(-1, head, *x.shape[1:]).reshape(x.shape)


# -- folders ---------------------------------------------------------------------------------------------------------
def _write_folder(source: _Source, names: Sequence[str], folder: Path, kind: str | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder}: is a file, wanted a folder")
    checkpoint = source.checkpoint
    tensors = _for_safetensors(source.in_format("safetensors", names), kind)
    folder.mkdir(parents=True, exist_ok=True)
    copied = checkpoint.file.format == "safetensors"
    if copied:
        _copy_beside(checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent, folder)
    else:
        _write_beside(checkpoint, folder)
    if kind is not None:
        _say_type(folder / "config.json", kind)
    with _replacing(folder / FILE) as at:
        write_safetensors(at, tensors)
    for other in folder.iterdir():  # shards of what was there before
        if other.name == INDEX_NAME or (other.suffix == ".safetensors" and other.name != FILE):
            other.unlink()
    if not copied:
        wanted = replace(checkpoint.config, **_plain(checkpoint.config))
        _check_same(checkpoint, wanted, folder)


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
    c = checkpoint.config
    said: dict[str, Any] = {"model_type": checkpoint.family.hf[0], "dtype": "float32"}
    for field in dataclasses.fields(c):
        place, value = field.metadata.get("hf"), getattr(c, field.name)
        if place and place not in ("rope_scaling", "rope_theta") and not (value is None and field.default is None):
            said[place] = list(value) if isinstance(value, tuple) else value
    said["head_dim"] = c.head_dim
    said["num_key_value_heads"] = c.kv_heads
    if getattr(c, "query_scalar", 0) is None:
        said["query_pre_attn_scalar"] = c.head_dim
    said["rope_parameters"] = _rope(c.rope_base, c.rope_scaling)
    if hasattr(c, "attends"):
        said["layer_types"] = [FULL if c.attends(i) else LINEAR for i in range(c.layers)]
    elif hasattr(c, "layer_types"):
        said["layer_types"] = [SLIDING if c.window(i) else FULL for i in range(c.layers)]
    if hasattr(c, "local_base"):  # newer files keep both kinds together
        local = _rope(c.local_base, c.local_scaling)
        said["rope_parameters"] = {FULL: said["rope_parameters"], SLIDING: local}
        said = {name: value for name, value in said.items() if not name.startswith("rope_local")}
    tokenizer = checkpoint.tokenizer
    for role in ("bos", "eos", "pad"):  # null where there is none: families have numbers of their own
        said[f"{role}_token_id"] = None if tokenizer is None else getattr(tokenizer, f"{role}_id")
    return said


def _rope(base: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {name: value for name, value in (scaling or {}).items() if value is not None}
    return {"rope_theta": base, "rope_type": "default", **given}


def _plain(c: Any) -> dict[str, Any]:
    """How a configuration differs in a folder: heads are in halves, norms without the 1."""
    return {field.name: field.default for field in dataclasses.fields(c) if field.name in c.IN_GGUF}


def _check_same(checkpoint: Checkpoint, wanted: Any, written: Path) -> None:
    """Whether a file that was written is the model, by the graphs of both."""
    found = open_checkpoint(written)
    found.file.close()
    wanted, written_one = _rounded(wanted), _rounded(found.config)
    first, second = (_skeleton(checkpoint, c) for c in (wanted, written_one))
    same = first.module == second.module and first.params.made.keys() == second.params.made.keys()
    if not same or any(
        not np.allclose(first.params.made[n], second.params.made[n], rtol=1e-5, atol=1e-6) for n in first.params.made
    ):
        fields = [f.name for f in dataclasses.fields(wanted)]
        apart = [f for f in fields if getattr(wanted, f) != getattr(written_one, f)]
        raise CapabilityError(
            f"save: the format has no words for what this model says of {', '.join(apart) or 'itself'}"
        )


def _rounded(c: Any) -> Any:
    """With numbers as GGUF has them."""
    floats = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if isinstance(getattr(c, f.name), float)}
    return replace(c, **{name: float(np.float32(value)) for name, value in floats.items()})


def _skeleton(checkpoint: Checkpoint, c: Any) -> BuiltModel:
    """The graph of a configuration, whatever its weights are."""
    return checkpoint.family.flow(c, min(c.context, 256)).build(WantedWeights())


# -- GGUF ------------------------------------------------------------------------------------------------------------
def _write_gguf(source: _Source, names: Sequence[str], path: Path, kind: str | None) -> None:
    try:
        import gguf
    except ImportError as error:
        raise CapabilityError("save: GGUF files are written by the package gguf", hint="pip install gguf") from error
    checkpoint = source.checkpoint
    same = checkpoint.file.format == "gguf"
    tensors = source.in_format("gguf", names)
    if kind is not None:
        tensors = {n: t if len(t.type.shape) == 1 else t.as_type(FLOATS[kind]) for n, t in tensors.items()}
    with _replacing(path) as at:
        writer = gguf.GGUFWriter(at, checkpoint.family.gguf[0] if not same else _architecture(checkpoint))
        if same:
            _copy_metadata(gguf, writer, checkpoint.file.path)
        else:
            _write_metadata(writer, checkpoint)
        for name, tensor in tensors.items():
            storage = tensor.type.dtype
            array = np.ascontiguousarray(tensor.read())
            if storage in (F32, F16):
                writer.add_tensor(name, array)
            else:
                raw = array.reshape(*array.shape[:-1], -1).view(np.uint8)
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[storage.name.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if not same:
            _check_same(checkpoint, replace(checkpoint.config, **checkpoint.config.IN_GGUF), at)


def _architecture(checkpoint: Checkpoint) -> str:
    found: str = checkpoint.file.metadata["general.architecture"]
    return found


def _copy_metadata(gguf: Any, writer: Any, path: Path) -> None:
    for field in gguf.GGUFReader(path).fields.values():
        # what the writer writes itself, and what belongs to a part of a model in several files
        if field.name.startswith(("GGUF.", "split.")) or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)


def _write_metadata(writer: Any, checkpoint: Checkpoint) -> None:
    """A decoder's configuration and tokenizer in the words of GGUF."""
    c, prefix = checkpoint.config, checkpoint.family.gguf[0]
    writer.add_name(checkpoint.path.name)
    said = {"vocab_size": c.vocab, "attention.head_count_kv": c.kv_heads}
    if c.head_dim * c.heads != c.dim or c.head_dim_given is not None:
        said |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if c.rotary != c.head_dim or checkpoint.family.name in ("llama", "phi3"):
        said["rope.dimension_count"] = c.rotary
    for field in dataclasses.fields(c):
        place, value = field.metadata.get("gguf"), getattr(c, field.name)
        if place and value is not None:
            said[place] = value
    for place, value in (said | c.only_in_gguf()).items():
        _add(writer, f"{prefix}.{place}", value)
    _write_scaling(writer, c, prefix)
    if checkpoint.tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        from rlx.engine.save_vocab import write_vocab

        write_vocab(writer, checkpoint.tokenizer)


def _write_scaling(writer: Any, c: Any, prefix: str) -> None:
    scaling = {name: value for name, value in (c.rope_scaling or {}).items() if value is not None}
    match scaling.pop("rope_type", scaling.pop("type", "default")):
        case "default":
            return
        case "linear":
            writer.add_string(f"{prefix}.rope.scaling.type", "linear")
            writer.add_float32(f"{prefix}.rope.scaling.factor", float(scaling["factor"]))
        case other:
            raise CapabilityError(f"save: RoPE of kind {other!r} is not written as GGUF", hint="known: default, linear")


def _add(writer: Any, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
        case _:
            raise CapabilityError(f"save: {name} is {value!r}, which is not written as GGUF")
