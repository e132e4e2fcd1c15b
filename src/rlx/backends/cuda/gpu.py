"""One GPU: a thin layer over NVIDIA's driver API. Memory, copies, modules, launches, CUDA graphs.

All work of a process on a GPU goes to one stream, in order, so memory may be reused as soon as the launch that reads it
has been enqueued. `Gpu.lock` keeps the enqueued work of a run together.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.cuda import transfers
from rlx.backends.cuda.nvrtc import compile_source, version
from rlx.backends.cuda.targets import CudaTarget, nearest_target
from rlx.backends.cuda.wheels import require_wheels
from rlx.errors import CapabilityError, KernelError, ResourceError
from rlx.fork_safe_locks import Lock, cached_property

Graph = Any  # an instantiated CUDA graph
Function = Any  # a kernel of a loaded module


def _mib(size: int) -> str:
    return f"{-(-size // 2**20):,} MiB"


class Gpu:
    """A device, its primary context and its stream."""

    _separate = False  # whether the next kernel waits for all earlier ones

    def __init__(self, index: int) -> None:
        self.index = index
        self.lock = Lock(reentrant=True)
        self._cu = require_wheels().driver
        self._device = self._call(self._cu.cuDeviceGet, index)
        self._context = self._call(self._cu.cuDevicePrimaryCtxRetain, self._device)
        with self._current():
            self._stream = self._call(self._cu.cuStreamCreate, self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._keep_freed_memory()
        self.name = self._call(self._cu.cuDeviceGetName, 256, self._device).split(b"\0")[0].decode()
        self._functions: dict[str, Function] = {}
        self._shared: dict[str, int] = {}  # dynamic shared memory that kernels may take
        self._modules: list[Any] = []

    # -- facts --
    def _attribute(self, name: str) -> int:
        kind = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call(self._cu.cuDeviceGetAttribute, kind, self._device))

    @cached_property
    def target(self) -> CudaTarget:
        """What code for this GPU is generated for."""
        capability = 10 * self._attribute("COMPUTE_CAPABILITY_MAJOR") + self._attribute("COMPUTE_CAPABILITY_MINOR")
        return nearest_target(
            capability,
            processors=self._attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=self._attribute("L2_CACHE_SIZE"),
        )

    @property
    def total_bytes(self) -> int:
        return int(self._call(self._cu.cuDeviceTotalMem, self._device))

    def free_bytes(self) -> int:
        """Bytes that can be allocated: free ones, and those that the pool has kept."""
        with self._current():
            free, _ = self._call(self._cu.cuMemGetInfo)
            attribute = self._cu.CUmemPool_attribute
            held = self._call(
                self._cu.cuMemPoolGetAttribute, self._pool, attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
            )
            used = self._call(self._cu.cuMemPoolGetAttribute, self._pool, attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        return int(free) + int(held) - int(used)

    # -- calls --
    def _call(self, function: Any, *args: Any) -> Any:
        """Calls a function of the driver; returns its result, or raises."""
        error, *results = function(*args)
        if error != self._cu.CUresult.CUDA_SUCCESS:
            raise self._error(function.__name__, error)
        return results[0] if len(results) == 1 else tuple(results)

    def _error(self, where: str, error: Any) -> Exception:
        _, name = self._cu.cuGetErrorName(error)
        _, about = self._cu.cuGetErrorString(error)
        what = f"{(name or b'').decode()}, {(about or b'').decode()}"
        if error == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return ResourceError(f"cuda:{self.index}: {where}: {what}", hint="a smaller model, context or batch")
        return KernelError(f"cuda:{self.index}: {where}: {what}", hint="an earlier launch may have caused it")

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the context current in this thread."""
        (error,) = self._cu.cuCtxSetCurrent(self._context)
        if error != self._cu.CUresult.CUDA_SUCCESS:
            raise self._error("cuCtxSetCurrent", error)
        yield

    # -- memory --
    def _keep_freed_memory(self) -> None:
        """The pool keeps what is freed, so that allocating again takes a microsecond."""
        self._pool = self._call(self._cu.cuDeviceGetDefaultMemPool, self._device)
        attribute = self._cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self._call(self._cu.cuMemPoolSetAttribute, self._pool, attribute, self._cu.cuuint64_t(2**63))

    def allocate(self, size: int, owner: str = "an array") -> int:
        """Allocates bytes; returns their address."""
        with self.lock, self._current():
            full = self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            error, address = self._cu.cuMemAllocAsync(max(size, 1), self._stream)
            if error == full:  # what was freed may be in pieces, and a pool that has failed keeps what it got
                self.trim()
                error, address = self._cu.cuMemAllocAsync(max(size, 1), self._stream)
            if error == full:
                self.trim()
                free, total = _mib(self.free_bytes()), _mib(self.total_bytes)
                message = f"cuda:{self.index}: {owner} asks for {_mib(size)}, {free} of {total} are free"
                raise ResourceError(message, hint="a smaller model, context or batch")
            if error != self._cu.CUresult.CUDA_SUCCESS:
                raise self._error("cuMemAllocAsync", error)
            return int(address)

    def free(self, address: int) -> None:
        """Frees memory once the work enqueued so far has ended."""
        with self.lock, self._current():
            self._call(self._cu.cuMemFreeAsync, address, self._stream)

    def trim(self) -> None:
        """Returns memory that the pool keeps to the device."""
        with self.lock, self._current():
            self._call(self._cu.cuStreamSynchronize, self._stream)
            self._call(self._cu.cuMemPoolTrimTo, self._pool, 0)

    def upload(self, address: int, source: Array) -> None:
        """Copies a contiguous host array to the device. The array may change as soon as this returns."""
        if source.nbytes:
            transfers.upload(self, address, source)

    def download(self, target: Array, address: int) -> None:
        """Copies device memory to a contiguous host array, after all work enqueued so far."""
        if target.nbytes:
            transfers.download(self, target, address)

    def start_upload(self, address: int, source: int, size: int) -> None:
        """Enqueues a copy from host memory, which stays as it is until the copy is over if it is pinned."""
        with self.lock, self._current():
            self._call(self._cu.cuMemcpyHtoDAsync, address, source, size, self._stream)

    def start_download(self, target: int, address: int, size: int) -> None:
        """Enqueues a copy to pinned host memory."""
        with self.lock, self._current():
            self._call(self._cu.cuMemcpyDtoHAsync, target, address, size, self._stream)

    @cached_property
    def slots(self) -> transfers.PinnedSlots:
        """Pinned host memory for copies."""
        return transfers.PinnedSlots(self)

    def pin(self, size: int) -> Array:
        """Allocates pinned host memory, which lives as long as the process."""
        with self._current():
            address = int(self._call(self._cu.cuMemHostAlloc, size, 0))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def copy(self, target: int, source: int, size: int) -> None:
        if size:
            with self.lock, self._current():
                self._call(self._cu.cuMemcpyDtoDAsync, target, source, size, self._stream)

    def clear(self, address: int, size: int) -> None:
        """Fills bytes with zeros."""
        if size:
            with self.lock, self._current():
                self._call(self._cu.cuMemsetD8Async, address, 0, size, self._stream)

    # -- kernels --
    def function(self, name: str) -> Function | None:
        """A kernel that has been loaded, by name."""
        return self._functions.get(name)

    def build(self, source: str, arch: str) -> bytes:
        """Compiles a translation unit."""
        return compile_source(source, arch).code

    def load(self, cubin: bytes, names: dict[str, int]) -> None:
        """Loads kernels; `names` has the bytes of dynamic shared memory that each may take."""
        with self.lock, self._current():
            module = self._call(self._cu.cuModuleLoadData, cubin)
            self._modules.append(module)
            for name, shared in names.items():
                function = self._call(self._cu.cuModuleGetFunction, module, name.encode())
                # Kernels with other shares of shared memory never run on one processor at the same time.
                share = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                self._call(self._cu.cuFuncSetAttribute, function, share, 100)
                self._functions[name] = function
                self.allow_shared(name, shared)

    def allow_shared(self, name: str, shared: int) -> None:
        """Lets a kernel take at least so much dynamic shared memory, besides what it declares itself."""
        if shared > self._shared.get(name, 0):
            with self.lock, self._current():
                attribute = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call(self._cu.cuFuncSetAttribute, self._functions[name], attribute, shared)
                self._shared[name] = shared

    def launch(self, function: Function, grid: tuple[int, int, int], threads: int, shared: int, words: Array) -> None:
        """Enqueues a kernel with one parameter: the struct `words` (64-bit integers)."""
        cu = self._cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = self._stream
        if self.target.capability >= 90 and not self._separate:
            config.attrs = [self._overlap]
            config.numAttrs = 1
        self._separate = False
        pointers = np.array([words.ctypes.data], np.uint64)
        self._call(cu.cuLaunchKernelEx, config, function, pointers.ctypes.data, 0)

    def separate(self) -> None:
        """Lets the next kernel start only when all earlier ones have ended.

        Kernels read weights before they wait for inputs, so an earlier program that computes weights must be over.
        """
        self._separate = True

    @cached_property
    def _overlap(self) -> Any:
        """Programmatic dependent launch: the kernel may start before the one before it has ended."""
        attribute = self._cu.CUlaunchAttribute()
        attribute.id = self._cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def activate(self) -> None:
        """Makes the context current in this thread, for a series of launches."""
        (error,) = self._cu.cuCtxSetCurrent(self._context)
        if error != self._cu.CUresult.CUDA_SUCCESS:
            raise self._error("cuCtxSetCurrent", error)

    # -- graphs --
    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Records what is enqueued inside; afterwards the list holds the graph."""
        cu, graphs = self._cu, list[Graph]()
        with self.lock, self._current():
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            self._call(cu.cuStreamBeginCapture, self._stream, mode)
            try:
                yield graphs
            finally:
                graph = self._call(cu.cuStreamEndCapture, self._stream)
            graphs.append(self._call(cu.cuGraphInstantiate, graph, 0))
            self._call(cu.cuGraphDestroy, graph)

    def replay(self, graph: Graph) -> None:
        with self.lock, self._current():
            self._call(self._cu.cuGraphLaunch, graph, self._stream)

    def destroy(self, graph: Graph) -> None:
        with self.lock, self._current():
            self._call(self._cu.cuGraphExecDestroy, graph)

    # -- events --
    def mark(self, event: Any = None) -> Any:
        """Enqueues an event, a new one unless one is given: it is over when the work enqueued so far is."""
        with self.lock, self._current():
            if event is None:
                event = self._call(self._cu.cuEventCreate, self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._call(self._cu.cuEventRecord, event, self._stream)
            return event

    def is_over(self, event: Any) -> bool:
        (error,) = self._cu.cuEventQuery(event)
        return bool(error == self._cu.CUresult.CUDA_SUCCESS)

    def wait(self, event: Any) -> None:
        """Waits for an event."""
        with self._current():
            self._call(self._cu.cuEventSynchronize, event)

    # -- time --
    def synchronize(self) -> None:
        """Waits for all work enqueued so far."""
        with self._current():
            self._call(self._cu.cuStreamSynchronize, self._stream)

    def event(self) -> Any:
        """Enqueues a time stamp."""
        with self.lock, self._current():
            event = self._call(self._cu.cuEventCreate, 0)
            self._call(self._cu.cuEventRecord, event, self._stream)
            return event

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two events, which are over."""
        milliseconds = self._call(self._cu.cuEventElapsedTime, start, end)
        return float(milliseconds) / 1e3

    def release(self, event: Any) -> None:
        self._call(self._cu.cuEventDestroy, event)

    @property
    def stream(self) -> int:
        """The stream's handle, for other libraries."""
        return int(self._stream)


@functools.cache
def gpu(index: int = 0) -> Gpu:
    """The GPU with this index, as CUDA_VISIBLE_DEVICES counts them."""
    count = gpu_count()
    if index >= count:
        raise CapabilityError(f"cuda: device {index} is asked for, {count} are here, counted from 0")
    return Gpu(index)


@functools.cache
def gpu_count() -> int:
    """Number of GPUs; raises CapabilityError if there is no driver or no GPU."""
    cu = require_wheels().driver
    try:
        (error,) = cu.cuInit(0)
    except Exception as problem:  # the driver's library is missing
        hint = "install NVIDIA's driver, or use device='cpu'"
        raise CapabilityError("cuda: this machine has no NVIDIA driver (libcuda)", hint=hint) from problem
    if error != cu.CUresult.CUDA_SUCCESS:
        _, name = cu.cuGetErrorName(error)
        hint = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'"
        raise CapabilityError(f"cuda: no GPU can be used: {(name or b'').decode()}", hint=hint)
    _check_driver_version(cu)
    _, count = cu.cuDeviceGetCount()
    if not count:
        raise CapabilityError("cuda: this machine has no GPU", hint="check nvidia-smi, or use device='cpu'")
    return int(count)


def _check_driver_version(cu: Any) -> None:
    """A driver older than the bindings' major version cannot load what their NVRTC compiles."""
    _, driver = cu.cuDriverGetVersion()
    compiler = int(version().split(".")[0])
    if driver // 1000 < compiler:
        have = f"{driver // 1000}.{driver % 1000 // 10}"
        other = ".venv/bin/pip install -e '.[cuda12]', or " if driver >= 12000 else ""
        hint = f"{other}a newer driver"
        raise CapabilityError(f"cuda: the driver is for CUDA {have}, the compiler for CUDA {compiler}", hint=hint)
