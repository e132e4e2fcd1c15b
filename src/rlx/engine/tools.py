"""Tool calls: how a model writes them, learnt from its own chat template by rendering it in variants.

The template says how calls of earlier turns look, so a model that was trained with it writes calls the same way. Four
renderings (a call, another name, other arguments, two calls) show which text is fixed and which varies. One record, the
`ToolFormat`, then gives the parser of answers (`CallParser`) and the grammar that forces calls (`call_rules`).
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from rlx.engine.sampler import short_repr
from rlx.errors import CapabilityError, RequestError, RlxError, nearest
from rlx.fast_dataclass import dataclass
from rlx.formats.chat import ChatTemplate

if TYPE_CHECKING:
    from rlx.engine.structured import GrammarCompiler, Structure

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
THOUGHTS_END = "</think>"  # templates may put empty thoughts before calls
TOOL_MODELS = "load a model that was trained to call tools, such as qwen2.5-coder-1.5b (rlx models says which can)"
ROUNDS = 8  # of calls that `chat` makes before it asks for an answer


# -- descriptions of tools --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tool:
    """A function that a model may call: its name, its description, and a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False
    function: Callable[..., Any] | None = None  # in Python: `chat` calls it
    where: str = field(default="tools", compare=False)  # its schema is, for errors

    @classmethod
    def of(cls, tool: Any, where: str) -> Tool:
        """From OpenAI's form, or a Python function."""
        if callable(tool):
            return tool_of_function(tool)
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where}: expected a function, found {short_repr(tool)}")
        if tool.get("type", "function") != "function":
            raise RequestError(f"{where}.type: expected 'function', found {short_repr(tool.get('type'))}")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function: expected an object, found {short_repr(function)}")
        name, description = function.get("name"), function.get("description")
        parameters = function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name: expected 1 to 64 letters, digits, '_', '-' or '.', found {short_repr(name)}"
            )
        if description is not None and not isinstance(description, str):
            raise RequestError(f"{where}.function.description: expected a text, found {short_repr(description)}")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{where}.function.parameters: expected a JSON schema, found {short_repr(parameters)}")
        where = f"{where}.function.parameters"
        schema = _checked_parameters(parameters or {"properties": {}}, where)
        return cls(name, description or "", schema, function.get("strict") is True, where=where)

    @property
    def members(self) -> Mapping[str, Any]:
        """Schemas of the arguments by name."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        return properties

    def described(self) -> dict[str, Any]:
        """OpenAI's form, for the chat template."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def _checked_parameters(schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A schema of arguments, which are always an object."""
    if schema.get("type", "object") != "object":
        raise RequestError(f"{where}.type: expected 'object', found {short_repr(schema['type'])}")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise RequestError(f"{where}.properties: expected an object, found {short_repr(schema['properties'])}")
    required = schema.get("required", [])
    if not isinstance(required, (list, tuple)) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required: expected a list of names, found {short_repr(required)}")
    return {"type": "object", **schema}


def tools_of(tools: Any, where: str = "tools") -> list[Tool]:
    """A checked list of tools with distinct names."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError(f"{where}: expected a list, found {short_repr(tools)}")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{where}: {len(tools)} tools, the limit is {MAX_TOOLS}")
    checked = [Tool.of(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
    for i, tool in enumerate(checked):
        if tool.name in {other.name for other in checked[:i]}:
            raise RequestError(f"{where}[{i}]: two tools are called {tool.name!r}")
    return checked


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARGUMENT = re.compile(r"^\s*(?::param (?:\w+ )?)?(\w+)(?: \([^)]*\))?:\s+(.+)$")


def tool_of_function(function: Callable[..., Any]) -> Tool:
    """A tool from a Python function: types from its signature, descriptions from its docstring."""
    name = getattr(function, "__name__", "")
    if not NAME.fullmatch(name):
        raise RequestError(f"tools: a function needs a name, found {short_repr(function)}")
    document = inspect.getdoc(function) or ""
    described = {m[1]: m[2].strip() for line in document.splitlines() if (m := _ARGUMENT.match(line))}
    summary = document.split("\n\n", 1)[0].strip()
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # of names that only a type checker knows
        raise RequestError(f"tools: the types of {name} cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RequestError(f"tools: {name} takes *{parameter.name}, and a schema needs names")
        if parameter.name not in hints:
            raise RequestError(
                f"tools: {name}: {parameter.name} has no type", hint=f"def {name}({parameter.name}: str)"
            )
        schema = type_schema(hints[parameter.name], f"{name}: {parameter.name}")
        if parameter.name in described:
            schema = schema | {"description": described[parameter.name]}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, summary, parameters, function=function, where=f"tools: {name}")


def type_schema(kind: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a Python type."""
    if kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    if kind is Any:
        return {}
    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(one, where) for one in arguments]}
    if kind in (list, tuple) or (origin in (list, tuple, Sequence) and len(arguments) <= 2):
        items = [one for one in arguments if one is not Ellipsis]
        return {"type": "array", **({"items": type_schema(items[0], where)} if len(items) == 1 else {})}
    if kind is dict or origin in (dict, Mapping):
        values = {"additionalProperties": type_schema(arguments[1], where)} if len(arguments) == 2 else {}
        return {"type": "object", **values}
    raise RequestError(f"tools: {where} has type {short_repr(kind)}, which no JSON type stands for")


# -- how a model writes calls -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ToolCall:
    """A call by the model; `result` is what the function returned, once `chat` has called it."""

    name: str
    arguments: str  # JSON
    id: str = ""
    result: str | None = None

    def message(self) -> dict[str, Any]:
        """OpenAI's form, for a conversation."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Tags:
    """Arguments as text between tags: `before` name `middle` value `after`."""

    before: str
    middle: str
    after: str
    between: str  # two arguments


@dataclass(frozen=True)
class ToolFormat:
    """The texts around a call: `opening` (`begin` name `middle` arguments `end`) `between` (...) `closing`.

    Arguments are JSON, or `tags`. With `in_object`, the name and the arguments are members of one JSON object, which
    starts in `begin`; its members are called `name_key` and `arguments_key`.
    """

    opening: str  # before the first call
    begin: str
    middle: str
    end: str
    between: str
    closing: str
    in_object: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    tags: Tags | None = None
    as_text: bool = False  # whether the template wants arguments as JSON text, not as objects
    id_length: int = 0  # of an id that calls carry, as in `"id": "abcdefghi"`
    end_after_id: str = ""

    @property
    def trigger(self) -> str:
        """The text that begins calls in an answer."""
        return (self.opening + self.begin).strip() if not self.in_object else self._before_object.strip()

    @property
    def markers(self) -> list[str]:
        """All fixed texts of the format."""
        tags = [] if self.tags is None else [self.tags.before, self.tags.middle, self.tags.after, self.tags.between]
        return [self.opening, self.begin, self.middle, self.end, self.between, self.closing, *tags]

    @property
    def is_sound(self) -> bool:
        """Whether calls begin with a marker, and no text of one rendering is part of the format."""
        samples = (*_NAMES, *_ARGUMENTS[1], *_ARGUMENTS[1].values(), *_IDS)
        texts = [part for text in self.markers for part in (text.split(_IDS[0]) if text is self.middle else [text])]
        marked = any(c in self.opening + self.begin for c in "<[{")
        return marked and not any(sample in text for sample in samples for text in texts)

    @property
    def _before_object(self) -> str:
        text = self.opening + self.begin
        return text[: text.rindex("{")]

    @property
    def before_object(self) -> str:
        """The text before the object of a call after the first."""
        return self.begin.rpartition("{")[0].strip()


_USER = {"role": "user", "content": "qfirst"}
_NAMES = ("qalpha", "qbeta")
_ARGUMENTS: tuple[dict[str, Any], ...] = ({"kone": "vone"}, {"kone": "vone", "ktwo": "vtwo"})
SAMPLE_ID = "callid001"  # stands for the id of a call in `ToolFormat.middle`
_IDS = (SAMPLE_ID, "callid002")
_CONTENT = "qcontent\N{SECTION SIGN}"
_TOOLS = [
    Tool(
        name, "qdescription", {"type": "object", "properties": {k: {"type": "string"} for k in _ARGUMENTS[1]}}
    ).described()
    for name in _NAMES
]


def learn_format(template: ChatTemplate) -> ToolFormat:
    """The format of a template's calls; raises CapabilityError if it has none, or one of another kind."""
    for as_text in (False, True):
        try:
            learner = _Learner(template, as_text)
            known, text = learner.format(), learner.text
        except CapabilityError:
            raise
        except RlxError:  # the template wants the other form of arguments
            continue
        if known is not None and known.is_sound:
            return known
        if "'kone'" not in text:  # not an object that was printed as Python prints it
            break
    raise CapabilityError(
        "tools: rlx cannot learn how the model's chat template writes tool calls",
        hint="a model whose template writes calls between tags or as JSON, or schema= for the answer",
    )


class _Learner:
    """Renders a template in variants, and compares the texts."""

    def __init__(self, template: ChatTemplate, as_text: bool) -> None:
        self._template, self._as_text, self.text = template, as_text, ""
        prompt = self._render([_USER], prompt=True)
        answer = self._render([_USER, {"role": "assistant", "content": _CONTENT}])
        if _NAMES[0] not in prompt:
            raise CapabilityError("tools: the model's chat template does not show tools to the model", hint=TOOL_MODELS)
        self._prompt = prompt
        self._turn_end = answer[answer.rindex(_CONTENT) + len(_CONTENT) :] if _CONTENT in answer else ""

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return self._template.render(messages, tools=_TOOLS, add_generation_prompt=prompt)

    def calls(self, *calls: tuple[str, dict[str, Any]]) -> str:
        """The text of an answer that is nothing but these calls."""
        listed = []
        for (name, arguments), id_ in zip(calls, _IDS, strict=False):
            value = json.dumps(arguments) if self._as_text else arguments
            listed.append({"id": id_, "type": "function", "function": {"name": name, "arguments": value}})
        text = self._render([_USER, {"role": "assistant", "content": "", "tool_calls": listed}])
        text = text[len(_common_prefix(self._prompt, text)) :]
        text = text[: len(text) - len(_common_suffix(text, self._turn_end))]
        return text.rpartition(THOUGHTS_END)[2]

    def format(self) -> ToolFormat | None:
        one = self.text = self.calls((_NAMES[0], _ARGUMENTS[0]))
        if _NAMES[0] not in one:
            return None
        two = self._two_calls()
        return self._json_format(one, two) or self._tagged_format(one, two)

    def _two_calls(self) -> str | None:
        try:
            text = self.calls((_NAMES[0], _ARGUMENTS[0]), (_NAMES[1], _ARGUMENTS[0]))
        except RlxError:  # templates of models that make one call at a time
            return None
        return text if _NAMES[1] in text else None

    def _json_format(self, one: str, two: str | None) -> ToolFormat | None:
        """Calls whose arguments are JSON."""
        first = _call_span(one, _NAMES[0], _ARGUMENTS[0])
        if first is None:
            return None
        in_object = _object_around(one, first)
        name_key, arguments_key = "name", "arguments"
        if in_object is not None:
            name_key = next(k for k, v in in_object.members.items() if v == _NAMES[0])
            arguments_key = next(k for k, v in in_object.members.items() if v == _ARGUMENTS[0])
        before, middle, after = one[: first.name], one[first.name_end : first.arguments], one[first.end :]
        seam = None
        if two is not None:
            left = _call_span(two, _NAMES[0], _ARGUMENTS[0])
            right = None if left is None else _call_span(two, _NAMES[1], _ARGUMENTS[0], left.end)
            if left is not None and right is not None:
                seam = two[left.end : right.name]
        after, seam, length, rest = _cut_id(after, seam)
        opening, begin, end, between, closing = _split(before, after, seam)
        return ToolFormat(
            opening, begin, middle, end, between, closing, in_object is not None, name_key, arguments_key, None,
            self._as_text, length, rest,
        )  # fmt: skip

    def _tagged_format(self, one: str, two: str | None) -> ToolFormat | None:
        """Calls whose arguments are text between tags."""
        more = self.calls((_NAMES[0], _ARGUMENTS[1]))
        name = one.find(_NAMES[0])
        places = [more.find(text, name) for text in ("kone", "vone", "ktwo", "vtwo")]
        if min(name, *places) < 0 or places != sorted(places) or self._as_text:
            return None
        key, value = one.find("kone", name), one.find("vone", name)
        if more[: places[1]] != one[:value]:
            return None
        middle = one[key + 4 : value]
        tail, seam = one[value + 4 :], more[places[1] + 4 : places[2]]
        head = one[name + len(_NAMES[0]) : key]
        before = _common_suffix(head, seam)
        after = _common_prefix(tail, seam)
        if len(before) + len(after) > len(seam):  # they share white space, which then ends an argument
            before = before[len(before) + len(after) - len(seam) :]
        tags = Tags(before, middle, after, seam[len(after) : len(seam) - len(before)])
        if not before.strip() or not after.strip():
            return None
        call_middle = head[: len(head) - len(before)]
        end = tail[len(after) :]
        joint = None
        if two is not None:
            left = two.find("vone")
            joint = two[left + 4 + len(after) : two.find(_NAMES[1])]
        opening, begin, end, between, closing = _split(one[:name], end, joint)
        return ToolFormat(opening, begin, call_middle, end, between, closing, tags=tags)


@dataclass(frozen=True)
class _Span:
    """Where a call's name and its arguments are in a text."""

    name: int
    name_end: int
    arguments: int
    end: int


def _call_span(text: str, name: str, arguments: dict[str, Any], start: int = 0) -> _Span | None:
    at = text.find(name, start)
    if at < 0:
        return None
    for brace in (m.start() for m in re.finditer(r"\{", text[at:])):
        try:
            value, size = json.JSONDecoder().raw_decode(text[at + brace :])
        except ValueError:
            continue
        if value == arguments:
            return _Span(at, at + len(name), at + brace, at + brace + size)
    return None


@dataclass(frozen=True)
class _Object:
    members: dict[str, Any]


def _object_around(text: str, span: _Span) -> _Object | None:
    """The JSON object that a call is, if it is one."""
    for brace in (m.start() for m in re.finditer(r"\{", text[: span.name])):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[brace:])
        except ValueError:
            continue
        if isinstance(value, dict) and _NAMES[0] in value.values():
            return _Object(value)
    return None


def _cut_id(after: str, seam: str | None) -> tuple[str, str | None, int, str]:
    """Take the id of a call out of the text that follows its arguments: (text before it, seam, length, text after)."""
    if _IDS[0] not in after:
        return after, seam, 0, ""
    at = after.index(_IDS[0])
    rest = after[at + len(_IDS[0]) :]
    if seam is not None and _IDS[0] in seam:
        seam = seam[seam.index(_IDS[0]) + len(_IDS[0]) :]
        shared = _common_prefix(rest, seam)
        return after[:at] + "\0" + rest, after[:at] + "\0" + seam, len(_IDS[0]), shared
    return after[:at] + "\0" + rest, seam, len(_IDS[0]), rest


def _split(before: str, after: str, seam: str | None) -> tuple[str, str, str, str, str]:
    """Split what stands before, after and between calls into opening, begin, end, between and closing."""
    if seam is None:
        return "", before, after, "", ""
    begin = _common_suffix(before, seam)
    end = _common_prefix(after, seam)
    overlap = len(begin) + len(end) - len(seam)
    if overlap > 0:
        end = end[: len(end) - overlap]
    return (
        before[: len(before) - len(begin)], begin, end, seam[len(end) : len(seam) - len(begin)], after[len(end) :],
    )  # fmt: skip


_UNIT = re.compile(r"</?[^<>\s]+>?|\[/?[A-Z_]+\]|\w+|\s|.", re.S)  # tags and words are compared as units


def _common_prefix(a: str, b: str) -> str:
    """The longest common prefix that cuts no tag and no word."""
    size = 0
    for x, y in zip(_UNIT.findall(a), _UNIT.findall(b), strict=False):
        if x != y:
            break
        size += len(x)
    return a[:size]


def _common_suffix(a: str, b: str) -> str:
    size = 0
    for x, y in zip(reversed(_UNIT.findall(a)), reversed(_UNIT.findall(b)), strict=False):
        if x != y:
            break
        size += len(x)
    return a[len(a) - size :]


# -- grammar ----------------------------------------------------------------------------------------------------------
def call_rules(
    known: ToolFormat, tools: Sequence[Tool], compiler: GrammarCompiler, *, parallel: bool = True, text: bool = False,
    form: Structure | None = None,
) -> str:  # fmt: skip
    """Lark rules for `answer`: one or several calls of these tools, with arguments by their schemas.

    With `text`, the answer may be any text, and calls in it have valid arguments. With a `form`, it may follow that
    instead of calling.
    """
    full = (known.opening + known.begin).lstrip()
    start = known.trigger if text else ""
    if text and not start:
        raise CapabilityError("tools: strict needs a model that marks its calls", hint='tool_choice="required"')
    rules = [_tool_rules(known, tool, i, compiler) for i, tool in enumerate(tools)]

    def calls(name: str, before: str) -> str:
        choices = " | ".join(f"{compiler.literal(before + tool.name)} call_{i}" for i, tool in enumerate(tools))
        return f"{name}: {choices}\n"

    after = compiler.literal(known.closing)
    more = "(following)*" if parallel else ""
    result = calls("first", full[len(start) :])
    if parallel:
        result += calls("following", known.between + known.begin)
    if text:
        lead = compiler.up_to("lead", start)
        result = f"answer: (lead first {more} {after})* TAIL\nTAIL: {compiler.without(start)}\n{lead}{result}"
    elif form is not None:
        result = f"answer: first {more} {after} | form\n{form.lark('form')}{result}"
    else:
        result = f"answer: first {more} {after}\n{result}"
    return result + "".join(rules)


def _tool_rules(known: ToolFormat, tool: Tool, i: int, compiler: GrammarCompiler) -> str:
    """The rule `call_i`: a call after the tool's name."""
    from rlx.engine.structured import schema_text

    end = " ".join(
        ["/[a-zA-Z0-9]{9}/".join(filter(None, (f" {compiler.literal(part)} " for part in known.end.split("\0"))))]
        if known.end
        else []
    )
    middle = " /[a-zA-Z0-9]{9}/ ".join(compiler.literal(part) for part in known.middle.split(_IDS[0]))
    if known.tags is None:
        return f"call_{i}: {middle} %json {schema_text(tool.parameters, tool.where)} {end}\n"
    tags, members, rules = known.tags, [], ""
    if "properties" not in tool.parameters:  # any arguments
        name = f"{compiler.literal(tags.before)} /[a-zA-Z0-9_.-]+/ {compiler.literal(tags.middle)}"
        rules = f"any_{i}: {name} value_{i}\n{compiler.up_to(f'value_{i}', tags.after)}"
        return f"call_{i}: {middle} any_{i}* {end}\n{rules}"
    required = tool.parameters.get("required", [])
    for name in required:
        if name not in tool.members:
            raise RequestError(
                f"{tool.where}: {short_repr(name)} is required, and has no schema",
                hint="the model writes an argument per property",
            )
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    for j, (name, schema) in enumerate(tool.members.items()):
        begin = compiler.literal(f"{tags.before}{name}{tags.middle}")
        if _is_text(schema):
            rules += compiler.up_to(f"value_{i}_{j}", tags.after)
            rule = f"{begin} value_{i}_{j}"
        else:
            schema = {**schema, **definitions} if isinstance(schema, Mapping) else schema
            place = f"{tool.where}.properties.{short_repr(name)}"
            rule = f"{begin} %json {schema_text(schema, place)} {compiler.literal(tags.after)}"
        rules += f"member_{i}_{j}: {rule}\n"
        members.append(f"member_{i}_{j}" + ("" if name in required else "?"))
    return f"call_{i}: {middle} {' '.join(members)} {end}\n{rules}"


_NOTES = {"type", "title", "description", "default", "examples", "example", "deprecated"}  # that forbid no text


def _is_text(schema: Any) -> bool:
    """Whether any text is a value."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and schema.keys() <= _NOTES


def tagged_value(text: str, schema: Any) -> str:
    """The JSON of an argument that was written as text: a string, or the text itself if it is JSON and may be."""
    if not _is_text(schema) and member_text(f'{{"value": {text}}}', "value") == text.strip():
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def member_text(text: str, name: str) -> str | None:
    """The text of a member of a JSON object, as it was written; None if there is none, or if it is not JSON."""
    decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=str, parse_int=str)
    at = _after(text, "{", 0)
    try:
        while at is not None:
            key, at = decoder.raw_decode(text, at)
            start = _after(text, ":", at)
            if start is None:
                return None
            _, at = decoder.raw_decode(text, start)
            if key == name:
                return text[start:at]
            at = _after(text, ",", at)
    except (ValueError, RecursionError):
        pass
    return None


def _after(text: str, mark: str, at: int) -> int | None:
    """Where the value after a mark begins; None if something else stands there."""
    match = re.compile(rf"\s*{re.escape(mark)}\s*").match(text, at)
    return None if match is None else match.end()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _named(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = nearest(name[:80], [tool.name for tool in tools])
    raise RequestError(f"tool_choice: there is no tool {short_repr(name)}", hint=known)


def choose_tools(tools: Sequence[Tool], choice: Any) -> tuple[list[Tool], str]:
    """The tools that may be called, and how: "none", "auto" or "required"."""
    match choice:
        case None:
            return list(tools), "auto" if tools else "none"
        case "none" | "auto" | "required":
            if choice == "required" and not tools:
                raise RequestError("tool_choice: required, but there are no tools")
            return list(tools), choice
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return [_named(tools, name)], "required"
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            names = []
            for one in allowed:
                match one:
                    case {"type": "function", "function": {"name": str(name)}}:
                        names.append(_named(tools, name).name)
                    case _:
                        raise RequestError(f"tool_choice: expected a function, found {short_repr(one)}")
            chosen = [tool for tool in tools if tool.name in names]
            if not chosen:
                raise RequestError("tool_choice: no tool is allowed", hint='tool_choice="none"')
            return chosen, mode
    raise RequestError(f"tool_choice: expected 'none', 'auto', 'required' or a function, found {short_repr(choice)}")
