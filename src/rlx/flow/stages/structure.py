"""Stages that arrange other stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.errors import RlxError
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.ir.provenance import stage as provenance


def emit_stage(ctx: FlowCtx, stage: FlowStage, value: FlowValue | None, name: str = "") -> FlowValue | None:
    """Emit one stage under its path; errors say which stage they came from."""
    name = name or stage.path
    try:
        if not name:
            return stage.emit(ctx, value)
        with provenance(name):
            return stage.emit(ctx, value)
    except RlxError as error:
        error.add_note(f"  in stage: {name or type(stage).__name__}")
        raise


@dataclass(frozen=True)
class Repeat(FlowStage):
    """Stages 0 .. count-1 in order, each under its number."""

    count: int
    stage_for_index: Callable[[int], FlowStage]
    name: str = "layers"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        for i in range(self.count):
            value = emit_stage(ctx, self.stage_for_index(i), value, f"{self.name}.{i}")
        return value
