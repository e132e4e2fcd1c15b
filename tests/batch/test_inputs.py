"""Input files: where shards end, what records are, and files that are not what they should be."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.batch import inputs
from rlx.batch.inputs import Shard, check_sources, cut, find_sources
from rlx.batch.records import Failure, Record, read_records
from rlx.errors import FormatError, RequestError


def shards_of(path: Path, records: int = 4, size: int = 1 << 20, **options: Any) -> list[Shard]:
    return list(cut(find_sources([path], **options), records, size))


def records_of(path: Path, records: int = 4, **options: Any) -> list[Record | Failure]:
    return [r for shard in shards_of(path, records, **options) for r in read_records(shard, "text")]


def lines_and_texts(path: Path, records: int = 4) -> list[tuple[int, Any]]:
    read = records_of(path, records)
    assert all(isinstance(record, Record) for record in read)
    return [(record.line, record.members["text"]) for record in read if isinstance(record, Record)]


# -- text ------------------------------------------------------------------------------------------------------------
def test_lines_keep_their_numbers_and_blank_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\nlast")
    assert lines_and_texts(path, 2) == [(1, "one"), (2, ""), (3, "two"), (4, "last")]


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r\ufeff", codec="utf-8"), max_size=12)), st.integers(1, 9))
def test_shards_together_are_the_file(tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    shards = shards_of(path, count, size=20)
    assert b"".join(shard.data for shard in shards) == path.read_bytes()
    assert lines_and_texts(path, count) == list(enumerate(lines, 1))
    assert all(shard.records <= count for shard in shards)


def test_a_compressed_file_gives_the_same_records(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_text("".join(f"line {i}\n" for i in range(1000)))
    packed.write_bytes(gzip.compress(plain.read_bytes()[:3000]) + gzip.compress(plain.read_bytes()[3000:]))
    assert lines_and_texts(packed) == lines_and_texts(plain)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:40] + b"\0\0\0" + data[43:], lambda _: b"no gzip"]
)
def test_a_broken_gzip_file_is_named(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress(os.urandom(500).hex().encode())))
    with pytest.raises(FormatError, match=r"a\.txt\.gz: not a complete gzip file"):
        shards_of(path)


def test_a_line_that_is_too_long_is_reported_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_RECORD", 100)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\nthree\n" + b"y" * 99 + b"\n" + b"z" * 100 + b"\n")
    shards = shards_of(path, 10)
    assert [(s.first_line, s.records, s.too_long) for s in shards] == [
        (1, 1, False),
        (2, 1, True),
        (3, 2, False),
        (5, 1, True),
    ]
    assert max(len(shard.data) for shard in shards) <= 106
    read = records_of(path, 10)
    assert [(r.line, type(r)) for r in read] == [(1, Record), (2, Failure), (3, Record), (4, Record), (5, Failure)]


def test_bytes_that_are_no_text_are_failures_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nb\xffd\ngood\n")
    assert [(r.line, getattr(r, "message", None)) for r in records_of(path)] == [
        (1, None), (2, "not UTF-8 text: byte 0xff at 1"), (3, None),
    ]  # fmt: skip


# -- JSONL -----------------------------------------------------------------------------------------------------------
def test_lines_of_json_are_objects_or_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": 7}\n\n"b"\n{"text": "c", "id": "seven"}\n')
    assert records_of(path) == [
        Record(1, {"text": "a", "id": 7}, 7),
        Record(3, {"text": "b"}),
        Record(4, {"text": "c", "id": "seven"}, "seven"),
    ]


BAD = {
    "[1]": "expected an object or a text",
    '{"a": 1, "a": 2}': "two members 'a'",
    '{"a": NaN}': "NaN",
    '{"id": [1]}': "id: expected a text",
    '{"text": "\\ud800"}': "half of a surrogate pair",
    "{" * 100_000: "",
    "[" * 100_000: "",
    '{"custom_id": "a", "body": 1, "url": "/v1/embeddings"}': "body: expected an object",
    '{"custom_id": 1, "body": {}, "url": "/v1/embeddings"}': "custom_id: expected a text",
    '{"custom_id": "a", "body": {}}': "expected POST and a url",
    '{"custom_id": "a", "body": {}, "url": "/", "method": "GET"}': "expected POST",
    '{"custom_id": "a", "body": {}, "url": "/", "more": 1}': "unknown members: more",
    "{}," * 50_000: "",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_bad_json_is_a_failure_of_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'"before"\n{line}\n"after"\n')
    before, failure, after = records_of(path)
    assert isinstance(failure, Failure) and failure.line == 2 and len(failure.message) <= 500
    assert BAD[line] in failure.message
    assert isinstance(before, Record) and isinstance(after, Record) and after.line == 3


def test_a_line_of_openais_batch_api_has_its_custom_id_and_body(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"custom_id": "q-1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}))
    assert records_of(path) == [Record(1, {"input": "x"}, "q-1", "/v1/embeddings")]


# -- CSV -------------------------------------------------------------------------------------------------------------
field = st.text(st.sampled_from('ab",\n ;é'), max_size=6)


@settings(max_examples=80)
@given(st.lists(st.tuples(field, field), max_size=12), st.integers(1, 5))
def test_csv_records_are_those_of_pythons_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], count: int
) -> None:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([("text", "other"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(written.getvalue().encode())
    read = records_of(path, count)
    expected = [row for row in csv.reader(io.StringIO(written.getvalue())) if row][1:]
    assert [[r.members["text"], r.members["other"]] for r in read if isinstance(r, Record)] == expected


# As they stand in files: plain fields may have quotes that do not come first.
plain = st.tuples(st.sampled_from("ab ;é"), st.text(st.sampled_from('ab" ;é'), max_size=6)).map("".join) | st.just("")
in_file = plain | field.map(lambda text: '"' + text.replace('"', '""') + '"')


@settings(max_examples=200)
@given(st.lists(st.tuples(in_file, in_file), max_size=12), st.integers(1, 5), st.sampled_from(["csv", "tsv"]))
def test_quotes_inside_of_plain_fields_are_characters(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], count: int, kind: str
) -> None:
    delimiter = inputs.DELIMITERS[kind]
    text = "".join(f"{one}{delimiter}{other}\n" for one, other in [("text", 'an "other"'), *rows])
    path = tmp_path_factory.mktemp("csv") / f"a.{kind}"
    path.write_bytes(text.encode())
    read = records_of(path, count)
    expected = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))[1:]
    assert [list(r.members.values()) for r in read if isinstance(r, Record)] == expected


def test_a_lone_quote_takes_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,5" nail\n2,say "hi\n3,"a ""b""\nc"\n4,"broken" field\n5,last\n')
    read = records_of(path, 2)
    assert [(r.line, r.id) for r in read] == [(2, "1"), (3, "2"), (4, "3"), (6, None), (7, "5")]
    texts = [r.members["text"] for r in read if isinstance(r, Record)]
    assert texts == ['5" nail', 'say "hi', 'a "b"\nc', "last"]


@pytest.mark.parametrize("size", range(1, 12))
def test_quotes_are_followed_across_pieces(size: int) -> None:
    for text in (b'a,"b""c",d"\n', b'"a""', b'"",","', b'x"y,"z\n'):
        state = inputs.FIELD
        for at in range(0, len(text), size):
            state = inputs.scan_quotes(text[at : at + size], "csv", state)
        assert (state == inputs.QUOTED) == (inputs.scan_quotes(text, "csv") == inputs.QUOTED)


def test_records_of_several_lines_have_the_number_of_their_first(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\nx,"a\nb"\ny,"c ""d"" e"\nz\nw,f\n')
    read = records_of(path, 1)
    assert [(r.line, r.id) for r in read] == [(2, "x"), (4, "y"), (5, None), (6, "w")]
    assert isinstance(read[2], Failure) and "1 fields, the file 2 columns" in read[2].message
    assert isinstance(read[1], Record) and read[1].members["text"] == 'c "d" e'


def test_a_quote_that_is_never_closed_takes_no_more_than_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_RECORD", 1000)
    path = tmp_path / "a.csv"
    path.write_text('text\ngood\n"open\n' + "x\n" * 200_000)  # quadratic counting would take minutes
    good, failure = records_of(path)
    assert isinstance(good, Record) and isinstance(failure, Failure)
    assert failure.line == 3 and "quote never closed" in failure.message


def test_tables_without_the_column_are_refused_with_what_they_have(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("title\tbody\nx\ty\n")
    with pytest.raises(FormatError, match="no column is called text, it has: title, body"):
        check_sources(find_sources([path]), ["text"])
    check_sources(find_sources([path]), ["body"])


@pytest.mark.parametrize(
    ("header", "message"), [("", "it is empty"), ("a,a\n", "two columns are called 'a'"), ('"a\n', "quote")]
)
def test_a_bad_header_is_named(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(header)
    with pytest.raises(FormatError, match=message):
        check_sources(find_sources([path]), ["a"])


# -- Parquet ---------------------------------------------------------------------------------------------------------
def test_binary_columns_of_parquet_files_are_texts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = pyarrow.array(["é".encode(), b"b\xffd", None, b"last\nline"], pyarrow.binary())
    moments = pyarrow.array([None, None, None, 5], pyarrow.timestamp("s"))
    messages = [[{"role": b"user", "content": b"hi"}]] * 3 + [[{"role": b"user", "content": b"\xff"}]]
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.binary()), ("content", pyarrow.binary())]))
    table = {"text": texts, "when": moments, "messages": pyarrow.array(messages, kind)}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")

    def read(*columns: str) -> list[Any]:
        shards = cut(find_sources([tmp_path / "a.parquet"]), 3, 1 << 20, columns)
        records = [record for shard in shards for record in read_records(shard, "text")]
        return [record.members if isinstance(record, Record) else record.message for record in records]

    first, bad, missing, last = read("text")
    assert (first, missing, last) == ({"text": "é"}, {"text": None}, {"text": "last\nline"})
    assert bad == "text: not UTF-8 text: byte 0xff at 1"
    assert read("when") == [{"when": None}] * 3 + ["when: expected a text, found a value of the type datetime"]
    assert read("messages")[0] == {"messages": [{"role": "user", "content": "hi"}]}
    assert read("messages")[3] == "messages: not UTF-8 text: byte 0xff at 0"


# -- files -----------------------------------------------------------------------------------------------------------
def test_folders_stand_for_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "c.csv", "d.bin"):
        (tmp_path / name).touch()
    names = [Path(source.name).name for source in find_sources([tmp_path])]
    assert names == ["a.jsonl.gz", "b.txt", "c.csv"]


def test_inputs_that_cannot_be_read_again_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="no regular file"):
        find_sources([pipe])
    with pytest.raises(RequestError, match="cannot be read"):
        find_sources([tmp_path / "nope.txt"])
    file = tmp_path / "b.raw"
    file.touch()
    with pytest.raises(RequestError, match="does not tell the format"):
        find_sources([file])
    assert find_sources([file], "text")[0].kind == "text"
    with pytest.raises(RequestError, match="twice"):
        find_sources([file, tmp_path / "." / "b.raw"], "text")


def test_a_shards_digest_depends_on_its_place_and_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("x\ny\n")
    second.write_text("x\nz\n")
    digests = [shard.digest for shard in cut(find_sources([first, second]), 1, 100)]
    assert len(set(digests)) == 4
    assert digests == [shard.digest for shard in cut(find_sources([first, second]), 1, 100)]
