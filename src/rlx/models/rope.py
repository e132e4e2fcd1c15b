"""RoPE: frequencies for every kind of scaling in use, and the cosine and sine tables computed from them.

A scaling is Hugging Face's `rope_scaling` or `rope_parameters`; GGUF settings are translated to it. Values match
`transformers`, computed in float64. Kinds that depend on the sequence length (`dynamic`, `longrope`) are selected when
the graph runs, unless the model is loaded with a context that leaves only one choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError, FormatError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.stages import FlowStage, RopeGrowth, RopeSwitch, RopeTables
from rlx.formats import TensorFile
from rlx.formats.tensor_file import quoted

MAX_NUMBER = 1e300  # a longer JSON integer may not fit a float


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is a non-negative number of usable size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


@dataclass(frozen=True)
class Rope:
    """The RoPE parameters of a model."""

    head_dim: int
    base: float
    trained: int  # max_position_embeddings
    scaling: Mapping[str, Any]  # empty: none

    @property
    def kind(self) -> str:
        stated = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        name = {"su": "longrope"}.get(stated, stated) if isinstance(stated, str) else stated  # su: its first name
        if not isinstance(name, str) or name not in _KINDS:
            hint = nearest(name, _KINDS) if isinstance(name, str) else None
            raise CapabilityError(
                f"rope_scaling: type {quoted(stated)} is not supported", hint=hint or f"known: {', '.join(_KINDS)}"
            )
        return name

    @property
    def longest(self) -> int:
        """Maximum number of positions: some kinds extend the trained ones."""
        match self.kind:
            case "linear" | "dynamic":
                return int(self.trained * max(self.number("factor"), 1.0))
            case "yarn":
                return max(self.trained, int(self.original * self.stretch))
        return self.trained

    @property
    def limit(self) -> int | None:
        """Sequence length beyond which the frequencies change; None if they never do."""
        return {"longrope": int(self.original), "dynamic": self.trained}.get(self.kind)

    def frequencies(self, context: int) -> tuple[Array, float]:
        """[head_dim / 2] radians per position for sequences of this length, and the scale of cosines and sines."""
        if not is_number(self.base) or not self.base:
            raise FormatError(f"rope_theta: expected a number above 0, found {self.base}")
        with np.errstate(all="ignore"):  # overflow is reported below
            radians, attention = _KINDS[self.kind](self, context)
        if not (np.isfinite(radians).all() and math.isfinite(attention)):
            raise FormatError(f"rope_scaling: the numbers of {quoted(dict(self.scaling))} are out of range")
        return radians, attention

    def check(self, where: str) -> None:
        """Raise any error in the parameters, with a note that names the file."""
        try:
            self.frequencies(self.longest)
        except (FormatError, CapabilityError) as error:
            error.add_note(f"  in: {where}")
            raise

    def plain(self, base: float | None = None) -> Array:
        base = self.base if base is None else base
        return np.asarray(base ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim))

    # -- members of `scaling` --
    def number(self, name: str, default: float | None = None) -> float:
        """A member above 0; null counts as absent, as in `transformers`."""
        value = self.scaling.get(name)
        if value is None:
            if default is None:
                raise FormatError(f"rope_scaling: type {self.kind!r} has no {name!r}")
            return default
        if not is_number(value) or not value:
            raise FormatError(f"rope_scaling: {name}: expected a number above 0, found {quoted(value)}")
        return float(value)

    def optional(self, name: str, default: float) -> float:
        """Like `number`, but 0 counts as absent too."""
        return default if self.scaling.get(name) == 0 else self.number(name, default)

    def each(self, name: str) -> Array:
        """One number above 0 per frequency."""
        values = self.scaling.get(name)
        half = self.head_dim // 2
        if not isinstance(values, (list, tuple)) or len(values) != half:
            shown = f"{len(values)}" if isinstance(values, (list, tuple)) else quoted(values)
            raise FormatError(f"rope_scaling: {name}: expected {half} numbers, found {shown}")
        for value in values:
            if not is_number(value) or not value:
                raise FormatError(f"rope_scaling: {name}: expected numbers above 0, found {quoted(value)}")
        return np.asarray(values, np.float64)

    @property
    def original(self) -> float:
        """Number of positions before scaling."""
        return self.number("original_max_position_embeddings", self.trained)

    @property
    def stretch(self) -> float:
        """The scaling factor, inferred from the lengths if absent."""
        return self.number("factor", self.trained / self.original)


def rope_tables(rope: Rope, context: int, factors: Array | None = None) -> tuple[Array, Array]:
    """cos and sin `[context, head_dim / 2]` as f32. `factors` divides the frequencies: Llama 3 scaling in GGUF."""
    frequencies, attention = rope.frequencies(context)
    if factors is not None:
        if factors.shape != frequencies.shape or not (np.isfinite(factors).all() and (factors > 0).all()):
            raise FormatError(f"rope_freqs: expected {len(frequencies)} numbers above 0, found {factors.shape}")
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.arange(context, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * attention).astype(np.float32), (np.sin(angles) * attention).astype(np.float32)


def rope_stage(
    rope: Rope, context: int, factors: Array | None = None, *, style: str = "halves", name: str = "rope"
) -> FlowStage:
    """The stage that provides RoPE tables to the layers, for sequences of up to `context` tokens."""
    limit = rope.limit
    if limit is None or context <= limit:
        return RopeTables(*rope_tables(rope, context, factors), style, f"{name}.cos", f"{name}.sin")
    if rope.kind == "longrope":
        short, long = rope_tables(rope, limit, factors), rope_tables(rope, context, factors)
        cos, sin = (np.concatenate(pair) for pair in zip(short, long, strict=True))
        return RopeSwitch(cos, sin, limit, style, name)
    sets = [rope.frequencies(length) for length in range(limit, context + 1)]
    frequencies = np.stack([each / (1 if factors is None else factors) for each, _ in sets])
    return RopeGrowth(frequencies, limit, sets[0][1], style, name)


# -- kinds -----------------------------------------------------------------------------------------------------------
def _default(rope: Rope, context: int) -> tuple[Array, float]:
    return rope.plain(), 1.0


def _linear(rope: Rope, context: int) -> tuple[Array, float]:
    return rope.plain() / rope.number("factor"), 1.0


def _dynamic(rope: Rope, context: int) -> tuple[Array, float]:
    """NTK: the base grows with the length once it exceeds the trained one."""
    factor, dim = rope.number("factor"), rope.head_dim
    if dim <= 2:
        raise FormatError(f"rope_scaling: type 'dynamic' needs heads of more than 2 elements, found {dim}")
    growth = factor * max(context, rope.trained) / rope.trained - (factor - 1)
    return rope.plain(rope.base * growth ** (dim / (dim - 2))), 1.0


def _llama3(rope: Rope, context: int) -> tuple[Array, float]:
    """Low frequencies are divided by the factor, high ones are unchanged, those in between are blended."""
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise FormatError(f"rope_scaling: expected low_freq_factor below high_freq_factor, found {low} and {high}")
    plain = rope.plain()
    turns = rope.original * plain / (2 * math.pi)  # rotations within the original context
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(rope: Rope, context: int) -> tuple[Array, float]:
    """Blend of scaled and plain frequencies per dimension, and a softmax temperature (arXiv 2309.00071)."""
    factor, plain, dim = rope.stretch, rope.plain(), rope.head_dim

    def pair_at(rotations: float) -> float:
        return dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    if rope.base == 1:
        raise FormatError("rope_theta: 1 has no frequencies for type 'yarn' to blend")
    low, high = pair_at(rope.optional("beta_fast", 32)), pair_at(rope.optional("beta_slow", 1))
    truncate = rope.scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise FormatError(f"rope_scaling: truncate: expected true or false, found {quoted(truncate)}")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    weights = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    inferred = _mscale(factor, 1)
    if all(weights):
        inferred = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    return plain / factor * ramp + plain * (1 - ramp), rope.number("attention_factor", inferred)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: Rope, context: int) -> tuple[Array, float]:
    """One factor per frequency: one set within the original context, another beyond it (arXiv 2402.13753)."""
    sets = {name: rope.each(name) for name in ("short_factor", "long_factor")}
    inferred = 1.0
    if rope.stretch > 1:
        if rope.original <= 1:
            raise FormatError(
                f"rope_scaling: original_max_position_embeddings: expected above 1, found {rope.original}"
            )
        inferred = math.sqrt(1 + math.log(rope.stretch) / math.log(rope.original))
    chosen = sets["long_factor" if context > rope.original else "short_factor"]
    return rope.plain() / chosen, rope.number("attention_factor", inferred)


_KINDS: dict[str, Callable[[Rope, int], tuple[Array, float]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip


# -- from files ------------------------------------------------------------------------------------------------------
def scaling_of_hf(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from wherever a file stores them: newer files use `rope_parameters` for both."""
    name = next((n for n in ("rope_scaling", "rope_parameters") if settings.get(n)), "rope_parameters")
    parameters = settings.get(name) or {}
    if not isinstance(parameters, Mapping):
        raise FormatError(f"{where}: {name}: expected an object, found {quoted(parameters)}")
    scaling = dict(parameters)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise CapabilityError(f"{where}: {name} differs by the kind of layer, which is not supported")
    original = settings.get("original_max_position_embeddings")
    if original is not None:  # transformers also gives Phi-3's place precedence
        scaling["original_max_position_embeddings"] = original
    moved = {
        name: settings.get(name) if (value := scaling.pop(name, None)) is None else value
        for name in ("rope_theta", "partial_rotary_factor")
    }
    return {"rope_scaling": scaling, **moved}


def of_layer_kind(ropes: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The parameters of one kind of layer in `rope_parameters`; `truncate` is shared by all kinds in `transformers`."""
    parameters = ropes.get(kind) or {}
    if not isinstance(parameters, Mapping):
        raise FormatError(f"{where}: rope_parameters.{kind}: expected an object, found {quoted(parameters)}")
    shared = {"truncate": ropes["truncate"]} if "truncate" in ropes else {}
    return {name: value for name, value in parameters.items() if name != "truncate"} | (shared if parameters else {})


def scaling_of_gguf(metadata: Mapping[str, Any], file: TensorFile) -> dict[str, Any] | None:
    """Translates GGUF's `rope.scaling` keys and long-context tensors to Hugging Face terms, as llama.cpp reads them."""
    prefix = f"{metadata.get('general.architecture')}.rope"

    def number(name: str, default: float) -> float:
        value = metadata.get(f"{prefix}.{name}", default)
        if not is_number(value):
            raise FormatError(f"{file.path}: {prefix}.{name}: expected a number of 0 or more, found {quoted(value)}")
        return float(value) or default

    # Phi-3 files have the factors but not the kind
    kind = metadata.get(f"{prefix}.scaling.type", "longrope" if "rope_factors_long.weight" in file else "linear")
    factor = number("scaling.factor", number("scale_linear", 1.0))
    attention, original = number("scaling.attn_factor", 1.0), number("scaling.original_context_length", 0) or None
    blend = metadata.get(f"{prefix}.scaling.yarn_ext_factor", -1)  # negative: determined by the kind
    if not isinstance(kind, str):
        raise _unsupported(file, f"{prefix}.scaling.type", kind)
    if not isinstance(blend, (int, float)) or blend not in (-1, 1 if kind == "yarn" else 0):
        raise _unsupported(file, f"{prefix}.scaling.yarn_ext_factor", blend)
    match kind:
        case "none" | "linear":
            if attention != 1:
                raise _unsupported(file, f"{prefix}.scaling.attn_factor", attention)
            return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            attention *= _mscale(factor, 1.0)
            stated = number("scaling.yarn_attn_factor", attention)
            if abs(stated - attention) > 1e-5:  # transformers would use it, llama.cpp does not
                raise _unsupported(file, f"{prefix}.scaling.yarn_attn_factor", stated)
            return {
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": attention, "beta_fast": number("scaling.yarn_beta_fast", 32.0),
                "beta_slow": number("scaling.yarn_beta_slow", 1.0),
            }  # fmt: skip
        case "longrope":
            if factor != 1:
                raise _unsupported(file, f"{prefix}.scaling.factor", factor)
            return {
                "rope_type": "longrope", "original_max_position_embeddings": original, "attention_factor": attention,
                **{f"{n}_factor": file.dequantised(f"rope_factors_{n}.weight").tolist() for n in ("short", "long")},
            }  # fmt: skip
    raise _unsupported(file, f"{prefix}.scaling.type", kind)


def _unsupported(file: TensorFile, name: str, value: object) -> CapabilityError:
    return CapabilityError(f"{file.path}: {name} is {quoted(value)}, which is not supported")
