"""A check for schemathesis: every event of a streamed answer has the form that OpenAI's description gives it.

schemathesis takes the schema of an event stream for that of `{"event": ..., "data": ...}`, as OpenAPI 3.2 does;
OpenAI's is that of the data. `openapi_cases.py` has schemathesis load this file, and names the description in
RLX_OPENAPI.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import schemathesis

EVENTS = {"/chat/completions": "CreateChatCompletionStreamResponse", "/completions": "CreateCompletionResponse"}


@schemathesis.check
def streamed_events_conformance(ctx: Any, response: Any, case: Any) -> None:
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    for line in response.content.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        name = "ErrorResponse" if "error" in event else EVENTS[case.operation.path]
        if (
            event.get("usage") is None
        ):  # as the description of `include_usage` says, and the schema of completions does not
            event.pop("usage", None)
        errors = [f"{error.instance_path}: {error.message}" for error in _validator(name).iter_errors(event)]
        assert not errors, f"{name}: {errors[0]}"


@cache
def _validator(name: str) -> Any:
    components = json.loads(Path(os.environ["RLX_OPENAPI"]).read_text())["components"]
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": _with_null(components)})


def _with_null(value: Any) -> Any:
    """Schemas of OpenAPI 3.0, which say `nullable`, in words of JSON schema."""
    if isinstance(value, list):
        return [_with_null(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _with_null(item) for key, item in value.items() if key != "nullable" or item is not True}
    return {"anyOf": [schema, {"type": "null"}]} if value.get("nullable") is True else schema
