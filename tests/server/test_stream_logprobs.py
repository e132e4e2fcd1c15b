"""Log-probabilities of streams: the same entries as in a plain answer, however late the event loop is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import rlx
from rlx.server.exchange import Exchange

from .load import Answer, text_entries

pytestmark = pytest.mark.serve
STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "the cat", "logprobs": 2},
}


def entries_of(choice: dict[str, Any]) -> list[Any]:
    """Comparable entries of a choice or a chunk."""
    listed = choice["logprobs"] or {}
    if "tokens" in listed:
        return list(zip(*(listed[n] for n in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True))
    return list(listed.get("content") or [])


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


@pytest.fixture(params=[0.0, 0.01])
def lag(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks the event loop at every write, so that the engine runs far ahead of it."""
    write = Exchange.write

    async def late(self: Exchange, data: bytes, more: bool = True) -> None:
        time.sleep(request.param)
        await write(self, data, more)

    monkeypatch.setattr(Exchange, "write", late)


@pytest.mark.parametrize("path", list(STREAMS))
def test_streams_have_the_entries_of_plain_answers(http: Any, lag: None, path: str) -> None:
    for seed in range(6):
        body = STREAMS[path] | {"model": "tiny", "seed": seed, "max_tokens": 60, "logit_bias": {"0": -100, "2": -100}}
        text = text_of(http.post(path, json=body).json()["choices"][0])
        for stop in ([], [text[24:29]], [text[:3]]):
            wanted = http.post(path, json=body | {"stop": stop}).json()["choices"][0]
            assert wanted["finish_reason"] == ("stop" if stop else "length")
            streamed, sent = list[Any](), ""
            with http.stream("POST", path, json=body | {"stop": stop, "stream": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        sent += text_of(choice)
                        streamed += entries_of(choice)
                        # all but the last token are in the text: that one may reach into what is held back
                        sizes = [len(entry["bytes"]) for entry in streamed[:-1] if isinstance(entry, dict)]
                        assert sum(sizes) <= len(sent.encode())
            assert sent == text_of(wanted) == text[: len(sent)]
            assert streamed == entries_of(wanted)
            assert streamed or not sent


def test_the_load_test_sees_missing_and_wrong_entries(model: rlx.LanguageModel) -> None:
    wanted = model.chat("hi", max_tokens=8, logprobs=3)
    entries = text_entries(model, wanted, 2)
    answer = Answer()
    answer.text, answer.finish, answer.entries = wanted.text, wanted.finish_reason, entries  # type: ignore[assignment]
    assert len(entries) == 8 and answer.difference(wanted, entries, False) is None
    wrong = [entries[:-1], [*entries, entries[-1]]]
    for key, value in (("bytes", []), ("top_logprobs", []), ("logprob", -0.5), ("token", "?")):
        wrong.append([{**entries[0], key: value}, *entries[1:]])
    for listed in wrong:
        answer.entries = listed
        assert answer.difference(wanted, entries, False)
    answer.text, answer.entries = wanted.text[:3], entries[:3]
    assert answer.difference(wanted, entries, True) is None
    answer.entries = entries[1:3]
    assert answer.difference(wanted, entries, True)
