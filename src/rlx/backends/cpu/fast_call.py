"""Repeats: a run that differs from the one before in its data alone, as one call of a function of CPython.

`function` makes such a function (a builtin, as those written in C are) of the driver's `repeat` and a block that says
what the run was. It looks the inputs up, compares them with what the block says, finds memory for the outputs, and
runs the driver without the GIL. Where anything is other than it was, it does nothing and gives None.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import InputSpec
from rlx.backends.cpu.driver import REQUEST_WORDS

Words = np.ndarray[Any, np.dtype[np.int64]]
# A list of outputs; None where the run must be made in another way; False where a kernel has found a fault.
Repeat = Callable[[object], "list[Array] | Literal[False] | None"]

# Objects in memory, in bytes: those of CPython's builds that have a GIL, and NumPy's arrays. `usable` looks at them.
REFERENCES, TYPE = 0, 8
DATA, RANK, SIZES, ELEMENT, FLAGS, WEAK = 16, 24, 32, 56, 64, 72
C_CONTIGUOUS, OWNS, WRITEABLE = 0x1, 0x4, 0x400

# A table that the code calls CPython by, and finds objects in.
FUNCTIONS = (
    "PyDict_Size", "PyDict_GetItemWithError", "PyErr_Clear", "PyList_New", "PyList_GetItem", "PyList_SetItem",
    "PyObject_CallObject", "Py_IncRef", "Py_DecRef", "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
OBJECTS = {"dict": dict, "array": np.ndarray, "empty": np.empty, "none": None, "false": False}
API = {name: 8 * i for i, name in enumerate((*FUNCTIONS, *OBJECTS))}

# The block, in bytes: after the driver's request its head, and then what `HELD`, `TAKEN`, `GIVEN` and `MOVED` point to.
TABLE, JOB, WORDS, KEPT, KEEPS, TAKES, GIVES, MOVES, HELD, TAKEN, GIVEN, MOVED = range(
    8 * REQUEST_WORDS, 8 * (REQUEST_WORDS + 12), 8
)
HEAD_WORDS = REQUEST_WORDS + 12
NAME, DTYPE, MASK, AXES, SHAPE = range(0, 40, 8)  # of an input; of an output, whose name are arguments of `empty`
LEAF_WORDS, MOVED_WORDS = 5, 3  # a moved word: its position, what was given or made, and an offset


class Results(NamedTuple):
    """What outputs are: the shape and element type of each, and those that are kept, if they are, for other runs."""

    types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    kept: list[Array | None]
    keeps: bool


@functools.cache
def usable() -> bool:
    """Whether objects are in memory where the code looks for them."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    array = np.zeros((3, 5), np.float32)[:2]
    place = id(array)

    def at(offset: int, kind: Any = ctypes.c_int64) -> int:
        return int(kind.from_address(offset).value)

    before = at(place + REFERENCES, ctypes.c_int32)
    more = [array] * 7
    counted = at(place + REFERENCES, ctypes.c_int32) - before == len(more)
    found = at(place + TYPE), at(place + DATA), at(place + RANK, ctypes.c_int32), at(place + ELEMENT)
    if not counted or found != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype)):
        return False
    unknown, weak = at(place + WEAK), weakref.ref(array)
    if (unknown, at(place + WEAK)) != (0, id(weak)):
        return False
    sizes = at(place + SIZES)
    return (at(sizes), at(sizes + 8)) == array.shape and at(place + FLAGS, ctypes.c_int32) == array.flags.num


def block(
    request: Words, job: int, words: int, taken: Sequence[InputSpec], arrays: Sequence[Array], results: Results,
    moved: Sequence[tuple[int, int, int]],
) -> Words:  # fmt: skip
    """What `repeat` reads, for a run that has been made with `arrays`.

    `job` is the address of the word that has the job's, `words` that of the words of arguments; those that `moved`
    names have the addresses of inputs and, numbered on, of outputs. The caller holds on to all that is given.
    """
    gives = len(results.types)
    held = HEAD_WORDS
    inputs = held + len(taken) + gives
    outputs = inputs + LEAF_WORDS * len(taken)
    moves = outputs + LEAF_WORDS * gives
    at = moves + MOVED_WORDS * len(moved)
    leaves: list[tuple[object, np.dtype[Any], int, tuple[int, ...]]] = [
        (leaf.name, leaf.dtype, C_CONTIGUOUS | (WRITEABLE if leaf.written else 0), array.shape)
        for leaf, array in zip(taken, arrays, strict=True)
    ]
    # A caller may have given another shape or type to an output, or made it read-only, before letting go of it.
    leaves += [(made, made[1], C_CONTIGUOUS | OWNS | WRITEABLE, made[0]) for made in results.types]
    found = np.zeros(at + sum(len(shape) for *_, shape in leaves), np.int64)
    start = int(found.ctypes.data)
    found[:REQUEST_WORDS] = request
    found[REQUEST_WORDS:HEAD_WORDS] = [
        _table().ctypes.data, job, words, id(results.kept), results.keeps, len(taken), gives,
        len(moved), *(start + 8 * part for part in (held, inputs, outputs, moves)),
    ]  # fmt: skip
    for i, (name, dtype, mask, shape) in enumerate(leaves):
        row = [id(name), id(dtype), mask, len(shape), start + 8 * at]
        found[inputs + LEAF_WORDS * i : inputs + LEAF_WORDS * (i + 1)] = row
        found[at : at + len(shape)] = shape
        at += len(shape)
    found[moves : moves + MOVED_WORDS * len(moved)] = np.array(moved, np.int64).reshape(-1)
    return found


def function(code: int, block: Words) -> Repeat:
    """A builtin of one argument, the mapping of inputs. It holds on to the block, but not to what that points to."""
    made: Repeat = _new_function()(ctypes.addressof(_definition(code)), block, None)
    return made


@functools.cache
def _table() -> Words:
    places = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in FUNCTIONS]
    table = np.array([*places, *map(id, OBJECTS.values())], np.int64)
    for known in (table, *OBJECTS.values()):
        _never_free(known)
    return table


def _never_free(known: object) -> None:
    """Functions may outlive this module, and be called when the interpreter has let go of nearly everything."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(known))


class _Definition(ctypes.Structure):
    """PyMethodDef"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_ONE_ARGUMENT = 0x8  # METH_O


@functools.cache
def _definition(code: int) -> _Definition:
    definition = _Definition(b"repeat", code, _ONE_ARGUMENT, None)
    _never_free(definition)
    return definition


@functools.cache
def _new_function() -> Callable[..., Any]:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return prototype(("PyCFunction_NewEx", ctypes.pythonapi))
