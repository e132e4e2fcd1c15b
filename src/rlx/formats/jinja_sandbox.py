"""Sandboxed Jinja for chat templates, which are untrusted programs: no file access, no Python internals, bounded cost.

Built on Jinja's immutable sandbox with the settings of transformers. A rendering stays within a budget of bytes, steps
and seconds (`jinja_budget.py`) or raises FormatError. Every operation that repeats, multiplies or scans a value is
charged before it runs: loops, comparisons, slices, keys, `~` and literals are rewritten in the template's AST;
operators, calls and block joins use Jinja's hooks (`jinja_costs.py`); filters and tests are wrapped
(`jinja_filters.py`); and constant folding is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from rlx.errors import FormatError, RlxError, shortened
from rlx.formats import jinja_budget
from rlx.formats.jinja_budget import MAX_BITS, MAX_DEPTH, VIEWS, Budget, current, width
from rlx.formats.jinja_costs import Cost, charge_binary, formatter, join_texts, methods_of
from rlx.formats.jinja_filters import TEMPLATE_FILTERS, TEMPLATE_GLOBALS, TEMPLATE_TESTS, Steps

MAX_TEMPLATE_CHARS = 1 << 17
MAX_TOKENS = 1 << 14  # compile time is linear in them, for some templates quadratic


class Program:
    """A checked and compiled template. `reads_parts`: whether it handles message content parts itself."""

    def __init__(self, source: str, where: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise FormatError(f"{where}: expected at most {MAX_TEMPLATE_CHARS} characters, found {len(source)}")
        self.where = where
        try:
            tree = _ENVIRONMENT.parse(source)
            _reject_unsafe(tree, where)
            self.reads_parts = _reads_parts(tree)
            self._template = _ENVIRONMENT.from_string(_Bounded().visit(tree))
        except TemplateSyntaxError as error:
            raise FormatError(f"{where}, line {error.lineno}: {_short_message(error.message)}") from error
        except (RecursionError, MemoryError) as error:
            raise FormatError(f"{where}: nested too deeply") from error
        except (TemplateError, SyntaxError, ValueError, OverflowError) as error:
            raise FormatError(f"{where}: {_short_message(error)}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """Render the template with variables, which must be plain data."""
        return self.render_within(Budget(self.where), variables)

    def render_within(self, budget: Budget, variables: dict[str, Any]) -> str:
        token = jinja_budget.start(budget)
        try:
            budget.check_variables(variables)
            pieces = []
            for piece in self._template.root_render_func(self._template.new_context(variables)):
                budget.write(piece)
                pieces.append(piece)
            return "".join(pieces)
        except RlxError:
            raise
        except RecursionError as error:
            raise FormatError(f"{self.where}: calls itself without end") from error
        except Exception as error:  # raised by an operator, a filter or a method
            raise FormatError(f"{self.where}: {type(error).__name__}: {_short_message(error)}") from error
        finally:
            jinja_budget.stop(token)


def _short_message(error: object) -> str:
    return shortened(str(error), 300)


# -- the template's AST ----------------------------------------------------------------------------------------------
class _Bounded(NodeTransformer):
    """Route loops, comparisons, slices, computed keys, `~` and literals through filters that charge for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        pieces = _pieces(node.body) + _pieces(node.else_)
        self.generic_visit(node)
        node.iter = _apply_filter("rlx_steps", node.iter, nodes.Const(pieces))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _apply_filter("rlx_concat", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        rest = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _apply_filter("rlx_compare", node.expr, *rest)

    def visit_List(self, node: nodes.Literal) -> nodes.Expr:
        self.generic_visit(node)
        target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if target else _apply_filter("rlx_literal", node)

    visit_Tuple = visit_List

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        for pair in node.items:
            pair.key = _key(pair.key)
        return self.visit_List(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _key(node.arg)
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _apply_filter("rlx_slice", node.node, *(bound or nodes.Const(None) for bound in bounds))


def _apply_filter(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _key(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _apply_filter("rlx_key", node)


def _pieces(body: Iterable[nodes.Node]) -> int:
    """Number of text pieces that one pass over the nodes writes, excluding inner loops."""
    count = 0
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, nodes.Output):
            count += len(node.nodes)
        elif not isinstance(node, (nodes.For, nodes.Expr)):
            stack.extend(node.iter_child_nodes())
    return count


_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def _reject_unsafe(tree: nodes.Template, where: str) -> None:
    for node in tree.find_all((*_OTHER_FILES, nodes.EvalContextModifier, nodes.Const)):
        if isinstance(node, _OTHER_FILES):
            raise FormatError(f"{where}, line {node.lineno}: {type(node).__name__.lower()} of another template")
        if isinstance(node, nodes.EvalContextModifier):
            raise FormatError(f"{where}, line {node.lineno}: autoescape, which prompts have no use for")
        if isinstance(node, nodes.Const) and type(node.value) is int and node.value.bit_length() > MAX_BITS:
            raise FormatError(f"{where}, line {node.lineno}: expected numbers of at most {MAX_BITS} bits")


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template reads `part.text` or `part['text']`."""
    by_name = (node.attr == "text" for node in tree.find_all(nodes.Getattr))
    by_key = (isinstance(n.arg, nodes.Const) and n.arg.value == "text" for n in tree.find_all(nodes.Getitem))
    return any(by_name) or any(by_key)


# -- the environment -------------------------------------------------------------------------------------------------
def _join_pieces(pieces: Iterable[str]) -> str:
    """Join the pieces of a block, macro or call into its text."""
    parts = list(pieces)
    current().make_text(sum(map(len, parts)), max(map(width, parts), default=1))
    return "".join(parts)


_SCOPES = ("_loop_vars", "_block_vars")  # passed by Jinja along with the arguments of a call


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(_join_pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        methods = methods_of(obj)
        return methods is None or attr in methods or not (callable(value) or isinstance(obj, VIEWS))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ != "format":
            return None
        return formatter(self, value.__self__) if isinstance(value.__self__, str) else None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        charge_binary(budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        charged = operator != "%" and not isinstance(result, Markup)  # escaping and formatting can produce any length
        return budget.check(result) if charged else budget.charge_result(result)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        values = (*args, *(value for name, value in kwargs.items() if name not in _SCOPES))
        budget.check_together(values)
        owner = getattr(obj, "__self__", None)
        methods = None if owner is None else methods_of(owner)
        if methods is not None:
            return self._call_method(context, obj, methods[obj.__name__], values, args, kwargs)
        budget.depth += 1
        if budget.depth > MAX_DEPTH:
            raise budget.exceeded(f"{MAX_DEPTH} nested calls")
        try:
            if isinstance(obj, LoopContext) and isinstance(obj._iterable, Steps) and len(args) == 1:
                args = (Steps(args[0], obj._iterable.pieces),)
            result = super().call(context, obj, *args, **kwargs)
        finally:
            budget.depth -= 1
        written = isinstance(obj, (Macro, BlockReference, LoopContext))  # charged when their text is joined
        return result if written else budget.charge_result(result)

    def _call_method(
        self, context: Context, method: Any, cost: Cost, values: tuple[Any, ...], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        owner = method.__self__
        if isinstance(owner, str) and method.__name__ == "join" and len(values) == 1:
            return join_texts(owner, values[0])
        cost(current(), owner, values)
        result = super().call(context, method, *args, **kwargs)
        return result if result is owner else current().charge_result(result)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Length(Extension):
    """Limits the number of template tokens; literal text is free."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count == MAX_TOKENS:
                raise TemplateSyntaxError(f"expected at most {MAX_TOKENS} tokens", token.lineno)
            yield token


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Jinja's hook for every printed value. Taking the context keeps Jinja from folding constants."""
    current().step()
    return value if isinstance(value, str) else current().text(value)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, _Length, loopcontrols],
        finalize=_finalize,
        optimized=False,
    )
    environment.filters = dict(TEMPLATE_FILTERS)
    environment.tests = dict(TEMPLATE_TESTS)
    del environment.globals["lipsum"]  # random text
    environment.globals.update(TEMPLATE_GLOBALS)
    return environment


_ENVIRONMENT = _environment()
