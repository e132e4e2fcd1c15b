"""Functions with custom derivative rules: custom_vjp and custom_jvp, with JAX's signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.functional import tree
from rlx.functional.arrays import astype, zeros_like
from rlx.functional.tracers import Traced, current, is_weak, type_of
from rlx.functional.tracing import Function, eager, label_of, names_of, trace_leaves
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


def _check_derivatives(
    where: str, derivatives: Sequence[Any], types: Sequence[TensorType], names: Sequence[str]
) -> None:
    """Raise if a derivative does not have the type of what it is the derivative of."""
    for x, t, name in zip(derivatives, types, names, strict=True):
        if type_of(x) != t:
            error = ShapeError if type_of(x).shape != t.shape else DTypeError
            hint = f"it has the shape and the dtype of {name}" + (
                "; sum over axes that were broadcast" * (error is ShapeError)
            )
            raise error(f"{where} returns {type_of(x)} for {name}, expected {t}", hint=hint)


def _pair(where: str, result: Any, parts: str) -> Sequence[Any]:
    """Return the pair that a rule returns; raises if it is none."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise GraphError(f"{where} returns {tree.structure(result)}, expected a pair ({parts})")
    return result


def _suffix(count: int, i: int) -> str:
    return f"_{i}" if count > 1 else ""


class _Custom:
    """Common base: a function, and a derivative rule that is set later.

    Arguments in `nondiff_argnums` are Python values, such as functions and names; the rule gets them first.
    """

    kind = ""

    def __init__(self, function: Fun, nondiff_argnums: int | Sequence[int] = ()) -> None:
        self.function = function
        self.nondiff = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)
        self._depth = [0]  # nesting depth inside its own rule
        functools.update_wrapper(self, function, updated=())  # does not copy the function's __dict__

    rule: Any = None

    def __rlx_reads__(self) -> tuple[Any, ...]:
        """Return what a result depends on besides the arguments."""
        return (self.function, self.rule, self.nondiff, self._depth[0])

    def __repr__(self) -> str:
        return f"<rlx.{self.kind} of {label_of(self.function)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._by_position(args, kwargs)
        if self.nondiff:
            return self._of_the_others(args)
        return eager(self._apply)(*args)

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, those that are numbers and arrays checked."""
        where = f"{self.kind} {label_of(self.function)}"
        if kwargs or self.nondiff:
            try:
                bound = inspect.signature(self.function).bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{where}: {error}") from None
            bound.apply_defaults()
            if bound.kwargs:
                raise GraphError(
                    f"{where}: {next(iter(bound.kwargs))!r} cannot be given by position", hint="its rule has none"
                )
            args = bound.args
        for i, argument in enumerate(args):
            if i not in self.nondiff:
                self._check_argument(where, i, argument)
        return args

    def _check_argument(self, where: str, i: int, argument: Any) -> None:
        for leaf in tree.leaves(argument):
            if isinstance(leaf, str) or (
                callable(leaf) and not isinstance(leaf, Traced) and not hasattr(leaf, "dtype")
            ):
                names = names_of(self.function, [None] * i + [leaf], {})
                hint = f"Python values are for rlx.{self.kind}(f, nondiff_argnums=({i},)); its rule gets them first"
                raise DTypeError(
                    f"{where}: {names[-1]} is a {type(leaf).__name__}, expected an array or a number", hint=hint
                )

    def _of_the_others(self, args: tuple[Any, ...]) -> Any:
        """Call the function of the arguments that have derivatives, with the others bound."""
        where = f"{self.kind} {label_of(self.function)}"
        if any(not -len(args) <= i < len(args) for i in self.nondiff):
            raise GraphError(f"{where}: nondiff_argnums is {self.nondiff}, there are {len(args)} arguments")
        fixed = {i % len(args): args[i] for i in self.nondiff}

        def merged(others: Sequence[Any]) -> list[Any]:
            rest = iter(others)
            return [fixed[i] if i in fixed else next(rest) for i in range(len(args))]

        def others_only(*others: Any) -> Any:
            return self.function(*merged(others))

        others_only.__name__ = label_of(self.function)
        bound = type(self)(others_only)
        bound._depth = self._depth
        bound.rule = None if self.rule is None else self._bound_rule(tuple(fixed.values()), merged)
        return bound(*(a for i, a in enumerate(args) if i not in fixed))

    def _bound_rule(self, fixed: tuple[Any, ...], merged: Callable[[Sequence[Any]], list[Any]]) -> Any:
        """Return the rule of the other arguments."""
        raise NotImplementedError

    def _apply(self, *args: Any) -> Any:
        if self._depth[0] == MAX_ORDER:  # a rule that calls its own function would nest forever
            return self.function(*args)
        leaves, shape = tree.flatten((args, {}))
        types = [type_of(x) for x in leaves]
        weak = [is_weak(x) for x in leaves]
        traced = trace_leaves(self.function, shape, types, weak=weak)
        forward = _without_captures(f"{self.kind} {label_of(self.function)}", traced)
        self._depth[0] += 1
        try:
            rules = self._rules(args, types, weak, traced)
        finally:
            self._depth[0] -= 1
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

    def _bound_rule(self, fixed: tuple[Any, ...], merged: Callable[[Sequence[Any]], list[Any]]) -> Any:
        assert self.rule is not None
        fwd, bwd = self.rule
        return (lambda *others: fwd(*merged(others))), functools.partial(bwd, *fixed)

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], traced: Function
    ) -> dict[str, Graph]:
        if self.rule is None:
            raise GraphError(f"custom_vjp {label_of(self.function)}: has no rule yet", hint="call .defvjp(fwd, bwd)")
        (fwd, bwd), where = self.rule, f"custom_vjp {label_of(self.function)}"
        results = [o.type for o in traced.graph.outputs]

        def back(args_: Any, cts: Any) -> Any:
            _, residuals = _pair(f"{where}: fwd", fwd(*args_), "result, residuals")
            cotangents = bwd(residuals, traced.outputs(cts))
            if isinstance(cotangents, (tuple, list)) and len(cotangents) == len(args_):
                cotangents = tuple(_zeros(a) if g is None else g for a, g in zip(args_, cotangents, strict=True))
            structure, expected = tree.structure(cotangents), tree.structure(tuple(args))
            if structure != expected:
                raise GraphError(
                    f"custom_vjp {label_of(self.function)}: bwd returns {structure}, the arguments are {expected}",
                    hint="return a tuple with one cotangent per argument; None is for no gradient",
                )
            leaves = _cast_derivatives(tree.leaves(cotangents), types, weak)
            _check_derivatives(f"{where}: bwd", leaves, types, names_of(self.function, args, {}))
            return leaves

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

    def _bound_rule(self, fixed: tuple[Any, ...], merged: Callable[[Sequence[Any]], list[Any]]) -> Any:
        assert self.rule is not None
        return functools.partial(self.rule, *fixed)

    def _rules(
        self, args: Sequence[Any], types: Sequence[TensorType], weak: Sequence[bool], traced: Function
    ) -> dict[str, Graph]:
        jvp_rule = self.rule
        if jvp_rule is None:
            raise GraphError(f"custom_jvp {label_of(self.function)}: has no rule yet", hint="call .defjvp(rule)")

        def push(primals: Any, tangents: Any) -> Any:
            result = jvp_rule(tuple(primals), tuple(tangents))
            _, tangent = _pair(f"custom_jvp {label_of(self.function)}: its rule", result, "result, tangent")
            if tree.structure(tangent) != traced.structure:
                structure = tree.structure(tangent)
                raise GraphError(
                    f"custom_jvp {label_of(self.function)}: the tangent is {structure}, the result {traced.structure}"
                )
            expected = [o.type for o in traced.graph.outputs]
            leaves = _cast_derivatives(tree.leaves(tangent), expected, traced.weak)
            where = f"custom_jvp {label_of(self.function)}: its rule"
            _check_derivatives(where, leaves, expected, traced.structure.paths("the result"))
            return leaves

        shape = tree.structure(((tuple(args), tuple(args)), {}))
        pushed = _without_captures(
            f"custom_jvp {label_of(self.function)}: its rule",
            trace_leaves(push, shape, [*types, *types], weak=[*weak, *weak]),
        )
        rule = Graph(pushed.name)
        operands: list[Value] = [rule.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        operands += [rule.input(f"tangent_{i}", t.shape, t.dtype) for i, t in enumerate(types)]
        return {"jvp_body": rule.set_outputs(inline(rule, pushed, operands))}
