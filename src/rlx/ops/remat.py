"""What keeps a computation from being joined with an equal one: values computed again, to save memory, need it."""

from __future__ import annotations

from rlx.ir.independence import never
from rlx.ir.registry import FUSED, VIEW, op
from rlx.types import TensorType


@op("barrier", independent=never, reference=lambda x: x, traits=[FUSED, VIEW])
def barrier(x: TensorType) -> TensorType:
    """`x`, which passes do not know to be `x`: what is computed from one is not taken for the other."""
    return x
