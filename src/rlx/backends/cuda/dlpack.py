"""DLPack: handing GPU arrays to other libraries without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from rlx.errors import DTypeError

if TYPE_CHECKING:
    from rlx.backends.cuda.memory import CudaArray

NAME = b"dltensor"
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # by NumPy's kind
BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_held: dict[int, Any] = {}  # records that other libraries hold, by address


def _delete(managed: Any) -> None:
    _held.pop(ctypes.addressof(managed.contents), None)


_delete_record = _Deleter(_delete)

# Functions of Python's own interface; a destructor gets the capsule as an address, not as an object.
_python = ctypes.PyDLL(None)
_new_capsule = _python.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _python.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = _python.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _drop_unused(capsule: int) -> None:
    """Runs when a capsule is collected. Who takes one renames it, so this one nobody took."""
    if _is_valid(capsule, NAME):
        _held.pop(_pointer(capsule, NAME), None)


_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop_unused)


def capsule(array: CudaArray) -> Any:
    """A DLPack capsule of an array, which lives until the library that takes it lets go."""
    if array.dtype.name == "bfloat16":
        code = BFLOAT
    elif array.dtype.kind in CODES:
        code = CODES[array.dtype.kind]
    else:
        raise DTypeError(f"dlpack: element type {array.dtype.name} has no form in DLPack")
    rank, size = len(array.shape), array.dtype.itemsize
    shape = (ctypes.c_int64 * rank)(*array.shape)
    strides = (ctypes.c_int64 * rank)(*(s // size for s in array.strides))
    record = _Managed()
    record.tensor = _Tensor(
        array.start, _Device(*array.__dlpack_device__()), rank, _DataType(code, 8 * size, 1), shape, strides, 0
    )
    record.deleter = _delete_record
    address = ctypes.addressof(record)
    _held[address] = (record, shape, strides, array.memory)
    return _new_capsule(address, NAME, ctypes.cast(_destructor, ctypes.c_void_p))
