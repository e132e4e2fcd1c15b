"""The backend protocol: what a device must answer so that the rest of rlx can compile, run and inspect programs on it.

A backend turns LIR programs into executables and owns the memory of its device. `backend(name)` finds one: those of
rlx by the table below, others through the entry point group `rlx.backends`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError, nearest
from rlx.fork_safe_locks import Lock
from rlx.operand_layouts import Layout
from rlx.target import Target

if TYPE_CHECKING:  # a process that only runs a graph needs none of these
    from rlx.backends.reports import Ceilings, Code, RunMemory, Trace
    from rlx.ir.graph import Graph
    from rlx.lir.kernels import Kernel
    from rlx.lir.program import Program

Key = tuple[int, ...]  # the sizes of a program's symbols, in the order of `Executable.symbols`
ArrayType = tuple[tuple[int, ...], np.dtype[Any]]  # shape and element type
MAX_THREADS = 4096  # a request for more is a typo
ENTRY_POINTS = "rlx.backends"
BUILT_IN = {
    "cpu": "rlx.backends.cpu.backend:CpuBackend",  # machine code for this processor, on all its cores
    "reference": "rlx.backends.reference:ReferenceBackend",  # NumPy, one op at a time: the oracle for tests
    "toy": "rlx.backends.toy:ToyBackend",  # Python and NumPy from LIR: a backend small enough to read
}


def bytes_of(types: Iterable[ArrayType]) -> int:
    """Bytes of all these arrays."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)


# -- memory ----------------------------------------------------------------------------------------------------------
class Buffer(Protocol):
    """Memory of a device with an element type and a shape: a NumPy array on the host, a `DeviceArray` elsewhere."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class DeviceArray(ABC):
    """An array in memory of a device, as users hold it. `np.asarray` downloads it; DLPack hands it to other libraries.

    A subclass adds what holds the memory, and `__dlpack__` of the memory itself where other libraries can read it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def numpy(self) -> Array:
        """A copy in host memory."""

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
        if copy is False:
            raise ValueError("a copy is needed: this array is in memory of a device")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return (1, 0)  # host memory: what `__dlpack__` gives

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"<{type(self).__name__} {self.dtype.name}[{sizes}]>"


class Allocator(ABC):
    """Memory of a device: allocates buffers, and copies between them and the host."""

    is_host = False  # whether its buffers are NumPy arrays

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new buffer of zeros."""

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any | None:
        """A buffer of zeros that takes memory only where it is written; None where the device has no such memory."""
        return None

    @abstractmethod
    def upload(self, array: Array) -> Any:
        """The array in memory of the device. Host devices give the array itself."""

    @abstractmethod
    def download(self, buffer: Any) -> Array:
        """The contents as a NumPy array. Host devices give the buffer itself."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Overwrite `target`, of equal shape and element type. Both may be buffers of this device or host arrays."""

    @abstractmethod
    def part(self, buffer: Any, *index: int | slice) -> Any:
        """A view of the elements that NumPy would select; the steps of slices are 1."""

    @abstractmethod
    def clear(self, buffer: Any) -> None:
        """Fill a buffer with zeros."""

    @abstractmethod
    def long_lived(self, types: Sequence[ArrayType]) -> list[Any]:
        """Uninitialised buffers for weights, which are allocated together and read again and again."""

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether a program of this device can read `value` where it is."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None where the device does not say."""
        return None


class HostAllocator(Allocator):
    """Host memory: buffers are NumPy arrays, and nothing is copied that need not be."""

    is_host = True

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.zeros(shape, dtype)

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        from rlx.backends.reserved_memory import reserved_zeros

        return reserved_zeros(shape, dtype)

    def upload(self, array: Array) -> Array:
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


class Executable(ABC):
    """A program ready to run on a device, from any number of threads at once. `bind` gives it weights."""

    target: Target
    threads: int
    symbols: tuple[str, ...]  # whose sizes a run is given
    reads: tuple[str, ...]  # names of the weights that the program reads

    @property
    @abstractmethod
    def program(self) -> Program:
        """The LIR program. One that was loaded from an image may have to be planned again."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Any]:
        """The buffers that are bound, by name."""

    @abstractmethod
    def bind(self, weights: Mapping[str, Any]) -> None:
        """Read these buffers as weights from the next run on; runs in progress keep theirs."""

    @property
    def asks_program(self) -> bool:
        """Whether runs need `program`, so that it is stored beside an image."""
        return False

    @abstractmethod
    def run(self, key: Key, inputs: Sequence[Any]) -> list[Any]:
        """The outputs for inputs of the declared types, in order, all in memory of the device."""

    def run_again(self, inputs: object) -> list[Any] | None:
        """A shortcut: the outputs if `inputs` (a mapping) are like those of the last run; None if `run` must do it."""
        return None

    def outputs(self, key: Key) -> list[ArrayType]:
        """Shapes and element types of the outputs at these sizes; programs that pack weights are asked for it."""
        device = self.target.device
        raise CapabilityError(f"outputs: device {device!r} does not say their sizes", hint="compile for device cpu")

    def units(self, key: Key) -> list[int]:
        """How many parts each launch is cut into at these sizes, which may run at the same time."""
        raise CapabilityError(f"units: device {self.target.device!r} has no launches", hint="compile for device cpu")

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[Any], Trace]:
        """Like `run`, and says when each launch ran."""
        raise CapabilityError(f"trace: device {self.target.device!r} keeps no times", hint="compile for device cpu")

    def memory(self, key: Key) -> RunMemory:
        """The memory that a run with these sizes takes."""
        raise CapabilityError(f"memory: device {self.target.device!r} plans none", hint="compile for device cpu")

    def reserved_bytes(self) -> int:
        """Memory held for the next runs: arenas and scratch."""
        return 0

    def image(self) -> Any | None:
        """What `Backend.load` makes it from in another process: a record of `Backend.image_modules`; None without."""
        return None


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


# -- backends --------------------------------------------------------------------------------------------------------
class Backend(ABC):
    """A kind of device. Subclass it, and name the subclass in the entry point group `rlx.backends`."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, type]] = {}  # settings that it takes in `profile.backend`, and their types
    allocator: Allocator = HOST
    interprets: ClassVar[bool] = False  # whether it runs MIR graphs (`interpret`) rather than LIR programs

    def __init__(self, index: int = 0) -> None:
        """There is one for each device of a machine: `cuda:1` has index 1."""
        self.index = index

    # -- targets
    @abstractmethod
    def targets(self) -> tuple[Target, ...]:
        """The targets that this machine runs, the best first. Raises CapabilityError if there is no such device."""

    def known_targets(self) -> Mapping[str, Target]:
        """All targets that code can be generated for, by name."""
        return {target.name: target for target in self.targets()}

    def layouts(self) -> Mapping[str, type[Layout]]:
        """The layouts of operands that its targets ask for, by name; graphs have them in their text."""
        return {}

    def target(self, name: str | None = None) -> Target:
        """The target called `name`, or the one to use if nobody asks for one."""
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
        """Whether programs for a target can be compiled here, also for one that is in no table."""
        return target.device == self.name

    def device_count(self) -> int:
        """How many devices of this kind the machine has."""
        return 1

    @abstractmethod
    def identity(self, target: Target) -> str:
        """What compiled code depends on besides program and sources, such as the compiler's version: a cache key."""

    def versions(self) -> Mapping[str, str]:
        """Versions of what the backend is built on, for `rlx env` and the manifests of exports."""
        return {}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse settings of `profile.backend` that this backend does not have, or that have another type."""
        for name, value in options.items():
            place = f"profile: backend.{self.name}"
            if name not in self.options:
                hint = nearest(name, self.options) or f"known: {', '.join(self.options) or 'none'}"
                raise CapabilityError(f"{place} has no setting {name!r}", hint=hint)
            if type(value) is not self.options[name]:
                raise CapabilityError(f"{place}.{name} is {value!r}, expected {_KINDS[self.options[name]]}")

    # -- compiling
    def interpret(self, graph: Graph) -> Executable:
        """An executable for a MIR graph, for a backend that does without LIR."""
        raise CapabilityError(
            f"compile: device {self.name!r} runs no graphs as they are",
            hint="it compiles LIR (`Backend.compile`)",
        )

    def start_compiler(self, target: Target) -> None:  # noqa: B027
        """A program will come soon: load compilers in the background."""

    def start_compiling(self, programs: Iterable[Program], target: Target) -> None:  # noqa: B027
        """Compile the kernels of these programs in the background; `compile` waits for them."""

    @abstractmethod
    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> Executable:  # fmt: skip
        """An executable. `inputs` allows shortcuts in `run_again`; `long_lived`: outputs become weights."""

    @abstractmethod
    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        """What is generated for kernels, for people: source, or with `assembly` what the machine runs."""

    # -- what is stored
    def image_modules(self) -> Sequence[ModuleType]:
        """The modules whose records (dataclasses) images are made of."""
        return ()

    def load(
        self, image: Any, program: Callable[[], Program], target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> Executable | None:  # fmt: skip
        """The executable of an image; None if its code is no longer in the cache. `program` is called by reports."""
        return None

    def code(self, programs: Iterable[Program], target: Target) -> Code:
        """Compiled kernels for an export."""
        raise CapabilityError(f"export: device {self.name!r} has no machine code", hint="compile for device cpu")

    def adopt(self, code: Code, target: Target) -> None:  # noqa: B027
        """Load the kernels of an export, so that `compile` finds them."""

    def target_from(self, record: Mapping[str, Any]) -> Target:
        """The target that `dataclasses.asdict` made a record of, maybe on another machine."""
        kind = type(self.targets()[0])
        known = {f.name for f in fields(kind)}
        return kind(**{name: value for name, value in record.items() if name in known})

    def check_runs(self, target: Target, where: str) -> None:  # noqa: B027
        """Raise CapabilityError unless this machine runs code for `target`; `where` is the file it came from."""

    # -- looking
    def describe(self) -> Mapping[str, str]:
        """What the backend sees of this machine, for `rlx env`."""
        return {"runs": ", ".join(target.name for target in self.targets())}

    def ceilings(self, target: Target, threads: int) -> Ceilings | None:
        """What the device can do at most; None where nobody has measured it."""
        return None

    def kernels_compiled(self) -> int:
        """How many kernels this process has compiled."""
        return 0

    def trim(self) -> None:  # noqa: B027
        """Return memory to the system that only compiling needed."""

    def catch_bus_errors(self, status: int, before: str, after: str, *, compiling: bool = True) -> None:  # noqa: B027
        """End the process with `status` and a message that names the file when a mapped file is cut short.

        For backends that read mapped files in code of their own. Without `compiling`, only if it takes no time.
        """


# -- finding them ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Device:
    """One device of a backend: `cpu`, `cuda:1`."""

    name: str  # of the backend
    index: int = 0

    @property
    def backend(self) -> Backend:
        return backend(self.name, self.index)

    def __str__(self) -> str:
        return f"{self.name}:{self.index}" if self.index else self.name


_found: dict[tuple[str, int], Backend] = {}
_lock = Lock(reentrant=True)


def backend(name: str, index: int = 0) -> Backend:
    """The backend called `name`, for the device with this index; imported when it is first asked for."""
    found = _found.get((name, index))
    if found is None:
        with _lock:
            found = _found.get((name, index)) or _found.setdefault((name, index), _class(name)(index))
    return found


def backend_of(target: Target) -> Backend:
    """The backend that generates code for a target."""
    return backend(target.device)


def _class(name: str) -> Callable[[int], Backend]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    point = _entry_points().get(name)
    if point is None:
        known = available()
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise CapabilityError(f"device: {name!r} is not known", hint=hint)
    try:
        found = point.load()
    except Exception as error:
        raise CapabilityError(f"device: {name!r} of package {point.value!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise CapabilityError(f"device: {point.value!r} is not a subclass of rlx.backends.base.Backend")
    return found


@functools.cache
def _entry_points() -> Mapping[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def available() -> list[str]:
    """Names of all backends, those of other packages last."""
    return [*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN))]


def device(text: str) -> Device:
    """The device that a text names: `cpu`, `cuda`, `cuda:1`."""
    match = re.fullmatch(r"([^:]+)(?::(\d{1,4}))?", text) if isinstance(text, str) else None
    if match is None:
        raise CapabilityError(f"device: expected a name such as 'cpu' or 'cuda:1', found {text!r}")
    found = Device(match[1], int(match[2] or 0))
    if found.index:
        count = backend(found.name).device_count()
        if found.index >= count:
            have = f"{count} device{'s' * (count != 1)}"
            raise CapabilityError(f"device: {text!r} is asked for, {found.name!r} has {have} here, counted from 0")
    elif found.name not in BUILT_IN:
        backend(found.name)
    return found


def kernels_compiled() -> int:
    """How many kernels this process has compiled, by all backends."""
    return sum(found.kernels_compiled() for (_, index), found in _found.items() if not index)
