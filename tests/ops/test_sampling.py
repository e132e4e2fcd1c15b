"""`sample_tokens` against its reference, with the samplers of `rlx.engine.sampler`: the same tokens, draw by draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from host_sampler import pick
from targets import AVX512, supported

import rlx
from rlx.backends.base import kernels_compiled
from rlx.engine.sampler import Sampler, Sampling
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise
from rlx.sampling import candidates, log_probabilities, token_weights
from rlx.transforms import vmap

Array = np.ndarray[Any, Any]
DEVICES = ["cpu", "toy"]
SETTINGS = {"temperature": "f32", "top_k": "i32", "top_p": "f64", "min_p": "f32"}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def graph(vocab: int | str, *, allowed: str = "", words: str = "", history: int | str = 0) -> rlx.Graph:
    """One `sample_tokens` of inputs; `allowed` is the element type of the mask, `history` how many tokens it has.

    `words` names the number of words of a mask that may end before the vocabulary does.
    """
    g = rlx.Graph("sample")
    operands: list[rlx.Value | None] = [g.input("logits", ("rows", vocab)), g.input("uniform", ("rows",), "f64")]
    operands += [g.input(name, ("rows",), dtype) for name, dtype in SETTINGS.items()]
    if allowed:
        assert isinstance(vocab, int)
        width = words or -(-vocab // (8 * rlx.dtype(allowed).size))
        operands.append(g.input("allowed", ("rows", width), allowed))
    if history:
        operands += [None] * (not allowed)
        operands += [g.input("history", ("rows", history), "i32"), g.input("prompt_length", ("rows",), "i32")]
        operands += [g.input(name, ("rows",)) for name in PENALTIES]
    return g.set_outputs(list(g.apply("sample_tokens", *operands)))


def run(f: rlx.CompiledGraph, *inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Tokens and log-probabilities, on the host."""
    tokens, scores = f.run({name: array for part in inputs for name, array in part.items()})
    return np.asarray(tokens), np.asarray(scores)


def settings(rows: int, **changed: Any) -> dict[str, Array]:
    """Arrays of settings, by default those of plain sampling at temperature 1."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed
    return {name: np.broadcast_to(plain[name], rows).astype(rlx.dtype(d).numpy) for name, d in SETTINGS.items()}


def packed_bits(keep: Array, dtype: str) -> Array:
    """Booleans `[rows, vocab]` as words of an integer type, the lowest bit first."""
    size = rlx.dtype(dtype).size
    pad = -keep.shape[1] % (8 * size)
    bits = np.pad(keep, ((0, 0), (0, pad)))
    return np.packbits(bits, axis=1, bitorder="little").view(rlx.dtype(dtype).numpy)


class Draws:
    """Random requests in step: a sampler of the host for each row, and the inputs of the op that say the same."""

    def __init__(self, rng: np.random.Generator, rows: int, vocab: int, history: int) -> None:
        self.rng, self.rows, self.vocab, self.history = rng, rows, vocab, history
        self.samplers, self.numbers = [], []
        self.keep = np.ones((rows, vocab), bool)
        self.seen: list[list[int]] = []
        self.prompts: list[int] = []
        for row in range(rows):
            asked: dict[str, Any] = {"temperature": float(rng.choice([0, 0.05, 0.3, 0.7, 1, 1.5, 30]))}
            if asked["temperature"]:
                asked |= {
                    "top_k": int(rng.choice([0, 0, 1, 7, 40, 300, vocab, 2**40])),
                    "top_p": float(rng.choice([1, 1, 0.05, 0.5, 0.9, 0.95, 0.999])),
                    "min_p": float(rng.choice([0, 0, 0.01, 0.2, 1])),
                }
            if history:
                asked |= {
                    "repetition_penalty": float(rng.choice([1, 1, 1.3, 0.7])),
                    "frequency_penalty": float(rng.choice([0, 0, 0.5, -0.3])),
                    "presence_penalty": float(rng.choice([0, 0, 0.5, -0.3])),
                }
                self.keep[row, rng.random(vocab) < rng.choice([0, 0.1, 0.9])] = False
                self.keep[row, rng.integers(vocab)] = True
            bias = {int(t): -math.inf for t in np.flatnonzero(~self.keep[row])}
            seed, prompt = int(rng.integers(2**62)), rng.integers(0, vocab + 2, history // 2).tolist()
            self.samplers.append(Sampler(Sampling(**asked, logit_bias=bias, seed=seed), prompt, vocab))
            self.numbers.append(np.random.Generator(np.random.Philox(seed)))
            self.seen.append(prompt)
            self.prompts.append(len(prompt))

    def logits(self) -> Array:
        """Peaked or flat, now and then with many equals."""
        rng = self.rng
        result = rng.standard_normal((self.rows, self.vocab), np.float32) * rng.choice([0.2, 1, 3, 8])
        return (np.round(result * 2) / 2 if rng.random() < 0.3 else result).astype(np.float32)

    def inputs(self) -> dict[str, Array]:
        """Those of the next step, less the logits."""
        asked = [s.settings for s in self.samplers]
        arrays = settings(
            self.rows, temperature=[s.temperature for s in asked], top_k=[min(s.top_k, 2**31 - 1) for s in asked],
            top_p=[s.top_p for s in asked], min_p=[s.min_p for s in asked],
        )  # fmt: skip
        arrays["uniform"] = np.array([n.random() for n in self.numbers])
        if self.history:
            arrays |= {name: np.array([getattr(s, name) for s in asked], np.float32) for name in PENALTIES}
            arrays["history"] = np.full((self.rows, self.history), -1, np.int32)
            for row, seen in enumerate(self.seen):
                arrays["history"][row, : len(seen)] = seen
            arrays["prompt_length"] = np.array(self.prompts, np.int32)
            arrays["allowed"] = packed_bits(self.keep, "i32")
        return arrays

    def check(self, f: rlx.CompiledGraph) -> int:
        """One step of all rows on both sides; how many tokens differ."""
        logits = self.logits()
        tokens, scores = run(f, {"logits": logits}, self.inputs())
        wanted = [pick(s, row) for s, row in zip(self.samplers, logits, strict=True)]
        likely = [log_probabilities(row)[t] for row, t in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(scores, likely, rtol=1e-6, atol=1e-6)
        for seen, token in zip(self.seen, wanted, strict=True):
            seen.append(token)
        return int(np.count_nonzero(tokens != wanted))


def draws(device: str, rng: np.random.Generator, rows: int, vocab: int, history: int, rounds: int, steps: int) -> int:
    """How many of rounds · steps · rows tokens differ."""
    f = rlx.compile(graph(vocab, allowed="i32" if history else "", history=history), device)
    differing = 0
    for _ in range(rounds):
        requests = Draws(rng, rows, vocab, history)
        differing += sum(requests.check(f) for _ in range(steps))
    return differing


# -- draw by draw -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("vocab", "history"), [(1, 0), (255, 0), (257, 8), (512, 0), (5003, 24)])
def test_tokens_are_those_of_the_host(vocab: int, history: int) -> None:
    assert draws("cpu", np.random.default_rng(vocab), 6, vocab, history, rounds=12, steps=4) == 0


@pytest.mark.parametrize(("vocab", "history"), [(40, 0), (300, 8)])
def test_tokens_are_those_of_the_host_on_other_devices(vocab: int, history: int) -> None:
    assert draws("toy", np.random.default_rng(vocab), 16, vocab, history, rounds=1, steps=3) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 1.3, "min_p": 1e-3}])
def test_draws_between_two_tokens_are_those_of_the_reference(device: str, setting: dict[str, float]) -> None:
    """Uniform numbers where the running sum passes from a token to the next: one bit of a sum decides."""
    vocab, rng = 1003, np.random.default_rng(5)
    rows = 24 if device == "toy" else 400
    logits = np.repeat(rng.standard_normal((1, vocab), np.float32) * 2, rows, 0)
    asked = settings(rows, **setting)
    _, weights = candidates(logits[0], **{name: value[0].item() for name, value in asked.items()})
    sums = np.cumsum(weights, dtype=np.int64)
    at = rng.integers(0, len(sums) - 1, rows // 2)
    border = sums[at] / sums[-1]
    uniform = np.concatenate([border, np.nextafter(border, 0)])
    inputs = {"logits": logits, "uniform": uniform} | asked
    tokens, scores = run(rlx.compile(graph(vocab), device), inputs)
    wanted, likely = rlx.compile(graph(vocab), "reference").run(inputs)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, likely, rtol=1e-6)


def test_weights_are_those_of_numpys_exponential() -> None:
    """Within one unit in the last place of the probability of the likeliest token."""
    logits = np.random.default_rng(6).uniform(-40, 0, 100_000).astype(np.float32)
    for temperature in (0.3, 1.0, 7.0):
        weights = token_weights(logits, np.float32(0), temperature)
        exact = np.exp(logits.astype(np.float64) / np.float32(temperature))
        np.testing.assert_array_equal(weights, np.rint(weights))
        np.testing.assert_allclose(weights * 2.0**-42, exact, rtol=0, atol=2.0**-23)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("vocab", "history", "rounds"),
    [(100, 0, 100), (1000, 20, 80), (4001, 0, 80), (32_000, 40, 10), (262_144, 0, 5), (262_144, 40, 1)],
)
def test_thousands_of_tokens_are_those_of_the_host(vocab: int, history: int, rounds: int) -> None:
    assert draws("cpu", np.random.default_rng(0), 16, vocab, history, rounds, steps=10) == 0


# -- equals -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_the_highest_logit_with_the_lowest_id_is_greedy(device: str) -> None:
    f = rlx.compile(graph("vocab"), device)
    for vocab in (1, 2, 256, 257, 700):
        logits = np.zeros((vocab, vocab), np.float32) - 1
        for row in range(vocab):
            logits[row, [row, -1]] = 2.5
        rows = logits[:: max(1, vocab // 20)]
        tokens, _ = run(f, {"logits": rows, "uniform": np.zeros(len(rows))}, settings(len(rows), temperature=0))
        np.testing.assert_array_equal(tokens, rows.argmax(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_p", [0.25, 0.5, 1.0])
def test_of_equals_a_nucleus_has_the_lower_ids(device: str, top_p: float) -> None:
    """All tokens weigh the same, so the running sum counts them."""
    vocab, uniform = 600, np.linspace(0, 1, 33, endpoint=False)
    f = rlx.compile(graph(vocab), device)
    logits = np.full((len(uniform), vocab), -0.0, np.float32)
    logits[:, ::3] = 0.0  # equal to -0.0
    tokens, scores = run(f, {"logits": logits, "uniform": uniform}, settings(len(uniform), top_p=top_p))
    np.testing.assert_array_equal(tokens, np.floor(uniform * vocab * top_p))
    np.testing.assert_allclose(scores, -math.log(vocab), rtol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("steps", [0, 64])
def test_a_nucleus_of_thousands_of_tokens_is_that_of_the_reference(spread: float, steps: int) -> None:
    """Nearly uniform logits, also with many equals: thousands of weights are as heavy as the last of a nucleus."""
    vocab, rng = 12_345, np.random.default_rng(9)
    top_p = np.array([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-40])
    logits = rng.standard_normal((len(top_p), vocab), np.float32) * np.float32(spread)
    logits = np.round(logits * steps) / np.float32(steps) if steps else logits
    for uniform in (0.0, 0.37, 1 - 2**-53):
        inputs = {"logits": logits, "uniform": np.full(len(top_p), uniform)} | settings(len(top_p), top_p=top_p)
        tokens, _ = run(rlx.compile(graph(vocab)), inputs)
        np.testing.assert_array_equal(tokens, rlx.compile(graph(vocab), "reference").run(inputs)[0])


@pytest.mark.parametrize("setting", [{}, {"top_k": 9000}, {"min_p": 0.8}, {"min_p": 0.8, "top_k": 9000}])
def test_other_filters_apply_to_a_nucleus_of_thousands_of_tokens(setting: dict[str, float]) -> None:
    """Uniform numbers where the running sum passes from a token to the next: one bit of a sum decides."""
    vocab, rng = 20_011, np.random.default_rng(10)
    logits = np.repeat(rng.standard_normal((1, vocab), np.float32) * np.float32(0.1), 64, 0)
    asked = settings(64, top_p=0.9, **setting)
    _, weights = candidates(logits[0], **{name: value[0].item() for name, value in asked.items()})
    sums = np.cumsum(weights, dtype=np.int64)
    border = sums[rng.integers(0, len(sums) - 1, 32)] / sums[-1]
    inputs = {"logits": logits, "uniform": np.concatenate([border, np.nextafter(border, 0)])} | asked
    tokens, _ = run(rlx.compile(graph(vocab)), inputs)
    np.testing.assert_array_equal(tokens, rlx.compile(graph(vocab), "reference").run(inputs)[0])


@pytest.mark.parametrize("others", [0.0, -0.4, -3.0])
@pytest.mark.parametrize("spread", [0.0, 1e-5, 0.01, 0.3])
def test_a_nucleus_whose_samples_mislead_is_that_of_the_reference(others: float, spread: float) -> None:
    """The search starts from the first of every 16 blocks of 256 tokens; here these are unlike the others."""
    vocab, rng = 16 * 4096 + 5, np.random.default_rng(11)
    top_p = np.array([0.03, 0.1, 0.5, 0.9, 0.99])
    logits = rng.standard_normal((len(top_p), vocab), np.float32) * np.float32(spread) + np.float32(others)
    sampled = np.arange(vocab) % 4096 < 256
    logits[:, sampled] = rng.standard_normal((len(top_p), int(sampled.sum())), np.float32) * np.float32(0.1)
    inputs = {"logits": logits, "uniform": rng.random(len(top_p))} | settings(len(top_p), top_p=top_p)
    tokens, _ = run(rlx.compile(graph(vocab)), inputs)
    np.testing.assert_array_equal(tokens, rlx.compile(graph(vocab), "reference").run(inputs)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_equals_of_the_last_of_the_highest_stay(device: str) -> None:
    vocab, uniform = 700, np.linspace(0, 1, 20, endpoint=False)
    logits = np.full((20, vocab), -5, np.float32)
    logits[:, [3, 300, 301, 650]] = 1.0
    f = rlx.compile(graph(vocab), device)
    for top_k in (1, 2, 4):
        tokens, _ = run(f, {"logits": logits, "uniform": uniform}, settings(20, top_k=top_k))
        np.testing.assert_array_equal(tokens, np.repeat([3, 300, 301, 650], 5))


# -- masks and histories ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "u32", "i64"])
def test_masks_are_words_of_any_integers(dtype: str) -> None:
    vocab, rng = 333, np.random.default_rng(1)
    keep = rng.random((40, vocab)) < 0.05
    keep[:, -1] = True
    logits = rng.standard_normal(keep.shape, np.float32)
    f = rlx.compile(graph(vocab, allowed=dtype))
    inputs = {"logits": logits, "uniform": rng.random(40), "allowed": packed_bits(keep, dtype)}
    tokens, _ = run(f, inputs, settings(40, temperature=0))
    np.testing.assert_array_equal(tokens, np.where(keep, logits, -np.inf).argmax(1))
    tokens, _ = run(f, inputs, settings(40, temperature=9))
    assert keep[np.arange(40), tokens].all()


@pytest.mark.parametrize("device", ["reference", *DEVICES])
def test_tokens_behind_the_last_word_of_a_mask_are_allowed(device: str) -> None:
    """No words allow everything, as an engine says it that has no grammar; words too many change nothing."""
    vocab, rng = 600, np.random.default_rng(2)
    logits = rng.standard_normal((4, vocab), np.float32)
    f = rlx.compile(graph(vocab, allowed="i32", words="words"), device)
    for words in (0, 1, 9, 19, 40):
        keep = rng.random((4, 32 * words)) < 0.2
        mask = packed_bits(keep, "i32") if words else np.zeros((4, 0), np.int32)
        full = np.ones((4, max(vocab, 32 * words)), bool)
        full[:, : 32 * words] = keep
        inputs = {"logits": logits, "uniform": np.zeros(4), "allowed": mask}
        tokens, scores = run(f, inputs, settings(4, temperature=0))
        np.testing.assert_array_equal(tokens, np.where(full[:, :vocab], logits, -np.inf).argmax(1))
        wanted = [log_probabilities(row)[t] for row, t in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_count_the_prompt_and_what_was_picked(device: str) -> None:
    f = rlx.compile(graph(6, history="n"), device)
    logits = np.array([[3.0, 2.5, 2.0, -1.0, 0.0, 0.0]] * 4, np.float32)
    history = np.array([[0, 0, 1, -1, 99], [0, 1, 0, -1, 99], [0, 0, 1, 1, 0], [-1, -1, -1, -1, -1]], np.int32)
    inputs = {
        "logits": logits, "uniform": np.zeros(4), "history": history, "prompt_length": np.array([2, 0, 5, 0], np.int32),
        "repetition_penalty": np.array([2, 1, 1, 9], np.float32),
        "frequency_penalty": np.array([0, 0.6, 9, 9], np.float32),
        "presence_penalty": np.array([0, 0.2, 9, 9], np.float32),
    }  # fmt: skip
    tokens, scores = run(f, inputs, settings(4, temperature=0))
    # 3 / 2, 2.5 / 2 and 2; 3 - 1.4, 2.5 - 0.8 and 2; a prompt that only repetition counts; no history
    assert tokens.tolist() == [2, 2, 0, 0]
    np.testing.assert_allclose(scores, [log_probabilities(logits[0])[t] for t in tokens], rtol=1e-6)


@pytest.mark.parametrize("device", ["reference", *DEVICES])
def test_a_row_without_a_token_gives_none_and_others_theirs(device: str) -> None:
    vocab = 300
    logits = np.random.default_rng(0).standard_normal((6, vocab), np.float32)
    logits[0], logits[1, 7], logits[2, 7] = -np.inf, np.nan, np.inf
    keep = np.ones((6, vocab), bool)
    keep[3] = False
    logits[5, 9], keep[5, 9] = np.nan, False  # not a number, but not allowed either
    f = rlx.compile(graph(vocab, allowed="i32"), device)
    for temperature in (0.0, 0.7):
        inputs = {"logits": logits, "uniform": np.full(6, 0.3), "allowed": packed_bits(keep, "i32")}
        tokens, scores = run(f, inputs, settings(6, temperature=temperature, top_k=50, top_p=0.9))
        assert tokens[:4].tolist() == [-1] * 4 and (tokens[4:] >= 0).all()
        assert np.isnan(scores).tolist() == [True] * 4 + [False, True]


@pytest.mark.parametrize("device", ["reference", *DEVICES])
def test_a_bias_is_added_before_anything_else(device: str) -> None:
    """Ids outside the vocabulary are padding; rows that are not scored give tokens alone."""
    vocab, rows = 300, 3
    g = rlx.Graph("biased")
    operands: list[rlx.Value | None] = [g.input("logits", (rows, vocab)), g.input("uniform", (rows,), "f64")]
    operands += [g.input(name, (rows,), dtype) for name, dtype in SETTINGS.items()]
    operands += [None] * 6
    operands += [g.input("tokens", (rows, "m"), "i32"), g.input("bias", (rows, "m")), g.input("scored", (rows,), "i32")]
    f = rlx.compile(g.set_outputs(list(g.apply("sample_tokens", *operands))), device)
    logits = np.random.default_rng(0).standard_normal((rows, vocab), np.float32)
    tokens = np.array([[7, -1, 300], [299, 5, 2**31 - 1], [-1, -1, -1]], np.int32)
    bias = np.array([[9, 99, 99], [20, 19, 99], [99, 99, 99]], np.float32)
    inputs = {"logits": logits, "uniform": np.zeros(rows), "tokens": tokens, "bias": bias}
    inputs["scored"] = np.array([1, 0, 1], np.int32)
    for temperature in (0.0, 1.0):
        picked, scores = run(f, inputs, settings(rows, temperature=temperature, top_k=1))
        assert picked.tolist() == [7, 299, int(logits[2].argmax())]
        assert np.isnan(scores).tolist() == [False, True, False]
        np.testing.assert_allclose(scores[0], log_probabilities(logits[0])[7], rtol=1e-6)


# -- settings ---------------------------------------------------------------------------------------------------------
def test_uniform_numbers_and_fractions_count_to_the_last_bit() -> None:
    """With two tokens that weigh the same, the second begins at a half; 1 - 2^-53 is the last number below 1."""
    f = rlx.compile(graph(2))
    uniform = np.array([0.5 - 2**-54, 0.5, 0.5 + 2**-53, 1 - 2**-53, 0.0])
    tokens, _ = run(f, {"logits": np.zeros((5, 2), np.float32), "uniform": uniform}, settings(5))
    assert tokens.tolist() == [0, 1, 1, 1, 0]
    tokens, _ = run(
        f, {"logits": np.zeros((3, 2), np.float32), "uniform": np.full(3, 0.9)},
        settings(3, top_p=[0.5, 0.5 + 2**-53, math.ulp(0.0)]),
    )  # fmt: skip
    assert tokens.tolist() == [0, 1, 0]


def test_settings_wider_than_the_kernel_keep_their_meaning() -> None:
    """An i64 top_k beyond i32 is no limit, an i64 id beyond i32 is padding."""
    g = rlx.Graph("wide")
    operands = [g.input("x", (1, 5)), *(g.constant(np.array([v])) for v in (0.99, 50.0)), g.constant(np.array([2**32]))]
    operands += [g.constant(np.array([v])) for v in (1.0, 0.0)]
    operands += [None, g.constant(np.array([[2**32 + 1, 2**31]])), g.constant(np.array([0]))]  # type: ignore[list-item]
    operands += [g.constant(np.array([v])) for v in (1e6, 0.0, 0.0)]
    g.set_outputs(list(g.apply("sample_tokens", *operands)))
    for device in ("reference", "cpu", "toy"):
        tokens, _ = run(rlx.compile(g, device), {"x": np.array([[1, 2, 3, 4, 1]], np.float32)})
        assert tokens.tolist() == [4], device


# -- how it runs ------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("target", [t.name for t in supported()])
def test_threads_targets_and_neighbours_change_no_token(target: str) -> None:
    requests = Draws(np.random.default_rng(4), 24, 3001, 16)
    inputs = {"logits": requests.logits()} | requests.inputs()
    g = graph(3001, allowed="i32", history=16)
    tokens, scores = rlx.compile(g, target=target, threads=3).run(inputs)
    one = rlx.compile(g, target=target, threads=1)
    for row in range(0, 24, 5):
        alone = one.run({name: array[row : row + 1] for name, array in inputs.items()})
        assert alone[0][0] == tokens[row] and alone[1].tobytes() == scores[row : row + 1].tobytes()
    np.testing.assert_array_equal(
        tokens, [pick(s, x) for s, x in zip(requests.samplers, inputs["logits"], strict=True)]
    )


def test_sizes_are_run_time_arguments() -> None:
    f, rng = rlx.compile(graph("vocab", history="n")), np.random.default_rng(2)
    before = kernels_compiled()
    for vocab, n in ((7, 0), (256, 3), (1000, 40)):
        logits = rng.standard_normal((2, vocab), np.float32)
        penalties = {name: np.ones(2, np.float32) for name in PENALTIES}
        inputs = {
            "logits": logits,
            "uniform": rng.random(2),
            "history": rng.integers(0, vocab, (2, n)).astype(np.int32),
        }
        tokens, _ = run(f, inputs, penalties, {"prompt_length": np.full(2, n, np.int32)}, settings(2, temperature=0))
        np.testing.assert_array_equal(tokens, logits.argmax(1))
    assert kernels_compiled() == before


def test_a_row_is_a_unit_of_one_launch() -> None:
    """Settings of 64 bits are split beforehand, so that the kernel has as many lanes as f32 has."""
    program = schedule(optimise(graph("vocab"), AVX512).main, AVX512)
    kernels = [launch.kernel for launch in program.launches]
    (kernel,) = (k for k in kernels if k.name == "sample_tokens")
    assert all(p.dtype.size <= 4 for p in kernel.params)


def test_vmap_is_more_rows() -> None:
    requests = Draws(np.random.default_rng(3), 6, 400, 0)
    inputs = {"logits": requests.logits()} | requests.inputs()
    f = rlx.compile(vmap(graph(400), {name: 0 for name in inputs}, size=3))
    tokens, scores = f.run({name: array.reshape(3, 2, *array.shape[1:]) for name, array in inputs.items()})
    wanted = rlx.compile(graph(400)).run(inputs)
    np.testing.assert_array_equal(tokens.reshape(-1), wanted[0])
    np.testing.assert_array_equal(scores.reshape(-1), wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_draws_that_light_tokens_decide(device: str) -> None:
    """Sums of light blocks are estimated first: draws that depend on their last bits are those of the reference."""
    rng, vocab, rows = np.random.default_rng(5), 40_000 if device == "cpu" else 3000, 16 if device == "cpu" else 4
    f, reference = rlx.compile(graph(vocab), device), rlx.compile(graph(vocab), "reference")
    for octaves in (14.5, 14.0, 13.5):  # about as light as a block must be for an estimate
        powers = -octaves - rng.random(vocab) / 4
        powers[rng.integers(0, vocab, 20)] = -np.arange(20)
        powers[vocab // 2] = 0.0
        logits = (powers * math.log(2)).astype(np.float32)
        weights = token_weights(logits, logits.max(), 1.0).astype(np.int64)
        # Where a heavy token begins or ends, to the bit, and anywhere.
        places = np.flatnonzero(weights > 2**35)[: rows // 2]
        edges = np.cumsum(weights)[places] / weights.sum()
        uniform = np.concatenate([np.nextafter(edges, rng.choice([0.0, 1.0], len(edges))), rng.random(rows)])[:rows]
        shares = np.cumsum(np.sort(weights)[::-1])[:rows] / weights.sum()
        for top_p in (1.0, shares, np.nextafter(shares, 1.0), 0.5, 0.999):
            inputs = {"logits": np.tile(logits, (rows, 1)), "uniform": uniform}
            arrays = settings(rows, top_p=top_p)
            tokens, _ = run(f, inputs, arrays)
            np.testing.assert_array_equal(tokens, run(reference, inputs, arrays)[0])


def test_draws_from_nearly_equal_tokens() -> None:
    """Each cell of blocks of such a row weighs more than 2^51."""
    rng, rows, vocab = np.random.default_rng(6), 64, 8192
    f, reference = rlx.compile(graph(vocab)), rlx.compile(graph(vocab), "reference")
    logits = rng.standard_normal((rows, vocab), np.float32) * np.float32(0.05)
    for top_p in (0.6, 0.8, 0.9, 0.95, 0.99):
        inputs = {"logits": logits, "uniform": rng.random(rows)}
        arrays = settings(rows, top_p=np.full(rows, top_p) - rng.random(rows) / 100)
        np.testing.assert_array_equal(run(f, inputs, arrays)[0], run(reference, inputs, arrays)[0])
