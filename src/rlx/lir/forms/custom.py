"""`rlx.op`: declares user-defined ops, with semantics and loop form in one place.

rlx declares its own ops the same way; a new op immediately becomes a method of graphs and values. Custom functions,
which are the op group of this name, are inlined before lowering and have no loop form.
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

    The rule takes the operand types (None for an absent optional operand) and keyword-only attributes, and returns the
    type of the result or a tuple of types. `reference` defines the op in NumPy; `decompose` builds it from other ops,
    values in, values out. Compiled devices run it as the loop form `loop`, or as `scalar`, an expression for one
    element, which makes it an elementwise op that fuses with others; without either as its decomposition.

    `loop` and `scalar` win over `decompose` when the op runs, and `reference` wins on the reference device. The
    decomposition is then still what derivatives and `vmap` use, so `scalar=` with `decompose=` is a kernel of your own
    with derivatives. Without a decomposition, derivatives and `vmap` need rules, see `rlx.transforms.rule_tables`;
    `vmap` of an op with neither is a scan over the batch. An op with `scalar` needs no rule for `vmap`.

    `replace` allows redeclaring an op of your own, which also changes the meaning of graphs that already use it and
    drops all its rules.
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
        # Assume that a user's loop form may fault.
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
                raise GraphError(
                    f"op {name}: a scalar expression sees no attributes, found {shown}", hint="give decompose= or loop="
                )
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
        raise GraphError(f"op {name}: is built into rlx, declared at {known.place}", hint="choose another name")
    if known is not None and not replace:
        hint = "pass replace=True to redeclare it"
        raise GraphError(f"op {name}: declared twice, first at {known.place}", hint=hint)
    for holder, owner in ((Graph("any"), "Graph"), (Value, "Value")):
        if known is None and hasattr(holder, name):
            raise GraphError(f"op {name}: {owner} has an attribute of this name", hint="choose another name")


def forget(name: str) -> None:
    """Remove a declaration; graphs that use the op can no longer be compiled."""
    if registry.OPS.pop(name, None) is not None:
        registry.version += 1
    for table in registry.RuleTable.all:
        table.drop(name)
