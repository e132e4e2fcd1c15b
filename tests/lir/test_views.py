"""Views against NumPy's own stride arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from rlx.dtypes import F32
from rlx.lir.views import View, collapse
from rlx.types import Size, as_shape, concrete, contiguous_strides, evaluate, product

Array = np.ndarray[Any, Any]
shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


def contiguous(shape: tuple[Size, ...]) -> View:
    return View("b", F32, shape, contiguous_strides(shape))


def seen(view: View, buffer: Array, binding: dict[str, int] | None = None) -> Array:
    """What the view shows of a flat buffer."""
    sizes = binding or {}
    shape, strides = concrete(view.shape, sizes), concrete(view.strides, sizes)
    if 0 in shape:
        return np.empty(shape, buffer.dtype)
    offset = evaluate(view.offset, sizes)
    return np.lib.stride_tricks.as_strided(buffer[offset:], shape, [s * buffer.itemsize for s in strides])


def factorisations(draw: Any, total: int) -> tuple[int, ...]:
    """A random shape of as many elements."""
    if total == 0:
        return (draw(st.integers(0, 3)), 0, draw(st.integers(1, 3)))
    shape: list[int] = []
    while total > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0])))
        total //= shape[-1]
    return (*shape, total)


def step(draw: Any, view: View, array: Array) -> tuple[View | None, Array]:
    """One random view op on both sides."""
    match draw(st.sampled_from(["transpose", "slice", "expand", "reshape", "reshape"])):
        case "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            return view.transpose(axes), array.transpose(axes)
        case "slice":
            start = [draw(st.integers(0, d)) for d in array.shape]
            stop = [draw(st.integers(a, d)) for a, d in zip(start, array.shape, strict=True)]
            steps = [draw(st.integers(1, 3)) for _ in array.shape]
            cut = array[tuple(map(slice, start, stop, steps))]
            return view.slice(start, stop, steps, cut.shape), cut
        case "expand":
            shape = (draw(st.integers(0, 3)), *(draw(st.integers(0, 3)) if d == 1 else d for d in array.shape))
            return view.expand(shape), np.broadcast_to(array, shape)
        case _:
            shape = factorisations(draw, array.size)
            reshaped = view.reshape(shape)
            if reshaped is None:
                with pytest.raises(ValueError, match="copy"):
                    np.reshape(array, shape, copy=False)
            return reshaped, array.reshape(shape)


@given(shapes, st.data())
@examples(400)
def test_views_of_views_show_what_numpy_shows(shape: tuple[int, ...], data: Any) -> None:
    buffer = np.arange(int(np.prod(shape)) + 1, dtype=np.float32)
    array = buffer[:-1].reshape(shape)
    view: View | None = contiguous(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        assert view is not None
        view, array = step(data.draw, view, array)
        if view is None:
            return
        assert view.shape == array.shape
        np.testing.assert_array_equal(seen(view, buffer), array)
        if array.size:
            assert view.is_contiguous() == array.flags.c_contiguous


@given(shapes)
@examples()
def test_a_contiguous_view_takes_any_shape(shape: tuple[int, ...]) -> None:
    assert contiguous(shape).is_contiguous()
    flat = contiguous(shape).reshape((int(np.prod(shape)),))
    assert flat is not None and flat.strides == (1,)


SYMBOLIC = [
    (("b", "s", 12), [("reshape", ("b", "s", 3, 4)), ("transpose", (0, 2, 1, 3)), ("reshape", ("3*b", "s", 4))], False),
    (("b", "s", 12), [("reshape", ("b*s", 12)), ("reshape", ("b", "s*12")), ("reshape", ("b*s*12",))], True),
    (("b", "s", 12), [("slice", (0, 0, 4), ("b", "s", 8)), ("reshape", ("b*s", 4))], True),
    (("b", "s", 12), [("slice", (0, 0, 4), ("b", "s", 8)), ("reshape", ("4*b*s",))], False),
    (
        ("b", "s", 12),
        [("slice", (0, 0, 4), ("b", "s", 8)), ("reshape", ("b", "s", 2, 2)), ("reshape", ("b*s", 2, 2))],
        True,
    ),
    (("b", "s", 12), [("slice", (0, "s - 1", 0), ("b", "s", 12)), ("reshape", ("b", 12))], True),
    (("b", 1, 12), [("expand", ("b", "s", 12)), ("reshape", ("b*s", 12))], False),
    (("b", 1, 12), [("expand", ("b", "s", 12)), ("reshape", ("b", "s", 3, 4))], True),
    (("b + s", 4), [("reshape", ("4*b + 4*s",)), ("reshape", ("2*b + 2*s", 2))], True),
]


@pytest.mark.parametrize(("start", "ops", "works"), SYMBOLIC)
def test_run_time_sizes_reshape_where_strides_can_say_it(start: Any, ops: list[Any], works: bool) -> None:
    binding = {"b": 2, "s": 3}
    view: View | None = contiguous(as_shape(start))
    assert view is not None
    array = np.arange(evaluate(product(view.shape), binding), dtype=np.float32).reshape(concrete(view.shape, binding))
    buffer = array.reshape(-1)
    for name, *args in ops:
        assert view is not None
        match name:
            case "reshape":
                shape = as_shape(args[0])
                view, array = view.reshape(shape), array.reshape(concrete(shape, binding))
            case "transpose":
                view, array = view.transpose(args[0]), array.transpose(args[0])
            case "expand":
                shape = as_shape(args[0])
                view, array = view.expand(shape), np.broadcast_to(array, concrete(shape, binding))
            case _:
                low, high = as_shape(args[0]), as_shape(args[1])
                shape = tuple(b - a for a, b in zip(low, high, strict=True))
                view = view.slice(low, high, (1,) * len(low), shape)
                array = array[tuple(map(slice, concrete(low, binding), concrete(high, binding)))]
    assert (view is not None) == works
    if view is not None:
        np.testing.assert_array_equal(seen(view, buffer, binding), array)


def test_views_read_well() -> None:
    v = contiguous((4, 6))
    assert str(v) == "b"
    assert str(v.shifted(12)) == "b+12"
    assert str(v.transpose((1, 0))) == "b<1, 6>"
    assert str(v.slice((1, 2), (3, 4), (1, 1), (2, 2))) == "b+8<6, 1>"
    assert v.rank == 2


# -- collapse ---------------------------------------------------------------------------------------------------------
def offsets(shape: Any, strides: Any) -> list[int]:
    """Every offset of a loop nest, last axis fastest."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]


@given(shapes, st.integers(1, 3), st.data())
@examples(300)
def test_collapsed_loops_walk_the_same_elements(shape: tuple[int, ...], operands: int, data: Any) -> None:
    assume(np.prod(shape) <= 64)
    options = [contiguous_strides(shape), (0,) * len(shape)]
    strides = []
    for _ in range(operands):
        plain = data.draw(st.sampled_from(options))
        strides.append([s if data.draw(st.integers(0, 3)) else data.draw(st.integers(0, 5)) for s in plain])
    keep = data.draw(st.sets(st.integers(0, len(shape) - 1), max_size=2))
    sizes, merged, axes = collapse(shape, strides, keep=keep)
    for before, after in zip(strides, merged, strict=True):
        assert offsets(shape, before) == offsets(sizes, after)
    assert sorted(itertools.chain(*axes)) == [a for a, d in enumerate(shape) if d != 1 or a in keep]
    assert all(len(group) == 1 for group in axes if set(group) & keep)
    for i in range(len(sizes) - 1):
        if not (set(axes[i]) | set(axes[i + 1])) & keep:
            assert any(m[i] != m[i + 1] * sizes[i + 1] for m in merged), "neighbours that could be one are one"


def test_collapse_sees_through_run_time_sizes() -> None:
    shape = as_shape(("b", "s", 8))
    sizes, (a, b), axes = collapse(shape, [contiguous_strides(shape), (0, 0, 1)])
    assert (sizes, a, b, axes) == ([shape[0] * shape[1], 8], [8, 1], [0, 1], [[0, 1], [2]])
