"""CUDA loop forms that replace portable ones: launches of its matmul and attention kernels."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.lir.schedule import LoopForm

FORMS: Mapping[str, LoopForm] = {}
