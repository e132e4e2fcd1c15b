"""Blocks of quantised weights as the matmul sees them: a layout names the loop kernels that read them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import LoopKernel
from rlx.operand_layouts import WeightLayout

if TYPE_CHECKING:
    from rlx.backends.cpu.targets import CpuTarget


@dataclass(frozen=True)
class Blocks:
    """The kernels that read packed weights on one target.

    With `tiles`, matmuls use integers: A is words of int8 activations, `unpack` splits weights into codes and scales,
    and tiles of up to `tile_rows` rows, smallest first, multiply them.
    """

    storage: DType
    unpack: LoopKernel
    unpacked_bytes: int  # bytes of one unpacked block of a column
    dots: tuple[LoopKernel, ...]  # for 1, 2, ... rows, without unpacking to memory
    few_rows: int  # up to this many rows are multiplied by `dots`, several at a time
    tiles: tuple[LoopKernel, ...] = ()
    tile_rows: int = 0  # of the tallest tile
    x_words: int = 0  # words per block of A

    @property
    def kernels(self) -> tuple[LoopKernel, ...]:
        return (self.unpack, *self.dots, *self.tiles)


class BlockLayout(WeightLayout):
    """A layout of packed blocks, which the matmul reads through the layout's own kernels."""

    @abstractmethod
    def blocks(self, target: CpuTarget) -> Blocks:
        """The kernels that read it."""
