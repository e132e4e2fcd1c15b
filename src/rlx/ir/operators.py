"""Python operators as ops, declared once for graph values, traced arrays and the values that flow through a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

Operand = TypeVar("Operand")


class _Binary(Protocol):
    """A method with one operand that returns the type of its instance."""

    def __get__(self, value: Operand, owner: Any = None) -> Callable[[Any], Operand]: ...


class _Unary(Protocol):
    def __get__(self, value: Operand, owner: Any = None) -> Callable[[], Operand]: ...


OPERATORS: dict[str, tuple[str, bool]] = {}  # method -> op, and whether the operands are swapped


def _binary(python: str, op: str, doc: str) -> tuple[_Binary, _Binary]:
    """The methods `__python__` and `__rpython__`."""

    def method(self: Operators, other: Any) -> Any:
        return self.operate(op, self, other)

    def reflected(self: Operators, other: Any) -> Any:
        return self.operate(op, other, self)

    plain = _declare(method, f"__{python}__", op, doc)
    return cast(_Binary, plain), cast(_Binary, _declare(reflected, f"__r{python}__", op, doc, swapped=True))


def _comparison(python: str, op: str, doc: str) -> _Binary:
    """The method `__python__`; Python itself swaps `<` and `>`."""

    def method(self: Operators, other: Any) -> Any:
        return self.operate(op, self, other)

    return cast(_Binary, _declare(method, f"__{python}__", op, doc))


def _unary(python: str, op: str, doc: str) -> _Unary:
    def method(self: Operators) -> Any:
        return self.operate(op, self)

    return cast(_Unary, _declare(method, f"__{python}__", op, doc))


def _declare(method: Any, name: str, op: str, doc: str, *, swapped: bool = False) -> Any:
    OPERATORS[name] = op, swapped
    method.__name__, method.__qualname__, method.__doc__ = name, f"Operators.{name}", doc
    return method


class Operators:
    """The operators. A subclass defines in `operate` how to apply an op."""

    __slots__ = ()

    if TYPE_CHECKING:

        def operate(self, op: str, *operands: Any) -> Any:
            """Apply an op; the operands are in the op's order."""

    __add__, __radd__ = _binary("add", "add", "The sum, elementwise.")
    __sub__, __rsub__ = _binary("sub", "sub", "The difference, elementwise.")
    __mul__, __rmul__ = _binary("mul", "mul", "The product, elementwise.")
    __truediv__, __rtruediv__ = _binary("truediv", "div", "The quotient, elementwise.")
    __floordiv__, __rfloordiv__ = _binary("floordiv", "floor_divide", "The quotient rounded down, elementwise.")
    __mod__, __rmod__ = _binary("mod", "mod", "The remainder of `//`, elementwise; it has the sign of the divisor.")
    __pow__, __rpow__ = _binary("pow", "pow", "The first operand to the power of the second, elementwise.")
    __matmul__, __rmatmul__ = _binary("matmul", "matmul", "The matrix product; leading axes broadcast.")
    __and__, __rand__ = _binary("and", "logical_and", "Whether both are true, elementwise.")
    __or__, __ror__ = _binary("or", "logical_or", "Whether one of the two is true, elementwise.")
    __lt__ = _comparison("lt", "less", "Whether the first operand is less, elementwise.")
    __le__ = _comparison("le", "less_equal", "Whether the first operand is less or equal, elementwise.")
    __gt__ = _comparison("gt", "greater", "Whether the first operand is greater, elementwise.")
    __ge__ = _comparison("ge", "greater_equal", "Whether the first operand is greater or equal, elementwise.")
    __neg__ = _unary("neg", "neg", "The negative, elementwise.")
    __abs__ = _unary("abs", "abs", "The absolute value, elementwise.")
    __invert__ = _unary("invert", "logical_not", "Whether it is false, elementwise.")
