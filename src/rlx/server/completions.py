"""`POST /v1/completions`: continues texts or token ids, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from rlx.engine.call_sizes import CHUNK
from rlx.engine.language_model import LanguageModel
from rlx.engine.logprobs import Logprob, Score
from rlx.engine.prefill_slices import SLICE
from rlx.engine.request import Request
from rlx.engine.scoring import ScoredText, score_steps
from rlx.fast_dataclass import dataclass
from rlx.formats.tokenizer import Tokenizer
from rlx.server.api_errors import ApiError
from rlx.server.engine_thread import EngineThread, Served
from rlx.server.exchange import Exchange
from rlx.server.fields import Fields
from rlx.server.generation import Batch, Generation, Row, check_count
from rlx.server.sampling_fields import MAX_LOGPROBS, Common, read_common, system_fingerprint
from rlx.server.state import Reservation, State

MAX_PROMPTS = 128
DEFAULT_TOKENS = 16  # of OpenAI's API
UNSUPPORTED = {"suffix": "rlx does not fill in the middle"}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request."""

    common: Common
    prompts: list[Any]
    echo: bool
    logprobs: int | None

    @classmethod
    def read(cls, fields: Fields, state: State) -> CompletionRequest:
        prompt = fields.get("prompt")
        ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        prompts = [prompt] if isinstance(prompt, str) or ids else prompt
        if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
            raise fields.wrong("prompt", f"a text, token ids, or a list of 1 to {MAX_PROMPTS} of them")
        for one in prompts:
            if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
                raise fields.wrong("prompt", "texts or lists of token ids")
        common = read_common(fields, state.settings)
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        echo = fields.flag("echo")
        fields.refuse(UNSUPPORTED, lambda value: value == "")
        return cls(common, prompts, echo, logprobs)


class _Prepared:
    """A request in tokens."""

    def __init__(self, request: CompletionRequest, served: Served, exchange: Exchange) -> None:
        model = served.language
        common = request.common
        if common.max_tokens is None:
            common = Common(**{**vars(common), "max_tokens": DEFAULT_TOKENS})
        self.prompts = [model.prompt_ids(prompt, "prompt") for prompt in request.prompts]
        for tokens in self.prompts:
            model.check_fits(tokens, common.max_tokens, "prompt")
        self.requests: list[Request] = common.requests(
            self.prompts, exchange, logprobs=0 if request.logprobs is None else max(request.logprobs, 1), answer=False,
            allowed=lambda prompt: common.structured(model, prompt, False),
        )  # fmt: skip


@dataclass(frozen=True)
class _Token:
    """A token of a choice, where its text begins, and its log-probability if it has one."""

    data: bytes
    offset: int
    entry: Logprob | None


class _Choice:
    """The echoed prompt of a choice."""

    def __init__(self, before: str) -> None:
        self.before = before
        self.entries: list[Logprob | None] = []  # of the prompt

    def prompt_tokens(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> list[_Token]:
        """The tokens of the prompt; special ones have no text, and those of one character begin together."""
        stream, offset, result = tokenizer.stream(skip_special=True), 0, list[_Token]()
        for token, entry in zip(prompt, self.entries, strict=True):
            result.append(_Token(tokenizer.token_bytes(token), offset, entry))
            offset += len(stream.push(token))
        return result


def _logprobs(tokens: Sequence[_Token], top: int) -> dict[str, Any]:
    entries = [token.entry for token in tokens]
    return {
        "tokens": [_name(token.data) for token in tokens],
        "token_logprobs": [None if e is None else max(e.logprob, -9999.0) for e in entries],
        "top_logprobs": [None if e is None else _top(e.top[:top]) for e in entries],
        "text_offset": [token.offset for token in tokens],
    }


def _top(entries: Sequence[Logprob]) -> dict[str, float]:
    """Log-probabilities by text. Tokens of equal text are told apart by their bytes' form, or by their ids."""
    result: dict[str, float] = {}
    for e in entries:
        names = (_name(e.bytes), _bytes_name(e.bytes), f"token_id:{e.token}")
        result[next(name for name in names if name not in result)] = max(e.logprob, -9999.0)
    return result


def _name(data: bytes) -> str:
    """A token's text, or its bytes if they are part of a character, in OpenAI's form."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _bytes_name(data)


def _bytes_name(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def completions(exchange: Exchange, state: State) -> None:
    fields = Fields(await exchange.json(state.check_room))
    served = state.find(fields)

    def prepare() -> tuple[CompletionRequest, _Prepared]:
        request = CompletionRequest.read(fields, state)
        state.check_unread(fields, exchange)
        return request, _Prepared(request, served, exchange)

    with state.reserve(served) as reservation, state.running(exchange):
        request, prepared = await asyncio.to_thread(prepare)
        generation = Generation(state.engine, served)
        try:
            answer = _answer(exchange, state, request, prepared, served, generation, reservation)
            await exchange.until_disconnect(answer)
        finally:
            generation.close()


async def _answer(
    exchange: Exchange, state: State, request: CompletionRequest, prepared: _Prepared, served: Served,
    generation: Generation, reservation: Reservation,
) -> None:  # fmt: skip
    model = served.language
    head = {
        "id": f"cmpl-{exchange.id}", "object": "text_completion", "created": int(time.time()), "model": served.name,
        "system_fingerprint": system_fingerprint(model),
    }  # fmt: skip
    count = request.common.count
    befores = [model.tokenizer.decode(tokens, skip_special=True) if request.echo else "" for tokens in prepared.prompts]
    choices = [_Choice(befores[i // count]) for i in range(len(prepared.requests))]

    async def score_and_start() -> None:
        scores = await _prompt_logprobs(exchange, state.engine, served, prepared, request)
        for i, choice in enumerate(choices):
            choice.entries = scores[i // count]
        await start()

    async def start() -> None:
        await generation.start(prepared.requests, streams=request.common.stream)
        reservation.release()

    scored = request.echo and request.logprobs is not None
    if scored:
        check_count(served, len(prepared.requests))
        assert served.scheduler is not None
        served.scheduler.check_room([one.tokens for one in prepared.requests])  # before the work, not after it
        reservation.release()  # nothing is queued until the prompt is scored
    if request.common.stream:
        if not scored:
            await start()
        begin = score_and_start if scored else None  # after the head of the answer, so that comments are sent meanwhile
        await _stream(exchange, head, request, prepared, model, choices, generation, begin)
    else:
        await (score_and_start() if scored else start())
        await generation.finish()
        listed = [
            _described(request, prepared, model, choices[row.index], row, row.sequence.text, True)
            for row in generation.rows
        ]
        usage = generation.usage(len(prepared.prompts))
        await exchange.answer(head | {"choices": listed, "usage": usage, "timings": generation.timings()})
    exchange.record |= {"finish": generation.rows[0].sequence.finish_reason}


def _described(
    request: CompletionRequest, prepared: _Prepared, model: LanguageModel, choice: _Choice, row: Row, text: str,
    first: bool,
) -> dict[str, Any]:  # fmt: skip
    """A choice, or a chunk of it; its first one has the prompt if that is echoed."""
    logprobs = None
    if request.logprobs is not None:
        tokens = [_Token(e.bytes, len(choice.before) + start, e) for start, e in row.take_logprobs()]
        if first and request.echo:
            prompt = prepared.prompts[row.index // request.common.count]
            tokens = choice.prompt_tokens(model.tokenizer, prompt) + tokens
        logprobs = _logprobs(tokens, request.logprobs)
    return {
        "index": row.index, "text": (choice.before if first else "") + text, "logprobs": logprobs,
        "finish_reason": row.sequence.finish_reason if row.finished else None,
        **({"seed": row.sequence.sampler.seed} if row.finished else {}),
    }  # fmt: skip


async def _stream(
    exchange: Exchange, head: dict[str, Any], request: CompletionRequest, prepared: _Prepared, model: LanguageModel,
    choices: Sequence[_Choice], generation: Generation, begin: Callable[[], Awaitable[None]] | None,
) -> None:  # fmt: skip
    """A streamed answer in chunks; `begin` is awaited after the head."""
    begun: set[int] = set()
    usage = {"usage": None} if request.common.include_usage else {}

    def write(batch: Batch) -> None:
        chunks = []
        for row, piece in batch:
            first = row.index not in begun
            begun.add(row.index)
            choice = _described(request, prepared, model, choices[row.index], row, piece, first)
            chunks.append(head | {"choices": [choice]} | usage)
        exchange.send_now(chunks)

    async with exchange.events() as send:
        if begin is not None:
            await begin()
        await generation.follow(write, exchange.connection)
        if request.common.include_usage:
            await send([head | {"choices": [], "usage": generation.usage(len(prepared.prompts))}])


async def _prompt_logprobs(
    exchange: Exchange, engine: EngineThread, served: Served, prepared: _Prepared, request: CompletionRequest
) -> list[list[Logprob | None]]:
    """Log-probabilities of the prompts' tokens; the first of each has none. While others generate, steps are short."""
    scheduler, scores = served.scheduler, [Score([]) for _ in prepared.prompts]

    def max_tokens() -> int:
        return SLICE if scheduler is not None and scheduler.busy else CHUNK

    def steps() -> Iterator[int]:
        for tokens, score in zip(prepared.prompts, scores, strict=True):
            yield from score_steps(
                served.language, [ScoredText(tokens, 1)], [score], request.logprobs or 0,
                namespace=("", exchange.namespace), max_tokens=max_tokens,
            )  # fmt: skip

    deadline = prepared.requests[0].deadline
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            await engine.run(steps(), exchange.client, sum(map(len, prepared.prompts)))
    except TimeoutError as error:
        message = f"the log-probabilities of the prompt took more than {request.common.timeout:g} seconds"
        raise ApiError(408, message, code="timeout") from error
    return [[None, *score.tokens][: len(tokens)] for tokens, score in zip(prepared.prompts, scores, strict=True)]
