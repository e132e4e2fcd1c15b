"""Generation: what a small random model says against NumPy, and the same bits however the work is arranged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from scipy.special import log_softmax

from rlx.engine import call_sizes
from rlx.engine.decoder import Decoder, Pick
from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.load import load
from rlx.engine.logprobs import Logprob
from rlx.errors import RequestError
from rlx.sampling import token_bits

from .conftest import language_model

Array = np.ndarray[Any, Any]


def random_tokens(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def pairs(record: Logprob) -> list[tuple[int, float]]:
    """The likeliest tokens of a record and their log-probabilities."""
    return [(top.token, top.logprob) for top in record.top]


def same(a: Completion, b: Completion) -> bool:
    """Equal tokens, and equal bits of their log-probabilities."""
    return a.tokens == b.tokens and a.logprobs == b.logprobs and a.finish_reason == b.finish_reason


# -- against NumPy --
def test_logits_are_those_of_numpy(tiny: LanguageModel, tiny_folder: Path) -> None:
    tokens = random_tokens(90)
    wanted = tiny_llama.forward(tiny_llama.write(tiny_folder / "again"), tokens)["logits"]
    logits = tiny.logits(tokens)
    assert logits.shape == (90, 97) and logits.dtype == np.float32
    assert (np.abs(logits - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 2e-5


def test_greedy_text_and_log_probabilities_are_those_of_numpy(tiny: LanguageModel, tiny_folder: Path) -> None:
    weights = tiny_llama.write(tiny_folder / "again")
    prompt = random_tokens(20, seed=4)
    told = tiny.generate(prompt, max_tokens=12, logprobs=3)
    assert told.logprobs is not None and len(told.tokens) == len(told.logprobs) == 12
    for i, record in enumerate(told.logprobs):
        logits = tiny_llama.forward(weights, prompt + told.tokens[:i])["logits"][-1]
        wanted = log_softmax(logits)
        order = np.argsort(-wanted)
        assert record.token == told.tokens[i] == order[0]
        assert [t for t, _ in pairs(record)] == order[:3].tolist()
        assert abs(record.logprob - wanted[order[0]]) < 1e-4
        assert max(abs(p - wanted[t]) for t, p in pairs(record)) < 1e-4


def test_log_probabilities_of_sampled_tokens_come_from_the_graph(tiny: LanguageModel) -> None:
    """They are f32, as the graph gives them, and those of the logits before any setting changed them."""
    prompt = random_tokens(20, seed=4)
    told = tiny.generate(prompt, max_tokens=8, logprobs=2, temperature=0.8, repetition_penalty=1.5, seed=1)
    wanted = log_softmax(tiny.logits([*prompt, *told.tokens])[len(prompt) - 1 : -1].astype(np.float64), axis=-1)
    assert told.logprobs is not None
    for record, row in zip(told.logprobs, wanted, strict=True):
        assert record.logprob == np.float32(record.logprob)
        assert abs(record.logprob - row[record.token]) < 1e-5
        assert max(abs(p - row[t]) for t, p in pairs(record)) < 1e-5


def test_the_likeliest_tokens_do_not_depend_on_the_one_that_was_drawn(tiny: LanguageModel) -> None:
    prompt = random_tokens(20, seed=4)
    records = [tiny.generate(prompt, max_tokens=1, logprobs=9, temperature=5.0, seed=s).logprobs for s in range(8)]
    assert len({record[0].token for record in records if record}) > 3
    assert len({tuple(pairs(record[0])) for record in records if record}) == 1


def test_a_grammar_says_before_each_step_which_tokens_may_follow(tiny: LanguageModel) -> None:
    """Rows have masks of their own; a function gets the tokens of its row."""
    calls: list[list[int]] = []

    def rising(picked: Sequence[int]) -> Array | None:
        """Each token is above the last one."""
        calls.append(list(picked))
        return token_bits(range(picked[-1] + 1, 97), 97) if picked else None

    prompts = [random_tokens(9, seed=s) for s in range(3)]
    told = tiny.generate(prompts, max_tokens=4, temperature=1.5, allowed=rising, seed=3)
    assert all(done.tokens == sorted(set(done.tokens)) and len(done.tokens) == 4 for done in told)
    assert all(done.tokens[:n] in calls for done in told for n in range(4))
    fixed = tiny.generate(prompts[0], max_tokens=6, temperature=5.0, allowed=token_bits([3, 64, 96], 97), seed=0)
    assert set(fixed.tokens) <= {3, 64, 96}


def test_an_f16_cache_rounds_before_attending(tiny_folder: Path) -> None:
    tokens = random_tokens(90)
    weights = tiny_llama.write(tiny_folder / "again")
    attn = language_model(tiny_folder, cache="f16").run(tokens, capture=["layers.0.attn"])["layers.0.attn"]

    def error(cache: Any) -> Any:
        wanted = tiny_llama.forward(weights, tokens, cache)["layers.0.attn"]
        return np.median(np.abs(attn - wanted).max(-1)) / np.abs(wanted).max()

    # The median: some value always lies so close between two f16 numbers that f32 and f64 round it to different ones.
    assert error(np.float16) < 2e-6 < 1e-4 < error(np.float64)


# -- tokens of seeds, recorded when the host picked them with NumPy's exp and cumsum --
RECORDED: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [61, 87, 51, 44, 5, 55, 62, 64, 51, 26, 22, 72]),
    ({"temperature": 0.8}, [55, 14, 55, 41, 2, 55, 41, 57, 83, 11, 64, 44]),
    ({"temperature": 1.4, "top_k": 12}, [55, 14, 55, 79, 31, 56, 55, 75, 42, 90, 61, 52]),
    ({"temperature": 1.0, "top_p": 0.8}, [55, 14, 55, 41, 2, 55, 41, 57, 83, 11, 64, 44]),
    ({"temperature": 1.2, "min_p": 0.1}, [55, 14, 55, 41, 2, 55, 41, 57, 83, 29, 10, 68]),
    ({"temperature": 0.9, "repetition_penalty": 1.3}, [61, 37, 55, 64, 10, 43, 43, 67, 41, 83, 33, 69]),
    ({"frequency_penalty": 0.7, "presence_penalty": 0.4}, [61, 87, 51, 44, 5, 55, 62, 64, 78, 55, 41, 63]),
    ({"temperature": 1.1, "top_k": 30, "top_p": 0.9, "logit_bias": {3: 4.0, 50: -2.5, 60: -np.inf},
      "presence_penalty": 0.5}, [55, 14, 62, 55, 14, 55, 63, 56, 53, 85, 9, 31]),
]  # fmt: skip


def test_seeds_give_the_tokens_they_always_gave(tiny: LanguageModel) -> None:
    prompt = random_tokens(20, seed=8)
    for settings, tokens in RECORDED:
        assert tiny.generate(prompt, max_tokens=12, seed=42, **settings).tokens == tokens, settings
    batch = tiny.generate([prompt, prompt[:7], prompt[3:]], max_tokens=6, seed=7, temperature=1.3, top_p=0.9)
    rows = [[61, 57, 29, 32, 16, 62], [56, 55, 11, 16, 52, 45], [33, 57, 29, 28, 25, 38]]
    assert [c.tokens for c in batch] == rows


def test_each_prompt_of_a_batch_may_have_settings_of_its_own(tiny: LanguageModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (20, 7, 13)]
    own: dict[str, list[Any]] = {
        "max_tokens": [5, 9, 7], "temperature": [0, 0.8, 1.3], "top_k": [0, 5, 30], "top_p": [1, 0.9, 0.7],
        "min_p": [0, 0.05, 0], "repetition_penalty": [1, 1.2, 1], "frequency_penalty": [0, 0, 0.7],
        "presence_penalty": [0.4, 0, 0], "seed": [1, 2, 3], "logprobs": [0, 2, 1],
    }  # fmt: skip
    together = tiny.generate(prompts, **own)
    for i, prompt in enumerate(prompts):
        alone = tiny.generate(prompt, **{name: values[i] for name, values in own.items()})
        assert (together[i].tokens, together[i].logprobs) == (alone.tokens, alone.logprobs)
        assert together[i].seed == i + 1 and len(together[i].tokens) == own["max_tokens"][i]
    mixed = tiny.generate(prompts, max_tokens=4, temperature=1.0, seed=(1, 2, 3))  # with settings for all
    alone = [tiny.generate(p, max_tokens=4, temperature=1.0, seed=i + 1) for i, p in enumerate(prompts)]
    assert [c.tokens for c in mixed] == [c.tokens for c in alone]
    assert tiny.generate([], seed=[]) == []


def test_lists_of_settings_are_as_long_as_the_prompts(tiny: LanguageModel) -> None:
    with pytest.raises(RequestError, match="generate: seed has 3 values for 2 prompts"):
        tiny.generate([[1], [2]], seed=[1, 2, 3])
    with pytest.raises(RequestError, match="generate: max_tokens has 2 values for one prompt") as caught:
        tiny.generate([1, 2], max_tokens=[5, 6])  # type: ignore[call-overload]
    assert "generate([prompt, prompt], max_tokens=[...])" in (caught.value.hint or "")
    with pytest.raises(RequestError, match="temperature is -1, expected a number"):
        tiny.generate([[1], [2]], temperature=[0, -1])


def test_the_host_does_not_touch_logits_that_nobody_asks_for(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens come from the graph; logits stay where they are."""
    read: list[int] = []
    logits = Pick.logits.fget
    monkeypatch.setattr(Pick, "logits", property(lambda pick: read.append(pick.row) or logits(pick)))
    tiny.generate([random_tokens(9), random_tokens(5)], max_tokens=4, temperature=1.0, repetition_penalty=1.2, seed=1)
    assert not read
    tiny.generate(random_tokens(9), max_tokens=4, logprobs=2)
    assert len(read) == 4


# -- the same bits --
def last_logits(model: LanguageModel, tokens: list[int], chunk: int) -> Array:
    assert model.built.cache is not None
    decoder = Decoder.start(model.compiled, model.built.cache, 1, model.context)
    parts = [decoder.prefill([tokens[at : at + chunk]], [at])[0].logits for at in range(0, len(tokens), chunk)]
    return parts[-1]


@pytest.mark.parametrize("cache", ["f32", "f16"])
def test_bits_do_not_depend_on_chunks(tiny_folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(tiny_folder, cache=cache)
    tokens = random_tokens(150)
    unchunked, every = last_logits(model, tokens, 150), model.logits(tokens)
    assert every[-1].tobytes() == unchunked.tobytes()
    for chunk in (1, 7, 64):
        assert last_logits(model, tokens, chunk).tobytes() == unchunked.tobytes()
        monkeypatch.setattr(call_sizes, "CHUNK", chunk)
        assert model.logits(tokens).tobytes() == every.tobytes()
        model.caches.clear()
        told = model.generate(tokens, max_tokens=1, logprobs=97)
        assert told.logprobs is not None and told.tokens == [int(unchunked.argmax())]


def test_bits_do_not_depend_on_batch_neighbours(tiny: LanguageModel) -> None:
    prompts = [random_tokens(n, seed=n) for n in (5, 70, 1, 33, 6, 7, 64, 65, 8, 120, 2)]
    sampling: dict[str, Any] = {"max_tokens": 9, "logprobs": 4, "temperature": 0.9, "top_p": 0.95, "seed": 3}
    alone = []
    for prompt in prompts:
        tiny.caches.clear()
        alone.append(tiny.generate(prompt, **sampling))
    tiny.caches.clear()
    together = tiny.generate(prompts, **sampling)
    assert all(map(same, alone, together))
    assert all(c.usage.cached_tokens == 0 for c in alone + together)


def test_rows_that_end_make_room(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than rows, ends at different times."""
    monkeypatch.setattr(call_sizes, "ROWS", 3)
    prompts = [random_tokens(3 + 5 * n, seed=n) for n in range(10)]
    ends = [tiny.generate(p, max_tokens=20).tokens[n % 7] for n, p in enumerate(prompts)]
    bias = {ends[0]: -1.0}
    alone = [tiny.generate(p, max_tokens=20, logprobs=1, logit_bias=bias) for p in prompts]
    together = tiny.generate(prompts, max_tokens=20, logprobs=1, logit_bias=bias)
    assert all(map(same, alone, together))


def test_prompts_of_a_batch_that_begin_alike_are_read_once(tiny: LanguageModel) -> None:
    shared = random_tokens(100)
    prompts = [shared + random_tokens(n + 1, seed=n) for n in range(6)]
    together = tiny.generate(prompts, max_tokens=8, logprobs=2)
    assert sorted(c.usage.cached_tokens for c in together) == [0, *[100] * 5]
    for prompt, completion in zip(prompts, together, strict=True):
        tiny.caches.clear()
        assert same(tiny.generate(prompt, max_tokens=8, logprobs=2), completion)


def test_a_batch_is_known_to_later_prompts(tiny: LanguageModel) -> None:
    prompts = [random_tokens(40 + n, seed=n) for n in range(3)]
    first = tiny.generate(prompts, max_tokens=5)
    longer = [[*p, *c.tokens, 7] for p, c in zip(prompts, first, strict=True)]
    hits = [tiny.generate(longer[0], max_tokens=5, logprobs=2), *tiny.generate(longer[1:], max_tokens=5, logprobs=2)]
    assert [c.usage.cached_tokens for c in hits] == [44, 45, 46]  # all but the last token that was picked
    for prompt, hit in zip(longer, hits, strict=True):
        tiny.caches.clear()
        assert same(tiny.generate(prompt, max_tokens=5, logprobs=2), hit)


def test_a_known_prefix_gives_the_same_bits(tiny: LanguageModel) -> None:
    prompt = random_tokens(80)
    first = tiny.generate(prompt, max_tokens=10, logprobs=5)
    longer = [*prompt, *first.tokens, *random_tokens(5, seed=9)]
    hit = tiny.generate(longer, max_tokens=10, logprobs=5)
    assert first.usage.cached_tokens == 0
    assert hit.usage.cached_tokens == 89  # all but the last token that was picked, which was never fed
    tiny.caches.clear()
    miss = tiny.generate(longer, max_tokens=10, logprobs=5)
    assert miss.usage.cached_tokens == 0 and same(hit, miss)
    again = tiny.generate(prompt, max_tokens=10, logprobs=5)
    assert again.usage.cached_tokens == 79 and same(again, first)


@pytest.mark.parametrize("name", ["tiny", "stories"])
def test_eight_threads_at_once_give_the_bits_of_one(name: str, request: pytest.FixtureRequest) -> None:
    model: LanguageModel = request.getfixturevalue(name)
    shared = random_tokens(40)
    prompts = [shared[: 5 * n] + random_tokens(n + 1, seed=n) for n in range(8)]
    sampling: dict[str, Any] = {"max_tokens": 20, "logprobs": 2, "temperature": 1.0, "seed": 5}
    serial = [model.generate(p, **sampling) for p in prompts]
    ready = threading.Barrier(8)

    def work(i: int) -> list[Completion]:
        ready.wait()
        return [model.generate(prompts[(i + n) % 8], **sampling) for n in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for i, completions in enumerate(pool.map(work, range(8))):
            assert all(same(c, serial[(i + n) % 8]) for n, c in enumerate(completions))


def test_one_and_two_threads_give_the_same_bits(tiny_folder: Path) -> None:
    tokens = random_tokens(70)
    one, two = (language_model(tiny_folder, threads=n) for n in (1, 2))
    assert one.logits(tokens).tobytes() == two.logits(tokens).tobytes()


# -- limits --
def test_the_context_ends_a_text(tiny_folder: Path) -> None:
    model = language_model(tiny_folder, context=70)
    told = model.generate(random_tokens(60), max_tokens=100)
    assert told.finish_reason == "length" and told.usage.completion_tokens == 10
    assert same(told, model.generate(random_tokens(60), max_tokens=None))


@pytest.mark.parametrize(("prompt", "length"), [(60, "10 tokens"), (69, "1 token")])
def test_a_text_that_the_context_cuts_short_is_logged_once(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture, prompt: int, length: str
) -> None:
    model = language_model(tiny_folder, context=70)
    with caplog.at_level(logging.INFO, "rlx"):
        model.generate(random_tokens(prompt), max_tokens=70 - prompt)
        model.generate(random_tokens(prompt), max_tokens=None)
        assert not caplog.messages
        stream = model.stream(random_tokens(prompt), max_tokens=300)
        list(stream)
        assert stream.completion.finish_reason == stream.completion.finish_reason == "length"
    assert caplog.messages == [f"the context is full: the text was cut after {length}, max_tokens is 300"]


def test_no_tokens_may_be_asked_for(tiny: LanguageModel) -> None:
    """Which reads the prompt, so that the next call begins at once."""
    prompt = random_tokens(50)
    read = tiny.generate(prompt, max_tokens=0)
    assert (read.text, read.tokens, read.finish_reason) == ("", [], "length")
    assert tiny.generate([*prompt, 5], max_tokens=1).usage.cached_tokens == 50


def test_padding_of_the_vocabulary_is_never_picked(
    tiny: LanguageModel, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(30)
    likely = tiny.generate(prompt, max_tokens=1).tokens[0]
    monkeypatch.setattr(LanguageModel, "vocab_size", likely)  # as if there were no token for the likeliest logit
    model = language_model(tiny_folder, patch=lambda flow: flow)  # built now, not a snapshot
    for temperature in (0.0, 5.0):
        told = model.generate(prompt, max_tokens=40, temperature=temperature, logprobs=likely, seed=0)
        assert told.logprobs is not None and max(told.tokens) < likely
        assert all(t < likely for record in told.logprobs for t, _ in pairs(record))
        assert abs(sum(np.exp(p) for _, p in pairs(told.logprobs[0])) - 1) < 1e-6


def test_a_fault_leaves_caches_as_they_were(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(40)
    wanted = tiny.generate(prompt, max_tokens=20, logprobs=1)
    for at in (0, 1, 5):
        tiny.caches.clear()
        run, calls = tiny.compiled.run, iter(range(1000))

        def broken(inputs: Any, run: Any = run, calls: Any = calls, at: int = at) -> Any:
            if next(calls) == at:
                run(inputs)
                raise KeyboardInterrupt
            return run(inputs)

        with monkeypatch.context() as patch:
            patch.setattr(tiny.compiled, "run", broken)
            with pytest.raises(KeyboardInterrupt):
                tiny.generate(prompt, max_tokens=20)
        again = tiny.generate(prompt, max_tokens=20, logprobs=1)
        assert same(again, wanted) and again.usage.cached_tokens == (39 if at else 0)


# -- Hugging Face --
@pytest.mark.parity
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_is_that_of_transformers(tmp_path: Path, penalty: float) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for value in reference.parameters():
            if value.dim() == 2:
                value.mul_(8)
    reference.save_pretrained(tmp_path, safe_serialization=True)
    model = load(tmp_path)
    assert isinstance(model, LanguageModel)
    for seed in range(5):
        prompt = random_tokens(30, seed=seed, vocab=96)
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, repetition_penalty=penalty,
            return_dict_in_generate=True, output_logits=True, attention_mask=torch.ones(1, 30),
        )  # fmt: skip
        told = model.generate(prompt, max_tokens=40, repetition_penalty=penalty, logprobs=1)
        assert told.tokens == expected.sequences[0, 30:].tolist()
        assert told.logprobs is not None
        for record, logits in zip(told.logprobs, expected.logits, strict=True):
            assert abs(record.logprob - torch.log_softmax(logits[0].double(), -1)[record.token].item()) < 1e-3
