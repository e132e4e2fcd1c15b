"""Finds the index out of range after a launch has reported one.

Kernels report only that there is one, so that their checks cost nothing. The check of a loop kernel is evaluated again
here, on the indices in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Apply, Arg, Check, Const, Expr, Let, Load, LoopKernel, statements, substitute, walk
from rlx.lir.program import INPUT, WEIGHT, Launch, Program
from rlx.lir.views import View
from rlx.types import concrete, evaluate

# Reads the elements of an operand of a launch, by the name of its word; None if its memory cannot be read.
Read = Callable[[str, View], Array | None]
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


def wrong_indices(program: Program, launch: Launch, sizes: Mapping[str, int], read: Read) -> Iterator[WrongIndex]:
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
        if not isinstance(view, View):
            continue
        indices = read(word, view)
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
