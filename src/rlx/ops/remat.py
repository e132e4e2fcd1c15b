"""An optimization barrier, for values that are recomputed to save memory."""

from __future__ import annotations

from rlx.ir.independence import never
from rlx.ir.registry import FUSED, VIEW, op
from rlx.types import TensorType


@op("optimization_barrier", independent=never, reference=lambda x: x, traits=[FUSED, VIEW])
def optimization_barrier(x: TensorType) -> TensorType:
    """Identity that blocks CSE: passes do not merge computations across it (as in JAX)."""
    return x
