"""Mapped files: changes are detected, and the table lists every map."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from rlx.errors import FormatError
from rlx.formats import mapped_file
from rlx.formats.mapped_file import END, LENGTH, PATH, START, TABLE
from rlx.formats.tensor_file import FileBytes, open_bytes

SIZE = 10_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(SIZE))
    return path


def check(opened: FileBytes) -> None:
    (only,) = opened.maps
    only.check()


def test_a_file_that_stays_as_it_is_is_fine(file: Path) -> None:
    opened = open_bytes(file)
    file.read_bytes()
    os.utime(file, ns=(1, file.stat().st_mtime_ns))  # the time of access
    file.chmod(0o400)
    check(opened)


def test_a_file_of_another_size_is_refused(file: Path) -> None:
    opened = open_bytes(file)
    os.truncate(file, 7)
    with pytest.raises(FormatError, match=r"weights.bin: the file has changed .*: it had 10000 bytes, now 7") as caught:
        check(opened)
    assert any("load the model again" in note for note in caught.value.notes)


def test_a_file_that_was_overwritten_is_refused(file: Path) -> None:
    os.utime(file, ns=(0, 1_700_000_000_123_456_789))
    opened = open_bytes(file)
    with open(file, "r+b") as handle:
        handle.write(b"other")
    with pytest.raises(FormatError, match=r"it was modified at 2023-11-1\d \d\d:\d\d:\d\d\.123456789, now at 20"):
        check(opened)


@pytest.mark.parametrize("change", ["removed", "renamed", "replaced"])
def test_a_file_that_lost_its_name_is_fine(file: Path, change: str) -> None:
    opened = open_bytes(file)
    match change:
        case "removed":
            file.unlink()
        case "renamed":
            file.rename(file.with_name("other"))
        case "replaced":
            other = file.with_name("other")
            other.write_bytes(b"new")
            other.replace(file)
    check(opened)
    assert opened.array(0, SIZE).sum() == 0


def test_a_file_that_was_renamed_and_then_cut_short_is_refused(file: Path) -> None:
    opened = open_bytes(file)
    os.truncate(file.rename(file.with_name("other")), 0)
    with pytest.raises(FormatError, match="it had 10000 bytes, now 0"):
        check(opened)


def test_a_file_that_was_read_whole_has_no_map(file: Path) -> None:
    assert open_bytes(file, mapped=False).maps == []


def rows() -> list[list[int]]:
    return [row for row in TABLE.tolist() if row[START]]


def test_the_table_has_maps_as_long_as_there_is_a_view_of_them(file: Path) -> None:
    gc.collect()
    before, descriptors = rows(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    opened = open_bytes(file)
    (row,) = [row for row in rows() if row not in before]
    start = opened.array(0, SIZE).ctypes.data
    assert (row[START], row[END]) == (start, start + SIZE)
    (only,) = opened.maps
    assert (row[PATH], row[LENGTH]) == (only._name.ctypes.data, len(str(file)))
    assert bytes(only._name) == os.fsencode(file)
    part = opened.array(10, 20)
    del opened, only
    assert row in rows()
    del part
    assert rows() == before
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors


def test_more_maps_than_the_table_has_room_for_are_good_maps(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "SLOTS", 0)
    monkeypatch.setattr(mapped_file, "_freed", [])
    before = rows()
    opened = open_bytes(file)
    check(opened)
    assert rows() == before and np.array_equal(opened.array(0, 3), [0, 0, 0])
    del opened
    assert mapped_file._freed == []
