"""Model configurations: what a family needs to know, read from a Hugging Face `config.json` or from GGUF metadata.

A field says where it stands in each: `key(gguf="block_count", hf="num_hidden_layers")`. GGUF keys are under the
architecture's name. Whatever a file says is checked here, before anything is built: sizes are positive and bounded,
and a switch that a family does not have is refused by name, because ignoring it would give wrong numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from rlx.errors import CapabilityError, FormatError
from rlx.fork_safe_locks import cached_property
from rlx.formats import TensorFile
from rlx.formats.scaled_weights import read_quantization
from rlx.formats.tensor_file import quoted
from rlx.hir.activations import NAMED
from rlx.models.rope import Rope, is_number

Neutral = Mapping[str, tuple[Any, ...]]  # settings that are no fields, and the values that may be ignored
_MISSING = object()
MAX_SIZE = 1 << 24  # of an axis of a weight
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = (1 << 31) - 1  # positions are i32


def key(
    *, gguf: str | None = None, hf: str | None = None, default: Any = _MISSING, least: int = 1, most: int = MAX_SIZE,
    said_in_gguf: bool = False,
) -> Any:  # fmt: skip
    """A field of a configuration, its names in files, and the range of an integer.

    The default is that of `transformers`; a GGUF file may be required to say the value all the same.
    """
    about = {"gguf": gguf, "hf": hf, "range": (least, most), "said_in_gguf": said_in_gguf}
    if default is _MISSING:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Leaf:
    """A single value of a configuration: a field of its class, or of a group that the class has."""

    name: str
    type: str
    default: Any
    metadata: Mapping[str, Any]
    group: str | None = None  # the field of the class that holds it

    @classmethod
    def of(cls, field: dataclasses.Field[Any]) -> Leaf:
        type_ = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        return cls(field.name, type_, field.default, field.metadata)


def group(kind: type[Any], **own: Any) -> Any:
    """A field that holds a record of fields which several families share.

    `own` replaces single ones: with a `key` of this family's, or with a value that no file says.
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
    """All values of a configuration, those of its groups among them. No two have the same name."""
    found: list[Leaf] = []
    for field in dataclasses.fields(kind):
        members = field.metadata.get("leaves")
        found += [Leaf.of(field)] if members is None else [dataclasses.replace(m, group=field.name) for m in members]
    return tuple(found)


def record_types(kind: type[ModelConfig]) -> tuple[type, ...]:
    """The classes that a configuration is made of: its own, and those of its groups."""
    groups = (type(field.default) for field in dataclasses.fields(kind) if "leaves" in field.metadata)
    return (kind, *groups)


@dataclass(frozen=True)
class ModelConfig:
    """What the configurations of all families share."""

    # Settings that are no fields: the values with which a model computes what its family computes.
    HF_NEUTRAL: ClassVar[Neutral] = {
        "compression_config": (None,),  # of compressed-tensors, in older files
        "partial_rotary_factor": (None, 1),
    }
    GGUF_NEUTRAL: ClassVar[Neutral] = {}
    # Fields that say how weights are kept: what they are for GGUF files. Hugging Face's have the defaults.
    IN_GGUF: ClassVar[Mapping[str, Any]] = {}

    initializer_range: float = dataclasses.field(
        default=0.02, kw_only=True, metadata={"gguf": None, "hf": "initializer_range", "range": (0, 0)}
    )  # the deviation of weights that are not trained yet
    quantization: Mapping[str, Any] | None = dataclasses.field(
        default=None, kw_only=True, metadata={"gguf": None, "hf": "quantization_config", "range": (0, 0)}
    )  # how a folder stores its weights (`formats/scaled_weights.py`); GGUF's tensors say it themselves

    def check(self, where: str) -> None:
        """Raise FormatError for sizes that do not go together, CapabilityError for what the family cannot do."""

    def value(self, leaf: Leaf) -> Any:
        return getattr(self if leaf.group is None else getattr(self, leaf.group), leaf.name)

    def changed(self, **values: Any) -> Self:
        """A copy with other values, by their names as leaves."""
        return dataclasses.replace(self, **_in_groups(type(self), values, lambda name: getattr(self, name)))

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        """Fields by name that GGUF does not say in words: they are seen by the tensors that are there."""
        return {}

    def only_in_gguf(self) -> dict[str, Any]:
        """Settings by their names in GGUF that are no fields, or not as GGUF has them."""
        return {}

    def left_out(self) -> tuple[str, ...]:
        """Weights of the family (by their pattern) that a model of this configuration does not have."""
        return ()


Config = TypeVar("Config", bound=ModelConfig)


def from_hf(
    kind: type[Config], settings: Mapping[str, Any], where: str, known: Mapping[str, Any] | None = None
) -> Config:
    """A configuration from a Hugging Face config; `known` are fields by name that it does not speak of."""
    return _read(kind, "hf", lambda name: settings.get(name, _MISSING), where, known or {})


def from_gguf(
    kind: type[Config], metadata: Mapping[str, Any], where: str, known: Mapping[str, Any] | None = None
) -> Config:
    """A configuration from GGUF metadata; `known` are fields by name that it does not speak of."""
    prefix = metadata.get("general.architecture")
    return _read(kind, "gguf", lambda name: metadata.get(f"{prefix}.{name}", _MISSING), where, known or {})


def _read(kind: type[Config], style: str, lookup: Callable[[str], Any], where: str, known: Mapping[str, Any]) -> Config:
    for name, allowed in (kind.HF_NEUTRAL if style == "hf" else kind.GGUF_NEUTRAL).items():
        found = lookup(name)
        if found is not _MISSING and not (_is_scalar(found) and found in allowed):
            raise unsupported(where, name, found)
    values: dict[str, Any] = {}
    for leaf in leaves(kind):
        place: str | None = leaf.metadata.get(style)
        found = _MISSING if place is None else lookup(place)
        if leaf.name in known:
            values[leaf.name] = known[leaf.name]
        elif found is None and "None" in leaf.type:
            values[leaf.name] = None
        elif found is None or found is _MISSING:
            if leaf.default is dataclasses.MISSING or (style == "gguf" and leaf.metadata.get("said_in_gguf")):
                raise FormatError(f"{where}: the configuration has no {place or leaf.name!r}")
        else:
            values[leaf.name] = _typed(found, leaf.type, leaf.metadata["range"], f"{where}: {place}")
    config = kind(**_in_groups(kind, values, {f.name: f.default for f in dataclasses.fields(kind)}.__getitem__))
    if config.quantization is not None:
        read_quantization(config.quantization, where)
    config.check(where)
    return config


def _in_groups(kind: type[ModelConfig], values: Mapping[str, Any], group: Callable[[str], Any]) -> dict[str, Any]:
    """Values by leaf as values by field: `group` gives the record that a group's values are put into."""
    of_groups: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for leaf in leaves(kind):
        if leaf.name in values:
            (found if leaf.group is None else of_groups.setdefault(leaf.group, {}))[leaf.name] = values[leaf.name]
    return found | {name: dataclasses.replace(group(name), **members) for name, members in of_groups.items()}


_PYTHON: dict[str, tuple[Any, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "tuple": (list, tuple), "Mapping": (Mapping,)
}  # fmt: skip


def _typed(found: Any, type_: str, bounds: tuple[int, int], where: str) -> Any:
    plain = type_.split(" ")[0].split("[")[0]
    if plain == "int" and isinstance(found, (list, tuple, np.ndarray)):
        found = _same_in_all_layers(found, where)
    allowed = _PYTHON[plain]
    if not isinstance(found, allowed) or (isinstance(found, bool) and bool not in allowed):
        raise FormatError(f"{where}: expected {plain}, found {quoted(found)}")
    if plain == "int" and not bounds[0] <= found <= bounds[1]:
        raise FormatError(f"{where}: expected {bounds[0]} to {bounds[1]}, found {quoted(found)}")
    if plain == "float":
        if not is_number(found):
            raise FormatError(f"{where}: expected a number of 0 or more, found {quoted(found)}")
        return float(found)
    return tuple(found) if plain == "tuple" else found


def _same_in_all_layers(found: Any, where: str) -> Any:
    """GGUF may give a size for each layer; only where they are all the same is it a size of the model."""
    values = found.tolist() if isinstance(found, np.ndarray) else list(found)
    if not values:
        raise FormatError(f"{where}: expected int, found []")
    if any(value != values[0] for value in values):
        raise CapabilityError(f"{where}: layers differ ({quoted(values)}), which is not supported")
    return values[0]


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def unsupported(where: str, name: str, found: object, hint: str | None = None) -> CapabilityError:
    """What is raised for a setting that would have to be ignored."""
    return CapabilityError(f"{where}: {name} is {quoted(found)}, which is not supported", hint=hint)


# Before the names of a language model's weights, where the file has a model that also sees images.
TEXT_PREFIXES = ("model.language_model.", "language_model.")


def text_settings(settings: Mapping[str, Any], where: str, usual: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The settings of the language model in those of a model that also sees images, `usual` where they are silent."""
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


# Kinds of layers, the last one with the delta rule.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def check_layer_types(where: str, kinds: tuple[str, ...] | None, layers: int, window: int | None) -> None:
    """Whether a list of kinds fits the layers, and those that see a window only have one."""
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
    """What every encoder of texts has, under the names that most of them use."""

    GGUF_NEUTRAL: ClassVar[Neutral] = {"attention.causal": (False,), "expert_count": (0,)}

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", most=MAX_LAYERS)
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
        """Tokens that a text may have."""
        return self.positions

    def check(self, where: str) -> None:
        if self.dim % self.heads:
            raise FormatError(f"{where}: a width of {self.dim} does not split into {self.heads} heads")
        check_activation(where, self.activation)


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """What every decoder has."""

    GGUF_NEUTRAL: ClassVar[Neutral] = {
        "expert_count": (0,), "attention.causal": (True,), "pooling_type": (0,), "use_parallel_residual": (False,),
        "attention.scale": (0,), "attention.output_scale": (0, 1), "attention.temperature_scale": (0, 1),
        "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,), "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
        "rope.scaling.alpha": (0, 1), "rope.scaling.yarn_log_multiplier": (0,), "rope.dimension_sections": (),
    }  # fmt: skip

    dim: int = key(gguf="embedding_length", hf="hidden_size")
    layers: int = key(gguf="block_count", hf="num_hidden_layers", most=MAX_LAYERS)
    heads: int = key(gguf="attention.head_count", hf="num_attention_heads")
    ffn: int = key(gguf="feed_forward_length", hf="intermediate_size")
    trained: int = key(gguf="context_length", hf="max_position_embeddings", most=MAX_POSITIONS)
    vocab: int = key(hf="vocab_size")
    eps: float = key(gguf="attention.layer_norm_rms_epsilon", hf="rms_norm_eps", default=1e-6, said_in_gguf=True)
    kv_heads_given: int | None = key(gguf="attention.head_count_kv", hf="num_key_value_heads", default=None)
    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=None, most=MAX_HEAD_DIM)
    value_dim: int | None = key(gguf="attention.value_length", default=None, most=MAX_HEAD_DIM)
    rope_dim: int | None = key(gguf="rope.dimension_count", default=None, most=MAX_HEAD_DIM)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=10000.0)
    rope_scaling: Mapping[str, Any] | None = key(hf="rope_scaling", default=None)
    activation: str = key(hf="hidden_act", default="silu")
    tied: bool = key(hf="tie_word_embeddings", default=False)

    @property
    def kv_heads(self) -> int:
        return self.kv_heads_given or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_dim_given or self.dim // self.heads

    @property
    def rotary(self) -> int:
        """Elements of a head that turn."""
        return self.head_dim

    @property
    def turns(self) -> bool:
        """Whether queries and keys turn by their position."""
        return True

    @cached_property
    def rope(self) -> Rope:
        return Rope(self.rotary, self.rope_base, self.trained, self.rope_scaling or {})

    @property
    def context(self) -> int:
        """Positions that the model can be run with."""
        return min(self.rope.longest, MAX_POSITIONS)

    def window(self, layer: int) -> int | None:
        """How many keys a layer sees, where that is bounded."""
        return None

    def check(self, where: str) -> None:
        if self.heads % self.kv_heads:
            raise FormatError(f"{where}: {self.heads} query heads are no multiple of {self.kv_heads} key heads")
        if self.head_dim_given is None and self.dim % self.heads:
            raise FormatError(f"{where}: a width of {self.dim} does not split into {self.heads} heads")
        least, what = (2, "an even number") if self.turns else (1, "1")
        if not least <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % least:
            raise FormatError(f"{where}: heads of {self.head_dim} elements; expected {what} to {MAX_HEAD_DIM}")
        sizes = (
            ("attention.value_length", self.value_dim, self.head_dim),
            ("rope.dimension_count", self.rope_dim, self.rotary),
        )
        for name, found, here in sizes:
            if found not in (None, here):
                raise unsupported(where, name, found, hint=f"heads have {self.head_dim} elements, and {here} are used")
        check_activation(where, self.activation)
        if self.turns:
            self.rope.check(where)
