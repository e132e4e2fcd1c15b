"""`rlx.debug.print`: printed values become extra outputs of the traced graph, and are printed after it has run."""

from __future__ import annotations

import builtins
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional import tree
from rlx.functional.tracers import Line, Print, current
from rlx.functional.tracing import Function, apply_graph
from rlx.ir.provenance import here


class _Formatter(string.Formatter):
    """`str.format` that also applies number formats to arrays: under `vmap` a number becomes a batch."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, np.ndarray) and value.ndim and format_spec:
            return np.array2string(value, formatter={"all": lambda x: format(x, format_spec)})
        return str(super().format_field(value, format_spec))


_formatter = _Formatter()


class _Anything:
    """Placeholder for a value while a format string is checked."""

    def __format__(self, _: str) -> str:
        return ""

    def __getattr__(self, _: str) -> _Anything:
        return self

    def __getitem__(self, _: Any) -> _Anything:
        return self


def print(fmt: str, *values: Any, **named: Any) -> None:
    """Print `fmt.format(*values, **named)`: immediately, or after each run of the traced function.

    Lines are printed in program order, those of a loop body step by step. Under `grad`, `jvp` and others the values of
    the function itself are printed; under `vmap` those of the full batch at once, batch axis first.
    """
    try:
        _formatter.format(fmt, *(_Anything() for _ in values), **{n: _Anything() for n in named})
    except (IndexError, KeyError, ValueError) as error:
        values_text = f"{len(values)} values" + "".join(f", {n}" for n in named)
        raise GraphError(f"debug.print: {fmt!r} does not fit {values_text}: {error}", notes=[f"at: {here()}"]) from None
    leaves, shape = tree.flatten((values, named))
    emit(Print(fmt, shape, leaves))


def emit(line: Line) -> None:
    """Print a line now, or record it in the current trace."""
    trace = current()
    if trace is None:
        _show(line)
    elif trace.prints is not None:
        trace.prints.append(line)
    else:
        raise GraphError(
            "debug.print: is not supported in a function with custom rules, or in the condition of a while_loop",
            hint="return the value and print it outside, or print it in the body of the loop", notes=[f"at: {here()}"],
        )  # fmt: skip


def _show(line: Line) -> None:
    """Print a line whose values are all known."""
    if isinstance(line, Print):
        values, named = line.shape.unflatten(line.leaves)
        builtins.print(_formatter.format(line.format, *values, **named), flush=True)
        return
    steps = int(np.max(line.steps, initial=0))
    stored = min((rows.shape[line.axis] for rows in line.rows), default=steps)
    for step in reversed(range(min(steps, stored))) if line.reverse else range(min(steps, stored)):
        values = iter([np.take(rows, step, line.axis) for rows in line.rows])
        for inner in line.lines:
            _show(inner.filled(values))
    if steps > stored:
        builtins.print(f"... and {steps - stored} more steps, whose values were not stored", flush=True)


def emit_all(function: Function, outputs: Sequence[Any]) -> None:
    """Print the lines of a function, from the outputs of its `printed` graph."""
    _emit_lines(function.prints, outputs[len(function.graph.outputs) :])


def emit_batch(function: Function, outputs: Sequence[Any]) -> None:
    """`emit_all` for outputs with a leading batch axis."""
    _emit_lines([line.batched() for line in function.prints], outputs[len(function.graph.outputs) :])


def _emit_lines(lines: Sequence[Line], outputs: Sequence[Any]) -> None:
    values = iter(outputs)
    for line in lines:
        emit(line.filled(values))


def emit_called(function: Function, operands: Sequence[Any]) -> None:
    """Print the lines of a function that is about to be transformed, by running its `printed` graph."""
    if function.printed is not None:
        emit_all(function, apply_graph(function.printed, operands))
