"""Stages that contain other stages, residual connections, and how stages are emitted and edited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import KW_ONLY, field, replace

from rlx.errors import GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx, note_stage
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import Origin, added_at, here
from rlx.ir.provenance import stage as provenance
from rlx.types import known_equal


def emit_stage(ctx: FlowCtx, stage: FlowStage, value: FlowValue | None, name: str = "") -> FlowValue | None:
    """Emit one stage under its path. If it returns None, the value is unchanged.

    Errors name the stage they came from, by its full path.
    """
    is_named = bool(name) or stage.is_named
    name = name or stage.path
    with provenance(name) if name else nullcontext():
        try:
            if is_named:
                ctx.state.claim(here().stage)
            result = _checked(stage, stage.emit(ctx, value))
            if name and isinstance(result, FlowValue) and result is not value:
                ctx.hir().stages[here().stage] = result.id
        except Exception as error:  # including errors of custom functions
            note_stage(error, type(stage).__name__)
            raise
    return value if result is None else result


def _checked(stage: FlowStage, result: FlowValue | None) -> FlowValue | None:
    """Return what a stage returned; raises if it is neither a flow value nor None."""
    if result is None or isinstance(result, FlowValue):
        return result
    from rlx.flow.emit import not_a_value  # only errors need it

    where = f"stage {type(stage).__name__}"
    if isinstance(result, Value):
        raise GraphError(f"{where}: returned a Value, expected a FlowValue", hint="ctx.wrap(x)")
    raise not_a_value(where, "returned", result)


def emit_all(
    ctx: FlowCtx, stages: Iterable[FlowStage], value: FlowValue | None, places: Iterable[Origin]
) -> FlowValue | None:
    """Emit stages in order; their nodes get the source line where the user added the stage as origin."""
    for stage, place in zip(stages, places, strict=True):
        with added_at(place, sys._getframe()):
            value = emit_stage(ctx, stage, value)
    return value


def _stage(stage: FlowStage, label: str) -> FlowStage:
    if not isinstance(stage, FlowStage):
        raise GraphError(f"{label} is a {type(stage).__name__}, expected a stage")
    return stage


@dataclass(frozen=True)
class Repeat(FlowStage):
    """Applies `stage_for_index(i)` for i from 0 to count - 1, at the path `name.i`: `y = last(... first(x))`."""

    count: int
    stage_for_index: Callable[[int], FlowStage]
    name: str = "layers"

    def __post_init__(self) -> None:
        if not hasattr(self.count, "__index__") or self.count < 0:
            raise GraphError(f"stage Repeat {self.name!r}: count is {self.count!r}, expected an integer from 0")
        if not callable(self.stage_for_index):
            raise GraphError(f"stage Repeat {self.name!r}: {self.stage_for_index!r} is not a function of the index")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        for i in range(self.count):
            path = f"{self.name}.{i}"
            with provenance(path):
                try:
                    stage = self.at(i)
                except Exception as error:
                    note_stage(error)
                    raise
            value = emit_stage(ctx, stage, value, path)
        return value

    def at(self, i: int) -> FlowStage:
        """Return stage i."""
        return _stage(self.stage_for_index(i), f"stage Repeat: '{self.name}.{i}'")


@dataclass(frozen=True)
class Sequence(FlowStage):
    """Applies stages in order: `y = last(... first(x))`. A stage that returns None leaves the value unchanged."""

    stages: Iterable[FlowStage]
    _: KW_ONLY
    places: tuple[Origin, ...] = field(default=(), compare=False, repr=False)  # where the user added each, if known

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(_stage(stage, "stage Sequence: a part") for stage in self.stages))

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        if self.places:
            return emit_all(ctx, self.stages, value, self.places)
        for stage in self.stages:
            value = emit_stage(ctx, stage, value)
        return value


@dataclass(frozen=True)
class Named(FlowStage):
    """Names the result of a stage: `y = inner(x)`, which later stages and `ModelFlow.outputs` look up by the name."""

    name: str
    inner: FlowStage

    def __post_init__(self) -> None:
        _stage(self.inner, f"stage Named {self.name!r}: its part")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        ctx.need(value, f"Named {self.name!r}")
        result = emit_stage(ctx, self.inner, value, self.name)
        ctx.state.set_named(self.name, ctx.need(result, f"Named {self.name!r}"))
        assert result is not None
        return result


@dataclass(frozen=True)
class ResidualSave(FlowStage):
    """Pushes the value on the residual stack, for a later `ResidualAdd`; `y = x`. Pairs nest."""

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        saved = ctx.wrap(ctx.need(value, "ResidualSave"))
        ctx.state.residuals.append(saved)
        ctx.state.residual_stages[saved.id] = here().stage
        return saved


@dataclass(frozen=True)
class ResidualAdd(FlowStage):
    """Pops the residual that was saved last and adds it: `y = x + saved`."""

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "ResidualAdd")
        if not ctx.state.residuals:
            raise GraphError("stage ResidualAdd: nothing was saved", hint="put ResidualSave before it")
        saved = ctx.state.residuals[-1]
        if x.shape != saved.shape:  # broadcasting would add a row of one sequence to another
            pairs = zip(x.shape, saved.shape, strict=False)
            may_be_equal = x.rank == len(saved.shape) and all(known_equal(a, b) is not False for a, b in pairs)
            hint = "if both are equal whenever this runs, say so: x.assume_equal(shape=...)" if may_be_equal else None
            raise ShapeError(f"stage ResidualAdd: the value is {x.type}, the saved one is {saved.id.type}", hint=hint)
        return ctx.wrap(x + ctx.state.residuals.pop().id)


# -- editing ----------------------------------------------------------------------------------------------------------
Visit = Callable[[str, FlowStage], FlowStage | None]


def edit_stage(stage: FlowStage, visit: Visit, at: str = "", name: str = "") -> FlowStage:
    """Replace stages inside a stage: `visit(path, stage)` returns a replacement, or None to look inside.

    Paths are those of nodes, such as `layers.3.ffn`; a stage without a path is addressed by its class name.
    """
    here = ".".join(part for part in (at, name or stage.path) if part)
    path = here if name or stage.path else ".".join(part for part in (at, type(stage).__name__) if part)
    match stage:
        case Named():  # the name stays
            return replace(stage, inner=edit_stage(stage.inner, visit, at, stage.name))
        case _ if (replacement := visit(path, stage)) is not None:
            return replacement
        case Repeat():
            parts = [edit_stage(stage.at(i), visit, here, f"{stage.name}.{i}") for i in range(stage.count)]
            return replace(stage, stage_for_index=parts.__getitem__)
        case Sequence():
            return replace(stage, stages=[edit_stage(part, visit, here) for part in stage.stages])
        case _:
            return stage
