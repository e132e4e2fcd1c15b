"""Layouts of matmul operands in memory. Backends define them, graphs name them.

A layout is a frozen dataclass of numbers, flags and element types, so it can be an op attribute; its text is
`device.name(field, ...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from rlx.dtypes import BY_NAME, DType
from rlx.errors import GraphError, nearest
from rlx.types import Size, TensorType

_WORDS = {"true": True, "false": False}


class Layout(ABC):
    """The result of `prepack` for weights or the left operand of a matmul: its type, its bytes, how to pack them."""

    device: ClassVar[str]  # the backend that defines it
    name: ClassVar[str]

    @abstractmethod
    def packed_type(self, *operands: TensorType) -> TensorType:
        """The type of `prepack`'s result for these operands."""

    @abstractmethod
    def pack(self, *operands: Any) -> Any:
        """`prepack` in NumPy."""

    @abstractmethod
    def loops(self, scheduler: Any, node: Any) -> Sequence[Any]:
        """The loop form of `prepack` with this layout; see `lir/schedule.py`."""

    by_rows: ClassVar[bool] = False  # whether each row of the operand is packed by itself, as for x

    def __str__(self) -> str:
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        words = (str(v).lower() if isinstance(v, bool) else str(v) for v in values)
        return f"{self.device}.{self.name}({', '.join(words)})"


class WeightLayout(Layout):
    """Layout of the right operand of a matmul: one or more matrices in one tensor."""

    plain: ClassVar[bool] = False  # whether it only reorders the numbers
    left: Layout | None = None  # layout of x, if it has to be packed too

    def arithmetic(self) -> str | None:
        """The arithmetic of its kernels (see `LoopKernel.arithmetic`), if it is not the type of x."""
        return None

    @abstractmethod
    def inner(self, x: TensorType, packed: TensorType) -> tuple[Size, DType]:
        """The required size of the last axis of x, and the accumulator type."""

    @abstractmethod
    def products(self, x: Any, packed: Any, columns: int, weights: int) -> list[Any]:
        """x times each of the packed matrices, in NumPy."""


def parse_layout(text: str) -> Layout:
    """Parses the `str` of a layout."""
    from rlx.backends.base import backend

    device, _, rest = text.partition(".")
    name, _, inside = rest.removesuffix(")").partition("(")
    known = backend(device).layouts()
    if name not in known:
        raise GraphError(f"layout {text}: {device} has none of that name", hint=nearest(name, known))
    values = [_value(word.strip(), text) for word in inside.split(",")] if inside else []
    wanted = {f.name: f.type for f in fields(known[name])}  # type: ignore[arg-type]
    if [type(v).__name__ for v in values] != list(wanted.values()):
        raise GraphError(f"layout {text}: expected {', '.join(f'{n}: {kind}' for n, kind in wanted.items())}")
    return known[name](*values)


def _value(word: str, text: str) -> int | bool | DType:
    if word in _WORDS:
        return _WORDS[word]
    if word in BY_NAME:
        return BY_NAME[word]
    if not word.isdecimal() or len(word) > 9 or int(word) == 0:
        raise GraphError(f"layout {text[:100]}: {word[:40]!r} is neither a number, a flag nor an element type")
    return int(word)
