"""What workers compute: the same as the model's own calls, line by line, with bad lines left out."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from batch.conftest import Inline, write_texts
from rlx.batch import Results
from rlx.batch.generate_task import Generate
from rlx.batch.records import Record
from rlx.errors import CapabilityError, RequestError


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def openai_line(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def lines_of(errors: Results) -> list[tuple[int, str]]:
    return [(error["line"], error["error"]) for error in errors.errors()]


# -- embed -----------------------------------------------------------------------------------------------------------
def test_vectors_are_those_of_the_model(encoder: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "a.txt", 50)
    results = rlx.batch.embed(tmp_path / "a.txt", tmp_path / "out", encoder, runner=Inline(), shard_records=7)
    with rlx.load(encoder) as model:
        expected = model.embed(texts)
        tokens = sum(map(len, model.text_rows(texts)))
    assert results.vectors().tobytes() == expected.tobytes()
    assert results.counts == {"records": 50, "rows": 50, "errors": 0, "tokens": tokens, "shards": 8}
    assert [row["line"] for row in results] == list(range(1, 51))
    results.verify()


def test_vectors_as_json_are_exact(encoder: Path, tmp_path: Path) -> None:
    lines = [{"id": "x", "text": "bal bam"}, "bad", {"id": 2, "text": "gus"}, {"title": "no text"}]
    results = rlx.batch.embed(
        write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out", encoder, format="jsonl", runner=Inline()
    )
    rows = list(results)
    assert [(row["line"], row["id"]) for row in rows] == [(1, "x"), (3, 2)]
    with rlx.load(encoder) as model:
        assert (
            np.array([row["vector"] for row in rows], np.float32).tobytes() == model.embed(["bal bam", "gus"]).tobytes()
        )
    assert [line for line, _ in lines_of(results)] == [2, 4]
    assert lines_of(results)[1][1] == "text: expected a text, there are title"


def test_texts_that_are_too_long_are_cut_or_failures(encoder: Path, tmp_path: Path) -> None:
    long = " ".join(["bal"] * 400)
    path = write_lines(tmp_path / "a.txt", ["gus", long, "bam"])
    cut = rlx.batch.embed(path, tmp_path / "cut", encoder, runner=Inline())
    strict = rlx.batch.embed(path, tmp_path / "strict", encoder, truncate=False, runner=Inline())
    assert (len(cut), len(strict)) == (3, 2)
    (error,) = strict.errors()
    assert error["line"] == 2 and "tokens, the model reads 160" in error["error"]
    assert strict.vectors().tobytes() == cut.vectors()[[0, 2]].tobytes()


def test_openais_embedding_lines_have_answers_in_its_form(encoder: Path, tmp_path: Path) -> None:
    url = "/v1/embeddings"
    lines = [
        openai_line("a", url, input=["bal", "bam gus"], model="m", encoding_format="base64"),
        openai_line("b", url, input="gus"), openai_line("c", "/v1/chat/completions", messages=[]),
        openai_line("d", url, input="gus", dimensions=3), openai_line("e", url, input=[1, 2]),
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", lines)
    results = rlx.batch.embed(path, tmp_path / "out", encoder, format="jsonl", runner=Inline())
    first, second = list(results)
    with rlx.load(encoder) as model:
        vectors = model.embed(["bal", "bam gus", "gus"])
    body = first["response"]["body"]
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), np.float32) for entry in body["data"]]
    assert first["custom_id"] == "a" and first["error"] is None and first["response"]["status_code"] == 200
    assert np.array(decoded).tobytes() == vectors[:2].tobytes() and body["usage"]["prompt_tokens"] == 7
    assert np.array(second["response"]["body"]["data"][0]["embedding"], np.float32).tobytes() == vectors[2].tobytes()
    errors = list(results.errors())
    assert [error["custom_id"] for error in errors] == ["c", "d", "e"]
    assert errors[1]["response"] is None and errors[1]["id"].startswith("batch_req_") and errors[1]["line"] == 4
    assert errors[1]["error"]["message"] == f"dimensions: 3 is asked for, vectors have {vectors.shape[1]}"
    assert errors[1]["error"]["code"] == "invalid_request"


def test_equal_lines_of_two_files_have_ids_of_their_own(encoder: Path, decoder: Path, tmp_path: Path) -> None:
    def ids_of(call: Any, model: Path, line: dict[str, Any]) -> list[str]:
        bad = {"custom_id": "bad", "body": 1}
        paths = [write_lines(tmp_path / f"{name}.jsonl", [line, bad]) for name in "ab"]
        out = tmp_path / f"out-{call.__name__}"
        results = call(paths, out, model, runner=Inline(), **({"format": "jsonl"} if call is rlx.batch.embed else {}))
        errors = list(results.errors())
        assert [error["custom_id"] for error in errors] == ["bad", "bad"]
        bodies = [row["response"]["body"].get("id", row["id"]) for row in results]
        return [*(row["id"] for row in results), *(error["id"] for error in errors), *bodies]

    embedded = ids_of(rlx.batch.embed, encoder, openai_line("a", "/v1/embeddings", input="gus"))
    assert len(set(embedded)) == 4
    line = openai_line("a", "/v1/completions", prompt="hello", max_tokens=2)
    assert len(set(ids_of(rlx.batch.generate, decoder, line))) == 6


def test_odd_ids_are_errors_only_if_results_have_ids(encoder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "gus", "id": 1.5}, {"text": "bal", "id": {}}, {"id": 2.5}])
    table = rlx.batch.embed(path, tmp_path / "table", encoder, runner=Inline(), index=tmp_path / "index")
    assert len(table) == 2 and lines_of(table) == [(3, "text: expected a text, there are id")]
    listed = rlx.batch.embed(path, tmp_path / "lines", encoder, format="jsonl", runner=Inline())
    assert len(listed) == 0 and [line for line, _ in lines_of(listed)] == [1, 2, 3]


# -- generate --------------------------------------------------------------------------------------------------------
def test_texts_are_those_of_the_model(decoder: Path, tmp_path: Path) -> None:
    prompts = ["hello", "a much longer prompt of some words", "x" * 5000, "hello"]
    path = write_lines(tmp_path / "a.txt", prompts)
    results = rlx.batch.generate(path, tmp_path / "out", decoder, max_tokens=12, stop="\x05", runner=Inline())
    with rlx.load(decoder) as model:
        expected = [model.generate(prompts[i], max_tokens=12, stop="\x05") for i in (0, 1, 3)]
    assert [row["text"] for row in results] == [one.text for one in expected]
    assert [row["completion_tokens"] for row in results] == [one.usage.completion_tokens for one in expected]
    assert [error["line"] for error in results.errors()] == [3]


def test_conversations_are_answered_through_the_template(decoder: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines = [{"messages": messages, "id": 1}, {"messages": "hi"}, {"prompt": [72, 105]}]
    results = list(rlx.batch.generate(
        write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out", decoder, max_tokens=9, runner=Inline()
    ))  # fmt: skip
    chat = list(rlx.batch.generate(
        write_lines(tmp_path / "b.txt", ["hi"]), tmp_path / "chat", decoder, chat=True, system="be brief", max_tokens=9,
        runner=Inline(),
    ))  # fmt: skip
    with rlx.load(decoder) as model:
        answer = model.chat(messages, max_tokens=9).text
        assert [row["text"] for row in results] == [answer, model.generate([72, 105], max_tokens=9).text]
    assert chat[0]["text"] == answer


def test_sampled_texts_depend_on_their_place_and_the_seed_only(decoder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", ["hello"] * 6)

    def texts(name: str, records: int, **sampling: Any) -> list[str]:
        sampling = {"temperature": 1.0, **sampling}
        return [row["text"] for row in rlx.batch.generate(
            path, tmp_path / name, decoder, max_tokens=8, sampling=sampling, runner=Inline(), shard_records=records
        )]  # fmt: skip

    first = texts("a", 6)
    assert texts("b", 1) == texts("c", 4) == first
    assert len(set(first)) > 1, "every line has a seed of its own"
    assert texts("d", 6, seed=1) != first


def test_openais_chat_lines_have_answers_in_its_form(decoder: Path, tmp_path: Path) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    hello = [{"role": "user", "content": "hi"}]
    lines = [
        openai_line("a", chat, messages=hello, max_tokens=6, temperature=0, model="gpt-x", top_p=1),
        openai_line("b", text, prompt="hello", temperature=0),
        openai_line("c", chat, messages=hello, seed=5, max_completion_tokens=4),
        openai_line("d", chat, messages=hello, tools=[{"type": "function"}]),
        openai_line("e", chat, messages=hello, n=2),
        openai_line("f", chat, messages=[]),
        openai_line("g", chat, messages=hello, max_tokens=-1),
        openai_line("h", chat, messages=hello, temperature="hot"),
        openai_line("i", "/v1/images", prompt="x"),
    ]
    results = rlx.batch.generate(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out", decoder, runner=Inline())
    rows = {row["custom_id"]: row["response"]["body"] for row in results}
    with rlx.load(decoder) as model:
        tokens = model.chat_tokens(hello)
        assert rows["a"]["choices"][0]["message"]["content"] == model.chat(hello, max_tokens=6).text
        assert rows["b"]["choices"][0]["text"] == model.generate("hello", max_tokens=16).text
        sampled = model.chat(hello, max_tokens=4, temperature=1.0, seed=5).text
        assert rows["c"]["choices"][0]["message"]["content"] == sampled
    assert rows["a"]["model"] == "gpt-x" and rows["a"]["usage"]["prompt_tokens"] == len(tokens)
    errors = {error["custom_id"]: error["error"]["message"] for error in results.errors()}
    assert list(errors) == list("defghi")
    assert "'tools' is not supported" in errors["d"] and "hot" in errors["h"]


def test_settings_of_a_job_are_defaults_of_openais_lines(decoder: Path, tmp_path: Path) -> None:
    chat = "/v1/chat/completions"
    hello, system = [{"role": "user", "content": "hi"}], {"role": "system", "content": "be kind"}
    lines = [
        openai_line("a", chat, messages=hello, temperature=0),
        openai_line("b", chat, messages=[system, *hello], temperature=0, max_tokens=4, stop=["\x07"]),
        openai_line("c", "/v1/completions", prompt="hello", temperature=0),
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    with rlx.load(decoder) as model:
        free = model.chat(hello, system="be brief", max_tokens=30).text
        stop = free[5]
        results = rlx.batch.generate(
            path, tmp_path / "out", decoder, chat=True, system="be brief", max_tokens=30, stop=stop, runner=Inline()
        )
        first, second = (row["response"]["body"]["choices"][0] for row in results)
        expected = model.chat(hello, system="be brief", max_tokens=30, stop=stop)
        assert first["message"]["content"] == expected.text and first["finish_reason"] == expected.finish_reason
        assert len(expected.text) < len(free), "the stop of the job is one of the line"
        other = model.chat([system, *hello], max_tokens=4, stop="\x07")
        assert second["message"]["content"] == other.text
        plain = rlx.batch.generate(path, tmp_path / "plain", decoder, max_tokens=3, runner=Inline())
        assert [row["response"]["body"]["usage"]["completion_tokens"] for row in plain] == [3, 4, 3]
    (error,) = results.errors()
    assert error["custom_id"] == "c" and "/v1/completions continues a text" in error["error"]["message"]
    with pytest.raises(RequestError, match="max_tokens is 'many', expected a number or 'auto'"):
        rlx.batch.generate(path, tmp_path / "many", decoder, max_tokens="many", runner=Inline())


def test_a_bad_seed_is_a_failure_of_its_line(decoder: Path, tmp_path: Path) -> None:
    def line(seed: Any) -> dict[str, Any]:
        return openai_line(f"{seed!r}", "/v1/completions", prompt="hello", max_tokens=2, seed=seed)

    bad = ["abc", "", [], {}, 1.5, True]
    path = write_lines(tmp_path / "a.jsonl", [line(seed) for seed in [*bad, 7, -1, 2**70, None]])
    results = rlx.batch.generate(path, tmp_path / "out", decoder, runner=Inline())
    assert [error["custom_id"] for error in results.errors()] == [repr(seed) for seed in bad]
    assert all("seed: expected a whole number, found " in error["error"]["message"] for error in results.errors())
    assert [row["custom_id"] for row in results] == ["7", "-1", str(2**70), "None"]


def test_any_error_of_reading_a_line_is_a_failure_of_that_line(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Generate._read

    def broken(task: Generate, model: Any, record: Record, seed: int) -> Any:
        if record.line == 2:
            raise ZeroDivisionError("one over nothing")
        if record.line == 4:
            raise MemoryError
        return read(task, model, record, seed)

    monkeypatch.setattr(Generate, "_read", broken)
    path = write_lines(tmp_path / "a.txt", ["a", "b", "c"])
    results = rlx.batch.generate(path, tmp_path / "out", decoder, max_tokens=2, runner=Inline())
    assert lines_of(results) == [(2, "ZeroDivisionError: one over nothing")] and len(results) == 2
    with pytest.raises(MemoryError):
        rlx.batch.generate(
            write_lines(path, ["a", "b", "c", "d"]), tmp_path / "other", decoder, max_tokens=2, runner=Inline()
        )


# -- score -----------------------------------------------------------------------------------------------------------
def test_scores_are_those_of_the_model(decoder: Path, tmp_path: Path) -> None:
    lines = [{"text": "hello there"}, {"text": " world", "prompt": "hello"}, {"text": 5}, {"text": "x"}]
    results = rlx.batch.score(
        write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out", decoder, per_token=True, runner=Inline()
    )
    with rlx.load(decoder) as model:
        expected = [model.score("hello there"), model.score(" world", prompt="hello"), model.score("x")]
    rows = list(results)
    assert [row["logprob"] for row in rows] == [_in_json(score.logprob) for score in expected]
    in_json = [[_in_json(t.logprob) for t in score.tokens] for score in expected]
    assert [row["token_logprobs"] for row in rows] == in_json
    assert rows[2]["perplexity"] is None and rows[2]["tokens"] == 0, "a first token has no probability"
    assert [error["line"] for error in results.errors()] == [3]


# -- settings --------------------------------------------------------------------------------------------------------
def test_settings_are_checked_before_anything_is_written(encoder: Path, decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 3)
    path, out = tmp_path / "a.txt", tmp_path / "out"
    with pytest.raises(RequestError, match="of the kind decoder, expected: encoder"):
        rlx.batch.embed(path, out, decoder)
    with pytest.raises(RequestError, match="no prompt 'nope'"):
        rlx.batch.embed(path, out, encoder, prompt="nope")
    with pytest.raises(RequestError, match="no format is called 'xml'"):
        rlx.batch.embed(path, out, encoder, format="xml")
    with pytest.raises(RequestError, match=r"top_p is 0\.5, which needs a temperature"):
        rlx.batch.generate(path, out, decoder, sampling={"top_p": 0.5})
    with pytest.raises(RequestError, match="no setting is called 'hot'"):
        rlx.batch.generate(path, out, decoder, sampling={"hot": 1})
    with pytest.raises(RequestError, match="no runner is called 'dask'"):
        rlx.batch.embed(path, out, encoder, runner="dask")
    with pytest.raises(RequestError, match="workers is 0"):
        rlx.batch.embed(path, out, encoder, workers=0)
    with pytest.raises(CapabilityError):
        rlx.batch.embed(path, out, encoder, load={"precision": "f8"})
    assert not out.exists()


def _in_json(number: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(number) else number
