"""Random numbers: functions of integer keys, so they have zero gradient."""

from __future__ import annotations

from rlx.transforms.rule_tables import batching, zero_gradient
from rlx.transforms.vmap import by_scan

_OPS = ("random_bits", "random_uniform", "random_normal")
zero_gradient(*_OPS, why="its operand is a key of integers")
batching(*_OPS)(by_scan)
