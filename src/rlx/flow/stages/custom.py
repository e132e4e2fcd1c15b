"""Stages of your own: a function that gets an `Emit`, or a class registered by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rlx.errors import GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.emit import Emit, as_flow_value
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue

Author = Callable[[Emit, Any], Any]
Stage = TypeVar("Stage", bound=type[FlowStage])


@dataclass(frozen=True)
class Custom(FlowStage):
    """A subgraph of your own: `y = f(emit, x)`. If f returns None, the value is unchanged."""

    f: Author
    name: str | None = None  # the name of its result, unless the function names another value so

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise GraphError(f"{self.where}: {self.f!r} is not a function f(emit, value)")
        try:
            inspect.signature(self.f).bind(None, None)
        except ValueError:  # some functions in C have no signature
            pass
        except TypeError as error:
            raise GraphError(f"{self.where}: its function is called as f(emit, value): {error}") from None

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        emit = Emit.of(ctx)
        before = ctx.state.named.get(self.name or "")
        returned = as_flow_value(emit, self.f(emit, value), self.where)
        result = value if returned is None else returned
        if self.name and result is not None and ctx.state.named.get(self.name) is before:
            ctx.set_named(self.name, result)
        return returned

    @property
    def where(self) -> str:
        return f"stage Custom {self.name!r}" if self.name else "stage Custom"

    @property
    def path(self) -> str:
        return self.name or ""

    @property
    def is_named(self) -> bool:
        return bool(self.name)


# -- plugins ----------------------------------------------------------------------------------------------------------
PLUGINS: dict[str, type[FlowStage]] = {}


def register_stage(name: str) -> Callable[[Stage], Stage]:
    """Register a stage class under a name: `flow.plugin(name, ...)` then adds one."""

    def declare(stage: Stage) -> Stage:
        if not (isinstance(stage, type) and issubclass(stage, FlowStage)):
            raise GraphError(
                f"register_stage {name!r}: {stage!r} is not a class of stages", hint="derive from FlowStage"
            )
        known = PLUGINS.get(name)
        # the same class again is fine: a notebook cell that runs twice
        if known is not None and (known.__module__, known.__qualname__) != (stage.__module__, stage.__qualname__):
            raise GraphError(f"register_stage {name!r}: is the name of {known.__module__}.{known.__qualname__}")
        PLUGINS[name] = stage
        return stage

    return declare


def plugin_stage(plugin: str | FlowStage, settings: dict[str, Any]) -> FlowStage:
    """Return the stage itself, or an instance of the class registered under a name."""
    if isinstance(plugin, FlowStage):
        if settings:
            names = ", ".join(settings)
            raise GraphError(f"plugin {type(plugin).__name__}: is an instance and takes no settings, found {names}")
        return plugin
    if isinstance(plugin, type):
        name = plugin.__name__
        raise GraphError(f"plugin: {name} is a class, expected an instance or a name", hint=f"plugin({name}(...))")
    if plugin not in PLUGINS:
        hint = nearest(str(plugin), PLUGINS) or "declare it with rlx.flow.register_stage"
        raise GraphError(f"plugin: no stage is registered as {plugin!r}", hint=hint)
    try:
        return PLUGINS[plugin](**settings)
    except TypeError as error:
        raise GraphError(f"plugin {plugin!r}: {error}") from error
