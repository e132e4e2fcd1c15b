"""Compile profiles: the options of a compilation as data. Presets by name, and TOML in both directions.

A profile says how HIR blocks are lowered and which fusions happen (`fusion`), which other passes run (`passes`), the
element type of values between ops (`precision`), which ops are decomposed into simpler ones (`kernel_dispatch`) and
device-specific options (`backend`). `rlx.compile(graph, profile=...)` honours every field.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from rlx.errors import CapabilityError, FormatError, nearest
from rlx.fast_dataclass import dataclass


class FusionPolicy(enum.Enum):
    """How blocks are lowered to MIR: DIRECT emits the fused op, FUSABLE emits plain ops that passes fuse later.

    Blocks over stored weights, which model stages emit, lower to plain ops under both: their weights are converted when
    they are bound, and passes fuse the rest.
    """

    DIRECT = "direct"
    FUSABLE = "fusable"


Option = bool | int | float | str  # a backend option
NARROW = ("f16", "bf16")
MAX_CHARS = 1 << 20  # per file


@dataclass(frozen=True, slots=True)
class Fusion:
    """Fusion. `target` is auto, a device or a target; `assert_clean` makes a missed fusion an error."""

    policy: FusionPolicy = FusionPolicy.DIRECT
    target: str = "auto"
    assert_clean: bool = False
    skip: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", _one_of("fusion.policy", self.policy, FusionPolicy))
        if not isinstance(self.target, str) or not self.target:
            raise CapabilityError(f"profile: fusion.target is {self.target!r}, expected auto, a device or a target")
        _flags("fusion", self)
        if self.skip and self.assert_clean:
            raise CapabilityError("profile: fusion.skip and fusion.assert_clean exclude each other")


@dataclass(frozen=True, slots=True)
class Passes:
    """Which cleanup passes run; `verbose` prints to stderr what the passes did and the resulting graphs."""

    dce: bool = True
    constant_folding: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        _flags("passes", self)


@dataclass(frozen=True, slots=True)
class Precision:
    """The storage type of f32 values between kernels: `compute` is f32, f16 or bf16. Arithmetic stays f32.

    With int8, values stay f32, but matmuls by weights multiply 8-bit integers, with one scale per row and per column.
    With `mixed = "auto"`, reductions, softmax and norms keep f32 results. `activations` is the type to which the left
    operands of matmuls by packed weights are quantised: f32 (not at all), int8 (one scale per block; faster) or auto
    (int8 for loaded models, f32 for graphs). Values inside loops and branches are not rounded.
    """

    compute: str = "f32"
    mixed: str = "none"
    activations: str = "auto"

    def __post_init__(self) -> None:
        _choice("precision.compute", self.compute, ("f32", *NARROW, "int8"))
        _choice("precision.mixed", self.mixed, ("none", "auto"))
        _choice("precision.activations", self.activations, ("auto", "f32", "int8"))
        if self.mixed == "auto" and self.compute not in NARROW:
            raise CapabilityError(
                f"profile: precision.mixed is 'auto', precision.compute is {self.compute!r}: there is nothing to mix",
                hint="set precision.compute to 'bf16' or 'f16'",
            )


class KernelDispatchPolicy(enum.Enum):
    """Whether an op runs as a kernel of its own, or in its common form: decomposed into simpler ops.

    PREFER_NATIVE uses the kernel if there is one. FORCE_COMMON uses the common form if there is one, to debug kernels.
    FORCE_NATIVE makes an op without a kernel of its own an error.
    """

    PREFER_NATIVE = "prefer_native"
    FORCE_COMMON = "force_common"
    FORCE_NATIVE = "force_native"


@dataclass(frozen=True, slots=True)
class KernelDispatchConfig:
    """A policy, and per-op exceptions from it; an op in both lists is native."""

    policy: KernelDispatchPolicy = KernelDispatchPolicy.PREFER_NATIVE
    force_common_kinds: tuple[str, ...] = ()
    force_native_kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", _one_of("kernel_dispatch.policy", self.policy, KernelDispatchPolicy))
        for name in ("force_common_kinds", "force_native_kinds"):
            ops = getattr(self, name)
            if not isinstance(ops, (list, tuple)) or not all(isinstance(kind, str) for kind in ops):
                raise CapabilityError(f"profile: kernel_dispatch.{name} is {ops!r}, expected a list of names of ops")
            object.__setattr__(self, name, tuple(sorted(set(ops))))

    def of(self, op: str) -> KernelDispatchPolicy:
        """The policy for one op."""
        if op in self.force_native_kinds:
            return KernelDispatchPolicy.FORCE_NATIVE
        return KernelDispatchPolicy.FORCE_COMMON if op in self.force_common_kinds else self.policy


@dataclass(frozen=True)
class BackendOptions:
    """Options per device, one table each. A backend checks its own when it compiles and ignores the others.

    >>> BackendOptions({"cpu": {"unfuse_regions": True}}).of("cpu")
    {'unfuse_regions': True}
    """

    tables: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for device, options in self.tables.items():
            if not isinstance(options, Mapping):
                raise CapabilityError(
                    f"profile: backend.{device} is {options!r}, expected a table", hint=f"write [backend.{device}]"
                )
            for name, value in options.items():
                if not isinstance(value, (bool, int, float, str)):
                    raise CapabilityError(f"profile: backend.{device}.{name} is {value!r}, expected a plain value")
        # Sorted and without empty tables, so that equal settings have equal text.
        plain = {device: dict(sorted(self.tables[device].items())) for device in sorted(self.tables)}
        object.__setattr__(self, "tables", {device: options for device, options in plain.items() if options})

    def of(self, device: str) -> Mapping[str, Option]:
        """The settings of one device."""
        return self.tables.get(device, {})

    def __hash__(self) -> int:
        return hash(tuple((device, tuple(options.items())) for device, options in self.tables.items()))


@dataclass(frozen=True, slots=True)
class CompileProfile:
    """All options of a compilation apart from the graph, the device and the number of threads."""

    fusion: Fusion = field(default_factory=Fusion)
    passes: Passes = field(default_factory=Passes)
    precision: Precision = field(default_factory=Precision)
    kernel_dispatch: KernelDispatchConfig = field(default_factory=KernelDispatchConfig)
    backend: BackendOptions = field(default_factory=BackendOptions)

    def __post_init__(self) -> None:
        _parts("", self)

    def with_kernel_dispatch(self, policy: KernelDispatchConfig | KernelDispatchPolicy) -> CompileProfile:
        """Returns the profile with another kernel dispatch policy or configuration."""
        config = policy if isinstance(policy, KernelDispatchConfig) else KernelDispatchConfig(policy)
        return replace(self, kernel_dispatch=config)

    def in_environment(self) -> CompileProfile:
        """Applies the environment variable RLX_KERNEL_DISPATCH (`common` or `native`), unless the profile has a policy.

        For debugging a program that cannot be changed.
        """
        said = os.environ.get("RLX_KERNEL_DISPATCH", "")
        if not said or self.kernel_dispatch.policy is not KernelDispatchPolicy.PREFER_NATIVE:
            return self
        _choice("RLX_KERNEL_DISPATCH", said, ("common", "native"))
        policy = KernelDispatchPolicy(f"force_{said}")
        return replace(self, kernel_dispatch=replace(self.kernel_dispatch, policy=policy))

    @property
    def shows_passes(self) -> bool:
        """Whether the passes' output is wanted, so that they must run even on a cache hit."""
        return self.passes.verbose or bool(os.environ.get("RLX_DUMP"))

    # -- presets --
    @classmethod
    def prefill(cls) -> CompileProfile:
        """Many tokens at once: blocks lower to fused ops."""
        return cls()

    @classmethod
    def decode(cls) -> CompileProfile:
        """One token at a time: blocks lower to plain ops, so that passes see the context of the cache."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE))

    @classmethod
    def encoder(cls) -> CompileProfile:
        """Complete texts or images at once."""
        return cls()

    @classmethod
    def training(cls) -> CompileProfile:
        """Blocks lower to plain ops, each of which has derivative rules."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE))

    @classmethod
    def unfused(cls) -> CompileProfile:
        """One kernel per op, for debugging."""
        return cls(Fusion(policy=FusionPolicy.FUSABLE, skip=True))

    @classmethod
    def preset(cls, name: str) -> CompileProfile:
        """Returns a preset by name; model family names are aliases."""
        if name not in PRESETS:
            raise CapabilityError(f"profile: no preset is called {name!r}", hint=nearest(name, PRESETS))
        return PRESETS[name]()

    # -- text --
    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> CompileProfile:
        """Reads a profile from a TOML file or TOML text. All keys are optional; an unknown key is an error."""
        import tomllib  # a third of this module's import time

        where, text = _read(source)
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{where}: is not TOML: {error}") from error
        try:
            profile: CompileProfile = _record(where, "", cls, tables)
            return profile
        except CapabilityError as error:
            raise FormatError(f"{where}: {str(error).removeprefix('profile: ')}", hint=error.hint) from error

    def to_toml(self) -> str:
        """Formats the profile as TOML, with every field."""
        return "\n\n".join(_tables("", self)) + "\n"

    def key(self) -> str:
        """A digest of everything in the profile that affects the result, stable across processes."""
        lines = [line for line in self.in_environment().to_toml().splitlines() if not line.startswith("verbose")]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


# These families need no settings of their own, so they share presets.
PRESETS: dict[str, Callable[[], CompileProfile]] = {
    "prefill": CompileProfile.prefill, "decode": CompileProfile.decode, "encoder": CompileProfile.encoder,
    "training": CompileProfile.training, "unfused": CompileProfile.unfused,
    **{f"{family}_prefill": CompileProfile.prefill for family in ("llama32", "qwen35", "qwen3", "gemma")},
    **{f"{family}_decode": CompileProfile.decode for family in ("llama32", "qwen35", "qwen3", "gemma")},
    **dict.fromkeys(("flux2", "sam_encoder", "sam2", "sam3"), CompileProfile.encoder),
    **dict.fromkeys(("sam2_memory_attention", "llada2_diffusion"), CompileProfile.unfused),
}  # fmt: skip


def _read(source: str | os.PathLike[str]) -> tuple[str, str]:
    """A name for the source in errors, and its text. A string with a line break, `[` or `=` is TOML itself."""
    if isinstance(source, str) and (not source.strip() or any(c in source for c in "\n[=")):
        return "profile", source
    if not isinstance(source, (str, os.PathLike)):
        raise FormatError(f"profile: takes TOML text or a path, found {type(source).__name__}")
    path = Path(source)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    if len(text) > MAX_CHARS:
        raise FormatError(f"{path}: is no profile: it has more than {MAX_CHARS} characters")
    return str(path), text


def _parts_of(record: Any) -> dict[str, Any]:
    """The fields of a record that are records themselves: name -> type."""
    return {f.name: f.default_factory for f in fields(record) if isinstance(f.default_factory, type)}


def _parts(where: str, record: Any) -> None:
    for name, kind in _parts_of(record).items():
        value = getattr(record, name)
        if not isinstance(value, kind):
            raise CapabilityError(f"profile: {where}{name} is a {type(value).__name__}, expected a {kind.__name__}")


def _record(where: str, name: str, kind: Any, values: Any) -> Any:
    """Builds a record from a table, and nested records from its subtables."""
    if not isinstance(values, dict):
        raise FormatError(f"{where}: {name} is {values!r}, expected a table", hint=f"write [{name}]")
    if kind is BackendOptions:
        return BackendOptions(values)
    _known(where, f"[{name}] " if name else "", values, kind)
    inner = {part: f"{name}.{part}" if name else part for part in _parts_of(kind)}
    parts = {part: _record(where, inner[part], of, values.get(part, {})) for part, of in _parts_of(kind).items()}
    return kind(**(values | parts))


def _tables(name: str, record: Any) -> list[str]:
    """The TOML table of a record, if it has plain fields, and those of its parts."""
    if isinstance(record, BackendOptions):
        return [
            "\n".join([f"[{name}.{device}]", *(f"{key} = {_toml(value)}" for key, value in options.items())])
            for device, options in record.tables.items()
        ]
    parts = _parts_of(record)
    lines = [f"{f.name} = {_toml(getattr(record, f.name))}" for f in fields(record) if f.name not in parts]
    tables = ["\n".join([f"[{name}]", *lines])] if lines else []
    for part in parts:
        tables += _tables(f"{name}.{part}" if name else part, getattr(record, part))
    return tables


def _known(where: str, place: str, values: Mapping[str, Any], record: Any) -> None:
    names = [f.name for f in fields(record)]
    for key in values:
        if key not in names:
            hint = nearest(key, names) or f"known: {', '.join(names)}"
            raise FormatError(f"{where}: {place}has no key {key!r}", hint=hint)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
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
