"""Convolution and pooling over the last axes of [batch, channels, ...], as in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import BindError, DTypeError, GraphError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_SIZES, COMPOSED, f32, op, sample
from rlx.ops.recurrent import check_floats
from rlx.types import Size, TensorType, require_equal

Pair = tuple[int, int]
KINDS = ("max", "mean")


def pair(where: str, name: str, value: int | Pair, minimum: int) -> Pair:
    """One number for both axes, or one per axis."""
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < minimum for v in both):
        raise GraphError(f"{where}: {name} is {value!r}, expected one or two integers from {minimum}")
    return both


def span(kernel: int, dilation: int) -> int:
    """Extent of a dilated kernel along an axis."""
    return dilation * (kernel - 1) + 1


def output_size(where: str, size: Size, kernel: int, stride: int, padding: int, dilation: int = 1) -> Size:
    """Number of positions of a kernel along an axis."""
    room = size + (2 * padding - span(kernel, dilation))
    if isinstance(room, int) and room < 0:
        raise ShapeError(f"{where}: a kernel of {span(kernel, dilation)} does not fit {size} + 2 · {padding}")
    return room // stride + 1


def windows(x: Any, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, fill: float) -> Any:
    """[batch, channels, out_y, out_x, kernel_y, kernel_x]: the window of each output."""
    sides = [(0, 0), (0, 0), *((p, p) for p in padding)]
    padded = np.pad(x, sides, constant_values=fill)
    spans = tuple(span(k, d) for k, d in zip(kernel, dilation, strict=True))
    for wanted, size, side in zip(spans, x.shape[2:], padding, strict=True):
        if wanted > size + 2 * side:  # sizes known only at run time
            raise BindError(f"conv: a kernel of {wanted} does not fit {size} + 2 · {side}")
    views = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    return views[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def _conv2d(x: Any, weight: Any, bias: Any = None, *, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    step, sides, spread = ((v, v) if isinstance(v, int) else v for v in (stride, padding, dilation))
    seen = windows(x, weight.shape[2:], step, sides, spread, fill=0.0)
    batch, _, height, width = seen.shape[:4]
    split = seen.reshape(batch, groups, x.shape[1] // groups, *seen.shape[2:])
    kernels = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    y = np.einsum("bgiyxrs,goirs->bgoyx", split, kernels).reshape(batch, weight.shape[0], height, width)
    return y if bias is None else y + bias[:, None, None]


@op(
    "conv2d", independent=never, reference=_conv2d, tolerance=1e-5, traits=[CHECKS_SIZES],
    samples=[
        sample(f32(2, 3, 7, 8), f32(4, 3, 3, 2), f32(4)),
        sample(f32(1, 4, 6, 9), f32(6, 2, 3, 3), padding=1, groups=2),
        sample(f32(1, 2, 11, 20), f32(3, 2, 3, 3), stride=(2, 3), padding=(1, 2), dilation=(2, 1)),
        sample(f32(2, 3, 8, 12), f32(5, 3, 4, 4), f32(5), stride=4),
        sample(f32(1, 3, 9, 13), f32(5, 3, 4, 4), stride=4),
    ],
)  # fmt: skip
def conv2d(
    x: TensorType, weight: TensorType, bias: TensorType | None = None, *, stride: int | Pair = 1,
    padding: int | Pair = 0, dilation: int | Pair = 1, groups: int = 1,
) -> TensorType:  # fmt: skip
    """Cross-correlation of x [batch, channels, height, width] with weight [out, channels / groups, kernel_y, kernel_x].

    `stride`, `padding` (zeros on both sides) and `dilation` are one number, or one per axis.
    """
    if x.rank != 4 or weight.rank != 4:
        raise ShapeError(f"conv2d: x is [batch, channels, height, width], weight [out, in, y, x], found {x}, {weight}")
    check_floats("conv2d", x, weight, bias)
    out, inside, *kernel = weight.shape
    fixed = [k for k in (out, inside, *kernel) if isinstance(k, int)]
    if len(fixed) < 4 or groups < 1 or fixed[0] % groups:
        raise ShapeError(f"conv2d: weight {weight} cannot be split into {groups} groups of fixed sizes")
    if 0 in kernel:
        raise ShapeError(f"conv2d: the kernels of weight {weight} have no elements")
    require_equal(x.shape[1], inside * groups, f"conv2d: x {x} has {x.shape[1]} channels, expected {inside} · {groups}")
    if bias is not None and bias.shape != (out,):
        raise ShapeError(f"conv2d: bias is {bias}, expected [{out}]")
    settings = zip(
        x.shape[2:], fixed[2:], pair("conv2d", "stride", stride, 1), pair("conv2d", "padding", padding, 0),
        pair("conv2d", "dilation", dilation, 1), strict=True,
    )  # fmt: skip
    return x.with_shape(x.shape[0], out, *(output_size("conv2d", *axis) for axis in settings))


def _pool2d(x: Any, *, kind: str, kernel: Any, stride: Any, padding: Any) -> Any:
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    step = size if stride is None else (stride, stride) if isinstance(stride, int) else stride
    sides = (padding, padding) if isinstance(padding, int) else padding
    seen = windows(x, size, step, sides, (1, 1), fill=-np.inf if kind == "max" else 0.0)
    return seen.max((-2, -1)) if kind == "max" else seen.mean((-2, -1))


@op(
    "pool2d", independent=never, reference=_pool2d, tolerance=1e-6, traits=[CHECKS_SIZES],
    samples=[
        sample(f32(2, 3, 7, 8), kind="max", kernel=2), sample(f32(1, 2, 9, 20), kind="mean", kernel=(3, 2), stride=2),
        sample(f32(1, 2, 6, 7), kind="max", kernel=3, stride=1, padding=1),
        sample(f32(1, 2, 6, 7), kind="mean", kernel=3, stride=(2, 1), padding=(1, 1)),
    ],
)  # fmt: skip
def pool2d(
    x: TensorType, *, kind: str, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0
) -> TensorType:
    """The largest (`kind` max) or mean number of each window of x [batch, channels, height, width].

    `stride` defaults to the kernel's size. Padding counts as zeros in a mean and never as the largest.
    """
    if x.rank != 4:
        raise ShapeError(f"pool2d: x is [batch, channels, height, width], found {x}")
    size = pair("pool2d", "kernel", kernel, 1)
    step = size if stride is None else pair("pool2d", "stride", stride, 1)
    return _pool_type("pool2d", x, kind, size, step, pair("pool2d", "padding", padding, 0))


def _pool_type(where: str, x: TensorType, kind: str, *settings: Sequence[int]) -> TensorType:
    """The result type of pooling; kernel, stride and padding have one number per axis after the channels."""
    if kind not in KINDS:
        raise GraphError(f"{where}: kind {kind!r} is not one of {', '.join(KINDS)}")
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x.dtype}")
    kernel, _, padding = settings
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        raise ShapeError(f"{where}: padding {padding} is more than half the kernel {kernel}")
    axes = zip(x.shape[2:], *settings, strict=True)
    return x.with_shape(*x.shape[:2], *(output_size(where, *axis) for axis in axes))


def _row_settings(stride: int, padding: int, dilation: int) -> dict[str, Pair]:
    """1D settings for an image with one row."""
    return {"stride": (1, stride), "padding": (0, padding), "dilation": (1, dilation)}


def _conv1d(x: Any, weight: Any, bias: Any = None, *, stride: int, padding: int, dilation: int, groups: int) -> Any:
    settings = _row_settings(stride, padding, dilation)
    return _conv2d(x[:, :, None], weight[:, :, None], bias, groups=groups, **settings)[:, :, 0]


def _decompose_conv1d(
    x: Value, weight: Value, bias: Value | None, *, stride: int, padding: int, dilation: int, groups: int
) -> Value:
    """A convolution over images with one row."""
    row, taps = (v.reshape(v.shape[0], v.shape[1], 1, v.shape[2]) for v in (x, weight))
    y = x.graph.one("conv2d", row, taps, bias, groups=groups, **_row_settings(stride, padding, dilation))
    return y.reshape(y.shape[0], y.shape[1], y.shape[3])


@op(
    "conv1d", independent=never, reference=_conv1d, decompose=_decompose_conv1d, traits=[COMPOSED], tolerance=1e-5,
    samples=[
        sample(f32(2, 3, 20), f32(4, 3, 5), f32(4), padding=2), sample(f32(1, 4, 33), f32(6, 2, 3), groups=2, stride=2),
        sample(f32(1, 2, 17), f32(3, 2, 3), dilation=2),
    ],
)  # fmt: skip
def conv1d(
    x: TensorType, weight: TensorType, bias: TensorType | None = None, *, stride: int = 1, padding: int = 0,
    dilation: int = 1, groups: int = 1,
) -> TensorType:  # fmt: skip
    """Cross-correlation of x [batch, channels, length] with weight [out, channels / groups, kernel]."""
    if x.rank != 3 or weight.rank != 3:
        raise ShapeError(f"conv1d: x is [batch, channels, length], weight [out, in, kernel], found {x}, {weight}")
    rows = [t.with_shape(*t.shape[:2], 1, t.shape[2]) for t in (x, weight)]
    for name, value, minimum in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if not isinstance(value, int):
            raise GraphError(f"conv1d: {name} is {value!r}, expected an integer from {minimum}")
    y = conv2d.rule(rows[0], rows[1], bias, groups=groups, **_row_settings(stride, padding, dilation))
    assert isinstance(y, TensorType)
    return y.with_shape(y.shape[0], y.shape[1], y.shape[3])


def _pool1d(x: Any, *, kind: str, kernel: int, stride: int | None, padding: int) -> Any:
    return _pool2d(x[:, :, None], kind=kind, **_row_window(kernel, stride, padding))[:, :, 0]


def _row_window(kernel: int, stride: int | None, padding: int) -> dict[str, Pair]:
    """A 1D window for an image with one row."""
    return {"kernel": (1, kernel), "stride": (1, kernel if stride is None else stride), "padding": (0, padding)}


def _decompose_pool1d(x: Value, *, kind: str, kernel: int, stride: int | None, padding: int) -> Value:
    """Pooling of images with one row."""
    row = x.reshape(x.shape[0], x.shape[1], 1, x.shape[2])
    y = x.graph.one("pool2d", row, kind=kind, **_row_window(kernel, stride, padding))
    return y.reshape(y.shape[0], y.shape[1], y.shape[3])


@op(
    "pool1d", independent=never, reference=_pool1d, decompose=_decompose_pool1d, traits=[COMPOSED], tolerance=1e-6,
    samples=[
        sample(f32(2, 3, 20), kind="max", kernel=2), sample(f32(1, 4, 33), kind="mean", kernel=3, stride=2, padding=1),
        sample(f32(1, 2, 17), kind="max", kernel=5, stride=1, padding=2),
    ],
)  # fmt: skip
def pool1d(x: TensorType, *, kind: str, kernel: int, stride: int | None = None, padding: int = 0) -> TensorType:
    """The largest (`kind` max) or mean number of each window of x [batch, channels, length], as `pool2d` does it."""
    if x.rank != 3:
        raise ShapeError(f"pool1d: x is [batch, channels, length], found {x}")
    window = {"kernel": (kernel, 1), "stride": (kernel if stride is None else stride, 1), "padding": (padding, 0)}
    for name, (value, minimum) in window.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise GraphError(f"pool1d: {name} is {value!r}, expected an integer from {minimum}")
    return _pool_type("pool1d", x, kind, (kernel,), (kernel if stride is None else stride,), (padding,))
