"""Mutated model files: each one opens and can be read to its last byte, or raises `FormatError`.

`python tests/formats/fuzz.py FIRST COUNT MEGABYTES` runs cases in a separate process with a memory limit.
"""

from __future__ import annotations

import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from model_files import l_file, read_everything, replace, s_entry, s_file, small_gguf, small_safetensors

from rlx.errors import FormatError
from rlx.formats import TensorFile, open_gguf, open_llama2c, open_safetensors

INDEX = b'{"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}'
SEEDS: dict[str, tuple[bytes, Callable[[Path], TensorFile], str]] = {
    "gguf v3": (small_gguf(3), open_gguf, "m.gguf"),
    "gguf v1": (small_gguf(1), open_gguf, "m.gguf"),
    "safetensors": (small_safetensors(), open_safetensors, "m.safetensors"),
    "index": (INDEX, open_safetensors, "model.safetensors.index.json"),
    "llama2c": (l_file(0)[0], open_llama2c, "m.bin"),
    "llama2c v1": (l_file(1, shared=False)[0], open_llama2c, "m.bin"),
}
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 12, 16, 31, 32, 33, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
           2**32, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip
TOKENS = (b"[", b"]", b"{", b"}", b",", b":", b'"', b"null", b"true", b"-1", b"1e9", b"NaN", b"\\ud800", b"../",
          b"\xff", b"F4", b"F64", b"0", b"[]", b"{}", b"__metadata__", b'"a"')  # fmt: skip


# -- mutations -------------------------------------------------------------------------------------------------------
def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def splice(rng: random.Random, data: bytearray) -> None:
    """Copy a slice over or into another place, or remove one."""
    first, length = rng.randrange(len(data)), rng.choice((1, 4, 8, 12, 24, 100))
    piece = data[first : first + length]
    at = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            data[at : at + len(piece)] = piece
        case 1:
            data[at:at] = piece
        case _:
            del data[at : at + length]


def number(rng: random.Random, data: bytearray) -> None:
    """Overwrite a field that may be a count, length, size or offset."""
    value = rng.choice((*NUMBERS, len(data), len(data) - 1, len(data) + 1, rng.randrange(len(data))))
    code = rng.choice("IQ")
    size = struct.calcsize(code)
    at = rng.randrange(max(1, len(data) - size))
    if rng.random() < 0.5:
        at -= at % 4
    data[at : at + size] = struct.pack("<" + code, value % 2 ** (8 * size))


def token(rng: random.Random, data: bytearray) -> None:
    """Change one number or word of the JSON, and keep the header's length right."""
    start = 0 if data.startswith(b"{") else 8
    end = len(data) if start == 0 else min(len(data), 8 + struct.unpack_from("<Q", data)[0])
    tokens = list(re.finditer(rb"-?\d+|\w+|[^\w\s]", data[start:end]))
    if not tokens:
        return
    where = rng.choice(tokens)
    by = rng.choice((*TOKENS, *(str(n).encode() for n in NUMBERS), rng.choice(tokens)[0]))
    data[start + where.start() : start + where.end()] = by
    if start:
        struct.pack_into("<Q", data, 0, end - 8 + len(by) - len(where[0]))


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    is_json = data.startswith(b"{") or data[8:9] == b"{"
    ways = [flip, cut, splice, number, *([token] * 6 if is_json else [number] * 2)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(changed) > 8:
            rng.choice(ways)(rng, changed)
    return bytes(changed)


# -- cases -----------------------------------------------------------------------------------------------------------
def run(name: str, cases: range, folder: Path) -> Counter[str]:
    """Count opened and rejected files; other outcomes raise with the case number."""
    data, open_file, file_name = SEEDS[name]
    for shard, tensor in (("one", "a"), ("two", "c")):
        replace(folder / f"{shard}.safetensors", s_file({tensor: s_entry("F32", (1,), 0, 4)}, bytes(4)))
    outcomes: Counter[str] = Counter()
    for case in cases:
        path = replace(folder / file_name, mutated(random.Random(f"{name} {case}"), data))
        begin = time.process_time()
        try:
            with open_file(path) as file:
                read_everything(file)
            outcomes["opened"] += 1
        except FormatError as error:
            assert len(str(error)) < 2000, f"{name}, case {case}: a message of {len(str(error))} characters"
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"{name}, case {case}")
            raise
        spent = time.process_time() - begin
        assert spent < 5, f"{name}, case {case}: took {spent:.1f} s"
    return outcomes


def main(first: int, count: int, megabytes: int) -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        for name in SEEDS:
            print(name, dict(run(name, range(first, first + count), Path(folder))))


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
