"""Model configurations: what a family needs to know, read from a Hugging Face `config.json` or from GGUF metadata.

A field says where it stands in each: `key(gguf="block_count", hf="num_hidden_layers")`. GGUF keys are under the
architecture's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlx.errors import FormatError

_MISSING = object()
Config = TypeVar("Config")


def key(*, gguf: str | None = None, hf: str | None = None, default: Any = _MISSING) -> Any:
    """A field of a configuration and its names in files."""
    places = {"gguf": gguf, "hf": hf}
    if default is _MISSING:
        return dataclasses.field(metadata=places)
    return dataclasses.field(default=default, metadata=places)


def from_hf(kind: type[Config], config: Mapping[str, Any], where: str) -> Config:
    """A configuration from a Hugging Face config."""
    return _read(kind, "hf", lambda name: config.get(name, _MISSING), where)


def from_gguf(kind: type[Config], metadata: Mapping[str, Any], where: str) -> Config:
    """A configuration from GGUF metadata."""
    architecture = metadata.get("general.architecture")
    return _read(kind, "gguf", lambda name: metadata.get(f"{architecture}.{name}", _MISSING), where)


def _read(kind: type[Config], style: str, lookup: Any, where: str) -> Config:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = field.metadata.get(style)
        found = _MISSING if name is None else lookup(name)
        if found is None or found is _MISSING:
            if field.default is dataclasses.MISSING:
                raise FormatError(f"{where}: the configuration has no {name or field.name!r}")
            continue
        values[field.name] = _typed(found, str(field.type), str(name), where)
    return kind(**values)


def _typed(found: Any, type_: str, name: str, where: str) -> Any:
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    wanted = allowed.get(type_.split(" ")[0])
    if wanted is not None and (not isinstance(found, wanted) or (isinstance(found, bool) and bool not in wanted)):
        raise FormatError(f"{where}: {name} is {found!r}, expected {type_}")
    return float(found) if type_.startswith("float") else found


@dataclass(frozen=True)
class DecoderConfig:
    """What every decoder has."""

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers")
    heads: int = key(gguf="attention.head_count", hf="num_attention_heads")
    ffn: int = key(gguf="feed_forward_length", hf="intermediate_size")
    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="rms_norm_eps")
    context: int = key(gguf="context_length", hf="max_position_embeddings")
    kv_heads_given: int | None = key(gguf="attention.head_count_kv", hf="num_key_value_heads", default=None)
    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=None)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=10000.0)
    rope_scaling: Mapping[str, Any] | None = key(hf="rope_scaling", default=None)
    tied: bool = key(hf="tie_word_embeddings", default=False)

    @property
    def kv_heads(self) -> int:
        return self.kv_heads_given or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_dim_given or self.dim // self.heads
