"""Random requests by OpenAI's own API description: no answer is a server error, and all answers fit the description.

    python scripts/openapi_cases.py SPEC [--cases 10000] [--json FILE]

SPEC is openai-openapi.yaml, as OpenAI publishes it. It is cut to the paths that rlx serves, with the edits below; then
schemathesis (pip install schemathesis pyyaml jsonschema-rs) sends cases to a server of small random models. Events of
streams are checked by `openapi_checks.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import stand_ins
from tool_templates import HERMES

import rlx
from rlx.server.serve import Server, running
from rlx.server.settings import ServerSettings

PATHS = {
    "/chat/completions": ("post",), "/completions": ("post",), "/embeddings": ("post",), "/models": ("get",),
    "/models/{model}": ("get",),
}  # fmt: skip
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,streamed_events_conformance"
CONTEXT = 96  # tokens: most requests set no limit


def cut(spec: dict[str, Any], supported: bool) -> dict[str, Any]:
    """The description of our paths, and of what they refer to; with `supported`, without what rlx refuses by name."""
    paths = {path: {method: spec["paths"][path][method] for method in methods} for path, methods in PATHS.items()}
    schemas = spec["components"]["schemas"]
    edit(paths, schemas)
    if supported:
        leave_out(schemas)
    used: dict[str, Any] = {}
    pending = [paths, {"$ref": "#/components/schemas/CreateChatCompletionStreamResponse"}]
    while pending:
        text = json.dumps(pending.pop())
        for name, schema in schemas.items():
            if name not in used and f'"#/components/schemas/{name}"' in text:
                used[name] = schema
                pending.append(schema)
    return {"openapi": spec["openapi"], "info": spec["info"], "paths": paths, "components": {"schemas": used}}


def edit(paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    """What the description leaves out or has for OpenAI's own models only."""
    for name, model in (("CreateCompletionRequest", "tiny"), ("CreateEmbeddingRequest", "encoder")):
        schemas[name]["properties"]["model"] = {"type": "string", "enum": [model]}
    schemas["CreateChatCompletionRequest"]["allOf"][1]["properties"]["model"] = {"type": "string", "enum": ["tiny"]}
    (name,) = paths["/models/{model}"]["get"]["parameters"]
    name["schema"] = {"type": "string", "enum": ["tiny", "encoder"]}
    # with encoding_format base64 OpenAI answers with a string
    schemas["Embedding"]["properties"]["embedding"] = {
        "anyOf": [schemas["Embedding"]["properties"]["embedding"], {"type": "string"}]
    }
    # chunks of streamed completions have null until the last one; `openapi_checks` has the forms of events
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"]["nullable"] = True
    # with echo, nothing comes before the first token: OpenAI itself has null there
    (logprobs,) = (form for form in choice["logprobs"].get("anyOf", [choice["logprobs"]]) if "properties" in form)
    for name in ("token_logprobs", "top_logprobs"):
        logprobs["properties"][name]["items"]["nullable"] = True
    for path in ("/chat/completions", "/completions"):
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {}
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"] = {"200": operation["responses"]["200"], "default": {
                "description": "an error", "content": {"application/json": {"schema": {
                    "$ref": "#/components/schemas/ErrorResponse"}}}}}  # fmt: skip


def leave_out(schemas: dict[str, Any]) -> None:
    """Most requests with audio, images or tools of OpenAI's own would be refused before anything else is looked at."""
    chat = schemas["CreateChatCompletionRequest"]["allOf"][1]["properties"]
    for name in ("audio", "modalities", "web_search_options", "prediction", "functions", "function_call", "moderation"):
        del chat[name]
    chat["n"]["maximum"] = 8
    chat["tools"]["items"] = {"$ref": "#/components/schemas/ChatCompletionTool"}
    chat["tool_choice"] = {"enum": ["none", "auto"]}
    chat["logit_bias"] |= {"propertyNames": {"pattern": "^[0-9]{1,2}$"}, "additionalProperties": {
        "type": "integer", "minimum": -100, "maximum": 100}}  # fmt: skip
    chat["stop"] = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 8}, "maxItems": 4}
    schemas["FunctionObject"]["properties"]["name"]["pattern"] = "^[a-z]{1,8}$"
    for role in ("User", "Assistant"):
        schemas[f"ChatCompletionRequest{role}MessageContentPart"] = {
            "$ref": "#/components/schemas/ChatCompletionRequestMessageContentPartText"
        }
    messages = schemas["ChatCompletionRequestMessage"]
    messages["oneOf"] = [one for one in messages["oneOf"] if "Function" not in one["$ref"]]
    completion = schemas["CreateCompletionRequest"]["properties"]
    for name in ("suffix", "best_of", "logit_bias"):
        del completion[name]
    completion["n"]["maximum"] = 8
    completion["stop"] = chat["stop"]
    texts = {"type": "string", "minLength": 1, "maxLength": 40}
    tokens = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 200}}
    completion["prompt"] = {"oneOf": [texts, {"type": "array", "minItems": 1, "items": texts}, tokens]}


def statuses(server: Server) -> dict[str, int]:
    """Answers by endpoint and status."""
    result: dict[str, int] = {}
    for line in server.state.metrics.requests.lines():
        labels, _, value = line.rpartition(" ")
        words = dict(part.split("=") for part in labels[labels.index("{") + 1 : -1].replace('"', "").split(","))
        key = f"{words['endpoint']} {words['status']}"
        result[key] = result.get(key, 0) + int(value)
    return dict(sorted(result.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlx-openapi-") as name:
        folder = Path(name)
        tiny, encoder = stand_ins.write_chat(folder / "tiny"), stand_ins.write_encoder(folder / "encoder")
        settings = tiny / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": HERMES}))
        spec = folder / "spec.json"
        loaders = {"tiny": lambda: rlx.load(tiny, context=CONTEXT), "encoder": lambda: rlx.load(encoder)}
        with running(loaders, ServerSettings(port=0, matryoshka=True)) as server:
            code = 0
            for supported in (False, True):
                description = yaml.load(arguments.spec.read_text(), Loader=yaml.CSafeLoader)
                spec.write_text(json.dumps(cut(description, supported)))
                command = [
                    str(Path(sys.executable).parent / "schemathesis"), "run", str(spec), "--url",
                    f"{server.address}/v1", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing",
                    "--max-examples", str(max(arguments.cases // (3 if supported else 100), 1)),
                    "--seed", str(arguments.seed),
                    "--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off",
                ]  # fmt: skip
                hooks = {"SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("openapi_checks.py"))}
                environment = os.environ | hooks | {"RLX_OPENAPI": str(spec)}
                code |= subprocess.run(command, cwd=folder, env=environment).returncode
            answers = statuses(server)
    total = sum(answers.values())
    failures = sum(count for name, count in answers.items() if name.split()[1] >= "500")
    print(f"{total} answers, {failures} of them server errors; schemathesis ended with {code}")
    for key, count in answers.items():
        print(f"  {key}: {count}")
    if arguments.json is not None:
        result = {
            "command": f"python scripts/openapi_cases.py SPEC --cases {arguments.cases} --seed {arguments.seed}",
            "checks": CHECKS.split(","), "cases": total, "server_errors": failures, "violations": code, "answers":
            answers,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return code or int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
