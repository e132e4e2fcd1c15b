"""Portable forms: how each op becomes launches of kernels on any target, a file per group of ops.

The scheduler imports a group when it meets an op of it, since most programs need few; `load_all` imports every one.
"""

from __future__ import annotations

import importlib

GROUPS = (
    "attention", "causal_conv", "control", "conv", "custom", "elementwise", "fused", "gated_delta_net",
    "gated_linear_attention", "grouped", "index", "int8", "kv_cache", "linear", "loss", "norm", "quant",
    "quantised_activations", "random", "reduce", "remat", "rope", "sampling", "selective_scan", "shape", "softmax",
    "update",
)  # fmt: skip


def load_all() -> None:
    """Fill the table of loop forms."""
    for group in GROUPS:
        importlib.import_module(f"{__name__}.{group}")
