"""Hostile templates end with a result or the typed error, within the budget of bytes, steps and memory."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_templates
import pytest
from hostile_templates import ESCAPES, TEMPLATES

from rlx.errors import FormatError, RequestError
from rlx.formats.chat import ChatTemplate
from rlx.formats.jinja_budget import MAX_BYTES, MAX_CHARS, MAX_SECONDS, MAX_STEPS, MAX_VARIABLE_CHARS, Budget
from rlx.formats.jinja_sandbox import MAX_TOKENS, Program

MEGABYTES = (MAX_BYTES >> 20) + 128


@functools.cache
def outcomes() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "error", hostile_templates.__file__, str(MEGABYTES)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_stays_within_its_budget(name: str) -> None:
    result = outcomes()[name]
    assert ("error" in result and not result["memory"]) or result.get("chars", MAX_CHARS + 1) <= MAX_CHARS, result
    assert len(result.get("error", "")) <= 500
    assert result["steps"] <= MAX_STEPS and result["bytes"] <= MAX_BYTES
    assert result["seconds"] < 10 * MAX_SECONDS  # compiling and rendering; steps are what bounds them


@pytest.mark.parametrize("name", ESCAPES)
def test_no_python_object_is_reached(name: str) -> None:
    try:
        text = ChatTemplate(ESCAPES[name]).render([{"role": "user", "content": "hi"}])
    except FormatError:
        return
    assert text.strip() in ("", "[Undefined]")


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("'%s and %5d|%-6.2f|%%' % x", ("é", 7, 2.5)),
        ("'%(a)s%((b))4d' % x", {"a": 1, "(b)": 2}),
        ("'%r' % x", ["\0"]),
        ("x|join(',')|format", []),
    ],
)
def test_percent_formats_are_those_of_python(expression: str, values: Any) -> None:
    python = "''" if "join" in expression else expression
    text = Program("{{ " + expression + " }}", "t").render({"x": values})
    assert text == eval(python, {"x": values})


@pytest.mark.parametrize(
    "expression",
    ["'{:>6}|{:<4d}|{!r}'.format('a', 5, 'b')", "'{0[k]}{0[}]:{1}}'.format({'k': 1, '}': 2}, 9)", "'{{}}{}'.format(1)"],
)
def test_str_format_is_that_of_python(expression: str) -> None:
    assert Program("{{ " + expression + " }}", "t").render({}) == eval(expression)


def test_a_rendering_has_one_budget_for_all_of_its_values() -> None:
    half = "{% set ns = namespace(l=[]) %}{% for i in range(N) %}{% set ns.l = ['a' * 4000000] %}{% endfor %}"
    budget = Budget("t")
    Program(half.replace("N", "30"), "t").render_within(budget, {})
    assert 30 * 4_000_000 <= budget.bytes < 31 * 4_000_000
    with pytest.raises(FormatError, match=f"exceeds {MAX_BYTES >> 20} MiB"):
        Program(half.replace("N", "70"), "t").render({})


def test_what_is_charged_is_what_a_search_compares() -> None:
    def steps(source: str) -> int:
        budget = Budget("t")
        Program(source, "t").render_within(budget, {"text": "a" * 100_000, "needle": "b" * 100})
        return budget.steps

    assert 5_000 < steps("{{ text.rfind(needle) }}") < 20_000
    assert 50 < steps("{{ text.find(needle) }}") < 5_000
    assert 5_000 < steps("{{ text.strip(needle) }}") < 20_000
    assert steps("{{ text.rfind('b') }}") < 500


def test_a_text_too_long_is_the_fault_of_its_sender() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(RequestError, match=f"at most {MAX_VARIABLE_CHARS} characters"):
        template.render([{"role": "user", "content": "a" * (MAX_VARIABLE_CHARS + 1)}])
    assert (
        len(template.render([{"role": "user", "content": "a" * (MAX_VARIABLE_CHARS - 100)}]))
        == MAX_VARIABLE_CHARS - 100
    )


def test_long_programs_are_refused_before_they_are_compiled() -> None:
    with pytest.raises(FormatError, match=f"at most {MAX_TOKENS} tokens"):
        Program("{{ a }}" * MAX_TOKENS, "t")
    Program("word " * 20_000, "t")


def test_an_iterator_is_true_and_has_no_length_as_in_jinja() -> None:
    assert Program("{{ 'yes' if messages|selectattr('role', 'equalto', 'x') }}", "t").render({"messages": []}) == "yes"
    with pytest.raises(FormatError, match="has no len"):
        Program("{{ messages|map('upper')|length }}", "t").render({"messages": []})
