"""GGUF: hand-written files of every version, llama.cpp's own reader and writer as oracle, and broken files."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writing import finish
from model_files import (
    ARRAY,
    BOOL,
    CODES,
    F32,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    asset,
    g_array,
    g_file,
    g_info,
    g_key,
    g_payload,
    g_string,
    read_everything,
    replace,
    small_gguf,
)

from rlx.dtypes import F32 as F32_TYPE
from rlx.errors import FormatError
from rlx.formats import TensorFile, open_gguf
from rlx.formats.gguf import StringArray
from rlx.formats.gguf_quants import BLOCK_TYPES


def opened(tmp_path: Path, data: bytes, **options: Any) -> TensorFile:
    return open_gguf(replace(tmp_path / "model.gguf", data), **options)


# -- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("mapped", [True, False])
def test_every_version_gives_the_same_file(tmp_path: Path, version: int, mapped: bool) -> None:
    file = opened(tmp_path, small_gguf(version), mapped=mapped)
    assert file.names == ("plain", "half", "packed", "k", "ids")
    assert file.metadata["GGUF.version"] == version
    assert file.metadata["general.architecture"] == "llama"
    assert list(file.metadata["tokens"]) == ["<s>", "é", "", "the"]
    assert file.metadata["scores"].tolist() == [0.5, -1.0, 2.0, 3.0]
    assert file.metadata["flags"].tolist() == [True, False, True]
    inner, strings = file.metadata["nested"]
    assert inner.tolist() == [1, 2] and list(strings) == ["x"]
    assert file.entry("packed").shape == (2, 64) and file.entry("packed").storage is BLOCK_TYPES["q8_0"]
    assert file.array("packed").shape == (2, 2) and file.array("packed").dtype == BLOCK_TYPES["q8_0"].numpy
    assert read_everything(file) == 5


VALUES = {
    "B": (0, 255), "b": (-128, 127), "H": (65535,), "h": (-32768,), "I": (2**32 - 1,), "i": (-(2**31),),
    "f": (1.5, float("inf")), "?": (True, False), "Q": (2**64 - 1,), "q": (-(2**63),), "d": (0.1,),
}  # fmt: skip


@pytest.mark.parametrize("kind", CODES)
def test_numbers_come_back_exactly(tmp_path: Path, kind: int) -> None:
    values = VALUES[CODES[kind]]
    keys = [g_key(f"v{i}", kind, g_payload(kind, v)) for i, v in enumerate(values)]
    keys.append(g_key("all", ARRAY, g_array(kind, values)))
    keys.append(g_key("none", ARRAY, g_array(kind, [])))
    metadata = opened(tmp_path, g_file(keys)).metadata
    assert [metadata[f"v{i}"] for i in range(len(values))] == list(values)
    assert [type(metadata[f"v{i}"]) for i in range(len(values))] == [type(v) for v in values]
    assert metadata["all"].tolist() == list(values)
    assert metadata["none"].shape == (0,) and metadata["none"].dtype == metadata["all"].dtype


def test_arrays_of_numbers_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    file = opened(tmp_path, g_file([g_key("a", ARRAY, g_array(I32, range(1000)))]))
    array = file.metadata["a"]
    assert not array.flags.owndata and not array.flags.writeable


def test_an_array_of_strings_is_a_sequence(tmp_path: Path) -> None:
    words = ["zero", "", "zwei", "три", "四", "\U0001f600"]
    strings = opened(tmp_path, g_file([g_key("w", ARRAY, g_array(STRING, words))])).metadata["w"]
    assert isinstance(strings, StringArray)
    assert (len(strings), strings[3], strings[-1], strings[1:5:2]) == (6, "три", "\U0001f600", ["", "три"])
    assert list(strings) == words and "zwei" in strings and strings.index("四") == 4
    assert strings.raw(4) == "四".encode()
    with pytest.raises(IndexError):
        strings[6]


def test_strings_that_are_not_text_can_be_had_as_bytes(tmp_path: Path) -> None:
    data = g_file([g_key("w", ARRAY, g_array(STRING, ["good", b"\xff\xfe", "fine"]))])
    strings = opened(tmp_path, data).metadata["w"]
    assert strings[0] == "good" and strings.raw(1) == b"\xff\xfe" and strings[2] == "fine"
    at = data.index(b"\xff\xfe")
    for read in (lambda: strings[1], lambda: list(strings)):
        with pytest.raises(FormatError, match=f"model.gguf, byte {at}: .* not UTF-8: found byte 0xff"):
            read()


def test_a_large_vocabulary_opens_quickly(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(300_000)]
    data = g_file([g_key("tokens", ARRAY, g_array(STRING, words))])
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    begin = time.process_time()
    file = open_gguf(path)
    assert time.process_time() - begin < 2  # 0.06 s on a quiet machine
    assert file.metadata["tokens"][299_999] == "token299999"


# -- tensors ---------------------------------------------------------------------------------------------------------
def test_shapes_are_row_major_and_data_is_not_copied(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = opened(tmp_path, g_file([], [g_info("w", (2, 3), 0, 0)], values.tobytes()))
    entry = file.entry("w")
    assert (entry.shape, entry.storage, entry.nbytes, entry.size) == ((2, 3), F32_TYPE, 24, 6)
    array = file.array("w")
    assert np.array_equal(array, values) and not array.flags.owndata and not array.flags.writeable
    assert np.shares_memory(array, file.dequantised("w"))


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_the_alignment_key_moves_the_data(tmp_path: Path, alignment: int) -> None:
    keys = [g_key("general.alignment", U32, g_payload(U32, alignment))]
    data = np.float32(3).tobytes().ljust(alignment, b"\0") + np.float32(5).tobytes()
    infos = [g_info("a", (1,), 0, 0), g_info("b", (), 0, max(4, alignment))]
    file = opened(tmp_path, g_file(keys, infos, data, alignment=alignment))
    assert file.array("a").tolist() == [3] and file.array("b").tolist() == 5
    assert file.entry("a").offset % alignment == 0


def test_codes_of_a_table_are_read_as_blocks_and_as_numbers(tmp_path: Path) -> None:
    file = opened(tmp_path, g_file([], [g_info("w", (2, 32), 20, 0)], bytes(range(36))))
    assert file.entry("w").storage.name == "iq4_nl"
    blocks = file.array("w")
    assert blocks.shape == (2, 1) and blocks.tobytes() == bytes(range(36))
    scale = np.frombuffer(bytes([0, 1]), np.float16).astype(np.float32)
    assert file.dequantised("w")[0, :3].tolist() == [scale * -83, scale * -65, scale * -49]


# -- against llama.cpp's Python package ------------------------------------------------------------------------------
def test_what_gguf_writes_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_float32("x.eps", 1e-5)
    writer.add_array("x.list", [1, 2, 3])
    rng = np.random.default_rng(0)
    kinds = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        values = rng.standard_normal((5, 256), dtype=np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("I16", np.arange(5, dtype=np.int16))
    writer.add_tensor("F64", rng.standard_normal((3, 2, 5)))
    finish(writer)
    compare_with_gguf(path)


def compare_with_gguf(path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(path)
    file = open_gguf(path)
    assert file.names == tuple(t.name for t in reader.tensors)
    for tensor in reader.tensors:
        entry = file.entry(tensor.name)
        assert entry.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (entry.offset, entry.nbytes) == (tensor.data_offset, tensor.n_bytes)
        ours = file.array(tensor.name)
        assert ours.tobytes() == tensor.data.tobytes()
        if tensor.tensor_type.name not in ("I8", "I16", "I32", "I64", "F64"):
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert file.dequantised(tensor.name).tobytes() == theirs.tobytes()
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert fields.keys() == file.metadata.keys() - {"GGUF.version"}
    for key, theirs in fields.items():
        ours = file.metadata[key]
        assert (list(ours) if isinstance(theirs, list) else ours) == theirs


# The oracle takes 20 seconds for a vocabulary of 128000 tokens.
SLOW = [pytest.param(name, marks=pytest.mark.large) for name in ("gpt-2", "llama-bpe", "qwen2")]


@pytest.mark.parametrize("name", ["bert-bge", "llama-spm", *SLOW])
def test_a_real_vocabulary_reads_as_gguf_reads_it(name: str) -> None:
    pytest.importorskip("gguf")
    compare_with_gguf(asset("vocab", f"ggml-vocab-{name}.gguf"))


def test_the_real_file_of_version_1_opens() -> None:
    file = open_gguf(asset("stories260K", "tinyllamas-stories-260k-f32.gguf"))
    assert file.metadata["GGUF.version"] == 1
    assert (len(file), len(file.metadata["tokenizer.ggml.tokens"])) == (48, 512)
    assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<unk>", "<s>", "</s>"]
    assert file.entry("blk.0.attn_k.weight").shape == (32, 64)


# -- split models ----------------------------------------------------------------------------------------------------
def split_part(number: int, count: int, names: str, total: int = 3, **changes: int) -> bytes:
    keys = {"split.no": number, "split.count": count, "split.tensors.count": total} | changes
    infos = [g_info(name, (1,), 0, 32 * i) for i, name in enumerate(names)]
    data = b"".join(np.float32(ord(name)).tobytes().ljust(32, b"\0") for name in names)
    return g_file([g_key(k, U16, g_payload(U16, v)) for k, v in keys.items()], infos, data)


def split_model(tmp_path: Path, parts: list[bytes]) -> Path:
    for i, data in enumerate(parts):
        (tmp_path / f"m-{i + 1:05}-of-{len(parts):05}.gguf").write_bytes(data)
    return tmp_path / f"m-00001-of-{len(parts):05}.gguf"


def test_the_first_part_opens_all_of_a_split_model(tmp_path: Path) -> None:
    path = split_model(tmp_path, [split_part(0, 3, ""), split_part(1, 3, "ab"), split_part(2, 3, "c")])
    file = open_gguf(path)
    assert {n: float(file.array(n)[0]) for n in file.names} == {"a": 97, "b": 98, "c": 99}
    assert file.entry("c").file.name == "m-00003-of-00003.gguf"


def test_what_gguf_splits_reads_whole(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=2)
    values = {f"t{i}": np.full((2, 32), i, np.float32) for i in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    finish(writer)
    file = open_gguf(tmp_path / "s-00001-of-00003.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert all(np.array_equal(file.array(n), v) for n, v in values.items()) and len(file) == 5


SPLITS = {
    "missing part": ([split_part(0, 2, "a")], "cannot be opened: No such file"),
    "wrong number": ([split_part(0, 2, "ab"), split_part(0, 2, "c")], "split.no: expected 1, found 0"),
    "wrong count": ([split_part(0, 2, "ab"), split_part(1, 3, "c")], "split.count: expected 2, found 3"),
    "name in two": ([split_part(0, 2, "ab"), split_part(1, 2, "a")], "tensor 'a' is in m-00001-of-00002.gguf too"),
    "wrong total": ([split_part(0, 2, "ab", 7), split_part(1, 2, "c")], "tensors.count: expected 7, found 3"),
    "broken part": ([split_part(0, 2, "ab"), b"GGUF"], "00002.gguf, byte 4: version: expected 4 bytes"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_model_that_does_not_fit_together_is_refused(tmp_path: Path, case: str) -> None:
    parts, message = SPLITS[case]
    for i, data in enumerate(parts):
        (tmp_path / f"m-{i + 1:05}-of-00002.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_later_part_points_to_the_first(tmp_path: Path) -> None:
    split_model(tmp_path, [split_part(0, 2, "ab"), split_part(1, 2, "c")])
    with pytest.raises(FormatError, match="part 2 of a split model") as caught:
        open_gguf(tmp_path / "m-00002-of-00002.gguf")
    assert "m-00001-of-00002.gguf" in (caught.value.hint or "")


def test_a_split_model_under_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"split\.count is 60000: expected a name that ends in -00001-of-60000\.gguf"):
        opened(tmp_path, split_part(0, 60000, "a"))


# -- broken files ----------------------------------------------------------------------------------------------------
def one_key(kind: int, payload: bytes) -> bytes:
    return g_file([g_key("k", kind, payload)])


def one_tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, data: bytes = bytes(64)) -> bytes:
    return g_file([], [g_info("w", shape, kind, offset)], data)


TWO = [g_info("a", (8,), 0, 0), g_info("b", (8,), 0, 32)]
BROKEN = {
    "not gguf": (b"GGML" + bytes(20), "byte 0: not a GGUF file: expected b'GGUF', found b'GGML'"),
    "only magic": (b"GGUF", "byte 4: version: expected 4 bytes, found 0"),
    "version 0": (b"GGUF" + bytes(20), "byte 4: GGUF version: expected 1, 2 or 3, found 0"),
    "version 4": (g_file(version=4), "expected 1, 2 or 3, found 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the file is big endian: expected little endian"),
    "many tensors": (g_file(tensor_count=2**60), "byte 8: tensor count: expected at most 0, .* found 11529215046"),
    "many keys": (g_file(key_count=2**64 - 1), "byte 16: key count: expected at most 0"),
    "one key too many": (g_file([g_key("a", U8, b"\1")], key_count=2), "key count: expected at most 1"),
    "v1 many keys": (g_file(version=1, key_count=2**32 - 1), "byte 12: key count"),
    "long key": (g_file([g_string(b"x")[:7] + b"\x70" + bytes(9)]), "byte 24: length of a key"),
    "key is not text": (g_file([g_key(b"a\xff", U8, b"\1")]), "byte 33: a key is not UTF-8: found byte 0xff"),
    "key twice": (g_file([g_key("a", U8, b"\1")] * 2), "byte 38: key 'a' occurs twice"),
    "own key": (g_file([g_key("GGUF.version", U8, b"\1")]), "'GGUF.version' occurs twice"),
    "unknown value type": (one_key(13, bytes(8)), "byte 33: type of value of 'k': expected 0 uint8.*found 13"),
    "bool of 2": (one_key(BOOL, b"\2"), "byte 37: value of 'k': expected 0 or 1, found 2"),
    "bools of 2": (one_key(ARRAY, struct.pack("<IQ3B", BOOL, 3, 0, 1, 2)), "byte 51: value of 'k': expected 0 or 1"),
    "short number": (one_key(U64, b"\1"), "value of 'k': expected 8 bytes, found 1 before the end"),
    "long string": (one_key(STRING, struct.pack("<Q", 9) + b"x"), "byte 37: length of value of 'k': expected at most"),
    "string is not text": (one_key(STRING, g_string(b"ok\xc3(")), "byte 47: value of 'k' is not UTF-8: found byte"),
    "long array": (one_key(ARRAY, g_array(F32, [1.0], count=2**62)), "length of value of 'k': expected at most 1"),
    "many strings": (one_key(ARRAY, g_array(STRING, [], count=2**61)), "length of value of 'k': expected at most 0"),
    "cut strings": (one_key(ARRAY, g_array(STRING, ["a" * 8, "b"])[:-1]), "string 1 of 2 beyond it"),
    "far string": (one_key(ARRAY, g_array(STRING, ["", ""])[:-1] + b"\x7f"), "string 1 of 2 beyond it"),
    "unknown element": (one_key(ARRAY, g_array(13, [])), "element type of value of 'k': .*found 13"),
    "deep arrays": (one_key(ARRAY, struct.pack("<IQ", ARRAY, 1) * 99), "nested too much: expected at most 4 levels"),
    "array bomb": (one_key(ARRAY, g_array(ARRAY, [], count=70000) + bytes(12 * 70000)), "at most 65536, found 70000"),
    "alignment 0": (g_file([g_key("general.alignment", U32, bytes(4))]), "alignment: expected a power of two, found 0"),
    "alignment 24": (g_file([g_key("general.alignment", U32, g_payload(U32, 24))]), "power of two, found 24"),
    "alignment text": (g_file([g_key("general.alignment", STRING, g_string("32"))]), "power of two, found '32'"),
    "alignment true": (g_file([g_key("general.alignment", BOOL, b"\1")]), "power of two, found True"),
    "split text": (g_file([g_key("split.count", STRING, g_string("2"))]), "split.count: expected a count, found '2'"),
    "rank 9": (one_tensor((1,) * 9), "byte 33: rank of 'w': expected at most 8, found 9"),
    "rank lie": (one_tensor((1,) * 9).replace(struct.pack("<I", 9), b"\xff" * 4, 1), "at most 8, found 4294967295"),
    "zero size": (one_tensor((2, 0)), r"tensor 'w': shape: expected no zero, found \(2, 0\)"),
    "overflow": (one_tensor((2**32, 2**32)), r"tensor 'w': its shape \(4294967296, 4294967296\) is beyond any file"),
    "overflow to 64": (one_tensor((2**60 + 4, 16)), "beyond any file"),
    "large": (one_tensor((17,)), "tensor 'w': expected its 68 bytes within the file of 128, found bytes 64 to 132"),
    "unknown type": (one_tensor((4,), 99), "tensor 'w': expected a type of ggml, found type 99, which is unknown"),
    "removed type": (one_tensor((4,), 4), r"found type 4 \(q4_2, which ggml removed\)"),
    "part of a block": (one_tensor((2, 48), 8), r"of q8_0: expected rows of whole blocks of 32, found shape \(2, 48\)"),
    "blocks across rows": (one_tensor((4, 8), 8), "whole blocks of 32"),
    "block scalar": (one_tensor((), 8), "whole blocks of 32"),
    "unaligned": (one_tensor((4,), 0, 4), "tensor 'w': offset: expected a multiple of 32, found 4"),
    "outside": (one_tensor((4,), 0, 64), "within the file of 128, found bytes 128 to 144"),
    "far outside": (one_tensor((4,), 0, 2**64 - 32), "within the file of 128, found bytes 18446744073709551648"),
    "overlap": (g_file([], [TWO[0], g_info("b", (4,), 0, 0)], bytes(64)), "tensor 'b' overlaps 'a'"),
    "overlap inside": (g_file([], [g_info("a", (16,), 0, 0), TWO[1]], bytes(64)), "byte 160 or later, found 128"),
    "name twice": (g_file([], [TWO[0], g_info("a", (8,), 0, 32)], bytes(64)), "tensor 'a' occurs twice"),
    "name is not text": (g_file([], [g_info(b"\x80", (8,), 0, 0)], bytes(32)), "byte 32: a tensor's name is not UTF-8"),
    "no data": (g_file([], TWO), "within the file of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_says_where_and_what(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, data)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("version", [1, 3])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, version: int) -> None:
    data = small_gguf(version)
    path = tmp_path / "model.gguf"
    for end in range(len(data)):
        with pytest.raises(FormatError):
            open_gguf(replace(path, data[:end]))


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_STRINGS", 4, "length of value of 'nested': expected at most 0, found 1"),
        ("MAX_ARRAYS", 1, "length of value of 'nested': expected at most 1, found 2"),
        ("MAX_STRING_BYTES", 4, "byte 56: length of value of 'general.architecture': expected at most 4, found 5"),
        ("MAX_KEY_BYTES", 8, "byte 24: length of a key: expected at most 8, found 20"),
        ("MAX_KEYS", 16, "byte 16: key count: expected at most 16, found 17"),
        ("MAX_TENSORS", 4, "byte 8: tensor count: expected at most 4, found 5"),
    ],
)
def test_what_no_real_file_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    monkeypatch.setattr("rlx.formats.gguf." + limit, value)
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, small_gguf())


def test_bytes_after_the_last_tensor_are_padding(tmp_path: Path) -> None:
    assert read_everything(opened(tmp_path, small_gguf() + bytes(100))) == 5
