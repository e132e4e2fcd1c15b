"""Chat templates that write tool calls in the ways that models do, reduced to what matters for calls."""

from __future__ import annotations

_TURNS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_HEAD = "{%- if tools %}{{ '<|im_start|>system\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
_JSON = """{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}"""


def _template(call: str) -> str:
    return _HEAD + _TURNS.replace("CALL", call)


HERMES = _template("{{ '\\n<tool_call>\\n' }}" + _JSON + "{{ '\\n</tool_call>' }}")
BARE = _template(_JSON.replace('arguments"', 'parameters"'))
CODER = _template(
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}"
)
PAIRS = _template(
    "{{ '\\n<tool_call>' + c.function.name + '\\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}"
    "{% endfor %}{{ '</tool_call>' }}"
)
SECTION = _HEAD + _TURNS.replace(
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}",
    "{%- if m.tool_calls %}{{ '<|calls|>' }}{% for c in m.tool_calls %}{{ '<|call|>functions.' + "
    "c.function.name + ':' }}"
    "{{ loop.index0 }}{{ '<|args|>' + c.function.arguments + '<|end|>' }}{% endfor %}{{ '<|ended|>' }}{% endif %}",
)
ARRAY = _HEAD + _TURNS.replace(
    "{%- for c in m.tool_calls or [] %}CALL{% endfor %}",
    "{%- if m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + "
    '\'", "arguments": \' }}{{ c.function.arguments | tojson }}{{ \', "id": "\' + c.id + \'"}\' }}'
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}",
)
THINKING = HERMES.replace(
    "{%- if m.content %}",
    "{%- if m.role == 'assistant' and m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + "
    "'\\n</think>\\n\\n' }}"
    "{% endif %}{%- if m.content %}",
)
FORMATS = {"hermes": HERMES, "bare": BARE, "coder": CODER, "pairs": PAIRS, "section": SECTION, "array": ARRAY}
