"""Fast calls: repeats the previous run on new data with a single call of a CPython builtin.

`function` creates that builtin (as if written in C) from the driver's `repeat` and a block that describes the previous
run. The builtin looks the inputs up, compares them with the block, allocates or reuses outputs, and runs the driver
without the GIL. If anything differs, it does nothing and returns None.
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
# A list of outputs; None if the run needs the slow path; False if a kernel has reported a fault.
Repeat = Callable[[object], "list[Array] | Literal[False] | None"]

# Offsets in objects, in bytes: of CPython builds with a GIL, and of NumPy arrays. `usable` verifies them.
REFERENCES, TYPE = 0, 8
DATA, RANK, SIZES, ELEMENT, FLAGS, WEAK = 16, 24, 32, 56, 64, 72
C_CONTIGUOUS, OWNS, WRITEABLE = 0x1, 0x4, 0x400

# The table through which the code calls CPython and refers to objects.
FUNCTIONS = (
    "PyDict_Size", "PyDict_GetItemWithError", "PyErr_Clear", "PyList_New", "PyList_GetItem", "PyList_SetItem",
    "PyObject_CallObject", "Py_IncRef", "Py_DecRef", "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
OBJECTS = {"dict": dict, "array": np.ndarray, "empty": np.empty, "none": None, "false": False}
API = {name: 8 * i for i, name in enumerate((*FUNCTIONS, *OBJECTS))}

# The block, in bytes: the driver's request, a head, and the arrays of `HELD`, `INPUTS`, `OUTPUTS` and `MOVED`.
TABLE, JOB, WORDS, REUSED, REUSES, INPUT_COUNT, OUTPUT_COUNT, MOVED_COUNT, HELD, INPUTS, OUTPUTS, MOVED = range(
    8 * REQUEST_WORDS, 8 * (REQUEST_WORDS + 12), 8
)
HEAD_WORDS = REQUEST_WORDS + 12
NAME, DTYPE, MASK, AXES, SHAPE = range(0, 40, 8)  # of an input; an output's "name" is the arguments of `empty`
LEAF_WORDS, MOVED_WORDS = 5, 3  # a moved word: its position, the number of the input or output, and an offset


class Results(NamedTuple):
    """Shape and element type of each output, and the arrays that later runs may reuse, if `reuses`."""

    types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    reused: list[Array | None]
    reuses: bool


@functools.cache
def usable() -> bool:
    """Whether CPython and NumPy objects have the memory layout that the code expects."""
    if sys.implementation.name != "cpython" or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    array = np.zeros((3, 5), np.float32)[:2]
    place = id(array)

    def at(offset: int, kind: Any = ctypes.c_int64) -> int:
        return int(kind.from_address(offset).value)

    before = at(place + REFERENCES, ctypes.c_int32)
    more = [array] * 7
    counted = at(place + REFERENCES, ctypes.c_int32) - before == len(more)
    fields = at(place + TYPE), at(place + DATA), at(place + RANK, ctypes.c_int32), at(place + ELEMENT)
    if not counted or fields != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype)):
        return False
    unknown, weak = at(place + WEAK), weakref.ref(array)
    if (unknown, at(place + WEAK)) != (0, id(weak)):
        return False
    sizes = at(place + SIZES)
    return (at(sizes), at(sizes + 8)) == array.shape and at(place + FLAGS, ctypes.c_int32) == array.flags.num


def block(
    request: Words, job: int, words: int, specs: Sequence[InputSpec], arrays: Sequence[Array], results: Results,
    moved: Sequence[tuple[int, int, int]],
) -> Words:  # fmt: skip
    """The block that `repeat` reads, for a run like the one just made with `arrays`.

    `job` is the address of the word that holds the job's address, `words` that of the argument words; the words in
    `moved` hold the addresses of inputs and, numbered after them, of outputs. The caller keeps all arguments alive.
    """
    output_count = len(results.types)
    held = HEAD_WORDS
    inputs = held + len(specs) + output_count
    outputs = inputs + LEAF_WORDS * len(specs)
    moves = outputs + LEAF_WORDS * output_count
    at = moves + MOVED_WORDS * len(moved)
    leaves: list[tuple[object, np.dtype[Any], int, tuple[int, ...]]] = [
        (leaf.name, leaf.dtype, C_CONTIGUOUS | (WRITEABLE if leaf.written else 0), array.shape)
        for leaf, array in zip(specs, arrays, strict=True)
    ]
    # A caller may have changed shape, type or writability of an output before releasing it.
    leaves += [(type_, type_[1], C_CONTIGUOUS | OWNS | WRITEABLE, type_[0]) for type_ in results.types]
    words_of_block = np.zeros(at + sum(len(shape) for *_, shape in leaves), np.int64)
    start = int(words_of_block.ctypes.data)
    words_of_block[:REQUEST_WORDS] = request
    words_of_block[REQUEST_WORDS:HEAD_WORDS] = [
        _table().ctypes.data, job, words, id(results.reused), results.reuses, len(specs), output_count,
        len(moved), *(start + 8 * part for part in (held, inputs, outputs, moves)),
    ]  # fmt: skip
    for i, (name, dtype, mask, shape) in enumerate(leaves):
        row = [id(name), id(dtype), mask, len(shape), start + 8 * at]
        words_of_block[inputs + LEAF_WORDS * i : inputs + LEAF_WORDS * (i + 1)] = row
        words_of_block[at : at + len(shape)] = shape
        at += len(shape)
    words_of_block[moves : moves + MOVED_WORDS * len(moved)] = np.array(moved, np.int64).reshape(-1)
    return words_of_block


def function(code: int, block: Words) -> Repeat:
    """Creates a builtin of one argument, the mapping of inputs. It keeps the block alive, but not its pointees."""
    builtin: Repeat = _new_function()(ctypes.addressof(_definition(code)), block, None)
    return builtin


@functools.cache
def _table() -> Words:
    places = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in FUNCTIONS]
    table = np.array([*places, *map(id, OBJECTS.values())], np.int64)
    for known in (table, *OBJECTS.values()):
        _never_free(known)
    return table


def _never_free(known: object) -> None:
    """Leaks a reference: functions may outlive this module and be called late during interpreter shutdown."""
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
