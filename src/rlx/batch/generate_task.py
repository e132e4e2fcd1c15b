"""Texts after prompts, and answers to conversations, also to lines in the form of OpenAI's batch API."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from contextlib import closing
from dataclasses import field, replace
from typing import Any, ClassVar

from rlx.batch.inputs import Shard
from rlx.batch.records import Failure, Record, digest_of_line
from rlx.batch.tasks import Beat, ShardResult, Task, json_line, openai_row, place, prepare
from rlx.engine.language_model import Completion, LanguageModel
from rlx.engine.load_settings import as_int
from rlx.engine.request import Request, Ticket
from rlx.engine.sampler import Sampling, short_repr
from rlx.engine.scheduler import Scheduler
from rlx.engine.sequence import Sequence
from rlx.errors import FormatError, RequestError, nearest
from rlx.fast_dataclass import dataclass

STRUCTURES = ("schema", "regex", "choice", "grammar")
# Members of a request in OpenAI's form: those that mean the same as settings here, and notes that change nothing.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed",
)  # fmt: skip
NOTES = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
AUTO, AUTO_TOKENS = "auto", 256  # of `max_tokens`: so many, or as many as OpenAI's API for lines in its form
OPENAI_TEMPERATURE, OPENAI_TOKENS = 1.0, 16  # where a request says none: of both, and of /v1/completions


@dataclass(frozen=True)
class Generate(Task):
    """Records have a `prompt`, a text or token ids, or `messages`. With `chat`, a prompt is a user's message.

    `sampling` are keywords of `LanguageModel.generate`: temperature, top_p, seed, schema and others. Records in
    OpenAI's form have settings of their own, for which these are the defaults.
    """

    chat: bool = False
    system: str | None = None
    max_tokens: int | str | None = AUTO
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    verb: ClassVar[str] = "generate"
    usual_field: ClassVar[str] = "prompt"
    kind: ClassVar[str] = "decoder"
    shard_records: ClassVar[int] = 64
    shard_bytes: ClassVar[int] = 256 << 10

    @property
    def columns(self) -> tuple[str, ...]:
        return self.main_field, "messages", "id"

    @property
    def _most_tokens(self) -> int | None:
        """Of records that are not in OpenAI's form."""
        return AUTO_TOKENS if isinstance(self.max_tokens, str) else self.max_tokens

    def check(self, model: LanguageModel) -> None:
        if isinstance(self.max_tokens, str) and self.max_tokens != AUTO:
            raise RequestError(f"batch generate: max_tokens is {self.max_tokens!r}, expected a number or {AUTO!r}")
        self._request(model, [0], dict(self.sampling), self._most_tokens, self.stop, False, 0)
        if self.system is not None and not self.chat:
            raise RequestError("batch generate: a system message is for conversations", hint="chat=True, --chat")
        if self.chat:
            model.chat_tokens("", system=self.system)

    def results(self, model: LanguageModel, shard: Shard, records: Listed[Record], beat: Beat) -> ShardResult:
        def read(record: Record) -> tuple[Request, Sequence]:
            request = self._read(model, record, self._seed(f"{shard.source.number} {record.line}"))
            return request, model.new_sequence(request, "prompt")

        read_records, failures = prepare(records, read)
        completions, refused = complete(model, read_records, beat)
        failures += refused
        lines, tokens = list[bytes](), 0
        for record, request, completion in completions:
            usage = completion.usage
            tokens += usage.total_tokens
            if record.url is None:
                members: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
                members |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
                lines.append(json_line(place(shard, record) | members))
            else:
                lines.append(json_line(openai_row(shard, record, _body(model, shard, record, request, completion))))
        return ShardResult(b"".join(lines), len(lines), tokens, failures)

    def complete_texts(self, model: LanguageModel, texts: Listed[str]) -> list[Completion]:
        """The completions of prompts, or of messages. Each is sampled by a seed that its text decides."""
        requests = []
        for i, text in enumerate(texts):
            record = Record(i + 1, {self.main_field: text})
            request = self._read(model, record, self._seed(text))
            requests.append((record, (request, model.new_sequence(request, f"prompt {i}"))))
        completed, failures = complete(model, requests)
        if failures:
            raise RequestError(f"generate: {failures[0].message}")
        return [completion for _, _, completion in completed]

    # -- requests --
    def _read(self, model: LanguageModel, record: Record, own_seed: int) -> Request:
        if record.url is not None:
            return self._read_openai(model, record, own_seed)
        messages = record.members.get("messages")
        if messages is not None and self.main_field not in record.members:
            tokens, answer = _conversation(model, messages, self.system), True
        elif self.chat:
            tokens, answer = model.chat_tokens(record.text(self.main_field), system=self.system), True
        else:
            tokens, answer = _prompt(model, record, self.main_field), False
        return self._request(model, tokens, dict(self.sampling), self._most_tokens, self.stop, answer, own_seed)

    def _seed(self, place: str) -> int:
        """A seed per record, which depends on its place and the seed of the job, not on its neighbours."""
        text = f"{self.sampling.get('seed', 0)} {place}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "little")

    def _request(
        self, model: LanguageModel, tokens: list[int], settings: dict[str, Any], max_tokens: int | None,
        stop: tuple[str, ...], answer: bool, seed: int,
    ) -> Request:  # fmt: skip
        structured = {name: settings.pop(name) for name in STRUCTURES if name in settings}
        sampling = replace(Sampling.of(settings), seed=seed)
        if any(value is not None for value in structured.values()):
            from rlx.engine.structured import Structure

            structure = Structure.of(structured)
            if structure is not None:
                sampling = replace(sampling, allowed=model.grammars.follow(structure, tokens, answer))
        return Request(tokens, max_tokens, stop, 0, sampling, answer)

    def _read_openai(self, model: LanguageModel, record: Record, seed: int) -> Request:
        body, url = record.members, record.url
        if url not in URLS:
            raise RequestError(f"url: expected {' or '.join(URLS)}, found {short_repr(url)}")
        limits = ("max_tokens", "max_completion_tokens")
        known = {*SAMPLING, *NOTES, *limits, "stop", "logit_bias", "n", "stream", "response_format", URLS[url]}
        for name in body:
            if name not in known and body[name] is not None:
                raise RequestError(f"body: {name[:80]!r} is not supported in batch jobs", hint=nearest(name, known))
        if body.get("n") not in (None, 1) or body.get("stream") not in (None, False):
            raise RequestError("body: expected one choice (n) and no stream")
        settings = {"temperature": OPENAI_TEMPERATURE} | dict(self.sampling)
        settings |= {name: body[name] for name in SAMPLING if body.get(name) is not None}
        if not settings.get("temperature"):
            settings = {name: v for name, v in settings.items() if name not in ("top_p", "top_k", "min_p")}
        bias = body.get("logit_bias")
        if bias is not None:
            settings["logit_bias"] = _biases(bias)
        settings |= _structure(body.get("response_format"))
        if body.get("seed") is not None:
            own = as_int(settings.pop("seed"))
            if own is None:
                raise RequestError(f"seed: expected a whole number, found {short_repr(body['seed'])}")
            seed = own % 2**64
        usual = OPENAI_TOKENS if url == "/v1/completions" else None
        default = usual if isinstance(self.max_tokens, str) else self.max_tokens
        counts = [as_int(body[name]) for name in limits if body.get(name) is not None]
        if None in counts or any(count < 0 for count in counts if count is not None) or len(set(counts)) > 1:
            raise RequestError(f"max_tokens: expected one whole number from 0, found {counts}")
        if url == "/v1/chat/completions":
            messages = body.get("messages")
            tokens = _conversation(model, messages, None if _has_system(messages) else self.system)
        elif self.chat:
            raise RequestError("url: /v1/completions continues a text, the job answers conversations (--chat)")
        else:
            tokens = _prompt(model, record, "prompt")
        stops = self.stop if body.get("stop") is None else _stops(body["stop"])
        answer = url == "/v1/chat/completions"
        return self._request(model, tokens, settings, counts[0] if counts else default, stops, answer, seed)


def _conversation(model: LanguageModel, messages: Any, system: str | None) -> list[int]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RequestError(f"messages: expected a list of objects, found {short_repr(messages)}")
    return model.chat_tokens(messages, system=system)


def _has_system(messages: Any) -> bool:
    roles = ("system", "developer")
    return isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") in roles for m in messages)


def _prompt(model: LanguageModel, record: Record, name: str) -> list[int]:
    value = record.members.get(name)
    return model.prompt_ids(value if isinstance(value, list) else record.text(name), "prompt")


def _stops(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop: expected texts that are not empty, found {short_repr(value)}")
    return tuple(texts)


def _biases(value: Any) -> dict[int, float]:
    try:
        return {int(token): -math.inf if bias == -100 else float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"logit_bias: expected numbers by token id, found {short_repr(value)}") from error


def _structure(form: Any) -> dict[str, Any]:
    """The structure that a `response_format` asks for, as settings."""
    match form:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"schema": schema}
    raise RequestError(f"response_format: expected text, json_object or json_schema, found {short_repr(form)}")


# -- completions -----------------------------------------------------------------------------------------------------
Completed = tuple[Record, Request, Completion]


def complete(
    model: LanguageModel, requests: Iterable[tuple[Record, tuple[Request, Sequence]]], beat: Beat = lambda: None
) -> tuple[list[Completed], list[Failure]]:
    """The completions of requests, in their order, and the failures of those that cannot be finished."""
    listed = [(record, request, sequence) for record, (request, sequence) in requests]
    tickets = dict[int, Ticket]()
    with closing(Scheduler(model, max_queued=max(len(listed), 1), stall=math.inf)) as scheduler:
        # longest first: prompts of similar length are prefilled together
        for i in sorted(range(len(listed)), key=lambda i: -len(listed[i][1].tokens)):
            tickets[i] = scheduler.add(listed[i][2])
        while scheduler.step():
            beat()
    completed, failures = list[Completed](), list[Failure]()
    for i, (record, request, sequence) in enumerate(listed):
        error = tickets[i].exception
        if error is None:
            completed.append((record, request, model.completion_of(sequence)))
        elif isinstance(error, (RequestError, FormatError)):
            failures.append(record.failure(error))
        else:
            raise error
    return completed, failures


def _body(
    model: LanguageModel, shard: Shard, record: Record, request: Request, completion: Completion
) -> dict[str, Any]:
    """The answer of OpenAI's API. `created` is 0: results do not depend on when they were computed."""
    usage = completion.usage
    counts = {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }  # fmt: skip
    is_chat = record.url == "/v1/chat/completions"
    digest = digest_of_line(shard.source, record.line, record.id)
    choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason, "logprobs": None}
    if is_chat:
        choice["message"] = _message(model, request, completion)
    else:
        choice["text"] = completion.text
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}", "created": 0, "choices": [choice], "usage": counts,
        "object": "chat.completion" if is_chat else "text_completion",
        "model": record.members.get("model") or model.name,
        "system_fingerprint": model.fingerprint(0).rpartition(", seed")[0],
    }  # fmt: skip


def _message(model: LanguageModel, request: Request, completion: Completion) -> dict[str, Any]:
    """The answer, with thoughts apart."""
    from rlx.engine.tool_loop import answer_parser

    parser = answer_parser(model, request.tokens)
    events = parser.push(completion.text) + parser.end()
    text, thought = ("".join(e.text for e in events if e.kind == kind) for kind in ("text", "thought"))
    return {"role": "assistant", "content": text, "refusal": None} | (
        {"reasoning_content": thought.strip()} if thought else {}
    )
