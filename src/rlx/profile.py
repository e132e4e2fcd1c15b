"""Compile profiles: what a compilation may do, as data. Presets by name, and TOML both ways.

A profile says how HIR blocks are lowered and which fusions happen (`fusion`), which other passes run (`passes`) and in
which element type values are kept between ops (`precision`). `rlx.compile(graph, profile=...)` honours every field.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlx.errors import CapabilityError, FormatError, nearest


class FusionPolicy(enum.Enum):
    """How blocks become MIR: DIRECT gives the fused op at once, FUSABLE gives plain ops that passes fuse later."""

    DIRECT = "direct"
    FUSABLE = "fusable"


# Devices that a profile may be meant for, then the processors that `rlx.target` knows.
DEVICES = ("cpu", "cuda", "metal", "mlx", "rocm", "wgpu", "tpu")
PROCESSORS = ("avx512", "avx2", "baseline", "neon")
NARROW = ("f16", "bf16")


@dataclass(frozen=True, slots=True)
class Fusion:
    """Fusion. `target` is auto, a device or a processor; `assert_clean` makes a missed fusion an error."""

    policy: FusionPolicy = FusionPolicy.DIRECT
    target: str = "auto"
    assert_clean: bool = False
    skip: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", _one_of("fusion.policy", self.policy, FusionPolicy))
        _choice("fusion.target", self.target, ("auto", *DEVICES, *PROCESSORS))
        _flags("fusion", self)
        if self.skip and self.assert_clean:
            raise CapabilityError("profile: fusion.skip and fusion.assert_clean exclude each other")


@dataclass(frozen=True, slots=True)
class Passes:
    """Which cleaning passes run; `verbose` prints on stderr what the passes did and the graphs they left."""

    dce: bool = True
    constant_folding: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        _flags("passes", self)


@dataclass(frozen=True, slots=True)
class Precision:
    """The type that f32 values are stored in between kernels: `compute` is f32, f16 or bf16. Arithmetic stays f32.

    With `mixed = "auto"` reductions, softmax and norms keep f32 results.
    """

    compute: str = "f32"
    mixed: str = "none"

    def __post_init__(self) -> None:
        _choice("precision.compute", self.compute, ("f32", *NARROW))
        _choice("precision.mixed", self.mixed, ("none", "auto"))
        if self.mixed == "auto" and self.compute == "f32":
            raise CapabilityError(
                "profile: precision.mixed is 'auto', precision.compute is 'f32': there is nothing to mix",
                hint="set precision.compute to 'bf16' or 'f16'",
            )


@dataclass(frozen=True, slots=True)
class CompileProfile:
    """Everything that a compilation is told beside the graph, the device and the number of threads."""

    fusion: Fusion = field(default_factory=Fusion)
    passes: Passes = field(default_factory=Passes)
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise CapabilityError(f"profile: {name} is a {type(value).__name__}, expected a {kind.__name__}")

    # -- presets --
    @classmethod
    def prefill(cls) -> CompileProfile:
        """Many tokens at once: blocks lower to fused ops."""
        return cls()

    @classmethod
    def decode(cls) -> CompileProfile:
        """A token at a time: blocks lower to plain ops, so that passes see what surrounds the cache."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE))

    @classmethod
    def encoder(cls) -> CompileProfile:
        """Whole texts or images at once."""
        return cls()

    @classmethod
    def training(cls) -> CompileProfile:
        """Blocks lower to plain ops, each of which has derivative rules."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE))

    @classmethod
    def unfused(cls) -> CompileProfile:
        """One kernel an op: for looking for faults."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE, skip=True))

    @classmethod
    def preset(cls, name: str) -> CompileProfile:
        """A preset by name; names of model families are aliases."""
        if name not in PRESETS:
            raise CapabilityError(f"profile: no preset is called {name!r}", hint=nearest(name, PRESETS))
        return PRESETS[name]()

    # -- text --
    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> CompileProfile:
        """A profile from a TOML file, or from TOML text. All keys are optional; an unknown one is an error."""
        import tomllib  # a third of the time that this module takes to import

        where, text = _read(source)
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{where}: is not TOML: {error}") from error
        _known(where, "", tables, cls)
        try:
            return cls(**{f.name: _section(where, f.name, tables.get(f.name, {})) for f in fields(cls)})
        except CapabilityError as error:
            raise FormatError(f"{where}: {str(error).removeprefix('profile: ')}", hint=error.hint) from error

    def to_toml(self) -> str:
        """The profile as TOML, every field written out."""
        parts = []
        for section in fields(self):
            values = getattr(self, section.name)
            lines = [f"{f.name} = {_toml(getattr(values, f.name))}" for f in fields(values)]
            parts.append("\n".join([f"[{section.name}]", *lines]))
        return "\n\n".join(parts) + "\n"

    def key(self) -> str:
        """A digest of what the profile changes in the result, the same in every process."""
        lines = [line for line in self.to_toml().splitlines() if not line.startswith("verbose")]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


_SECTIONS = {"fusion": Fusion, "passes": Passes, "precision": Precision}

# The families that the names stand for need nothing of their own; what they share is said once.
PRESETS: dict[str, Callable[[], CompileProfile]] = {
    "prefill": CompileProfile.prefill, "decode": CompileProfile.decode, "encoder": CompileProfile.encoder,
    "training": CompileProfile.training, "unfused": CompileProfile.unfused,
    **{f"{family}_prefill": CompileProfile.prefill for family in ("llama32", "qwen35", "qwen3", "gemma")},
    **{f"{family}_decode": CompileProfile.decode for family in ("llama32", "qwen35", "qwen3", "gemma")},
    **dict.fromkeys(("flux2", "sam_encoder", "sam2", "sam3"), CompileProfile.encoder),
    **dict.fromkeys(("sam2_memory_attention", "llada2_diffusion"), CompileProfile.unfused),
}  # fmt: skip


def _read(source: str | os.PathLike[str]) -> tuple[str, str]:
    """What to call the source in errors, and its text. A string that has a line break, `[` or `=` is TOML itself."""
    if isinstance(source, str) and (not source.strip() or any(c in source for c in "\n[=")):
        return "profile", source
    if not isinstance(source, (str, os.PathLike)):
        raise FormatError(f"profile: takes TOML text or a path, found {type(source).__name__}")
    path = Path(source)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error


def _section(where: str, name: str, values: Any) -> Any:
    section = _SECTIONS[name]
    if not isinstance(values, dict):
        raise FormatError(f"{where}: {name} is {values!r}, expected a table", hint=f"write [{name}]")
    _known(where, f"[{name}] ", values, section)
    return section(**values)


def _known(where: str, place: str, values: Mapping[str, Any], record: Any) -> None:
    names = [f.name for f in fields(record)]
    for key in values:
        if key not in names:
            hint = nearest(key, names) or f"known: {', '.join(names)}"
            raise FormatError(f"{where}: {place}has no key {key!r}", hint=hint)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value.value if isinstance(value, enum.Enum) else value}"'


def _one_of(where: str, value: Any, kind: type[enum.Enum]) -> enum.Enum:
    if isinstance(value, kind):
        return value
    _choice(where, value, [m.value for m in kind])
    return kind(value)


def _choice(where: str, value: Any, known: Any) -> None:
    if value not in tuple(known):
        hint = nearest(str(value), known) or f"known: {', '.join(known)}"
        raise CapabilityError(f"profile: {where} is {value!r}, expected one of {', '.join(known)}", hint=hint)


def _flags(where: str, record: Any) -> None:
    for f in fields(record):
        value = getattr(record, f.name)
        if f.type == "bool" and not isinstance(value, bool):
            raise CapabilityError(f"profile: {where}.{f.name} is {value!r}, expected true or false")
