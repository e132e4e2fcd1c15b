"""The tensors of a model for safetensors or GGUF: names, order of RoPE rows, offsets of norms.

Within one format, tensors are copied unchanged; between formats, decoders are converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, F16, F32, DType, dtype
from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass
from rlx.formats.gguf_quants import dequantise
from rlx.models.family import Family
from rlx.models.load import Checkpoint, repeated_head
from rlx.models.weight_views import ArrangedWeights, GroupedRows, Rows, Stack, in_layers
from rlx.types import TensorType

FLOATS = {"f32": F32, "f16": F16, "bf16": BF16}
STATE_SPACE = (
    ".A_log",
    ".mixer.D",
    ".mixer.norm.weight",
    ".conv1d.weight",
)  # suffixes of weights that llama.cpp expects as f32


@dataclass(frozen=True)
class Tensor:
    """The type of a tensor, and a function that reads it."""

    type: TensorType
    read: Callable[[], Array]

    @classmethod
    def of(cls, array: Array) -> Tensor:
        storage = dtype(array.dtype)
        shape = (*array.shape[:-1], array.shape[-1] * storage.block) if storage.is_packed else array.shape
        return cls(TensorType(tuple(shape), storage), lambda: array)

    def floats(self) -> Array:
        """The values as f32."""
        shape = tuple(int(n) for n in self.type.shape)
        return dequantise(np.ascontiguousarray(self.read()), self.type.dtype, int(np.prod(shape))).reshape(shape)

    def as_type(self, wanted: DType) -> Tensor:
        if self.type.dtype is wanted:
            return self
        return Tensor(TensorType(self.type.shape, wanted), lambda: self.floats().astype(wanted.numpy))

    def changed(self, change: Callable[[Array], Array], shape: Sequence[Any] | None = None) -> Tensor:
        """The result of a function of its values, as f32."""
        kind = TensorType(self.type.shape if shape is None else tuple(shape), F32)
        return Tensor(kind, lambda: np.ascontiguousarray(change(self.floats()), np.float32))


@dataclass(frozen=True)
class Source:
    """A model's checkpoint, and tensors that replace some of its own."""

    checkpoint: Checkpoint
    replaced: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """A weight by its stage name."""
        weights = self.checkpoint.weights
        return self.replaced.get(name) or Tensor(weights.type(name), functools.partial(weights.array, name))

    def in_format(self, format: str, names: Sequence[str], *, joined: bool = False) -> dict[str, Tensor]:
        """All tensors of a file of this format. `joined` combines quantised weights with their separate scales."""
        file, weights = self.checkpoint.file, self.checkpoint.weights
        if file.format != format:
            return _convert(
                self.checkpoint, format, self._to_file_layout(format, {name: self.tensor(name) for name in names})
            )
        changed = self._to_file_layout(format, self._with_neighbours(format))
        replaced = {weights.entry(name).name: tensor for name, tensor in changed.items()}
        repeated, copied = repeated_head(self.checkpoint), file if joined else file.stored
        dropped = {part for name in replaced for part in file.parts(name)} - replaced.keys()
        if repeated is not None:
            dropped |= {repeated, *file.parts(repeated)}
        return {name: _raw(copied, name) for name in copied.names if name not in dropped} | replaced

    def _with_neighbours(self, format: str) -> dict[str, Tensor]:
        """The replaced tensors, and those stored in the same tensor of the file."""
        places = self._places(format)
        touched = {places[name].of for name in self.replaced if name in places}
        return {n: self.tensor(n) for n, place in places.items() if place.of in touched} | dict(self.replaced)

    def _places(self, format: str) -> dict[str, Any]:
        """Views of the weights that a file of this format stores in another layout, such as fused tensors."""
        family, c, weights = self.checkpoint.family, self.checkpoint.config, self.checkpoint.weights
        if family.weight_views is None:
            return {}
        if isinstance(weights, ArrangedWeights) and self.checkpoint.file.format == format:
            return dict(weights.views)
        return {name: ways[0] for name, ways in in_layers(family.weight_views(c, format), c.layers)}

    def _to_file_layout(self, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stage weights in the layout of a file of this format: fuses parts and splits stacks."""
        places = self._places(format)
        tensors_in_file: dict[str, Tensor] = {}
        parts: dict[str, list[tuple[Rows | GroupedRows, Tensor]]] = {}
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None:
                tensors_in_file[name] = tensor
            elif not isinstance(place, Stack):
                parts.setdefault(place.of, []).append((place, tensor))
            else:
                one = TensorType(tensor.type.shape[1:], tensor.type.dtype)
                for j, other in enumerate(place.names()):
                    tensors_in_file[other] = Tensor(one, functools.partial(lambda t, i: t.read()[i], tensor, j))
        return tensors_in_file | {name: _joined(*zip(*each, strict=True)) for name, each in parts.items()}


def _raw(file: Any, name: str) -> Tensor:
    entry = file.entry(name)
    return Tensor(TensorType(tuple(entry.shape), entry.storage), functools.partial(file.array, name))


def _joined(places: Sequence[Rows | GroupedRows], tensors: Sequence[Tensor]) -> Tensor:
    """Fuse parts of a tensor, transposed if the file stores it so."""
    kinds = {tensor.type.dtype for tensor in tensors}
    parts = list(tensors) if len(kinds) == 1 else [tensor.as_type(F32) for tensor in tensors]
    axis, transposed = places[0].axis, places[0].transposed

    def fused_shape(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        sizes = list(shapes[0])
        sizes[axis] = sum(int(shape[axis]) for shape in shapes)
        return tuple(sizes)

    def read() -> Array:
        arrays = [tensor.read() for tensor in parts]
        fused = np.empty(fused_shape([array.shape for array in arrays]), arrays[0].dtype)
        for place, array in zip(places, arrays, strict=True):
            place.put(fused, array)
        return fused.T if transposed else fused

    shape = fused_shape([tensor.type.shape for tensor in parts])
    return Tensor(TensorType(shape[::-1] if transposed else shape, parts[0].type.dtype), read)


def _convert(checkpoint: Checkpoint, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a decoder with the names and values of another format."""
    family, c = checkpoint.family, checkpoint.config
    if family.kind != "decoder" or not (family.architecture if format == "gguf" else family.hf):
        raise CapabilityError(
            f"save: a {family.name} out of a {checkpoint.file.format} file is not written as {format}"
        )
    if checkpoint.rope_factors is not None:
        raise CapabilityError("save: Hugging Face's files have no table of RoPE factors, which this model has")
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if format == "gguf":
            converted[_gguf_name(family.weights, name, c.layers)] = _to_gguf(family, c, name, tensor)
        else:
            converted[name] = _from_gguf(family, c, name, tensor)
    return converted


def _gguf_name(names: Mapping[str, str], name: str, layers: int) -> str:
    if names.get(name):
        return names[name]
    for i in range(layers):
        pattern = name.replace(f".{i}.", ".{i}.", 1)
        if names.get(pattern):
            return names[pattern].replace("{i}", str(i))
    raise CapabilityError(f"save: GGUF has no name for the weight {name!r}", hint="save a folder, which has it")


def _to_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    kind = tensor.type.dtype
    if family.changes is not None:
        change = family.changes(c, name)
        if change is not None:
            tensor = tensor.changed(change.to_gguf, None if change.shapes is None else change.shapes[0])
    elif getattr(c, "unit_offset", False) and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x + 1)
    elif "pairs" in c.IN_GGUF and not c.pairs and _has_rope(name):
        tensor = tensor.changed(lambda x: _reorder_heads(x, c.head_dim, 2, c.head_dim // 2))
    if name.endswith("conv1d.weight"):  # without the axis of size 1
        channels, _, size = map(int, tensor.type.shape)
        return tensor.changed(lambda x: x.reshape(channels, size), (channels, size))
    if len(tensor.type.shape) == 1 or name.endswith(STATE_SPACE):
        return tensor.as_type(F32)  # as llama.cpp expects
    return tensor.as_type(kind) if kind in FLOATS.values() else tensor  # reordering keeps the values exact


def _from_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    if family.changes is not None:
        change = family.changes(c, name)
        if change is not None:
            tensor = tensor.changed(change.from_gguf, None if change.shapes is None else change.shapes[1])
    elif getattr(c, "unit_offset", True) is False and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x - 1)
    elif getattr(c, "pairs", False) and _has_rope(name):
        tensor = tensor.changed(lambda x: _reorder_heads(x, c.head_dim, c.head_dim // 2, 2))
    if name.endswith("conv1d.weight"):
        channels, size = map(int, tensor.type.shape)
        tensor = tensor.changed(lambda x: x.reshape(channels, 1, size), (channels, 1, size))
    return tensor


def _has_rope(name: str) -> bool:
    """Whether RoPE applies to the output of the weight: projections of queries and keys."""
    return ".q_proj." in name or ".k_proj." in name


def _reorder_heads(x: Array, head: int, outer: int, inner: int) -> Array:
    """Reorder the rows of each head from halves to pairs, or back."""
    return x.reshape(-1, outer, inner, *x.shape[1:]).swapaxes(1, 2).reshape(-1, head, *x.shape[1:]).reshape(x.shape)
