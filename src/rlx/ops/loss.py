"""Losses: cross-entropy from logits in one pass, and its gradient in another, without storing probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, KernelError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_DATA, f32, i32, op, sample
from rlx.types import TensorType, require_equal


def _check(where: str, logits: TensorType, labels: TensorType) -> None:
    if logits.rank == 0:
        raise ShapeError(f"{where}: logits need an axis of classes, found {logits}")
    if not logits.dtype.is_float:
        raise DTypeError(f"{where}: logits are floats, found {logits.dtype}")
    if not labels.dtype.is_integer:
        raise DTypeError(f"{where}: labels are integers, found {labels.dtype}", hint="cast with x.astype('i32')")
    _rows(where, "labels", labels, logits)


def _rows(where: str, name: str, operand: TensorType, logits: TensorType) -> None:
    wanted = f"{where}: {name} are {operand}, one for each row of {logits} is wanted"
    if operand.rank != logits.rank - 1:
        raise ShapeError(wanted)
    for have, want in zip(operand.shape, logits.shape, strict=False):
        require_equal(have, want, wanted)


def _parts(logits: Any, labels: Any, ignore_index: int) -> tuple[Any, Any, Any]:
    """Which rows count, their labels, and exp(logits - largest of the row)."""
    counts = labels != ignore_index
    at = np.where(counts, labels, 0).astype(np.int64)
    if (counts & ((at < 0) | (at >= logits.shape[-1]))).any():
        raise KernelError(f"cross_entropy: a label lies outside 0:{logits.shape[-1]}")
    top = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    return counts, at[..., None], logits - top


def _cross_entropy(logits: Any, labels: Any, *, ignore_index: int) -> Any:
    counts, at, shifted = _parts(logits, labels, ignore_index)
    if logits.shape[-1] == 0:
        return np.zeros(labels.shape, logits.dtype)
    loss = np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, at, -1)[..., 0]
    return np.where(counts, loss, 0)


@op(
    "cross_entropy", independent=never, reference=_cross_entropy, tolerance=2e-6, traits=[CHECKS_DATA],
    samples=[
        sample(f32(4, 7), i32(4, low=0, high=7)), sample(f32(2, 3, 130), i32(2, 3, low=0, high=130)),
        sample(f32(65), i32(low=0, high=65)), sample(f32(9, 5), i32(9, low=-1, high=5), ignore_index=-1),
    ],
)  # fmt: skip
def cross_entropy(logits: TensorType, labels: TensorType, *, ignore_index: int = -100) -> TensorType:
    """logsumexp(logits) - logits[label] per row of the last axis: the negative log-probability of the label.

    A row whose label is `ignore_index` has a loss of 0, which a plain mean counts:
    `np.mean(losses, where=rlx.not_equal(labels, -100))` is the mean of the others. Any other label outside the row is
    an error at run time. Narrow floats give f32.
    """
    _check("cross_entropy", logits, labels)
    return TensorType(logits.shape[:-1], logits.dtype.wide)


def _cross_entropy_grad(logits: Any, labels: Any, dy: Any, *, ignore_index: int) -> Any:
    counts, at, shifted = _parts(logits, labels, ignore_index)
    power = np.exp(shifted)
    odds = power / power.sum(-1, keepdims=True)
    hit = np.arange(logits.shape[-1]) == at
    return (odds - hit.astype(odds.dtype)) * np.where(counts, dy.astype(odds.dtype), 0)[..., None]


def _decompose_cross_entropy_grad(logits: Value, labels: Value, dy: Value, *, ignore_index: int) -> Value:
    g, classes = logits.graph, logits.shape[-1]
    wide = logits.astype(logits.dtype.wide)
    ones = g.one("expand", g.constant(1, "i64"), shape=(classes,))
    number = g.one("cumsum", ones, axis=0, exclusive=True)
    rows = labels.reshape(*labels.shape, 1)
    hit = rows.astype("i64").equal(number).astype(wide.dtype)
    share = g.one("where", labels.not_equal(ignore_index), dy.astype(wide.dtype), 0.0).reshape(*labels.shape, 1)
    return ((wide.softmax(axis=-1) - hit) * share).astype(logits.dtype)


@op(
    "cross_entropy_grad", independent=never,
    reference=_cross_entropy_grad, decompose=_decompose_cross_entropy_grad, tolerance=2e-6,
    traits=[CHECKS_DATA],
    samples=[
        sample(f32(4, 7), i32(4, low=0, high=7), f32(4)),
        sample(f32(2, 3, 130), i32(2, 3, low=0, high=130), f32(2, 3)),
        sample(f32(65), i32(low=0, high=65), f32()),
        sample(f32(9, 5), i32(9, low=-1, high=5), f32(9), ignore_index=-1),
    ],
)  # fmt: skip
def cross_entropy_grad(
    logits: TensorType, labels: TensorType, dy: TensorType, *, ignore_index: int = -100
) -> TensorType:
    """The gradient of `cross_entropy` for the logits: softmax(logits), minus 1 at the label, times dy of the row."""
    _check("cross_entropy_grad", logits, labels)
    _rows("cross_entropy_grad", "dy", dy, logits)
    if not dy.dtype.is_float:
        raise DTypeError(f"cross_entropy_grad: dy are floats, found {dy.dtype}")
    return logits
