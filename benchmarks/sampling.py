"""Sampling: what each setting costs beside a decode step of a model, and draws compared with the NumPy sampler.

    python benchmarks/sampling.py --cases 100000 --json benchmarks/results/sampling.json

The model has the shape of Gemma 3 270M and random bf16 weights (the type that Google publishes), or is the one that
`--model` names. The op gets the operands that the engine gives it, and logits of `--logits-of` after eight prompts,
lengthened by unlikely ones to the model's vocabulary; `nearly uniform` gets noise. The program first writes the logits
on all threads, as the vocabulary's matmul does; a setting's time is that of the launches after it, the best of many
runs. A step is that of short answers of eight rows, greedy sampling included; of one thread it is processor time, which
other programs disturb little. Two threads are timed by the clock, which needs a quiet machine. `--cases` draws that
many tokens by random settings from peaked and flat logits, with many equals, and counts those that the NumPy sampler,
the op's reference, picks otherwise: none may be.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from command import options, print_rows
from harness import command, cpu_counters, describe_machine, timestamp, write_json
from sixteen_bit import write_folder

import rlx

Arrays = dict[str, np.ndarray]
PROMPTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time there was a", "My favourite food is",
    "The theory of relativity says that", "In 1969, the first man", "Dear Sir or Madam, I am writing to",
    "SELECT name FROM users WHERE",
]  # fmt: skip
TEXT = """Sampling picks the next token of a text from what the model finds likely. A temperature makes the choice
bolder or safer, top-k and top-p leave out what is unlikely, and penalties keep the text from going in circles. """
GEMMA = "gemma3-270m shape, bf16"
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144,
    "sliding_window": 512, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
# Inputs of the op after the logits: element type, and the name of a second axis.
INPUTS = {
    "uniform": ("f64", ""), "temperature": ("f32", ""), "top_k": ("i32", ""), "top_p": ("f64", ""),
    "min_p": ("f32", ""), "allowed": ("i32", "words"), "history": ("i32", "n"), "prompt_length": ("i32", ""),
    "repetition_penalty": ("f32", ""), "frequency_penalty": ("f32", ""), "presence_penalty": ("f32", ""),
    "bias_tokens": ("i32", "m"), "bias": ("f32", "m"), "scored": ("i32", ""),
}  # fmt: skip
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}
PENALISED = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "top-k 40": {"temperature": 0.7, "top_k": 40},
    "top-p 0.95, temperature 0.7": {"temperature": 0.7, "top_p": 0.95},
    "top-p 0.95, temperature 1": {"temperature": 1.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 64, top-p 0.95": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "penalties, temperature 0.7": {"temperature": 0.7} | PENALISED,
    "penalties, top-p 0.95, temperature 0.7": {"temperature": 0.7, "top_p": 0.95} | PENALISED,
    "temperature 0.7, log-probability": {"temperature": 0.7, "scored": 1},
    "nearly uniform, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
}
# Vocabulary, tokens of a history, and the share of the draws.
DRAWS = ((100, 0, 0.25), (1000, 20, 0.25), (4001, 0, 0.15), (32_000, 40, 0.25), (262_144, 0, 0.07), (262_144, 40, 0.03))
DRAWN_ROWS = 16
BUDGET = 0.05  # of a step
QUIET = 0.08  # of the machine: what other programs may take while a clock is read
STEPS = 6  # of an answer that is timed


def graph(vocab: int, *, writes: bool = False) -> rlx.Graph:
    """Samples from logits, which a launch before it writes if `writes`."""
    g = rlx.Graph("sampling")
    logits = g.input("logits", ("rows", vocab))
    operands = [logits * g.input("scale", (1,)) if writes else logits]
    operands += [g.input(n, ("rows", axis) if axis else ("rows",), kind) for n, (kind, axis) in INPUTS.items()]
    return g.set_outputs(list(g.apply("sample_tokens", *operands)))


def inputs(rows: int, widths: dict[str, int], **settings: Any) -> Arrays:
    """Arrays for settings, numbers or one per row; what is not given has no effect."""
    arrays = {}
    for name, (kind, axis) in INPUTS.items():
        shape = (rows, widths.get(axis, 0)) if axis else (rows,)
        value = np.asarray(settings.get(name, NEUTRAL.get(name, 0)))
        arrays[name] = np.array(np.broadcast_to(value, shape), rlx.dtype(kind).numpy)
    return arrays


def costs(logits: np.ndarray, history: list[int], threads: int, rounds: int) -> dict[str, float]:
    """The best seconds of sampling for each setting."""
    rows, vocab = logits.shape
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(logits.shape, np.float32) * np.float32(0.2)
    f = rlx.compile(graph(vocab, writes=True), threads=threads)
    cases = {}
    for name, setting in SETTINGS.items():
        widths = {"n": len(history)} if "repetition_penalty" in setting else {}
        tokens = history if widths else []
        cases[name] = inputs(rows, widths, history=tokens, uniform=rng.random(rows), **setting)
        cases[name]["logits"] = noise if name.startswith("nearly") else logits
        cases[name]["scale"] = np.ones(1, np.float32)
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, case in cases.items():
            launches = f.report(case).launches
            best[name] = min(
                best[name], sum(launch.seconds for launch in launches if not launch.kernel.startswith("mul."))
            )
    return best


def layer_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    query, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (query, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, query), "mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
    }  # fmt: skip
    norms = [f"{at}_{part}layernorm" for at, part in (("post", "attention_"), ("pre", "feedforward_"))]
    norms += ["input_layernorm", "post_feedforward_layernorm"]
    return matrices | dict.fromkeys(norms, (dim,)) | dict.fromkeys(["self_attn.q_norm", "self_attn.k_norm"], (head,))


def logits_after_prompts(name: str, vocab: int) -> tuple[np.ndarray, list[list[int]], list[int]]:
    """Logits of a model for each prompt, lengthened to a vocabulary, and the tokens of the prompts and of a history."""
    model = rlx.load(name)
    rng, rows = np.random.default_rng(1), []
    for prompt in PROMPTS:
        logits = np.asarray(model.logits(prompt)[-1], np.float32)[:vocab]
        unlikely = np.sort(logits)[: len(logits) // 2]
        rows.append(np.concatenate([logits, rng.choice(unlikely, vocab - len(logits))]))
    tokens = model.tokenizer.encode(TEXT * 8)[:256]
    prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    model.close()
    return np.stack(rows), prompts, tokens


def step_seconds(model: Any, prompts: list[list[int]], clock: Callable[[], float], rounds: int) -> float:
    """Seconds of a decode step of all prompts together: those of an answer of several tokens, less those of one."""
    best = {1: float("inf"), STEPS + 1: float("inf")}
    for _ in range(rounds):
        for tokens in best:
            start = clock()
            model.generate(prompts, max_tokens=tokens)
            best[tokens] = min(best[tokens], clock() - start)
    return (best[STEPS + 1] - best[1]) / STEPS


def requests(rng: np.random.Generator, vocab: int, history: int) -> Iterator[Arrays]:
    """Inputs of draw after draw: logits of any shape, settings of any kind."""
    rows = DRAWN_ROWS
    while True:
        logits = rng.standard_normal((rows, vocab), np.float32) * np.float32(rng.choice([0.2, 1, 3, 8]))
        logits = np.round(logits * 2) / np.float32(2) if rng.random() < 0.3 else logits
        changed: dict[str, Any] = {
            "uniform": rng.random(rows), "temperature": rng.choice([0, 0.05, 0.3, 0.7, 1, 1.5, 30], rows),
            "top_k": rng.choice([0, 0, 1, 7, 40, 300, vocab], rows), "min_p": rng.choice([0, 0, 0.01, 0.2, 1], rows),
            "top_p": rng.choice([1, 1, 0.05, 0.5, 0.9, 0.95, 0.999], rows),
        }  # fmt: skip
        if history:
            changed |= {name: rng.choice([0, 0, 0.5, -0.3], rows) for name in PENALISED}
            changed["repetition_penalty"] = rng.choice([1, 1, 1.3, 0.7], rows)
            changed["history"] = rng.integers(-1, vocab + 2, (rows, history))
            changed["prompt_length"] = rng.integers(0, history, rows)
            keep = rng.random((rows, -(-vocab // 32) * 32)) < rng.choice([0.1, 0.9, 1], (rows, 1))
            keep[np.arange(rows), rng.integers(0, vocab, rows)] = True
            changed["allowed"] = np.packbits(keep, axis=1, bitorder="little").view(np.int32)
            changed["bias_tokens"] = rng.integers(0, vocab, (rows, 5))
            changed["bias"] = rng.choice([-np.inf, -2, 3], (rows, 5))
        widths = {"n": history, "words": -(-vocab // 32), "m": 5} if history else {}
        yield {"logits": logits} | inputs(rows, widths, **changed)


def compare(cases: int, threads: int) -> list[dict[str, int]]:
    """How many draws of each size there were, and how many tokens differ from those of the NumPy sampler."""
    comparisons = []
    for vocab, history, share in DRAWS:
        ours, numpy = rlx.compile(graph(vocab), threads=threads), rlx.compile(graph(vocab), "reference")
        calls = -(-round(cases * share) // DRAWN_ROWS)
        differing = 0
        for request in islice(requests(np.random.default_rng(vocab + history), vocab, history), calls):
            differing += int(np.count_nonzero(ours.run(request)[0] != numpy.run(request)[0]))
        print(f"{calls * DRAWN_ROWS} draws from {vocab} tokens, {differing} differ", file=sys.stderr, flush=True)
        comparisons.append({"vocab": vocab, "history": history, "draws": calls * DRAWN_ROWS, "differences": differing})
    return comparisons


def measure(name: str, logits_of: str, threads: int, rounds: int) -> dict[str, Any]:
    """A decode step and all settings. One thread by its processor time, which does not count other programs."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    model = rlx.load(name, threads=threads)
    vocab = model.vocab_size
    logits, prompts, history = logits_after_prompts(logits_of, vocab)
    before, own = cpu_counters(), time.process_time()
    step, best = float("inf"), dict.fromkeys(SETTINGS, float("inf"))
    for _ in range(4):  # alternately, so that both have quiet moments
        step = min(step, step_seconds(model, prompts, clock, max(rounds // 12, 1)))
        seconds_by_setting = costs(logits, history, threads, max(rounds // 20, 1))
        best = {name: min(best[name], seconds) for name, seconds in seconds_by_setting.items()}
    others = _others(before, time.process_time() - own)
    valid = threads == 1 or others <= QUIET
    print(f"{len(PROMPTS)} rows of {logits.shape[1]} tokens, {threads} thread{'s' * (threads > 1)}")
    print(f"a decode step takes {step * 1e3:.2f} ms; other programs took {others:.0%} of the machine")
    if not valid:
        print("too much for a clock: these times and shares mean little")
    print_rows(("setting", "ms", "share"), [(n, f"{s * 1e3:.3f}", f"{s / step:.1%}") for n, s in best.items()])
    settings = {
        n: {"ms": s * 1e3, "share": s / step, "in_budget": valid and s <= BUDGET * step} for n, s in best.items()
    }
    return {
        "threads": threads, "clock": "processor" if threads == 1 else "wall", "rows": len(PROMPTS),
        "vocab": logits.shape[1], "other_programs": others, "valid": valid, "step_ms": step * 1e3, "settings": settings,
    }  # fmt: skip


def _others(before: tuple[float, float, float] | None, own: float) -> float:
    """The share of the machine's processor time since then that went to other programs or the host."""
    after = cpu_counters()
    if before is None or after is None:
        return 0.0
    busy, stolen, total = (now - then for now, then in zip(after, before, strict=True))
    return max(busy + stolen - own, 0.0) / total


def main() -> int:
    parser = options(__doc__, threads=[1, 2], rounds=60)
    parser.add_argument("--model", help="of the catalogue, or a folder; the shape with random weights unless given")
    parser.add_argument("--logits-of", default="qwen2.5-coder-1.5b", metavar="MODEL", help="whose logits are sampled")
    parser.add_argument("--cases", type=int, default=0, help="draws to compare with the NumPy sampler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            write_folder(Path(folder), "bf16", CONFIG, layer_shapes(CONFIG))
        path = args.model or folder
        runs = [measure(path, args.logits_of, threads, args.rounds) for threads in args.threads]
    draws = compare(args.cases, max(args.threads)) if args.cases else []
    total, differing = sum(d["draws"] for d in draws), sum(d["differences"] for d in draws)
    if draws:
        print(f"{total} draws compared with the NumPy sampler, {differing} differ")
    if args.json:
        write_json(args.json, {
            "machine": describe_machine(), "date": timestamp(), "command": command(), "model": args.model or GEMMA,
            "logits_of": args.logits_of,
            "budget": BUDGET, "runs": runs, "draws": draws, "compared": total, "differences": differing,
        })  # fmt: skip
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
