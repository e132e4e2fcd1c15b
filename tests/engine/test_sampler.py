"""Samplers against oracles of their own: exact sets of candidates, and how often each is picked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from host_sampler import adjusted, pick
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from rlx.engine.sampler import BatchSampling, Sampler, Sampling, most_likely, operand_input
from rlx.errors import KernelError, RequestError
from rlx.sampling import candidates, highest_places, log_probabilities, token_bits

Array = np.ndarray[Any, Any]


# -- an oracle: loops over tokens in the order of their probability --
def oracle(logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """{token: probability} of the tokens that may be picked."""
    wide = [float(x) / temperature for x in logits]
    order = sorted(range(len(wide)), key=lambda i: (-wide[i], i))
    if top_k:
        order = [i for i in order if wide[i] >= wide[order[min(top_k, len(order)) - 1]]]
    weight = {i: math.exp(wide[i] - wide[order[0]]) for i in order}
    if top_p < 1:
        total, above, nucleus = sum(weight.values()), 0.0, []
        for i in order:
            if above >= top_p * total:
                break
            nucleus.append(i)
            above += weight[i]
        order = nucleus
    order = [i for i in order if weight[i] >= min_p * weight[order[0]]]
    total = sum(weight[i] for i in order)
    return {i: weight[i] / total for i in order}


def filtered(logits: Array, s: Sampling) -> tuple[Array | None, Array]:
    return candidates(logits, temperature=s.temperature or 0.0, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)


def sampled(logits: Array, **settings: Any) -> dict[int, float]:
    tokens, weights = filtered(logits, Sampling(**settings))
    ids = range(len(logits)) if tokens is None else tokens.tolist()
    total = float(weights.sum(dtype=np.float64))
    return {i: float(w) / total for i, w in zip(ids, weights, strict=True)}


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 1000, "top_p": 0.999},
]


@pytest.mark.parametrize("asked", SETTINGS)
@pytest.mark.parametrize("vocab", [1, 2, 40, 300, 5000])
def test_candidates_are_those_of_the_oracle(asked: dict[str, Any], vocab: int) -> None:
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)
        wanted, have = oracle(logits, **asked), sampled(logits, **asked)
        assert set(have) == set(wanted)
        assert max(abs(have[i] - wanted[i]) for i in wanted) < 1e-6


def test_of_equals_at_the_edge_of_top_p_the_lower_ids_stay() -> None:
    logits = np.array([0, 1, 1, 1, 1, -9], np.float32)
    assert set(sampled(logits, temperature=1.0, top_p=0.5)) == set(oracle(logits, top_p=0.5)) == {1, 2, 3}


def test_equals_of_the_last_of_top_k_stay() -> None:
    logits = np.array([0, 2, 1, 1, 1, -9], np.float32)
    assert set(sampled(logits, temperature=1.0, top_k=2)) == {1, 2, 3, 4}


@pytest.mark.parametrize("asked", SETTINGS)
def test_tokens_are_picked_as_often_as_they_should(asked: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, 600).astype(np.float32)
    sampler = Sampler(Sampling(**asked, seed=11))
    wanted = oracle(logits, **asked)
    draws = 3000
    counts = dict.fromkeys(wanted, 0)
    for _ in range(draws):
        counts[pick(sampler, logits)] += 1
    # Tokens that are expected less than five times are taken together, as the test wants it.
    often = [i for i in wanted if wanted[i] * draws >= 5]
    seen = [counts[i] for i in often] + [draws - sum(counts[i] for i in often)]
    expected = [wanted[i] * draws for i in often] + [draws * (1 - sum(wanted[i] for i in often))]
    if expected[-1] < 1e-9:
        seen, expected = seen[:-1], expected[:-1]
    scaled = np.array(expected) * (sum(seen) / sum(expected))
    assert stats.chisquare(seen, scaled).pvalue > 1e-3


def test_greedy_is_the_lowest_of_the_highest() -> None:
    assert pick(Sampler(Sampling()), np.array([1, 3, 2, 3, 3], np.float32)) == 1


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=400), st.integers(1, 500))
def test_highest_places_are_those_of_a_sort(values: list[int], count: int) -> None:
    array = np.array(values, np.float32)
    least = sorted(values, reverse=True)[min(count, len(values)) - 1]
    assert highest_places(array, count).tolist() == [i for i, v in enumerate(values) if v >= least]
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert most_likely(array, count) == wanted


# -- penalties and bias --
def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    settings = Sampling(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={2: 3.0, 3: -math.inf}
    )
    sampler = Sampler(settings, prompt=[0, 1, 1])
    assert adjusted(sampler, logits).tolist() == [1.0, -4.0, 4.0, -math.inf]
    assert pick(sampler, logits) == 2
    # 2 was picked once: (1 + 3) / 2, less 0.5 + 0.25; the prompt counts for the repetition penalty alone
    assert adjusted(sampler, logits).tolist() == [1.0, -4.0, 1.25, -math.inf]
    assert pick(sampler, logits) == 2
    assert adjusted(sampler, logits).tolist() == [1.0, -4.0, 0.75, -math.inf]
    assert pick(sampler, logits) == 0


def test_banned_tokens_are_never_picked() -> None:
    logits = np.zeros(700, np.float32)
    ban = {i: -math.inf for i in range(700) if i not in (5, 650)}
    for top_k in (0, 40):
        sampler = Sampler(Sampling(temperature=1.0, top_k=top_k, logit_bias=ban, seed=0))
        assert {pick(sampler, logits) for _ in range(100)} == {5, 650}
    with pytest.raises(RequestError, match="no token is left"):
        pick(Sampler(Sampling(logit_bias={0: -math.inf})), np.zeros(1, np.float32))


def test_allowed_takes_sets_and_lists_of_token_ids() -> None:
    logits, ids = np.random.default_rng(0).normal(size=70).astype(np.float32), [5, 33, 69]
    wanted = ids[int(logits[ids].argmax())]
    for allowed in (set(ids), ids, tuple(ids), frozenset(ids), lambda picked: set(ids), token_bits(ids, 70)):
        assert pick(Sampler(Sampling(allowed=allowed), vocab=70), logits) == wanted
    for wrong, shown in (({-1}, "-1"), ([70], "70"), (["a"], "'a'")):
        with pytest.raises(RequestError, match=f"allowed has {shown}, expected token ids"):
            Sampler(Sampling(allowed=wrong), vocab=70)  # type: ignore[arg-type]


def test_only_allowed_tokens_are_picked() -> None:
    logits = np.random.default_rng(0).normal(0, 1, 70).astype(np.float32)
    keep = {0, 31, 32, 69}
    mask = token_bits(keep, 70)
    for words in (mask, mask.view(np.uint32), lambda picked: mask):
        sampler = Sampler(Sampling(temperature=2.0, allowed=words, seed=0), vocab=70)
        assert {pick(sampler, logits) for _ in range(100)} == keep
    assert pick(Sampler(Sampling(allowed=lambda picked: None), vocab=70), logits) == int(logits.argmax())
    with pytest.raises(RequestError, match="no token is left"):
        pick(Sampler(Sampling(allowed=np.zeros(3, np.int32)), vocab=70), logits)
    with pytest.raises(RequestError, match="allowed has 3 words, the vocabulary of 97 tokens takes 4"):
        Sampler(Sampling(allowed=mask), vocab=97)
    with pytest.raises(RequestError, match="allowed has 2 words"):
        pick(Sampler(Sampling(allowed=lambda picked: mask[:2]), vocab=70), logits)


def test_rows_without_a_mask_allow_everything() -> None:
    mask = token_bits([3], 70)
    masked, free = Sampler(Sampling(allowed=mask), vocab=70), Sampler(Sampling(), vocab=70)
    allowed = operand_input("allowed")
    assert BatchSampling().draw([masked, free, None])[allowed].tolist() == [[8, 0, 0], [-1] * 3, [-1] * 3]
    assert BatchSampling().draw([free, None])[allowed].shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(temperature: float, bad: float) -> None:
    with pytest.raises(KernelError, match="the highest logit of the model is"):
        pick(Sampler(Sampling(temperature=temperature)), np.array([0, bad, 1], np.float32))


def test_a_tiny_temperature_is_as_good_as_greedy() -> None:
    logits = np.random.default_rng(0).normal(0, 100, 50).astype(np.float32)
    sampler = Sampler(Sampling(temperature=1e-40))
    assert {pick(sampler, logits) for _ in range(20)} == {int(logits.argmax())}


def test_log_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 9, 500).astype(np.float32)
    assert np.abs(log_probabilities(logits) - special.log_softmax(logits.astype(np.float64))).max() < 1e-12


# -- settings --
@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": "hot"}, {"temperature": math.inf},
        {"temperature": True}, {"top_k": -1}, {"top_k": 1.5}, {"top_k": None}, {"top_p": 0}, {"top_p": 1.1},
        {"min_p": -1}, {"min_p": math.nan}, {"repetition_penalty": 0}, {"frequency_penalty": math.nan},
        {"presence_penalty": math.inf}, {"seed": -1}, {"seed": 1.5}, {"logit_bias": [1]}, {"logit_bias": {"a": 1}},
        {"logit_bias": {1: math.nan}}, {"logit_bias": {1: math.inf}}, {"logit_bias": {1: "x"}},
        {"temperature": 1e300}, {"temperature": 10**400}, {"temperature": 10**5000}, {"top_k": math.inf},
        {"top_k": 10**400}, {"top_p": math.inf}, {"repetition_penalty": 1e-30}, {"repetition_penalty": 1e30},
        {"frequency_penalty": 1e39}, {"presence_penalty": -1e39}, {"seed": 10**5000}, {"logit_bias": {1: 1e39}},
        {"logit_bias": {1: -1e39}}, {"logit_bias": {1: 10**400}}, {"logit_bias": {1: True}},
        {"allowed": [1.5]}, {"allowed": np.zeros(4, np.int64)}, {"allowed": np.zeros((1, 4), np.int32)},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_named(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=name):
        Sampling.of(bad)


@pytest.mark.parametrize("asked", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_settings_that_would_do_nothing_are_refused(asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(RequestError, match=f"{name} is .*, which needs a temperature above 0") as caught:
        Sampling.of(asked | {"seed": 3})
    assert caught.value.hint == "temperature=1.0"
    for temperature in (0, 0.7):  # whoever says 0 knows what they do
        Sampling.of(asked | {"temperature": temperature})
    Sampling.of({"seed": 3, "top_k": 0, "top_p": 1, "min_p": 0.0, "temperature": None})


def test_whole_numbers_of_any_type_are_numbers_of_candidates() -> None:
    logits = np.array([0, 3, 2, 1], np.float32)
    for two in (2, 2.0, np.int64(2), np.float32(2)):
        assert set(sampled(logits, temperature=1.0, top_k=two)) == {1, 2}


def test_the_extremes_that_are_allowed_give_numbers() -> None:
    logits = np.random.default_rng(0).normal(0, 30, 50).astype(np.float32)
    for temperature in (0.0, 1e-300, 1e-6, 1e4):
        for penalty in (1e-6, 1e6):
            for bias in (-1e30, 1e30):
                sampler = Sampler(
                    Sampling(
                        temperature=temperature, repetition_penalty=penalty, frequency_penalty=bias,
                        presence_penalty=bias, logit_bias={0: -math.inf, 1: bias, 2: -bias}, seed=0,
                    ),
                    prompt=range(50),
                )  # fmt: skip
                assert all(1 <= pick(sampler, logits) < 50 for _ in range(100))


def test_ids_of_the_prompt_beyond_the_vocabulary_are_not_penalised() -> None:
    """A model may have embeddings for more tokens than there are."""
    sampler = Sampler(Sampling(repetition_penalty=2.0), prompt=[1, 4, 9], vocab=4)
    assert pick(sampler, np.array([1.0, 1.5, 0.5, 0.0], np.float32)) == 0


# -- batches --
def test_operands_of_a_batch_are_reused_until_it_changes() -> None:
    """Steps bind the same arrays; a history that outgrows its array gets a wider one."""
    plain, counting = Sampler(Sampling(temperature=1.0, seed=1)), Sampler(Sampling(presence_penalty=1.0), prompt=[5])
    batch = BatchSampling()
    first = batch.draw([plain, None, counting])
    history, uniform = (first[operand_input(name)] for name in ("history", "uniform"))
    before = uniform.copy()
    assert history.shape == (3, 0) and before[0] > 0 and not before[1:].any()
    for sampler, token in ((plain, 3), (counting, 7)):
        sampler.accept(token)
    second = batch.draw([plain, None, counting])
    assert second is not first and second[operand_input("history")][2, :2].tolist() == [7, -1]
    for sampler, token in ((plain, 3), (counting, 9)):
        sampler.accept(token)
    third = batch.draw([plain, None, counting])
    assert third is second and third[operand_input("history")][2, :3].tolist() == [7, 9, -1]
    numbers = np.random.Generator(np.random.Philox(1)).random(3)
    assert before[0] == numbers[0] and third[operand_input("uniform")][0] == numbers[2]
    assert batch.draw([plain]) is not third


@pytest.mark.parametrize(
    ("alien", "ours"),
    [("temp", "temperature"), ("max_new_tokens", "max_tokens"), ("repeat_penalty", "repetition_penalty"),
     ("num_predict", "max_tokens"), ("n_ctx", "context in rlx.load"), ("stop_sequences", "stop")],
)  # fmt: skip
def test_words_of_other_programs_are_told_ours(alien: str, ours: str) -> None:
    with pytest.raises(RequestError, match=alien) as caught:
        Sampling.of({alien: 1})
    assert caught.value.hint == f"here it is called {ours}"


def test_an_unknown_word_names_the_nearest() -> None:
    with pytest.raises(RequestError) as caught:
        Sampling.of({"temperatur": 1})
    assert "temperature" in (caught.value.hint or "")


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="token 7, the vocabulary has 7 tokens"):
        Sampler(Sampling(logit_bias={7: 1.0}), vocab=7)
    with pytest.raises(RequestError, match="token -1, the vocabulary has 7 tokens"):
        Sampler(Sampling(logit_bias={-1: 1.0}), vocab=7)


# -- Hugging Face --
@pytest.mark.parity
@pytest.mark.parametrize("asked", [*SETTINGS, {"temperature": 0.8, "repetition_penalty": 1.3, "top_p": 0.7}])
def test_candidates_are_those_of_transformers(asked: dict[str, Any]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    for seed in range(10):
        logits = np.random.default_rng(seed).normal(0, 3, 500).astype(np.float32)
        prompt = np.random.default_rng(seed).integers(0, 500, 60).tolist()
        processors = [transformers.TemperatureLogitsWarper(asked["temperature"])]
        if "repetition_penalty" in asked:
            processors.insert(0, transformers.RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"]))
        if "top_k" in asked:
            processors.append(transformers.TopKLogitsWarper(asked["top_k"]))
        if "top_p" in asked:
            processors.append(transformers.TopPLogitsWarper(asked["top_p"]))
        if "min_p" in asked:
            processors.append(transformers.MinPLogitsWarper(asked["min_p"]))
        scores = transformers.LogitsProcessorList(processors)(torch.tensor([prompt]), torch.from_numpy(logits)[None])
        wanted = torch.softmax(scores[0].double(), -1).numpy()
        s = Sampling(**asked)
        tokens, weights = filtered(adjusted(Sampler(s, prompt), logits), s)
        have = np.zeros(500)
        have[slice(None) if tokens is None else tokens] = weights / weights.sum(dtype=np.float64)
        assert np.array_equal(have > 0, wanted > 0)
        assert np.abs(have - wanted).max() < 1e-6
