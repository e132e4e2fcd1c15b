"""Random numbers: made of keys, which are integers."""

from __future__ import annotations

from rlx.transforms.batch import by_scan
from rlx.transforms.tables import batching, flat_everywhere

_OPS = ("random_bits", "random_uniform", "random_normal")
flat_everywhere(*_OPS, why="its operand is a key of integers")
batching(*_OPS)(by_scan)
