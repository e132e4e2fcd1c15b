"""Whether a file that was just written is the model: it is read again, and the graphs of both are compared."""

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
from rlx.flow.flow import BuiltModel
from rlx.flow.init import WantedWeights
from rlx.formats.tensor_file import quoted
from rlx.models.config import leaves
from rlx.models.load import Checkpoint, open_checkpoint

POSITIONS = 256  # of the graphs that are compared, unless windows or RoPE change further on


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside a path that takes its place when all went well: what is there may be mapped."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".saving-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def check_same(checkpoint: Checkpoint, wanted: Any, written: Path) -> None:
    """Raise CapabilityError, with the fields at fault, for a file that gives another graph than `wanted`."""
    found = open_checkpoint(written)
    found.file.close()
    wanted, other = _rounded(wanted), _rounded(found.config)
    positions = _positions(wanted)
    first = _graph(checkpoint, wanted, positions, checkpoint.rope_factors)
    second = _graph(checkpoint, other, positions, found.rope_factors)
    if first.module == second.module and _same_tables(first, second):
        return
    apart = []
    written_values = {leaf.name: other.value(leaf) for leaf in leaves(type(other))}
    for leaf in leaves(type(wanted)):  # those that by themselves give another graph
        mine = wanted.value(leaf)
        theirs = written_values.get(leaf.name, mine)
        if mine != theirs:
            changed = _graph(checkpoint, wanted.changed(**{leaf.name: theirs}), positions, checkpoint.rope_factors)
            if changed.module != first.module or not _same_tables(changed, first):
                apart.append(f"{leaf.metadata.get('hf') or leaf.name} ({quoted(mine)})")
    raise CapabilityError(f"save: {found.file.format} has no words for {', '.join(apart) or 'a setting of this model'}")


def _same_tables(first: BuiltModel, second: BuiltModel) -> bool:
    tables, others = first.params.computed, second.params.computed
    return tables.keys() == others.keys() and all(
        np.allclose(tables[name], others[name], rtol=1e-5, atol=1e-6) for name in tables
    )


def _positions(c: Any) -> int:
    """So many that windows and lengths at which RoPE changes are seen."""
    windows = [c.window(i) or 0 for i in range(c.layers)] if hasattr(c, "window") else []
    limit = c.rope.limit if hasattr(c, "rope") and getattr(c, "turns", True) else None
    longest: int = c.context
    return min(longest, max(POSITIONS, *(size + 1 for size in (*windows, limit or 0))))


def _rounded(c: Any) -> Any:
    """With numbers as GGUF has them."""
    values = {leaf.name: c.value(leaf) for leaf in leaves(type(c))}
    return c.changed(**{name: float(np.float32(v)) for name, v in values.items() if isinstance(v, float)})


def _graph(checkpoint: Checkpoint, c: Any, positions: int, factors: Array | None) -> BuiltModel:
    """The graph of a configuration, whatever its weights are."""
    return checkpoint.family.flow(c, positions, factors).build(WantedWeights())
