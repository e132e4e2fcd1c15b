"""Train a small Llama to write text character by character, and let it write.

    python examples/char_model.py tinyshakespeare.txt
    python examples/char_model.py book.txt --steps 2000 --dim 192 --layers 6 --plot loss.svg

Everything is compiled once: forward, backward and AdamW are one call that changes the weights in place. At the defaults
(0.8 million parameters) 500 steps take about a minute on two cores.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.flow import ModelFlow
from rlx.flow.stages import LlamaDecoder

Array = np.ndarray[Any, Any]
TEXT = Path(os.environ.get("RLX_ASSETS", ".")) / "text" / "tinyshakespeare.txt"


# -- the model --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama; `context` is how many characters it sees."""

    vocab: int
    dim: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 344
    context: int = 128
    eps: float = 1e-5


def logits_flow(sizes: Sizes) -> ModelFlow:
    """Tokens to logits, with the names and layouts of Hugging Face's Llama."""
    head = sizes.dim // sizes.heads
    angles = np.outer(np.arange(sizes.context), 10000.0 ** (-np.arange(0, head, 2) / head))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def layer(i: int) -> LlamaDecoder:
        prefix = f"model.layers.{i}"
        return LlamaDecoder(prefix, sizes.heads, sizes.heads, head, sizes.eps, layer_idx=i, intermediate_size=sizes.ffn)

    return (
        ModelFlow("char_model")
        .input("tokens", ("batch", "seq"), "i32")
        .rope_tables(cos, sin, "halves")
        .token_embed(shape=(sizes.vocab, sizes.dim))
        .repeat_layers(sizes.layers, layer)
        .final_norm(sizes.eps)
        .lm_head(sizes.vocab, sizes.dim, tied=False)
    )


def loss_flow(sizes: Sizes) -> ModelFlow:
    """Tokens and the ones that follow them to the mean cross-entropy."""

    def loss(emit: rlx.Emit, logits: rlx.Value) -> rlx.Value:
        labels = emit.input("labels", ("batch", "seq"), "i32")
        mean: rlx.Value = emit.mean(emit.cross_entropy(logits, labels))
        return mean

    return logits_flow(sizes).custom(loss)


def random_weights(sizes: Sizes, seed: int) -> dict[str, Array]:
    """Matrices of small random numbers, norms of ones; linear weights are [out, in]."""
    dim, ffn, rng = sizes.dim, sizes.ffn, np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (sizes.vocab, dim), "lm_head.weight": (sizes.vocab, dim)}
    norms = ["model.norm.weight"]
    for i in range(sizes.layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (dim, dim) for n in "qkvo"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (ffn, dim) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (dim, ffn)
        norms += [f"{at}.{n}_layernorm.weight" for n in ("input", "post_attention")]
    matrices = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    return matrices | {name: np.ones(dim, np.float32) for name in norms}


# -- training ---------------------------------------------------------------------------------------------------------
def batches(data: Array, batch: int, context: int, rng: np.random.Generator) -> Iterator[dict[str, Array]]:
    """Pieces of the text, and the same one character further on."""
    while True:
        starts = rng.integers(0, len(data) - context, batch)
        rows = data[starts[:, None] + np.arange(context + 1)]
        yield {"tokens": np.ascontiguousarray(rows[:, :-1]), "labels": np.ascontiguousarray(rows[:, 1:])}


def rate(step: int, steps: int, peak: float) -> float:
    """A learning rate that rises over the first twentieth and falls to a tenth along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(made: rlx.train.TrainStep, data: Array, args: argparse.Namespace) -> list[float]:
    """All losses; a line of progress goes to stderr."""
    losses: list[float] = []
    begun = time.perf_counter()
    pieces = batches(data, args.batch, args.context, np.random.default_rng(args.seed))
    for i in range(args.steps):
        losses.append(made.run(next(pieces), lr=rate(i, args.steps, args.lr)))
        if (i + 1) % max(1, args.steps // 100) == 0 or i + 1 == args.steps:
            speed = (i + 1) * args.batch * args.context / (time.perf_counter() - begun)
            recent = float(np.mean(losses[-20:]))
            line = f"step {i + 1:5}/{args.steps}  loss {recent:6.3f}  {speed:8,.0f} tok/s  {sparkline(losses)}"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return losses


def sparkline(losses: Sequence[float], width: int = 40) -> str:
    """The losses as a line of small bars, means of `width` stretches."""
    means = [float(np.mean(part)) for part in np.array_split(losses, min(width, len(losses)))]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round((m - low) / ((high - low) or 1.0) * (len(bars) - 1))] for m in means)


def plot(losses: Sequence[float]) -> str:
    """An SVG of the losses, and over them their means of the last 20 steps."""
    width, height, left, top, bottom = 720, 360, 52, 34, 320
    means = [float(np.mean(losses[max(0, i - 19) : i + 1])) for i in range(len(losses))]
    high = max(losses) * 1.05
    unit = 10.0 ** math.floor(math.log10(high / 2))
    tick = next(t * unit for t in (1, 2, 5, 10) if high / (t * unit) <= 6)

    def x(step: float) -> float:
        return left + step * (width - left - 20) / max(1, len(losses) - 1)

    def y(loss: float) -> float:
        return bottom - loss * (bottom - top) / high

    def curve(values: Sequence[float], look: str) -> str:
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="#2563eb" {look}/>'

    def text(at: float, down: float, what: str, anchor: str = "middle") -> str:
        return f'<text x="{at:.0f}" y="{down:.0f}" text-anchor="{anchor}">{what}</text>'

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"']
    lines += ['  font-size="12" fill="#555">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(int(high / tick) + 1):
        at = y(i * tick)
        lines += [
            f'<path d="M{left} {at:.1f}H{width - 20}" stroke="#ddd"/>',
            text(left - 8, at + 4, f"{i * tick:g}", "end"),
        ]
    for i in range(5):
        lines.append(text(x(i * (len(losses) - 1) / 4), bottom + 20, f"{1 + i * (len(losses) - 1) // 4:,}"))
    lines += [curve(losses, 'stroke-width="1" opacity="0.35"'), curve(means, 'stroke-width="2"')]
    lines.append(
        text(left, 20, f"cross-entropy by step: {losses[0]:.2f} at first, {means[-1]:.2f} in the end", "start")
    )
    return "\n".join([*lines, "</svg>", ""])


# -- writing ----------------------------------------------------------------------------------------------------------
def write(run: rlx.CompiledGraph, prompt: Array, count: int, context: int, rng: np.random.Generator) -> Iterator[int]:
    """Characters drawn one by one, each after the last `context` ones."""
    seen = prompt
    for _ in range(count):
        (logits,) = run.run({"tokens": np.ascontiguousarray(seen[-context:])[None]})
        last = logits[0, -1].astype(np.float64) / 0.8  # a temperature: less daring than the model
        chances = np.exp(last - last.max())
        drawn = int(rng.choice(len(chances), p=chances / chances.sum()))
        seen = np.append(seen, np.int32(drawn))
        yield drawn


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path, default=TEXT, help="a text file (default: %(default)s)")
    for name, default in (("dim", 128), ("layers", 4), ("heads", 4), ("context", 128), ("batch", 16), ("steps", 500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, default=400, help="characters to write at the end")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--plot", type=Path, help="a picture of the losses to write (SVG)")
    parser.add_argument("--save", type=Path, help="a checkpoint to write (safetensors)")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"there is no text file {args.text}: give one")
    text = args.text.read_text("utf-8")
    letters = sorted(set(text))
    if len(text) < args.context + 1:
        parser.error(f"{args.text} has {len(text)} characters, a context of {args.context} needs more")
    number = {letter: i for i, letter in enumerate(letters)}
    data = np.array([number[letter] for letter in text], np.int32)
    ffn = -(-args.dim * 8 // 3 // 8) * 8
    sizes = Sizes(len(letters), args.dim, args.layers, args.heads, ffn, args.context)

    weights = random_weights(sizes, args.seed)
    built = loss_flow(sizes).build(weights)
    optimiser = rlx.train.adamw(args.lr, (0.9, 0.99), weight_decay=0.1)
    made = rlx.train.step(built.module, optimiser, list(weights), clip=1.0, threads=args.threads)
    made.set_params(built.params)
    count = sum(a.size for a in weights.values())
    print(f"{count:,} parameters, {len(data):,} characters, {len(letters)} different ones", file=sys.stderr)
    losses = train(made, data, args)
    if args.save:
        made.save(args.save)
    if args.plot:
        args.plot.write_text(plot(losses), "utf-8")

    run = logits_flow(sizes).build(made.params).compile()
    prompt = data[: args.context]
    drawn = write(run, prompt[:1], args.write, args.context, np.random.default_rng(args.seed))
    print(letters[int(prompt[0])], end="")
    for i in drawn:
        print(letters[i], end="", flush=True)
    print()
    return losses


if __name__ == "__main__":
    main()
