"""`rlx.debug.print`: values of a traced function are further outputs of its program, printed when it has run."""

from __future__ import annotations

import builtins
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.tracing import Function, Print, call, current
from rlx.ir.graph import Graph
from rlx.ir.provenance import here


class _Formatter(string.Formatter):
    """`str.format`, which also takes formats of numbers for arrays: under `vmap` a number is a batch of them."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, np.ndarray) and value.ndim and format_spec:
            return np.array2string(value, formatter={"all": lambda x: format(x, format_spec)})
        return str(super().format_field(value, format_spec))


_formatter = _Formatter()


class _Anything:
    """Stands for a value while a format is checked."""

    def __format__(self, _: str) -> str:
        return ""

    def __getattr__(self, _: str) -> _Anything:
        return self

    def __getitem__(self, _: Any) -> _Anything:
        return self


def print(fmt: str, *values: Any, **named: Any) -> None:
    """Print `fmt.format(*values, **named)`: at once, or each time that the traced function runs, after it has run.

    Lines come in the order of the program. Under `grad`, `jvp` and others the values of the function itself are
    printed, under `vmap` those of the whole batch at once, its axis first.
    """
    try:
        _formatter.format(fmt, *(_Anything() for _ in values), **{n: _Anything() for n in named})
    except (IndexError, KeyError, ValueError) as error:
        found = f"{len(values)} values" + "".join(f", {n}" for n in named)
        raise GraphError(f"debug.print: {fmt!r} does not fit {found}: {error}", notes=[f"at: {here()}"]) from None
    leaves, shape = tree.flatten((values, named))
    say(Print(fmt, shape, leaves))


def say(line: Print) -> None:
    """Print a line now, or have the trace around do it."""
    trace = current()
    if trace is None:
        values, named = line.shape.unflatten(line.leaves)
        builtins.print(_formatter.format(line.format, *values, **named), flush=True)
    elif trace.prints is not None:
        trace.prints.append(line)
    else:
        hint = "return the value from the body (a scan gives all its rows) and print it outside"
        raise GraphError(
            "debug.print: has no form inside the body of a loop, a branch or a function with rules of its own",
            hint=hint, notes=[f"at: {here()}"],
        )  # fmt: skip


def say_all(function: Function, outputs: Sequence[Any]) -> None:
    """Print the lines of a function whose `printed` graph gave these outputs."""
    values = iter(outputs[len(function.graph.outputs) :])
    for line in function.prints:
        say(line.filled(values))


def say_called(function: Function, operands: Sequence[Any], graph: Graph | None = None) -> None:
    """Print the lines of a function that is transformed: its own values, by `printed` (or `graph`)."""
    found = graph or function.printed
    if found is not None:
        say_all(function, call(found, operands))
