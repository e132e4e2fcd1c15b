"""Steer a language model: find a direction in its residual stream from two prompts, and add it while the model runs.

    python examples/steer.py
    python examples/steer.py --towards "Bonjour, je suis français" --away "Hello, I am English" --words " le" " the" \\
        "My favourite food is"

The direction is the difference of the residual streams of two prompts at their last tokens, after one layer. Added with
various strengths while another prompt is read, it changes which word comes next, and what is written from there.
"""

import argparse

import numpy as np
from chart import chart

import rlx

LOVE, HATE = "I love this. It makes me so happy. It is wonderful", "I hate this. It makes me so angry. It is terrible"


def difference(model, towards, away, layer=None):
    """The stage path of a layer (the middle one unless given), and the difference of its values at the last tokens."""
    ends = [model.run(prompt, capture="layers.*") for prompt in (towards, away)]
    path = f"layers.{len(ends[0]) // 2 if layer is None else layer}"
    return path, ends[0][path][-1] - ends[1][path][-1]  # [dim]


def log_odds(model, prompt, words, path, added):
    """How much likelier the first word is than the second after the prompt, and the five likeliest tokens there."""
    logits = model.run(prompt, edit={path: lambda residual: residual + added})["logits"][-1]
    first, second = (model.tokenizer.encode(word, add_special=False)[0] for word in words)
    likeliest = [model.tokenizer.decode([int(token)]) for token in np.argsort(-logits)[:5]]
    return float(logits[first] - logits[second]), likeliest


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="I just saw the new film, and I thought it was")
    parser.add_argument("--model", default="smollm2-135m", help="name, file or folder (default: %(default)s)")
    parser.add_argument("--towards", default=LOVE, help="prompt to steer towards")
    parser.add_argument("--away", default=HATE, help="prompt to steer away from")
    parser.add_argument("--words", nargs=2, default=[" great", " terrible"], help="words to compare")
    parser.add_argument("--layer", type=int, help="layer whose output is changed (default: the middle one)")
    parser.add_argument("--strengths", type=float, nargs="+", default=[-1, -0.5, 0, 0.5, 1], metavar="S")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--plot", help="SVG file for the log-odds of the two words by strength")
    args = parser.parse_args(argv)

    model = rlx.load(args.model, precision="f32")  # activations are not rounded to 8 bits
    path, direction = difference(model, args.towards, args.away, args.layer)
    odds = []
    print("strength  log-odds  likeliest next tokens")
    for strength in args.strengths:
        ratio, likeliest = log_odds(model, args.prompt, args.words, path, np.float32(strength) * direction)
        print(f"{strength:+8.1f}  {ratio:+8.1f}  {', '.join(map(repr, likeliest))}")
        odds.append((strength, ratio))
    for strength in (min(args.strengths), max(args.strengths)):
        added = np.float32(strength) * direction
        text = model.generate(args.prompt, max_tokens=args.tokens, edit={path: lambda residual, v=added: residual + v})
        print(f"{strength:+.1f}: {args.prompt}{text}")
    if args.plot:
        chart(args.plot, "Log-odds by strength", {" over".join(args.words): odds})
    return dict(odds)


if __name__ == "__main__":
    main()
