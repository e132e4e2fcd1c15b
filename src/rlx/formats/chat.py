"""Render chat messages with a model's chat template.

Takes the template of a GGUF file or tokenizer_config.json and messages in OpenAI form; returns the prompt or its
tokens. The template runs in `jinja_sandbox.py`. Only the template can write control tokens: their text in a message,
tool or variable stays plain text.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from rlx.errors import FormatError, RequestError, nearest
from rlx.formats.jinja_sandbox import Program
from rlx.formats.tensor_file import quoted
from rlx.formats.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 1 << 14
_MAX_NESTING = 32
_LIST = 'a conversation is a list of messages: [{"role": "user", "content": "Hello"}]'
_MESSAGE = 'a message is a dict with a role and a content: {"role": "user", "content": "Hello"}'
_MARK_BITS = 100  # of entropy, so that no input can guess the mark
_INDEX_BITS = 27
_SYMBOLS = "0123456789-_.~"  # unchanged by JSON, HTML and URL escaping and by upper-casing


class ChatTemplate:
    """A chat template and its bos and eos tokens. Rendering is thread-safe."""

    def __init__(
        self, source: str, *, bos_token: str | None = None, eos_token: str | None = None, where: str = "chat template"
    ) -> None:
        self._program = Program(source, where)
        self._tokens = {k: v for k, v in (("bos_token", bos_token), ("eos_token", eos_token)) if v is not None}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Render the prompt for these messages; `add_generation_prompt` ends it with the start of an assistant turn.

        With `continue_final_message` it ends with the text of the last message, an assistant's, which the model goes on
        with.

        A message has a role and a content: a string, a list of text parts, or none if it has `tool_calls`. Parts are
        joined by newlines unless the template handles them itself. Other members (`name`, `tool_calls`) and `variables`
        (`enable_thinking=False`) must be plain data and are passed through.
        Raises RequestError for messages that are invalid or that the template rejects, and FormatError for a template
        that fails or exceeds its budget.
        """
        template_vars = self._template_vars(messages, tools, variables)
        return self._rendered(template_vars, add_generation_prompt, continue_final_message)

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any,
    ) -> list[int]:  # fmt: skip
        """Tokenise the prompt that `render` returns; only the template can produce special tokens."""
        hidden = _Hidden(tokenizer)
        template_vars = {
            name: hidden.hide(value) for name, value in self._template_vars(messages, tools, variables).items()
        }
        for message, plain in zip(template_vars["messages"], messages, strict=True):
            message["role"] = plain["role"]  # one of ROLES, from which templates build control tokens
        prompt = self._rendered(template_vars, add_generation_prompt, continue_final_message)
        if not hidden.texts:
            return tokenizer.encode(prompt, add_special=False, parse_special=True)
        return tokenizer.encode_parts(hidden.parts(prompt))

    def _rendered(self, template_vars: dict[str, Any], generation_prompt: bool, continued: bool) -> str:
        mark = ""
        if continued:
            mark = "".join(secrets.choice("0123456789") for _ in range(30))
            template_vars["messages"] = _with_mark(template_vars["messages"], mark)
        prompt = self._program.render(
            {**template_vars, **self._tokens, "add_generation_prompt": bool(generation_prompt) and not continued}
        )
        if not continued:
            return prompt
        start, separator, _ = prompt.partition(mark)
        if not separator:
            raise RequestError("continue_final_message: the chat template does not show the last message's text")
        return start

    def _template_vars(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        return {
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": self._check_messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
        }

    def _check_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(f"messages: expected a list, found {type(messages).__name__}", hint=_LIST)
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise RequestError(f"messages: expected 1 to {MAX_MESSAGES}, found {len(messages)}", hint=_MESSAGE)
        return [self._check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _check_message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where}: expected an object, found {type(message).__name__}", hint=_hint(message) or _MESSAGE
            )
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            hint = nearest(role[:80], ROLES) if isinstance(role, str) else None
            raise RequestError(f"{where}.role: expected one of {', '.join(ROLES)}, found {quoted(role)}", hint=hint)
        checked: dict[str, Any] = _plain(message, where)
        if "content" not in message and not message.get("tool_calls"):
            raise RequestError(f"{where}.content: missing")
        content = checked.get("content")
        if isinstance(content, list):
            texts = [_text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
            parts = [{"type": "text", "text": text} for text in texts]
            checked["content"] = parts if self._program.reads_parts else "\n".join(texts)
        elif content is None:
            if not message.get("tool_calls"):
                raise RequestError(f"{where}.content: expected text, found null")
        elif not isinstance(content, str):
            raise RequestError(f"{where}.content: expected a string or a list of text parts, found {quoted(content)}")
        return checked


def _with_mark(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Messages with a mark after the text of the last one, which must be an assistant's."""
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or not content or last.get("tool_calls"):
        raise RequestError("continue_final_message: the last message must be a text of the assistant")
    if isinstance(content, str):
        content += mark
    else:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    return [*messages[:-1], {**last, "content": content}]


class _Hidden:
    """Replaces text that could form a special token by codes before rendering, and restores it afterwards.

    Hidden are special tokens within a text, a partial one at its start or end that adjacent text might complete, and an
    empty string after a text that is the middle of one. A code uses characters that input cannot guess, that hardly any
    filter changes, and that no special token begins or ends with, so none can overlap a code.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts: list[str] = []
        self._tokenizer = tokenizer
        self._special = tokenizer.special_texts
        taken = self._special.first_chars | self._special.last_chars
        pool = chain(_SYMBOLS, map(chr, range(0x4E00, 0x9FFF)))  # ideographs have no case either
        self._symbols = "".join(islice((symbol for symbol in pool if symbol not in taken), 10))
        if len(self._symbols) < 2:
            raise FormatError(f"{tokenizer.source}: special tokens begin or end with every character")
        per_symbol = math.log2(len(self._symbols))
        self._index_length = math.ceil(_INDEX_BITS / per_symbol)
        self._mark = "".join(secrets.choice(self._symbols) for _ in range(math.ceil(_MARK_BITS / per_symbol)))

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_text(key): self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list) else value

    def _hide_text(self, text: str) -> str:
        spans = [(first, end) for first, end, _ in self._tokenizer.special_spans(text)]
        if start := self._special.partial_at_start(text):
            spans.append((0, start))
        if end := self._special.partial_at_end(text):
            spans.append((len(text) - end, len(text)))
        if not spans and self._special.has_substring(text) and text.strip():
            spans.append((len(text), len(text)))
        if not spans:
            return text
        coded, at = "", 0
        for first, end in _merge_spans(spans):
            coded += text[at:first] + self._code(text[first:end])
            at = end
        return _Coded(coded + text[at:], text)

    def _code(self, text: str) -> str:
        index, code = len(self.texts), ""
        self.texts.append(text)
        for _ in range(self._index_length):
            index, digit = divmod(index, len(self._symbols))
            code = self._symbols[digit] + code
        return self._mark + code

    def parts(self, prompt: str) -> list[str | int]:
        """Split the prompt at its special tokens and restore hidden text."""
        parts: list[str | int] = []
        at = 0
        for first, end, token in self._tokenizer.special_spans(prompt):
            parts += [self._reveal(prompt[at:first]), token]
            at = end
        return [part for part in (*parts, self._reveal(prompt[at:])) if part != ""]

    def _reveal(self, text: str) -> str:
        """A text with its codes replaced. Not by a pattern: each would be a new one, and fill the cache of `re`."""
        first, *rest = text.split(self._mark)
        revealed = [first]
        for after in rest:
            digits = after[: self._index_length]
            is_code = len(digits) == self._index_length and all(digit in self._symbols for digit in digits)
            revealed += [self._text_of(digits), after[self._index_length :]] if is_code else [self._mark, after]
        return "".join(revealed)

    def _text_of(self, digits: str) -> str:
        index = 0
        for digit in digits:
            index = index * len(self._symbols) + self._symbols.index(digit)
        return self.texts[index]


class _Coded(str):
    """A string with codes: prints the codes, but compares, hashes and sorts as the original text."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, coded: str, text: str) -> _Coded:
        self = super().__new__(cls, coded)
        self._text = text
        return self

    def lower(self) -> _Coded:
        """Lower-case both texts; Jinja does this to sort keys."""
        return _Coded(super().lower(), self._text.lower())

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return bool(self._text == _original(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._text != _original(other))

    def __lt__(self, other: str) -> bool:
        return bool(self._text < _original(other))

    def __le__(self, other: str) -> bool:
        return bool(self._text <= _original(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._text > _original(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._text >= _original(other))


def _original(value: Any) -> Any:
    return value._text if isinstance(value, _Coded) else value


def _merge_spans(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sort spans and merge those that touch."""
    spans = sorted(spans)
    first, end = spans[0]
    for next_first, next_end in spans[1:]:
        if next_first > end:
            yield first, end
            first = next_first
        end = max(end, next_end)
    yield first, end


def _text_of_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where}: expected an object, found {quoted(part)}")
    if part.get("type") != "text":
        raise RequestError(
            f"{where}.type: expected 'text', found {quoted(part.get('type'))}",
            hint="rlx runs only the language model of a multimodal model, which takes text",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: expected a string, found {quoted(text)}")
    return text


def _hint(value: Any) -> str | None:
    """What to write instead of an answer of `chat` among messages."""
    is_answer = isinstance(getattr(value, "text", None), str)
    return 'answer.text is the text of an answer: {"role": "assistant", "content": answer.text}' if is_answer else None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy plain data (dicts, lists, strings, numbers, booleans, None); nothing else may reach a template."""
    if depth > _MAX_NESTING:
        raise RequestError(f"{where}: nested more than {_MAX_NESTING} deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise RequestError(f"{where}: expected names that are strings")
        return {key: _plain(inner, f"{where}.{key[:40]}", depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(value)]
    raise RequestError(f"{where}: expected plain data, found {type(value).__name__}", hint=_hint(value))
