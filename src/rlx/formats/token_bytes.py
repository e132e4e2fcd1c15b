"""Decode single tokens to bytes, following the decoder of a tokenizer.json.

The Rust library decodes a complete list of ids at once. Streaming needs the bytes of one token, so the decoder's
description becomes a per-token `Rule`, which `decode` and `Stream` share and so cannot disagree. Invalid UTF-8 becomes
U+FFFD as in `bytes.decode`; the library replaces more bytes than are invalid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import quoted

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The clean-up that the library's WordPiece decoder does within one token; its other forms span several tokens.
_TIDY = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: Latin-1 where printable, else consecutive from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Rule:
    """How to decode a token that is not an added token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    word_prefix: str | None = None  # WordPiece: a token without it begins a word
    tidy: bool = False
    strip: bool = False  # drop a space at the very start of a text
    unsupported: str | None = None

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[c] for c in token])
            except KeyError:
                return token.encode()  # not a byte-level token; the library also takes it as text
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self.word_prefix is not None:
            return self._word(token).encode()
        for old, new in self.replace:
            token = token.replace(old, new)
        return token.encode()

    def _word(self, token: str) -> str:
        assert self.word_prefix is not None
        if token.startswith(self.word_prefix):
            return token[len(self.word_prefix) :]
        spaced = " " + token
        return _TIDY.get(spaced, spaced) if self.tidy else spaced


class TokenBytes:
    """The bytes of every token, computed on first access."""

    def __init__(self, rule: Rule, name_of: Callable[[int], str | None], added: Mapping[int, str], where: str) -> None:
        self.rule = rule
        self._name_of = name_of
        self._added = added
        self._where = where
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        raw = self._cache.get(token)
        if raw is None:
            raw = self._cache[token] = self._bytes_of(token)
        return raw

    def _bytes_of(self, token: int) -> bytes:
        if self.rule.unsupported:
            raise FormatError(f"{self._where}: decoder {self.rule.unsupported} is not supported, so ids have no text")
        added = self._added.get(token)
        if added is not None:
            # WordPiece puts a space before [SEP] as before any word; elsewhere an added token is exactly its text
            return (" " + added if self.rule.word_prefix is not None else added).encode()
        name = self._name_of(token)
        return b"" if name is None else self.rule.bytes_of(name)  # ids may have gaps


# -- reading a decoder -----------------------------------------------------------------------------------------------
def rule_of(decoder: Mapping[str, Any] | None) -> Rule:
    """Convert a decoder in tokenizer.json form to a rule."""
    if decoder is None:
        return Rule(unsupported="null")
    return _add(Rule(), decoder)


def _add(rule: Rule, decoder: Mapping[str, Any]) -> Rule:
    match decoder:
        case {"type": "Sequence", "decoders": list(parts)}:
            for part in parts:
                rule = _add(rule, part)
            return rule
        case {"type": "ByteLevel"}:
            return replace(rule, byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(rule, byte_fallback=True)
        case {"type": "Fuse"}:
            return rule
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return replace(rule, replace=(*rule.replace, (old, new)))
        case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
            return replace(rule, strip=bool(start))
        case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": str(scheme)}:
            return replace(rule, replace=(*rule.replace, (space, " ")), strip=scheme != "never")
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(tidy)} if prefix:
            return replace(rule, word_prefix=prefix, tidy=tidy, strip=True)
        case other:
            return replace(rule, unsupported=quoted(other.get("type", other)))
