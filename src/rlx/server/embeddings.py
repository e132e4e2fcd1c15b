"""`POST /v1/embeddings`: vectors of texts or token ids. Requests that wait together are computed in one call."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.embedding_model import MIN_NORM, EmbeddingModel
from rlx.server.api_errors import ApiError, invalid
from rlx.server.engine_thread import EmbeddingJob, Served
from rlx.server.exchange import Disconnected, Exchange
from rlx.server.fields import Fields
from rlx.server.state import State

MAX_INPUTS = 2048
SHORT = 2048  # characters that are tokenized in less time than it takes to ask a thread for it


def _inputs(fields: Fields) -> tuple[list[str], list[list[int]]]:
    """Texts, or rows of token ids."""
    value = fields.get("input")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        value = [value]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_INPUTS:
        raise fields.wrong("input", f"a text, token ids, or a list of 1 to {MAX_INPUTS} of them")
    if all(isinstance(text, str) and text for text in listed):
        return listed, []
    if all(isinstance(row, list) and row and all(type(token) is int for token in row) for row in listed):
        return [], listed
    raise fields.wrong("input", "texts that are not empty, or lists of token ids")


async def embeddings(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json())
    served = state.find(fields)
    model = served.embedding
    texts, rows = _inputs(fields)
    form = fields.choice("encoding_format", ("float", "base64")) or "float"
    size = _dimensions(fields, model, state)
    truncate = fields.flag("truncate")
    timeout = min(state.settings.timeout, fields.number("timeout", 0.001, 86400) or math.inf)
    fields.ignore("user")
    state.check_unread(fields, exchange)
    if texts and sum(map(len, texts)) <= SHORT:
        rows = model.text_rows(texts, truncate=truncate)
    elif texts:
        rows = await asyncio.to_thread(model.text_rows, texts, truncate=truncate)
    else:
        rows = [model.checked_row(row, i) for i, row in enumerate(rows)]
    with state.running(exchange):
        vectors = await _vectors(exchange, state, served, rows, timeout)
    if size < model.dim:
        vectors = vectors[:, :size]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), MIN_NORM)
    state.metrics.embedding_texts.add(len(rows))
    count = sum(map(len, rows))
    exchange.record |= {"prompt_tokens": count, "texts": len(rows)}
    data = [{"object": "embedding", "index": i, "embedding": _encoded(v, form)} for i, v in enumerate(vectors)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    await exchange.answer({"object": "list", "data": data, "model": served.name, "usage": usage})


async def _vectors(exchange: Exchange, state: State, served: Served, rows: list[list[int]], timeout: float) -> Array:
    """The vectors of rows; raises ApiError if they take too long, Disconnected if the client leaves."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Array] = loop.create_future()

    def done(result: Array | BaseException) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    late = ApiError(408, f"the embeddings took more than {timeout:g} seconds", code="timeout")
    timer = loop.call_later(timeout, done, late)
    job = EmbeddingJob(rows, done, exchange.client)
    try:
        state.engine.embed(served, job)
        with exchange.watching(lambda: done(Disconnected())):
            return await future
    finally:
        timer.cancel()
        job.cancelled = True  # if it still waits


def _dimensions(fields: Fields, model: EmbeddingModel, state: State) -> int:
    size = fields.integer("dimensions", 1, 1 << 20)
    if size is None or size == model.dim:
        return model.dim
    if size > model.dim or not state.settings.matryoshka:
        reason = "the model is not known to be trained for fewer (--matryoshka says that it is)"
        raise invalid(f"dimensions: {size}, vectors have {model.dim}; {reason}", "dimensions", "unsupported")
    return size


def _encoded(vector: Array, form: str) -> Any:
    """A list of numbers, or the base64 text of little-endian floats, which the openai client asks for."""
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return vector.astype(np.float32).tolist()
