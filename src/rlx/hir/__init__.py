"""HIR: blocks that models are made of, and their lowering to MIR. Importing it declares all blocks."""

from rlx.hir import blocks as blocks
from rlx.hir import heads as heads
from rlx.hir import layers as layers
from rlx.hir import recurrent as recurrent
