"""SideOutputs: values that stages put aside while they emit, to become outputs of the graph beside the main one."""

from __future__ import annotations

from rlx.flow.state import FlowValue
from rlx.ir.graph import Value


class SideOutputs:
    """Values of one build, in the order in which stages pushed them."""

    def __init__(self) -> None:
        self._pushed: list[tuple[str, Value]] = []

    def push(self, value: Value | FlowValue, name: str = "") -> None:
        """Put a value aside; without a name it is called `side.0`, `side.1` and so on."""
        value = value.id if isinstance(value, FlowValue) else value
        if self._pushed and self._pushed[0][1].graph is not value.graph:
            self._pushed.clear()  # left by a build that nobody asked for its side outputs
        self._pushed.append((name or f"side.{len(self._pushed)}", value))

    def drain(self) -> list[tuple[str, Value]]:
        """Names and values; afterwards it is empty."""
        found, self._pushed = self._pushed, []
        return found

    def __len__(self) -> int:
        return len(self._pushed)
