"""Checks a saved model: reads it back and compares its graph with the original's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.errors import CapabilityError
from rlx.flow.built import BuiltModel
from rlx.flow.init import WantedWeights
from rlx.formats.tensor_file import quoted
from rlx.models.config import leaves
from rlx.models.load import Checkpoint, open_checkpoint

POSITIONS = 256  # of the compared graphs, unless windows or RoPE change at later ones


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block succeeds. The old file may be mapped, so it stays intact."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".saving-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def check_same(checkpoint: Checkpoint, wanted: Any, written: Path) -> None:
    """Raise CapabilityError, naming the settings, if a file builds another graph than `wanted`."""
    written_checkpoint = open_checkpoint(written)
    written_checkpoint.file.close()
    wanted, other = _rounded(wanted), _rounded(written_checkpoint.config)
    positions = _positions(wanted)
    first = _graph(checkpoint, wanted, positions, checkpoint.rope_factors)
    second = _graph(checkpoint, other, positions, written_checkpoint.rope_factors)
    if first.module == second.module and _same_tables(first, second):
        return
    lost = []
    written_values = {leaf.name: other.value(leaf) for leaf in leaves(type(other))}
    for leaf in leaves(type(wanted)):  # report those that change the graph on their own
        own_value = wanted.value(leaf)
        written_value = written_values.get(leaf.name, own_value)
        if own_value != written_value:
            changed = _graph(
                checkpoint, wanted.changed(**{leaf.name: written_value}), positions, checkpoint.rope_factors
            )
            if changed.module != first.module or not _same_tables(changed, first):
                lost.append(f"{leaf.metadata.get('hf') or leaf.name} ({quoted(own_value)})")
    raise CapabilityError(
        f"save: {written_checkpoint.file.format} cannot express {', '.join(lost) or 'a setting of this model'}"
    )


def _same_tables(first: BuiltModel, second: BuiltModel) -> bool:
    tables, others = first.params.computed, second.params.computed
    return tables.keys() == others.keys() and all(
        np.allclose(tables[name], others[name], rtol=1e-5, atol=1e-6) for name in tables
    )


def _positions(c: Any) -> int:
    """Enough positions to cover windows and the lengths at which RoPE changes."""
    windows = [c.window(i) or 0 for i in range(c.layers)] if hasattr(c, "window") else []
    limit = c.rope.limit if hasattr(c, "rope") and getattr(c, "turns", True) else None
    longest: int = c.context
    return min(longest, max(POSITIONS, *(size + 1 for size in (*windows, limit or 0))))


def _rounded(c: Any) -> Any:
    """The configuration with floats rounded to f32, as in GGUF."""
    values = {leaf.name: c.value(leaf) for leaf in leaves(type(c))}
    return c.changed(**{name: float(np.float32(v)) for name, v in values.items() if isinstance(v, float)})


def _graph(checkpoint: Checkpoint, c: Any, positions: int, factors: Array | None) -> BuiltModel:
    """The graph of a configuration, with weights of any type."""
    return checkpoint.family.flow(c, positions, factors).build(WantedWeights())
