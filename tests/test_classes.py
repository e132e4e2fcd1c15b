"""`rlx.classes.dataclass` against the standard library's: the same class body, decorated by each."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar

import pytest

from rlx import classes

OPTIONS: list[dict[str, bool]] = [
    {"frozen": frozen, "slots": slots, "eq": eq} for frozen, slots, eq in itertools.product((False, True), repeat=3)
]


def body() -> type:
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list)
        cached: int = field(default=7, compare=False, repr=False)
        length: int = field(init=False)
        kind: ClassVar[str] = "point"
        _: KW_ONLY
        name: str = "p"

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", self.x + self.y)

    return Point


def own_methods() -> type:
    class Point:
        """Says itself how it looks, compares and hashes."""

        x: int

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    return Point


def own_eq() -> type:
    class Point:
        """Compares by itself; the hash is that of the fields."""

        x: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and self.x == other.x

    return Point


def empty() -> type:
    class Point:
        """Has no fields."""

    return Point


def said(action: Callable[[], Any]) -> Any:
    """What an action gives, or how it fails."""
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


def behaviour(cls: Any) -> list[Any]:
    if not dataclasses.fields(cls):
        return [repr(cls()), cls() == cls(), said(lambda: hash(cls()) == hash(cls())), cls.__match_args__]
    if len(dataclasses.fields(cls)) == 1:
        a, b = cls(1), cls(2)
        return [repr(a), a == b, a == cls(1), said(lambda: hash(a) == hash(b)), said(lambda: hash(a) == hash(cls(1)))]
    a, b = cls(1), cls(1, 2, [], 8, name="p")

    def change() -> None:
        a.x = 3

    def add() -> None:
        a.other = 3

    def remove() -> None:
        del a.x

    return [
        repr(a), a == b, a == cls(2), a == 1, a != b, cls(1, tags=["t"]).tags, a.tags is b.tags, a.length, a.kind,
        said(lambda: hash(a) == hash(b)), cls.__match_args__, cls.__doc__, dataclasses.asdict(a),
        dataclasses.astuple(a),
        [(f.name, f.init, f.kw_only, f.default) for f in dataclasses.fields(cls)],
        repr(dataclasses.replace(a, x=9)), said(lambda: dataclasses.replace(a, length=1)), copy.copy(a) == a,
        copy.deepcopy(a).tags is not a.tags, said(cls), said(lambda: cls(1, 2, [], 7, "p")), said(lambda: cls(z=1)),
        list(inspect.signature(cls).parameters), said(change), said(remove), a.__class__.__qualname__,
        said(add) is None,
    ]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [body, own_methods, own_eq, empty])
def test_it_is_the_standard_one(make: Callable[[], type], options: dict[str, bool]) -> None:
    assert behaviour(classes.dataclass(**options)(make())) == behaviour(dataclasses.dataclass(**options)(make()))


@classes.dataclass(frozen=True, slots=True)
class Pair:
    """Two things."""

    a: Any
    b: Any = None


@classes.dataclass(frozen=True)
class Triple(Pair):
    """Three."""

    c: int = 3


class Named(Pair):
    """Derived, and no dataclass."""


def test_frozen_objects_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pair(1, [2]))) == Pair(1, [2])
    assert pickle.loads(pickle.dumps(Triple(1))) == Triple(1)


def test_the_standard_one_and_ours_derive_from_each_other() -> None:
    @dataclasses.dataclass(frozen=True)
    class Standard(Pair):
        c: int = 3

    @classes.dataclass(frozen=True)
    class Ours(Standard):
        d: int = 4

    assert repr(Ours(1)).endswith("Ours(a=1, b=None, c=3, d=4)")
    assert Ours(1) == Ours(1, None, 3, 4) and hash(Ours(1)) == hash(Ours(1)) and Ours(1) != Ours(2)
    for made in (Standard(1), Ours(1)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="'c'"):
            made.c = 2  # type: ignore[misc]


@pytest.mark.parametrize("decorate", [classes.dataclass, dataclasses.dataclass])
def test_frozen_and_other_classes_do_not_mix(decorate: Any) -> None:
    for base in (classes.dataclass, dataclasses.dataclass):
        for frozen in (False, True):
            derived = type("Derived", (base(frozen=frozen)(body()),), {"__doc__": "Derived."})
            with pytest.raises(TypeError, match="cannot inherit"):
                decorate(frozen=not frozen)(derived)


def test_derived_classes() -> None:
    assert repr(Triple(1)) == "Triple(a=1, b=None, c=3)"
    assert Triple(1) != Pair(1)
    named = Named(1)
    named.title = "other"  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'a'"):
        named.a = 2  # type: ignore[misc]
    assert named.title == "other"  # type: ignore[attr-defined]


def test_an_object_that_contains_itself_can_be_shown() -> None:
    inside: list[Any] = []
    pair = Pair(inside)
    inside.append(pair)
    assert repr(pair) == "Pair(a=[...], b=None)"
