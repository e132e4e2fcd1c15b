"""Whether a file that was just written is the model: it is read again, and the graphs of both are compared."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CapabilityError
from rlx.flow.flow import BuiltModel
from rlx.flow.init import WantedWeights
from rlx.formats.tensors import quoted
from rlx.models.load import Checkpoint, open_checkpoint

Array = np.ndarray[Any, Any]
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
    for field in dataclasses.fields(wanted):  # those that by themselves give another graph
        mine = getattr(wanted, field.name)
        theirs = getattr(other, field.name, mine)
        if mine != theirs:
            changed = _graph(checkpoint, replace(wanted, **{field.name: theirs}), positions, checkpoint.rope_factors)
            if changed.module != first.module or not _same_tables(changed, first):
                apart.append(f"{field.metadata.get('hf') or field.name} ({quoted(mine)})")
    raise CapabilityError(f"save: {found.file.format} has no words for {', '.join(apart) or 'a setting of this model'}")


def _same_tables(first: BuiltModel, second: BuiltModel) -> bool:
    tables, others = first.params.made, second.params.made
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
    floats = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if isinstance(getattr(c, f.name), float)}
    return replace(c, **{name: float(np.float32(value)) for name, value in floats.items()})


def _graph(checkpoint: Checkpoint, c: Any, positions: int, factors: Array | None) -> BuiltModel:
    """The graph of a configuration, whatever its weights are."""
    return checkpoint.family.flow(c, positions, factors).build(WantedWeights())
