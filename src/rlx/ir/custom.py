"""Builders for custom functions on `Graph`, and the handle of one with several outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.types import Size

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node, Value


@dataclass(frozen=True)
class MultiOutputHandle:
    """The outputs of a custom function; `source` is its node. Unpacks: `a, b = handle`."""

    source: Node

    @property
    def n_outputs(self) -> int:
        return len(self.source.results)

    @property
    def sub_shapes(self) -> tuple[tuple[Size, ...], ...]:
        """The shape of each output."""
        return tuple(v.shape for v in self.source.results)

    @property
    def offsets(self) -> tuple[Size, ...]:
        """Offset of each output, in elements, if all were concatenated."""
        offsets: list[Size] = [0]
        for value in self.source.results[:-1]:
            offsets.append(offsets[-1] + value.type.elements)
        return tuple(offsets)

    def output(self, i: int) -> Value:
        """Output number i."""
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.n_outputs:
            raise GraphError(f"custom_fn_multi: output {i!r} does not exist, there are {self.n_outputs}")
        return self.source.results[i]

    def __iter__(self) -> Iterator[Value]:
        return iter(self.source.results)


class CustomBuilders:
    """Mixin of `Graph`: custom functions with one or more outputs."""

    if TYPE_CHECKING:

        def build(self, op: str, operands: Sequence[Any], attrs: dict[str, Any]) -> Node: ...

    def custom_fn(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> Value:
        """Applies `fwd_body` to the inputs, with custom derivative rules; see the op `custom_fn`."""
        count = len(getattr(fwd_body, "outputs", (None,)))
        if count != 1:
            hint = "custom_fn_multi has several"
            raise GraphError(f"custom_fn: fwd_body: has {count} outputs, expected 1", hint=hint)
        return self._custom(inputs, fwd_body, vjp_body, jvp_body)[0]

    def custom_fn_multi(
        self, inputs: Sequence[Any], fwd_body: Graph, vjp_body: Graph | None = None, jvp_body: Graph | None = None
    ) -> MultiOutputHandle:
        """`custom_fn` with any number of outputs, of any shapes and types."""
        return MultiOutputHandle(self._custom(inputs, fwd_body, vjp_body, jvp_body))

    def _custom(self, inputs: Sequence[Any], fwd: Graph, vjp: Graph | None, jvp: Graph | None) -> Node:
        operands = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        return self.build("custom_fn", operands, {"fwd_body": fwd, "vjp_body": vjp, "jvp_body": jvp})
