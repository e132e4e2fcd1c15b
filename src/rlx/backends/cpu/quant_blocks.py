"""Blocks of quantised weights, as far as the matmul knows them: a layout names the loop kernels that read them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.dtypes import DType
from rlx.lir.loops import LoopKernel
from rlx.operand_layouts import WeightLayout

if TYPE_CHECKING:
    from rlx.backends.cpu.targets import CpuTarget


@dataclass(frozen=True)
class Blocks:
    """The kernels that read packed weights for one target.

    With `tiles`, products are of integers: A is words of activations, `unpack` splits weights into codes and scales,
    and tiles of up to `tile_rows` rows, the lowest first, multiply what it leaves.
    """

    storage: DType
    unpack: LoopKernel
    unpacked_bytes: int  # of a block of one column after that
    dots: tuple[LoopKernel, ...]  # for 1, 2, ... rows, without unpacking to memory
    tiles: tuple[LoopKernel, ...] = ()
    tile_rows: int = 0  # of the highest tile
    x_words: int = 0  # that a block of A is

    @property
    def kernels(self) -> tuple[LoopKernel, ...]:
        return (self.unpack, *self.dots, *self.tiles)


class BlockLayout(WeightLayout):
    """A layout of packed blocks, which the matmul reads through kernels of its own."""

    @abstractmethod
    def blocks(self, target: CpuTarget) -> Blocks:
        """The kernels that read it."""
