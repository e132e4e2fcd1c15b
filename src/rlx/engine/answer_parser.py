"""Takes answers apart while they are generated: thoughts, text, and tool calls.

What comes out does not depend on how the text is cut into pieces: a parser holds back what may still become a marker,
and decides by the text alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from rlx.engine.tools import SAMPLE_ID, Tool, ToolFormat, member_text, tagged_value
from rlx.fast_dataclass import dataclass

MAX_HEAD = 256  # characters of a call's name and the markers around it


@dataclass(frozen=True)
class Event:
    """A piece of an answer: `thought`, `text`, `name` (of a new call) or `arguments` (more of the latest call's)."""

    kind: str
    text: str


class AnswerParser:
    """Splits an answer into events. `push` takes the next piece, `end` the rest."""

    def __init__(
        self, *, thinking: tuple[str, str] | None = None, thinks: bool = False, calls: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:  # fmt: skip
        """`thinking` are the markers of thoughts; `thinks` if the prompt has the first of them."""
        self._thoughts = None if thinking is None else _ThoughtParser(*thinking, inside=thinks)
        self._calls = None if calls is None else _CallParser(calls, {tool.name: tool for tool in tools})

    def push(self, piece: str) -> list[Event]:
        return self._read(piece, False)

    def end(self) -> list[Event]:
        return self._read("", True)

    def _read(self, piece: str, final: bool) -> list[Event]:
        events = [Event("text", piece)] if self._thoughts is None else self._thoughts.read(piece, final)
        if self._calls is None:
            return [event for event in events if event.text]
        parsed: list[Event] = []
        for event in events:
            parsed += [event] if event.kind != "text" else self._calls.read(event.text, False)
        if final:
            parsed += self._calls.read("", True)
        return [event for event in parsed if event.text]


def _held(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


class _ThoughtParser:
    """Thoughts at the beginning of an answer, up to their end marker."""

    def __init__(self, begin: str, end: str, inside: bool) -> None:
        self._begin, self._end = begin.strip(), end.strip()
        self._state = "inside" if inside else "before"
        self._buffer = ""

    def read(self, piece: str, final: bool) -> list[Event]:
        self._buffer += piece
        events: list[Event] = []
        if self._state == "before":
            text = self._buffer.lstrip()
            if text.startswith(self._begin):
                self._state, self._buffer = "inside", text[len(self._begin) :]
            elif not final and self._begin.startswith(text):
                return events
            else:
                self._state = "after"
        if self._state == "inside":
            at = self._buffer.find(self._end)
            if at >= 0:
                events.append(Event("thought", self._buffer[:at]))
                self._state, self._buffer = "blank", self._buffer[at + len(self._end) :]
            else:
                keep = 0 if final else _held(self._buffer, self._end)
                events.append(Event("thought", self._buffer[: len(self._buffer) - keep]))
                self._buffer = self._buffer[len(self._buffer) - keep :]
        if self._state == "blank":  # white space between thoughts and answer belongs to neither
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "after"
        if self._state == "after":
            events.append(Event("text", self._buffer))
            self._buffer = ""
        return events


class _Scanner:
    """Finds the end of a JSON value in a text that grows."""

    def __init__(self) -> None:
        self.at = 0  # characters seen
        self.depth = 0
        self._string = self._escape = False

    def advance(self, text: str, floor: int = 0) -> bool:
        """Read on until the depth is `floor` again; whether it is."""
        for i in range(self.at, len(text)):
            character = text[i]
            if self._string:
                if self._escape:
                    self._escape = False
                elif character == "\\":
                    self._escape = True
                elif character == '"':
                    self._string = False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= floor:
                    self.at = i + 1
                    return True
        self.at = len(text)
        return False


class _CallParser:
    """Text and tool calls in a format that was learnt from the chat template."""

    def __init__(self, known: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self._format, self._tools = known, tools
        self._trigger = known.trigger
        self._bare = not self._trigger  # an answer that begins with an object is a call
        middle = re.sub(r"(?<!\w)\d+(?!\w)", r"\\d+", re.escape(known.middle.strip()))
        middle = middle.replace(SAMPLE_ID, r"[\w-]+")
        self._head = re.compile(rf"\s*([\w.\-]+)(?=[^\w.\-]){middle}")
        self._object_head = re.compile(
            rf'\{{\s*(?:"(?!{known.name_key}")\w+"\s*:\s*"[^"]*"\s*,\s*)*"{known.name_key}"\s*:\s*"([^"\\]*)"\s*,\s*'
            rf'"{known.arguments_key}"\s*:\s*(?=\{{)'
        )
        self._state, self._buffer = ("first" if self._bare else "text"), ""
        self._raw = ""  # of a call that has no name yet: text if it turns out not to be one
        self._scanner = _Scanner()
        self._sent = 0  # characters of arguments that are events already
        self._streams = False  # whether the object's arguments are sent as they come
        self._sending = False  # whether they have begun and not ended
        self._members = 0  # tagged arguments
        self._tool: Tool | None = None  # of the latest call

    def read(self, piece: str, final: bool) -> list[Event]:
        self._buffer += piece
        events: list[Event] = []
        while True:
            before = self._state, len(self._buffer)
            events += getattr(self, f"_in_{self._state}")(final)
            if (self._state, len(self._buffer)) == before:
                break
        if final and self._state in ("marker", "head", "object") and not self._streams:
            events.append(Event("text", self._raw + self._buffer))
            self._raw = self._buffer = ""
        return events

    # -- states: each takes what it can from the buffer --
    def _in_first(self, final: bool) -> Iterator[Event]:
        """The beginning of an answer of a model that writes calls as bare objects."""
        text = self._buffer.lstrip()
        if not text and not final:
            return
        self._state = "text"
        if text.startswith("{"):
            self._raw, self._buffer = self._buffer[: len(self._buffer) - len(text)], text
            self._begin_object()
        yield from ()

    def _in_text(self, final: bool) -> Iterator[Event]:
        at = self._buffer.find(self._trigger) if self._trigger else -1
        if at >= 0:
            yield Event("text", self._buffer[:at].rstrip())
            self._raw = self._buffer[len(self._buffer[:at].rstrip()) : at] + self._trigger
            self._buffer = self._buffer[at + len(self._trigger) :]
            self._state = "marker"
            return
        keep = 0 if final else _held(self._buffer, self._trigger)
        if not final:  # white space before a call belongs to it
            rest = self._buffer[: len(self._buffer) - keep]
            keep += len(rest) - len(rest.rstrip())
        yield Event("text", self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]

    def _in_marker(self, final: bool) -> Iterator[Event]:
        """After the marker of a call: an object, or a name."""
        if not self._format.in_object:
            self._state = "head"
            return
        text = self._buffer.lstrip()
        if not text:
            return
        self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if text[0] == "{":
            self._begin_object()
        else:
            yield self._not_a_call()

    def _begin_object(self) -> None:
        self._scanner, self._sent, self._streams = _Scanner(), 0, False
        self._state = "object"

    def _in_object(self, final: bool) -> Iterator[Event]:
        """A JSON object with name and arguments, whose arguments are sent as they come if the name is before them."""
        text = self._buffer
        if not self._streams:
            head = self._object_head.match(text)
            if head is not None:
                self._streams, self._sent = True, head.end()
                self._scanner.advance(text[: head.end()])
                self._raw = ""
                yield Event("name", head[1])
                self._sending = True
        if self._sending:
            ended = self._scanner.advance(text, 1)
            yield Event("arguments", text[self._sent : self._scanner.at])
            self._sent = self._scanner.at
            if not ended:
                return
            self._sending = False
        if not self._scanner.advance(text):
            return
        complete, self._buffer = text[: self._scanner.at], text[self._scanner.at :]
        self._state = "after"
        if not self._streams:
            yield from self._call_of_object(complete)
        self._streams = False

    def _call_of_object(self, text: str) -> Iterator[Event]:
        """A call whose members are in another order."""
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value, text = value["function"], member_text(text, "function") or ""
        name = value.get(self._format.name_key) if isinstance(value, dict) else None
        if not isinstance(name, str) or not name:
            self._raw += text
            yield self._not_a_call()
            return
        arguments = value.get(self._format.arguments_key)
        if not isinstance(arguments, str):
            arguments = member_text(text, self._format.arguments_key) or "{}"
        self._raw = ""
        yield Event("name", name)
        yield Event("arguments", arguments)

    def _in_head(self, final: bool) -> Iterator[Event]:
        """The name of a call, up to its arguments."""
        head = self._head.match(self._buffer)
        if head is not None and head.end() <= MAX_HEAD:
            self._raw, self._buffer, self._tool = "", self._buffer[head.end() :], self._tools.get(head[1])
            yield Event("name", head[1])
            if self._format.tags is None:
                self._state, self._scanner, self._sent = "arguments", _Scanner(), 0
            else:
                self._state, self._members = "tags", 0
        elif len(self._buffer) >= MAX_HEAD:
            yield self._not_a_call()

    def _in_arguments(self, final: bool) -> Iterator[Event]:
        """Arguments as JSON, sent as they come."""
        if not self._sent:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return
            if self._buffer[0] != "{":
                self._state = "after"
                yield Event("arguments", "{}")
                return
        ended = self._scanner.advance(self._buffer)
        yield Event("arguments", self._buffer[self._sent : self._scanner.at])
        self._sent = self._scanner.at
        if ended:
            self._buffer, self._state = self._buffer[self._sent :], "after"

    def _in_tags(self, final: bool) -> Iterator[Event]:
        """Arguments between tags; each is sent when it is complete."""
        tags = self._format.tags
        assert tags is not None
        text = self._buffer.lstrip()
        begin, end = tags.before.strip(), self._format.end.strip()
        if text.startswith(begin):
            middle, after = tags.middle.strip(), tags.after.strip()
            key_end = text.find(middle, len(begin))
            value_end = text.find(after, key_end + len(middle)) if key_end >= 0 else -1
            if value_end < 0:
                return
            key, value = text[len(begin) : key_end].strip(), text[key_end + len(middle) : value_end]
            value = value.removeprefix("\n") if tags.middle.endswith("\n") else value
            value = value.removesuffix("\n") if tags.after.startswith("\n") else value
            yield Event("arguments", ("{" if not self._members else ", ") + self._member(key, value))
            self._members += 1
            self._buffer = text[value_end + len(after) :]
        elif text.startswith(end) or (final and not text):
            self._buffer = text[len(end) :] if text.startswith(end) else text
            self._state = "after"
            yield Event("arguments", "}" if self._members else "{}")
        elif not (begin.startswith(text) or end.startswith(text)) or (final and text):
            self._buffer, self._state = text, "text"
            yield Event("arguments", "}" if self._members else "{}")

    def _member(self, key: str, value: str) -> str:
        members = {} if self._tool is None else self._tool.members
        return f"{json.dumps(key, ensure_ascii=False)}: {tagged_value(value, members.get(key))}"

    def _in_after(self, final: bool) -> Iterator[Event]:
        """Between calls, and after the last one."""
        known = self._format
        end = known.end.partition("}")[2] if known.in_object else known.end
        end = "" if known.tags is not None else end.strip()
        section = bool(known.opening.strip() or known.closing.strip())
        begin = known.before_object if known.in_object else known.begin.strip()
        markers = {"closing": known.closing.strip(), "end": end, "begin": begin if section else ""}
        text = self._buffer.lstrip()
        if section and known.in_object and not begin and text.startswith("{"):
            self._buffer = text
            self._begin_object()
            return
        separator = known.between.strip()
        if section and separator and text.startswith(separator):
            self._buffer = text[len(separator) :]
            return
        for name, marker in markers.items():
            if marker and text.startswith(marker):
                self._buffer, self._raw = text[len(marker) :], marker
                self._state = {"closing": "text", "end": "after", "begin": "marker"}[name]
                return
        if not text or (not final and any(marker.startswith(text) for marker in markers.values())):
            self._buffer = self._buffer if text else ""
            return
        self._buffer, self._state = text, "text"
        yield from ()

    def _not_a_call(self) -> Event:
        event = Event("text", self._raw)
        self._raw, self._state = "", "text"
        return event
