"""Weights of a loaded model: how they get from its files into compiled graphs, and what tells them from others."""

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
    from rlx.flow.flow import BuiltModel
    from rlx.models.load import Checkpoint

SAMPLE = 4096  # bytes at both ends of a tensor that tell models apart


def bind_weights(
    compiled: CompiledGraph, built: BuiltModel, checkpoint: Checkpoint, arrays: dict[str, Array],
    first: CompiledGraph | None,
) -> None:  # fmt: skip
    """Put a model's weights into one of its graphs and pack them, so that the first call is as quick as the others.

    `arrays` are those of its other graphs, and gets the new ones: what is derived from the same arrays is shared.
    `first` is the graph that the model was loaded with, which may have released them.
    """
    for name in compiled.param_types:
        if name not in arrays:
            made = built.params.get(name)
            arrays[name] = checkpoint.weights.array(name) if made is None else made
        compiled.set_param(name, arrays[name])
    if first is not None:
        first.lend(dict(arrays))
    with releasing(checkpoint.file):
        compiled.prepare()


@contextmanager
def releasing(file: TensorFile) -> Iterator[None]:
    """Keep letting go of the file's pages while weights are packed, which have copies of their own then.

    All of them are packed in one call, and at its end the whole file would be in memory beside its copy.
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
    """Tells models apart: what their tensors are, and the bytes at both ends of each."""
    found = hashlib.blake2b(digest_size=8)
    file = file.stored
    for name in file.names:
        entry, raw = file.entry(name), file.array(name).reshape(-1).view(np.uint8)
        found.update(f"{name} {entry.shape} {entry.storage.name}\n".encode())
        found.update(raw[:SAMPLE].tobytes() + raw[-SAMPLE:].tobytes())
    return found.hexdigest()
