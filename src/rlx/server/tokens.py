"""`POST /tokenize`, `/detokenize` and `/apply-template`: what a prompt becomes, for people who build prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from rlx.engine.tool_loop import for_template
from rlx.server.api_errors import invalid
from rlx.server.chat_completions import ChatRequest
from rlx.server.exchange import Exchange
from rlx.server.fields import Fields
from rlx.server.state import State

MAX_TEXT = 1 << 22  # characters


async def tokenize(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json())
    served = state.find(fields)
    names = [name for name in ("content", "prompt", "text") if fields.get(name) is not None]
    if len(names) != 1:
        raise invalid("content: expected a text to tokenise", "content")
    text = fields.text(names[0], limit=MAX_TEXT)
    add_special = fields.flag("add_special", names[0] == "prompt" and fields.flag("add_special_tokens", True))
    parse_special = fields.flag("parse_special", False)
    pieces = fields.flag("with_pieces", False)
    state.check_unread(fields, exchange)
    tokenizer = served.model.tokenizer
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special=add_special, parse_special=parse_special)
    tokens: list[Any] = ids
    if pieces:
        tokens = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids]
    await exchange.answer({"tokens": tokens, "count": len(ids), "max_model_len": served.model.context})


def _piece(data: bytes) -> str | list[int]:
    """The text of a token, or its bytes if they are part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json())
    served = state.find(fields)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    state.check_unread(fields, exchange)
    text = await asyncio.to_thread(served.model.tokenizer.decode, tokens)
    await exchange.answer({"content": text, "prompt": text})


async def apply_template(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json())
    served = state.find(fields)
    request = ChatRequest.read(fields, state)
    state.check_unread(fields, exchange)
    model = served.language
    if model.template is None:
        raise invalid(f"model: {served.name} has no chat template", "model")
    tools = [tool.described() for tool in request.tools] or None
    messages = for_template(request.messages, model.tool_format) if tools else request.messages

    def render() -> str:
        assert model.template is not None
        model.chat_tokens(messages, tools=tools, **request.variables)  # checks them
        return model.template.render(messages, tools=tools, **request.variables)

    prompt = await asyncio.to_thread(render)
    await exchange.answer({"prompt": prompt})
