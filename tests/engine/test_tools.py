"""Tool calls: formats learnt from templates, answers taken apart under every way to cut them, schemas of functions."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_templates import FORMATS, HERMES, THINKING

from rlx.engine.answer_parser import AnswerParser, Event
from rlx.engine.tools import Tool, choose_tools, learn_format, tool_of_function, tools_of
from rlx.errors import CapabilityError, RequestError
from rlx.formats.chat import ChatTemplate
from rlx.hub.catalogue import CATALOGUE

USER = {"role": "user", "content": "Weather?"}
TOOLS = tools_of(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}}},
        {"type": "function", "function": {"name": "clock"}},
    ]
)  # fmt: skip
LEARNT = {name: learn_format(ChatTemplate(source)) for name, source in FORMATS.items()}


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template itself writes for these calls: the answer of a model that was trained with it."""
    known, template = LEARNT[name], ChatTemplate(FORMATS[name])
    listed = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {
            "name": function, "arguments": json.dumps(arguments) if known.as_text else arguments}}
        for i, (function, arguments) in enumerate(calls)
    ]  # fmt: skip
    tools = [tool.described() for tool in TOOLS]
    text = template.render(
        [USER, {"role": "assistant", "content": "", "tool_calls": listed}], tools=tools, add_generation_prompt=False
    )
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


def folded(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, text and calls."""
    thought, text, calls = "", "", list[tuple[str, str]]()
    for event in events:
        if event.kind == "thought":
            thought += event.text
        elif event.kind == "text":
            text += event.text
        elif event.kind == "name":
            calls.append((event.text, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return thought, text, calls


def parsed(pieces: list[str], name: str, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = AnswerParser(calls=LEARNT[name], tools=TOOLS, **options)
    return folded([event for piece in pieces for event in parser.push(piece)] + parser.end())


ONE = [("get_weather", {"city": "Paris", "days": 3})]
TWO = [*ONE, ("get_weather", {"city": 'a "b" {c} \\ é\n<x>', "tags": ["{", 1]})]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [ONE, TWO, [("clock", {"z": None})]], ids=["one", "two", "null"])
def test_calls_that_the_template_writes_are_read_back(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    calls = calls[:1] if name == "bare" else calls  # it marks no second call
    _, text, actual = parsed([written(name, calls)], name)
    assert text == ""
    assert [(function, json.loads(arguments)) for function, arguments in actual] == calls


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", ["", "Let me look.\n\n"], ids=["alone", "after text"])
def test_every_cut_in_two_and_every_character_alone_give_the_same(name: str, before: str) -> None:
    if name == "bare" and before:
        pytest.skip("it marks no call in a text")
    text = before + written(name, ONE if name == "bare" else TWO)
    expected = parsed([text], name)
    assert expected[1] == before.rstrip() and len(expected[2]) == (1 if name == "bare" else 2)
    assert parsed(list(text), name) == expected
    for at in range(len(text)):
        assert parsed([text[:at], text[at:]], name) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": {"a": 1}}', "{", "}", '"', "<function=f>",
    "<think>",
    "</think>", "<parameter=a>", "</parameter>", "[TOOL_CALLS][", "]", ", ", "<|calls|>", "<|call|>functions.", "f:0",
    "<|args|>", "<|end|>", "<|ended|>", "text", " ", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "<", "\\",
    '"name": "f"', '"arguments"', ": {}",
]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_any_text_under_any_cut_gives_the_same(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options = {"thinking": ("<think>", "</think>"), "thinks": data.draw(st.booleans())}
    assert parsed(pieces, name, **options) == parsed([text], name, **options) == parsed(list(text), name, **options)


def test_text_without_calls_stays_as_it_is() -> None:
    for text in ("a < b", "<tool_cal", "<tool_call>\nnothing", "  x\n", '<tool_call>{"x": 1}</tool_call>', '{"a": 1}'):
        _, actual, calls = parsed([text], "hermes")
        assert not calls and actual.replace("</tool_call>", "") == text.replace("</tool_call>", "")


def test_thoughts_come_first_and_apart() -> None:
    answer = "<think>\nhm <tool_call>\n</think>\n\nSo:" + written("hermes", ONE)
    thought, text, calls = parsed(list(answer), "hermes", thinking=("<think>", "</think>"))
    assert (thought.strip(), text, len(calls)) == ("hm <tool_call>", "So:", 1)
    inside, text, _ = parsed(["hm</think>yes"], "hermes", thinking=("<think>", "</think>"), thinks=True)
    assert (inside, text) == ("hm", "yes")


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(CapabilityError, match="does not show tools") as caught:
        learn_format(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert "qwen2.5-coder-1.5b" in str(caught.value.hint) and "call tools" in CATALOGUE["qwen2.5-coder-1.5b"].about
    with pytest.raises(CapabilityError, match="cannot learn"):
        learn_format(ChatTemplate("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"))


def test_the_formats_that_were_learnt() -> None:
    hermes = LEARNT["hermes"]
    assert (hermes.begin, hermes.middle, hermes.end) == (
        '\n<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
    )
    assert hermes.in_object and learn_format(ChatTemplate(THINKING)) == hermes
    assert (LEARNT["section"].as_text, LEARNT["array"].id_length) == (True, 9)
    assert LEARNT["coder"].tags is not None and LEARNT["coder"].tags.before == "<parameter="


# -- Python functions -------------------------------------------------------------------------------------------------
def lookup(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Look up the weather.

    city: a place
    days: how many
    """
    return city * days + unit + str(tags)


def test_a_function_describes_itself() -> None:
    tool = tool_of_function(lookup)
    assert (tool.name, tool.description) == ("lookup", "Look up the weather.")
    assert tool.parameters == {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "description": "a place"},
            "days": {"type": "integer", "description": "how many"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
    }  # fmt: skip


def test_functions_that_no_schema_describes_are_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    def variadic(*x: int) -> int:
        return len(x)

    def exotic(x: bytes) -> bytes:
        return x

    for function, words in ((untyped, "has no type"), (variadic, "needs names"), (exotic, "no JSON type")):
        with pytest.raises(RequestError, match=words):
            tool_of_function(function)


def test_choices() -> None:
    assert choose_tools(TOOLS, None) == (TOOLS, "auto")
    assert choose_tools([], None) == ([], "none")
    named = {"type": "function", "function": {"name": "clock"}}
    assert choose_tools(TOOLS, named) == ([TOOLS[1]], "required")
    for choice in ("often", {"type": "function", "function": {"name": "clok"}}, 1):
        with pytest.raises(RequestError, match="tool_choice"):
            choose_tools(TOOLS, choice)
    with pytest.raises(RequestError, match="no tools"):
        choose_tools([], "required")


@pytest.mark.parametrize(
    "tool",
    [1, {}, {"type": "web_search"}, {"type": "function", "function": {"name": "a b"}},
     {"type": "function", "function": {"name": "f", "parameters": []}}, {"type": "function", "function": 3}],
)  # fmt: skip
def test_wrong_tools_are_refused(tool: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        tools_of([tool])


def test_two_tools_of_one_name_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(RequestError, match="two tools"):
        tools_of([tool, tool])
    assert isinstance(Tool.of(tool, "tools[0]"), Tool) and HERMES


def test_a_choice_among_some_tools() -> None:
    allowed = {"type": "function", "function": {"name": "clock"}}

    def choice(mode: str, tools: Any) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    chosen, mode = choose_tools(TOOLS, choice("required", [allowed]))
    assert [tool.name for tool in chosen] == ["clock"] and mode == "required"
    for wrong in (choice("often", [allowed]), choice("auto", []), choice("auto", [3]), choice("auto", "clock"),
                  choice("auto", [{"type": "function", "function": {"name": "x"}}])):  # fmt: skip
        with pytest.raises(RequestError, match="tool_choice"):
            choose_tools(TOOLS, wrong)


@pytest.mark.parametrize("number", ["1e999", "123456789012345678901234567890", "0.10", "NaN"])
def test_numbers_of_arguments_are_those_that_the_model_wrote(number: str) -> None:
    """Written again, a number could become Infinity, which is not JSON."""
    _, text, calls = parsed([f'<tool_call>{{"arguments": {{"x": {number}}}, "name": "f"}}</tool_call>'], "hermes")
    if number == "NaN":
        assert calls == [("f", "{}")] or text
    else:
        assert calls == [("f", f'{{"x": {number}}}')]
    tagged = f"<tool_call>\n<function=get_weather>\n<parameter=days>\n{number}\n</parameter>\n</function>\n</tool_call>"
    _, _, calls = parsed([tagged], "coder")
    assert calls == [("get_weather", f'{{"days": {number}}}' if number != "NaN" else '{"days": "NaN"}')]
