"""Emit: the argument of custom stages: a `FlowCtx` with every op of the graph as a method."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rlx.dtypes import DTypeLike
from rlx.errors import GraphError, nearest
from rlx.flow.context import FlowCtx
from rlx.flow.positions import token_positions
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import FlowValue
from rlx.ir import registry
from rlx.ir.builders import is_op
from rlx.ir.graph import Graph, Value
from rlx.ir.op_methods import EmitOps
from rlx.types import ShapeLike, as_shape


class Emit(FlowCtx, EmitOps):
    """A `FlowCtx` with ops as methods that accept flow values: `emit.softmax(value, axis=-1)`, `emit.constant(2.0)`."""

    @classmethod
    def of(cls, ctx: FlowCtx) -> Emit:
        """Return an `Emit` that shares everything with a context."""
        return cls(ctx.module, ctx.params, ctx.weights, ctx.profile, ctx.state)

    def stage(self, stage: FlowStage, value: FlowValue | Value | None, name: str = "") -> FlowValue | None:
        """Apply another stage to a value, under the path `name`, or under the stage's own path."""
        return emit_stage(self, stage, self.wrap(value) if isinstance(value, Value) else value, name)

    def zeros(self, shape: ShapeLike, dtype: DTypeLike = "f32") -> FlowValue:
        """Return zeros of a shape, whose sizes may be symbolic: `emit.zeros((value.shape[0], 3, 16))`."""
        return self.wrap(self.hir().one("expand", self.hir().constant(0, dtype), shape=as_shape(shape)))

    def positions(self, value: FlowValue | Value) -> FlowValue:
        """Return the positions `[batch, seq]` of the tokens of a value; those of padding are negative."""
        return self.wrap(token_positions(self, _unwrap(value)))

    def carried(self, name: str, *shape: int) -> FlowValue | None:
        """Return a state `[batch, *shape]`, zeros before the first token of a sequence; None in a flow without a cache.

        An op that carries it on, such as `depthwise_conv1d_causal_carry`, updates it in place: the next call of the
        sequence continues from there. Without a cache, flows are functions of entire sequences.
        """
        return None if self.state.cache is None else self.wrap(self.state.cache.state(name, shape))

    def stream(self, name: str) -> FlowValue:
        """Return the value of a stream."""
        return self.state.stream(name, "flow")

    def set_stream(self, name: str, value: FlowValue | Value) -> None:
        """Set the value of a stream."""
        self.state.streams[name] = self.wrap(value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = is_op(registry.current_name(name)) or callable(getattr(Graph, name, None))
            if name.startswith("_") or not known:
                raise AttributeError(f"Emit has no op {name!r}. {nearest(name, registry.OPS) or ''}".strip())
            method = getattr(self.hir(), name)

            @functools.wraps(method)
            def build(*operands: Any, **attrs: Any) -> Any:
                return method(*map(_unwrap, operands), **{key: _unwrap(value) for key, value in attrs.items()})

            return build

    def __dir__(self) -> list[str]:
        methods = (name for name in dir(Graph) if not name.startswith("_") and callable(getattr(Graph, name)))
        return sorted({*super().__dir__(), *methods})


def _unwrap(operand: Any) -> Any:
    """Replace flow values by their graph values, also inside lists."""
    if isinstance(operand, (list, tuple)):
        return type(operand)(map(_unwrap, operand))
    return operand.id if isinstance(operand, FlowValue) else operand


def as_flow_value(emit: Emit, result: Any, where: str) -> FlowValue | None:
    """Convert the result of a custom function to a flow value."""
    if result is None:
        return None
    if isinstance(result, (Value, FlowValue)):
        return emit.wrap(result)
    raise GraphError(
        f"{where}: its function returned a {type(result).__name__}, expected a value", hint="return emit.wrap(x)"
    )
