"""Targets: descriptions of machines that passes and code generators read as data. Backends define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.dtypes import F32, DType
from rlx.fast_dataclass import dataclass
from rlx.kv_layout import KvLayout
from rlx.operand_layouts import WeightLayout
from rlx.types import TensorType


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of machine, as far as passes and portable loop forms need to know it."""

    name: str
    device: str  # the backend that generates code for it
    prepacks: bool = False  # matmuls need weights in target-specific layouts, packed when weights are bound
    reads_rows: bool = False  # matmuls want 16-bit weights contiguous along k, transposed when weights are bound
    overlaps_launches: bool = False  # launches that do not depend on each other run at the same time
    prompt_tokens: int = 0  # prompt tokens per call from which on more are hardly faster; 0: the usual number

    def native(self, dtype: DType) -> DType:
        """The type in which arithmetic on `dtype` is done: floats below 32 bits are widened on load."""
        return F32 if dtype.is_float and dtype.size < F32.size else dtype

    def multiplied(self, dtype: DType) -> DType:
        """The type in which matmuls with results of `dtype` read their operands. Sums are wide in any case."""
        return self.native(dtype)

    def layout(self, x: DType, w: TensorType, *, rounded: bool = False) -> WeightLayout | None:
        """The layout of weights for matmuls with x: numbers [..., k, n], or packed rows [..., n, k]. None: unchanged.

        `rounded` says that x is quantised to 8 bits with a scale per block, as by `round_blocks`.
        """
        return None

    @property
    def kv_layout(self) -> KvLayout:
        """The KV-cache layout that attention reads directly."""
        return KvLayout()

    @property
    def runs_behind(self) -> bool:
        """Whether `Executable.enqueue` returns while the device still works, so that a caller may look ahead."""
        return False

    def padded(self, tokens: int) -> int:
        """The number of tokens per row to which calls are padded, so that few sizes occur; CPUs take any."""
        return tokens

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that replace the default ones on this target."""
        return {}
