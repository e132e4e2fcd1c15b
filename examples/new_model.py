"""Write a new decoder out of stages, initialise it, and train it to repeat what it has read.

    python examples/new_model.py
    python examples/new_model.py --length 40 --steps 400 --plot copy.svg

The model is a small Llama-like decoder: RMSNorm, grouped-query attention with rotary positions, SwiGLU. Each sequence
is random tokens followed by the same tokens again. The second half can only be predicted by attending to the first.
"""

import argparse

import numpy as np
from chart import chart

import rlx
from rlx.flow import LayerStack, ModelFlow

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN, EPS = 16, 64, 2, 4, 2, 128, 1e-5


def decoder_layer(i):
    """One layer, stage by stage. The strings are names of weights."""
    attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
    return (
        LayerStack()
        .residual_save()
        .rms_norm(f"{attention}.norm", EPS)
        .attention(attention, HEADS, KV_HEADS)  # causal, with RoPE
        .residual_add()
        .residual_save()
        .rms_norm(f"{mlp}.norm", EPS)
        .swiglu(f"{mlp}.gate", f"{mlp}.up", f"{mlp}.down", intermediate_size=FFN)
        .residual_add()
    )


def decoder(context):
    """Token ids [batch, seq] to logits [batch, seq, VOCAB]."""
    flow = ModelFlow("copier").input("tokens", ("batch", "seq"), "i32").rope(context, DIM // HEADS)
    flow = flow.embed("embed", shape=(VOCAB, DIM)).repeat_layers(LAYERS, decoder_layer)
    return flow.rms_norm("norm", EPS).linear("head", out=VOCAB).output("logits")


def mean_loss(emit, logits):
    """A stage that ends the flow: the mean cross-entropy over the second half of each sequence."""
    labels = emit.input("labels", ("batch", "seq"), "i32")
    weights = emit.input("weights", ("batch", "seq"))
    return emit.sum(emit.cross_entropy(logits, labels) * weights) / emit.sum(weights)


def batch(rng, size, length):
    """Random tokens twice in a row; what follows each token; and 1 where that can be known."""
    tokens = np.tile(rng.integers(0, VOCAB, (size, length), dtype=np.int32), 2)
    known = np.broadcast_to(np.arange(2 * length - 1) >= length - 1, (size, 2 * length - 1))
    return {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy(), "weights": known.astype(np.float32)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=12, help="tokens to repeat (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: %(default)s)")
    parser.add_argument("--plot", help="SVG file for the loss")
    args = parser.parse_args(argv)

    flow = decoder(2 * args.length)
    weights = flow.init(rlx.random.key(0))  # the stages know all names and shapes
    print(f"{sum(w.size for w in weights.values()):,} parameters in {len(weights)} weights")
    step = rlx.train.step(flow.custom(mean_loss).build(weights), rlx.train.adamw(3e-3), clip=1.0)
    rng = np.random.default_rng(0)
    losses = []
    for i in range(args.steps):
        losses.append(step.run(batch(rng, 32, args.length)))
        if (i + 1) % (args.steps // 6) == 0:
            print(f"step {i + 1}: loss {np.mean(losses[-10:]):.1f}")

    test = batch(rng, 200, args.length)
    (logits,) = flow.build(step.params).compile().run({"tokens": test["tokens"]})
    right = (logits.argmax(-1) == test["labels"])[test["weights"] > 0].mean()
    print(f"repeated correctly: {right:.0%} (chance: {1 / VOCAB:.0%})")
    if args.plot:
        chart(args.plot, "Cross-entropy of repeated tokens, by step", {"loss": list(enumerate(losses, 1))})
    return right


if __name__ == "__main__":
    main()
