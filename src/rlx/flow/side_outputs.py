"""SideOutputs: values that stages push while they emit, which become extra outputs of the graph."""

from __future__ import annotations

from rlx.flow.state import FlowValue
from rlx.ir.graph import Value


class SideOutputs:
    """Values of one build, in the order in which stages pushed them."""

    def __init__(self) -> None:
        self._pushed: list[tuple[str, Value]] = []

    def push(self, value: Value | FlowValue, name: str = "") -> None:
        """Push a value; without a name it is called `side.0`, `side.1` and so on."""
        value = value.id if isinstance(value, FlowValue) else value
        if self._pushed and self._pushed[0][1].graph is not value.graph:
            self._pushed.clear()  # left over from a build whose side outputs were not read
        self._pushed.append((name or f"side.{len(self._pushed)}", value))

    def drain(self) -> list[tuple[str, Value]]:
        """Return names and values, and clear the list."""
        pushed, self._pushed = self._pushed, []
        return pushed

    def __repr__(self) -> str:
        return f"<side outputs: {', '.join(name for name, _ in self._pushed) or 'none'}>"

    def __len__(self) -> int:
        return len(self._pushed)
