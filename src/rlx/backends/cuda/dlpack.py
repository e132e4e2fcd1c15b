"""DLPack: sharing GPU arrays with other libraries without a copy, in both directions."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from rlx.errors import BindError, DTypeError

if TYPE_CHECKING:
    from rlx.backends.cuda.gpu import Gpu
    from rlx.backends.cuda.memory import CudaArray

NAME, TAKEN = b"dltensor", b"used_dltensor"  # of a capsule, before and after somebody takes what is in it
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # by NumPy's kind
BFLOAT = 4
KINDS = {code: kind for kind, code in CODES.items()}


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
_set_name = _python.PyCapsule_SetName
_set_name.argtypes = (ctypes.py_object, ctypes.c_char_p)
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


class Borrowed:
    """Memory of another library, which gets it back when nothing here refers to it any more."""

    def __init__(self, device: Gpu, record: _Managed) -> None:
        self.gpu, self._record = device, record
        self.address = int(record.tensor.data or 0) + int(record.tensor.byte_offset)
        self.size = 0  # none of it is ours

    def __del__(self) -> None:
        try:
            self.gpu.synchronize()  # runs that read it are over; the library may reuse it on another stream
            if self._record.deleter:
                self._record.deleter(ctypes.byref(self._record))
        except Exception:  # the process is ending
            return


def borrow(value: Any, device: Gpu) -> CudaArray | None:
    """An array that shares the memory of another library's array on this GPU; None if it is not there.

    The library lets the stream of this GPU wait for its own work on the array.
    """
    from rlx.backends.cuda.memory import DLPACK_CUDA, CudaArray

    place = getattr(value, "__dlpack_device__", None)
    if place is None or tuple(map(int, place())) != (DLPACK_CUDA, device.index):
        return None
    capsule = value.__dlpack__(stream=device.stream)
    if not _is_valid(id(capsule), NAME):
        raise BindError(f"dlpack: {type(value).__name__} gives a capsule of another version than 0")
    record = _Managed.from_address(_pointer(id(capsule), NAME))
    _set_name(capsule, TAKEN)
    memory, tensor = Borrowed(device, record), record.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    element = _element_type(tensor.dtype)
    strides = tuple(tensor.strides[i] * element.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    array = CudaArray(shape, element, device, memory, strides=strides)
    if not array.is_contiguous:
        raise BindError(f"dlpack: strides {strides} of {element.name}{list(shape)}", hint="pass a contiguous array")
    return array


def _element_type(kind: _DataType) -> np.dtype[Any]:
    if kind.lanes == 1 and kind.code == BFLOAT and kind.bits == 16:
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    if kind.lanes == 1 and kind.code in KINDS and kind.bits in (8, 16, 32, 64):
        name = "bool" if KINDS[kind.code] == "b" else f"{KINDS[kind.code]}{kind.bits // 8}"
        return np.dtype(name)
    raise DTypeError(f"dlpack: element type {kind.code} of {kind.bits} bits and {kind.lanes} lanes is not known")
