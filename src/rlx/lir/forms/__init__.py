"""Portable loop forms: lower each op to kernel launches for any target, one file per op group.

The scheduler imports a group on first use, since most programs need few; `load_all` imports all of them.
"""

from __future__ import annotations

import importlib

GROUPS = (
    "attention", "causal_conv", "control", "conv", "custom", "elementwise", "fused", "gated_delta_net",
    "gated_linear_attention", "grouped", "index", "int8", "kv_cache", "linalg", "linear", "loss", "norm", "quant",
    "quantised_activations", "random", "reduce", "remat", "rope", "sampling", "search", "selective_scan", "shape",
    "softmax", "update",
)  # fmt: skip


def load_all() -> None:
    """Register all loop forms."""
    for group in GROUPS:
        importlib.import_module(f"{__name__}.{group}")
