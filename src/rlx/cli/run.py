"""`rlx run [MODEL] [PROMPT]`: a model answers. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time

from rlx.engine.model import Model, load
from rlx.engine.sampler import Sampling
from rlx.errors import NotFoundError, RequestError, nearest
from rlx.hub.catalogue import CATALOGUE, DEFAULT
from rlx.hub.pull import names_a_model


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("run", help="chat with a model")
    command.add_argument("words", nargs="*", metavar="[MODEL] [PROMPT]", help="a model, a prompt, or both")
    command.add_argument("-m", "--model", help="catalogue name, file, folder or org/name[:quant]")
    command.add_argument("-p", "--prompt", help="what to say to it")
    command.add_argument("--system", help="a system message")
    command.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    command.add_argument("--max-tokens", type=int, default=512)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--seed", type=int)
    command.add_argument("--stop", action="append", default=[], help="end the answer before this text")
    command.add_argument("--threads", type=int)
    command.add_argument("--context", type=int)
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    name, prompt = split_words(arguments.words, arguments.model, arguments.prompt)
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    prompt = "\n\n".join(part for part in (prompt, piped.strip()) if part)
    if not prompt:
        raise RequestError("run: there is no prompt", hint='rlx run "Explain gravity to a child."')
    model = load(name or DEFAULT, threads=arguments.threads, context=arguments.context)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, seed=arguments.seed)
    return answer(model, prompt, arguments, sampling)


def split_words(words: list[str], model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """One word is a model if it names one, a prompt if it has white space, else a mistake; two are both."""
    if len(words) > 2:
        raise RequestError(
            f"run: {len(words)} arguments, at most a model and a prompt", hint="put the prompt in quotes"
        )
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1:
        if model is not None or any(c.isspace() for c in words[0]):
            return model, words[0]
        if prompt is not None or names_a_model(words[0]):
            return words[0], prompt
        raise NotFoundError(
            f"run: {words[0]!r} is no model",
            notes=[nearest(words[0], CATALOGUE) or "rlx models lists those that can be fetched"],
            hint=f"to send it as a prompt: rlx run -p {words[0]}",
        )
    return model, prompt


def answer(model: Model, prompt: str, arguments: argparse.Namespace, sampling: Sampling) -> int:
    """Stream one answer and print the timings."""
    chat = model.template is not None and not arguments.raw
    if chat:
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        tokens = model.chat_tokens([*system, {"role": "user", "content": prompt}])
    else:
        tokens = model.tokenizer.encode(prompt)
        print("base model: continuing your text", file=sys.stderr)
    begin = time.perf_counter()
    first, count, text = begin, 0, ""
    try:
        for piece, token in model.pieces(tokens, arguments.max_tokens, sampling, arguments.stop):
            first = time.perf_counter() if count == 0 else first
            count += token >= 0
            text += piece
            if not arguments.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    spent = time.perf_counter() - first
    if arguments.json:
        print(json.dumps({"text": text, "prompt_tokens": len(tokens), "tokens": count}))
    else:
        print()
    rate = (count - 1) / spent if spent > 0 and count > 1 else 0.0
    target = model.compiled.target.name  # type: ignore[attr-defined]
    read = len(tokens) / max(first - begin, 1e-9)
    line = f"prompt {len(tokens)} tok {read:.0f}/s · answer {count} tok {rate:.0f}/s · {target}"
    print(f"\033[90m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr)
    return 0
