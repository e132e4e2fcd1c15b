"""The registry of model families. A family is a configuration, a table of weight names and a flow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlx.arrays import Array
from rlx.dtypes import BF16, F16, F32, PACKED
from rlx.errors import CapabilityError, GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.formats import TensorEntry, TensorFile
from rlx.models.config import ModelConfig
from rlx.models.init import initialisers
from rlx.types import TensorType


@dataclass(frozen=True)
class Change:
    """A change that GGUF converters make to a weight's numbers, and its inverse."""

    to_gguf: Callable[[Array], Array]
    from_gguf: Callable[[Array], Array]
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # in GGUF and in rlx, where they differ


Changes = Callable[[Any, str], Change | None]
Settings = Callable[[Mapping[str, Any], str], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """How one kind of model is read and assembled."""

    name: str
    kind: str  # decoder, encoder or vision model
    gguf: tuple[str, ...]
    hf: tuple[str, ...]  # model_type of config.json
    config: type[ModelConfig]
    weights: Mapping[str, str]  # Hugging Face name -> GGUF name; {i} is the layer, {j} the expert
    flow: Callable[..., ModelFlow]
    prefixes: tuple[str, ...] = ()  # that models with a head put before these weights' names
    settings: Settings | None = None  # translates a config.json into the terms of `config`
    weight_views: Callable[[Any, str], Mapping[str, Any]] | None = (
        None  # (config, format): weights derived from those in a file
    )
    changes: Changes | None = None  # (config, name): changes to a weight's numbers in GGUF
    # Tells apart families that share a name, by config.json or by GGUF metadata.
    reads: Callable[[Mapping[str, Any]], bool] | None = None
    reads_gguf: Callable[[Mapping[str, Any]], bool] | None = None
    saved_as: str | None = None  # GGUF architecture to save as, where it is shared with another family

    @property
    def is_builtin(self) -> bool:
        """Whether rlx declares it: the versions of others are not known to it."""
        return (self.flow.__module__ or "").startswith("rlx.models.")

    @property
    def architecture(self) -> str | None:
        """The GGUF architecture to save as, or None if there is none."""
        return self.saved_as or next(iter(self.gguf), None)


STORED = (F32, F16, BF16, *PACKED)  # dtypes in which a graph can hold weights
KINDS = ("decoder", "encoder", "vision model")
FAMILIES: dict[str, Family] = {}
ENTRY_POINTS = "rlx.families"  # of installed packages that declare families
ADDING = "docs/adding-a-model.md shows how to add one"


def family(
    name: str, *, kind: str, gguf: Iterable[str] = (), hf: Iterable[str] = (), config: type[ModelConfig],
    weights: Mapping[str, str], prefixes: Iterable[str] = (), settings: Settings | None = None,
    weight_views: Callable[[Any, str], Mapping[str, Any]] | None = None, changes: Changes | None = None,
    reads: Callable[[Mapping[str, Any]], bool] | None = None,
    reads_gguf: Callable[[Mapping[str, Any]], bool] | None = None, saved_as: str | None = None,
) -> Callable[[Callable[..., ModelFlow]], Family]:  # fmt: skip
    """Declare a family; decorates its flow function.

    `kind` is decoder, encoder or vision model. The flow function of an encoder takes the configuration; that of a
    decoder also the context (maximum number of tokens) and the RoPE factors of a file, or None.

    `hf` are its model types in config.json and `gguf` its architectures in GGUF files. `config` is the class of its
    configuration. `weights` maps Hugging Face names of weights to GGUF names; `{i}` is the layer, `{j}` the expert.
    `prefixes` are what models with a head put before these names.

    The rest is for special cases. `settings(json, where)` translates a config.json into the keys of `config`.
    `weight_views(config, format)` are weights derived from those in a file. `changes(config, name)` is how GGUF changes
    the numbers of a weight. `reads(json)` and `reads_gguf(metadata)` tell apart families that share an architecture.
    `saved_as` is the GGUF architecture to save as, if it is not the first of `gguf`.
    """
    if kind not in KINDS:
        raise GraphError(
            f"family {name!r}: kind is {kind!r}", hint=nearest(kind, KINDS) or f"one of {', '.join(KINDS)}"
        )

    def declare(flow: Callable[..., ModelFlow]) -> Family:
        known = FAMILIES.get(name)
        # the same function again is fine: a notebook cell that runs twice
        if known is not None and _place(known.flow) != _place(flow):
            raise GraphError(f"family {name!r}: is declared already, by {'.'.join(_place(known.flow))}")

        @functools.wraps(flow)
        def assembled(c: Any, *arguments: Any) -> ModelFlow:
            assembly = flow(c, *arguments)
            if not isinstance(assembly, ModelFlow):
                kind = type(assembly).__name__
                raise GraphError(f"family {name!r}: its function returned a {kind}, expected a ModelFlow")
            return assembly.initialised(initialisers(name, c), strict=False)

        shape = tuple(gguf), tuple(hf), config, weights, assembled, tuple(prefixes)
        declared = Family(name, kind, *shape, settings, weight_views, changes, reads, reads_gguf, saved_as)
        FAMILIES[name] = declared
        return declared

    return declare


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


@functools.cache
def load_installed() -> None:
    """Import the families of installed packages, which their entry points name."""
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            problem = f"family {point.name!r} of package {point.value!r} cannot be imported: {error}"
            raise CapabilityError(problem) from error


def find(architecture: str, style: str, settings: Mapping[str, Any] | None = None) -> Family:
    """Look up a family by GGUF architecture and metadata, or by Hugging Face model type and config.

    Families of installed packages are imported if rlx and the program declare none.
    """
    if not any(architecture in _names(f, style) for f in FAMILIES.values()):
        load_installed()
    named = [f for f in FAMILIES.values() if architecture in _names(f, style)]
    asks = {f.name: f.reads_gguf if style == "gguf" else f.reads for f in named}
    for candidate in sorted(named, key=lambda f: asks[f.name] is None):  # families with a predicate first
        is_it = asks[candidate.name]
        if is_it is None or is_it(settings or {}):
            return candidate
    known = {name for f in FAMILIES.values() for name in _names(f, style)}
    known_ones = f"known: {', '.join(sorted(known))}."
    raise CapabilityError(
        f"model: architecture {architecture!r} is not supported",
        hint=f"{nearest(architecture, known) or known_ones} {ADDING}",
    )


def _names(family: Family, style: str) -> tuple[str, ...]:
    return family.gguf if style == "gguf" else family.hf


class FileWeights:
    """Weights of a file under Hugging Face names, in their stored types; GGUF names are translated."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], layers: int, prefixes: Iterable[str] = ()) -> None:
        self.file = file
        self._names: dict[str, str] = {}
        gguf = file.format == "gguf"
        for hf, other in names.items():
            for i in range(layers if "{i}" in hf else 1):
                mine, theirs = hf.replace("{i}", str(i)), (other if gguf else hf).replace("{i}", str(i))
                for j in range(len(file.names) if "{j}" in mine else 1):
                    theirs_j = theirs.replace("{j}", str(j))
                    spelling = next((n for n in _spellings(theirs_j, prefixes) if n in file), None)
                    if spelling is None:
                        break
                    self._names[mine.replace("{j}", str(j))] = spelling

    def alias(self, key: str, other: str) -> None:
        """Make `key`, which the file does not have, an alias of another weight."""
        self._names[key] = self._names[other]

    def has(self, key: str) -> bool:
        return key in self._names

    def type(self, key: str) -> TensorType:
        entry = self.file.entry(self._names[key])
        return TensorType(tuple(entry.shape), entry.storage if self._is_supported(entry) else F32)

    def array(self, key: str) -> Array:
        name = self._names[key]
        return self.file.array(name) if self._is_supported(self.file.entry(name)) else self.file.dequantised(name)

    def _is_supported(self, entry: TensorEntry) -> bool:
        """Whether graphs support the stored type; other block formats and 8-bit floats are converted to f32."""
        return entry.storage in STORED and (len(entry.shape) in (2, 3) or not entry.storage.is_packed)

    def entry(self, key: str) -> TensorEntry:
        """The file's entry of a weight."""
        return self.file.entry(self._names[key])

    def keys(self) -> Iterable[str]:
        return self._names.keys()


def _spellings(name: str, prefixes: Iterable[str]) -> Iterable[str]:
    """Spellings of a tensor name, with and without the prefix that some exports add; old ones say gamma and beta."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    for plain in (name, old):
        yield plain
        yield plain.removeprefix("model.")
        for prefix in prefixes:
            yield f"{prefix}{plain}"
            yield f"{prefix}{plain.removeprefix('model.')}"
