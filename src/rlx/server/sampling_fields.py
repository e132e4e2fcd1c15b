"""Fields that chat and completions share: sampling, limits, stop strings, structured output."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlx.engine.language_model import LanguageModel
from rlx.engine.request import Request
from rlx.engine.sampler import Allowed, Sampling
from rlx.engine.structured import KINDS, Structure
from rlx.fast_dataclass import dataclass
from rlx.server.api_errors import invalid, naming
from rlx.server.exchange import Exchange
from rlx.server.fields import Fields
from rlx.server.settings import ServerSettings

MAX_STOPS = 16
MAX_STOP = 256  # characters of a stop string
MAX_BIASES = 1024
MAX_LOGPROBS = 20
LONGEST = 1 << 31
# notes of the user, which change nothing here
NOTES = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip


@dataclass(frozen=True)
class Common:
    """The settings that all generating requests have."""

    count: int  # choices per prompt
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling
    structure: Structure | None
    structure_field: str | None  # that it comes from
    stream: bool
    include_usage: bool
    timeout: float

    def requests(
        self, prompts: Sequence[Sequence[int]], exchange: Exchange, *, logprobs: int, answer: bool,
        allowed: Callable[[Sequence[int]], Allowed | None],
    ) -> list[Request]:  # fmt: skip
        """A request per prompt and choice. Choice i has the seed plus i, so choice 0 is that of n = 1."""
        deadline = time.monotonic() + self.timeout
        # One that is drawn here is small: JavaScript's numbers are exact up to 2^53.
        seed = secrets.randbelow(2**32) if self.sampling.seed is None else self.sampling.seed
        result = []
        for prompt in prompts:
            for i in range(self.count):
                sampling = replace(self.sampling, seed=(seed + i) % 2**64, allowed=allowed(prompt))
                result.append(
                    Request(
                        prompt, self.max_tokens, self.stop, logprobs, sampling, answer=answer, client=exchange.client,
                        namespace=exchange.namespace, deadline=deadline,
                    )
                )  # fmt: skip
        return result

    def structured(self, model: LanguageModel, prompt: Sequence[int], answer: bool) -> Allowed | None:
        if self.structure is None:
            return None
        with naming(self.structure_field, KINDS):
            return model.grammars.follow(self.structure, prompt, answer)


def read_common(fields: Fields, settings: ServerSettings) -> Common:
    count = fields.integer("n", 1, settings.max_choices)
    if fields.integer("best_of", 1, settings.max_choices) not in (None, count or 1):
        raise invalid("best_of: rlx returns all choices that it makes", "best_of", "unsupported")
    longest = fields.integer("max_tokens", 0, LONGEST)
    newer = fields.integer("max_completion_tokens", 0, LONGEST)
    if longest is not None and newer is not None and longest != newer:
        raise invalid("max_tokens and max_completion_tokens differ", "max_tokens")
    options = fields.inner("stream_options")
    include_usage = False if options is None else options.flag("include_usage")
    if options is not None:
        options.ignore("include_obfuscation")
    timeout = fields.number("timeout", 0.001, 86400)
    fields.ignore(*NOTES)
    fields.expect("cache_prompt", True)
    fields.expect("verbosity", "medium")
    return Common(
        count or 1, longest if newer is None else newer,
        tuple(fields.strings("stop", count=MAX_STOPS, limit=MAX_STOP)), _sampling(fields, settings),
        *_structure(fields), fields.flag("stream"), include_usage,
        min(settings.timeout, timeout or math.inf),
    )  # fmt: skip


def _sampling(fields: Fields, settings: ServerSettings) -> Sampling:
    temperature = fields.number("temperature", 0, 100)
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    values: dict[str, Any] = {
        "temperature": settings.temperature if temperature is None else temperature,
        "top_p": fields.number("top_p", 0, 1), "min_p": fields.number("min_p", 0, 1),
        "top_k": fields.integer("top_k", -1, 2**31 - 1),
        "frequency_penalty": fields.number("frequency_penalty", -100, 100),
        "presence_penalty": fields.number("presence_penalty", -100, 100),
        "repetition_penalty": fields.number("repetition_penalty", 1e-3, 1e3),
        "seed": None if seed is None else seed % 2**64, "logit_bias": _biases(fields),
    }  # fmt: skip
    older = fields.number("repeat_penalty", 1e-3, 1e3)  # llama.cpp's name
    values["repetition_penalty"] = values["repetition_penalty"] or older
    values["top_k"] = max(values["top_k"] or 0, 0)
    values["top_p"] = values["top_p"] if values["top_p"] != 0 else 1e-9
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def _biases(fields: Fields) -> dict[int, float]:
    """Biases by token: an object whose names are ids, or a list of pairs."""
    value = fields.get("logit_bias")
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"an object with at most {MAX_BIASES} members")
    result: dict[int, float] = {}
    for pair in pairs:
        match pair:
            case (token, bias) | [token, bias]:
                text = str(token)
                if not (text.isascii() and text.isdigit() and len(text) <= 9) or isinstance(token, bool):
                    raise fields.wrong("logit_bias", "token ids as names")
                if bias is False:
                    bias = -math.inf  # llama.cpp's way to ban a token
                elif isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                    raise fields.wrong("logit_bias", "numbers from -100 to 100")
                result[int(text)] = -math.inf if bias == -100 else float(bias)
            case _:
                raise fields.wrong("logit_bias", "an object from token ids to numbers")
    return result


def _structure(fields: Fields) -> tuple[Structure | None, str | None]:
    """Structured output: OpenAI's response_format, vLLM's structured_outputs, llama.cpp's json_schema and grammar.

    Also the name of the field that asks for it.
    """
    wanted: dict[str, Any] = {}
    source: str | None = None
    form = fields.inner("response_format")
    if form is not None:
        source = "response_format"
        match form.choice("type", ("text", "json_object", "json_schema")):
            case "json_object":
                wanted["schema"] = form.get("schema") or {"type": "object"}
            case "json_schema":
                named = form.inner("json_schema")
                if named is None:
                    raise form.wrong("json_schema", "an object with a schema")
                named.ignore("name", "description", "strict")
                schema = named.get("schema")
                if schema is None:
                    raise named.wrong("schema", "a JSON schema")
                wanted["schema"] = schema
            case None:
                raise form.wrong("type", "text, json_object or json_schema")
    other = fields.inner("structured_outputs")
    if other is not None:
        source = "structured_outputs"
        wanted |= {
            "schema": other.get("json") if other.get("json") is not None else wanted.get("schema"),
            "regex": other.get("regex"), "choice": other.get("choice"), "grammar": other.get("grammar"),
        }  # fmt: skip
        for name in other.unread():
            raise invalid(f"{name}: known are json, regex, choice, grammar", "structured_outputs")
    for name, kind in (("json_schema", "schema"), ("grammar", "grammar"), ("regex", "regex"), ("choice", "choice")):
        value = fields.get(name)
        if value is not None:
            if wanted.get(kind) is not None:
                raise invalid(f"{name}: the form of the answer is given twice", name)
            wanted[kind], source = value, name
    with naming(source, (*KINDS, "structured output")):
        return Structure.of(wanted), source


def system_fingerprint(model: LanguageModel) -> str:
    """What an answer depends on besides the request: version, machine, weights."""
    return model.fingerprint(0).rpartition(", seed")[0]
