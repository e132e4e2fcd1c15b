"""A conversation on a terminal: lines in, answers out, with everything said so far sent along.

Ctrl-C stops an answer, not the program; Ctrl-D or /bye leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from rlx.cli import console
from rlx.engine.language_model import Completion, LanguageModel, Messages, TextStream
from rlx.errors import CapabilityError, RequestError, RlxError

QUOTES = '"""'
HELP = """\
/clear   forget the conversation
/bye     leave (or Ctrl-D)
/help    these lines
\"\"\"      begins and ends a message of several lines
Ctrl-C   stops an answer"""


def loop(
    model: LanguageModel, options: Mapping[str, Any], *, system: str | None = None, raw: bool = False,
    read: Callable[[str], str] = input,
) -> int:  # fmt: skip
    """Read, answer, again, until the user leaves. `read` asks for one line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its editing and its history
    talk = Conversation(model, options, system=system, raw=raw)
    console.aside("/help shows the commands; Ctrl-D leaves")
    while True:
        try:
            text = _message(read)
        except EOFError:
            console.write("\n")
            return 0
        except KeyboardInterrupt:
            console.note("\nCtrl-D or /bye leaves")
            continue
        match text.strip():
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                return 0
            case "/clear":
                talk.clear()
                console.aside("forgotten")
            case "/help" | "/?":
                console.note(HELP)
            case word if word.startswith("/") and not any(c.isspace() for c in word) and "/" not in word[1:]:
                console.note(f"{word} is no command\n{HELP}")
            case _:
                talk.say(text)


def _message(read: Callable[[str], str]) -> str:
    """One line, or several between triple quotes."""
    line = read(">>> ")
    start = line.lstrip()
    if not start.startswith(QUOTES):
        return line
    lines = [start[len(QUOTES) :]]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read("... "))
    lines[-1] = lines[-1].rstrip()[: -len(QUOTES)]
    return "\n".join(lines).strip("\n")


class Conversation:
    """What was said so far, and a model that goes on with it."""

    def __init__(
        self, model: LanguageModel, options: Mapping[str, Any], *, system: str | None = None, raw: bool = False
    ) -> None:
        self.model = model
        self.options = options
        self.system = messages(system)
        self.history = self.system
        self.plain = is_plain(model, system, raw)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.history = self.system

    def say(self, text: str) -> None:
        """Stream the answer to a message. What was said of it stays in the history, all of it or up to Ctrl-C."""
        turn = [*self.history, *messages(None, text)]
        hint = "/clear forgets what was said before" if len(self.history) > len(self.system) else None
        said, stream = "", None
        try:
            stream = begin(self.model, text if self.plain else turn, self.options, hint)
            for piece in stream:
                said += piece
                console.write(piece)
            console.write("\n")
            say_timings(self.model, stream.completion)
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
            console.write("\n")
            console.aside("stopped" if said else "stopped; the message is forgotten")
        except RlxError as error:  # a message that cannot be answered does not end the conversation
            console.explain(error)
        if said and not self.plain:
            self.history = [*turn, {"role": "assistant", "content": said}]


# -- one turn --------------------------------------------------------------------------------------------------------
def messages(system: str | None, *texts: str) -> list[dict[str, str]]:
    """A system message, if there is one, and what the user says."""
    said = [("system", system or "")] if system else []
    return [{"role": role, "content": text} for role, text in [*said, *(("user", t) for t in texts)]]


def is_plain(model: LanguageModel, system: str | None, raw: bool) -> bool:
    """Whether text is continued as it is, without a chat template."""
    if model.template is not None:
        return raw
    if system:
        raise CapabilityError("run: --system needs a chat template, and the model has none")
    if not raw:
        console.note("base model: continuing your text")
    return True


def begin(
    model: LanguageModel, said: str | Messages, options: Mapping[str, Any], hint: str | None = None
) -> TextStream:
    """The answer to a text as it is, or to a conversation through the template. There must be room for one."""
    talk = not isinstance(said, str)
    tokens = model.prompt_ids(said, "run") if isinstance(said, str) else model.chat_tokens(said)
    count = len(tokens)
    if count < model.context:
        return model.stream(tokens, chat=talk, **options)
    longest = int(model.checkpoint.config.context)
    ways = [hint or "shorten the text", *([f"start with --context {longest}"] if count < longest else [])]
    raise RequestError(
        f"run: that makes {count} tokens, the context holds {model.context}, the model has {longest}",
        hint=", or ".join(ways),
    )


def say_timings(model: LanguageModel, done: Completion) -> None:
    """The line after an answer; before it, what cut the answer short, if anything did."""
    usage, timings = done.usage, done.timings
    if done.finish_reason == "length":
        full = usage.prompt_tokens + usage.completion_tokens >= model.context
        why = f"the context of {model.context} tokens is full" if full else "--max-tokens allows more"
        count = usage.completion_tokens
        console.aside(f"cut after {count} token{'' if count == 1 else 's'}: {why}")
    cached = f" ({usage.cached_tokens} kept)" if usage.cached_tokens else ""
    threads = "1 thread" if model.threads == 1 else f"{model.threads} threads"
    console.aside(
        console.joined([
            f"prompt {usage.prompt_tokens} tok{cached} {timings.prompt_per_second:.0f}/s",
            f"answer {usage.completion_tokens} tok {timings.answer_per_second:.0f}/s",
            model.target, threads, f"seed {done.seed}",
        ])
    )  # fmt: skip
