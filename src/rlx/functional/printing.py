"""`rlx.debug.print`: values of a traced function are further outputs of its program, printed when it has run."""

from __future__ import annotations

import builtins
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.tracers import Line, Print, current
from rlx.functional.tracing import Function, call
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

    Lines come in the order of the program, those of a loop's body step by step. Under `grad`, `jvp` and others the
    values of the function itself are printed, under `vmap` those of the whole batch at once, its axis first.
    """
    try:
        _formatter.format(fmt, *(_Anything() for _ in values), **{n: _Anything() for n in named})
    except (IndexError, KeyError, ValueError) as error:
        found = f"{len(values)} values" + "".join(f", {n}" for n in named)
        raise GraphError(f"debug.print: {fmt!r} does not fit {found}: {error}", notes=[f"at: {here()}"]) from None
    leaves, shape = tree.flatten((values, named))
    say(Print(fmt, shape, leaves))


def say(line: Line) -> None:
    """Print a line now, or have the trace around do it."""
    trace = current()
    if trace is None:
        _show(line)
    elif trace.prints is not None:
        trace.prints.append(line)
    else:
        raise GraphError(
            "debug.print: has no form inside a function with rules of its own, or the condition of a while_loop",
            hint="return the value and print it outside, or print it in the body of the loop", notes=[f"at: {here()}"],
        )  # fmt: skip


def _show(line: Line) -> None:
    """Print a line whose values are all there."""
    if isinstance(line, Print):
        values, named = line.shape.unflatten(line.leaves)
        builtins.print(_formatter.format(line.format, *values, **named), flush=True)
        return
    steps = int(np.max(line.steps, initial=0))
    kept = min((rows.shape[line.axis] for rows in line.rows), default=steps)
    for step in reversed(range(min(steps, kept))) if line.reverse else range(min(steps, kept)):
        values = iter([np.take(rows, step, line.axis) for rows in line.rows])
        for inner in line.lines:
            _show(inner.filled(values))
    if steps > kept:
        builtins.print(f"... and {steps - kept} more steps, whose values were not kept", flush=True)


def say_all(function: Function, outputs: Sequence[Any]) -> None:
    """Print the lines of a function whose `printed` graph gave these outputs."""
    _say(function.prints, outputs[len(function.graph.outputs) :])


def say_batch(function: Function, outputs: Sequence[Any]) -> None:
    """`say_all` where outputs have a batch axis before their others."""
    _say([line.batched() for line in function.prints], outputs[len(function.graph.outputs) :])


def _say(lines: Sequence[Line], outputs: Sequence[Any]) -> None:
    values = iter(outputs)
    for line in lines:
        say(line.filled(values))


def say_called(function: Function, operands: Sequence[Any]) -> None:
    """Print the lines of a function that is transformed: its own values, by `printed`."""
    if function.printed is not None:
        say_all(function, call(function.printed, operands))
