"""The program cache: keys of compiled graphs, and the encoding of records as cache entries."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from rlx.backends import cache_folder
from rlx.backends.base import backend_of
from rlx.dtypes import dtype
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph
from rlx.profile import CompileProfile
from rlx.runtime import record_json
from rlx.target import Target

_SIZES = struct.Struct("<QQ")  # bytes of the index of arrays, bytes of the records
DAMAGED = (FormatError, struct.error, TypeError, ValueError)  # raised by a damaged entry
T = TypeVar("T")


@dataclass(frozen=True)
class Keys:
    """Cache keys of a graph's plan and of its compiled code, which also depends on the compiler.

    None for user-defined ops and passes, whose source is not part of the key, and without a cache folder.
    """

    plan: str | None
    code: str | None

    @classmethod
    def of(cls, graph: Graph, target: Target, profile: CompileProfile) -> Keys:
        if cache_folder.current().folder is None or cache_folder.has_foreign_passes() or not is_builtin(graph):
            return cls(None, None)
        parts = (graph.fingerprint(), graph.name, str(target), profile.key(), cache_folder.source_digest())
        return cls(_digest(*parts), _digest(*parts, backend_of(target).identity(target)))


def _digest(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def is_builtin(graph: Graph) -> bool:
    """Whether all ops, including those of bodies, are built in."""
    return all(
        node.definition.is_builtin and all(is_builtin(v) for v in node.attrs.values() if isinstance(v, Graph))
        for node in graph.nodes
    )


def pack(record: Any, classes: Mapping[str, type]) -> bytes:
    """Encode a record: an index of its arrays, its values as JSON, the arrays."""
    text, arrays = record_json.encode(record, classes)
    index = json.dumps([[dtype(a.dtype).name, a.shape] for a in arrays]).encode()
    values = text.encode()
    contents = (np.ascontiguousarray(a).tobytes() for a in arrays)
    return b"".join([_SIZES.pack(len(index), len(values)), index, values, *contents])


def unpack(data: bytes, classes: Mapping[str, type], kind: type[T]) -> T:
    """Decode the bytes of `pack`."""
    index_bytes, value_bytes = _SIZES.unpack_from(data)
    at = _SIZES.size + index_bytes
    index, values = json.loads(data[_SIZES.size : at]), data[at : at + value_bytes]
    at += value_bytes
    arrays = []
    for name, shape in index:
        array = np.frombuffer(data, dtype(name).numpy, math.prod(shape), at).reshape(shape)
        arrays.append(array)
        at += array.nbytes
    record = record_json.decode(values, classes, arrays, "program cache")
    if not isinstance(record, kind):
        raise FormatError(f"program cache: expected a {kind.__name__}, found {type(record).__name__}")
    return record
