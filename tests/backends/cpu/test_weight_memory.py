"""Memory for weights: side by side, on cache lines, in huge pages where there is enough of it."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.backends.cpu.memory import HUGE, HUGE_FROM, LINE, alloc_packed
from rlx.formats.tensor_file import open_bytes
from rlx.host_memory import address, release, root_buffer

Types = list[tuple[tuple[int, ...], np.dtype[np.generic]]]
SMALL: Types = [((3, 5), np.dtype(np.float32)), ((0,), np.dtype(np.int8)), ((7,), np.dtype(np.int8))]
LARGE: Types = [((HUGE_FROM // 4,), np.dtype(np.float32)), ((5,), np.dtype(np.uint8)), ((2, 9), np.dtype(np.int64))]


@pytest.mark.parametrize("types", [[], SMALL, LARGE, [*SMALL, *LARGE]], ids=["none", "small", "large", "both"])
def test_arrays_do_not_share_lines(types: Types) -> None:
    arrays = alloc_packed(types)
    assert [(a.shape, a.dtype) for a in arrays] == types
    for i, array in enumerate(arrays):
        array.view(np.uint8)[...] = i
        assert array.flags.c_contiguous
        assert array.nbytes == 0 or address(array) % LINE == 0
    for i, array in enumerate(arrays):
        assert (array.view(np.uint8) == i).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_much_memory_begins_with_a_huge_page() -> None:
    first, *_ = alloc_packed(LARGE)
    assert address(first) % HUGE == 0


def test_memory_outlives_the_other_arrays() -> None:
    last = alloc_packed(LARGE)[-1]
    last[...] = 7
    assert (last == 7).all()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say")
@pytest.mark.parametrize("nbytes", [300_000, HUGE + 300_000])
def test_huge_pages_that_would_be_nearly_empty_are_not_taken(nbytes: int) -> None:
    before, blocks = resident(), []
    for _ in range(20):
        (block,) = alloc_packed([((nbytes,), np.dtype(np.uint8))])
        block[...] = 1
        blocks.append(block)
    assert resident() - before < 1.25 * sum(block.nbytes for block in blocks)
    blocks.clear()
    del block
    assert nbytes < HUGE or resident() - before < nbytes  # a small one may stay NumPy's, for the next


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not say")
def test_arrays_in_files_can_be_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(np.arange(1 << 20, dtype=np.int32).tobytes())
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    mapped = np.frombuffer(view, np.int32)
    part = mapped[100_001:900_001]
    expected = int(mapped.sum(dtype=np.int64))

    def in_memory() -> int:
        """Kilobytes of the file."""
        match = re.search(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+)", Path("/proc/self/smaps").read_text())
        assert match is not None
        return int(match[1])

    before = in_memory()
    release(part)
    assert before == 4096 and in_memory() <= before - part.nbytes // 1024 + 8
    assert part[0] == 100_001 and int(mapped.sum(dtype=np.int64)) == expected and in_memory() == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems let go of locked pages, or have no mlock")
def test_memory_that_is_locked_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    file = open_bytes(path)
    array = file.array(5000, 9000)
    before = array.tobytes()
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address(array)), ctypes.c_size_t(array.nbytes)):
        pytest.skip("no memory may be locked here")
    with pytest.raises(OSError, match="Invalid argument"):
        file.view.obj.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    release(array)
    file.release()
    assert array.tobytes() == before


def test_what_was_written_stays_though_its_view_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    with open(path, "rb") as file:
        maps = mmap.mmap(-1, 8192), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for map_ in maps:
        map_[:] = b"x" * 8192
        array = np.frombuffer(memoryview(map_).toreadonly(), np.uint8)
        release(array)
        assert array.tobytes() == b"x" * 8192 and isinstance(root_buffer(array), np.ndarray)


def test_memory_of_no_file_stays(tmp_path: Path) -> None:
    for array in (np.arange(10_000), np.arange(0), alloc_packed(LARGE)[0], np.frombuffer(b"abc", np.uint8)):
        before = array.tobytes()
        release(array)
        assert array.tobytes() == before and isinstance(root_buffer(array), (np.ndarray, bytes))


def test_memory_is_held_by_arrays_of_its_size() -> None:
    """Room that is left for the sake of an alignment takes no memory, and is nobody's."""
    for types in (SMALL, LARGE):
        first, *_ = arrays = alloc_packed(types)
        block = first
        while isinstance(block.base, np.ndarray):
            block = block.base
        assert block.nbytes <= sum(a.nbytes + LINE for a in arrays) + LINE


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="1,099,511,627,776 MiB of weights"):
        alloc_packed([((1 << 60,), np.dtype(np.uint8))])
