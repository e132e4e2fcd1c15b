"""The conversation on a terminal: what is sent along, what the commands do, and what Ctrl-C stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pty_session import PtySession
from stub_model import INTERRUPT, StubModel

from rlx.cli import chat
from rlx.errors import CapabilityError

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K" / "stories260K.bin"


def talk(
    model: StubModel, *lines: str | type[BaseException], system: str | None = None, raw: bool = False
) -> list[str]:
    """Run the loop on typed lines; exceptions are keys. Gives the prompts that were shown."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])
    asked = []

    def read(prompt: str) -> str:
        asked.append(prompt)
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    assert chat.loop(model, {"max_tokens": 9}, system=system, raw=raw, read=read) == 0  # type: ignore[arg-type]
    return asked


def roles(said: list[dict[str, str]]) -> str:
    return " ".join(f"{m['role'][0]}:{m['content']}" for m in said)


def test_everything_said_before_is_sent_along() -> None:
    model = StubModel(["one"], ["two", "!"], ["three"])
    talk(model, "first", "second", "third", system="S")
    assert [roles(said) for said in model.asked] == [
        "s:S u:first",
        "s:S u:first a:one u:second",
        "s:S u:first a:one u:second a:two! u:third",
    ]
    assert all(options == {"max_tokens": 9} for options in model.options)


def test_clear_forgets_all_but_the_system_message(capsys: pytest.CaptureFixture[str]) -> None:
    model = StubModel(["one"], ["two"])
    talk(model, "first", "/clear", "second", system="S")
    assert roles(model.asked[1]) == "s:S u:second"
    assert "forgotten" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = StubModel(["one", INTERRUPT], [INTERRUPT], ["two"])
    talk(model, "first", "lost", "second")
    assert [roles(said) for said in model.asked] == ["u:first", "u:first a:one u:lost", "u:first a:one u:second"]
    out, err = capsys.readouterr()
    assert out == "one\n\ntwo\n\n"
    assert "stopped\n" in err and "stopped; the message is forgotten\n" in err


def test_ctrl_c_before_the_first_word_stops_that_message_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StubModel(["one"])
    count = model.chat_tokens
    calls = iter([KeyboardInterrupt, None])

    def chat_tokens(said: list[dict[str, str]]) -> list[str]:
        if (error := next(calls)) is not None:
            raise error
        return count(said)

    monkeypatch.setattr(model, "chat_tokens", chat_tokens)
    talk(model, "lost", "first")
    assert [roles(said) for said in model.asked] == ["u:first"]


def test_ctrl_c_at_the_prompt_says_how_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    talk(StubModel(), KeyboardInterrupt, "/help", "/nonsense", "")
    err = capsys.readouterr().err
    assert "Ctrl-D or /bye leaves" in err
    assert "/clear   forget the conversation" in err
    assert "/nonsense is no command" in err


def test_bye_leaves_and_paths_are_messages() -> None:
    model = StubModel(["a"], ["b"])
    assert len(talk(model, "/etc/hosts is what?", "/usr/bin", "/bye", "never read")) == 3
    assert [said[-1]["content"] for said in model.asked] == ["/etc/hosts is what?", "/usr/bin"]


def test_triple_quotes_hold_several_lines() -> None:
    model = StubModel(["a"], ["b"], ["c"])
    asked = talk(model, '"""one', "", 'two"""', '"""three"""', '"""', "four", '"""')
    assert [said[-1]["content"] for said in model.asked] == ["one\n\ntwo", "three", "four"]
    assert asked == [">>> ", "... ", "... ", ">>> ", ">>> ", "... ", "... ", ">>> "]


def test_a_full_context_says_what_to_do_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = StubModel(["word " * 40], ["fine"], ["yes"], context=60, longest=60)
    talk(model, "first", "word " * 30, "short")
    err = capsys.readouterr().err
    assert "that makes 74 tokens, the context holds 60" in err
    assert "/clear forgets what was said before" in err
    assert roles(model.asked[-1]).endswith("u:short")
    assert len(model.asked) == 2


def test_a_base_model_continues_each_text_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = StubModel(["x"], ["y"], template=False)
    talk(model, "Once", "Twice")
    assert model.asked == ["Once", "Twice"]
    assert "base model: continuing your text" in capsys.readouterr().err
    with pytest.raises(CapabilityError, match="--system needs a chat template"):
        talk(StubModel(template=False), system="S")


def test_raw_leaves_the_template_out() -> None:
    model = StubModel(["x"])
    talk(model, "Once", raw=True)
    assert model.asked == ["Once"]


@pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")
def test_a_whole_session_on_a_terminal() -> None:
    with PtySession("-m", "rlx.cli.main", "run", str(STORIES), "--max-tokens", "20") as session:
        assert "base model: continuing your text" in session.wait_for(">>> ")
        session.type("Onec\x7f\x7fce\r")  # the line can be edited
        told = session.wait_for(">>> ")
        assert "upon a time" in told and "answer 20 tok" in told
        session.interrupt("Ctrl-D or /bye leaves")
        session.wait_for(">>> ")
        session.type("\x1b[A\r")  # the key up brings the last line back
        assert "upon a time" in session.wait_for(">>> ")
        session.type("\x04")
        assert session.end() == 0
        assert b"loading" in session.shown


ENDLESS = """
import itertools, time
from rlx.cli import chat
from stub_model import StubModel, StubStream

class Slow(StubStream):
    def __iter__(self):
        for i in itertools.count():
            time.sleep(0.01)
            yield f"word{i} "

model = StubModel()
model.stream = lambda tokens, **options: print(len(model.said), "messages") or Slow([], 1)
raise SystemExit(chat.loop(model, {}))
"""


def test_ctrl_c_on_a_terminal_stops_the_answer_not_the_program() -> None:
    with PtySession("-c", ENDLESS) as session:
        for count in (1, 3, 5):  # the answers that were stopped are part of the conversation
            session.wait_for(">>> ")
            session.type("go on\r")
            session.wait_for(f"{count} messages")
            session.wait_for("word3 ")
            session.type("\x03")
            session.wait_for("stopped")
        session.wait_for(">>> ")
        session.type("/bye\r")
        assert session.end() == 0


@pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")
def test_a_dumb_terminal_gets_no_escapes() -> None:
    words = ["-m", "rlx.cli.main", "run", str(STORIES), "-p", "Zoo", "--max-tokens", "3"]
    with PtySession(*words, term="dumb") as session:
        assert session.end() == 0
    assert b"\x1b" not in session.shown and b"loading" not in session.shown and b"answer 3 tok" in session.shown
