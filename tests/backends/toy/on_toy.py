"""Runs compiled graphs and brings their results to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import rlx


def run(compiled: rlx.CompiledGraph, inputs: Mapping[str, Any] | None = None) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(output) for output in compiled.run(inputs or {})]
