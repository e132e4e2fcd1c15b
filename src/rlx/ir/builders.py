"""Builders: the methods `g.softmax` and `x.softmax`, with the signature and docstring declared by the op.

No code is generated: a builder derives its signature from the declaration on demand.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from rlx.errors import GraphError, nearest
from rlx.ir import registry
from rlx.ir.registry import OpDef

P = ParamSpec("P")
R = TypeVar("R")

# Annotation of a type rule -> annotation of the builder, which takes values and converts attributes.
_TYPES = {
    "TensorType": "Operand",
    "TensorType | None": "Operand | None",
    "DType": "DTypeLike",
    "Sizes": "ShapeLike",
    "Axes": "int | Sequence[int] | None",
    "tuple[int, ...]": "Sequence[int]",
    "int | Pair": "int | Sequence[int]",
    "int | Pair | None": "int | Sequence[int] | None",
    "Size": "Size | str",
    "str": "str | Enum",
    "str | None": "str | Enum | None",
    "WeightLayout | None": "Layout | None",
}


class Annotation(str):
    """An annotation as text; `help` shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Builder:
    """The function behind `g.softmax`: appends the op to a graph."""

    def __init__(self, definition: OpDef) -> None:
        self.definition = definition
        self.__name__ = definition.name
        self.__qualname__ = f"Graph.{definition.name}"
        self.__doc__ = definition.doc
        self.__module__ = definition.rule.__module__

    def __call__(self, graph: Any, /, *operands: Any, **attrs: Any) -> Any:
        schema = self.definition.schema
        if len(operands) > len(schema.operands) and not schema.variadic:  # x.mean(1), as arrays have it
            from rlx.ir.numpy_functions import array_method  # rare

            method = array_method(self.__name__)
            if method is not None:
                return method(*operands, **attrs)
        return graph.apply(self.__name__, *operands, **attrs)

    @property
    def __signature__(self) -> inspect.Signature:
        return builder_signature(self.definition)


def builder_signature(definition: OpDef) -> inspect.Signature:
    """The builder's signature: a graph, operands, attributes, and `out_shape`, which every op checks."""
    rule = inspect.signature(definition.rule)
    empty, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for parameter in rule.parameters.values():
        kind = "Any" if parameter.annotation is empty else _TYPES.get(_text(parameter.annotation))
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            kind = "Operand | Sequence[Operand]"  # concatenate(a, b) and concatenate([a, b])
        parameters.append(parameter.replace(annotation=Annotation(kind or _text(parameter.annotation))))
    several = "tuple" in _text(rule.return_annotation)
    shape = Annotation("Any" if several else "ShapeLike | None")
    parameters.append(inspect.Parameter("out_shape", keyword, default=None, annotation=shape))
    return inspect.Signature(parameters, return_annotation=_result(rule.return_annotation))


def _result(annotation: Any) -> Annotation:
    text = _text(annotation)
    if annotation is inspect.Signature.empty or "TensorType | tuple" in text:
        return Annotation("Any")  # one value or several, depending on the op's attributes
    return Annotation(text.replace("TensorType", "Value"))


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def builder(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a hand-written builder: an unknown attribute raises the same error as for other ops."""

    @functools.wraps(method)
    def build(*args: P.args, **attrs: P.kwargs) -> R:
        try:
            return method(*args, **attrs)
        except TypeError:
            known = inspect.signature(method).parameters
            unknown = next((name for name in attrs if name not in known), None)
            if unknown is None:
                raise
        hint = nearest(unknown, [name for name in known if name != "self"])
        raise GraphError(f"{method.__name__}: has no attribute {unknown!r}", hint=hint)

    return build


def op_names() -> Iterator[str]:
    """The ops that are methods: all but leaves, in both spellings."""
    for name, definition in registry.OPS.items():
        if registry.LEAF not in definition.traits:
            yield name
    yield from registry.SPELLINGS


def is_op(name: str) -> bool:
    """Whether `name` is an op that is a method."""
    definition = registry.OPS.get(name)
    return definition is not None and registry.LEAF not in definition.traits
