"""What a program has from outside: the kinds of its buffers, and how sizes must relate."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.types import Size

INPUT, OUTPUT, WEIGHT, CONST, ARENA = "input", "output", "weight", "const", "buffer"  # kinds of buffers


@dataclass(frozen=True, slots=True)
class Assertion:
    """How two sizes must relate at run time, because an op says so.

    In a body that may not run at all, only where it does: if each of the loops around it has a step (`steps`), and if
    the branch is taken or the condition of a loop holds, which a launch in front of the body finds out (`launched`).
    """

    a: Size
    b: Size
    relation: str  # == or <=
    op: str
    where: str
    steps: tuple[Size, ...] = ()
    launched: bool = False

    def holds(self, a: int, b: int) -> bool:
        return a == b if self.relation == "==" else a <= b

    def message(self, a: int, b: int) -> str:
        """What to say when it does not hold for these sizes."""
        if self.relation == "==":
            return f"{self.op}: {self.a} is {a}, {self.b} is {b}"
        return f"{self.op}: {self.a} is {a}, more than {self.b}, which is {b}"
