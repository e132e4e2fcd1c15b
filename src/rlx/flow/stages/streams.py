"""Streams: named values that flow through a model along with the main one, such as an image and a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.emit import Emit, as_flow_value
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue


@dataclass(frozen=True)
class StoreStream(FlowStage):
    """Copies the value into a stream: `streams[name] = x`, `y = x`. Without a value it does nothing."""

    name: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        if value is not None:
            ctx.state.streams[self.name] = value
        return value


@dataclass(frozen=True)
class LoadStream(FlowStage):
    """Replaces the value by that of a stream: `y = streams[name]`."""

    name: str

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        return ctx.state.stream(self.name, "stage LoadStream")


@dataclass(frozen=True)
class BindInputs(FlowStage):
    """Binds inputs of the flow to streams, by pairs of both names: `streams[b] = inputs[a]`; `y = x`."""

    pairs: tuple[tuple[str, str], ...]

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        for name, stream in self.pairs:
            ctx.state.streams[stream] = ctx.flow_input(name)
        return value


@dataclass(frozen=True)
class DualStream(FlowStage):
    """Transforms two streams together: `a, b = f(emit, a, b)`; the main value is unchanged, `y = x`."""

    name: str
    a: str
    b: str
    f: Callable[[Emit, FlowValue, FlowValue], Any]

    def __post_init__(self) -> None:
        if self.a == self.b:  # the second result would silently replace the first
            raise GraphError(f"stage DualStream {self.name!r}: both streams are {self.a!r}", hint="name two")
        if not callable(self.f):
            raise GraphError(f"stage DualStream {self.name!r}: {self.f!r} is not a function f(emit, a, b)")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        where = f"stage DualStream {self.name!r}"
        emit = Emit.of(ctx)
        results = self.f(emit, *(ctx.state.stream(stream, where) for stream in (self.a, self.b)))
        if not isinstance(results, tuple) or len(results) != 2:
            raise GraphError(f"{where}: its function returned {type(results).__name__}, expected the two streams")
        for stream, part in zip((self.a, self.b), results, strict=True):
            after = as_flow_value(emit, part, where)
            if after is None:
                raise GraphError(f"{where}: its function returned None for stream {stream!r}")
            ctx.state.streams[stream] = after
        return value

    @property
    def path(self) -> str:
        return self.name
