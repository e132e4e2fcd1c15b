"""Random templates from a grammar of hostile expressions and from mutated real ones: each renders within its budget or
raises the typed error.

`python tests/formats/fuzz_templates.py FIRST COUNT MEGABYTES` runs cases with a memory limit and counts outcomes.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter

from hostile_templates import TEMPLATES as HOSTILE
from hostile_templates import limit_memory
from test_chat import CONVERSATIONS, TOOLS
from test_chat import TEMPLATES as REAL

from rlx.errors import FormatError, RequestError
from rlx.formats.jinja_budget import MAX_BYTES, MAX_CHARS, MAX_STEPS, Budget
from rlx.formats.jinja_sandbox import Program

NUMBERS = ("0", "1", "2", "-1", "3", "7", "16", "64", "255", "1000", "70000", "4000000", "1000000000", "2**63", "2**31",
           "-2**60", "0.5", "1e308", "-1e-300", "10**9", "true", "none", "loop.index", "messages|length")  # fmt: skip
WORDS = ("''", "'a'", "'ab'", "' '", "'\\n'", "'\\r\\x0b\\u2028'", "'<&>'", "'%s'", "'%5d'", "'%(a)s'", "'%%'",
         "'%.3f'", "'{}'", "'{0}{0}'", "'{a}'", "'{:>9}'", "'{0[0]}'", "'{!r}'", "'é'", "'\U0001f600'", "'\\ud800'",
         "'ΐ'", "'İ'", "'0x1f'", "'1e400'", "'12'", "'role'", "'a.b'", "messages[0].content", "messages[0].role", "x",
         "ns.s", "'%((a))900d'", "'{0[}]:900}'")  # fmt: skip
TEXT_FILTERS = ("upper", "lower", "title", "capitalize", "trim", "trim('a')", "e", "escape", "forceescape", "urlencode",
                "striptags", "string", "safe", "reverse", "truncate(9)", "indent", "indent(40, true, true)", "tojson",
                "replace('a', 'bb')", "default('z')", "tojson(ensure_ascii=true)", "sort|join",
                "list|string")  # fmt: skip
LIST_FILTERS = ("list", "length", "first", "last", "join", "join('-')", "sort", "sort(reverse=true)", "unique|list",
                "sum", "min", "max", "reverse|list", "map('string')|list", "map('upper')|join", "select|list",
                "reject|list", "select('string')|list", "tojson", "tojson(indent=2)", "string",
                "tojson(indent=60, sort_keys=true)",
                "tojson(separators=(',', ': '))", "map(attribute='0')|list",
                "selectattr('role', 'equalto', 'user')|list",
                "groupby('role')|list", "batch(3)|list", "map('list')|list", "random", "pprint")  # fmt: skip
TEXT_METHODS = ("upper()", "lower()", "title()", "strip()", "strip('ab')", "replace('', 'xy')", "replace('a', '')",
                "casefold()", "swapcase()", "removeprefix('a')", "join(['a', 'b'])", "capitalize()")  # fmt: skip
METHODS = ("split()", "split('a')", "rsplit('a', 1)", "splitlines()", "partition('a')", "rpartition('a')", "count('a')",
           "find('ab')", "rfind('ab')", "index('a')", "startswith('a')", "endswith(('a', 'b'))", "isdigit()",
           "center(9)", "encode()", "zfill(99999999)", "format_map({})", "__class__", "items()", "keys()",
           "get('a')", "append(1)", "copy()")  # fmt: skip
SEARCHES = ("find", "rfind", "count", "strip", "split", "rsplit", "partition")
NUMBER_FILTERS = ("abs", "round", "round(2)", "round(50, 'ceil')", "int", "float", "string", "tojson", "default(1)")
TESTS = ("defined", "none", "string", "number", "odd", "even", "divisibleby(3)", "iterable", "mapping", "sequence",
         "eq(1)", "in([1, 'a'])", "lower", "upper", "sameas(none)", "lt(3)", "callable", "true", "escaped")  # fmt: skip


class Grammar:
    """Random source; expressions mostly have the type that their position needs, so that many render."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, *ways: str) -> str:
        return self.rng.choice(ways)

    def expression(self, depth: int) -> str:
        return self.rng.choice((self.text, self.text, self.number, self.values, self.mapping, self.truth))(depth)

    def text(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.15:
            return rng.choice(WORDS)
        deeper = depth - 1
        return rng.choice((
            lambda: f"({self.text(deeper)} ~ {self.expression(deeper)})",
            lambda: f"({self.text(deeper)} + {self.text(deeper)})",
            lambda: f"({self.text(deeper)} * {self.number(deeper)})",
            lambda: self.percent(deeper),
            lambda: f"({self.text(deeper)})|{rng.choice(TEXT_FILTERS)}",
            lambda: f"({self.text(deeper)}).{rng.choice(TEXT_METHODS)}",
            lambda: f"({self.text(deeper)}).{rng.choice(METHODS)}|string",
            lambda: f"({self.text(deeper)}).format({self.expression(deeper)}, a={self.expression(deeper)})",
            lambda: f"({self.text(deeper)})|replace({self.text(deeper)}, {self.text(deeper)})",
            lambda: f"({self.text(deeper)}).{rng.choice(SEARCHES)}({self.text(deeper)})|string",
            lambda: f"({self.text(deeper)})|indent({self.number(deeper)}, true)",
            lambda: f"({self.values(deeper)})|join({self.text(deeper)})",
            lambda: f"({self.values(deeper)})|tojson(indent={self.number(0)})",
            lambda: f"({self.text(deeper)})[{self.number(0)}:{self.number(0)}]",
            lambda: f"({self.text(deeper)} if {self.truth(deeper)} else {self.text(deeper)})",
            lambda: f"m({self.expression(deeper)})",
        ))()  # fmt: skip

    def percent(self, depth: int) -> str:
        """A format string with values, some of which do not fit."""
        width = self.pick("", "5", "-9", "+", ".3", "900", "99999999", "*")
        return self.pick(
            f"('%{width}s' % ({self.expression(depth)},))",
            f"(('%{width}s' * {self.number(0)}) % {self.text(depth)})",
            f"('%{width}d' % {self.number(depth)})",
            f"('%(a){width}s%((b)){width}r' % {{'a': {self.expression(depth)}, '(b)': {self.expression(depth)}}})",
            f"('%{width}s'|format({self.expression(depth)}))",
            f"({self.text(depth)} % {self.expression(depth)})",
        )

    def number(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.4:
            return rng.choice(NUMBERS[:9] if rng.random() < 0.7 else NUMBERS)
        deeper = depth - 1
        return rng.choice((
            lambda: f"({self.number(deeper)} {self.pick('+', '-', '*', '//', '%', '/', '**')} {self.number(deeper)})",
            lambda: f"({self.number(deeper)})|{rng.choice(NUMBER_FILTERS)}",
            lambda: f"({self.text(deeper)})|{self.pick('length', 'int', 'float', 'int(base=36)', 'wordcount')}",
            lambda: f"({self.values(deeper)})|{self.pick('length', 'sum', 'min', 'max')}",
            lambda: f"(-{self.number(deeper)})",
        ))()  # fmt: skip

    def values(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.2:
            return self.pick(
                "messages", "[]", "[1, 2]", "('a', 'b')", "range(9)", "range(70000)", "ns.l", "[x]", "'abc'"
            )
        deeper = depth - 1
        return rng.choice((
            lambda: f"[{self.expression(deeper)}, {self.expression(deeper)}]",
            lambda: f"({self.expression(deeper)}, {self.expression(deeper)})",
            lambda: f"({self.values(deeper)} + {self.values(deeper)})",
            lambda: f"({self.values(deeper)} * {self.number(deeper)})",
            lambda: f"({self.values(deeper)})|{rng.choice(LIST_FILTERS)}",
            lambda: f"({self.mapping(deeper)}).{self.pick('items()', 'keys()', 'values()')}|list",
            lambda: f"({self.mapping(deeper)})|{self.pick('dictsort', 'items|list', 'list', 'tojson', 'length')}",
            lambda: f"range({self.number(0)}, {self.number(deeper)}, {self.number(0)})|list",
            lambda: f"({self.text(deeper)}).split({self.pick('', self.text(deeper))})",
            lambda: f"({self.values(deeper)})[{self.number(0)}:{self.number(0)}:{self.pick('', '2', '-1')}]",
            lambda: f"({self.values(deeper)})|map({self.pick(*map(repr, ('upper', 'string', 'list', 'tojson')))})|list",
        ))()  # fmt: skip

    def mapping(self, depth: int) -> str:
        deeper = depth - 1
        if depth <= 0:
            return self.pick("{}", "{'a': 1}", "messages[0]", "dict(a=x)")
        key = self.pick("'a'", "'content'", self.text(deeper), self.number(deeper), self.expression(deeper))
        return self.pick(
            f"{{{key}: {self.expression(deeper)}, 'b': {self.expression(deeper)}}}",
            f"dict(a={self.expression(deeper)})", f"dict({self.values(deeper)})", "messages[0]",
        )  # fmt: skip

    def truth(self, depth: int) -> str:
        if depth <= 0:
            return self.pick("true", "false", "x is defined", "loop is defined", "ns.s")
        deeper = depth - 1
        compared = self.pick("==", "!=", "<", "<=", ">", "in", "not in")
        return self.pick(
            f"({self.expression(deeper)} {compared} {self.expression(deeper)})",
            f"({self.text(deeper)} in {self.text(deeper)})",
            f"({self.number(deeper)} < {self.number(deeper)} <= {self.number(deeper)})",
            f"({self.expression(deeper)} is {self.rng.choice(TESTS)})",
            f"({self.truth(deeper)} {self.pick('and', 'or')} not {self.truth(deeper)})",
        )

    def statement(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.4:
            return "{{ " + self.expression(rng.choice((1, 2, 2, 3, 4))) + " }}"
        inner = "".join(self.statement(depth - 1) for _ in range(rng.choice((1, 1, 2))))
        times = rng.choice((1, 1, 2, 2, 3, 3, 9, 9, 9, 30, 30, 70, 1000, 20000))
        loop = f"{{% for i in range({times}) %}}"
        stop = f"{{% if loop.index > {times} %}}{{% break %}}{{% endif %}}{{% endfor %}}"
        return rng.choice((
            lambda: f"{{% for i in {self.values(2)} %}}{inner}{stop}",
            lambda: f"{loop}{{% set ns.s = {self.text(2)} %}}{inner}{{% endfor %}}",
            lambda: f"{loop}{{% set ns.l = {self.values(2)} %}}{{% endfor %}}{inner}",
            lambda: f"{loop}{{% set ns.l = [ns.l, ns.s] %}}{{% endfor %}}{inner}",
            lambda: f"{loop}{{% set ns.s = ns.s ~ {self.text(1)} ~ ns.s %}}{{% endfor %}}{inner}",
            lambda: "{% for i in [[1, [2]]] recursive %}{{ loop(i) if i is iterable else i }}" + inner + "{% endfor %}",
            lambda: f"{{% if {self.truth(2)} %}}{inner}{{% else %}}{self.statement(depth - 1)}{{% endif %}}",
            lambda: f"{{% set x = {self.expression(3)} %}}{inner}",
            lambda: f"{{% set x %}}{inner}{{% endset %}}{{{{ x }}}}",
            lambda: f"{{% filter {self.pick('upper', 'title', 'indent(3)', 'trim')} %}}{inner}{{% endfilter %}}",
            lambda: f"{{% macro m(a, b=1) %}}{inner}{{{{ a }}}}{{{{ varargs }}}}{{% endmacro %}}{{{{ m(x, 2, 3) }}}}",
            lambda: f"{{{{ r({times}) }}}}{inner}",
            lambda: f"{{% call c({self.expression(2)}) %}}{inner}{{% endcall %}}",
            lambda: f"{{% with x = {self.expression(2)} %}}{inner}{{% endwith %}}",
        ))()  # fmt: skip

    def template(self) -> str:
        start = "{% set ns = namespace(s='ab', l=[1]) %}{% set x = 'abc' %}{% macro m(a) %}{{ a }}{% endmacro %}"
        start += "{% macro c(a) %}{{ caller() }}{{ a }}{% endmacro %}"
        start += "{% macro r(n) %}{{ r(n - 1) ~ r(n - 2) if n > 0 }}{{ n }}{% endmacro %}"
        return start + "".join(self.statement(3) for _ in range(self.rng.choice((1, 1, 2, 3))))


_VALUES = re.compile(r"message(?:\.\w+|\['\w+'\]|\[\"\w+\"\])|%\}|'[^'{}%]*'")


def mutated(rng: random.Random, source: str) -> str:
    """A template with pieces removed, doubled, swapped, or replaced by expressions."""
    grammar = Grammar(rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = re.findall(r"\w+|\s+|[^\w\s]", source)
        at, to = rng.randrange(len(words)), rng.randrange(len(words))
        way = rng.randrange(12)
        if way == 0:
            del words[at : at + rng.choice((1, 2, 9))]
        elif way == 1:
            words[at:at] = words[to : to + rng.choice((1, 5, 40))] * rng.choice((1, 2, 50))
        elif way == 2:
            words[at], words[to] = words[to], words[at]
        elif way == 3:
            words[at] = rng.choice((*NUMBERS, *WORDS, "{%", "%}", "{{", "}}", "|", "(", ")", "[", "loop", "recursive"))
        source = "".join(words)
        if way > 3:
            places = list(_VALUES.finditer(source)) or [re.match("", source)]
            place = rng.choice(places)
            expression = grammar.expression(rng.choice((1, 2, 3)))
            by = "%}{{ " + expression + " }}" if place[0] == "%}" else f"({expression})"
            source = source[: place.start()] + by + source[place.end() :]
    return source


def source_of(case: int) -> str:
    rng = random.Random(f"template {case}")
    match case % 4:
        case 0:
            return mutated(rng, rng.choice(list(REAL.values())))
        case 1 if rng.random() < 0.1:
            return mutated(rng, rng.choice(list(HOSTILE.values())))
        case _:
            return Grammar(rng).template()


def run(cases: range) -> Counter[str]:
    """Count rendered and rejected templates; other outcomes raise with the case number."""
    outcomes: Counter[str] = Counter()
    talks = list(CONVERSATIONS.values())
    for case in cases:
        variables = {"messages": talks[case % len(talks)], "tools": TOOLS, "bos_token": "<s>", "eos_token": "</s>"}
        budget = Budget("t")
        try:
            text = Program(source_of(case), "t").render_within(budget, variables | {"add_generation_prompt": True})
            assert len(text) <= MAX_CHARS
            outcomes["rendered"] += 1
        except (FormatError, RequestError) as error:
            assert len(str(error)) <= 500, f"case {case}: a message of {len(str(error))} characters"
            assert not isinstance(error.__cause__, MemoryError), f"case {case}: {error}"
            outcomes["over budget" if "exceeds" in str(error) else "refused"] += 1
        except BaseException as error:
            error.add_note(f"case {case}")
            raise
        assert budget.steps <= MAX_STEPS and budget.bytes <= MAX_BYTES, f"case {case}"
    return outcomes


if __name__ == "__main__":
    first, count, megabytes = (int(arg) for arg in sys.argv[1:])
    limit_memory(megabytes)
    print(json.dumps(run(range(first, first + count))))
