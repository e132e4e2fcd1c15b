"""Weights of a loaded model: binding them to compiled graphs, and their digest."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.formats import TensorFile
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.flow.built import BuiltModel
    from rlx.models.load import Checkpoint

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
    with release_pages(checkpoint.file):
        compiled.prepare()


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
