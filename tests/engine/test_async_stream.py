"""`model.astream`: the pieces of `model.stream` on an event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import tiny_llama

import rlx
from rlx.errors import NotEndedError, RequestError

PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> rlx.LanguageModel:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama.write(folder)
    loaded = rlx.load(folder)
    assert isinstance(loaded, rlx.LanguageModel)
    return loaded


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> rlx.LanguageModel:
    """A small model with a tokenizer."""
    loaded = rlx.load(stand_ins.write_chat(tmp_path_factory.mktemp("talker")))
    assert isinstance(loaded, rlx.LanguageModel)
    return loaded


def streaming_threads() -> int:
    return sum(thread.name == "rlx-astream" for thread in threading.enumerate())


def test_a_stream_ends_with_the_completion_of_generate(model: rlx.LanguageModel) -> None:
    async def read() -> list[int]:
        async with model.astream(PROMPT, max_tokens=9, temperature=1.0, seed=3) as stream:
            async for _ in stream:
                pass
            return stream.completion.tokens

    assert asyncio.run(read()) == model.generate(PROMPT, max_tokens=9, temperature=1.0, seed=3).tokens


def test_a_running_stream_has_what_was_read_so_far(model: rlx.LanguageModel, talker: rlx.LanguageModel) -> None:
    async def read(prompt: Any) -> None:
        reader = talker if isinstance(prompt, str) else model
        expected = reader.generate(prompt, max_tokens=9, logprobs=1)
        async with reader.astream(prompt, max_tokens=9, logprobs=1) as stream:
            assert (stream.text, stream.tokens, stream.logprobs) == ("", [], [])
            text = ""
            async for piece in stream:
                text += piece
                assert stream.text == text and f"{len(stream.tokens)} tokens, running" in repr(stream)
                assert stream.tokens == expected.tokens[: len(stream.tokens)]
                assert stream.logprobs == (expected.logprobs or [])[: len(stream.tokens)]
            assert (stream.text, stream.tokens, stream.logprobs) == (text, expected.tokens, expected.logprobs)
        assert "9 tokens, ended" in repr(stream)

    for prompt in (PROMPT, "Hello"):
        asyncio.run(read(prompt))
    with pytest.raises(NotEndedError, match="it has not ended"):
        _ = model.astream(PROMPT).completion
    with pytest.raises(AttributeError, match=r"no attribute 'close': await aclose\(\) stops it"):
        model.astream(PROMPT).close()  # type: ignore[attr-defined]
    assert model.astream(PROMPT).logprobs is None


def test_several_streams_at_once(model: rlx.LanguageModel) -> None:
    async def read(seed: int) -> list[int]:
        stream = model.astream(PROMPT, max_tokens=12, temperature=1.0, seed=seed)
        async for _ in stream:
            pass
        return stream.completion.tokens

    async def read_all() -> list[list[int]]:
        return list(await asyncio.gather(*(read(seed) for seed in range(5))))

    expected = [model.generate(PROMPT, max_tokens=12, temperature=1.0, seed=seed).tokens for seed in range(5)]
    assert asyncio.run(read_all()) == expected


def test_closing_and_cancelling_stop_the_model(model: rlx.LanguageModel) -> None:
    async def leave() -> None:
        async with model.astream(PROMPT, max_tokens=None) as stream:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert streaming_threads() == 0


def test_errors_are_raised_where_they_are_awaited(model: rlx.LanguageModel) -> None:
    with pytest.raises(RequestError):
        model.astream(PROMPT, temperature=-1)

    async def read() -> None:
        async for _ in model.astream(PROMPT, max_tokens=3, allowed=lambda tokens: 1 / 0):
            pass

    with pytest.raises(Exception, match="division"):
        asyncio.run(read())
