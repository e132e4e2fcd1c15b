"""`rlx run [MODEL] [PROMPT]`: chats, or answers one prompt. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx import hub
from rlx.cli import chat, console
from rlx.cli.console import UsageError
from rlx.cli.loading import DEVICE_HELP, load
from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.sampler import Sampling
from rlx.errors import CapabilityError, NotFoundError, RequestError
from rlx.fast_dataclass import dataclass
from rlx.hub.pull import names_a_model
from rlx.runtime.kv_spec import CACHE_HELP, CACHES

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
MAX_BYTES = 64 << 20  # of stdin; ten times the longest contexts
PATIENCE_S = 3.0  # wait for stdin before printing a note


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("run", help="chat with a model, or have it answer one prompt")
    command.add_argument("words", nargs="*", metavar="[MODEL] [PROMPT]", help="a model, a prompt, or both")
    command.add_argument("-m", "--model", help="catalogue name, file, folder or org/name[:quant]")
    command.add_argument("-p", "--prompt", help=f"the prompt; text from stdin is appended, up to {MAX_BYTES >> 20} MiB")
    command.add_argument("--system", help="a system message")
    command.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    command.add_argument("--max-tokens", type=int, default=512, metavar="N", help="maximum tokens of the answer (512)")
    command.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token (0)")
    command.add_argument("--top-k", type=int, metavar="K", help="sample from the k likeliest tokens")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens that add up to this probability"
    )
    command.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from tokens with at least this share of the highest probability",
    )
    command.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: makes earlier tokens less likely"
    )
    command.add_argument("--seed", type=int, help="the same seed gives the same answer")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text")
    command.add_argument("--device", default="cpu", help=DEVICE_HELP)
    command.add_argument("--threads", type=int, metavar="N", help="number of threads (default: all usable cores)")
    command.add_argument("--context", type=int, metavar="N", help="maximum tokens, prompt and answer together")
    command.add_argument("--cache", choices=CACHES, default="auto", help=CACHE_HELP)
    command.add_argument(
        "--json",
        action="store_true",
        help="print answer, usage and timings as one JSON object; it does not ask the model for JSON",
    )
    command.add_argument("--stream", action="store_true", help="with --json: one line per piece, then the object")
    command.set_defaults(run=run)


@dataclass(frozen=True)
class Request:
    """Settings of the answers."""

    options: Mapping[str, Any]  # for LanguageModel.stream
    system: str | None = None
    raw: bool = False


def run(arguments: argparse.Namespace) -> int:
    name, prompt = split_words(arguments.words, arguments.model, arguments.prompt)
    request = _request(arguments)
    prompt = _with_stdin(prompt)
    if prompt is None and console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout):
        if arguments.json:
            raise UsageError("run: --json wants a prompt", hint="rlx run --json -p '...'")
        with open_model(name or hub.DEFAULT, arguments) as model:
            return chat.loop(model, request.options, system=request.system, raw=request.raw)
    if prompt is None or not prompt.strip():
        raise UsageError(
            "run: there is no prompt" if prompt is None else "run: the prompt is empty",
            hint='rlx run "Explain gravity to a child."; on a terminal, rlx run without a prompt is a chat',
        )
    with open_model(name or hub.DEFAULT, arguments) as model:
        return answer(model, prompt, request, as_json=arguments.json, as_lines=arguments.stream)


# -- arguments -------------------------------------------------------------------------------------------------------
def split_words(words: list[str], model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """Model and prompt. A single word is a model if it names one, a prompt if it has white space, else an error."""
    if len(words) + (model is not None) + (prompt is not None) > 2 or (len(words) == 2 and (model or prompt)):
        raise UsageError("run: takes at most a model and a prompt", hint="put the prompt in quotes")
    match words:
        case []:
            return model, prompt
        case [first, second]:
            return first, second
        case [word] if model is not None:
            return model, word
        case [word] if prompt is not None or names_a_model(word):
            return word, prompt
        case [word] if not word or any(c.isspace() for c in word):
            return None, word
    try:
        hub.locate(words[0])  # raises what is wrong with the name
    except NotFoundError as error:
        error.add_note(f"  to send it as a prompt: rlx run -p {shlex.quote(words[0])}")
        raise
    return words[0], None


def _request(arguments: argparse.Namespace) -> Request:
    """The settings, checked before anything is downloaded or loaded."""
    sampling = {n: v for n in SAMPLING if (v := getattr(arguments, n)) is not None}
    try:
        Sampling(**sampling)
    except RequestError as error:
        hint = f"--{error.hint.replace('=', ' ')}" if error.hint and "=" in error.hint else error.hint
        raise UsageError(f"run: {error}", hint=hint) from error
    for option in ("max_tokens", "threads", "context"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UsageError(f"run: --{option.replace('_', '-')} is {value}, expected a number from 1")
    if arguments.system and arguments.raw:
        raise UsageError("run: --system needs the chat template, and --raw leaves it out")
    if not all(arguments.stop):
        raise UsageError("run: --stop is an empty text")
    options = {"max_tokens": arguments.max_tokens, "stop": arguments.stop, **sampling}
    return Request(options, arguments.system, arguments.raw)


def _with_stdin(prompt: str | None) -> str | None:
    """The prompt with the text from stdin, unless that is a terminal."""
    if prompt is not None:
        prompt = _utf8("the prompt", os.fsencode(prompt))  # independent of the locale
    if sys.stdin is None or console.is_terminal(sys.stdin):
        return prompt
    text = _read_stdin().removesuffix("\n")  # of `echo`; a base model would read it as the end of a paragraph
    if not text.strip():
        return prompt
    return text if prompt is None else f"{prompt}\n\n{text}"


def _read_stdin() -> str:
    try:
        if not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
            console.note("reading the rest of the prompt from stdin; `< /dev/null` if there is none")
    except (OSError, ValueError):  # not a file: nothing to wait for
        pass
    source = getattr(sys.stdin, "buffer", None)
    try:
        if source is None:  # text in memory, as in notebooks
            return sys.stdin.read()
        return _utf8("stdin", console.read_at_most(source, MAX_BYTES, "run: stdin"))
    except (OSError, ValueError):  # closed, or a folder
        return ""


def _utf8(source: str, data: bytes) -> str:
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"run: {source} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}",
            hint="convert it first, for example with iconv",
        ) from error


# -- a model ---------------------------------------------------------------------------------------------------------
def open_model(name: str | Path, arguments: argparse.Namespace) -> LanguageModel:
    """Load the model, downloading it if necessary."""
    hub.resolve(name)  # shows its own progress
    with console.status(f"loading {name}"):
        settings = {"threads": arguments.threads, "context": arguments.context, "cache": arguments.cache}
        model = load(name, device=arguments.device, **settings)
    if not isinstance(model, LanguageModel):
        model.close()
        kind = "a vision model" if model.facts.kind == "vision model" else "an encoder"
        raise CapabilityError(f"run: {name} is {kind}: it gives vectors, not text", hint=f"rlx embed -m {name} ...")
    return model


def answer(
    model: LanguageModel, prompt: str, request: Request, *, as_json: bool = False, as_lines: bool = False
) -> int:
    """Answer one prompt on stdout, then print timings on stderr."""
    conversation = (
        prompt if chat.is_plain(model, request.system, request.raw) else chat.messages(request.system, prompt)
    )
    stream = chat.begin(model, conversation, request.options)
    try:
        for piece in stream:
            if not as_json:
                console.write(piece)
            elif as_lines:
                console.write(json.dumps({"delta": piece}, ensure_ascii=False) + "\n")
    except KeyboardInterrupt:
        stream.close()
        if not as_json:
            console.write("\n")
        console.dim_note("interrupted")
        raise
    done = stream.completion
    if as_json:
        console.write(json.dumps(facts(done), ensure_ascii=False) + "\n")
    elif not done.text.endswith("\n"):
        console.write("\n")
    chat.print_timings(model, done)
    return 0


def facts(done: Completion) -> dict[str, Any]:
    """A completion as plain data for JSON."""
    usage, timings = done.usage, done.timings
    return {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "usage": {n: getattr(usage, n) for n in ("prompt_tokens", "cached_tokens", "completion_tokens")},
        "timings": {
            n: getattr(timings, n)
            for n in ("prompt_seconds", "answer_seconds", "prompt_per_second", "answer_per_second")
        },
        "seed": done.seed,
        "fingerprint": done.fingerprint,
    }
