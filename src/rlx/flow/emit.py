"""Emit: the argument of custom stages: a `FlowCtx` with every op of the graph as a method."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import GraphError, nearest
from rlx.flow.context import FlowCtx
from rlx.flow.state import FlowValue
from rlx.ir import registry
from rlx.ir.builders import is_op
from rlx.ir.graph import Graph, Value
from rlx.ir.op_methods import EmitOps


class Emit(FlowCtx, EmitOps):
    """A `FlowCtx` with ops as methods that accept flow values: `emit.softmax(value, axis=-1)`, `emit.constant(2.0)`."""

    @classmethod
    def of(cls, ctx: FlowCtx) -> Emit:
        """Return an `Emit` that shares everything with a context."""
        return cls(ctx.module, ctx.params, ctx.weights, ctx.profile, ctx.state)

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
                methods = [method for method in dir(Emit) if not method.startswith("_")]
                hint = nearest(name, [*methods, *registry.OPS]) or ""
                raise AttributeError(f"Emit has no op {name!r}. {hint}".strip())
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
    raise not_a_value(where, "its function returned", result)


def not_a_value(where: str, returned: str, result: Any) -> GraphError:
    """An error about a stage that returns something else than a value."""
    hint = "return the value of an op, or None to leave the value unchanged"
    if isinstance(result, (np.ndarray, np.generic, int, float)):
        hint = "emit.constant(x) makes a number a value, emit.synth_param(name, x) an array"
    return GraphError(f"{where}: {returned} a {type(result).__name__}, expected a value", hint=hint)
