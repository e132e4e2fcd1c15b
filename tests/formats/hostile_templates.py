"""Templates that try to exhaust memory or time, crash the parser, or reach Python objects.

`python tests/formats/hostile_templates.py MEGABYTES` renders each with a memory limit and prints the outcome.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, RlxError
from rlx.formats.jinja_budget import Budget
from rlx.formats.jinja_sandbox import Program

VARIABLES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
EMOJI = "\N{GRINNING FACE}"


def nested(opening: str, closing: str, times: int, inside: str = "") -> str:
    return opening * times + inside + closing * times


def printed(expression: str) -> str:
    return "{{ " + expression + " }}"


def length(expression: str) -> str:
    return printed(f"({expression})|length")


def in_lists(depth: int, inside: str = "range(200000)|list") -> str:
    """Nest a value in lists, as `ns.x`."""
    return (
        f"{{% set ns = namespace(x={inside}) %}}{{% for i in range({depth}) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}"
    )


def doubled(pair: str, times: int, inside: str) -> str:
    """Double a value by sharing, as `ns.x`."""
    start = f"{{% set ns = namespace(x={inside}) %}}"
    return start + f"{{% for i in range({times}) %}}{{% set ns.x = {pair} %}}{{% endfor %}}"


A, NEEDLE = "('a' * 4000000)", "('ab' + 'a' * 2000000)"
HUGE = "{% set a = ('f' * 8000000)|int(base=16) %}{% set b = ('f' * 4000000)|int(base=16) %}"

SEARCHES = {
    "rfind": printed(f"{A}.rfind({NEEDLE})"),
    "rindex": printed(f"{A}.rindex({NEEDLE})"),
    "rsplit": length(f"{A}.rsplit({NEEDLE})"),
    "rpartition": length(f"{A}.rpartition({NEEDLE})"),
    "find": printed("('a' * 8000000).find('a' * 1000000 ~ 'b' ~ 'a' * 1000000)"),
    "count": printed("('a' * 8000000).count('a' * 2000000 ~ 'b')"),
    "in": printed("('b' ~ 'a' * 1000000) in ('a' * 4000000)"),
    "replace, over and over": "{% set s = 'a' * 8000000 %}{% for i in range(100000) %}"
    "{% set _ = s.replace('b', 'c') %}{% endfor %}",
    "strip of many characters": length("('a' * 4000000).strip('b' * 4000000 ~ 'a')"),
    "trim of many characters": length("('a' * 4000000)|trim('b' * 4000000 ~ 'a')"),
}
TEXTS = {
    "indent of carriage returns": length("('\\r' * 1000)|indent(4000000, blank=true)"),
    "title": length("('a ' * 4000000)|title"),
    "wordcount": printed("('a ' * 4000000)|wordcount"),
    "splitlines": length("('a\\n' * 4000000).splitlines()"),
    "urlencode": length("('€' * 8000000)|urlencode"),
    "striptags of comments": length("('<!---->' * 1000000)|striptags"),
    "striptags of brackets": length("('<' * 8000000)|striptags"),
    "forceescape, over and over": "{% set ns = namespace(x='<' * 1000000) %}{% for i in range(12) %}"
    "{% set ns.x = ns.x|forceescape %}{% endfor %}",
    "truncate with a long end": length(f"('a' * 8000000)|truncate(8000000, true, '{EMOJI}' * 8000000)"),
    "join with a long glue": printed("[{'a': 'x'}] * 200000|join('y' * 1000, attribute='a')"),
    "replace in map": length("(['a' * 8000000] * 1)|map('replace', 'a', 'bb')|list"),
    "default": length("x|default('a' * 8000000)|default(1)"),
    "a negative repetition": printed("'a' * -5"),
    "half a surrogate pair": printed("'\\ud800'"),
    "upper case outside ASCII": length("('\N{GREEK SMALL LETTER IOTA WITH DIALYTIKA AND TONOS}' * 8000000).upper()"),
    "reversed over and over": "{% set ns = namespace(x='a' * 8000000) %}{% for i in range(1000) %}"
    "{% set ns.x = ns.x|reverse %}{% endfor %}",
}
FORMATS = {
    "percent, parentheses in a key": length("'%((a))1500000000d' % {'(a)': 1}"),
    "format filter, parentheses in a key": length("'%((a))1500000000d'|format(**{'(a)': 1})"),
    "percent with a star": printed("'%*d' % (100000000, 1)"),
    "percent with a precision": printed("'%.999999999f' % 1.0"),
    "percent with a space": printed("'% 99999999d' % 1"),
    "percent with a length": printed("'%h999999999d' % 1"),
    "percent with Arabic digits": printed("'%" + "\N{ARABIC-INDIC DIGIT ONE}" * 8 + "d' % 1"),
    "percent of characters": printed("'%c' % 1114111") + printed("'%c' % 55296"),
    "percent in a test": printed("'%1500000000d' is odd") + printed("'%1500000000d' is divisibleby(1)"),
    "format, a brace in brackets": length("'{0[}]:1500000000}'.format({'}': 1})"),
    "format with Arabic digits": printed("'{:" + "\N{ARABIC-INDIC DIGIT ONE}" * 8 + "}'.format(1)"),
    "format with a conversion": printed("'{0!r:>999999999}'.format('a')"),
    "format with a width in an item": printed("'{0[0]:{1}}'.format([1], 999999999)"),
    "format of a namespace's text": "{% set ns = namespace(s='a' * 8000000) %}{{ ('{0.s}' * 1000).format(ns)|length }}",
    "format of braces": length("('{{' * 4000000).format()"),
}
JSONS = {
    "json with a deep indent": in_lists(58) + length("ns.x|tojson(indent=64)"),
    "json with an indent of emoji": in_lists(58) + length(f"ns.x|tojson(indent='{EMOJI}' * 64)"),
    "json with long separators": length("(range(200000)|list)|tojson(separators=('x' * 8000000, 'y'))"),
    "json of shared lists": doubled("[ns.x, ns.x]", 40, "'a'") + length("ns.x|tojson"),
    "json with mixed keys": printed("{1: 2, 'a': 3}|tojson(sort_keys=true)"),
    "json of infinity": printed("(1e308 * 10)|tojson"),
}
NUMBERS = {
    "quotient of huge numbers": HUGE + length("(a // b)|string"),
    "remainder of huge numbers": HUGE + printed("a % b"),
    "int to base 36": printed("('z' * 8000000)|int(base=36) > 3"),
    "int of many digits": printed("('9' * 4000)|int ** 1"),
    "a power": printed("2 ** 100000000"),
    "a product": printed("10 ** 1000 * 10 ** 1000"),
    "a power of floats": printed("1e308 ** 2"),
    "round of a text": printed("'a'|round(9, 'ceil')"),
    "round of a list": printed("[0]|round(8, 'floor')"),
    "a range that falls": length("range(0, -999999999999, -1)"),
    "numbers with one hash": length("range(0, (2 ** 61 - 1) * 7, 2 ** 61 - 1)|list|unique|list")
    + length("range(0, (2 ** 61 - 1) * 200000, 2 ** 61 - 1)|list|unique|list"),
}
COLLECTIONS = {
    "a chain of namespaces": "{% set ns = namespace(x=none) %}{% for i in range(3000) %}"
    f"{{% set ns.x = namespace(p=ns.x, s='{EMOJI}' * 8000000) %}}{{% endfor %}}ok",
    "a long chain of namespaces": "{% set ns = namespace(x=none) %}{% for i in range(30000) %}"
    "{% set ns.x = namespace(p=ns.x) %}{% endfor %}ok",
    "a long chain of iterators": "{% set ns = namespace(x=[1]) %}{% for i in range(30000) %}"
    "{% set ns.x = ns.x|map('string') %}{% endfor %}{{ ns.x|list }}",
    "a shared tuple as a key": doubled("(ns.x, ns.x)", 60, "('a',)") + length("{ns.x: 1}"),
    "a shared tuple as a key, over and over": doubled("(ns.x, ns.x)", 21, "('a',)")
    + "{% for i in range(200000) %}{% set _ = {ns.x: 1} %}{% endfor %}",
    "sort of equal texts": length("(['a' * 4000] * 2000)|sort"),
    "sort by a long attribute": "{% set ns = namespace(s='a' * 8000000) %}"
    + length("([ns] * 200000)|sort(attribute='s')"),
    "unique": length("(range(200000)|list)|unique|list"),
    "groupby": printed("messages|groupby('role')|list"),
    "dictsort": printed("dict(a=1)|dictsort(by='value')"),
    "batch": length("[1]|batch(1000000000, 0)|list"),
    "slice": length("[1]|slice(1000000000, 0)|list"),
    "xmlattr": printed("{'a': 'b'}|xmlattr"),
    "equal lists": "{% set a = range(260000)|list %}{% for i in range(260000) %}{% if a == a %}{% endif %}{% endfor %}",
    "a long path of attributes": length("(['a'] * 200000)|map(attribute='0" + ".0" * 50000 + "')|list"),
    "a list of macros with a long name": "{% macro " + "m" * 60000 + "() %}{% endmacro %}"
    + length("([" + "m" * 60000 + "] * 200000)|string"),
    "pieces of text in a block": "{% set x %}{% for i in range(200000) %}" + "{% if 1 %}{% endif %}a{{ '' }}" * 1000
    + "{% endfor %}{% endset %}",
}  # fmt: skip
CALLS = {
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block of itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop of itself": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a loop of itself, wide": "{% for i in [1] recursive %}{{ loop(range(200000)) if i else '' }}{% endfor %}",
    "calls in calls": "{% macro m() %}{{ caller() }}{% endmacro %}" + nested("{% call m() %}", "{% endcall %}", 2, "x"),
    "autoescape": "{% set x %}{% autoescape true %}" + "{{ '<' * 8000000 }}" * 1000 + "{% endautoescape %}{% endset %}",
}
SOURCES = {
    "parentheses": printed(nested("(", ")", 5000, "1")),
    "brackets": printed(nested("[", "]", 5000, "1")),
    "ifs": nested("{% if 1 %}", "{% endif %}", 3000),
    "fors": nested("{% for i in [1] %}", "{% endfor %}", 3000),
    "filter blocks": nested("{% filter upper %}", "{% endfilter %}", 800, "a"),
    "set blocks": nested("{% set a %}", "{% endset %}", 800, "a"),
    "nots": printed("not " * 60000 + "1"),
    "minuses": printed("-" * 120000 + "1"),
    "attributes": printed("a" + ".b" * 60000),
    "filters": printed("a" + "|e" * 60000),
    "tildes": printed("~".join("1" * 60000)),
    "pluses": printed("+".join("1" * 60000)),
    "ands": printed(" and ".join("1" * 25000)),
    "conditions": printed("1 if 1 else " * 10000 + "1"),
    "macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(3500)),
    "names and branches": "".join(f"{{% set v{i} = 1 %}}" for i in range(3500))
    + "".join(f"{{% if v{i} %}}{{% set v{i} = 2 %}}{{% endif %}}" for i in range(1400)),
    "an open tag": "{% for",
    "raw braces": "{% raw %}" + "{{" * 50000 + "{% endraw %}",
    "backslashes": "{{ '" + "\\\\" * 30000 + "' }}",
    "open comments": "{#" * 60000,
    "open expressions": "{{" * 60000,
    "open texts": "{% set a = '" * 10000,
    "zero bytes": "\0{{ 1 }}\0",
    "lines": "\n" * 130000 + "{{ x }}",
    "a long number": printed("9" * 5000),
    "a number of 4000 digits": printed("9" * 4000),
    "a number with underscores": printed("1_" * 5000 + "1"),
    "a long exponent": printed("1e" + "9" * 5000),
}
ESCAPES = {
    "format to a class": printed("'{0.__class__}'.format(1)"),
    "format_map": printed("'{a.__class__.__mro__}'|attr('format_map')({'a': 1})"),
    "attr": printed("''|attr('__class__')"),
    "map by attribute": printed("['']|map(attribute='__class__')|list"),
    "an attribute with a long s": printed("''.__cla\N{LATIN SMALL LETTER LONG S}s__"),
    "an item": printed("''['__class__']"),
    "cycler": printed("cycler.__init__.__globals__"),
    "joiner": printed("joiner.__init__.__globals__"),
    "namespace": printed("namespace.__init__.__globals__"),
    "range": printed("range.__globals__") + printed("range.__code__") + printed("range.__kwdefaults__"),
    "strftime_now": printed("strftime_now.__globals__"),
    "a macro": "{% macro m() %}{% endmacro %}{{ m._environment }}{{ m._func }}",
    "loop": "{% for i in [1] %}{{ loop._iterable }}{{ loop.__init__ }}{% endfor %}",
    "self": printed("self._TemplateReference__context"),
    "self by attr": "{% set x = self|attr('_TemplateReference__context') %}{{ x }}",
    "undefined": printed("nothing.__init__.__globals__"),
    "a generator": printed("([1]|map('string')).gi_frame"),
    "a generator's frames": printed("([1]|select).gi_frame.f_back.f_globals"),
    "the context": printed("self.x") + printed("caller"),
    "dict": printed("dict.__self__"),
    "import": "{% import 'x' as y %}",
    "include": "{% include '/etc/passwd' %}",
    "a namespace's insides": "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
    "a namespace's class": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a view's mapping": printed("{'a': 1}.keys().mapping"),
}  # fmt: skip
GROUPS = {
    "searches": SEARCHES, "texts": TEXTS, "formats": FORMATS, "json": JSONS, "numbers": NUMBERS,
    "collections": COLLECTIONS, "calls": CALLS, "sources": SOURCES, "escapes": ESCAPES,
}  # fmt: skip
TEMPLATES = {f"{group}: {name}": source for group, names in GROUPS.items() for name, source in names.items()}


def outcome(source: str) -> dict[str, Any]:
    """Outcome of a template: its error or the start of its text, resources used, and CPU seconds."""
    budget = Budget("t")
    begin = time.process_time()
    try:
        text = Program(source, "t").render_within(budget, VARIABLES)
        result = {"text": text[:200], "chars": len(text)}
    except FormatError as error:
        result = {"error": str(error), "memory": isinstance(error.__cause__, MemoryError)}
    except RlxError as error:
        result = {"other": repr(error)}
    return result | {"steps": budget.steps, "bytes": budget.bytes, "seconds": time.process_time() - begin}


def limit_memory(megabytes: int) -> None:
    """Limit this process to `megabytes` more memory than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    print(json.dumps({name: outcome(source) for name, source in TEMPLATES.items()}))
