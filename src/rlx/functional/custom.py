"""Functions with derivative rules of their own: custom_vjp and custom_jvp, with JAX's signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.arrays import astype, zeros_like
from rlx.functional.tracers import Traced, current, is_weak, type_of
from rlx.functional.tracing import Function, eager, trace_leaves
from rlx.ir.graph import Graph, Value
from rlx.ir.rewrite import inline
from rlx.types import TensorType

Fun = Callable[..., Any]
ORDERS = 2  # how often the rule of a function that calls itself in its rule is written out


def _closed(where: str, made: Function) -> Graph:
    if made.captured:
        hint = "pass it in as an argument: a derivative with respect to it would be missing"
        raise GraphError(f"{where}: reads {made.captured[0]!r} from around it", hint=hint)
    return made.graph


def _zeros(argument: Any) -> Any:
    return tree.map(zeros_like, argument)


def _settled(derivatives: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool]) -> list[Any]:
    """Derivatives in the types of what they belong to, where one of both is a number, which says no type."""
    return [astype(x, t.dtype) if w or is_weak(x) else x for x, t, w in zip(derivatives, types, weak, strict=True)]


def _end(count: int, i: int) -> str:
    return f"_{i}" if count > 1 else ""


class _Custom:
    """What both kinds share: a function, and a rule that is given later."""

    kind = ""

    def __init__(self, function: Fun) -> None:
        self.function = function
        self._inside = 0  # how deep in its own rule we are
        functools.update_wrapper(self, function, updated=())  # the attributes of a wrapped function are its own

    def __call__(self, *args: Any) -> Any:
        return eager(self._apply)(*args)

    def _apply(self, *args: Any) -> Any:
        if self._inside == ORDERS:  # a rule that calls the function has a rule inside, and so on: that has to end
            return self.function(*args)
        leaves, shape = tree.flatten((args, {}))
        types = [type_of(x) for x in leaves]
        weak = [is_weak(x) for x in leaves]
        made = trace_leaves(self.function, shape, types, weak=weak)
        forward = _closed(f"{self.kind} {self.function.__name__}", made)
        self._inside += 1
        try:
            rules = self._rules(args, types, weak, made)
        finally:
            self._inside -= 1
        trace = current()
        assert trace is not None
        found = trace.graph.custom_fn_multi([trace.constant(x) for x in leaves], forward, **rules)
        return made.outputs([Traced(trace, v, w) for v, w in zip(found, made.weak, strict=True)])

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], made: Function
    ) -> dict[str, Graph]:
        raise NotImplementedError


class custom_vjp(_Custom):
    """A function whose gradient is given by `defvjp(fwd, bwd)`.

    `fwd(*args)` gives what the function gives and anything to keep; `bwd(kept, cotangent)` gives a tuple with one
    cotangent per argument, None for an argument that has no gradient.
    """

    kind = "custom_vjp"
    rule: tuple[Fun, Fun] | None = None

    def defvjp(self, fwd: Fun, bwd: Fun) -> None:
        """Say how it is differentiated."""
        self.rule = (fwd, bwd)

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], made: Function
    ) -> dict[str, Graph]:
        if self.rule is None:
            raise GraphError(f"custom_vjp {self.function.__name__}: has no rule yet", hint="call .defvjp(fwd, bwd)")
        fwd, bwd = self.rule
        results = [o.type for o in made.graph.outputs]

        def back(args_: Any, cts: Any) -> Any:
            _, kept = fwd(*args_)
            given = bwd(kept, made.outputs(cts))
            if isinstance(given, (tuple, list)) and len(given) == len(args_):
                given = tuple(_zeros(a) if g is None else g for a, g in zip(args_, given, strict=True))
            found, wanted = tree.structure(given), tree.structure(tuple(args))
            if found != wanted:
                raise GraphError(
                    f"custom_vjp {self.function.__name__}: bwd gives {found}, the arguments are {wanted}",
                    hint="return a tuple with one cotangent per argument; None is for no gradient",
                )
            return _settled(tree.leaves(given), types, weak)

        shape = tree.structure(((tuple(args), [0] * len(results)), {}))
        pulled = _closed(
            f"custom_vjp {self.function.__name__}: its rule",
            trace_leaves(back, shape, [*types, *results], weak=[*weak, *made.weak]),
        )
        rule = Graph(pulled.name)
        operands = [rule.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        for i, t in enumerate(results):
            rule.input(f"primal_output{_end(len(results), i)}", t.shape, t.dtype)
        cts = [rule.input(f"d_output{_end(len(results), i)}", t.shape, t.dtype) for i, t in enumerate(results)]
        return {"vjp_body": rule.set_outputs(inline(rule, pulled, [*operands, *cts]))}


class custom_jvp(_Custom):
    """A function whose derivative is given by `@f.defjvp`: `rule(primals, tangents)` gives (result, tangent)."""

    kind = "custom_jvp"
    rule: Fun | None = None

    def defjvp(self, rule: Fun) -> Fun:
        """Say how it is differentiated."""
        self.rule = rule
        return rule

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], made: Function
    ) -> dict[str, Graph]:
        given = self.rule
        if given is None:
            raise GraphError(f"custom_jvp {self.function.__name__}: has no rule yet", hint="call .defjvp(rule)")

        def push(primals: Any, tangents: Any) -> Any:
            _, moved = given(tuple(primals), tuple(tangents))
            if tree.structure(moved) != made.given:
                found = tree.structure(moved)
                raise GraphError(
                    f"custom_jvp {self.function.__name__}: the tangent is {found}, the result {made.given}"
                )
            return _settled(tree.leaves(moved), [o.type for o in made.graph.outputs], made.weak)

        shape = tree.structure(((tuple(args), tuple(args)), {}))
        pushed = _closed(
            f"custom_jvp {self.function.__name__}: its rule",
            trace_leaves(push, shape, [*types, *types], weak=[*weak, *weak]),
        )
        rule = Graph(pushed.name)
        operands: list[Value] = [rule.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        operands += [rule.input(f"tangent_{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        return {"jvp_body": rule.set_outputs(inline(rule, pushed, operands))}
