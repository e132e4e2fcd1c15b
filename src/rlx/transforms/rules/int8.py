"""Quantised rows of int8 matmuls: for inference, not for training."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Vmapped, batching, no_derivative

no_derivative("quantise_rows", why="it returns integers for integer matmuls; for training use fake_quantise")


@batching("quantise_rows")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return vmapped.graph.build("quantise_rows", [vmapped.operand(0)], {}).results
