"""Functions with custom derivative rules: custom_vjp and custom_jvp, with JAX's signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.arrays import astype, zeros_like
from rlx.functional.tracers import Traced, current, is_weak, type_of
from rlx.functional.tracing import Function, eager, label_of, trace_leaves
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.types import TensorType

Fun = Callable[..., Any]
MAX_ORDER = 2  # nesting depth to which a rule that calls its own function is expanded


def _without_captures(where: str, function: Function) -> Graph:
    if function.captured:
        hint = "pass it in as an argument: a derivative with respect to it would be missing"
        raise GraphError(f"{where}: reads {function.captured[0]!r} from the enclosing scope", hint=hint)
    return function.graph


def _zeros(argument: Any) -> Any:
    return tree.map(zeros_like, argument)


def _cast_derivatives(derivatives: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool]) -> list[Any]:
    """Cast derivatives to the dtypes of their primals where either is a Python number, which has no fixed dtype."""
    return [astype(x, t.dtype) if w or is_weak(x) else x for x, t, w in zip(derivatives, types, weak, strict=True)]


def _suffix(count: int, i: int) -> str:
    return f"_{i}" if count > 1 else ""


class _Custom:
    """Common base: a function, and a derivative rule that is set later."""

    kind = ""

    def __init__(self, function: Fun) -> None:
        self.function = function
        self._inside = 0  # nesting depth inside its own rule
        functools.update_wrapper(self, function, updated=())  # does not copy the function's __dict__

    rule: Any = None

    def __rlx_reads__(self) -> tuple[Any, ...]:
        """Return what a result depends on besides the arguments."""
        return (self.function, self.rule, self._inside)

    def __repr__(self) -> str:
        return f"<rlx.{self.kind} of {label_of(self.function)}>"

    def __call__(self, *args: Any) -> Any:
        return eager(self._apply)(*args)

    def _apply(self, *args: Any) -> Any:
        if self._inside == MAX_ORDER:  # a rule that calls its own function would nest forever
            return self.function(*args)
        leaves, shape = tree.flatten((args, {}))
        types = [type_of(x) for x in leaves]
        weak = [is_weak(x) for x in leaves]
        traced = trace_leaves(self.function, shape, types, weak=weak)
        forward = _without_captures(f"{self.kind} {label_of(self.function)}", traced)
        self._inside += 1
        try:
            rules = self._rules(args, types, weak, traced)
        finally:
            self._inside -= 1
        trace = current()
        assert trace is not None
        results = trace.graph.custom_fn_multi([trace.constant(x) for x in leaves], forward, **rules)
        return traced.outputs([Traced(trace, v, w) for v, w in zip(results, traced.weak, strict=True)])

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], traced: Function
    ) -> dict[str, Graph]:
        raise NotImplementedError


class custom_vjp(_Custom):
    """A function whose gradient is defined by `defvjp(fwd, bwd)`.

    `fwd(*args)` returns the function's result and any residuals; `bwd(residuals, cotangent)` returns a tuple with one
    cotangent per argument, None for an argument that has no gradient.
    """

    kind = "custom_vjp"
    rule: tuple[Fun, Fun] | None = None

    def defvjp(self, fwd: Fun, bwd: Fun) -> None:
        """Set the forward and backward rules."""
        self.rule = (fwd, bwd)

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], traced: Function
    ) -> dict[str, Graph]:
        if self.rule is None:
            raise GraphError(f"custom_vjp {label_of(self.function)}: has no rule yet", hint="call .defvjp(fwd, bwd)")
        fwd, bwd = self.rule
        results = [o.type for o in traced.graph.outputs]

        def back(args_: Any, cts: Any) -> Any:
            _, residuals = fwd(*args_)
            cotangents = bwd(residuals, traced.outputs(cts))
            if isinstance(cotangents, (tuple, list)) and len(cotangents) == len(args_):
                cotangents = tuple(_zeros(a) if g is None else g for a, g in zip(args_, cotangents, strict=True))
            structure, wanted = tree.structure(cotangents), tree.structure(tuple(args))
            if structure != wanted:
                raise GraphError(
                    f"custom_vjp {label_of(self.function)}: bwd returns {structure}, the arguments are {wanted}",
                    hint="return a tuple with one cotangent per argument; None is for no gradient",
                )
            return _cast_derivatives(tree.leaves(cotangents), types, weak)

        shape = tree.structure(((tuple(args), [0] * len(results)), {}))
        pulled = _without_captures(
            f"custom_vjp {label_of(self.function)}: its rule",
            trace_leaves(back, shape, [*types, *results], weak=[*weak, *traced.weak]),
        )
        rule = Graph(pulled.name)
        operands = [rule.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        for i, t in enumerate(results):
            rule.input(f"primal_output{_suffix(len(results), i)}", t.shape, t.dtype)
        cts = [rule.input(f"d_output{_suffix(len(results), i)}", t.shape, t.dtype) for i, t in enumerate(results)]
        return {"vjp_body": rule.set_outputs(inline(rule, pulled, [*operands, *cts]))}


class custom_jvp(_Custom):
    """A function whose derivative is defined by `@f.defjvp`: `rule(primals, tangents)` returns (result, tangent)."""

    kind = "custom_jvp"
    rule: Fun | None = None

    def defjvp(self, rule: Fun) -> Fun:
        """Set the rule; usable as a decorator."""
        self.rule = rule
        return rule

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], traced: Function
    ) -> dict[str, Graph]:
        jvp_rule = self.rule
        if jvp_rule is None:
            raise GraphError(f"custom_jvp {label_of(self.function)}: has no rule yet", hint="call .defjvp(rule)")

        def push(primals: Any, tangents: Any) -> Any:
            _, tangent = jvp_rule(tuple(primals), tuple(tangents))
            if tree.structure(tangent) != traced.structure:
                structure = tree.structure(tangent)
                raise GraphError(
                    f"custom_jvp {label_of(self.function)}: the tangent is {structure}, the result {traced.structure}"
                )
            return _cast_derivatives(tree.leaves(tangent), [o.type for o in traced.graph.outputs], traced.weak)

        shape = tree.structure(((tuple(args), tuple(args)), {}))
        pushed = _without_captures(
            f"custom_jvp {label_of(self.function)}: its rule",
            trace_leaves(push, shape, [*types, *types], weak=[*weak, *weak]),
        )
        rule = Graph(pushed.name)
        operands: list[Value] = [rule.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        operands += [rule.input(f"tangent_{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        return {"jvp_body": rule.set_outputs(inline(rule, pushed, operands))}
