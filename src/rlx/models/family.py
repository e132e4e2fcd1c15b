"""Families: a model family is a configuration, a table of weight names and a flow. This is the register of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlx.dtypes import BF16, F16, F32, PACKED
from rlx.errors import CapabilityError, nearest
from rlx.flow.flow import ModelFlow
from rlx.flow.weights import Array
from rlx.formats import TensorEntry, TensorFile
from rlx.types import TensorType


@dataclass(frozen=True)
class Family:
    """How one kind of model is read and assembled."""

    name: str
    kind: str  # decoder or encoder
    gguf: tuple[str, ...]
    hf: tuple[str, ...]  # model_type of config.json
    config: type
    weights: Mapping[str, str]  # Hugging Face name -> GGUF name; {i} is the layer
    flow: Callable[..., ModelFlow]


STORED = (F32, F16, BF16, *PACKED)  # what a weight may be stored as in a graph
FAMILIES: dict[str, Family] = {}


def family(
    name: str, *, kind: str, gguf: Iterable[str] = (), hf: Iterable[str] = (), config: type, weights: Mapping[str, str]
) -> Callable[[Callable[..., ModelFlow]], Family]:
    """Declare a family; decorate its flow."""

    def declare(flow: Callable[..., ModelFlow]) -> Family:
        found = Family(name, kind, tuple(gguf), tuple(hf), config, weights, flow)
        FAMILIES[name] = found
        return found

    return declare


def find(architecture: str, style: str) -> Family:
    """The family of a GGUF architecture or a Hugging Face model type."""
    for candidate in FAMILIES.values():
        if architecture in (candidate.gguf if style == "gguf" else candidate.hf):
            return candidate
    known = {a for f in FAMILIES.values() for a in (f.gguf if style == "gguf" else f.hf)}
    raise CapabilityError(
        f"model: architecture {architecture!r} is not supported",
        hint=nearest(architecture, known) or f"known: {', '.join(sorted(known))}",
    )


class FileWeights:
    """Weights of a file under Hugging Face names, as they are stored; GGUF names are translated."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], layers: int) -> None:
        self.file = file
        self._names: dict[str, str] = {}
        gguf = file.format == "gguf"
        for hf, other in names.items():
            for i in range(layers if "{i}" in hf else 1):
                mine, theirs = hf.replace("{i}", str(i)), (other if gguf else hf).replace("{i}", str(i))
                found = next((n for n in _spellings(theirs) if n in file), None)
                if found is not None:
                    self._names[mine] = found

    def has(self, key: str) -> bool:
        return key in self._names

    def type(self, key: str) -> TensorType:
        entry = self.file.entry(self._names[key])
        return TensorType(tuple(entry.shape), entry.storage if self._kept(entry) else F32)

    def array(self, key: str) -> Array:
        name = self._names[key]
        return self.file.array(name) if self._kept(self.file.entry(name)) else self.file.dequantised(name)

    def _kept(self, entry: TensorEntry) -> bool:
        """Whether graphs know the type; other blocks and 8-bit floats become f32 here."""
        return entry.storage in STORED and (len(entry.shape) == 2 or not entry.storage.is_packed)

    def keys(self) -> Iterable[str]:
        return self._names.keys()


def _spellings(name: str) -> Iterable[str]:
    """A tensor with and without the prefix that some exports put before or leave out; old ones say gamma and beta."""
    yield name
    yield name.removeprefix("model.")
    yield f"bert.{name}"
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    yield from (old, f"bert.{old}")
