"""Ops as methods, looked up in the registry by name. `scripts/stubs.py` writes `op_methods.pyi` for type checkers.

The classes here are bases of those that have the methods. At run time only `GraphOps` and `ValueOps` look ops up;
modules, and values that flow through a model, delegate to their graph and its values.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from rlx.errors import nearest
from rlx.ir import registry
from rlx.ir.builders import Builder, is_op, op_names


class ListsOps:
    """Lists the ops in `dir`, and hence in tab completion, including ops declared later."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *op_names()})


class GraphOps(ListsOps):
    """`g.softmax(x, axis=-1)` appends an op."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        op = registry.current_name(name)
        if is_op(op):
            return MethodType(Builder(registry.OPS[op]), self)
        raise AttributeError(f"Graph has no op {name!r}. {nearest(name, registry.OPS) or ''}".strip())


class ValueOps(ListsOps):
    """`x.softmax(axis=-1)` is `g.softmax(x, axis=-1)` on the graph of the value."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        op = registry.current_name(name)
        if is_op(op):
            return MethodType(getattr(self.graph, op), self)
        from rlx.ir.numpy_functions import TORCH_METHODS, array_method, array_property  # rare

        read, method = array_property(name), array_method(name)
        if read is not None:
            return read(self)
        if method is not None:
            return MethodType(method, self)
        hint = TORCH_METHODS.get(name) or nearest(name, registry.OPS)
        raise AttributeError(f"Value has no op {name!r}. {hint or ''}".strip())


class ModuleOps(ListsOps):
    """Ops of `GraphModule`."""

    __slots__ = ()


class EmitOps(ListsOps):
    """Ops of `Emit`."""

    __slots__ = ()


class FlowValueOps(ListsOps):
    """Ops of `FlowValue`."""

    __slots__ = ()
