"""The backend protocol: the interface a device implements so that rlx can compile, run and inspect programs on it.

A backend compiles LIR programs to executables and owns its device's memory. `backend(name)` returns one: built-in
backends from the table below, third-party ones from `register` or the entry point group `rlx.backends`. Each is
imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError, nearest
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.operand_layouts import Layout
from rlx.target import Target

if TYPE_CHECKING:  # not needed by a process that only runs graphs
    from rlx.backends.reports import Ceilings, Code, RunMemory, Trace
    from rlx.ir.graph import Graph
    from rlx.lir.kernels import Kernel
    from rlx.lir.program import Program

Key = tuple[int, ...]  # values of a program's symbols, in the order of `Executable.symbols`
ArrayType = tuple[tuple[int, ...], np.dtype[Any]]  # shape and element type
HOST_DEVICES = ("cpu", "reference", "toy")
MAX_THREADS = 4096  # a request for more is a typo
ENTRY_POINTS = "rlx.backends"
BUILT_IN = {  # in this package
    "cpu": "cpu.backend:CpuBackend",  # machine code for this processor, on all its cores
    "cuda": "cuda.backend:CudaBackend",  # NVIDIA GPUs, through CUDA C
    "reference": "reference:ReferenceBackend",  # NumPy, one op at a time: the oracle for tests
    "toy": "toy:ToyBackend",  # Python and NumPy from LIR: a backend small enough to read
}


def bytes_of(types: Iterable[ArrayType]) -> int:
    """Total bytes of these arrays."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)


# -- memory ----------------------------------------------------------------------------------------------------------
class Buffer(Protocol):
    """Memory of a device with an element type and a shape: a NumPy array on the host, a `DeviceArray` elsewhere.

    `device_of` and `host_view` answer for both kinds.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def device_of(buffer: Buffer) -> str:
    """The device whose memory it is: "cpu" for NumPy arrays."""
    return buffer.device if isinstance(buffer, DeviceArray) else "cpu"


def host_view(buffer: Buffer) -> Array | None:
    """The memory of a buffer as an array, without a copy; None if the host cannot address it."""
    return buffer.host_view() if isinstance(buffer, DeviceArray) else buffer  # type: ignore[return-value]


class DeviceArray(ABC):
    """An array in memory of `device`, as users hold it. `np.asarray` downloads it; DLPack shares it with libraries.

    Subclasses add the memory itself. Where the host can address it, `host_view` makes `np.asarray`, DLPack and the
    buffer protocol (`memoryview`, from Python 3.12 on) free of copies; elsewhere a subclass adds its own `__dlpack__`.
    """

    device: str = "a device"  # its name, such as cuda:1; subclasses say it

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def numpy(self) -> Array:
        """Returns a copy in host memory."""

    def host_view(self) -> Array | None:
        """Returns the memory itself as an array; None if the host cannot address it."""
        return None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        view = self.host_view()
        changes_type = dtype is not None and np.dtype(dtype) != self.dtype
        if copy is False and (view is None or changes_type):
            raise ValueError(f"a copy is needed: {self.dtype.name} in memory of {self.device}")
        array = self.numpy() if view is None or (copy and not changes_type) else view
        return array.astype(dtype) if changes_type else array

    def __dlpack__(self, **options: Any) -> Any:
        view = self.host_view()
        return (self.numpy() if view is None else view).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return (1, 0)  # host memory: `__dlpack__` returns a host copy

    def __buffer__(self, flags: int) -> memoryview:
        view = self.host_view()
        if view is None:
            raise BufferError(f"{self!r}: the host cannot address memory of {self.device}; np.asarray downloads it")
        return memoryview(view)  # type: ignore[arg-type]  # NumPy declares no buffer before 3.12

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"<{type(self).__name__} {self.dtype.name}[{sizes}]>"


class Allocator(ABC):
    """Allocates device memory and copies between it and the host. Its methods take buffers of its own kind."""

    is_host = False  # whether its buffers are NumPy arrays

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Allocates a buffer of zeros."""

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer | None:
        """Allocates zeros that take memory only where they are written; None if the device cannot do that."""
        return None

    @abstractmethod
    def upload(self, array: Array, owner: str = "an array") -> Buffer:
        """Copies an array to device memory. Host devices return the array itself. `owner` is named in errors."""

    @abstractmethod
    def download(self, buffer: Any) -> Array:
        """Returns the contents as a NumPy array. Host devices return the buffer itself."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Overwrites `target`, of the same shape and element type. Both may be buffers of the device or host arrays."""

    @abstractmethod
    def part(self, buffer: Any, *index: int | slice) -> Buffer:
        """Returns a view of the elements that NumPy indexing would select; slices have step 1."""

    @abstractmethod
    def clear(self, buffer: Any) -> None:
        """Fills a buffer with zeros."""

    @abstractmethod
    def long_lived(self, types: Sequence[ArrayType]) -> Sequence[Buffer]:
        """Allocates uninitialised buffers for weights: allocated together, read by every run."""

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether programs of this device can read `value` in place."""

    def borrow(self, value: object) -> Buffer | None:
        """A buffer that shares the memory of another library's array, if that is on this device; else None."""
        return None

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None if the device does not report it."""
        return None


class HostAllocator(Allocator):
    """Host memory: buffers are NumPy arrays, copied only where necessary."""

    is_host = True

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.zeros(shape, dtype)

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        from rlx.backends.reserved_memory import reserved_zeros

        return reserved_zeros(shape, dtype)

    def upload(self, array: Array, owner: str = "an array") -> Array:
        return array

    def download(self, buffer: Any) -> Array:
        assert isinstance(buffer, np.ndarray)
        return buffer

    def copy(self, source: Any, target: Any) -> None:
        target[...] = source

    def part(self, buffer: Any, *index: int | slice) -> Any:
        return buffer[index]

    def clear(self, buffer: Any) -> None:
        buffer[...] = 0

    def long_lived(self, types: Sequence[ArrayType]) -> list[Array]:
        return [np.empty(shape, dtype) for shape, dtype in types]

    def owns(self, value: object) -> bool:
        return type(value) is np.ndarray


HOST = HostAllocator()


# -- executables -----------------------------------------------------------------------------------------------------
class InputSpec(NamedTuple):
    """An input of an executable: its name, NumPy element type, and whether runs write to it (a state)."""

    name: str
    dtype: np.dtype[Any]
    written: bool


class Enqueued:
    """A run that may still be under way. Its outputs can be inputs of later runs at once."""

    def __init__(self, outputs: list[Any], read: Sequence[int]) -> None:
        self.outputs = outputs
        self._read = tuple(read)  # indices of the outputs that the host will ask for

    def read(self) -> list[Array]:
        """Waits for the run, not for later ones; returns the outputs asked for as NumPy arrays. Raises its faults."""
        return [np.asarray(self.outputs[i]) for i in self._read]


class Executable(ABC):
    """A program ready to run on a device, from any number of threads at once. `bind` sets its weights."""

    target: Target
    threads: int
    symbols: tuple[str, ...]  # symbols whose sizes each run passes as its key
    reads: tuple[str, ...]  # names of the weights that the program reads

    @property
    @abstractmethod
    def program(self) -> Program:
        """The LIR program. An executable loaded from an image may have to rebuild it."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Any]:
        """The bound buffers, by name."""

    @abstractmethod
    def bind(self, weights: Mapping[str, Any]) -> None:
        """Sets the weights for all later runs; runs in progress keep theirs."""

    @property
    def needs_program(self) -> bool:
        """Whether runs need `program`, so that it must be stored with the image."""
        return False

    @abstractmethod
    def run(self, key: Key, inputs: Sequence[Any]) -> list[Any]:
        """Runs on inputs of the declared types, in order. Inputs and outputs are in device memory."""

    def enqueue(self, key: Key, inputs: Sequence[Any], read: Sequence[int]) -> Enqueued:
        """Starts a run, whose outputs with the indices `read` the host will ask for; by default it ends at once."""
        return Enqueued(self.run(key, inputs), read)

    def run_again(self, inputs: object) -> list[Any] | None:
        """Fast path: the outputs if `inputs` (a mapping) have the types of the last run; None if `run` must be used."""
        return None

    def outputs(self, key: Key) -> list[ArrayType]:
        """Shapes and element types of the outputs for these sizes; required of programs that pack weights."""
        device = self.target.device
        raise CapabilityError(f"outputs: device {device!r} does not report output sizes", hint="compile for device cpu")

    def units(self, key: Key) -> list[int]:
        """Number of work units of each launch for these sizes; units may run in parallel."""
        raise CapabilityError(f"units: device {self.target.device!r} has no launches", hint="compile for device cpu")

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[Any], Trace]:
        """Like `run`, and also returns when each launch ran."""
        raise CapabilityError(f"trace: device {self.target.device!r} keeps no times", hint="compile for device cpu")

    def memory(self, key: Key) -> RunMemory:
        """The memory that a run with these sizes takes."""
        raise CapabilityError(f"memory: device {self.target.device!r} plans none", hint="compile for device cpu")

    def reserved_bytes(self) -> int:
        """Memory held for later runs: arenas and scratch."""
        return 0

    def image(self) -> Any | None:
        """A record (of `Backend.image_modules`) from which `Backend.load` rebuilds it in another process, or None."""
        return None


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


# -- backends --------------------------------------------------------------------------------------------------------
class Backend(ABC):
    """A kind of device. Subclass it, and `register` the subclass, or name it in the entry point group `rlx.backends`.

    A subclass sets `name` and implements `targets`, `identity`, `compile` and `kernel_text`; the rest has defaults.
    """

    name: ClassVar[str]  # required: the name of the device, which is also `Target.device` of its targets
    options: ClassVar[Mapping[str, type]] = {}  # settings accepted in `profile.backend`, and their types
    allocator: Allocator = HOST
    is_accelerator: ClassVar[bool] = False  # whether `device="auto"` prefers it to the CPU
    interprets: ClassVar[bool] = False  # whether it runs MIR graphs (`interpret`) rather than LIR programs

    def __init__(self, index: int = 0) -> None:
        """There is one instance per device: `cuda:1` has index 1."""
        self.index = index

    # -- targets
    @abstractmethod
    def targets(self) -> tuple[Target, ...]:
        """The targets that this machine runs, best first. Raises CapabilityError if there is no such device."""

    def known_targets(self) -> Mapping[str, Target]:
        """All targets that code can be generated for, by name."""
        return {target.name: target for target in self.targets()}

    def layouts(self) -> Mapping[str, type[Layout]]:
        """The operand layouts that its targets use, by name; graphs mention them in their text."""
        return {}

    def target(self, name: str | None = None) -> Target:
        """The target called `name`, or the default one."""
        if name is None:
            return self.targets()[0]
        known = self.known_targets()
        if name not in known:
            raise CapabilityError(f"target: {name!r} is not known to {self.name}", hint=nearest(name, known))
        if known[name] not in self.targets():
            runs = ", ".join(t.name for t in self.targets())
            raise CapabilityError(f"target: this machine does not run {name!r}", hint=f"it runs {runs}")
        return known[name]

    def accepts(self, target: Target) -> bool:
        """Whether programs for a target can be compiled here, including targets that are in no table."""
        return target.device == self.name

    def device_count(self) -> int:
        """Number of devices of this kind in the machine."""
        return 1

    @abstractmethod
    def identity(self, target: Target) -> str:
        """Cache key of all that compiled code depends on besides program and sources, such as the compiler version."""

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries the backend builds on, for `rlx env` and export manifests."""
        return {}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Rejects settings of `profile.backend` that are unknown or have the wrong type."""
        for name, value in options.items():
            place = f"profile: backend.{self.name}"
            if name not in self.options:
                hint = nearest(name, self.options) or f"known: {', '.join(self.options) or 'none'}"
                raise CapabilityError(f"{place} has no setting {name!r}", hint=hint)
            if type(value) is not self.options[name]:
                raise CapabilityError(f"{place}.{name} is {value!r}, expected {_KINDS[self.options[name]]}")

    # -- compiling
    def interpret(self, graph: Graph) -> Executable:
        """Returns an executable for a MIR graph, for backends that bypass LIR."""
        raise CapabilityError(
            f"compile: device {self.name!r} does not run MIR graphs",
            hint="it compiles LIR (`Backend.compile`)",
        )

    def start_compiler(self, target: Target) -> None:  # noqa: B027
        """Loads the compiler in the background: a program will be compiled soon."""

    def start_compiling(self, programs: Iterable[Program], target: Target) -> None:  # noqa: B027
        """Compiles the kernels of these programs in the background; `compile` waits for them."""

    @abstractmethod
    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> Executable:  # fmt: skip
        """Compiles a program. `inputs` enables the fast path of `run_again`; `long_lived`: outputs become weights."""

    @abstractmethod
    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        """The code generated for kernels, for people: source, or with `assembly` what the machine runs.

        Of a program: `kernel_text(program.kernels().values(), target)`; of one kernel: `kernel_text([kernel], target)`.
        """

    # -- images and exports
    def image_modules(self) -> Sequence[ModuleType]:
        """The modules that define the records (dataclasses) of images."""
        return ()

    def load(
        self, image: Any, program: Callable[[], Program], target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> Executable | None:  # fmt: skip
        """Loads an executable from an image; None if its code is no longer cached. Reports may call `program`."""
        return None

    def code(self, programs: Iterable[Program], target: Target) -> Code:
        """Returns compiled kernels for an export."""
        raise CapabilityError(f"export: device {self.name!r} has no machine code", hint="compile for device cpu")

    def adopt(self, code: Code, target: Target) -> None:  # noqa: B027
        """Loads the kernels of an export, so that `compile` finds them."""

    def target_from(self, record: Mapping[str, Any]) -> Target:
        """Rebuilds a target from its `dataclasses.asdict` record, possibly written on another machine."""
        kind = type(self.targets()[0])
        known = {f.name for f in fields(kind)}
        return kind(**{name: value for name, value in record.items() if name in known})

    def check_runs(self, target: Target, where: str) -> None:  # noqa: B027
        """Raises CapabilityError unless this machine runs code for `target`; `where` is the file it came from."""

    # -- reports
    def describe(self) -> Mapping[str, str]:
        """Facts about this machine for `rlx env`."""
        return {"runs": ", ".join(target.name for target in self.targets())}

    def ceilings(self, target: Target, threads: int) -> Ceilings | None:
        """Peak rates of the device; None if they have not been measured."""
        return None

    def kernels_compiled(self) -> int:
        """Number of kernels this process has compiled."""
        return 0

    def trim(self) -> None:  # noqa: B027
        """Returns memory that only compiling needed to the system."""

    def catch_bus_errors(self, status: int, before: str, after: str, *, compiling: bool = True) -> None:  # noqa: B027
        """Installs a handler that ends the process with `status` and names the file when a mapped file was truncated.

        For backends whose own code reads mapped files. Without `compiling`, installs it only if it is already compiled.
        """


# -- lookup ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Device:
    """One device of a backend: `cpu`, `cuda:1`."""

    name: str  # name of the backend
    index: int = 0

    @property
    def backend(self) -> Backend:
        return backend(self.name, self.index)

    def __str__(self) -> str:
        return f"{self.name}:{self.index}" if self.index else self.name


_instances: dict[tuple[str, int], Backend] = {}
_registered: dict[str, type[Backend]] = {}
_lock = Lock(reentrant=True)


def backend(name: str, index: int = 0) -> Backend:
    """Returns the backend called `name` for the device with this index, importing it on first use."""
    instance = _instances.get((name, index))
    if instance is None:
        with _lock:
            instance = _instances.get((name, index)) or _instances.setdefault((name, index), _class(name)(index))
    return instance


def register(name: str, kind: type[Backend]) -> None:
    """Makes a backend available as `device=name` in this process. Registering a name again replaces the backend."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\s:]+", name) or name in BUILT_IN:
        raise CapabilityError(
            f"device: {name!r} cannot be registered", hint="a name that is not built in, without colons"
        )
    _check_backend(name, kind, getattr(kind, "__qualname__", repr(kind)))
    with _lock:
        _registered[name] = kind
        for known in [key for key in _instances if key[0] == name]:
            del _instances[known]


def _check_backend(name: str, kind: object, where: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise CapabilityError(f"device: {where!r} is not a subclass of rlx.backends.base.Backend")
    if getattr(kind, "name", None) != name:
        own = getattr(kind, "name", "not set")
        raise CapabilityError(
            f"device: {name!r}: the name of {where!r} is {own}", hint=f'set name = "{name}" in the class'
        )


def backend_of(target: Target) -> Backend:
    """The backend that generates code for a target."""
    return backend(target.device)


def known_target(target: Target | str, device: str | None = None) -> Target:
    """The target called so, of one device or of any, for code that is only generated: this machine need not run it."""
    if isinstance(target, Target):
        return target
    known: dict[str, Target] = {}
    for name in available() if device is None else [device]:
        try:
            known = {**backend(name).known_targets(), **known}
        except CapabilityError:  # a device that is not here and has no table
            if device is not None:
                raise
    if target not in known:
        where = "" if device is None else f" to {device}"
        raise CapabilityError(
            f"target: {target!r} is not known{where}", hint=nearest(str(target), known) or f"known: {', '.join(known)}"
        )
    return known[target]


# Names of other libraries for devices
OTHER_NAMES = {
    "auto": 'rlx.load(..., device="auto") chooses by the size of the model; elsewhere name a device: "cpu", "cuda"',
    "gpu": 'an NVIDIA GPU is device="cuda"; device="auto" takes one if there is room on it',
}
ABSENT = {
    "mps": "there is no backend for Apple's GPUs",
    "metal": "there is no backend for Apple's GPUs",
    "rocm": "there is no backend for AMD's GPUs",
    "tpu": "there is no backend for TPUs",
}


def _class(name: str) -> type[Backend]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(f"rlx.backends.{module}"), attribute)  # type: ignore[no-any-return]
    if name in _registered:
        return _registered[name]
    point = _entry_points().get(name)
    if point is None:
        known = available()
        hint = OTHER_NAMES.get(name) or ABSENT.get(name) or nearest(name, known) or f"known: {', '.join(known)}"
        raise CapabilityError(f"device: {name!r} is not known", hint=hint)
    try:
        loaded = point.load()
    except Exception as error:
        raise CapabilityError(f"device: {name!r} of package {point.value!r} cannot be imported: {error}") from error
    _check_backend(name, loaded, point.value)
    return loaded  # type: ignore[no-any-return]


@functools.cache
def _entry_points() -> Mapping[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def available() -> list[str]:
    """Names of all backends, built-in ones first."""
    return [*BUILT_IN, *sorted({*_registered, *_entry_points()} - set(BUILT_IN))]


def check_tables(names: Iterable[str]) -> None:
    """Rejects tables of `profile.backend` that belong to no device. Tables of `ABSENT` devices are ignored."""
    for name in names:
        if name not in BUILT_IN and name not in ABSENT and name not in available():
            hint = nearest(name, available()) or f"known: {', '.join(available())}"
            raise CapabilityError(f"profile: backend.{name} is the table of no device", hint=hint)


def device(text: str) -> Device:
    """Parses a device name: `cpu`, `cuda`, `cuda:1`."""
    match = re.fullmatch(r"([^:]+)(?::([0-9]{1,4}))?", text) if isinstance(text, str) else None
    if match is None:
        raise CapabilityError(f"device: expected a name such as 'cpu' or 'cuda:1', found {text!r}")
    parsed = Device(match[1], int(match[2] or 0))
    if parsed.index:
        count = backend(parsed.name).device_count()
        if parsed.index >= count:
            have = f"{count} device{'s' * (count != 1)}"
            raise CapabilityError(f"device: {text!r} is asked for, {parsed.name!r} has {have} here, counted from 0")
    elif parsed.name not in BUILT_IN:
        backend(parsed.name)
    return parsed


def automatic(needed: int) -> Device:
    """The device for `device="auto"`: the first accelerator with `needed` free bytes, or the CPU."""
    for name in available():
        if name in HOST_DEVICES or not _class(name).is_accelerator:
            continue
        try:
            free = [backend(name, i).allocator.free_bytes() for i in range(backend(name).device_count())]
        except CapabilityError:  # no such device here, or its packages are missing
            continue
        for index, size in enumerate(free):
            if size is None or size >= needed:
                return Device(name, index)
    return Device("cpu")


def kernels_compiled() -> int:
    """Number of kernels this process has compiled, over all backends."""
    return sum(instance.kernels_compiled() for (_, index), instance in _instances.items() if not index)
