"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlx.engine.answer_parser import AnswerParser, Event
from rlx.engine.logprobs import Logprob
from rlx.engine.request import Request
from rlx.engine.sampler import Allowed
from rlx.engine.structured import KINDS
from rlx.engine.tool_loop import answer_parser, call_constraint, for_template, new_id
from rlx.engine.tools import Tool, choose_tools, tools_of
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass
from rlx.server.api_errors import invalid, naming
from rlx.server.engine_thread import Served
from rlx.server.exchange import Exchange
from rlx.server.fields import Fields
from rlx.server.generation import Batch, Generation, Row
from rlx.server.sampling_fields import MAX_LOGPROBS, Common, read_common, system_fingerprint
from rlx.server.state import Reservation, State

TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "date_string")  # that requests may set
MESSAGE = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal",
    "annotations",
)  # fmt: skip  # members of messages that templates know
FUNCTION = ("name", "description", "parameters", "strict")  # members of a tool's function
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
UNSUPPORTED = {
    "audio": "rlx writes text", "modalities": "rlx writes text", "prediction": "there are no predicted outputs",
    "web_search_options": "rlx fetches nothing", "functions": "use tools", "function_call": "use tool_choice",
    "chat_template": "the template is the model's own",
}  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    """A checked request."""

    common: Common
    messages: list[Any]
    tools: list[Tool]  # that the model sees
    choice: Any
    parallel: bool
    logprobs: int  # 0: none; else the likeliest tokens per place, plus one
    variables: dict[str, Any]  # of the template

    @classmethod
    def read(cls, fields: Fields, state: State) -> ChatRequest:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise fields.wrong("messages", "a list of messages")
        fields.objects("messages", MESSAGE)
        common = read_common(fields, state.settings)
        wanted = fields.flag("logprobs")
        top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
        if top and not wanted:
            raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
        tools = tools_of(fields.get("tools") or [])
        for tool in fields.objects("tools", ("type",)) if tools else ():
            inner = tool.inner("function")
            if inner is not None:
                inner.ignore(*FUNCTION)
            else:
                tool.ignore(*FUNCTION)
        choice = fields.get("tool_choice")
        _, mode = choose_tools(tools, choice)
        parallel = fields.flag("parallel_tool_calls", True)
        variables = _template_variables(fields)
        roles = [message.get("role") for message in messages[-2:] if isinstance(message, dict)]
        if variables["continue_final_message"] and roles == ["assistant", "assistant"]:
            raise invalid("continue_final_message: the last two messages are answers; join them", "messages")
        fields.refuse(UNSUPPORTED, lambda value: value in (["text"], [], "none", {}))
        if common.structure is not None and mode == "required":
            reason = f"tool_choice requires a call, and the {common.structure.kind} excludes one"
            raise invalid(f"response_format and tool_choice: {reason}", "response_format")
        logprobs = (top or 0) + 1 if wanted else 0
        return cls(
            common, [_message(m, i) for i, m in enumerate(messages)], tools, choice, parallel, logprobs, variables
        )


def _message(message: Any, i: int) -> Any:
    """A message whose null members are left out, as templates test for absence."""
    if not isinstance(message, dict):
        return message  # the template's checks name it
    kept_null = message.get("content") is None and message.get("tool_calls")
    copy = {name: value for name, value in message.items() if value is not None}
    if kept_null:
        copy["content"] = ""
    return copy


def _template_variables(fields: Fields) -> dict[str, Any]:
    """Variables of the template: a fixed list of names, so that no request replaces what the server passes."""
    variables: dict[str, Any] = {}
    inner = fields.inner("chat_template_kwargs")
    if inner is not None:
        for name in TEMPLATE_VARIABLES:
            value = inner.get(name)
            if value is not None:
                if not isinstance(value, (bool, str)) or len(str(value)) > 32:
                    raise inner.wrong(name, "true, false or a short text")
                variables[name] = value
        for name in inner.unread():
            known = ", ".join(TEMPLATE_VARIABLES)
            raise invalid(f"{name[:80]}: known are {known}", "chat_template_kwargs")
    continued = fields.flag("continue_final_message")
    prompted = fields.flag("add_generation_prompt", not continued)
    if continued and prompted:
        raise invalid("continue_final_message: excludes add_generation_prompt", "continue_final_message")
    variables |= {"continue_final_message": continued, "add_generation_prompt": prompted}
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is not None:
        variables |= {"reasoning_effort": effort}
        variables.setdefault("enable_thinking", effort not in ("none", "minimal"))
    return variables


class _Prepared:
    """A request in tokens, with the parser of each answer."""

    def __init__(self, request: ChatRequest, served: Served, exchange: Exchange) -> None:
        model = served.language
        callable_tools, self.mode = choose_tools(request.tools, request.choice)
        uses_calls = bool(request.tools) or any(isinstance(m, dict) and m.get("tool_calls") for m in request.messages)
        known = model.tool_format if uses_calls else None
        descriptions = [tool.described() for tool in request.tools] if request.tools and self.mode != "none" else None
        messages = for_template(request.messages, known) if known is not None else request.messages
        tokens = model.chat_tokens(messages, tools=descriptions, **request.variables)
        model.check_fits(tokens, request.common.max_tokens, "messages")
        self.known = known
        self._tools = request.tools if self.mode != "none" else []
        self._model, self.tokens = model, tokens

        def allowed(prompt: Sequence[int]) -> Allowed | None:
            form = request.common.structure
            with _naming_tools(callable_tools), naming(request.common.structure_field, KINDS):
                return call_constraint(model, callable_tools, self.mode, prompt, parallel=request.parallel, form=form)

        self.requests: list[Request] = request.common.requests(
            [tokens], exchange, logprobs=request.logprobs, answer=True, allowed=allowed
        )

    def parser(self) -> AnswerParser:
        return answer_parser(self._model, self.tokens, self._tools)


@contextmanager
def _naming_tools(tools: Sequence[Tool]) -> Iterator[None]:
    """Errors about the schema of a tool name it in `param`, also where the message begins with a part of it."""
    try:
        yield
    except RequestError as error:
        place = next((tool.where for tool in tools if str(error).startswith(tool.where)), None)
        if place is None:
            raise
        raise invalid(str(error) + (f" (hint: {error.hint})" if error.hint else ""), place) from error


class _Choice:
    """What a choice has produced: its message, and deltas of it."""

    def __init__(self, prepared: _Prepared) -> None:
        self._parser, self._prepared = prepared.parser(), prepared
        self.text, self.thought = "", ""
        self.calls: list[dict[str, Any]] = []

    def deltas(self, piece: str, final: bool) -> list[dict[str, Any]]:
        events = self._parser.push(piece) + (self._parser.end() if final else [])
        return [self._delta(event) for event in _joined(events)]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event.kind:
            case "thought":
                self.thought += event.text
                return {"reasoning_content": event.text}
            case "text":
                self.text += event.text
                return {"content": event.text}
            case "name":
                function = {"name": event.text, "arguments": ""}
                assert self._prepared.known is not None
                call = {"id": new_id(self._prepared.known), "type": "function", "function": function}
                self.calls.append(call)
                return {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": dict(function)}]}
        self.calls[-1]["function"]["arguments"] += event.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": event.text}}]}

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thought:
            message["reasoning_content"] = self.thought.strip()
        if self.calls:
            message |= {"tool_calls": self.calls, "content": self.text or None}
        return message

    def finish_reason(self, row: Row) -> str:
        reason = row.sequence.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


def _joined(events: Sequence[Event]) -> list[Event]:
    """Events with neighbours of one kind as one; each call begins a new one."""
    result: list[Event] = []
    for event in events:
        if result and event.kind == result[-1].kind != "name":
            result[-1] = Event(event.kind, result[-1].text + event.text)
        else:
            result.append(event)
    return result


async def input_tokens(exchange: Exchange, state: State) -> None:
    """How many tokens the prompt of a request has."""
    fields = Fields(await exchange.json())
    served = state.find(fields)

    def count() -> int:
        request = ChatRequest.read(fields, state)
        state.check_unread(fields, exchange)
        return len(_Prepared(request, served, exchange).tokens)

    await exchange.answer({"object": "response.input_tokens", "input_tokens": await asyncio.to_thread(count)})


async def chat_completions(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json(state.check_room))
    served = state.find(fields)

    def prepare() -> tuple[ChatRequest, _Prepared]:
        request = ChatRequest.read(fields, state)
        state.check_unread(fields, exchange)
        return request, _Prepared(request, served, exchange)

    with state.reserve(served) as reservation, state.running(exchange):
        request, prepared = await asyncio.to_thread(prepare)  # templates and grammars take time
        generation = Generation(state.engine, served)
        try:
            await exchange.until_disconnect(_answer(exchange, request, prepared, served, generation, reservation))
        finally:
            generation.close()


async def _answer(
    exchange: Exchange, request: ChatRequest, prepared: _Prepared, served: Served, generation: Generation,
    reservation: Reservation,
) -> None:  # fmt: skip
    await generation.start(prepared.requests, streams=request.common.stream)
    reservation.release()
    head = {
        "id": f"chatcmpl-{exchange.id}", "object": "chat.completion", "created": int(time.time()),
        "model": served.name, "system_fingerprint": system_fingerprint(served.language),
    }  # fmt: skip
    choices = [_Choice(prepared) for _ in prepared.requests]
    if request.common.stream:
        await _stream(exchange, head, request, choices, generation)
        exchange.record |= {"finish": choices[0].finish_reason(generation.rows[0]), **_tokens(generation)}
        return
    await generation.finish()
    listed = []
    for row, choice in zip(generation.rows, choices, strict=True):
        choice.deltas(row.sequence.text, True)
        entries = row.take_logprobs() if request.logprobs else None
        listed.append(
            {"index": row.index, "message": choice.message(), "logprobs": _logprobs(entries, request.logprobs - 1),
             "finish_reason": choice.finish_reason(row), "seed": row.sequence.sampler.seed}
        )  # fmt: skip
    exchange.record |= {"finish": listed[0]["finish_reason"], **_tokens(generation)}
    await exchange.answer(
        head | {"choices": listed, "usage": generation.usage(), "service_tier": None, "timings": generation.timings()}
    )


async def _stream(
    exchange: Exchange, head: dict[str, Any], request: ChatRequest, choices: Sequence[_Choice], generation: Generation
) -> None:
    """A streamed answer in chunks, in OpenAI's order: the role, deltas, the reason of the end, usage."""
    head = head | {"object": "chat.completion.chunk"}
    usage = {"usage": None} if request.common.include_usage else {}

    def chunk(index: int, delta: dict[str, Any], entries: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": finish}
        return head | {"choices": [choice]} | usage

    def write(batch: Batch) -> None:
        chunks = []
        for row, piece in batch:
            choice = choices[row.index]
            deltas = choice.deltas(piece, row.finished)
            if request.logprobs and (deltas or row.finished):
                entries = _logprobs(row.take_logprobs(), request.logprobs - 1)
                deltas = deltas or [{"content": ""}]
                chunks += [chunk(row.index, delta, entries if i == 0 else None) for i, delta in enumerate(deltas)]
            else:
                chunks += [chunk(row.index, delta) for delta in deltas]
            if row.finished:
                last = chunk(row.index, {}, None, choice.finish_reason(row))
                last["choices"][0]["seed"] = row.sequence.sampler.seed
                if all(r.finished for r in generation.rows) and not request.common.include_usage:
                    last["timings"] = generation.timings()
                chunks.append(last)
        if chunks:
            exchange.send_now(chunks)

    async with exchange.events() as send:
        await send([chunk(i, {"role": "assistant", "content": None}) for i in range(len(choices))])
        await generation.follow(write, exchange.connection)
        if request.common.include_usage:
            await send([head | {"choices": [], "usage": generation.usage(), "timings": generation.timings()}])


def _logprobs(entries: Sequence[tuple[int, Logprob]] | None, top: int) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = [_entry(e) | {"top_logprobs": [_entry(t) for t in e.top[:top]]} for _, e in entries]
    return {"content": content, "refusal": None}


def _entry(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": max(entry.logprob, -9999.0), "bytes": list(entry.bytes)}


def _tokens(generation: Generation) -> dict[str, int]:
    usage = generation.usage()
    return {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"]}
