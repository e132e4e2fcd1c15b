"""The interface of a program: buffer kinds, and assertions about sizes."""

from __future__ import annotations

from rlx.fast_dataclass import dataclass
from rlx.types import Size

INPUT, OUTPUT, WEIGHT, CONST, ARENA = "input", "output", "weight", "const", "buffer"  # kinds of buffers


@dataclass(frozen=True, slots=True)
class Assertion:
    """A relation between two sizes that an op requires, checked at run time.

    In a body that may not run, it applies only if the body does: if every enclosing loop has at least one step
    (`steps`), and if the branch is taken or the loop condition holds, which a launch before the body checks
    (`launched`).
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
        """The error message if it does not hold for these sizes."""
        if self.relation == "==":
            return f"{self.op}: {self.a} is {a}, {self.b} is {b}"
        limit = f"{b}" if isinstance(self.b, int) else f"{self.b}, which is {b}"
        return f"{self.op}: {self.a} is {a}, more than {limit}"
