"""How many processes, with how many threads each, run a job best on a machine."""

from __future__ import annotations

from typing import Any

from rlx import free_memory
from rlx.backends.base import device as device_named
from rlx.engine.embedding_model import TOKENS
from rlx.engine.page_pool import MAX_BYTES
from rlx.errors import RequestError

# An encoder's activations fit the caches of a core, so a process per core wins: nobody waits for the slowest thread.
# A decoder reads all its weights per step: processes would each read them, threads share them, up to about eight.
DECODER_THREADS = 8
INTERPRETER = 128 << 20  # bytes of a process that has imported rlx and holds a tokenizer, and a shard with its results
ENCODED = 64  # bytes of activations per token of a call and number of the width, about
SEQUENCES, SEQUENCE = 16, 2048  # that a decoder runs at once, and tokens of each: pages are allocated as they are used


def on_host(name: str | None) -> bool:
    """Whether a device computes with the cores of this machine; `auto` counts as one that does."""
    return name in (None, "auto") or device_named(str(name)).backend.allocator.is_host


def devices_of(name: str | None) -> tuple[str, ...]:
    """The devices that processes are spread over: all GPUs for `cuda`, one for `cuda:1`, none for the host."""
    if name is None or on_host(name):
        return ()
    if ":" in name:
        return (name,)
    return tuple(f"{name}:{i}" for i in range(max(1, device_named(name).backend.device_count())))


def private_bytes(model: Any) -> int:
    """Bytes that each process needs for itself: all but the mapped weights, which processes share."""
    memory = model.memory()
    size: int = INTERPRETER + memory.weights + memory.arena
    if model.facts.kind == "encoder":
        tokens: int = max(TOKENS, model.context)
        return size + ENCODED * int(model.facts.dim) * tokens
    pool = model.caches
    sequences: int = SEQUENCES * pool.bytes_for(min(model.context, SEQUENCE))
    with_prefixes = sequences + min(sequences, MAX_BYTES)
    limit: int = with_prefixes if pool.limit is None else pool.limit
    return size + min(with_prefixes, limit)


def check_counts(workers: int | str, threads: int | None) -> None:
    for name, value in (("workers", workers), ("threads", threads)):
        if not (value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)):
            raise RequestError(f"batch: {name} is {value!r}, expected a number from 1 or 'auto'")


def choose_workers(
    model: Any, workers: int | str = "auto", threads: int | None = None, device: str | None = None
) -> tuple[int, int]:
    """The number of processes and of threads per process. `model` was loaded with all usable cores."""
    check_counts(workers, threads)
    cores: int = model.threads
    if isinstance(workers, int):
        return workers, threads or max(1, cores // workers)
    devices = devices_of(device)
    if devices:
        return len(devices), threads or 1  # a process per GPU, which runs one call at a time
    threads = threads or (1 if model.facts.kind == "encoder" else min(cores, DECODER_THREADS))
    room = free_memory.available()
    most = cores if room is None else (room - model.memory().mapped) // private_bytes(model)
    return max(1, min(cores // threads, most)), threads
