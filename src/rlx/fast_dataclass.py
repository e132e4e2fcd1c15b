"""`dataclass` of the standard library, for classes that are created in a third of the time.

The standard decorator compiles up to seven methods from source text for each class: 0.8 ms, most of what importing a
module of rlx costs. Here only `__init__` is compiled, and the other methods are closures. Instances behave the same;
so do `fields`, `replace`, pickling, and subclasses that are decorated by the standard library. Options, bases or fields
that need more than this go to the standard decorator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        return _create(cls, **options) if _is_simple(cls, options) else dataclasses.dataclass(cls, **options)


class _Factory:
    """The default of a parameter whose value a factory creates."""

    def __repr__(self) -> str:
        return "<factory>"


_MISSING = dataclasses.MISSING
_FACTORY = _Factory()
_set = object.__setattr__


def _is_simple(cls: type, options: Mapping[str, bool]) -> bool:
    """Whether `_create` does what the standard decorator does."""
    fields = [value for value in vars(cls).values() if isinstance(value, dataclasses.Field)]
    types = map(str, getattr(cls, "__annotations__", {}).values())
    return (
        options.keys() <= {"frozen", "slots", "repr", "eq"}
        and cls.__doc__ is not None
        and not any(map(dataclasses.is_dataclass, cls.__mro__[1:]))
        and not vars(cls).keys() & {"__init__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"}
        and all(f.init and f.kw_only is not True for f in fields)
        and not any("KW_ONLY" in kind or "InitVar" in kind for kind in types)
    )


def _create(cls: type, frozen: bool = False, slots: bool = False, repr: bool = True, eq: bool = True) -> type:
    own = set(vars(cls))
    # fields, defaults, __match_args__ and slots, but no methods
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    fields = dataclasses.fields(cls)
    _add(cls, "__init__", _init(cls, fields, frozen))
    if repr and "__repr__" not in own:
        _add(cls, "__repr__", _repr(tuple(f.name for f in fields if f.repr)))
    if eq and "__eq__" not in own:
        _add(cls, "__eq__", _eq(_values(f.name for f in fields if f.compare)))
    if eq and "__hash__" not in own:
        hashed = (f.name for f in fields if (f.compare if f.hash is None else f.hash))
        _add(cls, "__hash__", _hash(_values(hashed)) if frozen else None)
    if frozen:
        cls.__dataclass_params__.frozen = True  # type: ignore[attr-defined]  # subclasses must be frozen too
        names = frozenset(f.name for f in fields)
        _add(cls, "__setattr__", _refuse(cls, names, "assign to"))
        _add(cls, "__delattr__", _refuse(cls, names, "delete"))
        if slots:
            _add(cls, "__getstate__", lambda self: [getattr(self, f.name) for f in fields])
            _add(cls, "__setstate__", _set_state)
    return cls


def _add(cls: type, name: str, method: Any) -> None:
    if method is not None:
        method.__qualname__, method.__name__ = f"{cls.__qualname__}.{name}", name
        method.__module__ = cls.__module__
    setattr(cls, name, method)


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...], frozen: bool) -> Callable[..., None]:
    known: dict[str, Any] = {"_set": _set, "_FACTORY": _FACTORY}
    parameters, body = ["self"], []
    for f in fields:
        name, value = f.name, f.name
        if f.default is not _MISSING:
            known[f"_default_{name}"] = f.default
            parameters.append(f"{name}=_default_{name}")
        elif f.default_factory is not _MISSING:
            known[f"_create_{name}"] = f.default_factory
            parameters.append(f"{name}=_FACTORY")
            value = f"_create_{name}() if {name} is _FACTORY else {name}"
        else:
            parameters.append(name)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    source = f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"])
    exec(source, known)
    init: Callable[..., None] = known["__init__"]
    init.__annotations__ = {f.name: f.type for f in fields} | {"return": None}
    return init


def _values(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns some attributes as a tuple."""
    match tuple(names):
        case ():
            return lambda _: ()
        case (name,):
            get = attrgetter(name)
            return lambda instance: (get(instance),)
        case several:
            return attrgetter(*several)


def _repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({values})"

    return recursive_repr()(__repr__)


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, Any], Any]:
    def __eq__(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _refuse(cls: type, names: frozenset[str], verb: str) -> Callable[..., None]:
    """`__setattr__` or `__delattr__` of a frozen class. A subclass may have attributes of its own."""

    def method(self: Any, name: str, *value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {verb} field {name!r}")
        getattr(super(cls, self), "__setattr__" if value else "__delattr__")(name, *value)

    return method


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, f.name, value)
