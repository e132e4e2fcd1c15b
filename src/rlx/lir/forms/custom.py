"""`rlx.op`: users declare ops of their own, meaning and loop form in one place.

It is the declaration that rlx uses itself, and the op is a method of graphs and values at once. Custom functions, the
group of this name, are inlined before kernels are made and have no loop form.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import Any

from rlx.errors import GraphError
from rlx.ir import registry
from rlx.ir.compose import reference_by_parts
from rlx.ir.graph import Graph, Value
from rlx.ir.registry import CHECKS_DATA, COMPOSED, ELEMENTWISE, OpDef, Sample
from rlx.lir.forms.elementwise import ScalarForm, scalar_form
from rlx.lir.schedule import LoopForm, loop_form


def op(
    name: str,
    *,
    reference: Callable[..., Any] | None = None,
    decompose: Callable[..., Any] | None = None,
    loop: LoopForm | None = None,
    scalar: ScalarForm | None = None,
    samples: Iterable[Sample] = (),
    tolerance: float = 1e-6,
    doc: str | None = None,
    replace: bool = False,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op called `name`; decorate its type rule.

    The rule takes types of operands (None for an optional one that is left out) and attributes, which are keyword-only,
    and gives the type of the result or a tuple of types. What the op means is `reference`, in NumPy, or `decompose`,
    which builds it out of other ops: values in, values out. How it runs on the CPU is its decomposition, or `loop`, a
    loop form, or `scalar`, an expression of one element, which makes it an elementwise op that fuses with others.
    `replace` declares anew what was declared before, by you: graphs that are built already change their meaning.
    """

    def declare(rule: Callable[..., Any]) -> OpDef:
        _check_name(name, replace)
        if reference is None and decompose is None:
            hint = "give a NumPy function, or a decomposition"
            raise GraphError(
                f"op {name}: has neither reference= nor decompose=, so nothing says what it means", hint=hint
            )
        if loop is not None and scalar is not None:
            raise GraphError(f"op {name}: has both loop= and scalar=, one is enough")
        composed = decompose is not None and loop is None and scalar is None
        # Nothing says whether a loop of the user may fault.
        traits = [COMPOSED] if composed else [ELEMENTWISE] if scalar is not None else [CHECKS_DATA]
        forget(name)
        definition = registry.op(
            name,
            reference=reference or reference_by_parts(name, decompose),  # type: ignore[arg-type]
            samples=samples,
            traits=traits,
            decompose=decompose,
            tolerance=tolerance,
            doc=doc,
        )(rule)
        if scalar is not None:
            if definition.schema.attrs:
                forget(name)
                shown = ", ".join(definition.schema.attrs)
                raise GraphError(f"op {name}: a scalar expression sees no attributes, found {shown}", hint="give loop=")
            scalar_form(name)(scalar)
        if loop is not None:
            loop_form(name)(loop)
        return definition

    return declare


def _check_name(name: str, replace: bool) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise GraphError(f"op: {name!r} cannot be the name of a method", hint="use letters, digits and underscores")
    known = registry.OPS.get(name)
    if known is not None and known.is_builtin:
        raise GraphError(f"op {name}: is one of rlx, declared at {known.place}", hint="choose another name")
    if known is not None and not replace:
        hint = "give replace=True to declare it anew"
        raise GraphError(f"op {name}: declared twice, first at {known.place}", hint=hint)
    for holder, what in ((Graph("any"), "Graph"), (Value, "Value")):
        if known is None and hasattr(holder, name):
            raise GraphError(f"op {name}: {what} has an attribute of this name", hint="choose another name")


def forget(name: str) -> None:
    """Take a declaration back; graphs that use the op can no longer be compiled."""
    registry.OPS.pop(name, None)
    for table in (loop_form, scalar_form):
        table.drop(name)
