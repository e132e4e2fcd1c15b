"""The endpoints through OpenAI's own client, which validates every answer against its types."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import numpy as np
import pytest

import rlx
from rlx.server.serve import Server

pytestmark = pytest.mark.serve
MESSAGES: Any = [{"role": "user", "content": "Say something."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light", "description": "Switch a light.",
        "parameters": {
            "type": "object", "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
            "required": ["on", "room"], "additionalProperties": False,
        },
    },
}  # fmt: skip
OTHER: Any = {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}}


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 12, **options})


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "thinker", "encoder", "gpt-4o"]
    assert client.models.retrieve("tiny").object == "model"


def test_an_answer_is_the_one_in_process(client: Any, model: rlx.LanguageModel) -> None:
    answer = chat(client, temperature=0.8, seed=11)
    expected = model.chat(MESSAGES, max_tokens=12, temperature=0.8, seed=11)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        expected.text,
        expected.finish_reason,
    )
    assert answer.usage.completion_tokens == len(expected.tokens) and answer.choices[0].seed == 11
    assert answer.system_fingerprint in expected.fingerprint


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    expected = chat(client, seed=3)
    chunks = list(chat(client, seed=3, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == expected.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.choices[0].finish_reason


def test_several_choices_begin_with_the_single_one(client: Any) -> None:
    one, three = chat(client, seed=5), chat(client, seed=5, n=3)
    assert three.choices[0].message.content == one.choices[0].message.content
    assert [c.seed for c in three.choices] == [5, 6, 7]
    assert [c.index for c in three.choices] == [0, 1, 2]
    again = chat(client, seed=6)
    assert again.choices[0].message.content == three.choices[1].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_spell_the_text(client: Any, model: rlx.LanguageModel, stream: bool) -> None:
    options = {"seed": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 20}
    if stream:
        chunks = list(chat(client, stream=True, **options))
        parts = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
        content = [entry for part in parts for entry in part.content]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        choice = chat(client, **options).choices[0]
        content, text = choice.logprobs.content, choice.message.content
    assert bytes(b for entry in content for b in entry.bytes).decode("utf-8", "replace") == text
    expected = model.chat(MESSAGES, max_tokens=20, temperature=1.0, seed=2, logprobs=4).logprobs
    assert expected is not None
    assert [entry.logprob for entry in content] == [e.logprob for e in expected][: len(content)]
    assert [len(entry.top_logprobs) for entry in content] == [3] * len(content)


def test_stop_strings_end_the_text(client: Any) -> None:
    whole_text = chat(client, seed=9, max_tokens=40).choices[0].message.content
    stop = whole_text[5:7]
    choice = chat(client, seed=9, max_tokens=40, stop=[stop, "never this"], logprobs=True).choices[0]
    assert choice.message.content == whole_text[: whole_text.index(stop)] and choice.finish_reason == "stop"


def test_biases_and_penalties_reach_the_sampler(client: Any, model: rlx.LanguageModel) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    answer = chat(
        client, seed=4, logit_bias={"100": 5, "101": -100}, extra_body={"top_k": 40, "min_p": 0.01}, **settings
    )
    expected = model.chat(
        MESSAGES, max_tokens=12, seed=4, logit_bias={100: 5.0, 101: -np.inf}, top_k=40, min_p=0.01, **settings
    )
    assert answer.choices[0].message.content == expected.text


def test_a_schema_is_followed(client: Any) -> None:
    pydantic, validator = pytest.importorskip("pydantic"), pytest.importorskip("jsonschema_rs")

    class Light(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        on: bool
        room: Literal["hall", "attic"]

    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Light, max_tokens=100, seed=1, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Light)
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 3}
    form: Any = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema, "strict": True}}
    for seed in range(5):
        text = chat(client, response_format=form, max_tokens=60, seed=seed).choices[0].message.content
        assert validator.is_valid(schema, json.loads(text))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'root ::= "x" | "yy"'}, {"x", "yy"}),
        ({"grammar": 'start: "x" | "yy"'}, {"x", "yy"}),
        ({"json_schema": {"const": 7}}, {"7"}),
    ],
)
def test_other_forms_of_structure(client: Any, body: dict[str, Any], expected: set[str]) -> None:
    assert chat(client, extra_body=body, max_tokens=30).choices[0].message.content in expected


def test_a_required_call_has_valid_arguments(client: Any) -> None:
    validator = pytest.importorskip("jsonschema_rs")
    for seed in range(4):
        choice = chat(
            client, tools=[OTHER, TOOL], tool_choice={"type": "function", "function": {"name": "set_light"}},
            parallel_tool_calls=False, max_tokens=200, seed=seed,
        ).choices[0]  # fmt: skip
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "set_light"
        assert validator.is_valid(TOOL["function"]["parameters"], json.loads(call.function.arguments))


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"strict": True}])
def test_an_answer_beside_tools_calls_one_or_follows_the_form(
    client: Any, model: rlx.LanguageModel, more: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": TOOL["function"] | {"strict": "strict" in more}}
    options: dict[str, Any] = {name: value for name, value in more.items() if name != "strict"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    for begin, calls in (("<", True), ('"', False)):
        (token,) = model.tokenizer.encode(begin)
        options |= {"tools": [tool], "response_format": form, "logit_bias": {str(token): 60}, "max_tokens": 300}
        for seed in range(3):
            choice = chat(client, seed=seed, **options).choices[0]
            if calls:
                assert choice.message.tool_calls and not choice.message.content
                assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)
            else:
                assert json.loads(choice.message.content) in ("yes", "no") and not choice.message.tool_calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_light"}}])
def test_a_required_call_excludes_a_form(http: Any, choice: Any) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "regex": "[a-z]+"}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "response_format" in message and "tool_choice" in message and "regex" in message


def test_a_form_beside_tools_in_python(model: rlx.LanguageModel) -> None:
    def ring(n: int) -> str:
        """Ring."""
        return "rung"

    with pytest.raises(rlx.errors.RequestError, match="a required call and choice exclude each other"):
        model.chat("hi", tools=[ring], tool_choice="required", choice=["red"])
    with pytest.raises(rlx.errors.RequestError, match="allowed and tools exclude each other"):
        model.chat("hi", tools=[ring], allowed=lambda tokens: [5])
    (quote,) = model.tokenizer.encode("r")
    answer = model.chat("hi", tools=[ring], choice=["red"], logit_bias={quote: 60})
    assert answer.text == "red" and not answer.tool_calls
    assert model.chat("hi", tools=[ring], tool_choice="none", choice=["red"]).text == "red"


def test_streamed_calls_fold_to_the_same(client: Any) -> None:
    options: Any = {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 200,
        "seed": 6,
        "parallel_tool_calls": False,
    }
    (expected,) = chat(client, **options).choices[0].message.tool_calls
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chat(client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name
                calls[delta.index] = {"name": delta.function.name, "arguments": ""}
            else:
                assert delta.id is None and delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert calls == {0: {"name": expected.function.name, "arguments": expected.function.arguments}}


def test_a_conversation_with_results_of_calls(client: Any, http: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "ring", "arguments": '{"n": 1}'}}
    messages: Any = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]  # fmt: skip
    assert chat(client, messages=messages, tools=[OTHER]).choices[0].finish_reason in ("length", "stop", "tool_calls")
    prompt = http.post("/apply-template", json={"model": "tiny", "messages": messages, "tools": [OTHER]}).json()[
        "prompt"
    ]
    assert '<tool_call>\n{"name": "ring", "arguments": {"n": 1}}\n</tool_call>' in prompt
    assert chat(client, tools=[OTHER], tool_choice="none").choices[0].message.tool_calls is None


def test_thoughts_are_apart(client: Any, server: Server) -> None:
    thinker = server.state.engine.served["thinker"].language
    (mark,) = thinker.token_ids("<")
    form: Any = {"structured_outputs": {"choice": ["yes"]}}
    forced = chat(client, model="thinker", extra_body=form, logit_bias={str(mark): 100}).choices[0]
    assert forced.message.content == "" and forced.message.reasoning_content == "<" * (12 - len("<think>"))
    assert forced.finish_reason == "length"
    banned = chat(client, model="thinker", extra_body=form, logit_bias={str(mark): -100}).choices[0]
    assert banned.message.content == "yes" and not hasattr(banned.message, "reasoning_content")


def test_a_grammar_begins_after_thoughts(server: Server) -> None:
    thinker = server.state.engine.served["thinker"].language
    constraint = thinker.grammars.follow(rlx_structure({"choice": ["yes"]}), thinker.chat_tokens(MESSAGES), True)
    tokens = thinker.tokenizer.encode("<think>\nno, or yes?</think>\n\nyes", add_special=False)
    for i, token in enumerate(tokens):
        assert constraint(tokens[:i])[token // 32] >> (token % 32) & 1
    (wrong,) = thinker.token_ids("n")
    assert not constraint(tokens)[wrong // 32] >> (wrong % 32) & 1


def rlx_structure(settings: dict[str, Any]) -> Any:
    from rlx.engine.structured import Structure

    return Structure.of(settings)


def test_completions(client: Any, model: rlx.LanguageModel) -> None:
    create = client.completions.create
    prompt = "Once upon"
    expected = model.generate(prompt, max_tokens=16, temperature=1.0, seed=1)
    answer = create(model="tiny", prompt=prompt, seed=1)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (expected.text, len(model.token_ids(prompt)))
    assert create(model="tiny", prompt=model.token_ids(prompt), seed=1).choices[0].text == expected.text
    several = create(model="tiny", prompt=[prompt, "x"], seed=1, n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3] and several.choices[0].text == expected.text
    assert create(model="tiny", prompt=prompt, seed=1, echo=True).choices[0].text == prompt + expected.text
    # OpenAI's types forbid the null of a text that goes on, which OpenAI itself sends.
    openai = pytest.importorskip("openai")
    plain_client = openai.OpenAI(base_url=client.base_url, api_key="none")
    chunks = list(plain_client.completions.create(model="tiny", prompt=prompt, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


@pytest.mark.parametrize("stream", [True, False])
def test_offsets_point_into_the_text(http: Any, model: rlx.LanguageModel, stream: bool) -> None:
    """Special tokens have no text, and the tokens of one character begin together."""
    tokenizer = model.tokenizer
    special = sorted(tokenizer.special_ids)[0]
    prompt = [*tokenizer.encode("aé"), special, *tokenizer.encode("漢b")]
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 20, "stream": stream,
            "regex": "(é|漢|[a-z])+", "seed": 3}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(line) for line in (lines if stream else [answer.text])]
    text, tokens, offsets, likeliest = "", list[str](), list[int](), list[Any]()
    for choice in (one["choices"][0] for one in bodies):
        text += choice["text"]
        tokens += choice["logprobs"]["tokens"]
        offsets += choice["logprobs"]["text_offset"]
        likeliest += choice["logprobs"]["top_logprobs"]
    assert text.startswith("aé漢b")
    assert offsets[: len(prompt)] == [0, 1, 1, 2, 2, 2, 2, 3] and tokens[1:3] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token != tokenizer.token_bytes(special).decode():
            assert text[offset : offset + len(token)] == token
    assert offsets == sorted(offsets) and all(len(top) == 5 for top in likeliest if top is not None)


def test_logprobs_of_a_prompt_are_scores(http: Any, model: rlx.LanguageModel) -> None:
    """OpenAI's types forbid the null of the first token, which OpenAI itself sends."""
    body = {"model": "tiny", "prompt": "Hello, you", "echo": True, "logprobs": 2, "max_tokens": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "Hello, you" == "".join(choice["logprobs"]["tokens"])
    expected = [t.logprob for t in model.score("Hello, you").tokens]
    assert choice["logprobs"]["token_logprobs"] == [None, *expected]


def test_embeddings(client: Any, server: Server) -> None:
    openai = pytest.importorskip("openai")
    plain_client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none")
    encoder = server.state.engine.served["encoder"].model
    texts = ["the cat", "a dog sat on the mat"]
    expected = encoder.embed(texts)
    # The client asks for base64 unless told otherwise, and its strict mode then refuses what it asked for.
    answer = plain_client.embeddings.create(model="encoder", input=texts)
    assert np.array_equal(np.array([d.embedding for d in answer.data], np.float32), expected)
    plain = client.embeddings.create(model="encoder", input=texts[0], encoding_format="float").data[0].embedding
    assert np.array_equal(np.array(plain, np.float32), encoder.embed(texts[0]))
    ids = encoder.text_rows(texts)
    again = client.embeddings.create(model="encoder", input=ids, encoding_format="float")
    assert np.array_equal(np.array([d.embedding for d in again.data], np.float32), expected)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    short = np.array(plain_client.embeddings.create(model="encoder", input=texts[0], dimensions=4).data[0].embedding)
    cut = expected[0, :4] / np.linalg.norm(expected[0, :4])
    assert np.allclose(short, cut, atol=1e-6)


def test_many_clients_at_once_get_the_answers_of_one(server: Server, model: rlx.LanguageModel) -> None:
    openai = pytest.importorskip("openai")
    lengths = [3, 40, 17, 80, 1, 25, 60, 9, 33, 5, 50, 21]

    async def ask(client: Any, i: int) -> str:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * lengths[i]}], max_tokens=5 + i, seed=i
        )
        return str(answer.choices[0].message.content)

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(len(lengths)))))

    for i, text in enumerate(asyncio.run(ask_all())):
        assert text == model.chat("x" * lengths[i], max_tokens=5 + i, seed=i, temperature=1.0).text
