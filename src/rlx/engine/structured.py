"""Structured output: answers that follow a JSON schema, a regular expression, a list of choices or a grammar.

llguidance turns each of them into one grammar form and says which tokens may follow; the sampler picks among those. A
schema word that it cannot enforce is an error that names the word, never a wish. Thinking models think first: the
grammar begins after the end of their thoughts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.engine.counters import GrammarTimes, Histogram
from rlx.engine.sampler import short_repr
from rlx.engine.thinking import is_thinking, tail_of
from rlx.errors import CapabilityError, RequestError, shortened
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.formats.tokenizer import Tokenizer
from rlx.sampling import mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KINDS = ("schema", "regex", "choice", "grammar")
MAX_GRAMMAR = 1 << 16  # characters of a schema or grammar
MAX_CHOICES = 4096
MAX_DEPTH = 64  # of a schema
MAX_REGEX_DEPTH = 256  # of parentheses in a regular expression or a grammar
CACHED = 64  # compiled grammars, and
CACHED_CHARS = 1 << 21  # characters of their text
LEXER_FUEL = 150_000  # of llguidance, whose default is 1,000,000: bounds a mask of any pattern to about 30 ms
NESTED = "grammar"  # name of a request's own grammar
MESSAGE = 300  # characters of an error of llguidance
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Structure:
    """A form that answers must have: one of `KINDS`, and its text. Equal structures share a compiled grammar."""

    kind: str
    text: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Structure | None:
        """From the keywords `schema`, `regex`, `choice` and `grammar`, of which at most one is used."""
        used = [name for name in KINDS if settings.get(name) is not None]
        if not used:
            return None
        if len(used) > 1:
            raise RequestError(f"structured output: {used[0]} and {used[1]} exclude each other")
        name = used[0]
        checks: dict[str, Callable[[Any], str]] = {
            "schema": schema_text,
            "regex": _regex_text,
            "choice": _choice_text,
            "grammar": _grammar_text,
        }
        structure = cls(name, checks[name](settings[name]))
        if len(structure.text) > MAX_GRAMMAR:
            raise RequestError(
                f"{name}: {len(structure.text):,} characters, the limit is {MAX_GRAMMAR:,}",
                hint="leave out descriptions, or split the request",
            )
        return structure

    def lark(self, rule: str = "answer") -> str:
        """The grammar in llguidance's dialect of Lark, with this rule at its top."""
        match self.kind:
            case "schema":
                return f"{rule}: %json {self.text}\n"
            case "regex":
                return f"{rule}: {regex_literal(self.text)}\n"
            case "choice":  # a terminal: as rules, more than 2,000 texts that may follow are too many
                texts = " | ".join(json.dumps(text) for text in json.loads(self.text))
                return f"{rule}: {rule.upper()}_TEXT\n{rule.upper()}_TEXT: {texts}\n"
        return f"{rule}: @{NESTED}\n"

    @property
    def nested(self) -> str | None:
        """A grammar of its own, which rules of the caller cannot clash with."""
        return self.text if self.kind == "grammar" else None


# -- checks of each kind ----------------------------------------------------------------------------------------------
def schema_text(schema: Any, where: str = "schema") -> str:
    """A JSON schema as text: of a mapping, a JSON text, or a class with `model_json_schema`, as pydantic's have.

    Errors begin with `where`.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR:
            raise RequestError(f"{where}: {len(schema):,} characters, the limit is {MAX_GRAMMAR:,}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not JSON: {shortened(str(error), 80)}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        is_class = dataclasses.is_dataclass(schema) or isinstance(schema, type)
        hint = "a dict, a JSON text or a pydantic class; pydantic.TypeAdapter(cls).json_schema() is that of a dataclass"
        raise RequestError(
            f"{where}: expected a JSON schema, found {short_repr(schema)}", hint=hint if is_class else None
        )
    _check_depth(schema, where, MAX_DEPTH)
    _check_keywords(schema, where)
    if "x-guidance" in schema:
        raise RequestError(f"{where}: 'x-guidance' cannot be set by a request")
    try:
        return json.dumps({**schema, "x-guidance": OPTIONS}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}: not JSON data: {shortened(str(error), 80)}") from error


def _regex_text(regex: Any) -> str:
    if not isinstance(regex, str) or not regex:
        raise RequestError(f"regex: expected a regular expression, found {short_repr(regex)}")
    _check_parentheses(regex, "regex")
    return regex


def _choice_text(choice: Any) -> str:
    texts = list(choice) if isinstance(choice, Sequence) and not isinstance(choice, (str, bytes)) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        hint = (
            f"choice={[str(x) for x in texts[:4]]}"
            if texts and all(isinstance(x, (int, float)) for x in texts)
            else None
        )
        message = f"choice: expected a list of texts that are not empty, found {short_repr(choice)}"
        raise RequestError(message, hint=hint)
    if len(texts) > MAX_CHOICES:
        raise RequestError(f"choice: {len(texts)} texts, the limit is {MAX_CHOICES}")
    return json.dumps(texts)


def _grammar_text(grammar: Any) -> str:
    """A Lark grammar, converted from GBNF if it is one: `root ::= ...`."""
    if not isinstance(grammar, str) or not grammar.strip():
        raise RequestError(f"grammar: expected a Lark or GBNF grammar, found {short_repr(grammar)}")
    if len(grammar) > MAX_GRAMMAR:
        raise RequestError(f"grammar: {len(grammar):,} characters, the limit is {MAX_GRAMMAR:,}")
    _check_parentheses(grammar, "grammar")
    if "%llguidance" in grammar:
        raise RequestError("grammar: '%llguidance' cannot be set by a request")
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # of its own kinds, and whatever a hostile text leads to
        raise RequestError(f"grammar: not GBNF: {shortened(str(error), MESSAGE)}") from error


def _check_depth(value: Any, where: str, depth: int) -> None:
    if depth < 0:
        raise RequestError(f"{where}: nested more than {MAX_DEPTH} deep")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in inner:
        _check_depth(item, where, depth - 1)


_NAMED_SCHEMAS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
_SCHEMA_NAMES = (
    "items additionalProperties additionalItems unevaluatedItems unevaluatedProperties propertyNames contains not if "
    "then else anyOf allOf oneOf prefixItems"
)
_SCHEMAS = frozenset(_SCHEMA_NAMES.split())
_OTHER_KEYWORDS = (
    "type enum const required minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern "
    "format minItems maxItems uniqueItems minProperties maxProperties minContains maxContains dependentRequired title "
    "description default examples example deprecated nullable readOnly writeOnly discriminator contentEncoding "
    "contentMediaType contentSchema $id $schema $ref $anchor $dynamicRef $dynamicAnchor $comment $vocabulary"
)
KEYWORDS = _NAMED_SCHEMAS | _SCHEMAS | frozenset(_OTHER_KEYWORDS.split())
_BY_SPELLING = {keyword.lower(): keyword for keyword in KEYWORDS}
# words of older drafts, of other validators and of Python libraries, and what says the same
_OTHER_WORDS = {
    "divisibleBy": "multipleOf", "extends": "allOf", "min": "minimum", "max": "maximum", "ge": "minimum",
    "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum", "minlen": "minLength", "maxlen": "maxLength",
    "regex": "pattern",
}  # fmt: skip
# words that would forbid something, and that nothing enforces
_NOT_ENFORCED = frozenset(
    ["disallow", "formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"]
)


def _check_keywords(schema: Any, where: str) -> None:
    """Refuse a misspelt or foreign keyword, which would enforce nothing. Other unknown ones are annotations."""
    if isinstance(schema, (list, tuple)):
        for i, inner in enumerate(schema):
            _check_keywords(inner, f"{where}[{i}]")
    if not isinstance(schema, Mapping):
        return
    for key, inner in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(inner, Mapping):
            for name, one in inner.items():
                _check_keywords(one, f"{where}.{key}.{short_repr(name)}")
        elif key in _SCHEMAS:
            _check_keywords(inner, f"{where}.{key}")
        elif key == "required" and not isinstance(inner, (list, tuple)):
            raise RequestError(
                f"{where}: 'required' is {short_repr(inner)}, expected a list of names",
                hint="it belongs to the object, beside 'properties'",
            )
        elif key in _NOT_ENFORCED:
            raise RequestError(f"{where}: {key!r} cannot be enforced")
        elif isinstance(key, str) and key not in KEYWORDS and len(key) < 40:
            close = _keyword_like(key)
            if close is not None:
                raise RequestError(f"{where}: unknown keyword {key!r}", hint=f"did you mean {close!r}?")


def _keyword_like(word: str) -> str | None:
    """The keyword that a word stands for: in another spelling or vocabulary, or with a typing error."""
    if word in _OTHER_WORDS:
        return _OTHER_WORDS[word]
    spelled = _BY_SPELLING.get(word.replace("_", "").replace("-", "").lower())
    return spelled or next(iter(difflib.get_close_matches(word, KEYWORDS, n=1, cutoff=0.85)), None)


def _check_parentheses(text: str, where: str) -> None:
    """Refuse deep nesting before a recursive parser sees it."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_REGEX_DEPTH:
            raise RequestError(f"{where}: nested more than {MAX_REGEX_DEPTH} deep")


def regex_literal(pattern: str) -> str:
    """A regular expression as a literal of Lark."""
    escaped, backslash = "", False
    for character in pattern:
        escaped += {"/": "/" if backslash else "\\/", "\n": "\\n"}.get(character, character)
        backslash = character == "\\" and not backslash
    return f"/{escaped}/"


# -- tokens -----------------------------------------------------------------------------------------------------------
class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        stops = sorted(id_ for id_ in tokenizer.stop_ids if id_ < vocab)
        if not stops:
            raise CapabilityError(f"structured output: {tokenizer.source} has no token that ends a text")
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id or stops[0], tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab)
        self.stops = stops
        self._tokenizer = tokenizer
        specials = set(self.special_token_ids)
        self._ids = {data: i for i, data in reversed(list(enumerate(self.tokens))) if data and i not in specials}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that spell a text which follows others: no space is added before it."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode_parts(["", data.decode("utf-8", "replace")])
        return (
            ids if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == data else self._longest_match(data)
        )

    def _longest_match(self, data: bytes) -> list[int]:
        """The tokens of bytes that encoding does not spell: part of a character, or a text that it normalises."""
        ids, at = list[int](), 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


class Constraint:
    """The tokens that may follow, for one sequence: a function for `Sampling.allowed`."""

    def __init__(self, matcher: LLMatcher, vocab: int, seconds: Histogram) -> None:
        """`seconds` counts how long each mask takes."""
        self._matcher, self._seconds = matcher, seconds
        self._words: Array = np.zeros(mask_words(vocab), np.int32)
        self._accepted = 0

    def __call__(self, tokens: Sequence[int]) -> Array:
        started = time.perf_counter()
        for token in tokens[self._accepted :]:
            self._matcher.consume_token(token)
        self._accepted = len(tokens)
        if self._matcher.is_error():
            raise self._failed()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        self._seconds.observe(time.perf_counter() - started)
        return self._words

    def _failed(self) -> RequestError:
        return RequestError(
            f"structured output: the grammar gave up after {self._accepted} tokens: "
            f"{shortened(_first_line(self._matcher.get_error()), MESSAGE)}",
            hint="a simpler grammar",
        )


class GrammarCompiler:
    """Compiles structures for one model. Thread-safe; the latest compiled grammars are reused."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, *, thinking: tuple[str, str] | None = None,
        times: GrammarTimes | None = None,
    ) -> None:  # fmt: skip
        """`thinking` are the texts around the thoughts of a model that thinks before it answers."""
        self.tokenizer, self.vocab, self.thinking = tokenizer, vocab, thinking
        self.times = GrammarTimes() if times is None else times
        self._tokens = _tokens_of(tokenizer, vocab)
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def follow(self, structure: Structure, prompt: Sequence[int] = (), answer: bool = False) -> Constraint:
        """A new constraint by a structure; for an answer, after the model's thoughts."""
        return self.constraint(structure.lark(), structure.kind, prompt, answer, structure.nested)

    def constraint(
        self, lark: str, where: str, prompt: Sequence[int] = (), answer: bool = False, nested: str | None = None
    ) -> Constraint:
        """A new constraint by Lark rules, of which `answer` is the first; `nested` is a grammar that they refer to."""
        source = self._source(lark, self._start(prompt) if answer else "start: answer\n", nested)
        with self._lock:
            matcher = self._cache.get(source)
            if matcher is not None:
                self._cache.move_to_end(source)
        if matcher is None:
            matcher = self._compile(source, where)
            with self._lock:
                self._cache[source] = matcher
                while len(self._cache) > CACHED or sum(map(len, self._cache)) > CACHED_CHARS:
                    self._cache.popitem(last=False)
        return Constraint(matcher.deep_copy(), self.vocab, self.times.mask)

    def check(self, lark: str, where: str) -> None:
        """Raise RequestError, which begins with `where`, if these Lark rules cannot be compiled."""
        self._compile(self._source(lark, "start: answer\n", None), where)

    def _source(self, lark: str, start: str, nested: str | None) -> str:
        grammars = [{"lark_grammar": f"%llguidance {{}}\n{start}{lark}"}]
        if nested is not None:
            grammars.append({"name": NESTED, "lark_grammar": nested})
        return json.dumps({"grammars": grammars})

    def _compile(self, source: str, where: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
        started = time.perf_counter()
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=limits)
        with self._lock:  # several threads compile
            self.times.compile.observe(time.perf_counter() - started)
        if matcher.is_error():
            raise RequestError(f"{where}: {_reason(matcher.get_error())}", hint=_hint(matcher.get_error()))
        return matcher

    def literal(self, text: str) -> str:
        """A text as Lark, in which special tokens of the model are tokens."""
        parts, at = [], 0
        for first, end, token in self.tokenizer.special_spans(text):
            parts += [json.dumps(text[at:first], ensure_ascii=False)] * (first > at) + [f"<[{token}]>"]
            at = end
        parts += [json.dumps(text[at:], ensure_ascii=False)] * (at < len(text))
        return " ".join(parts)

    def without(self, text: str) -> str:
        """Any text that does not have `text` in it, as a terminal. Special tokens are never part of a text."""
        anything = "/(.|\\n)*/"
        if self.tokenizer.special_spans(text):
            return anything
        return f"{anything} & ~/(.|\\n)*{_escaped(text)}(.|\\n)*/"

    def up_to(self, rule: str, text: str) -> str:
        """Rules for any text up to and including the first `text`."""
        spans = self.tokenizer.special_spans(text)
        if not spans:
            return f"{rule}[lazy]: /(.|\\n)*{_escaped(text)}/\n"
        return f"{rule}: {rule.upper()}_TEXT {self.literal(text)}\n{rule.upper()}_TEXT: /(.|\\n)*/\n"

    def _start(self, prompt: Sequence[int]) -> str:
        """The start rule: an answer, after thoughts if the model thinks and the prompt has not ended them."""
        if self.thinking is None:
            return "start: answer\n"
        begin, end = self.thinking
        thoughts = self.up_to("thoughts", end) + "THOUGHTS_END: /[ \\n]{0,4}/\n"
        match is_thinking(self.tokenizer.decode(tail_of(prompt)), self.thinking):
            case True:
                return f"start: thoughts THOUGHTS_END answer\n{thoughts}"
            case False:
                return "start: answer\n"
        return f"start: ({self.literal(begin)} thoughts THOUGHTS_END)? answer\n{thoughts}"


def _tokens_of(tokenizer: Tokenizer, vocab: int) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise CapabilityError(
            "structured output: llguidance is not installed",
            hint="install the extra serve: pip install '.[serve]' in the clone",
        ) from error
    vocabulary = _Vocabulary(tokenizer, vocab)
    return LLTokenizer(vocabulary, eos_token=vocabulary.stops)  # type: ignore[arg-type]


def _escaped(text: str) -> str:
    """A text as a pattern."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0]


def _reason(message: str) -> str:
    """An error of llguidance without the grammar that it quotes, which is partly ours."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    first = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: |:? ?regex parse error:$", "", lines[0])
    first = re.sub(r":? ?regex parse error:$", "", first) or "invalid pattern"
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return shortened(f"{first}: {causes[0]}" if causes else first, MESSAGE)


def _hint(message: str) -> str | None:
    if "oneOf" in message:
        return "use anyOf, or alternatives that a constant member tells apart"
    if "look-around" in message:
        return "write the pattern without look-ahead and look-behind"
    return None
