"""`rlx.fast_dataclass` against the standard library's decorator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar

import numpy as np
import pytest

from rlx import fast_dataclass

OPTIONS = [{}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"eq": False}, {"repr": False}]
Decorator = Callable[..., Any]


class Plain:
    """Nothing but required fields."""

    a: int
    b: str


class Defaults:
    """Defaults of all kinds, a class variable, fields that are left out of comparisons."""

    kind: ClassVar[str] = "kind"
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: float = field(default=1.5, repr=False)
    e: int = field(default=0, compare=False)
    f: int = field(default=7, hash=False)


class Methods:
    """Methods that are not replaced."""

    a: int
    b: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "b", self.b + 1)

    def __repr__(self) -> str:
        return "own repr"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.a % 10 == other.a % 10

    def __hash__(self) -> int:
        return self.a % 10


class Empty:
    """No fields."""


class One:
    """A single field, which may be an array."""

    a: Any


def both(cls: type, options: dict[str, bool]) -> tuple[type, type]:
    """The class, decorated by the standard library and by rlx."""

    def copied() -> type:
        parts = {name: copy.copy(value) for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        return type(cls.__name__, (), parts)

    return dataclasses.dataclass(**options)(copied()), fast_dataclass.dataclass(**options)(copied())


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cls", [Plain, Defaults, Methods, Empty, One])
def test_instances_behave_as_those_of_the_standard_library(cls: type, options: dict[str, bool]) -> None:
    standard, fast = both(cls, options)
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(standard)] == [
        (f.name, f.type, f.default) for f in dataclasses.fields(fast)
    ]
    assert str(inspect.signature(standard)) == str(inspect.signature(fast))
    assert standard.__match_args__ == fast.__match_args__  # type: ignore[attr-defined]
    names = [f.name for f in dataclasses.fields(standard)]
    required = [1, "two"][: len([f for f in dataclasses.fields(standard) if f.default is f.default_factory])]
    checks: list[Callable[[type], Any]] = [
        lambda c: repr(c(*required)) if options.get("repr", True) else "",
        lambda c: c(*required) == c(*required),
        lambda c: c(*required) == 3,
        lambda c: hash(c(*required)) == hash(c(*required)),
        lambda c: c.__hash__ is None,
        lambda c: c(*required) == c(*(11 for _ in required)),
        lambda c: [getattr(dataclasses.replace(c(*required)), name) for name in names],
        lambda c: c(*range(99)),
        lambda c: c(unknown=1),
        lambda c: setattr(c(*required), "a", 5),
        lambda c: delattr(c(*required), "a"),
        lambda c: setattr(c(*required), "other", 5),
        lambda c: [getattr(copy.copy(c(*required)), name) for name in names],
        lambda c: [getattr(copy.deepcopy(c(*required)), name) for name in names],
        lambda c: hasattr(c, "__slots__"),
    ]
    for number, check in enumerate(checks):
        expected, actual = outcome(lambda c=check: c(standard)), outcome(lambda c=check: c(fast))
        no_field = number == 11 or (cls is Empty and number in (9, 10))
        if no_field and options.get("frozen") and options.get("slots"):
            continue  # the standard class fails in `super`
        assert str(expected).replace(str(standard), "") == str(actual).replace(str(fast), ""), number


def test_arrays_are_compared_by_identity_first() -> None:
    standard, fast = both(One, {"frozen": True})
    array = np.arange(3)
    assert standard(array) == standard(array) and fast(array) == fast(array)


@fast_dataclass.dataclass(frozen=True, slots=True)
class Pickled:
    """Frozen, with slots."""

    a: int
    b: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OfStandard(Pickled):
    c: int = 3


@fast_dataclass.dataclass(frozen=True)
class OfFast(Pickled):
    """Has the field of its base."""

    c: int = 3


def test_subclasses_pickles_and_cycles() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, (2,)))) == Pickled(1, (2,))
    assert OfStandard(1, (), 4).c == OfFast(1, (), 4).c == 4 and OfFast(1) != Pickled(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        OfStandard(1).a = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        dataclasses.dataclass(type("Thawed", (Pickled,), {"__annotations__": {"d": int}}))
    _, one = both(One, {})
    cyclic = one([])
    cyclic.a.append(cyclic)
    assert "..." in repr(cyclic)


def test_what_it_does_not_know_goes_to_the_standard_library() -> None:
    @fast_dataclass.dataclass(frozen=True)
    class Named:
        """A field by name only, and one that is computed."""

        a: int
        _: KW_ONLY
        b: int = 1
        c: int = field(init=False, default=5)

    assert Named(1, b=2).b == 2 and Named(1).c == 5
    with pytest.raises(TypeError, match="positional"):
        Named(1, 2)  # type: ignore[misc]
