"""Conversations: messages are checked, brought into the form that chat templates take, rendered and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.engine.logs import warn
from rlx.engine.sampler import short_repr
from rlx.errors import FormatError, RequestError, RlxError
from rlx.formats.tokenizer import CHARS_PER_ID

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel
    from rlx.formats.chat import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
MAX_CHARS = 256  # of messages per token of the context: templates drop some text, but not that much
SHORT = 64  # characters: a text that is not too long for any template


def as_conversation(messages: str | Messages, system: str | None) -> Messages:
    """A text as a user's message; with a system message before the others."""
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if isinstance(messages, (list, tuple)) and any(isinstance(m, (list, tuple)) for m in messages):
        raise RequestError(
            f"chat: found a list of {len(messages)} lists, expected one conversation, a list of messages",
            hint="several conversations: generate([model.chat_tokens(a), model.chat_tokens(b)])",
        )
    if isinstance(messages, Mapping):
        hint = 'a conversation is a list of messages: [{"role": "user", "content": "Hello"}]'
        raise RequestError("chat: found one message, expected a list of messages", hint=hint)
    if is_conversation(conversation):
        conversation = [_with_plain_calls(message) for message in conversation]
    if system is None:
        return conversation
    if not isinstance(system, str):
        raise RequestError(f"chat: system is {short_repr(system)}, expected a text")
    if is_conversation(conversation) and conversation[0].get("role") == "system":
        raise RequestError("chat: the messages begin with a system message, and system= is another")
    return [{"role": "system", "content": system}, *conversation]


def _with_plain_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls are in OpenAI's form, where they were `ToolCall` objects of an answer."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)):
        return message
    from rlx.engine.tools import ToolCall

    if not any(isinstance(call, ToolCall) for call in calls):
        return message
    plain = [call.message() if isinstance(call, ToolCall) else call for call in calls]
    return {"content": "", **message, "tool_calls": plain}


def warn_of_answer(messages: Any, where: str) -> None:
    """Log a warning if the last message of a conversation is an answer already."""
    if is_conversation(messages) and messages[-1].get("role") == "assistant":
        warn(
            "rlx.generate",
            "%s: the last message is the assistant's: it stays, and the model writes another; append a user's message",
            where,
        )


def encode_conversation(
    model: LanguageModel, template: ChatTemplate, messages: Messages, tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[int]:  # fmt: skip
    """Token ids of a conversation, rendered by the model's chat template."""
    size = _characters(messages) + _characters(tools or ())
    if size > MAX_CHARS * model.context:
        raise model.too_long("chat", f"{size:,} characters have")
    try:
        if size > CHARS_PER_ID * model.context:
            prompt = template.render(messages, tools=tools, **variables)
            if len(model.tokenizer.clip_text(prompt, model.context, parse_special=True)) < len(prompt):
                raise model.too_long("chat", f"the conversation of {size:,} characters has")
        return template.encode(model.tokenizer, messages, tools=tools, **variables)
    except FormatError as error:
        if size > SHORT and _renders(template, _shorten(messages)):
            raise RequestError(
                f"chat: {size:,} characters are more than the model's chat template takes: {error}",
                hint="shorten the conversation",
            ) from error
        if not _renders(template, [{"role": "user", "content": "x"}]):
            raise  # the template's fault
        raise RequestError(f"messages: the model's chat template does not take them: {error}") from error


def _renders(template: ChatTemplate, messages: Messages) -> bool:
    """Whether a chat template renders a conversation without error."""
    try:
        template.render(messages)
    except RlxError:
        return False
    return True


def _characters(value: Any, depth: int = 32) -> int:
    """Number of characters in messages."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(_characters(v, depth - 1) for v in inner) if depth else 0


def _shorten(value: Any) -> Any:
    """Messages with their texts truncated to SHORT characters."""
    if isinstance(value, str):
        return value[:SHORT]
    if isinstance(value, Mapping):
        return {key: _shorten(inner) for key, inner in value.items()}
    return [_shorten(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
