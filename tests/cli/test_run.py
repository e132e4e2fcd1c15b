"""`rlx run` with a prompt: what is a model and what a prompt, what goes to stdout and what to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_model import INTERRUPT, StubModel

from rlx.cli import run
from rlx.cli.console import UsageError
from rlx.cli.main import main
from rlx.cli.run import split_words
from rlx.errors import NotFoundError, RequestError

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubModel:
    """Loading any model gives this one; stdin has nothing."""
    model = StubModel(["Red", " and", " blue."])
    monkeypatch.setattr(run, "open_model", lambda name, arguments: model)
    monkeypatch.setattr(sys, "stdin", None)
    return model


# -- arguments -------------------------------------------------------------------------------------------------------
def test_one_word_is_a_model_or_a_mistake_never_a_guess(tmp_path: Path) -> None:
    assert split_words(["smollm2-135m"], None, None) == ("smollm2-135m", None)
    assert split_words(["org/name:Q4_K_M"], None, None) == ("org/name:Q4_K_M", None)
    assert split_words(["two words"], None, None) == (None, "two words")
    assert split_words(["a", "b"], None, None) == ("a", "b")
    assert split_words(["word"], "m", None) == ("m", "word")
    assert split_words(["minilm-l6"], None, "word") == ("minilm-l6", "word")
    spaced = tmp_path / "my model.gguf"
    spaced.touch()
    assert split_words([str(spaced)], None, None) == (str(spaced), None)
    with pytest.raises(NotFoundError, match="'smollm3' is not a catalogue model") as caught:
        split_words(["smollm3"], None, None)
    assert "did you mean 'smollm2'" in "\n".join(caught.value.notes)
    assert "rlx run -p smollm3" in "\n".join(caught.value.notes)
    with pytest.raises(NotFoundError, match=r"\./absent\.gguf: no such file"):
        split_words(["./absent.gguf"], None, None)


@pytest.mark.parametrize(
    ("words", "model", "prompt"), [(["a", "b", "c"], None, None), (["a", "b"], "m", None), (["a"], "m", "p")]
)
def test_more_than_a_model_and_a_prompt_is_a_mistake(words: list[str], model: str | None, prompt: str | None) -> None:
    with pytest.raises(UsageError, match="at most a model and a prompt"):
        split_words(words, model, prompt)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["-p", "x", "--top-p", "0"], "top_p is 0.0"),
        (["-p", "x", "--top-k", "40"], "hint: --temperature 1.0"),
        (["-p", "x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["-p", "x", "--threads", "-2"], "--threads is -2"),
        (["-p", "x", "--stop", ""], "--stop is an empty text"),
        (["-p", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        ([], "there is no prompt"),
        ([""], "the prompt is empty"),
        ([" \n "], "the prompt is empty"),
        (["-p", "caf\udce9"], "the prompt is not UTF-8 text: byte 0xe9 at 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and not out


# -- answers ---------------------------------------------------------------------------------------------------------
def test_the_answer_goes_to_stdout_and_the_timings_to_stderr(
    stub: StubModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "Name two colours.", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert out == "Red and blue.\n"
    assert err == "prompt 7 tok 31/s · answer 3 tok 96/s · avx512 · 2 threads · seed 7\n"
    assert stub.asked == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name two colours."}]
    ]
    assert stub.closed


def test_only_settings_that_were_given_reach_the_model(stub: StubModel) -> None:
    main(["run", "-p", "x", "--seed", "3", "--temperature", "0.5", "--stop", "a", "--stop", "b"])
    assert stub.options == [{"max_tokens": 512, "stop": ["a", "b"], "temperature": 0.5, "seed": 3}]


@pytest.mark.parametrize(("raw", "template"), [(True, True), (False, False)])
def test_without_a_template_the_text_is_continued(
    raw: bool, template: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = StubModel(["..."], template=template)
    monkeypatch.setattr(run, "open_model", lambda name, arguments: model)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "Once upon", *(["--raw"] if raw else [])]) == 0
    assert model.asked == ["Once upon"]
    assert ("base model: continuing your text" in capsys.readouterr().err) == (not template)


def test_stdin_is_added_to_the_prompt(stub: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.answers = [["a"], ["b"], ["c"]]
    for data in (b"\xef\xbb\xbfsome caf\xc3\xa9\n", b"", b" \n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
        assert main(["run", "-p", "Sum up:"]) == 0
    assert [said[-1]["content"] for said in stub.asked] == ["Sum up:\n\nsome café", "Sum up:", "Sum up:"]


def test_stdin_alone_is_the_prompt_and_must_be_text(
    stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\n")))
    assert main(["run"]) == 0
    assert stub.asked[0][-1]["content"] == "hello\n"  # the last newline is that of `echo`
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main(["run"]) == 2
    assert "stdin is not UTF-8 text: byte 0xff at 2" in capsys.readouterr().err


def test_json_is_one_object(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "Red and blue.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 3},
        "timings": {"prompt_seconds": 0.1, "answer_seconds": 0.2, "prompt_per_second": 31.4, "answer_per_second": 96.2},
        "seed": 7,
        "fingerprint": "rlx test",
    }


@pytest.mark.usefixtures("stub")
def test_json_lines_are_pieces_and_then_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "x", "--json", "--stream"]) == 0
    *pieces, completion = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [p["delta"] for p in pieces] == ["Red", " and", " blue."]
    assert completion["text"] == "Red and blue."


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_with_130_and_keeps_what_was_said(
    as_json: bool, stub: StubModel, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers = [["Red", INTERRUPT]]
    assert main(["run", "-p", "x", *(["--json"] if as_json else [])]) == 130
    assert capsys.readouterr().out == ("" if as_json else "Red\n")


def test_a_prompt_beyond_the_context_names_both_numbers_and_the_way_out(
    stub: StubModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-p", "word " * 120]) == 1
    err = capsys.readouterr().err
    assert "that makes 121 tokens, the context holds 100, the model has 200" in err
    assert "shorten the text, or start with --context 200" in err
    assert main(["run", "-p", "word " * 300]) == 1
    assert "--context" not in capsys.readouterr().err


def test_an_encoder_does_not_talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []
    encoder = SimpleNamespace(close=lambda: closed.append(True), facts=SimpleNamespace(kind="encoder"))
    monkeypatch.setattr(run, "load", lambda *a, **k: encoder)
    monkeypatch.setattr(run.hub, "resolve", lambda name: None)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "minilm-l6", "hello"]) == 1
    assert "rlx embed -m minilm-l6" in capsys.readouterr().err
    assert closed == [True]


def test_settings_of_loading_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(name: str, **settings: Any) -> None:
        asked.update(settings, name=name)
        raise RequestError("enough")

    monkeypatch.setattr(run, "load", load)
    monkeypatch.setattr(run.hub, "resolve", lambda name: None)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "-m", "m", "-p", "x", "--threads", "3", "--context", "77", "--cache", "f16"]) == 1
    assert asked == {"name": "m", "device": "cpu", "threads": 3, "context": 77, "cache": "f16"}


@pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")
def test_a_real_model_tells_the_published_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "-m", str(STORIES / "stories260K.bin"), "-p", "Zoo", "--max-tokens", "60", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out)
    published = (STORIES / "expected_greedy_Zoo_60tok.txt").read_text().strip()  # its 60 tokens hold the prompt
    assert f"Zoo{completion['text']}".startswith(published)
    assert completion["usage"]["completion_tokens"] == 60 and completion["finish_reason"] == "length"
