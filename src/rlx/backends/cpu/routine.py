"""Routines: the functions that kernels are made of, named by content so that equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlx.backends.cpu.builder import Module


@dataclass(frozen=True, slots=True)
class Routine:
    """One function of an object file; `symbol` tells its content apart from all others of the same target."""

    symbol: str
    emit: Callable[[Module], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """What the driver calls for a kernel, and the routines whose addresses fill its address words."""

    routine: Routine
    tables: Mapping[str, tuple[Routine, ...]] = field(default_factory=dict)

    def routines(self) -> tuple[Routine, ...]:
        """All routines that must be compiled before the kernel can run."""
        return (self.routine, *(r for table in self.tables.values() for r in table))
