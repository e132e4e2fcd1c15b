"""Source text for parsers: strings, comments, brackets and lines, for graphs (`ir/text.py`) and LIR (`lir/parse.py`).

Positions are offsets, so errors can name the line. Brackets are matched once and parsers skip over them, so parsing is
linear in the text, however deeply nested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field
from typing import NoReturn

from rlx.errors import ParseError, RlxError, shortened
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property

MAX_NESTING = 200  # nested brackets of all kinds
STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
OPENING = r"[(\[{]"

_COMMENT = re.compile(rf'({STRING})|#[^\n]*|"')
_BRACKET = re.compile(rf"{STRING}|[][(){{}}]")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SEPARATORS = {c: re.compile(rf"{STRING}|{OPENING}|{c}") for c in ",;"}
_SPACE = re.compile(r"\s*")

Span = tuple[int, int]


class Source:
    """A text without its comments (from `#` to the end of a line); `kind` is its name in errors."""

    def __init__(self, text: str, kind: str, *, of: tuple[Source, int] | None = None) -> None:
        self.kind, self.of = kind, of
        self.text = text
        self.text = _COMMENT.sub(self._without_comment, text)  # line numbers stay

    def _without_comment(self, match: re.Match[str]) -> str:
        if match[0] == '"':
            self.fail(match.start(), f"{self.text[match.start() : match.start() + 40]!r} is not a string")
        return match[1] or ""

    def part(self, start: int, stop: int) -> Source:
        """A part of the text, with its own bracket matching."""
        return Source(self.text[start:stop], self.kind, of=(self, start))

    # -- errors -------------------------------------------------------------------------------------------------------
    def line_number(self, at: int) -> int:
        if self.of is not None:
            parent, start = self.of
            return parent.line_number(start + at)
        return self.text.count("\n", 0, at) + 1

    def fail(self, at: int, problem: str, *, hint: str | None = None, cause: RlxError | None = None) -> NoReturn:
        shown = (self.text[at : at + 200].lstrip().splitlines() or [""])[0]
        where = f"{self.kind}: line {self.line_number(at)}"
        error = ParseError(f"{where}: {shortened(problem, 400)}", notes=[f"in: {shown[:100]}"], hint=hint)
        for note in cause.notes if cause else ():
            error.add_note(note)
        error.hint = cause.hint if cause else hint
        raise error from cause

    @contextmanager
    def located(self, at: int) -> Iterator[None]:
        """Errors inside name the line of `at`, unless they already name one."""
        try:
            yield
        except RlxError as error:
            if isinstance(error, ParseError) and str(error).startswith(f"{self.kind}: line"):
                raise
            self.fail(at, str(error), cause=error)

    # -- brackets -----------------------------------------------------------------------------------------------------
    @cached_property
    def closing(self) -> dict[int, int]:
        """Maps each bracket to its closing one."""
        closing: dict[int, int] = {}
        opened: list[int] = []
        for mark in _BRACKET.finditer(self.text):
            at, c = mark.start(), mark[0]
            if c in _CLOSING:
                opened.append(at)
                if len(opened) > MAX_NESTING:
                    self.fail(at, f"bodies or lists are nested too deeply, in more than {MAX_NESTING} brackets")
            elif c in ")]}":
                if not opened or c != _CLOSING[self.text[opened[-1]]]:
                    self.fail(at, f"{c!r} closes nothing")
                closing[opened.pop()] = at
        if opened:
            names = {"(": "parenthesis", "[": "bracket", "{": "brace"}
            self.fail(opened[-1], f"a closing {names[self.text[opened[-1]]]} is missing")
        return closing

    def marks(self, pattern: re.Pattern[str], start: int, stop: int) -> Iterator[re.Match[str]]:
        """Matches of a pattern (of strings, opening brackets and others) outside strings and brackets."""
        while mark := pattern.search(self.text, start, stop):
            start = mark.end()
            if mark[0] in _CLOSING:
                start = self.closing[mark.start()] + 1
            elif mark[0][0] != '"':
                yield mark

    def trimmed(self, start: int, stop: int) -> Span:
        start = _SPACE.match(self.text, start, stop).end()  # type: ignore[union-attr]  # matches anything
        while stop > start and self.text[stop - 1].isspace():
            stop -= 1
        return start, stop

    def split(self, start: int, stop: int, separator: str = ",") -> list[Span]:
        """Splits at separators outside brackets and strings; empty text has no parts."""
        parts: list[Span] = []
        for mark in self.marks(_SEPARATORS[separator], start, stop):
            parts.append(self.trimmed(start, mark.start()))
            start = mark.end()
        first, last = self.trimmed(start, stop)
        return [*parts, (first, last)] if parts or first < last else []

    # -- lines --------------------------------------------------------------------------------------------------------
    def lines(self) -> list[Line]:
        """The unindented lines, each with its indented lines."""
        top: list[Line] = []
        opened: list[tuple[int, list[Line]]] = [(0, top)]
        begin = 0
        for row in self.text.splitlines(keepends=True):
            start, stop = self.trimmed(begin, begin + len(row))
            depth, begin = start - begin, begin + len(row)
            if start == stop:
                continue
            line = Line(self, start, stop)
            while depth < opened[-1][0]:
                opened.pop()
            if depth > opened[-1][0]:
                if not opened[-1][1]:
                    line.fail("is indented below nothing")
                opened.append((depth, opened[-1][1][-1].inside))
            opened[-1][1].append(line)
        return top


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a source, or a part of it, and the lines indented below it."""

    source: Source
    start: int
    stop: int
    inside: list[Line] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.stop]

    def part(self, span: Span) -> Line:
        """A part of the line, such as the span of a match group."""
        return Line(self.source, *span)

    def match(self, pattern: re.Pattern[str], noun: str) -> re.Match[str]:
        """Matches a pattern against the full line."""
        result = pattern.fullmatch(self.source.text, self.start, self.stop)
        if result is None:
            self.fail(f"this is not {noun}")
        return result

    def fail(self, problem: str, hint: str | None = None) -> NoReturn:
        self.source.fail(self.start, problem, hint=hint)

    def located(self) -> AbstractContextManager[None]:
        """Errors inside name the line, unless they already name one."""
        return self.source.located(self.start)


def string(text: str) -> str:
    """Parses a quoted string."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, str):
        raise ParseError(f"{text[:40]!r} is not a string")
    return parsed
