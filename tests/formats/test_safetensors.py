"""safetensors: hand-written files, Hugging Face's library as oracle, shards, and broken files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import asset, read_everything, replace, s_entry, s_file, small_safetensors

from rlx.dtypes import BF16
from rlx.errors import FormatError
from rlx.formats import TensorFile, open_safetensors

TYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32,
    "F64": np.float64,
}  # fmt: skip


def opened(tmp_path: Path, data: bytes, **options: Any) -> TensorFile:
    return open_safetensors(replace(tmp_path / "model.safetensors", data), **options)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_small_file_reads(tmp_path: Path, mapped: bool) -> None:
    file = opened(tmp_path, small_safetensors(), mapped=mapped)
    assert file.names == ("a", "b", "c", "d", "e", "f") and dict(file.metadata) == {"format": "pt"}
    assert file.entry("b").storage is BF16 and file.array("b").dtype == ml_dtypes.bfloat16
    assert file.array("d").tolist() == [False, True, True]
    assert file.array("e").tolist() == 0x0706050403020100  # a scalar, and not aligned to its size
    assert file.array("f").shape == (0, 5)
    assert not file.array("a").flags.owndata and not file.array("a").flags.writeable
    assert read_everything(file) == 6


@pytest.mark.parametrize("name", TYPES)
def test_every_type_reads(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(TYPES[name])
    file = opened(tmp_path, s_file({"x": s_entry(name, (2, 3), 0, values.nbytes)}, values.tobytes()))
    assert file.array("x").dtype == values.dtype and np.array_equal(file.array("x"), values)
    assert file.dequantised("x").tolist() == values.astype(np.float32).tolist()


def test_powers_of_two_read(tmp_path: Path) -> None:
    file = opened(tmp_path, s_file({"x": s_entry("F8_E8M0", (4,), 0, 4)}, bytes([1, 127, 130, 255])))
    assert file.array("x").dtype == ml_dtypes.float8_e8m0fnu
    assert np.array_equal(file.dequantised("x"), np.float32([2.0**-126, 1, 8, np.nan]), equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
def test_what_the_library_of_hugging_face_writes_reads_the_same(tmp_path: Path, name: str) -> None:
    library = pytest.importorskip("safetensors.numpy")
    values = np.random.default_rng(0).integers(0, 2, (4, 12)).astype(TYPES[name])
    file = opened(tmp_path, library.save({"x": values, "y": values[:0]}, {"k": "v"}))
    assert file.array("x").dtype == values.dtype and file.array("x").tobytes() == values.tobytes()
    assert file.array("y").shape == (0, 12) and dict(file.metadata) == {"k": "v"}


@pytest.mark.parametrize("model", ["tiny_llama3", "tiny_gemma3", "tiny_qwen3"])
def test_a_real_checkpoint_reads_as_the_library_reads_it(model: str) -> None:
    library = pytest.importorskip("safetensors")
    path = asset("tiny-random", model, "model.safetensors")
    file = open_safetensors(path)
    theirs = dict(library.deserialize(path.read_bytes()))
    assert set(file.names) == set(theirs)
    for name, tensor in theirs.items():
        entry = file.entry(name)
        assert (list(entry.shape), entry.storage.name.upper()) == (tensor["shape"], tensor["dtype"])
        assert file.array(name).tobytes() == bytes(tensor["data"])
        widened = np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << np.uint32(16)  # bf16 is the top half of f32
        assert file.dequantised(name).tobytes() == widened.tobytes()


# -- shards ----------------------------------------------------------------------------------------------------------
def shard(**values: float) -> bytes:
    header = {n: s_entry("F32", (1,), 4 * i, 4 * i + 4) for i, n in enumerate(values)}
    return s_file({"__metadata__": {"format": "pt"}, **header}, np.array([*values.values()], np.float32).tobytes())


def sharded(folder: Path, index: Any) -> Path:
    replace(folder / "one.safetensors", shard(a=1, b=2))
    replace(folder / "two.safetensors", shard(c=3))
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return replace(folder / "model.safetensors.index.json", text)


PLACES = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


def test_an_index_opens_all_shards(tmp_path: Path) -> None:
    file = open_safetensors(sharded(tmp_path, {"metadata": {"total_size": 12}, "weight_map": PLACES}))
    assert {n: float(file.array(n)[0]) for n in file.names} == {"a": 1, "b": 2, "c": 3}
    assert dict(file.metadata) == {"total_size": 12, "format": "pt"}
    assert file.entry("c").file == tmp_path / "two.safetensors"


def test_a_shard_may_be_a_link_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    path = sharded(tmp_path, {"weight_map": PLACES})
    (tmp_path / "blobs").mkdir()
    os.rename(tmp_path / "two.safetensors", tmp_path / "blobs" / "0123abc")
    os.symlink("blobs/0123abc", tmp_path / "two.safetensors")
    assert open_safetensors(path).array("c").tolist() == [3]


INDEXES: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "index.json, byte 1: not JSON"),
    "list": ([1], "the index: expected a JSON object, found a list"),
    "no map": ({}, "weight_map: expected a JSON object, found nothing"),
    "map of lists": ({"weight_map": {"a": ["one.safetensors"]}}, "tensor 'a': expected a file name, found a list"),
    "empty": ({"weight_map": {}}, "weight_map is empty"),
    "metadata": ({"metadata": 1, "weight_map": PLACES}, "the index's metadata: expected a JSON object, found a number"),
    "up": ({"weight_map": {"a": "../one.safetensors"}}, "beside the index, found '../one.safetensors'"),
    "absolute": ({"weight_map": {"a": "/etc/one.safetensors"}}, "beside the index"),
    "windows": ({"weight_map": {"a": "..\\one.safetensors"}}, "beside the index"),
    "drive": ({"weight_map": {"a": "c:one.safetensors"}}, "beside the index"),
    "nul": ({"weight_map": {"a": "one\0.safetensors"}}, "beside the index"),
    "other file": ({"weight_map": {"a": "passwd"}}, "beside the index"),
    "long": ({"weight_map": {"a": "x" * 9999 + ".safetensors"}}, "beside the index"),
    "missing": ({"weight_map": {"a": "three.safetensors"}}, "three.safetensors': cannot be opened: No such file"),
    "elsewhere": ({"weight_map": PLACES | {"c": "one.safetensors"}}, "tensor 'c' is not in 'one.safetensors', where"),
    "twice": (b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "two members 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_a_broken_index_says_what_is_wrong(tmp_path: Path, case: str) -> None:
    index, message = INDEXES[case]
    with pytest.raises(FormatError, match=message):
        open_safetensors(sharded(tmp_path, index))


@pytest.mark.parametrize("target", ["nowhere", "two.safetensors", "."])
def test_a_link_that_leads_to_no_file_is_refused(tmp_path: Path, target: str) -> None:
    path = sharded(tmp_path, {"weight_map": PLACES})
    (tmp_path / "two.safetensors").unlink()
    os.symlink(target, tmp_path / "two.safetensors")
    with pytest.raises(FormatError, match=r"cannot be opened|regular file"):
        open_safetensors(path)


# -- broken files ----------------------------------------------------------------------------------------------------
X = s_entry("F32", (2,), 0, 8)
DEEP = b'{"x": {"dtype": "F32", "data_offsets": [0, 8], "shape": ' + b"[" * 800 + b"]" * 800 + b"}}"


def one(**changes: Any) -> bytes:
    return s_file({"x": X | changes}, bytes(8))


BROKEN: dict[str, tuple[bytes, str]] = {
    "short": (b"\0" * 7, "byte 0: header length: expected 8 bytes, found a file of 7"),
    "no header": (bytes(8), "byte 8: header: expected b'{', found b''"),
    "length lies": (s_file({}, length=3), "byte 0: header length: expected at most 2, found 3"),
    "length is huge": (s_file({}, length=2**64 - 1), "expected at most 2, found 18446744073709551615"),
    "length is short": (s_file({"x": X}, bytes(8), length=9), "not JSON"),
    "list": (s_file(b"[]"), "byte 8: header: expected b'{', found b'\\['"),
    "leading space": (s_file(b" {}"), "expected b'{'"),
    "two values": (s_file(b"{} {}"), "byte 11: not JSON, Extra data"),
    "not utf-8": (s_file(b'{"a\xff": 1}'), "byte 11: JSON is not UTF-8: found byte 0xff"),
    "deep": (s_file(b'{"a":' + b"[" * 200_000), "byte 8: JSON is nested too deeply"),
    "twice": (s_file(b'{"x": 1, "x": 2}'), "two members 'x'"),
    "dtype twice": (s_file(b'{"x": {"dtype": "F32", "dtype": "F32"}}'), "two members 'dtype'"),
    "nan": (s_file(b'{"x": NaN}'), "expected a number, found NaN"),
    "long number": (s_file(b'{"x": ' + b"9" * 5000 + b"}"), "a number that is too long"),
    "half a pair": (s_file(b'{"\\ud800": 1}'), "half of a surrogate pair"),
    "metadata list": (s_file({"__metadata__": []}), "__metadata__: expected a JSON object, found a list"),
    "metadata number": (s_file({"__metadata__": {"a": 1}}), "__metadata__ 'a': expected a string, found a number"),
    "entry is null": (s_file({"x": None}), "'x': expected an object of dtype, shape, data_offsets, found nothing"),
    "entry lacks": (s_file({"x": {"dtype": "F32", "shape": []}}), r"found \['dtype', 'shape'\]"),
    "entry has more": (one(extra=1), "found .*'extra'"),
    "unknown dtype": (one(dtype="F4"), "tensor 'x': dtype: expected BOOL, U8, .* found 'F4'"),
    "dtype number": (one(dtype=3), "dtype: expected .* found 3"),
    "dtype list": (one(dtype=[]), r"dtype: expected .* found \[\]"),
    "shape number": (one(shape=2), "tensor 'x': shape: expected a list of sizes, found 2"),
    "shape deep": (s_file(DEEP, bytes(8)), "tensor 'x': shape: expected a list of sizes"),
    "dtype is large": (one(dtype=[[{"a": "b" * 99}] * 99] * 999), r"dtype: expected .* found \[\[\{'a': 'b"),
    "shape negative": (one(shape=[-2, -1]), "a list of sizes"),
    "shape float": (one(shape=[2.0]), "a list of sizes"),
    "shape true": (one(shape=[True, 2]), "a list of sizes"),
    "shape text": (one(shape=["2"]), "a list of sizes"),
    "rank 9": (one(shape=[2] + [1] * 8), "axes: expected at most 8, found 9"),
    "shape overflows": (one(shape=[2**32, 2**32]), "is beyond any file"),
    "shape overflows to 0": (one(shape=[0, 2**62, 4], data_offsets=[0, 0]), "is beyond any file"),
    "shape is long": (one(shape=[10**4000, 0]), "is beyond any file"),
    "offsets of one": (one(data_offsets=[8]), r"data_offsets: expected \[begin, end\], found \[8\]"),
    "offsets of three": (one(data_offsets=[0, 8, 8]), "data_offsets"),
    "offsets turned": (one(data_offsets=[8, 0]), "data_offsets"),
    "offsets negative": (one(data_offsets=[-8, 0]), "data_offsets"),
    "offsets text": (one(data_offsets="08"), "data_offsets"),
    "outside": (one(data_offsets=[4, 12]), r"data within the 8 bytes after the header, found \[4, 12\]"),
    "far outside": (one(data_offsets=[2**63, 2**63 + 8]), "data within the 8 bytes"),
    "wrong size": (one(shape=[3]), r"tensor 'x', F32\[3\]: expected 12 bytes, found 8"),
    "overlap": (s_file({"x": X, "y": s_entry("F32", (1,), 4, 8)}, bytes(8)), "'y' overlaps another: expected byte"),
    "same place": (s_file({"x": X, "y": X}, bytes(8)), "overlaps another"),
    "gap": (s_file({"x": s_entry("F32", (1,), 4, 8)}, bytes(8)), "tensor 'x' follows a gap"),
    "rest": (s_file({"x": X}, bytes(9)), "data after the last tensor"),
    "cut": (s_file({"x": X}, bytes(7)), "data within the 7 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_says_where_and_what(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, data)
    assert "model.safetensors" in str(caught.value)


def test_a_bool_that_is_neither_is_found_when_read(tmp_path: Path) -> None:
    file = opened(tmp_path, s_file({"x": s_entry("BOOL", (3,), 0, 3)}, b"\0\1\2"))
    at = file.entry("x").offset + 2
    with pytest.raises(FormatError, match=f"byte {at}: tensor 'x': a bool: expected 0 or 1, found 2"):
        file.array("x")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = small_safetensors()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            opened(tmp_path, data[:end])


def test_the_library_refuses_what_we_refuse(tmp_path: Path) -> None:
    """The names below are cases where we are deliberately stricter."""
    library = pytest.importorskip("safetensors")
    stricter = {"leading space", "entry has more", "rank 9", "unknown dtype"}
    for case in BROKEN.keys() - stricter:
        with pytest.raises(library.SafetensorError):
            library.deserialize(BROKEN[case][0])


def test_metadata_may_be_null(tmp_path: Path) -> None:
    assert dict(opened(tmp_path, s_file({"__metadata__": None})).metadata) == {}


def test_padding_after_the_header_is_allowed(tmp_path: Path) -> None:
    assert len(opened(tmp_path, s_file(json.dumps({"x": X}).encode() + b"   ", bytes(8)))) == 1


def test_no_tensors_is_a_file_too(tmp_path: Path) -> None:
    assert opened(tmp_path, s_file({})).names == ()


def test_a_header_of_very_many_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    text = b'{"a": [' + b"[]," * 3_000_000 + b"[]]}"
    with pytest.raises(FormatError, match="at most 4194304 values, found 6000004"):
        opened(tmp_path, struct.pack("<Q", len(text)) + text)
