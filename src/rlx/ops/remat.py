"""A barrier against CSE, for values that are recomputed to save memory."""

from __future__ import annotations

from rlx.ir.independence import never
from rlx.ir.registry import FUSED, VIEW, op
from rlx.types import TensorType


@op("barrier", independent=never, reference=lambda x: x, traits=[FUSED, VIEW])
def barrier(x: TensorType) -> TensorType:
    """Identity that blocks CSE: passes do not merge computations across it (JAX: `optimization_barrier`)."""
    return x
