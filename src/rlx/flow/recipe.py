"""ModelRecipe: a function that assembles a model, which can be patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.built import BuiltModel
from rlx.flow.flow import ModelFlow
from rlx.flow.weights import WeightSource


@dataclass(frozen=True)
class ModelRecipe:
    """A name and a function that assembles the flow. Patches return new recipes; the old one is unchanged."""

    name: str
    assemble: Callable[..., ModelFlow]

    def patch(self, f: Callable[[ModelFlow], ModelFlow]) -> ModelRecipe:
        """Return a recipe that also applies `f` to the flow."""

        def assemble(*arguments: Any, **settings: Any) -> ModelFlow:
            flow = f(self.assemble(*arguments, **settings))
            if not isinstance(flow, ModelFlow):
                raise GraphError(f"recipe {self.name!r}: a patch returned a {type(flow).__name__}, expected a flow")
            return flow

        return replace(self, assemble=assemble)

    def when(self, condition: bool, f: Callable[[ModelFlow], ModelFlow]) -> ModelRecipe:
        """Patch if the condition holds; else return the recipe unchanged."""
        return self.patch(f) if condition else self

    def build(self, weights: WeightSource | Mapping[str, Any] | None = None, *arguments: Any) -> BuiltModel:
        """Assemble and build the flow; the arguments are those of `assemble`."""
        return self.assemble(*arguments).build(weights)
