"""Exports with another manifest whose digest is right, as somebody who knows the format would write them."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.runtime import container

HOSTILE: list[Any] = [
    0, 1, -1, 7, 2**31, 2**63, 2**64, -(2**63), "", None, [], {}, "x", [[]], 1.5, True, "f32[n]", "f32[99999999]",
    "../x", [1], {"a": 1},
]  # fmt: skip


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest of a file, and all bytes behind it."""
    data = path.read_bytes()
    _, _, size, _ = container._HEAD.unpack_from(data)
    written = data[container._HEAD.size : container._HEAD.size + size]
    return json.loads(written), data[container._start(written) :]


def write(path: Path, manifest: Any, body: bytes) -> Path:
    """A file with this manifest and the right digest of it."""
    written = json.dumps(manifest, indent=1).encode()
    digest = hashlib.blake2b(written, digest_size=container._DIGEST).digest()
    head = container._HEAD.pack(container.MAGIC, container.VERSION, len(written), digest)
    path.write_bytes((head + written).ljust(container._start(written), b"\0") + body)
    return path


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything is in a manifest."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in inner:
        yield (*place, key)
        yield from places(member, (*place, key))


def changed(manifest: Any, place: tuple[Any, ...], number: int) -> tuple[str, Any]:
    """What was done, and the manifest with something else, or nothing, at a place."""
    result = copy.deepcopy(manifest)
    holder = result
    for key in place[:-1]:
        holder = holder[key]
    if number == 0:
        del holder[place[-1]]
        return f"without {place}", result
    value = random.Random(f"{place}{number}").choice(HOSTILE)
    holder[place[-1]] = copy.deepcopy(value)
    return f"{value!r} at {place}", result
