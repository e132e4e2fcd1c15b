"""llama2.c's tokenizer.bin: a SentencePiece vocabulary with scores."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from rlx.formats.tensor_file import broken, quoted
from rlx.formats.tokenizer_models import MAX_TOKENS


def read_tokenizer_bin(data: bytes, vocab_size: int, file: Path) -> tuple[list[str], list[float]]:
    """Read tokens and scores. Headers and scores are optional; the layout that matches the file size is used."""
    if not 259 <= vocab_size <= MAX_TOKENS:
        raise broken(file, "vocabulary size", expected=f"259 to {MAX_TOKENS}", actual=vocab_size)
    for header, scored in ((4, True), (0, True), (0, False), (4, False)):
        parsed = _read_layout(data, vocab_size, header, scored)
        if parsed is not None:
            break
    else:
        raise broken(
            file, f"not a tokenizer.bin of {vocab_size} tokens", expected="score, length and bytes for each",
            actual=f"{len(data)} bytes", hint="is the vocabulary size that of the model?",
        )  # fmt: skip
    tokens = []
    for i, raw in enumerate(parsed[0]):
        try:
            tokens.append(_llama2c_name(raw.decode(), i))
        except UnicodeDecodeError as error:
            raise broken(file, f"token {i} is not UTF-8", actual=quoted(raw)) from error
    return tokens, parsed[1]


def _read_layout(data: bytes, count: int, header: int, scored: bool) -> tuple[list[bytes], list[float]] | None:
    head = struct.Struct("<fI" if scored else "<I")
    tokens, scores, at = [], [], header
    for i in range(count):
        if at + head.size > len(data):
            return None
        *score, length = head.unpack_from(data, at)
        at += head.size + length
        if at > len(data):
            return None
        tokens.append(data[at - length : at])
        scores.append(score[0] if scored else -float(i))  # without scores, ids are in merge order
    return (tokens, scores) if at == len(data) and np.isfinite(scores).all() else None


def _llama2c_name(token: str, i: int) -> str:
    """SentencePiece name of a token: ids 3 to 258 are bytes, which early files store as the character itself."""
    if 3 <= i < 259:
        return f"<0x{i - 3:02X}>"
    return token.strip("\n") if i in (1, 2) else token
