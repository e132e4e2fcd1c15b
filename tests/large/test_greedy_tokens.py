"""Greedy tokens of SmolLM2, Qwen2.5-Coder and Gemma 3 against llama-cpp-python with keys and values cached in f32.

On a quantised file llama.cpp rounds activations to 8 bits before each matmul, which moves its logits by some tenths;
rlx does so too unless it is asked for `precision="f32"`, as here: two roundings that are not the same have nothing to
agree on. So the rule, tokens are equal or the margin at the
first difference is below 1e-3, can hold in full only where both compute the same thing: on a copy of the file whose
weights the `gguf` package has dequantised. On the file itself a third party decides where the two part: transformers in
float64 must say what rlx says.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_models import Greedy

from rlx.engine.language_model import LanguageModel

pytestmark = pytest.mark.large
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
]
COUNT = 32
MARGIN = 1e-3


def first_difference(model: LanguageModel, prompt: str, answer: dict[str, list[int]]) -> tuple[int, list[int]] | None:
    """Where the tokens part and ours up to there, or None. A text that its model ends has fewer tokens than asked."""
    tokens = model.token_ids(prompt)
    assert tokens == answer["prompt"]
    ours, theirs = model.generate(tokens, max_tokens=COUNT).tokens, answer["tokens"]
    if len(ours) < COUNT:
        assert ours[-1] in model.tokenizer.stop_ids
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return None if at is None else (at, tokens + ours[: at + 1])


def test_tokens_on_the_same_weights_are_those_of_llama_cpp(
    path: Path, llama_cpp: Greedy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from float_copy import float_copy

    room = shutil.disk_usage(tmp_path).free
    if room < 10 * path.stat().st_size:
        pytest.skip(f"{tmp_path} has {room / 1e9:.0f} GB left, too few for a copy of {path.name} in f32")
    copy = tmp_path / "f32.gguf"
    float_copy(path, copy)
    answers = llama_cpp(copy, PROMPTS, COUNT)
    copy.unlink()  # before the model is loaded: its pages are memory too
    model = request.getfixturevalue("model")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        if parted := first_difference(model, prompt, answer):
            first, second = answer["tops"][parted[0]]
            assert first - second < MARGIN, f"{prompt!r}: token {parted[0]} differs, the margin is {first - second}"


def test_tokens_on_the_packed_file_are_those_of_llama_cpp_or_of_float64(
    path: Path, model: LanguageModel, llama_cpp: Greedy
) -> None:
    pytest.importorskip("transformers")
    from float64 import Float64Model

    oracle: Float64Model | None = None
    for prompt, answer in zip(PROMPTS, llama_cpp(path, PROMPTS, COUNT), strict=True):
        if parted := first_difference(model, prompt, answer):
            oracle = oracle or Float64Model(path)
            *before, ours = parted[1]
            logits = oracle.logits(before)[-1]
            best = float(logits.max())
            assert best - logits[ours] < MARGIN, (
                f"{prompt!r}: token {parted[0]}, llama.cpp and float64 differ from ours"
            )
