"""Train a small Llama on a text, character by character, and let it write.

    python examples/char_model.py tinyshakespeare.txt
    python examples/char_model.py book.txt --steps 2000 --dim 192 --layers 6 --plot loss.svg --save book.safetensors

Forward pass, backward pass and AdamW are compiled once, into one call that updates the weights in place. At the
defaults (0.8 million parameters) 500 steps take about a minute on two cores.
"""

import argparse
from pathlib import Path

import numpy as np
from chart import chart

import rlx
from rlx.flow import ModelFlow
from rlx.flow.stages import LlamaDecoder

EPS, TEMPERATURE = 1e-5, 0.8


def decoder(vocab, dim, layers, heads, context):
    """Token ids [batch, seq] to logits [batch, seq, vocab], under the weight names of Hugging Face's Llama."""
    head_dim, ffn = dim // heads, -(-dim // 3) * 8  # 8/3 of dim, rounded up

    def layer(i):
        return LlamaDecoder(f"model.layers.{i}", heads, heads, head_dim, EPS, intermediate_size=ffn)

    flow = ModelFlow("char_model").input("tokens", ("batch", "seq"), "i32").rope(context, head_dim)
    flow = flow.token_embed(shape=(vocab, dim))
    return flow.repeat_layers(layers, layer).final_norm(EPS).lm_head(vocab, dim, tied=False)


def mean_loss(emit, logits):
    """A stage that ends the flow: the mean cross-entropy of the characters that come next."""
    return emit.mean(emit.cross_entropy(logits, emit.input("labels", ("batch", "seq"), "i32")))


def batch(data, size, context, rng):
    """Random pieces of the text, and the same pieces one character further on."""
    offsets = rng.integers(0, len(data) - context, size)
    rows = data[offsets[:, None] + np.arange(context + 1)]
    return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}


def write(run, tokens, count, context, rng):
    """Tokens drawn one by one, each from what the last `context` ones predict."""
    for _ in range(count):
        (logits,) = run.run({"tokens": np.array([tokens[-context:]], np.int32)})
        scores = logits[0, -1].astype(np.float64) / TEMPERATURE
        chances = np.exp(scores - scores.max())
        tokens = [*tokens, int(rng.choice(len(chances), p=chances / chances.sum()))]
        yield tokens[-1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a text file")
    sizes = {"dim": 128, "layers": 4, "heads": 4, "context": 128, "batch": 16, "steps": 500, "write": 400, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="SVG file for the losses")
    parser.add_argument("--save", type=Path, help="safetensors file for the weights and the optimiser's state")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"no such file: {args.text}")
    text = args.text.read_text("utf-8")
    if len(text) <= args.context:
        parser.error(f"{args.text} has {len(text)} characters, a context of {args.context} needs more")
    letters, data = np.unique(np.array(list(text)), return_inverse=True)
    data, rng = data.astype(np.int32), np.random.default_rng(args.seed)

    flow = decoder(len(letters), args.dim, args.layers, args.heads, args.context)
    loss = flow.custom(mean_loss).build(flow.init(rlx.random.key(args.seed)))
    schedule = rlx.train.cosine(args.lr, args.steps, warmup=args.steps // 20, end=args.lr / 10)
    decay = {"*norm*": 0.0, "*": 0.1}
    step = rlx.train.step(loss, rlx.train.adamw(schedule, (0.9, 0.99), weight_decay=decay), clip=1.0)
    losses = []
    for i in range(args.steps):
        losses.append(step.run(batch(data, args.batch, args.context, rng)))
        if (i + 1) % max(1, args.steps // 10) == 0:
            print(f"step {i + 1:5}: loss {np.mean(losses[-20:]):.2f}")
    if args.plot:
        chart(args.plot, "Cross-entropy by step", {"loss": list(enumerate(losses, 1))})
    if args.save:
        step.save(args.save)
    run = flow.build(step.params).compile()
    print(letters[data[0]], end="")
    for token in write(run, [int(data[0])], args.write, args.context, rng):
        print(letters[token], end="", flush=True)
    print()
    return losses


if __name__ == "__main__":
    main()
