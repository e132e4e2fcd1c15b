"""Parses loop kernels: statements line by line, expressions by recursive descent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from rlx.dtypes import BOOL, BY_NAME, F32, I64, DType, dtype
from rlx.errors import ParseError, nearest
from rlx.ir.source import Line
from rlx.lir.loops import (
    INFIX,
    SCALAR_OPS,
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Param,
    Place,
    Reduce,
    Ref,
    Stmt,
    Store,
    Table,
    Var,
    result_type,
)

Nested = tuple[int, Line]  # a line of a kernel, and its depth
MAX_NESTING = 400  # depth of expressions

_HEAD = re.compile(r"\((.*)\) -> (.*)")
_PARAM = re.compile(r"(\w+): (\w+)( streamed)?")
_TABLE = re.compile(r"table ([\w.]+) = (-?\d{1,18}(?:, -?\d{1,18})*)")
_FOR = re.compile(r"for (\w+) in (\w+)( vector)?( split(?: by (\d{1,18}))?)?:")
_NAMED = re.compile(r"(var )?(\w+) = (.*)")
_STORE = re.compile(r"(\w+)\[")
_CHECK = re.compile(r"check (.*) else fault (\d{1,18})")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?))(?![\w.])"
    r"|(?P<name>[A-Za-z_][\w.]*)|(?P<sign><<|>>|<=|>=|==|!=|//|[-+*/%<>&|^()\[\],:=]))"
)
_OPS = {sign: op for op, sign in INFIX.items()}
_REDUCTIONS = ("sum", "prod", "max", "min")


def parse_loops(name: str, head: str, lines: Iterable[Nested]) -> LoopKernel:
    """Parse a loop kernel from the rest of its first line and the lines after it."""
    return _Kernel(name, head, list(lines)).parse()


def parse_lets(lines: Iterable[Nested], known: Mapping[str, DType]) -> list[Let]:
    """Parse lets, one per line; `known` has the types of names defined before."""
    reader = _Kernel("lets", "() -> ", list(lines))
    reader.scopes[0].update(known)
    lets: list[Let] = []
    while reader.at < len(reader.lines):
        stmt = reader.stmt(0)
        if not isinstance(stmt, Let):
            reader.fail("only lets are allowed here")
        lets.append(stmt)
    return lets


class _Kernel:
    """Parses the lines of a kernel and tracks the names in scope."""

    def __init__(self, name: str, head: str, lines: list[Nested]) -> None:
        self.name, self.lines, self.at = name, lines, 0
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ParseError("this is not the head of a kernel", hint="kernel copy(x0: f32) -> y1: f32")
        sides = [list(_params(match[side])) for side in (1, 2)]
        params = [Param(name, kind, written=side == 1) for side in range(2) for name, kind, _ in sides[side]]
        self.params = {p.name: (i, p) for i, p in enumerate(params)}
        self.streams = tuple(name for name, _, streamed in sides[0] if streamed)
        self.tables: dict[str, Table] = {}
        self.scopes: list[dict[str, DType | None]] = [{}]  # the type of a let or variable, None for an index
        self.variables: list[set[str]] = [set()]

    def parse(self) -> LoopKernel:
        args: tuple[str, ...] = ()
        if self.lines and self.text.startswith("words "):
            args = self.words(self.text.removeprefix("words ").split(", "))
            self.at += 1
        while self.at < len(self.lines) and (table := _TABLE.fullmatch(self.text)):
            self.tables[table[1]] = Table(table[1], tuple(int(v) for v in table[2].split(",")))
            self.at += 1
        lets: list[Let] = []
        while self.at < len(self.lines) and not self.text.startswith("for "):
            stmt = self.stmt(0)
            if not isinstance(stmt, Let):
                self.fail("only lets are allowed before the loop of a kernel")
            lets.append(stmt)
        split = _FOR.fullmatch(self.text) if self.at < len(self.lines) else None
        if split is None or split[4] is None:
            self.fail("a kernel needs one outer loop marked split")
        root = self.stmt(0)
        assert isinstance(root, For)
        if self.at < len(self.lines):
            self.fail("nothing may follow the loop of a kernel")
        params = tuple(p for _, p in self.params.values())
        return LoopKernel(self.name, params, args, root, int(split[5] or 0), tuple(lets), self.streams)

    def words(self, names: list[str]) -> tuple[str, ...]:
        """Order the parameters as in the argument block; returns the names of the integer arguments after them."""
        count = len(self.params)
        if sorted(names[:count]) != sorted(self.params):
            self.fail(f"the first words are not the parameters, {', '.join(self.params)}")
        self.params = {name: (i, self.params[name][1]) for i, name in enumerate(names[:count])}
        return tuple(names[count:])

    # -- lines --
    @property
    def text(self) -> str:
        """The current line."""
        return self.lines[self.at][1].text

    def fail(self, problem: str, hint: str | None = None) -> NoReturn:
        if not self.lines:
            raise ParseError(f"kernel {self.name}: {problem}", hint=hint)
        self.lines[min(self.at, len(self.lines) - 1)][1].fail(problem, hint)

    @contextmanager
    def inside(self, **bound: DType | None) -> Iterator[None]:
        """Open the scope of a body."""
        self.scopes.append(dict(bound))
        self.variables.append(set())
        yield
        self.scopes.pop()
        self.variables.pop()

    def meaning(self, name: str) -> Expr:
        """Resolve a name to an index, a value, or else a run-time argument."""
        for scope in reversed(self.scopes):
            if name in scope:
                kind = scope[name]
                return Index(name) if kind is None else Ref(name, kind)
        return Arg(name)

    def extent(self, text: str) -> int | Arg | Ref:
        if text.isdecimal():
            return int(text)
        extent = self.meaning(text)
        if not isinstance(extent, Arg | Ref):
            self.fail(f"{text!r} is an index; an extent is a number, an argument or a value")
        return extent

    # -- statements --
    def stmt(self, depth: int) -> Stmt:
        text = self.text
        if loop := _FOR.fullmatch(text):
            return self.loop(loop, depth)
        if check := _CHECK.fullmatch(text):
            condition = _Expressions(self, check[1]).only()
            self.at += 1
            return Check(condition, int(check[2]))
        if named := _NAMED.fullmatch(text):
            return self.named(named[1] is not None, named[2], named[3])
        if (store := _STORE.match(text)) and store[1] in self.params:
            reader = _Expressions(self, text[store.end() :])
            place = reader.place()
            reader.take("=")
            value = reader.only()
            self.at += 1
            return Store(self.params[store[1]][0], place, value)
        self.fail("this is not a statement", hint="for i in n:, name = value, var name = value, y[i] = value, check")

    def named(self, declares: bool, name: str, text: str) -> Let | Var | Assign:
        value = _Expressions(self, text).only()
        self.at += 1
        if not declares and any(name in names for names in self.variables):
            return Assign(name, value)
        self.scopes[-1][name] = value.dtype
        if declares:
            self.variables[-1].add(name)
            return Var(name, value)
        return Let(name, value)

    def loop(self, head: re.Match[str], depth: int) -> For:
        index, vector = head[1], head[3] is not None
        extent = self.extent(head[2])
        self.at += 1
        body: list[Stmt] = []
        with self.inside(**{index: None}):
            while self.at < len(self.lines) and self.lines[self.at][0] > depth:
                body.append(self.stmt(depth + 1))
        return For(index, extent, tuple(body), vector)


def _params(text: str) -> Iterator[tuple[str, DType, bool]]:
    """Names, types, and whether they are streamed."""
    for part in filter(None, text.split(", ")):
        match = _PARAM.fullmatch(part)
        if match is None:
            raise ParseError(f"{part!r} is not a parameter such as x0: f32")
        yield match[1], dtype(match[2]), match[3] is not None


class _Expressions:
    """Parses the expressions of one line."""

    def __init__(self, kernel: _Kernel, text: str) -> None:
        self.kernel, self.depth = kernel, 0
        self.tokens: list[tuple[str, str]] = []
        end = 0
        while end < len(text.rstrip()):
            token = _TOKEN.match(text, end)
            if token is None:
                kernel.fail(f"{text[end : end + 20]!r} is not part of an expression")
            self.tokens.append((str(token.lastgroup), token[str(token.lastgroup)]))
            end = token.end()
        self.tokens.append(("end", "the end of the line"))
        self.at = 0

    def take(self, *wanted: str) -> str:
        """Consume the next token, which must be one of `wanted`, if any are given."""
        kind, token = self.tokens[self.at]
        if kind == "end" or (wanted and token not in wanted):
            self.kernel.fail(f"expected {' or '.join(map(repr, wanted)) or 'an expression'}, found {token!r}")
        self.at += 1
        return token

    def follows(self, token: str) -> bool:
        return self.tokens[self.at] == ("sign", token)

    def only(self) -> Expr:
        """An expression that extends to the end of the line."""
        expr = self.expr()
        if self.tokens[self.at][0] != "end":
            self.kernel.fail(f"{self.tokens[self.at][1]!r} follows the expression")
        return expr

    def expr(self) -> Expr:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.kernel.fail(f"expressions are nested more than {MAX_NESTING} deep")
        kind, token = self.tokens[self.at]
        self.take()
        expr = self.number(token) if kind == "number" else self.group() if token == "(" else self.word(kind, token)
        self.depth -= 1
        return expr

    def group(self) -> Expr:
        """The rest of a parenthesised expression: an infix operation or a choice."""
        first = self.expr()
        if self.tokens[self.at] == ("name", "if"):
            self.take("if")
            condition = self.expr()
            self.take("else")
            expr: Expr = Choose(condition, first, self.expr())
        else:
            op = _OPS[self.take(*_OPS)]
            args = first, self.expr()
            expr = Apply(op, args, result_type(op, args))
        self.take(")")
        return expr

    def number(self, token: str) -> Const:
        value: int | float = int(token) if re.fullmatch(r"-?[0-9]+", token) else float(token)
        return Const(value, self.type() or (I64 if isinstance(value, int) else F32))

    def type(self) -> DType | None:
        """The type after a colon, if there is one."""
        if not self.follows(":"):
            return None
        self.take(":")
        return dtype(self.take())

    def word(self, kind: str, name: str) -> Expr:
        if kind != "name":
            self.kernel.fail(f"expected an expression, found {name!r}")
        if name in ("true", "false"):
            return Const(name == "true", self.type() or BOOL)
        if self.follows("["):
            return self.element(name)
        if self.follows("(") or (self.follows(":") and name in SCALAR_OPS):
            return self.call(name)
        return self.kernel.meaning(name)

    def element(self, name: str) -> Expr:
        self.take("[")
        if name in self.kernel.params:
            number, param = self.kernel.params[name]
            return Load(number, self.place(), param.dtype)
        if name not in self.kernel.tables:
            known = (*self.kernel.params, *self.kernel.tables)
            self.kernel.fail(f"{name!r} is neither a parameter nor a table", hint=nearest(name, known))
        index = self.expr()
        self.take("]")
        return Lookup(self.kernel.tables[name], index)

    def place(self) -> Place:
        """The terms of an address, up to the closing bracket."""
        terms: list[tuple[Expr, int | Arg]] = []
        while not self.follows("]"):
            if terms:
                self.take("+")
            index = self.expr()
            stride: int | Arg = 1
            if self.follows("*"):
                self.take("*")
                factor = self.take()
                stride = int(factor) if re.fullmatch(r"-?[0-9]+", factor) else Arg(factor)
            terms.append((index, stride))
        self.take("]")
        return tuple(terms)

    def call(self, name: str) -> Expr:
        dtype_override = self.type()
        self.take("(")
        if name in _REDUCTIONS and self.tokens[self.at + 1] == ("name", "in"):
            index = self.take()
            self.take("in")
            extent = self.kernel.extent(self.take())
            self.take(":")
            with self.kernel.inside(**{index: None}):
                value = self.expr()
            self.take(")")
            return Reduce(name, index, extent, value)
        args = [self.expr()]
        while self.follows(","):
            self.take(",")
            args.append(self.expr())
        self.take(")")
        if name in BY_NAME and len(args) == 1:
            return Apply("cast", tuple(args), BY_NAME[name])
        if SCALAR_OPS.get(name) != len(args):
            self.kernel.fail(f"no operation {name!r} takes {len(args)} operands", hint=nearest(name, SCALAR_OPS))
        return Apply(name, tuple(args), dtype_override or result_type(name, args))
