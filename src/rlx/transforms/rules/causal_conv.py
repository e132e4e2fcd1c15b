"""Causal convolution: differentiated as a sum over its taps."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import slice_axis
from rlx.transforms.rule_tables import Vmapped, batching, no_derivative, parts
from rlx.transforms.rules.recurrent import batch_recurrence


@parts("depthwise_conv1d_causal")
def _(x: Value, weight: Value, left_pad: Value, _: None, *, kernel_size: int) -> Value:
    padded = x.graph.one("concatenate", left_pad, x, axis=1)
    taps = weight.reshape(weight.shape[0], kernel_size)
    total: Value | None = None
    for k in range(kernel_size):
        term = slice_axis(padded, 1, k, k + x.shape[1]) * taps[:, k]
        total = term if total is None else total + term
    assert total is not None
    return total


no_derivative(
    "depthwise_conv1d_causal_carry",
    why="its state is updated in place during generation; for training build the graph with depthwise_conv1d_causal",
)


@batching("depthwise_conv1d_causal", "depthwise_conv1d_causal_carry")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped, 1)
