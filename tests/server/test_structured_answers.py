"""Structured answers over HTTP at temperature 1: all of them validate, unless they were cut."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .random_schemas import hoisted, random_schema

validator = pytest.importorskip("jsonschema_rs")
pytestmark = pytest.mark.serve
SCHEMAS = [hoisted(random_schema(random.Random(seed))) for seed in range(200)]
ENDS = {"2": 4}  # a random model would go on for long where it may


def ask(http: Any, seed: int, model: str = "tiny", **form: Any) -> dict[str, Any]:
    body = {
        "model": model, "messages": [{"role": "user", "content": "An answer, please."}], "max_tokens": 300,
        "temperature": 1.0, "seed": seed, "logit_bias": ENDS, **form,
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (form, answer.text)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def ask_all(http: Any, forms: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda item: ask(http, item[0], **options, **item[1]), enumerate(forms)))


def test_answers_by_200_schemas_validate(http: Any) -> None:
    forms = [{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}} for s in SCHEMAS]
    choices = ask_all(http, forms)
    ended = [
        (s, c["message"]["content"]) for s, c in zip(SCHEMAS, choices, strict=True) if c["finish_reason"] == "stop"
    ]
    assert len(ended) > 150
    for schema, text in ended:
        assert validator.is_valid(schema, json.loads(text)), (schema, text)


@pytest.mark.parametrize("name", ["date", "uuid", "ipv4", "ipv6", "duration"])
def test_formats_are_followed(http: Any, name: str) -> None:
    schema = {"type": "string", "format": name}
    checked = validator.validator_for(schema, validate_formats=True)
    choices = ask_all(http, [{"json_schema": schema}] * 8)
    texts = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    assert texts and all(checked.is_valid(json.loads(text)) for text in texts), texts


def test_schemas_after_thoughts(http: Any) -> None:
    """A model that may think first; what follows its thoughts fits the schema."""
    forms = [{"json_schema": schema} for schema in SCHEMAS[:40]]
    ended = 0
    for schema, choice in zip(SCHEMAS, ask_all(http, forms, model="thinker"), strict=False):
        if choice["finish_reason"] == "stop":
            ended += 1
            assert validator.is_valid(schema, json.loads(choice["message"]["content"]))
    assert ended > 10


PATTERNS = [
    "[a-f0-9]{4}",
    "(red|green) (apple|pear)s?",
    "\\d{3}-\\d{4}",
    "[^\\n]{1,5}!",
    "a*b",
    "\\w+@\\w+\\.com",
    "(ab){2}",
]
GRAMMARS = {
    'root ::= "yes" | "no"': "yes|no",
    'root ::= num ("+" num){1,2}\nnum ::= [0-9]{1,2}': r"\d{1,2}(\+\d{1,2}){1,2}",
    'start: item ("," item)*\nitem: /[a-z]{1,3}/': r"[a-z]{1,3}(,[a-z]{1,3})*",
    'start: "(" start ")" | "x"': None,
}


def test_patterns_choices_and_grammars(http: Any) -> None:
    forms: list[dict[str, Any]] = [{"regex": pattern} for pattern in PATTERNS * 3]
    forms += [{"choice": ["red", "rot", 'a"\\', "日本", " x\n"]}] * 5
    forms += [{"grammar": grammar} for grammar in list(GRAMMARS) * 4]
    for form, choice in zip(forms, ask_all(http, forms), strict=True):
        text, ((kind, value),) = choice["message"]["content"], form.items()
        if choice["finish_reason"] == "length":
            continue
        pattern = value if kind == "regex" else GRAMMARS.get(value) if kind == "grammar" else None
        if kind == "choice":
            assert text in value
        elif pattern is not None:
            assert re.fullmatch(pattern, text), (pattern, text)
        else:
            assert text.strip("()") == "x" and text.count("(") == text.count(")")
