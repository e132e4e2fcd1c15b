"""Interactive chat on a terminal. Each message is sent with the conversation so far.

Ctrl-C stops an answer, not the program; Ctrl-D or /bye leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from rlx.cli import console
from rlx.engine.conversation import Messages
from rlx.engine.language_model import Completion, LanguageModel, TextStream
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
    """Read messages and stream answers until the user leaves. `read` prompts for one line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  adds line editing and history to `input`
    conversation = Conversation(model, options, system=system, raw=raw)
    console.dim_note("/help shows the commands; Ctrl-D leaves")
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
                conversation.clear()
                console.dim_note("forgotten")
            case "/help" | "/?":
                console.note(HELP)
            case word if word.startswith("/") and not any(c.isspace() for c in word) and "/" not in word[1:]:
                console.note(f"{word} is no command\n{HELP}")
            case _:
                conversation.send(text)


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
    """The history of a chat, and the model that continues it."""

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

    def send(self, text: str) -> None:
        """Stream the answer to a message. The answer, complete or cut by Ctrl-C, goes into the history."""
        turn = [*self.history, *messages(None, text)]
        hint = "/clear forgets what was said before" if len(self.history) > len(self.system) else None
        answer, stream = "", None
        try:
            stream = begin(self.model, text if self.plain else turn, self.options, hint)
            for piece in stream:
                answer += piece
                console.write(piece)
            console.write("\n")
            print_timings(self.model, stream.completion)
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
            console.write("\n")
            console.dim_note("stopped" if answer else "stopped; the message is forgotten")
        except RlxError as error:  # a message that cannot be answered does not end the conversation
            console.explain(error)
        if answer and not self.plain:
            self.history = [*turn, {"role": "assistant", "content": answer}]


# -- one turn --------------------------------------------------------------------------------------------------------
def messages(system: str | None, *texts: str) -> list[dict[str, str]]:
    """A system message, if there is one, and the user's messages."""
    system_message = [("system", system or "")] if system else []
    return [{"role": role, "content": text} for role, text in [*system_message, *(("user", t) for t in texts)]]


def is_plain(model: LanguageModel, system: str | None, raw: bool) -> bool:
    """Whether texts are continued without a chat template."""
    if model.template is not None:
        return raw
    if system:
        raise CapabilityError("run: --system needs a chat template, and the model has none")
    if not raw:
        console.note("base model: continuing your text")
    return True


def begin(
    model: LanguageModel, prompt: str | Messages, options: Mapping[str, Any], hint: str | None = None
) -> TextStream:
    """Stream the continuation of a text, or the answer to a conversation. Raises if the context has no room for it."""
    is_chat = not isinstance(prompt, str)
    tokens = model.prompt_ids(prompt, "run") if isinstance(prompt, str) else model.chat_tokens(prompt)
    count = len(tokens)
    if count < model.context:
        return model.stream(tokens, chat=is_chat, **options)
    longest = int(model.checkpoint.config.context)
    ways = [hint or "shorten the text", *([f"start with --context {longest}"] if count < longest else [])]
    raise RequestError(
        f"run: that makes {count} tokens, the context holds {model.context}, the model has {longest}",
        hint=", or ".join(ways),
    )


def print_timings(model: LanguageModel, done: Completion) -> None:
    """Print timings after an answer, and why it was cut, if it was."""
    usage, timings = done.usage, done.timings
    if done.finish_reason == "length":
        full = usage.prompt_tokens + usage.completion_tokens >= model.context
        why = f"the context of {model.context} tokens is full" if full else "--max-tokens allows more"
        count = usage.completion_tokens
        console.dim_note(f"cut after {count} token{'' if count == 1 else 's'}: {why}")
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    threads = "1 thread" if model.threads == 1 else f"{model.threads} threads"
    console.dim_note(
        console.join([
            f"prompt {usage.prompt_tokens} tok{cached} {timings.prompt_per_second:.0f}/s",
            f"answer {usage.completion_tokens} tok {timings.answer_per_second:.0f}/s",
            model.target, threads, f"seed {done.seed}",
        ])
    )  # fmt: skip
