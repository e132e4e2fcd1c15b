"""Files of sections: arrays come back from any place, whatever chunks they were written by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx.errors import FormatError
from rlx.runtime import container

rng = np.random.default_rng(3)
ARRAYS = {f"a{n}": rng.integers(0, 256, n, np.uint8) for n in (1, 63, 64, 1000, 4096, 0, 5000)}


@pytest.mark.parametrize("chunk", [1, 64, 100, 4096, 1 << 20])
def test_arrays_come_back_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(container, "_CHUNK", chunk)
    path = container.write(tmp_path / "file", {"kind": "test"}, {"text": b"some text", "arrays": ARRAYS})
    file = container.read(path)
    file.check(["text", "arrays"])
    assert file.section("text") == b"some text"
    stored = file.arrays("arrays")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(stored[name], array)
        assert stored[name].ctypes.data % 64 == 0 or not array.size
    # what lies between the arrays is zeros, as the digest has it, and nothing follows the last one
    assert sum(path.read_bytes()[-5000:]) == int(ARRAYS["a5000"].sum())


def test_a_byte_that_changed_is_found(tmp_path: Path) -> None:
    path = container.write(tmp_path / "file", {}, {"arrays": ARRAYS})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="section 'arrays' is damaged"):
        container.read(path).check(["arrays"])
