"""Strict JSON: plain input is parsed, everything else is rejected with its position."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import FormatError
from rlx.formats.strict_json import _STRING, parse_json

FILE = Path("x.json")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(SCALARS | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


@given(JSON, st.booleans())
def test_what_json_writes_comes_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), FILE) == value


@given(st.binary(max_size=60) | st.text('{}[]",:\\u0d8e1-truefalsn', max_size=60).map(str.encode))
def test_any_bytes_parse_as_json_does_or_are_refused(data: bytes) -> None:
    try:
        value = parse_json(data, FILE)
    except FormatError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.json, byte 0: not JSON, Expecting value"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        ('["é", x]'.encode(), "byte 7: not JSON"),
        (b'["\xe9"]', "byte 2: JSON is not UTF-8: found byte 0xe9"),
        (b'{"a": {"b": 1, "b": 1}}', "two members 'b' in one object"),
        (b"[-Infinity]", "expected a number, found -Infinity"),
        (b"[1" + b"0" * 9000 + b"]", "a number that is too long"),
        (b'["\\udfff"]', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
    ids=range(12),
)
def test_what_is_not_plain_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_json(data, FILE)


def test_values_are_counted_outside_of_strings() -> None:
    many = json.dumps([",[{" * 1000, 'q"uo\\ted,', "\\"]).encode()
    assert parse_json(many, FILE, max_values=5) == [",[{" * 1000, 'q"uo\\ted,', "\\"]
    with pytest.raises(FormatError, match="at most 5 values, found 8"):
        parse_json(b"[1,2,3,[4],5,6]", FILE, max_values=5)


def test_the_scan_for_strings_is_linear() -> None:
    begin = time.process_time()
    for tail in (b"", b"\\", b'"'):
        _STRING.sub(b"", b'"' + b'\\"' * 1_000_000 + tail)
    assert time.process_time() - begin < 2


def test_a_name_given_twice_among_very_many_is_found_quickly() -> None:
    data = b"{" + b"".join(b'"%d":0,' % i for i in range(200_000)) + b'"7":0}'
    begin = time.process_time()
    with pytest.raises(FormatError, match="two members '7'"):
        parse_json(data, FILE)
    assert time.process_time() - begin < 2
