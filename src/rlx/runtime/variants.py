"""Execution variants: the phase and sizes that a model is compiled for, the profile, and when it is compiled.

A `ModelVariant` says what to specialise for; a `ModelExecutionConfig` adds a profile and a mode, and compiles. Cache
keys are digests of the fields, the same in every process.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from rlx.errors import CapabilityError, FormatError, GraphError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph
from rlx.mir.bind_dims import bind_dims
from rlx.module import GraphModule, WithWeights
from rlx.profile import CompileProfile, KernelDispatchConfig, KernelDispatchPolicy
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.program_cache import is_builtin
from rlx.runtime.session import Session, with_weights
from rlx.types import DimBinding, Size, as_size, sym, symbol_name

Extras = tuple[tuple[str, int], ...]


class ModelPhase(enum.Enum):
    """The coarse phase of a model; training uses INFERENCE."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    INFERENCE = "inference"


class CompilationMode(enum.Enum):
    """When machine code is generated: immediately, in the first run, or ahead of time, in a file."""

    EAGER = "eager"
    LAZY = "lazy"
    AOT = "aot"


@dataclass(frozen=True)
class ModelVariant:
    """A phase and the sizes of its symbols. In decode, `seq` counts the new tokens and `past_seq` those before."""

    batch: int
    seq: int
    past_seq: int | None = None
    phase: ModelPhase = ModelPhase.INFERENCE
    extra: Extras = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", _member("phase", self.phase, ModelPhase))
        object.__setattr__(self, "extra", _extras(self.extra))
        for name in ("batch", "seq") if self.past_seq is None else ("batch", "seq", "past_seq"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        has_past = self.phase is ModelPhase.DECODE
        if has_past != (self.past_seq is not None):
            wanted = "needs a past_seq" if has_past else f"has no past, found past_seq {self.past_seq}"
            hint = "ModelVariant.decode(batch, past_seq, new_tokens)"
            raise GraphError(f"variant: {self.phase.value} {wanted}", hint=hint)

    @classmethod
    def prefill(cls, batch: int, seq: int) -> ModelVariant:
        """Prefill of `seq` tokens."""
        return cls(batch, seq, None, ModelPhase.PREFILL)

    @classmethod
    def decode(cls, batch: int, past_seq: int, new_tokens: int) -> ModelVariant:
        """Decode of `new_tokens` after `past_seq` cached ones."""
        return cls(batch, new_tokens, past_seq, ModelPhase.DECODE)

    @classmethod
    def encoder(cls, batch: int, seq: int) -> ModelVariant:
        """An encoder over sequences of `seq` tokens."""
        return cls(batch, seq, None, ModelPhase.ENCODER)

    def with_extra(self, symbol: str | Size, size: int) -> ModelVariant:
        """A copy with one more symbol bound; the last size of a symbol wins."""
        return replace(self, extra=(*self.extra, (symbol_name(symbol, "variant"), size)))

    def cache_key(self) -> str:
        """A digest of phase, sizes and extras, the same in every process."""
        sizes = ",".join(f"{name}={size}" for name, size in self.dim_binding().items())
        extras = ",".join(f"{name}={size}" for name, size in self.extra)
        return _digest(self.phase.value, sizes, extras)

    def dim_binding(self) -> DimBinding:
        """The sizes of BATCH, SEQ, PAST_SEQ if there is a past, and the extras, which take precedence."""
        binding = DimBinding.batch_seq(self.batch, self.seq)
        if self.past_seq is not None:
            binding.set(sym.PAST_SEQ, self.past_seq)
        for name, size in self.extra:
            binding.set(name, size)
        return binding


@dataclass(frozen=True)
class ModelExecutionConfig:
    """A variant, a profile and a mode: everything that determines a model's machine code and when it is generated."""

    variant: ModelVariant
    profile: CompileProfile = field(default_factory=CompileProfile)
    mode: CompilationMode = CompilationMode.EAGER

    def __post_init__(self) -> None:
        for name, kind in (("variant", ModelVariant), ("profile", CompileProfile)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise GraphError(f"configuration: {name} is a {type(value).__name__}, expected a {kind.__name__}")
        object.__setattr__(self, "mode", _member("mode", self.mode, CompilationMode))

    @classmethod
    def prefill(cls, batch: int, seq: int) -> ModelExecutionConfig:
        """Prefill, with the prefill profile."""
        return cls(ModelVariant.prefill(batch, seq), CompileProfile.prefill())

    @classmethod
    def decode(cls, batch: int, past_seq: int, new_tokens: int) -> ModelExecutionConfig:
        """Decode, with the decode profile."""
        return cls(ModelVariant.decode(batch, past_seq, new_tokens), CompileProfile.decode())

    @classmethod
    def encoder(cls, batch: int, seq: int) -> ModelExecutionConfig:
        """An encoder, with the encoder profile."""
        return cls(ModelVariant.encoder(batch, seq), CompileProfile.encoder())

    def with_profile(self, profile: CompileProfile | str) -> ModelExecutionConfig:
        """A copy with another profile, or the preset of that name."""
        return replace(self, profile=CompileProfile.preset(profile) if isinstance(profile, str) else profile)

    def with_kernel_dispatch(self, dispatch: KernelDispatchConfig | KernelDispatchPolicy) -> ModelExecutionConfig:
        """A copy whose profile has another kernel dispatch policy."""
        return replace(self, profile=self.profile.with_kernel_dispatch(dispatch))

    def with_mode(self, mode: CompilationMode) -> ModelExecutionConfig:
        """A copy with another mode."""
        return replace(self, mode=mode)

    def cache_key(self) -> str:
        """A digest of variant, profile and mode, the same in every process."""
        return _digest(self.variant.cache_key(), self.profile.key(), self.mode.value)

    def dim_binding(self) -> DimBinding:
        """The sizes that the variant binds."""
        return self.variant.dim_binding()

    def specialise(self, graph: Graph | GraphModule | WithWeights) -> Graph:
        """The graph with the variant's sizes bound to its symbols; other symbols stay run-time sizes."""
        source: Any = graph
        if isinstance(graph, GraphModule):
            source = graph.as_hir() if graph.as_hir() is not None else graph.into_mir()
        elif not isinstance(graph, Graph):
            source = getattr(graph, "module", None)
            if not isinstance(source, Graph):
                raise GraphError(f"variant: takes a Graph or a GraphModule, found {type(graph).__name__}")
        if self.variant.past_seq and not _has_past(source):
            raise GraphError(
                f"variant: decode has a past of {self.variant.past_seq} tokens, and graph {source.name!r} takes none",
                hint="give the flow a kv_cache, or inputs past_k_0, past_v_0, ... whose length is rlx.sym.PAST_SEQ",
            )
        return bind_dims(source, self.dim_binding(), strict=False)

    def compile(
        self,
        graph: Graph | GraphModule | WithWeights,
        session: Session | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> CompiledGraph:
        """Compile the specialised graph now (EAGER), in its first run (LAZY), or load it from its file (AOT).

        The AOT file is in `folder`, named by the keys of the graph and this configuration. If it is missing or was
        written by another version of rlx, the graph is compiled and the file written. Graphs with user-defined ops are
        compiled each time, because the key does not cover their source. The weights of a built flow are set.
        """
        session = session or Session()
        special = self.specialise(graph)
        if not isinstance(graph, (Graph, GraphModule)):
            return with_weights(self.compile(special, session, folder=folder), graph)
        match self.mode:
            case CompilationMode.EAGER:
                return session.compile(special, profile=self.profile)
            case CompilationMode.LAZY:
                return session.compile_later(special, self.profile)
            case _:
                return self._compile_aot(special, session, folder)

    def file_name(self, graph: Graph, session: Session) -> str:
        """The name of the AOT file of a graph."""
        return f"rlx_{_digest(self.cache_key(), graph.fingerprint(), session.target.name)}.rlxp"

    def _compile_aot(self, graph: Graph, session: Session, folder: str | os.PathLike[str] | None) -> CompiledGraph:
        from rlx.runtime.export import from_export, open_export  # only needed ahead of time

        if session.device.backend.interprets:
            raise CapabilityError(f"compile: device {session.device} has no machine code to store in a file")
        if folder is None:
            raise CapabilityError("compile: ahead of time needs a folder for its file", hint="compile(..., folder=...)")
        if not is_builtin(graph):
            return session.compile(graph, profile=self.profile)
        path = Path(folder) / self.file_name(graph, session)
        if path.exists():
            with contextlib.suppress(FormatError):  # damaged or of another version: compiled again
                return from_export(open_export(path), threads=session.threads, store=session.weights)
        compiled = session.compile(graph, profile=self.profile)
        _make_folder(path.parent)
        compiled.export(path)
        return compiled


def _has_past(graph: Graph) -> bool:
    """Whether a graph reads earlier tokens, from the runtime's KV cache or from inputs of the caller."""
    has_symbol = str(sym.PAST_SEQ) in graph.symbols()
    return has_symbol or any(n.op == "state" or str(n.attrs["name"]).startswith("past") for n in graph.inputs)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FormatError(f"{folder}: the folder cannot be created: {error.strerror}") from None


def _digest(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()


def _member(where: str, value: Any, kind: type[enum.Enum]) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(m.name for m in kind)
        raise GraphError(f"variant: {where} is {value!r}, expected one of {known}") from None


def _size(name: str, value: Any) -> int:
    size = as_size(value)
    if not isinstance(size, int):
        raise GraphError(f"variant: {name} is {value}, expected a number")
    return size


def _extras(extras: Mapping[str, int] | Iterable[tuple[Any, int]]) -> Extras:
    """Pairs sorted by symbol; the last size of a symbol wins."""
    pairs = extras.items() if isinstance(extras, Mapping) else extras
    sizes = {symbol_name(name, "variant"): _size(str(name), size) for name, size in pairs}
    return tuple(sorted(sizes.items()))
