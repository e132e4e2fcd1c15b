"""Chat templates: real ones against transformers, invalid messages, and hostile templates."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from rlx.errors import FormatError, RequestError
from rlx.formats import jinja_budget
from rlx.formats.chat import ChatTemplate
from rlx.formats.jinja_budget import MAX_CHARS
from rlx.formats.jinja_sandbox import MAX_TEMPLATE_CHARS

# -- real templates, as their models' files have them ----------------------------------------------------------------
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501

GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system message!") }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501

FEATURES = r"""{% macro show(x, depth=1) -%}{{ '  ' * depth }}{{ x }}{%- endmacro %}
{%- set ns = namespace(found=false, items=[]) %}
    {% if strftime_now is defined %}{{ "%04d" % 7 }}{{ '{:>4}|{}'.format('a', 2024) }}{% endif %}
{% for m in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- set ns.items = ns.items + [m.role] %}
    {%- generation %}{{ show(m.content, depth=2) }}{% endgeneration %}
    {{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ m.role | upper }} {{ m.get('name', 'none') }}
{% endfor %}
{{ ns.items | join(', ') }} {{ ns.items | map('upper') | list | tojson }} {{ messages | length }} {{ range(3) | list }}
{{ {'b': [1, 2.5, none, true], 'a': 'é<'} | tojson(indent=2) }} {{ messages[0].content[:2] ~ 1 ~ 'x' }}
{{ 7 // 2 ** 2 }}
{% filter indent(3) %}one
two{% endfilter %} {{ 'a-b'.split('-') | last }} {{ 'aXb' | replace('X', '--') }} {{ (1, 2) }} {{ undefined_name }}|
{% for k, v in {'x': 1, 'y': 2}.items() if v > 1 %}{{ k }}={{ v }}{% else %}none{% endfor %} {{ 2.567 | round(1) }}
"""

TEMPLATES = {
    "smollm2": SMOLLM2, "llama3": LLAMA3, "qwen2.5": QWEN25, "gemma3": GEMMA3, "mistral": MISTRAL, "features": FEATURES,
}  # fmt: skip

USER = {"role": "user", "content": " What is 2 + 2? "}
ANSWER = {"role": "assistant", "content": "It is <4>.\n"}
SYSTEM = {"role": "system", "content": "Be brief & kind."}
CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Sure?"}],
    "long": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "answer": [USER, ANSWER],
    "wrong order": [USER, USER],
    "tools": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parity
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_real_templates_agree_with_transformers(name: str, conversation: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    ours = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    messages = CONVERSATIONS[conversation]
    for prompt in (False, True):
        for tools in (None, TOOLS):
            try:
                expected = theirs.apply_chat_template(
                    messages, chat_template=TEMPLATES[name], tools=tools, add_generation_prompt=prompt, tokenize=False
                )
            except Exception:
                with pytest.raises((RequestError, FormatError)):
                    ours.render(messages, tools=tools, add_generation_prompt=prompt)
            else:
                assert ours.render(messages, tools=tools, add_generation_prompt=prompt) == expected


# -- expectations written out ----------------------------------------------------------------------------------------
def test_smollm2() -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(SMOLLM2).render([{"role": "user", "content": "hi"}]) == expected


def test_llama3() -> None:
    template = ChatTemplate(LLAMA3, bos_token="<|begin_of_text|>")
    expected = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief & kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
    )
    assert template.render([SYSTEM, USER], add_generation_prompt=False) == expected
    assert template.render([SYSTEM, USER]) == expected + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_gemma_takes_parts_and_refuses_two_users() -> None:
    template = ChatTemplate(GEMMA3, bos_token="<bos>")
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
    expected = "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    assert template.render([{"role": "user", "content": parts}]) == expected
    with pytest.raises(RequestError, match="Conversation roles must alternate"):
        template.render([USER, USER])


def test_parts_are_joined_for_a_template_that_wants_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = ChatTemplate(SMOLLM2).render([SYSTEM, {"role": "user", "content": parts}])
    assert "<|im_start|>user\na\nb<|im_end|>" in rendered


def test_qwen_writes_tool_calls() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [USER, call, {"role": "tool", "content": "4"}]
    rendered = ChatTemplate(QWEN25).render(messages, tools=TOOLS)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>' in rendered
    assert '\n{"type": "function", "function": {"name": "add"' in rendered
    assert rendered.endswith("<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ bos_token }}|{{ eos_token }}|{{ tools }}", bos_token="<s>")
    assert template.render([USER], enable_thinking=False) == "False <s>||None"


def test_todays_date_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]) in {str(datetime.now().year + d) for d in (-1, 0)}


def test_blocks_leave_no_white_space() -> None:
    assert ChatTemplate("{% if true %}\n    {% set x = 1 %}\n  a\n{% endif %}\nb").render([USER]) == "  a\nb"
    assert ChatTemplate("x{% generation %}{{ 1 }}{% endgeneration %}y").render([USER]) == "x1y"


def test_threads_share_a_template() -> None:
    template = ChatTemplate(QWEN25)
    expected = template.render(CONVERSATIONS["long"])
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda _: template.render(CONVERSATIONS["long"]), range(160))
        assert all(text == expected for text in texts)


def test_a_long_chat_is_no_attack() -> None:
    messages = [USER | {"content": "word " * 200}, ANSWER | {"content": "word " * 200}] * 500
    begin = time.process_time()
    rendered = ChatTemplate(MISTRAL, bos_token="<s>", eos_token="</s>").render(messages)
    assert len(rendered) > 1_000_000 and time.process_time() - begin < 1


# -- messages that cannot be -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hi", "messages: expected a list, found str"),
        ({"role": "user", "content": "hi"}, "messages: expected a list, found dict"),
        (None, "messages: expected a list, found NoneType"),
        ([], "messages: expected 1 to 16384, found 0"),
        (["hi"], "messages[0]: expected an object, found str"),
        ([{"content": "hi"}], "messages[0].role: expected one of system, developer, user, assistant, tool, found None"),
        ([USER, {"role": "usr", "content": "hi"}], "messages[1].role: expected one of"),
        ([{"role": "user"}], "messages[0].content: missing"),
        ([{"role": "user", "content": None}], "messages[0].content: expected text, found null"),
        ([{"role": "user", "content": 3}], "[0].content: expected a string or a list of text parts, found 3"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]: expected an object, found 'hi'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content[0].type: expected 'text', found 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text: expected a string, found None"),
        ([{"role": "user", "content": "x", "y": object()}], "messages[0].y: expected plain data, found object"),
        ([{"role": "user", "content": "x", 3: 4}], "messages[0]: expected names that are strings"),
    ],
)
def test_messages_are_checked(messages: Any, error: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(SMOLLM2).render(messages)
    assert error in str(caught.value)


def test_an_image_comes_with_what_there_is() -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(GEMMA3).render([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    assert "messages[0].content[0].type: expected 'text', found 'image'" in str(caught.value)
    assert "takes text" in str(caught.value.hint)


def test_a_role_comes_with_the_nearest() -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(SMOLLM2).render([{"role": "asistant", "content": "x"}])
    assert "assistant" in str(caught.value.hint)


def test_data_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="nested more than 32 deep"):
        ChatTemplate(SMOLLM2).render([USER | {"extra": loop}])


# -- templates that fail ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for %}", "t, line 1: Expected an expression"),
        ("a\n{{ 'x", "t, line 2: "),
        ("{{ 1 | nothing }}", "t, line 1: No filter named 'nothing'"),
        ("{{ a.b.c }}", "t: UndefinedError: 'a' is undefined"),
        ("{{ 1 + 'a' }}", "t: TypeError"),
        ("{{ 1 / 0 }}", "t: ZeroDivisionError"),
        ("{% include 'x' %}", "t, line 1: include of another template"),
        ("{% import 'x' as x %}", "t, line 1: import of another template"),
        ("{% from 'x' import y %}", "t, line 1: fromimport of another template"),
        ("{% extends 'x' %}", "t, line 1: extends of another template"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "t: expected at most 131072 characters, found 131073"),
    ],
)
def test_a_failing_template_says_where(source: str, error: str) -> None:
    with pytest.raises(FormatError) as caught:
        ChatTemplate(source, where="t").render([USER])
    assert str(caught.value).startswith(error)


def grow(step: str, start: str = "'aaaaaaaa'") -> str:
    loop = "{% for i in range(80) %}{% set ns.s = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop + "{{ ns.s }}"


TWINS = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(20) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{% set a = ns.a %}{% set b = ns.b %}"
)
BIG = "{% set x = 'a' * 4000000 %}"
ATTACKS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "a loop over a filter": "{% for i in range(100000) %}{% set y = range(200000) | sum %}{% endfor %}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "repetition": "{{ 'a' * 10**10 }}",
    "repetition, turned": "{{ 10**10 * 'a' }}",
    "a list of repetition": "{{ [1] * 10**9 }}",
    "a power": "{{ 7 ** (10**9) }}",
    "doubling by ~": grow("ns.s ~ ns.s"),
    "doubling by +": grow("ns.s + ns.s"),
    "doubling lists": grow("ns.s + ns.s", "[1]"),
    "sharing lists": grow("[ns.s, ns.s]"),
    "sharing in dicts": grow("{'a': ns.s, 'b': ns.s}"),
    "sharing in calls": grow("dict(a=ns.s, b=ns.s)"),
    "sharing in arguments": "{% macro f(n) %}{{ f(n-1, varargs, varargs) if n else varargs }}{% endmacro %}{{ f(60) }}",
    "nesting": grow("[ns.s]"),
    "comparisons": TWINS + "{% if a == b %}{% endif %}" * 300,
    "a chain of comparisons": TWINS + "{% if a" + " == b == a" * 150 + " %}{% endif %}",
    "tests": TWINS + "{% if a is eq(b) %}{% endif %}" * 300,
    "slices": "{% set x = 'a' * 8000000 %}" + "{% set y = x[::-1] %}" * 1000,
    "a block of text": "{% set x %}{% for i in range(20000) %}" + "b" * 100000 + "{% endfor %}{% endset %}",
    "a difference that grows": "{% set ns = namespace(x=3) %}{% for i in range(200000) %}"
    "{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "growing numbers": grow("ns.s * ns.s", "99"),
    "center": "{{ 'a'.center(1000000000) }}",
    "format": "{{ '{:1000000000}'.format('a') }}",
    "nested format": "{{ '{:{}}'.format('a', 1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "join": BIG + "{{ [x, x, x] | join(x) }}",
    "join method": "{% set x = 'a' * 10000 %}{{ x.join(x) }}",
    "replace": BIG + "{{ x | replace('a', x) }}",
    "replace method": BIG + "{{ x.replace('', x) }}",
    "indent": "{% set x = '\n' * 4000000 %}{{ x | indent(1000000) }}",
    "json": "{{ [1] | tojson(indent=1000000000) }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "sum": "{% set l = [0] * 200000 %}{{ ([l] * 40) | sum(start=[]) }}",
    "dates": "{{ strftime_now('%1000000000Y') }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "a long sum": "{{ 1" + "+1" * 40000 + " }}",
    "a long path": "{{ a" + ".b" * 40000 + " }}",
    "nested ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id') }}",
    "a namespace's class": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changing messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'a': 1}) }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_soon_with_a_format_error(name: str) -> None:
    begin = time.process_time()
    with pytest.raises(FormatError):
        ChatTemplate(ATTACKS[name]).render([USER])
    assert time.process_time() - begin < 4


def test_output_has_a_bound() -> None:
    with pytest.raises(FormatError, match=f"exceeds {MAX_CHARS} characters"):
        ChatTemplate("{% for i in range(100000) %}" + "x" * 200 + "{% endfor %}").render([USER])


def test_internals_read_as_nothing() -> None:
    for source in ("{{ raise_exception.__globals__ }}", "{{ ''|attr('__class__') }}", "{{ self.__init__ }}"):
        assert ChatTemplate(source).render([USER]) == ""


def test_constants_are_not_worked_out_while_compiling() -> None:
    for source in ("{{ 'a' * 10**10 }}", "{% set x = 'a' * 10**10 %}", "{% if 'a' * 10**10 %}{% endif %}"):
        ChatTemplate(source)


def test_messages_stay_as_they_were() -> None:
    messages = [USER | {"content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(SMOLLM2).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_second_render_has_its_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_budget, "MAX_STEPS", 1500)
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}")
    for _ in range(5):
        assert template.render([USER]) == ""


def test_the_last_message_is_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so "}]
    assert template.render(messages, continue_final_message=True) == "<user>x</><assistant>so "
    assert template.render(messages) == "<user>x</><assistant>so</><a>"
    with pytest.raises(RequestError, match="continue_final_message"):
        template.render(messages[:1], continue_final_message=True)
    with pytest.raises(RequestError, match="does not show"):
        ChatTemplate("nothing").render(messages, continue_final_message=True)
