"""Routines: the functions that kernels consist of, named by content so that equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from rlx.backends.cpu.builder import Module
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.lir.views import View
    from rlx.types import Size

# Arguments that the driver passes to a routine: its argument block, the units [lo, hi), and the thread's scratch.
ENTRY_ARGUMENTS = (("ptr", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr", "scratch"))
# The same for routines whose two pointers do not alias.
NOALIAS_ENTRY_ARGUMENTS = tuple((f"{kind} noalias" if kind == "ptr" else kind, name) for kind, name in ENTRY_ARGUMENTS)
HEADER_BYTES = 64  # at the start of scratch, owned by the driver


@dataclass(frozen=True, slots=True)
class Routine:
    """One function of an object file; `symbol` identifies its content among all routines of a target."""

    symbol: str
    emit: Callable[[Module], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """The routine the driver calls for a kernel, and the routines whose addresses fill words of its argument block."""

    routine: Routine
    tables: Mapping[str, tuple[Routine, ...]] = field(default_factory=dict)

    def routines(self) -> tuple[Routine, ...]:
        """All routines that must be compiled before the kernel can run."""
        return (self.routine, *(r for table in self.tables.values() for r in table))


@dataclass(frozen=True, slots=True)
class Call:
    """A launch as the driver runs it: the argument block, by name and in order, and the units that threads share.

    A word without a value is the address of one of the entry's tables, or 0 for an omitted operand.
    """

    words: Mapping[str, View | Size | None]
    units: Size
