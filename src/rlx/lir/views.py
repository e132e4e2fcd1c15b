"""Views: a buffer with an offset and strides.

Reshape, transpose, slice and expand are free if strides can express them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.types import (
    Dim,
    Size,
    Symbol,
    concrete,
    contiguous_strides,
    dim,
    dim_floordiv,
    evaluate,
    product,
    symbols_of,
)


@dataclass(frozen=True, slots=True)
class View:
    """`buffer[offset + Σ index · stride]`, all in elements."""

    buffer: str
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        """Whether the elements are in C order without gaps; an empty view always is."""
        if 0 in self.shape:
            return True
        wanted = contiguous_strides(self.shape)
        return all(d == 1 or s == w for d, s, w in zip(self.shape, self.strides, wanted, strict=True))

    def transpose(self, axes: Sequence[int]) -> View:
        return self.with_(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes))

    def slice(self, start: Sequence[Size], stop: Sequence[Size], step: Sequence[int], shape: tuple[Size, ...]) -> View:
        offset = self.offset
        for a, s in zip(start, self.strides, strict=True):
            offset = offset + a * s
        strides = tuple(s * t for s, t in zip(self.strides, step, strict=True))
        return View(self.buffer, self.dtype, shape, strides, offset)

    def expand(self, shape: tuple[Size, ...]) -> View:
        """Broadcast to a shape: stretched and new axes have stride 0."""
        missing = len(shape) - self.rank
        strides: list[Size] = [0] * missing
        for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True):
            strides.append(0 if have == 1 and want != 1 else stride)
        return self.with_(shape, tuple(strides))

    def reshape(self, shape: tuple[Size, ...]) -> View | None:
        """The view with another shape, or None if that needs a copy."""
        if self.is_contiguous():
            return self.with_(shape, contiguous_strides(shape))
        strides = _reshaped_strides(self, shape)
        return None if strides is None else self.with_(shape, strides)

    def with_(self, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> View:
        return View(self.buffer, self.dtype, shape, strides, self.offset)

    def shifted(self, offset: Size) -> View:
        return View(self.buffer, self.dtype, self.shape, self.strides, self.offset + offset)

    def bound(self, sizes: Mapping[str, int], loops: Iterable[str] = ()) -> View:
        """Substitute sizes for symbols, except the loop symbols in the offset."""
        start = dict(sizes) | dict.fromkeys(loops, 0)
        offset: Size = evaluate(self.offset, start)
        for symbol, step in offset_steps(self.offset, loops).items():
            offset = offset + evaluate(step, sizes) * dim(symbol)
        return View(self.buffer, self.dtype, concrete(self.shape, sizes), concrete(self.strides, sizes), offset)

    def row(self, index: Size) -> View:
        """One row of the first axis."""
        step, *strides = self.strides
        return View(self.buffer, self.dtype, self.shape[1:], tuple(strides), self.offset + index * step)

    def __str__(self) -> str:
        if self.is_contiguous() and self.offset == 0:
            return self.buffer
        shown = str(self.offset)
        at = "" if shown == "0" else shown if shown.startswith("-") else f"+{shown}"
        if self.is_contiguous():
            return f"{self.buffer}{at}"
        return f"{self.buffer}{at}<{', '.join(map(str, self.strides))}>"


def offset_steps(offset: Size, symbols: Iterable[str]) -> dict[str, Size]:
    """The coefficient of each of these symbols in an offset, which is linear in them; absent symbols are left out."""
    wanted = set(symbols)
    steps: dict[str, Size] = {}
    if not isinstance(offset, Dim) or wanted.isdisjoint(s.name for s in symbols_of(offset)):
        return steps
    for monomial, coefficient in offset.terms:
        factors = [a for a in monomial if isinstance(a, Symbol) and a.name in wanted]
        if factors:
            (symbol,) = factors
            rest = product(Dim((((atom,), 1),)) for atom in monomial if atom is not symbol)
            steps[symbol.name] = steps.get(symbol.name, 0) + rest * coefficient
    return steps


def _reshaped_strides(view: View, shape: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """Group old and new axes into runs of equal size; each run of old axes must be mergeable."""
    old = [(d, s) for d, s in zip(view.shape, view.strides, strict=True) if d != 1]
    new = [d for d in shape if d != 1]
    result: list[Size] = []
    i = j = 0
    while i < len(old) and j < len(new):
        have, want = old[i][0], new[j]
        i_end, j_end = i + 1, j + 1
        while have != want:
            if _divides(want, have) and j_end < len(new):
                want = want * new[j_end]
                j_end += 1
            elif i_end < len(old):
                have = have * old[i_end][0]
                i_end += 1
            else:
                return None
        for (_, outer), (size, inner) in zip(old[i : i_end - 1], old[i + 1 : i_end], strict=True):
            if outer != inner * size:
                return None
        step = old[i_end - 1][1]
        run: list[Size] = []
        for size in reversed(new[j:j_end]):
            run.append(step)
            step = step * size
        result += reversed(run)
        i, j = i_end, j_end
    if i < len(old) or j < len(new):
        return None
    steps = iter(result)
    return tuple(0 if d == 1 else next(steps) for d in shape)


def _divides(a: Size, b: Size) -> bool:
    return a != 0 and dim_floordiv(b, a) * a == b


def collapse(
    shape: Sequence[Size], strides: Sequence[Sequence[Size]], *, keep: Iterable[int] = ()
) -> tuple[list[Size], list[list[Size]], list[list[int]]]:
    """Merge adjacent axes that are contiguous with each other in every operand; drop axes of size 1.

    Axes in `keep` are not merged. Returns the sizes, the strides of each operand, and the original axes of each
    merged axis.
    """
    separate = set(keep)
    sizes: list[Size] = []
    merged: list[list[Size]] = [[] for _ in strides]
    axes: list[list[int]] = []
    for axis, size in enumerate(shape):
        if size == 1 and axis not in separate:
            continue
        can = bool(sizes) and axis not in separate and not (set(axes[-1]) & separate)
        if can and all(m[-1] == s[axis] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] = sizes[-1] * size
            axes[-1].append(axis)
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[axis]
            continue
        sizes.append(size)
        axes.append([axis])
        for m, s in zip(merged, strides, strict=True):
            m.append(s[axis])
    return sizes, merged, axes
