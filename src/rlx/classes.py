"""`dataclass` as the standard library has it, made in a quarter of the time.

The standard one compiles six functions for a frozen class, and those of some hundred classes took a third of what
importing rlx takes. Here only `__init__` is compiled, because calls of it must be quick; the other methods are the same
for all classes. Fields and their defaults, `replace`, `asdict` and `match` are those of the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    import functools
    from dataclasses import MISSING, FrozenInstanceError, fields
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True):
        """The standard decorator with the options that rlx uses."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, slots=slots, eq=eq)
        own = {n for n, v in vars(cls).items() if n != "__hash__" or v is not None}  # what the class defines stays
        is_derived = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))  # then the standard one has rules to check
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, frozen=frozen and is_derived)(cls)
        told = made.__dataclass_params__  # by which those that are derived from it are checked
        told.init, told.repr, told.eq, told.frozen = True, True, eq, frozen
        methods = {"__init__": _init(made, frozen, slots), "__repr__": _repr(made)}
        if eq:
            methods["__eq__"] = _eq(_getter([f.name for f in fields(made) if f.compare]))
            hashed = [f.name for f in fields(made) if (f.compare if f.hash is None else f.hash)]
            methods["__hash__"] = _hash(_getter(hashed)) if frozen else None
        if frozen:
            methods["__setattr__"], methods["__delattr__"] = _guards(made)
            if slots:
                methods |= {"__getstate__": _state, "__setstate__": _restore}
        for name, method in methods.items():
            if name not in own:
                setattr(made, name, method)
        return made

    def _init(cls, frozen, slots):
        """The constructor. Fields of a frozen class are set past its `__setattr__`, through slots where it has them."""
        names = {"MISSING": MISSING, "put": object.__setattr__}
        positional, named, body = [], [], []
        for field in fields(cls):
            name, value = field.name, field.name
            if field.default_factory is not MISSING:
                names[f"make_{name}"] = field.default_factory
                value = f"make_{name}()" if not field.init else f"make_{name}() if {name} is MISSING else {name}"
            elif field.default is not MISSING:
                names[f"default_{name}"] = field.default
                value = name if field.init else f"default_{name}"
            elif not field.init:
                continue
            if field.init:
                default = "MISSING" if field.default_factory is not MISSING else f"default_{name}"
                optional = field.default_factory is not MISSING or field.default is not MISSING
                (named if field.kw_only else positional).append(f"{name}={default}" if optional else name)
            if frozen and slots and name in vars(cls):
                names[f"put_{name}"] = vars(cls)[name].__set__
                body.append(f"put_{name}(self, {value})")
            else:
                body.append(f"put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        parameters = ", ".join(["self", *positional, *(["*", *named] if named else ())])
        exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), names)
        made = names["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        return made

    def _getter(names):
        """The values of some fields as a tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda self, get=attrgetter(*names): (get(self),)) if names else lambda self: ()

    def _eq(values):
        def __eq__(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash(values):
        return lambda self: hash(values(self))

    def _repr(cls):
        names = [f.name for f in fields(cls) if f.repr]
        values, template = _getter(names), "({})".format(", ".join(f"{name}={{!r}}" for name in names))

        @recursive_repr()
        def __repr__(self):
            return self.__class__.__qualname__ + template.format(*values(self))

        return __repr__

    def _guards(cls):
        """What refuses to change a field. A derived class that is no dataclass may have attributes of its own."""
        names = {field.name for field in fields(cls)}

        def __setattr__(self, name, value):
            if type(self) is cls or name in names:
                raise FrozenInstanceError(f"cannot assign to field {name!r}")
            super(cls, self).__setattr__(name, value)

        def __delattr__(self, name):
            if type(self) is cls or name in names:
                raise FrozenInstanceError(f"cannot delete field {name!r}")
            super(cls, self).__delattr__(name)

        return __setattr__, __delattr__

    def _state(self):
        return [getattr(self, field.name) for field in fields(self)]

    def _restore(self, state):
        for field, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)
