"""Answers with tools: the model calls functions, gets their results, and answers."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx.engine.answer_parser import AnswerParser, Event
from rlx.engine.conversation import Messages
from rlx.engine.sampler import short_repr
from rlx.engine.thinking import is_thinking, tail_of
from rlx.engine.tools import ROUNDS, Tool, ToolCall, ToolFormat, call_rules, choose_tools, tools_of
from rlx.errors import RequestError

if TYPE_CHECKING:
    from rlx.engine.language_model import Completion, LanguageModel
    from rlx.engine.structured import Constraint, Structure

_ID_SYMBOLS = string.ascii_letters + string.digits


def new_id(known: ToolFormat) -> str:
    """The id of a call: as long as the template wants it, if it says so."""
    if known.id_length:
        return "".join(secrets.choice(_ID_SYMBOLS) for _ in range(known.id_length))
    return f"call_{secrets.token_hex(12)}"


def for_template(messages: Messages, known: ToolFormat | None) -> list[Mapping[str, Any]]:
    """Messages whose tool calls are checked, with arguments in the form that the template wants."""
    result: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]: expected an object, found {type(message).__name__}")
        calls = message.get("tool_calls")
        copy = dict(message)
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            places = [f"messages[{i}].tool_calls[{j}]" for j in range(len(calls))]
            for call, place in zip(calls, places, strict=True):
                _check_call(call, place)
            if known is not None and not known.as_text:
                copy["tool_calls"] = [_with_object(call, place) for call, place in zip(calls, places, strict=True)]
        result.append(copy)
    return result


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: expected an object")
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name: expected a text, found {short_repr(function.get('name'))}")


def _with_object(call: Any, where: str) -> Any:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments: expected JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def call_constraint(
    model: LanguageModel, tools: Sequence[Tool], mode: str, tokens: Sequence[int], *, parallel: bool = True,
    form: Structure | None = None,
) -> Constraint | None:  # fmt: skip
    """The grammar of an answer: calls if they are required, valid calls in a text if there are strict tools.

    With a `form`, an answer calls tools or follows it. Arguments of tools that are not strict may be any object unless
    a call is required. Errors begin with the place of the schema at fault.
    """
    if mode == "none" or not tools:
        return None if form is None else model.grammars.follow(form, tokens, answer=True)
    if mode == "required" and form is not None:
        raise RequestError(
            f"tool_choice: a required call and {form.kind} exclude each other", hint='tool_choice="auto" allows both'
        )
    strict = any(tool.strict for tool in tools)
    if mode == "auto" and form is None and (not model.tool_format.trigger or (not strict and parallel)):
        return None
    if mode == "auto" and not model.tool_format.trigger:
        raise RequestError(
            "tools: the model writes calls without a marker, so tools and a form exclude each other",
            hint='tool_choice="none", or leave one out',
        )
    if mode == "auto":
        tools = [tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in tools]
    text = mode == "auto" and form is None
    rules = call_rules(model.tool_format, tools, model.grammars, parallel=parallel, text=text, form=form)
    try:
        return model.grammars.constraint(rules, "tools", tokens, True, None if form is None else form.nested)
    except RequestError:
        for tool in tools:
            model.grammars.check(call_rules(model.tool_format, [tool], model.grammars), tool.where)
        if form is not None:
            model.grammars.follow(form, tokens, answer=True)
        raise


def answer_parser(model: LanguageModel, tokens: Sequence[int], tools: Sequence[Tool] = ()) -> AnswerParser:
    """The parser of an answer to a rendered conversation."""
    thinks = is_thinking(model.tokenizer.decode(tail_of(tokens)), model.thinking)
    thinking = None if thinks is False else model.thinking
    return AnswerParser(
        thinking=thinking, thinks=bool(thinks), calls=model.tool_format if tools else None, tools=tools
    )  # fmt: skip


def calls_of(events: Sequence[Event], known: ToolFormat) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its calls."""
    text, calls = "", list[ToolCall]()
    for event in events:
        if event.kind == "text":
            text += event.text
        elif event.kind == "name":
            calls.append(ToolCall(event.text, "", new_id(known)))
        elif event.kind == "arguments":
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.text)
    return text, calls


def answer_with_tools(
    model: LanguageModel, messages: Messages, tools: Sequence[Any], choice: Any,
    answer: Callable[[list[int], Constraint | None], Completion], form: Structure | None = None,
) -> Completion:  # fmt: skip
    """Answer a conversation; functions among the tools are called, at most `ROUNDS` times in a row.

    `answer` generates under a constraint; the text without calls follows `form`.
    """
    listed = [replace(tool, strict=True) if tool.function else tool for tool in tools_of(tools)]
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):  # the name of a function
        choice = {"type": "function", "name": choice}
    callable_tools, mode = choose_tools(listed, choice)
    known = model.tool_format
    conversation, history = list(messages), list[ToolCall]()
    descriptions = [tool.described() for tool in listed]
    for number in range(ROUNDS + 1):
        mode = "none" if number == ROUNDS else mode
        tokens = model.chat_tokens(for_template(conversation, known), tools=descriptions)
        completion = answer(tokens, call_constraint(model, callable_tools, mode, tokens, form=form))
        parser = answer_parser(model, tokens, listed if mode != "none" else ())
        text, calls = calls_of(parser.push(completion.text) + parser.end(), known)
        functions = {tool.name: tool.function for tool in listed if tool.function is not None}
        unfinished = completion.finish_reason == "length"  # the last call may be cut
        if not calls or unfinished or any(call.name not in functions for call in calls):
            return replace(completion, text=text, tool_calls=(*history, *calls))
        calls = [replace(call, result=_result(functions[call.name], call)) for call in calls]
        history += calls
        conversation.append({"role": "assistant", "content": text, "tool_calls": [call.message() for call in calls]})
        conversation += [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": c.result} for c in calls]
        mode = "auto" if mode == "required" else mode
    raise AssertionError  # the last round has no calls


def _result(function: Callable[..., Any], call: ToolCall) -> str:
    """What a function returns, as text for the model. Its own errors are the caller's; wrong arguments the model's."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return json.dumps({"error": "the arguments are not a JSON object"})
    value = function(**arguments)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
