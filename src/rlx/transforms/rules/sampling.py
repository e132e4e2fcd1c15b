"""Sampling: a batch adds rows. It has no derivative, not even zero; differentiate log-probabilities instead."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import flat
from rlx.transforms.rule_tables import Vmapped, batching, no_derivative

no_derivative("sample_tokens", why="it picks integers; for training use cross_entropy of logits and tokens")


@batching("sample_tokens")
def _(vmapped: Vmapped) -> Sequence[Value]:
    rows = [None if o is None else flat(vmapped.full(i), 2) for i, o in enumerate(vmapped.operands)]
    shape = vmapped.full(0).shape[:2]
    return [result.reshape(shape) for result in vmapped.graph.build("sample_tokens", rows, {}).results]
