"""Errors that kernels report at run time: the same messages on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlx.arrays import Array
from rlx.errors import BindError, KernelError
from rlx.lir.kernels import (
    BEYOND_CAPACITY,
    OUT_OF_RANGE,
    OUT_OF_STEPS,
    OUTSIDE_POOL,
    OUTSIDE_STATES,
    OUTSIDE_TABLE,
    UNFIT_SIZES,
)
from rlx.lir.loops import Apply, Arg, Check, Const, Expr, Let, Load, LoopKernel, statements, substitute, walk
from rlx.lir.program import INPUT, WEIGHT, Assertion, Launch, Program
from rlx.lir.views import View
from rlx.types import concrete, evaluate

# Reads the elements of an operand of a launch, by the name of its word; None if its memory cannot be read.
Read = Callable[[str, View], Array | None]

TEXTS = {
    OUT_OF_RANGE: "an index lies outside the axis it selects from",
    BEYOND_CAPACITY: "a position lies outside the capacity of a cache",
    OUTSIDE_TABLE: "a row number lies outside the table of a cache",
    OUTSIDE_STATES: "a row number lies outside the states of a cache",
    OUTSIDE_POOL: "a page number in the table of a cache lies outside its pool of pages",
    OUT_OF_STEPS: "its condition still holds after max_steps",
}


def fault(
    program: Program,
    launch: Launch | None,
    code: int,
    sizes: Mapping[str, int],
    read: Read | None = None,
    *,
    is_piece: bool = False,
) -> KernelError | BindError:
    """The error for a fault code reported by a launch; `launch` is None if it is not known which.

    With `read`, an index out of range is named: kernels report only that there is one, so that checks cost nothing.
    Inputs of a piece of a run are rows of the caller's, so positions in them are not shown.
    """
    if code >= UNFIT_SIZES:
        return assertion_error(program.assertions[code - UNFIT_SIZES], sizes)
    where = launch.kernel.symbol if launch is not None else "a kernel"
    notes = [f"built at: {launch.where}"] if launch is not None and launch.where else []
    text = TEXTS.get(code, f"fault {code}")
    if code == OUT_OF_RANGE and launch is not None and read is not None:
        wrong = next(_wrong_indices(program, launch, sizes, read), None)
        if wrong is not None and is_piece:
            wrong = replace(wrong, position=())
        text = text if wrong is None else str(wrong)
    return KernelError(f"{where}: {text}", notes=notes)


# -- indices out of range ---------------------------------------------------------------------------------------------
# What an axis counts, by the beginning of the kernel's name
AXES = {"cross_entropy": "classes", "rope": "positions of the RoPE tables"}
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip


@dataclass(frozen=True)
class WrongIndex:
    """An index out of range, the size of its axis, and where it was read."""

    index: int
    limit: int
    axis: str  # what the axis counts
    name: str = ""  # of the input that holds it; empty if a kernel computed it
    position: tuple[int, ...] = ()

    def __str__(self) -> str:
        at = f" at [{', '.join(map(str, self.position))}]" if self.position else ""
        place = f" (input {self.name!r}{at})" if self.name else ""
        return f"index {self.index}{place} lies outside the {self.limit} {self.axis}"


def _wrong_indices(program: Program, launch: Launch, sizes: Mapping[str, int], read: Read) -> Iterator[WrongIndex]:
    """Evaluate the checks of a loop kernel on the indices in memory, and yield the first wrong one of each."""
    kernel = launch.kernel
    if not isinstance(kernel, LoopKernel):
        return
    words = dict(zip(kernel.words, launch.words, strict=True))
    lets: dict[str, Expr] = {}
    for stmt in (*kernel.lets, *statements(kernel.root)):
        if isinstance(stmt, Let):
            lets[stmt.name] = substitute(stmt.value, lets)
        if not isinstance(stmt, Check) or stmt.code != OUT_OF_RANGE:
            continue
        condition = substitute(stmt.condition, lets)
        params = {e.param for e in walk(condition) if isinstance(e, Load)}
        limit = next((e.args[1] for e in walk(condition) if isinstance(e, Apply) and e.op == "lt"), None)
        if len(params) != 1 or limit is None:
            continue
        word = kernel.params[params.pop()].name
        view = words[word]
        indices = read(word, view) if isinstance(view, View) else None
        if indices is None:
            continue
        numbers = {
            name: evaluate(size, sizes)
            for name, size in words.items()
            if size is not None and not isinstance(size, View)
        }
        try:
            holds = np.broadcast_to(_value(condition, indices, numbers), indices.shape)
            highest = int(_value(limit, indices, numbers))
        except NotImplementedError:
            continue
        if holds.all():
            continue
        at = np.unravel_index(int(np.argmin(holds)), holds.shape)
        yield WrongIndex(int(indices[at]), highest, _axis(program, launch), *_place(program, view, at, sizes))


def _axis(program: Program, launch: Launch) -> str:
    """What the indices of a launch select from."""
    name, table = launch.kernel.symbol, launch.words[0]
    if name.startswith("gather") and isinstance(table, View) and program.buffers[table.buffer].kind in (INPUT, WEIGHT):
        return f"entries of {table.buffer!r}"
    return next((noun for start, noun in AXES.items() if name.startswith(start)), "entries of its axis")


def _value(expr: Expr, indices: Array, numbers: Mapping[str, int]) -> Array:
    """Evaluate the condition of a check for all indices."""
    match expr:
        case Load():
            return indices
        case Const():
            return np.asarray(expr.value)
        case Arg():
            return np.asarray(numbers[expr.name])
        case Apply(op="cast"):
            return _value(expr.args[0], indices, numbers)
        case Apply() if expr.op in COMPARISONS:
            return np.asarray(COMPARISONS[expr.op](*(_value(e, indices, numbers) for e in expr.args)))
        case _:
            raise NotImplementedError(str(expr))


def _place(
    program: Program, view: View, at: tuple[np.intp, ...], sizes: Mapping[str, int]
) -> tuple[str, tuple[int, ...]] | tuple[()]:
    """The input that holds an element of a view, and its position there; nothing for other buffers."""
    buffer = program.buffers[view.buffer]
    if buffer.kind != INPUT or buffer.type.dtype is not view.dtype:
        return ()
    strides, offset = concrete(view.strides, sizes), evaluate(view.offset, sizes)
    flat = offset + sum(int(i) * stride for i, stride in zip(at, strides, strict=True))
    return buffer.name, tuple(map(int, np.unravel_index(flat, concrete(buffer.type.shape, sizes))))


def strided(memory: Array, view: View, sizes: Mapping[str, int]) -> Array:
    """The elements of a view, from a flat array that begins with its first one."""
    shape, strides = concrete(view.shape, sizes), concrete(view.strides, sizes)
    size = view.dtype.size
    return np.lib.stride_tricks.as_strided(memory, shape, [stride * size for stride in strides], writeable=False)


# -- sizes ------------------------------------------------------------------------------------------------------------
def assertion_error(assertion: Assertion, sizes: Mapping[str, int]) -> BindError:
    """The error for an assertion that these sizes violate."""
    a, b = evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)
    return BindError(assertion.message(a, b), notes=[assertion.where])


def check_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """Raises if the sizes violate an assertion that the run does not check itself."""
    for assertion in program.assertions:
        runs = not assertion.launched and all(evaluate(steps, sizes) > 0 for steps in assertion.steps)
        if runs and not assertion.holds(evaluate(assertion.a, sizes), evaluate(assertion.b, sizes)):
            raise assertion_error(assertion, sizes)
