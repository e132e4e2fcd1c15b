"""Matches stage paths against patterns such as `layers.*.attn`, for captures and edits."""

from __future__ import annotations

import fnmatch
import functools
import re

_PARTS = re.compile(r"\*+|\[!?\]?[^\]]*\]|.", re.DOTALL)


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path.

    `*` matches anything but a dot, `**` anything; `?`, `[ab]` and `[!ab]` match one character.
    """
    return _compiled(pattern).fullmatch(path) is not None


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
