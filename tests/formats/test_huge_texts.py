"""Huge texts: excess length is detected without encoding all of it, and texts that fit are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from test_tokenizer import HARD_TEXTS, VOCABS, vocab

from rlx.errors import RequestError
from rlx.formats.tokenizer import Tokenizer


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of characters encoded by each call."""
    counts: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def counting(self: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        counts.append(sum(map(len, texts)))
        return encode_batch(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    return counts


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen2"])
@pytest.mark.parametrize("unit", ["a", "hello world\n", "你好", "x9-", "\U0001f642"])
def test_a_huge_text_is_not_encoded_to_see_that_it_is_too_long(name: str, unit: str, sizes: list[int]) -> None:
    text = unit * 200_000
    assert len(vocab(name).clip_text(text, 2048)) < len(text)
    assert sum(sizes) < 100_000


def test_a_text_that_fits_is_left_alone_however_long_it_is() -> None:
    spaces = " " * 40_000  # Llama 3 has tokens of 128 spaces
    assert len(vocab("llama-bpe").encode(spaces, add_special=False)) < 1000
    assert vocab("llama-bpe").clip_text(spaces, 1000) == spaces
    word = "\u4e00" * 30_000  # BERT calls a word of more than 100 characters unknown
    latin = "x" * 30_000
    assert vocab("bert-bge").clip_text(latin, 8) == latin
    assert len(vocab("bert-bge").clip_text(word, 8)) < len(word)


@pytest.mark.parametrize("name", VOCABS)
def test_a_limit_cuts_a_huge_text_as_it_cuts_the_ids_of_all_of_it(name: str) -> None:
    texts = [" ".join(HARD_TEXTS) * 60, "word " * 8000, "\n".join(f"{n} × {n}" for n in range(4000)), "é" * 30_000]
    tokenizer = vocab(name)
    for text in texts:
        ids = tokenizer.encode(text)
        for limit in (8, 100, 513):
            before, after = len(tokenizer.prefix), len(tokenizer.suffix)
            expected = ids if len(ids) <= limit else [*ids[: limit - after], *ids[len(ids) - after :]]
            assert tokenizer.encode(text, limit=limit) == expected and before + after <= limit


def test_half_a_character_far_inside_a_huge_text_is_refused() -> None:
    with pytest.raises(RequestError, match="text 1: half of a surrogate pair, 0xd800 at 9000"):
        vocab("bert-bge").encode_batch(["a", "x" * 9000 + "\ud800"], limit=64)
    assert vocab("bert-bge").clip_text("x" * 9000 + "\ud800", 64).endswith("\ud800")
