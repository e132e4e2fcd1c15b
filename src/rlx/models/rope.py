"""RoPE: the frequencies of every kind of scaling in use, and the tables of cosines and sines made of them.

A scaling is what Hugging Face calls `rope_scaling` or `rope_parameters`; what GGUF says is translated to it. Numbers
are those of `transformers`, computed in float64. Kinds that depend on the length of a sequence (`dynamic`, `longrope`)
are chosen when the graph runs, unless the model is loaded with a context in which only one choice is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError, FormatError, nearest
from rlx.flow.stages import FlowStage, RopeGrowth, RopeSwitch, RopeTables
from rlx.formats import TensorFile
from rlx.formats.tensor_file import quoted

MOST = 1e300  # beyond it, an integer of JSON may be too long for a float


def is_number(value: object) -> TypeGuard[int | float]:
    """Neither negative nor beyond what can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MOST


@dataclass(frozen=True)
class Rope:
    """How a model turns its queries and keys."""

    head_dim: int
    base: float
    trained: int  # positions that the files speak of (max_position_embeddings)
    scaling: Mapping[str, Any]  # empty: none

    @property
    def kind(self) -> str:
        found = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        name = {"su": "longrope"}.get(found, found) if isinstance(found, str) else found  # su: as Phi-3 first had it
        if not isinstance(name, str) or name not in _KINDS:
            hint = nearest(name, _KINDS) if isinstance(name, str) else None
            raise CapabilityError(
                f"rope_scaling: type {quoted(found)} is not supported", hint=hint or f"known: {', '.join(_KINDS)}"
            )
        return name

    @property
    def longest(self) -> int:
        """Positions that the model can be run with: some kinds stretch the trained ones."""
        match self.kind:
            case "linear" | "dynamic":
                return int(self.trained * max(self.number("factor"), 1.0))
            case "yarn":
                return max(self.trained, int(self.original * self.stretch))
        return self.trained

    @property
    def limit(self) -> int | None:
        """Length of a sequence beyond which frequencies are others; None where they never change."""
        return {"longrope": int(self.original), "dynamic": self.trained}.get(self.kind)

    def frequencies(self, context: int) -> tuple[Array, float]:
        """[head_dim / 2] radians per position in a sequence of this length, and the scale of cosines and sines."""
        if not is_number(self.base) or not self.base:
            raise FormatError(f"rope_theta: expected a number above 0, found {self.base}")
        with np.errstate(all="ignore"):  # what overflows is reported below
            found, attention = _KINDS[self.kind](self, context)
        if not (np.isfinite(found).all() and math.isfinite(attention)):
            raise FormatError(f"rope_scaling: the numbers of {quoted(dict(self.scaling))} are out of range")
        return found, attention

    def check(self, where: str) -> None:
        """Raise what is wrong with it, with the place of its file."""
        try:
            self.frequencies(self.longest)
        except (FormatError, CapabilityError) as error:
            error.add_note(f"  in: {where}")
            raise

    def plain(self, base: float | None = None) -> Array:
        base = self.base if base is None else base
        return np.asarray(base ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim))

    # -- members of the scaling --
    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; null counts as absent, as in `transformers`."""
        found = self.scaling.get(name)
        if found is None:
            if default is None:
                raise FormatError(f"rope_scaling: type {self.kind!r} has no {name!r}")
            return default
        if not is_number(found) or not found:
            raise FormatError(f"rope_scaling: {name}: expected a number above 0, found {quoted(found)}")
        return float(found)

    def optional(self, name: str, default: float) -> float:
        """A number; 0 counts as absent too."""
        return default if self.scaling.get(name) == 0 else self.number(name, default)

    def each(self, name: str) -> Array:
        """A number above 0 for every frequency."""
        found = self.scaling.get(name)
        half = self.head_dim // 2
        if not isinstance(found, (list, tuple)) or len(found) != half:
            shown = f"{len(found)}" if isinstance(found, (list, tuple)) else quoted(found)
            raise FormatError(f"rope_scaling: {name}: expected {half} numbers, found {shown}")
        for value in found:
            if not is_number(value) or not value:
                raise FormatError(f"rope_scaling: {name}: expected numbers above 0, found {quoted(value)}")
        return np.asarray(found, np.float64)

    @property
    def original(self) -> float:
        """Positions before the scaling stretched them."""
        return self.number("original_max_position_embeddings", self.trained)

    @property
    def stretch(self) -> float:
        """The factor, or what the lengths say where there is none."""
        return self.number("factor", self.trained / self.original)


def rope_tables(rope: Rope, context: int, factors: Array | None = None) -> tuple[Array, Array]:
    """cos and sin `[context, head_dim / 2]` as f32. `factors` divide the frequencies: GGUF's form of Llama 3's."""
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
    """What has the layers turn by `rope`, in sequences of up to `context` tokens."""
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
    """NTK: a base that grows with the length, once it is beyond the trained one."""
    factor, dim = rope.number("factor"), rope.head_dim
    if dim <= 2:
        raise FormatError(f"rope_scaling: type 'dynamic' needs heads of more than 2 elements, found {dim}")
    growth = factor * max(context, rope.trained) / rope.trained - (factor - 1)
    return rope.plain(rope.base * growth ** (dim / (dim - 2))), 1.0


def _llama3(rope: Rope, context: int) -> tuple[Array, float]:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise FormatError(f"rope_scaling: expected low_freq_factor below high_freq_factor, found {low} and {high}")
    plain = rope.plain()
    turns = rope.original * plain / (2 * math.pi)  # in the original context
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(rope: Rope, context: int) -> tuple[Array, float]:
    """Interpolation by parts between stretched and plain frequencies, and a gentler softmax (arXiv 2309.00071)."""
    factor, plain, dim = rope.stretch, rope.plain(), rope.head_dim

    def turn(rotations: float) -> float:
        return dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    if rope.base == 1:
        raise FormatError("rope_theta: 1 has no frequencies for type 'yarn' to blend")
    low, high = turn(rope.optional("beta_fast", 32)), turn(rope.optional("beta_slow", 1))
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
    """A factor for each frequency, one set within the original context and one beyond (arXiv 2402.13753)."""
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
    """`rope_theta` and `rope_scaling`, wherever a file keeps them: newer ones have all in `rope_parameters`."""
    name = next((n for n in ("rope_scaling", "rope_parameters") if settings.get(n)), "rope_parameters")
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise FormatError(f"{where}: {name}: expected an object, found {quoted(given)}")
    scaling = dict(given)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise CapabilityError(f"{where}: {name} differs by the kind of layer, which is not supported")
    original = settings.get("original_max_position_embeddings")
    if original is not None:  # Phi-3's place for it goes first in transformers too
        scaling["original_max_position_embeddings"] = original
    moved = {
        name: settings.get(name) if (found := scaling.pop(name, None)) is None else found
        for name in ("rope_theta", "partial_rotary_factor")
    }
    return {"rope_scaling": scaling, **moved}


def of_layer_kind(ropes: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The parameters of one kind of layers in `rope_parameters`; `truncate` stands beside them in `transformers`."""
    found = ropes.get(kind) or {}
    if not isinstance(found, Mapping):
        raise FormatError(f"{where}: rope_parameters.{kind}: expected an object, found {quoted(found)}")
    beside = {"truncate": ropes["truncate"]} if "truncate" in ropes else {}
    return {name: value for name, value in found.items() if name != "truncate"} | (beside if found else {})


def scaling_of_gguf(metadata: Mapping[str, Any], file: TensorFile) -> dict[str, Any] | None:
    """What llama.cpp makes of the `rope.scaling` keys and the tensors of long contexts, in Hugging Face's words."""
    prefix = f"{metadata.get('general.architecture')}.rope"

    def number(name: str, default: float) -> float:
        found = metadata.get(f"{prefix}.{name}", default)
        if not is_number(found):
            raise FormatError(f"{file.path}: {prefix}.{name}: expected a number of 0 or more, found {quoted(found)}")
        return float(found) or default

    # Phi-3's files have the factors and do not say the kind
    kind = metadata.get(f"{prefix}.scaling.type", "longrope" if "rope_factors_long.weight" in file else "linear")
    factor = number("scaling.factor", number("scale_linear", 1.0))
    attention, original = number("scaling.attn_factor", 1.0), number("scaling.original_context_length", 0) or None
    blend = metadata.get(f"{prefix}.scaling.yarn_ext_factor", -1)  # below 0: by kind
    if not isinstance(kind, str):
        raise _refused(file, f"{prefix}.scaling.type", kind)
    if not isinstance(blend, (int, float)) or blend not in (-1, 1 if kind == "yarn" else 0):
        raise _refused(file, f"{prefix}.scaling.yarn_ext_factor", blend)
    match kind:
        case "none" | "linear":
            if attention != 1:
                raise _refused(file, f"{prefix}.scaling.attn_factor", attention)
            return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            attention *= _mscale(factor, 1.0)
            given = number("scaling.yarn_attn_factor", attention)
            if abs(given - attention) > 1e-5:  # transformers would use it, llama.cpp does not
                raise _refused(file, f"{prefix}.scaling.yarn_attn_factor", given)
            return {
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": attention, "beta_fast": number("scaling.yarn_beta_fast", 32.0),
                "beta_slow": number("scaling.yarn_beta_slow", 1.0),
            }  # fmt: skip
        case "longrope":
            if factor != 1:
                raise _refused(file, f"{prefix}.scaling.factor", factor)
            return {
                "rope_type": "longrope", "original_max_position_embeddings": original, "attention_factor": attention,
                **{f"{n}_factor": file.dequantised(f"rope_factors_{n}.weight").tolist() for n in ("short", "long")},
            }  # fmt: skip
    raise _refused(file, f"{prefix}.scaling.type", kind)


def _refused(file: TensorFile, name: str, found: object) -> CapabilityError:
    return CapabilityError(f"{file.path}: {name} is {quoted(found)}, which is not supported")
