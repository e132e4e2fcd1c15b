"""Executables as they are stored: a layout, and where its machine code lies in the cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx.backends.cpu.program_layout import Layout


@dataclass(frozen=True, slots=True)
class CodeLocations:
    """Where machine code lies in the cache folder: the object of each routine, and that of the driver."""

    objects: Mapping[str, tuple[str, ...]]  # the routines of an object
    driver: str


@dataclass(frozen=True)
class Image:
    """What an executable is made from in another process."""

    layout: Layout
    homes: CodeLocations
