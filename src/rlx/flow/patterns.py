"""Patterns of stage paths, such as `layers.*.attn`, for captures and edits; and of weight names, such as `*norm*`."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable

from rlx.errors import BindError, nearest

_PARTS = re.compile(r"\*+|\[!?\]?[^\]]*\]|.", re.DOTALL)


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path.

    `*` matches anything but a dot, `**` anything; `?`, `[ab]` and `[!ab]` match one character.
    """
    return _compiled(pattern).fullmatch(path) is not None


def matches_name(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a weight: `*` matches anything, dots included, in upper or lower case.

    Names have many parts, and what rules are about is at their ends: `*bias`, `*norm*`.
    """
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())


def check_names_matched(where: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise if a pattern matches none of the weights."""
    known = list(names)
    for pattern in patterns:
        if not any(matches_name(name, pattern) for name in known):
            parts = {part: None for name in known for part in (name, *name.split("."))}
            hint = nearest(pattern.replace("*", "").strip("."), parts) if known else None
            hint = hint or (f"weights have names such as {known[0]!r}" if known else None)
            raise BindError(f"{where}: no weight matches {pattern!r}", hint=hint)


def check_not_shadowed(where: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise if earlier patterns match all weights of a pattern, which then has no effect: the first match wins."""
    known, earlier = list(names), list[str]()
    for pattern in patterns:
        mine = [name for name in known if matches_name(name, pattern)]
        if mine and all(any(matches_name(name, other) for other in earlier) for name in mine):
            raise BindError(
                f"{where}: earlier patterns match all weights of {pattern!r}, and the first match wins",
                hint=f"put {pattern!r} before {earlier[0]!r}",
            )
        earlier.append(pattern)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(map(_regular, _PARTS.findall(pattern))), re.DOTALL)


def _regular(part: str) -> str:
    """Convert a part of a pattern to a regular expression."""
    if part[0] == "*":
        return r"[^.]*" if part == "*" else r".*"
    if part == "?":
        return r"[^.]"
    if len(part) == 1:
        return re.escape(part)
    return r"(?!\.)" + fnmatch.translate(part)[len("(?s:") : -len(r")\Z")]  # fnmatch knows the rules of brackets
