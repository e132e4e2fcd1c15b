"""Targets of the CPU backend, for tests that compile for one or for all of them."""

from __future__ import annotations

from typing import Any

import rlx
from rlx.backends.base import backend
from rlx.target import Target

CPU = backend("cpu")
BY_NAME = CPU.known_targets()
AVX512, AVX2, BASELINE, NEON = (BY_NAME[name] for name in ("avx512", "avx2", "baseline", "neon"))
supported, host = CPU.targets, CPU.target


def best() -> Target:
    """The widest target that this machine runs."""
    return supported()[0]


def widths() -> list[Target]:
    """One target for each width of vectors: those of one width differ in dot products of bytes alone."""
    return list({t.vector_bytes: t for t in reversed(supported())}.values())[::-1]


def compiled(graph: rlx.Graph, place: str) -> Any:
    """The graph for a device other than the CPU, or for a target of the CPU."""
    return rlx.compile(graph, place) if place in ("reference", "toy") else rlx.compile(graph, target=place)
