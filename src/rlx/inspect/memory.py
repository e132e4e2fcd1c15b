"""The memory report: every buffer of a compiled graph at given sizes, its owner and its lifetime."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.fast_dataclass import dataclass
from rlx.lir.memory import Plan, lifetimes
from rlx.lir.program import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Program
from rlx.notebook import box, fold, note, table
from rlx.types import TensorType, concrete, evaluate

BAR = 32  # columns of a lifetime bar
OWNERS = {
    INPUT: "the caller's",
    OUTPUT: "the caller's",
    WEIGHT: "kept for all runs",
    CONST: "part of the program",
    ARENA: "reused within a run",
}


@dataclass(frozen=True, slots=True)
class BufferMemory:
    """One buffer. Arena buffers have an offset, and a first and last phase (between barriers) of their lifetime."""

    name: str
    kind: str
    type: str
    bytes: int
    offset: int | None = None
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """All memory of one run, in bytes. `str` of it is a table."""

    name: str
    sizes: Mapping[str, int]
    buffers: tuple[BufferMemory, ...]
    arena: int  # planned for the size class of these sizes
    bound: int  # maximum of live bytes, a lower bound of any plan
    unshared: int  # sum of all arena buffers
    scratch: int  # per thread
    phases: int

    def bytes(self, kind: str) -> int:
        """Total size of the buffers of a kind."""
        return sum(b.bytes for b in self.buffers if b.kind == kind)

    @property
    def saved(self) -> int:
        """Bytes saved by sharing memory."""
        return self.unshared - self.arena

    @property
    def _title(self) -> str:
        at = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        return f"memory of {self.name}" + (f" at {at}" if at else "")

    def __str__(self) -> str:
        lines = [self._title]
        for kind, owner in OWNERS.items():
            count = sum(b.kind == kind for b in self.buffers)
            buffers = f"{count:4} buffer{'' if count == 1 else 's'}, "
            if kind == ARENA:
                live, unshared = show_bytes(self.bound), show_bytes(self.unshared)
                owner = f"{owner}; {unshared} without sharing, {live} live at once"
                lines.append(f"  {'arena':8} {show_bytes(self.arena):>10}  {buffers}{owner}")
            else:
                lines.append(f"  {kind:8} {show_bytes(self.bytes(kind)):>10}  {buffers}{owner}")
        lines.append(f"  {'scratch':8} {show_bytes(self.scratch):>10}  for each thread")
        arena = [b for b in self.buffers if b.kind == ARENA]
        if arena:
            widths = max(len(b.name) for b in arena), max(len(b.type) for b in arena)
            lines.append(f"  lives in {self.phases} phases:")
            lines += [f"    {self._row(b, *widths)}" for b in arena]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self._title}: arena {show_bytes(self.arena)}, weights {show_bytes(self.bytes(WEIGHT))}>"

    def _repr_html_(self) -> str:
        rows = []
        for kind, owner in OWNERS.items():
            count = sum(b.kind == kind for b in self.buffers)
            size = self.arena if kind == ARENA else self.bytes(kind)
            rows.append(("arena" if kind == ARENA else kind, show_bytes(size), count, owner))
        parts = [table(("kind", "size", "buffers", "owner"), rows)]
        parts.append(
            note(f"scratch {show_bytes(self.scratch)} for each thread; sharing saves {show_bytes(self.saved)}")
        )
        arena = [
            (b.name, b.type, show_bytes(b.bytes), b.offset or 0, self._bar(b)) for b in self.buffers if b.kind == ARENA
        ]
        columns = ("buffer", "type", "size", "offset", f"lives in {self.phases} phases")
        return box(
            self._title, *parts, *([fold(f"{len(arena)} buffers of the arena", table(columns, arena))] if arena else [])
        )

    def _row(self, b: BufferMemory, name: int, kind: int) -> str:
        return f"{b.name:{name}}  {b.type:{kind}} {show_bytes(b.bytes):>10}  at {b.offset:<10} |{self._bar(b)}|"

    def _bar(self, b: BufferMemory) -> str:
        """The lifetime of a buffer as a bar; with many phases, a column is several of them."""
        width = min(BAR, self.phases)
        first, last = (phase * width // self.phases for phase in (b.first, b.last))
        return "." * first + "#" * (last - first + 1) + "." * (width - last - 1)


def memory_report(program: Program, sizes: Mapping[str, int], plan: Plan, scratch: int) -> MemoryReport:
    """The memory of a program at given sizes, with the arena planned for them."""
    lives = {x.name: x for x in lifetimes(program)}
    buffers = []
    for b in program.buffers.values():
        shape = TensorType(concrete(b.type.shape, sizes), b.type.dtype)
        count = int(evaluate(b.type.bytes, sizes))
        life = lives.get(b.name)
        if b.kind != ARENA:
            buffers.append(BufferMemory(b.name, b.kind, str(shape), count))
        elif life is not None:  # an unused buffer has no memory
            place = plan.offsets[b.name]
            buffers.append(BufferMemory(b.name, b.kind, str(shape), count, place, life.first, life.last))
    phases = 1 + max((x.last for x in lives.values()), default=0)
    unshared = sum(plan.sizes.values())
    return MemoryReport(program.name, dict(sizes), tuple(buffers), plan.size, plan.bound, unshared, scratch, phases)


def show_bytes(n: int) -> str:
    """A human-readable number of bytes."""
    size = float(n)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GB"
