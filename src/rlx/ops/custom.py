"""Custom functions: a graph used as one op, with custom derivative rules.

`fwd_body` defines the computation. `vjp_body` and `jvp_body` define its derivatives: passes keep them for the
transforms; kernels never see them, because the forward body replaces the op before anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.graph import Graph, Value
from rlx.ir.independence import never
from rlx.ir.registry import COMPOSED, CONTROL, op
from rlx.ir.rewrite import inline
from rlx.ops.control import run_body
from rlx.types import TensorType

Types = Sequence[TensorType]


# -- checks -----------------------------------------------------------------------------------------------------------
def _check_graph(where: str, body: Any) -> None:
    if not isinstance(body, Graph):
        raise GraphError(f"{where}: is a {type(body).__name__}, expected a Graph")
    for leaf in body.nodes:
        if leaf.op in ("param", "state"):
            hint = "declare it as an input of the body and hand the value in as an operand"
            raise GraphError(f"{where}: has the {leaf.op} {leaf.attrs['name']!r}", hint=hint)


def _same(where: str, actual: TensorType, label: str, wanted: TensorType) -> None:
    """Check for equal types. The derivative of a non-float only needs the same shape; nothing else is known of it."""
    if actual.shape != wanted.shape:
        symbolic = not all(isinstance(size, int) for size in (*actual.shape, *wanted.shape))
        hint = "in a body, a symbolic size has the name that it has outside" if symbolic else None
        raise ShapeError(f"{where} is {actual}, {label} is {wanted}", hint=hint)
    if actual.dtype is not wanted.dtype:
        raise DTypeError(f"{where} is {actual}, {label} is {wanted}")


def _like(where: str, actual: TensorType, label: str, wanted: TensorType) -> None:
    _same(where, actual, label, wanted if wanted.dtype.is_float else wanted.with_dtype(actual.dtype))


def _check_count(where: str, noun: str, count: int, wanted: int, why: str) -> None:
    if count != wanted:
        raise GraphError(f"{where}: has {count} {noun}, expected {wanted}: {why}")


def _check_forward(body: Graph, operands: Types) -> tuple[TensorType, ...]:
    where = "custom_fn: fwd_body"
    _check_graph(where, body)
    _check_count(where, "inputs", len(body.inputs), len(operands), "one for each operand")
    for i, (node, operand) in enumerate(zip(body.inputs, operands, strict=True)):
        _same(f"{where}: input {node.attrs['name']!r}", node.types[0], f"operand {i}", operand)
    if not body.outputs:
        raise GraphError(f"{where}: has 0 outputs, expected at least 1", hint="call set_outputs on it")
    return tuple(o.type for o in body.outputs)


def named_inputs(body: Graph, *stems: str) -> tuple[list[str], dict[tuple[str, int], str]]:
    """The inputs of a derivative body by role: names of primals in order, and (stem, number) -> name of the others.

    `primal_output` is number 0 of its stem, `primal_output_2` is number 2.
    """
    primals: list[str] = []
    roles: dict[tuple[str, int], str] = {}
    pattern = re.compile(rf"({'|'.join(stems)})(?:_(\d+))?")
    for node in body.inputs:
        name = node.attrs["name"]
        match = pattern.fullmatch(name)
        if match is None:
            primals.append(name)
        elif (role := (match[1], int(match[2] or 0))) in roles:
            raise GraphError(
                f"custom_fn: graph {body.name!r} has the inputs {roles[role]!r} and {name!r} for one value"
            )
        else:
            roles[role] = name
    return primals, roles


def _check_derivative(
    where: str, body: Graph, operands: Types, required: dict[str, Types], optional: dict[str, Types]
) -> None:
    """Check the primals, in order, and the other inputs by name: one per stem and type."""
    _check_graph(where, body)
    primals, roles = named_inputs(body, *required, *optional)
    expected = {(stem, i): t for stem, types in (required | optional).items() for i, t in enumerate(types)}
    shown = ", ".join(_name(stem, i, types) for stem, types in required.items() for i in range(len(types)))
    for stem, types in required.items():
        for i in range(len(types)):
            if (stem, i) not in roles:
                name, names = _name(stem, i, types), [n.attrs["name"] for n in body.inputs]
                hint = f"its inputs are the operands and, by these names, {shown}"
                raise GraphError(f"{where}: has no input called {name!r} among {names}", hint=hint)
    _check_count(where, "inputs that stand for operands", len(primals), len(operands), f"the rest are {shown}")
    for role, name in roles.items():
        if role not in expected:
            counts = " or ".join(f"{len(types)} of {stem!r}" for stem, types in (required | optional).items())
            raise GraphError(f"{where}: input {name!r} stands for nothing, there are {counts}")
    types_by_name = {n.attrs["name"]: n.types[0] for n in body.inputs}
    for i, (name, operand) in enumerate(zip(primals, operands, strict=True)):
        _same(f"{where}: input {name!r}", types_by_name[name], f"operand {i}", operand)
    for role, name in roles.items():
        stem, i = role
        check = _same if stem == "primal_output" else _like
        label = f"{'operand' if stem == 'tangent' else 'result'} {i}"
        check(f"{where}: input {name!r}", types_by_name[name], label, expected[role])


def _name(stem: str, i: int, types: Types) -> str:
    """The name of an input in errors; a single output has no number."""
    return stem if len(types) == 1 and stem != "tangent" else f"{stem}_{i}"


def _check_vjp(body: Graph, operands: Types, results: Types) -> None:
    where = "custom_fn: vjp_body"
    _check_derivative(where, body, operands, {"d_output": results}, {"primal_output": results})
    _check_count(where, "outputs", len(body.outputs), len(operands), "one gradient for each operand")
    for i, (output, operand) in enumerate(zip(body.outputs, operands, strict=True)):
        _like(f"{where}: output {i}", output.type, f"operand {i}", operand)


def _check_jvp(body: Graph, operands: Types, results: Types) -> None:
    where = "custom_fn: jvp_body"
    _check_derivative(where, body, operands, {"tangent": operands}, {"primal_output": results})
    _check_count(where, "outputs", len(body.outputs), len(results), "one tangent for each result")
    for i, (output, result) in enumerate(zip(body.outputs, results, strict=True)):
        _like(f"{where}: output {i}", output.type, f"result {i}", result)


# -- meaning ----------------------------------------------------------------------------------------------------------
def _custom_fn(*operands: Any, fwd_body: Graph, binding: Mapping[str, int], **_: Graph | None) -> tuple[Any, ...]:
    return tuple(run_body(fwd_body, operands, binding))


def _inline(*operands: Value, fwd_body: Graph, **_: Graph | None) -> tuple[Value, ...]:
    return inline(operands[0].graph, fwd_body, operands)


@op("custom_fn", independent=never, reference=_custom_fn, traits=[CONTROL, COMPOSED], decompose=_inline)
def custom_fn(
    *operands: TensorType, fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
) -> TensorType | tuple[TensorType, ...]:
    """A graph as one op: `g.custom_fn([x, y], fwd_body, vjp_body, jvp_body)`, or `custom_fn_multi` for several results.

    Bodies read the operands in the order in which they declare inputs, and with the same types: a symbolic size has the
    name that it has outside. `fwd_body` computes the results. `vjp_body` also has an input `d_output` (`d_output_0`,
    `d_output_1`, ... for several results), the cotangent, and returns one gradient per operand. `jvp_body` also has
    inputs `tangent_0`, `tangent_1`, ..., and returns one tangent per result. Both may read the results as
    `primal_output` (`primal_output_0`, ...).
    """
    results = _check_forward(fwd_body, operands)
    if vjp_body is not None:
        _check_vjp(vjp_body, operands, results)
    if jvp_body is not None:
        _check_jvp(jvp_body, operands, results)
    return results
