"""Behaviour shared by all tensor files: names, closing, paths that are not files, and choosing the reader."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_files import g_file, g_info, l_file, replace, s_entry, s_file, small_gguf, small_safetensors

from rlx import formats
from rlx.errors import FormatError, ResourceError
from rlx.formats import open_gguf, open_llama2c, open_safetensors, open_tensors
from rlx.formats.tensor_file import quoted

OPENERS = (open_gguf, open_llama2c, open_safetensors, open_tensors)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return replace(tmp_path / "model.gguf", small_gguf())


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


# -- names and life --------------------------------------------------------------------------------------------------
def test_an_unknown_name_gets_the_nearest(path: Path) -> None:
    file = open_gguf(path)
    assert "plain" in file and "plan" not in file
    for read in (file.entry, file.array, file.dequantised):
        with pytest.raises(FormatError, match="no tensor is called 'plan'") as caught:
            read("plan")
        assert caught.value.hint == "did you mean 'plain'?"


def test_a_wrong_name_in_a_large_file_is_found_out_quickly(tmp_path: Path) -> None:
    infos = [g_info(f"blk.{i}.some_weight_of_some_layer", (1,), 0, 32 * i) for i in range(20_000)]
    file = open_gguf(replace(tmp_path / "m.gguf", g_file([], infos, bytes(32 * 20_000))))
    with pytest.raises(FormatError, match="no tensor"):
        file.entry("x" * 1_000_000)


def test_metadata_cannot_be_changed(path: Path) -> None:
    with pytest.raises(TypeError):
        open_gguf(path).metadata["a"] = 1  # type: ignore[index]


def test_arrays_outlive_the_file(path: Path) -> None:
    with open_gguf(path) as file:
        array, words = file.array("plain"), file.metadata["tokens"]
        expected = array.copy()
    path.unlink()
    gc.collect()
    assert np.array_equal(array, expected) and list(words) == ["<s>", "é", "", "the"]


def test_a_closed_file_says_so(path: Path) -> None:
    file = open_gguf(path)
    file.close()
    file.close()
    assert file.entry("plain").shape == (3, 4)
    with pytest.raises(FormatError, match="closed, so tensor 'plain' cannot be read"):
        file.array("plain")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps in /proc")
def test_the_map_goes_with_the_last_view(path: Path) -> None:
    file = open_gguf(path)
    view = file.array("plain")
    assert maps_of(path) == 1
    file.close()
    del file
    assert maps_of(path) == 1
    del view
    assert maps_of(path) == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps in /proc")
def test_a_file_that_is_not_mapped_is_not_mapped(path: Path) -> None:
    file = open_gguf(path, mapped=False)
    assert maps_of(path) == 0
    path.write_bytes(b"")  # would kill the process if it were mapped
    assert file.array("plain").shape == (3, 4)


# -- no file ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("open_file", OPENERS)
def test_what_is_no_file_is_refused(tmp_path: Path, open_file: type) -> None:
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "empty.bin").touch()
    os.symlink("loop.bin", tmp_path / "loop.bin")
    for name in ("folder.bin", "empty.bin", "loop.bin", "missing.bin", "nul\0.bin", "half\ud800.bin", "x" * 5000):
        with pytest.raises(FormatError):
            open_file(tmp_path / name)
        with pytest.raises(FormatError):
            open_file(str(tmp_path / name))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("open_file", OPENERS)
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, open_file: type) -> None:
    for name in ("pipe.bin", "pipe.safetensors", "pipe.index.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(FormatError, match="expected a regular file, found a pipe"):
            open_file(tmp_path / name)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_is_refused() -> None:
    with pytest.raises(FormatError, match="found a device"):
        open_gguf("/dev/zero")


def test_a_hostile_name_is_shown_short_and_harmless() -> None:
    shown = quoted("\x1b[2J" + "x" * 100_000 + "end")
    assert len(shown) == 80 and shown.startswith("'\\x1b[2J") and "..." in shown and shown.endswith("end'")


def test_a_map_without_room_is_a_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("rlx.formats.tensor_file.FileMap", refuse)
    with pytest.raises(ResourceError, match=r"x\.gguf: not enough memory for its"):
        open_tensors(replace(tmp_path / "x.gguf", small_gguf()))


# -- finding the reader ----------------------------------------------------------------------------------------------
def test_a_file_opens_by_what_it_is(tmp_path: Path) -> None:
    cases = {
        "a.gguf": (small_gguf(), "gguf"), "b.whatever": (small_gguf(), "gguf"),
        "c.safetensors": (small_safetensors(), "safetensors"), "d.bin": (l_file(0)[0], "llama2c"),
        "e.bin": (l_file(1)[0], "llama2c"),
    }  # fmt: skip
    for name, (data, expected) in cases.items():
        with open_tensors(replace(tmp_path / name, data)) as file:
            assert file.format == expected and len(file)


def test_a_folder_opens_the_model_in_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"expected model\.safetensors\.index\.json or one model file, found none"):
        open_tensors(tmp_path)
    replace(tmp_path / "some.gguf", small_gguf())
    assert open_tensors(tmp_path).format == "gguf"
    replace(tmp_path / "other.gguf", small_gguf())
    with pytest.raises(FormatError, match=r"found other\.gguf, some\.gguf"):
        open_tensors(tmp_path)
    replace(tmp_path / "model.safetensors", s_file({"x": s_entry("U8", (1,), 0, 1)}, b"\0"))
    assert open_tensors(tmp_path).format == "safetensors"
    replace(tmp_path / "model.safetensors.index.json", b'{"weight_map": {"x": "model.safetensors"}}')
    assert open_tensors(tmp_path).path.name == "model.safetensors.index.json"


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="pickle of PyTorch, which can run code"):
        open_tensors(replace(tmp_path / "pytorch_model.bin", b"PK\x03\x04" + bytes(99)))


def test_an_unknown_file_is_refused_with_its_first_bytes(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"not a known model file: expected GGUF, .* found b'\\x93NUM'"):
        open_tensors(replace(tmp_path / "x.npy", b"\x93NUMPY"))


def test_reading_files_loads_nothing_but_numpy() -> None:
    code = (
        "import sys, rlx.formats; print([m for m in ('llvmlite', 'torch', 'gguf', 'safetensors') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(formats, name) is not None for name in formats.__all__)
