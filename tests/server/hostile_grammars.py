"""Hostile schemas, patterns and grammars: each is answered or refused, none takes long, and memory stays flat.

`python tests/server/hostile_grammars.py` sends 10,000 mutated and 20,000 unique ones; tests send some.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import stand_ins
from tool_templates import HERMES

import rlx
from rlx.engine.structured import Structure
from rlx.errors import RequestError
from rlx.server.metrics import resident_bytes
from rlx.server.serve import Server, running
from rlx.server.settings import ServerSettings
from server.fuzz_http import ANSWER_S, Errors, mutated
from server.random_schemas import hoisted, random_schema

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
WORDS: tuple[Any, ...] = (
    "type", "properties", "items", "enum", "pattern", "anyOf", "$ref", "required", "minimum", "format", "const",
    "object", "string", "array", "#/x", "(", "a{9999}", -1, 1e308, None, [], {}, True, "\x00", "é" * 50,
)  # fmt: skip
PATTERNS = (
    "(a|aa)+$", "(a*)*b", "((a{0,1000}){0,1000}){0,1000}", "(x+x+)+y", "(a{1,9999}b){1,999}", "[^a]" * 9000,
    "(a|b)*a(a|b){200}", "(.*a){30}", "(.|\\n)*x(.|\\n){0,500}", "(?i)" + "(select|from|where|and)*" * 20,
    "[\\p{L}\\p{N}]{0,1000}@[\\p{L}]{0,1000}", "(a?){500}a{500}", "(" * 200 + "a" + ")*" * 200, "(\\w+\\s?){1,300}",
    "(.{1,100}){1,100}", "((a{1,50}b{1,50}){1,50}c){1,50}", "|".join(f"w{i}.*{i}" for i in range(500)), "a{100000}",
    "(a{1000}){1000}", "((a{100}){100}){100}", "((ab){1000}c){1000}", "(.{1000}){1000}", "(\\p{L}{1,300}\\s){1,300}",
)  # fmt: skip
GRAMMARS = (
    'start: start start | "a" | start start start', 'start: x x x x x x x x\nx: "a" | x x | "" | x x x',
    "start: " + '("a"?) ' * 400, 'start: "a" start "a" | start start | ""', 'start: x{1,5000}\nx: "a" | "aa"',
    "start: " + " | ".join(f"x{i}" for i in range(1500)) + "".join(f'\nx{i}: "a" x{i} | "{i}"' for i in range(1500)),
    "start: " + " | ".join(f"T{i}" for i in range(400)) + "".join(f"\nT{i}: /a*b{{0,50}}c{i}/" for i in range(400)),
)  # fmt: skip


# -- requests ---------------------------------------------------------------------------------------------------------
def noise(rng: random.Random, depth: int = 4) -> Any:
    """JSON of words that schemas have."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(WORDS)
    if rng.random() < 0.5:
        return {str(rng.choice(WORDS)): noise(rng, depth - 1) for _ in range(rng.randrange(4))}
    return [noise(rng, depth - 1) for _ in range(rng.randrange(4))]


def mutated_body(seed: int) -> dict[str, Any]:
    """A request whose schema, tool, pattern or grammar is noise, or a valid one with a few changes."""
    rng = random.Random(seed)
    schema = mutated(rng, hoisted(random_schema(rng))) if rng.random() < 0.6 else noise(rng)
    text = schema if isinstance(schema, str) else json.dumps(schema)
    function = {"name": "f", "parameters": schema}
    forms: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, {"json_schema": schema},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": function | {"strict": True}}], "json_schema": {"const": 1}},
        {"regex": text}, {"grammar": f"start: {text}"}, {"grammar": f"root ::= {text}"},
        {"grammar": f"start: %json {text}"}, {"structured_outputs": {"json": schema}},
    )  # fmt: skip
    return BODY | rng.choice(forms)


def ask_mutated(server: Server, seeds: Iterable[int]) -> Counter[str]:
    """Ask the requests of seeds; raises if one is not answered with 200 or 400, or if the engine has trouble."""
    outcomes: Counter[str] = Counter()
    with httpx.Client(base_url=server.address, timeout=ANSWER_S) as client, Errors() as errors:
        for seed in seeds:
            status = client.post("/v1/chat/completions", json=mutated_body(seed)).status_code
            assert status in (200, 400), f"seed {seed}: status {status}"
            assert not errors.messages, f"seed {seed}: {errors.messages[0]}"
            outcomes[str(status)] += 1
        assert client.get("/ready").status_code == 200
    return outcomes


def ask_unique(server: Server, numbers: Iterable[int]) -> None:
    """Ask for answers by schemas of which no two are equal."""
    with httpx.Client(base_url=server.address, timeout=ANSWER_S) as client:
        for i in numbers:
            schema = {"type": "object", "properties": {f"n{i}": {"type": "string", "maxLength": i % 50 + 1}}}
            assert client.post("/v1/chat/completions", json=BODY | {"json_schema": schema}).status_code == 200


# -- masks ------------------------------------------------------------------------------------------------------------
def slowest_mask(model: rlx.LanguageModel, form: dict[str, str], tokens: int = 24) -> float:
    """The most seconds of this thread that a mask takes in a text of random tokens; 0 if the form is refused."""
    slowest, text, rng = 0.0, list[int](), random.Random(0)
    try:
        structure = Structure.of(form)
        assert structure is not None
        constraint = model.grammars.follow(structure)
        for _ in range(tokens):
            began = time.thread_time()
            try:
                mask = constraint(text)
            finally:
                slowest = max(slowest, time.thread_time() - began)
            bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            ids = [i for i in bits.tolist() if i < model.vocab_size and i not in model.tokenizer.stop_ids]
            if not ids:
                break
            text.append(rng.choice(ids))
    except RequestError:
        pass
    return slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutated", type=int, default=10_000)
    parser.add_argument("--unique", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=100_000, help="seed of the first case")
    parser.add_argument("--model", help="of the masks; a small random one if there is none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlx-grammars-") as name:
        folder = stand_ins.write_chat(Path(name))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": HERMES}))
        # a prefix cache that is full before memory is judged
        with running({"tiny": lambda: rlx.load(folder)}, ServerSettings(port=0), cache_bytes=4 << 20) as server:
            began = time.monotonic()
            outcomes = ask_mutated(server, range(arguments.first, arguments.first + arguments.mutated))
            seconds = time.monotonic() - began
            warm = arguments.unique // 4
            ask_unique(server, range(warm))
            before = resident_bytes()
            ask_unique(server, range(warm, arguments.unique))
            growth = resident_bytes() - before
        with rlx.load(arguments.model or folder) as model:
            assert isinstance(model, rlx.LanguageModel)
            forms = [{"regex": p} for p in PATTERNS] + [{"grammar": g} for g in GRAMMARS]
            slowest = {next(iter(form.values()))[:60]: slowest_mask(model, form) for form in forms}
    result = {
        "command": "python " + " ".join(["tests/server/hostile_grammars.py", *sys.argv[1:]]).partition(" --json")[0],
        "mutated": {"requests": arguments.mutated, "statuses": dict(sorted(outcomes.items())), "errors": 0,
                    "seconds": round(seconds, 1)},
        "unique_schemas": {"requests": arguments.unique, "growth_bytes_after_the_first_quarter": growth},
        "masks": {"patterns": len(PATTERNS), "grammars": len(GRAMMARS),
                  "slowest_ms": {k: round(1e3 * v, 1) for k, v in sorted(slowest.items(), key=lambda p: -p[1])[:5]}},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
