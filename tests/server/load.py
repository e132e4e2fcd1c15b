"""Random requests over HTTP under load, compared with the same requests alone in this process.

`python tests/server/load.py --requests 2000` runs many; tests run some.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

import stand_ins
from limits import LONGEST_S

import rlx
from rlx.engine.logprobs import Logprob
from rlx.server.serve import running
from rlx.server.settings import ServerSettings

FORMS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"regex": "[a-z]{1,9}( [a-z]{1,9}){0,3}"}, {"choice": ["red", "green", "blue"]},
    {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2, None]}},
                "required": ["a", "b"], "additionalProperties": False}},
    {"schema": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}},
    {"grammar": 'start: "x" start | "."'},
)  # fmt: skip


class Case:
    """A request, and the keywords of the same request in Python."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        beginnings = [f"Beginning {i}. " * rng.choice((2, 12, 20)) for i in range(3)]
        text = rng.choice(("", *beginnings)) + "".join(rng.choice("abc de.\n") for _ in range(rng.randrange(1, 120)))
        self.messages = [{"role": "user", "content": text}]
        if rng.random() < 0.3:
            self.messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        self.settings: dict[str, Any] = {
            "max_tokens": rng.choice((1, 5, 20, 60)), "seed": rng.randrange(1 << 32),
            "temperature": rng.choice((0.0, 0.7, 1.0, 1.5)), "top_p": rng.choice((1.0, 0.9)),
            "top_k": rng.choice((0, 20)), "frequency_penalty": rng.choice((0.0, 0.5)),
        }  # fmt: skip
        self.stop = rng.choice(([], [], ["e"], ["a", "\n\n"]))
        self.form = rng.choice(FORMS)
        self.top = rng.choice((None, None, 0, 3))
        self.count = rng.choice((1, 1, 1, 2, 3))
        self.stream, self.leaves = rng.random() < 0.5, rng.random() < 0.1

    @property
    def body(self) -> dict[str, Any]:
        body = {"model": "tiny", "messages": self.messages, **self.settings, "n": self.count, "stream": self.stream}
        body |= {"stop": self.stop} if self.stop else {}
        body |= {} if self.top is None else {"logprobs": True, "top_logprobs": self.top}
        names = {"schema": "json_schema"}
        return body | {names.get(name, name): value for name, value in self.form.items()}

    def alone(self, model: rlx.LanguageModel, i: int) -> rlx.Completion:
        """Choice i of the same request, alone."""
        settings = self.settings | {"seed": self.settings["seed"] + i}
        logprobs = 0 if self.top is None else self.top + 1
        return model.chat(self.messages, stop=self.stop, logprobs=logprobs, **settings, **self.form)


class Answer:
    """What came back of one choice."""

    def __init__(self) -> None:
        self.text, self.finish, self.entries = "", None, list[Any]()

    def difference(self, wanted: rlx.Completion, entries: list[Any], cut: bool) -> str | None:
        """What differs from a request alone and its log-probabilities; a stream that was cut has the beginning."""
        if cut:
            same = wanted.text.startswith(self.text) and self.entries == entries[: len(self.entries)]
        else:
            same = (self.text, self.finish) == (wanted.text, wanted.finish_reason) and self.entries == entries
        if same:
            return None
        actual, alone = (self.text, self.finish, self.entries), (wanted.text, wanted.finish_reason, entries)
        return f"{actual}, alone {alone}, cut: {cut}"


def text_entries(model: rlx.LanguageModel, wanted: rlx.Completion, top: int | None) -> list[Any]:
    """The log-probabilities of a completion in the form of the API: of tokens in its text, and of no others."""
    tokenizer = model.tokenizer
    hidden = (tokenizer.special_ids - model.marker_ids) | frozenset(tokenizer.stop_ids)
    stream = tokenizer.stream(skip_special=True, keep=model.marker_ids)
    decoded, positions = "", list[int]()
    for token in wanted.tokens:
        positions.append(len(decoded))
        decoded += stream.push(token) if token not in hidden else ""
    at_stop = len(decoded) > len(wanted.text)
    listed = zip(positions, wanted.logprobs or (), strict=True) if top is not None else ()
    return [
        entry(e) | {"top_logprobs": [entry(t) for t in e.top[:top]]}
        for start, e in listed
        if e.token not in hidden and not (at_stop and start >= len(wanted.text))
    ]


def entry(e: Logprob) -> dict[str, Any]:
    return {"token": e.bytes.decode("utf-8", "replace"), "logprob": max(e.logprob, -9999.0), "bytes": list(e.bytes)}


async def ask(client: Any, case: Case) -> tuple[list[Answer], bool]:
    """The choices, and whether the client left before their end."""
    answers = [Answer() for _ in range(case.count)]
    pieces = case.rng.randrange(1, 12)
    if not case.stream:
        request = client.post("/v1/chat/completions", json=case.body)
        if case.leaves:
            try:
                await asyncio.wait_for(request, case.rng.random() * 0.05)
            except TimeoutError:
                return answers, True
        response = await request if not case.leaves else await client.post("/v1/chat/completions", json=case.body)
        assert response.status_code == 200, response.text
        for answer, choice in zip(answers, response.json()["choices"], strict=True):
            answer.text, answer.finish = choice["message"]["content"], choice["finish_reason"]
            answer.entries = (choice["logprobs"] or {"content": []})["content"]
        return answers, False
    async with client.stream("POST", "/v1/chat/completions", json=case.body) as response:
        assert response.status_code == 200, (case.body, await response.aread())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            pieces -= 1
            if case.leaves and pieces < 0:
                return answers, True
            for choice in json.loads(line[6:])["choices"]:
                answer = answers[choice["index"]]
                answer.text += choice["delta"].get("content") or ""
                answer.finish = choice["finish_reason"] or answer.finish
                answer.entries += (choice["logprobs"] or {"content": []})["content"]
    return answers, False


async def under_load(address: str, cases: list[Case], concurrency: int) -> list[tuple[list[Answer], bool]]:
    limit = asyncio.Semaphore(concurrency)

    async def one(client: Any, case: Case) -> tuple[list[Answer], bool]:
        async with limit:
            return await ask(client, case)

    async with httpx.AsyncClient(base_url=address, timeout=LONGEST_S) as client:
        return list(await asyncio.gather(*(one(client, case) for case in cases)))


def compare(folder: Path, first: int, count: int) -> Counter[str]:
    """Run cases in groups of random concurrency, on servers of random sizes; raises on the first difference."""
    events: Counter[str] = Counter()
    with rlx.load(folder) as model:
        assert isinstance(model, rlx.LanguageModel)
        for start in range(first, first + count, 100):
            rng = random.Random(start)
            cases = [Case(seed) for seed in range(start, min(start + 100, first + count))]
            pages = rng.choice((10, 24, 200))  # few pages: running requests are preempted
            options = {
                "rows": rng.choice((1, 4, 8, 16)),
                "cache_bytes": max(pages * model.caches.bytes_for(1), 1 << 16),
            }
            with running({"tiny": lambda: rlx.load(folder)}, ServerSettings(port=0), **options) as server:
                results = asyncio.run(under_load(server.address, cases, rng.choice((1, 8, 32))))
                scheduler = server.state.engine.served["tiny"].scheduler
                assert scheduler is not None
                statistics = scheduler.statistics()
                events["preempted"] += statistics.preemptions_total
                events["cached"] += statistics.prompt_tokens_cached_total
                events["cancelled"] += sum(statistics.cancelled_total.values())
            for case, (answers, cut) in zip(cases, results, strict=True):
                events["requests"] += 1
                events["structured"] += bool(case.form)
                for i, answer in enumerate(answers):
                    events["choices"] += 1
                    alone = case.alone(model, i)
                    events["log-probabilities"] += len(answer.entries)
                    difference = answer.difference(alone, text_entries(model, alone, case.top), cut)
                    assert difference is None, f"{case.body}: {difference}"
    return events


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--first", type=int, default=10_000, help="seed of the first request")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlx-load-") as folder:
        events = compare(stand_ins.write_chat(Path(folder)), arguments.first, arguments.requests)
    print(dict(events))
    if arguments.json is not None:
        command = f"python tests/server/load.py --requests {arguments.requests} --first {arguments.first}"
        arguments.json.write_text(json.dumps({"command": command, "differences": 0, **events}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
