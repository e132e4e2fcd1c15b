"""Convolution and pooling over the last axes of [batch, channels, ...], as PyTorch defines them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.registry import f32, op, sample
from rlx.types import Size, TensorType, require_equal

Pair = tuple[int, int]
KINDS = ("max", "mean")


def pair(where: str, name: str, value: int | Pair, least: int) -> Pair:
    """One number for both axes, or one for each."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or any(not isinstance(v, int) or v < least for v in both):
        raise GraphError(f"{where}: {name} is {value!r}, wanted one or two integers from {least}")
    return both


def output_size(where: str, size: Size, kernel: int, stride: int, padding: int, dilation: int = 1) -> Size:
    """How often a kernel fits into an axis."""
    room = size + (2 * padding - dilation * (kernel - 1) - 1)
    if isinstance(room, int) and room < 0:
        raise ShapeError(f"{where}: a kernel of {dilation * (kernel - 1) + 1} does not fit {size} + 2 · {padding}")
    return room // stride + 1


def windows(x: Any, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, fill: float) -> Any:
    """[batch, channels, out_y, out_x, kernel_y, kernel_x]: what each output looks at."""
    sides = [(0, 0), (0, 0), *((p, p) for p in padding)]
    padded = np.pad(x, sides, constant_values=fill)
    spans = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    found = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    return found[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def _conv2d(x: Any, weight: Any, bias: Any = None, *, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    step, sides, spread = ((v, v) if isinstance(v, int) else v for v in (stride, padding, dilation))
    seen = windows(x, weight.shape[2:], step, sides, spread, fill=0.0)
    batch, _, height, width = seen.shape[:4]
    split = seen.reshape(batch, groups, -1, *seen.shape[2:])
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    y = np.einsum("bgiyxrs,goirs->bgoyx", split, kernels).reshape(batch, weight.shape[0], height, width)
    return y if bias is None else y + bias[:, None, None]


@op(
    "conv2d", reference=_conv2d, tolerance=1e-5,
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

    `stride`, `padding` (zeros on both sides) and `dilation` are one number, or one for each axis.
    """
    if x.rank != 4 or weight.rank != 4:
        raise ShapeError(f"conv2d: x is [batch, channels, height, width], weight [out, in, y, x], found {x}, {weight}")
    given = [t for t in (x, weight, bias) if t is not None]
    if any(not t.dtype.is_float or t.dtype is not x.dtype for t in given):
        raise DTypeError(f"conv2d: takes floats of one type, found {', '.join(str(t.dtype) for t in given)}")
    out, inside, *kernel = weight.shape
    fixed = [k for k in (out, inside, *kernel) if isinstance(k, int)]
    if len(fixed) < 4 or groups < 1 or fixed[0] % groups:
        raise ShapeError(f"conv2d: weight {weight} cannot be split into {groups} groups of fixed sizes")
    require_equal(x.shape[1], inside * groups, f"conv2d: x {x} has {x.shape[1]} channels, wanted {inside} · {groups}")
    if bias is not None and bias.shape != (out,):
        raise ShapeError(f"conv2d: bias is {bias}, wanted [{out}]")
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
    "pool2d", reference=_pool2d, tolerance=1e-6,
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

    `stride` is the kernel's size unless given. Padding counts as zeros in a mean and never as the largest.
    """
    if kind not in KINDS:
        raise GraphError(f"pool2d: kind {kind!r} is not one of {', '.join(KINDS)}")
    if x.rank != 4:
        raise ShapeError(f"pool2d: x is [batch, channels, height, width], found {x}")
    if not x.dtype.is_float:
        raise DTypeError(f"pool2d: takes floats, found {x.dtype}")
    size = pair("pool2d", "kernel", kernel, 1)
    step = size if stride is None else pair("pool2d", "stride", stride, 1)
    sides = pair("pool2d", "padding", padding, 0)
    if any(2 * p > k for p, k in zip(sides, size, strict=True)):
        raise ShapeError(f"pool2d: padding {sides} is more than half the kernel {size}")
    settings = zip(x.shape[2:], size, step, sides, strict=True)
    return x.with_shape(*x.shape[:2], *(output_size("pool2d", *axis) for axis in settings))
