"""Cache keys of calls: the types of the arguments, and the value of everything else that a function reads.

Outside of a trace, `rlx.grad(f)(x)` reuses its program if nothing that it depends on has changed. The key of `f` holds
its code and the current values of its closure, globals and defaults, and those of the functions that it calls; arrays
are compared by content, so a change in place also gives another key, and so does a changed attribute of an object. A
function has no key (`Unkeyable`) if it may depend on anything else, such as time, files or `np.random`: it is traced on
every call. The key is computed again after tracing, so a function that changes what it reads is not cached either.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
from collections.abc import Hashable, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.dims import Dim
from rlx.dtypes import DType
from rlx.functional import tree

MAX_ARRAY_BYTES = 4 << 20  # of all arrays that a function captures; the cache holds copies of them
MAX_ENTRIES = 1000  # of a captured list, dict or set
ALL_NUMBERS = frozenset((float, int, bool))  # Python numbers that are inputs of a program, see `Reader.arguments`
FLOATS = frozenset((float,))
NO_NUMBERS: frozenset[type] = frozenset()
_CONTAINERS = {tuple, list, dict, set, frozenset}

_BY_VALUE = {int, bool, str, bytes, complex, range, type(None), type(Ellipsis), type(NotImplemented), np.dtype}
_PURE_BUILTIN_NAMES = (
    "abs all any bool bytes callable chr complex dict divmod enumerate filter float format frozenset getattr hasattr "
    "hash int isinstance issubclass iter len list map max min next object ord pow property range repr reversed round "
    "set slice sorted staticmethod str sum super tuple type zip Ellipsis NotImplemented"
)
_PURE_BUILTINS = set(_PURE_BUILTIN_NAMES.split())
_PURE_MODULES = {"numpy", "math", "cmath", "_operator", "_functools", "itertools"}  # of functions written in C
_IMPURE_NUMPY_NAMES = (
    "empty empty_like errstate fromfile fromregex genfromtxt get_include get_printoptions load loadtxt memmap nditer "
    "printoptions save savetxt savez savez_compressed set_printoptions seterr seterrcall"
)
_IMPURE_NUMPY = set(_IMPURE_NUMPY_NAMES.split())
_IMPURE_RLX = {"register", "register_dataclass", "explain", "nans"}
_IMPURE_OP_NAMES = (
    "STORE_GLOBAL DELETE_GLOBAL IMPORT_NAME IMPORT_FROM LOAD_NAME LOAD_BUILD_CLASS "
    "LOAD_FROM_DICT_OR_GLOBALS LOAD_FROM_DICT_OR_DEREF LOAD_LOCALS LOAD_SUPER_ATTR"
)
_IMPURE_OPS = set(_IMPURE_OP_NAMES.split())
_BETWEEN = {"PUSH_NULL", "CACHE", "NOP", "EXTENDED_ARG", "PRECALL"}  # instructions between a name and its attribute


_NumpyFunction: type = type(np.sum)  # dispatches on the type of its arguments


class _Plain:
    """A class whose objects have attributes and no other state."""


class Unkeyable(Exception):
    """Raised for a value or function whose state cannot be determined."""


# -- keys of values ---------------------------------------------------------------------------------------------------
class _Content:
    """An array as a key: equal if dtype, shape and bytes are. Its hash looks at the first elements only."""

    __slots__ = ("_hash", "array")

    def __init__(self, array: Array) -> None:
        self.array = np.ascontiguousarray(array).reshape(array.shape)
        self._hash = hash((array.shape, array.dtype.str, self.array.reshape(-1)[:8].tobytes()))

    def own(self) -> None:
        """Copy the array, so that later changes of it do not change the key."""
        self.array = self.array.copy()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content):
            return NotImplemented
        a, b = self.array, other.array
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


class Reader:
    """Builds the key of one call; `contents` are the arrays in it, `data` the arrays that the program takes."""

    def __init__(self) -> None:
        self.contents: list[_Content] = []
        self.bytes = 0  # of the contents
        self.data: list[Any] = []
        self._numbers: dict[int, int] = {}  # of functions and objects, by id: they may refer to each other
        self._classes: dict[type, int] = {}

    def own(self) -> None:
        """Copy the arrays in the key before it is stored."""
        for content in self.contents:
            content.own()

    # -- arguments ----------------------------------------------------------------------------------------------------
    def arguments(self, x: Any, numbers: frozenset[type]) -> Any:
        """Return the key of an argument: arrays by type (they go to `data`, in the order of `tree.flatten`).

        Python numbers of the types in `numbers` are data too; all other values are part of the key.
        """
        kind = type(x)
        if kind is np.ndarray:
            if not numbers and x.dtype.kind not in "biuf":  # eager functions take it as a constant
                return self.value(x)
            self.data.append(x)
            return (x.dtype, x.shape)
        if kind is tuple or kind is list:
            return (kind, *[self.arguments(v, numbers) for v in x])
        if kind in numbers:
            self.data.append(x)
            return kind
        if isinstance(x, np.generic):
            if not numbers and x.dtype.kind not in "biuf":
                raise Unkeyable
            self.data.append(x)
            return kind
        if kind is dict:
            keys = tree.sorted_keys(x)
            return (kind, keys, *[self.arguments(x[k], numbers) for k in keys])
        node = None if isinstance(x, type) else tree.node(x)
        if node is None:
            if numbers is ALL_NUMBERS and kind not in _BY_VALUE:
                raise Unkeyable  # an error that names it is raised where it is traced
            if numbers and kind.__module__.startswith("rlx.") and not callable(x):
                raise Unkeyable  # values of graphs and arrays of devices
            return self.value(x)
        class_key = None if x is None else self._class(kind)
        static = None if node.static is None else self._static(node.static)
        return (class_key, node.keys, static, *[self.arguments(v, numbers) for v in node.children])

    def _static(self, static: Any) -> Any:
        return self.value(static)

    # -- other values -------------------------------------------------------------------------------------------------
    def value(self, x: Any) -> Any:
        """Return the key of a value that a function reads."""
        kind = type(x)
        if kind in _BY_VALUE:
            return (kind, x)
        if kind is float:
            return x.hex()  # tells 0.0 from -0.0, and NaN equals NaN
        if kind is FunctionType:
            return self._function(x)
        if kind is np.ndarray:
            self.bytes += x.nbytes
            if x.dtype.hasobject or self.bytes > MAX_ARRAY_BYTES:
                raise Unkeyable
            content = _Content(x)
            self.contents.append(content)
            return content
        if kind in _CONTAINERS and len(x) > MAX_ENTRIES:
            raise Unkeyable  # building the key would cost more than it saves
        if kind is tuple or kind is list:
            return (kind, *[self.value(v) for v in x])
        if kind is dict:
            return (kind, *[(self.value(k), self.value(v)) for k, v in x.items()])
        if kind is set or kind is frozenset:
            return (kind, frozenset([self.value(v) for v in x]))
        if kind is slice:
            return (kind, self.value(x.start), self.value(x.stop), self.value(x.step))
        if isinstance(x, type):
            return self._class(x)
        return self._object(x)

    def _object(self, x: Any) -> Any:
        kind = type(x)
        if isinstance(x, np.generic) and not x.dtype.hasobject:
            return (kind, x.tobytes())
        if isinstance(x, (np.ufunc, DType, Dim, np.dtype)):
            if isinstance(x, np.ufunc) and x.__name__ not in vars(np):
                self._unknown()  # made of a Python function
            return x
        reads = getattr(kind, "__rlx_reads__", None)
        if reads is not None:
            return (kind, *[self.value(v) for v in reads(x)])
        if kind is MethodType:
            return (kind, self.value(x.__func__), self.value(x.__self__))
        if kind is BuiltinFunctionType or kind is _NumpyFunction:
            if getattr(x, "__module__", None) in _PURE_MODULES and getattr(x, "__name__", "") not in _IMPURE_NUMPY:
                return (kind, x.__module__, x.__name__)
            self._unknown()
        if kind is functools.partial:
            return (kind, self.value(x.func), self.value(x.args), self.value(x.keywords))
        if kind.__module__.startswith("rlx.") and dataclasses.is_dataclass(x):  # such as TensorType
            return (kind, *[self.value(getattr(x, f.name)) for f in dataclasses.fields(x)])
        node = tree.node(x)
        if node is None:
            return self._instance(x)
        children = [self.value(v) for v in node.children]
        attributes = getattr(x, "__dict__", None)  # also those that are not part of the tree
        return (self._class(kind), node.keys, self.value(node.static), *children, self.value(attributes))

    def _instance(self, x: Any) -> Hashable:
        """Return the key of an object whose entire state is its attributes."""
        kind = type(x)
        if type(kind) is not type or kind.__module__.startswith("rlx."):
            self._unknown()
        sizes = (kind.__basicsize__, kind.__dictoffset__)  # a base written in C would have fields of its own
        if sizes != (_Plain.__basicsize__, _Plain.__dictoffset__) or any(
            ["__slots__" in vars(b) for b in kind.__mro__]
        ):
            self._unknown()
        lookup: Any = kind.__getattribute__
        if lookup is not object.__getattribute__ or hasattr(kind, "__getattr__"):
            self._unknown()
        number = self._numbers.get(id(x))
        if number is not None:
            return ("again", number)
        self._numbers[id(x)] = len(self._numbers)
        return (self._class(kind), self.value(vars(x)))

    def _unknown(self) -> NoReturn:
        raise Unkeyable

    # -- functions ----------------------------------------------------------------------------------------------------
    def _function(self, function: FunctionType) -> Hashable:
        number = self._numbers.get(id(function))
        if number is not None:
            return ("again", number)
        self._numbers[id(function)] = len(self._numbers)
        code, module = function.__code__, function.__globals__.get("__name__") or ""
        if module == "numpy" or module.startswith("numpy."):
            if function.__name__ in _IMPURE_NUMPY:
                self._unknown()
            return code
        if module.startswith("rlx.functional") or module == "rlx.debug":  # a wrapper reads what it wraps
            if function.__name__ in _IMPURE_RLX:
                self._unknown()
            return (code, *[self.value(c.cell_contents) for c in function.__closure__ or ()])
        reads = _reads(code)
        if reads is None:
            self._unknown()
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        values: list[Hashable] = []
        for is_global, name, attributes in reads:
            if not is_global:
                try:
                    values.append(self._resolved(cells[name].cell_contents, attributes))
                except ValueError:  # an empty cell
                    self._unknown()
            elif name in function.__globals__:
                values.append(self._resolved(function.__globals__[name], attributes))
            elif name in _PURE_BUILTINS or _is_exception(getattr(builtins, name, None)):
                values.append(name)
            else:
                self._unknown()
        if function.__defaults__ or function.__kwdefaults__:
            values += [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        attached = {k: v for k, v in function.__dict__.items() if k != "__wrapped__"}
        return (code, *values, *([self.value(attached)] if attached else []))

    def _resolved(self, value: Any, attributes: Sequence[str]) -> Any:
        """Return the key of `value`, or of what the attributes of a module lead to."""
        if not isinstance(value, ModuleType):
            return self.value(value)
        for attribute in attributes:
            is_numpy = value.__name__.split(".")[0] == "numpy"
            if is_numpy and (attribute in _IMPURE_NUMPY or value.__name__ in ("numpy.random", "numpy.testing")):
                self._unknown()
            value = getattr(value, attribute, None)
            if not isinstance(value, ModuleType):
                return self.value(value)
        self._unknown()  # the module itself is passed on

    def _class(self, kind: type) -> Hashable:
        """Return the key of a class: the functions that its instances may call."""
        if kind in self._classes:
            return ("class again", self._classes[kind])
        self._classes[kind] = len(self._classes)
        module = kind.__module__
        if module in ("builtins", "numpy", "math") or module.startswith("rlx.") or _is_exception(kind):
            return kind
        values: list[Hashable] = [kind]
        for base in kind.__mro__:
            if base.__module__ in ("builtins", "typing", "collections", "abc"):
                continue
            for name, member in vars(base).items():
                if isinstance(member, (staticmethod, classmethod)):
                    member = member.__func__
                members = [member.fget, member.fset] if isinstance(member, property) else [member]
                for part in members:
                    if not _is_generated(name, part):
                        values.append((name, self.value(part)))
        return tuple(values)


class TypeReader(Reader):
    """Builds keys of arguments alone: classes are what they are, and static data is compared as it is."""

    def _class(self, kind: type) -> Hashable:
        return kind

    def _static(self, static: Any) -> Hashable:
        return typed(static)


def typed(static: Any) -> Hashable:
    """Return hashable data together with its types: 1, 1.0 and True are equal, but a function may tell them apart."""
    return (tuple, *map(typed, static)) if type(static) is tuple else (type(static), static)


def _is_exception(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, BaseException) and x.__module__ in ("builtins", "rlx.errors")


_CLASS_DATA_NAMES = (
    "__annotations__ __annotate__ __annotate_func__ __annotations_cache__ __dict__ __doc__ __module__ __qualname__ "
    "__weakref__ __slots__ __dataclass_fields__ __dataclass_params__ __match_args__ __firstlineno__ "
    "__static_attributes__ _fields _field_defaults __orig_bases__ __abstractmethods__ _abc_impl"
)
_CLASS_DATA = set(_CLASS_DATA_NAMES.split())


def _is_generated(name: str, member: Any) -> bool:
    """Whether a member of a class was written by Python, such as the `__init__` of a dataclass."""
    if name in _CLASS_DATA or isinstance(member, (GetSetDescriptorType, MemberDescriptorType, type(None))):
        return True
    if type(member).__module__ == "collections" or type(member).__name__ == "_tuplegetter":  # a field of a named tuple
        return True
    function = getattr(member, "__wrapped__", member)  # __repr__ of a dataclass
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__")
    return code is not None and (code.co_filename == "<string>" or module in ("dataclasses", "collections", "typing"))


# -- what code reads --------------------------------------------------------------------------------------------------
Read = tuple[bool, str, tuple[str, ...]]  # whether it is a global, its name, and the attributes read from it


@functools.lru_cache(maxsize=4096)
def _reads(code: CodeType) -> tuple[Read, ...] | None:
    """Return the globals and closure variables that code reads; None if it may have side effects."""
    reads: dict[Read, None] = {}
    return tuple(reads) if _scan(code, frozenset(code.co_freevars), reads) else None


def _scan(code: CodeType, outside: frozenset[str], reads: dict[Read, None]) -> bool:
    """Add what `code` and the functions inside it read; False if it may have side effects."""
    is_global, name = False, ""
    attributes: tuple[str, ...] = ()

    def close() -> None:
        if name:
            reads[is_global, name, attributes] = None

    for instruction in dis.get_instructions(code):
        op, argument = instruction.opname, instruction.argval
        if op in _IMPURE_OPS or (op in ("STORE_DEREF", "DELETE_DEREF") and argument in outside):
            return False
        if op in _BETWEEN:
            continue
        if op in ("LOAD_ATTR", "LOAD_METHOD") and name:
            attributes = (*attributes, argument)
            continue
        close()
        name, attributes = "", ()
        if op == "LOAD_GLOBAL":
            is_global, name = True, argument
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF") and argument in outside:
            is_global, name = False, argument
    close()
    return all(_scan(c, outside, reads) for c in code.co_consts if isinstance(c, CodeType))
