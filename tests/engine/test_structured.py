"""Structured output in Python: schemas, patterns, choices and grammars, against an independent validator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins
from tool_templates import FORMATS, HERMES

llguidance = pytest.importorskip("llguidance")
validator = pytest.importorskip("jsonschema_rs")

import rlx  # noqa: E402
from rlx.engine.structured import MAX_CHOICES, MAX_GRAMMAR, GrammarCompiler, Structure  # noqa: E402
from rlx.engine.tools import call_rules, tools_of  # noqa: E402
from rlx.errors import RequestError  # noqa: E402

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rlx.LanguageModel]:
    with rlx.load(stand_ins.write_chat(tmp_path_factory.mktemp("model"))) as one:
        assert isinstance(one, rlx.LanguageModel)
        yield one


def with_template(folder: Path, template: str) -> Path:
    stand_ins.write_chat(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", "y", 3, None]}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[A-F]{2,5}$"}, {"type": "string", "maxLength": 5, "minLength": 2},
    {"type": "integer", "minimum": -5, "maximum": 17}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"anyOf": [{"type": "boolean"}, {"const": {"k": [1]}}]}, {"type": "string", "format": "date"},
    {"$defs": {"t": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
                     "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/t"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:30])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_answers_validate(model: rlx.LanguageModel, schema: dict[str, Any], temperature: float) -> None:
    for seed in range(3):
        answer = model.generate("x", max_tokens=200, schema=schema, temperature=temperature, seed=seed)
        if answer.finish_reason == "stop":
            assert validator.is_valid(schema, json.loads(answer.text)), answer.text
    assert answer.finish_reason in ("stop", "length")


def test_other_forms(model: rlx.LanguageModel) -> None:
    settings: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0}
    for seed in range(4):
        assert re.fullmatch(
            r"[a-c]{3}/[0-9]{2}", model.chat("x", regex=r"[a-c]{3}/[0-9]{2}", seed=seed, **settings).text
        )
        assert model.chat("x", choice=["yes", 'no "/\n'], seed=seed, **settings).text in ("yes", 'no "/\n')
        lark = 'start: "<" WORD ">" start?\nWORD: /[a-z]{1,3}/'
        answer = model.generate("x", grammar=lark, seed=seed, **settings)
        assert answer.finish_reason == "length" or re.fullmatch("(<[a-z]{1,3}>)+", answer.text)
        gbnf = 'root ::= "ab" [0-9]+ end\nend ::= "z" | "y"'
        answer = model.generate("x", grammar=gbnf, seed=seed, **settings)
        assert answer.finish_reason == "length" or re.fullmatch("ab[0-9]+[zy]", answer.text)
    assert "".join(model.stream("x", choice=["streamed"], max_tokens=20)) == "streamed"


def test_pydantic_classes_are_schemas(model: rlx.LanguageModel) -> None:
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(int, ...), ok=(bool, ...))
    answer = model.chat("x", schema=point, max_tokens=120, temperature=1.0, seed=1)
    assert answer.finish_reason == "length" or point.model_validate_json(answer.text)


def test_a_batch_follows_it_row_by_row(model: rlx.LanguageModel) -> None:
    prompts = ["a", "bb", "ccc", "dddd"]
    settings: dict[str, Any] = {"regex": "[xyz]{4}", "max_tokens": 20, "temperature": 1.0, "seed": 5}
    batch = model.generate(prompts, **settings)
    assert [c.text for c in batch] == [model.generate(p, **settings).text for p in prompts]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schema": {"not": {}}}, '"not"'), ({"schema": {"if": {}, "then": {}}}, '"if"'), ({"schema": 3},
        "a JSON schema"),
        ({"schema": {"type": "string", "format": "zz"}}, "zz"), ({"schema": "{"}, "not JSON"), ({"regex": "("},
        "unclosed"),
        ({"schema": {"$ref": "http://example.org/x"}}, "does not fetch"), ({"regex": ""}, "regular expression"),
        ({"schema": {"type": "string", "pattern": "(?=x)"}}, "look-around"), ({"choice": []}, "a list of texts"),
        ({"choice": "abc"}, "a list of texts"), ({"choice": [""]}, "not empty"), ({"grammar": "start: x"}, '"x"'),
        ({"grammar": "root ::= ("}, "GBNF"), ({"grammar": 7}, "Lark or GBNF"), ({"schema": {"x": np.nan}}, "JSON data"),
        ({"regex": "a", "choice": ["b"]}, "exclude each other"), ({"regex": "a", "allowed": lambda t: None}, "exclude"),
        ({"regex": "x" * (MAX_GRAMMAR + 1)}, "limit"), ({"regex": "(" * 999}, "deep"),
        ({"schema": {"x-guidance": {}}}, "x-guidance"), ({"grammar": "%llguidance {}\nstart: \"a\""}, "llguidance"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(model: rlx.LanguageModel, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        model.generate("x", max_tokens=5, **settings)


def test_as_many_choices_as_there_may_be(model: rlx.LanguageModel) -> None:
    """Texts that begin alike are all possible until they differ."""
    texts = [f"choice {i}" for i in range(MAX_CHOICES)]
    assert model.generate("Once", choice=texts, temperature=1.0, seed=1, max_tokens=40).text in texts
    assert model.generate("Once", choice=["red", "reddish"], max_tokens=20).text in ("red", "reddish")


def test_equal_grammars_are_compiled_once(model: rlx.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, s, w: (compiled.append(s), compile_(self, s, w))[1])
    for _ in range(3):
        model.generate("x", max_tokens=5, regex="onlyhere[0-9]")
    assert len(compiled) == 1


# -- tools ------------------------------------------------------------------------------------------------------------
FUNCTION = {
    "name": "set_light",
    "parameters": {
        "type": "object", "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
        "required": ["on", "room"], "additionalProperties": False,
    },
}  # fmt: skip
OTHER = {"name": "ring", "parameters": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9,
         "minimum": 1}},
                                        "required": ["n"], "additionalProperties": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": OTHER}]


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_have_valid_arguments_in_every_format(name: str, tmp_path: Path) -> None:
    schemas: dict[str, Any] = {"set_light": FUNCTION["parameters"], "ring": OTHER["parameters"]}
    with rlx.load(with_template(tmp_path, FORMATS[name])) as model:
        assert isinstance(model, rlx.LanguageModel)
        complete = 0
        for seed in range(4):
            answer = model.chat(
                "hi", tools=TOOLS, tool_choice="required", temperature=1.0, seed=seed, max_tokens=400,
                logit_bias={2: 20.0},  # ends as soon as the grammar allows it
            )  # fmt: skip
            assert answer.text == "" and answer.tool_calls
            if answer.finish_reason == "stop":
                complete += 1
                for call in answer.tool_calls:
                    assert validator.is_valid(schemas[call.name], json.loads(call.arguments)), call
        assert complete


def test_strict_calls_in_a_text(tmp_path: Path) -> None:
    """Any text is allowed; from the marker on, only a valid call."""
    with rlx.load(with_template(tmp_path, HERMES)) as model:
        assert isinstance(model, rlx.LanguageModel)
        rules = call_rules(model.tool_format, tools_of(TOOLS), model.grammars, text=True)

        def accepts(text: str) -> bool:
            constraint = model.grammars.constraint(rules, "tools")
            tokens = model.tokenizer.encode(text, add_special=False)
            return all(constraint(tokens[:i])[t // 32] >> (t % 32) & 1 for i, t in enumerate(tokens))

        good = '<tool_call>\n{"name": "ring", "arguments": {"n": 3}}\n</tool_call>'
        assert accepts("Sure, a text.") and accepts("Sure.\n" + good) and accepts(good + good.replace("3", "4"))
        assert not accepts('<tool_call>\n{"name": "rang"') and not accepts(good.replace("3", "33"))
        assert not accepts("Well.\n<tool_call>\nno call")


def test_functions_are_called_until_there_is_a_text(tmp_path: Path) -> None:
    calls: list[tuple[bool, str]] = []

    def set_light(on: bool, room: str = "hall") -> dict[str, Any]:
        """Switch a light."""
        calls.append((on, room))
        return {"ok": on}

    with rlx.load(with_template(tmp_path, HERMES)) as model:
        assert isinstance(model, rlx.LanguageModel)
        answer = model.chat(
            "hi",
            tools=[set_light],
            tool_choice="required",
            temperature=1.0,
            seed=3,
            max_tokens=120,
            logit_bias={2: 15.0},
        )
        assert calls and answer.tool_calls[0].result == json.dumps({"ok": calls[0][0]})
        assert json.loads(answer.tool_calls[0].arguments)["on"] == calls[0][0]
        call = answer.tool_calls[0]
        message = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result}
        again = model.chat([{"role": "user", "content": "hi"}, message, result], tools=[set_light], max_tokens=4)
        plain = [{"role": "user", "content": "hi"}, message | {"content": "", "tool_calls": [call.message()]}, result]
        assert again.usage.prompt_tokens == model.chat(plain, tools=[set_light], max_tokens=4).usage.prompt_tokens
        assert model.chat_tokens([*plain[:1], message, result]) == model.chat_tokens(plain)
        with pytest.raises(RequestError, match="no tool"):
            model.chat("hi", tools=[set_light], tool_choice={"type": "function", "function": {"name": "x"}})
        with pytest.raises(RequestError, match="no tool 'set_ligth'") as caught:
            model.chat("hi", tools=[set_light], tool_choice="set_ligth")
        assert "set_light" in str(caught.value.hint)
        calls.clear()
        options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 120, "logit_bias": {2: 15.0}}
        model.chat("hi", tools=[set_light], tool_choice="set_light", **options)
        assert calls


@pytest.mark.parametrize(
    ("setting", "value", "message", "hint"),
    [
        ("schema", {"type": "object", "propertes": {}}, "schema: unknown keyword 'propertes'", "'properties'"),
        ("schema", {"anyOf": [{"requird": ["a"]}]}, r"schema.anyOf\[0\]: unknown keyword 'requird'", "'required'"),
        ("schema", {"properties": {"a": {"required": True}}}, "'a': 'required' is True", "the object"),
        ("schema", {"type": "integer", "divisibleBy": 3}, "unknown keyword 'divisibleBy'", "'multipleOf'"),
        ("schema", {"extends": {"type": "string"}}, "unknown keyword 'extends'", "'allOf'"),
        ("schema", {"disallow": "string"}, "'disallow' cannot be enforced", "None"),
        ("schema", {"type": "string", "formatMinimum": "2020"}, "'formatMinimum' cannot be enforced", "None"),
        ("schema", {"type": "string", "min_length": 2}, "unknown keyword 'min_length'", "'minLength'"),
        ("schema", {"one_of": [{"type": "string"}]}, "unknown keyword 'one_of'", "'oneOf'"),
        ("schema", {"type": "integer", "max": 3}, "unknown keyword 'max'", "'maximum'"),
        ("schema", {"items": {"type": "integer", "ge": 3}}, "schema.items: unknown keyword 'ge'", "'minimum'"),
        ("schema", {"properties": {"propertes": {"typ": 1}}}, r"schema.properties.'propertes': unknown", "'type'"),
        ("schema", Structure, "schema: expected a JSON schema", "pydantic"),
        ("choice", [1, 2], "choice: expected a list of texts", r"choice=['1', '2']"),
    ],
)
def test_slips_in_settings_have_hints(setting: str, value: Any, message: str, hint: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Structure.of({setting: value})
    assert hint in str(caught.value.hint)
    Structure.of({"schema": {"properties": {"propertes": {"x-order": 1, "example": 2}}}})  # a name, and annotations


# -- logits processors ------------------------------------------------------------------------------------------------
def test_a_processor_that_changes_nothing_changes_nothing(model: rlx.LanguageModel) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 0.9, "top_k": 30, "seed": 8, "logprobs": 2,
                                "frequency_penalty": 0.3}  # fmt: skip
    plain = model.generate("hello", **settings)
    processed = model.generate("hello", logits_processor=lambda tokens, logits: logits, **settings)
    assert processed.tokens == plain.tokens and processed.logprobs == plain.logprobs


def test_a_processor_sees_tokens_and_decides(model: rlx.LanguageModel) -> None:
    seen: list[list[int]] = []

    def only_even(tokens: Any, logits: Any) -> Any:
        seen.append(list(tokens))
        logits[1::2] = -np.inf
        return logits

    answer = model.generate("hello", max_tokens=10, logits_processor=only_even, logit_bias={0: -np.inf, 2: -np.inf})
    assert answer.tokens and all(token % 2 == 0 for token in answer.tokens)
    assert seen == [answer.tokens[:i] for i in range(len(answer.tokens))]
    with pytest.raises(RequestError, match="returned"):
        model.generate("x", logits_processor=lambda t, logits: logits[:3])
    with pytest.raises(RequestError, match="a function"):
        model.generate("x", logits_processor=3)


def test_structures_are_compared_by_text() -> None:
    assert Structure.of({"schema": {"a": 1}}) == Structure.of({"schema": '{"a": 1}'})
    assert Structure.of({}) is None


def test_sentencepiece_vocabularies_spell_texts_without_a_space_before_them() -> None:
    """What a grammar forces is spelled as it stands inside a text, where no space is added before it."""
    from formats.test_tokenizer import sentencepiece_metadata

    from rlx.engine.structured import GrammarCompiler
    from rlx.formats.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for text in ("aab", "é!", " a", "a a"):
        structure = Structure.of({"choice": [text]})
        assert structure is not None
        constraint, tokens = compiler.follow(structure), list[int]()
        while b"".join(map(tokenizer.token_bytes, tokens)) != text.encode():
            words = constraint(tokens)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=tokenizer.vocab_size))
            tokens.append(int(allowed[0]))
            assert text.encode().startswith(b"".join(map(tokenizer.token_bytes, tokens)))


def test_a_strict_tool_is_enforced_beside_others(tmp_path: Path) -> None:
    """Calls of strict tools fit their schemas; arguments of others are any object."""
    from rlx.engine.tool_loop import call_constraint

    strict = {"type": "function", "function": {**OTHER, "strict": True}}
    for template, call in (
        (HERMES, '<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": {value}}}}}\n</tool_call>'),
        (
            FORMATS["coder"],
            "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        with rlx.load(with_template(tmp_path / str(len(template)), template)) as model:
            assert isinstance(model, rlx.LanguageModel)
            tools = tools_of([strict, TOOLS[0]])

            def accepts(**fields: Any) -> bool:
                constraint = call_constraint(model, tools, "auto", [])  # noqa: B023
                assert constraint is not None
                tokens = model.tokenizer.encode(call.format(**fields), add_special=False)  # noqa: B023
                return all(constraint(tokens[:i])[t // 32] >> (t % 32) & 1 for i, t in enumerate(tokens))

            assert accepts(name="ring", key="n", value=3) and accepts(name="set_light", key="anything", value=3)
            assert not accepts(name="ring", key="n", value=33) and not accepts(name="ring", key="m", value=3)
