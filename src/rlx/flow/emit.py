"""Emit: what a stage of the author's own is handed. The emission surface, and every op of the graph as a method."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rlx.errors import GraphError, nearest
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import FlowValue
from rlx.ir import registry
from rlx.ir.builders import is_op
from rlx.ir.graph import Graph, Value
from rlx.ir.op_methods import EmitOps


class Emit(FlowCtx, EmitOps):
    """`FlowCtx`, and ops that take flowing values: `emit.softmax(value, axis=-1)`, `emit.constant(2.0)`."""

    @classmethod
    def of(cls, ctx: FlowCtx) -> Emit:
        """The same assembly, seen as an author sees it."""
        return cls(ctx.module, ctx.params, ctx.weights, ctx.profile, ctx.state)

    def stage(self, stage: FlowStage, value: FlowValue | Value | None, name: str = "") -> FlowValue | None:
        """What another stage makes of a value; its part of the graph is called `name`, or what the stage is called."""
        return emit_stage(self, stage, self.wrap(value) if isinstance(value, Value) else value, name)

    def stream(self, name: str) -> FlowValue:
        """The value of a stream."""
        return self.state.stream(name, "flow")

    def set_stream(self, name: str, value: FlowValue | Value) -> None:
        """Put a value into a stream."""
        self.state.streams[name] = self.wrap(value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = is_op(registry.SPELLINGS.get(name, name)) or callable(getattr(Graph, name, None))
            if name.startswith("_") or not known:
                raise AttributeError(f"Emit has no op {name!r}. {nearest(name, registry.OPS) or ''}".strip())
            method = getattr(self.hir(), name)

            @functools.wraps(method)
            def build(*operands: Any, **attrs: Any) -> Any:
                return method(*map(_plain, operands), **{key: _plain(value) for key, value in attrs.items()})

            return build

    def __dir__(self) -> list[str]:
        methods = (name for name in dir(Graph) if not name.startswith("_") and callable(getattr(Graph, name)))
        return sorted({*super().__dir__(), *methods})


def _plain(operand: Any) -> Any:
    """What flows as the value it is, also inside a list."""
    if isinstance(operand, (list, tuple)):
        return type(operand)(map(_plain, operand))
    return operand.id if isinstance(operand, FlowValue) else operand


def flowing(emit: Emit, given: Any, where: str) -> FlowValue | None:
    """What an author's function gave, as what flows on."""
    if given is None:
        return None
    if isinstance(given, (Value, FlowValue)):
        return emit.wrap(given)
    raise GraphError(
        f"{where}: its function gave a {type(given).__name__}, expected a value", hint="return emit.wrap(x)"
    )
