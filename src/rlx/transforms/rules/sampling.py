"""Sampling: more rows are a batch. Tokens are integers; log-probabilities have a derivative by other ops."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import flat
from rlx.transforms.tables import Lanes, batching, no_derivative

no_derivative("sample_tokens", why="it picks integers; cross_entropy of the logits and the tokens has a derivative")


@batching("sample_tokens")
def _(lanes: Lanes) -> Sequence[Value]:
    rows = [None if o is None else flat(lanes.full(i), 2) for i, o in enumerate(lanes.operands)]
    shape = lanes.full(0).shape[:2]
    return [result.reshape(shape) for result in lanes.graph.build("sample_tokens", rows, {}).results]
