"""Models with recurrent states: same text however prompts are read, and a memory that does not grow."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_mamba
from safetensors.numpy import save_file

from rlx.engine import call_sizes
from rlx.engine.decoder import Decoder
from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.load import load
from rlx.profile import CompileProfile, KernelDispatchPolicy, Precision
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import SUFFIX

from .conftest import language_model

LONG = 4096
SAMPLING: dict[str, Any] = {"max_tokens": 6, "logprobs": 4, "temperature": 0.9, "seed": 3}
PROFILES = {
    "bf16": CompileProfile(precision=Precision(compute="bf16")),
    "common": CompileProfile().with_kernel_dispatch(KernelDispatchPolicy.FORCE_COMMON),
}
HYBRID = Path(__file__).parents[1] / "fixtures" / "models" / "qwen3_next.npz"


def write_hybrid(folder: Path) -> None:
    """Three layers with a state and one that attends, with room for long texts."""
    with np.load(HYBRID) as file:
        arrays = {name: array for name, array in file.items() if not name.startswith(("tokens.", "logits."))}
    config = json.loads(str(arrays.pop("config"))) | {"max_position_embeddings": 2 * LONG}
    save_file(arrays, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["mamba", "hybrid"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "mamba":
        tiny_mamba.write(path)
    else:
        write_hybrid(path)
    return path


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return language_model(folder, context=2 * LONG)


def prompt(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 40, count)]


def same(a: Completion, b: Completion) -> bool:
    """Equal tokens, and equal bits of their log-probabilities."""
    return a.tokens == b.tokens and a.logprobs == b.logprobs


def told(model: LanguageModel, tokens: list[int]) -> Completion:
    """Without anything that is cached."""
    model.caches.clear()
    return model.generate(tokens, **SAMPLING)


def test_logits_are_those_of_numpy(tmp_path: Path) -> None:
    tokens = prompt(300)
    wanted = tiny_mamba.forward(tiny_mamba.write(tmp_path), tokens)
    logits = language_model(tmp_path).logits(tokens)
    assert (np.abs(logits - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 1e-4


def test_long_prompts_in_any_chunks_give_the_same_text(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, completions = prompt(LONG), []
    for chunk in (64, 500, 256):
        monkeypatch.setattr(call_sizes, "CHUNK", chunk)
        completions.append(told(model, tokens))
    assert same(completions[0], completions[1]) and same(completions[0], completions[2])


def test_memory_does_not_grow_with_the_text(model: LanguageModel) -> None:
    for count, blocks in ((10, 1), (1000, 16), (3000, 47)):
        told(model, prompt(count))
        size = 2 * (3 + 6) * 40  # of two layers: the last 3 tokens of 40 channels, and 6 numbers of each
        if model.facts.family == "qwen3next":
            # three layers: the last 3 tokens of 8 heads, and 4 matrices; in one: keys and values, in blocks of 64
            size = 3 * (3 * 8 * 16 + 4 * 16 * 16)
        checkpoints = len({*range(512, count, 512), (count - 1) // 64 * 64} - {0})
        pages = 2 * 16 * 64 * blocks if model.facts.family == "qwen3next" else 0
        gc.collect()
        assert model.memory().cache == 4 * (size * checkpoints + pages)


def test_a_sequence_does_not_notice_its_neighbours(model: LanguageModel) -> None:
    """Prompts of very unequal length, more of them than there are rows, and texts that end at different times."""
    prompts = [prompt(n, seed=n) for n in (300, 1, 40, 41, 7, 260, 3, 90, 2, 33, 150)]
    model.caches.clear()
    together = model.generate(prompts, **SAMPLING)
    assert all(same(completion, told(model, tokens)) for completion, tokens in zip(together, prompts, strict=True))


def test_a_prompt_goes_on_only_from_a_checkpoint(model: LanguageModel) -> None:
    """What a state has taken in cannot be taken out again, and decoding rounds differently from prefill."""
    first = prompt(200)
    answer = model.generate(first, **SAMPLING).tokens[:-1]  # the last one was never read
    cases = [
        (first + answer + prompt(30, 1), 192), (first[:150] + prompt(60, 2), 0), (first, 192),
        (first + answer, 192), (first[:192], 0), (first[:193], 192), (first + prompt(40, 3), 192),
    ]  # fmt: skip
    for tokens, cached in cases:
        model.caches.clear()
        model.generate(first, **SAMPLING)
        again = model.generate(tokens, **SAMPLING)
        assert again.usage.cached_tokens == cached
        assert same(again, told(model, tokens))


def test_a_longer_text_does_not_push_out_the_state_of_its_beginning(model: LanguageModel) -> None:
    beginning = prompt(100)
    model.generate(beginning, max_tokens=0)
    for seed in (1, 2):
        tokens = beginning + prompt(20, seed)
        assert same(model.generate(tokens, **SAMPLING), told(model, tokens))


def test_rows_of_a_batch_take_over_whole_beginnings_only(model: LanguageModel) -> None:
    shared = prompt(120)
    prompts = [shared, shared + prompt(50, 1), shared + prompt(50, 2), shared[:100] + prompt(5, 3)]
    model.caches.clear()
    together = model.generate(prompts, **SAMPLING)
    assert all(same(completion, told(model, tokens)) for completion, tokens in zip(together, prompts, strict=True))


def test_a_call_that_broke_off_leaves_no_state_behind(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before the break have taken in tokens that others have not."""
    tokens = prompt(600)
    wanted = told(model, [*tokens, 5])
    model.caches.clear()
    run, calls = type(model.compiled).run, []

    def breaking(graph: CompiledGraph, inputs: Any) -> Any:
        calls.append(0)
        outputs = run(graph, inputs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(type(model.compiled), "run", breaking)
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens, **SAMPLING)
    assert same(model.generate([*tokens, 5], **SAMPLING), wanted)


def test_a_stream_that_was_closed_can_be_gone_on_from(model: LanguageModel) -> None:
    tokens = prompt(50)
    with model.stream(tokens, max_tokens=20, temperature=0) as stream:
        next(stream, None)
    longer = tokens + stream.completion.tokens + prompt(9, 1)
    assert same(model.generate(longer, **SAMPLING), told(model, longer))


def test_an_export_keeps_its_states(model: LanguageModel, tmp_path: Path) -> None:
    tokens = prompt(90)
    path = model.export(tmp_path / f"m{SUFFIX}", weights=True)
    with load(path) as exported:
        assert isinstance(exported, LanguageModel)
        assert same(exported.generate(tokens, **SAMPLING), told(model, tokens))


def test_keys_may_be_small_next_to_a_state(tmp_path: Path) -> None:
    write_hybrid(tmp_path)
    wanted = language_model(tmp_path).logits(prompt(70))
    logits = language_model(tmp_path, cache="f16").logits(prompt(70))
    assert 0 < np.abs(logits - wanted).max() / np.abs(wanted).max() < 1e-2


@pytest.mark.parametrize("profile", PROFILES)
def test_other_ways_of_compiling_keep_states_too(folder: Path, profile: str) -> None:
    """Narrow floats between ops, and no kernels but the ones that write states."""
    tokens = prompt(60)
    wanted, model = language_model(folder).logits(tokens), language_model(folder, profile=PROFILES[profile])
    unchunked = model.logits(tokens)
    assert np.median(np.abs(unchunked - wanted)) / np.abs(wanted).max() < 2e-2
    for chunk in (60, 7, 1):
        decoder, every = Decoder(model.compiled, model.caches.new(1)), np.arange(chunk, dtype=np.int32)
        pieces = [(at, tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)]
        chunked = np.concatenate([decoder.run([piece], [at], every[: len(piece)])[0] for at, piece in pieces])
        if model.facts.family == "mamba" or profile == "bf16":
            np.testing.assert_array_equal(chunked, unchunked)
        else:  # the delta rule rounds otherwise where it computes tokens together
            assert np.abs(chunked - unchunked).max() / np.abs(wanted).max() < 1e-4
