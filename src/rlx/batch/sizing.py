"""How many processes, with how many threads each, run a job best on a machine."""

from __future__ import annotations

from typing import Any

from rlx import free_memory
from rlx.backends.base import device as device_named
from rlx.errors import RequestError

# An encoder's activations fit the caches of a core, so a process per core wins: nobody waits for the slowest thread.
# A decoder reads all its weights per step: processes would each read them, threads share them, up to about eight.
DECODER_THREADS = 8
PRIVATE = {"encoder": 300 << 20, "decoder": 1 << 30}  # bytes per process besides the weights, which are shared


def on_host(name: str | None) -> bool:
    """Whether a device computes with the cores of this machine; `auto` counts as one that does."""
    return name in (None, "auto") or device_named(str(name)).backend.allocator.is_host


def choose_workers(
    model: Any, workers: int | str = "auto", threads: int | None = None, device: str | None = None
) -> tuple[int, int]:
    """The number of processes and of threads per process. `model` was loaded with all usable cores."""
    for name, value in (("workers", workers), ("threads", threads)):
        if not (value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)):
            raise RequestError(f"batch: {name} is {value!r}, expected a number from 1 or 'auto'")
    cores: int = model.threads
    if isinstance(workers, int):
        return workers, threads or max(1, cores // workers)
    if not on_host(device):
        return 1, threads or 1  # one process per GPU: it runs one call at a time
    kind = model.facts.kind
    threads = threads or (1 if kind == "encoder" else min(cores, DECODER_THREADS))
    room = free_memory.available()
    most = cores if room is None else max(1, room // PRIVATE[kind])
    return max(1, min(cores // threads, most)), threads
