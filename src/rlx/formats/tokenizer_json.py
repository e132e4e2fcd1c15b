"""Read tokenizer.json and tokenizer_config.json: the Rust tokenizer, its BPE model if it has one, special tokens.

Files are untrusted. The library validates what it reads; the tables it would trust, and BPE tokens and merges, which it
never sees, are validated here.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from rlx.errors import FormatError
from rlx.formats.bpe import Bpe, merges_of
from rlx.formats.special_tokens import SpecialIds
from rlx.formats.strict_json import parse_json
from rlx.formats.tensor_file import broken, open_bytes, quoted
from rlx.formats.tokenizer_models import IMPROBABLE, MAX_TOKENS, check_charsmap
from rlx.formats.tokenizers_errors import rust_call

MAX_VALUES = 1 << 25  # a merge counts as three

# -- tokenizer.json --------------------------------------------------------------------------------------------------
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*("(?:[^"\\]|\\.)*+")')
_HIDDEN = re.compile(rb"\\u00[2-7]")  # a needless escape, which could hide a name from the searches below


def read_json(data: bytes, where: str) -> tuple[RustTokenizer, Bpe | None]:
    """Return the tokenizer and, for BPE, our own model; the library then sees no tokens or merges."""
    if _HIDDEN.search(data):
        data = json.dumps(_parsed(data, where), ensure_ascii=False).encode()
    _check_charsmaps(data, where)
    document: Any = _parsed(data, where) if b'"merges"' in data else None
    match document:
        case {"model": {"merges": _} as model} if model.get("type", "BPE") == "BPE":
            ids = _vocab(model, where)
            # dropout is for training; inference must be deterministic
            rest = {**model, "vocab": _ids_of_added(document, ids), "merges": [], "dropout": None}
            with rust_call(where):
                rust = RustTokenizer.from_str(json.dumps({**document, "model": rest}))
            prefix = rust.model.continuing_subword_prefix or ""
            merges = merges_of(*_sides(model, where), ids, where, prefix=prefix)
            return rust, Bpe.build(ids, merges, rust.model)
    if b'"Unigram"' in data:
        data = _without_special_pieces(data, where)
    with rust_call(where):
        return RustTokenizer.from_buffer(data), None


def _without_special_pieces(data: bytes, where: str) -> bytes:
    """Make special tokens improbable in a unigram model, so that no text becomes one."""
    document = _parsed(data, where)
    match document:
        case {"added_tokens": list(added), "model": {"type": "Unigram", "vocab": list(vocab)}}:
            names = (t.get("content") for t in added if isinstance(t, dict) and t.get("special") is True)
            special = {name for name in names if isinstance(name, str)}
            for piece in vocab:
                if isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str) and piece[0] in special:
                    piece[1] = IMPROBABLE
            return json.dumps(document, ensure_ascii=False).encode()
    return data


def _parsed(data: bytes, where: str) -> Any:
    return parse_json(data, Path(where), max_values=MAX_VALUES)


def _ids_of_added(document: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """Assign ids to added tokens as the library does: the model's id or the next free one, ignoring the file's."""
    added_ids: dict[str, int] = {}
    following = len(ids)
    listed = document.get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        name = token.get("content") if isinstance(token, dict) else None
        if isinstance(name, str) and name and name not in added_ids:
            added_ids[name] = ids.get(name, following)
            following += name not in ids
    return added_ids


def _vocab(model: Mapping[str, Any], where: str) -> dict[str, int]:
    """Validate and return the vocabulary of a BPE model."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        raise FormatError(f"{where}: model: expected a vocab, found {type(vocab).__name__}")
    for name, i in vocab.items():
        if type(i) is not int or i < 0:
            raise FormatError(f"{where}: vocab: expected an id, found {quoted(i)} for {quoted(name)}")
    if (size := max(vocab.values(), default=-1) + 1) > MAX_TOKENS:
        raise FormatError(f"{where}: expected 1 to {MAX_TOKENS} token ids, found {size}")
    if len(set(vocab.values())) < len(vocab):
        first: dict[int, str] = {}
        name, i = next((name, i) for name, i in vocab.items() if first.setdefault(i, name) != name)
        raise FormatError(f"{where}: vocab: {quoted(first[i])} and {quoted(name)} have the same id, {i}")
    return vocab


def _sides(model: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Split merges into left and right tokens; a merge is a pair or a space-separated string."""
    merges = model["merges"]
    if not isinstance(merges, list):
        raise FormatError(f"{where}: model: expected merges, found {type(merges).__name__}")
    if all(isinstance(merge, str) for merge in merges):
        merges = [merge.split(" ") for merge in merges if not merge.startswith("#version")]  # a line of merges.txt
    for i, merge in enumerate(merges):
        if not (type(merge) is list and len(merge) == 2 and type(merge[0]) is str and type(merge[1]) is str):
            raise FormatError(f"{where}: merges: expected two tokens, found {quoted(merge)} at {i}")
    return [merge[0] for merge in merges], [merge[1] for merge in merges]


def _check_charsmaps(data: bytes, where: str) -> None:
    """Validate the charsmaps in a tokenizer.json before the library reads them."""
    for match in _CHARSMAP.finditer(data):
        try:
            charsmap = base64.b64decode(json.loads(match[1]), validate=True)
        except ValueError as error:
            raise FormatError(f"{where}: precompiled_charsmap: not base64") from error
        check_charsmap(charsmap, f"{where}: precompiled_charsmap")


# -- tokenizer_config.json -------------------------------------------------------------------------------------------
def sidecar_config(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json and chat_template.jinja from the folder of a tokenizer.json."""
    config: dict[str, Any] = {}
    config_path = path.with_name("tokenizer_config.json")
    if os.path.exists(config_path):
        document = parse_json(open_bytes(config_path).view, config_path)
        if not isinstance(document, dict):
            raise broken(config_path, "tokenizer_config.json", expected="an object", actual=type(document).__name__)
        config = document
    template = path.with_name("chat_template.jinja")
    if os.path.exists(template):
        try:
            config["chat_template"] = str(open_bytes(template).view, "utf-8")
        except UnicodeDecodeError as error:
            raise broken(template, "not UTF-8", at=error.start) from error
    return config


def special_of_config(rust: RustTokenizer, bpe: Bpe | None, config: Mapping[str, Any], where: str) -> SpecialIds:
    ids: dict[str, int | None] = {}
    for role, _ in SpecialIds().items():
        key = f"{role}_token"
        named = config.get(key)
        if isinstance(named, Mapping):
            named = named.get("content")
        if named is None:
            continue
        if not isinstance(named, str):
            raise FormatError(f"{where}: {key}: expected a token, found {quoted(named)}")
        with rust_call(where):
            ids[role] = rust.token_to_id(named)
        if ids[role] is None and bpe is not None:
            ids[role] = bpe.id(named)
        if ids[role] is None and role in ("bos", "eos"):
            raise FormatError(f"{where}: {key}: the vocabulary has no {quoted(named)}")
    return SpecialIds(**ids)


def template_of_config(config: Mapping[str, Any], where: str) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name; those not called "default" are for tools and retrieval
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise FormatError(f"{where}: chat_template: expected a string, found {type(template).__name__}")
    return template
