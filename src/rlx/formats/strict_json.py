"""Strict parser for untrusted JSON.

Rejects input that parsers disagree on or that is disproportionately costly: too many bytes or values, deep nesting,
invalid UTF-8, duplicate members, NaN and Infinity, lone surrogates.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from rlx.errors import FormatError
from rlx.formats.tensor_file import broken, quoted

MAX_BYTES = 100_000_000  # the safetensors library's limit for its header
MAX_VALUES = 1 << 22
# Also matches an unclosed string to the end, so that the scan is always linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.S)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(
    source: bytes | memoryview, file: Path, *, at: int = 0, max_values: int = MAX_VALUES, infinity: bool = False
) -> Any:
    """Parse `source`, which begins at byte `at` of `file`.

    `infinity` allows the number `Infinity`, which Python writes into configurations.
    """
    if len(source) > MAX_BYTES:
        raise broken(file, "JSON", at=at, expected=f"at most {MAX_BYTES} bytes", actual=len(source))
    data = bytes(source)
    _check_values(data, file, at, max_values)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise broken(file, "JSON is not UTF-8", at=at + error.start, actual=f"byte {data[error.start]:#04x}") from error

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise broken(file, f"JSON has two members {quoted(twice)} in one object", at=at or None)
        return members

    def constant(name: str) -> float:
        if infinity and name == "Infinity":
            return math.inf
        raise broken(file, "JSON", at=at or None, expected="a number", actual=name)

    try:
        value = json.loads(text, object_pairs_hook=members, parse_constant=constant)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        where = at + len(text[: error.pos].encode())
        raise broken(file, f"not JSON, {error.msg[:80]}", at=where) from error
    except RecursionError as error:
        raise broken(file, "JSON is nested too deeply", at=at or None) from error
    except UnicodeEncodeError as error:
        raise broken(file, "JSON has half of a surrogate pair", at=at or None) from error
    except FormatError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise broken(file, "JSON has a number that is too long", at=at or None) from error


def _check_values(data: bytes, file: Path, at: int, max_values: int) -> None:
    def values(text: bytes) -> int:
        return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")

    # The quick count includes commas and brackets inside strings; remove those only if it is too high.
    count = values(data)
    if count > max_values:
        count = values(_STRING.sub(b"", data))
    if count > max_values:
        raise broken(file, "JSON", at=at or None, expected=f"at most {max_values} values", actual=count)
