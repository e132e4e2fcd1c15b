"""`rlx batch`."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import stand_ins

import rlx
from rlx.batch.planning import Measured, Plan
from rlx.cli import batch as command
from rlx.cli.console import BAD_FILE, FAILED, OK, USAGE
from rlx.cli.main import main
from rlx.errors import RequestError


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.write_chat(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"id": "a", "body": "hello"}\nno json\n{"id": "b", "body": "there"}\n')
    return path


def test_a_job_from_the_command_line(
    decoder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["batch", "score", str(lines), "-o", str(out), "-m", str(decoder), "--field", "body", "--workers", "1"]
    assert main(words) == OK
    notes = capsys.readouterr().err
    assert "2 results of 3 lines" in notes and f"1 lines have errors: {out / 'errors.jsonl'}" in notes
    rows = [json.loads(line) for line in (out / "part-000000.jsonl").read_text().splitlines()]
    with rlx.load(decoder) as model:
        assert [row["logprob"] for row in rows] == [score.logprob for score in model.score(["hello", "there"])]
    assert main(words) == OK, "it is finished"
    assert main([*words, "--per-token"]) == FAILED
    assert "another settings.per_token: False, now True" in capsys.readouterr().err


def test_wrong_words_are_explained(
    decoder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["-m", str(decoder)]
    assert main(["batch", "score", str(lines), *model]) == USAGE
    assert "where do the results go?" in capsys.readouterr().err
    assert main(["batch", "score", str(lines), *model, "-o", str(tmp_path / "out"), "--workers", "many"]) == USAGE
    assert "--workers is 'many'" in capsys.readouterr().err
    for words, message in (
        (["--plan-seconds", "-5"], "--plan-seconds is -5.0, expected a number above 0"),
        (["--plan-seconds", "nan"], "--plan-seconds is nan"),
        (["--ray", "auto"], "--plan measures this machine, not a Ray cluster"),
    ):
        assert main(["batch", "score", str(lines), *model, "--plan", *words]) == USAGE
        assert message in capsys.readouterr().err
    for words, message in (
        (["embed", "--chat"], "batch embed: --chat is an option of batch generate"),
        (["embed", "--temperature", "0"], "batch embed: --temperature is an option of batch generate"),
        (["score", "--index-dtype", "f32"], "batch score: --index-dtype is an option of batch embed"),
        (["generate", "--per-token"], "batch generate: --per-token is an option of batch score"),
        (["embed", "--max-tokens", "256"], "batch embed: --max-tokens is an option of batch generate"),
        (["embed", "--index-dtype", "f16"], "batch embed: --index-dtype is for an index"),
    ):
        assert main(["batch", *words, str(lines), *model, "-o", str(tmp_path / "out")]) == USAGE
        assert message in capsys.readouterr().err
    table = tmp_path / "t.csv"
    table.write_text("a,b\n1,2\n")
    assert main(["batch", "score", str(table), *model, "-o", str(tmp_path / "out")]) == BAD_FILE
    assert "no column is called text or prompt, it has: a, b" in capsys.readouterr().err
    assert main(["batch", "embed", str(lines), *model, "-o", str(tmp_path / "out")]) == FAILED
    assert "of the kind decoder, expected: encoder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    one = Measured(workers=1, records=1000, tokens=8000, size=50_000, seconds=10.0, shards=1)
    every = Measured(workers=8, records=8000, tokens=64_000, size=400_000, seconds=100.0, shards=8)
    command.show_plan(Plan(10_000_000, 80_000_000, 10_000, False, one, every, 50_000.0, 2.0))
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert rows[1] == ["1", "1", "100", "800", "27:46:42", "workers"]
    assert rows[4] == ["8", "1", "640", "5,120", "4:20:27", "workers"]
    assert rows[-1] == ["1000", "125", "50,000", "400,000", "3:22", "driver"]
    assert "about 10,000,000 lines, about 80,000,000 tokens, 10,000 shards" in printed.err


@pytest.mark.parametrize(("words", "expected"), [
    (["embed", "--prompt", "query", "--no-truncate", "--format", "jsonl", "--precision", "int8"],
     {"prompt": "query", "truncate": False, "format": "jsonl", "load": {"precision": "int8"}}),
    (["generate", "--chat", "--system", "s", "--max-tokens", "5", "--stop", "x", "--temperature", "0.5", "--seed", "3"],
     {"chat": True, "system": "s", "max_tokens": 5, "stop": ["x"], "sampling": {"temperature": 0.5, "seed": 3}}),
    (["score", "--per-token", "--context", "64"], {"per_token": True, "load": {"context": 64}}),
])  # fmt: skip
def test_options_are_settings_of_the_task(
    words: list[str], expected: dict[str, Any], lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = list[Any]()

    def plan(task: Any, *_: Any, **options: Any) -> Plan:
        tasks.append(task)
        assert options["workers"] == 2 and options["seconds"] == 1.5
        return Plan(1, 1, 1, True, *[Measured(1, 1, 1, 1, 1.0, 1)] * 2, 1.0, 1.0)

    monkeypatch.setattr(rlx.batch, "plan", plan)
    monkeypatch.setattr("rlx.hub.resolve", lambda name: None)
    assert main(["batch", *words, str(lines), "--plan", "--plan-seconds", "1.5", "--workers", "2"]) == OK
    settings = tasks[0].settings()
    assert {name: settings[name] for name in expected} == expected and tasks[0].verb == words[0]


def test_cheap_checks_come_before_the_model_and_the_cluster(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "a.txt"
    texts.write_text("hello\nthere\n")
    (tmp_path / "no.txt.gz").write_text("no gzip")
    done = tmp_path / "done"
    rlx.batch.score(texts, done, decoder, workers=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    out = tmp_path / "out"

    def late(*words: object) -> None:
        pytest.fail("it is too late")

    for name in ("rlx.hub.resolve", "rlx.ray.connect", "rlx.ray.check_address", "rlx.batch.prepare"):
        monkeypatch.setattr(name, late)

    def refusal(*words: object, inputs: Path = texts) -> str:
        command = ["batch", "score", str(inputs), "-m", "nobody/nothing", "--ray", "10.0.0.1:6379", *map(str, words)]
        assert main(command) in (FAILED, BAD_FILE, USAGE)
        return capsys.readouterr().err

    assert f"{texts} is not a folder" in refusal("-o", texts)
    assert f"{texts} is not a folder" in refusal("-o", texts / "inner" / "out")
    assert "has other files, such as 'letter.txt'" in refusal("-o", tmp_path / "full")
    assert "another settings.per_token: False, now True" in refusal("-o", done, "--per-token")
    assert "another shards_of.records: 256, now 5" in refusal("-o", done, "--shard-lines", 5)
    assert f"{tmp_path / 'missing.txt'} cannot be read: No such file" in refusal(
        "-o", out, inputs=tmp_path / "missing.txt"
    )
    assert "not a complete gzip file" in refusal("-o", out, inputs=tmp_path / "no.txt.gz")
    assert "shards of 0 records" in refusal("-o", out, "--shard-lines", 0)
    assert "worker_timeout is 1.0, expected a number" in refusal("-o", out, "--worker-timeout", 1)
    assert "threads is 0, expected a number from 1" in refusal("-o", out, "--threads", 0)
    with open(done / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"another job writes to {done}" in refusal("-o", done)
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, who may write anywhere
    assert f"{out} cannot be written: Permission denied" in refusal("-o", out)
    assert not out.exists()


def test_an_unwritable_folder_is_refused_before_the_model_is_loaded() -> None:
    for out in ("a" * 300, "null\0byte"):
        with pytest.raises(RequestError, match="cannot be written: "):
            rlx.batch.score(__file__, out, "nobody/nothing", input_format="text")
