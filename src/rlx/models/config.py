"""Model configurations: the hyperparameters of a family, read from a Hugging Face `config.json` or from GGUF metadata.

Each field names its key in both: `key(gguf="block_count", hf="num_hidden_layers")`. GGUF keys are prefixed with the
architecture's name. Everything a file says is checked here, before anything is built: sizes must be positive and
bounded, and a switch that the family does not implement is refused by name, since ignoring it would give wrong results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.formats import TensorFile
from rlx.formats.scaled_weights import read_quantization
from rlx.formats.tensor_file import quoted
from rlx.hir.activations import NAMED
from rlx.models.rope import Rope, is_number

Ignorable = Mapping[str, tuple[Any, ...]]  # settings that are not fields -> values that can safely be ignored
_MISSING = object()
MAX_SIZE = 1 << 24  # of one axis of a weight
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = (1 << 31) - 1  # positions are i32


def key(
    *, gguf: str | None = None, hf: str | None = None, default: Any = _MISSING, minimum: int = 1,
    maximum: int = MAX_SIZE, said_in_gguf: bool = False,
) -> Any:  # fmt: skip
    """Declare a configuration field: its keys in files and, for integers, its range.

    The default is the one in `transformers`; `said_in_gguf` makes the key mandatory in GGUF files all the same.
    """
    about = {"gguf": gguf, "hf": hf, "range": (minimum, maximum), "said_in_gguf": said_in_gguf}
    if default is _MISSING:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Leaf:
    """A single configuration value: a field of the class, or of one of its groups."""

    name: str
    type: str
    default: Any
    metadata: Mapping[str, Any]
    group: str | None = None  # the field of the class that holds the group

    @classmethod
    def of(cls, field: dataclasses.Field[Any]) -> Leaf:
        type_ = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        return cls(field.name, type_, field.default, field.metadata)


def group(kind: type[Any], **own: Any) -> Any:
    """Declare a field that holds a record of fields shared by several families.

    `own` overrides members: with a `key` of this family, or with a fixed value that no file contains.
    """
    members = {field.name: Leaf.of(field) for field in dataclasses.fields(kind)}
    for name, value in own.items():
        keyed = isinstance(value, dataclasses.Field)
        members[name] = dataclasses.replace(
            members[name], default=value.default if keyed else value, metadata=value.metadata if keyed else {}
        )
    usual = kind(**{name: leaf.default for name, leaf in members.items()})
    return dataclasses.field(default=usual, metadata={"leaves": tuple(members.values())})


def leaves(kind: type[ModelConfig]) -> tuple[Leaf, ...]:
    """Returns all values of a configuration, including those of its groups. Names are unique."""
    values: list[Leaf] = []
    for field in dataclasses.fields(kind):
        members = field.metadata.get("leaves")
        values += [Leaf.of(field)] if members is None else [dataclasses.replace(m, group=field.name) for m in members]
    return tuple(values)


def record_types(kind: type[ModelConfig]) -> tuple[type, ...]:
    """Returns the classes a configuration consists of: its own and those of its groups."""
    groups = (type(field.default) for field in dataclasses.fields(kind) if "leaves" in field.metadata)
    return (kind, *groups)


@dataclass(frozen=True)
class ModelConfig:
    """Base class of all families' configurations."""

    # Settings that are not fields -> the values that leave the family's computation unchanged.
    HF_IGNORABLE: ClassVar[Ignorable] = {
        "compression_config": (None,),  # written by compressed-tensors in older files
        "partial_rotary_factor": (None, 1),
    }
    GGUF_IGNORABLE: ClassVar[Ignorable] = {}
    # Fields that describe the storage of weights, with their values for GGUF files; the defaults describe Hugging
    # Face's.
    IN_GGUF: ClassVar[Mapping[str, Any]] = {}

    initializer_range: float = dataclasses.field(
        default=0.02, kw_only=True, metadata={"gguf": None, "hf": "initializer_range", "range": (0, 0)}
    )  # standard deviation of untrained weights
    quantization: Mapping[str, Any] | None = dataclasses.field(
        default=None, kw_only=True, metadata={"gguf": None, "hf": "quantization_config", "range": (0, 0)}
    )  # how a folder quantises its weights (`formats/scaled_weights.py`); GGUF tensors carry their own type

    def check(self, where: str) -> None:
        """Raise FormatError for inconsistent sizes, CapabilityError for features the family does not implement."""

    def value(self, leaf: Leaf) -> Any:
        return getattr(self if leaf.group is None else getattr(self, leaf.group), leaf.name)

    def changed(self, **values: Any) -> Self:
        """Returns a copy with the given leaf values replaced."""
        return dataclasses.replace(self, **_in_groups(type(self), values, lambda name: getattr(self, name)))

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        """Fields (by name) that GGUF metadata does not contain and that are inferred from the file's tensors."""
        return {}

    def gguf_only_settings(self) -> dict[str, Any]:
        """GGUF settings, by their GGUF names, that are not fields or that GGUF stores differently."""
        return {}

    def omitted_weights(self) -> tuple[str, ...]:
        """Weights of the family (as patterns) that a model with this configuration does not have."""
        return ()


Config = TypeVar("Config", bound=ModelConfig)


def from_hf(
    kind: type[Config], settings: Mapping[str, Any], where: str, known: Mapping[str, Any] | None = None
) -> Config:
    """Reads a Hugging Face config; `known` supplies fields (by name) that the config does not contain."""
    return _read(kind, "hf", lambda name: settings.get(name, _MISSING), where, known or {})


def from_gguf(
    kind: type[Config], metadata: Mapping[str, Any], where: str, known: Mapping[str, Any] | None = None
) -> Config:
    """Reads GGUF metadata; `known` supplies fields (by name) that the metadata does not contain."""
    prefix = metadata.get("general.architecture")
    return _read(kind, "gguf", lambda name: metadata.get(f"{prefix}.{name}", _MISSING), where, known or {})


def _read(kind: type[Config], style: str, lookup: Callable[[str], Any], where: str, known: Mapping[str, Any]) -> Config:
    for name, allowed in (kind.HF_IGNORABLE if style == "hf" else kind.GGUF_IGNORABLE).items():
        setting = lookup(name)
        if setting is not _MISSING and not (_is_scalar(setting) and setting in allowed):
            raise unsupported(where, name, setting)
    values: dict[str, Any] = {}
    for leaf in leaves(kind):
        place: str | None = leaf.metadata.get(style)
        setting = _MISSING if place is None else lookup(place)
        if leaf.name in known:
            values[leaf.name] = known[leaf.name]
        elif setting is None and "None" in leaf.type:
            values[leaf.name] = None
        elif setting is None or setting is _MISSING:
            if leaf.default is dataclasses.MISSING or (style == "gguf" and leaf.metadata.get("said_in_gguf")):
                raise FormatError(f"{where}: the configuration has no {place or leaf.name!r}")
        else:
            values[leaf.name] = _typed(setting, leaf.type, leaf.metadata["range"], f"{where}: {place}")
    config = kind(**_in_groups(kind, values, {f.name: f.default for f in dataclasses.fields(kind)}.__getitem__))
    if config.quantization is not None:
        read_quantization(config.quantization, where)
    config.check(where)
    return config


def _in_groups(kind: type[ModelConfig], values: Mapping[str, Any], group: Callable[[str], Any]) -> dict[str, Any]:
    """Regroups values keyed by leaf into values keyed by field; `group` returns the record to update."""
    of_groups: dict[str, dict[str, Any]] = {}
    fields: dict[str, Any] = {}
    for leaf in leaves(kind):
        if leaf.name in values:
            (fields if leaf.group is None else of_groups.setdefault(leaf.group, {}))[leaf.name] = values[leaf.name]
    return fields | {name: dataclasses.replace(group(name), **members) for name, members in of_groups.items()}


_PYTHON: dict[str, tuple[Any, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "tuple": (list, tuple), "Mapping": (Mapping,)
}  # fmt: skip


def _typed(value: Any, type_: str, bounds: tuple[int, int], where: str) -> Any:
    plain = type_.split(" ")[0].split("[")[0]
    if plain == "int" and isinstance(value, (list, tuple, np.ndarray)):
        value = _same_in_all_layers(value, where)
    allowed = _PYTHON[plain]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise FormatError(f"{where}: expected {plain}, found {quoted(value)}")
    if plain == "int" and not bounds[0] <= value <= bounds[1]:
        raise FormatError(f"{where}: expected {bounds[0]} to {bounds[1]}, found {quoted(value)}")
    if plain == "float":
        if not is_number(value):
            raise FormatError(f"{where}: expected a number of 0 or more, found {quoted(value)}")
        return float(value)
    return tuple(value) if plain == "tuple" else value


def _same_in_all_layers(sizes: Any, where: str) -> Any:
    """GGUF may store a size per layer; it is a size of the model only if all layers agree."""
    values = sizes.tolist() if isinstance(sizes, np.ndarray) else list(sizes)
    if not values:
        raise FormatError(f"{where}: expected int, found []")
    if any(value != values[0] for value in values):
        raise CapabilityError(f"{where}: layers differ ({quoted(values)}), which is not supported")
    return values[0]


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def unsupported(where: str, name: str, value: object, hint: str | None = None) -> CapabilityError:
    """The error for a setting that would otherwise have to be ignored."""
    return CapabilityError(f"{where}: {name} is {quoted(value)}, which is not supported", hint=hint)


# Prefixes of the language model's weights in files of multimodal models.
TEXT_PREFIXES = ("model.language_model.", "language_model.")


def text_settings(settings: Mapping[str, Any], where: str, usual: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns the language model's settings from those of a multimodal model; `usual` fills in missing ones."""
    if "text_config" not in settings:
        return settings
    text = settings["text_config"]
    if not isinstance(text, Mapping):
        raise FormatError(f"{where}: text_config: expected an object, found {quoted(text)}")
    tied = {"tie_word_embeddings": settings["tie_word_embeddings"]} if "tie_word_embeddings" in settings else {}
    return {**(usual or {}), **text, **tied}


def check_activation(where: str, name: str) -> None:
    if name not in NAMED:
        raise unsupported(where, "hidden_act", name, hint=f"known: {', '.join(sorted(NAMED))}")


# Kinds of layers; LINEAR is the gated delta rule.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def check_layer_types(where: str, kinds: tuple[str, ...] | None, layers: int, window: int | None) -> None:
    """Check that the list of layer kinds matches the layer count, and that sliding layers have a window."""
    if kinds is None:
        return
    if len(kinds) != layers:
        raise FormatError(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise unsupported(where, "a layer type", kind, hint=f"known: {FULL}, {SLIDING}")
    if SLIDING in kinds and window is None:
        raise FormatError(f"{where}: layer_types has {SLIDING}, and no window is set")


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """Fields common to all text encoders, under their most usual names."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = {"attention.causal": (False,), "expert_count": (0,)}

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", maximum=MAX_LAYERS)
    heads: int = key(gguf="attention.head_count", hf="num_attention_heads")
    ffn: int = key(gguf="feed_forward_length", hf="intermediate_size")
    positions: int = key(gguf="context_length", hf="max_position_embeddings")
    vocab: int = key(hf="vocab_size")
    eps: float = key(gguf="attention.layer_norm_epsilon", hf="layer_norm_eps", default=1e-12)
    activation: str = key(hf="hidden_act", default="gelu")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def context(self) -> int:
        """Maximum number of tokens per text."""
        return self.positions

    def check(self, where: str) -> None:
        if self.dim % self.heads:
            raise FormatError(f"{where}: a width of {self.dim} does not split into {self.heads} heads")
        check_activation(where, self.activation)


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Fields common to all decoders."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = {
        "expert_count": (0,), "attention.causal": (True,), "pooling_type": (0,), "use_parallel_residual": (False,),
        "attention.scale": (0,), "attention.output_scale": (0, 1), "attention.temperature_scale": (0, 1),
        "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,), "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
        "rope.scaling.alpha": (0, 1), "rope.scaling.yarn_log_multiplier": (0,), "rope.dimension_sections": (),
    }  # fmt: skip

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", maximum=MAX_LAYERS)
    heads: int = key(gguf="attention.head_count", hf="num_attention_heads")
    ffn: int = key(gguf="feed_forward_length", hf="intermediate_size")
    trained: int = key(gguf="context_length", hf="max_position_embeddings", maximum=MAX_POSITIONS)
    vocab: int = key(hf="vocab_size")
    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="rms_norm_eps", default=1e-6, said_in_gguf=True)
    stated_kv_heads: int | None = key(gguf="attention.head_count_kv", hf="num_key_value_heads", default=None)
    stated_head_dim: int | None = key(gguf="attention.key_length", hf="head_dim", default=None, maximum=MAX_HEAD_DIM)
    value_dim: int | None = key(gguf="attention.value_length", default=None, maximum=MAX_HEAD_DIM)
    rope_dim: int | None = key(gguf="rope.dimension_count", default=None, maximum=MAX_HEAD_DIM)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=10000.0)
    rope_scaling: Mapping[str, Any] | None = key(hf="rope_scaling", default=None)
    activation: str = key(hf="hidden_act", default="silu")
    tied: bool = key(hf="tie_word_embeddings", default=False)

    @property
    def kv_heads(self) -> int:
        return self.stated_kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.stated_head_dim or self.dim // self.heads

    @property
    def rotary(self) -> int:
        """Elements per head that RoPE rotates."""
        return self.head_dim

    @property
    def uses_rope(self) -> bool:
        """Whether queries and keys are rotated by position (RoPE)."""
        return True

    @cached_property
    def rope(self) -> Rope:
        return Rope(self.rotary, self.rope_base, self.trained, self.rope_scaling or {})

    @property
    def context(self) -> int:
        """Maximum number of positions that the model can run with."""
        return min(self.rope.longest, MAX_POSITIONS)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None if it attends to all keys."""
        return None

    def check(self, where: str) -> None:
        if self.heads % self.kv_heads:
            raise FormatError(f"{where}: {self.heads} query heads are no multiple of {self.kv_heads} key heads")
        if self.stated_head_dim is None and self.dim % self.heads:
            raise FormatError(f"{where}: a width of {self.dim} does not split into {self.heads} heads")
        step, smallest = (2, "an even number") if self.uses_rope else (1, "1")
        if not step <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % step:
            raise FormatError(f"{where}: heads of {self.head_dim} elements; expected {smallest} to {MAX_HEAD_DIM}")
        sizes = (
            ("attention.value_length", self.value_dim, self.head_dim),
            ("rope.dimension_count", self.rope_dim, self.rotary),
        )
        for name, size, here in sizes:
            if size not in (None, here):
                raise unsupported(where, name, size, hint=f"heads have {self.head_dim} elements, and {here} are used")
        check_activation(where, self.activation)
        if self.uses_rope:
            self.rope.check(where)
