"""Weights of a loaded model: binding them to compiled graphs, and their digest."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Device
from rlx.errors import ResourceError
from rlx.formats import TensorFile
from rlx.free_memory import show
from rlx.hub.progress import progress_bar
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.flow.built import BuiltModel
    from rlx.models.load import Checkpoint

SLOW = 10**9  # bytes of weights from which loading them shows a progress bar
SAMPLE = 4096  # bytes at both ends of a tensor that the digest covers


def bind_weights(
    compiled: CompiledGraph, built: BuiltModel, checkpoint: Checkpoint, arrays: dict[str, Array],
    first: CompiledGraph | None,
) -> None:  # fmt: skip
    """Bind a model's weights to one of its graphs and pack them, so that the first call is as fast as later ones.

    `arrays` are the weights of its other graphs, and is extended: weights derived from the same arrays are shared.
    `first` is the graph that the model was loaded with, whose derived weights may come from a snapshot.
    """
    for name in compiled.param_types:
        if name not in arrays:
            array = built.params.get(name)
            arrays[name] = checkpoint.weights.array(name) if array is None else array
        compiled.set_param(name, arrays[name])
    if first is not None:
        first.share_derived(dict(arrays))
    with release_pages(checkpoint.file), _upload_bar(compiled, arrays) as uploaded:
        compiled.prepare(uploaded)


def require_room(checkpoint: Checkpoint, device: Device) -> None:
    """Raise ResourceError if a device with memory of its own has less free than the weights take."""
    free = device.backend.allocator.free_bytes()
    needed = sum(checkpoint.file.entry(name).nbytes for name in checkpoint.file.names)
    if free is not None and needed > free:
        message = f"{checkpoint.path.name}: its weights take {show(needed)}, {show(free)} are free on {device}"
        raise ResourceError(message, hint="device='cpu', a smaller model, or a GPU with more memory")


@contextmanager
def _upload_bar(compiled: CompiledGraph, arrays: Mapping[str, Array]) -> Iterator[Callable[[str, int], None] | None]:
    """Show the progress of uploading many weights on a terminal; yields a function for each that is uploaded."""
    total = sum(arrays[name].nbytes for name in compiled.param_types)
    if compiled.allocator.is_host or total < SLOW:
        yield None
        return
    sizes: dict[str, int] = {}
    with progress_bar(f"loading to {compiled.device}", total) as tick:

        def uploaded(name: str, size: int) -> None:
            sizes[name] = size  # several programs may read one weight
            if tick is not None:
                tick(sum(sizes.values()))

        yield uploaded


@contextmanager
def release_pages(file: TensorFile) -> Iterator[None]:
    """Keep releasing the file's pages while weights are packed into copies.

    All weights are packed in one call, after which the whole file would be in memory in addition to the copies.
    """
    done = threading.Event()

    def sweep() -> None:
        while not done.wait(0.02):
            file.release()

    sweeper = threading.Thread(target=sweep, name="rlx-release", daemon=True)
    sweeper.start()
    try:
        yield
    finally:
        done.set()
        sweeper.join()
        file.release()


def weights_digest(file: TensorFile) -> str:
    """A digest of the names, shapes and types of all tensors, and the bytes at both ends of each."""
    digest = hashlib.blake2b(digest_size=8)
    file = file.stored
    for name in file.names:
        entry, raw = file.entry(name), file.array(name).reshape(-1).view(np.uint8)
        digest.update(f"{name} {entry.shape} {entry.storage.name}\n".encode())
        digest.update(raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    return digest.hexdigest()
