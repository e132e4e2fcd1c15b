"""Matrix products and einsum, under NumPy's names."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError, ShapeError
from rlx.functional.creation import iota, zeros
from rlx.functional.elementwise import equal, multiply, where
from rlx.functional.operands import asarray
from rlx.functional.reductions import sum
from rlx.functional.shapes import (
    axes_of,
    broadcast_to,
    expand_dims,
    moveaxis,
    ravel,
    reshape,
    roll,
    squeeze,
    transpose,
)
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.types import Size, product


@eager
def matmul(a: Any, b: Any) -> Any:
    """Matrix product; a vector is a row on the left and a column on the right."""
    a, b = asarray(a), asarray(b)
    left, right = type_of(a).rank == 1, type_of(b).rank == 1
    y = apply("matmul", expand_dims(a, 0) if left else a, expand_dims(b, 1) if right else b)
    y = squeeze(y, type_of(y).rank - 1) if right else y
    return squeeze(y, type_of(y).rank - (1 if right else 2)) if left else y


@eager
def dot(a: Any, b: Any) -> Any:
    """Sum of products over the last axis of `a` and the second to last of `b`; scalars multiply."""
    if not type_of(a).rank or not type_of(b).rank:
        return multiply(a, b)
    if type_of(b).rank <= 2:
        return matmul(a, b)
    return tensordot(a, b, ((type_of(a).rank - 1,), (type_of(b).rank - 2,)))


def outer(a: Any, b: Any) -> Any:
    """Outer product of two flattened arrays."""
    return expand_dims(ravel(a), 1) * expand_dims(ravel(b), 0)


@eager
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Sum of products over the last `axes` of `a` and the first of `b`, or over two lists of axes."""
    ranks = [type_of(x).rank for x in (a, b)]
    if isinstance(axes, int):
        axes = (tuple(range(ranks[0] - axes, ranks[0])), tuple(range(axes)))
    over = [axes_of(x, r, "tensordot") for x, r in zip(axes, ranks, strict=True)]
    free = [[i for i in range(r) if i not in o] for r, o in zip(ranks, over, strict=True)]
    shapes = [type_of(x).shape for x in (a, b)]
    inner = product(shapes[0][i] for i in over[0])
    left = reshape(transpose(a, [*free[0], *over[0]]), product(shapes[0][i] for i in free[0]), inner)
    right = reshape(transpose(b, [*over[1], *free[1]]), inner, product(shapes[1][i] for i in free[1]))
    return reshape(matmul(left, right), [*(shapes[0][i] for i in free[0]), *(shapes[1][i] for i in free[1])])


@eager
def einsum(subscripts: str, *operands: Any, optimize: Any = False) -> Any:
    """Einstein summation: `einsum("bqd,bkd->bqk", q, k)`. Operands are contracted pairwise, as matrix products.

    `...` stands for axes in front that broadcast. `optimize` is ignored: the order is from left to right.
    """
    if not isinstance(subscripts, str):
        hint = 'np.einsum("ij->ji", a) is np.einsum(a, [0, 1], [1, 0])'
        raise GraphError(f"einsum: the first argument is {type(subscripts).__name__}, expected a string", hint=hint)
    terms, arrow, result = subscripts.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(operands):
        raise GraphError(f"einsum: {subscripts!r} has {len(inputs)} operands, found {len(operands)}")
    lead = ""
    if "..." in subscripts:
        inputs, operands, lead = _name_ellipsis(subscripts, inputs, operands)
        if arrow and lead and "..." not in result:
            raise GraphError(f"einsum: {subscripts!r} has no ... in its result", hint="-> with ..., or sum these axes")
        result = result.replace("...", lead, 1)
        terms = ",".join(inputs)
    if not arrow:
        every = "".join(c for c in terms if c not in lead and c != ",")
        result = lead + "".join(sorted(c for c in set(every) if every.count(c) == 1))
    pairs, sizes = [], dict[str, Size]()
    for letters, x in zip(inputs, operands, strict=True):
        x = asarray(x)
        if len(letters) != type_of(x).rank or (letters and not letters.isalpha()):
            raise GraphError(f"einsum: {letters!r} does not name the axes of {type_of(x)}", hint="one letter per axis")
        for c, size in zip(letters, type_of(x).shape, strict=True):
            known = sizes.setdefault(c, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                shown = ", ".join(f"{term}: {type_of(o)}" for term, o in zip(inputs, operands, strict=True))
                raise ShapeError(f"einsum: {c!r} of {subscripts!r} has the sizes {known} and {size}", notes=[shown])
        pairs.append(_diagonal(letters, x))
    for c in result:
        if c not in terms or result.count(c) > 1:
            raise GraphError(f"einsum: {c!r} of the result is in no operand, or repeated in the result")
    while len(pairs) > 1:
        first, second, *rest = pairs
        needed = set(result).union(*(set(letters) for letters, _ in rest))
        pairs = [_contract(first, second, needed), *rest]
    letters, x = pairs[0]
    summed = tuple(i for i, c in enumerate(letters) if c not in result)
    x = sum(x, summed) if summed else x
    left = [c for c in letters if c in result]
    return transpose(x, [left.index(c) for c in result]) if left != list(result) else x


def _name_ellipsis(
    subscripts: str, inputs: Sequence[str], operands: Sequence[Any]
) -> tuple[list[str], tuple[Any, ...], str]:
    """Replace `...` by letters, the same for axes that broadcast; returns terms, operands and all these letters.

    An operand that is broadcast along such an axis, because its size is 1, loses the axis.
    """
    unused = [c for c in string.ascii_letters if c not in subscripts]
    ranks = [type_of(x).rank - len(term.replace("...", "")) for term, x in zip(inputs, operands, strict=True)]
    for term, x, rank in zip(inputs, operands, ranks, strict=True):
        if term.count("...") > 1 or (rank < 0 and "..." in term):
            raise GraphError(f"einsum: {term!r} does not name the axes of {type_of(x)}", hint="one letter per axis")
    count = max(rank for term, rank in zip(inputs, ranks, strict=True) if "..." in term)
    lead = "".join(unused[:count])
    named = [term.replace("...", lead[count - rank :]) for term, rank in zip(inputs, ranks, strict=True)]
    wide = {
        c for term, x in zip(named, operands, strict=True)
        for c, size in zip(term, type_of(x).shape, strict=False) if c in lead and size != 1
    }  # fmt: skip
    terms, squeezed = [], []
    for term, x in zip(named, operands, strict=True):
        shape = type_of(x).shape
        single = tuple(i for i, c in enumerate(term) if c in wide and i < len(shape) and shape[i] == 1 and c in lead)
        terms.append("".join(c for i, c in enumerate(term) if i not in single))
        squeezed.append(squeeze(asarray(x), single) if single else x)
    return terms, tuple(squeezed), lead


def _diagonal(letters: str, x: Any) -> tuple[str, Any]:
    """Merge axes with the same letter into one: the diagonal."""
    for c in letters:
        while letters.count(c) > 1:
            i = letters.index(c)
            j = letters.index(c, i + 1)
            size = type_of(x).shape[i]
            same = equal(expand_dims(iota(size, "i32"), 1), expand_dims(iota(size, "i32"), 0))
            moved = moveaxis(moveaxis(x, j, type_of(x).rank - 1), i, type_of(x).rank - 2)
            x = sum(where(same, moved, zeros((), type_of(x).dtype)), -1)
            rest = "".join(d for n, d in enumerate(letters) if n not in (i, j))
            letters = rest + c
    return letters, x


def _contract(first: tuple[str, Any], second: tuple[str, Any], needed: set[str]) -> tuple[str, Any]:
    """Contract two operands: shared letters in `needed` are batch axes, the other shared letters are summed."""
    (la, a), (lb, b) = first, second
    for _ in range(2):  # sum out letters that only one operand has and nothing needs
        summed = tuple(i for i, c in enumerate(la) if c not in needed and c not in lb)
        a, la = (sum(a, summed), "".join(c for i, c in enumerate(la) if i not in summed)) if summed else (a, la)
        (la, a), (lb, b) = (lb, b), (la, a)
    batch = [c for c in la if c in lb and c in needed]
    inner = [c for c in la if c in lb and c not in needed]
    left, right = [c for c in la if c not in lb], [c for c in lb if c not in la]
    sizes = dict(zip(la, type_of(a).shape, strict=True)) | dict(zip(lb, type_of(b).shape, strict=True))

    def rows(letters: str, x: Any, order: Sequence[str], shape: Sequence[Size]) -> Any:
        return reshape(transpose(x, [letters.index(c) for c in order]), list(shape))

    count = [product(sizes[c] for c in group) for group in (left, inner, right)]
    lead = [sizes[c] for c in batch]
    x = rows(la, a, [*batch, *left, *inner], [*lead, count[0], count[1]])
    y = rows(lb, b, [*batch, *inner, *right], [*lead, count[1], count[2]])
    order = [*batch, *left, *right]
    return "".join(order), reshape(matmul(x, y), [sizes[c] for c in order])


def inner(a: Any, b: Any) -> Any:
    """Sum of products over the last axes of both; scalars multiply."""
    if not type_of(a).rank or not type_of(b).rank:
        return multiply(a, b)
    return tensordot(a, b, ((-1,), (-1,)))


def vdot(a: Any, b: Any) -> Any:
    """Sum of products of two flattened arrays."""
    return matmul(ravel(asarray(a)), ravel(asarray(b)))


@eager
def vecdot(a: Any, b: Any, axis: int = -1) -> Any:
    """Sum of products along one axis; the others broadcast."""
    return sum(asarray(a) * asarray(b), axis)


@eager
def kron(a: Any, b: Any) -> Any:
    """Kronecker product: each element of `a` times all of `b`."""
    rank = max(type_of(a).rank, type_of(b).rank)
    a, b = (reshape(asarray(x), (*(1,) * (rank - type_of(x).rank), *type_of(x).shape)) for x in (a, b))
    wide = reshape(a, [d for size in type_of(a).shape for d in (size, 1)])
    blocks = reshape(b, [d for size in type_of(b).shape for d in (1, size)])
    return reshape(wide * blocks, [m * n for m, n in zip(type_of(a).shape, type_of(b).shape, strict=True)])


@eager
def cross(a: Any, b: Any, axis: int = -1) -> Any:
    """Cross product of vectors with 3 components along an axis."""
    a, b = (moveaxis(asarray(x), axis, -1) for x in (a, b))
    for x in (a, b):
        if type_of(x).shape[-1] != 3:
            raise ShapeError(f"cross: vectors have 3 components, found {type_of(x).shape[-1]}")
    (a_next, a_last), (b_next, b_last) = ((roll(x, -1, -1), roll(x, 1, -1)) for x in (a, b))
    return moveaxis(a_next * b_last - a_last * b_next, -1, axis)


@eager
def matrix_power(x: Any, n: int) -> Any:
    """Power of square matrices, by repeated squaring; a negative one is a power of the inverse."""
    rows, columns = type_of(x).shape[-2:]
    if rows != columns or not isinstance(rows, int):
        raise ShapeError(f"matrix_power: takes square matrices of a static size, found {type_of(x)}")
    if n < 0:
        from rlx.functional.linalg import inv

        return matrix_power(inv(x), -n)
    if n == 0:
        return broadcast_to(np.eye(rows, dtype=type_of(x).dtype.numpy), type_of(x).shape)
    result, square = None, asarray(x)
    while n:
        if n % 2:
            result = square if result is None else matmul(result, square)
        n //= 2
        square = matmul(square, square) if n else square
    return result


def multi_dot(arrays: Sequence[Any]) -> Any:
    """Product of several matrices, in the order with the fewest operations; the ends may be vectors."""
    sizes: list[Any] = [type_of(x).shape[0] for x in arrays] + [type_of(arrays[-1]).shape[-1]]
    if type_of(arrays[0]).rank == 1:
        sizes[0] = 1
    if type_of(arrays[-1]).rank == 1:
        sizes[-1] = 1
    return _chain(arrays, sizes)


def _chain(arrays: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Multiply matrices of sizes[i] by sizes[i + 1] in the cheapest order."""

    @functools.cache
    def cheapest(first: int, last: int) -> tuple[int, int]:
        """Cost of the products of matrices first to last, and where the last product splits them."""
        if first == last:
            return 0, first
        costs = [
            (cheapest(first, i)[0] + cheapest(i + 1, last)[0] + sizes[first] * sizes[i + 1] * sizes[last + 1], i)
            for i in range(first, last)
        ]
        return min(costs)

    def multiplied(first: int, last: int) -> Any:
        if first == last:
            return asarray(arrays[first])
        split = cheapest(first, last)[1]
        return matmul(multiplied(first, split), multiplied(split + 1, last))

    return multiplied(0, len(arrays) - 1)
