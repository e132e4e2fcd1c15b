"""Stored executables: a layout, and where its machine code is in the cache folder."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.program_layout import Layout
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class CodeLocations:
    """Cache keys of machine code: the object of each routine, and that of the driver."""

    objects: Mapping[str, tuple[str, ...]]  # the routines in each object
    driver: str


@dataclass(frozen=True)
class Image:
    """The record from which another process rebuilds an executable."""

    layout: Layout
    locations: CodeLocations
