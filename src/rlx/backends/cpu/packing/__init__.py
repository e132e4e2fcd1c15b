"""CPU operand layouts, by name: how the matmul kernel reads weights and 8-bit activations."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.packing.panels import FOUR, Panels, Quads
from rlx.backends.cpu.packing.quantised_activations import ActivationWords
from rlx.backends.cpu.packing.quantised_weights import Interleaved, has_panels
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import F32, I8, I32, U8, DType
from rlx.operand_layouts import Layout, WeightLayout
from rlx.ops.quantised_activations import INT8_DOT_TYPES
from rlx.types import TensorType

LAYOUTS: Mapping[str, type[Layout]] = {kind.name: kind for kind in (Panels, Quads, Interleaved, ActivationWords)}


def weight_layout(target: CpuTarget, x: DType, w: TensorType, rounded: bool) -> WeightLayout | None:
    """See `Target.layout`."""
    if w.dtype.is_packed:
        width, lanes = target.panel(F32.size), target.lanes(F32.size)
        integer = rounded and w.dtype.name in INT8_DOT_TYPES
        return Interleaved(w.dtype, width, lanes, integer) if has_panels(w.dtype) else None
    if w.dtype is I8:
        k = w.shape[-2]
        words = x is U8 and w.rank == 2 and isinstance(k, int) and k % FOUR == 0
        return Quads(target.panel(I32.size)) if words else None
    return Panels(target.panel(x.size))
